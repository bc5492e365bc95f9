"""Stochastic gradient Langevin chains in NumPy, many at a time, as traces of `pymc.sample`.

They do not use the code of the package, so a test of the tools on them does not compare the package
with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import xarray as xr
from scipy.linalg import solve_discrete_lyapunov
from scipy.stats import chi2, norm, qmc

Gradient = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""A function that estimates the gradient of the log posterior at positions, (chains, d)."""


def langevin(
    gradient: Gradient,
    start: np.ndarray,
    draws: int,
    step_size: float,
    preconditioner: np.ndarray,
    seed: int,
    *,
    burn_in: int = 0,
    thin: int = 1,
    injected: float = 1.0,
    averaged: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Positions and the gradients there of every `thin`-th transition, (chains, draws, d) each.

    Where noises are averaged, the half of the first one is added to the start.
    """
    rng = np.random.default_rng(seed)
    root = np.linalg.cholesky(preconditioner)
    theta, before = np.array(start, dtype=float), 0.0
    share = injected * step_size**0.5 * (0.5 if averaged else 1.0)
    if averaged:
        before = share * rng.normal(size=theta.shape) @ root.T
        theta = theta + before
    positions = np.empty((len(theta), draws, theta.shape[1]))
    gradients = np.empty_like(positions)
    for number in range(burn_in + thin * draws):
        g = gradient(theta, rng)
        kept, left = divmod(number - burn_in, thin)
        if kept >= 0 and left == 0:
            positions[:, kept], gradients[:, kept] = theta, g
        noise = share * rng.normal(size=theta.shape) @ root.T
        theta = theta + step_size / 2 * g @ preconditioner + before + noise
        if averaged:
            before = noise
    return positions, gradients


def as_trace(
    positions: np.ndarray,
    gradients: np.ndarray,
    step_size: float | None = None,
    preconditioner: np.ndarray | None = None,
    **settings,
) -> xr.DataTree:
    """Trace with a variable `theta`, and with settings of Langevin dynamics if a step is given."""
    chains, draws, d = positions.shape
    coords = {"chain": np.arange(chains), "draw": np.arange(draws)}
    dims = ("chain", "draw", "unconstrained_position")
    labels = [f"theta[{number}]" for number in range(d)]
    stats = xr.Dataset(
        {"position": (dims, positions), "gradient": (dims, gradients)},
        coords={**coords, dims[2]: labels},
    )
    posterior = xr.Dataset(
        {"theta": (("chain", "draw", "coordinate"), positions)},
        coords={**coords, "coordinate": np.arange(d)},
    )
    groups = {"posterior": posterior, "sample_stats": stats}
    if step_size is not None:
        stats["step_size"] = (("chain", "draw"), np.full((chains, draws), step_size))
        settings = {"sampler": "SGLD", "law": "euler", "thin": 1, **settings}
        other = f"{dims[2]}_of_column"
        groups["sgmcmc_settings"] = xr.Dataset(
            {"preconditioner": ((*dims[2:], other), preconditioner)},
            coords={dims[2]: labels, other: labels},
        )
    stats.attrs = {f"sgmcmc_{name}": value for name, value in settings.items()}
    return xr.DataTree.from_dict(groups)


@dataclass(frozen=True)
class Gaussian:
    """Normal target whose gradient has independent normal noise of constant covariance V."""

    precision: np.ndarray
    noise: np.ndarray
    mean: np.ndarray = field(default=None)  # type: ignore[assignment]

    def autocovariances(
        self,
        lags: int,
        step_size: float,
        preconditioner: np.ndarray,
        *,
        thin: int = 1,
        averaged: bool = False,
    ) -> np.ndarray:
        """Exact covariances of position and gradient with those of lag 0, 1, ... draws before.

        The chain of position, injected noise and gradient noise is Markov. The result has the shape
        (lags, 2d, 2d).
        """
        M, h, d = preconditioner, step_size, len(self.precision)
        one, zero = np.eye(d), np.zeros((d, d))
        transition = np.zeros((3 * d, 3 * d))
        transition[:d] = np.hstack([one - h / 2 * M @ self.precision, averaged * one, h / 2 * M])
        injected = h * M / (4 if averaged else 1)
        driven = np.block([[injected, injected, zero]] * 2 + [[zero, zero, self.noise]])
        law = solve_discrete_lyapunov(transition, driven)
        seen = np.block([[one, zero, zero], [-self.precision, zero, one]])
        of_draw, covariances = np.linalg.matrix_power(transition, thin), []
        for _ in range(lags):
            covariances.append(seen @ law @ seen.T)
            law = of_draw @ law
        return np.array(covariances)

    def covariance(
        self, step_size: float, preconditioner: np.ndarray, *, averaged: bool = False
    ) -> np.ndarray:
        """Exact stationary covariance of Langevin dynamics."""
        d = len(self.precision)
        return self.autocovariances(1, step_size, preconditioner, averaged=averaged)[0, :d, :d]

    def chains(
        self, count: int, draws: int, step_size: float, preconditioner: np.ndarray, seed: int, *,
        averaged: bool = False, **kw,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Chains that start at their stationary law."""
        d = len(self.precision)
        mean = np.zeros(d) if self.mean is None else self.mean
        noise_root = np.linalg.cholesky(self.noise) if self.noise.any() else self.noise
        rng = np.random.default_rng(seed + 1)
        law = self.covariance(step_size, preconditioner, averaged=averaged)
        if averaged:
            law = law - step_size / 4 * preconditioner  # given the first noise
        start = mean + rng.normal(size=(count, d)) @ np.linalg.cholesky(law).T

        def gradient(theta, rng):
            noise = rng.normal(size=theta.shape) @ noise_root.T
            return (mean - theta) @ self.precision + noise

        kw = {"averaged": averaged, **kw}
        return langevin(gradient, start, draws, step_size, preconditioner, seed, **kw)


@dataclass(frozen=True)
class Logistic:
    """Logistic regression with normal priors of standard deviation 10."""

    X: np.ndarray
    y: np.ndarray
    prior_sd: float = 10.0

    @classmethod
    def simulate(cls, n_rows: int, coefficients, seed: int) -> Logistic:
        """Intercept, and correlated normal predictors."""
        rng = np.random.default_rng(seed)
        d = len(coefficients)
        mixing = np.eye(d - 1) + 0.3 * np.tril(rng.normal(size=(d - 1, d - 1)), -1)
        X = np.column_stack([np.ones(n_rows), rng.normal(size=(n_rows, d - 1)) @ mixing.T])
        return cls(X, (rng.random(n_rows) < 1 / (1 + np.exp(-X @ coefficients))).astype(float))

    @property
    def mode(self) -> np.ndarray:
        """Mode of the posterior, by Newton's method."""
        beta = np.zeros(self.X.shape[1])
        for _ in range(30):
            beta = beta + np.linalg.solve(self.precision(beta), self.gradient(beta))
        return beta

    def gradient(self, beta: np.ndarray) -> np.ndarray:
        """Gradient of the log posterior of all rows."""
        p = 1 / (1 + np.exp(-self.X @ beta))
        return self.X.T @ (self.y - p) - beta / self.prior_sd**2

    def precision(self, beta: np.ndarray) -> np.ndarray:
        """Curvature H."""
        p = 1 / (1 + np.exp(-self.X @ beta))
        return (self.X.T * (p * (1 - p))) @ self.X + np.eye(len(beta)) / self.prior_sd**2

    def estimate(self, batch_size: int, center: np.ndarray | None) -> Gradient:
        """Plain gradient of rows with replacement, or with a control variate at a centre."""
        n_rows, scale = len(self.y), len(self.y) / batch_size
        full = None if center is None else self.gradient(center)

        def gradient(theta, rng):
            rows = rng.integers(n_rows, size=(len(theta), batch_size))
            X, y = self.X[rows], self.y[rows]
            weights = y - 1 / (1 + np.exp(-(X @ theta[..., None])[..., 0]))
            prior = -theta / self.prior_sd**2
            if center is not None:
                weights -= y - 1 / (1 + np.exp(-(X @ center)))
                prior = prior + full + center / self.prior_sd**2
            return prior + scale * (weights[:, None] @ X)[:, 0]

        return gradient

    def standard_deviations(self, points: int = 8192) -> np.ndarray:
        """Posterior standard deviations, by quasi-random importance sampling from a Student t."""
        center = self.mode
        root = np.linalg.cholesky(np.linalg.inv(self.precision(center)))
        d, degrees = len(center), 8
        uniform = qmc.Sobol(d + 1, seed=1).random(points)
        normal = norm.ppf(uniform[:, :d])
        u = normal / np.sqrt(chi2.ppf(uniform[:, d:], degrees) / degrees)
        beta = center + u @ root.T
        log_density = -0.5 * (beta**2).sum(1) / self.prior_sd**2
        for start in range(0, len(beta), 512):
            linear = self.X @ beta[start : start + 512].T
            log_density[start : start + 512] += self.y @ linear - np.logaddexp(0, linear).sum(0)
        log_proposal = -0.5 * (degrees + d) * np.log1p((u**2).sum(1) / degrees)
        weights = np.exp(log_density - log_density.max() - log_proposal + log_proposal.max())
        weights /= weights.sum()
        mean = weights @ beta
        return np.sqrt(weights @ (beta - mean) ** 2)

    def chains(
        self, count: int, draws: int, step_size: float, batch_size: int, seed: int, *, cv: bool,
        burn_in: int, **kw,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
        """Positions, gradients and the preconditioner, the inverse curvature at the mode."""
        mode = self.mode
        M = np.linalg.inv(self.precision(mode))
        rng = np.random.default_rng(seed + 1)
        start = mode + rng.normal(size=(count, len(mode))) @ np.linalg.cholesky(M).T
        estimate = self.estimate(batch_size, mode if cv else None)
        trace = langevin(estimate, start, draws, step_size, M, seed, burn_in=burn_in, **kw)
        return *trace, M
