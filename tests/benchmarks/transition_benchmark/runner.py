"""Sets the contenders up and times them in turn."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import METHODS
from common.problem import Problem, make_problem, save_problem, step_size

from transition_benchmark.client import WorkerError, WorkerProcess
from transition_benchmark.guard import Summary, judge, least_transitions
from transition_benchmark.interface import Settings, UnavailableError
from transition_benchmark.peer_python import sgmcmcjax_python
from transition_benchmark.report import Result

_OWN_ENVIRONMENT = {"sgmcmcjax": sgmcmcjax_python}
_LEAST_TRANSITIONS = 500


@dataclass(frozen=True)
class Plan:
    """What to time.

    Attributes
    ----------
    rows : int
        Rows of the data.
    features, batches, dtypes
        Every combination is a configuration.
    contenders : sequence of str
        Names out of ``transition_benchmark.CONTENDERS``.
    rounds : int
        Times that every contender is timed in every configuration.
    seconds : float
        Rough time of one measurement of the fastest contender; sets the transitions.
    transitions : int, optional
        Transitions of a measurement, in place of `seconds`.
    timeout : float
        Seconds within which a worker must answer.
    storage : Path
        Folder for the environments of peers and the workers' output.
    """

    rows: int
    features: Sequence[int]
    batches: Sequence[int]
    dtypes: Sequence[str]
    contenders: Sequence[str]
    rounds: int
    seconds: float
    transitions: int | None
    timeout: float
    storage: Path


@dataclass
class Outcome:
    """What a run has found so far; filled as it goes, so that a run broken off is not lost."""

    results: list[Result] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def run(plan: Plan, outcome: Outcome) -> Iterator[None]:
    """Time every configuration of a plan; yields after each."""
    pythons = _interpreters(plan, outcome)
    for features in plan.features:
        for dtype in plan.dtypes:
            _say(f"generating {plan.rows} rows, p = {features}, {dtype}")
            problem = make_problem(plan.rows, features, dtype)
            with tempfile.TemporaryDirectory(dir=plan.storage, prefix="problem-") as folder:
                save_problem(problem, Path(folder))
                for batch in plan.batches:
                    _say(f"p = {features}, {dtype}, n = {batch}")
                    settings = make_settings(problem, batch, plan)
                    _time_configuration(problem, Path(folder), settings, pythons, plan, outcome)
                    yield


def make_settings(problem: Problem, batch: int, plan: Plan) -> Settings:
    """Step size and length of the chains for one batch size."""
    h = step_size(problem, batch)
    # A rough fit to the fastest contender: a fixed cost, and the reading of the window.
    predicted = 0.5e-6 + 4e-10 * batch * problem.features
    transitions = plan.transitions or max(_LEAST_TRANSITIONS, int(plan.seconds / predicted))
    return Settings(
        batch=batch,
        step_size=h,
        transitions=max(transitions, least_transitions(problem, h)),
    )


def _interpreters(plan: Plan, outcome: Outcome) -> dict[str, Path]:
    """Interpreter of each contender that has one."""
    pythons = {}
    for name in plan.contenders:
        try:
            find = _OWN_ENVIRONMENT.get(name)
            pythons[name] = find(plan.storage) if find else Path(sys.executable)
        except UnavailableError as error:
            outcome.absent[name] = str(error)
            _say(f"{name} does not take part: {error}")
    return pythons


def _time_configuration(
    problem: Problem,
    folder: Path,
    settings: Settings,
    pythons: Mapping[str, Path],
    plan: Plan,
    outcome: Outcome,
) -> None:
    with ExitStack() as stack:
        workers = {}
        entries = []
        for name, python in pythons.items():
            if name in outcome.absent:
                continue
            worker = stack.enter_context(
                WorkerProcess(
                    name,
                    python,
                    own_environment=name in _OWN_ENVIRONMENT,
                    timeout=plan.timeout,
                    log=plan.storage / f"worker-{name}.log",
                )
            )
            try:
                found = _set_up(worker, problem, folder, settings)
            except WorkerError as error:
                _note_absence(name, error, problem, settings, outcome)
                continue
            outcome.versions[name] = found["versions"]
            workers[name] = worker
            entries += [
                Result(
                    rows=problem.rows,
                    features=problem.features,
                    batch=settings.batch,
                    dtype=problem.dtype.name,
                    method=method,
                    step_size=settings.step_size,
                    transitions=settings.transitions,
                    contender=name,
                    wall_microseconds=[],
                    cpu_microseconds=[],
                    guard=guard,
                    note=found["notes"].get(method, ""),
                )
                for method, guard in found["guards"].items()
            ]
        for number in range(plan.rounds):
            for name, failure in _time_round(workers, entries, settings, number).items():
                _note_absence(name, failure, problem, settings, outcome)
                entries = [entry for entry in entries if entry.contender != name]
        # Added only when complete, since the report takes the minimum over the rounds.
        outcome.results += entries


def _set_up(
    worker: WorkerProcess, problem: Problem, folder: Path, settings: Settings
) -> dict[str, Any]:
    """Compile, then check one chain of each method, which also warms the contender up."""
    found = worker.request("prepare", folder=str(folder.resolve()), settings=asdict(settings))
    guards = {}
    for method in METHODS:
        if method in found["methods"]:
            summary = Summary(**worker.request("check", method=method, seed=0))
            guards[method] = asdict(judge(summary, problem, settings, method))
    described = ", ".join(
        f"{method} mean error {guard['mean_error']:.2f}, increments {guard['increment_ratio']:.3f}"
        for method, guard in guards.items()
    )
    _say(f"  {worker.contender} ready in {found['seconds']:.1f} s; {described}")
    return {**found, "guards": guards}


def _time_round(
    workers: Mapping[str, WorkerProcess],
    entries: Sequence[Result],
    settings: Settings,
    number: int,
) -> dict[str, WorkerError]:
    """Time every contender once; who begins changes from round to round.

    Returns
    -------
    dict
        Errors of the contenders that failed.
    """
    failed: dict[str, WorkerError] = {}
    shift = number % len(entries) if entries else 0
    for entry in [*entries[shift:], *entries[:shift]]:
        if entry.contender in failed:
            continue
        try:
            seconds = workers[entry.contender].request("time", method=entry.method, seed=number + 1)
        except WorkerError as error:
            failed[entry.contender] = error
            continue
        scale = 1e6 / settings.transitions
        entry.wall_microseconds.append(seconds["wall_seconds"] * scale)
        entry.cpu_microseconds.append(seconds["cpu_seconds"] * scale)
    return failed


def _note_absence(
    name: str, error: WorkerError, problem: Problem, settings: Settings, outcome: Outcome
) -> None:
    """Record who did not take part: altogether if unavailable, else in one configuration."""
    _say(f"  {name}: {error}")
    if not error.unavailable:
        name = f"{name} (p = {problem.features}, {problem.dtype}, n = {settings.batch})"
    outcome.absent[name] = str(error)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
