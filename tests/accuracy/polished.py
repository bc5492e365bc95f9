"""Verdicts of `polish` on runs with the defaults beside their true errors, by stored references.

    python -m tests.accuracy.polished FOLDER_OF_DATA [NAME ...] [--draws D] [--step-factor F]

prints for each model the verdict on the run, the largest true error of a mean (in posterior
standard deviations) and of a standard deviation (its logarithm) in the run and in the polished
estimates, the largest standard error of the reference, how many coordinates are blamed, how many
other modes were found, the passes, and the seconds of the run and of `polish`. True errors contain
the Monte-Carlo errors of the run and of the reference. With ``--step-factor`` steps are so many
times as long as the computed ones, so that all runs are wrong.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from pathlib import Path

import numpy as np
import pymc as pm
import xarray as xr

from pymc_sgmcmc import SGLDCV, Polished, polish
from pymc_sgmcmc.polishing.report import OFF
from tests.accuracy.posteriors import MODELS
from tests.accuracy.stated import LARGE
from tests.accuracy.suite import REFERENCES, available
from tests.support.references import read_arrays


def run_of(model: pm.Model, draws: int, seed: int, step_factor: float) -> xr.DataTree:
    """A run with the defaults, or with longer steps."""
    with model:
        step = SGLDCV(compile_kwargs={"mode": "NUMBA"})
        if step_factor != 1:
            step = SGLDCV(
                step_size=step_factor * step.step_size,
                preconditioner="curvature",
                compile_kwargs={"mode": "NUMBA"},
            )
        return pm.sample(
            draws, tune=1000, chains=4, cores=1, step=step, random_seed=seed, progressbar=False
        )


def true_errors(mean: np.ndarray, sd: np.ndarray, reference: dict[str, np.ndarray]) -> tuple:
    """Largest errors of means, in posterior standard deviations, and of log standard deviations."""
    off = np.abs(mean - reference["position_mean"]) / reference["position_sd"]
    return off.max(), np.abs(np.log(sd / reference["position_sd"])).max()


def line(name: str, polished: Polished, reference: dict[str, np.ndarray], seconds: tuple) -> str:
    """A row of the printed table."""
    report = polished.report
    run = true_errors(report["mean"], report["sd"], reference)
    after = true_errors(report["polished_mean"], report["polished_sd"], reference)
    noise = 1 / np.sqrt(reference["position_ess"].min())
    blamed = report["verdict"].isin(OFF).sum()
    return (
        f"{name:<22} {len(report):4d}  {polished.verdict:<13}  run: mean {run[0]:6.2f} sd "
        f"{run[1]:5.2f}  polished: mean {after[0]:5.2f} sd {after[1]:5.2f}  reference {noise:.2f}  "
        f"blamed {blamed:3d}  modes {len(report.attrs['modes'])}  passes {polished.passes:3d}  "
        f"{seconds[0]:5.1f} + {seconds[1]:5.1f} s"
    )


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_folder", type=Path)
    small = [name for name in available() if name not in LARGE]
    parser.add_argument("names", nargs="*", default=small)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--step-factor", type=float, default=1.0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("pymc").setLevel(logging.ERROR)
    for name in arguments.names:
        model = MODELS[name](arguments.data_folder)
        begin = time.perf_counter()
        try:
            idata = run_of(model, arguments.draws, arguments.seed, arguments.step_factor)
            sampled = time.perf_counter()
            polished = polish(
                idata,
                model,
                random_seed=arguments.seed,
                cores=arguments.cores,
                progressbar=False,
            )
        except Exception as error:  # The other models are worth running all the same.
            print(f"{name:<22} {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        end = time.perf_counter()
        reference = read_arrays(REFERENCES / f"{name}.npz")
        print(line(name, polished, reference, (sampled - begin, end - sampled)), flush=True)
        if polished.verdict != "ok":
            print(f"{'':<22}       {polished.report.attrs['verdict'][:400]}", flush=True)


if __name__ == "__main__":
    main()
