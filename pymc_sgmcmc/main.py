"""``python -m pymc_sgmcmc``: sample a Bayesian regression on a table, check it and write files."""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import arviz as az
import arviz_plots as azp
import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats
from xarray import DataTree

from pymc_sgmcmc import datasets
from pymc_sgmcmc.regression import FAMILIES, InputError, Regression, make_regression, read_table
from pymc_sgmcmc.sampling import sample
from pymc_sgmcmc.step_methods import SGLDCV
from pymc_sgmcmc.trace_tools.bias import bias_report
from pymc_sgmcmc.tuning import Center

PROGRAM = "python -m pymc_sgmcmc"

EXAMPLES: dict[str, tuple[Callable[[], datasets.Dataset], str]] = {
    "randhie": (datasets.load_randhie, "mdvis > 0"),
    "fair": (datasets.load_fair, "affairs > 0"),
    "contraception": (datasets.load_contraception, "use == 1"),
    "skin": (datasets.load_skin, "skin == 1"),
    "covertype": (datasets.load_covertype, "Cover_Type == 2"),
    "cod-rna": (datasets.load_cod_rna, "non_coding == 1"),
    "run-or-walk": (datasets.load_run_or_walk, "activity == 1"),
}
"""These public tables can be named on the command line, with the outcome to model. The first two
need neither a network nor a folder."""

FEWEST_DRAWS = 4
"""ArviZ summarises a chain of at least this many draws."""

NUMBERS = {
    "draws": (FEWEST_DRAWS, 1000, "draws to keep in each chain"),
    "tune": (0, 500, "draws to discard at the start of each chain"),
    "chains": (1, 4, "chains"),
    "cores": (1, os.cpu_count(), "chains at the same time"),
    "seed": (0, 1, "of all random numbers"),
}
"""These options are whole numbers. Each has its smallest value, its default and its help text."""

MOST_PLOTTED = 60
"""The plot shows at most this many coefficients, since each makes it 0.4 inches higher."""

NOT_WRITTEN, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""These are the exit statuses. A shell gives the last one for a program that Ctrl-C ended."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """Exit with the message alone: the usage, which argparse would add, is in ``--help``."""
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of the process, and return the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    for name, (least, _, _) in NUMBERS.items():
        if (given := getattr(options, name)) < least:
            parser.error(f"--{name} should be at least {least}, but got {given}")
    # Names of columns may look like markup.
    console = Console(markup=False, highlight=False, emoji=False)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: console.print(f"Warning: {message}")
        try:
            return run(options, console)
        except InputError as error:
            # Messages of other libraries may have several lines, and this program prints one.
            print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
            return BAD_INPUT
        except KeyboardInterrupt:
            print(f"{PROGRAM}: interrupted before there were draws to keep", file=sys.stderr)
            return INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """Options of the command line."""
    parser = _Parser(
        prog=PROGRAM,
        allow_abbrev=False,
        description="Sample a Bayesian regression by stochastic gradient MCMC, compare it with "
        "the Gaussian (Laplace) approximation from all rows, and write the trace and a plot. "
        "Without options: RAND HIE, a table inside statsmodels.",
        epilog="Exit status: 0 when done, 1 when a file could not be written, 2 for an input that "
        "cannot be used, 130 when interrupted before there were draws. Ctrl-C during sampling "
        "keeps the draws so far.",
    )
    add = parser.add_argument
    table = parser.add_mutually_exclusive_group()
    table.add_argument(
        "--data",
        choices=EXAMPLES,
        default="randhie",
        help="public table to sample; %(default)s if not given",
    )
    table.add_argument("--file", type=Path, help="your own CSV (in UTF-8) or parquet file")
    add("--separator", help="separator of the columns of a CSV file; guessed if not given")
    add("--outcome", help="column to model; --file needs it or --formula")
    add("--columns", nargs="+", help="predictors of the outcome; all other columns if not given")
    add("--formula", help="such as 'y ~ x + C(group)', instead of --outcome and --columns")
    add("--family", choices=FAMILIES, help="if not given, bernoulli for two values, else normal")
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
    return parser


def run(options: argparse.Namespace, console: Console) -> int:
    """Sample, report and write files; return the exit status."""
    folder = options.output.expanduser()
    name, regression = load(options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(
            f"--output should be a folder with permission to write, but {str(folder)!r} is not: "
            f"{error.strerror}."
        ) from error
    for note in regression.notes:
        console.print(f"Note: {note}.", style="yellow")
    console.print(
        f"{name}: {len(regression.y):,} rows, {regression.outcome}. {regression.family.title()} "
        f"regression with {len(regression.names)} coefficients, columns standardised but for those "
        "of 0 and 1."
    )
    trace, center = draws_of(regression, options, console)
    table, words = comparison(trace, center, regression)
    console.print(table)
    console.print(words)
    contents: dict[str, Callable[[], bytes]] = {
        # Made in memory, since HDF5 ends the process if it cannot write to a file.
        f"{name}.nc": lambda: bytes(trace.to_netcdf(engine="h5netcdf")),
        f"{name}.png": partial(forest_plot, trace, center),
    }
    written = [_write(folder / file, make, console) for file, make in contents.items()]
    return 0 if all(written) else NOT_WRITTEN


def load(options: argparse.Namespace) -> tuple[str, Regression]:
    """Name of the table, and the regression on it."""
    if options.formula and (options.outcome or options.columns):
        raise InputError("--formula names all columns, so leave out --outcome and --columns.")
    if options.file:
        if not (options.formula or options.outcome):
            raise InputError("--file needs --outcome COLUMN or --formula 'y ~ x'.")
        name, outcome = options.file.stem, options.outcome
        frame = read_table(options.file, options.separator)
        columns = [column for column in frame if column != outcome]
    else:
        loader, outcome = EXAMPLES[options.data]
        try:
            dataset = loader()
        except (OSError, ImportError, ValueError) as error:  # their messages say what to do
            raise InputError(str(error)) from error
        name, columns = dataset.name, list(dataset.feature_names)
        frame = dataset.frame.assign(**{outcome: dataset.frame.eval(outcome)})
        outcome = options.outcome or outcome
    columns = options.columns or columns
    return name, make_regression(frame, outcome, columns, options.formula, options.family)


def draws_of(
    regression: Regression, options: argparse.Namespace, console: Console
) -> tuple[DataTree, Center]:
    """Draws, of which there are fewer after an interrupt, and the centre of the step method."""
    with regression.model():
        try:
            step = SGLDCV(bias=options.bias, compile_kwargs={"mode": options.mode})
        except ValueError as error:
            raise InputError(str(error)) from error
        trace = sample(
            options.draws,
            step=step,
            tune=options.tune,
            chains=options.chains,
            cores=options.cores,
            random_seed=options.seed,
            progressbar=console.is_terminal,
        )
    chains, draws = (trace["posterior"].sizes[name] for name in ("chain", "draw"))
    if draws < FEWEST_DRAWS:
        raise KeyboardInterrupt
    if (chains, draws) != (options.chains, options.draws):
        console.print(
            f"Note: interrupted. The results are from {chains} of {options.chains} chains and "
            f"{draws} of {options.draws} draws in each."
        )
    assert step.center is not None  # computed whenever the step size is
    return trace, step.center


def comparison(trace: DataTree, center: Center, regression: Regression) -> tuple[Table, str]:
    """ArviZ's summary beside the Gaussian approximation and `bias_report`, and the verdicts."""
    summary = az.summary(trace, round_to="none").astype(float)
    report = bias_report(trace)
    sd = center.curvature.standard_deviations
    columns: dict[str, Any] = {
        name: summary[name] for name in ("mean", "sd", "eti89_lb", "eti89_ub", "ess_bulk", "r_hat")
    }
    columns |= {"Gaussian_mean": center.position, "Gaussian_sd": sd}
    columns["variance_error"] = report["variance_error"]
    formats = {"ess_bulk": ".0f", "r_hat": ".2f", "variance_error": ".3f"}
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("coefficient", overflow="fold", vertical="bottom")
    for name in columns:
        style = "cyan" if name.startswith("Gaussian") else None
        table.add_column(name.replace("_", "\n"), justify="right", overflow="fold", style=style)
    labels = [*regression.names, "log_sigma"]
    for label, *row in zip(labels, *columns.values(), strict=False):
        # Two digits of the standard deviation.
        decimals = max(0, 1 - int(np.floor(np.log10(row[1])))) if 0 < row[1] < np.inf else 3
        form = f".{decimals}f" if decimals < 6 else ".3e"
        cells = zip(columns, row, strict=True)
        table.add_row(label, *(format(value, formats.get(name, form)) for name, value in cells))
    distance = np.abs(summary["mean"] - center.position) / sd
    words = (
        f"Means differ from the Gaussian approximation by at most {distance.max():.2f} of its sd.\n"
        f"{report.attrs['verdict']}"
    )
    if regression.y.dtype == bool and ((regression.X @ center.position > 0) == regression.y).all():
        words += (
            "\nNote: the columns separate the outcomes, so the posterior depends on the prior and "
            "the Gaussian approximation is rough."
        )
    return table, words


def forest_plot(trace: DataTree, center: Center) -> bytes:
    """PNG of the intervals of the coefficients beside those of the Gaussian approximation."""
    beta = trace["posterior"].to_dataset()["beta"]
    count = beta.sizes["chain"] * beta.sizes["draw"]
    quantiles = stats.norm.ppf((np.arange(count) + 0.5) / count)[:, None]
    gaussian = center.position + center.curvature.standard_deviations * quantiles
    gaussian = gaussian[:, : beta.shape[-1]].reshape(beta.shape)
    shown = {"SGLD-CV": beta, "Gaussian": beta.copy(data=gaussian)}
    first = {name: values[..., :MOST_PLOTTED].to_dataset() for name, values in shown.items()}
    matplotlib.use("agg")
    plot = azp.plot_forest(
        {name: DataTree.from_dict({"posterior": values}) for name, values in first.items()},
        combined=True,
        labels=["coefficient"],
        backend="matplotlib",
        figure_kwargs={"figsize": (9, 1.5 + 0.4 * min(beta.shape[-1], MOST_PLOTTED))},
    )
    plot.add_legend("model")
    content = io.BytesIO()
    plot.viz["figure"].item().savefig(content, format="png", dpi=150, bbox_inches="tight")
    return content.getvalue()


def _write(path: Path, make: Callable[[], bytes], console: Console) -> bool:
    """Write a file, or print why it cannot be written; return whether it was written."""
    part = path.with_name(f".{path.name}.part")
    try:
        content = make()
        try:
            part.write_bytes(content)
            part.replace(path)  # so that an incomplete file never replaces a complete one
        finally:
            part.unlink(missing_ok=True)
    except (OSError, ImportError) as error:
        reason = getattr(error, "strerror", None) or error
        print(
            f"{PROGRAM}: error: {str(path)!r} could not be written: {reason}. Make room for it or "
            "give another folder by --output, then run again.",
            file=sys.stderr,
        )
        return False
    console.print(f"Written: {path}", soft_wrap=True)  # unbroken, to be copied
    return True
