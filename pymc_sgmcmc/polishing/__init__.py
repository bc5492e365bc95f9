"""Exact steps from the draws of a run, and a test of the run by them."""

from pymc_sgmcmc.polishing.polish import Polished, polish

__all__ = ["Polished", "polish"]
