"""The progress bar of a run: PyMC's, moved by runs of draws, with the R-hat so far."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.progress import TextColumn
from rich.table import Column

from pymc_sgmcmc.pymc_private import MCMCProgressBarManager, RichProgressBackend
from pymc_sgmcmc.step_methods.base import StochasticGradientStep

SECONDS_BETWEEN = 2.0
"""R-hat is computed anew after this time."""

FEWEST_DRAWS = 20
"""There is no R-hat of fewer draws of each of two chains."""

MOST_DRAWS, MOST_COORDINATES = 500, 20
"""R-hat is of about this many draws of a chain, and of this many coordinates."""

R_HAT = "r_hat"


class RunProgress(MCMCProgressBarManager):
    """Progress of chains that advance by runs of draws.

    Parameters
    ----------
    step : StochasticGradientStep
    chains, draws, tune : int
    progressbar : bool or str
        As in `pymc.sample`.
    """

    def __init__(
        self,
        step: StochasticGradientStep,
        chains: int,
        draws: int,
        tune: int,
        progressbar: bool | str,
    ):
        super().__init__(_WithRhat(step), chains, draws, tune, progressbar)
        if isinstance(self._backend, RichProgressBackend):
            # Numbers are shown in full, and the bar takes the rest of the line.
            for column in self._backend._progress.columns[1:]:
                column.get_table_column().ratio = None
        self._tune, self._of_chain, self._last = tune, tune + draws, -np.inf
        self._r_hat = ""
        self._updates: dict[int, tuple[bool, dict[str, Any], bool]] = {}

    def advance(
        self,
        chain: int,
        done: int,
        stats: Mapping[str, np.ndarray],
        positions: Sequence[Sequence[np.ndarray]],
    ) -> None:
        """Show that a chain has made a run of draws.

        Parameters
        ----------
        chain, done : int
            Number of the chain, and of its draws so far.
        stats : mapping
            Statistics of the draws of the run.
        positions : sequence of sequences of numpy.ndarray
            Positions of each chain so far, in runs.
        """
        if not self._show_progress:
            return
        count = len(stats["position"])
        self.completed_draws += count
        self._update_r_hat(positions, now=done == self._of_chain)
        last = {name: values[-1] for name, values in stats.items()}
        failing, shown = self._extract_stats([{**last, R_HAT: self._r_hat}])
        done = self.completed_draws if self.combined_progress else done
        shown["draw"] = done if done <= self._tune_total else done - self._tune_total
        bar = 0 if self.combined_progress else chain
        ended = done == self.total_draws
        for is_last in (False, True) if ended else (False,):
            self._backend.update(bar, count, failing, shown, is_last, self.total_draws)
        self._updates[bar] = failing, shown, ended

    def _update_r_hat(self, positions: Sequence[Sequence[np.ndarray]], now: bool) -> None:
        start = time.monotonic()
        if not now and start - self._last < SECONDS_BETWEEN:
            return
        self._last = start
        found = running_r_hat(positions, self._tune)
        self._r_hat = "" if np.isnan(found) else f"{found:.3g}"
        # It is of all chains, so the bars of the others show it too.
        for bar, (failing, shown, ended) in self._updates.items():
            shown[R_HAT] = self._r_hat
            self._backend.update(bar, 0, failing, shown, ended, self.total_draws)


class _WithRhat:
    """What a progress bar asks of a step method, with a column of R-hat."""

    def __init__(self, step: StochasticGradientStep):
        self._step = step

    def _progressbar_config(self, n_chains: int = 1) -> tuple[list, dict[str, list]]:
        columns, values = self._step._progressbar_config(n_chains)
        column = TextColumn("{task.fields[r_hat]}", table_column=Column("R-hat"))
        return [*columns, column], {**values, R_HAT: [""] * n_chains}

    def _make_progressbar_update_functions(self) -> tuple:
        (of_step,) = self._step._make_progressbar_update_functions()
        return (lambda stats: {**of_step(stats), R_HAT: stats[R_HAT]},)


def running_r_hat(positions: Sequence[Sequence[np.ndarray]], tune: int) -> float:
    """Largest R-hat of some coordinates, over the chains that have draws after tuning.

    NaN where fewer than two chains have enough of them.
    """
    from arviz_stats.base import array_stats  # takes half a second to import

    chains: list[np.ndarray] = [np.concatenate(list(runs))[tune:] for runs in positions if runs]
    chains = [chain for chain in chains if len(chain) >= FEWEST_DRAWS]
    if len(chains) < 2:
        return np.nan
    length = min(map(len, chains))
    spacing = -(-length // MOST_DRAWS)
    coordinates = -(-chains[0].shape[1] // MOST_COORDINATES)
    some = np.array([chain[:length:spacing, ::coordinates] for chain in chains], dtype=float)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return float(np.max(array_stats.rhat(some, chain_axis=0, draw_axis=1)))
