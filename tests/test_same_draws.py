"""The draws of a seed, which a change of structure should not change.

Bits depend on the processor, its kernels and the versions of libraries, so the hashes are of one
machine: `python -m tests.test_same_draws` makes them anew, on the commit to compare with.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import warnings
from pathlib import Path

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import (
    HAMCMC,
    MALA,
    OSGFS,
    PSGLD,
    SGHMC,
    SGLD,
    SGLDCV,
    SGNHT,
    SGRLD,
    ULA,
    PolynomialDecay,
    Recipe,
)

STORED = Path(__file__).with_suffix(".json")
CVM = {"mode": "CVM"}
ESTIMATORS = ("plain", "cv", "svrg", "saga")


def recipe(vars=None, **settings):
    return Recipe(
        vars,
        D=lambda theta, r: [[0, 0], [0, 3.0]],
        Q=lambda theta, r: [[0, -1], [1, 0]],
        auxiliaries=["momentum"],
        **settings,
    )


SAMPLERS = {
    "SGLD": SGLD,
    "SGHMC": SGHMC,
    "SGNHT": SGNHT,
    "PSGLD": PSGLD,
    "OSGFS": OSGFS,
    "HAMCMC": HAMCMC,
    "SGRLD": SGRLD,
    "Recipe": recipe,
}

CASES = {
    f"{name} {gradient}": (method, {"gradient": gradient, "batch_size": 50})
    for name, method in SAMPLERS.items()
    for gradient in ESTIMATORS
}
CASES |= {
    "SGLDCV": (SGLDCV, {}),
    "SGLDCV replace": (SGLDCV, {"batching": "replace", "batch_size": 20}),
    "SGLDCV sgd": (SGLDCV, {"center": "sgd", "thin": 3}),
    "SGLDCV bias": (SGLDCV, {"bias": 0.01}),
    "SGLD given": (SGLD, {"step_size": 1e-3, "batch_size": 30}),
    "SGLD decay": (SGLD, {"step_size": PolynomialDecay(1e-3, 10, 0.5), "batch_size": 30}),
    "SGLD halving": (SGLD, {"tune_method": "halving", "batch_size": 50}),
    "SGHMC euler": (SGHMC, {"integrator": "euler", "gradient": "cv", "resample_momentum": "draw"}),
    "SGHMC given": (SGHMC, {"step_size": 0.01, "friction": 2.0, "noise_estimate": None}),
    "SGNHT diagonal": (SGNHT, {"thermostat": "diagonal", "gradient": "cv"}),
    "PSGLD curvature": (PSGLD, {"preconditioner": "curvature", "batch_size": 50}),
    "OSGFS model": (OSGFS, {"start": "model", "batch_size": 300, "max_k": 0.02}),
    "HAMCMC between": (HAMCMC, {"pairs": "between", "gradient": "cv"}),
    "ULA": (ULA, {}),
    "MALA": (MALA, {}),
}
COMPOUND = {
    f"{name} and Metropolis": (method, settings)
    for name, (method, settings) in {
        "SGLDCV": (SGLDCV, {"batch_size": 50}),
        "SGHMC": (SGHMC, {"batch_size": 50}),
        "SGLD saga": (SGLD, {"gradient": "saga", "batch_size": 50}),
        "OSGFS": (OSGFS, {"batch_size": 50}),
        "MALA": (MALA, {}),
    }.items()
}


def model() -> pm.Model:
    rng = np.random.default_rng(13)
    X = rng.standard_normal((600, 3)) * [1.0, 2.0, 0.5]
    y = 0.5 + X @ [1.0, -0.5, 0.3] + rng.standard_normal(600)
    with pm.Model(coords={"predictor": ["a", "b", "c"]}) as regression:
        intercept = pm.Normal("intercept", 0, 2)
        slopes = pm.Normal("slopes", 0, 2, dims="predictor")
        sigma = pm.HalfNormal("sigma", 2)
        pm.Normal("y", intercept + X @ slopes, sigma, observed=y)
    return regression


def digest(name: str) -> str:
    method, settings = (CASES | COMPOUND)[name]
    with model() as regression, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moved = [regression["intercept"], regression["slopes"]] if name in COMPOUND else None
        step = method(moved, compile_kwargs=CVM, **settings)
        steps = [step, pm.Metropolis([regression["sigma"]])] if name in COMPOUND else step
        idata = pm.sample(
            step=steps,
            draws=60,
            tune=230,
            chains=2,
            cores=1,
            random_seed=1313,
            progressbar=False,
            quiet=True,
            discard_tuned_samples=False,
            compute_convergence_checks=False,
        )
    made = hashlib.sha256()
    for group in ("warmup_sample_stats", "sample_stats"):
        for statistic in ("position", "gradient", "step_size", "gradient_norm", "variance_error"):
            made.update(np.ascontiguousarray(idata[group][statistic].values).tobytes())
    if name not in COMPOUND:
        moments = idata["sgmcmc_moments"]
        for part in ("batch_position", "group_gradient_gradient", "covariance"):
            made.update(np.ascontiguousarray(moments[part].values).tobytes())
    return made.hexdigest()[:16]


def machine() -> str:
    cpu = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    kernels = os.environ.get("OPENBLAS_CORETYPE", "")
    return f"{platform.machine()} {cpu.split(':')[-1].strip()} {kernels} {np.__version__}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *COMPOUND])
def test_draws_of_a_seed_are_the_same(name):
    stored = json.loads(STORED.read_text())
    if stored["machine"] != machine():
        pytest.skip(f"the hashes are of {stored['machine']}")
    assert digest(name) == stored[name]


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    found = {"machine": machine()}
    for case in [*CASES, *COMPOUND]:
        found[case] = digest(case)
        print(case, found[case], file=sys.stderr)
    STORED.write_text(json.dumps(found, indent=1) + "\n")
