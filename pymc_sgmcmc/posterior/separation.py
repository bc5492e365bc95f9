"""Separate the rows of a model's data from everything else.

A posterior can be subsampled when its log density is a prior part plus a sum over rows. This
module finds that split in the graph of a PyMC model, in one of two ways:

* models built with `pymc.Minibatch` and ``total_size``: the outputs of the minibatch nodes are
  the rows, their inputs the full data;
* ordinary models: the observed variables and all data arrays (constants and `pymc.Data`) that
  share their leading length are the rows.

Models without data have the prior and the potentials alone for a target, and two rows of log
likelihood zero.

The split is not trusted: `pymc_sgmcmc.posterior.check` evaluates it numerically.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytensor
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.type import TensorType

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.graphs import minibatch_nodes, rebuild, shape_of
from pymc_sgmcmc.posterior.minibatch_rows import separate_minibatch_model
from pymc_sgmcmc.posterior.ordinary_rows import Shapes, separate_ordinary_model
from pymc_sgmcmc.posterior.rows import RowLeaf, SeparatedModel, Term, is_whole
from pymc_sgmcmc.posterior.terms import model_terms
from pymc_sgmcmc.posterior.unsupported import check_parameters, refuse_unsupported

NO_DATA = "no_data"
"""The rows that stand for no data have this name."""

STANDING_ROWS = 2
"""So many rows of log likelihood zero stand for no data, since minibatches need two."""


def separate_rows(
    model: Model,
    rows: str | Sequence[str] | None = None,
    *,
    needs_rows: bool = True,
    checked: bool = False,
    shapes: Shapes | None = None,
) -> SeparatedModel:
    """Split the log density of a model into a part without rows and a sum over rows.

    Parameters
    ----------
    model : pymc.Model
        With or without `pymc.Minibatch`.
    rows : str or sequence of str, optional
        Only needed for ordinary models in which it is ambiguous which data run over the rows:
        names of observed variables, of `pymc.Data` variables, or of a dimension. Where data
        variables are named, the other data variables are not subsampled. Arrays without a name are
        subsampled if they have as many rows.
    needs_rows : bool
        Whether a model whose observed variables have no rows is refused. Otherwise all of its terms
        are evaluated in full.
    checked : bool
        Whether the log density is minus infinity where a parameter of a distribution is invalid.
    shapes : mapping, optional
        Shapes of the value variables of which each row may have an entry.

    Raises
    ------
    ModelError
        Where the rows cannot be told apart; the message names the variable and what to pass.
    """
    without_rows = not needs_rows and rows is None and not _has_rows(model)
    if not model.observed_RVs and not model.potentials and not without_rows:
        raise ModelError(
            "The model has no observed variables, and so no rows to subsample. Sample it with "
            "NUTS: `pm.sample()`."
        )
    for variable in model.observed_RVs:
        check_parameters(model, variable)
    terms = model_terms(model, checked=checked)
    for term in terms.values():
        refuse_unsupported(term)
    if without_rows:
        return _own_shared(_separate_without_rows(terms))
    nodes = minibatch_nodes([term.log_density for term in terms.values()])
    if not nodes:

        def by_row() -> SeparatedModel | None:
            with suppress(ModelError):
                return _own_shared(separate_ordinary_model(model, terms, rows, shapes))
            return None

        separated = _own_shared(separate_ordinary_model(model, terms, rows))
        return replace(separated, by_row=by_row if shapes else None)
    if rows is not None:
        raise ModelError(
            "`rows` is for ordinary models, but this one uses `pm.Minibatch`. Leave `rows` out, "
            "or build the model on the full arrays."
        )
    return _own_shared(separate_minibatch_model(model, terms, nodes))


def _has_rows(model: Model) -> bool:
    """Whether an observed variable has two rows or more along its first axis."""
    lengths = [shape_of(model.rvs_to_values[variable])[:1] for variable in model.observed_RVs]
    return any(length and length[0] > 1 for length in lengths)


def _separate_without_rows(terms: dict[str, Term]) -> SeparatedModel:
    """All terms in full, beside rows of log likelihood zero.

    With these rows every part of the package that handles rows stays as it is.
    """
    standing = pytensor.shared(np.zeros(STANDING_ROWS), NO_DATA, shape=(None,))
    values = standing.get_value(borrow=True)
    leaf = RowLeaf(NO_DATA, (standing,), values)
    return SeparatedModel(
        tuple(terms.values()), (Term(NO_DATA, 0.0 * standing),), (leaf,), STANDING_ROWS, None
    )


def _own_shared(separated: SeparatedModel) -> SeparatedModel:
    """Replace shared variables of the model by copies, so that `pymc.set_data` changes nothing.

    The rows are copied in any case. If the rest used the variables of the model, a change of its
    data would change only one part of the posterior.
    """
    # Variables that stand for rows stay as they are, since they are replaced later.
    rows = {variable for leaf in separated.leaves for variable in leaf.variables}
    rows.update(separated.lengths)
    full_terms, copied = _on_copies(separated.full_terms, set())
    row_terms, of_rows = _on_copies(separated.row_terms, rows)
    # Lengths of dimensions that run over the rows are those of the rows.
    return replace(
        separated,
        full_terms=full_terms,
        row_terms=row_terms,
        copied=separated.copied + copied + of_rows,
    )


def _on_copies(
    terms: Sequence[Term], kept: set[Variable]
) -> tuple[tuple[Term, ...], tuple[tuple[SharedVariable, np.ndarray], ...]]:
    """Terms on copies of their shared variables, and the variables with their values."""
    graphs = [term.log_density for term in terms]
    values = {
        variable: variable.get_value()
        for variable in ancestors(graphs, blockers=kept)
        if isinstance(variable, SharedVariable) and isinstance(variable.type, TensorType)
        # In the terms of rows their own variables stay, and nobody else has whole arrays.
        if variable not in kept and not is_whole(variable)
    }
    copies: dict[Variable, Variable] = {
        variable: pytensor.shared(value, variable.name, shape=variable.type.shape)
        for variable, value in values.items()
    }
    copies.update((variable, variable) for variable in kept)
    on_copies = tuple(
        replace(term, log_density=graph)
        for term, graph in zip(terms, rebuild(graphs, copies), strict=True)
    )
    return on_copies, tuple(values.items())
