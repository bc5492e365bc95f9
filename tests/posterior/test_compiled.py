"""Functions for set-up, which NumPy evaluates."""

from __future__ import annotations

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from pymc_sgmcmc.posterior.compiled import (
    NUMPY_MODE,
    PYTHON_MODE,
    compile_quietly,
    runs_on_arrays,
)

FUNCTIONS = {
    "softplus": (pt.softplus, [-800.0, -40.0, -1e-3, 0.0, 3.0, 40.0, 800.0]),
    "log1mexp": (pt.log1mexp, [-800.0, -40.0, -1.0, -0.69, -0.1, -1e-12]),
    "trigamma": (pt.tri_gamma, [0.01, 0.5, 1.0, 3.0, 100.0]),
    "clip": (lambda x: pt.clip(x, -1, 1), [-2.0, 0.3, 5.0]),
    "second": (lambda x: pt.second(x, pt.constant(2.5)), [1.0, 2.0]),
    "power": (lambda x: x**3, [-2.0, 0.0, 1.5]),
    "sigmoid": (pt.sigmoid, [-800.0, -2.0, 0.0, 800.0]),
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
