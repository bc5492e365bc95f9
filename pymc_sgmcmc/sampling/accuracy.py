"""Runs of a stated accuracy: steps for half of the error, and as many transitions as it takes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
from pymc.model import Model
from xarray import DataTree

from pymc_sgmcmc.checks import positive_number
from pymc_sgmcmc.record import labels_of
from pymc_sgmcmc.sampling.workers import interrupts_noted
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.pymc_hook import log
from pymc_sgmcmc.trace_tools.calibrated import with_stated_errors
from pymc_sgmcmc.trace_tools.stated import StatedErrors, of_calibration, of_draws
from pymc_sgmcmc.trace_tools.verdict import rounded_up

RELAXATION_TIMES = 4
"""A draw has so many relaxation times. Draws are then independent, and the moments of all
transitions halve Monte-Carlo errors."""

MOST_RELAXATION_TIMES = 16
"""A repeated run has at most so many relaxation times a draw."""

MARGIN = 0.8
"""A repeated run aims at this part of the accuracy, since errors are estimates."""


class DrawsOf(Protocol):
    """A run with a step method, with its draws and whether Ctrl-C ended it."""

    def __call__(  # noqa: D102
        self, step: StochasticGradientStep, *, checks: bool
    ) -> tuple[DataTree, bool]: ...


class _Attempt(NamedTuple):
    """A run with its errors."""

    idata: DataTree
    errors: StatedErrors


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
    """Run with the steps for an accuracy, and again with longer draws where these are too few.

    Ctrl-C ends the present run. Where it has no draws yet, the one before is the result.

    Raises
    ------
    Exception
        As of the run.
    """
    attempts: list[_Attempt] = []
    times = RELAXATION_TIMES
    while True:
        try:
            idata, interrupted = draws_of(step.at_bias(accuracy, times), checks=checks)
        except KeyboardInterrupt:
            if not attempts:
                raise
            log.warning("Ctrl-C before the draws of another run. Those of the run before are kept.")
            return _finished(attempts[0], model, accuracy, interrupted=True)
        with interrupts_noted() as late:
            try:
                attempts.append(_Attempt(idata, _smallest_errors(idata)))
            except ValueError as error:
                log.warning("The errors of the run are not known. %s", _first_sentence(error))
                return idata
            best = min(attempts, key=lambda attempt: attempt.errors.largest)
            errors, interrupted = best.errors, interrupted or bool(late)
            # Half of the accuracy is for the bias, and half for the Monte-Carlo error.
            needed = times * (2 * errors.monte_carlo / accuracy) ** 2 / MARGIN
            longer = int(min(np.ceil(needed), MOST_RELAXATION_TIMES))
            if interrupted or errors.largest <= accuracy or longer <= times or len(attempts) > 1:
                return _finished(best, model, accuracy, interrupted=interrupted)
        log.info(
            "A run had a stated error of %.2g, more than %g. Sampling again, with longer draws.",
            errors.largest,
            accuracy,
        )
        times = longer


def _smallest_errors(idata: DataTree) -> StatedErrors:
    """Errors of the draws as they are, or corrected where that is possible and more accurate.

    Raises
    ------
    ValueError
        Where the trace cannot be used.
    """
    errors = of_draws(idata)
    with suppress(ValueError):  # No correction may be possible.
        errors = min(errors, of_calibration(idata), key=lambda each: each.largest)
    return errors


def _first_sentence(error: Exception) -> str:
    return str(error).split("\n")[0].split(". ")[0].rstrip(".") + "."


def _finished(attempt: _Attempt, model: Model, accuracy: float, *, interrupted: bool) -> DataTree:
    """The trace of a run with its stated errors, which are logged."""
    idata, errors = attempt
    with_correction = ", and a correction" if errors.covariance is not None else ""
    why = f"Steps for a variance error of {accuracy:.2g}{with_correction}."
    attributes = {"accuracy": accuracy, "bias": accuracy, "why": why}
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
            message += " The run was interrupted before it could be repeated with longer draws."
        elif errors.bias <= accuracy / 2:
            times = (2 * errors.monte_carlo / (MARGIN * accuracy)) ** 2
            needed = idata["posterior"].sizes["draw"] * times
            message += f" Use about {rounded_up(needed)} draws a chain."
        else:
            message += " It is not from the number of draws alone: compare with NUTS."
        log.warning(message)
    return idata
