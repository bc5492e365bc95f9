"""What the user sees and keeps: tables, a trace file, a plot."""

from __future__ import annotations

import errno
import importlib
import io
import math
import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import arviz as az
import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table
from scipy import special
from xarray import DataTree

from pymc_sgmcmc.demo.errors import InputError
from pymc_sgmcmc.demo.fit import Cost
from pymc_sgmcmc.demo.reference import Laplace

CI_PROB = 0.89
"""Probability of the credible intervals; ArviZ's default."""

CI_COLUMNS = ("eti89_lb", "eti89_ub")

BAD_R_HAT = 1.1
"""Above it a comparison says nothing; the usual bound for inference, 1.01, is PyMC's to check."""

MOST_PLOTTED = 60
"""Coefficients in the plot."""

TRACE_FORMATS = {".nc": ("h5netcdf", "h5py"), ".zarr": ("zarr",)}
"""Endings of trace files, with the packages that write them, in order of preference."""


# --- Comparison with the reference ------------------------------------------------------------


def compare(trace: DataTree, reference: Laplace) -> pd.DataFrame:
    """Summary of a trace beside the reference.

    Parameters
    ----------
    trace : xarray.DataTree
        With ``beta`` in its posterior.
    reference : Laplace

    Returns
    -------
    pandas.DataFrame
        One row a feature: the columns of `arviz.summary`, unrounded; reference_mean and
        reference_sd; difference, of the means in reference standard deviations; sd_ratio,
        standard deviation over that of the reference.
    """
    summary = az.summary(trace, var_names=["beta"], ci_prob=CI_PROB, ci_kind="eti", round_to="none")
    frame = pd.DataFrame(
        {name: summary[name].to_numpy(dtype=float) for name in summary.columns},
        index=pd.Index(trace["posterior"]["feature"].to_numpy().astype(str), name="feature"),
    )
    frame["reference_mean"] = reference.mode
    frame["reference_sd"] = reference.sd
    frame["difference"] = (frame["mean"] - reference.mode) / reference.sd
    frame["sd_ratio"] = frame["sd"] / reference.sd
    return frame


def comparison_table(comparison: pd.DataFrame, console: Console) -> Table:
    """Table to print.

    Parameters
    ----------
    comparison : pandas.DataFrame
        From `compare`.
    console : rich.console.Console
        Where to print it; what does not fit into its lines is left out, the Monte Carlo errors
        first, then the intervals.
    """
    unbounded = console.options.update(width=1000)  # as wide as the table would like to be
    for intervals, errors in ((True, True), (True, False), (False, False)):
        table = _comparison_table(comparison, intervals=intervals, errors=errors)
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
    return table


def _comparison_table(comparison: pd.DataFrame, *, intervals: bool, errors: bool) -> Table:
    decimals = _decimals(comparison["reference_sd"])
    number = f".{decimals}f"
    columns = [("mean", "mean", number), ("sd", "sd", number)]
    if intervals:
        columns += [(name, name.replace("_", "\n"), number) for name in CI_COLUMNS]
    columns += [("ess_bulk", "ess\nbulk", ".0f")]
    if intervals:
        columns += [("ess_tail", "ess\ntail", ".0f")]
    columns += [("r_hat", "r_hat", ".2f")]
    if errors:
        more = f".{decimals + 1}f"
        columns += [("mcse_mean", "mcse\nmean", more), ("mcse_sd", "mcse\nsd", more)]
    columns += [
        ("reference_mean", "Laplace\nmean", number),
        ("reference_sd", "Laplace\nsd", number),
        ("difference", "diff. of\nmeans/sd", "+.2f"),
        ("sd_ratio", "ratio\nof sds", ".3f"),
    ]
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column("feature", overflow="fold", vertical="bottom", min_width=9)
    for name, header, _ in columns:
        style = "cyan" if name.startswith("reference") else None
        table.add_column(header, justify="right", no_wrap=True, vertical="bottom", style=style)
    for feature, row in comparison.iterrows():
        table.add_row(str(feature), *(_number(row[name], spec) for name, _, spec in columns))
    return table


def comparison_verdict(comparison: pd.DataFrame, inflation: float) -> str:
    """One sentence on how near the sampler comes to the reference.

    Parameters
    ----------
    comparison : pandas.DataFrame
    inflation : float
        Relative excess of variance that the default step size allows.
    """
    worst = comparison["difference"].abs().max()
    r_hat = comparison["r_hat"].max()
    ratio = comparison["sd_ratio"]
    errors = [
        (comparison[name] / comparison["reference_sd"]).max() for name in ("mcse_mean", "mcse_sd")
    ]
    mean_error, sd_error = (_number(error, ".2f") for error in errors)
    if not math.isfinite(worst):
        return "Some coefficients have draws that are not numbers; see the messages above."
    if r_hat > BAD_R_HAT:
        return (
            f"The chains have not converged (r_hat up to {r_hat:.2f}), so they do not show how "
            "near the sampler comes to the reference. Give more --draws or --tune, or a larger "
            "--batch-size."
        )
    return (
        f"Means differ from the reference by at most {worst:.2f} of its sd (Monte Carlo error "
        f"{mean_error}); sds are {ratio.min():.2f} to {ratio.max():.2f} times its own (Monte Carlo "
        f"error {sd_error}). The step size is set to widen them by up to "
        f"{math.sqrt(1 + inflation) - 1:.1%}."
    )


def _decimals(sds: pd.Series) -> int:
    """Decimals that show two digits of the smallest standard deviation."""
    smallest = float(sds.min())
    return int(np.clip(1 - math.floor(math.log10(smallest)), 2, 8)) if smallest > 0 else 4


def _number(value: float, spec: str) -> str:
    return format(value, spec) if math.isfinite(value) else "–"


# --- Cost ---------------------------------------------------------------------------------------


def cost_table(costs: list[Cost], batch_size: int) -> Table:
    """Table of what sampling costs, one line for each number of rows."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    for header in (
        "rows",
        "set-up\nonce",
        "gradient\nall rows",
        f"transition\n{batch_size} rows",
        "transitions\na draw",
        "\na draw",
        "\ndraws",
        "sampling\nin all",
    ):
        table.add_column(header, justify="right", no_wrap=True, vertical="bottom")
    for cost in costs:
        table.add_row(
            f"{cost.n_rows:,}",
            duration(cost.set_up),
            duration(cost.full_gradient),
            duration(cost.transition),
            str(cost.thin),
            duration(cost.draw),
            f"{cost.draws:,}",
            duration(cost.sampling),
        )
    return table


def cost_verdict(costs: list[Cost]) -> str:
    """Sentences on how the time splits, and on what a larger table changes."""
    last = costs[-1]
    share = last.set_up / (last.set_up + last.sampling)
    sentences = [
        f"Set-up took {share:.0%} of the time and sampling {1 - share:.0%}: set-up compiles and "
        "passes over all rows to find the mode; a transition reads one minibatch."
    ]
    if len(costs) > 1:
        first = costs[0]
        sentences.append(
            f"With {last.n_rows / first.n_rows:.3g} times the rows a gradient of all of them "
            f"took {last.full_gradient / first.full_gradient:.3g} times as long, a transition "
            f"{last.transition / first.transition:.2g} times. Only the first set-up had to "
            "compile."
        )
    return " ".join(sentences)


def duration(seconds: float) -> str:
    """Time in a unit that suits it.

    Examples
    --------
    >>> duration(12.3), duration(0.0123), duration(4.56e-6)
    ('12.3 s', '12.3 ms', '4.56 µs')
    """
    unit, size = next(
        ((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size),
        ("µs", 1e-6),
    )
    count = seconds / size
    return f"{count:.0f} {unit}" if count >= 99.95 else f"{count:.3g} {unit}"


# --- Files --------------------------------------------------------------------------------------


def prepare_folder(folder: Path) -> Path:
    """Make the output folder and see that files can be written to it.

    Raises
    ------
    InputError
        When they cannot.
    """
    folder = folder.expanduser()
    probe = folder / ".pymc_sgmcmc_write_test"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"--output should be a folder that can be written to, but {str(folder)!r} cannot: "
            f"{error.strerror or error}."
        ) from error
    return folder


def trace_format() -> str | None:
    """Ending of the trace file that the installed packages can write, None where none can."""
    for ending, packages in TRACE_FORMATS.items():
        if all(find_spec(package) is not None for package in packages):
            return ending
    return None


def write_trace(trace: DataTree, folder: Path, name: str) -> Path | None:
    """Write a trace to a file.

    Parameters
    ----------
    trace : xarray.DataTree
    folder : Path
    name : str
        Of the file, without its ending.

    Returns
    -------
    Path or None
        The file: netCDF, or else Zarr; None where no package for either is installed.

    Raises
    ------
    OSError
        When it cannot be written. What was there before is then left as it was.
    """
    ending = trace_format()
    if ending is None:
        return None
    path = folder / f"{name}{ending}"
    if ending == ".nc":
        # Made in memory: HDF5 ends the process when it cannot write to a file.
        contents = trace.to_netcdf(engine="h5netcdf")
        _replace(path, lambda file: file.write_bytes(contents))
    else:
        # Consolidated metadata are an extension that zarr warns of.
        _replace(path, lambda store: trace.to_zarr(store, mode="w", consolidated=False))
    return path


def write_summary(comparison: pd.DataFrame, path: Path) -> None:
    """Write a comparison as CSV.

    Raises
    ------
    OSError
        As `write_trace`.
    """
    contents = comparison.to_csv().encode()
    _replace(path, lambda file: file.write_bytes(contents))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file or a folder under another name first, so that no part of one is ever left."""
    if path.exists() and not os.access(path, os.W_OK):
        # Else put in its place, which asks only for a folder that can be written to.
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".pymc_sgmcmc_") as scratch:
        written = Path(scratch) / path.name
        write(written)
        if written.is_dir() and path.is_dir():
            os.replace(path, Path(scratch) / "before")
        os.replace(written, path)


def write_plot(comparison: pd.DataFrame, path: Path, sampler: str, title: str) -> None:
    """Draw the coefficients, and their distance to the reference, as a forest plot.

    Parameters
    ----------
    comparison : pandas.DataFrame
        From `compare`. The first `MOST_PLOTTED` rows are drawn.
    path : Path
        PNG file to write.
    sampler : str
        What to call the sampler.
    title : str

    Raises
    ------
    OSError
        As `write_trace`.
    """
    # Without pyplot: no window, no backend to choose, nothing to close.
    figure_module = importlib.import_module("matplotlib.figure")
    shown = comparison.head(MOST_PLOTTED)
    rows = np.arange(len(shown))[::-1]
    lower, upper = (shown[name] for name in CI_COLUMNS)
    mean, sd = shown["reference_mean"], shown["reference_sd"]

    figure = figure_module.Figure(
        figsize=(9.5, 1.7 + 0.28 * len(shown)), dpi=150, layout="constrained"
    )
    left, right = figure.subplots(1, 2, sharey=True)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    figure.suptitle(title, fontsize="medium")
    left.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    left.plot(mean, rows, "|", color="C1", markersize=13, markeredgewidth=1.6, label="Laplace mode")
    left.hlines(rows, lower, upper, color="C0", linewidth=2)
    left.plot(shown["mean"], rows, "o", color="C0", markersize=4, label=f"{sampler} mean")
    left.set_yticks(rows, shown.index)
    left.set_ylim(-0.8, len(shown) - 0.2)
    left.set_xlabel(f"coefficient (log odds), {CI_PROB:.0%} interval")

    reach = special.ndtri(0.5 + CI_PROB / 2)
    right.axvspan(-reach, reach, color="C1", alpha=0.15, linewidth=0)
    right.axvline(0, color="C1", linewidth=1.6)
    right.hlines(rows, (lower - mean) / sd, (upper - mean) / sd, color="C0", linewidth=2)
    right.plot(shown["difference"], rows, "o", color="C0", markersize=4)
    right.set_xlabel("(coefficient − Laplace mode) / Laplace sd")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    handles, labels = left.get_legend_handles_labels()
    patch = importlib.import_module("matplotlib.patches").Patch(color="C1", alpha=0.15)
    figure.legend(
        [handles[1], handles[0], patch],
        [labels[1], labels[0], f"Laplace {CI_PROB:.0%} interval"],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize="small",
    )
    contents = io.BytesIO()
    figure.savefig(contents, format="png")
    _replace(path, lambda file: file.write_bytes(contents.getbuffer()))
