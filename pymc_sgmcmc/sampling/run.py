"""`sample`: a whole run of chains, with the draws of `pymc.sample`."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pymc as pm
from pymc import stats
from pymc.initial_point import make_initial_point_fns_per_chain
from pymc.model import Model
from pymc.stats.convergence import log_warning_stats
from pytensor.tensor.variable import TensorVariable
from xarray import DataTree

from pymc_sgmcmc.checks import (
    accepts,
    names_among,
    one_of,
    or_none,
    quoted,
    truth_value,
    unknown_argument,
    whole_number,
)
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.limits import check_memory
from pymc_sgmcmc.posterior.position import given_model
from pymc_sgmcmc.pymc_private import ProgressBarOptions, process_context, quiet_logging
from pymc_sgmcmc.sampling.accuracy import check_accuracy, sample_accurately
from pymc_sgmcmc.sampling.client import run_on_client
from pymc_sgmcmc.sampling.groups import AUTO, Groups, groups_in_need, groups_of
from pymc_sgmcmc.sampling.progress import RunProgress
from pymc_sgmcmc.sampling.resume import generator_of_run, stored
from pymc_sgmcmc.sampling.store import check_path
from pymc_sgmcmc.sampling.trace import (
    Recorder,
    check_conversion,
    recorded_names,
    recorded_variables,
    whole_trace,
)
from pymc_sgmcmc.sampling.vectorized import check_vectorized, run_vectorized
from pymc_sgmcmc.sampling.workers import (
    Job,
    default_chains,
    default_cores,
    interrupts_noted,
    run_in_processes,
    run_in_turn,
)
from pymc_sgmcmc.sources.cluster import check_client
from pymc_sgmcmc.sources.passes import passes
from pymc_sgmcmc.stages import set_up
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.pymc_hook import draws_kept, log
from pymc_sgmcmc.step_methods.sgld import SGLDCV

AT_THE_END = {
    "log_likelihood": stats.compute_log_likelihood,
    "log_prior": stats.compute_log_prior,
}
"""These functions add groups of functions of the draws, by the names of `idata_kwargs`."""

CHAIN_METHODS = ("parallel", "vectorized")

ARRAYS_OF_DRAWS = 3
"""A draw has its values, and as statistics the unconstrained position and the gradient there."""


def sample(
    draws: int = 1000,
    *,
    tune: int = 1000,
    chains: int | None = None,
    cores: int | None = None,
    step: StochasticGradientStep | Callable[..., StochasticGradientStep] = SGLDCV,
    accuracy: float | None = None,
    marginalize: str | Sequence[str] | None = AUTO,
    random_seed: Any = None,
    initvals: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
    var_names: Sequence[str] | None = None,
    progressbar: bool | str = True,
    quiet: bool = False,
    discard_tuned_samples: bool = True,
    compute_convergence_checks: bool = True,
    idata_kwargs: Mapping[str, Any] | None = None,
    mp_ctx: Any = None,
    model: Model | None = None,
    store: str | os.PathLike[str] | None = None,
    resume: bool = False,
    client: Any = None,
    chain_method: str = "parallel",
    **others: Any,
) -> DataTree:
    """Sample a model: the draws of ``pymc.sample(step=...)``, in less time.

    Each chain computes its draws in runs, and the constrained values and deterministics of all
    draws at once at the end. Arguments that are not described here are those of `pymc.sample`.

    Parameters
    ----------
    draws, tune : int
        Draws of each chain to keep, and to tune with before them.
    chains, cores : int, optional
        Number of chains, and of processes that run them. The defaults are those of `pymc.sample`,
        but there are no more processes than processors that a container may use.
    step : step method, or a function that makes one
        A step method of this package, which has all variables of the model, or its class, or
        another function of ``model``, such as ``functools.partial(SGLDCV, bias=0.02)``.
    accuracy : float, optional
        Error that you accept of means, in posterior standard deviations, and of standard
        deviations, relative to them. See below. Without it the accuracy is that of the step
        method, its ``bias``.
    marginalize : "auto", names of variables, or None
        Local variables to integrate out before the run and to draw at its end, so that groups of
        records are the rows. See below.
    random_seed : int, sequence of int, or numpy.random.Generator, optional
    progressbar : bool or str
        As in `pymc.sample`. The bar shows running bias and R-hat.
    store : str or path, optional
        Folder, such as ``"run.zarr"``, in which draws and states of the chains are stored as the
        run goes on. It needs zarr 3, ``pip install "pymc_sgmcmc[store]"``. See below.
    resume : bool
        Whether to go on with the run in `store`.
    client : dask.distributed.Client, optional
        Of a Dask cluster, whose workers run the chains, in place of `cores` processes, and passes
        over rows of a source. It needs ``pip install "pymc_sgmcmc[dask]"``. See below.
    chain_method : {"parallel", "vectorized"}
        Chains in `cores` processes, or all at once on the device of JAX. See below.
    **others
        Are refused, with advice: `callback`, `trace` and `blas_cores` are for `pymc.sample`.

    Returns
    -------
    xarray.DataTree
        As of `pymc.sample`. Where Ctrl-C ends the run, it has the draws so far, and their moments.

    Raises
    ------
    TypeError, ValueError, ModelError
        Where an argument or the model cannot be used.
    NonFinitePositionError
        Where a chain became NaN or infinite before its first draw after tuning.
    ChainProcessError
        Where the process of a chain died, or a Dask cluster cannot go on.
    ClusterError
        Where a Dask cluster cannot go on with a pass over rows.
    StoreError
        Where the run that is resumed differs from that in `store`, or another process uses it.
    FileExistsError, FileNotFoundError
        Where there is something at the path of a new store, or nothing to resume.
    OSError
        Where the disk is full. What was stored until then is whole.
    RowsError, MemoryError
        Where files changed or vanished during the run, or memory is exhausted. The attribute
        ``idata`` of an error that ends the run has the draws so far, where there are any after
        tuning.

    See Also
    --------
    pymc.sample : takes step methods of this package beside those of PyMC.
    read_store : reads the draws of a store.

    Notes
    -----
    The draws are those of `pymc.sample`, whatever the number of processes: the same numbers, but
    for last digits, which BLAS may round otherwise where memory is aligned otherwise. Those of
    constrained values may differ too, since NumPy computes them for all draws.

    **Local variables.** Where `step` is a class or a function, variables with one entry for each of
    20 groups or more are integrated out, as by `marginalize`, and drawn at the end, as by
    `recover`, if groups have at most 100 records on average or are more than 500. So are
    those of fewer or larger groups where the set-up of the joint model gives a `CenterWarning`, as
    with centred effects whose scale the rows leave open, and that of groups gives none. Effects of
    several factors with as many levels stay in the model. The log says so. ``sample_stats`` and the
    warm-up draws are those of the other variables. With ``marginalize=None``, or a step method that
    was made before, the draws are those of the joint model. Records may be rows of a source, with a
    function such as ``functools.partial(SGLDCV, rows=rows)``.

    **Accuracy.** With `accuracy` the run takes the longest steps whose error can be corrected,
    some seven times as long as the default ones. Each relaxation time then takes one or two
    transitions, and the draws are too wide, by a fifth or more. Stein's identities of second order
    give the covariance that they should have, those of third order the error of their means and
    the error of this correction. Where the correction is not accurate enough, the run is repeated
    with shorter steps, and where it is refused, with the small steps of ``bias=accuracy``, which
    need no correction. The log and ``idata["sgmcmc_accuracy"].attrs`` say which, and why. Errors
    are stated in this group for the coordinates, and by `summary` for the variables. The draws as
    the chains made them are what `uncalibrated` returns.

    **Store and resume.** With `store` each chain writes its draws every few seconds, or every
    hundredth of the time of a long run. A run that was stopped, however that came, goes on from
    there with `resume=True` and otherwise the same call, and ends with the draws of a run that was
    not stopped, to the last bit. Model, data, settings and versions are compared, and each
    difference is named. `random_seed` may be left out, since the store has it. `draws` is the total
    number: with more draws a run that has ended goes on, and with as many its trace is returned.
    Only one process at a time can use a store, and nothing in it is run as code. `accuracy` takes
    several runs and cannot be stored.

    **Dask.** With `client` a chain is a sequence of tasks of about two seconds, each of which takes
    the state of the chain and returns draws and the next state. So the draws do not depend on the
    number of workers, and a task of a worker that died is run again with the same draws. Rows in
    memory go to each worker once, and those of a source from worker to worker. `store` is refused.

    **Vectorized.** With ``chain_method="vectorized"`` the transitions of all chains are computed at
    once on the device of JAX, which pays for a thousand chains on a GPU. Noise and minibatches are
    drawn there, so the draws are others than those of chains in processes, with the same law.
    Windows of shuffled rows have strides there, since the chains cannot have an order each. One
    chain first tunes the step method. All chains then begin anew with its step size and thinning,
    and ``tune`` draws bring them to their law. The step method needs
    ``compile_kwargs={"mode": "JAX"}``, and may not go on to adapt after tuning, as OSGFS and
    ``gradient="svrg"`` do. The trace has no moments over all transitions, so that tools for traces
    use its draws. `accuracy`, `store` and `client` are refused.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sgmcmc import sample
    >>> rng = np.random.default_rng(1)
    >>> X = rng.normal(size=(2000, 2))
    >>> y = X @ [1.0, -1.0] + rng.normal(size=2000)
    >>> with pm.Model():
    ...     slopes = pm.Normal("slopes", shape=2)
    ...     _ = pm.Normal("y", X @ slopes, 1.0, observed=y)
    ...     idata = sample(200, tune=100, chains=2, cores=1, random_seed=1, quiet=True)
    >>> idata["posterior"]["slopes"].mean(("chain", "draw")).round(1).values
    array([ 1., -1.])
    """
    for name in others:
        raise _unknown(name)
    model = given_model(model)
    draws, tune = whole_number("draws", draws, 1), whole_number("tune", tune, 0)
    # As in `pymc.sample`, chains do not depend on what a container lends of its machine.
    of_cores = default_chains() if cores is None else max(2, whole_number("cores", cores, 1))
    chains = of_cores if chains is None else whole_number("chains", chains, 1)
    cores = default_cores() if cores is None else cores
    for name, value in (
        ("quiet", quiet),
        ("discard_tuned_samples", discard_tuned_samples),
        ("compute_convergence_checks", compute_convergence_checks),
    ):
        truth_value(name, value)
    if not isinstance(progressbar, bool):
        one_of("progressbar", progressbar, get_args(ProgressBarOptions), ", or True or False")
    path = check_path(store, resume)
    if path is not None and accuracy is not None:
        raise ValueError(
            "`store` takes one run, but `accuracy` may take several. Leave one of them out: a "
            "step method with a smaller `bias` can be stored."
        )
    seeds = generator_of_run(path, random_seed)
    names = recorded_names(model, var_names)
    later, converted = _wanted(model, names, {} if idata_kwargs is None else idata_kwargs)
    check_conversion(model, names, converted)
    _check_initvals(model, initvals, chains)
    elements = sum(math.prod(n or 1 for n in value.type.shape) for value in model.value_vars)
    check_memory("draws", draws, ARRAYS_OF_DRAWS * 8 * elements * chains * (draws + tune))
    if not isinstance(mp_ctx, BaseContext):
        or_none(one_of, "mp_ctx", mp_ctx, multiprocessing.get_all_start_methods())
    if client is not None:
        check_client(client)
        if path is not None:
            raise ValueError(
                "`store` is written by processes of this machine, but `client` runs the chains "
                "elsewhere. Leave one of them out."
            )
    one_of("chain_method", chain_method, CHAIN_METHODS)
    vectorized = chain_method == "vectorized"
    if vectorized and any(each is not None for each in (accuracy, path, client)):
        raise ValueError(
            '`chain_method="vectorized"` runs all chains in this process, once. Leave out '
            "`accuracy`, `store` and `client`."
        )
    shown = bool(progressbar) and not quiet
    with passes(client, shown), quiet_logging(quiet):
        groups, step = _groups_and_step(model, marginalize, step)
    sampled = model if groups is None else groups.model
    if accuracy is not None:
        check_accuracy(accuracy, step)
    if vectorized:
        check_vectorized(step)
    context = process_context(mp_ctx, on_jax=step.runs_on_jax, quiet=quiet)
    run = _Run(
        model=sampled,
        draws=draws,
        tune=tune,
        chains=chains,
        cores=min(cores, chains),
        generator=seeds,
        initvals=initvals if groups is None else groups.initial(initvals),
        variables=recorded_variables(model, names) if groups is None else None,
        progressbar=progressbar,
        quiet=quiet,
        discard_tuned_samples=discard_tuned_samples,
        idata_kwargs=converted,
        context=context,
        store=path,
        resume=resume,
        client=client,
        vectorized=vectorized,
    )

    made: list[DataTree] = []

    def draws_of(*arguments: Any, **settings: Any) -> tuple[DataTree, bool]:
        idata, interrupted = run.draws_of(*arguments, **settings)
        made.append(idata)
        return idata, interrupted

    def completed(idata: DataTree) -> DataTree:
        if groups is not None:
            seed = deepcopy(run.generator).spawn(chains + 1)[-1]
            with passes(client, shown), draws_kept(f"{quoted(groups.names)} could not be added"):
                idata = groups.completed(idata, names, seed, progressbar=shown, quiet=quiet)
        for name, variables in later.items():
            call = f"`pymc.compute_{name}(idata)`"
            what = f"`{name}` was not computed ({call} does it)"
            with draws_kept(what, errors=(Exception, KeyboardInterrupt)):
                AT_THE_END[name](idata, var_names=variables, model=model, progressbar=shown)
        return idata

    with quiet_logging(quiet):
        try:
            if accuracy is None:
                idata, _ = draws_of(step, checks=compute_convergence_checks)
            else:
                with draws_kept("`accuracy` could not be stated", made):
                    made.append(
                        sample_accurately(
                            draws_of, step, accuracy, sampled, checks=compute_convergence_checks
                        )
                    )
                idata = made[-1]
        except Exception as error:
            if (draws_so_far := vars(error).get("idata")) is not None:
                vars(error)["idata"] = completed(draws_so_far)
            raise
        return completed(idata)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Arguments of a run, with which several step methods can be run."""

    model: Model
    draws: int
    tune: int
    chains: int
    cores: int
    generator: np.random.Generator
    initvals: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
    variables: list[TensorVariable] | None
    progressbar: bool | str
    quiet: bool
    discard_tuned_samples: bool
    idata_kwargs: dict[str, Any]
    context: Any
    store: Path | None
    resume: bool
    client: Any
    vectorized: bool

    def draws_of(self, step: StochasticGradientStep, *, checks: bool) -> tuple[DataTree, bool]:
        """Draws of a step method, the same ones each time, and whether Ctrl-C ended the run.

        Raises
        ------
        ChainProcessError, KeyboardInterrupt
        """
        # A copy, since spawning counts in the generator.
        rngs = deepcopy(self.generator).spawn(self.chains)
        seeds = [rng.integers(2**30) for rng in rngs]  # as `pymc.sample` takes numbers of them
        points = make_initial_point_fns_per_chain(
            model=self.model, overrides=self.initvals, jitter_rvs=set(), chains=self.chains
        )
        jobs = [Job(rng, point(seed)) for rng, point, seed in zip(rngs, points, seeds, strict=True)]
        recorder = Recorder(self.model, jobs[0].point, self.variables)
        if not self.quiet:
            if self.client is not None:
                log.info("Sampling on a cluster (%d chains)", self.chains)
            elif self.vectorized:
                log.info("Vectorized sampling (%d chains, after one has tuned)", self.chains)
            else:
                several = "Multiprocess" if self.cores > 1 else "Sequential"
                plural = "s" * (self.cores > 1)
                log.info(
                    "%s sampling (%d chains in %d job%s)", several, self.chains, self.cores, plural
                )
            names = ", ".join(variable.name for variable in self.model.free_RVs)
            log.info("%s: [%s]", type(step).__name__, names)
        start = time.time()
        shown = False if self.quiet else self.progressbar
        bars = 1 if self.vectorized else self.chains
        bar = RunProgress(step, bars, self.draws, self.tune, shown)

        def tell_warnings(job: Job) -> None:
            told = [one for one in job.stats[-1]["warning"] if one is not None]
            log_warning_stats([{"warning": one} for one in told])

        def progress(number: int) -> None:
            job = jobs[number]
            tell_warnings(job)
            positions = [[stats["position"] for stats in other.stats] for other in jobs]
            bar.advance(number, job.done, job.stats[-1], positions)

        def result() -> DataTree:
            return whole_trace(
                recorder,
                jobs,
                model=self.model,
                tune=self.tune,
                t_sampling=time.time() - start,
                discard_tuned_samples=self.discard_tuned_samples,
                compute_convergence_checks=checks,
                idata_kwargs=self.idata_kwargs,
                quiet=self.quiet,
            )

        # Chains whose rows are in a source read them together, before processes begin.
        if self.client is None:
            new = [job.rng for job in jobs if not job.done]
            with set_up(bool(shown)):
                step.read_ahead(new, self.tune, self.draws)
        run = (step, jobs, self.tune, self.draws, progress)
        with quiet_logging(self.quiet), interrupts_noted() as interrupted:
            try:
                with self._store(step, jobs), bar:
                    for number, job in enumerate(jobs):
                        if job.done:  # The store has them.
                            progress(number)
                    if self.client is not None:
                        run_on_client(*run, self.client)
                    elif self.vectorized:
                        run_vectorized(step, jobs, self.tune, self.draws, partial(bar.advance, 0))
                        if jobs[0].done:
                            tell_warnings(jobs[0])
                    elif self.cores > 1:
                        run_in_processes(*run, self.cores, self.context)
                    else:
                        run_in_turn(*run)
            except Exception as error:
                if max(job.done for job in jobs) > self.tune:
                    vars(error)["idata"] = result()
                    error.add_note("Its attribute `idata` has the draws so far.")
                raise
            if interrupted and max(job.done for job in jobs) <= self.tune:
                raise KeyboardInterrupt(
                    "The run was interrupted before the first draw after tuning."
                )
            idata = result()
            sizes = idata["posterior"].sizes
            if interrupted and (sizes["chain"], sizes["draw"]) < (self.chains, self.draws):
                log.warning(
                    "Ctrl-C: the trace has %d of %d chains, with %d of %d draws each.",
                    sizes["chain"],
                    self.chains,
                    sizes["draw"],
                    self.draws,
                )
            return idata, bool(interrupted)

    def _store(
        self, step: StochasticGradientStep, jobs: Sequence[Job]
    ) -> AbstractContextManager[None]:
        """The store of the run while it is used, where there is one."""
        if self.store is None:
            return nullcontext()
        return stored(
            self.store,
            self.resume,
            step,
            jobs,
            model=self.model,
            generator=self.generator,
            tune=self.tune,
            draws=self.draws,
        )


def _groups_and_step(
    model: Model,
    choice: str | Sequence[str] | None,
    step: StochasticGradientStep | Callable[..., StochasticGradientStep],
) -> tuple[Groups | None, StochasticGradientStep]:
    """The groups to sample, None for the joint model, and the step method."""
    groups = groups_of(model, choice, step)
    if groups is None:
        if choice != AUTO or isinstance(step, StochasticGradientStep):
            return None, _made(model, step)
        groups, made = groups_in_need(model, step, partial(_made, model, step))
        if groups is None:
            return None, made
    return groups, _made(groups.model, groups.step)


def _made(
    model: Model, step: StochasticGradientStep | Callable[..., StochasticGradientStep]
) -> StochasticGradientStep:
    """The step method, made where a function is given.

    Raises
    ------
    TypeError, ModelError
    """
    if not (isinstance(step, StochasticGradientStep) or callable(step)):
        raise TypeError(
            "`step` should be a step method with gradients of pymc_sgmcmc or a function that makes "
            f"one, but got {step!r}. Use `pymc.sample` for other step methods."
        )
    is_made = isinstance(step, StochasticGradientStep)
    if not is_made and not accepts(step, model=model):
        raise TypeError(f"`step` should be a function of `model`, but {step!r} is not.")
    made = step if isinstance(step, StochasticGradientStep) else step(model=model)
    if not isinstance(made, StochasticGradientStep):
        raise TypeError(
            f"`step` should make a step method with gradients of pymc_sgmcmc, but made {made!r}. "
            "Use `pymc.sample` for other step methods."
        )
    _check_step(model, made)
    return made


def _check_step(model: Model, step: StochasticGradientStep) -> None:
    """Raise an error where a step method is not for all variables of the model."""
    # Models with variables of the same names have other data, so names do not suffice.
    foreign = [variable.name for variable in step.vars if variable not in model.value_vars]
    missing = [variable.name for variable in model.value_vars if variable not in step.vars]
    if foreign:
        raise ModelError(
            f"`step` was made for another model: its {quoted(foreign)} are not of this one. Make "
            "it inside of `with model:`."
        )
    if missing:
        raise ModelError(
            f"`step` should have all variables of the model, but lacks {quoted(missing)}. "
            "`pymc.sample` takes several step methods."
        )


def _unknown(name: str) -> TypeError:
    """The error of an argument that `sample` has not, with where to give it."""
    instead = ""
    if name in signature(SGLDCV).parameters:
        instead = f"Give it to the step method: `step=functools.partial(SGLDCV, {name}=...)`."
    elif name in signature(pm.sample).parameters:
        instead = f"`pymc.sample(step=SGLDCV(), {name}=...)` does."
    return unknown_argument("sample", name, signature(sample).parameters, instead)


def _check_initvals(model: Model, initvals: Any, chains: int) -> None:
    """Refuse initial values that are not values of variables of the model, for each chain.

    Raises
    ------
    TypeError, ValueError
    """
    if initvals is None:
        return
    of_chains = [initvals] * chains if isinstance(initvals, Mapping) else initvals
    if (
        not isinstance(of_chains, Sequence)
        or len(of_chains) != chains
        or not all(values is None or isinstance(values, Mapping) for values in of_chains)
    ):
        raise TypeError(
            f"`initvals` should be a mapping from names to values, or one for each of the {chains} "
            f"chains, but got {initvals!r}."
        )
    free = {variable.name for variable in (*model.free_RVs, *model.value_vars)}
    given = [name for values in of_chains for name in values or ()]
    unknown = [name for name in given if getattr(name, "name", name) not in free]
    if unknown:
        raise ValueError(
            f"`initvals` should have names of free variables, of "
            f"{quoted(variable.name for variable in model.free_RVs)}, but got {quoted(unknown)}."
        )
    try:
        functions = make_initial_point_fns_per_chain(
            model=model, overrides=initvals, jitter_rvs=set(), chains=chains
        )
        points = [function(0) for function in functions]
    except Exception as error:
        raise ValueError(
            f"`initvals` should have a value for each variable that it names, but from "
            f"{initvals!r} PyMC makes none: {error}"
        ) from error
    for name, expected in model.initial_point().items():
        for point in points:
            if np.shape(point[name]) != np.shape(expected) or not np.isfinite(point[name]).all():
                raise ValueError(
                    f"`initvals` should have finite values of shape {np.shape(expected)} for "
                    f"`{name}`, but give {point[name]!r}."
                )


def _wanted(
    model: Model, names: list[str] | None, idata_kwargs: Any
) -> tuple[dict[str, list[str] | None], dict[str, Any]]:
    """Functions of the draws to compute at the end, of all or some variables, and other arguments.

    Raises
    ------
    TypeError, ValueError
        Where they cannot be computed from the model and the variables that are recorded.
    """
    if not isinstance(idata_kwargs, Mapping):
        raise TypeError(
            "`idata_kwargs` should be a mapping of arguments of `pymc.to_inference_data`, such as "
            f"{{'coords': {{...}}}}, but got {idata_kwargs!r}."
        )
    later: dict[str, list[str] | None] = {}
    for name in AT_THE_END:
        asked = idata_kwargs.get(name, False)
        if asked is None or asked is False:
            continue
        variables = model.observed_RVs if name == "log_likelihood" else model.unobserved_RVs
        known = [variable.name for variable in variables]
        label = f'idata_kwargs["{name}"]'
        later[name] = None if asked is True else names_among(label, asked, known)
        missing = [v.name for v in model.free_RVs if v.name not in (names or [v.name])]
        if missing:
            raise ValueError(
                f"`idata_kwargs={{'{name}': True}}` needs all free variables, but `var_names` "
                f"leaves out {quoted(missing)}. Add them to `var_names`."
            )
    return later, {key: value for key, value in idata_kwargs.items() if key not in AT_THE_END}
