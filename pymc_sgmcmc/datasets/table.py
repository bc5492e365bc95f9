"""A user's own table, from a CSV or parquet file."""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from pymc_sgmcmc.datasets.dataset import Dataset
from pymc_sgmcmc.datasets.fetch import UNREADABLE as _UNREADABLE
from pymc_sgmcmc.datasets.fetch import import_optional as _import_optional


def load_table(path: str | os.PathLike[str], outcome: str) -> Dataset:
    r"""Read a table from a CSV or parquet file.

    Parameters
    ----------
    path : path
        File whose name ends in ``.csv``, ``.csv.gz`` or ``.parquet``. A CSV file is in UTF-8 and
        has its column names in the first line. Commas, semicolons, tabs or vertical bars
        separate the columns, whichever gives the first lines equally many.
    outcome : str
        The column to model; all the others are features.

    Returns
    -------
    Dataset
        The columns with the types that pandas gives them; numbers with a decimal comma are
        read as numbers. Neither missing values nor columns of text are changed or refused here;
        ``X`` refuses text.

    Raises
    ------
    FileNotFoundError
        When there is no such file.
    ValueError
        When the name ends otherwise, the file cannot be read, it has no rows or no feature, a
        column has no name or the name of another, rows are longer than the line of names, commas
        in numbers may be decimal commas or separate thousands, or there is no column
        ``outcome``.
    ImportError
        When the file is parquet and pyarrow is not installed.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from pymc_sgmcmc.datasets import load_table
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "patients.csv"
    ...     _ = path.write_text("age,dose,recovered\n61,0.5,1\n47,0.0,0\n")
    ...     patients = load_table(path, outcome="recovered")
    >>> patients.feature_names
    ('age', 'dose')
    >>> patients.X
    array([[61. ,  0.5],
           [47. ,  0. ]])
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no file {str(path)!r}; give the path of an existing CSV or parquet file."
        )
    if path.name.endswith((".csv", ".csv.gz")):
        reader, kind = _read_csv, "CSV"
    elif path.suffix == ".parquet":
        _import_optional("pyarrow", "files", f"Reading {path.name}")
        reader, kind = pd.read_parquet, "parquet"
    else:
        raise ValueError(
            f"The name of the file should end in .csv, .csv.gz or .parquet but got {path.name!r}."
        )
    try:
        frame = reader(path)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} should be in the encoding UTF-8, but has bytes of another one. Save it again "
            "as UTF-8 (in a spreadsheet: CSV UTF-8), or where it is Latin-1 convert it by: "
            "iconv -f LATIN1 -t UTF-8 OLD.csv > NEW.csv"
        ) from error
    except _UNREADABLE as error:
        raise ValueError(f"{path} could not be read as a {kind} file: {error}") from error
    columns = [str(column) for column in frame.columns]
    if outcome not in columns:
        close = difflib.get_close_matches(outcome, columns)
        # Capitals count as different letters for difflib, and are the most common slip.
        close += [c for c in columns if c.lower() == outcome.lower() and c not in close]
        hint = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
        if kind == "CSV" and len(columns) == 1:
            hint = "Separate the columns by commas, the same number in each row. "
        raise ValueError(
            f"{path.name} has no column {outcome!r}. {hint}Its columns are {_shorten(columns)}."
        )
    if len(columns) == 1:
        raise ValueError(
            f"{path.name} has the column {outcome!r} alone; a model needs a feature as well."
        )
    if frame.empty:
        raise ValueError(f"{path.name} has column names but no rows; a model needs rows.")
    return Dataset(
        name=path.name.partition(".")[0],
        frame=frame.set_axis(columns, axis="columns").reset_index(drop=True),
        target=outcome,
        feature_names=tuple(column for column in columns if column != outcome),
        origin=f"file {path}",
    )


_SEPARATORS = ",;\t|"

_SAMPLE_BYTES = 2**16
"""What is read of a CSV file to tell how its columns are separated."""

_SAMPLE_ROWS = 20

_COMMA_NUMBER = re.compile(r"[+-]?\d[\d.]*(,\d+)*([eE][+-]?\d+)?")
"""A number with commas that are decimal or separate thousands, or with neither."""

_DECIMAL_COMMA = re.compile(r"[+-]?\d+(,\d+)?([eE][+-]?\d+)?")

_PERHAPS_THOUSANDS = re.compile(r"[+-]?([1-9]\d{0,2},\d{3}|\d+)")


def _read_csv(path: Path) -> pd.DataFrame:
    separator = _separator(path)
    # pandas renames repeated and nameless columns without a word, and the row numbers that R and
    # pandas write by default would become a feature. So the names are read as plain values first.
    try:
        # With the line below: where that is longer, pandas takes its first values for names of
        # rows, and shifts the others.
        names = pd.read_csv(path, sep=separator, header=None, nrows=2, dtype=str).iloc[0]
    except pd.errors.ParserError as error:
        raise ValueError(
            f"its rows have more values than its first line has names ({error}); write numbers "
            "with decimal points, or name all columns (row.names=FALSE in R)"
        ) from error
    if names.isna().any():
        positions = (np.flatnonzero(names.isna()) + 1).tolist()
        raise ValueError(
            f"the columns at positions {positions} have no name; name them, or write the file "
            "without row numbers (index=False in pandas, row.names=FALSE in R)"
        )
    repeated = sorted(names[names.duplicated()].dropna().unique())
    if repeated:
        raise ValueError(f"the columns {repeated} are there more than once; rename them")
    # In one piece, because the type of a column that is read in pieces may change between them.
    frame = pd.read_csv(path, sep=separator, low_memory=False)
    for position, name in enumerate(frame.columns):
        numbers = _numbers_with_commas(frame[name])
        if numbers is not None:
            frame.isetitem(position, numbers)
    return frame


def _separator(path: Path) -> str:
    """Character between the columns; a comma where the first lines do not tell."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        sample = file.read(_SAMPLE_BYTES)
    if b"\0" in sample:
        raise ValueError(
            "it has bytes of value 0, as in UTF-16 or in a file that is no text; save it as UTF-8"
        )
    text = sample.decode("utf-8-sig", errors="replace")
    if len(sample) == _SAMPLE_BYTES:
        text = text[: text.rfind("\n") + 1]  # the last line may be cut
    for separator in _SEPARATORS:
        try:
            lines = csv.reader(io.StringIO(text, newline=None), delimiter=separator)
            lengths = {len(line) for line in itertools.islice(lines, _SAMPLE_ROWS) if line}
        except csv.Error:
            continue
        if len(lengths) == 1 and lengths != {1}:
            return separator
    return ","


def _numbers_with_commas(column: pd.Series) -> pd.Series | None:
    """The numbers of a column of text that are written with commas; None where it is none.

    Raises
    ------
    ValueError
        When the commas may separate thousands as well.
    """
    if pd.api.types.is_numeric_dtype(column):  # truth values included
        return None
    values = [str(value).strip() for value in column.dropna().unique()]
    if not any("," in value for value in values):
        return None
    if not all(_COMMA_NUMBER.fullmatch(value) for value in values):
        return None  # words
    unclear = all(map(_PERHAPS_THOUSANDS.fullmatch, values))
    if unclear or not all(map(_DECIMAL_COMMA.fullmatch, values)):
        example = next(value for value in values if "," in value)
        raise ValueError(
            f"the numbers of the column {column.name!r} have commas, such as {example}, which may "
            "be decimal commas or separate thousands; write them with decimal points and nothing "
            "else"
        )
    return column.str.strip().str.replace(",", ".").astype(float)


def _shorten(names: Sequence[str], limit: int = 20) -> str:
    shown = ", ".join(map(repr, names[:limit]))
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
