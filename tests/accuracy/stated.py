"""Stated errors of `sample(accuracy=...)` beside the true ones, against stored references.

    python -m tests.accuracy.stated FOLDER_OF_DATA [NAME ...] [--accuracy A] [--draws D] [--seed S]
        [--markdown FILE]

prints for each model how the draws were made, the seconds of set-up and run, the largest stated and
true errors of means (in posterior standard deviations) and of standard deviations (relative), the
standard error of the reference, and the part of the coordinates whose stated error covers the true
one, and at the end this part of all coordinates. A reference has errors of its own: an error is
covered where it is at most the stated bias and two standard errors of both runs.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from pymc_sgmcmc import SGLDCV, sample
from pymc_sgmcmc.record import ACCURACY
from pymc_sgmcmc.stein import STANDARD_ERRORS
from tests.accuracy.posteriors import MODELS
from tests.accuracy.suite import REFERENCES, available
from tests.benchmarks.common.markdown import write_tables
from tests.support.references import read_arrays

LARGE = ("covertype_logistic", "covertype_logistic_raw", "covertype_multinomial", "wide", "million")
"""Models that take minutes, which are left out where no names are given."""


def compare(
    name: str, data_folder: Path, accuracy: float, *, draws: int, seed: int, references: Path
) -> pd.DataFrame:
    """Errors of one run, a row a coordinate and moment.

    Columns ``moment``, ``stated``, ``true``, ``reference`` (its standard error) and ``covered``.
    ``attrs``: the seconds, and the attributes of the group of stated errors. The table is empty
    where the run states no errors, with a warning.
    """
    with MODELS[name](data_folder):
        begin = time.perf_counter()
        step = SGLDCV(compile_kwargs={"mode": "NUMBA"})
        made = time.perf_counter()
        idata = sample(
            draws,
            tune=1000,
            chains=4,
            cores=1,
            step=step,
            accuracy=accuracy,
            random_seed=seed,
            progressbar=False,
        )
        end = time.perf_counter()
    if ACCURACY not in idata.children:
        return pd.DataFrame()  # no errors are stated where the chains have not converged
    table = errors_of(idata[ACCURACY].to_dataset(), read_arrays(references / f"{name}.npz"))
    table.attrs |= idata[ACCURACY].attrs
    table.attrs |= {"seconds_made": made - begin, "seconds_sampled": end - made}
    return table


def errors_of(stated: xr.Dataset, reference: dict[str, np.ndarray]) -> pd.DataFrame:
    """Stated and true errors of means and standard deviations, as `compare` gives them."""
    mean, sd = reference["position_mean"], reference["position_sd"]
    ess = reference["position_ess"]
    ess_sd = reference.get("position_ess_sd", ess)
    parts = []
    for moment, true, noise in (
        ("mean", np.abs(stated["mean"].values - mean) / sd, np.sqrt(1 / ess)),
        ("sd", np.abs(stated["sd"].values / sd - 1), np.sqrt(0.5 / ess_sd)),
    ):
        error, bias = (stated[f"{moment}_{what}"].values for what in ("error", "bias"))
        monte_carlo = (error - bias) / STANDARD_ERRORS
        covered = true <= bias + STANDARD_ERRORS * np.hypot(monte_carlo, noise)
        parts.append(
            pd.DataFrame(
                {
                    "moment": moment,
                    "stated": error,
                    "true": true,
                    "reference": noise,
                    "covered": covered,
                },
                index=stated.indexes[next(iter(stated.dims))],
            )
        )
    return pd.concat(parts)


def line(name: str, table: pd.DataFrame) -> str:
    """A row of the printed table."""
    how = "corrected" if table.attrs["calibrated"] else "small steps"
    cells = [
        f"{name:<22}",
        f"{len(table) // 2:4d}",
        f"{how:<11}",
        f"{table.attrs['bias']:.2f}",
        f"{table.attrs['seconds_made']:5.1f} + {table.attrs['seconds_sampled']:5.1f} s",
    ]
    for moment, part in table.groupby("moment"):
        cells.append(
            f"{moment}: stated {part['stated'].max():.3f}, true {part['true'].max():.3f} "
            f"(reference {part['reference'].max():.3f}), covered {part['covered'].mean():.2f}"
        )
    return "  ".join(cells)


COLUMNS = (
    "posterior",
    "coordinates",
    "draws",
    "`bias` of the steps",
    "seconds",
    "mean: stated, true",
    "covered",
    "sd: stated, true",
    "covered",
)


def cells(name: str, table: pd.DataFrame) -> list[str]:
    """A row of the table of the documentation."""
    row = [
        name,
        str(len(table) // 2),
        "corrected" if table.attrs["calibrated"] else "small steps",
        f"{table.attrs['bias']:.2f}",
        f"{table.attrs['seconds_made']:.0f} + {table.attrs['seconds_sampled']:.0f}",
    ]
    for _, part in table.groupby("moment"):
        stated, true, reference = (part[key].max() for key in ("stated", "true", "reference"))
        row += [f"{stated:.3f}, {true:.3f} ({reference:.3f})", f"{part['covered'].mean():.2f}"]
    return row


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_folder", type=Path)
    small = [name for name in available() if name not in LARGE]
    parser.add_argument("names", nargs="*", default=small)
    parser.add_argument("--accuracy", type=float, default=0.02)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--references", type=Path, default=REFERENCES)
    parser.add_argument("--markdown", type=Path, help="file for the table of the documentation")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("pymc").setLevel(logging.ERROR)
    tables, rows = [], []
    for name in arguments.names:
        table = compare(
            name,
            arguments.data_folder,
            arguments.accuracy,
            draws=arguments.draws,
            seed=arguments.seed,
            references=arguments.references,
        )
        print(f"{name:<22}  no errors stated" if table.empty else line(name, table), flush=True)
        tables.append(table)
        if arguments.markdown is not None and not table.empty:
            rows.append(cells(name, table))
            command = "python -m tests.accuracy.stated FOLDER_OF_DATA"
            write_tables(arguments.markdown, [(COLUMNS, rows)], command)
    share = pd.concat(tables).groupby("moment")["covered"].mean()
    print(f"covered: means {share['mean']:.3f}, standard deviations {share['sd']:.3f}")


if __name__ == "__main__":
    main()
