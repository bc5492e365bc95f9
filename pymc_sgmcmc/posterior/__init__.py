"""A PyMC model as a posterior over an unconstrained vector with a likelihood over rows."""

from pymc_sgmcmc.posterior.posterior import Posterior

__all__ = ["Posterior"]
