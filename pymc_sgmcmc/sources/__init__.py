"""Rows of data in partitions, for data that do not fit in memory."""

from pymc_sgmcmc.sources.arrays import ArraySource
from pymc_sgmcmc.sources.base import RowSource, StandardisedRows, TransformedRows

__all__ = ["ArraySource", "RowSource", "StandardisedRows", "TransformedRows"]
