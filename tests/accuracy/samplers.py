"""All samplers with their defaults on some of the posteriors, compared with stored references.

    python -m tests.accuracy.samplers FOLDER_OF_DATA [--models NAME ...] [--samplers NAME ...]

prints for each sampler and model the part of the coordinates whose mean is within 0.1 sd and whose
sd is within 5 % of the reference, the median ratio of standard deviations, the smallest number of
effective draws, R-hat, the seconds of set-up and run, and effective draws a second of the run; and
at the end a line for each sampler over all models.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from pymc_sgmcmc import HAMCMC, OSGFS, PSGLD, SGHMC, SGLD, SGLDCV, SGNHT
from tests.accuracy.suite import compare, good

SAMPLERS = {
    "SGLDCV": (SGLDCV, {}),
    "SGLD": (SGLD, {}),
    "SGHMC": (SGHMC, {}),
    "SGHMC, plain": (SGHMC, {"gradient": "plain"}),
    "SGNHT": (SGNHT, {}),
    "SGNHT, plain": (SGNHT, {"gradient": "plain"}),
    "PSGLD": (PSGLD, {}),
    "OSGFS": (OSGFS, {}),
    "HAMCMC": (HAMCMC, {}),
}
MODELS = (
    "skin_logistic",
    "epil_poisson",
    "gamma_glm",
    "rare_events",
    "correlated_design",
    "scales_apart",
    "ordered_logistic",
    "contraception",
)


def line(name: str, model: str, data_folder: Path, draws: int) -> dict[str, object]:
    """One run."""
    step_class, settings = SAMPLERS[name]
    table = compare(model, data_folder, step_class, draws=draws, **settings)
    seconds = table.attrs["seconds_sampled"]
    return {
        "sampler": name,
        "model": model,
        "good": good(table).mean(),
        "coordinates": len(table),
        "worst mean": table["mean_off"].abs().max(),
        "sd ratio": table["sd_ratio"].median(),
        "ESS": table["ess_bulk"].min(),
        "R-hat": table["r_hat"].max(),
        "set-up s": table.attrs["seconds_made"],
        "run s": seconds,
        "ESS/s": table["ess_bulk"].min() / seconds,
        "thin": table.attrs["thin"],
    }


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_folder", type=Path)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--samplers", nargs="*", default=list(SAMPLERS), choices=list(SAMPLERS))
    parser.add_argument("--draws", type=int, default=1000)
    arguments = parser.parse_args()
    lines = []
    for model in arguments.models:
        for name in arguments.samplers:
            try:
                lines.append(line(name, model, arguments.data_folder, arguments.draws))
            except Exception as error:
                print(f"{name} on {model}: {type(error).__name__}: {str(error)[:150]}", flush=True)
                continue
            print(pd.DataFrame(lines[-1:]).round(3).to_string(header=False), flush=True)
    table = pd.DataFrame(lines)
    table["weighted"] = table["good"] * table["coordinates"]
    whole = table.groupby("sampler", sort=False).agg(
        good=("weighted", "sum"), coordinates=("coordinates", "sum"), ess=("ESS/s", "median")
    )
    whole["good"] /= whole["coordinates"]
    print(table.drop(columns="weighted").round(3).to_string())
    print(whole.rename(columns={"ess": "median ESS/s"}).round(3).to_string())


if __name__ == "__main__":
    main()
