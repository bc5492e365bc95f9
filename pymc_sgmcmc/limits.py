"""What this process may use of the machine, which its container may limit."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Where Linux has the limits of groups of processes, and the names of those of this process."""

MEMORY = Path("/proc/meminfo")
"""Where Linux says how much memory is in use."""


def _limits(controller: str, new: str, old: str) -> Iterator[list[str]]:
    """Numbers that limit this process: of its control groups, of version 2 or 1, and those around.

    Parameters
    ----------
    controller : str
        What is limited.
    new, old : str
        Names of the files, in words, of both versions.
    """
    try:
        groups = [line.split(":", 2) for line in OWN.read_text().splitlines()]
    except OSError:  # Other systems have none.
        return
    for _, controllers, name in groups:
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controller if controllers else CGROUPS
        # A container may see the name that its group has outside, but the files of the group as
        # those of the root.
        for folder in (Path(name), *Path(name).parents):
            here = root / folder.relative_to("/")
            files = (old if controllers else new).split()
            try:
                yield [number for file in files for number in (here / file).read_text().split()]
            except OSError:
                continue


def available_cpus() -> int:
    """Number of processors that this process may use at the same time, at least one.

    A container with a quota sees all processors of its machine.
    """
    if hasattr(os, "process_cpu_count"):  # since Python 3.13
        count = os.process_cpu_count() or 1
    elif hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    for quota, period in _limits("cpu", "cpu.max", "cpu.cfs_quota_us cpu.cfs_period_us"):
        if quota.isdigit():  # others are "max" and -1
            count = min(count, int(quota) // int(period))
    return max(1, count)


def available_memory() -> int:
    """Bytes of memory that this process may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if os.name == "posix" else 0
    limits = _limits("memory", "memory.max", "memory.limit_in_bytes")
    found = [int(most) for (most,) in limits if most.isdigit()]
    return min([total, *found] if total else found, default=sys.maxsize)


def free_memory() -> int:
    """Bytes of memory that this process may use without swapping, as far as the system says."""
    most = available_memory()
    try:
        lines = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines())
        return min(most, int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError):  # Other systems have no such file.
        return most


def check_memory(name: str, value: object, size: float) -> None:
    """Refuse a setting whose arrays do not fit into memory, before they are made.

    Parameters
    ----------
    name : str
        Name of the setting.
    value
    size : float
        Bytes that it takes.

    Raises
    ------
    ValueError
    """
    if size > (most := available_memory()):
        raise ValueError(
            f"`{name}={value!r}` takes {size / 2**30:,.1f} GiB, but there are {most / 2**30:,.1f} "
            f"GiB of memory. Give a smaller `{name}`."
        )
