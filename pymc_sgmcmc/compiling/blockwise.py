"""Operations on all rows at once in place of loops over the rows.

`vectorize_graph` wraps an operation that it cannot vectorize in a `Blockwise`, which calls Python
for each row. The rewrites here are for a single dimension of rows, which comes first.
"""

from __future__ import annotations

import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.tensor.basic import Alloc, Join, Split
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.subtensor import AdvancedSubtensor


@node_rewriter([Blockwise])
def _at_once(fgraph, node):
    core = node.op.core_op
    if node.op.batch_ndim(node) != 1:
        return None
    if isinstance(core, Join):
        return [pt.join(core.axis + 1, *_of_all_rows(node.inputs))]
    if isinstance(core, Split):
        values, sizes = _of_all_rows(node.inputs)
        while sizes.owner is not None and isinstance(sizes.owner.op, Alloc):
            sizes = pt.atleast_2d(sizes.owner.inputs[0])  # which is repeated for each row
        if not _is_shared(sizes):
            return None
        sizes = pt.broadcast_to(sizes[0], (core.len_splits,))
        return Split(core.len_splits, core.axis + 1)(values, sizes, return_list=True)
    if isinstance(core, AdvancedSubtensor):
        values, *indices = node.inputs
        if core.idx_list != tuple(range(len(indices))):
            return None  # it has slices
        if len({index.ndim for index in indices}) > 1:
            return None
        if any(index.dtype == "bool" for index in indices):
            return None  # a mask takes as many axes as it has
        if _is_shared(values):
            return [values[0][tuple(indices)]]
        values, *indices = _of_all_rows(node.inputs)
        rows = pt.arange(values.shape[0]).reshape((-1, *[1] * (indices[0].ndim - 1)))
        return [values[(rows, *indices)]]
    return None


def _is_shared(values: Variable) -> bool:
    """Whether all rows have the same values."""
    return values.type.broadcastable[0]


def _of_all_rows(arrays: list[Variable]) -> list[Variable]:
    """Arrays with one entry a row, where some are the same for all rows."""
    length = next((array.shape[0] for array in arrays if not _is_shared(array)), 1)
    return [
        pt.broadcast_to(array, (length, *tuple(array.shape)[1:])) if _is_shared(array) else array
        for array in arrays
    ]


all_rows_at_once = dfs_rewriter(_at_once)
"""This rewriter replaces a `Blockwise` of joins, splits and indexing by operations on all rows."""
