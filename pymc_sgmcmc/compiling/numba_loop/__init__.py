"""A loop of transitions, and products of matrices, that Numba compiles."""

from pymc_sgmcmc.compiling.numba_loop.loop import LoopOfTransitions
from pymc_sgmcmc.compiling.numba_loop.products import with_numpy_products

__all__ = ["LoopOfTransitions", "with_numpy_products"]
