"""Runs that are stored: begun, resumed where they are the same, and read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from pymc.model import Model
from xarray import DataTree

from pymc_sgmcmc.errors import StoreError
from pymc_sgmcmc.posterior.position import given_model
from pymc_sgmcmc.record import RunSettings
from pymc_sgmcmc.sampling.encode import encode
from pymc_sgmcmc.sampling.identity import (
    differences,
    identity_of,
    identity_of_model,
    numbers_of,
    rounded_differences,
)
from pymc_sgmcmc.sampling.store import ChainStore, check_path, has_begun, held, read_setup, readable
from pymc_sgmcmc.sampling.trace import Recorder, joined, recorded_variables, whole_trace
from pymc_sgmcmc.sampling.workers import Job
from pymc_sgmcmc.seeds import generator
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.pymc_hook import log


def generator_of_run(path: Path | None, random_seed: Any) -> np.random.Generator:
    """The generator of a seed, or that of a stored run where none is given."""
    if path is not None and random_seed is None and has_begun(path):
        with readable(path):
            return read_setup(path)["generator"]
    return generator("random_seed", random_seed)


@contextmanager
def stored(
    path: Path,
    resume: bool,
    step: StochasticGradientStep,
    jobs: Sequence[Job],
    *,
    model: Model,
    generator: np.random.Generator,
    tune: int,
    draws: int,
) -> Iterator[None]:
    """Hold a store while a run goes into it, and give the jobs the draws that it has.

    Raises
    ------
    FileExistsError
        Where another process has begun a run there meanwhile.
    StoreError
        Where the store is in use, is of another run, or has more draws.
    OSError
    """
    points = [job.point for job in jobs]
    identity = identity_of(model, step, points, tune=tune, seed=_hash(generator))
    numbers = numbers_of(step, points[0])
    settings = step.run_settings
    setup = {
        "identity": identity,
        "numbers": numbers,
        "settings": {
            "attributes": settings.attributes,
            "arrays": settings.arrays,
            "labels": settings.labels,
        },
        "generator": generator,
    }
    with held(path, setup, len(jobs)) as begun:
        if begun and not resume:
            raise FileExistsError(f"Another process has begun a run at {path}. Give another path.")
        with readable(path):
            if begun:
                before = read_setup(path)
                _check_same_run(path, before, identity, numbers)
                settings = RunSettings(**before["settings"])
            _load(path, jobs, settings, tune, draws)
        if begun:
            present = min(job.done for job in jobs)
            log.info(
                "The run goes on from %s, with %d of %d tuning draws and %d of %d draws of each "
                "chain. Draws after the last stored state are made again.",
                path,
                min(present, tune),
                tune,
                max(present - tune, 0),
                draws,
            )
        yield


def _load(path: Path, jobs: Sequence[Job], settings: RunSettings, tune: int, draws: int) -> None:
    """Give each job its part of the store, and its draws so far."""
    stores = [ChainStore(path, number).whole() for number in range(len(jobs))]
    most = max(store.done for store in stores)
    if most > tune + draws:
        raise StoreError(
            f"The store {path} has {most - tune} draws already, more than `draws={draws}`. It is "
            "the total number: give at least as many, or read them by `read_store`."
        )
    for store, job in zip(stores, jobs, strict=True):
        job.store = store.resumable(tune + draws)
        _add_draws(job, job.store, settings)


def _add_draws(job: Job, store: ChainStore, settings: RunSettings) -> None:
    runs = store.draws(settings)
    if runs:
        values, stats = zip(*runs, strict=True)
        job.add(joined(values), joined(stats))
        job.end(store.moments())


def _check_same_run(
    path: Path,
    before: Mapping[str, Any],
    identity: Mapping[str, Any],
    numbers: Mapping[str, np.ndarray],
) -> None:
    """Compare a run with that of its store.

    Raises
    ------
    StoreError
        Where they differ, with each difference.
    """
    found = differences(before["identity"], identity)
    rounded, others = rounded_differences(before["numbers"], numbers)
    if not found:  # Otherwise they follow from what differs.
        found = [f"set-up number `{name}` is another one" for name in others]
    if found:
        raise StoreError(
            f"The run is not that of the store {path}: {'; '.join(found)}. Give the same model, "
            "data and settings, or another path. Nothing was changed."
        )
    if rounded:
        log.warning(
            "The set-up differs in last digits from that of the store, in %s, so that the draws "
            "will differ in last digits from those of a run that was not stopped. Another "
            "processor or number of threads of BLAS does this.",
            ", ".join(rounded),
        )


def _hash(generator: np.random.Generator) -> str:
    arrays: dict[str, np.ndarray] = {}
    document = json.dumps(encode(generator, "generator", arrays), sort_keys=True)
    numbers = b"".join(values.tobytes() for values in arrays.values())
    return sha256(document.encode() + numbers).hexdigest()


# --- Reading --------------------------------------------------------------------------------


def read_store(
    store: str | os.PathLike[str],
    *,
    model: Model | None = None,
    var_names: Sequence[str] | None = None,
    discard_tuned_samples: bool = True,
    idata_kwargs: Mapping[str, Any] | None = None,
) -> DataTree:
    """Draws of a store of `sample`, of a run that has ended, was stopped, or still runs.

    Parameters
    ----------
    store : str or path
    model : Model, optional
        The model of the run, with the same variables and data. The default is that of the context.
        Where the run integrated local variables out, it is what `marginalize` makes of the model,
        and `recover` then draws them.
    var_names, discard_tuned_samples, idata_kwargs
        As in `pymc.sample`.

    Returns
    -------
    xarray.DataTree
        As `sample` returns it where the run is stopped at this moment. Chains without draws after
        tuning are left out.

    Raises
    ------
    FileNotFoundError
    StoreError
        Where there is something else than a store, the store is of another model or data, or has no
        draws after tuning.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np, pymc as pm
    >>> from pymc_sgmcmc import read_store, sample
    >>> with pm.Model():
    ...     mean = pm.Normal("mean", 0, 10)
    ...     _ = pm.Normal("y", mean, 1.0, observed=np.arange(100.0) % 7)
    ...     path = tempfile.mkdtemp() + "/run.zarr"
    ...     idata = sample(50, tune=50, chains=2, cores=1, random_seed=1, quiet=True, store=path)
    ...     again = read_store(path)
    >>> bool((again["posterior"]["mean"] == idata["posterior"]["mean"]).all())
    True
    """
    model = given_model(model)
    if store is None:
        raise TypeError("`store` should be the path of a store, but got None.")
    path = check_path(store, resume=True)
    assert path is not None  # as a store is given
    if not has_begun(path):
        raise StoreError(f"The store {path} has no draws yet.")
    with readable(path):
        before = read_setup(path)
        of_model = identity_of_model(model)
        found = differences({kind: before["identity"][kind] for kind in of_model}, of_model)
        if found:
            raise StoreError(
                f"The model is not that of the store {path}: {'; '.join(found)}. Give the same "
                "one. Where the run integrated local variables out, it is `marginalize(model, "
                "names)`, with the `points` that the log of the run says, if any."
            )
        settings = RunSettings(**before["settings"])
        run = before["identity"]["setting"]
        point = model.initial_point()
        jobs = []
        for number in range(run["chains"]):
            job = Job(np.random.default_rng(), point)
            _add_draws(job, ChainStore(path, number).whole(), settings)
            jobs.append(job)
    if max(job.done for job in jobs) <= run["tune"]:
        raise StoreError(f"The store {path} has no draws after tuning yet.")
    return whole_trace(
        Recorder(model, point, recorded_variables(model, var_names)),
        jobs,
        model=model,
        tune=run["tune"],
        t_sampling=0.0,
        discard_tuned_samples=discard_tuned_samples,
        compute_convergence_checks=False,
        idata_kwargs=dict(idata_kwargs or {}),
        quiet=True,
    )
