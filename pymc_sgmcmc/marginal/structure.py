"""Local latent variables of a PyMC model: which they are, and which records belong to which group.

A latent variable is local when its entries belong to groups of records (patients, schools), and
the groups are independent of each other given the other, *global* variables. Nothing here is
trusted: `pymc_sgmcmc.marginal.check` evaluates what is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

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
    Cells,
    Index,
    NotCellsError,
    Records,
    cells_of,
    find_indices,
    find_records,
    indexed_beside,
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
    model: Model, names: Sequence[str], *, on_source: bool = False, by_cells: bool = True
) -> LocalStructure:
    """Find the groups of local variables and the terms that depend on them.

    Parameters
    ----------
    model : pymc.Model
    names : sequence of str
        Names of the free variables that are local.
    on_source : bool
        Whether the records of the model may be the first rows of a source.
    by_cells : bool
        Whether pairs of codes may be the groups. Where a record depends on several of such cells,
        the groups are those of one code.

    Raises
    ------
    ModelError
        Where a variable is not local, and what to do instead.
    """
    chosen, dependents = chosen_and_dependents(model, names)
    others = [variable for variable in model.free_RVs if variable not in chosen]
    parameters = {variable: _placeholder(variable) for variable in others}
    # The global variables are replaced first. PyMC would lift random variables without a value
    # through other operations, and they would no longer be those of the model.
    variables = [without_scaling(variable) for variable in [*chosen, *dependents]]
    conditional = clone_replace(variables, parameters, rebuild_strict=False)
    log_densities = _log_densities(model, [*chosen, *dependents], conditional)
    for variable, log_density in zip([*chosen, *dependents], log_densities, strict=True):
        refuse_unsupported(Term(variable.name, log_density))
    starts = _starts(model, chosen, conditional[: len(chosen)])
    if minibatch_nodes(log_densities):
        raise ModelError(
            "The model should be on the full data, but has `pm.Minibatch`. Build it on the full "
            "arrays: the step methods draw the groups themselves."
        )
    values = [model.rvs_to_values[variable] for variable in chosen]
    length_of = _lengths_at(model, parameters)

    def indices_of(entries: Sequence[Variable]) -> dict[str, list[Index]]:
        return {
            variable.name: find_indices(log_density, entries, length_of)
            for variable, log_density in zip(dependents, log_densities[len(chosen) :], strict=True)
        }

    indices = indices_of(values)
    cells = cells_of(indices, length_of) if by_cells else None
    if cells is not None:
        of = {
            value: cells.entries_of(value, _shape(model, variable))
            for variable, value in zip(chosen, values, strict=True)
        }
        try:
            log_densities, starts = _on_cells(cells, log_densities, starts, indices, of)
        except NotCellsError:
            cells = None
        else:
            indices = indices_of(list(of.values()))
    n_groups = _number_of_groups(model, chosen, indices)
    locals_ = tuple(
        _local(model, variable, start, n_groups, indices)
        if cells is None
        else Local(
            variable.name, value, start, _shape(model, variable), 0, of[value], len(cells.lengths)
        )
        for variable, value, start in zip(chosen, values, starts, strict=True)
    )
    terms = []
    by_name = {local.name: local for local in locals_}
    for variable, log_density in zip([*chosen, *dependents], log_densities, strict=True):
        local, places = by_name.get(variable.name), indices.get(variable.name, [])
        try:
            records = find_records(variable, places, n_groups)
        except NotTogetherError:
            if cells is None:
                raise
            return find_structure(model, names, on_source=on_source, by_cells=False)
        length = n_groups if records is None else len(records.codes)
        axis = _axis_of(variable, log_density, length, length_of, local)
        indexed = (*(index.indexed for index in places), *indexed_beside(log_density, places))
        terms.append(LocalTerm(variable.name, log_density, axis, records, indexed, local is None))
    _check_columns(model, [*chosen, *dependents], terms, n_groups, on_source)
    used = set(graph_inputs(log_densities))
    shapes = {new: shape_of(old) for old, new in parameters.items() if new in used}
    return LocalStructure(
        locals_,
        tuple(terms),
        n_groups,
        _dimension(model, locals_),
        {old.name: new for old, new in parameters.items() if new in used},
        tuple(
            length
            for length in model.dim_lengths.values()
            if length in used and leaf_value(length) == n_groups
        ),
        {new: shape.index(n_groups) for new, shape in shapes.items() if n_groups in shape},
    )


def _on_cells(
    cells: Cells,
    log_densities: Sequence[TensorVariable],
    starts: Sequence[TensorVariable],
    indices: Mapping[str, Sequence[Index]],
    of: Mapping[Variable, Variable],
) -> tuple[list[TensorVariable], list[TensorVariable]]:
    """Log densities and support points with one axis for the groups where these are cells.

    Raises
    ------
    NotCellsError
    """
    of_locals, of_records = log_densities[: len(of)], log_densities[len(of) :]
    flat = [cells.of(log_density, of) for log_density in of_locals]
    for (name, places), log_density in zip(indices.items(), of_records, strict=True):
        results = {index.result: cells.at_codes(index, name, of) for index in places}
        flat += rebuild([log_density], results)
    at = [
        cells.of(pt.shape_padleft(start, value.type.ndim - start.type.ndim), of)
        for value, start in zip(of, starts, strict=True)
    ]
    return flat, at


def _check_columns(
    model: Model,
    removed: Sequence[TensorVariable],
    terms: Sequence[LocalTerm],
    n_groups: int,
    on_source: bool,
) -> None:
    """Refuse models on the first rows of a source which cannot be taken for all of them."""
    of_terms = {term.name: term.records.column for term in terms if term.records is not None}
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
    lengths = {len(term.records.codes) for term in terms if term.records is not None}
    if n_groups in lengths:
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


def _placeholder(variable: TensorVariable) -> TensorVariable:
    """Stand-in for a global variable, of known shape also where the lengths come from coords."""
    return variable.type.clone(shape=tuple(shape_of(variable)))(name=variable.name)


def _dependents(model: Model, chosen: Sequence[TensorVariable]) -> list[TensorVariable]:
    """Observed variables that depend on the chosen ones."""

    def depends(variable: Variable) -> bool:
        return not set(chosen).isdisjoint(set(ancestors([variable])) - {variable})

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


def _lengths_at(
    model: Model, parameters: Mapping[TensorVariable, TensorVariable]
) -> Callable[[Variable, int], int]:
    """Function of a quantity and an axis: its length, at the initial point of the model."""

    def length_of(variable: Variable, axis: int) -> int:
        length = variable.type.shape[axis]
        if length is not None:
            return int(length)
        at_values = dict(
            zip(parameters.values(), model.replace_rvs_by_values(list(parameters)), strict=True)
        )
        (graph,) = clone_replace([pt.shape(variable)[axis]], at_values, rebuild_strict=False)
        function = compile_quietly(model.value_vars, graph, PYTHON_MODE)
        with without_blas_warning(), np.errstate(all="ignore"):
            point = model.initial_point()
            return int(function(*(point[value.name] for value in model.value_vars)))

    return length_of


def _number_of_groups(
    model: Model, chosen: Sequence[TensorVariable], indices: dict[str, list[Index]]
) -> int:
    """Number of groups: the length of what is indexed, or of the leading axis of the locals."""
    shapes = {variable.name: _shape(model, variable) for variable in chosen}
    lengths = {index.length for places in indices.values() for index in places} or {
        shape[0] for shape in shapes.values()
    }
    if len(lengths) > 1:
        _refuse_crossed(model, indices, shapes)
    return lengths.pop()


def _refuse_crossed(
    model: Model, indices: dict[str, list[Index]], shapes: dict[str, tuple[int, ...]]
) -> None:
    levels: dict[str, int] = {}
    for places in indices.values():
        for index in places:
            for value in index.of:
                levels.setdefault(model.values_to_rvs[value].name, index.length)
    for name, shape in shapes.items():
        levels.setdefault(name, shape[0])
    described = ", ".join(f"`{name}` {number}" for name, number in levels.items())
    raise NotTogetherError(
        f"The local variables should have the same groups, but they are crossed or nested "
        f"(levels: {described})."
    )


def _shape(model: Model, variable: TensorVariable) -> tuple[int, ...]:
    """Shape of the value of a free variable, on the unconstrained scale."""
    value = model.rvs_to_values[variable]
    if None not in value.type.shape:
        return tuple(value.type.shape)
    transform = model.rvs_to_transforms[variable]
    unconstrained = (
        variable if transform is None else transform.forward(variable, *variable.owner.inputs)
    )
    return tuple(shape_of(unconstrained))


def _local(
    model: Model,
    variable: TensorVariable,
    start: TensorVariable,
    n_groups: int,
    indices: dict[str, list[Index]],
) -> Local:
    """A local variable with its axis of groups."""
    value, shape = model.rvs_to_values[variable], _shape(model, variable)
    axes = [axis for axis, length in enumerate(shape) if length == n_groups]
    if not axes and n_groups in variable.type.shape:
        raise ModelError(
            f"The {n_groups} entries of `{variable.name}` are not independent, since they have a "
            "common constraint, such as their sum. Integrate out variables without one."
        )
    if not axes:
        raise NotTogetherError(
            f"`{variable.name}` should have one entry for each of the {n_groups} groups, but its "
            f"shape is {shape}."
        )
    if len(axes) > 1:
        indexed = [
            index.axis for places in indices.values() for index in places if value in index.of
        ]
        axes = [axis for axis in axes if axis in indexed] or axes
    return Local(variable.name, value, start, shape, axes[0], value)


def _axis_of(
    variable: TensorVariable,
    log_density: TensorVariable,
    length: int,
    length_of: Callable[[Variable, int], int],
    local: Local | None,
) -> int:
    """The axis of a term that runs over the groups or records."""
    shape = tuple(length_of(log_density, axis) for axis in range(log_density.type.ndim))
    axes = [axis for axis, size in enumerate(shape) if size == length]
    if not axes:
        raise ModelError(
            f"The log density of `{variable.name}` should have one entry for each of {length} "
            f"groups or records, but has shape {shape}: its entries depend on each other."
        )
    return local.axis if local is not None and local.axis in axes else axes[0]


def _dimension(model: Model, locals_: Iterable[Local]) -> str | None:
    """Name of the dimension that runs over the groups."""
    for local in locals_:
        dims = model.named_vars_to_dims.get(local.name) or ()
        if local.n_axes == 1 and len(dims) > local.axis and dims[local.axis] is not None:
            return dims[local.axis]
    return None
