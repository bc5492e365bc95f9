"""Iterations as tasks: pure functions of states, here, on an executor or on a Dask cluster."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from pymc_sgmcmc.sampling.by_blocks.block import Turn, UserGroup
from pymc_sgmcmc.sampling.by_blocks.grid import item_group
from pymc_sgmcmc.sampling.by_blocks.setup import Blocks
from pymc_sgmcmc.sampling.by_blocks.steps import BlockStep, Coefficients, Looked, State

MESSAGE_BYTES = 4_000_000
"""The rows of a group go to a Dask cluster in messages of at most this size. Dask warns of those of
10 MB."""

type Pair = tuple[State, State]
"""The states of a group of users and of a group of items."""


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


def tasks_of(client: Any) -> Tasks:
    """Where the tasks of a client run."""
    if client is None:
        return Tasks()
    return OnDask(client) if hasattr(client, "nthreads") else OnExecutor(client)


def _unpickled(*pieces: bytes) -> UserGroup:
    return pickle.loads(b"".join(pieces))


# --- Tasks of an iteration ----------------------------------------------------------------------


def _pair(group: UserGroup, state: State) -> Pair:
    """The states of the users and of the items of a block."""
    users, items = zip(*(np.split(part, [group.size], axis=-1) for part in state), strict=True)
    return users, items


def _state(pair: Pair, items: State) -> State:
    """The state of a block of the users of a pair and of the given items."""
    return tuple(np.concatenate(parts, axis=-1) for parts in zip(pair[0], items, strict=True))


def start(group: UserGroup, step: BlockStep, position: np.ndarray, moment: np.ndarray) -> Pair:
    """States of a group of users and of a group of items."""
    return _pair(group, step.start(position, moment))


def moved(
    group: UserGroup, step: BlockStep, turn: Turn, pair: Pair, items: State, *sums: Any
) -> Pair:
    """States after one iteration of a block, of its users and of the given items."""
    # What leaves the finite numbers is found by `sample_blocks`.
    with np.errstate(all="ignore"):
        return _pair(group, step.move(group, turn, _state(pair, items), *sums))


def looked(group: UserGroup, step: Any, turn: Turn, pair: Pair, items: State) -> Looked:
    """The first stage of an iteration with sums over all blocks."""
    with np.errstate(all="ignore"):
        return step.look(group, turn, _state(pair, items))


def reduced(step: Any, turn: Turn, *products: Any) -> Coefficients:
    """The sums over all blocks."""
    with np.errstate(all="ignore"):
        return step.reduced(turn, products)


def position(pair: Pair) -> np.ndarray:
    """Position of a block."""
    return np.concatenate([pair[0][0], pair[1][0]])


class BlockChain:
    """One chain: the states of all groups, wherever they are.

    Parameters
    ----------
    tasks : Tasks
    step : BlockStep
    groups : sequence
        `Tasks.place` of each group of users.
    blocks : Blocks
    at, moment : numpy.ndarray, shape (d,)
        Where the chain starts, and what `BlockStep.start` takes besides.
    """

    def __init__(
        self,
        tasks: Tasks,
        step: BlockStep,
        groups: Sequence[Any],
        blocks: Blocks,
        at: np.ndarray,
        moment: np.ndarray,
    ):
        self._tasks, self._step, self._groups, self._blocks = tasks, step, list(groups), blocks
        # The group of items c was last met by this group of users.
        self._met = list(range(len(self._groups)))
        places = [blocks.places(number, number) for number in self._met]
        self._pairs = self._of_each(
            start, [(step, at[numbers], moment[numbers]) for numbers in places]
        )
        self._coefficients: Any = None

    def _of_each(self, function: Callable[..., Any], arguments: Sequence[tuple]) -> list[Any]:
        """Promises of a function of each group of users and of arguments of its own."""
        return [
            self._tasks.submit(number, function, group, *own)
            for number, (group, own) in enumerate(zip(self._groups, arguments, strict=True))
        ]

    def advance(self, turn: Turn) -> None:
        """One iteration."""
        parts = len(self._groups)
        items_of = [item_group(number, turn.part, parts) for number in range(parts)]
        met = [self._met[items] for items in items_of]
        items = [self._tasks.submit(n, itemgetter(1), self._pairs[n]) for n in met]
        arguments: list[tuple] = [
            (self._step, turn, *both) for both in zip(self._pairs, items, strict=True)
        ]
        if self._step.reduces:
            found = self._of_each(looked, arguments)
            products = [self._tasks.submit(n, itemgetter(0), each) for n, each in enumerate(found)]
            self._coefficients = self._tasks.submit(0, reduced, self._step, turn, *products)
            arguments = [
                (*own, each, self._coefficients) for own, each in zip(arguments, found, strict=True)
            ]
        self._pairs = self._of_each(moved, arguments)
        for number, group in enumerate(items_of):
            self._met[group] = number

    def ask(self) -> tuple[list[Any], list[int]]:
        """Promises of the positions of all blocks and of the coefficients, and where they stand."""
        promises = [self._tasks.submit(n, position, pair) for n, pair in enumerate(self._pairs)]
        return [*promises, self._coefficients], list(self._met)

    def read(self, promises: Sequence[Any], met: Sequence[int]) -> tuple[np.ndarray, Any]:
        """The position, (d,), and the coefficients that `ask` promised."""
        *pieces, coefficients = self._tasks.results(promises)
        at = np.empty(sum(side.places.size for side in self._blocks.model.sides))
        for group, number in enumerate(met):
            at[self._blocks.places(number, group)] = pieces[number]
        return at, coefficients
