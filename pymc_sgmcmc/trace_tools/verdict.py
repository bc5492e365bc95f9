"""Verdicts on the coordinates of a run and on the whole run, from its table of errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.record import GIVEN, LARGEST_MEAN_ERROR, WITH_LESS_NOISE, stored_local
from pymc_sgmcmc.stein import STANDARD_ERRORS
from pymc_sgmcmc.trace_tools.errors import VARIANCE_ERRORS, Error, Errors
from pymc_sgmcmc.trace_tools.reader import COMPUTE_THEM, remedy_of_divergence

OK, UNKNOWN, NOT_CONVERGED, DIVERGED = "ok", "cannot tell", "not converged", "diverged"
TOO_LARGE, TOO_SMALL, MEAN_OFF = "variance too large", "variance too small", "mean off"

WRONG = (DIVERGED, NOT_CONVERGED, TOO_LARGE, TOO_SMALL, MEAN_OFF)
"""These verdicts, the gravest first, say that a run is wrong."""

UNUSABLE = ("Diverged", "Not converged")
"""The verdicts on runs that say little about the posterior begin with these words."""

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


# --- Coordinates ----------------------------------------------------------------------------


def verdicts(errors: Errors) -> np.ndarray:
    """Verdict on each coordinate."""
    if errors.diverged:
        return np.full(len(errors.labels), DIVERGED)
    variance, mean, sd = errors["variance_error"], errors["mean_error"], errors.sd_error
    # Comparisons with NaN, for what is not known, are false.
    cases = {
        NOT_CONVERGED: errors.judged & ~errors.has(LARGEST_R_HAT, SMALLEST_ESS),
        TOO_LARGE: errors.variances_beyond(1).any(0),
        TOO_SMALL: errors.variances_beyond(-1).any(0),
        MEAN_OFF: mean.off,
        UNKNOWN: (
            ~errors.has(R_HAT_OF_OK, ESS_OF_OK)
            | (_highest(variance.value, variance) > 2 * errors.stated)
            | (_highest(np.abs(mean.value), mean) > mean.limit)
            | (sd.value + sd.sure * sd.standard_error > sd.limit)
            | errors.skewed
            | ~(errors.r_hat <= R_HAT_APART).all()
        ),
    }
    return np.select(list(cases.values()), list(cases), OK)


def _highest(size: np.ndarray, error: Error) -> np.ndarray:
    """How large an error of this size may be."""
    return size + STANDARD_ERRORS * error.standard_error


def draws_needed(errors: Errors) -> np.ndarray:
    """Draws a chain from which the verdict "cannot tell" would be another one, NaN for the others.

    It is NaN as well where only a second run can tell whether the mean is off.
    """
    variance, mean, sd = errors["variance_error"], errors["mean_error"], errors.sd_error
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = [
            ESS_OF_OK / errors.ess,
            # R-hat exceeds one by an amount that falls with the number of draws.
            (errors.r_hat - 1) / (R_HAT_OF_OK - 1),
            _times(variance, variance.value, 2 * errors.stated, STANDARD_ERRORS),
            _times(mean, np.abs(mean.value), mean.limit, STANDARD_ERRORS),
            _times(sd, sd.value, sd.limit, sd.sure),
        ]
    largest = np.fmax.reduce(factors)
    unknown = (verdicts(errors) == UNKNOWN) & ~errors.skewed
    helps = np.isfinite(largest) & (largest > 1)
    return np.where(unknown & helps, np.ceil(errors.draws * largest), np.nan)


def _times(error: Error, size: np.ndarray, below: float, sure: float) -> np.ndarray:
    """How many times as many draws show that an error is above its limit, or below a bound.

    `sure` is the number of standard errors below the bound.
    """
    spread = error.standard_error
    surely_above = (error.sure * spread / np.maximum(size - error.limit, 0)) ** 2
    surely_below = (sure * spread / np.maximum(below - size, 0)) ** 2
    return np.fmin(surely_above, surely_below)


# --- The whole run --------------------------------------------------------------------------


def verdict_of_run(errors: Errors) -> str:
    """The gravest verdict on any coordinate, in a word."""
    found = verdicts(errors)
    if not errors.diverged and errors.probability < SMALLEST_PROBABILITY:
        return NOT_CONVERGED
    return next((word for word in (*WRONG, UNKNOWN) if (found == word).any()), OK)


def objection(errors: Errors) -> str | None:
    """What R-hat, effective draws and the mean gradient say against a run, None if nothing."""
    said = of_convergence(
        errors.ess[errors.judged],
        errors.r_hat[errors.judged],
        tuple(np.array(errors.labels)[errors.judged]),
        len(errors.labels),
    )
    if said is None and errors.probability < SMALLEST_PROBABILITY:
        return (
            "the mean gradient is not zero (its probability at stationarity is "
            f"{errors.probability:.2g}). If it stays so with more draws, the sampler or its "
            "gradients are wrong."
        )
    return said


def overall(errors: Errors) -> str:
    """Verdict on a whole run in a few sentences."""
    if errors.diverged:
        chain, reason = next(iter(errors.diverged.items()))
        return f"Diverged: chain {chain} {reason}. {remedy_of_divergence(errors.settings)}."
    found, of_all = verdicts(errors), f"of {len(errors.labels)} coordinates"
    stated, settings = errors.stated, errors.settings
    called = f"the {errors.called} {stated:.3g}"
    largest = float(np.nanmax(errors["variance_error"].value))
    word = verdict_of_run(errors)
    if word == NOT_CONVERGED:
        return (
            f"Not converged: {objection(errors)} {remedy_of_convergence(largest, stated, settings)}"
        )
    if word in WRONG:
        return " ".join(
            _of_wrong(errors, each, found == each, called)
            for each in WRONG
            if (found == each).any()
        )
    ok = int((found == OK).sum())
    twice = "twice " if largest > stated else ""
    within = f"Variance errors of at most {largest:.2g} are within {twice}{called}"
    if word == OK:
        means = (
            ""
            if np.isnan(errors["mean_error"].value).all()
            else f" and errors of the means below {LARGEST_MEAN_ERROR:g} standard deviations"
        )
        local = stored_local(settings)
        lag = f" An error from the lag of {quoted(local)} would not show." if local else ""
        return f"{within}{means}: all {ok} coordinates are ok.{lag}"
    variance = errors["variance_error"]
    known = (_highest(variance.value, variance) <= 2 * stated).all()
    return (
        f"{f'{within}. ' if known else ''}{ok} {of_all} are ok, {len(found) - ok} cannot be told. "
        + _of_unknown(errors, found == UNKNOWN, called)
    )


def _of_wrong(errors: Errors, word: str, off: np.ndarray, called: str) -> str:
    """What coordinates with a verdict are off by, and what to do."""
    stated, settings, of_all = errors.stated, errors.settings, f"of {len(off)} coordinates"
    if word == MEAN_OFF:
        worst, _ = _worst(errors, np.abs(errors["mean_error"].value), off)
        return (
            f"Means of {off.sum()} {of_all} are off by more than {LARGEST_MEAN_ERROR:g} standard "
            f"deviations{worst}. {_remedy_of_means(stated, settings)} The means "
            "`bias_report(idata).extrapolated` are corrected."
        )
    sign = 1 if word == TOO_LARGE else -1
    sizes = np.fmax.reduce([sign * errors[name].value for name in VARIANCE_ERRORS])
    worst, size = _worst(errors, sizes, off)
    said = f"Variances of {off.sum()} {of_all} are {word.removeprefix('variance ')} by up to "
    if word == TOO_LARGE:
        return f"{said}{size:.2g}{worst}, more than {called}. {remedy(size, stated, settings)}"
    measured = errors["rerun_error"].beyond(-1).any()
    advice = _remedy_of_means(stated, settings) if measured else remedy_of_small(size)
    return f"{said}{size:.2g}{worst}. {advice}"


def _worst(errors: Errors, sizes: np.ndarray, off: np.ndarray) -> tuple[str, float]:
    """Where the largest of some errors is, in words, and its size."""
    worst = int(np.argmax(np.where(off, sizes, -np.inf)))
    return f", most of all that of `{errors.labels[worst]}`", float(sizes[worst])


def _of_unknown(errors: Errors, unknown: np.ndarray, called: str) -> str:
    """Why some coordinates have the verdict "cannot tell", and what would tell."""
    reasons = []
    if not errors.has(R_HAT_OF_OK, ESS_OF_OK)[unknown].all():
        reasons.append(
            f"Effective draws are {errors.ess[unknown].min():.0f} and R-hat is "
            f"{errors.r_hat[unknown].max():.3f} in the worst of them, where at least {ESS_OF_OK:g} "
            f"and at most {R_HAT_OF_OK} are needed."
        )
    for name, bound, to in (
        ("variance_error", 2 * errors.stated, called),
        ("mean_error", LARGEST_MEAN_ERROR, f"{LARGEST_MEAN_ERROR:g} standard deviations"),
    ):
        error = errors[name]
        if (_highest(np.abs(error.value), error) > bound)[unknown].any():
            largest = np.nanmax(error.standard_error[unknown])
            reasons.append(
                f"The Monte-Carlo error of the {name.replace('_', ' ')} is up to {largest:.2g}, "
                f"too large to compare it with {to}."
            )
    known = errors.sd_error.value + errors.sd_error.sure * errors.sd_error.standard_error
    if (known[unknown] > LARGEST_MEAN_ERROR).any():
        worst = int(np.nanargmax(np.where(unknown, known, np.nan)))
        reasons.append(
            f"The standard deviation of `{errors.labels[worst]}` is known to "
            f"{100 * known[worst]:.0f} %, where {100 * LARGEST_MEAN_ERROR:g} % is needed."
        )
    needed = draws_needed(errors)
    needed = needed[np.isfinite(needed)]
    many = needed > MOST_TIMES * errors.draws
    if not many.all():
        reasons.append(f"Use about {rounded_up(needed[~many].max())} draws a chain.")
    if many.any():
        reasons.append(
            f"For {many.sum()} of them more than {MOST_TIMES} times the draws of this run would be "
            "needed."
        )
    if (skewed := unknown & errors.skewed).any():
        predicted = np.where(skewed, np.abs(errors["predicted_mean_error"].value), -np.inf)
        reasons.append(
            f"The error of the mean of `{errors.labels[int(predicted.argmax())]}`, which gradients "
            f"do not show, may be about {predicted.max():.1g} standard deviations. Use "
            "`rerun=True` to see it, or a smaller `bias`."
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


# --- Remedies -------------------------------------------------------------------------------


def remedy_of_convergence(error: float, stated: float, settings: Mapping[str, Any]) -> str:
    """Remedy for a run that has not converged, given its largest variance error."""
    if error > TOO_WIDE:
        return f"Variances are too large by {error:.2g}. {remedy(error, stated, settings)}"
    return "Use more draws, or longer tuning."


def remedy(error: float, stated: float, settings: Mapping[str, Any]) -> str:
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
    if instead := settings.get(WITH_LESS_NOISE):
        return f"Use `bias={smaller:.2g}`, a larger `batch_size`, or {instead}."
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


def _remedy_of_means(stated: float, settings: Mapping[str, Any]) -> str:
    """Remedy for errors of means and standard deviations on skewed posteriors."""
    step_size = settings.get("step_size")
    if settings.get("step_size_from") == GIVEN:
        example = "" if step_size is None else f", for example {0.5 * step_size:.2g}"
        return f"Use a smaller `step_size`{example}."
    return f"Use a smaller `bias`, for example {0.5 * stated:.2g}."
