"""Chains on the workers of a Dask cluster.

A chain is a fold over tasks of a few seconds. A task takes the state of the chain and returns draws
and the next state, and all randomness is in the state. So where a worker dies, Dask runs its task
again elsewhere, with the same draws. Rows of a source are gathered by further tasks where the
partitions are, for as many transitions as memory allows, and go from worker to worker.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from pymc_sgmcmc.chain import ChainState
from pymc_sgmcmc.errors import ChainProcessError, ClusterError, KilledWorkersError, RowsError
from pymc_sgmcmc.gathering import GatheredRows
from pymc_sgmcmc.record import RunRecord
from pymc_sgmcmc.sampling.trace import joined
from pymc_sgmcmc.sampling.workers import Job, Progress, interrupts_noted
from pymc_sgmcmc.sources import cluster
from pymc_sgmcmc.step_methods.base import StochasticGradientStep

SECONDS_A_TASK = 2.0
"""A task draws for about this time. The end of a worker costs no more than the time of a task, and
sending a state and draws takes some milliseconds."""

ROWS_A_PARTITION = 10
"""Where a run takes more rows than this for each partition, it takes rows of all partitions: with
ten at random, one of 20,000 partitions is left out."""


@dataclass(frozen=True)
class _Rows:
    """Minibatches of transitions of a chain, in an order of the rows.

    Attributes
    ----------
    order : int
    first : int
        Transitions of the chain before them.
    minibatches : numpy.ndarray
        What `Chain.ahead` gave.
    """

    order: int
    first: int
    minibatches: np.ndarray


@dataclass(frozen=True)
class _Stretch:
    """Draws of a task, the state of the chain after them, and the record of its moments so far."""

    values: dict[str, np.ndarray]
    stats: dict[str, np.ndarray]
    state: ChainState
    record: RunRecord | None


@dataclass
class _Chain:
    """A chain as its caller sees it: state, and the rows that its next tasks take.

    Attributes
    ----------
    number : int
    job : Job
    start : bytes
        Pickled generator, initial values, and numbers of draws.
    state : bytes or None
        The pickled state, None before the chain began.
    rows : _Rows or None
    sent, gathered : Future or None
        Of a parcel with these rows, and of their columns.
    record : RunRecord or None
    renewals : int
        Those of the tasks when its last one was made.
    """

    number: int
    job: Job
    start: bytes
    state: bytes | None = None
    rows: _Rows | None = None
    sent: Any = None
    gathered: Any = None
    record: RunRecord | None = None
    renewals: int = 0


def run_on_client(
    step: StochasticGradientStep,
    jobs: Sequence[Job],
    tune: int,
    draws: int,
    progress: Progress,
    client: Any,
) -> None:
    """Run the chains as tasks on the workers of a cluster.

    Raises
    ------
    Exception
        The first error of a chain, with the note which chain it was.
    ChainProcessError
        Where the cluster is lost, a task ended several workers, or memory or rows were lost.
    """
    chains = [
        _Chain(number, job, pickle.dumps((job.rng, job.point, tune, draws)))
        for number, job in enumerate(jobs)
    ]
    done: SimpleQueue[Any] = SimpleQueue()
    running: dict[Any, _Chain] = {}
    watch, without_progress = cluster.Watch(client), 0
    try:
        with interrupts_noted() as interrupted:
            try:
                with cluster.clear_errors(client):
                    tasks = _Tasks(client, step)
                    tasks.begin(chains, tune, draws)
                    for chain in chains:
                        running[_submitted(tasks, chain, done)] = chain
                while running and not interrupted:
                    try:
                        future = done.get(timeout=cluster.SECONDS_BETWEEN_LOOKS)
                    except Empty:
                        watch.look()
                        continue
                    chain = running.pop(future)
                    try:
                        stretch = _stretch_of(client, chain, future)
                    except KilledWorkersError:
                        if chain.renewals == tasks.renewals:
                            if without_progress == cluster.MOST_RENEWALS:
                                raise
                            without_progress += 1
                            tasks.renew()
                        with cluster.clear_errors(client):
                            tasks.gather_again(chain)
                            running[_submitted(tasks, chain, done)] = chain
                        continue
                    without_progress = 0
                    watch.saw_result()
                    chain.job.add(stretch.values, stretch.stats)
                    chain.record = stretch.record
                    progress(chain.number)
                    if chain.job.done < tune + draws:
                        with cluster.clear_errors(client):
                            tasks.go_on(chain, stretch.state)
                            running[_submitted(tasks, chain, done)] = chain
            finally:
                with suppress(ClusterError), cluster.clear_errors(client):
                    for future in running:
                        future.cancel()
                for chain in chains:
                    if chain.job.stats:
                        chain.job.end(chain.record)
    except ClusterError as error:
        least = min(job.done for job in jobs)
        raise ChainProcessError(
            f"The chains could not go on. {error} The draws so far, {least} or more of each chain, "
            "are in the attribute `idata` of this error."
        ) from error


def _submitted(tasks: _Tasks, chain: _Chain, done: SimpleQueue[Any]) -> Any:
    """Future of the next task of a chain, which goes to a queue when it is done."""
    future = tasks.next_of(chain)
    future.add_done_callback(done.put)
    return future


def _stretch_of(client: Any, chain: _Chain, future: Any) -> _Stretch:
    """Result of a task of a chain.

    Raises
    ------
    Exception
        That of the task.
    ChainProcessError, ClusterError
    """
    try:
        return pickle.loads(cluster.fetched(client, future))
    except ClusterError as error:
        raise type(error)(f"{error} This was in chain {chain.number}.") from error
    except (MemoryError, OSError, RowsError) as error:
        raise ChainProcessError(
            f"Chain {chain.number} failed on a worker after {chain.job.done} draws with "
            f"{type(error).__name__}: {error} The draws so far are in the attribute `idata` of "
            "this error."
        ) from error
    except Exception as error:
        error.add_note(f"This was in chain {chain.number}.")
        raise


class _Tasks:
    """Makes the tasks of the chains of a step method."""

    def __init__(self, client: Any, step: StochasticGradientStep):
        self._client, self._step = client, step
        self._sent = cluster.send(client, step)
        self._source = step.posterior.source
        self.renewals = 0

    def renew(self) -> None:
        """Send the step method anew, since Dask gave up a task that all others depend on."""
        self._sent = cluster.send(self._client, self._step)
        self.renewals += 1

    def begin(self, chains: Sequence[_Chain], tune: int, draws: int) -> None:
        """Gather the rows of chains that begin, in one pass, where they are in a source."""
        if self._source is None:
            return
        for chain in chains:
            self._step.setup_chain(deepcopy(chain.job.rng), tune, draws)
            state = self._step.begun(chain.job.point)
            chain.state = pickle.dumps(state)
            chain.rows = self._ahead(state)
        self._gather(chains)

    def go_on(self, chain: _Chain, state: ChainState) -> None:
        """Take the next state of a chain, and gather rows where the next run has others."""
        chain.state = pickle.dumps(state)
        if self._source is None or chain.rows is None:
            return
        self._step.chain.state = state
        if not _has_rows(self._step, chain.rows):
            chain.rows = self._ahead(state)
            self._gather([chain])

    def gather_again(self, chain: _Chain) -> None:
        """Gather the rows of a chain anew, where they are in a source."""
        if chain.rows is not None:
            self._gather([chain])

    def next_of(self, chain: _Chain) -> Any:
        """Future of the next draws of a chain."""
        chain.renewals = self.renewals
        return cluster.submit(
            self._client,
            f"chain-{chain.number}",
            _draw,
            self._sent,
            chain.start,
            chain.state,
            chain.sent,
            chain.gathered,
            SECONDS_A_TASK,
        )

    def _ahead(self, state: ChainState) -> _Rows:
        self._step.chain.state = state
        order, minibatches = self._step.chain.ahead(int(self._step.batching.most_minibatches))
        return _Rows(order, state.transitions, minibatches)

    def _gather(self, chains: Sequence[_Chain]) -> None:
        """Begin to gather the rows of chains. Each partition is read once for all of them."""
        client, source = self._client, self._source
        assert source is not None
        for chain in chains:
            chain.sent = cluster.send(client, chain.rows)
        plan = cluster.submit(client, "plan", _plan, self._sent, *(each.sent for each in chains))
        parts = [
            cluster.submit(
                client,
                "gather",
                _select,
                self._sent,
                plan,
                source.started(client, number, self._step.posterior.source_names),
                number,
            )
            for number in self._touched([chain.rows for chain in chains if chain.rows])
        ]
        for place, chain in enumerate(chains):
            # The rows of a chain go to its worker alone.
            own = parts
            if len(chains) > 1:
                own = [cluster.submit(client, "gather", _part_of, part, place) for part in parts]
            chain.gathered = cluster.submit(client, "gather", _join, self._sent, plan, place, own)

    def _touched(self, rows: Sequence[_Rows]) -> list[int]:
        """Numbers of the partitions that have some of the rows, or may have some."""
        source, batching = self._source, self._step.batching
        assert source is not None
        present = [number for number in range(source.n_partitions) if source.count(number)]
        count = sum(len(each.minibatches) for each in rows) * batching.batch_size
        if count > ROWS_A_PARTITION * source.n_partitions:
            return present
        touched = {number for each in rows for number in source.places(_numbers(self._step, each))}
        return sorted(touched)


# --- On a worker ------------------------------------------------------------------------------


def _batching(step: StochasticGradientStep) -> GatheredRows:
    """Minibatches of a step method whose rows are in a source."""
    assert isinstance(step.batching, GatheredRows)
    return step.batching


def _numbers(step: StochasticGradientStep, rows: _Rows) -> np.ndarray:
    """Numbers of the rows of the source, which are records where rows of the model are groups."""
    numbers = _batching(step).numbers(rows.order, rows.minibatches)
    return step.posterior.rows_of_source(numbers)


def _has_rows(step: StochasticGradientStep, rows: _Rows | None) -> bool:
    """Whether the next run of a chain takes no other rows."""
    if rows is None:
        return True
    return step.chain.has_ahead(rows.order, rows.first, len(rows.minibatches))


def _draw(
    step: StochasticGradientStep,
    start: bytes,
    state: bytes | None,
    rows: _Rows | None,
    gathered: Mapping[str, np.ndarray] | None,
    seconds: float,
) -> bytes:
    """Draw for about so long, or as long as rows were gathered, from a state. A pickled `_Stretch`.

    It takes and gives bytes, since arrays that Dask sent may not be written to.
    """
    rng, point, tune, draws = pickle.loads(start)
    source, began = step.posterior.source, time.monotonic()
    before = None if state is None else pickle.loads(state)
    done = 0 if before is None else before.draws
    if (
        rows is not None
        and gathered is not None
        and source is not None
        and not _batching(step).holds(rows.order, rows.minibatches)
    ):
        with source.at_hand(_numbers(step, rows), _own_arrays(gathered)):
            _batching(step).hold(rows.order, rows.minibatches)
    runs = []
    for run in step.runs(rng, point, tune, draws, before):
        runs.append(run)
        done += len(run[1]["position"])
        # After a run that failed, the state is that before it, and its last draws follow.
        between = step.chain.snapshot.draws == done
        late = time.monotonic() - began > seconds
        if between and (late or not _has_rows(step, rows)):
            break
    values, stats = zip(*runs, strict=True)
    stretch = _Stretch(joined(values), joined(stats), step.chain.state, step.last_record())
    return pickle.dumps(stretch)


def _own_arrays(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays that compiled code may take: those that Dask sent may begin between two numbers."""
    return {name: np.require(each, requirements=["A", "W"]) for name, each in columns.items()}


_Part = tuple[int, list[dict[str, np.ndarray]]]
"""Number of a partition, and the columns of rows of it for some chains."""


@dataclass(frozen=True)
class _Plan:
    """Which rows of which partitions a chain takes, and where they go.

    Attributes
    ----------
    within : mapping of int to numpy.ndarray
        By the number of a partition, numbers of rows within it.
    places : mapping of int to numpy.ndarray
        Their places among all rows of the chain.
    count : int
        Number of these.
    """

    within: Mapping[int, np.ndarray]
    places: Mapping[int, np.ndarray]
    count: int


def _plan(step: StochasticGradientStep, *rows: _Rows) -> list[_Plan]:
    source, plans = step.posterior.source, []
    assert source is not None
    for each in rows:
        numbers = _numbers(step, each)
        places = source.places(numbers)
        within = {
            number: numbers[of_partition] - source.offsets[number]
            for number, of_partition in places.items()
        }
        plans.append(_Plan(within, places, len(numbers)))
    return plans


def _select(
    step: StochasticGradientStep, plans: Sequence[_Plan], result: Any, number: int
) -> _Part:
    """Rows of a partition for each of some chains."""
    source, names = step.posterior.source, step.posterior.source_names
    assert source is not None
    nothing = np.empty(0, dtype=np.int64)
    wanted = [plan.within.get(number, nothing) for plan in plans]
    if not any(map(len, wanted)):
        return number, [{} for _ in wanted]
    return number, [source.select_from(result, number, within, names) for within in wanted]


def _part_of(part: _Part, place: int) -> _Part:
    """The rows of one of the chains."""
    number, columns = part
    return number, columns[place : place + 1]


def _join(
    step: StochasticGradientStep,
    plans: Sequence[_Plan],
    place: int,
    parts: Sequence[_Part],
) -> dict[str, np.ndarray]:
    """Columns of all rows of a chain, in the order of its transitions."""
    source, plan = step.posterior.source, plans[place]
    assert source is not None
    columns = source.empty(step.posterior.source_names, plan.count)
    for number, (of_part,) in parts:
        for name, values in of_part.items():
            if len(values):
                columns[name][plan.places[number]] = values
    return columns
