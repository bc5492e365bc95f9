"""Time and messages of an iteration of `sample_blocks` on a Dask cluster of this machine.

Examples
--------
::

    python tests/benchmarks/blocks_on_dask.py
    python tests/benchmarks/blocks_on_dask.py --ratings 1000000 --workers 0 1 2

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
from common.program import make_parser, print_table, say, write_results
from matrix_factorisation import simulated, wait_for


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--ratings", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--rank", type=int, default=10)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="0 is without Dask")
    parser.add_argument("--steps", nargs="+", default=["sgld", "psgld", "hamcmc"])
    parser.add_argument("--iterations", type=int, default=100)
    return parser.parse_args(arguments)


def problem_of(ratings: int, rank: int, parts: int) -> Any:
    """The model in blocks."""
    import pymc as pm

    from pymc_sgmcmc.posterior import Posterior
    from pymc_sgmcmc.posterior.two_sided import two_sided
    from pymc_sgmcmc.sampling.by_blocks.grid import make_grid

    user, movie, rating = simulated(ratings, np.random.default_rng(1))
    shape = user.max() + 1, movie.max() + 1
    with pm.Model() as model:
        U = pm.Normal("U", 0, 1, shape=(shape[0], rank))
        V = pm.Normal("V", 0, 1, shape=(shape[1], rank))
        prediction = (U[pm.Data("user", user)] * V[pm.Data("movie", movie)]).sum(-1)
        pm.Normal("rating", prediction, 1.0, observed=rating)
    problem = two_sided(Posterior(model))
    codes = [problem.posterior.data[side.leaf] for side in problem.sides]
    return problem, make_grid(codes, shape, parts, np.random.default_rng(2))


def sampler(step: str, d: int) -> tuple[Any, Any]:
    """A sampler with settings of about the right size."""
    from pymc_sgmcmc.sampling.by_blocks.steps import (
        LangevinBlocks,
        QuasiNewtonBlocks,
        RMSpropBlocks,
    )

    ones = np.full(d, 1e-4)
    if step == "sgld":
        return LangevinBlocks(), (ones,)
    if step == "psgld":
        return RMSpropBlocks(1000, 0.99, 1e-5, 1e6), ()
    return QuasiNewtonBlocks(3), (ones, 1e-2 / ones, 1e-2 / ones)


def measure(problem: Any, grid: Any, step: str, client: Any, iterations: int) -> dict[str, Any]:
    """Seconds of an iteration, and bytes between workers."""
    from pymc_sgmcmc.sampling.by_blocks.block import Turn
    from pymc_sgmcmc.sampling.by_blocks.setup import Blocks
    from pymc_sgmcmc.sampling.by_blocks.tasks import BlockChain, tasks_of

    d = problem.posterior.dimension
    design, settings = sampler(step, d)
    tasks, blocks = tasks_of(client), Blocks(problem, grid)
    placed = [tasks.place(group) for group in blocks.with_settings(settings)]
    rng = np.random.default_rng(3)
    chain = BlockChain(tasks, design, placed, blocks, 0.1 * rng.standard_normal(d), np.ones(d))
    shares = blocks.shares
    parts = rng.choice(grid.parts, size=20 + iterations, p=shares)

    def advance(first: int, last: int) -> None:
        for iteration in range(first, last):
            part = int(parts[iteration])
            chain.advance(Turn(1, 0, iteration, part, 1 / shares[part], 0.01))
            if iteration % 10 == 9:  # as draws are waited for
                wait_for(chain, client)
        wait_for(chain, client)

    advance(0, 20)  # compiles
    before, begin = sent(client), time.perf_counter()
    advance(20, 20 + iterations)
    seconds = time.perf_counter() - begin
    return {
        "ms": 1000 * seconds / iterations,
        "kilobytes": (sent(client) - before) / iterations / 1000,
    }


def sent(client: Any) -> int:
    """Bytes that the workers have sent to each other."""
    if client is None:
        return 0
    return sum(client.run(_outgoing).values())


def _outgoing(dask_worker: Any) -> int:
    return dask_worker.transfer_outgoing_bytes_total


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    settings = parse_arguments(arguments)
    results = []
    for ratings in settings.ratings:
        problem, grid = problem_of(ratings, settings.rank, settings.parts)
        items = problem.sides[1].places.size
        for workers in settings.workers:
            for step in settings.steps:
                client = None
                if workers:
                    from distributed import Client

                    client = Client(
                        n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0"
                    )
                figures = measure(problem, grid, step, client, settings.iterations)
                if client is not None:
                    client.close()
                result = {
                    "ratings": ratings,
                    "rows_of_block": int(grid.counts().mean() / grid.parts),
                    "item_coordinates": items,
                    "step": step,
                    "workers": workers,
                    **figures,
                }
                say(str(result))
                results.append(result)
        write_results(settings.output, "blocks_on_dask", settings, settings.core, results)
    columns = list(results[0])
    print_table(
        f"rank {settings.rank}, {settings.parts} parts",
        columns,
        [[result[column] for column in columns] for result in results],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
