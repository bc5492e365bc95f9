r"""Covariance over rows of the gradients of single rows, and the rows that cause most of it.

A few rows can cause nearly all of the noise of a minibatch: those of a rare level of a factor, or
with an extreme predictor. A random sample of rows has none of them, or so many that the noise seems
much larger than it is. So every row is evaluated. With control variates the worst rows can be left
out of the minibatches, and every transition evaluates all of them instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from scipy import sparse

from pymc_sgmcmc.batching import numbers_without
from pymc_sgmcmc.gradient_estimators.center_difference import reach
from pymc_sgmcmc.matrices import (
    GRAM_DIMENSION,
    Matrix,
    largest_dense_eigenvalue,
    largest_mean_square,
)
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.selected import RowGradients, Table, stored_gradients
from pymc_sgmcmc.tuning.center import Center, laplace_draws
from pymc_sgmcmc.tuning.curvature import WORTHWHILE, has_dense_curvature

NOISE_ROWS = 10_000
"""At most this many sampled rows represent all rows except the worst ones. A variance from them has
a relative error of 1.4 % where the gradients are Gaussian."""

NOISE_ELEMENTS = 20_000_000
"""The sample has at most this many rows times dimensions, which take 160 MB, and the worst rows at
all their points have no more."""

NOISE_POINTS = 1000
"""The sampled rows are divided among at most this many points around the centre. The noise grows
with the squared distance, so with few points a distant one would have too much weight."""

NOISE_POINTS_OF_GROUPS = 200
"""The same where the rows are groups: each point then costs as much as 100 rows, and so many leave
a relative error of a tenth in the noise of the worst direction, which tuning corrects."""

ROWS_A_POINT = 8
"""Each point has at least this many of the sampled rows, since their mean is subtracted."""

POINTS_A_ROW = 16
"""Each of the worst rows is evaluated at this many points around the centre, or as many as
`NOISE_ELEMENTS` allows. It is a compromise between the noise of their mean and their time and
memory."""

SEARCH_POINTS = 2
"""All rows are searched for the worst ones at this many points. Each point costs a pass over the
data, and a single point could miss a row by chance."""

SKETCH = 32
"""The lengths of gradients of higher dimension are measured in this many random directions, which
gives a squared length a relative error of 25 %. That is enough to find the largest ones."""

CANDIDATES = (0, 10, 20, 50, 100, 200, 500, 1000)
"""The number of rows that every transition evaluates is chosen among these. A finer choice would
hardly change the cost. So many rows with the largest gradients at most, and a tenth of all, are
evaluated separately."""

Points = Sequence[Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class RowNoise:
    r"""Gradients of single rows, which make the noise of a minibatch.

    Attributes
    ----------
    deviations : array, shape (K, d)
        Sparse where most numbers of a row are zero. Their mean outer product estimates C, the
        covariance over the rows that minibatches are drawn from. A gradient estimate from n of
        them has the covariance
        :math:`V = \tfrac{N^2}{n} c\, C`.
    n_rows : int
        N, the number of these rows.
    largest : float
        The largest of the gradients of these rows, times N and in units of the posterior: how far
        a single row would move a chain by a step of 2 with n = 1. It is 0 for orders below 2, whose
        noise does not grow faster than the distance from the centre.
    kept : numpy.ndarray of int
        Numbers of the other rows, which every transition should evaluate.
    """

    deviations: Table
    n_rows: int
    largest: float
    kept: np.ndarray


def row_noise(
    posterior: Posterior,
    center: Center,
    *,
    order: int,
    joint_draws: Points | None = None,
    cost: Callable[[float, float, int, int], float] | None = None,
) -> RowNoise:
    r"""Noise of the rows at the centre.

    Parameters
    ----------
    posterior, center
    order : {0, 1, 2}
        0 for the plain gradient, whose rows are evaluated at the centre. 1 and 2 for control
        variates of this order. Their rows are differences to the centre, for order 2 less the
        derivative there along the shift, averaged over points around it.
    joint_draws : sequence of mappings, optional
        Points around the centre that include values of the variables outside the position, whose
        moves add to the noise. They are `laplace_draws` where not given.
    cost : callable, optional
        Cost of an effective draw, from the number of rows at which noise and curvature would be
        equal, `RowNoise.largest`, the number of rows that minibatches are drawn from, and the
        number of rows that every transition evaluates. Where it is given, rows are kept if that is
        much cheaper.
    """
    rows = _Rows(posterior, center, order, joint_draws)
    n_rows = posterior.n_rows
    if rows.are_sparse:
        # All rows take little memory, so that none of a level has too much weight.
        most = min(n_rows, NOISE_ELEMENTS // rows.width)
        sample = np.random.default_rng(2018).choice(n_rows, most, replace=False)
        of_sample = rows.deviations_apart(sample)
        longest = n_rows * rows.longest(of_sample) if order == 2 else 0.0
        return RowNoise(of_sample, n_rows, longest, np.empty(0, dtype=int))
    count = min(CANDIDATES[-1], n_rows // 10)
    worst = rows.worst(count)
    others = n_rows - count
    most = int(np.clip(NOISE_ELEMENTS // posterior.dimension, ROWS_A_POINT, NOISE_ROWS))
    places = np.random.default_rng(2018).choice(others, min(most, others), replace=False)
    sample = numbers_without(worst, places)
    of_sample = rows.deviations_apart(sample) * np.sqrt(others / len(sample))
    of_worst, extreme = rows.deviations_at_all(worst)
    # The search has few points, and differences of first order.
    root = center.curvature.root
    lengths = np.array([np.linalg.norm(rows_at @ root, axis=1) for rows_at in extreme]).max(0)
    descending = np.argsort(-lengths, kind="stable")
    worst, of_worst, lengths = worst[descending], of_worst[:, descending], lengths[descending]
    lengths = np.append(lengths, 0.0)  # The others are smaller than all of these.
    of_worst /= np.sqrt(len(of_worst))

    kept = 0
    if cost is not None and order:
        curvature = float(center.curvature.relative_to(root).max())
        white = of_sample @ root, np.array([rows_at @ root for rows_at in of_worst])
        candidates = [number for number in CANDIDATES if number <= count]
        costs = {}
        for number, square in zip(candidates, _squares_without(*white, candidates), strict=True):
            drawn = n_rows - number
            rows_needed = drawn**2 * square / max(1, drawn) / curvature
            largest = drawn * float(lengths[number]) if order == 2 else 0.0
            costs[number] = cost(rows_needed, largest, drawn, number)
        cheapest = min(costs, key=lambda number: costs[number])
        if costs[0] > WORTHWHILE * costs[cheapest]:
            kept = cheapest
    # Their mean outer product is C where the worst `kept` rows are left out.
    deviations = np.concatenate([of_sample, of_worst[:, kept:].reshape(-1, of_sample.shape[1])])
    deviations *= np.sqrt(len(deviations) / max(1, n_rows - kept))
    drawn = n_rows - kept
    largest = drawn * float(lengths[kept]) if order == 2 else 0.0
    return RowNoise(deviations, drawn, largest, np.sort(worst[:kept]))


def _squares_without(
    of_sample: np.ndarray, of_worst: np.ndarray, candidates: Sequence[int]
) -> list[float]:
    """Largest eigenvalue of the sum of outer products of rows without the worst so many.

    Parameters
    ----------
    of_sample : numpy.ndarray, shape (rows, d)
    of_worst : numpy.ndarray, shape (points, worst rows, d)
    candidates : sequence of int
        How many of the worst rows are left out, in ascending order.
    """
    dimension = of_sample.shape[1]
    if dimension > GRAM_DIMENSION:
        remaining = (
            np.concatenate([of_sample, of_worst[:, number:].reshape(-1, dimension)])
            for number in candidates
        )
        return [len(rows) * largest_mean_square(rows) for rows in remaining]
    # The rows between two candidates are multiplied once for all smaller ones.
    gram, squares = of_sample.T @ of_sample, []
    for first, last in reversed(list(pairwise([*candidates, None]))):
        rows = of_worst[:, first:last].reshape(-1, dimension)
        gram = gram + rows.T @ rows
        squares.append(largest_dense_eigenvalue(gram))
    return squares[::-1]


def points_around(posterior: Posterior) -> int:
    """Number of points around the centre, which a mean over them needs.

    The distances vary the less the more coordinates there are. These need more points all the same,
    ten each, since the noise at a point is largest along its own direction.
    """
    d = posterior.dimension
    most = NOISE_POINTS_OF_GROUPS if posterior.rows_are_groups else NOISE_POINTS
    return min(most, 2 * NOISE_POINTS // d + 10 * d)


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Numbers of the largest values, the largest first and NaN last, equal ones in their order."""
    if not count:
        return np.empty(0, dtype=int)
    # Only values as large as the last that counts are sorted, since a sort of all takes longer.
    negative = -values
    last = np.partition(negative, count - 1)[count - 1]
    candidates = np.flatnonzero(~(negative > last))
    return candidates[np.argsort(negative[candidates], kind="stable")[:count]]


class _Rows:
    """Gradients of rows at the centre, or their differences to those at the centre."""

    def __init__(
        self,
        posterior: Posterior,
        center: Center,
        order: int,
        joint_draws: Points | None,
    ):
        self._posterior, self._center, self._order = posterior, center, order
        self._points: Points = ()
        if order:
            self._points = joint_draws or laplace_draws(posterior, center, points_around(posterior))
        has_few = posterior.source is None and not has_dense_curvature(posterior)
        self._gradients = stored_gradients(posterior) if has_few else RowGradients(posterior)
        # Mean of the gradients of all rows at the centre.
        self._mean = center.likelihood_gradient / posterior.n_rows
        self._seen = posterior.position_of_rows(center.position)
        self._jacobian: np.ndarray | sparse.csr_array | None = None
        if posterior.coordinates is not None:
            # Over the posterior it varies little beside the gradients.
            jacobian = posterior.coordinates.jacobian(center.position)
            self._jacobian = jacobian if has_few else jacobian.toarray()

    @property
    def are_sparse(self) -> bool:
        """Whether most numbers of a row are zero, and rows are differences to the centre."""
        return self.width < self._posterior.dimension and self._order > 0

    @property
    def width(self) -> int:
        """Numbers of a row that need not be zero."""
        return self._gradients.width

    def worst(self, count: int) -> np.ndarray:
        """Numbers of the rows with the largest gradients, the largest first."""
        posterior, root, d = self._posterior, self._center.curvature.root, self._posterior.dimension
        step = max(1, len(self._points) // SEARCH_POINTS)
        points = self._points[::step][:SEARCH_POINTS] or (None,)
        sketch: Matrix | np.ndarray = self._sketch if d > SKETCH else root
        function = partial(
            _largest_of_rows,
            gradients=None if posterior.source is not None else self._gradients,
            count=count,
            center=self._seen,
            points=[None if point is None else self._of_rows(point) for point in points],
            sketch=sketch,
            jacobian=self._jacobian,
        )
        numbers, sizes, start = np.empty(0, dtype=np.int64), np.empty(0), 0
        for rows, of_chunk, size in posterior.each_chunk(function, 2 * d):
            numbers = np.concatenate([numbers, start + rows])
            sizes, start = np.concatenate([sizes, of_chunk]), start + size
            chosen = largest(sizes, min(count, len(sizes)))
            numbers, sizes = numbers[chosen], sizes[chosen]
        return numbers

    @property
    def _sketch(self) -> np.ndarray:
        """Random directions in units of the root, shape (d, `SKETCH`)."""
        directions = np.random.default_rng(1984).standard_normal(
            (SKETCH, self._posterior.dimension)
        )
        return self._center.curvature.root.each(directions).T / np.sqrt(SKETCH)

    def longest(self, deviations: Table) -> float:
        """Largest length of a row in units of the curvature, of rows of many coordinates."""
        return float(np.linalg.norm(deviations @ self._sketch, axis=1).max())

    def deviations_apart(self, numbers: np.ndarray) -> Table:
        """Deviations of rows, each at one point, shape (rows, d)."""
        rows = self._posterior.take(numbers)  # all at once, since they may be in files
        at_center = self._at_center(rows)
        if not self._order:
            return _dense(at_center) - self._mean
        count = int(np.clip(len(numbers) // ROWS_A_POINT, 1, len(self._points)))
        parts = np.array_split(np.arange(len(numbers)), count)
        if self.are_sparse:
            # The mean of the differences is far smaller than each of them.
            return sparse.vstack(
                [
                    self._difference(point, self._posterior.part(rows, part), at_center[part])
                    for point, part in zip(self._points, parts, strict=False)
                ]
            ).tocsr()
        deviations = np.empty(at_center.shape)
        for point, part in zip(self._points, parts, strict=False):
            of_part = self._posterior.part(rows, part)
            difference = _dense(self._difference(point, of_part, at_center[part]))
            # Bessel's correction, since the mean of so few rows takes a part of the variance.
            bessel = np.sqrt(len(part) / max(1, len(part) - 1))
            deviations[part] = bessel * (difference - difference.mean(0))
        return deviations

    def deviations_at_all(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Deviations of rows, each at several points, shape (points, rows, d), and far away.

        Those of second order bend, and are largest where a long run comes to. The second array has
        them at points in the same directions there; for lower orders it is the first one.

        The mean difference of all rows is not known at each point. It is not subtracted, since the
        differences of these rows are far larger.
        """
        dimension = self._posterior.dimension
        if not len(numbers):
            return (none := np.empty((1, 0, dimension))), none
        rows = self._posterior.take(numbers)
        at_center = self._at_center(rows)
        if not self._order:
            return (deviations := _dense(at_center)[None] - self._mean), deviations
        count = int(np.clip(NOISE_ELEMENTS // (len(numbers) * dimension), 1, POINTS_A_ROW))
        points = self._points[:count]
        near = np.array([_dense(self._difference(point, rows, at_center)) for point in points])
        if self._order < 2:
            return near, near
        farther = [self._farther(point) for point in points]
        far = [_dense(self._difference(point, rows, at_center)) for point in farther]
        return near, np.array(far)

    def _farther(self, point: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The point in the same direction at `reach`."""
        layout, center = self._posterior.layout, self._center
        shift = layout.ravel(point) - center.position
        length = np.linalg.norm(center.curvature.root.inverse @ shift)
        position = center.position + reach(len(shift)) / length * shift
        return {**point, **layout.unravel(position)}

    def _of_rows(self, point: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """A point as the rows see it."""
        posterior = self._posterior
        if posterior.coordinates is None:
            return point
        return posterior.layout.unravel(posterior.position_of_rows(posterior.layout.ravel(point)))

    def _at_center(self, rows: Sequence[np.ndarray]) -> Table:
        return _moved(self._gradients.table(self._seen, rows), self._jacobian)

    def _difference(
        self,
        point: Mapping[str, np.ndarray],
        rows: Sequence[np.ndarray],
        at_center: Table,
    ) -> Table:
        """Gradients of rows at a point less what control variates subtract, shape (rows, d)."""
        posterior, center, point = self._posterior, self._seen, self._of_rows(point)
        of_point = _moved(_row_gradients_at(self._gradients, point, rows), self._jacobian)
        difference = of_point - at_center
        if self._order < 2:
            return difference
        shift = posterior.layout.ravel(point) - center
        step = np.cbrt(np.finfo(posterior.dtype).eps)
        ahead, back = (
            _moved(self._gradients.table(center + sign * step * shift, rows), self._jacobian)
            for sign in (1, -1)
        )
        return difference - (ahead - back) / (2 * step)


def _moved(table: Table, jacobian: np.ndarray | sparse.csr_array | None) -> Table:
    """Gradients in terms of the position from those in terms of that of the rows."""
    return table if jacobian is None else table @ jacobian


def _dense(table: Table) -> np.ndarray:
    return table if isinstance(table, np.ndarray) else table.toarray()


def _row_gradients_at(
    gradients: RowGradients, point: Mapping[str, np.ndarray], rows: Sequence[np.ndarray]
) -> Table:
    """Gradients of rows at a point, which may set the other variables too."""
    posterior = gradients.posterior
    others = {name: np.array(shared.get_value()) for name, shared in posterior.others.items()}
    posterior.set_others({**others, **point})
    table = gradients.table(posterior.layout.ravel(point), rows)
    posterior.set_others(others)
    return table


def _largest_of_rows(
    posterior: Posterior,
    rows: list[np.ndarray],
    *,
    gradients: RowGradients | None,
    count: int,
    center: np.ndarray,
    points: Sequence[Mapping[str, np.ndarray] | None],
    sketch: Matrix | np.ndarray,
    jacobian: np.ndarray | sparse.csr_array | None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Those of some rows with the largest gradients, these sizes, and the number of the rows.

    A size is the mean squared length of a gradient in units of the curvature.
    """
    total = np.zeros(())
    gradients = gradients or RowGradients(posterior)
    at_center = gradients.table(center, rows)
    for point in points:
        table = at_center
        if point is not None:
            table = _row_gradients_at(gradients, point, rows) - at_center
        white = _moved(table, jacobian) @ sketch
        total = total + np.einsum("ij,ij->i", white, white)
    chosen = largest(total, min(count, len(total)))
    return chosen, total[chosen], len(total)
