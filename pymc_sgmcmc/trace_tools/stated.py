r"""Means and standard deviations of the coordinates of a run, with stated errors.

Each error has two parts. The bias does not fall with the number of draws: it is what the step size
leaves, or what the shape of the posterior leaves of a correction for it. The Monte-Carlo error is a
standard error. The stated error is the bias and twice the Monte-Carlo error, and should be above
the true error in 95 % of cases.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from xarray import DataTree

from pymc_sgmcmc.record import MEAN_SHIFT, MOMENTS, SETTINGS
from pymc_sgmcmc.trace_tools.affine_map import (
    Calibration,
    FewDrawsError,
    calibrate,
)
from pymc_sgmcmc.trace_tools.bias import bias_report, objection_to_convergence
from pymc_sgmcmc.trace_tools.moments import StoredMoments, read_moments
from pymc_sgmcmc.trace_tools.reader import StoredRun, read_run
from pymc_sgmcmc.trace_tools.verdict import STANDARD_ERRORS
from pymc_sgmcmc.trace_tools.zero_variance.estimate import Means, controlled_means
from pymc_sgmcmc.trace_tools.zero_variance.moments import means_of_moments

SHARE_OF_SHIFT = 0.5
"""A mean that was corrected to first order may still be off by this share of the correction."""


@dataclass(frozen=True)
class StatedErrors:
    """Means and standard deviations with their errors, each of shape (d,).

    Attributes
    ----------
    mean, sd : numpy.ndarray
    mean_bias, mean_monte_carlo : numpy.ndarray
        Errors of the means, in posterior standard deviations.
    sd_bias, sd_monte_carlo : numpy.ndarray
        Relative errors of the standard deviations.
    covariance : numpy.ndarray, shape (d, d), or None
        Corrected covariance, None where draws were not corrected.
    """

    mean: np.ndarray
    sd: np.ndarray
    mean_bias: np.ndarray
    mean_monte_carlo: np.ndarray
    sd_bias: np.ndarray
    sd_monte_carlo: np.ndarray
    covariance: np.ndarray | None = None

    @property
    def mean_error(self) -> np.ndarray:
        """Stated errors of the means, in posterior standard deviations."""
        return self.mean_bias + STANDARD_ERRORS * self.mean_monte_carlo

    @property
    def sd_error(self) -> np.ndarray:
        """Stated relative errors of the standard deviations."""
        return self.sd_bias + STANDARD_ERRORS * self.sd_monte_carlo

    @property
    def largest(self) -> float:
        """The largest stated error."""
        return float(max(self.mean_error.max(), self.sd_error.max()))

    @property
    def bias(self) -> float:
        """Largest part that more draws do not make smaller."""
        return float(max(self.mean_bias.max(), self.sd_bias.max()))

    @property
    def monte_carlo(self) -> float:
        """Largest part that falls with the number of draws."""
        return STANDARD_ERRORS * float(max(self.mean_monte_carlo.max(), self.sd_monte_carlo.max()))


def of_calibration(idata: DataTree) -> StatedErrors:
    """Means and standard deviations of a run, corrected for its step size.

    The covariance is that of `calibrate`. Means are corrected by the shift of the chains in the
    third derivatives of the log density. Those at the centre predict it without Monte-Carlo error,
    the draws show it with one, and a James-Stein factor pulls the second towards the first.

    Raises
    ------
    CalibrationError
        Where the posterior is too far from Gaussian, or the draws are too few.
    ValueError
        Where the trace cannot be used.
    """
    run = read_run(idata)
    objection = objection_to_convergence(
        idata, run.positions.astype(float), run.gradients.astype(float), run.labels
    )
    if objection is not None:
        raise ValueError(f"The chains have not converged: {objection}")
    moments = _moments(idata)
    calibration = _calibration(run, moments)
    means = _controlled(run, moments)
    sd = np.sqrt(np.diag(calibration.covariance))
    shift, shift_error = _shift(idata, calibration, sd)
    return StatedErrors(
        mean=means.mean - shift,
        sd=sd,
        mean_bias=SHARE_OF_SHIFT * np.abs(shift) / sd,
        mean_monte_carlo=np.hypot(means.standard_error, shift_error) / sd,
        sd_bias=calibration.nonlinear_error,
        sd_monte_carlo=calibration.monte_carlo_error,
        covariance=calibration.covariance,
    )


def of_draws(idata: DataTree) -> StatedErrors:
    """Means and standard deviations of the draws of a run as they are.

    The bias is that of `bias_report`: the measured error of a mean, where the trace has it, is
    taken out, and the predicted one counts otherwise.

    Raises
    ------
    ValueError
        Where the trace cannot be used.
    """
    run, report = read_run(idata), bias_report(idata)
    means = _controlled(run, _moments(idata))
    sd = report["sd"].to_numpy()
    measured, measured_error = (
        np.nan_to_num(report[name].to_numpy()) for name in ("mean_error", "mean_error_se")
    )
    predicted = np.abs(np.nan_to_num(report["predicted_mean_error"].to_numpy()))
    variance = np.fmax(report["variance_error"].abs(), report["rerun_error"].abs()).to_numpy()
    return StatedErrors(
        mean=means.mean - measured * sd,
        sd=sd,
        mean_bias=np.where(report["mean_error"].notna(), 0.0, predicted),
        mean_monte_carlo=np.hypot(means.standard_error / sd, measured_error),
        sd_bias=np.sqrt(1 + variance) - 1,
        sd_monte_carlo=report["sd_se"].to_numpy(),
    )


def _moments(idata: DataTree) -> StoredMoments | None:
    """Moments of all transitions, None where the trace has none that can be used."""
    if MOMENTS not in idata.children:
        return None
    try:
        return read_moments(idata)
    except ValueError:
        return None


def _calibration(run: StoredRun, moments: StoredMoments | None) -> Calibration:
    """Correction from the moments of all transitions where these suffice, or from the draws."""
    if moments is not None and moments.position_position.size:
        try:
            return calibrate(run, stored=moments)
        except FewDrawsError:
            pass
    return calibrate(run)


def _controlled(run: StoredRun, moments: StoredMoments | None) -> Means:
    """Means of the coordinates with control variates, over all transitions where possible."""
    if moments is not None:
        try:
            return means_of_moments(moments, 1, "least_squares", False, None)[0]
        except ValueError:  # The batches are too few for so many terms.
            pass
    return controlled_means(
        [run.positions], run.positions, run.gradients, coefficients="marginal", labels=run.labels
    )


def _shift(
    idata: DataTree, calibration: Calibration, sd: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Shift of the means and its Monte-Carlo error."""
    predicted = np.zeros(len(sd))
    if SETTINGS in idata.children and MEAN_SHIFT in idata[SETTINGS].data_vars:
        bend = np.asarray(idata[SETTINGS][MEAN_SHIFT], dtype=float)
        predicted = bend * max(0.0, calibration.inflation) * sd
    error = calibration.mean_shift_error / sd
    difference = (calibration.mean_shift - predicted) / sd
    squares = float((difference**2).sum())
    kept = max(0.0, 1 - float((error**2).sum()) / squares) if squares else 0.0
    return predicted + kept * difference * sd, kept * error * sd
