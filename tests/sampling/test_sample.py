"""`sample` has the draws of `pymc.sample`, and keeps those of a run that was stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pymc as pm
import pymc.sampling.mcmc as sampling_of_pymc
import pytensor.tensor as pt
import pytest
from pymc.progress_bar.rich_progress import RichProgressBackend
from pytensor.compile.ops import wrap_py
from pytensor.conditional.op import ifelse

from pymc_sgmcmc import MALA, SGLD, SGLDCV, ULA, PolynomialDecay, sample, zero_variance
from pymc_sgmcmc.errors import ChainProcessError, ModelError
from pymc_sgmcmc.record import MOMENTS
from pymc_sgmcmc.sampling import run as run_module
from pymc_sgmcmc.sampling import workers
from pymc_sgmcmc.sampling.progress import running_r_hat
from pymc_sgmcmc.sampling.trace import Recorder
from tests.support import sampling
from tests.support.models import logistic_model, two_variable_model
from tests.support.samplers import SAMPLERS

pytestmark = pytest.mark.usefixtures("without_compiler")

NUMBA = {"compile_kwargs": sampling.NUMBA}
SMALL = {"batch_size": 20, "step_size": 1e-3, "preconditioner": "identity", **NUMBA}


ours = partial(sampling.sample, run=sample)


@pytest.fixture(scope="module")
def small():
    """A model and a step method, which runs leave as they found it."""
    model = logistic_model()
    return model, SGLD(model=model, **SMALL)


@pytest.fixture(scope="module")
def of_two():
    """The same on a model of several variables."""
    model = two_variable_model()
    return model, SGLD(model=model, **SMALL)


DIFFERENT = {"created_at", "sampling_time", "sgmcmc_setup_seconds", "sgmcmc_setup_passes"}
"""These attributes differ between runs that are the same."""


def check_same(mine, expected):
    """Same groups, names, types, dimensions, attributes and draws."""
    assert set(mine.children) == set(expected.children)
    for group, dataset in expected.children.items():
        assert set(mine[group].data_vars) == set(dataset.data_vars)
        for name, values in dataset.data_vars.items():
            found = mine[group][name]
            assert (found.dims, found.dtype) == (values.dims, values.dtype)
            if group == "posterior":  # NumPy's exponential has other last digits than Numba's.
                np.testing.assert_allclose(found, values, rtol=1e-14)
            else:
                np.testing.assert_array_equal(found, values)
        for name in dataset.coords:
            np.testing.assert_array_equal(mine[group].coords[name], dataset.coords[name])
        attributes = set(dataset.attrs) - DIFFERENT
        assert {name: mine[group].attrs[name] for name in attributes} == {
            name: dataset.attrs[name] for name in attributes
        }


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.name)
def test_draws_of_every_sampler(sampler):
    model = logistic_model()
    settings = {"batch_size": 20, "gradient": "cv", "thin": 3, **NUMBA, **sampler.settings}
    step = sampler.step_class(model=model, **settings)
    expected = sampling.sample(model, step)
    for cores in (1, 2):
        check_same(ours(model, step, cores=cores), expected)


@pytest.mark.parametrize(
    "make",
    [
        partial(SGLD, gradient="saga", thin=2, **SMALL),
        partial(SGLD, gradient="svrg", thin=2, **SMALL),
        partial(SGLD, **SMALL | {"step_size": PolynomialDecay(0.01, 10.0, 0.5)}),
        partial(SGLDCV, batch_size=20, **NUMBA),
        partial(ULA, **NUMBA),
        partial(MALA, **NUMBA),
    ],
    ids=["saga", "svrg", "decay", "computed", "ULA", "MALA"],
)
def test_draws_of_estimators_and_schedules(make):
    model = two_variable_model()
    step = make(model=model)
    check_same(ours(model, step), sampling.sample(model, step))


@pytest.mark.parametrize("tune", [0, 2, 25])
def test_tuning_is_kept_where_asked_for(tune):
    model = two_variable_model()
    step = SGLDCV(model=model, batch_size=20, **NUMBA)
    settings = {"tune": tune, "draws": 3, "discard_tuned_samples": False}
    check_same(ours(model, step, **settings), sampling.sample(model, step, **settings))


def test_names_and_initial_values(of_two):
    model, step = of_two
    names = [variable.name for variable in model.free_RVs]
    settings = {"var_names": names[:1], "initvals": {names[0]: np.array(0.5)}}
    check_same(ours(model, step, **settings), sampling.sample(model, step, **settings))


@pytest.mark.slow
def test_deterministics_of_many_shapes():
    with pm.Model(coords={"row": range(4)}) as model:
        x = pm.Normal("x", shape=(3, 2))
        p = pm.Dirichlet("p", np.ones(3))
        pm.Deterministic("constant", pm.math.constant(np.arange(2.0)))
        pm.Deterministic("product", x @ x.T + p)
        pm.Deterministic("joined", pm.math.concatenate([p, p[:1]]), dims="row")
        pm.Normal("y", x.sum() + p[0], observed=np.ones(50))
    step = SGLD(model=model, **SMALL)
    check_same(ours(model, step), sampling.sample(model, step))


def test_deterministics_that_have_no_axis_of_draws():
    """They are evaluated draw by draw, as is one where all draws at once fail at the end."""
    with pm.Model() as model:
        x = pm.Normal("x", shape=3)
        pm.Deterministic("positive", x[x > 0].sum())
        pm.Deterministic("chosen", ifelse(x[0] > 0, x, 2 * x))
        pm.Deterministic("squares", pt.linalg.lstsq(pt.eye(3) + pt.outer(x, x), x, -1.0)[0])
        pm.Deterministic("mask", x[np.array([True, False, True])])
        pm.Normal("y", x.sum(), observed=np.ones(50))
    step = SGLD(model=model, **SMALL)
    check_same(ours(model, step), sampling.sample(model, step))


def test_an_error_at_the_end_costs_no_draws(monkeypatch, of_two):
    model, step = of_two
    expected = ours(model, step)
    compiled = Recorder._compiled_at_once

    def broken(recorder, point):
        assert compiled(recorder, point) is not None
        return lambda *values: 1 / 0

    monkeypatch.setattr(Recorder, "_compiled_at_once", broken)
    check_same(ours(model, step), expected)


def test_functions_of_the_draws_are_of_the_variables_asked_for(of_two):
    model, step = of_two
    asked = {"log_likelihood": True, "log_prior": ["slope"]}
    idata = ours(model, step, idata_kwargs=asked, chains=1)
    assert list(idata["log_prior"].data_vars) == ["slope"]
    assert list(idata["log_likelihood"].data_vars) == ["y"]


def failing_at_the_end():
    raise RuntimeError("It failed.")


@pytest.mark.parametrize("run", [sample, pm.sample])
def test_the_trace_is_made_without_what_fails(run, monkeypatch, small):
    model, step = small
    expected = ours(model, step)
    monkeypatch.setattr(
        "pymc.sampling.mcmc.run_convergence_checks", lambda *_: failing_at_the_end()
    )
    with pytest.warns(UserWarning, match="with `compute_convergence_checks`: RuntimeError"):
        idata = sampling.sample(model, step, run=run, compute_convergence_checks=True)
    check_same(idata, expected)


def test_arguments_of_the_trace_that_pymc_refuses_cost_no_draws(small):
    model, step = small
    with pytest.warns(UserWarning, match="draws are kept, .* with `idata_kwargs`: TypeError"):
        idata = sampling.sample(model, step, idata_kwargs={"foo": 1})
    check_same(idata, ours(model, step))


def test_a_deterministic_that_fails_costs_no_other_variable():
    calls = []

    @wrap_py(itypes=[pt.dscalar], otypes=[pt.dscalar])
    def fails_late(x):
        calls.append(x)
        if len(calls) > 30:
            failing_at_the_end()
        return np.asarray(2 * x)

    with pm.Model() as model:
        x = pm.Normal("x")
        pm.Deterministic("twice", fails_late(x))
        pm.Normal("y", x, observed=np.ones(50))
    step = SGLD(model=model, **SMALL)
    with pytest.warns(UserWarning, match="`twice` and others could not be computed: Runtime"):
        idata = ours(model, step)
    assert idata["posterior"]["x"].shape == (2, 25)


def test_what_fails_after_the_run_costs_no_draws(monkeypatch):
    def accurately(draws_of, step, *_, **__):
        draws_of(step, checks=False)
        failing_at_the_end()

    model = logistic_model()
    monkeypatch.setattr(run_module, "sample_accurately", accurately)
    monkeypatch.setitem(
        run_module.AT_THE_END, "log_likelihood", lambda *_, **__: failing_at_the_end()
    )
    step = SGLDCV(model=model, compile_kwargs=sampling.QUICK)
    settings = {"accuracy": 0.1, "idata_kwargs": {"log_likelihood": True}}
    with (
        pytest.warns(UserWarning, match="`log_likelihood` was not computed"),
        pytest.warns(UserWarning, match="`accuracy` could not be stated"),
    ):
        check_same(ours(model, step, **settings), ours(model, step))


def test_chain_that_diverges_has_the_same_draws_and_warning(caplog):
    model = logistic_model()
    step = SGLD(model=model, thin=20, **SMALL | {"step_size": 200.0})
    settings = {"tune": 0, "draws": 40, "quiet": False}
    expected = sampling.sample(model, step, **settings)
    before = [record.message for record in caplog.records if "NaN" in record.message]
    caplog.clear()
    mine = ours(model, step, **settings)
    assert np.isnan(expected["posterior"]["beta"]).any()
    check_same(mine, expected)
    assert before
    assert [record.message for record in caplog.records if "NaN" in record.message] == before


# --- Runs that are stopped --------------------------------------------------------------------


def press_ctrl_c():
    """As a terminal does; the handler runs before this function returns."""
    signal.raise_signal(signal.SIGINT)


def interrupted_in(step, number, monkeypatch):
    """Let Ctrl-C be pressed in this process in the middle of a run of draws."""
    advance, calls = step.chain.advance, []

    def advance_and_press(*arguments):
        calls.append(1)
        if len(calls) == number:
            press_ctrl_c()
        return advance(*arguments)

    monkeypatch.setattr(step.chain, "advance", advance_and_press)


def check_kept(idata, whole, least, killed=()):
    """The draws are the first ones of the whole run, with moments of all transitions.

    A process that was killed takes its moments with it, and PyMC leaves out chains that are less
    than half as long as others.
    """
    chain = int(idata["posterior"]["chain"][0])
    draws = idata["posterior"].sizes["draw"]
    assert least <= draws < whole["posterior"].sizes["draw"]
    for group, name in [("posterior", "beta"), ("sample_stats", "gradient")]:
        expected = whole[group][name].sel(chain=[chain]).isel(draw=slice(draws))
        np.testing.assert_array_equal(idata[group][name].sel(chain=[chain]), expected)
    if set(idata["posterior"]["chain"].values) <= set(killed):
        return
    assert MOMENTS in idata.children
    assert np.isfinite(zero_variance(idata, moments="only").mean["position"]).all()


def test_interrupt_keeps_draws_and_moments(monkeypatch, caplog):
    model = logistic_model()
    step = SGLD(model=model, thin=4, **SMALL)
    monkeypatch.setattr(type(step.chain), "run_length", lambda chain: 100)
    whole = ours(model, step, draws=2000)
    interrupted_in(step, 6, monkeypatch)
    idata = ours(model, step, draws=2000, quiet=False)
    assert "Ctrl-C: the trace has 1 of 2 chains, with 590 of 2000 draws each." in caplog.text
    check_kept(idata, whole, least=500)
    assert idata["posterior"].sizes == {"chain": 1, "draw": 590, "feature": 3}


@pytest.mark.parametrize("cores", [1, 2])
def test_interrupt_after_the_last_draw(monkeypatch, cores, small):
    model, step = small
    expected = ours(model, step, chains=2)
    whole = run_module.whole_trace

    def press_and_make(*arguments, **options):
        press_ctrl_c()
        return whole(*arguments, **options)

    monkeypatch.setattr(run_module, "whole_trace", press_and_make)
    check_same(ours(model, step, chains=2, cores=cores), expected)
    monkeypatch.setattr(
        run_module, "whole_trace", lambda *_, **__: press_ctrl_c() or press_ctrl_c()
    )
    with pytest.raises(KeyboardInterrupt):  # A second one ends at once.
        ours(model, step, chains=2, cores=cores)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_before_there_are_draws(monkeypatch, small):
    model, step = small
    interrupted_in(step, 1, monkeypatch)
    with pytest.raises(KeyboardInterrupt, match="before the first draw"):
        ours(model, step)


def stop_when_long(monkeypatch, action, draws=400):
    """Act once when each of the chains that run has so many draws."""
    add, acted = workers.Job.add, []
    jobs = {}

    def add_and_act(job, *run):
        add(job, *run)
        jobs[id(job)] = job.done
        if not acted and len(jobs) == 2 and min(jobs.values()) >= draws:
            acted.append(True)
            action()

    monkeypatch.setattr(workers.Job, "add", add_and_act)


def kill_a_chain():
    children = {child.name: child for child in workers.multiprocessing.active_children()}
    os.kill(children["chain_1"].pid, signal.SIGKILL)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs signals of POSIX")
@pytest.mark.parametrize("action", [press_ctrl_c, kill_a_chain])
def test_processes_that_are_stopped_keep_draws_and_moments(action, monkeypatch):
    model = logistic_model()
    step = SGLD(model=model, thin=50, **SMALL)
    settings = {"chains": 4, "cores": 2, "draws": 200_000}
    stop_when_long(monkeypatch, action)
    killed = []
    if action is press_ctrl_c:
        idata = ours(model, step, **settings)
    else:
        killed = [1]
        with pytest.raises(ChainProcessError, match="exit code -9") as raised:
            ours(model, step, **settings)
        idata = raised.value.idata
    assert not workers.multiprocessing.active_children()
    draws = idata["posterior"].sizes["draw"]
    monkeypatch.undo()
    whole = ours(model, step, draws=draws + 1, cores=2)
    check_kept(idata, whole, least=390, killed=killed)


@pytest.mark.parametrize("error", [ConnectionResetError, EOFError, BlockingIOError])
def test_a_process_that_cannot_start_is_named(error, monkeypatch):
    """The server that forks processes may have died, or the system may have too many."""
    model = logistic_model()
    step = SGLD(model=model, thin=50, **SMALL)
    context = multiprocessing.get_context()
    start, started = context.Process.start, []

    def start_the_first(process):
        started.append(process)
        if len(started) > 1:
            raise error
        start(process)

    monkeypatch.setattr(context.Process, "start", start_the_first)
    with pytest.raises(ChainProcessError, match="The process of chain 1 could not start"):
        ours(model, step, cores=2, draws=200_000, mp_ctx=context)
    monkeypatch.undo()
    assert not multiprocessing.active_children()


def test_error_of_a_chain_in_a_process():
    model = logistic_model()
    step = SGLD(model=model, **SMALL | {"step_size": 1e3})
    messages = []
    for cores in (1, 2):
        with pytest.raises(Exception, match="became NaN or infinite") as raised:
            ours(model, step, cores=cores, tune=100)
        messages.append((type(raised.value), str(raised.value)))
    assert messages[0] == messages[1]


def test_in_a_thread_and_after_ctrl_c_while_processes_start(monkeypatch, small):
    """Only the main thread may set handlers, and Ctrl-C is noted at any time."""
    model, step = small
    expected = ours(model, step)
    with ThreadPoolExecutor() as pool:
        check_same(pool.submit(ours, model, step, cores=2).result(), expected)
    start = workers._Worker.__init__

    def press_and_start(*arguments):
        press_ctrl_c()
        start(*arguments)

    monkeypatch.setattr(workers._Worker, "__init__", press_and_start)
    with pytest.raises(KeyboardInterrupt):
        ours(model, step, draws=10**7, tune=10**6, cores=2, chains=2)
    assert not workers.multiprocessing.active_children()


ENDLESS = """
from pymc_sgmcmc import SGLD, sample
from tests.sampling.test_sample import SMALL, logistic_model

model = logistic_model()
step = SGLD(model=model, thin=20, **SMALL)
with model:
    sample(10**7, step=step, chains=3, cores=2, mp_ctx="fork", progressbar=False)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals of POSIX")
def test_no_process_is_left_where_the_parent_is_ended():
    root = Path(__file__).parents[2]
    parent = psutil.Popen([sys.executable, "-c", ENDLESS], cwd=root)
    children = []
    while len(children) < 2 or children[-1].cpu_times().user < 1:
        time.sleep(0.2)
        children = parent.children()
    parent.terminate()
    parent.wait()
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert len(gone) == 2
    assert not alive


# --- Arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"draws": 0}, ValueError, "`draws` should be"),
        ({"tune": -1}, ValueError, "`tune` should be"),
        ({"chains": 0}, ValueError, "`chains` should be"),
        ({"cores": 1.5}, ValueError, "`cores` should be"),
        ({"draws": 10**18}, ValueError, "`draws=1000000000000000000` takes .* GiB"),
        ({"seed": -1}, ValueError, "`random_seed` should be a seed .* but got -1"),
        ({"seed": 1.5}, TypeError, "`random_seed` should be a seed .* but got 1.5"),
        ({"seed": True}, TypeError, "`random_seed` should be a seed .* but got True"),
        ({"quiet": "no"}, TypeError, "`quiet` should be True or False"),
        ({"discard_tuned_samples": "no"}, TypeError, "`discard_tuned_samples` should be True or"),
        ({"compute_convergence_checks": 1}, TypeError, "`compute_convergence_checks` should be"),
        ({"mp_ctx": "foo"}, ValueError, "`mp_ctx` should be one of .*'spawn'.* but got 'foo'"),
        ({"mp_ctx": 3}, ValueError, "`mp_ctx` should be one of .* but got 3"),
        ({"initvals": 3}, TypeError, "`initvals` should be a mapping"),
        ({"initvals": [{}]}, TypeError, "or one for each of the 2 chains"),
        ({"initvals": {3: 1}}, ValueError, "`initvals` should have names .* but got `3`"),
        ({"initvals": {"beta": "x"}}, ValueError, "`initvals` should have a value for each"),
        ({"initvals": {"beta": [1.0]}}, ValueError, r"`initvals` .* of shape \(3,\) for `beta`"),
        ({"initvals": {"beta": [1.0, np.nan, 1]}}, ValueError, "`initvals` should have finite"),
        ({"var_names": 3}, TypeError, "`var_names` should name some of `beta`, .* got 3"),
        ({"drawss": 3}, TypeError, "takes no argument `drawss`. Did you mean `draws`"),
        ({"callback": print}, TypeError, r"`pymc.sample\(step=SGLDCV\(\), callback=...\)` does"),
        ({"batch_size": 3}, TypeError, "Give it to the step method"),
        ({"var_names": ["gamma"]}, ValueError, "`var_names` should name some of `beta`"),
        ({"var_names": []}, ValueError, "got an empty list"),
        (
            {"step": "NUTS"},
            TypeError,
            "`step` should be a step method with gradients of pymc_sgmcmc",
        ),
        ({"idata_kwargs": 3}, TypeError, "`idata_kwargs` should be a mapping"),
        ({"idata_kwargs": {"foo": 1}}, ValueError, "`idata_kwargs` should name some of .* `foo`"),
        ({"idata_kwargs": {"log_prior": ["y"]}}, ValueError, '"log_prior".. should name some of'),
        ({"idata_kwargs": {"log_likelihood": 3}}, TypeError, "should name some of `y`, but got 3"),
        ({"idata_kwargs": {"dims": 3}}, ValueError, "`idata_kwargs` should be arguments with"),
        ({"step": lambda: 1}, TypeError, "`step` should be a function of `model`"),
        ({"step": dict}, TypeError, "`step` should make a step method"),
        ({"step": lambda model: 1}, TypeError, "`step` should make a step method"),
        ({"step": pm.NUTS}, TypeError, "`step` should make a step method"),
    ],
)
def test_bad_arguments(settings, error, message, small):
    model, step = small
    with pytest.raises(error, match=message):
        ours(model, **{"step": step, **settings})


@pytest.mark.parametrize(("of_pymc", "of_container"), [(2, 64), (8, 1), (1, 1)])
def test_as_many_chains_and_cores_as_pymc_takes(of_pymc, of_container, monkeypatch, caplog, small):
    model, step = small
    for module, name in ((workers, "cpu_count"), (sampling_of_pymc, "_cpu_count")):
        monkeypatch.setattr(module, name, lambda: of_pymc)
    monkeypatch.setattr(workers, "available_cpus", lambda: of_container)
    caplog.set_level("INFO", "pymc")
    sizes = [
        ours(model, step, chains=None, cores=None, quiet=False, run=run)["posterior"].sizes
        for run in (sample, pm.sample)
    ]
    assert sizes[0] == sizes[1]
    told = [line for line in caplog.messages if line.endswith((" job)", " jobs)"))]
    assert len(told) == 2
    assert (told[0] == told[1]) == (of_pymc <= 2)


def test_what_is_no_model():
    for model in ("m", None):
        with pytest.raises(TypeError, match=f"`model` should be a PyMC model, but got {model!r}"):
            sample(model=model)


def test_steps_of_other_models():
    model, other = logistic_model(), two_variable_model()
    with pytest.raises(ModelError, match="was made for another model"):
        ours(model, SGLD(model=other, **SMALL))
    with pytest.raises(ModelError, match="was made for another model"):
        ours(logistic_model(), SGLD(model=model, **SMALL))  # the names are the same
    part = SGLD(vars=[other.free_RVs[0]], model=other, **SMALL)
    with pytest.raises(ModelError, match="should have all variables"):
        ours(other, part)


# --- Progress ---------------------------------------------------------------------------------


def test_running_r_hat():
    from arviz_stats.base import array_stats

    rng = np.random.default_rng(1)
    draws = rng.normal(size=(2, 130, 3))
    draws[1, :, 1] += 0.5
    runs = [[chain[:40], chain[40:]] for chain in draws]
    expected = array_stats.rhat(draws[:, 30:], chain_axis=0, draw_axis=1).max()
    assert running_r_hat([*runs, [draws[0, :45]], []], tune=30) == pytest.approx(expected)
    assert np.isnan(running_r_hat([runs[0], []], tune=30))


def test_bars_of_all_chains_show_the_r_hat_so_far(monkeypatch):
    updates = []
    monkeypatch.setattr(
        RichProgressBackend,
        "update",
        lambda _, bar, advance, failing, shown, *__: updates.append((bar, shown["r_hat"])),
    )
    ours(logistic_model(), partial(SGLD, **SMALL), draws=30, progressbar=True, quiet=False)
    first, second = ([text for of, text in updates if of == bar] for bar in (0, 1))
    assert first[0] == ""
    assert float(first[-1]) == float(second[-1]) > 0


@pytest.mark.parametrize(("kind", "bars"), [("combined", {0}), ("split", {0, 1})])
def test_kinds_of_progress_bars(kind, bars, monkeypatch):
    ends = {}

    def update(backend, bar, advance, failing, shown, is_last, total):
        ends[bar] = is_last, total

    monkeypatch.setattr(RichProgressBackend, "update", update)
    ours(logistic_model(), partial(SGLD, **SMALL), draws=30, progressbar=kind, quiet=False)
    assert ends == {bar: (True, 80 // len(bars)) for bar in bars}


def test_a_kind_of_progress_bar_that_is_not_there():
    with pytest.raises(ValueError, match="`progressbar` should be one of 'combined', 'split'"):
        ours(logistic_model(), partial(SGLD, **SMALL), progressbar="both", quiet=False)
