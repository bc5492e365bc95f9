"""Time of many chains at once on a device of JAX, beside chains one after the other on Numba.

Examples
--------
::

    python tests/benchmarks/many_chains.py
    python tests/benchmarks/many_chains.py --dtype float32 --chains 1000 --batch 50

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from typing import Any

from common.machine import restrict_to_one_core
from common.program import DTYPES, make_parser, print_table, say, write_results

SECONDS_APART = 3.0
"""The chains one after the other run for about so long."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the data, N")
    parser.add_argument("--features", type=int, nargs="+", default=[20], help="p")
    parser.add_argument("--batch", type=int, nargs="+", default=[50, 500], help="minibatch size, n")
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 16, 1000])
    parser.add_argument("--dtype", choices=DTYPES, default="float64")
    parser.add_argument("--transitions", type=int, default=256_000, help="of all chains together")
    parser.add_argument("--rounds", type=int, default=3, help="times each is timed, in turn")
    parser.add_argument(
        "--run",
        action="store_true",
        help="time whole runs of `sample` too, to 100 000 draws, without the set-up",
    )
    parser.add_argument(
        "--platforms",
        default="",
        help="devices that JAX may use, such as cpu or cuda; as JAX chooses where this is empty",
    )
    return parser.parse_args(arguments)


def measure(settings: argparse.Namespace, features: int, batch: int) -> list[dict[str, Any]]:
    """Time one chain on Numba, and each number of chains on the device, in turn."""
    import jax
    import numpy as np
    from common.model import build_model, engine_chain, make_step
    from common.problem import make_problem
    from common.timing import best, timed

    from pymc_sgmcmc.vectorized import ChainsOnDevice

    jax.config.update("jax_enable_x64", settings.dtype == "float64")
    problem = make_problem(settings.rows, features, settings.dtype)
    model = build_model(problem, batch, "ordinary")
    given = {"center": problem.mode, "preconditioner": "curvature"}
    step = make_step(model, "sgld-cv", batch, **given)
    step_size, thin = float(step.step_size), step.thin
    numba = engine_chain(step, problem.mode, step_size, keep=False)
    on_jax = make_step(model, "sgld-cv", batch, **given, compile_kwargs={"mode": "JAX"})
    device = ChainsOnDevice(on_jax.block)
    length = device.draws_of_call(thin) * thin
    calls = {
        chains: max(2, settings.transitions // (length * chains)) for chains in settings.chains
    }
    _, first = timed(numba, 0, 20 * length)
    _, first = timed(numba, 0, 20 * length)  # The one before compiles.
    apart = min(settings.transitions, int(SECONDS_APART * 20 * length / first.wall))

    def at_once(chains: int, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        start = problem.mode.astype(settings.dtype)
        auxiliaries = on_jax.block.dynamics.initial_auxiliaries
        begun = [(start, *auxiliaries(start, rng)) for _ in range(chains)]
        parts = tuple(np.array(part, settings.dtype) for part in zip(*begun, strict=True))
        seeds = rng.integers(2**32, size=(chains, 2), dtype=np.uint32)
        state = device.begin(seeds, parts)
        for _ in range(calls[chains]):
            state, draws = device.advance(state, np.full(length, step_size), thin)
        return draws.positions

    times: dict[Any, list] = {name: [] for name in (0, *settings.chains)}
    ratios: dict[int, float] = {}
    sds = np.sqrt(np.diag(np.linalg.inv(problem.curvature)))
    for number in range(settings.rounds + 1):  # The first one compiles.
        times[0].append(timed(numba, number, apart)[1])
        for chains in settings.chains:
            positions, seconds = timed(at_once, chains, number)
            times[chains].append(seconds)
            half = positions[:, positions.shape[1] // 2 :]  # The first ones are near the start.
            ratios[chains] = float(np.median(half.std((0, 1)) / sds))
    one_by_one = 1e6 * best(times[0][1:], "wall") / apart
    results = []
    for chains in settings.chains:
        taken = 1e6 * best(times[chains][1:], "wall") / (calls[chains] * length * chains)
        results.append(
            {
                "features": features,
                "batch": batch,
                "chains": chains,
                "one_by_one": one_by_one,
                "at_once": taken,
                "faster": one_by_one / taken,
                "sd_ratio": ratios[chains],
                "device": jax.devices()[0].device_kind,
            }
        )
    return results


def measure_runs(settings: argparse.Namespace, features: int, batch: int) -> list[dict[str, Any]]:
    """Time whole runs to the same number of draws: chains at once, and four in turn."""
    from common.model import build_model, make_step
    from common.problem import make_problem
    from common.timing import best, timed

    from pymc_sgmcmc import sample

    model = build_model(make_problem(settings.rows, features, settings.dtype), batch, "ordinary")
    results = []
    for mode, chains, draws, method in (
        ("NUMBA", 4, 25_000, "parallel"),
        ("JAX", 1000, 100, "vectorized"),
    ):
        step = make_step(model, "sgld-cv", batch, compile_kwargs={"mode": mode})
        options = {
            "chains": chains,
            "cores": 1,
            "tune": 200 if mode == "NUMBA" else 50,
            "chain_method": method,
            "step": step,
            "model": model,
            "quiet": True,
            "compute_convergence_checks": False,
        }
        times = [timed(sample, draws, **options)[1] for _ in range(settings.rounds + 1)]
        results.append(
            {
                "features": features,
                "batch": batch,
                "run": f"{mode}, {method}",
                "first": times[0].wall,  # JAX compiles the transitions of all chains.
                "seconds": best(times[1:], "wall"),
            }
        )
    return results


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    os.environ["JAX_ENABLE_X64"] = str(settings.dtype == "float64")
    os.environ["JAX_PLATFORMS"] = settings.platforms  # The line above holds JAX to processors.
    results: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    for case in itertools.product(settings.features, settings.batch):
        say("p = {}, n = {}".format(*case))
        results += measure(settings, *case)
        if settings.run:
            runs += measure_runs(settings, *case)
        write_results(settings.output, "many_chains", settings, core, [*results, *runs])
    print_table(
        f"µs a transition of one chain, N = {settings.rows}, {settings.dtype}",
        ["p", "n", "chains", "Numba, one by one", "JAX, at once", "×", "sd ratio", "device"],
        [list(result.values()) for result in results],
    )
    if runs:
        print_table(
            "Seconds of a run to 100 000 draws, without the set-up",
            ["p", "n", "run", "first", "later"],
            [list(result.values()) for result in runs],
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
