"""Compare the quadrature with the sum over a wide and fine grid, for a few groups.

Quadrature is right where the law of a group is near a normal law times a polynomial. Two modes,
kinks, edges and much skewness are what it misses.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.model import Model
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc import guests
from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.marginal.check import SEED, Evaluated
from pymc_sgmcmc.marginal.density import GroupDensity
from pymc_sgmcmc.marginal.newton import find_mode, solve_upper
from pymc_sgmcmc.marginal.quadrature import Nodes

_log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold

GRIDS = {1: (7.6, 401), 2: (4.6, 61), 3: (3.9, 27)}
"""Ends and numbers of points of the grids in each direction, by the number of local quantities. The
coordinate is x with u = sinh(x) standard deviations from the mode, so the ends are 1000, 50 and 25
of these away. The sum is right to 1e-6 for a law near a Gaussian."""

MOST_GROUPS = 20
"""At most this many random groups are compared, which bounds the time."""

ELEMENTS = 4_000_000
"""At most this many records times points of the grid are evaluated, which bounds the memory."""

MOST_DROP = 700.0
"""The log density of the prior is at most this far below its maximum. At points that are further
away, 37 standard deviations of a normal law, records often have no density but rounding."""

LARGEST_ERROR = 5e-3
"""A warning is given where the log density of a group has a larger error. Twenty such groups change
a log likelihood by a tenth, which is small beside the half that a standard error is."""

LARGEST_SHIFT = 0.1
"""Means may be off by this many posterior standard deviations, as elsewhere."""

MOST_REFINEMENTS = 2
"""So many times a quadrature gets more nodes. Each time takes another search for the centre."""

RESOLUTION = 1e-6
"""Errors of a group that are smaller are not distinguished from those of the grid."""


class QuadratureError:
    """Errors of the log densities of a few groups, at any position.

    Parameters
    ----------
    model : pymc.Model
        With its local variables.
    density : GroupDensity
    values : TensorVariable, shape (groups,)
        The quadrature.
    rule : Nodes
        Its nodes.
    is_given : bool
        Whether the number of nodes was given, and stays.

    Attributes
    ----------
    is_inaccurate_at_start : bool
        Whether there was a warning of errors near the initial point.
    shift_of_means : float or None
        See `shift`, with the nodes that `refine` took.
    refinements : int
        How often `refine` took more nodes.
    """

    is_inaccurate_at_start = False
    shift_of_means: float | None = None
    refinements = 0

    def __init__(
        self,
        model: Model,
        density: GroupDensity,
        values: TensorVariable,
        rule: Nodes,
        *,
        is_given: bool = False,
    ):
        self._rule, self._is_given = rule, is_given
        self._n_groups = density.structure.n_groups
        self._density = density
        self.names = density.structure.names
        self._initial_point = model.initial_point()
        size = density.block_size
        end, n_points = GRIDS[size]
        n_compared = int(ELEMENTS // (n_points**size * density.records_a_group))
        rng = np.random.default_rng(SEED)
        few = min(MOST_GROUPS, self._n_groups, max(1, n_compared))
        self._numbers = rng.choice(self._n_groups, few, replace=False)

        density.hold(self._numbers)
        evaluated = Evaluated(model, density)
        self._blocks, self.size = evaluated.block[self._numbers], size
        self._near_start = evaluated.point
        mode = find_mode(density)
        entries = [entry for row in mode.root for entry in row]
        with pytensor.config.change_flags(cxx=""):  # The inner function of a scan is NumPy's too.
            self._quadrature = evaluated.function([values, mode.block, *entries])
            self._quadrature(self._blocks, self._numbers)  # compiles the scan

        axis = np.linspace(-end, end, n_points)
        grid = np.array(list(itertools.product(axis, repeat=size)))
        self._log_weights = np.log(np.cosh(grid)).sum(axis=1) + size * np.log(axis[1] - axis[0])
        self._standard = list(np.sinh(grid).T[:, :, None])
        placeholder = pt.tensor("points", shape=(None, None, size), dtype=density.block.dtype)
        graphs = [density.at_points(placeholder), density.prior_at_points(placeholder)]
        self._log_densities = evaluated.function(graphs, placeholder)

    def at(self, point: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
        """Errors of the compared groups; by default near the initial point.

        Parameters
        ----------
        point : mapping of str to numpy.ndarray, optional
            Unconstrained values of the global variables, by the names of their value variables.
        """
        self._density.hold(self._numbers)
        at = self._near_start if point is None else {**self._initial_point, **point}
        quadrature, centre, *rest = self._quadrature(self._blocks, self._numbers, at)
        factor = iter(rest)
        root = [[next(factor) for _ in range(row + 1)] for row in range(self.size)]
        with np.errstate(all="ignore"):
            standard = np.broadcast_arrays(*solve_upper(root, self._standard))
            points = centre + np.stack(standard, axis=-1)
            heights, prior = self._log_densities(points, self._numbers, at)
            possible = (prior > np.nanmax(prior, axis=0) - MOST_DROP) & (heights < np.inf)
            heights = np.where(possible, heights + self._log_weights[:, None], -np.inf)
            expected = np.logaddexp.reduce(heights, axis=0)
            expected -= sum(np.log(row[-1]) for row in root)
            errors = quadrature - expected
        # Where neither is finite, the position is one that the model excludes.
        return errors[np.isfinite(quadrature) | np.isfinite(expected)]

    @property
    def points(self) -> int:
        """Number of nodes in each direction."""
        return self._rule.points

    def refine(self, points: Sequence[Mapping[str, np.ndarray]]) -> bool:
        """Take more nodes where the quadrature may move means at points of the posterior.

        Returns
        -------
        bool
            Whether there are more than before, so that the posterior has changed.
        """
        before = self.points
        self.shift_of_means = self.shift(points)
        may_refine = not self._is_given
        while may_refine and self.moves_means and self.refinements < MOST_REFINEMENTS:
            self.refinements += 1
            self._rule.points = more_points(self)
            self.shift_of_means = self.shift(points)
        self.release()
        return self.points > before

    @property
    def moves_means(self) -> bool:
        """Whether means may be off, where `refine` looked."""
        return self.shift_of_means is not None and not self.shift_of_means <= LARGEST_SHIFT

    def tell(self) -> None:
        """Log how accurate the quadrature is where `refine` looked."""
        start = f"The quadrature of {quoted(self.names)} with {self.points} nodes is"
        if self.moves_means:
            _log.warning(
                f"{start} not accurate where the posterior is: means may be off by up to "
                f"{self.shift_of_means:.2g} standard deviations. Give more nodes, "
                f"`marginalize(..., points={more_points(self)})`, or sample the original model."
            )
        elif self.refinements or self.is_inaccurate_at_start:
            _log.info(f"{start} accurate around the centre of the posterior.")

    def release(self) -> None:
        """Leave no records of a source in memory."""
        if self._density.groups_of_source is not None:
            self._density.groups_of_source.release()

    def shift(self, points: Sequence[Mapping[str, np.ndarray]]) -> float:
        r"""Bound on the error of posterior means, in standard deviations, from points of its law.

        To first order an error :math:`\Delta(\theta)` of the log density moves the mean of f by
        :math:`\mathrm{Cov}(f, \Delta)`, at most by the standard deviation of :math:`\Delta` times
        that of f.
        """
        totals = []
        for point in points:
            errors = self.at(point)
            if len(errors):
                totals.append(self._n_groups * errors.mean())
        floor = RESOLUTION * self._n_groups
        return float(max(0.0, np.std(totals, ddof=1) - floor)) if len(totals) > 1 else 0.0


def quadrature_of(groups: Model) -> QuadratureError | None:
    """Errors of the quadrature in a model of groups, None where it has none."""
    quadrature = guests.quadrature_of(groups)
    return quadrature if isinstance(quadrature, QuadratureError) else None


def warn_of_quadrature(error: QuadratureError) -> None:
    """Warn where the log densities of groups are wrong at a position near the initial point."""
    largest = float(np.abs(error.at()).max(initial=0.0))
    error.release()
    error.is_inaccurate_at_start = not largest <= LARGEST_ERROR
    if error.is_inaccurate_at_start:
        _log.warning(
            f"The quadrature of {quoted(error.names)} with {error.points} nodes has errors "
            f"up to {largest:.2g} in the log density of a group near the initial point. A "
            "step method of this package with a centre takes as many as are needed there. For "
            f"others use `marginalize(..., points={more_points(error)})` or the original model."
        )


def more_points(error: QuadratureError) -> int:
    """Number of nodes in each direction to try where these are too few.

    It is four times as many in one direction, and twice as many in each of several, since their
    products take the time of a transition.
    """
    return (4 if error.size == 1 else 2) * error.points + 1
