"""A PyMC model as a posterior whose likelihood is a sum over rows.

Only this folder reads the graph of a PyMC model. The rest of the package uses an unconstrained
position vector, arrays of rows, and two symbolic gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.logprob.utils import CheckParameterValue
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.traversal import toposort
from pytensor.tensor.random.op import RandomVariable

from pymc_sgmcmc.compiling.compiled import (
    NUMPY_MODE,
    PYTHON_MODE,
    compile_on_arrays,
    compile_quietly,
    without_blas_warning,
)
from pymc_sgmcmc.posterior.bad_rows import parameters_error
from pymc_sgmcmc.posterior.check import check_separation
from pymc_sgmcmc.posterior.effects import EffectCoordinates, find_effects
from pymc_sgmcmc.posterior.graphs import changed_variable
from pymc_sgmcmc.posterior.group_access import (
    GroupsOfSource,
    check_source,
    groups_of_source,
    on_groups,
)
from pymc_sgmcmc.posterior.position import (
    PositionLayout,
    added_or_removed,
    complete_point,
    given_model,
    layout_from_model,
    names_of,
)
from pymc_sgmcmc.posterior.row_access import (
    RowAccess,
    RowsInMemory,
    RowsOfSource,
    names_of_source,
    on_source,
    refuse_first_rows,
)
from pymc_sgmcmc.posterior.rows import RowLeaf, record_of
from pymc_sgmcmc.posterior.separation import NO_DATA, separate_rows
from pymc_sgmcmc.posterior.several_positions import at_several_positions, in_parts
from pymc_sgmcmc.posterior.symbolic import SymbolicPosterior
from pymc_sgmcmc.posterior.terms import without_scaling
from pymc_sgmcmc.posterior.threads import (
    OfRows,
    SharedFunction,
    in_order,
    on_one_thread,
    threads_of_blas,
)
from pymc_sgmcmc.posterior.unsupported import refuse_imputed, refuse_labelled
from pymc_sgmcmc.sources import RowSource
from pymc_sgmcmc.stages import count_passes

CHUNK_ELEMENTS = 500_000
"""Passes over rows handle about this many array elements of data at a time, 4 MB. Their memory does
not grow with the number of rows then, and results of one operation are in the cache for the next.
Smaller pieces would take longer, since each call has a fixed cost of about 0.1 milliseconds."""

OPERATIONS_OF_GROUPS = 20
"""An integral over local variables takes this many times as long for an element as a sum over rows:
6.6 microseconds for a group of 120 elements, against 2 to 3 nanoseconds for one of a regression."""

MOST_JOINT = 150
"""Effects of so many levels are standardised together at most. A Cholesky factor of a matrix of so
many takes a millisecond with its derivatives, as a thousand rows do."""

FEWEST_COORDINATES_TOGETHER = 50
"""Prior part and rows of positions of this length and more are compiled for several of them. That
takes 0.3 seconds, as long as hundreds of evaluations for single ones, which shorter positions never
need."""

ARRAYS_OF_PRODUCTS = 5
"""Second derivatives have about so many arrays of rows and directions at the same time. All of them
should be in the cache."""

POSSIBLE_ROWS = 1000
"""Whether a position is possible is looked at in so many rows, evenly spaced. Their densities take
some hundredth of a millisecond."""

POSSIBLE_GROUPS = 20
"""The integrals of so many groups take a few milliseconds."""

COMPARED_ROWS = 100
"""Copies of this many rows, evenly spaced, are kept to see whether data were changed in place. More
copies would find changes of fewer rows, but take more memory and time at the start of each run."""


class Posterior(SymbolicPosterior):
    r"""The log posterior of a PyMC model as a prior part plus a sum over N rows of data.

    .. math:: \log \pi(\theta) = \log p(\theta) + \sum_{i=1}^N \log p(x_i \mid \theta)

    up to a constant, on the *unconstrained* space: transforms and their Jacobians are in the
    prior part.

    The data are those of the model at construction, and a later `pymc.set_data` does not change
    them. Make a new posterior (a new step method) for new data.

    Parameters
    ----------
    model : pymc.Model, optional
        Taken from the context where not given. It is never changed.
    variables : sequence of variables, optional
        The free variables that make up the position, in any order; all where not given. The
        others are held in shared variables, see `set_others`.
    rows : str or sequence of str, optional
        Only needed for ordinary models in which it is ambiguous which data run over the rows:
        names of observed variables, of `pymc.Data` variables, or of a dimension. Where data
        variables are named, the others are not subsampled. Or the source of the rows, where the
        model is written on the first of them.
    initial_point : mapping, optional
        Values of value variables; the model's initial point for those not given.
    check : bool
        Whether to evaluate the split on a few rows at a random position, and to refuse a model
        whose rows are not separable.
    needs_rows : bool
        Whether to refuse a model without data. Otherwise all of its log density is the prior part,
        and two rows of log likelihood zero stand for the data, see `has_rows`.
    checked : bool
        Whether the log density is minus infinity where a parameter of a distribution is invalid, as
        Metropolis decisions need. Otherwise it has any value or NaN there.
    standardizes : bool
        Whether the position has coordinates of its own for effects of groups, see
        `pymc_sgmcmc.posterior.effects`. Otherwise all are value variables.
    without : sequence of str
        Variables whose priors are left out, as in maximum likelihood.

    Raises
    ------
    ModelError
        Where the rows cannot be told apart or the numerical check fails; the message names
        the variable and says what to do.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> x = np.linspace(-1, 1, 50)
    >>> with pm.Model() as model:
    ...     slope = pm.Normal("slope")
    ...     _ = pm.Normal("y", slope * x, 1.0, observed=2 * x)
    >>> posterior = Posterior(model)
    >>> posterior.n_rows, posterior.dimension, posterior.labels
    (50, 1, ('slope',))
    >>> bool(np.isclose(posterior.gradient(np.zeros(1))[0], np.sum(2 * x**2)))
    True
    """

    def __init__(
        self,
        model: Model | None = None,
        variables: Sequence | None = None,
        *,
        rows: str | Sequence[str] | RowSource | None = None,
        initial_point: Mapping[str, np.ndarray] | None = None,
        check: bool = True,
        needs_rows: bool = True,
        checked: bool = False,
        standardizes: bool = False,
        without: Sequence[str] = (),
    ):
        model = given_model(model)
        self._model, self._names = model, names_of(model)
        self._checked, self._variables, self._named_rows = checked, variables, rows
        self._evaluated: deque[int] = deque()  # which several threads add to
        refuse_labelled(model)
        refuse_imputed(model)
        with without_blas_warning():
            initial_point = complete_point(model.initial_point(), initial_point or {})
        self.layout: PositionLayout = layout_from_model(model, variables, initial_point)
        self.initial_values = self.layout.ravel(initial_point)
        self.coordinates: EffectCoordinates | None = None
        self._other_values = {
            value: pytensor.shared(
                np.array(initial_point[value.name], dtype=value.dtype),
                f"{value.name}_other",
                shape=value.type.shape,
            )
            for value in model.value_vars
            if value not in set(self.layout.variables)
        }
        self.others: dict[str, SharedVariable] = {
            value.name: shared for value, shared in self._other_values.items()
        }
        self.source = rows if isinstance(rows, RowSource) else None
        columns: dict[str, np.dtype] = {}
        groups = groups_of_source(model.observed_RVs)
        if groups is not None:
            check_source(groups, rows)
            self._separated = on_groups(separate_rows(model, None, checked=checked), groups)
        elif isinstance(rows, RowSource):
            names = names_of_source(rows, [variable.name for variable in model.data_vars])
            self._separated, columns = on_source(separate_rows(model, names, checked=checked), rows)
        else:
            refuse_first_rows(model)
            self._separated = separate_rows(model, rows, needs_rows=needs_rows, checked=checked)
        # The groups of a source were checked where they were made, on the first records.
        if check and self.has_rows and groups is None:
            self._separated = check_separation(
                model,
                self._separated,
                self.layout,
                self._other_values,
                self.initial_values,
                checked=checked,
            )
        terms = [each for each in self._separated.full_terms if each.name not in without]
        self._separated = replace(self._separated, full_terms=tuple(terms))
        self._rows: RowAccess
        if groups is not None:
            self._rows = groups
        elif self.source is not None:
            self._rows = RowsOfSource(self.source, columns)
        else:
            arrays = [leaf.values for leaf in self._separated.leaves]
            self._rows = RowsInMemory(arrays, self._separated.n_rows)
        if standardizes and self.has_rows and not self.others and not self.rows_are_groups:
            self.coordinates = self._coordinates_of_effects()
        originals = [leaf for each in self._separated.leaves_of_rows for leaf in each.originals]
        self._compared = [(leaf, leaf.values[_evenly_spaced(leaf)]) for leaf in originals]

    def _coordinates_of_effects(self) -> EffectCoordinates | None:
        effects = find_effects(
            self._model, self.layout, self._terms_of_model, self.initial_values, self.some_rows
        )
        coordinates = EffectCoordinates(self.layout, effects, MOST_JOINT)
        return coordinates if coordinates.effects else None

    @property
    def model(self) -> Model:
        """The model of the posterior."""
        return self._model

    # --- Size and data -------------------------------------------------------------------

    @property
    def n_rows(self) -> int:
        """N, the number of rows of the full data."""
        return self._rows.n_rows

    @property
    def has_rows(self) -> bool:
        """Whether the model has data. Otherwise two rows of log likelihood zero stand for them."""
        return self.row_terms != (NO_DATA,)

    @property
    def model_batch_size(self) -> int | None:
        """Rows a minibatch of the model's own `pm.Minibatch`, None for an ordinary model."""
        return self._separated.batch_size

    @property
    def data(self) -> tuple[np.ndarray, ...]:
        """The data arrays, each with leading length N. Read only.

        Raises
        ------
        RuntimeError
            Where the rows are in a source, of which no array has all.
        """
        if not isinstance(self._rows, RowsInMemory):
            raise RuntimeError("The rows are not in memory. Take some of them by `take`.")
        return self._rows.arrays

    @property
    def rows_evaluated(self) -> int:
        """How many log densities or gradients of single rows this process has computed."""
        return sum(self._evaluated)

    def count_evaluated(self, rows: int) -> None:
        """Add to `rows_evaluated`, as where others have computed gradients of rows."""
        self._evaluated.append(rows)
        count_passes(rows / self.n_rows)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the columns of the source that the model has, none without a source."""
        return self._rows.names if isinstance(self._rows, RowsOfSource | GroupsOfSource) else ()

    def rows_of_source(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers of the rows of the source that `take` reads for these rows."""
        groups = self._rows
        return groups.rows_of_source(numbers) if isinstance(groups, GroupsOfSource) else numbers

    @property
    def row_types(self) -> tuple[tuple[np.dtype, tuple[int, ...]], ...]:
        """Type, and shape of one row, of each data array."""
        return tuple((leaf.values.dtype, leaf.values.shape[1:]) for leaf in self._separated.leaves)

    @property
    def shared_by_rows(self) -> tuple[bool, ...]:
        """For each data array whether the rows have no parts of their own, as records of groups."""
        return tuple(leaf.shared_by_rows for leaf in self._separated.leaves)

    @property
    def bytes_beside_rows(self) -> tuple[float, int]:
        """Bytes of arrays that rows share: so many a row on average, and those of all rows."""
        groups = self._rows
        if not isinstance(groups, GroupsOfSource):
            return 0.0, 0
        total = groups.record_bytes * groups.source.n_rows
        return total / self.n_rows, total

    @property
    def row_terms(self) -> tuple[str, ...]:
        """Names of the observed variables and potentials that have rows."""
        return tuple(term.name for term in self._separated.row_terms)

    @property
    def data_names(self) -> tuple[str, ...]:
        """Names of the data arrays."""
        return tuple(leaf.name for leaf in self._separated.leaves)

    def row(self, number: int) -> tuple[int, dict[str, np.ndarray]]:
        """The number of a row in the data of the user, and its values by their names."""
        values = self.take(slice(number, number + 1))
        leaves = self._separated.leaves_of_rows
        return record_of(leaves, number, [array[0] for array in values])

    def invalid_parameters(self, position: np.ndarray) -> str | None:
        """A variable whose parameters are invalid at a position, in words, None for none."""
        point = {name: shared.get_value() for name, shared in self.others.items()}
        point |= self.point_at(self._as_position(position))
        model = self._model
        for variable in model.basic_RVs:
            node = without_scaling(variable).owner
            (density,) = model.logp(vars=[variable], sum=False)
            checks = [
                each for each in toposort([density]) if isinstance(each.op, CheckParameterValue)
            ]
            is_simple = isinstance(node.op, RandomVariable)
            parameters = node.op.dist_params(node) if is_simple else []
            function = model.compile_fn(
                [pt.all([pt.all(met) for met in each.inputs[1:]]) for each in checks]
                + model.replace_rvs_by_values(list(parameters)),
                inputs=model.value_vars,
                mode=PYTHON_MODE,
                on_unused_input="ignore",
            )
            values = function(point)
            for each, met in zip(checks, values, strict=False):
                if not met:
                    return parameters_error(variable.name, each.op.msg, values[len(checks) :])
        return None

    def not_finite_in(self, group: int) -> str | None:
        """A number in the records of a group of a source that is not finite, in words."""
        groups = self._rows
        return groups.not_finite_in(group) if isinstance(groups, GroupsOfSource) else None

    def changed_data(self) -> str | None:
        """Name of a shared variable of the model that has changed since construction, or None.

        These are its `pymc.Data`, with or without rows, and the lengths of its dimensions. Changes
        in place, without `pymc.set_data`, are looked for in `COMPARED_ROWS` rows.
        """
        if (name := changed_variable(self._separated.copied)) is not None:
            return name
        for leaf, rows in self._compared:
            if not np.array_equal(leaf.values[_evenly_spaced(leaf)], rows, equal_nan=True):
                return leaf.name
            for source in leaf.sources():
                now = source.get_value(borrow=True)
                # A shared variable that was set has another array.
                if now is not leaf.values and not np.array_equal(
                    np.moveaxis(now, leaf.axis, 0), leaf.values
                ):
                    return source.name
        return None

    def changed_model(self) -> str | None:
        """Name of a variable or potential that was added to or removed from the model, or None."""
        return added_or_removed(self._model, self._names)

    @property
    def row_elements(self) -> int:
        """Array elements of one row of all data together, with those of its records."""
        of_row = sum(leaf.values[0].size for leaf in self._separated.leaves_of_rows)
        return of_row + self._separated.elements_in_whole_arrays

    @property
    def row_operations(self) -> int:
        """Operations that the gradient of a row takes, in units of those for an element of data."""
        return self.row_elements * (OPERATIONS_OF_GROUPS if self.rows_are_groups else 1)

    # --- Positions and value variables ----------------------------------------------------

    @property
    def initial_position(self) -> np.ndarray:
        """Position of the initial point, shape (d,)."""
        return self.positions_at(self.initial_values)

    def positions_at(self, values: np.ndarray) -> np.ndarray:
        """Positions at ravelled value variables, both of shape (..., d)."""
        return values if self.coordinates is None else self.coordinates.to_coordinates(values)

    def values_at(self, positions: np.ndarray) -> np.ndarray:
        """Value variables, ravelled, at positions, both of shape (..., d)."""
        return positions if self.coordinates is None else self.coordinates.to_values(positions)

    def point_at(self, position: np.ndarray) -> dict[str, np.ndarray]:
        """Values of the value variables at a position."""
        return self.layout.unravel(self.values_at(position))

    def position_of_rows(self, positions: np.ndarray) -> np.ndarray:
        """The position of the rows at positions, both of shape (..., d)."""
        return positions if self.coordinates is None else self.coordinates.to_rows(positions)

    def gradients_from_rows(self, positions: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """Gradients in terms of positions from those in terms of positions of the rows."""
        if self.coordinates is None:
            return gradients
        return self.coordinates.pulled_back(positions, gradients)

    def curvature_from_rows(
        self, position: np.ndarray, curvature: np.ndarray, gradient: np.ndarray
    ) -> np.ndarray:
        """Minus a Hessian in terms of a position from that of the position of the rows.

        The gradient is in terms of the position of the rows too.
        """
        if self.coordinates is None:
            return curvature
        return self.coordinates.curvature(position, curvature, gradient)

    # --- Compiled functions, for set-up and reference -------------------------------------

    def set_others(self, point: Mapping[str, np.ndarray]) -> None:
        """Set the free variables outside the position to their values in a point."""
        for name, shared in self.others.items():
            # A copy, since worker processes give views of memory that others write to.
            shared.set_value(np.array(point[name], dtype=shared.dtype), borrow=True)
        if self.others and "_with_checks" in vars(self) and self._with_checks is not None:
            self._with_checks.set_others(point)

    def log_density(self, position: np.ndarray) -> float:
        """Log posterior density up to a constant, in chunks of bounded memory."""
        return self.log_density_and_gradient(position)[0]

    def gradient(self, position: np.ndarray) -> np.ndarray:
        """Full-data gradient of the log posterior, shape (d,), in chunks of bounded memory.

        Without the value it takes half of the time.
        """
        return self.log_prior_and_gradient(position)[1] + self.likelihood_gradient(position)

    def log_density_and_gradient(self, position: np.ndarray) -> tuple[float, np.ndarray]:
        """Log posterior and its gradient over all rows, accumulated in double precision."""
        value, gradient = self.log_prior_and_gradient(position)
        seen, total = self._as_position(self.position_of_rows(position)), np.zeros(len(gradient))
        for chunk_value, chunk_gradient in self.each_chunk(
            partial(_log_likelihood_and_gradient, position=seen)
        ):
            value += chunk_value
            total += chunk_gradient
        return value, gradient + self.gradients_from_rows(position, total)

    def likelihood_gradient(
        self, position: np.ndarray, rows: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        """Gradient of the log likelihood of given rows or all, without its value.

        The position may be several, of shape (positions, d), and so is the gradient then. The rows
        are read from memory once for all of them.
        """
        return self.gradients_from_rows(
            position, self.gradient_of_rows(self.position_of_rows(position), rows)
        )

    def gradient_of_rows(
        self, seen: np.ndarray, rows: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        """That gradient in terms of positions of the rows, at these."""
        positions = np.atleast_2d(self._as_position(seen))
        totals = np.zeros(positions.shape)
        of_rows = partial(_likelihood_gradients, positions=positions)
        for gradients in self._pieces_of(of_rows, rows):
            for total, gradient in zip(totals, gradients, strict=True):
                total += gradient
        return totals.reshape(np.shape(seen))

    @property
    def has_second_derivatives(self) -> bool:
        """Whether PyTensor takes those of the rows, on arrays. It does not of groups and loops."""
        return self._curvature_function is not None

    def likelihood_curvature(
        self, position: np.ndarray, rows: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        r"""The matrix :math:`A = -\sum_j \nabla^2 \log p(x_j \mid \theta)`, shape (d, d).

        It is a sum over given rows or all, by one pass, where `has_second_derivatives`.
        """
        seen = self._as_position(self.position_of_rows(position))
        of_rows, total = partial(_curvature, position=seen), np.zeros((self.dimension,) * 2)
        for products in self._pieces_of(of_rows, rows):
            total += products
        none = self.coordinates is None
        gradient = np.zeros(self.dimension) if none else self.gradient_of_rows(seen, rows)
        return self.curvature_from_rows(position, 0.5 * (total + total.T), gradient)

    def _pieces_of(self, function: OfRows, rows: Sequence[np.ndarray] | None) -> Iterator[Any]:
        """Results of a function of this posterior and of each piece of given rows or all."""
        return self.each_chunk(function) if rows is None else self._of_pieces(function, rows)

    def log_prior_and_gradient(self, position: np.ndarray) -> tuple[float, np.ndarray]:
        """Value and gradient of the part of the log density without rows."""
        # For small matrices, as in normal vectors, starting threads would take most of the time.
        value, gradient = on_one_thread(self._log_prior_function, self._as_position(position))
        return float(value), np.array(gradient, dtype=np.float64)

    def prior_gradients(self, positions: np.ndarray) -> np.ndarray:
        """Gradients of the part without rows at several positions, both of shape (positions, d)."""
        return self.log_priors_and_gradients(positions)[1]

    def log_priors_and_gradients(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values, shape (positions,), and gradients, (positions, d), of the part without rows.

        Long positions are evaluated together where that is right and saves time.
        """
        positions, together = self._as_position(positions), self._several_priors_function
        if together is not None:
            with suppress(Exception):  # Shapes may depend on values.
                return in_parts(together, positions)
        pairs = [self.log_prior_and_gradient(position) for position in positions]
        values, gradients = zip(*pairs, strict=True)
        return np.array(values), np.array(gradients)

    def is_possible(self, position: np.ndarray, *, rows: bool = True) -> bool:
        """Whether the log densities of the prior part and of some of the rows are finite.

        Other than their gradients, they show where a constraint is violated or a parameter invalid.
        """
        position, rows = self._as_position(position), rows and self.has_rows
        with np.errstate(all="ignore"):
            if self._with_checks is not None:
                values = self._with_checks._densities_function(
                    self.values_at(position), *self.some_rows
                )
                return bool(np.isfinite(values[: 1 + rows]).all())
            value, _ = self.log_prior_and_gradient(position)
            if np.isfinite(value) and rows and self.some_rows:
                # They are few, and no part of the cost of a set-up.
                seen = self._as_position(self.position_of_rows(position))
                value, _ = self._log_likelihood_function(seen, *self.some_rows)
        return bool(np.isfinite(value))

    @cached_property
    def _with_checks(self) -> Posterior | None:
        """The posterior with checks of parameters, None where it has them or cannot have them."""
        if self._checked or self.source is not None or self.rows_are_groups:
            return None
        point = self.layout.unravel(self.initial_values)
        others = {name: shared.get_value() for name, shared in self.others.items()}
        posterior = Posterior(
            self._model,
            self._variables,
            rows=self._named_rows,
            initial_point=others | point,
            check=False,
            needs_rows=self.has_rows,
            checked=True,
        )
        same = posterior.row_types == self.row_types and posterior.n_rows == self.n_rows
        return posterior if same and posterior.data_names == self.data_names else None

    @cached_property
    def some_rows(self) -> list[np.ndarray]:
        """At most 1000 rows in memory: of a source those that the model is written on.

        Of a source of groups there are none.
        """
        if self.source is None:
            count = min(self.n_rows, POSSIBLE_GROUPS if self.rows_are_groups else POSSIBLE_ROWS)
            return self.take(np.linspace(0, self.n_rows - 1, count).astype(int))
        if self.rows_are_groups:
            return []
        return [leaf.values[:POSSIBLE_ROWS] for leaf in self._separated.leaves]

    def log_likelihood_and_gradient(
        self, position: np.ndarray, rows: Sequence[np.ndarray]
    ) -> tuple[float, np.ndarray]:
        """Log likelihood of the given rows and its gradient, unscaled.

        Parameters
        ----------
        position : numpy.ndarray, shape (d,)
        rows : sequence of numpy.ndarray
            One array for each array of `data`, as `take` gives them.
        """
        value, gradient = 0.0, np.zeros(self.dimension)
        seen = self._as_position(self.position_of_rows(position))
        of_rows = partial(_log_likelihood_and_gradient, position=seen)
        for piece_value, piece_gradient in self._of_pieces(of_rows, rows):
            value += piece_value
            gradient += piece_gradient
        return value, self.gradients_from_rows(position, gradient)

    def log_likelihoods_and_gradients(
        self, positions: np.ndarray, rows: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log likelihoods of given rows at several positions, (positions,), and (positions, d).

        Products of matrices for all positions take less time than those for one after the other.
        """
        total = np.zeros((len(positions), 1 + self.dimension))
        if self._several_likelihoods_function is not None:
            seen = self._as_position(self.position_of_rows(positions))
            of_rows = partial(_log_likelihoods_and_gradients, positions=seen)
            pieces = self.pieces(rows, ARRAYS_OF_PRODUCTS * len(positions))
            for of_piece in in_order(of_rows, self, pieces, self._threads):
                total += of_piece
            total[:, 1:] = self.gradients_from_rows(positions, total[:, 1:])
        else:
            for of_one, position in zip(total, positions, strict=True):
                of_one[0], of_one[1:] = self.log_likelihood_and_gradient(position, rows)
        return total[:, 0], total[:, 1:]

    def row_gradients(self, position: np.ndarray, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Gradient of the log likelihood of each row apart, shape (rows, d).

        Both are in terms of the position of the rows.
        """
        self.count_evaluated(len(rows[0]))
        (gradients,) = self._row_gradients_function(self._as_position(position), *rows)
        return np.asarray(gradients)

    def row_log_density_differences(
        self, here: np.ndarray, there: np.ndarray, rows: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Log likelihood of each row at a position less that at another, shape (rows,)."""
        (differences,) = self._row_differences_function(
            self._as_position(here), self._as_position(there), *rows
        )
        return np.asarray(differences, dtype=np.float64)

    def take(self, selection: slice | np.ndarray) -> list[np.ndarray]:
        """The given rows of all data arrays."""
        return self._rows.take(selection)

    def chunks(self, width: int = 1) -> Iterator[list[np.ndarray]]:
        """All rows in order, in pieces of bounded memory where a row has `width` results."""
        length = self._chunk_length(width)
        for start in range(0, self.n_rows, length):
            yield self.take(slice(start, start + length))

    def each_chunk(self, function: OfRows, width: int = 1) -> Iterator[Any]:
        """Results of a function of this posterior and of a piece of the rows, in order.

        The pieces are those of `chunks`. The function runs where the rows are, so it should not
        depend on anything that was changed here, other than the values of `set_others`.
        """
        if self.source is not None and self.source.workers is not None:
            self._log_likelihood_template  # noqa: B018  # It takes a pass, once.
        if self.others:
            values = {name: shared.get_value() for name, shared in self.others.items()}
            function = partial(_with_others, function=function, others=values)
        return self._rows.each(function, self, self._chunk_length(width), self._threads)

    def pieces(self, rows: Sequence[np.ndarray], width: int = 1) -> Iterator[list[np.ndarray]]:
        """Given rows in order, in pieces of bounded memory as those of `chunks`."""
        length = self._chunk_length(width)
        for start in range(0, len(rows[0]), length):
            yield self.part(rows, slice(start, start + length))

    def in_chunks(self, arrays: Sequence[np.ndarray], width: int) -> Iterator[list[np.ndarray]]:
        """Arrays with an entry for each row, in the pieces of `chunks`."""
        length = self._chunk_length(width)
        for start in range(0, self.n_rows, length):
            yield [array[start : start + length] for array in arrays]

    def part(self, rows: Sequence[np.ndarray], selection: slice | np.ndarray) -> list[np.ndarray]:
        """Some of the rows that were taken, by their places among these."""
        return self._rows.part(rows, selection)

    def joined(
        self, first: Sequence[np.ndarray], start: int, second: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Rows that were taken, those of the first ones from a place on, and the second ones."""
        return self._rows.joined(first, start, second)

    def _each_range(self, function: OfRows, value: Any) -> Iterator[Any]:
        return self._rows.each(function, value, self._chunk_length(1), threads_of_blas())

    def _of_pieces(self, function: OfRows, rows: Sequence[np.ndarray]) -> Iterator[Any]:
        """Results of a function of this posterior and of each piece of given rows, in order."""
        if 0 < len(rows[0]) <= self._chunk_length(1):
            return iter([function(self, list(rows))])
        return in_order(function, self, self.pieces(rows), self._threads)

    @property
    def _threads(self) -> int:
        """Threads of a pass: one where functions of rows may set the other variables."""
        return 1 if self.others else threads_of_blas()

    def _chunk_length(self, width: int) -> int:
        return max(1, CHUNK_ELEMENTS // max(width, self._widest_row))

    @cached_property
    def _widest_row(self) -> int:
        return self._separated.widest_row(self.layout)

    def _as_position(self, position: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(position, dtype=self.dtype)

    @cached_property
    def _log_prior_function(self):
        position = pt.tensor("position", shape=(None,), dtype=self.dtype)
        value = self.prior_log_density(position)
        return self.compile_for_setup([position], [value, self.prior_gradient(position)])

    @cached_property
    def _several_priors_function(self) -> SharedFunction | None:
        """Prior part and gradient at several positions, None where one by one is as good."""
        if self.dimension < FEWEST_COORDINATES_TOGETHER:
            return None
        one = pt.tensor("position", shape=(None,), dtype=self.dtype)
        return at_several_positions(
            [self.prior_log_density(one), self.prior_gradient(one)],
            one,
            [],
            self.log_prior_and_gradient,
            self.compile_for_setup,
            self.initial_position.astype(self.dtype),
        )

    @cached_property
    def _log_likelihood_function(self):
        position, rows = self.position_and_rows()
        length = rows[0].shape[0]
        value = self.rows_log_density(position, rows, length)
        return self.compile_for_setup(
            [position, *rows], [value, self.rows_gradient(position, rows, length)]
        )

    @cached_property
    def _several_likelihoods_function(self) -> SharedFunction | None:
        """Log likelihoods and gradients at several positions, None where one by one is as good."""
        if self.rows_are_groups or self.dimension < FEWEST_COORDINATES_TOGETHER:
            return None
        position, rows = self.position_and_rows()
        length = rows[0].shape[0]
        value = self.rows_log_density(position, rows, length)
        return at_several_positions(
            [value, self.rows_gradient(position, rows, length)],
            position,
            rows,
            self._log_likelihood_function,
            self.compile_for_setup,
            self.position_of_rows(self.initial_position).astype(self.dtype),
            *self.some_rows,
        )

    @cached_property
    def _likelihood_gradient_function(self):
        position, rows = self.position_and_rows()
        gradient = self.rows_gradient(position, rows, rows[0].shape[0])
        return self.compile_for_setup([position, *rows], [gradient])

    @cached_property
    def _densities_function(self):
        """Log densities of prior part and rows. It has no gradients, which take time to compile."""
        position, rows = self.position_and_rows()
        of_rows = self.rows_log_density(position, rows, rows[0].shape[0])
        outputs = [self.prior_log_density(position), of_rows]
        return self.compile_for_setup([position, *rows], outputs, quick=True)

    @cached_property
    def _curvature_function(self) -> SharedFunction | None:
        """Curvature of rows times directions, None where it is no function of arrays."""
        if self.rows_are_groups:
            return None
        position, rows = self.position_and_rows()
        directions = pt.tensor("directions", shape=(None, self.dimension), dtype=self.dtype)
        try:
            products = self.rows_curvature(position, rows, rows[0].shape[0], directions)
            if any(isinstance(node.op, HasInnerGraph) for node in toposort([products])):
                return None
            return self.compile_for_setup([position, directions, *rows], [products])
        except Exception:  # Operations may fail in any way where they have no second derivative.
            return None

    @cached_property
    def _row_gradients_function(self):
        position, rows = self.position_and_rows()
        gradients = self.single_row_gradients(position, rows)
        return self.compile_for_setup([position, *rows], [gradients])

    @cached_property
    def _row_differences_function(self):
        here, rows = self.position_and_rows()
        there, _ = self.position_and_rows()
        densities = [self.single_row_log_densities(at, rows) for at in (here, there)]
        return self.compile_for_setup([here, there, *rows], [densities[1] - densities[0]])

    def __getstate__(self) -> dict:
        """Everything but the functions for set-up, which are compiled again when needed."""
        compiled = {name for name in vars(self) if name.endswith("_function")}
        compiled |= {"_with_checks", "reading"}
        return {name: value for name, value in vars(self).items() if name not in compiled}

    def compile_for_setup(self, inputs: list, outputs: list, *, quick: bool = False):
        """Compile a function that is called a few times, on large arrays unless `quick`.

        The mode does not depend on the backend of the transitions, so everything that is computed
        before sampling is the same on all backends.
        """
        if quick:
            with pytensor.config.change_flags(cxx=""):
                function = compile_quietly(inputs, outputs, PYTHON_MODE)
        else:
            function = compile_on_arrays(inputs, outputs, NUMPY_MODE)
        function.trust_input = True
        return SharedFunction(function)


def _evenly_spaced(leaf: RowLeaf) -> np.ndarray:
    """Numbers of the rows that are compared to see whether data were changed in place."""
    count = len(leaf.values)
    return np.linspace(0, count - 1, min(count, COMPARED_ROWS)).astype(int)


def _with_others(
    posterior: Posterior,
    rows: list[np.ndarray],
    *,
    function: OfRows,
    others: Mapping[str, np.ndarray],
) -> Any:
    posterior.set_others(others)
    return function(posterior, rows)


def _log_likelihood_and_gradient(
    posterior: Posterior, rows: list[np.ndarray], *, position: np.ndarray
) -> tuple[float, np.ndarray]:
    posterior.count_evaluated(len(rows[0]))
    value, gradient = posterior._log_likelihood_function(position, *rows)
    return float(value), np.array(gradient)


def _log_likelihoods_and_gradients(
    posterior: Posterior, rows: list[np.ndarray], *, positions: np.ndarray
) -> np.ndarray:
    """Log likelihoods of rows at several positions, beside their gradients."""
    posterior.count_evaluated(len(positions) * len(rows[0]))
    function = posterior._several_likelihoods_function
    assert function is not None
    found = np.empty((len(positions), 1 + posterior.dimension))
    found[:, 0], found[:, 1:] = function(positions, *rows)
    return found


def _curvature(
    posterior: Posterior, rows: Sequence[np.ndarray], *, position: np.ndarray
) -> np.ndarray:
    """Sums over rows of the products of their curvature with each direction.

    Many rows have one matrix, which takes no more memory than they do.
    """
    posterior.count_evaluated(len(rows[0]))
    directions = np.eye(posterior.dimension, dtype=posterior.dtype)
    function, total = posterior._curvature_function, np.zeros(directions.shape)
    assert function is not None
    for piece in posterior.pieces(rows, ARRAYS_OF_PRODUCTS * len(directions)):
        total += function(position, directions, *piece)[0]
    return total


def _likelihood_gradients(
    posterior: Posterior, rows: Sequence[np.ndarray], *, positions: np.ndarray
) -> list[np.ndarray]:
    """Gradient of the log likelihood of rows at each of some positions."""
    posterior.count_evaluated(len(positions) * len(rows[0]))
    # Compiling another function of groups takes longer than their log densities.
    function = (
        posterior._log_likelihood_function
        if posterior.rows_are_groups
        else posterior._likelihood_gradient_function
    )
    return [np.array(function(at, *rows)[-1]) for at in positions]
