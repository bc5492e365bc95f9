"""What a user sees of a set-up while it goes on, and of the bar of a run."""

from __future__ import annotations

import io
import logging
import sys
from functools import partial

import pytest
from pymc.progress_bar import MCMCProgressBarManager
from rich.console import Console

from pymc_sgmcmc import SGLDCV, stages
from pymc_sgmcmc.sampling.progress import RunProgress
from pymc_sgmcmc.sources.passes import passes
from tests.support.models import logistic_model
from tests.support.sampling import QUICK


@pytest.fixture
def terminal(monkeypatch):
    """What a terminal of 80 columns gets."""
    written = io.StringIO()
    console = partial(
        Console,
        file=written,
        force_terminal=True,
        force_jupyter=False,
        width=80,
        _environ={"TERM": "xterm"},
    )
    monkeypatch.setattr(stages, "Console", lambda **_: console())
    return written


@pytest.fixture
def info(caplog):
    """The lines of the log."""
    caplog.set_level(logging.INFO, "pymc")
    return caplog


def test_stages_of_a_set_up_are_told_when_they_begin(info, terminal):
    SGLDCV(model=logistic_model(), compile_kwargs=QUICK)
    told = [line for line in info.messages if not line.startswith("SGLDCV: ")]
    assert told == [
        "Reading the model",
        "Checking the rows",
        "Finding the centre",
        "Computing the curvature",
        "Measuring the noise of the rows",
        "Compiling",
    ]
    told.remove("Computing the curvature")  # It may be over before the line is drawn again.
    for line in told:
        assert f"{line}, 0:00:0" in terminal.getvalue()
    assert "passes over the rows" in terminal.getvalue()


def test_no_progress_where_none_is_wanted(info, terminal):
    with stages.stage("Before"), passes(None, shown=False), stages.set_up(), stages.stage("In"):
        stages.count_passes(1)
    info.set_level(logging.CRITICAL, "pymc")
    with stages.set_up(), stages.stage("Quietly"):
        pass
    assert info.messages == ["In"]
    assert terminal.getvalue() == ""


def test_a_long_stage_says_once_what_would_shorten_it(info, terminal, monkeypatch):
    monkeypatch.setattr(stages, "SECONDS_OF_LONG", -1.0)
    with stages.set_up(), stages.stage("Waiting", "Do less."):
        for _ in range(5):
            stages.count_passes(1)
    assert info.messages == ["Waiting", "Waiting has taken 0 seconds. Do less."]
    assert "Do less." in terminal.getvalue()


def test_passes_over_a_source_have_rows_a_second(info, terminal):
    with stages.set_up():
        parts = [(1000, number) for number in range(10)]
        for number in stages.with_progress(parts, 10_000):
            assert number in range(10)
    assert "100%," in terminal.getvalue()
    assert "rows/s, left 0:00:00" in terminal.getvalue()
    assert list(stages.with_progress(parts, 10_000)) == list(range(10))


def test_lines_of_the_log_are_not_written_into_that_of_progress(info, terminal, monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    handler = logging.StreamHandler(stderr)
    monkeypatch.setattr(logging.getLogger("pymc"), "handlers", [handler])
    with stages.set_up(), stages.stage("Working"):
        stages.log.warning("Something happened.")
        assert handler.stream is not stderr
    assert "Something happened.\n" in terminal.getvalue()
    assert stderr.getvalue() == "Working\n"
    assert handler.stream is stderr


@pytest.mark.parametrize("manager", [MCMCProgressBarManager, RunProgress])
def test_the_bar_of_a_run_fits_into_80_columns(manager, terminal):
    progress = manager(SGLDCV, 2, 1000, 1000, True)
    backend = progress._backend
    backend._initialize_tasks()
    shown = {"draw": 999, "variance_error": 0.234, "r_hat": "1.0123"}
    for bar in (0, 1):
        backend.update(bar, 0, False, shown, False, 2000)
        backend._progress.update(bar, sampling_speed=1234.5, speed_unit="draws/s")
    table = backend._progress.make_tasks_table(backend._progress.tasks)
    stages.Console().print(table)
    written = terminal.getvalue()
    assert written.count("1234.50 draws/s") == written.count("23.4%") == 2
    assert written.count("0:00:00") >= 2
    assert written.count("1.0123") == 2 * (manager is RunProgress)
    assert "…" not in written.replace("Remain…", "")


def test_a_notebook_without_widgets_has_one_line(info, monkeypatch):
    monkeypatch.setattr(stages, "Console", lambda **_: Console(force_jupyter=True))
    monkeypatch.setattr(stages, "find_spec", lambda name: None)
    stages._tell_of_widgets.cache_clear()
    SGLDCV._progressbar_config(2)
    with stages.set_up():
        for name in ("First", "Second"):
            with stages.stage(name):
                pass
    assert [line for line in info.messages if "pip install ipywidgets" in line] == info.messages[:1]
    assert info.messages[1:] == ["First", "Second"]
