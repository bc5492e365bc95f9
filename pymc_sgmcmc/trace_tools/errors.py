"""The table of errors of a run: what is known of each mean and variance, by which source.

`bias_report` shows it as it is, the verdicts on a run compare it with what was accepted, and
`summary` states errors from it. Errors of means are in posterior standard deviations, those of
variances are relative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from xarray import DataTree

from pymc_sgmcmc.dynamics.law import LAWS
from pymc_sgmcmc.matrices import Matrix
from pymc_sgmcmc.record import (
    GIVEN,
    LARGEST_MEAN_ERROR,
    LAW,
    MEAN_SHIFT,
    SETTINGS,
    stored_matrix,
)
from pymc_sgmcmc.stein import (
    STANDARD_ERRORS,
    Estimate,
    batch_means,
    beyond_doubt,
    mean_gradient_test,
    stein_variance_error,
)
from pymc_sgmcmc.trace_tools.diagnostics import ess_and_r_hat, mcse
from pymc_sgmcmc.trace_tools.divergence import LARGEST_POSITION
from pymc_sgmcmc.trace_tools.half_step import PairErrors, stored
from pymc_sgmcmc.trace_tools.reader import StoredRun, diverged, read_run
from pymc_sgmcmc.tuning import VARIANCE_INFLATION

CHECKED_COORDINATES = 200
"""At the end of a run the convergence of at most this number of coordinates is judged, the slowest
ones. This takes half a second."""

SECOND_MOMENT, STEIN = "second moment of the gradients", "Stein's identity"
PAIRS, SKEWNESS = "pairs of chains", "skewness at the centre"
"""These are the sources of errors."""

VARIANCE_ERRORS = ("variance_error", "stein_error", "rerun_error")
"""These errors are of variances: by the best method for the run, by Stein's identity, and by pairs
of chains where they were run."""


@dataclass(frozen=True)
class Error(Estimate):
    """Errors of means, or of variances, of all coordinates, by one source.

    Attributes
    ----------
    value, standard_error : numpy.ndarray, shape (d,)
        NaN where they are not known.
    limit : float
        Errors of this size are accepted.
    sure : float
        Number of standard errors by which a value is beyond doubt.
    source : str
        What shows them.
    """

    limit: float
    sure: float
    source: str

    def beyond(self, sign: int) -> np.ndarray:
        """Whether each error is beyond doubt larger than the limit, to one side."""
        return sign * self.value - self.sure * self.standard_error > self.limit

    @property
    def off(self) -> np.ndarray:
        """Whether each error is beyond doubt larger than the limit, to either side."""
        return self.beyond(1) | self.beyond(-1)


@dataclass(frozen=True)
class Errors:
    """What is known of the errors of a run of d coordinates.

    Attributes
    ----------
    labels : tuple of str
    mean, sd : numpy.ndarray, shape (d,)
        Of the draws.
    mean_se, sd_se : numpy.ndarray, shape (d,)
        Their Monte-Carlo errors, that of the standard deviation relative.
    sources : mapping
        `Error` by name: ``variance_error`` by the best method, ``stein_error``, ``rerun_error`` and
        ``mean_error`` by pairs of chains, ``predicted_mean_error`` by the skewness at the centre.
    ess, r_hat : numpy.ndarray, shape (d,)
    judged : numpy.ndarray, shape (d,)
        Of which coordinates these two are known.
    stated : float
        Accepted relative error of the variances.
    called : str
        What that is called, "stated" or "default".
    probability : float
        That chains at stationarity have mean gradients as large as these.
    draws : int
        Number of draws of a chain.
    settings : mapping
        Settings of the run.
    diverged : mapping
        Reasons why chains count as diverged, by chain.
    """

    labels: tuple[str, ...]
    mean: np.ndarray
    sd: np.ndarray
    mean_se: np.ndarray
    sd_se: np.ndarray
    sources: Mapping[str, Error]
    ess: np.ndarray
    r_hat: np.ndarray
    judged: np.ndarray
    stated: float
    called: str
    probability: float
    draws: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    diverged: Mapping[Any, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Error:
        return self.sources[name]

    def variances_beyond(self, sign: int) -> np.ndarray:
        """Whether each variance error is beyond its limit, shape (sources, d)."""
        return np.array([self[name].beyond(sign) for name in VARIANCE_ERRORS])

    @property
    def sd_error(self) -> Error:
        """By how much standard deviations are too small, if at all, with the Monte-Carlo error.

        Both are relative. Variance errors that are too large have a bound of their own.
        """
        lowest = np.fmin.reduce([self[name].value for name in VARIANCE_ERRORS])
        too_small = 1 - np.sqrt(1 + np.clip(lowest, -1, 0))
        measured = np.nan_to_num(self["rerun_error"].standard_error)
        mean = self["mean_error"]
        error = np.hypot(self.sd_se, 0.5 * measured)
        return Error(too_small, error, mean.limit, mean.sure, "the draws and the variance errors")

    @property
    def skewed(self) -> np.ndarray:
        """Whether the mean may be off by the skewness of the posterior, and no pairs showed it."""
        return self["predicted_mean_error"].off & np.isnan(self["mean_error"].value)

    def has(self, r_hat: float, ess: float) -> np.ndarray:
        """Whether R-hat is below and the number of effective draws above a bound."""
        return (self.r_hat < r_hat) & (self.ess >= ess)

    def frame(self) -> pd.DataFrame:
        """The table with a row a coordinate."""
        measured = self["mean_error"]
        columns: dict[str, Any] = {"mean": self.mean, "sd": self.sd, "sd_se": self.sd_se}
        for name in VARIANCE_ERRORS:
            columns |= {name: self[name].value, f"{name}_se": self[name].standard_error}
        columns |= {
            "predicted_mean_error": self["predicted_mean_error"].value,
            "mean_error": measured.value,
            "mean_error_se": measured.standard_error,
            "extrapolated": self.mean - self.sd * measured.value,
            "extrapolated_se": np.hypot(self.mean_se, self.sd * measured.standard_error),
            "ess_bulk": self.ess,
            "r_hat": self.r_hat,
        }
        return pd.DataFrame(columns, index=pd.Index(self.labels, name="coordinate"))


# --- Of a trace -----------------------------------------------------------------------------


def errors_of(
    idata: DataTree,
    *,
    bias: float | None = None,
    measured: PairErrors | None = None,
    brief: bool = False,
) -> Errors:
    """The table of errors of a run.

    Parameters
    ----------
    idata : xarray.DataTree
    bias : float, optional
        Accepted relative error of the variances. The default is that of the run.
    measured : PairErrors, optional
        By pairs of chains. The default is what the trace has of them.
    brief : bool
        Leave out Monte-Carlo errors, and judge the convergence of the slowest coordinates alone.

    Raises
    ------
    ValueError
        Where the trace has no gradients or step sizes, or draws are not finite.
    """
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
    settings, d = run.settings, run.dimension
    stated = float(bias if bias is not None else settings.get("bias", VARIANCE_INFLATION))
    # A step size that was given, or of which nothing is known, is for no bias.
    computed = settings.get("step_size_from", GIVEN) != GIVEN and "bias" in settings
    unknown = np.full(d, np.nan)
    mean, sd = positions.mean((0, 1)), positions.std((0, 1), ddof=1)
    judged = _slowest(positions) if brief else np.ones(d, dtype=bool)
    ess, r_hat = unknown.copy(), unknown.copy()
    ess[judged], r_hat[judged] = ess_and_r_hat(positions[..., judged])
    preconditioner = _matrix(idata, "preconditioner")
    moved = gradients
    if preconditioner is not None:
        moved = gradients @ preconditioner / preconditioner.diagonal()
    stein, nothing = stein_variance_error(positions, moved), Estimate(unknown, unknown)
    pairs = measured or stored(idata) or PairErrors(nothing, nothing)
    return Errors(
        labels=run.labels,
        mean=mean,
        sd=sd,
        mean_se=unknown if brief else mcse(positions),
        sd_se=unknown if brief else mcse(positions, "sd") / sd,
        sources=_sources(idata, run, gradients, stein, pairs, stated),
        ess=ess,
        r_hat=r_hat,
        judged=judged,
        stated=stated,
        called="stated" if bias is not None or computed else "default",
        probability=mean_gradient_test(gradients, moved),
        draws=positions.shape[1],
        settings=settings,
        diverged=reasons,
    )


def _slowest(positions: np.ndarray) -> np.ndarray:
    """Which coordinates have the longest autocorrelation times, by batch means, shape (d,).

    R-hat and effective draws take milliseconds for a coordinate, and positions may be very long.
    """
    if positions.shape[-1] <= CHECKED_COORDINATES:
        return np.ones(positions.shape[-1], dtype=bool)
    times = batch_means(positions).var(0) / positions.var((0, 1))
    return np.isin(np.arange(len(times)), np.argsort(-times, kind="stable")[:CHECKED_COORDINATES])


def _sources(
    idata: DataTree,
    run: StoredRun,
    gradients: np.ndarray,
    stein: Estimate,
    pairs: PairErrors,
    stated: float,
) -> dict[str, Error]:
    """Errors by their names, those of variances by Stein's identity and of pairs are given.

    With the covariance M of the posterior as preconditioner Stein's identity of each coordinate
    holds for its variance alone. The plain one has a larger Monte-Carlo error where coordinates are
    correlated.
    """
    sure = beyond_doubt(run.dimension)
    best = of_stein = Error(**vars(stein), limit=stated, sure=sure, source=STEIN)
    law = LAWS.get(run.settings.get(LAW, ""))
    preconditioner, precision = _matrix(idata, "preconditioner"), _matrix(idata, "precision")
    if law is not None and preconditioner is not None and precision is not None:
        assert run.step_sizes_of_draws is not None
        found = law.variance_error(gradients, run.step_sizes_of_draws, preconditioner, precision)
        # This one is known to a few percent of itself.
        best = Error(**vars(found), limit=stated, sure=STANDARD_ERRORS, source=SECOND_MOMENT)
    predicted = _predicted(idata, best.value)
    return {
        "variance_error": best,
        "stein_error": of_stein,
        "rerun_error": Error(**vars(pairs.variance), limit=stated, sure=sure, source=PAIRS),
        "mean_error": Error(**vars(pairs.mean), limit=LARGEST_MEAN_ERROR, sure=sure, source=PAIRS),
        "predicted_mean_error": Error(
            predicted, np.zeros_like(predicted), LARGEST_MEAN_ERROR, 0.0, SKEWNESS
        ),
    }


def _matrix(idata: DataTree, name: str) -> Matrix | None:
    """A matrix of the settings of the run."""
    return stored_matrix(idata[SETTINGS], name) if SETTINGS in idata.children else None


def _predicted(idata: DataTree, variance_error: np.ndarray) -> np.ndarray:
    """Error of each mean by the skewness at the centre, NaN where that is not known.

    The size is in posterior standard deviations and to first order, see `Center`.
    """
    if SETTINGS not in idata.children or MEAN_SHIFT not in idata[SETTINGS].data_vars:
        return np.full(len(variance_error), np.nan)
    shift = np.asarray(idata[SETTINGS][MEAN_SHIFT], dtype=float)
    return shift * max(0.0, float(variance_error.max()))
