"""Time of many chains at once on a device of JAX, beside chains one after the other on Numba.

::

    python tests/benchmarks/many_chains.py --dtype float32 --chains 1000 --batch 50
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

from common import DTYPES
from common.clocks import in_turn, timed
from common.runner import Result, Table, run

SECONDS_APART = 3.0
"""The chains one after the other run for about so long."""
OPTIONS = {
    "rows": (100_000, "rows of the data, N"),
    "features": ((20,), "p"),
    "batch": ((50, 500), "minibatch size, n"),
    "chains": ((1, 16, 1000),),
    "dtype": ("float64", DTYPES),
    "transitions": (256_000, "of all chains together"),
    "rounds": (3, "times each is timed, in turn"),
    "run": (False, "time whole runs of `sample` too, to 100 000 draws, without the set-up"),
    "platforms": ("", "devices that JAX may use, such as cpu or cuda; empty: as JAX chooses"),
}
COLUMNS = {
    "p": "features",
    "n": "batch",
    "chains": "chains",
    "Numba, one by one": "one_by_one",
    "JAX, at once": "at_once",
    "×": lambda r: r["one_by_one"] / r["at_once"],
    "sd ratio": "sd_ratio",
    "device": "device",
}
RUNS = {"p": "features", "n": "batch", "run": "run", "first": "first", "later": "later"}


def measure(settings: Any, features: int, batch: int) -> Iterator[Result]:
    """Time one chain on Numba, and each number of chains on the device, in turn."""
    import jax
    import numpy as np
    from common.regression import build_model, engine_chain, make_problem, make_step

    from pymc_sgmcmc import sample
    from pymc_sgmcmc.vectorized import ChainsOnDevice

    jax.config.update("jax_enable_x64", settings.dtype == "float64")
    problem = make_problem(settings.rows, features, settings.dtype)
    model, about = build_model(problem), {"features": features, "batch": batch}
    given = {"center": problem.mode, "preconditioner": "curvature"}
    step = make_step(model, "sgld-cv", batch, **given)
    step_size, thin = float(step.step_size), step.thin
    numba = engine_chain(step, problem.mode, step_size, keep=False)
    on_jax = make_step(model, "sgld-cv", batch, **given, compile_kwargs={"mode": "JAX"})
    device = ChainsOnDevice(on_jax.block)
    length = device.draws_of_call(thin) * thin
    numba(0, 20 * length)  # It compiles.
    _, first = timed(numba, 0, 20 * length)
    apart = min(settings.transitions, int(SECONDS_APART * 20 * length / first.wall))
    counts = {
        chains: max(2, settings.transitions // (length * chains)) for chains in settings.chains
    }
    ratios: dict[int, float] = {}

    def at_once(chains: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        start = problem.mode.astype(settings.dtype)
        begin = on_jax.block.dynamics.initial_auxiliaries
        begun = [(start, *begin(start, rng)) for _ in range(chains)]
        parts = tuple(np.array(part, settings.dtype) for part in zip(*begun, strict=True))
        seeds = rng.integers(2**32, size=(chains, 2), dtype=np.uint32)
        state = device.begin(seeds, parts)
        for _ in range(counts[chains]):
            state, draws = device.advance(state, np.full(length, step_size), thin)
        half = draws.positions[:, draws.positions.shape[1] // 2 :]  # The first are near the start.
        ratios[chains] = float(np.median(half.std((0, 1)) / problem.sd))

    calls: dict[Any, Any] = {0: lambda seed: numba(seed, apart)}
    for chains in settings.chains:
        calls[chains] = lambda seed, chains=chains: at_once(chains, seed)
    times = in_turn(calls, settings.rounds, "wall")
    for chains in settings.chains:
        yield {
            **about,
            "chains": chains,
            "one_by_one": 1e6 * times[0][0] / apart,
            "at_once": 1e6 * times[chains][0] / (counts[chains] * length * chains),
            "sd_ratio": ratios[chains],
            "device": jax.devices()[0].device_kind,
        }
    for mode, chains, draws, method in (
        ("NUMBA", 4, 25_000, "parallel"),
        ("JAX", 1000, 100, "vectorized"),
    ):
        if settings.run:
            step = make_step(model, "sgld-cv", batch, compile_kwargs={"mode": mode})
            options = {"chains": chains, "cores": 1, "tune": 200 if mode == "NUMBA" else 50}
            options |= {"step": step, "model": model, "chain_method": method}
            options |= {"quiet": True, "compute_convergence_checks": False}
            walls = [timed(sample, draws, **options)[1].wall for _ in range(settings.rounds + 1)]
            # In the first one JAX compiles the transitions of all chains.
            yield about | {
                "run": f"{mode}, {method}", "first": walls[0], "later": min(walls[1:]),
            }  # fmt: skip


def results(settings: Any) -> Iterator[Result]:
    """All combinations."""
    os.environ["JAX_ENABLE_X64"] = str(settings.dtype == "float64")
    os.environ["JAX_PLATFORMS"] = settings.platforms  # The runner holds JAX to processors.
    for case in itertools.product(settings.features, settings.batch):
        yield from measure(settings, *case)


TABLES = [
    Table("µs a transition of one chain, N = {rows}, {dtype}", COLUMNS, lambda r: "chains" in r),
    Table("Seconds of a run to 100 000 draws, without the set-up", RUNS, lambda r: "run" in r),
]

if __name__ == "__main__":
    sys.exit(run(__doc__, results, TABLES, OPTIONS))
