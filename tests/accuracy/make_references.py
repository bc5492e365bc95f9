"""Make the stored references by full-data NUTS.

    python -m tests.accuracy.make_references skin_logistic FOLDER_OF_DATA

Writes `tests/accuracy/references/NAME.npz` with means, standard deviations, R-hat and effective
sample size of every coordinate of the unconstrained position, the seed and the versions.
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path

import arviz as az
import numpy as np
import pymc as pm

from tests.accuracy.posteriors import MODELS

REFERENCES = Path(__file__).parent / "references"
SEED = 20261121


def main() -> None:
    """Sample one model and store the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(MODELS))
    parser.add_argument("data_folder", type=Path)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--cores", type=int, default=1)
    arguments = parser.parse_args()

    with MODELS[arguments.name](arguments.data_folder):
        idata = pm.sample(
            draws=arguments.draws,
            chains=arguments.chains,
            cores=arguments.cores,
            random_seed=SEED,
            nuts_sampler="pymc",
        )
    posterior = idata.posterior.to_dataset()
    summary = {}
    for name, values in posterior.data_vars.items():
        stacked = values.values.reshape(-1, *values.shape[2:])
        summary[f"{name}_mean"] = stacked.mean(0)
        summary[f"{name}_sd"] = stacked.std(0)
        summary[f"{name}_r_hat"] = az.rhat(posterior)[name].values
        summary[f"{name}_ess"] = az.ess(posterior)[name].values
    REFERENCES.mkdir(exist_ok=True)
    np.savez(
        REFERENCES / f"{arguments.name}.npz",
        **summary,
        seed=SEED,
        draws=arguments.draws,
        chains=arguments.chains,
        versions=[f"{package} {version(package)}" for package in ("pymc", "pytensor", "numpy")],
    )
    print({key: np.round(value, 4) for key, value in summary.items()})


if __name__ == "__main__":
    main()
