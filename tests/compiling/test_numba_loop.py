"""The loop of transitions that Numba compiles gives the draws of PyTensor's Python code."""

from __future__ import annotations

import time
from functools import partial

import cloudpickle
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.raise_op import Assert
from pytensor.scan.utils import until
from scipy import special

from pymc_sgmcmc import HAMCMC, MALA, SAGA, SGHMC, SGLD, SGLDCV, ULA, FirstOrder
from pymc_sgmcmc.compiling.numba_loop import LoopOfTransitions, with_numpy_products
from pymc_sgmcmc.compiling.numba_loop.prefetch import SMALLEST, prefetch_in_numba
from pymc_sgmcmc.compiling.numba_loop.source import Source
from tests.support.models import logistic_model
from tests.support.row_models import CASES
from tests.support.samplers import SAMPLERS
from tests.support.sampling import NUMBA, sample

pytestmark = pytest.mark.usefixtures("without_compiler")

TRANSITIONS = 12


def check_same(make, rng, steps=TRANSITIONS):
    """Positions, gradients, auxiliaries, statistics and memory are the same on both backends."""
    ours, reference = make({"mode": "NUMBA"}), make({"mode": "FAST_COMPILE"})
    assert isinstance(ours.block._function, LoopOfTransitions)
    block = reference.block
    indices = block.batching.draw(np.random.default_rng(1), steps + block.lag)
    noise = rng.normal(size=(steps, block.noise_size))
    reference.chain.begin(rng, reference.posterior.initial_position)
    sizes = np.full(steps, reference.chain.present_step_size())
    position = reference.posterior.initial_position + 0.1 * rng.normal(size=block.dimension)
    auxiliaries = block.dynamics.initial_auxiliaries(position, np.random.default_rng(2))
    results = []
    for step in (ours, reference):
        memory = step.block.memory
        if memory is not None:
            memory.begin(reference.posterior.initial_position)
        ran = step.block((position, *auxiliaries), indices, noise, sizes)
        results.append((*ran, () if memory is None else memory.read()))
    assert np.isfinite(results[1][0]).all()
    for mine, expected in zip(*results, strict=True):
        mine, expected = (part if isinstance(part, tuple) else (part,) for part in (mine, expected))
        for values, exact in zip(mine, expected, strict=True):
            assert values.dtype == exact.dtype
            scale = np.abs(exact).max() + 1e-300
            np.testing.assert_allclose(values, exact, rtol=1e-9, atol=1e-9 * scale)


@pytest.mark.parametrize("batching", ["shuffle", "replace"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.name)
def test_every_sampler(sampler, batching, rng):
    model = logistic_model()

    def make(compile_kwargs):
        settings = {"batch_size": 20, "gradient": FirstOrder(batching=batching)}
        return sampler.step_class(
            model=model, compile_kwargs=compile_kwargs, **{**settings, **sampler.settings}
        )

    check_same(make, rng)


@pytest.mark.parametrize("batching", ["shuffle", "replace"])
@pytest.mark.parametrize(
    "sampler",
    [
        partial(SGLD, preconditioner="identity"),
        partial(SGHMC, preconditioner="identity"),
        partial(HAMCMC, pairs="between"),
    ],
)
def test_a_table_of_gradients(sampler, batching, rng):
    """The last of the samplers evaluates two gradients in a transition."""
    model = logistic_model(n_rows=60)

    def make(compile_kwargs):
        settings = {
            "batch_size": 20,
            "step_size": 1e-3,
            "gradient": SAGA(batching=batching),
        }
        return sampler(model=model, compile_kwargs=compile_kwargs, **settings)

    check_same(make, rng)


@pytest.mark.parametrize("sampler", [ULA, MALA])
def test_full_gradients(sampler, rng):
    model = logistic_model()

    def make(compile_kwargs):
        return sampler(model=model, compile_kwargs=compile_kwargs)

    check_same(make, rng)


@pytest.mark.parametrize("name", CASES)
def test_every_model(name, rng):
    model = CASES[name].ordinary()

    def make(compile_kwargs):
        return SGLD(
            model=model,
            batch_size=11,
            step_size=1e-5,
            preconditioner="identity",
            compile_kwargs=compile_kwargs,
        )

    check_same(make, rng)


@pytest.mark.parametrize("preconditioner", ["identity", "curvature", np.array([1.0, 2.0, 0.5])])
def test_single_precision_and_preconditioners(preconditioner, rng):
    with pytensor.config.change_flags(floatX="float32"):
        model = logistic_model()
        step = SGLDCV(
            model=model,
            batch_size=20,
            preconditioner=preconditioner,
            compile_kwargs={"mode": "NUMBA"},
        )
    step.chain.begin(rng, np.zeros(3))
    draws = step.chain.advance(20)
    assert draws.positions.dtype == draws.gradients.dtype == np.float32
    assert np.isfinite(draws.positions).all()


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["cv", "saga"])
def test_pickled_step_continues_the_same(gradient):
    step = SGLD(
        model=logistic_model(),
        batch_size=20,
        gradient=gradient,
        compile_kwargs={"mode": "NUMBA"},
    )
    step.chain.begin(np.random.default_rng(1), np.zeros(3))
    chain = cloudpickle.loads(cloudpickle.dumps(step.chain))
    expected, draws = step.chain.advance(20), chain.advance(20)
    np.testing.assert_array_equal(draws.positions, expected.positions)


@pytest.mark.slow
def test_other_processes(rng):
    model = logistic_model()
    step = SGLDCV(model=model, batch_size=20, compile_kwargs={"mode": "NUMBA"})
    expected = sample(model, step).posterior["beta"]
    for context in ("fork", "forkserver"):
        draws = sample(model, step, cores=2, mp_ctx=context).posterior["beta"]
        np.testing.assert_array_equal(draws, expected)


def run(function, state, noise=None, memory=()):
    """Results of a loop of three transitions whose state is a vector."""
    size, (index, step_size) = len(state), (pt.lscalar(), pt.dscalar())
    vectors = [pt.tensor(shape=(size,), dtype="float64") for _ in range(2)]
    entries, mode = [index, vectors[0], step_size], with_numpy_products("NUMBA")
    loop = LoopOfTransitions(function, entries, vectors[1:], memory, mode)
    noise = np.zeros((3, size)) if noise is None else noise
    return loop(np.asarray(state, float), np.arange(3), noise, np.ones(3))


def test_lengths_that_differ_are_an_error():
    """Loops over elements do not read beyond an array."""
    data = pytensor.shared(np.zeros(2), shape=(None,))

    def transition(index, noise, step_size, state):
        return (pt.specify_shape(state + data, (3,)),)

    with pytest.raises(ValueError, match="lengths differ"):
        run(transition, np.ones(3))


@pytest.mark.parametrize("number", [3, -4])
def test_numbers_of_groups_out_of_range_are_an_error(number):
    groups = pytensor.shared(np.array([0, number]))

    def transition(index, noise, step_size, state):
        scattered = pt.inc_subtensor(pt.zeros(3)[groups], state[:2])
        return (pt.specify_shape(scattered, (3,)),)

    with pytest.raises(IndexError, match="out of range"):
        run(transition, np.ones(3))


def test_numbers_that_are_no_numbers():
    """Infinite and missing constants, divisions by zero, and comparisons keep their meaning."""

    def transition(index, noise, step_size, state):
        bounded = pt.switch(pt.gt(state, 1.5), np.inf, pt.switch(pt.lt(state, 0.5), -np.inf, 7))
        return state + 1, bounded, 1 / (state - 1), pt.switch(pt.eq(state, 1), np.nan, state)

    states, bounded, inverses, missing = run(transition, [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(states, np.arange(3)[:, None] + [1, 2, 3])
    np.testing.assert_array_equal(bounded[0], [-np.inf, 7, np.inf])
    np.testing.assert_array_equal(inverses[0], [-1, np.inf, 1])
    np.testing.assert_array_equal(missing[0], [0, np.nan, 2])


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int64"])
def test_whole_numbers_and_truth_values(dtype):
    """Sums, differences, products and comparisons have the rules of NumPy, as in PyTensor."""
    a, b = np.array([1, 0, 1]).astype(dtype), np.array([1, 1, 0]).astype(dtype)
    left, right = (pytensor.shared(values, shape=(3,)) for values in (a, b))

    def results(left, right):
        others = [] if dtype == "bool" else [left - right, -right]
        others += [left + right, left * right, pt.lt(left, right), pt.switch(left, right, 0.5)]
        return [other.astype("float64") for other in others]

    def transition(index, noise, step_size, state):
        return state, *(pt.specify_shape(result, (3,)) for result in results(left, right))

    _, *values = run(transition, np.ones(3))
    expected = pytensor.function([], results(left, right), mode="FAST_COMPILE")()
    for found, exact in zip(values, expected, strict=True):
        np.testing.assert_array_equal(found[0], exact)


@pytest.mark.slow
def test_functions_that_have_no_source_of_their_own(rng):
    """Special functions, cumulative sums, sorting and factorisations are PyTensor's."""
    matrix = pytensor.shared(np.eye(3) + 0.5)

    def transition(index, noise, step_size, state):
        solved = pt.linalg.solve(matrix, state + noise)
        others = pt.cumsum(state) + pt.sort(noise) + pt.gammaln(2 + pt.abs(state))
        return pt.specify_shape(solved, (3,)), others, (state * noise).sum(), index * step_size

    noise = rng.normal(size=(3, 3))
    states, others, sums, products = run(transition, [1.0, -2.0, 0.5], noise)
    state = np.array([1.0, -2.0, 0.5])
    for k in range(3):
        expected = np.cumsum(state) + np.sort(noise[k]) + special.gammaln(2 + np.abs(state))
        np.testing.assert_allclose(others[k], expected, rtol=1e-12)
        np.testing.assert_allclose(sums[k], state @ noise[k], rtol=1e-12)
        state = np.linalg.solve(np.eye(3) + 0.5, state + noise[k])
        np.testing.assert_allclose(states[k], state, rtol=1e-12)
    np.testing.assert_array_equal(products, [0, 1, 2])


def test_rows_that_are_gathered_and_scattered():
    """A group that occurs twice gets both of its rows, and numbers from the end are allowed."""
    groups = pytensor.shared(np.array([0, 2, 2, -1]))

    def transition(index, noise, step_size, state):
        scattered = pt.inc_subtensor(pt.zeros(3)[groups], state[groups] + 1)
        return (pt.specify_shape(scattered, (3,)),)

    (states,) = run(transition, [1.0, 5.0, 2.0])
    np.testing.assert_array_equal(states[0], [2, 0, 9])


def factors(rng):
    """Ratings of items by users, each of which has a vector of effects."""
    rows, rank = 60, 3
    user, item = rng.integers(0, 5, rows), rng.integers(0, 4, rows)
    with pm.Model() as model:
        U, V = pm.Normal("U", shape=(5, rank)), pm.Normal("V", shape=(4, rank))
        pm.Normal("rating", (U[user] * V[item]).sum(-1), 1.0, observed=rng.normal(size=rows))
    return model


def slopes(rng):
    """Slopes of groups, some of which have no row in a minibatch."""
    rows, columns = 60, 3
    design, group = rng.normal(size=(rows, columns)), rng.integers(0, 7, rows)
    with pm.Model() as model:
        slope = pm.Normal("slope", shape=(7, columns))
        predictor = (design * slope[group]).sum(-1)
        pm.Poisson("y", pm.math.exp(predictor), observed=rng.poisson(1.0, rows))
    return model


@pytest.mark.parametrize("make_model", [factors, slopes])
def test_effects_that_are_rows_of_matrices(make_model, rng):
    """The rows are read where they are needed, without an array of them."""
    model = make_model(rng)

    def make(compile_kwargs):
        settings = {"batch_size": 11, "step_size": 1e-3, "preconditioner": "identity"}
        return SGLD(model=model, compile_kwargs=compile_kwargs, **settings)

    check_same(make, rng)


GROUPS = np.array([0, 2, 2, -1])
OTHERS = np.array([1, 0, 2, 0])


def same_as_pytensor(results, state):
    """The state and the other results of the first transition are those of PyTensor."""

    def transition(index, noise, step_size, state):
        return results(state)

    symbolic = pt.tensor(shape=(len(state),), dtype="float64")
    exact = pytensor.function([symbolic], results(symbolic), mode="FAST_COMPILE")(state)
    for found, value in zip(run(transition, state), exact, strict=True):
        np.testing.assert_allclose(found[0], value, rtol=1e-14)


def test_rows_of_a_matrix_are_gathered_and_scattered(rng):
    """A group that occurs twice gets both of its rows, and numbers from the end are allowed."""
    groups, design = pytensor.shared(GROUPS), pytensor.shared(rng.normal(size=(4, 2)))

    def results(state):
        rows = state.reshape((3, 2))[groups]
        sums = (design * rows * rows).sum(1)
        added = pt.inc_subtensor(pt.zeros((3, 2))[groups], pt.exp(rows) * sums[:, None])
        column = pt.inc_subtensor(pt.ones((3, 2))[groups], sums[:, None])
        row = pt.inc_subtensor(pt.ones((3, 2))[groups], state[:2])
        others = [pt.specify_shape(sums, (4,)), column, row, rows.sum(), rows.sum(0)]
        return [added.ravel(), *others]

    same_as_pytensor(results, rng.normal(size=6))


@pytest.fixture
def without_calls(monkeypatch):
    """Every operation has a source of its own."""

    def fails(self, op, node):
        raise AssertionError(f"{op} is a call")

    monkeypatch.setattr(Source, "_write_call", fails)


def test_operations_on_many_axes_and_on_a_transposed_matrix(without_calls, rng):
    matrix = pytensor.shared(rng.normal(size=(2, 3)))

    def results(state):
        many = state.reshape((1, 2, 1, 3, 1))
        joined = pt.concatenate([many, pt.exp(many[::-1])], axis=2)
        raised = pt.inc_subtensor(joined[:, 1], state[0]) + matrix[:, None, :, None]
        sums = raised.sum(axis=(2, 4)).ravel()
        return [pt.specify_shape(vector, (6,)) for vector in (sums, matrix.T.ravel())]

    same_as_pytensor(results, rng.normal(size=6))


def test_parts_have_the_sizes_of_a_split():
    sizes = pytensor.shared(np.array([2, 2]))

    def transition(index, noise, step_size, state):
        first, second = pt.split(state * 1, sizes, n_splits=2)
        return (pt.specify_shape(pt.concatenate([second, first, state[:1]]), (5,)),)

    with pytest.raises(ValueError, match="lengths differ"):
        run(transition, np.ones(5))


def test_operations_on_several_axes(without_calls, rng):
    """Other shapes, reductions, joins, splits, and parts that two numbers select."""
    some, numbers = pytensor.shared(GROUPS), pytensor.shared(OTHERS)
    design = pytensor.shared(rng.normal(size=(4, 6)), shape=(4, None))

    def results(state):
        cube = (design * state).reshape((4, 3, -1))
        first, second = pt.split(cube, [1, 2], n_splits=2, axis=1)
        joined = pt.concatenate([second, first, cube[:, 1:2]], axis=1)
        table = joined.max(axis=0)
        chosen = table[some, numbers % 2]
        changed = pt.set_subtensor(table[:, 1], pt.arange(some.shape[0]) * chosen)
        counted = pt.inc_subtensor(pt.zeros((4, 2))[some, numbers % 2], chosen)
        level = pt.alloc(pt.minimum(state[0], 0.5), design.shape[0], 2).ravel()
        finite = pt.isinf(cube).any() | pt.isnan(cube).all(axis=(0, 1, 2))
        vectors = [joined.sum(axis=2), joined.sum(axis=(0, 2)), chosen, changed, counted, level]
        total = sum(vector.sum() for vector in vectors) + finite
        kept = [pt.specify_shape(changed, (4, 2)), pt.specify_shape(counted, (4, 2))]
        return [state + total, pt.specify_shape(joined.sum(axis=2), (4, 4)), *kept]

    same_as_pytensor(results, rng.normal(size=6))


def search(state, steps=50):
    """Square roots of positive numbers by Newton's method, until all are found."""
    number = pt.exp(state)

    def step(root, change):
        following = (root + number / root) / 2
        return [following, following - root], until(pt.all(pt.abs(following - root) < 1e-12))

    start = [number, pt.zeros_like(number)]
    roots, changes = pytensor.scan(step, outputs_info=start, n_steps=steps, return_updates=False)
    return roots[-1], changes[-1]


def test_a_search_is_a_loop_inside_of_the_loop(without_calls, rng):
    def results(state):
        roots, changes = search(state)
        return state + changes, roots.sum()

    same_as_pytensor(results, rng.normal(size=3))


def test_each_of_two_searches_computes_its_own_numbers(without_calls, rng):
    """PyTensor has one graph for the steps of both."""

    def results(state):
        (near, _), (far, _) = search(state), search(state + 5)
        return state + far / near, near.sum()

    same_as_pytensor(results, rng.normal(size=3))


def test_rows_that_are_read_where_they_are_needed_are_those_before_a_change(rng):
    """Some of them change in place while others, which are read afterwards, keep their numbers."""
    groups, others = (
        pytensor.shared(GROUPS, shape=(4,)),
        pytensor.shared(np.array([3, 1, 0]), shape=(3,)),
    )

    def results(state):
        rows = state[groups]
        before, changed = rows[others], pt.set_subtensor(rows[1], 5.0)
        from_the_end = state.reshape((3, 2))[:, others[1:] - 2]
        return state, before * changed[:3], changed, from_the_end

    same_as_pytensor(results, rng.normal(size=6))


def test_a_check_of_a_model_is_an_error_with_its_words():
    def transition(index, noise, step_size, state):
        return (Assert("the index is two")(state + 1, pt.lt(index, 2)),)

    with pytest.raises(AssertionError, match="the index is two"):
        run(transition, np.ones(3))


@pytest.mark.slow
def test_rows_that_are_read_where_they_are_needed_may_be_kept_too(rng):
    """The record, a function of PyTensor and a transposed matrix need them in memory."""
    groups = pytensor.shared(GROUPS)

    def results(state):
        rows = pt.specify_shape(state.reshape((3, 2))[groups], (4, 2))
        squares = rows**2
        return state + (rows * squares).sum(), rows, pt.cumsum(rows, axis=0), squares.T

    same_as_pytensor(results, rng.normal(size=6))


def test_rows_of_a_memory_are_read_before_it_is_changed(rng):
    """Both the rows and the numbers, which may stand in a memory, are those from before."""
    groups, others = pytensor.shared(GROUPS, shape=(4,)), pytensor.shared(OTHERS)
    table = pytensor.shared(rng.normal(size=(3, 2)), shape=(3, 2))

    def results(state, table, groups):
        changed = pt.set_subtensor(table[others], table[others] + 1)
        rows = table[groups]
        total = (rows * changed.sum()).sum(1)
        added = pt.inc_subtensor(pt.zeros((3, 2))[groups], rows * changed.sum())
        numbers = pt.set_subtensor(groups[:2], [1, 1])
        return state + total.sum() + numbers.sum(), changed, numbers, total, added

    def transition(index, noise, step_size, state, table, groups):
        return results(state, table, groups)

    before, state = table.get_value(), np.ones(2)
    exact = [np.asarray(value.eval()) for value in results(pt.constant(state), table, groups)]
    found = run(transition, state, memory=[table, groups])
    np.testing.assert_allclose(found[0][0], exact[0], rtol=1e-14)
    for values, expected in zip(found[1:], exact[3:], strict=True):
        np.testing.assert_allclose(values[0], expected, rtol=1e-14)
    assert not np.array_equal(table.get_value(), before)


@pytest.mark.parametrize("number", [3, -4])
def test_numbers_of_rows_out_of_range_are_an_error(number):
    groups = pytensor.shared(np.array([0, number]))

    def transition(index, noise, step_size, state):
        sums = (state.reshape((3, 2))[groups] * 2).sum(1)
        return state, pt.specify_shape(sums, (2,))

    with pytest.raises(IndexError, match="out of range"):
        run(transition, np.ones(6))


def test_a_large_memory_is_not_copied():
    """A copy of 80 MB in each of 3000 transitions would take a minute."""
    entries = [pt.lscalar(), pt.lvector()]
    memory = [pytensor.shared(np.zeros(10**7)), pytensor.shared(np.zeros((10**6, 10)))]

    def transition(number, numbers, state, vector, table):
        vector = pt.set_subtensor(vector[number : number + 2], state[:2])
        vector = pt.inc_subtensor(vector[numbers], 1.0)
        return state + vector[number], vector, pt.set_subtensor(table[numbers], state)

    mode = with_numpy_products("NUMBA")
    loop = LoopOfTransitions(transition, entries, [pt.tensor(shape=(10,))], memory, mode)
    arrays = [variable.get_value(borrow=True) for variable in memory]
    numbers = np.tile(np.arange(4), (3000, 1))
    loop(np.zeros(10), numbers[:1, 0], numbers[:1])
    before = time.process_time()
    loop(np.zeros(10), numbers[:, 0], numbers)
    assert time.process_time() - before < 5
    for variable, array in zip(memory, arrays, strict=True):
        assert np.shares_memory(variable.get_value(borrow=True), array)


def test_memory_is_read_before_it_is_changed():
    """Its old elements are used and recorded, and another array of it takes them."""
    first, second = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0])
    memory = [pytensor.shared(values, shape=(3,)) for values in (first, second)]

    def transition(index, noise, step_size, state, first, second):
        changed = pt.set_subtensor(first[index], state[0])
        return state + first[index], changed, first + second.sum(), changed, first[1:]

    states, changed, records = run(transition, np.ones(3), memory=memory)
    state = np.ones(3)
    for k in range(3):
        np.testing.assert_array_equal(records[k], first[1:])
        state, second, entry = state + first[k], first + second.sum(), state[0]
        first[k] = entry
        np.testing.assert_array_equal(states[k], state)
        np.testing.assert_array_equal(changed[k], first)
    for variable, expected in zip(memory, (first, second), strict=True):
        np.testing.assert_array_equal(variable.get_value(), expected)


def test_records_of_a_memory_are_not_changed_afterwards():
    memory = [pytensor.shared(np.ones(3), shape=(3,))]

    def transition(index, noise, step_size, state, table):
        changed = 2 * pt.set_subtensor(table[index], 5.0)
        return state, changed, changed

    _, records = run(transition, np.ones(3), memory=memory)
    np.testing.assert_array_equal(records, [[10, 2, 2], [20, 10, 4], [40, 20, 10]])
    np.testing.assert_array_equal(memory[0].get_value(), records[-1])


def test_arrays_of_a_memory_change_places():
    memory = [pytensor.shared(np.full(3, number)) for number in (1.0, 2.0)]

    def transition(index, noise, step_size, state, first, second):
        return state + first, second, first

    (states,) = run(transition, np.zeros(3), memory=memory)
    np.testing.assert_array_equal(states[:, 0], [1, 3, 4])
    assert [variable.get_value()[0] for variable in memory] == [2, 1]


def test_models_of_other_sizes_have_the_same_source():
    """The compile cache of one regression then serves others."""
    keys = set()
    for columns in (3, 5):
        data = pytensor.shared(np.ones((20, columns)))

        def transition(index, noise, step_size, state, data=data):
            rows = data[index : index + 4]
            gradient = -state - pt.sigmoid(rows @ state) @ rows
            return state + step_size * gradient + noise, gradient

        vectors = [pt.vector(shape=(columns,)) for _ in range(2)]
        entries = [pt.lscalar(), vectors[0], pt.dscalar()]
        loop = LoopOfTransitions(transition, entries, vectors[1:], (), with_numpy_products("NUMBA"))
        keys.add(loop.key)
    assert len(keys) == 1
    assert None not in keys


def test_a_state_may_be_a_part_of_an_array_of_this_transition():
    """The memory of arrays is used again, but not where the next transition reads it."""
    weights = pytensor.shared(np.diag([0.5, 1.0, 2.0]), shape=(3, 3))

    def transition(noise, x, y):
        both = pt.concatenate([x + y, noise * y])
        product = pt.dot(weights, x)
        return pt.specify_shape(both[::2], (3,)), product[::-1], product

    steps, x, y = np.arange(12.0).reshape(4, 3) / 10, np.arange(3.0), np.ones(3)
    state = [pt.vector("x", shape=(3,)), pt.vector("y", shape=(3,))]
    function = LoopOfTransitions(
        transition, [pt.vector("noise", shape=(3,))], state, (), with_numpy_products("NUMBA")
    )
    results = function(x, y, steps)
    for k, noise in enumerate(steps):
        product = [0.5, 1.0, 2.0] * x
        x, y = np.concatenate([x + y, noise * y])[::2], product[::-1]
        for values, expected in zip(results, (x, y, product), strict=True):
            np.testing.assert_allclose(values[k], expected)


def test_arrays_are_written_to_where_they_are_recorded():
    """An array may be recorded twice, and the state may be a part of what is written over."""

    def transition(noise, state):
        following = state[::-1] + noise
        return following, following, following * noise

    vectors = [pt.vector(shape=(3,)) for _ in range(2)]
    loop = LoopOfTransitions(transition, vectors[:1], vectors[1:], (), with_numpy_products("NUMBA"))
    state = expected = np.array([1.0, 2.0, 4.0])
    for number in range(3):
        noise = np.arange(3.0) + number
        states, again, products = loop(state, noise[None], reuse=True)
        expected = expected[::-1] + noise
        np.testing.assert_array_equal(states, expected[None])
        np.testing.assert_array_equal(again, states)
        np.testing.assert_array_equal(products, states * noise)
        state = states[-1]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bool"])
@pytest.mark.parametrize("columns", [1, 3])
def test_sums_over_one_axis(columns, dtype, rng):
    """Truth values are counted."""
    matrix = np.round(rng.normal(size=(50, columns)), 3).astype(dtype)
    shared = pytensor.shared(matrix, shape=(50, columns))

    def transition(index, noise, step_size, state):
        return state, shared.sum(0), shared.sum(1)

    _, down, across = run(transition, np.zeros(3))
    for values, axis in ((down, 0), (across, 1)):
        expected = matrix.sum(axis, dtype=int if dtype == "bool" else float)
        np.testing.assert_allclose(values[0], expected, rtol=1e-6 if dtype == "float32" else 1e-13)


def test_without_numba_no_rows_are_asked_for(monkeypatch):
    """Users who debug set `NUMBA_DISABLE_JIT`, and the transitions are run as Python."""
    monkeypatch.setattr("numba.core.config.DISABLE_JIT", 1)
    prefetch_in_numba.cache_clear()
    assert prefetch_in_numba()(np.zeros(3), 0, 1) is None
    prefetch_in_numba.cache_clear()


def test_rows_of_later_transitions_are_asked_for_and_change_no_draw(monkeypatch):
    """Data of more than a megabyte, at both ends of which windows lie."""
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(50_000, 3)), rng.normal(size=50_000)
    assert X.nbytes > SMALLEST > y.nbytes
    draws, sources = [], []
    write = Source.of_loop

    def noted(*arguments):
        sources.append(write(*arguments))
        return sources[-1]

    monkeypatch.setattr(Source, "of_loop", noted)
    with pm.Model() as model:
        beta = pm.Normal("beta", shape=3)
        pm.Normal("y", X @ beta, observed=y)
    for _ in range(2):
        settings = {"step_size": 1e-3, "preconditioner": "identity", "batch_size": 20}
        step = SGLD(model=model, compile_kwargs=NUMBA, **settings)
        draws.append(sample(model, step).posterior["beta"])
        monkeypatch.setattr(Source, "_ask_for_rows", lambda *_: None)
    assert ["prefetch(" in source for source in sources] == [True, False]
    np.testing.assert_array_equal(*draws)


def test_results_do_not_depend_on_addresses():
    """LLVM may add in another order where arrays may overlap, if it is free to choose the order."""
    vector = pt.dvector()
    mode, entries = with_numpy_products("NUMBA"), [pt.lscalar(), pt.dvector(), pt.dscalar()]
    loop = LoopOfTransitions(lambda *given: (given[-1],), entries, [vector], (), mode)
    assert loop._function.targetoptions["fastmath"] is False
