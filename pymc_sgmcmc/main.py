"""``python -m pymc_sgmcmc``: sample a Bayesian regression on a table, check it and write files.

Arguments and files are checked before PyMC, pandas and NumPy are imported, which takes seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAM = "python -m pymc_sgmcmc"

EXAMPLES = {
    "randhie": "mdvis > 0",
    "fair": "affairs > 0",
    "contraception": "use == 1",
    "skin": "skin == 1",
    "covertype": "Cover_Type == 2",
    "cod-rna-train": "non_coding == 1",
    "run-or-walk": "activity == 1",
}
"""These public tables can be named on the command line, with the outcome to model. The first two
need neither a network nor a folder."""

SUFFIXES = (".csv", ".txt", ".parquet")

NUMBERS = {
    "draws": (4, 1000, "draws to keep in each chain"),
    "tune": (0, 500, "draws to discard at the start of each chain"),
    "chains": (1, 4, "chains"),
    "cores": (1, os.cpu_count(), "chains at the same time"),
    "seed": (0, 1, "of all random numbers"),
}
"""These options are whole numbers. Each has its smallest value, its default and its help text.
ArviZ summarises chains of at least four draws."""

DONE, NOT_WRITTEN, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
"""These are the exit statuses. A shell gives the last one for a program that Ctrl-C ended."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """Exit with the message alone: the usage, which argparse would add, is in ``--help``."""
        # Messages of other libraries may have several lines, and this program prints one.
        self.exit(BAD_INPUT, f"{self.prog}: error: {' '.join(message.split())}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of the process, and return the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    name = options.data if options.file is None else options.file.stem
    paths = [options.output.expanduser() / f"{name}{suffix}" for suffix in (".nc", ".png")]
    if (wrong := problem_of(options, paths)) is not None:
        parser.error(wrong)
    from pymc_sgmcmc.regression import InputError, run

    try:
        errors = run(options, EXAMPLES[options.data], paths)
    except (InputError, ImportError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted before there were draws to keep", file=sys.stderr)
        return INTERRUPTED
    for reason in errors:
        print(f"{PROGRAM}: error: {reason}", file=sys.stderr)
    return NOT_WRITTEN if errors else DONE


def make_parser() -> argparse.ArgumentParser:
    """Options of the command line."""
    parser = _Parser(
        prog=PROGRAM,
        allow_abbrev=False,
        description="Sample a Bayesian regression by stochastic gradient MCMC, compare it with "
        "Laplace's approximation from all rows, and write the trace and a plot. Bambi makes the "
        "model and its priors. Without options: RAND HIE, a table inside statsmodels.",
        epilog="A formula is code: it can call any function of Python, so run only formulas of "
        "people whom you trust. Exit status: 0 when done, 1 when a file could not be written, 2 "
        "for an input that cannot be used, 130 when interrupted before there were draws. Ctrl-C "
        "during sampling keeps the draws so far.",
    )
    add = parser.add_argument
    table = parser.add_mutually_exclusive_group()
    public = "public table to sample; %(default)s if not given"
    table.add_argument("--data", choices=EXAMPLES, default="randhie", help=public)
    table.add_argument("--file", type=Path, help="your own CSV (in UTF-8) or parquet file")
    add("--separator", help="separator of the columns of a CSV file; guessed if not given")
    add("--outcome", help="column to model; --file needs it or --formula")
    add("--columns", nargs="+", help="predictors of the outcome; all other columns if not given")
    add(
        "--formula",
        help="of Bambi, instead of --outcome and --columns, such as 'y ~ x + C(ward)', "
        "'y ~ x + (1|hospital)', 'y ~ x + offset(log(time))' or 'p(cured, treated) ~ x'",
    )
    add(
        "--family",
        help="of Bambi, such as gaussian, poisson, negativebinomial or t; if not given, bernoulli "
        "for two values, binomial for p(k, n), else gaussian",
    )
    add("--bias", type=float, help="accepted relative error of variances; 0.05 if not given")
    for name, (_, default, text) in NUMBERS.items():
        add(f"--{name}", type=int, default=default, help=f"{text}; %(default)s if not given")
    add(
        "--mode",
        choices=("NUMBA", "CVM", "FAST_COMPILE"),
        default="NUMBA",
        help="mode of PyTensor for the transitions: CVM needs a C++ compiler, compiles faster and "
        "runs slower; %(default)s if not given",
    )
    folder = "pymc_sgmcmc_output"
    add("--output", type=Path, default=folder, help=f"folder for the files; {folder} if not given")
    add("--overwrite", action="store_true", help="replace files of an earlier run in the folder")
    return parser


def problem_of(options: argparse.Namespace, paths: Sequence[Path]) -> str | None:
    """What is wrong with the options and with files to read or write, None for nothing."""
    for name, (least, _, _) in NUMBERS.items():
        if (given := getattr(options, name)) < least:
            return f"--{name} should be at least {least}, but got {given}"
    if options.formula and (options.outcome or options.columns):
        return "--formula names all columns, so leave out --outcome and --columns."
    if (file := options.file) is not None:
        if not (options.formula or options.outcome):
            return "--file needs --outcome COLUMN or --formula 'y ~ x'."
        if file.suffix not in SUFFIXES:
            return f"--file should end in {', '.join(SUFFIXES)}, but got {str(file)!r}."
        if not file.is_file():
            kind = "no file" if file.exists() else "not there"
            return f"--file should be a table, but {str(file)!r} is {kind}. Correct its name."
    folder = str(paths[0].parent)
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return (
            f"--output should be a folder with permission to write, but {folder!r} is not: "
            f"{error.strerror}."
        )
    if not options.overwrite and (found := [str(path) for path in paths if path.exists()]):
        return (
            f"--output has {' and '.join(found)} of an earlier run. Give another folder, or "
            "--overwrite."
        )
    return None
