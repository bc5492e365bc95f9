"""All chains of a run at once on the device of JAX, after one chain has tuned the step method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
from pymc.stats.convergence import SamplerWarning, WarningType

from pymc_sgmcmc.adaptation import Seen
from pymc_sgmcmc.adaptation.moments import RunningMoments
from pymc_sgmcmc.adaptation.monitor import STATISTIC
from pymc_sgmcmc.batching import FIRST_ORDER
from pymc_sgmcmc.chain import ChainState
from pymc_sgmcmc.record import RECORD, RunRecord
from pymc_sgmcmc.sampling.workers import Job, interrupts_noted
from pymc_sgmcmc.schedules import step_sizes
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.possible_draws import PossibleDraws
from pymc_sgmcmc.vectorized import ChainsOnDevice, minibatches_on_device

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
            f'`chain_method="vectorized"` takes step methods that stay as they are after tuning, '
            f"but the {name} goes on to adapt ({', '.join(changing)}). Use SGLDCV, SGLD, SGHMC, "
            'SGNHT, PSGLD or HAMCMC, or `chain_method="parallel"`.'
        )
    minibatches_on_device(step.batching)


def run_vectorized(
    step: StochasticGradientStep, jobs: Sequence[Job], tune: int, draws: int, shown: Shown
) -> bool:
    """Run all chains at once in this process. Return whether it was interrupted.

    One chain tunes the step method. All chains then begin anew with its step size and thinning, so
    that their first `tune` draws only bring them to their law.
    """
    rngs = [deepcopy(job.rng) for job in jobs]
    with interrupts_noted() as interrupted:
        pilot, warnings = _tuned(step, jobs[0], tune, draws)
        if interrupted:
            return True
        run = _Chains(step, jobs, rngs, pilot, tune, draws)
        try:
            while run.done < tune + draws and not interrupted:
                run.advance()
                shown(run.done, run.stats_of_first(), run.positions_of_some())
        finally:
            run.hand_out(warnings)
    return bool(interrupted)


def _tuned(
    step: StochasticGradientStep, job: Job, tune: int, draws: int
) -> tuple[ChainState, list[SamplerWarning]]:
    """State of a chain after tuning, and its warnings."""
    warnings: list[SamplerWarning] = []
    if tune == 0:
        step.setup_chain(deepcopy(job.rng), tune, draws)
        return step.begun(job.point), warnings
    with closing(step.runs(deepcopy(job.rng), job.point, tune, draws)) as runs:  # type: ignore[type-var]
        for _, stats in runs:
            warnings += [one for one in stats["warning"] if one is not None]
            if step.chain.snapshot.draws >= tune:
                break
    return step.chain.state, warnings


class _Chains:
    """The chains of a run, and their draws so far as arrays of all chains."""

    def __init__(
        self,
        step: StochasticGradientStep,
        jobs: Sequence[Job],
        rngs: Sequence[np.random.Generator],
        pilot: ChainState,
        tune: int,
        draws: int,
    ):
        self._step, self._jobs, self._tune, self._draws = step, jobs, tune, draws
        self._pilot, self._chain = pilot, step.chain
        self._device = ChainsOnDevice(step.block)
        states = []
        for job, rng in zip(jobs, rngs, strict=True):
            step.rng = rng
            begun = step.begun(job.point)
            states.append((begun.position, *begun.auxiliaries))
        self._entropy = begun.order_entropy
        self._chain.state, self._factor = pilot, 1.0
        for adaptation, adapted in zip(self._chain.adaptations, pilot.adapted, strict=True):
            adaptation.load(adapted)
            self._factor *= adaptation.step_size_factor(adapted)
        # Each chain has its own 64 bits, so that its draws do not depend on the number of chains.
        seeds = np.array([rng.integers(2**32, size=2, dtype=np.uint32) for rng in rngs])
        self._state = self._device.begin(seeds, tuple(map(np.stack, zip(*states, strict=True))))
        shape = len(jobs), tune + draws
        dimension, dtype = step.block.dimension, step.block.dtype
        self._positions = np.empty((*shape, dimension), dtype)
        self._gradients = np.empty((*shape, dimension), dtype)
        self._stats = {name: np.empty(shape) for name in step.block.dynamics.stats}
        self._sizes = np.empty(shape[1])
        self.done = self._last = 0

    def advance(self) -> None:
        """Compute the draws of one call.

        Raises
        ------
        NonFinitePositionError
            Where a chain became NaN or infinite.
        """
        chain, thin = self._chain, self._pilot.thin
        count = self._device.draws_of_call(thin)
        transitions = self._state.calls * count * thin
        shuffles = transitions // chain.transitions_per_order
        chain.block.batching.set_order(self._entropy + shuffles if shuffles else FIRST_ORDER)
        sizes = self._factor * step_sizes(self._step.step_size, transitions, count * thin)
        self._state, found = self._device.advance(self._state, sizes, thin)
        count = min(count, self._tune + self._draws - self.done)
        bad = np.flatnonzero((found.first_bad >= 0) & (found.first_bad < count * thin))
        if len(bad):
            first = int(found.first_bad[bad].min())
            raise self._step.not_finite(
                transitions + first, self.done + first // thin, float(sizes[first]), len(bad)
            )
        part = slice(self.done, self.done + count)
        self._positions[:, part] = found.positions[:, :count]
        self._gradients[:, part] = found.gradients[:, :count]
        for values, of_call in zip(self._stats.values(), found.stats, strict=True):
            values[:, part] = of_call[:, :count]
        self._sizes[part] = sizes[thin - 1 :: thin][:count]
        self.done += count
        self._last = count

    def stats_of_first(self) -> dict[str, np.ndarray]:
        """Statistics of the first chain in the last call, for the progress bar."""
        return {name: values[-self._last :] for name, values in self._stats_of(0).items()}

    def positions_of_some(self) -> list[list[np.ndarray]]:
        """Positions of some chains so far."""
        return [[positions[: self.done]] for positions in self._positions[:CHAINS_SHOWN]]

    def hand_out(self, warnings: Sequence[SamplerWarning]) -> None:
        """Give each chain its draws, and the first one the warnings."""
        if not self.done:
            return
        for number, job in enumerate(self._jobs):
            stats = self._stats_of(number)
            if self.done > self._tune:
                stats[RECORD][self._tune] = RunRecord(self._settings())
            if number == 0:
                told = [*warnings, *self._impossible()]
                stats["warning"][self.done - len(told) :] = told
            job.add(self._step.values_at(self._positions[number, : self.done]), stats)

    def _settings(self) -> Any:
        settings = self._step.run_settings
        return replace(settings, attributes={**settings.attributes, "thin": self._pilot.thin})

    def _stats_of(self, number: int) -> dict[str, np.ndarray]:
        """Statistics of all draws of a chain so far."""
        part = slice(0, self.done)
        positions, gradients = self._positions[number, part], self._gradients[number, part]
        stats = {
            "position": positions,
            "gradient": gradients,
            "step_size": self._sizes[part].copy(),
            "gradient_norm": np.sqrt(np.einsum("bd,bd->b", gradients, gradients)),
            "n_steps": np.full(self.done, self._pilot.thin),
            "warning": np.full(self.done, None, dtype=object),
            RECORD: np.full(self.done, None, dtype=object),
            **{name: values[number, part].copy() for name, values in self._stats.items()},
        }
        for adaptation in self._chain.adaptations:
            if STATISTIC in adaptation.stats:
                state = adaptation.begin(positions[0])
                recorded = []
                for tuning, some in (
                    (True, slice(0, min(self._tune, self.done))),
                    (False, slice(self._tune, self.done)),
                ):
                    if not len(positions[some]):
                        continue
                    seen = Seen(
                        positions[some],
                        gradients[some],
                        lambda: np.empty(0, int),
                        tuning=tuning,
                        at_boundary=False,
                        thin=1,
                        step_sizes=stats["step_size"][some],
                    )
                    state, found = adaptation.update(state, seen)
                    recorded.append(found[STATISTIC])
                stats[STATISTIC] = np.concatenate(recorded)
        return stats

    def _impossible(self) -> list[SamplerWarning]:
        """Warning of the last draws of the chains where the log density is minus infinity."""
        if self.done < self._tune + self._draws:
            return []
        last = self._positions[:, self.done - 1]
        possible = PossibleDraws(self._step.posterior, 0, len(last))
        possible.see(last, 1)
        message = possible.warning()
        if message is None:
            return []
        return [SamplerWarning(WarningType.BAD_PARAMS, message, "warn", step=self.done - 1)]


def _only_records(adaptation: Any) -> bool:
    return isinstance(adaptation, RunningMoments) or STATISTIC in adaptation.stats
