"""``python -m pymc_sgmcmc`` with files, options and folders that cannot be used.

Each ends in one line that says what to change, and a status that is not zero; what has been
computed is not lost.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pymc_sgmcmc.main import main
from tests.hostile.case import UnclearError, add, case

FOLDER = Path(tempfile.mkdtemp(prefix="hostile-"))
SHORT = (
    "--draws",
    "20",
    "--tune",
    "5",
    "--chains",
    "1",
    "--cores",
    "1",
    "--mode",
    "FAST_COMPILE",
    "--overwrite",
)


def table(rows: int = 60) -> pd.DataFrame:
    """A small table with a binary outcome."""
    rng = np.random.default_rng(3)
    age = rng.normal(50, 10, rows).round(1)
    return pd.DataFrame(
        {
            "age": age,
            "ward": np.resize(["a", "b", "c"], rows),
            "cured": (rng.random(rows) < 1 / (1 + np.exp((age - 50) / 10))).astype(int),
        }
    )


def file_of(name: str, content: str | bytes) -> str:
    """Path of a file with this content."""
    path = FOLDER / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def csv(name: str, frame: pd.DataFrame, **how: Any) -> str:
    """Path of a CSV file of a table."""
    return file_of(name, frame.to_csv(index=False, **how).encode(how.get("encoding", "utf-8")))


def command(*arguments: str, folder: str = str(FOLDER / "output")) -> str:
    """What the command says: its one line of error, or the notes of a run that went through."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([*arguments, "--output", folder])
        except SystemExit as left:
            status = left.code
    return said(status, out.getvalue(), err.getvalue())


def said(status: Any, out: str, err: str) -> str:
    """The words of a finished command."""
    lines = [line for line in err.splitlines() if line.strip()]
    if status == 0:
        return " ".join(line for line in out.splitlines() if line.startswith(("Note", "Warning")))
    if not lines or not all(": error: " in line for line in lines):
        raise UnclearError(f"status {status}, {len(lines)} lines: {' / '.join(lines[-3:])}")
    return " ".join(lines)


def of_file(path: str, outcome: str = "cured", *more: str) -> str:
    """The same for a file."""
    return command("--file", path, "--outcome", outcome, *SHORT, *more)


def bad_file(
    name: str, says: str, content: Any, *more: str, slow: bool = False, **how: Any
) -> None:
    """Add a file that cannot be used; the table is written with the settings `how`."""

    def run() -> str:
        made = content() if callable(content) else content
        if isinstance(made, pd.DataFrame):
            return of_file(csv(f"{name}.csv", made, **how), "cured", *more)
        return of_file(file_of(f"{name}.csv", made), "cured", *more)

    add(f"cli.{name}", run, says, slow=slow)


def bad_options(name: str, says: str, *options: str, slow: bool = False) -> None:
    """Add options that cannot be used."""
    add(f"cli.{name}", lambda: command(*options), says, slow=slow)


# --- Files ----------------------------------------------------------------------------------------

bad_file("empty_file", "empty|no columns|nothing", "")
bad_file("blank_lines_alone", "empty|no columns|nothing", "\n\n\n")
bad_file("header_alone", "row", "age,ward,cured\n")
bad_file("one_row", "row|two", "age,ward,cured\n1.0,a,1\n")
bad_file("column_all_missing", "void", lambda: table().assign(void=np.nan), slow=True)
bad_file("every_row_with_a_hole", "missing", lambda: table(2).assign(x=[np.nan, 1], z=[1, np.nan]))
bad_file(
    "latin_1",
    "UTF-8|encod|Latin",
    lambda: table().replace("a", "Zürich").to_csv(index=False).encode("latin-1"),
)
bad_file("utf_16", "UTF-8|encod|UTF-16", lambda: table().to_csv(index=False).encode("utf-16"))
bad_file("binary", "UTF-8|encod|CSV|read", bytes(range(256)) * 10)
bad_file("lines_of_different_lengths", "line|fields|columns", "age,cured\n1,0\n2,1,5,7\n3,0\n")
bad_file("quote_that_is_not_closed", "quote|line|read|EOF", 'age,cured\n"1,0\n2,1\n3,0\n')
bad_file("column_twice", "age|twice|name|dropped", "age,age,cured\n1,2,0\n2,1,1\n3,0,0\n4,4,1\n")
THREE = table().assign(cured=np.arange(60) % 3)
bad_file("outcome_of_three_values", "cured.*3", THREE, "--family", "bernoulli")
bad_file("outcome_of_three_words", "cured.*two", lambda: table().assign(cured=table()["ward"]))
bad_file(
    "outcome_of_fractions_as_counts",
    "cured.*counts",
    lambda: THREE.assign(cured=0.5 * THREE["cured"]),
    "--family",
    "poisson",
)
bad_file("outcome_of_one_value", "cured.*two", lambda: table().assign(cured=1))
bad_file("outcome_all_missing", "cured|missing", lambda: table().assign(cured=np.nan))
bad_file(
    "outcome_of_infinite_values",
    "cured|infinite|two",
    lambda: table().assign(cured=np.resize([0, 1, np.inf], 60)),
)
bad_file("infinite_predictor", "age.*infinite", lambda: table().assign(age=[np.inf, *range(59)]))
bad_file(
    "text_of_many_values",
    "name.*different values",
    lambda: table().assign(name=[f"person {i}" for i in range(60)]),
)
bad_file("nothing_but_the_outcome", "column", lambda: table()[["cured"]])
bad_file("constant_columns_alone", "column", lambda: table().assign(age=1, ward="a"))
bad_file(
    "dates",
    "when|different values|type",
    lambda: table().assign(when=pd.date_range("2020", periods=60)),
)
bad_file(
    "predictor_that_is_the_outcome",
    "separat",
    lambda: table().assign(twin=lambda f: f["cured"]),
    slow=True,
)
bad_file("separator_that_is_not_there", "cured.*--separator", table, "--separator", ";")
bad_file("column_that_is_not_there", "weight", table, "--columns", "age", "weight")

bad_options("file_that_is_not_there", "nothing.csv", "--file", "nothing.csv", "--outcome", "y")
bad_options(
    "folder_in_place_of_a_file", "file|folder|directory", "--file", str(FOLDER), "--outcome", "y"
)
bad_options(
    "file_of_unknown_kind", "csv|parquet", "--file", file_of("table.xlsx", "x"), "--outcome", "y"
)
bad_options(
    "parquet_that_is_none", "parquet", "--file", file_of("table.parquet", "x"), "--outcome", "y"
)
bad_options(
    "outcome_that_is_no_column",
    "healed.*cured|healed",
    "--file",
    csv("plain.csv", table()),
    "--outcome",
    "healed",
)
bad_options("file_without_outcome", "--outcome", "--file", "table.csv")
bad_options("outcome_without_file", "no column 'cured'", "--outcome", "cured")
bad_options(
    "file_and_data_set", "--file|--data", "--file", "table.csv", "--outcome", "y", "--data", "fair"
)
bad_options("unknown_data_set", "Cod_RNA", "--data", "Cod_RNA")


def summary_of(name: str, **how: Any) -> str:
    """The table that a run prints for a file of another kind."""
    out = io.StringIO()
    arguments = ["--file", csv(f"{name}.csv", table(), **how), "--outcome", "cured", *SHORT]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        main([*arguments, "--output", str(FOLDER / "output")])
    return out.getvalue().partition("coefficient ")[2].partition("Written")[0]


def other_separators(name: str, **how: Any) -> None:
    """Add a file that spreadsheets write in other countries: it is refused, or read aright."""

    def run() -> str:
        same = summary_of(name, **how) == summary_of("plain")
        return "read as the plain file" if same else ""

    add(f"cli.{name}", run, "separat|semicolon|read as the plain file", slow=True)


other_separators("semicolons", sep=";")
other_separators("semicolons_and_decimal_commas", sep=";", decimal=",")
other_separators("tabs", sep="\t")


# --- Options --------------------------------------------------------------------------------------

bad_options("draws_of_zero", "--draws", "--draws", "0")
bad_options("draws_of_a_fraction", "--draws", "--draws", "10.5")
bad_options("draws_as_text", "--draws", "--draws", "many")
bad_options("tuning_below_zero", "--tune", "--tune", "-1")
bad_options("no_chains", "--chains", "--chains", "0")
bad_options("no_cores", "--cores", "--cores", "0")
bad_options("bias_of_zero", "bias", "--bias", "0")
bad_options("bias_as_text", "--bias", "--bias", "small")
bad_options("seed_below_zero", "--seed", "--seed", "-1")
bad_options("unknown_family", "--family.*gaussian", "--family", "normal")
bad_options("unknown_mode", "--mode", "--mode", "GPU")
bad_options("unknown_option", "--step-size", "--step-size", "0.1")
bad_options("option_without_a_value", "--draws", "--draws")
bad_options("formula_without_outcome", "y ~ x", "--formula", "~ lpi")
bad_options("name_with_a_backtick", "backtick", "--outcome", "md`vis")
bad_options("formula_that_does_not_parse", "lpi", "--formula", "mdvis ~ lpi +")
bad_options("formula_without_a_plus", "'idp'", "--formula", "mdvis ~ lpi idp")
bad_options("formula_of_an_outcome_of_zeros", "0.0 in all rows", "--formula", "I(mdvis < 0) ~ lpi")
bad_options("family_of_another_outcome", r"C\(y\) suits", "--family", "cumulative")
bad_options("formula_of_unknown_column", "income", "--formula", "mdvis ~ income")
bad_options("formula_of_unknown_function", "spline", "--formula", "mdvis ~ spline(lpi)")
bad_options("formula_of_infinite_values", "log.*infinite", "--formula", "mdvis ~ log(lpi)")
bad_options("formula_of_wrong_groups", "groups", "--formula", "mdvis ~ lpi + (1|groups)")
bad_options("formula_of_a_shape", "does not fit", "--formula", "p(mdvis, lpi, idp) ~ disea")
bad_options("formula_without_terms", "does not fit", "--formula", "mdvis ~ 0")
bad_options("offset_as_outcome", "offset", "--formula", "offset(mdvis) ~ lpi")
bad_options("formula_that_raises", "ZeroDivision", "--formula", "mdvis ~ lpi + I(1 / 0)")
bad_options("formula_and_outcome", "--formula", "--formula", "mdvis ~ lpi", "--outcome", "mdvis")
bad_options("word_too_many", "argument", "table.csv")


# --- Writing --------------------------------------------------------------------------------------


def written_to(folder: str) -> str:
    """A command that writes to a folder."""
    path = csv("plain.csv", table())
    return command("--file", path, "--outcome", "cured", *SHORT, folder=folder)


@case("--output")
def folder_below_a_file():
    return written_to(file_of("a_file", "x") + "/output")


@case("--output")
def folder_that_is_a_file():
    return written_to(file_of("a_file", "x"))


@case("earlier run.*--overwrite")
def folder_of_an_earlier_run():
    (FOLDER / "randhie.nc").write_text("x")
    return command(folder=str(FOLDER))


@case("--output")
def folder_that_cannot_be_made():
    return written_to("/proc/output")


@case("--output")
def name_of_a_folder_that_is_too_long():
    return written_to(str(FOLDER / ("x" * 300)))


FULL_DISK = """
import resource, signal, sys
from pymc_sgmcmc import main, regression
draws_of = regression.draws_of
def limited(*arguments):
    draws = draws_of(*arguments)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    return draws
regression.draws_of = limited
sys.exit(main.main(sys.argv[1:]))
"""


@case("writ|space|large|disk", slow=True)
def disk_that_fills_up():
    """HDF5 ends the process where a file that could not be written is closed at exit."""
    arguments = ["--file", csv("plain.csv", table()), "--outcome", "cured", *SHORT]
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, *arguments, "--output", str(FOLDER / "full")],
        capture_output=True,
        text=True,
        check=False,
    )
    if "Intercept" not in done.stdout:
        raise UnclearError(f"nothing was shown of the run: {done.stdout[-200:]}")
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    return said(done.returncode, done.stdout, "\n".join(lines) or done.stderr)
