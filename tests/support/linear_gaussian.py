"""Exact laws of stochastic gradient chains on Gaussian linear regression.

With a known noise sd and a Gaussian prior the log posterior is quadratic, and each minibatch
gradient is affine in the position. The stationary mean and covariance of a chain then solve linear
equations. The tests compare a sampler with *its own* exact law, bias included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pymc as pm


@dataclass(frozen=True)
class LinearGaussian:
    """Rows x_i, y_i with y ~ N(x'b, noise_sd) and b ~ N(0, prior_sd)."""

    X: np.ndarray
    y: np.ndarray
    noise_sd: float = 1.0
    prior_sd: float = 3.0

    @classmethod
    def simulate(cls, n_rows: int, dimension: int, seed: int, **kwargs) -> LinearGaussian:
        """Correlated predictors, so that an error in off-diagonal entries shows."""
        rng = np.random.default_rng(seed)
        mixing = np.tril(rng.normal(size=(dimension, dimension)), -1) * 0.5 + np.eye(dimension)
        X = rng.normal(size=(n_rows, dimension)) @ mixing.T
        y = X @ rng.normal(size=dimension) + rng.normal(size=n_rows)
        return cls(X, y, **kwargs)

    @property
    def dimension(self) -> int:
        return self.X.shape[1]

    @property
    def n_rows(self) -> int:
        return len(self.y)

    @property
    def row_precisions(self) -> np.ndarray:
        """A_i = x_i x_i' / s^2, shape (N, d, d)."""
        return np.einsum("ni,nj->nij", self.X, self.X) / self.noise_sd**2

    @property
    def row_shifts(self) -> np.ndarray:
        """b_i = x_i y_i / s^2, shape (N, d): the gradient of row i is b_i - A_i b."""
        return self.X * self.y[:, None] / self.noise_sd**2

    @property
    def prior_precision(self) -> np.ndarray:
        return np.eye(self.dimension) / self.prior_sd**2

    @property
    def precision(self) -> np.ndarray:
        """H of the posterior."""
        return self.row_precisions.sum(0) + self.prior_precision

    @property
    def mean(self) -> np.ndarray:
        """Posterior mean."""
        return np.linalg.solve(self.precision, self.row_shifts.sum(0))

    def model(self, batch_size: int | None = None) -> pm.Model:
        """The PyMC model, on minibatches where a batch size is given."""
        with pm.Model() as model:
            beta = pm.Normal("beta", 0.0, self.prior_sd, shape=self.dimension)
            if batch_size is None:
                pm.Normal("y", self.X @ beta, self.noise_sd, observed=self.y)
            else:
                X, y = pm.Minibatch(self.X, self.y, batch_size=batch_size)
                pm.Normal("y", X @ beta, self.noise_sd, observed=y, total_size=self.n_rows)
        return model


def affine_estimate(
    problem: LinearGaussian, rows: np.ndarray, center: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The vector a and the matrix B of a gradient estimate a - B b from the given rows.

    A control variate at `center` does not change B. It changes a, whose noise then comes from that
    of B.
    """
    scale = problem.n_rows / len(rows)
    sloped = scale * problem.row_precisions[rows].sum(0)
    shift = scale * problem.row_shifts[rows].sum(0)
    if center is not None:
        full = problem.row_shifts.sum(0) - problem.row_precisions.sum(0) @ center
        shift = full + sloped @ center
    return shift, sloped + problem.prior_precision


def sgld_covariance(
    problem: LinearGaussian,
    minibatches: Iterable[np.ndarray],
    step_size: float,
    center: np.ndarray | None = None,
    preconditioner: np.ndarray | None = None,
    integrator: str = "euler",
) -> np.ndarray:
    """Stationary covariance of SGLD by enumeration of equally likely minibatches.

    It solves L = mean_S[F_S L F_S'] + Q + h^2/4 mean_S[M r_S r_S' M] with F_S = I - h/2 M B_S and
    r_S the estimate at the posterior mean. The stationary mean is the posterior mean. The injected
    noise Q is hM, and h/4 (F M + M F') + h/2 M where noises are averaged, with F the mean of F_S.
    """
    d = problem.dimension
    M = np.eye(d) if preconditioner is None else preconditioner
    injected = injected_covariance(M, problem.precision, step_size, integrator)
    operator, source, count = np.zeros((d * d, d * d)), np.zeros((d, d)), 0
    for rows in minibatches:
        shift, slope = affine_estimate(problem, np.asarray(rows), center)
        F = np.eye(d) - step_size / 2 * M @ slope
        residual = M @ (shift - slope @ problem.mean)
        operator += np.kron(F, F)
        source += np.outer(residual, residual)
        count += 1
    operator /= count
    radius = np.abs(np.linalg.eigvals(operator)).max()
    assert radius < 1, f"the chain is unstable: spectral radius {radius}"
    constant = injected + step_size**2 / 4 * source / count
    return np.linalg.solve(np.eye(d * d) - operator, constant.ravel()).reshape(d, d)


def injected_covariance(
    M: np.ndarray, precision: np.ndarray, step_size: float, integrator: str
) -> np.ndarray:
    """What the injected noise adds to the covariance of a position in a transition."""
    if integrator == "euler":
        return step_size * M
    F = np.eye(len(M)) - step_size / 2 * M @ precision
    return step_size / 4 * (F @ M + M @ F.T) + step_size / 2 * M


def formula_covariance(
    problem: LinearGaussian,
    batch_size: int,
    variance_factor: float,
    step_size: float,
    center: np.ndarray | None = None,
    integrator: str = "euler",
) -> np.ndarray:
    """Stationary covariance of SGLD with M = I from the noise operator in closed form."""
    d, N = problem.dimension, problem.n_rows
    A = problem.row_precisions
    mean_A = A.mean(0)
    r = A @ problem.mean - problem.row_shifts if center is None else A @ (problem.mean - center)
    scale = N**2 * variance_factor / batch_size
    noise_operator = scale * (np.mean([np.kron(a, a) for a in A], axis=0) - np.kron(mean_A, mean_A))
    F = np.eye(d) - step_size / 2 * problem.precision
    operator = np.kron(F, F) + step_size**2 / 4 * noise_operator
    assert np.abs(np.linalg.eigvals(operator)).max() < 1
    constant = injected_covariance(np.eye(d), problem.precision, step_size, integrator)
    constant = constant + step_size**2 / 4 * scale * np.cov(r.T, bias=True)
    return np.linalg.solve(np.eye(d * d) - operator, constant.ravel()).reshape(d, d)


def all_subsets(n_rows: int, batch_size: int) -> list[np.ndarray]:
    """Every minibatch without replacement."""
    return [np.array(rows) for rows in combinations(range(n_rows), batch_size)]


def covariance_z_scores(draws: np.ndarray, mean: np.ndarray, covariance: np.ndarray):
    """Z scores of the sample mean and the sample covariance of independent Gaussian draws.

    Returns
    -------
    tuple of numpy.ndarray
        Shapes (d,) and (d, d).
    """
    count = len(draws)
    centred = draws - mean
    variances = np.diag(covariance)
    mean_z = centred.mean(0) / np.sqrt(variances / count)
    sample = centred.T @ centred / count
    standard_error = np.sqrt((np.outer(variances, variances) + covariance**2) / count)
    return mean_z, (sample - covariance) / standard_error


def conditioned(dimension: int, condition: float = 100.0) -> LinearGaussian:
    """A posterior whose curvatures are spaced in logarithm from 1 to the condition number."""
    rng = np.random.default_rng(dimension)
    n_rows = dimension + 10
    U, _ = np.linalg.qr(rng.normal(size=(n_rows, dimension)))
    W, _ = np.linalg.qr(rng.normal(size=(dimension, dimension)))
    curvatures = np.geomspace(condition, 1.0, dimension)
    X = U * np.sqrt(curvatures - 1 / 9) @ W.T
    return LinearGaussian(X, X @ rng.normal(size=dimension) + rng.normal(size=n_rows))


def gaussian_with_precision(dimension: int, condition: float = 100.0) -> LinearGaussian:
    """A linear regression whose posterior has eigenvalues from 1 to `condition`."""
    rng = np.random.default_rng(dimension)
    rotation, _ = np.linalg.qr(rng.normal(size=(dimension, dimension)))
    values = np.geomspace(1.0, condition, dimension) if dimension > 1 else np.array([condition])
    prior_sd = 4.0
    X = np.sqrt(values - prior_sd**-2)[:, None] * rotation.T
    # Each row twice, at half the weight: with one dimension there would be a single row.
    X = np.concatenate([X, X]) / np.sqrt(2)
    return LinearGaussian(X, rng.normal(size=len(X)), prior_sd=prior_sd)
