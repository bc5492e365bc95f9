"""Errors of the posterior variances and means of a run, from the stored gradients."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
from xarray import DataTree

from pymc_sgmcmc.checks import positive_number
from pymc_sgmcmc.dynamics.law import LAWS
from pymc_sgmcmc.posterior.position import given_model
from pymc_sgmcmc.record import (
    COMPUTED,
    LARGEST_MEAN_ERROR,
    LAW,
    MEAN_SHIFT,
    MIRRORED,
    SETTINGS,
    labels_of,
    settings_of,
    stored_matrix,
)
from pymc_sgmcmc.stein import (
    Estimate,
    batch_means,
    mean_gradient_test,
    stein_variance_error,
)
from pymc_sgmcmc.trace_tools.divergence import LARGEST_POSITION
from pymc_sgmcmc.trace_tools.half_step import (
    AXES,
    check_rerun,
    half_step_error,
    store,
    stored,
)
from pymc_sgmcmc.trace_tools.reader import diverged, read_run, remedy_of_divergence
from pymc_sgmcmc.trace_tools.verdict import (
    LARGEST_R_HAT,
    SECOND_MOMENT,
    SMALLEST_ESS,
    SMALLEST_PROBABILITY,
    STEIN,
    beyond_doubt,
    called_bias,
    draws_needed,
    ess_and_r_hat,
    of_convergence,
    of_divergence,
    of_mean_gradient,
    overall,
    remedy,
    remedy_of_convergence,
    remedy_of_small,
    verdicts,
)
from pymc_sgmcmc.tuning import VARIANCE_INFLATION

log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold

SHRUNK = 0.5
"""Means are measured where tuning made the computed step size smaller than by this factor."""

CHECKED_COORDINATES = 200
"""At the end of a run the convergence of at most this number of coordinates is judged, the slowest
ones. This takes half a second."""


def bias_report(
    idata: DataTree,
    model: pm.Model | None = None,
    *,
    bias: float | None = None,
    rerun: bool = False,
    random_seed: Any = None,
    compile_kwargs: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    r"""Estimated errors of the posterior variances and means of a run, with a row a coordinate.

    For Langevin dynamics with a known preconditioner (`SGLD`, `SGLDCV`, `ULA`) the variance error
    is computed from the second moment of the gradients that the chain met, for a Gaussian with the
    curvature at the centre, see `pymc_sgmcmc.dynamics.Law`. Its Monte-Carlo error is a few percent
    of itself. For Euler's scheme it is positive by construction. Another estimate, by Stein's
    identity, is :math:`-\mathrm{Cov}(\theta_i, (M \hat\nabla)_i) / M_{ii} - 1`: zero for draws
    of the posterior, and negative where the draws do not cover it. It has a Monte-Carlo error of
    about :math:`\sqrt{2 / K}` after K effective draws. For other step methods it is the only one,
    with the unit matrix for M. No pass over the data is needed.

    The gradients do not show an error of the mean, since their expectation is zero at stationarity
    whatever the bias, nor that a step size makes variances too small, as it may on skewed
    posteriors: for Langevin dynamics Stein's identity is above zero at stationarity. The skewness
    around the centre predicts the error of the mean to first order. Where it may be large,
    `pymc.sample` measures both at the end of a run of `SGLD` or `SGLDCV`, and ``rerun=True`` does
    so for any such run: from the last draw of each chain a pair of chains follows, at the whole and
    at half the step size, with common noise, so that the differences of their moments are known
    from few draws. Errors of first order in the step size h are twice this difference, and the mean
    less this error, ``extrapolated``, is off by terms of second order only (Richardson's
    extrapolation). The errors of second order of averaged noises are two thirds of that.

    **Verdicts.** A coordinate is "mean off" where the error of its mean is beyond doubt larger than
    0.1 standard deviations, "variance too large" where a variance error is beyond doubt larger
    than the stated one, and "variance too small" where Stein's identity or the second run is beyond
    doubt below minus the stated one. The verdict is "ok" only with evidence: at least 400 effective
    draws, R-hat of at most 1.01, a variance error that is below twice the stated one with two
    standard errors added, an error of the mean, predicted or by the second run with two standard
    errors added, of at most 0.1, a standard deviation that is known to 10 %, and where R-hat of no
    other coordinate is above 1.5. Otherwise it is "cannot tell", and ``draws_needed`` says how many
    draws would. The Monte-Carlo error of a standard deviation is from the fourth moment of the
    draws and the effective number of their squares: it is known to 10 % where the error that makes
    it too small, by Stein's identity or the second run, and as many standard errors as are "beyond
    doubt" come to at most that.

    One in 40 estimates is off by two standard errors to one side, which among 100 coordinates is
    two or three of them. Errors of the mean, and variance errors by Stein's identity, have standard
    errors as large as what they are compared with. For these, "beyond doubt" follows Bonferroni's
    bound: the chance of a wrong verdict on any of d coordinates is at most what two standard errors
    give for a single one (3.5 standard errors at d = 100). The variance error from the second
    moment of the gradients is known to a few percent of itself, and tuning aims at 95 % of the
    stated one. For this one, "beyond doubt" means two standard errors. A variance that they wrongly
    call too large is too large by a few percent of the stated error.

    **Compound steps.** Where a step method moves some of the variables and step methods of PyMC
    move the rest, the report is of the variables of the first. Their law is that given the other
    variables, so that the second moment of the gradients gives the error of the variance given
    these. The other step methods may add errors of their own. There is no report of a run with two
    step methods of this package.

    Parameters
    ----------
    idata : xarray.DataTree
        Trace from `pymc.sample` with one step method of this package. It is not changed.
    model : pymc.Model, optional
        Needed for `rerun` alone. The default is the model of the context.
    bias : float, optional
        Stated relative error of the variance. The default is that of the run.
    rerun : bool
        Measure the errors of means and variances by pairs of chains, for `SGLD` and `SGLDCV` that
        move all variables. They take at most about as many gradients as the run, and end sooner
        where the errors are known to 0.02 posterior standard deviations.
    random_seed : optional
        Seed of the pairs.
    compile_kwargs : mapping, optional
        Setting of the step method of the pairs, as in `SGLD`.

    Returns
    -------
    pandas.DataFrame
        The rows are the coordinates of the unconstrained position. The columns are ``mean`` and
        ``sd`` of the draws; ``sd_se``, the relative Monte-Carlo standard error of the latter; the
        relative ``variance_error`` and its standard error ``variance_error_se``; ``stein_error``
        and ``stein_error_se``, by Stein's identity; ``rerun_error`` and ``rerun_error_se``, by the
        second run where there was one, and NaN elsewhere;
        ``predicted_mean_error``, in posterior standard deviations, NaN where no centre is known;
        ``mean_error`` and ``mean_error_se``, in these, where it was measured, and NaN elsewhere;
        ``extrapolated``, the mean without this error, and ``extrapolated_se``; ``ess_bulk``;
        ``r_hat``;
        ``verdict``; and ``draws_needed``, the draws a chain that would decide a "cannot tell". The
        ``attrs`` have the stated ``bias``, the ``method``, the ``verdict`` on the whole run in one
        line, and ``gradient_probability``, the probability that chains at stationarity have mean
        gradients as large as these.

    Raises
    ------
    ValueError
        Where the trace has no stored gradients or numbers that are not finite, where a second run
        cannot be made from what it holds, or where `bias` is not in (0, 1).
    TypeError
        Where `bias` is not a number.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sgmcmc import SGLDCV
    >>> rng = np.random.default_rng(1)
    >>> x = rng.normal(size=1000)
    >>> with pm.Model():
    ...     slope = pm.Normal("slope", 0, 10)
    ...     _ = pm.Normal("y", slope * x, 1.0, observed=2 * x + rng.normal(size=1000))
    ...     step = SGLDCV(compile_kwargs={"mode": "FAST_COMPILE"})
    ...     idata = pm.sample(
    ...         step=step,
    ...         draws=500,
    ...         tune=100,
    ...         chains=2,
    ...         random_seed=1,
    ...         progressbar=False,
    ...         quiet=True,
    ...     )
    >>> report = bias_report(idata)
    >>> report.loc["slope", "verdict"]
    'ok'
    >>> bool(report.loc["slope", "variance_error"] < 0.06)
    True
    """
    if rerun or model is not None:
        model = given_model(model)
    positions, gradients, step_sizes, reasons = _stored(idata)
    labels = labels_of(idata, positions.shape[-1])
    settings = settings_of(idata)
    if bias is not None and positive_number("bias", bias) >= 1:
        raise ValueError(f"`bias` should be in (0, 1), but got {bias!r}.")
    stated = float(bias if bias is not None else settings.get("bias", VARIANCE_INFLATION))
    if rerun:
        check_rerun(idata, settings, model)

    error, stein, method = _variance_errors(idata, positions, gradients, step_sizes)
    mean, sd = positions.mean((0, 1)), positions.std((0, 1), ddof=1)
    measured = stored(idata)
    if rerun:
        assert model is not None
        measured = half_step_error(idata, settings, model, random_seed, compile_kwargs)
    unknown = Estimate(*np.full((2, len(sd)), np.nan))
    mean_error, rerun_error = measured or (unknown, unknown)
    ess, r_hat = ess_and_r_hat(positions)
    report = pd.DataFrame(
        {
            "mean": mean,
            "sd": sd,
            "sd_se": _mcse(positions, "sd") / sd,
            "variance_error": error.value,
            "variance_error_se": error.standard_error,
            "stein_error": stein.value,
            "stein_error_se": stein.standard_error,
            "rerun_error": rerun_error.value,
            "rerun_error_se": rerun_error.standard_error,
            "predicted_mean_error": _predicted(idata, error.value),
            "mean_error": mean_error.value,
            "mean_error_se": mean_error.standard_error,
            "extrapolated": mean - sd * mean_error.value,
            "extrapolated_se": np.hypot(_mcse(positions, "mean"), sd * mean_error.standard_error),
            "ess_bulk": ess,
            "r_hat": r_hat,
        },
        index=pd.Index(labels, name="coordinate"),
    )
    report["verdict"] = "diverged" if reasons else verdicts(report, stated, method)
    report["draws_needed"] = draws_needed(report, stated, method, positions.shape[1])
    probability = mean_gradient_test(gradients, _moved(idata, gradients))
    called = f"the {called_bias(bias, settings)} {stated:.3g}"
    report.attrs = {
        "bias": stated,
        "bias_called": called_bias(bias, settings),
        "method": method,
        "gradient_probability": probability,
        "verdict": overall(
            report, stated, called, probability, settings, reasons, positions.shape[1]
        ),
    }
    return report


def mean_warnings(idata: DataTree, model: pm.Model) -> list[str]:
    """Measure errors of moments at the end of a run where they may be large, and warn of such.

    They may be where the skewness at the centre predicts it, and where tuning found the posterior
    far from the Gaussian there, so that it made the step much smaller. The errors are written into
    the trace.
    """
    settings = settings_of(idata)
    if MIRRORED in settings:
        return []
    try:
        check_rerun(idata, settings, model)
    except ValueError:
        return []
    positions, gradients, step_sizes, reasons = _stored(idata)
    if reasons:
        return []
    variance_error, _, _ = _variance_errors(idata, positions, gradients, step_sizes)
    predicted = np.abs(_predicted(idata, variance_error.value))
    computed = settings["step_size"] if settings["step_size_from"] == COMPUTED else 0.0
    shrunk = np.mean(step_sizes[:, -1]) < SHRUNK * computed
    if not (shrunk or (predicted > LARGEST_MEAN_ERROR / 2).any()):
        return []
    ess, r_hat = ess_and_r_hat(positions)
    if ess.min() < SMALLEST_ESS or r_hat.max() > LARGEST_R_HAT:
        return []
    log.info(
        "The posterior is skewed: pairs of chains at the whole and at half the step size measure "
        "the errors of means and variances. They take at most a quarter of the gradients of the "
        "run."
    )
    errors = half_step_error(idata, settings, model, 0, None, most=0.25)
    store(idata, errors)
    labels = labels_of(idata, positions.shape[-1])
    stated = float(settings.get("bias", VARIANCE_INFLATION))
    sure = beyond_doubt(len(labels))
    means = (
        f"Means of {{}} are off by more than {LARGEST_MEAN_ERROR:g} standard deviations",
        "Use a smaller `bias`, or the corrected means `bias_report(idata).extrapolated`.",
    )
    variances = (
        f"Variances of {{}} are off by more than {stated:.3g} of themselves",
        "Use a smaller `bias`.",
    )
    return _off(errors.mean, sure, LARGEST_MEAN_ERROR, labels, *means) + _off(
        errors.variance, sure, stated, labels, *variances
    )


def bias_warnings(idata: DataTree, model: pm.Model | None = None) -> list[str]:
    """Warnings at the end of a run, none where it met the stated accuracy, or there is none."""
    settings = settings_of(idata)
    if MIRRORED in settings:  # The gradients say nothing of the variances.
        return []
    positions, gradients, step_sizes, reasons = _stored(idata)
    if reasons:
        return [f"{of_divergence(reasons)} {remedy_of_divergence(settings)}."]
    labels = labels_of(idata, positions.shape[-1])
    error, stein, method = _variance_errors(idata, positions, gradients, step_sizes)
    stated = float(settings.get("bias", VARIANCE_INFLATION))
    convergence = objection_to_convergence(idata, positions, gradients, labels)
    if convergence is not None:
        advice = remedy_of_convergence(float(error.value.max()), stated, settings)
        return [f"Not converged: {convergence} {advice} `bias_report(idata)` has all coordinates."]
    called, see = called_bias(None, settings), "See `bias_report(idata)`."
    for each, of_method in ((error, method), (stein, STEIN)):
        sure = beyond_doubt(len(labels), of_method)
        larger = Estimate(np.maximum(each.value, 0.0), each.standard_error)
        said = f"The variance of {{}} is too large by more than the {called} {stated:.3g}"
        advice = f"{remedy(max(stated, float(each.value.max())), stated, settings)} {see}"
        if found := _off(larger, sure, stated, labels, said, advice):
            return found
    smaller = Estimate(np.maximum(-stein.value, 0.0), stein.standard_error)
    advice = f"{remedy_of_small(float(smaller.value.max()))} {see}"
    return _off(
        smaller,
        beyond_doubt(len(labels)),
        stated,
        labels,
        "The variance of {} is too small",
        advice,
    )


def _off(
    error: Estimate, sure: float, bound: float, labels: tuple[str, ...], said: str, advice: str
) -> list[str]:
    """A warning of the coordinates whose error is beyond doubt larger than a bound, if any is.

    `said` begins the sentence, with a place for what is counted.
    """
    size = np.abs(error.value)
    off = size - sure * error.standard_error > bound
    if not off.any():
        return []
    worst = int(np.argmax(np.where(off, size, -np.inf)))
    counted = said.format(f"{int(off.sum())} of {len(labels)} coordinates")
    by = f"{error.value[worst]:.2g}"
    return [f"{counted}, most of all that of {labels[worst]}, by {by}. {advice}"]


# --- Parts ----------------------------------------------------------------------------------


def objection_to_convergence(
    idata: DataTree, positions: np.ndarray, gradients: np.ndarray, labels: tuple[str, ...]
) -> str | None:
    """What R-hat, effective draws and the mean gradient say against a run, None if nothing."""
    slow = _slowest(positions)
    objection = of_convergence(
        *ess_and_r_hat(positions[..., slow]), tuple(labels[number] for number in slow), len(labels)
    )
    if objection is None:
        probability = mean_gradient_test(gradients, _moved(idata, gradients))
        if probability < SMALLEST_PROBABILITY:
            objection = of_mean_gradient(probability)
    return objection


def _stored(
    idata: DataTree,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[Any, str]]:
    """Positions, gradients, step sizes of the draws, and chains that diverged with reasons."""
    run = read_run(idata, agreeing_chains=False, diverged_chains=True)
    if run.step_sizes_of_draws is None:
        raise ValueError(
            "The trace should have `step_size` in `sample_stats`, but has not. Sample with a step "
            "method of pymc_sgmcmc, as by `pm.sample(step=SGLDCV())`."
        )
    positions, gradients = run.positions.astype(float), run.gradients.astype(float)
    found = diverged(idata, positions, gradients, run.chains)
    reasons = {chain: reason for chain, reason in found.items() if reason is not None}
    if reasons:
        limits = (-LARGEST_POSITION, LARGEST_POSITION)
        positions, gradients = (np.clip(values, *limits) for values in (positions, gradients))
    return positions, gradients, run.step_sizes_of_draws, reasons


def _mcse(positions: np.ndarray, method: str) -> np.ndarray:
    from arviz_stats.base import array_stats  # takes half a second to import

    return array_stats.mcse(positions, method=method, **AXES)


def _slowest(positions: np.ndarray) -> np.ndarray:
    """Numbers of the coordinates with the longest autocorrelation times, by batch means.

    R-hat and effective draws take milliseconds for a coordinate, and positions may be very long.
    """
    if positions.shape[-1] <= CHECKED_COORDINATES:
        return np.arange(positions.shape[-1])
    times = batch_means(positions).var(0) / positions.var((0, 1))
    return np.sort(np.argsort(-times, kind="stable")[:CHECKED_COORDINATES])


def _variance_errors(
    idata: DataTree, positions: np.ndarray, gradients: np.ndarray, step_sizes: np.ndarray
) -> tuple[Estimate, Estimate, str]:
    """Variance errors by the best method for the run and by Stein's identity, and the first's name.

    With the covariance M of the posterior as preconditioner Stein's identity of each coordinate
    holds for its variance alone. The plain one has a larger Monte-Carlo error where coordinates are
    correlated.
    """
    stein = stein_variance_error(positions, _moved(idata, gradients))
    preconditioner, precision = (
        stored_matrix(idata[SETTINGS], name) if SETTINGS in idata.children else None
        for name in ("preconditioner", "precision")
    )
    law = LAWS.get(settings_of(idata).get(LAW, ""))
    if law is None or preconditioner is None or precision is None:
        return stein, stein, STEIN
    error = law.variance_error(gradients, step_sizes, preconditioner, precision)
    return error, stein, SECOND_MOMENT


def _moved(idata: DataTree, gradients: np.ndarray) -> np.ndarray:
    """Gradients times the preconditioner over its diagonal, or as they are where there is none."""
    preconditioner = None
    if SETTINGS in idata.children:
        preconditioner = stored_matrix(idata[SETTINGS], "preconditioner")
    if preconditioner is None:
        return gradients
    return gradients @ preconditioner / preconditioner.diagonal()


def _predicted(idata: DataTree, variance_error: np.ndarray) -> np.ndarray:
    """Error of each mean by the skewness at the centre, NaN where that is not known.

    The size is in posterior standard deviations and to first order, see `Center`.
    """
    if SETTINGS not in idata.children or MEAN_SHIFT not in idata[SETTINGS].data_vars:
        return np.full(len(variance_error), np.nan)
    shift = np.asarray(idata[SETTINGS][MEAN_SHIFT], dtype=float)
    return shift * max(0.0, float(variance_error.max()))
