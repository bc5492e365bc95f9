"""Command line, table and JSON file of a benchmark program."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.machine import machine_facts
from common.markdown import PACKAGES, as_text, version

DTYPES = ("float64", "float32")


def make_parser(documentation: str | None) -> argparse.ArgumentParser:
    """Parser with the options that all programs have."""
    # A table wider than a pipe's default of 80 columns would be wrapped in the middle of figures.
    os.environ.setdefault("COLUMNS", "140")
    parser = argparse.ArgumentParser(
        description=(documentation or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--core", type=int, default=None, help="core to run on")
    parser.add_argument("--output", type=Path, default=None, help="JSON file for the results")
    return parser


def say(text: str) -> None:
    """Tell of progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; floating numbers with three significant digits."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(as_text(value) for value in row))
    Console().print(table)


def print_verdict(what: str, figure: float, limit: float, unit: str) -> bool:
    """Print whether a figure is within its limit."""
    reached = figure <= limit
    print(f"{'reached' if reached else 'NOT REACHED'}: {what} {figure:.3g} {unit}, limit {limit:g}")
    return reached


def write_results(
    output: Path | None,
    benchmark: str,
    settings: argparse.Namespace,
    core: int | None,
    results: Sequence[Mapping[str, Any]],
) -> None:
    """Write everything that is needed to read the figures later, where a file was asked for."""
    if output is None:
        return
    document = {
        "benchmark": benchmark,
        "machine": machine_facts(core),
        "settings": {name: _plain(value) for name, value in vars(settings).items()},
        "versions": {package: version(package) for package in PACKAGES},
        "results": list(results),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
