"""Errors and seconds of this package beside those of Laplace's and other quick approximations.

Examples
--------
::

    python tests/benchmarks/why_not_laplace.py --output laplace.json
    python tests/benchmarks/why_not_laplace.py --rows 1000 --contenders laplace ours
    python tests/benchmarks/why_not_laplace.py --contenders --output laplace.json --picture f.svg

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common.child import cache_variables, run_in_fresh_process
from common.machine import restrict_to_one_core
from common.markdown import write_tables
from common.peer_python import STORAGE, python_of
from common.program import make_parser, print_table, say, write_results

MODELS = (
    "logistic, 12 events",
    "logistic, 40 events",
    "Poisson, 20 counts",
    "negative binomial, 150 counts",
    "ordered, 10 and 15 at the ends",
    "gamma, shape unknown",
    "logistic, groups integrated out",
)
CONTENDERS = {
    "laplace": "Laplace",
    "psis": "Laplace, PSIS",
    "pathfinder": "Pathfinder",
    "sgld_cv": "SGLD-CV, blackjax",
    "ours": "`sample()`",
    "ours_long": "`sample(10_000)`",
}
IN_JAX = ("pathfinder", "sgld_cv")
WITHOUT_GROUPS = (*IN_JAX, "ours_long")
"""Contenders that cannot integrate groups out, and one that would draw millions of effects."""
FILLING = ("laplace", "pathfinder", "sgld_cv", "ours")
"""Contenders that are run twice: the others need no compiled functions of their own."""
BATCHES = (20, 100, 500)
"""Sizes of minibatches of blackjax, of which the most accurate one counts."""
DRAWS = {1000: 32_768, 10_000: 32_768, 100_000: 16_384}
FEWER = 4096
"""Draws of the references, by the number of rows, and of those with more rows or with groups."""
LARGEST_K = 0.5
QUANTITIES = ("mean", "sd", "q05", "q95")
COLUMNS = ("posterior", "rows", "contender", "mean", "sd", "5 %", "95 %", "s", "k or rows")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument(
        "--contenders", nargs="*", default=list(CONTENDERS), choices=CONTENDERS,
        help="none: show what the file has",
    )  # fmt: skip
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one process")
    parser.add_argument("--nuts", type=int, help="draws of NUTS, to compare references with")
    parser.add_argument("--markdown", type=Path, help="file for the table of the documentation")
    parser.add_argument("--picture", type=Path, help="file for the figure")
    return parser.parse_args(arguments)


def measure(contender: str, name: str, rows: int, limit: float, **settings: Any) -> dict[str, Any]:
    """Run in a fresh process whose compile caches an earlier one has filled."""
    run = partial(
        run_in_fresh_process,
        "laplace_benchmark.contenders:measure",
        cache_variables(str(STORAGE / "laplace_cache")),
        python_of("nutpie" if contender in (*IN_JAX, "nuts") else "ours"),
        limit,
        contender=contender,
        name=name,
        rows=rows,
        **settings,
    )
    if contender in FILLING:
        run()
    return run()


def errors(found: Mapping[str, Any], truth: Mapping[str, Any]) -> dict[str, float]:
    """Errors of the worst coordinates, in posterior standard deviations; of the sd a ratio.

    They are infinite where a chain diverged.
    """
    import numpy as np

    values, true = ({key: np.array(one[key]) for key in QUANTITIES} for one in (found, truth))
    if not all(np.isfinite(each).all() for each in values.values()):
        return dict.fromkeys(QUANTITIES, float("inf"))
    ratios = values["sd"] / true["sd"]
    worst = {
        key: float(np.abs((values[key] - true[key]) / true["sd"]).max())
        for key in QUANTITIES
        if key != "sd"
    }
    return {**worst, "sd": float(ratios[np.abs(np.log(ratios)).argmax()])}


def runs(contender: str, name: str, rows: int, truth: Any, limit: float) -> Iterator[dict]:
    """A run of a contender, or several of which the most accurate one counts."""
    for batch in BATCHES if contender == "sgld_cv" else (None,):
        settings = {} if batch is None else {"batch": batch}
        found = measure(contender, name, rows, limit, **settings)
        kept = {key: found[key] for key in ("seconds", "k", "batch") if key in found}
        yield {**kept, **errors(found, truth)}


def worst_quantile(result: Mapping[str, Any]) -> float:
    """The largest error of a quantile."""
    return max(result["q05"], result["q95"])


def reference(name: str, rows: int, nuts: int | None) -> dict[str, Any]:
    """Moments and quantiles of the posterior, by importance sampling where k allows it."""
    draws = FEWER if name == MODELS[-1] else DRAWS.get(rows, FEWER)
    truth = measure("reference", name, rows, None, draws=draws)
    say(f"  reference: k = {truth['k']:.2f}, standard error {truth['error']:.4f} sd")
    if nuts or truth["k"] > LARGEST_K:
        exact = measure("nuts", name, rows, None, draws=nuts or 40_000)
        truth["nuts"] = errors(exact, truth)
        say(f"  NUTS beside it: {truth['nuts']}")
        if truth["k"] > LARGEST_K:
            truth |= {key: exact[key] for key in QUANTITIES}
    return truth


def cells(result: Mapping[str, Any]) -> list[Any]:
    """A line of the long table."""
    note = result.get("k", result.get("batch", ""))
    figures = [result["mean"], f"{result['sd']:.3f}", result["q05"], result["q95"]]
    note = f"{note:.2f}" if isinstance(note, float) else note
    shown = CONTENDERS[result["contender"]]
    return [result["model"], result["rows"], shown, *figures, result["seconds"], note]


def comparable(results: Sequence[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """For each number of rows the results on posteriors that all contenders there have."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for rows in sorted({result["rows"] for result in results}):
        part = [result for result in results if result["rows"] == rows]
        of_each = [{r["model"] for r in part if r["contender"] == name} for name in CONTENDERS]
        shared = set.intersection(*filter(None, of_each))
        found[rows] = [result for result in part if result["model"] in shared]
    return found


def summary(results: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """For each contender and number of rows the largest errors, and the median of the seconds."""
    from statistics import median

    columns, table = ["contender"], [[shown] for shown in CONTENDERS.values()]
    for rows, of_rows in comparable(results).items():
        columns.append(f"{rows} rows, {len({r['model'] for r in of_rows})} posteriors")
        for line, contender in zip(table, CONTENDERS, strict=True):
            part = [r for r in of_rows if r["contender"] == contender]
            if not part:
                line.append("")
                continue
            ratio = max((r["sd"] for r in part), key=lambda value: max(value, 1 / value))
            line.append(
                f"{max(r['mean'] for r in part):.2f}, × {ratio:.2f}, "
                f"{max(worst_quantile(r) for r in part):.2f}, "
                f"{median(r['seconds'] for r in part):.1f} s"
            )
    return columns, table


def plot(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Largest errors of quantiles with the fewest rows, and seconds over the number of rows."""
    from statistics import median

    import matplotlib as mpl
    import matplotlib.pyplot as plt
    from plot_effective_draws import style

    markers = dict(zip(CONTENDERS, "sDv^oo", strict=True))
    shades = ("#c94f7c", "#d9822b", "#8e6bd1", "#4b9e5f", "#2a8fd8", "#2a8fd8")
    colours = dict(zip(CONTENDERS, shades, strict=True))
    fewest = min(result["rows"] for result in results)
    models = [name for name in MODELS if any(r["model"] == name for r in results)]
    with mpl.rc_context(style("laplace")):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(10, 4.6), width_ratios=(1.7, 1), layout="constrained"
        )
        for contender, shown in CONTENDERS.items():
            of_one = [r for r in results if r["contender"] == contender]
            filled = colours[contender] if contender != "ours" else "none"
            shape = {"color": colours[contender], "marker": markers[contender], "mfc": filled}
            at = {r["model"]: worst_quantile(r) for r in of_one if r["rows"] == fewest}
            places = [models.index(model) for model in at]
            # A run that diverged, which says so, is off the scale.
            left.set_xlim(0.008, 3)
            left.plot(list(at.values()), places, ls="", ms=8, label=shown.strip("`"), **shape)
            of_sizes = {
                rows: median(r["seconds"] for r in part if r["contender"] == contender)
                for rows, part in comparable(results).items()
                if any(r["contender"] == contender for r in part)
            }
            right.plot(list(of_sizes), list(of_sizes.values()), lw=1.6, **shape)
        left.axvline(0.1, color="#808080", lw=0.8, ls=(0, (1, 3)))
        left.set(
            xscale="log", yticks=range(len(models)), yticklabels=models,
            xlabel=f"largest error of a 5 or 95 % quantile, sd ({fewest} rows)",
        )  # fmt: skip
        left.invert_yaxis()
        right.set(xscale="log", yscale="log", xlabel="rows", ylabel="median seconds of one core")
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        figure.legend(frameon=False, loc="outside upper center", ncols=len(CONTENDERS))
        figure.savefig(path, transparent=True, metadata={"Date": None})


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    STORAGE.mkdir(exist_ok=True)
    stored: list[dict[str, Any]] = []
    if settings.output is not None and settings.output.exists():
        stored = json.loads(settings.output.read_text())["results"]
    for name in settings.models if settings.contenders else ():
        for rows in settings.rows:
            say(f"{name}, N = {rows}")
            key = {"model": name, "rows": rows}
            known = [
                one for one in stored if {**key, "contender": "reference"}.items() <= one.items()
            ]
            if not known:
                known = [key | {"contender": "reference"} | reference(name, rows, settings.nuts)]
                stored += known
            for contender in settings.contenders:
                if contender in WITHOUT_GROUPS and name == MODELS[-1]:
                    continue
                this = key | {"contender": contender}
                stored = [one for one in stored if not this.items() <= one.items()]
                try:
                    best = min(
                        runs(contender, name, rows, known[0], settings.limit), key=worst_quantile
                    )
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    say(f"  {contender} gave no result: {str(error).strip().splitlines()[-1]}")
                    continue
                stored.append(this | best)
                say(f"  {contender}: {best}")
                write_results(settings.output, "why_not_laplace", settings, core, stored)
    shown = [one for one in stored if one["contender"] != "reference"]
    order = list(CONTENDERS)
    shown.sort(key=lambda r: (MODELS.index(r["model"]), r["rows"], order.index(r["contender"])))
    lines = [cells(result) for result in shown]
    print_table("Errors of the worst coordinates, and processor seconds", COLUMNS, lines)
    tables = [summary(shown), (COLUMNS, lines)]
    print_table("Largest errors of a mean, sd and quantile, median seconds", *tables[0])
    if settings.markdown is not None:
        write_tables(settings.markdown, tables, "tests/benchmarks/why_not_laplace.py")
    if settings.picture is not None:
        plot(shown, settings.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
