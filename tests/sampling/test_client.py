"""Chains and passes on a Dask cluster have the draws of chains in this process."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event, Thread

import numpy as np
import pymc as pm
import pytest

distributed = pytest.importorskip("distributed", reason="needs dask.distributed")
import dask.array as da  # noqa: E402
import dask.dataframe as dd  # noqa: E402
import pandas as pd  # noqa: E402

from pymc_sgmcmc import OSGFS, SGHMC, SGLD, SGLDCV, sample  # noqa: E402
from pymc_sgmcmc.errors import ChainProcessError, NonFinitePositionError, RowsError  # noqa: E402
from pymc_sgmcmc.posterior import Posterior  # noqa: E402
from pymc_sgmcmc.record import MOMENTS  # noqa: E402
from pymc_sgmcmc.sampling import client as module  # noqa: E402
from pymc_sgmcmc.sources import cluster, open_rows  # noqa: E402
from tests.support.sources import CountedRows  # noqa: E402

# The workers evaluate by NumPy what is not compiled by Numba, and so does this process.
pytestmark = pytest.mark.usefixtures("without_compiler")

NUMBA = {"compile_kwargs": {"mode": "NUMBA"}}
ROWS = 2003
RUN = {"draws": 60, "tune": 40, "chains": 3, "random_seed": 3}


@contextmanager
def workers(count):
    with (
        distributed.LocalCluster(
            n_workers=count, threads_per_worker=1, processes=True, dashboard_address=":0"
        ) as local,
        distributed.Client(local, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client():
    with workers(2) as client:
        yield client


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


PLAIN = partial(SGLD, batch_size=100, step_size=1e-4, preconditioner="identity", **NUMBA)
STEPS = {
    "SGLD": PLAIN,
    "SGLDCV": partial(SGLDCV, **NUMBA),
    "SGHMC": partial(SGHMC, **NUMBA),
    "OSGFS": partial(OSGFS, batch_size=100, **NUMBA),
    "SVRG": partial(SGLD, batch_size=50, gradient="svrg", **NUMBA),
    "SAGA": partial(SGLD, batch_size=50, gradient="saga", **NUMBA),
}
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
    found = draws_of(on_source(rows), partial(STEPS["SGLDCV"], rows=rows), client=client)
    check_same(found, expected("SGLDCV"))


@pytest.mark.parametrize("memory", ["1 kB", "60 kB"])
def test_rows_in_stretches(client, arrays, expected, memory):
    """A run with less memory than its rows take, after an order of the rows as well."""
    rows = open_rows(arrays, memory=memory)
    step = partial(STEPS["SGLD"], rows=rows, thin=10)
    settings = {"draws": 12, "tune": 6, "chains": 2}
    found = draws_of(on_source(rows), step, client=client, **settings)
    check_same(found, draws_of(in_memory(arrays), partial(STEPS["SGLD"], thin=10), **settings))


class WhereRead(CountedRows):
    """Rows that note in a file which process reads which partition."""

    def __init__(self, arrays, path):
        super().__init__(arrays, rows=300)
        self._path = path

    def partition(self, number, names):
        with open(self._path, "a") as file:
            file.write(f"{os.getpid()} {number}\n")
        return super().partition(number, names)


def test_rows_are_read_on_the_workers_alone(client, arrays, tmp_path):
    """Each pass and the gathering read each partition once, and no row is read here after that."""
    rows = WhereRead(arrays, tmp_path / "reads")
    model = on_source(rows)
    (tmp_path / "reads").write_text("")
    draws_of(model, partial(STEPS["SGLDCV"], rows=rows), client=client)
    reads = [line.split() for line in (tmp_path / "reads").read_text().splitlines()]
    assert str(os.getpid()) not in {process for process, _ in reads}
    assert len({process for process, _ in reads}) == 2
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


@pytest.mark.parametrize("partition_rows", [1, 7, 30, 5000])
def test_passes_have_the_sums_of_ranges_in_memory(client, rng, partition_rows, monkeypatch):
    """For ranges within partitions, over several of them, and at their bounds."""
    monkeypatch.setattr("pymc_sgmcmc.posterior.posterior.CHUNK_ELEMENTS", 120)
    values = {"X": rng.normal(size=(65, 3)), "y": rng.integers(2, size=65)}
    rows = CountedRows(values, rows=partition_rows)
    local, at = Posterior(in_memory(values)), rng.normal(size=3)
    with pm.Model() as model:
        logistic(*rows.head("X", "y", rows=17))
    remote = Posterior(model, rows=rows)
    remote.source.client = client
    remote.check_rows()
    for found, exact in zip(
        remote.log_density_and_gradient(at), local.log_density_and_gradient(at), strict=True
    ):
        np.testing.assert_array_equal(found, exact)


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


def check_kills(client, kills, longest, model, step, expected, **settings):
    """Kill workers at random moments, in runs one after another, until there were so many."""
    rng, done, ended = np.random.default_rng(), [], Event()

    def kill():
        while len(done) < kills and not ended.wait(rng.uniform(0, longest)):
            # Dask does not start a worker again that was killed while it started.
            nannies = client.cluster.workers.values()
            alive = client.cluster.scheduler.workers
            pids = [
                nanny.pid
                for nanny in nannies
                if nanny.worker_address in alive and nanny.process.status.name == "running"
            ]
            if len(pids) == len(nannies):
                with suppress(ProcessLookupError):
                    # Dask takes SIGTERM for the wish that there is one worker less.
                    os.kill(rng.choice(pids), signal.SIGKILL)
                    done.append(True)

    killer = Thread(target=kill)
    killer.start()
    try:
        while len(done) < kills:
            check_same(draws_of(model, step, client=client, **settings), expected)
    finally:
        ended.set()
        killer.join()


KILLED = {"draws": 600, "tune": 100, "chains": 3}


def killed_run(arrays, source):
    """A run of some seconds, of which each run of transitions is a task."""
    step = partial(STEPS["SGLD"], thin=20)
    expected = draws_of(in_memory(arrays), step, **KILLED)
    if not source:
        with in_memory(arrays) as model:
            return model, step(), expected
    rows = CountedRows(arrays, rows=300)
    rows.memory = 20_000_000
    with on_source(rows) as model:
        made = step(rows=rows)
    on_rows = draws_of(model, made, **KILLED)
    np.testing.assert_array_equal(on_rows["posterior"]["beta"], expected["posterior"]["beta"])
    return model, made, on_rows  # Its moments are summed in runs of this memory.


@pytest.mark.parametrize("source", [False, True])
def test_workers_that_are_killed(client, arrays, source, short_tasks):
    model, step, expected = killed_run(arrays, source)
    check_kills(client, 2, 2.0, model, step, expected, **KILLED)


@pytest.mark.slow
@pytest.mark.parametrize("source", [False, True])
def test_workers_that_are_killed_20_times(client, arrays, source, short_tasks):
    model, step, expected = killed_run(arrays, source)
    check_kills(client, 20, 5.0, model, step, expected, **KILLED)


@pytest.mark.slow
def test_workers_that_are_killed_in_the_set_up(client, arrays):
    rows = CountedRows(arrays, rows=100)
    step = partial(STEPS["SGLDCV"], rows=rows)
    expected = draws_of(on_source(rows), step, **KILLED)
    check_kills(client, 5, 6.0, on_source(rows), step, expected, **KILLED)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_numbers_of_workers(arrays, expected, count, short_tasks):
    with workers(count) as client:
        for name in FOUR:
            found = draws_of(in_memory(arrays), STEPS[name], client=client)
            check_same(found, expected(name))
            rows = CountedRows(arrays, rows=300)
            step = partial(STEPS[name], rows=rows)
            check_same(draws_of(on_source(rows), step, client=client), expected(name))


# --- What goes wrong ----------------------------------------------------------------------------


class Deadly(CountedRows):
    """Rows of which a partition ends the worker that reads it, or cannot be read there."""

    def __init__(self, arrays, error=None):
        super().__init__(arrays, rows=700)
        self.here, self.error = os.getpid(), error
        self.armed = False

    def select(self, number, within, names):
        if self.armed and number == 2 and os.getpid() != self.here:
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
    client.wait_for_workers(2)


@pytest.mark.parametrize("error", [MemoryError("full"), RowsError("The file has vanished.")])
def test_errors_of_rows_keep_the_draws(client, arrays, error, short_tasks):
    rows = Deadly(arrays, error)
    # Rows of partition 2 are first read in a later stretch: the draws before it are kept.
    rows.memory = 1
    model, step = armed(rows, partial(STEPS["SGLD"], batch_size=1, thin=1))
    with pytest.raises(ChainProcessError, match=r"Chain \d failed .* (full|vanished)") as caught:
        draws_of(model, step, client=client, tune=0, draws=400, chains=1)
    assert caught.value.__cause__.args == error.args
    assert caught.value.idata["posterior"].sizes["draw"] > 0


def test_errors_of_a_chain_are_raised(client, arrays):
    with in_memory(arrays) as model:
        made = SGLD(batch_size=100, step_size=1e30, preconditioner="identity", **NUMBA)
    with pytest.raises(NonFinitePositionError, match="too large") as caught:
        draws_of(model, made, client=client)
    assert "This was in chain" in caught.value.__notes__[-1]


def test_chains_that_fail_after_tuning(client, arrays, short_tasks):
    """The draws that were not made are NaN, as in this process."""
    with in_memory(arrays) as model:
        made = SGLD(
            batch_size=100,
            step_size=lambda t: np.where(t < 50, 1e-4, 1e30),
            preconditioner="identity",
            thin=1,
            **NUMBA,
        )
    runs = [draws_of(model, made, client=each) for each in (None, client)]
    assert np.isnan(runs[0]["posterior"]["beta"][:, -1]).all()
    check_same(*runs[::-1])


def interrupting(monkeypatch, after, act):
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
    interrupting(monkeypatch, 8, lambda: os.kill(os.getpid(), signal.SIGINT))
    settings = {"tune": 0, "draws": 100_000, "chains": 2}
    found = draws_of(in_memory(arrays), STEPS["SGLD"], client=client, **settings)
    count = found["posterior"].sizes["draw"]
    assert 0 < count < 100_000
    settings["draws"] = count
    expected = draws_of(in_memory(arrays), STEPS["SGLD"], **settings)
    np.testing.assert_array_equal(found["posterior"]["beta"], expected["posterior"]["beta"])


def test_a_client_that_is_closed_during_the_run(client, arrays, short_tasks, monkeypatch):
    with distributed.Client(client.cluster, set_as_default=False) as own:
        interrupting(monkeypatch, 8, own.close)
        with pytest.raises(ChainProcessError, match=r"closed.* Make a new client") as caught:
            draws_of(in_memory(arrays), STEPS["SGLD"], client=own, tune=0, draws=100_000)
    assert caught.value.idata["posterior"].sizes["draw"] > 0


def test_a_cluster_without_workers(arrays, monkeypatch):
    monkeypatch.setattr(cluster, "SECONDS_WITHOUT_WORKERS", 0.5)
    monkeypatch.setattr(module, "SECONDS_A_TASK", 0.0)
    with workers(1) as client:
        interrupting(monkeypatch, 3, lambda: client.cluster.scale(0))
        with pytest.raises(ChainProcessError, match=r"no worker for 0\.5 seconds") as caught:
            draws_of(in_memory(arrays), STEPS["SGLD"], client=client, tune=0, draws=100_000)
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
