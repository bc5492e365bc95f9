r"""Affine correction of the draws of a biased chain by Stein's identity.

With the chain's covariance :math:`\Lambda` and :math:`S = \mathrm{mean}[(\theta - \bar\theta)
\hat\nabla^\top]` the gradients have the slope :math:`-\hat H = S^\top \Lambda^{-1}` in the
position. On a Gaussian posterior :math:`\hat H` is its precision, whatever the law of the chain;
and for draws of any posterior :math:`S = -I`, so that :math:`\hat H^{-1}` is their covariance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pymc as pm
import xarray as xr
from scipy import linalg
from scipy.stats import norm
from xarray import DataTree

from pymc_sgmcmc.checks import one_of
from pymc_sgmcmc.errors import CalibrationError
from pymc_sgmcmc.matrices import covariance_root, matrix_root
from pymc_sgmcmc.posterior.position import PositionLayout, layout_from_model
from pymc_sgmcmc.posterior.transforms import constrain
from pymc_sgmcmc.record import MOMENTS, groups_of
from pymc_sgmcmc.trace_tools.gradients import gradients
from pymc_sgmcmc.trace_tools.moments import StoredMoments, read_moments
from pymc_sgmcmc.trace_tools.reader import (
    StoredRun,
    check_mean_gradient,
    chunks,
    columns_of,
    every_nth,
    has_gradients,
    posterior_of,
    read_run,
    root_of_draws,
)

GROUP = "stein_calibration"
"""Group of a calibrated trace that holds the correction and its errors."""

METHODS = ("slope", "second_moment")
"""Ways to get the precision."""

GROUPS = 40
"""Number of successive groups of draws, over all chains, from which the jackknife states errors.
A standard deviation of 40 groups is known to 11 %."""

DRAWS_BESIDE_MOMENTS = 4
"""Draws for each coordinate that are needed where the covariance is that of moments of all
transitions. The draws then only say how far the posterior is from Gaussian."""

FEWEST_GROUPS = 8
"""Groups below which the jackknife states errors that are too small."""

DRAWS_PER_COORDINATE = 10
"""Draws for each coordinate that are needed where the draws give the covariance, which says little
with fewer."""

LARGEST_ASYMMETRY = 0.2
"""Largest norm of the antisymmetric part of the slope over that of the symmetric part. The slope of
a Gaussian posterior is symmetric, so a larger share refuses the correction."""

STANDARD_ERRORS = 2.0
"""Monte-Carlo standard errors by which a reason to refuse has to be beyond its bound. Two are
exceeded by chance once in 40 cases."""

NONLINEAR_FACTOR = 2.0
"""Stated error over the first-order change of the correction. On densities with heavy and light
tails, two modes, banana and funnel shapes the true error is up to twice the change."""

LARGEST_SHARE = 0.5
"""Largest stated non-Gaussian error over the correction, both in log standard deviations. Beyond it
the correction is refused, since half of it may be wrong."""

SMALL_ERROR = 0.01
"""Relative error of a standard deviation that is small enough to be no reason to refuse."""

UNCERTAIN = 0.5
"""Stated non-Gaussian error, in log standard deviations, up to which it may be larger than the
correction. It is then not certain, so that it is stated and is no reason to refuse."""

DERIVED = ("posterior_predictive", "predictions", "log_likelihood", "log_prior", MOMENTS)
"""Groups with functions of the draws, which a calibrated trace does not have."""


class FewDrawsError(CalibrationError):
    """Where more draws, or moments of all transitions, may help."""


@dataclass(frozen=True)
class Calibration:
    """Affine map of the positions, and how well it is known.

    Attributes
    ----------
    center : numpy.ndarray, shape (d,)
        Mean of the chains, which the map leaves where it is.
    map : numpy.ndarray, shape (d, d)
        A: positions become center + A (position - center).
    covariance : numpy.ndarray, shape (d, d)
        Of the corrected positions.
    sd_ratio : numpy.ndarray, shape (d,)
        Standard deviations of the corrected positions over those of the chains.
    monte_carlo_error, nonlinear_error : numpy.ndarray, shape (d,)
        Relative errors of the corrected standard deviations: of finitely many draws, and by the
        posterior being no Gaussian.
    asymmetry : float
        Of the precision, relative; zero on a Gaussian posterior.
    third_order : float
        Part of the gradients that is quadratic in the position over that which is linear, from
        third-order Stein identities; zero on a Gaussian posterior.
    shrinkage : tuple of float
        Shares of the precision's differences between directions, and of its mean difference from
        that of the chains, that were kept.
    """

    center: np.ndarray
    map: np.ndarray
    covariance: np.ndarray
    sd_ratio: np.ndarray
    monte_carlo_error: np.ndarray
    nonlinear_error: np.ndarray
    asymmetry: float
    third_order: float
    shrinkage: tuple[float, float]

    @property
    def error(self) -> np.ndarray:
        """Stated relative error of the corrected standard deviations, shape (d,)."""
        return np.hypot(self.monte_carlo_error, self.nonlinear_error)


def stein_calibrate(
    idata: DataTree,
    model: pm.Model | None = None,
    *,
    method: str = "slope",
    moments: bool = False,
) -> DataTree:
    r"""Draws whose covariance is corrected for the bias of the chain, from its own gradients.

    The unconstrained positions become :math:`\bar\theta + A (\theta - \bar\theta)` with
    :math:`A \Lambda A^\top = \hat H^{-1}`, where :math:`\Lambda` is the covariance of the chains
    and :math:`-\hat H` the slope of their gradients in the position, symmetrised. No pass over the
    data. A, among the roots, is the map that moves the draws least in units of :math:`\Lambda`.

    **Law.** On a Gaussian posterior the covariance is exact but for Monte-Carlo error, for any step
    size and gradient noise, and that error is the smaller of two: sampling errors of S and
    :math:`\Lambda` cancel in the slope. On other posteriors an error remains of second order in
    the inflation. Its size is found from how the slope changes where the draws are weighted towards
    the corrected law, stated twice, and where it is beyond half of the correction nothing is
    corrected. *The mean is left as it is*: its bias, skewness times inflation, cannot be seen in
    the gradients, whose mean is zero at stationarity.

    Where differences of :math:`\hat H` between directions, or from :math:`\Lambda^{-1}`, are not
    large beside their Monte-Carlo error, they are shrunk (James and Stein).

    Parameters
    ----------
    idata : xarray.DataTree
        With `position` and `gradient` in `sample_stats`, as from step methods of this package. Not
        changed.
    model : pymc.Model, optional
        Needed where the posterior has variables other than the position's: transformed ones, such
        as scales, and deterministics. Also where the trace has no stored gradients: they are
        computed then, see `gradients`.
    method : {"slope", "second_moment"}
        "second_moment", for `SGLD`, `SGLDCV` and `ULA` alone, gets :math:`\hat H` from the
        covariance of the chain, step size and preconditioner: a chain at stationarity leaves its
        second moments as they are, so :math:`\Lambda H M + M H \Lambda = 2M + \tfrac{h}{2} M
        \mathrm{E}[\hat\nabla \hat\nabla^\top] M`. It does not use the pairing of positions and
        gradients, but has the Monte-Carlo error of :math:`\Lambda`, which the slope has not.
    moments : bool
        Take :math:`\Lambda` and S from ``idata["sgmcmc_moments"]``, sums over all transitions of
        the run, whichever draws are in the trace now; for method="slope".

    Returns
    -------
    xarray.DataTree
        The trace with corrected `posterior` and `position`, and a group ``stein_calibration``:
        ``sd_ratio``, ``sd_error`` (stated, relative, with its parts ``monte_carlo_error`` and
        ``nonlinear_error``), ``covariance``, ``center`` and ``map``, and as attributes ``method``,
        ``third_order``, ``asymmetry`` and the shares that shrinkage left. The gradients, and groups
        computed from the draws (posterior predictive, log likelihood), are left out: they belong
        to the draws before.

    Raises
    ------
    CalibrationError
        Where :math:`\hat H` is not positive definite or not symmetric, or the posterior is too
        far from Gaussian.
    ValueError
        Where the trace has no stored gradients, too few draws, draws that are not finite, chains
        far from the others, constant coordinates, or variables that need the model.

    References
    ----------
    C. Stein (1972). A bound for the error in the normal approximation to the distribution of a sum
    of dependent random variables. *Proceedings of the Sixth Berkeley Symposium*, 583–602.

    Examples
    --------
    Draws with standard deviation 1.5 of a standard normal posterior.

    >>> import numpy as np, xarray as xr
    >>> x = 1.5 * np.random.default_rng(1).normal(size=(4, 1000, 1))
    >>> dims = ("chain", "draw", "at")
    >>> stats = xr.Dataset({"position": (dims, x), "gradient": (dims, -x)})
    >>> posterior = xr.Dataset({"x": (("chain", "draw"), x[..., 0])})
    >>> idata = xr.DataTree.from_dict({"posterior": posterior, "sample_stats": stats})
    >>> calibrated = stein_calibrate(idata)
    >>> calibrated["posterior"]["x"].std().item()
    1.000
    """
    one_of("method", method, METHODS)
    if model is not None and not has_gradients(idata):
        idata = gradients(idata, model)
    run = read_run(idata)
    check_mean_gradient(run)
    rebuild = _rebuilder(idata, run, model)
    stored = read_moments(idata) if moments else None
    try:
        calibration = calibrate(run, method, stored)
    except FewDrawsError as error:
        if moments or MOMENTS not in idata.children or method != "slope":
            raise
        raise CalibrationError(
            f"{error} The trace has moments of all transitions, which say more: use `moments=True`."
        ) from None
    positions = np.empty(run.positions.shape)
    for chain, part in chunks(*run.positions.shape):
        centred = run.positions[chain, part] - calibration.center
        positions[chain, part] = centred @ calibration.map.T + calibration.center
    return _calibrated_trace(idata, run, calibration, positions, rebuild(positions), method)


def calibrate(
    run: StoredRun, method: str = "slope", stored: StoredMoments | None = None
) -> Calibration:
    """Find the affine map for the positions of a run, from its draws or from stored moments.

    Raises
    ------
    CalibrationError
        Where the correction would not be valid.
    """
    d = run.dimension
    count = run.positions.shape[0] * run.positions.shape[1]
    # With moments the draws say only how far the posterior is from Gaussian.
    needed = (DRAWS_PER_COORDINATE if stored is None else DRAWS_BESIDE_MOMENTS) * (d + 1)
    if count < needed:
        raise FewDrawsError(
            f"{d} coordinates should have at least {needed} draws, but the trace has {count}. "
            "Sample again with more `draws`."
        )
    if method == "second_moment" and not run.is_langevin:
        raise ValueError(
            "method='second_moment' needs a trace of SGLD, SGLDCV or ULA with constant step sizes "
            "and its settings, but the trace is of "
            f"{run.settings.get('sampler', 'an unknown step method')}. Use method='slope'."
        )
    if stored is None:
        moments = _moments(run, products_of_gradients=method == "second_moment")
    elif method == "slope":
        moments = _moments_of_groups(stored)
    else:
        raise ValueError(
            "`moments=True` should have method='slope', but got method='second_moment', which "
            "needs the step sizes of the draws. Leave one of them out."
        )
    whole = moments.whole()
    covariance = whole.covariance()
    try:
        root = root_of_draws(covariance, run.labels, count)
    except ValueError as error:
        raise CalibrationError(str(error)) from None

    def precision(part: _Moments) -> np.ndarray:
        return part.slope() if method == "slope" else _langevin_precision(part, run)

    # In coordinates in which the chains have unit covariance the precision is their inflation.
    raw = root.T @ precision(whole) @ root
    left_out = moments.leave_one_out()
    precisions = [precision(part) for part in left_out]
    apart = np.array([root.T @ matrix @ root for matrix in precisions])
    symmetric, kept = shrink((raw + raw.T) / 2, (apart + apart.swapaxes(1, 2)) / 2)
    asymmetry = _check_symmetric(raw, apart)
    _check_positive(symmetric, (apart + apart.swapaxes(1, 2)) / 2)
    monte_carlo = _jackknife_error(
        np.array([_shrunk_log_sds(*pair, kept) for pair in zip(left_out, precisions, strict=True)])
    )
    relative = linalg.inv(symmetric)
    correction = _log_sds(root, symmetric) - 0.5 * np.log(np.diag(covariance))
    change, change_error, third = _nonlinearity(run, whole.mean(), root, relative)
    nonlinear = NONLINEAR_FACTOR * np.sqrt(np.maximum(change**2 - change_error**2, 0))
    _check_gaussian(run, correction, change, change_error, third)
    _check_certain(run, correction, nonlinear)
    values, vectors = linalg.eigh(symmetric)
    half = (vectors * values**-0.5) @ vectors.T
    # Root half, times the inverse of the root: symmetric in whitened coordinates.
    mapped = linalg.solve_triangular(root, (root @ half).T, lower=True, trans="T").T
    return Calibration(
        center=whole.mean(),
        map=mapped,
        covariance=root @ relative @ root.T,
        sd_ratio=np.exp(correction),
        monte_carlo_error=monte_carlo,
        nonlinear_error=nonlinear,
        asymmetry=asymmetry,
        third_order=third,
        shrinkage=kept,
    )


def shrink(matrix: np.ndarray, apart: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """Pull a whitened precision towards a multiple of I, and that towards I, by its own error.

    Positive-part James-Stein factors: one less the sum of the squared errors over that of the
    squared differences. Nothing is pulled where the errors are small.

    Parameters
    ----------
    matrix : numpy.ndarray, shape (d, d)
        Symmetric.
    apart : numpy.ndarray, shape (groups, d, d)
        The same with each group of draws left out.

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
    levels = np.trace(apart, axis1=1, axis2=2) / d
    errors = _jackknife_error(apart - levels[:, None, None] * np.eye(d))
    kept = (
        _positive_part((errors**2).sum(), ((matrix - level * np.eye(d)) ** 2).sum()),
        _positive_part(float(_jackknife_error(levels)) ** 2, (level - 1) ** 2),
    )
    return _shrunk(matrix, kept), kept


def _shrunk(matrix: np.ndarray, kept: tuple[float, float]) -> np.ndarray:
    identity = np.eye(len(matrix))
    level = np.trace(matrix) / len(matrix)
    return kept[0] * (matrix - level * identity) + (1 + kept[1] * (level - 1)) * identity


def _positive_part(error: float, difference: float) -> float:
    return max(0.0, float(1 - error / difference)) if difference > 0 else 1.0


def _jackknife_error(apart: np.ndarray) -> np.ndarray:
    """Standard error from values with each group left out, along the first axis."""
    groups = len(apart)
    return np.sqrt((groups - 1) * apart.var(0))


def _log_sds(root: np.ndarray, precision: np.ndarray) -> np.ndarray:
    """Log standard deviations for a precision in coordinates whitened by a root."""
    try:
        half = linalg.solve_triangular(covariance_root(precision), root.T, lower=True)
    except linalg.LinAlgError:
        return np.full(len(root), np.inf)
    return 0.5 * np.log((half**2).sum(0))


def _shrunk_log_sds(
    moments: _Moments, precision: np.ndarray, kept: tuple[float, float]
) -> np.ndarray:
    """Corrected log deviations: what shrinkage takes from the chains has their sampling error."""
    root = covariance_root(moments.covariance())
    whitened = root.T @ precision @ root
    return _log_sds(root, _shrunk((whitened + whitened.T) / 2, kept))


# --- Moments --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Moments:
    """Sums over draws of positions x from an origin and gradients g; each with groups in front.

    Those of products of gradients are weighted by the step sizes of their chains.
    """

    origin: np.ndarray
    count: np.ndarray
    x: np.ndarray
    g: np.ndarray
    xx: np.ndarray
    xg: np.ndarray
    gg: np.ndarray | None

    def whole(self) -> _Moments:
        return _Moments(
            self.origin,
            self.count.sum(0),
            self.x.sum(0),
            self.g.sum(0),
            self.xx.sum(0),
            self.xg.sum(0),
            None if self.gg is None else self.gg.sum(0),
        )

    def leave_one_out(self) -> list[_Moments]:
        whole = self.whole()
        groups = range(len(self.count))
        return [
            _Moments(
                self.origin,
                whole.count - self.count[group],
                whole.x - self.x[group],
                whole.g - self.g[group],
                whole.xx - self.xx[group],
                whole.xg - self.xg[group],
                None if self.gg is None or whole.gg is None else whole.gg - self.gg[group],
            )
            for group in groups
        ]

    def mean(self) -> np.ndarray:
        return self.origin + self.x / self.count

    def covariance(self) -> np.ndarray:
        return self.xx / self.count - np.outer(self.x, self.x) / self.count**2

    def slope(self) -> np.ndarray:
        """Minus the slope of the gradients in the position."""
        stein = self.xg / self.count - np.outer(self.x, self.g) / self.count**2
        covariance = self.covariance()
        # In units of the standard deviations: those of the user may differ by any factor.
        scale = np.sqrt(np.diag(covariance))[:, None]
        correlation = covariance / scale / scale.T
        return -(linalg.solve(correlation, stein / scale, assume_a="pos") / scale).T


def _moments_of_groups(stored: StoredMoments) -> _Moments:
    """Sums over transitions, in about `GROUPS` groups."""
    chains, available = stored.position_position.shape[:2]
    if not available:
        raise ValueError(
            f"The moments of {len(stored.labels)} coordinates should have products of positions "
            "and gradients, but have none. Leave out `moments=True`."
        )
    if available > 1 and 2 * stored.group_counts[0, -1] < stored.group_counts[0, 0]:
        available -= 1  # a short last group goes with the one before
    if chains * available < FEWEST_GROUPS:
        raise ValueError(
            f"The moments of {len(stored.labels)} coordinates are in {chains * available} groups "
            f"of transitions over {chains} chains, and should be in {FEWEST_GROUPS} or more for "
            "the errors to be known. Sample more chains or draws, or leave out `moments=True`."
        )
    per_chain = min(max(1, -(-GROUPS // chains)), available)
    bounds = np.linspace(0, available, per_chain + 1).astype(int)[:-1]

    def grouped(values: np.ndarray) -> np.ndarray:
        counts = stored.group_counts.reshape(chains, -1, *[1] * (values.ndim - 2))
        added = np.add.reduceat(counts * values, bounds, axis=1)
        return added.reshape(-1, *values.shape[2:])

    return _Moments(
        origin=stored.origin,
        count=grouped(np.ones_like(stored.group_counts)),
        x=grouped(stored.group_position),
        g=grouped(stored.group_gradient),
        xx=grouped(stored.position_position),
        xg=grouped(stored.position_gradient),
        gg=None,
    )


def _moments(run: StoredRun, products_of_gradients: bool) -> _Moments:
    chains, draws, d = run.positions.shape
    per_chain = min(max(1, -(-GROUPS // chains)), draws)
    groups = chains * per_chain
    origin = every_nth(run.positions).mean((0, 1))
    count, x, g = np.zeros(groups), np.zeros((groups, d)), np.zeros((groups, d))
    xx, xg = np.zeros((groups, d, d)), np.zeros((groups, d, d))
    gg = np.zeros((groups, d, d)) if products_of_gradients else None
    bounds = np.linspace(0, draws, per_chain + 1).astype(int)
    for group in range(groups):
        chain, number = divmod(group, per_chain)
        piece = slice(bounds[number], bounds[number + 1])
        theta, gradient = run.positions[chain, piece], run.gradients[chain, piece]
        for _, part in chunks(1, len(theta), 2 * d):
            a, b = theta[part] - origin, np.asarray(gradient[part], dtype=float)
            count[group] += len(a)
            x[group] += a.sum(0)
            g[group] += b.sum(0)
            xx[group] += a.T @ a
            xg[group] += a.T @ b
            if gg is not None:
                assert run.step_sizes is not None
                gg[group] += run.step_sizes[chain] * b.T @ b
    return _Moments(origin, count, x, g, xx, xg, gg)


def _langevin_precision(moments: _Moments, run: StoredRun) -> np.ndarray:
    """H for which the chain's covariance is stationary; symmetric."""
    assert moments.gg is not None
    M, d = run.preconditioner, run.dimension
    root = matrix_root(M, "The preconditioner in the trace").dense()
    scaled = linalg.solve_triangular(root, moments.covariance(), lower=True)
    scaled = linalg.solve_triangular(root, scaled.T, lower=True)
    right = 2 * np.eye(d) + 0.5 * root.T @ (moments.gg / moments.count) @ root
    whitened = linalg.solve_continuous_lyapunov(scaled, right)
    inverse = linalg.solve_triangular(root, np.eye(d), lower=True)
    return inverse.T @ whitened @ inverse


# --- When not -------------------------------------------------------------------------------


def _check_symmetric(raw: np.ndarray, apart: np.ndarray) -> float:
    """Relative norm of the antisymmetric part, less what Monte-Carlo error makes of it."""
    skew = (raw - raw.T) / 2
    noise = _jackknife_error((apart - apart.swapaxes(1, 2)) / 2)
    scale = linalg.norm((raw + raw.T) / 2)
    squared = (skew**2).sum() - (noise**2).sum()
    asymmetry = float(np.sqrt(max(squared, 0)) / scale)
    margin = STANDARD_ERRORS * np.sqrt((noise**4).sum()) / scale**2
    if asymmetry**2 - margin > LARGEST_ASYMMETRY**2:
        raise CalibrationError(
            "The slope of the gradients in the position should be symmetric, but its antisymmetric "
            f"part is {asymmetry:.2g} of the symmetric one, more than {LARGEST_ASYMMETRY:g}: the "
            "gradients are not those of one smooth density, or the posterior is far from Gaussian. "
            "The draws are left as they are; sample again with a smaller `bias`."
        )
    return asymmetry


def _check_positive(symmetric: np.ndarray, apart: np.ndarray) -> None:
    values, vectors = linalg.eigh(symmetric)
    lowest = vectors[:, 0]
    error = float(_jackknife_error(np.einsum("i,gij,j->g", lowest, apart, lowest)))
    if values[0] <= STANDARD_ERRORS * error:
        raise FewDrawsError(
            "The slope of minus the gradients in the position should be positive in all "
            f"directions, but its smallest eigenvalue relative to the chains is {values[0]:.2g} "
            f"with a Monte-Carlo error of {error:.2g}: the draws are too few to tell, or the "
            "posterior is far from Gaussian. The draws are left as they are; sample more of them, "
            "or again with a smaller `bias`."
        )


def _nonlinearity(
    run: StoredRun, center: np.ndarray, root: np.ndarray, relative: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    r"""Change of the corrected log deviations with draws nearer to the corrected law.

    With weights :math:`1 - \tfrac12 (u^\top \Gamma u - \mathrm{tr}\,\Gamma)`, :math:`\Gamma = I -
    R`, the draws u, of unit covariance, have to first order the relative covariance R of the
    corrected ones. The residuals r of the gradients then change the slope by :math:`-\tfrac12
    \mathrm{E}[(u^\top \Gamma u) u r^\top]`, which is zero where gradients are linear.

    The third-order identity is :math:`\mathrm{E}[u_i^2 r_k] = 0` on a Gaussian, r being the
    gradient without its linear part.

    Returns
    -------
    numpy.ndarray, shape (d,)
        Change of each log standard deviation.
    numpy.ndarray, shape (d,)
        Its Monte-Carlo error.
    float
        Quadratic part over linear part of the gradient, Monte-Carlo error taken off.
    """
    d = run.dimension
    x, g = (every_nth(values) for values in (run.positions, run.gradients))
    u = linalg.solve_triangular(root, (x.reshape(-1, d) - center).T, lower=True).T
    r = g.reshape(-1, d) @ root
    u -= u.mean(0)
    r -= r.mean(0)
    linear = linalg.solve(u.T @ u, u.T @ r, assume_a="pos")  # u is white, so this is safe
    r -= u @ linear
    gamma = np.eye(d) - relative
    weights = -0.5 * np.einsum("ki,ki->k", u @ gamma, u)
    weights -= weights.mean()
    parts = np.array_split(np.arange(len(u)), min(GROUPS, len(u) // 2))
    corrected = root @ relative
    variances = np.einsum("ij,ij->i", corrected, root)
    changes, thirds = [], []
    for part in parts:
        change = (u[part] * weights[part, None]).T @ r[part] / len(part)
        # Of the log deviations, for a change of minus this in the precision.
        changes.append(0.5 * np.einsum("ij,jk,ik->i", corrected, change, corrected) / variances)
        thirds.append((u[part] ** 2 - 1).T @ r[part] / len(part))
    error = np.std(changes, axis=0, ddof=1) / np.sqrt(len(parts))
    if len(parts) % 2 == 0:
        # Larger from longer parts where the draws depend on each other over more than a part.
        pairs = np.mean(np.reshape(changes, (-1, 2, d)), axis=1)
        error = np.maximum(error, np.std(pairs, axis=0, ddof=1) / np.sqrt(len(pairs)))
    third = np.mean(thirds, axis=0)
    noise = np.var(thirds, axis=0, ddof=1) / len(parts)
    quadratic = 0.5 * max(0.0, float((third**2 - noise).sum()))
    return np.mean(changes, axis=0), error, float(np.sqrt(quadratic / (linear**2).sum()))


def _check_gaussian(
    run: StoredRun,
    correction: np.ndarray,
    change: np.ndarray,
    error: np.ndarray,
    third: float,
) -> None:
    # So many standard errors that none of the coordinates is beyond them by chance.
    beyond = norm.isf(norm.sf(STANDARD_ERRORS) / len(change))
    certain = NONLINEAR_FACTOR * np.maximum(np.abs(change) - beyond * error, 0)
    excess = certain - np.maximum(LARGEST_SHARE * np.abs(correction), SMALL_ERROR)
    if (excess > 0).any():
        worst = int(np.argmax(excess))
        raise CalibrationError(
            f"The posterior is too far from Gaussian for the correction: that of the standard "
            f"deviation of {run.labels[worst]}, {np.expm1(correction[worst]):+.1%}, has an error "
            f"of about {certain[worst]:.1%} from the shape of the posterior (third-order "
            f"identities: the quadratic part of the gradients is {third:.2g} of the linear one). "
            "The draws are left as they are: sample again with a smaller `bias`, or more draws "
            "where these are few or slow."
        )


def _check_certain(run: StoredRun, correction: np.ndarray, nonlinear: np.ndarray) -> None:
    excess = nonlinear - np.maximum(np.abs(correction), UNCERTAIN)
    if (excess > 0).any():
        worst = int(np.argmax(excess))
        raise CalibrationError(
            f"From so few draws it cannot be told whether the correction is right: that of the "
            f"standard deviation of {run.labels[worst]}, {np.expm1(correction[worst]):+.1%}, has "
            f"an error of up to {nonlinear[worst]:.1%} from the shape of the posterior. The draws "
            "are left as they are: sample more of them, or again with a smaller `bias`."
        )


# --- Trace ----------------------------------------------------------------------------------


def _rebuilder(
    idata: DataTree, run: StoredRun, model: pm.Model | None
) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """Function from positions to the variables of the posterior.

    Without a model the variables have to be coordinates of the position, which is found from
    their values.
    """
    draws = posterior_of(idata)
    shape = run.positions.shape
    columns = {}
    for name, values in draws.data_vars.items():
        column = columns_of(np.asarray(values).reshape(*shape[:2], -1), run.positions)
        if column is not None:
            columns[str(name)] = column
    others = [str(name) for name in draws.data_vars if name not in columns]
    if others and model is None:
        raise ValueError(
            f"The variables {', '.join(f'`{name}`' for name in others)} are not coordinates of the "
            "position but functions of it (a transform or a deterministic). Pass `model=`, or "
            "leave them out of the posterior."
        )
    layout = None
    if others and model is not None:
        layout = _layout(model, run)
        _check_model(draws[others], run, model, layout)

    def rebuild(positions: np.ndarray) -> dict[str, np.ndarray]:
        variables = {
            name: positions[..., part].reshape(draws[name].shape) for name, part in columns.items()
        }
        if layout is None or model is None:
            return variables
        flat = positions.reshape(-1, shape[-1])
        rebuilt = {
            name: np.empty(draws[name].shape, dtype=draws[name].dtype).reshape(
                len(flat), *draws[name].shape[2:]
            )
            for name in others
        }
        width = sum(int(np.prod(draws[name].shape[2:])) for name in others)
        for _, part in chunks(1, len(flat), width):
            for name, values in constrain(flat[part], model, layout, others).items():
                rebuilt[name][part] = values
        return variables | {name: rebuilt[name].reshape(draws[name].shape) for name in others}

    return rebuild


def _layout(model: pm.Model, run: StoredRun) -> PositionLayout:
    layout = layout_from_model(model, None, model.initial_point())
    if layout.dimension != run.dimension:
        raise ValueError(
            f"`model` has {layout.dimension} unconstrained coordinates, but the stored positions "
            f"have {run.dimension}. Pass the model that was sampled, with one step method for "
            "all variables."
        )
    return layout


def _check_model(
    draws: xr.Dataset, run: StoredRun, model: pm.Model, layout: PositionLayout
) -> None:
    """Whether the model gives the variables of the posterior at the stored positions."""
    names = [str(name) for name in draws.data_vars]
    unknown = [name for name in names if name not in model.named_vars]
    wrong = unknown
    if not unknown:
        first = run.positions[0, :5].astype(float)
        rebuilt = constrain(first, model, layout, names)
        wrong = [
            name
            for name in names
            if not np.allclose(rebuilt[name], draws[name].values[0, :5], rtol=1e-4, atol=1e-8)
        ]
    if wrong:
        raise ValueError(
            f"`model` should give the variables of the posterior at the stored positions, but does "
            f"not for {', '.join(f'`{name}`' for name in wrong)}. Pass the model that was "
            "sampled, or leave these variables out of the posterior."
        )


def _calibrated_trace(
    idata: DataTree,
    run: StoredRun,
    calibration: Calibration,
    positions: np.ndarray,
    variables: dict[str, np.ndarray],
    method: str,
) -> DataTree:
    posterior = idata["posterior"].to_dataset()
    for name, values in posterior_of(idata).data_vars.items():
        data = variables[str(name)].astype(values.dtype, copy=False)
        posterior[name] = values.copy(data=data).transpose(*posterior[name].dims)
    stats = idata["sample_stats"].to_dataset()
    dims = stats["position"].transpose("chain", "draw", ...).dims
    stats = stats.drop_vars("gradient").assign(position=(dims, positions))
    dim, column_dim = dims[-1], f"{dims[-1]}_of_column"
    report = xr.Dataset(
        {
            "sd_ratio": (dim, calibration.sd_ratio),
            "sd_error": (dim, calibration.error),
            "monte_carlo_error": (dim, calibration.monte_carlo_error),
            "nonlinear_error": (dim, calibration.nonlinear_error),
            "center": (dim, calibration.center),
            "covariance": ((dim, column_dim), calibration.covariance),
            "map": ((dim, column_dim), calibration.map),
        },
        coords={dim: list(run.labels), column_dim: list(run.labels)},
        attrs={
            "method": method,
            "third_order": calibration.third_order,
            "asymmetry": calibration.asymmetry,
            "kept_of_differences": calibration.shrinkage[0],
            "kept_of_level": calibration.shrinkage[1],
        },
    )
    groups = {
        name: group for name, group in groups_of(idata).items() if name.split("/")[0] not in DERIVED
    }
    groups |= {"posterior": posterior, "sample_stats": stats, GROUP: report}
    return DataTree.from_dict(groups, name=idata.name)
