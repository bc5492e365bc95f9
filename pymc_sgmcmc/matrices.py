"""Linear algebra for matrices that may be given as scalars, diagonals or of low rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import linalg
from scipy.sparse.linalg import LinearOperator, eigsh

SINGULAR = 1e-11
"""A correlation matrix counts as singular where its smallest eigenvalue is at most this number.
Rounding leaves eigenvalues of a singular matrix at up to about 1e-16 d, of a sign that depends on
the kernels of the machine."""

Matrix = Any
"""A scalar, a diagonal (d,) or a dense matrix (d, d), all arrays, or a `LowRank`. No union, since
most callers know which of them it is."""


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


def apply(matrix: Matrix, vector: Any) -> Any:
    """Product of a matrix with a vector, both numbers or symbolic tensors."""
    return matrix @ vector if np.ndim(matrix) == 2 else matrix * vector


def apply_to_each(matrix: Matrix, vectors: Any) -> Any:
    """Product of a matrix with each of some vectors, the rows of an array or symbolic tensor."""
    if isinstance(matrix, LowRank):
        return matrix.T.__rmatmul__(vectors)  # a symbolic left factor would not ask for it
    return vectors @ matrix.T if np.ndim(matrix) == 2 else vectors * matrix


def apply_transposed(matrix: Matrix, vector: np.ndarray) -> np.ndarray:
    """Product of the transposed matrix with a vector."""
    return matrix.T @ vector if np.ndim(matrix) == 2 else matrix * vector


def apply_to_rows(matrix: Matrix, rows: np.ndarray) -> np.ndarray:
    """Product of the transposed matrix with each row of an array."""
    return rows @ matrix if np.ndim(matrix) == 2 else rows * matrix


def covariance_root(covariance: np.ndarray) -> np.ndarray:
    """Lower Cholesky factor of a dense covariance, by way of the correlations.

    Its coordinates may have any units: the variances may differ by any factor. It counts as
    positive definite where the smallest eigenvalue of the correlations is above `SINGULAR`, since
    it depends on the machine where rounding makes a factorisation fail.

    Raises
    ------
    scipy.linalg.LinAlgError
        Where it is not positive definite.
    """
    variances = np.diag(covariance)
    if not (np.isfinite(variances) & (variances > 0)).all():
        raise linalg.LinAlgError("its diagonal is not positive and finite")
    scale = np.sqrt(variances)
    correlation = covariance / np.outer(scale, scale)
    if not np.isfinite(correlation).all():
        raise linalg.LinAlgError("it has NaN or infinite entries")
    smallest = linalg.eigvalsh(correlation, subset_by_index=[0, 0])[0]
    if smallest <= SINGULAR:
        raise linalg.LinAlgError(
            f"its smallest eigenvalue, scaled to a diagonal of ones, is {smallest:.3g}"
        )
    return scale[:, None] * linalg.cholesky(correlation, lower=True)


def dependent_coordinates(covariance: np.ndarray) -> np.ndarray:
    """Numbers of the coordinates, among those that vary, that make a covariance singular.

    Examples
    --------
    >>> dependent_coordinates(np.array([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0], [2.0, 0.0, 4.0]]))
    array([0, 2])
    """
    variances = np.diag(covariance)
    moving = np.flatnonzero(np.isfinite(variances) & (variances > 0))
    scale = np.sqrt(variances[moving])
    correlation = covariance[np.ix_(moving, moving)] / np.outer(scale, scale)
    weights = np.abs(linalg.eigh(correlation, subset_by_index=[0, 0])[1][:, 0])
    return moving[weights > 0.1 * weights.max()]


def matrix_root(matrix: Any, name: str = "`preconditioner`") -> Any:
    """Root L of a positive definite matrix, L Lᵀ, of the same kind.

    `name` is that of the matrix, for messages.

    Raises
    ------
    ValueError
        Where the matrix is not symmetric positive definite.
    """
    if isinstance(matrix, LowRank):
        return matrix.root
    matrix = np.asarray(matrix, dtype=float)
    if not np.isfinite(matrix).all():
        raise ValueError(f"{name} should be finite, but has NaN or infinite entries.")
    if matrix.ndim < 2:
        if not (matrix > 0).all():
            raise ValueError(
                f"{name} should be positive, but its smallest entry is {matrix.min()}."
            )
        return np.sqrt(matrix)
    if not np.allclose(matrix, matrix.T, rtol=1e-6, atol=0):
        raise ValueError(f"{name} should be symmetric.")
    try:
        return covariance_root(matrix)
    except linalg.LinAlgError as error:
        raise ValueError(f"{name} should be positive definite, but {error}.") from None


def triangular_root(root: np.ndarray) -> np.ndarray:
    """Lower triangular root with positive diagonal of the covariance R Rᵀ, from any root R."""
    triangular = linalg.qr(root.T, mode="r")[0][: root.shape[0]]
    return (triangular * np.sign(np.diag(triangular))[:, None]).T


def congruent(matrix: np.ndarray, root: Matrix) -> np.ndarray:
    """L⊤ A L, for scalar, diagonal or dense A and L; diagonal or scalar where both are.

    With a dense A for L of low rank.
    """
    if isinstance(root, LowRank):
        return ((matrix @ root).T @ root).T
    matrix, root = np.asarray(matrix, dtype=float), np.asarray(root, dtype=float)
    if root.ndim < 2:
        return matrix * (root**2 if matrix.ndim < 2 else root.reshape(-1, 1) * root)
    if matrix.ndim == 2:
        return root.T @ matrix @ root
    return root.T @ (np.broadcast_to(matrix, len(root))[:, None] * root)


def inverse(matrix: Matrix) -> Matrix:
    """Inverse of a matrix, of the same kind."""
    if isinstance(matrix, LowRank):
        return matrix.inverse
    return np.linalg.inv(matrix) if np.ndim(matrix) == 2 else 1 / matrix


def dense(matrix: Matrix, dimension: int) -> np.ndarray:
    """Shape (d, d), of a matrix that may be a scalar or a diagonal."""
    matrix = np.asarray(matrix, dtype=float)
    return matrix if matrix.ndim == 2 else np.diag(np.broadcast_to(matrix, dimension))


def diagonal(matrix: Matrix) -> np.ndarray:
    """Diagonal of a matrix, a scalar for a scalar."""
    if isinstance(matrix, LowRank):
        return matrix.diagonal()
    return np.diag(matrix) if np.ndim(matrix) == 2 else np.asarray(matrix)


def largest_eigenvalue(matrix: Matrix, root: Matrix, dimension: int) -> float:
    """Largest eigenvalue of L⊤ A L, from products alone."""
    operator = LinearOperator(
        (dimension, dimension),
        matvec=lambda x: apply_transposed(root, apply(matrix, apply(root, x.ravel()))),
        dtype=float,
    )
    start = np.ones(dimension)  # fixed, so that runs agree
    return float(eigsh(operator, k=1, v0=start, tol=1e-4, return_eigenvectors=False)[0])


def eigenvalues(matrix: np.ndarray) -> np.ndarray:
    """Eigenvalues of a symmetric matrix, the entries of a diagonal or scalar one."""
    return linalg.eigvalsh(matrix) if np.ndim(matrix) == 2 else np.atleast_1d(matrix)


def largest_mean_square(rows: np.ndarray) -> float:
    """Largest eigenvalue of the mean outer product of the rows."""
    count, dimension = rows.shape
    if min(count, dimension) <= 500:
        gram = rows @ rows.T if count < dimension else rows.T @ rows
        return float(linalg.eigvalsh(gram, subset_by_index=[len(gram) - 1] * 2)[0] / count)
    gram = LinearOperator((dimension, dimension), matvec=lambda x: rows.T @ (rows @ x), dtype=float)
    start = np.ones(dimension)  # fixed, so that runs agree
    return float(eigsh(gram, k=1, v0=start, tol=1e-4, return_eigenvectors=False)[0] / count)
