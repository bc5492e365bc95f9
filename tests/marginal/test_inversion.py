"""Quantiles by inversion of the distribution function against known laws."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from pymc_sgmcmc.marginal.inversion import Scale, first_ends, invert, second_modes

N_PROBABILITIES = 1001
PROBABILITIES = (np.arange(N_PROBABILITIES) + 0.5) / N_PROBABILITIES


def mixture(weights, means, sds):
    """Log density and distribution function of a mixture of Gaussians."""
    components = list(zip(np.log(weights), map(stats.norm, means, sds), strict=True))
    return (
        lambda u: special.logsumexp([w + law.logpdf(u) for w, law in components], axis=0),
        lambda u: sum(np.exp(w) * law.cdf(u) for w, law in components),
    )


def log_gamma(shape):
    return (
        lambda u: shape * u - np.exp(np.minimum(u, 700)),
        lambda u: special.gammainc(shape, np.exp(u)),
    )


def of(law):
    return law.logpdf, law.cdf


LAWS = {
    # Log density and distribution function, centre and width of the first grid.
    "Gaussian": (*of(stats.norm(1, 2)), 1, 2),
    "Gaussian, far from the scale": (*of(stats.norm(1, 2)), 2, 0.1),
    "Gaussian, far below the scale": (*of(stats.norm(1, 2)), 1, 80),
    "Cauchy": (*of(stats.cauchy), 0, np.sqrt(0.5)),
    "Student-t": (*of(stats.t(3)), 0, np.sqrt(0.75)),
    "Laplace": (*of(stats.laplace), 0, 1),
    "Laplace, beside the kink": (*of(stats.laplace), 0.7, 0.5),
    "logistic": (*of(stats.logistic), 0, np.sqrt(2)),
    "skew": (*of(stats.skewnorm(20)), 0.1, 0.2),
    "log gamma, long tail": (*log_gamma(0.05), np.log(0.05), 0.05**-0.5),
    "log gamma": (*log_gamma(1.0), 0, 1),
    "log gamma, near Gaussian": (*log_gamma(300.0), np.log(300), 300**-0.5),
    "two modes apart": (*mixture([0.3, 0.7], [-3, 3], [0.3, 0.3]), 3, 0.3),
    "a far mode": (*mixture([0.9, 0.1], [0, 30], [1, 0.5]), 0, 1),
    "two near modes": (*mixture([0.5, 0.5], [-1.5, 1.5], [1, 1]), 1.4, 1.2),
    "spike and slab": (*mixture([0.5, 0.5], [0, 0], [0.02, 3]), 0, 0.02),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_distribution_function_at_the_quantiles_is_right_to_a_ten_thousandth(name):
    log_density, distribution, centre, width = LAWS[name]
    scale = Scale(np.full(N_PROBABILITIES, centre), np.full(N_PROBABILITIES, width))

    def shifted(points, places):
        return 1000 + log_density(points)

    ends = first_ends(N_PROBABILITIES)
    with np.errstate(all="ignore"):
        hull = second_modes(shifted, scale)
        for _ in range(2):  # The second time the ends are those of the first.
            quantiles = invert(shifted, scale, PROBABILITIES, ends, hull)
            assert np.abs(distribution(quantiles) - PROBABILITIES).max() < 1e-4


def test_grids_follow_a_law_that_moves():
    ends = first_ends(N_PROBABILITIES)
    for centre, width in [(0, 1), (5, 0.1), (-3, 30), (0, 1)]:
        law = stats.norm(centre, width)
        scale = Scale(np.full(N_PROBABILITIES, centre), np.full(N_PROBABILITIES, 1.0))
        quantiles = invert(lambda u, _, law=law: law.logpdf(u), scale, PROBABILITIES, ends)
        assert np.abs(law.cdf(quantiles) - PROBABILITIES).max() < 1e-4
