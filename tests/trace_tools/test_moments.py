"""Moments over all transitions, and what is computed from them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from pymc_sgmcmc import (
    SGLD,
    SGLDCV,
    stein_calibrate,
    zero_variance,
)
from pymc_sgmcmc.adaptation import Seen
from pymc_sgmcmc.adaptation.moments import BATCHES, RunningMoments
from pymc_sgmcmc.record import MOMENTS, moments_dataset
from pymc_sgmcmc.trace_tools.moments import read_moments
from tests.support.langevin_chains import Gaussian, as_trace
from tests.support.models import logistic_model

NUMBA = {"mode": "NUMBA"}
QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False}
D = 3


def seen(positions, gradients, *, tuning=False, thin=1):
    sizes = np.full(len(positions), 0.1)
    return Seen(positions, gradients, partial(np.arange, 2), tuning, False, thin, sizes)


def run(moments, positions, gradients, pieces, thin=1):
    state, start = moments.begin(positions[0]), 0
    for stop in [*np.cumsum(pieces), len(positions)]:
        part = slice(start, min(int(stop), len(positions)))
        if part.stop > part.start:
            state, _ = moments.update(state, seen(positions[part], gradients[part], thin=thin))
        start = part.stop
    return moments.of_chain(state)


def trace(chains):
    """A trace with the moments of some chains."""
    dataset = moments_dataset(chains, [f"x[{i}]" for i in range(len(chains[0]["origin"]))])
    return xr.DataTree.from_dict({MOMENTS: dataset})


@pytest.mark.parametrize("elements", [10**6, 10**3])
@pytest.mark.parametrize("count", [100, 256, 700, 5000])
def test_sums_are_those_of_the_transitions(rng, monkeypatch, elements, count):
    """Also where batches were joined, pieces end within them, and batches share products."""
    monkeypatch.setattr("pymc_sgmcmc.adaptation.moments.PRODUCT_ELEMENTS", elements)
    positions, gradients = rng.normal(size=(2, count, D))
    kept = run(RunningMoments(D), positions, gradients, [7, 1, 300, 33, 1000])
    stored = trace([kept])
    found = read_moments(stored)
    length, batches = found.batch_length, found.batch_position.shape[1]
    assert batches == count // length <= BATCHES
    assert count < BATCHES or batches >= BATCHES // 2

    def means(values, length, number):
        return values[: length * number].reshape(number, length, *values.shape[1:]).mean(1)

    at = positions - positions[0]
    np.testing.assert_allclose(found.batch_position[0], means(at, length, batches), atol=1e-12)
    np.testing.assert_allclose(
        found.batch_gradient[0], means(gradients, length, batches), atol=1e-12
    )
    groups = found.position_position.shape[1]
    counted = positions[: length * batches]
    np.testing.assert_allclose(stored[MOMENTS]["mean"][0], counted.mean(0))
    if groups:
        covariance = np.cov(positions.T, bias=True)
        np.testing.assert_allclose(stored[MOMENTS]["covariance"][0], covariance, atol=1e-12)
    group_length = int(found.group_counts.max())
    assert found.group_counts.sum() == count
    complete = count // group_length
    assert groups == -(-count // group_length)
    for name, left, right in (
        ("position_position", at, at),
        ("position_gradient", at, gradients),
    ):
        products = np.einsum("ki,kj->kij", left, right)
        expected = means(products, group_length, complete)
        some = stored[MOMENTS][f"group_{name}"][0]
        np.testing.assert_allclose(some[:complete], expected, atol=1e-12)
        if complete < groups:
            last = products[complete * group_length :].mean(0)
            np.testing.assert_allclose(some[complete], last, atol=1e-12)


@pytest.mark.parametrize("d", [D, 25])
def test_runs_of_any_length_give_the_same(rng, d):
    positions, gradients = rng.normal(size=(2, 6000, d))
    moments = RunningMoments(d)
    whole = run(moments, positions, gradients, [], thin=20)
    parts = run(moments, positions, gradients, [20, 20, 2000, 40, 1600], thin=20)
    for name in whole:
        np.testing.assert_allclose(whole[name], parts[name], rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize(("thin", "spacing"), [(9, 1), (15, 3), (90, 4)])
def test_products_of_many_coordinates_are_of_spaced_transitions(rng, thin, spacing):
    """The last transition of a draw and those before it; means are of all transitions."""
    d, draws = 25, 40
    positions, gradients = rng.normal(size=(2, draws * thin, d))
    stored = read_moments(trace([run(RunningMoments(d), positions, gradients, [], thin)]))
    chosen = np.arange(draws * thin).reshape(draws, thin)[:, ::-1][:, ::spacing].ravel()
    at = positions - positions[0]
    weights = stored.group_counts[0] / (draws * thin)
    for name, left, right in (
        ("position_position", at[chosen], at[chosen]),
        ("position_gradient", at[chosen], gradients[chosen]),
    ):
        products = np.tensordot(weights, getattr(stored, name)[0], 1)
        np.testing.assert_allclose(products, left.T @ right / len(chosen), atol=1e-12)
    means = stored.batch_gradient[0].mean(0)
    np.testing.assert_allclose(means, gradients.mean(0), atol=1e-12)
    np.testing.assert_allclose(weights @ stored.group_position[0], at[chosen].mean(0), atol=1e-12)


def test_tuning_is_left_out_and_memory_is_constant(rng):
    moments = RunningMoments(D)
    state = moments.begin(np.zeros(D))
    values = rng.normal(size=(100_000, D))
    after, _ = moments.update(state, seen(values, values, tuning=True))
    assert after is state
    after, _ = moments.update(state, seen(values, values))
    assert [one.nbytes for one in after.values()] == [one.nbytes for one in state.values()]
    assert RunningMoments(600).begin(np.zeros(600))["products"].shape[0] == 0


def of_moments(idata, order=1, **settings):
    """Table of means over all transitions, by label of the coordinate."""
    table = zero_variance(idata, order, moments="only", **settings).summary()
    index = table.index.str.replace(r"position\[(.*)\]", r"\1", regex=True)
    return table.set_index(index.str.replace(r"variance\[(.*)\]", r"variance of \1", regex=True))


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
        chains.append(run(RunningMoments(D), *chain, []))
    table = of_moments(trace(chains))
    delta = h * V / 4
    assert table["variance_ratio"].mean() == pytest.approx(1 + 1 / delta, rel=0.15)
    assert (table["mean"].abs() < 4.5 * table["mcse"]).all()
    second = of_moments(trace(chains), order=2)
    variances = second.iloc[D:]
    exact = (1 + h * V / 4) / (1 - h / 4)
    assert (np.abs(variances["mean_before"] - exact) < 4.5 * variances["mcse_before"]).all()
    assert (np.abs(variances["mean"] - 1) < 0.02 + 4.5 * variances["mcse"]).all()
    assert (variances["mean_before"] - 1 > 0.2).all()
    assert variances.index[0] == "variance of x[0]"


@pytest.mark.slow
def test_errors_are_those_made(rng):
    """Of slow chains, whose stored batches are shorter than the autocorrelation time.

    z-scores of 60 runs of 3 coordinates: four standard errors of their mean square are 0.5. Without
    regard to that the squares are about the mean of the chains, it would be above 20.
    """
    h, V, count = 0.1, 0.3, 2000
    before, after, variances = [], [], []
    for _ in range(60):
        chains = [run(RunningMoments(D), *langevin(rng, h, V, count), []) for _ in range(4)]
        first, second = (of_moments(trace(chains), order) for order in (1, 2))
        before.append(first["mean_before"] / first["mcse_before"])
        after.append(first["mean"] / first["mcse"])
        rows = second.iloc[D:]
        variances.append((rows["mean"] - 1) / rows["mcse"])
        assert first.attrs["notes"] == [] or "are short beside" in first.attrs["notes"][0]
    for z in (before, after, variances):
        assert np.mean(np.square(z)) == pytest.approx(1, abs=0.5)


def test_short_batches_are_noted(rng):
    chain = run(RunningMoments(D), *langevin(rng, 0.02, 0.3, 2000), [])
    (note,) = of_moments(trace([chain, chain])).attrs["notes"]
    assert note.startswith("Batches of 96 transitions are short beside an autocorrelation time of")


def test_runs_with_other_origins_side_by_side(rng):
    """Two runs in one trace are four chains of one."""
    positions, gradients = 1e6 + rng.normal(size=(2, 4, 3000, D))
    chains = [run(RunningMoments(D), *both, []) for both in zip(positions, gradients, strict=True)]
    together = trace(chains)
    assert np.ptp(together[MOMENTS]["origin"].values, axis=0).min() > 0
    runs = [trace(chains[:2]), trace(chains[2:])]
    concatenated = xr.concat([one[MOMENTS].to_dataset() for one in runs], dim="chain")
    stored = read_moments(xr.DataTree.from_dict({MOMENTS: concatenated}))
    length = int(stored.group_counts.max())
    batches = 3000 // length
    at = positions[:, : batches * length] - stored.origin
    g = gradients[:, : batches * length]
    shape = (4, batches, length, D)
    np.testing.assert_allclose(
        stored.group_position[:, :batches], at.reshape(shape).mean(2), atol=1e-8
    )
    for found, right in ((stored.position_position, at), (stored.position_gradient, g)):
        products = at.reshape(shape).swapaxes(2, 3) @ right.reshape(shape) / length
        np.testing.assert_allclose(found[:, :batches], products, rtol=1e-8, atol=1e-6)
    longer = run(RunningMoments(D), *rng.normal(size=(2, 8000, D)), [])
    with_longer = xr.concat(
        [together[MOMENTS].to_dataset(), trace([longer])[MOMENTS].to_dataset()],
        dim="chain",
        join="outer",
    )
    with pytest.raises(ValueError, match="runs of different lengths were put together"):
        of_moments(xr.DataTree.from_dict({MOMENTS: with_longer}))
    with pytest.raises(ValueError, match="should have the dimension `chain`, but has no `chain`"):
        of_moments(together.sel(chain=0))


@pytest.fixture(scope="module")
def thinned():
    model = logistic_model()
    with model:
        step = SGLDCV(thin=20, compile_kwargs=NUMBA)
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


@pytest.mark.slow
def test_moments_of_a_run(thinned, tmp_path):
    """From worker processes, over all transitions, in a file and back."""
    _, idata = thinned
    group = idata[MOMENTS]
    total = int(group["transitions_a_batch"][0]) * group.sizes["batch"]
    assert 0.98 * 20_000 < total <= 20_000
    assert "warning" not in idata["sample_stats"]
    stats = idata["sample_stats"]["position"].mean(("chain", "draw")).values
    mean = (group["batch_position"].mean("batch") + group["origin"]).mean("chain")
    sd = idata["sample_stats"]["position"].std(("chain", "draw")).values
    assert (np.abs(mean.values - stats) < 0.1 * sd).all()
    idata.to_netcdf(tmp_path / "run.nc")
    xr.testing.assert_identical(
        xr.open_datatree(tmp_path / "run.nc")[MOMENTS].to_dataset().load(), group.to_dataset()
    )


@pytest.mark.usefixtures("without_compiler")
def test_moments_of_gradients_with_a_memory():
    """SAGA computes draw by draw; without thinning the moments are those of the draws."""
    with logistic_model():
        # Numba takes twenty seconds for SAGA.
        quick = {"mode": "FAST_COMPILE"}
        step = SGLD(gradient="saga", batch_size=20, thin=1, compile_kwargs=quick)
        idata = pm.sample(step=step, draws=600, tune=100, chains=1, random_seed=3, **QUIET)
    group, stats = idata[MOMENTS], idata["sample_stats"]
    length, batches = int(group["transitions_a_batch"][0]), group.sizes["batch"]
    assert length * batches == 600
    positions = stats["position"].values.reshape(batches, length, -1) - group["origin"].values
    gradients = stats["gradient"].values.reshape(batches, length, -1)
    np.testing.assert_allclose(group["batch_gradient"][0], gradients.mean(1), atol=1e-9)
    products = np.einsum("bki,bkj->bij", positions, gradients) / length
    np.testing.assert_allclose(group["group_position_gradient"][0], products, atol=1e-9)


def test_control_variates_of_all_transitions(thinned):
    """A gain that the recorded draws, every twentieth transition, do not have."""
    _, idata = thinned
    labels = list(idata[MOMENTS]["unconstrained_position"].values)
    means = zero_variance(idata, moments="only")
    assert list(means.mean["position"]["unconstrained_position"].values) == labels
    assert means.over_transitions["position"].all()
    with pytest.raises(ValueError, match="needs the draws of the trace"):
        means.draws()
    with pytest.raises(ValueError, match="means of the position alone"):
        zero_variance(idata, var_names="slope", moments="only")
    with pytest.raises(ValueError, match="`moments` should be True, False or 'only'"):
        zero_variance(idata, moments="all")
    table = means.summary()
    assert (table["variance_ratio"] > 4).all()
    assert (table["mcse"] < table["mcse_before"]).all()
    with pytest.raises(
        ValueError, match=r"`batches` should be from 10 to 250 a chain .* but got 1000"
    ):
        of_moments(idata, batches=1000)
    with pytest.raises(ValueError, match="`order` should be 1 or 2, but got 3"):
        of_moments(idata, order=3)


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
    xr.testing.assert_identical(idata[MOMENTS].to_dataset(), before[MOMENTS].to_dataset())


def test_what_has_no_moments(thinned, rng):
    _, idata = thinned
    without = xr.DataTree.from_dict(
        {name: node.to_dataset() for name, node in idata.children.items() if name != MOMENTS}
    )
    with pytest.raises(ValueError, match="should have a group `sgmcmc_moments`"):
        of_moments(without)
    few = run(RunningMoments(D), *rng.normal(size=(2, 15, D)), [])
    with pytest.raises(ValueError, match="at least 20 batches, but the moments have at most 15"):
        of_moments(trace([few]))
    bad = run(RunningMoments(D), *np.full((2, 40, D), np.nan), [])
    with pytest.raises(ValueError, match="finite, but is not: a chain diverged"):
        of_moments(trace([bad]))


@pytest.mark.parametrize("dimension", [120, 400, 500])
def test_many_coordinates_have_products_of_all_transitions(rng, dimension):
    count = 1100
    values = rng.normal(size=(2, count, dimension))
    stored = trace([run(RunningMoments(D), *values, [64, 64], thin=4)])
    assert stored[MOMENTS]["transitions_of_group"].sum() == count
    covariance = np.cov(values[0].T, bias=True)
    np.testing.assert_allclose(stored[MOMENTS]["covariance"][0], covariance, atol=1e-10)


def test_too_few_groups_for_an_error(rng):
    values = rng.normal(size=(2, 1, 5000, 400))
    idata = as_trace(values[0], -values[0])
    idata[MOMENTS] = trace([run(RunningMoments(400), values[0, 0], -values[0, 0], [])])[MOMENTS]
    with pytest.raises(ValueError, match="400 coordinates are in 2 groups of transitions over 1"):
        stein_calibrate(idata, moments=True)


def test_fewer_transitions_than_coordinates(rng):
    chain = run(RunningMoments(60), *rng.normal(size=(2, 40, 60)), [])
    with pytest.raises(ValueError, match="Sample more draws than there are coordinates"):
        of_moments(trace([chain]), order=2, regression="ridge")


def test_few_batches_are_not_taken_for_chains_elsewhere(rng):
    """Two batches a chain say nothing of their spread; the message is about their number."""
    for _ in range(20):
        chains = [run(RunningMoments(D), *rng.normal(size=(2, 200, D)), [], 100) for _ in range(2)]
        with pytest.raises(ValueError, match="at least 20 batches, but the moments have at most 4"):
            of_moments(trace(chains))
    far = [
        run(RunningMoments(D), at + rng.normal(size=(300, D)), rng.normal(size=(300, D)), [])
        for at in (0, 0, 0, 1000)
    ]
    with pytest.raises(ValueError, match="chain 3 is far from the median"):
        of_moments(trace(far))


def test_coordinates_that_do_not_move_or_depend_on_each_other(rng):
    values = rng.normal(size=(4, 2, 2000, D))
    still, same = values.copy(), values.copy()
    still[:, 0, :, 1] = 3.0
    same[:, :, :, 1] = 2 * same[:, :, :, 0]
    with_still, with_same = (
        trace([run(RunningMoments(D), *one, []) for one in chains]) for chains in (still, same)
    )
    for order in (1, 2):
        with pytest.raises(ValueError, match=r"1 of 3 are constant over the draws: `x\[1\]`"):
            of_moments(with_still, order)
    with pytest.raises(ValueError, match="functions of others"):
        of_moments(with_same, 2)


def test_few_draws_of_many_transitions(rng):
    """With moments 40 draws of 400 transitions each are enough for 4 coordinates."""
    H, h = np.diag([1.0, 2.0, 3.0, 4.0]), 0.4
    x, g = Gaussian(H, H).chains(4, 10_000, h, np.linalg.inv(H), seed=1)
    idata = as_trace(x[:, ::1000], g[:, ::1000])
    chains = [run(RunningMoments(D), *both, [], 400) for both in zip(x, g, strict=True)]
    idata[MOMENTS] = trace(chains)[MOMENTS]
    with pytest.raises(ValueError, match=r"at least 50 draws, but the trace has 40.*moments=True"):
        stein_calibrate(idata)
    report = stein_calibrate(idata, moments=True)["stein_calibration"]
    inflation = (1 + h / 4) / (1 - h / 4)
    np.testing.assert_allclose(report["sd_ratio"] ** -2, inflation, rtol=0.03)


def test_means_do_not_lose_by_order_2(rng):
    chains = [run(RunningMoments(D), *langevin(rng, 0.75, 0.5, 20_000), []) for _ in range(4)]
    first, second = (of_moments(trace(chains), order) for order in (1, 2))
    for name in first.columns:
        np.testing.assert_allclose(second[name].iloc[:D], first[name])
    assert (first["variance_ratio"] > 5).all()


def test_warnings_that_are_kept_have_no_moments():
    with logistic_model():
        step = SGLDCV(compile_kwargs=NUMBA)
        idata = pm.sample(
            step=step, draws=60, tune=40, chains=2, random_seed=1, keep_warning_stat=True, **QUIET
        )
    assert MOMENTS in idata.children
    assert all(one is None for one in idata["sample_stats"]["warning"].values.ravel())


# --- One function for means, and what is left of a run ---------------------------------------


@pytest.fixture(scope="module")
def thinned_run():
    """Default settings: some ten transitions a draw. One variable is transformed."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=3000)
    with pm.Model() as model:
        slope = pm.Normal("slope", 0, 10)
        scale = pm.HalfNormal("scale", 3)
        pm.Normal("y", slope * x, scale, observed=2 * x + rng.normal(size=3000))
        step = SGLDCV(gradient="cv", integrator="euler", compile_kwargs=NUMBA)
        idata = pm.sample(
            step=step, draws=1000, tune=200, chains=2, cores=1, random_seed=1, **QUIET
        )
    return model, idata


def test_means_are_over_all_transitions_where_these_serve(thinned_run):
    _, idata = thinned_run
    assert idata["sample_stats"].attrs["sgmcmc_thin"] > 5
    found = zero_variance(idata)
    assert bool(found.over_transitions["slope"])
    assert not bool(found.over_transitions["scale"])
    table = of_moments(idata)
    assert found.mean["slope"].item() == table.loc["slope", "mean"]
    assert found.mcse["slope"].item() == table.loc["slope", "mcse"]
    draws = zero_variance(idata, moments=False)
    assert not draws.over_transitions["slope"]
    assert found.mean["scale"] == draws.mean["scale"]
    # The door that users take has the gain of the other one.
    assert found.variance_ratio["slope"] > 4 * draws.variance_ratio["slope"]
    assert found.variance_ratio["slope"] == pytest.approx(
        found.predicted_gain["slope"].item(), rel=0.5
    )
    assert any("over all transitions" in note for note in found.notes)
    assert found.summary()["over_transitions"].tolist() == [True, False]
    # A function that returns a coordinate is one as well.
    same = zero_variance(idata, func=lambda post: post["slope"])
    assert same.mean["slope"] == found.mean["slope"]


@pytest.mark.parametrize(
    "selected",
    [slice(500, None), slice(None, None, 5), slice(None, None, -1), np.tile(np.arange(500), 2)],
    ids=["half", "thinned", "reversed", "half twice"],
)
def test_moments_are_not_those_of_selected_draws(thinned_run, selected):
    _, idata = thinned_run
    part = idata.isel(draw=selected)
    with pytest.raises(ValueError, match=r"moments of all 1000 draws of a chain, but .* has \d+"):
        of_moments(part)
    found = zero_variance(part)
    assert not bool(found.over_transitions["slope"])
    assert any("over the draws alone" in note for note in found.notes)
    # Chains may be selected: each has its own.
    one = zero_variance(idata.isel(chain=[0]))
    assert bool(one.over_transitions["slope"])


def test_moments_of_the_chains_that_ended():
    """Of three chains the last is interrupted late, and PyMC cuts all to its length."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=500)

    def interrupt(trace, draw):
        if draw.chain == 2 and draw.draw_idx == 350:
            raise KeyboardInterrupt

    with pm.Model():
        slope = pm.Normal("slope", 0, 10)
        pm.Normal("y", slope * x, 1.0, observed=2 * x + rng.normal(size=500))
        step = SGLDCV(compile_kwargs=NUMBA)
        idata = pm.sample(
            step=step,
            draws=300,
            tune=100,
            chains=3,
            cores=1,
            random_seed=1,
            callback=interrupt,
            **QUIET,
        )
    kept = idata["posterior"].sizes
    assert dict(kept) == {"chain": 3, "draw": 251}
    moments = idata[MOMENTS].to_dataset()
    np.testing.assert_array_equal(
        moments["batch_position"].isnull().all(("batch", "unconstrained_position")),
        [False, False, True],
    )
    assert read_moments(idata).batch_position.shape[0] == 2
    assert of_moments(idata).loc["slope", "mcse"] > 0
    found = zero_variance(idata)
    assert not bool(found.over_transitions["slope"])
    assert any("only 2 of 3 chains have moments of all transitions" in note for note in found.notes)
    ended = zero_variance(idata.isel(chain=[0, 1]))
    assert bool(ended.over_transitions["slope"])
