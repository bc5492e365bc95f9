"""Local variables of a model that are better integrated out than sampled."""

from __future__ import annotations

from collections.abc import Iterator

from pymc.model import Model

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.marginal.structure import LocalStructure, find_structure
from pymc_sgmcmc.posterior.graphs import shape_of

FEWEST_GROUPS = 20
"""Variables of fewer entries are left in the model, since a minibatch touches most of so few
groups."""

MOST_RECORDS = 100
"""With more records a group the variables of few groups are left in the model: they are known so
well that the joint posterior is close to a Gaussian, and a transition reads whole groups."""

FEW_GROUPS = 500
"""With more groups than this the position would have no dense curvature, so that they are better
integrated out whatever their size."""


def local_structures(model: Model) -> list[LocalStructure]:
    """Structures of local variables to integrate out, from the one with the most groups.

    Of variables for the same groups, all together come before each by itself.
    """
    structures = [
        structure
        for names in _candidates(model)
        if (structure := _structure(model, names)) is not None and _is_worthwhile(structure)
    ]
    return sorted(structures, key=lambda structure: -structure.n_groups)


def _candidates(model: Model) -> Iterator[list[str]]:
    """Names of free variables that have many entries, by the length of their first axis."""
    by_length: dict[int, list[str]] = {}
    for variable in model.free_RVs:
        if variable.type.ndim and (length := shape_of(variable)[0]) >= FEWEST_GROUPS:
            by_length.setdefault(length, []).append(str(variable.name))
    for names in by_length.values():
        yield names
        if len(names) > 1:
            yield from ([name] for name in names)


def _structure(model: Model, names: list[str]) -> LocalStructure | None:
    try:
        return find_structure(model, names, on_source=True)
    except ModelError:
        return None


def _is_worthwhile(structure: LocalStructure) -> bool:
    groups, records = structure.n_groups, structure.n_records
    few_records = records <= MOST_RECORDS * groups or groups > FEW_GROUPS
    return FEWEST_GROUPS <= groups < records and few_records
