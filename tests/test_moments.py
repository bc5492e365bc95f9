"""Moments over all transitions, and what is computed from them."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from pymc_sgmcmc import SGLDCV, stein_calibrate, zero_variance_of_moments
from pymc_sgmcmc.adaptation import Seen
from pymc_sgmcmc.moments import BATCHES, GROUP, RunningMoments, moments_dataset, read_moments
from tests.models import logistic_model

CVM = {"mode": "CVM"}
QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False}
D = 3


def seen(positions, gradients, *, tuning=False):
    sizes = np.full(len(positions), 0.1)
    return Seen(positions, gradients, np.arange(2), tuning, False, 1, sizes)


def run(moments, positions, gradients, pieces):
    state, start = moments.begin(positions[0]), 0
    for stop in [*np.cumsum(pieces), len(positions)]:
        part = slice(start, min(int(stop), len(positions)))
        if part.stop > part.start:
            state, _ = moments.update(state, seen(positions[part], gradients[part]))
        start = part.stop
    return moments.of_chain(state)


def trace(chains):
    """A trace with the moments of some chains."""
    dataset = moments_dataset(chains, [f"x[{i}]" for i in range(len(chains[0]["origin"]))])
    return xr.DataTree.from_dict({GROUP: dataset})


@pytest.mark.parametrize("elements", [10**6, 10**3])
@pytest.mark.parametrize("count", [100, 256, 700, 5000])
def test_sums_are_those_of_the_transitions(rng, monkeypatch, elements, count):
    """Also where batches were joined, pieces end within them, and batches share products."""
    monkeypatch.setattr("pymc_sgmcmc.moments.PRODUCT_ELEMENTS", elements)
    positions, gradients = rng.normal(size=(2, count, D))
    origin = np.array([0.1, -0.2, 0.3])
    kept = run(RunningMoments(origin, 1), positions, gradients, [7, 1, 300, 33, 1000])
    found = read_moments(trace([kept]))
    length, batches = found.batch_length, len(found.batch_position)
    assert batches == count // length <= BATCHES
    assert count < BATCHES or batches >= BATCHES // 2

    def means(values, length, number):
        return values[: length * number].reshape(number, length, *values.shape[1:]).mean(1)

    at = positions - origin
    np.testing.assert_allclose(found.batch_position, means(at, length, batches), atol=1e-12)
    np.testing.assert_allclose(found.batch_gradient, means(gradients, length, batches), atol=1e-12)
    groups = len(found.position_position)
    assert groups == count // found.group_length
    for name, left, right in (
        ("position_position", at, at),
        ("position_gradient", at, gradients),
        ("gradient_gradient", gradients, gradients),
    ):
        products = np.einsum("ki,kj->kij", left, right)
        expected = means(products, found.group_length, groups)
        np.testing.assert_allclose(getattr(found, name), expected, atol=1e-12)


def test_runs_of_any_length_give_the_same(rng):
    positions, gradients = rng.normal(size=(2, 3000, D))
    moments = RunningMoments(np.zeros(D), 4)
    whole = run(moments, positions, gradients, [])
    parts = run(moments, positions, gradients, [4, 4, 400, 40, 1600])
    for name in whole:
        np.testing.assert_allclose(whole[name], parts[name], rtol=1e-12, atol=1e-11)


def test_tuning_is_left_out_and_memory_is_constant(rng):
    moments = RunningMoments(np.zeros(D), 1)
    state = moments.begin(np.zeros(D))
    values = rng.normal(size=(100_000, D))
    after, _ = moments.update(state, seen(values, values, tuning=True))
    assert after is state
    after, _ = moments.update(state, seen(values, values))
    assert [one.nbytes for one in after.values()] == [one.nbytes for one in state.values()]
    assert moments.begin(np.zeros(600))["products"].shape[0] == 0


def langevin(rng, step_size, noise, count):
    """Exact Langevin chain on N(0, I) with gradient noise of variance `noise`."""
    x = rng.normal(size=D)
    positions, gradients = np.empty((2, count, D))
    for k in range(count):
        gradient = -x + np.sqrt(noise) * rng.normal(size=D)
        positions[k], gradients[k] = x, gradient
        x = x + step_size / 2 * gradient + np.sqrt(step_size) * rng.normal(size=D)
    return positions, gradients


def test_gain_and_bias_of_order_one_and_two(rng):
    r"""Means gain 1 + 1 / delta, delta = h V / 4; order 2 takes the bias of the variances."""
    h, V = 0.4, 1.5
    chains = []
    for _ in range(4):
        chain = langevin(rng, h, V, 50_000)
        chains.append(run(RunningMoments(np.zeros(D), 1), *chain, []))
    table = zero_variance_of_moments(trace(chains))
    delta = h * V / 4
    assert table["variance_ratio"].mean() == pytest.approx(1 + 1 / delta, rel=0.15)
    assert (table["mean"].abs() < 4.5 * table["mcse"]).all()
    second = zero_variance_of_moments(trace(chains), order=2)
    variances = second.iloc[D:]
    exact = (1 + h * V / 4) / (1 - h / 4)
    assert (np.abs(variances["mean_before"] - exact) < 4.5 * variances["mcse_before"]).all()
    assert (np.abs(variances["mean"] - 1) < 0.02 + 4.5 * variances["mcse"]).all()
    assert (variances["mean_before"] - 1 > 0.2).all()
    assert variances.index[0] == "variance of x[0]"


@pytest.fixture(scope="module")
def thinned():
    model = logistic_model()
    with model:
        step = SGLDCV(thin=20, compile_kwargs=CVM)
        idata = pm.sample(
            step=step,
            draws=1000,
            tune=100,
            chains=2,
            cores=2,
            mp_ctx="fork",
            random_seed=3,
            **QUIET,
        )
    return model, idata


def test_moments_of_a_run(thinned, tmp_path):
    """From worker processes, over all transitions, in a file and back."""
    _, idata = thinned
    group = idata[GROUP]
    total = group.attrs["transitions_a_batch"] * group.sizes["batch"]
    assert 0.98 * 20_000 < total <= 20_000
    assert "warning" not in idata["sample_stats"]
    stats = idata["sample_stats"]["position"].mean(("chain", "draw")).values
    mean = group["batch_position"].mean(("chain", "batch")) + group["origin"]
    sd = idata["sample_stats"]["position"].std(("chain", "draw")).values
    assert (np.abs(mean.values - stats) < 0.1 * sd).all()
    idata.to_netcdf(tmp_path / "run.nc")
    xr.testing.assert_identical(
        xr.open_datatree(tmp_path / "run.nc")[GROUP].to_dataset().load(), group.to_dataset()
    )


def test_control_variates_of_all_transitions(thinned):
    """A gain that the recorded draws, every twentieth transition, do not have."""
    _, idata = thinned
    table = zero_variance_of_moments(idata)
    assert list(table.index) == list(idata[GROUP]["unconstrained_position"].values)
    assert (table["variance_ratio"] > 4).all()
    assert (table["mcse"] < table["mcse_before"]).all()
    with pytest.raises(ValueError, match="`order` should be 1 or 2, but got 3"):
        zero_variance_of_moments(idata, order=3)


def test_calibration_with_all_transitions(thinned):
    _, idata = thinned
    before = idata.copy(deep=True)
    calibrated = stein_calibrate(idata, moments=True)
    ratios = calibrated["stein_calibration"]["sd_ratio"].values
    # Stated variance error of 5 %, so sds that are too large by about 2 %.
    assert ((ratios > 0.93) & (ratios < 1.01)).all()
    of_draws = stein_calibrate(idata)["stein_calibration"]
    of_all = calibrated["stein_calibration"]
    assert float(of_all["monte_carlo_error"].mean()) < float(of_draws["monte_carlo_error"].mean())
    xr.testing.assert_identical(idata[GROUP].to_dataset(), before[GROUP].to_dataset())
    with pytest.raises(ValueError, match="`moments=True` should have method='slope'"):
        stein_calibrate(idata, moments=True, method="second_moment")


def test_what_has_no_moments(thinned, rng):
    _, idata = thinned
    without = xr.DataTree.from_dict(
        {name: node.to_dataset() for name, node in idata.children.items() if name != GROUP}
    )
    with pytest.raises(ValueError, match="should have a group `sgmcmc_moments`"):
        zero_variance_of_moments(without)
    few = run(RunningMoments(np.zeros(D), 1), *rng.normal(size=(2, 15, D)), [])
    with pytest.raises(ValueError, match="at least 20 batches, but the moments have 15"):
        zero_variance_of_moments(trace([few]))
    bad = run(RunningMoments(np.zeros(D), 1), *np.full((2, 40, D), np.nan), [])
    with pytest.raises(ValueError, match="not finite: a chain diverged"):
        zero_variance_of_moments(trace([bad]))
