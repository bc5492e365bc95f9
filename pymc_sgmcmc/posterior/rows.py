"""Tell the rows of a model's data apart from everything else.

A posterior can be subsampled when its log density is a prior part plus a sum over rows. This
module finds that split in the graph of a PyMC model, in one of two ways:

* models built with `pymc.Minibatch` and ``total_size``: the outputs of the minibatch nodes are
  the rows, their inputs the full data;
* ordinary models: the observed variables and all data arrays (constants and `pymc.Data`) that
  share their leading length are the rows.

Nothing here is trusted: `pymc_sgmcmc.posterior.check` evaluates the split numerically.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pytensor.tensor as pt
from pymc.data import MinibatchOp
from pymc.logprob.basic import transformed_conditional_logp
from pymc.logprob.utils import local_remove_check_parameter
from pymc.model import Model
from pymc.variational.minibatch_rv import MinibatchRandomVariable
from pytensor.compile.mode import Mode
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.basic import in2out
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor import TensorVariable
from pytensor.tensor.basic import (
    Alloc,
    ARange,
    MakeVector,
    get_underlying_scalar_constant_value,
)
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.type import TensorType

from pymc_sgmcmc.errors import ModelError

PYTHON_MODE = Mode(linker="py", optimizer="fast_compile")
"""Evaluation by NumPy: slower per call, but without compilation; for checks and set-up."""


@dataclass(frozen=True, eq=False)
class RowLeaf:
    """One data array whose leading axis runs over the rows.

    Attributes
    ----------
    name : str
        What to call it in messages.
    variables : tuple of Variable
        Where it enters the graph of the log density; `pymc.Minibatch` can enter twice.
    values : numpy.ndarray
        The full data, leading length N; never written to.
    """

    name: str
    variables: tuple[Variable, ...] = field(repr=False)
    values: np.ndarray = field(repr=False)

    def placeholder(self) -> TensorVariable:
        """Fresh symbolic input for some of the rows."""
        shape = (None, *self.values.shape[1:])
        return TensorType(self.values.dtype, shape=shape)(name=f"{self.name}_rows")


@dataclass(frozen=True, eq=False)
class Term:
    """One additive term of a model's log density, elementwise or already summed."""

    name: str
    log_density: TensorVariable


@dataclass(frozen=True, eq=False)
class SeparatedModel:
    """A log density split in a part without rows and a sum over rows.

    Attributes
    ----------
    full_terms : tuple of Term
        Prior, Jacobians, potentials and likelihoods that are not subsampled.
    row_terms : tuple of Term
        Likelihood terms, unscaled, on the data as they stand in the model.
    leaves : tuple of RowLeaf
        The data arrays to subsample together.
    n_rows : int
        N.
    batch_size : int or None
        What the model's `pymc.Minibatch` asks for, None for an ordinary model.
    """

    full_terms: tuple[Term, ...]
    row_terms: tuple[Term, ...]
    leaves: tuple[RowLeaf, ...]
    n_rows: int
    batch_size: int | None

    def row_log_densities(
        self, rows: Sequence[TensorVariable], length: TensorVariable
    ) -> list[TensorVariable]:
        """Likelihood terms with the data replaced by symbolic rows.

        Parameters
        ----------
        rows : sequence of TensorVariable
            One tensor a leaf, in the order of `leaves`.
        length : TensorVariable
            Their common leading length (an integer scalar, a constant where shapes must be
            static).
        """
        terms, placeholders, placeholder_length = self._template
        replacements = dict(zip(placeholders, rows, strict=True))
        replacements[placeholder_length] = length
        return clone_replace(terms, replacements, rebuild_strict=False)

    @cached_property
    def _template(
        self,
    ) -> tuple[list[TensorVariable], list[TensorVariable], TensorVariable]:
        """Terms on placeholders for the rows and their number."""
        placeholders = [leaf.placeholder() for leaf in self.leaves]
        length = pt.lscalar("n_rows")
        replacements = {
            variable: placeholder
            for leaf, placeholder in zip(self.leaves, placeholders, strict=True)
            for variable in leaf.variables
        }
        stale = {self.n_rows} | ({self.batch_size} if self.batch_size is not None else set())
        terms = [term.log_density for term in self.row_terms]
        terms = _with_rows(terms, replacements, frozenset(stale), length)
        return terms, placeholders, length


def separate_rows(model: Model, rows: str | Sequence[str] | None = None) -> SeparatedModel:
    """Split the log density of a model into a part without rows and a sum over rows.

    Parameters
    ----------
    model : pymc.Model
        With or without `pymc.Minibatch`.
    rows : str or sequence of str, optional
        For ordinary models in which the rows cannot be guessed: names of observed variables,
        of `pymc.Data` variables, or of a dimension whose data run over the rows.

    Raises
    ------
    ModelError
        Where the rows cannot be told apart; the message names the variable and what to pass.
    """
    if not model.observed_RVs and not model.potentials:
        raise ModelError(
            "The model has no observed variables, so there are no rows to subsample. "
            "Sample it with NUTS: `pm.sample()`."
        )
    terms = _model_terms(model)
    minibatch_nodes = _minibatch_nodes(terms)
    if minibatch_nodes:
        if rows is not None:
            raise ModelError(
                "`rows` is for ordinary models, but this one uses `pm.Minibatch`, which names "
                "its rows itself. Drop `rows`, or build the model on the full arrays."
            )
        return _separate_minibatch_model(model, terms, minibatch_nodes)
    return _separate_ordinary_model(model, terms, rows)


# --- The terms of the log density ---------------------------------------------------------


def _model_terms(model: Model) -> dict[str, Term]:
    """Log density terms by variable name, without `total_size` scaling and parameter checks."""
    random_variables = [*model.free_RVs, *model.observed_RVs]
    # `total_size` wraps the variable in a node that multiplies its log density by N / n.
    # Asking for the density of the variable inside gives the plain sum over rows.
    inner = {variable: _without_scaling(variable) for variable in random_variables}
    log_densities = transformed_conditional_logp(
        rvs=list(inner.values()),
        rvs_to_values={
            inner[variable]: model.rvs_to_values[variable] for variable in random_variables
        },
        rvs_to_transforms={
            inner[variable]: model.rvs_to_transforms[variable] for variable in random_variables
        },
        jacobian=True,
    )
    names = [variable.name for variable in random_variables]
    if model.potentials:
        log_densities = [*log_densities, *model.replace_rvs_by_values(list(model.potentials))]
        names += [potential.name for potential in model.potentials]
    tensors = [pt.as_tensor(log_density) for log_density in log_densities]
    return {
        name: Term(name, tensor)
        for name, tensor in zip(names, _simplify_for_gradients(tensors), strict=True)
    }


def _without_scaling(variable: TensorVariable) -> TensorVariable:
    if _total_size(variable) is None:
        return variable
    return variable.owner.inputs[0]


def _total_size(variable: TensorVariable) -> list[int | None] | None:
    node = variable.owner
    if node is None or not isinstance(node.op, MinibatchRandomVariable):
        return None
    return [
        int(_value(size)) if isinstance(size.type, TensorType) else None for size in node.inputs[1:]
    ]


def _simplify_for_gradients(tensors: list[TensorVariable]) -> list[TensorVariable]:
    """Drop parameter checks and left-over minibatch scaling nodes.

    The checks cost time in each transition and turn an invalid parameter into -inf, whose
    gradient is zero: a chain outside the support would drift without notice. Without them it
    becomes NaN, which stops the chain with a message.
    """
    graph = _copy_of_graph(tensors)
    in2out(local_remove_check_parameter).rewrite(graph)
    for node in graph.toposort():
        if isinstance(node.op, MinibatchRandomVariable):
            graph.replace(node.outputs[0], node.inputs[0])
    return list(graph.outputs)


def _copy_of_graph(tensors: list[TensorVariable]) -> FunctionGraph:
    """Copy of the nodes of a graph that may be changed; inputs and constants stay the same."""
    return FunctionGraph(outputs=tensors, clone=True, copy_inputs=False, copy_orphans=False)


# --- Models with pm.Minibatch -------------------------------------------------------------


def _minibatch_nodes(terms: dict[str, Term]) -> list:
    roots = [term.log_density for term in terms.values()]
    nodes = {
        variable.owner
        for variable in ancestors(roots)
        if variable.owner is not None and isinstance(variable.owner.op, MinibatchOp)
    }
    return sorted(nodes, key=lambda node: str(node.outputs[0].name))


def _depends_on(term: Term, variables: Iterable[Variable]) -> bool:
    wanted = set(variables)
    return any(variable in wanted for variable in ancestors([term.log_density]))


def _separate_minibatch_model(model: Model, terms: dict[str, Term], nodes: list) -> SeparatedModel:
    groups: dict[Variable, list] = {}
    for node in nodes:
        # One `pm.Minibatch` call can stand in the graph as several nodes; its generator
        # is the only thing that they are sure to share.
        groups.setdefault(node.inputs[-1], []).append(node)

    leaves: list[RowLeaf] = []
    lengths: list[int] = []
    for group in groups.values():
        outputs = [list(same) for same in zip(*(node.outputs[:-1] for node in group), strict=True)]
        for variables, source in zip(outputs, group[0].inputs[:-1], strict=True):
            values = np.asarray(_value(source))
            name = source.name or f"array of shape {values.shape} in pm.Minibatch"
            leaves.append(RowLeaf(name, tuple(variables), values))
        lengths.append(leaves[-1].values.shape[0])

    used = {
        term.name: [leaf for leaf in leaves if _depends_on(term, leaf.variables)]
        for term in terms.values()
    }
    _refuse_unscaled(model, used)
    if len(groups) > 1:
        _refuse_separate_calls(leaves, lengths)

    n_rows = lengths[0]
    batch_size = _minibatch_size(nodes[0])
    if batch_size > n_rows:
        raise ModelError(
            f"`pm.Minibatch` asks for {batch_size} rows of data that have {n_rows}. Give a "
            f"`batch_size` between 1 and {n_rows}."
        )
    observed = {variable.name: variable for variable in model.observed_RVs}
    for name, row_leaves in used.items():
        if row_leaves:
            _check_total_size(observed[name], n_rows)
    return SeparatedModel(
        tuple(terms[name] for name, row_leaves in used.items() if not row_leaves),
        tuple(terms[name] for name, row_leaves in used.items() if row_leaves),
        tuple(leaf for leaf in leaves if any(leaf in row_leaves for row_leaves in used.values())),
        n_rows,
        batch_size,
    )


def _refuse_unscaled(model: Model, used: dict[str, list[RowLeaf]]) -> None:
    potentials = {potential.name for potential in model.potentials}
    free = {variable.name for variable in model.free_RVs}
    for name, row_leaves in used.items():
        if not row_leaves:
            continue
        if name in potentials:
            raise ModelError(
                f"The potential `{name}` depends on minibatched data. PyMC does not scale "
                "potentials to the full data, so its weight would be wrong by N/n. Write it as "
                "an observed variable with `total_size`, for example `pm.CustomDist`, or build "
                "the model on the full arrays and pass `batch_size` to the step method."
            )
        if name in free:
            raise ModelError(
                f"The free variable `{name}` depends on minibatched data, so its prior would "
                "change with the rows drawn. Only observed variables may depend on "
                "`pm.Minibatch`."
            )


def _refuse_separate_calls(leaves: list[RowLeaf], lengths: list[int]) -> None:
    names = ", ".join(f"`{leaf.name}`" for leaf in leaves)
    if len(set(lengths)) > 1:
        raise ModelError(
            f"The model minibatches two blocks of data with different numbers of rows "
            f"({sorted(lengths)}). One set of rows must drive the whole likelihood: "
            "minibatch one block and give the other in full."
        )
    raise ModelError(
        f"The minibatched data come from {len(lengths)} separate `pm.Minibatch` calls "
        f"({names}), which draw different rows, so predictors and outcome do not belong "
        "together. Use a single call: `X_batch, y_batch = pm.Minibatch(X, y, batch_size=...)`."
    )


def _check_total_size(variable: TensorVariable, n_rows: int) -> None:
    total_size = _total_size(variable)
    if total_size is None or not total_size or total_size[0] is None:
        raise ModelError(
            f"The observed variable `{variable.name}` uses minibatched data but has no "
            f"`total_size`, so its likelihood would count n rows instead of {n_rows}. Pass "
            f"`total_size={n_rows}` to it."
        )
    if total_size[0] != n_rows:
        raise ModelError(
            f"The observed variable `{variable.name}` has total_size={total_size[0]}, but its "
            f"data have {n_rows} rows: the likelihood would be scaled by "
            f"{total_size[0] / n_rows:.3g}. Pass `total_size={n_rows}`."
        )
    if any(size is not None for size in total_size[1:]):
        raise ModelError(
            f"The observed variable `{variable.name}` has total_size={total_size}. Only the "
            f"leading axis can be subsampled: pass `total_size={n_rows}`."
        )


def _minibatch_size(node) -> int:
    length = node.outputs[0].type.shape[0]
    if length is not None:
        return int(length)
    return int(pt.shape(node.outputs[0])[0].eval(mode=PYTHON_MODE))


# --- Ordinary models ----------------------------------------------------------------------


def _separate_ordinary_model(
    model: Model, terms: dict[str, Term], rows: str | Sequence[str] | None
) -> SeparatedModel:
    observed_lengths = _observed_lengths(model)
    chosen_names, named_data = _resolve_rows(model, rows, observed_lengths)
    lengths = {name: observed_lengths[name] for name in chosen_names}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"`{name}` has {length}" for name, length in lengths.items())
        raise ModelError(
            f"The observed variables have different numbers of rows ({listed}), so one set of "
            "rows cannot drive them all. Name those to subsample, for example "
            f'`rows=["{next(iter(lengths))}"]`; the others are then evaluated in full.'
        )
    if not lengths:
        raise ModelError(
            "No observed variable has a leading axis of rows, so there is nothing to subsample. "
            "Sample the model with NUTS: `pm.sample()`."
        )
    n_rows = next(iter(lengths.values()))
    if n_rows < 2:
        raise ModelError(f"The data have {n_rows} row, so there is nothing to subsample.")

    full_names = set(observed_lengths) - set(chosen_names)
    candidates: dict[Variable, RowLeaf] = {}
    row_terms: list[Term] = []
    full_terms: list[Term] = []
    free = {variable.name for variable in model.free_RVs}
    data_names = {variable: variable.name for variable in model.data_vars}
    for term in terms.values():
        leaves = {}
        if term.name not in free and term.name not in full_names:
            leaves = _row_leaves(term, n_rows, named_data, data_names)
        if leaves:
            candidates.update(leaves)
            row_terms.append(term)
        else:
            full_terms.append(term)
    missing = set(chosen_names) - {term.name for term in row_terms}
    if missing:
        raise ModelError(
            f"The data of the observed variable `{missing.pop()}` were not found in its log "
            "density as an array with one entry a row. Pass the data as an array or `pm.Data`."
        )
    return SeparatedModel(
        tuple(full_terms), tuple(row_terms), tuple(candidates.values()), n_rows, None
    )


def _observed_lengths(model: Model) -> dict[str, int]:
    """Leading length of the data of each observed variable that has an axis."""
    lengths = {}
    for variable in model.observed_RVs:
        values = model.rvs_to_values[variable]
        if values.type.ndim == 0:
            continue
        length = values.type.shape[0]
        lengths[variable.name] = (
            int(length) if length is not None else int(_value(pt.shape(values)[0]))
        )
    return lengths


def _resolve_rows(
    model: Model, rows: str | Sequence[str] | None, observed_lengths: dict[str, int]
) -> tuple[list[str], set[str] | None]:
    """Names of the observed variables to subsample, and of the data variables if given."""
    if rows is None:
        return list(observed_lengths), None
    names = [rows] if isinstance(rows, str) else list(rows)
    data_names = {variable.name for variable in model.data_vars}
    observed: list[str] = []
    named_data: set[str] = set()
    for name in names:
        with_dim = [
            variable
            for variable, dims in model.named_vars_to_dims.items()
            if dims and dims[0] == name
        ]
        if name in observed_lengths:
            observed.append(name)
        elif name in data_names:
            named_data.add(name)
        elif with_dim:
            observed += [variable for variable in with_dim if variable in observed_lengths]
            named_data |= {variable for variable in with_dim if variable in data_names}
        else:
            raise ModelError(
                f"`rows` names `{name}`, which is no observed variable, data variable or "
                f"dimension of the model. Observed variables: {sorted(observed_lengths)}; data "
                f"variables: {sorted(data_names)}; dimensions: {sorted(model.coords)}."
            )
    if not observed:
        wanted = {
            int(_value(pt.shape(variable)[0]))
            for variable in model.data_vars
            if variable.name in named_data
        }
        observed = [name for name, length in observed_lengths.items() if length in wanted]
    return observed, named_data or None


def _row_leaves(
    term: Term,
    n_rows: int,
    named_data: set[str] | None,
    data_names: dict[Variable, str],
) -> dict[Variable, RowLeaf]:
    leaves = {}
    for variable in ancestors([term.log_density]):
        values = _leaf_values(variable)
        if values is None or values.ndim == 0 or values.shape[0] != n_rows:
            continue
        is_named = variable in data_names
        if named_data is not None and is_named and data_names[variable] not in named_data:
            continue
        name = variable.name or f"array of shape {values.shape} in `{term.name}`"
        leaves[variable] = RowLeaf(name, (variable,), values)
    return leaves


def _leaf_values(variable: Variable) -> np.ndarray | None:
    if not isinstance(variable.type, TensorType):
        return None
    if isinstance(variable, Constant):
        return np.asarray(variable.data)
    if isinstance(variable, SharedVariable):
        return np.asarray(variable.get_value(borrow=True))
    return None


# --- Lengths that a graph has frozen in ----------------------------------------------------


def _with_rows(
    terms: list[TensorVariable],
    replacements: dict[Variable, Variable],
    stale: frozenset[int],
    length: TensorVariable,
) -> list[TensorVariable]:
    """Rebuild terms on other data, and on their length where the old one is frozen in.

    ``pt.zeros(N)``, ``x.reshape((N, -1))`` and the static shapes that distributions assert
    keep the number of rows of the data that the model was built with. Nodes are made anew,
    not replaced in place, because in-place replacement would assert the old static shapes.
    """
    rebuilt = dict(replacements)
    for node in toposort(terms):
        if all(output in rebuilt for output in node.outputs):
            continue
        inputs = [rebuilt.get(variable, variable) for variable in node.inputs]
        outputs = _without_stale_length(node, inputs, stale, length)
        if outputs is None:
            outputs = node.clone_with_new_inputs(inputs, strict=False).outputs
        for old, new in zip(node.outputs, outputs, strict=True):
            rebuilt.setdefault(old, new)
    return [rebuilt.get(term, term) for term in terms]


def _without_stale_length(
    node: Apply, inputs: list[Variable], stale: frozenset[int], length: TensorVariable
) -> list[Variable] | None:
    """Outputs of a node with the old number of rows replaced, None where it has none."""
    match node.op:
        case SpecifyShape() if _is_stale(node.inputs[1], stale):
            return [inputs[0]]
        case Alloc() if len(inputs) > 1 and _is_stale(node.inputs[1], stale):
            return [pt.alloc(inputs[0], length, *inputs[2:])]
        case ARange() if _is_stale(node.inputs[1], stale):
            return [pt.arange(inputs[0], length, inputs[2], dtype=node.op.dtype)]
        case Reshape():
            shape = _fresh_shape(node.inputs[1], stale, length)
            return None if shape is None else [inputs[0].reshape(shape, ndim=node.op.ndim)]
    return None


def _is_stale(variable: Variable, stale: frozenset[int]) -> bool:
    try:
        value = get_underlying_scalar_constant_value(variable)
    except NotScalarConstantError:
        return False
    return value is not None and int(value) in stale


def _fresh_shape(
    shape: Variable, stale: frozenset[int], length: TensorVariable
) -> TensorVariable | None:
    if isinstance(shape, Constant) and shape.data.size and int(shape.data[0]) in stale:
        return pt.stack([length, *[pt.constant(int(size)) for size in shape.data[1:]]])
    if (
        shape.owner is not None
        and isinstance(shape.owner.op, MakeVector)
        and _is_stale(shape.owner.inputs[0], stale)
    ):
        return pt.stack([length, *shape.owner.inputs[1:]])
    return None


# --- Values --------------------------------------------------------------------------------


def _value(variable: Variable) -> np.ndarray:
    values = _leaf_values(variable)
    return values if values is not None else variable.eval(mode=PYTHON_MODE)
