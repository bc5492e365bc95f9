"""The rows of an ordinary model: the data arrays that have as many rows as the outcomes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytensor.tensor as pt
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.subtensor import AdvancedSubtensor
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.bad_rows import WITHOUT_NAME
from pymc_sgmcmc.posterior.chosen_rows import Choices, choices_of_rows, on_chosen_rows
from pymc_sgmcmc.posterior.graphs import is_product, shape_of, value_of
from pymc_sgmcmc.posterior.pooled_rows import Block, pooled
from pymc_sgmcmc.posterior.reading import axes_of_length
from pymc_sgmcmc.posterior.rows import RowLeaf, SeparatedModel, Term, is_whole, merge
from pymc_sgmcmc.posterior.simplify import computed_once
from pymc_sgmcmc.posterior.terms import check_total_size

type Shapes = Mapping[Variable, tuple[int, ...]]
"""Shapes of free variables."""


def separate_ordinary_model(
    model: Model,
    terms: dict[str, Term],
    rows: str | Sequence[str] | None,
    by_row: Shapes | None = None,
) -> SeparatedModel:
    """Split of a model on the full data.

    Parameters
    ----------
    model : pymc.Model
    terms : dict
    rows : str or sequence of str, optional
    by_row : mapping, optional
        Free variables z to read as ``z[row]`` in terms that have as many rows as z has entries.
    """
    observed = {variable.name: variable for variable in model.observed_RVs}
    for variable in observed.values():
        check_total_size(variable, shape_of(model.rvs_to_values[variable]), drawn=False)
    lengths = _row_lengths(model, rows)
    longest = max(lengths, key=lambda name: lengths[name])
    if lengths[longest] < 2:
        raise _too_few_rows(model, longest)

    named_data = lengths.keys() - observed.keys()
    # Where data variables are named, the others have no rows, except the data variable as which
    # a named observed variable is observed.
    observations = [
        model.rvs_to_values[observed[name]] for name in lengths.keys() & observed.keys()
    ]
    left_out = {
        variable for variable in model.data_vars if named_data and variable.name not in named_data
    }.difference(ancestors(observations))
    choices = {name: choices_of_rows(term.log_density) for name, term in terms.items()}
    found = {
        name: _block(model, term, choices, lengths, left_out, by_row or {})
        for name, term in terms.items()
    }
    full_terms = tuple(terms[name] for name, block in found.items() if block is None)
    blocks = [block for block in found.values() if block is not None]
    names = {block.term.name for block in blocks}
    missing = {name for name in lengths.keys() & observed.keys() if lengths[name] > 1} - names
    if missing or not blocks:
        name = f"observed variable `{missing.pop()}`" if missing else "model"
        raise ModelError(
            f"The log density of the {name} has no array with one entry a row. Pass the data as "
            "an array or `pm.Data`."
        )
    numbers_of_rows = {block.n_rows for block in blocks}
    for name in named_data:
        if lengths[name] not in numbers_of_rows:
            raise ModelError(
                f"`rows` names `{name}`, which has {lengths[name]} rows, but no observed variable "
                "has as many. Name data with the rows of the outcomes."
            )
    row_terms = [block.term for block in blocks]
    copied = _left_behind(terms.values(), [*full_terms, *row_terms])
    leaves = [leaf for block in blocks for leaf in block.leaves.values()]
    n_rows = blocks[0].n_rows
    if len(numbers_of_rows) > 1:
        _refuse_groups(blocks)
        row_terms, leaves, n_rows = pooled(blocks)
    return SeparatedModel(
        full_terms,
        tuple(row_terms),
        merge(leaves),
        n_rows,
        None,
        tuple(length for each in numbers_of_rows for length in _lengths_of_rows(model, each)),
        copied=copied,
    )


def _left_behind(
    terms: Iterable[Term], kept: Iterable[Term]
) -> tuple[tuple[SharedVariable, np.ndarray], ...]:
    """Shared variables that rows were chosen from, with copies of their values."""
    after = set(ancestors([term.log_density for term in kept]))
    return tuple(
        (each, each.get_value())
        for each in ancestors([term.log_density for term in terms])
        if isinstance(each, SharedVariable) and each not in after
    )


def _block(
    model: Model,
    term: Term,
    choices: Mapping[str, Choices],
    lengths: Mapping[str, int],
    left_out: Collection[Variable],
    by_row: Shapes,
) -> Block | None:
    """A term with its rows, None where it is to be evaluated in full."""
    possible = {lengths[term.name]} if term.name in lengths else set()
    if term.name in {potential.name for potential in model.potentials}:
        # Such as that of the rows that are censored, where the others are observed.
        tables = set(lengths.values()) | {
            choice.length
            for name, length in lengths.items()
            for choice in choices.get(name, {}).values()
            if len(choice.numbers) == length
        }
        of_term = choices[term.name].values()
        chosen = {len(choice.numbers) for choice in of_term if choice.length in tables}
        possible = chosen or set(lengths.values())
        if not term.log_density.type.ndim and (chosen or len(possible) > 1):
            return None  # A sum does not say which records it is over.
    blocks = []
    for length in possible:
        graph = on_chosen_rows(term.log_density, choices[term.name], length)
        graph = _with_entries_of_rows(graph, by_row, length)
        computed = replace(term, log_density=computed_once(graph, length))
        if length > 1 and (leaves := _row_leaves(computed, length, left_out)):
            blocks.append(Block(computed, leaves, length))
    return blocks[0] if len(blocks) == 1 else None


def _with_entries_of_rows(graph: TensorVariable, by_row: Shapes, n_rows: int) -> TensorVariable:
    """The same, with ``z[row]`` for z, where the number of the row is one of the data."""
    axes = {each: shape.index(n_rows) for each, shape in by_row.items() if n_rows in shape}
    if not axes:
        return graph  # There may be many rows to number.
    number = pt.constant(np.arange(n_rows), name="number of the row")
    entries: dict[Variable, Variable] = {
        each: each[(slice(None),) * axis + (number,)]
        for each, axis in axes.items()
        if not _is_taken_together(each, axis, graph)
    }
    return clone_replace([graph], entries, rebuild_strict=False)[0]


def _is_taken_together(variable: Variable, axis: int, graph: Variable) -> bool:
    """Whether a graph selects entries along an axis by an index, or adds them up in a product."""
    axes = {variable: axis - variable.type.ndim}  # from the last one, as they are broadcast
    for node in toposort([graph]):
        for place, each in enumerate(node.inputs):
            if (at := axes.get(each)) is None:
                continue
            if isinstance(node.op, AdvancedSubtensor) and not place:
                return True
            if is_product(node) and at == -1 - place:
                return True
            if isinstance(node.op, Elemwise) or is_product(node):
                axes[node.outputs[0]] = at
            elif isinstance(node.op, DimShuffle):
                order = node.op.new_order
                axes[node.outputs[0]] = order.index(each.type.ndim + at) - len(order)
    return False


def _refuse_groups(blocks: Sequence[Block]) -> None:
    """Refuse rows that are groups of records beside rows of another number.

    Raises
    ------
    ModelError
    """
    lengths = {block.term.name: block.n_rows for block in blocks}
    if any(map(is_whole, ancestors([block.term.log_density for block in blocks]))):
        listed = ", ".join(f"`{name}` has {length}" for name, length in lengths.items())
        raise ModelError(
            f"Rows that are groups and other rows should be as many, but {listed}. Name those to "
            f'subsample, for example `rows=["{max(lengths, key=lambda name: lengths[name])}"]`; '
            "the others are then evaluated in full."
        )


def _too_few_rows(model: Model, name: str) -> ModelError:
    """Error for data that have fewer than two rows."""
    shape = tuple(shape_of(model.rvs_to_values.get(model[name], model[name])))
    advice = (
        "Transpose the data, so that the rows come first."
        if max(shape) > 1
        else "Give all of the data, or sample the model with NUTS: `pm.sample()`."
    )
    return ModelError(
        f"`{name}` should have at least 2 rows to subsample, but has {shape[0]}, since its shape "
        f"is {shape}. {advice}"
    )


def _row_lengths(model: Model, rows: str | Sequence[str] | None) -> dict[str, int]:
    """Numbers of rows of the observed variables to subsample and of the data variables named."""
    observed, data = (
        {
            each.name: shape[0]
            for each in of
            if (shape := shape_of(model.rvs_to_values.get(each, each)))
        }
        for of in (model.observed_RVs, model.data_vars)
    )
    if rows is None:
        if observed:
            return observed
        raise ModelError(
            "No observed variable has rows along its first axis to subsample. "
            + (
                "If a potential is the likelihood, name its data, for example "
                '`rows=["X"]` with a `pm.Data` variable `X`.'
                if model.potentials
                else "Sample the model with NUTS: `pm.sample()`."
            )
        )

    if not rows:
        raise ModelError(f"`rows` should name the data that run over the rows, but is {rows!r}.")
    lengths: dict[str, int] = {}
    for entry in [rows] if isinstance(rows, str) else rows:
        name = entry if entry in observed or entry in data else model.name_for(entry)
        over_dimension = [
            variable for variable, dims in model.named_vars_to_dims.items() if entry in dims[:1]
        ]
        names = [name for name in [name, *over_dimension] if name in observed or name in data]
        if not names:
            raise ModelError(
                f"`rows` names `{entry}`, which is no observed variable, data variable or "
                f"dimension with rows. Observed variables are {sorted(observed)}, data variables "
                f"{sorted(data)}, and dimensions {sorted(model.coords)}."
            )
        lengths |= {name: (data | observed)[name] for name in names}
    if not observed.keys() & lengths.keys():
        numbers_of_rows = set(lengths.values())
        lengths = {
            name: length for name, length in observed.items() if length in numbers_of_rows
        } | lengths
    return lengths


def _row_leaves(term: Term, n_rows: int, left_out: Collection[Variable]) -> dict[Variable, RowLeaf]:
    """Arrays in a term that have as many entries along one axis as there are rows."""
    leaves = {}
    for variable, axis in axes_of_length(term.log_density, n_rows, left_out).items():
        values = value_of(variable)
        name = variable.name or f"{WITHOUT_NAME} {values.shape} in {term.name}"
        if axis:
            values = np.ascontiguousarray(np.moveaxis(values, axis, 0))
        leaves[variable] = RowLeaf(name, (variable,), values, axis)
    return leaves


def _lengths_of_rows(model: Model, n_rows: int) -> tuple[Variable, ...]:
    """Shared lengths of dimensions that are as long as the data and that no parameter has."""
    of_parameters = {
        dimension
        for variable in model.free_RVs
        for dimension in model.named_vars_to_dims.get(variable.name, ())
    }
    return tuple(
        length
        for name, length in model.dim_lengths.items()
        if name not in of_parameters
        and isinstance(length, SharedVariable)
        and int(length.get_value()) == n_rows
    )
