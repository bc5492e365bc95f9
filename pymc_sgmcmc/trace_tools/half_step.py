r"""Pairs of chains at the whole and at half the step size, which show errors of mean and variance.

Both chains of a pair have the same Brownian motion: two normal numbers of the chain at half the
step size add up to one of the other. So their positions stay close together, and the mean of their
difference is known from far fewer draws than either mean. Errors of Euler's scheme, and of noise of
the gradients, are of first order in the step size h, so that the error of the mean at h is twice
that difference. The other errors of averaged noises are of second order, and at most so large. With
positions x and y of the two chains, the difference of their variances is the mean of :math:`(x -
\bar x)^2 - (y - \bar y)^2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import xarray as xr
from xarray import DataTree

from pymc_sgmcmc.chain import Chain
from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.dynamics import LAWS
from pymc_sgmcmc.posterior.position import layout_from_model
from pymc_sgmcmc.record import (
    DIMENSION,
    EFFECTS,
    GIVEN,
    HALF_STEP,
    LAW,
    SETTINGS,
    STEP_METHODS,
    labels_of,
    stored_local,
    stored_matrix,
    with_preconditioner,
)
from pymc_sgmcmc.stein import Estimate
from pymc_sgmcmc.step_methods.estimators import ESTIMATORS
from pymc_sgmcmc.step_methods.repeat import repeated_step, step_of
from pymc_sgmcmc.trace_tools.diagnostics import ess, mcse
from pymc_sgmcmc.trace_tools.gradients import check_same_model

BY_HAND = "Sample again with half the step size, and compare the two."
"""This remedy ends messages about runs that `bias_report` cannot repeat."""

PRECISE = 0.02
"""The pairs end where the standard errors of the errors of each mean and standard deviation are
below this many posterior standard deviations, a fifth of `LARGEST_MEAN_ERROR`."""

POINTS_A_RELAXATION = 4
"""Differences are recorded so many times in a relaxation time of the chain."""

RELAXATIONS_A_ROUND = 20
"""Between two looks at the standard errors each pair makes so many relaxation times."""

BURN_IN = 5
"""A pair begins at one point, and the difference grows to its law within a few relaxation times. So
many of them leave less than a hundredth of the difference to come."""


def check_rerun(idata: DataTree, settings: dict[str, Any], model: pm.Model) -> None:
    """Refuse a run that cannot be repeated, or another model.

    Raises
    ------
    ValueError
    """
    by_hand = settings.get("estimator_from") == GIVEN
    is_known = settings.get(LAW) in LAWS and (by_hand or settings.get("gradient") in ESTIMATORS)
    group, local = idata.children.get(SETTINGS), stored_local(settings)
    has_matrix = group is not None and (
        stored_matrix(group, "preconditioner") is not None or EFFECTS in group.data_vars
    )
    refused = {
        f"in which one step method moves all variables, but the trace is of "
        f"{settings.get(STEP_METHODS)} step methods": STEP_METHODS in settings,
        "whose law is known, as of `SGLDCV`, but the trace is of "
        f"{settings.get('sampler', 'an unknown step method')}": not is_known or group is None,
        f"without `LocalSampling`, but that of the trace has sampled {quoted(local)} by it": bool(
            local
        ),
        "of up to 500 coordinates where effects of groups have coordinates of their own": (
            not has_matrix
        ),
        "whose `gradient` is a name or `SVRG`, but this one is an estimator made by hand": (
            by_hand
        ),
    }
    for why, is_so in refused.items():
        if is_so:
            raise ValueError(f"`rerun=True` can repeat runs {why}. {BY_HAND}")
    check_same_model(idata, model, layout_from_model(model, None, model.initial_point()).labels)


def half_step_error(
    idata: DataTree,
    settings: Mapping[str, Any],
    model: pm.Model,
    random_seed: Any,
    compile_kwargs: Mapping[str, Any] | None,
    *,
    most: float = 1.0,
) -> PairErrors:
    """Errors of the means and variances of a run, by pairs of chains.

    Parameters
    ----------
    idata, settings, model
        The run, see `check_rerun`.
    random_seed, compile_kwargs
    most : float
        The pairs take at most about this many times the gradients of the run.

    Raises
    ------
    ValueError
        Where a chain of a pair diverges.
    """
    recorded = idata["sample_stats"]
    positions = np.asarray(recorded["position"], dtype=float)
    sd = positions.std((0, 1), ddof=1)
    thin = int(settings["thin"])
    # One draw is a relaxation time or less, which shows in the effective number of draws.
    draws = positions.shape[0] * positions.shape[1]
    times = max(1.0, 0.5 * draws / float(ess(positions).min()))
    spacing = max(1, round(thin * times / POINTS_A_RELAXATION))
    pairs = _Pairs(idata, settings, model, spacing, random_seed, compile_kwargs)
    cost = 3 * spacing * POINTS_A_RELAXATION * len(positions)
    rounds = int(most * draws * thin / (cost * RELAXATIONS_A_ROUND))
    pairs.advance(POINTS_A_RELAXATION * BURN_IN)
    recorded_pairs: list[np.ndarray] = []

    def error(differences: np.ndarray) -> Estimate:
        return Estimate(2 * differences.mean((0, 1)), 2 * mcse(differences))

    for _ in range(max(1, rounds)):
        recorded_pairs.append(pairs.advance(POINTS_A_RELAXATION * RELAXATIONS_A_ROUND))
        whole, half = np.concatenate(recorded_pairs, axis=2)
        mean = error((whole - half) / sd)
        centred = ((each - each.mean((0, 1))) / sd for each in (whole, half))
        squares = [values**2 for values in centred]
        variance = error(squares[0] - squares[1])
        if max(mean.standard_error.max(), variance.standard_error.max() / 2) <= PRECISE:
            break
    return PairErrors(mean, variance)


class PairErrors(NamedTuple):
    """Errors of a run that pairs of chains show, each of shape (d,).

    Attributes
    ----------
    mean : Estimate
        In posterior standard deviations.
    variance : Estimate
        Relative.
    """

    mean: Estimate
    variance: Estimate


class _Pairs:
    """Pairs of chains, one from the last draw of each chain of a run."""

    def __init__(
        self,
        idata: DataTree,
        settings: Mapping[str, Any],
        model: pm.Model,
        spacing: int,
        random_seed: Any,
        compile_kwargs: Mapping[str, Any] | None,
    ):
        recorded, arrays = idata["sample_stats"], idata[SETTINGS]
        whole = float(np.asarray(recorded["step_size"])[:, -1].mean())
        self.pace = f"the step size of {whole:.3g}{with_preconditioner(settings)}"

        known = step_of(model, settings, arrays) if compile_kwargs is None else None

        def step(step_size: float, thin: int) -> Chain:
            made = known or repeated_step(
                model,
                settings,
                arrays,
                step_size=step_size,
                thin=thin,
                compile_kwargs=compile_kwargs,
            )
            self.posterior = made.posterior
            return Chain(made.chain.block, step_size=step_size, thin=thin)

        half = step(whole / 2, 2 * spacing)
        if half.can_repeat:
            self.chains = Chain(half.block, step_size=whole, thin=spacing), half
        else:  # Each chain needs a memory of its own.
            self.chains = step(whole, spacing), half
        self.spacing, self.rng = spacing, np.random.default_rng(random_seed)
        self.states = []
        for start in self.posterior.positions_at(np.asarray(recorded["position"])[:, -1]):
            for chain in self.chains:
                chain.begin(self.rng, start)
            self.states.append([chain.state for chain in self.chains])

    def advance(self, draws: int) -> np.ndarray:
        """The next positions, of whole and half steps, shape (2, pairs, draws, d)."""
        block = self.chains[0].block
        shape = (draws * self.spacing, block.noise_size)
        recorded = []
        for states in self.states:
            first, second = self.rng.standard_normal((2, *shape))
            halves = np.stack([first + second, first - second], axis=1).reshape(-1, shape[1])
            positions = []
            for number, noise in enumerate((first, halves / np.sqrt(2))):
                chain = self.chains[number]
                chain.state = states[number]
                drawn = chain.advance(draws, noise.astype(block.dtype, copy=False))
                if drawn.bad_transition is not None:
                    raise ValueError(
                        f"Chains at {self.pace} and at half of it should stay finite, but one of "
                        "them diverged. Sample with a smaller step size."
                    )
                states[number] = chain.state
                positions.append(self.posterior.values_at(drawn.positions.astype(float)))
            recorded.append(positions)
        return np.swapaxes(recorded, 0, 1)


def store(idata: DataTree, errors: PairErrors) -> None:
    """Write errors that pairs showed into a trace."""
    arrays = {
        f"{moment}_{name}": (DIMENSION, values)
        for moment, error in errors._asdict().items()
        for name, values in vars(error).items()
    }
    labels = list(labels_of(idata, len(errors.mean.value)))
    idata[HALF_STEP] = DataTree(xr.Dataset(arrays, coords={DIMENSION: labels}))


def stored(idata: DataTree) -> PairErrors | None:
    """Errors that pairs showed, None where the trace has none, or those of means alone."""
    if HALF_STEP not in idata.children or "mean_value" not in idata[HALF_STEP]:
        return None
    group = idata[HALF_STEP]
    names = ("value", "standard_error")
    return PairErrors(
        *(
            Estimate(*(np.asarray(group[f"{moment}_{name}"]) for name in names))
            for moment in PairErrors._fields
        )
    )
