"""Transitions of chains: one file an algorithm."""

from pymc_sgmcmc.dynamics.base import Auxiliary, Dynamics
from pymc_sgmcmc.dynamics.langevin import Langevin

__all__ = ["Auxiliary", "Dynamics", "Langevin"]
