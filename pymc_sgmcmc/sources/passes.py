"""Where passes over the rows of sources run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from pymc_sgmcmc.stages import set_up

_client: ContextVar[Any] = ContextVar("client", default=None)


@contextmanager
def passes(client: Any, shown: bool) -> Iterator[None]:
    """Let sources without a client of their own pass over rows on one, and stages show progress."""
    clients = _client.set(client)
    try:
        with set_up(shown):
            yield
    finally:
        _client.reset(clients)


def client_of_passes() -> Any:
    """The client of `passes`, None where there is none."""
    return _client.get()
