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
well, and the levels of one factor are sums of those of another. Effects of many levels that rows
select by the same index, such as an intercept and a slope of each group, are a block for each
level: its records say much of a sum of both, and far less of each where the other one is not known.
What the rows say of an effect beside the joint block depends on the block: its c has
:math:`- C_g S z` of the block added. Else a small change of a scale in the block, which turns L,
would change what rows with this level see by many standard deviations.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.distributions.multivariate import ZeroSumNormalRV
from pymc.distributions.transforms import ZeroSumTransform
from pymc.logprob.transforms import LogTransform
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Variable, equal_computations
from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.graph.traversal import ancestors
from pytensor.scalar.basic import Mul, TrueDiv
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.random.basic import LogNormalRV, MvNormalRV, NormalRV, StudentTRV
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.variable import TensorVariable
from scipy import linalg, sparse
from scipy.sparse.linalg import splu

from pymc_sgmcmc.compiling.compiled import (
    NUMPY_MODE,
    PYTHON_MODE,
    compile_on_arrays,
    compile_quietly,
)
from pymc_sgmcmc.matrices import Dense, Diagonal, Matrix
from pymc_sgmcmc.posterior.agreement import agree
from pymc_sgmcmc.posterior.check import DISTANCES, SEED
from pymc_sgmcmc.posterior.graphs import is_product, linear_inputs
from pymc_sgmcmc.posterior.position import DENSE_DIMENSION, PositionLayout
from pymc_sgmcmc.posterior.reading import Reading
from pymc_sgmcmc.posterior.threads import SharedFunction

SMALLEST_SCALE = 1e-100
"""Scales are no smaller where one is divided by their square, which is a number then."""

FEW_LEVELS = 30
"""Effects of so many levels are in the joint block. The log of the scale of k levels has a standard
deviation of about 1 / sqrt(2 k), so that with more the scale changes by less than a factor of 1.7
within four of them."""


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
    index : frozenset of Variable
        What rows select its levels by.
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
    index: frozenset[Variable] = frozenset()
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

    def standardised(self, v: TensorVariable, of_block: TensorVariable | float) -> TensorVariable:
        """z of v, where the joint block has a part of the score."""
        precision = self.precision
        return self.scale * (self.score - of_block) / precision + v / pt.sqrt(precision)

    def coordinates_of(self, z: TensorVariable, of_block: TensorVariable | float) -> TensorVariable:
        """v of z, where the joint block has a part of the score."""
        precision = self.precision
        return (z - self.scale * (self.score - of_block) / precision) * pt.sqrt(precision)

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


class LevelBlocks:
    """Effects of the same levels, which are standardised together for each level.

    The Cholesky factors of k effects are written out as functions of vectors over the levels.

    Parameters
    ----------
    effects : sequence of Effect
        k effects of vectors of the same length.

    Attributes
    ----------
    information, score : SharedVariable
        W and c of each level, of shape (levels, k, k) and (levels, k).
    """

    def __init__(self, effects: Sequence[Effect]):
        self.effects, (levels,) = tuple(effects), _shape(effects[0])
        count, dtype = len(self.effects), self.effects[0].variable.dtype
        self.information = pytensor.shared(np.zeros((levels, count, count), dtype), "information")
        self.score = pytensor.shared(np.zeros((levels, count), dtype), "score")

    @cached_property
    def _root(self) -> list[list[TensorVariable]]:
        """The elements of L of I + S W S = L Lᵀ."""
        scales = [each.scale for each in self.effects]
        rows: list[list[TensorVariable]] = []
        for i, scale in enumerate(scales):
            row: list[TensorVariable] = []
            for j in range(i + 1):
                known = float(i == j) + scale * self.information[:, i, j] * scales[j]
                other = row if i == j else rows[j]
                rest = known - sum(a * b for a, b in zip(row[:j], other[:j], strict=True))
                row.append(pt.sqrt(rest) if i == j else rest / other[j])
            rows.append(row)
        return rows

    def _shift(self, of_block: Mapping[Variable, TensorVariable]) -> list[TensorVariable]:
        """L⁻¹ S c, where the joint block has a part of c."""
        shift: list[TensorVariable] = []
        for i, (each, row) in enumerate(zip(self.effects, self._root, strict=True)):
            rest = each.scale * (self.score[:, i] - of_block.get(each.variable, 0.0))
            rest -= sum(a * b for a, b in zip(row[:i], shift, strict=True))
            shift.append(rest / row[i])
        return shift

    def standardised(
        self, of_block: Mapping[Variable, TensorVariable]
    ) -> dict[Variable, TensorVariable]:
        """z of v, where the joint block has a part of the score."""
        root, size = self._root, len(self.effects)
        shift = self._shift(of_block)
        moved = [s + each.variable for s, each in zip(shift, self.effects, strict=True)]
        z: dict[int, TensorVariable] = {}
        for i in reversed(range(size)):
            z[i] = (moved[i] - sum(root[j][i] * z[j] for j in range(i + 1, size))) / root[i][i]
        return {each.variable: z[i] for i, each in enumerate(self.effects)}

    def coordinates(
        self, of_block: Mapping[Variable, TensorVariable]
    ) -> dict[Variable, TensorVariable]:
        """v of the value variables, where the joint block has a part of the score."""
        root, z = self._root, [each.of_value for each in self.effects]
        shift = self._shift(of_block)
        return {
            each.variable: sum(root[j][i] * z[j] for j in range(i, len(z))) - shift[i]
            for i, each in enumerate(self.effects)
        }

    @property
    def log_jacobian(self) -> TensorVariable:
        """The logarithm of the determinant of z as a function of v."""
        return -sum(pt.log(row[-1]).sum() for row in self._root)


class EffectCoordinates:
    """The map from the coordinates of a chain to the position of the rows and to value variables.

    Parameters
    ----------
    layout : PositionLayout
    effects : sequence of Effect
        In the order of the model, so that each depends on earlier ones only.
    most_joint : int
        The joint block has at most this many coordinates. Long positions have none, since what the
        rows say of it depends on the effects beside it, and no blocks of levels.

    Attributes
    ----------
    blocks : list of LevelBlocks
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
        joint = _joint_block(effects, most_joint) if is_short else []
        self.layout = layout
        self.effects = tuple(each for each in effects if each in joint or not each.is_whole)
        self.joint = tuple(each for each in self.effects if each in joint)
        self.beside = tuple(each for each in self.effects if each not in joint)
        self.blocks = _level_blocks(self.effects, joint) if is_short else []
        count, others = (sum(map(_size, part)) for part in (self.joint, self.beside))
        # Single precision would lose the root where rows say a million times what the prior says.
        self._information = pytensor.shared(np.zeros((count, count)), "information")
        self._score = pytensor.shared(np.zeros(count), "score")
        self._common = pytensor.shared(np.zeros((others, count)), "common")
        self.replacements: dict[Variable, TensorVariable] = {}
        self.of_rows: dict[Variable, TensorVariable] = {}
        together, of_block = {}, {}
        if joint:
            z_of_block = self._standardised
            together, of_block = _parts(self.joint, z_of_block), self._of_block(z_of_block)
        of_effects: list[TensorVariable] = [pt.zeros((), dtype=layout.dtype)]
        for block in self.blocks:
            together |= block.standardised(of_block)
            of_effects.append(block.log_jacobian)
        if joint:
            of_effects.append(-pt.log(pt.diagonal(self._root)).sum())
        for each in self.effects:
            x = each.variable
            z = together[x] if x in together else each.standardised(x, of_block.get(x, 0.0))
            if x not in together:
                of_effects.append(-0.5 * pt.log(each.precision).sum())
            if each.is_centered:
                of_effects.append(pt.log(each.scale).sum())
            location = clone_replace(each.location, self.replacements, rebuild_strict=False)
            self.of_rows[x] = replace(each, location=location).of_rows(z).astype(x.dtype)
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

    def _of_block(self, z: TensorVariable) -> dict[Variable, TensorVariable]:
        """C S z for each effect beside the joint block."""
        return _parts(self.beside, pt.dot(self._common, self._scales * z)) if self.beside else {}

    @cached_property
    def _numbers(self) -> dict[Effect, np.ndarray]:
        """Coordinates of each effect, of its shape."""
        numbers = np.arange(self.layout.dimension)
        parts = zip(self.layout.variables, self.layout.slices, strict=True)
        of_variables = {variable: numbers[part] for variable, part in parts}
        return {each: of_variables[each.variable].reshape(_shape(each)) for each in self.effects}

    @property
    def _places(self) -> np.ndarray:
        """Coordinates of the joint block."""
        return self._numbers_of(self.joint)

    @property
    def _places_beside(self) -> np.ndarray:
        """Coordinates of the effects beside it."""
        return self._numbers_of(self.beside)

    def _numbers_of(self, effects: Sequence[Effect]) -> np.ndarray:
        parts = [self._numbers[each].ravel() for each in effects]
        return np.concatenate([np.zeros(0, dtype=int), *parts])

    @property
    def apart(self) -> np.ndarray:
        """Whether each coordinate is one of an effect beside the joint block, shape (d,)."""
        found = np.zeros(self.layout.dimension, dtype=bool)
        found[self._places_beside] = True
        return found

    @property
    def follow_scales(self) -> np.ndarray:
        """Whether each coordinate is one of an effect or of its scale, shape (d,)."""
        found = np.zeros(self.layout.dimension, dtype=bool)
        found[np.concatenate(self.columns)] = True
        of_scales = set(ancestors([each.scale for each in self.effects]))
        for variable, part in zip(self.layout.variables, self.layout.slices, strict=True):
            found[part] |= variable in of_scales
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
        scales, _ = self._scales_and_standardised(position)
        given = (1 + scales**2 * self._joined("information")) * precision.diagonal() - 1
        information = np.maximum(given, 0.0) / scales**2
        if not (self.joint or self.blocks):
            return self.informed(position, Diagonal(information))
        dense, known = np.diag(information), self.known[0].dense()
        of_joint, regression = self._of_joint(precision) if self.joint else (None, None)
        for places, of_block in self._together(precision, of_joint):
            elements = places[:, :, None], places[:, None, :]
            products = scales[elements[0]] * scales[elements[1]]
            unit = np.eye(places.shape[1])
            root = np.linalg.cholesky(unit + products * known[elements])
            given = root @ of_block @ root.mT - unit
            # The rows say nothing that is negative.
            sizes, vectors = np.linalg.eigh(given)
            sizes = np.maximum(sizes, 0.0)[:, None, :]
            dense[elements] = (vectors * sizes) @ vectors.mT / products
        if regression is not None and self.beside:
            common = self._common_of(scales, known, dense, regression)
            places, beside = self._places, self._places_beside
            dense[np.ix_(beside, places)], dense[np.ix_(places, beside)] = common, common.T
        return self.informed(position, Dense(dense))

    def _common_of(
        self,
        scales: np.ndarray,
        before: np.ndarray,
        after: np.ndarray,
        regression: np.ndarray,
    ) -> np.ndarray:
        """C with which the effects beside the joint block do not depend on it.

        Parameters
        ----------
        scales : numpy.ndarray, shape (d,)
        before, after : numpy.ndarray, shape (d, d)
            W in the present coordinates, and in those that follow.
        regression : numpy.ndarray, shape (effects, block)
            Minus the coefficients of the effects in a regression on the block, in the present ones.
        """
        places, beside = self._places, self._places_beside
        of_block, s = scales[places], scales[beside]

        def of_z(known: np.ndarray, index: np.ndarray) -> np.ndarray:
            """I + S W S."""
            products = np.outer(scales[index], scales[index])
            return np.eye(len(index)) + products * known[np.ix_(index, index)]

        # Minus the coefficients of z of the effects in a regression on z of the block.
        root = np.linalg.cholesky(of_z(before, beside))
        slopes = regression @ np.linalg.cholesky(of_z(before, places)).T
        slopes += linalg.solve_triangular(
            root, s[:, None] * self._common.get_value() * of_block, lower=True
        )
        slopes = linalg.solve_triangular(root.T, slopes, lower=False)
        return of_z(after, beside) @ slopes / np.outer(s, of_block)

    def informed(self, position: np.ndarray, information: Matrix) -> np.ndarray:
        """Take what rows say of effects in their own terms, and give the values as `adapted`.

        Parameters
        ----------
        position : numpy.ndarray, shape (d,)
        information : Matrix, shape (d, d)
            Minus the second derivatives of the log likelihood in the position of the rows.
        """
        values = self.to_values(position)
        scales, z = self._scales_and_standardised(position)
        score = z * (1 + scales**2 * information.diagonal()) / scales
        for places in self._places_together:
            block = information.dense()[places[:, :, None], places[:, None, :]]
            of_block = np.einsum("nij,nj->ni", block, (scales * z)[places])
            score[places] = z[places] / scales[places] + of_block
        if self.joint and self.beside:
            places, beside = self._places, self._places_beside
            score[beside] += information.dense()[np.ix_(beside, places)] @ (scales * z)[places]
        self.restore(information, score)
        return self.to_coordinates(values)

    @property
    def known(self) -> tuple[Matrix, np.ndarray]:
        """W with C, or w where no effects are together, and c, as `restore` takes them."""
        information, score = self._joined("information"), self._joined("score")
        if not (self.joint or self.blocks):
            return Diagonal(information), score
        dense = np.diag(information)
        for places, (of_block, of_score) in zip(
            self._places_together, self._known_together, strict=True
        ):
            dense[places[:, :, None], places[:, None, :]] = of_block.get_value()
            score[places] = of_score.get_value()
        if self.joint:
            places, beside, common = self._places, self._places_beside, self._common.get_value()
            dense[np.ix_(beside, places)], dense[np.ix_(places, beside)] = common, common.T
        return Dense(dense), score

    def restore(self, information: Matrix, score: np.ndarray) -> None:
        """Take what was `known` of effects."""
        self._set("information", information.diagonal())
        self._set("score", score)
        for places, (of_block, of_score) in zip(
            self._places_together, self._known_together, strict=True
        ):
            dense = information.dense()[places[:, :, None], places[:, None, :]]
            of_block.set_value(dense.reshape(of_block.get_value(borrow=True).shape))
            of_score.set_value(score[places].reshape(of_score.get_value(borrow=True).shape))
        if self.joint:
            index = np.ix_(self._places_beside, self._places)
            self._common.set_value(information.dense()[index])

    @property
    def _places_together(self) -> list[np.ndarray]:
        """Coordinates that are standardised together, (blocks, size), the joint ones first."""
        found = [self._places[None]] if self.joint else []
        for block in self.blocks:
            found.append(np.stack([self._numbers[each].ravel() for each in block.effects], axis=1))
        return found

    @property
    def _known_together(self) -> list[tuple[SharedVariable, SharedVariable]]:
        """W and c of these."""
        found = [(self._information, self._score)] if self.joint else []
        return found + [(each.information, each.score) for each in self.blocks]

    def _together(
        self, precision: Matrix | sparse.csr_array, of_joint: np.ndarray | None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Coordinates that are standardised together, and their precision."""
        dense = precision.dense() if isinstance(precision, Matrix) else precision.toarray()
        for number, places in enumerate(self._places_together):
            if of_joint is not None and not number:
                yield places, of_joint[None]
            else:
                yield places, dense[places[:, :, None], places[:, None, :]]

    def _of_joint(self, precision: Matrix | sparse.csr_array) -> tuple[np.ndarray, np.ndarray]:
        """The precision of the joint block where the effects beside it may be any.

        With it come minus the coefficients of a regression of these on the block.
        """
        whole = sparse.csc_array(precision.dense() if isinstance(precision, Matrix) else precision)
        rows, apart = whole[self._places], self._places_beside
        of_block, beside = rows[:, self._places].toarray(), rows[:, apart].toarray()
        if not len(apart):
            return of_block, beside.T
        regression = splu(whole[apart][:, apart].tocsc()).solve(beside.T)
        return of_block - beside @ regression, regression

    def _joined(self, name: str) -> np.ndarray:
        joined = np.zeros(self.layout.dimension)
        for each, numbers in self._numbers.items():
            joined[numbers] = getattr(each, name).get_value()
        return joined

    def _set(self, name: str, joined: np.ndarray) -> None:
        for each, numbers in self._numbers.items():
            getattr(each, name).set_value(joined[numbers].astype(self.layout.dtype))

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

    @property
    def columns(self) -> list[np.ndarray]:
        """Coordinates of each effect, of its coefficients one after the other."""
        columns: list[np.ndarray] = []
        for each, numbers in self._numbers.items():
            axis = each.axis
            columns += [numbers.ravel()] if axis is None else list(np.moveaxis(numbers, axis, 0))
        return columns

    def _each(self, function: Any, *arrays: np.ndarray) -> np.ndarray:
        shape = arrays[0].shape
        flat = (np.asarray(each, self.layout.dtype).reshape(-1, shape[-1]) for each in arrays)
        if self.joint:
            found = np.array([function(*each)[0] for each in zip(*flat, strict=True)])
        else:
            (found,) = function(*flat)
        return np.asarray(found).reshape(shape)

    def _scales_and_standardised(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """s, though never quite zero, and z at a position; one and zero of other variables."""
        values = self.to_values(position)
        scales = self._each(self._scales_function, values).astype(float)
        scales = np.where(np.abs(scales) < SMALLEST_SCALE, SMALLEST_SCALE, scales)
        return scales, self._each(self._standardised_function, values)

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
        moved, of_block = {}, {}
        if self.joint:
            z = pt.concatenate([each.of_value.ravel() for each in self.joint])
            moved = _parts(self.joint, pt.dot(self._root.T, z) - self._shift)
            of_block = self._of_block(z)
        for block in self.blocks:
            moved |= block.coordinates(of_block)
        for each in self.beside:
            x = each.variable
            if x not in moved:
                moved[x] = each.coordinates_of(each.of_value, of_block.get(x, 0.0))
        return self._of_effects(moved, lambda variable: variable)

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


def find_effects(
    model: Model,
    layout: PositionLayout,
    terms_of_rows: tuple[Sequence[TensorVariable], Sequence[TensorVariable], TensorVariable],
    start: np.ndarray,
    data: Sequence[np.ndarray],
) -> list[Effect]:
    """Effects with an unknown scale, in the order of the model.

    Parameters
    ----------
    model : pymc.Model
    layout : PositionLayout
    terms_of_rows : tuple
        Terms of the log likelihood of symbolic rows, in value variables, the symbolic rows, and
        their number.
    start : numpy.ndarray, shape (d,)
        Values of the value variables at which the terms are finite.
    data : sequence of numpy.ndarray
        Some rows.
    """
    of_value = {value: variable for variable, value in model.rvs_to_values.items()}
    uses, found = _Uses(layout, *terms_of_rows, start, data), []
    for value, shape in zip(layout.variables, layout.shapes, strict=True):
        variable = of_value[value]
        # The logarithm of a log-normal variable is normal.
        is_logarithm = isinstance(variable.owner.op, LogNormalRV)
        usual = LogTransform if is_logarithm else (ZeroSumTransform, type(None))
        if not isinstance(model.rvs_to_transforms[variable], usual):
            continue
        information, score = (
            pytensor.shared(np.zeros(shape, dtype=layout.dtype), f"{value.name}_{name}")
            for name in ("information", "score")
        )
        effect = partial(
            Effect, value, information=information, score=score, index=uses.index_of(value)
        )
        zero = pt.zeros((), dtype=layout.dtype)
        location, factor, axis = normal_prior(variable, value, model)
        is_known = factor is not None and not uses.depends(factor)
        is_whole, forms = value in uses.whole or np.prod(shape) == 1, []
        if factor is None or is_known:
            forms = [
                effect(zero, of_rows, of_axis, False, False, is_whole, products=products)
                for of_rows, of_axis, products in uses.factors(value)
            ]
        if factor is not None:
            whole = is_whole or is_known
            forms.append(effect(location, factor, axis, True, is_known, whole))
        found += list(islice(filter(uses.hold, forms), 1))
    return found


def _parts(effects: Sequence[Effect], joined: TensorVariable) -> dict[Variable, TensorVariable]:
    """Parts of a vector by effect."""
    stops = np.cumsum([0, *map(_size, effects)]).tolist()
    return {
        each.variable: joined[start:stop].reshape(_shape(each))
        for each, (start, stop) in zip(effects, pairwise(stops), strict=True)
    }


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


def _level_blocks(effects: Sequence[Effect], joint: Sequence[Effect]) -> list[LevelBlocks]:
    """Vectors of effects beside the joint block that rows select by the same index."""
    by_index: dict[tuple[frozenset[Variable], tuple[int, ...]], list[Effect]] = {}
    for each in effects:
        if each not in joint and len(each.index) == 1 and len(_shape(each)) == 1:
            by_index.setdefault((each.index, _shape(each)), []).append(each)
    return [LevelBlocks(each) for each in by_index.values() if len(each) > 1]


def normal_prior(
    variable: TensorVariable, value: TensorVariable, model: Model
) -> tuple[TensorVariable, TensorVariable | None, int | None]:
    """Location, factor and axis of an effect in its prior, the last two None for other priors."""
    node, zero = variable.owner, pt.zeros((), dtype=value.dtype)
    parameters = list(node.op.dist_params(node)) if isinstance(node.op, RandomVariable) else []
    match node.op:
        case ZeroSumNormalRV():
            (factor,) = model.replace_rvs_by_values([node.op.dist_params(node)[0]])
            return zero, factor, None
        case NormalRV() | StudentTRV() | LogNormalRV():
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


@dataclass(frozen=True)
class _Product:
    """A product of a linear function of a variable with a factor that is not known.

    Attributes
    ----------
    whole, rest : Variable
        The product, and what is left of it without the factor.
    factor : TensorVariable
    side : int, optional
        The place of the variable in a product of matrices.
    """

    whole: Variable
    rest: Variable
    factor: TensorVariable
    side: int | None = None


class _Uses:
    """How the log likelihood of rows uses value variables.

    Parameters
    ----------
    layout, terms, rows, length, start, data
        As of `find_effects`.

    Attributes
    ----------
    whole : set of Variable
        Those of which rows take more than the entries that they select.
    """

    def __init__(
        self,
        layout: PositionLayout,
        terms: Sequence[TensorVariable],
        rows: Sequence[TensorVariable],
        length: TensorVariable,
        start: np.ndarray,
        data: Sequence[np.ndarray],
    ):
        self._layout, self._terms, self._start = layout, list(terms), start
        self._inputs, self._data = [length, *rows], [np.array(len(data[0])), *data]
        self._reading = reading = Reading(terms, layout.variables, rows)
        of_entries = (
            each.of
            for each in reading.indexings
            if each.of.isdisjoint(rows) and reading.of(each.node.inputs[1:]) & reading.rows
        )
        self.whole = reading.of(terms).difference(*of_entries)

    def index_of(self, value: TensorVariable) -> frozenset[Variable]:
        """What rows select entries of a variable by."""
        reading = self._reading
        return frozenset().union(
            *(
                reading.of(each.node.inputs[1:]) & reading.rows
                for each in reading.indexings
                if value in each.of
            )
        )

    def depends(self, graph: Variable) -> bool:
        """Whether a graph depends on value variables."""
        return not self._reading.values.isdisjoint(ancestors([graph]))

    def hold(self, effect: Effect) -> bool:
        """Whether an effect has the shape of its variable, and rows use it as its products say.

        Products are found by what operations are called. Some rows are therefore evaluated with
        and without them, at random values, and compared with what other effects would change.
        """
        x, layout = effect.variable, self._layout
        place = layout.variables.index(x)
        position = pt.vector("position", dtype=layout.dtype)
        noise = np.tile(np.random.default_rng(SEED).standard_normal(layout.dimension), (2, 1))
        noise[1, layout.slices[place]] *= -1
        try:
            graphs = [effect.scale, effect.factor]
            if effect.products:
                seen = clone_replace(self._terms, dict(effect.products), rebuild_strict=False)
                seen = clone_replace(seen, {x: effect.of_rows(x)}, rebuild_strict=False)
                graphs += [*self._terms, *seen]
            graphs = clone_replace(graphs, layout.split(position), rebuild_strict=False)
            function = compile_quietly([position, *self._inputs], graphs, PYTHON_MODE)
            for distance in DISTANCES:
                values = (self._start + distance * noise).astype(layout.dtype)
                with np.errstate(all="ignore"):
                    (scale, factor, *here), (_, _, *there) = (
                        function(each, *self._data) for each in values
                    )
                if scale.shape != layout.shapes[place]:
                    return False
                if effect.axis is not None and not _is_root(factor):
                    return False
                if not here:
                    return True
                (plain, seen), (other, _) = (
                    np.split(np.concatenate([term.ravel() for term in each]), 2)
                    for each in (here, there)
                )
                if (finite := np.isfinite(plain) & np.isfinite(other)).any():
                    change = np.abs(other - plain)[finite].max()
                    precision = float(np.sqrt(np.finfo(layout.dtype).eps))
                    return change > 0 and agree(seen[finite], plain[finite], change, precision)
        except Exception:  # Shapes need not fit.
            return False
        return False

    def factors(
        self, value: TensorVariable
    ) -> Iterator[tuple[TensorVariable, int | None, tuple[tuple[Variable, Variable], ...]]]:
        """What may multiply a variable wherever rows use it, along which axis, and the products."""
        found = self._products(value)
        longer = [self._extended(each, value) for each in found]
        of_matrices = [each for each in found if each.side is not None]
        for products in (longer, found) if of_matrices else (found, longer):
            pairs = tuple((each.whole, each.rest) for each in products)
            for each in products[:1]:
                if each.side is None:
                    is_number = all(each.factor.type.broadcastable)
                    yield each.factor.dimshuffle() if is_number else each.factor, None, pairs
                else:
                    matrix = each.factor if each.side else each.factor.T
                    yield from ((matrix, axis, pairs) for axis in (1, 0))

    def _products(self, value: TensorVariable) -> list[_Product]:
        """Products with what is not known, none where rows use the variable otherwise."""
        own, found, reading = frozenset([value]), [], self._reading
        for node in reading.nodes:
            of_inputs = [reading.values & reading.of([each]) for each in node.inputs]
            if own not in of_inputs:
                continue
            if reading.values & reading.of(node.inputs) == own:
                if linear_inputs(node, [each != own for each in of_inputs]) is None:
                    return []
                continue
            variable = node.inputs[of_inputs.index(own)]
            product = self._product(node, variable, variable, value)
            if product is None:
                return []
            found.append(product)
        return found

    def _product(
        self, node: Apply, variable: Variable, rest: Variable, value: TensorVariable
    ) -> _Product | None:
        """A product of one variable with what is not known, which depends on no rows."""
        others, reading = [each for each in node.inputs if each is not variable], self._reading
        unknown = [each for each in others if reading.values & reading.of([each])]
        is_once = len(others) == len(node.inputs) - 1
        if not (unknown and is_once) or reading.of(unknown) & (reading.rows | {value}):
            return None
        match getattr(node.op, "scalar_op", None):
            case Mul():
                known = [each for each in others if each not in unknown]
                rest = pt.mul(rest, *known) if known else rest
                factor = pt.mul(*unknown) if unknown[1:] else unknown[0]
                return _Product(node.outputs[0], rest, factor)
            case TrueDiv() if variable is node.inputs[0]:
                return _Product(node.outputs[0], rest, pt.reciprocal(unknown[0]))
            case None if is_product(node):
                return _Product(node.outputs[0], rest, unknown[0], node.inputs.index(variable))
        return None

    def _extended(self, product: _Product, value: TensorVariable) -> _Product:
        """With other factors after it, such as standard deviations of correlated coefficients."""
        clients = [each for each in self._reading.nodes if product.whole in each.inputs]
        if len(clients) != 1:
            return product
        outer = self._product(clients[0], product.whole, product.rest, value)
        if outer is None or outer.side is not None:
            return product
        with suppress(ValueError):  # Shapes need not fit.
            factor = product.factor * outer.factor
            return self._extended(replace(outer, factor=factor, side=product.side), value)
        return product


def _is_root(matrix: np.ndarray) -> bool:
    """Whether a matrix is lower triangular with a positive diagonal."""
    is_square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]
    return bool(is_square and np.all(np.triu(matrix, 1) == 0) and np.all(np.diagonal(matrix) > 0))
