"""Searches for a Gaussian near posteriors whose effects of groups stay joint, compared.

    python -m tests.accuracy.centres FOLDER_OF_DATA [--models NAME ...] [--methods NAME ...]
        [--markdown FILE]

prints for each model and method processor seconds, the largest error of a mean in reference sds,
and the range of sds over those of the reference: of `find_center`, Pathfinder (blackjax), full-rank
ADVI (PyMC, 20 000 iterations) and short runs of nutpie with its low-rank metric (300 draws of
tuning, 100 of one chain). It writes the table of the documentation. The environment needs blackjax
and nutpie beside this package.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pymc as pm

from tests.accuracy.posteriors import MODELS
from tests.accuracy.suite import REFERENCES
from tests.benchmarks.common.markdown import write_tables
from tests.support.references import read_arrays

JOINT = {
    "contraception": "Contraception, non-centred",
    "contraception_centred": "Contraception, centred",
    "counts_of_subjects": "Seizures of 59 subjects",
    "radon_houses": "Log radon in 76 counties",
    "binary_groups": "Binary outcomes in 294 groups",
    "items_and_persons": "Answers of 200 persons",
    "linear_mixed": "Linear mixed model, 10⁵ rows",
    "horseshoe": "Horseshoe (warned)",
}
"""Posteriors, and their names in the table of the documentation."""

Moments = tuple[np.ndarray, np.ndarray]


def ours(model: pm.Model) -> Moments:
    """Centre and curvature of this package."""
    from pymc_sgmcmc import Posterior
    from pymc_sgmcmc.tuning import find_center

    posterior = Posterior(model)
    center = find_center(posterior, posterior.initial_position)
    return center.position, center.curvature.standard_deviations


def pathfinder(model: pm.Model) -> Moments:
    """Mean and sds of 2000 draws of the best approximation on the path."""
    import jax
    from blackjax.vi import pathfinder as method
    from pymc.sampling.jax import get_jaxified_logp

    start = model.initial_point()
    parts = [np.atleast_1d(start[value.name]) for value in model.value_vars]
    ends = np.cumsum([part.size for part in parts])[:-1]
    log_density = get_jaxified_logp(model)

    def flat(position):
        pieces = jax.numpy.split(position, ends)
        shaped = [
            piece.reshape(np.shape(start[value.name]))
            for piece, value in zip(pieces, model.value_vars, strict=True)
        ]
        return log_density(shaped)

    initial = np.concatenate([part.ravel() for part in parts]) + 0.0
    state, _ = method.approximate(jax.random.key(1), flat, jax.numpy.asarray(initial))
    draws = np.asarray(method.sample(jax.random.key(2), state, 2000)[0])
    return draws.mean(0), draws.std(0)


def advi(model: pm.Model) -> Moments:
    """Mean and sds of the full-rank Gaussian."""
    with model:
        fitted = pm.fit(20_000, method="fullrank_advi", progressbar=False, random_seed=1)
    approximation = fitted.groups[0]
    order = [value.name for value in model.value_vars]
    mean, sd = fitted.mean.eval(), fitted.std.eval()
    slices = {name: part for name, (_, part, *_) in approximation.ordering.items()}
    return tuple(np.concatenate([values[slices[name]] for name in order]) for values in (mean, sd))


def nutpie(model: pm.Model) -> Moments:
    """Mean and sds of a short run."""
    import nutpie as package

    compiled = package.compile_pymc_model(model)
    idata = package.sample(
        compiled, draws=100, tune=300, chains=1, cores=1, seed=1, progress_bar=False,
        low_rank_modified_mass_matrix=True, store_unconstrained=True,
    )  # fmt: skip
    draws = np.asarray(idata.sample_stats["unconstrained_draw"])[0]
    return draws.mean(0), draws.std(0)


METHODS: dict[str, Callable[[pm.Model], Moments]] = {
    method.__name__: method for method in (ours, nutpie, pathfinder, advi)
}
MOST_MEMORY = 0.8
"""A method may take this part of the memory of the machine."""

COLUMNS = {
    "ours": "this package",
    "nutpie": "nutpie, short",
    "pathfinder": "Pathfinder",
    "advi": "ADVI",
}
"""Methods, and their names in the table of the documentation."""


def cell(method: str, name: str, data_folder: Path) -> tuple[str, int]:
    """Result of a method for the table, and the number of coordinates."""
    logging.getLogger("pymc").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    reference = read_arrays(REFERENCES / f"{name}.npz")
    dimension = len(reference["position_mean"])
    model = MODELS[name](data_folder)
    begin = time.process_time()
    try:
        mean, sd = METHODS[method](model)
    except Exception as error:
        print(f"{name}, {method}: {type(error).__name__} {str(error)[:100]}", flush=True)
        memory = isinstance(error, MemoryError) or "memory" in str(error)
        return "out of memory" if memory else "failed", dimension
    seconds = time.process_time() - begin
    off = float(np.max(np.abs(mean - reference["position_mean"]) / reference["position_sd"]))
    ratio = sd / reference["position_sd"]
    if not (np.isfinite(off) and np.isfinite(ratio).all()):
        return "NaN", dimension
    worst = f"{off:.2g}" if off < 10 else f"{off:.0f}"
    return f"{seconds:.0f} s, {worst}, {ratio.min():.2f}–{ratio.max():.2f}", dimension


def limit_memory() -> None:
    """Let this process have most of the memory, so that the system does not end another one."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    resource.setrlimit(resource.RLIMIT_DATA, (int(MOST_MEMORY * memory),) * 2)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_folder", type=Path)
    parser.add_argument("--models", nargs="+", default=list(JOINT))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--markdown", type=Path, help="file for the table of the documentation")
    arguments = parser.parse_args()
    columns = ["posterior", "coordinates", *(COLUMNS[method] for method in arguments.methods)]
    rows = []
    for name in arguments.models:
        found = []
        for method in arguments.methods:
            # A new process for each: Pathfinder of many rows may take all memory.
            with ProcessPoolExecutor(
                1, mp_context=get_context("spawn"), initializer=limit_memory
            ) as fresh:
                try:
                    found.append(fresh.submit(cell, method, name, arguments.data_folder).result())
                except BrokenProcessPool:
                    found.append(("out of memory", 0))
            print(f"{name}, {method}: {found[-1][0]}", flush=True)
        rows.append([JOINT.get(name, name), str(found[0][1]), *(text for text, _ in found)])
        if arguments.markdown is not None:  # After each model: a long run may be stopped.
            command = "python -m tests.accuracy.centres FOLDER_OF_DATA"
            write_tables(arguments.markdown, [(columns, rows)], command)


if __name__ == "__main__":
    main()
