"""Successive halving and the kernel Stein discrepancy."""

from __future__ import annotations

import logging

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import PSGLD, SGHMC, SGLD, SGLDCV, bias_report
from pymc_sgmcmc.stein import kernel_stein_discrepancy
from pymc_sgmcmc.trace_tools.bias import bias_warnings
from pymc_sgmcmc.tuning.halving import successive_halving
from tests.support.models import logistic_model

NUMBA = {"mode": "NUMBA"}


# --- Kernel Stein discrepancy ---------------------------------------------------------------


def stein_kernel(x, y, score_x, score_y, width=1e-4):
    """The Stein kernel of two points by differences of k(x, y) = (1 + |x - y|²)^(-1/2)."""

    def k(x, y):
        return (1 + (x - y) @ (x - y)) ** -0.5

    units = width * np.eye(len(x))
    in_x = np.array([k(x + e, y) - k(x - e, y) for e in units]) / (2 * width)
    in_y = np.array([k(x, y + e) - k(x, y - e) for e in units]) / (2 * width)
    both = sum(k(x + e, y + e) - k(x + e, y - e) - k(x - e, y + e) + k(x - e, y - e) for e in units)
    return score_x @ score_y * k(x, y) + score_x @ in_y + score_y @ in_x + both / (4 * width**2)


def test_discrepancy_is_the_mean_of_the_stein_kernel(rng):
    positions, gradients = rng.normal(size=(2, 6, 3))
    pairs = [
        stein_kernel(positions[k], positions[m], gradients[k], gradients[m])
        for k in range(6)
        for m in range(6)
        if k != m
    ]
    discrepancy = kernel_stein_discrepancy(positions, gradients).value
    assert discrepancy == pytest.approx(np.mean(pairs), abs=1e-6)


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_discrepancy_is_zero_for_draws_of_the_target(rng, noise):
    """It is zero with and without noise in the gradients, and positive for draws too wide."""
    values = {1.0: [], 1.3: []}
    for scale, discrepancies in values.items():
        for _ in range(150):
            x = scale * rng.normal(size=(100, 2))
            estimate = kernel_stein_discrepancy(x, -x + noise * rng.normal(size=x.shape))
            discrepancies.append(estimate.value)
    z = {
        scale: np.mean(discrepancies) / np.std(discrepancies) * np.sqrt(150)
        for scale, discrepancies in values.items()
    }
    assert abs(z[1.0]) < 4.5
    assert z[1.3] > 4.5


# --- Successive halving ---------------------------------------------------------------------


def test_rounds():
    """Rounds of nine, three and one get longer, states go on, and divergent chains drop out."""
    log = []

    def run(step_size, state, transitions):
        log.append((step_size, state, transitions))
        return (state or 0) + transitions, np.nan if step_size == 4 else abs(step_size - 5)

    (best,) = successive_halving(list(np.arange(1.0, 10.0)), run, 10)
    assert best.step_size == 5
    first, second = log[:9], log[9:]
    assert {(state, transitions) for _, state, transitions in first} == {(None, 10)}
    # 4 diverged: next to 5 come 6, then 3 or 7, which are as good.
    assert {transitions for _, _, transitions in second} == {30}
    assert {state for _, state, _ in second} == {10}
    assert [step_size for step_size, _, _ in second][:2] == [5.0, 6.0]
    assert len(second) == 3


def test_all_diverged():
    with pytest.raises(ValueError, match=r"became NaN or infinite, .* step size 0\.1"):
        successive_halving([1.0, 0.1], lambda h, state, n: (None, np.inf), 10)


@pytest.mark.filterwarnings("ignore::pymc_sgmcmc.BatchSizeWarning")
@pytest.mark.parametrize("step_class", [pytest.param(SGLD, marks=pytest.mark.slow), SGLDCV])
def test_search(step_class):
    """The step size is neither so large that it distorts nor so small that the chain stays."""
    settings = {"batch_size": 200, "tune_method": "halving", "compile_kwargs": NUMBA}
    step = step_class(model=logistic_model(), **settings)
    again = step_class(model=logistic_model(), **settings)
    assert step.step_size == again.step_size
    assert 1e-3 < step.step_size <= 1.0
    assert "successive halving" in step.run_settings.attributes["why"]


def test_chain_with_a_searched_step(caplog):
    with logistic_model(), caplog.at_level(logging.INFO, logger="pymc.sgmcmc"):
        step = SGLDCV(batch_size=100, tune_method="halving", compile_kwargs=NUMBA)
        # One line, of the settings that the run has, beside that of the seconds.
        (line,) = (text for text in caplog.messages if "the set-up took" not in text)
        assert line.startswith(
            f"SGLDCV by successive halving: step size {step.step_size:.3g}, {step.thin} transitions"
        )
        idata = pm.sample(
            step=step, draws=500, tune=100, chains=2, cores=1, random_seed=1, progressbar=False,
            quiet=True, compute_convergence_checks=False,
        )  # fmt: skip
    sds = step.center.curvature.standard_deviations
    ratio = idata.posterior["beta"].values.reshape(-1, 3).std(0) / sds
    assert ((ratio > 0.8) & (ratio < 1.4)).all()
    # Tuning leaves the step alone: it has another aim than the stated bias.
    assert np.ptp(idata.sample_stats["step_size"].values) == 0
    # There is no stated accuracy to keep to, and none to be advised.
    assert "sgmcmc_bias" not in idata.sample_stats.attrs
    assert bias_warnings(idata) == []
    report = bias_report(idata, bias=1e-3)
    assert (report["verdict"] == "variance too large").all()
    assert "more than the stated 0.001" in report.attrs["verdict"]
    assert "Use a `step_size` of about" in report.attrs["verdict"]
    assert 'leave out `tune_method="halving"`' in report.attrs["verdict"]
    assert "default 0.05" in bias_report(idata).attrs["verdict"]


@pytest.mark.parametrize(
    ("step_class", "settings", "message"),
    [
        (
            SGLDCV,
            {"tune_method": "grid"},
            "`tune_method` should be one of 'closed_form', 'halving'",
        ),
        (SGLDCV, {"tune_method": "halving", "step_size": 0.1}, "got step_size=0.1 as well"),
        (SGLDCV, {"tune_method": "halving", "bias": 0.02}, "but got bias=0.02 as well"),
        (SGHMC, {"tune_method": "halving"}, "is for SGLD, .* but got SGHMC"),
        (PSGLD, {"tune_method": "halving"}, "is for SGLD, .* but got PSGLD"),
        (SGLD, {"tune_method": "halving", "gradient": "saga"}, 'but got SGLD with "saga"'),
    ],
)
@pytest.mark.filterwarnings("ignore::pymc_sgmcmc.BatchSizeWarning")
def test_bad_settings(step_class, settings, message):
    with pytest.raises(ValueError, match=message):
        step_class(model=logistic_model(), batch_size=100, compile_kwargs=NUMBA, **settings)
