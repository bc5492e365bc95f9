"""Moments of a run over all of its transitions, as a trace holds them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr
from xarray import DataTree

from pymc_sgmcmc.record import DIMENSION, DRAWS, MOMENTS, settings_of
from pymc_sgmcmc.trace_tools.divergence import find_growth, find_overflow
from pymc_sgmcmc.trace_tools.reader import (
    check_chains,
    check_constant,
    check_divergence,
    check_sample_dims,
    check_trace,
    refuse_mirrored,
)

FEWEST_BATCHES = 8
"""Chains are compared with each other only where each has at least this number of batches. With
fewer batches the standard deviation of their means is uncertain by more than a quarter."""


@dataclass(frozen=True)
class StoredMoments:
    """Moments of a run over batches of transitions, and over groups of several batches.

    Attributes
    ----------
    origin : numpy.ndarray, shape (d,)
        The point from which all positions below are measured.
    batch_position, batch_gradient : numpy.ndarray, shape (chains, batches, d)
        Means over successive batches.
    group_position, group_gradient : numpy.ndarray, shape (chains, groups, d)
        Means over successive groups.
    position_position, position_gradient : numpy.ndarray, shape (chains, groups, d, d)
        Means of products over the groups. Very long positions have no groups.
    batch_length : int
        Number of transitions in a batch, the mean over the chains.
    group_counts : numpy.ndarray, shape (chains, groups)
        Number of transitions in each group. All groups are equally long, but for the last one,
        which may be shorter.
    labels : tuple of str
        Labels of the coordinates.
    """

    origin: np.ndarray
    batch_position: np.ndarray
    batch_gradient: np.ndarray
    group_position: np.ndarray
    group_gradient: np.ndarray
    position_position: np.ndarray
    position_gradient: np.ndarray
    batch_length: int
    group_counts: np.ndarray
    labels: tuple[str, ...]


def read_moments(idata: DataTree) -> StoredMoments:
    """Read the moments of a trace.

    Raises
    ------
    ValueError
        Where the trace has no moments, moments that are not finite, or other draws than at the end
        of the run, and where a chain diverged or is far from the others.
    """
    check_trace(idata)
    if MOMENTS not in idata.children:
        raise ValueError(
            f"The trace should have a group `{MOMENTS}` of a complete run with one step method, "
            f"but has {sorted(idata.children)}. Sample again, or use the stored draws."
        )
    group = idata[MOMENTS].to_dataset()
    check_sample_dims(group, MOMENTS, ("chain",))
    _check_draws(idata, group)
    # Chains that were interrupted have no moments.
    ended = np.asarray(group["transitions_a_batch"]) > 0
    group = group.isel(chain=np.flatnonzero(ended))
    chains, d = group.sizes["chain"], group.sizes[DIMENSION]

    def values(name: str) -> np.ndarray:
        if name == "transitions_of_group" and name not in group:
            return np.empty((chains, 0))
        if name not in group:
            return np.empty((chains, 0, d) if name.count("_") == 1 else (chains, 0, d, d))
        return np.asarray(group[name].transpose("chain", ...), dtype=float)

    origins = values("origin")
    x, g = values("group_position"), values("group_gradient")
    # Runs with other origins may have been put together: all get the origin of the first chain.
    shift = (origins - origins[0])[:, None]
    by_shift = np.einsum("...i,...j->...ij", x, np.broadcast_to(shift, x.shape))
    by_itself = np.einsum("...i,...j->...ij", shift, shift)
    moments = StoredMoments(
        origin=origins[0],
        batch_position=values("batch_position") + shift,
        batch_gradient=values("batch_gradient"),
        group_position=x + shift,
        group_gradient=g,
        position_position=values("group_position_position")
        + by_shift
        + by_shift.swapaxes(-1, -2)
        + by_itself,
        position_gradient=values("group_position_gradient")
        + np.einsum("...i,...j->...ij", np.broadcast_to(shift, g.shape), g),
        batch_length=_mean_length(group["transitions_a_batch"].values),
        group_counts=values("transitions_of_group"),
        labels=tuple(str(label) for label in group[DIMENSION].values),
    )
    numbers = (
        moments.batch_position,
        moments.batch_gradient,
        moments.group_gradient,
        moments.position_position,
        moments.position_gradient,
    )
    if not all(np.isfinite(array).all() for array in numbers):
        raise ValueError(
            f"`{MOMENTS}` should be finite, but is not: a chain diverged, or runs of different "
            "lengths were put together. Select other chains, or use a smaller step size."
        )
    names = group["chain"].values.tolist() if "chain" in group.coords else range(chains)
    with np.errstate(all="ignore"):
        reasons = {
            name: find_overflow(x) or find_growth(x)
            for name, x in zip(names, moments.batch_position, strict=True)
        }
    settings = settings_of(idata)
    refuse_mirrored(settings)
    check_divergence(reasons, settings)
    if moments.batch_position.shape[1] > 1:
        check_constant(moments.batch_position, moments.labels)
    if moments.batch_position.shape[1] >= FEWEST_BATCHES:
        check_chains(moments.batch_position, moments.labels, tuple(names))
    return moments


def _check_draws(idata: DataTree, group: xr.Dataset) -> None:
    """Refuse moments of a run where its draws were left out, repeated or put in another order."""
    stored, names = group.attrs.get(DRAWS), ("sample_stats", "posterior")
    present = [idata[name].dataset for name in names if name in idata.children]
    if stored is None or not present or "draw" not in present[0].sizes:
        return
    draws = present[0].sizes["draw"]
    labels = present[0].coords["draw"].values if "draw" in present[0].coords else np.arange(draws)
    if draws != stored or not (np.diff(labels) == 1).all():
        raise ValueError(
            f"`{MOMENTS}` has the moments of all {stored} draws of a chain, but the trace has "
            f"{len(np.unique(labels))}, or another order. Use the whole trace, or "
            "`zero_variance(idata, moments=False)`."
        )


def _mean_length(lengths: np.ndarray) -> int:
    """Mean number of transitions in a batch.

    Chains of a run differ by powers of two, where their tuning gave a draw more transitions.
    """
    doublings = np.log2(lengths / lengths.min())
    if not (doublings == np.round(doublings)).all():
        raise ValueError(
            "Batches of all chains should have the same number of transitions or differ by powers "
            f"of two, but have {np.unique(lengths).tolist()}: runs of different lengths were put "
            "together. Use each run apart, `idata.sel(chain=[...])`."
        )
    return round(float(lengths.mean()))
