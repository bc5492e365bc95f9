"""How far the draws of a run are from the posterior, from the stored gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
from arviz_stats.base import array_stats
from xarray import DataTree

from pymc_sgmcmc.run_settings import GROUP, stored_matrix
from pymc_sgmcmc.stein import (
    Estimate,
    langevin_variance_error,
    mean_gradient_test,
    stein_variance_error,
)
from pymc_sgmcmc.stored import labels_of, settings_of
from pymc_sgmcmc.tuning import VARIANCE_INFLATION

STANDARD_ERRORS = 2.0
"""Monte-Carlo standard errors by which an error has to exceed the stated one."""

LARGEST_MEAN_ERROR = 0.1
"""Error of a mean, in posterior standard deviations, that is worth a word."""

LARGEST_R_HAT = 1.05
SMALLEST_ESS = 100.0
SMALLEST_PROBABILITY = 1e-3
"""Bounds beyond which chains count as not converged."""

RERUN_SAMPLERS = ("SGLD", "SGLDCV")
"""Step methods that `bias_report` can run again from what a trace holds."""


def bias_report(
    idata: DataTree,
    model: pm.Model | None = None,
    *,
    bias: float | None = None,
    rerun: bool = False,
    random_seed: Any = None,
) -> pd.DataFrame:
    r"""Estimated errors of the posterior variances and means of a run, a row a coordinate.

    For Langevin dynamics with a known preconditioner (`SGLD`, `SGLDCV`, `ULA`) the variance error
    is that of a Gaussian with the curvature at the centre and the second moment of the gradients
    that the chain met, see `pymc_sgmcmc.stein.langevin_variance_error`; its Monte-Carlo error is
    a few percent of itself. For other step methods it is
    :math:`-\mathrm{Cov}(\theta_i, \hat\nabla_i) - 1`, which is zero for draws of the posterior
    (Stein's identity) and has a Monte-Carlo error of about :math:`\sqrt{2 / K}` after K effective
    draws. No pass over the data.

    The gradients do not show an error of the mean, since their expectation is zero at
    stationarity whatever the bias. With ``rerun=True`` the run is repeated at half the step
    size: errors are of first order in it, so twice the difference is the error of the run.

    Parameters
    ----------
    idata : xarray.DataTree
        From `pymc.sample` with a step method of this package that has all variables. Not changed.
    model : pymc.Model, optional
        Needed for `rerun` alone; that of the context where not given.
    bias : float, optional
        Stated relative error of the variance; that of the run where not given.
    rerun : bool
        Run again at half the step size, for `SGLD` and `SGLDCV`. Takes about twice the time of
        the run.
    random_seed : optional
        Of the second run.

    Returns
    -------
    pandas.DataFrame
        Rows: coordinates of the unconstrained position. Columns: ``mean`` and ``sd`` of the draws;
        ``variance_error``, relative, and its standard error ``variance_error_se``;
        ``mean_error``, in posterior standard deviations, and ``mean_error_se`` (NaN without
        `rerun`); ``ess_bulk``; ``r_hat``; ``verdict``. ``attrs`` has the stated ``bias``, the
        ``method``, ``gradient_probability`` (that chains at stationarity have mean gradients as
        large as these), and the ``verdict`` of the whole run in one line.

    Raises
    ------
    ValueError
        Where the trace has no stored gradients, numbers that are not finite, or a second run
        cannot be made from what it holds.

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
    positions, gradients, step_sizes = _stored(idata)
    labels = labels_of(idata, positions.shape[-1])
    settings = settings_of(idata)
    stated = float(bias if bias is not None else settings.get("bias", VARIANCE_INFLATION))
    if not 0 < stated < 1:
        raise ValueError(f"`bias` should be in (0, 1), but got {bias!r}.")

    error, method = _variance_error(idata, positions, gradients, step_sizes)
    sd = positions.std((0, 1), ddof=1)
    mean_error = Estimate(np.full(len(sd), np.nan), np.full(len(sd), np.nan))
    if rerun:
        second = _rerun(idata, settings, pm.modelcontext(model), random_seed)
        mean_error = _half_step_error(positions, second, sd)
    ess = np.array([_array_stat("ess", positions[..., i]) for i in range(len(sd))])
    r_hat = np.array([_array_stat("rhat", positions[..., i]) for i in range(len(sd))])
    verdicts = [
        _verdict(
            error.value[i] / stated,
            error.standard_error[i] / stated,
            (mean_error.value[i], mean_error.standard_error[i]),
            ess[i],
            r_hat[i],
        )
        for i in range(len(sd))
    ]
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
    report.attrs = {
        "bias": stated,
        "method": method,
        "gradient_probability": probability,
        "verdict": _overall(report, stated, probability, settings),
    }
    return report


def bias_warnings(idata: DataTree) -> list[str]:
    """What to say at the end of a run: nothing where the stated accuracy was met."""
    positions, gradients, step_sizes = _stored(idata)
    error, _ = _variance_error(idata, positions, gradients, step_sizes)
    settings = settings_of(idata)
    stated = float(settings.get("bias", VARIANCE_INFLATION))
    excess = error.value - STANDARD_ERRORS * error.standard_error
    above = excess > stated
    if not above.any():
        return []
    worst = int(np.argmax(np.where(above, error.value, -np.inf)))
    label = labels_of(idata, len(above))[worst]
    return [
        f"The posterior variance of {int(above.sum())} of {len(above)} coordinates is too large by "
        f"more than the stated {stated:.3g}: most of all that of {label}, by about "
        f"{error.value[worst]:.2g} of itself. {_remedy(error.value[worst], stated, settings)} "
        "`bias_report(idata)` has all of them."
    ]


# --- Parts ----------------------------------------------------------------------------------


def _stored(idata: DataTree) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    stats = idata.children.get("sample_stats")
    if stats is None or not {"gradient", "position", "step_size"} <= set(stats.data_vars):
        raise ValueError(
            "The trace should have `gradient` and `position` in `sample_stats`, but has not. "
            "Sample with a step method of pymc_sgmcmc that has all variables, such as "
            "`pm.sample(step=SGLDCV())`."
        )
    positions, gradients = (np.asarray(stats[name]) for name in ("position", "gradient"))
    if positions.dtype == object or positions.ndim != 3:
        raise ValueError(
            "`gradient` and `position` should be those of one step method, with shape "
            f"(chain, draw, d), but have shape {positions.shape}: a report is made for runs in "
            "which one step method of pymc_sgmcmc has all variables."
        )
    positions, gradients = positions.astype(float), gradients.astype(float)
    good = np.isfinite(positions).all(-1) & np.isfinite(gradients).all(-1)
    if not good.all():
        raise ValueError(
            f"{int((~good).sum())} of {good.size} draws are not finite. Leave out the chains that "
            "diverged, or run again with a smaller step size."
        )
    if good.shape[1] < 4:
        raise ValueError(
            f"A report needs at least 4 draws a chain, but the trace has {good.shape[1]}."
        )
    return positions, gradients, np.asarray(stats["step_size"], dtype=float)


def _variance_error(
    idata: DataTree, positions: np.ndarray, gradients: np.ndarray, step_sizes: np.ndarray
) -> tuple[Estimate, str]:
    if GROUP in idata.children:
        preconditioner = stored_matrix(idata[GROUP], "preconditioner")
        precision = stored_matrix(idata[GROUP], "precision")
        if preconditioner is not None and precision is not None:
            estimate = langevin_variance_error(gradients, step_sizes, preconditioner, precision)
            return estimate, "second moment of the gradients"
    return stein_variance_error(positions, gradients), "Stein's identity"


def _array_stat(name: str, values: np.ndarray) -> float:
    return float(getattr(array_stats, name)(values, chain_axis=0, draw_axis=1))


def _verdict(
    error: float, standard_error: float, mean_error: tuple[float, float], ess: float, r_hat: float
) -> str:
    """Verdict of one coordinate; the variance error is relative to the stated one."""
    if not (r_hat < LARGEST_R_HAT and ess >= SMALLEST_ESS):
        return "not converged"
    if error - STANDARD_ERRORS * standard_error > 1:
        return "variance too large"
    # Without a second run the error of the mean is NaN, and nothing is said of it.
    if abs(mean_error[0]) - STANDARD_ERRORS * mean_error[1] > LARGEST_MEAN_ERROR:
        return "mean off"
    if error + STANDARD_ERRORS * standard_error > 2:
        return "cannot tell"
    return "ok"


def _overall(
    report: pd.DataFrame, stated: float, probability: float, settings: dict[str, Any]
) -> str:
    counts = report["verdict"].value_counts()
    if counts.get("not converged", 0) or probability < SMALLEST_PROBABILITY:
        return (
            f"Not converged: {counts.get('not converged', 0)} coordinates have few effective "
            f"draws or chains that disagree, mean gradients have probability {probability:.2g}. "
            "Use more draws, or longer tuning."
        )
    worst = float(report["variance_error"].max())
    if counts.get("variance too large", 0):
        return (
            f"Variances are too large by up to {worst:.2g}, more than the stated {stated:.3g}. "
            + _remedy(worst, stated, settings)
        )
    if counts.get("mean off", 0):
        return (
            f"Means are off by more than {LARGEST_MEAN_ERROR:g} standard deviations. Use a smaller "
            "`bias`."
        )
    if counts.get("cannot tell", 0):
        return (
            f"The Monte-Carlo error of the variance error is up to "
            f"{report['variance_error_se'].max():.2g}, too large to tell it from the stated "
            f"{stated:.3g}. Use more draws."
        )
    return f"Variance errors of at most {worst:.2g} are within the stated {stated:.3g}."


def _remedy(error: float, stated: float, settings: dict[str, Any]) -> str:
    factor = stated / error
    step_size = settings.get("step_size")
    if settings.get("step_size_from") == "given" and step_size is not None:
        return (
            f"Use a `step_size` of about {0.9 * factor * step_size:.2g}, or leave it out to have "
            "it computed."
        )
    if settings.get("gradient") == "plain":
        return (
            f"Use `bias={max(0.001, 0.9 * factor * stated):.2g}`, a larger `batch_size`, or "
            '`gradient="cv"`.'
        )
    return f"Use more tuning draws, or `bias={max(0.001, 0.9 * factor * stated):.2g}`."


# --- Second run -----------------------------------------------------------------------------


def _rerun(
    idata: DataTree, settings: dict[str, Any], model: pm.Model, random_seed: Any
) -> np.ndarray:
    """Positions of a run at half the step size."""
    from pymc_sgmcmc import step_methods

    name = settings.get("sampler")
    if name not in RERUN_SAMPLERS or GROUP not in idata.children:
        raise ValueError(
            f"`rerun=True` can repeat runs of {' and '.join(RERUN_SAMPLERS)}, but the trace is of "
            f"{name or 'an unknown step method'}. Sample again with half the step size, and "
            "compare."
        )
    arrays, stats = idata[GROUP], idata["sample_stats"]
    thin = int(settings["thin"])
    with model:
        step = getattr(step_methods, name)(
            step_size=float(np.asarray(stats["step_size"])[:, -1].mean()) / 2,
            preconditioner=stored_matrix(arrays, "preconditioner"),
            gradient=settings["gradient"],
            batching=settings["batching"],
            batch_size=int(settings["batch_size"]),
            center=np.asarray(arrays["center"]) if "center" in arrays.data_vars else None,
            thin=2 * thin,
        )
        second = pm.sample(
            step=step,
            draws=stats.sizes["draw"],
            tune=min(500, stats.sizes["draw"]),
            chains=stats.sizes["chain"],
            random_seed=random_seed,
            progressbar=False,
            compute_convergence_checks=False,
            quiet=True,
        )
    return np.asarray(second["sample_stats"]["position"], dtype=float)


def _half_step_error(first: np.ndarray, second: np.ndarray, sd: np.ndarray) -> Estimate:
    """Twice the difference of the means, in posterior standard deviations."""
    difference = first.mean((0, 1)) - second.mean((0, 1))
    errors = [_mean_errors(run) for run in (first, second)]
    return Estimate(2 * difference / sd, 2 * np.hypot(*errors) / sd)


def _mean_errors(positions: np.ndarray) -> np.ndarray:
    count = range(positions.shape[-1])
    return np.array([_array_stat("mcse", positions[..., i]) for i in count])
