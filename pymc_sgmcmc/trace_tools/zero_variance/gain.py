r"""How much control variates can help, and why they help little where they do.

The gain is from long-run covariances of Langevin dynamics in closed form.

On a Gaussian posterior with precision H, a chain :math:`\theta' = F \theta + \tfrac{h}{2} M e +
\zeta`, :math:`F = I - \tfrac{h}{2} M H`, has gradients :math:`-H \theta + e` with noise e of
covariance V, and injected noise :math:`\zeta \sim N(0, hM)`. Where each transition is stored,
:math:`\sum_k \hat\nabla_k` telescopes to :math:`\tfrac{2}{h} M^{-1} (\theta_{K+1} - \theta_1 -
\sum_k \zeta_k)`: terms of order 1 are a control variate on the injected noise. They leave that of
the gradient, so that the variance of a mean falls by :math:`1 + 1 / \delta` where
:math:`\delta = \tfrac{h}{4} M V` is the variance inflation by the gradient noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import linalg

from pymc_sgmcmc.stein import mean_gradient_test
from pymc_sgmcmc.trace_tools.reader import StoredRun, every_nth
from pymc_sgmcmc.trace_tools.zero_variance.estimate import ControlledMeans

SMALL_GAIN = 2.0
"""Variance ratio below which a note says that control variates help little. At 2 they are worth as
much as a second run."""

LITTLE_NOISE = 0.3
"""Smallest share of the injected noise that the step size implies. Below it the run has no injected
noise, where the share is zero but for the noise of its estimate."""

NOISY = 0.1
"""Variance of the noise of the gradients over that of exact gradients, from which on the noise is
named as a reason. Below it coefficients are off by less than a tenth."""

LOSS = 0.9
"""Variance ratio below which a note says that control variates cost more than they give. It is 1
with a margin for the Monte-Carlo error."""

IMPROBABLE = 1e-4
"""Probability of the mean gradient below which it does not count as zero. By chance one converged
run in ten thousand is below it."""

CANCELLING = 0.1
"""Largest long-run variance of the gradients, relative to that of single gradients, of successive
gradients that cancel. Without injected noise it is near zero."""


@dataclass(frozen=True)
class LinearFit:
    """Gradients as a linear function of the position, and what is left.

    Attributes
    ----------
    precision : numpy.ndarray, shape (d, d)
        H: minus the slope.
    noise : numpy.ndarray, shape (d, d)
        V: covariance of the residuals, in which curvature that varies counts as noise.
    covariance : numpy.ndarray, shape (d, d)
        Of the positions.
    """

    precision: np.ndarray
    noise: np.ndarray
    covariance: np.ndarray


def linear_fit(run: StoredRun) -> LinearFit:
    """Fit gradients by a linear function of the position."""
    x, g = centred_draws(run.positions), centred_draws(run.gradients)
    slope = slopes(x, g)
    residuals = g - x @ slope
    return LinearFit(
        -(slope + slope.T) / 2,
        residuals.T @ residuals / max(1, len(x) - x.shape[1] - 1),
        x.T @ x / len(x),
    )


def centred_draws(values: np.ndarray) -> np.ndarray:
    """Some of the draws less their mean, shape (n, d), of draws of shape (chains, draws, d)."""
    values = every_nth(values).reshape(-1, values.shape[-1])
    return values - values.mean(0)


def slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Slopes of y in x by least squares.

    Normal equations take a third of the time, since rows are many and columns few.
    """
    scale = x.std(0)
    scaled = x / scale
    return linalg.lstsq(scaled.T @ scaled, scaled.T @ y)[0] / scale[:, None]


def langevin_gain(
    precision: np.ndarray,
    noise: np.ndarray,
    preconditioner: np.ndarray,
    step_sizes: float | np.ndarray,
    directions: np.ndarray,
    thin: int = 1,
) -> np.ndarray:
    r"""Factor by which terms of order 1 reduce the variance of the mean of linear functions.

    :math:`S_{ff} / (S_{ff} - S_{fg} S_{gg}^{-1} S_{gf})` with the long-run covariances S of
    position and gradient of every `thin`-th transition. With every transition it is
    :math:`1 + 1 / \delta`, exactly for any step size; with draws so far apart that they are
    independent it is :math:`1 + H / V`, up to the inflation.

    Parameters
    ----------
    precision, noise, preconditioner : numpy.ndarray, shape (d, d)
        H, V and M.
    step_sizes : float or numpy.ndarray, shape (chains,)
        h, or that of each chain; the coefficients are the same for all.
    directions : numpy.ndarray, shape (d, q)
        A linear function of the position in each column.
    thin : int
        Transitions a draw.

    Returns
    -------
    numpy.ndarray, shape (q,)
        NaN where the chain with these settings has no stationary law.

    Examples
    --------
    >>> import numpy as np
    >>> identity = np.eye(1)
    >>> langevin_gain(identity, 10 * identity, identity, 0.2, identity).round(6)
    array([3.])
    """
    sizes, counts = np.unique(step_sizes, return_counts=True)
    matrices = (preconditioner, precision, noise)
    each = [_long_run_covariances(*matrices, size, thin) for size in sizes]
    if any(covariances is None for covariances in each):
        return np.full(directions.shape[1], np.nan)
    S_ff, S_fg, S_gg = np.average(each, axis=0, weights=counts)  # type: ignore[arg-type]
    explained = S_fg @ linalg.solve(S_gg, S_fg.T)
    total = np.einsum("iq,ij,jq->q", directions, S_ff, directions)
    left = np.einsum("iq,ij,jq->q", directions, S_ff - explained, directions)
    # Nothing is left without noise; rounding can leave less.
    return total / np.maximum(left, total * np.finfo(float).eps)


def _long_run_covariances(
    preconditioner: np.ndarray,
    precision: np.ndarray,
    noise: np.ndarray,
    step_size: float,
    thin: int,
) -> np.ndarray | None:
    """Long-run covariances S_ff, S_fg and S_gg, shape (3, d, d), of position f and gradient g.

    None where the chain has no stationary law.
    """
    identity = np.eye(len(precision))
    F = identity - step_size / 2 * preconditioner @ precision
    if np.abs(linalg.eigvals(F)).max() >= 1:
        return None
    pushed = step_size / 2 * preconditioner @ noise
    driven = step_size * preconditioner + step_size / 2 * pushed @ preconditioner
    covariance = linalg.solve_discrete_lyapunov(F, driven)
    before = np.linalg.matrix_power(F, thin - 1)
    later = linalg.inv(identity - F @ before)
    # Sums over lags: of the position with its past, and with the noise of past gradients.
    past = F @ before @ later @ covariance
    S_ff = covariance + past + past.T
    S_fe = before @ later @ pushed
    S_fg = S_fe - S_ff @ precision
    S_gg = precision @ S_ff @ precision - precision @ S_fe - (precision @ S_fe).T + noise
    return np.array([S_ff, S_fg, S_gg])


def predicted_gain(
    run: StoredRun, fit: LinearFit, directions: np.ndarray, thin: int | None
) -> np.ndarray:
    """Predicted gain for linear functions, shape (q,), NaN for other than Langevin dynamics.

    Parameters
    ----------
    run : StoredRun
    fit : LinearFit
    directions : numpy.ndarray, shape (d, q)
        A linear function of the position in each column, without gain where it is zero.
    thin : int or None
        Transitions a draw, if they are known.
    """
    gain = np.full(directions.shape[1], np.nan)
    if not run.is_langevin or thin is None:
        return gain
    assert run.step_sizes is not None
    moving = np.abs(directions).max(0) > 0
    gain[moving] = langevin_gain(
        fit.precision, fit.noise, run.preconditioner, run.step_sizes, directions[:, moving], thin
    )
    return gain


def advice(
    run: StoredRun, estimate: ControlledMeans, fit: LinearFit, short: bool, coefficients: str
) -> list[str]:
    """Notes why control variates help little.

    Parameters
    ----------
    run : StoredRun
    estimate : ControlledMeans
    fit : LinearFit
    short : bool
        Whether batches are shorter than the autocorrelation: all gradients seem to cancel then.
    coefficients : str
        The setting of `zero_variance`.
    """
    ratios = estimate.variance_ratio[estimate.moving]
    measured = float(np.median(ratios)) if len(ratios) else np.nan
    notes = [] if short or measured > SMALL_GAIN else _injected_noise(run, estimate, fit)
    thin, identity = run.thin or 1, np.eye(run.dimension)
    stored = float(np.median(predicted_gain(run, fit, identity, run.thin)))
    # Both gains are known for Langevin dynamics alone; the measured gain is for all.
    gain = stored if np.isfinite(stored) else measured
    noisy = run.settings.get("gradient") == "plain" and _relative_noise(estimate, fit) > NOISY
    if noisy and gain < SMALL_GAIN and not notes:
        notes.append(
            f"The variance of a mean falls by {gain:.2g} only: the noise of plain gradients from "
            f"{run.settings['batch_size']} of {run.settings['n_rows']} rows remains. Use "
            '`SGLDCV` (or `gradient="cv"`), or a larger `batch_size`.'
        )
    if thin > 1:
        every = float(np.median(predicted_gain(run, fit, identity, 1)))
        if every > SMALL_GAIN * stored:
            notes.append(
                f"One of {thin} transitions was stored: the predicted gain is {stored:.2g}, and "
                f"{every:.2g} with all of them (`thin=1`)."
            )
    notes += _bias_of_squares(run, estimate, fit, coefficients)
    if measured < LOSS:
        remedy = (
            "Use order=1, or sample more draws." if estimate.order > 1 else "Sample more draws."
        )
        notes.append(
            f"The measured variance ratio is {measured:.2g}: coefficients of "
            f"{len(estimate.coefficients)} terms from {estimate.batches} batches add more error "
            f"than they take. {remedy}"
        )
    return notes


def advice_of_chain(run: StoredRun) -> list[str]:
    """Note where the mean gradient is not zero."""
    probability = mean_gradient_test(every_nth(run.gradients))
    if not probability < IMPROBABLE:
        return []
    return [
        "The mean gradient is not zero, as it is at stationarity (probability "
        f"{probability:.1g}): the chains have not converged, see `gradient_convergence`, or "
        "the gradients are those of other data or another model. Do not trust the means."
    ]


def _bias_of_squares(
    run: StoredRun, estimate: ControlledMeans, fit: LinearFit, coefficients: str
) -> list[str]:
    r"""Note where terms of order 2 leave most of the bias of second moments.

    They take it where coefficients are those of the Gaussian posterior. Coefficients over single
    noisy gradients are smaller, by H / (H + V) in each direction, as slopes in a variable with
    errors are; over batches of all transitions they are not, since the noise of gradients moves
    the chain as well.
    """
    if estimate.order < 2 or "gradient" not in run.settings:
        return []
    if run.thin == 1 and coefficients == "batch_means":
        return []
    if _relative_noise(estimate, fit) < NOISY:
        return []
    source = f"one of {run.thin} transitions" if run.thin else "some of the transitions"
    if coefficients == "marginal":
        source = "single draws"
    return [
        "The bias of second moments, which order 2 removes with batches of all transitions, stays "
        f"in part: coefficients from {source} are too small where gradients "
        "have noise. Use `zero_variance(idata, 2, moments='only')`, or `stein_calibrate`."
    ]


def _relative_noise(estimate: ControlledMeans, fit: LinearFit) -> float:
    """Variance of the noise of gradients, in coordinates in which the chain has unit covariance."""
    root = estimate.whitening.root
    return float(np.mean(np.einsum("ij,ik,kj->j", root, fit.noise, root)))


def _injected_noise(run: StoredRun, estimate: ControlledMeans, fit: LinearFit) -> list[str]:
    """Note where no noise but that of the gradients moves the chain."""
    root = estimate.whitening.root
    if run.is_langevin and run.thin == 1:
        assert run.step_sizes is not None
        inverse = np.linalg.inv(run.preconditioner)
        expected = np.mean(4 / run.step_sizes) * np.einsum("ij,ik,kj->j", root, inverse, root)
        share = float(np.mean(estimate.long_run_gradient / expected))
        if share >= LITTLE_NOISE:
            return []
    else:
        slope = root.T @ fit.precision
        single = np.einsum("ij,jk,ik->i", slope, fit.covariance, slope)
        single += np.einsum("ij,ik,kj->j", root, fit.noise, root)
        share = float(np.median(estimate.long_run_gradient / single))
        if share >= CANCELLING:
            return []
    return [
        "The gradients of successive draws cancel: no injected noise, or little beside that of "
        "the gradients, moves the chain. Control variates remove the share of the injected noise "
        "alone, so there is nothing to gain. Sample with a step method that injects noise, with a "
        "smaller step size, or with `SGLDCV`."
    ]
