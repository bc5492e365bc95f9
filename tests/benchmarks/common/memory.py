"""Memory held and peak memory of parts of a program, by two counts."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path


class Phases:
    """Bytes that each phase of a program leaves behind, and its peak above its start.

    Parameters
    ----------
    count : {"resident", "allocated"}
        "resident" reads the memory of the process from Linux: everything counts, to the page.
        "allocated" is tracemalloc's sum over Python and NumPy, exact, without what compiled code
        allocates for itself.

    Attributes
    ----------
    found : dict
        ``{"held": bytes, "peak": bytes}`` for each phase.
    """

    def __init__(self, count: str) -> None:
        self.count = count
        self.found: dict[str, dict[str, int]] = {}
        if count == "allocated":
            tracemalloc.start(1)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside."""
        before = self._settled()
        self._reset_peak()
        yield
        peak = self._peak()
        self.found[name] = {"held": self._settled() - before, "peak": peak - before}

    def _settled(self) -> int:
        """Memory in use once what is free has been returned to the system."""
        gc.collect()
        if self.count == "allocated":
            return tracemalloc.get_traced_memory()[0]
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        return _status("VmRSS")

    def _peak(self) -> int:
        if self.count == "allocated":
            return tracemalloc.get_traced_memory()[1]
        return _status("VmHWM")

    def _reset_peak(self) -> None:
        if self.count == "allocated":
            tracemalloc.reset_peak()
        else:
            Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found.group(1))
