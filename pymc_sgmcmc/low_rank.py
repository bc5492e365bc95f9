"""A diagonal matrix with a correction in a few directions, in place of a dense one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class LowRank:
    r"""The matrix :math:`A = \mathrm{diag}(a) (I + U \mathrm{diag}(f) U^\top) \mathrm{diag}(b)`.

    A product with a vector takes 2 d k multiplications. Its parts are arrays or symbolic
    tensors, and so are the vectors that it is multiplied with.

    Attributes
    ----------
    left : (d,)
        a.
    vectors : (d, k)
        U, with orthonormal columns.
    factors : (k,)
        f, above -1.
    right : (d,)
        b; equal to a for a symmetric matrix, and 1 for a root of one.

    Examples
    --------
    >>> import numpy as np
    >>> direction = np.ones((4, 1)) / 2
    >>> matrix = LowRank(np.full(4, 2.0), direction, np.array([3.0]), np.full(4, 2.0))
    >>> matrix @ np.ones(4)
    array([16., 16., 16., 16.])
    >>> root = matrix.root
    >>> bool(np.allclose(root @ (root.T @ np.arange(4.0)), matrix @ np.arange(4.0)))
    True
    >>> matrix.inverse @ (matrix @ np.ones(4))
    array([1., 1., 1., 1.])
    """

    left: Any
    vectors: Any
    factors: Any
    right: Any

    ndim = 2
    __array_ufunc__ = None  # NumPy leaves `rows @ matrix` to this class

    def __len__(self) -> int:
        return len(self.left)

    def __matmul__(self, vector: Any) -> Any:
        """A x for a vector x."""
        scaled = self.right * vector
        return self.left * (scaled + self.vectors @ (self.factors * (self.vectors.T @ scaled)))

    def __rmatmul__(self, rows: Any) -> Any:
        """R A for a matrix R of row vectors."""
        scaled = rows * self.left
        return (scaled + ((scaled @ self.vectors) * self.factors) @ self.vectors.T) * self.right

    @property
    def T(self) -> LowRank:  # noqa: N802  # as of an array
        """A⊤."""
        return LowRank(self.right, self.vectors, self.factors, self.left)

    @property
    def inverse(self) -> LowRank:
        """A⁻¹."""
        factors = -self.factors / (1 + self.factors)
        return LowRank(1 / self.right, self.vectors, factors, 1 / self.left)

    @property
    def root(self) -> LowRank:
        """L with A = L Lᵀ, for a symmetric matrix."""
        factors = np.sqrt(1 + self.factors) - 1
        return LowRank(self.left, self.vectors, factors, np.ones_like(self.left))

    def diagonal(self) -> np.ndarray:
        """Diagonal of A, shape (d,)."""
        return self.left * self.right * (1 + self.vectors**2 @ self.factors)
