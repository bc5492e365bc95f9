"""Errors of the posterior variances and means of a run, from the stored gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
from scipy import special
from xarray import DataTree

from pymc_sgmcmc.checks import positive_number
from pymc_sgmcmc.posterior.position import layout_from_model
from pymc_sgmcmc.record import (
    GIVEN,
    LARGEST_MEAN_ERROR,
    MEAN_ERROR,
    MEAN_ERROR_OF,
    SEARCHED,
    SETTINGS,
    STEP_METHODS,
    labels_of,
    settings_of,
    stored_matrix,
)
from pymc_sgmcmc.stein import (
    Estimate,
    batch_means,
    langevin_variance_error,
    mean_gradient_test,
    stein_variance_error,
)
from pymc_sgmcmc.step_methods.repeat import repeated_step
from pymc_sgmcmc.trace_tools.divergence import LARGEST_POSITION
from pymc_sgmcmc.trace_tools.gradients import changed_data
from pymc_sgmcmc.trace_tools.reader import diverged, read_run, remedy_of_divergence
from pymc_sgmcmc.tuning import VARIANCE_INFLATION

STANDARD_ERRORS = 2.0
"""An error counts as larger than the stated one where it is larger by this number of Monte-Carlo
standard errors. By chance an estimate is that far off, to one side, once in 40 cases."""

ENOUGH_MEAN_ERROR = 0.025
"""The advice on the number of draws aims at this standard error of the error of a mean, in
posterior standard deviations. It is a quarter of the largest error that is accepted."""

LARGEST_R_HAT = 1.05
"""Chains count as not converged where R-hat of a coordinate is larger. The bound is looser than the
1.01 of Vehtari et al. (2021), since R-hat from 100 effective draws is above that by chance."""

SMALLEST_ESS = 100.0
"""Chains count as not converged where a coordinate has fewer effective draws. The bound is looser
than the 400 of Vehtari et al. (2021). From 100 draws a standard deviation is known to 7 %."""

SMALLEST_PROBABILITY = 1e-3
"""Chains count as not converged where the probability of the mean gradient is lower. By chance this
happens to one converged run in a thousand."""

CHECKED_COORDINATES = 200
"""At the end of a run the convergence of at most this number of coordinates is judged, the slowest
ones. This takes half a second."""

SMALLEST_BIAS = 0.001
"""No smaller `bias` is advised. Where an estimate asks for less, the step size is not what is wrong
with a run."""

UNUSABLE = ("Diverged", "Not converged")
"""The verdicts on runs that say little about the posterior begin with these words."""

TOO_WIDE = 1.0
"""For a chain that has not converged, a smaller step is advised where the variance error is larger
than this number, so that the variance is more than twice the right one."""

RERUN_SAMPLERS = ("SGLD", "SGLDCV")
"""These step methods can be run again by `bias_report` from the settings in a trace."""

AXES = {"chain_axis": 0, "draw_axis": 1}
"""The statistics of ArviZ take these axes of positions for those of chains and draws."""

BY_HAND = "Sample again with half the step size, and compare the two."
"""This remedy ends messages about runs that `bias_report` cannot repeat."""

SECOND_MOMENT, STEIN = "second moment of the gradients", "Stein's identity"
"""These are the names of the two methods that give a variance error."""


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
    curvature at the centre, see `pymc_sgmcmc.stein.langevin_variance_error`. Its Monte-Carlo error
    is a few percent of itself. For other step methods it is :math:`-\mathrm{Cov}(\theta_i,
    \hat\nabla_i) - 1`, which is zero for draws of the posterior by Stein's identity. It then has a
    Monte-Carlo error of about :math:`\sqrt{2 / K}` after K effective draws. No pass over the data
    is needed.

    The gradients do not show an error of the mean, since their expectation is zero at stationarity
    whatever the bias. With ``rerun=True`` the run is repeated at half the step size. Errors are of
    first order in the step size, so that twice the difference of the means is the error of the run.
    Its standard error is about :math:`2 \sqrt{2 / K}` posterior standard deviations. About 3000
    effective draws are needed to tell an error of 0.1 standard deviations from none. With fewer
    draws the verdict is "cannot tell".

    **Verdicts.** A coordinate is "mean off" where the error of its mean is beyond doubt larger than
    0.1 standard deviations, and "variance too large" where its variance error is beyond doubt
    larger than the stated one. The verdict is "ok" only where, with two standard errors added, the
    first is still below 0.1 and the second below twice the stated one.

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
        Run again at half the step size, for `SGLD` and `SGLDCV` that move all variables. This takes
        about twice the time of the run.
    random_seed : optional
        Seed of the second run.
    compile_kwargs : mapping, optional
        Setting of the step method of the second run, as in `SGLD`.

    Returns
    -------
    pandas.DataFrame
        The rows are the coordinates of the unconstrained position. The columns are ``mean`` and
        ``sd`` of the draws; the relative ``variance_error`` and its standard error
        ``variance_error_se``; ``mean_error``, in posterior standard deviations, and
        ``mean_error_se`` (both NaN without `rerun`); ``ess_bulk``; ``r_hat``; and ``verdict``. The
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
    ...         draws=300,
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
    positions, gradients, step_sizes, reasons = _stored(idata)
    labels = labels_of(idata, positions.shape[-1])
    settings = settings_of(idata)
    if bias is not None and positive_number("bias", bias) >= 1:
        raise ValueError(f"`bias` should be in (0, 1), but got {bias!r}.")
    stated = float(bias if bias is not None else settings.get("bias", VARIANCE_INFLATION))
    if rerun:
        model = _check_rerun(idata, settings, model)

    error, method = _variance_error(idata, positions, gradients, step_sizes)
    sd = positions.std((0, 1), ddof=1)
    mean_error = Estimate(np.full(len(sd), np.nan), np.full(len(sd), np.nan))
    if rerun:
        second = _rerun(idata, settings, model, random_seed, compile_kwargs)
        mean_error = _half_step_error(positions, second, sd)
    ess, r_hat = _convergence(positions)
    verdicts = [
        _verdict(
            error.value[i] / stated,
            error.standard_error[i] / stated,
            (mean_error.value[i], mean_error.standard_error[i]),
            ess[i],
            r_hat[i],
            beyond_doubt=(_beyond_doubt(len(sd), method), _beyond_doubt(len(sd))),
        )
        for i in range(len(sd))
    ]
    if reasons:
        verdicts = ["diverged"] * len(sd)
    report = pd.DataFrame(
        {
            "mean": positions.mean((0, 1)),
            "sd": sd,
            "variance_error": error.value,
            "variance_error_se": error.standard_error,
            "mean_error": mean_error.value,
            "mean_error_se": mean_error.standard_error,
            "ess_bulk": ess,
            "r_hat": r_hat,
            "verdict": verdicts,
        },
        index=pd.Index(labels, name="coordinate"),
    )
    probability = mean_gradient_test(gradients)
    called = f"the {_called(bias, settings)} {stated:.3g}"
    report.attrs = {
        "bias": stated,
        "bias_called": _called(bias, settings),
        "method": method,
        "gradient_probability": probability,
        "verdict": _overall(report, stated, called, probability, settings, reasons),
    }
    return report


def bias_warnings(idata: DataTree) -> list[str]:
    """Warnings at the end of a run, none where it met the stated accuracy, or there is none."""
    positions, gradients, step_sizes, reasons = _stored(idata)
    settings = settings_of(idata)
    if reasons:
        return [f"{_of_divergence(reasons)} {remedy_of_divergence(settings)}."]
    labels = labels_of(idata, positions.shape[-1])
    slow = _slowest(positions)
    convergence = _of_convergence(
        *_convergence(positions[..., slow]), tuple(labels[number] for number in slow)
    )
    error, method = _variance_error(idata, positions, gradients, step_sizes)
    if convergence is None:
        probability = mean_gradient_test(gradients)
        if probability < SMALLEST_PROBABILITY:
            convergence = _of_mean_gradient(probability)
    if convergence is not None:
        stated = float(settings.get("bias", VARIANCE_INFLATION))
        remedy = _remedy_of_convergence(float(error.value.max()), stated, settings)
        return [f"Not converged: {convergence} {remedy} `bias_report(idata)` has all coordinates."]
    if settings.get("step_size_from") == SEARCHED:
        return []
    stated = float(settings.get("bias", VARIANCE_INFLATION))
    excess = error.value - _beyond_doubt(len(error.value), method) * error.standard_error
    above = excess > stated
    if not above.any():
        return []
    worst = int(np.argmax(np.where(above, error.value, -np.inf)))
    return [
        f"The variance of {int(above.sum())} of {len(above)} coordinates is too large by more than "
        f"the {_called(None, settings)} {stated:.3g}, most of all that of {labels[worst]}, by "
        f"about {error.value[worst]:.2g}. {_remedy(error.value[worst], stated, settings)} "
        "See `bias_report(idata)`."
    ]


# --- Parts ----------------------------------------------------------------------------------


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


def _convergence(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Effective draws and R-hat of each coordinate. The halves of a single chain are compared."""
    from arviz_stats.base import array_stats  # takes half a second to import

    halves = positions
    if len(positions) == 1:
        half = positions.shape[1] // 2
        halves = np.concatenate([positions[:, :half], positions[:, -half:]])
    return array_stats.ess(positions, **AXES), array_stats.rhat(halves, **AXES)


def _slowest(positions: np.ndarray) -> np.ndarray:
    """Numbers of the coordinates with the longest autocorrelation times, by batch means.

    R-hat and effective draws take milliseconds for a coordinate, and positions may be very long.
    """
    if positions.shape[-1] <= CHECKED_COORDINATES:
        return np.arange(positions.shape[-1])
    times = batch_means(positions).var(0) / positions.var((0, 1))
    return np.sort(np.argsort(-times, kind="stable")[:CHECKED_COORDINATES])


def _of_convergence(ess: np.ndarray, r_hat: np.ndarray, labels: tuple[str, ...]) -> str | None:
    """What R-hat and the effective sample size say against a run, None where it is nothing."""
    bad = ~((r_hat < LARGEST_R_HAT) & (ess >= SMALLEST_ESS))
    if not bad.any():
        return None
    worst = int(np.argmax(np.where(bad, np.nan_to_num(r_hat, nan=np.inf), -np.inf)))
    return (
        f"{int(bad.sum())} of {len(bad)} coordinates have R-hat above {LARGEST_R_HAT} or fewer "
        f"than {SMALLEST_ESS:g} effective draws, such as `{labels[worst]}` with R-hat "
        f"{r_hat[worst]:.3g} and {ess[worst]:.2g} effective draws."
    )


def _of_mean_gradient(probability: float) -> str:
    """What the mean gradient says against a run."""
    return f"the mean gradient is not zero (its probability at stationarity is {probability:.2g})."


def _remedy_of_convergence(error: float, stated: float, settings: dict[str, Any]) -> str:
    """Remedy for a run that has not converged, given its largest variance error."""
    if error > TOO_WIDE:
        return f"Variances are too large by {error:.2g}. {_remedy(error, stated, settings)}"
    return "Use more draws, or longer tuning."


def _of_divergence(reasons: dict[Any, str]) -> str:
    """Verdict on a run whose chains diverged for these reasons."""
    chain, reason = next(iter(reasons.items()))
    return f"Diverged: chain {chain} {reason}."


def _variance_error(
    idata: DataTree, positions: np.ndarray, gradients: np.ndarray, step_sizes: np.ndarray
) -> tuple[Estimate, str]:
    """Relative variance errors, and the name of the method that gave them."""
    if SETTINGS in idata.children:
        preconditioner = stored_matrix(idata[SETTINGS], "preconditioner")
        precision = stored_matrix(idata[SETTINGS], "precision")
        if preconditioner is not None and precision is not None:
            estimate = langevin_variance_error(gradients, step_sizes, preconditioner, precision)
            return estimate, SECOND_MOMENT
    return stein_variance_error(positions, gradients), STEIN


def _called(bias: float | None, settings: dict[str, Any]) -> str:
    """What to call the bound on the variance error.

    It is "stated" where the user gives it or the step size was computed for it. A step size that
    was given, or searched, or of which nothing is known, is for no bias.
    """
    computed = settings.get("step_size_from", GIVEN) not in (GIVEN, SEARCHED)
    is_stated = bias is not None or (computed and "bias" in settings)
    return "stated" if is_stated else "default"


def _beyond_doubt(dimension: int, method: str = "") -> float:
    """Number of standard errors by which an error is beyond doubt, see `bias_report`."""
    if method == SECOND_MOMENT:
        return STANDARD_ERRORS
    return float(-special.ndtri(special.ndtr(-STANDARD_ERRORS) / dimension))


def _verdict(
    error: float,
    standard_error: float,
    mean_error: tuple[float, float],
    ess: float,
    r_hat: float,
    *,
    beyond_doubt: tuple[float, float] = (STANDARD_ERRORS, STANDARD_ERRORS),
) -> str:
    """Verdict on one coordinate, given its variance error as a multiple of the stated one.

    `beyond_doubt` has the numbers of standard errors by which errors of the variance and of the
    mean are beyond doubt.
    """
    if not (r_hat < LARGEST_R_HAT and ess >= SMALLEST_ESS):
        return "not converged"
    if error - beyond_doubt[0] * standard_error > 1:
        return "variance too large"
    # Without a second run the error of the mean is NaN, and no comparison is true.
    if abs(mean_error[0]) - beyond_doubt[1] * mean_error[1] > LARGEST_MEAN_ERROR:
        return "mean off"
    if error + STANDARD_ERRORS * standard_error > 2:
        return "cannot tell"
    if abs(mean_error[0]) + STANDARD_ERRORS * mean_error[1] > LARGEST_MEAN_ERROR:
        return "cannot tell"
    return "ok"


def _overall(
    report: pd.DataFrame,
    stated: float,
    called: str,
    probability: float,
    settings: dict[str, Any],
    reasons: dict[Any, str],
) -> str:
    """Verdict on the whole run. `called` is what to call the bound on the variance error."""
    if reasons:
        return f"{_of_divergence(reasons)} {remedy_of_divergence(settings)}."
    counts = report["verdict"].value_counts()
    worst = float(report["variance_error"].max())
    if counts.get("not converged", 0) or probability < SMALLEST_PROBABILITY:
        said = _of_convergence(
            report["ess_bulk"].to_numpy(), report["r_hat"].to_numpy(), tuple(report.index)
        )
        said = said or _of_mean_gradient(probability)
        remedy = _remedy_of_convergence(worst, stated, settings)
        return f"Not converged: {said} {remedy}"
    if counts.get("variance too large", 0):
        return f"Variances are too large by up to {worst:.2g}, more than {called}. " + _remedy(
            worst, stated, settings
        )
    if counts.get("mean off", 0):
        return (
            f"Means are off by more than {LARGEST_MEAN_ERROR:g} standard deviations. "
            + _remedy_of_means(stated, settings)
        )
    if counts.get("cannot tell", 0):
        return _what_cannot_be_told(report, stated, called)
    return f"Variance errors of at most {worst:.2g} are within {called}." + (
        _predicted_mean_error(settings)
        if report["mean_error"].isna().all()
        else f" Errors of the means are below {LARGEST_MEAN_ERROR:g} standard deviations."
    )


def _predicted_mean_error(settings: dict[str, Any]) -> str:
    """Sentence on the error of a mean that was predicted at the centre, where it is large."""
    error = float(settings.get(MEAN_ERROR, 0.0))
    if error <= LARGEST_MEAN_ERROR:
        return ""
    return (
        f" The error of the mean of `{settings[MEAN_ERROR_OF]}`, which gradients do not show, may "
        f"be about {error:.1g} standard deviations. Use `rerun=True` to see it, or a smaller "
        "`bias`."
    )


def _what_cannot_be_told(report: pd.DataFrame, stated: float, called: str) -> str:
    """Verdict on a run whose Monte-Carlo errors are too large."""
    parts = []
    variance_error, standard_error = report["variance_error"], report["variance_error_se"]
    if (variance_error + STANDARD_ERRORS * standard_error > 2 * stated).any():
        parts.append(
            f"The Monte-Carlo error of the variance error is up to {standard_error.max():.2g}, too "
            f"large to compare it with {called}. Use more draws."
        )
    mean_error, standard_error = report["mean_error"].abs(), report["mean_error_se"]
    if (mean_error + STANDARD_ERRORS * standard_error > LARGEST_MEAN_ERROR).any():
        largest = standard_error.max()
        times = max(2.0, (largest / ENOUGH_MEAN_ERROR) ** 2)
        parts.append(
            f"The Monte-Carlo error of the mean error is up to {largest:.2g} standard deviations, "
            f"too large to compare it with {LARGEST_MEAN_ERROR:g}. Use about {times:.2g} times as "
            "many draws."
        )
    return " ".join(parts)


def _remedy(error: float, stated: float, settings: dict[str, Any]) -> str:
    """Remedy for a variance error that is larger than the stated one."""
    factor = stated / error
    step_size = settings.get("step_size")
    if settings.get("step_size_from") == GIVEN and step_size is not None:
        return f"Use a `step_size` of about {0.9 * factor * step_size:.2g}, or leave it out."
    if settings.get("step_size_from") == SEARCHED:
        return _remedy_of_search(0.9 * factor * settings["step_size"])
    smaller = 0.9 * factor * stated
    if smaller < SMALLEST_BIAS:
        return (
            "The posterior may be improper, or far from the Gaussian around the centre: check the "
            "priors, give `center`, or sample with NUTS."
        )
    if settings.get("gradient") == "plain":
        return f'Use `bias={smaller:.2g}`, a larger `batch_size`, or `gradient="cv"`.'
    return f"Use more tuning draws, or `bias={smaller:.2g}`."


def _remedy_of_search(step_size: float) -> str:
    """Remedy for a step size from successive halving, which keeps to no stated accuracy."""
    return (
        f"Use a `step_size` of about {step_size:.2g} with the same `preconditioner`, or state a "
        '`bias` and leave out `tune_method="halving"`.'
    )


def _remedy_of_means(stated: float, settings: dict[str, Any]) -> str:
    """Remedy for errors of the means."""
    step_size = settings.get("step_size")
    if settings.get("step_size_from") == SEARCHED and step_size is not None:
        return _remedy_of_search(0.5 * step_size)
    if settings.get("step_size_from") == GIVEN:
        example = "" if step_size is None else f", for example {0.5 * step_size:.2g}"
        return f"Use a smaller `step_size`{example}."
    return f"Use a smaller `bias`, for example {0.5 * stated:.2g}."


# --- Second run -----------------------------------------------------------------------------


def _check_rerun(idata: DataTree, settings: dict[str, Any], model: pm.Model | None) -> pm.Model:
    """Model of a second run.

    Raises
    ------
    ValueError
        Where no second run can be made.
    """
    if STEP_METHODS in settings:
        raise ValueError(
            "`rerun=True` can repeat runs in which one step method moves all variables, but the "
            f"trace is of {settings[STEP_METHODS]} step methods. {BY_HAND}"
        )
    name = settings.get("sampler")
    if name not in RERUN_SAMPLERS or SETTINGS not in idata.children:
        raise ValueError(
            f"`rerun=True` can repeat runs of {' and '.join(RERUN_SAMPLERS)}, but the trace is of "
            f"{name or 'an unknown step method'}. {BY_HAND}"
        )
    if settings.get("estimator_from") == GIVEN:
        raise ValueError(
            "`rerun=True` can repeat runs whose `gradient` is a name or `SVRG`, but that of the "
            f"trace is an estimator made by hand. {BY_HAND}"
        )
    try:
        model = pm.modelcontext(model)
    except TypeError:
        raise ValueError(
            "`rerun=True` needs the model of the run, but `model` is None outside of the context "
            "of a model. Pass `model=`."
        ) from None
    labels = layout_from_model(model, None, model.initial_point()).labels
    stored = labels_of(idata, len(labels))
    changed = changed_data(idata, model)
    if labels != stored or changed:
        what = (
            f"other values of {', '.join(changed)}"
            if changed
            else (
                f"the coordinates {', '.join(labels[:5])}, but the run had {', '.join(stored[:5])}"
            )
        )
        raise ValueError(
            f"`model` should be the one that was sampled, but has {what}. Pass that model with its "
            "data, or sample again."
        )
    return model


def _rerun(
    idata: DataTree,
    settings: dict[str, Any],
    model: pm.Model | None,
    random_seed: Any,
    compile_kwargs: Mapping[str, Any] | None,
) -> np.ndarray:
    """Positions of a second run at half the step size."""
    assert model is not None
    recorded = idata["sample_stats"]
    step = repeated_step(
        model,
        settings,
        idata[SETTINGS],
        step_size=float(np.asarray(recorded["step_size"])[:, -1].mean()) / 2,
        thin=2 * int(settings["thin"]),
        compile_kwargs=compile_kwargs,
    )
    with model:
        second = pm.sample(
            step=step,
            draws=recorded.sizes["draw"],
            tune=min(500, recorded.sizes["draw"]),
            chains=recorded.sizes["chain"],
            random_seed=random_seed,
            progressbar=False,
            compute_convergence_checks=False,
            quiet=True,
        )
    return np.asarray(second["sample_stats"]["position"], dtype=float)


def _half_step_error(first: np.ndarray, second: np.ndarray, sd: np.ndarray) -> Estimate:
    """Twice the difference of the means, in posterior standard deviations."""
    from arviz_stats.base import array_stats  # takes half a second to import

    difference = first.mean((0, 1)) - second.mean((0, 1))
    errors = [array_stats.mcse(run, **AXES) for run in (first, second)]
    return Estimate(2 * difference / sd, 2 * np.hypot(*errors) / sd)
