"""Reported against true variance errors, over posteriors and step sizes.

    python -m tests.accuracy.honesty FOLDER_OF_DATA TABLE.csv [--plot FIGURE.svg]

Runs `SGLDCV` with multiples of its computed step size, so that some runs have errors below the
stated one and some above, and writes a row for each coordinate: the error that `bias_report`
gives, the true one against the stored reference, and their Monte-Carlo errors. Prints how often
the report was right where the true error is known to be above or below the stated one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from pymc_sgmcmc import SGLDCV
from tests.accuracy.posteriors import MODELS
from tests.accuracy.suite import compare

NAMES = (
    "epil_poisson",
    "scales_apart",
    "correlated_design",
    "gamma_glm",
    "rare_events",
    "negative_binomial",
    "student_t_regression",
    "beta_binomial",
)
FACTORS = (0.5, 1.0, 2.0, 4.0)
STATED = 0.05


def run(name: str, factor: float, data_folder: Path, draws: int) -> pd.DataFrame:
    """One run with a multiple of the computed step size."""
    with MODELS[name](data_folder):
        computed = SGLDCV(compile_kwargs={"mode": "NUMBA"})
    table = compare(
        name,
        data_folder,
        draws=draws,
        tune=200,
        step_size=factor * computed.step_size,
        preconditioner="curvature",
        batch_size=computed.batch_size,
        thin=max(1, round(computed.thin / factor)),
    )
    columns = [
        "model",
        "variance_error",
        "variance_error_se",
        "true_error",
        "monte_carlo",
        "verdict",
    ]
    return table[columns].assign(factor=factor)


def summary(table: pd.DataFrame) -> dict[str, float]:
    """How often coordinates were called too wide, where the truth is beyond doubt."""
    called = table["verdict"] == "variance too large"
    doubt = 2 * table["monte_carlo"]
    above = table["true_error"] - doubt > STATED
    below = table["true_error"] + doubt < STATED
    return {
        "coordinates": len(table),
        "surely_above": int(above.sum()),
        "called_where_above": float(called[above].mean()),
        "surely_below": int(below.sum()),
        "called_where_below": float(called[below].mean()),
        "z_of_difference": float(
            ((table["true_error"] - table["variance_error"]) / table["monte_carlo"]).std()
        ),
    }


def plot(table: pd.DataFrame, path: Path) -> None:
    """Reported against true error, with Monte-Carlo errors of the true one."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
    for name, part in table.groupby("model"):
        axes.errorbar(
            part["variance_error"], part["true_error"], 2 * part["monte_carlo"], fmt=".", lw=0.5,
            label=str(name).replace("_", " "),
        )  # fmt: skip
    top = 1.1 * max(table["variance_error"].max(), table["true_error"].max())
    axes.plot([0, top], [0, top], color="black", lw=0.8)
    axes.axhline(STATED, color="grey", lw=0.8, ls=":")
    axes.axvline(STATED, color="grey", lw=0.8, ls=":")
    axes.set(xlabel="variance error reported", ylabel="variance error against NUTS (± 2 SE)")
    axes.legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_folder", type=Path)
    parser.add_argument("table", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--names", nargs="+", default=list(NAMES))
    parser.add_argument("--draws", type=int, default=4000)
    arguments = parser.parse_args()
    parts = []
    for name in arguments.names:
        for factor in FACTORS:
            parts.append(run(name, factor, arguments.data_folder, arguments.draws))
            print(name, factor, np.round(parts[-1]["variance_error"].median(), 3), flush=True)
            pd.concat(parts).to_csv(arguments.table)
    table = pd.concat(parts)
    for key, value in summary(table).items():
        print(f"{key}: {value:.3g}")
    if arguments.plot is not None:
        plot(table, arguments.plot)


if __name__ == "__main__":
    main()
