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

Effects that rows select by the same index, such as an intercept and a slope of each group, are a
block for each level: its records say much of a sum of both, and far less of each where the other
one is not known. With the matrix W of what they say of all of them together, and their scales S,
:math:`I + S W S = R R^\top` and :math:`z = R^{-\top} (R^{-1} S c + v)`.

In short positions the levels of factors with few levels, and the coefficients beside them, are a
joint block, with one such matrix. The rows of such factors say much of differences between levels
and little of their mean, which the intercept may have as well, and the levels of one factor are
sums of those of another. What the rows say of an effect beside the joint block depends on the
block: its c has :math:`- C_g S z` of the block added. Else a small change of a scale in the block,
which turns R, would change what rows with this level see by many standard deviations.

Several coefficients of a level have :math:`u_g = m + F z_g` with a lower triangular F, of standard
deviations and correlations, and are such a block too, see `pymc_sgmcmc.posterior.effect_blocks`.

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
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.variable import TensorVariable
from scipy import sparse
from scipy.sparse.linalg import splu

from pymc_sgmcmc.compiling.compiled import NUMPY_MODE, compile_on_arrays
from pymc_sgmcmc.matrices import Matrix
from pymc_sgmcmc.posterior.agreement import agree
from pymc_sgmcmc.posterior.effect_blocks import Block, JointBlock
from pymc_sgmcmc.posterior.effects import MOST_TOGETHER, Effect
from pymc_sgmcmc.posterior.position import DENSE_DIMENSION, PositionLayout
from pymc_sgmcmc.posterior.threads import SharedFunction

FEW_LEVELS = 30
"""Effects of so many levels are in the joint block. The log of the scale of k levels has a standard
deviation of about 1 / sqrt(2 k), so that with more the scale changes by less than a factor of 1.7
within four of them."""


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
    joint : JointBlock or None
    beside : list of Block
    replacements, of_rows : dict
        Value variables, and the position of the rows, of those of them that differ from v.
    log_jacobian : TensorVariable
        The logarithm of the determinant of the value variables as a function of v. It depends on
        scales alone, which are the same in both.
    """

    def __init__(self, layout: PositionLayout, effects: Sequence[Effect], most_joint: int = 0):
        # What others are scaled by stays as it is.
        factors = set(ancestors([each.factor for each in effects]))
        effects = [each for each in effects if each.variable not in factors]
        is_short = layout.dimension <= DENSE_DIMENSION
        joint = _together(effects, most_joint) if is_short else []
        self.layout = layout
        self.effects = tuple(each for each in effects if each in joint or not each.is_whole)
        joint = [each for each in self.effects if each in joint]
        self.joint = JointBlock(joint, self._places(joint)) if joint else None
        count = self.joint.places.size if self.joint else 0
        self.beside = [
            Block(each, self._places_of_levels(each), layout.dtype, count)
            for each in _of_levels([each for each in self.effects if each not in joint])
        ]
        self.replacements: dict[Variable, TensorVariable] = {}
        self.of_rows: dict[Variable, TensorVariable] = {}
        z: dict[Variable, TensorVariable] = {}
        of_joint = None
        if self.joint:
            z |= self.joint.standardised(None)
            of_joint = self.joint.of_rows(z)
        for block in self.beside:
            z |= block.standardised(of_joint)
        of_effects: list[TensorVariable] = [pt.zeros((), dtype=layout.dtype)]
        of_effects += [each.log_jacobian for each in self.blocks]
        for each in self.effects:
            x = each.variable
            if each.is_centered:
                of_effects.append(pt.log(each.scale).sum())
            location = clone_replace(each.location, self.replacements, rebuild_strict=False)
            self.of_rows[x] = replace(each, location=location).of_rows(z[x]).astype(x.dtype)
            self.replacements[x] = self.of_rows[x] if each.is_centered else z[x].astype(x.dtype)
        self.log_jacobian = sum(each.astype(layout.dtype) for each in of_effects)

    @property
    def blocks(self) -> list[Block]:
        """The joint one first."""
        return [self.joint, *self.beside] if self.joint else [*self.beside]

    # --- Coordinates of effects ----------------------------------------------------------------

    def _numbers(self, effect: Effect) -> np.ndarray:
        """Coordinates of an effect, of its shape."""
        part = self.layout.slices[self.layout.variables.index(effect.variable)]
        return np.arange(self.layout.dimension)[part].reshape(effect.shape)

    def _places(self, effects: Sequence[Effect]) -> np.ndarray:
        return np.concatenate([self._numbers(each).ravel() for each in effects])

    def _places_of_levels(self, effects: Sequence[Effect]) -> np.ndarray:
        columns = [column for each in effects for column in each.columns(self._numbers(each))]
        return np.stack(columns, axis=1)

    @property
    def columns(self) -> list[np.ndarray]:
        """Coordinates of each effect, of its coefficients one after the other."""
        return [column for each in self.effects for column in each.columns(self._numbers(each))]

    @property
    def apart(self) -> np.ndarray:
        """Whether each coordinate is one of an effect beside the joint block, shape (d,)."""
        return self._have([each.places for each in self.beside])

    def _have(self, places: Sequence[np.ndarray]) -> np.ndarray:
        found = np.zeros(self.layout.dimension, dtype=bool)
        for each in places:
            found[each] = True
        return found

    @property
    def follow_scales(self) -> np.ndarray:
        """Whether each coordinate is one of an effect or of its scale, shape (d,)."""
        found = self._have([each.places for each in self.blocks])
        of_scales = set(ancestors([each.scale for each in self.effects]))
        for variable, part in zip(self.layout.variables, self.layout.slices, strict=True):
            found[part] |= variable in of_scales
        return found

    # --- What is known of effects ----------------------------------------------------------------

    def adapted(self, position: np.ndarray, precision: Matrix | sparse.csr_array) -> np.ndarray:
        """Take what is known of effects around a position, and give its values as a position.

        Effects are zero there in the new coordinates.

        Parameters
        ----------
        position : numpy.ndarray, shape (d,)
        precision : Matrix or sparse array, shape (d, d)
            Minus the Hessian of the log density there.
        """
        whole = sparse.csr_array(precision.dense() if isinstance(precision, Matrix) else precision)
        factors, _ = self._factors_and_standardised(self.to_values(position))
        information, common = [], []
        joint, regression = self._regression(whole)
        root_of_joint = np.zeros((0, 0))
        for block, factor in zip(self.blocks, factors, strict=True):
            places = block.places
            of_block = joint[None]
            if block is not self.joint:
                rows, columns = np.broadcast_arrays(places[:, :, None], places[:, None, :])
                of_block = whole[rows.ravel(), columns.ravel()].reshape(rows.shape)
            unit = np.eye(places.shape[1])
            root = np.linalg.cholesky(unit + factor.mT @ block.known @ factor)
            # The rows say nothing that is negative.
            sizes, vectors = np.linalg.eigh(root @ of_block @ root.mT - unit)
            given = (vectors * np.maximum(sizes, 0.0)[:, None, :]) @ vectors.mT
            inverse = np.linalg.inv(factor)
            information.append(inverse.mT @ given @ inverse)
            if block is self.joint:
                root_of_joint, scales = root[0], np.diagonal(factor[0])
                common.append(block.regression)
                continue
            of_level = block.regression
            if self.joint:
                # Minus the coefficients of z of the effects in a regression on z of the block.
                slopes = regression[places] @ root_of_joint.T
                slopes += np.linalg.solve(root, factor.mT @ of_level * scales)
                slopes = np.linalg.solve(root.mT, slopes)
                of_level = inverse.mT @ (unit + given) @ slopes / scales
            common.append(of_level)
        return self._informed(position, information, common)

    def _regression(self, precision: sparse.csr_array) -> tuple[np.ndarray, np.ndarray]:
        """The precision of the joint block where the effects beside it may be any.

        With it come minus the coefficients of a regression of these on the block, by coordinate.
        """
        places = self.joint.places[0] if self.joint else np.zeros(0, dtype=int)
        rows, apart = precision[places], np.flatnonzero(self.apart)
        of_block, regression = (
            rows[:, places].toarray(),
            np.zeros((precision.shape[0], len(places))),
        )
        if len(places) and len(apart):
            beside = rows[:, apart].toarray()
            regression[apart] = splu(precision[apart][:, apart].tocsc()).solve(beside.T)
            of_block = of_block - beside @ regression[apart]
        return of_block, regression

    def informed(self, position: np.ndarray, information: np.ndarray) -> np.ndarray:
        """Take what rows say of effects in their own terms, and give the values as `adapted`.

        Parameters
        ----------
        position : numpy.ndarray, shape (d,)
        information : numpy.ndarray, shape (d,)
            Minus the second derivatives of the log likelihood in the position of the rows, by each
            effect where the others are known.
        """
        units = (np.eye(each.places.shape[1]) for each in self.blocks)
        matrices = [
            information[each.places][:, :, None] * unit
            for each, unit in zip(self.blocks, units, strict=True)
        ]
        return self._informed(
            position, matrices, [np.zeros_like(each.regression) for each in self.blocks]
        )

    def _informed(
        self, position: np.ndarray, information: list[np.ndarray], common: list[np.ndarray]
    ) -> np.ndarray:
        """`informed` with W and C of the levels of each block."""
        values = self.to_values(position)
        effects = zip(*self._factors_and_standardised(values), strict=True)
        of_joint = np.zeros((0, 1))
        for block, (factor, z), of_level, of_common in zip(
            self.blocks, effects, information, common, strict=True
        ):
            of_rows = factor @ z
            if block is self.joint:
                of_joint = of_rows[0]
            score = np.linalg.solve(factor.mT, z) + of_level @ of_rows
            if of_common.shape[2]:
                score = score + of_common @ of_joint
            block.learn(of_level, score[:, :, 0], of_common)
        return self.to_coordinates(values)

    @property
    def known(self) -> np.ndarray:
        """W, c and C of all blocks, as `restore` takes them."""
        return np.concatenate([each.get_value().ravel() for each in self._shared])

    def restore(self, known: np.ndarray) -> None:
        """Take what was `known` of effects."""
        for each in self._shared:
            present = each.get_value(borrow=True)
            part, known = np.split(known, [present.size])
            each.set_value(part.reshape(present.shape).astype(present.dtype))

    @property
    def _shared(self) -> list[SharedVariable]:
        return [
            shared for each in self.blocks for shared in (each.information, each.score, each.common)
        ]

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
        d, numbers = self.layout.dimension, np.arange(self.layout.dimension)
        eps = np.finfo(self.layout.dtype).eps
        others = [numbers[part] for part in self.layout.slices if not self.apart[part].any()]
        parts, width = [], np.cbrt(eps)
        # It is mostly a function of one entry of a variable or column, and linear in effects beside
        # the joint block: numbers of their own show of which, and random ones whether that is so.
        beside = [column for column in self.columns if self.apart[column].all()]
        columns = [(each, 1.0) for each in beside] + [(each, width) for each in others]
        for column, size in columns:
            random = np.random.default_rng(1964).uniform(1, 2, size=len(column))
            shifts = np.zeros((3, d))
            shifts[:, column] = np.ones(len(column)), 1 + np.arange(len(column)), random
            with np.errstate(all="ignore"):  # Others may be no number so far away.
                ones, keys, of_random = self._derivatives(position, shifts, size)
                rows = np.flatnonzero(ones)
                entries = np.rint(keys[rows] / ones[rows] - 1).astype(int)
                entries = np.clip(entries, 0, len(column) - 1)
                expected = np.zeros(d)
                expected[rows] = ones[rows] * random[entries]
                bound = 1e-3 * np.abs(of_random) + np.sqrt(eps) * np.abs(of_random).max(initial=0)
                is_one = agree(expected, of_random, bound, 1.0, finite=True)
            if is_one:
                parts.append((rows, column[entries], ones[rows]))
            else:
                shifts = np.zeros((len(column), d))
                shifts[np.arange(len(column)), column] = 1.0
                each = sparse.coo_array(self._derivatives(position, shifts, width))
                parts.append((each.col, column[each.row], each.data))
        rows, places, values = (np.concatenate(each) for each in zip(*parts, strict=True))
        return sparse.coo_array((values, (rows, places)), shape=(d, d)).tocsr()

    def _derivatives(self, position: np.ndarray, shifts: np.ndarray, size: float) -> np.ndarray:
        """Those of the position of the rows along shifts, by differences over so many of them."""
        ends = self.to_rows(np.concatenate([position + size * shifts, position - size * shifts]))
        ahead, behind = np.split(ends.astype(float), 2)
        return (ahead - behind) / (2 * size)

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

    # --- Graphs and functions ------------------------------------------------------------------

    def _each(self, function: Any, *arrays: np.ndarray) -> np.ndarray:
        shape = arrays[0].shape
        flat = (np.asarray(each, self.layout.dtype).reshape(-1, shape[-1]) for each in arrays)
        if self.joint:
            found = np.array([function(*each)[0] for each in zip(*flat, strict=True)])
        else:
            (found,) = function(*flat)
        return np.asarray(found).reshape(shape)

    def _factors_and_standardised(
        self, values: np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """F of each level of each block, though no scale is quite zero, and its z.

        Their shapes are (n, k, k) and (n, k, 1).
        """
        z, *entries = self._effects_function(np.asarray(values, self.layout.dtype))
        pairs = list(zip(self.blocks, entries, strict=True))
        return [each.factors(part) for each, part in pairs], [
            z[each.places, None] for each, _ in pairs
        ]

    def _of_effects(
        self, of_effects: Mapping[Variable, TensorVariable], other: Callable[..., TensorVariable]
    ) -> TensorVariable:
        variables = self.layout.variables
        return self.layout.join(
            [of_effects[each] if each in of_effects else other(each) for each in variables]
        )

    @cached_property
    def _effects_function(self) -> SharedFunction:
        z = {each.variable: each.of_value for each in self.effects}
        of_blocks = [each.factor_entries for each in self.blocks]
        position = pt.vector("position", dtype=self.layout.dtype)
        graphs = [self._of_effects(z, pt.zeros_like), *of_blocks]
        graphs = clone_replace(graphs, self.layout.split(position), rebuild_strict=False)
        return SharedFunction(compile_on_arrays([position], graphs, NUMPY_MODE))

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
        of_joint, v = None, dict[Variable, TensorVariable]()
        if self.joint:
            v |= self.joint.coordinates(None)
            z = {each.variable: each.of_value for each in self.joint.effects}
            of_joint = self.joint.of_rows(z)
        for block in self.beside:
            v |= block.coordinates(of_joint)
        return self._of_effects(v, lambda variable: variable)

    @cached_property
    def _to_coordinates_function(self) -> Any:
        return self._function(self._coordinates)

    @cached_property
    def _gradients_function(self) -> Any:
        """Gradient of the density of values: that of v pulled back, less the Jacobian's."""
        given = pt.vector("gradient", dtype=self.layout.dtype)
        value = pt.dot(self._coordinates, given) - self.log_jacobian
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


def _together(effects: Sequence[Effect], most: int) -> list[Effect]:
    """The effects of fewest levels, and coefficients, of which there are so many together."""
    joint: list[Effect] = []
    for each in sorted(effects, key=lambda each: each.size):
        # Rows join the coefficients of a scale that is not known, which have no other form.
        is_few = each.size <= FEW_LEVELS or (each.is_whole and not each.is_known)
        if is_few and not each.is_matrix and each.size <= most:
            joint.append(each)
            most -= each.size
    return [] if all(each.is_known for each in joint) else joint


def _of_levels(effects: Sequence[Effect]) -> list[list[Effect]]:
    """Effects by level: those that rows select by the same index are of the same levels."""
    blocks: list[list[Effect]] = []
    for each in effects:
        fitting = [
            block
            for block in blocks
            if len(each.index) == 1
            and block[0].index == each.index
            and block[0].levels == each.levels
            and sum(one.coefficients for one in block) + each.coefficients <= MOST_TOGETHER
        ]
        if fitting:
            fitting[0].append(each)
        else:
            blocks.append([each])
    return blocks
