"""Errors of draws against the Laplace approximation of a posterior."""

from __future__ import annotations

import numpy as np
from arviz_stats.base import array_stats


def errors_of_draws(draws: np.ndarray, mode: np.ndarray, sd: np.ndarray) -> dict[str, float]:
    """Effective draws, and errors, of the worst coordinate.

    Parameters
    ----------
    draws : numpy.ndarray, shape (chains, draws, coordinates)
    mode, sd : numpy.ndarray, shape (coordinates,)
    """
    ratios = draws.std(axis=(0, 1), ddof=1) / sd
    return {
        "ess": float(array_stats.ess(draws, chain_axis=0, draw_axis=1).min()),
        "sd_ratio": float(ratios[np.abs(np.log(ratios)).argmax()]),
        "mean_error": float(np.abs((draws.mean(axis=(0, 1)) - mode) / sd).max()),
    }
