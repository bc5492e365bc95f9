r"""Moments of positions and gradients over all transitions, in constant memory.

A draw is recorded every `thin` transitions, and long runs of long positions are not stored at all.
Means, covariances and what control variates and Stein's identity need are sums over transitions,
which are kept here by batches: of successive transitions, twice as long whenever their number is
reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr
from xarray import DataTree

from pymc_sgmcmc.adaptation import Adaptation, AdaptationState, Seen
from pymc_sgmcmc.divergence import find_growth
from pymc_sgmcmc.stored import (
    check_chains,
    check_constant,
    check_divergence,
    check_sample_dims,
    check_trace,
    settings_of,
)
from pymc_sgmcmc.trace import DIMENSION

GROUP = "sgmcmc_moments"
"""Group of a trace with the moments."""

DRAWS = "draws"
"""Attribute of the group: draws of a chain in the trace when the run ended."""

BATCHES = 256
"""Most batches a chain, a power of two."""

FEWEST_BATCHES = 8
"""Batches a chain from which their spread says whether chains are of one law."""

PRODUCT_ELEMENTS = 4_000_000
"""Bound on the products of positions and gradients that are kept a chain: 32 MB. With more
coordinates several batches share their products."""

MOST_COORDINATES = 500
"""Coordinates beyond which there are no products, as there are no dense matrices."""

WAITING = 64
"""Transitions that are gathered before they are added, each time to a copy of all sums."""


class RunningMoments(Adaptation):
    r"""Sums over transitions of z = (θ - origin, ∇̂), and of z zᵀ, by batches.

    The origin is the position of a chain at its first transition after tuning: products of
    positions far from it would lose the digits of the covariance.

    After tuning each transition is counted in the present batch. Where `BATCHES` of them are full
    neighbours are added, and further batches have twice the length: there are always between half
    as many and `BATCHES`, of equal length, whatever the length of the run.

    Parameters
    ----------
    thin : int
        Transitions of a batch to begin with.
    """

    transitions = 10**9

    def __init__(self, thin: int):
        self._thin = thin

    def begin(self, position: np.ndarray) -> AdaptationState:
        """No transitions yet."""
        width = 2 * len(position)
        groups = BATCHES if len(position) <= MOST_COORDINATES else 0
        while groups * width**2 > PRODUCT_ELEMENTS:
            groups //= 2
        return {
            "origin": np.array(position, dtype=float),
            "sums": np.zeros((BATCHES, width)),
            "products": np.zeros((groups, width, width)),
            "full": np.asarray(0),
            "length": np.asarray(self._thin),
            "partial": np.asarray(0),
            "waiting": np.zeros((0, width)),
        }

    def load(self, state: AdaptationState) -> None:
        """Nothing to set."""

    def update(
        self, state: AdaptationState, seen: Seen
    ) -> tuple[AdaptationState, dict[str, np.ndarray]]:
        """Add the transitions after tuning."""
        if seen.tuning:
            return state, {}
        if not (state["full"] or state["partial"] or len(state["waiting"])):
            state = {**state, "origin": np.array(seen.positions[0], dtype=float)}
        at = seen.positions - state["origin"]
        z = np.concatenate([at, seen.gradients], axis=1, dtype=float)
        if len(state["waiting"]):
            z = np.concatenate([state["waiting"], z])
        if len(z) < WAITING:
            return {**state, "waiting": z}, {}
        return {**state, **_with(state, z), "waiting": z[:0].copy()}, {}

    def of_chain(self, state: AdaptationState) -> Mapping[str, np.ndarray]:
        """What is kept of a chain that has ended."""
        state = {**state, **_with(state, state["waiting"])}
        full, groups = int(state["full"]), len(state["products"])
        # The last batch is left out where it is not full; the last group has its own number of
        # transitions.
        batches_a_group = BATCHES // groups if groups else BATCHES
        each = batches_a_group * int(state["length"])
        counts = full * int(state["length"]) + int(state["partial"]) - each * np.arange(groups)
        counts = np.clip(counts[counts > 0], 0, each)
        return {
            "origin": state["origin"],
            "batch_sums": state["sums"][:full],
            "group_sums": _added(state["sums"], batches_a_group)[: len(counts)],
            "group_products": state["products"][: len(counts)],
            "group_counts": counts,
            "length": state["length"],
        }


def _with(state: AdaptationState, z: np.ndarray) -> AdaptationState:
    """Sums with some more transitions, shape (transitions, 2 d)."""
    sums, products = state["sums"].copy(), state["products"].copy()
    full, length, partial = (int(state[name]) for name in ("full", "length", "partial"))
    start = 0
    while start < len(z):
        if full == BATCHES:
            sums, products = _joined(sums), _joined(products)
            full, length = BATCHES // 2, 2 * length
        whole = min(BATCHES - full, (len(z) - start) // length) if partial == 0 else 0
        if whole:
            some = z[start : start + whole * length].reshape(whole, length, -1)
            numbers = slice(full, full + whole)
            sums[numbers] += some.sum(1)
            _add_products(products, some, full)
            full, start = full + whole, start + whole * length
            continue
        some = z[None, start : start + length - partial]
        sums[full] += some[0].sum(0)
        _add_products(products, some, full)
        start, partial = start + some.shape[1], partial + some.shape[1]
        if partial == length:
            full, partial = full + 1, 0
    return {
        "sums": sums,
        "products": products,
        "full": np.asarray(full),
        "length": np.asarray(length),
        "partial": np.asarray(partial),
    }


def _joined(values: np.ndarray) -> np.ndarray:
    """Sums of neighbours in the first half, and zeros."""
    joined = np.zeros_like(values)
    joined[: len(values) // 2] = _added(values, 2)
    return joined


def _added(values: np.ndarray, count: int) -> np.ndarray:
    return values.reshape(len(values) // count, count, *values.shape[1:]).sum(1)


def _add_products(products: np.ndarray, some: np.ndarray, first: int) -> None:
    """Add z zᵀ of some batches, shape (batches, length, 2 d), to their groups."""
    if not len(products):
        return
    batches_a_group = BATCHES // len(products)
    if batches_a_group == 1:
        products[first : first + len(some)] += some.swapaxes(1, 2) @ some
        return
    for number in range(first // batches_a_group, (first + len(some) - 1) // batches_a_group + 1):
        begin = max(0, number * batches_a_group - first)
        of_group = some[begin : (number + 1) * batches_a_group - first]
        of_group = of_group.reshape(-1, some.shape[-1])
        products[number] += of_group.T @ of_group


# --- In a trace -----------------------------------------------------------------------------


def moments_dataset(
    chains: Sequence[Mapping[str, np.ndarray] | None], labels: Sequence[str]
) -> xr.Dataset | None:
    """Moments of the chains of a run, None where none has a full batch.

    ``mean`` and ``covariance`` are those of the position over the transitions of the batches; the
    others are means over each batch of positions, relative to ``origin``, of gradients, and of
    their products. Chains that did not end, given as None, have NaN.
    """
    ended = [one for one in chains if one is not None]
    batches = min((len(one["batch_sums"]) for one in ended), default=0)
    if not batches:
        return None
    d, length = len(ended[0]["origin"]), int(ended[0]["length"])  # of all chains
    groups = min(len(one["group_products"]) for one in ended)
    other = f"{DIMENSION}_of_column"
    vector, matrix = (DIMENSION,), (DIMENSION, other)
    sums = np.array([one["batch_sums"][:batches] for one in ended]) / length
    origins = np.array([one["origin"] for one in ended])
    variables: dict[str, tuple[tuple[str, ...], np.ndarray]] = {
        # For each chain, so that runs with other origins can be put beside these.
        "origin": (("chain", *vector), origins),
        "mean": (("chain", *vector), origins + sums[..., :d].mean(1)),
        "batch_position": (("chain", "batch", *vector), sums[..., :d]),
        "batch_gradient": (("chain", "batch", *vector), sums[..., d:]),
        "transitions_a_batch": (("chain",), np.full(len(ended), length)),
    }
    coords: dict[str, list] = {
        "chain": [number for number, one in enumerate(chains) if one is not None],
        "batch": list(range(batches)),
        DIMENSION: list(labels),
    }
    if groups:
        counts = np.array([one["group_counts"][:groups] for one in ended])[..., None]
        products = np.array([one["group_products"][:groups] for one in ended]) / counts[..., None]
        means = np.array([one["group_sums"][:groups] for one in ended]) / counts
        shares = counts / counts.sum(1, keepdims=True)
        x = (shares * means[..., :d]).sum(1)
        xx = (shares[..., None] * products[..., :d, :d]).sum(1)
        coords |= {"group": list(range(groups)), other: list(labels)}
        variables |= {
            "group_position": (("chain", "group", *vector), means[..., :d]),
            "group_gradient": (("chain", "group", *vector), means[..., d:]),
            "group_position_position": (("chain", "group", *matrix), products[..., :d, :d]),
            "group_position_gradient": (("chain", "group", *matrix), products[..., :d, d:]),
            "group_gradient_gradient": (("chain", "group", *matrix), products[..., d:, d:]),
            "transitions_of_group": (("chain", "group"), counts[..., 0]),
            "covariance": (("chain", *matrix), xx - x[:, :, None] * x[:, None, :]),
        }
    dataset = xr.Dataset(variables, coords=coords)
    return dataset if len(ended) == len(chains) else dataset.reindex(chain=range(len(chains)))


@dataclass(frozen=True)
class StoredMoments:
    """Moments of a run over groups of transitions, positions from an origin.

    Attributes
    ----------
    origin : numpy.ndarray, shape (d,)
    batch_position, batch_gradient : numpy.ndarray, shape (chains, batches, d)
        Means over successive batches.
    group_position, group_gradient : numpy.ndarray, shape (chains, groups, d)
    position_position, position_gradient : numpy.ndarray, shape (chains, groups, d, d)
        Means of products over longer batches; no groups for very long positions.
    batch_length : int
        Transitions.
    group_counts : numpy.ndarray, shape (chains, groups)
        Transitions; those of the last may be fewer than those of the others, which are equal.
    labels : tuple of str
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
    """Moments of a trace.

    Raises
    ------
    ValueError
        Where the trace has none, numbers that are not finite, other draws than at the end of the
        run, and where chains are elsewhere than the others.
    """
    check_trace(idata)
    if GROUP not in idata.children:
        raise ValueError(
            f"The trace should have a group `{GROUP}`, but has {sorted(idata.children)}. It is "
            "written at the end of a `pm.sample(step=...)` that was not interrupted, with one step "
            "method of pymc_sgmcmc that has all variables, and left out where draws were left out "
            "or changed. Sample again, or use the stored draws."
        )
    group = idata[GROUP].to_dataset()
    check_sample_dims(group, GROUP, ("chain",))
    _check_draws(idata, group)
    # Chains that were interrupted have none.
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
    # From the origin of the first chain, where runs with other origins were put together.
    shift = (origins - origins[0])[:, None]
    by_shift = np.einsum("...i,...j->...ij", x, np.broadcast_to(shift, x.shape))
    by_itself = np.einsum("...i,...j->...ij", shift, shift)
    found = StoredMoments(
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
        batch_length=_same_length(group, "transitions_a_batch"),
        group_counts=values("transitions_of_group"),
        labels=tuple(str(one) for one in group[DIMENSION].values),
    )
    numbers = (
        found.batch_position,
        found.batch_gradient,
        found.group_gradient,
        found.position_position,
        found.position_gradient,
    )
    if not all(np.isfinite(one).all() for one in numbers):
        raise ValueError(
            f"`{GROUP}` has numbers that are not finite: a chain diverged, or runs of different "
            "lengths were put together. Leave chains out, `idata.sel(chain=[...])`, or sample "
            "again with a smaller step size."
        )
    names = group["chain"].values.tolist() if "chain" in group.coords else range(chains)
    with np.errstate(all="ignore"):
        growths = map(find_growth, found.batch_position)
        reasons = {name: one for name, one in zip(names, growths, strict=True) if one is not None}
    check_divergence(reasons, tuple(names), settings_of(idata))
    if found.batch_position.shape[1] > 1:
        check_constant(found.batch_position, found.labels)
    if found.batch_position.shape[1] >= FEWEST_BATCHES:
        check_chains(found.batch_position, found.labels, tuple(names))
    return found


def _check_draws(idata: DataTree, group: xr.Dataset) -> None:
    """Refuse moments of a run of whose draws some were left out, or taken twice."""
    stored, names = group.attrs.get(DRAWS), ("sample_stats", "posterior")
    present = [idata[name].dataset for name in names if name in idata.children]
    if stored is None or not present or "draw" not in present[0].sizes:
        return
    draws = present[0].sizes["draw"]
    labels = present[0].coords["draw"].values if "draw" in present[0].coords else np.arange(draws)
    if draws != stored or not (np.diff(labels) == 1).all():
        raise ValueError(
            f"`{GROUP}` has the moments of all {stored} draws of a chain, but the trace has "
            f"{len(np.unique(labels))} of them, or has them in another order. Use the whole trace, "
            "or the draws that are left: `zero_variance(idata, moments=False)`."
        )


def _same_length(group: xr.Dataset, name: str) -> int:
    lengths = np.unique(group[name].values)
    if len(lengths) != 1:
        raise ValueError(
            f"All chains should have batches of the same number of transitions, but `{GROUP}` has "
            f"{lengths.tolist()}: runs of different lengths were put together. Use the moments of "
            "each run apart, `idata.sel(chain=[...])`."
        )
    return int(lengths[0])
