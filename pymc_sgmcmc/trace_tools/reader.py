"""Positions, gradients and settings that a trace holds, checked and without copies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from scipy import linalg
from xarray import DataTree

from pymc_sgmcmc.checks import FEW_NAMES, quoted
from pymc_sgmcmc.dynamics.law import LAWS, Law
from pymc_sgmcmc.matrices import Dense, as_matrix, covariance_root, dependent_coordinates
from pymc_sgmcmc.record import (
    DIMENSION,
    GIVEN,
    GRADIENT,
    LAW,
    MIRRORED,
    POSITION,
    SETTINGS,
    STEP_METHODS,
    STEP_SIZE_COLUMN,
    UNCALIBRATED,
    labels_of,
    settings_of,
    stored_matrix,
    with_preconditioner,
)
from pymc_sgmcmc.stein import mean_gradient_test, stein_variance_error
from pymc_sgmcmc.trace_tools.divergence import find_divergence

CHUNK_ELEMENTS = 250_000
"""A pass over the draws handles at most this number of array elements at a time. They take 2 MB,
which fit into the cache of a core."""

SOME_DRAWS = 50_000
"""Scales and diagnostics are computed from at most this number of evenly spaced draws. The number
is a compromise between the time that they take and their Monte-Carlo error, which is below 1 % with
so many independent draws."""

FEWEST_DRAWS = 20
"""R-hat is judged from at least this many draws, or batches, of a chain."""

NOT_MET = 1.5
"""Chains have not met where R-hat is larger. Below, the standard errors of the tools cover the
differences between chains, and estimates by slopes are right on posteriors close to Gaussian."""

FAR = 5.0
"""A chain is refused where its mean is farther from the median of the means of all chains, in
standard deviations of a draw. Means of converged chains differ by a fraction of one standard
deviation."""

LARGEST_STEP_RATIO = 10.0
"""The laws of chains are taken for different ones where the ratio of their step sizes is larger.
Each chain tunes its own step size, and those of chains that met the same gradients differ by less.
"""

SURELY_NOT_ZERO = 1e-6
"""No correction is made where the probability of the mean gradient is lower. By chance this happens
to one converged run in a million."""

CERTAIN = 5.0
"""Gradients are refused for their sign where the estimate of Stein's identity, which should be 1,
is below -0.25 by this number of standard errors. By chance this happens to fewer than one estimate
in a million."""

COMPUTE_THEM = "compute the gradients, `idata = gradients(idata, model)`"
"""This remedy ends messages about gradients that are missing or wrong."""


@dataclass(frozen=True)
class StoredRun:
    """Positions, gradients and settings of a trace.

    Attributes
    ----------
    positions, gradients : numpy.ndarray, shape (chains, draws, d)
        Arrays of the trace, which are not copied.
    labels : tuple of str
        Labels of the coordinates.
    chains : tuple
        Labels of the chains.
    settings : dict
        Settings of the run, empty where the trace has none.
    arrays : dict
        Preconditioner, centre and precision, where the trace has them.
    step_sizes_of_draws : numpy.ndarray, shape (chains, draws), or None
        Step sizes, where the trace has them.
    thin : int or None
        Number of transitions from one draw to the next, after draws were left out. None where the
        draws are not evenly spaced.
    """

    positions: np.ndarray
    gradients: np.ndarray
    labels: tuple[str, ...]
    chains: tuple[Any, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    step_sizes_of_draws: np.ndarray | None = None
    thin: int | None = 1

    @property
    def dimension(self) -> int:
        """The number d of coordinates."""
        return self.positions.shape[-1]

    @cached_property
    def step_sizes(self) -> np.ndarray | None:
        """Step size of each chain, shape (chains,). None where it is unknown or not constant."""
        if self.step_sizes_of_draws is None:
            return None
        means = self.step_sizes_of_draws.mean(1)
        constant = np.ptp(self.step_sizes_of_draws, axis=1) <= 1e-6 * means
        return means if constant.all() else None

    @property
    def law(self) -> Law | None:
        """The law of the run, where it is known with step sizes and preconditioner."""
        if self.step_sizes is None or "preconditioner" not in self.arrays:
            return None
        return LAWS.get(self.settings.get(LAW, ""))

    @property
    def preconditioner(self) -> np.ndarray:
        """M of the law, shape (d, d)."""
        return as_matrix(self.arrays["preconditioner"]).dense(self.dimension)


def read_run(
    idata: DataTree, *, agreeing_chains: bool = True, diverged_chains: bool = False
) -> StoredRun:
    """Read positions, gradients and settings of a trace.

    Parameters
    ----------
    idata : xarray.DataTree
    agreeing_chains : bool
        Refuse chains that are far from the others, or made with other settings.
    diverged_chains : bool
        Accept chains that diverged, or are still on their way to the posterior.

    Raises
    ------
    ValueError
        Where the trace has no positions and gradients, where draws are not finite, where chains
        diverged or are far from the others, or where a coordinate does not move.
    """
    arrays = stored_draws(idata, POSITION, GRADIENT)
    if arrays is None:
        if f"{UNCALIBRATED}sample_stats" in idata.children:
            raise ValueError(
                "The draws should have gradients, but these were corrected and have none. Pass "
                "the draws that the chains made, `uncalibrated(idata)`."
            )
        raise ValueError(
            "The trace should have `gradient` and `position` in `sample_stats`, but has not. "
            f"Sample with one step method of pymc_sgmcmc for all variables, or {COMPUTE_THEM}."
        )
    positions, gradients = arrays
    if not _are_of_one_step(positions, gradients):
        raise ValueError(
            "`position` and `gradient` should be numbers of one step method, with the same shape, "
            f"but are {positions.dtype} and {gradients.dtype} of shapes {positions.shape} and "
            f"{gradients.shape}. Sample all variables with one step method, or {COMPUTE_THEM}."
        )
    stats = idata["sample_stats"]
    check_same_draws(idata, positions.shape)
    if positions.shape[1] < 4:
        raise ValueError(
            f"A chain should have at least 4 draws, but has {positions.shape[1]}. Sample again "
            "with more `draws`."
        )
    chains = tuple(range(len(positions)))
    if "chain" in stats.coords:
        chains = tuple(stats.coords["chain"].values.tolist())
    labels = labels_of(idata, positions.shape[-1])
    settings = settings_of(idata)
    refuse_mirrored(settings)
    check_finite(chains, positions, gradients)
    if not diverged_chains:
        check_divergence(diverged(idata, positions, gradients, chains), settings)
    spaced, spaced_gradients = every_nth(positions), every_nth(gradients)
    check_constant(spaced, labels)
    check_constant(spaced_gradients, labels, "gradient")
    _check_same_chains(positions, chains)
    if not diverged_chains:
        _check_still(spaced, labels, chains)
    step_sizes = _step_sizes(stats, settings)
    if agreeing_chains:
        check_chains(spaced, labels, chains)
        _check_step_sizes(step_sizes, chains)
    own = "sampler" in settings
    if not (own and diverged_chains):
        _check_sign(spaced, spaced_gradients, labels, own=own)
    group = idata[SETTINGS].data_vars if SETTINGS in idata.children else {}
    stored = {str(name): np.asarray(array) for name, array in group.items()}
    thin = _transitions_a_draw(stats, settings)
    return StoredRun(positions, gradients, labels, chains, settings, stored, step_sizes, thin)


def read_positions(idata: DataTree) -> np.ndarray | None:
    """Positions of all variables together, shape (chains, draws, d), for tools with the model.

    The result is None where the trace has none, so that its variables say where the draws are.
    """
    arrays = stored_draws(idata, POSITION)
    if arrays is None or STEP_METHODS in settings_of(idata) or not _are_of_one_step(*arrays):
        return None
    check_same_draws(idata, arrays[0].shape)
    return arrays[0].astype(float)


def stored_draws(idata: DataTree, *names: str) -> list[np.ndarray] | None:
    """Statistics of a trace by their names, with chains and draws first; None where one lacks.

    Raises
    ------
    TypeError, ValueError
        Where it is no trace, or chains or draws are no dimensions.
    """
    check_trace(idata)
    stats = idata.children.get("sample_stats")
    if stats is None or not set(names) <= set(stats.data_vars):
        return None
    check_sample_dims(stats)
    return [np.asarray(stats[name].transpose("chain", "draw", ...)) for name in names]


def refuse_mirrored(settings: dict[str, Any]) -> None:
    """Refuse runs with mirrored variables, whose gradients do not have mean zero.

    Where a density is not zero at the end of its support, the mean of its gradient is minus that
    value, so that estimates from Stein's identities would be wrong.

    Raises
    ------
    ValueError
    """
    if MIRRORED in settings:
        names = ", ".join(f"`{name}`" for name in json.loads(settings[MIRRORED]))
        raise ValueError(
            f"The gradients should have mean zero, but {names} {'were' if ',' in names else 'was'} "
            "mirrored at zero, where the density ends. Leave out `default_transform=None` to use "
            "tools that take gradients."
        )


def check_trace(idata: Any) -> None:
    """Raise a TypeError for anything that is not a trace."""
    if not isinstance(idata, DataTree):
        raise TypeError(
            "`idata` should be an xarray.DataTree, such as `pm.sample` returns, but is of type "
            f"{type(idata).__name__}."
        )


def has_gradients(idata: DataTree) -> bool:
    """Whether a trace has positions and gradients of one step method."""
    arrays = stored_draws(idata, POSITION, GRADIENT)
    return arrays is not None and _are_of_one_step(*arrays)


def _are_of_one_step(*arrays: Any) -> bool:
    """Whether arrays of a trace are numbers of the same shape (chain, draw, d)."""
    numbers = all(array.dtype.kind in "fiu" and array.ndim == 3 for array in arrays)
    return numbers and len({array.shape for array in arrays}) == 1


def check_same_draws(idata: DataTree, shape: tuple[int | None, ...]) -> None:
    """Raise a ValueError where the statistics are of other draws than the posterior."""
    if "posterior" not in idata.children:
        return
    sizes = idata["posterior"].sizes
    count = (sizes.get("chain"), sizes.get("draw"))
    if None not in count and count != shape[:2]:
        raise ValueError(
            f"The posterior has {count[0]} chains of {count[1]} draws, but `sample_stats` has "
            f"{shape[0]} chains of {shape[1]}. Select draws in all groups, as `idata.sel` does."
        )


def check_sample_dims(
    group: Any, name: str = "sample_stats", dims: tuple[str, ...] = ("chain", "draw")
) -> None:
    """Raise a ValueError where a group of a trace has lost the dimension of chains or of draws."""
    missing = [dim for dim in dims if dim not in group.dims]
    if missing:
        raise ValueError(
            f"`{name}` should have the dimension{'s' if len(dims) > 1 else ''} "
            f"{' and '.join(f'`{dim}`' for dim in dims)}, but has no "
            f"{' and no '.join(f'`{dim}`' for dim in missing)}. Select with lists or slices, as in "
            "`idata.sel(chain=[0])`."
        )


def chunks(chains: int, draws: int, elements: int) -> Iterator[tuple[int, slice]]:
    """Yield a chain and a range of its draws, until all draws of all chains were given.

    `elements` is the number of array elements that the caller needs for each draw.
    """
    length = max(1, CHUNK_ELEMENTS // max(1, elements))
    for chain in range(chains):
        for start in range(0, draws, length):
            yield chain, slice(start, min(start + length, draws))


def every_nth(values: np.ndarray) -> np.ndarray:
    """At most `SOME_DRAWS` draws, evenly spaced over each chain, in double precision."""
    chains, draws = values.shape[:2]
    return values[:, :: max(1, -(-chains * draws // SOME_DRAWS))].astype(float)


def root_of_draws(covariance: np.ndarray, labels: tuple[str, ...], count: int) -> np.ndarray:
    """Lower Cholesky factor of the covariance of draws, of which there are `count`.

    Raises
    ------
    ValueError
        Where coordinates are functions of others.
    """
    try:
        return covariance_root(covariance)
    except linalg.LinAlgError:
        names = [labels[number] for number in dependent_coordinates(covariance)]
        raise ValueError(
            f"The {len(labels)} coordinates of {count} draws should not be linearly dependent, but "
            f"{first_of(names)} are. Sample more draws than there are coordinates, and fix "
            "variables that are functions of others."
        ) from None


def first_of(names: Sequence[str]) -> str:
    """List of the first names for a message, with the number of the others."""
    more = len(names) - FEW_NAMES
    return quoted(names[:FEW_NAMES]) + (f" and {more} more" if more > 0 else "")


def _step_sizes(stats: Any, settings: dict[str, Any]) -> np.ndarray | None:
    """Step sizes of the draws, shape (chains, draws), None where the trace has none."""
    if "step_size" not in stats.data_vars:
        return None
    sizes = np.asarray(stats["step_size"].transpose("chain", "draw", ...), dtype=float)
    if sizes.ndim == 3:  # Other step methods of a compound step record their step sizes too.
        sizes = sizes[..., int(settings.get(STEP_SIZE_COLUMN, 0))]
    return sizes


def _transitions_a_draw(stats: Any, settings: dict[str, Any]) -> int | None:
    """Number of transitions from one draw to the next, None where it is not constant."""
    thin = int(settings.get("thin", 1))
    if "draw" not in stats.coords or stats.coords["draw"].dtype.kind not in "iu":
        return thin
    steps = np.unique(np.diff(stats.coords["draw"].values))
    return thin * int(steps[0]) if len(steps) == 1 and steps[0] >= 1 else None


def diverged(
    idata: DataTree, positions: np.ndarray, gradients: np.ndarray, chains: tuple[Any, ...]
) -> dict[Any, str | None]:
    """Evidence that a chain with finite numbers diverged, by chain; None where there is none."""
    center, deviations = _center(idata)
    with np.errstate(all="ignore"):
        return {
            chain: find_divergence(x, g, center, deviations)
            for chain, x, g in zip(chains, every_nth(positions), every_nth(gradients), strict=True)
        }


def _center(idata: DataTree) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Centre of a run and the posterior standard deviations there, where the trace has them."""
    group = idata.children.get(SETTINGS)
    if group is None or "center" not in group.data_vars:
        return None, None
    precision = stored_matrix(group, "precision")
    center = np.asarray(group["center"], dtype=float)
    if precision is None or DIMENSION not in group["center"].dims:
        return None, None
    if not isinstance(precision, Dense):
        return center, np.sqrt(np.broadcast_to(precision.inverse.diagonal(), center.shape))
    scale = np.sqrt(precision.diagonal())  # The units of the user may differ by any factor.
    covariance = np.linalg.pinv(precision.values / np.outer(scale, scale), hermitian=True)
    return center, np.sqrt(np.diag(covariance)) / scale


def check_divergence(reasons: Mapping[Any, str | None], settings: Mapping[str, Any]) -> None:
    """Raise a ValueError where one of the chains has a reason to count as diverged."""
    good = [chain for chain, reason in reasons.items() if reason is None]
    if len(good) == len(reasons):
        return
    chain, reason = next((chain, reason) for chain, reason in reasons.items() if reason is not None)
    others = len(reasons) - len(good) - 1
    leave_out = f", or leave it out, `idata.sel(chain={good})`" if good else ""
    raise ValueError(
        f"All chains should stay near the posterior, but chain {chain} {reason}"
        + (f", and {others} more diverged" if others else "")
        + f". {remedy_of_divergence(settings)}{leave_out}."
    )


def remedy_of_divergence(settings: Mapping[str, Any]) -> str:
    """Remedy for a chain that diverged, as a sentence without its full stop."""
    its = with_preconditioner(settings)
    step_size = settings.get("step_size")
    if step_size is None:
        return f"The step size{its} is too large: sample again with a smaller one"
    too_large = f"The step size of {step_size:.3g}{its} is too large: use a smaller "
    if settings.get("step_size_from") == GIVEN:
        return f"{too_large}`step_size`, such as {step_size / 4:.2g}, or leave it out"
    return f"{too_large}`bias`, or a `step_size` such as {step_size / 4:.2g}{its}"


def check_finite(chains: tuple[Any, ...], *arrays: np.ndarray) -> None:
    """Raise a ValueError where draws are not finite, with their number in each chain."""
    bad: dict[Any, int] = {}
    for chain, part in chunks(*arrays[0].shape):
        with np.errstate(all="ignore"):
            # A sum is finite only if all of its terms are, and takes a third of the time.
            total = sum(values[chain, part].sum() for values in arrays)
        if np.isfinite(total):
            continue
        good = np.all([np.isfinite(values[chain, part]).all(-1) for values in arrays], axis=0)
        if not good.all():
            bad[chains[chain]] = bad.get(chains[chain], 0) + int((~good).sum())
    if bad:
        listed = ", ".join(f"{number} of chain {chain}" for chain, number in bad.items())
        raise ValueError(
            f"All draws should be finite, but {listed} are not. {_leave_out(bad, chains)}"
        )


def check_constant(draws: np.ndarray, labels: tuple[str, ...], of: str = "position") -> None:
    """Raise a ValueError where a coordinate does not move.

    The values are draws or means of batches of them, shape (chains, draws, d).
    """
    still = np.ptp(draws.reshape(-1, draws.shape[-1]), axis=0) == 0
    if still.any():
        named = first_of([labels[number] for number in np.flatnonzero(still)])
        if of == "gradient":
            raise ValueError(
                f"All elements of `gradient` should vary, but those of {named} are constant over "
                f"the draws. Leave such variables out of the model, or {COMPUTE_THEM}."
            )
        raise ValueError(
            f"All coordinates should move, but {int(still.sum())} of {len(still)} are constant "
            f"over the draws: {named}. Replace them by numbers in the model, and sample again."
        )


def _check_still(draws: np.ndarray, labels: tuple[str, ...], chains: tuple[Any, ...]) -> None:
    """Raise a ValueError where a coordinate does not move in one of the chains."""
    still = np.ptp(draws, axis=1) == 0
    if still.any():
        bad = np.flatnonzero(still.any(1))
        number = int(np.argmax(still[bad[0]]))
        still_chains = [chains[number] for number in bad]
        raise ValueError(
            f"All coordinates should move in all chains, but `{labels[number]}` is constant in "
            f"{_list(still_chains)}. {_leave_out(still_chains, chains)}"
        )


def _check_same_chains(positions: np.ndarray, chains: tuple[Any, ...]) -> None:
    """Raise a ValueError where two chains are the same, so that their draws count twice."""
    firsts: dict[bytes, int] = {}
    for number, chain in enumerate(positions):
        # Most chains differ in their first draws.
        earlier = firsts.setdefault(np.ascontiguousarray(chain[:4]).tobytes(), number)
        if earlier != number and np.array_equal(chain, positions[earlier]):
            raise ValueError(
                f"All chains should have draws of their own, but chains {chains[earlier]} and "
                f"{chains[number]} are the same. Leave one out, "
                f"`idata.sel(chain={[label for label in chains if label != chains[number]]})`."
            )


def _check_step_sizes(sizes: np.ndarray | None, chains: tuple[Any, ...]) -> None:
    """Raise a ValueError where chains are of runs with different settings."""
    if sizes is None:
        return
    means = sizes.mean(1)
    if means.max() > LARGEST_STEP_RATIO * means.min():
        large, small = int(np.argmax(means)), int(np.argmin(means))
        raise ValueError(
            f"All chains should have about one step size, but that of chain {chains[large]} is "
            f"{means[large]:.3g} and that of chain {chains[small]} is {means[small]:.3g}, by their "
            f"tuning or as they are of different runs. Use a smaller `bias`, or such chains apart, "
            f"`idata.sel(chain=[{chains[small]}])`."
        )


def _check_sign(
    positions: np.ndarray, gradients: np.ndarray, labels: tuple[str, ...], *, own: bool
) -> None:
    r"""Raise a ValueError where gradients point away from where the draws are.

    By Stein's identity :math:`-\mathrm{Cov}(\theta_i, \hat\nabla_i)` is 1 for draws of the
    posterior, larger for chains that are too wide, and near 0 for chains that have moved little.
    The sign of gradients that a sampler used itself, `own`, is right: such chains still climb.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # Diverged chains are told of elsewhere.
        error = stein_variance_error(positions, gradients)
    covariances = 1 + error.value + CERTAIN * np.nan_to_num(error.standard_error, nan=np.inf)
    bad = covariances < -0.25
    if bad.any():
        named = first_of([labels[number] for number in np.flatnonzero(bad)])
        if own:
            raise ValueError(
                "The chains have not converged: gradients point away from where the draws are in "
                f"{named}. Use more draws, or longer tuning. Where the run warned of its centre or "
                "of a jump of the log density, change the model first."
            )
        raise ValueError(
            "`gradient` should be that of plus the log posterior and point to where the draws are, "
            f"but points away from there in {named}. Check its sign, or {COMPUTE_THEM}."
        )


def objection_to_mean_gradient(run: StoredRun, improbable: float) -> str | None:
    """Message where the mean gradient is less probable at stationarity than the given bound."""
    probability = mean_gradient_test(every_nth(run.gradients))
    if not probability < improbable:  # It is NaN where draws are few.
        return None
    return (
        "The mean of `gradient` should be zero, as it is at stationarity, but is not (probability "
        f"{probability:.1g}). Sample more draws, see `gradient_convergence`, or {COMPUTE_THEM}."
    )


def check_mean_gradient(run: StoredRun) -> None:
    """Raise a ValueError where the mean gradient is beyond doubt not zero."""
    objection = objection_to_mean_gradient(run, SURELY_NOT_ZERO)
    if objection is not None:
        raise ValueError(objection)


def check_chains(draws: np.ndarray, labels: tuple[str, ...], chains: tuple[Any, ...]) -> None:
    """Raise a ValueError where chains are far from the others, or spread far more or less.

    The values are draws or means of batches of them, shape (chains, draws, d).
    """
    if len(draws) < 2:
        return
    means, sds = draws.mean(1), draws.std(1)
    # Nothing says which of two chains is wrong. The one that spreads less sets the scale.
    scale = sds.min(0) if len(draws) == 2 else np.median(sds, axis=0)
    scale = np.where(scale > 0, scale, np.finfo(float).tiny)
    away = np.abs(means - np.median(means, axis=0)) / scale
    wide, narrow = sds / scale, scale / np.maximum(sds, np.finfo(float).tiny)
    bad = ((away > FAR) | (wide > 2 * FAR) | (narrow > 2 * FAR)).any(1)
    if bad.any():
        which = [chains[number] for number in np.flatnonzero(bad)]
        spread = np.maximum(wide, narrow) / 2
        coordinate = labels[int(np.argmax(np.maximum(away, spread).max(0)))]
        raise ValueError(
            f"All chains should have one law, but {_list(which)} "
            f"{'is' if len(which) == 1 else 'are'} far from the median of the chains, or too wide "
            f"or narrow, most of all in {coordinate}. {_leave_out(which, chains)}"
        )
    if draws.shape[1] < FEWEST_DRAWS:
        return
    r_hat = np.sqrt(1 + means.var(0, ddof=1) / np.mean(sds**2, axis=0).clip(np.finfo(float).tiny))
    if (r_hat > NOT_MET).any():
        worst = int(np.argmax(r_hat))
        raise ValueError(
            f"Chains should agree, but R-hat of {labels[worst]} is {r_hat[worst]:.2g}: they have "
            "not met. Sample more draws, with longer tuning."
        )


def _leave_out(bad: Any, chains: tuple[Any, ...]) -> str:
    """Sentence that says which chains to keep, and how to sample again."""
    good = [chain for chain in chains if chain not in set(bad)]
    again = "ample again with a smaller step size or more tuning."
    return f"Leave them out, `idata.sel(chain={good})`, or s{again}" if good else f"S{again}"


def _list(chains: list[Any]) -> str:
    """List of chains for a message."""
    return f"chain{'s' if len(chains) > 1 else ''} " + ", ".join(map(str, chains))
