"""Processors and memory are those that a container lends to this process."""

from __future__ import annotations

import pytest

from pymc_sgmcmc import limits
from pymc_sgmcmc.gradient_estimators.saga import check_table_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("own", "files", "cpus", "memory"),
    [
        ("", {}, 64, 8 * GIB),
        ("0::/", {"cpu.max": "max 100000", "memory.max": "max"}, 64, 8 * GIB),
        ("0::/", {"cpu.max": "250000 100000", "memory.max": f"{GIB}"}, 2, GIB),
        ("0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 1, 8 * GIB),
        (
            "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/",
            {
                "cpu/cpu.cfs_quota_us": "300000",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": f"{2 * GIB}",
            },
            3,
            2 * GIB,
        ),
        (
            "5:cpu:/\n4:memory:/docker/1",
            {
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/docker/1/memory.limit_in_bytes": "9223372036854771712",
            },
            64,
            8 * GIB,
        ),
    ],
)
def test_limits_of_control_groups(own, files, cpus, memory, tmp_path, monkeypatch):
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(limits, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(limits, "OWN", tmp_path / "own")
    monkeypatch.setattr(limits.os, "process_cpu_count", lambda: 64, raising=False)
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 8 * GIB // 4096}
    monkeypatch.setattr(limits.os, "sysconf", sizes.__getitem__)
    assert limits.available_cpus() == cpus
    assert limits.available_memory() == memory
    with pytest.raises(ValueError, match=f"`window=7` takes .* there are {memory / GIB:.1f} GiB"):
        limits.check_memory("window", 7, 9 * GIB)


def test_a_system_without_control_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "OWN", tmp_path / "nothing")
    assert limits.available_cpus() >= 1
    assert limits.available_memory() > 0


def test_memory_in_use_is_not_free(tmp_path, monkeypatch):
    """A table of gradients has to fit into what others leave."""
    monkeypatch.setattr(limits, "MEMORY", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal:  8000000 kB\nMemAvailable:    1000 kB\n")
    assert limits.free_memory() == 1000 * 1024
    with pytest.raises(MemoryError, match=r"0\.00102 GB are available"):
        check_table_memory(10**6, 1000, 125)
    (tmp_path / "meminfo").unlink()
    assert limits.free_memory() == limits.available_memory()
