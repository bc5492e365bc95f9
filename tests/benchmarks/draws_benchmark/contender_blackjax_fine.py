"""blackjax with steps so fine that its bias is about that of corrected draws of this package."""

from functools import partial

from transition_benchmark.contender_blackjax import PACKAGES, prepare

from draws_benchmark.tuned_chain import sample_with

__all__ = ["PACKAGES", "sample"]

sample = partial(sample_with, prepare, finer=8)
