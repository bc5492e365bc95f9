"""Rows of data in partitions, for data that do not fit in memory."""

from pymc_sgmcmc.sources.arrays import ArraySource
from pymc_sgmcmc.sources.base import RowSource, StandardisedRows, TransformedRows
from pymc_sgmcmc.sources.dask import DaskArraySource, DaskFrameSource
from pymc_sgmcmc.sources.open_rows import open_rows
from pymc_sgmcmc.sources.parquet import ParquetSource
from pymc_sgmcmc.sources.store_rows import store_rows
from pymc_sgmcmc.sources.zarr import ZarrSource

__all__ = [
    "ArraySource",
    "DaskArraySource",
    "DaskFrameSource",
    "ParquetSource",
    "RowSource",
    "StandardisedRows",
    "TransformedRows",
    "ZarrSource",
    "open_rows",
    "store_rows",
]
