"""Where passes over the rows of sources run, and their progress."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_UNTIL_SHOWN = 3.0
"""A pass that ends before this time shows no progress."""

_client: ContextVar[Any] = ContextVar("client", default=None)
_shows: ContextVar[bool | None] = ContextVar("shows", default=None)


@contextmanager
def passes(client: Any, shown: bool) -> Iterator[None]:
    """Let sources without a client of their own pass over rows on one, and passes show progress."""
    clients, shows = _client.set(client), _shows.set(shown)
    try:
        yield
    finally:
        _client.reset(clients)
        _shows.reset(shows)


@contextmanager
def shown_by_default() -> Iterator[None]:
    """Let passes show progress, unless `passes` says otherwise.

    Elsewhere they show none, since a pass of a chain would disturb the bar of the run.
    """
    shows = _shows.set(_shows.get() is not False)
    try:
        yield
    finally:
        _shows.reset(shows)


def client_of_passes() -> Any:
    """The client of `passes`, None where there is none."""
    return _client.get()


def with_progress(parts: Iterable[tuple[int, Any]], total: int) -> Iterator[Any]:
    """Results of parts of a pass, with a bar of rows a second where the pass is long.

    Parameters
    ----------
    parts : iterable of (int, result)
        Number of rows of each part, and its result.
    total : int
        Number of all rows.
    """
    began, done = time.monotonic(), 0
    columns = (
        TextColumn("Pass over rows"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %, {task.fields[rate]:,.0f} rows/s, left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, transient=True, disable=not _shows.get()) as progress:
        bar = progress.add_task("", total=total, rate=0.0, visible=False)
        for count, result in parts:
            done += count
            elapsed = time.monotonic() - began
            if elapsed > SECONDS_UNTIL_SHOWN:
                progress.update(bar, completed=done, rate=done / elapsed, visible=True)
            yield result
