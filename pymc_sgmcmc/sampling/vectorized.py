"""All chains of a run at once on the device of JAX, after one chain has tuned the step method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import replace

import numpy as np
from pymc.stats.convergence import SamplerWarning, WarningType

from pymc_sgmcmc.adaptation import Adaptation, AdaptationState, Seen
from pymc_sgmcmc.adaptation.moments import RunningMoments
from pymc_sgmcmc.adaptation.monitor import STATISTIC
from pymc_sgmcmc.batching import FIRST_ORDER
from pymc_sgmcmc.chain import ChainState
from pymc_sgmcmc.record import RECORD, RunRecord, RunSettings
from pymc_sgmcmc.sampling.workers import Job, interrupts_noted
from pymc_sgmcmc.schedules import step_sizes
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.possible_draws import MOST_COMPARED, PossibleDraws
from pymc_sgmcmc.vectorized import chains_on_device, minibatches_on_device

CHAINS_SHOWN = 20
"""The R-hat of the progress bar is of so many chains."""

Shown = Callable[[int, Mapping[str, np.ndarray], Sequence[Sequence[np.ndarray]]], None]
"""Called with the number of draws so far, the statistics of the last ones of the first chain, and
the positions of some chains."""


def check_vectorized(step: StochasticGradientStep) -> None:
    """Raise an error where a step method cannot run all chains at once.

    Raises
    ------
    ValueError
    """
    name = type(step).__name__
    if not step.runs_on_jax:
        raise ValueError(
            f'`chain_method="vectorized"` runs all chains on the device of JAX, but the {name} '
            'has another mode. Make it with `compile_kwargs={"mode": "JAX"}`.'
        )
    changing = [
        type(each).__name__
        for each in step.chain.adaptations
        if not (each.only_tunes or _only_records(each))
    ]
    if changing:
        raise ValueError(
            '`chain_method="vectorized"` takes step methods that stay as they are after tuning, '
            f"but the {name} goes on to adapt ({', '.join(changing)}). Use another step method or "
            '`gradient="cv"`, or `chain_method="parallel"`.'
        )
    minibatches_on_device(step.batching)


def run_vectorized(
    step: StochasticGradientStep, jobs: Sequence[Job], tune: int, draws: int, shown: Shown
) -> None:
    """Run all chains at once in this process.

    One chain tunes the step method. All chains then begin anew with its step size and thinning, so
    that their first `tune` draws only bring them to their law.

    Raises
    ------
    NonFinitePositionError
        Where a chain became NaN or infinite before its first draw after tuning.
    """
    with interrupts_noted() as interrupted:
        pilot, warnings = _tuned(step, jobs[0], tune, draws, interrupted)
        if interrupted:
            return
        run = _Chains(step, jobs, pilot, tune, draws)
        try:
            while run.done < tune + draws and not interrupted:
                run.advance()
                shown(run.done, run.stats_shown(), run.positions_shown())
        finally:
            run.hand_out(warnings)


def _tuned(
    step: StochasticGradientStep, job: Job, tune: int, draws: int, interrupted: Sequence[int]
) -> tuple[ChainState, list[SamplerWarning]]:
    """State of a chain after tuning, and its warnings."""
    warnings: list[SamplerWarning] = []
    if tune == 0:
        step.setup_chain(deepcopy(job.rng), tune, draws)
        return step.begun(job.point), warnings
    with closing(step.runs(deepcopy(job.rng), job.point, tune, draws)) as runs:
        for _, stats in runs:
            warnings += [one for one in stats["warning"] if one is not None]
            if interrupted or step.chain.snapshot.draws >= tune:
                break
    return step.chain.state, warnings


class _Chains:
    """The chains of a run, and their draws so far as arrays of all chains.

    Attributes
    ----------
    done : int
        Draws of each chain so far.
    """

    def __init__(
        self,
        step: StochasticGradientStep,
        jobs: Sequence[Job],
        pilot: ChainState,
        tune: int,
        draws: int,
    ):
        self._step, self._jobs, self._tune, self._total = step, jobs, tune, tune + draws
        self._pilot = pilot
        self._device = chains_on_device(step.block)
        rngs, states = [deepcopy(job.rng) for job in jobs], []
        for job, rng in zip(jobs, rngs, strict=True):
            step.rng = rng
            begun = step.begun(job.point)
            states.append((begun.position, *begun.auxiliaries))
        step.chain.state, self._factor = pilot, 1.0
        for adaptation, adapted in zip(step.chain.adaptations, pilot.adapted, strict=True):
            adaptation.load(adapted)
            self._factor *= adaptation.step_size_factor(adapted)
        step.batching.set_order(FIRST_ORDER)
        # Each chain has its own 64 bits, so that its draws do not depend on the number of chains.
        seeds = np.array([rng.integers(2**32, size=2, dtype=np.uint32) for rng in rngs])
        self._state = self._device.begin(seeds, tuple(map(np.stack, zip(*states, strict=True))))
        shape = len(jobs), self._total
        dimension, dtype = step.block.dimension, step.block.dtype
        self._positions = np.empty((*shape, dimension), dtype)
        self._gradients = np.empty((*shape, dimension), dtype)
        self._stats = {name: np.empty(shape) for name in step.block.dynamics.stats}
        self._sizes = np.empty(self._total)
        self._good = np.full(len(jobs), self._total)
        self._failure: SamplerWarning | None = None
        self._monitors = [each for each in step.chain.adaptations if STATISTIC in each.stats]
        self._monitored = [each.begin(states[0][0]) for each in self._monitors]
        self.done = self._before = 0

    def advance(self) -> None:
        """Compute the draws of one call.

        A chain that became NaN or infinite after tuning has no further draws.

        Raises
        ------
        NonFinitePositionError
            Where a chain became NaN or infinite before.
        """
        thin = self._pilot.thin
        a_call = self._device.draws_of_call(thin)
        count = min(a_call, self._total - self.done)
        transitions = self.done * thin
        sizes = self._factor * step_sizes(self._step.step_size, transitions, count * thin)
        # A function of the user has no values after the last transition.
        padded = np.concatenate([sizes, np.repeat(sizes[-1:], (a_call - count) * thin)])
        self._state, found = self._device.advance(self._state, padded, thin)
        bad = (found.first_bad >= 0) & (found.first_bad < count * thin) & (self._good > self.done)
        if bad.any():
            self._good[bad] = self.done + found.first_bad[bad] // thin
            first = int(found.first_bad[bad].min())
            self._tell(transitions + first, self.done + first // thin, float(sizes[first]))
        part = slice(self.done, self.done + count)
        self._positions[:, part] = found.positions[:, :count]
        self._gradients[:, part] = found.gradients[:, :count]
        for values, of_call in zip(self._stats.values(), found.stats, strict=True):
            values[:, part] = of_call[:, :count]
        self._sizes[part] = sizes[thin - 1 :: thin]
        self._before, self.done = self.done, self.done + count

    def _tell(self, transition: int, draw: int, step_size: float) -> None:
        """Raise or keep the error of the chains that became NaN or infinite."""
        ended = int((self._good < self._total).sum())
        error = self._step.not_finite(transition, draw, step_size, ended)
        if self._good.min() < self._tune:
            raise error
        message = f"{error} Their draws after that are NaN, and all others are kept."
        self._failure = SamplerWarning(WarningType.BAD_PARAMS, message, "error", step=draw)

    # --- The progress bar ------------------------------------------------------------------

    def stats_shown(self) -> dict[str, np.ndarray]:
        """Statistics of the first chain in the last call."""
        part = slice(self._before, self.done)
        stats = self._plain_stats(0, part)
        self._monitored, found = self._monitor(0, part, self._monitored)
        return {**stats, **found}

    def positions_shown(self) -> list[list[np.ndarray]]:
        """Positions of some chains so far."""
        return [[positions[: self.done]] for positions in self._positions[:CHAINS_SHOWN]]

    # --- The trace -------------------------------------------------------------------------

    def hand_out(self, warnings: Sequence[SamplerWarning]) -> None:
        """Give each chain its draws, and the first one the warnings."""
        if not self.done:
            return
        for number, job in enumerate(self._jobs):
            stats = self._stats_of(number)
            if self.done > self._tune:
                stats[RECORD][self._tune] = RunRecord(self._settings())
            if number == 0:
                told = [*warnings, *self._warnings(stats)][: self.done]
                stats["warning"][self.done - len(told) :] = told
            recorded = self._step.recorded(stats["position"], stats["gradient"])
            stats["position"], stats["gradient"] = recorded
            job.add(self._step.variables_of(stats["position"]), stats)

    def _settings(self) -> RunSettings:
        settings = self._step.run_settings
        return replace(settings, attributes={**settings.attributes, "thin": self._pilot.thin})

    def _stats_of(self, number: int) -> dict[str, np.ndarray]:
        """Statistics of all draws of a chain so far, NaN after it failed."""
        good = min(int(self._good[number]), self.done)
        self._positions[number, good : self.done] = np.nan
        self._gradients[number, good : self.done] = np.nan
        stats = self._plain_stats(number, slice(0, self.done))
        states: Sequence[AdaptationState] = [
            each.begin(self._positions[number, 0]) for each in self._monitors
        ]
        for part in (slice(0, min(self._tune, good)), slice(self._tune, good)):
            if part.start < part.stop:
                states, found = self._monitor(number, part, states)
                for name, values in found.items():
                    stats[name][part] = values
        for name in ("step_size", *self._stats):
            stats[name][good:] = np.nan
        stats["n_steps"][good:] = 0
        return stats

    def _plain_stats(self, number: int, part: slice) -> dict[str, np.ndarray]:
        """Statistics of a part of the draws of a chain that each draw has by itself."""
        gradients = self._gradients[number, part]
        count = len(gradients)
        return {
            "position": self._positions[number, part],
            "gradient": gradients,
            "step_size": self._sizes[part].copy(),
            "gradient_norm": np.sqrt(np.einsum("bd,bd->b", gradients, gradients)),
            "n_steps": np.full(count, self._pilot.thin),
            "warning": np.full(count, None, dtype=object),
            RECORD: np.full(count, None, dtype=object),
            **{name: values[number, part].copy() for name, values in self._stats.items()},
            **{name: np.zeros(count) for each in self._monitors for name in each.stats},
        }

    def _monitor(
        self, number: int, part: slice, states: Sequence[AdaptationState]
    ) -> tuple[list[AdaptationState], dict[str, np.ndarray]]:
        """States of what records the variance error after a part of the draws, and its values."""
        seen = Seen(
            self._positions[number, part],
            self._gradients[number, part],
            lambda: np.empty(0, int),
            tuning=part.stop <= self._tune,
            at_boundary=False,
            thin=1,
            step_sizes=self._sizes[part],
        )
        after: list[AdaptationState] = []
        recorded: dict[str, np.ndarray] = {}
        with np.errstate(all="ignore"):  # Chains that are NaN.
            for monitor, state in zip(self._monitors, states, strict=True):
                state, found = monitor.update(state, seen)
                after.append(state)
                recorded |= found
        return after, recorded

    def _warnings(self, stats: Mapping[str, np.ndarray]) -> list[SamplerWarning]:
        """Warnings at the end of the chains."""
        failure = [] if self._failure is None else [self._failure]
        if self.done < self._total:
            return failure
        last = {name: values[-1] for name, values in stats.items()}
        messages = [self._step.end_warning(last), self._impossible()]
        return [
            *failure,
            *(
                SamplerWarning(WarningType.BAD_PARAMS, message, "warn", step=self.done - 1)
                for message in messages
                if message is not None
            ),
        ]

    def _impossible(self) -> str | None:
        """Warning of some draws of all chains, where the log density is minus infinity."""
        draws = self._positions[:, self._tune :].reshape(-1, self._positions.shape[-1])
        draws = draws[np.isfinite(draws).all(1)]
        some = np.linspace(len(draws), 0, min(len(draws), MOST_COMPARED), endpoint=False, dtype=int)
        possible = PossibleDraws(self._step.posterior, 0, len(some))
        possible.see(draws[some - 1], 1)
        return possible.warning()


def _only_records(adaptation: Adaptation) -> bool:
    return isinstance(adaptation, RunningMoments) or STATISTIC in adaptation.stats
