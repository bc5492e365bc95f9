r"""How much control variates can help: long-run covariances of Langevin dynamics in closed form.

On a Gaussian posterior with precision H, a chain :math:`\theta' = F \theta + \tfrac{h}{2} M e +
\zeta`, :math:`F = I - \tfrac{h}{2} M H`, has gradients :math:`-H \theta + e` with noise e of
covariance V, and injected noise :math:`\zeta \sim N(0, hM)`. Where each transition is stored,
:math:`\sum_k \hat\nabla_k` telescopes to :math:`\tfrac{2}{h} M^{-1} (\theta_{K+1} - \theta_1 -
\sum_k \zeta_k)`: terms of order 1 are a control variate on the injected noise. They leave that of
the gradient, so that the variance of a mean falls by :math:`1 + 1 / \delta` where
:math:`\delta = \tfrac{h}{4} M V` is the variance inflation by the gradient noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import linalg

from pymc_sgmcmc.trace_tools.reader import StoredRun, every_nth


@dataclass(frozen=True)
class LinearFit:
    """Gradients as a linear function of the position, and what is left.

    Attributes
    ----------
    precision : numpy.ndarray, shape (d, d)
        H: minus the slope.
    noise : numpy.ndarray, shape (d, d)
        V: covariance of the residuals, in which curvature that varies counts as noise.
    covariance : numpy.ndarray, shape (d, d)
        Of the positions.
    """

    precision: np.ndarray
    noise: np.ndarray
    covariance: np.ndarray


def linear_fit(positions: np.ndarray, gradients: np.ndarray) -> LinearFit:
    """Fit gradients by a linear function of the position, over draws of shape (n, d)."""
    x, g = positions - positions.mean(0), gradients - gradients.mean(0)
    slope = _slope(x, g)
    residuals = g - x @ slope
    return LinearFit(
        -(slope + slope.T) / 2,
        residuals.T @ residuals / max(1, len(x) - x.shape[1] - 1),
        x.T @ x / len(x),
    )


def _slope(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Least squares by normal equations, in a third of the time: rows are many, columns few."""
    scale = x.std(0)
    scaled = x / scale
    return linalg.lstsq(scaled.T @ scaled, scaled.T @ y)[0] / scale[:, None]


def langevin_gain(
    precision: np.ndarray,
    noise: np.ndarray,
    preconditioner: np.ndarray,
    step_sizes: float | np.ndarray,
    directions: np.ndarray,
    thin: int = 1,
) -> np.ndarray:
    r"""Factor by which terms of order 1 reduce the variance of the mean of linear functions.

    :math:`S_{ff} / (S_{ff} - S_{fg} S_{gg}^{-1} S_{gf})` with the long-run covariances S of
    position and gradient of every `thin`-th transition. With every transition it is
    :math:`1 + 1 / \delta`, exactly for any step size; with draws so far apart that they are
    independent it is :math:`1 + H / V`, up to the inflation.

    Parameters
    ----------
    precision, noise, preconditioner : numpy.ndarray, shape (d, d)
        H, V and M.
    step_sizes : float or numpy.ndarray, shape (chains,)
        h, or that of each chain; the coefficients are the same for all.
    directions : numpy.ndarray, shape (d, q)
        A linear function of the position in each column.
    thin : int
        Transitions a draw.

    Returns
    -------
    numpy.ndarray, shape (q,)
        NaN where the chain with these settings has no stationary law.

    Examples
    --------
    >>> import numpy as np
    >>> one = np.eye(1)
    >>> langevin_gain(one, 10 * one, one, 0.2, one).round(6)
    array([3.])
    """
    sizes, counts = np.unique(step_sizes, return_counts=True)
    matrices = (preconditioner, precision, noise)
    each = [_long_run_covariances(*matrices, size, thin) for size in sizes]
    if any(one is None for one in each):
        return np.full(directions.shape[1], np.nan)
    S_ff, S_fg, S_gg = np.average(each, axis=0, weights=counts)  # type: ignore[arg-type]
    explained = S_fg @ linalg.solve(S_gg, S_fg.T)
    total = np.einsum("iq,ij,jq->q", directions, S_ff, directions)
    left = np.einsum("iq,ij,jq->q", directions, S_ff - explained, directions)
    # Nothing is left without noise; rounding can leave less.
    return total / np.maximum(left, total * np.finfo(float).eps)


def _long_run_covariances(
    preconditioner: np.ndarray,
    precision: np.ndarray,
    noise: np.ndarray,
    step_size: float,
    thin: int,
) -> np.ndarray | None:
    """Of position and position, position and gradient, and gradient and gradient."""
    identity = np.eye(len(precision))
    F = identity - step_size / 2 * preconditioner @ precision
    if np.abs(linalg.eigvals(F)).max() >= 1:
        return None
    pushed = step_size / 2 * preconditioner @ noise
    driven = step_size * preconditioner + step_size / 2 * pushed @ preconditioner
    covariance = linalg.solve_discrete_lyapunov(F, driven)
    before = np.linalg.matrix_power(F, thin - 1)
    later = linalg.inv(identity - F @ before)
    # Sums over lags: of the position with its past, and with the noise of past gradients.
    past = F @ before @ later @ covariance
    S_ff = covariance + past + past.T
    S_fe = before @ later @ pushed
    S_fg = S_fe - S_ff @ precision
    S_gg = precision @ S_ff @ precision - precision @ S_fe - (precision @ S_fe).T + noise
    return np.array([S_ff, S_fg, S_gg])


def predicted_gain(run: StoredRun, values: np.ndarray) -> tuple[np.ndarray, LinearFit]:
    """Predicted gain for the linear part of functions, NaN for other than Langevin dynamics.

    Parameters
    ----------
    run : StoredRun
    values : numpy.ndarray, shape (chains, draws, q)
        Of the functions, at the draws that `every_nth` leaves.
    """
    d = run.dimension
    x = every_nth(run.positions).reshape(-1, d)
    fit = linear_fit(x, every_nth(run.gradients).reshape(-1, d))
    if not run.is_langevin or run.thin is None:
        return np.full(values.shape[-1], np.nan), fit
    f = values.reshape(-1, values.shape[-1])
    directions = _slope(x - x.mean(0), f - f.mean(0))
    moving = np.abs(directions).max(0) > 0
    gain = np.full(f.shape[1], np.nan)
    assert run.step_sizes is not None
    gain[moving] = langevin_gain(
        fit.precision,
        fit.noise,
        run.preconditioner,
        run.step_sizes,
        directions[:, moving],
        run.thin,
    )
    return gain, fit
