"""Finding the file of a data set: in a user's folder, in the cache, or at its official home."""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from pymc_sgmcmc.checks import import_optional, one_of
from pymc_sgmcmc.datasets.dataset import Dataset, DatasetUnavailableError
from pymc_sgmcmc.datasets.reading import read
from pymc_sgmcmc.datasets.registry import REGISTRY, Entry
from pymc_sgmcmc.errors import warn

FOLDER_VARIABLE = "PYMC_SGMCMC_DATA"
"""This environment variable names a folder of data sets."""

DOWNLOAD_TIMEOUT = (10.0, 30.0)
"""A download fails after this many seconds without a connection, or between two packets. The whole
download may take as long as it needs, so these bounds are patient with a slow server and still end
the wait for one that does not answer."""

UNREADABLE = (
    ValueError,
    LookupError,
    EOFError,
    zipfile.BadZipFile,
    tarfile.TarError,
    shutil.ReadError,
    gzip.BadGzipFile,
    zlib.error,
)
"""Readers raise these errors on a damaged file, and the message then names the file and the remedy.
Other errors, such as a lack of permission, already name the file."""


def load(name: str, data_home: str | os.PathLike[str] | None = None) -> Dataset:
    """Load a public data set.

    Parameters
    ----------
    name : str
        One of those that `pymc_sgmcmc.datasets` lists.
    data_home : path, optional
        Folder with the file of the data set, which tables inside statsmodels do not need. Where not
        given, the places that `pymc_sgmcmc.datasets` lists are searched in order.

    Returns
    -------
    Dataset
        A frame with features, target, and what is known of them. Where a folder has only the sample
        of ``"covertype"``, its ``name`` is ``"covertype-16pct"``.

    Raises
    ------
    ImportError
        When a package is needed that is not installed.
    DatasetUnavailableError
        When no folder has the file and it could not be downloaded.
    NotADirectoryError
        When ``data_home`` or ``PYMC_SGMCMC_DATA`` is not a folder.
    ValueError
        When the name is unknown, or the file does not hold what it should.

    Examples
    --------
    >>> from pymc_sgmcmc.datasets import load
    >>> randhie = load("randhie")
    >>> randhie.X.shape
    (20190, 9)
    >>> float(randhie.y.mean())
    2.86
    """
    entry = REGISTRY[one_of("name", name, tuple(REGISTRY))]
    if entry.format == "statsmodels":
        module = import_optional(f"statsmodels.datasets.{name}", "datasets", f"The data set {name}")
        return Dataset(frame=module.load_pandas().data, origin="package statsmodels", **entry.facts)
    entry, path, origin = _find(entry, data_home)
    try:
        with _unpacked(path, entry.member) as file:
            frame, vocabulary = read(file, entry)
    except UNREADABLE as error:
        remedy = "Delete it to download it again."
        if origin.startswith("folder"):
            remedy = f"Replace it by the original from {entry.source}, or remove it."
        raise ValueError(f"{name}: the file {path} cannot be used: {error}. {remedy}") from error
    return Dataset(frame=frame, vocabulary=vocabulary, origin=origin, **entry.facts)


def _find(entry: Entry, data_home: str | os.PathLike[str] | None) -> tuple[Entry, Path, str]:
    """The first file in the search order, its place, and the entry, which may be of a sample.

    A user's folder is not given to pooch as its cache (argument `env`). pooch would replace a
    converted file, whose hash is not that of the download, and the folder may be read-only.
    """
    searched = []
    given = {"data_home": data_home, FOLDER_VARIABLE: os.environ.get(FOLDER_VARIABLE)}
    for name, value in given.items():
        if not value:
            continue
        folder = Path(value).expanduser()
        if not folder.is_dir():
            # Going on to the next place would hide a misspelt path behind a download.
            raise NotADirectoryError(
                f"{name} should be an existing folder, but is {str(value)!r}. "
                "Correct it, create the folder, or leave it unset to download the data."
            )
        for each in (entry, *([REGISTRY[entry.sample]] if entry.sample else [])):
            for file_name in each.files:
                if (folder / file_name).is_file():
                    return each, folder / file_name, f"folder {folder}"
        searched.append(str(folder))
    return entry, *_download(entry, searched)


def _download(entry: Entry, searched: Sequence[str]) -> tuple[Path, str]:
    """Take a file from the cache of pooch, or download it into that cache."""
    absent = f"The data set {entry.name} is in no folder ({', '.join(searched) or 'none given'})"
    advice = (
        f"put {' or '.join(entry.files)} in a folder given as data_home or named by the "
        f"environment variable {FOLDER_VARIABLE}."
    )
    if not entry.url:
        raise DatasetUnavailableError(
            f"{absent}, and cannot be downloaded without an account. Download it by hand from "
            f"{entry.source}, and {advice}"
        )
    pooch = import_optional("pooch", "datasets", f"Downloading the data set {entry.name}")
    file_name = PurePosixPath(entry.url).name
    cache = pooch.create(
        path=pooch.os_cache("pymc_sgmcmc"),
        base_url="",
        registry={file_name: entry.known_hash},
        urls={file_name: entry.url},
    )
    try:
        path, action = cache.fetch(
            file_name,
            # Not streamed, because pooch leaves the connection of a failed stream open.
            downloader=pooch.HTTPDownloader(timeout=DOWNLOAD_TIMEOUT, stream=False),
            # pooch tells the processor alone whether it found the file in its cache.
            processor=lambda file, action, _: (file, action),
        )
    # requests' errors are OSErrors; pooch raises ValueError for a hash that does not match.
    except (OSError, ValueError) as error:
        raise DatasetUnavailableError(
            f"{absent}, and its download from {entry.url} failed: {type(error).__name__}: {error}. "
            f"Restore the connection, or {advice}"
        ) from error
    if action == "fetch":
        return Path(path), "cache"
    if entry.known_hash is None and entry.values_sha256 is None:
        warn(
            f"No hash of the data set {entry.name} is known, so its download from {entry.url} is "
            "not verified. Its shape and the ranges of its values are checked.",
            UserWarning,
        )
    return Path(path), "download"


@contextmanager
def _unpacked(path: Path, member: str) -> Iterator[Path]:
    """Path of a file, or of a member of an archive that is unpacked into a temporary folder.

    The processors of pooch are not used: they unpack beside the archive, where the folder may be
    read-only, and they keep files unpacked earlier even if the archive has changed since.
    """
    if path.suffix not in (".zip", ".tgz"):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        # Without the filter, which zip does not take, a tar archive may write outside the folder.
        shutil.unpack_archive(path, folder, filter=None if path.suffix == ".zip" else "data")
        file = next((file for file in Path(folder).rglob(member) if file.is_file()), None)
        if file is None:
            raise ValueError(f"found no file {member} in the archive")
        yield file
