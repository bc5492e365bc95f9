r"""Moments of positions and gradients over all transitions, in constant memory.

Only one position in `thin` transitions is recorded. Means, covariances and the products for control
variates and Stein's identity are sums over all transitions. They are kept in batches of successive
transitions. The length of the batches doubles whenever `BATCHES` of them are full.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pymc_sgmcmc.adaptation.base import Adaptation, AdaptationState, Seen

BATCHES = 256
"""A chain has at most this many batches, a power of two, so that batches can be joined in pairs.
More batches show shorter autocorrelations and take more memory in the trace."""

PRODUCT_ELEMENTS = 4_000_000
"""A chain keeps at most this many products of positions and gradients, 32 MB. With more coordinates
several batches share their products, so that the memory stays bounded."""

MOST_COORDINATES = 500
"""Longer positions have no products, since they have no dense matrices either, see
`DENSE_DIMENSION`."""

WAITING = 64
"""At least this many transitions are gathered before they are added, since each addition copies all
sums."""


class RunningMoments(Adaptation):
    r"""Sums over transitions of z = (θ - origin, ∇̂), and of z zᵀ, by batches.

    The origin is the position of a chain at its first transition after tuning. Products of
    positions far from it would lose digits of the covariance.

    After tuning each transition is counted in the present batch. When `BATCHES` batches are full,
    neighbours are added, and further batches have twice the length. A long run of any length then
    has between `BATCHES` / 2 and `BATCHES` batches of equal length.

    Parameters
    ----------
    thin : int
        Number of transitions in a batch at the start.
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
        positions = seen.positions - state["origin"]
        z = np.concatenate([positions, seen.gradients], axis=1, dtype=float)
        if len(state["waiting"]):
            z = np.concatenate([state["waiting"], z])
        if len(z) < WAITING:
            return {**state, "waiting": z}, {}
        return {**state, **_with(state, z), "waiting": z[:0].copy()}, {}

    def of_chain(self, state: AdaptationState) -> Mapping[str, np.ndarray]:
        """Moments of a chain that has ended."""
        state = {**state, **_with(state, state["waiting"])}
        full, groups = int(state["full"]), len(state["products"])
        # The last batch is left out where it is not full. The last group may have fewer transitions
        # than the others.
        batches_a_group = BATCHES // groups if groups else BATCHES
        transitions_a_group = batches_a_group * int(state["length"])
        counts = (
            full * int(state["length"])
            + int(state["partial"])
            - transitions_a_group * np.arange(groups)
        )
        counts = np.clip(counts[counts > 0], 0, transitions_a_group)
        return {
            "origin": state["origin"],
            "batch_sums": state["sums"][:full],
            "group_sums": _added(state["sums"], batches_a_group)[: len(counts)],
            "group_products": state["products"][: len(counts)],
            "group_counts": counts,
            "length": state["length"],
        }


def _with(state: AdaptationState, z: np.ndarray) -> AdaptationState:
    """Sums with further transitions z, shape (transitions, 2 d)."""
    sums, products = state["sums"].copy(), state["products"].copy()
    full, length, partial = (int(state[name]) for name in ("full", "length", "partial"))
    start = 0
    while start < len(z):
        if full == BATCHES:
            sums, products = _joined(sums), _joined(products)
            full, length = BATCHES // 2, 2 * length
        full_batches = min(BATCHES - full, (len(z) - start) // length) if partial == 0 else 0
        if full_batches:
            transitions = z[start : start + full_batches * length].reshape(full_batches, length, -1)
            numbers = slice(full, full + full_batches)
            sums[numbers] += transitions.sum(1)
            _add_products(products, transitions, full)
            full, start = full + full_batches, start + full_batches * length
            continue
        transitions = z[None, start : start + length - partial]
        sums[full] += transitions[0].sum(0)
        _add_products(products, transitions, full)
        start, partial = start + transitions.shape[1], partial + transitions.shape[1]
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
    """Sums of neighbours in the first half, and zeros in the second."""
    joined = np.zeros_like(values)
    joined[: len(values) // 2] = _added(values, 2)
    return joined


def _added(values: np.ndarray, count: int) -> np.ndarray:
    return values.reshape(len(values) // count, count, *values.shape[1:]).sum(1)


def _add_products(products: np.ndarray, batches: np.ndarray, first: int) -> None:
    """Add z zᵀ of batches, shape (batches, length, 2 d), to their groups."""
    if not len(products):
        return
    batches_a_group = BATCHES // len(products)
    if batches_a_group == 1:
        products[first : first + len(batches)] += batches.swapaxes(1, 2) @ batches
        return
    for number in range(
        first // batches_a_group, (first + len(batches) - 1) // batches_a_group + 1
    ):
        begin = max(0, number * batches_a_group - first)
        of_group = batches[begin : (number + 1) * batches_a_group - first]
        of_group = of_group.reshape(-1, batches.shape[-1])
        products[number] += of_group.T @ of_group
