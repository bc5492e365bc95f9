"""Log densities and gradients of a prior part and of rows as graphs of a position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.compiling.compiled import inline_inner_graphs
from pymc_sgmcmc.posterior.effect_coordinates import EffectCoordinates
from pymc_sgmcmc.posterior.graphs import by_weights
from pymc_sgmcmc.posterior.position import PositionLayout
from pymc_sgmcmc.posterior.reading import Reading, before_casts
from pymc_sgmcmc.posterior.rows import SeparatedModel
from pymc_sgmcmc.posterior.simplify import drop_settled_switches, prepared
from pymc_sgmcmc.posterior.threads import OfRows


class SymbolicPosterior(ABC):
    """A log density that was split into a part without rows and a sum over rows.

    Attributes
    ----------
    layout : PositionLayout
        The free variables that make up the position.
    coordinates : EffectCoordinates or None
        Where the position has coordinates of its own for group effects, their map to the value
        variables. Functions of symbolic rows, and `row_gradients`, are then of the position of the
        rows, see `of_rows` and `gradient_with_prior`.
    """

    layout: PositionLayout
    _separated: SeparatedModel
    _other_values: Mapping[Variable, SharedVariable]
    coordinates: EffectCoordinates | None

    @abstractmethod
    def _each_range(self, function: OfRows, value: Any) -> Iterator[Any]:
        """Results of a function of a value and of each range of the rows, in order."""

    @property
    def dimension(self) -> int:
        """d, the length of the position."""
        return self.layout.dimension

    @property
    def labels(self) -> tuple[str, ...]:
        """A label for each coordinate of the position."""
        return self.layout.labels

    @property
    def dtype(self) -> str:
        """Floating type of positions and gradients."""
        return self.layout.dtype

    @property
    def difference_width(self) -> float:
        """Width of a difference of gradients in standard deviations.

        It is small against one; single precision needs a larger width because of rounding.
        """
        return 1e-3 if self.dtype == "float64" else 0.2

    @property
    def rows_are_groups(self) -> bool:
        """Whether the rows are numbers of groups of records."""
        return self._separated.has_whole_arrays

    def position_and_rows(self) -> tuple[TensorVariable, list[TensorVariable]]:
        """New symbolic inputs: a position, and a tensor of rows for each array of `data`."""
        position = pt.tensor("position", shape=(None,), dtype=self.dtype)
        return position, [leaf.placeholder() for leaf in self._separated.leaves]

    def of_rows(self, position: TensorVariable) -> TensorVariable:
        """Symbolic position of the rows at a position, shape (d,)."""
        if self.coordinates is None:
            return position
        return self._at(self.coordinates.position_of_rows, position)

    def gradient_with_prior(
        self, position: TensorVariable, of_rows: TensorVariable
    ) -> TensorVariable:
        """Symbolic gradient, shape (d,), from that of the log likelihood.

        The latter is in terms of the position of the rows. Prior and rows have one derivative of
        the coordinates together.
        """
        if self.coordinates is None:
            return self.prior_gradient(position) + of_rows
        given = of_rows.type("gradient_of_rows")
        whole = self._log_prior + pt.dot(self.coordinates.position_of_rows, given)
        gradient = self._gradient_at(prepared(whole), position)
        return clone_replace(gradient, {given: of_rows}, rebuild_strict=False)

    def prior_gradient(self, position: TensorVariable) -> TensorVariable:
        """Symbolic gradient, shape (d,), of the part of the log density without rows."""
        return self._gradient_at(self._log_prior_graph, position)

    def rows_gradient(
        self, position: TensorVariable, rows: Sequence[TensorVariable], length: TensorVariable
    ) -> TensorVariable:
        """Symbolic gradient, shape (d,), of the log likelihood of symbolic rows, unscaled.

        Parameters
        ----------
        position : TensorVariable, shape (d,)
        rows : sequence of TensorVariable
            One tensor for each array of `data`.
        length : TensorVariable
            Number of rows, an integer scalar.
        """
        return self._gradient_at(self._log_likelihood_graph(rows, length), position)

    def prior_log_density(self, position: TensorVariable) -> TensorVariable:
        """Symbolic value, a scalar, of the part of the log density without rows."""
        return self._at(self._log_prior_graph, position)

    def rows_log_density(
        self, position: TensorVariable, rows: Sequence[TensorVariable], length: TensorVariable
    ) -> TensorVariable:
        """Symbolic log likelihood, a scalar, of symbolic rows; the parameters of `rows_gradient`.

        Where the parameters are outside their support it is NaN or minus infinity.
        """
        return self._at(self._log_likelihood_graph(rows, length), position)

    def single_row_log_densities(
        self, position: TensorVariable, rows: Sequence[TensorVariable]
    ) -> TensorVariable:
        """Symbolic log likelihood of each symbolic row apart, shape (rows,)."""
        if (densities := self._densities_of_rows(rows)) is not None:
            return self._at(prepared(densities), position)
        # Terms that the model has already summed are those of data of length one.
        log_likelihood, single = self._single_row_template
        of_rows = {of_one: row[:, None] for of_one, row in zip(single, rows, strict=True)}
        return self.vectorized(log_likelihood, position, of_rows, rows[0].shape[0])

    def vectorized(
        self,
        graph: TensorVariable,
        position: TensorVariable,
        of_rows: Mapping[Variable, TensorVariable],
        length: TensorVariable,
    ) -> TensorVariable:
        """A graph of the value variables and of one row, for each of so many symbolic rows."""
        # Softmax and similar operations would otherwise be evaluated row by row in Python.
        at_position = rewrite_graph(
            self._at(graph, position), include=(), custom_rewrite=inline_inner_graphs
        )
        results = vectorize_graph(at_position, of_rows)
        if results.type.ndim == graph.type.ndim:  # the same for all rows
            results = pt.broadcast_to(results, (length, *tuple(results.shape)))
        return results

    def _densities_of_rows(self, rows: Sequence[TensorVariable]) -> TensorVariable | None:
        """Log likelihood of each row in value variables, None where terms are already summed."""
        terms, _, placeholder_length = self.terms_of_rows
        if not all(term.type.ndim for term in terms):
            return None
        sums = [term.reshape((placeholder_length, -1)).sum(axis=1) for term in terms]
        return self._of_rows(sum(sums[1:], sums[0]), rows, rows[0].shape[0])

    def weighted_rows_gradient(
        self, position: TensorVariable, rows: Sequence[TensorVariable], weights: TensorVariable
    ) -> TensorVariable:
        """Symbolic gradient, shape (d,), of the log likelihoods of rows times weights, (rows,)."""
        if (densities := self._densities_of_rows(rows)) is not None:
            return self._gradient_at(prepared((weights * densities).sum()), position)
        return weights @ self.single_row_gradients(position, rows)

    def single_row_gradients(
        self, position: TensorVariable, rows: Sequence[TensorVariable]
    ) -> TensorVariable:
        """Symbolic gradient of the log likelihood of each symbolic row apart, shape (rows, d)."""
        if self.rows_are_groups:
            return self._gradients_by_weights(position, rows)
        # The gradient of data of length one is vectorized over the rows. This is right also for
        # terms that the model has already summed.
        log_likelihood, single = self._single_row_template
        of_rows = {of_one: row[:, None] for of_one, row in zip(single, rows, strict=True)}
        gradient = self.layout.gradient(log_likelihood)
        return self.vectorized(gradient, position, of_rows, rows[0].shape[0])

    def _gradients_by_weights(
        self, position: TensorVariable, rows: Sequence[TensorVariable]
    ) -> TensorVariable:
        """Gradient of each row as the derivative of a weighted sum by the weights.

        Rows with different numbers of records cannot be vectorized.
        """
        length = rows[0].shape[0]
        weights = pt.vector("weights", dtype=self.dtype)
        terms = self._separated.row_log_densities(rows, length)
        total = sum((weights * term.reshape((length, -1)).sum(axis=1)).sum() for term in terms)
        total = clone_replace(total, self._other_values, rebuild_strict=False)
        weighted = self._gradient_at(prepared(total), position)
        return by_weights(weighted, self.dimension, weights, length)

    def rows_curvature(
        self,
        position: TensorVariable,
        rows: Sequence[TensorVariable],
        length: TensorVariable,
        directions: TensorVariable,
    ) -> TensorVariable:
        """Symbolic products of minus the Hessian of the log likelihood of rows with directions.

        A regression takes two matrix products for all directions together.

        Parameters
        ----------
        position, rows, length
            As of `rows_gradient`.
        directions : TensorVariable, shape (directions, d)
            The products have the same shape.
        """
        direction = pt.tensor("direction", shape=(None,), dtype=self.dtype)
        gradient = self.layout.gradient(self._log_likelihood_graph(rows, length))
        product = -self.layout.gradient(pt.dot(gradient, direction))
        return self.vectorized(product, position, {direction: directions}, directions.shape[0])

    @cached_property
    def prior_depends_on_others(self) -> bool:
        """Whether the part without rows depends on variables outside the position and within it."""
        graphs = [term.log_density for term in self._separated.full_terms]
        position, others = self.layout.variables, self._other_values
        reading = Reading(graphs, [*position, *others])
        return any(len({each in others for each in reading.of([graph])}) > 1 for graph in graphs)

    @cached_property
    def indexed_sizes(self) -> dict[int, int | None]:
        """Columns of rows that select entries of variables, and how many entries these have.

        By the number of the column. None is a number that the graph does not know.
        """
        _, rows, _ = self.terms_of_rows
        numbers = {variable: number for number, variable in enumerate(rows)}
        return {
            numbers[column]: each.array.type.shape[axis]
            for each in self.reading.indexings
            for axis, index in each.indices.items()
            if (column := before_casts(index)) in numbers and index.dtype.startswith("int")
        }

    @property
    def _log_prior(self) -> TensorVariable:
        """The part of the log density without rows, in terms of coordinates."""
        terms = [term.log_density.sum() for term in self._separated.full_terms]
        total = sum(terms[1:], terms[0]) if terms else pt.zeros((), dtype=self.dtype)
        total = clone_replace(total, self._other_values, rebuild_strict=False)
        if self.coordinates is not None:
            total = clone_replace(total, self.coordinates.replacements, rebuild_strict=False)
            total = total + self.coordinates.log_jacobian
        return total

    @cached_property
    def _log_prior_graph(self) -> TensorVariable:
        return prepared(self._log_prior)

    def _log_likelihood_graph(
        self, rows: Sequence[TensorVariable], length: TensorVariable
    ) -> TensorVariable:
        return self._of_rows(self._log_likelihood_template, rows, length)

    def _summed_rows(
        self, rows: Sequence[TensorVariable], length: TensorVariable
    ) -> TensorVariable:
        """Log likelihood of symbolic rows in value variables, as the model has it."""
        return self._of_rows(self.sum_of_terms, rows, length)

    def _of_rows(
        self, graph: TensorVariable, rows: Sequence[TensorVariable], length: TensorVariable
    ) -> TensorVariable:
        """A graph of the placeholders for rows and for their number, with symbolic rows."""
        _, placeholders, placeholder_length = self.terms_of_rows
        replacements = dict(zip(placeholders, rows, strict=True))
        replacements[placeholder_length] = length
        return clone_replace(graph, replacements, rebuild_strict=False)

    @cached_property
    def reading(self) -> Reading:
        """What the terms of rows depend on, and where rows and variables are indexed."""
        terms, rows, _ = self.terms_of_rows
        return Reading(terms, self.layout.variables, rows)

    @property
    def sum_of_terms(self) -> TensorVariable:
        """Log likelihood of placeholders for rows, as the model has it."""
        sums = [term.sum() for term in self.terms_of_rows[0]]
        return sum(sums[1:], sums[0])

    @cached_property
    def _log_likelihood_template(self) -> TensorVariable:
        """Log likelihood of placeholders for rows, ready for its gradient."""
        return prepared(self.sum_of_terms)

    @cached_property
    def _single_row_template(self) -> tuple[TensorVariable, list[TensorVariable]]:
        """Log likelihood of a placeholder of length one for each array of rows, and these."""
        single = [leaf.placeholder(1) for leaf in self._separated.leaves]
        return prepared(self._summed_rows(single, pt.constant(1, dtype="int64"))), single

    @cached_property
    def terms_of_rows(
        self,
    ) -> tuple[list[TensorVariable], list[TensorVariable], TensorVariable]:
        """Terms of the log likelihood of placeholders, these placeholders, and their number.

        They are functions of the position of the rows.
        """
        terms, placeholders, length = self._terms_of_model
        if self.coordinates is not None:
            products = dict(pair for each in self.coordinates.effects for pair in each.products)
            terms = clone_replace(list(terms), products, rebuild_strict=False)
        return terms, placeholders, length

    @cached_property
    def _terms_of_model(
        self,
    ) -> tuple[list[TensorVariable], list[TensorVariable], TensorVariable]:
        """Those terms as functions of value variables."""
        placeholders = [leaf.placeholder() for leaf in self._separated.leaves]
        length = pt.lscalar("length")
        terms = self._separated.row_log_densities(placeholders, length)
        terms = drop_settled_switches(terms, placeholders, self._each_range)
        terms = clone_replace(list(terms), self._other_values, rebuild_strict=False)
        return terms, placeholders, length

    def _gradient_at(self, prepared: TensorVariable, position: TensorVariable) -> TensorVariable:
        # A gradient with respect to the position itself would have one costly update for each
        # variable, so the position comes in place of the variables afterwards.
        return self._at(self.layout.gradient(prepared), position)

    def _at(self, graph: TensorVariable, position: TensorVariable) -> TensorVariable:
        return clone_replace(graph, self.layout.split(position), rebuild_strict=False)
