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

BATCHES_OF_LONG_POSITIONS = 64
"""Positions of more than `MOST_COORDINATES` have at most this many batches, since each addition
copies all sums."""

FEWEST_GROUPS = 4
"""Products of batches are joined into no fewer groups than this, so that those of a few chains show
how much they vary."""

PRODUCT_ELEMENTS = 250_000
"""Products of positions and gradients are of groups of batches where a chain would otherwise keep
more than this many. With more of them, copying them takes more time than the transitions."""

PRODUCTS_A_DRAW = 5
"""Products may leave out transitions where a draw has more than this many. Positions so close to
each other hardly differ."""

LARGEST_SPACING = 4
"""Products leave out at most three of four transitions. The noise of gradients is independent, so
that more of them give a smaller error, even where the positions hardly differ."""

COORDINATES_WITH_ALL = 20
"""Products are of all transitions up to this number of coordinates. With more of them, products
would take more than a tenth of the time of the transitions."""

MOST_COORDINATES = 500
"""Longer positions have no products, since they have no dense matrices either, see
`DENSE_DIMENSION`."""

WAITING = 64
"""At least this many transitions are gathered before they are added, since each addition copies all
sums."""


class RunningMoments(Adaptation):
    r"""Sums over transitions of z = (θ - origin, ∇̂), and of (θ - origin) zᵀ, by batches.

    The origin is the position of a chain at its first transition after tuning. Products of
    positions far from it would lose digits of the covariance.

    After tuning each draw is counted in the present batch. When all batches are full, neighbours
    are added, and further batches have twice the length. A long run of any length then has between
    half of `BATCHES` and all of them, of equal length.

    Parameters
    ----------
    dimension : int
        Length d of the position.
    """

    transitions = 10**9

    def __init__(self, dimension: int):
        self._batches, self._groups = BATCHES, BATCHES
        if dimension > MOST_COORDINATES:
            self._batches, self._groups = BATCHES_OF_LONG_POSITIONS, 0
        while self._groups > FEWEST_GROUPS and (self._groups * 2 * dimension**2 > PRODUCT_ELEMENTS):
            self._groups //= 2

    def begin(self, position: np.ndarray) -> AdaptationState:
        """No transitions yet."""
        d = len(position)
        return {
            "origin": np.array(position, dtype=float),
            "sums": np.zeros((self._batches, 2 * d)),
            "group_sums": np.zeros((self._groups, 2 * d)),
            "products": np.zeros((self._groups, d, 2 * d)),
            "full": np.asarray(0),
            "length": np.asarray(1),
            "partial": np.asarray(0),
            "waiting_sums": np.zeros((0, 2 * d)),
            "waiting": np.zeros((0, 0, 2 * d)),
            "thin": np.asarray(1),
        }

    def update(
        self, state: AdaptationState, seen: Seen
    ) -> tuple[AdaptationState, dict[str, np.ndarray]]:
        """Add the transitions after tuning."""
        if seen.tuning:
            return state, {}
        if not (state["full"] or state["partial"] or len(state["waiting_sums"])):
            state = self._first(seen)
        origin, thin = state["origin"], int(state["thin"])
        shape = (-1, thin, len(origin))
        positions, gradients = seen.positions.reshape(shape), seen.gradients.reshape(shape)
        waiting, ones = {}, np.ones(thin)
        if self._groups:
            part = _spaced(thin, len(origin))
            some = positions[:, part]
            z = np.empty((*some.shape[:2], 2 * len(origin)))
            np.subtract(some, origin, out=z[..., : len(origin)])
            z[..., len(origin) :] = gradients[:, part]
            waiting["waiting"] = _after(state["waiting"], z)
        # A product with ones is several times faster than `sum` along a short axis.
        if self._groups and z.shape[1] == thin:
            sums = ones @ z
        else:
            sums = np.concatenate([ones @ positions - thin * origin, ones @ gradients], axis=1)
        waiting["waiting_sums"] = _after(state["waiting_sums"], sums)
        state = {**state, **waiting}
        if len(state["waiting_sums"]) * thin < WAITING:
            return state, {}
        return self._with_waiting(state), {}

    def _first(self, seen: Seen) -> AdaptationState:
        """State before the first transitions after tuning."""
        state, d = self.begin(seen.positions[0]), seen.positions.shape[1]
        of_products = len(range(seen.thin)[_spaced(seen.thin, d)]) if self._groups else 0
        return {
            **state,
            "waiting": np.zeros((0, of_products, 2 * d)),
            "thin": np.asarray(seen.thin),
        }

    def of_chain(self, state: AdaptationState) -> Mapping[str, np.ndarray]:
        """Moments of a chain that has ended: sums over batches, and means over groups."""
        per_draw = state["waiting"].shape[1]
        state = self._with_waiting(state)
        full, length, thin = (int(state[name]) for name in ("full", "length", "thin"))
        # The last batch is left out where it is not full. The last group may have fewer transitions
        # than the others.
        draws_a_group = self._batches // self._groups * length if self._groups else 0
        draws = full * length + int(state["partial"]) - draws_a_group * np.arange(self._groups)
        draws = np.clip(draws[draws > 0], 0, draws_a_group)
        products = draws * per_draw
        return {
            "origin": state["origin"],
            "batch_sums": state["sums"][:full],
            "group_means": state["group_sums"][: len(draws)] / products[:, None],
            "group_products": state["products"][: len(draws)] / products[:, None, None],
            "group_counts": draws * thin,
            "length": np.asarray(length * thin),
        }

    def _with_waiting(self, state: AdaptationState) -> AdaptationState:
        """State with the waiting draws added to the sums."""
        sums, group_sums, products = (
            state[name].copy() for name in ("sums", "group_sums", "products")
        )
        full, length, partial = (int(state[name]) for name in ("full", "length", "partial"))
        draw_sums, z = state["waiting_sums"], state["waiting"]
        batches_a_group = self._batches // self._groups if self._groups else 0
        start = 0
        while start < len(draw_sums):
            if full == self._batches:
                sums, group_sums, products = map(_joined, (sums, group_sums, products))
                full, length = self._batches // 2, 2 * length
            # Whole batches, or what the present one lacks.
            remaining = len(draw_sums) - start
            batches = min(self._batches - full, remaining // length) if partial == 0 else 0
            count = batches * length or min(length - partial, remaining)
            part = slice(start, start + count)
            shape = (max(1, batches), -1, draw_sums.shape[1])
            sums[full : full + shape[0]] += draw_sums[part].reshape(shape).sum(1)
            if self._groups:
                _add_products(group_sums, products, z[part].reshape(shape), full, batches_a_group)
            start += count
            if batches:
                full += batches
            else:
                full, partial = full + (partial + count) // length, (partial + count) % length
        return {
            **state,
            "sums": sums,
            "group_sums": group_sums,
            "products": products,
            "full": np.asarray(full),
            "length": np.asarray(length),
            "partial": np.asarray(partial),
            "waiting_sums": draw_sums[:0].copy(),
            "waiting": z[:0].copy(),
        }


def _spaced(thin: int, dimension: int) -> slice:
    """Transitions of a draw with products: the last, and others before it at equal distances."""
    spacing = 1
    if dimension > COORDINATES_WITH_ALL:
        spacing = min(max(1, thin // PRODUCTS_A_DRAW), LARGEST_SPACING)
    return slice((thin - 1) % spacing, None, spacing)


def _after(waiting: np.ndarray, values: np.ndarray) -> np.ndarray:
    """What was waiting, and values after it; no copy where nothing was."""
    return np.concatenate([waiting, values]) if len(waiting) else values


def _joined(values: np.ndarray) -> np.ndarray:
    """Sums of neighbours in the first half, and zeros in the second."""
    joined = np.zeros_like(values)
    half = len(values) // 2
    joined[:half] = values.reshape(half, 2, *values.shape[1:]).sum(1)
    return joined


def _add_products(
    sums: np.ndarray, products: np.ndarray, batches: np.ndarray, first: int, batches_a_group: int
) -> None:
    """Add z and (θ - origin) zᵀ of batches, shape (batches, length, 2 d), to their groups."""
    d = products.shape[1]
    if batches_a_group == 1:
        numbers = slice(first, first + len(batches))
        sums[numbers] += batches.sum(1)
        products[numbers] += batches[..., :d].swapaxes(1, 2) @ batches
        return
    last = first + len(batches) - 1
    for number in range(first // batches_a_group, last // batches_a_group + 1):
        begin = max(0, number * batches_a_group - first)
        of_group = batches[begin : (number + 1) * batches_a_group - first]
        of_group = of_group.reshape(-1, batches.shape[-1])
        sums[number] += np.ones(len(of_group)) @ of_group
        products[number] += of_group[:, :d].T @ of_group
