"""Models and data that change after the step method, which has its own copies, was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt

from pymc_sgmcmc import SGLDCV, bias_report, gradients
from tests.hostile.case import add, case
from tests.hostile.law import Law, Run
from tests.hostile.shared import QUICK, ROWS, gaussian, line, line_data, shared_line

X, Y = line_data()
CODES = np.arange(ROWS) % 2
OFFSETS = np.array([0.0, 1.0])


def adjustable() -> pm.Model:
    """A regression in which all numbers are `pm.Data`."""
    with pm.Model(coords={"feature": ["intercept", "slope"], "row": range(ROWS)}) as model:
        columns = pm.Data("columns", X, dims=("row", "feature"))
        outcome = pm.Data("outcome", Y, dims="row")
        codes = pm.Data("codes", CODES, dims="row")
        table = pm.Data("table", OFFSETS)
        prior_mean, prior_sd = pm.Data("prior_mean", np.zeros(2)), pm.Data("prior_sd", 2.0)
        sigma, factor = pm.Data("sigma", 1.0), pm.Data("factor", 1.0)
        beta = pm.Normal("beta", prior_mean, prior_sd, dims="feature")
        mu = factor * (columns @ beta) + table[codes]
        pm.Normal("y", mu, sigma, observed=outcome, dims="row")
    return model


def expected(
    columns=X,
    outcome=Y,
    codes=CODES,
    table=OFFSETS,
    prior_mean=0.0,
    prior_sd=2.0,
    sigma=1.0,
    factor=1.0,
) -> Law:
    """Exact posterior of `adjustable` with other data."""
    return gaussian(factor * columns, outcome - table[codes], sigma, prior_mean, prior_sd)


def changed(change: Callable[[], Any], law: Callable[[], Law], **settings: Any) -> Run:
    """A run of a step method that was made before a change in its model."""
    model = adjustable()
    with model:
        step = SGLDCV(compile_kwargs=QUICK, **settings)
        change()
    return Run(model, step, law)


def after_set_data(**values: Any) -> Run:
    """A run of a step method that was made before data variables got other values."""
    coords = {"row": range(len(values["outcome"]))} if "outcome" in values else None
    return changed(lambda: pm.set_data(values, coords=coords), lambda: expected(**values))


for _name, _values in {
    "predictors": {"columns": 2 * X},
    "outcomes": {"outcome": Y + 1},
    "predictors_in_one_entry": {"columns": np.vstack([X[:-1], X[-1:] + 5])},
    "codes": {"codes": 1 - CODES},
    "offset_table": {"table": np.array([0.0, 5.0])},
    "prior_mean": {"prior_mean": np.array([3.0, 3.0])},
    "prior_sd": {"prior_sd": 0.01},
    "sigma": {"sigma": 30.0},
    "factor": {"factor": 3.0},
    "fewer_rows": {"columns": X[:50], "outcome": Y[:50], "codes": CODES[:50]},
    "more_rows": {
        "columns": np.tile(X, (2, 1)),
        "outcome": np.tile(Y, 2),
        "codes": np.tile(CODES, 2),
    },
}.items():
    add(
        f"changes.{_name}",
        lambda values=_values: after_set_data(**values),
        "|".join(_values),
        slow=_name not in ("outcomes", "prior_mean", "sigma", "offset_table"),
    )


@case(must_agree=True, slow=True)
def the_same_values_again():
    return after_set_data(columns=X.copy(), sigma=1.0)


@case("columns", slow=True)
def predictors_with_a_given_step_size():
    return changed(
        lambda: pm.set_data({"columns": 2 * X}),
        lambda: expected(columns=2 * X),
        step_size=1e-3,
        preconditioner="identity",
        batch_size=20,
    )


@case("sigma")
def sigma_between_two_runs_of_one_step_method():
    run = changed(lambda: None, expected)
    run.trace()
    with run.model:
        pm.set_data({"sigma": 30.0})
    return Run(run.model, run.step, lambda: expected(sigma=30.0))


@case("scale|`sd`")
def shared_variable_that_is_no_data_variable():
    scale = pytensor.shared(1.0, "scale")
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=2)
        pm.Normal("y", X @ beta, scale, observed=Y)
        step = SGLDCV(compile_kwargs=QUICK)
    scale.set_value(30.0)
    return Run(model, step, lambda: gaussian(sigma=30.0))


@case("columns")
def shared_array_changed_in_place():
    values = X.copy()
    columns = pytensor.shared(values, "columns", borrow=True)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=2)
        pm.Normal("y", columns @ beta, 1.0, observed=Y)
        step = SGLDCV(compile_kwargs=QUICK)
    values *= 2
    return Run(model, step, lambda: gaussian(2 * X))


@case(slow=True)
def array_changed_in_place_after_the_model_was_made():
    values = X.copy()
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=2)
        pm.Normal("y", pt.as_tensor(values.copy()) @ beta, 1.0, observed=Y)
        step = SGLDCV(compile_kwargs=QUICK)
    values *= 2
    return Run(model, step, gaussian)


@case("model|`more`|likelihood")
def likelihood_added():
    model = line()
    with model:
        step = SGLDCV(compile_kwargs=QUICK)
        pm.Normal("more", X @ model["beta"], 0.1, observed=Y + 1)

    def both():
        columns, outcomes = np.concatenate([X, X]), np.concatenate([Y, Y + 1])
        return gaussian(columns, outcomes, np.repeat([1.0, 0.1], ROWS))

    return Run(model, step, both)


@case("model|`tied`|potential")
def potential_added():
    model = line()
    with model:
        step = SGLDCV(compile_kwargs=QUICK)
        pm.Potential("tied", -500.0 * (model["beta"] - 3).sum() ** 2)

    def tied():
        precision = X.T @ X + np.eye(2) / 4 + 1000 * np.ones((2, 2))
        covariance = np.linalg.inv(precision)
        mean = covariance @ (X.T @ Y + 1000 * 6 * np.ones(2))
        return Law(mean, np.sqrt(np.diag(covariance)))

    return Run(model, step, tied)


@case("model|`gamma`", slow=True)
def variable_added():
    model = line()
    with model:
        step = SGLDCV(compile_kwargs=QUICK)
        gamma = pm.Normal("gamma", 0, 0.01)
        pm.Normal("more", gamma + model["beta"][0], 0.01, observed=np.array([1.0, 1.0]))

    def joint():
        columns = np.concatenate([np.column_stack([X, np.zeros(ROWS)]), [[1, 0, 1], [1, 0, 1]]])
        sigma = np.repeat([1.0, 0.01], [ROWS, 2])
        return gaussian(columns, [*Y, 1.0, 1.0], sigma, prior_sd=[2.0, 2.0, 0.01])

    return Run(model, step, joint)


@case("model|beta")
def step_method_of_another_model():
    with line(X, Y):
        step = SGLDCV(compile_kwargs=QUICK)
    return Run(line(X, Y + 5), step, lambda: gaussian(X, Y + 5))


@case("model|vars|free")
def step_method_of_a_model_with_other_variables():
    with shared_line():
        step = SGLDCV(compile_kwargs=QUICK)
    with pm.Model() as other:
        slope = pm.Normal("slope", 0, 2)
        pm.Normal("y", slope * X[:, 1], 1.0, observed=Y)
    return Run(other, step, lambda: gaussian(X[:, 1:]))


@case("model|vars|beta", slow=True)
def step_method_of_a_model_before_an_intervention():
    model = adjustable()
    with model:
        step = SGLDCV(compile_kwargs=QUICK)
    other = pm.do(model, {"sigma": 30.0})
    return Run(other, step, lambda: expected(sigma=30.0))


@case(must_agree=True, slow=True)
def one_step_method_for_two_runs():
    run = changed(lambda: None, expected)
    run.trace()
    return run


@case("coords|feature|dim", slow=True)
def names_of_a_dimension():
    model = adjustable()
    with model:
        step = SGLDCV(compile_kwargs=QUICK)
        model.set_dim("feature", 2, coord_values=("a", "b"))
    return Run(model, step, expected)


@case("columns|sigma|data", slow=True)
def data_before_the_rerun_of_a_bias_report():
    run = changed(lambda: None, expected, integrator="euler")
    idata = run.trace()
    with run.model:
        pm.set_data({"sigma": 3.0})
        report = bias_report(idata, rerun=True, random_seed=1, compile_kwargs=QUICK)
    return report.attrs["verdict"]


@case("columns|sigma|data", slow=True)
def data_before_gradients_are_computed():
    run = changed(lambda: None, expected)
    idata = run.trace()
    with run.model:
        pm.set_data({"sigma": 3.0})
    gradients(idata.isel(draw=slice(10)), run.model)
