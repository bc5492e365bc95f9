"""Runs of a step method with default arguments, compared with stored references.

    python -m tests.accuracy.suite FOLDER_OF_DATA [NAME ...] [--draws D] [--seeds S ...] [--bias B]
        [--markdown FILE]

prints for each model the part of its coordinates whose mean is within 0.1 sd and whose sd is
within 5 % of the reference, the largest error of a mean, the median variance errors, true and
reported, and the seconds of set-up and run beside those of NUTS, and writes the table of the
documentation. NAME may be `gallery` for the models as PyMC's gallery writes them, or `regressions`
for the others.
"""

from __future__ import annotations

import argparse
import re
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr

from pymc_sgmcmc import SGLDCV, bias_report, step_methods
from tests.accuracy import gallery
from tests.accuracy.posteriors import MODELS
from tests.benchmarks.common.markdown import write_tables
from tests.support.references import read_arrays

REFERENCES = Path(__file__).parent / "references"


def available() -> list[str]:
    """Names of the models that have a stored reference."""
    return [name for name in MODELS if (REFERENCES / f"{name}.npz").exists()]


def compare(
    name: str,
    data_folder: Path,
    step_class: type = SGLDCV,
    *,
    draws: int = 1000,
    tune: int = 1000,
    chains: int = 4,
    seed: int = 1,
    mode: str = "NUMBA",
    **settings: Any,
) -> pd.DataFrame:
    """Errors of one run, a row a coordinate of the position.

    Columns ``mean_off`` (in reference sds), ``sd_ratio``, ``true_error`` of the variance
    (relative), ``mean_monte_carlo`` and ``monte_carlo`` (standard errors of the first and the
    last, from both runs) and the columns of `bias_report`. ``attrs``: the wall seconds of making
    the step and of sampling, warnings, and the attributes of the report.
    """
    reference = read_arrays(REFERENCES / f"{name}.npz")
    model = MODELS[name](data_folder)
    idata, facts = run(
        model, step_class, draws=draws, tune=tune, chains=chains, seed=seed, mode=mode, **settings
    )
    return compare_positions(name, idata, facts, reference)


def run(
    model: pm.Model,
    step_class: type = SGLDCV,
    *,
    draws: int = 1000,
    tune: int = 1000,
    chains: int = 4,
    seed: int = 1,
    mode: str = "NUMBA",
    **settings: Any,
) -> tuple[xr.DataTree, dict[str, Any]]:
    """Draws of a step method, and the seconds, warnings and reasons of the run.

    It runs as a user runs it, with the checks and measurements at its end.
    """
    with model, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begin = time.perf_counter()
        step = step_class(compile_kwargs={"mode": mode}, **settings)
        made = time.perf_counter()
        idata = pm.sample(
            step=step,
            draws=draws,
            tune=tune,
            chains=chains,
            cores=1,
            random_seed=seed,
            progressbar=False,
        )
        end = time.perf_counter()
    facts = {
        "seconds_made": made - begin,
        "seconds_sampled": end - made,
        "warnings": [str(one.message)[:200] for one in caught],
        "why": idata["sample_stats"].attrs.get("sgmcmc_why"),
        "thin": idata["sample_stats"].attrs["sgmcmc_thin"],
    }
    return idata, facts


def compare_positions(
    name: str, idata: xr.DataTree, facts: dict[str, Any], reference: Mapping[str, np.ndarray]
) -> pd.DataFrame:
    """The report of a run beside a stored reference, as `compare` gives it."""
    report = bias_report(idata)
    mean, sd = reference["position_mean"], reference["position_sd"]
    ess = report["ess_bulk"].to_numpy()
    reference_ess = reference.get("position_ess_sd", reference["position_ess"])
    table = report.assign(
        model=name,
        mean_off=(report["mean"] - mean) / sd,
        sd_ratio=report["sd"] / sd,
        true_error=(report["sd"] / sd) ** 2 - 1,
        monte_carlo=np.sqrt(2 / ess + 2 / reference_ess),
        mean_monte_carlo=np.sqrt(1 / ess + 1 / reference["position_ess"]),
    )
    nuts_seconds = float(reference.get("nuts_seconds", np.nan))
    table.attrs |= facts | {
        "nuts_seconds": nuts_seconds,
        # Set-up and tuning count on both sides.
        "ess_a_second": ess.min() / (facts["seconds_made"] + facts["seconds_sampled"]),
        "nuts_ess_a_second": float(reference["position_ess"].min()) / nuts_seconds,
    }
    return table


def good(table: pd.DataFrame) -> np.ndarray:
    """Coordinates with means within 0.1 sd and sds within 5 % of the reference."""
    return ((table["mean_off"].abs() <= 0.1) & ((table["sd_ratio"] - 1).abs() <= 0.05)).to_numpy()


def described(name: str) -> tuple[str, str]:
    """Title of a model and its number of rows, which are in its docstring."""
    line = (MODELS[name].__doc__ or "").partition("\n")[0]
    title, rows = re.fullmatch(r"(.*): N = ([\d ]+), d = \d+\.", line).groups()
    return title, rows


def groups_of_names() -> dict[str, list[str]]:
    """Models that are named together."""
    ours = [function.__name__ for function in (*gallery.WITHOUT_GROUPS, *gallery.WITH_GROUPS)]
    names = available()
    return {
        "gallery": [name for name in names if name in ours],
        "regressions": [name for name in names if name not in ours],
    }


COLUMNS = ("posterior", "rows", "coordinates", "within", "ok", "seconds", "NUTS")


def cells(name: str, tables: list[pd.DataFrame]) -> list[str]:
    """A row of the table of the documentation, means over seeds."""
    within, ok = (
        np.mean([values(table).mean() for table in tables])
        for values in (good, lambda table: table["verdict"] == "ok")
    )
    made, sampled = (
        np.mean([table.attrs[key] for table in tables])
        for key in ("seconds_made", "seconds_sampled")
    )
    counts = [*described(name), str(len(tables[0])), f"{within:.2f}", f"{ok:.2f}"]
    nuts = tables[0].attrs["nuts_seconds"]
    return [*counts, f"{made:.0f} + {sampled:.0f}", f"{nuts:.0f}" if np.isfinite(nuts) else ""]


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_folder", type=Path)
    parser.add_argument("names", nargs="*", default=available())
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--bias", type=float)
    parser.add_argument("--step", default="SGLDCV", choices=step_methods.__all__)
    parser.add_argument("--markdown", type=Path, help="file for the table of the documentation")
    arguments = parser.parse_args()
    rows = []
    for name in [one for given in arguments.names for one in groups_of_names().get(given, [given])]:
        tables = [
            compare(
                name,
                arguments.data_folder,
                getattr(step_methods, arguments.step),
                draws=arguments.draws,
                seed=seed,
                bias=arguments.bias,
            )
            for seed in arguments.seeds
        ]
        for table in tables:
            print(line(name, table), flush=True)
        rows.append(cells(name, tables))
        if arguments.markdown is not None:  # After each model: a long run may be stopped.
            given = " ".join([*arguments.names, "--seeds", *map(str, arguments.seeds)])
            command = f"python -m tests.accuracy.suite FOLDER_OF_DATA {given}"
            write_tables(arguments.markdown, [(COLUMNS, rows)], command)


def line(name: str, table: pd.DataFrame) -> str:
    """A row of the printed table."""
    worst = table["mean_off"].abs().idxmax()
    return (
        f"{name}: d = {len(table)}, good {good(table).mean():.2f}, mean of {worst} off by "
        f"{table.loc[worst, 'mean_off']:.2f} sd, variance errors "
        f"{table['true_error'].median():.3f} "
        f"(reported {table['variance_error'].median():.3f}), "
        f"{table.attrs['seconds_made']:.0f} + {table.attrs['seconds_sampled']:.0f} s "
        f"(NUTS {table.attrs['nuts_seconds']:.0f} s), effective draws a second "
        f"{table.attrs['ess_a_second']:.0f} (NUTS {table.attrs['nuts_ess_a_second']:.0f}); "
        f"{table.attrs['verdict']}"
    )


if __name__ == "__main__":
    main()
