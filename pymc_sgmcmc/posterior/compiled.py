"""Compile functions for set-up and checks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytensor
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.executor import Function
from pytensor.compile.mode import Mode
from pytensor.compile.rewriting import inline_ofg_node
from pytensor.graph.basic import Variable
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter


@node_rewriter([OpFromGraph])
def _inline(fgraph, node):
    return inline_ofg_node(node)


inline_inner_graphs = dfs_rewriter(_inline)
"""This rewriter replaces each operation that holds an inner graph, such as softmax and logsumexp,
by that graph."""

_AFTER_OTHER_REWRITES = 49.5
"""This position in the order of the rewrites is behind the last one that changes the graph."""

PYTHON_MODE = Mode(linker="py", optimizer="minimum_compile").register(
    # Inner graphs would be compiled in C, which takes seconds, for a few calls.
    (inline_inner_graphs, _AFTER_OTHER_REWRITES)
)
"""In this mode NumPy evaluates a graph without compilation. It serves for functions that are called
only a few times."""


@contextmanager
def without_blas_warning() -> Iterator[None]:
    """Ignore PyTensor's warning that its C code is not linked with BLAS: NumPy's is used then."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PyTensor could not link to a BLAS")
        yield


def compile_quietly(
    inputs: Sequence[Variable], outputs: Variable | Sequence[Variable], mode: Mode | str
) -> Function:
    """Compile a function whose inputs need not all be used."""
    with without_blas_warning():
        return pytensor.function(inputs, outputs, on_unused_input="ignore", mode=mode)


def evaluate(variable: Variable) -> np.ndarray:
    """Value of a graph without inputs."""
    return compile_quietly([], variable, PYTHON_MODE)()
