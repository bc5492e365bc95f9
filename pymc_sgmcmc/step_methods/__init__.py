"""Step methods for `pymc.sample`."""

from pymc_sgmcmc.step_methods.psgld import PSGLD
from pymc_sgmcmc.step_methods.sgld import SGLD, SGLDCV

__all__ = ["PSGLD", "SGLD", "SGLDCV"]
