"""Stages of a set-up: a line in the log when each begins, and a line of progress while it lasts.

The line of progress is drawn in a terminal or notebook. It has the stage, how often all rows were
evaluated, and the time. The log has what would shorten a stage that takes long.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

SECONDS_OF_LONG = 30.0
"""A stage that takes longer says what would shorten it: nobody waits so long without asking."""

log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold


@dataclass(eq=False)
class _Stage:
    """A stage that has begun.

    Attributes
    ----------
    name : str
    hint : str
        What would shorten it.
    passes : float
        How often all rows were evaluated.
    part : str
        Progress of the present pass over a source.
    """

    name: str
    hint: str
    passes: float = 0.0
    part: str = ""
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def __rich__(self) -> Text:
        parts = [self.name, str(timedelta(seconds=int(self.seconds)))]
        if self.passes >= 2:
            parts.append(f"{self.passes:.0f} passes over the rows")
        parts += [self.part] * bool(self.part)
        hint = f". {self.hint}" if self.hint and self.seconds > SECONDS_OF_LONG else ""
        return Text(", ".join(parts) + hint)


@dataclass
class _SetUp:
    """A set-up, what the log has of it, and its stages that are not over, outermost first."""

    shown: bool
    told: set[str] = field(default_factory=set)
    stages: list[_Stage] = field(default_factory=list)

    def tell(self, line: str, key: str) -> None:
        """Log a line, where there was none of this key."""
        if key and key not in self.told:
            self.told.add(key)
            log.info("%s", line)

    def add(self, passes: float) -> None:
        """Add passes over the rows to the present stage, and tell what would shorten it."""
        if self.stages:
            present = self.stages[-1]
            present.passes += passes
            if present.seconds > SECONDS_OF_LONG:
                line = f"{present.name} has taken {present.seconds:.0f} seconds. {present.hint}"
                self.tell(line, present.hint)

    def __rich__(self) -> _Stage | str:
        return self.stages[-1] if self.stages else ""


_set_up: ContextVar[_SetUp | None] = ContextVar("set_up", default=None)


@contextmanager
def set_up(shown: bool | None = None) -> Iterator[None]:
    """Let stages show progress, or not. By default they do, unless a set-up around this says no.

    Elsewhere they show and log nothing, since a pass of a chain would disturb the bar of the run.
    """
    if shown is None:
        around = _set_up.get()
        shown = around is None or around.shown
    before = _set_up.set(_SetUp(shown))
    try:
        yield
    finally:
        _set_up.reset(before)


@contextmanager
def stage(name: str, hint: str = "", *, logged: bool = True) -> Iterator[_Stage | None]:
    """A stage of a set-up. Its line is in the log once for each set-up.

    Parameters
    ----------
    name : str
    hint : str
        A sentence that says what would shorten it.
    logged : bool
        Whether the log has a line when it begins.
    """
    present = _set_up.get()
    if present is None:
        yield None
        return
    if logged:
        present.tell(name, name)
    outermost, begun = not present.stages, _Stage(name, hint)
    present.stages.append(begun)
    try:
        with _drawn(present) if outermost and present.shown else nullcontext():
            yield begun
    finally:
        present.add(0)
        present.stages.remove(begun)
        present.add(begun.passes)


def count_passes(passes: float) -> None:
    """Add to the passes over all rows of the present stage, where there is one."""
    if (present := _set_up.get()) is not None:
        present.add(passes)


def with_progress(parts: Iterable[tuple[int, Any]], total: int) -> Iterator[Any]:
    """Results of parts of a pass over a source, whose rows a second the line of progress has.

    Parameters
    ----------
    parts : iterable of (int, result)
        Number of rows of each part, and its result.
    total : int
        Number of all rows.
    """
    done = 0
    with stage("Reading the rows", logged=False) as begun:
        for count, result in parts:
            done += count
            if begun is not None:
                rate = max(done, 1) / max(begun.seconds, 1e-9)
                left = timedelta(seconds=int((total - done) / rate))
                begun.part = f"{done / total:.0%}, {rate:,.0f} rows/s, left {left}"
            yield result


@contextmanager
def _drawn(present: _SetUp) -> Iterator[None]:
    """Draw the line of progress of a set-up, where there is a terminal or notebook."""
    console = Console(stderr=True)
    there = console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)
    if not there or not log.isEnabledFor(logging.INFO) or lacks_widgets():
        yield
        return
    handlers: list[Any] = []
    logger: logging.Logger | None = log
    stderr = sys.stderr
    while logger is not None:
        handlers += [each for each in logger.handlers if getattr(each, "stream", None) is stderr]
        logger = logger.parent
    with Live(present, console=console, transient=True):
        try:
            for handler in handlers:
                handler.setStream(sys.stderr)  # which writes above the line now
            yield
        finally:
            for handler in handlers:
                handler.setStream(stderr)


def lacks_widgets() -> bool:
    """Whether this is a notebook without what draws progress there, which is logged once.

    Otherwise each bar, that of PyMC too, would warn of it several times.
    """
    if not Console().is_jupyter or find_spec("ipywidgets") is not None:
        return False
    warnings.filterwarnings("ignore", 'install "ipywidgets"', UserWarning)
    _tell_of_widgets()
    return True


@cache
def _tell_of_widgets() -> None:
    log.info("Notebooks show progress where ipywidgets is installed: pip install ipywidgets")
