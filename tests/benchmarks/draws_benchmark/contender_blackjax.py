"""blackjax: the SGLD-CV of ``transition_cost.py``, centred where BFGS finds the mode."""

from functools import partial

from transition_benchmark.contender_blackjax import PACKAGES, prepare

from draws_benchmark.tuned_chain import sample_with

__all__ = ["PACKAGES", "sample"]

sample = partial(sample_with, prepare)
