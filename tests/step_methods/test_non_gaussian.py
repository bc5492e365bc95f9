"""Every sampler on small posteriors that are not Gaussian, against quadrature.

The gradient is exact (all rows) and the step small, so that the bias is below the stated bound;
what is left is Monte-Carlo error, from the means of many independent chains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pymc as pm
import pytest

from tests.support.samplers import SAMPLERS
from tests.support.sampling import NUMBA

SLOW = pytest.mark.slow
CHAINS = 20
BURN_IN, DRAWS, THIN = 50, 1_000, 10
BIAS = 0.05
"""The bias is at most this, for means in posterior sds and for variances relatively."""


@dataclass(frozen=True)
class Target:
    """A model, and the mean and variance of each coordinate of its position."""

    name: str
    n_rows: int
    model: Callable[[], pm.Model]
    moments: Callable[[], tuple[np.ndarray, np.ndarray]]


def moments_on_grid(log_density, *axes) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance by the sum over a grid, which is exact for smooth decaying densities."""
    grid = np.meshgrid(*axes, indexing="ij")
    values = log_density(*grid)
    weights = np.exp(values - values.max())
    weights /= weights.sum()
    means = np.array([(weights * axis).sum() for axis in grid])
    return means, np.array(
        [(weights * (axis - mean) ** 2).sum() for axis, mean in zip(grid, means, strict=True)]
    )


T_DATA = np.array([-1.0, 0.2, 0.4, 0.9, 1.1, 7.0])
BANANA_DATA = np.array([1.3, 0.1, 0.8, 1.9, 0.7, 1.2])
MIXTURE_DATA = np.array([-1.4, 0.6, 1.2, -0.5, 1.0, -1.1, 0.2, 0.9])
GROUP_DATA = np.array([0.9, 1.4, 0.3, -1.1, -0.2, -0.7, 0.5, 0.1, 0.0])
GROUPS = np.repeat([0, 1, 2], 3)


def student_t() -> pm.Model:
    with pm.Model() as model:
        location = pm.Normal("location", 0.0, 5.0)
        pm.StudentT("y", nu=3.0, mu=location, sigma=0.7, observed=T_DATA)
    return model


def student_t_moments():
    def log_density(m):
        z = (T_DATA[:, None] - m) / 0.7
        return -0.5 * (m / 5) ** 2 - 2.0 * np.log1p(z**2 / 3).sum(0)

    return moments_on_grid(log_density, np.linspace(-15, 15, 20001))


def banana() -> pm.Model:
    with pm.Model() as model:
        a = pm.Normal("a", 0.0, 1.0)
        b = pm.Normal("b", 0.0, 1.0)
        pm.Normal("y", a + 0.5 * b**2, 1.0, observed=BANANA_DATA)
    return model


def banana_moments():
    def log_density(a, b):
        mean = a + 0.5 * b**2
        squares = ((BANANA_DATA - mean[..., None]) ** 2).sum(-1)
        return -0.5 * (a**2 + b**2 + squares)

    return moments_on_grid(log_density, np.linspace(-7, 5, 600), np.linspace(-6, 6, 600))


def mixture() -> pm.Model:
    """Two modes, at about plus and minus one, between which chains can move."""
    with pm.Model() as model:
        shift = pm.Normal("shift", 0.3, 1.0)
        pm.NormalMixture(
            "y", w=[0.5, 0.5], mu=pm.math.stack([shift, -shift]), sigma=1.0, observed=MIXTURE_DATA
        )
    return model


def mixture_moments():
    def log_density(m):
        y = MIXTURE_DATA[:, None]
        return -0.5 * (m - 0.3) ** 2 + np.logaddexp(-0.5 * (y - m) ** 2, -0.5 * (y + m) ** 2).sum(0)

    return moments_on_grid(log_density, np.linspace(-7, 7, 20001))


def hierarchical() -> pm.Model:
    """Non-centred group effects with a scale whose prior keeps it from zero."""
    with pm.Model() as model:
        log_scale = pm.Normal("log_scale", 0.0, 0.5)
        effect = pm.Normal("effect", 0.0, 1.0, shape=3)
        pm.Normal("y", pm.math.exp(log_scale) * effect[GROUPS], 0.8, observed=GROUP_DATA)
    return model


def hierarchical_moments():
    """Given the scale the effects are Gaussian: quadrature over the scale alone."""
    t = np.linspace(-4, 4, 4001)
    scale = np.exp(t)
    precision = 1 + 3 * scale**2 / 0.64
    sums = np.array([GROUP_DATA[group == GROUPS].sum() for group in range(3)])
    means = scale[:, None] * sums / 0.64 / precision[:, None]
    log_weights = -0.5 * (t / 0.5) ** 2 - 1.5 * np.log(precision)
    log_weights += 0.5 * (precision[:, None] * means**2).sum(1)
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    mean_t, mean_z = weights @ t, weights @ means
    variance_z = weights @ (1 / precision[:, None] + means**2) - mean_z**2
    return np.array([mean_t, *mean_z]), np.array([weights @ (t - mean_t) ** 2, *variance_z])


TARGETS = [
    Target("Student t", 6, student_t, student_t_moments),
    Target("banana", 6, banana, banana_moments),
    Target("mixture", 8, mixture, mixture_moments),
    Target("hierarchical", 9, hierarchical, hierarchical_moments),
]


@pytest.mark.parametrize(
    "target",
    [
        # One of them in the default run; the others take some minutes for all samplers.
        pytest.param(target, id=target.name, marks=() if target.name == "Student t" else SLOW)
        for target in TARGETS
    ],
)
@pytest.mark.parametrize(
    "sampler",
    [
        pytest.param(
            sampler,
            id=sampler.name,
            # Their laws are tested with Student's t or in closed form elsewhere.
            marks=SLOW if sampler.name in ("HAMCMC", "HAMCMC (between)", "SGRLD") else (),
        )
        for sampler in SAMPLERS
        if sampler.careful
    ],
)
@pytest.mark.filterwarnings("ignore::pymc_sgmcmc.CenterWarning")
def test_moments(request, sampler, target):
    draws = DRAWS
    if sampler.name == "HAMCMC" and target.name in ("hierarchical", "banana"):
        # Means 0.2 and 0.1 posterior sds off at any step size, as its docstring says, and chains
        # that diverge on the banana; pairs between chains, the sampler after it, leave none out.
        request.applymarker(pytest.mark.xfail(strict=True, reason="HAMCMC leaves out a drift"))
        draws = 4 * DRAWS if target.name == "banana" else DRAWS
    if (sampler.name, target.name) == ("OSGFS", "banana"):
        pytest.skip("for near-Gaussian posteriors: the curvature at this mode is nearly none")
    step = sampler.step_class(
        model=target.model(),
        batch_size=target.n_rows,
        compile_kwargs=NUMBA,
        **{"thin": THIN, **sampler.careful},
    )
    mean, variance = target.moments()
    rng = np.random.default_rng(17)
    estimates = []
    layout = step.posterior.layout
    for chain in range(CHAINS):
        step.setup_chain(np.random.default_rng([3, chain]), BURN_IN, draws)
        start = mean + np.sqrt(variance) * rng.standard_normal(len(mean))
        point, positions = layout.unravel(start), []
        for number in range(BURN_IN + draws):
            point, (stats,) = step.step(point)
            if number >= BURN_IN:
                positions.append(stats["position"])
        shifted = (np.array(positions) - mean) / np.sqrt(variance)
        estimates.append([shifted.mean(0), (shifted**2).mean(0)])
    estimates = np.array(estimates)
    errors = estimates.mean(0) - np.array([np.zeros(len(mean)), np.ones(len(mean))])
    standard_errors = estimates.std(0, ddof=1) / np.sqrt(CHAINS)
    assert standard_errors.max() < 0.06
    assert (np.abs(errors) < BIAS + 4.5 * standard_errors).all(), (errors, standard_errors)
