"""Rewrites that make equal parts of a graph one, where PyTensor 3.3 leaves them apart.

A number that a model writes as a length is a constant of 8 bits, and one that a rewrite finds is of
64. So two arrays that are the same have different graphs, and so has everything that is computed of
them. PyTensor also multiplies the lengths of 8 bits, see `docs/upstream.md`.

What specialising makes equal is merged only after functions of elements are fused, and PyTensor's
list of what is to be merged loses operations whose inputs change while they are on it.
"""

from __future__ import annotations

from typing import override

import numpy as np
from pytensor.graph.basic import Constant
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import (
    GraphRewriter,
    MergeFeature,
    MergeOptimizer,
    dfs_rewriter,
    node_rewriter,
)
from pytensor.tensor.basic import Alloc, constant


@node_rewriter([Alloc])
def _of_64_bits(fgraph, node):
    value, *lengths = node.inputs
    longer = [
        constant(np.int64(each.data)) if isinstance(each, Constant) else each for each in lengths
    ]
    if all(each.dtype == long.dtype for each, long in zip(lengths, longer, strict=True)):
        return None
    return [node.op(value, *longer)]


lengths_of_64_bits = dfs_rewriter(_of_64_bits)
"""This rewriter gives arrays that repeat a number lengths of 64 bits."""


class MergeAnew(GraphRewriter):
    """Merge equal operations by new lists of them, until none are left."""

    @override
    def apply(self, fgraph: FunctionGraph) -> None:
        before = 0
        while before != (before := len(fgraph.apply_nodes)):
            for feature in [each for each in fgraph._features if isinstance(each, MergeFeature)]:
                fgraph.remove_feature(feature)
                del fgraph.merge_feature
            MergeOptimizer().rewrite(fgraph)
