"""The step size of Langevin dynamics, computed anew during tuning."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import SGLDCV
from pymc_sgmcmc.adaptation import Seen
from pymc_sgmcmc.adaptation.step_size import LangevinStepSize
from pymc_sgmcmc.dynamics import AVERAGED, EULER
from pymc_sgmcmc.errors import CenterWarning
from pymc_sgmcmc.matrices import Dense, Diagonal
from pymc_sgmcmc.record import MOMENTS
from pymc_sgmcmc.tuning import Center
from pymc_sgmcmc.tuning.curvature import Curvature, diagonal_curvature
from tests.support.langevin_chains import langevin
from tests.support.models import logistic_model

THIN = 5
QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False}


def center_with(precision: np.ndarray) -> Center:
    """Centre at 1, 2, ... with a given curvature."""
    d = len(precision)
    if precision.ndim == 1:
        curvature = diagonal_curvature(precision**-0.5)
    else:
        covariance = np.linalg.inv(precision)
        root = np.linalg.cholesky(covariance)
        curvature = Curvature(Dense(precision), Dense(covariance), Dense(root))
    return Center(np.arange(1.0, d + 1), np.zeros(d), np.zeros(d), curvature)


def gaussian_chain(rng, center, noise_root, step_size, draws, thin, law=EULER):
    """Positions and gradients of a chain on the Gaussian of a centre, M its covariance."""
    curvature = center.curvature

    def gradient(theta, rng):
        noise = rng.normal(size=theta.shape) @ noise_root.T
        return (center.position - theta) @ curvature.precision + noise

    (positions,), (gradients,) = langevin(
        gradient,
        (center.position + curvature.root @ rng.standard_normal(len(noise_root)))[None],
        draws * thin,
        step_size,
        curvature.covariance.dense(),
        rng,
        averaged=law.averaged,
    )
    return positions, gradients


def seen(positions, gradients, *, thin=THIN, tuning=True, boundary=True, step_size=1.0):
    sizes = np.full(len(positions), step_size)
    return Seen(positions, gradients, partial(np.arange, 3), tuning, boundary, thin, sizes)


def factor(
    center, positions, gradients, *,
    thin=THIN, step_size=0.2, bias=0.05, law=EULER, preconditioner=None,
):  # fmt: skip
    matrix = center.curvature.covariance if preconditioner is None else preconditioner
    tuning = LangevinStepSize(law, matrix, thin, step_size, bias, center)
    state = tuning.begin(center.position)
    state, _ = tuning.update(state, seen(positions, gradients, thin=thin))
    return tuning.step_size_factor(state)


@pytest.mark.parametrize("law", [EULER, AVERAGED], ids=lambda law: law.name)
@pytest.mark.parametrize("noise", [0.0, 1.0, 3.0])
def test_step_is_that_of_the_closed_form(rng, noise, law):
    """With V = noise * H, in units of 0.2: an error of h (V + 1) / (4 - h), or h V / (4 - h)."""
    H = np.array([[4.0, 1.0, 0.0], [1.0, 2.0, 0.5], [0.0, 0.5, 9.0]])
    center = center_with(H)
    noise_root = np.sqrt(noise) * np.linalg.cholesky(H)
    chain = gaussian_chain(rng, center, noise_root, 0.05, 2000, THIN, law)
    expected = 0.9 / (noise + (0.045 if law is AVERAGED else 1.045))
    assert factor(center, *chain, law=law) == pytest.approx(min(5.0, expected), rel=0.06)


@pytest.mark.parametrize(("law", "largest"), [(EULER, 4.18), (AVERAGED, 2.18)])
def test_noise_where_the_curvature_is_small(rng, law, largest):
    """Curvatures 4 and 1 with noise 0 and 2, M the unit matrix.

    Euler's errors are h 4 / (4 - 4h) and h 3 / (4 - h). Of averaged noises it is h 2 / (4 - h), for
    which the denominator of the first is taken.
    """
    center = center_with(np.array([4.0, 1.0]))
    chain = gaussian_chain(rng, center, np.diag([0.0, np.sqrt(2)]), 0.05, 2000, 4 * THIN, law)
    found = factor(center, *chain, thin=4 * THIN, law=law, preconditioner=Diagonal(np.ones(2)))
    assert found == pytest.approx(0.9 / largest, rel=0.06)


@pytest.mark.parametrize("thin", [1, 2, 5])
@pytest.mark.parametrize("shape", [2.0, 5.0])
def test_what_the_position_explains_counts_in_the_second_order(shape, thin):
    """The log of a gamma variable around its nearest Gaussian, exact gradients, averaged noises.

    Half the mean square of differences of residuals is c h for small steps, so the step with the
    error h (c h) / 4 is sqrt(4 error / c). As noise, all of the residual would leave a tenth.
    """
    # c and H of the nearest Gaussian: E[gradient] = 0 and E[-Hessian] = H for g = a - a exp(x).
    scale = shape**-0.5
    center = center_with(np.array([shape]))
    center = replace(center, position=np.array([-(scale**2) / 2]))
    bias = 0.002
    tuning = LangevinStepSize(AVERAGED, Dense(np.array([[scale**2]])), thin, 1.0, bias, center)
    rng = np.random.default_rng(1)
    state, step_size, found = tuning.begin(center.position), 1.0, []
    for _ in range(20):
        (positions,), (gradients,) = langevin(
            lambda x, rng: shape - shape * np.exp(x),
            center.position[None], 3000 * thin, step_size, np.array([[scale**2]]), rng,
            averaged=True,
        )  # fmt: skip
        run = seen(positions, gradients, thin=thin, step_size=step_size)
        state, _ = tuning.update(state, run)
        step_size = tuning.step_size_factor(state)
        found.append(step_size)
    # A step has the variance h / (2 H), and the slope of the residual is H (1 - exp(x)), where
    # exp(x) has the mean 1 and the variance 1 / a.
    c = 1 / (4 * shape)
    assert np.median(found[5:]) == pytest.approx(np.sqrt(4 * 0.9 * bias / c), rel=0.1)


@pytest.mark.parametrize("noise", [0.5, 0.0])
def test_step_follows_the_worst_direction(rng, noise):
    """Noise along one direction of twenty that is no coordinate: V = 4 u u⊤ in units of H."""
    d = 20
    H = np.diag(np.arange(1.0, d + 1)) + 0.5
    center = center_with(H)
    root = np.linalg.cholesky(H)
    u = np.ones((d, 1)) / np.sqrt(d)
    noise_root = root @ np.hstack([np.sqrt(4 - noise) * u, np.zeros((d, d - 1))])
    positions, gradients = gaussian_chain(rng, center, noise_root, 0.02, 1000, THIN)
    gradients += np.sqrt(noise) * rng.standard_normal(gradients.shape) @ root.T
    assert factor(center, positions, gradients) == pytest.approx(0.9 / 5.045, rel=0.1)


def test_few_draws_in_many_dimensions_leave_the_step(rng):
    """Without noise, 100 draws of 120 coordinates reduce the step size only by the margin."""
    center = center_with(np.eye(120))
    chain = gaussian_chain(rng, center, np.zeros((120, 120)), 0.2, 100, 10)
    assert factor(center, *chain, thin=10) == pytest.approx(0.9 / 1.045, abs=0.03)


@pytest.mark.parametrize(("step_size", "expected"), [(0.02, 9.0 / 1.045), (0.002, 10.0)])
def test_step_grows_within_a_bound(rng, step_size, expected):
    center = center_with(np.eye(3))
    chain = gaussian_chain(rng, center, np.zeros((3, 3)), 0.2, 500, THIN)
    tuned = factor(center, *chain, step_size=step_size)
    assert tuned == pytest.approx(expected, rel=0.02)


def test_curvature_that_is_larger_than_at_the_centre(rng):
    """Gradients of three times the curvature in one coordinate: its error bounds the step."""
    center = center_with(np.ones(3))
    positions = rng.standard_normal((5000 * THIN, 3))
    gradients = -positions * [1.0, 3.0, 1.0]
    positions += center.position
    # The mean square of the gradient there is 9, less what may be chance in 5000 draws, 7 %; the
    # residuals alone would give 1 + 4.
    assert factor(center, positions, gradients) == pytest.approx(0.9 / (0.93 * 9 + 0.045), rel=0.08)


def test_only_coordinates_in_high_dimension(rng, monkeypatch):
    monkeypatch.setattr("pymc_sgmcmc.adaptation.step_size.DENSE_DIMENSION", 2)
    center = center_with(np.ones(3))
    positions = rng.standard_normal((5000 * THIN, 3))
    # Without noise the curvature at the centre leaves this; here the step never becomes larger.
    assert factor(center, positions, -0.1 * positions) == pytest.approx(0.9 / 1.045)
    assert factor(center, positions, -0.1 * positions, step_size=0.02) == 1.0
    assert factor(center, positions, -2 * positions) == pytest.approx(0.9 / 4.045, rel=0.1)


@pytest.mark.parametrize(("law", "thin"), [(EULER, THIN), (AVERAGED, THIN), (AVERAGED, 1)])
def test_runs_of_any_length_give_the_same(rng, law, thin):
    center = center_with(np.eye(2))
    positions, gradients = gaussian_chain(rng, center, np.eye(2), 0.2, 300, thin)
    tuning = LangevinStepSize(law, Dense(np.eye(2)), thin, 0.2, 0.05, center)
    states = []
    for stops in ((300,), (20, 21, 60, 300)):
        state, start = tuning.begin(center.position), 0
        for stop in stops:
            part = slice(start * thin, stop * thin)
            run = seen(positions[part], gradients[part], thin=thin, boundary=stop == 300)
            state, _ = tuning.update(state, run)
            start = stop
        states.append(state)
    for name in states[0]:
        np.testing.assert_array_equal(states[0][name], states[1][name])
    assert states[0]["factor"] != 1


def test_a_bad_beginning_is_forgotten(rng):
    """A first window with huge gradients: later ones give the step back."""
    center = center_with(np.eye(2))
    tuning = LangevinStepSize(EULER, Dense(np.eye(2)), THIN, 0.2, 0.05, center)
    state, factors = tuning.begin(center.position), []
    for number in range(7):
        positions, gradients = gaussian_chain(rng, center, np.zeros((2, 2)), 0.2, 100, THIN)
        size = 30.0 if number == 0 else 1.0
        state, _ = tuning.update(state, seen(size * positions, size * gradients))
        factors.append(tuning.step_size_factor(state))
    assert factors[0] == 0.01
    assert factors[-1] == pytest.approx(0.9 / 1.045, rel=0.1)


def test_nothing_changes_after_tuning(rng):
    center = center_with(np.eye(2))
    tuning = LangevinStepSize(EULER, Dense(np.eye(2)), THIN, 0.2, 0.05, center)
    state = tuning.begin(center.position)
    chain = gaussian_chain(rng, center, 2 * np.eye(2), 0.2, 200, THIN)
    state, _ = tuning.update(state, seen(*chain))
    before = tuning.step_size_factor(state)
    state, recorded = tuning.update(state, seen(chain[0], 10 * chain[1], tuning=False))
    assert tuning.step_size_factor(state) == before != 1
    assert recorded == {}


@pytest.fixture(scope="module")
def ten_transitions_a_draw():
    return SGLDCV(
        model=logistic_model(), batch_size=100, thin=10, compile_kwargs={"mode": "FAST_COMPILE"}
    )


@pytest.mark.parametrize(("ratio", "thin"), [(0.5, 10), (0.05, 10), (0.05, 80), (0.01, 160)])
def test_draws_that_tuning_left_short_are_said(ratio, thin, ten_transitions_a_draw):
    step = ten_transitions_a_draw
    step.chain.begin(np.random.default_rng(1), np.zeros(3))
    step.chain.state = replace(step.chain.state, thin=thin)
    message = step._short_draws(ratio * step.step_size)
    if ratio * thin > 3:
        assert message is None
    else:
        assert f"{ratio} of the computed one" in message
        assert f"only {thin} transitions. Use `thin={10 / ratio:.0f}`" in message


@pytest.mark.parametrize("thin", [None, 7])
def test_draws_keep_their_time_where_tuning_makes_the_step_smaller(thin):
    """Rows far from their control variates are noisy: the chain lives beside the given centre."""
    model = logistic_model()
    center = {"beta": np.array([1.0, 1.5, -0.5])}
    numba = {"mode": "NUMBA"}
    with pytest.warns(CenterWarning, match="too far for control variates"):
        step = SGLDCV(
            model=model, thin=thin, batch_size=10, center=center, gradient="cv",
            integrator="euler", compile_kwargs=numba,
        )  # fmt: skip
    with model:
        idata = pm.sample(step=step, draws=200, tune=400, chains=2, cores=1, random_seed=1, **QUIET)
    ratio = idata.sample_stats["step_size"].values[:, -1] / step.step_size
    assert (ratio < 0.7).all()
    expected = step.thin * 2.0 ** np.round(-np.log2(ratio)) if thin is None else [7, 7]
    steps = idata.sample_stats["n_steps"].values
    np.testing.assert_array_equal(steps, np.repeat(np.atleast_2d(expected).T, 200, axis=1))
    assert idata.sample_stats.attrs["sgmcmc_thin"] == steps[0, 0]
    length = idata[MOMENTS]["transitions_a_batch"]
    np.testing.assert_array_equal(length, steps[:, 0])
    # All transitions of a chain have about the mean of its draws.
    beta = idata.posterior["beta"]
    errors = idata[MOMENTS]["mean"].values - beta.mean("draw").values
    assert (np.abs(errors) < 0.15 * beta.std(("chain", "draw")).values).all()


def test_too_few_transitions_a_draw_are_said(caplog):
    with caplog.at_level(logging.WARNING, logger="pymc.sgmcmc"):
        step = SGLDCV(
            model=logistic_model(), bias=1e-5, integrator="euler", compile_kwargs={"mode": "NUMBA"}
        )
    assert "expect few effective draws" in caplog.text
    assert step.thin == 1000
    assert "the most by default, so draws depend" in step.run_settings.attributes["why"]
