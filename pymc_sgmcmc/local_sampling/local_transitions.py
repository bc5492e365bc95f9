r"""Transitions of the local variables of groups, given the global ones.

They leave :math:`p(u_g \mid y_g, \theta)` invariant. A visit to a group makes a few of them, from
where the last visit left the group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.compiling.compiled import FEW_STEPS
from pymc_sgmcmc.local_sampling.complete import CompleteData


@dataclass(frozen=True)
class LocalState:
    """What a transition of the local variables of some groups is made of. All is symbolic.

    Attributes
    ----------
    block : TensorVariable, shape (n, q)
        Local quantities of n groups on the unconstrained scale.
    numbers : TensorVariable, shape (n,)
        Numbers of the groups. Use them to select from arrays of your own.
    variables : dict of str to TensorVariable
        The global variables on which the groups depend, on their own scale.
    noise : TensorVariable, shape (n, k)
        Standard normal numbers, the only source of randomness.
    log_density : callable
        Joint log density, shape (n,), of the groups at a block.
    """

    block: TensorVariable
    numbers: TensorVariable
    variables: dict[str, TensorVariable]
    noise: TensorVariable
    log_density: Callable[[TensorVariable], TensorVariable] = field(repr=False)


class LocalTransitions(ABC):
    """Transitions of the local variables of groups, given the position of the global ones."""

    complete: CompleteData
    transitions: int
    noise_size: int
    """Standard normal numbers for a group and transition."""

    @abstractmethod
    def _begin(
        self, position: TensorVariable, numbers: TensorVariable, block: TensorVariable
    ) -> tuple[Callable[..., list[TensorVariable]], list[TensorVariable]]:
        """A transition, as a function of noise and a state, and the first state.

        The first part of a state is the block.
        """

    def run(
        self,
        position: TensorVariable,
        numbers: TensorVariable,
        block: TensorVariable,
        noise: TensorVariable,
    ) -> TensorVariable:
        """Blocks after all transitions of a visit, with noise of shape (transitions, n, k)."""
        transition, state = self._begin(position, numbers, block)
        if self.transitions == 1:
            return transition(noise[0], *state)[0]
        parts = pytensor.scan(
            transition,
            sequences=[noise],
            outputs_info=state,
            n_steps=self.transitions,
            name=FEW_STEPS,
            return_updates=False,
        )
        return (parts[0] if len(state) > 1 else parts)[-1]


class GivenTransitions(LocalTransitions):
    """Transitions of a user, such as a Gibbs sampler.

    Parameters
    ----------
    complete : CompleteData
    transition : callable
        Function of a `LocalState` that returns the next block.
    noise_size : int
    transitions : int
    """

    def __init__(
        self,
        complete: CompleteData,
        transition: Callable[[LocalState], TensorVariable],
        noise_size: int,
        transitions: int,
    ):
        self.complete, self.noise_size, self.transitions = complete, noise_size, transitions
        self._transition = transition

    def _begin(
        self, position: TensorVariable, numbers: TensorVariable, block: TensorVariable
    ) -> tuple[Callable[..., list[TensorVariable]], list[TensorVariable]]:
        complete = self.complete
        variables = complete.global_variables(position)

        def transition(noise: TensorVariable, block: TensorVariable) -> list[TensorVariable]:
            state = LocalState(
                block,
                numbers,
                variables,
                noise,
                lambda at: complete.log_density(position, numbers, at),
            )
            following = pt.as_tensor(self._transition(state)).astype(complete.dtype)
            return [pt.specify_shape(following, (None, complete.block_size))]

        return transition, [block]


class LangevinTransitions(LocalTransitions):
    r"""Metropolis-adjusted Langevin transitions, scaled by a Gaussian for each group.

    .. math:: u' = u + (1 - \rho)\, L L^\top \nabla_u \log p(y_g, u \mid \theta)
              + \sqrt{1 - \rho^2}\, L z, \qquad z \sim N(0, I)

    is accepted or refused by Metropolis and Hastings. Where the law of u is N(m, L Lᵀ), every
    proposal is accepted and :math:`\rho` is the autocorrelation: with :math:`\rho = 0` each draw is
    new. The law is left invariant whatever L, which is from a centre of the global variables.

    Parameters
    ----------
    complete : CompleteData
    roots : numpy.ndarray, shape (G, q, q)
        L of each group.
    correlation : float
        The number :math:`\rho` in [0, 1).
    transitions : int

    References
    ----------
    The proposal is the semi-implicit one of Beskos, Roberts, Stuart and Voss (2008), MCMC methods
    for diffusion bridges.
    """

    def __init__(
        self, complete: CompleteData, roots: np.ndarray, correlation: float, transitions: int
    ):
        self.complete, self.transitions = complete, transitions
        self.noise_size = complete.block_size + 1
        dtype = complete.dtype
        self._roots = pytensor.shared(
            np.asarray(roots, dtype), "local_roots", shape=(None, *roots.shape[1:]), borrow=True
        )
        self._drift = pytensor.shared(np.zeros((), dtype), "local_drift")
        self._spread = pytensor.shared(np.zeros((), dtype), "local_spread")
        self.correlation = correlation

    @property
    def correlation(self) -> float:
        r"""The number :math:`\rho`."""
        return self._correlation

    @correlation.setter
    def correlation(self, correlation: float) -> None:
        self._correlation = float(correlation)
        for shared, value in ((self._drift, 1 - correlation), (self._spread, 1 - correlation**2)):
            shared.set_value(np.asarray(value, shared.dtype))

    def _begin(
        self, position: TensorVariable, numbers: TensorVariable, block: TensorVariable
    ) -> tuple[Callable[..., list[TensorVariable]], list[TensorVariable]]:
        complete, size = self.complete, self.complete.block_size
        roots = self._roots[numbers]
        drift, spread = self._drift, self._spread

        def evaluate(at: TensorVariable) -> tuple[TensorVariable, TensorVariable]:
            value = complete.log_density(position, numbers, at)
            slope = complete.gradient_by_block(position, numbers, at)
            # In units in which the Gaussian approximation has covariance I.
            return value, (roots * slope[:, :, None]).sum(axis=1)

        def transition(noise, block, value, slope):
            normal, last = noise[:, :size], noise[:, size]
            move = drift * slope + pt.sqrt(spread) * normal
            proposal = block + (roots * move[:, None, :]).sum(axis=2)
            there, slope_there = evaluate(proposal)
            back = ((move + drift * slope_there) ** 2).sum(axis=1)
            forth = ((move - drift * slope) ** 2).sum(axis=1)
            log_ratio = there - value - (back - forth) / (2 * spread)
            # The last number, as a uniform one; a ratio that is not a number refuses.
            accepted = pt.log(0.5 * pt.erfc(last / np.sqrt(2.0))) < log_ratio
            return [
                pt.switch(accepted[:, None], proposal, block).astype(complete.dtype),
                pt.switch(accepted, there, value).astype(complete.dtype),
                pt.switch(accepted[:, None], slope_there, slope).astype(complete.dtype),
            ]

        value, slope = evaluate(block)
        return transition, [block, value.astype(complete.dtype), slope.astype(complete.dtype)]
