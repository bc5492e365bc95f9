"""ArviZ's statistics of draws of shape (chains, draws, ...).

They take half a second to import, and so are imported where they are called.
"""

from __future__ import annotations

from typing import Any

import numpy as np

AXES = {"chain_axis": 0, "draw_axis": 1}


def ess(draws: np.ndarray, method: str = "bulk") -> np.ndarray:
    """Effective number of draws, shape (...)."""
    from arviz_stats.base import array_stats

    return array_stats.ess(draws, method=method, **AXES)


def r_hat(draws: np.ndarray) -> np.ndarray:
    """R-hat by ranks, shape (...)."""
    from arviz_stats.base import array_stats

    return array_stats.rhat(draws, **AXES)


def mcse(draws: np.ndarray, method: str = "mean", **settings: Any) -> np.ndarray:
    """Monte-Carlo standard error of a mean, a standard deviation or a quantile, shape (...)."""
    from arviz_stats.base import array_stats

    return array_stats.mcse(draws, method=method, **settings, **AXES)


def ess_and_r_hat(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Effective draws and R-hat of coordinates; the halves of a single chain are compared."""
    halves = draws
    if len(draws) == 1:
        half = draws.shape[1] // 2
        halves = np.concatenate([draws[:, :half], draws[:, -half:]])
    return ess(draws), r_hat(halves)
