"""Functions of many pieces of rows on several threads, with the same results as on one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache
from itertools import chain, islice
from threading import Lock
from typing import Any

import numpy as np
from pytensor.compile.executor import Function
from pytensor.compile.ops import FromFunctionOp
from pytensor.graph.op import HasInnerGraph
from pytensor.link.basic import PerformLinker
from threadpoolctl import ThreadpoolController

OfRows = Callable[[Any, list[np.ndarray]], Any]
"""Function of a value, such as a posterior, and of some rows of all arrays."""

FEWEST_PIECES = 4
"""Threads begin where so many pieces are left. Starting them takes longer than a few pieces."""


@cache
def _thread_pools() -> ThreadpoolController:
    """Those of the libraries that are loaded at the first pass."""
    return ThreadpoolController()


class _ThreadsForPasses:
    """The threads that BLAS had before the first of those that leave them to passes.

    They are those of the process, so several threads that make samplers at the same time share
    them: the first one takes them from BLAS, and the last one gives them back.
    """

    def __init__(self) -> None:
        self._lock, self._holders = Lock(), 0
        self.threads: int | None = None

    def take(self) -> None:
        """Leave one thread to BLAS."""
        with self._lock:
            if not self._holders:
                self.threads = threads_of_blas()
                self._limit = _thread_pools().limit(limits=1, user_api="blas")
            self._holders += 1

    def give_back(self) -> None:
        """End what `take` began."""
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._limit.restore_original_limits()
                self.threads = None


_left_to_passes = _ThreadsForPasses()


@contextmanager
def threads_for_passes() -> Iterator[None]:
    """Leave the threads of BLAS to passes over rows, and BLAS one of them.

    For matrices of some hundred rows more threads save little, and where other programs run they
    wait for each other many times as long.
    """
    _left_to_passes.take()
    try:
        yield
    finally:
        _left_to_passes.give_back()


def threads_of_blas() -> int:
    """Threads that BLAS may use now, or passes, which users and PyMC set for its process."""
    if (threads := _left_to_passes.threads) is not None:
        return threads
    pools = _thread_pools().select(user_api="blas").info()
    return max((pool["num_threads"] for pool in pools), default=1)


def on_one_thread(function: Callable, *arguments: Any) -> Any:
    """Result of a function for which BLAS takes one thread."""
    if _left_to_passes.threads is not None:
        return function(*arguments)
    with _thread_pools().limit(limits=1, user_api="blas"):
        return function(*arguments)


def in_order(
    function: OfRows, value: Any, pieces: Iterator[list[np.ndarray]], threads: int
) -> Iterator[Any]:
    """Results of a function of a value and of each piece of rows, in their order.

    Several threads evaluate the function, and the calling one takes the pieces. BLAS takes one
    thread in each, as on the workers of a cluster: with another number it would add up the rows in
    another order. So the results do not depend on the number of threads.

    Parameters
    ----------
    function : callable
        Where several threads call it, it should change nothing, and every compiled function that it
        calls should be a `SharedFunction`.
    value, pieces
    threads : int
    """
    with _thread_pools().limit(limits=1, user_api="blas"):
        first = list(islice(pieces, FEWEST_PIECES))
        # What is compiled at the first call is compiled once.
        yield from (function(value, rows) for rows in first[:1])
        if threads == 1 or len(first) < FEWEST_PIECES:
            yield from (function(value, rows) for rows in chain(first[1:], pieces))
            return
        begun: deque[Future] = deque()
        with ThreadPoolExecutor(threads) as pool:
            try:
                for rows in chain(first[1:], pieces):
                    # The context has the error state of NumPy.
                    begun.append(pool.submit(copy_context().run, function, value, rows))
                    if len(begun) > threads:
                        yield begun.popleft().result()
                while begun:
                    yield begun.popleft().result()
            finally:
                for future in begun:
                    future.cancel()


def read_ahead(pieces: Iterator[Any], count: int) -> Iterator[Any]:
    """Pieces, of which a thread makes so many before they are asked for."""
    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(next, pieces, None) for _ in range(count))
        try:
            while (piece := waiting.popleft().result()) is not None:
                waiting.append(thread.submit(next, pieces, None))
                yield piece
        finally:
            for future in waiting:
                future.cancel()


class SharedFunction:
    """A compiled function that several threads may call.

    A function of PyTensor has one memory for what it computes, so each of the threads that are in
    it has a copy. Threads take turns where a copy would not do, see `_may_be_copied`.

    Parameters
    ----------
    function : pytensor.compile.executor.Function
    """

    def __init__(self, function: Function):
        self.function, self._idle, self._lock = function, [function], Lock()
        self._copied = _may_be_copied(function)

    def __call__(self, *arguments: Any) -> Any:
        """Values of the outputs."""
        if not self._copied:
            with self._lock:
                return self.function(*arguments)
        try:
            function = self._idle.pop()
        except IndexError:
            with self._lock:
                function = self.function.copy()
            function.trust_input = self.function.trust_input
        try:
            return function(*arguments)
        finally:
            self._idle.append(function)


def _may_be_copied(function: Function) -> bool:
    """Whether copies of a function have nothing in common that changes in a call.

    Operations with an inner function share it with their copies, those of users may keep anything,
    and C code runs on one thread at a time anyway.
    """
    return isinstance(function.maker.linker, PerformLinker) and not any(
        isinstance(node.op, HasInnerGraph | FromFunctionOp)
        or not type(node.op).__module__.startswith("pytensor.")
        for node in function.maker.fgraph.apply_nodes
    )
