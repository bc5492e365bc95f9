r"""The draw from which on each chain of a trace has converged, by means of stored gradients.

At stationarity the mean of a window of successive gradients has expectation zero. While a chain is
still on its way to the posterior, this mean is larger by orders of magnitude. Its variance at
stationarity depends on the sampler, its step size, its thinning and the noise of its gradients. It
is measured, on windows of the last half of the chains of any sampler.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

import numpy as np
import xarray as xr
from scipy import linalg, special
from xarray import DataTree

from pymc_sgmcmc.adaptation.convergence import CONVERGENCE_RULES
from pymc_sgmcmc.checks import one_of, positive_number, unknown_argument, whole_number
from pymc_sgmcmc.matrices import covariance_root
from pymc_sgmcmc.record import MOMENTS, PREFIX, groups_of, is_of_draws
from pymc_sgmcmc.stein import split_into_batches
from pymc_sgmcmc.trace_tools.reader import StoredRun, read_run

WINDOWS_IN_HALF = 25
"""By default half a chain has this number of windows. The number is a compromise: longer windows
have means with less noise, and shorter windows say more exactly where a chain has converged."""

LARGEST_CORRELATION = 0.1
"""The default length of a window is doubled while the mean squared correlation of the means of
successive windows is larger than this number. At 0.1 about 80 % of the windows count as
independent."""

FEWEST_WINDOWS = 8
"""At least this number of independent windows has to show the variance of their means. From fewer
windows a standard deviation is uncertain by more than a quarter."""

SMALLEST_PROBABILITY = 1e-4
"""A chain counts as not converged at all where the probability of the mean gradient of its last
half is lower. By chance this happens to one converged chain in ten thousand."""

log = logging.getLogger("pymc.sgmcmc")
"""The log says how many draws are left out. PyMC shows loggers whose names begin with its own."""


def gradient_convergence(
    idata: DataTree,
    *,
    rule: str = "chi2",
    window: int | None = None,
    level: float = 0.95,
    b: float = 1.0,
) -> xr.Dataset:
    r"""Test each window of successive stored gradients of a trace for a mean of zero.

    With ``rule="chi2"`` the statistic of a window with mean :math:`\bar Y` is
    :math:`\bar Y^\top \mathrm{Var}(\bar Y)^{-1} \bar Y`. The variance is that of the means of
    windows of the last half of all chains, without the windows near the tested one. This holds for
    the trace of any sampler, with any thinning. The bound is Hotelling's, from the F distribution.
    Its degrees of freedom are the number of windows, or fewer where successive windows are
    correlated. With too few windows for the number of coordinates, the statistic is the largest of
    those of single coordinates, with Bonferroni's bound.

    With ``rule="elementwise"``, the rule of El hanchi (2018), eq. 17, the statistic is the largest
    :math:`|\bar Y_i| / \sqrt{(H + V)_{ii} / n_w}` and the bound is `b`. The print lacks a constant,
    which is included here, and H + V is measured on the last half. The rule takes gradients of
    successive draws for independent. It has no level: the more coordinates there are, the more
    rarely a window passes.

    The last half of the chains is assumed to have converged, and the mean of its gradients is
    tested for that.

    Parameters
    ----------
    idata : xarray.DataTree
        Trace with `position` and `gradient` in `sample_stats`: from `pymc.sample` with a step
        method of this package, or from `gradients`. It is not changed.
    rule : {"chi2", "elementwise"}
    window : int, optional
        Number of draws in a window, :math:`n_w`. The default is a fiftieth of the draws of a chain,
        or more where successive windows of this length are correlated.
    level : float
        Probability that a window passes the first rule at stationarity.
    b : float
        Bound of the second rule.

    Returns
    -------
    xarray.Dataset
        ``statistic``, ``bound``, ``passed`` and ``converged`` have the dimensions `chain` and
        `draw`, where `draw` is the last draw of each window. ``converged`` is true from the first
        window on that passes. ``unconverged_draws`` has for each chain the number of draws before
        the end of that window: 0 where the very first window passes, and all draws where none
        passes. ``last_half_probability`` has for each chain the probability of so large a mean
        gradient in the last half at stationarity. Below 10⁻⁴ the chain counts as not converged
        throughout. The attributes are ``window``, ``rule``, ``level`` and ``degrees_of_freedom``.

    Raises
    ------
    ValueError
        Where the trace has no stored gradients, or draws are not finite or too few.

    See Also
    --------
    discard_unconverged : The trace without the draws before convergence.

    References
    ----------
    A. El hanchi (2018). Stochastic gradient MCMC algorithms and their applications, §2.3.2.

    Examples
    --------
    A chain of independent draws that begins far away.

    >>> import numpy as np, xarray as xr
    >>> x = np.random.default_rng(1).normal(size=(2, 400, 2))
    >>> x[1, :30] += 20
    >>> dims = ("chain", "draw", "at")
    >>> stats = xr.Dataset({"position": (dims, x), "gradient": (dims, -x)})
    >>> report = gradient_convergence(xr.DataTree.from_dict({"sample_stats": stats}))
    >>> report["unconverged_draws"].values
    array([ 0, 37])
    """
    one_of("rule", rule, CONVERGENCE_RULES)
    if positive_number("level", level) >= 1:
        raise ValueError(f"`level` should be in (0, 1), but got {level!r}.")
    positive_number("b", b)
    run = read_run(idata, agreeing_chains=False)
    draws = run.positions.shape[1]
    length = _window_length(run, window)
    if rule == "elementwise":
        statistic, bound = _elementwise(run, length), np.full((len(run.chains), 1), b)
        degrees = np.nan
    else:
        statistic, bound, degrees = _measured(run, length, level)
    bound = np.broadcast_to(bound, statistic.shape)
    probability = _last_half_probabilities(_Batches.of(run, length))
    passed = statistic <= bound
    # Where draws are few the probability is NaN, which is no objection.
    at_rest = ~(probability < SMALLEST_PROBABILITY)
    converged = np.maximum.accumulate(passed, axis=1) & at_rest[:, None]
    first = converged.argmax(1)
    # The first window that passes may begin before the chain has converged.
    unconverged = np.where(first > 0, first + length - 1, 0)
    unconverged = np.where(converged.any(1), unconverged, draws)
    labels = _draw_labels(idata, draws)
    dims = ("chain", "draw")
    return xr.Dataset(
        {
            "statistic": (dims, statistic),
            "bound": (dims, bound.copy()),
            "passed": (dims, passed),
            "converged": (dims, converged),
            "unconverged_draws": ("chain", unconverged),
            "last_half_probability": ("chain", probability),
        },
        coords={"chain": list(run.chains), "draw": labels[length - 1 :]},
        attrs={
            "window": length,
            "rule": rule,
            "level": level if rule == "chi2" else np.nan,
            "degrees_of_freedom": degrees,
        },
    )


def discard_unconverged(idata: DataTree, **settings: Any) -> DataTree:
    """Trace without the draws before all of its chains have converged.

    These are the draws before the end of the first window that passes the test of
    `gradient_convergence`, or none where the very first window passes. The slowest chain decides
    how many draws are left out of all chains. The number is logged, and kept as the attribute
    ``sgmcmc_discarded_draws`` of `sample_stats`.

    Parameters
    ----------
    idata : xarray.DataTree
        Trace as for `gradient_convergence`. It is not changed.
    **settings
        Settings of `gradient_convergence`.

    Returns
    -------
    xarray.DataTree
        Trace in which all groups with the draws of `sample_stats` are cut. Moments of all
        transitions are left out where draws are, since they contain these draws.

    Raises
    ------
    ValueError
        Where a chain has not converged before its last half, by which it is judged.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> x = np.random.default_rng(1).normal(size=(2, 400, 2))
    >>> x[1, :30] += 20
    >>> dims = ("chain", "draw", "at")
    >>> stats = xr.Dataset({"position": (dims, x), "gradient": (dims, -x)})
    >>> kept = discard_unconverged(xr.DataTree.from_dict({"sample_stats": stats}))
    >>> kept["sample_stats"].sizes["draw"]
    363
    """
    known = [name for name in signature(gradient_convergence).parameters if name != "idata"]
    for name in settings:
        if name not in known:
            raise unknown_argument("gradient_convergence", name, known)
    report = gradient_convergence(idata, **settings)
    draws = idata["sample_stats"].sizes["draw"]
    unconverged = report["unconverged_draws"].values
    late = unconverged > draws // 2
    if late.any():
        chains = report["chain"].values.tolist()
        bad = [chain for chain, is_late in zip(chains, late, strict=True) if is_late]
        good = [chain for chain in chains if chain not in bad]
        advice = f"leave them out, `idata.sel(chain={good})`" if good else "set another `window`"
        raise ValueError(
            f"All chains should converge within the first half of their {draws} draws, but chains "
            f"{bad} did not. Sample again with more tuning or draws, or {advice}."
        )
    count = int(unconverged.max())
    log.info(
        "%d of %d draws of each chain are left out: chains converged after %s.",
        count,
        draws,
        ", ".join(map(str, unconverged)),
    )
    groups = groups_of(idata)
    if count:
        groups.pop(MOMENTS, None)  # They contain the draws that are left out.
    for name, dataset in groups.items():
        if is_of_draws(name, dataset, len(unconverged), draws):
            groups[name] = dataset.isel(draw=slice(count, None))
    discarded = {f"{PREFIX}discarded_draws": count}
    groups["sample_stats"] = groups["sample_stats"].assign_attrs(discarded)
    return DataTree.from_dict(groups, name=idata.name)


# --- Windows --------------------------------------------------------------------------------


def window_means(values: np.ndarray, length: int) -> np.ndarray:
    """Means of all windows of successive rows, shape (rows - length + 1, d).

    Examples
    --------
    >>> window_means(np.arange(4.0)[:, None], 2).ravel()
    array([0.5, 1.5, 2.5])
    """
    sums = np.cumsum(values, axis=0, dtype=float)
    means = sums[length - 1 :].copy()
    means[1:] -= sums[:-length]
    return means / length


def _window_length(run: StoredRun, window: int | None) -> int:
    """Number of draws in a window, as the user wants or by default."""
    draws = run.positions.shape[1]
    if window is not None:
        if whole_number("window", window, 1, " of draws") > draws // 4:
            raise ValueError(
                f"`window` should be at most a quarter of the {draws} draws of a chain, "
                f"{draws // 4}, but got {window}."
            )
        return int(window)
    length = max(1, draws // (2 * WINDOWS_IN_HALF))
    # At least 10 windows are left in half a chain.
    while draws // 2 // (2 * length) >= 10:
        if _Batches.of(run, length).correlation <= LARGEST_CORRELATION:
            break
        length *= 2
    return length


@dataclass(frozen=True)
class _Batches:
    """Means of successive windows of the last half of each chain.

    Attributes
    ----------
    means : numpy.ndarray, shape (chains, windows, d)
    first : int
        Number of the draw with which the first window begins.
    length : int
        Number of draws in a window.
    """

    means: np.ndarray
    first: int
    length: int

    @classmethod
    def of(cls, run: StoredRun, length: int) -> _Batches:
        """Take as many windows of this length as the last half holds, up to the last draw."""
        draws = run.gradients.shape[1]
        count = draws // 2 // length
        first = draws - count * length
        windows = split_into_batches(run.gradients[:, first:], count)
        return cls(windows.mean(2, dtype=float), first, length)

    @cached_property
    def correlation(self) -> float:
        """Mean square of the correlation of successive means, less what chance adds to it.

        It is that of the median chain, so that a chain that has not converged does not count.
        """
        m = self.means
        if m.shape[1] < 3:
            return 0.0
        squares = (m**2).mean(1)
        rho = (m[:, 1:] * m[:, :-1]).mean(1) / np.where(squares > 0, squares, 1)
        return float(np.clip(np.median((rho**2).mean(1)) - 1 / (m.shape[1] - 1), 0, 0.9))

    @property
    def independent(self) -> float:
        """Share of the means that count as independent."""
        return (1 - self.correlation) / (1 + self.correlation)

    def near(self, starts: np.ndarray) -> np.ndarray:
        """First and last number of the means near windows with given starts, shape (n, 2).

        Near are those that overlap with the window, and their neighbours.
        """
        lowest = (starts - self.length - self.first) // self.length
        highest = -((self.first - starts - 2 * self.length) // self.length)
        ranges = np.clip(np.stack([lowest, highest], axis=1), 0, self.means.shape[1])
        ranges[ranges[:, 0] >= ranges[:, 1]] = 0
        return ranges


def _measured(run: StoredRun, length: int, level: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Statistics, bounds and degrees of freedom, with the variance measured on the last half."""
    batches = _Batches.of(run, length)
    chains, count, d = batches.means.shape
    # For a window in the last half itself, up to four means are left out.
    independent = batches.independent
    fewest = (chains * count - 4) * independent
    if fewest < FEWEST_WINDOWS:
        raise ValueError(
            f"The last half of the chains should have {FEWEST_WINDOWS} independent windows, but "
            f"has about {max(0, fewest):.0f} of {length} draws: chains are slow or still on their "
            "way, or `gradient` is of other data. Sample more draws, or try a shorter `window`."
        )
    joint = fewest > 2 * d + 2
    total = np.einsum("cbi,cbj->ij", batches.means, batches.means)
    starts = np.arange(run.gradients.shape[1] - length + 1)
    ranges = batches.near(starts)
    statistic, bound = (np.empty((chains, len(starts))) for _ in range(2))
    for chain in range(chains):
        means = window_means(run.gradients[chain], length)
        edges = np.flatnonzero(np.any(np.diff(ranges, axis=0) != 0, axis=1)) + 1
        for part in np.split(starts, edges):
            low, high = ranges[part[0]]
            left_out = batches.means[chain, low:high]
            number = chains * count - len(left_out)
            covariance = (total - left_out.T @ left_out) / number
            degrees = number * independent
            squared, limit = (_hotelling if joint else _bonferroni)(
                means[part], covariance, degrees, level
            )
            statistic[chain, part], bound[chain, part] = squared, limit
    return statistic, bound, float(chains * count * independent)


def _last_half_probabilities(batches: _Batches) -> np.ndarray:
    """Probabilities of mean gradients as large as those of the last halves, shape (chains,).

    The variance of the mean of a chain is that which the other chains show.
    """
    chains, count, d = batches.means.shape
    rho = np.sqrt(batches.correlation)
    effective = count * (1 - rho) / (1 + rho)
    probabilities = np.full(chains, np.nan)
    for chain in range(chains):
        own = batches.means[chain]
        pooled = np.delete(batches.means, chain, axis=0).reshape(-1, d)
        number = len(pooled)
        if chains == 1:
            pooled, number = own - own.mean(0), count - 1
        degrees = number * batches.independent
        if degrees < 2:
            continue
        mean, covariance = own.mean(0), pooled.T @ pooled / number
        if degrees > 2 * d + 2:
            squared = effective * (_whitened(mean[None], covariance) ** 2).sum()
            free = degrees - d + 1
            probabilities[chain] = special.fdtrc(d, free, squared * free / (degrees * d))
        else:
            t = np.abs(mean) / np.sqrt(np.diag(covariance) / effective)
            probabilities[chain] = min(1.0, 2 * d * special.stdtr(degrees, -t.max()))
    return probabilities


def _hotelling(
    means: np.ndarray, covariance: np.ndarray, degrees: float, level: float
) -> tuple[np.ndarray, float]:
    """Hotelling's statistics with a covariance about zero, and their bound."""
    d = means.shape[1]
    whitened = _whitened(means, covariance)
    free = degrees - d + 1
    return np.einsum("ki,ki->k", whitened, whitened), float(
        degrees * d / free * special.fdtri(d, free, level)
    )


def _whitened(means: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Rows in coordinates in which the covariance is I.

    Raises
    ------
    ValueError
        Where the covariance is singular.
    """
    try:
        root = covariance_root(covariance)
    except linalg.LinAlgError:
        raise ValueError(
            "The gradients should be linearly independent, but are not. Leave variables that are "
            'functions of others out of the model, or use `rule="elementwise"`.'
        ) from None
    return linalg.solve_triangular(root, means.T, lower=True).T


def _bonferroni(
    means: np.ndarray, covariance: np.ndarray, degrees: float, level: float
) -> tuple[np.ndarray, float]:
    """Largest squares of single coordinates over their variances, and Bonferroni's bound."""
    d = means.shape[1]
    largest = (means**2 / np.diag(covariance)).max(1)
    return largest, float(special.stdtrit(degrees, (1 - level) / (2 * d)) ** 2)


def _elementwise(run: StoredRun, length: int) -> np.ndarray:
    """Statistics of El hanchi's rule."""
    last = run.gradients[:, run.gradients.shape[1] // 2 :]
    variances = np.mean(np.square(last, dtype=float), axis=(0, 1))
    scale = np.sqrt(variances / length)
    return np.array([np.abs(window_means(chain, length) / scale).max(1) for chain in run.gradients])


def _draw_labels(idata: DataTree, draws: int) -> np.ndarray:
    """Labels of the draws of a trace, or their numbers."""
    coords = idata["sample_stats"].coords
    return coords["draw"].values if "draw" in coords else np.arange(draws)
