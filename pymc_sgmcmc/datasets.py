"""Public data sets for examples, tests and benchmarks, and the reading of a user's own table.

No data ship with the package. A loader looks for its file in this order:

1. the folder given as ``data_home``;
2. the folder named by the environment variable ``PYMC_SGMCMC_DATA``;
3. the cache that pooch keeps for this package, ``pooch.os_cache("pymc_sgmcmc")``;
4. the official home of the data, from which the file is downloaded into that cache.

A folder may hold the file as it was downloaded or the converted file named in the loader's
docstring. `Dataset.origin` says where the rows came from. `load_randhie` and `load_fair` read
tables that are part of statsmodels and need neither folder nor network.

Downloads need pooch, and the two tables statsmodels: ``pip install "pymc_sgmcmc[datasets]"``.
Parquet tables need pyarrow: ``pip install "pymc_sgmcmc[files]"``.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import hashlib
import importlib
import io
import itertools
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

__all__ = [
    "Corpus",
    "Dataset",
    "DatasetUnavailableError",
    "load_ap",
    "load_cbpp",
    "load_cod_rna",
    "load_contraception",
    "load_covertype",
    "load_epil",
    "load_fair",
    "load_movielens",
    "load_randhie",
    "load_run_or_walk",
    "load_salamander",
    "load_skin",
    "load_sleepstudy",
    "load_table",
]

_FOLDER_VARIABLE = "PYMC_SGMCMC_DATA"

# Seconds to connect and seconds between two packets. A machine without network should hear so at
# once; a slow but living download may still take as long as it needs.
_DOWNLOAD_TIMEOUT = (10.0, 30.0)

# What the readers of the standard library, NumPy and pandas raise on a damaged file. Other
# operating system errors, such as a lack of permission, say what is wrong by themselves.
_UNREADABLE = (
    ValueError,
    LookupError,
    EOFError,
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
)


class DatasetUnavailableError(FileNotFoundError):
    """A data set is in no folder that was searched and could not be downloaded."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Dataset:
    """A table, and what there is to know about it.

    Attributes
    ----------
    name : str
        Short name; of a part or a sample of a data set, it says which.
    frame : pandas.DataFrame
        The rows, one column a variable, indexed 0 to ``n_rows - 1``.
    target : str or None
        The column that is modelled, None where there is none.
    feature_names : tuple of str
        The columns of `X`, in order.
    group_names : tuple of str
        The columns that number the groups of a mixed model.
    description : str
        What a row is, with the coding and the units that are not obvious.
    source : str
        Where the data have their home.
    licence : str
        The terms under which they are given.
    citation : str
        The publication to cite.
    origin : str
        Where this copy was read from: ``"folder …"``, ``"cache"``, ``"download"``,
        ``"package statsmodels"`` or ``"file …"``.

    Examples
    --------
    >>> from pymc_sgmcmc.datasets import load_fair
    >>> fair = load_fair()
    >>> fair
    Dataset(name='fair', 6366 rows, target 'affairs', 8 features, origin='package statsmodels')
    >>> fair.X.shape, fair.y.shape
    ((6366, 8), (6366,))
    """

    name: str
    frame: pd.DataFrame
    target: str | None
    feature_names: tuple[str, ...]
    group_names: tuple[str, ...] = ()
    description: str = ""
    source: str = ""
    licence: str = ""
    citation: str = ""
    origin: str

    def __repr__(self) -> str:
        """One line: a frame of thousands of rows would hide the rest."""
        return (
            f"{type(self).__name__}(name={self.name!r}, {len(self.frame)} rows, "
            f"target {self.target!r}, {len(self.feature_names)} features, origin={self.origin!r})"
        )

    @property
    def X(self) -> np.ndarray:  # noqa: N802 - matrices are called X, as in the papers
        """Features as a new array.

        Returns
        -------
        numpy.ndarray
            (n_rows, n_features), in the smallest type that holds every column; missing values of
            pandas' nullable types are NaN.

        Raises
        ------
        TypeError
            When a feature is not a number.
        """
        features = self.frame[list(self.feature_names)]
        not_numeric = [
            column
            for column in self.feature_names
            if not pd.api.types.is_numeric_dtype(features[column])
        ]
        if not_numeric:
            raise TypeError(
                f"{self.name}: X should be made of numeric columns but {not_numeric} are not. "
                "Encode them first, for instance by pandas.get_dummies(dataset.frame)."
            )
        dtypes = list(features.dtypes)
        if all(isinstance(dtype, np.dtype) for dtype in dtypes):
            common = np.result_type(*dtypes)
        else:  # pandas' own nullable numbers: floating point alone can hold a missing value
            common = np.dtype(np.float64)
        # A copy, because pandas gives a read-only view; by rows, because minibatches gather rows.
        return np.array(features.to_numpy(dtype=common), order="C")

    @property
    def y(self) -> np.ndarray:
        """Target as a new array.

        Returns
        -------
        numpy.ndarray
            (n_rows,), in the type of its column.

        Raises
        ------
        ValueError
            When the data set has no target.
        """
        if self.target is None:
            raise ValueError(f"{self.name} has no target column; its columns are in dataset.frame.")
        return np.array(self.frame[self.target].to_numpy())


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Corpus(Dataset):
    """Word counts of documents; see `Dataset` for the attributes not listed here.

    Attributes
    ----------
    vocabulary : tuple of str
        The words; column ``word`` of the frame counts them from 0.
    n_documents : int
        Number of documents; column ``document`` of the frame counts them from 0.
    """

    vocabulary: tuple[str, ...]
    n_documents: int


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What is known of a data set before its rows are read."""

    name: str
    loader: str
    description: str
    source: str
    licence: str
    citation: str
    target: str | None
    feature_names: tuple[str, ...]
    n_rows: int
    contents: str  # what the file should hold, for messages
    files: tuple[str, ...]  # names looked for in a folder, the most complete first
    group_names: tuple[str, ...] = ()
    url: str | None = None
    known_hash: str | None = None  # of the file at `url`, as pooch writes it


@dataclass(frozen=True)
class _Located:
    path: Path
    origin: str


# --------------------------------------------------------------------------------------------------
# Finding the file
# --------------------------------------------------------------------------------------------------


def _import_optional(module: str, extra: str, purpose: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{purpose} needs the package {package}, which is not installed. "
            f'Install it by: pip install "pymc_sgmcmc[{extra}]"'
        ) from error


def _folders(data_home: str | os.PathLike[str] | None) -> Iterator[Path]:
    given = {"data_home": data_home, _FOLDER_VARIABLE: os.environ.get(_FOLDER_VARIABLE)}
    for name, value in given.items():
        if not value:
            continue
        folder = Path(value).expanduser()
        if not folder.is_dir():
            # Going on to the next place would hide a misspelt path behind a download.
            raise NotADirectoryError(
                f"{name} should be an existing folder but is {str(value)!r}. "
                "Correct it, create the folder, or leave it unset to download the data."
            )
        yield folder


def _locate(source: _Source, data_home: str | os.PathLike[str] | None) -> _Located:
    searched = []
    for folder in _folders(data_home):
        searched.append(str(folder))
        for file_name in source.files:
            path = folder / file_name
            if path.is_file():
                return _Located(path, f"folder {folder}")
    return _download(source, searched)


def _download(source: _Source, searched: Sequence[str]) -> _Located:
    """Take the file from pooch's cache, or from its home when it is not yet there."""
    absent = f"The data set {source.name} is not in " + (
        " nor ".join(searched) if searched else "a folder (none was given)"
    )
    advice = (
        f"Put {' or '.join(source.files)} in a folder, and give the folder as "
        f"{source.loader}(data_home=...) or in the environment variable {_FOLDER_VARIABLE}."
    )
    if source.url is None:
        raise DatasetUnavailableError(
            f"{absent}, and it cannot be downloaded without an account: download it by hand from "
            f"{source.source}. {advice}"
        )
    try:
        pooch = _import_optional("pooch", "datasets", f"Downloading the data set {source.name}")
    except ImportError as error:
        raise ImportError(f"{absent}. {error}. Without it: {advice}") from error
    try:
        path, action = pooch.retrieve(
            source.url,
            known_hash=source.known_hash,
            fname=PurePosixPath(source.url).name,
            path=pooch.os_cache("pymc_sgmcmc"),
            # Not streamed, because pooch leaves the connection of a failed stream open.
            downloader=pooch.HTTPDownloader(
                timeout=_DOWNLOAD_TIMEOUT, progressbar=False, stream=False
            ),
            # pooch tells the processor alone whether it found the file in its cache.
            processor=lambda file, action, _: (file, action),
        )
    # requests' errors are OSErrors; pooch raises ValueError for a hash that does not match.
    except (OSError, ValueError) as error:
        raise DatasetUnavailableError(
            f"{absent}, and its download from {source.url} failed: {type(error).__name__}: "
            f"{error}. Two ways on: restore the connection and try again; or get the file by other "
            f"means (from {source.source}). {advice}"
        ) from error
    return _Located(Path(path), "cache" if action == "fetch" else "download")


# --------------------------------------------------------------------------------------------------
# Reading and checking the file
# --------------------------------------------------------------------------------------------------


def _read[Content](
    source: _Source, located: _Located, reader: Callable[[Path], Content]
) -> Content:
    """Read a file; what is wrong with it is told with its name and with what it should hold."""
    try:
        return reader(located.path)
    except _UNREADABLE as error:
        if located.origin.startswith("folder"):
            remedy = f"Replace it by the original from {source.source}, or move it away."
        else:
            remedy = "Delete it, and it is downloaded again."
        raise ValueError(
            f"{source.name}: the file {located.path} cannot be used: {error}. "
            f"Expected {source.contents}. {remedy}"
        ) from error


def _read_arrays(path: Path, names: Sequence[str]) -> list[np.ndarray]:
    # Opened here, because np.load leaves the file open when it is no archive.
    with path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("found a single array, expected an .npz archive")
        with archive:
            if not set(names) <= set(archive.files):
                raise ValueError(f"found the arrays {archive.files}, expected {list(names)}")
            return [archive[name] for name in names]


def _read_bytes(path: Path, member: str) -> bytes:
    """Content of a file, or of one member of a zip or tar archive; a gzip layer is removed."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            content = archive.read(_find_member(archive.namelist(), member))
    elif path.suffix == ".tgz":
        with tarfile.open(path) as tar:
            extracted = tar.extractfile(_find_member(tar.getnames(), member))
            if extracted is None:
                raise ValueError(f"found {member} as a folder or link, expected a file")
            with extracted:
                content = extracted.read()
    else:
        content = path.read_bytes()
    return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content


def _find_member(names: Sequence[str], member: str) -> str:
    for name in names:
        if PurePosixPath(name).name == member:
            return name
    raise ValueError(f"found the members {list(names)}, expected one called {member}")


def _read_numbers(content: bytes, separator: str) -> np.ndarray:
    """Read a table of integers without a header."""
    table = pd.read_csv(io.BytesIO(content), sep=separator, header=None)
    if not all(pd.api.types.is_integer_dtype(dtype) for dtype in table.dtypes):
        raise ValueError("found entries that are missing or no integers")
    return table.to_numpy()


def _check_shape(values: np.ndarray, shape: tuple[int, ...], what: str) -> None:
    if values.shape != shape:
        raise ValueError(f"found {what} of shape {values.shape}, expected {shape}")


def _check_integers(values: np.ndarray, low: int, high: int, what: str) -> None:
    """Refuse what a later conversion to a small integer type would wrap without a word."""
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"found {what} of type {values.dtype}, expected integers")
    if values.min() < low or values.max() > high:
        raise ValueError(
            f"found {what} from {values.min()} to {values.max()}, expected {low} to {high}"
        )


def _check_frame(frame: pd.DataFrame, columns: Sequence[str], n_rows: int) -> pd.DataFrame:
    """Return the columns in the order expected, once their names and number of rows are right."""
    if sorted(map(str, frame.columns)) != sorted(columns):
        raise ValueError(f"found the columns {list(frame.columns)}, expected {list(columns)}")
    if len(frame) != n_rows:
        raise ValueError(f"found {len(frame)} rows, expected {n_rows}")
    incomplete = [column for column in columns if frame[column].isna().any()]
    if incomplete:
        raise ValueError(f"found missing values in the columns {incomplete}, expected none")
    return frame[list(columns)]


def _recode(column: pd.Series, codes: Mapping[Any, int]) -> pd.Series:
    unknown = set(column) - set(codes)
    if unknown:
        raise ValueError(
            f"found the values {sorted(map(str, unknown))} in column {column.name!r}, "
            f"expected {list(codes)}"
        )
    return column.map(codes).astype(np.int8)


def _categories(column: pd.Series, levels: Sequence[str], *, ordered: bool = False) -> pd.Series:
    codes = _recode(column, {level: code for code, level in enumerate(levels)})
    categories = pd.Categorical.from_codes(codes.to_numpy(), list(levels), ordered=ordered)
    return pd.Series(categories, index=column.index, name=column.name)


def _features_and_target(source: _Source, X: np.ndarray, y: np.ndarray) -> pd.DataFrame:
    assert source.target is not None
    frame = pd.DataFrame(X, columns=list(source.feature_names))
    frame[source.target] = y
    return frame


def _dataset(source: _Source, frame: pd.DataFrame, origin: str) -> Dataset:
    return Dataset(frame=frame, origin=origin, **_facts(source))


def _facts(source: _Source) -> dict[str, Any]:
    shared = (
        "name",
        "target",
        "feature_names",
        "group_names",
        "description",
        "source",
        "licence",
        "citation",
    )
    return {name: getattr(source, name) for name in shared}


# --------------------------------------------------------------------------------------------------
# Regression data
# --------------------------------------------------------------------------------------------------

_SKIN = _Source(
    name="skin",
    loader="load_skin",
    description="A row is a pixel: blue, green and red (0 to 255); skin is 1, anything else 0.",
    source="https://archive.ics.uci.edu/dataset/229/skin+segmentation",
    licence="CC BY 4.0",
    citation=(
        "Bhatt, R. and Dhall, A. (2012). Skin Segmentation. UCI Machine Learning Repository. "
        "https://doi.org/10.24432/C5T30C"
    ),
    target="skin",
    feature_names=("B", "G", "R"),
    n_rows=245_057,
    contents="245057 rows of B, G, R (0 to 255) and the class (1 or 2)",
    files=("skin.npz", "Skin_NonSkin.txt", "skin+segmentation.zip"),
    url="https://archive.ics.uci.edu/static/public/229/skin+segmentation.zip",
    # The hash of the zip is not known for certain; the values in it are checked instead.
    known_hash=None,
)

# SHA-256 of the 245057 × 4 bytes B, G, R, class by rows: the same for every file format.
_SKIN_VALUES_SHA256 = "357dd600dc24bae68d8d0215373834ad11a2223a91a8c360b412b74c79974b9c"


def load_skin(data_home: str | os.PathLike[str] | None = None) -> Dataset:
    """Skin Segmentation: is a pixel skin, given its colour.

    245 057 pixels from photographs of faces, 50 859 of them skin.

    Parameters
    ----------
    data_home : path, optional
        Folder with ``skin.npz`` (arrays X and y), ``Skin_NonSkin.txt`` or
        ``skin+segmentation.zip``. Without it, see the order of places at the head of the module.

    Returns
    -------
    Dataset
        ``X`` is (245057, 3) uint8, columns B, G, R, each 0 to 255; ``y`` is (245057,) uint8,
        1 = skin and 0 = not. (The file codes skin as 1 and not skin as 2.)

    Raises
    ------
    DatasetUnavailableError
        When no folder has the file and the download fails.
    NotADirectoryError
        When ``data_home`` or ``PYMC_SGMCMC_DATA`` is not a folder.
    ValueError
        When the file is damaged or holds other values than the published ones.
    ImportError
        When a download is needed and pooch is not installed.

    Notes
    -----
    Source: UCI Machine Learning Repository, id 229, https://doi.org/10.24432/C5T30C.
    Licence: CC BY 4.0.

    Examples
    --------
    >>> skin = load_skin("my_data")  # doctest: +SKIP
    >>> skin.X.shape, skin.y.sum()  # doctest: +SKIP
    ((245057, 3), 50859)
    """
    source = _SKIN

    def _rows(path: Path) -> pd.DataFrame:
        if path.suffix == ".npz":
            X, y = _read_arrays(path, ["X", "y"])
            _check_shape(X, (source.n_rows, 3), "X")
            _check_shape(y, (source.n_rows,), "y")
            table = np.column_stack([X, y])
        else:
            table = _read_numbers(_read_bytes(path, "Skin_NonSkin.txt"), r"\s+")
            _check_shape(table, (source.n_rows, 4), "a table")
        _check_integers(table[:, :3], 0, 255, "colours")
        _check_integers(table[:, 3], 1, 2, "classes")
        table = table.astype(np.uint8, order="C")
        found = hashlib.sha256(table.tobytes()).hexdigest()
        if found != _SKIN_VALUES_SHA256:
            raise ValueError(
                f"found values with SHA-256 {found}, expected the published ones with "
                f"SHA-256 {_SKIN_VALUES_SHA256}"
            )
        return _features_and_target(source, table[:, :3], (table[:, 3] == 1).astype(np.uint8))

    located = _locate(source, data_home)
    return _dataset(source, _read(source, located, _rows), located.origin)


_COVERTYPE_QUANTITATIVE = (
    "Elevation",
    "Aspect",
    "Slope",
    "Horizontal_Distance_To_Hydrology",
    "Vertical_Distance_To_Hydrology",
    "Horizontal_Distance_To_Roadways",
    "Hillshade_9am",
    "Hillshade_Noon",
    "Hillshade_3pm",
    "Horizontal_Distance_To_Fire_Points",
)

_COVERTYPE_SAMPLE_FILE = "covertype_16pct.npz"
_COVERTYPE_SAMPLE_ROWS = 92_962

_COVERTYPE = _Source(
    name="covertype",
    loader="load_covertype",
    description=(
        "A row is a 30 m × 30 m cell of forest: terrain (metres, degrees, hillshade 0 to 255), "
        "4 wilderness areas and 40 soil types (0 or 1), and its cover type 1 to 7."
    ),
    source="https://archive.ics.uci.edu/dataset/31/covertype",
    licence="CC BY 4.0",
    citation=(
        "Blackard, J. (1998). Covertype. UCI Machine Learning Repository. "
        "https://doi.org/10.24432/C50K5N"
    ),
    target="Cover_Type",
    feature_names=(
        *_COVERTYPE_QUANTITATIVE,
        *(f"Wilderness_Area_{area}" for area in range(1, 5)),
        *(f"Soil_Type_{soil}" for soil in range(1, 41)),
    ),
    n_rows=581_012,
    contents=(
        f"54 integer columns and the cover type (1 to 7) in 581012 rows, or in "
        f"{_COVERTYPE_SAMPLE_ROWS} rows in {_COVERTYPE_SAMPLE_FILE}"
    ),
    files=("covtype.data.gz", "covtype.data", "covertype.zip", _COVERTYPE_SAMPLE_FILE),
    url="https://archive.ics.uci.edu/static/public/31/covertype.zip",
    known_hash=None,  # not known for certain: UCI publishes none for its zip files
)


def load_covertype(data_home: str | os.PathLike[str] | None = None) -> Dataset:
    """Covertype: the kind of forest, given the terrain.

    Cells of 30 m × 30 m in the Roosevelt National Forest, Colorado.

    Parameters
    ----------
    data_home : path, optional
        Folder with ``covtype.data.gz``, ``covtype.data`` or ``covertype.zip`` (all rows), or with
        ``covertype_16pct.npz`` (arrays X and y, a sample of 16%). The sample is taken from a
        folder that has nothing else. Without it, see the order of places at the head of the
        module.

    Returns
    -------
    Dataset
        ``name`` says which: ``"covertype"`` has n = 581012 rows, ``"covertype-16pct"`` has
        n = 92962. ``X`` is (n, 54) int16: 10 quantitative columns (elevation and distances in
        metres, aspect and slope in degrees, hillshade 0 to 255), then 44 indicators; ``y`` is
        (n,) uint8, the cover type 1 to 7. The quantitative columns of the sample were restored
        from scaled values and rounded.

    Raises
    ------
    DatasetUnavailableError
        When no folder has the file and the download fails.
    NotADirectoryError
        When ``data_home`` or ``PYMC_SGMCMC_DATA`` is not a folder.
    ValueError
        When the file is damaged or has another shape or other values than expected.
    ImportError
        When a download is needed and pooch is not installed.

    Notes
    -----
    Source: UCI Machine Learning Repository, id 31, https://doi.org/10.24432/C50K5N.
    Licence: CC BY 4.0.

    Examples
    --------
    >>> covertype = load_covertype()  # doctest: +SKIP
    >>> covertype.name, covertype.X.shape  # doctest: +SKIP
    ('covertype', (581012, 54))
    """
    source = _COVERTYPE

    def _rows(path: Path) -> pd.DataFrame:
        n_features = len(source.feature_names)
        if path.suffix == ".npz":
            X, y = _read_arrays(path, ["X", "y"])
            _check_shape(X, (_COVERTYPE_SAMPLE_ROWS, n_features), "X")
            _check_shape(y, (_COVERTYPE_SAMPLE_ROWS,), "y")
        else:
            table = _read_numbers(_read_bytes(path, _covertype_member(path)), ",")
            _check_shape(table, (source.n_rows, n_features + 1), "a table")
            X, y = table[:, :-1], table[:, -1]
        n_quantitative = len(_COVERTYPE_QUANTITATIVE)
        _check_integers(X[:, :n_quantitative], -1_000, 10_000, "quantitative columns")
        _check_integers(X[:, n_quantitative:], 0, 1, "indicator columns")
        _check_integers(y, 1, 7, "cover types")
        return _features_and_target(source, X.astype(np.int16), y.astype(np.uint8))

    located = _locate(source, data_home)
    facts = _facts(source)
    if located.path.name == _COVERTYPE_SAMPLE_FILE:
        facts["name"] = "covertype-16pct"
        facts["description"] += " A sample of 16% of the rows."
    return Dataset(frame=_read(source, located, _rows), origin=located.origin, **facts)


def _covertype_member(path: Path) -> str:
    # UCI's zip holds the gzip file, as it has lain on their server since 1998.
    return "covtype.data.gz" if path.suffix == ".zip" else path.name


CodRnaSubset = Literal["train", "test"]

_COD_RNA_FEATURES = (
    "ten_times_free_energy",
    "shorter_length",
    "a_frequency_1",
    "u_frequency_1",
    "c_frequency_1",
    "a_frequency_2",
    "u_frequency_2",
    "c_frequency_2",
)


def _cod_rna_source(subset: CodRnaSubset, file_name: str, n_rows: int) -> _Source:
    return _Source(
        name=f"cod-rna-{subset}",
        loader="load_cod_rna",
        description=(
            "A row is a pair of aligned sequences: ten times the change of free energy that "
            "Dynalign predicts, the length of the shorter sequence, and the frequencies of A, U "
            "and C in each; 1 = non-coding RNA, 0 = not."
        ),
        source="https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html",
        licence="none stated by the LIBSVM site",
        citation=(
            "Uzilov, A. V., Keegan, J. M. and Mathews, D. H. (2006). Detection of non-coding RNAs "
            "on the basis of predicted secondary structure formation free energy change. BMC "
            "Bioinformatics 7:173. https://doi.org/10.1186/1471-2105-7-173"
        ),
        target="non_coding",
        feature_names=_COD_RNA_FEATURES,
        n_rows=n_rows,
        contents=f"{n_rows} rows in svmlight format, labels -1 or +1 and feature indices 1 to 8",
        files=(file_name,),
        url=f"https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/{file_name}",
        known_hash=None,  # not known for certain: the LIBSVM site publishes none
    )


_COD_RNA: dict[str, _Source] = {
    "train": _cod_rna_source("train", "cod-rna", 59_535),
    "test": _cod_rna_source("test", "cod-rna.t", 271_617),
}


def load_cod_rna(
    data_home: str | os.PathLike[str] | None = None, *, subset: CodRnaSubset = "train"
) -> Dataset:
    """Non-coding RNA: detection from the free energy of folding.

    Parameters
    ----------
    data_home : path, optional
        Folder with ``cod-rna`` (train) or ``cod-rna.t`` (test) in svmlight format. Without it,
        see the order of places at the head of the module.
    subset : {"train", "test"}, default "train"
        Which of the two files of the LIBSVM site.

    Returns
    -------
    Dataset
        ``X`` is (59535, 8) float64 for ``"train"``, (271617, 8) for ``"test"``, unscaled: ten
        times the free energy change computed by Dynalign, the length of the shorter sequence in
        nucleotides, the frequencies of A, U and C in each of the two sequences. ``y`` is int8,
        1 where the file has the label +1 (non-coding RNA), 0 where it has -1.

    Raises
    ------
    DatasetUnavailableError
        When no folder has the file and the download fails.
    NotADirectoryError
        When ``data_home`` or ``PYMC_SGMCMC_DATA`` is not a folder.
    ValueError
        When ``subset`` is neither, or the file is damaged or has another shape than expected.
    ImportError
        When a download is needed and pooch is not installed.

    Notes
    -----
    Source: Uzilov, Keegan and Mathews (2006), BMC Bioinformatics 7:173, as prepared for the
    LIBSVM site. Licence: none stated.

    Examples
    --------
    >>> cod_rna = load_cod_rna(subset="test")  # doctest: +SKIP
    >>> cod_rna.X.shape  # doctest: +SKIP
    (271617, 8)
    """
    _check_choice("subset", subset, get_args(CodRnaSubset))
    source = _COD_RNA[subset]

    def _rows(path: Path) -> pd.DataFrame:
        X, labels = _read_svmlight(path.read_bytes(), len(source.feature_names))
        _check_shape(X, (source.n_rows, len(source.feature_names)), "features")
        found = np.unique(labels)
        if not np.isin(found, [-1, 1]).all():
            raise ValueError(f"found the labels {found.tolist()}, expected -1 and 1")
        return _features_and_target(source, X, (labels == 1).astype(np.int8))

    located = _locate(source, data_home)
    return _dataset(source, _read(source, located, _rows), located.origin)


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} should be one of {list(choices)} but got {value!r}.")


def _read_svmlight(content: bytes, n_features: int) -> tuple[np.ndarray, np.ndarray]:
    """Read lines ``label index:value …``, indices from 1; a feature left out is 0."""
    lines = [fields for line in content.splitlines() if (fields := line.split())]
    X = np.zeros((len(lines), n_features))
    labels = np.empty(len(lines))
    for row, (label, *items) in enumerate(lines):
        labels[row] = float(label)
        for item in items:
            index, _, value = item.partition(b":")
            if not 1 <= int(index) <= n_features:
                raise ValueError(
                    f"found the feature index {int(index)} in row {row + 1}, "
                    f"expected 1 to {n_features}"
                )
            X[row, int(index) - 1] = float(value)
    return X, labels


_RUN_OR_WALK_SENSORS = (
    "acceleration_x",
    "acceleration_y",
    "acceleration_z",
    "gyro_x",
    "gyro_y",
    "gyro_z",
)

_RUN_OR_WALK = _Source(
    name="run-or-walk",
    loader="load_run_or_walk",
    description=(
        "A row is one reading of the sensors of a telephone on a wrist; activity 1 = running, "
        "0 = walking; wrist 0 = left, 1 = right."
    ),
    source="https://www.kaggle.com/datasets/vmalyi/run-or-walk",
    licence="see its page at Kaggle",
    citation="Malyi, V. (2017). Run or Walk. Kaggle.",
    target="activity",
    feature_names=_RUN_OR_WALK_SENSORS,
    n_rows=88_588,
    contents="88588 rows with the sensors, the wrist and the activity (0 or 1)",
    files=("run_or_walk.csv", "run-or-walk.zip", "dataset.csv"),
    url=None,  # Kaggle gives its files to people with an account only
)


def load_run_or_walk(data_home: str | os.PathLike[str] | None = None) -> Dataset:
    """Run or walk: what a person does, given accelerometer and gyroscope.

    Kaggle gives no file without an account, so this data set is read from a folder only:
    download it by hand from https://www.kaggle.com/datasets/vmalyi/run-or-walk.

    Parameters
    ----------
    data_home : path, optional
        Folder with ``dataset.csv`` (its name at Kaggle), ``run_or_walk.csv`` (the same file) or
        ``run-or-walk.zip`` (with ``dataset.csv`` in it). Without it, the folder named by
        ``PYMC_SGMCMC_DATA``.

    Returns
    -------
    Dataset
        ``X`` is (88588, 6) float64: three axes of acceleration and three of rotation, in the
        units of the file; ``y`` is (88588,) int8, 1 = running and 0 = walking. The frame has the
        date, time, user name and wrist (0 = left, 1 = right) as well.

    Raises
    ------
    DatasetUnavailableError
        When no folder has the file.
    NotADirectoryError
        When ``data_home`` or ``PYMC_SGMCMC_DATA`` is not a folder.
    ValueError
        When the file is damaged or has other columns or rows than expected.

    Notes
    -----
    Source: Viktor Malyi, Run or Walk, Kaggle. Licence: see its page there.

    Examples
    --------
    >>> run_or_walk = load_run_or_walk("my_data")  # doctest: +SKIP
    >>> run_or_walk.X.shape  # doctest: +SKIP
    (88588, 6)
    """
    source = _RUN_OR_WALK
    columns = ("date", "time", "username", "wrist", "activity", *source.feature_names)

    def _rows(path: Path) -> pd.DataFrame:
        frame = pd.read_csv(io.BytesIO(_read_bytes(path, "dataset.csv")))
        frame = _check_frame(frame, columns, source.n_rows)
        both = {0: 0, 1: 1}
        return frame.assign(
            activity=_recode(frame["activity"], both), wrist=_recode(frame["wrist"], both)
        )

    located = _locate(source, data_home)
    return _dataset(source, _read(source, located, _rows), located.origin)


# --------------------------------------------------------------------------------------------------
# Ratings and words
# --------------------------------------------------------------------------------------------------

MovieLensSize = Literal["100k", "1m"]


def _movielens_source(size: MovieLensSize, file_name: str, n_rows: int, md5: str) -> _Source:
    return _Source(
        name=f"movielens-{size}",
        loader="load_movielens",
        description="A row is a rating, 1 to 5 stars, of a movie by a user, with its Unix time.",
        source=f"https://grouplens.org/datasets/movielens/{size}/",
        licence=(
            "GroupLens: for research, with acknowledgement; no redistribution and no commercial "
            "use without permission"
        ),
        citation=(
            "Harper, F. M. and Konstan, J. A. (2015). The MovieLens Datasets: History and Context. "
            "ACM Transactions on Interactive Intelligent Systems 5(4):19. "
            "https://doi.org/10.1145/2827872"
        ),
        target="rating",
        feature_names=("user", "movie"),
        group_names=("user", "movie"),
        n_rows=n_rows,
        contents=f"{n_rows} rows of user, movie, rating (1 to 5) and Unix time",
        files=(file_name, f"ml-{size}.zip"),
        url=f"https://files.grouplens.org/datasets/movielens/ml-{size}.zip",
        known_hash=f"md5:{md5}",  # the one that GroupLens publishes next to the file
    )


_MOVIELENS: dict[str, _Source] = {
    "100k": _movielens_source(
        "100k", "ml-100k/u.data", 100_000, "0e33842e24a9c977be4e0107933c0723"
    ),
    "1m": _movielens_source(
        "1m", "ml-1m/ratings.dat", 1_000_209, "c4d9eecfca2ab87c1945afe126590906"
    ),
}


def load_movielens(
    data_home: str | os.PathLike[str] | None = None, *, size: MovieLensSize = "100k"
) -> Dataset:
    """MovieLens: ratings of movies by users.

    **The data may not be redistributed.** GroupLens allows their use for research and asks for
    acknowledgement; passing them on, or any commercial use, needs their permission. This loader
    only fetches them from GroupLens for the person who calls it.

    Parameters
    ----------
    data_home : path, optional
        Folder with ``ml-100k.zip`` or ``ml-1m.zip``, or with such a file unpacked
        (``ml-100k/u.data``, ``ml-1m/ratings.dat``). Without it, see the order of places at the
        head of the module.
    size : {"100k", "1m"}, default "100k"
        100 000 ratings by 943 users, or 1 000 209 ratings by 6040 users.

    Returns
    -------
    Dataset
        Columns user and movie (numbers from 1, as in the file), rating (1 to 5 stars) and
        timestamp (seconds since 1970 UTC), all int64. ``X`` is (n, 2), user and movie; ``y`` is
        (n,), the rating.

    Raises
    ------
    DatasetUnavailableError
        When no folder has the file and the download fails.
    NotADirectoryError
        When ``data_home`` or ``PYMC_SGMCMC_DATA`` is not a folder.
    ValueError
        When ``size`` is neither, or the file is damaged or has another shape than expected.
    ImportError
        When a download is needed and pooch is not installed.

    Notes
    -----
    Source: GroupLens, University of Minnesota; Harper and Konstan (2015),
    https://doi.org/10.1145/2827872. Licence: see above.

    Examples
    --------
    >>> movielens = load_movielens(size="1m")  # doctest: +SKIP
    >>> len(movielens.frame)  # doctest: +SKIP
    1000209
    """
    _check_choice("size", size, get_args(MovieLensSize))
    source = _MOVIELENS[size]
    columns = ["user", "movie", "rating", "timestamp"]

    def _rows(path: Path) -> pd.DataFrame:
        content = _read_bytes(path, PurePosixPath(source.files[0]).name)
        # pandas' fast reader takes one character between fields, the larger file has "::".
        table = _read_numbers(content.replace(b"::", b"\t"), "\t")
        _check_shape(table, (source.n_rows, len(columns)), "a table")
        _check_integers(table[:, 2], 1, 5, "ratings")
        return pd.DataFrame(table, columns=columns)

    located = _locate(source, data_home)
    return _dataset(source, _read(source, located, _rows), located.origin)


_AP_DOCUMENTS = 2_246
_AP_WORDS = 10_473

_AP = _Source(
    name="ap",
    loader="load_ap",
    description="A row is a word in a document of the Associated Press, with its count there.",
    source="https://github.com/blei-lab/lda-c",
    licence=(
        "sample data of lda-c, whose code is under the LGPL 2.1; none stated for the text, which "
        "is the Associated Press's"
    ),
    citation=(
        "Blei, D. M., Ng, A. Y. and Jordan, M. I. (2003). Latent Dirichlet Allocation. Journal of "
        "Machine Learning Research 3:993-1022."
    ),
    target=None,
    feature_names=("document", "word", "count"),
    n_rows=302_031,
    contents=f"302031 counts of {_AP_WORDS} words in {_AP_DOCUMENTS} documents",
    files=("ap.npz", "ap.tgz"),
    # At one commit, so that the hash stays right whatever is changed later.
    url=(
        "https://raw.githubusercontent.com/blei-lab/lda-c/"
        "0c46575e89092683010db077f713f8aa3b3594a2/example/ap.tgz"
    ),
    known_hash="sha256:92cbe192631874708540db11969211363cf2f5c0a56b2897e0229925e5d4f2a3",
)


def load_ap(data_home: str | os.PathLike[str] | None = None) -> Corpus:
    """Associated Press corpus: word counts of 2246 news reports.

    Parameters
    ----------
    data_home : path, optional
        Folder with ``ap.npz`` (arrays doc, word, count and vocab) or ``ap.tgz`` (lda-c format).
        Without it, see the order of places at the head of the module.

    Returns
    -------
    Corpus
        The frame has 302031 rows and int64 columns document (0 to 2245), word (0 to 10472) and
        count (1 or more); ``vocabulary`` has the 10473 words. There is no target.

    Raises
    ------
    DatasetUnavailableError
        When no folder has the file and the download fails.
    NotADirectoryError
        When ``data_home`` or ``PYMC_SGMCMC_DATA`` is not a folder.
    ValueError
        When the file is damaged or has another shape or other values than expected.
    ImportError
        When a download is needed and pooch is not installed.

    Notes
    -----
    Source: sample data of https://github.com/blei-lab/lda-c, used in Blei, Ng and Jordan (2003),
    JMLR 3:993-1022. Licence: none stated for the text; the code of lda-c is under the LGPL 2.1.

    Examples
    --------
    >>> ap = load_ap()  # doctest: +SKIP
    >>> ap.n_documents, len(ap.vocabulary), ap.frame["count"].sum()  # doctest: +SKIP
    (2246, 10473, 435838)
    """
    source = _AP

    def _rows(path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
        if path.suffix == ".npz":
            *triplets, words = _read_arrays(path, ["doc", "word", "count", "vocab"])
            for name, column in zip(("doc", "word", "count"), triplets, strict=True):
                _check_shape(column, (source.n_rows,), name)
            table = np.column_stack(triplets)
            vocabulary = tuple(words.tolist())
        else:
            table = _read_lda_c(_read_bytes(path, "ap.dat"))
            vocabulary = tuple(_read_bytes(path, "vocab.txt").decode().split())
        _check_shape(table, (source.n_rows, 3), "a table")
        if len(vocabulary) != _AP_WORDS:
            raise ValueError(f"found {len(vocabulary)} words, expected {_AP_WORDS}")
        _check_integers(table[:, 0], 0, _AP_DOCUMENTS - 1, "document numbers")
        _check_integers(table[:, 1], 0, _AP_WORDS - 1, "word numbers")
        _check_integers(table[:, 2], 1, 1_000, "counts")
        return table.astype(np.int64), vocabulary

    located = _locate(source, data_home)
    table, vocabulary = _read(source, located, _rows)
    return Corpus(
        frame=pd.DataFrame(table, columns=list(source.feature_names)),
        origin=located.origin,
        vocabulary=vocabulary,
        n_documents=_AP_DOCUMENTS,
        **_facts(source),
    )


def _read_lda_c(content: bytes) -> np.ndarray:
    """Read lines ``n word:count …``, one a document, into rows (document, word, count)."""
    rows = []
    for document, line in enumerate(content.splitlines()):
        n_items, *items = line.split()
        if int(n_items) != len(items):
            raise ValueError(
                f"found {len(items)} words in line {document + 1}, expected {int(n_items)}"
            )
        for item in items:
            word, _, count = item.partition(b":")
            rows.append((document, int(word), int(count)))
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


# --------------------------------------------------------------------------------------------------
# Tables for mixed models
# --------------------------------------------------------------------------------------------------


def _r_source(package: str, file_name: str, sha256: str, **facts: Any) -> _Source:
    """Describe a data set of an R package, as a CSV file of Rdatasets."""
    columns = [*facts["feature_names"], *facts["group_names"], facts["target"]]
    # At one commit, so that the hash stays right whatever is changed later.
    commit = "1dcc2bf5f955cc1224a3e1307256e1fe86b68dae"
    repository = "https://raw.githubusercontent.com/vincentarelbundock/Rdatasets"
    return _Source(
        source=f"https://vincentarelbundock.github.io/Rdatasets/doc/{package}/"
        f"{file_name.removesuffix('.csv')}.html",
        licence=f"GPL, as the R package {package} that carries it; none stated for the data alone",
        contents=f"{facts['n_rows']} rows with the columns {', '.join(columns)} and others",
        files=(file_name,),
        url=f"{repository}/{commit}/csv/{package}/{file_name}",
        known_hash=f"sha256:{sha256}",
        **facts,
    )


def _load_r_table(
    source: _Source,
    data_home: str | os.PathLike[str] | None,
    columns: Sequence[str],
    prepare: Callable[[pd.DataFrame], pd.DataFrame] = lambda frame: frame,
) -> Dataset:
    def _rows(path: Path) -> pd.DataFrame:
        frame = pd.read_csv(path)
        # R's row names, with the header that Rdatasets gives them or with none.
        frame = frame.drop(columns=["rownames", "Unnamed: 0"], errors="ignore")
        return prepare(_check_frame(frame, columns, source.n_rows))

    located = _locate(source, data_home)
    return _dataset(source, _read(source, located, _rows), located.origin)


_SLEEPSTUDY = _r_source(
    "lme4",
    "sleepstudy.csv",
    "20922ddc87d538bf2344f73d49000eeb2d7e14934b6191a3e071fefc329942c4",
    name="sleepstudy",
    loader="load_sleepstudy",
    description=(
        "A row is a day of a subject deprived of sleep: mean reaction time in milliseconds, day "
        "0 to 9. Sleep deprivation starts after day 2."
    ),
    citation=(
        "Belenky, G. et al. (2003). Patterns of performance degradation and restoration during "
        "sleep restriction and subsequent recovery. Journal of Sleep Research 12:1-12. "
        "https://doi.org/10.1046/j.1365-2869.2003.00337.x"
    ),
    target="Reaction",
    feature_names=("Days",),
    group_names=("Subject",),
    n_rows=180,
)


def load_sleepstudy(data_home: str | os.PathLike[str] | None = None) -> Dataset:
    """Reaction times of 18 subjects over ten days of sleep deprivation.

    Parameters
    ----------
    data_home : path, optional
        Folder with ``sleepstudy.csv``. Without it, see the order of places at the head of the
        module.

    Returns
    -------
    Dataset
        180 rows: Reaction (the target, milliseconds), Days (0 to 9), Subject (the group).

    Raises
    ------
    DatasetUnavailableError
        When no folder has the file and the download fails.
    NotADirectoryError
        When ``data_home`` or ``PYMC_SGMCMC_DATA`` is not a folder.
    ValueError
        When the file is damaged or has other columns or rows than expected.
    ImportError
        When a download is needed and pooch is not installed.

    Notes
    -----
    Source: Belenky et al. (2003), from the R package lme4 by way of Rdatasets. Licence: GPL, as
    the package; none stated for the data alone.

    Examples
    --------
    >>> sleepstudy = load_sleepstudy()  # doctest: +SKIP
    >>> sleepstudy.frame.groupby("Subject").size().unique()  # doctest: +SKIP
    array([10])
    """
    return _load_r_table(_SLEEPSTUDY, data_home, ["Reaction", "Days", "Subject"])


_CBPP = _r_source(
    "lme4",
    "cbpp.csv",
    "8919ad586aabfa75fa3b3ece7ad7b398c7b31bf17467f17c304cbec86afa910a",
    name="cbpp",
    loader="load_cbpp",
    description=(
        "A row is a herd of cattle in a period: new cases of contagious bovine pleuropneumonia "
        "(incidence) among its animals (size)."
    ),
    citation=(
        "Lesnoff, M. et al. (2004). Within-herd spread of contagious bovine pleuropneumonia in "
        "Ethiopian highlands. Preventive Veterinary Medicine 64:27-40. "
        "https://doi.org/10.1016/j.prevetmed.2004.03.005"
    ),
    target="incidence",
    feature_names=("period", "size"),
    group_names=("herd",),
    n_rows=56,
)


def load_cbpp(data_home: str | os.PathLike[str] | None = None) -> Dataset:
    """Cases of contagious bovine pleuropneumonia in 15 herds over four periods.

    Parameters
    ----------
    data_home : path, optional
        Folder with ``cbpp.csv``. Without it, see the order of places at the head of the module.

    Returns
    -------
    Dataset
        56 rows: incidence (the target, new cases), size (animals at the start of the period, the
        number of trials of a binomial model), period (1 to 4, a category), herd (the group, 1 to
        15).

    Raises
    ------
    DatasetUnavailableError
        When no folder has the file and the download fails.
    NotADirectoryError
        When ``data_home`` or ``PYMC_SGMCMC_DATA`` is not a folder.
    ValueError
        When the file is damaged or has other columns or rows than expected.
    ImportError
        When a download is needed and pooch is not installed.

    Notes
    -----
    Source: Lesnoff et al. (2004), from the R package lme4 by way of Rdatasets. Licence: GPL, as
    the package; none stated for the data alone.

    Examples
    --------
    >>> cbpp = load_cbpp()  # doctest: +SKIP
    >>> cbpp.frame[["incidence", "size"]].sum().tolist()  # doctest: +SKIP
    [99, 842]
    """
    return _load_r_table(_CBPP, data_home, ["herd", "incidence", "size", "period"])


_CONTRACEPTION = _r_source(
    "mlmRev",
    "Contraception.csv",
    "dd76de5f4f1fb57081b01ef0f81581cd928ad545d13feb8bf7d337d71e690034",
    name="contraception",
    loader="load_contraception",
    description=(
        "A row is a woman asked in the Bangladesh Fertility Survey: use of contraception (1 = yes, "
        "0 = no), living children, age in years less its mean, town (urban 1) or country (0)."
    ),
    citation=(
        "Huq, N. M. and Cleland, J. (1990). Bangladesh Fertility Survey 1989 (Main Report). Dhaka: "
        "National Institute of Population Research and Training."
    ),
    target="use",
    feature_names=("livch", "age", "urban"),
    group_names=("district",),
    n_rows=1_934,
)


def load_contraception(data_home: str | os.PathLike[str] | None = None) -> Dataset:
    """Use of contraception by 1934 women in 60 districts of Bangladesh.

    Parameters
    ----------
    data_home : path, optional
        Folder with ``Contraception.csv``. Without it, see the order of places at the head of the
        module.

    Returns
    -------
    Dataset
        1934 rows: woman (a number), district (the group), use (the target, 1 = yes and 0 = no),
        livch (living children, ordered categories "0", "1", "2", "3+"), age (years, centred),
        urban (1 = town, 0 = country). The file has Y and N for use and urban. ``X`` asks for
        livch to be encoded first.

    Raises
    ------
    DatasetUnavailableError
        When no folder has the file and the download fails.
    NotADirectoryError
        When ``data_home`` or ``PYMC_SGMCMC_DATA`` is not a folder.
    ValueError
        When the file is damaged or has other columns, rows or values than expected.
    ImportError
        When a download is needed and pooch is not installed.

    Notes
    -----
    Source: Huq and Cleland (1990), from the R package mlmRev by way of Rdatasets. Licence: GPL,
    as the package; none stated for the data alone.

    Examples
    --------
    >>> contraception = load_contraception()  # doctest: +SKIP
    >>> contraception.y.mean()  # doctest: +SKIP
    0.392
    """

    def _prepare(frame: pd.DataFrame) -> pd.DataFrame:
        yes_or_no = {"N": 0, "Y": 1}
        return frame.assign(
            use=_recode(frame["use"], yes_or_no),
            urban=_recode(frame["urban"], yes_or_no),
            livch=_categories(frame["livch"], ["0", "1", "2", "3+"], ordered=True),
        )

    columns = ["woman", "district", "use", "livch", "age", "urban"]
    return _load_r_table(_CONTRACEPTION, data_home, columns, _prepare)


_EPIL = _r_source(
    "MASS",
    "epil.csv",
    "6d4aded9dda1c8cd051d370ce77816264c972e773417e62cfad3d061d3083a99",
    name="epil",
    loader="load_epil",
    description=(
        "A row is two weeks of an epileptic: seizures (y), treatment, seizures in the eight weeks "
        "before (base; lbase its centred logarithm), age in years (lage its centred logarithm), "
        "period 1 to 4 (V4 marks the fourth)."
    ),
    citation=(
        "Thall, P. F. and Vail, S. C. (1990). Some covariance models for longitudinal count data "
        "with over-dispersion. Biometrics 46:657-671."
    ),
    target="y",
    feature_names=("trt", "base", "age", "V4", "period", "lbase", "lage"),
    group_names=("subject",),
    n_rows=236,
)


def load_epil(data_home: str | os.PathLike[str] | None = None) -> Dataset:
    """Seizures of 59 epileptics over four periods of two weeks.

    Parameters
    ----------
    data_home : path, optional
        Folder with ``epil.csv``. Without it, see the order of places at the head of the module.

    Returns
    -------
    Dataset
        236 rows: y (the target, seizures in two weeks), trt (categories "placebo" and
        "progabide"), base (seizures in eight weeks before), age (years), V4 (1 in period 4),
        subject (the group, 1 to 59), period (1 to 4), lbase and lage (centred logarithms). ``X``
        asks for trt to be encoded first.

    Raises
    ------
    DatasetUnavailableError
        When no folder has the file and the download fails.
    NotADirectoryError
        When ``data_home`` or ``PYMC_SGMCMC_DATA`` is not a folder.
    ValueError
        When the file is damaged or has other columns, rows or values than expected.
    ImportError
        When a download is needed and pooch is not installed.

    Notes
    -----
    Source: Thall and Vail (1990), from the R package MASS by way of Rdatasets. Licence: GPL, as
    the package; none stated for the data alone.

    Examples
    --------
    >>> epil = load_epil()  # doctest: +SKIP
    >>> epil.frame["subject"].nunique()  # doctest: +SKIP
    59
    """

    def _prepare(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(trt=_categories(frame["trt"], ["placebo", "progabide"]))

    columns = ["y", "trt", "base", "age", "V4", "subject", "period", "lbase", "lage"]
    return _load_r_table(_EPIL, data_home, columns, _prepare)


_SALAMANDER = _r_source(
    "lme4",
    "salamander.csv",
    "9d7020ab11ba49b046820fc90cbe0e6b417664293789554ef7fc9ee8931c9d41",
    name="salamander",
    loader="load_salamander",
    description=(
        "A row is a pair of mountain dusky salamanders: did they mate (1) or not (0), given the "
        "population of each, rough butt (R) or white side (W)."
    ),
    citation=(
        "McCullagh, P. and Nelder, J. A. (1989). Generalized Linear Models, second edition. "
        "Chapman and Hall, section 14.5."
    ),
    target="Mate",
    feature_names=("Season", "Experiment", "TypeM", "TypeF", "Cross"),
    group_names=("Male", "Female"),
    n_rows=360,
)


def load_salamander(data_home: str | os.PathLike[str] | None = None) -> Dataset:
    """Mating of salamanders of two populations: two crossed groups, 60 males and 60 females.

    Parameters
    ----------
    data_home : path, optional
        Folder with ``salamander.csv``. Without it, see the order of places at the head of the
        module.

    Returns
    -------
    Dataset
        360 rows: Season (categories "Fall" and "Summer"), Experiment (1 to 3), TypeM and TypeF
        (categories "R" and "W"), Cross (categories "RR", "RW", "WR", "WW"), Male and Female (the
        groups, 1 to 60 each), Mate (the target, 1 = yes and 0 = no). The first letter of Cross is
        the type of the female. ``X`` asks for the categories to be encoded first.

    Raises
    ------
    DatasetUnavailableError
        When no folder has the file and the download fails.
    NotADirectoryError
        When ``data_home`` or ``PYMC_SGMCMC_DATA`` is not a folder.
    ValueError
        When the file is damaged or has other columns, rows or values than expected.
    ImportError
        When a download is needed and pooch is not installed.

    Notes
    -----
    Source: McCullagh and Nelder (1989), section 14.5, from the R package lme4 by way of
    Rdatasets. Licence: GPL, as the package; none stated for the data alone.

    Examples
    --------
    >>> salamander = load_salamander()  # doctest: +SKIP
    >>> salamander.frame.groupby("Cross", observed=True)["Mate"].size().tolist()  # doctest: +SKIP
    [90, 90, 90, 90]
    """

    def _prepare(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(
            Season=_categories(frame["Season"], ["Fall", "Summer"]),
            TypeM=_categories(frame["TypeM"], ["R", "W"]),
            TypeF=_categories(frame["TypeF"], ["R", "W"]),
            Cross=_categories(frame["Cross"], ["RR", "RW", "WR", "WW"]),
            Mate=_recode(frame["Mate"], {0: 0, 1: 1}),
        )

    columns = ["Season", "Experiment", "TypeM", "TypeF", "Cross", "Male", "Female", "Mate"]
    return _load_r_table(_SALAMANDER, data_home, columns, _prepare)


# --------------------------------------------------------------------------------------------------
# Tables inside statsmodels
# --------------------------------------------------------------------------------------------------


def _load_statsmodels(name: str, **facts: Any) -> Dataset:
    module = _import_optional(f"statsmodels.datasets.{name}", "datasets", f"The data set {name}")
    frame = module.load_pandas().data
    features = tuple(column for column in frame.columns if column != facts["target"])
    return Dataset(
        name=name,
        frame=frame,
        feature_names=features,
        source=f"https://www.statsmodels.org/stable/datasets/generated/{name}.html",
        origin="package statsmodels",
        **facts,
    )


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

    Raises
    ------
    ImportError
        When statsmodels is not installed.

    Notes
    -----
    Source: RAND Corporation; Cameron and Trivedi (2005), Microeconometrics. Licence: public
    domain, as statsmodels states.

    Examples
    --------
    >>> from pymc_sgmcmc.datasets import load_randhie
    >>> randhie = load_randhie()
    >>> randhie.X.shape
    (20190, 9)
    >>> float(randhie.y.mean())
    2.86
    """
    return _load_statsmodels(
        "randhie",
        target="mdvis",
        description=(
            "A row is a person in a year: visits to a doctor (mdvis), given the terms of the "
            "insurance and the state of health."
        ),
        licence="public domain",
        citation=(
            "Cameron, A. C. and Trivedi, P. K. (2005). Microeconometrics: Methods and "
            "Applications. Cambridge University Press."
        ),
    )


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

    Raises
    ------
    ImportError
        When statsmodels is not installed.

    Notes
    -----
    Source: Fair (1978), Journal of Political Economy 86:45-61. Licence: in statsmodels with the
    permission of the author.

    Examples
    --------
    >>> from pymc_sgmcmc.datasets import load_fair
    >>> fair = load_fair()
    >>> fair.X.shape
    (6366, 8)
    >>> float((fair.y > 0).mean())
    0.322
    """
    return _load_statsmodels(
        "fair",
        target="affairs",
        description=(
            "A row is a woman: a measure of the time she spends in affairs, given her marriage, "
            "age, children, religion, education and occupations."
        ),
        licence="in statsmodels with the permission of the author",
        citation=(
            "Fair, R. C. (1978). A Theory of Extramarital Affairs. Journal of Political Economy "
            "86:45-61."
        ),
    )


# --------------------------------------------------------------------------------------------------
# A user's own table
# --------------------------------------------------------------------------------------------------


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
