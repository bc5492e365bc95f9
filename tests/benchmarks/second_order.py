"""Effective draws of each sampler with control variates of first and of second order, and errors.

::

    python tests/benchmarks/second_order.py --markdown docs/tables/second_order.txt
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from common.clocks import errors_of_draws
from common.runner import Result, Table, attempt, fresh, run

GRADIENTS = {
    "SGLDCV": ("cv", "second_order"),
    "SGHMC": ("cv", "second_order"),
    "SGNHT": ("cv", "second_order"),
    "OSGFS": ("plain", "cv", "second_order"),
    "PSGLD": ("cv", "second_order"),
    "HAMCMC": ("cv", "second_order"),
}
SKEWED = "logistic, 40 events"
POSTERIORS = {"logistic, 10⁵ rows, 20 coefficients": None, "40 events in 10⁴ rows": SKEWED}
"""Posteriors by their names in the table; the second is a model of ``why_not_laplace.py``."""
OPTIONS = {
    "samplers": (tuple(GRADIENTS), tuple(GRADIENTS)),
    "posteriors": (tuple(POSTERIORS), tuple(POSTERIORS)),
    "draws": (20_000,),
    "limit": (300.0, "seconds of one process"),
}
COLUMNS = {
    "posterior": "posterior",
    "sampler": lambda r: f"`{r['sampler']}`",
    "`gradient=`": lambda r: f'`"{r["gradient"]}"`',
    "rows a minibatch": "batch",
    "transitions a draw": "thin",
    "set-up, s": "set_up",
    "ESS/s": "rate",
    "sd ratio": lambda r: f"{r['sd_ratio']:.3f}",
    "mean error": "mean_error",
}


def truth_of(posterior: str) -> dict[str, Any]:
    """Means and standard deviations: exact where it is skewed, and Laplace's where it is not."""
    if POSTERIORS[posterior] is not None:
        from laplace_contenders import reference

        found = reference(SKEWED, 10_000, 32_768)
        return {key: found[key].tolist() for key in ("mean", "sd")}
    from common.regression import make_problem

    problem = make_problem(100_000, 20)
    return {"mean": problem.mode.tolist(), "sd": problem.sd.tolist()}


def measure(
    posterior: str, sampler: str, gradient: str, draws: int, truth: dict[str, Any]
) -> Result:
    """Set up, run once to compile, and time the draws of one chain."""
    import logging
    import warnings

    import numpy as np

    import pymc_sgmcmc

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if POSTERIORS[posterior] is not None:
        from common.skewed import build

        model = build(SKEWED, 10_000)
    else:
        from common.regression import build_model, make_problem

        model = build_model(make_problem(100_000, 20))
    with model:
        began = time.process_time()
        step = getattr(pymc_sgmcmc, sampler)(gradient=gradient)
        set_up = time.process_time() - began
        shared = {"step": step, "chains": 1, "progressbar": False, "random_seed": 1}
        pymc_sgmcmc.sample(100, compute_convergence_checks=False, **shared)
        began = time.process_time()
        idata = pymc_sgmcmc.sample(draws, compute_convergence_checks=False, **shared)
        seconds = time.process_time() - began
    positions = idata["sample_stats"]["position"].values
    errors = errors_of_draws(positions, np.array(truth["mean"]), np.array(truth["sd"]))
    return {
        "posterior": posterior,
        "sampler": sampler,
        "gradient": gradient,
        "batch": int(step.batch_size),
        "thin": int(idata["sample_stats"].attrs["sgmcmc_thin"]),
        "set_up": set_up,
        "rate": errors["ess"] / seconds,
        **errors,
    }


def results(settings: Any) -> Iterator[Result]:
    """Every sampler with its estimators, each in a process of its own."""
    for posterior in settings.posteriors:
        truth = fresh(truth_of, posterior=posterior)
        for sampler in settings.samplers:
            for gradient in GRADIENTS[sampler]:
                given = {"posterior": posterior, "sampler": sampler, "gradient": gradient}
                given |= {"draws": settings.draws, "truth": truth, "limit": settings.limit}
                found = attempt(measure, **given)
                if found is not None:
                    yield found


TABLES = [Table("One chain on one core, processor time", COLUMNS)]

if __name__ == "__main__":
    sys.exit(run(__doc__, results, TABLES, OPTIONS))
