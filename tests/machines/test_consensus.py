"""Consensus Monte Carlo: models of shards, combinations of their draws, and whole runs."""

from __future__ import annotations

import functools
import logging
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import numpy as np
import pymc as pm
import pytest
from arviz_stats.base import array_stats
from scipy import special, stats

from pymc_sgmcmc import SGLDCV, ModelError, consensus, marginalize
from pymc_sgmcmc.machines import combine
from pymc_sgmcmc.machines.consensus import _add_mean_error, _shards_group, _warn_of_kernels
from pymc_sgmcmc.machines.dealt_rows import posterior_to_deal_out
from pymc_sgmcmc.machines.shards import POSITION, ShardDensity, deal_out
from pymc_sgmcmc.posterior import Posterior
from tests.support.models import logistic_model, two_variable_model
from tests.support.sources import CountedRows

Z = 4.5
"""Bounds are so many standard errors. A right result exceeds one of 100 once in 1500 times."""

SMALL = {"draws": 60, "tune": 20, "chains": 2, "cores": 1, "random_seed": 3, "progressbar": False}


# --- Models of shards ---------------------------------------------------------------------------


def simplex_model() -> pm.Model:
    """Transforms of an interval and a simplex, a potential without rows, and integer outcomes."""
    rng = np.random.default_rng(4)
    group = rng.integers(3, size=30)
    with pm.Model() as model:
        rate = pm.Uniform("rate", 0.5, 3.0)
        weights = pm.Dirichlet("weights", np.array([1.0, 2.0, 3.0]))
        pm.Potential("pull", -((rate - weights[0]) ** 2))
        pm.Poisson("y", rate * weights[group], observed=rng.poisson(1.0, size=30))
    return model


def covariance_model() -> pm.Model:
    """A Cholesky factor with an LKJ prior, and prior parameters as long as a shard."""
    rng = np.random.default_rng(5)
    with pm.Model() as model:
        chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=pm.Exponential.dist(1.0))
        effects = pm.Normal("effects", np.linspace(-1, 1, 10), np.linspace(1, 2, 10))
        X = pm.Data("X", rng.normal(size=(30, 10)))
        mu = pm.math.stack([X @ effects, X[:, 0]], axis=1)
        pm.MvNormal("y", mu, chol=chol, observed=rng.normal(size=(30, 2)))
    return model


def two_tables_model() -> pm.Model:
    """A table of which each shard has a part, and a small one that all have."""
    x = np.linspace(-1, 1, 30)
    with pm.Model() as model:
        slope = pm.HalfNormal("slope")
        pm.Normal("small", slope, 1.0, observed=x[:7])
        pm.Normal("large", slope * x, 1.0, observed=x)
    return model


@pytest.mark.parametrize(
    ("build", "rows"),
    [
        (functools.partial(two_variable_model, 30), None),
        (simplex_model, None),
        (covariance_model, None),
        (two_tables_model, "large"),
    ],
)
def test_log_densities_of_shards_add_up_to_that_of_the_model(build, rows, rng, without_compiler):
    model = build()
    posterior = posterior_to_deal_out(model, rows, by="consensus", to="shards")
    numbers = deal_out(30, 3, rng)
    assert np.array_equal(np.sort(np.concatenate(numbers)), np.arange(30))
    density = ShardDensity.of(posterior, 3)
    shards = [density.model(posterior.take(part)) for part in numbers]
    # In the mode CVM PyMC's log density of `MvNormal` is another one where C is switched off.
    whole = model.compile_logp(mode="FAST_COMPILE")
    parts = [shard.compile_logp(mode="FAST_COMPILE") for shard in shards]
    positions = rng.normal(size=(4, posterior.dimension))
    expected = np.array([whole(posterior.layout.unravel(position)) for position in positions])
    total = np.array([sum(part({POSITION: position}) for part in parts) for position in positions])
    np.testing.assert_allclose(total, expected, rtol=0, atol=1e-8)


def test_density_that_is_sent_has_no_rows(without_compiler):
    density = ShardDensity.of(Posterior(logistic_model(n_rows=20_000)), 8)
    assert len(cloudpickle.dumps(density)) < 50_000  # All rows are 500 KB.


# --- Combinations -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def regression():
    """Exact moments and draws of shards of unequal rows, and moments of all rows."""
    rng = np.random.default_rng(6)
    X = rng.normal(size=(200, 3)) @ np.array([[1, 0.6, 0], [0, 1, -0.5], [0, 0, 0.3]])
    y = X @ [1.0, -1.0, 0.5] + rng.normal(size=200)
    rows = np.split(np.arange(200), [20, 60, 120])
    prior = np.diag([1.0, 4.0, 0.5])

    def posterior(X, y, power):
        covariance = np.linalg.inv(X.T @ X + power * prior)
        return covariance @ X.T @ y, covariance

    moments = [posterior(X[part], y[part], 1 / len(rows)) for part in rows]
    draws = [rng.multivariate_normal(*of_shard, size=(2, 10_000)) for of_shard in moments]
    means, covariances = map(np.stack, zip(*moments, strict=True))
    return means, covariances, np.stack(draws), posterior(X, y, 1)


def test_product_of_gaussians_is_the_posterior(regression):
    means, covariances, _, (mean, covariance) = regression
    product = combine.gaussian_product(means, covariances)
    np.testing.assert_allclose(product[0], mean, rtol=1e-9)
    np.testing.assert_allclose(product[1], covariance, rtol=1e-9)


@pytest.mark.parametrize("way", ["gaussian", "average"])
def test_combination_of_gaussian_shards(way, regression, rng):
    means, covariances, draws, (mean, covariance) = regression
    combined = combine.gaussian(draws, rng) if way == "gaussian" else combine.average(draws)
    assert combined.shape == draws.shape[1:]
    flat = combined.reshape(-1, 3)
    count = len(flat)
    # Means of the shards have errors, and their estimated precisions, which are Wishart's.
    of_mean = covariance.copy()
    for shard_mean, shard_covariance in zip(means, covariances, strict=True):
        precision = np.linalg.inv(shard_covariance)
        off = precision @ (shard_mean - mean)
        spread = precision * (off @ shard_covariance @ off) + np.outer(off, off)
        of_mean += covariance @ spread @ covariance
    if way == "gaussian":
        of_mean += covariance  # of its own draws
    z = (flat.mean(0) - mean) / np.sqrt(np.diag(of_mean) / count)
    assert np.abs(z).max() < Z
    variances = np.diag(covariance)
    of_covariance = 2 * (np.outer(variances, variances) + covariance**2) / count
    assert (np.abs(np.cov(flat.T) - covariance) < Z * np.sqrt(of_covariance)).all()


def test_averages_are_of_one_draw_of_each_shard(regression):
    """Autocorrelation of the shards stays: other draws of a shard change no other draw."""
    draws = regression[2][:, :, :50]
    ordered = combine.average(draws)
    swapped = combine.average(draws[:, ::-1, ::-1])
    np.testing.assert_allclose(ordered, swapped[::-1, ::-1], rtol=1e-10)


def test_semiparametric_draws_have_the_density_of_the_product(rng):
    """The estimates of the shards are multiplied on a grid, by the formula of the paper."""
    shards, h = 3, 1.0
    shape = (shards, 2, 1500, 1)
    draws = np.log(rng.gamma(4.0, size=shape)) + np.array([0.0, 0.4, -0.3])[:, None, None, None]
    flat = draws.reshape(shards, -1)
    grid = np.linspace(-1, 3, 801)
    scale = np.sqrt(shards / np.sum(1 / flat.var(1, ddof=1)))
    density = np.ones(len(grid))
    for values in flat:
        normal = stats.norm(values.mean(), values.std(ddof=1))
        kernels = stats.norm.pdf(grid[:, None], values, h * scale) / normal.pdf(values)
        density *= normal.pdf(grid) * kernels.mean(1)
    density /= density.sum()
    mean = density @ grid
    combined = combine.semiparametric(draws, rng, bandwidth=h)[..., 0]
    for function in (lambda x: x, lambda x: (x - mean) ** 2, lambda x: x < mean - 0.3):
        values = function(combined).astype(float)
        mcse = array_stats.mcse(values, chain_axis=0, draw_axis=1)
        assert abs(values.mean() - density @ function(grid)) < Z * mcse


def log_gamma_shards(events: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws of the logarithm of a Poisson rate, from these numbers of events of the shards."""
    return np.log(rng.gamma(np.reshape(events, (-1, 1, 1, 1)), size=(len(events), 2, 4000, 1)))


def log_gamma_error(mean: float, events: np.ndarray) -> float:
    """Error of the mean of the rate of all shards, in its standard deviations."""
    exact = special.digamma(np.sum(events)) - np.log(len(events))
    return (mean - exact) / np.sqrt(special.polygamma(1, np.sum(events)))


@pytest.mark.parametrize(
    ("events", "least"), [(np.full(8, 50), 0.15), (np.array([20, 60, 65, 80, 40, 45, 30, 60]), 0.2)]
)
def test_skewness_and_distances_predict_the_error_of_the_mean(events, least, rng):
    draws = log_gamma_shards(events, rng)
    true = log_gamma_error(combine.average(draws).mean(), events)
    errors, noise, second_order = combine.mean_errors(draws, 8000)
    assert abs(true) > least
    assert abs(errors[0] - true) < second_order + Z * np.hypot(noise[0], 1 / np.sqrt(8000))
    assert 0.02 < second_order < 0.07


def test_draws_without_skewness_have_no_error(rng):
    errors, noise, second_order = combine.mean_errors(rng.normal(size=(8, 2, 4000, 3)), 8000)
    assert np.abs(errors / noise).max() < Z
    assert second_order == 0


def test_semiparametric_removes_the_error_of_skewness(rng):
    events = np.full(4, 10)
    draws = log_gamma_shards(events, rng)[:, :, :1000]
    combined = combine.semiparametric(draws, rng)
    error = combine.semiparametric_errors(draws, rng)[0]
    assert log_gamma_error(combine.average(draws).mean(), events) < -0.2
    assert abs(log_gamma_error(combined.mean(), events)) < min(0.15, Z * error)


# --- Whole runs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logistic_run():
    with logistic_model() as model:
        pm.Deterministic("odds", pm.math.exp(model["beta"]))
    return model, consensus(model, 2, "average", **SMALL)


@pytest.mark.slow
def test_run(logistic_run):
    model, idata = logistic_run
    posterior, group = idata["posterior"], idata["consensus_shards"]
    assert posterior["beta"].dims == ("chain", "draw", "feature")
    assert posterior["beta"].shape == (2, 60, 3)
    np.testing.assert_allclose(posterior["odds"], np.exp(posterior["beta"]))
    np.testing.assert_array_equal(posterior["beta"], idata["sample_stats"]["position"])
    assert list(idata["observed_data"].data_vars) == ["y"]
    assert group["rows"].values.tolist() == [200, 200]
    assert group.attrs["parts"] == 2
    assert group.attrs["combine"] == "average"
    assert group.attrs["step"] == "SGLDCV"
    assert {"mean", "sd", "r_hat", "ess", "mean_error"} <= set(group.data_vars)
    center = SGLDCV(model=model).center
    sd = center.curvature.standard_deviations
    draws = posterior["beta"].values.reshape(-1, 3)
    # 120 draws have some 100 effective ones; the first shards' errors are in their means.
    assert (np.abs(draws.mean(0) - center.position) < Z * 0.1 * sd + 0.15 * sd).all()
    assert (np.abs(draws.std(0) / sd - 1) < 0.35).all()


@pytest.mark.slow
def test_client_runs_the_same_shards(logistic_run):
    model, idata = logistic_run
    with ThreadPoolExecutor(1) as client:
        other = consensus(model, 2, "average", client=client, **SMALL)
    np.testing.assert_array_equal(other["posterior"]["beta"], idata["posterior"]["beta"])


@pytest.mark.slow
def test_dask_client(logistic_run):
    distributed = pytest.importorskip("distributed")
    model, idata = logistic_run
    cluster = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with distributed.LocalCluster(**cluster) as workers, distributed.Client(workers) as client:
        other = consensus(model, 2, "average", client=client, **SMALL)
    np.testing.assert_allclose(other["posterior"]["beta"], idata["posterior"]["beta"], rtol=1e-9)


def test_nuts():
    idata = consensus(logistic_model(), 2, step="nuts", **SMALL)
    assert idata["posterior"]["beta"].shape == (2, 60, 3)
    assert idata["consensus_shards"].attrs["step"] == "nuts"


# --- What is reported and refused ---------------------------------------------------------------


def test_shards_that_have_not_converged_are_named(rng, caplog):
    positions = rng.normal(size=(3, 2, 200, 2))
    positions[1, 0, :, 1] += 5
    with caplog.at_level(logging.WARNING):
        _shards_group(positions, ("a", "b"))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("Shard 1 has not converged: 1 of 2 coordinates have R-hat above 1.05")
    assert "such as `b`" in message
    positions[2, ..., 0] = 1.0
    with pytest.raises(ValueError, match="`a` in shard 2 do not vary"):
        _shards_group(positions, ("a", "b"))


def test_large_errors_of_means_are_reported(rng, caplog):
    draws = log_gamma_shards(np.full(8, 20), rng)[:, :, :1000]
    group = _shards_group(draws, ("log_rate",))
    assert not caplog.records
    _add_mean_error(group, draws)
    _warn_of_kernels(np.array([0.05, 0.3]))
    messages = [record.getMessage() for record in caplog.records]
    assert "that of `log_rate` is off by about -0.2" in messages[0]
    assert "rough" in messages[1]
    caplog.clear()
    _warn_of_kernels(np.array([0.05, 0.05]))
    symmetric = rng.normal(size=draws.shape)
    _add_mean_error(_shards_group(symmetric, ("log_rate",)), symmetric)
    assert not caplog.records


def discrete_model() -> pm.Model:
    with pm.Model() as model:
        count = pm.Poisson("count", 3.0)
        pm.Normal("y", count, 1.0, observed=np.arange(20.0))
    return model


def groups_model() -> pm.Model:
    rng = np.random.default_rng(7)
    with pm.Model() as model:
        mean = pm.Normal("mean")
        effect = pm.Normal("effect", shape=20)
        pm.Normal(
            "y", mean + effect[np.repeat(np.arange(20), 2)], 1.0, observed=rng.normal(size=40)
        )
    return marginalize(model, "effect")


@pytest.mark.parametrize(
    ("build", "settings", "error", "message"),
    [
        (logistic_model, {"parts": 1}, ValueError, "`parts` should be a whole number, at least 2"),
        (logistic_model, {"parts": 200}, ModelError, "Take at most 133 parts"),
        (logistic_model, {"combine": "mean"}, ValueError, "`combine` should be one of"),
        (logistic_model, {"draws": 4, "chains": 1}, ValueError, "A shard has 4 draws"),
        (
            logistic_model,
            {"combine": "semiparametric", "draws": 10},
            ValueError,
            "to 24 draws of all chains",
        ),
        (logistic_model, {"step": "metropolis"}, TypeError, '`step` should be "nuts"'),
        (
            logistic_model,
            {"step": functools.partial(SGLDCV, rows=["X"])},
            ValueError,
            "`step` has `rows=`",
        ),
        (
            logistic_model,
            {"rows": CountedRows({"y": np.zeros(9)})},
            ModelError,
            "`rows` is a source",
        ),
        (logistic_model, {"client": 3}, TypeError, "method `submit`"),
        (lambda: logistic_model(50), {}, ModelError, "uses `pm.Minibatch`"),
        (discrete_model, {}, ModelError, "`count` is discrete"),
        (groups_model, {}, ModelError, "numbers of groups"),
    ],
)
def test_refused(build, settings, error, message, without_compiler):
    with pytest.raises(error, match=message):
        consensus(build(), **{**SMALL, **settings})


def test_made_step_methods_are_refused(uncompiled):
    model = logistic_model()
    with pytest.raises(TypeError, match="`step=SGLDCV`"):
        consensus(model, step=SGLDCV(model=model))


def test_many_coordinates_are_refused_by_the_semiparametric_combination(without_compiler):
    with pm.Model() as model:
        mean = pm.Normal("mean", shape=51)
        pm.Normal("y", mean, 1.0, observed=np.zeros((200, 51)))
    with pytest.raises(ValueError, match="takes at most 50 coordinates, but the model has 51"):
        consensus(model, 2, "semiparametric")
