"""The logistic regression of `common.problem` as a PyMC model, and chains of this package's engine.

PyMC is imported inside the functions: settings such as ``pytensor.config.floatX`` and the number
of threads must be made before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from common.problem import Problem

KINDS = ("minibatch", "ordinary")
"""A model on ``pm.Minibatch``, and one on the full arrays."""

_BLOCK_TRANSITIONS = 4000


def build_model(problem: Problem, batch: int, kind: str = "minibatch") -> Any:
    """Write the regression as a user of the package does."""
    import pymc as pm
    import pytensor

    pytensor.config.floatX = problem.dtype.name
    design, response = np.ascontiguousarray(problem.design), problem.response
    with pm.Model() as model:
        size = {}
        if kind == "minibatch":
            design, response = pm.Minibatch(design, response, batch_size=batch)
            size = {"total_size": problem.rows}
        coefficients = pm.Normal(
            "coefficients", 0.0, sigma=problem.prior_sd, shape=problem.features
        )
        pm.Bernoulli("outcome", logit_p=design @ coefficients, observed=response, **size)
    return model


def make_step(model: Any, method: str, batch: int, **settings: Any) -> Any:
    """Step method of this package by the name of the method."""
    from pymc_sgmcmc import SGLD, SGLDCV

    return (SGLD if method == "sgld" else SGLDCV)(model=model, batch_size=batch, **settings)


def engine_chain(
    step: Any,
    start: np.ndarray,
    step_size: float,
    length: int = _BLOCK_TRANSITIONS,
    keep: bool = True,
) -> Callable[[int, int], np.ndarray]:
    """Chain of a step method's engine, without PyMC around it.

    Returns
    -------
    callable
        ``run(seed, transitions)`` draws noise and minibatches, calls compiled blocks of
        transitions as the step method does, and returns the position after each, of shape
        (transitions, features), or the last one where they are not kept.
    """
    block, batching = step.block, step.batching

    def run(seed: int, transitions: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        state = (start, *block.dynamics.initial_auxiliaries(start, rng))
        pending = batching.draw(rng, block.lag)
        blocks = []
        for first in range(0, transitions, length):
            count = min(length, transitions - first)
            indices = np.concatenate([pending, batching.draw(rng, count)])
            noise = block.draw_noise(rng, count)
            ran = block(state, indices, noise, np.full(count, step_size), reuse=True)
            state = (ran.positions[-1].copy(), *(values[-1].copy() for values in ran.auxiliaries))
            pending = indices[-block.lag :]
            if keep:
                blocks.append(ran.positions.copy())
        return np.concatenate(blocks or [state[0][None]])

    return run
