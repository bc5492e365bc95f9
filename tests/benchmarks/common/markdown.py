"""Tables of the documentation, with what made them."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("pymc_sgmcmc", "pymc", "pytensor", "numba", "numpy", "arviz")


def write_tables(
    path: Path, tables: Sequence[tuple[Sequence[str], Sequence[Sequence[Any]]]], command: str
) -> None:
    """Write tables, given as columns and rows, and under them the command that made them."""
    texts = [markdown_table(columns, rows) for columns, rows in tables]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*texts, f"Made by `{command}` {_circumstances()}.\n"]))


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown; floating numbers with three significant digits."""
    lines = [columns, ["---"] * len(columns), *([as_text(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_text(value: Any) -> str:
    """A cell of a table."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def _circumstances() -> str:
    """Day, machine and versions, in words."""
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    return (
        f"on {datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores of {cpu_name()}, "
        f"Python {platform.python_version()}, {versions}"
    )


def cpu_name() -> str:
    """The processor, as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def version(package: str) -> str:
    """That of an installed package, or of one that is on the path alone."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", "unknown"))
