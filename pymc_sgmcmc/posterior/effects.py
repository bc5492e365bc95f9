"""Effects of the levels of factors as a model writes them, found by one reading of its graph.

An effect is a normal variable whose scale is not known, or a standardised one that such a scale
multiplies wherever rows use it. `pymc_sgmcmc.posterior.effect_coordinates` moves them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pymc.distributions.multivariate import ZeroSumNormalRV
from pymc.distributions.transforms import ZeroSumTransform
from pymc.logprob.transforms import LogTransform
from pymc.model import Model
from pytensor.graph.basic import Apply, Variable, equal_computations
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.scalar.basic import Mul, TrueDiv
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.random.basic import LogNormalRV, MvNormalRV, NormalRV, StudentTRV
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.compiling.compiled import (
    PYTHON_MODE,
    compile_quietly,
)
from pymc_sgmcmc.posterior.agreement import agree
from pymc_sgmcmc.posterior.check import DISTANCES, SEED
from pymc_sgmcmc.posterior.graphs import is_product, linear_inputs
from pymc_sgmcmc.posterior.position import PositionLayout
from pymc_sgmcmc.posterior.reading import Reading

MOST_TOGETHER = 8
"""So many effects of a level are standardised together. The elements of the Cholesky factors of k
effects are written out, about k³ / 3 products."""


@dataclass(frozen=True, eq=False)
class Effect:
    r"""A value variable x that is an effect :math:`u = m + s z`, or a standardised one z.

    Attributes
    ----------
    variable : TensorVariable
        x.
    shape : tuple of int
    location : TensorVariable
        m as a function of value variables.
    factor : TensorVariable
        s as a function of value variables or, for k coefficients a level, it may be L of shape
        (k, k).
    axis : int, optional
        The axis of x with the k coefficients of a level, 0 or 1 of two.
    is_matrix : bool
        Whether the factor is L.
    is_centered : bool
        Whether x is u.
    is_known : bool
        Whether s is a number, as of a coefficient.
    is_whole : bool
        Whether rows depend on more than the entries that they select, as on coefficients.
    index : frozenset of Variable
        What rows select its levels by.
    products : tuple of pairs of TensorVariable
        Products of x with its factor in the log likelihood of rows, and what stands there for them
        where x is seen as a product already.
    """

    variable: TensorVariable
    shape: tuple[int, ...]
    location: TensorVariable
    factor: TensorVariable
    axis: int | None
    is_matrix: bool
    is_centered: bool
    is_known: bool
    is_whole: bool
    index: frozenset[Variable] = frozenset()
    products: tuple[tuple[Variable, Variable], ...] = ()

    @property
    def size(self) -> int:
        """Number of entries."""
        return int(np.prod(self.shape))

    @property
    def coefficients(self) -> int:
        """k."""
        return 1 if self.axis is None else self.shape[self.axis]

    @property
    def levels(self) -> int:
        """Number of levels."""
        return self.size // self.coefficients

    @property
    def scale(self) -> TensorVariable:
        """s, or the diagonal of L along the axis of the coefficients, of the shape of x."""
        scale = self.factor
        if self.is_matrix:
            scale = pt.expand_dims(pt.diagonal(self.factor), 0 if self.axis else 1)
        return scale + pt.zeros_like(self.variable)

    def columns(self, entries: Any) -> list[Any]:
        """Entries of each coefficient in all levels, as k vectors of an array of the shape of x."""
        if self.axis is None:
            return [entries if entries.ndim == 1 else entries.ravel()]
        return [entries[:, i] if self.axis else entries[i] for i in range(self.coefficients)]

    def of_columns(self, columns: Sequence[TensorVariable]) -> TensorVariable:
        """Array of the shape of x with these columns."""
        if self.axis is None:
            (column,) = columns
            return column if len(self.shape) == 1 else column.reshape(self.shape)
        return pt.stack(columns, axis=self.axis)

    def factor_of(self, row: int, column: int) -> TensorVariable | None:
        """What a coefficient of z adds to one of u: an element of L, or s in all levels."""
        if self.is_matrix:
            return self.factor[row, column] if row >= column else None
        return self.columns(self.scale)[row] if row == column else None

    def of_rows(self, z: TensorVariable) -> TensorVariable:
        """What the rows see of z: u, or s z where the model adds m."""
        if self.is_matrix:
            product = pt.dot(z, self.factor.T) if self.axis else pt.dot(self.factor, z)
        else:
            product = self.factor * z
        return self.location + product if self.is_centered else product

    @property
    def of_value(self) -> TensorVariable:
        """z of x."""
        x = self.variable
        if not self.is_centered:
            return x
        x = x - self.location
        if not self.is_matrix:
            return x / self.factor
        z = pt.linalg.solve_triangular(self.factor, x.T if self.axis else x, lower=True)
        return z.T if self.axis else z


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
        index, along = uses.selection_of(value, shape)
        effect = partial(_effect, value, shape, index=index, along=along)
        zero = pt.zeros((), dtype=layout.dtype)
        location, factor, axis = normal_prior(variable, value, model)
        is_known = factor is not None and not uses.depends(factor)
        is_whole, forms = value in uses.whole or np.prod(shape) == 1, []
        if factor is None or is_known:
            form = partial(effect, is_centered=False, is_known=False, is_whole=is_whole)
            forms = [
                form(zero, of_rows, of_matrix, products=products)
                for of_rows, of_matrix, products in uses.factors(value)
            ]
        if factor is not None:
            form = partial(effect, is_centered=True, is_known=is_known)
            forms.append(form(location, factor, axis, is_whole=is_whole or is_known))
        found += list(islice(filter(uses.hold, forms), 1))
    return found


def _effect(
    value: TensorVariable,
    shape: tuple[int, ...],
    location: TensorVariable,
    factor: TensorVariable,
    of_matrix: int | None,
    *,
    along: int | None,
    **others: Any,
) -> Effect:
    """An effect with coefficients along the axis of its matrix, or of a factor of each entry."""
    is_matrix = of_matrix is not None
    axis = of_matrix if is_matrix else along
    return Effect(value, shape, location, factor, axis, is_matrix, **others)


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

    def selection_of(
        self, value: TensorVariable, shape: tuple[int, ...]
    ) -> tuple[frozenset[Variable], int | None]:
        """What rows select entries of a variable by, and the axis that they take whole.

        The second is None where they select along both of two axes, or take too many together.
        """
        reading = self._reading
        selecting = [each for each in reading.indexings if value in each.of]
        index = [reading.of(each.node.inputs[1:]) & reading.rows for each in selecting]
        levels = {
            self._axis_in(value, each.array, axis) for each in selecting for axis in each.indices
        }
        axis = None
        if len(shape) == 2 and levels in ({0}, {1}):
            (axis,) = {0, 1} - levels
            axis = axis if shape[axis] <= MOST_TOGETHER else None
        return frozenset().union(*index), axis

    def _axis_in(self, value: Variable, array: Variable, axis: int | None) -> int | None:
        """The axis of a variable that is one of an array made of it, None where none is known."""
        while array is not value and axis is not None:
            node = array.owner
            made = [each for each in node.inputs if value in self._reading.of([each])]
            match node.op:
                case Elemwise():
                    pass
                case DimShuffle():
                    place = node.op.new_order[axis]
                    axis = None if place == "x" else place
                case Subtensor():
                    given = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
                    places = [*given, *[slice(None)] * (array.ndim + len(given))]
                    axis = [i for i, each in enumerate(places) if isinstance(each, slice)][axis]
                case _ if is_product(node):
                    axis = axis if axis == node.inputs.index(made[0]) else None
                case _:
                    axis = None
            array = made[0]
        return axis

    def depends(self, graph: Variable) -> bool:
        """Whether a graph depends on value variables."""
        return not self._reading.values.isdisjoint(ancestors([graph]))

    def hold(self, effect: Effect) -> bool:
        """Whether an effect has the shape of its variable, and rows use it as its products say.

        Products are found by what operations are called. Some rows are therefore evaluated with
        and without them, at random values, and compared row by row.
        """
        if effect.is_matrix and effect.coefficients > MOST_TOGETHER:
            return False
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
                if effect.is_matrix and not _is_root(factor):
                    return False
                if not here:
                    return True
                (plain, seen), (other, _) = (
                    np.split(np.concatenate([term.ravel() for term in each]), 2)
                    for each in (here, there)
                )
                if (finite := np.isfinite(plain) & np.isfinite(other)).any():
                    change, size = np.abs(other - plain), np.maximum(1, np.abs(plain))
                    precision = float(np.sqrt(np.finfo(layout.dtype).eps))
                    same = agree(seen[finite], plain[finite], (size + change)[finite], precision)
                    return same and change[finite].max() > 0
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
            factors = [_without_length(each.factor) for each in products]
            # Other effects may multiply the same levels, as in a model of several outcomes.
            if not products or not all(
                equal_computations(factors[:1], [each]) for each in factors[1:]
            ):
                continue
            factor, side = factors[0], products[0].side
            if side is None:
                yield factor, None, pairs
            else:
                matrix = factor if side else factor.T
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


def _without_length(factor: TensorVariable) -> TensorVariable:
    """A number where a factor is one that is repeated."""
    return factor.dimshuffle() if all(factor.type.broadcastable) else factor


def _is_root(matrix: np.ndarray) -> bool:
    """Whether a matrix is lower triangular with a positive diagonal."""
    is_square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]
    return bool(is_square and np.all(np.triu(matrix, 1) == 0) and np.all(np.diagonal(matrix) > 0))
