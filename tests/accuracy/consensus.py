"""Errors of consensus Monte Carlo on skewed posteriors, beside those of `SGLDCV` on all rows.

    python -m tests.accuracy.consensus [--parts S] [--rows N] [--draws D]

prints a table for logistic regressions with few events a shard. The shards are sampled by NUTS, so
that the errors are those of the combination. They are those of the intercept and the slope: of
means in posterior standard deviations, beside those that `consensus` states with the size of what
it leaves out, and of standard deviations, relative to them. The exact moments are sums over a grid.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pymc as pm
from scipy import special

from pymc_sgmcmc import consensus, sample
from pymc_sgmcmc.machines.consensus import AVERAGE, GAUSSIAN, NUTS, SEMIPARAMETRIC

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


def errors(idata, exact: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Errors of means, in standard deviations, and of standard deviations, relative."""
    draws, (mean, sd) = idata["posterior"]["beta"], exact
    axes = ("chain", "draw")
    return (draws.mean(axes).values - mean) / sd, draws.std(axes).values / sd - 1


class Kept:
    """An executor that runs shards here, and returns the same draws for each combination."""

    def __init__(self):
        self._futures: list[Future] = []
        self._next = 0

    def begin(self) -> None:
        """Begin with the first shard again."""
        self._next = 0

    def submit(self, function: Callable[[bytes], Any], task: bytes) -> Future:
        """The draws of a shard, made at the first call."""
        if self._next == len(self._futures):
            future: Future = Future()
            future.set_result(function(task))
            self._futures.append(future)
        self._next += 1
        return self._futures[self._next - 1]


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--draws", type=int, default=1000)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("pymc").setLevel(logging.ERROR)
    run = {"draws": arguments.draws, "tune": 500, "chains": 4, "random_seed": 2, "cores": 1}
    ways = (GAUSSIAN, AVERAGE, SEMIPARAMETRIC)
    print("| events a shard | combination | errors of means | stated | errors of sds |")
    print("| --- | --- | --- | --- | --- |")
    for events in EVENTS_A_SHARD:
        x, y = rare_events(arguments.rows, events * arguments.parts)
        model, exact = rare_event_model(x, y), exact_moments(x, y)
        shards = Kept()
        for way in ways:
            shards.begin()
            idata = consensus(
                model, arguments.parts, way, step=NUTS, client=shards, progressbar=False, **run
            )
            group = idata["consensus_shards"]
            stated = listed(group["mean_error"].values)
            if way == SEMIPARAMETRIC:
                stated = f"± {stated}"
            else:
                stated += f" ± {group.attrs['mean_error_second_order']:.2f}"
            report(events, f'`"{way}"`', stated, idata, exact)
        idata = sample(model=model, quiet=True, progressbar=False, **run)
        report(events, "`SGLDCV` on all rows", "", idata, exact)


def listed(values: np.ndarray) -> str:
    """Numbers in a cell."""
    return ", ".join(f"{value:.2f}" for value in values)


def report(events: int, name: str, stated: str, idata: Any, exact: tuple) -> None:
    """Print a row of the table."""
    of_means, of_sds = errors(idata, exact)
    print(f"| {events} | {name} | {listed(of_means)} | {stated} | {listed(of_sds)} |", flush=True)


if __name__ == "__main__":
    main()
