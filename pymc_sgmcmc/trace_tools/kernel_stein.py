"""Kernel Stein discrepancy of a trace, and the draws that make it small."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
from scipy import linalg
from xarray import DataArray, DataTree

from pymc_sgmcmc.checks import whole_number
from pymc_sgmcmc.record import MOMENTS, groups_of, is_of_draws
from pymc_sgmcmc.stein import Estimate, stein_kernel
from pymc_sgmcmc.trace_tools.gradients import gradients
from pymc_sgmcmc.trace_tools.reader import (
    StoredRun,
    check_mean_gradient,
    check_posterior,
    every_nth,
    posterior_of,
    read_run,
    root_of_draws,
)

MOST_DRAWS = 1_000
"""Largest number of draws. All pairs are taken, so that time grows with its square."""

MOST_CANDIDATES = 50_000
"""Largest number of draws among which Stein thinning chooses."""

DRAWS_A_COORDINATE = 10
"""Draws for each coordinate below which covariances are taken as zero, since their estimates are
mostly noise."""


def kernel_stein_discrepancy(idata: DataTree, *, draws: int = MOST_DRAWS) -> Estimate:
    r"""Squared kernel Stein discrepancy between the draws of a trace and the posterior.

    The U-statistic with the inverse multiquadric kernel :math:`(1 + \|u - v\|^2)^{-1/2}` over
    pairs of draws of all chains, thinned evenly, in the coordinates u in which the draws have unit
    covariance. Its expectation is zero for draws of the posterior and positive for others, also
    where they are wrong in more than mean and variance. It is relative: of two runs on one
    posterior the one with the smaller value is nearer to it.

    Noisy gradients do: the kernel is linear in the gradient at either draw, so that noise with
    mean zero, independent between draws, adds nothing to the expectation of a pair of different
    draws, and a draw is never paired with itself. It adds to the standard error. Draws that are
    correlated add to the value.

    Parameters
    ----------
    idata : xarray.DataTree
        With `position` and `gradient` in `sample_stats`: from `pymc.sample` with a step method of
        this package, or from `gradients`. Not changed.
    draws : int
        At most so many draws, of all chains together; the time grows with the square.

    Returns
    -------
    Estimate
        ``value``, and ``standard_error``, that of so many independent draws of the posterior with
        gradients as noisy as these: values within two or three of them of zero say nothing.

    Raises
    ------
    ValueError
        Where there are no stored gradients, draws are not finite, chains are far from the
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
    u, g = _whitened(run, run.positions[:, chosen], run.gradients[:, chosen])
    count = len(u)
    values = stein_kernel(u, g)
    np.fill_diagonal(values, 0)
    pairs = count * (count - 1)
    # The U-statistic is degenerate for draws of the posterior: pairs are uncorrelated.
    error = np.sqrt(2 * (values**2).sum() / pairs / pairs)
    return Estimate(values.sum() / pairs, error)


def stein_thin(idata: DataTree, draws: int = 100, model: pm.Model | None = None) -> DataTree:
    r"""Trace of the few draws whose kernel Stein discrepancy is smallest (Riabiz et al. 2022).

    One after the other the draw is taken that makes the discrepancy of those taken so far
    smallest, by the library `stein_thinning`. Draws can be taken more than once. Means over the
    thinned draws are nearer to those of the posterior than means over as many evenly spaced ones,
    and on a biased chain they lose some of the bias.

    The gradients have to be those of all rows, since here each draw counts with itself: from
    gradients of minibatches draws are chosen for the noise of their gradients, and are worse
    than evenly spaced ones. With a model they are computed here, in one pass over the data for
    each draw: leave out draws first, ``idata.sel(draw=slice(None, None, 10))``, where that is too
    much.

    Parameters
    ----------
    idata : xarray.DataTree
        With `position` and `gradient` in `sample_stats`. Not changed.
    draws : int
        Draws of the result; at most 50 000 of the trace, evenly spaced, are considered.
    model : pymc.Model, optional
        To compute the gradients with, where those of the trace are of minibatches or there are
        none.

    Returns
    -------
    xarray.DataTree
        With one chain in all groups that have `chain` and `draw`, in the order of choice; the
        coordinates ``of_chain`` and ``of_draw`` say where a draw is from. Groups about tuning are
        left out.

    Raises
    ------
    ImportError
        Where the library is missing, which is in the extra `thinning`.
    ValueError
        As `kernel_stein_discrepancy`, where draws are fewer than asked for, and where gradients
        are of minibatches and no model is given.

    References
    ----------
    M. Riabiz et al. (2022). Optimal thinning of MCMC output. *Journal of the Royal Statistical
    Society B* 84, 1059–1081.
    """
    thin = _library()
    whole_number("draws", draws, 1)
    used = idata if model is None else gradients(idata, model)
    run = read_run(used)
    rows, batch = run.settings.get("n_rows", 0), run.settings.get("batch_size", 0)
    if batch < rows:
        raise ValueError(
            "Stein thinning needs the gradients of all rows, but those of the trace are of "
            f"minibatches of {batch} of {rows} rows, by whose noise it would choose. Pass "
            "`model=`, or compute them by `gradients(idata, model)`."
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
    u, g = _whitened(run, run.positions[:, candidates], run.gradients[:, candidates])
    index = np.asarray(thin(u, g, draws, standardize=False), dtype=int)
    chain, draw = np.divmod(index, len(candidates))
    draw = candidates[draw]
    groups = {
        name: _chosen(dataset, chain, draw)
        if is_of_draws(name, dataset, chains, length)
        else dataset
        for name, dataset in groups_of(used).items()
        if not name.startswith(("warmup_", MOMENTS))  # the moments are those of all draws
    }
    return DataTree.from_dict(groups, name=idata.name)


def _chosen(dataset: Any, chain: np.ndarray, draw: np.ndarray) -> Any:
    """One chain of the chosen draws."""
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


def _whitened(
    run: StoredRun, positions: np.ndarray, gradients: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draws with unit covariance, or unit variances where they are few, and gradients in these."""
    d = run.dimension
    draws = every_nth(run.positions).reshape(-1, d)
    x = positions.reshape(-1, d).astype(float) - draws.mean(0)
    g = gradients.reshape(-1, d).astype(float)
    if len(draws) < DRAWS_A_COORDINATE * d:
        scale = draws.std(0)
        return x / scale, g * scale
    root = root_of_draws(np.atleast_2d(np.cov(draws.T)), run.labels, len(draws))
    return linalg.solve_triangular(root, x.T, lower=True).T, g @ root


def _library() -> Any:
    """The function of `stein_thinning`, which is needed here alone."""
    try:
        from stein_thinning.thinning import thin
    except ImportError:
        raise ImportError(
            '`stein_thin` needs the library stein_thinning: `pip install "pymc_sgmcmc[thinning]"`.'
        ) from None
    return thin
