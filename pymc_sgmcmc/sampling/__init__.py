"""Whole runs of many chains."""

from pymc_sgmcmc.sampling.resume import read_store
from pymc_sgmcmc.sampling.run import sample

__all__ = ["read_store", "sample"]
