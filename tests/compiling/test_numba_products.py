"""Matrix products that this package compiles by Numba, and those of other functions."""

from __future__ import annotations

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode
from pytensor.tensor.math import Dot

from pymc_sgmcmc.compiling.numba_loop.products import NumpyDot, with_numpy_products


def products(function) -> list[type]:
    """Types of the products in a compiled function and in its scans."""
    graphs = [function.maker.fgraph]
    types = []
    while graphs:
        for node in graphs.pop().apply_nodes:
            if isinstance(node.op, Dot):
                types.append(type(node.op))
            inner = getattr(node.op, "fgraph", None)
            if inner is not None:
                graphs.append(inner)
    return types


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_products_of_all_layouts(dtype, rng):
    """Rows, columns, transposed and every second row: all layouts of memory that BLAS may meet."""
    X, W = pt.matrix("X", dtype=dtype), pt.matrix("W", dtype=dtype)
    v, u = pt.vector("v", dtype=dtype), pt.vector("u", dtype=dtype)
    outputs = [
        X @ v,
        X.T @ u,
        X[::2] @ v,
        X.T[:, ::2] @ u[::2],
        X @ W,
        W.T @ X.T,
        v @ W,
        X[:, 1:2] @ W[:1],
    ]
    mode = with_numpy_products("NUMBA")
    function = pytensor.function([X, W, v, u], outputs, mode=mode)
    assert set(products(function)) == {NumpyDot}
    values = [rng.normal(size=size).astype(dtype) for size in ((7, 3), (3, 3), (3,), (7,))]
    x, w, a, b = values
    expected = [
        x @ a, x.T @ b, x[::2] @ a, x.T[:, ::2] @ b[::2], x @ w, w.T @ x.T, a @ w, x[:, 1:2] @ w[:1]
    ]  # fmt: skip
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    for result, exact in zip(function(*values), expected, strict=True):
        np.testing.assert_allclose(result, exact, rtol=tolerance, atol=tolerance)


def test_products_of_single_and_double_precision(rng):
    """Data in float64 and a position in float32, as in a model with `floatX = "float32"`."""
    X, v = pt.matrix("X", dtype="float64"), pt.vector("v", dtype="float32")
    function = pytensor.function([X, v], [X @ v, v @ X], mode=with_numpy_products("NUMBA"))
    assert set(products(function)) == {NumpyDot}
    x, a = rng.normal(size=(3, 3)), rng.normal(size=3).astype("float32")
    for result, exact in zip(function(x, a), [x @ a, a @ x], strict=True):
        assert result.dtype == np.float64
        np.testing.assert_allclose(result, exact, rtol=1e-12)


@pytest.mark.slow
def test_products_inside_of_a_scan():
    X = pt.matrix("X", shape=(2, 2))
    powers = pytensor.scan(
        lambda x: X @ x, outputs_info=pt.ones(2), n_steps=3, return_updates=False
    )
    function = pytensor.function([X], powers, mode=with_numpy_products("NUMBA"))
    assert set(products(function)) == {NumpyDot}
    np.testing.assert_allclose(function(2 * np.eye(2)), [[2, 2], [4, 4], [8, 8]])


def test_other_functions_keep_their_products():
    """Neither PyTensor's modes nor other linkers and types of numbers are changed."""
    X = pt.matrix("X")
    with_numpy_products("NUMBA")
    assert products(pytensor.function([X], X @ X, mode="NUMBA")) == [Dot]
    python = with_numpy_products(Mode(linker="py", optimizer="fast_run"))
    assert NumpyDot not in products(pytensor.function([X], X @ X, mode=python))
    Z = pt.lmatrix("Z")
    function = pytensor.function([Z], Z @ Z, mode=with_numpy_products("NUMBA"))
    assert products(function) == [Dot]
    np.testing.assert_array_equal(function(2 * np.eye(2, dtype="int64")), 4 * np.eye(2))
