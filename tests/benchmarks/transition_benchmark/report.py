"""Table and JSON file of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

Clock = Literal["wall", "cpu"]

REFERENCES = ("ours", "numba")
"""Ratios refer to the first of these that was timed."""
_LEAST_CORE_SHARE = 0.95


@dataclass(frozen=True)
class Result:
    """Times of one contender in one configuration.

    Attributes
    ----------
    rows, features, batch, dtype, method
        The configuration.
    step_size, transitions
        Settings of every chain of the configuration.
    contender : str
        Who was timed.
    wall_microseconds, cpu_microseconds : list of float
        Time of a transition in every round. Processor time much below wall time means that
        something else ran on the core.
    guard : dict
        Fields of :class:`~transition_benchmark.guard.Verdict`.
    note : str
        Remark of the contender.
    """

    rows: int
    features: int
    batch: int
    dtype: str
    method: str
    step_size: float
    transitions: int
    contender: str
    wall_microseconds: list[float]
    cpu_microseconds: list[float]
    guard: dict[str, Any]
    note: str

    @property
    def configuration(self) -> tuple[int, str, int, str]:
        """Key under which results are compared."""
        return self.features, self.dtype, self.batch, self.method

    def microseconds(self, clock: Clock) -> list[float]:
        """Time of a transition in every round by one of the clocks."""
        return self.wall_microseconds if clock == "wall" else self.cpu_microseconds

    @property
    def core_share(self) -> float:
        """Share of the core which the contender had in its best-served round."""
        pairs = zip(self.cpu_microseconds, self.wall_microseconds, strict=True)
        return max(cpu / wall for cpu, wall in pairs)


def print_report(
    results: Sequence[Result],
    contenders: Sequence[str],
    absent: Mapping[str, str],
    clock: Clock,
    console: Console | None = None,
) -> None:
    """Print one line a configuration and one column a contender, and what to mind."""
    console = console or Console()
    console.print(make_table(results, contenders, clock))
    for result in results:
        if not result.guard["passed"]:
            console.print(
                f"GUARD FAILED: {result.contender}, {result.method}, p = {result.features}, "
                f"n = {result.batch}, {result.dtype}: {result.guard}",
                style="bold red",
                markup=False,
            )
    shared = sum(result.core_share < _LEAST_CORE_SHARE for result in results)
    if shared:
        console.print(
            f"the core was shared with other programs in {shared} of {len(results)} measurements: "
            "processor time (--clock cpu) suffers less from that than wall time"
        )
    for contender, reason in absent.items():
        console.print(f"{contender} did not take part: {reason}", markup=False)


def make_table(results: Sequence[Result], contenders: Sequence[str], clock: Clock) -> Table:
    """Best and median microseconds a transition, with ratios of the best to the reference's."""
    timed = [name for name in contenders if any(r.contender == name for r in results)]
    reference = next((name for name in REFERENCES if name in timed), None)
    title = f"µs of {clock} time a transition: best (median)"
    if reference is not None:
        title += f", × ratio of the best to {reference}"
    table = Table(title=title)
    for heading in ("p", "dtype", "n", "method"):
        table.add_column(heading, justify="right")
    for name in timed:
        table.add_column(name, justify="right")
    for configuration in dict.fromkeys(result.configuration for result in results):
        by_name = {r.contender: r for r in results if r.configuration == configuration}
        base = by_name.get(reference) if reference else None
        cells = [_cell(by_name.get(name), base, clock) for name in timed]
        table.add_row(*map(str, configuration), *cells)
    return table


def write_json(
    output: Path,
    results: Sequence[Result],
    versions: Mapping[str, Mapping[str, str]],
    absent: Mapping[str, str],
    settings: Mapping[str, Any],
    machine: Mapping[str, Any],
) -> None:
    """Write everything that is needed to read the figures later."""
    document = {
        "benchmark": "transition_cost",
        "machine": dict(machine),
        "settings": dict(settings),
        "versions": {name: dict(version) for name, version in versions.items()},
        "absent": dict(absent),
        "results": [
            {**asdict(result), "best": _best(result, "wall"), "best_cpu": _best(result, "cpu")}
            for result in results
        ],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")


def _best(result: Result, clock: Clock) -> float:
    return min(result.microseconds(clock))


def _cell(result: Result | None, base: Result | None, clock: Clock) -> str:
    if result is None:
        return "-"
    best = _best(result, clock)
    text = f"{best:.2f} ({median(result.microseconds(clock)):.2f})"
    if base is not None:
        text += f" ×{best / _best(base, clock):.2f}"
    return text if result.guard["passed"] else f"{text} !"
