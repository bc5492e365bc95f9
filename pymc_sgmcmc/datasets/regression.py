"""Tables for regression and classification."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pandas as pd

from pymc_sgmcmc.checks import import_optional, one_of
from pymc_sgmcmc.datasets.dataset import Dataset
from pymc_sgmcmc.datasets.documentation import documented
from pymc_sgmcmc.datasets.fetch import load
from pymc_sgmcmc.datasets.reading import check_range, check_sha256, check_shape, read_integers
from pymc_sgmcmc.datasets.registry import REGISTRY, Entry

SKIN_SHA256 = "357dd600dc24bae68d8d0215373834ad11a2223a91a8c360b412b74c79974b9c"
"""This is the hash of the bytes B, G, R and class of all rows, computed from the published file."""

COVER_TYPE_COUNTS = (211_840, 283_301, 35_754, 2_747, 9_493, 17_367, 20_510)
"""The full table has these numbers of rows of each cover type, according to UCI's description."""

COVERTYPE_SAMPLE_ROWS = 92_962
"""The converted file has this many rows, 16% of all."""

COVERTYPE_SAMPLE_SHA256 = "9e223d5f11894f84c9b50eab0a41d7935c3f47dcec66c3c3bc5cd01faccb433d"
"""This is the hash of the 54 features and the cover type of all rows of the sample, as
little-endian int16, computed from the converted file."""

N_QUANTITIES = 10
"""The first columns of Covertype, of this number, are quantities; the others are 0 or 1."""

CodRnaSubset = Literal["train", "test"]


@documented("skin")
def load_skin(data_home: str | os.PathLike[str] | None = None) -> Dataset:
    """Skin Segmentation: is a pixel skin, given its colour.

    The rows are 245 057 pixels from photographs of faces, 50 859 of them skin. The values are
    checked by their SHA-256, whatever the format of the file.

    Returns
    -------
    Dataset
        ``X`` is (245057, 3) and ``y`` (245057,), both uint8. (The file codes skin as 1 and not
        skin as 2.)

    Examples
    --------
    >>> load_skin("my_data").X.shape  # doctest: +SKIP
    (245057, 3)
    """
    return load("skin", data_home, _read_skin)


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
    data_home: str | os.PathLike[str] | None = None, *, subset: CodRnaSubset = "train"
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
    one_of("subset", subset, get_args(CodRnaSubset))
    return load(f"cod-rna-{subset}", data_home, _read_cod_rna)


@documented("run-or-walk")
def load_run_or_walk(data_home: str | os.PathLike[str] | None = None) -> Dataset:
    """Run or walk: what a person does, given accelerometer and gyroscope.

    Kaggle asks for an account, so this data set is only read from a folder. Download it by hand
    from https://www.kaggle.com/datasets/vmalyi/run-or-walk. Its ``dataset.csv`` may be renamed to
    ``run_or_walk.csv``, or stay in ``run-or-walk.zip``.

    Returns
    -------
    Dataset
        ``X`` is (88588, 6) float64: three axes of acceleration and three of rotation, in the
        units of the file; ``y`` is (88588,) int8. The frame has the date, time, user name and
        wrist as well.

    Examples
    --------
    >>> load_run_or_walk("my_data").X.shape  # doctest: +SKIP
    (88588, 6)
    """
    return load("run-or-walk", data_home)


@documented("randhie")
def load_randhie() -> Dataset:
    """RAND Health Insurance Experiment: visits to a doctor, given insurance and health.

    The table is part of statsmodels; nothing is downloaded.

    Returns
    -------
    Dataset
        20190 rows. The target is mdvis, the number of outpatient visits to a doctor. Features:
        lncoins, ln(coinsurance + 1) with coinsurance in per cent; idp, 1 for an individual
        deductible plan; lpi, ln of the annual participation incentive payment (at least 1); fmde, 0
        if idp = 1, else ln(max(1, MDE / (0.01 coinsurance))); physlm, 1 for a physical limitation;
        disea, number of chronic diseases; hlthg, hlthf, hlthp, 1 for self-rated health good, fair
        or poor.

    Examples
    --------
    >>> from pymc_sgmcmc.datasets import load_randhie
    >>> randhie = load_randhie()
    >>> randhie.X.shape
    (20190, 9)
    >>> float(randhie.y.mean())
    2.86
    """
    return _load_statsmodels("randhie")


@documented("fair")
def load_fair() -> Dataset:
    """Extramarital affairs of 6366 women.

    The table is part of statsmodels; nothing is downloaded.

    Returns
    -------
    Dataset
        6366 rows, all float64. The target is affairs, a measure of the time spent in affairs
        (0 = none). Features: rate_marriage (1 = very poor to 5 = very good), age (years),
        yrs_married (years, by intervals), children (number), religious (1 = not to 4 = strongly),
        educ (years of school: 9, 12, 14, 16, 17 or 20), occupation and occupation_husb (classes 1
        to 6).

    Examples
    --------
    >>> from pymc_sgmcmc.datasets import load_fair
    >>> fair = load_fair()
    >>> fair.X.shape
    (6366, 8)
    >>> float((fair.y > 0).mean())
    0.322
    """
    return _load_statsmodels("fair")


def _read_skin(path: Path, entry: Entry) -> pd.DataFrame:
    table = read_integers(path, r"\s+", (entry.n_rows, 4))
    check_range(table, 0, 255, "colours and classes")
    table = table.astype(np.uint8)
    check_sha256(table, SKIN_SHA256)
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


def _load_statsmodels(name: str) -> Dataset:
    module = import_optional(f"statsmodels.datasets.{name}", "datasets", f"The data set {name}")
    frame = module.load_pandas().data
    facts = REGISTRY[name].facts
    facts["feature_names"] = tuple(frame.columns.drop(facts["target"]))
    return Dataset(frame=frame, origin="package statsmodels", **facts)


def _frame(entry: Entry, X: np.ndarray, y: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(X, columns=list(entry.feature_names)).assign(**{str(entry.target): y})
