"""Errors of runs whose posterior has effects of groups, by parametrisation and stated bias.

    python -m tests.accuracy.group_scale FOLDER_OF_DATA [--markdown FILE]

prints for the Contraception data the error of the mean of the log scale in reference sds, and the
median errors of the other variances, true and reported. It writes the table of the documentation.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.accuracy.suite import compare
from tests.benchmarks.common.markdown import markdown_table, write_tables

PARAMETRISATIONS = {"centred": "contraception_centred", "non-centred": "contraception"}
COLUMNS = (
    "parametrisation",
    "`bias`",
    "mean of the log scale",
    "variances of the others, median",
    "reported",
)


def cells(title: str, bias: float, data_folder: Path) -> list[str]:
    """A row of the table."""
    table = compare(PARAMETRISATIONS[title], data_folder, draws=3000, seed=3, bias=bias)
    is_scale = table.index.str.endswith("_log__")
    (off,) = table.loc[is_scale, "mean_off"]
    others = table.loc[~is_scale, ["true_error", "variance_error"]].median()
    return [title, str(bias), f"{off:.2f} sd", *(f"{100 * error:.1f} %" for error in others)]


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_folder", type=Path)
    parser.add_argument("--markdown", type=Path, help="file for the table of the documentation")
    arguments = parser.parse_args()
    rows = [
        cells(title, bias, arguments.data_folder)
        for title in PARAMETRISATIONS
        for bias in (0.05, 0.02)
    ]
    print(markdown_table(COLUMNS, rows))
    if arguments.markdown is not None:
        command = "python -m tests.accuracy.group_scale FOLDER_OF_DATA"
        write_tables(arguments.markdown, [(COLUMNS, rows)], command)


if __name__ == "__main__":
    main()
