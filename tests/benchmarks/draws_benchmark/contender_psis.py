"""Laplace's approximation with Pareto smoothed importance weights, from all rows."""

from functools import partial

from draws_benchmark.contender_laplace import PACKAGES
from draws_benchmark.contender_laplace import sample as sample_with

__all__ = ["PACKAGES", "sample"]

sample = partial(sample_with, corrected=True)
