"""Draws of the local variables of groups from their law given the records and the parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from copy import copy

import numpy as np
import pytensor.tensor as pt

from pymc_sgmcmc.compiling.compiled import NUMPY_MODE, compile_on_arrays
from pymc_sgmcmc.marginal.density import GroupDensity
from pymc_sgmcmc.marginal.independence import Recovered, metropolis
from pymc_sgmcmc.marginal.interpolation import AT_ONCE, Polynomials, interpolate, scales_of, wider
from pymc_sgmcmc.marginal.inversion import LogDensity, Scale, first_ends, invert, second_modes
from pymc_sgmcmc.marginal.newton import find_mode, quadratic_mode, solve_upper
from pymc_sgmcmc.posterior.graphs import rebuild

CHUNK_ELEMENTS = 65_536
"""A call handles at most this many records, counted once for each point, so that its arrays, half a
megabyte each, fit into the cache of a core. Ten times as many take twice the time a record."""


class Conditional:
    r"""The law :math:`p(u_g \mid y_g, \theta)` of each group.

    Parameters
    ----------
    density : GroupDensity
    quadratic : bool
        Whether the joint log density is quadratic in the local variables.
    """

    def __init__(self, density: GroupDensity, *, quadratic: bool):
        self.density, self.size = density, density.block_size
        self.quadratic = quadratic
        structure = density.structure
        # The entries of a term may be those of the groups themselves.
        self._records = np.ones(structure.n_groups)
        for term in structure.terms:
            if term.records is not None:
                self._records = np.maximum(self._records, term.records.counts)
        parameters = list(density.parameters.values())
        self._dtypes = {name: variable.dtype for name, variable in density.parameters.items()}
        self.dtype = density.block.dtype
        start = pt.tensor("start", shape=(None, self.size), dtype=self.dtype)
        if quadratic:
            mode = quadratic_mode(density)
        else:
            points = pt.tensor("points", shape=(None, None, self.size), dtype=self.dtype)
            self._log_density = compile_on_arrays(
                [points, density.numbers, *parameters], density.at_points(points), NUMPY_MODE
            )
            mode = find_mode(density)
        graphs = [mode.block, *(entry for row in mode.root for entry in row)]
        from_start = rebuild(graphs, {density.start: start})
        self._start = compile_on_arrays([density.numbers, *parameters], density.start, NUMPY_MODE)
        self._centre = compile_on_arrays(
            [start, density.numbers, *parameters], from_start, NUMPY_MODE
        )

    def arguments(self, parameters: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Parameters in the order of the functions."""
        return [np.asarray(parameters[name], dtype) for name, dtype in self._dtypes.items()]

    def pieces(self, numbers: np.ndarray, points: int = 1) -> Iterator[slice]:
        """Consecutive parts of the groups, each with as many records as a call handles."""
        if not len(numbers):
            return
        ends = np.cumsum(self._records[numbers]) * points
        part = (ends - ends[0]) // CHUNK_ELEMENTS
        starts = [0, *(np.flatnonzero(np.diff(part)) + 1), len(numbers)]
        for first, last in itertools.pairwise(starts):
            yield slice(first, last)

    def log_density(
        self, points: np.ndarray, numbers: np.ndarray, arguments: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Joint log density, shape (points, n), at points, shape (points, n, q), of n groups."""
        values = np.empty(points.shape[:2])
        for piece in self.pieces(numbers, len(points)):
            # A group with very many records takes a few points at a time.
            at_once = max(1, int(CHUNK_ELEMENTS // self._records[numbers[piece]].sum()))
            for first in range(0, len(points), at_once):
                some = points[first : first + at_once, piece].astype(self.dtype, copy=False)
                values[first : first + at_once, piece] = self._log_density(
                    some, numbers[piece], *arguments
                )
        return values

    def centre(
        self, numbers: np.ndarray, arguments: Sequence[np.ndarray], start: np.ndarray | None = None
    ) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        """Modes, shape (n, q), and Cholesky factors of the negative Hessian there.

        A search starts at the modes for the parameters before, or at the support point.
        """
        if start is None or not np.isfinite(start).all():
            start = self._start(numbers, *arguments)
        block, *entries = self._centre(start, numbers, *arguments)
        rows = iter(entries)
        return block, [[next(rows) for _ in range(row + 1)] for row in range(self.size)]


class GroupDraws:
    """Draws of the local variables of a few groups, for one set of parameters after another.

    Parameters
    ----------
    conditional : Conditional
    numbers : numpy.ndarray, shape (n,)
        Numbers of the groups.
    examples : sequence of dict
        A few sets of parameters, at which second modes are searched.
    """

    def __init__(
        self,
        conditional: Conditional,
        numbers: np.ndarray,
        examples: Sequence[dict[str, np.ndarray]],
    ):
        self.conditional, self.numbers = conditional, numbers
        self._mode: np.ndarray | None = None
        self._ends = first_ends(len(numbers))
        self._hull: np.ndarray | None = None
        if self.inverts:
            self._hull = self._find_hull(examples)

    @property
    def inverts(self) -> bool:
        """Whether draws are quantiles, at probabilities that may be given."""
        return self.conditional.size == 1 and not self.conditional.quadratic

    def of_some(self, places: np.ndarray) -> GroupDraws:
        """Those of the groups at some places."""
        some = copy(self)
        some.numbers, some._mode = self.numbers[places], None
        some._ends = first_ends(len(places))
        some._hull = None if self._hull is None else self._hull[:, places]
        return some

    def draw_all(
        self,
        parameters: Sequence[dict[str, np.ndarray]],
        polynomials: Polynomials,
        uniforms: np.ndarray,
    ) -> np.ndarray:
        """Replace probabilities, shape (draws, groups), by quantiles for each set of parameters.

        Returns
        -------
        numpy.ndarray
            Places of the groups that are left, see `interpolate`.
        """
        n_groups = len(self.numbers)
        left = [
            part[self.of_some(part)._draw_all(parameters, polynomials, uniforms, part)]
            for part in np.array_split(np.arange(n_groups), -(-n_groups // AT_ONCE))
        ]
        return np.concatenate(left)

    def _draw_all(
        self,
        parameters: Sequence[dict[str, np.ndarray]],
        polynomials: Polynomials,
        uniforms: np.ndarray,
        columns: np.ndarray,
    ) -> np.ndarray:
        """`draw_all` for few groups, whose probabilities are in some of the columns."""

        def scale_at(draw: int) -> Scale:
            centre, root = self.conditional.centre(
                self.numbers, self.conditional.arguments(parameters[draw]), self._mode
            )
            self._mode = centre
            return Scale(centre[:, 0], 1 / root[0][0])

        def log_density_at(draw: int) -> LogDensity:
            of_points = self._of_points(self.conditional.arguments(parameters[draw]))
            return lambda points, places: of_points(points, usable[places])

        n_groups, ends = len(self.numbers), first_ends(len(self.numbers))
        with np.errstate(all="ignore"):
            scales = scales_of(polynomials, scale_at)
            central = self._of_points(self.conditional.arguments(parameters[polynomials.central]))
            medians = invert(central, scales.at(polynomials.central), np.full(n_groups, 0.5), ends)
            finite = np.isfinite(scales.centre) & np.isfinite(scales.width)
            is_usable = np.isfinite(medians) & finite.all(axis=0)
            if self._hull is not None:
                is_usable &= np.isnan(self._hull[0])
            usable = np.flatnonzero(is_usable)
            drawn = uniforms[:, columns[usable]]
            left = interpolate(
                polynomials, log_density_at, scales.of(usable), wider(ends[:, usable]), drawn
            )
            uniforms[:, columns[usable]] = drawn
        return np.union1d(np.flatnonzero(~is_usable), usable[left])

    def draw(
        self,
        parameters: dict[str, np.ndarray],
        rng: np.random.Generator,
        uniforms: np.ndarray | None = None,
    ) -> Recovered:
        """One draw for each group, at probabilities where these are given."""
        conditional, numbers = self.conditional, self.numbers
        with np.errstate(all="ignore"):
            arguments = conditional.arguments(parameters)
            centre, root = conditional.centre(numbers, arguments, self._mode)
            self._mode = centre
            if conditional.quadratic:
                noise = rng.normal(size=centre.T.shape)
                moved = np.stack(solve_upper(root, list(noise)), axis=1)
                return Recovered(centre + moved, np.ones(len(numbers)))
            if conditional.size > 1:
                return metropolis(
                    lambda points, places: conditional.log_density(
                        points, numbers[places], arguments
                    ),
                    centre,
                    root,
                    rng,
                )
            draws = invert(
                self._of_points(arguments),
                Scale(centre[:, 0], 1 / root[0][0]),
                rng.random(len(numbers)) if uniforms is None else uniforms,
                self._ends,
                self._hull,
            )
            return Recovered(draws[:, None], np.ones(len(numbers)))

    def _of_points(self, arguments: Sequence[np.ndarray]):
        """Log density of points of a single local quantity, shape (points, n)."""
        return lambda points, places: self.conditional.log_density(
            points[..., None], self.numbers[places], arguments
        )

    def _find_hull(self, examples: Sequence[dict[str, np.ndarray]]) -> np.ndarray | None:
        """Where groups with several modes have them, None where no group has."""
        hulls = []
        with np.errstate(all="ignore"):
            for parameters in examples:
                arguments = self.conditional.arguments(parameters)
                centre, root = self.conditional.centre(self.numbers, arguments)
                scale = Scale(centre[:, 0], 1 / root[0][0])
                hulls.append(second_modes(self._of_points(arguments), scale))
        lowest, highest = np.fmin.reduce(hulls)[0], np.fmax.reduce(hulls)[1]
        return None if np.isnan(lowest).all() else np.array([lowest, highest])
