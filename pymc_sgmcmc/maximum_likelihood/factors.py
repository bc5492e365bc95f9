r"""Effects of several factors integrated out together, crossed or nested, by Laplace's method.

With the mode u of the effects at the global variables :math:`\theta`, and H minus the Hessian of
the joint log density there,

.. math:: \log p(y \mid \theta) \approx \log p(y, u \mid \theta) - \tfrac12 \log |H|
    + \tfrac q2 \log 2\pi,

which is exact where the joint log density is quadratic in u, as in linear mixed models. H is
sparse, and :math:`\nabla \log |H| = \mathrm{tr}(H^{-1} \nabla H)` takes its inverse at the same
places only. Fixed effects of a linear model, in which the joint log density is quadratic too, are
found with the modes. The likelihood is then that at its maximum in the fixed effects or, where H
counts them in, the restricted likelihood.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from copy import copy

import numpy as np
from pymc.model import Model
from scipy import sparse

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.elimination import Elimination, Order, elimination_order
from pymc_sgmcmc.errors import ConvergenceError, ModelError
from pymc_sgmcmc.marginal.exact import DISTANT
from pymc_sgmcmc.marginal.likelihood import Globals
from pymc_sgmcmc.marginal.newton import CONVERGED, MOST_STEPS
from pymc_sgmcmc.marginal.structure import chosen_and_dependents
from pymc_sgmcmc.maximum_likelihood.maximum import HALVINGS
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.selected import selected_graph
from pymc_sgmcmc.posterior.sparse_curvature import SparseCurvature

SAME = 10 * float(np.sqrt(np.finfo(float).eps))
"""A log density counts as quadratic where it is so up to this part, well above rounding."""

MOST_DENSE = 10_000
"""A dense matrix of so many effects takes 800 MB, and its inverse half a minute of one core. It is
what elimination leaves of them."""

SEED = 20_261_128
"""The direction comes from this fixed seed."""


type Mode = tuple[np.ndarray, float, np.ndarray, Elimination]
"""A position at the mode, its log density and gradient, and the factors of the matrix there."""


class Factors(Globals):
    """The marginal log likelihood of a position of the global variables, with its gradient.

    Parameters
    ----------
    model : pymc.Model
    names : sequence of str
        Effects of any number of factors.

    Attributes
    ----------
    is_quadratic : bool
        Whether the joint log density is so in the effects.
    fixed : numpy.ndarray of bool
        Mask of the coordinates of the fixed effects, jointly with which it is so too. The
        likelihood is that at its maximum in these, a function of the other coordinates.

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
        untransformed = is_effect.copy()
        for variable, part in zip(layout.variables, layout.slices, strict=True):
            untransformed[part] |= model.rvs_to_transforms[model.values_to_rvs[variable]] is None
        self._is_effect = is_effect
        self._curvature = SparseCurvature(posterior, graph, untransformed)
        self._start = self._last = posterior.initial_position
        self._scale, self._restricted = np.ones(layout.dimension), False
        self._known: tuple[np.ndarray, tuple[float, np.ndarray]] | None = None
        try:
            inner = self._quadratic(untransformed)
        except ModelError:
            raise ModelError(
                f"Levels of {quoted(names)} should be independent of each other, but the prior "
                "joins some, as that of a random walk does. Use `sample`."
            ) from None
        self.is_quadratic = bool(inner.any())
        if inner.all():
            inner = is_effect
        self.fixed = (inner & ~is_effect)[~is_effect]
        self._curvature.within = inner | is_effect
        self._inner = np.flatnonzero(self._curvature.within)
        self._others = np.flatnonzero(~self._curvature.within)
        self._number = np.cumsum(self._curvature.within) - 1
        self._order = self._order_of_elimination()

    def restricted(self) -> Factors:
        """The restricted likelihood, with the fixed effects integrated out too."""
        found = copy(self)
        found._restricted, found._known = True, None
        return found

    def __call__(self, rest: np.ndarray) -> tuple[float, np.ndarray]:
        """Value and gradient, which are not finite where the model is not.

        The position is that of the coordinates that are not fixed effects.
        """
        # A search asks for where it begins and ends several times.
        if self._known is None or not np.array_equal(rest, self._known[0]):
            self._known = rest.copy(), self._value_and_gradient(rest)
        return self._known[1]

    def _value_and_gradient(self, rest: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(all="ignore"):
            mode = self._mode(rest)
            if mode is None:
                return np.nan, np.full(len(rest), np.nan)
            position, _, gradient, curvature = mode
            self._last = position
            rows, columns = self._number[np.array(self._curvature.elements)]
            weights = curvature.inverse_at(rows, columns, self._left_out)
            slopes = self._curvature.slope_of_trace(position, self._scale, weights)
            if not self.is_quadratic:
                slopes = slopes + self._moved_by(position, curvature.solve(slopes[self._inner]))
        return self._value(mode), (gradient - 0.5 * slopes)[self._others]

    def value(self, rest: np.ndarray) -> float:
        """The value alone."""
        with np.errstate(all="ignore"):
            mode = self._mode(rest)
            return np.nan if mode is None else self._value(mode)

    def complete(self, effects: np.ndarray, rest: np.ndarray) -> np.ndarray:
        """Position of the fixed effects and the other coordinates."""
        position = np.empty(len(self.fixed))
        position[self.fixed], position[~self.fixed] = effects, rest
        return position

    def estimate(self, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fixed effects and a factor of their covariance, given the other coordinates."""
        count = int(self.fixed.sum())
        with np.errstate(all="ignore"):
            mode = self._mode(rest)
        if mode is None:
            return np.zeros(count), np.full((count, count), np.nan)
        position, _, _, curvature = mode
        return position[~self._is_effect][self.fixed], curvature.root_at_end(count)

    def modes(self, position: np.ndarray) -> list[np.ndarray]:
        """Values of the local variables at their mode."""
        if (mode := self._mode(position[~self.fixed])) is None:
            raise ConvergenceError("The effects have no mode at the estimates. Simplify the model.")
        point = self._posterior.layout.unravel(mode[0])
        return [point[value.name] for value in self.local]

    @property
    def _left_out(self) -> int:
        """Number of fixed effects that the determinant leaves out."""
        return 0 if self._restricted else int(self.fixed.sum())

    def _value(self, mode: Mode) -> float:
        _, value, _, curvature = mode
        constant = 0.5 * (len(self._inner) - self._left_out) * np.log(2 * np.pi)
        return float(value - 0.5 * curvature.log_determinant(self._left_out) + constant)

    def _quadratic(self, candidates: np.ndarray) -> np.ndarray:
        """Effects and other variables among the candidates in which the joint log density is so.

        There are none where it is not along a random direction of the effects.
        """
        density, start = self._posterior.log_density_and_gradient, self._start
        _, slope = density(start)
        matrix = self._curvature.at(start, self._scale, central=True)
        direction = np.random.default_rng(SEED).normal(size=len(start))

        def is_quadratic(inner: np.ndarray) -> bool:
            for distance in (-DISTANT, -1.0, 1.0, DISTANT):
                step = distance * np.where(inner, direction, 0.0) * np.maximum(1.0, np.abs(start))
                with np.errstate(all="ignore"):
                    value, there = density(start + step)
                    change = np.abs(there - slope + matrix @ step)
                    agrees = change <= SAME * (np.abs(slope) + np.abs(matrix) @ np.abs(step))
                if not (np.isfinite(value) and agrees[inner].all()):
                    return False
            return True

        found = self._is_effect
        if not is_quadratic(found):
            return np.zeros_like(found)
        for part in [slice(None), *self._posterior.layout.slices]:
            more = found.copy()
            more[part] |= candidates[part]
            if not np.array_equal(more, found) and is_quadratic(more):
                found = more
        return found

    def _order_of_elimination(self) -> Order:
        """An order in which fixed effects come last, since the determinant may leave them out."""
        rows, columns = self._number[np.array(self._curvature.elements)]
        shape = len(self._inner), len(self._inner)
        places = sparse.coo_array((np.ones(len(rows)), (rows, columns)), shape=shape)
        is_fixed = ~self._is_effect[self._inner]
        factors = np.where(is_fixed, -1, self._curvature.columns[self._inner])
        order = elimination_order((places + places.T).tocsr(), factors, is_fixed)
        if order.left > MOST_DENSE:
            raise ModelError(
                f"Elimination of effects should leave at most {MOST_DENSE}, but these factors "
                f"cross so that it leaves {order.left}. Use `sample`."
            )
        return order

    def _moved_by(self, position: np.ndarray, change: np.ndarray) -> np.ndarray:
        """Change of the gradient with the effects, by differences over a short distance."""
        shift, width = np.zeros(len(position)), self._posterior.difference_width
        width /= max(np.abs(change / self._scale[self._inner]).max(), np.finfo(float).tiny)
        shift[self._inner] = width * change
        ahead, behind = (self._posterior.gradient(position + sign * shift) for sign in (1, -1))
        return (ahead - behind) / (2 * width)

    def _eliminated(self, position: np.ndarray, *, at_mode: bool = False) -> Elimination:
        """Factors of the matrix at a position, raised along its diagonal where there is no mode."""
        for _ in range(MOST_STEPS):
            matrix, last = self._curvature.at(position, self._scale, central=True), self._scale
            matrix = matrix[self._inner][:, self._inner]
            diagonal, self._scale = np.abs(matrix.diagonal()), np.ones(len(position))
            if not (np.isfinite(matrix.data).all() and diagonal.all()):
                raise np.linalg.LinAlgError
            self._scale[self._inner] = diagonal**-0.5
            # Differences over other distances may be rounding alone.
            if np.all(np.abs(np.log(self._scale / last)) < 1):
                break
        for raised in [0.0] if at_mode else [0.0, *0.1 * 2.0 ** np.arange(MOST_STEPS)]:
            with suppress(np.linalg.LinAlgError):
                raised_by = sparse.diags_array(raised * diagonal)
                return Elimination(matrix + raised_by if raised else matrix, self._order)
        raise np.linalg.LinAlgError

    def _mode(self, rest: np.ndarray) -> Mode | None:
        """The mode near the last one, None where the search does not end at one."""
        density, position = self._posterior.log_density_and_gradient, self._last.copy()
        position[self._others] = rest
        value, gradient = density(position)
        if not np.isfinite(value):
            position[self._inner] = self._start[self._inner]
            value, gradient = density(position)
        curvature: Elimination | None = None
        for _ in range(MOST_STEPS):
            step = np.zeros(len(position))
            try:
                if curvature is None or not self.is_quadratic:
                    curvature = self._eliminated(position, at_mode=self.is_quadratic)
                step[self._inner] = curvature.solve(gradient[self._inner])
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
