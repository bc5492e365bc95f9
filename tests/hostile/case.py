"""Bad inputs and planted faults, and a judgement of how each of them ended."""

from __future__ import annotations

import linecache
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pymc_sgmcmc
from pymc_sgmcmc import NonFinitePositionError
from tests.hostile.law import Comparison, Run

CLEAR, AGREES, RAW, SILENT = "clear", "agrees", "raw", "silent"
"""A case can end in four ways: in a message that says what is wrong; in draws of the full-data
posterior; in an exception of another library or a message about something else; or in none of
these."""

PACKAGE = str(Path(pymc_sgmcmc.__file__).parent)

USER = str(Path(__file__).parent)
"""The cases are in this folder, as a user would write them. An error that they raise themselves is
no fault of the package."""

NAMED = r"`[^`]+`|\"[^\"]+\"|'[^']+'|--\w+|[Cc]hains? \[?\d"
"""A message should name a variable, an argument, an option or a chain."""


@dataclass(frozen=True)
class Case:
    """One bad input or planted fault.

    Attributes
    ----------
    name : str
        Subject and fault, such as ``settings.bias_above_one``.
    run : callable
        Function without arguments. It returns a `Run` that is not made yet, a `Comparison`, the
        text in which a result says what is wrong, or None.
    says : str
        Regular expression that the message should match. Upper and lower case are the same.
    may_end_in_log : bool
        Whether a warning in the log at the end of the run is enough, where only the draws show the
        fault.
    must_agree : bool
        Whether the input is a right one, for which there should be no message.
    slow : bool
    """

    name: str
    run: Callable[[], Any]
    says: str = ""
    may_end_in_log: bool = False
    must_agree: bool = False
    slow: bool = False


class UnclearError(Exception):
    """The output of a command or a tool does not say what is wrong."""


@dataclass(frozen=True)
class Verdict:
    """The way in which a case ended, and the text of its message or result."""

    word: str
    text: str

    @property
    def good(self) -> bool:
        """Whether the user got a right answer or a clear message."""
        return self.word in (CLEAR, AGREES)


CASES: dict[str, Case] = {}
"""This mapping has all cases by name. The modules of the catalogue add theirs when imported."""


def add(name: str, run: Callable[[], Any], says: str = "", **flags: Any) -> None:
    """Add a case to the catalogue."""
    if name in CASES:
        raise ValueError(f"Two cases have the name {name!r}.")
    CASES[name] = Case(name, run, says, **flags)


def case(says: str = "", **flags: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a function to the catalogue, under the names of its module and itself."""

    def register(run: Callable[[], Any]) -> Callable[[], Any]:
        add(f"{run.__module__.rpartition('.')[2]}.{run.__name__}", run, says, **flags)
        return run

    return register


def judge(case: Case) -> Verdict:
    """Run a case, and judge how it ended."""
    journal = Journal()
    try:
        with journal.recording():
            result = case.run()
            told = _first_that_says(case, journal.warnings)
            if told is None and isinstance(result, Run):
                result = result.sample()
            if told is None and case.may_end_in_log:
                told = _first_that_says(case, journal.log)
            if told is None and isinstance(result, Comparison):
                apart = result.disagreement()
    except (Exception, SystemExit) as error:
        return _of_error(case, error)
    if told is not None:
        return Verdict(RAW if case.must_agree else CLEAR, told)
    if isinstance(result, Comparison):
        return Verdict(SILENT, apart) if apart else Verdict(AGREES, str(result))
    if isinstance(result, str) and result and _says(case, result):
        return Verdict(CLEAR, result)
    rest = "; ".join([*journal.warnings, *journal.log]) or "no message"
    return Verdict(SILENT, f"{result or 'no result'}; {rest}")


def _of_error(case: Case, error: BaseException) -> Verdict:
    text = f"{type(error).__name__}: {error}"
    frames = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    file, line = frames[-1]
    ours = [name.startswith(PACKAGE) for name, _ in frames]
    if file.startswith(USER) and not any(ours):
        return Verdict(RAW, text)
    if any(ours) and not file.startswith(USER):
        # A frame of the package is also the last one where C code failed that it called.
        raised = ours[-1] and linecache.getline(file, line).lstrip().startswith("raise ")
        kind = isinstance(error, (ValueError, TypeError, ImportError, NonFinitePositionError))
        if not (raised and kind and re.search(NAMED, str(error))):
            return Verdict(RAW, f"{text} [{Path(file).name}:{line}]")
    if case.must_agree or not re.search(case.says, text, re.IGNORECASE | re.DOTALL):
        return Verdict(RAW, text)
    return Verdict(CLEAR, text)


def _says(case: Case, text: str) -> bool:
    return re.search(case.says, text, re.IGNORECASE | re.DOTALL) is not None


def _first_that_says(case: Case, messages: list[str]) -> str | None:
    return next(
        (message for message in messages if re.search(NAMED, message) and _says(case, message)),
        None,
    )


@dataclass
class Journal(logging.Handler):
    """Warnings that the package raised and logged, in order."""

    warnings: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return id(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what the package logs; the lines of PyMC about a run are dropped."""
        if record.name.startswith("pymc.sgmcmc") and record.levelno >= logging.WARNING:
            self.log.append(record.getMessage())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record warnings and do not show them."""
        logger = logging.getLogger("pymc")
        handlers, logger.handlers = logger.handlers, [self]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = self._keep
                yield
        finally:
            logger.handlers = handlers

    def _keep(self, message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and "warnings.py" in frame.f_code.co_filename:
            frame = frame.f_back
        # The frame that raised the warning, not the line of the user that it refers to.
        if frame.f_code.co_filename.startswith(PACKAGE) and issubclass(category, UserWarning):
            self.warnings.append(f"{category.__name__}: {message}")
