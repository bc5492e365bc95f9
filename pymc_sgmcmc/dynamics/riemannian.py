r"""Stochastic gradient Riemannian Langevin dynamics (Patterson and Teh 2013)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.dynamics.base import Array, Dynamics, Gradient, Transition
from pymc_sgmcmc.dynamics.blocks import tangents


@dataclass(frozen=True)
class RiemannianLangevin(Dynamics):
    r"""One Euler step of the Langevin diffusion on the manifold of a Fisher metric.

    .. math::
        \theta' &= \theta + \tfrac{h}{2} \left\{ M(\theta) \hat\nabla(\theta) + \Gamma(\theta)
            \right\} + N(0, h M(\theta)), \qquad
        M = G^{-1}, \quad G(\theta) = S(\theta)^\top S(\theta) + P \\
        \Gamma_i &= \sum_j \partial_j M_{ij}
                  = -\sum_{jkl} M_{ik}\, (\partial_j G_{kl})\, M_{lj}

    with scores S, scaled so that :math:`S^\top S` estimates the Fisher information of all rows.
    This is the recipe of Ma, Chen and Fox (2015) with D = M and Q = 0, which leaves the posterior
    invariant up to terms of order h. The drift that Patterson and Teh print (after Girolami
    and Calderhead) has :math:`-2 M (\partial_j G) M + M \operatorname{tr}(M \partial_j G)`
    in place of :math:`-M (\partial_j G) M`. The two agree where :math:`\partial_j G_{kl}` is
    symmetric in all its indices, as in one dimension or for one linear predictor. Elsewhere the
    printed drift leaves another law invariant (Xifara et al. 2014).

    Scores are differentiated once in each of the d directions, so a transition costs about d
    evaluations of them, and :math:`d^3` for the root of G.

    Attributes
    ----------
    scores : callable
        Symbolic S, shape (rows, d), at a symbolic position.
    prior_precision : (d, d)
        P, symmetric and positive semi-definite.
    """

    scores: Callable[[TensorVariable], TensorVariable]
    prior_precision: TensorVariable

    def transition(
        self,
        state: tuple[TensorVariable, ...],
        gradient: Gradient,
        scaled_noise: Array,
        step_size: Array,
    ) -> Transition:
        """One step from the position, which is the whole state."""
        (position,) = state
        estimate = gradient(position)
        S = self.scores(position)
        root = pt.linalg.cholesky(S.T @ S + self.prior_precision)
        M = pt.linalg.cho_solve(
            (root, True), pt.eye(self.prior_precision.type.shape[0], dtype=position.dtype)
        )
        drift = M @ (estimate - metric_divergence(S, M, position))
        noise = pt.linalg.solve_triangular(root.T, scaled_noise, lower=False)
        following = position + 0.5 * step_size * drift + step_size**0.5 * noise
        return Transition((following,), estimate)


@dataclass(frozen=True)
class DiagonalRiemannianLangevin(Dynamics):
    r"""One Euler step with a diagonal M, each entry of which depends on its own coordinate.

    .. math::
        \theta_i' = \theta_i + \tfrac{h}{2} \left\{ m(\theta_i) \hat\nabla_i(\theta)
            + m'(\theta_i) \right\} + N(0, h\, m(\theta_i))

    Γ is then the vector of the derivatives, by one pass of automatic differentiation. With
    :math:`m(x) = e^{-x}` for the logarithm x of a Gamma variable it is the sampler of Patterson
    and Teh (2013) for the expanded mean of a simplex.

    Attributes
    ----------
    diagonal : callable
        Symbolic diagonal of M, shape (d,), at a symbolic position.
    """

    diagonal: Callable[[TensorVariable], TensorVariable]

    def transition(
        self,
        state: tuple[TensorVariable, ...],
        gradient: Gradient,
        scaled_noise: Array,
        step_size: Array,
    ) -> Transition:
        """One step from the position, which is the whole state."""
        (position,) = state
        estimate = gradient(position)
        M = self.diagonal(position)
        drift = M * estimate + diagonal_divergence(M, position)
        noise = pt.sqrt(M) * scaled_noise
        following = position + 0.5 * step_size * drift + step_size**0.5 * noise
        return Transition((following,), estimate)


def diagonal_divergence(M: TensorVariable, position: TensorVariable) -> TensorVariable:
    """Derivatives of the entries of a diagonal, each by its own coordinate."""
    return pt.grad(M.sum(), position, disconnected_inputs="ignore")


def metric_divergence(
    S: TensorVariable, M: TensorVariable, position: TensorVariable
) -> TensorVariable:
    r"""The vector :math:`v_k = \sum_{jl} (\partial_j G_{kl}) M_{lj}` for G = SᵀS + P.

    Here :math:`\partial_j G = (\partial_j S)^\top S + S^\top \partial_j S`, and
    :math:`\Gamma = -M v`. The vector is computed by automatic differentiation, without the d
    matrices :math:`\partial_j G`.
    """
    derivatives = tangents(S, position)  # (direction, row, coordinate)
    if derivatives is None:
        return pt.zeros_like(position)
    directions = (S @ M).T
    traces = (derivatives * M[:, None, :]).sum((0, 2))
    return (derivatives * directions[:, :, None]).sum((0, 1)) + traces @ S
