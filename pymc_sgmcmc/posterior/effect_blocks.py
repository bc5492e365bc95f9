r"""Effects that are standardised together, given their scales and what the rows say of them.

With the factor F of the effects of a level, their scales or a matrix L, and with the W and c of
`pymc_sgmcmc.posterior.effect_coordinates`,

.. math:: z = R^{-\top} (R^{-1} F^\top c + v), \qquad R R^\top = I + F^\top W F .

A block has this for each level, or once for all levels of several factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import override

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.posterior.effects import Effect

SMALLEST_SCALE = 1e-100
"""Scales are no smaller where one is divided by their square, which is a number then."""

type Vectors = list[TensorVariable]


class Block:
    """The effects of each of some levels. The elements of R are written out, as vectors over these.

    Parameters
    ----------
    effects : sequence of Effect
    places : numpy.ndarray, shape (n, k)
        Coordinates of the k effects of each of n levels.
    dtype : str
    count : int
        Coordinates of the joint block beside it, on which c depends.

    Attributes
    ----------
    information, score : SharedVariable
        W and c of all levels, of shapes (k, k, n) and (k, n).
    common : SharedVariable
        C of all levels, of shape (k n, count). C times what rows see of the joint block is
        subtracted from c.
    """

    def __init__(self, effects: Sequence[Effect], places: np.ndarray, dtype: str, count: int = 0):
        n, k = places.shape
        self.effects, self.places = tuple(effects), places
        self.information = _zeros("information", (k, k, n), dtype)
        self.score = _zeros("score", (k, n), dtype)
        self.common = _zeros("common", (k * n, count), "float64")

    # --- The map as a graph --------------------------------------------------------------------

    def standardised(self, of_joint: TensorVariable | None) -> dict[Variable, TensorVariable]:
        """z of v, where rows see so much of the joint block."""
        v = self._joined({each.variable: each.variable for each in self.effects})
        rest = [a + b for a, b in zip(self._shift(of_joint), v, strict=True)]
        for i, row in reversed(list(enumerate(self._root))):
            rest[i] = self._over_transposed(rest[i], row[i])
            rest[:i] = [each - a * rest[i] for each, a in zip(rest[:i], row[:i], strict=True)]
        return self._split(rest)

    def coordinates(self, of_joint: TensorVariable | None) -> dict[Variable, TensorVariable]:
        """v of the value variables, where rows see so much of the joint block."""
        z = self._joined({each.variable: each.of_value for each in self.effects})
        moved = [
            self._times_transposed(row[-1], each) for row, each in zip(self._root, z, strict=True)
        ]
        for i, row in enumerate(self._root):
            moved[:i] = [each + a * z[i] for each, a in zip(moved[:i], row[:i], strict=True)]
        return self._split([a - b for a, b in zip(moved, self._shift(of_joint), strict=True)])

    @property
    def log_jacobian(self) -> TensorVariable:
        """The logarithm of the determinant of z as a function of v."""
        return -pt.add(*(pt.log(row[-1]).sum() for row in self._root))

    @property
    def factor_entries(self) -> TensorVariable:
        """F of each level, shape (k, k, n)."""
        zero = pt.zeros(len(self.places))
        rows = [[zero if each is None else zero + each for each in row] for row in self._factor]
        return pt.stack([pt.stack(row) for row in rows])

    def _shift(self, of_joint: TensorVariable | None) -> Vectors:
        """The inverse of R times Fᵀ c."""
        score: Vectors = [self.score[i] for i in range(len(self._factor))]
        if of_joint is not None:
            common = pt.dot(self.common, of_joint).reshape(self.score.type.shape)
            score = [each - common[i] for i, each in enumerate(score)]
        shift: Vectors = []
        for j, row in enumerate(self._root):
            rest = _product([of_row[j] for of_row in self._factor], score)
            for a, b in zip(row[:-1], shift, strict=True):
                rest = rest - a * b
            shift.append(self._over(rest, row[-1]))
        return shift

    @cached_property
    def _factor(self) -> list[list[TensorVariable | None]]:
        """The rows of F."""
        owners = [(each, i) for each in self.effects for i in range(each.coefficients)]
        return [[a.factor_of(i, j) if a is b else None for b, j in owners] for a, i in owners]

    @cached_property
    def _root(self) -> list[Vectors]:
        """The rows of R."""
        factor, size = self._factor, range(len(self._factor))
        columns = [[row[j] for row in factor] for j in size]
        known = [[self.information[max(i, j), min(i, j)] for j in size] for i in size]
        # Column by column, W F.
        seen = [[_product(column, row) for row in known] for column in columns]
        root: list[Vectors] = []
        for i in size:
            row: Vectors = []
            for j in range(i + 1):
                other, rest = row if i == j else root[j], _product(columns[i], seen[j])
                for a, b in zip(row[:j], other[:j], strict=True):
                    rest = rest - a * b
                row.append(pt.sqrt(1.0 + rest) if i == j else rest / other[j])
            root.append(row)
        return root

    def _joined(self, arrays: Mapping[Variable, TensorVariable]) -> Vectors:
        """Arrays of the shapes of the effects, as vectors."""
        return [column for each in self.effects for column in each.columns(arrays[each.variable])]

    def _split(self, vectors: Vectors) -> dict[Variable, TensorVariable]:
        """Arrays of the shapes of the effects."""
        parts = zip(self.effects, _stops(each.coefficients for each in self.effects), strict=True)
        return {each.variable: each.of_columns(vectors[part]) for each, part in parts}

    def _over(self, vector: TensorVariable, of_root: TensorVariable) -> TensorVariable:
        return vector / of_root

    def _over_transposed(self, vector: TensorVariable, of_root: TensorVariable) -> TensorVariable:
        return vector / of_root

    def _times_transposed(self, of_root: TensorVariable, vector: TensorVariable) -> TensorVariable:
        return of_root * vector

    # --- Its arrays ----------------------------------------------------------------------------

    def factors(self, entries: np.ndarray) -> np.ndarray:
        """F of each level, though no scale is quite zero, shape (n, k, k)."""
        return _away_from_zero(np.moveaxis(entries, 2, 0))

    @property
    def known(self) -> np.ndarray:
        """W of each level, shape (n, k, k)."""
        return np.moveaxis(self.information.get_value(borrow=True), 2, 0)

    @property
    def regression(self) -> np.ndarray:
        """C of each level, shape (n, k, count)."""
        n, k = self.places.shape
        count = self.common.get_value(borrow=True).shape[1]
        return self.common.get_value(borrow=True).reshape(k, n, count).swapaxes(0, 1)

    def learn(self, information: np.ndarray, score: np.ndarray, regression: np.ndarray) -> None:
        """Take W, c and C of each level, of shapes (n, k, k), (n, k) and (n, k, count)."""
        dtype = self.score.type.dtype
        self.information.set_value(np.moveaxis(information, 0, 2).astype(dtype))
        self.score.set_value(score.T.astype(dtype))
        self.common.set_value(regression.swapaxes(0, 1).reshape(self.places.size, -1))


class JointBlock(Block):
    """All levels of factors with few, and coefficients beside them, as one level.

    R is a dense matrix. Single precision would lose it where rows say a million times what the
    prior says.
    """

    def __init__(self, effects: Sequence[Effect], places: np.ndarray):
        super().__init__(effects, places.reshape(1, -1), "float64")

    @property
    @override
    def log_jacobian(self) -> TensorVariable:
        return -pt.log(pt.diagonal(self._root[0][0])).sum()

    @property
    @override
    def factor_entries(self) -> TensorVariable:
        return self._scale

    def of_rows(self, z: Mapping[Variable, TensorVariable]) -> TensorVariable:
        """F z, what the rows see of the block."""
        return self._scale * self._joined(z)[0]

    @cached_property
    def _scale(self) -> TensorVariable:
        """The diagonal of F."""
        return pt.concatenate([each.scale.ravel() for each in self.effects])

    def _shift(self, of_joint: TensorVariable | None) -> Vectors:
        return [self._over(self._scale * self.score[:, 0], self._root[0][0])]

    @cached_property
    def _root(self) -> list[Vectors]:
        products = self._scale[:, None] * self.information[:, :, 0] * self._scale
        return [[pt.linalg.cholesky(pt.eye(self.places.size, dtype="float64") + products)]]

    def _joined(self, arrays: Mapping[Variable, TensorVariable]) -> Vectors:
        return [pt.concatenate([arrays[each.variable].ravel() for each in self.effects])]

    def _split(self, vectors: Vectors) -> dict[Variable, TensorVariable]:
        parts = zip(self.effects, _stops(each.size for each in self.effects), strict=True)
        return {each.variable: vectors[0][part].reshape(each.shape) for each, part in parts}

    def _over(self, vector: TensorVariable, of_root: TensorVariable) -> TensorVariable:
        return pt.linalg.solve_triangular(of_root, vector, lower=True)

    def _over_transposed(self, vector: TensorVariable, of_root: TensorVariable) -> TensorVariable:
        return pt.linalg.solve_triangular(of_root.T, vector, lower=False)

    def _times_transposed(self, of_root: TensorVariable, vector: TensorVariable) -> TensorVariable:
        return pt.dot(of_root.T, vector)

    @override
    def factors(self, entries: np.ndarray) -> np.ndarray:
        return _away_from_zero(np.diag(entries)[None])


def _product(
    column: Sequence[TensorVariable | None], vectors: Sequence[TensorVariable]
) -> TensorVariable:
    """The sum of products of elements, of which some are none."""
    first, *others = (a * b for a, b in zip(column, vectors, strict=True) if a is not None)
    return sum(others, first)


def _zeros(name: str, shape: tuple[int, ...], dtype: str) -> SharedVariable:
    """Zeros of which graphs know the shape, so that their rewrites need not."""
    return pytensor.shared(np.zeros(shape, dtype), name, shape=shape)


def _stops(sizes: Iterable[int]) -> list[slice]:
    """Parts of so many entries, one after the other."""
    return [slice(*each) for each in pairwise(np.cumsum([0, *sizes]).tolist())]


def _away_from_zero(factors: np.ndarray) -> np.ndarray:
    """Factors of which no element of the diagonal is quite zero."""
    found, places = factors.astype(float), np.arange(factors.shape[1])
    diagonal = found[:, places, places]
    is_zero = np.abs(diagonal) < SMALLEST_SCALE
    found[:, places, places] = np.where(is_zero, SMALLEST_SCALE, diagonal)
    return found
