"""Models whose posteriors are skewed however many their rows are, since few of these inform.

Each function takes the number of rows and returns a model. Data that a minibatch divides are
``pm.Data``, so that they can become arguments of a compiled function.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pymc as pm
from scipy.special import expit

SLOPES = np.array([0.8, -0.5, 0.3])


def _design(rows: int, seed: int) -> tuple[np.random.Generator, np.ndarray]:
    """Random numbers, and an intercept beside covariates."""
    rng = np.random.default_rng(seed)
    return rng, np.column_stack([np.ones(rows), rng.normal(size=(rows, len(SLOPES)))])


def _regression(X: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
    """The linear predictor and the outcomes in the model at hand."""
    coefficients = pm.Normal("coefficients", 0, [10, 2, 2, 2], shape=X.shape[1])
    return pm.Data("X", X) @ coefficients, pm.Data("y", y)


def logistic(rows: int, events: int) -> pm.Model:
    """Logistic regression with exactly so many events, those with the largest latent values."""
    rng, X = _design(rows, 1)
    latent = X[:, 1:] @ SLOPES + rng.logistic(size=rows)
    y = (latent >= np.sort(latent)[-events]).astype("int32")
    with pm.Model() as model:
        predictor, outcomes = _regression(X, y)
        pm.Bernoulli("outcome", logit_p=predictor, observed=outcomes)
    return model


def poisson(rows: int) -> pm.Model:
    """Poisson regression with about 20 counts in all."""
    rng, X = _design(rows, 2)
    rate = np.exp(X[:, 1:] @ SLOPES)
    with pm.Model() as model:
        predictor, outcomes = _regression(X, rng.poisson(20 * rate / rate.sum()))
        pm.Poisson("outcome", pm.math.exp(predictor), observed=outcomes)
    return model


def negative_binomial(rows: int) -> pm.Model:
    """Counts that are rare and overdispersed, about 150 in all."""
    rng, X = _design(rows, 3)
    rate = np.exp(X[:, 1:] @ SLOPES)
    rate *= 150 / rate.sum()
    with pm.Model() as model:
        y = rng.poisson(rng.gamma(0.05, rate / 0.05))
        predictor, outcomes = _regression(X, y)
        dispersion = pm.LogNormal("dispersion", -2, 2)
        pm.NegativeBinomial(
            "outcome", mu=pm.math.exp(predictor), alpha=dispersion, observed=outcomes
        )
    return model


def ordered(rows: int) -> pm.Model:
    """Five ordered answers, the first with 10 rows and the last with 15."""
    rng, X = _design(rows, 4)
    latent = X[:, 1:] @ SLOPES + rng.logistic(size=rows)
    ranks = np.argsort(np.argsort(latent))
    y = np.searchsorted([10, rows // 3, 2 * rows // 3, rows - 15], ranks, side="right")
    with pm.Model() as model:
        slopes = pm.Normal("slopes", 0, 2, shape=3)
        cutpoints = pm.Normal(
            "cutpoints", 0, 10, shape=4, transform=pm.distributions.transforms.ordered,
            initval=np.log(np.bincount(y)[:-1].cumsum() / (rows - np.bincount(y)[:-1].cumsum())),
        )  # fmt: skip
        predictor = pm.Data("X", X[:, 1:]) @ slopes
        pm.OrderedLogistic(
            "outcome", eta=predictor, cutpoints=cutpoints, observed=pm.Data("y", y),
            compute_p=False,
        )  # fmt: skip
    return model


def gamma(rows: int) -> pm.Model:
    """Gamma regression with unknown shape: rows inform all coordinates."""
    rng, X = _design(rows, 5)
    y = rng.gamma(0.5, np.exp(X[:, 1:] @ SLOPES) / 0.5).clip(1e-12)
    with pm.Model() as model:
        predictor, outcomes = _regression(X, y)
        shape = pm.LogNormal("shape", 0, 2)
        pm.Gamma("outcome", alpha=shape, beta=shape / pm.math.exp(predictor), observed=outcomes)
    return model


def groups(rows: int) -> pm.Model:
    """Logistic intercepts of groups of ten rows each, which are integrated out."""
    rng, X = _design(rows, 6)
    group = np.repeat(np.arange(rows // 10), 10)
    effects = 0.7 * rng.normal(size=rows // 10)[group]
    y = (rng.random(rows) < expit(-2.5 + X[:, 1:] @ SLOPES + effects)).astype("int32")
    with pm.Model() as model:
        coefficients = pm.Normal("coefficients", 0, [10, 2, 2, 2], shape=X.shape[1])
        sd = pm.HalfNormal("sd", 1)
        z = pm.Normal("z", shape=rows // 10)
        pm.Bernoulli("outcome", logit_p=X @ coefficients + sd * z[group], observed=y)
    return model


MODELS = {
    "logistic, 12 events": partial(logistic, events=12),
    "logistic, 40 events": partial(logistic, events=40),
    "Poisson, 20 counts": poisson,
    "negative binomial, 150 counts": negative_binomial,
    "ordered, 10 and 15 at the ends": ordered,
    "gamma, shape unknown": gamma,
    "logistic, groups integrated out": groups,
}
INTEGRATED = ("logistic, groups integrated out",)
"""Models with the local variable ``z``."""


def build(name: str, rows: int, *, integrated: bool = True) -> pm.Model:
    """A model, its local variable integrated out where that is wanted."""
    model = MODELS[name](rows)
    if not integrated or name not in INTEGRATED:
        return model
    from pymc_sgmcmc.marginal import marginalize

    return marginalize(model, "z")
