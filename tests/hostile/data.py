"""Data that are not what the model takes them for: refused, or sampled as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import zarr
from pytensor.sparse import structured_dot
from scipy import sparse

from pymc_sgmcmc import SGLDCV
from pymc_sgmcmc.sources import open_rows
from tests.hostile.case import case
from tests.hostile.law import Law, Run
from tests.hostile.shared import (
    PRIOR_SD,
    QUICK,
    ROWS,
    gaussian,
    line,
    line_data,
    model_case,
    nuts_run_of,
    run_of,
)

X, Y = line_data()
x = X[:, 1]
COUNTS = np.random.default_rng(5).poisson(np.exp(0.3 + 0.5 * x))
MANY = 1_300_000
"""Rows of four columns beyond which checks on all data were left out for their cost."""


def with_entry(values: Any, entry: Any, row: int = 17) -> np.ndarray:
    """A copy with another value in one row."""
    out = np.array(values)
    out[row, ...] = entry
    return out


def generalised(family: Any, observed: Any, **settings: Any) -> Run:
    """A default run on a regression with one coefficient a column."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, PRIOR_SD, shape=2)
        family("y", X @ beta, observed)
    return nuts_run_of(model, **settings)


def bernoulli(name: str, eta: Any, observed: Any) -> None:
    pm.Bernoulli(name, logit_p=eta, observed=observed)


def poisson(name: str, eta: Any, observed: Any) -> None:
    pm.Poisson(name, pm.math.exp(eta), observed=observed)


def gamma(name: str, eta: Any, observed: Any) -> None:
    pm.Gamma(name, alpha=2.0, beta=pm.math.exp(eta), observed=observed)


def groups(codes: Any, count: int = 5, **settings: Any) -> Run:
    """A default run on a table of effects, indexed by codes."""
    with pm.Model() as model:
        effect = pm.Normal("effect", 0, PRIOR_SD, shape=count)
        pm.Normal("y", effect[codes], 1.0, observed=np.resize(Y, len(codes)))
    wrapped = np.eye(count)[np.asarray(codes) % count]
    return run_of(model, lambda: gaussian(wrapped, np.resize(Y, len(codes))), **settings)


CODES = np.arange(ROWS) % 5


# --- Entries that are no numbers ------------------------------------------------------------------


@case("NaN.*row 17|row 17.*NaN")
def nan_in_a_predictor():
    return run_of(line(with_entry(X, np.nan), Y))


@case("infinite.*row 17")
def infinity_in_a_predictor():
    return run_of(line(with_entry(X, np.inf), Y))


@case("infinite.*row 17")
def infinity_in_the_outcome():
    return run_of(line(X, with_entry(Y, -np.inf)))


@model_case("row 17|nan")
def nan_in_a_data_variable():
    beta = pm.Normal("beta", 0, 2, shape=2)
    column = pm.Data("column", with_entry(X, np.nan))
    pm.Normal("y", column @ beta, 1.0, observed=Y)


@case("NaN|infinite")
def nan_with_a_given_step_size():
    return run_of(line(with_entry(X, np.nan), Y), step_size=1e-3, preconditioner="identity")


@model_case("`scale`|NaN|finite")
def nan_in_a_constant_of_the_model():
    scale = pm.Data("scale", np.array([1.0, np.nan]))
    beta = pm.Normal("beta", 0, scale, shape=2)
    pm.Normal("y", X @ beta, 1.0, observed=Y)


# --- Codes of groups ------------------------------------------------------------------------------


@case("row 17|code|index|group")
def code_above_the_table():
    return groups(with_entry(CODES, 5))


@case("row 17|code|index|group")
def code_above_the_table_with_a_given_step_size():
    return groups(with_entry(CODES, 5), step_size=1e-3, preconditioner="identity", batch_size=20)


@case("row 17|code|index|group")
def code_far_below_zero():
    return groups(with_entry(CODES, -7), step_size=1e-3, preconditioner="identity", batch_size=20)


@case("code|index|group", slow=True)
def code_below_zero_counts_from_the_end():
    return groups(with_entry(CODES, -1))


@case("row 1200000|code|index|group", slow=True)
def code_above_the_table_of_many_rows_on_numba():
    rng = np.random.default_rng(0)
    wide, codes = rng.normal(size=(MANY, 4)), with_entry(np.arange(MANY) % 50, 50, 1_200_000)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=4)
        effect = pm.Normal("effect", 0, 1, shape=50)
        pm.Normal("y", wide @ beta + effect[codes], 1.0, observed=rng.normal(size=MANY))
    return run_of(
        model,
        step_size=1e-7,
        preconditioner="identity",
        batch_size=100,
        compile_kwargs={"mode": "NUMBA"},
    )


@case("row 1200000|code|index|group", slow=True)
def code_above_the_table_of_many_rows_by_default():
    rng = np.random.default_rng(0)
    wide, codes = rng.normal(size=(MANY, 4)), with_entry(np.arange(MANY) % 50, 50, 1_200_000)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=4)
        effect = pm.Normal("effect", 0, 1, shape=50)
        pm.Normal("y", wide @ beta + effect[codes], 1.0, observed=rng.normal(size=MANY))
    return run_of(model)


@case("type|integer|index|code")
def codes_as_floats():
    return groups(CODES.astype(float))


@case("row|code|index|group")
def code_of_two_tables_at_once():
    with pm.Model() as model:
        effect = pm.Normal("effect", 0, 1, shape=(5, 4))
        pm.Normal("y", effect[CODES, with_entry(CODES % 4, 4)], 1.0, observed=Y)
    return run_of(model, step_size=1e-3, preconditioner="identity", batch_size=20)


@case(slow=True)
def group_without_rows():
    return groups(CODES, 6)


# --- Outcomes outside the support -----------------------------------------------------------------


@case("`y`|outcome|support|row")
def bernoulli_of_two():
    return generalised(bernoulli, with_entry((Y > 0).astype(int), 2))


@case("`y`|outcome|support|row", slow=True)
def bernoulli_of_minus_one():
    return generalised(bernoulli, np.where(Y > 0, 1, -1))


@case("`y`|outcome|support|row", slow=True)
def bernoulli_of_a_half():
    return generalised(bernoulli, with_entry((Y > 0).astype(float), 0.5))


@case("`y`|outcome|support|row")
def bernoulli_of_two_with_a_given_step_size():
    return generalised(
        bernoulli,
        with_entry((Y > 0).astype(int), 2),
        step_size=1e-3,
        preconditioner="identity",
        batch_size=20,
    )


@case("`y`|outcome|support|row")
def negative_count():
    return generalised(poisson, with_entry(COUNTS, -1))


@case("`y`|outcome|support|row")
def negative_count_with_a_given_step_size():
    return generalised(
        poisson, with_entry(COUNTS, -1), step_size=1e-3, preconditioner="identity", batch_size=20
    )


@case("`y`|outcome|support|row", slow=True)
def count_that_is_no_whole_number():
    return generalised(poisson, COUNTS + 0.5)


@case("`y`|outcome|support|row|infinite", slow=True)
def zero_in_a_gamma():
    return generalised(gamma, with_entry(COUNTS + 1.0, 0.0))


@case("`y`|outcome|support|row", slow=True)
def negative_in_a_gamma():
    return generalised(gamma, with_entry(COUNTS + 1.0, -1.0))


@case("`y`|outcome|support|row", slow=True)
def zero_in_a_log_normal():
    return generalised(
        lambda name, eta, y: pm.LogNormal(name, eta, observed=y), with_entry(COUNTS + 1.0, 0.0)
    )


@case("`y`|outcome|support|row", slow=True)
def one_in_a_beta():
    return generalised(
        lambda name, eta, y: pm.Beta(name, mu=pm.math.sigmoid(eta), nu=5.0, observed=y),
        with_entry(np.full(ROWS, 0.4), 1.0),
    )


@model_case("`y`|outcome|support|row", slow=True)
def outside_of_a_uniform():
    width = pm.Uniform("width", 0, 3)
    pm.Uniform("y", 0, width, observed=with_entry(np.abs(np.sin(Y)), 4.0))


@case("`y`|outcome|support|row", slow=True)
def more_successes_than_trials():
    return generalised(
        lambda name, eta, y: pm.Binomial(name, 3, logit_p=eta, observed=y),
        with_entry(COUNTS.clip(0, 3), 4),
    )


@model_case("`y`|outcome|support|row", slow=True)
def category_above_the_last():
    beta = pm.Normal("beta", 0, 1, shape=(2, 3))
    pm.Categorical("y", logit_p=X @ beta, observed=with_entry(CODES % 3, 3))


@model_case("mode|rows|gradient|finite|support", slow=True)
def support_that_depends_on_a_parameter():
    width = pm.HalfNormal("width", 3)
    pm.Uniform("y", 0, width, observed=np.abs(np.sin(Y)))


# --- Types ----------------------------------------------------------------------------------------


@case(slow=True)
def predictors_in_half_precision():
    half = X.astype(np.float16)
    return run_of(line(half, Y), lambda: gaussian(half, Y))


@case(slow=True)
def predictors_in_extended_precision():
    return run_of(line(X.astype(np.longdouble), Y), gaussian)


@case(must_agree=True, slow=True)
def predictors_as_small_integers():
    small = np.column_stack([np.ones(ROWS), np.arange(ROWS) % 100]).astype(np.int8)
    return run_of(line(small, Y), lambda: gaussian(small, Y))


@case(slow=True)
def squares_of_small_integers_in_the_graph():
    small = (np.arange(ROWS) % 100).astype(np.int8)
    with pm.Model() as model:
        slope = pm.Normal("slope", 0, 1)
        column = pm.Data("column", small)
        pm.Normal("y", slope * (column * column), 1.0, observed=Y)
    squares = small[:, None].astype(float) ** 2  # `pm.Data` takes integers of 64 bits
    return run_of(model, lambda: gaussian(squares, Y, prior_sd=1.0))


@case(must_agree=True, slow=True)
def truth_values_as_normal_outcomes():
    return run_of(line(X, Y > 0), lambda: gaussian(X, Y > 0))


@case(must_agree=True, slow=True)
def arrays_that_are_read_only_and_in_column_order():
    design = np.asfortranarray(X)
    design.flags.writeable = False
    return run_of(line(design, Y[::-1][::-1]), gaussian)


@case("`y`|size|large|mode|finite|overflow", slow=True)
def counts_near_the_largest_integer():
    return generalised(poisson, with_entry(COUNTS, 2**62))


# --- Columns that are hard ------------------------------------------------------------------------


@case(slow=True)
def two_constant_columns():
    doubled = np.column_stack([np.ones(ROWS), np.ones(ROWS)])
    return run_of(line(doubled, Y), lambda: gaussian(doubled, Y))


@case(slow=True)
def collinear_columns():
    wide = np.column_stack([X, 2 * x, x - 1])
    return run_of(line(wide, Y), lambda: gaussian(wide, Y))


@case(slow=True)
def column_of_zeros():
    wide = np.column_stack([X, np.zeros(ROWS)])
    return run_of(line(wide, Y), lambda: gaussian(wide, Y))


@case(slow=True)
def column_in_units_of_a_trillionth():
    scaled = X * [1, 1e-12]
    return run_of(line(scaled, Y), lambda: gaussian(scaled, Y))


@case(slow=True)
def column_in_units_of_a_trillion():
    scaled = X * [1, 1e12]
    return run_of(line(scaled, Y), lambda: gaussian(scaled, Y))


@case(slow=True)
def columns_of_both_units():
    scaled = np.column_stack([X * [1, 1e12], 1e-12 * np.cos(np.arange(ROWS))])
    return run_of(line(scaled, Y), lambda: gaussian(scaled, Y))


@case(slow=True)
def column_of_years():
    years = np.column_stack([np.ones(ROWS), 1990.0 + np.arange(ROWS) % 30])
    return run_of(line(years, Y), lambda: gaussian(years, Y))


@case(slow=True)
def one_huge_predictor():
    out = X.copy()
    out[17, 1] = 1e6
    return run_of(line(out, Y), lambda: gaussian(out, Y))


@case(slow=True)
def one_huge_outcome():
    far = with_entry(Y, 1e8)
    return run_of(line(X, far), lambda: gaussian(X, far))


@case(slow=True)
def rare_level_of_a_factor():
    rows = 10_000
    rng = np.random.default_rng(6)
    rare = np.column_stack([np.ones(rows), np.arange(rows) % 1667 == 0]).astype(float)
    y = rare @ [0.3, 2.0] + rng.normal(size=rows)
    return run_of(line(rare, y), lambda: gaussian(rare, y))


@model_case(slow=True, run=nuts_run_of)
def separable_outcomes():
    beta = pm.Normal("beta", 0, 10, shape=2)
    pm.Bernoulli("y", logit_p=X @ beta, observed=x > 0)


@model_case(slow=True, run=nuts_run_of)
def outcomes_all_alike():
    beta = pm.Normal("beta", 0, 2, shape=2)
    pm.Bernoulli("y", logit_p=X @ beta, observed=np.zeros(ROWS, dtype=int))


@model_case(slow=True, expected=lambda: gaussian(prior_mean=1000.0, prior_sd=0.1))
def prior_against_the_data():
    beta = pm.Normal("beta", 1000.0, 0.1, shape=2)
    pm.Normal("y", X @ beta, 1.0, observed=Y)


@model_case(slow=True)
def residuals_of_zero():
    beta = pm.Normal("beta", 0, 2, shape=2)
    sigma = pm.HalfNormal("sigma", 1)
    pm.Normal("y", X @ beta, sigma, observed=X @ [0.5, -1.0])


@case("weight|`y`|rows", slow=True)
def rows_of_weight_zero():
    weight = (np.arange(ROWS) % 2).astype(float)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, PRIOR_SD, shape=2)
        density = pm.logp(pm.Normal.dist(X @ beta, 1.0), Y)
        pm.Potential("likelihood", weight * density)
        pm.Normal("y", 0.0, 1.0, observed=Y)
    kept = weight > 0
    return run_of(model, lambda: gaussian(X[kept], Y[kept]))


@case(slow=True)
def single_precision():
    import pytensor

    with pytensor.config.change_flags(floatX="float32"):
        model = line(X.astype("float32"), Y.astype("float32"))
        with model:
            step = SGLDCV(compile_kwargs=QUICK)
        run = Run(model, step, gaussian)
        return run.sample()


@case(slow=True)
def three_rows_only():
    few = slice(0, 3)
    return run_of(line(X[few], Y[few]), lambda: gaussian(X[few], Y[few]))


@case(slow=True)
def outcomes_in_units_of_a_trillion():
    far = 1e12 * Y
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1e13, shape=2)
        pm.Normal("y", X @ beta, 1e12, observed=far)

    def expected():
        law = gaussian(X, Y, prior_sd=10.0)
        return Law(1e12 * law.mean, 1e12 * law.sd)

    return run_of(model, expected)


# --- Missing values in rows of a source -----------------------------------------------------------


def from_rows(y: Any) -> Run:
    """A default run on rows of a source."""
    rows = open_rows({"x": x, "y": y})
    with pm.Model() as model:
        x_head, y_head = rows.head("x", "y")
        pm.Normal("outcome", pm.Normal("slope", 0, PRIOR_SD) * x_head, 1.0, observed=y_head)
    return run_of(model, rows=rows)


@case("`y`.*missing.*row 17")
def masked_column_of_rows():
    return from_rows(np.ma.masked_array(with_entry(Y, -99.0), np.arange(ROWS) == 17))


@case("`y`.*missing.*row 17")
def none_in_a_column_of_rows():
    return from_rows(with_entry(Y.astype(object), None))


@case("`y`.*missing.*row 17")
def fill_values_of_zarr():
    group = zarr.open_group({}, mode="w")
    group.create_array("x", data=x)
    group.create_array("y", data=with_entry(Y, -99.0), fill_value=-99.0)
    return open_rows(group).read(0, ROWS)


@case("row 17.*1\\.?e\\+200")
def number_whose_square_is_infinite():
    return run_of(line(with_entry(X, 1e200), Y))


@model_case("`b`.*sigma > 0.*-1")
def negative_standard_deviation_of_a_prior():
    pm.Normal("y", pm.Normal("b", 0, -1) * x, 1.0, observed=Y)


@case("sparse")
def large_sparse_design():
    count = 20_000
    with pm.Model() as model:
        effect = pm.Normal("effect", shape=(5, 1))
        design = sparse.csr_matrix(np.eye(5)[np.arange(count) % 5])
        pm.Normal("y", structured_dot(design, effect)[:, 0], 1.0, observed=np.resize(Y, count))
    return run_of(model)
