"""Reported against true variance errors, over posteriors and step sizes.

    python -m tests.accuracy.honesty FOLDER_OF_DATA TABLE.csv [--plot FIGURE.svg] [--names all]

Runs `SGLDCV` with multiples of its computed step size, so that some runs have errors below the
stated one and some above, and writes a row for each coordinate: the error that `bias_report`
gives, the true one against the stored reference, and their Monte-Carlo errors. Prints how often
the report was right where the true error is known to be above or below the stated one, how many
coordinates are called "ok" though their mean is off by more than 0.1 sd or their sd by more than
5 % beyond doubt, and the part of all "ok" coordinates that is outside of these bounds.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import pandas as pd
import pymc as pm

from pymc_sgmcmc import SGLDCV
from tests.accuracy.posteriors import MODELS
from tests.accuracy.suite import available, compare

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


SURELY = 3.5
"""A coordinate is bad beyond doubt by this number of Monte-Carlo standard errors, which among a
thousand coordinates one exceeds by chance in every second suite."""

LARGE = ("covertype_logistic", "covertype_logistic_raw", "covertype_multinomial", "wide", "million")
"""Runs of these take minutes each. `--names all` leaves them out."""


def run(name: str, factor: float, data_folder: Path, draws: int, seed: int) -> pd.DataFrame:
    """One run with a multiple of the computed step size, with the defaults where it is 1."""
    settings = {}
    if factor != 1:
        with MODELS[name](data_folder):
            computed = SGLDCV(compile_kwargs={"mode": "NUMBA"})
        settings = {
            "tune": 200,
            "step_size": factor * computed.step_size,
            "preconditioner": "curvature",
            "batch_size": computed.batch_size,
            "thin": max(1, round(computed.thin / factor)),
        }
    table = compare(name, data_folder, draws=draws, seed=seed, **settings)
    columns = [
        "model",
        "variance_error",
        "variance_error_se",
        "true_error",
        "monte_carlo",
        "mean_off",
        "mean_monte_carlo",
        "sd_ratio",
        "verdict",
    ]
    return table[columns].assign(factor=factor, seed=seed)


def summary(table: pd.DataFrame) -> dict[str, float]:
    """How often coordinates were called too wide, where the truth is beyond doubt."""
    called = table["verdict"] == "variance too large"
    doubt = 2 * table["monte_carlo"]
    above = table["true_error"] - doubt > STATED
    below = table["true_error"] + doubt < STATED
    ok = table["verdict"] == "ok"
    mean, sd = table["mean_off"].abs(), (table["sd_ratio"] - 1).abs()
    mean_error, sd_error = table["mean_monte_carlo"], table["monte_carlo"] / 2
    bad = (mean - SURELY * mean_error > 0.1) | (sd - SURELY * sd_error > 0.05)
    return {
        "coordinates": len(table),
        "surely_above": int(above.sum()),
        "called_where_above": float(called[above].mean()),
        "surely_below": int(below.sum()),
        "called_where_below": float(called[below].mean()),
        "ok": int(ok.sum()),
        "bad_beyond_doubt": int(bad.sum()),
        "ok_but_bad_beyond_doubt": int((ok & bad).sum()),
        "outside_of_ok": float(((mean > 0.1) | (sd > 0.05))[ok].mean()),
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
    parser.add_argument("--factors", type=float, nargs="+", default=list(FACTORS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    arguments = parser.parse_args()
    names = arguments.names
    if names == ["all"]:
        names = [name for name in available() if name not in LARGE]
    parts = []
    for name, factor, seed in product(names, arguments.factors, arguments.seeds):
        try:
            part = run(name, factor, arguments.data_folder, arguments.draws, seed)
        except (ValueError, pm.exceptions.SamplingError) as error:  # It diverged, and says so.
            print(name, factor, seed, type(error).__name__, str(error)[:100], flush=True)
            continue
        parts.append(part)
        counts = part["verdict"].value_counts().to_dict()
        print(name, factor, seed, counts, summary(part)["ok_but_bad_beyond_doubt"], flush=True)
        pd.concat(parts).to_csv(arguments.table)
    table = pd.concat(parts)
    for key, value in summary(table).items():
        print(f"{key}: {value:.3g}")
    if arguments.plot is not None:
        plot(table, arguments.plot)


if __name__ == "__main__":
    main()
