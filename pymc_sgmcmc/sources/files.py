"""Files that must not change while rows are read from them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256

from pymc_sgmcmc.errors import RowsError

Stamp = tuple[int, int] | None
"""Size in bytes and time of the last change in nanoseconds, None where there is no file."""


def stamp(path: str | os.PathLike[str]) -> Stamp:
    """Size and time of the last change of a file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


@contextmanager
def unchanged(stamps: Mapping[str, Stamp]) -> Iterator[None]:
    """Read files in this context, before and after which they are as they were.

    Raises
    ------
    RowsError
        Where a file has another size or time, appeared or vanished.
    """
    _check(stamps)
    try:
        yield
    finally:  # also where reading failed, of which this may be the cause
        _check(stamps)


def _check(stamps: Mapping[str, Stamp]) -> None:
    for path, expected in stamps.items():
        found = stamp(path)
        if found != expected:
            happened = "vanished" if found is None else "changed"
            raise RowsError(
                f"The file {path} {happened} after it was opened, so the run cannot go on. Restore "
                "it, or open the rows and run again."
            )


def digest_of_files(stamps: Mapping[str, Stamp]) -> str:
    """Text that changes with names, sizes and times of files, but not with their folder."""
    digest = sha256()
    for path, each in stamps.items():
        digest.update(f"{os.path.basename(path)} {each}\n".encode())
    return digest.hexdigest()[:16]
