"""The rows of a model with `pymc.Minibatch`: the arrays that its minibatch nodes draw from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pytensor.tensor as pt
from pymc.model import Model
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.elemwise import Elemwise

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.graphs import shape_of, value_of
from pymc_sgmcmc.posterior.rows import RowLeaf, SeparatedModel, Term, merge
from pymc_sgmcmc.posterior.terms import check_total_size


@dataclass(frozen=True, eq=False)
class _DrawnArray:
    """One argument of a `pymc.Minibatch` call."""

    name: str
    generator: Variable
    source: Variable
    variables: tuple[Variable, ...]


def _minibatch_arrays(model: Model, nodes: list) -> list[_DrawnArray]:
    groups: dict[Variable, list] = {}
    for node in nodes:
        # One `pm.Minibatch` call can be several nodes of the graph. Only its generator is sure to
        # be the same in all of them.
        groups.setdefault(node.inputs[-1], []).append(node)

    observed = {}
    for variable in model.observed_RVs:
        output = _without_casts(model.rvs_to_values[variable])
        if output.owner is not None:
            observed[output.owner.inputs[-1], output.index] = variable.name

    arrays = []
    for generator, group in groups.items():
        for index, source in enumerate(group[0].inputs[:-1]):
            name = (
                source.name or observed.get((generator, index)) or f"array {index} of pm.Minibatch"
            )
            variables = tuple(node.outputs[index] for node in group)
            arrays.append(_DrawnArray(name, generator, source, variables))
    return arrays


def _without_casts(variable: Variable) -> Variable:
    while variable.owner is not None and isinstance(variable.owner.op, Elemwise):
        variable = variable.owner.inputs[0]
    return variable


def _depends_on(term: Term, variables: Iterable[Variable]) -> bool:
    targets = set(variables)
    return any(variable in targets for variable in ancestors([term.log_density]))


def separate_minibatch_model(model: Model, terms: dict[str, Term], nodes: list) -> SeparatedModel:
    """Split of a model with `pymc.Minibatch`."""
    arrays = _minibatch_arrays(model, nodes)
    used = {
        term.name: [array for array in arrays if _depends_on(term, array.variables)]
        for term in terms.values()
    }
    _refuse_unscaled(model, used)
    leaves = {
        array: RowLeaf(array.name, array.variables, np.asarray(value_of(array.source)))
        for array in arrays
        if any(array in needed for needed in used.values())
    }
    _refuse_different_draws(leaves)

    n_rows = len(next(iter(leaves.values())).values)
    batch_size = _minibatch_size(nodes[0])
    if batch_size > n_rows:
        raise ModelError(
            f"`pm.Minibatch` should draw between 1 and {n_rows} rows, the number of rows of the "
            f"data, but draws {batch_size}. Give a smaller `batch_size`."
        )
    for variable in model.observed_RVs:
        drawn = bool(used[variable.name])
        lengths = shape_of(model.rvs_to_values[variable])
        check_total_size(variable, [n_rows, *lengths[1:]] if drawn else lengths, drawn)
    return SeparatedModel(
        tuple(terms[name] for name, needed in used.items() if not needed),
        tuple(terms[name] for name, needed in used.items() if needed),
        merge(leaves.values()),
        n_rows,
        batch_size,
    )


def _refuse_unscaled(model: Model, used: Mapping[str, list]) -> None:
    potentials = {potential.name for potential in model.potentials}
    free = {variable.name for variable in model.free_RVs}
    for name, needed in used.items():
        if needed and name in potentials:
            raise ModelError(
                f"The potential `{name}` depends on minibatched data, but PyMC does not scale "
                "potentials. Write an observed variable with `total_size`, or use the full arrays "
                "and pass `batch_size` to the step method."
            )
        if needed and name in free:
            raise ModelError(
                f"The prior of the free variable `{name}` depends on minibatched data, so it "
                "would change with the rows. Use `pm.Minibatch` for observed variables only."
            )


def _refuse_different_draws(leaves: Mapping[_DrawnArray, RowLeaf]) -> None:
    described = ", ".join(f"`{leaf.name}` of shape {leaf.values.shape}" for leaf in leaves.values())
    if len({len(leaf.values) for leaf in leaves.values()}) > 1:
        raise ModelError(
            f"The model minibatches data with different numbers of rows ({described}). Write it on "
            "the full arrays and pass `batch_size` to the step method, or give the other data in "
            "full."
        )
    calls = len({array.generator for array in leaves})
    if calls > 1:
        raise ModelError(
            f"The minibatched data come from {calls} separate `pm.Minibatch` calls ({described}), "
            "which draw different rows. Use a single call: "
            "`X_batch, y_batch = pm.Minibatch(X, y, batch_size=...)`."
        )


def _minibatch_size(node) -> int:
    length = node.outputs[0].type.shape[0]
    return int(value_of(pt.shape(node.outputs[0])[0])) if length is None else int(length)
