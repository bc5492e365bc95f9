"""The contenders and the reference, each a function of a model's name and its number of rows.

A contender returns a dictionary with ``mean``, ``sd``, ``q05`` and ``q95`` of the unconstrained
position, and what else is worth a column. Peers that need JAX import it themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import scipy.optimize
from common.clocks import process_clocks
from common.skewed import INTEGRATED, build
from scipy import stats

DRAWS = 4000
QUANTILES = (0.05, 0.95)
MOST_TRANSITIONS = 500_000
"""Of blackjax's SGLD-CV, which then makes fewer draws."""
ELBO_DRAWS = 10
"""Of each approximation on Pathfinder's path. The default, 200, takes a minute for 10⁵ rows."""
DEGREES = 10
"""Of the multivariate t distribution of the reference: its tails are heavier than a posterior's."""
REPLICATES = 8


class Approximation(NamedTuple):
    """Laplace's approximation: mode, square root of the covariance, and the log density."""

    mode: np.ndarray
    root: np.ndarray
    log_density: Callable[[np.ndarray], float]


def approximate(model: pm.Model) -> Approximation:
    """Find the mode by BFGS and Newton's method, and the curvature there."""
    point = model.initial_point()
    start = pm.blocking.DictToArrayBijection.map(point)
    inputs = pm.pytensorf.join_nonshared_inputs
    value, slopes = model.logp(), model.dlogp()
    (value, slopes), joined = inputs(point, [value, slopes], model.value_vars)
    density = pm.pytensorf.compile([joined], value, mode="NUMBA")
    both = pm.pytensorf.compile([joined], [-value, -slopes], mode="NUMBA")
    found = scipy.optimize.minimize(lambda x: tuple(map(np.asarray, both(x))), start.data, jac=True)
    mode, sd = found.x, np.sqrt(np.diag(found.hess_inv))
    for _ in range(4):
        steps = np.diag(1e-3 * sd)
        columns = [(both(mode + h)[1] - both(mode - h)[1]) / (2 * h.sum()) for h in steps]
        covariance = np.linalg.inv((np.array(columns) + np.array(columns).T) / 2)
        mode, sd = mode - covariance @ both(mode)[1], np.sqrt(np.diag(covariance))
    return Approximation(mode, np.linalg.cholesky(covariance), density)


def weighted(positions: np.ndarray, weights: np.ndarray) -> dict[str, Any]:
    """Moments and quantiles of weighted positions, shapes (draws, d) and (draws,)."""
    weights = weights / weights.sum()
    mean = weights @ positions
    quantiles = np.empty((2, positions.shape[1]))
    for j, values in enumerate(positions.T):
        order = np.argsort(values)
        levels = np.cumsum(weights[order]) - weights[order] / 2
        quantiles[:, j] = np.interp(QUANTILES, levels, values[order])
    sd = np.sqrt(weights @ (positions - mean) ** 2)
    return {"mean": mean, "sd": sd, "q05": quantiles[0], "q95": quantiles[1]}


def of_draws(positions: np.ndarray) -> dict[str, Any]:
    """Moments and quantiles of draws of equal weight."""
    return weighted(positions, np.ones(len(positions)))


def smoothed(log_weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Pareto smoothed weights, and the estimate of the shape k."""
    from arviz_stats.base import array_stats

    # It is made for leave-one-out weights, the inverse of likelihoods.
    log_weights, k = array_stats.psislw(-log_weights)
    return np.exp(log_weights), float(k)


def laplace(name: str, rows: int) -> dict[str, Any]:
    """The normal distribution at the mode, exactly."""
    mode, root, _ = approximate(build(name, rows))
    sd = np.sqrt((root**2).sum(1))
    q05, q95 = (mode + stats.norm.ppf(level) * sd for level in QUANTILES)
    return {"mean": mode, "sd": sd, "q05": q05, "q95": q95}


def psis(name: str, rows: int) -> dict[str, Any]:
    """Draws of Laplace's approximation with Pareto smoothed importance weights."""
    mode, root, log_density = approximate(build(name, rows))
    normal = np.random.default_rng(1).normal(size=(DRAWS, len(mode)))
    positions = mode + normal @ root.T
    log_weights = np.array([log_density(one) for one in positions]) + (normal**2).sum(1) / 2
    weights, k = smoothed(log_weights)
    return {**weighted(positions, weights), "k": k}


def _ours(name: str, rows: int, draws: int) -> dict[str, Any]:
    from pymc_sgmcmc import sample

    with build(name, rows, integrated=False):
        idata = sample(draws, chains=4, cores=1, random_seed=1, progressbar=False)
    positions = idata["sample_stats"]["position"].values
    return of_draws(positions.reshape(-1, positions.shape[-1]))


def ours(name: str, rows: int) -> dict[str, Any]:
    """This package without settings."""
    return _ours(name, rows, 1000)


def ours_long(name: str, rows: int) -> dict[str, Any]:
    """The same, with ten times as many draws."""
    return _ours(name, rows, 10_000)


class InJax(NamedTuple):
    """A model in JAX."""

    log_prior: Callable[..., Any]
    log_likelihood: Callable[..., Any]
    data: tuple[Any, ...]
    start: np.ndarray


def in_jax(model: pm.Model) -> InJax:
    """Log prior of a position, and log likelihoods of rows."""
    import jax
    from pymc.sampling.jax import get_jaxified_graph
    from pytensor.graph.replace import clone_replace

    jax.config.update("jax_enable_x64", True)
    point = model.initial_point()
    graphs = [
        model.logp(model.free_RVs),
        model.logp(model.observed_RVs, sum=False)[0],
    ]
    graphs, position = pm.pytensorf.join_nonshared_inputs(point, graphs, model.value_vars)
    data = [model["X"], model["y"]]
    inputs = [variable.type() for variable in data]
    prior, likelihood = clone_replace(graphs, dict(zip(data, inputs, strict=True)))
    log_prior = get_jaxified_graph([position], [prior])
    log_likelihood = get_jaxified_graph([position, *inputs], [likelihood])
    return InJax(
        lambda theta: log_prior(theta)[0],
        lambda theta, *rows: log_likelihood(theta, *rows)[0],
        tuple(jax.numpy.asarray(variable.get_value()) for variable in data),
        pm.blocking.DictToArrayBijection.map(point).data,
    )


def pathfinder(name: str, rows: int) -> dict[str, Any]:
    """Pathfinder of blackjax, on all rows."""
    import jax
    from blackjax.vi import pathfinder as algorithm

    model = in_jax(build(name, rows))

    @jax.jit
    def fit(key: Any, start: Any, *data: Any) -> Any:
        def log_density(theta: Any) -> Any:
            return model.log_prior(theta) + model.log_likelihood(theta, *data).sum()

        return algorithm.approximate(key, log_density, start, num_samples=ELBO_DRAWS)[0]

    state = fit(jax.random.key(1), jax.numpy.asarray(model.start), *model.data)
    return of_draws(np.asarray(algorithm.sample(jax.random.key(2), state, DRAWS)[0]))


def sgld_cv(name: str, rows: int, batch: int) -> dict[str, Any]:
    """SGLD-CV of blackjax from the mode, its steps a tenth of the stiffest direction's time."""
    import blackjax
    import jax
    from blackjax.sgmcmc import gradients

    model = in_jax(build(name, rows))
    # The mode and the curvature are those that a user finds; their time counts.
    mode, root, _ = approximate(build(name, rows))
    variances = np.linalg.eigvalsh(root @ root.T)
    step_size, thin = 0.1 * variances[0], int(np.ceil(10 * variances[-1] / variances[0]))
    estimator = gradients.control_variates(
        gradients.grad_estimator(
            model.log_prior,
            lambda theta, row: model.log_likelihood(theta, *(part[None] for part in row)).sum(),
            rows,
        ),
        jax.numpy.asarray(mode),
        model.data,
    )
    sampler = blackjax.sgld(estimator)

    @jax.jit
    def chain(key: Any, start: Any, *data: Any) -> Any:
        def transition(theta: Any, key: Any) -> tuple[Any, None]:
            key_rows, key_noise = jax.random.split(key)
            numbers = jax.random.randint(key_rows, (batch,), 0, rows)
            minibatch = tuple(part[numbers] for part in data)
            return sampler.step(key_noise, theta, minibatch, step_size), None

        def draw(theta: Any, key: Any) -> tuple[Any, Any]:
            theta = jax.lax.scan(transition, theta, jax.random.split(key, thin))[0]
            return theta, theta

        draws = min(DRAWS, MOST_TRANSITIONS // thin)
        return jax.lax.scan(draw, start, jax.random.split(key, draws))[1]

    positions = np.asarray(chain(jax.random.key(1), jax.numpy.asarray(mode), *model.data))
    return {**of_draws(positions), "batch": batch}


def reference(name: str, rows: int, draws: int) -> dict[str, Any]:
    """Importance sampling from a t distribution, by randomised quasi-Monte Carlo.

    The distribution is that of Laplace's approximation for the first few draws, and has the mean
    and covariance which these find for all others. The standard errors are those of the
    replicates, in posterior standard deviations.
    """
    center, root, log_density = approximate(build(name, rows))
    d = len(center)
    for size in (draws // REPLICATES**2, draws // REPLICATES):
        parts, log_parts = [], []
        for replicate in range(REPLICATES):
            sobol = stats.qmc.Sobol(d + 1, rng=np.random.default_rng(replicate))
            uniforms = sobol.random(size).clip(1e-12, 1 - 1e-12)
            scale = np.sqrt(DEGREES / stats.chi2.ppf(uniforms[:, d], DEGREES))
            shift = stats.norm.ppf(uniforms[:, :d]) * scale[:, None]
            positions = center + shift @ root.T
            log_proposal = stats.multivariate_t.logpdf(shift, df=DEGREES, shape=np.eye(d))
            parts.append(positions)
            log_parts.append(np.array([log_density(one) for one in positions]) - log_proposal)
        log_weights = np.array(log_parts)
        weights = np.exp(log_weights - log_weights.max())
        together = np.concatenate(parts)
        whole = weighted(together, weights.ravel())
        center, covariance = whole["mean"], np.cov(together.T, aweights=weights.ravel())
        root = np.linalg.cholesky(covariance)
    each = [weighted(part, weight) for part, weight in zip(parts, weights, strict=True)]
    error = max(
        float((np.std([one[key] for one in each], axis=0, ddof=1) / whole["sd"]).max())
        for key in ("mean", "sd", "q05", "q95")
    )
    return {**whole, "k": smoothed(log_weights.ravel())[1], "error": error / REPLICATES**0.5}


def nuts(name: str, rows: int, draws: int) -> dict[str, Any]:
    """NUTS of nutpie, with the effects of groups beside the other variables."""
    import nutpie

    idata = nutpie.sample(
        nutpie.compile_pymc_model(build(name, rows, integrated=False)), draws=draws // 4, chains=4,
        cores=1, seed=1, progress_bar=False, store_unconstrained=name not in INTEGRATED,
    )  # fmt: skip
    if name in INTEGRATED:
        values = idata.posterior
        logarithm = np.log(values["sd"].values)[..., None]
        positions = np.concatenate([logarithm, values["coefficients"].values], axis=-1)
    else:
        positions = idata.sample_stats["unconstrained_draw"].values
    return of_draws(positions.reshape(-1, positions.shape[-1]))


def measure(contender: str, name: str, rows: int, **settings: Any) -> dict[str, Any]:
    """What a contender finds, and its processor seconds, as JSON allows."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    began = process_clocks()[1]
    found = globals()[contender](name, rows, **settings)
    seconds = process_clocks()[1] - began
    plain = {key: np.asarray(value).tolist() for key, value in found.items()}
    return {**plain, "seconds": seconds}
