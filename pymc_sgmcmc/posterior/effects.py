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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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

from pymc_sgmcmc.posterior.compiled import NUMPY_MODE, compile_on_arrays
from pymc_sgmcmc.posterior.graphs import is_product
from pymc_sgmcmc.posterior.position import PositionLayout


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
    information, score : SharedVariable
        w and c, of the shape of x.
    """

    variable: TensorVariable
    location: TensorVariable
    factor: TensorVariable
    axis: int | None
    is_centered: bool
    information: SharedVariable
    score: SharedVariable

    @property
    def scale(self) -> TensorVariable:
        """s, or the diagonal of L along the axis of the coefficients."""
        if self.axis is None:
            return self.factor
        return pt.expand_dims(pt.diagonal(self.factor), 1 - self.axis)

    @property
    def precision(self) -> TensorVariable:
        """The precision of z given the rows and s, 1 + s² w."""
        return 1.0 + pt.sqr(self.scale) * self.information

    def value_of(self, v: TensorVariable) -> TensorVariable:
        """x of v."""
        precision, factor = self.precision, self.factor
        z = self.scale * self.score / precision + v / pt.sqrt(precision)
        if not self.is_centered:
            return z
        if self.axis is None:
            return self.location + factor * z
        return self.location + (pt.dot(z, factor.T) if self.axis else pt.dot(factor, z))

    @property
    def coordinates(self) -> TensorVariable:
        """The coordinates v of x."""
        z, precision = self.variable, self.precision
        if self.is_centered:
            z = z - self.location
            if self.axis is None:
                z = z / self.factor
            else:
                z = pt.linalg.solve_triangular(self.factor, z.T if self.axis else z, lower=True)
                z = z.T if self.axis else z
        return (z - self.scale * self.score / precision) * pt.sqrt(precision)

    @property
    def log_jacobian(self) -> TensorVariable:
        """The logarithm of the determinant of x as a function of v."""
        logarithms = -0.5 * pt.log(self.precision)
        if self.is_centered:
            logarithms += pt.log(self.scale)
        return logarithms.sum()


class EffectCoordinates:
    """The map between value variables and the coordinates of a chain.

    Parameters
    ----------
    layout : PositionLayout
    effects : sequence of Effect
        In the order of the model, so that each depends on earlier ones only.
    """

    def __init__(self, layout: PositionLayout, effects: Sequence[Effect]):
        self.layout, self.effects = layout, tuple(effects)
        self.replacements: dict[Variable, TensorVariable] = {}
        self.log_jacobian: TensorVariable = pt.zeros((), dtype=layout.dtype)
        for each in self.effects:
            graphs = [each.location, each.factor]
            location, factor = clone_replace(graphs, self.replacements, rebuild_strict=False)
            moved = replace(each, location=location, factor=factor)
            x = each.variable
            self.replacements[x] = moved.value_of(x).astype(x.dtype)
            self.log_jacobian += moved.log_jacobian.astype(layout.dtype)

    @property
    def of_factors(self) -> set[Variable]:
        """Value variables that factors of effects depend on."""
        factors = [each.factor for each in self.effects]
        return set(self.layout.variables).intersection(ancestors(factors))

    def adapted(self, position: np.ndarray, precisions: np.ndarray) -> np.ndarray:
        """Take what is known of effects around a position, and give its values as a position.

        Effects are zero there in the new coordinates.

        Parameters
        ----------
        position : numpy.ndarray, shape (d,)
        precisions : numpy.ndarray, shape (d,)
            Of each coordinate given the rows, and scales where these are as at the position.
        """
        values = self.to_values(position)
        scales = self._each(self._scales_function, values).astype(float)
        squares = np.maximum(scales**2, np.finfo(float).tiny)
        given = (1 + squares * self._joined("information")) * precisions
        self._set("information", np.nan_to_num(np.maximum(given - 1, 0.0) / squares))
        precision = 1 + squares * self._joined("information")
        self._set("score", np.zeros(self.layout.dimension))
        scores = self.to_coordinates(values) * np.sqrt(precision) / scales
        self._set("score", np.where(np.isfinite(scores), scores, 0.0))
        return self.to_coordinates(values)

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

    def gradients(self, values: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """Gradients of the log density of the value variables from those of the coordinates.

        All have the shape (..., d).
        """
        return self._each(self._gradients_function, values, gradients)

    def _parts(self) -> list[tuple[Effect, slice]]:
        places = dict(zip(self.layout.variables, self.layout.slices, strict=True))
        return [(each, places[each.variable]) for each in self.effects]

    def _each(self, function: Any, *arrays: np.ndarray) -> np.ndarray:
        shape = arrays[0].shape
        flat = (np.asarray(each, self.layout.dtype).reshape(-1, shape[-1]) for each in arrays)
        (found,) = function(*flat)
        return np.asarray(found).reshape(shape)

    @cached_property
    def _to_values_function(self) -> Any:
        moved = [self.replacements.get(each, each) for each in self.layout.variables]
        return self._function(self.layout.join(moved))

    @property
    def _coordinates(self) -> TensorVariable:
        moved = {each.variable: each.coordinates for each in self.effects}
        return self.layout.join([moved.get(each, each) for each in self.layout.variables])

    @cached_property
    def _scales_function(self) -> Any:
        scales = {each.variable: each.scale + pt.zeros_like(each.variable) for each in self.effects}
        joined = [scales.get(each, pt.ones_like(each)) for each in self.layout.variables]
        return self._function(self.layout.join(joined))

    @cached_property
    def _to_coordinates_function(self) -> Any:
        return self._function(self._coordinates)

    @cached_property
    def _gradients_function(self) -> Any:
        given = pt.vector("gradient", dtype=self.layout.dtype)
        value = pt.dot(self._coordinates, given)
        for each in self.effects:
            value -= each.log_jacobian
        return self._function(self.layout.gradient(value), given)

    def _function(self, graph: TensorVariable, *others: TensorVariable) -> Any:
        position = pt.vector("position", dtype=self.layout.dtype)
        graph = clone_replace(graph, self.layout.split(position), rebuild_strict=False)
        several = {
            each: pt.matrix(f"{each.name}s", dtype=self.layout.dtype)
            for each in (position, *others)
        }
        inputs = list(several.values())
        return compile_on_arrays(inputs, [vectorize_graph(graph, several)], NUMPY_MODE)

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
    for value, size, shape in zip(layout.variables, layout.sizes, layout.shapes, strict=True):
        variable = of_value[value]
        transform = model.rvs_to_transforms[variable]
        is_known = transform is None or isinstance(transform, ZeroSumTransform)
        if size == 1 or not is_known or value in uses.whole:
            continue
        location, factor, axis = _prior(variable, value, model)
        is_centered = factor is not None and uses.depends(factor)
        if not is_centered:
            location = pt.zeros((), dtype=layout.dtype)
            factor, axis = uses.factor(value) if transform is None else (None, None)
        if factor is None or not (axis is None or uses.is_triangular(factor)):
            continue
        information, score = (
            pytensor.shared(np.zeros(shape, dtype=layout.dtype), f"{value.name}_{name}")
            for name in ("information", "score")
        )
        found.append(Effect(value, location, factor, axis, is_centered, information, score))
    return found


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
        return bool(np.all(np.triu(found, 1) == 0) and np.all(np.diagonal(found) > 0))

    def factor(self, value: TensorVariable) -> Found:
        """What multiplies a variable wherever rows use it."""
        factors: list[TensorVariable] = []
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
                if isinstance(scalar_op, Mul) and value not in set(ancestors(others)):
                    unknown = [each for each in others if self.depends(each)]
                    if not self._rows.isdisjoint(ancestors(unknown)):
                        return None, None
                    if unknown:
                        direct = direct and variable is value and repeats_none
                        factors.append(unknown[0] if len(unknown) == 1 else pt.mul(*unknown))
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
                    matrices.append(found)
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
            return factors[0], None
        return (plain[0] if plain[0].type.ndim == 0 else None), None

    def _matrix(
        self, node: Apply, variable: Variable, axes: Sequence[int | None]
    ) -> tuple[TensorVariable, int] | None:
        """L of a product of effects with a matrix of value variables, and their axis for it."""
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
                return plain[0][:, None] * matrix, of_effects
            if unknown:
                return None
        return matrix, of_effects
