"""Passes over rows on several threads give the bits of a pass on one."""

from __future__ import annotations

from threading import Barrier, Event, Thread, current_thread
from time import sleep
from types import SimpleNamespace

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pytensor.compile.ops import wrap_py
from threadpoolctl import threadpool_info, threadpool_limits

from pymc_sgmcmc import SGLDCV, Posterior
from pymc_sgmcmc.compiling.compiled import PYTHON_MODE, compile_quietly
from pymc_sgmcmc.posterior import evaluation
from pymc_sgmcmc.posterior import threads as threads_module
from pymc_sgmcmc.posterior.threads import (
    FEWEST_PIECES,
    SharedFunction,
    in_order,
    on_one_thread,
    read_ahead,
    threads_for_passes,
    threads_of_blas,
)


def pieces(count):
    return ([np.full(2, float(number))] for number in range(count))


def test_results_are_in_order():
    meeting, names = Barrier(3), set()

    def of_rows(value, rows):
        if 1 <= rows[0][0] <= 9:
            meeting.wait(timeout=60)  # three calls are in it at the same time
        names.add(current_thread().name)
        return value + rows[0].sum()

    found = in_order(of_rows, 0.5, pieces(20), 3)
    assert list(found) == [0.5 + 2 * number for number in range(20)]
    assert len(names) == 4


@pytest.mark.parametrize(("count", "threads"), [(FEWEST_PIECES - 1, 3), (20, 1)])
def test_few_pieces_take_no_threads(count, threads):
    def of_rows(_, rows):
        return current_thread()

    assert set(in_order(of_rows, None, pieces(count), threads)) == {current_thread()}


def test_the_error_of_the_first_bad_piece():
    def of_rows(_, rows):
        if rows[0][0] >= 7:
            raise ValueError(f"piece {rows[0][0]:.0f}")
        return rows[0][0]

    found = in_order(of_rows, None, pieces(40), 3)
    assert [next(found) for _ in range(7)] == list(range(7))
    with pytest.raises(ValueError, match="piece 7"):
        next(found)


def test_errors_of_numpy_are_those_of_the_caller():
    def of_rows(_, rows):
        return np.log(-1 - rows[0][0])

    with np.errstate(invalid="ignore"):
        assert np.isnan(list(in_order(of_rows, None, pieces(20), 3))).all()


@pytest.mark.slow
def test_a_pass_has_the_bits_of_one_thread(monkeypatch, rng):
    monkeypatch.setattr(evaluation, "CHUNK_ELEMENTS", 3_000)
    X = rng.normal(size=(60_000, 3))
    with pm.Model() as model:
        slopes = pm.Normal("slopes", shape=3)
        pm.Bernoulli("y", logit_p=X @ slopes, observed=rng.random(60_000) < 0.3)
    position = np.array([0.3, -1.0, 0.2])

    def passes():
        posterior = Posterior(model)
        value, gradient = posterior.log_density_and_gradient(position)
        curvature = posterior.likelihood_curvature(position)
        return np.array([value, *gradient, *posterior.likelihood_gradient(position), *curvature[0]])

    expected = passes()
    monkeypatch.setattr(evaluation, "threads_of_blas", lambda: 4)
    for _ in range(5):
        np.testing.assert_array_equal(passes(), expected)


def blas_threads():
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def test_passes_have_the_threads_that_blas_leaves():
    with threadpool_limits(limits=2, user_api="blas"):
        before = blas_threads()
        with threads_for_passes():
            assert blas_threads() == {1}
            assert threads_of_blas() == max(before)
            with threads_for_passes():
                assert threads_of_blas() == max(before)
            assert on_one_thread(blas_threads) == {1}
            assert threads_of_blas() == max(before)
        assert blas_threads() == before
        with pytest.raises(ValueError, match="an error"), threads_for_passes():
            raise ValueError("an error")
        assert blas_threads() == before
        assert on_one_thread(blas_threads) == {1}


class Pools:
    """Stands for those of the libraries: what another thread may set depends on the library."""

    def __init__(self, threads):
        self.threads, self.restored = threads, 0

    def select(self, **_):
        return SimpleNamespace(info=lambda: [{"num_threads": self.threads}])

    def limit(self, limits, **_):
        before, self.threads = self.threads, limits
        return SimpleNamespace(restore_original_limits=lambda: self.restore(before))

    def restore(self, threads):
        self.threads, self.restored = threads, self.restored + 1


def test_samplers_that_are_made_at_the_same_time_share_the_threads(monkeypatch):
    """The second one begins within the first one, and ends after it."""
    pools, begun, ended, found = Pools(3), Event(), Event(), []
    monkeypatch.setattr(threads_module, "_thread_pools", lambda: pools)

    def make():
        with threads_for_passes():
            begun.set()
            ended.wait(60)

    first = Thread(target=make)
    first.start()
    begun.wait(60)
    with threads_for_passes():
        found.append((threads_of_blas(), pools.threads))
        ended.set()
        first.join(60)
        found.append((threads_of_blas(), pools.threads))
    assert found == [(3, 1), (3, 1)]
    assert (pools.threads, pools.restored) == (3, 1)
    assert threads_of_blas() == 3


def test_blas_has_its_threads_after_a_setup(rng):
    found = []

    class Seen(SGLDCV):
        def _design(self, setup):
            found.append((blas_threads(), setup.posterior._threads))
            return super()._design(setup)

    with threadpool_limits(limits=2, user_api="blas"):
        before = blas_threads()
        with pm.Model():
            mean = pm.Normal("mean")
            pm.Normal("y", mean, observed=rng.normal(size=500))
            Seen()
        assert blas_threads() == before
    assert found == [({1}, max(before))]


def test_threads_in_a_function_have_copies_of_it():
    meeting = Barrier(3)

    @wrap_py(itypes=[pt.dvector], otypes=[pt.dvector])
    def waits(x):
        if 1 <= x[0] <= 9:
            meeting.wait(timeout=60)
        return 2 * x

    x = pt.dvector("x")
    function = SharedFunction(compile_quietly([x], waits(x) + 1, PYTHON_MODE))
    assert not function._copied  # the operation is not PyTensor's
    function._copied = True
    found = in_order(lambda function, rows: function(*rows), function, pieces(20), 3)
    np.testing.assert_array_equal([value[0] for value in found], 2 * np.arange(20.0) + 1)
    assert len(function._idle) == 3


def test_threads_take_turns_in_operations_of_users():
    inside = []

    @wrap_py(itypes=[pt.dvector], otypes=[pt.dvector])
    def alone(x):
        inside.append(x)
        sleep(0.001)
        assert len(inside) == 1
        inside.pop()
        return 2 * x

    x = pt.dvector("x")
    function = SharedFunction(compile_quietly([x], alone(x), PYTHON_MODE))
    found = in_order(lambda function, rows: function(*rows), function, pieces(50), 3)
    np.testing.assert_array_equal([value[0] for value in found], 2 * np.arange(50.0))


def test_other_variables_take_one_thread(rng, monkeypatch):
    """They are set to other values, and back, while rows are evaluated."""
    monkeypatch.setattr(evaluation, "threads_of_blas", lambda: 4)
    y = rng.normal(size=50)
    with pm.Model() as model:
        mean = pm.Normal("mean")
        sd = pm.HalfNormal("sd")
        pm.Normal("y", mean, sd, observed=y)
    assert Posterior(model)._threads == 4
    assert Posterior(model, variables=[mean])._threads == 1


def test_pieces_that_are_read_ahead():
    taken = []

    def numbers():
        for number in range(1, 30):
            taken.append(number)
            yield number
        raise OSError("the file vanished")

    found = read_ahead(numbers(), 4)
    for number in range(1, 30):
        assert next(found) == number
        sleep(0.001)
        assert len(taken) <= number + 5
    with pytest.raises(OSError, match="vanished"):
        next(found)
