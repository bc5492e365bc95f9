"""Whole runs of many chains."""

from pymc_sgmcmc.sampling.run import sample

__all__ = ["sample"]
