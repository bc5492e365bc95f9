"""The rows of a model with `pymc.Minibatch`: the arrays that its minibatch nodes draw from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from pymc.model import Model
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import ancestors

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.graphs import shape_of, value_of
from pymc_sgmcmc.posterior.reading import before_casts
from pymc_sgmcmc.posterior.rows import RowLeaf, SeparatedModel, Term, merge
from pymc_sgmcmc.posterior.terms import check_total_size


def separate_minibatch_model(
    model: Model, terms: Mapping[str, Term], nodes: Sequence[Apply]
) -> SeparatedModel:
    """Split of a model with `pymc.Minibatch`."""
    reached = {name: set(ancestors([term.log_density])) for name, term in terms.items()}
    leaves = _drawn_arrays(model, nodes, set().union(*reached.values()))
    drawn = {variable for leaf in leaves for variable in leaf.variables}
    of_rows = [name for name, found in reached.items() if not drawn.isdisjoint(found)]
    _refuse_unscaled(model, of_rows)
    _refuse_different_draws(leaves)

    n_rows, batch_size = len(leaves[0].values), shape_of(nodes[0].outputs[0])[0]
    if batch_size > n_rows:
        raise ModelError(
            f"`pm.Minibatch` should draw between 1 and {n_rows} rows, the number of rows of the "
            f"data, but draws {batch_size}. Give a smaller `batch_size`."
        )
    for variable in model.observed_RVs:
        is_drawn, lengths = variable.name in of_rows, shape_of(model.rvs_to_values[variable])
        check_total_size(variable, [n_rows, *lengths[1:]] if is_drawn else lengths, is_drawn)
    return SeparatedModel(
        tuple(term for name, term in terms.items() if name not in of_rows),
        tuple(terms[name] for name in of_rows),
        merge(leaves),
        n_rows,
        batch_size,
    )


def _drawn_arrays(
    model: Model, nodes: Sequence[Apply], reached: AbstractSet[Variable]
) -> list[RowLeaf]:
    """Arguments of `pymc.Minibatch` calls that terms depend on."""
    outputs: dict[tuple[Variable, int], list[Variable]] = {}
    for node in nodes:
        # One call can be several nodes of the graph. Only its generator is sure to be the same in
        # all of them.
        for index, output in enumerate(node.outputs):
            outputs.setdefault((node.inputs[-1], index), []).append(output)
    observed = {before_casts(model.rvs_to_values[rv]): rv.name for rv in model.observed_RVs}
    names = {
        (output.owner.inputs[-1], output.index): name
        for output, name in observed.items()
        if output.owner is not None
    }
    leaves = []
    for (generator, index), variables in outputs.items():
        if reached.isdisjoint(variables):
            continue
        source = variables[0].owner.inputs[index]
        name = source.name or names.get((generator, index), f"array {index} of pm.Minibatch")
        leaves.append(RowLeaf(name, tuple(variables), np.asarray(value_of(source))))
    return leaves


def _refuse_unscaled(model: Model, names: Sequence[str]) -> None:
    potentials = {potential.name for potential in model.potentials}
    free = {variable.name for variable in model.free_RVs}
    for name in names:
        if name in potentials:
            raise ModelError(
                f"The potential `{name}` depends on minibatched data, but PyMC does not scale "
                "potentials. Write an observed variable with `total_size`, or use the full arrays "
                "and pass `batch_size` to the step method."
            )
        if name in free:
            raise ModelError(
                f"The prior of the free variable `{name}` depends on minibatched data, so it "
                "would change with the rows. Use `pm.Minibatch` for observed variables only."
            )


def _refuse_different_draws(leaves: Sequence[RowLeaf]) -> None:
    described = ", ".join(f"`{leaf.name}` of shape {leaf.values.shape}" for leaf in leaves)
    if len({len(leaf.values) for leaf in leaves}) > 1:
        raise ModelError(
            f"The model minibatches data with different numbers of rows ({described}). Write it on "
            "the full arrays and pass `batch_size` to the step method, or give the other data in "
            "full."
        )
    calls = len({leaf.variables[0].owner.inputs[-1] for leaf in leaves})
    if calls > 1:
        raise ModelError(
            f"The minibatched data come from {calls} separate `pm.Minibatch` calls ({described}), "
            "which draw different rows. Use a single call: "
            "`X_batch, y_batch = pm.Minibatch(X, y, batch_size=...)`."
        )
