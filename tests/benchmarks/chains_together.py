"""Time of a transition where chains share their minibatches, and what that does to their draws.

The chains are written by hand for one model and compiled by Numba, so this is the most that could
be gained. The package itself runs each chain on rows of its own.

Examples
--------
::

    python tests/benchmarks/chains_together.py
    python tests/benchmarks/chains_together.py --features 10 --batch 500 --chains 4 16

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from common import METHODS
from common.machine import restrict_to_one_core
from common.program import make_parser, print_table, say, write_results

STRETCHES = 200
"""Means of this many stretches of the chains show the variance of the mean of all chains."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the data, N")
    parser.add_argument("--features", type=int, nargs="+", default=[10, 50], help="p")
    parser.add_argument("--batch", type=int, nargs="+", default=[30, 500], help="minibatch size, n")
    parser.add_argument("--chains", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--step", type=float, default=0.05, help="step size, of unit curvature")
    parser.add_argument("--transitions", type=int, default=100_000, help="of each chain")
    parser.add_argument("--rounds", type=int, default=5, help="times each is timed, in turn")
    return parser.parse_args(arguments)


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


def measure(
    settings: argparse.Namespace, features: int, batch: int, chains: int
) -> list[dict[str, Any]]:
    """Time both ways in turn, and compare the variance of the mean of the chains."""
    # NumPy reads the number of threads when it loads.
    import numpy as np
    from common.problem import make_problem, sigmoid
    from common.timing import best, timed

    problem = make_problem(settings.rows, features, "float64")
    # In coordinates R⁻¹ θ the curvature is one.
    root = np.linalg.inv(np.linalg.cholesky(problem.curvature)).T
    design = problem.design @ root
    mode = np.linalg.solve(root, problem.mode)
    fitted = sigmoid(design @ mode)
    slope = design.T @ (problem.response - fitted)
    parts = {"sgld": (problem.response, np.zeros(features)), "sgld-cv": (fitted, slope)}
    stretch = settings.transitions // STRETCHES
    results = []
    for method in METHODS:
        arguments = (design, *parts[method], settings.step, batch)

        def several(together: bool, seed: int, arguments=arguments) -> np.ndarray:
            """Mean of each chain in each stretch, shape (stretches, p, chains)."""
            width = chains if together else 1
            means = []
            for chain in range(0, chains, width):
                generator = np.random.default_rng([seed, chain])
                positions = np.repeat(mode[:, None], width, axis=1)
                out = np.empty((stretch, features, width))
                of_chain = []
                for _ in range(STRETCHES):
                    compiled()(*arguments, generator, positions, out)
                    of_chain.append(out.mean(0))
                means.append(of_chain)
            return np.concatenate(means, axis=2)

        ways = {"apart": False, "together": True}
        times: dict[str, list] = {way: [] for way in ways}
        inflation: dict[str, list] = {way: [] for way in ways}
        for together in ways.values():
            several(together, 0)  # compiles
        for number in range(settings.rounds):
            for way, together in ways.items():
                means, seconds = timed(several, together, number)
                times[way].append(seconds)
                variance = chains * means.mean(2).var(0).mean() / means.var(0).mean()
                inflation[way].append(variance)
        transitions = STRETCHES * stretch * chains
        taken = {way: 1e6 * best(times[way], "cpu") / transitions for way in ways}
        results.append(
            {
                "features": features,
                "batch": batch,
                "chains": chains,
                "method": method,
                **taken,
                "faster": taken["apart"] / taken["together"],
                **{f"variance_{way}": float(np.mean(inflation[way])) for way in ways},
            }
        )
    return results


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    results: list[dict[str, Any]] = []
    for case in itertools.product(settings.features, settings.batch, settings.chains):
        say("p = {}, n = {}, {} chains".format(*case))
        results += measure(settings, *case)
        write_results(settings.output, "chains_together", settings, core, results)
    print_table(
        f"µs of processor time a transition of one chain, N = {settings.rows}",
        ["p", "n", "chains", "method", "apart", "together", "×", "variance apart", "together"],
        [list(result.values()) for result in results],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
