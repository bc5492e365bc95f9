"""Exact steps from the draws of a run: polished draws, and a test of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
from rich.progress import Progress
from scipy import linalg
from threadpoolctl import threadpool_limits
from xarray import DataTree

from pymc_sgmcmc.checks import quoted, whole_number
from pymc_sgmcmc.limits import available_cpus
from pymc_sgmcmc.marginal import marginalize
from pymc_sgmcmc.matrices import Dense, Matrix
from pymc_sgmcmc.polishing.chains import FIRST_LOOK, MOST_DENSE, Run, advance_until_still, root_of
from pymc_sgmcmc.polishing.density import FullDensity
from pymc_sgmcmc.polishing.modes import find_modes, prior_starts
from pymc_sgmcmc.polishing.report import make_report
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.position import given_model
from pymc_sgmcmc.record import (
    ACCURACY,
    QUADRATURE_POINTS,
    integrated_out,
    settings_of,
    stored_local,
    stored_rows,
)
from pymc_sgmcmc.sampling.trace import groups_of_positions
from pymc_sgmcmc.seeds import generator
from pymc_sgmcmc.trace_tools.affine_map import calibrate
from pymc_sgmcmc.trace_tools.gradients import check_same_model, unconstrained_draws
from pymc_sgmcmc.trace_tools.reader import (
    check_constant,
    check_finite,
    check_trace,
    every_nth,
    has_gradients,
    read_positions,
    read_run,
)
from pymc_sgmcmc.tuning import VARIANCE_INFLATION

FEWEST = 20
"""At least so many chains are needed to state an error from their spread."""

MOST_ELEMENTS = 100_000_000
"""The states of the exact chains have at most this many elements, 0.8 GB. Their gradients take as
much, and their comparison several times as much memory."""

UNRELATED = 0.2
"""States of a chain are kept so far apart that the correlation of no coordinate is larger."""

COPIED = ("observed_data", "constant_data")
"""These groups of the trace are those of the polished draws too."""


@dataclass(frozen=True)
class Polished:
    """Polished draws, and the report on the run that they began with.

    Attributes
    ----------
    idata : xarray.DataTree
        Draws of the exact chains, with the groups `posterior` and `sample_stats`. A chain has the
        draws of all exact chains that began in this chain of the run.
    report : pandas.DataFrame
        A row a coordinate, see `polish`.
    passes : int
        How many times all rows were read, all chains together. The searches for other modes read a
        subsample, and all rows only where they have found one.
    """

    idata: DataTree
    report: pd.DataFrame
    passes: int

    @property
    def verdict(self) -> str:
        """Verdict on the run: "ok", "off", "not converged" or "cannot tell"."""
        return self.report.attrs["run"]


def polish(
    idata: DataTree,
    model: pm.Model | None = None,
    draws: int = 200,
    *,
    passes: int = 300,
    modes: bool = True,
    random_seed: Any = None,
    cores: int | None = None,
    progressbar: bool = True,
) -> Polished:
    r"""Exact steps from the draws of a run: polished draws, and a test of the run.

    From `draws` draws of the run, evenly spaced over its chains, begin as many chains of the
    Metropolis-adjusted Langevin algorithm, with the log density of *all* rows:

    .. math::
        \theta^* = \theta + \tfrac{h}{2} M \nabla(\theta) + N(0, h M), \quad
        \text{accepted with probability } \min\left\{1,
            \frac{\pi(\theta^*)\, q(\theta \mid \theta^*)}
                 {\pi(\theta)\, q(\theta^* \mid \theta)}\right\}.

    M is the covariance of the run, calibrated by its gradients where `stein_calibrate` can, and h
    follows the acceptance rate of all chains together. Where the run has the law of the posterior,
    exact chains keep that law, whatever h and M are. Where it has not, they move away from it. So
    they show what no diagnosis of stored gradients sees: an error of the mean, a shape that is far
    from Gaussian, and rows that the run did not have. The chains end when their law no longer
    moves.

    **The test.** Mean, standard deviation and five quantiles of each coordinate are compared
    between all draws of the run and the later part of the exact chains. How much of its start a
    chain still remembers is estimated by regression, and the shift is that to the fixed point of
    the regression. A shift counts where it is larger than what was accepted, beyond doubt: by
    Bonferroni's bound, at most one in a hundred right runs has any such shift. Accepted are a shift
    of the mean of 0.1 standard deviations, the stated `bias` of the variance (5 % where the run
    states none), and the quantiles of a Gaussian with both errors. For a run of ``sample`` with an
    `accuracy`, the bias is that of a standard deviation which is off by the accuracy.

    **Modes that no chain reached** are found neither by the run nor by exact steps. So searches
    begin at draws of the prior and at points far from those of the run. An end counts as another
    mode where no exact chain has been as far, where its mass by Laplace's approximation is at least
    1 % of that of the run, and where exact chains that begin there stay.

    **Cost.** A pass is one evaluation of all rows for all chains together, by products of matrices
    where rows enter by a matrix of predictors. A run that is right takes about 25. A million
    rows, 20 coefficients and 200 draws take about two seconds a pass on one core.

    Parameters
    ----------
    idata : xarray.DataTree
        Trace with all free variables of the model, of any sampler. It is not changed.
    model : pymc.Model, optional
        Model of the trace. The default is the model of the context. All of its free variables
        should be continuous. Variables that `sample` has integrated out are integrated out here
        too, and `recover` adds them to the polished draws.
    draws : int
        Number of exact chains. Errors fall with its square root.
    passes : int
        Largest number of transitions of the exact chains, at least 24. They are fewer where the
        states would have more than 1e8 elements. Where the law still moves then, the report says
        so.
    modes : bool
        Whether to search for other modes, for at most 500 coordinates.
    random_seed : int, sequence of int, or numpy.random.Generator, optional
    cores : int, optional
        Number of threads that evaluate the rows. The draws do not depend on it.
    progressbar : bool

    Returns
    -------
    Polished
        Its ``report`` has a row for each coordinate of the unconstrained position: ``mean`` and
        ``sd`` of the run; ``polished_mean`` and ``polished_sd``; ``mean_shift`` from the run to the
        posterior, in posterior standard deviations; ``log_sd_shift`` of the logarithm of the
        standard deviation; ``quantile_shift`` of the ``quantile`` that moved most; their standard
        errors, with ``_se``; ``memory``, the part of its start that a chain remembers; ``ess_bulk``
        and ``r_hat`` of the run; and ``verdict``: "mean off", "variance too large", "variance too
        small", "quantiles off", "not converged" (of the run), "cannot tell" or "ok". Quantiles of a
        constrained variable that is a function of one coordinate are those of the coordinate. The
        ``attrs`` have the ``verdict`` on the whole run in words, ``run`` in one word, ``passes``,
        ``gradients``, the mean ``acceptance``, ``moving``, and ``modes``, their positions.

    Raises
    ------
    ValueError
        Where the model is not that of the trace, where the trace has too few draws, draws that are
        not finite, or local variables that were sampled apart, and where the states of the exact
        chains would not fit in memory.
    ModelError
        Where the model is not one that this package samples.

    References
    ----------
    G. O. Roberts and R. L. Tweedie (1996). Exponential convergence of Langevin distributions
    and their discrete approximations. *Bernoulli* 2, 341-363.

    Examples
    --------
    The draws are those of a posterior with another mean.

    >>> import numpy as np, pymc as pm, xarray as xr
    >>> with pm.Model() as model:
    ...     mean = pm.Normal("mean", 0, 10)
    ...     _ = pm.Normal("y", mean, 1.0, observed=np.full(100, 2.0))
    >>> draws = 2.05 + 0.1 * np.random.default_rng(1).normal(size=(4, 500))
    >>> posterior = xr.Dataset({"mean": (("chain", "draw"), draws)})
    >>> idata = xr.DataTree.from_dict({"posterior": posterior})
    >>> polished = polish(idata, model, random_seed=1, progressbar=False)
    >>> polished.verdict, polished.report.loc["mean", "verdict"]
    ('off', 'mean off')
    >>> polished.report.loc["mean", "mean_shift"].round(1)
    np.float64(-0.5)
    """
    check_trace(idata)
    model = given_model(model)
    draws, passes = whole_number("draws", draws, FEWEST), whole_number("passes", passes, FIRST_LOOK)
    threads = available_cpus() if cores is None else whole_number("cores", cores, 1)
    rng = generator("random_seed", random_seed)
    model, posterior, positions = _read(idata, model)
    chosen = _evenly_spaced(positions, draws)
    starts = chosen.reshape(-1, posterior.dimension)
    passes = min(passes, _most_passes(starts))
    density = FullDensity(posterior, starts, threads)
    # Threads of the linear algebra would wait for those that evaluate the rows.
    with threadpool_limits(limits=1), Progress(disable=not progressbar) as progress:
        task = progress.add_task("Polishing", total=passes)
        run = advance_until_still(
            density,
            starts,
            _root(idata, positions),
            passes,
            rng,
            advanced=lambda: progress.advance(task),
        )
        progress.update(task, total=run.transitions)
    gradients = (1 + run.transitions) * len(starts)
    others = None
    if modes:
        others = find_modes(
            density,
            run.positions,
            run.log_densities,
            prior_starts(model, posterior, int(rng.integers(2**31))),
            posterior.labels,
            rng,
        )
    stated = _stated_bias(idata)
    report = make_report(
        posterior.labels, positions, starts, run.positions, stated, run.moving, others
    )
    report.attrs |= {
        "passes": density.passes,
        "gradients": gradients,
        "acceptance": float(run.acceptance.mean()),
        "modes": [mode.position for mode in others or ()],
    }
    polished = _trace(idata, model, posterior, run, len(chosen))
    return Polished(polished, report, density.passes)


# --- Reading --------------------------------------------------------------------------------


def _read(idata: DataTree, model: pm.Model) -> tuple[pm.Model, Posterior, np.ndarray]:
    """The model that was sampled, its posterior, and the positions, shape (chains, draws, d).

    Raises
    ------
    ValueError
    """
    settings = settings_of(idata)
    if local := stored_local(settings):
        raise ValueError(
            f"`polish` moves all variables together, but the run has sampled {quoted(local)} by "
            "`LocalSampling`. Polish a run on `marginalize(model, ...)` instead."
        )
    names = integrated_out(settings)
    if missing := [name for name in names if name not in model.named_vars]:
        raise ValueError(
            f"`model` should be the one that was given to `sample`, with {quoted(missing)}, which "
            "`sample` has integrated out, but it lacks them. Pass that model."
        )
    joint = model
    if names:
        model = marginalize(model, names, points=settings.get(QUADRATURE_POINTS))
    posterior = Posterior(model, rows=stored_rows(settings))
    check_same_model(idata, joint, posterior.labels)
    positions = read_positions(idata)
    if positions is None:
        positions = unconstrained_draws(idata, model, posterior)
    check_finite(tuple(range(len(positions))), positions)
    if positions.shape[0] * positions.shape[1] < FEWEST:
        raise ValueError(
            f"The trace should have at least {FEWEST} draws, but has {positions.shape[0]} chains "
            f"of {positions.shape[1]}. Sample again with more `draws`."
        )
    check_constant(every_nth(positions), posterior.labels)
    return model, posterior, positions


def _stated_bias(idata: DataTree) -> float:
    """Relative error of the variance that the user accepts."""
    if ACCURACY in idata.children:  # The accuracy is that of standard deviations.
        return 2 * float(idata[ACCURACY].attrs["accuracy"])
    return float(settings_of(idata).get("bias", VARIANCE_INFLATION))


def _evenly_spaced(positions: np.ndarray, count: int) -> np.ndarray:
    """About so many draws, evenly spaced over chains, shape (chains, draws, d)."""
    chains, draws, _ = positions.shape
    of_chain = min(draws, -(-count // chains))
    return positions[:, ((np.arange(of_chain) + 0.5) * draws / of_chain).astype(int)]


def _most_passes(starts: np.ndarray) -> int:
    """How many transitions fit in memory.

    Raises
    ------
    ValueError
        Where they are fewer than the first look at the law takes.
    """
    most = MOST_ELEMENTS // starts.size
    if most < FIRST_LOOK:
        count, d = starts.shape
        raise ValueError(
            f"`draws` should be at most {MOST_ELEMENTS // FIRST_LOOK // d} with {d} coordinates, "
            f"so that the states of the exact chains fit in memory, but got {count}."
        )
    return most


def _root(idata: DataTree, positions: np.ndarray) -> Matrix:
    """A root of the covariance of the run, calibrated where that can be done."""
    if positions.shape[-1] <= MOST_DENSE and has_gradients(idata):
        try:
            covariance = calibrate(read_run(idata)).covariance
            return Dense(linalg.cholesky(covariance, lower=True))
        except (ValueError, linalg.LinAlgError):
            pass
    return root_of(every_nth(positions))


# --- Writing --------------------------------------------------------------------------------


def _trace(
    idata: DataTree, model: pm.Model, posterior: Posterior, run: Run, chains: int
) -> DataTree:
    """The polished draws as a trace with the chains of the run."""
    times = _apart(run.positions)
    count = run.positions.shape[1] // chains

    def arranged(values: np.ndarray) -> np.ndarray:
        """Values, (transitions, n, ...), as (chains, draws, ...), by transitions in each chain."""
        parts = values[times].reshape(len(times), chains, count, *values.shape[2:])
        return np.moveaxis(parts, 1, 0).reshape(chains, len(times) * count, *values.shape[2:])

    groups = groups_of_positions(
        model,
        posterior.layout,
        arranged(run.positions),
        lp=arranged(run.log_densities),
        acceptance_rate=arranged(run.acceptance),
    )
    # PyMC's attributes have the time of day.
    groups = {name: groups[name].drop_attrs() for name in ("posterior", "sample_stats")}
    groups |= {name: idata[name].to_dataset() for name in COPIED if name in idata.children}
    return DataTree.from_dict(groups, name=idata.name)


def _apart(positions: np.ndarray) -> np.ndarray:
    """Numbers of transitions, the last one included, between which chains forget their states."""
    length = len(positions)
    scaled = (positions - positions.mean((0, 1))) / np.maximum(positions.std((0, 1)), 1e-300)
    for lag in range(1, length // 2):
        correlation = (scaled[lag:] * scaled[:-lag]).mean((0, 1))
        if correlation.max() <= UNRELATED:
            return np.arange(length - 1, -1, -lag)[::-1]
    return np.array([length - 1])
