"""Files with the arrays of a zarr group and its attributes: zip files in the format of zarr 3."""

from __future__ import annotations

import asyncio
import io
import zipfile
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from pymc_sgmcmc.checks import import_optional


def check_zarr() -> None:
    """Raise an error where zarr 3 is not installed.

    Raises
    ------
    ImportError
    """
    zarr = import_optional("zarr", "store", "`store`")
    if int(zarr.__version__.split(".")[0]) < 3:
        raise ImportError(
            f"`store` needs zarr 3 or later, but {zarr.__version__} is installed. Update it: "
            'pip install "pymc_sgmcmc[store]"'
        )


def packed(arrays: Mapping[str, np.ndarray], attributes: Mapping[str, Any]) -> bytes:
    """The bytes of a zip file with a group. They depend on nothing but the arguments."""
    files = _run(_files(arrays, attributes))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)  # without the time of day
    return buffer.getvalue()


def group_metadata(attributes: Mapping[str, Any]) -> bytes:
    """The file ``zarr.json`` of a group."""
    return _run(_files({}, attributes))["zarr.json"]


def unpacked(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the attributes of a file that `packed` made."""
    return _run(_read(path))


async def _files(
    arrays: Mapping[str, np.ndarray], attributes: Mapping[str, Any]
) -> dict[str, bytes]:
    import zarr.api.asynchronous
    from zarr.storage import MemoryStore

    files: dict[str, Any] = {}
    group = await zarr.api.asynchronous.create_group(
        store=MemoryStore(files), attributes=dict(attributes)
    )
    for name, values in arrays.items():
        # One chunk, as it lies in memory: the digits of draws are random and hardly shrink.
        chunks = tuple(max(1, size) for size in values.shape)
        await group.create_array(name, data=values, chunks=chunks, compressors=None)
    return {name: content.to_bytes() for name, content in files.items()}


async def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    import zarr.api.asynchronous
    from zarr.storage import ZipStore

    store = await ZipStore.open(path, mode="r")
    try:
        group = await zarr.api.asynchronous.open_group(store=store, mode="r")
        arrays = {}
        async for name, array in group.arrays():
            names = [type(codec).__name__ for codec in array.metadata.codecs]
            if names != ["BytesCodec"]:
                raise ValueError(f"{path} has the codecs {names}, which no store uses.")
            arrays[name] = np.asarray(await array.getitem(...))
        return arrays, dict(group.attrs)
    finally:
        store.close()


def _run[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine of zarr.

    The functions of zarr that are not coroutines keep a thread, with which a process should not be
    forked. A thread of its own is needed in notebooks, where this one has a loop that runs.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
