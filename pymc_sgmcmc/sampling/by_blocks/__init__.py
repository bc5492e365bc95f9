"""Models of two index arrays, sampled by blocks of both."""

from pymc_sgmcmc.sampling.by_blocks.sample_blocks import sample_blocks

__all__ = ["sample_blocks"]
