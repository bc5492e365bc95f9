"""The contract between PyMC and a chain.

`StochasticGradientStep` does everything that PyMC expects of a step method: model, seeds, state,
statistics and progress. It contains no formula: subclasses define the dynamics, and a `Chain`
computes the draws.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, Unpack
from weakref import WeakSet

import numpy as np
from pymc.stats.convergence import SamplerWarning, WarningType
from pymc.step_methods.compound import StepMethodState
from pymc.step_methods.state import dataclass_state
from pymc.util import RandomGeneratorState
from rich.progress import TextColumn
from rich.table import Column

from pymc_sgmcmc.adaptation import Adaptation
from pymc_sgmcmc.adaptation.moments import RunningMoments
from pymc_sgmcmc.adaptation.monitor import STATISTIC, LangevinMonitor, SteinMonitor
from pymc_sgmcmc.adaptation.reference import RefreshedReference
from pymc_sgmcmc.adaptation.step_size import LangevinStepSize
from pymc_sgmcmc.batching import Batching
from pymc_sgmcmc.chain import Chain, ChainState, Draws, missing_value
from pymc_sgmcmc.checks import FEW_NAMES, quoted
from pymc_sgmcmc.compiling.compiled import quick_graphs
from pymc_sgmcmc.dynamics import EULER, Law
from pymc_sgmcmc.engine import TransitionBlock
from pymc_sgmcmc.errors import ModelError, NonFinitePositionError
from pymc_sgmcmc.guests import advice_on_groups, quadrature_of
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.threads import threads_for_passes
from pymc_sgmcmc.record import COMPUTED, GIVEN, RECORD, RunRecord, with_preconditioner
from pymc_sgmcmc.schedules import StepSize, step_sizes
from pymc_sgmcmc.stages import lacks_widgets, log, set_up, stage
from pymc_sgmcmc.step_methods.advice import advice_on_nuts
from pymc_sgmcmc.step_methods.contract import StepMethod
from pymc_sgmcmc.step_methods.estimators import Gradient
from pymc_sgmcmc.step_methods.possible_draws import PossibleDraws, prepare
from pymc_sgmcmc.step_methods.pymc_hook import install
from pymc_sgmcmc.step_methods.run_settings import run_settings, with_cost, with_pace
from pymc_sgmcmc.step_methods.settings import CommonSettings, Preconditioner, Settings
from pymc_sgmcmc.step_methods.setup import Design, Kind, Setup, paced

DRAW_ELEMENTS = 250_000_000
"""A draw may have at most this many transitions times elements of the state. All transitions of a
draw are computed in one call, and each of its arrays then takes at most 2 GB."""

SAME_VALUES = 1e-12
"""Values of the variables are those at a position up to rounding in this part of each."""

SHORT_DRAW = 0.3
"""A warning follows where tuning leaves draws that are shorter than this part of a relaxation time.
Draws then depend on each other at least three times as long as planned."""

COMPILING_HINT = "What Numba compiled is kept, so that the next run of this model takes seconds."

TOLD_SECONDS = 1.5
"""The log has the time of a set-up that took longer, since PyMC's message leaves it out."""

JAX_BLOCK_TRANSITIONS = 256
"""Each call on JAX computes this fixed number of transitions, since JAX compiles a function anew
for each length. It is a compromise between the time of a call and transitions computed in vain at
the end of a run."""


@dataclass_state
class StochasticGradientState(StepMethodState):
    """State from which a chain resumes exactly where the state was read.

    Draws computed ahead are not stored. The state of the chain is that at the start of their run,
    and `handed_out` is the number of draws already handed out. A resumed chain computes the run
    again.
    """

    chain_state: dict[str, Any] | None
    rng: RandomGeneratorState
    tune: bool
    handed_out: int
    tune_draws: int
    total_draws: int
    failed: bool
    thin: int = field(metadata={"frozen": True})
    batch_size: int = field(metadata={"frozen": True})
    batching_name: str = field(metadata={"frozen": True})


@dataclass(frozen=True)
class _Run:
    """Draws computed ahead, as they are recorded, and the state of the chain before them."""

    before: ChainState
    draws: Draws
    values: np.ndarray
    gradients: np.ndarray

    @property
    def failed(self) -> bool:
        return self.draws.bad_transition is not None


MADE: WeakSet[StochasticGradientStep] = WeakSet()
"""The step methods that are in use, for tools that continue their chains after a run."""


class StochasticGradientStep(StepMethod):
    """Base of the step methods: runs of draws from compiled blocks of transitions.

    Where the step method has all variables of the model, a run of draws is computed in one call and
    handed out one by one. The results do not depend on the lengths of the runs.

    A subclass keeps its own settings in `__init__`, passes the common ones on, and turns a
    `Setup` into a `Design` in `_design`.
    """

    stats_dtypes_shapes: dict[str, tuple[Any, Any]] = {  # noqa: RUF012  # PyMC reads it from class and instance alike
        "gradient": (object, []),
        "position": (object, []),
        "step_size": (np.float64, []),
        "gradient_norm": (np.float64, []),
        "n_steps": (np.int64, []),
        "warning": (SamplerWarning, None),
        RECORD: (object, []),
    }
    _state_class = StochasticGradientState

    _kind: ClassVar[Kind] = Kind()
    _law: Law = EULER
    posterior: Posterior
    batching: Batching
    chain: Chain
    rng: np.random.Generator
    handed_out: int
    _run: _Run | None

    @set_up()
    @quick_graphs()
    @threads_for_passes()
    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        gradient: Gradient = "plain",
        preconditioner: Preconditioner = None,
        **settings: Unpack[CommonSettings],
    ):
        given = Settings(vars=vars, gradient=gradient, preconditioner=preconditioner, **settings)
        install()
        began = time.monotonic()
        setup = Setup(type(self).__name__, given, self._kind, self._law)
        estimator = setup.estimator
        self.bias = setup.bias
        self.posterior = setup.posterior
        self.vars = list(setup.posterior.layout.variables)
        self._local = setup.local
        if setup.local is not None:
            self.vars = list(setup.model.value_vars)
        self.batching = estimator.batching
        self.batching_name = self.batching.name
        self.batch_size = self.batching.batch_size
        self._owns_all = not setup.posterior.others
        self._initial_values = setup.posterior.initial_values
        self.runs_on_jax = given.on_jax
        self._process = os.getpid()

        design = self._design(setup)
        self.center = setup.known_center
        most_in_memory = self._most_in_memory(design)
        if given.thin is not None and given.thin > most_in_memory:
            raise ValueError(
                f"`thin` should be at most {most_in_memory} here, so that the transitions of a "
                f"draw fit into memory, but got {given.thin}. Record more draws instead."
            )
        longest = max(design.pace.thin, design.pace.most_thin or 1)
        with stage("Compiling", COMPILING_HINT):
            block = TransitionBlock(
                design.dynamics,
                estimator,
                given.compile_kwargs,
                static_length=max(JAX_BLOCK_TRANSITIONS, longest) if self.runs_on_jax else None,
            )
        self._starts_around = self.center if design.begins_at_center else None
        # The moments come last among the adaptations: `_record_after` reads the last state.
        # Those of other coordinates than the recorded ones would say nothing.
        has_moments = self._owns_all and self.posterior.coordinates is None
        self._moments = RunningMoments(self.posterior.dimension) if has_moments else None
        self.chain = Chain(
            block,
            step_size=design.pace.step_size,
            thin=design.pace.thin,
            adaptations=[
                *([] if estimator.reference is None else [RefreshedReference(estimator.reference)]),
                *design.adaptations,
                *_tuning(design, setup),
                _monitor(design, setup),
                *([] if self._moments is None else [self._moments]),
            ],
            most_thin=design.pace.most_thin,
        )
        self.run_settings = run_settings(setup, design)
        self._pace = design.pace
        self._thin_given = given.thin is not None
        self._watch, self._remedy = design.watch, design.remedy
        self._tunes = any(
            isinstance(adaptation, LangevinStepSize) for adaptation in self.chain.adaptations
        )
        self._declare_stats()
        is_computed = setup.batch_size_from == "computed" and setup.local is None
        self._advises = is_computed and self._owns_all and not self._kind.takes_all_rows
        takes_some = self.batch_size < self.posterior.n_rows
        in_model = self._advises and takes_some and self.posterior.coordinates is None
        if better := advice_on_groups(given.model) if in_model else None:
            log.info("%s: %s", setup.name, better)
            self._advises = False
        if (quadrature := quadrature_of(given.model)) is not None:
            quadrature.tell()
        if not self._kind.is_exact:
            with stage("Compiling", COMPILING_HINT):
                prepare(self.posterior)
        self.setup_chain(np.random.default_rng(), 0, 0)
        self.tune = True
        seconds = time.monotonic() - began
        self.run_settings = with_cost(
            self.run_settings, block.gradients, self.posterior.rows_evaluated, seconds
        )
        MADE.add(self)
        if seconds > TOLD_SECONDS:
            log.info("%s: the set-up took %.0f seconds", setup.name, seconds)

    @property
    def step_size(self) -> StepSize:
        """Step size before tuning."""
        return self.chain.step_size

    @property
    def thin(self) -> int:
        """Transitions a recorded draw, before tuning."""
        return self.chain.thin

    @property
    def block(self) -> TransitionBlock:
        """The compiled transitions."""
        return self.chain.block

    @property
    def has_closed_form(self) -> bool:
        """Whether the step size was computed in closed form, so that `at_bias` can change it."""
        return self._tunes

    @property
    def _settings(self) -> dict[str, Any]:
        known = self.run_settings.attributes
        usual = {
            "gradient": known["gradient"],
            "preconditioner": known.get("preconditioner_from"),
        }
        given = {name: value for name, value in super()._settings.items() if value is not None}
        numbers = ["step_size", "thin", "batch_size"]
        numbers += ["bias"] * (known["step_size_from"] == COMPUTED)
        return usual | given | {name: known[name] for name in numbers if name in known}

    def at_bias(self, bias: float, relaxation_times: int = 1) -> Self:
        """The same sampler with the step size for another stated variance error.

        It shares the compiled transitions and the batch size, which does not depend on the stated
        error. A draw has so many relaxation times, unless its number of transitions was given.

        Raises
        ------
        ValueError
            Where the step size was not computed in closed form.
        """
        choice = self._pace.choice
        if choice is None or not self._tunes:
            raise ValueError(
                f"The step size of {type(self).__name__} should be computed in closed form, but "
                "was not. Leave out `step_size`."
            )
        law = self.block.dynamics.law
        assert law is not None
        step_size = min(law.step_size(choice.noise, choice.curvature, bias), choice.longest)
        choice = replace(choice, step_size=step_size, error=bias)
        if self._thin_given:
            pace = replace(self._pace, step_size=choice.step_size, choice=choice)
        else:
            pace = paced(choice, tuned=True, relaxation_times=relaxation_times)
        other = copy(self)
        other.bias, other._pace = bias, pace
        other._forget_chain()
        other.chain = Chain(
            self.block,
            step_size=pace.step_size,
            thin=pace.thin,
            adaptations=[
                each.at_bias(pace.thin, choice.step_size, bias)
                if isinstance(each, LangevinStepSize)
                else each
                for each in self.chain.adaptations
            ],
            most_thin=pace.most_thin,
        )
        other.run_settings = with_pace(self.run_settings, bias, pace)
        return other

    def _most_in_memory(self, design: Design) -> int:
        """Most transitions a draw that fit into memory, since one call computes all of them."""
        dimension = self.posterior.dimension
        auxiliaries = design.dynamics.auxiliaries(dimension)
        elements = dimension + sum(int(np.prod(auxiliary.shape)) for auxiliary in auxiliaries)
        return max(1, DRAW_ELEMENTS // max(elements, self.batching.index_size))

    # --- Dynamics and statistics of a subclass -------------------------------------------

    def _design(self, setup: Setup) -> Design:
        """Dynamics and their settings for the posterior of a setup. It is called once."""
        raise NotImplementedError

    def _declare_stats(self) -> None:
        names = self.block.dynamics.stats
        adapted = {
            name: dtype
            for adaptation in self.chain.adaptations
            for name, dtype in adaptation.stats.items()
        }
        self.stats_dtypes_shapes = {
            **type(self).stats_dtypes_shapes,
            **{name: (np.float64, []) for name in names},
            **{name: (dtype, []) for name, dtype in adapted.items()},
        }
        if self._owns_all:
            # Plain arrays take a third of the memory of objects.
            vector = np.dtype((self.posterior.dtype, (self.posterior.dimension,)))
            self.stats_dtypes_shapes |= {"gradient": (vector, []), "position": (vector, [])}
        self.stats_dtypes = [{name: dtype for name, (dtype, _) in self.stats_dtypes_shapes.items()}]
        self._missing_stats = {
            **dict.fromkeys(("step_size", "gradient_norm", *names), np.nan),
            "n_steps": 0,
            **{name: missing_value(dtype) for name, dtype in adapted.items()},
        }

    # --- What PyMC calls --------------------------------------------------------------------

    def setup_chain(self, rng: Any, tune: int, draws: int) -> None:
        """Begin a chain: reset everything that belongs to one chain."""
        if self.runs_on_jax and os.getpid() != self._process:
            raise RuntimeError(
                "This process was forked from one that uses JAX, so it may hang. Pass "
                '`mp_ctx="forkserver"` or `mp_ctx="spawn"` to `pm.sample`, or `cores=1`.'
            )
        posterior = self.posterior
        self._refuse_changed_model(posterior.changed_model(), posterior.changed_data())
        super().setup_chain(rng, tune, draws)
        self.tune = tune > 0
        self.tune_draws = int(tune)
        self.total_draws = self.chain.expected_draws = int(tune) + int(draws)
        self._forget_chain()

    def _forget_chain(self) -> None:
        self.handed_out = 0
        self.failed = False
        self._begun = False
        self._run = None
        # Metropolis decisions refuse what has density zero. Local variables that are sampled are no
        # part of the position, so densities of rows are those at other values of them.
        self._possible = (
            None
            if self._kind.is_exact
            else PossibleDraws(
                self.posterior, self.tune_draws, self.total_draws, rows=self._local is None
            )
        )

    def step(self, point: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list]:
        """Advance the chain by one recorded draw, that is, by `thin` transitions."""
        if self.failed:
            return self._not_a_number(point, warning=None)
        self.posterior.set_others(point)
        self._follow(self.posterior.layout.ravel(point))
        run = self._run = self._run or self._next_run()
        if self.handed_out == len(run.draws):
            return self._fail(point, run)
        number = self.handed_out
        self.handed_out += 1
        done = run.before.draws + self.handed_out
        stats = {
            "gradient": run.gradients[number],
            "position": run.values[number],
            **{name: values[number] for name, values in run.draws.stats.items()},
            "warning": None,
            RECORD: self._record_after(done),
        }
        if self._possible is not None:
            self._possible.see(run.draws.positions[number : number + 1], done)
        if done in (self.tune_draws, self.total_draws):
            stats["warning"] = self._warning_after(done, stats)
        if self.handed_out == len(run.draws) and not run.failed:
            self._run, self.handed_out = None, 0
        moved = self.posterior.layout.unravel(run.values[number])
        return {**point, **moved, **self._point_of_memory()}, [stats]

    def runs(
        self,
        rng: np.random.Generator,
        point: dict[str, np.ndarray],
        tune: int,
        draws: int,
        state: ChainState | None = None,
    ) -> Generator[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
        """A whole chain in runs of draws, the same draws as those of `step`.

        Parameters
        ----------
        rng : numpy.random.Generator
        point : dict of str to numpy.ndarray
            Initial values.
        tune, draws : int
        state : ChainState, optional
            State between two runs, from which the chain goes on.

        Yields
        ------
        values, stats : dict of str to numpy.ndarray, shape (draws of the run, ...)
            Values of the value variables, and the statistics.
        """
        self.setup_chain(rng, tune, draws)
        if state is None:
            self._begin(self.posterior.layout.ravel(point))
        else:
            self.chain_state = vars(state)
        done = self.chain.snapshot.draws
        while done < self.total_draws:
            before = self.chain.snapshot
            most = 1 if self._point_of_memory() else self.chain.run_length()
            found = self.chain.advance(min(most, self.total_draws - done))
            if len(found):
                done += len(found)
                yield self._whole(found, done)
            if found.bad_transition is not None:
                self.handed_out = len(found)
                missing = self.total_draws - done
                _, (first,) = self._fail(point, self._run_of(before, found))
                yield self._missing(first, missing)
                return

    def begun(self, point: Mapping[str, np.ndarray]) -> ChainState:
        """State in which a chain that was set up begins."""
        self._begin(self.posterior.layout.ravel(point))
        return self.chain.state

    def read_ahead(self, rngs: Sequence[np.random.Generator], tune: int, draws: int) -> None:
        """Read the rows of several chains at once, where they are not all in memory."""
        if self.posterior.source is not None:
            self.chain.expected_draws = tune + draws
            with stage("Reading the rows of the run"):
                self.chain.read_ahead(rngs)

    def last_record(self) -> RunRecord | None:
        """Moments of a chain that was stopped, None where it ended or has no draws after tuning."""
        state = self.chain.snapshot
        if self._moments is None or not self.tune_draws < state.draws < self.total_draws:
            return None
        return RunRecord(moments=self._moments.of_chain(state.adapted[-1]))

    def _whole(self, run: Draws, done: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Values and statistics of all draws of a run, after which so many draws are done."""
        values, gradients = self.recorded(run.positions, run.gradients)
        stats = {
            "gradient": gradients,
            "position": values,
            **run.stats,
            "warning": np.full(len(run), None, dtype=object),
            RECORD: np.full(len(run), None, dtype=object),
        }
        if self._possible is not None:
            self._possible.see(run.positions, done - len(run) + 1)
        for number in (self.tune_draws, self.tune_draws + 1, self.total_draws):
            place = number - 1 - (done - len(run))
            if 0 <= place < len(run):
                stats[RECORD][place] = self._record_after(number)
                if number in (self.tune_draws, self.total_draws):
                    present = {name: values[place] for name, values in stats.items()}
                    stats["warning"][place] = self._warning_after(number, present)
        return self.variables_of(values), stats

    def _missing(
        self, first: Mapping[str, Any], count: int
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Values and statistics of draws that were not made, from those of the first of them."""
        _, (other,) = self._not_a_number({}, warning=None)
        stats = {}
        for name, value in first.items():
            stats[name] = np.zeros(count, dtype=self.stats_dtypes[0][name])
            stats[name][:] = other[name]
            stats[name][0] = value
        return self.variables_of(stats["position"]), stats

    def recorded(
        self, positions: np.ndarray, gradients: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ravelled value variables and gradients in terms of them, from those of a chain."""
        coordinates = self.posterior.coordinates
        if coordinates is None:
            return positions, gradients
        values = coordinates.to_values(positions)
        return values, coordinates.gradients(values, gradients)

    def variables_of(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Value variables from ravelled ones, (draws, d), with those of the present memory."""
        memory = {
            name: np.repeat(np.array(value)[None], len(values), axis=0)
            for name, value in self._point_of_memory().items()
        }
        return {**self.posterior.layout.unravel_all(values), **memory}

    def _point_of_memory(self) -> Mapping[str, np.ndarray]:
        """Variables that the gradient estimator moves itself."""
        memory = self.block.memory
        return {} if memory is None else memory.point()

    @property
    def chain_state(self) -> dict[str, Any] | None:
        """State of the chain at the start of the present run, None before the chain begins."""
        if not self._begun:
            return None
        return vars(self.chain.state if self._run is None else self._run.before)

    @chain_state.setter
    def chain_state(self, state: Mapping[str, Any] | None) -> None:
        self._begun = state is not None
        self._run = None
        if state is not None:
            self.chain.state = ChainState(**state)

    @staticmethod
    def _progressbar_config(n_chains=1):
        lacks_widgets()
        # PyMC's own columns leave eight characters of a line of 80.
        column = TextColumn("{task.fields[variance_error]:.1%}", table_column=Column("Bias"))
        return [column], {STATISTIC: [0.0] * n_chains}

    @staticmethod
    def _make_progressbar_update_functions():
        def update_stats(step_stats):
            return {
                STATISTIC: step_stats[STATISTIC],
                "failing": not np.isfinite(step_stats["gradient_norm"]),
            }

        return (update_stats,)

    # --- The chain --------------------------------------------------------------------------

    @property
    def _computes_ahead(self) -> bool:
        """Whether draws may be computed ahead, and computed again where they became invalid."""
        return self._owns_all and self.chain.can_repeat

    def _follow(self, incoming: np.ndarray) -> None:
        """Make sure that the chain goes on from the values that PyMC passes."""
        if not self._begun:
            self._begin(incoming)
            if not self._owns_all:
                self.chain.follow_others()
        elif self._run is None:
            if self._local is not None:
                self._refuse_moves(incoming)
            if not self.handed_out:  # otherwise resumed inside a run, which is computed again
                position = self._position_of(incoming)
                self.chain.move(position, others_moved=not self._owns_all)
        elif (
            self.handed_out
            and incoming.tobytes() != self._run.values[self.handed_out - 1].tobytes()
        ):
            # Another step method moved the same variables, so draws computed ahead are invalid.
            self.chain.state = self._run.before
            self.chain.advance(self.handed_out)
            self._run, self.handed_out = None, 0
            self.chain.move(self._position_of(incoming))

    def _position_of(self, values: np.ndarray) -> np.ndarray:
        """Position of a chain that has begun, which stays where the values are those there."""
        posterior, here = self.posterior, self.chain.snapshot.position
        if posterior.coordinates is None:
            return values
        same = np.allclose(posterior.values_at(here), values, rtol=SAME_VALUES, atol=0)
        return here if same else posterior.positions_at(values)

    def _refuse_moves(self, incoming: np.ndarray) -> None:
        """Refuse other step methods where the estimator draws local variables.

        Raises
        ------
        ModelError
        """
        here = self.chain.snapshot.position
        moved = [
            label
            for label, before, now in zip(self.posterior.labels, here, incoming, strict=True)
            if before != now
        ]
        if moved:
            raise ModelError(
                f"Another step method moves {quoted(moved[:FEW_NAMES])}, but `LocalSampling` draws "
                "the local variables of a group only when it is in a minibatch, so those of the "
                "other groups belong to earlier values. Leave the other step method out."
            )

    def _begin(self, incoming: np.ndarray) -> None:
        """Begin a chain around the centre, or at the initial values that the user gave."""
        if not np.isfinite(incoming).all():
            names = [
                label
                for label, value in zip(self.posterior.labels, incoming, strict=True)
                if not np.isfinite(value)
            ]
            raise ValueError(
                f"The initial values of {names[:5]} should be finite. Give other `initvals` to "
                "`pm.sample`, or none to start near the posterior mode."
            )
        position = self.posterior.positions_at(incoming)
        around, root = self._starts_around, None
        if around is not None and np.array_equal(incoming, self._initial_values):
            position, root = around.position, around.curvature.root
        self.chain.begin(self.rng, position, root=root, tune=self.tune_draws)
        self._begun = True

    def _next_run(self) -> _Run:
        """Draws computed ahead, or only one draw where other step methods move variables."""
        before = self.chain.snapshot
        remaining = self.total_draws - before.draws
        count = min(self.chain.run_length(), remaining) if self._computes_ahead else 1
        # A resumed chain has already handed out some draws of this run.
        return self._run_of(before, self.chain.advance(max(1, self.handed_out, count)))

    def _run_of(self, before: ChainState, draws: Draws) -> _Run:
        return _Run(before, draws, *self.recorded(draws.positions, draws.gradients))

    def _warning_after(self, done: int, stats: Mapping[str, Any]) -> SamplerWarning | None:
        """Warning of the dynamics or the tuning at the end of tuning or of the chain."""
        message = None
        if self._possible is not None and done == self.total_draws:
            message = self._possible.warning()
        if message is None:
            message = self.end_warning(stats)
        if message is None and self._tunes and done == self.tune_draws:
            message = self._short_draws(self.chain.present_step_size())
            self._advise(self.chain.present_step_size())
        if message is None and self._local is not None and self.block.memory is not None:
            message = self._local.lag(stats["position"], self.block.memory.read()[0])
        if message is None:
            return None
        return SamplerWarning(WarningType.BAD_PARAMS, message, "warn", step=done - 1)

    def end_warning(self, stats: Mapping[str, Any]) -> str | None:
        """Warning of the dynamics, from the statistics of a last draw of tuning or of the chain."""
        return None if self._watch is None else self._watch(stats)

    def _record_after(self, done: int) -> RunRecord | None:
        """Record of the run in this draw: settings in the first draw, moments in the last one."""
        settings = None
        if done == self.tune_draws + 1:
            thin = self.chain.snapshot.thin
            attributes = {**self.run_settings.attributes, "thin": thin}
            settings = replace(self.run_settings, attributes=attributes)
        moments = None
        if done == self.total_draws and self._moments is not None:
            moments = self._moments.of_chain(self.chain.snapshot.adapted[-1])
        return None if settings is moments is None else RunRecord(settings, moments)

    def _short_draws(self, step_size: float) -> str | None:
        """Warning where tuning left draws much shorter than a relaxation time, otherwise None."""
        ratio = step_size / step_sizes(self.step_size, 0, 1)[0]
        thin = self.chain.snapshot.thin
        if ratio * thin > SHORT_DRAW * self.thin:
            return None
        return (
            f"Tuning reduced the step size to {ratio:.2g} of the computed one, since gradient "
            f"noise or curvature are larger than at the centre, but a draw has only {thin} "
            f"transitions. Use `thin={int(np.ceil(self.thin / ratio))}` or more draws, and check "
            "the priors and the parametrisation."
        )

    def _advise(self, step_size: float) -> None:
        """Say once where NUTS takes fewer gradients than the chain after tuning."""
        if not self._advises or self.center is None:
            return
        self._advises = False
        thin = self.chain.snapshot.thin
        ratio = step_size * thin / (step_sizes(self.step_size, 0, 1)[0] * self.thin)
        passes = thin * self.run_settings.attributes["rows_a_transition"] / self.posterior.n_rows
        if better := advice_on_nuts(self.posterior, self.center, passes, ratio):
            log.info("%s: %s", type(self).__name__, better)

    # --- Failure ----------------------------------------------------------------------------

    def _fail(self, point, run: _Run):
        """Stop the chain, keep the draws so far, and say what happened and what to do."""
        transition = run.draws.bad_transition
        assert transition is not None
        draw = run.before.draws + self.handed_out
        error = self.not_finite(transition, draw, self.chain.present_step_size(transition))
        if draw < self.tune_draws or not self._owns_all:
            raise error
        self.failed = True
        kept_draws = draw - self.tune_draws
        warning = SamplerWarning(
            WarningType.BAD_PARAMS,
            f"{error} The first {kept_draws} draws of this chain are kept, the others are NaN.",
            "error",
            step=draw,
        )
        # The first draw has the settings of the run, for the report at its end.
        record = RunRecord(self.run_settings) if kept_draws == 0 else None
        return self._not_a_number(point, warning, record)

    def not_finite(
        self, transition: int, draw: int, step_size: float, chains: int | None = None
    ) -> NonFinitePositionError:
        """The error of a chain, or of some of many, that became NaN or infinite."""
        which = "The chain" if chains is None else f"{chains} chain{'s' * (chains > 1)}"
        return NonFinitePositionError(
            f"{which} became NaN or infinite at transition {transition} (draw {draw}): the step "
            f"size of {step_size:.3g}{with_preconditioner(self.run_settings.attributes)} is too "
            f"large. {self._remedy or self._remedy_of(step_size)}. A larger "
            "`batch_size`, informative priors or other initial values may also help."
        )

    def _remedy_of(self, step_size: float) -> str:
        """Advice after a chain became NaN or infinite with a step size."""
        smaller = f"smaller `step_size`, for example {step_size / 4:.3g}"
        step_size_from = self.run_settings.attributes["step_size_from"]
        if step_size_from == GIVEN:
            return f"Try a {smaller}, or leave it out to have it computed"
        # The step size is from the curvature at the centre, and the posterior differs elsewhere.
        smaller += with_preconditioner(self.run_settings.attributes)
        bias = ", a smaller `bias`" if step_size_from == COMPUTED else ""
        return (
            f"Give a {smaller}{bias} or a `center` where the posterior has its mass, or sample "
            "with NUTS"
        )

    def _not_a_number(self, point, warning: SamplerWarning | None, record: RunRecord | None = None):
        missing = np.full(self.posterior.dimension, np.nan, dtype=self.posterior.dtype)
        stats = {
            "gradient": missing,
            "position": missing,
            **self._missing_stats,
            "warning": warning,
            RECORD: record,
        }
        return {**point, **self.posterior.layout.unravel(missing)}, [stats]

    # --- Pickling ---------------------------------------------------------------------------

    def __setstate__(self, state: dict) -> None:
        """Restore the step method in a process that need not be a fork of the first one."""
        self.__dict__.update(state)
        self._process = os.getpid()


def _tuning(design: Design, setup: Setup) -> tuple[Adaptation, ...]:
    """Adaptation of a step size in closed form."""
    pace, law, matrix = design.pace, design.dynamics.law, design.dynamics.fixed_preconditioner
    if law is None or matrix is None or pace.choice is None:
        return ()
    assert isinstance(pace.step_size, float)
    return (
        LangevinStepSize(
            law,
            matrix,
            pace.thin,
            pace.step_size,
            setup.bias,
            setup.center,
            pace.choice.longest,
            pace.choice.largest_force if law.averaged else np.inf,
        ),
    )


def _monitor(design: Design, setup: Setup) -> Adaptation:
    """Running estimate of the variance error, by the law or by Stein's identity."""
    law, matrix = design.dynamics.law, design.dynamics.fixed_preconditioner
    if law is None or matrix is None:
        return SteinMonitor()
    center = setup.known_center
    return LangevinMonitor(law, matrix, None if center is None else center.curvature.precision)
