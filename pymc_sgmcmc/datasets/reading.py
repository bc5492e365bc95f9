"""Reading a file as the registry describes it, and checks of the values against the published ones.

Error messages say what was found and what was expected; `fetch.load` adds the name of the file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pandas as pd

from pymc_sgmcmc.checks import import_optional
from pymc_sgmcmc.datasets.registry import Entry


def read(path: Path, entry: Entry) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The rows of a file, checked, and the vocabulary of a corpus.

    Raises
    ------
    ValueError
        Where the file does not hold what it should.
    """
    columns = list(entry.columns or (*entry.feature_names, *filter(None, [entry.target])))
    words: list[str] = []
    if path.suffix == ".npz":
        arrays = _read_arrays(path, *entry.arrays)
        frame = pd.DataFrame(np.column_stack(arrays).astype(np.int64), columns=columns)
        if entry.n_words:
            words = _read_arrays(path, "vocab")[0].tolist()
    elif entry.format == "csv":
        frame = pd.read_csv(path, usecols=columns)[columns]
    elif entry.format == "integers":
        how = {"sep": entry.separator, "header": None, "usecols": entry.fields}
        frame = pd.read_csv(path, dtype=np.int64, **how).set_axis(columns, axis=1)
    elif entry.format == "svmlight":
        svmlight = import_optional("sklearn.datasets", "datasets", f"The data set {entry.name}")
        features = len(entry.feature_names)
        X, y = svmlight.load_svmlight_file(path, n_features=features, zero_based=False)
        frame = pd.DataFrame(np.column_stack([X.toarray(), y]), columns=columns)
    else:
        frame = pd.DataFrame(_read_lda_c(path), columns=columns)
        words = path.with_name("vocab.txt").read_text(encoding="utf-8").split()
    _check(frame, len(words), entry)
    for name, values in entry.categories.items():
        if unknown := set(frame[name]) - set(values):
            raise ValueError(f"found {unknown} in the column {name!r}, expected {list(values)}")
        column = frame[name].astype(pd.CategoricalDtype(values, ordered=name in entry.ordered))
        frame[name] = column.cat.codes if name in entry.coded else column
    if entry.types:
        types = dict.fromkeys(entry.feature_names, entry.types[0])
        frame = frame.astype({**types, str(entry.target): entry.types[1]})
    return frame, tuple(words)


def _check(frame: pd.DataFrame, words: int, entry: Entry) -> None:
    """Refuse rows that are not those published: their number, values, counts and hash."""
    if len(frame) != entry.n_rows:
        raise ValueError(f"found {len(frame)} rows, expected {entry.n_rows}")
    if words != entry.n_words:
        raise ValueError(f"found {words} words, expected {entry.n_words}")
    if frame.isna().any(axis=None):
        raise ValueError(f"found missing values in {frame.columns[frame.isna().any()].tolist()}")
    for low, high, first, last in entry.ranges:
        part = frame.iloc[:, first:last]
        smallest, largest = part.min(axis=None), part.max(axis=None)
        # A smaller integer type would silently change such values.
        if not (smallest >= low and largest <= high):
            raise ValueError(
                f"found values from {smallest} to {largest}, expected {low} to {high}, in "
                f"{part.columns[0]!r} to {part.columns[-1]!r}"
            )
    if entry.target_counts:
        counts = np.bincount(frame[entry.target])[1:].tolist()
        if counts != list(entry.target_counts):
            raise ValueError(f"found {counts} rows of each class, expected {entry.target_counts}")
    if entry.values_sha256 is not None:
        values = np.ascontiguousarray(frame.to_numpy().astype(entry.hashed_as))
        sha256 = hashlib.sha256(values).hexdigest()
        if sha256 != entry.values_sha256:
            raise ValueError(f"found values with SHA-256 {sha256}, expected {entry.values_sha256}")


def _read_arrays(path: Path, *names: str) -> list[np.ndarray]:
    """Arrays of integers or text from an ``.npz`` file."""
    # Opened here, because np.load leaves a file open that is no archive.
    with path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        arrays = [archive[name] for name in names]
    if kinds := [array.dtype.name for array in arrays if array.dtype.kind not in "iuU"]:
        raise ValueError(f"found arrays of {kinds}, expected integers")
    return arrays


def _read_lda_c(path: Path) -> np.ndarray:
    """Lines ``n word:count …``, one a document, as rows (document, word, count).

    Readers of svmlight's format do not apply, since they want ascending numbers in each line.
    """
    rows = []
    for document, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        n_items, *items = line.split()
        if int(n_items) != len(items):
            raise ValueError(f"found {len(items)} words in line {document + 1}, expected {n_items}")
        rows += [(document, *map(int, item.split(":"))) for item in items]
    return np.array(rows)
