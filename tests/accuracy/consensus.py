"""Errors of consensus Monte Carlo on skewed posteriors, beside those of `SGLDCV` on all rows.

    python -m tests.accuracy.consensus [--parts S] [--rows N] [--draws D]

prints a table for logistic regressions with few events a shard. The shards are sampled by NUTS, so
that the errors are those of the combination. Errors are the largest of the two coefficients: of the
mean in posterior standard deviations, beside the one that `consensus` states, and of the standard
deviation, relative to it. The exact moments are sums over a grid.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings

import numpy as np
import pymc as pm
from scipy import special

from pymc_sgmcmc import consensus, sample
from pymc_sgmcmc.sampling.consensus import AVERAGE, GAUSSIAN, NUTS, SEMIPARAMETRIC

EVENTS_A_SHARD = (5, 20, 80, 320)
"""The events that are expected in a shard."""

PRIOR_SD = 5.0
"""The standard deviation of the prior of both coefficients."""


def rare_events(n_rows: int, events: float, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """A predictor, and outcomes of which so many are expected to be true."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n_rows)
    # The mean of exp(x) is exp(1/2), and events are rare.
    odds = events / n_rows * np.exp(x - 0.5)
    return x, rng.random(n_rows) < odds / (1 + odds)


def rare_event_model(x: np.ndarray, y: np.ndarray) -> pm.Model:
    """Logistic regression with an intercept and a slope."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, PRIOR_SD, shape=2)
        pm.Bernoulli("y", logit_p=beta[0] + beta[1] * x, observed=y)
    return model


def exact_moments(x: np.ndarray, y: np.ndarray, points: int = 81) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of both coefficients, by a grid of seven standard deviations."""
    X = np.column_stack([np.ones(len(x)), x])
    mode = np.zeros(2)
    mode[0] = special.logit(y.mean())
    for _ in range(50):  # Newton's method
        p = special.expit(X @ mode)
        H = (X * (p * (1 - p))[:, None]).T @ X + np.eye(2) / PRIOR_SD**2
        mode += np.linalg.solve(H, X.T @ (y - p) - mode / PRIOR_SD**2)
    L = np.linalg.cholesky(np.linalg.inv(H))
    axis = np.linspace(-7, 7, points)
    grid = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2) @ L.T + mode
    total = X.T @ y
    log_density = np.array(
        [
            beta @ total - np.logaddexp(0, X @ beta).sum() - beta @ beta / (2 * PRIOR_SD**2)
            for beta in grid
        ]
    )
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = weights @ grid
    return mean, np.sqrt(weights @ (grid - mean) ** 2)


def errors(idata, exact: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    """Largest errors of means, in standard deviations, and of standard deviations, relative."""
    draws, (mean, sd) = idata["posterior"]["beta"], exact
    axes = ("chain", "draw")
    of_mean = (draws.mean(axes).values - mean) / sd
    of_sd = draws.std(axes).values / sd - 1
    return max(of_mean, key=abs), max(of_sd, key=abs)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--draws", type=int, default=1000)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("pymc").setLevel(logging.ERROR)
    run = {"draws": arguments.draws, "tune": 1000, "chains": 4, "random_seed": 2, "cores": 1}
    print("| events a shard | method | error of mean | stated | error of sd | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for events in EVENTS_A_SHARD:
        x, y = rare_events(arguments.rows, events * arguments.parts)
        model, exact = rare_event_model(x, y), exact_moments(x, y)
        for way in (GAUSSIAN, AVERAGE, SEMIPARAMETRIC, "`SGLDCV`, all rows"):
            begin = time.perf_counter()
            if way in (GAUSSIAN, AVERAGE, SEMIPARAMETRIC):
                idata = consensus(model, arguments.parts, way, step=NUTS, progressbar=False, **run)
                stated = idata["consensus_shards"]["mean_error"].values
                told, name = f"{max(stated, key=abs):.2f}", f'`"{way}"`'
                told = f"± {told}" if way == SEMIPARAMETRIC else told
            else:
                idata = sample(model=model, quiet=True, progressbar=False, **run)
                told, name = "", way
            of_mean, of_sd = errors(idata, exact)
            seconds = time.perf_counter() - begin
            print(
                f"| {events} | {name} | {of_mean:.2f} | {told} | {of_sd:.2f} | {seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
