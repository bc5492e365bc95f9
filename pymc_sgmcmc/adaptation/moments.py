r"""Moments of positions and gradients over all transitions, in constant memory.

A draw is recorded every `thin` transitions, and long runs of long positions are not stored at all.
Means, covariances and what control variates and Stein's identity need are sums over transitions,
which are kept here by batches: of successive transitions, twice as long whenever their number is
reached.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pymc_sgmcmc.adaptation.base import Adaptation, AdaptationState, Seen

BATCHES = 256
"""Most batches a chain, a power of two."""

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
