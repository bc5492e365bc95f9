"""Chains of SGLD-CV of the contenders of ``transition_cost.py``, with settings tuned by hand.

The libraries compute no settings. Of batches of 20, 50, 100 and 200 rows and step sizes of 0.1,
0.2, 0.3 and 0.4 over the largest curvature, these gave blackjax the most effective draws a second
with all standard deviations within 5 %, for 10⁵ rows of 20 columns. The time of this search is not
counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from common.jax_regression import Regression
from common.problem import Problem
from transition_benchmark import Run, Settings

from draws_benchmark import DRAWS

BATCH, STEP_FACTOR, THIN = 20, 0.1, 20
BLOCK = 1000
"""Draws of one call: the first is the tuning, in which the chain is compiled."""


def sample_with(
    prepare: Callable[[Problem, Settings], dict[str, Run]],
    problem: Problem,
    mark: Callable[[], None],
    *,
    finer: int = 1,
) -> np.ndarray:
    """Find the mode as a user does, and draw from there with the chain that `prepare` makes.

    Steps are so many times finer than those tuned, with as many times as many of them a draw.
    """
    mode = Regression(problem).find_mode()
    step_size, thin = STEP_FACTOR / finer, THIN * finer
    step_size /= np.linalg.eigvalsh(problem.curvature)[-1]
    run = prepare(
        replace(problem, mode=mode, start=mode), Settings(BATCH, step_size, BLOCK * thin)
    )["sgld-cv"]
    run(0)
    mark()
    # Each block begins at the mode anew, and forgets it in one of its thousand draws.
    return np.concatenate([run(1 + number)[thin - 1 :: thin] for number in range(DRAWS // BLOCK)])
