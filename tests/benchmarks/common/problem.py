"""Bayesian logistic regression shared by all contenders.

The program that times the contenders generates the data once and writes them to a folder from
which every worker reads: contenders in environments with different NumPy versions then see the
same bytes. NumPy is the only requirement.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PRIOR_SD = 10.0
GRADIENT_NOISE_INFLATION = 0.5
"""Relative inflation of the variance by SGLD's gradient noise which sets the step size: large
enough for a wrong batch size or gradient scale to show in the increments of a chain."""
START_OFFSET = 6.0
"""Distance of the start from the mode, in posterior standard deviations of each coordinate."""
_CHUNK_ROWS = 20_000


@dataclass(frozen=True)
class Problem:
    """Data, prior and local shape of the posterior.

    Attributes
    ----------
    design : ndarray of shape (rows, features)
        Standardised covariates; the first column is the intercept. C order.
    response : ndarray of shape (rows,)
        0 or 1, in the floating point type of `design`.
    prior_sd : float
        Standard deviation of the independent normal priors with mean 0.
    mode : ndarray of shape (features,)
        Posterior mode, float64.
    start : ndarray of shape (features,)
        Where every chain starts, float64: some posterior standard deviations off the mode, so
        that a chain without drift is noticed.
    curvature : ndarray of shape (features, features)
        Minus the Hessian of the log posterior at the mode (H).
    row_covariance : ndarray of shape (features, features)
        Covariance over rows of the gradient of one row at the mode, divisor `rows` (C).
    """

    design: np.ndarray
    response: np.ndarray
    prior_sd: float
    mode: np.ndarray
    start: np.ndarray
    curvature: np.ndarray
    row_covariance: np.ndarray

    @property
    def rows(self) -> int:
        """Number of rows N."""
        return self.design.shape[0]

    @property
    def features(self) -> int:
        """Number of coefficients p, intercept included."""
        return self.design.shape[1]

    @property
    def dtype(self) -> np.dtype:
        """Floating point type of data and chains."""
        return self.design.dtype


def make_problem(rows: int, features: int, dtype: str, seed: int = 20240229) -> Problem:
    """Generate a balanced logistic regression with a linear predictor of unit variance.

    Parameters
    ----------
    rows, features : int
        Shape of the design, the intercept counted in `features`.
    dtype : str
        ``"float64"`` or ``"float32"``. Both are rounded from the same draws.
    seed : int
        Seed of the data.

    Returns
    -------
    Problem
    """
    rng = np.random.default_rng(seed)
    design = np.empty((rows, features))
    design[:, 0] = 1.0
    covariates = design[:, 1:]
    covariates[:] = rng.standard_normal((rows, features - 1))
    covariates -= covariates.mean(axis=0)
    covariates /= covariates.std(axis=0)
    coefficients = rng.standard_normal(features)
    coefficients[0] = 0.0
    coefficients /= np.linalg.norm(coefficients) if features > 1 else 1.0
    response = (rng.random(rows) < sigmoid(design @ coefficients)).astype(float)

    design = np.ascontiguousarray(design, dtype=dtype)
    response = response.astype(dtype)
    mode, curvature, row_covariance = find_mode(design, response, PRIOR_SD)
    posterior_sd = np.sqrt(np.diag(np.linalg.inv(curvature)))
    signs = np.where(np.arange(features) % 2, -1.0, 1.0)
    return Problem(
        design=design,
        response=response,
        prior_sd=PRIOR_SD,
        mode=mode,
        start=mode + START_OFFSET * signs * posterior_sd,
        curvature=curvature,
        row_covariance=row_covariance,
    )


def find_mode(
    design: np.ndarray, response: np.ndarray, prior_sd: float, iterations: int = 50
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Newton's method for the posterior mode.

    Returns
    -------
    mode : ndarray of shape (features,)
    curvature : ndarray of shape (features, features)
        Minus the Hessian of the log posterior there.
    row_covariance : ndarray of shape (features, features)
        Covariance over rows of the gradient of one row there.
    """
    rows, features = design.shape
    precision = np.eye(features) / prior_sd**2
    position = np.zeros(features)
    for _ in range(iterations):
        gradient = -precision @ position
        curvature = precision.copy()
        squares = np.zeros((features, features))
        # In chunks and in float64 whatever the data's type: the mode must not carry the rounding
        # of a sum over all rows, and a weighted copy of all rows would double the memory.
        for part, target in _chunks(design, response):
            probability = sigmoid(part @ position)
            residual = target - probability
            gradient += part.T @ residual
            curvature += (part * (probability * (1 - probability))[:, None]).T @ part
            squares += (part * (residual**2)[:, None]).T @ part
        step = np.linalg.solve(curvature, gradient)
        # The Newton decrement is the squared distance to the mode in posterior deviations.
        if step @ gradient < 1e-16 * features:
            mean_gradient = (gradient + precision @ position) / rows
            return position, curvature, squares / rows - np.outer(mean_gradient, mean_gradient)
        position = position + step
    raise RuntimeError(f"Newton's method did not find the mode in {iterations} iterations")


def full_gradient(problem: Problem, position: np.ndarray) -> np.ndarray:
    """Gradient of the log posterior over all rows, in float64, shape (features,)."""
    gradient = -position / problem.prior_sd**2
    for part, target in _chunks(problem.design, problem.response):
        gradient = gradient + part.T @ (target - sigmoid(part @ position))
    return gradient


def step_size(problem: Problem, batch: int) -> float:
    """Step size h at which SGLD's gradient noise inflates the variance by a stated share.

    ``h = 4 delta / lambda_max(V)`` with ``V = (N^2 / n) C`` the covariance of the stochastic
    gradient. It is used for SGLD and SGLD-CV alike.
    """
    noise = problem.rows**2 / batch * np.linalg.eigvalsh(problem.row_covariance)[-1]
    return float(4 * GRADIENT_NOISE_INFLATION / noise)


def save_problem(problem: Problem, folder: Path | str) -> None:
    """Write a problem where :func:`load_problem` reads it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("design", "response", "mode", "start", "curvature", "row_covariance"):
        np.save(folder / f"{name}.npy", getattr(problem, name))
    (folder / "prior.json").write_text(json.dumps({"prior_sd": problem.prior_sd}))


def load_problem(folder: Path | str) -> Problem:
    """Read a problem written by :func:`save_problem`; the design is mapped, not read."""
    folder = Path(folder)
    arrays = {
        name: np.load(folder / f"{name}.npy")
        for name in ("response", "mode", "start", "curvature", "row_covariance")
    }
    # Several workers hold the same design at once: they share the pages of one file.
    design = np.load(folder / "design.npy", mmap_mode="r")
    prior_sd = json.loads((folder / "prior.json").read_text())["prior_sd"]
    return Problem(design=design, prior_sd=prior_sd, **arrays)


def sigmoid(value: np.ndarray) -> np.ndarray:
    """Logistic function, without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * value))


def _chunks(design: np.ndarray, response: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for first in range(0, len(design), _CHUNK_ROWS):
        part = slice(first, first + _CHUNK_ROWS)
        yield design[part].astype(float), response[part].astype(float)
