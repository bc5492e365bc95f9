"""Positions, gradients and settings that a trace holds, checked and without copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from xarray import DataTree

from pymc_sgmcmc.run_settings import GROUP, PREFIX
from pymc_sgmcmc.trace import DIMENSION

CHUNK_ELEMENTS = 250_000
"""Array elements handled at a time in passes over the draws: 2 MB, which caches hold."""

SOME_DRAWS = 50_000
"""Draws, evenly spaced, from which scales and diagnostics are computed."""

FAR = 5.0
"""Distance of a chain's mean from those of the others, in standard deviations of a draw, beyond
which it counts as elsewhere: means of converged chains are within a fraction of one."""

LANGEVIN = ("SGLD", "SGLDCV", "ULA")
"""Step methods of Langevin dynamics with a fixed preconditioner, which their traces hold."""


@dataclass(frozen=True)
class StoredRun:
    """What the tools read of a trace.

    Attributes
    ----------
    positions, gradients : numpy.ndarray, shape (chains, draws, d)
        Of the trace, not copied.
    labels : tuple of str
        Of the coordinates.
    chains : tuple
        Labels of the chains.
    settings : dict
        Of the run, empty where the trace has none.
    arrays : dict
        Preconditioner, centre and precision, where the trace has them.
    step_sizes : numpy.ndarray, shape (chains,), or None
        Where they are constant in each chain. Chains tune apart, so they differ.
    """

    positions: np.ndarray
    gradients: np.ndarray
    labels: tuple[str, ...]
    chains: tuple[Any, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    step_sizes: np.ndarray | None = None

    @property
    def dimension(self) -> int:
        """d."""
        return self.positions.shape[-1]

    @property
    def is_langevin(self) -> bool:
        """Whether it is Langevin dynamics with known step sizes and preconditioner."""
        return (
            self.settings.get("sampler") in LANGEVIN
            and self.step_sizes is not None
            and "preconditioner" in self.arrays
        )

    @property
    def preconditioner(self) -> np.ndarray:
        """M of Langevin dynamics, shape (d, d)."""
        return dense(self.arrays["preconditioner"], self.dimension)


def read_run(idata: DataTree, *, agreeing_chains: bool = True) -> StoredRun:
    """Positions, gradients and settings of a trace.

    Parameters
    ----------
    idata : xarray.DataTree
    agreeing_chains : bool
        Refuse chains that are elsewhere than the others.

    Raises
    ------
    ValueError
        Where there are none, where draws are not finite, where chains are elsewhere than the
        others, or where a coordinate does not move.
    """
    stats = idata.children.get("sample_stats")
    if stats is None or not {"gradient", "position"} <= set(stats.data_vars):
        raise ValueError(
            "The trace should have `gradient` and `position` in `sample_stats`, but has not. "
            "Sample with a step method of pymc_sgmcmc that has all variables, such as "
            "`pm.sample(step=SGLDCV())`, or compute the gradients at the draws of any sampler by "
            "`idata = gradients(idata, model)`."
        )
    positions, gradients = (np.asarray(stats[name]) for name in ("position", "gradient"))
    if positions.dtype == object or positions.ndim != 3 or positions.shape != gradients.shape:
        raise ValueError(
            "`position` and `gradient` should be those of one step method, with the same shape "
            f"(chain, draw, d), but have shapes {positions.shape} and {gradients.shape}. Sample "
            "with one step method of pymc_sgmcmc for all variables."
        )
    if positions.shape[1] < 4:
        raise ValueError(
            f"At least 4 draws a chain are needed, but the trace has {positions.shape[1]}. "
            "Sample again with more `draws`."
        )
    chains = tuple(range(len(positions)))
    if "chain" in stats.coords:
        chains = tuple(stats.coords["chain"].values.tolist())
    labels = labels_of(idata, positions.shape[-1])
    _check_finite(positions, gradients, chains)
    some = every_nth(positions)
    _check_constant(some, labels)
    if agreeing_chains:
        _check_chains(some, labels, chains)
    arrays = {}
    if GROUP in idata.children:
        arrays = {str(name): np.asarray(one) for name, one in idata[GROUP].data_vars.items()}
    return StoredRun(
        positions, gradients, labels, chains, settings_of(idata), arrays, _step_sizes(stats)
    )


def settings_of(idata: DataTree) -> dict[str, Any]:
    """Settings of a run by name, from the attributes of `sample_stats`."""
    attributes = idata["sample_stats"].attrs
    return {
        str(name)[len(PREFIX) :]: value
        for name, value in attributes.items()
        if str(name).startswith(PREFIX)
    }


def labels_of(idata: DataTree, dimension: int) -> tuple[str, ...]:
    """Labels of the coordinates of the position, numbers where the trace has none."""
    for group in (GROUP, "sample_stats"):
        if group in idata.children and DIMENSION in idata[group].coords:
            return tuple(str(one) for one in idata[group].coords[DIMENSION].values)
    return tuple(f"position[{number}]" for number in range(dimension))


def chunks(chains: int, draws: int, elements: int) -> Iterator[tuple[int, slice]]:
    """A chain and a range of its draws, again and again, until all are through.

    `elements` are those of one draw in whatever is made of it.
    """
    length = max(1, CHUNK_ELEMENTS // max(1, elements))
    for chain in range(chains):
        for start in range(0, draws, length):
            yield chain, slice(start, min(start + length, draws))


def every_nth(values: np.ndarray, most: int = SOME_DRAWS) -> np.ndarray:
    """At most so many draws, evenly spaced over each chain, in double precision."""
    chains, draws = values.shape[:2]
    return values[:, :: max(1, -(-chains * draws // most))].astype(float)


def dense(matrix: np.ndarray, dimension: int) -> np.ndarray:
    """Shape (d, d), of a matrix that may be given as a scalar or a diagonal."""
    matrix = np.asarray(matrix, dtype=float)
    return matrix if matrix.ndim == 2 else np.diag(np.broadcast_to(matrix, dimension))


def _step_sizes(stats: Any) -> np.ndarray | None:
    if "step_size" not in stats.data_vars:
        return None
    sizes = np.asarray(stats["step_size"], dtype=float)
    constant = (np.ptp(sizes, axis=1) <= 1e-6 * sizes.mean(1)).all()
    return sizes.mean(1) if constant else None


def _check_finite(positions: np.ndarray, gradients: np.ndarray, chains: tuple[Any, ...]) -> None:
    bad: dict[Any, int] = {}
    for chain, part in chunks(*positions.shape):
        with np.errstate(all="ignore"):
            # A sum takes a third of the time, and is finite only if its terms are.
            total = positions[chain, part].sum() + gradients[chain, part].sum()
        if np.isfinite(total):
            continue
        good = np.isfinite(positions[chain, part]).all(-1)
        good &= np.isfinite(gradients[chain, part]).all(-1)
        if not good.all():
            bad[chains[chain]] = bad.get(chains[chain], 0) + int((~good).sum())
    if bad:
        listed = ", ".join(f"{number} of chain {chain}" for chain, number in bad.items())
        raise ValueError(
            f"All draws should be finite, but {listed} are not. " + _leave_out(bad, chains)
        )


def _check_constant(some: np.ndarray, labels: tuple[str, ...]) -> None:
    still = np.ptp(some.reshape(-1, some.shape[-1]), axis=0) == 0
    if still.any():
        named = ", ".join(f"`{labels[number]}`" for number in np.flatnonzero(still)[:5])
        raise ValueError(
            f"All coordinates should move, but {int(still.sum())} of {len(still)} are constant "
            f"over the draws: {named}. Fix them in the model (`pm.Data` or a number in place of "
            "the variable), and sample again."
        )


def _check_chains(some: np.ndarray, labels: tuple[str, ...], chains: tuple[Any, ...]) -> None:
    """Refuse chains that are elsewhere than the others, or spread far more."""
    if len(some) < 2:
        return
    means, sds = some.mean(1), some.std(1)
    # Of two chains nobody can say which is wrong, but the one that spreads less sets the scale.
    scale = sds.min(0) if len(some) == 2 else np.median(sds, axis=0)
    scale = np.where(scale > 0, scale, np.finfo(float).tiny)
    away = np.abs(means - np.median(means, axis=0)) / scale
    wide = sds / scale
    bad = ((away > FAR) | (wide > 2 * FAR)).any(1)
    if bad.any():
        which = [chains[number] for number in np.flatnonzero(bad)]
        coordinate = labels[int(np.argmax(np.maximum(away, wide / 2).max(0)))]
        raise ValueError(
            f"All chains should be of one law, but {_list(which)} "
            f"{'is' if len(which) == 1 else 'are'} far from the median of the chains, most of all "
            f"in {coordinate}. " + _leave_out(which, chains)
        )


def _leave_out(bad: Any, chains: tuple[Any, ...]) -> str:
    rest = [chain for chain in chains if chain not in set(bad)]
    advice = "ample again: with a smaller step size (or `bias`) where chains diverged, with more "
    advice += "tuning and more draws where they are slow."
    return f"Leave them out, `idata.sel(chain={rest})`, or s{advice}" if rest else f"S{advice}"


def _list(chains: list[Any]) -> str:
    return f"chain{'s' if len(chains) > 1 else ''} " + ", ".join(map(str, chains))
