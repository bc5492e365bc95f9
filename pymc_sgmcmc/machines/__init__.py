"""Posteriors of parts of the rows, on several machines."""

from pymc_sgmcmc.machines.blocks import sample_blocks
from pymc_sgmcmc.machines.consensus import consensus

__all__ = ["consensus", "sample_blocks"]
