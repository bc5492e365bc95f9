"""Runs on models of groups with default arguments, compared with NUTS on the joint models.

    python -m tests.accuracy.hierarchical_suite FOLDER_OF_DATA [NAME ...] [--draws D] [--seed S]
        [--markdown FILE]

prints for each model the numbers of groups and of global variables, the parts of the global and of
the local coordinates whose mean is within 0.1 sd and whose sd is within 5 % of the reference, the
largest error of a mean, the largest R-hat of the global variables, the seconds of `marginalize`,
set-up, run and `recover` (of the compared groups) beside those of NUTS, and the verdict of
`bias_report`. It writes the table of the documentation.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr

from pymc_sgmcmc import SGLDCV, marginalize, recover
from tests.accuracy.hierarchical import MODELS
from tests.accuracy.make_hierarchical_references import FOLDER, chosen_entries, summarise_locals
from tests.accuracy.suite import compare_positions, good, run
from tests.benchmarks.common.markdown import write_tables
from tests.support.references import read_arrays


def available() -> list[str]:
    """Names of the models that have a stored reference."""
    return [name for name in MODELS if (FOLDER / f"{name}.npz").exists()]


def compare(
    name: str,
    data_folder: Path,
    step_class: type = SGLDCV,
    *,
    draws: int = 1000,
    seed: int = 1,
    points: int | None = None,
    **settings: Any,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Errors of one run: a table of the global coordinates and one of the local ones.

    The first is as in `tests.accuracy.suite.compare`. The second has the columns ``mean_off``,
    ``sd_ratio``, ``ess_bulk``, and ``mean_z`` and ``sd_z``, the errors in Monte-Carlo standard
    errors of both runs.
    """
    reference = read_arrays(FOLDER / f"{name}.npz")
    model, local = MODELS[name](data_folder)
    begin = time.perf_counter()
    groups = marginalize(model, local, points=points)
    marginalized = time.perf_counter() - begin
    idata, facts = run(groups, step_class, draws=draws, seed=seed, **settings)
    begin = time.perf_counter()
    draws = _chosen_draws(idata, model, local, seed)
    facts |= {
        "seconds_marginalized": marginalized,
        "seconds_recovered": time.perf_counter() - begin,
        "n_groups": int(reference["n_rows"]),
    }
    return (
        compare_positions(name, idata, facts, reference),
        _compare_locals(local, summarise_locals(draws), reference),
    )


def _chosen_draws(idata: xr.DataTree, model: pm.Model, local: str, seed: int) -> np.ndarray:
    """Draws of the entries of the local variable that the reference has."""
    shape = model[local].shape.eval()
    entries = chosen_entries(shape)
    chosen, places = np.unique(entries[0], return_inverse=True)
    dimension = (model.named_vars_to_dims.get(local) or [None])[0]
    labels = chosen if dimension is None else np.asarray(model.coords[dimension])[chosen]
    recovered = recover(idata, model, groups=labels, random_seed=seed, progressbar=False)
    return recovered["posterior"][local].values[:, :, places, *entries[1:]]


def _compare_locals(
    local: str, summary: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]
) -> pd.DataFrame:
    sd = reference["local_sd"]
    mean_off = (summary["local_mean"] - reference["local_mean"]) / sd
    sd_ratio = summary["local_sd"] / sd
    mean_error = np.sqrt(1 / summary["local_ess"] + 1 / reference["local_ess"])
    sd_error = np.sqrt(0.5 / summary["local_ess_sd"] + 0.5 / reference["local_ess_sd"])
    return pd.DataFrame(
        {
            "mean_off": mean_off,
            "sd_ratio": sd_ratio,
            "ess_bulk": summary["local_ess"],
            "mean_z": mean_off / mean_error,
            "sd_z": (sd_ratio - 1) / sd_error,
        },
        index=[f"{local}, entry {number}" for number in range(len(sd))],
    )


COLUMNS = ("model", "groups", "global", "within: global", "local", "largest R-hat")


def cells(name: str, table: pd.DataFrame, locals_: pd.DataFrame) -> list[str]:
    """A row of the table of the documentation."""
    title = re.match(r"(.*): N = ", MODELS[name].__doc__ or "").group(1)
    counts = [title, str(table.attrs["n_groups"]), str(len(table))]
    within = [f"{good(each).mean():.2f}" for each in (table, locals_)]
    return [*counts, *within, f"{table['r_hat'].max():.3f}"]


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_folder", type=Path)
    parser.add_argument("names", nargs="*", default=available())
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", type=Path, help="file for the table of the documentation")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.names:
        table, locals_ = compare(
            name, arguments.data_folder, draws=arguments.draws, seed=arguments.seed
        )
        both = pd.concat([table["mean_off"], locals_["mean_off"]])
        worst = both.abs().idxmax()
        facts = table.attrs
        print(
            f"{name}: G = {facts['n_groups']}, d = {len(table)}, good {good(table).mean():.2f} of "
            f"global and {good(locals_).mean():.2f} of local, mean of {worst} off by "
            f"{both[worst]:.2f} sd, R-hat {table['r_hat'].max():.3f}, "
            f"{facts['seconds_marginalized']:.0f} + {facts['seconds_made']:.0f} + "
            f"{facts['seconds_sampled']:.0f} + {facts['seconds_recovered']:.0f} s "
            f"(NUTS {facts['nuts_seconds']:.0f} s); {facts['verdict']}",
            flush=True,
        )
        rows.append(cells(name, table, locals_))
        if arguments.markdown is not None:  # After each model: a long run may be stopped.
            command = "python -m tests.accuracy.hierarchical_suite FOLDER_OF_DATA"
            write_tables(arguments.markdown, [(COLUMNS, rows)], command)


if __name__ == "__main__":
    main()
