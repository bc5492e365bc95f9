"""Maximum marginal likelihood, by the integrals that samplers use."""

from pymc_sgmcmc.maximum_likelihood.fit import fit_marginal

__all__ = ["fit_marginal"]
