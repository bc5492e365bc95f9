"""pymc_sgmcmc: the same regression as a PyMC model with ``pm.Minibatch``.

Blocks of transitions are called as the step methods call them, drawing of noise and minibatches
included, without `pymc.sample` around them.
"""

from __future__ import annotations

from typing import Any

from transition_benchmark.interface import METHODS, Prepared, Run, Settings, UnavailableError
from transition_benchmark.problem import Problem


def prepare(problem: Problem, settings: Settings) -> Prepared:
    """Build the model and compile a chain for each method."""
    try:
        import pytensor

        import pymc_sgmcmc  # noqa: F401
    except ImportError as error:
        raise UnavailableError(f"pymc_sgmcmc cannot be imported: {error}") from error
    pytensor.config.floatX = problem.dtype.name
    model = build_model(problem, settings)
    return Prepared(
        runs={method: _compile_chain(model, problem, settings, method) for method in METHODS},
        packages=("pymc_sgmcmc", "pymc", "pytensor", "numba", "numpy"),
    )


def build_model(problem: Problem, settings: Settings) -> Any:
    """Write the regression as a user of the package does."""
    import numpy as np
    import pymc as pm

    with pm.Model() as model:
        design, response = pm.Minibatch(
            np.ascontiguousarray(problem.design), problem.response, batch_size=settings.batch
        )
        coefficients = pm.Normal(
            "coefficients", 0.0, sigma=problem.prior_sd, shape=problem.features
        )
        pm.Bernoulli(
            "outcome",
            logit_p=design @ coefficients,
            observed=response,
            total_size=problem.rows,
        )
    return model


def _compile_chain(model: Any, problem: Problem, settings: Settings, method: str) -> Run:
    """Compile once, and return the function which runs a chain.

    Parameters
    ----------
    model : pymc.Model
        See :func:`build_model`; its only variable is ``coefficients``.
    problem : Problem
        ``problem.start`` is where every chain starts, ``problem.mode`` the centre of the control
        variate: finding the centre is not timed here, for any contender.
    settings : Settings
        ``settings.step_size`` is the package's own h, to be kept fixed: no tuning.
    method : {"sgld", "sgld-cv"}
        Plain stochastic gradient or control variate.

    Returns
    -------
    callable
        ``run(seed)`` runs ``settings.transitions`` transitions, the drawing of noise and of
        minibatches included, and returns the position after each as an array of shape
        (transitions, features). It is called many times and must not compile after the first.
    """
    import numpy as np

    from pymc_sgmcmc import SGLD, SGLDCV

    if method == "sgld":
        step = SGLD(model=model, step_size=settings.step_size)
    else:
        step = SGLDCV(model=model, step_size=settings.step_size, center=problem.mode)

    def run(seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        position = problem.start
        pending = step.batching.draw(rng, 1)
        blocks = []
        for first in range(0, settings.transitions, _BLOCK_TRANSITIONS):
            count = min(_BLOCK_TRANSITIONS, settings.transitions - first)
            indices = np.concatenate([pending, step.batching.draw(rng, count)])
            noise = rng.standard_normal((count, problem.features), dtype=problem.dtype)
            positions, _ = step.block(position, indices, noise, np.full(count, settings.step_size))
            position, pending = positions[-1], indices[-1:]
            blocks.append(positions)
        return np.concatenate(blocks)

    return run


_BLOCK_TRANSITIONS = 4000
