"""The loaders, one for each data set, and the readers of files that are no tables of CSV."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from pymc_sgmcmc.checks import import_optional, one_of
from pymc_sgmcmc.datasets.dataset import Corpus, Dataset
from pymc_sgmcmc.datasets.documentation import documented
from pymc_sgmcmc.datasets.fetch import load, read
from pymc_sgmcmc.datasets.reading import (
    check_range,
    check_sha256,
    check_shape,
    read_arrays,
    read_integers,
    read_table,
)
from pymc_sgmcmc.datasets.registry import REGISTRY, Entry

COVER_TYPE_COUNTS = (211_840, 283_301, 35_754, 2_747, 9_493, 17_367, 20_510)
"""The full table has these numbers of rows of each cover type, according to UCI's description."""

COVERTYPE_SAMPLE_ROWS = 92_962
"""The converted file has this many rows, 16% of all."""

COVERTYPE_SAMPLE_SHA256 = "9e223d5f11894f84c9b50eab0a41d7935c3f47dcec66c3c3bc5cd01faccb433d"
"""This is the hash of the 54 features and the cover type of all rows of the sample, as
little-endian int16, computed from the converted file."""

N_QUANTITIES = 10
"""The first columns of Covertype, of this number, are quantities; the others are 0 or 1."""

AP_DOCUMENTS = 2_246
AP_WORDS = 10_473
"""These are the numbers of documents and of different words in the corpus, as lda-c gives them."""

AP_LARGEST_COUNT = 1_000
"""A larger count of a word in a document means that the file is damaged. The largest count in the
published file is far smaller."""


# --- Regression and classification ---


@documented("covertype")
def load_covertype(data_home: str | os.PathLike[str] | None = None) -> Dataset:
    """Covertype: the kind of forest, given the terrain.

    The rows are cells of 30 m × 30 m in the Roosevelt National Forest, Colorado. A folder without
    the full table may have a sample of 16%, ``covertype_16pct.npz``, which is checked by the
    SHA-256 of its values. No hash of the full table is known. Its shape, its ranges and the
    published number of rows of each cover type are checked instead.

    Returns
    -------
    Dataset
        Its ``name`` is ``"covertype"`` for the full table of n = 581012 rows and
        ``"covertype-16pct"`` for the sample of n = 92962. ``X`` is (n, 54) int16 with 10 quantities
        and then 44 indicators, and ``y`` is (n,) uint8.
        The quantities of the sample were restored from scaled values and rounded.

    Examples
    --------
    >>> load_covertype().X.shape  # doctest: +SKIP
    (581012, 54)
    """
    covertype = load("covertype", data_home, _read_covertype)
    if len(covertype.frame) == COVERTYPE_SAMPLE_ROWS:
        description = f"{covertype.description} A sample of 16% of the rows."
        return replace(covertype, name="covertype-16pct", description=description)
    return covertype


@documented("cod-rna-train", "cod-rna-test")
def load_cod_rna(
    data_home: str | os.PathLike[str] | None = None, *, subset: Literal["train", "test"] = "train"
) -> Dataset:
    """Non-coding RNA: detection from the free energy of folding.

    The files are those of the LIBSVM site, in svmlight format. The site publishes no hash of them
    and none could be computed, so shape, labels and the range of the frequencies are checked.

    Parameters
    ----------
    subset : {"train", "test"}, default "train"
        Which of the two files.

    Returns
    -------
    Dataset
        ``X`` is (59535, 8) float64 for ``"train"`` and (271617, 8) for ``"test"``. It is not
        scaled, and lengths are in nucleotides. ``y`` is int8: 1 where the file has the label +1
        and 0 where it has -1.

    Examples
    --------
    >>> load_cod_rna(subset="test").X.shape  # doctest: +SKIP
    (271617, 8)
    """
    one_of("subset", subset, ("train", "test"))
    return load(f"cod-rna-{subset}", data_home, _read_cod_rna)


# --- Ratings and words ---


@documented("movielens-100k", "movielens-1m")
def load_movielens(
    data_home: str | os.PathLike[str] | None = None, *, size: Literal["100k", "1m"] = "100k"
) -> Dataset:
    """MovieLens: ratings of movies by users.

    **The data may not be redistributed.** GroupLens allows their use for research and asks for
    acknowledgement. Redistribution and commercial use need the permission of GroupLens. This loader
    only fetches the data from GroupLens for the person who calls it.

    Parameters
    ----------
    size : {"100k", "1m"}, default "100k"
        100 000 ratings by 943 users, or 1 000 209 ratings by 6040 users.

    Returns
    -------
    Dataset
        Columns user and movie (numbers from 1, as in the file), rating (the target) and timestamp
        (seconds since 1970 UTC), all int64.

    Examples
    --------
    >>> len(load_movielens(size="1m").frame)  # doctest: +SKIP
    1000209
    """
    one_of("size", size, ("100k", "1m"))
    return load(f"movielens-{size}", data_home, _read_movielens)


@documented("ap")
def load_ap(data_home: str | os.PathLike[str] | None = None) -> Corpus:
    """Associated Press corpus: word counts of 2246 news reports.

    The sample data of lda-c, used in Blei, Ng and Jordan (2003). ``ap.npz`` has the arrays doc,
    word, count and vocab; ``ap.tgz`` is in the format of lda-c.

    Returns
    -------
    Corpus
        The frame has 302031 rows and int64 columns document (0 to 2245), word (0 to 10472) and
        count (1 or more); ``vocabulary`` has the 10473 words. There is no target.

    Examples
    --------
    >>> ap = load_ap()  # doctest: +SKIP
    >>> ap.n_documents, len(ap.vocabulary), ap.frame["count"].sum()  # doctest: +SKIP
    (2246, 10473, 435838)
    """
    (frame, vocabulary), origin = read("ap", data_home, _read_ap)
    return Corpus(
        frame=frame,
        vocabulary=vocabulary,
        n_documents=AP_DOCUMENTS,
        origin=origin,
        **REGISTRY["ap"].facts,
    )


# --- Readers ---


def _read_skin(path: Path, entry: Entry) -> pd.DataFrame:
    table = read_integers(path, r"\s+", (entry.n_rows, 4))
    check_range(table, 0, 255, "colours and classes")
    table = table.astype(np.uint8)
    check_sha256(table, str(entry.values_sha256))
    return _frame(entry, table[:, :3], (table[:, 3] == 1).astype(np.uint8))


def _read_covertype(path: Path, entry: Entry) -> pd.DataFrame:
    sample = path.suffix == ".npz"
    n_rows = COVERTYPE_SAMPLE_ROWS if sample else entry.n_rows
    table = read_integers(path, ",", (n_rows, len(entry.feature_names) + 1))
    check_range(table[:, :N_QUANTITIES], -1_000, 10_000, "quantities")
    check_range(table[:, N_QUANTITIES:-1], 0, 1, "indicators")
    check_range(table[:, -1], 1, 7, "cover types")
    if sample:
        check_sha256(table.astype("<i2"), COVERTYPE_SAMPLE_SHA256)
    elif tuple(counts := np.bincount(table[:, -1])[1:]) != COVER_TYPE_COUNTS:
        raise ValueError(f"found {counts} rows of the cover types, expected {COVER_TYPE_COUNTS}")
    return _frame(entry, table[:, :-1].astype(np.int16), table[:, -1].astype(np.uint8))


def _read_cod_rna(path: Path, entry: Entry) -> pd.DataFrame:
    svmlight = import_optional("sklearn.datasets", "datasets", f"The data set {entry.name}")
    n_features = len(entry.feature_names)
    X, labels = svmlight.load_svmlight_file(path, n_features=n_features, zero_based=False)
    check_shape(X, (entry.n_rows, n_features))
    X = X.toarray()
    check_range(X[:, 2:], 0, 1, "frequencies")
    if not np.isin(labels, [-1, 1]).all():
        raise ValueError(f"found the labels {np.unique(labels).tolist()}, expected -1 and 1")
    return _frame(entry, X, (labels == 1).astype(np.int8))


def _frame(entry: Entry, X: np.ndarray, y: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(X, columns=list(entry.feature_names)).assign(**{str(entry.target): y})


def _read_movielens(path: Path, entry: Entry) -> pd.DataFrame:
    shape = (entry.n_rows, len(entry.columns))
    if path.name == "u.data":
        table = read_integers(path, "\t", shape)
    else:  # Fields are separated by "::", which pandas' fast reader takes for an empty field.
        table = read_integers(path, ":", shape, fields=range(0, 7, 2))
    check_range(table[:, 2], 1, 5, "ratings")
    return pd.DataFrame(table, columns=list(entry.columns))


def _read_ap(path: Path, entry: Entry) -> tuple[pd.DataFrame, tuple[str, ...]]:
    if path.suffix == ".npz":
        *triplets, words = read_arrays(path, "doc", "word", "count", "vocab")
        table, vocabulary = np.column_stack(triplets).astype(np.int64), words.tolist()
    else:
        table = _read_lda_c(path)
        vocabulary = path.with_name("vocab.txt").read_text(encoding="utf-8").split()
    check_shape(table, (entry.n_rows, 3))
    check_shape(np.array(vocabulary), (AP_WORDS,))
    check_range(table[:, 0], 0, AP_DOCUMENTS - 1, "document numbers")
    check_range(table[:, 1], 0, AP_WORDS - 1, "word numbers")
    check_range(table[:, 2], 1, AP_LARGEST_COUNT, "counts")
    return pd.DataFrame(table, columns=list(entry.feature_names)), tuple(vocabulary)


def _read_lda_c(path: Path) -> np.ndarray:
    """Read lines ``n word:count …``, one a document, into rows (document, word, count).

    Readers of svmlight's format do not apply, since they want ascending numbers in each line.
    """
    rows = []
    for document, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        n_items, *items = line.split()
        if int(n_items) != len(items):
            raise ValueError(f"found {len(items)} words in line {document + 1}, expected {n_items}")
        rows += [(document, *map(int, item.split(":"))) for item in items]
    return np.array(rows)


# --- Tables that need no more than a reader ---


def _loader(
    name: str, reader: Callable[[Path, Entry], pd.DataFrame] = read_table
) -> Callable[..., Dataset]:
    """Loader of a data set that is in a file, where it has one, and otherwise in statsmodels."""

    def of_file(data_home: str | os.PathLike[str] | None = None) -> Dataset:
        return load(name, data_home, reader)

    def of_statsmodels() -> Dataset:
        module = import_optional(f"statsmodels.datasets.{name}", "datasets", f"The data set {name}")
        frame = module.load_pandas().data
        facts = REGISTRY[name].facts
        facts["feature_names"] = tuple(frame.columns.drop(facts["target"]))
        return Dataset(frame=frame, origin="package statsmodels", **facts)

    loader: Callable[..., Dataset] = of_file if REGISTRY[name].files else of_statsmodels
    loader.__name__ = loader.__qualname__ = f"load_{name.replace('-', '_')}"
    loader.__doc__ = REGISTRY[name].doc
    return documented(name)(loader)


load_randhie = _loader("randhie")
load_fair = _loader("fair")
load_skin = _loader("skin", _read_skin)
load_run_or_walk = _loader("run-or-walk")
load_sleepstudy = _loader("sleepstudy")
load_cbpp = _loader("cbpp")
load_contraception = _loader("contraception")
load_epil = _loader("epil")
load_salamander = _loader("salamander")
