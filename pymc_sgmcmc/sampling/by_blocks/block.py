"""A group of users, its rows, and the gradients of its blocks: what stays on one machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import cloudpickle
import numpy as np

from pymc_sgmcmc.sampling.by_blocks.grid import item_group

USERS, ITEMS, ROWS, PAIRS = range(4)
"""Random numbers of one iteration have generators of their own: the noise of a group of users, of a
group of items, the rows of a block, and the noise of the pairs of HAMCMC."""

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
class UserGroup:
    """A group of users with its rows, and what the blocks need of all groups of items.

    Arrays of a block have the coordinates of its users, and then those of its items, on the last
    axis.

    Attributes
    ----------
    number : int
        b, the number of the group.
    density : bytes
        A pickled `BlockDensity`, whose functions each process compiles when it first needs them.
    dtype : str
        Of the density.
    shapes : tuple of a shape, and a list of shapes for each group of items
        Users and their coordinates, items and theirs.
    rows : list of lists of numpy.ndarray
        Rows of block (b, c), with indices within the groups, for each c.
    data : tuple of a list of numpy.ndarray, and a list of these for each group of items
        Data of the users and of the items.
    batch_size : int or None
        The most rows of a block that one gradient takes.
    settings : sequence of tuples of a numpy.ndarray, and a list of these for each group of items
        Arrays of the sampler with an entry for each coordinate, such as a preconditioner.
    """

    number: int
    density: bytes = field(repr=False)
    dtype: str
    shapes: tuple[tuple[int, ...], Sequence[tuple[int, ...]]]
    rows: list[list[np.ndarray]]
    data: tuple[list[np.ndarray], list[list[np.ndarray]]]
    batch_size: int | None = None
    settings: Sequence[tuple[np.ndarray, list[np.ndarray]]] = ()

    @property
    def size(self) -> int:
        """Coordinates of the users."""
        return int(np.prod(self.shapes[0]))

    def items(self, turn: Turn) -> int:
        """c, the group of items of this iteration."""
        return item_group(self.number, turn.part, len(self.rows))

    def settings_of(self, turn: Turn) -> list[np.ndarray]:
        """Settings of the coordinates of the block of this iteration."""
        return [np.concatenate([users, items[self.items(turn)]]) for users, items in self.settings]

    def noise(self, turn: Turn) -> np.ndarray:
        """Standard normal numbers. Those of items do not depend on the users that they meet."""
        items = self.items(turn)
        of_users = turn.generator(USERS, self.number).standard_normal(self.size)
        size = int(np.prod(self.shapes[1][items]))
        return np.concatenate([of_users, turn.generator(ITEMS, items).standard_normal(size)])

    def gradient(self, turn: Turn, position: np.ndarray) -> np.ndarray:
        """Estimate of the gradient of a block. All calls of one iteration use the same rows."""
        return _ravelled(self._results(False, turn, position, self.batch_size))

    def value_and_gradient(
        self, turn: Turn, position: np.ndarray, batch_size: int | None = None
    ) -> tuple[float, np.ndarray]:
        """The log density of a block with weighted rows, or a minibatch of them, and gradient."""
        value, *gradients = self._results(True, turn, position, batch_size)
        return float(value), _ravelled(gradients)

    def _results(
        self, with_value: bool, turn: Turn, position: np.ndarray, batch_size: int | None
    ) -> list[np.ndarray]:
        items = self.items(turn)
        rows, weight = self.rows[items], turn.weight
        count = len(rows[0])
        if batch_size is not None and count > batch_size:
            # The rows lie in random order.
            start = int(turn.generator(ROWS, self.number).integers(count))
            rows, weight = window(rows, start, batch_size), weight * count / batch_size
        of_users, of_items = np.split(position.astype(self.dtype, copy=False), [self.size])
        arguments = [
            of_users.reshape(self.shapes[0]),
            of_items.reshape(self.shapes[1][items]),
            np.asarray(weight, dtype=self.dtype),
            *rows,
            *self.data[0],
            *self.data[1][items],
        ]
        with _lock:
            return _compiled(self.density, with_value)(*arguments)


def _ravelled(gradients: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([gradient.ravel() for gradient in gradients])


def window(rows: Sequence[np.ndarray], start: int, size: int) -> list[np.ndarray]:
    """Rows from a start on, and from the beginning where they end."""
    rest = start + size - len(rows[0])
    if rest <= 0:
        return [values[start : start + size] for values in rows]
    return [np.concatenate([values[start:], values[:rest]]) for values in rows]
