"""Local variables of a model that are better integrated out than sampled."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from math import prod

from pymc.model import Model

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.marginal.codes import EmptyGroupsError
from pymc_sgmcmc.marginal.structure import LocalStructure, find_structure
from pymc_sgmcmc.posterior.graphs import shape_of

_log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold

FEWEST_GROUPS = 20
"""Variables of fewer entries are left in the model, since a minibatch touches most of so few
groups."""

MOST_RECORDS = 100
"""With more records a group the variables of few groups are left in the model: they are known so
well that the joint posterior is close to a Gaussian, and a transition reads whole groups."""

MOST_COORDINATES = 500
"""Positions with more coordinates have no dense curvature (`DENSE_DIMENSION` of `tuning`). Local
variables that make a position so long are better integrated out, however many records a group
has."""


def local_structures(
    model: Model, fewest: int = FEWEST_GROUPS
) -> tuple[list[LocalStructure], list[LocalStructure]]:
    """Structures of local variables to integrate out, and of those to leave in the model.

    The latter have large groups. Both begin with the structures of most groups, and of variables
    for the same groups all together come before each by itself. None has fewer groups than given.
    """
    structures = [
        structure
        for names in _candidates(model, fewest)
        if (structure := _structure(model, names)) is not None
        and fewest <= structure.n_groups <= structure.n_records
    ]
    if not structures:
        return [], []
    structures.sort(key=lambda structure: -structure.n_groups)
    coordinates = sum(prod(shape_of(variable)) for variable in model.free_RVs)
    worthwhile = [each for each in structures if _is_worthwhile(each, coordinates)]
    return worthwhile, [each for each in structures if each not in worthwhile]


def _candidates(model: Model, fewest: int) -> Iterator[list[str]]:
    """Names of free variables that have many entries, by the length of their first axis."""
    by_length: dict[int, list[str]] = {}
    for variable in model.free_RVs:
        if variable.type.ndim and (length := shape_of(variable)[0]) >= fewest:
            by_length.setdefault(length, []).append(str(variable.name))
    for names in by_length.values():
        yield names
        if len(names) > 1:
            yield from ([name] for name in names)


def _structure(model: Model, names: list[str]) -> LocalStructure | None:
    try:
        return find_structure(model, names, on_source=True)
    except EmptyGroupsError as error:
        if len(names) == 1:
            _log.info("`%s` stays in the model: %s", names[0], error)
    except ModelError:
        pass  # They are no local variables.
    return None


def _is_worthwhile(structure: LocalStructure, coordinates: int) -> bool:
    """Whether groups are small, or make a position of so many coordinates too long."""
    local = structure.n_groups * structure.block_size
    are_small = structure.n_records <= MOST_RECORDS * structure.n_groups
    make_it_long = coordinates - local <= MOST_COORDINATES < coordinates or local > MOST_COORDINATES
    return are_small or make_it_long
