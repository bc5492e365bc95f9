"""A chain of SGLD-CV for the libraries in JAX, with settings tuned by hand.

The libraries compute no settings. Of batches of 20, 50, 100 and 200 rows and step sizes of 0.1,
0.2, 0.3 and 0.4 over the largest curvature, these gave blackjax the most effective draws a second
with all standard deviations within 5 %, for 10⁵ rows of 20 columns. The time of this search is not
counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from common.problem import Problem

from draws_benchmark import DRAWS

BATCH = 20
THIN = 20
TUNING = 1000
STEP_FACTOR = 0.1


def tuned_step_size(problem: Problem) -> float:
    """Step size h of ``theta' = theta + (h/2) gradient + N(0, h)``."""
    return STEP_FACTOR / np.linalg.eigvalsh(problem.curvature)[-1]


def draw_chain(
    transition: Callable[[Any, Any, Any], Any],
    get_position: Callable[[Any], Any],
    state: Any,
    data: Any,
    mark: Callable[[], None],
) -> np.ndarray:
    """Compile a chain, run some draws of it, call `mark`, and return the draws that follow.

    Parameters
    ----------
    transition : callable
        Next state from a state, a key and the data.
    """

    # The data are arguments: as constants of the compiled program they would be copied into it.
    @jax.jit
    def chain(state: Any, key: Any, data: Any) -> Any:
        def draw(state: Any, key: Any) -> Any:
            keys = jax.random.split(key, THIN)
            state, _ = jax.lax.scan(lambda s, k: (transition(s, k, data), None), state, keys)
            return state, get_position(state)

        return jax.lax.scan(draw, state, jax.random.split(key, TUNING))

    keys = jax.random.split(jax.random.PRNGKey(1), 1 + DRAWS // TUNING)
    state, positions = chain(state, keys[0], data)
    positions.block_until_ready()
    mark()
    blocks = []
    for key in keys[1:]:
        state, positions = chain(state, key, data)
        blocks.append(np.asarray(positions))
    return np.concatenate(blocks)
