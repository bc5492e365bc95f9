"""Zero-variance control variates: against exact laws, and on chains simulated by NumPy."""

from __future__ import annotations

import sys

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from pymc_sgmcmc import SGLDCV, gradients, stein_calibrate, zero_variance
from pymc_sgmcmc.dynamics import AVERAGED, EULER
from pymc_sgmcmc.trace_tools.langevin import langevin_gain
from pymc_sgmcmc.trace_tools.zero_variance.coefficients import REGRESSIONS, fit_coefficients
from pymc_sgmcmc.trace_tools.zero_variance.estimate import controlled_means
from pymc_sgmcmc.trace_tools.zero_variance.terms import count_terms, monomials, stein_terms
from tests.support.langevin_chains import Gaussian, Logistic, as_trace
from tests.support.models import two_variable_model

ONE = np.eye(1)
QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False}


def gaussian_nodes(dimension: int, seed: int):
    """Nodes and weights exact for polynomials of degree 23 under a correlated normal law."""
    rng = np.random.default_rng(seed)
    x, w = np.polynomial.hermite_e.hermegauss(12)
    nodes = np.stack(np.meshgrid(*[x] * dimension, indexing="ij"), -1).reshape(-1, dimension)
    weights = np.prod(np.meshgrid(*[w / w.sum()] * dimension, indexing="ij"), axis=0).ravel()
    root, mean = rng.normal(size=(dimension, dimension)), rng.normal(size=dimension)
    positions = mean + nodes @ root.T
    gradients = -np.linalg.solve(root @ root.T, (positions - mean).T).T
    return positions, gradients, weights


# --- Terms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("dimension", [1, 3])
def test_terms_have_mean_zero_on_a_normal_law(order, dimension):
    """By Gauss-Hermite quadrature, which is exact here."""
    positions, gradients, weights = gaussian_nodes(dimension, seed=order)
    terms = stein_terms(positions, gradients, order)
    assert terms.shape[1] == count_terms(dimension, order)
    np.testing.assert_allclose(weights @ terms, 0, atol=1e-9 * weights @ np.abs(terms).max(1))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_terms_have_mean_zero_on_another_law(order):
    """Density exp(-x^4 - y^2 (1 + x^2 / 2) - x y), on a grid far beyond its mass."""
    grid = np.linspace(-6, 6, 601)
    x, y = (one.ravel() for one in np.meshgrid(grid, grid))
    weights = np.exp(-(x**4) - y**2 * (1 + x**2 / 2) - x * y)
    weights /= weights.sum()
    gradients = np.column_stack([-4 * x**3 - y**2 * x - y, -2 * y * (1 + x**2 / 2) - x])
    terms = stein_terms(np.column_stack([x, y]), gradients, order)
    np.testing.assert_allclose(weights @ terms, 0, atol=1e-9)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_terms_have_mean_zero_on_exact_draws_with_noisy_gradients(rng, order):
    """Largest of up to 34 z-scores below 4.5; noise that depends on the position."""
    draws = rng.normal(size=(200_000, 3))
    noise = rng.normal(size=draws.shape) * (1 + np.abs(draws))
    terms = stein_terms(draws, -draws + noise, order)
    z = terms.mean(0) / (terms.std(0) / np.sqrt(len(terms)))
    assert np.abs(z).max() < 4.5


def test_terms_are_derivatives():
    """Against differences of the polynomials themselves."""
    rng = np.random.default_rng(1)
    at, gradient, step = rng.normal(size=3), rng.normal(size=3), 1e-4
    terms = stein_terms(at[None], gradient[None], 4)[0]
    start = 0
    for table in monomials(3, 4):
        for row in table:

            def polynomial(x, row=row):
                return np.prod(x[row])

            ahead = np.array([polynomial(at + step * one) for one in np.eye(3)])
            behind = np.array([polynomial(at - step * one) for one in np.eye(3)])
            laplacian = (ahead + behind - 2 * polynomial(at)).sum() / step**2
            slope = (ahead - behind) / (2 * step)
            orders = np.array([np.sum(row == number) for number in range(3)])
            factorials = np.prod([np.prod(np.arange(1, m + 1)) for m in orders])
            weight = 1 / (len(row) * np.sqrt(factorials))
            expected = -0.5 * weight * (laplacian + slope @ gradient)
            assert terms[start] == pytest.approx(expected, rel=1e-5, abs=1e-5)
            start += 1


def test_the_printed_formulas_fail():
    """Baker et al. (2019), §4: mean 3 for the square, and coefficients that add variance."""
    positions, gradients, weights = gaussian_nodes(1, seed=0)
    positions, gradients = -gradients / np.sqrt(weights @ gradients**2), None
    gradients = -positions  # standard normal
    printed = 2 + 2 * positions * (-gradients / 2)
    assert (weights @ printed).item() == pytest.approx(3)
    wrong_factor = 2 + 2 * positions * (gradients / 2)
    assert (weights @ wrong_factor).item() == pytest.approx(1)
    ours = stein_terms(positions, gradients, 2)[:, 1]
    assert weights @ ours == pytest.approx(0, abs=1e-12)
    rng = np.random.default_rng(1)
    f = rng.normal(size=(1000, 1))
    h = 0.5 * f + 0.1 * rng.normal(size=(1000, 1))
    a = fit_coefficients(h, f, "least_squares")
    printed = np.linalg.solve(np.cov(h.T).reshape(1, 1), np.cov(h.T, f.T)[:1, 1:])
    assert (f + h @ a).var() < 0.05 < 3 < (f + h @ printed).var()


# --- Gain -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "step_size"), [(10.0, 0.2), (0.2, 0.5), (40.0, 0.05)])
def test_gain_is_that_predicted(noise, step_size):
    """1 + 1/delta exactly in closed form, within 15 % on a chain (8 000 batches: 2 %)."""
    predicted = 1 + 1 / (step_size * noise / 4)
    for law in (EULER, AVERAGED):  # Sums over all transitions have each noise as a whole.
        closed = langevin_gain(ONE, noise * ONE, ONE, step_size, ONE, law=law)
        assert closed[0] == pytest.approx(predicted, rel=1e-10)
    x, g = Gaussian(ONE, noise * ONE).chains(400, 12_000, step_size, ONE, seed=1)
    found = zero_variance(as_trace(x, g, step_size, ONE), batches=20)
    assert found.variance_ratio["theta"].item() == pytest.approx(predicted, rel=0.15)
    assert found.predicted_gain["theta"].item() == pytest.approx(predicted, rel=0.02)
    marginal = zero_variance(as_trace(x, g, step_size, ONE), batches=20, coefficients="marginal")
    assert marginal.variance_ratio["theta"].item() < 0.8 * predicted


def matrices_that_do_not_commute() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """H, V and M, with 1 as the largest eigenvalue of M H."""
    roots = np.random.default_rng(3).normal(size=(3, 3, 3))
    H, V, M = (root @ root.T + np.eye(3) for root in roots)
    return H, 5 * V, M / np.linalg.eigvals(M @ H).real.max()


def test_closed_form_of_several_dimensions_and_of_thinned_chains():
    """Gain from the covariances of very long sums, for matrices that do not commute."""
    H, V, M = matrices_that_do_not_commute()
    thin, h = 3, 0.5
    x, g = Gaussian(H, V).chains(2000, 2000, h, M, seed=2, thin=thin)
    f, z = x.mean(1), g.mean(1)
    both = np.cov(np.hstack([f, z]).T)
    left = both[:3, :3] - both[:3, 3:] @ np.linalg.solve(both[3:, 3:], both[3:, :3])
    found = langevin_gain(H, V, M, h, np.eye(3), thin)
    # 2000 sums: a ratio of variances to 3 %, z below 4.5; the ends of the sums add 3 %.
    np.testing.assert_allclose(np.diag(both)[:3] / np.diag(left), found, rtol=0.16)
    every = langevin_gain(H, V, M, h, np.eye(3), 1)
    assert (every > 1.5 * found).all()


@pytest.mark.parametrize("law", [EULER, AVERAGED], ids=lambda law: law.name)
@pytest.mark.parametrize("thin", [1, 3])
def test_gain_is_that_of_all_autocovariances(law, thin):
    """Sums over lags of the exact covariances of the chain itself, until these are zero."""
    H, V, M, h = *matrices_that_do_not_commute(), 0.5
    every = Gaussian(H, V).autocovariances(3000, h, M, thin=thin, averaged=law.averaged)
    assert np.abs(every[-1]).max() < 1e-12 * np.abs(every[0]).max()
    S = every.sum(0) + every[1:].sum(0).T
    left = S[:3, :3] - S[:3, 3:] @ np.linalg.solve(S[3:, 3:], S[3:, :3])
    found = langevin_gain(H, V, M, h, np.eye(3), thin, law=law)
    np.testing.assert_allclose(found, np.diag(S)[:3] / np.diag(left), rtol=1e-8)


def test_gain_of_chains_with_step_sizes_of_their_own():
    """Long-run covariances are averaged: 2000 sums, a ratio of variances to 3 %."""
    target, sizes = Gaussian(ONE, 4 * ONE), (0.1, 0.4)
    runs = [target.chains(1000, 2000, h, ONE, seed=number) for number, h in enumerate(sizes)]
    both = np.cov(np.concatenate([np.hstack([x.mean(1), g.mean(1)]) for x, g in runs]).T)
    found = both[0, 0] / (both[0, 0] - both[0, 1] ** 2 / both[1, 1])
    predicted = langevin_gain(ONE, 4 * ONE, ONE, np.repeat(sizes, 1000), ONE)
    assert found == pytest.approx(predicted[0], rel=0.15)


@pytest.mark.slow
def test_second_order_removes_the_bias_of_the_variance():
    """True value 1, the chain's exact law 1.579, marginal coefficients 1.440, batch means 1."""
    target, h = Gaussian(ONE, 10 * ONE), 0.2
    law = target.covariance(h, ONE).item()
    assert law == pytest.approx(1.5789, abs=1e-4)
    x, g = target.chains(200, 8000, h, ONE, seed=0)
    trace = as_trace(x, g, h, ONE)

    def square(post):
        return post["theta"] ** 2

    marginal = zero_variance(trace, 2, square, coefficients="marginal")
    exact = law - (law - 1) * 2 * law / (2 * law + 10)
    assert exact == pytest.approx(1.440, abs=1e-3)
    assert marginal.mean["theta"].item() == pytest.approx(exact, abs=4.5 * 0.0055)
    assert marginal.mean_before["theta"].item() == pytest.approx(law, abs=4.5 * 0.0055)
    # Short batches leave a little: 1.03 of MATH's, at about five autocorrelation times.
    short, long = (zero_variance(trace, 2, square, batches=count) for count in (80, 16))
    assert short.mean["theta"].item() == pytest.approx(1.02, abs=0.02)
    assert long.mean["theta"].item() == pytest.approx(1.0, abs=4.5 * long.mcse["theta"].item())
    assert long.mcse["theta"].item() < 0.015
    first = zero_variance(trace, 1, square)
    assert first.mean["theta"].item() == pytest.approx(law, abs=4.5 * 0.0055)


@pytest.fixture(scope="module")
def logistic() -> Logistic:
    return Logistic.simulate(20_000, [0.3, 0.8, -0.6, 0.4], seed=3)


def test_control_variates_on_logistic_regression(logistic):
    """N = 20 000, n = 100, SGLD-CV: variance ratio of at least 100 for every coefficient."""
    x, g, M = logistic.chains(32, 2000, 0.2, 100, seed=5, cv=True, burn_in=50)
    found = zero_variance(as_trace(x, g, 0.2, M, gradient="cv", batch_size=100, n_rows=20_000))
    assert (found.variance_ratio["theta"] >= 100).all()
    assert found.notes == ()
    ratio = found.variance_ratio["theta"] / found.predicted_gain["theta"]
    assert ((ratio > 0.6) & (ratio < 1.4)).all()


@pytest.mark.slow
def test_plain_gradient_on_logistic_regression(logistic):
    """The same with the plain gradient: at least 2, where 1 + 1/delta is 3."""
    x, g, M = logistic.chains(128, 5000, 0.01, 100, seed=5, cv=False, burn_in=500)
    found = zero_variance(
        as_trace(x, g, 0.01, M, gradient="plain", batch_size=100, n_rows=20_000), batches=4
    )
    assert (found.variance_ratio["theta"] >= 2).all()
    np.testing.assert_allclose(found.predicted_gain["theta"], 3, rtol=0.1)


# --- Estimates ------------------------------------------------------------------------------


def skewed_chain(seed: int = 4):
    """Draws and noisy gradients in three dimensions, with dependence and skewness."""
    rng = np.random.default_rng(seed)
    H = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.3], [0.0, 0.3, 1.5]])
    x, g = Gaussian(H, 0.2 * np.eye(3), np.array([1.0, -2.0, 0.5])).chains(
        4, 1500, 0.4, np.eye(3), seed=seed
    )
    return x, g + 0.05 * rng.normal(size=g.shape) * x**2


@pytest.mark.parametrize("regression", [*REGRESSIONS, "marginal"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_invariance_under_linear_maps_of_the_position(regression, order):
    pytest.importorskip("sklearn")
    x, g = skewed_chain()
    values = [x[..., 0], np.exp(0.2 * x[..., 1:])]
    settings = {"order": order}
    name = "coefficients" if regression == "marginal" else "regression"
    settings |= {name: regression}
    B = np.random.default_rng(1).normal(size=(3, 3)) + np.eye(3)
    first = controlled_means(values, x, g, **settings)
    second = controlled_means(values, x @ B.T + 5, g @ np.linalg.inv(B), **settings)
    np.testing.assert_allclose(second.mean, first.mean, rtol=1e-7)
    np.testing.assert_allclose(second.standard_error, first.standard_error, rtol=1e-6)
    assert (first.variance_ratio > 2).all()


def test_errors_are_those_of_the_means():
    """40 batches for 6 coefficients: squares of 150 x 2 z-scores have mean 1 (sd 0.085)."""
    settings = {"order": 2, "batches": 10, "regression": "least_squares"}
    z = []
    for seed in range(150):
        x, g = Gaussian(np.diag([1.0, 2.0]), 0.5 * np.eye(2)).chains(
            4, 100, 1e-9 + 0.9, np.diag([1.0, 0.5]), seed=10 * seed
        )
        found = controlled_means([x], x, g, **settings)
        z.append(found.mean / found.standard_error)
    # Student t with 34 or 39 degrees of freedom has variance 1.06.
    assert np.mean(np.square(z)) == pytest.approx(1.06, abs=4.5 * 0.085)
    assert np.abs(np.mean(z, 0)).max() < 4.5 / np.sqrt(150)


def test_exact_gradients_leave_no_error_of_the_mean(rng):
    x = rng.normal(size=(4, 500, 2)) @ np.array([[1.0, 0.5], [0.0, 2.0]]) + 3
    covariance = np.array([[1.0, 0.5], [0.5, 4.25]])
    g = -np.linalg.solve(covariance, (x - 3).reshape(-1, 2).T).T.reshape(x.shape)
    found = controlled_means([x, x[..., 0] * x[..., 1]], x, g, order=2)
    np.testing.assert_allclose(found.mean, [3, 3, 9.5], rtol=1e-9)
    assert (found.variance_ratio > 1e15).all()


def test_ridge_regression_for_fewer_batches_than_terms():
    """27 terms of order 2 need 140 batches, 152 terms 768: there are 80."""
    pytest.importorskip("sklearn")
    z, ratios = [], []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(4, 60, 6))
        g = -x + 0.1 * rng.normal(size=x.shape)
        found = controlled_means([x[..., :3]], x, g, 2, regression="ridge")
        z.append(found.mean / found.standard_error)
        if seed == 0:
            with pytest.raises(ValueError, match=r"27 terms .* 140 batches, .* or order=1 or"):
                controlled_means([x], x, g, 2)
            assert (found.variance_ratio > 10).all()
        if seed > 2:
            continue
        x = rng.normal(size=(4, 60, 16))
        many = controlled_means([x[..., :3]], x, -x, 2, regression="ridge")
        assert many.coefficients.shape == (152, 3)
        ratios.append(many.variance_ratio)
    # Errors are stated on the safe side. Standard error of a mean of 30 squares: 0.28.
    assert np.mean(np.square(z)) < 1.1 + 4.5 * 0.28
    # Too few for any gain with 152 terms, but not harmful.
    assert np.median(ratios) > 0.85


def test_scikit_learn_is_named_where_it_is_absent(monkeypatch, rng):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    x = rng.normal(size=(4, 100, 2))
    with pytest.raises(ImportError, match=r"pip install \"pymc_sgmcmc\[regression\]\""):
        controlled_means([x], x, -x, regression="ridge")


@pytest.mark.parametrize("order", [1, 2])
def test_coefficients_are_the_formula(order):
    """Minus the inverse covariance of the terms times theirs with f: of draws, of batch means."""
    x, g = skewed_chain()
    f = np.exp(0.3 * x[..., 0])
    for coefficients, rows in (("marginal", (6000, 1)), ("batch_means", (80, 75))):
        found = controlled_means([f], x, g, order, coefficients=coefficients)
        white = found.whitening
        terms = stein_terms(
            white.positions(x.reshape(-1, 3)), white.gradients(g.reshape(-1, 3)), order
        )
        h = terms.reshape(*rows, -1).mean(1)
        both = np.cov(np.column_stack([h, f.reshape(rows).mean(1)]).T)
        expected = -np.linalg.solve(both[:-1, :-1], both[:-1, -1:])
        np.testing.assert_allclose(found.coefficients, expected, rtol=1e-6)


def test_draws_have_the_mean():
    x, g = skewed_chain()
    found = zero_variance(as_trace(x, g), order=2)
    draws = found.draws()["theta"]
    assert draws.dims == ("chain", "draw", "coordinate")
    np.testing.assert_allclose(draws.mean(("chain", "draw")), found.mean["theta"], rtol=1e-10)


def test_pieces_change_nothing(monkeypatch):
    x, g = skewed_chain()
    whole = [
        controlled_means([x], x, g, order, coefficients=coefficients)
        for order in (1, 2)
        for coefficients in ("batch_means", "marginal")
    ]
    monkeypatch.setattr("pymc_sgmcmc.trace_tools.reader.CHUNK_ELEMENTS", 100)
    pieces = [
        controlled_means([x], x, g, order, coefficients=coefficients)
        for order in (1, 2)
        for coefficients in ("batch_means", "marginal")
    ]
    for one, other in zip(whole, pieces, strict=True):
        np.testing.assert_allclose(one.mean, other.mean, rtol=1e-10)


# --- Notes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
def test_no_injected_noise_is_said(known):
    x, g = Gaussian(ONE, 10 * ONE).chains(8, 4000, 0.2, ONE, 1, injected=0.0, burn_in=200)
    found = zero_variance(as_trace(x, g, 0.2, ONE) if known else as_trace(x, g))
    assert found.variance_ratio["theta"].item() < 1.2
    assert "no injected noise" in found.notes[0]
    x, g = Gaussian(ONE, 10 * ONE).chains(8, 4000, 0.2, ONE, 1)
    assert zero_variance(as_trace(x, g, 0.2, ONE) if known else as_trace(x, g)).notes == ()


def test_plain_gradients_of_few_rows_are_named():
    """Inflation of 5: a gain of 1.2."""
    x, g = Gaussian(ONE, 100 * ONE).chains(8, 4000, 0.2, ONE, 1)
    trace = as_trace(x, g, 0.2, ONE, with_less_noise="`cv`", batch_size=100, n_rows=20_000)
    notes = zero_variance(trace).notes
    assert any("falls by 1.2 only" in note and "100 of 20000 rows" in note for note in notes)


def test_gradients_of_all_rows_have_no_noise_to_name(rng):
    """The gain is small since terms of order 1 do not fit squares."""
    x = rng.normal(size=(4, 1000, 1))
    trace = as_trace(x, -x, sampler="SGHMC", with_less_noise="`cv`", batch_size=100, n_rows=100)
    found = zero_variance(trace, func=lambda post: post["theta"] ** 2)
    assert found.variance_ratio["theta"].item() < 2
    assert not any("noise of gradients from" in note for note in found.notes)


def test_thinning_and_short_batches_are_named():
    x, g = Gaussian(ONE, ONE).chains(8, 2000, 0.05, ONE, 1, thin=20)
    notes = zero_variance(as_trace(x, g, 0.05, ONE, thin=20)).notes
    assert any("One of 20 transitions" in note for note in notes)
    x, g = Gaussian(ONE, ONE).chains(8, 2000, 0.05, ONE, 1)
    notes = zero_variance(as_trace(x, g, 0.05, ONE), batches=100).notes
    assert any("Batches of 20 draws are short" in note for note in notes)


# --- Traces ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    model = two_variable_model()
    with model:
        step = SGLDCV(
            compile_kwargs={"mode": "NUMBA"}, batch_size=50, thin=1, gradient="cv",
            integrator="euler",
        )  # fmt: skip
        idata = pm.sample(
            step=step, draws=1500, tune=100, chains=4, cores=1, random_seed=1, **QUIET
        )
    return model, idata


def test_constrained_parameters(run):
    _, idata = run
    before = idata.copy(deep=True)
    found = zero_variance(idata, order=1)
    assert set(found.mean.data_vars) == {"intercept", "slope", "sigma"}
    table = found.summary()
    assert list(table.index) == ["intercept", "slope", "sigma"]
    assert (table["variance_ratio"] > 5).all()
    # Chains have tuned to step sizes of their own.
    assert len(np.unique(idata["sample_stats"]["step_size"])) > 1
    # Of a normal posterior, which that of 400 rows is not quite: curvature that varies leaves more.
    relative = table["variance_ratio"] / table["predicted_gain"]
    assert relative.between(0.1, 2).all()
    difference = table["mean"] - table["mean_before"]
    assert (difference.abs() < 4.5 * table["mcse_before"]).all()
    for group in ("posterior", "sample_stats"):
        xr.testing.assert_identical(idata[group].to_dataset(), before[group].to_dataset())


def test_functions_of_all_kinds(run):
    _, idata = run
    expected = zero_variance(idata, func=lambda post: post["slope"] / post["sigma"]).mean["func"]
    functions = [
        lambda post: xr.Dataset({"ratio": post["slope"] / post["sigma"]}),
        lambda post: {"ratio": post["slope"] / post["sigma"], "other": post["sigma"]},
        lambda post: (post["slope"] / post["sigma"]).values,
        lambda post: (post["slope"] / post["sigma"]).transpose("draw", "chain").rename("ratio"),
    ]
    for function in functions:
        found = zero_variance(idata, func=function)
        assert next(iter(found.mean.data_vars.values())).item() == pytest.approx(expected.item())
    grid = xr.DataArray([0.0, 1.0], dims="x", coords={"x": [0.0, 1.0]}, attrs={"unit": "m"})
    event = zero_variance(idata, func=lambda post: post["slope"] > 2)
    assert 0 < event.mean["slope"] < 1
    line = zero_variance(idata, func=lambda post: post["intercept"] + post["slope"] * grid)
    assert line.mean["func"].dims == ("x",)
    assert list(line.summary().index) == ["func[0.0]", "func[1.0]"]
    assert zero_variance(idata, var_names="slope").mean["slope"].item() == pytest.approx(
        line.mean["func"].diff("x").item(), rel=1e-6
    )
    chosen = zero_variance(idata, func=functions[1], var_names=["other"])
    assert list(chosen.mean.data_vars) == ["other"]


@pytest.mark.usefixtures("without_compiler")
def test_gradients_are_those_of_the_model(rng):
    """Transforms of scales, intervals that depend on other variables, simplices and dimensions."""
    y = rng.normal(size=50)
    with pm.Model(coords={"group": ["a", "b"]}) as model:
        bound = pm.HalfNormal("bound", 2.0)
        inside = pm.Uniform("inside", 0, bound)
        weights = pm.Dirichlet("weights", np.ones(3))
        effect = pm.Normal("effect", 0, 1, dims="group")
        pm.Deterministic("double", 2 * effect)
        pm.Normal("y", inside * weights[0] + effect.sum(), bound, observed=y)
        initial = model.initial_point()
    value_names = list(initial)
    points = [
        {name: value + 0.3 * rng.normal(size=value.shape) for name, value in initial.items()}
        for _ in range(6)
    ]
    constrained = model.compile_fn(
        model.replace_rvs_by_values(model.free_RVs), inputs=model.value_vars, mode="FAST_COMPILE"
    )
    values = [constrained(point) for point in points]
    posterior = xr.Dataset(
        {
            one.name: (
                ("chain", "draw", *(f"{one.name}_{axis}" for axis in range(one.ndim))),
                np.array([value[number] for value in values]).reshape(2, 3, *one.shape.eval()),
            )
            for number, one in enumerate(model.free_RVs)
        }
    )
    found = gradients(xr.DataTree.from_dict({"posterior": posterior}), model)["sample_stats"]
    dlogp = model.compile_dlogp(mode="FAST_COMPILE")
    at = np.array(
        [np.concatenate([point[name].ravel() for name in value_names]) for point in points]
    )
    expected = np.array([dlogp(point) for point in points])
    np.testing.assert_allclose(found["position"].values.reshape(6, -1), at, atol=1e-9)
    np.testing.assert_allclose(found["gradient"].values.reshape(6, -1), expected, atol=1e-7)
    labels = found["unconstrained_position"].values
    assert labels[-1] == "effect[group=b]"


@pytest.mark.slow
def test_any_sampler():
    model = two_variable_model()
    with model:
        step = pm.Slice()
        idata = pm.sample(
            step=step, draws=200, tune=50, chains=4, cores=1, random_seed=1, **QUIET,
            compile_kwargs={"mode": "FAST_COMPILE"},
        )  # fmt: skip
    assert "gradient" not in idata["sample_stats"]
    with pytest.raises(ValueError, match="or compute the gradients, `idata = gradients"):
        zero_variance(idata)
    found = zero_variance(idata, order=2, model=model)
    # Exact gradients of a near-normal posterior.
    assert (found.summary()["variance_ratio"] > 100).all()
    added = gradients(idata, model)
    assert zero_variance(added, order=2).summary().equals(found.summary())
    assert "gradient" not in idata["sample_stats"], "the input was changed"


@pytest.mark.slow
def test_nuts():
    model = two_variable_model()
    with model:
        idata = pm.sample(draws=1000, tune=500, chains=4, cores=1, random_seed=1, **QUIET)
    table = zero_variance(idata, order=2, model=model).summary()
    assert (table["variance_ratio"] > 100).all()
    assert ((table["mean"] - table["mean_before"]).abs() < 4.5 * table["mcse_before"]).all()


def test_draws_that_were_left_out_count_as_thinning():
    """Every tenth transition, selected or recorded: one prediction, and no false note."""
    x, g = Gaussian(ONE, 0.1 * ONE).chains(8, 4000, 0.2, ONE, 1)
    selected = zero_variance(as_trace(x, g, 0.2, ONE).isel(draw=slice(None, None, 10)))
    recorded = zero_variance(as_trace(x[:, ::10], g[:, ::10], 0.2, ONE, thin=10))
    xr.testing.assert_allclose(selected.predicted_gain, recorded.predicted_gain)
    assert selected.notes == recorded.notes
    assert not any("no injected noise" in note for note in selected.notes)
    uneven = zero_variance(as_trace(x, g, 0.2, ONE).isel(draw=np.r_[0:100, 200:800]))
    assert np.isnan(uneven.predicted_gain["theta"].item())


def test_little_noise_and_a_small_step_is_no_lack_of_injected_noise():
    """Batches of 50 draws are half an autocorrelation time: all gradients cancel in them."""
    x, g = Gaussian(ONE, 0.01 * ONE).chains(4, 1000, 0.02, ONE, 1)
    found = zero_variance(as_trace(x, g, 0.02, ONE))
    assert found.variance_ratio["theta"].item() > 100
    assert not any("no injected noise" in note for note in found.notes)


@pytest.mark.parametrize(
    ("thin", "coefficients", "removed"),
    [(1, "batch_means", True), (1, "marginal", False), (10, "batch_means", False)],
)
def test_where_order_2_leaves_the_bias_of_second_moments(thin, coefficients, removed):
    """Variance 1.16 for 1 before. Errors in the variable make the other coefficients too small."""
    x, g = Gaussian(ONE, ONE).chains(16, 4000, 0.3, ONE, 1, thin=thin)
    trace = as_trace(x, g, 0.3, ONE, thin=thin, gradient="plain", n_rows=100, batch_size=10)
    found = zero_variance(
        trace, order=2, func=lambda post: post["theta"] ** 2, coefficients=coefficients
    )
    error = found.mean["theta"].item() - 1
    if removed:
        assert abs(error) < 0.02
    else:
        assert error > 0.03
    assert removed != any("The bias of second moments" in note for note in found.notes)


def test_short_batches_of_independent_draws_are_long_enough(rng):
    x = rng.normal(size=(4, 80, 2))
    assert zero_variance(as_trace(x, -x + 0.1 * rng.normal(size=x.shape))).notes == ()


def test_a_mean_gradient_that_is_not_zero_is_warned_of():
    """Those of other data, or of chains that have not converged."""
    x, g = Gaussian(ONE, 0.1 * ONE).chains(4, 2000, 0.2, ONE, 1)
    zero_variance(as_trace(x, g, 0.2, ONE))
    with pytest.warns(
        UserWarning, match=r"mean of `gradient` should be zero, .* but is not \(prob"
    ):
        zero_variance(as_trace(x, g + 0.3, 0.2, ONE))


def test_slow_chains_are_not_said_to_be_elsewhere():
    """Batches shorter than the autocorrelation make any mean gradient seem improbable."""
    for seed in range(10):
        x, g = Gaussian(np.eye(10), np.zeros((10, 10))).chains(4, 1000, 0.02, np.eye(10), seed)
        notes = zero_variance(as_trace(x, g, 0.02, np.eye(10))).notes
        assert any("Batches of 50 draws are short" in note for note in notes)


def test_errors_cover_differences_between_chains(rng):
    """The control variates remove what differs within chains, and leave what differs between."""
    offsets, z = rng.normal(0, 0.5, size=(60, 4)), []
    for offset in offsets:
        x = rng.normal(size=(4, 400, 1))
        trace = as_trace(x, -x + 0.1 * rng.normal(size=x.shape))

        def func(posterior, offset=offset):
            return posterior["theta"] + xr.DataArray(offset, dims="chain")

        row = zero_variance(trace, func=func).summary().iloc[0]
        z.append([row["mean"] / row["mcse"], row["mean_before"] / row["mcse_before"]])
    # A Student-t law of three degrees of freedom is beyond 3 in 6 % of cases.
    assert (np.mean(np.abs(z) > 3, axis=0) < 0.15).all()
    assert (np.std(z, axis=0) < 3).all()


@pytest.mark.parametrize("tool", [zero_variance, stein_calibrate])
def test_chains_that_have_not_met_are_refused(tool, rng):
    x = rng.normal(size=(4, 400, 1)) + np.array([-1.5, -0.5, 0.5, 2.0])[:, None, None]
    with pytest.raises(ValueError, match=r"R-hat of theta\[0\] is 1\.\d+: they have not met"):
        tool(as_trace(x, -x))


def test_what_is_constant_but_for_rounding():
    x, g = Gaussian(ONE, 0.1 * ONE).chains(4, 2000, 0.2, ONE, 1)
    trace = as_trace(x, g, 0.2, ONE)

    def both(posterior):
        thirds = (posterior["theta"] + 1 / 3) - posterior["theta"]
        assert float(thirds.std()) > 0
        return xr.concat([posterior["theta"], thirds], dim="coordinate")

    table = zero_variance(trace, func=both).summary()
    for name in ("variance_ratio", "predicted_gain"):
        assert table[name].notna().tolist() == [True, False]


def test_a_function_cannot_change_the_trace(run):
    _, idata = run

    def in_place(posterior):
        posterior["slope"] *= 2
        return posterior

    before = idata["posterior"].to_dataset().copy(deep=True)
    with pytest.raises(ValueError, match="read-only"):
        zero_variance(idata, func=in_place)
    xr.testing.assert_identical(idata["posterior"].to_dataset(), before)


# --- Bad input ------------------------------------------------------------------------------


def test_bad_input(run):
    model, idata = run
    with pytest.raises(ValueError, match=r"name some of `intercept`.*, but got `alpha`"):
        zero_variance(idata, var_names=["slope", "alpha"])
    with pytest.raises(ValueError, match=r"`coefficients` should be one of 'batch_means'"):
        zero_variance(idata, coefficients="paper")
    with pytest.raises(ValueError, match=r"`order` should be a whole number .* got 0"):
        zero_variance(idata, order=0)
    with pytest.raises(ValueError, match=r"with coefficients='marginal', but got 'ridge'"):
        zero_variance(idata, coefficients="marginal", regression="ridge")
    with pytest.raises(ValueError, match=r"`flat` is constant over the draws, 1, and"):
        zero_variance(idata, func=lambda post: {"flat": 0 * post["slope"] + 1})
    with pytest.raises(ValueError, match="`func` should return a value for each of 4 x 1500 draws"):
        zero_variance(idata, func=lambda post: post["slope"].mean())
    with pytest.raises(ValueError, match=r"array with a value .* but returned shape \(3,\)"):
        zero_variance(idata, func=lambda post: np.ones(3))
    with pytest.raises(ValueError, match=r"`slope` should be finite, but is not in chain 0"):
        zero_variance(idata, func=lambda post: post["slope"].where(post["draw"] > 0))
    with pytest.raises(ValueError, match="at least one variable"):
        zero_variance(idata, func=lambda post: post[[]])
    with pytest.raises(ValueError, match=r"`func` should have at least one element .* shape"):
        zero_variance(idata, func=lambda post: np.ones((4, 1500, 0)))
    with pytest.raises(TypeError, match=r"`var_names` should name some of.*, but got 5"):
        zero_variance(idata, var_names=5)
    named = zero_variance(idata, func=lambda post: {"a": post["slope"].values, "b": post["slope"]})
    xr.testing.assert_equal(named.mean["a"], named.mean["b"])
    few = idata.sel(draw=slice(0, 6))
    message = r"9 terms of order 2 should have at least 52 batches, .* 4 x 7 draws.*or order=1"
    with pytest.raises(ValueError, match=message):
        zero_variance(few, order=2)
    with pytest.raises(ValueError, match=r"`batches` should be from .* but got 3\. Use such"):
        zero_variance(idata, order=1, batches=3)
    with pytest.raises(ValueError, match="should have a group `posterior`"):
        gradients(xr.DataTree(), model)
    with pytest.raises(ValueError, match="has no `intercept`, `slope`"):
        gradients(
            xr.DataTree.from_dict({"posterior": idata["posterior"].to_dataset()[["sigma"]]}), model
        )


def test_bad_chains():
    x, g = skewed_chain()
    for bad in (np.nan, np.inf):
        broken = g.copy()
        broken[2, 7:9, 1] = bad
        message = r"2 of chain 2 are not\. Leave them out, `idata.sel\(chain=\[0, 1, 3\]\)`"
        with pytest.raises(ValueError, match=message):
            zero_variance(as_trace(x, broken))
        assert zero_variance(as_trace(x, broken).sel(chain=[0, 1, 3])).mean.sizes
    far = x.copy()
    far[1] += np.array([0.0, 50.0, 0.0])
    with pytest.raises(ValueError, match=r"chain 1 is far from .* most of all in theta\[1\]"):
        zero_variance(as_trace(far, g))
    wide = x.copy()
    wide[3] = x[3].mean(0) + 100 * (x[3] - x[3].mean(0))
    with pytest.raises(ValueError, match=r"chain 3 is far"):
        zero_variance(as_trace(wide, g))
    still = x.copy()
    still[..., 2] = 1.0
    with pytest.raises(ValueError, match=r"1 of 3 are constant over the draws: `theta\[2\]`"):
        zero_variance(as_trace(still, g))
    same = x.copy()
    same[..., 2] = same[..., 0] + same[..., 1]
    with pytest.raises(ValueError, match="should not be linearly dependent"):
        zero_variance(as_trace(same, g))
    with pytest.raises(ValueError, match=r"A chain should have at least 4 draws, but has 3"):
        zero_variance(as_trace(x[:, :3], g[:, :3]))
    trace = as_trace(x, g)
    stats = trace["sample_stats"].to_dataset().drop_vars("gradient")
    trace["sample_stats"] = xr.DataTree(
        stats.assign(gradient=(("chain", "draw", "other"), g[..., :2]))
    )
    with pytest.raises(ValueError, match=r"of shapes \(4, 1500, 3\) and \(4, 1500, 2\)"):
        zero_variance(trace)
