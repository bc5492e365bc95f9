"""The contract between PyMC and a chain of compiled transitions.

`StochasticGradientStep` keeps everything that PyMC asks of a step method: chains, seeds,
state, statistics and progress. It knows no formula; subclasses hand it a compiled block of
transitions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pymc.stats.convergence import SamplerWarning, WarningType
from pymc.step_methods.compound import BlockedStep, Competence, StepMethodState
from pymc.step_methods.state import WithSamplingState, dataclass_state
from pymc.util import (
    RandomGeneratorState,
    get_random_generator,
    get_state_from_generator,
    random_generator_from_state,
)
from rich.progress import TextColumn
from rich.table import Column

from pymc_sgmcmc.batching import EPOCHS_BETWEEN_SHUFFLES, FIRST_ORDER, Batching
from pymc_sgmcmc.engine import TransitionBlock, is_jax_mode
from pymc_sgmcmc.errors import ModelError, NonFinitePositionError
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.schedules import StepSize, step_sizes

BLOCK_TRANSITIONS = 10_000
"""Most transitions computed in one call."""

BLOCK_OPERATIONS = 2e8
"""Bound on transitions x rows x elements of a row in one call: some tenths of a second, so
that the progress bar moves and an interrupt is heard."""

BLOCK_ELEMENTS = 1_000_000
"""Bound on transitions x dimension, and on the integers of their indices, in one call: some
megabytes of positions, noise and row numbers."""

JAX_BLOCK_TRANSITIONS = 256
"""Transitions a call on JAX, which compiles anew for each length."""


@dataclass_state
class StochasticGradientState(StepMethodState):
    """What resumes a chain exactly where it was read.

    Draws computed ahead are not stored: the state is that of the start of their block, and
    `handed_out` says how many of them were used. A resumed chain computes the block again.
    """

    noise_rng: RandomGeneratorState
    tune: bool
    position: np.ndarray | None
    pending: np.ndarray | None
    draws_done: int
    handed_out: int
    tune_draws: int
    total_draws: int
    order_entropy: int
    failed: bool
    thin: int = field(metadata={"frozen": True})
    batch_size: int = field(metadata={"frozen": True})
    batching_name: str = field(metadata={"frozen": True})


@dataclass(frozen=True)
class _Draws:
    """Recorded draws of one block, and the transition at which it left the finite numbers."""

    positions: np.ndarray
    gradients: np.ndarray
    gradient_norms: np.ndarray
    step_sizes: np.ndarray
    rng_after: np.random.Generator
    noise_rng_after: np.random.Generator
    pending_after: np.ndarray
    last_position: np.ndarray
    bad_transition: int | None


class StochasticGradientStep(BlockedStep):
    """Base of the step methods: runs of draws from compiled blocks of transitions.

    Where the step method owns all variables of the model, a run of draws is computed in one
    call and handed out one by one. Its results do not depend on how long the runs are.
    """

    default_blocked = True
    stats_dtypes_shapes: dict[str, tuple[Any, Any]] = {  # noqa: RUF012  # PyMC reads it from class and instance alike
        "gradient": (object, []),
        "position": (object, []),
        "step_size": (np.float64, []),
        "gradient_norm": (np.float64, []),
        "warning": (SamplerWarning, None),
    }
    _state_class = StochasticGradientState

    # Set by subclasses through `_set_up`.
    name: str
    posterior: Posterior
    batching: Batching
    block: TransitionBlock
    thin: int
    # State of the chain, see `StochasticGradientState`.
    rng: np.random.Generator
    noise_rng: np.random.Generator
    position: np.ndarray | None
    pending: np.ndarray | None
    _draws: _Draws | None

    def _set_up(
        self,
        *,
        posterior: Posterior,
        batching: Batching,
        block: TransitionBlock,
        step_size: StepSize,
        thin: int,
        owns_all: bool,
        start: np.ndarray | None,
        start_root: np.ndarray | None,
        blocked: bool,
        compile_kwargs: Mapping | None,
        rng: Any,
    ) -> None:
        self.posterior = posterior
        self.vars = list(posterior.layout.variables)
        self.batching = batching
        self.batching_name = batching.name
        self.batch_size = batching.batch_size
        self.step_size = step_size
        self.thin = thin
        self.blocked = blocked
        self.block = block
        self._owns_all = owns_all
        self._start = start
        self._start_root = start_root
        self._initial_position = posterior.initial_position
        self._runs_on_jax = is_jax_mode(dict(compile_kwargs or {}))
        self._process = os.getpid()
        if owns_all:
            # Plain arrays in place of objects: they take a third of the memory.
            dimension = posterior.dimension
            vector = np.dtype((posterior.dtype, (dimension,)))
            self.stats_dtypes_shapes = {
                **type(self).stats_dtypes_shapes,
                "gradient": (vector, []),
                "position": (vector, []),
            }
            self.stats_dtypes = [
                {name: dtype for name, (dtype, _) in self.stats_dtypes_shapes.items()}
            ]
        transitions = batching.n_rows / batching.batch_size * EPOCHS_BETWEEN_SHUFFLES
        self._draws_per_order = max(1, round(transitions / thin))
        self.setup_chain(get_random_generator(rng), 0, 0)
        self.tune = True

    # --- What PyMC calls --------------------------------------------------------------------

    def setup_chain(self, rng: Any, tune: int, draws: int) -> None:
        """Begin a chain: reset everything that belongs to one chain."""
        if self._runs_on_jax and os.getpid() != self._process:
            raise RuntimeError(
                "This process was forked from one that uses JAX, which can hang. Pass "
                '`mp_ctx="forkserver"` or `mp_ctx="spawn"` to `pm.sample`, or `cores=1`.'
            )
        changed = self.posterior.changed_data()
        if changed is not None:
            raise ModelError(
                f"The data `{changed}` were changed after the step method was made, which has its "
                "own copy of them, its centre and its step size. Make a new step method."
            )
        super().setup_chain(rng, tune, draws)
        self.noise_rng = self.rng.spawn(1)[0]
        self.order_entropy = int(self.rng.integers(1, 2**31))
        self.tune = tune > 0
        self.tune_draws = int(tune)
        self.total_draws = int(tune) + int(draws)
        self.position = None
        self.pending = None
        self.draws_done = 0
        self.handed_out = 0
        self.failed = False
        self._draws = None

    def step(self, point: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list]:
        """Advance the chain by one recorded draw, that is, by `thin` transitions."""
        if self.failed:
            return self._not_a_number(point, warning=None)
        self.posterior.set_others(point)
        incoming = self.posterior.layout.ravel(point)
        self._follow(incoming)
        draws = self._draws
        if draws is not None and self._used_up(draws) and draws.bad_transition is None:
            self._finish_block()
            draws = None
        if draws is None:
            draws = self._draws = self._compute_draws(self._run_length())
        if self._used_up(draws):
            return self._fail(point, draws.bad_transition)
        number = self.handed_out
        self.handed_out += 1
        stats = {
            "gradient": draws.gradients[number],
            "position": draws.positions[number],
            "step_size": float(draws.step_sizes[number]),
            "gradient_norm": float(draws.gradient_norms[number]),
            "warning": None,
        }
        return {**point, **self.posterior.layout.unravel(draws.positions[number])}, [stats]

    @property
    def sampling_state(self) -> StochasticGradientState:
        """State of the chain, enough to go on exactly where it stands."""
        return WithSamplingState.sampling_state.fget(self)

    @sampling_state.setter
    def sampling_state(self, state: StochasticGradientState) -> None:
        WithSamplingState.sampling_state.fset(self, state)
        self._draws = None

    @staticmethod
    def competence(var, has_grad):
        """Never chosen on its own: an inexact sampler is asked for by name."""
        return Competence.INCOMPATIBLE

    @staticmethod
    def _progressbar_config(n_chains=1):
        columns = [
            TextColumn("{task.fields[step_size]:.2g}", table_column=Column("Step size", ratio=1)),
            TextColumn("{task.fields[gradient_norm]:.3g}", table_column=Column("Grad", ratio=1)),
        ]
        return columns, {"step_size": [0.0] * n_chains, "gradient_norm": [0.0] * n_chains}

    @staticmethod
    def _make_progressbar_update_functions():
        def update_stats(step_stats):
            return {
                "step_size": step_stats["step_size"],
                "gradient_norm": step_stats["gradient_norm"],
                "failing": not np.isfinite(step_stats["gradient_norm"]),
            }

        return (update_stats,)

    # --- The chain --------------------------------------------------------------------------

    def _follow(self, incoming: np.ndarray) -> None:
        """Make sure that the chain goes on from the point that PyMC hands in."""
        if self.position is None:
            self.position = self._first_position(incoming)
            return
        if not self._owns_all:
            if self._draws is not None:
                self._finish_block()
            self.position = incoming
            return
        expected = (
            self._draws.positions[self.handed_out - 1]
            if self._draws is not None and self.handed_out > 0
            else None
        )
        if expected is not None and not np.array_equal(incoming, expected):
            # Another step method moved the same variables: what was computed ahead is void.
            self._finish_block()
            self.position = incoming

    def _first_position(self, incoming: np.ndarray) -> np.ndarray:
        """Centre plus Laplace noise, unless the user gave initial values of their own."""
        user_chose = not np.array_equal(incoming, self._initial_position)
        if self._start is None or self._start_root is None or user_chose:
            return incoming
        noise = self.noise_rng.standard_normal(self.posterior.dimension)
        root = self._start_root
        jitter = root @ noise if root.ndim == 2 else root * noise
        return (self._start + jitter).astype(self.posterior.dtype)

    def _used_up(self, draws: _Draws) -> bool:
        return self.handed_out >= len(draws.positions)

    def _run_length(self) -> int:
        """Draws to compute in the next call."""
        if not self._owns_all:
            return 1
        done, thin = self.draws_done, self.thin
        boundary = self.tune_draws if done < self.tune_draws else self.total_draws
        until_shuffle = self._draws_per_order - done % self._draws_per_order
        elements = self.batch_size * max(1, self.posterior.row_elements)
        transitions = min(
            JAX_BLOCK_TRANSITIONS if self._runs_on_jax else BLOCK_TRANSITIONS,
            BLOCK_OPERATIONS / elements,
            BLOCK_ELEMENTS / max(self.posterior.dimension, self.batching.index_size),
        )
        return max(
            1, self.handed_out + 1, min(int(transitions // thin), boundary - done, until_shuffle)
        )

    def _compute_draws(self, count: int) -> _Draws:
        """Run the chain from the start of the present block for some draws."""
        assert self.position is not None
        self.batching.set_order(self._order())
        transitions = count * self.thin
        rng, noise_rng = _copy(self.rng), _copy(self.noise_rng)
        if self.pending is None:
            self.pending = self.batching.draw(rng, 1)
            self.rng = _copy(rng)
        indices = np.concatenate([self.pending, self.batching.draw(rng, transitions)])
        dtype = np.dtype(self.posterior.dtype)
        noise = noise_rng.standard_normal((transitions, self.posterior.dimension), dtype=dtype)
        sizes = step_sizes(self.step_size, self.draws_done * self.thin, transitions)
        positions, gradients = self.block(self.position, indices, noise, sizes)

        recorded = slice(self.thin - 1, None, self.thin)
        bad_transition = None
        with np.errstate(over="ignore", invalid="ignore"):
            # Squares: a gradient whose norm overflows is as lost as an infinite one.
            gradient_norms = np.sqrt(np.einsum("bd,bd->b", gradients, gradients))
            finite = np.isfinite(gradient_norms + np.einsum("bd,bd->b", positions, positions))
        good_draws = count
        if not finite.all():
            first = int(np.argmin(finite))
            bad_transition = self.draws_done * self.thin + first
            good_draws = first // self.thin
        return _Draws(
            # Copies, so that the transitions between draws can be freed.
            positions[recorded][:good_draws].copy(),
            gradients[recorded][:good_draws].copy(),
            gradient_norms[recorded],
            sizes[recorded],
            rng,
            noise_rng,
            indices[-1:],
            np.array(positions[-1]),
            bad_transition,
        )

    def _finish_block(self) -> None:
        """Make the last draw handed out the start of the next block."""
        draws, used = self._draws, self.handed_out
        if draws is not None and used:
            if used < len(draws.positions):
                draws = self._compute_draws(used)
            self.rng, self.noise_rng = draws.rng_after, draws.noise_rng_after
            self.pending = draws.pending_after
            self.position = draws.last_position
            self.draws_done += used
        self.handed_out = 0
        self._draws = None

    def _order(self) -> int:
        """Seed of the order of the rows at the present draw."""
        shuffles = self.draws_done // self._draws_per_order
        return FIRST_ORDER if shuffles == 0 else self.order_entropy + shuffles

    # --- Failure ----------------------------------------------------------------------------

    def _fail(self, point, bad_transition: int | None):
        """Stop the chain: keep the draws so far, say what happened and what to try."""
        transition = bad_transition if bad_transition is not None else 0
        size = step_sizes(self.step_size, transition, 1)[0]
        draw = self.draws_done + self.handed_out
        message = (
            f"The chain left the finite numbers at transition {transition} (draw {draw}) with "
            f"step size {size:.3g}: the step is too large for the curvature of the posterior. "
            f"Try a smaller `step_size`, for example {size / 4:.3g}, or leave it out to have it "
            "computed; a larger `batch_size`, an informative prior, and initial values nearer to "
            "the posterior also help."
        )
        if draw < self.tune_draws or not self._owns_all:
            raise NonFinitePositionError(message)
        self.failed = True
        kept = draw - self.tune_draws
        warning = SamplerWarning(
            WarningType.BAD_PARAMS,
            f"{message} The first {kept} draws of this chain are kept, the others are NaN.",
            "error",
            step=draw,
        )
        return self._not_a_number(point, warning)

    def _not_a_number(self, point, warning: SamplerWarning | None):
        missing = np.full(self.posterior.dimension, np.nan, dtype=self.posterior.dtype)
        stats = {
            "gradient": missing,
            "position": missing,
            "step_size": np.nan,
            "gradient_norm": np.nan,
            "warning": warning,
        }
        return {**point, **self.posterior.layout.unravel(missing)}, [stats]

    # --- Pickling ---------------------------------------------------------------------------

    def __setstate__(self, state: dict) -> None:
        """Restore in a process of its own, which did not fork."""
        self.__dict__.update(state)
        self._process = os.getpid()


def _copy(rng: np.random.Generator) -> np.random.Generator:
    return random_generator_from_state(get_state_from_generator(rng))
