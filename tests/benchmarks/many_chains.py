"""Time of a transition of many chains at once on a device of JAX, beside one chain after the other.

The transitions are those that the package compiles for JAX, mapped over chains. Noise and
minibatches are drawn on the device too. The package itself runs chains one by one.

Examples
--------
::

    python tests/benchmarks/many_chains.py
    python tests/benchmarks/many_chains.py --dtype float32 --chains 1000 --same-rows

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

from common.machine import restrict_to_one_core
from common.program import DTYPES, make_parser, print_table, say, write_results

LENGTH = 256
"""Transitions of one call on the device, as in the package."""

TOLERANCE = {"float64": 1e-9, "float32": 1e-3}
"""Chains at once and one by one may differ by so much, in posterior standard deviations, after
the transitions of one call."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the data, N")
    parser.add_argument("--features", type=int, nargs="+", default=[20], help="p")
    parser.add_argument("--batch", type=int, nargs="+", default=[50, 500], help="minibatch size, n")
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 16, 1000])
    parser.add_argument("--dtype", choices=DTYPES, default="float64")
    parser.add_argument("--same-rows", action="store_true", help="one minibatch for all chains")
    parser.add_argument("--transitions", type=int, default=256_000, help="of all chains together")
    parser.add_argument("--rounds", type=int, default=5, help="times each is timed, in turn")
    return parser.parse_args(arguments)


def on_device(block: Any, rows: int, features: int, same_rows: bool) -> tuple[Callable, Callable]:
    """Compiled transitions of all chains: with given noise, and with noise of the device.

    Returns
    -------
    given, drawn : callable
        ``given(positions, indices, noise, step_size)`` and ``drawn(key, positions, step_size)``
        return the positions of all chains after each of `LENGTH` transitions.
    """
    import jax
    import jax.numpy as jnp
    from pytensor.compile.sharedvalue import SharedVariable

    function = block._function
    # What PyTensor compiled: a function of the arguments and then of the shared data.
    transitions = function.vm.jit_fn
    variables = [given.variable for given in function.maker.inputs]
    shared = [
        jnp.asarray(variable.get_value(borrow=True))
        for variable in variables
        if isinstance(variable, SharedVariable)
    ]
    passes = LENGTH + block.lag

    def one_chain(position, indices, noise, step_sizes, *data):
        return transitions(position, indices, noise, step_sizes, *data)[0]

    over = (0, None if same_rows else 0, 0, None, *(None for _ in shared))
    all_chains = jax.vmap(one_chain, in_axes=over)

    def given(positions, indices, noise, step_size):
        sizes = jnp.full(passes, step_size, dtype=block.dtype)
        return all_chains(positions, indices, noise, sizes, *shared)[:, :LENGTH]

    def drawn(key, positions, step_size):
        of_rows, of_noise = jax.random.split(key)
        chains = len(positions)
        shape = (passes,) if same_rows else (chains, passes)
        indices = jax.random.randint(of_rows, shape, 0, rows)
        noise = jax.random.normal(of_noise, (chains, passes, features), dtype=block.dtype)
        return given(positions, indices, noise, step_size)

    return jax.jit(given), jax.jit(drawn)


def check(block: Any, given: Callable, problem: Any, step_size: float) -> None:
    """Chains at once have the draws of chains one by one, of the same noise and rows."""
    import numpy as np

    rng = np.random.default_rng(1)
    indices = rng.integers(problem.rows, size=(3, LENGTH + block.lag))
    indices[1:] = indices[0]  # So that one minibatch for all chains is checked as well.
    starts = problem.mode + 0.01 * rng.normal(size=(3, problem.features))
    noise = [block.draw_noise(rng, LENGTH).copy() for _ in range(3)]
    expected = [
        block((start,), index, each, np.full(LENGTH, step_size)).positions
        for start, index, each in zip(starts, indices, noise, strict=True)
    ]
    for shape in (indices, indices[0]):
        try:
            found = given(starts.astype(block.dtype), shape, np.stack(noise), step_size)
        except (TypeError, ValueError):  # This is the other of the two ways to have rows.
            continue
        sds = np.sqrt(np.diag(np.linalg.inv(problem.curvature)))
        worst = np.abs((np.asarray(found) - np.stack(expected)) / sds).max()
        if worst > TOLERANCE[problem.dtype.name]:
            raise RuntimeError(f"Chains at once differ from chains one by one by {worst:.2g} sd.")
        return
    raise RuntimeError("Chains at once could not be compared with chains one by one.")


def measure(settings: argparse.Namespace, features: int, batch: int) -> list[dict[str, Any]]:
    """Time one chain on Numba, and each number of chains on the device, in turn."""
    import jax
    import numpy as np
    from common.model import build_model, engine_chain, make_step
    from common.problem import make_problem
    from common.timing import best, timed

    jax.config.update("jax_enable_x64", settings.dtype == "float64")
    problem = make_problem(settings.rows, features, settings.dtype)
    model = build_model(problem, batch, "ordinary")
    given = {"center": problem.mode, "preconditioner": "curvature"}
    step = make_step(model, "sgld-cv", batch, **given)
    step_size = float(step.step_size)
    numba = engine_chain(step, problem.mode, step_size, keep=False)
    block = make_step(model, "sgld-cv", batch, **given, compile_kwargs={"mode": "JAX"}).block
    all_given, drawn = on_device(block, problem.rows, features, settings.same_rows)
    check(block, all_given, problem, step_size)

    calls = {
        chains: max(1, settings.transitions // (LENGTH * chains)) for chains in settings.chains
    }

    def at_once(chains: int, seed: int) -> tuple[Any, Any]:
        positions = np.repeat(problem.mode[None].astype(settings.dtype), chains, axis=0)
        total, squares = 0.0, 0.0
        for key in jax.random.split(jax.random.key(seed), calls[chains]):
            ran = drawn(key, positions, step_size)
            positions = ran[:, -1]
            centred = ran[:, LENGTH // 2 :] - problem.mode  # The first ones are near the start.
            total, squares = centred.mean((0, 1)), (centred**2).mean((0, 1))
        return jax.block_until_ready((total, squares))

    times: dict[Any, list] = {name: [] for name in (0, *settings.chains)}
    ratios: dict[int, float] = {}
    sds = np.sqrt(np.diag(np.linalg.inv(problem.curvature)))
    for number in range(settings.rounds + 1):  # The first one compiles.
        times[0].append(timed(numba, number, settings.transitions)[1])
        for chains in settings.chains:
            (mean, squares), seconds = timed(at_once, chains, number)
            times[chains].append(seconds)
            ratios[chains] = float(np.median(np.sqrt(np.asarray(squares - mean**2)) / sds))
    apart = 1e6 * best(times[0][1:], "wall") / settings.transitions
    results = []
    for chains in settings.chains:
        transitions = calls[chains] * LENGTH * chains
        taken = 1e6 * best(times[chains][1:], "wall") / transitions
        results.append(
            {
                "features": features,
                "batch": batch,
                "chains": chains,
                "one_by_one": apart,
                "at_once": taken,
                "faster": apart / taken,
                "sd_ratio": ratios[chains],
                "device": jax.devices()[0].device_kind,
            }
        )
    return results


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    os.environ.setdefault("JAX_ENABLE_X64", str(settings.dtype == "float64"))
    results: list[dict[str, Any]] = []
    for case in itertools.product(settings.features, settings.batch):
        say("p = {}, n = {}".format(*case))
        results += measure(settings, *case)
        write_results(settings.output, "many_chains", settings, core, results)
    rows = "the same minibatches" if settings.same_rows else "minibatches of their own"
    print_table(
        f"µs a transition of one chain, {rows}, N = {settings.rows}, {settings.dtype}",
        ["p", "n", "chains", "Numba, one by one", "JAX, at once", "×", "sd ratio", "device"],
        [list(result.values()) for result in results],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
