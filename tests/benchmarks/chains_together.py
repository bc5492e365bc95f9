"""Time of a transition where chains share their minibatches, and what that does to their draws.

The chains are written by hand for one model and compiled by Numba, so this is the most that could
be gained. The package itself runs each chain on rows of its own.

::

    python tests/benchmarks/chains_together.py --features 10 --batch 500 --chains 4 16
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from common import METHODS
from common.clocks import in_turn
from common.runner import Result, Table, run

STRETCHES = 200
"""Means of this many stretches of the chains show the variance of the mean of all chains."""
OPTIONS = {
    "rows": (100_000, "rows of the data, N"),
    "features": ((10, 50), "p"),
    "batch": ((30, 500), "minibatch size, n"),
    "chains": ((4, 16),),
    "step": (0.05, "step size, of unit curvature"),
    "transitions": (100_000, "of each chain"),
    "rounds": (5, "times each is timed, in turn"),
}
COLUMNS = {
    "p": "features",
    "n": "batch",
    "chains": "chains",
    "method": "method",
    "apart": "apart",
    "together": "together",
    "×": lambda r: r["apart"] / r["together"],
    "variance apart": "variance_apart",
    "variance together": "variance_together",
}


@cache
def compiled() -> Callable[..., None]:
    """Compile the transitions of chains on the same rows."""
    import numba
    import numpy as np

    @numba.njit(fastmath=True)
    def run(design, target, addend, step_size, batch, generator, positions, out):
        """Write positions, shape (p, chains), after each transition; the prior is flat."""
        windows = len(design) - batch
        half_step, scale, weight = step_size / 2, math.sqrt(step_size), len(design) / batch
        work, gradients = np.empty((batch, positions.shape[1])), np.empty_like(positions)
        for k in range(len(out)):
            first = generator.integers(0, windows)
            window, reference = design[first : first + batch], target[first : first + batch]
            np.dot(window, positions, work)
            for i in range(batch):
                for c in range(positions.shape[1]):
                    work[i, c] = reference[i] - 1 / (1 + math.exp(-work[i, c]))
            np.dot(window.T, work, gradients)
            for j in range(len(positions)):
                for c in range(positions.shape[1]):
                    slope = weight * gradients[j, c] + addend[j]
                    positions[j, c] += half_step * slope + scale * generator.standard_normal()
                    out[k, j, c] = positions[j, c]

    return run


def measure(settings: Any, features: int, batch: int, chains: int) -> Iterator[Result]:
    """Time both ways in turn, and compare the variance of the mean of the chains."""
    import numpy as np
    from common.regression import make_problem, sigmoid

    stretch = settings.transitions // STRETCHES
    problem = make_problem(settings.rows, features)
    # In coordinates R⁻¹ θ the curvature is one.
    root = np.linalg.inv(np.linalg.cholesky(problem.curvature)).T
    design = problem.design @ root
    mode = np.linalg.solve(root, problem.mode)
    fitted = sigmoid(design @ mode)
    slope = design.T @ (problem.response - fitted)
    parts = {"sgld": (problem.response, np.zeros(features)), "sgld-cv": (fitted, slope)}
    for method in METHODS:
        arguments = (design, *parts[method], settings.step, batch)
        inflation: dict[int, list[float]] = {1: [], chains: []}

        def several(seed: int, width: int, arguments=arguments, inflation=inflation) -> None:
            """Variance of the mean of all chains over that of independent ones."""
            means = []
            for chain in range(0, chains, width):
                generator = np.random.default_rng([seed, chain])
                positions = np.repeat(mode[:, None], width, axis=1)
                out, of_chain = np.empty((stretch, features, width)), []
                for _ in range(STRETCHES):
                    compiled()(*arguments, generator, positions, out)
                    of_chain.append(out.mean(0))
                means.append(of_chain)
            values = np.concatenate(means, axis=2)
            ratio = chains * values.mean(2).var(0).mean() / values.var(0).mean()
            inflation[width].append(float(ratio))

        calls = {width: lambda seed, width=width: several(seed, width) for width in (1, chains)}
        times = in_turn(calls, settings.rounds)
        transitions = STRETCHES * stretch * chains
        found = {"features": features, "batch": batch, "chains": chains, "method": method}
        for name, width in {"apart": 1, "together": chains}.items():
            found[name] = 1e6 * times[width][0] / transitions
            found[f"variance_{name}"] = float(np.mean(inflation[width][1:]))
        yield found


def results(settings: Any) -> Iterator[Result]:
    """All combinations."""
    for case in itertools.product(settings.features, settings.batch, settings.chains):
        yield from measure(settings, *case)


TABLES = [Table("µs of processor time a transition of one chain, N = {rows}", COLUMNS)]

if __name__ == "__main__":
    sys.exit(run(__doc__, results, TABLES, OPTIONS))
