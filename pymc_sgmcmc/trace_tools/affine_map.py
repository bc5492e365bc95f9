r"""Affine map that corrects the draws of a biased chain by Stein's identity, on arrays.

With the covariance :math:`\Lambda` of the chain and :math:`S = \mathrm{mean}[(\theta - \bar\theta)
\hat\nabla^\top]` the gradients have the slope :math:`-\hat H = S^\top \Lambda^{-1}` in the
position. On a Gaussian posterior :math:`\hat H` is its precision, whatever the law of the chain.
For draws of any posterior :math:`S = -I`, so that :math:`\hat H^{-1}` is their covariance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import linalg

from pymc_sgmcmc.errors import CalibrationError
from pymc_sgmcmc.matrices import covariance_root
from pymc_sgmcmc.stein import STANDARD_ERRORS, Estimate, beyond_doubt
from pymc_sgmcmc.trace_tools.moments import StoredMoments
from pymc_sgmcmc.trace_tools.reader import StoredRun, chunks, every_nth, root_of_draws
from pymc_sgmcmc.trace_tools.whitening import Whitening

GROUPS = 40
"""The jackknife states errors from this number of successive groups of draws over all chains. From
40 groups a standard deviation is known to 11 %."""

FEWEST_GROUPS = 8
"""The jackknife needs at least this number of groups. From fewer groups a standard deviation is
uncertain by more than a quarter."""

DRAWS_PER_COORDINATE = 10
"""Where the draws give the covariance, at least this number of them is needed for each coordinate.
The number is a compromise: a covariance from fewer draws says little, and more draws take time."""

DRAWS_BESIDE_MOMENTS = 4
"""At least this number of draws for each coordinate is needed where moments of all transitions give
the covariance. The draws only say how far the posterior is from Gaussian then."""

LARGEST_ASYMMETRY = 0.2
"""The correction is refused where the antisymmetric part of the slope is a larger share of the
symmetric part, both measured by their norms. The slope of a Gaussian posterior is symmetric."""

NONLINEAR_FACTOR = 2.0
"""The stated error from the shape of the posterior is this multiple of the first-order change of
the correction. On densities with heavy and light tails, two modes, and the shapes of a banana and a
funnel the true error is up to twice the change."""

LARGEST_SHARE = 0.5
"""The correction is refused where its error from the shape of the posterior is a larger share of
it, both in log standard deviations. Half of the correction may be wrong then."""

SMALL_ERROR = 0.01
"""An error of a standard deviation is no reason to refuse the correction where it is smaller than
this share of the standard deviation."""

UNCERTAIN = 0.5
"""An error from the shape of the posterior may be larger than the correction without being certain.
It is then stated up to this size in log standard deviations, beyond which the correction is
refused."""


class FewDrawsError(CalibrationError):
    """The correction may be possible with more draws, or with moments of all transitions."""


@dataclass(frozen=True)
class Calibration:
    """Affine map of the positions, with its errors.

    Attributes
    ----------
    center : numpy.ndarray, shape (d,)
        Mean of the chains, which the map does not move.
    map : numpy.ndarray, shape (d, d)
        A: positions become center + A (position - center).
    covariance : numpy.ndarray, shape (d, d)
        Covariance of the corrected positions.
    sd_ratio : numpy.ndarray, shape (d,)
        Standard deviations of the corrected positions over those of the chains.
    monte_carlo_error, nonlinear_error : numpy.ndarray, shape (d,)
        Relative errors of the corrected standard deviations. The first is from the finite number of
        draws, the second from the shape of the posterior, where it is not Gaussian.
    mean_shift, mean_shift_error : numpy.ndarray, shape (d,)
        Difference of the mean of the chains from that of the posterior, to first order in the
        third derivatives of the log density, and its Monte-Carlo error.
    inflation : float
        Mean over all directions of the relative error of the variance of the chains.
    asymmetry : float
        Antisymmetric part of the precision over the symmetric part, zero on a Gaussian posterior.
    third_order : float
        Part of the gradients that is quadratic in the position over the part that is linear, from
        third-order Stein identities. It is zero on a Gaussian posterior.
    shrinkage : tuple of float
        Shares that shrinkage kept: of the differences of the precision between directions, and of
        its mean difference from the precision of the chains.
    """

    center: np.ndarray
    map: np.ndarray
    covariance: np.ndarray
    sd_ratio: np.ndarray
    monte_carlo_error: np.ndarray
    nonlinear_error: np.ndarray
    mean_shift: np.ndarray
    mean_shift_error: np.ndarray
    inflation: float
    asymmetry: float
    third_order: float
    shrinkage: tuple[float, float]

    @property
    def error(self) -> np.ndarray:
        """Stated relative error of the corrected standard deviations, shape (d,)."""
        return np.hypot(self.monte_carlo_error, self.nonlinear_error)


def calibrate(run: StoredRun, stored: StoredMoments | None = None) -> Calibration:
    """Find the affine map for the positions of a run, from its draws or from stored moments.

    Raises
    ------
    CalibrationError
        Where the correction would not be valid.
    ValueError
        Where the moments have no products, or too few groups.
    """
    d = run.dimension
    count = run.positions.shape[0] * run.positions.shape[1]
    needed = (DRAWS_PER_COORDINATE if stored is None else DRAWS_BESIDE_MOMENTS) * (d + 1)
    if count < needed:
        raise FewDrawsError(
            f"{d} coordinates should have at least {needed} draws, but the trace has {count}. "
            "Sample again with more `draws`."
        )
    if stored is None:
        origin, sums = _sums_of_draws(run)
    else:
        origin, sums = stored.origin, _sums_of_moments(stored)
    whole, left_out = sums.whole(), sums.leave_one_out()
    center, covariance = origin + whole.mean(), whole.covariance()
    try:
        root = root_of_draws(covariance, run.labels, count)
    except ValueError as error:
        raise CalibrationError(str(error)) from None

    # In coordinates in which the chains have unit covariance the precision is their inflation.
    raw = root.T @ whole.slope() @ root
    precisions = [part.slope() for part in left_out]
    raw_left_out = np.array([root.T @ matrix @ root for matrix in precisions])
    symmetric_left_out = (raw_left_out + raw_left_out.swapaxes(1, 2)) / 2
    symmetric, kept = shrink((raw + raw.T) / 2, symmetric_left_out)
    asymmetry = _check_symmetric(raw, raw_left_out)
    _check_positive(symmetric, symmetric_left_out)
    monte_carlo = _jackknife_error(
        np.array([_shrunk_log_sds(*pair, kept) for pair in zip(left_out, precisions, strict=True)])
    )
    relative = linalg.inv(symmetric)
    correction = _log_sds(root, symmetric) - 0.5 * np.log(np.diag(covariance))
    shape = _nonlinearity(run, Whitening(center, root), relative)
    change, change_error = shape.change.value, shape.change.standard_error
    nonlinear = NONLINEAR_FACTOR * _sizes(change, change_error)
    _check_gaussian(run, correction, change, change_error)
    _check_certain(run, correction, nonlinear)
    return Calibration(
        center=center,
        map=_least_map(root, relative),
        covariance=root @ relative @ root.T,
        sd_ratio=np.exp(correction),
        monte_carlo_error=monte_carlo,
        nonlinear_error=nonlinear,
        mean_shift=shape.shift.value,
        mean_shift_error=shape.shift.standard_error,
        inflation=float(np.trace(symmetric)) / d - 1,
        asymmetry=asymmetry,
        third_order=shape.third_order,
        shrinkage=kept,
    )


def map_between(covariance: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Matrix A that gives draws of a covariance another one, and moves them least.

    Examples
    --------
    >>> import numpy as np
    >>> map_between(np.diag([4.0, 1.0]), np.diag([1.0, 9.0]))
    array([[0.5, 0. ],
           [0. , 3. ]])
    """
    root = covariance_root(covariance)
    half = linalg.solve_triangular(root, covariance_root(wanted), lower=True)
    return _least_map(root, half @ half.T)


def _least_map(root: np.ndarray, relative: np.ndarray) -> np.ndarray:
    """The map that is symmetric in coordinates whitened by a root, to a covariance there."""
    values, vectors = linalg.eigh(relative)
    half = (vectors * values**0.5) @ vectors.T
    return linalg.solve_triangular(root, (root @ half).T, lower=True, trans="T").T


def shrink(matrix: np.ndarray, left_out: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """Pull a whitened precision towards a multiple of I, and that multiple towards 1.

    Each is pulled by a positive-part James-Stein factor: one minus the sum of the squared errors
    over that of the squared differences. Nothing is pulled where the errors are small.

    Parameters
    ----------
    matrix : numpy.ndarray, shape (d, d)
        Symmetric matrix.
    left_out : numpy.ndarray, shape (groups, d, d)
        The same matrix, each time with one group of draws left out.

    Returns
    -------
    numpy.ndarray, shape (d, d)
    tuple of float
        Factors of the differences from the multiple of I, and of the multiple from 1.

    Examples
    --------
    >>> import numpy as np
    >>> exact = np.diag([2.0, 4.0])
    >>> shrink(exact, np.array([exact, exact]))[1]
    (1.0, 1.0)
    """
    d = len(matrix)
    level = np.trace(matrix) / d
    levels = np.trace(left_out, axis1=1, axis2=2) / d
    errors = _jackknife_error(left_out - levels[:, None, None] * np.eye(d))
    kept = (
        _positive_part((errors**2).sum(), ((matrix - level * np.eye(d)) ** 2).sum()),
        _positive_part(float(_jackknife_error(levels)) ** 2, (level - 1) ** 2),
    )
    return _shrunk(matrix, kept), kept


def _shrunk(matrix: np.ndarray, kept: tuple[float, float]) -> np.ndarray:
    """Matrix of which the given shares of the differences are kept."""
    identity = np.eye(len(matrix))
    level = np.trace(matrix) / len(matrix)
    return kept[0] * (matrix - level * identity) + (1 + kept[1] * (level - 1)) * identity


def _positive_part(error: float, difference: float) -> float:
    """James-Stein factor of a squared error and a squared difference."""
    return max(0.0, float(1 - error / difference)) if difference > 0 else 1.0


def _jackknife_error(left_out: np.ndarray) -> np.ndarray:
    """Standard error from values with each group left out, along the first axis."""
    groups = len(left_out)
    return np.sqrt((groups - 1) * left_out.var(0))


def _log_sds(root: np.ndarray, precision: np.ndarray) -> np.ndarray:
    """Log standard deviations for a precision in coordinates whitened by a root."""
    try:
        half = linalg.solve_triangular(covariance_root(precision), root.T, lower=True)
    except linalg.LinAlgError:
        return np.full(len(root), np.inf)
    return 0.5 * np.log((half**2).sum(0))


def _shrunk_log_sds(sums: _Sums, precision: np.ndarray, kept: tuple[float, float]) -> np.ndarray:
    """Corrected log standard deviations with one group of draws left out.

    They contain the sampling error of the covariance, where shrinkage pulls towards that.
    """
    root = covariance_root(sums.covariance())
    whitened = root.T @ precision @ root
    return _log_sds(root, _shrunk((whitened + whitened.T) / 2, kept))


# --- Sums over draws ------------------------------------------------------------------------


class _Sums(NamedTuple):
    """Sums over draws of positions x, from an origin, and gradients g, and of their products.

    The first axis of each array numbers the groups of draws, except in the sums over all groups.
    """

    counts: np.ndarray
    x: np.ndarray
    g: np.ndarray
    xx: np.ndarray
    xg: np.ndarray

    def whole(self) -> _Sums:
        """Sums over all groups."""
        return _Sums(*(sums.sum(0) for sums in self))

    def leave_one_out(self) -> list[_Sums]:
        """Sums over all groups but one, for each group."""
        pairs = list(zip(self.whole(), self, strict=True))
        groups = range(len(self.counts))
        return [_Sums(*(total - sums[group] for total, sums in pairs)) for group in groups]

    def mean(self) -> np.ndarray:
        """Mean position from the origin."""
        return self.x / self.counts

    def covariance(self) -> np.ndarray:
        """Covariance of the positions."""
        return self.xx / self.counts - np.outer(self.x, self.x) / self.counts**2

    def slope(self) -> np.ndarray:
        """Minus the slope of the gradients in the position."""
        stein = self.xg / self.counts - np.outer(self.x, self.g) / self.counts**2
        covariance = self.covariance()
        # Correlations, since the units of the user may differ by any factor.
        scale = np.sqrt(np.diag(covariance))[:, None]
        correlation = covariance / scale / scale.T
        return -(linalg.solve(correlation, stein / scale, assume_a="pos") / scale).T


def _sums_of_moments(stored: StoredMoments) -> _Sums:
    """Sums over transitions in about `GROUPS` groups, from the origin of the moments."""
    chains, available = stored.position_position.shape[:2]
    if not available:
        raise ValueError(
            f"The moments of {len(stored.labels)} coordinates should have products of positions "
            "and gradients, but have none. Leave out `moments=True`."
        )
    if available > 1 and 2 * stored.group_counts[0, -1] < stored.group_counts[0, 0]:
        available -= 1  # A short last group is joined with the group before.
    if chains * available < FEWEST_GROUPS:
        raise ValueError(
            f"The moments of {len(stored.labels)} coordinates are in {chains * available} groups "
            f"of transitions over {chains} chains, but should be in at least {FEWEST_GROUPS}. "
            "Sample more chains or draws, or leave out `moments=True`."
        )
    per_chain = min(max(1, -(-GROUPS // chains)), available)
    bounds = np.linspace(0, available, per_chain + 1).astype(int)[:-1]

    def grouped(values: np.ndarray) -> np.ndarray:
        counts = stored.group_counts.reshape(chains, -1, *[1] * (values.ndim - 2))
        added = np.add.reduceat(counts * values, bounds, axis=1)
        return added.reshape(-1, *values.shape[2:])

    return _Sums(
        counts=grouped(np.ones_like(stored.group_counts)),
        x=grouped(stored.group_position),
        g=grouped(stored.group_gradient),
        xx=grouped(stored.position_position),
        xg=grouped(stored.position_gradient),
    )


def _sums_of_draws(run: StoredRun) -> tuple[np.ndarray, _Sums]:
    """An origin near the draws, and sums in about `GROUPS` groups."""
    chains, draws, d = run.positions.shape
    per_chain = min(max(1, -(-GROUPS // chains)), draws)
    groups = chains * per_chain
    origin = every_nth(run.positions).mean((0, 1))
    shapes = ((), (d,), (d,), (d, d), (d, d))
    sums = _Sums(*(np.zeros((groups, *shape)) for shape in shapes))
    bounds = np.linspace(0, draws, per_chain + 1).astype(int)
    for group in range(groups):
        chain, number = divmod(group, per_chain)
        piece = slice(bounds[number], bounds[number + 1])
        positions, gradients = run.positions[chain, piece], run.gradients[chain, piece]
        for _, part in chunks(1, len(positions), 2 * d):
            x, g = positions[part] - origin, np.asarray(gradients[part], dtype=float)
            sums.counts[group] += len(x)
            sums.x[group] += x.sum(0)
            sums.g[group] += g.sum(0)
            sums.xx[group] += x.T @ x
            sums.xg[group] += x.T @ g
    return origin, sums


# --- Where the correction is refused --------------------------------------------------------


def _check_symmetric(raw: np.ndarray, left_out: np.ndarray) -> float:
    """Relative norm of the antisymmetric part, less what Monte-Carlo error makes of it.

    Raises
    ------
    CalibrationError
        Where it is too large.
    """
    skew = (raw - raw.T) / 2
    noise = _jackknife_error((left_out - left_out.swapaxes(1, 2)) / 2)
    scale = linalg.norm((raw + raw.T) / 2)
    squared = (skew**2).sum() - (noise**2).sum()
    asymmetry = float(np.sqrt(max(squared, 0)) / scale)
    margin = STANDARD_ERRORS * np.sqrt((noise**4).sum()) / scale**2
    if asymmetry**2 - margin > LARGEST_ASYMMETRY**2:
        raise CalibrationError(
            "The slope of the gradients should be symmetric, but its antisymmetric part is "
            f"{asymmetry:.2g} of the symmetric part. Sample again with a smaller `bias`, or check "
            "the gradients."
        )
    return asymmetry


def _check_positive(symmetric: np.ndarray, left_out: np.ndarray) -> None:
    """Raise a FewDrawsError where the precision may not be positive in all directions."""
    values, vectors = linalg.eigh(symmetric)
    lowest = vectors[:, 0]
    error = float(_jackknife_error(np.einsum("i,gij,j->g", lowest, left_out, lowest)))
    if values[0] <= STANDARD_ERRORS * error:
        raise FewDrawsError(
            "The precision should be positive in all directions, but is "
            f"{values[0]:.2g} ± {error:.2g} in one: the draws are too few to tell. Sample more of "
            "them, or again with a smaller `bias`."
        )


class _Shape(NamedTuple):
    """What the shape of a posterior that is not Gaussian does to the correction.

    Attributes
    ----------
    change : Estimate
        Change of each log standard deviation with draws closer to the corrected law.
    shift : Estimate
        Difference of the mean of the chains from that of the posterior.
    third_order : float
        Quadratic part of the gradient over the linear part, without what Monte-Carlo error adds.
    """

    change: Estimate
    shift: Estimate
    third_order: float


def _nonlinearity(run: StoredRun, whitening: Whitening, relative: np.ndarray) -> _Shape:
    r"""Changes with draws closer to the corrected law, to first order.

    With weights :math:`1 - \tfrac12 (u^\top \Gamma u - \mathrm{tr}\,\Gamma)`, :math:`\Gamma = I -
    R`, the draws u, of unit covariance, have to first order the relative covariance R of the
    corrected draws. The residuals r of the gradients then change the slope by :math:`-\tfrac12
    \mathrm{E}[(u^\top \Gamma u) u r^\top]`, which is zero where gradients are linear. The mean
    gradient becomes :math:`-\tfrac12 \mathrm{E}[(u^\top \Gamma u) r]`. It is zero at the mean of
    the posterior, so that the mean of the chains is off by :math:`\tfrac12 R \, \mathrm{E}[(u^\top
    \Gamma u) r]`.

    The third-order identity is :math:`\mathrm{E}[u_i^2 r_k] = 0` on a Gaussian posterior, r being
    the gradient without its linear part.
    """
    d, root = run.dimension, whitening.root
    x, g = (every_nth(values).reshape(-1, d) for values in (run.positions, run.gradients))
    u, r = whitening.positions(x), whitening.gradients(g)
    u -= u.mean(0)
    r -= r.mean(0)
    linear = linalg.solve(u.T @ u, u.T @ r, assume_a="pos")  # u is nearly white.
    r -= u @ linear
    gamma = np.eye(d) - relative
    weights = -0.5 * np.einsum("ki,ki->k", u @ gamma, u)
    weights -= weights.mean()
    parts = np.array_split(np.arange(len(u)), min(GROUPS, len(u) // 2))
    corrected = root @ relative
    variances = np.einsum("ij,ij->i", corrected, root)
    changes, shifts, thirds = [], [], []
    for part in parts:
        change = (u[part] * weights[part, None]).T @ r[part] / len(part)
        # The precision changes by minus this matrix.
        changes.append(0.5 * np.einsum("ij,jk,ik->i", corrected, change, corrected) / variances)
        shifts.append(-corrected @ (weights[part] @ r[part]) / len(part))
        thirds.append((u[part] ** 2 - 1).T @ r[part] / len(part))
    third = np.mean(thirds, axis=0)
    noise = np.var(thirds, axis=0, ddof=1) / len(parts)
    quadratic = 0.5 * max(0.0, float((third**2 - noise).sum()))
    third_order = float(np.sqrt(quadratic / (linear**2).sum()))
    return _Shape(_mean_of_parts(changes), _mean_of_parts(shifts), third_order)


def _mean_of_parts(values: list[np.ndarray]) -> Estimate:
    """Mean of values of successive parts of the draws, which may depend on their neighbours."""
    error = np.std(values, axis=0, ddof=1) / np.sqrt(len(values))
    if len(values) % 2 == 0:
        # Longer parts show a larger error where draws in neighbouring parts depend on each other.
        pairs = np.mean(np.reshape(values, (-1, 2, len(error))), axis=1)
        error = np.maximum(error, np.std(pairs, axis=0, ddof=1) / np.sqrt(len(pairs)))
    return Estimate(np.mean(values, axis=0), error)


def _sizes(values: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Root mean squares of quantities of which estimates with standard errors are given.

    The quantities of all coordinates are taken for draws of one normal law, whose variance is what
    the squares of the estimates have beyond those of the errors. So noise alone, of which the
    largest of many values would be far off, does not count. The variance is uncertain too, most of
    all where coordinates are few, and counts with its standard errors. A quantity that is certainly
    larger is taken as it is.
    """
    uncertain = STANDARD_ERRORS * np.sqrt(2 * (errors**4).sum()) / len(errors)
    variance = max(0.0, float((values**2 - errors**2).mean() + uncertain))
    share = variance / np.maximum(variance + errors**2, np.finfo(float).tiny)
    pooled = (share * values) ** 2 + share * errors**2
    alone = values**2 - (beyond_doubt(len(values)) * errors) ** 2
    return np.sqrt(np.maximum(pooled, alone))


def _check_gaussian(
    run: StoredRun, correction: np.ndarray, change: np.ndarray, error: np.ndarray
) -> None:
    """Raise a CalibrationError where the error from the shape of the posterior is too large."""
    beyond = beyond_doubt(len(change)) * error
    certain = NONLINEAR_FACTOR * np.maximum(np.abs(change) - beyond, 0)
    excess = certain - np.maximum(LARGEST_SHARE * np.abs(correction), SMALL_ERROR)
    if (excess > 0).any():
        worst = int(np.argmax(excess))
        raise CalibrationError(
            f"The posterior is too far from Gaussian: the correction of {run.labels[worst]}, "
            f"{np.expm1(correction[worst]):+.1%}, has an error of about {certain[worst]:.1%}. "
            "Sample again with a smaller `bias`, or with more draws."
        )


def _check_certain(run: StoredRun, correction: np.ndarray, nonlinear: np.ndarray) -> None:
    """Raise a CalibrationError where the error from the shape of the posterior is unknown."""
    excess = nonlinear - np.maximum(np.abs(correction), UNCERTAIN)
    if (excess > 0).any():
        worst = int(np.argmax(excess))
        raise CalibrationError(
            f"The draws are too few to judge the correction of {run.labels[worst]}, "
            f"{np.expm1(correction[worst]):+.1%}, which has an error of up to "
            f"{nonlinear[worst]:.1%}. Sample more draws, or again with a smaller `bias`."
        )
