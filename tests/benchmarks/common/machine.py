"""One core for everything, and the facts about the machine that a result needs."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime

from common.markdown import cpu_name

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "BLIS_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_PLATFORMS": "cpu",
}
"""Environment variables which hold the numerical libraries to one thread each."""


def restrict_to_one_core(core: int | None = None) -> int | None:
    """Hold this process, and those which it starts, to one core.

    Must be called before NumPy is imported: the libraries read the variables when they load.

    Parameters
    ----------
    core : int, optional
        Core to run on, the last one allowed by default.

    Returns
    -------
    int or None
        The core, None where the operating system cannot pin a process.
    """
    os.environ.update(ONE_THREAD)
    # The variables alone leave XLA's own thread pool as large as the machine; it is sized by the
    # cores which the process may use.
    if not hasattr(os, "sched_setaffinity"):
        return None
    allowed = os.sched_getaffinity(0)
    if core is None:
        core = max(allowed)
    elif core not in allowed:
        raise ValueError(f"core should be one of {sorted(allowed)} but got {core}")
    os.sched_setaffinity(0, {core})
    return core


def machine_facts(core: int | None) -> dict[str, object]:
    """Processor, operating system and date of a run."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "core_used": core,
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
