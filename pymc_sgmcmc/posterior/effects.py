r"""Coordinates of group effects in which they depend little on their scale.

Effects of the levels of a factor, :math:`u_g = m + s z_g` with :math:`z_g \sim N(0, 1)`, are
written in a model either as u (centred) or as z (non-centred). Where the rows say much of a level
the first form leaves :math:`u_g` and s nearly independent, and where they say little the second
one. Let the log likelihood of the rows of a level be near
:math:`c_g (u_g - m) - \tfrac12 w_g (u_g - m)^2`. Then

.. math:: z_g = \frac{s c_g}{1 + s^2 w_g} + \frac{v_g}{\sqrt{1 + s^2 w_g}}

makes :math:`v_g` standard normal whatever s is, and independent of it. Between the two forms it has
the share :math:`s^2 w_g / (1 + s^2 w_g)` of the centred one (Papaspiliopoulos, Roberts and Sköld
2007; Gorinova, Moore and Hoffman 2020), which follows s here: both ends of a funnel are as wide as
its middle. The map is exact for any c and w, which only decide how simple the posterior of v is.
Dependence on m is left to the preconditioner, so that the prior of a level does not depend on
levels of other factors.

Rows see effects as u, or as :math:`s z` where the model adds m: the *position of the rows* has
these in place of the variables of the model, so that control variates are the same in both forms.

In short positions the levels of factors with few levels, and the coefficients beside them, are a
joint block: with the matrix W of what the rows say of all of them together, and their scales S,
:math:`I + S W S = L L^\top` and :math:`z = L^{-\top} (L^{-1} S c + v)`. The rows of such factors
say much of differences between levels and little of their mean, which the intercept may have as
well, and the levels of one factor are sums of those of another.

Several coefficients of a level have :math:`u_g = m + L z_g` with a lower triangular L. Each is
treated as above with its element of the diagonal of L for s. What their correlations add is left to
the preconditioner too.

A chain moves v, in whatever form the model is written, and its draws are those of the variables of
the model.

References
----------
O. Papaspiliopoulos, G. O. Roberts and M. Sköld (2007). A general framework for the parametrization
of hierarchical models. *Statistical Science* 22, 59-73.

M. I. Gorinova, D. Moore and M. D. Hoffman (2020). Automatic reparameterisation of probabilistic
programs. *International Conference on Machine Learning*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.distributions.multivariate import ZeroSumNormalRV
from pymc.distributions.transforms import ZeroSumTransform
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Variable, equal_computations
from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scalar.basic import Cast, Mul, Neg
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.random.basic import MvNormalRV, NormalRV, StudentTRV
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.subtensor import AdvancedSubtensor
from pytensor.tensor.variable import TensorVariable
from scipy import linalg, sparse
from scipy.sparse.linalg import splu

from pymc_sgmcmc.matrices import Dense, Diagonal, Matrix
from pymc_sgmcmc.posterior.compiled import NUMPY_MODE, compile_on_arrays
from pymc_sgmcmc.posterior.graphs import is_product
from pymc_sgmcmc.posterior.position import PositionLayout
from pymc_sgmcmc.posterior.threads import SharedFunction

SMALLEST_SCALE = 1e-100
"""Scales are no smaller where one is divided by their square, which is a number then."""

FEW_LEVELS = 30
"""Effects of so many levels are in the joint block. The log of the scale of k levels has a standard
deviation of about 1 / sqrt(2 k), so that with more the scale changes by less than a factor of 1.7
within four of them."""


LONGEST = 500
"""Longer positions have no joint block, since they have no dense matrices, see `DENSE_DIMENSION`:
what rows say of it depends on the effects beside it."""


@dataclass(frozen=True, eq=False)
class Effect:
    r"""A value variable x that is an effect :math:`u = m + s z`, or a standardised one z.

    Attributes
    ----------
    variable : TensorVariable
        x.
    location : TensorVariable
        m as a function of value variables.
    factor : TensorVariable
        s as a function of value variables or, for k coefficients a level, L of shape (k, k).
    axis : int, optional
        The axis of x with the k coefficients, 0 or 1 of two.
    is_centered : bool
        Whether x is u.
    is_known : bool
        Whether s is a number, as of a coefficient.
    is_whole : bool
        Whether rows depend on more than the entries that they select, as on coefficients.
    information, score : SharedVariable
        w and c, of the shape of x.
    products : tuple of pairs of TensorVariable
        Products of x with its factor in the log likelihood of rows, and what stands there for them
        where x is seen as a product already.
    """

    variable: TensorVariable
    location: TensorVariable
    factor: TensorVariable
    axis: int | None
    is_centered: bool
    is_known: bool
    is_whole: bool
    information: SharedVariable
    score: SharedVariable
    products: tuple[tuple[Variable, Variable], ...] = ()

    @property
    def scale(self) -> TensorVariable:
        """s, or the diagonal of L along the axis of the coefficients, of the shape of x."""
        if self.axis is None:
            scale = self.factor
        else:
            scale = pt.expand_dims(pt.diagonal(self.factor), 1 - self.axis)
        return scale + pt.zeros_like(self.variable)

    @property
    def precision(self) -> TensorVariable:
        """The precision of z given the rows and s, 1 + s² w."""
        return 1.0 + pt.sqr(self.scale) * self.information

    def standardised(self, v: TensorVariable) -> TensorVariable:
        """z of v."""
        precision = self.precision
        return self.scale * self.score / precision + v / pt.sqrt(precision)

    def coordinates_of(self, z: TensorVariable) -> TensorVariable:
        """v of z."""
        precision = self.precision
        return (z - self.scale * self.score / precision) * pt.sqrt(precision)

    def of_rows(self, z: TensorVariable) -> TensorVariable:
        """What the rows see of z: u, or s z where the model adds m."""
        if self.axis is None:
            product = self.factor * z
        else:
            product = pt.dot(z, self.factor.T) if self.axis else pt.dot(self.factor, z)
        return self.location + product if self.is_centered else product

    @property
    def of_value(self) -> TensorVariable:
        """z of x."""
        x = self.variable
        if not self.is_centered:
            return x
        if self.axis is None:
            return (x - self.location) / self.factor
        x = x - self.location
        z = pt.linalg.solve_triangular(self.factor, x.T if self.axis else x, lower=True)
        return z.T if self.axis else z


class EffectCoordinates:
    """The map from the coordinates of a chain to the position of the rows and to value variables.

    Parameters
    ----------
    layout : PositionLayout
    effects : sequence of Effect
        In the order of the model, so that each depends on earlier ones only.
    most_joint : int
        The joint block has at most this many coordinates. Long positions have none, since what the
        rows say of it depends on the effects beside it.

    Attributes
    ----------
    replacements, of_rows : dict
        Value variables, and the position of the rows, of those of them that differ from v.
    log_jacobian : TensorVariable
        The logarithm of the determinant of the value variables as a function of v.
    """

    def __init__(self, layout: PositionLayout, effects: Sequence[Effect], most_joint: int = 0):
        # What others are scaled by stays as it is.
        factors = set(ancestors([each.factor for each in effects]))
        effects = [each for each in effects if each.variable not in factors]
        joint = _joint_block(effects, most_joint) if layout.dimension <= LONGEST else []
        self.layout = layout
        self.effects = tuple(each for each in effects if each in joint or not each.is_whole)
        self.joint = tuple(each for each in self.effects if each in joint)
        count = sum(map(_size, self.joint))
        # Single precision would lose the root where rows say a million times what the prior says.
        self._information = pytensor.shared(np.zeros((count, count)), "information")
        self._score = pytensor.shared(np.zeros(count), "score")
        self.replacements: dict[Variable, TensorVariable] = {}
        self.of_rows: dict[Variable, TensorVariable] = {}
        of_effects: list[TensorVariable] = [pt.zeros((), dtype=layout.dtype)]
        together = self._apart(self._standardised) if self.joint else {}
        if self.joint:
            of_effects.append(-pt.log(pt.diagonal(self._root)).sum())
        for each in self.effects:
            graphs = [each.location, each.factor]
            location, factor = clone_replace(graphs, self.replacements, rebuild_strict=False)
            moved, x = replace(each, location=location, factor=factor), each.variable
            if each in joint:
                z = together[x]
            else:
                z = moved.standardised(x)
                of_effects.append(-0.5 * pt.log(moved.precision).sum())
            if each.is_centered:
                of_effects.append(pt.log(moved.scale).sum())
            self.of_rows[x] = moved.of_rows(z).astype(x.dtype)
            self.replacements[x] = self.of_rows[x] if each.is_centered else z.astype(x.dtype)
        self.log_jacobian = sum(each.astype(layout.dtype) for each in of_effects)

    # --- The joint block -------------------------------------------------------------------

    @cached_property
    def _scales(self) -> TensorVariable:
        """The diagonal of S."""
        return pt.concatenate([each.scale.ravel() for each in self.joint])

    @cached_property
    def _root(self) -> TensorVariable:
        """L."""
        scales = self._scales
        products = scales[:, None] * self._information * scales
        return pt.linalg.cholesky(pt.eye(scales.shape[0], dtype="float64") + products)

    @cached_property
    def _shift(self) -> TensorVariable:
        return pt.linalg.solve_triangular(self._root, self._scales * self._score, lower=True)

    @property
    def _standardised(self) -> TensorVariable:
        """z of v."""
        v = pt.concatenate([each.variable.ravel() for each in self.joint])
        return pt.linalg.solve_triangular(self._root.T, self._shift + v, lower=False)

    def _apart(self, joined: TensorVariable) -> dict[Variable, TensorVariable]:
        """Parts of a vector by effect of the joint block."""
        stops = np.cumsum([0, *map(_size, self.joint)]).tolist()
        return {
            each.variable: joined[start:stop].reshape(_shape(each))
            for each, (start, stop) in zip(self.joint, pairwise(stops), strict=True)
        }

    @cached_property
    def _places(self) -> np.ndarray:
        """Coordinates of the joint block."""
        parts = dict(self._parts())
        numbers = np.arange(self.layout.dimension)
        return np.concatenate([numbers[:0], *(numbers[parts[each]] for each in self.joint)])

    @property
    def apart(self) -> np.ndarray:
        """Whether each coordinate is one of an effect beside the joint block, shape (d,)."""
        found = np.zeros(self.layout.dimension, dtype=bool)
        for each, part in self._parts():
            found[part] = each not in self.joint
        return found

    def adapted(self, position: np.ndarray, precision: Matrix | sparse.csr_array) -> np.ndarray:
        """Take what is known of effects around a position, and give its values as a position.

        Effects are zero there in the new coordinates.

        Parameters
        ----------
        position : numpy.ndarray, shape (d,)
        precision : Matrix or sparse array, shape (d, d)
            Minus the Hessian of the log density there.
        """
        scales = self._scales_at(position)
        given = (1 + scales**2 * self._joined("information")) * precision.diagonal() - 1
        information = np.maximum(given, 0.0) / scales**2
        if not self.joint:
            return self.informed(position, information)
        places = self._places
        products, unit = np.outer(scales[places], scales[places]), np.eye(len(places))
        root = linalg.cholesky(unit + products * self._information.get_value(), lower=True)
        given = root @ self._of_joint(precision) @ root.T - unit
        # The rows say nothing that is negative.
        sizes, vectors = linalg.eigh(given)
        of_joint = (vectors * np.maximum(sizes, 0.0)) @ vectors.T / products
        return self.informed(position, information, of_joint)

    def informed(
        self, position: np.ndarray, information: np.ndarray, of_joint: np.ndarray | None = None
    ) -> np.ndarray:
        """Take what rows say of each effect where the others are known, as `adapted`.

        Parameters
        ----------
        position : numpy.ndarray, shape (d,)
        information : numpy.ndarray, shape (d,)
            Minus the second derivatives of the log likelihood in the position of the rows.
        of_joint : numpy.ndarray, optional
            What they say of the joint block. Default: the same, on the diagonal.
        """
        values, z = self.to_values(position), self._standardised_at(position)
        scales = self._scales_at(position)
        self._set("information", information)
        self._set("score", z * (1 + scales**2 * information) / scales)
        if self.joint:
            places = self._places
            if of_joint is None:
                of_joint = np.diag(information[places])
            scales, z = scales[places], z[places]
            self._information.set_value(of_joint)
            self._score.set_value(z / scales + of_joint @ (scales * z))
        return self.to_coordinates(values)

    @property
    def known(self) -> tuple[Matrix, np.ndarray]:
        """W, or w where there is no joint block, and c, as `restore` takes them."""
        information, score = self._joined("information"), self._joined("score")
        if not self.joint:
            return Diagonal(information), score
        dense, places = np.diag(information), self._places
        dense[np.ix_(places, places)] = self._information.get_value()
        score[places] = self._score.get_value()
        return Dense(dense), score

    def restore(self, information: Matrix, score: np.ndarray) -> None:
        """Take what was `known` of effects."""
        self._set("information", information.diagonal())
        self._set("score", score)
        if self.joint:
            block = information.dense()[np.ix_(self._places, self._places)]
            self._information.set_value(block)
            self._score.set_value(score[self._places])

    def _of_joint(self, precision: Matrix | sparse.csr_array) -> np.ndarray:
        """The precision of the joint block where the effects beside it may be any."""
        whole = sparse.csc_array(precision.dense() if isinstance(precision, Matrix) else precision)
        rows, apart = whole[self._places], np.flatnonzero(self.apart)
        of_block, beside = rows[:, self._places].toarray(), rows[:, apart].toarray()
        if not len(apart):
            return of_block
        return of_block - beside @ splu(whole[apart][:, apart].tocsc()).solve(beside.T)

    def _joined(self, name: str) -> np.ndarray:
        joined = np.zeros(self.layout.dimension)
        for each, part in self._parts():
            joined[part] = getattr(each, name).get_value().ravel()
        return joined

    def _set(self, name: str, joined: np.ndarray) -> None:
        for each, part in self._parts():
            shared = getattr(each, name)
            shape = shared.get_value().shape
            shared.set_value(joined[part].reshape(shape).astype(self.layout.dtype))

    def to_values(self, positions: np.ndarray) -> np.ndarray:
        """Value variables, ravelled, at positions of a chain, both of shape (..., d)."""
        return self._each(self._to_values_function, positions)

    def to_coordinates(self, values: np.ndarray) -> np.ndarray:
        """Positions of a chain at values of the value variables, both of shape (..., d)."""
        return self._each(self._to_coordinates_function, values)

    def to_rows(self, positions: np.ndarray) -> np.ndarray:
        """Positions of the rows at positions of a chain, both of shape (..., d)."""
        return self._each(self._to_rows_function, positions)

    def gradients(self, values: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """Gradients of the log density of the value variables from those of the coordinates.

        All have the shape (..., d).
        """
        return self._each(self._gradients_function, values, gradients)

    def pulled_back(self, positions: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """Gradients in terms of the coordinates from those in terms of positions of the rows.

        All have the shape (..., d).
        """
        return self._each(self._pulled_back_function, positions, gradients)

    def jacobian(self, position: np.ndarray) -> sparse.csr_array:
        """Derivatives of the position of the rows, shape (d, d)."""
        d, columns = self.layout.dimension, self.columns
        common = np.flatnonzero(~self.apart)
        width = np.cbrt(np.finfo(self.layout.dtype).eps)
        parts = [self._each_derivative(position, common, width)]
        # Most effects apart are linear functions of one entry of a column: numbers of their own
        # show of which, and random ones whether that is so.
        for column in columns:
            random = np.random.default_rng(1964).uniform(1, 2, size=len(column))
            shifts = np.zeros((3, d))
            shifts[:, column] = np.ones(len(column)), 1 + np.arange(len(column)), random
            ends = self.to_rows(np.concatenate([position + shifts, position - shifts]))
            ahead, behind = np.split(ends.astype(float), 2)
            ones, keys, of_random = (ahead - behind) / 2
            rows = np.flatnonzero(ones)
            entries = np.rint(keys[rows] / ones[rows] - 1).astype(int)
            entries = np.clip(entries, 0, len(column) - 1)
            expected = np.zeros(d)
            expected[rows] = ones[rows] * random[entries]
            if np.abs(expected - of_random).max() <= 1e-3 * np.abs(ones).max():
                parts.append((rows, column[entries], ones[rows]))
            else:
                parts.append(self._each_derivative(position, column, width))
        rows, places, values = (np.concatenate(each) for each in zip(*parts, strict=True))
        return sparse.coo_array((values, (rows, places)), shape=(d, d)).tocsr()

    def _each_derivative(
        self, position: np.ndarray, places: np.ndarray, width: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, columns and elements of the Jacobian for given coordinates, one by one."""
        shifts = np.zeros((len(places), len(position)))
        shifts[np.arange(len(places)), places] = width
        ends = self.to_rows(np.concatenate([position + shifts, position - shifts]))
        ahead, behind = np.split(ends.astype(float), 2)
        found = sparse.coo_array((ahead - behind) / (2 * width))
        return found.col, places[found.row], found.data

    def curvature(
        self,
        position: np.ndarray,
        of_rows: np.ndarray,
        gradient: np.ndarray,
    ) -> np.ndarray:
        """Minus the Hessian of a function of the position of the rows, shape (d, d).

        Parameters
        ----------
        position : numpy.ndarray, shape (d,)
        of_rows, gradient : numpy.ndarray
            Minus its Hessian, and its gradient, in terms of the position of the rows.
        """
        jacobian = self.jacobian(position).toarray()
        d, width = len(position), np.cbrt(np.finfo(self.layout.dtype).eps)
        ends = np.concatenate([position + width * np.eye(d), position - width * np.eye(d)])
        ahead, behind = np.split(self.pulled_back(ends, np.broadcast_to(gradient, ends.shape)), 2)
        bent = (behind - ahead) / (2 * width)
        return jacobian.T @ of_rows @ jacobian + (bent + bent.T) / 2

    @property
    def columns(self) -> list[np.ndarray]:
        """Coordinates of each effect, of its coefficients one after the other."""
        numbers, columns = np.arange(self.layout.dimension), []
        for each, part in self._parts():
            of_effect = numbers[part].reshape(_shape(each))
            columns += (
                [of_effect.ravel()]
                if each.axis is None
                else list(np.moveaxis(of_effect, each.axis, 0))
            )
        return columns

    def _parts(self) -> list[tuple[Effect, slice]]:
        places = dict(zip(self.layout.variables, self.layout.slices, strict=True))
        return [(each, places[each.variable]) for each in self.effects]

    def _each(self, function: Any, *arrays: np.ndarray) -> np.ndarray:
        shape = arrays[0].shape
        flat = (np.asarray(each, self.layout.dtype).reshape(-1, shape[-1]) for each in arrays)
        if self.joint:
            found = np.array([function(*each)[0] for each in zip(*flat, strict=True)])
        else:
            (found,) = function(*flat)
        return np.asarray(found).reshape(shape)

    def _standardised_at(self, position: np.ndarray) -> np.ndarray:
        """z at a position, and zero of other variables."""
        return self._each(self._standardised_function, self.to_values(position))

    def _scales_at(self, position: np.ndarray) -> np.ndarray:
        """s at a position, though never quite zero, and one of other variables."""
        scales = self._each(self._scales_function, self.to_values(position)).astype(float)
        return np.where(np.abs(scales) < SMALLEST_SCALE, SMALLEST_SCALE, scales)

    def _of_effects(
        self, of_effects: Mapping[Variable, TensorVariable], other: Callable[..., TensorVariable]
    ) -> TensorVariable:
        variables = self.layout.variables
        return self.layout.join(
            [of_effects[each] if each in of_effects else other(each) for each in variables]
        )

    @cached_property
    def _standardised_function(self) -> Any:
        z = {each.variable: each.of_value for each in self.effects}
        return self._function(self._of_effects(z, pt.zeros_like))

    @cached_property
    def _scales_function(self) -> Any:
        scales = {each.variable: each.scale for each in self.effects}
        return self._function(self._of_effects(scales, pt.ones_like))

    @cached_property
    def _to_values_function(self) -> Any:
        return self._function(self._of_effects(self.replacements, lambda variable: variable))

    @cached_property
    def _to_rows_function(self) -> Any:
        return self._function(self.position_of_rows)

    @property
    def position_of_rows(self) -> TensorVariable:
        """The position of the rows as a function of v, in place of the value variables."""
        return self._of_effects(self.of_rows, lambda variable: variable)

    @property
    def _coordinates(self) -> TensorVariable:
        """v of the value variables."""
        moved = {
            each.variable: each.coordinates_of(each.of_value)
            for each in self.effects
            if each not in self.joint
        }
        if self.joint:
            z = pt.concatenate([each.of_value.ravel() for each in self.joint])
            moved |= self._apart(pt.dot(self._root.T, z) - self._shift)
        return self._of_effects(moved, lambda variable: variable)

    @cached_property
    def _to_coordinates_function(self) -> Any:
        return self._function(self._coordinates)

    @cached_property
    def _gradients_function(self) -> Any:
        """Gradient of the density of values: that of v pulled back, less the Jacobian's."""
        given = pt.vector("gradient", dtype=self.layout.dtype)
        value = pt.dot(self._coordinates, given)
        for each in self.effects:
            if each not in self.joint:
                value += 0.5 * pt.log(each.precision).sum()
            if each.is_centered:
                value -= pt.log(each.scale).sum()
        if self.joint:
            value += pt.log(pt.diagonal(self._root)).sum()
        return self._function(self.layout.gradient(value), given)

    @cached_property
    def _pulled_back_function(self) -> Any:
        given = pt.vector("gradient", dtype=self.layout.dtype)
        return self._function(self.pulled_back_graph(given), given)

    def pulled_back_graph(self, gradient: TensorVariable) -> TensorVariable:
        """Symbolic `pulled_back` as a function of v."""
        return self.layout.gradient(pt.dot(self.position_of_rows, gradient))

    def _function(self, graph: TensorVariable, *others: TensorVariable) -> SharedFunction:
        position = pt.vector("position", dtype=self.layout.dtype)
        graph = clone_replace(graph, self.layout.split(position), rebuild_strict=False)
        if self.joint:
            # Cholesky factors of several matrices take a quarter of a minute to compile.
            return SharedFunction(compile_on_arrays([position, *others], [graph], NUMPY_MODE))
        several = {
            each: pt.matrix(f"{each.name}s", dtype=self.layout.dtype)
            for each in (position, *others)
        }
        inputs = list(several.values())
        graph = vectorize_graph(graph, several)
        return SharedFunction(compile_on_arrays(inputs, [graph], NUMPY_MODE))

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the functions, which are compiled again when needed."""
        return {name: each for name, each in vars(self).items() if not name.endswith("_function")}


def find_effects(
    model: Model,
    layout: PositionLayout,
    log_likelihood: TensorVariable,
    rows: Sequence[TensorVariable],
) -> list[Effect]:
    """Effects with an unknown scale, in the order of the model.

    Parameters
    ----------
    model : pymc.Model
    layout : PositionLayout
    log_likelihood : TensorVariable
        That of symbolic rows, in value variables.
    rows : sequence of TensorVariable
        The symbolic rows.
    """
    of_value = {value: variable for variable, value in model.rvs_to_values.items()}
    uses, found = _Uses(log_likelihood, layout, rows), []
    for value, shape in zip(layout.variables, layout.shapes, strict=True):
        variable = of_value[value]
        transform = model.rvs_to_transforms[variable]
        if not (transform is None or isinstance(transform, ZeroSumTransform)):
            continue
        location, factor, axis = _prior(variable, value, model)
        is_known = factor is not None and not uses.depends(factor)
        is_centered = factor is not None and not is_known
        products: tuple[tuple[Variable, Variable], ...] = ()
        if not is_centered and transform is None:
            of_rows = uses.factor(value)
            if of_rows[0] is not None:
                location, (factor, axis) = pt.zeros((), dtype=layout.dtype), of_rows
                is_known, products = False, tuple(uses.products[value])
        if factor is None or not (axis is None or uses.is_triangular(factor)):
            continue
        information, score = (
            pytensor.shared(np.zeros(shape, dtype=layout.dtype), f"{value.name}_{name}")
            for name in ("information", "score")
        )
        found.append(
            Effect(
                value,
                location,
                factor,
                axis,
                is_known or is_centered,
                is_known,
                value in uses.whole or is_known or np.prod(shape) == 1,
                information,
                score,
                products,
            )
        )
    return found


def _size(effect: Effect) -> int:
    return int(np.prod(_shape(effect)))


def _shape(effect: Effect) -> tuple[int, ...]:
    return effect.information.get_value(borrow=True).shape


def _joint_block(effects: Sequence[Effect], most: int) -> list[Effect]:
    """The effects of fewest levels, and coefficients, of which there are so many together."""
    joint: list[Effect] = []
    for each in sorted(effects, key=_size):
        # Rows join the coefficients of a scale that is not known, which have no other form.
        is_few = _size(each) <= FEW_LEVELS or (each.is_whole and not each.is_known)
        if is_few and each.axis is None and _size(each) <= most:
            joint.append(each)
            most -= _size(each)
    return [] if all(each.is_known for each in joint) else joint


type Found = tuple[TensorVariable | None, int | None]
"""A factor, and the axis of coefficients where it is a matrix."""


def _prior(
    variable: TensorVariable, value: TensorVariable, model: Model
) -> tuple[TensorVariable, TensorVariable | None, int | None]:
    """Location, factor and axis of an effect in its prior, the last two None for other priors."""
    node, zero = variable.owner, pt.zeros((), dtype=value.dtype)
    parameters = list(node.op.dist_params(node)) if isinstance(node.op, RandomVariable) else []
    match node.op:
        case ZeroSumNormalRV():
            (factor,) = model.replace_rvs_by_values([node.op.dist_params(node)[0]])
            return zero, factor, None
        case NormalRV() | StudentTRV():
            location, factor = model.replace_rvs_by_values(parameters[-2:])
            return location, factor, None
        case MvNormalRV() if value.type.ndim == 2:
            location, covariance = model.replace_rvs_by_values(parameters)
            return location, _root(_without_new_axes(covariance)), 1
    return zero, None, None


def _root(covariance: TensorVariable) -> TensorVariable:
    """L of a covariance matrix L Lᵀ."""
    node = covariance.owner
    if node is not None and is_product(node):
        left, right = node.inputs
        if equal_computations([left.T], [right]):
            return left
    return pt.linalg.cholesky(covariance)


def _without_new_axes(graph: TensorVariable) -> TensorVariable:
    while graph.owner is not None and isinstance(graph.owner.op, DimShuffle):
        if graph.owner.op.is_transpose:
            break
        graph = graph.owner.inputs[0]
    return graph


class _Uses:
    """How the log likelihood of rows uses value variables.

    Parameters
    ----------
    log_likelihood : TensorVariable
    layout : PositionLayout
    rows : sequence of TensorVariable

    Attributes
    ----------
    whole : set of Variable
        Those of which rows take more than the entries that they select.
    products : dict
        For each variable that `factor` was asked for its products with the factor, and what is left
        of them without it.
    """

    def __init__(
        self,
        log_likelihood: TensorVariable,
        layout: PositionLayout,
        rows: Sequence[TensorVariable],
    ):
        self._layout = layout
        self._values, self._rows = set(layout.variables), set(rows)
        self._clients: dict[Variable, list[Apply]] = {}
        self.products: dict[Variable, list[tuple[Variable, Variable]]] = {}
        indexed: set[Variable] = set()
        for node in toposort([log_likelihood]):
            if isinstance(node.op, AdvancedSubtensor):
                array, index = (set(ancestors(part)) for part in (node.inputs[:1], node.inputs[1:]))
                if self._rows.isdisjoint(array) and not self._rows.isdisjoint(index):
                    indexed |= array
            for each in set(node.inputs):
                self._clients.setdefault(each, []).append(node)
        self.whole = set(self._clients) - indexed

    def depends(self, graph: Variable) -> bool:
        """Whether a graph depends on value variables."""
        return not self._values.isdisjoint(ancestors([graph]))

    def is_triangular(self, matrix: TensorVariable) -> bool:
        """Whether a matrix is lower triangular with a positive diagonal, at random values."""
        position = pt.vector("position", dtype=self._layout.dtype)
        graph = clone_replace(matrix, self._layout.split(position), rebuild_strict=False)
        function = compile_on_arrays([position], [graph], NUMPY_MODE)
        values = np.random.default_rng(1963).standard_normal(self._layout.dimension)
        (found,) = function(values.astype(self._layout.dtype))
        is_square = found.ndim == 2 and found.shape[0] == found.shape[1]
        return bool(is_square and np.all(np.triu(found, 1) == 0) and np.all(np.diagonal(found) > 0))

    def factor(self, value: TensorVariable) -> Found:
        """What multiplies a variable wherever rows use it."""
        factors: list[TensorVariable] = []
        products = self.products[value] = []
        matrices: list[tuple[TensorVariable, int]] = []
        # Only along an axis of length one may a product be longer than the variable.
        repeats_none = 1 not in self._layout.shapes[self._layout.variables.index(value)]
        direct = True
        frontier: list[tuple[Variable, tuple[int | None, ...]]] = [
            (value, tuple(range(value.type.ndim)))
        ]
        while frontier:
            variable, axes = frontier.pop()
            for node in self._clients.get(variable, ()):
                others = [each for each in node.inputs if each is not variable]
                scalar_op = getattr(node.op, "scalar_op", None)
                is_once = len(others) == len(node.inputs) - 1
                if isinstance(scalar_op, Mul) and is_once and value not in set(ancestors(others)):
                    unknown = [each for each in others if self.depends(each)]
                    if not self._rows.isdisjoint(ancestors(unknown)):
                        return None, None
                    if unknown:
                        direct = direct and variable is value and repeats_none
                        factors.append(unknown[0] if len(unknown) == 1 else pt.mul(*unknown))
                        known = [each for each in node.inputs if each not in unknown]
                        products.append(
                            (node.outputs[0], pt.mul(*known) if known[1:] else variable)
                        )
                        continue
                    after = axes
                elif isinstance(node.op, DimShuffle):
                    after = tuple(None if each == "x" else axes[each] for each in node.op.new_order)
                elif isinstance(scalar_op, Neg | Cast):
                    after = axes
                elif isinstance(node.op, AdvancedSubtensor) and node.inputs[0] is variable:
                    # Where the axes of an index come is no matter, since only a matrix needs them.
                    after = (None,) * node.outputs[0].type.ndim
                elif is_product(node) and len(others) == 1 and value.type.ndim == 2:
                    found = self._matrix(node, variable, axes)
                    if found is None:
                        return None, None
                    matrices.append(found[:2])
                    products.append(found[2])
                    continue
                else:
                    return None, None
                frontier.append((node.outputs[0], after))
        if matrices:
            (matrix, axis), *more = matrices
            same = all(axis == a and equal_computations([matrix], [m]) for m, a in more)
            return (matrix, axis) if same and not factors else (None, None)
        plain = [_without_new_axes(each) for each in factors]
        if not plain or not all(equal_computations(plain[:1], [each]) for each in plain[1:]):
            return None, None
        if direct:
            same = all(equal_computations(factors[:1], [each]) for each in factors[1:])
            return (factors[0] if same else None), None
        return (plain[0] if plain[0].type.ndim == 0 else None), None

    def _matrix(
        self, node: Apply, variable: Variable, axes: Sequence[int | None]
    ) -> tuple[TensorVariable, int, tuple[Variable, Variable]] | None:
        """L of a product of effects with a matrix of value variables, and their axis for it.

        The product is the third, and what is left of it without L.
        """
        left, right = node.inputs
        of_effects, matrix = (axes[-1], right.T) if left is variable else (axes[0], left)
        if of_effects is None or not self.depends(matrix):
            return None
        if not self._rows.isdisjoint(ancestors([matrix])):
            return None
        (product,) = node.outputs
        clients = self._clients.get(product, ())
        if len(clients) == 1 and isinstance(getattr(clients[0].op, "scalar_op", None), Mul):
            # Standard deviations times a root of correlations.
            unknown = [e for e in clients[0].inputs if e is not product and self.depends(e)]
            plain = [_without_new_axes(each) for each in unknown]
            is_last = left is variable
            if len(plain) == 1 and plain[0].type.ndim == 1:
                if unknown[0].type.broadcastable[-1] is is_last:
                    return None
                known = [e for e in clients[0].inputs if e is not product and e not in unknown]
                left_over = pt.mul(variable, *known) if known else variable
                return plain[0][:, None] * matrix, of_effects, (clients[0].outputs[0], left_over)
            if unknown:
                return None
        return matrix, of_effects, (product, variable)
