"""Functions for set-up, which NumPy evaluates."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pymc.distributions.transforms import ordered
from pytensor.graph.replace import vectorize_graph
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce
from pytensor.tensor.math import Sum

from pymc_sgmcmc.compiling.compiled import (
    NUMPY_MODE,
    PYTHON_MODE,
    SHORT_AXIS,
    compile_quietly,
    runs_on_arrays,
)
from pymc_sgmcmc.posterior import Posterior

FUNCTIONS = {
    "softplus": (pt.softplus, [-800.0, -40.0, -1e-3, 0.0, 3.0, 40.0, 800.0]),
    "log1mexp": (pt.log1mexp, [-800.0, -40.0, -1.0, -0.69, -0.1, -1e-12]),
    "trigamma": (pt.tri_gamma, [0.01, 0.5, 1.0, 3.0, 100.0]),
    "clip": (lambda x: pt.clip(x, -1, 1), [-2.0, 0.3, 5.0]),
    "second": (lambda x: pt.second(x, pt.constant(2.5)), [1.0, 2.0]),
    "power": (lambda x: x**3, [-2.0, 0.0, 1.5]),
    "sigmoid": (pt.sigmoid, [-800.0, -40.0, -2.0, 0.0, 40.0, 800.0]),
    "cast": (lambda x: pt.cast(x > 0, "float64"), [-1.0, 1.0]),
    "softmax": (pt.special.softmax, [-800.0, 0.0, 3.0]),
    "log softmax": (pt.special.log_softmax, [-800.0, 0.0, 3.0]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_arrays_are_those_of_pytensor(name):
    """To the last digits, also where a simple formula would overflow or cancel."""
    function, points = FUNCTIONS[name]
    x = pt.vector("x")
    on_arrays = compile_quietly([x], function(x), NUMPY_MODE)
    assert runs_on_arrays(on_arrays)
    with pytensor.config.change_flags(cxx=""):
        by_element = pytensor.function([x], function(x), mode="FAST_COMPILE")
    np.testing.assert_allclose(on_arrays(points), by_element(points), rtol=1e-13)


def test_a_scan_is_left_to_a_compiler():
    x = pt.vector("x")
    sums = pytensor.scan(
        lambda value, total: value + total,
        sequences=x,
        outputs_info=pt.zeros(()),
        return_updates=False,
    )
    assert not runs_on_arrays(compile_quietly([x], sums, NUMPY_MODE))


@pytest.mark.parametrize("operation", [pt.add, pt.mul])
def test_sums_of_many_operands(operation):
    """PyTensor's own Python code refuses more than 31 operands."""
    operands = [pt.vector(f"x{number}") for number in range(300)]
    for mode in (NUMPY_MODE, PYTHON_MODE):
        function = compile_quietly(operands, operation(*operands), mode)
        values = np.linspace(0.5, 1.5, 600).reshape(300, 2)
        expected = values.sum(0) if operation is pt.add else values.prod(0)
        np.testing.assert_allclose(function(*values), expected, rtol=1e-12)


REDUCTIONS = {
    "sums of rows": (lambda x: x.sum(axis=1), True),
    "sums of columns": (lambda x: x.sum(axis=0), True),
    "largest": (lambda x: x.max(axis=1), True),
    "smallest": (lambda x: x.min(axis=-1), True),
    "products": (lambda x: x.prod(axis=1), True),
    "all": (lambda x: pt.all(x > 0, axis=1), True),
    "any": (lambda x: pt.any(x > 0, axis=1), True),
    "logsumexp": (lambda x: pt.logsumexp(x, axis=1), True),
    "largest column": (lambda x: x.max(axis=0), False),
    "sum": (lambda x: x.sum(), False),
    "number": (lambda x: pt.sum(x > 0, axis=1), False),
}


@pytest.mark.parametrize("columns", [1, 2, 3, 8])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_short_axes_are_taken_apart(name, columns):
    """With the same results, types and missing numbers."""
    reduction, apart = REDUCTIONS[name]
    x = pt.tensor("x", shape=(None, columns), dtype="float64")
    function = compile_quietly([x], reduction(x), NUMPY_MODE)
    over_rows = [
        node
        for node in function.maker.fgraph.apply_nodes
        if isinstance(node.op, CAReduce) and node.inputs[0].type.ndim == 2
    ]
    assert not (apart and over_rows)
    with pytensor.config.change_flags(cxx=""):
        by_element = pytensor.function([x], reduction(x), mode="FAST_COMPILE")
    for values in (
        np.random.default_rng(4).normal(size=(50, columns)),
        np.array([[np.inf] * columns, [-np.inf] * columns, [np.nan] * columns, [0.0] * columns]),
        np.zeros((1, columns)),
    ):
        with np.errstate(all="ignore"):
            found, expected = function(values), by_element(values)
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-13)


def test_long_axes_are_left_to_numpy():
    x = pt.tensor("x", shape=(None, SHORT_AXIS + 1), dtype="float64")
    nodes = compile_quietly([x], x.sum(axis=1), NUMPY_MODE).maker.fgraph.apply_nodes
    assert [type(node.op) for node in nodes] == [Sum]


def ordinal(X, group, kind):
    cutpoints = pm.Normal("c", [-1, 0, 1], 1, transform=ordered, initval=[-1, 0, 1.0])
    outcome = group % 4
    pm.OrderedLogistic("y", X @ pm.Normal("b", shape=3), cutpoints, observed=outcome)


def zero_inflated(X, group, kind):
    mean, psi = pm.math.exp(X @ pm.Normal("b", shape=3)), pm.Beta("psi", 1, 1)
    outcome = group % 3
    pm.ZeroInflatedNegativeBinomial(
        "y", psi=psi, mu=mean, alpha=pm.HalfNormal("a"), observed=outcome
    )


def slopes(X, group, kind):
    b, w = pm.Normal("b", shape=(5, 3)), pm.Normal("w", shape=4)
    pm.Normal("y", (X * b[group]).sum(-1) + w[kind], 1, observed=X[:, 0])


def table(X, group, kind):
    pm.Normal("y", pm.Normal("t", shape=(5, 4))[group, kind], 1, observed=X[:, 0])


@pytest.mark.parametrize("mode", [NUMPY_MODE, PYTHON_MODE])
def test_an_operation_with_a_graph_is_taken_apart_for_all_rows(mode, rng):
    values = rng.normal(size=(4, 5, 2))
    matrix, array = pt.dmatrix("matrix"), pt.dtensor3("array")
    sums = vectorize_graph(pt.logsumexp(matrix, axis=1), {matrix: array})
    function = compile_quietly([array], sums, mode)
    assert not any(isinstance(node.op, Blockwise) for node in function.maker.fgraph.apply_nodes)
    np.testing.assert_allclose(function(values), np.logaddexp.reduce(values, axis=-1), rtol=1e-14)


@pytest.mark.parametrize("write", [ordinal, zero_inflated, slopes, table])
def test_gradients_of_rows_without_a_loop(write, rng):
    """Joins, splits and indexing of all rows at once give what each row gives alone."""
    X, group, kind = rng.normal(size=(40, 3)), rng.integers(0, 5, 40), rng.integers(0, 4, 40)
    with pm.Model() as model:
        write(X, group, kind)
    posterior = Posterior(model, check=False)
    position = posterior.initial_position + 0.1
    rows = posterior.take(slice(None))
    gradients = posterior.row_gradients(position, rows)
    alone = [
        posterior.log_likelihood_and_gradient(position, [values[i : i + 1] for values in rows])[1]
        for i in range(40)
    ]
    np.testing.assert_allclose(gradients, alone, rtol=1e-10, atol=1e-12)
    nodes = posterior._row_gradients_function.function.maker.fgraph.apply_nodes
    assert not [node for node in nodes if isinstance(node.op, Blockwise)]
