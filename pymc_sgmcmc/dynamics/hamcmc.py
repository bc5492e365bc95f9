r"""Stochastic quasi-Newton Langevin dynamics, HAMCMC (Şimşekli, Badeau, Cemgil, Richard 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytensor.tensor as pt

from pymc_sgmcmc.dynamics.base import (
    Array,
    Auxiliary,
    Dynamics,
    Gradient,
    State,
    Transition,
    folded,
)

LARGEST_CHANGE = 4.0
"""A pair between two chains is used where γ‖y‖² / sᵀy is at most this number. On a quadratic log
density the ratio is at most 1 for the default γ, so the bound leaves room for a curvature that
varies."""


@dataclass(frozen=True)
class QuasiNewtonLangevin(Dynamics):
    r"""One Euler step of Langevin dynamics, preconditioned by limited-memory BFGS.

    .. math:: \theta_t = \theta_{t-M} + \tfrac{h}{2} H_t \hat\nabla_{S_t}(\theta_{t-M})
              + \sqrt{h}\, R_t \xi_t, \qquad H_t = R_t R_t^\top

    H_t approximates the inverse curvature by BFGS updates of :math:`\gamma`, a number or a
    diagonal, with the M - 1 pairs :math:`\tau = t-M+1, \dots, t-1`, oldest first,

    .. math:: s_\tau = \theta_\tau - \theta_{\tau-M}, \qquad
              y_\tau = \hat\nabla_{S_\tau}(\theta_{\tau-M}) - \hat\nabla_{S_\tau}(\theta_\tau)
              + \lambda s_\tau

    with both gradients from the same rows. None of them involves :math:`\theta_{t-M}`. There are
    M chains that take turns and share what they learn of the curvature. Their positions are
    recorded in the order of the transitions.

    With ``between_chains`` the pairs are differences between the present positions of two chains
    that took their turns one after the other, M - 2 pairs :math:`\tau = t-M+2, \dots, t-1`,

    .. math:: s_\tau = \theta_\tau - \theta_{\tau-1}, \qquad
              y_\tau = \hat\nabla_{S_\tau}(\theta_{\tau-1}) - \hat\nabla_{S_\tau}(\theta_\tau)
              + \lambda s_\tau

    with a second condition, :math:`y^\top \gamma y \le 4 s^\top y`, which holds for a curvature of
    at most :math:`4 / \gamma`. They depend on the other chains alone, as in the ensembles of
    Leimkuhler, Matthews and Weare (2018), so the product of M posteriors is invariant as h goes to
    zero.

    A pair is stored divided by :math:`\sqrt{s^\top y}`. Where
    :math:`s^\top y \le s^\top \kappa s` it is stored as zeros, which have no effect. The first M
    transitions use no pairs, since all chains start from one point. They are steps of SGLD with
    the preconditioner :math:`\gamma`.

    Attributes
    ----------
    memory : int
        M, at least 2.
    initial_scale : scalar or (d,)
        :math:`\gamma`.
    regularization : scalar or (d,)
        :math:`\lambda`.
    curvature_threshold : scalar or (d,)
        :math:`\kappa`, positive.
    between_chains : bool
        Whether the pairs are differences between chains, for a `memory` of at least 3.
    mirrored : (d,), optional
        Ones for coordinates that become their absolute value after the step, zeros for the others.
        Pairs are zero there, so that H_t is diagonal in them: a dense matrix would be reflected in
        another direction, and the error would stay as h goes to zero.
    """

    memory: int
    initial_scale: Array
    regularization: Array
    curvature_threshold: Array
    between_chains: bool = False
    mirrored: Array | None = None

    stats = ("pair_accepted",)

    @property
    def pairs(self) -> int:
        """Pairs in use."""
        return self.memory - 2 if self.between_chains else self.memory - 1

    @property
    def lag(self) -> int:  # type: ignore[override]
        """M, since the gradient at a position is evaluated when the same chain moves again."""
        return self.memory

    def auxiliaries(self, dimension: int) -> Sequence[Auxiliary]:
        """Positions t - M to t - 2, the scaled pairs, and transitions until the pairs are used."""
        return (
            Auxiliary("earlier_positions", (self.memory - 1, dimension)),
            Auxiliary("displacements", (self.pairs, dimension)),
            Auxiliary("gradient_changes", (self.pairs, dimension)),
            Auxiliary("start_transitions", (1,)),
        )

    def initial_auxiliaries(
        self, position: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, ...]:
        """All chains at the start, and no pairs."""
        earlier = np.repeat(position[None], self.memory - 1, axis=0)
        no_pairs = np.zeros((self.pairs, len(position)))
        return earlier, no_pairs, no_pairs.copy(), np.array([self.memory])

    def auxiliaries_after_move(
        self, position: np.ndarray, auxiliaries: tuple[np.ndarray, ...], rng: np.random.Generator
    ) -> tuple[np.ndarray, ...]:
        """The same as at the start, since the earlier positions would bring the chain back."""
        return self.initial_auxiliaries(position, rng)

    def noise_size(self, dimension: int) -> int:
        """Numbers for the position and one for each pair."""
        return dimension + self.pairs

    def scaled_noise(self, noise: Array, step_sizes: Array) -> Array:
        r"""Rows :math:`\sqrt{h\gamma}\, z`, and :math:`\sqrt{h}\, \xi` of the pairs."""
        count = self.pairs
        scaled = step_sizes[:, None] ** 0.5 * noise
        return pt.concatenate(
            [self.initial_scale**0.5 * scaled[:, :-count], scaled[:, -count:]], axis=1
        )

    def transition(
        self,
        state: State,
        gradient: Gradient,
        scaled_noise: Array,
        step_size: Array,
    ) -> Transition:
        """One step of the chain whose turn it is."""
        position, earlier, displacements, gradient_changes, start_transitions = state
        count = self.pairs
        origin = earlier[0]
        estimate = gradient(origin)
        move = preconditioned_move(
            0.5 * step_size * estimate,
            scaled_noise[:-count],
            scaled_noise[-count:],
            # A pair without its displacement changes nothing.
            pt.where(start_transitions > 0, 0.0, displacements),
            gradient_changes,
            self.initial_scale,
        )
        following = folded(origin + move, self.mirrored)
        if self.between_chains:
            displacement, before = following - position, gradient(position)
        else:
            displacement, before = move, estimate
        change = before - gradient(following) + self.regularization * displacement
        if self.mirrored is not None:
            displacement, change = ((1.0 - self.mirrored) * each for each in (displacement, change))
        product = displacement @ change
        accepted = product > displacement @ (self.curvature_threshold * displacement)
        if self.between_chains:
            # Between distant positions the difference of gradients may have another direction than
            # that of positions, which would make the update of H_t unbounded.
            size = change @ (self.initial_scale * change)
            accepted = accepted & (size <= LARGEST_CHANGE * product)
        # For a refused pair the product may be negative.
        factor = pt.where(accepted, pt.where(accepted, product, 1.0) ** -0.5, 0.0)
        after = (
            following,
            _append(earlier, position),
            _append(displacements, factor * displacement),
            _append(gradient_changes, factor * change),
            pt.maximum(start_transitions - 1.0, 0.0),
        )
        return Transition(after, estimate, (accepted,))


def preconditioned_move(
    drift: Array,
    noise: Array,
    pair_noise: Array,
    displacements: Array,
    gradient_changes: Array,
    initial_scale: Array,
) -> Array:
    r"""Return :math:`H v + \eta` with H from BFGS updates of :math:`\gamma`, and Cov η = H.

    The pairs are scaled to :math:`s_i^\top y_i = 1`. The first loop of the recursion of Nocedal
    (1980) goes from the newest to the oldest pair, with :math:`\alpha_i = s_i^\top v` and
    :math:`v \leftarrow v - \alpha_i y_i`. Its second loop goes from the oldest to the newest. It
    is the linear map that turns a root of one BFGS matrix into a root of the next: each update is
    :math:`H \leftarrow (I - s y^\top) H (I - y s^\top) + s s^\top`, so noise with covariance
    H becomes noise with the new covariance by
    :math:`\eta \leftarrow \eta - s\, y^\top \eta + s\, \xi`. So one loop serves for both, from
    :math:`w = \gamma v + \sqrt{\gamma}\, z`:

    .. math:: w \leftarrow w + s_i (\alpha_i + \xi_i - y_i^\top w)

    It replaces the paper's eq. (11), which in print does not give a root of H.

    Parameters
    ----------
    drift : (d,)
        The vector v.
    noise : (d,)
        :math:`\sqrt{\gamma}\, z` with z standard normal.
    pair_noise : (pairs,)
        The numbers :math:`\xi_i`.
    displacements, gradient_changes : (pairs, d)
        The vectors s_i and y_i, oldest first. Both are zero for a pair that is not used.
    initial_scale : scalar or (d,)
        The scale γ, a number or a diagonal.
    """
    count = displacements.type.shape[0] if hasattr(displacements, "type") else len(displacements)
    coefficients = [None] * count
    for pair in reversed(range(count)):
        coefficients[pair] = displacements[pair] @ drift
        drift = drift - coefficients[pair] * gradient_changes[pair]
    move = initial_scale * drift + noise
    for pair in range(count):
        along = coefficients[pair] + pair_noise[pair] - gradient_changes[pair] @ move
        move = move + along * displacements[pair]
    return move


def _append(rows: Array, row: Array) -> Array:
    """Rows without the oldest, followed by a new one."""
    return pt.concatenate([rows[1:], row[None]], axis=0)
