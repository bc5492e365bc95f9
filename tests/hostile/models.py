"""Models that cannot be split by rows, or hardly: each is refused, or sampled as it stands."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pymc as pm
import pymc.dims as pmd
import pytensor
import pytensor.sparse
import pytensor.tensor as pt
import xarray as xr
from pytensor.compile.ops import as_op
from scipy import sparse

from pymc_sgmcmc import fit_marginal, marginalize
from tests.hostile.case import case
from tests.hostile.law import Law
from tests.hostile.shared import (
    PRIOR_SD,
    ROWS,
    gaussian,
    line,
    line_data,
    model_case,
    nuts_run_of,
    run_of,
    shared_line,
)

X, Y = line_data()
x = X[:, 1]


# --- Likelihoods that are no sum over rows --------------------------------------------------------


@model_case("`y`.*not a sum over|rows")
def autoregression():
    rho = pm.Normal("rho", 0, 1, shape=1)
    pm.AR("y", rho, sigma=1.0, init_dist=pm.Normal.dist(0, 1), observed=Y)


@model_case("`y`.*not a sum over|rows")
def random_walk():
    drift = pm.Normal("drift")
    pm.GaussianRandomWalk("y", mu=drift, init_dist=pm.Normal.dist(0, 1), observed=Y)


@model_case("`y`.*not a sum over|rows")
def cumulative_sum():
    slope = pm.Normal("slope")
    pm.Normal("y", pt.cumsum(slope * x), 1.0, observed=Y)


@model_case("`y`.*not a sum over|rows", slow=True)
def marginal_gaussian_process():
    length = pm.HalfNormal("length")
    process = pm.gp.Marginal(cov_func=pm.gp.cov.ExpQuad(1, length))
    process.marginal_likelihood("y", X=x[:60, None], y=Y[:60], sigma=0.5)


@case("one element a row|local latent|row", slow=True)
def latent_gaussian_process():
    with pm.Model() as model:
        process = pm.gp.Latent(cov_func=pm.gp.cov.ExpQuad(1, 1.0))
        f = process.prior("f", X=x[:60, None])  # a matrix with a row for each, times a vector
        pm.Normal("y", f, 0.5, observed=Y[:60])
    apart = x[:60, None] - x[:60]
    root = np.linalg.cholesky(np.exp(-0.5 * apart**2) + 1e-6 * np.eye(60))
    return run_of(model, lambda: gaussian(root, Y[:60], 0.5, prior_sd=1.0))


@case("`y`.*not a sum over|rows")
def column_standardised_in_the_graph():
    with pm.Model() as model:
        column = pm.Data("column", x)
        slope = pm.Normal("slope")
        pm.Normal("y", slope * (column - column.mean()) / column.std(), 1.0, observed=Y)
    return run_of(model, batch_size=20)


@model_case("`y`.*not a sum over|rows")
def softmax_over_rows():
    slope = pm.Normal("slope")
    pm.Normal("y", ROWS * pm.math.softmax(slope * x), 1.0, observed=Y)


@case("`y`.*not a sum over|rows")
def residuals_correlated_over_rows():
    covariance = np.eye(40) + 0.5
    with pm.Model() as model:
        slope = pm.Normal("slope")
        pm.MvNormal("y", slope * x[:40], covariance, observed=Y[:40])
    return run_of(model)


@model_case("row|`y`")
def lagged_outcome_sliced_in_the_graph():
    series = pm.Data("series", Y)
    rho = pm.Normal("rho")
    pm.Normal("y", rho * series[:-1], 1.0, observed=series[1:])


@model_case("`y`.*not a sum over|rows|scan")
def recursion_by_scan():
    rho = pm.Normal("rho", 0, 0.5)
    states = pytensor.scan(
        lambda value, before, rho: rho * before + value,
        sequences=[pt.as_tensor(Y[:50])],
        outputs_info=[pt.zeros(())],
        non_sequences=[rho],
        return_updates=False,
    )
    pm.Normal("y", states, 1.0, observed=Y[:50])


@model_case("`y`.*not a sum over|rows|shape")
def outcomes_as_a_column_against_a_vector():
    beta = pm.Normal("beta", 0, 2, shape=2)
    pm.Normal("y", X @ beta, 1.0, observed=Y[:, None])


@model_case("row", expected=lambda: gaussian())
def rows_on_the_second_axis():
    beta = pm.Normal("beta", 0, 2, shape=(1, 2))
    pm.Normal("y", beta @ X.T, 1.0, observed=Y[None])


# --- Variables ------------------------------------------------------------------------------------


@model_case("`z`.*discrete|discrete.*`z`|continuous")
def discrete_variable_a_row():
    mu = pm.Normal("mu", 0, 2, shape=2)
    z = pm.Bernoulli("z", 0.5, shape=ROWS)
    pm.Normal("y", mu[z], 1.0, observed=Y)


@model_case("`k`.*discrete|continuous")
def discrete_variable():
    k = pm.DiscreteUniform("k", 1, 5)
    slope = pm.Normal("slope")
    pm.StudentT("y", nu=k, mu=slope * x, sigma=1, observed=Y)


@model_case("no observed")
def no_observed_variable():
    pm.Normal("beta")


@model_case("no free")
def no_free_variable():
    pm.Normal("y", 0, 1, observed=Y)


@model_case("`y`.*missing|NaN")
def missing_outcomes():
    beta = pm.Normal("beta", 0, 2, shape=2)
    pm.Normal("y", X @ beta, 1.0, observed=np.where(np.arange(ROWS) == 3, np.nan, Y))


@case("`b`|`y`|dims")
def labelled_tensors():
    with pm.Model(coords={"row": range(ROWS)}) as model:
        b = pmd.Normal("b")
        column = pmd.Data("column", x, dims=("row",))
        pmd.Normal("y", b * column, 1.0, observed=xr.DataArray(Y, dims="row"))
    return run_of(model)


@model_case("local latent|one element a row")
def latent_variable_a_row():
    u = pm.Normal("u", 0, 1, shape=ROWS)
    pm.Normal("y", u, 0.5, observed=Y)


@model_case("local latent|one element a row")
def error_in_a_predictor():
    slope = pm.Normal("slope")
    true = pm.Normal("true", 0, 1, shape=ROWS)
    pm.Normal("column", true, 0.2, observed=x)
    pm.Normal("y", slope * true, 1.0, observed=Y)


@model_case()
def as_many_groups_as_rows():
    effect = pm.Normal("effect", 0, 1, shape=ROWS)
    pm.Normal("y", effect[np.arange(ROWS)[::-1].copy()], 0.5, observed=Y)


def mean_of_effects(codes):
    """Exact law of the common mean where effects have the variance 1 and records 0.25."""
    sizes, totals = np.bincount(codes), np.bincount(codes, Y)
    sizes, totals = sizes[sizes > 0], totals[sizes > 0]
    weights = 1 / (1 + 0.25 / sizes)
    precision = 1 + weights.sum()
    mean = (weights * totals / sizes).sum() / precision
    return Law(np.array([mean]), np.array([precision**-0.5]))


@case(must_agree=True, slow=True)
def groups_without_records():
    codes = np.arange(ROWS) % 30
    with pm.Model() as model:
        effect = pm.Normal("effect", 0, 1, shape=40)
        pm.Normal("y", pm.Normal("mean") + effect[codes], 0.5, observed=Y)
    return run_of(marginalize(model, "effect"), lambda: mean_of_effects(codes))


@case(must_agree=True, slow=True)
def cells_of_two_codes():
    row, column = np.arange(ROWS) % 10, np.arange(ROWS) % 6
    with pm.Model() as model:
        effect = pm.Normal("effect", 0, 1, shape=(10, 6))
        pm.Normal("y", pm.Normal("mean") + effect[row, column], 0.5, observed=Y)
    return run_of(marginalize(model, "effect"), lambda: mean_of_effects(6 * row + column))


@case("several factors.*name them too")
def maximum_of_crossed_effects():
    with pm.Model() as model:
        a, b = pm.Normal("a", shape=20), pm.Normal("b", 0, pm.HalfNormal("sd"), shape=8)
        pm.Normal("y", a[np.arange(ROWS) % 20] + b[np.arange(ROWS) // 50], 1.0, observed=Y)
    return fit_marginal(model, "a")


@case("but the prior joins some.*use `sample`")
def maximum_of_a_random_walk_beside_a_factor():
    with pm.Model() as model:
        walk = pm.GaussianRandomWalk(
            "walk", 0, pm.HalfNormal("step"), init_dist=pm.Normal.dist(), shape=8
        )
        b = pm.Normal("b", 0, pm.HalfNormal("sd"), shape=20)
        pm.Normal("y", walk[np.arange(ROWS) % 8] + b[np.arange(ROWS) % 20], 1.0, observed=Y)
    return fit_marginal(model, ["walk", "b"])


@case(slow=True)
def as_many_columns_as_rows():
    square = np.random.default_rng(1).normal(size=(30, 30))
    return run_of(line(square, Y[:30]), lambda: gaussian(square, Y[:30]))


@model_case("improper|flat|`b`|determine")
def flat_prior_on_what_no_data_say():
    b = pm.Flat("b", shape=2)
    pm.Normal("y", b[0] * x + 0.0 * b[1], 1.0, observed=Y)


@model_case("improper|flat|prior|`beta`")
def flat_prior_on_collinear_columns():
    beta = pm.Flat("beta", shape=2)
    pm.Normal("y", np.column_stack([x, x]) @ beta, 1.0, observed=Y)


@model_case("improper|flat|separat|prior|mode", slow=True)
def separable_outcomes_under_a_flat_prior():
    beta = pm.Flat("beta", shape=2)
    pm.Bernoulli("y", logit_p=X @ beta, observed=x > 0)


@model_case("improper|flat|prior|mode", slow=True, run=nuts_run_of)
def improper_prior_of_a_scale():
    scale = pm.HalfFlat("scale")
    u = pm.Normal("u", 0, scale, shape=4)
    pm.Normal("y", u[np.arange(ROWS) % 4], 1.0, observed=Y - Y.mean())


# --- Minibatches ----------------------------------------------------------------------------------


@model_case("separate `pm.Minibatch`|single call")
def separate_minibatches():
    Xb, yb = pm.Minibatch(X, batch_size=20), pm.Minibatch(Y, batch_size=20)
    beta = pm.Normal("beta", 0, 2, shape=2)
    pm.Normal("y", Xb @ beta, 1.0, observed=yb, total_size=ROWS)


@model_case("total_size")
def minibatch_without_total_size():
    Xb, yb = pm.Minibatch(X, Y, batch_size=20)
    beta = pm.Normal("beta", 0, 2, shape=2)
    pm.Normal("y", Xb @ beta, 1.0, observed=yb)


@model_case("total_size")
def minibatch_with_a_wrong_total_size():
    Xb, yb = pm.Minibatch(X, Y, batch_size=20)
    beta = pm.Normal("beta", 0, 2, shape=2)
    pm.Normal("y", Xb @ beta, 1.0, observed=yb, total_size=10 * ROWS)


@model_case("total_size")
def total_size_without_minibatch():
    beta = pm.Normal("beta", 0, 2, shape=2)
    pm.Normal("y", X @ beta, 1.0, observed=Y, total_size=10 * ROWS)


@model_case("potential")
def potential_on_a_minibatch():
    Xb, yb = pm.Minibatch(X, Y, batch_size=20)
    beta = pm.Normal("beta", 0, 2, shape=2)
    pm.Normal("y", Xb @ beta, 1.0, observed=yb, total_size=ROWS)
    pm.Potential("penalty", -((Xb @ beta).sum() ** 2))


@model_case("prior.*minibatch|minibatch")
def prior_on_a_minibatch():
    Xb, yb = pm.Minibatch(X, Y, batch_size=20)
    beta = pm.Normal("beta", Xb.mean(0), 2, shape=2)
    pm.Normal("y", Xb @ beta, 1.0, observed=yb, total_size=ROWS)


@model_case("batch_size")
def minibatch_larger_than_the_data():
    Xb, yb = pm.Minibatch(X, Y, batch_size=10 * ROWS)
    beta = pm.Normal("beta", 0, 2, shape=2)
    pm.Normal("y", Xb @ beta, 1.0, observed=yb, total_size=ROWS)


@case("rows|different", slow=True)
def minibatch_beside_full_data():
    with pm.Model() as model:
        Xb, yb = pm.Minibatch(X, Y, batch_size=20)
        beta = pm.Normal("beta", 0, 2, shape=2)
        pm.Normal("y", Xb @ beta, 1.0, observed=yb, total_size=ROWS)
        pm.Normal("more", X[:100] @ beta, 1.0, observed=Y[:100])
    both = np.concatenate([X, X[:100]]), np.concatenate([Y, Y[:100]])
    return run_of(model, lambda: gaussian(*both))


@model_case("rows|`weight`")
def minibatch_with_a_column_left_whole():
    yb = pm.Minibatch(Y, batch_size=20)
    beta = pm.Normal("beta", 0, 2)
    pm.Normal("y", beta * x[:20], 1.0, observed=yb, total_size=ROWS)


# --- Data of several lengths and kinds ------------------------------------------------------------


@model_case('rows=.*"y"')
def two_blocks_of_different_lengths():
    beta = pm.Normal("beta", 0, 2, shape=2)
    pm.Normal("small", X[:20] @ beta, 1.0, observed=Y[:20])
    pm.Normal("y", X @ beta, 1.0, observed=Y)


@case(must_agree=True, slow=True)
def two_blocks_of_different_lengths_with_rows():
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=2)
        pm.Normal("small", X[:20] @ beta, 0.5, observed=Y[:20])
        pm.Normal("y", X @ beta, 1.0, observed=Y)
    both = np.concatenate([X[:20], X]), np.concatenate([Y[:20], Y])
    sigma = np.repeat([0.5, 1.0], [20, ROWS])
    return run_of(model, lambda: gaussian(*both, sigma), rows="y")


@model_case("rows|length|shape")
def predictors_one_row_short():
    beta = pm.Normal("beta", 0, 2, shape=2)
    pm.Normal("y", X[:-1] @ beta, 1.0, observed=Y)


@model_case("rows|length|shape")
def predictors_one_row_short_as_data():
    beta = pm.Normal("beta", 0, 2, shape=2)
    pm.Normal("y", pm.Data("X", X[:-1]) @ beta, 1.0, observed=pm.Data("outcome", Y))


@case("rows|shape", slow=True)
def predictors_of_a_single_row():
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=2)
        pm.Normal("y", X[:1] @ beta, 1.0, observed=Y)
    repeated = np.repeat(X[:1], ROWS, axis=0)
    return run_of(model, lambda: gaussian(repeated, Y))


@case("rows?")
def no_rows():
    return run_of(line(X[:0], Y[:0]))


@case("rows?")
def one_row():
    return run_of(line(X[:1], Y[:1]))


@case(slow=True)
def two_rows():
    return run_of(line(X[:2], Y[:2]), lambda: gaussian(X[:2], Y[:2]))


@case("sparse", slow=True)
def sparse_design_in_the_graph():
    design = sparse.csr_matrix(X)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, PRIOR_SD, shape=2)
        fitted = pytensor.sparse.structured_dot(design, beta[:, None])[:, 0]
        pm.Normal("y", fitted, 1.0, observed=Y)
    return run_of(model, gaussian)


@case("sparse", slow=True)
def one_hot_design_of_many_columns():
    groups = np.arange(ROWS) % 100
    design = sparse.csr_matrix((np.ones(ROWS), (np.arange(ROWS), groups)))
    with pm.Model() as model:
        effect = pm.Normal("effect", 0, PRIOR_SD, shape=100)
        fitted = pytensor.sparse.structured_dot(design, effect[:, None])[:, 0]
        pm.Normal("y", fitted, 1.0, observed=Y)
    return run_of(model, lambda: gaussian(design.toarray(), Y))


@model_case("sparse|dtype|type", expected=gaussian)
def sparse_design_times_a_vector():
    beta = pm.Normal("beta", 0, PRIOR_SD, shape=2)
    pm.Normal("y", pm.math.dot(sparse.csr_matrix(X), beta), 1.0, observed=Y)


@case("object|type")
def outcomes_as_objects():
    return run_of(line(X, np.array([*Y[:-1], "0"], dtype=object)))


@case("type|string|str")
def outcomes_as_text():
    return run_of(line(X, Y.astype(str)))


@case("complex|type", slow=True)
def complex_outcomes():
    return run_of(line(X, Y + 1j), gaussian)  # NumPy warns that it drops the imaginary part


@case("complex|type")
def complex_predictors():
    return run_of(line(X + 1j, Y))


@case(must_agree=True)
def pandas_data_with_an_index_of_their_own():
    frame = pd.DataFrame(X, index=np.arange(ROWS)[::-1])
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, PRIOR_SD, shape=2)
        pm.Normal("y", pm.math.dot(frame.to_numpy(), beta), 1.0, observed=pd.Series(Y))
    return run_of(model, gaussian)


@model_case(must_agree=True, slow=True, expected=gaussian)
def shared_variables_in_place_of_data():
    beta = pm.Normal("beta", 0, PRIOR_SD, shape=2)
    pm.Normal("y", pt.dot(pytensor.shared(X, "X"), beta), 1.0, observed=Y)


@case("`y`|missing|mask")
def masked_outcomes():
    return run_of(line(X, np.ma.masked_array(Y, mask=np.arange(ROWS) == 5)))


@case("gradient|halved")
def operation_without_a_gradient():
    @as_op(itypes=[pt.dscalar], otypes=[pt.dscalar])
    def halved(value):
        return np.asarray(value / 2)

    with pm.Model() as model:
        slope = pm.Normal("slope")
        pm.Normal("y", halved(slope) * x, 1.0, observed=Y)
    return run_of(model)


@model_case("random|`y`")
def random_numbers_in_the_likelihood():
    slope = pm.Normal("slope")
    noise = pt.random.normal(size=ROWS)
    pm.Normal("y", slope * x + noise, 1.0, observed=Y)


@case("simulator|gradient|`y`")
def simulator():
    def simulate(rng, slope, size=None):
        return rng.normal(slope, 1, size=ROWS)

    with pm.Model() as model:
        slope = pm.Normal("slope")
        pm.Simulator("y", simulate, slope, epsilon=1, observed=Y)
    return run_of(model)


# --- Models that are all right, but not the usual ones --------------------------------------------


@model_case("potential|rows", slow=True, expected=gaussian)
def potential_as_the_likelihood():
    beta = pm.Normal("beta", 0, PRIOR_SD, shape=2)
    column, outcome = pm.Data("column", X), pm.Data("outcome", Y)
    pm.Potential("likelihood", -0.5 * ((outcome - column @ beta) ** 2).sum())


@case(must_agree=True, slow=True)
def potential_as_the_likelihood_with_rows():
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, PRIOR_SD, shape=2)
        column, outcome = pm.Data("column", X), pm.Data("outcome", Y)
        pm.Potential("likelihood", -0.5 * (outcome - column @ beta) ** 2)
    return run_of(model, gaussian, rows=["column", "outcome"])


@case(slow=True)
def potential_on_the_parameters_beside_rows():
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, PRIOR_SD, shape=2)
        pm.Potential("tied", -50.0 * (beta[0] + beta[1]) ** 2)
        pm.Normal("y", X @ beta, 1.0, observed=Y)

    def expected():
        precision = X.T @ X + np.eye(2) / PRIOR_SD**2 + 100 * np.ones((2, 2))
        covariance = np.linalg.inv(precision)
        return Law(covariance @ X.T @ Y, np.sqrt(np.diag(covariance)))

    return run_of(model, expected)


@case(must_agree=True, slow=True)
def outcomes_of_several_columns():
    outcomes = np.column_stack([Y, Y + x, -Y])
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, PRIOR_SD, shape=(2, 3))
        pm.MvNormal("y", X @ beta, np.eye(3), observed=outcomes)

    def expected():
        columns = [gaussian(X, law) for law in outcomes.T]
        return Law(
            np.column_stack([law.mean for law in columns]).ravel(),
            np.column_stack([law.sd for law in columns]).ravel(),
        )

    return run_of(model, expected)


@case(slow=True)
def covariance_with_an_lkj_prior():
    outcomes = np.column_stack([Y, Y + x])
    with pm.Model() as model:
        root, _, _ = pm.LKJCholeskyCov("root", n=2, eta=2, sd_dist=pm.HalfNormal.dist(3))
        pm.MvNormal("y", np.zeros(2), chol=root, observed=outcomes)
    return nuts_run_of(model)


@case(slow=True)
def simplex_and_multinomial():
    counts = np.random.default_rng(3).multinomial(10, [0.2, 0.3, 0.5], size=ROWS)
    with pm.Model() as model:
        p = pm.Dirichlet("p", np.ones(3))
        pm.Multinomial("y", 10, p, observed=counts)

    def expected():
        shape = 1 + counts.sum(0)
        total = shape.sum()
        return Law(shape / total, np.sqrt(shape * (total - shape) / total**2 / (total + 1)))

    return run_of(model, expected)


@case(slow=True)
def zero_inflated_counts():
    rng = np.random.default_rng(4)
    counts = rng.poisson(np.exp(0.5 + 0.3 * x)) * (rng.random(ROWS) < 0.7)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=2)
        psi = pm.Beta("psi", 2, 2)
        pm.ZeroInflatedPoisson("y", psi, pm.math.exp(X @ beta), observed=counts)
    return nuts_run_of(model)


@model_case(slow=True, run=nuts_run_of)
def censored_outcomes():
    beta = pm.Normal("beta", 0, 2, shape=2)
    plain = pm.Normal.dist(X @ beta, 1.0)
    pm.Censored("y", plain, lower=None, upper=1.0, observed=np.minimum(Y, 1.0))


@case(slow=True)
def truncated_outcomes():
    kept = Y < 1
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=2)
        pm.Truncated("y", pm.Normal.dist(X[kept] @ beta, 1.0), upper=1.0, observed=Y[kept])
    return nuts_run_of(model)


@case(slow=True)
def mode_on_a_bound():
    with pm.Model() as model:
        p = pm.Uniform("p", 0, 1)
        pm.Bernoulli("y", p, observed=np.ones(ROWS, dtype=int))

    def expected():  # Beta(N + 1, 1)
        n = ROWS + 1
        return Law(np.array([n / (n + 1)]), np.array([np.sqrt(n / (n + 2)) / (n + 1)]))

    return run_of(model, expected)


@case(slow=True)
def ordered_cutpoints():
    levels = np.digitize(Y, [-1.0, 0.5, 1.5])
    with pm.Model() as model:
        cuts = pm.Normal(
            "cuts", 0, 3, shape=3, initval=[-1, 0, 1], transform=pm.distributions.transforms.ordered
        )
        slope = pm.Normal("slope", 0, 2)
        pm.OrderedLogistic("y", slope * x, cuts, observed=levels)
    return nuts_run_of(model)


@model_case("shared|`y`|`twin`", slow=True, expected=lambda: gaussian(X, Y, np.sqrt(0.5)))
def observed_twice():
    beta = pm.Normal("beta", 0, PRIOR_SD, shape=2)
    pm.Normal("y", X @ beta, 1.0, observed=Y)
    pm.Normal("twin", X @ beta, 1.0, observed=Y)


@model_case("model|step", slow=True, expected=gaussian)
def nothing_but_the_context_of_a_submodel():
    beta = pm.Normal("beta", 0, PRIOR_SD, shape=2)
    with pm.Model(name="part"):
        pm.Normal("y", X @ beta, 1.0, observed=Y)


@model_case(
    "not a sum|rows|`y`", expected=lambda: gaussian(np.arange(ROWS)[:, None], Y, prior_sd=0.01)
)
def position_in_the_data_as_a_predictor():
    trend = pm.Normal("trend", 0, 0.01)
    outcome = pm.Data("outcome", Y)
    pm.Normal("y", trend * pt.arange(outcome.shape[0]), 1.0, observed=outcome)


@case(must_agree=True)
def ordinary_model():
    return run_of(shared_line(), gaussian)
