"""The picture of the README: the same coefficients by NUTS on a part of the rows and by us on all.

::

    python tests/benchmarks/readme_picture.py           # run both, write the table and the picture
    python tests/benchmarks/readme_picture.py --plot    # the picture from the stored tables

Both run in fresh processes on one core, two chains of 1000 draws after 500 of tuning, with compiled
functions on disk. The seconds are those of the processor, from the first line of the model to the
trace. The right half shows the seconds of `effective_draws.py`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from common.markdown import write_tables
from matplotlib.axes import Axes
from plot_effective_draws import DOCS, GREY, LABELS, LIMIT, read_table, style

TABLE = DOCS / "tables/part_and_all.txt"
ROWS, PART = 1_000_000, 10_000
COEFFICIENTS = 8
OURS, NUTS = "SGLDCV()", "NUTS"
COLOURS = {NUTS: LABELS["nutpie"][1], OURS: LABELS["ours"][1]}
SHOWN = ("ours", "corrected", "hmcecs", "nutpie")
"""Contenders of the right half, those without settings that were tuned by hand."""


def fit(sampler: str) -> dict[str, Any]:
    """Means and standard deviations of the coefficients, and the processor seconds of the run."""
    import time

    import pymc as pm

    from pymc_sgmcmc import SGLDCV

    rng = np.random.default_rng(1)
    values = np.round(rng.normal(0, 0.15, size=COEFFICIENTS), 2)
    X = rng.normal(size=(ROWS, COEFFICIENTS))
    y = rng.random(ROWS) < 1 / (1 + np.exp(-X @ values))
    rows = PART if sampler == NUTS else ROWS
    made = time.process_time()
    with pm.Model():
        beta = pm.Normal("beta", 0, 1, shape=COEFFICIENTS)
        pm.Bernoulli("y", logit_p=X[:rows] @ beta, observed=y[:rows])
        idata = pm.sample(
            draws=1000, tune=500, chains=2, cores=1, random_seed=1, progressbar=False,
            step=None if sampler == NUTS else SGLDCV(),
        )  # fmt: skip
    seconds = time.process_time() - made
    draws = idata["posterior"]["beta"]
    return {
        "seconds": seconds,
        "mean": draws.mean(("chain", "draw")).values.tolist(),
        "sd": draws.std(("chain", "draw")).values.tolist(),
        "truth": values.tolist(),
    }


def measure() -> None:
    """Run both and write their table."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as fresh:
        # The second process of each finds compiled functions on disk.
        fits = {sampler: fresh.submit(fit, sampler).result() for sampler in (NUTS, OURS) * 2}
    coefficients = [
        [number, fits[OURS]["truth"][number]]
        + [fits[sampler][what][number] for sampler in fits for what in ("mean", "sd")]
        for number in range(COEFFICIENTS)
    ]
    columns = ["coefficient", "value", *(f"{s}, {what}" for s in fits for what in ("mean", "sd"))]
    seconds = [[NUTS, PART, fits[NUTS]["seconds"]], [OURS, ROWS, fits[OURS]["seconds"]]]
    write_tables(
        TABLE,
        [(columns, coefficients), (["sampler", "rows", "seconds"], seconds)],
        "tests/benchmarks/readme_picture.py",
    )


def cells(text: str) -> list[list[str]]:
    """Rows of a table in Markdown, without its heading."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


def draw_forest(axes: Axes) -> None:
    """Intervals of 94 % of each coefficient, by both."""
    of_coefficients, of_runs = TABLE.read_text(encoding="utf-8").split("\n\n")[:2]
    rows = cells(of_coefficients)
    at = np.arange(len(rows))[::-1]
    for shift, start, (sampler, count, seconds) in zip(
        (-0.17, 0.17), (2, 4), cells(of_runs), strict=True
    ):
        mean, sd = np.array([row[start : start + 2] for row in rows], dtype=float).T
        axes.errorbar(
            mean, at - shift, xerr=1.88 * sd, fmt="none", elinewidth=6, ecolor=COLOURS[sampler],
            label=f"{sampler}, {int(count):,} rows: {float(seconds):.0f} s",
        )  # fmt: skip
    axes.plot([float(row[1]) for row in rows], at, "|", color=GREY, ms=17, label="true value")
    axes.set_yticks(at, [f"β{'₁₂₃₄₅₆₇₈'[number]}" for number in range(len(rows))])
    axes.set(xlabel="coefficient", title="intervals of 94 %, two chains of 1000 draws")


def draw_seconds(axes: Axes, shown: Sequence[str] = SHOWN) -> None:
    """Seconds to 1000 effective draws against the number of rows."""
    table = read_table(DOCS / "effective_draws.txt")
    for contender in shown:
        label, colour, marker, line, width = LABELS[contender]
        finished = [(rows, seconds) for rows, seconds in table[contender] if seconds]
        axes.plot(
            *zip(*finished, strict=True), line, color=colour, marker=marker, lw=width, label=label
        )
        stopped = [rows for rows, seconds in table[contender] if not seconds]
        if stopped:
            last, seconds = finished[-1]
            axes.plot([last, stopped[0]], [seconds, LIMIT], ":", color=colour, lw=width)
            axes.plot(stopped[0], LIMIT, "^", color=colour, ms=9, mfc="none", clip_on=False)
    axes.set(xscale="log", yscale="log", ylim=(2, LIMIT), xlabel="rows")
    axes.set_title("seconds to 1000 effective draws")
    axes.set_yticks([3, 10, 30, LIMIT], ["3", "10", "30", "stopped\nat 60"])
    axes.minorticks_off()


def plot() -> None:
    """Write the picture."""
    with mpl.rc_context({**style("readme"), "axes.titlesize": 11}):
        figure, (left, right) = plt.subplots(ncols=2, figsize=(10, 4.6), layout="constrained")
        draw_forest(left)
        draw_seconds(right)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16))
        figure.savefig(DOCS / "_static/readme.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    """Measure, unless only the picture is wanted, and plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", action="store_true", help="only the picture")
    if not parser.parse_args().plot:
        measure()
    plot()


if __name__ == "__main__":
    main()
