r"""Means and standard deviations of the coordinates of a run, with stated errors.

Each error has two parts. The bias does not fall with the number of draws: it is what the step size
leaves, or what the shape of the posterior leaves of a correction for it. The Monte-Carlo error is a
standard error. The stated error is the bias and twice the Monte-Carlo error, and should be above
the true error in 95 % of cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr
from xarray import DataTree

from pymc_sgmcmc.record import DIMENSION, MEAN_SHIFT, MOMENTS, SETTINGS
from pymc_sgmcmc.stein import STANDARD_ERRORS
from pymc_sgmcmc.trace_tools.affine_map import (
    Calibration,
    FewDrawsError,
    calibrate,
)
from pymc_sgmcmc.trace_tools.errors import errors_of
from pymc_sgmcmc.trace_tools.moments import StoredMoments, read_moments
from pymc_sgmcmc.trace_tools.reader import StoredRun, read_run
from pymc_sgmcmc.trace_tools.verdict import objection
from pymc_sgmcmc.trace_tools.zero_variance.estimate import Means, controlled_means
from pymc_sgmcmc.trace_tools.zero_variance.moments import means_of_moments

_PARTS = ("mean_error", "mean_bias", "sd_error", "sd_bias")
"""A trace has these errors beside the means and standard deviations."""

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

    @classmethod
    def read(cls, group: xr.Dataset) -> StatedErrors:
        """The errors of a trace, from its group of them."""
        mean, sd, *errors = (np.asarray(group[name]) for name in ("mean", "sd", *_PARTS))
        parts = [
            part
            for error, bias in (errors[:2], errors[2:])
            for part in (bias, (error - bias) / STANDARD_ERRORS)
        ]
        return cls(mean, sd, *parts)

    def dataset(self, labels: Sequence[str]) -> xr.Dataset:
        """The group of a trace with these errors."""
        arrays = {name: (DIMENSION, getattr(self, name)) for name in ("mean", "sd", *_PARTS)}
        return xr.Dataset(arrays, coords={DIMENSION: list(labels)})

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
    if (said := objection(errors_of(idata, brief=True))) is not None:
        raise ValueError(f"The chains have not converged: {said}")
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
    run, errors = read_run(idata), errors_of(idata)
    means = _controlled(run, _moments(idata))
    measured = errors["mean_error"]
    is_measured = np.isfinite(measured.value)
    taken_out, spread = map(np.nan_to_num, (measured.value, measured.standard_error))
    predicted = np.abs(np.nan_to_num(errors["predicted_mean_error"].value))
    variance = np.fmax(*(np.abs(errors[name].value) for name in ("variance_error", "rerun_error")))
    return StatedErrors(
        mean=means.mean - taken_out * errors.sd,
        sd=errors.sd,
        mean_bias=np.where(is_measured, 0.0, predicted),
        mean_monte_carlo=np.hypot(means.standard_error / errors.sd, spread),
        sd_bias=np.sqrt(1 + variance) - 1,
        sd_monte_carlo=errors.sd_se,
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
            return calibrate(run, moments)
        except FewDrawsError:
            pass
    return calibrate(run)


def _controlled(run: StoredRun, moments: StoredMoments | None) -> Means:
    """Means of the coordinates with control variates, over all transitions where possible."""
    if moments is not None:
        try:
            return means_of_moments(moments, 1, "least_squares", None)[0]
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
