"""Modes of the local variables of each group, by Newton's method inside the graph.

The matrices of all groups are small, so they are lists of lists of vectors with one entry a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pytensor
import pytensor.tensor as pt
from pytensor.scan.utils import until
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.compiling.compiled import FEW_STEPS
from pymc_sgmcmc.marginal.density import GroupDensity

type Matrix = Sequence[Sequence[TensorVariable]]
"""Entry (i, j) is a vector with one entry a group."""

MOST_STEPS = 100
"""The search for the modes ends after this many steps. Groups of a generalised linear model need
four to eight, and up to twenty where the mode is many standard deviations of the prior away."""

CONVERGED = 1e-9
"""The search ends where Newton's decrement, the squared length of the next step in standard
deviations of the group, is below this in all groups. The last step squares the distance."""

FIRST_RADIUS = 3.0
"""The first step of Newton's method is at most this many standard deviations of the prior long. The
radius grows and shrinks with success."""

SMALLEST_PIVOT = 0.1
"""Pivots of the negative Hessian are at least this fraction of those of the prior. A log density
that is not concave would otherwise have a negative one."""

SMALLEST_PRIOR_PIVOT = 1e-8
"""Pivots of the prior are at least this, since a Laplace prior, for example, has no curvature."""


class Mode(NamedTuple):
    """Mode of the local variables of each group.

    Attributes
    ----------
    columns : sequence of TensorVariable
        The q local quantities, each a vector with one entry a group.
    root : Matrix
        Lower triangular Cholesky factor of the negative Hessian at the mode.
    """

    columns: Sequence[TensorVariable]
    root: Matrix

    @property
    def block(self) -> TensorVariable:
        """The local quantities, shape (groups, q)."""
        return pt.stack(self.columns, axis=1)


def cholesky(matrix: Matrix, floors: Sequence[TensorVariable] | None = None) -> Matrix:
    """Lower triangular factor, whose pivots are at least `floors` where these are given."""
    size = len(matrix)
    root: list[list[TensorVariable]] = [[] for _ in range(size)]
    for row in range(size):
        for column in range(row):
            rest = sum(root[row][k] * root[column][k] for k in range(column))
            root[row].append((matrix[row][column] - rest) / root[column][column])
        pivot = matrix[row][row] - sum(entry**2 for entry in root[row])
        if floors is not None:
            pivot = pt.maximum(pivot, floors[row])
        root[row].append(pt.sqrt(pivot))
    return root


def solve_lower(root: Matrix, vector: Sequence[TensorVariable]) -> list[TensorVariable]:
    """Solution x of L x = b."""
    solution: list[TensorVariable] = []
    for row, entries in enumerate(root):
        rest = sum(entries[k] * solution[k] for k in range(row))
        solution.append((vector[row] - rest) / entries[row])
    return solution


def solve_upper(root: Matrix, vector: Sequence[TensorVariable]) -> list[TensorVariable]:
    """Solution x of Lᵀ x = b."""
    size = len(root)
    solution: list[TensorVariable] = [vector[-1]] * size
    for row in reversed(range(size)):
        rest = sum(root[k][row] * solution[k] for k in range(row + 1, size))
        solution[row] = (vector[row] - rest) / root[row][row]
    return solution


def log_determinant(root: Matrix) -> TensorVariable:
    """Logarithm of the determinant of the factor L."""
    logs = [pt.log(entries[row]) for row, entries in enumerate(root)]
    return sum(logs[1:], logs[0])


def find_mode(density: GroupDensity) -> Mode:
    """Modes of the joint log density by the local variables, and the curvature there.

    Newton's method starts at the support point of the prior, and takes a step only where it raises
    the log density.
    """
    prior = _Prior(density)
    start = density.split(density.start)
    (value,) = density.at([density.value], start)
    states = pytensor.scan(
        lambda *state: _search_step(density, prior, *state),
        outputs_info=[*start, value, pt.full_like(value, FIRST_RADIUS, dtype=value.dtype)],
        n_steps=MOST_STEPS,
        name=FEW_STEPS,
        return_updates=False,
    )
    mode = [state[-1] for state in states[: density.block_size]]
    return Mode(mode, newton_step(density, mode, prior).root)


def quadratic_mode(density: GroupDensity) -> Mode:
    """Modes, and the curvature there, of a joint log density that is quadratic.

    Newton's method ends after a single step then, wherever it starts.
    """
    start = density.split(density.start)
    newton = newton_step(density, start)
    return Mode(moved(start, newton.step), newton.root)


def moved(place: Sequence[TensorVariable], step: Sequence[TensorVariable]) -> list[TensorVariable]:
    """Columns of blocks after a step."""
    return [entry + change for entry, change in zip(place, step, strict=True)]


class _Prior:
    """The curvature of the prior of the local variables at its centre."""

    def __init__(self, density: GroupDensity):
        start = density.split(density.start)
        entries = density.at(density.prior_hessian, start)
        smallest = [pt.constant(SMALLEST_PRIOR_PIVOT)] * density.block_size
        self.root = cholesky(square([-entry for entry in entries]), smallest)
        self.floors = [SMALLEST_PIVOT * entries[row] ** 2 for row, entries in enumerate(self.root)]

    def length(self, vector: Sequence[TensorVariable]) -> TensorVariable:
        """Length of a vector in standard deviations of the prior."""
        size = len(vector)
        products = [
            sum((self.root[k][column] * vector[k] for k in range(column, size)), 0.0)
            for column in range(size)
        ]
        return pt.sqrt(sum(product**2 for product in products))


class _NewtonStep(NamedTuple):
    """The step of Newton's method, the factor of the negative Hessian, and the decrement."""

    step: list[TensorVariable]
    root: Matrix
    decrement: TensorVariable


def newton_step(
    density: GroupDensity, place: Sequence[TensorVariable], prior: _Prior | None = None
) -> _NewtonStep:
    """Newton's method at the columns of a block; a prior keeps the curvature positive."""
    derivatives, size = density.at([*density.gradient, *density.hessian], place), density.block_size
    floors = None if prior is None else prior.floors
    root = cholesky(square([-entry for entry in derivatives[size:]]), floors)
    scaled = solve_lower(root, derivatives[:size])
    return _NewtonStep(solve_upper(root, scaled), root, sum(entry**2 for entry in scaled))


def _search_step(
    density: GroupDensity,
    prior: _Prior,
    *state: TensorVariable,
) -> tuple[list[TensorVariable], until]:
    """The next columns, their log densities, and the radii in which Newton's step is trusted."""
    *place, value, radius = state
    newton = newton_step(density, place, prior)
    length = prior.length(newton.step)
    fraction = radius / pt.maximum(radius, length)
    proposal = moved(place, [entry * fraction for entry in newton.step])
    (proposed,) = density.at([density.value], proposal)
    # Rounding may lower the value at the mode itself.
    raised = (proposed >= value) | (newton.decrement < CONVERGED)
    longer = pt.maximum(radius, 2 * length * fraction)
    shorter = length * fraction / 4
    pairs = zip([*proposal, proposed, longer], [*place, value, shorter], strict=True)
    following = [pt.switch(raised, new, old) for new, old in pairs]
    return following, until(pt.all(newton.decrement < CONVERGED))


def square(entries: Sequence[TensorVariable]) -> Matrix:
    """A square matrix of its entries, row by row."""
    size = math.isqrt(len(entries))
    return [list(entries[row * size : (row + 1) * size]) for row in range(size)]
