"""Reasons where control variates help little, and the gain that is predicted for Langevin runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import linalg

from pymc_sgmcmc.record import WITH_LESS_NOISE
from pymc_sgmcmc.trace_tools.langevin import langevin_gain
from pymc_sgmcmc.trace_tools.reader import StoredRun, every_nth
from pymc_sgmcmc.trace_tools.zero_variance.estimate import ControlledMeans

SMALL_GAIN = 2.0
"""A note says that control variates help little where the variance ratio is below this number. At 2
they are worth as much as a second run."""

LITTLE_NOISE = 0.3
"""A run counts as one without injected noise where the long-run variance of its gradients is a
smaller share of what the injected noise makes of it. The share is 1 with injected noise and 0
without, apart from the error of its estimate, and the bound lies between the two."""

NOISY = 0.1
"""The noise of the gradients is named as a reason where its variance, over that of exact gradients,
is at least this number. With less noise the coefficients are off by less than a tenth."""

LOSS = 0.9
"""A note says that control variates add more error than they remove where the variance ratio is
below this number. It is 1 with a margin for the Monte-Carlo error."""

CANCELLING = 0.1
"""Successive gradients count as cancelling each other where their long-run variance is a smaller
share of the variance of single gradients. The share is near zero without injected noise."""


@dataclass(frozen=True)
class LinearFit:
    """Gradients as a linear function of the position, and the residuals.

    Attributes
    ----------
    precision : numpy.ndarray, shape (d, d)
        H, minus the slope.
    noise : numpy.ndarray, shape (d, d)
        V, the covariance of the residuals. Curvature that varies with the position counts as noise.
    covariance : numpy.ndarray, shape (d, d)
        Covariance of the positions.
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
    """Evenly spaced draws less their mean, shape (n, d), of draws of shape (chains, draws, d)."""
    values = every_nth(values).reshape(-1, values.shape[-1])
    return values - values.mean(0)


def slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Slopes of y in x by least squares.

    The normal equations take a third of the time of `scipy.linalg.lstsq` on the rows themselves,
    since there are many rows and few columns.
    """
    scale = x.std(0)
    scaled = x / scale
    return linalg.lstsq(scaled.T @ scaled, scaled.T @ y)[0] / scale[:, None]


def predicted_gain(
    run: StoredRun, fit: LinearFit, directions: np.ndarray, thin: int | None
) -> np.ndarray:
    """Predicted gain for the linear functions in the columns of `directions`, shape (q,).

    It is NaN for a function that is zero, for other than Langevin dynamics, and where `thin`, the
    number of transitions from one draw to the next, is not known.
    """
    gain = np.full(directions.shape[1], np.nan)
    if run.law is None or thin is None:
        return gain
    assert run.step_sizes is not None
    moving = np.abs(directions).max(0) > 0
    matrices = fit.precision, fit.noise, run.preconditioner
    gain[moving] = langevin_gain(
        *matrices, run.step_sizes, directions[:, moving], thin, law=run.law
    )
    return gain


def advice(
    run: StoredRun, estimate: ControlledMeans, fit: LinearFit, short: bool, coefficients: str
) -> list[str]:
    """Notes with the reasons where control variates help little.

    No note says that gradients cancel where batches are `short` beside the autocorrelation, since
    they cancel in any run then. `coefficients` is the setting of `zero_variance`.
    """
    ratios = estimate.variance_ratio[estimate.moving]
    measured = float(np.median(ratios)) if len(ratios) else np.nan
    notes = [] if short or measured > SMALL_GAIN else _injected_noise(run, estimate, fit)
    thin, identity = run.thin or 1, np.eye(run.dimension)
    stored = float(np.median(predicted_gain(run, fit, identity, run.thin)))
    # The gain can be predicted for Langevin dynamics alone, and measured for all runs.
    gain = stored if np.isfinite(stored) else measured
    instead = run.settings.get(WITH_LESS_NOISE)
    if instead and gain < SMALL_GAIN and not notes and _relative_noise(estimate, fit) > NOISY:
        notes.append(
            f"The variance of a mean falls by {gain:.2g} only, since the noise of gradients from "
            f"{run.settings['batch_size']} of {run.settings['n_rows']} rows remains. Use a larger "
            f"`batch_size`, or {instead}."
        )
    if thin > 1:
        every = float(np.median(predicted_gain(run, fit, identity, 1)))
        if every > SMALL_GAIN * stored:
            notes.append(
                f"One of {thin} transitions was stored, for which the predicted gain is "
                f"{stored:.2g}. It is {every:.2g} with all of them (`thin=1`)."
            )
    notes += _bias_of_squares(run, estimate, fit, coefficients)
    if measured < LOSS:
        remedy = "Use order=1, or sample" if estimate.order > 1 else "Sample"
        notes.append(
            f"The measured variance ratio is {measured:.2g}: coefficients of "
            f"{len(estimate.coefficients)} terms from {estimate.batches} batches add more error "
            f"than they remove. {remedy} more draws."
        )
    return notes


def _bias_of_squares(
    run: StoredRun, estimate: ControlledMeans, fit: LinearFit, coefficients: str
) -> list[str]:
    r"""Note where terms of order 2 leave part of the bias of second moments.

    They remove the bias where the coefficients are those of the Gaussian posterior. Coefficients
    over single noisy gradients are smaller by the factor H / (H + V) in each direction, as all
    slopes in a variable with errors are. Coefficients over batches of all transitions are not,
    since the noise of the gradients moves the chain as well.
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
        "The bias of second moments stays in part, since coefficients from "
        f"{source} are too small where gradients have noise. Use "
        "`zero_variance(idata, 2, moments='only')`, or `stein_calibrate`."
    ]


def _relative_noise(estimate: ControlledMeans, fit: LinearFit) -> float:
    """Mean variance of the gradient noise in coordinates in which the chain has unit covariance."""
    root = estimate.whitening.root
    return float(np.mean(np.einsum("ij,ik,kj->j", root, fit.noise, root)))


def _injected_noise(run: StoredRun, estimate: ControlledMeans, fit: LinearFit) -> list[str]:
    """Note where the noise of the gradients alone moves the chain."""
    root = estimate.whitening.root
    if run.law is not None and run.thin == 1:
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
        "The gradients of successive draws cancel: there is no injected noise, or little, and "
        "control variates remove no other noise. Sample with a step method that injects noise, "
        "a smaller step size, or `SGLDCV`."
    ]
