"""Fit a logistic regression with PyMC and a step method of this package, and time it."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pymc as pm
import pytensor
from xarray import DataTree

from pymc_sgmcmc import (
    HAMCMC,
    OSGFS,
    PSGLD,
    SGHMC,
    SGLD,
    SGLDCV,
    SGNHT,
    BatchSizeWarning,
)
from pymc_sgmcmc.demo.data import Design
from pymc_sgmcmc.demo.errors import InputError
from pymc_sgmcmc.step_methods.base import StochasticGradientStep

SAMPLERS: dict[str, Callable[..., StochasticGradientStep]] = {
    "sgld-cv": SGLDCV,
    "sgld": SGLD,
    "sghmc-cv": partial(SGHMC, gradient="cv"),
    "sgnht-cv": partial(SGNHT, gradient="cv"),
    "psgld-cv": partial(PSGLD, gradient="cv"),
    "hamcmc-cv": partial(HAMCMC, gradient="cv"),
    "osgfs": OSGFS,
}

SAMPLER_LABELS = {name: name.upper() for name in SAMPLERS}

MODES = ("auto", "NUMBA", "CVM", "JAX", "FAST_COMPILE")

PRIOR_SD = 2.5
"""Of each coefficient: weak on the scale of standardised columns, where ±2.5 takes a
probability from 0.5 to 0.08 or 0.92."""

DEFAULT_BATCH_SIZE = 500

FEWEST_DRAWS = 4
"""Of which ArviZ makes a summary."""

TIMED_TRANSITIONS = 3000
"""Transitions run apart from PyMC to measure what one costs."""

REPETITIONS = 4
"""Of each measurement; the shortest counts, since other programs can only add to it."""


@dataclass(frozen=True)
class Settings:
    """How to sample.

    Attributes
    ----------
    sampler : str
        A key of `SAMPLERS`.
    draws, tune, chains, cores : int
        As `pymc.sample` takes them.
    batch_size : int, optional
        Rows a minibatch; `DEFAULT_BATCH_SIZE`, or all rows where there are fewer.
    seed : int
    mode : str
        One of `MODES`; "auto" is resolved by `resolve_mode`.
    progress : bool
        Show PyMC's progress bar.
    """

    sampler: str = "sgld-cv"
    draws: int = 1000
    tune: int = 200
    chains: int = 4
    cores: int = 1
    batch_size: int | None = None
    seed: int = 1
    mode: str = "auto"
    progress: bool = True


@dataclass(frozen=True, eq=False)
class Fit:
    """What came of it.

    Attributes
    ----------
    trace : xarray.DataTree
        As `pymc.sample` returns it; fewer draws than asked for where it was interrupted.
    interrupted : bool
    batch_size : int
    cost : Cost or None
        None where sampling was interrupted.
    warnings : tuple of str
        What the step method warned of.
    """

    trace: DataTree
    interrupted: bool
    batch_size: int
    cost: Cost | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Cost:
    """Where the time went, in seconds of wall clock.

    Attributes
    ----------
    n_rows : int
    set_up : float
        Once: build the model, compile, and find the mode and the step size.
    full_gradient : float
        One gradient of the log posterior over all rows.
    sampling : float
        `pymc.sample`: all chains, warm-up included.
    draws : int
        Of all chains, warm-up included.
    thin : int
        Transitions a draw.
    transition : float
        One transition, on one core.
    """

    n_rows: int
    set_up: float
    full_gradient: float
    sampling: float
    draws: int
    thin: int
    transition: float

    @property
    def draw(self) -> float:
        """One draw, on one core, what PyMC adds to it left out."""
        return self.transition * self.thin


class InterruptedEarlyError(Exception):
    """Sampling was interrupted before it had a draw to keep."""


def resolve_mode(mode: str) -> str:
    """PyTensor mode to compile the transitions in.

    "auto" is the one that starts soonest: C code where there is a compiler, else Numba. A
    transition in Numba or JAX costs less than half of one in C, which pays for the time that
    Numba takes to compile after about a million of them.
    """
    if mode != "auto":
        return mode
    return "CVM" if pytensor.config.cxx else "NUMBA"


def resolve_batch_size(batch_size: int | None, n_rows: int) -> int:
    """Rows a minibatch, checked against the rows that there are.

    Raises
    ------
    InputError
        When there are fewer rows than asked for.
    """
    if batch_size is None:
        return min(DEFAULT_BATCH_SIZE, n_rows)
    if batch_size > n_rows:
        raise InputError(
            f"--batch-size should be at most the number of rows, {n_rows}, but got {batch_size}."
        )
    return batch_size


def build_model(design: Design, prior_sd: float = PRIOR_SD) -> pm.Model:
    """Logistic regression on all rows: an ordinary model, without minibatches.

    Parameters
    ----------
    design : Design
    prior_sd : float

    Returns
    -------
    pymc.Model
        ``beta`` with dimension ``feature``, and the observed ``y``.
    """
    X = np.asarray(design.X, dtype=pytensor.config.floatX)
    with pm.Model(coords={"feature": list(design.feature_names)}) as model:
        beta = pm.Normal("beta", 0, prior_sd, dims="feature")
        pm.Bernoulli("y", logit_p=X @ beta, observed=design.y)
    return model


def fit(design: Design, settings: Settings) -> Fit:
    """Sample the posterior of a logistic regression.

    Parameters
    ----------
    design : Design
    settings : Settings

    Returns
    -------
    Fit

    Raises
    ------
    InputError
        When the batch size exceeds the number of rows.
    InterruptedEarlyError
        When interrupted (Ctrl-C) during warm-up. Later, the draws so far are kept.
    """
    batch_size = resolve_batch_size(settings.batch_size, design.n_rows)
    mode = resolve_mode(settings.mode)
    started = time.perf_counter()
    with build_model(design):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", BatchSizeWarning)
            step = SAMPLERS[settings.sampler](batch_size=batch_size, compile_kwargs={"mode": mode})
        set_up = time.perf_counter() - started
        trace = _sample(step, settings, mode)
    sizes = trace["posterior"].sizes
    interrupted = (sizes["chain"], sizes["draw"]) != (settings.chains, settings.draws)
    if sizes["draw"] < FEWEST_DRAWS:
        raise InterruptedEarlyError
    cost = None
    if not interrupted:
        cost = Cost(
            n_rows=design.n_rows,
            set_up=set_up,
            full_gradient=_time_full_gradient(step),
            sampling=float(trace["posterior"].attrs["sampling_time"]),
            draws=settings.chains * (settings.tune + settings.draws),
            thin=step.thin,
            transition=_time_transition(step, settings),
        )
    return Fit(
        trace=trace,
        interrupted=interrupted,
        batch_size=batch_size,
        cost=cost,
        warnings=tuple(_messages(caught)),
    )


def _sample(step: StochasticGradientStep, settings: Settings, mode: str) -> DataTree:
    # A process that has used JAX can hang after a fork.
    context = {"mp_ctx": "forkserver"} if mode == "JAX" and settings.cores > 1 else {}
    try:
        return pm.sample(
            draws=settings.draws,
            tune=settings.tune,
            chains=settings.chains,
            cores=settings.cores,
            step=step,
            random_seed=settings.seed,
            progressbar=settings.progress,
            callback=None if settings.cores > 1 else _StopAllChains(settings),
            **context,
        )
    except ValueError as error:
        # What PyMC says to an interrupt during warm-up.
        if "Not enough samples to build a trace" not in str(error):
            raise
        raise InterruptedEarlyError from error


class _StopAllChains:
    """Callback by which an interrupt ends all chains.

    Where chains run one after the other, PyMC takes Ctrl-C for the end of the present one and
    goes on with the next.
    """

    def __init__(self, settings: Settings):
        self.length = settings.tune + settings.draws
        self.chain = 0
        self.done = 0

    def __call__(self, trace: Any, draw: Any) -> None:
        if draw.chain != self.chain and self.done < self.length:
            raise KeyboardInterrupt
        self.chain, self.done = draw.chain, draw.draw_idx + 1


def _messages(caught: list[warnings.WarningMessage]) -> list[str]:
    """Texts of the package's own warnings; any other is passed on as it came."""
    messages = []
    for warning in caught:
        if issubclass(warning.category, BatchSizeWarning):
            messages.append(str(warning.message))
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    return messages


def _time_full_gradient(step: StochasticGradientStep) -> float:
    assert step.center is not None  # computed whenever the step size is
    times = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        step.posterior.gradient(step.center.position)
        times.append(time.perf_counter() - started)
    return min(times)


def _time_transition(step: StochasticGradientStep, settings: Settings) -> float:
    """Seconds a transition, in a chain of its own.

    That leaves out the start of processes, the progress bar and the recording of draws, which
    are the same for every sampler.
    """
    draws = max(1, min(settings.draws, math.ceil(TIMED_TRANSITIONS / step.thin)))
    times = []
    for _ in range(REPETITIONS):
        assert step.center is not None
        step.chain.begin(np.random.default_rng(settings.seed), step.center.position)
        started = time.perf_counter()
        step.chain.advance(draws)
        times.append(time.perf_counter() - started)
    return min(times) / (draws * step.thin)
