"""Matrices over the parts of a state in blocks, and their derivatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import pushforward
from pytensor.graph.basic import Variable
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.matrices import as_matrix

Blocks = Mapping[tuple[int, int], Any]
"""The blocks of a matrix by their place. A number stands for a multiple of the identity, a vector
for a diagonal, and a missing block for zero."""


def as_blocks(value: Any, sizes: Sequence[int], name: str, dtype: str) -> Blocks:
    """Blocks of a matrix over the parts of a state, as a user gives it.

    Parameters
    ----------
    value : nested sequence, number, vector, matrix or None
        Rows of blocks, or the whole matrix: a multiple of the identity, a diagonal, or a dense
        matrix. None and the number zero stand for zero.
    sizes : sequence of int
        Lengths of the parts.
    name : str
        Name of the matrix in messages.
    dtype : str
        Type of the blocks.

    Raises
    ------
    TypeError
        Where a block is neither a number nor a tensor.
    ValueError
        Where the shape of a block is not that of its parts.
    """
    count, total = len(sizes), sum(sizes)
    if isinstance(value, list | tuple):
        if len(value) != count or any(
            not isinstance(row, list | tuple) or len(row) != count for row in value
        ):
            raise ValueError(
                f"`{name}` should have {count} rows of {count} blocks, one for each part of the "
                f"state (lengths {tuple(sizes)}), but got {_describe(value)}."
            )
        places = {
            (i, j): (value[i][j], (sizes[i], sizes[j])) for i in range(count) for j in range(count)
        }
    elif _is_zero(value) or np.ndim(value) == 0:
        places = {(i, i): (value, (sizes[i],) * 2) for i in range(count)}
    else:
        stops = np.cumsum(sizes)
        parts = [
            slice(int(stop) - size, int(stop)) for stop, size in zip(stops, sizes, strict=True)
        ]
        value = _checked(value, (total, total), name, "", dtype)
        if value.ndim == 1:
            places = {(i, i): (value[part], (sizes[i],) * 2) for i, part in enumerate(parts)}
        else:
            places = {
                (i, j): (value[parts[i], parts[j]], (sizes[i], sizes[j]))
                for i in range(count)
                for j in range(count)
            }
    return {
        place: _checked(block, shape, name, f" block {place}", dtype)
        for place, (block, shape) in places.items()
        if not _is_zero(block)
    }


def _checked(
    block: Any, shape: tuple[int, int], name: str, where: str, dtype: str
) -> TensorVariable:
    # A list may contain tensors.
    known = isinstance(block, Variable | list | tuple)
    if not known and np.asarray(block).dtype.kind not in "biuf":
        raise TypeError(
            f"`{name}`{where} should be a number, a vector or a matrix, or a tensor of PyTensor, "
            f"but got {block!r}."
        )
    block = pt.as_tensor(block)
    expected: tuple[int, ...] = shape if block.ndim == 2 else shape[: block.ndim]
    fits = block.ndim <= 2 and all(
        actual is None or actual == length
        for actual, length in zip(block.type.shape, expected, strict=True)
    )
    if not fits or (block.ndim < 2 and shape[0] != shape[1]):
        square = " (or a number or a vector for a diagonal)" if shape[0] == shape[1] else ""
        raise ValueError(
            f"`{name}`{where} should have shape {shape}{square}, but has shape {block.type.shape}."
        )
    return pt.specify_shape(block.astype(dtype), expected) if block.ndim else block.astype(dtype)


def _is_zero(block: Any) -> bool:
    return block is None or (isinstance(block, int | float | np.number) and block == 0)


def _describe(value: Any) -> str:
    rows = [len(row) if isinstance(row, list | tuple) else type(row).__name__ for row in value]
    return f"{len(value)} rows of {rows}"


# --- Algebra --------------------------------------------------------------------------------


def add(left: Blocks, right: Blocks) -> Blocks:
    """Sum of two block matrices."""
    overlap = {place: _sum(left[place], right[place]) for place in left.keys() & right.keys()}
    return {**left, **right, **overlap}


def congruence(left: Blocks, middle: Any) -> Blocks:
    """A V Aᵀ for a matrix V over the first part: a number, a diagonal or dense."""
    column = {i: block for (i, j), block in left.items() if j == 0}
    return {
        (i, j): _product(_product(column[i], middle), column[j].T) for i in column for j in column
    }


def scale(factor: Any, blocks: Blocks) -> Blocks:
    """Multiple of a block matrix."""
    return {place: factor * block for place, block in blocks.items()}


def apply_blocks(blocks: Blocks, vectors: Sequence[Any]) -> list[Any]:
    """Product with a vector that is given in parts. It is zero where a row has no block."""
    products: list[Any] = [0.0] * len(vectors)
    for (i, j), block in blocks.items():
        products[i] = products[i] + as_matrix(block) @ vectors[j]
    return products


def divergence(blocks: Blocks, parts: Sequence[TensorVariable]) -> list[Any]:
    r"""Parts of :math:`\Gamma_i = \sum_j \partial_j A_{ij}`, by automatic differentiation.

    A block that does not depend on the part of its columns gives zero without any cost. Any other
    block is differentiated in each direction of that part.
    """
    totals: list[Any] = [0.0] * len(parts)
    for (i, j), block in blocks.items():
        derivatives = tangents(block, parts[j])
        if derivatives is None:
            continue
        # derivatives[k] is that of the block in direction k.
        if block.ndim == 0:
            term = derivatives
        elif block.ndim == 1:
            term = pt.diagonal(derivatives)
        else:
            term = pt.diagonal(derivatives, axis1=0, axis2=2).sum(-1)
        totals[i] = totals[i] + term
    return totals


def tangents(graph: TensorVariable, vector: TensorVariable) -> TensorVariable | None:
    """Derivatives of a graph in each direction of a vector, with directions as the first axis.

    The result is None where the graph does not depend on the vector.
    """
    if vector not in set(ancestors([graph])):
        return None
    direction = vector.type("direction")
    derivative = pushforward(graph, vector, direction, disconnected_outputs="ignore")
    if direction not in set(ancestors([derivative])):
        return None
    # Only the part that depends on the direction is evaluated for each direction.
    unit = pt.eye(vector.type.shape[0], dtype=vector.dtype)
    return vectorize_graph(derivative, {direction: unit})


def root_product(blocks: Blocks, noise: Sequence[Any], *, singular: bool = False) -> list[Any]:
    """R ξ with R Rᵀ a symmetric positive semi-definite block matrix.

    Parameters
    ----------
    blocks : Blocks
    noise : sequence
        The vector ξ in parts.
    singular : bool
        Whether dense blocks may be singular. Their root is then computed from eigenvalues, in place
        of Cholesky's.
    """
    products: list[Any] = [0.0] * len(noise)
    if all(i == j for i, j in blocks):
        for (i, _), block in blocks.items():
            if block.ndim == 2:
                products[i] = _dense_root(block, singular) @ noise[i]
            else:
                products[i] = pt.sqrt(block) * noise[i]
        return products
    present = sorted({i for i, _ in blocks})
    sizes = [noise[i].type.shape[0] for i in present]
    numbers = {i: number for number, i in enumerate(present)}
    dense = assemble({(numbers[i], numbers[j]): b for (i, j), b in blocks.items()}, sizes)
    product = _dense_root(dense, singular) @ pt.concatenate([noise[i] for i in present])
    for i, size, stop in zip(present, sizes, np.cumsum(sizes), strict=True):
        products[i] = product[int(stop) - size : int(stop)]
    return products


def assemble(blocks: Blocks, sizes: Sequence[int]) -> TensorVariable:
    """The dense matrix."""
    rows = [
        [
            _dense(blocks[i, j], sizes[i]) if (i, j) in blocks else pt.zeros((sizes[i], sizes[j]))
            for j in range(len(sizes))
        ]
        for i in range(len(sizes))
    ]
    dtype = next(iter(blocks.values())).dtype if blocks else None
    dense = pt.concatenate([pt.concatenate(row, axis=1) for row in rows], axis=0)
    return dense if dtype is None else dense.astype(dtype)


def _dense_root(matrix: TensorVariable, singular: bool) -> TensorVariable:
    if not singular:
        return pt.linalg.cholesky(matrix)
    values, vectors = pt.linalg.eigh(matrix)
    return vectors * pt.sqrt(pt.maximum(values, 0))


def _dense(block: TensorVariable, size: int) -> TensorVariable:
    return block if block.ndim == 2 else pt.eye(size, dtype=block.dtype) * block


def _sum(left: Any, right: Any) -> Any:
    if (left.ndim < 2 and right.ndim < 2) or left.ndim == right.ndim:
        return left + right
    dense, diagonal = (left, right) if left.ndim == 2 else (right, left)
    return dense + pt.eye(dense.shape[0], dtype=dense.dtype) * diagonal


def _product(left: Any, right: Any) -> Any:
    if left.ndim == 2 and right.ndim == 2:
        return left @ right
    if left.ndim == 1 and right.ndim == 2:
        return left[:, None] * right
    return left * right
