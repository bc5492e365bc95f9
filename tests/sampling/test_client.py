"""Chains and passes on a Dask cluster have the draws of chains in this process."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from threading import Event, Thread

import numpy as np
import pymc as pm
import pytest

distributed = pytest.importorskip("distributed", reason="needs dask.distributed")
import dask  # noqa: E402
import dask.array as da  # noqa: E402
import dask.dataframe as dd  # noqa: E402
import pandas as pd  # noqa: E402

from pymc_sgmcmc import OSGFS, SGHMC, SGLD, SGLDCV, sample  # noqa: E402
from pymc_sgmcmc.errors import ChainProcessError, NonFinitePositionError, RowsError  # noqa: E402
from pymc_sgmcmc.posterior import Posterior  # noqa: E402
from pymc_sgmcmc.posterior.check_rows import check_rows  # noqa: E402
from pymc_sgmcmc.record import MOMENTS  # noqa: E402
from pymc_sgmcmc.sampling import client as module  # noqa: E402
from pymc_sgmcmc.sources import cluster, open_rows  # noqa: E402
from tests.support.sources import CountedRows  # noqa: E402

# The workers evaluate by NumPy what is not compiled by Numba, and so does this process.
pytestmark = pytest.mark.usefixtures("without_compiler")

NUMBA = {"compile_kwargs": {"mode": "NUMBA"}}
ROWS = 2003
RUN = {"draws": 8, "tune": 6, "chains": 2, "random_seed": 3}
WORKERS = 2
SECONDS_TO_RESTART = 60.0
"""A worker that was killed is there again after some seconds."""


@contextmanager
def workers(count, started="forkserver"):
    """A client of so many processes, which by default have the imports of a process before them."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["pymc_sgmcmc", "distributed", "dask.dataframe", "pytest"])
    # Dask would set other modules.
    distributed.utils._forkserver_preload_set = True
    with (
        dask.config.set(
            {
                "distributed.worker.multiprocessing-method": started,
                # Dask looks this time after the end of a worker whether there is another in its
                # place, and gives its nanny up where that one has just been killed as well.
                "distributed.deploy.lost-worker-timeout": "1 hour",
            }
        ),
        distributed.LocalCluster(
            n_workers=count, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0"
        ) as local,
        distributed.Client(local, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client_of_all():
    with workers(WORKERS) as client:
        yield client


@pytest.fixture
def client(client_of_all):
    """A client of the same workers for all tests, or of those in the place of ended ones."""
    client_of_all.wait_for_workers(WORKERS, timeout=SECONDS_TO_RESTART)
    return client_of_all


@pytest.fixture
def short_tasks(monkeypatch):
    """Each run of transitions is a task."""
    monkeypatch.setattr(module, "SECONDS_A_TASK", 0.0)


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(7)
    X = rng.normal(size=(ROWS, 3)).astype("float32")
    y = (rng.random(ROWS) < 1 / (1 + np.exp(-X @ [0.5, -1.0, 0.2]))).astype("int8")
    return {"X": X, "y": y}


def logistic(X, y):
    beta = pm.Normal("beta", 0, 1, shape=3)
    pm.Bernoulli("outcome", logit_p=X @ beta, observed=y)


def in_memory(arrays):
    with pm.Model() as model:
        logistic(*(pm.Data(name, values) for name, values in arrays.items()))
    return model


def on_source(rows):
    with pm.Model() as model:
        logistic(*rows.head("X", "y", rows=500))
    return model


def draws_of(model, step, **settings):
    with model:
        return sample(
            **{**RUN, "cores": 1, **settings},
            step=step,
            progressbar=False,
            quiet=True,
            compute_convergence_checks=False,
        )


def check_same(found, expected):
    for name in ("gradient", "position"):
        np.testing.assert_array_equal(
            found["sample_stats"][name], expected["sample_stats"][name], strict=True
        )
    np.testing.assert_array_equal(
        found["posterior"]["beta"], expected["posterior"]["beta"], strict=True
    )
    assert (MOMENTS in found) == (MOMENTS in expected)  # there are none of a chain that failed
    for name, values in expected[MOMENTS].variables.items() if MOMENTS in expected else ():
        np.testing.assert_array_equal(found[MOMENTS][name], values)


STEPS = {
    "SGLD": partial(SGLD, batch_size=100, step_size=1e-4, preconditioner="identity", thin=2),
    "SGLDCV": partial(SGLDCV, thin=2),
    "SGHMC": partial(SGHMC, thin=2, **NUMBA),
    "OSGFS": partial(OSGFS, batch_size=100, thin=2),
    "SVRG": partial(SGLD, batch_size=50, gradient="svrg", thin=2),
    "SAGA": partial(SGLD, batch_size=50, gradient="saga", thin=2),
}
SHORT_RUNS = partial(STEPS["SGLD"], batch_size=1000)  # The more rows, the fewer transitions a run.
FOUR = ("SGLD", "SGLDCV", "SGHMC", "OSGFS")


@pytest.fixture(scope="module")
def expected(arrays):
    """Draws of each sampler on rows in memory, in this process."""
    found = {}

    def draws(name):
        if name not in found:
            found[name] = draws_of(in_memory(arrays), STEPS[name])
        return found[name]

    return draws


# --- The same draws -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_rows_in_memory(client, arrays, expected, name, short_tasks):
    found = draws_of(in_memory(arrays), STEPS[name], client=client)
    check_same(found, expected(name))


@pytest.mark.parametrize("name", FOUR)
def test_rows_of_a_source(client, arrays, expected, name, short_tasks):
    """Set-up, gathering and chains run on the workers, and partitions end between ranges."""
    rows = CountedRows(arrays, rows=700)
    found = draws_of(on_source(rows), partial(STEPS[name], rows=rows), client=client)
    check_same(found, expected(name))


def sources(arrays, folder, client):
    """Rows in files, in Dask collections, and in what was persisted on the cluster."""
    frame = pd.DataFrame({**{f"x{k}": arrays["X"][:, k] for k in range(3)}, "y": arrays["y"]})
    frame.to_parquet(folder / "rows.parquet", row_group_size=300)
    columns = {"X": ["x0", "x1", "x2"], "y": "y"}
    chunked = {name: da.from_array(values, chunks=611) for name, values in arrays.items()}
    parts = dd.from_pandas(frame, npartitions=3)
    return {
        "parquet": open_rows(folder / "rows.parquet", columns),
        "transformed": open_rows(folder / "rows.parquet", columns).transform(negated, ["X"]),
        "dask arrays": open_rows(chunked),
        "persisted": open_rows(client.persist(parts), columns, client=client),
    }


def negated(columns):
    return {"X": 0 - (0 - columns["X"])}


@pytest.mark.parametrize("kind", ["parquet", "transformed", "dask arrays", "persisted"])
def test_kinds_of_sources(client, arrays, expected, kind, tmp_path):
    pytest.importorskip("pyarrow")
    rows = sources(arrays, tmp_path, client)[kind]
    found = draws_of(on_source(rows), partial(STEPS["SGLD"], rows=rows), client=client)
    check_same(found, expected("SGLD"))


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["1 kB", "60 kB"])
def test_rows_in_stretches(client, arrays, expected, memory):
    """A run with less memory than its rows take, after an order of the rows as well."""
    rows = open_rows(arrays, memory=memory)
    step = partial(STEPS["SGLD"], rows=rows, thin=4)
    found = draws_of(on_source(rows), step, client=client)
    check_same(found, draws_of(in_memory(arrays), partial(STEPS["SGLD"], thin=4)))


@pytest.mark.slow
@pytest.mark.parametrize("memory", [2**30, 6_000])
def test_groups_of_records(client, rng, memory, short_tasks):
    """Local variables are integrated out, and rows of the source are records of groups."""
    group = rng.permutation(np.repeat(np.arange(90), 12))
    values = {"X": rng.normal(size=(len(group), 2)), "group": group}
    values["y"] = values["X"] @ [1.0, -1.0] + rng.normal(size=90)[group]
    rows = CountedRows(values, rows=200)
    rows.memory = memory

    def model_of(X, group, y):
        beta = pm.Normal("beta", shape=2)
        effect = pm.Normal("effect", shape=90)
        pm.Normal("outcome", X @ beta + effect[group], 1.0, observed=y)

    with pm.Model() as local:
        model_of(*(pm.Data(name, array) for name, array in values.items()))
    with pm.Model() as model:
        model_of(*rows.head(*rows.columns, rows=300))
    expected = draws_of(local, STEPS["SGLDCV"])
    found = draws_of(model, partial(STEPS["SGLDCV"], rows=rows), client=client)
    check_same(found, expected)
    effects = [idata["posterior"]["effect"] for idata in (found, expected)]
    np.testing.assert_array_equal(*effects)


class WhereRead(CountedRows):
    """Rows that note in a file which process reads which partition."""

    def __init__(self, arrays, path):
        super().__init__(arrays, rows=300)
        self._path = path

    def partition(self, number, names):
        with open(self._path, "a") as file:
            file.write(f"{os.getpid()} {number}\n")
        return super().partition(number, names)


@pytest.mark.slow
def test_rows_are_read_on_the_workers_alone(client, arrays, expected, tmp_path):
    """Each pass and the gathering read each partition once, and no row is read here after that."""
    rows = WhereRead(arrays, tmp_path / "reads")
    model = on_source(rows)
    (tmp_path / "reads").write_text("")
    found = draws_of(model, partial(STEPS["SGLDCV"], rows=rows), client=client)
    check_same(found, expected("SGLDCV"))
    reads = [line.split() for line in (tmp_path / "reads").read_text().splitlines()]
    processes = {process for process, _ in reads}
    assert str(os.getpid()) not in processes
    assert len(processes) in (1, 2)  # Dask may give all tasks to one of the workers.
    # The modes of parts of the rows, curvature and noise read some partitions again.
    assert len(reads) <= 20 * rows.n_partitions


def test_passes_on_a_client_of_the_rows(client, arrays, tmp_path):
    """With `open_rows(client=...)` passes run there where no run has a client."""
    rows = WhereRead(arrays, tmp_path / "reads")
    rows.client = client
    with on_source(rows):
        (tmp_path / "reads").write_text("")
        step = STEPS["SGLDCV"](rows=rows)
    assert str(os.getpid()) not in (tmp_path / "reads").read_text().split()
    with in_memory(arrays):
        alone = STEPS["SGLDCV"]()
    np.testing.assert_array_equal(step.center.position, alone.center.position)
    assert step.step_size == alone.step_size


@pytest.mark.slow
@pytest.mark.parametrize("partition_rows", [1, 7, 30, 5000])
def test_passes_have_the_sums_of_ranges_in_memory(client, rng, partition_rows, monkeypatch):
    """For ranges within partitions, over several of them, and at their bounds."""
    monkeypatch.setattr("pymc_sgmcmc.posterior.evaluation.CHUNK_ELEMENTS", 120)
    values = {"X": rng.normal(size=(65, 3)), "y": rng.integers(2, size=65)}
    rows = CountedRows(values, rows=partition_rows)
    local, at = Posterior(in_memory(values)), rng.normal(size=3)
    with pm.Model() as model:
        logistic(*rows.head("X", "y", rows=17))
    remote = Posterior(model, rows=rows)
    remote.source.client = client
    check_rows(remote)
    for found, exact in zip(
        remote.log_density_and_gradient(at), local.log_density_and_gradient(at), strict=True
    ):
        np.testing.assert_array_equal(found, exact)
    curvatures = [posterior.likelihood_curvature(at) for posterior in (remote, local)]
    np.testing.assert_array_equal(*curvatures)


def test_standardising(client, arrays):
    rows = CountedRows(arrays, rows=300)
    expected = rows.standardise("X")
    rows.client = client
    found = rows.standardise("X")
    np.testing.assert_array_equal(found.means["X"], expected.means["X"])
    np.testing.assert_array_equal(found.scales["X"], expected.scales["X"])
    numbers = np.arange(0, ROWS, 7)
    np.testing.assert_array_equal(found.take(numbers)["X"], expected.read(0, ROWS)["X"][numbers])


# --- Workers that die ---------------------------------------------------------------------------


def started(cluster):
    """Processes of the workers, where all of them have started."""
    nannies = list(cluster.workers.values())
    pids = [
        nanny.pid
        for nanny in nannies
        if nanny.worker_address in cluster.scheduler.workers
        and nanny.process.status.name == "running"
    ]
    return pids if None not in pids and len(pids) == len(nannies) else []


def kill_started(cluster, rng, count=1):
    """Kill workers once all have started, and wait until the cluster has others in their places."""
    pids = wait_for(lambda: started(cluster))
    chosen = set(rng.permutation(pids)[:count])
    for pid in chosen:
        # Dask takes SIGTERM for the wish that there is one worker less.
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: chosen.isdisjoint(now := started(cluster)) and now)


def wait_for(found):
    """What a function returns, once it is something."""
    end = time.monotonic() + SECONDS_TO_RESTART
    while not (value := found()):
        assert time.monotonic() < end, "The cluster did not start its workers again."
        time.sleep(0.02)
    return value


def check_kills(client, kills, seconds, model, step, expected, all_at_once=0.25, **settings):
    """Kill workers at random moments, in runs one after another, until there were so many.

    The next moment is between two numbers of seconds after the workers are there again. Some times
    all are killed at once, so that no result is left.
    """
    rng, failures, ended = np.random.default_rng(), [], Event()

    def kill():
        try:
            for _ in range(kills):
                if ended.wait(rng.uniform(*seconds)):
                    return
                count = WORKERS if rng.random() < all_at_once else 1
                kill_started(client.cluster, rng, count)
        except Exception as error:
            failures.append(error)

    killer = Thread(target=kill)
    killer.start()
    try:
        while killer.is_alive():
            check_same(draws_of(model, step, client=client, **settings), expected)
    finally:
        ended.set()
        killer.join()
    assert not failures, failures


LONG = {"draws": 600, "tune": 100, "chains": 3}


def step_and_draws(arrays, source, step, **settings):
    """A step method on rows in memory or of a source, and its draws in this process."""
    if not source:
        with in_memory(arrays) as model:
            return model, step(), draws_of(model, step, **settings)
    rows = CountedRows(arrays, rows=300)
    rows.memory = 20_000_000
    with on_source(rows) as model:
        made = step(rows=rows)
    return model, made, draws_of(model, made, **settings)


@pytest.mark.parametrize("source", [False, True])
def test_a_worker_that_is_killed(client, arrays, rng, source, short_tasks, monkeypatch):
    """With what its chains need, between their tasks."""
    settings = {"tune": 0, "draws": 200, "chains": 3}
    model, step, expected = step_and_draws(arrays, source, SHORT_RUNS, **settings)
    act_after(monkeypatch, 2, lambda: kill_started(client.cluster, rng))
    check_same(draws_of(model, step, client=client, **settings), expected)


@pytest.mark.slow
@pytest.mark.parametrize("source", [False, True])
def test_workers_that_are_killed_20_times(client, arrays, source, short_tasks):
    """Each run of transitions is a task of a run of some seconds."""
    step = partial(STEPS["SGLD"], thin=20, **NUMBA)
    model, made, expected = step_and_draws(arrays, source, step, **LONG)
    check_kills(client, 20, (0, 2), model, made, expected, **LONG)


@pytest.mark.slow
def test_workers_that_are_killed_in_the_set_up(client, arrays):
    rows = CountedRows(arrays, rows=100)
    step = partial(STEPS["SGLDCV"], rows=rows, **NUMBA)
    expected = draws_of(on_source(rows), step, **LONG)
    check_kills(client, 20, (0, 3), on_source(rows), step, expected, **LONG)


@pytest.mark.slow
def test_tasks_that_dask_gives_up(client, arrays, monkeypatch):
    """In the set-up and the chains, at the first end of a worker, and tasks end between two."""
    monkeypatch.setattr(client.cluster.scheduler, "allowed_failures", 0)
    rows = CountedRows(arrays, rows=100)
    step = partial(STEPS["SGLDCV"], rows=rows, **NUMBA)
    expected = draws_of(on_source(rows), step, **LONG)
    check_kills(client, 10, (2, 4), on_source(rows), step, expected, all_at_once=0, **LONG)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_numbers_of_workers(arrays, expected, count, short_tasks):
    with workers(count, started="spawn") as client:
        for name in FOUR:
            found = draws_of(in_memory(arrays), STEPS[name], client=client)
            check_same(found, expected(name))
            rows = CountedRows(arrays, rows=300)
            step = partial(STEPS[name], rows=rows)
            check_same(draws_of(on_source(rows), step, client=client), expected(name))


# --- What goes wrong ----------------------------------------------------------------------------


class Deadly(CountedRows):
    """Rows of which a partition ends the worker that reads it, or has rows that cannot be read."""

    def __init__(self, arrays, error=None, bad_rows=700):
        super().__init__(arrays, rows=700)
        self.here, self.error, self.bad_rows = os.getpid(), error, bad_rows
        self.armed = False

    def select(self, number, within, names):
        bad = number == 2 and np.min(within, initial=self.bad_rows) < self.bad_rows
        if self.armed and bad and os.getpid() != self.here:
            if self.error is not None:
                raise self.error
            os._exit(1)
        return super().select(number, within, names)


def armed(rows, make):
    """A model and a step method, after whose set-up the rows are as bad as they can be."""
    with on_source(rows) as model:
        step = make(rows=rows)
    rows.armed = True
    return model, step


def test_a_task_that_ends_workers(client, arrays, monkeypatch):
    monkeypatch.setattr(client.cluster.scheduler, "allowed_failures", 0)
    model, step = armed(Deadly(arrays), STEPS["SGLD"])
    with pytest.raises(ChainProcessError, match="Workers ended while they ran a task, 1 in turn"):
        draws_of(model, step, client=client)


@pytest.mark.parametrize("error", [MemoryError("full"), RowsError("The file has vanished.")])
def test_errors_of_rows_keep_the_draws(client, arrays, error, short_tasks):
    # So few rows are first read in a later stretch: the draws before it are kept.
    rows = Deadly(arrays, error, bad_rows=20)
    rows.memory = 1
    model, step = armed(rows, partial(STEPS["SGLD"], batch_size=1, thin=1))
    with pytest.raises(ChainProcessError, match=r"Chain \d failed .* (full|vanished)") as caught:
        draws_of(model, step, client=client, tune=0, draws=400, chains=1)
    assert caught.value.__cause__.args == error.args
    assert caught.value.idata["posterior"].sizes["draw"] > 0


def test_errors_of_a_chain_are_raised(client, arrays):
    with in_memory(arrays) as model:
        made = SGLD(batch_size=100, step_size=1e30, preconditioner="identity")
    with pytest.raises(NonFinitePositionError, match="too large") as caught:
        draws_of(model, made, client=client)
    assert "This was in chain" in caught.value.__notes__[-1]


def test_chains_that_fail_after_tuning(client, arrays, short_tasks):
    """The draws that were not made are NaN, as in this process."""
    with in_memory(arrays) as model:
        made = SGLD(
            batch_size=100,
            step_size=lambda t: np.where(t < 10, 1e-4, 1e200),
            preconditioner="identity",
            thin=1,
        )
    runs = [draws_of(model, made, client=each) for each in (None, client)]
    assert np.isnan(runs[0]["posterior"]["beta"][:, -1]).all()
    check_same(*runs[::-1])


def act_after(monkeypatch, after, act):
    """Do something once the run has received so many results."""
    received = []
    stretch_of = module._stretch_of

    def counted(*arguments):
        received.append(stretch_of(*arguments))
        if len(received) == after:
            act()
        return received[-1]

    monkeypatch.setattr(module, "_stretch_of", counted)


def test_ctrl_c_returns_the_draws_so_far(client, arrays, short_tasks, monkeypatch):
    act_after(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    settings = {"tune": 0, "draws": 100_000}
    found = draws_of(in_memory(arrays), SHORT_RUNS, client=client, **settings)
    count = found["posterior"].sizes["draw"]
    assert 0 < count < 100_000
    settings["draws"] = count
    expected = draws_of(in_memory(arrays), SHORT_RUNS, **settings)
    np.testing.assert_array_equal(found["posterior"]["beta"], expected["posterior"]["beta"])


@pytest.mark.slow
def test_a_client_that_is_closed_during_the_run(client, arrays, short_tasks, monkeypatch):
    with distributed.Client(client.cluster, set_as_default=False) as own:
        act_after(monkeypatch, 3, own.close)
        with pytest.raises(ChainProcessError, match=r"closed.* Make a new client") as caught:
            draws_of(in_memory(arrays), SHORT_RUNS, client=own, tune=0, draws=100_000)
    assert caught.value.idata["posterior"].sizes["draw"] > 0


@pytest.mark.slow
def test_a_cluster_without_workers(arrays, short_tasks, monkeypatch):
    """Also where there are none at the first look."""
    monkeypatch.setattr(cluster, "SECONDS_WITHOUT_WORKERS", 0.5)
    monkeypatch.setattr(cluster, "SECONDS_BETWEEN_LOOKS", 2.0)
    with workers(1) as client:
        (nanny,) = client.cluster.workers.values()
        act_after(monkeypatch, 3, lambda: client.cluster.sync(nanny.close))
        with pytest.raises(ChainProcessError, match=r"no worker for 0\.5 seconds") as caught:
            draws_of(in_memory(arrays), SHORT_RUNS, client=client, tune=0, draws=100_000)
    assert caught.value.idata["posterior"].sizes["draw"] > 0


def test_what_is_no_client(client, arrays):
    model = in_memory(arrays)
    closed = distributed.Client(client.cluster, set_as_default=False)
    closed.close()
    for given, error, message in [
        (3, TypeError, "should be a client of a Dask cluster, but got 3"),
        (client.cluster, TypeError, "should be a client of a Dask cluster, but got LocalCluster"),
        (closed, ValueError, "connected to a cluster, but its status is 'closed'"),
    ]:
        with pytest.raises(error, match=message):
            draws_of(model, STEPS["SGLD"], client=given)
        with pytest.raises(error, match=message):
            open_rows(arrays, client=given)
    with pytest.raises(ValueError, match="`store` is written by processes of this machine"):
        draws_of(model, STEPS["SGLD"], client=client, store="run.zarr")


def test_arrays_that_begin_between_two_numbers():
    """Numba may read past numbers that are not where the processor looks for them."""
    sent = np.frombuffer(bytes(1) + np.arange(5.0).tobytes(), offset=1)
    assert not sent.flags.aligned
    assert not sent.flags.writeable
    (own,) = module._own_arrays({"x": sent}).values()
    assert own.flags.aligned
    assert own.flags.writeable
    np.testing.assert_array_equal(own, np.arange(5.0))
