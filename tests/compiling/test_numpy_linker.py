from itertools import combinations

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode
from pytensor.conditional.op import ifelse
from pytensor.scalar.basic import add
from pytensor.scan.op import Scan
from pytensor.tensor.elemwise import Elemwise

from pymc_sgmcmc.compiling.compiled import NUMPY_MODE, PYTHON_MODE, compile_quietly
from pymc_sgmcmc.compiling.numpy_linker import NumpyLinker

x, y, i = pt.dvector("x"), pt.dvector("y"), pt.lvector("i")
s, row = pt.dscalar("s"), pt.drow("row")
VALUES = {
    x: np.array([0.5, -1.0, 2.0]),
    y: np.array([3.0, 0.0, 0.25]),
    i: np.array([1, 0, 2]),
    s: np.float64(1.5),
    row: np.array([[0.1, 0.2, -0.3]]),
}
GRAPHS = {
    "several factors": x * y * s * i,
    "function of whole numbers": pt.exp(i) + pt.sqrt(i),
    "function of small whole numbers": pt.exp(pt.cast(i, "int8")),
    "quotient of whole numbers": i / (i + 1),
    "cast": pt.cast(x, "int32"),
    "no float64": pt.cast(x, "float32") * pt.cast(y, "float32"),
    "truth values": pt.and_(x < y, i > 0),
    "choice": pt.switch(x > s, y, pt.exp(-y)),
    "choice of all": pt.switch(x < 9, pt.exp(y), x * y) + pt.switch(x > 9, y + s, pt.exp(y)),
    "choice of a number": pt.switch(x > 9, y, 0.0) * pt.switch(x < 9, np.float32(2), y),
    "choice by a number": 1 + pt.switch(s > 1, pt.exp(x), s * y) * pt.switch(s > 2, y, np.int8(1)),
    "choice with more axes": pt.switch(row > 9, x[:, None] * s, pt.exp(row)) + row,
    "choice without axes": pt.exp(pt.switch(s > 1, 2 * s, 1.0)),
    "division by zero": x / y,
    "no axes": pt.exp(s) + 1,
    "row": row.T * x,
    "function of SciPy": pt.gammaln(y + 1) + pt.digamma(y + s),
    "function of Python": pt.round(x) + pt.sign(y),
    "clip": pt.clip(x, 0, 1),
    "one of two": ifelse(s > 1, 2 * x, y * y),
}


def compiled(graph, linker):
    mode = Mode(linker=linker, optimizer="minimum_compile")
    return pytensor.function([x, y, i, s, row], graph, mode=mode, on_unused_input="ignore")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", GRAPHS)
def test_values_and_types_are_those_of_pytensors_python_code(name):
    function, expected = (
        compiled(GRAPHS[name], linker)(*VALUES.values()) for linker in (NumpyLinker(), "py")
    )
    np.testing.assert_array_equal(function, expected, strict=True)


def test_its_own_code_is_what_runs(monkeypatch):
    def fails(*_):
        raise AssertionError("PyTensor's code runs")

    graph = [pt.exp(x) * y + s, x / (1 + i)]
    expected = compiled(graph, "py")(*VALUES.values())
    monkeypatch.setattr(Elemwise, "perform", fails)
    function = compile_quietly([x, y, i, s], graph, NUMPY_MODE)
    for result, value in zip(function(*(VALUES[v] for v in (x, y, i, s))), expected, strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-15)


def test_steps_of_a_scan_run_its_own_code_too():
    def step(root, number):
        return (root + number / root) / 2

    roots = pytensor.scan(
        step, outputs_info=y + 1, non_sequences=y, n_steps=5, return_updates=False
    )
    plain = Mode(linker="py", optimizer="minimum_compile")
    reference, function = (compile_quietly([y], roots[-1], mode) for mode in (plain, NUMPY_MODE))
    (scan,) = (n.op for n in function.maker.fgraph.apply_nodes if isinstance(n.op, Scan))
    assert isinstance(scan.fn.maker.linker, NumpyLinker)
    np.testing.assert_allclose(function(VALUES[y]), reference(VALUES[y]), rtol=1e-14)


def test_axes_of_length_one_are_not_repeated_where_the_graph_does_not_say_so():
    function = compile_quietly([x, y], x * y, NUMPY_MODE)
    with pytest.raises(ValueError, match="Runtime broadcasting not allowed"):
        function(VALUES[x], np.ones(1))
    np.testing.assert_array_equal(function(np.ones(1), np.ones(1)), [1.0])
    with pytest.raises(ValueError, match="could not be broadcast"):
        function(VALUES[x], np.ones(2))


def test_a_result_is_no_view_of_an_argument():
    function = compile_quietly([x, y], pt.second(x, y), PYTHON_MODE)
    result = function(VALUES[x], VALUES[y])
    np.testing.assert_array_equal(result, VALUES[y])
    assert not np.shares_memory(result, VALUES[y])


def test_the_error_state_of_numpy_is_left_as_it_was():
    with np.errstate(all="raise"):
        compiled(x / y, NumpyLinker())(*VALUES.values())
        with pytest.raises(FloatingPointError):
            np.log(np.zeros(1))


def test_a_choice_is_no_array_of_something_else():
    exponential = pt.exp(x)
    chosen = pt.switch(y > -9, exponential, y)
    outputs = [pt.switch(y > -9, x, y), chosen, exponential, chosen[::-1] + 1]
    for graphs in (outputs, [exponential, chosen[None], chosen[::-1], chosen.sum()]):
        for mode in (NUMPY_MODE, PYTHON_MODE):
            arrays = [VALUES[x], *compile_quietly([x, y], graphs, mode)(VALUES[x], VALUES[y])]
            for one, other in combinations(arrays, 2):
                assert not np.shares_memory(one, other)
    # Of two choices that are the same array, one is written into.
    choices = [pt.switch(y > bound, exponential, y) for bound in (-9, -8)]
    total = Elemwise(add, inplace_pattern={0: 0})(*choices) + pt.switch(y > -7, exponential, y)
    mode = Mode(linker=NumpyLinker(), optimizer=None)
    function = pytensor.function([x, y], total, mode=mode, accept_inplace=True)
    np.testing.assert_allclose(function(VALUES[x], VALUES[y]), 3 * np.exp(VALUES[x]))


def test_sums_of_a_choice_do_not_depend_on_what_is_beside():
    matrix = pt.dmatrix("matrix")
    sums = pt.switch(matrix > 0, matrix, 0).sum(axis=0)
    function = compile_quietly([matrix], sums, NUMPY_MODE)
    values = np.asfortranarray(np.random.default_rng(1).uniform(size=(1000, 7)))
    beside = np.asfortranarray(np.column_stack([values, -values[:, 0]]))
    np.testing.assert_array_equal(function(beside)[:-1], function(values))
