"""The progress of passes over the rows of a source."""

from __future__ import annotations

import io
import itertools
from functools import partial

import pytest
from rich.console import Console
from rich.progress import Progress

from pymc_sgmcmc.sources import passes


@pytest.fixture
def terminal(monkeypatch):
    """What a terminal of 100 columns gets, where a second goes by between any two looks."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100)
    monkeypatch.setattr(passes, "Progress", partial(Progress, console=console, auto_refresh=False))
    monkeypatch.setattr(passes.time, "monotonic", itertools.count().__next__)
    return written


def read(parts: int) -> list[int]:
    """Results of parts of 1000 rows each."""
    with passes.passes(None, True):
        return list(passes.with_progress([(1000, number) for number in range(parts)], 1000 * parts))


def test_a_long_pass_shows_rows_a_second(terminal):
    assert read(10) == list(range(10))
    assert "Pass over rows" in terminal.getvalue()
    assert "100 %, 1,000 rows/s, left" in terminal.getvalue()


def test_a_short_pass_shows_nothing(terminal):
    assert read(3) == [0, 1, 2]
    assert "Pass over rows" not in terminal.getvalue()


def test_passes_of_a_chain_show_nothing(terminal):
    list(passes.with_progress([(1000, 0)] * 10, 10_000))
    assert "Pass over rows" not in terminal.getvalue()
