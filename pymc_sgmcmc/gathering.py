"""Minibatches whose rows are read into memory before the transitions that use them.

The numbers of the rows that a chain will read follow from its generator. So one pass over a source
gathers the rows of many transitions, in their order, and compiled transitions take slices of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import pytensor
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.batching import (
    ANY_NOISE,
    FIRST_ORDER,
    Batching,
    RowOrder,
    ShuffledWindows,
    check_batch_size,
    numbers_without,
    scheme_class,
)
from pymc_sgmcmc.sources.arrays import joined

MOST_BYTES = 2 * 2**30
"""Gathered rows take at most so many bytes by default, 2 GiB."""


class _Stretch(NamedTuple):
    """Minibatches whose rows are read by a thread, while transitions use those before them."""

    order: int
    minibatches: np.ndarray
    rows: Future[Sequence[np.ndarray]]


ReadRows = Callable[[np.ndarray], Sequence[np.ndarray]]
"""Rows of several arrays by their numbers, in any order."""

JoinRows = Callable[[Sequence[np.ndarray], int, Sequence[np.ndarray]], Sequence[np.ndarray]]
"""Rows of several arrays, those of the first ones from a place on, and the second ones."""


class GatheredRows(Batching):
    """Minibatches of a scheme, gathered in the order in which transitions take them.

    Indices and probabilities are those of the scheme in memory on the same number of rows, and so
    are the draws of a chain.

    Parameters
    ----------
    read : callable
        Reads rows by their numbers.
    n_rows : int
        Number of all rows.
    batch_size : int
    scheme : {"shuffle", "replace"}
    static : bool
        Refused: JAX needs arrays of a fixed length.
    excluded : numpy.ndarray of int, optional
        Numbers of rows that no minibatch has.
    most_bytes : int
        Memory of the gathered rows. They have at least one run of transitions.
    derive : callable, optional
        Makes the arrays of minibatches from rows that were read. It is called by the thread of the
        transitions alone, since compiled functions are for one thread at a time.
    join : callable
        Joins arrays of minibatches.
    shared_by_rows : sequence of bool
        For each array whether rows have no parts of it of their own. Missing ones are False.
    bytes_beside : float
        Bytes of such arrays that a row needs, on average.
    row_bytes, noise_share : float
        As of `make_batching`, for the same draws as in memory.

    Raises
    ------
    TypeError, ValueError
        For an unknown scheme, a batch size outside of 1..N, and on JAX.
    """

    def __init__(
        self,
        read: ReadRows,
        n_rows: int,
        batch_size: int,
        *,
        scheme: str,
        static: bool = False,
        excluded: np.ndarray | None = None,
        most_bytes: int = MOST_BYTES,
        derive: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]] | None = None,
        join: JoinRows = joined,
        shared_by_rows: Sequence[bool] = (),
        bytes_beside: float = 0.0,
        row_bytes: float = 0.0,
        noise_share: float = ANY_NOISE,
    ):
        if static:
            raise ValueError(
                "Rows of a source are not gathered for JAX. Use "
                '`compile_kwargs={"mode": "NUMBA"}`, the default.'
            )
        self.excluded = np.empty(0, dtype=np.int64) if excluded is None else excluded
        self.n_rows = n_rows - len(self.excluded)
        self._scheme = scheme_class(scheme, self.n_rows, batch_size, row_bytes, noise_share)
        self.name = self._scheme.name
        self.without_replacement = self._scheme.without_replacement
        self.batch_size = check_batch_size(batch_size, self.n_rows)
        self.static = False
        self._read, self._most_bytes = read, most_bytes
        self._derive = derive
        self._order = FIRST_ORDER
        self._present: RowOrder | None = None
        first = self._derived(read(np.arange(self.batch_size)))
        self._join = join
        others = [False] * (len(first) - len(shared_by_rows))
        self._shared_by_rows = (*shared_by_rows, *others)
        own = [values for values, all_ in zip(first, self._shared_by_rows, strict=True) if not all_]
        self._row_bytes = sum(values[:1].nbytes for values in own) + bytes_beside
        self._data = ()
        self._shared = tuple(
            pytensor.shared(values, f"data_{index}", borrow=True, shape=(None, *values.shape[1:]))
            for index, values in enumerate(first)
        )
        none = np.empty(0, dtype=np.int64)
        self._gathered: tuple[np.ndarray, np.ndarray] = none, none
        self._following: _Stretch | None = None
        self._length = pytensor.shared(np.int64(self.batch_size), "batch_size")
        self._n_rows = pytensor.shared(np.int64(self.n_rows), "n_rows")

    @property
    def index_size(self) -> int:
        """That of the scheme."""
        return 1 if self._takes_windows else self.batch_size

    @property
    def _takes_windows(self) -> bool:
        """Whether a minibatch is the window of an order, rather than numbers of rows."""
        return self._scheme is ShuffledWindows

    @property
    def most_minibatches(self) -> float:
        """Minibatches in the given memory."""
        return max(1, int(self._most_bytes // (self._row_bytes * self.batch_size)))

    def rows(self, index: TensorVariable) -> list[TensorVariable]:
        """Gathered rows from ``start`` to ``start + n``."""
        return [
            shared if of_all else shared[index : index + self._length]
            for shared, of_all in zip(self._shared, self._shared_by_rows, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what a thread reads."""
        return {**vars(self), "_following": None}

    def draw(self, rng: np.random.Generator, minibatches: int) -> np.ndarray:
        """Indices of the scheme: starts of windows, or numbers of rows."""
        return self._scheme.draw(self, rng, minibatches)

    def selected(self, index: np.ndarray) -> np.ndarray:
        """Row numbers in the original data, shape (n,)."""
        return self._numbers(np.asarray(index)[None])[0]

    def set_order(self, seed: int) -> None:
        """Take the windows of the order of a seed from now on."""
        if self._takes_windows and seed != self._order:
            self._order, self._present = seed, None

    def first_indices(self, minibatches: int) -> np.ndarray:
        """Starts of minibatches that are in memory at first."""
        return np.zeros(minibatches, dtype=np.int64)

    def in_memory(self, index: np.ndarray, rng: np.random.Generator, following: int) -> np.ndarray:
        """Starts of minibatches in the gathered rows, which are read where they are not there.

        Where all that follow do not fit in memory, stretches of half of it are read, the next one
        by a thread while the transitions of the present one run.
        """
        place = self._place(index)
        if place is None:
            rng, most = deepcopy(rng), int(self.most_minibatches)
            after = self._go_on(index)
            if after is not None:
                self.draw(rng, len(after))
            else:
                if len(index) + following > most:
                    most //= 2
                after = self.draw(rng, max(0, min(following, most - len(index))))
                self._gather(np.concatenate([index, after]))
            self._read_following(rng, following - len(after))
            place = 0
        return (place + np.arange(len(index))) * self.batch_size

    def _read_following(self, rng: np.random.Generator, following: int) -> None:
        """Begin to read the stretch after the gathered one, where any follows."""
        count = min(following, int(self.most_minibatches // 2))
        if count > 0:
            index = self.draw(rng, count)
            thread = ThreadPoolExecutor(max_workers=1)
            rows = thread.submit(self._read, self._numbers(index).ravel())
            thread.shutdown(wait=False)
            self._following = _Stretch(self._order, index, rows)

    def _go_on(self, index: np.ndarray) -> np.ndarray | None:
        """Take the stretch that a thread has read, where minibatches lead on to it.

        Returns
        -------
        numpy.ndarray or None
            Its minibatches after the given ones.
        """
        stretch, self._following = self._following, None
        if stretch is None or stretch.order != self._order:
            return None
        _, gathered = self._gathered
        firsts = index.reshape(len(index), -1)[:, 0]
        for kept in np.flatnonzero(firsts == stretch.minibatches.reshape(-1)[0]):
            taken, end = len(index) - int(kept), len(gathered) - int(kept)
            if (
                end >= 0
                and np.array_equal(gathered[end:], index[:kept])
                and np.array_equal(stretch.minibatches[:taken], index[kept:])
            ):
                before = [shared.get_value(borrow=True) for shared in self._shared]
                rows = self._derived(stretch.rows.result())
                self._hold(self._join(before, end * self.batch_size, rows))
                self._remember(np.concatenate([gathered[end:], stretch.minibatches]))
                return stretch.minibatches[taken:]
        return None

    def read_ahead(self, orders: Sequence[int], indices: Sequence[np.ndarray]) -> int:
        """Bring the rows of several chains into memory together; how many of the chains fit."""
        ends = np.cumsum([len(index) for index in indices])
        fitting = int(np.searchsorted(ends, self.most_minibatches, side="right"))
        pairs = list(zip(orders, indices, strict=True))[:fitting]
        if pairs:
            numbers = np.concatenate([self.numbers(*pair) for pair in pairs])
            self._hold(self._derived(self._read(numbers)))
            minibatches = [index for _, index in pairs]
            seeds = [order if self._takes_windows else FIRST_ORDER for order, _ in pairs]
            lengths = [len(index) for index in minibatches]
            self._gathered = np.repeat(seeds, lengths), np.concatenate(minibatches)
        return fitting

    def numbers(self, order: int, minibatches: np.ndarray) -> np.ndarray:
        """Numbers of the rows of minibatches of an order of the rows, shape (minibatches * n,)."""
        self.set_order(order)
        return self._numbers(minibatches).ravel()

    def holds(self, order: int, minibatches: np.ndarray) -> bool:
        """Whether the rows of minibatches of an order are in memory."""
        self.set_order(order)
        return self._place(minibatches) is not None

    def hold(self, order: int, minibatches: np.ndarray) -> None:
        """Read the rows of minibatches of an order into memory."""
        self.set_order(order)
        self._gather(minibatches)

    def _place(self, index: np.ndarray) -> int | None:
        """Number of the first of some minibatches among those in memory, None if one is not."""
        orders, gathered = self._gathered
        if len(gathered) < len(index):
            return None
        firsts = gathered.reshape(len(gathered), -1)[:, 0]
        first = index.reshape(len(index), -1)[0, 0]
        for place in np.flatnonzero((firsts == first) & (orders == self._order)):
            if np.array_equal(gathered[place : place + len(index)], index):
                return int(place)
        return None

    def _gather(self, index: np.ndarray) -> None:
        self._hold(self._derived(self._read(self._numbers(index).ravel())))
        self._remember(index)

    def _remember(self, index: np.ndarray) -> None:
        """Note which minibatches are in memory, all of the present order."""
        self._gathered = np.full(len(index), self._order), index

    def _derived(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Arrays of minibatches from rows that were read."""
        arrays = rows if self._derive is None else self._derive(rows)
        return [np.ascontiguousarray(values) for values in arrays]

    def _hold(self, arrays: Sequence[np.ndarray]) -> None:
        for shared, values in zip(self._shared, arrays, strict=True):
            shared.set_value(values, borrow=True)

    def _numbers(self, index: np.ndarray) -> np.ndarray:
        """Row numbers of minibatches, shape (minibatches, n)."""
        if not self._takes_windows:
            return index
        places = (index[:, None] + np.arange(self.batch_size)) % self.n_rows
        if self.batch_size < self.n_rows:
            if self._present is None:
                self._present = RowOrder(self.n_rows, [self.n_rows, self._order])
            places = self._present(places)
        return numbers_without(self.excluded, places)
