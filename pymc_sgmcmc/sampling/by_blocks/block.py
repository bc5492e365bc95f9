"""A group of users, its rows, and the gradients of its blocks: what stays on one machine."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import cloudpickle
import numpy as np

from pymc_sgmcmc.posterior.two_sided import Side, TwoSided
from pymc_sgmcmc.sampling.by_blocks.grid import Grid, item_group

USERS, ITEMS, ROWS, PAIRS = range(4)
"""Random numbers of one iteration have generators of their own: the noise of a group of users, of a
group of items, the rows of a block, and the noise of the pairs of HAMCMC."""

type Sides = tuple[np.ndarray, np.ndarray]
"""Numbers of the coordinates of a group of users and of a group of items."""

_lock = threading.RLock()
"""A compiled function has one place for its arguments, so only one thread may call it."""


@dataclass(frozen=True)
class Turn:
    r"""What one iteration is told beside its states. It is the same for all blocks.

    Attributes
    ----------
    seed : int
        Of the run.
    chain, iteration : int
        Counted from 0.
    part : int
        The part whose rows are used.
    weight : float
        :math:`N / |\Omega_i|` of this part.
    step_size : float
    tuning : bool
    """

    seed: int
    chain: int
    iteration: int
    part: int
    weight: float
    step_size: float
    tuning: bool = False

    def generator(self, kind: int, group: int = 0) -> np.random.Generator:
        """The generator of one kind of random numbers, of one group.

        It depends on nothing else, so that the same numbers are drawn on any machine.
        """
        key = (self.chain, self.iteration, kind, group)
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=key))


@lru_cache(maxsize=16)
def _compiled(pickled: bytes, with_value: bool) -> Any:
    return cloudpickle.loads(pickled).compiled(with_value)


@dataclass(frozen=True, eq=False)
class Places:
    """Where the coordinates of groups stand in a vector of those of all users, then all items.

    Attributes
    ----------
    users, items : list of numpy.ndarray
        Of each group.
    """

    users: list[np.ndarray]
    items: list[np.ndarray]

    @classmethod
    def of(cls, model: TwoSided, grid: Grid) -> Places:
        """The places of the groups of a grid."""
        first, second = (np.arange(side.size * side.width) for side in model.sides)
        users, items = (
            [numbers.reshape(side.size, -1)[group].ravel() for group in groups]
            for numbers, side, groups in zip(
                (first, len(first) + second), model.sides, grid.groups, strict=True
            )
        )
        return cls(users, items)

    def cut(self, vector: np.ndarray, users: int, items: int) -> Sides:
        """The parts of a vector of a group of users and of a group of items."""
        return vector[self.users[users]], vector[self.items[items]]

    def fill(self, vector: np.ndarray, users: int, items: int, parts: Iterable[np.ndarray]) -> None:
        """Write what `cut` gives into a vector."""
        vector[self.users[users]], vector[self.items[items]] = parts


@dataclass(frozen=True, eq=False)
class UserGroup:
    """A group of users with its rows, and what the blocks need of all groups of items.

    Attributes
    ----------
    number : int
        b, the number of the group.
    density : bytes
        A pickled `BlockDensity`, whose functions each process compiles when it first needs them.
    dtype : str
        Of the density.
    widths : tuple of two int
        Coordinates of a user and of an item.
    rows : list of lists of numpy.ndarray
        Rows of block (b, c), with indices within the groups, for each c.
    data : tuple of a list of numpy.ndarray, and a list of these for each group of items
        Data of the users and of the items.
    settings : tuple of a tuple of numpy.ndarray, and a list of these for each group of items
        Arrays of the sampler with an entry for each coordinate, such as a preconditioner.
    batch_size : int or None
        The most rows of a block that one gradient takes.
    """

    number: int
    density: bytes = field(repr=False)
    dtype: str
    widths: tuple[int, int]
    rows: list[list[np.ndarray]]
    data: tuple[list[np.ndarray], list[list[np.ndarray]]]
    settings: tuple[tuple[np.ndarray, ...], list[tuple[np.ndarray, ...]]]
    batch_size: int | None = None

    @property
    def parts(self) -> int:
        """B."""
        return len(self.rows)

    def items(self, turn: Turn) -> int:
        """c, the group of items of this iteration."""
        return item_group(self.number, turn.part, self.parts)

    def settings_of(self, turn: Turn) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """Settings of the coordinates of the users and of the items of this iteration."""
        return self.settings[0], self.settings[1][self.items(turn)]

    def gradients(self, turn: Turn, users: np.ndarray, items: np.ndarray) -> list[np.ndarray]:
        """Estimates of the gradient by the users, (d_b,), and the items, (d_c,), of a block.

        Both calls of one iteration use the same rows.
        """
        return [gradient.ravel() for gradient in self._results(False, turn, users, items)]

    def value_and_gradients(
        self, turn: Turn, users: np.ndarray, items: np.ndarray
    ) -> tuple[float, list[np.ndarray]]:
        """The log density of a block with weighted rows, and `gradients`."""
        value, *gradients = self._results(True, turn, users, items)
        return float(value), [gradient.ravel() for gradient in gradients]

    def _results(
        self, with_value: bool, turn: Turn, users: np.ndarray, items: np.ndarray
    ) -> list[np.ndarray]:
        group = self.items(turn)
        rows, factor = self._minibatch(turn, self.rows[group])
        arguments = [
            users.reshape(-1, self.widths[0]).astype(self.dtype, copy=False),
            items.reshape(-1, self.widths[1]).astype(self.dtype, copy=False),
            np.asarray(factor * turn.weight, dtype=self.dtype),
            *rows,
            *self.data[0],
            *self.data[1][group],
        ]
        with _lock:
            return _compiled(self.density, with_value)(*arguments)

    def _minibatch(self, turn: Turn, rows: list[np.ndarray]) -> tuple[list[np.ndarray], float]:
        """A random window of the rows, which lie in random order, and the inverse of its share."""
        count = len(rows[0])
        if self.batch_size is None or count <= self.batch_size:
            return rows, 1.0
        start = int(turn.generator(ROWS, self.number).integers(count))
        return window(rows, start, self.batch_size), count / self.batch_size


def window(rows: Sequence[np.ndarray], start: int, size: int) -> list[np.ndarray]:
    """Rows from a start on, and from the beginning where they end."""
    rest = start + size - len(rows[0])
    if rest <= 0:
        return [values[start : start + size] for values in rows]
    return [np.concatenate([values[start:], values[:rest]]) for values in rows]


def user_groups(
    model: TwoSided,
    grid: Grid,
    settings: Sequence[np.ndarray],
    batch_size: int | None = None,
) -> list[UserGroup]:
    """The groups of users of a grid.

    Parameters
    ----------
    model : TwoSided
    grid : Grid
    settings : sequence of numpy.ndarray, shape (d,)
    batch_size : int, optional
    """
    density, places = cloudpickle.dumps(model.density), Places.of(model, grid)
    within = [_within(side, groups) for side, groups in zip(model.sides, grid.groups, strict=True)]
    data = [
        [[values[numbers] for values in side.data] for numbers in groups]
        for side, groups in zip(model.sides, grid.groups, strict=True)
    ]
    users, items = (
        [tuple(values[each] for values in settings) for each in of_side]
        for of_side in (places.users, places.items)
    )
    return [
        UserGroup(
            number=number,
            density=density,
            dtype=model.density.log_density.dtype,
            widths=(model.sides[0].width, model.sides[1].width),
            rows=[_local(model, within, block) for block in grid.rows[number]],
            data=(data[0][number], data[1]),
            settings=(users[number], items),
            batch_size=batch_size,
        )
        for number in range(grid.parts)
    ]


def _within(side: Side, groups: Sequence[np.ndarray]) -> np.ndarray:
    """The place of each user or item within its group."""
    within = np.empty(side.size, dtype=np.int64)
    for numbers in groups:
        within[numbers] = np.arange(len(numbers))
    return within


def _local(model: TwoSided, within: Sequence[np.ndarray], numbers: np.ndarray) -> list[np.ndarray]:
    """Rows of a block, with indices within its groups."""
    rows = [np.ascontiguousarray(values) for values in model.posterior.take(numbers)]
    for side, of_side in zip(model.sides, within, strict=True):
        rows[side.leaf] = of_side[rows[side.leaf]].astype(rows[side.leaf].dtype)
    return rows
