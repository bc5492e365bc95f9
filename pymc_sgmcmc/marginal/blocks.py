"""The local variables of each group as one block, and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pymc_sgmcmc.marginal.structure import LocalStructure


def join_blocks(structure: LocalStructure, point: Mapping[str, np.ndarray]) -> np.ndarray:
    """Blocks of all groups, shape (G, q), of a point with values of the local variables."""
    parts = [
        np.moveaxis(point[local.value.name], local.axis, 0).reshape(structure.n_groups, -1)
        for local in structure.locals
    ]
    return np.concatenate(parts, axis=1)


def split_blocks(structure: LocalStructure, blocks: np.ndarray) -> dict[str, np.ndarray]:
    """Values of the local value variables by name, of blocks of shape (..., groups, q).

    The groups are some of all, and all where they are cells of several axes.
    """
    *leading, n_groups, _ = blocks.shape
    first = len(leading)
    stops = np.cumsum([local.size_in_group for local in structure.locals])[:-1]
    values = {}
    for local, part in zip(structure.locals, np.split(blocks, stops, axis=-1), strict=True):
        lengths = (n_groups,) if local.n_axes == 1 else local.lengths
        shaped = part.reshape(*leading, *lengths, *local.shape_in_group)
        values[local.value.name] = np.moveaxis(shaped, first, first + local.axis)
    return values
