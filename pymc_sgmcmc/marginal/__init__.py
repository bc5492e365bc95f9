"""Local latent variables integrated out, so that groups of records become the rows."""

from pymc_sgmcmc.marginal.marginalize import marginalize
from pymc_sgmcmc.marginal.recover import recover
from pymc_sgmcmc.marginal.result import MarginalFit

__all__ = ["MarginalFit", "marginalize", "recover"]
