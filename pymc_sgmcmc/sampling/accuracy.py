"""Runs of a stated accuracy: the longest steps whose error can be corrected, or small ones."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
from pymc.model import Model
from xarray import DataTree

from pymc_sgmcmc.checks import positive_number
from pymc_sgmcmc.errors import NonFinitePositionError
from pymc_sgmcmc.record import labels_of
from pymc_sgmcmc.sampling.workers import interrupts_noted
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.pymc_hook import log
from pymc_sgmcmc.trace_tools.calibrated import with_stated_errors
from pymc_sgmcmc.trace_tools.stated import StatedErrors, compared, of_calibration, of_draws
from pymc_sgmcmc.trace_tools.verdict import rounded_up

LONGEST_BIAS = 0.5
"""Long steps make variances too large by this share. The chain then forgets most of a position in
each transition, so that longer steps gain little, and is still far from its limit of stability,
which is at a share of one where the noise of the gradients is small."""

RELAXATION_TIMES = 4
"""A draw with long steps has so many relaxation times. They take fewer transitions than one of
default steps, and their moments halve the Monte-Carlo errors of the correction."""

MOST_RELAXATION_TIMES = 16
"""A repeated run has at most so many relaxation times a draw."""

MOST_RUNS = 3
"""So many runs with long steps are tried. Each takes a small part of the time of one with small
steps."""

MOST_COST = 2
"""No run with long steps has more than this many times the transitions a draw of the default."""

AFTER_REFUSAL = 4
"""Where no correction is possible, the next steps are for a variance error that is smaller by this
factor."""

MARGIN = 0.8
"""A repeated run aims at this part of the accuracy, since errors are estimates."""


class DrawsOf(Protocol):
    """A run with a step method, with its draws and whether Ctrl-C ended it."""

    def __call__(  # noqa: D102
        self, step: StochasticGradientStep, *, checks: bool, warnings: bool = True
    ) -> tuple[DataTree, bool]: ...


class _Attempt(NamedTuple):
    """A run with its errors, and the variance error for which its steps are."""

    idata: DataTree
    errors: StatedErrors
    bias: float


def check_accuracy(accuracy: Any, step: StochasticGradientStep) -> None:
    """Refuse an accuracy that is no number in (0, 1), and step methods that cannot keep to it.

    Raises
    ------
    TypeError, ValueError
    """
    if positive_number("accuracy", accuracy) >= 1:
        raise ValueError(
            "`accuracy` should be the error that you accept, in (0, 1), such as 0.02, but got "
            f"{accuracy!r}."
        )
    if not step.has_closed_form:
        raise ValueError(
            "`accuracy` needs a step method that computes its step size, `SGLDCV` or `SGLD` "
            f"without `step_size`, but got {type(step).__name__}. Use such a one, or "
            " leave `accuracy` out."
        )


def sample_accurately(
    draws_of: DrawsOf,
    step: StochasticGradientStep,
    accuracy: float,
    model: Model,
    *,
    checks: bool,
) -> DataTree:
    """Run with long steps and correct the draws, or with small ones where that is not accurate.

    Ctrl-C ends the present run. Where it has no draws yet, the best one before is the result.

    Raises
    ------
    Exception
        As of the run.
    """
    attempts: list[_Attempt] = []
    refused: list[DataTree] = []
    try:
        return _attempted(attempts, refused, draws_of, step, accuracy, model, checks=checks)
    except KeyboardInterrupt:
        if not attempts and not refused:
            raise
        log.warning("Ctrl-C before the draws of another run. Those of the run before are kept.")
        if attempts:
            return _finished(_best(attempts), model, accuracy, interrupted=True)
        log.warning("The errors of the run are not known.")
        return refused[-1]


def _attempted(
    attempts: list[_Attempt],
    refused: list[DataTree],
    draws_of: DrawsOf,
    step: StochasticGradientStep,
    accuracy: float,
    model: Model,
    *,
    checks: bool,
) -> DataTree:
    """The trace of the first run that is accurate, or of the best.

    Runs are added to the attempts, and those whose correction is refused to the refused ones.
    """
    bias, times, reason = LONGEST_BIAS, RELAXATION_TIMES, ""
    paces = set()
    for number in range(MOST_RUNS):
        candidate = _within_cost(step, bias, times)
        pace = candidate.chain.step_size, candidate.thin
        if pace in paces:  # The draws would be the same again.
            break
        paces.add(pace)
        if number:
            log.info("%s Sampling again, with shorter steps or longer draws.", reason)
        try:
            idata, interrupted = draws_of(candidate, checks=False, warnings=False)
        except NonFinitePositionError:
            reason = f"With steps for a variance error of {bias:.2g} a chain diverged."
            bias = max(accuracy, bias / AFTER_REFUSAL)
            continue
        with interrupts_noted() as late:
            try:
                attempts.append(_Attempt(idata, of_calibration(idata), bias))
                attempts[:] = _compared(attempts, refused, accuracy)
                stopped = interrupted or bool(late)
                if stopped or attempts[-1].errors.largest <= accuracy:
                    best = _best(attempts)
                    return _finished(best, model, accuracy, reason, interrupted=stopped)
            except ValueError as error:  # A CalibrationError is one too.
                if interrupted or late:
                    if attempts:
                        best = _best(attempts)
                        return _finished(best, model, accuracy, reason, interrupted=True)
                    log.warning("The errors of the run are not known. %s", _first_sentence(error))
                    return idata
                reason, bias = _first_sentence(error), max(accuracy, bias / AFTER_REFUSAL)
                refused.append(idata)
                continue
        errors = attempts[-1].errors
        reason = (
            f"A run with steps for a variance error of {bias:.2g} had a stated error of "
            f"{errors.largest:.2g}, more than {accuracy:g}."
        )
        # Half of the accuracy is for the bias, and half for the Monte-Carlo error.
        if 2 * errors.bias > accuracy:
            bias = max(accuracy, bias * MARGIN * accuracy / (2 * errors.bias))
        if 2 * errors.monte_carlo > accuracy:
            needed = times * (2 * errors.monte_carlo / accuracy) ** 2 / MARGIN
            times = int(min(np.ceil(needed), MOST_RELAXATION_TIMES))
    if not any(attempt.errors.bias <= accuracy for attempt in attempts):
        log.info("Small steps are taken, for a variance error of %g. %s", accuracy, reason)
        idata, _ = draws_of(step.at_bias(accuracy), checks=checks)
        with interrupts_noted():
            try:
                attempts.append(_Attempt(idata, of_draws(idata), accuracy))
            except ValueError as error:
                log.warning("The errors of the run are not known. %s", _first_sentence(error))
                return idata
            with suppress(ValueError):  # No correction may be possible.
                attempts.append(_Attempt(idata, of_calibration(idata), accuracy))
                attempts = _compared(attempts, refused, accuracy)
    with interrupts_noted():
        return _finished(_best(attempts), model, accuracy, reason)


def _compared(attempts: list[_Attempt], refused: list[DataTree], accuracy: float) -> list[_Attempt]:
    """The attempts with errors from all corrected runs, where one was found far from Gaussian.

    The estimate of what a correction leaves is small by chance in some run, however large it was in
    the runs before: it is believed alone only where none before it objected.
    """
    corrected = [attempt for attempt in attempts if attempt.errors.covariance is not None]
    objections = [attempt for attempt in corrected[:-1] if 2 * attempt.errors.bias > accuracy]
    if not refused and not objections:
        return attempts
    others = [attempt for attempt in attempts if attempt.errors.covariance is None]
    errors = compared([attempt.errors for attempt in corrected])
    return others + [
        attempt._replace(errors=each) for attempt, each in zip(corrected, errors, strict=True)
    ]


def _best(attempts: list[_Attempt]) -> _Attempt:
    return min(attempts, key=lambda attempt: attempt.errors.largest)


def _within_cost(
    step: StochasticGradientStep, bias: float, relaxation_times: int
) -> StochasticGradientStep:
    """The sampler for a variance error, with fewer relaxation times a draw where they cost more."""
    candidate = step.at_bias(bias)
    affordable = MOST_COST * step.thin // candidate.thin
    return step.at_bias(bias, max(1, min(relaxation_times, affordable)))


def _first_sentence(error: Exception) -> str:
    return str(error).split("\n")[0].split(". ")[0].rstrip(".") + "."


def _finished(
    attempt: _Attempt,
    model: Model,
    accuracy: float,
    reason: str = "",
    *,
    interrupted: bool = False,
) -> DataTree:
    """The trace of a run with its stated errors, which are logged."""
    idata, errors, bias = attempt
    with_correction = ", and a correction" if errors.covariance is not None else ""
    why = f"Steps for a variance error of {bias:.2g}{with_correction}. {reason}".strip()
    attributes = {"accuracy": accuracy, "bias": bias, "why": why}
    idata = with_stated_errors(idata, errors, model, attributes)
    log.info(
        "%s Stated errors: at most %.2g posterior standard deviations of means, and %.2g of "
        "standard deviations.",
        why,
        errors.mean_error.max(),
        errors.sd_error.max(),
    )
    stated = np.maximum(errors.mean_error, errors.sd_error)
    above = stated > accuracy
    if above.any():
        labels = labels_of(idata, len(stated))
        message = (
            f"The stated error of {int(above.sum())} of {len(above)} coordinates is above the "
            f"accuracy {accuracy:g}, most of all that of {labels[int(stated.argmax())]}, "
            f"{stated.max():.2g}."
        )
        if interrupted:
            message += " The run was interrupted before it could be repeated with other steps."
        elif errors.bias <= accuracy / 2:
            times = (2 * errors.monte_carlo / (MARGIN * accuracy)) ** 2
            needed = idata["posterior"].sizes["draw"] * times
            message += f" Use about {rounded_up(needed)} draws a chain."
        else:
            message += " It is not from the number of draws alone: compare with NUTS."
        log.warning(message)
    return idata
