"""Chains in this process one after the other, or in several processes at once.

A chain sends its draws in runs, and the last record of its moments where it was stopped. What was
drawn before an interrupt, or before a process died, is kept. Ctrl-C ends chains between two runs,
so that no run is lost or cut; pressed once more, it ends them at once.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pickle import dumps, loads
from threading import current_thread, main_thread
from traceback import format_exception
from typing import Any

import cloudpickle
import numpy as np
from threadpoolctl import threadpool_limits

from pymc_sgmcmc.errors import ChainProcessError
from pymc_sgmcmc.limits import available_cpus
from pymc_sgmcmc.pymc_private import cpu_count
from pymc_sgmcmc.record import RECORD, RunRecord
from pymc_sgmcmc.sampling.store import ChainStore, Run
from pymc_sgmcmc.step_methods.base import StochasticGradientStep

SECONDS_BETWEEN_LOOKS = 0.2
"""Ctrl-C is noticed after this time where no chain sends anything."""

MOST_CHAINS = 4
"""By default there are at most so many chains, as in `pymc.sample`."""

SECONDS_TO_END = 5.0
"""A process that was told to end is ended after this time."""


def default_chains() -> int:
    """Number of chains that `pymc.sample` runs by default."""
    return max(2, min(MOST_CHAINS, cpu_count()))


def default_cores() -> int:
    """Number of processes of `pymc.sample`, or fewer where a container has fewer processors."""
    return max(1, min(MOST_CHAINS, cpu_count(), available_cpus()))


@dataclass
class Job:
    """One chain: where it begins, and its draws so far.

    Attributes
    ----------
    rng : numpy.random.Generator
    point : dict of str to numpy.ndarray
        Initial values.
    values, stats : list of dict
        Values of the value variables and statistics, one for each run of draws.
    done : int
        Number of draws so far.
    store : ChainStore or None
        Where the draws are stored, and from where the chain goes on.
    """

    rng: np.random.Generator
    point: dict[str, np.ndarray]
    values: list[dict[str, np.ndarray]] = field(default_factory=list)
    stats: list[dict[str, np.ndarray]] = field(default_factory=list)
    done: int = 0
    store: ChainStore | None = None

    def add(self, values: dict[str, np.ndarray], stats: dict[str, np.ndarray]) -> None:
        """Add a run of draws."""
        self.values.append(values)
        self.stats.append(stats)
        self.done += len(stats["position"])

    def runs(self, step: StochasticGradientStep, tune: int, draws: int) -> Generator[Run]:
        """Runs of draws of the chain, which go into its store where it has one.

        What is not stored yet is stored where they are closed.
        """
        runs = step.runs if self.store is None else partial(self.store.runs, step)
        yield from runs(self.rng, self.point, tune, draws)

    def end(self, record: RunRecord | None) -> None:
        """Add the record of a chain that was stopped to its last draw."""
        if record is not None:
            last = self.stats[-1][RECORD]
            settings = None if last[-1] is None else last[-1].settings
            last[-1] = RunRecord(settings, record.moments)


Progress = Callable[[int], None]
"""Called with the number of a chain after each of its runs of draws."""


def run_in_turn(
    step: StochasticGradientStep, jobs: Sequence[Job], tune: int, draws: int, progress: Progress
) -> None:
    """Run the chains one after the other in this process."""
    state = step.sampling_state
    with interrupts_noted() as interrupted:
        for number, job in enumerate(jobs):
            if job.done == tune + draws:
                continue
            step.sampling_state = state
            with closing(job.runs(step, tune, draws)) as runs:
                for run in runs:
                    job.add(*run)
                    progress(number)
                    if interrupted:
                        job.end(step.last_record())
                        return


def run_in_processes(
    step: StochasticGradientStep,
    jobs: Sequence[Job],
    tune: int,
    draws: int,
    progress: Progress,
    cores: int,
    context: Any,
) -> None:
    """Run up to `cores` chains at once, each in a process of its own.

    Raises
    ------
    Exception
        The first error of a chain, with the note which chain it was.
    ChainProcessError
        Where a process died.
    """
    waiting = [number for number, job in enumerate(jobs) if job.done < tune + draws]
    workers: dict[Connection, _Worker] = {}
    payload = step if context.get_start_method() == "fork" else cloudpickle.dumps(step)
    stopping, died = False, None
    try:
        with interrupts_noted() as interrupted:
            while waiting or workers:
                if (interrupted or died) and not stopping:
                    stopping = True
                    waiting.clear()
                    for worker in workers.values():
                        worker.stop()
                while waiting and len(workers) < cores:
                    number = waiting.pop(0)
                    worker = _Worker(
                        number, jobs[number], payload, tune, draws, context, list(workers)
                    )
                    workers[worker.connection] = worker
                ready = wait(list(workers), SECONDS_BETWEEN_LOOKS)
                for worker in [workers[each] for each in list(workers) if each in ready]:
                    try:
                        more = worker.receive(progress)
                    except ChainProcessError as error:
                        # The other chains are told to end, so that their draws are kept.
                        # One that still started at Ctrl-C may end by it.
                        more, died = False, died or (None if interrupted else error)
                    if not more:
                        workers.pop(worker.connection).close()
    finally:
        for worker in workers.values():
            worker.close()
    if died is not None:
        raise died


_interrupts: list[list[int]] = []
"""The list of the outermost `interrupts_noted` of the main thread, where there is one."""


@contextmanager
def interrupts_noted() -> Iterator[list[int]]:
    """A list that is empty until Ctrl-C is pressed. A second one raises `KeyboardInterrupt`.

    Inside of another one it is the same list.
    """
    noted: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    # Only the main thread gets signals, and a handler that is not Python's cannot be set again.
    if current_thread() is not main_thread() or before in (signal.SIG_IGN, None):
        yield noted
        return
    if _interrupts:
        yield _interrupts[0]
        return

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        signal.signal(signal.SIGINT, before)

    _interrupts.append(noted)
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
        _interrupts.clear()


class _Worker:
    """The process of one chain, as its parent sees it."""

    def __init__(
        self,
        number: int,
        job: Job,
        step: StochasticGradientStep | bytes,
        tune: int,
        draws: int,
        context: Any,
        others: Sequence[Connection],
    ):
        self.number, self.job = number, job
        self.connection, remote = context.Pipe()
        # A forked process inherits the parent's end too, and would never see it closed.
        forked = context.get_start_method() == "fork"
        arguments = (
            remote,
            [self.connection, *others] if forked else [],
            step,
            Job(job.rng, job.point, store=job.store),
            tune,
            draws,
        )
        self._process = context.Process(
            target=_work, args=arguments, name=f"chain_{number}", daemon=True
        )
        try:
            self._process.start()
        except (EOFError, OSError) as error:  # It, or the server that forks it, died meanwhile.
            self.connection.close()
            raise ChainProcessError(
                f"The process of chain {number} could not start ({error!r}). The system ends "
                "processes where memory is short: use fewer `cores`."
            ) from error
        finally:
            remote.close()

    def receive(self, progress: Progress) -> bool:
        """Take one message. Return whether more will follow."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, OSError):
            self._process.join(SECONDS_TO_END)
            raise ChainProcessError(
                f"The process of chain {self.number} ended after {self.job.done} draws with exit "
                f"code {self._process.exitcode}. The system ends processes where memory is short: "
                "record fewer draws, or use fewer `cores`."
            ) from None
        if kind == "run":
            self.job.add(*content)
            progress(self.number)
        elif kind == "error":
            content.add_note(f"This was in chain {self.number}.")
            raise content
        else:
            self.job.end(content)
        return kind == "run"

    def stop(self) -> None:
        """Tell the chain to end after its present run."""
        with suppress(OSError):  # It may have ended already.
            self.connection.send("stop")

    def close(self) -> None:
        """End the process, if it still runs."""
        self._process.join(0.1)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(SECONDS_TO_END)
        self.connection.close()


def _work(
    connection: Connection,
    inherited: Sequence[Connection],
    step: StochasticGradientStep | bytes,
    job: Job,
    tune: int,
    draws: int,
) -> None:
    """Run a chain and send its draws."""
    # Ctrl-C goes to all processes. A chain should end where its parent tells it to.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in inherited:
        other.close()
    parent = multiprocessing.parent_process()
    assert parent is not None
    # OpenBLAS may hang where the number of its threads is set after a fork.
    with threadpool_limits(limits=1) if isinstance(step, bytes) else nullcontext():
        try:
            own = cloudpickle.loads(step) if isinstance(step, bytes) else step
            with closing(job.runs(own, tune, draws)) as runs:
                for run in runs:
                    if not parent.is_alive():
                        return
                    connection.send(("run", run))
                    if connection.poll() and connection.recv() == "stop":
                        break
            connection.send(("end", own.last_record()))
        except BrokenPipeError:
            pass  # The parent has ended.
        except BaseException as error:
            connection.send(("error", _sendable(error)))
        finally:
            connection.close()


def _sendable(error: BaseException) -> BaseException:
    """The error with its traceback as a note, or its text where it cannot be pickled."""
    error.add_note("".join(format_exception(error)))
    try:
        loads(dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
