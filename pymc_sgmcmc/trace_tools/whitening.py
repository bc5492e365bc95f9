"""Coordinates in which the draws of a trace have unit covariance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import linalg

from pymc_sgmcmc.trace_tools.reader import every_nth, root_of_draws


@dataclass(frozen=True)
class Whitening:
    r"""Coordinates x with :math:`\theta = c + L x`.

    The gradient in x is :math:`L^\top` times that in the position.

    Attributes
    ----------
    center : numpy.ndarray, shape (d,)
        c.
    root : numpy.ndarray, shape (d, d)
        L, lower triangular.
    """

    center: np.ndarray
    root: np.ndarray

    @classmethod
    def of(cls, positions: np.ndarray, labels: tuple[str, ...] = ()) -> Whitening:
        """Coordinates with the mean and covariance of draws of shape (chains, draws, d)."""
        draws = every_nth(positions).reshape(-1, positions.shape[-1])
        center, scale = draws.mean(0), draws.std(0)
        scaled = (draws - center) / scale
        labels = labels or tuple(f"coordinate {number}" for number in range(len(scale)))
        root = root_of_draws(scaled.T @ scaled / len(scaled), labels, len(draws))
        return cls(center, scale[:, None] * root)

    def positions(self, values: np.ndarray) -> np.ndarray:
        """Coordinates x of positions, shape (n, d)."""
        centred = (values - self.center).T
        return linalg.solve_triangular(self.root, centred, lower=True, check_finite=False).T

    def gradients(self, values: np.ndarray) -> np.ndarray:
        """Gradients in x of gradients in the position, shape (n, d)."""
        return values @ self.root
