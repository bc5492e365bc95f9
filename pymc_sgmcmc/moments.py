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
from pymc_sgmcmc.trace import DIMENSION

GROUP = "sgmcmc_moments"
"""Group of a trace with the moments."""

BATCHES = 256
"""Most batches a chain, a power of two."""

PRODUCT_ELEMENTS = 1_000_000
"""Bound on the products of positions and gradients that are kept a chain: 8 MB. With more
coordinates several batches share their products, beyond 500 coordinates there are none."""


class RunningMoments(Adaptation):
    r"""Sums over transitions of z = (θ - origin, ∇̂), and of z zᵀ, by batches.

    After tuning each transition is counted in the present batch. Where `BATCHES` of them are full
    neighbours are added, and further batches have twice the length: there are always between half
    as many and `BATCHES`, of equal length, whatever the length of the run.

    Parameters
    ----------
    origin : numpy.ndarray, shape (d,)
        Near the posterior, the same for all chains.
    thin : int
        Transitions of a batch to begin with.
    """

    transitions = 10**9

    def __init__(self, origin: np.ndarray, thin: int):
        self._origin = np.asarray(origin, dtype=float)
        self._thin = thin

    def begin(self, position: np.ndarray) -> AdaptationState:
        """No transitions yet."""
        width = 2 * len(position)
        groups = BATCHES
        while groups and groups * width**2 > PRODUCT_ELEMENTS:
            groups //= 2
        return {
            "sums": np.zeros((BATCHES, width)),
            "products": np.zeros((groups, width, width)),
            "full": np.asarray(0),
            "length": np.asarray(self._thin),
            "partial": np.asarray(0),
        }

    def load(self, state: AdaptationState) -> None:
        """Nothing to set."""

    def update(
        self, state: AdaptationState, seen: Seen
    ) -> tuple[AdaptationState, dict[str, np.ndarray]]:
        """Add the transitions after tuning."""
        if seen.tuning:
            return state, {}
        z = np.concatenate([seen.positions - self._origin, seen.gradients], axis=1, dtype=float)
        sums, products = state["sums"].copy(), state["products"].copy()
        full, length, partial = (int(state[name]) for name in ("full", "length", "partial"))
        start = 0
        while start < len(z):
            if full == BATCHES:
                sums, products = _joined(sums), _joined(products) if len(products) > 1 else products
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
        }, {}

    def of_chain(self, state: AdaptationState) -> Mapping[str, np.ndarray]:
        """What is kept of a chain that has ended."""
        full, groups = int(state["full"]), len(state["products"])
        # The last batch is left out where it is not full, and so is the last group.
        batches_a_group = BATCHES // groups if groups else BATCHES
        return {
            "origin": self._origin,
            "batch_sums": state["sums"][:full],
            "group_sums": _added(state["sums"], batches_a_group)[: full // batches_a_group],
            "group_products": state["products"][: full // batches_a_group],
            "length": state["length"],
            "batches_a_group": np.asarray(batches_a_group),
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
    chains: Sequence[Mapping[str, np.ndarray]], labels: Sequence[str]
) -> xr.Dataset | None:
    """Moments of the chains of a run, None where they have no full batch."""
    batches = min(len(one["batch_sums"]) for one in chains)
    if not batches:
        return None
    d, length = len(chains[0]["origin"]), int(chains[0]["length"])
    groups = min(len(one["group_products"]) for one in chains)
    other = f"{DIMENSION}_of_column"
    vector, matrix = (DIMENSION,), (DIMENSION, other)
    sums = np.array([one["batch_sums"][:batches] for one in chains]) / length
    variables: dict[str, tuple[tuple[str, ...], np.ndarray]] = {
        "origin": (vector, chains[0]["origin"]),
        "batch_position": (("chain", "batch", *vector), sums[..., :d]),
        "batch_gradient": (("chain", "batch", *vector), sums[..., d:]),
    }
    coords: dict[str, list] = {
        "chain": list(range(len(chains))),
        "batch": list(range(batches)),
        DIMENSION: list(labels),
    }
    each = length * int(chains[0]["batches_a_group"])
    if groups:
        products = np.array([one["group_products"][:groups] for one in chains]) / each
        means = np.array([one["group_sums"][:groups] for one in chains]) / each
        coords |= {"group": list(range(groups)), other: list(labels)}
        variables |= {
            "group_position": (("chain", "group", *vector), means[..., :d]),
            "group_gradient": (("chain", "group", *vector), means[..., d:]),
            "group_position_position": (("chain", "group", *matrix), products[..., :d, :d]),
            "group_position_gradient": (("chain", "group", *matrix), products[..., :d, d:]),
            "group_gradient_gradient": (("chain", "group", *matrix), products[..., d:, d:]),
        }
    attributes = {"transitions_a_batch": length, "transitions_a_group": each}
    return xr.Dataset(variables, coords=coords, attrs=attributes)


@dataclass(frozen=True)
class StoredMoments:
    """Moments of a run over groups of transitions, positions from an origin.

    Attributes
    ----------
    origin : numpy.ndarray, shape (d,)
    batch_position, batch_gradient : numpy.ndarray, shape (batches, d)
        Means over successive batches of all chains.
    group_position, group_gradient : numpy.ndarray, shape (groups, d)
    position_position, position_gradient, gradient_gradient : numpy.ndarray, shape (groups, d, d)
        Means of products over longer batches; no groups for very long positions.
    batch_length, group_length : int
        Transitions.
    labels : tuple of str
    """

    origin: np.ndarray
    batch_position: np.ndarray
    batch_gradient: np.ndarray
    group_position: np.ndarray
    group_gradient: np.ndarray
    position_position: np.ndarray
    position_gradient: np.ndarray
    gradient_gradient: np.ndarray
    batch_length: int
    group_length: int
    labels: tuple[str, ...]


def read_moments(idata: DataTree) -> StoredMoments:
    """Moments of a trace.

    Raises
    ------
    ValueError
        Where the trace has none, or numbers that are not finite.
    """
    if GROUP not in idata.children:
        raise ValueError(
            f"The trace should have a group `{GROUP}`, but has {sorted(idata.children)}. It is "
            "written at the end of `pm.sample(step=...)` with one step method of pymc_sgmcmc that "
            "has all variables. Sample again, or use the stored draws."
        )
    group = idata[GROUP].to_dataset()
    d = group.sizes[DIMENSION]

    def flat(name: str) -> np.ndarray:
        if name not in group:
            return np.empty((0, d) if name.count("_") == 1 else (0, d, d))
        values = np.asarray(group[name], dtype=float)
        return values.reshape(-1, *values.shape[2:])

    found = StoredMoments(
        origin=np.asarray(group["origin"], dtype=float),
        batch_position=flat("batch_position"),
        batch_gradient=flat("batch_gradient"),
        group_position=flat("group_position"),
        group_gradient=flat("group_gradient"),
        position_position=flat("group_position_position"),
        position_gradient=flat("group_position_gradient"),
        gradient_gradient=flat("group_gradient_gradient"),
        batch_length=int(group.attrs["transitions_a_batch"]),
        group_length=int(group.attrs["transitions_a_group"]),
        labels=tuple(str(one) for one in group[DIMENSION].values),
    )
    if not np.isfinite(found.batch_position + found.batch_gradient).all():
        raise ValueError(
            f"`{GROUP}` has numbers that are not finite: a chain diverged. Leave it out, "
            "`idata.sel(chain=[...])`, or sample again with a smaller step size."
        )
    return found
