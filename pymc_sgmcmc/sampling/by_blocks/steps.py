r"""One iteration of each sampler on one block: the states of its users and of its items.

A state is a tuple of arrays: the position of a group, (d_b,), and the auxiliaries of the sampler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from pymc_sgmcmc.adaptation.rmsprop import (
    TRANSITIONS_BETWEEN_UPDATES,
    following_moment,
    rmsprop_diagonal,
)
from pymc_sgmcmc.dynamics.hamcmc import PairProducts, move_coefficients, pair_products
from pymc_sgmcmc.dynamics.langevin import Langevin
from pymc_sgmcmc.matrices import Diagonal
from pymc_sgmcmc.sampling.by_blocks.block import ITEMS, PAIRS, USERS, Turn, UserGroup

type State = tuple[np.ndarray, ...]

type Pair = tuple[State, State]
"""The states of a group of users and of a group of items."""


class BlockStep(ABC):
    """A sampler whose iteration is one update of each block of a part.

    Attributes
    ----------
    name : str
    reduces : bool
        Whether an iteration needs sums over all blocks, see `QuasiNewtonBlocks`.
    """

    name: ClassVar[str]
    reduces: ClassVar[bool] = False

    @abstractmethod
    def start(self, position: np.ndarray, moment: np.ndarray) -> State:
        """The state of a group at the start.

        Parameters
        ----------
        position : numpy.ndarray, shape (d_b,)
        moment : numpy.ndarray, shape (d_b,)
            Mean square of the estimated gradient there, divided by the number of rows.
        """

    @abstractmethod
    def move(self, group: UserGroup, turn: Turn, states: Pair, *sums: Any) -> Pair:
        """The states after an iteration."""


def _noises(group: UserGroup, turn: Turn, sizes: Iterable[int]) -> list[np.ndarray]:
    """Standard normal numbers of the users and of the items.

    Those of a group of items do not depend on the users that it meets.
    """
    generators = turn.generator(USERS, group.number), turn.generator(ITEMS, group.items(turn))
    return [
        generator.standard_normal(size) for generator, size in zip(generators, sizes, strict=True)
    ]


def _langevin(
    position: np.ndarray,
    gradient: np.ndarray,
    noise: np.ndarray,
    diagonal: np.ndarray,
    step_size: float,
) -> np.ndarray:
    """One step of `Langevin` on some coordinates, with a diagonal preconditioner."""
    dynamics = Langevin(Diagonal(diagonal), Diagonal(np.sqrt(diagonal)))
    scaled = dynamics.scaled_noise(noise[None], np.array([step_size]))[0]
    (following,) = dynamics.transition((position,), lambda _: gradient, scaled, step_size).state
    return following


@dataclass(frozen=True)
class LangevinBlocks(BlockStep):
    r"""SGLD with a fixed diagonal M, distributed SGLD of Ahn et al. (2015).

    .. math:: \theta_b' = \theta_b + \tfrac{h}{2} M_b \hat\nabla_b + N(0, h M_b)

    The one array of the settings is M. The state is the position.
    """

    name = "sgld"

    def start(self, position: np.ndarray, moment: np.ndarray) -> State:
        """The position."""
        return (position,)

    def move(self, group: UserGroup, turn: Turn, states: Pair, *sums: Any) -> Pair:
        """One step of both sides, after which the auxiliaries follow."""
        gradients = group.gradients(turn, *(position for position, *_ in states))
        noises = _noises(group, turn, map(len, gradients))
        users, items = (
            (
                # M is fixed by the settings, or the last of the auxiliaries.
                _langevin(state[0], gradient, noise, (*state, *own)[-1], turn.step_size),
                *self.following(turn, state, gradient),
            )
            for state, gradient, noise, own in zip(
                states, gradients, noises, group.settings_of(turn), strict=True
            )
        )
        return users, items

    def following(self, turn: Turn, state: State, gradient: np.ndarray) -> State:
        """The auxiliaries of a state after an iteration."""
        return ()


@dataclass(frozen=True)
class RMSpropBlocks(LangevinBlocks):
    r"""SGLD with the preconditioner of `RMSprop`, frozen after tuning.

    .. math:: v' = \alpha v + (1 - \alpha) (\hat\nabla / N)^2, \quad
        M = \operatorname{diag}\frac{1}{c\,(\lambda + \sqrt{v})}

    The state of a group is its position, v and the diagonal of M. There are no settings.

    Attributes
    ----------
    n_rows : int
        N.
    decay, regularization : float
        α and λ.
    size : float
        c, which makes the step size free of the units of the gradient.
    """

    n_rows: int
    decay: float
    regularization: float
    size: float = 1.0

    name = "psgld"

    def start(self, position: np.ndarray, moment: np.ndarray) -> State:
        """The preconditioner of the second moment at the start."""
        return position, moment, self._diagonal(moment)

    def following(self, turn: Turn, state: State, gradient: np.ndarray) -> State:
        """While tuning v follows, and M every hundred iterations."""
        _, moment, diagonal = state
        if not turn.tuning:
            return moment, diagonal
        moment = following_moment(moment, gradient[None] / self.n_rows, self.decay)
        if (turn.iteration + 1) % TRANSITIONS_BETWEEN_UPDATES == 0:
            diagonal = self._diagonal(moment)
        return moment, diagonal

    def _diagonal(self, moment: np.ndarray) -> np.ndarray:
        return rmsprop_diagonal(moment, self.regularization) / self.size


class Looked(NamedTuple):
    """What a block has found at the origin of a move.

    Attributes
    ----------
    products : PairProducts
        Dot products of the coordinates of the block.
    gradients : list of two numpy.ndarray
    """

    products: PairProducts
    gradients: list[np.ndarray]


class Coefficients(NamedTuple):
    """Coefficients of a move, see `move_coefficients`."""

    a: np.ndarray
    b: np.ndarray
    accepted: np.ndarray


@dataclass(frozen=True)
class QuasiNewtonBlocks(BlockStep):
    """HAMCMC, the transition of `QuasiNewtonLangevin` with the pairs of the paper.

    Its dot products run over all coordinates. So an iteration has two stages: `look` gives those of
    each block, `reduced` adds them up in the order of the blocks, and `move` takes the step. They
    are (M - 1)(2M + 1) numbers of a block. All else is of one coordinate each.

    The settings are the arrays γ, λ and κ. The state of a group is the position, those of t - M to
    t - 2, oldest first, and M - 1 displacements and changes of the gradient, which are not scaled.

    Attributes
    ----------
    memory : int
        M, at least 2.
    """

    memory: int

    name = "hamcmc"
    reduces = True

    def start(self, position: np.ndarray, moment: np.ndarray) -> State:
        """All chains at the start, and no pairs."""
        earlier = np.repeat(position[None], self.memory - 1, axis=0)
        return position, earlier, np.zeros_like(earlier), np.zeros_like(earlier)

    def look(self, group: UserGroup, turn: Turn, states: Pair) -> Looked:
        """Gradients at the origin, and dot products of the coordinates of a block."""
        gradients = group.gradients(turn, *(earlier[0] for _, earlier, *_ in states))
        starts = self._starts(group, turn, gradients)
        users, items = (
            pair_products(*start, displacements, changes, scale, threshold)
            for start, (_, _, displacements, changes), (scale, _, threshold) in zip(
                starts, states, group.settings_of(turn), strict=True
            )
        )
        return Looked(users + items, gradients)

    def reduced(self, turn: Turn, products: Sequence[PairProducts]) -> Coefficients:
        """Coefficients of the move from the products of all blocks, in their order."""
        total = products[0]
        for of_block in products[1:]:
            total = total + of_block
        pair_noise = turn.step_size**0.5 * turn.generator(PAIRS).standard_normal(self.memory - 1)
        in_use = turn.iteration >= self.memory
        return Coefficients(*move_coefficients(total, pair_noise, in_use))

    def move(self, group: UserGroup, turn: Turn, states: Pair, *sums: Any) -> Pair:
        """One step of the chain whose turn it is, and the pair that it makes."""
        looked, coefficients = sums
        origins = [earlier[0] for _, earlier, *_ in states]
        settings = group.settings_of(turn)
        moves = [
            _move(start, displacements, changes, scale, coefficients)
            for start, (_, _, displacements, changes), (scale, *_) in zip(
                self._starts(group, turn, looked.gradients), states, settings, strict=True
            )
        ]
        following = [origin + move for origin, move in zip(origins, moves, strict=True)]
        after = group.gradients(turn, *following)
        users, items = (
            (
                new,
                _append(earlier, position),
                _append(displacements, move),
                _append(changes, before - gradient + regularization * move),
            )
            for new, move, before, gradient, (position, earlier, displacements, changes), (
                _,
                regularization,
                _,
            ) in zip(following, moves, looked.gradients, after, states, settings, strict=True)
        )
        return users, items

    def _starts(
        self, group: UserGroup, turn: Turn, gradients: Sequence[np.ndarray]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        r"""The drift v and the noise :math:`\sqrt{h \gamma} z` of both sides."""
        noises = _noises(group, turn, map(len, gradients))
        return [
            (0.5 * turn.step_size * gradient, np.sqrt(turn.step_size * scale) * noise)
            for gradient, noise, (scale, *_) in zip(
                gradients, noises, group.settings_of(turn), strict=True
            )
        ]


def _move(
    start: tuple[np.ndarray, np.ndarray],
    displacements: np.ndarray,
    changes: np.ndarray,
    scale: np.ndarray,
    coefficients: Coefficients,
) -> np.ndarray:
    """The move of some coordinates, in an order of operations that is the same on any machine."""
    drift, noise = start
    for a, change in zip(coefficients.a, changes, strict=True):
        drift = drift - a * change
    move = scale * drift + noise
    for b, displacement in zip(coefficients.b, displacements, strict=True):
        move = move + b * displacement
    return move


def _append(rows: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Rows without the oldest, followed by a new one."""
    return np.concatenate([rows[1:], row[None]])
