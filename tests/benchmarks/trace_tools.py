"""Time and memory of `zero_variance` and `stein_calibrate` on a large trace. Linux only.

::

    python tests/benchmarks/trace_tools.py --draws 200000 --dimension 20
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from common.clocks import timed
from common.runner import Result, Table, Verdict, fresh, run

TOOLS = ("zero_variance", "stein_calibrate")
SECONDS = 5.0
MEMORY = 3.0
"""Limits: processor time, and peak of the process's memory in units of the trace."""
OPTIONS = {
    "draws": (1_000_000, "of all chains together"),
    "chains": (4,),
    "dimension": (100, "coordinates, d"),
    "tools": (TOOLS, TOOLS),
}
COLUMNS = {
    "tool": "tool",
    "wall s": "wall_seconds",
    "cpu s": "cpu_seconds",
    "trace MB": lambda r: r["trace_bytes"] / 1e6,
    "peak, traces": "peak",
}


def measure(tool: str, draws: int, chains: int, dimension: int) -> Result:
    """Run a tool on a simulated trace, in this process, which does nothing else."""
    import numpy as np
    import xarray as xr
    from common.memory import Phases

    import pymc_sgmcmc

    call = getattr(pymc_sgmcmc, tool)

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
        # The trace itself is in memory too.
        "peak": 1 + phases.found["call"]["peak"] / trace.nbytes,
    }


def results(settings: Any) -> Iterator[Result]:
    """Each tool."""
    for tool in settings.tools:
        given = {name: getattr(settings, name) for name in ("draws", "chains", "dimension")}
        yield fresh(measure, tool=tool, **given)


def verdicts(found: list[Result]) -> Iterator[Verdict]:
    """Time and memory."""
    for result in found:
        yield Verdict(f"{result['tool']}: cpu", result["cpu_seconds"], SECONDS, "s")
        yield Verdict(f"{result['tool']}: peak", result["peak"], MEMORY, "traces")


TABLES = [Table("{draws} draws, d = {dimension}, one core", COLUMNS)]

if __name__ == "__main__":
    sys.exit(run(__doc__, results, TABLES, OPTIONS, verdicts))
