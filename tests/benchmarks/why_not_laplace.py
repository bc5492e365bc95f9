"""Errors and seconds of this package beside those of Laplace's and other quick approximations.

Examples
--------
::

    python tests/benchmarks/why_not_laplace.py --output laplace.json
    python tests/benchmarks/why_not_laplace.py --rows 1000 --contenders laplace ours
    python tests/benchmarks/why_not_laplace.py --contenders --output laplace.json --picture f.svg

"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common.peers import python_of
from common.runner import STORAGE, Result, Table, cache_variables, fresh, run, say

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
OPTIONS = {
    "rows": ((1000, 10_000, 100_000),),
    "models": (MODELS, MODELS),
    "contenders": (tuple(CONTENDERS), tuple(CONTENDERS), "none: show what the file has"),
    "limit": (300.0, "seconds of one process"),
    "nuts": (0, "draws of NUTS, to compare references with"),
    "picture": (Path, "file for the figure"),
}


def measure(
    contender: str, name: str, rows: int, limit: float | None, **settings: Any
) -> dict[str, Any]:
    """Run in a fresh process whose compile caches an earlier one has filled."""
    from laplace_contenders import measure as contend

    settings |= {"contender": contender, "name": name, "rows": rows, "limit": limit}
    settings["environment"] = cache_variables(STORAGE / "laplace_cache")
    settings["python"] = python_of(
        "nutpie" if contender == "nuts" else "blackjax" if contender in IN_JAX else "ours"
    )
    if contender in FILLING:
        fresh(contend, **settings)
    return fresh(contend, **settings)


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


def reference(name: str, rows: int, nuts: int) -> dict[str, Any]:
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


def comparable(results: Sequence[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """For each number of rows the results on posteriors that all contenders there have."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for rows in sorted({result["rows"] for result in results}):
        part = [result for result in results if result["rows"] == rows]
        of_each = [{r["model"] for r in part if r["contender"] == name} for name in CONTENDERS]
        shared = set.intersection(*filter(None, of_each))
        found[rows] = [result for result in part if result["model"] in shared]
    return found


def largest(of_rows: Sequence[Mapping[str, Any]], contender: str) -> str:
    """The largest errors of a contender, and the median of its seconds."""
    part = [r for r in of_rows if r["contender"] == contender]
    if not part:
        return ""
    ratio = max((r["sd"] for r in part), key=lambda value: max(value, 1 / value))
    return (
        f"{max(r['mean'] for r in part):.2f}, × {ratio:.2f}, "
        f"{max(worst_quantile(r) for r in part):.2f}, "
        f"{median(r['seconds'] for r in part):.1f} s"
    )


def tables(found: list[Result]) -> list[Table]:
    """Largest errors by contender and number of rows, then those of each posterior."""
    order = list(CONTENDERS)
    found.sort(key=lambda r: (MODELS.index(r["model"]), r["rows"], r["contender"] in order))
    measured = [r for r in found if r["contender"] in order]
    measured.sort(key=lambda r: (MODELS.index(r["model"]), r["rows"], order.index(r["contender"])))
    found[:] = [r for r in found if r["contender"] not in order] + measured
    first = {r["contender"]: r for r in reversed(measured)}
    summary: dict[str, Any] = {"contender": lambda r: CONTENDERS[r["contender"]]}
    for rows, of_rows in comparable(measured).items():
        name = f"{rows} rows, {len({r['model'] for r in of_rows})} posteriors"
        summary[name] = lambda r, of_rows=of_rows: largest(of_rows, r["contender"])

    def note(r: Result) -> Any:
        return f"{r['k']:.2f}" if "k" in r else r.get("batch", "")

    columns = {
        "posterior": "model",
        "rows": "rows",
        "contender": lambda r: CONTENDERS[r["contender"]],
        "mean": "mean",
        "sd": lambda r: f"{r['sd']:.3f}",
        "5 %": "q05",
        "95 %": "q95",
        "s": "seconds",
        "k or rows": note,
    }
    of_each = "Errors of the worst coordinates, and processor seconds"
    return [
        Table(
            "Largest errors of a mean, sd and quantile, median seconds",
            summary,
            lambda r: any(r is one for one in first.values()),
        ),
        Table(of_each, columns, lambda r: r["contender"] in order),
    ]


def plot(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Largest errors of quantiles with the fewest rows, and seconds over the number of rows."""
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


def results(settings: Any) -> Iterator[Result]:
    """The reference of each posterior, if the file has none, and each contender."""
    STORAGE.mkdir(exist_ok=True)
    for name in settings.models if settings.contenders else ():
        for rows in settings.rows:
            key = {"model": name, "rows": rows}
            of_truth = key | {"contender": "reference"}
            known = [one for one in settings.stored if of_truth.items() <= one.items()]
            truth = known[0] if known else of_truth | reference(name, rows, settings.nuts)
            yield truth
            for contender in settings.contenders:
                if contender in WITHOUT_GROUPS and name == MODELS[-1]:
                    continue
                try:
                    every = runs(contender, name, rows, truth, settings.limit)
                    yield key | {"contender": contender} | min(every, key=worst_quantile)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    say(f"  {contender} gave no result: {str(error).strip().splitlines()[-1]}")
    if settings.picture is not None:
        plot([one for one in settings.stored if one["contender"] in CONTENDERS], settings.picture)


if __name__ == "__main__":
    merged = ("model", "rows", "contender")
    sys.exit(run(__doc__, results, tables, OPTIONS, merged=merged))
