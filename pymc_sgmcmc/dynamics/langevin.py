r"""Stochastic gradient Langevin dynamics (Welling and Teh 2011)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Langevin:
    r"""One Euler step of the preconditioned Langevin diffusion.

    .. math:: \theta' = \theta + \tfrac{h}{2} M \hat\nabla(\theta) + \sqrt{h}\, L \xi,
              \qquad M = L L^\top, \quad \xi \sim N(0, I)

    For a Gaussian posterior with precision H the law that this leaves invariant is Gaussian
    with the posterior's mean and a covariance that solves
    :math:`\Lambda = F \Lambda F^\top + hM + \tfrac{h^2}{4} M \mathcal{V}(\Lambda) M`,
    :math:`F = I - \tfrac{h}{2} M H`, with :math:`\mathcal{V}` the covariance of the gradient
    estimate: larger than the posterior's by about :math:`\tfrac{h}{4}(MV + MH)`.

    All methods take arrays and symbolic tensors alike.

    Attributes
    ----------
    preconditioner : scalar, (d,) or (d, d)
        M: a number, a diagonal, or a symmetric positive definite matrix.
    root : scalar, (d,) or (d, d)
        L with M = L Lᵀ, of the same kind.
    """

    preconditioner: Any
    root: Any

    def scaled_noise(self, noise: Any, step_size: Any) -> Any:
        r"""Rows :math:`\sqrt{h} L \xi` for rows :math:`\xi`, shape (transitions, d).

        For all transitions of a block at once: one matrix product instead of many.
        """
        scaled = noise @ self.root.T if self.root.ndim == 2 else noise * self.root
        return step_size[:, None] ** 0.5 * scaled

    def transition(
        self,
        position: Any,
        gradient: Callable[[Any], Any],
        scaled_noise: Any,
        step_size: Any,
    ) -> tuple[Any, Any]:
        """Next position and the gradient at the present one.

        Parameters
        ----------
        position : (d,)
        gradient : callable
            Gradient estimate on the rows of this transition, as a function of a position.
        scaled_noise : (d,)
            One row of `scaled_noise`.
        step_size : scalar
            h.
        """
        here = gradient(position)
        drift = (
            self.preconditioner @ here
            if self.preconditioner.ndim == 2
            else (self.preconditioner * here)
        )
        return position + 0.5 * step_size * drift + scaled_noise, here
