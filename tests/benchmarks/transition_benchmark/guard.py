"""Checks that a contender does the work that it is timed for.

Every chain starts some posterior standard deviations off the mode and near the mode the posterior
is close to a Gaussian with precision H, so both of these are known in advance for a chain
``theta' = theta + (h/2) gradient + N(0, h)``:

- its mean path, ``m_k = (I - (h/2) H)^k m_0`` about the mode: wrong when the drift is missing, has
  the wrong scale or sign;
- the mean square of its increments divided by h: 1 from the injected noise, ``(h/4) V`` from the
  gradient noise, and a small rest from the drift. It is wrong when the noise has the wrong scale
  (h taken for h/2), or the minibatch another size.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from common.problem import GRADIENT_NOISE_INFLATION, Problem

from transition_benchmark import Settings

MEAN_TOLERANCE = 2.0
"""Posterior standard deviations (root mean square over coordinates). The mean of a chain as long
as :func:`least_transitions` scatters by about one; without drift it is off by about four."""
INCREMENT_TOLERANCE = 0.1
"""Relative. A batch of twice or half the size moves the SGLD figure by 17 % at least."""
_RELAXATIONS = 6.0


def least_transitions(problem: Problem, step_size: float) -> int:
    """Transitions after which the mean of a chain tells drift from no drift."""
    slowest = np.linalg.eigvalsh(problem.curvature)[0]
    return int(np.ceil(_RELAXATIONS / (step_size * slowest)))


def examine(
    positions: np.ndarray, problem: Problem, settings: Settings, method: str
) -> dict[str, float | bool]:
    """Compare the positions of a chain with what theory says of its method.

    Returns
    -------
    dict
        ``mean_error``, the distance of the mean of the chain from the expected mean (root mean
        square over coordinates, in posterior standard deviations); ``increment_ratio``, the mean
        squared increment relative to the expected one; and ``passed``: every transition moved,
        and both figures are within their tolerances.
    """
    positions = np.asarray(positions, dtype=float)
    increments = np.diff(positions, axis=0, prepend=problem.start[None])
    if method == "second-order":
        increments = increments @ np.linalg.cholesky(problem.curvature)
    settings = replace(settings, transitions=len(positions))
    mean, increment_square = _expectations(problem, settings, method)
    posterior_sd = np.sqrt(np.diag(np.linalg.inv(problem.curvature)))
    error = (positions.mean(axis=0) - mean) / posterior_sd
    mean_error = float(np.sqrt(np.mean(error**2)))
    ratio = float(np.mean(increments**2) / increment_square)
    # Comparisons with nan are false, so a chain that is not finite fails.
    passed = (
        bool(np.all(np.any(increments != 0, axis=1)))
        and mean_error <= MEAN_TOLERANCE
        and abs(ratio - 1) <= INCREMENT_TOLERANCE
    )
    return {"mean_error": mean_error, "increment_ratio": ratio, "passed": passed}


def _expectations(problem: Problem, settings: Settings, method: str) -> tuple[np.ndarray, float]:
    """Give the expected mean of the positions and mean square of the increments."""
    h, count = settings.step_size, settings.transitions
    values, vectors = np.linalg.eigh(problem.curvature)
    offset = vectors.T @ (problem.start - problem.mode)
    if method == "second-order":  # In the coordinates of the preconditioner all values are 1.
        h, offset = 1.0, offset * np.sqrt(values)
        vectors, values = vectors / np.sqrt(values), np.ones_like(values)
    factor = 1 - h * values / 2
    path_sum = factor * (1 - factor**count) / (1 - factor)
    mean = problem.mode + vectors @ (offset * path_sum / count)

    # Drift of the mean path, then of the fluctuations about it, E|H (theta - m)|^2 = tr(H Λ H).
    square_sum = (1 - factor ** (2 * count)) / (1 - factor**2)
    drift_square = np.sum((values * offset) ** 2 * square_sum) / count
    if method == "second-order":
        # Without gradient noise the law is the posterior, with increments of mean square h/2.
        return mean, h / 2 + h**2 / 4 * float(drift_square) / problem.features
    noise_trace = 0.0
    inflation = 1.0
    if method == "sgld":
        noise_trace = problem.rows**2 / settings.batch * np.trace(problem.row_covariance)
        inflation += GRADIENT_NOISE_INFLATION
    drift_square += inflation * np.sum(values)
    increment = h + h**2 / 4 * (noise_trace + drift_square) / problem.features
    return mean, float(increment)
