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
from pymc_sgmcmc.posterior.position import given_model
from pymc_sgmcmc.record import COMPUTED, LARGEST_MEAN_ERROR, MIRRORED, settings_of
from pymc_sgmcmc.trace_tools.errors import errors_of
from pymc_sgmcmc.trace_tools.half_step import check_rerun, half_step_error, store
from pymc_sgmcmc.trace_tools.reader import read_run
from pymc_sgmcmc.trace_tools.verdict import (
    WRONG,
    draws_needed,
    objection,
    overall,
    verdict_of_run,
    verdicts,
)

log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold

SHRUNK = 0.5
"""Means are measured where tuning made the computed step size smaller than by this factor."""


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
    if bias is not None and positive_number("bias", bias) >= 1:
        raise ValueError(f"`bias` should be in (0, 1), but got {bias!r}.")
    measured = None
    if rerun:
        assert model is not None
        read_run(idata, agreeing_chains=False, diverged_chains=True)  # The pairs take longer.
        settings = settings_of(idata)
        check_rerun(idata, settings, model)
        measured = half_step_error(idata, settings, model, random_seed, compile_kwargs)
    errors = errors_of(idata, bias=bias, measured=measured)
    report = errors.frame()
    report["verdict"], report["draws_needed"] = verdicts(errors), draws_needed(errors)
    report.attrs = {
        "bias": errors.stated,
        "bias_called": errors.called,
        "method": errors["variance_error"].source,
        "gradient_probability": errors.probability,
        "verdict": overall(errors),
    }
    return report


def bias_warnings(idata: DataTree, model: pm.Model | None = None) -> list[str]:
    """The verdict at the end of a run where it is wrong, none where nothing speaks against it."""
    if MIRRORED in settings_of(idata):  # The gradients say nothing of the variances.
        return []
    errors = errors_of(idata, brief=True)
    if verdict_of_run(errors) not in WRONG:
        return []
    return [f"{overall(errors)} `bias_report(idata)` has all coordinates."]


def measure_means(idata: DataTree, model: pm.Model) -> list[str]:
    """Measure errors of moments at the end of a run where they may be large, into the trace.

    They may be where the skewness at the centre predicts it, and where tuning found the posterior
    far from the Gaussian there, so that it made the step much smaller. There are no messages.
    """
    settings = settings_of(idata)
    if MIRRORED in settings:
        return []
    try:
        check_rerun(idata, settings, model)
    except ValueError:
        return []
    errors = errors_of(idata, brief=True)
    computed = settings["step_size"] if settings["step_size_from"] == COMPUTED else 0.0
    last = np.asarray(idata["sample_stats"]["step_size"])[:, -1]
    shrunk = float(last.mean()) < SHRUNK * computed
    large = np.abs(errors["predicted_mean_error"].value) > LARGEST_MEAN_ERROR / 2
    if errors.diverged or objection(errors) is not None or not (shrunk or large.any()):
        return []
    log.info(
        "The posterior is skewed: pairs of chains at the whole and at half the step size measure "
        "the errors of means and variances. They take at most a quarter of the gradients of the "
        "run."
    )
    store(idata, half_step_error(idata, settings, model, 0, None, most=0.25))
    return []
