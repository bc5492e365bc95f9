"""Zero-variance control variates: means of smaller Monte-Carlo error from the stored gradients."""

from pymc_sgmcmc.trace_tools.zero_variance.estimate import ControlledMeans, controlled_means
from pymc_sgmcmc.trace_tools.zero_variance.terms import stein_terms
from pymc_sgmcmc.trace_tools.zero_variance.trace import (
    ZeroVariance,
    zero_variance,
)

__all__ = [
    "ControlledMeans",
    "ZeroVariance",
    "controlled_means",
    "stein_terms",
    "zero_variance",
]
