r"""The Gaussian nearest to a posterior, for posteriors whose mode is far from their mass.

In hierarchical models the joint mode may lie many standard deviations from the mass of the
posterior, or at a scale of zero where the density has no bound. The Gaussian
:math:`q = N(m, L L^\top)` with

.. math:: \mathrm{E}_q[\nabla \log \pi] = 0, \qquad
          \mathrm{E}_q[-\nabla^2 \log \pi] = (L L^\top)^{-1}

is the one with the least Kullback-Leibler divergence to the posterior (Opper and Archambeau
2009). Its mean is close to that of the posterior, and its precision is the curvature that a
chain meets on average. Both expectations are computed from gradients at points of q.

A Gaussian that is too wide has points where the log density bends upwards, steeply where it has
products or exponentials of parameters. Newton steps would widen the Gaussian further and diverge,
so the search takes absolute values of negative curvatures (Dauphin et al. 2014). Where steps turn
back, as around a skewed posterior, only a part of them is taken, so that they do not cycle (Irons
and Tuck 1969). Where heavy tails prevent convergence, steps of decreasing size at new points
average over many more points (Robbins and Monro 1951).

References
----------
Y. N. Dauphin, R. Pascanu, C. Gulcehre, K. Cho, S. Ganguli and Y. Bengio (2014). Identifying and
attacking the saddle point problem in high-dimensional non-convex optimization. *Advances in
Neural Information Processing Systems* 27.

B. M. Irons and R. C. Tuck (1969). A version of the Aitken accelerator for computer iteration.
*International Journal for Numerical Methods in Engineering* 1, 275-277.

M. Opper and C. Archambeau (2009). The variational Gaussian approximation revisited. *Neural
Computation* 21, 786-792.

H. Robbins and S. Monro (1951). A stochastic approximation method. *Annals of Mathematical
Statistics* 22, 400-407.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import linalg, special

from pymc_sgmcmc.matrices import Matrix

FEWEST_PAIRS = 50
"""Gradients are averaged over at least this many antithetic pairs of points, and over at least d
pairs. It is a compromise between the noise of the averages in low dimension and their time."""

MOST_ITERATIONS = 60
"""The search makes at most this many steps with the same standardised points, which bounds its
time, and half as many of decreasing size at new points where it does not converge."""

CONVERGED_SHIFT = 0.05
"""The search ends where the mean moves by less than this many standard deviations and the precision
has converged too. It is a small part of `LARGEST_SHIFT`, the error that a centre may have."""

LARGEST_SHIFT = 0.3
"""A Gaussian is near the posterior where its mean is at most this many standard deviations from a
better one. The mode of a mildly skewed posterior passes, and that of many group effects does
not."""

MOST_UNLIKE_GAUSSIAN = 3.0
"""A Gaussian is near the posterior where the mean curvature over it differs from its own by less
than this factor in each direction. Standard deviations then differ by less than a factor of 1.8,
with which a preconditioner still works well."""

LARGEST_LOSS = 0.05
"""A Gaussian is near the posterior where at most this part of its points is outside of the support.
This part of a Gaussian lies more than 1.6 standard deviations from its mean on one side."""

FLAT = 1e-6
"""A direction is flat where its mean curvature over a Gaussian is less than this part of that at
the centre. A heavy tail, whose mean curvature is small but not zero, should stay above it."""

LARGEST_NARROWING = 4.0
"""One step divides a variance in any direction by at most this factor, since the curvature may be
smaller in the narrower Gaussian."""

HOPELESS_ITERATIONS = 5
"""After a third of the steps the search ends without convergence where the mean gradient is beyond
doubt in this many successive steps, since heavy tails may cause a single large one, and where it is
not falling: a search that begins many standard deviations away moves by about one of them in a
step."""

PAIRS_ALONG_COORDINATES = 32
"""For positions that are too long for matrices, gradients are averaged over this many antithetic
pairs. It is a compromise between the noise of the averages and their time."""

BEYOND_DOUBT = 5.0
"""A deviation counts where it exceeds this many standard errors. Among thousands of coordinates
hardly any does so by chance. Searches that end so many standard deviations apart ended at different
modes: those that end early at the same one are nearer to each other."""

FARTHEST = 4.0
"""Of 10^4 draws from a Gaussian hardly one is so many standard deviations away in a direction."""

STEEPEST_POINTS = 8
"""The steepest place is searched from so many points, of which one can lead to another one."""

POWER_ITERATIONS = 4
"""The power iteration makes this many products with the curvature at each point. A bound on the
step size does not need many digits of the eigenvalue."""


@dataclass(frozen=True)
class Gaussian:
    """N(mean, root rootᵀ).

    Attributes
    ----------
    mean : numpy.ndarray, shape (d,)
    root : numpy.ndarray, shape (d, d)
    converged : bool
        Whether the search ended because mean and precision no longer changed.
    drifts : bool
        Whether the mean still moved by more than a standard deviation, in steps that became no
        shorter. Along a ridge that becomes narrower small steps tell nothing.
    """

    mean: np.ndarray
    root: np.ndarray
    converged: bool
    drifts: bool = False


@dataclass(frozen=True)
class Mismatch:
    """How a Gaussian differs from a posterior, in units in which it is N(0, I).

    Attributes
    ----------
    gradient : numpy.ndarray, shape (d,)
        Mean gradient of the log posterior.
    precision : numpy.ndarray, shape (d, d)
        Mean curvature, which is the unit matrix where the posterior is this Gaussian.
    lost : float
        Part of the points without a finite gradient, for example outside of the support.
    """

    gradient: np.ndarray
    precision: np.ndarray
    lost: float = 0.0

    @property
    def shift(self) -> float:
        """Largest distance to the better mean in standard deviations."""
        return float(np.abs(self.gradient).max())

    @property
    def scales(self) -> np.ndarray:
        """Relative precisions in the directions in which they are uncorrelated, or NaN."""
        if not np.isfinite(self.precision).all():
            return np.full(len(self.precision), np.nan)
        return linalg.eigvalsh(self.precision)


NONE = Mismatch(np.zeros(1), np.ones((1, 1)))
"""That of a posterior which is the Gaussian."""


@dataclass(frozen=True)
class MismatchAlongCoordinates:
    """How a Gaussian differs from a posterior along each coordinate.

    Attributes
    ----------
    gradient, gradient_error : numpy.ndarray, shape (d,)
        Mean gradient of the log posterior, in standard deviations given the other coordinates, and
        its standard error.
    precision, precision_error : numpy.ndarray, shape (d,)
        Diagonal of the mean curvature relative to that at the mean, and its standard error.
    curvature : numpy.ndarray, shape (d,)
        Curvature at the mean, in units in which the Gaussian is N(0, I).
    lost : float
        As in `Mismatch`.
    """

    gradient: np.ndarray
    gradient_error: np.ndarray
    precision: np.ndarray
    precision_error: np.ndarray
    curvature: np.ndarray
    lost: float = 0.0

    @property
    def newton(self) -> np.ndarray:
        """Step to the better mean, in units in which the Gaussian is N(0, I)."""
        return self.gradient / np.sqrt(self.curvature)

    def newton_of(self, gradient: np.ndarray) -> np.ndarray:
        """Newton step for another gradient, in these units."""
        return gradient / self.curvature

    @property
    def shift(self) -> float:
        """Largest distance to the better mean in standard deviations, less its uncertainty."""
        return float((np.abs(self.gradient) - BEYOND_DOUBT * self.gradient_error).max())

    @property
    def scales(self) -> np.ndarray:
        """Smallest and largest relative precision, each nearer to one by its uncertainty."""
        with np.errstate(invalid="ignore"):
            error = BEYOND_DOUBT * self.precision_error
            return np.array([(self.precision + error).min(), (self.precision - error).max()])


def is_guide(
    misfit: Mismatch | MismatchAlongCoordinates, largest_shift: float = LARGEST_SHIFT
) -> bool:
    """Whether a Gaussian is near the posterior."""
    if not (misfit.shift <= largest_shift and misfit.lost <= LARGEST_LOSS):
        return False
    scales = misfit.scales
    return bool(scales[0] > 1 / MOST_UNLIKE_GAUSSIAN and scales[-1] < MOST_UNLIKE_GAUSSIAN)


def mismatch_along_coordinates(
    gradient: Callable[[np.ndarray], np.ndarray],
    mean: np.ndarray,
    root: Matrix,
    rng: np.random.Generator,
    width: float,
) -> MismatchAlongCoordinates:
    r"""Mean gradient and curvature over a Gaussian, for positions too long for matrices.

    The points are antithetic pairs :math:`m \pm L z`. For a quadratic log density the mean gradient
    of each pair is zero. The i-th element of the difference of gradients, times :math:`z_i`, has
    the curvature along the i-th coordinate as its mean (Bekas, Kokiopoulou and Saad 2007). The
    curvature at the mean is estimated from the same directions, so the ratio of the two is one for
    a quadratic log density, however rough L is.

    Parameters
    ----------
    gradient : callable
        Gradient of the log density at a position, shape (d,).
    mean : numpy.ndarray, shape (d,)
    root : Matrix
    rng
    width : float
        Width of the differences of gradients at the mean, in units of the root.

    Examples
    --------
    >>> from pymc_sgmcmc.matrices import Diagonal
    >>> identity, rng = Diagonal(1.0), np.random.default_rng(1)
    >>> misfit = mismatch_along_coordinates(
    ...     lambda x: -x / [0.01, 9.0], np.zeros(2), identity, rng, 1e-3
    ... )
    >>> misfit.shift, misfit.scales
    (0.0, array([1., 1.]))

    References
    ----------
    C. Bekas, E. Kokiopoulou and Y. Saad (2007). An estimator for the diagonal of a matrix. *Applied
    Numerical Mathematics* 57, 1214-1229.
    """
    means, products, at_mean, squares = [], [], [], []
    for _ in range(PAIRS_ALONG_COORDINATES):
        z = rng.standard_normal(len(mean))
        shift = root @ z
        ahead, behind, near_ahead, near_behind = (
            root.T @ gradient(mean + size * shift) for size in (1.0, -1.0, width, -width)
        )
        if np.isfinite(ahead + behind + near_ahead + near_behind).all():
            means.append((ahead + behind) / 2)
            products.append(z * (behind - ahead) / 2)
            at_mean.append(z * (near_behind - near_ahead) / (2 * width))
            squares.append(z**2)
    number, d = len(means), len(mean)
    lost = 1 - number / PAIRS_ALONG_COORDINATES
    if number < PAIRS_ALONG_COORDINATES / 2:
        unknown, zero = np.full(d, np.inf), np.zeros(d)
        return MismatchAlongCoordinates(unknown, zero, unknown, zero, np.ones(d), lost)
    total = np.sum(squares, axis=0)
    curvature = np.sum(at_mean, axis=0) / total
    error = _error_of_ratio(np.array(at_mean), curvature, np.array(squares))
    # Correlated directions make the curvature uncertain, so it is at least its own error.
    curvature = np.maximum(curvature, error)
    change = np.array(products) - np.array(at_mean)
    mean_change = change.sum(0) / total
    deviation = np.sqrt(np.maximum(curvature, np.finfo(float).tiny))
    return MismatchAlongCoordinates(
        np.mean(means, axis=0) / deviation,
        np.std(means, axis=0, ddof=1) / np.sqrt(number) / deviation,
        1 + mean_change / deviation**2,
        _error_of_ratio(change, mean_change, np.array(squares)) / deviation**2,
        deviation**2,
        lost,
    )


def _error_of_ratio(values: np.ndarray, ratio: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Standard error of the sum of values over that of weights, along the first axis."""
    residuals = values - ratio * weights
    return residuals.std(0, ddof=1) / np.sqrt(len(values)) / weights.mean(0)


def chi_quantiles(count: int, dimension: int) -> np.ndarray:
    """Lengths of standard normal vectors at as many levels, evenly spaced, shape (count,)."""
    levels = (np.arange(count) + 0.5) / count
    return np.sqrt(2 * special.gammaincinv(dimension / 2, levels))


def mismatch(
    gradients: Callable[[np.ndarray], np.ndarray],
    mean: np.ndarray,
    root: np.ndarray,
    rng: np.random.Generator,
) -> Mismatch:
    r"""Mean gradient and curvature over a Gaussian.

    Points are in antithetic pairs along random orthogonal directions. Each set of d directions has
    its own distance, and the result is exact for a quadratic log density. The curvature between two
    points is weighted by the square of their distance, as in
    :math:`\mathrm{E}_q[-z \nabla^\top]`, which is the mean curvature over the Gaussian (Stein's
    identity). With equal weights the centre would count too much.

    Parameters
    ----------
    gradients : callable
        Gradients of the log density at several positions, both of shape (positions, d).
    mean, root : numpy.ndarray, shape (d,) and (d, d)
        Mean and root of the covariance.
    rng : numpy.random.Generator
    """
    d = len(mean)
    sets = max(1, int(np.ceil(FEWEST_PAIRS / d)))
    radii = np.repeat(chi_quantiles(sets, d), d)
    directions = np.concatenate([np.linalg.qr(rng.standard_normal((d, d)))[0] for _ in range(sets)])
    shifts = radii[:, None] * (directions @ root.T)
    ahead, behind = np.split(gradients(np.concatenate([mean + shifts, mean - shifts])), 2)
    finite = np.isfinite(ahead).all(axis=1) & np.isfinite(behind).all(axis=1)
    used = int(finite.sum())
    if used < max(2, d * sets / 2):
        return Mismatch(np.full(d, np.inf), np.full((d, d), np.nan), 1.0)
    ahead, behind = ahead[finite] @ root, behind[finite] @ root
    directions, radii = directions[finite], radii[finite]
    # -(ahead - behind) / 2 = radius * (mean curvature between the two) @ direction.
    outer = (radii[:, None] * directions).T @ (behind - ahead) / 2
    precision = d * outer / (radii**2).sum()
    lost = 1 - used / (sets * d)
    mean_gradient = 0.5 * (ahead + behind).mean(axis=0)
    return Mismatch(mean_gradient, 0.5 * (precision + precision.T), lost)


def steepest_curvature(
    gradients: Callable[[np.ndarray], np.ndarray],
    mean: np.ndarray,
    root: Matrix | np.ndarray,
    width: float,
    moved: tuple[slice | np.ndarray, Matrix | np.ndarray] | None = None,
) -> float:
    r"""Largest curvature within `FARTHEST` standard deviations of the mean of a Gaussian.

    A long run comes so far, and a step has to be stable there. At a point the direction v of the
    largest curvature is found by power iteration. The curvature in this direction increases most
    along the third derivatives :math:`\nabla (v^\top H v)`, in whose direction it is then computed
    at the farthest point.

    Parameters
    ----------
    gradients, mean, root
        As for `mismatch`.
    width : float
        Width of the differences of gradients, in units of the root.
    moved : pair of an index and a matrix, optional
        The coordinates whose curvature is meant, where a chain moves only these, and the root in
        whose units. Default: all of them, so that the curvature of the Gaussian is 1.
    """
    index, unit = moved or (slice(None), root)
    rng = np.random.default_rng(1953)
    points = rng.standard_normal((STEEPEST_POINTS, len(mean))) @ root.T
    directions = rng.standard_normal((STEEPEST_POINTS, len(mean[index])))

    def around(size: float) -> list[np.ndarray]:
        shifts = np.zeros_like(points)
        shifts[:, index] = size * directions @ unit.T
        at = mean + points
        return np.split(gradients(np.concatenate([at + shifts, at - shifts])), 2)

    def largest_by_power_iteration() -> float:
        nonlocal directions
        for _ in range(POWER_ITERATIONS):
            directions = _normalized(directions)
            ahead, behind = around(width)
            directions = (behind - ahead)[:, index] @ unit / (2 * width)
        lengths = np.linalg.norm(directions, axis=1)
        return float(lengths[np.isfinite(lengths)].max(initial=0.0))

    largest_by_power_iteration()
    directions = _normalized(directions)
    ahead, behind = around(np.sqrt(width))  # second differences round more
    steeper = (2 * gradients(mean + points) - ahead - behind) @ root
    points = FARTHEST * _normalized(steeper) @ root.T
    return largest_by_power_iteration()


def _normalized(rows: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.maximum(lengths, np.finfo(float).tiny)


def fit_gaussian(
    gradients: Callable[[np.ndarray], np.ndarray],
    mean: np.ndarray,
    root: np.ndarray,
    *,
    settles: bool = True,
    steps: int = MOST_ITERATIONS,
) -> Gaussian:
    """Search the Gaussian nearest to a density with a given gradient of its logarithm.

    The expectations are over the same standardised points in each step, which makes the search a
    fixed-point iteration. Where it does not converge, steps of decreasing size at new points
    follow, and `mismatch` tells whether their result is near the density.

    Parameters
    ----------
    gradients : callable
        Gradients of the log density at several positions, both of shape (positions, d).
    mean, root : numpy.ndarray, shape (d,) and (d, d)
        Mean and root with which the search begins.
    settles : bool
        Whether to try the same points in each step. It is false where an earlier search did not
        converge.
    steps : int
        Number of steps with the same points. With fewer than `MOST_ITERATIONS` none at new points
        follow.
    """
    shifts: list[float] = []
    means: list[np.ndarray] = []
    radius, length = 1.0, np.inf  # The curvature is known within the Gaussian.
    wanted, moved = np.zeros(len(mean)), np.zeros(len(mean))
    for iteration in range(steps if settles else 0):
        misfit = mismatch(gradients, mean, root, np.random.default_rng(1747))
        if not np.isfinite(misfit.shift):
            # With half the width fewer points are outside of the support.
            root = root / 2
            continue
        shifts.append(misfit.shift)
        means.append(mean)
        if iteration >= MOST_ITERATIONS / 3 and _is_hopeless(shifts):
            return Gaussian(mean, root, False)
        values, vectors = linalg.eigh(misfit.precision)
        if np.abs(values).max() < FLAT:  # It would run away where the density is constant.
            return Gaussian(mean, root, False)
        # The precision goes half the way, since that of a wide Gaussian is uncertain.
        change = (1 + np.abs(values)) / 2
        longest = float(np.abs(_mean_step(vectors, misfit.gradient, change, np.inf)).max())
        radius = max(1.0, next_radius(radius, length, longest))
        length = longest
        step = _mean_step(vectors, misfit.gradient, change, radius)
        moved, wanted = linalg.solve(root, np.column_stack([moved, wanted])).T
        part = _relaxation(moved, wanted, step)
        wanted, moved = root @ step, part * (root @ step)
        mean, root = mean + moved, _rescaled(root, vectors, change**part)
        # A precision has twice the relative error of a standard deviation.
        small = np.abs(step).max() < CONVERGED_SHIFT
        if small and np.abs(values - 1).max() < 2 * CONVERGED_SHIFT:
            return Gaussian(mean, root, True)
    if settles and steps < MOST_ITERATIONS:
        return Gaussian(mean, root, False, _drifts(root, means, shifts))
    rng = np.random.default_rng(1951)
    for number in range(MOST_ITERATIONS // 2):
        misfit = mismatch(gradients, mean, root, rng)
        if not np.isfinite(misfit.shift):
            root = root / 2
            continue
        # The first step goes half of the way, as those before it do (Robbins and Monro 1951).
        part = 1 / (2 + number / 2)
        values, vectors = linalg.eigh(misfit.precision)
        # The sign is kept, since the absolute value of an error does not average to zero.
        change = np.maximum(1 + part * (values - 1), 0.5)
        step = _mean_step(vectors, part * misfit.gradient, change, 1.0)
        mean, root = mean + root @ step, _rescaled(root, vectors, change)
    return Gaussian(mean, root, False, _drifts(root, means, shifts))


def _drifts(root: np.ndarray, means: list[np.ndarray], shifts: list[float]) -> bool:
    """Whether the second half of the steps moved by a standard deviation, with none shorter."""
    half = len(shifts) // 2
    if not half:
        return False
    moved = linalg.solve(root, means[-1] - means[half])
    return bool(np.abs(moved).max() > 1 and shifts[-1] > 0.5 * shifts[half])


def _is_hopeless(shifts: list[float]) -> bool:
    """Whether the mean gradient is large in the last steps, and smaller than before in none."""
    last, before = shifts[-HOPELESS_ITERATIONS:], shifts[:-HOPELESS_ITERATIONS]
    return bool(before) and min(last) > max(BEYOND_DOUBT, min(before))


def next_radius(radius: float, before: float, after: float) -> float:
    """Radius of the next step, by the distances to the end before and after the last step.

    It is twice the length of that if the distance fell by a quarter of it or more, since such steps
    are too short. On the way to a larger log scale, where the density is an exponential, it falls
    by half of them. A step that was shorter than its radius makes the next one no longer than
    that, or one standard deviation, within which the curvature is known: where a curvature from a
    few points is wrong, a step would go far away otherwise.
    """
    taken = min(radius, before)
    if after <= before - 0.25 * taken:
        return max(1.0, 2 * taken)
    return taken / 2 if after > before else taken


def _relaxation(moved: np.ndarray, wanted: np.ndarray, step: np.ndarray) -> float:
    """Part of a step to take after another one, of which a part was taken.

    Where the step turns back, it is the part after which no step would follow if they were linear
    in the position.
    """
    change = step - wanted
    if not step @ wanted < 0:
        return 1.0
    return min(1.0, float(-moved @ change / (change @ change)))


def _mean_step(
    vectors: np.ndarray, gradient: np.ndarray, change: np.ndarray, longest: float
) -> np.ndarray:
    """Step of the mean in units of the root, bounded in each direction and coordinate."""
    step = vectors @ np.clip(vectors.T @ gradient / change, -longest, longest)
    return step / max(1.0, float(np.abs(step).max()) / longest)


def _rescaled(root: np.ndarray, vectors: np.ndarray, change: np.ndarray) -> np.ndarray:
    """Root of a precision that is changed by given factors in given directions."""
    return root @ (vectors * np.minimum(change, LARGEST_NARROWING) ** -0.5) @ vectors.T
