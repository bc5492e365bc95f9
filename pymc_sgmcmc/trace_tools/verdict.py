"""Verdicts on the coordinates of a run and on the whole run, from the numbers of a report."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.record import GIVEN, LARGEST_MEAN_ERROR, stored_local
from pymc_sgmcmc.trace_tools.reader import COMPUTE_THEM, remedy_of_divergence

OK, UNKNOWN, NOT_CONVERGED = "ok", "cannot tell", "not converged"
TOO_LARGE, TOO_SMALL, MEAN_OFF = "variance too large", "variance too small", "mean off"

UNUSABLE = ("Diverged", "Not converged")
"""The verdicts on runs that say little about the posterior begin with these words."""

STANDARD_ERRORS = 2.0
"""An error counts as larger than the stated one where it is larger by this number of Monte-Carlo
standard errors, and stated errors have this number of them. By chance an estimate is that far off,
to one side, once in 40 cases."""

LARGEST_R_HAT = 1.05
"""Chains count as not converged where R-hat of a coordinate is larger. The bound is looser than the
1.01 of Vehtari et al. (2021), since R-hat from 100 effective draws is above that by chance."""

SMALLEST_ESS = 100.0
"""Chains count as not converged where a coordinate has fewer effective draws. From 100 draws a
standard deviation is known to 7 %."""

R_HAT_APART = 1.5
"""Where R-hat of a coordinate is larger, the chains are in different places. No other coordinate is
"ok" then, since its draws are those given this one."""

R_HAT_OF_OK, ESS_OF_OK = 1.01, 400.0
"""A coordinate is "ok" only with R-hat below and effective draws above these bounds, which are
those of Vehtari et al. (2021). From 400 draws the mean is known to 0.05 standard deviations, half
of `LARGEST_MEAN_ERROR`."""

SMALLEST_PROBABILITY = 1e-3
"""Chains count as not converged where the probability of the mean gradient is lower. By chance this
happens to one converged run in a thousand."""

SMALLEST_BIAS = 0.001
"""No smaller `bias` is advised. Where an estimate asks for less, the step size is not what is wrong
with a run."""

MOST_TIMES = 30
"""No more draws than so many times those of the run are advised. Nobody takes them, and an error as
large as its bound would need more of them without end."""

TOO_WIDE = 1.0
"""For a chain that has not converged, a smaller step is advised where the variance error is larger
than this number, so that the variance is more than twice the right one."""

SECOND_MOMENT, STEIN = "second moment of the gradients", "Stein's identity"
"""These are the names of the two methods that give a variance error."""

VARIANCE_ERRORS = ("variance_error", "stein_error", "rerun_error")
"""These columns of a report are variance errors: by the best method for the run, by Stein's
identity, and by pairs of chains where they were run."""


# --- Convergence ----------------------------------------------------------------------------


def ess_and_r_hat(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Effective draws and R-hat of coordinates; the halves of a single chain are compared.

    Parameters
    ----------
    draws : numpy.ndarray, shape (chains, draws, coordinates)
    """
    from arviz_stats.base import array_stats  # takes half a second to import

    halves = draws
    if len(draws) == 1:
        half = draws.shape[1] // 2
        halves = np.concatenate([draws[:, :half], draws[:, -half:]])
    axes = {"chain_axis": 0, "draw_axis": 1}
    return array_stats.ess(draws, **axes), array_stats.rhat(halves, **axes)


# --- Coordinates ----------------------------------------------------------------------------


def beyond_doubt(dimension: int, method: str = STEIN) -> float:
    """Number of standard errors by which an error is beyond doubt, see `bias_report`.

    It is Bonferroni's, so that more coordinates do not make it more likely that one is beyond.
    """
    if method == SECOND_MOMENT:
        return STANDARD_ERRORS
    return float(-special.ndtri(special.ndtr(-STANDARD_ERRORS) / dimension))


def variances_off(report: pd.DataFrame, stated: float, method: str, sign: int) -> pd.DataFrame:
    """Whether each variance error is beyond doubt larger than the stated one, to one side.

    The columns are those of `VARIANCE_ERRORS`. `sign` is 1 for variances that are too large, and -1
    for those that are too small.
    """
    off = {}
    for name in VARIANCE_ERRORS:
        error, standard_error = _error(report, name)
        sure = beyond_doubt(len(report), method if name == VARIANCE_ERRORS[0] else STEIN)
        off[name] = sign * error - sure * standard_error > stated
    return pd.DataFrame(off, index=report.index)


def verdicts(report: pd.DataFrame, stated: float, method: str) -> list[str]:
    """Verdict on each coordinate, from the other columns of a report."""
    surely = beyond_doubt(len(report))
    error, error_se = _error(report, "variance_error")
    mean, mean_se = _error(report, "mean_error")
    sd, sd_se = _sd_error(report)
    # Comparisons with NaN, for what is not known, are false.
    cases = {
        NOT_CONVERGED: ~_has(report, LARGEST_R_HAT, SMALLEST_ESS),
        TOO_LARGE: variances_off(report, stated, method, 1).any(axis=1),
        TOO_SMALL: variances_off(report, stated, method, -1).any(axis=1),
        MEAN_OFF: np.abs(mean) - surely * mean_se > LARGEST_MEAN_ERROR,
        UNKNOWN: (
            ~_has(report, R_HAT_OF_OK, ESS_OF_OK)
            | (error + STANDARD_ERRORS * error_se > 2 * stated)
            | (np.abs(mean) + STANDARD_ERRORS * mean_se > LARGEST_MEAN_ERROR)
            | (sd + surely * sd_se > LARGEST_MEAN_ERROR)
            | _skewed(report)
            | ~(report["r_hat"] <= R_HAT_APART).all()
        ),
    }
    return np.select(list(cases.values()), list(cases), OK).tolist()


def draws_needed(report: pd.DataFrame, stated: float, method: str, draws: int) -> np.ndarray:
    """Draws a chain from which the verdict "cannot tell" would be another one, NaN for the others.

    It is NaN as well where only a second run can tell whether the mean is off.
    """
    error, error_se = _error(report, "variance_error")
    mean, mean_se = _error(report, "mean_error")
    sd, sd_se = _sd_error(report)
    sure, surely = beyond_doubt(len(report), method), beyond_doubt(len(report))
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = [
            ESS_OF_OK / report["ess_bulk"].to_numpy(),
            # R-hat exceeds one by an amount that falls with the number of draws.
            (report["r_hat"].to_numpy() - 1) / (R_HAT_OF_OK - 1),
            _times(error, error_se, (stated, sure), (2 * stated, STANDARD_ERRORS)),
            _times(
                np.abs(mean),
                mean_se,
                (LARGEST_MEAN_ERROR, surely),
                (LARGEST_MEAN_ERROR, STANDARD_ERRORS),
            ),
            _times(sd, sd_se, (LARGEST_MEAN_ERROR, surely), (LARGEST_MEAN_ERROR, surely)),
        ]
    largest = np.fmax.reduce(factors)
    unknown = (report["verdict"] == UNKNOWN).to_numpy() & ~_skewed(report)
    helps = np.isfinite(largest) & (largest > 1)
    return np.where(unknown & helps, np.ceil(draws * largest), np.nan)


def _times(
    error: np.ndarray,
    standard_error: np.ndarray,
    above: tuple[float, float],
    below: tuple[float, float],
) -> np.ndarray:
    """How many times as many draws show that an error is above a bound, or below another.

    Each pair has the bound and the number of standard errors.
    """
    surely_above = (above[1] * standard_error / np.maximum(error - above[0], 0)) ** 2
    surely_below = (below[1] * standard_error / np.maximum(below[0] - error, 0)) ** 2
    return np.fmin(surely_above, surely_below)


def _error(report: pd.DataFrame, name: str) -> tuple[np.ndarray, np.ndarray]:
    """An error and its standard error."""
    return report[name].to_numpy(), report[f"{name}_se"].to_numpy()


def _sd_error(report: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """By how much standard deviations are too small, if at all, with the Monte-Carlo error.

    Both are relative. Variance errors that are too large have a bound of their own.
    """
    lowest = np.fmin.reduce([report[name] for name in VARIANCE_ERRORS])
    too_small = 1 - np.sqrt(1 + np.clip(lowest, -1, 0))
    return too_small, np.hypot(report["sd_se"], 0.5 * report["rerun_error_se"].fillna(0.0))


def _has(report: pd.DataFrame, r_hat: float, ess: float) -> np.ndarray:
    """Whether R-hat is below and the number of effective draws above a bound."""
    return ((report["r_hat"] < r_hat) & (report["ess_bulk"] >= ess)).to_numpy()


def _skewed(report: pd.DataFrame) -> np.ndarray:
    """Whether the mean may be off by the skewness of the posterior, which no second run showed."""
    predicted = report["predicted_mean_error"].abs() > LARGEST_MEAN_ERROR
    return (predicted & report["mean_error"].isna()).to_numpy()


# --- The whole run --------------------------------------------------------------------------


def overall(
    report: pd.DataFrame,
    stated: float,
    called: str,
    probability: float,
    settings: dict[str, Any],
    reasons: dict[Any, str],
    draws: int,
) -> str:
    """Verdict on a whole run of so many draws a chain.

    `called` is what to call the bound on the variance error.
    """
    if reasons:
        return f"{of_divergence(reasons)} {remedy_of_divergence(settings)}."
    counts = report["verdict"].value_counts()
    of_all = f"of {len(report)} coordinates"
    worst = float(report["variance_error"].max())
    if counts.get(NOT_CONVERGED, 0) or probability < SMALLEST_PROBABILITY:
        said = of_convergence(
            report["ess_bulk"].to_numpy(),
            report["r_hat"].to_numpy(),
            tuple(report.index),
            len(report),
        )
        said = said or of_mean_gradient(probability)
        return f"Not converged: {said} {remedy_of_convergence(worst, stated, settings)}"
    if too_large := counts.get(TOO_LARGE, 0):
        worst = float(report[list(VARIANCE_ERRORS)][report["verdict"] == TOO_LARGE].max(axis=None))
        return (
            f"Variances of {too_large} {of_all} are too large by up to {worst:.2g}, more than "
            f"{called}. {remedy(worst, stated, settings)}"
        )
    if too_small := counts.get(TOO_SMALL, 0):
        small = report["verdict"] == TOO_SMALL
        lack = -float(report[list(VARIANCE_ERRORS)][small].min(axis=None))
        measured = variances_off(report, stated, STEIN, -1)["rerun_error"].any()
        return (
            f"Variances of {too_small} {of_all} are too small by up to {lack:.2g}. "
            f"{_remedy_of_means(stated, settings) if measured else remedy_of_small(lack)}"
        )
    if off := counts.get(MEAN_OFF, 0):
        return (
            f"Means of {off} {of_all} are off by more than {LARGEST_MEAN_ERROR:g} standard "
            f"deviations. {_remedy_of_means(stated, settings)}"
        )
    ok = counts.get(OK, 0)
    error, error_se = _error(report, "variance_error")
    twice = "twice " if worst > stated else ""
    within = f"Variance errors of at most {worst:.2g} are within {twice}{called}"
    if ok == len(report):
        means = (
            ""
            if report["mean_error"].isna().all()
            else f" and errors of the means below {LARGEST_MEAN_ERROR:g} standard deviations"
        )
        local = stored_local(settings)
        lag = f" An error from the lag of {quoted(local)} would not show." if local else ""
        return f"{within}{means}: all {ok} coordinates are ok.{lag}"
    known = (error + STANDARD_ERRORS * error_se <= 2 * stated).all()
    return (
        f"{f'{within}. ' if known else ''}{ok} {of_all} are ok, {len(report) - ok} cannot be told. "
        + _of_unknown(report, stated, called, draws)
    )


def _of_unknown(report: pd.DataFrame, stated: float, called: str, draws: int) -> str:
    """Why some coordinates have the verdict "cannot tell", and what would tell."""
    unknown = report[report["verdict"] == UNKNOWN]
    reasons = []
    if not _has(unknown, R_HAT_OF_OK, ESS_OF_OK).all():
        reasons.append(
            f"Effective draws are {unknown['ess_bulk'].min():.0f} and R-hat is "
            f"{unknown['r_hat'].max():.3f} in the worst of them, where at least {ESS_OF_OK:g} and "
            f"at most {R_HAT_OF_OK} are needed."
        )
    for name, bound, to in (
        ("variance_error", 2 * stated, called),
        ("mean_error", LARGEST_MEAN_ERROR, f"{LARGEST_MEAN_ERROR:g} standard deviations"),
    ):
        standard_error = unknown[f"{name}_se"]
        if (unknown[name].abs() + STANDARD_ERRORS * standard_error > bound).any():
            reasons.append(
                f"The Monte-Carlo error of the {name.replace('_', ' ')} is up to "
                f"{standard_error.max():.2g}, too large to compare it with {to}."
            )
    sd, sd_se = _sd_error(unknown)
    known = sd + beyond_doubt(len(report)) * sd_se
    if (known > LARGEST_MEAN_ERROR).any():
        reasons.append(
            f"The standard deviation of `{unknown.index[int(np.argmax(known))]}` is known to "
            f"{100 * known.max():.0f} %, where {100 * LARGEST_MEAN_ERROR:g} % is needed."
        )
    needed = unknown["draws_needed"].dropna()
    many = needed > MOST_TIMES * draws
    if not many.all():
        reasons.append(f"Use about {rounded_up(needed[~many].max())} draws a chain.")
    if many.any():
        reasons.append(
            f"For {many.sum()} of them more than {MOST_TIMES} times the draws of this run would be "
            "needed."
        )
    predicted = unknown["predicted_mean_error"].abs().where(_skewed(unknown))
    if predicted.notna().any():
        reasons.append(
            f"The error of the mean of `{predicted.idxmax()}`, which gradients do not show, may be "
            f"about {predicted.max():.1g} standard deviations. Use `rerun=True` to see it, or a "
            "smaller `bias`."
        )
    return " ".join(reasons)


def rounded_up(number: float) -> int:
    """The next whole number of two digits and zeros.

    Examples
    --------
    >>> rounded_up(1431.0)
    1500
    """
    unit = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit


def called_bias(bias: float | None, settings: dict[str, Any]) -> str:
    """What to call the bound on the variance error.

    It is "stated" where the user gives it or the step size was computed for it. A step size that
    was given, or of which nothing is known, is for no bias.
    """
    computed = settings.get("step_size_from", GIVEN) != GIVEN
    is_stated = bias is not None or (computed and "bias" in settings)
    return "stated" if is_stated else "default"


def of_convergence(
    ess: np.ndarray, r_hat: np.ndarray, labels: tuple[str, ...], dimension: int
) -> str | None:
    """What R-hat and the effective sample size say against a run, None where it is nothing.

    The coordinates may be the slowest ones of a longer position.
    """
    bad = ~((r_hat < LARGEST_R_HAT) & (ess >= SMALLEST_ESS))
    if not bad.any():
        return None
    worst = int(np.argmax(np.where(bad, np.nan_to_num(r_hat, nan=np.inf), -np.inf)))
    of_all = f"{len(bad)} coordinates"
    if len(bad) < dimension:
        of_all = f"the {len(bad)} slowest of {dimension} coordinates"
    return (
        f"{int(bad.sum())} of {of_all} have R-hat above {LARGEST_R_HAT} or fewer "
        f"than {SMALLEST_ESS:g} effective draws, such as `{labels[worst]}` with R-hat "
        f"{r_hat[worst]:.3g} and {ess[worst]:.2g} effective draws."
    )


def of_mean_gradient(probability: float) -> str:
    """What the mean gradient says against a run."""
    return (
        f"the mean gradient is not zero (its probability at stationarity is {probability:.2g}). "
        "If it stays so with more draws, the sampler or its gradients are wrong."
    )


def of_divergence(reasons: dict[Any, str]) -> str:
    """Verdict on a run whose chains diverged for these reasons."""
    chain, reason = next(iter(reasons.items()))
    return f"Diverged: chain {chain} {reason}."


# --- Remedies -------------------------------------------------------------------------------


def remedy_of_convergence(error: float, stated: float, settings: dict[str, Any]) -> str:
    """Remedy for a run that has not converged, given its largest variance error."""
    if error > TOO_WIDE:
        return f"Variances are too large by {error:.2g}. {remedy(error, stated, settings)}"
    return "Use more draws, or longer tuning."


def remedy(error: float, stated: float, settings: dict[str, Any]) -> str:
    """Remedy for a variance error that is larger than the stated one."""
    factor = stated / error
    step_size = settings.get("step_size")
    if settings.get("step_size_from") == GIVEN and step_size is not None:
        return f"Use a `step_size` of about {0.9 * factor * step_size:.2g}, or leave it out."
    smaller = 0.9 * factor * stated
    if smaller < SMALLEST_BIAS:
        return (
            "The posterior may be improper, or far from the Gaussian around the centre: check the "
            "priors, give `center`, or sample with NUTS."
        )
    if settings.get("gradient") == "plain":
        return f'Use `bias={smaller:.2g}`, a larger `batch_size`, or `gradient="cv"`.'
    return f"Use more tuning draws, or `bias={smaller:.2g}`."


def remedy_of_small(lack: float) -> str:
    """Remedy for variances that Stein's identity finds too small by this part of the right ones."""
    if lack > 1:  # No variance is below zero.
        return (
            f"The gradients are not those of the draws: {COMPUTE_THEM}, and change the model first "
            "where the run warned of a jump of the log density."
        )
    return (
        "The draws do not cover the posterior: use more draws, longer tuning or other initial "
        "values, or compare with NUTS."
    )


def _remedy_of_means(stated: float, settings: dict[str, Any]) -> str:
    """Remedy for errors of means and standard deviations on skewed posteriors."""
    step_size = settings.get("step_size")
    if settings.get("step_size_from") == GIVEN:
        example = "" if step_size is None else f", for example {0.5 * step_size:.2g}"
        return f"Use a smaller `step_size`{example}."
    return f"Use a smaller `bias`, for example {0.5 * stated:.2g}."
