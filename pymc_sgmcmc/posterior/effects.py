r"""Coordinates of group effects between the centred and the non-centred form.

Effects of the levels of a factor, :math:`u_g \sim N(m, s^2)`, are written in a model either as
they are, or as :math:`z_g = (u_g - m) / s` with a fixed prior. Where the rows say much of a level
the first form leaves :math:`u_g` and s nearly independent, and where they say little the second
one. Between them are

.. math:: v_g = (u_g - m) / s^{1 - \lambda_g}

with :math:`\lambda_g` the share of the information of :math:`u_g` that comes from the rows
(Papaspiliopoulos, Roberts and Sköld 2007; Gorinova, Moore and Hoffman 2020). Both add
:math:`\lambda_g m`, which makes v and m independent. Here their correlation is left to the
preconditioner, so that the prior of a level does not depend on levels of other factors. A chain
moves v, in whatever form the model is written, and its draws are those of the variables of the
model.

References
----------
O. Papaspiliopoulos, G. O. Roberts and M. Sköld (2007). A general framework for the parametrization
of hierarchical models. *Statistical Science* 22, 59-73.

M. I. Gorinova, D. Moore and M. D. Hoffman (2020). Automatic reparameterisation of probabilistic
programs. *International Conference on Machine Learning*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Variable, equal_computations
from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scalar.basic import Cast, Mul, Neg
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.random.basic import NormalRV, StudentTRV
from pytensor.tensor.subtensor import AdvancedSubtensor
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.posterior.compiled import NUMPY_MODE, compile_on_arrays
from pymc_sgmcmc.posterior.position import PositionLayout

LOCATION_AND_SCALE = {NormalRV: (0, 1), StudentTRV: (1, 2)}
"""Numbers of these parameters of the distributions of effects."""


@dataclass(frozen=True, eq=False)
class Effect:
    r"""A value variable x that is an effect u, or a standardised one with :math:`u = s x`.

    Attributes
    ----------
    variable : TensorVariable
        x.
    location, scale : TensorVariable
        m, zero for a standardised effect, and s, as functions of value variables.
    is_centered : bool
        Whether x is u.
    share : SharedVariable
        :math:`\lambda`, of the shape of x.
    """

    variable: TensorVariable
    location: TensorVariable
    scale: TensorVariable
    is_centered: bool
    share: SharedVariable

    @property
    def log_factor(self) -> TensorVariable:
        """The logarithm of :math:`|s|^e` in :math:`x = m + |s|^e v`.

        A factor of standardised effects may have any sign, as that of a loading.
        """
        return (float(self.is_centered) - self.share) * pt.log(pt.abs(self.scale))


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
            location, logarithm = clone_replace(
                [each.location, each.log_factor], self.replacements, rebuild_strict=False
            )
            x = each.variable
            # An exponential takes half of the time of a power.
            self.replacements[x] = (location + pt.exp(logarithm) * x).astype(x.dtype)
            self.log_jacobian += logarithm.sum().astype(layout.dtype)

    @property
    def shares(self) -> np.ndarray:
        """The shares of all coordinates, shape (d,), those of no effects NaN."""
        shares = np.full(self.layout.dimension, np.nan)
        for each, part in self._parts():
            shares[part] = each.share.get_value().ravel()
        return shares

    @shares.setter
    def shares(self, shares: np.ndarray) -> None:
        for each, part in self._parts():
            each.share.set_value(shares[part].reshape(each.share.get_value().shape))

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
        moved: dict[Variable, TensorVariable] = {}
        for each in self.effects:
            moved[each.variable] = (each.variable - each.location) * pt.exp(-each.log_factor)
        return self.layout.join([moved.get(each, each) for each in self.layout.variables])

    @cached_property
    def _to_coordinates_function(self) -> Any:
        return self._function(self._coordinates)

    @cached_property
    def _gradients_function(self) -> Any:
        given = pt.vector("gradient", dtype=self.layout.dtype)
        value = pt.dot(self._coordinates, given)
        for each in self.effects:
            value -= each.log_factor.sum()
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
    values, found = set(layout.variables), []
    clients: dict[Variable, list[Apply]] = {}
    for node in toposort([log_likelihood]):
        for each in set(node.inputs):
            clients.setdefault(each, []).append(node)
    for value, size, shape in zip(layout.variables, layout.sizes, layout.shapes, strict=True):
        variable = of_value[value]
        if size == 1 or model.rvs_to_transforms[variable] is not None:
            continue
        location, scale = _location_and_scale(variable, model)
        is_centered = scale is not None and _depends(scale, values)
        if not is_centered:
            location = pt.zeros((), dtype=layout.dtype)
            scale = _factor(value, clients, values, set(rows))
        if scale is None:
            continue
        share = pytensor.shared(
            np.full(shape, float(is_centered), dtype=layout.dtype), f"{value.name}_share"
        )
        found.append(Effect(value, location, scale, is_centered, share))
    return found


def _location_and_scale(
    variable: TensorVariable, model: Model
) -> tuple[TensorVariable, TensorVariable] | tuple[None, None]:
    node = variable.owner
    places = LOCATION_AND_SCALE.get(type(node.op))
    if places is None:
        return None, None
    parameters = node.op.dist_params(node)
    location, scale = model.replace_rvs_by_values([parameters[place] for place in places])
    return location, scale


def _depends(graph: Variable, variables: set[Variable]) -> bool:
    return not variables.isdisjoint(ancestors([graph]))


def _factor(
    value: TensorVariable,
    clients: Mapping[Variable, Sequence[Apply]],
    values: set[Variable],
    rows: set[Variable],
) -> TensorVariable | None:
    """The factor of value variables that multiplies a variable wherever rows use it, or None."""
    factors: list[TensorVariable] = []
    direct = True
    frontier: list[Variable] = [value]
    while frontier:
        variable = frontier.pop()
        for node in clients.get(variable, ()):
            others = [each for each in node.inputs if each is not variable]
            scalar_op = getattr(node.op, "scalar_op", None)
            if isinstance(scalar_op, Mul) and not any(_depends(each, {value}) for each in others):
                unknown = [each for each in others if _depends(each, values)]
                if len(unknown) > 1 or any(_depends(each, rows) for each in unknown):
                    return None
                if unknown:
                    direct = direct and variable is value
                    factors.append(unknown[0])
                else:
                    frontier.append(node.outputs[0])
            elif (
                isinstance(node.op, DimShuffle)
                or isinstance(scalar_op, Neg | Cast)
                or (isinstance(node.op, AdvancedSubtensor) and node.inputs[0] is variable)
            ):
                frontier.append(node.outputs[0])
            else:
                return None
    plain = [_without_new_axes(each) for each in factors]
    if not plain or not all(equal_computations(plain[:1], [each]) for each in plain[1:]):
        return None
    if direct:
        return factors[0]
    return plain[0] if plain[0].type.ndim == 0 else None


def _without_new_axes(graph: TensorVariable) -> TensorVariable:
    while graph.owner is not None and isinstance(graph.owner.op, DimShuffle):
        graph = graph.owner.inputs[0]
    return graph
