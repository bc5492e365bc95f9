r"""Effects of several factors integrated out together, crossed or nested, by Laplace's method.

With the mode u of the effects at the global variables :math:`\theta`, and H minus the Hessian of
the joint log density there,

.. math:: \log p(y \mid \theta) \approx \log p(y, u \mid \theta) - \tfrac12 \log |H|
    + \tfrac q2 \log 2\pi,

which is exact where the joint log density is quadratic in u, as in linear mixed models. H is
sparse. Levels of the factor with most of them meet no others of it, so they are eliminated one by
one, and what remains is a dense matrix of the other factors (Bates et al., 2015). The gradient is
that of this approximation, by :math:`\nabla \log |H| = \mathrm{tr}(H^{-1} \nabla H)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from pymc.model import Model
from scipy import linalg, sparse

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.errors import ConvergenceError, ModelError
from pymc_sgmcmc.marginal.exact import DISTANT
from pymc_sgmcmc.marginal.likelihood import ELEMENTS, Globals
from pymc_sgmcmc.marginal.maximum import HALVINGS
from pymc_sgmcmc.marginal.newton import CONVERGED, MOST_STEPS
from pymc_sgmcmc.marginal.structure import chosen_and_dependents
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.selected import selected_graph
from pymc_sgmcmc.posterior.sparse_curvature import SparseCurvature

SAME = 10 * float(np.sqrt(np.finfo(float).eps))
"""A log density counts as quadratic where it is so up to this part, well above rounding."""

MOST_DENSE = 10_000
"""A dense matrix of so many effects takes 800 MB, and its inverse half a minute of one core."""

SEED = 20_261_128
"""The direction comes from this fixed seed."""


class Elimination:
    """Factors of a symmetric positive definite matrix, a part of which has small blocks.

    Parameters
    ----------
    matrix : scipy.sparse.csr_array, shape (q, q)
    levels : numpy.ndarray of int, shape (levels, size)
        Numbers of the rows of each block. No element joins two blocks.

    Raises
    ------
    numpy.linalg.LinAlgError
        Where the matrix is not positive definite.
    """

    def __init__(self, matrix: sparse.csr_array, levels: np.ndarray):
        own, size = levels.ravel(), levels.shape[1]
        self._rest = np.setdiff1d(np.arange(matrix.shape[0]), own)
        self._number = np.argsort(np.concatenate([own, self._rest]))
        self._number[self._rest] -= len(own)
        self._own, self._is_own = own, np.isin(np.arange(matrix.shape[0]), own)
        rows, columns = (part := matrix[own][:, own].tocoo()).coords
        blocks = np.zeros((len(levels), size, size))
        blocks[rows // size, rows % size, columns % size] = part.data
        pivots = np.einsum("gii->gi", np.linalg.cholesky(blocks))
        self._blocks, count = np.linalg.inv(blocks), len(levels)
        self._inverse_of_own = sparse.bsr_array(
            (self._blocks, np.arange(count), np.arange(count + 1)), shape=(len(own), len(own))
        )
        across = matrix[own][:, self._rest]
        self._ratio = (self._inverse_of_own @ across).tocsr()
        schur = matrix[self._rest][:, self._rest] - across.T @ self._ratio
        self._root = linalg.cholesky(schur.toarray(), lower=True)
        self.log_determinant = 2 * (np.log(pivots).sum() + np.log(np.diag(self._root)).sum())

    def solve(self, vector: np.ndarray) -> np.ndarray:
        """Product of the inverse with a vector."""
        result = np.empty(len(vector))
        of_own, of_rest = vector[self._own], vector[self._rest] - self._ratio.T @ vector[self._own]
        result[self._rest] = rest = linalg.cho_solve((self._root, True), of_rest)
        result[self._own] = self._inverse_of_own @ of_own - self._ratio @ rest
        return result

    def inverse_at(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Elements of the inverse, other than those of two blocks."""
        swapped = self._is_own[columns] & ~self._is_own[rows]
        rows, columns = np.where(swapped, [columns, rows], [rows, columns])
        first, second = self._is_own[rows], self._is_own[columns]
        rows, columns = self._number[rows], self._number[columns]
        lower, _ = linalg.lapack.dpotri(self._root, lower=1)
        of_rest = lower + lower.T
        np.einsum("ii->i", of_rest)[:] /= 2
        values, size = np.empty(len(rows)), self._blocks.shape[1]
        values[~first] = of_rest[rows[~first], columns[~first]]
        length = max(1, ELEMENTS // max(1, len(of_rest)))
        for start in range(0, len(self._own), length):
            product = self._ratio[start : start + length] @ of_rest
            here = first & (rows >= start) & (rows < start + length)
            values[here & ~second] = -product[rows[here & ~second] - start, columns[here & ~second]]
            row, column = rows[here & second], columns[here & second]
            entries = self._ratio[column]
            number = np.repeat(np.arange(len(row)), np.diff(entries.indptr))
            changes = entries.data * product[row[number] - start, entries.indices]
            values[here & second] = self._blocks[row // size, row % size, column % size]
            values[here & second] += np.bincount(number, changes, minlength=len(row))
        return values


class Factors(Globals):
    """The marginal log likelihood of a position of the global variables, with its gradient.

    Parameters
    ----------
    model : pymc.Model
    names : sequence of str
        Effects of any number of factors.

    Raises
    ------
    ModelError
        Where rows do not select single effects, or their prior joins levels.
    """

    def __init__(self, model: Model, names: Sequence[str]):
        chosen, _ = chosen_and_dependents(model, names)
        super().__init__(model, [model.rvs_to_values[variable] for variable in chosen])
        self._posterior = posterior = Posterior(model, without=[v.name for v in self.variables])
        layout, graph = posterior.layout, selected_graph(posterior)
        is_effect = np.zeros(layout.dimension, dtype=bool)
        for variable, part in zip(layout.variables, layout.slices, strict=True):
            is_effect[part] = variable in self.local
        whole = [model.values_to_rvs[value].name for value in graph.whole if value in self.local]
        if whole:
            raise ModelError(
                f"Effects of several factors should enter by indices, as in `z[group]`, but "
                f"{quoted(whole)} enters otherwise. Write it so, or use `sample`."
            )
        if layout.dtype != "float64":
            raise ModelError(
                f"Effects of several factors need double precision, but the model has "
                f"{layout.dtype}. Build it with `pytensor.config.floatX = 'float64'`."
            )
        axes = {selection.variable: selection.axis for selection in graph.selections}
        shapes = [(each, self.initial_point[each.name].shape) for each in self.local]
        self.n_groups = sum(shape[axes.get(each, 0)] for each, shape in shapes)
        self._curvature = SparseCurvature(posterior, graph, is_effect)
        self._effects, self._others = np.flatnonzero(is_effect), np.flatnonzero(~is_effect)
        self._number = np.cumsum(is_effect) - 1
        self._levels = self._number[self._curvature.independent_levels()]
        if (dense := len(self._effects) - self._levels.size) > MOST_DENSE:
            raise ModelError(
                f"Beside the factor with most levels, at most {MOST_DENSE} effects are integrated "
                f"out, but there are {dense}. Use `sample`."
            )
        self._start = posterior.initial_position
        self._last, self._scale = self._start, np.ones(layout.dimension)
        try:
            self.is_quadratic = self._is_quadratic()
        except ModelError:
            raise ModelError(
                f"Levels of {quoted(names)} should be independent of each other, but the prior "
                "joins some, as that of a random walk does. Use `sample`."
            ) from None

    def __call__(self, rest: np.ndarray) -> tuple[float, np.ndarray]:
        """Value and gradient, which are not finite where the model is not."""
        with np.errstate(all="ignore"):
            mode = self._mode(rest)
            if mode is None:
                return np.nan, np.full(len(rest), np.nan)
            position, value, gradient, curvature = mode
            self._last = position
            weights = curvature.inverse_at(*self._number[np.array(self._curvature.elements)])
            slopes = self._curvature.slope_of_trace(position, self._scale, weights)
            if not self.is_quadratic:
                slopes = slopes + self._moved_by(position, curvature.solve(slopes[self._effects]))
        constant = 0.5 * len(self._effects) * np.log(2 * np.pi)
        total = value - 0.5 * curvature.log_determinant + constant
        return float(total), (gradient - 0.5 * slopes)[self._others]

    def modes(self, rest: np.ndarray) -> list[np.ndarray]:
        """Values of the local variables at their mode."""
        if (mode := self._mode(rest)) is None:
            raise ConvergenceError("The effects have no mode at the estimates. Simplify the model.")
        point = self._posterior.layout.unravel(mode[0])
        return [point[value.name] for value in self.local]

    def _is_quadratic(self) -> bool:
        """Whether the joint log density is so along a random direction of the effects."""
        density, start = self._posterior.log_density_and_gradient, self._start
        _, slope = density(start)
        matrix = self._curvature.at(start, self._scale, central=True)
        direction = np.zeros(len(start))
        direction[self._effects] = np.random.default_rng(SEED).normal(size=len(self._effects))
        for distance in (-DISTANT, -1.0, 1.0, DISTANT):
            step = distance * direction * np.maximum(1.0, np.abs(start))
            with np.errstate(all="ignore"):
                value, there = density(start + step)
                change = np.abs(there - slope + matrix @ step)
                agrees = change <= SAME * (np.abs(slope) + np.abs(matrix) @ np.abs(step))
            if not (np.isfinite(value) and agrees[self._effects].all()):
                return False
        return True

    def _moved_by(self, position: np.ndarray, change: np.ndarray) -> np.ndarray:
        """Change of the gradient with the effects, by differences over a short distance."""
        shift, width = np.zeros(len(position)), self._posterior.difference_width
        width /= max(np.abs(change / self._scale[self._effects]).max(), np.finfo(float).tiny)
        shift[self._effects] = width * change
        ahead, behind = (self._posterior.gradient(position + sign * shift) for sign in (1, -1))
        return (ahead - behind) / (2 * width)

    def _eliminated(self, position: np.ndarray, *, at_mode: bool = False) -> Elimination:
        """Factors of the matrix at a position, raised along its diagonal where there is no mode."""
        for _ in range(MOST_STEPS):
            matrix, last = self._curvature.at(position, self._scale, central=True), self._scale
            matrix = matrix[self._effects][:, self._effects]
            diagonal, self._scale = np.abs(matrix.diagonal()), np.ones(len(position))
            if not (np.isfinite(matrix.data).all() and diagonal.all()):
                raise np.linalg.LinAlgError
            self._scale[self._effects] = diagonal**-0.5
            # Differences over other distances may be rounding alone.
            if np.all(np.abs(np.log(self._scale / last)) < 1):
                break
        for raised in [0.0] if at_mode else [0.0, *0.1 * 2.0 ** np.arange(MOST_STEPS)]:
            with suppress(np.linalg.LinAlgError):
                return Elimination(matrix + sparse.diags_array(raised * diagonal), self._levels)
        raise np.linalg.LinAlgError

    def _mode(self, rest: np.ndarray) -> tuple[np.ndarray, float, np.ndarray, Elimination] | None:
        """The mode near the last one, None where the search does not end at one."""
        density, position = self._posterior.log_density_and_gradient, self._last.copy()
        position[self._others] = rest
        value, gradient = density(position)
        if not np.isfinite(value):
            position[self._effects] = self._start[self._effects]
            value, gradient = density(position)
        curvature: Elimination | None = None
        for _ in range(MOST_STEPS):
            step = np.zeros(len(position))
            try:
                if curvature is None or not self.is_quadratic:
                    curvature = self._eliminated(position)
                step[self._effects] = curvature.solve(gradient[self._effects])
            except (np.linalg.LinAlgError, ModelError):  # Far away the prior may overflow.
                return None
            decrement = float(gradient @ step)
            for halving in range(HALVINGS):
                proposed, slope = density(position + step / 2**halving)
                if proposed >= value or decrement < CONVERGED:
                    break
            position, value, gradient = position + step / 2**halving, proposed, slope
            if not np.isfinite(decrement):
                return None
            if decrement < CONVERGED:  # The last step squares the distance.
                with suppress(np.linalg.LinAlgError):
                    if not self.is_quadratic:
                        curvature = self._eliminated(position, at_mode=True)
                    return position, value, gradient, curvature
                return None
        return None
