"""The contenders of ``effective_draws.py``: what a user's program does with the data.

A contender is a function of a problem and ``mark``, which returns the draws, shape (draws, p). It
calls ``mark()`` when set-up and tuning are done and, if there is work after the last draw,
``mark(True)`` before it; the last call of each counts. Of the problem it may use the data and the
prior, and the curvature for a step size tuned by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from common.clocks import process_clocks
from common.regression import PRIOR_SD, InJax, Problem, build_model, load_problem

DRAWS = 10_000
"""Draws of samplers whose draws take little time: the standard deviation of a coordinate, from some
thousand effective draws, then has a Monte Carlo error of about one per cent."""
LONG = 50_000
"""Draws of this package, so that what is measured is not the cost of a call."""
NUTS_DRAWS = 4000
"""Fewer than of others, for they take longer."""
BATCH = 500
BLOCKS = 10
"""Of HMC with energy conserving subsampling."""
ELBO_DRAWS = 10
"""Of each approximation on Pathfinder's path. The default, 200, needs 200 N numbers in memory."""
QUIET = {"chains": 1, "cores": 1, "random_seed": 1, "progressbar": False}
TUNED_BATCH, STEP_FACTOR, THIN = 20, 0.1, 20
"""Of SGLD-CV of libraries that compute no settings. Of batches of 20, 50, 100 and 200 rows and step
sizes of 0.1, 0.2, 0.3 and 0.4 over the largest curvature, these gave blackjax the most effective
draws a second with all standard deviations within 5 %, for 10⁵ rows of 20 columns. The time of this
search is not counted."""
TUNED_BLOCK = 1000
"""Draws of one call: the first is the tuning, in which the chain is compiled."""

Mark = Callable[..., None]


def ours(problem: Problem, mark: Mark) -> np.ndarray:
    """``SGLDCV()`` without settings, one chain with the usual tuning."""
    import pymc as pm

    from pymc_sgmcmc import SGLDCV

    def watch(trace: Any, draw: Any) -> None:
        mark(not draw.tuning)

    with build_model(problem):
        idata = pm.sample(LONG, step=SGLDCV(), callback=watch, **QUIET)
    return idata.posterior["coefficients"].values[0]


def sample(problem: Problem, mark: Mark, **settings: Any) -> np.ndarray:
    """This package's `sample`. Tuning counts as drawing, and checks at the end do not."""
    import pymc_sgmcmc

    with build_model(problem):
        step = pymc_sgmcmc.SGLDCV(**settings)
        # A run with its checks, after which another one has only its draws to make.
        pymc_sgmcmc.sample(1000, step=step, **QUIET)
        mark()
        idata = pymc_sgmcmc.sample(LONG, step=step, compute_convergence_checks=False, **QUIET)
    return idata["posterior"]["coefficients"].values[0]


def corrected(problem: Problem, mark: Mark) -> np.ndarray:
    """``sample(accuracy=0.02)``: tuning and correction count as drawing."""
    import arviz  # noqa: F401, the tools behind every summary, which the first call imports

    import pymc_sgmcmc

    with build_model(problem):
        step = pymc_sgmcmc.SGLDCV()
        mark()
        idata = pymc_sgmcmc.sample(DRAWS, step=step, accuracy=0.02, **QUIET)
    return idata["posterior"]["coefficients"].values[0]


def euler(problem: Problem, mark: Mark, **settings: Any) -> np.ndarray:
    """SGLD-CV as its paper prints it, with control variates of first order."""
    return sample(problem, mark, gradient="cv", integrator="euler", **settings)


def euler_fine(problem: Problem, mark: Mark) -> np.ndarray:
    """The same with a fifth of the stated error, about that of the default of this package."""
    return euler(problem, mark, bias=0.01)


def blackjax(problem: Problem, mark: Mark, contender: str = "blackjax", finer: int = 1) -> Any:
    """SGLD-CV of ``transition_cost.py``, centred where BFGS finds the mode, tuned by hand.

    Steps are so many times finer than those tuned, with as many times as many of them a draw.
    """
    from dataclasses import replace

    import transition_contenders

    mode = InJax(problem).find_mode()
    step_size, thin = STEP_FACTOR / finer, THIN * finer
    step_size /= np.linalg.eigvalsh(problem.curvature)[-1]
    problem = replace(problem, mode=mode, start=mode)
    run = getattr(transition_contenders, contender)(problem, TUNED_BATCH, step_size)["sgld-cv"]
    run(0, TUNED_BLOCK * thin)
    mark()
    # Each block begins at the mode anew, and forgets it in one of its thousand draws.
    blocks = range(1, 1 + DRAWS // TUNED_BLOCK)
    return np.concatenate([run(seed, TUNED_BLOCK * thin)[thin - 1 :: thin] for seed in blocks])


def blackjax_fine(problem: Problem, mark: Mark) -> np.ndarray:
    """Steps so fine that the bias is about that of corrected draws of this package."""
    return blackjax(problem, mark, finer=8)


def sgmcmcjax(problem: Problem, mark: Mark) -> np.ndarray:
    """SGLD-CV of SGMCMCJax."""
    return blackjax(problem, mark, "sgmcmcjax")


def hmcecs(problem: Problem, mark: Mark) -> np.ndarray:
    """NumPyro: HMC with energy conserving subsampling, its proxy expanded at BFGS's mode."""
    import jax
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import HMCECS, MCMC, NUTS

    regression = InJax(problem)

    def model(covariates: Any, response: Any) -> None:
        prior = dist.Normal(0.0, PRIOR_SD).expand([problem.features]).to_event(1)
        coefficients = numpyro.sample("coefficients", prior)
        with numpyro.plate("rows", problem.rows, subsample_size=BATCH):
            part = numpyro.subsample(covariates, event_dim=1)
            outcome = numpyro.subsample(response, event_dim=0)
            numpyro.sample("outcome", dist.Bernoulli(logits=part @ coefficients), obs=outcome)

    mode = {"coefficients": jax.numpy.asarray(regression.find_mode())}
    kernel = HMCECS(NUTS(model), num_blocks=BLOCKS, proxy=HMCECS.taylor_proxy(mode))
    sampler = MCMC(kernel, num_warmup=1000, num_samples=DRAWS, progress_bar=False)
    sampler.warmup(jax.random.PRNGKey(1), *regression.data)
    jax.block_until_ready(sampler.post_warmup_state)
    mark()
    sampler.run(jax.random.PRNGKey(2), *regression.data)
    return np.asarray(sampler.get_samples()["coefficients"])


def nutpie(problem: Problem, mark: Mark) -> np.ndarray:
    """NUTS on all rows, with its default tuning; times are known to some ten milliseconds."""
    import nutpie

    compiled = nutpie.compile_pymc_model(build_model(problem))
    idata = nutpie.sample(
        compiled, draws=NUTS_DRAWS, chains=1, cores=1, seed=1, progress_bar=False,
        progress_callback=lambda chains: mark(not chains[0].tuning), progress_rate=10,
    )  # fmt: skip
    return idata.posterior["coefficients"].values[0]


def advi(problem: Problem, mark: Mark) -> np.ndarray:
    """PyMC's mean-field ADVI on minibatches, with default iterations and optimiser."""
    import pymc as pm

    with build_model(problem, BATCH):
        approximation = pm.fit(method="advi", random_seed=1, progressbar=False)
        mark()
        idata = approximation.sample(1000, random_seed=2)
    return idata.posterior["coefficients"].values[0]


def pathfinder(problem: Problem, mark: Mark) -> np.ndarray:
    """Pathfinder of blackjax from the prior mean, on all rows."""
    import jax
    from blackjax.vi import pathfinder as algorithm

    regression = InJax(problem)

    @jax.jit
    def fit(key: Any, start: Any, *data: Any) -> Any:
        def density(position: Any) -> Any:
            return regression.log_density(position, *data)

        return algorithm.approximate(key, density, start, num_samples=ELBO_DRAWS)[0]

    start = jax.numpy.zeros_like(regression.start)
    state = jax.block_until_ready(fit(jax.random.key(1), start, *regression.data))
    mark()
    return np.asarray(algorithm.sample(jax.random.key(2), state, 1000)[0])


def laplace(problem: Problem, mark: Mark, *, weighted: bool = False) -> np.ndarray:
    """Laplace's approximation where BFGS finds the mode; its draws are independent.

    Of draws with Pareto smoothed weights as many are drawn anew as their effective number.
    """
    import jax

    regression = InJax(problem)
    mode = jax.numpy.asarray(regression.find_mode())
    density = jax.jit(regression.log_density)
    curvature = -jax.jit(jax.hessian(regression.log_density))(mode, *regression.data)
    root = np.linalg.cholesky(np.linalg.inv(np.asarray(curvature)))
    density(mode, *regression.data).block_until_ready()
    mark()
    rng = np.random.default_rng(1)
    normal = rng.normal(size=(DRAWS, problem.features))
    draws = np.asarray(mode) + normal @ root.T
    if not weighted:
        return draws
    from arviz_stats.base import array_stats

    values = [density(jax.numpy.asarray(draw), *regression.data) for draw in draws]
    log_weights = np.array(values, float) + (normal**2).sum(1) / 2
    weights = np.exp(array_stats.psislw(-log_weights)[0])
    weights /= weights.sum()
    return draws[rng.choice(DRAWS, int(1 / (weights**2).sum()), p=weights)]


def psis(problem: Problem, mark: Mark) -> np.ndarray:
    """Laplace's approximation with Pareto smoothed importance weights, from all rows."""
    return laplace(problem, mark, weighted=True)


def measure(contender: str, folder: str, launched: float) -> dict[str, Any]:
    """Sample, write the draws beside the problem, and return the seconds by (wall, cpu) clocks."""
    from dataclasses import replace

    imported = np.array(process_clocks())
    # The data are in memory, as a user has them, before the clocks go on.
    problem = load_problem(folder)
    problem = replace(problem, design=np.array(problem.design))
    loaded = np.array(process_clocks())
    marks = {}

    def mark(last: bool = False) -> None:
        marks[last] = process_clocks()

    draws = globals()[contender](problem, mark)
    ended = np.array(process_clocks())
    drawing = np.array(marks.get(True, ended)) - marks[False]
    np.save(f"{folder}/draws.npy", np.asarray(draws, float))
    set_up = imported - (launched, 0.0) + ended - loaded - drawing
    return {"set_up": set_up.tolist(), "drawing": drawing.tolist()}
