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

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.checks import one_of
from pymc_sgmcmc.errors import ModelError

LISTED_ROWS = 10_000_000
"""The random order of at most this many rows is a list of their numbers, 80 MB, which takes 0.03
microseconds a row. That of more rows is a function of the place, which needs no memory and takes
0.1 microseconds."""

ORDER_PIECE = 2**16
"""So many places are mapped at once, in arrays that stay in the cache of a core."""

EPOCHS_BETWEEN_SHUFFLES = 100
"""Windows are of a new random order after this many passes over the data. The copying then costs
less than 3 % of the transitions."""

CHAINS_WITH_ORDERS = 4
"""Orders are averaged over so many chains, PyMC's default. A run of fewer has fewer draws too."""

ANY_NOISE = 20.0
"""Bound on the part of a variance that is due to noise, which is at most 1, in units of an accepted
error of 5 %, the default of the step methods."""

USUAL_TRANSITIONS = 10_000
"""Windows save the time to gather the rows of minibatches, and the copy for them takes that time
for all rows. It is made where a run of so many transitions reads more. The length of a run is not
known when a sampler is made, and PyMC's default is 4 chains of 1000 draws of a few transitions."""

MOST_COPIED = 2**28
"""Data of at most so many bytes, 0.25 GB, are copied for windows. Each process has a copy of its
own, whose memory and time would be more than what windows save in a run of usual length."""

FIRST_ORDER = 0
"""The rows are in the order of this seed before a chain begins. Its value has no meaning."""

NO_TABLE = "No table of all rows is in memory. Use another gradient estimator."
"""This is the message of schemes that can store nothing for each row."""


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

    name: str
    without_replacement: bool

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
        self.excluded = np.empty(0, dtype=np.int64) if excluded is None else excluded
        self.n_rows = self._length_of_data - len(self.excluded)
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
    def variance_factor(self) -> float:
        """The factor c of the scheme."""
        if not self.without_replacement:
            return 1.0
        return (self.n_rows - self.batch_size) / max(1, self.n_rows - 1)

    def setting(self, batch_size: int) -> str:
        """The setting with which minibatches have about so many rows."""
        return f"batch_size={batch_size}"

    @property
    def index_size(self) -> int:
        """Integers that one index takes."""
        return 1

    def index_variable(self, name: str) -> TensorVariable:
        """Symbolic indices of a run of minibatches, with minibatches as the first axis."""
        return pt.lvector(name)

    @abstractmethod
    def rows(self, index: TensorVariable) -> list[TensorVariable]:
        """Symbolic rows of all data arrays that one index selects."""

    def stored_rows(self, table: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Rows of a table, of the kind of `derived`, that one index selects."""
        raise ValueError(NO_TABLE)

    def with_stored_rows(
        self, table: TensorVariable, index: TensorVariable, rows: TensorVariable
    ) -> TensorVariable:
        """The table with the rows of an index replaced. A repeated row is stored once."""
        raise ValueError(NO_TABLE)

    @abstractmethod
    def draw(self, rng: np.random.Generator, minibatches: int) -> np.ndarray:
        """Draw the indices of minibatches, with minibatches as the first axis.

        Drawing a and then b minibatches gives the same as drawing a + b at once. The schemes that a
        user can choose take N, n and the excluded rows alone, so that `GatheredRows` has the same.
        """

    @abstractmethod
    def selected(self, index: np.ndarray) -> np.ndarray:
        """Row numbers in the original data, shape (n,), that an index has at present."""

    def set_order(self, seed: int) -> None:  # noqa: B027  # Most schemes have none.
        """Put the rows in the random order of a seed, where the scheme has an order."""

    @property
    def most_minibatches(self) -> float:
        """So many minibatches can be in memory together."""
        return np.inf

    def first_indices(self, minibatches: int) -> np.ndarray:
        """Indices of minibatches that are in memory at first."""
        rng = np.random.default_rng(0)
        return self.in_memory(self.draw(rng, minibatches), rng, 0)

    def in_memory(self, index: np.ndarray, rng: np.random.Generator, following: int) -> np.ndarray:
        """Indices in the form that compiled functions take, with their rows in memory.

        Parameters
        ----------
        index : numpy.ndarray
            Indices of minibatches, from `draw`.
        rng : numpy.random.Generator
            The generator after it has drawn them. It is not changed.
        following : int
            So many minibatches are expected to be drawn from it next.
        """
        return index

    def read_ahead(self, orders: Sequence[int], indices: Sequence[np.ndarray]) -> int:
        """Bring the rows of several chains into memory together; how many of the chains fit.

        Parameters
        ----------
        orders : sequence of int
            For each chain the seed of the order of the rows.
        indices : sequence of numpy.ndarray
            Their minibatches.
        """
        return len(indices)

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

    The covariance of the estimate has the factor c on average over orders. That of the N windows of
    one order differs from it by a relative sqrt(2 n / N), see `windows_suffice`.

    On JAX a window has a start and a stride, since many chains at once cannot have an order each.
    It takes every s-th row, with s coprime to N, so that no row is in it twice either. Indices from
    `draw` have the stride 1.
    """

    name = "shuffle"
    without_replacement = True
    _order: int
    _present: np.ndarray | None
    """Permutation of the present order, kept after its first use."""

    def index_variable(self, name: str) -> TensorVariable:
        """Window starts, shape (minibatches,), or starts and strides, (minibatches, 2)."""
        return pt.tensor(name, dtype="int64", shape=(None, 2)) if self.static else pt.lvector(name)

    def rows(self, index: TensorVariable) -> list[TensorVariable]:
        """Rows from ``start`` to ``start + n``."""
        if self.static:
            # JAX takes slices of constant length only as a gather of constant offsets.
            offsets = pt.constant(np.arange(self.batch_size, dtype="int64"))
            places = (index[0] + index[1] * offsets) % self.n_rows_variable
            return [shared[places] for shared in self._shared]
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

    def draw(self: Batching, rng: np.random.Generator, minibatches: int) -> np.ndarray:
        """Starts, uniform over the N rows."""
        if self.batch_size == self.n_rows:
            return np.zeros(minibatches, dtype=np.int64)
        return rng.integers(self.n_rows, size=minibatches)

    def in_memory(self, index: np.ndarray, rng: np.random.Generator, following: int) -> np.ndarray:
        """Starts, or on JAX starts with the stride 1."""
        return np.stack([index, np.ones_like(index)], axis=-1) if self.static else index

    def selected(self, index: np.ndarray) -> np.ndarray:
        """Row numbers of a window in the present order."""
        if self._present is None:
            self._present = self._permutation(self._order)
        return self._present[self._places(int(index))]

    def _places(self, start: int) -> np.ndarray:
        """Places of the rows of a window in the present order."""
        return np.arange(start, start + self.batch_size) % self.n_rows

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
            numbers = RowOrder(self.n_rows, [self.n_rows, seed])(numbers)
        return numbers_without(self.excluded, numbers)

    def _buffers(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        padding = self._padding()
        self._order = FIRST_ORDER
        self._present = None
        permutation = self._permutation(FIRST_ORDER)
        buffers = []
        for values in arrays:
            buffer = np.empty((self.n_rows + padding, *values.shape[1:]), dtype=values.dtype)
            self._fill(buffer, values, permutation)
            buffers.append(buffer)
        return buffers

    def _padding(self) -> int:
        """The first rows are repeated at the end, so that a wrapped window is a plain slice."""
        return self.batch_size - 1 if self.batch_size < self.n_rows else 0

    def _fill(self, buffer: np.ndarray, values: np.ndarray, permutation: np.ndarray) -> None:
        # With "clip" NumPy writes into `out` directly. The permutation is always in range.
        np.take(values, permutation, axis=0, out=buffer[: self.n_rows], mode="clip")
        buffer[self.n_rows :] = buffer[: len(buffer) - self.n_rows]


class RowOrder:
    """The random order of N rows that belongs to a seed, as a function of the place.

    For many rows it is a Feistel network on a rectangle that is hardly larger than N (Black and
    Rogaway 2002): a place is a pair of coordinates, and each of them is shifted in turn by a random
    function of the other one. Places outside of the N rows are mapped again until they are inside.

    Parameters
    ----------
    n_rows : int
    seed : int or sequence of int

    References
    ----------
    J. Black and P. Rogaway (2002). Ciphers with arbitrary finite domains. *CT-RSA*.

    Examples
    --------
    >>> order = RowOrder(5, 1)
    >>> sorted(order(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    _ROUNDS: ClassVar[int] = 6

    def __init__(self, n_rows: int, seed: int | Sequence[int]):
        self._n_rows = n_rows
        rng = np.random.default_rng(seed)
        self._listed = rng.permutation(n_rows) if n_rows <= LISTED_ROWS else None
        if self._listed is None:
            width = int(np.ceil(np.sqrt(n_rows)))
            self._sides = np.uint64(width), np.uint64(-(-n_rows // width))
            self._keys = rng.integers(2**64, size=self._ROUNDS, dtype=np.uint64)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Numbers of the rows at places, of the same shape."""
        if self._listed is not None:
            return self._listed[places]
        flat = np.ravel(places)
        numbers = np.empty(len(flat), dtype=np.int64)
        for start in range(0, len(flat), ORDER_PIECE):
            piece = self._mapped(flat[start : start + ORDER_PIECE].astype(np.uint64))
            while (outside := np.flatnonzero(piece >= self._n_rows)).size:
                piece[outside] = self._mapped(piece[outside])
            numbers[start : start + ORDER_PIECE] = piece
        return numbers.reshape(np.shape(places))

    def _mapped(self, numbers: np.ndarray) -> np.ndarray:
        (width, height), keys = self._sides, self._keys
        second, first = np.divmod(numbers, width)
        for number, key in enumerate(keys):
            if number % 2:
                second = (second + _hashed(first, key) % height) % height
            else:
                first = (first + _hashed(second, key) % width) % width
        return first + width * second


def _hashed(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Random 64-bit numbers that belong to values (the finalizer of SplitMix64)."""
    hashed = values + key
    hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashed ^ (hashed >> np.uint64(31))


class GatheredByNumber(Batching):
    """Minibatches whose index is the numbers of their rows, which are gathered from the data."""

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

    def selected(self, index: np.ndarray) -> np.ndarray:
        """The index itself."""
        return np.asarray(index)


class WithReplacement(GatheredByNumber):
    """n independent uniform rows, as in `pymc.Minibatch`. A row may be drawn several times."""

    name = "replace"
    without_replacement = False

    def draw(self: Batching, rng: np.random.Generator, minibatches: int) -> np.ndarray:
        """Row numbers, uniform and independent, shape (minibatches, n)."""
        return numbers_without(
            self.excluded, rng.integers(self.n_rows, size=(minibatches, self.batch_size))
        )


class StridedRows(GatheredByNumber):
    r"""n different rows, a random stride apart in a random order of all rows.

    A minibatch has the rows at the places :math:`a + (s k \bmod P) \bmod N` for k from 0 to n - 1,
    with P the smallest prime from N on, and a start a and stride s that are uniform. Places from N
    on are multiplied by s again until they are below N. Each row is in a minibatch with probability
    n / N. Where N is a prime, so is each pair of rows with the same probability, since the maps
    :math:`k \mapsto a + s k` are doubly transitive: the covariance of the gradient estimate then
    has the factor c exactly, *for each order of the rows*. For other N the noise in a direction
    differs by a relative 2/N or so (0.0006 at N = 4000, 0.005 at N = 400, 0.03 at N = 20).
    """

    name = "shuffle"
    without_replacement = True

    def draw(self: Batching, rng: np.random.Generator, minibatches: int) -> np.ndarray:
        """Row numbers, shape (minibatches, n), without a row twice in a minibatch."""
        prime = smallest_prime_from(self.n_rows)
        drawn = rng.integers(self.n_rows * (prime - 1), size=minibatches)
        starts, strides = drawn % self.n_rows, 1 + drawn // self.n_rows
        places = strides[:, None] * np.arange(self.batch_size) % prime
        while (outside := np.nonzero(places >= self.n_rows))[0].size:
            places[outside] = places[outside] * strides[outside[0]] % prime
        places += starts[:, None]
        places[places >= self.n_rows] -= self.n_rows
        return numbers_without(self.excluded, first_order(self.n_rows)(places))


class WeightedRows(WithReplacement):
    """n independent rows, drawn with given probabilities.

    The last array of the data has the weights of the rows, 1 / (N p), in which a sum over the rows
    of a minibatch is N / n times an unbiased estimate of the sum over all rows.

    Parameters
    ----------
    data : sequence of numpy.ndarray
    batch_size : int
    probabilities : numpy.ndarray, shape (N,)
        Positive numbers in proportion to the probabilities.
    static : bool
    """

    name = "weighted"

    def __init__(
        self,
        data: Sequence[np.ndarray],
        batch_size: int,
        probabilities: np.ndarray,
        *,
        dtype: str,
        static: bool = False,
    ):
        from scipy.stats.sampling import DiscreteAliasUrn  # takes half a second to import

        probabilities = probabilities / probabilities.max()  # a sum of large ones is infinite
        self._law = DiscreteAliasUrn(probabilities)
        weights = probabilities.mean() / probabilities
        super().__init__([*data, weights.astype(dtype)], batch_size, static=static)

    def draw(self, rng: np.random.Generator, minibatches: int) -> np.ndarray:
        """Row numbers, independent, shape (minibatches, n)."""
        numbers = self._law.rvs((minibatches, self.batch_size), random_state=rng)
        return numbers.astype(np.int64)


class AllRows(Batching):
    """All rows in the order of the data, every time and without a copy."""

    name = "all"
    without_replacement = True

    def rows(self, index: TensorVariable) -> list[TensorVariable]:
        """All rows, whatever the index."""
        return list(self._shared)

    def draw(self, rng: np.random.Generator, minibatches: int) -> np.ndarray:
        """Zeros, since nothing is drawn."""
        return np.zeros(minibatches, dtype=np.int64)

    def selected(self, index: np.ndarray) -> np.ndarray:
        """Numbers of all rows."""
        return np.arange(self.n_rows)


SCHEMES = ("shuffle", "replace")
"""These are the minibatch schemes that a user can choose by name."""


def scheme_class(
    scheme: str,
    n_rows: int,
    batch_size: int,
    row_bytes: float,
    noise_share: float,
) -> type[ShuffledWindows | WithReplacement | StridedRows]:
    """Class of a minibatch scheme by name.

    Rows in random order are read as windows only where one order has no effect to speak of, and
    where a run reads more rows than the copy in this order has.

    Parameters
    ----------
    scheme : {"shuffle", "replace"}
    n_rows, batch_size : int
    row_bytes : float
        Bytes of the data of a row.
    noise_share : float
        As of `windows_suffice`.

    Raises
    ------
    ValueError
        For an unknown name or a batch size outside 1..N.
    """
    name = one_of("batching", scheme, SCHEMES)
    if name == WithReplacement.name:
        return WithReplacement
    check_batch_size(batch_size, n_rows)
    copied = n_rows <= USUAL_TRANSITIONS * batch_size and n_rows * row_bytes <= MOST_COPIED
    copied = copied or batch_size == n_rows
    windows = copied and windows_suffice(n_rows, batch_size, noise_share)
    return ShuffledWindows if windows else StridedRows


def windows_suffice(n_rows: int, batch_size: int, noise_share: float) -> bool:
    r"""Whether chains may take the windows of an order each.

    The covariance of the gradient over the windows of one order differs from its mean over orders
    by a relative :math:`\sqrt{2n/N}`, and so does the part :math:`\rho` of the variance of a chain
    that is due to the noise. Chains with orders of their own average this to a half where they are
    four. That should be at most the relative error :math:`\delta` of variances that is accepted.

    Parameters
    ----------
    n_rows, batch_size : int
    noise_share : float
        A bound on :math:`\rho / \delta`.

    Examples
    --------
    >>> windows_suffice(10_000, 1000, ANY_NOISE), windows_suffice(10_000, 1000, noise_share=1.0)
    (False, True)
    """
    if batch_size == n_rows:
        return True  # All windows have the same rows.
    return noise_share * math.sqrt(2 * batch_size / n_rows / CHAINS_WITH_ORDERS) <= 1


def make_batching(
    scheme: str,
    data: Sequence[np.ndarray],
    batch_size: int,
    *,
    derived: Sequence[np.ndarray] = (),
    static: bool = False,
    excluded: np.ndarray | None = None,
    row_bytes: float | None = None,
    noise_share: float = ANY_NOISE,
) -> Batching:
    """Make a minibatch scheme by name.

    Parameters are those of `Batching` and `scheme_class`.

    Raises
    ------
    ValueError
        For an unknown name or a batch size outside 1..N.
    """
    arrays = (*data, *derived)
    n_rows = len(arrays[0]) - (0 if excluded is None else len(excluded))
    if row_bytes is None:
        row_bytes = sum(values[:1].nbytes for values in arrays)
    made = scheme_class(scheme, n_rows, batch_size, row_bytes, noise_share)
    return made(data, batch_size, derived=derived, static=static, excluded=excluded)


@lru_cache(maxsize=1)  # up to 80 MB
def first_order(n_rows: int) -> RowOrder:
    """The random order of strided rows, which is the same for all chains."""
    return RowOrder(n_rows, [n_rows, FIRST_ORDER])


@lru_cache
def smallest_prime_from(number: int) -> int:
    """Smallest prime number that is not below a number.

    Examples
    --------
    >>> smallest_prime_from(4000), smallest_prime_from(11), smallest_prime_from(1)
    (4001, 11, 2)
    """
    candidate = max(2, number)
    while any(candidate % factor == 0 for factor in range(2, math.isqrt(candidate) + 1)):
        candidate += 1
    return candidate


def numbers_without(excluded: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Whole numbers from 0 without the excluded ones, by their places among those that remain.

    Examples
    --------
    >>> numbers_without(np.array([0, 3]), np.arange(4))
    array([1, 2, 4, 5])
    """
    if not len(excluded):
        return places
    before = np.sort(excluded) - np.arange(len(excluded))
    return places + np.searchsorted(before, places, side="right")


def check_batch_size(batch_size: int, n_rows: int | None = None) -> int:
    """Return a valid batch size as an integer, checked against the number of rows if known.

    Raises
    ------
    TypeError, ValueError
        Where it is no positive whole number.
    ModelError
        Where it is more than the number of rows.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer):
        raise TypeError(f"`batch_size` should be a whole number of rows, but got {batch_size!r}.")
    if batch_size < 1 and n_rows is None:
        raise ValueError(f"`batch_size` should be at least 1, but got {batch_size}.")
    if n_rows is not None and not 1 <= batch_size <= n_rows:
        raise ModelError(
            f"`batch_size` should be between 1 and the number of rows, {n_rows}, but got "
            f"{batch_size}."
        )
    return int(batch_size)
