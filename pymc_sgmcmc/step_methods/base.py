"""The contract between PyMC and a chain of compiled transitions.

`StochasticGradientStep` keeps everything that PyMC asks of a step method: chains, seeds,
state, statistics and progress. It knows no formula; subclasses hand it a compiled block of
transitions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from pymc.model import Model, modelcontext
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

from pymc_sgmcmc.adaptation import Adaptation, AdaptationState, Seen
from pymc_sgmcmc.batching import EPOCHS_BETWEEN_SHUFFLES, FIRST_ORDER, Batching
from pymc_sgmcmc.checks import one_of
from pymc_sgmcmc.engine import TransitionBlock, is_jax_mode
from pymc_sgmcmc.errors import ModelError, NonFinitePositionError
from pymc_sgmcmc.gradient_estimators import SVRG, GradientEstimator
from pymc_sgmcmc.linear_algebra import apply
from pymc_sgmcmc.moments import RunningMoments
from pymc_sgmcmc.monitor import STATISTIC, LangevinMonitor, SteinMonitor
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.position import NOTHING_FREE, value_variables
from pymc_sgmcmc.run_settings import COMPUTED, GIVEN, RunSettings, StatisticTypes
from pymc_sgmcmc.schedules import StepSize, step_sizes
from pymc_sgmcmc.step_methods.search import (
    check_search_settings,
    check_searchable,
    search_step_size,
)
from pymc_sgmcmc.step_methods.setup import Design, Setup, is_curvature, prepare
from pymc_sgmcmc.step_size_tuning import LangevinStepSize

BLOCK_TRANSITIONS = 10_000
"""Most transitions computed in one call."""

BLOCK_OPERATIONS = 2e8
"""Bound on transitions x rows x elements of a row in one call: some tenths of a second, so
that the progress bar moves and an interrupt is heard."""

BLOCK_ELEMENTS = 1_000_000
"""Bound on transitions x elements of the state, and on the integers of their indices, in one
call: some megabytes of positions, noise and row numbers."""

DRAW_ELEMENTS = 250_000_000
"""Bound on those of one draw, which has no boundary within: 2 GB for each array of them."""

SHRUNKEN_STEP = 0.3
"""Part of the computed step size, left by tuning, below which it is worth a warning."""

TUNE_METHODS = ("closed_form", "halving")
"""Names of the ways to a step size."""

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
    auxiliaries: tuple[np.ndarray, ...]
    memory: tuple[np.ndarray, ...]
    adapted: tuple[dict[str, np.ndarray], ...]
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
    stats: dict[str, np.ndarray]
    rng_after: np.random.Generator
    noise_rng_after: np.random.Generator
    pending_after: np.ndarray
    state_after: tuple[np.ndarray, ...]
    adapted_after: tuple[AdaptationState, ...]
    bad_transition: int | None


class StochasticGradientStep(BlockedStep):
    """Base of the step methods: runs of draws from compiled blocks of transitions.

    Where the step method owns all variables of the model, a run of draws is computed in one
    call and handed out one by one. Its results do not depend on how long the runs are.

    A subclass keeps its own settings in `__init__`, passes the common ones on, and turns a
    `Setup` into a `Design` in `_design`. The common parameters are described in `SGLD`.
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

    name: str
    _takes_low_rank: ClassVar[bool] = False
    """Whether the dynamics take a curvature of low rank plus diagonal."""
    _keeps_rows: ClassVar[bool] = True
    """Whether some rows may be in each minibatch, by which V is that of the others alone."""
    posterior: Posterior
    batching: Batching
    block: TransitionBlock
    thin: int
    # State of the chain, see `StochasticGradientState`.
    rng: np.random.Generator
    noise_rng: np.random.Generator
    position: np.ndarray | None
    auxiliaries: tuple[np.ndarray, ...]
    adapted: tuple[AdaptationState, ...]
    pending: np.ndarray | None
    _draws: _Draws | None

    def __new__(cls, *args: Any, **kwargs: Any):
        """Check what PyMC reads before `__init__` does, which has its own words for it.

        Raises
        ------
        TypeError, ModelError
        """
        model = kwargs.get("model")
        if model is None:
            model = Model.get_context(error_if_none=False)
        if not isinstance(model, Model):
            raise TypeError(
                f"`model` should be a PyMC model, but got {model!r}. Pass one, or make the step "
                f"method inside `with model:`, as in `pm.sample(step={cls.__name__}())` there."
            )
        variables = args[0] if args else kwargs.get("vars")
        if variables is not None:
            value_variables(model, variables)
        elif not model.value_vars:
            raise ModelError(NOTHING_FREE)
        return super().__new__(cls, *args, **kwargs)

    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        batch_size: int | None = None,
        rows: str | Sequence[str] | None = None,
        step_size: StepSize | None = None,
        gradient: str | SVRG | GradientEstimator = "plain",
        center: str | Mapping[str, Any] | np.ndarray | None = None,
        thin: int | None = None,
        batching: str | None = None,
        model: Model | None = None,
        initial_point: Mapping[str, np.ndarray] | None = None,
        compile_kwargs: dict | None = None,
        blocked: bool = True,
        rng: Any = None,
        bias: float | None = None,
        init: Any = None,
        tune_method: str = "closed_form",
        **unknown: Any,
    ):
        if unknown:
            raise TypeError(
                f"`{type(self).__name__}` takes no argument `{next(iter(unknown))}`. Its arguments "
                "are listed in its docstring."
            )
        one_of("tune_method", tune_method, TUNE_METHODS)
        if tune_method == "halving":
            check_search_settings(step_size, bias)
        generator = _generator(rng)
        setup = prepare(
            type(self).__name__,
            modelcontext(model),
            vars,
            batch_size=batch_size,
            rows=rows,
            step_size=step_size,
            gradient=gradient,
            center=center,
            thin=thin,
            batching=batching,
            initial_point=initial_point,
            compile_kwargs=compile_kwargs,
            needs_center=self._needs_center(step_size),
            low_rank=self._takes_low_rank,
            keeps_rows=self._keeps_rows,
            preconditioner=getattr(self, "_preconditioner", "identity"),
            bias=bias,
            init=init,
        )
        self.bias = setup.bias
        self.posterior = setup.posterior
        self.vars = list(setup.posterior.layout.variables)
        self.center = setup.center
        self.batching = setup.estimator.batching
        self.batching_name = self.batching.name
        self.batch_size = self.batching.batch_size
        self.blocked = blocked
        self._owns_all = not setup.posterior.others
        self._start = None if setup.center is None else setup.center.position
        self._start_root = None if setup.center is None else setup.center.curvature.root
        self._initial_position = setup.posterior.initial_position
        self._runs_on_jax = is_jax_mode(compile_kwargs)
        self._process = os.getpid()

        searched = tune_method == "halving"
        design = self._design(replace(setup, to_be_searched=searched))
        if searched:
            check_searchable(setup, design, on_jax=self._runs_on_jax)
        if thin is not None:
            self._check_thin(thin, design)
        self.block = TransitionBlock(
            design.dynamics,
            setup.estimator,
            compile_kwargs,
            static_length=max(JAX_BLOCK_TRANSITIONS, design.thin) if self._runs_on_jax else None,
        )
        if searched:
            design = search_step_size(self.block, setup, design)
        self.step_size = design.step_size
        self.thin = design.thin
        self.adaptations: tuple[Adaptation, ...] = (
            *setup.estimator.adaptations,
            *design.adaptations,
            *_tuning(design, setup),
            SteinMonitor()
            if design.preconditioner is None
            else LangevinMonitor(design.preconditioner),
        )
        # Last, so that its state is found there.
        self._moments = RunningMoments(design.thin) if self._owns_all else None
        if self._moments is not None:
            self.adaptations = (*self.adaptations, self._moments)
        self.settings = RunSettings.of(setup, design)
        self._watch = design.watch
        self._tunes = any(isinstance(one, LangevinStepSize) for one in self.adaptations)
        self._declare_stats(design)
        transitions = self.batching.n_rows / self.batch_size * EPOCHS_BETWEEN_SHUFFLES
        self._draws_per_order = max(1, round(transitions / self.thin))
        self.setup_chain(generator, 0, 0)
        self.tune = True

    def _check_thin(self, thin: int, design: Design) -> None:
        """Refuse more transitions a draw than memory has room for: they are computed in one call.

        Raises
        ------
        ValueError
        """
        dimension = self.posterior.dimension
        auxiliaries = design.dynamics.auxiliaries(dimension)
        elements = dimension + sum(int(np.prod(one.shape)) for one in auxiliaries)
        most = max(1, DRAW_ELEMENTS // max(elements, self.batching.index_size))
        if thin > most:
            raise ValueError(
                f"`thin` should be at most {most} here, since the transitions of a draw are all in "
                f"memory at once, but got {thin}. Record more draws in its place."
            )

    # --- What a sampler says of itself ---------------------------------------------------

    def _needs_center(self, step_size: StepSize | None) -> bool:
        """Whether the settings of the sampler, gradients apart, need the centre."""
        return step_size is None

    def _design(self, setup: Setup) -> Design:
        """Dynamics and their settings; called once, with everything known of the posterior."""
        raise NotImplementedError

    def _declare_stats(self, design: Design) -> None:
        self._stat_names = tuple(design.dynamics.stats)
        adapted = {
            name: dtype
            for adaptation in self.adaptations
            for name, dtype in adaptation.stats.items()
        }
        self.stats_dtypes_shapes = {
            **type(self).stats_dtypes_shapes,
            **{name: (np.float64, []) for name in self._stat_names},
            **{name: (dtype, []) for name, dtype in adapted.items()},
        }
        if self._owns_all:
            # Plain arrays in place of objects: they take a third of the memory.
            vector = np.dtype((self.posterior.dtype, (self.posterior.dimension,)))
            self.stats_dtypes_shapes |= {"gradient": (vector, []), "position": (vector, [])}
        self.stats_dtypes = [
            StatisticTypes(
                {name: dtype for name, (dtype, _) in self.stats_dtypes_shapes.items()},
                settings=self.settings,
            )
        ]
        self._missing_stats = {
            **dict.fromkeys(("step_size", "gradient_norm", *self._stat_names), np.nan),
            **{name: np.zeros((), dtype)[()] for name, dtype in adapted.items()},
        }

    # --- What PyMC calls --------------------------------------------------------------------

    def setup_chain(self, rng: Any, tune: int, draws: int) -> None:
        """Begin a chain: reset everything that belongs to one chain."""
        if self._runs_on_jax and os.getpid() != self._process:
            raise RuntimeError(
                "This process was forked from one that uses JAX, which can hang. Pass "
                '`mp_ctx="forkserver"` or `mp_ctx="spawn"` to `pm.sample`, or `cores=1`.'
            )
        changed = self.posterior.changed_model()
        if changed is not None:
            raise ModelError(
                f"The model has not the variables that it had when the step method was made: "
                f"`{changed}` was added or taken away. Make a new step method."
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
        self.auxiliaries = ()
        self.adapted = ()
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
            if self._used_up(draws) and draws.bad_transition is None:
                # Resumed just where a run of draws had ended, which never crosses a boundary.
                self._finish_block()
                draws = self._draws = self._compute_draws(self._run_length())
        if self._used_up(draws):
            return self._fail(point, draws.bad_transition)
        number = self.handed_out
        self.handed_out += 1
        done = self.draws_done + self.handed_out
        stats = {
            "gradient": draws.gradients[number],
            "position": draws.positions[number],
            **{name: values[number] for name, values in draws.stats.items()},
            "warning": None,
        }
        if done in (self.tune_draws, self.total_draws):
            stats["warning"] = self._warning_after(done, stats)
        if done == self.total_draws and self._moments is not None:
            stats["warning"] = self._with_moments(stats["warning"], draws)
        if not self._computes_ahead:
            # A resumed chain could not compute this draw again: other variables move before
            # the next one, or the memory of the gradients has changed.
            self._finish_block()
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
            TextColumn("{task.fields[variance_error]:.1%}", table_column=Column("Bias", ratio=1)),
        ]
        names = ("step_size", "gradient_norm", STATISTIC)
        return columns, {name: [0.0] * n_chains for name in names}

    @staticmethod
    def _make_progressbar_update_functions():
        def update_stats(step_stats):
            return {
                "step_size": step_stats["step_size"],
                "gradient_norm": step_stats["gradient_norm"],
                STATISTIC: step_stats[STATISTIC],
                "failing": not np.isfinite(step_stats["gradient_norm"]),
            }

        return (update_stats,)

    # --- The chain --------------------------------------------------------------------------

    @property
    def _computes_ahead(self) -> bool:
        """Whether a run of draws may be computed in one call, and some of it once more."""
        return self._owns_all and self.block.memory is None

    @property
    def memory(self) -> tuple[np.ndarray, ...]:
        """What the gradient estimator remembers, which it holds itself while the chain runs."""
        if self.block.memory is None or self.position is None:
            return ()
        return self.block.memory.read()

    @memory.setter
    def memory(self, values: tuple[np.ndarray, ...]) -> None:
        if values:
            assert self.block.memory is not None
            self.block.memory.write(values)

    def _follow(self, incoming: np.ndarray) -> None:
        """Make sure that the chain goes on from the point that PyMC hands in."""
        if self.position is None:
            if not np.isfinite(incoming).all():
                names = [
                    label
                    for label, value in zip(self.posterior.labels, incoming, strict=True)
                    if not np.isfinite(value)
                ]
                raise ValueError(
                    f"The initial values of {names[:5]} are not finite. Give others as `initvals` "
                    "to `pm.sample`, or none, to start near the posterior mode."
                )
            self.position = self._first_position(incoming)
            self.auxiliaries = tuple(
                values.astype(self.posterior.dtype)
                for values in self.block.dynamics.initial_auxiliaries(self.position, self.noise_rng)
            )
            self.adapted = tuple(adaptation.begin(self.position) for adaptation in self.adaptations)
            if self.block.memory is not None:
                self.block.memory.begin(self.position)
            return
        if not self._computes_ahead:
            self._move_to(incoming)
            return
        expected = (
            self._draws.positions[self.handed_out - 1]
            if self._draws is not None and self.handed_out > 0
            else None
        )
        if expected is not None and not np.array_equal(incoming, expected):
            # Another step method moved the same variables: what was computed ahead is void.
            self._finish_block()
            self._move_to(incoming)

    def _move_to(self, incoming: np.ndarray) -> None:
        """Go on from a position that another step method may have changed."""
        assert self.position is not None
        if np.array_equal(incoming, self.position):
            return
        self.position = incoming
        self.auxiliaries = tuple(
            values.astype(self.posterior.dtype)
            for values in self.block.dynamics.auxiliaries_after_move(
                incoming, self.auxiliaries, self.noise_rng
            )
        )

    def _first_position(self, incoming: np.ndarray) -> np.ndarray:
        """Centre plus Laplace noise, unless the user gave initial values of their own."""
        user_chose = not np.array_equal(incoming, self._initial_position)
        if self._start is None or self._start_root is None or user_chose:
            return incoming
        noise = self.noise_rng.standard_normal(self.posterior.dimension)
        return (self._start + apply(self._start_root, noise)).astype(self.posterior.dtype)

    def _used_up(self, draws: _Draws) -> bool:
        return self.handed_out >= len(draws.positions)

    def _run_length(self) -> int:
        """Draws to compute in the next call."""
        if not self._computes_ahead:
            return 1
        done, thin = self.draws_done, self.thin
        boundary = self.tune_draws if done < self.tune_draws else self.total_draws
        periods = [self._draws_per_order, *map(self._draws_between, self.adaptations)]
        until_change = min(period - done % period for period in periods)
        elements = self.batch_size * max(1, self.posterior.row_elements)
        transitions = min(
            JAX_BLOCK_TRANSITIONS if self._runs_on_jax else BLOCK_TRANSITIONS,
            BLOCK_OPERATIONS / elements,
            BLOCK_ELEMENTS / max(self.block.state_elements, self.batching.index_size),
        )
        return max(1, self.handed_out, min(int(transitions // thin), boundary - done, until_change))

    def _draws_between(self, adaptation: Adaptation) -> int:
        """Draws between two boundaries of an adaptation."""
        return max(1, round(adaptation.transitions / self.thin))

    def _compute_draws(self, count: int) -> _Draws:
        """Run the chain from the start of the present block for some draws."""
        assert self.position is not None
        self.batching.set_order(self._order())
        if self.block.memory is not None and self.draws_done % self._draws_per_order == 0:
            self.block.memory.settle()
        for adaptation, state in zip(self.adaptations, self.adapted, strict=True):
            adaptation.load(state)
        transitions = count * self.thin
        rng, noise_rng = _copy(self.rng), _copy(self.noise_rng)
        if self.pending is None:
            self.pending = self.batching.draw(rng, self.block.lag)
            self.rng = _copy(rng)
        indices = np.concatenate([self.pending, self.batching.draw(rng, transitions)])
        dtype = np.dtype(self.posterior.dtype)
        noise = noise_rng.standard_normal((transitions, self.block.noise_size), dtype=dtype)
        sizes = step_sizes(self.step_size, self.draws_done * self.thin, transitions)
        for adaptation, state in zip(self.adaptations, self.adapted, strict=True):
            sizes = sizes * adaptation.step_size_factor(state)
        ran = self.block((self.position, *self.auxiliaries), indices, noise, sizes)

        recorded = slice(self.thin - 1, None, self.thin)
        bad_transition = None
        with np.errstate(over="ignore", invalid="ignore"):
            # Squares: a gradient whose norm overflows is as lost as an infinite one.
            gradient_norms = np.sqrt(np.einsum("bd,bd->b", ran.gradients, ran.gradients))
            finite = np.isfinite(
                gradient_norms + np.einsum("bd,bd->b", ran.positions, ran.positions)
            )
        good_draws = count
        if not finite.all():
            first = int(np.argmin(finite))
            bad_transition = self.draws_done * self.thin + first
            good_draws = first // self.thin
        stats = {
            "step_size": sizes[recorded],
            "gradient_norm": gradient_norms[recorded],
            **{
                name: values[recorded].copy()
                for name, values in zip(self._stat_names, ran.stats, strict=True)
            },
        }
        adapted_after = self.adapted
        if self.adaptations and bad_transition is None:
            adapted_after, adapted_stats = self._adapt(
                ran.positions, ran.gradients, indices[-1], sizes
            )
            stats |= adapted_stats
        elif self.adaptations:
            missing = {
                name: self._missing_stats[name] for a in self.adaptations for name in a.stats
            }
            stats |= {name: np.full(count, value) for name, value in missing.items()}
        return _Draws(
            # Copies, so that the transitions between draws can be freed.
            ran.positions[recorded][:good_draws].copy(),
            ran.gradients[recorded][:good_draws].copy(),
            stats,
            rng,
            noise_rng,
            indices[-self.block.lag :],
            tuple(np.array(part[-1]) for part in (ran.positions, *ran.auxiliaries)),
            adapted_after,
            bad_transition,
        )

    def _adapt(
        self,
        positions: np.ndarray,
        gradients: np.ndarray,
        next_index: np.ndarray,
        sizes: np.ndarray,
    ) -> tuple[tuple[AdaptationState, ...], dict[str, np.ndarray]]:
        """State of the adaptations after some draws, and what they record of them."""
        states: list[AdaptationState] = []
        stats: dict[str, np.ndarray] = {}
        draws = len(sizes) // self.thin
        for adaptation, state in zip(self.adaptations, self.adapted, strict=True):
            seen = Seen(
                positions,
                gradients,
                self.batching.selected(next_index),
                tuning=self.draws_done < self.tune_draws,
                at_boundary=(self.draws_done + draws) % self._draws_between(adaptation) == 0,
                thin=self.thin,
                step_sizes=sizes,
            )
            state, recorded = adaptation.update(state, seen)
            states.append(state)
            stats |= recorded
        return tuple(states), stats

    def _finish_block(self) -> None:
        """Make the last draw handed out the start of the next block."""
        draws, used = self._draws, self.handed_out
        if draws is not None and used:
            if used < len(draws.positions):
                draws = self._compute_draws(used)
            self.rng, self.noise_rng = draws.rng_after, draws.noise_rng_after
            self.pending = draws.pending_after
            self.position, *auxiliaries = draws.state_after
            self.auxiliaries = tuple(auxiliaries)
            self.adapted = draws.adapted_after
            self.draws_done += used
        self.handed_out = 0
        self._draws = None

    def _order(self) -> int:
        """Seed of the order of the rows at the present draw."""
        shuffles = self.draws_done // self._draws_per_order
        return FIRST_ORDER if shuffles == 0 else self.order_entropy + shuffles

    def _warning_after(self, done: int, stats: Mapping[str, Any]) -> SamplerWarning | None:
        """What the dynamics have to say of a chain at the end of its tuning, or of itself."""
        message = None if self._watch is None else self._watch(stats)
        if message is None and self._tunes and done == self.tune_draws:
            message = self._shrunken_step(float(stats["step_size"]))
        if message is None:
            return None
        return SamplerWarning(WarningType.BAD_PARAMS, message, "warn", step=done - 1)

    def _with_moments(self, warning: SamplerWarning | None, draws: _Draws) -> SamplerWarning:
        """The warning of the last draw, or a silent one, with the moments of the chain.

        It is the only thing that PyMC hands on, from worker processes too, and is not part of the
        trace.
        """
        assert self._moments is not None
        if warning is None:
            warning = SamplerWarning(WarningType.BAD_PARAMS, "", "debug")
        return replace(warning, extra=self._moments.of_chain(draws.adapted_after[-1]))

    def _shrunken_step(self, step_size: float) -> str | None:
        """What to say where tuning had to make the step much smaller."""
        ratio = step_size / step_sizes(self.step_size, 0, 1)[0]
        if ratio > SHRUNKEN_STEP:
            return None
        return (
            f"Tuning made the step size {ratio:.2g} of the computed one: over the posterior the "
            "gradients have more noise, or it has more curvature, than around the centre. Draws "
            f"are that much more dependent. Use `thin={int(np.ceil(self.thin / ratio))}`, or more "
            "draws; and check priors and parametrisation."
        )

    # --- Failure ----------------------------------------------------------------------------

    def _fail(self, point, bad_transition: int | None):
        """Stop the chain: keep the draws so far, say what happened and what to try."""
        transition = bad_transition if bad_transition is not None else 0
        size = step_sizes(self.step_size, transition, 1)[0]
        for adaptation, state in zip(self.adaptations, self.adapted, strict=True):
            size = size * adaptation.step_size_factor(state)
        draw = self.draws_done + self.handed_out
        message = (
            f"The chain left the finite numbers at transition {transition} (draw {draw}) with "
            f"step size {size:.3g}: the step is too large for the curvature of the posterior. "
            f"{self._remedy(size)}; a larger `batch_size`, an informative prior, and initial "
            "values nearer to the posterior also help."
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

    def _remedy(self, step_size: float) -> str:
        """What to try after a chain left the finite numbers with a step size."""
        smaller = f"smaller `step_size`, for example {step_size / 4:.3g}"
        step_size_from = self.settings.attributes["step_size_from"]
        if step_size_from == GIVEN:
            return f"Try a {smaller}, or leave it out to have it computed"
        # It was computed from the curvature at the centre, which is no guide to the posterior.
        if is_curvature(getattr(self, "_preconditioner", "")):
            # Beside a step size that is given, the default is another one.
            smaller += ' with `preconditioner="curvature"`'
        bias = ", a smaller `bias`" if step_size_from == COMPUTED else ""
        return (
            f"The step size was {step_size_from} by this package. Give a {smaller}{bias}, or a "
            "`center` where the posterior has its mass, or sample with NUTS"
        )

    def _not_a_number(self, point, warning: SamplerWarning | None):
        missing = np.full(self.posterior.dimension, np.nan, dtype=self.posterior.dtype)
        stats = {
            "gradient": missing,
            "position": missing,
            **self._missing_stats,
            "warning": warning,
        }
        return {**point, **self.posterior.layout.unravel(missing)}, [stats]

    # --- Pickling ---------------------------------------------------------------------------

    def __setstate__(self, state: dict) -> None:
        """Restore in a process of its own, which did not fork."""
        self.__dict__.update(state)
        self._process = os.getpid()


def _tuning(design: Design, setup: Setup) -> tuple[Adaptation, ...]:
    """What sets a step size in closed form anew: one that was searched has another aim."""
    computed = design.step_size if setup.step_size is None else None
    known = setup.center is not None and design.preconditioner is not None
    if design.choice is None or not known or not isinstance(computed, float):
        return ()
    assert setup.center is not None
    return (
        LangevinStepSize(design.preconditioner, design.thin, computed, setup.bias, setup.center),
    )


def _generator(rng: Any) -> np.random.Generator:
    try:
        return get_random_generator(rng)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`rng` should be a seed, a whole number that is not negative, or a generator of "
            f"NumPy, but got {rng!r}."
        ) from error


def _copy(rng: np.random.Generator) -> np.random.Generator:
    return random_generator_from_state(get_state_from_generator(rng))
