"""The figure of docs/choosing.md, from the table that effective_draws.py wrote.

::

    python tests/benchmarks/plot_effective_draws.py

reads docs/effective_draws.txt and writes docs/_static/seconds_to_draws.svg.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[2] / "docs"
LIMIT = 60.0
"""Processes were stopped after this number of seconds."""

GREY = "#808080"  # legible on white and on black
LABELS = {
    "ours": ("SGLDCV()", "#2a8fd8", "o", "-", 2.4),
    "corrected": ("sample(accuracy=0.02)", "#d9822b", "s", "-", 2.4),
    "laplace": ("Laplace's approximation", "#808080", "*", ":", 1.2),
    "nutpie": ("NUTS (nutpie)", "#c94f7c", "^", "-", 1.4),
    "hmcecs": ("HMC-ECS (NumPyro)", "#8e6bd1", "v", "-", 1.4),
    "blackjax_fine": ("SGLD-CV, blackjax, small steps", "#4b9e5f", "D", "--", 1.2),
    "blackjax": ("SGLD-CV, blackjax", "#4b9e5f", "x", ":", 1.2),
    "sgmcmcjax": ("SGLD-CV, SGMCMCJax", "#8c8c3a", "+", ":", 1.2),
}
"""Name, colour, marker, line and its width of each contender in the figure."""


def read_table(path: Path) -> dict[str, list[tuple[float, float | None]]]:
    """Rows and processor seconds of each contender; None where it was stopped."""
    lines = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    columns = lines[0]
    table: dict[str, list[tuple[float, float | None]]] = {}
    for line in lines[2:]:
        row = dict(zip(columns, line, strict=True))
        seconds = float(row["warm s"]) if row["warm wall s"] else None
        table.setdefault(row["contender"], []).append((float(row["N"]), seconds))
    return table


def style(salt: str) -> dict[str, Any]:
    """Settings of Matplotlib of a figure that is legible on white and on black."""
    coloured = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    return {
        "svg.hashsalt": salt,
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 11,
        **dict.fromkeys(coloured, GREY),
    }


def main() -> None:
    """Write the figure."""
    table = read_table(DOCS / "effective_draws.txt")
    with mpl.rc_context(style("seconds")):
        figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
        for contender, (label, colour, marker, line, width) in LABELS.items():
            finished = [(rows, seconds) for rows, seconds in table[contender] if seconds]
            axes.plot(
                *zip(*finished, strict=True),
                line,
                color=colour,
                marker=marker,
                lw=width,
                label=label,
            )
            stopped = [rows for rows, seconds in table[contender] if not seconds]
            if stopped:  # on to the limit, where an open triangle says "more than this"
                (last, seconds) = finished[-1]
                axes.plot([last, stopped[0]], [seconds, LIMIT], ":", color=colour, lw=width)
                axes.plot(stopped[0], LIMIT, "^", color=colour, ms=9, mfc="none", clip_on=False)
        axes.axhline(LIMIT, color=GREY, lw=0.8, ls=(0, (1, 3)))
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="rows",
            ylabel="processor seconds to 1000 effective draws",
            ylim=(0.7, LIMIT),
        )
        axes.set_yticks([1, 3, 10, 30, 60], ["1", "3", "10", "30", "stopped at 60"])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.02, 0.5))
        figure.savefig(
            DOCS / "_static/seconds_to_draws.svg", transparent=True, metadata={"Date": None}
        )


if __name__ == "__main__":
    main()
