"""Local latent variables integrated out, so that groups of records become the rows."""

from pymc_sgmcmc.marginal.fit import MarginalFit, fit_marginal
from pymc_sgmcmc.marginal.marginalize import marginalize

__all__ = ["MarginalFit", "fit_marginal", "marginalize"]
