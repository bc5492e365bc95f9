"""The command line: options in, exit status out, everything else in the other modules."""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pandas as pd
from rich.console import Console

from pymc_sgmcmc.demo.data import (
    DEFAULT_EXAMPLE,
    EXAMPLES,
    Design,
    Table,
    check_memory,
    load_example,
    load_file,
    make_design,
    simulate,
)
from pymc_sgmcmc.demo.errors import InputError
from pymc_sgmcmc.demo.fit import (
    DEFAULT_BATCH_SIZE,
    FEWEST_DRAWS,
    MODES,
    PRIOR_SD,
    SAMPLER_LABELS,
    SAMPLERS,
    Cost,
    Fit,
    InterruptedEarlyError,
    Settings,
    fit,
    resolve_batch_size,
    resolve_mode,
)
from pymc_sgmcmc.demo.reference import Laplace, laplace
from pymc_sgmcmc.demo.report import (
    MOST_PLOTTED,
    compare,
    comparison_table,
    comparison_verdict,
    cost_table,
    cost_verdict,
    prepare_folder,
    write_plot,
    write_summary,
    write_trace,
)
from pymc_sgmcmc.tuning import VARIANCE_INFLATION

PROGRAM = "python -m pymc_sgmcmc"

NOT_WRITTEN = 1
BAD_INPUT = 2
INTERRUPTED = 130  # as shells have it for a program ended by Ctrl-C


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Leave with one line; the usage, which argparse puts before it, is in ``--help``."""
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}\n")


def make_parser() -> argparse.ArgumentParser:
    """Options of the command line."""
    parser = _Parser(
        prog=PROGRAM,
        description=(
            "Fit a Bayesian logistic regression by stochastic gradient MCMC, compare it with a "
            "reference computed from all rows, and write the trace and a plot. Without options: "
            "RAND HIE, a table inside statsmodels, which needs neither a network nor a file."
        ),
        epilog=(
            "Exit status: 0 when done, 1 when a file could not be written where it should be, 2 "
            "for an input that cannot be used, 130 when interrupted before there were draws. "
            "Ctrl-C during sampling keeps the draws so far."
        ),
        allow_abbrev=False,
    )
    data = parser.add_argument_group("data")
    source = data.add_mutually_exclusive_group()
    source.add_argument(
        "--data",
        metavar="NAME",
        help=f"a public data set: {', '.join(EXAMPLES)} (default: {DEFAULT_EXAMPLE}). All but "
        "randhie and fair are read from the folder in $PYMC_SGMCMC_DATA or downloaded",
    )
    source.add_argument(
        "--file",
        metavar="PATH",
        help="a CSV (in UTF-8) or parquet file of your own; needs --outcome. Numbers are "
        "standardised, text becomes indicators, incomplete rows and empty columns are dropped",
    )
    data.add_argument(
        "--outcome", metavar="COLUMN", help="the column of --file to model, with two values"
    )
    data.add_argument(
        "--rows",
        metavar="N",
        type=_whole_number(2),
        help="after the table itself, fit N rows simulated from it (predictors drawn with "
        "replacement, outcomes from the fitted model), to show how the cost changes",
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--sampler",
        choices=tuple(SAMPLERS),
        default="sgld-cv",
        help="step method, with control variates where its name ends in -cv (default: %(default)s)",
    )
    for name, least, default, text in (
        ("draws", FEWEST_DRAWS, 1000, "draws to keep in each chain"),
        ("tune", 0, 200, "draws to discard at the start of each chain"),
        ("chains", 1, 4, "chains"),
    ):
        sampling.add_argument(
            f"--{name}",
            metavar="N",
            type=_whole_number(least),
            default=default,
            help=f"{text} (default: %(default)s)",
        )
    sampling.add_argument(
        "--cores",
        metavar="N",
        type=_whole_number(1),
        help="chains to run at the same time (default: as many as there are cores; 1 with "
        "--mode JAX)",
    )
    sampling.add_argument(
        "--batch-size",
        metavar="N",
        type=_whole_number(1),
        help=f"rows a transition looks at (default: {DEFAULT_BATCH_SIZE}, or all if fewer)",
    )
    sampling.add_argument(
        "--seed",
        metavar="N",
        type=_whole_number(0),
        default=1,
        help="of all random numbers; the same seed gives the same draws (default: %(default)s)",
    )
    sampling.add_argument(
        "--mode",
        metavar="MODE",
        type=_mode,
        default="auto",
        help=f"how PyTensor compiles the transitions: {', '.join(MODES)} (default: %(default)s: "
        "CVM where there is a C++ compiler, else NUMBA). NUMBA takes a minute to compile the "
        "first time and then runs two to three times faster",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output",
        metavar="FOLDER",
        type=Path,
        default=Path("pymc_sgmcmc_output"),
        help="where to write; made if needed (default: %(default)s)",
    )
    output.add_argument(
        "--no-progress", dest="progress", action="store_false", help="no progress bar"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the process where not given.

    Returns
    -------
    int
        Exit status: 0, 1 when a file could not be written, 2 for bad input, or 130 when
        interrupted.
    """
    options = make_parser().parse_args(arguments)
    # Names of columns and values may look like markup.
    console = Console(markup=False, highlight=False, emoji=False)
    try:
        design = make_design(_announce(_load(options), console))
        settings = _settings(options, design)
        folder = prepare_folder(options.output)
        written = _run(design, settings, options.rows, folder, console)
    except InputError as error:
        # One line, whatever a library put into its message.
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except (InterruptedEarlyError, KeyboardInterrupt):
        print(f"{PROGRAM}: interrupted before there were draws to keep", file=sys.stderr)
        return INTERRUPTED
    return 0 if written else NOT_WRITTEN


# --- Steps --------------------------------------------------------------------------------------


def _load(options: argparse.Namespace) -> Table:
    if (options.file is None) != (options.outcome is None):
        given, missing = ("--file", "--outcome") if options.file else ("--outcome", "--file")
        raise InputError(
            f"{given} needs {missing} as well: --file PATH --outcome COLUMN. A data set given by "
            "--data has its own outcome."
        )
    try:
        if options.file is not None:
            return load_file(options.file, options.outcome)
        return load_example(options.data or DEFAULT_EXAMPLE)
    except InputError:
        raise
    # What the loaders raise, with messages that say what to do.
    except (OSError, ImportError, ValueError) as error:
        raise InputError(str(error)) from error


def _settings(options: argparse.Namespace, design: Design) -> Settings:
    mode = resolve_mode(options.mode)
    if mode == "JAX" and find_spec("jax") is None:
        raise InputError(
            "--mode JAX needs the package jax, which is not installed. Install it by: "
            'pip install "pymc_sgmcmc[jax]"'
        )
    if options.rows is not None:
        check_memory(options.rows, design.X.shape[1])
    # One for both tables, so that their costs can be compared.
    fewest_rows = min(design.n_rows, options.rows or design.n_rows)
    batch_size = resolve_batch_size(options.batch_size, fewest_rows)
    available = 1 if mode == "JAX" else _usable_cores()
    return Settings(
        sampler=options.sampler,
        draws=options.draws,
        tune=options.tune,
        chains=options.chains,
        cores=min(options.chains, options.cores or available),
        batch_size=batch_size,
        seed=options.seed,
        mode=mode,
        # PyMC draws its progress bar with a colour map of matplotlib.
        progress=options.progress and _has_matplotlib(),
    )


def _announce(table: Table, console: Console) -> Table:
    """Say what is fitted."""
    origin = table.origin
    if origin.startswith("package"):
        origin += ", no network needed"
    console.print("Bayesian logistic regression by stochastic gradient MCMC", style="bold")
    console.print(f"Data: {table.name}, {len(table.outcome):,} rows ({origin}).")
    if table.description:
        console.print(table.description)
    return table


def _run(
    design: Design, settings: Settings, rows: int | None, folder: Path, console: Console
) -> bool:
    """Fit and report; whether all files were written."""
    sampler = SAMPLER_LABELS[settings.sampler]
    for note in design.notes:
        console.print(f"Note: {note}.", style="yellow")
    console.print(
        f"Outcome: {design.outcome_label}, in {design.y.mean():.1%} of {design.n_rows:,} rows."
    )
    console.print(
        f"Model: {len(design.feature_names)} coefficients with prior Normal(0, {PRIOR_SD}): an "
        f"intercept, and one for each column. Sampler: {sampler}, compiled by {settings.mode}."
    )
    reference = laplace(design.X, design.y, PRIOR_SD)
    result = _fit(design, settings, console)
    costs: list[Cost] = [result.cost] if result.cost else []
    name = f"{design.name}-{settings.sampler}"
    if rows is not None and not result.interrupted:
        design = simulate(design, reference.mode, rows, settings.seed)
        name += f"-{rows}-rows"
        console.print(
            f"\nNow {rows:,} rows simulated from the fitted model (outcome in "
            f"{design.y.mean():.1%}); the tables and files below are of these."
        )
        reference = laplace(design.X, design.y, PRIOR_SD)
        result = _fit(design, settings, console)
        costs += [result.cost] if result.cost else []
    comparison = _report(design, settings, result, reference, costs, console)
    console.print()
    console.print("Files", style="bold")
    return _write(design, settings, result, comparison, folder, _slug(name), console)


def _fit(design: Design, settings: Settings, console: Console) -> Fit:
    console.print(
        "Setting up: compiling (the first time up to a minute), then finding the mode …",
        style="dim",
    )
    result = fit(design, settings)
    for message in result.warnings:
        console.print(f"Warning: {message}", style="yellow")
    return result


def _report(
    design: Design,
    settings: Settings,
    result: Fit,
    reference: Laplace,
    costs: list[Cost],
    console: Console,
) -> pd.DataFrame:
    """Print the comparison with the reference, and what it cost."""
    sampler = SAMPLER_LABELS[settings.sampler]
    if result.interrupted:
        sizes = result.trace["posterior"].sizes
        console.print(
            f"\nInterrupted: going on with {sizes['chain']} of {settings.chains} chains and "
            f"{sizes['draw']} of {settings.draws} draws in each.",
            style="yellow",
        )
    comparison = compare(result.trace, reference)
    console.print()
    console.print(
        f"{sampler} beside a Laplace approximation from all {design.n_rows:,} rows", style="bold"
    )
    console.print(comparison_table(comparison, console))
    console.print(comparison_verdict(comparison, VARIANCE_INFLATION))
    if reference.separated:
        console.print(
            "Note: the columns tell all outcomes apart, so the prior shapes the posterior, which "
            "is skewed: the reference is a rough one, and so is the sampler's step size.",
            style="yellow",
        )

    console.print()
    console.print("Cost", style="bold")
    if costs:
        console.print(cost_table(costs, result.batch_size))
        console.print(cost_verdict(costs))
    else:
        console.print("Not measured: sampling was interrupted.")
    return comparison


def _write(
    design: Design,
    settings: Settings,
    result: Fit,
    comparison: pd.DataFrame,
    folder: Path,
    name: str,
    console: Console,
) -> bool:
    """Write the files and print a line for each; whether all are in the folder."""

    def trace(folder: Path) -> str:
        path = write_trace(result.trace, folder, name)
        if path is not None:
            return str(path)
        return 'not written: needs h5netcdf and h5py; pip install "pymc_sgmcmc[files]"'

    def summary(folder: Path) -> str:
        write_summary(comparison, path := folder / f"{name}-summary.csv")
        return str(path)

    def plot(folder: Path) -> str:
        if not _has_matplotlib():
            return "not written: needs matplotlib; pip install matplotlib"
        sampler, title = SAMPLER_LABELS[settings.sampler], f"{design.name}: {design.outcome_label}"
        write_plot(comparison, path := folder / f"{name}.png", sampler, title)
        hidden = len(comparison) - MOST_PLOTTED
        return str(path) + (f" (without the last {hidden} coefficients)" if hidden > 0 else "")

    @functools.cache
    def elsewhere() -> Path:
        return Path(tempfile.mkdtemp(prefix="pymc_sgmcmc_"))

    all_written = True
    for write in (trace, summary, plot):
        kind = write.__name__
        try:
            line = write(folder)
        except OSError as error:
            all_written = False
            said = (
                f"{PROGRAM}: error: the {kind} could not be written to the folder "
                f"{str(folder)!r}: {error.strerror or error}."
            )
            try:
                # The draws should outlive the run.
                said += f" It is here instead: {write(elsewhere())}"
            except OSError:
                said += " Free space there, or give another folder by --output, and run again."
            print(said, file=sys.stderr)
        else:
            # Not broken into lines: a path is there to be copied.
            console.print(f"{kind:<8} {line}", soft_wrap=True)
    return all_written


# --- Small things ---------------------------------------------------------------------------------


def _whole_number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(
                f"should be a whole number, at least {least}, but got {text!r}"
            )
        return value

    return parse


def _mode(text: str) -> str:
    for mode in MODES:
        if text.lower() == mode.lower():
            return mode
    raise argparse.ArgumentTypeError(f"should be one of {', '.join(MODES)}, but got {text!r}")


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


def _slug(name: str) -> str:
    """Part of a file name, whatever the table is called."""
    return re.sub(r"[^\w.-]+", "-", name)
