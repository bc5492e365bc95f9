r"""The rows of a minibatch: index arguments, and the data from which they select.

A scheme holds the data in shared variables and says how an index argument selects rows of them.
The data are never constants: compiled code is then the same for all data of one shape, and comes
from the disk cache. The indices are drawn outside, from the generator of the chain.

The ``variance_factor`` of a scheme is the factor c in the covariance of the stochastic gradient,

.. math:: V = \frac{N^2}{n}\, c\, C, \qquad
          c = 1 \text{ with replacement},\quad c = \frac{N-n}{N-1} \text{ without},

with C the covariance over rows (divisor N) of the gradient of one row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.tensor.variable import TensorVariable

EPOCHS_BETWEEN_SHUFFLES = 100
"""The rows are put into a new random order after this many passes over the data.

A fixed order has only N different windows. Their covariance differs from its expectation by a
relative sqrt(2 n / N), which new orders average out. At 100 passes the copying costs less than 3 %
of the transitions."""

FIRST_ORDER = 0
"""The rows are in the order of this seed when a chain begins, so that a new chain needs no copying.
Its value has no meaning."""


class Batching(ABC):
    """A minibatch scheme over arrays with a common leading length N.

    Parameters
    ----------
    data : sequence of numpy.ndarray
        The data, which are never written to.
    batch_size : int
        Number n of rows in a minibatch, between 1 and N.
    derived : sequence of numpy.ndarray
        Further arrays that belong to the scheme alone. No second copy of them is kept.
    static : bool
        Whether all shapes are constants of the graph, as JAX needs. Otherwise one compiled function
        works for all N and n.
    excluded : numpy.ndarray of int, optional
        Numbers of rows that no minibatch has. N counts the others.
    """

    name: ClassVar[str]
    without_replacement: ClassVar[bool]

    def __init__(
        self,
        data: Sequence[np.ndarray],
        batch_size: int,
        *,
        derived: Sequence[np.ndarray] = (),
        static: bool = False,
        excluded: np.ndarray | None = None,
    ):
        self._length_of_data = len((*data, *derived)[0])
        self._drawn: np.ndarray | None = None
        if excluded is not None and len(excluded):
            self._drawn = numbers_without(self._length_of_data, excluded)
        self.n_rows = self._length_of_data if self._drawn is None else len(self._drawn)
        self.batch_size = check_batch_size(batch_size, self.n_rows)
        self.static = static
        self._data = tuple(data)
        self._shared = tuple(
            pytensor.shared(
                values,
                f"data_{index}",
                borrow=True,
                shape=self._static_shape(values),
            )
            for index, values in enumerate(self._buffers([*data, *derived]))
        )
        self._to_device()
        self._length = pytensor.shared(np.int64(self.batch_size), "batch_size")
        self._n_rows = pytensor.shared(np.int64(self.n_rows), "n_rows")

    @property
    def derived(self) -> tuple[SharedVariable, ...]:
        """The derived arrays in the present order, of which only the first N rows count."""
        return self._shared[len(self._data) :]

    def read_derived(self) -> list[np.ndarray]:
        """Copies of the derived arrays in the order of the data."""
        return [shared.get_value() for shared in self.derived]

    def write_derived(self, arrays: Sequence[np.ndarray]) -> None:
        """Set the derived arrays from arrays in the order of the data, which are copied."""
        for shared, values in zip(self.derived, arrays, strict=True):
            shared.set_value(np.array(values, dtype=shared.dtype), borrow=True)

    @property
    def length(self) -> TensorVariable:
        """Symbolic number of rows n of a minibatch."""
        return pt.constant(self.batch_size, dtype="int64") if self.static else self._length

    @property
    def n_rows_variable(self) -> TensorVariable:
        """Symbolic number of rows N of the data."""
        return pt.constant(self.n_rows, dtype="int64") if self.static else self._n_rows

    @property
    @abstractmethod
    def variance_factor(self) -> float:
        """The factor c of the scheme."""

    @property
    @abstractmethod
    def index_size(self) -> int:
        """Integers that one index takes."""

    @abstractmethod
    def index_variable(self, name: str) -> TensorVariable:
        """Symbolic indices of a run of minibatches, with minibatches as the first axis."""

    @abstractmethod
    def rows(self, index: TensorVariable) -> list[TensorVariable]:
        """Symbolic rows of all data arrays that one index selects."""

    @abstractmethod
    def stored_rows(self, table: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Rows of a table, of the kind of `derived`, that one index selects."""

    @abstractmethod
    def with_stored_rows(
        self, table: TensorVariable, index: TensorVariable, rows: TensorVariable
    ) -> TensorVariable:
        """The table with the rows of an index replaced. A repeated row is stored once."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, minibatches: int) -> np.ndarray:
        """Draw the indices of minibatches, with minibatches as the first axis.

        Drawing a and then b minibatches gives the same as drawing a + b at once.
        """

    @abstractmethod
    def selected(self, index: np.ndarray) -> np.ndarray:
        """Row numbers in the original data, shape (n,), that an index has at present."""

    @abstractmethod
    def set_order(self, seed: int) -> None:
        """Put the rows in the random order of a seed, where the scheme has an order."""

    def _to_device(self) -> None:
        """Move the arrays to the device of JAX, where that runs the transitions.

        PyTensor would pass NumPy's arrays, which JAX copies in each call.
        """
        if not self.static:
            return
        from pytensor.link.jax.dispatch import jax_typify

        for shared in self._shared:
            storage = shared.container.storage  # `set_value` would make it a NumPy array again
            storage[0] = jax_typify(storage[0])

    def _buffers(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Arrays from which minibatches are read, which are the data where these are contiguous."""
        return [np.ascontiguousarray(values) for values in arrays]

    def _static_shape(self, values: np.ndarray) -> tuple[int | None, ...]:
        if self.static:
            return values.shape
        return (None, *values.shape[1:])


class ShuffledWindows(Batching):
    """A random window of a copy of the data in random order, continued from its beginning.

    Each row is in a window with probability n / N and no row is in it twice, so the gradient
    estimate is unbiased for each order. Memory is read in sequence, which on large data is several
    times faster than gathering random rows.
    """

    name = "shuffle"
    without_replacement = True
    _order: int
    _present: np.ndarray | None
    """Permutation of the present order, kept after its first use."""

    @property
    def variance_factor(self) -> float:
        """c = (N - n) / (N - 1), on average over orders."""
        return (self.n_rows - self.batch_size) / max(1, self.n_rows - 1)

    @property
    def index_size(self) -> int:
        """One start."""
        return 1

    def index_variable(self, name: str) -> TensorVariable:
        """Window starts, shape (minibatches,)."""
        return pt.lvector(name)

    def rows(self, index: TensorVariable) -> list[TensorVariable]:
        """Rows from ``start`` to ``start + n``."""
        if self.static:
            # JAX takes slices of constant length only as a gather of constant offsets.
            offsets = pt.constant(np.arange(self.batch_size, dtype="int64"))
            return [shared[index + offsets] for shared in self._shared]
        return [shared[index : index + self._length] for shared in self._shared]

    def stored_rows(self, table: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Rows up to the end, and the first ones where the window wraps round."""
        wrapped = pt.maximum(index + self.length - self.n_rows_variable, 0)
        return pt.concatenate([table[index : index + self.length - wrapped], table[:wrapped]])

    def with_stored_rows(
        self, table: TensorVariable, index: TensorVariable, rows: TensorVariable
    ) -> TensorVariable:
        """The table with both parts replaced. The repeated rows at its end are not changed."""
        wrapped = pt.maximum(index + self.length - self.n_rows_variable, 0)
        before = self.length - wrapped
        table = pt.set_subtensor(table[index : index + before], rows[:before])
        return pt.set_subtensor(table[:wrapped], rows[before:])

    def read_derived(self) -> list[np.ndarray]:
        """Copies of the derived arrays in the order of the data."""
        return self._in_original_order([shared.get_value(borrow=True) for shared in self.derived])

    def write_derived(self, arrays: Sequence[np.ndarray]) -> None:
        """Copy arrays in the order of the data over the derived ones."""
        permutation = self._permutation(self._order)
        for shared, values in zip(self.derived, arrays, strict=True):
            buffer = shared.get_value(borrow=True)
            self._fill(buffer, np.asarray(values, dtype=buffer.dtype), permutation)
            shared.set_value(buffer, borrow=True)

    def draw(self, rng: np.random.Generator, minibatches: int) -> np.ndarray:
        """Starts, uniform over the N rows."""
        if self.batch_size == self.n_rows:
            return np.zeros(minibatches, dtype=np.int64)
        return rng.integers(self.n_rows, size=minibatches)

    def selected(self, index: np.ndarray) -> np.ndarray:
        """Row numbers of a window in the present order."""
        if self._present is None:
            self._present = self._permutation(self._order)
        return self._present[np.arange(int(index), int(index) + self.batch_size) % self.n_rows]

    def set_order(self, seed: int) -> None:
        """Copy the rows in the order of a seed over the present copy."""
        if seed == self._order:
            return
        buffers = [shared.get_value(borrow=True) for shared in self._shared]
        if self.static:  # JAX's arrays cannot be changed.
            buffers = [np.array(buffer) for buffer in buffers]
        sources = [*self._data, *self._in_original_order(buffers[len(self._data) :])]
        permutation = self._permutation(seed)
        for values, buffer in zip(sources, buffers, strict=True):
            self._fill(buffer, values, permutation)
        for shared, buffer in zip(self._shared, buffers, strict=True):
            shared.set_value(buffer, borrow=True)
        self._to_device()
        self._order = seed
        self._present = None

    def _in_original_order(self, buffers: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Copies of shuffled arrays in the order of the data."""
        if not buffers:
            return []
        permutation = self._permutation(self._order)
        copies = [
            np.zeros((self._length_of_data, *buffer.shape[1:]), dtype=buffer.dtype)
            for buffer in buffers
        ]
        for values, buffer in zip(copies, buffers, strict=True):
            values[permutation] = buffer[: self.n_rows]
        return copies

    def _permutation(self, seed: int) -> np.ndarray:
        numbers = np.arange(self.n_rows)
        if self.batch_size < self.n_rows:
            numbers = np.random.default_rng([self.n_rows, seed]).permutation(self.n_rows)
        return numbers if self._drawn is None else self._drawn[numbers]

    def _buffers(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        # The first rows are repeated at the end, so that a wrapped window is a plain slice.
        padding = self.batch_size - 1 if self.batch_size < self.n_rows else 0
        self._order = FIRST_ORDER
        self._present = None
        permutation = self._permutation(FIRST_ORDER)
        buffers = []
        for values in arrays:
            buffer = np.empty((self.n_rows + padding, *values.shape[1:]), dtype=values.dtype)
            self._fill(buffer, values, permutation)
            buffers.append(buffer)
        return buffers

    def _fill(self, buffer: np.ndarray, values: np.ndarray, permutation: np.ndarray) -> None:
        # With "clip" NumPy writes into `out` directly. The permutation is always in range.
        np.take(values, permutation, axis=0, out=buffer[: self.n_rows], mode="clip")
        buffer[self.n_rows :] = buffer[: len(buffer) - self.n_rows]


class WithReplacement(Batching):
    """n independent uniform rows, as in `pymc.Minibatch`. A row may be drawn several times."""

    name = "replace"
    without_replacement = False

    @property
    def variance_factor(self) -> float:
        """c = 1."""
        return 1.0

    @property
    def index_size(self) -> int:
        """One number a row."""
        return self.batch_size

    def index_variable(self, name: str) -> TensorVariable:
        """Row numbers, shape (minibatches, n)."""
        return pt.tensor(
            name, dtype="int64", shape=(None, self.batch_size if self.static else None)
        )

    def rows(self, index: TensorVariable) -> list[TensorVariable]:
        """Rows gathered by number."""
        return [shared[index] for shared in self._shared]

    def stored_rows(self, table: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Rows gathered by number."""
        return table[index]

    def with_stored_rows(
        self, table: TensorVariable, index: TensorVariable, rows: TensorVariable
    ) -> TensorVariable:
        """Rows scattered by number."""
        return pt.set_subtensor(table[index], rows)

    def draw(self, rng: np.random.Generator, minibatches: int) -> np.ndarray:
        """Row numbers, uniform and independent, shape (minibatches, n)."""
        numbers = rng.integers(self.n_rows, size=(minibatches, self.batch_size))
        return numbers if self._drawn is None else self._drawn[numbers]

    def selected(self, index: np.ndarray) -> np.ndarray:
        """The index itself."""
        return np.asarray(index)

    def set_order(self, seed: int) -> None:
        """Nothing to do, since there is no order."""


class AllRows(Batching):
    """All rows in the order of the data, every time and without a copy."""

    name = "all"
    without_replacement = True

    @property
    def variance_factor(self) -> float:
        """c = 0, since the gradient has no noise."""
        return 0.0

    @property
    def index_size(self) -> int:
        """One number, which has no meaning."""
        return 1

    def index_variable(self, name: str) -> TensorVariable:
        """A number for each transition, shape (transitions,)."""
        return pt.lvector(name)

    def rows(self, index: TensorVariable) -> list[TensorVariable]:
        """All rows, whatever the index."""
        return list(self._shared)

    def stored_rows(self, table: TensorVariable, index: TensorVariable) -> TensorVariable:
        """The whole table."""
        return table

    def with_stored_rows(
        self, table: TensorVariable, index: TensorVariable, rows: TensorVariable
    ) -> TensorVariable:
        """The rows, which replace the whole table."""
        return rows

    def draw(self, rng: np.random.Generator, minibatches: int) -> np.ndarray:
        """Zeros, since nothing is drawn."""
        return np.zeros(minibatches, dtype=np.int64)

    def selected(self, index: np.ndarray) -> np.ndarray:
        """Numbers of all rows."""
        return np.arange(self.n_rows)

    def set_order(self, seed: int) -> None:
        """Nothing to do, since there is no order."""


SCHEMES: dict[str, type[Batching]] = {
    scheme.name: scheme for scheme in (ShuffledWindows, WithReplacement)
}
"""These are the minibatch schemes that a user can choose by name."""


def make_batching(
    scheme: str,
    data: Sequence[np.ndarray],
    batch_size: int,
    *,
    derived: Sequence[np.ndarray] = (),
    static: bool = False,
    excluded: np.ndarray | None = None,
) -> Batching:
    """Make a minibatch scheme by name.

    Raises
    ------
    ValueError
        For an unknown name or a batch size outside 1..N.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"`batching` should be one of {sorted(SCHEMES)}, but got {scheme!r}.")
    return SCHEMES[scheme](data, batch_size, derived=derived, static=static, excluded=excluded)


def numbers_without(count: int, excluded: np.ndarray) -> np.ndarray:
    """The numbers from 0 to `count` - 1 without the excluded ones, in order."""
    remains = np.ones(count, dtype=bool)
    remains[excluded] = False
    return np.flatnonzero(remains)


def check_batch_size(batch_size: int, n_rows: int | None = None) -> int:
    """Return a valid batch size as an integer, checked against the number of rows if known.

    Raises
    ------
    TypeError, ValueError
        Where it is no whole number between 1 and the number of rows.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer):
        raise TypeError(f"`batch_size` should be a whole number of rows, but got {batch_size!r}.")
    if batch_size < 1 and n_rows is None:
        raise ValueError(f"`batch_size` should be at least 1, but got {batch_size}.")
    if n_rows is not None and not 1 <= batch_size <= n_rows:
        raise ValueError(
            f"`batch_size` should be between 1 and the number of rows, {n_rows}, but got "
            f"{batch_size}."
        )
    return int(batch_size)
