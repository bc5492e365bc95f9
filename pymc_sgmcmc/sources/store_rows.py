"""Files of the rows of a stream, from which rows can be read in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.sources.columns import check_names
from pymc_sgmcmc.sources.schema import (
    Schema,
    check_numbers,
    common_length,
    schema_of,
    without_missing,
)


def store_rows(
    batches: Iterable[Any], folder: str | Path, names: Sequence[str] | None = None
) -> dict[str, np.ndarray]:
    """Write the rows of a stream to files, in one pass, which are mapped into memory.

    A stream, such as a `DataLoader` of `pymc_extras`, is read from its beginning, while minibatches
    of a sampler are rows from anywhere. The files are ``NAME.npy``, which a later session maps by
    ``numpy.load(file, mmap_mode="r")``.

    Parameters
    ----------
    batches : iterable of mapping, pandas.DataFrame or numpy.ndarray
        Rows, any number at a time, each time with the same columns: arrays by name with rows along
        the first axis, or one array of shape (rows, columns). It should end after one pass over the
        data. Where it has an attribute ``total_size``, as a `DataLoader`, it should have so many
        rows.
    folder : str or pathlib.Path
        Is made where it does not exist, and should not have files with these names.
    names : sequence of str, optional
        Names of the columns of an array.

    Returns
    -------
    dict of str to numpy.ndarray
        The mapped arrays of the columns, for `open_rows`.

    Raises
    ------
    RowsError
        Where there are no rows or fewer than ``total_size``, columns differ between batches, are no
        numbers, have missing values or no names, or there are such files already.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from pymc_sgmcmc.sources import open_rows, store_rows
    >>> stream = (np.array([[start, 10 * start]]) for start in (1.0, 2.0, 3.0))
    >>> arrays = store_rows(stream, tempfile.mkdtemp(), names=["hour", "distance"])
    >>> open_rows(arrays, columns={"X": ["distance", "hour"]}).take([2, 0])["X"]
    array([[30.,  3.],
           [10.,  1.]])
    """
    folder = Path(folder)
    schema: Schema = {}
    count = 0
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        for batch in batches:
            arrays = _arrays(batch, names)
            rows = common_length(arrays)
            arrays = without_missing(arrays, count, "the stream")
            if not files:
                schema = schema_of(arrays)
                check_numbers(schema)
                folder.mkdir(parents=True, exist_ok=True)
                for name in schema:
                    files[name] = stack.enter_context(_new_file(folder / f"{name}.npy"))
                    _write_header(files[name], schema[name], 0)
            elif schema_of(arrays) != schema:
                raise RowsError(
                    f"All rows should have the columns {_shown(schema)}, but after {count} rows "
                    f"there are {_shown(schema_of(arrays))}."
                )
            for name, values in arrays.items():
                files[name].write(np.ascontiguousarray(values).tobytes())
            count += rows
        total = getattr(batches, "total_size", None)
        if not count or (total is not None and total != count):
            raise RowsError(
                f"The stream should have {'rows' if total is None else f'{total} rows'}, but has "
                f"{count or 'none'}. It may be at its end already, or leave out the last rows "
                "where they do not fill a minibatch."
            )
        for name, file in files.items():
            # NumPy leaves room in a header for any number of rows.
            file.seek(0)
            _write_header(file, schema[name], count)
    return {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in schema}


def _arrays(batch: Any, names: Sequence[str] | None) -> dict[str, np.ndarray]:
    """Arrays of some rows by name."""
    if hasattr(batch, "items"):
        arrays = {str(name): np.asanyarray(values) for name, values in batch.items()}
        if names is not None:
            check_names(list(names), list(arrays), "the stream")
            arrays = {name: arrays[name] for name in names}
        return arrays
    values = np.asanyarray(batch)
    if names is None or values.ndim != 2 or len(names) != values.shape[1]:
        raise RowsError(
            "Rows should be arrays by name, or one array with a column for each of `names`, but "
            f"are {type(batch).__name__} of shape {values.shape}, and `names` are {names!r}."
        )
    return dict(zip(names, values.T, strict=True))


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that is removed where not all rows can be written."""
    try:
        file = path.open("xb")
    except FileExistsError:
        raise RowsError(f"The file {path} exists already. Give another folder.") from None
    try:
        with file:
            yield file
    except BaseException:
        path.unlink()
        raise


def _write_header(file: BinaryIO, column: tuple[np.dtype, tuple[int, ...]], count: int) -> None:
    dtype, shape = column
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (count, *shape),
    }
    np.lib.format.write_array_header_1_0(file, header)


def _shown(schema: Schema) -> str:
    return ", ".join(f"`{name}` {dtype} {shape}" for name, (dtype, shape) in schema.items())
