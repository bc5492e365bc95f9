"""A group of users, its rows, and the gradients of its blocks: what stays on one machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import cloudpickle
import numpy as np

from pymc_sgmcmc.posterior.two_sided import BlockDensity, Side, TwoSided
from pymc_sgmcmc.sampling.by_blocks.grid import Grid, item_group

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


@dataclass(frozen=True)
class Kernel:
    """The functions of a block, which each process compiles when it first needs them.

    Attributes
    ----------
    pickled : bytes
        A `BlockDensity`.
    dtype : str
    """

    pickled: bytes = field(repr=False)
    dtype: str

    @classmethod
    def of(cls, density: BlockDensity) -> Kernel:
        """The kernel of a density."""
        return cls(cloudpickle.dumps(density), density.log_density.dtype)

    def gradients(self, *arguments: np.ndarray) -> list[np.ndarray]:
        """Gradients by the positions of users and items."""
        with _lock:
            return _compiled(self.pickled, False)(*arguments)

    def value_and_gradients(self, *arguments: np.ndarray) -> list[np.ndarray]:
        """The log density and its gradients."""
        with _lock:
            return _compiled(self.pickled, True)(*arguments)


@lru_cache(maxsize=16)
def _compiled(pickled: bytes, with_value: bool) -> Any:
    return cloudpickle.loads(pickled).compiled(with_value)


@dataclass(frozen=True, eq=False)
class UserGroup:
    """A group of users with its rows, and what the blocks need of all groups of items.

    Attributes
    ----------
    number : int
        b, the number of the group.
    kernel : Kernel
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
    kernel: Kernel
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
        arguments = self._arguments(turn, users, items)
        return [gradient.ravel() for gradient in self.kernel.gradients(*arguments)]

    def value_and_gradients(
        self, turn: Turn, users: np.ndarray, items: np.ndarray
    ) -> tuple[float, list[np.ndarray]]:
        """The log density of a block with weighted rows, and `gradients`."""
        value, *gradients = self.kernel.value_and_gradients(*self._arguments(turn, users, items))
        return float(value), [gradient.ravel() for gradient in gradients]

    def _arguments(self, turn: Turn, users: np.ndarray, items: np.ndarray) -> list[np.ndarray]:
        group = self.items(turn)
        rows, factor = self._minibatch(turn, self.rows[group])
        dtype = self.kernel.dtype
        return [
            users.reshape(-1, self.widths[0]).astype(dtype, copy=False),
            items.reshape(-1, self.widths[1]).astype(dtype, copy=False),
            np.asarray(factor * turn.weight, dtype=dtype),
            *rows,
            *self.data[0],
            *self.data[1][group],
        ]

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
    settings: Sequence[Sequence[np.ndarray]],
    batch_size: int | None = None,
) -> list[UserGroup]:
    """The groups of users of a grid.

    Parameters
    ----------
    model : TwoSided
    grid : Grid
    settings : sequence of two sequences of numpy.ndarray
        Of users and of items, each of shape (size, width).
    batch_size : int, optional
    """
    kernel = Kernel.of(model.density)
    places = [_places(side, groups) for side, groups in zip(model.sides, grid.groups, strict=True)]
    data = [
        [[values[numbers] for values in side.data] for numbers in groups]
        for side, groups in zip(model.sides, grid.groups, strict=True)
    ]
    of_groups = [
        [tuple(values[numbers].ravel() for values in of_side) for numbers in groups]
        for of_side, groups in zip(settings, grid.groups, strict=True)
    ]
    return [
        UserGroup(
            number=number,
            kernel=kernel,
            widths=(model.sides[0].width, model.sides[1].width),
            rows=[_local(model, places, block) for block in grid.rows[number]],
            data=(data[0][number], data[1]),
            settings=(of_groups[0][number], of_groups[1]),
            batch_size=batch_size,
        )
        for number in range(grid.parts)
    ]


def _places(side: Side, groups: Sequence[np.ndarray]) -> np.ndarray:
    """The place of each user or item within its group."""
    places = np.empty(side.size, dtype=np.int64)
    for numbers in groups:
        places[numbers] = np.arange(len(numbers))
    return places


def _local(model: TwoSided, places: Sequence[np.ndarray], numbers: np.ndarray) -> list[np.ndarray]:
    """Rows of a block, with indices within its groups."""
    rows = [np.ascontiguousarray(values) for values in model.posterior.take(numbers)]
    for side, of_side in zip(model.sides, places, strict=True):
        rows[side.leaf] = of_side[rows[side.leaf]].astype(rows[side.leaf].dtype)
    return rows
