"""pymc_sgmcmc: the same regression as a PyMC model with ``pm.Minibatch``.

Blocks of transitions are called as the step methods call them, drawing of noise and minibatches
included, without `pymc.sample` around them. The centre of the control variate is given: finding it
is not timed, for any contender.
"""

from __future__ import annotations

import numpy as np
from common.model import build_model, engine_chain, make_step
from common.problem import Problem

from transition_benchmark import METHODS, Run, Settings, in_parts

PACKAGES = ("pymc_sgmcmc", "pymc", "pytensor", "numba", "numpy")


def prepare(problem: Problem, settings: Settings) -> dict[str, Run]:
    """Build the model and compile a chain for each method."""
    model = build_model(problem, settings.batch)

    def make_run(method: str) -> Run:
        given = {"step_size": settings.step_size, "preconditioner": "identity"}
        if method == "sgld-cv":
            given |= {"center": problem.mode, "gradient": "cv", "integrator": "euler"}
        elif method == "second-order":
            covariance = np.linalg.inv(problem.curvature)
            given = {"center": problem.mode, "step_size": 1.0, "preconditioner": covariance}
        step = make_step(model, method, settings.batch, **given)
        chain = engine_chain(step, problem.start, given["step_size"])
        if method == "second-order":
            return in_parts(chain, settings.transitions)
        return lambda seed: chain(seed, settings.transitions)

    return {method: make_run(method) for method in METHODS}
