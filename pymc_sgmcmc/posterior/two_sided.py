"""Models of two index arrays, such as ratings of items by users, seen as blocks of both sides.

In ``(U[user] * V[item]).sum(-1)`` each row of data meets one row of U and one of V. So the log
density of the rows of some users and some items depends on these rows of U and V alone. This module
finds the two sides in the graph of a model, and makes the log density of such a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.executor import Function
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.subtensor import AdvancedSubtensor, Subtensor
from pytensor.tensor.type import TensorType
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.bad_rows import WITHOUT_NAME
from pymc_sgmcmc.posterior.compiled import compile_quietly, quick_graphs
from pymc_sgmcmc.posterior.graphs import Length, cast_of_integers, is_integer, leaf_value, rebuild
from pymc_sgmcmc.posterior.posterior import Posterior
from pymc_sgmcmc.posterior.simplify import prepared

CHECKED_ROWS = 2_000
"""The blocks are compared with the whole model on at most so many rows."""

USE_SAMPLE = "Give it a number, or use `sample`, which takes any model with rows."
"""The advice where a model is no model of two sides."""

MODE = "NUMBA"
"""The functions of blocks are called in each iteration, on few rows."""


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two sides of a model: the variables that one index array selects from.

    Attributes
    ----------
    index : str
        Name of the index array.
    leaf : int
        Its number among the data arrays of the rows.
    variables : tuple of int
        Numbers of the value variables, in the order of the layout.
    places : numpy.ndarray, shape (size, width)
        Places in the position of the coordinates of each user or item, those of one variable after
        those of another.
    data : tuple of numpy.ndarray
        Arrays of the model with an entry for each user or item that are no variables, as prior
        means are.
    """

    index: str
    leaf: int
    variables: tuple[int, ...]
    places: np.ndarray
    data: tuple[np.ndarray, ...] = ()

    @property
    def size(self) -> int:
        """The number of users or items."""
        return len(self.places)


@dataclass(frozen=True, eq=False)
class BlockDensity:
    r"""The log density of a block of some users, some items and the rows where they meet.

    .. math:: \log p(U_b) + \log p(V_c) + w \sum_{i \in (b, c)} \log p(x_i \mid U_b, V_c)

    It has graphs and no data, so that it can be sent to where the rows of a block are. PyMC's
    models cannot: another process does not know the log densities of their variables.

    Attributes
    ----------
    inputs : list of TensorVariable
        The positions of both sides, (users, width) and (items, width), the weight w, then the rows
        of each array of data with indices within the block, then the data of both sides.
    log_density : TensorVariable
        The value, a scalar.
    gradients : list of TensorVariable
        Its gradients by both positions, of their shapes.
    """

    inputs: list[TensorVariable]
    log_density: TensorVariable
    gradients: list[TensorVariable]

    def compiled(self, with_value: bool) -> Function:
        """The function of the inputs that gives the gradients, after the value where asked for."""
        outputs = [self.log_density, *self.gradients] if with_value else self.gradients
        with quick_graphs():
            function = compile_quietly(self.inputs, outputs, MODE)
        function.trust_input = True
        return function


@dataclass(frozen=True, eq=False)
class TwoSided:
    """A posterior whose rows each meet one row of either side.

    Attributes
    ----------
    posterior : Posterior
    sides : tuple of two Side
        In the order in which their variables come in the model.
    density : BlockDensity
    """

    posterior: Posterior
    sides: tuple[Side, Side]
    density: BlockDensity


def two_sided(posterior: Posterior) -> TwoSided:
    """Find the two sides of a posterior, and make the log density of their blocks.

    Parameters
    ----------
    posterior : Posterior
        Of an ordinary model, with all of its variables in the position.

    Raises
    ------
    ModelError
        Where the model has other variables than those that one of two index arrays selects from,
        or a prior that does not treat users, or items, independently.
    """
    _, rows = posterior.position_and_rows()
    length = pt.lscalar("length")
    terms = _Terms(rows, length, *posterior.graphs_of_variables(rows, length))
    indexed = _indexed(posterior, terms)
    sides = _sides(posterior, terms, indexed)
    density, sides = _block_density(posterior, terms, indexed, sides)
    model = TwoSided(posterior, sides, density)
    _check_blocks(model)
    return model


@dataclass(frozen=True, eq=False)
class _Terms:
    """The log density in terms of value variables: the rows, and the terms without rows by name."""

    rows: list[TensorVariable]
    length: TensorVariable
    likelihood: TensorVariable
    priors: dict[str, TensorVariable]


def _indexed(posterior: Posterior, terms: _Terms) -> dict[int, list[Apply]]:
    """Nodes that select rows of variables or data, by the number of the array of indices.

    Raises
    ------
    ModelError
        Where an array of indices is used for something else too.
    """
    names = posterior.data_names
    codes: dict[Variable, int] = {
        rows: number
        for number, rows in enumerate(terms.rows)
        if rows.ndim == 1 and is_integer(rows)
    }
    nodes: dict[int, list[Apply]] = {}
    others: dict[int, Apply] = {}
    for node in toposort([terms.likelihood]):
        if cast_of_integers(node) and node.inputs[0] in codes:
            codes[node.outputs[0]] = codes[node.inputs[0]]
            continue
        for place, variable in enumerate(node.inputs):
            if variable not in codes:
                continue
            if _selects_rows(node) and place == 1:
                nodes.setdefault(codes[variable], []).append(node)
            else:
                others[codes[variable]] = node
    for number in nodes.keys() & others.keys():
        raise ModelError(
            f"`{names[number]}` selects rows along the first axis, but is also used otherwise (by "
            f"{others[number].op}). Put users or items on the first axis of their variables, as in "
            f"`U[user]`, and pass a copy of the array as a number where it is one."
        )
    values = set(posterior.layout.variables)
    return {
        number: found
        for number, found in nodes.items()
        if values.intersection(ancestors([node.inputs[0] for node in found]))
    }


def _selects_rows(node: Apply) -> bool:
    """Whether a node is ``x[index]``, with nothing but constants in other axes."""
    return isinstance(node.op, AdvancedSubtensor) and node.op.idx_list[0] == 0


def _sides(
    posterior: Posterior, terms: _Terms, indexed: dict[int, list[Apply]]
) -> tuple[Side, Side]:
    """The two sides, still without their data.

    Raises
    ------
    ModelError
    """
    layout, names = posterior.layout, list(posterior.data_names)
    numbers = {variable: number for number, variable in enumerate(layout.variables)}
    of_index = {
        leaf: sorted(
            numbers[variable]
            for variable in ancestors([node.inputs[0] for node in nodes])
            if variable in numbers
        )
        for leaf, nodes in indexed.items()
    }
    if len(of_index) != 2:
        listed = quoted(names[leaf] for leaf in of_index) or "none"
        raise ModelError(
            "The model should have variables indexed by two arrays, as in `U[user] * V[item]`, "
            f"but those that index variables are {listed}. Put users and items on the first axes, "
            "and write products as `(U[user] * V[item]).sum(-1)`, or use `sample`, which takes any "
            "model with rows."
        )
    first, second = sorted(of_index, key=lambda leaf: of_index[leaf])
    for leaf in (first, second):
        if names[leaf].startswith(WITHOUT_NAME):
            names[leaf] = f"index of {layout.names[of_index[leaf][0]]}"
    if both := set(of_index[first]) & set(of_index[second]):
        raise ModelError(
            f"{quoted(layout.names[n] for n in both)} is indexed by `{names[first]}` and by "
            f"`{names[second]}`, so that a block of one changes the other. Use `sample`."
        )
    selected = {node.outputs[0] for nodes in indexed.values() for node in nodes}
    free = [v for v in ancestors([terms.likelihood], blockers=selected) if v in numbers]
    free += [v for v in layout.variables if numbers[v] not in (*of_index[first], *of_index[second])]
    if free:
        raise ModelError(
            f"`{free[0].name}` is used without an index, so that all blocks of users and items "
            f"share it. {USE_SAMPLE}"
        )
    sides, coordinates = [], np.arange(layout.dimension)
    for leaf in (first, second):
        sizes = {layout.shapes[number][0] for number in of_index[leaf]}
        if len(sizes) > 1:
            raise ModelError(
                f"The variables that `{names[leaf]}` indexes should have one length, but have "
                f"{sorted(sizes)}. Give all of them an entry for each of the larger number."
            )
        size = sizes.pop()
        places = [coordinates[layout.slices[n]].reshape(size, -1) for n in of_index[leaf]]
        side = Side(names[leaf], leaf, tuple(of_index[leaf]), np.concatenate(places, axis=1))
        codes = posterior.data[leaf]
        if codes.min() < 0 or codes.max() >= side.size:
            raise ModelError(
                f"`{side.index}` should have indices from 0 to {side.size - 1}, but has "
                f"{codes.min()} to {codes.max()}. Number the entries from 0. Entries that sum to "
                "zero, which have one value less, depend on each other: use `sample` for them."
            )
        sides.append(side)
    return sides[0], sides[1]


def _block_density(
    posterior: Posterior, terms: _Terms, indexed: dict[int, list[Apply]], sides: tuple[Side, Side]
) -> tuple[BlockDensity, tuple[Side, Side]]:
    """The graphs of a block, and the sides with their data.

    Raises
    ------
    ModelError
        Where a term of the prior has variables of both sides.
    """
    layout = posterior.layout
    of_side = [{layout.variables[number] for number in side.variables} for side in sides]
    priors: list[list[TensorVariable]] = [[], []]
    for name, term in terms.priors.items():
        has = [bool(variables.intersection(ancestors([term]))) for variables in of_side]
        if all(has):
            raise ModelError(
                f"The log density of `{name}` has no rows, but depends on variables of both "
                f"`{sides[0].index}` and `{sides[1].index}`. {USE_SAMPLE}"
            )
        if any(has):
            priors[int(has[1])].append(term.sum())
    weight = pt.scalar("weight", dtype=layout.dtype)
    matrices, replacements, lengths, data, complete = [], {}, [], [], []
    for side, graphs in zip(sides, priors, strict=True):
        matrix = pt.matrix(f"position_of_{side.index}", dtype=layout.dtype)
        stop = 0
        for number in side.variables:
            shape = layout.shapes[number][1:]
            start, stop = stop, stop + int(np.prod(shape))
            piece = matrix[:, start:stop]
            if len(shape) != 1:
                piece = piece.reshape((matrix.shape[0], *shape))
            replacements[layout.variables[number]] = piece
        selected = [node.inputs[0] for node in indexed[side.leaf]]
        found = _data_of_side([*graphs, *selected], side)
        placeholders = [
            TensorType(value.dtype, shape=(None, *value.shape[1:]))() for value in found.values()
        ]
        replacements |= dict(zip(found, placeholders, strict=True))
        data += placeholders
        complete.append(replace(side, data=tuple(found.values())))
        matrices.append(matrix)
        lengths.append(Length(side.size, matrix.shape[0]))
    length = {terms.length: terms.rows[0].shape[0]}
    parts = [rebuild([terms.likelihood], length | replacements, only_beside_rows=True)[0]]
    for graphs, of_matrix in zip(priors, lengths, strict=True):
        parts += rebuild(graphs, replacements, [of_matrix])
    likelihood, *of_priors = parts
    log_density = weight * likelihood + sum(of_priors, pt.zeros((), dtype=layout.dtype))
    log_density = prepared(log_density)
    gradients = pt.grad(log_density, matrices)
    inputs = [*matrices, weight, *terms.rows, *data]
    return BlockDensity(inputs, log_density, gradients), (complete[0], complete[1])


def _data_of_side(graphs: Sequence[Variable], side: Side) -> dict[Variable, np.ndarray]:
    """Arrays with an entry for each user or item, by the variables of the graph."""
    return {
        variable: np.asarray(values)
        for variable in ancestors(graphs)
        if (values := leaf_value(variable)) is not None
        and values.ndim
        and side.size > 1
        and values.shape[0] == side.size
        # The shape of a variable is an array too.
        and not (values.dtype.kind in "iu" and _is_shape(variable, graphs))
    }


def _is_shape(variable: Variable, graphs: Sequence[Variable]) -> bool:
    """Whether single entries of an array are all that is used of it, as lengths."""
    users = [node for node in toposort(graphs) if variable in node.inputs]
    return bool(users) and all(isinstance(node.op, Subtensor) for node in users)


def _check_blocks(model: TwoSided) -> None:
    """Compare the sum over four blocks with the whole model, at a random position.

    Raises
    ------
    ModelError
    """
    posterior, sides = model.posterior, model.sides
    rng = np.random.default_rng(2015)
    position = posterior.initial_position + 0.3 * rng.standard_normal(posterior.dimension)
    position = position.astype(posterior.dtype)
    count = min(posterior.n_rows, CHECKED_ROWS)
    rows = posterior.take(np.sort(rng.choice(posterior.n_rows, size=count, replace=False)))
    try:
        function = posterior.compile_for_setup(
            model.density.inputs, [model.density.log_density, *model.density.gradients]
        )
        value, gradient = 0.0, np.zeros(posterior.dimension)
        # Each user is in two of the blocks, which count its prior once in their mean.
        two = np.asarray(2.0, posterior.dtype)
        for numbers in product(*(np.array_split(rng.permutation(side.size), 2) for side in sides)):
            places = [side.places[n] for side, n in zip(sides, numbers, strict=True)]
            data = [x[n] for side, n in zip(sides, numbers, strict=True) for x in side.data]
            block = rows_of_block(rows, sides, numbers)
            of_block, *of_sides = function(*(position[at] for at in places), two, *block, *data)
            value += float(of_block) / 2
            for at, of_side in zip(places, of_sides, strict=True):
                gradient[at] += of_side / 2
    except Exception as error:  # A graph may fail in any way on other lengths.
        raise _not_in_blocks(sides) from error
    with np.errstate(all="ignore"):
        of_prior, of_prior_gradient = posterior.log_prior_and_gradient(position)
        of_rows, of_rows_gradient = posterior.log_likelihood_and_gradient(position, rows)
    relative = 10 * np.sqrt(np.finfo(posterior.dtype).eps)
    pairs = [(np.array([value]), np.array([of_prior + of_rows]))]
    expected = of_prior_gradient + of_rows_gradient
    pairs += [(gradient[side.places], expected[side.places]) for side in sides]
    for left, right in pairs:
        if not np.allclose(left, right, rtol=0, atol=relative * (1 + np.abs(right).max())):
            raise _not_in_blocks(sides)


def rows_of_block(
    rows: Sequence[np.ndarray], sides: Sequence[Side], numbers: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Rows whose user and item are both among these numbers, with indices within the numbers."""
    kept = np.ones(len(rows[0]), dtype=bool)
    local = []
    for side, chosen in zip(sides, numbers, strict=True):
        place = np.full(side.size, -1)
        place[chosen] = np.arange(len(chosen))
        local.append(place[rows[side.leaf]])
        kept &= local[-1] >= 0
    of_block = [values[kept] for values in rows]
    for side, places in zip(sides, local, strict=True):
        of_block[side.leaf] = places[kept].astype(rows[side.leaf].dtype)
    return of_block


def _not_in_blocks(sides: Sequence[Side]) -> ModelError:
    return ModelError(
        f"The log density is not a sum over blocks of `{sides[0].index}` and `{sides[1].index}`. "
        "Priors should treat each user, and each item, independently, and nothing but the index "
        "arrays should connect rows. Otherwise use `sample`."
    )
