"""The report of `polish`: what moved by more than its errors, and the verdicts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import special

from pymc_sgmcmc.polishing.chains import is_known
from pymc_sgmcmc.polishing.comparison import PROBABILITIES, Shifts, compare, doubt
from pymc_sgmcmc.polishing.modes import Mode
from pymc_sgmcmc.record import LARGEST_MEAN_ERROR
from pymc_sgmcmc.trace_tools.diagnostics import ess_and_r_hat
from pymc_sgmcmc.trace_tools.verdict import (
    LARGEST_R_HAT,
    MEAN_OFF,
    NOT_CONVERGED,
    OK,
    SMALLEST_ESS,
    TOO_LARGE,
    TOO_SMALL,
    UNKNOWN,
)

SHAPE_OFF = "quantiles off"
"""A coordinate has this verdict where mean and variance are within their bounds and a quantile is
not."""

OFF = (MEAN_OFF, TOO_LARGE, TOO_SMALL, SHAPE_OFF)
"""These verdicts on a coordinate say that the run is wrong."""

WRONG = "off"
"""The whole run has this verdict where a coordinate is off, or mass is in another mode."""

LARGEST_ERROR = 0.07
"""A coordinate is "ok" only where the standard errors of the shift of its mean and of its log
standard deviation are at most this. The two parts are 0.05, from 400 effective draws of the run,
and 0.05 of the exact chains. A shift of 0.4 would be found then."""

MOST_MEMORY = 0.5
"""Where exact chains remember more of their starts, their draws are not those of the posterior."""

NAMED = 3
"""A verdict names at most this many coordinates."""


def make_report(
    labels: Sequence[str],
    run: np.ndarray,
    starts: np.ndarray,
    later: np.ndarray,
    stated: float,
    moving: bool,
    modes: Sequence[Mode] | None,
) -> pd.DataFrame:
    """Report on a run, a row a coordinate; `attrs` has the verdict on the whole run.

    Parameters
    ----------
    labels : sequence of str
        Labels of the d coordinates.
    run : numpy.ndarray, shape (chains, draws, d)
    starts : numpy.ndarray, shape (n, d)
    later : numpy.ndarray, shape (transitions, n, d)
    stated : float
        Relative error of the variance that the user accepts.
    moving : bool
        Whether the law of the exact chains still moved when they ended.
    modes : sequence of Mode, or None
        Modes outside of the run, None where they were not searched.
    """
    shifts = compare(run, starts, later)
    ess, r_hat = ess_and_r_hat(run)
    most = np.abs(shifts.quantiles).argmax(0)
    columns = np.arange(len(labels))
    report = pd.DataFrame(
        {
            "mean": run.mean((0, 1)),
            "sd": run.std((0, 1), ddof=1),
            "polished_mean": shifts.posterior_mean,
            "polished_sd": shifts.posterior_sd,
            "mean_shift": shifts.mean,
            "mean_shift_se": shifts.mean_error,
            "log_sd_shift": shifts.log_sd,
            "log_sd_shift_se": shifts.log_sd_error,
            "quantile": np.array(PROBABILITIES)[most],
            "quantile_shift": shifts.quantiles[most, columns],
            "quantile_shift_se": shifts.quantile_errors[most, columns],
            "memory": shifts.memory,
            "ess_bulk": ess,
            "r_hat": r_hat,
        },
        index=pd.Index(labels, name="coordinate"),
    )
    sure = doubt(len(labels), len(starts))
    report["verdict"] = _verdicts(report, shifts, stated, sure, moving)
    report.attrs |= {"bias": stated, "standard_errors": sure, "moving": moving}
    report.attrs["run"] = _word(report, modes)
    rested = not moving and is_known(later) and shifts.memory.max() <= MOST_MEMORY
    report.attrs["verdict"] = _sentence(report, stated, sure, moving, rested, modes)
    return report


def _verdicts(
    report: pd.DataFrame, shifts: Shifts, stated: float, sure: float, moving: bool
) -> list[str]:
    """Verdicts on the coordinates."""
    mean, log_sd = shifts.mean, shifts.log_sd
    mean_error, log_sd_error = shifts.mean_error, shifts.log_sd_error
    normal = np.abs(special.ndtri(PROBABILITIES))[:, None]
    # The quantiles of a Gaussian that is off by the largest errors accepted.
    accepted = LARGEST_MEAN_ERROR + normal * stated / 2
    quantile_off = (np.abs(shifts.quantiles) - sure * shifts.quantile_errors > accepted) & (
        np.abs(shifts.probability_scores) > sure
    )
    converged = (report["r_hat"] < LARGEST_R_HAT) & (report["ess_bulk"] >= SMALLEST_ESS)
    cases = {
        MEAN_OFF: np.abs(mean) - sure * mean_error > LARGEST_MEAN_ERROR,
        TOO_LARGE: -log_sd - sure * log_sd_error > 0.5 * np.log1p(stated),
        TOO_SMALL: log_sd - sure * log_sd_error > -0.5 * np.log1p(-stated),
        SHAPE_OFF: quantile_off.any(0),
        NOT_CONVERGED: ~converged.to_numpy(),
        UNKNOWN: moving | (mean_error > LARGEST_ERROR) | (log_sd_error > LARGEST_ERROR),
    }
    return np.select(list(cases.values()), list(cases), OK).tolist()


def _word(report: pd.DataFrame, modes: Sequence[Mode] | None) -> str:
    """Verdict on the whole run in one word or two."""
    if report["verdict"].isin(OFF).any() or modes:
        return WRONG
    if (report["verdict"] == NOT_CONVERGED).any():
        return NOT_CONVERGED
    return OK if (report["verdict"] == OK).all() else UNKNOWN


# --- Sentences ------------------------------------------------------------------------------


def _sentence(
    report: pd.DataFrame,
    stated: float,
    sure: float,
    moving: bool,
    rested: bool,
    modes: Sequence[Mode] | None,
) -> str:
    """Verdict on the whole run in a few sentences, and whether to use the polished draws."""
    sentences = [_of_mode(mode) for mode in modes or ()]
    off = report[report["verdict"].isin(OFF)]
    unknown = report[report["verdict"].isin((UNKNOWN, NOT_CONVERGED))]
    if len(off):
        sentences.append(
            f"{len(off)} of {len(report)} coordinates are off: {_listed(off, _of_shift)}. "
            + (
                "Use the polished draws in place of those of the run."
                if rested
                else "The polished draws cannot be relied on either, since exact chains have not "
                "forgotten their starts: give more `passes`, or sample again."
            )
        )
    if moving:
        sentences.append(
            "The law of the exact chains still moves, or some chains do not move, so that neither "
            "the run nor the polished draws can be relied on. Give more `passes`, or sample with "
            "NUTS."
        )
    elif len(unknown):
        sentences.append(
            f"{len(unknown)} of {len(report)} coordinates cannot be told: "
            f"{_listed(unknown, _of_error)}. Use more draws in the run, or more `draws` or "
            "`passes`."
        )
    if not sentences:
        sentences.append(
            f"No mean, standard deviation or quantile of {len(report)} coordinates moved by more "
            f"than its errors beyond what was accepted: all are ok. Shifts of means above "
            f"{LARGEST_MEAN_ERROR + sure * report['mean_shift_se'].max():.2g} standard deviations "
            f"and of standard deviations above "
            f"{np.expm1(stated / 2 + sure * report['log_sd_shift_se'].max()):.0%} would have been "
            "found."
        )
    if modes is None:
        sentences.append("Other modes were not searched.")
    elif not modes:
        sentences.append("Searches from a few points found no other mode, which is no proof.")
    return " ".join(sentences)


def _listed(rows: pd.DataFrame, described) -> str:
    """The worst coordinates in words."""
    size = np.maximum(
        np.maximum(rows["mean_shift"].abs(), rows["log_sd_shift"].abs()),
        rows["quantile_shift"].abs(),
    )
    worst = rows.loc[size.sort_values(ascending=False).index[:NAMED]]
    more = len(rows) - len(worst)
    named = "; ".join(described(str(label), row) for label, row in worst.iterrows())
    return named + (f"; and {more} more" if more else "")


def _of_shift(label: str, row: pd.Series) -> str:
    """What is off in a coordinate."""
    if row["verdict"] == MEAN_OFF:
        return (
            f"the mean of `{label}` by {row['mean_shift']:+.2f} ± {row['mean_shift_se']:.2f} "
            "standard deviations"
        )
    if row["verdict"] in (TOO_LARGE, TOO_SMALL):
        return (
            f"the standard deviation of `{label}` is {np.exp(-row['log_sd_shift']):.2f} times the "
            "right one"
        )
    return (
        f"the {row['quantile']:.0%} quantile of `{label}` by {row['quantile_shift']:+.2f} ± "
        f"{row['quantile_shift_se']:.2f} standard deviations"
    )


def _of_error(label: str, row: pd.Series) -> str:
    """Why a coordinate cannot be told."""
    if row["verdict"] == NOT_CONVERGED:
        return (
            f"`{label}` has {row['ess_bulk']:.0f} effective draws and an R-hat of "
            f"{row['r_hat']:.2f} in the run"
        )
    return (
        f"shifts of `{label}` have standard errors of {row['mean_shift_se']:.2f} in the mean and "
        f"{row['log_sd_shift_se']:.2f} in the log standard deviation"
    )


def _of_mode(mode: Mode) -> str:
    """What another mode is."""
    same = " (components with exchanged labels are such a mode)" if mode.is_copy else ""
    mass = "the same mass" if mode.is_copy else f"about {mode.mass:.2g} times the mass"
    return (
        f"There is another mode with {mass} of what the run has seen{same}, at {mode.place}, "
        f"{mode.distance:.3g} standard deviations away. Order or fix exchangeable parameters, or "
        "use a sampler for several modes."
    )
