"""Time and memory of `zero_variance` and `stein_calibrate` on a large trace. Linux only.

Examples
--------
::

    python tests/benchmarks/trace_tools.py
    python tests/benchmarks/trace_tools.py --draws 200000 --dimension 20

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from common.child import run_in_fresh_process
from common.machine import restrict_to_one_core
from common.program import make_parser, print_table, print_verdict, say, write_results

TOOLS = ("zero_variance", "stein_calibrate")
SECONDS = 5.0
MEMORY = 3.0
"""Limits: wall time, and peak of the process's memory in units of the trace."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--draws", type=int, default=1_000_000, help="of all chains together")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--dimension", type=int, default=100, help="coordinates, d")
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
    return parser.parse_args(arguments)


def measure(tool: str, draws: int, chains: int, dimension: int) -> dict[str, Any]:
    """Run a tool on a simulated trace, in this process, which does nothing else."""
    import numpy as np
    import xarray as xr
    from common.memory import Phases
    from common.timing import timed

    from pymc_sgmcmc import stein_calibrate, zero_variance

    call = {"zero_variance": zero_variance, "stein_calibrate": stein_calibrate}[tool]

    def make_trace(draws: int) -> xr.DataTree:
        """Draws with variances 20 % too large, and gradients with some noise."""
        rng = np.random.default_rng(1)
        shape, dims = (chains, draws // chains, dimension), ("chain", "draw", "coordinate")
        positions = rng.standard_normal(shape)
        positions *= 1.2**0.5
        gradients = rng.standard_normal(shape)
        gradients *= 0.3
        gradients -= positions
        stats = xr.Dataset({"position": (dims, positions), "gradient": (dims, gradients)})
        # PyMC's traces hold the variables apart from the positions.
        posterior = xr.Dataset({"theta": (dims, positions.copy())})
        return xr.DataTree.from_dict({"posterior": posterior, "sample_stats": stats})

    call(make_trace(max(20_000, 40 * dimension)))
    trace = make_trace(draws)
    phases = Phases("resident")
    with phases.phase("call"):
        _, seconds = timed(call, trace)
    return {
        "tool": tool,
        "wall_seconds": seconds.wall,
        "cpu_seconds": seconds.cpu,
        "trace_bytes": int(trace.nbytes),
        "peak_bytes": phases.found["call"]["peak"],
        "held_bytes": phases.found["call"]["held"],
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a figure is over its limit."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    results = []
    for tool in settings.tools:
        say(tool)
        results.append(
            run_in_fresh_process(
                "trace_tools:measure",
                tool=tool,
                draws=settings.draws,
                chains=settings.chains,
                dimension=settings.dimension,
            )
        )
        write_results(settings.output, "trace_tools", settings, core, results)
    rows = []
    for result in results:
        trace = result["trace_bytes"]
        # The trace itself is in memory too.
        result["peak"] = 1 + result["peak_bytes"] / trace
        rows.append(
            [result["tool"], result["wall_seconds"], result["cpu_seconds"], trace / 1e6,
             result["peak"]]
        )  # fmt: skip
    print_table(
        f"{settings.draws} draws, d = {settings.dimension}, one core",
        ["tool", "wall s", "cpu s", "trace MB", "peak, traces"],
        rows,
    )
    reached = []
    for result in results:
        reached.append(print_verdict(f"{result['tool']}: cpu", result["cpu_seconds"], SECONDS, "s"))
        reached.append(print_verdict(f"{result['tool']}: peak", result["peak"], MEMORY, "traces"))
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
