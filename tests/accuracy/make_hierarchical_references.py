"""Make the stored references of hierarchical models by NUTS on the joint model.

    python -m tests.accuracy.make_hierarchical_references FOLDER_OF_DATA NAME [NAME ...]

Writes `tests/accuracy/references/hierarchical/NAME.npz` with what `make_references` writes of the
position, here that of the model of groups, so of the global variables alone, and

local_mean, local_sd, local_r_hat, local_ess, local_ess_sd
    of the `chosen_entries` of the local variable on its own scale

`n_rows` is the number of groups, and `dimension` that of the global variables.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import arviz as az
import numpy as np
import xarray as xr

from pymc_sgmcmc import Posterior, marginalize
from tests.accuracy.hierarchical import MODELS
from tests.accuracy.make_references import REFERENCES, Settings, sample, store, summarise

FOLDER = REFERENCES / "hierarchical"

MOST_LOCALS = 200
"""This many entries of the local variables are compared, evenly spaced. It is a compromise between
the size of the files and the part of the groups that is seen."""

DEFAULT = Settings(draws=8000, tune=1000, metric="default")

SETTINGS = {
    "cbpp_herds": replace(DEFAULT, draws=40_000, target_accept=0.95),
    "item_response": replace(DEFAULT, draws=4000),
}


def chosen_entries(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Index of evenly spaced entries of a local variable of this shape."""
    size = int(np.prod(shape))
    entries = np.unique(np.linspace(0, size - 1, MOST_LOCALS).round().astype(int))
    return np.unravel_index(entries, shape)


def summarise_locals(draws: np.ndarray) -> dict[str, np.ndarray]:
    """Means, standard deviations and the quality of both, of draws, shape (chains, draws, n)."""
    dataset = xr.Dataset({"local": (("chain", "draw", "entry"), draws)})
    return {
        "local_mean": draws.mean((0, 1)),
        "local_sd": draws.std((0, 1)),
        "local_r_hat": az.rhat(dataset)["local"].values,
        "local_ess": az.ess(dataset)["local"].values,
        "local_ess_sd": az.ess(dataset, method="sd")["local"].values,
    }


def make_reference(name: str, data_folder: Path) -> None:
    """Sample one joint model and store the summary."""
    settings = SETTINGS.get(name, DEFAULT)
    model, local = MODELS[name](data_folder)
    groups = Posterior(marginalize(model, local))
    with model:
        idata, metric_seconds = sample(None, settings)
    free = [variable.name for variable in model.free_RVs if variable.name != local]
    kept = idata["posterior"].to_dataset()[list(dict.fromkeys([*free, *groups.layout.names]))]
    of_globals = xr.DataTree.from_dict({"posterior": kept})
    draws = idata["posterior"][local].values
    chosen = draws[:, :, *chosen_entries(draws.shape[2:])]
    summary = summarise(groups, of_globals, free) | summarise_locals(chosen)
    facts = {"n_rows": groups.n_rows, "dimension": groups.dimension}
    store(FOLDER / f"{name}.npz", idata, summary, settings, metric_seconds, facts)


def main() -> None:
    """Make the references named on the command line, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_folder", type=Path)
    parser.add_argument("names", nargs="+", choices=sorted(MODELS))
    arguments = parser.parse_args()
    for name in arguments.names:
        make_reference(name, arguments.data_folder)


if __name__ == "__main__":
    main()
