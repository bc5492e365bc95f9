"""Compile functions for set-up and checks."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import numpy as np
import pytensor
import pytensor.scalar.basic as scalar_basic
import pytensor.scalar.math as scalar_math
import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.executor import Function
from pytensor.compile.mode import Mode, get_mode, optdb
from pytensor.compile.rewriting import inline_ofg_node
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.raise_op import Assert
from pytensor.scan.op import Scan
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.extra_ops import _broadcast_assert, _runtime_broadcast_assert
from pytensor.tensor.math import Sum

from pymc_sgmcmc.compiling.blockwise import all_rows_at_once
from pymc_sgmcmc.compiling.graph_notes import forgetting_notes
from pymc_sgmcmc.compiling.merging import MergeAnew, lengths_of_64_bits
from pymc_sgmcmc.compiling.numpy_linker import NumpyLinker
from pymc_sgmcmc.compiling.whole_numbers import of_whole_numbers


@node_rewriter([OpFromGraph, Blockwise])
def _inline(fgraph, node):
    if not isinstance(node.op, Blockwise):
        return inline_ofg_node(node)
    core = node.op.core_op
    if not isinstance(core, OpFromGraph):
        return None
    inner = core.fgraph.unfreeze()
    return vectorize_graph(inner.outputs, dict(zip(inner.inputs, node.inputs, strict=True)))


inline_inner_graphs = dfs_rewriter(_inline)
"""This rewriter replaces each operation that holds an inner graph, such as softmax and logsumexp,
by that graph."""

_BEFORE_OTHER_REWRITES = 0.05
"""This position in the order of the rewrites comes before those that simplify the graph."""

_BEFORE_FUSION = 48.95
"""This position in the order of the rewrites comes before the fusion of functions of elements."""

_AFTER_OTHER_REWRITES = 49.4
"""This position in the order of the rewrites is behind the last one that changes the graph."""

_ON_ARRAYS = {
    scalar_math.Sigmoid: "pymc_sgmcmc.compiling.numpy_functions.sigmoid",
    scalar_math.Softplus: "pymc_sgmcmc.compiling.numpy_functions.softplus",
    scalar_math.Log1mexp: "pymc_sgmcmc.compiling.numpy_functions.log1mexp",
    scalar_math.TriGamma: "pymc_sgmcmc.compiling.numpy_functions.trigamma",
    scalar_basic.Second: "pymc_sgmcmc.compiling.numpy_functions.second",
    scalar_basic.Clip: "numpy.clip",
    scalar_basic.Identity: "numpy.positive",
}
"""The functions of whole arrays, by scalar operation, where PyTensor names none or a slow one."""


@node_rewriter([Elemwise])
def _on_arrays(fgraph, node):
    scalar = node.op.scalar_op
    name = _ON_ARRAYS.get(type(scalar))
    if name is None or node.op.nfunc_spec == (name, scalar.nin, 1):
        return None
    return Elemwise(scalar, nfunc_spec=(name, scalar.nin, 1))(*node.inputs, return_list=True)


MOST_OPERANDS = 16
"""Sums and products of more operands than this are split. PyTensor's Python code takes at most 31,
and 16 keep those of a few hundred variables in two levels."""


@node_rewriter([Elemwise])
def _split_sums(fgraph, node):
    is_sum = isinstance(node.op.scalar_op, scalar_basic.Add | scalar_basic.Mul)
    if not is_sum or len(node.inputs) <= MOST_OPERANDS:
        return None
    operands = list(node.inputs)
    while len(operands) > 1:
        groups = [
            operands[start : start + MOST_OPERANDS]
            for start in range(0, len(operands), MOST_OPERANDS)
        ]
        operands = [node.op(*group) if len(group) > 1 else group[0] for group in groups]
    return operands


SHORT_AXIS = 8
"""An axis of so many entries or fewer, such as that of the components of a mixture, is taken apart.
NumPy's loop over an inner axis takes about 15 ns to begin."""


@node_rewriter([CAReduce])
def _take_short_axis_apart(fgraph, node):
    """Sums and the like along a short last axis, and sums of each of few columns."""
    (values,), (result,) = node.inputs, node.outputs
    ndim, shape = values.type.ndim, values.type.shape
    if ndim < 2 or shape[-1] is None or not 1 <= shape[-1] <= SHORT_AXIS:
        return None
    if result.type.dtype != values.type.dtype:
        return None
    columns = [values[..., number] for number in range(shape[-1])]
    if node.op.axis == (ndim - 1,):
        return [reduce(Elemwise(node.op.scalar_op), columns)]
    if node.op.axis == (0,) and ndim == 2 and isinstance(node.op, Sum):
        return [pt.stack([column.sum(dtype=result.type.dtype) for column in columns])]
    return None


_use_numpy = [
    (inline_inner_graphs, _AFTER_OTHER_REWRITES),
    (all_rows_at_once, _AFTER_OTHER_REWRITES + 0.05),
    (dfs_rewriter(_on_arrays, _split_sums, _take_short_axis_apart), _AFTER_OTHER_REWRITES + 0.1),
    (dfs_rewriter(of_whole_numbers), _AFTER_OTHER_REWRITES + 0.15),
]

PYTHON_MODE = Mode(linker=NumpyLinker(), optimizer="minimum_compile").register(*_use_numpy)
"""In this mode NumPy evaluates a graph as it stands. It serves for functions that are called only a
few times."""

UNWANTED_REWRITES = (
    "local_merge_alloc",
    "local_sumsqr2dot",
    "local_greedy_distributor",
)
"""The first of these rewrites of PyTensor takes an array of length one that is repeated for a shape
error, where the length is no constant of the graph. Derivatives of groups with several local
variables have such arrays. The second one fails, and prints so, where a sum over two axes has the
square of a product whose first factor is an input: normal vectors at several positions. The third
takes most of the time of long sums of products, such as the elements of Cholesky factors, and saves
few of them."""


def with_own_rewrites(mode: Mode) -> Mode:
    """The mode, without `UNWANTED_REWRITES`.

    What specialising makes equal is merged before functions of elements are fused.
    """
    own = (lengths_of_64_bits, _BEFORE_OTHER_REWRITES), (MergeAnew(), _BEFORE_FUSION)
    return forgetting_notes(mode).register(*own).excluding(*UNWANTED_REWRITES)


@node_rewriter([Assert])
def _drop_broadcast_check(fgraph, node):
    is_check = node.op in (_broadcast_assert, _runtime_broadcast_assert)
    return [node.inputs[0]] if is_check else None


WITHOUT_BROADCAST_CHECKS = "without_broadcast_checks"
"""A mode that includes rewrites of this name takes checks of equal lengths out of a graph. What
evaluates the operations on elements checks it too."""

for _stage in ("canonicalize", "specialize"):
    optdb[_stage].register(
        WITHOUT_BROADCAST_CHECKS, _drop_broadcast_check, use_db_name_as_tag=False
    )

NUMPY_MODE = (
    Mode(linker=NumpyLinker(), optimizer="fast_run")
    .including(WITHOUT_BROADCAST_CHECKS)
    .excluding("fusion", "inplace", "local_pow_to_nested_squaring")
    .register((inline_inner_graphs, _BEFORE_OTHER_REWRITES), *_use_numpy)
)
"""In this mode NumPy evaluates a simplified graph. On large arrays it is as fast as C code where
each operation is a function of NumPy or SciPy, see `runs_on_arrays`, and it needs no compiler.
`local_pow_to_nested_squaring` would make a Composite."""


FEW_STEPS = "few_steps_of_many_rows"
"""A scan of this name takes a few steps, each of all rows at once, so Python's loop costs little.
PyTensor joins the names of scans that it merges by "&"."""


def runs_on_arrays(function: Function) -> bool:
    """Whether a function in `NUMPY_MODE` has no operation that Python does for each element."""
    return _all_on_arrays(function.maker.fgraph.apply_nodes)


def _all_on_arrays(nodes: Iterable[Apply]) -> bool:
    for node in nodes:
        if isinstance(node.op, Elemwise):
            scalar = node.op.scalar_op
            if node.op.nfunc_spec is None and not isinstance(scalar, scalar_basic.Cast):
                return False
        elif isinstance(node.op, Scan) and set((node.op.name or "").split("&")) == {FEW_STEPS}:
            if not _all_on_arrays(node.op.fn.maker.fgraph.apply_nodes):
                return False
        elif isinstance(node.op, HasInnerGraph):
            return False
    return True


@contextmanager
def without_blas_warning() -> Iterator[None]:
    """Ignore PyTensor's warning that its C code is not linked with BLAS: NumPy's is used then."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PyTensor could not link to a BLAS")
        yield


@contextmanager
def quick_graphs() -> Iterator[None]:
    """Build graphs without notes of the lines that made them, and collect the garbage later.

    Notes and collections each take about a tenth of the time of building and compiling.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with pytensor.config.change_flags(traceback__limit=0):
            yield
    finally:
        if collects:
            gc.enable()


def compile_quietly(
    inputs: Sequence[Variable],
    outputs: Variable | Sequence[Variable],
    mode: Mode | str,
    **options: Any,
) -> Function:
    """Compile a function whose inputs need not all be used."""
    mode = with_own_rewrites(get_mode(mode))
    with without_blas_warning(), pytensor.config.change_flags(traceback__limit=0):
        return pytensor.function(inputs, outputs, on_unused_input="ignore", mode=mode, **options)


def compile_on_arrays(
    inputs: Sequence[Variable],
    outputs: Variable | Sequence[Variable],
    mode: Mode,
    **options: Any,
) -> Function:
    """Compile a function of large arrays: for NumPy where that is quick, otherwise in C."""
    with pytensor.config.change_flags(cxx=""):  # The inner function of a scan is NumPy's too.
        function = compile_quietly(inputs, outputs, mode, **options)
    if pytensor.config.cxx and not runs_on_arrays(function):
        return compile_quietly(inputs, outputs, "CVM", **options)
    return function


def evaluate(variable: Variable) -> np.ndarray:
    """Value of a graph without inputs."""
    return compile_quietly([], variable, PYTHON_MODE)()
