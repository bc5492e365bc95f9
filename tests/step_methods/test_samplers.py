"""Properties that every sampler must have, with every gradient estimator.

A new sampler is one `Sampler` in `SAMPLERS`. Its exact law is given as a formula, in NumPy, and
compared with the law that follows from its compiled transitions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pymc as pm
import pytest

from tests.support.exact_law import (
    affine_transition,
    all_indices,
    compiled_law,
    exact_noise_operator,
    stationary_law,
)
from tests.support.laws import no_noise
from tests.support.linear_gaussian import LinearGaussian, gaussian_with_precision
from tests.support.samplers import ESTIMATORS, SAMPLERS
from tests.support.sampling import estimator

every_sampler = pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.name)
every_affine_sampler = pytest.mark.parametrize(
    "sampler",
    [sampler for sampler in SAMPLERS if sampler.law is not None],
    ids=lambda sampler: sampler.name,
)
every_pair = pytest.mark.parametrize(
    ("sampler", "gradient"),
    [
        # Each sampler once, and each estimator once: the others take a compilation each.
        pytest.param(
            sampler,
            gradient,
            id=f"{sampler.name}-{gradient}",
            marks=() if gradient == "cv" or sampler.name == "SGLD" else pytest.mark.slow,
        )
        for sampler in SAMPLERS
        if sampler.law is not None
        for gradient in ESTIMATORS
    ],
)


# --- Exact laws -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "dimension"),
    [
        pytest.param(
            sampler,
            dimension,
            id=f"{sampler.name}-{dimension}",
            # The transitions of HAMCMC take longest to compile, and have tests of their own.
            marks=()
            if dimension == 5 and not sampler.name.startswith("HAMCMC")
            else pytest.mark.slow,
        )
        for sampler in SAMPLERS
        if sampler.law is not None
        for dimension in (1, 5, 50)
    ],
)
def test_law_with_an_exact_gradient(sampler, dimension):
    problem = gaussian_with_precision(dimension, condition=100.0)
    h = sampler.step_size(100.0)
    step = sampler.make(problem.model(), batch_size=problem.n_rows, step_size=h)
    with_reference_at(step, problem.mean)
    mean, covariance = compiled_law(step)
    exact = sampler.law(problem.precision, no_noise, h, step)
    np.testing.assert_allclose(mean[:dimension], problem.mean, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(
        covariance[:dimension, :dimension], exact, rtol=1e-7, atol=1e-9 * exact.max()
    )
    # The bias is in the tests' sight, and no larger than a sampler's should be.
    inflation = np.trace(problem.precision @ exact) / dimension - 1
    assert inflation < 0.3


@every_pair
@pytest.mark.parametrize(
    "prior_sd",
    [
        pytest.param(0.5, id="strong prior", marks=pytest.mark.slow),
        pytest.param(10.0, id="weak prior"),
    ],
)
@pytest.mark.parametrize(
    ("batching", "n_rows", "batch_size"), [("shuffle", 12, 4), ("replace", 6, 2)]
)
def test_law_with_minibatches(sampler, gradient, prior_sd, batching, n_rows, batch_size):
    problem = LinearGaussian.simulate(n_rows, 2, seed=8, prior_sd=prior_sd)
    center = problem.mean + np.array([0.5, -0.3])
    h = sampler.step_size(np.linalg.eigvalsh(problem.precision)[-1]) / 2
    step = sampler.make(
        problem.model(),
        batch_size=batch_size,
        gradient=estimator(gradient, batching),
        step_size=h,
        center={"beta": center},
    )
    with_reference_at(step, center)
    noise = exact_noise_operator(problem, step.batching, None if gradient == "plain" else center)
    exact = sampler.law(problem.precision, noise, h, step)
    mean, covariance = compiled_law(step)
    np.testing.assert_allclose(mean[:2], problem.mean, rtol=1e-7)
    np.testing.assert_allclose(covariance[:2, :2], exact, rtol=1e-7)
    # The noise is in the test's sight: a thousand times its tolerance at least.
    without = np.trace(sampler.law(problem.precision, no_noise, h, step))
    assert without < (1 - 1e-4) * np.trace(exact)


def with_reference_at(step, position):
    """Make a position the start of a chain, with its adaptations and references."""
    for adaptation in step.chain.adaptations:
        adaptation.load(adaptation.begin(np.asarray(position)))
    if step.block.memory is not None:
        step.block.memory.begin(np.asarray(position))


@every_affine_sampler
def test_order_of_the_bias(sampler):
    if sampler.bias_order is None:
        pytest.skip("has no bias with an exact gradient")
    problem = gaussian_with_precision(2, condition=4.0)
    step = sampler.make(problem.model(), batch_size=problem.n_rows, step_size=0.1)
    with_reference_at(step, problem.mean)
    posterior = np.linalg.inv(problem.precision)

    def bias(h):
        return np.linalg.norm(compiled_law(step, h)[1][:2, :2] - posterior)

    h = sampler.step_size(4.0) / 50
    assert np.log2(bias(h) / bias(h / 2)) == pytest.approx(sampler.bias_order, abs=0.03)


@every_pair
def test_all_rows_are_the_full_gradient(sampler, gradient):
    problem = LinearGaussian.simulate(9, 2, seed=8)
    h = sampler.step_size(np.linalg.eigvalsh(problem.precision)[-1]) / 2
    step = sampler.make(
        problem.model(),
        batch_size=9,
        gradient=gradient,
        step_size=h,
        center={"beta": problem.mean + 1.0},
    )
    with_reference_at(step, problem.mean - 1.0)
    exact = sampler.law(problem.precision, no_noise, h, step)
    np.testing.assert_allclose(compiled_law(step)[1][:2, :2], exact, rtol=1e-8)


@every_pair
def test_order_of_the_rows_does_not_matter(sampler, gradient):
    # The sizes and the prior of `test_law_with_minibatches`, whose compiled transitions are used.
    problem = LinearGaussian.simulate(6, 2, seed=8, prior_sd=10.0)
    h = sampler.step_size(np.linalg.eigvalsh(problem.precision)[-1]) / 3
    laws = []
    for rows in (np.arange(6), np.array([3, 0, 4, 1, 5, 2])):
        permuted = replace(problem, X=problem.X[rows], y=problem.y[rows])
        step = sampler.make(
            permuted.model(),
            batch_size=2,
            gradient=estimator(gradient, "replace"),
            step_size=h,
            center={"beta": problem.mean + 1.0},
        )
        with_reference_at(step, problem.mean - 1.0)
        laws.append(compiled_law(step)[1][:2, :2])
    np.testing.assert_allclose(laws[0], laws[1], rtol=1e-10)


@pytest.mark.parametrize(
    "sampler",
    [
        pytest.param(sampler, marks=() if number < 3 else pytest.mark.slow, id=sampler.name)
        for number, sampler in enumerate(SAMPLERS)
        if sampler.law is not None
    ],
)
def test_single_precision(sampler):
    """The same transitions in float32, up to its rounding."""
    problem = LinearGaussian.simulate(8, 2, seed=8)
    h = sampler.step_size(np.linalg.eigvalsh(problem.precision)[-1]) / 2
    matrices = []
    for floatX in ("float64", "float32"):
        with pm.pytensorf.pytensor.config.change_flags(floatX=floatX, warn_float64="ignore"):
            model = LinearGaussian(problem.X.astype(floatX), problem.y.astype(floatX)).model()
            step = sampler.make(model, batch_size=3, step_size=h, gradient="plain")
            assert step.posterior.dtype == floatX
            with_reference_at(step, problem.mean)
            matrices.append(
                [affine_transition(step.block, i, h) for i in all_indices(step.batching)]
            )
    for double, single in zip(*matrices, strict=True):
        for name in ("slope", "shift", "root"):
            expected = getattr(double, name)
            np.testing.assert_allclose(
                getattr(single, name), expected, atol=2e-5 * max(1, np.abs(expected).max())
            )
    double, single = (stationary_law(transitions)[1] for transitions in matrices)
    np.testing.assert_allclose(single, double, rtol=1e-3, atol=1e-6 * double.max())
