r"""From which draw on has each chain of a trace converged? Means of windows of stored gradients.

At stationarity the mean of a window of gradients has mean zero; where a chain is on its way, it is
larger by orders of magnitude. How large it may be at stationarity depends on the sampler, its
step size, its thinning and the noise of its gradients. Here this variance is either measured, on
windows of the last half of the chains, whatever made them, or computed in closed form for
Langevin dynamics.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

import numpy as np
import xarray as xr
from scipy import linalg, stats
from xarray import DataTree

from pymc_sgmcmc.adaptation.convergence import CONVERGENCE_RULES
from pymc_sgmcmc.checks import one_of, positive_number
from pymc_sgmcmc.matrices import as_matrix, covariance_root
from pymc_sgmcmc.record import MOMENTS, PREFIX, groups_of, is_of_draws
from pymc_sgmcmc.trace_tools.langevin import langevin_window_covariance
from pymc_sgmcmc.trace_tools.reader import StoredRun, read_run

VARIANCES = ("batch_means", "closed_form")
"""Names of the two methods that give the variance of the mean of a window."""

WINDOWS_IN_HALF = 25
"""Number of windows in half a chain, which sets the default length of a window."""

LARGEST_CORRELATION = 0.1
"""Mean squared correlation of successive windows above which the default length doubles."""

FEWEST_WINDOWS = 8
"""Windows from which the variance of their mean can be told."""

SMALLEST_PROBABILITY = 1e-4
"""Probability of the mean gradient of the last half of a chain, below which the chain counts as not
converged at all. By chance one in ten thousand halves is below it."""

log = logging.getLogger("pymc.sgmcmc")


def gradient_convergence(
    idata: DataTree,
    *,
    rule: str = "chi2",
    variance: str = "batch_means",
    window: int | None = None,
    level: float = 0.95,
    b: float = 1.0,
) -> xr.Dataset:
    r"""Test each window of successive stored gradients of a trace for a mean of zero.

    With ``rule="chi2"`` the statistic of a window with mean :math:`\bar Y` is
    :math:`\bar Y^\top \mathrm{Var}(\bar Y)^{-1} \bar Y`. The variance is that of

    - ``variance="batch_means"``: the means of windows of the last half of all chains, those near
      the tested one left out. This holds for the trace of any sampler, with any thinning. The
      bound is Hotelling's, from the F distribution with as many degrees of freedom as windows
      count, fewer where successive ones are correlated; with too few windows for the number of
      coordinates it is Bonferroni's on the largest of the single statistics.
    - ``variance="closed_form"``: Langevin dynamics (`SGLD`, `SGLDCV`, `ULA`) whose trace has
      step size, preconditioner and curvature, on a near-Gaussian posterior, with thinning.
      Needs few draws; the bound is that of :math:`\chi^2_d`.

    With ``rule="elementwise"``, the rule of El hanchi (2018), eq. 17, the statistic is the largest
    :math:`|\bar Y_i| / \sqrt{(H + V)_{ii} / n_w}` and the bound `b`, with the C that the print
    lacks and H + V measured on the last half. It takes gradients of successive draws for
    independent and has no level: the more coordinates, the more rarely a window passes.

    The last half of the chains is taken to have converged, which the gradients of that half are
    tested for.

    Parameters
    ----------
    idata : xarray.DataTree
        With `position` and `gradient` in `sample_stats`: from `pymc.sample` with a step method of
        this package, or from `gradients`. Not changed.
    rule : {"chi2", "elementwise"}
    variance : {"batch_means", "closed_form"}
        For the first rule.
    window : int, optional
        Draws in a window, :math:`n_w`. Default: a fiftieth of the draws of a chain, more where
        successive windows of this length are correlated.
    level : float
        Probability that a window passes the first rule at stationarity.
    b : float
        Bound of the second rule.

    Returns
    -------
    xarray.Dataset
        Dimensions `chain` and `draw`, where `draw` is the last of each window: ``statistic``,
        ``bound``, ``passed`` and ``converged``, which is true from the first window on that
        passes. By chain ``unconverged_draws``, those before the end of the first window that
        passes, none where that is the first of all, all of them where no window passes; and
        ``last_half_probability``, that of so large a mean gradient in the last half at
        stationarity; below 10⁻⁴ the chain counts as not converged throughout.
        Attributes: ``window``, ``rule``, ``variance``, ``level``, ``degrees_of_freedom``.

    Raises
    ------
    ValueError
        Where there are no stored gradients, draws are not finite, or too few; for the closed
        form, where the trace is not that of Langevin dynamics with known matrices.

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
    one_of("variance", variance, VARIANCES)
    if positive_number("level", level) >= 1:
        raise ValueError(f"`level` should be in (0, 1), but got {level!r}.")
    positive_number("b", b)
    run = read_run(idata, agreeing_chains=False)
    draws = run.positions.shape[1]
    length = _window_length(run, window)
    if rule == "elementwise":
        variance = "none"
        statistic, bound = _elementwise(run, length), np.full((len(run.chains), 1), b)
        degrees = np.nan
    elif variance == "closed_form":
        statistic = _closed_form(idata, run, length)
        degrees = float(run.dimension)
        bound = np.full((len(run.chains), 1), stats.chi2.ppf(level, run.dimension))
    else:
        statistic, bound, degrees = _measured(run, length, level)
    bound = np.broadcast_to(bound, statistic.shape)
    probability = _last_half_probabilities(_Batches.of(run, length))
    passed = statistic <= bound
    # Not "at least": there is no probability (NaN) where draws are few.
    at_rest = ~(probability < SMALLEST_PROBABILITY)
    converged = np.maximum.accumulate(passed, axis=1) & at_rest[:, None]
    first = converged.argmax(1)
    # The window that ends a way from afar is partly on that way.
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
            "variance": variance,
            "level": level if rule == "chi2" else np.nan,
            "degrees_of_freedom": degrees,
        },
    )


def discard_unconverged(idata: DataTree, **settings: Any) -> DataTree:
    """Trace without the draws before all of its chains have converged.

    Draws before the end of the first window that passes the test of `gradient_convergence` are
    left out, none where the first window of all passes. All chains are cut alike, as the slowest
    of them needs, so that the trace stays rectangular. How many were left out is logged, and kept
    as the attribute ``sgmcmc_discarded_draws`` of `sample_stats`.

    Parameters
    ----------
    idata : xarray.DataTree
        As for `gradient_convergence`. Not changed.
    **settings
        Those of `gradient_convergence`.

    Returns
    -------
    xarray.DataTree
        All groups whose `draw` is that of `sample_stats` are cut. Moments over all transitions
        are left out where draws are, since they count those as well.

    Raises
    ------
    ValueError
        Where a chain has not converged, or not before its last half, from which it is judged.

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
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise TypeError(
            f"`{unknown[0]}` is no setting of `gradient_convergence`, whose settings are "
            f"{', '.join(f'`{name}`' for name in known)}."
        )
    report = gradient_convergence(idata, **settings)
    draws = idata["sample_stats"].sizes["draw"]
    unconverged = report["unconverged_draws"].values
    late = unconverged > draws // 2
    if late.any():
        chains = report["chain"].values.tolist()
        bad = [chain for chain, is_late in zip(chains, late, strict=True) if is_late]
        good = [chain for chain in chains if chain not in bad]
        advice = f"leave them out, `idata.sel(chain={good})`, or " if good else ""
        raise ValueError(
            f"All chains should converge within the first half of their {draws} draws, but chains "
            f"{bad} did not: no draws would be left that can be trusted. Sample again with more "
            f"tuning or draws, nearer to the mode, or {advice}with another `window`."
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
        groups.pop(MOMENTS, None)  # of the draws that are left out as well
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
    draws = run.positions.shape[1]
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, int | np.integer):
            raise ValueError(f"`window` should be a whole number, but got {window!r}.")
        if not 1 <= window <= draws // 4:
            raise ValueError(
                f"`window` should be between 1 and a quarter of the {draws} draws of a chain, "
                f"{draws // 4}, but got {window}."
            )
        return int(window)
    length = max(1, draws // (2 * WINDOWS_IN_HALF))
    # Not longer than leaves 10 windows in the half of a chain.
    while draws // 2 // (2 * length) >= 10:
        if _Batches.of(run, length).correlation <= LARGEST_CORRELATION:
            break
        length *= 2
    return length


@dataclass(frozen=True)
class _Batches:
    """Means of successive windows of the last half of each chain, (chains, batches, d)."""

    means: np.ndarray
    first: int
    length: int

    @classmethod
    def of(cls, run: StoredRun, length: int) -> _Batches:
        chains, draws, d = run.gradients.shape
        count = draws // 2 // length
        first = draws - count * length
        last = run.gradients[:, first:].reshape(chains, count, length, d)
        return cls(last.mean(2, dtype=float), first, length)

    @cached_property
    def correlation(self) -> float:
        """Mean square of the correlation of successive means, less what few of them show.

        That of the median chain, so that one on its way does not hide what the others are.
        """
        m = self.means
        if m.shape[1] < 3:
            return 0.0
        squares = (m**2).mean(1)
        rho = (m[:, 1:] * m[:, :-1]).mean(1) / np.where(squares > 0, squares, 1)
        return float(np.clip(np.median((rho**2).mean(1)) - 1 / (m.shape[1] - 1), 0, 0.9))

    @property
    def independent(self) -> float:
        """Share of the means that counts for the variance of one."""
        return (1 - self.correlation) / (1 + self.correlation)

    def near(self, starts: np.ndarray) -> np.ndarray:
        """Ranges of batches that overlap with windows or are next to those that do, (n, 2)."""
        lowest = (starts - self.length - self.first) // self.length
        highest = -((self.first - starts - 2 * self.length) // self.length)
        ranges = np.clip(np.stack([lowest, highest], axis=1), 0, self.means.shape[1])
        ranges[ranges[:, 0] >= ranges[:, 1]] = 0
        return ranges


def _measured(run: StoredRun, length: int, level: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Statistics, bounds and degrees of freedom with the variance from the last half."""
    batches = _Batches.of(run, length)
    chains, count, d = batches.means.shape
    # Of a window in the last half itself, up to four batches are left out.
    independent = batches.independent
    fewest = (chains * count - 4) * independent
    if fewest < FEWEST_WINDOWS:
        raise ValueError(
            f"At least {FEWEST_WINDOWS} independent windows in the last half of the chains should "
            f"tell the variance of their means, but there are about {max(0, fewest):.0f}, of "
            f"{length} draws each: the chains are slow, or still on their way in their last half, "
            "or `gradient` is that of other data. Sample more draws, or, where they are fast, pass "
            'a shorter `window`; for Langevin dynamics there is `variance="closed_form"`.'
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

    The variance of the mean of a chain is that of the other chains.
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
            probabilities[chain] = stats.f.sf(squared * free / (degrees * d), d, free)
        else:
            t = np.abs(mean) / np.sqrt(np.diag(covariance) / effective)
            probabilities[chain] = min(1.0, 2 * d * stats.t.sf(t.max(), degrees))
    return probabilities


def _hotelling(
    means: np.ndarray, covariance: np.ndarray, degrees: float, level: float
) -> tuple[np.ndarray, float]:
    """Squared lengths in units of an estimated covariance about zero, and their bound."""
    d = means.shape[1]
    whitened = _whitened(means, covariance)
    free = degrees - d + 1
    return np.einsum("ki,ki->k", whitened, whitened), float(
        degrees * d / free * stats.f.ppf(level, d, free)
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
            "The gradients should be linearly independent and not constant, but are not: some "
            "variables are functions of others, or no factor of the density has them. Leave these "
            'out of the model, or use `rule="elementwise"`.'
        ) from None
    return linalg.solve_triangular(root, means.T, lower=True).T


def _bonferroni(
    means: np.ndarray, covariance: np.ndarray, degrees: float, level: float
) -> tuple[np.ndarray, float]:
    """Largest squares of the single coordinates in units of their variances, and their bound."""
    d = means.shape[1]
    largest = (means**2 / np.diag(covariance)).max(1)
    return largest, float(stats.t.isf((1 - level) / (2 * d), degrees) ** 2)


def _elementwise(run: StoredRun, length: int) -> np.ndarray:
    last = run.gradients[:, run.gradients.shape[1] // 2 :]
    variances = np.mean(np.square(last, dtype=float), axis=(0, 1))
    scale = np.sqrt(variances / length)
    return np.array([np.abs(window_means(chain, length) / scale).max(1) for chain in run.gradients])


def _closed_form(idata: DataTree, run: StoredRun, length: int) -> np.ndarray:
    missing = [name for name in ("preconditioner", "precision") if name not in run.arrays]
    if not run.is_langevin or missing:
        sampler = run.settings.get("sampler", "another sampler")
        raise ValueError(
            "The closed form is for Langevin dynamics (SGLD, SGLDCV, ULA) with one step size a "
            "chain and with preconditioner and precision in the group `sgmcmc_settings`, but the "
            f"trace is of {sampler}"
            + (f" and has no {' and no '.join(missing)}" if missing else "")
            + (" and has no constant step sizes" if run.step_sizes is None else "")
            + '. Use `variance="batch_means"`.'
        )
    assert run.step_sizes is not None
    chains, draws, d = run.gradients.shape
    last = run.gradients[:, draws // 2 :].reshape(-1, d).astype(float)
    second_moment = last.T @ last / len(last)
    if run.thin is None:
        raise ValueError(
            "The closed form is for evenly spaced draws, but the labels of the draws are "
            f"{_draw_labels(idata, draws)[:5]}... Select evenly spaced ones, "
            '`idata.sel(draw=slice(None, None, 10))` does, or use `variance="batch_means"`.'
        )
    precision = as_matrix(run.arrays["precision"]).dense(d)
    statistic = np.empty((chains, draws - length + 1))
    for chain in range(chains):
        covariance = langevin_window_covariance(
            second_moment,
            float(run.step_sizes[chain]),
            run.preconditioner,
            precision,
            length,
            run.thin,
        )
        try:
            root = covariance_root(covariance)
        except linalg.LinAlgError:
            raise ValueError(
                "The covariance of the mean of a window should be positive, but is not for the "
                "stored settings: the gradients are not those of a near-Gaussian posterior with "
                'the curvature at the centre. Use `variance="batch_means"`.'
            ) from None
        means = window_means(run.gradients[chain], length)
        whitened = linalg.solve_triangular(root, means.T, lower=True)
        statistic[chain] = np.einsum("ik,ik->k", whitened, whitened)
    return statistic


def _draw_labels(idata: DataTree, draws: int) -> np.ndarray:
    coords = idata["sample_stats"].coords
    return coords["draw"].values if "draw" in coords else np.arange(draws)
