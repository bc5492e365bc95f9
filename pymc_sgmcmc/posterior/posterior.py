"""A PyMC model as a posterior whose likelihood is a sum over rows.

Only this folder reads the graph of a PyMC model. The rest of the package uses an unconstrained
position vector, arrays of rows, and two symbolic gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.logprob.utils import CheckParameterValue
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.traversal import toposort
from pytensor.tensor.random.op import RandomVariable

from pymc_sgmcmc.compiling.compiled import (
    PYTHON_MODE,
    without_blas_warning,
)
from pymc_sgmcmc.posterior.bad_rows import parameters_error
from pymc_sgmcmc.posterior.check import check_separation
from pymc_sgmcmc.posterior.effect_coordinates import EffectCoordinates
from pymc_sgmcmc.posterior.effects import find_effects
from pymc_sgmcmc.posterior.evaluation import EvaluatedPosterior
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
from pymc_sgmcmc.posterior.terms import without_scaling
from pymc_sgmcmc.posterior.unsupported import refuse_imputed, refuse_labelled
from pymc_sgmcmc.sources import RowSource

OPERATIONS_OF_GROUPS = 20
"""An integral over local variables takes this many times as long for an element as a sum over rows:
6.6 microseconds for a group of 120 elements, against 2 to 3 nanoseconds for one of a regression."""

MOST_JOINT = 150
"""Effects of so many levels are standardised together at most. A Cholesky factor of a matrix of so
many takes a millisecond with its derivatives, as a thousand rows do."""

COMPARED_ROWS = 100
"""Copies of this many rows, evenly spaced, are kept to see whether data were changed in place. More
copies would find changes of fewer rows, but take more memory and time at the start of each run."""


class Posterior(EvaluatedPosterior):
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
        `pymc_sgmcmc.posterior.effect_coordinates`. Otherwise all are value variables.
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
            shapes = dict(zip(self.layout.variables, self.layout.shapes, strict=True))
            self._separated = separate_rows(
                model, rows, needs_rows=needs_rows, checked=checked, shapes=shapes
            )
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
        self._separated = replace(self._separated, full_terms=tuple(terms), by_row=None)
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

    @property
    def row_elements(self) -> int:
        """Array elements of one row of all data together, with those of its records."""
        of_row = sum(leaf.values[0].size for leaf in self._separated.leaves_of_rows)
        return of_row + self._separated.elements_in_whole_arrays

    @property
    def row_operations(self) -> int:
        """Operations that the gradient of a row takes, in units of those for an element of data."""
        return self.row_elements * (OPERATIONS_OF_GROUPS if self.rows_are_groups else 1)

    def not_finite_in(self, group: int) -> str | None:
        """A number in the records of a group of a source that is not finite, in words."""
        groups = self._rows
        return groups.not_finite_in(group) if isinstance(groups, GroupsOfSource) else None

    # --- Changes and checks ---------------------------------------------------------------

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

    def set_others(self, point: Mapping[str, np.ndarray]) -> None:
        """Set the free variables outside the position to their values in a point."""
        super().set_others(point)
        if self.others and "_with_checks" in vars(self) and self._with_checks is not None:
            self._with_checks.set_others(point)

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

    def __getstate__(self) -> dict:
        """Everything but the functions for set-up, which are compiled again when needed."""
        return {
            name: each for name, each in super().__getstate__().items() if name != "_with_checks"
        }


def _evenly_spaced(leaf: RowLeaf) -> np.ndarray:
    """Numbers of the rows that are compared to see whether data were changed in place."""
    count = len(leaf.values)
    return np.linspace(0, count - 1, min(count, COMPARED_ROWS)).astype(int)
