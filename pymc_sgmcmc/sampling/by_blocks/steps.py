r"""One iteration of each sampler on one block.

A state is a tuple of arrays, of which the first is the position. They have the coordinates of the
users of a block, and then those of its items, on the last axis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
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
from pymc_sgmcmc.sampling.by_blocks.block import PAIRS, Turn, UserGroup

type State = tuple[np.ndarray, ...]


class BlockStep(ABC):
    """A sampler whose iteration is one update of each block of a part.

    Attributes
    ----------
    reduces : bool
        Whether an iteration needs sums over all blocks, see `QuasiNewtonBlocks`.
    """

    reduces: ClassVar[bool] = False

    @abstractmethod
    def start(self, position: np.ndarray, moment: np.ndarray) -> State:
        """The state of a block at the start.

        Parameters
        ----------
        position : numpy.ndarray, shape (d_b,)
        moment : numpy.ndarray, shape (d_b,)
            Mean square of the estimated gradient there, divided by the number of rows.
        """

    @abstractmethod
    def move(self, group: UserGroup, turn: Turn, state: State, *sums: Any) -> State:
        """The state after an iteration."""


@dataclass(frozen=True)
class LangevinBlocks(BlockStep):
    r"""SGLD with a fixed diagonal M, distributed SGLD of Ahn et al. (2015).

    .. math:: \theta_b' = \theta_b + \tfrac{h}{2} M_b \hat\nabla_b + N(0, h M_b)

    The one array of the settings is M. The state is the position.
    """

    def start(self, position: np.ndarray, moment: np.ndarray) -> State:
        """The position."""
        return (position,)

    def move(self, group: UserGroup, turn: Turn, state: State, *sums: Any) -> State:
        """One step, after which the auxiliaries follow."""
        # M is fixed by the settings, or the last of the auxiliaries.
        diagonal = (*state, *group.settings_of(turn))[-1]
        dynamics = Langevin(Diagonal(diagonal), Diagonal(np.sqrt(diagonal)))
        noise = dynamics.scaled_noise(group.noise(turn)[None], np.array([turn.step_size]))[0]
        moved = dynamics.transition(
            state[:1], lambda position: group.gradient(turn, position), noise, turn.step_size
        )
        return *moved.state, *self.following(turn, state, moved.gradient)

    def following(self, turn: Turn, state: State, gradient: np.ndarray) -> State:
        """The auxiliaries of a state after an iteration."""
        return ()


@dataclass(frozen=True)
class RMSpropBlocks(LangevinBlocks):
    r"""SGLD with the preconditioner of `RMSprop`, frozen after tuning.

    .. math:: v' = \alpha v + (1 - \alpha) (\hat\nabla / N)^2, \quad
        M = \operatorname{diag}\frac{1}{c\,(\lambda + \sqrt{v})}

    The state is the position, v and the diagonal of M. There are no settings.

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
    r"""What a block has found at the origin of a move.

    Attributes
    ----------
    products : PairProducts
        Dot products of the coordinates of the block.
    gradient, drift, noise : numpy.ndarray
        The gradient, half the step size times it, and :math:`\sqrt{h \gamma} z`.
    """

    products: PairProducts
    gradient: np.ndarray
    drift: np.ndarray
    noise: np.ndarray


type Coefficients = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Coefficients a and b of a move, and which pairs were accepted, see `move_coefficients`."""


@dataclass(frozen=True)
class QuasiNewtonBlocks(BlockStep):
    """HAMCMC, the transition of `QuasiNewtonLangevin` with the pairs of the paper.

    Its dot products run over all coordinates. So an iteration has two stages: `look` gives those of
    each block, `reduced` adds them up in the order of the blocks, and `move` takes the step. They
    are (M - 1)(2M + 1) numbers of a block. All else is of one coordinate each.

    The settings are the arrays γ, λ and κ. The state is the position, those of t - M to t - 2,
    oldest first, and M - 1 displacements and changes of the gradient, which are not scaled.

    Attributes
    ----------
    memory : int
        M, at least 2.
    """

    memory: int

    reduces = True

    def start(self, position: np.ndarray, moment: np.ndarray) -> State:
        """All chains at the start, and no pairs."""
        earlier = np.repeat(position[None], self.memory - 1, axis=0)
        return position, earlier, np.zeros_like(earlier), np.zeros_like(earlier)

    def look(self, group: UserGroup, turn: Turn, state: State) -> Looked:
        """Gradient at the origin, and dot products of the coordinates of a block."""
        scale, _, threshold = group.settings_of(turn)
        _, earlier, displacements, changes = state
        gradient = group.gradient(turn, earlier[0])
        drift = 0.5 * turn.step_size * gradient
        noise = np.sqrt(turn.step_size * scale) * group.noise(turn)
        products = pair_products(drift, noise, displacements, changes, scale, threshold)
        return Looked(products, gradient, drift, noise)

    def reduced(self, turn: Turn, products: Sequence[PairProducts]) -> Coefficients:
        """Coefficients of the move from the products of all blocks, in their order."""
        pair_noise = turn.step_size**0.5 * turn.generator(PAIRS).standard_normal(self.memory - 1)
        in_use = turn.iteration >= self.memory
        return move_coefficients(reduce(add, products), pair_noise, in_use)

    def move(self, group: UserGroup, turn: Turn, state: State, *sums: Any) -> State:
        """One step of the chain whose turn it is, and the pair that it makes.

        The order of operations is the same on any machine.
        """
        (looked, (a, b, _)), (scale, regularization, _) = sums, group.settings_of(turn)
        position, earlier, displacements, changes = state
        drift = looked.drift
        for factor, change in zip(a, changes, strict=True):
            drift = drift - factor * change
        move = scale * drift + looked.noise
        for factor, displacement in zip(b, displacements, strict=True):
            move = move + factor * displacement
        following = earlier[0] + move
        change = looked.gradient - group.gradient(turn, following) + regularization * move
        return (
            following,
            _append(earlier, position),
            _append(displacements, move),
            _append(changes, change),
        )


def _append(rows: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Rows without the oldest, followed by a new one."""
    return np.concatenate([rows[1:], row[None]])
