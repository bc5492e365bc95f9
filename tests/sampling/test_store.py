"""A stored run that was stopped goes on, and ends with the draws of one that was not stopped."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pymc as pm
import pytest

pytest.importorskip("zarr", minversion="3", reason="a store needs zarr 3")

from pymc_sgmcmc import (
    MALA,
    PSGLD,
    SGLD,
    SGLDCV,
    LocalSampling,
    PolynomialDecay,
    read_store,
    sample,
)
from pymc_sgmcmc.chain import Chain
from pymc_sgmcmc.errors import ChainProcessError, StoreError
from pymc_sgmcmc.sampling import resume, zarr_file
from pymc_sgmcmc.sampling import store as stores
from tests.sampling.test_sample import (
    NUMBA,
    SMALL,
    check_same,
    interrupted_in,
    kill_a_chain,
    stop_when_long,
)
from tests.support import sampling
from tests.support.models import logistic_data, logistic_model, two_variable_model
from tests.support.samplers import SAMPLERS

pytestmark = [
    pytest.mark.usefixtures("without_compiler", "many_blocks"),
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="needs fork and signals"
    ),
    # Python warns of threads at a fork, which numerical libraries have.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

# What a test replaces is replaced in forked processes too.
ours = partial(sampling.sample, run=sample, mp_ctx="fork")

RUN_LENGTH = 7
"""Runs of draws in these tests are at most so long. Each is a block."""


@pytest.fixture
def many_blocks(monkeypatch):
    length = Chain.run_length
    monkeypatch.setattr(Chain, "run_length", lambda chain: min(RUN_LENGTH, length(chain)))
    for name, value in {
        "SECONDS_A_BLOCK": 0.0,
        "SHARE_A_BLOCK": 0.0,
        "SHARE_OF_WRITING": np.inf,
        "SECONDS_TO_WAIT": 0.1,
    }.items():
        monkeypatch.setattr(stores, name, value)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.zarr"


class Killed(BaseException):
    """The process ends here, and nothing that follows is done."""


def kill_at(number, instant, monkeypatch):
    """Let the process end at a write to the disk: before, in the middle of, or after it."""
    write, calls = stores.write_file, []

    def write_or_end(file, content):
        calls.append(file)
        if len(calls) == number:
            if instant == "middle":
                file.with_name(f".{file.name}.tmp").write_bytes(content[: len(content) // 2])
            elif instant == "after":
                write(file, content)
            raise Killed
        write(file, content)

    monkeypatch.setattr(stores, "write_file", write_or_end)
    return calls


def stop(model, step, path, number=20, instant="middle", **settings):
    """Run until a write to the disk, at which the process ends."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        kill_at(number, instant, monkeypatch)
        with pytest.raises(Killed):
            ours(model, step, store=path, **settings)


def snapshot(path):
    """All files but locks, with their contents and times."""
    return {
        file: (file.read_bytes(), file.stat().st_mtime_ns)
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name not in (stores.LOCK, stores.OWNER)
    }


@pytest.fixture(scope="module")
def small():
    """A model, a step method, and its draws, of which two chains have 35 each."""
    model = logistic_model()
    return model, SGLD(model=model, thin=3, **SMALL)


# --- Bitwise ----------------------------------------------------------------------------------

ESTIMATORS = {
    "SGLDCV": partial(SGLDCV, batch_size=20, **NUMBA),
    "saga": partial(SGLD, gradient="saga", thin=2, **SMALL),
    "svrg": partial(SGLD, gradient="svrg", thin=2, **SMALL),
    "decay": partial(SGLD, **SMALL | {"step_size": PolynomialDecay(0.01, 10.0, 0.5)}),
    "MALA": partial(MALA, **NUMBA),
}
STEPS = {
    sampler.name: partial(
        sampler.step_class, **{"batch_size": 20, "gradient": "cv", "thin": 3} | sampler.settings,
        **NUMBA,
    )
    for sampler in SAMPLERS
} | ESTIMATORS  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_every_sampler_goes_on_bitwise(name, path):
    """As `pymc.sample`, after an end in the first chain, in another process, with more draws."""
    model = logistic_model()
    step = STEPS[name](model=model)
    # SAGA draws one by one in `pm.sample`, so that its running bias has other last digits there.
    expected = (ours if name == "saga" else sampling.sample)(model, step, draws=15)
    stop(model, step, path, 17, draws=15)
    assert len(list((path / "chain_0").glob("commit*"))) > 3
    check_same(ours(model, step, store=path, resume=True, cores=2, draws=15), expected)
    expected = ours(model, step, draws=25)
    check_same(ours(model, step, store=path, resume=True, draws=25), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "tune", "writes"),
    [
        (partial(PSGLD, batch_size=20, thin=40, **NUMBA), 30, 11),
        (partial(SGLDCV, batch_size=20, thin=2, **NUMBA), 150, 52),
    ],
    ids=["PSGLD", "SGLDCV"],
)
def test_adaptation_goes_on_in_tuning(make, tune, writes, path):
    """The preconditioner has changed before the process ends, or the step size."""
    model = two_variable_model()
    step = make(model=model)
    settings = {"tune": tune, "draws": 20, "chains": 1, "discard_tuned_samples": False}
    expected = ours(model, step, **settings)
    stop(model, step, path, writes, **settings)
    check_same(ours(model, step, store=path, resume=True, **settings), expected)


@pytest.mark.slow  # It compiles for a long time.
def test_local_variables_go_on(path):
    rng = np.random.default_rng(2)
    group = np.arange(40) % 8
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 3, shape=2)
        u = pm.Normal("u", 0, 1, shape=8)
        pm.Normal("y", beta[0] + beta[1] * rng.normal(size=40) + u[group], 1.0, observed=group / 4)
        step = SGLD(
            step_size=0.01,
            preconditioner="identity",
            thin=3,
            batch_size=2,
            gradient=LocalSampling("u", transitions=2, control_variates=False),
        )
    expected = sampling.sample(model, step)
    stop(model, step, path, 20)
    check_same(ours(model, step, store=path, resume=True), expected)


@pytest.mark.parametrize("instant", ["before", "middle", "after"])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6, 7, 17, 18, 19, 27, 28, 29])
def test_an_end_at_any_write(number, instant, small, path):
    """Of the set-up, and of the block, the state and the commit of blocks of both chains."""
    model, step = small
    settings = {"draws": 25, "tune": 10}
    stop(model, step, path, number, instant, **settings)
    if number > 3:
        check_same(ours(model, step, store=path, resume=True, **settings), ours(model, step))
    else:  # There may be no header yet.
        again = ours(model, step, store=path, resume=True, **settings)
        assert again["posterior"].sizes["draw"] == 25


def test_an_end_while_draws_are_appended_loses_none(small, path, monkeypatch):
    """The last block is drawn again, and counts until there are as many draws."""
    model, step = small
    with monkeypatch.context() as patch:
        patch.setattr(stores, "SECONDS_A_BLOCK", 1e9)
        ours(model, step, store=path)
    for number in (2, 3, 4, 5, 6):
        stop(model, step, path, number, resume=True, draws=40)
        sizes = read_store(path, model=model)["posterior"].sizes
        assert sizes["chain"] == 2
        assert sizes["draw"] >= 25
    check_same(ours(model, step, store=path, resume=True, draws=40), ours(model, step, draws=40))


def test_several_appends_are_one_long_run(small, path):
    model, step = small
    ours(model, step, store=path, draws=3)
    for draws in (4, 9, 31, 50):
        appended = ours(model, step, store=path, resume=True, draws=draws, cores=1 + draws % 2)
        check_same(appended, ours(model, step, draws=draws))


@pytest.mark.slow
def test_in_another_process_with_another_seed_of_hashes(path):
    """The set-up is computed again there, and compared."""
    script = (
        "import sys\n"
        "from pymc_sgmcmc import SGLDCV, sample\n"
        "from tests.support.models import logistic_model\n"
        "with logistic_model():\n"
        "    sample(40, tune=20, step=SGLDCV(batch_size=20, thin=2), chains=2, cores=1, quiet=True,"
        " random_seed=8, store=sys.argv[1])\n"
    )
    flags = f"{os.environ['PYTENSOR_FLAGS']},cxx="
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTENSOR_FLAGS": flags}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script, path], check=True, cwd=root, env=environment)
    model = logistic_model()
    step = SGLDCV(model=model, batch_size=20, thin=2)
    settings = {"tune": 20, "draws": 60, "seed": 8}
    appended = ours(model, step, store=path, resume=True, **settings)
    check_same(appended, ours(model, step, **settings))


def test_interrupt_and_dead_process(small, path, monkeypatch):
    """What had not been stored is stored where Ctrl-C or the end of another chain stops a chain."""
    model, step = small
    monkeypatch.setattr(stores, "SECONDS_A_BLOCK", 1e9)
    with pytest.MonkeyPatch.context() as patch:
        interrupted_in(step, 5, patch)
        idata = ours(model, step, store=path)
    assert 0 < idata["posterior"].sizes["draw"] < 25
    check_same(read_store(path, model=model), idata)
    check_same(ours(model, step, store=path, resume=True), ours(model, step))


def test_a_dead_process_of_a_chain(small, path, monkeypatch):
    model, step = small
    with pytest.MonkeyPatch.context() as patch:
        stop_when_long(patch, kill_a_chain, draws=100)
        with pytest.raises(ChainProcessError, match="exit code -9") as raised:
            ours(model, step, store=path, draws=20_000, cores=2)
    draws = raised.value.idata["posterior"].sizes["draw"]
    assert draws >= 80
    assert not multiprocessing.active_children()
    stored = read_store(path, model=model)["posterior"]["beta"].sel(chain=0)
    assert stored.sizes["draw"] >= 80
    monkeypatch.undo()


@pytest.mark.slow
def test_chain_that_diverges(path, caplog):
    """Its last draws are missing, and its warning is logged again."""
    model = logistic_model()
    step = SGLD(model=model, thin=20, **SMALL | {"step_size": 200.0})
    settings = {"tune": 0, "draws": 40, "quiet": False}
    expected = ours(model, step, **settings)
    assert np.isnan(expected["posterior"]["beta"]).any()
    before = [record.message for record in caplog.records if "NaN" in record.message]
    check_same(ours(model, step, store=path, **settings), expected)
    caplog.clear()
    check_same(ours(model, step, store=path, resume=True, **settings), expected)
    assert [record.message for record in caplog.records if "NaN" in record.message] == before
    longer = {**settings, "draws": 60}
    check_same(ours(model, step, store=path, resume=True, **longer), ours(model, step, **longer))


# --- Files that are damaged -------------------------------------------------------------------


def damage(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("blocks", "chains"), [((3, 6, 5), [1, 2]), ((6, 6, 1), [0, 1]), ((0, 6, 0), [1])]
)
def test_chains_keep_their_numbers_where_others_are_left_out(blocks, chains, small, path):
    model, step = small
    whole = ours(model, step, store=path, chains=3)["posterior"]["beta"]
    for chain, number in enumerate(blocks):
        for commit in sorted((path / f"chain_{chain}").glob("commit_*"))[number:]:
            commit.unlink()
    idata = read_store(path, model=model)
    assert list(idata["sample_stats"]["chain"].values) == chains
    draws = idata["posterior"]["beta"]
    np.testing.assert_array_equal(draws, whole.sel(chain=chains)[:, : draws.sizes["draw"]])


@pytest.mark.parametrize("kind", ["block", "state", "commit"])
@pytest.mark.parametrize("place", [-1, -2, 1])
@pytest.mark.parametrize("how", [damage, Path.unlink, lambda file: file.write_bytes(b"")])
def test_damaged_files_are_found(kind, place, how, small, path):
    """What follows them is drawn again."""
    model, step = small
    stop(model, step, path, 18)
    files = sorted((path / "chain_0").glob(f"{kind}_*"))
    how(files[min(place, len(files) - 1)])
    check_same(ours(model, step, store=path, resume=True), ours(model, step))
    check_same(read_store(path, model=model), ours(model, step))


def test_a_commit_that_was_changed_does_not_count(small, path):
    model, step = small
    ours(model, step, store=path)
    commit = sorted((path / "chain_0").glob("commit_*"))[-2]
    record = json.loads(commit.read_bytes())
    record["last"] += 1
    commit.write_text(json.dumps(record, indent=1, sort_keys=True))
    check_same(ours(model, step, store=path, resume=True), ours(model, step))
    check_same(read_store(path, model=model), ours(model, step))


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "file"
    stores.write_file(file, b"old")

    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            stores.write_file(file, b"new and longer")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]
    stores.write_file(file, b"new")
    assert file.read_bytes() == b"new"


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_file_that_is_read_is_replaced_when_it_is_free(is_waiting, tmp_path, monkeypatch):
    """Windows refuses to replace a file which another process reads."""
    new, old = tmp_path / "new", tmp_path / "old"
    new.write_bytes(b"new")
    refusals, replace = [PermissionError(), PermissionError()], Path.replace

    def refused_twice(path, target):
        if refusals:
            raise refusals.pop()
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refused_twice)
    if is_waiting:
        stores._replace(new, old, is_waiting=True)
        assert old.read_bytes() == b"new"
    else:
        with pytest.raises(PermissionError):
            stores._replace(new, old, is_waiting=False)


def test_damaged_set_up_is_an_error(small, path):
    model, step = small
    ours(model, step, store=path)
    damage(path / "setup.zip")
    for run in (partial(ours, model, step, store=path, resume=True), partial(read_store, path)):
        with pytest.raises(StoreError, match=r"is damaged: ValueError setup\.zip"), model:
            run()


def pipe(file):
    file.unlink()
    os.mkfifo(file)


def with_content(change):
    """Change what the set-up of a store has, and its checksum."""

    def changed(file):
        before = stores.read_setup(file.parent)
        change(before)
        content = stores._packed(before, "setup")
        file.write_bytes(content)
        attributes = {stores.MARK: stores.FORMAT, "setup": stores._checksum(content)}
        (file.parent / "zarr.json").write_bytes(stores.group_metadata(attributes))

    return changed


OF_OTHERS = [
    ("setup.zip", pipe),
    ("setup.zip", with_content(lambda content: content.pop("identity"))),
    ("setup.zip", with_content(lambda content: content["identity"].pop("setting"))),
    ("setup.zip", with_content(lambda content: content.update(settings=3))),
    ("zarr.json", pipe),
    ("zarr.json", lambda file: file.write_text("[" * 10**5)),
    ("zarr.json", lambda file: file.write_text("{}")),
    ("lock", lambda file: (file.unlink(missing_ok=True), file.mkdir())),
]


def test_stores_that_others_made_are_errors(small, path, tmp_path):
    model, step = small
    ours(model, step, store=path)
    for number, (name, change) in enumerate(OF_OTHERS):
        other = tmp_path / f"other_{number}"
        shutil.copytree(path, other)
        change(other / name)
        said = r"damaged|no store|no draws|should be a file|is not that of the store"
        with pytest.raises(StoreError, match=said):
            ours(model, step, store=other, resume=True)
        if name != "lock":  # Reading takes none.
            with pytest.raises(StoreError, match=said):
                read_store(other, model=model)


def test_a_pipe_in_place_of_a_block_is_no_block(small, path):
    model, step = small
    ours(model, step, store=path)
    for kind in ("commit", "block"):
        pipe(sorted((path / "chain_0").glob(f"{kind}_*"))[-1])
        check_same(ours(model, step, store=path, resume=True), ours(model, step))


# --- Other runs are refused -------------------------------------------------------------------


def changed_prior():
    X, y = logistic_data()
    with pm.Model(coords={"feature": ["intercept", "age", "height"]}) as model:
        beta = pm.Normal("beta", 0.0, 3.0, dims="feature")
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    return model


def changed_data():
    X, y = logistic_data()
    X[7, 1] += 1e-9
    with pm.Model(coords={"feature": ["intercept", "age", "height"]}) as model:
        beta = pm.Normal("beta", 0.0, 2.0, dims="feature")
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    return model


def changed_observations():
    X, y = logistic_data()
    y[7] = ~y[7]
    with pm.Model(coords={"feature": ["intercept", "age", "height"]}) as model:
        beta = pm.Normal("beta", 0.0, 2.0, dims="feature")
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    return model


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (changed_prior, {}, "variable `beta` has another definition[^;]*$"),
        (changed_data, {}, r"data `y(, array \d)?` is another one"),
        (changed_observations, {}, r"data `y(, array \d)?` is another one"),
        (two_variable_model, {}, "variable `beta` is missing; .*variable `sigma` is new"),
        (None, {"tune": 11}, "setting `tune` is 11 in place of 10[^;]*$"),
        (None, {"chains": 3}, "setting `chains` is 3 in place of 2"),
        (None, {"seed": 4}, "setting `random_seed` is another one[^;]*$"),
        (None, {"initvals": {"beta": np.ones(3)}}, "initial values `chain 0` is another one"),
        (None, {"step": {"thin": 2}}, "setting `thin` is 2 in place of 3; argument `thin`"),
        (None, {"step": {"step_size": 2e-3}}, "`step_size` is 0.002 in place of 0.001"),
        (None, {"step": {"gradient": "svrg"}}, "setting `gradient` is 'svrg' in place of 'plain'"),
        (None, {"step_class": PSGLD}, "setting `step` is 'PSGLD' in place of 'SGLD'"),
        (None, {"draws": 10}, "has 25 draws already, more than `draws=10`"),
    ],
)
def test_other_runs_are_refused(change, settings, message, small, path):
    model, step = small
    ours(model, step, store=path)
    before = snapshot(path)
    settings = dict(settings)
    of_step = settings.pop("step", None)
    step_class = settings.pop("step_class", None)
    if change or of_step or step_class:
        model = model if change is None else change()
        arguments = {"thin": 3, **SMALL, **(of_step or {})}
        if step_class:
            arguments = {"batch_size": 20, "thin": 3}
        if not change:  # The step method is another one, which makes no transition.
            arguments["compile_kwargs"] = sampling.QUICK
        step = (step_class or SGLD)(model=model, **arguments)
    with pytest.raises(StoreError, match=message) as raised:
        ours(model, step, store=path, resume=True, **settings)
    assert "set-up number" not in str(raised.value)
    assert snapshot(path) == before
    if change:
        with pytest.raises(StoreError, match="The model is not that of the store"):
            read_store(path, model=model)


def test_other_versions_and_functions_are_refused(small, path, monkeypatch):
    model, _ = small
    make = partial(SGLD, model=model, **SMALL)
    slow = make(step_size=lambda k: 1e-3 / (1 + k))
    ours(model, slow, store=path)
    ours(model, make(step_size=lambda k: 1e-3 / (1 + k)), store=path, resume=True)
    with pytest.raises(StoreError, match="argument `step_size` is another one"):
        ours(model, make(step_size=lambda k: 1e-3 / (2 + k)), store=path, resume=True)
    monkeypatch.setattr("pymc_sgmcmc.sampling.identity.version", lambda name: "0.0.0")
    with pytest.raises(StoreError, match=r"version `numpy` is '0\.0\.0' in place of"):
        ours(model, slow, store=path, resume=True)


@pytest.mark.parametrize("factor", [1 + 1e-13, 1 + 1e-3])
def test_a_set_up_that_differs(factor, small, path, monkeypatch, caplog):
    """Other last digits are logged, since another processor has others. More is an error."""
    model, step = small
    ours(model, step, store=path)
    numbers = resume.numbers_of
    monkeypatch.setattr(
        resume,
        "numbers_of",
        lambda *arguments: {name: x * factor for name, x in numbers(*arguments).items()},
    )
    if factor < 1 + 1e-6:
        with caplog.at_level(logging.WARNING, "pymc"):
            ours(model, step, store=path, resume=True, quiet=False)
        assert "in last digits from that of the store, in preconditioner, step siz" in caplog.text
    else:
        with pytest.raises(StoreError, match="set-up number `first draw` is another one"):
            ours(model, step, store=path, resume=True)


def test_only_one_process_at_a_time(small, path):
    model, step = small
    with stores._locked(make_store(model, step, path), path):
        with pytest.raises(StoreError, match="is in use by the process"):
            ours(model, step, store=path, resume=True)
        assert read_store(path, model=model)["posterior"].sizes["draw"] == 25
    # The process of a chain may outlive its parent.
    with (
        stores._locked(path / "chain_1", path),
        pytest.raises(StoreError, match="is in use by the process"),
    ):
        ours(model, step, store=path, resume=True)
    ours(model, step, store=path, resume=True)


def make_store(model, step, path):
    ours(model, step, store=path)
    return path


def test_the_lock_of_a_dead_process_is_taken_over(small, path):
    model, step = small
    ours(model, step, store=path)
    script = (
        "import os, signal, sys\n"
        "from filelock import FileLock\n"
        "FileLock(sys.argv[1]).acquire()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for folder in (path, path / "chain_0"):
        subprocess.run([sys.executable, "-c", script, folder / stores.LOCK], check=False)
    check_same(ours(model, step, store=path, resume=True), ours(model, step))


# --- Arguments --------------------------------------------------------------------------------


def test_places_that_are_refused_are_not_touched(small, tmp_path):
    model, step = small
    run = partial(ours, model, step)
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    (folder / "thesis.txt").write_text("important")
    file.write_text("important")
    before = snapshot(tmp_path)
    for place in (folder, file):
        with pytest.raises(FileExistsError, match=r"something at .* already"):
            run(store=place)
        with pytest.raises(StoreError, match="is no store of `sample`, and nothing"):
            run(store=str(place), resume=True)
        with pytest.raises(StoreError, match="is no store of `sample`"):
            read_store(place, model=model)
    with pytest.raises(FileNotFoundError, match="There is no store at"):
        run(store=tmp_path / "other", resume=True)
    with pytest.raises(FileNotFoundError, match="There is no store at"):
        read_store(tmp_path / "other", model=model)
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere for the store"):
        run(store=tmp_path / "nowhere" / "run.zarr")
    with pytest.raises(TypeError, match="`store` should be the path of a store, but got None"):
        read_store(None, model=model)
    with pytest.raises(ValueError, match="`resume=True` needs the path of a store"):
        run(resume=True)
    with pytest.raises(TypeError, match="`resume` should be True or False, but got 'yes'"):
        run(store=tmp_path / "other", resume="yes")
    for store in (3, "", True, "\0"):
        with pytest.raises(TypeError, match="`store` should be the path of a folder"):
            run(store=store)
    for store in ("/proc/x", "x" * 5000):
        with pytest.raises(ValueError, match="`store` should be a path where a folder can be made"):
            run(store=store)
    with pytest.raises(TypeError, match="`store` should be the path of a store, but got None"):
        read_store(None, model=model)
    with pytest.raises(ValueError, match="`store` takes one run, but `accuracy`"):
        run(store=tmp_path / "other", accuracy=0.1)
    assert snapshot(tmp_path) == before


def test_a_store_of_another_zarr_or_format(small, path, monkeypatch):
    import zarr

    model, step = small
    zarr.create_group(path, attributes={"title": "of somebody else"})
    with pytest.raises(StoreError, match="is no store of `sample`"):
        ours(model, step, store=path, resume=True)
    shutil.rmtree(path)
    ours(model, step, store=path)
    header = json.loads((path / "zarr.json").read_text())
    header["attributes"][stores.MARK] = 99
    (path / "zarr.json").write_text(json.dumps(header))
    with pytest.raises(StoreError, match="has the format 99, but this version"):
        read_store(path, model=model)


def test_without_zarr(small, path, monkeypatch):
    model, step = small
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ImportError, match=r'pip install "pymc_sgmcmc\[store\]"'):
        ours(model, step, store=path)
    assert not path.exists()


# --- The disk ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("room", [0, 6_000, 600_000])
def test_a_full_disk(cores, room, small, path, monkeypatch):
    """Everything that was written can be read, and the run goes on when there is room again."""
    model, step = small
    written = []
    fsync = os.fsync

    def full(number):
        written.append(os.fstat(number).st_size)
        if sum(written) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            OSError, match=r"No space left .*could not be .*`resume=True`"
        ) as raised:
            ours(model, step, store=path, cores=cores, draws=60)
    assert raised.value.errno == errno.ENOSPC
    assert not list(path.rglob("*.tmp"))
    whole = ours(model, step, draws=60)
    if room > 10_000 and cores == 1:
        stored = read_store(path, model=model)["posterior"]
        draws = stored.sizes["draw"]
        expected = whole["posterior"].isel(chain=slice(1), draw=slice(draws))
        np.testing.assert_array_equal(stored["beta"], expected["beta"])
    check_same(ours(model, step, store=path, resume=True, draws=60), whole)


# --- What a store holds -----------------------------------------------------------------------


def test_nothing_is_pickled(small, path, monkeypatch):
    model, step = small

    def refuse(*arguments, **settings):
        raise AssertionError("a store was read by pickle")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(np, "load", refuse)
    stop(model, step, path)
    for file in path.rglob("*"):
        if file.suffix == ".zip":
            arrays, attributes = zarr_file.unpacked(file)
            assert all(values.dtype.kind in "biuf" for values in arrays.values())
            json.dumps(attributes)
    check_same(ours(model, step, store=path, resume=True), ours(model, step))


def test_blocks_are_zip_files_of_zarr(small, path):
    import zarr

    model, step = small
    idata = ours(model, step, store=path)
    parts = []
    for file in sorted((path / "chain_1").glob("block_*.zip")):
        with zarr.storage.ZipStore(file, mode="r") as opened:
            parts.append(zarr.open_group(opened, mode="r")["draws.values.beta"][...])
        with zipfile.ZipFile(file) as archive:  # The bytes do not depend on the time of day.
            assert {entry.date_time[0] for entry in archive.infolist()} == {1980}
    found = np.concatenate(parts)[10:]
    np.testing.assert_array_equal(found, idata["posterior"]["beta"].sel(chain=1))


def test_blocks_are_few(small, path, monkeypatch):
    """A short run is one block, and one in which writing takes long has few."""
    model, step = small
    monkeypatch.setattr(stores, "SECONDS_A_BLOCK", 2.0)
    ours(model, step, store=path)
    assert len(list(path.rglob("block_*"))) == 2
    assert not list(path.rglob("state_*"))
    shutil.rmtree(path)
    monkeypatch.setattr(stores, "SECONDS_A_BLOCK", 0.0)
    ours(model, step, store=path)
    # States of the last two blocks that have one are kept.
    assert len(list(path.rglob("block_*"))) > 8
    assert len(list((path / "chain_0").glob("state_*"))) <= 2


def test_what_a_process_left_half_written_is_removed(small, path):
    model, step = small
    stop(model, step, path)
    assert list(path.rglob(".*.tmp"))
    ours(model, step, store=path, resume=True)
    assert not list(path.rglob(".*.tmp"))


def test_the_seed_may_be_left_out(small, path):
    model, step = small
    stop(model, step, path, seed=None)
    first = ours(model, step, store=path, resume=True, seed=None)
    generator = np.random.Generator(np.random.MT19937(5))
    second = path.with_name("second.zarr")
    stop(model, step, second, seed=generator)
    resumed = ours(model, step, store=second, resume=True, seed=None)
    check_same(resumed, ours(model, step, seed=np.random.Generator(np.random.MT19937(5))))
    assert first["posterior"].sizes["draw"] == 25


def test_kept_names_and_tuning(small, path):
    model, step = small
    ours(model, step, store=path)
    settings = {"var_names": ["beta"], "discard_tuned_samples": False}
    expected = ours(model, step, **settings)
    check_same(ours(model, step, store=path, resume=True, **settings), expected)
    with model:
        check_same(read_store(str(path), **settings), expected)
