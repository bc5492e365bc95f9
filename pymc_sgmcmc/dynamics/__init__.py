"""Dynamics: pure transitions of a chain, one file an algorithm."""

from pymc_sgmcmc.dynamics.langevin import Langevin

__all__ = ["Langevin"]
