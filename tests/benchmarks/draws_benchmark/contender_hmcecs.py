"""NumPyro: HMC with energy conserving subsampling, its proxy expanded where BFGS finds the mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from common.jax_regression import Regression
from common.problem import Problem
from numpyro.infer import HMCECS, MCMC, NUTS

from draws_benchmark import DRAWS

PACKAGES = ("numpyro", "jax", "jaxlib", "numpy")
BATCH, BLOCKS = 500, 10


def sample(problem: Problem, mark: Callable[[], None]) -> np.ndarray:
    """Find the mode, tune and sample."""
    regression = Regression(problem)

    def model(covariates: Any, response: Any) -> None:
        prior = dist.Normal(0.0, problem.prior_sd).expand([problem.features]).to_event(1)
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
