"""Iterations as tasks: pure functions of states, here, on an executor or on a Dask cluster."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from pymc_sgmcmc.sampling.by_blocks.block import Places, Sides, Turn, UserGroup
from pymc_sgmcmc.sampling.by_blocks.grid import item_group
from pymc_sgmcmc.sampling.by_blocks.steps import BlockStep, Coefficients, Looked, Pair, State

MESSAGE_BYTES = 4_000_000
"""The rows of a group go to a Dask cluster in messages of at most this size. Dask warns of those of
10 MB."""


class Tasks:
    """Where functions run: here, one after the other. Results stay there until asked for."""

    def place(self, group: UserGroup) -> Any:
        """A group of users where its tasks will run."""
        return group

    def submit(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function of other results, or a promise of it.

        Parameters
        ----------
        number : int
            Of the group of users.
        function : callable
        *arguments
            Results of `submit`, and other things.
        """
        return function(*arguments)

    def results(self, promises: Sequence[Any]) -> list[Any]:
        """Results, on this machine."""
        return list(promises)

    def wait(self, promises: Sequence[Any]) -> None:
        """Wait until these have been computed."""
        self.results(promises)


class OnExecutor(Tasks):
    """An executor of `concurrent.futures`, to which all arguments of a task go with it."""

    def __init__(self, executor: Any):
        self._executor = executor
        self._futures = type(executor.submit(int))

    def submit(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """A future. Results that it needs are waited for."""
        return self._executor.submit(function, *self.results(arguments))

    def results(self, promises: Sequence[Any]) -> list[Any]:
        """Results of the futures among these."""
        return [p.result() if isinstance(p, self._futures) else p for p in promises]


class OnDask(Tasks):
    """The workers of a Dask client. A group of users stays on its worker while that is alive.

    The rows of a group are arguments of a task, so the cluster makes the group again on another
    worker where its own has died, and all states after it by the same pure functions.
    """

    def __init__(self, client: Any):
        self._client = client
        self._workers = sorted(client.nthreads())

    def place(self, group: UserGroup) -> Any:
        """A promise of the group on its worker."""
        whole = pickle.dumps(group, protocol=pickle.HIGHEST_PROTOCOL)
        pieces = [
            self.submit(group.number, bytes, whole[start : start + MESSAGE_BYTES])
            for start in range(0, len(whole), MESSAGE_BYTES)
        ]
        return self.submit(group.number, _unpickled, *pieces)

    def submit(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """A future on the worker of the group, or on another where there is none."""
        where = {}
        if self._workers:
            worker = self._workers[number % len(self._workers)]
            where = {"workers": [worker], "allow_other_workers": True}
        return self._client.submit(function, *arguments, pure=False, **where)

    def results(self, promises: Sequence[Any]) -> list[Any]:
        """Results, gathered in one message."""
        return self._client.gather(list(promises))

    def wait(self, promises: Sequence[Any]) -> None:
        """Wait for all, without gathering them.

        Raises
        ------
        Exception
            Where a task has failed.
        """
        from distributed import wait

        wait(promises)
        for promise in promises:
            if promise.status == "error":
                promise.result()


def tasks_of(client: Any) -> Tasks:
    """Where the tasks of a client run."""
    if client is None:
        return Tasks()
    return OnDask(client) if hasattr(client, "nthreads") else OnExecutor(client)


def _unpickled(*pieces: bytes) -> UserGroup:
    return pickle.loads(b"".join(pieces))


# --- Tasks of an iteration ----------------------------------------------------------------------


def start(step: BlockStep, positions: Sides, moments: Sides) -> Pair:
    """States of a group of users and of a group of items."""
    users, items = (
        step.start(position, moment) for position, moment in zip(positions, moments, strict=True)
    )
    return users, items


def moved(
    group: UserGroup, step: BlockStep, turn: Turn, pair: Pair, items: State, *sums: Any
) -> Pair:
    """States after one iteration of a block, of its users and of the given items."""
    # What leaves the finite numbers is found by `sample_blocks`.
    with np.errstate(all="ignore"):
        return step.move(group, turn, (pair[0], items), *sums)


def looked(group: UserGroup, step: Any, turn: Turn, pair: Pair, items: State) -> Looked:
    """The first stage of an iteration with sums over all blocks."""
    with np.errstate(all="ignore"):
        return step.look(group, turn, (pair[0], items))


def reduced(step: Any, turn: Turn, *products: Any) -> Coefficients:
    """The sums over all blocks."""
    with np.errstate(all="ignore"):
        return step.reduced(turn, products)


def positions(pair: Pair) -> Sides:
    """Positions of the users and items of a block."""
    return pair[0][0], pair[1][0]


class BlockChain:
    """One chain: the states of all groups, wherever they are.

    Parameters
    ----------
    tasks : Tasks
    step : BlockStep
    groups : sequence
        `Tasks.place` of each group of users.
    places : Places
    position, moment : numpy.ndarray, shape (d,)
        Where the chain starts, and what `BlockStep.start` takes besides.
    """

    def __init__(
        self,
        tasks: Tasks,
        step: BlockStep,
        groups: Sequence[Any],
        places: Places,
        position: np.ndarray,
        moment: np.ndarray,
    ):
        self._tasks, self._step, self._groups = tasks, step, list(groups)
        self._places = places
        self._pairs = [
            tasks.submit(b, start, step, places.cut(position, b, b), places.cut(moment, b, b))
            for b in range(len(self._groups))
        ]
        # The group of items c was last met by this group of users.
        self._met = list(range(len(self._groups)))
        self._coefficients: Any = None

    def advance(self, turn: Turn) -> None:
        """One iteration."""
        parts = len(self._groups)
        items_of = [item_group(number, turn.part, parts) for number in range(parts)]
        items = [
            self._tasks.submit(self._met[group], itemgetter(1), self._pairs[self._met[group]])
            for group in items_of
        ]
        arguments = [
            (self._groups[number], self._step, turn, self._pairs[number], items[number])
            for number in range(parts)
        ]
        sums: list[tuple] = [()] * parts
        if self._step.reduces:
            found = [
                self._tasks.submit(number, looked, *arguments[number]) for number in range(parts)
            ]
            products = [
                self._tasks.submit(number, itemgetter(0), found[number]) for number in range(parts)
            ]
            self._coefficients = self._tasks.submit(0, reduced, self._step, turn, *products)
            sums = [(of_block, self._coefficients) for of_block in found]
        self._pairs = [
            self._tasks.submit(number, moved, *arguments[number], *sums[number])
            for number in range(parts)
        ]
        for number, group in enumerate(items_of):
            self._met[group] = number

    def wait(self) -> None:
        """Wait until all iterations so far are done."""
        self._tasks.wait(self._pairs)

    def ask(self) -> tuple[list[Any], list[int]]:
        """Promises of the positions of all blocks and of the coefficients, and where they stand."""
        promises = [
            self._tasks.submit(number, positions, pair) for number, pair in enumerate(self._pairs)
        ]
        return [*promises, self._coefficients], list(self._met)

    def read(self, promises: Sequence[Any], met: Sequence[int]) -> tuple[np.ndarray, Any]:
        """The position, (d,), and the coefficients that `ask` promised."""
        *pieces, coefficients = self._tasks.results(promises)
        at = np.empty(sum(map(len, (*self._places.users, *self._places.items))))
        for group, number in enumerate(met):
            self._places.fill(at, number, group, pieces[number])
        return at, coefficients
