"""Whole runs of many chains."""

from pymc_sgmcmc.sampling.blocks import sample_blocks
from pymc_sgmcmc.sampling.consensus import consensus
from pymc_sgmcmc.sampling.resume import read_store
from pymc_sgmcmc.sampling.run import sample

__all__ = ["consensus", "read_store", "sample", "sample_blocks"]
