"""Work on the workers of a Dask cluster: values that they need, and errors of the cluster.

Nothing here starts workers or moves work between them: that is Dask's. A task is a pure function,
so that Dask can run it again where a worker died.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from threading import RLock
from typing import Any
from uuid import uuid4

import cloudpickle
from threadpoolctl import ThreadpoolController

from pymc_sgmcmc.checks import import_optional
from pymc_sgmcmc.errors import ClusterError, KilledWorkersError

SECONDS_BETWEEN_LOOKS = 0.2
"""Ctrl-C, and a cluster that is lost, are noticed after this time where no task ends."""

SECONDS_WITHOUT_WORKERS = 60.0
"""A cluster that had workers, and has had none for this time, is lost. A worker that is started
again takes some seconds."""

SECONDS_TO_FETCH = 60.0
"""A result of some megabytes that has not come in this time is lost with its worker."""

TASKS_A_THREAD = 4
"""A pass has at most this many tasks at a time for each thread of the cluster, so that partitions
which wait for their turn do not fill the memory."""

MOST_RENEWALS = 1
"""Where Dask gives up a task since workers ended while it ran, a pass or the chains go on with new
tasks so many times, until a task ends. By then one task has ended eight workers."""

MOST_BYTES = 2**50
"""A parcel has fewer bytes than this."""

_log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold

_turn = RLock()
"""Tasks of one process take turns, since PyTensor compiles for one thread at a time."""


def check_client(client: Any) -> Any:
    """Return a Dask client that is connected.

    Raises
    ------
    TypeError
        Where it is none, or works only inside of coroutines.
    ValueError
        Where it is closed.
    ImportError
        Where `dask.distributed` is not installed.
    """
    distributed = import_optional("distributed", "dask", "Running on a Dask cluster")
    if not isinstance(client, distributed.Client):
        raise TypeError(
            f"`client` should be a client of a Dask cluster, but got {client!r}. Pass "
            "`dask.distributed.Client(...)`."
        )
    if client.asynchronous:
        raise TypeError(
            "`client` should not be asynchronous, but is. Make it without `asynchronous=True`."
        )
    if client.status != "running":
        raise ValueError(
            f"`client` should be connected to a cluster, but its status is {client.status!r}. Make "
            "a new `dask.distributed.Client(...)`."
        )
    return client


class Parcel:
    """A value that goes to a worker as bytes, and is made there when a task first needs it.

    It is the result of a task, so that Dask brings it to each worker once and to the one in the
    place of a worker that died, and forgets it with the last future.
    """

    def __init__(self, content: bytes):
        self._content, self._value = content, None

    def __getstate__(self) -> dict:
        return {"_content": self._content, "_value": None}

    def __sizeof__(self) -> int:
        return len(self._content)

    @property
    def value(self) -> Any:
        """The value, the same one in all tasks of a process. The caller has the turn."""
        if self._value is None:
            self._value = cloudpickle.loads(self._content)
        return self._value


def send(client: Any, value: Any) -> Any:
    """Future of a parcel with a value."""
    dask = import_optional("dask", "dask", "Running on a Dask cluster")
    # It goes to the cluster once. What Dask warns of are values that go there with each task.
    with dask.config.set({"distributed.admin.large-graph-warning-threshold": MOST_BYTES}):
        return client.submit(Parcel, cloudpickle.dumps(value), key=key_of("parcel"))


def is_there(future: Any) -> bool:
    """Whether a future has its result, or will have it."""
    return future.status in ("pending", "finished")


def submit(client: Any, label: str, function: Callable, *arguments: Any) -> Any:
    """Future of a function of arguments. Parcels among the arguments are opened."""
    return client.submit(call, function, *arguments, key=key_of(label))


def key_of(label: str) -> str:
    """A new name of a task, which begins with a label that the dashboard shows."""
    return f"{label}-{uuid4().hex}"


def call(function: Callable, *arguments: Any) -> Any:
    """Call a function with parcels opened, in this process alone at a time, on one thread."""
    with _turn, ThreadpoolController().limit(limits=1):
        return function(*(each.value if isinstance(each, Parcel) else each for each in arguments))


def results(client: Any, submitted: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Results in the order of futures, of which a few are made at a time.

    Parameters
    ----------
    client : Client
    submitted : callable
        Makes the futures, and those of tasks that they need. It is called again where Dask gave up
        a task, since all others may need this one.

    Raises
    ------
    Exception
        That of a task.
    ClusterError
        Where the cluster is lost, or a task ended several workers.
    """
    done = without_progress = 0
    while True:
        try:
            for result in _in_turn(client, islice(submitted(), done, None)):
                yield result
                done, without_progress = done + 1, 0
            return
        except KilledWorkersError:
            if without_progress == MOST_RENEWALS:
                raise
            without_progress += 1


def _in_turn(client: Any, made: Iterator[Any]) -> Iterator[Any]:
    """Results in the order of futures, of which a few are made at a time."""
    watch = Watch(client)
    with clear_errors(client):
        threads = sum(client.nthreads().values())
    waiting = list(islice(made, TASKS_A_THREAD * max(1, threads)))
    while waiting:
        future = waiting.pop(0)
        while not future.done():
            time.sleep(0.002)
            watch.look()
        result = fetched(client, future)
        watch.saw_result()
        yield result
        waiting += islice(made, 1)


def fetched(client: Any, future: Any) -> Any:
    """Result of a future that is done.

    Raises
    ------
    Exception
        That of its task.
    ClusterError
        Where the cluster is lost, or the worker that had the result, so that it does not come.
    """
    with clear_errors(client):
        try:
            return future.result(timeout=SECONDS_TO_FETCH)
        except TimeoutError as error:
            if future.status == "error":  # that of the task
                raise
            raise KilledWorkersError(
                f"A result has not come within {SECONDS_TO_FETCH:g} seconds after its task ended, "
                "since its worker ended too or the network is slow. Take fewer variables a draw."
            ) from error


@contextmanager
def clear_errors(client: Any) -> Iterator[None]:
    """Raise errors of the cluster, not those of a task, as a `ClusterError`."""
    distributed = import_optional("distributed", "dask", "Running on a Dask cluster")
    try:
        yield
    except distributed.scheduler.KilledWorker as error:
        raise KilledWorkersError(
            f"Workers ended while they ran a task, {error.allowed_failures + 1} in turn. The "
            "system or Dask ends workers where memory is short: give them more, or take smaller "
            "partitions and fewer draws."
        ) from error
    except (distributed.client.CancelledError, distributed.client.ClosedClientError) as error:
        raise ClusterError(
            f"The cluster gave up a task ({error}), since it or `client` was closed. Its status is "
            f"{client.status!r}. Make a new client."
        ) from error
    except (distributed.scheduler.NoValidWorkerError, distributed.scheduler.NoWorkerError) as error:
        raise ClusterError(f"The cluster has no worker for a task: {error}") from error


class Watch:
    """Looks from time to time whether a cluster is there."""

    def __init__(self, client: Any):
        self._client = client
        self._next, self._with_workers, self._had_workers = 0.0, time.monotonic(), False

    def saw_result(self) -> None:
        """Note that there are workers, which may all be lost before the first look."""
        self._with_workers, self._had_workers = time.monotonic(), True

    def look(self) -> None:
        """Look again where the last time is long enough ago.

        Raises
        ------
        ClusterError
            Where the client was closed, or all workers were lost.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + SECONDS_BETWEEN_LOOKS
        if self._client.status in ("closing", "closed"):
            raise ClusterError("`client` was closed. Make a new client.")
        with clear_errors(self._client):
            workers = self._client.nthreads()
        if workers:
            self._with_workers, self._had_workers = now, True
        elif now - self._with_workers < SECONDS_WITHOUT_WORKERS:
            return
        elif not self._had_workers:
            _log.warning("The cluster has no worker yet. The run waits for one.")
            self._with_workers = now
        else:
            raise ClusterError(
                f"The cluster has had no worker for {SECONDS_WITHOUT_WORKERS:g} seconds. Start "
                "workers, with more memory where it was short."
            )
