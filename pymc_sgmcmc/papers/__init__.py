"""Samplers of papers that few models need, over the same parts as the others."""

from pymc_sgmcmc.papers.austerity import AusterityMH
from pymc_sgmcmc.papers.normal_inverse_wishart import NormalInverseWishart
from pymc_sgmcmc.papers.prior_metropolis import PriorMetropolis
from pymc_sgmcmc.papers.recipe import GaussianAuxiliary, Recipe
from pymc_sgmcmc.papers.sgrld import SGRLD

__all__ = [
    "SGRLD",
    "AusterityMH",
    "GaussianAuxiliary",
    "NormalInverseWishart",
    "PriorMetropolis",
    "Recipe",
]
