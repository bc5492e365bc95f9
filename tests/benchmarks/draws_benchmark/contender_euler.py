"""pymc_sgmcmc: SGLD-CV as its paper prints it, with control variates of first order."""

from functools import partial

from draws_benchmark.contender_sample import PACKAGES
from draws_benchmark.contender_sample import sample as sample_with

__all__ = ["PACKAGES", "sample"]

sample = partial(sample_with, gradient="cv", integrator="euler")
