"""Local latent variables of a PyMC model: which they are, and which records belong to which group.

A latent variable is local when its entries belong to groups of records (patients, schools), and
the groups are independent of each other given the other, *global* variables. Nothing here is
trusted: `pymc_sgmcmc.marginal.check` evaluates what is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest

import numpy as np
import pytensor.tensor as pt
from pymc.distributions.distribution import support_point
from pymc.logprob.basic import conditional_logp
from pymc.logprob.transform_value import TransformValuesRewrite
from pymc.model import Model
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, graph_inputs
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.compiling.compiled import PYTHON_MODE, compile_quietly, without_blas_warning
from pymc_sgmcmc.compiling.large_constants import large_constants_by_sample
from pymc_sgmcmc.errors import ModelError, NotTogetherError
from pymc_sgmcmc.marginal.codes import (
    NotCellsError,
    Records,
    cells_of,
    find_records,
)
from pymc_sgmcmc.posterior.graphs import (
    leaf_value,
    minibatch_nodes,
    rebuild,
    shape_of,
    simplify_for_gradients,
)
from pymc_sgmcmc.posterior.group_access import GroupsOfSource, column_of
from pymc_sgmcmc.posterior.position import refuse_dimensions
from pymc_sgmcmc.posterior.reading import Indexing, Reading
from pymc_sgmcmc.posterior.rows import Term
from pymc_sgmcmc.posterior.terms import without_scaling
from pymc_sgmcmc.posterior.unsupported import refuse_unsupported
from pymc_sgmcmc.sources import RowSource


@dataclass(frozen=True, eq=False)
class Local:
    """One local variable on the unconstrained scale.

    Attributes
    ----------
    name : str
        Name of the random variable.
    value : TensorVariable
        Its value variable, to which its transform applies.
    start : TensorVariable
        The support point of its prior, such as the mean, on the same scale.
    shape : tuple of int
        Shape of the value.
    axis : int
        The axis of the value that runs over the groups, the first of several.
    entries : TensorVariable
        What stands for the value in the terms, with a single axis for the groups.
    n_axes : int
        Number of axes that run over the groups, where these are cells of several codes.
    """

    name: str
    value: TensorVariable
    start: TensorVariable
    shape: tuple[int, ...]
    axis: int
    entries: TensorVariable
    n_axes: int = 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the axes that run over the groups."""
        return self.shape[self.axis : self.axis + self.n_axes]

    @property
    def shape_in_group(self) -> tuple[int, ...]:
        """Shape of the entries of one group."""
        return self.shape[: self.axis] + self.shape[self.axis + self.n_axes :]

    @property
    def size_in_group(self) -> int:
        """Number of entries of one group."""
        return int(np.prod(self.shape_in_group))


@dataclass(frozen=True, eq=False)
class LocalTerm:
    """A term of the log density that depends on local variables.

    Attributes
    ----------
    name : str
        Name of the local or observed variable.
    log_density : TensorVariable
        Elementwise in the groups or in the records.
    axis : int
        The axis that runs over them.
    records : Records or None
        None where the entries of the term are those of the groups themselves.
    indexed : tuple of Variable
        Quantities with one entry a group which the codes of the records index.
    observed : bool
    """

    name: str
    log_density: TensorVariable
    axis: int
    records: Records | None
    indexed: tuple[Variable, ...]
    observed: bool


@dataclass(frozen=True, eq=False)
class LocalStructure:
    """Local variables with the terms of the log density that depend on them.

    Attributes
    ----------
    locals : tuple of Local
    terms : tuple of LocalTerm
    n_groups : int
    dim : str or None
        The dimension of the model that runs over the groups.
    parameters : dict of str to TensorVariable
        Inputs of the terms that stand for the global random variables, by their names.
    lengths_of_groups : tuple of Variable
        Shared lengths of dimensions that run over the groups.
    axes_of_groups : dict of TensorVariable to int
        Parameters with an axis as long as there are groups, and this axis.
    """

    locals: tuple[Local, ...]
    terms: tuple[LocalTerm, ...]
    n_groups: int
    dim: str | None
    parameters: dict[str, TensorVariable]
    lengths_of_groups: tuple[Variable, ...] = ()
    axes_of_groups: Mapping[TensorVariable, int] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the local variables."""
        return tuple(local.name for local in self.locals)

    @property
    def observed(self) -> tuple[str, ...]:
        """Names of the observed variables that depend on the local ones."""
        return tuple(term.name for term in self.terms if term.observed)

    @property
    def n_records(self) -> int:
        """Number of records of all groups."""
        return sum(
            self.n_groups if term.records is None else term.records.n_records
            for term in self.terms
            if term.observed
        )

    @property
    def column(self) -> tuple[RowSource, str] | None:
        """Source of the records, and its column of codes, where they are rows of one."""
        columns = (None if term.records is None else term.records.column for term in self.terms)
        return next((column for column in columns if column is not None), None)

    @property
    def groups_of_source(self) -> GroupsOfSource | None:
        """Where the records of the groups are read, None where they are in memory."""
        of_terms = (term.records.groups for term in self.terms if term.records is not None)
        return next((groups for groups in of_terms if groups is not None), None)

    def on_groups(self, groups: GroupsOfSource) -> LocalStructure:
        """The same structure with all records of a source."""
        terms = [
            replace(term, records=term.records and replace(term.records, groups=groups))
            for term in self.terms
        ]
        return replace(self, terms=tuple(terms))

    @property
    def values(self) -> tuple[TensorVariable, ...]:
        """Value variables of the local ones."""
        return tuple(local.value for local in self.locals)

    @cached_property
    def block_size(self) -> int:
        """q, the number of local quantities of one group."""
        return sum(local.size_in_group for local in self.locals)


def find_structure(
    model: Model, names: Sequence[str], *, on_source: bool = False
) -> LocalStructure:
    """Find the groups of local variables and the terms that depend on them.

    Pairs of codes may be the groups. Where a record depends on several of such cells, the groups
    are those of one code.

    Parameters
    ----------
    model : pymc.Model
    names : sequence of str
        Names of the free variables that are local.
    on_source : bool
        Whether the records of the model may be the first rows of a source.

    Raises
    ------
    ModelError
        Where a variable is not local, and what to do instead.
    """
    given = _GivenGlobals(model, names)
    found = given.by_cells() or given.by_groups(given.log_densities, given.starts, given.values)
    _check_columns(model, given.variables, found, on_source)
    return found


class _GivenGlobals:
    """Local variables and what is observed of them, given the global variables.

    Attributes
    ----------
    chosen, variables : list of TensorVariable
        The local variables, and after these the observed ones that depend on them.
    values : list of TensorVariable
        Value variables of the local ones.
    shapes : dict of TensorVariable to tuple of int
        Their shapes.
    log_densities, starts : list of TensorVariable
        Log densities of all, and support points of the local ones.
    """

    def __init__(self, model: Model, names: Sequence[str]):
        self.model = model
        self.chosen, dependents = chosen_and_dependents(model, names)
        self.variables = [*self.chosen, *dependents]
        self.shapes = {model.rvs_to_values[each]: _shape(model, each) for each in self.chosen}
        self.values = list(self.shapes)
        # Lengths that come from coords are no part of types.
        self.parameters = {
            each: each.type.clone(shape=tuple(shape_of(each)))(name=each.name)
            for each in model.free_RVs
            if each not in self.chosen
        }
        # The global variables are replaced first. PyMC would lift random variables without a value
        # through other operations, and they would no longer be those of the model.
        inner = [without_scaling(variable) for variable in self.variables]
        conditional = clone_replace(inner, self.parameters, rebuild_strict=False)
        self.log_densities = _log_densities(model, self.variables, conditional)
        for variable, log_density in zip(self.variables, self.log_densities, strict=True):
            refuse_unsupported(Term(variable.name, log_density))
        self.starts = _starts(model, self.chosen, conditional[: len(self.chosen)])
        if minibatch_nodes(self.log_densities):
            raise ModelError(
                "The model should be on the full data, but has `pm.Minibatch`. Build it on the "
                "full arrays: the step methods draw the groups themselves."
            )
        self._lengths: dict[tuple[Variable, int], int] = {}

    def length_of(self, variable: Variable, axis: int) -> int:
        """The length of a quantity along an axis, at the initial point of the model."""
        length = variable.type.shape[axis]
        if length is not None:
            return int(length)
        if (variable, axis) not in self._lengths:
            model = self.model
            values = model.replace_rvs_by_values(list(self.parameters))
            at_values = dict(zip(self.parameters.values(), values, strict=True))
            (graph,) = clone_replace([pt.shape(variable)[axis]], at_values, rebuild_strict=False)
            function = compile_quietly(model.value_vars, graph, PYTHON_MODE)
            with without_blas_warning(), np.errstate(all="ignore"):
                point = model.initial_point()
                found = int(function(*(point[value.name] for value in model.value_vars)))
            self._lengths[variable, axis] = found
        return self._lengths[variable, axis]

    def by_cells(self) -> LocalStructure | None:
        """The structure where the groups are pairs of codes, None where they are not."""
        readings = self._readings(self.log_densities, self.values)
        cells = cells_of(_dependent(readings), self.length_of)
        if cells is None:
            return None
        of = {value: cells.entries_of(value, self.shapes[value]) for value in self.values}
        try:
            log_densities = [cells.of(each, of) for each in self.log_densities[: len(of)]]
            parts = list(zip(self.variables, self.log_densities, readings, strict=True))
            for variable, log_density, reading in parts[len(of) :]:
                places = reading.dependent
                at_codes = {each.result: cells.at_codes(each, variable.name, of) for each in places}
                log_densities += rebuild([log_density], at_codes)
            starts = [
                cells.of(pt.shape_padleft(start, value.type.ndim - start.type.ndim), of)
                for value, start in zip(of, self.starts, strict=True)
            ]
            return self.by_groups(log_densities, starts, list(of.values()), len(cells.lengths))
        except (NotCellsError, NotTogetherError):
            return None

    def by_groups(
        self,
        log_densities: Sequence[TensorVariable],
        starts: Sequence[TensorVariable],
        entries: Sequence[TensorVariable],
        n_axes: int = 1,
    ) -> LocalStructure:
        """The structure of log densities in terms of entries with one axis for the groups.

        Raises
        ------
        ModelError
        """
        readings = self._readings(log_densities, entries)
        places = _dependent(readings)
        n_groups = self._number_of_groups(places)
        axes = [
            0 if n_axes > 1 else self._axis_of_groups(variable, n_groups, places)
            for variable in self.chosen
        ]
        of_locals = zip(self.chosen, self.values, starts, axes, entries, strict=True)
        locals_ = tuple(
            Local(variable.name, value, start, self.shapes[value], axis, entry, n_axes)
            for variable, value, start, axis, entry in of_locals
        )
        of_terms = zip_longest(self.variables, log_densities, readings, locals_)
        terms = tuple(self._term(n_groups, *of_term) for of_term in of_terms)
        used, parameters = set(graph_inputs(log_densities)), self.parameters.items()
        shapes = {new: shape_of(old) for old, new in parameters if new in used}
        lengths = self.model.dim_lengths.values()
        return LocalStructure(
            locals_,
            terms,
            n_groups,
            _dimension(self.model, locals_),
            {old.name: new for old, new in parameters if new in used},
            tuple(each for each in lengths if each in used and leaf_value(each) == n_groups),
            {new: shape.index(n_groups) for new, shape in shapes.items() if n_groups in shape},
        )

    def _readings(
        self, log_densities: Sequence[TensorVariable], entries: Sequence[TensorVariable]
    ) -> list[Reading]:
        """Of each log density, where something that depends on local variables is indexed.

        Local variables have no records.
        """
        graphs = [()] * len(entries) + [(each,) for each in log_densities[len(entries) :]]
        return [Reading(graph, entries, through=False) for graph in graphs]

    def _number_of_groups(self, places: Sequence[Indexing]) -> int:
        """Number of groups: the length of what is indexed, or of the leading axis of the locals."""
        lengths = {each: self.length_of(each.array, each.axis) for each in places}
        leading = {value: self.shapes[value][0] for value in self.values}
        numbers = set((lengths or leading).values())
        if len(numbers) == 1:
            return numbers.pop()
        for place, length in reversed(lengths.items()):
            leading |= dict.fromkeys(place.of, length)
        levels = zip(self.chosen, leading.values(), strict=True)
        described = ", ".join(f"`{variable.name}` {number}" for variable, number in levels)
        raise NotTogetherError(
            f"The local variables should have the same groups, but they are crossed or nested "
            f"(levels: {described})."
        )

    def _axis_of_groups(
        self, variable: TensorVariable, n_groups: int, places: Sequence[Indexing]
    ) -> int:
        """The axis of a local variable that runs over the groups."""
        value = self.model.rvs_to_values[variable]
        axes = [axis for axis, length in enumerate(self.shapes[value]) if length == n_groups]
        if not axes and n_groups in variable.type.shape:
            raise ModelError(
                f"The {n_groups} entries of `{variable.name}` are not independent, since they have "
                "a common constraint, such as their sum. Integrate out variables without one."
            )
        if not axes:
            raise NotTogetherError(
                f"`{variable.name}` should have one entry for each of the {n_groups} groups, but "
                f"its shape is {self.shapes[value]}."
            )
        indexed = [each.axis for each in places if value in each.of]
        return next((axis for axis in axes if axis in indexed), axes[0])

    def _term(
        self,
        n_groups: int,
        variable: TensorVariable,
        log_density: TensorVariable,
        reading: Reading,
        local: Local | None,
    ) -> LocalTerm:
        """A term with its records, and its axis that runs over these or over the groups."""
        records = find_records(variable.name, reading.dependent, n_groups)
        length = n_groups if records is None else len(records.codes)
        shape = tuple(self.length_of(log_density, axis) for axis in range(log_density.type.ndim))
        axes = [axis for axis, size in enumerate(shape) if size == length]
        if not axes:
            raise ModelError(
                f"The log density of `{variable.name}` should have one entry for each of {length} "
                f"groups or records, but has shape {shape}: its entries depend on each other."
            )
        axis = local.axis if local is not None and local.axis in axes else axes[0]
        codes = {each.index for each in reading.dependent}
        # Quantities without local values, such as predictors of groups, are among these.
        indexed = tuple(each.array for each in reading.indexings if each.index in codes)
        return LocalTerm(variable.name, log_density, axis, records, indexed, local is None)


def _dependent(readings: Sequence[Reading]) -> list[Indexing]:
    return [each for reading in readings for each in reading.dependent]


def _shape(model: Model, variable: TensorVariable) -> tuple[int, ...]:
    """Shape of the value of a free variable, on the unconstrained scale."""
    value, transform = model.rvs_to_values[variable], model.rvs_to_transforms[variable]
    if None not in value.type.shape:
        return tuple(value.type.shape)
    if transform is not None:
        variable = transform.forward(variable, *variable.owner.inputs)
    return tuple(shape_of(variable))


def _check_columns(
    model: Model, removed: Sequence[TensorVariable], found: LocalStructure, on_source: bool
) -> None:
    """Refuse models on the first rows of a source which cannot be taken for all of them."""
    records = {term.name: term.records for term in found.terms if term.records is not None}
    of_terms, n_groups = {name: each.column for name, each in records.items()}, found.n_groups
    columns = {column for column in of_terms.values() if column is not None}
    if not columns:
        return
    (_, name), *others = sorted(columns, key=lambda column: column[1])
    if not on_source:
        raise ModelError(
            f"The records of {quoted(of_terms)} are the first rows of a source, but all of them "
            "are needed in memory here. Integrate the local variables out by `marginalize`, and "
            "pass `rows` to the step method; or give arrays of all records."
        )
    if others or None in of_terms.values():
        raise ModelError(
            f"The records of {quoted(of_terms)} should belong to groups by one column of `rows`, "
            f"but do so by {quoted([name, *(other for _, other in others)])}"
            f"{' and by other arrays' if None in of_terms.values() else ''}. Leave the others out."
        )
    if n_groups in {len(each.codes) for each in records.values()}:
        raise ModelError(
            f"There are {n_groups} groups, and `rows.head` returned as many rows. Choose another "
            f"number of rows, `rows.head(..., rows={n_groups + 1})`, so that they can be told "
            "apart."
        )
    stays = [variable for variable in model.basic_RVs if variable not in removed]
    for variable in [*stays, *model.potentials]:
        value = model.rvs_to_values.get(variable)
        roots = [variable] if value is None else [variable, value]
        first = [v.name for v in ancestors(roots) if column_of(v) is not None]
        if first:
            raise ModelError(
                f"`{variable.name}` depends on `{first[0]}`, of which the model has the first rows "
                "only, but on no local variable, so that its rows are not those of groups. Leave "
                "it out."
            )


def chosen_and_dependents(
    model: Model, names: Sequence[str]
) -> tuple[list[TensorVariable], list[TensorVariable]]:
    """The named free variables in the order of the model, and what is observed of them.

    Raises
    ------
    ModelError
        Where they are not local.
    """
    refuse_dimensions(model)
    free = {variable.name: variable for variable in model.free_RVs}
    unknown = [name for name in names if name not in free]
    if unknown or not names:
        raise ModelError(
            f"The local variables should be free variables of the model, {quoted(free)}, but got "
            f"{quoted(unknown) if unknown else 'none'}."
        )
    discrete = [name for name in names if not free[name].dtype.startswith("float")]
    if discrete:
        raise ModelError(
            f"The local variables should be continuous, but {quoted(discrete)} is discrete. Sum "
            "over its values with `pymc_extras.marginalize`."
        )
    chosen = [variable for variable in model.free_RVs if variable.name in names]
    for variable in chosen:
        if not variable.type.ndim:
            raise ModelError(
                f"`{variable.name}` is a single number, so it is a global variable. Name variables "
                "with one entry a group."
            )
    return chosen, _dependents(model, chosen)


def _dependents(model: Model, chosen: Sequence[TensorVariable]) -> list[TensorVariable]:
    """Observed variables that depend on the chosen ones."""
    reading = Reading(model.basic_RVs + model.potentials, chosen)

    def depends(variable: Variable) -> bool:
        return bool(reading.of([variable]))

    # PyMC splits an observed variable with missing values into these two.
    imputed = {rv.name.removesuffix("_observed") + "_unobserved" for rv in model.observed_RVs}
    for variable in model.free_RVs:
        if variable not in chosen and depends(variable):
            if variable.name in imputed:
                raise ModelError(
                    f"`{variable.name}` are missing outcomes that depend on local variables. Drop "
                    "these records, which say nothing of the parameters."
                )
            raise NotTogetherError(
                f"`{variable.name}` depends on local variables, so it is local too."
            )
    for potential in model.potentials:
        if depends(potential):
            raise ModelError(
                f"The potential `{potential.name}` depends on local variables, and cannot be "
                "split into groups. Write it as an observed `pm.CustomDist`."
            )
    dependents = [variable for variable in model.observed_RVs if depends(variable)]
    inputs = set(ancestors(dependents))
    missing = [
        variable.name
        for variable in model.free_RVs
        if variable in inputs and variable.name in imputed
    ]
    if missing:
        raise ModelError(
            f"{quoted(missing)} are missing values of single records, which cannot be told apart "
            "by group. Impute them before, or drop these records."
        )
    if not dependents:
        raise ModelError(
            f"No observed variable depends on {quoted(v.name for v in chosen)}, so there is "
            "nothing to integrate. Leave it out of the model."
        )
    return dependents


def _log_densities(
    model: Model, variables: Sequence[TensorVariable], conditional: Sequence[TensorVariable]
) -> list[TensorVariable]:
    """Log density of each variable at the values of all, given the global variables."""
    values = [model.rvs_to_values[variable] for variable in variables]
    transforms = {
        value: transform
        for variable, value in zip(variables, values, strict=True)
        if (transform := model.rvs_to_transforms[variable]) is not None
    }
    with large_constants_by_sample(model):
        log_densities = conditional_logp(
            dict(zip(conditional, values, strict=True)),
            warn_rvs=False,
            extra_rewrites=TransformValuesRewrite(transforms) if transforms else None,
        )
    return simplify_for_gradients([pt.as_tensor(log_densities[value]) for value in values])


def _starts(
    model: Model, chosen: Sequence[TensorVariable], conditional: Sequence[TensorVariable]
) -> list[TensorVariable]:
    """Support points of the local variables on the unconstrained scale."""
    constrained: dict[TensorVariable, TensorVariable] = {}
    starts = []
    for variable, given in zip(chosen, conditional, strict=True):
        try:
            point = support_point(given)
        except NotImplementedError:
            point = pt.zeros_like(given)
        (point,) = clone_replace([point], constrained, rebuild_strict=False)
        constrained[given] = point
        transform = model.rvs_to_transforms[variable]
        if transform is not None:
            inputs = clone_replace(given.owner.inputs, constrained, rebuild_strict=False)
            point = transform.forward(point, *inputs)
        starts.append(pt.as_tensor(point))
    return starts


def _dimension(model: Model, locals_: Iterable[Local]) -> str | None:
    """Name of the dimension that runs over the groups."""
    for local in locals_:
        dims = model.named_vars_to_dims.get(local.name) or ()
        if local.n_axes == 1 and len(dims) > local.axis and dims[local.axis] is not None:
            return dims[local.axis]
    return None
