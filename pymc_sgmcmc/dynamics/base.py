"""The common interface of dynamics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.dynamics.law import Law
from pymc_sgmcmc.matrices import Matrix

type Array = np.ndarray | TensorVariable
"""Transitions take arrays of NumPy as well as symbolic tensors."""

type State = tuple[Array, ...]
"""A state is the position, shape (d,), followed by the auxiliaries of the dynamics."""

type Gradient = Callable[[Array], Array]
"""A gradient estimate on the rows of a transition, as a function of a position."""


class Transition(NamedTuple):
    """Results of one transition.

    Attributes
    ----------
    state : tuple
        The state after the transition.
    gradient : array, shape (d,)
        Gradient estimate at the position before it.
    stats : tuple
        Values of the statistics of the dynamics.
    """

    state: State
    gradient: Array
    stats: tuple[Array, ...] = ()


def folded(position: Array, mirrored: Array | None) -> Array:
    """Position with its mirrored coordinates, of which `mirrored` has ones, made positive."""
    if mirrored is None:
        return position
    return pt.where(pt.gt(mirrored, 0.5), pt.abs(position), position)


def numbers(values: Array | SharedVariable) -> np.ndarray:
    """Values of an array or a shared variable, in double precision."""
    if isinstance(values, SharedVariable):
        values = values.get_value()
    return np.asarray(values, dtype=float)


@dataclass(frozen=True)
class Auxiliary:
    """A part of the state of a chain beside its position, such as a momentum.

    Attributes
    ----------
    name : str
    shape : tuple of int
    """

    name: str
    shape: tuple[int, ...]


class Dynamics(ABC):
    """A pure transition of a chain.

    The state is a tuple: the position, shape (d,), followed by the arrays that `auxiliaries`
    lists. All randomness comes as rows of standard normal numbers.

    Attributes
    ----------
    stats : tuple of str
        Names of the numbers that each transition reports beside the gradient.
    lag : int
        Number of transitions from the one that makes a position to the one that evaluates the
        gradient there. It is 1 where each transition starts from the last position.
    depends_on_others : bool
        Whether the auxiliaries depend on the values of variables outside the position.
    """

    stats: tuple[str, ...] = ()
    lag: int = 1
    depends_on_others: ClassVar[bool] = False

    @property
    def law(self) -> Law | None:
        """What is known of the stationary law, None where no formula holds.

        Without it no step size is computed or tuned in closed form, and reports use Stein's
        identity alone.
        """
        return None

    @property
    def fixed_preconditioner(self) -> Matrix | None:
        """The matrix M of the law, as numbers, where there is one."""
        return None

    def auxiliaries(self, dimension: int) -> Sequence[Auxiliary]:
        """Parts of the state beside a position of length d."""
        return ()

    def initial_auxiliaries(
        self, position: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, ...]:
        """Values of the auxiliaries at the start of a chain, in their stationary law if known."""
        return tuple(np.zeros(auxiliary.shape) for auxiliary in self.auxiliaries(len(position)))

    def auxiliaries_after_move(
        self, position: np.ndarray, auxiliaries: tuple[np.ndarray, ...], rng: np.random.Generator
    ) -> tuple[np.ndarray, ...]:
        """Auxiliaries after another step method has moved the position; unchanged by default."""
        return auxiliaries

    def noise_size(self, dimension: int) -> int:
        """Standard normal numbers that one transition takes."""
        return dimension

    def scaled_noise(self, noise: Array, step_sizes: Array) -> Array:
        """Noise in the form that the transitions take, scaled for a whole block at once.

        Parameters
        ----------
        noise : (transitions, noise_size)
        step_sizes : (transitions,)
        """
        return noise

    @abstractmethod
    def transition(
        self,
        state: State,
        gradient: Gradient,
        scaled_noise: Array,
        step_size: Array,
    ) -> Transition:
        """Next state, the gradient at the present position, and the values of `stats`.

        Parameters
        ----------
        state : tuple
            The position and the auxiliaries.
        gradient : callable
            Gradient estimate on the rows of this transition, as a function of a position.
        scaled_noise : (noise_size,)
            One row of `scaled_noise`.
        step_size : scalar
        """
