r"""Gradients of a stationary Langevin chain on a Gaussian posterior, in closed form.

On a Gaussian posterior with precision H the chain is :math:`\theta' = F \theta + \tfrac{h}{2} M e +
\zeta` with :math:`F = I - \tfrac{h}{2} M H`, gradients :math:`g = -H \theta + e` with noise e of
covariance V, and injected noise :math:`\zeta \sim N(0, hM)`.

Where each transition is stored, the sum :math:`\sum_k g_k` is :math:`\tfrac{2}{h} M^{-1}
(\theta_{K+1} - \theta_1 - \sum_k \zeta_k)`. Hence terms of order 1 are a control variate for the
injected noise. The noise of the gradient remains, so that the variance of a mean falls by the
factor :math:`1 + 1 / \delta`, where :math:`\delta = \tfrac{h}{4} M V` is the inflation of the
variance by the gradient noise.
"""

from __future__ import annotations

import numpy as np
from scipy import linalg

from pymc_sgmcmc.dynamics.law import EULER, Law


def langevin_gain(
    precision: np.ndarray,
    noise: np.ndarray,
    preconditioner: np.ndarray,
    step_sizes: float | np.ndarray,
    directions: np.ndarray,
    thin: int = 1,
    law: Law = EULER,
) -> np.ndarray:
    r"""Factor by which terms of order 1 reduce the variance of the mean of linear functions.

    The factor is :math:`S_{ff} / (S_{ff} - S_{fg} S_{gg}^{-1} S_{gf})` with the long-run
    covariances S of position and gradient of every `thin`-th transition. With every transition it
    is :math:`1 + 1 / \delta`, exactly for any step size. With draws so far apart that they are
    independent it is :math:`1 + H / V`, up to the inflation.

    Parameters
    ----------
    precision, noise, preconditioner : numpy.ndarray, shape (d, d)
        H, V and M.
    step_sizes : float or numpy.ndarray, shape (chains,)
        h, or that of each chain. The coefficients are the same for all chains.
    directions : numpy.ndarray, shape (d, q)
        A linear function of the position in each column.
    thin : int
        Number of transitions from one draw to the next.
    law : Law

    Returns
    -------
    numpy.ndarray, shape (q,)
        Factors, NaN where the chain with these settings has no stationary law.

    Examples
    --------
    >>> import numpy as np
    >>> identity = np.eye(1)
    >>> langevin_gain(identity, 10 * identity, identity, 0.2, identity).round(6)
    array([3.])
    """
    sizes, counts = np.unique(step_sizes, return_counts=True)
    matrices = (preconditioner, precision, noise)
    each = [_long_run_covariances(*matrices, size, thin, law) for size in sizes]
    if any(covariances is None for covariances in each):
        return np.full(directions.shape[1], np.nan)
    S_ff, S_fg, S_gg = np.average(each, axis=0, weights=counts)  # type: ignore[arg-type]
    explained = S_fg @ linalg.solve(S_gg, S_fg.T)
    total = np.einsum("iq,ij,jq->q", directions, S_ff, directions)
    left = np.einsum("iq,ij,jq->q", directions, S_ff - explained, directions)
    # Without gradient noise nothing is left, and rounding may make that negative.
    return total / np.maximum(left, total * np.finfo(float).eps)


def _long_run_covariances(
    preconditioner: np.ndarray,
    precision: np.ndarray,
    noise: np.ndarray,
    step_size: float,
    thin: int,
    law: Law,
) -> np.ndarray | None:
    """Long-run covariances S_ff, S_fg and S_gg, shape (3, d, d), of position f and gradient g.

    The result is None where the chain has no stationary law.
    """
    identity = np.eye(len(precision))
    F = identity - step_size / 2 * preconditioner @ precision
    if np.abs(linalg.eigvals(F)).max() >= 1:
        return None
    pushed = step_size / 2 * preconditioner @ noise
    # Where noises are averaged, a quarter of each is common to it and the one before.
    common = (1 - law.of_curvature) * step_size / 4 * preconditioner
    injected = step_size * preconditioner - 2 * common + F @ common + common @ F.T
    driven = injected + step_size / 2 * pushed @ preconditioner
    covariance = linalg.solve_discrete_lyapunov(F, driven)
    before = np.linalg.matrix_power(F, thin - 1)
    later = linalg.inv(identity - F @ before)
    # Sums over lags of covariances of the position with past positions and past gradient noise.
    past = before @ later @ (F @ covariance + common)
    S_ff = covariance + past + past.T
    S_fe = before @ later @ pushed
    S_fg = S_fe - S_ff @ precision
    S_gg = precision @ S_ff @ precision - precision @ S_fe - (precision @ S_fe).T + noise
    return np.array([S_ff, S_fg, S_gg])
