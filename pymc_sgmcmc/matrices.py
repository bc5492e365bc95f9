"""Matrices as diagonals, dense, of low rank plus diagonal, or with sparse factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from scipy import linalg, sparse
from scipy.sparse.linalg import LinearOperator, eigsh

from pymc_sgmcmc.elimination import SCATTERED, Elimination

SINGULAR = 1e-11
"""A correlation matrix counts as singular where its smallest eigenvalue is at most this number.
Rounding leaves eigenvalues of a singular matrix at up to about 1e-16 d, of a sign that depends on
the kernels of the machine."""

GRAM_DIMENSION = 500
"""Eigenvalues of rows of up to this dimension are those of their matrix of products."""


class _Parts:
    """What matrices of all kinds have in common. Their parts are arrays or symbolic tensors."""

    __array_ufunc__ = None  # NumPy leaves `rows @ matrix` to these classes

    @property
    def shape(self: Any) -> tuple[int, ...]:
        """Shape (d, d), or that of the entries of a diagonal."""
        return np.shape(self.values)

    @property
    def cost(self: Any) -> int:
        """Multiplications that a product with a vector takes as long as."""
        return int(np.size(self.values))

    def each(self: Any, vectors: Any) -> Any:
        """A x for each row x: ``vectors @ matrix.T``, which symbolic vectors do not know."""
        return self.T.__rmatmul__(vectors)

    def map[Kind](self: Kind, function: Callable[[Any], Any]) -> Kind:
        """Matrix of the same kind, whose parts are a function of those of this matrix."""
        return type(self)(*map(function, vars(self).values()))


@dataclass(frozen=True, eq=False)
class Diagonal(_Parts):
    r"""The matrix :math:`A = \mathrm{diag}(a)`, or :math:`a I` for a number.

    Attributes
    ----------
    values : scalar or (d,)
        a.
    """

    values: Any

    def __matmul__(self, vector: Any) -> Any:
        """A x for a vector x, or for each column of an array."""
        return (self.values * vector.T).T

    def __rmatmul__(self, rows: Any) -> Any:
        """R A for a matrix R of row vectors."""
        return rows * self.values

    @property
    def T(self) -> Diagonal:  # noqa: N802  # as of an array
        """A⊤."""
        return self

    @property
    def inverse(self) -> Diagonal:
        """A⁻¹."""
        return Diagonal(1 / self.values)

    @property
    def root(self) -> Diagonal:
        """L with A = L Lᵀ; `LinAlgError` where A is not positive definite."""
        _check_variances(self.values)
        return Diagonal(np.sqrt(self.values))

    def diagonal(self) -> np.ndarray:
        """Diagonal of A: a."""
        return self.values

    def dense(self, dimension: int | None = None) -> np.ndarray:
        """A as an array; a multiple of the identity has to be told its dimension."""
        return np.diag(np.broadcast_to(self.values, dimension or self.shape))

    def congruence(self, root: Matrix) -> Diagonal | Dense:
        """L⊤ A L, diagonal where L is."""
        if isinstance(root, Diagonal):
            return Diagonal(self.values * root.values**2)
        factor = root.dense()
        return Dense(factor.T @ (self @ factor))

    def eigenvalues(self) -> np.ndarray:
        """Eigenvalues of A: a, shape (d,) or (1,)."""
        return np.atleast_1d(self.values)


@dataclass(frozen=True, eq=False)
class Dense(_Parts):
    """A matrix A of any entries.

    Attributes
    ----------
    values : (d, d)
    """

    values: Any

    def __matmul__(self, vector: Any) -> Any:
        """A x for a vector x, or for each column of an array."""
        return self.values @ vector

    def __rmatmul__(self, rows: Any) -> Any:
        """R A for a matrix R of row vectors."""
        return rows @ self.values

    @property
    def T(self) -> Dense:  # noqa: N802  # as of an array
        """A⊤."""
        return Dense(self.values.T)

    @property
    def inverse(self) -> Dense:
        """A⁻¹."""
        return Dense(np.linalg.inv(self.values))

    @property
    def root(self) -> Dense:
        """Lower triangular L with A = L Lᵀ; `LinAlgError` where A is not positive definite."""
        if not np.allclose(self.values, self.values.T, rtol=1e-6, atol=0, equal_nan=True):
            raise linalg.LinAlgError("it is not symmetric")
        return Dense(covariance_root(self.values))

    def diagonal(self) -> np.ndarray:
        """Diagonal of A, shape (d,)."""
        return np.diag(self.values)

    def dense(self, dimension: int | None = None) -> np.ndarray:
        """A as an array."""
        return self.values

    def congruence(self, root: Matrix) -> Dense:
        """L⊤ A L."""
        if isinstance(root, Diagonal):
            return Dense(self.values * (np.reshape(root.values, (-1, 1)) * root.values))
        factor = root.dense()
        return Dense(factor.T @ self.values @ factor)

    def eigenvalues(self) -> np.ndarray:
        """Eigenvalues of a symmetric matrix, shape (d,)."""
        return linalg.eigvalsh(self.values)


@dataclass(frozen=True, eq=False)
class LowRank(_Parts):
    r"""The matrix :math:`A = \mathrm{diag}(a) (I + U \mathrm{diag}(f) U^\top) \mathrm{diag}(b)`.

    A product with a vector takes 2 d k multiplications.

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

    @property
    def shape(self) -> tuple[int, int]:
        """(d, d)."""
        return len(self.left), len(self.left)

    @property
    def cost(self) -> int:
        """Multiplications that a product with a vector takes as long as."""
        return 2 * int(np.size(self.vectors))

    @property
    def parts(self) -> dict[str, Any]:
        """Arrays that describe a symmetric matrix, by name."""
        return {"scale": self.left, "vectors": self.vectors, "factors": self.factors}

    @classmethod
    def of_parts(cls, scale: Any, vectors: Any, factors: Any) -> LowRank:
        """The symmetric matrix of these arrays."""
        return cls(scale, vectors, factors, scale)

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

    def dense(self, dimension: int | None = None) -> np.ndarray:
        """A as an array."""
        return np.eye(len(self.left)) @ self

    def congruence(self, root: Matrix) -> Dense:
        """L⊤ A L."""
        return Dense(self.dense()).congruence(root)


@dataclass(frozen=True, eq=False)
class Sparse(_Parts):
    """A square matrix A of which few elements are not zero.

    Attributes
    ----------
    values : (k,)
    rows, columns : (k,) of int
        Places of these elements.
    length : int
        d.

    Examples
    --------
    >>> matrix = Sparse.of(sparse.csr_array([[2.0, 0.0], [1.0, 3.0]]))
    >>> matrix @ np.ones(2), matrix.T @ np.ones(2)
    (array([2., 4.]), array([3., 3.]))
    """

    values: Any
    rows: Any
    columns: Any
    length: int

    @classmethod
    def of(cls, matrix: sparse.csr_array) -> Sparse:
        """That of SciPy."""
        elements = matrix.tocoo()
        return cls(elements.data, elements.row, elements.col, matrix.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        """(d, d)."""
        return self.length, self.length

    @property
    def cost(self) -> int:
        """Multiplications that a product with a vector takes as long as."""
        return SCATTERED * int(np.size(self.values))

    @property
    def _array(self) -> sparse.csr_array:
        return sparse.csr_array((self.values, (self.rows, self.columns)), self.shape)

    def __matmul__(self, vector: Any) -> Any:
        """A x for a vector x, or for each column of an array."""
        if not isinstance(self.values, Variable):
            return self._array @ vector
        return pt.zeros_like(vector)[self.rows].inc(self.values * vector[self.columns])

    def __rmatmul__(self, rows: Any) -> Any:
        """R A for a matrix R of row vectors."""
        if not isinstance(self.values, Variable):
            return rows @ self._array
        if rows.type.shape[0] == 1:  # as in a loop over transitions
            return (self.T @ rows[0])[None]
        return pt.zeros_like(rows)[:, self.columns].inc(self.values * rows[:, self.rows])

    @property
    def T(self) -> Sparse:  # noqa: N802  # as of an array
        """A⊤."""
        return Sparse(self.values, self.columns, self.rows, self.length)

    def map(self, function: Callable[[Any], Any]) -> Sparse:
        """The same with a function of the values, and of their places as data of a graph."""
        values = function(self.values)
        shared = isinstance(values, Variable)
        rows, columns = (
            pytensor.shared(each.astype(np.int64)) if shared else _integers(each)
            for each in (self.rows, self.columns)
        )
        return Sparse(values, rows, columns, self.length)

    def dense(self, dimension: int | None = None) -> np.ndarray:
        """A as an array."""
        return self._array.toarray()


@dataclass(frozen=True, eq=False)
class Factored(_Parts):
    r"""The matrix :math:`A = F F^\top` with a sparse factor whose inverse is sparse too.

    Attributes
    ----------
    root : Sparse
        F.
    inverse_root : Sparse
        :math:`F^{-1}`.

    Examples
    --------
    >>> matrix = factored(sparse.csr_array([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0], [1.0, 1.0, 4.0]]))
    >>> (matrix @ np.ones(3)).round(12)
    array([3., 4., 6.])
    >>> (matrix.inverse @ (matrix @ np.arange(3.0))).round(12) + 0.0
    array([0., 1., 2.])
    """

    root: Any
    inverse_root: Any

    @property
    def shape(self) -> tuple[int, int]:
        """(d, d)."""
        return self.root.shape

    @property
    def cost(self) -> int:
        """Multiplications that a product with a vector takes as long as."""
        return 2 * self.root.cost

    @property
    def parts(self) -> dict[str, Any]:
        """Arrays that describe the matrix, by name."""
        factors = {"of_root": self.root, "of_inverse": self.inverse_root}
        return {
            f"{name}_{of}": getattr(factor, name)
            for of, factor in factors.items()
            for name in ("values", "rows", "columns")
        }

    @classmethod
    def of_parts(cls, **arrays: np.ndarray) -> Factored:
        """The matrix of these arrays."""
        length = 1 + int(arrays["rows_of_root"].max())

        def factor(of: str) -> Sparse:
            return Sparse(
                arrays[f"values_{of}"], arrays[f"rows_{of}"], arrays[f"columns_{of}"], length
            )

        return cls(factor("of_root"), factor("of_inverse"))

    def __matmul__(self, vector: Any) -> Any:
        """A x for a vector x, or for each column of an array."""
        return self.root @ (self.root.T @ vector)

    def __rmatmul__(self, rows: Any) -> Any:
        """R A for a matrix R of row vectors."""
        return self.root.each(self.root.T.each(rows))

    @property
    def T(self) -> Factored:  # noqa: N802  # as of an array
        """A⊤."""
        return self

    @property
    def inverse(self) -> Factored:
        """A⁻¹."""
        return Factored(self.inverse_root.T, self.root.T)

    def map(self, function: Callable[[Any], Any]) -> Factored:
        """The same with a function of the elements of the factors."""
        return Factored(self.root.map(function), self.inverse_root.map(function))

    def diagonal(self) -> np.ndarray:
        """Diagonal of A, shape (d,)."""
        root = self.root
        return np.bincount(root.rows, np.square(root.values), minlength=root.length)

    def dense(self, dimension: int | None = None) -> np.ndarray:
        """A as an array."""
        return np.eye(self.root.length) @ self

    def congruence(self, root: Matrix) -> Dense:
        """L⊤ A L."""
        return Dense(self.dense()).congruence(root)


def factored(matrix: sparse.csr_array) -> Factored:
    """A sparse positive definite matrix by its factors, which may have many more elements.

    Column j of the inverse of the factor has elements where the elimination of j, of the first
    coordinate that depends on it, and so on leads: for levels nested in each other those above it.

    Raises
    ------
    scipy.linalg.LinAlgError
        Where it is not positive definite.
    """
    factors = Elimination(matrix)
    return Factored(Sparse.of(factors.root), Sparse.of(factors.inverse_root))


def _integers(values: Any) -> np.ndarray:
    return values.get_value() if isinstance(values, SharedVariable) else values


Matrix = Diagonal | Dense | LowRank | Factored

Implicit = LowRank | Factored
"""Matrices of which products with vectors are known, and no other elements than the diagonal."""


def as_matrix(value: Any) -> Any:
    """Matrix of a number, a diagonal (d,) or a matrix (d, d), as arrays or symbolic tensors.

    Examples
    --------
    >>> as_matrix([1, 4]).root @ np.ones(2)
    array([1., 2.])
    >>> np.ones((1, 2)) @ as_matrix([[4, 2], [2, 5]])
    array([[6., 7.]])
    >>> as_matrix([[4, 2], [2, 5]]).congruence(as_matrix(0.5)).diagonal()
    array([1.  , 1.25])
    """
    if isinstance(value, Matrix):
        return value
    values = value if isinstance(value, Variable) else np.asarray(value, dtype=float)
    return Dense(values) if values.ndim == 2 else Diagonal(values)


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
    _check_variances(variances)
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


def _check_variances(variances: np.ndarray) -> None:
    wrong = np.extract(~(np.isfinite(variances) & (variances > 0)), variances)
    if wrong.size:
        raise linalg.LinAlgError(f"its diagonal has the entry {wrong[0]:.3g}")


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


def matrix_root(matrix: Any, name: str = "`preconditioner`") -> Matrix:
    """Root L of a positive definite matrix that a user gave.

    `name` is that of the matrix, for messages.

    Raises
    ------
    ValueError
        Where the matrix is not symmetric positive definite.
    """
    try:
        return as_matrix(matrix).root
    except linalg.LinAlgError as error:
        raise ValueError(f"{name} should be positive definite, but {error}.") from None


def triangular_root(root: np.ndarray) -> np.ndarray:
    """Lower triangular root with positive diagonal of the covariance R Rᵀ, from any root R."""
    triangular = linalg.qr(root.T, mode="r")[0][: root.shape[0]]
    return (triangular * np.sign(np.diag(triangular))[:, None]).T


def extreme_eigenvalues(matrix: Matrix, root: Matrix, dimension: int) -> np.ndarray:
    """Smallest and largest eigenvalue of L⊤ A L, from products alone."""
    operator = LinearOperator(
        (dimension, dimension), matvec=lambda x: root.T @ (matrix @ (root @ x.ravel())), dtype=float
    )
    start = np.random.default_rng(1950).standard_normal(dimension)  # fixed, so that runs agree
    return eigsh(operator, k=2, which="BE", v0=start, tol=1e-4, return_eigenvectors=False)


def largest_of_products(product: Callable[[np.ndarray], np.ndarray], start: np.ndarray) -> float:
    """Largest eigenvalue of a symmetric matrix, by Lanczos' method from products with vectors."""
    operator = LinearOperator((len(start),) * 2, matvec=product, dtype=float)
    return float(eigsh(operator, k=1, which="LA", v0=start, tol=1e-4, return_eigenvectors=False)[0])


def largest_dense_eigenvalue(matrix: np.ndarray) -> float:
    """Largest eigenvalue of a symmetric matrix."""
    return float(linalg.eigvalsh(matrix, subset_by_index=[len(matrix) - 1] * 2)[0])


def largest_mean_square(rows: np.ndarray | sparse.csr_array, root: Matrix | None = None) -> float:
    """Largest eigenvalue of the mean outer product of the rows, or of these times a root."""
    count, dimension = rows.shape
    if not isinstance(rows, np.ndarray):
        right = Diagonal(1.0) if root is None else root
        first = np.random.default_rng(1950).standard_normal(rows.shape[1])
        found = largest_of_products(lambda x: right.T @ (rows.T @ (rows @ (right @ x))), first)
        return found / count
    rows = rows if root is None else rows @ root
    if min(count, dimension) <= GRAM_DIMENSION:
        products = rows @ rows.T if count < dimension else rows.T @ rows
        return largest_dense_eigenvalue(products) / count
    start = np.ones(dimension)  # fixed, so that runs agree
    return largest_of_products(lambda x: rows.T @ (rows @ x), start) / count
