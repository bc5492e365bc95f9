"""Bayesian logistic regression shared by most programs: data, PyMC model, engine, and JAX.

The program that times contenders generates the data once and writes them to a folder from which
every worker reads: contenders in environments with different NumPy versions then see the same
bytes. NumPy is the only requirement of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PRIOR_SD = 10.0
GRADIENT_NOISE_INFLATION = 0.5
"""Relative inflation of the variance by SGLD's gradient noise which sets the step size: large
enough for a wrong batch size or gradient scale to show in the increments of a chain."""
START_OFFSET = 6.0
"""Distance of the start from the mode, in posterior standard deviations of each coordinate."""
ARRAYS = ("design", "response", "mode", "start", "curvature", "row_covariance")
BLOCK_TRANSITIONS = 4000
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
    mode, start : ndarray of shape (features,)
        Posterior mode, and where every chain starts: some posterior standard deviations off the
        mode, so that a chain without drift is noticed.
    curvature : ndarray of shape (features, features)
        Minus the Hessian of the log posterior at the mode (H).
    row_covariance : ndarray of shape (features, features)
        Covariance over rows of the gradient of one row at the mode, divisor `rows` (C).
    """

    design: np.ndarray
    response: np.ndarray
    mode: np.ndarray
    start: np.ndarray
    curvature: np.ndarray
    row_covariance: np.ndarray

    rows = property(lambda self: self.design.shape[0])
    features = property(lambda self: self.design.shape[1])
    dtype = property(lambda self: self.design.dtype)
    sd = property(lambda self: np.sqrt(np.diag(np.linalg.inv(self.curvature))))
    """Standard deviations of the Laplace approximation."""

    def step_size(self, batch: int) -> float:
        """Step size h at which SGLD's gradient noise inflates the variance by a stated share.

        ``h = 4 delta / lambda_max(V)`` with ``V = (N^2 / n) C`` the covariance of the stochastic
        gradient. It is used for SGLD and SGLD-CV alike.
        """
        noise = self.rows**2 / batch * np.linalg.eigvalsh(self.row_covariance)[-1]
        return float(4 * GRADIENT_NOISE_INFLATION / noise)

    def full_gradient(self, position: np.ndarray) -> np.ndarray:
        """Gradient of the log posterior over all rows, in float64, shape (features,)."""
        gradient = -position / PRIOR_SD**2
        for part, target in _chunks(self.design, self.response):
            gradient = gradient + part.T @ (target - sigmoid(part @ position))
        return gradient


def make_problem(rows: int, features: int, dtype: str = "float64", seed: int = 20240229) -> Problem:
    """Generate a balanced logistic regression with a linear predictor of unit variance."""
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
    response = (rng.random(rows) < sigmoid(design @ coefficients)).astype(dtype)
    design = np.ascontiguousarray(design, dtype=dtype)
    mode, curvature, row_covariance = find_mode(lambda: _chunks(design, response), features)
    sd = np.sqrt(np.diag(np.linalg.inv(curvature)))
    start = mode + START_OFFSET * np.where(np.arange(features) % 2, -1.0, 1.0) * sd
    return Problem(design, response, mode, start, curvature, row_covariance)


def find_mode(
    parts: Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]], features: int, copies: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Newton's method for mode, curvature there, and the covariance of gradients of rows.

    In parts of the rows and in float64 whatever the data's type: the mode must not carry the
    rounding of a sum over all rows. Each row counts `copies` times.
    """
    precision = np.eye(features) / PRIOR_SD**2
    position = np.zeros(features)
    for _ in range(50):
        gradient, curvature = -precision @ position, precision.copy()
        squares, rows = np.zeros((features, features)), 0
        for part, target in parts():
            probability = sigmoid(part @ position)
            residual = target - probability
            gradient += copies * part.T @ residual
            curvature += copies * (part * (probability * (1 - probability))[:, None]).T @ part
            squares += (part * (residual**2)[:, None]).T @ part
            rows += len(part)
        step = np.linalg.solve(curvature, gradient)
        # The Newton decrement is the squared distance to the mode in posterior deviations.
        if step @ gradient < 1e-16 * features:
            mean = (gradient + precision @ position) / copies / rows
            return position, curvature, squares / rows - np.outer(mean, mean)
        position = position + step
    raise RuntimeError("Newton's method did not find the mode in 50 iterations")


def save_problem(problem: Problem, folder: Path | str) -> None:
    """Write a problem where :func:`load_problem` reads it."""
    for name in ARRAYS:
        np.save(Path(folder) / f"{name}.npy", getattr(problem, name))


def load_problem(folder: Path | str) -> Problem:
    """Read a problem written by :func:`save_problem`; the design is mapped, not read.

    Several workers hold the same design at once: they share the pages of one file.
    """
    mode = {"design": "r"}
    return Problem(*(np.load(f"{folder}/{name}.npy", mode.get(name)) for name in ARRAYS))


def sigmoid(value: np.ndarray) -> np.ndarray:
    """Logistic function, without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * value))


def _chunks(design: np.ndarray, response: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for first in range(0, len(design), _CHUNK_ROWS):
        part = slice(first, first + _CHUNK_ROWS)
        yield design[part].astype(float), response[part].astype(float)


# --- PyMC. It is imported inside: floatX and the number of threads must be set before ------------


def build_model(problem: Problem, batch: int | None = None) -> Any:
    """Write the regression as a user does: on the full arrays, or on ``pm.Minibatch``."""
    import pymc as pm
    import pytensor

    pytensor.config.floatX = problem.dtype.name
    design, response = np.ascontiguousarray(problem.design), problem.response
    with pm.Model() as model:
        size = {}
        if batch is not None:
            design, response = pm.Minibatch(design, response, batch_size=batch)
            size = {"total_size": problem.rows}
        coefficients = pm.Normal("coefficients", 0.0, sigma=PRIOR_SD, shape=problem.features)
        pm.Bernoulli("outcome", logit_p=design @ coefficients, observed=response, **size)
    return model


def make_step(model: Any, method: str, batch: int | None, **settings: Any) -> Any:
    """Step method of this package by the name of the method."""
    from pymc_sgmcmc import SGLD, SGLDCV

    return (SGLD if method == "sgld" else SGLDCV)(model=model, batch_size=batch, **settings)


def given_settings(problem: Problem, method: str, batch: int) -> dict[str, Any]:
    """Settings with which a step method computes nothing."""
    given = {"step_size": problem.step_size(batch), "preconditioner": "identity"}
    return given if method == "sgld" else given | {"center": problem.mode}


def engine_chain(
    step: Any,
    start: np.ndarray,
    step_size: float,
    length: int = BLOCK_TRANSITIONS,
    keep: bool = True,
) -> Callable[[int, int], np.ndarray]:
    """Chain of a step method's engine, without PyMC around it.

    Returns
    -------
    callable
        ``run(seed, transitions)`` draws noise and minibatches, calls compiled blocks of
        transitions as the step method does, and returns the position after each, of shape
        (transitions, features), or the last one where they are not kept.
    """
    block, batching = step.block, step.batching

    def run(seed: int, transitions: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        state = (start, *block.dynamics.initial_auxiliaries(start, rng))
        pending = batching.draw(rng, block.lag)
        blocks = []
        for first in range(0, transitions, length):
            count = min(length, transitions - first)
            indices = np.concatenate([pending, batching.draw(rng, count)])
            noise = block.draw_noise(rng, count)
            ran = block(state, indices, noise, np.full(count, step_size), reuse=True)
            state = (ran.positions[-1].copy(), *(values[-1].copy() for values in ran.auxiliaries))
            pending = indices[-block.lag :]
            if keep:
                blocks.append(ran.positions.copy())
        return np.concatenate(blocks or [state[0][None]])

    return run


# --- JAX -----------------------------------------------------------------------------------------


class InJax:
    """Data, start and mode as JAX arrays, and the log density that both libraries ask for."""

    def __init__(self, problem: Problem) -> None:
        import jax

        self.jax, self.numpy = jax, jax.numpy
        jax.config.update("jax_enable_x64", problem.dtype == np.float64)
        self.rows = problem.rows
        self.data = (self.numpy.asarray(problem.design), self.numpy.asarray(problem.response))
        self.start = self.numpy.asarray(problem.start, problem.dtype)
        self.mode = self.numpy.asarray(problem.mode, problem.dtype)

    def log_prior(self, position: Any) -> Any:
        """Log density of the prior, without its constant."""
        return -0.5 * self.numpy.sum(position**2) / PRIOR_SD**2

    def log_likelihood(self, position: Any, covariates: Any, response: Any) -> Any:
        """Log probability of the response of one row."""
        predictor = covariates @ position
        # Faster here than `jax.nn.softplus`, whose derivative guards against infinite arguments;
        # no predictor of this problem comes near the overflow of `exp`.
        return response * predictor - self.numpy.log1p(self.numpy.exp(predictor))

    def log_density(self, position: Any, covariates: Any, response: Any) -> Any:
        """Log density of the posterior. All rows are arguments, since constants of a compiled
        program are copied into it.
        """
        rows = self.jax.vmap(self.log_likelihood, (None, 0, 0))(position, covariates, response)
        return self.log_prior(position) + rows.sum()

    def find_mode(self) -> np.ndarray:
        """Search for the mode as a user without one does: BFGS on all rows, from the prior mean."""
        import scipy.optimize

        @self.jax.jit
        def value_and_slope(position: Any, covariates: Any, response: Any) -> Any:
            return self.jax.value_and_grad(
                lambda value: -self.log_density(value, covariates, response) / self.rows
            )(position)

        def values(position: np.ndarray) -> tuple[float, np.ndarray]:
            loss, slope = value_and_slope(position, *self.data)
            return float(loss), np.asarray(slope, float)

        origin = np.zeros(len(self.start))
        # A posterior sd from the mode this loss has a slope of some N^-1/2.
        options = {"gtol": 1e-3 / self.rows**0.5}
        return scipy.optimize.minimize(values, origin, jac=True, method="BFGS", options=options).x
