"""Consensus Monte Carlo: shards of the rows are sampled apart, and their draws combined."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import pymc as pm
import xarray as xr
from pymc.model import Model
from rich.progress import Progress
from xarray import DataTree

from pymc_sgmcmc.checks import one_of, or_none, quoted, whole_number
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.machines.combine import (
    BATCHES,
    MOST_COORDINATES,
    average,
    gaussian,
    mean_errors,
    moments,
    semiparametric,
    semiparametric_errors,
)
from pymc_sgmcmc.machines.dealt_rows import posterior_to_deal_out
from pymc_sgmcmc.machines.shards import POSITION, ShardDensity, deal_out
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.position import given_model
from pymc_sgmcmc.record import DIMENSION, LARGEST_MEAN_ERROR
from pymc_sgmcmc.sampling.groups import MakeStep
from pymc_sgmcmc.sampling.run import sample
from pymc_sgmcmc.sampling.trace import groups_of_positions
from pymc_sgmcmc.sampling.workers import default_cores
from pymc_sgmcmc.seeds import generator
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.pymc_hook import log
from pymc_sgmcmc.step_methods.sgld import SGLDCV
from pymc_sgmcmc.trace_tools.bias import bias_warnings
from pymc_sgmcmc.trace_tools.diagnostics import ess_and_r_hat
from pymc_sgmcmc.trace_tools.verdict import of_convergence

GAUSSIAN, AVERAGE, SEMIPARAMETRIC = "gaussian", "average", "semiparametric"
"""These are the ways to combine the draws of the shards."""

NUTS = "nuts"
"""With this `step` the shards are sampled by `pymc.sample`."""

SHARDS = "consensus_shards"
"""This group of a trace has moments and diagnostics of the shards."""

NOT_CONVERGED = "Not converged"
"""A report of `bias_warnings` on what has not converged begins with these words."""


def consensus(
    model: Model,
    parts: int = 8,
    combine: str = GAUSSIAN,
    *,
    draws: int = 1000,
    tune: int = 1000,
    chains: int = 4,
    step: MakeStep | str = SGLDCV,
    rows: str | Sequence[str] | None = None,
    random_seed: Any = None,
    cores: int | None = None,
    client: Any = None,
    progressbar: bool = True,
) -> DataTree:
    r"""Sample shards of the rows apart, and combine their draws to those of the posterior.

    The rows are dealt out at random to S shards of equal size. The posterior of a shard has the
    prior to the power 1 / S, so that their product is the posterior of all rows:

    .. math:: \pi(\theta) \propto \prod_{s=1}^S \pi_s(\theta), \quad
        \pi_s(\theta) = p(\theta)^{1/S} \prod_{i \in s} p(x_i \mid \theta).

    It is so on the unconstrained space, where the draws are combined: p has the Jacobians of all
    transforms. Shards need nothing of each other, so each can be sampled on a machine of its own.

    Parameters
    ----------
    model : pymc.Model
        An ordinary model on all rows, with continuous variables.
    parts : int
        The number of shards S.
    combine : {"gaussian", "average", "semiparametric"}
        How draws are combined. See below.
    draws, tune : int
        Draws of each chain of each shard to keep, and to tune with before them. The result has as
        many chains and draws as one shard.
    chains : int
        Number of chains of a shard.
    cores : int, optional
        Number of processes that run them. The default is that of `sample`, and 1 with a client.
    step : "nuts", or a class or function that makes a step method of this package
        The sampler of the shards: what `sample` takes, but for a step method that was made before,
        or "nuts" for `pymc.sample`.
    rows : str or sequence of str, optional
        Which data run over the rows, as of `Posterior`, where that is ambiguous. The others are of
        all shards, with the power 1 / S.
    random_seed : int, sequence of int, or numpy.random.Generator, optional
    client : Dask client, or another executor, optional
        Its method ``submit(function, argument)`` runs a shard elsewhere. Without it the shards run
        one after the other.
    progressbar : bool
        Whether to show how many shards are done.

    Returns
    -------
    xarray.DataTree
        With the combined draws in ``posterior``, deterministics included, and their unconstrained
        positions in ``sample_stats``. The group ``consensus_shards`` has rows, means, standard
        deviations, R-hat and effective draws of each shard, ``mean_error`` (see below), and the
        settings as attributes.

    Raises
    ------
    TypeError, ValueError
        Where an argument cannot be used.
    ModelError
        Where the rows cannot be dealt out, as with discrete variables, `pymc.Minibatch` or groups
        as rows, or where a shard has fewer rows than there are coordinates.

    See Also
    --------
    sample : samples the posterior of all rows by minibatches.
    polish : moves combined draws to the posterior by exact steps, and shows their error.

    Notes
    -----
    **"gaussian"** draws independently from the product of Gaussians with the moments of the shards,
    of precision :math:`\sum_s \Sigma_s^{-1}`. **"average"** (Scott et al. 2016) averages a draw of
    each shard, with the weights :math:`\Sigma_s^{-1}`. Both are exact for Gaussian shards, and
    otherwise in the limit of many rows *a shard*. **"semiparametric"** (Neiswanger, Wang and Xing
    2014) multiplies Gaussians times kernel estimates of what is not Gaussian, and samples the
    product. It is consistent for many draws, but needs many more of them for each coordinate and
    each shard. It takes at most 50 coordinates, and is good for a few.

    **Error of the means.** Means of skewed shards are off their modes. For "gaussian" and
    "average", ``mean_error`` is the error of the combined means to first order, in standard
    deviations, computed from the skewness of the draws and the distances of the shards, and
    ``mean_error_noise`` its Monte Carlo error. What first order leaves out has the size of the
    attribute ``mean_error_second_order``. For "semiparametric", ``mean_error`` is a standard error,
    from quarters of the draws that are combined apart. Large errors are logged.

    Scott et al. take the power of the prior on the constrained space, which is the same product.
    Priors with heavy tails may be improper to the power 1 / S, and a shard then rests on its rows.

    References
    ----------
    Scott, Blocker, Bonassi, Chipman, George and McCulloch (2016), Bayes and big data: the consensus
    Monte Carlo algorithm. Neiswanger, Wang and Xing (2014), Asymptotically exact, embarrassingly
    parallel MCMC.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sgmcmc import consensus
    >>> rng = np.random.default_rng(1)
    >>> x = rng.normal(size=2000)
    >>> y = 1 + 2 * x + rng.normal(size=2000)
    >>> with pm.Model() as model:
    ...     line = pm.Normal("line", shape=2)
    ...     _ = pm.Normal("y", line[0] + line[1] * x, 1.0, observed=y)
    >>> run = {"draws": 200, "tune": 100, "chains": 2, "cores": 1, "progressbar": False}
    >>> idata = consensus(model, parts=2, random_seed=1, **run)
    >>> idata["posterior"]["line"].mean(("chain", "draw")).round(1).values
    array([1., 2.])
    """
    model = given_model(model)
    combine = one_of("combine", combine, (GAUSSIAN, AVERAGE, SEMIPARAMETRIC))
    parts, draws = whole_number("parts", parts, 2), whole_number("draws", draws, 4)
    tune, chains = whole_number("tune", tune, 0), whole_number("chains", chains, 1)
    if cores is None:
        cores = 1 if client is not None else default_cores()
    cores = whole_number("cores", cores, 1)
    _check_step(step)
    or_none(_check_client, "client", client)
    discrete = [value.name for value in model.value_vars if not value.dtype.startswith("float")]
    if discrete:
        raise ModelError(
            f"`consensus` combines continuous variables, but {quoted(discrete)} "
            f"{'is' if len(discrete) == 1 else 'are'} discrete. Marginalise them out."
        )
    posterior = posterior_to_deal_out(model, rows, by="consensus", to="shards")
    _check_sizes(posterior, parts, combine, chains * draws)
    dealing, *seeds, combining = generator("random_seed", random_seed).spawn(parts + 2)
    numbers = deal_out(posterior.n_rows, parts, dealing)
    density = ShardDensity.of(posterior, parts)
    tasks = [
        _Task(
            density=density,
            rows=posterior.take(part),
            step=step,
            options={
                "draws": draws,
                "tune": tune,
                "chains": chains,
                "cores": min(cores, chains),
                "random_seed": int(seed.integers(2**30)),
            },
        )
        for part, seed in zip(numbers, seeds, strict=True)
    ]
    begin = time.time()
    shards = list(_results(tasks, client, progressbar))
    seconds = time.time() - begin
    positions = np.stack([shard.positions for shard in shards])
    for number, shard in enumerate(shards):
        for message in shard.messages:
            log.warning("Shard %d: %s", number, message)
    group = _shards_group(positions, posterior.labels)
    group["rows"] = ("shard", [len(part) for part in numbers])
    if combine == SEMIPARAMETRIC:
        combined = semiparametric(positions, combining)
        _warn_of_convergence(
            f'combine="{SEMIPARAMETRIC}"', ess_and_r_hat(combined), posterior.labels
        )
        group["mean_error"] = (DIMENSION, semiparametric_errors(positions, combining))
        _warn_of_kernels(group["mean_error"].values)
    else:
        combined = average(positions) if combine == AVERAGE else gaussian(positions, combining)
        _add_mean_error(group, positions)
    group.attrs |= {
        "parts": parts,
        "combine": combine,
        "step": step if isinstance(step, str) else _name_of(step),
        "draws": draws,
        "tune": tune,
        "chains": chains,
        "seconds": seconds,
    }
    groups = groups_of_positions(model, posterior.layout, combined)
    return DataTree.from_dict(groups | {SHARDS: group})


# --- Checks -----------------------------------------------------------------------------------


def _check_client(name: str, client: Any) -> None:
    """Refuse a client that takes no tasks.

    Raises
    ------
    TypeError
    """
    if isinstance(client, type) or not callable(getattr(client, "submit", None)):
        raise TypeError(
            f"`{name}` should have a method `submit`, as a Dask client has, but got {client!r}."
        )


def _check_step(step: Any) -> None:
    if isinstance(step, StochasticGradientStep):
        raise TypeError(
            "`step` was made for the model of all rows, but each shard has its own. Pass its "
            f"class, `step={type(step).__name__}`, or a function that makes it."
        )
    if not (callable(step) or step == NUTS):
        raise TypeError(
            f'`step` should be "{NUTS}", or a class or function that makes a step method of '
            f"pymc_sgmcmc, but got {step!r}."
        )
    if (getattr(step, "keywords", None) or {}).get("rows") is not None:
        raise ValueError(
            "`consensus` deals out the rows of the model, but `step` has `rows=`. Leave it out "
            "there, and give names of data to `consensus(rows=...)`."
        )


def _name_of(step: MakeStep) -> str:
    return getattr(getattr(step, "func", step), "__name__", repr(step))


def _check_sizes(posterior: Posterior, parts: int, combine: str, draws: int) -> None:
    """Refuse shards of too few rows or draws, and too many coordinates.

    Raises
    ------
    ModelError, ValueError
    """
    d, n_rows = posterior.dimension, posterior.n_rows
    fewest = max(d, 2)
    if n_rows // parts < fewest:
        raise ModelError(
            f"`parts={parts}` leaves {n_rows // parts} rows to a shard, but the model has {d} "
            f"coordinates, so that a shard would rest on its prior. Take at most "
            f"{n_rows // fewest} parts"
            + ("." if n_rows // fewest > 1 else ", which is none: use `sample`.")
        )
    fewest = 2 * d * (BATCHES if combine == SEMIPARAMETRIC else 1)
    if draws < fewest:
        raise ValueError(
            f"A shard has {draws} draws, too few for a covariance of {d} coordinates. Raise "
            f"`draws` or `chains` to {fewest} draws of all chains, better ten times as many."
        )
    if combine == SEMIPARAMETRIC and d > MOST_COORDINATES:
        raise ValueError(
            f'combine="{SEMIPARAMETRIC}" takes at most {MOST_COORDINATES} coordinates, but the '
            f'model has {d}. Take combine="{AVERAGE}", or `sample` where shards are not Gaussian.'
        )


# --- The shards -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """The run of a shard."""

    density: ShardDensity
    rows: list[np.ndarray]
    step: MakeStep | str
    options: dict[str, Any]


@dataclass(frozen=True)
class _Shard:
    """Positions of a shard, (chains, draws, d), and what its run reported."""

    positions: np.ndarray
    messages: list[str]


def _results(tasks: Sequence[_Task], client: Any, progressbar: bool) -> Iterable[_Shard]:
    """Draws of the shards in their order."""
    with Progress(disable=not progressbar) as progress:
        bar = progress.add_task("Shards", total=len(tasks))
        futures = [
            None if client is None else client.submit(_run_pickled, cloudpickle.dumps(task))
            for task in tasks
        ]
        for number, (task, future) in enumerate(zip(tasks, futures, strict=True)):
            try:
                result = _run(task) if future is None else future.result()
            except BaseException as error:
                error.add_note(f"This was in shard {number} of {len(tasks)}.")
                for other in filter(None, futures):
                    other.cancel()
                raise
            progress.advance(bar)
            yield result


def _run_pickled(task: bytes) -> _Shard:
    return _run(cloudpickle.loads(task))


def _run(task: _Task) -> _Shard:
    """Run a shard.

    Raises
    ------
    KeyboardInterrupt
        Where Ctrl-C ended the run before its last draw.
    """
    pymc_log = logging.getLogger("pymc")
    level = pymc_log.level
    pymc_log.setLevel(max(level, logging.WARNING))  # Each shard would say the same.
    model = task.density.model(task.rows)
    options = {**task.options, "progressbar": False, "compute_convergence_checks": False}
    try:
        if isinstance(task.step, str):
            with model:
                idata = pm.sample(**options)
            messages = []
            if diverging := int(idata["sample_stats"]["diverging"].sum()):
                messages = [f"NUTS had {diverging} divergences after tuning."]
        else:
            idata = sample(step=task.step, model=model, marginalize=None, **options)
            try:
                # What has not converged is reported for all samplers alike.
                found = bias_warnings(idata, model)
                messages = [text for text in found if not text.startswith(NOT_CONVERGED)]
            except ValueError as error:
                messages = [f"The bias of the run is not known. {error}"]
    finally:
        pymc_log.setLevel(level)
    positions = np.asarray(idata["posterior"][POSITION], dtype=float)
    if positions.shape[:2] != (options["chains"], options["draws"]):
        raise KeyboardInterrupt("The run of a shard was interrupted before its last draw.")
    return _Shard(positions, messages)


def _shards_group(positions: np.ndarray, labels: Sequence[str]) -> xr.Dataset:
    """Moments and diagnostics of the shards. What has not converged is reported.

    Raises
    ------
    ValueError
        Where draws are not finite or do not vary.
    """
    for number, of_shard in enumerate(positions):
        spread = of_shard.std((0, 1))
        bad = ~np.isfinite(spread) | (spread == 0)
        if bad.any():
            raise ValueError(
                f"The draws of `{labels[int(np.argmax(bad))]}` in shard {number} do not vary or "
                "are not finite, so that they cannot be combined. Sample longer, or take fewer "
                "parts."
            )
    ess, r_hat = map(np.stack, zip(*map(ess_and_r_hat, positions), strict=True))
    for number, of_shard in enumerate(zip(ess, r_hat, strict=True)):
        _warn_of_convergence(f"Shard {number}", of_shard, labels)
    means, covariances = moments(positions)
    dims = ("shard", DIMENSION)
    return xr.Dataset(
        {
            "mean": (dims, means),
            "sd": (dims, np.sqrt(np.diagonal(covariances, axis1=1, axis2=2))),
            "r_hat": (dims, r_hat),
            "ess": (dims, ess),
        },
        coords={"shard": np.arange(len(positions)), DIMENSION: list(labels)},
    )


def _add_mean_error(group: xr.Dataset, positions: np.ndarray) -> None:
    """Add the error of the combined means, and warn where it is large."""
    errors, noise, second_order = mean_errors(positions, float(group["ess"].min()))
    group["mean_error"] = (DIMENSION, errors)
    group["mean_error_noise"] = (DIMENSION, noise)
    group.attrs["mean_error_second_order"] = second_order
    large = np.abs(errors) > np.maximum(LARGEST_MEAN_ERROR, 3 * noise)
    if large.any() or second_order > LARGEST_MEAN_ERROR:
        worst = int(
            np.argmax(np.where(large, np.abs(errors), 0) if large.any() else np.abs(errors))
        )
        log.warning(
            "Shards are skewed, so that combined means are not right: that of `%s` is off by "
            "about %.2f standard deviations, and what this leaves out is up to %.2f. Take fewer "
            'parts, `sample`, or combine="%s" where there are few coordinates.',
            *(group[DIMENSION].values[worst], errors[worst], second_order, SEMIPARAMETRIC),
        )


def _warn_of_kernels(errors: np.ndarray) -> None:
    """Warn where the kernel estimates of the shards are rough."""
    typical = float(np.sqrt(np.mean(errors**2)))
    if typical > LARGEST_MEAN_ERROR:
        log.warning(
            "The kernel estimates of the shards are rough: the combined means have standard errors "
            "of about %.2f standard deviations, but should have at most %g. Raise `draws`, take "
            "fewer parts, or `sample`.",
            *(typical, LARGEST_MEAN_ERROR),
        )


def _warn_of_convergence(
    what: str, ess_and_r_hat: tuple[np.ndarray, np.ndarray], labels: Sequence[str]
) -> None:
    """Warn where draws have not converged, whose error would be that of the combination."""
    said = of_convergence(*ess_and_r_hat, tuple(labels), len(labels))
    if said is not None:
        log.warning(
            "%s has not converged: %s Raise `tune` or `draws`, or take fewer parts.", what, said
        )
