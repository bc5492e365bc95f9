"""Local variables of a model that can be integrated out, and those that are better so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from pymc.model import Model
from pytensor.graph.traversal import toposort
from pytensor.scalar.basic import Mul, TrueDiv
from pytensor.tensor.subtensor import AdvancedSubtensor

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.errors import ModelError, NotTogetherError
from pymc_sgmcmc.marginal.check import checked_density
from pymc_sgmcmc.marginal.exact import is_quadratic
from pymc_sgmcmc.marginal.quadrature import MOST_QUADRATURE_SIZE, call_of
from pymc_sgmcmc.marginal.structure import LocalStructure, find_structure
from pymc_sgmcmc.posterior.effects import normal_prior
from pymc_sgmcmc.posterior.graphs import is_product, shape_of

FEWEST_IN_NEED = 2
"""Where the joint posterior is far from Gaussian, variables of so few groups are integrated out."""

FEWEST_GROUPS = 20
"""Variables of fewer entries are left in the model, since a minibatch touches most of so few
groups."""

MOST_RECORDS = 100
"""With more records a group the variables of few groups are left in the model: they are known so
well that the joint posterior is close to a Gaussian, and a transition reads whole groups."""

MOST_COORDINATES = 500
"""Positions with more coordinates have no dense curvature (`DENSE_DIMENSION` of `tuning`). Several
local variables of a group that make a position so long are better integrated out, however many
records a group has."""

MOST_JOINT = 5000
"""Normal effects of one factor stay in the model up to so many coordinates. With binary outcomes in
groups of 10 a run of 4000 draws takes 30 s in place of 77 for 3000 groups, and 72 in place of 39
for 8000: transitions of the joint model cost in proportion to the groups, and those of groups do
not."""


def local_structures(
    model: Model, fewest: int = FEWEST_GROUPS, *, with_coordinates: bool = True
) -> tuple[list[LocalStructure], list[LocalStructure]]:
    """Structures of local variables to integrate out, and of those to leave in the model.

    The latter have large groups, or are normal effects that have coordinates of their own in the
    model, see `pymc_sgmcmc.posterior.effect_coordinates`: of several factors, or in no more than
    `MOST_JOINT` coordinates. Both begin with the structures of most groups, and of variables for
    the same groups all together come before each by itself. None has fewer groups than given.

    Parameters
    ----------
    model : pymc.Model
    fewest : int
    with_coordinates : bool
        Whether the step method moves effects in coordinates of their own.
    """
    structures, worthwhile = _sorted_structures(model, fewest)
    if worthwhile and with_coordinates:
        every = list(_structures(model, FEWEST_IN_NEED))
        whole = [each for each in every if not any(_is_part(each, other) for other in every)]
        crossed = sum(_is_factor(model, each) for each in whole) > 1
        count = _n_coordinates(model)

        def stays(structure: LocalStructure) -> bool:
            return _is_normal(model, structure) and (crossed or count <= MOST_JOINT)

        worthwhile = [each for each in worthwhile if not stays(each)]
    return worthwhile, [each for each in structures if each not in worthwhile]


def _n_coordinates(model: Model) -> int:
    return sum(prod(shape_of(variable)) for variable in model.free_RVs)


def _sorted_structures(
    model: Model, fewest: int
) -> tuple[list[LocalStructure], list[LocalStructure]]:
    """Structures in this order, and those that are worthwhile where there is one factor."""
    structures = sorted(_structures(model, fewest), key=lambda structure: -structure.n_groups)
    coordinates = _n_coordinates(model)
    return structures, [each for each in structures if _is_worthwhile(each, coordinates)]


def structure_of(model: Model, names: Sequence[str], *, on_source: bool = False) -> LocalStructure:
    """`find_structure`, whose refusal names what can be integrated out in place of the names."""
    try:
        return find_structure(model, names, on_source=on_source)
    except NotTogetherError as error:
        call = remedy(model, names)
        advice = "Sample the model as it is" if call is None else f"{call} is possible"
        raise ModelError(f"{error} {advice}.") from None


def remedy(model: Model, names: Sequence[str] = ()) -> str | None:
    """What integrates local variables out of a model, as a call that it accepts, or None.

    Parameters
    ----------
    model : pymc.Model
    names : sequence of str
        The call is for some of these variables, for any where there are none.
    """
    for structure in sorted(_structures(model, FEWEST_IN_NEED), key=lambda each: -each.n_groups):
        if names and set(names).isdisjoint(structure.names):
            continue
        if (call := call_for(model, structure)) is not None:
            return call
    return None


def call_for(model: Model, structure: LocalStructure) -> str | None:
    """The call that integrates the variables of a structure out, None where none does."""
    if len(structure.names) == len(model.free_RVs):
        return None  # There would be nothing to sample.
    try:
        density = checked_density(model, structure)
    except ModelError:
        return None
    quadratic = structure.block_size > MOST_QUADRATURE_SIZE and is_quadratic(model, density)
    return call_of(structure, quadratic=quadratic)


def advice_on_groups(model: Model) -> str | None:
    """A better choice than minibatches of rows for effects of groups, or None."""
    for structure in _sorted_structures(model, FEWEST_GROUPS)[1]:
        if (call := call_for(model, structure)) is None:
            continue
        verb = "has" if len(structure.names) == 1 else "have"
        return (
            f"{quoted(structure.names)} {verb} entries for {structure.n_groups} groups of records, "
            "and a minibatch says nothing of the groups that it does not touch. Use "
            f"{call}, or NUTS."
        )
    return None


def _structures(model: Model, fewest: int) -> Iterator[LocalStructure]:
    """Structures of variables for the same groups, all together and each by itself."""
    by_length: dict[int, list[str]] = {}
    for variable in model.free_RVs:
        if variable.type.ndim and prod(shape := shape_of(variable)) >= fewest:
            by_length.setdefault(shape[0], []).append(str(variable.name))
    for names in by_length.values():
        for some in [names, *([name] for name in names if len(names) > 1)]:
            try:
                structure = find_structure(model, some, on_source=True)
            except ModelError:
                continue  # They are no local variables.
            if structure.n_groups >= fewest:
                yield structure


def _is_part(structure: LocalStructure, other: LocalStructure) -> bool:
    """Whether another structure has the same variables and more."""
    return set(structure.names) < set(other.names)


def _is_normal(model: Model, structure: LocalStructure) -> bool:
    """Whether the variables have the priors of effects with coordinates of their own."""
    variables = [model[name] for name in structure.names]
    pairs = [(each, model.rvs_to_values[each]) for each in variables]
    return all(normal_prior(*pair, model)[1] is not None for pair in pairs)


def _is_factor(model: Model, structure: LocalStructure) -> bool:
    """Whether these are effects of a factor: of many levels, or with an unknown scale.

    Coefficients of a few levels, such as those of treatments, have a known one.
    """
    if not _is_normal(model, structure):
        return False
    return structure.n_groups >= FEWEST_GROUPS or _has_unknown_scale(model, structure)


def _has_unknown_scale(model: Model, structure: LocalStructure) -> bool:
    """Whether others are in the priors of the variables, or multiply them before a row does."""
    chosen = {model[name] for name in structure.names}
    free = frozenset(model.free_RVs)
    roots = {each: frozenset([each]) for each in free}
    entries = set(chosen)  # functions of the variables that rows have not selected from
    for node in toposort([*model.observed_RVs, *model.potentials]):
        of_inputs = [roots.get(each, frozenset()) for each in node.inputs]
        others = [each for each, of in zip(node.inputs, of_inputs, strict=True) if of - chosen]
        if others and not chosen.isdisjoint(node.outputs):
            return True
        mine = [each for each, of in zip(node.inputs, of_inputs, strict=True) if of & chosen]
        scalar_op = getattr(node.op, "scalar_op", None)
        multiplies = isinstance(scalar_op, Mul | TrueDiv) or is_product(node)
        if (
            mine
            and multiplies
            and any(not entries.isdisjoint(mine) or all(each.type.broadcastable) for each in others)
        ):
            return True
        if not isinstance(node.op, AdvancedSubtensor) and not entries.isdisjoint(node.inputs):
            entries.update(node.outputs)
        of_outputs = frozenset().union(*of_inputs)
        roots |= {each: roots.get(each, of_outputs) for each in node.outputs}
    return False


def _is_worthwhile(structure: LocalStructure, coordinates: int) -> bool:
    """Whether groups are small, or several effects of each make the position too long.

    Other long positions are sampled as they are, see `pymc_sgmcmc.posterior.effect_coordinates`:
    those that would be long without these variables too, as with another factor, and those of many
    records for each effect.
    """
    if coordinates - structure.n_groups * structure.block_size > MOST_COORDINATES:
        return False
    are_small = structure.n_records <= MOST_RECORDS * structure.n_groups
    return are_small or (structure.block_size > 1 and coordinates > MOST_COORDINATES)
