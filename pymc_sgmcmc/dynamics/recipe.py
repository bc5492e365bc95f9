r"""The complete recipe of Ma, Chen and Fox (2015) for stochastic gradient MCMC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.dynamics.base import Array, Auxiliary, Dynamics, Gradient, Transition
from pymc_sgmcmc.dynamics.blocks import (
    Blocks,
    add,
    apply_blocks,
    as_blocks,
    congruence,
    divergence,
    root_product,
    scale,
)


@dataclass(frozen=True)
class GaussianAuxiliary:
    r"""A vector beside the position that is Gaussian in the target, as a momentum is.

    Its coordinates are independent, :math:`r \sim N(\text{mean}, \text{variance} \cdot I)`.

    Attributes
    ----------
    name : str
    size : int, optional
        Its length. Default: that of the position.
    mean : float
    variance : float
        The variance of each coordinate, which is the mass for a momentum.
    """

    name: str
    size: int | None = None
    mean: float = 0.0
    variance: float = 1.0


@dataclass(frozen=True)
class RecipeDynamics(Dynamics):
    r"""Euler step of the stochastic differential equation that D and Q define.

    .. math::
        dz &= [D(z) + Q(z)] \nabla \log p(z)\, dt + \Gamma(z)\, dt + \sqrt{2 D(z)}\, dW, \qquad
        \Gamma_i = \sum_j \partial_j (D_{ij} + Q_{ij}) \\
        z' &= z + \tfrac{h}{2} \left\{ [D + Q] \hat\nabla \log p(z) + \Gamma \right\}
              + N\!\left(0,\; h D - \tfrac{h^2}{4} (D + Q) \hat V (D + Q)^\top \right)

    (Ma, Chen and Fox 2015, section 2), with z the position and the auxiliaries, and
    :math:`\log p(z) = \log \pi(\theta) + \sum \log N(r; \text{mean}, \text{variance})`. The time
    step is h / 2, so D = M with Q = 0 is `Langevin` with preconditioner M. For D positive
    semi-definite and Q skew-symmetric the equation leaves p invariant. The Euler step does so up to
    terms of order h. Gradient noise adds an error, which the estimate :math:`\hat V` of its
    covariance reduces. (In print the step has :math:`-\Gamma`, with the sign of the gradient of
    -log p. Here Γ is added, as in the equation.)

    Attributes
    ----------
    diffusion, curl : callable
        D and Q as functions of the parts of z, see `as_blocks` for what they return.
    gaussians : tuple of GaussianAuxiliary
    gradient_noise : scalar, (d,) or (d, d), optional
        Covariance :math:`\hat V` of the gradient estimate, to subtract from the noise.
    singular : bool
        Whether dense blocks of D may be singular.
    """

    diffusion: Callable[..., Any]
    curl: Callable[..., Any]
    gaussians: tuple[GaussianAuxiliary, ...] = ()
    gradient_noise: Array | None = None
    singular: bool = False

    def auxiliaries(self, dimension: int) -> Sequence[Auxiliary]:
        """The Gaussian vectors."""
        sizes = self.sizes(dimension)[1:]
        return tuple(
            Auxiliary(auxiliary.name, (size,))
            for auxiliary, size in zip(self.gaussians, sizes, strict=True)
        )

    def sizes(self, dimension: int) -> tuple[int, ...]:
        """Lengths of the parts of z."""
        return (dimension, *(auxiliary.size or dimension for auxiliary in self.gaussians))

    def initial_auxiliaries(
        self, position: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, ...]:
        """Draws from their law in the target, which does not depend on the position."""
        return tuple(
            auxiliary.mean + np.sqrt(auxiliary.variance) * rng.standard_normal(size)
            for auxiliary, size in zip(self.gaussians, self.sizes(len(position))[1:], strict=True)
        )

    def noise_size(self, dimension: int) -> int:
        """One number for each coordinate of z."""
        return sum(self.sizes(dimension))

    def matrices(self, parts: Sequence[TensorVariable]) -> tuple[Blocks, Blocks]:
        """D and Q in blocks at symbolic parts of z.

        Raises
        ------
        ValueError
            Where a block does not fit the parts of z.
        """
        sizes = [part.type.shape[0] for part in parts]
        dtype = parts[0].dtype
        return (
            as_blocks(self.diffusion(*parts), sizes, "D", dtype),
            as_blocks(self.curl(*parts), sizes, "Q", dtype),
        )

    def injected_covariance(self, D: Blocks, Q: Blocks, step_size: Array) -> Blocks:
        """Covariance of the noise of a step, divided by h."""
        if self.gradient_noise is None:
            return D
        return add(D, scale(-step_size / 4, congruence(add(D, Q), self.gradient_noise)))

    def transition(
        self,
        state: tuple[TensorVariable, ...],
        gradient: Gradient,
        scaled_noise: Array,
        step_size: Array,
    ) -> Transition:
        """One Euler step of all parts, from the present values of all parts."""
        estimate = gradient(state[0])
        gradients = [estimate]
        for part, auxiliary in zip(state[1:], self.gaussians, strict=True):
            gradients.append((auxiliary.mean - part) / auxiliary.variance)
        D, Q = self.matrices(state)
        coefficients = add(D, Q)
        correction = divergence(coefficients, state)
        drift = apply_blocks(coefficients, gradients)
        stops = np.cumsum([part.type.shape[0] for part in state])
        noise = [
            scaled_noise[int(stop) - part.type.shape[0] : int(stop)]
            for part, stop in zip(state, stops, strict=True)
        ]
        injected = root_product(
            self.injected_covariance(D, Q, step_size), noise, singular=self.singular
        )
        following = tuple(
            part + 0.5 * step_size * (moved + correct) + step_size**0.5 * random
            for part, moved, correct, random in zip(state, drift, correction, injected, strict=True)
        )
        return Transition(following, estimate)
