"""Stein calibration: against exact laws, on logistic regression, and on other posteriors."""

from __future__ import annotations

import contextlib

import numpy as np
import pymc as pm
import pytest
import xarray as xr
from scipy.special import expit, gamma, polygamma

from pymc_sgmcmc import SGLD, SGLDCV, CalibrationError, stein_calibrate
from pymc_sgmcmc.trace_tools.affine_map import shrink
from pymc_sgmcmc.trace_tools.calibration import GROUP
from tests.support.langevin_chains import Gaussian, Logistic, as_trace, langevin
from tests.support.models import two_variable_model

QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False}


def deviations(trace: xr.DataTree) -> np.ndarray:
    return trace["posterior"]["theta"].std(("chain", "draw")).values


def correlated(dimension: int, seed: int) -> np.ndarray:
    root = np.random.default_rng(seed).normal(size=(dimension, dimension))
    return root @ root.T + np.eye(dimension)


# --- Gaussian targets: what is exact ---------------------------------------------------------


@pytest.mark.parametrize("step_size", [0.5, 1.5])
def test_exact_gradients_give_the_exact_covariance(step_size):
    """Gradients without noise are linear: the precision to rounding, from any few draws."""
    H = correlated(3, 1)
    M = np.diag(1 / np.diag(H))
    x, g = Gaussian(H, np.zeros((3, 3))).chains(2, 200, step_size, M, seed=1)
    calibrated = stein_calibrate(as_trace(x, g, step_size, M))
    np.testing.assert_allclose(calibrated[GROUP]["covariance"], np.linalg.inv(H), rtol=1e-9)
    found = calibrated["posterior"]["theta"].values.reshape(-1, 3)
    np.testing.assert_allclose(np.cov(found.T, bias=True), np.linalg.inv(H), rtol=1e-9)
    np.testing.assert_allclose(found.mean(0), x.mean((0, 1)), atol=1e-12)
    assert calibrated[GROUP].attrs["kept_of_differences"] == pytest.approx(1)
    assert (calibrated[GROUP]["sd_error"] < 1e-9).all()
    # A chain's own covariance is off by much, and the formula without the inverse as well.
    wrong = np.cov(x.reshape(-1, 3).T) @ H @ np.cov(x.reshape(-1, 3).T)
    assert np.abs(np.diag(wrong) / np.diag(np.linalg.inv(H)) - 1).max() > 0.1


@pytest.mark.parametrize("preconditioner", ["inverse", "diagonal"])
def test_covariance_of_a_noisy_chain(preconditioner):
    """Deviations too large by 16 % and more are right: z below 4.5 by the stated error."""
    H = correlated(3, 2)
    M = np.linalg.inv(H) if preconditioner == "inverse" else np.diag(1 / np.diag(H))
    target, h = Gaussian(H, 2 * np.diag(np.diag(H))), 0.5
    exact = np.sqrt(np.diag(np.linalg.inv(H)))
    assert (np.sqrt(np.diag(target.covariance(h, M))) / exact > 1.15).all()
    x, g = target.chains(16, 4000, h, M, seed=3)
    calibrated = stein_calibrate(as_trace(x, g, h, M))
    report = calibrated[GROUP]
    assert (np.abs(np.log(deviations(calibrated) / exact)) < 4.5 * report["sd_error"]).all()
    assert (report["sd_error"] < 0.03).all()
    assert report.attrs["asymmetry"] < 0.02
    assert report.attrs["third_order"] < 0.05


@pytest.mark.parametrize("noise", [0.02, 30.0])
def test_stated_errors_are_those_made(noise):
    """Squares of 60 x 3 z-scores have mean 1: 0.11, some more for correlation and heavy tails."""
    H = correlated(3, 4)
    M, h = np.linalg.inv(H), 0.5 if noise < 1 else 0.1
    exact = np.sqrt(np.diag(M))
    z, kept = [], []
    for seed in range(60):
        x, g = Gaussian(H, noise * H).chains(4, 500, h, M, seed=10 * seed)
        calibrated = stein_calibrate(as_trace(x, g))
        report = calibrated[GROUP]
        z.append(np.log(deviations(calibrated) / exact) / report["monte_carlo_error"].values)
        kept.append(report.attrs["kept_of_differences"])
    assert np.mean(np.square(z)) == pytest.approx(1.05, abs=4.5 * 0.15)
    # Much noise: differences between directions are shrunk away; little: they are left alone.
    assert np.mean(kept) > 0.9 if noise < 1 else np.mean(kept) < 0.6


def test_invariance_under_linear_maps():
    H = correlated(3, 6)
    x, g = Gaussian(H, H).chains(8, 1000, 0.5, np.linalg.inv(H), seed=7)
    B = np.diag([1.0, 100.0, 1e-3]) @ correlated(3, 8)
    one = stein_calibrate(as_trace(x, g))
    other = stein_calibrate(as_trace(x @ B.T + 5, g @ np.linalg.inv(B)))
    mapped = one["posterior"]["theta"].values @ B.T + 5
    scale = mapped.std((0, 1))
    np.testing.assert_allclose(other["posterior"]["theta"] / scale, mapped / scale, atol=1e-8)
    for name in ("third_order", "asymmetry", "kept_of_differences"):
        assert other[GROUP].attrs[name] == pytest.approx(one[GROUP].attrs[name], abs=1e-6)


def test_shrinkage(rng):
    """Noise around 2 I is pulled to it, noise around I to I, and what is certain is left."""
    identity = np.eye(4)

    def with_noise(matrix, size):
        noise = rng.normal(size=(40, 4, 4)) * size * np.sqrt(40)
        noise = (noise + noise.swapaxes(1, 2)) / 2
        groups = matrix + noise
        total = groups.sum(0)
        return total / 40, (total - groups) / 39

    estimate, apart = with_noise(2 * identity, 0.1)
    shrunk, kept = shrink(estimate, apart)
    assert kept[0] < 0.6
    assert kept[1] > 0.95
    assert np.linalg.norm(shrunk - 2 * identity) < np.linalg.norm(estimate - 2 * identity)
    # Of the level alone: a factor of zero in about two of three cases.
    assert min(shrink(*with_noise(identity, 0.3))[1][1] for _ in range(5)) == 0
    certain, apart = with_noise(np.diag([1.0, 2.0, 3.0, 4.0]), 1e-3)
    np.testing.assert_allclose(shrink(certain, apart)[0], certain, atol=1e-4)


# --- Logistic regression ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def rare_events():
    """N = 20 000 with 420 positives, six parameters; exact deviations to 0.2 %."""
    problem = Logistic.simulate(20_000, [-4.6, 0.8, -0.6, 0.5, 0.4, -0.3], seed=3)
    assert problem.y.sum() == 420
    return problem, problem.standard_deviations()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cv", "step_size", "wide"), [(True, 1.0, 1.15), (False, 0.3, 2.8)], ids=["SGLDCV", "SGLD"]
)
def test_rare_events(rare_events, cv, step_size, wide):
    """Deviations of chains that are too wide by 18 % and 200 % are right to 2 %."""
    problem, exact = rare_events
    x, g, M = problem.chains(64, 3000, step_size, 200, seed=5, cv=cv, burn_in=200)
    assert (x.std((0, 1)) / exact > wide).all()
    calibrated = stein_calibrate(as_trace(x, g, step_size, M))
    ratio = deviations(calibrated) / exact
    np.testing.assert_allclose(ratio, 1, atol=0.02)
    assert (np.abs(np.log(ratio)) < 2 * calibrated[GROUP]["sd_error"] + 0.002).all()
    mean_shift = np.abs(calibrated["posterior"]["theta"].mean(("chain", "draw")) - x.mean((0, 1)))
    assert mean_shift.max() < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "step_size", "thin", "least_before"),
    [(SGLDCV, 1.0, 2, 0.93), (SGLD, 0.3, 10, 0.99)],
    ids=["SGLDCV", "SGLD"],
)
def test_coverage(sampler, step_size, thin, least_before):
    """Nominal 90 % intervals over 400 data sets whose coefficients are drawn from the prior.

    1600 of them, so that 88-92 % are 2.7 standard errors. Those of the chains are far too wide.
    """
    rng = np.random.default_rng(8)
    N, d, data_sets = 2000, 4, 400
    X = rng.normal(size=(N, d))
    with pm.Model():
        coefficients = pm.Normal("theta", 0, 1, shape=d)
        y = pm.Data("y", np.zeros(N))
        pm.Bernoulli("of_y", logit_p=pm.Data("X", X) @ coefficients, observed=y)
        covered_before, covered = np.zeros(d), np.zeros(d)
        for number in range(data_sets):
            true = rng.normal(size=d)
            pm.set_data({"y": rng.binomial(1, expit(X @ true)).astype(float)})
            step = sampler(
                step_size=step_size, preconditioner="curvature", batch_size=50, thin=thin
            )
            settings = {"draws": 1500, "tune": 100, "chains": 2, "cores": 1, "random_seed": number}
            idata = pm.sample(step=step, **settings, **QUIET)
            for trace, counts in ((idata, covered_before), (stein_calibrate(idata), covered)):
                low, high = trace["posterior"]["theta"].quantile([0.05, 0.95], ("chain", "draw"))
                counts += (low.values < true) & (true < high.values)
    assert (covered_before / data_sets).mean() > least_before
    assert 0.88 < (covered / data_sets).mean() < 0.92


# --- Other posteriors -------------------------------------------------------------------------


def banana(x):
    rest = (x[:, 1] - 0.5 * (x[:, 0] ** 2 - 1)) / 0.25
    return np.column_stack([-x[:, 0] + rest * x[:, 0], -rest])


def mild_banana(x):
    rest = (x[:, 1] - 0.2 * (x[:, 0] ** 2 - 1)) / 0.25
    return np.column_stack([-x[:, 0] + 0.4 * rest * x[:, 0], -rest])


def funnel(x):
    scale = np.exp(-x[:, 0])
    return np.column_stack([-x[:, 0] - 0.5 + 0.5 * x[:, 1] ** 2 * scale, -x[:, 1] * scale])


POSTERIORS = {
    "banana": (banana, [1, np.sqrt(0.75)], 0.2),
    "mild banana": (mild_banana, [1, np.sqrt(0.33)], 0.2),
    "funnel": (funnel, [1, np.exp(0.25)], 0.3),
    "student t, 5": (lambda x: -6 * x / (5 + x**2), [np.sqrt(5 / 3)] * 2, 0.5),
    "two modes": (lambda x: -x + 2 * np.tanh(2 * x), [np.sqrt(5)] * 2, 0.4),
    "flat top": (lambda x: -x + np.tanh(x), [np.sqrt(2)] * 2, 0.4),
    "log gamma, 1": (lambda x: 1 - np.exp(np.minimum(x, 50)), [np.sqrt(polygamma(1, 1))] * 2, 0.3),
    "log gamma, 10": (
        lambda x: 10 - np.exp(np.minimum(x, 50)), [np.sqrt(polygamma(1, 10))] * 2, 0.1
    ),
    "quartic": (lambda x: -4 * x**3, [np.sqrt(gamma(0.75) / gamma(0.25))] * 2, 0.05),
}  # fmt: skip


@pytest.mark.parametrize("noise", [0.5, 2.0])
@pytest.mark.parametrize("name", POSTERIORS)
def test_refused_or_better(name, noise):
    """Never worse by more than the stated error; what is nearest to Gaussian is corrected."""
    gradient, exact, step_size = POSTERIORS[name]
    exact = np.array(exact, dtype=float)
    least = exact.min() ** 2
    rng = np.random.default_rng(1)
    x, g = langevin(
        lambda x, rng: gradient(x) + rng.normal(size=x.shape) * np.sqrt(noise / least),
        0.5 * exact * rng.normal(size=(64, 2)),
        3000,
        step_size * least,
        np.eye(2),
        seed=3,
        burn_in=500,
    )
    before = np.abs(np.log(x.std((0, 1)) / exact))
    calibrated = None
    with contextlib.suppress(CalibrationError):
        calibrated = stein_calibrate(as_trace(x, g))
    assert calibrated is None or name not in ("banana", "student t, 5", "two modes", "log gamma, 1")
    if calibrated is None:
        assert name not in ("log gamma, 10", "flat top")
        return
    after = np.abs(np.log(deviations(calibrated) / exact))
    assert (after < before + calibrated[GROUP]["sd_error"].values).all()
    assert after.max() < before.max()


def test_few_draws_of_a_gaussian_are_not_called_far_from_gaussian():
    """Of 20 coordinates some are two errors off by chance: none of 20 runs is refused for it."""
    H = correlated(20, 5)
    M = np.linalg.inv(H)
    reasons = []
    for seed in range(20):
        x, g = Gaussian(H, 10 * H).chains(4, 500, 0.05, M, seed=seed, thin=10)
        try:
            stein_calibrate(as_trace(x, g))
        except CalibrationError as error:
            reasons.append(str(error))
    assert len(reasons) <= 2
    assert not [reason for reason in reasons if "too far from Gaussian" in reason]


def test_a_correction_that_cannot_be_told_is_refused():
    """Of 12 runs on t with 3 degrees, none is corrected by less than its error beyond 50 %."""
    refused = 0
    for seed in range(12):
        x, g = langevin(
            lambda x, rng: -4 * x / (3 + x**2),
            np.zeros((4, 1)),
            1000,
            3.0,
            np.eye(1),
            seed=seed,
            burn_in=100,
            thin=2,
        )
        try:
            report = stein_calibrate(as_trace(x, g))[GROUP]
        except CalibrationError:
            refused += 1
            continue
        correction = np.abs(np.log(report["sd_ratio"]))
        assert (report["nonlinear_error"] <= np.maximum(correction, 0.5)).all()
    assert refused >= 6


def test_moments_are_named_where_draws_are_too_few():
    x, g = Gaussian(np.eye(2), 300 * np.eye(2)).chains(2, 60, 0.01, np.eye(2), seed=2, thin=100)
    trace = as_trace(x, g)
    with pytest.raises(CalibrationError, match="the draws are too few to tell") as without:
        stein_calibrate(trace)
    assert "moments=True" not in str(without.value)
    trace["sgmcmc_moments"] = xr.DataTree()
    with pytest.raises(CalibrationError, match="which say more: use `moments=True`"):
        stein_calibrate(trace)


def test_third_order_identity():
    """For the log of a gamma variable it is the exact ratio, from integrals."""
    k = 10.0
    rng = np.random.default_rng(2)
    y = np.log(rng.gamma(k, size=(4, 100_000, 1)))
    g = k - np.exp(y)
    found = stein_calibrate(as_trace(y, g))[GROUP].attrs["third_order"]
    # E[u^2 r] / sqrt(2) over the slope, for u = (y - mean) / sd and exact draws, where E[u^2 g] = 0
    # and the slope is one: the skewness of y.
    skewness = abs(polygamma(2, k)) / polygamma(1, k) ** 1.5
    assert found == pytest.approx(skewness / np.sqrt(2), rel=0.05)


# --- Refusals ---------------------------------------------------------------------------------


def test_gradients_of_something_else_are_refused():
    """A rotated field is that of no density; gradients of the wrong sign point away."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4, 2000, 2))
    rotated = -x @ np.array([[1.0, 0.8], [-0.8, 1.0]])
    with pytest.raises(CalibrationError, match=r"its antisymmetric part is 0.8 of the symmetric"):
        stein_calibrate(as_trace(x, rotated))
    with pytest.raises(ValueError, match=r"points away from there in `theta\[0\]`, `theta\[1\]`"):
        stein_calibrate(as_trace(x, x))
    noise = 300 * rng.normal(size=x.shape)
    with pytest.raises(CalibrationError, match=r"the draws are too few to tell"):
        stein_calibrate(as_trace(x, -x + noise))


def test_bad_input():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4, 500, 3))
    trace = as_trace(x, -x)
    with pytest.raises(ValueError, match="should have `gradient` and `position`"):
        stein_calibrate(xr.DataTree.from_dict({"posterior": trace["posterior"].to_dataset()}))
    with pytest.raises(ValueError, match=r"3 coordinates should have at least 40 draws, .* has 36"):
        stein_calibrate(trace.sel(draw=slice(0, 8)))
    broken = -x.copy()
    broken[1, 3] = np.nan
    with pytest.raises(ValueError, match=r"1 of chain 1 are not\. Leave them out"):
        stein_calibrate(as_trace(x, broken))
    far = x.copy()
    far[2] += 30
    with pytest.raises(ValueError, match=r"chain 2 is far"):
        stein_calibrate(as_trace(far, -x))
    still = x.copy()
    still[..., 1] = 2
    with pytest.raises(ValueError, match=r"constant over the draws: `theta\[1\]`"):
        stein_calibrate(as_trace(still, -x))
    other = as_trace(x, -x)
    other["posterior"]["theta"] = other["posterior"]["theta"] ** 2
    with pytest.raises(ValueError, match=r"`theta` are not coordinates .* Pass `model=`"):
        stein_calibrate(other)


# --- Traces -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    model = two_variable_model()
    with model:
        pm.Deterministic("twice", 2 * model["sigma"])
        step = SGLDCV(
            compile_kwargs={"mode": "NUMBA"}, batch_size=50, step_size=0.8,
            preconditioner="curvature", thin=2, gradient="cv", integrator="euler",
        )  # fmt: skip
        idata = pm.sample(
            step=step, draws=1000, tune=100, chains=4, cores=1, random_seed=1, **QUIET
        )
    return model, idata


def test_constrained_variables(run):
    model, idata = run
    before = idata.copy(deep=True)
    calibrated = stein_calibrate(idata, model)
    draws = calibrated["posterior"]
    np.testing.assert_allclose(draws["twice"], 2 * draws["sigma"], rtol=1e-12)
    position = calibrated["sample_stats"]["position"]
    np.testing.assert_allclose(np.log(draws["sigma"]), position[..., 2], rtol=1e-9)
    np.testing.assert_array_equal(draws["slope"], position[..., 1])
    ratio = calibrated[GROUP]["sd_ratio"]
    assert list(ratio["unconstrained_position"].values) == ["intercept", "slope", "sigma_log__"]
    assert ((ratio > 0.8) & (ratio < 0.97)).all()
    for name in ("posterior", "sample_stats"):
        xr.testing.assert_identical(idata[name].to_dataset(), before[name].to_dataset())
    assert "gradient" not in calibrated["sample_stats"]
    assert draws.to_dataset().attrs == idata["posterior"].to_dataset().attrs
    assert draws["slope"].dims == ("chain", "draw")


def test_without_a_model(run):
    """Variables that are coordinates of the position need none."""
    model, idata = run
    with pytest.raises(ValueError, match="`sigma`, `twice` are not coordinates of the position"):
        stein_calibrate(idata)
    part = idata.copy()
    part["posterior"] = xr.DataTree(idata["posterior"].to_dataset()[["slope", "intercept"]])
    one, other = stein_calibrate(part), stein_calibrate(idata, model)
    xr.testing.assert_allclose(one["posterior"]["slope"], other["posterior"]["slope"])


def test_another_model_is_refused(run):
    _, idata = run
    with pm.Model() as other:
        pm.Normal("intercept", shape=2)
    with pytest.raises(ValueError, match=r"has 2 unconstrained coordinates, but .* have 3"):
        stein_calibrate(idata, other)
    with pm.Model() as other:
        for name in ("intercept", "slope"):
            pm.Normal(name)
        pm.Deterministic("twice", pm.HalfNormal("sigma") ** 2)
    with pytest.raises(ValueError, match=r"does not for `twice`. Pass the model that was sampled"):
        stein_calibrate(idata, other)


def test_calibrated_trace_is_written_and_read_back(run, tmp_path):
    model, idata = run
    calibrated = stein_calibrate(idata, model)
    calibrated.to_netcdf(tmp_path / "trace.nc", engine="h5netcdf")
    with xr.open_datatree(tmp_path / "trace.nc", engine="h5netcdf") as read:
        xr.testing.assert_equal(
            read["posterior"].to_dataset(), calibrated["posterior"].to_dataset()
        )
        assert read[GROUP].attrs.keys() == calibrated[GROUP].attrs.keys()
