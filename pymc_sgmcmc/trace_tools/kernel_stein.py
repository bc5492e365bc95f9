"""Kernel Stein discrepancy of a trace, and the draws that make it small."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
from xarray import DataArray, DataTree

from pymc_sgmcmc.checks import import_optional, whole_number
from pymc_sgmcmc.record import MOMENTS, groups_of, is_of_draws
from pymc_sgmcmc.stein import Estimate
from pymc_sgmcmc.stein import kernel_stein_discrepancy as discrepancy_of_arrays
from pymc_sgmcmc.trace_tools.gradients import gradients
from pymc_sgmcmc.trace_tools.reader import (
    StoredRun,
    check_mean_gradient,
    every_nth,
    read_run,
    root_of_draws,
)
from pymc_sgmcmc.trace_tools.variables import check_posterior, posterior_of
from pymc_sgmcmc.trace_tools.whitening import Whitening

MOST_DRAWS = 1_000
"""The discrepancy is computed from at most this number of draws by default. All pairs of draws are
taken, so that time and memory grow with its square."""

MOST_CANDIDATES = 50_000
"""Stein thinning chooses among at most this number of draws. Each draw that it chooses takes a time
proportional to this number."""

DRAWS_A_COORDINATE = 10
"""Covariances between coordinates count as zero where a trace has fewer draws for each coordinate,
since their estimates are mostly noise then."""


def kernel_stein_discrepancy(idata: DataTree, *, draws: int = MOST_DRAWS) -> Estimate:
    r"""Squared kernel Stein discrepancy between the draws of a trace and the posterior.

    This is the U-statistic with the inverse multiquadric kernel
    :math:`(1 + \|u - v\|^2)^{-1/2}` over pairs of evenly spaced draws of all chains. The
    coordinates u are those in which the draws have unit covariance. The expectation is zero for
    draws of the posterior and positive for other draws, also where these have the right mean and
    variance. The value has no scale of its own, but two runs on the same posterior can be compared:
    the run with the smaller value is closer to the posterior.

    Gradients of minibatches are allowed. The kernel is linear in the gradient at each of the two
    draws, so that noise with mean zero, independent between draws, adds nothing to the expectation
    for a pair of different draws, and no draw is paired with itself. The noise adds to the standard
    error. Correlation between successive draws adds to the value.

    Parameters
    ----------
    idata : xarray.DataTree
        With `position` and `gradient` in `sample_stats`: from `pymc.sample` with a step method of
        this package, or from `gradients`. Not changed.
    draws : int
        Largest number of draws of all chains together. The time grows with its square.

    Returns
    -------
    Estimate
        ``value`` and ``standard_error``. The latter is that for as many independent draws of the
        posterior with gradients as noisy as these. Values within two or three standard errors of
        zero do not show a difference from the posterior.

    Raises
    ------
    ValueError
        Where the trace has no stored gradients, draws are not finite, chains are far from the
        others, or a coordinate does not move.

    References
    ----------
    J. Gorham and L. Mackey (2017). Measuring sample quality with kernels. *ICML*.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> x = np.random.default_rng(1).normal(size=(2, 400, 2))
    >>> dims = ("chain", "draw", "at")
    >>> def trace(x, g):
    ...     stats = xr.Dataset({"position": (dims, x), "gradient": (dims, g)})
    ...     return xr.DataTree.from_dict({"sample_stats": stats})
    >>> right = kernel_stein_discrepancy(trace(x, -x))
    >>> too_wide = kernel_stein_discrepancy(trace(1.5 * x, -1.5 * x))
    >>> bool(abs(right.value) < 3 * right.standard_error < too_wide.value)
    True
    """
    whole_number("draws", draws, 4)
    run = read_run(idata)
    chosen = slice(None, None, max(1, -(-run.positions.shape[0] * run.positions.shape[1] // draws)))
    return discrepancy_of_arrays(*_whitened(run, chosen))


def stein_thin(idata: DataTree, draws: int = 100, model: pm.Model | None = None) -> DataTree:
    r"""Trace of the few draws whose kernel Stein discrepancy is smallest (Riabiz et al. 2022).

    The library `stein_thinning` takes one draw after the other, each time the draw that makes the
    discrepancy of all draws taken so far smallest. A draw can be taken more than once. Means over
    the thinned draws are closer to those of the posterior than means over as many evenly spaced
    draws, and on a biased chain they lose some of the bias.

    The gradients have to be those of all rows, since here each draw is also paired with itself.
    With gradients of minibatches, draws would be chosen for the noise of their gradients, and would
    be worse than evenly spaced draws. If a model is given, the gradients are computed here, with
    one pass over the data for each draw. Where that takes too long, leave out draws first:
    ``idata.sel(draw=slice(None, None, 10))``.

    Parameters
    ----------
    idata : xarray.DataTree
        With `position` and `gradient` in `sample_stats`. Not changed.
    draws : int
        Number of draws of the result. They are chosen among at most 50 000 evenly spaced draws of
        the trace.
    model : pymc.Model, optional
        Model to compute the gradients with, where those of the trace are of minibatches or the
        trace has none.

    Returns
    -------
    xarray.DataTree
        Trace with a single chain in all groups that have `chain` and `draw`, in the order of
        choice. The coordinates ``of_chain`` and ``of_draw`` say where a draw is from. The groups of
        tuning are left out.

    Raises
    ------
    ImportError
        Where the library is missing. The extra `thinning` of this package has it.
    ValueError
        In the cases of `kernel_stein_discrepancy`, where the trace has fewer draws than asked for,
        and where gradients are of minibatches and no model is given.

    References
    ----------
    M. Riabiz et al. (2022). Optimal thinning of MCMC output. *Journal of the Royal Statistical
    Society B* 84, 1059–1081.
    """
    thin = import_optional("stein_thinning.thinning", "thinning", "`stein_thin`").thin
    whole_number("draws", draws, 1)
    used = idata if model is None else gradients(idata, model)
    run = read_run(used)
    rows, batch = run.settings.get("n_rows", 0), run.settings.get("batch_size", 0)
    if batch < rows:
        raise ValueError(
            "Stein thinning needs the gradients of all rows, but the trace has those of "
            f"minibatches of {batch} of {rows} rows. Pass `model=`, by which they are computed."
        )
    check_mean_gradient(run)
    if "posterior" in used.children:
        check_posterior(posterior_of(used), run)
    chains, length, _ = run.positions.shape
    if draws > chains * length:
        raise ValueError(
            f"`draws` should be at most the {chains * length} draws of the trace, but got {draws}."
        )
    step = max(1, -(-chains * length // MOST_CANDIDATES))
    candidates = np.arange(0, length, step)
    u, g = _whitened(run, candidates)
    index = np.asarray(thin(u, g, draws, standardize=False), dtype=int)
    chain, draw = np.divmod(index, len(candidates))
    draw = candidates[draw]
    groups = {
        name: _chosen(dataset, chain, draw)
        if is_of_draws(name, dataset, chains, length)
        else dataset
        for name, dataset in groups_of(used).items()
        if not name.startswith(("warmup_", MOMENTS))  # The moments are those of all draws.
    }
    return DataTree.from_dict(groups, name=idata.name)


def _chosen(dataset: Any, chain: np.ndarray, draw: np.ndarray) -> Any:
    """Dataset with one chain of the chosen draws."""
    labels = {
        name: dataset[name].values if name in dataset.coords else np.arange(dataset.sizes[name])
        for name in ("chain", "draw")
    }
    dataset = dataset.drop_vars(("chain", "draw"), errors="ignore").isel(
        chain=DataArray(chain, dims="chosen"), draw=DataArray(draw, dims="chosen")
    )
    dataset = dataset.rename_dims(chosen="draw").expand_dims(chain=[0])
    dataset = dataset.assign_coords(
        draw=np.arange(len(draw)),
        of_chain=("draw", labels["chain"][chain]),
        of_draw=("draw", labels["draw"][draw]),
    )
    return dataset.transpose("chain", "draw", ...)


def _whitened(run: StoredRun, chosen: slice | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions and gradients of the chosen draws, in coordinates with unit covariance.

    Where draws are few, only the variances are made 1.
    """
    d = run.dimension
    draws = every_nth(run.positions).reshape(-1, d)
    if len(draws) < DRAWS_A_COORDINATE * d:
        root = np.diag(draws.std(0))
    else:
        root = root_of_draws(np.atleast_2d(np.cov(draws.T)), run.labels, len(draws))
    whitening = Whitening(draws.mean(0), root)
    positions, gradients = (
        values[:, chosen].reshape(-1, d).astype(float) for values in (run.positions, run.gradients)
    )
    return whitening.positions(positions), whitening.gradients(gradients)
