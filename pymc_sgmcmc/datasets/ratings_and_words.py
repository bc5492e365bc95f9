"""Ratings of movies and counts of words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pandas as pd

from pymc_sgmcmc.checks import one_of
from pymc_sgmcmc.datasets.dataset import Corpus, Dataset
from pymc_sgmcmc.datasets.documentation import documented
from pymc_sgmcmc.datasets.fetch import load, read
from pymc_sgmcmc.datasets.reading import check_range, check_shape, read_arrays, read_integers
from pymc_sgmcmc.datasets.registry import REGISTRY, Entry

AP_DOCUMENTS = 2_246
AP_WORDS = 10_473
"""These are the numbers of documents and of different words in the corpus, as lda-c gives them."""

AP_LARGEST_COUNT = 1_000
"""A larger count of a word in a document means that the file is damaged. The largest count in the
published file is far smaller."""

MovieLensSize = Literal["100k", "1m"]


@documented("movielens-100k", "movielens-1m")
def load_movielens(
    data_home: str | os.PathLike[str] | None = None, *, size: MovieLensSize = "100k"
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
    one_of("size", size, get_args(MovieLensSize))
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
