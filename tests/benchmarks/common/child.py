"""Measurements in fresh processes.

``python -m common.child <module>:<function>`` reads the function's arguments as one JSON object
from standard input and prints its value, JSON as well, as the last line of standard output. What
the libraries print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

BENCHMARKS = Path(__file__).resolve().parents[1]
REPOSITORY = BENCHMARKS.parents[1]


def run_in_fresh_process(
    function: str,
    environment: dict[str, str] | None = None,
    python: str = sys.executable,
    limit: float | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Call a function in a new Python process and return its value.

    Parameters
    ----------
    function : str
        ``module:function``, the module one in ``tests/benchmarks``. It must be importable without
        NumPy where start-up is measured.
    environment : dict, optional
        Environment variables to set beside this process's own.
    python : str
        Interpreter, this process's own by default.
    limit : float, optional
        Seconds after which the process is ended.
    **arguments
        Of the function, as JSON allows. A function with the argument ``launched`` receives the
        time at which the process was started, as `time.time` counts.

    Raises
    ------
    RuntimeError
        The process failed; the message ends with its output.
    subprocess.TimeoutExpired
        It was ended at the limit.
    """
    paths = os.pathsep.join([str(BENCHMARKS), str(REPOSITORY)])
    request = json.dumps({**arguments, "launched": time.time()})
    # Installed packages have bytecode, so this one should not be compiled in each process.
    inherited = {key: os.environ[key] for key in os.environ if key != "PYTHONDONTWRITEBYTECODE"}
    finished = subprocess.run(
        [python, "-m", "common.child", function],
        input=request,
        capture_output=True,
        text=True,
        cwd=BENCHMARKS,
        timeout=limit,
        env={**inherited, "PYTHONPATH": paths, **(environment or {})},
    )
    if finished.returncode:
        raise RuntimeError(f"{function} failed:\n{finished.stderr[-3000:]}")
    return json.loads(finished.stdout.splitlines()[-1])


def cache_variables(folder: str) -> dict[str, str]:
    """Environment variables that give a process compile caches of its own, for `environment`."""
    return {
        "PYTENSOR_FLAGS": f"base_compiledir={folder}",
        "NUMBA_CACHE_DIR": f"{folder}/numba",
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def answer_stream() -> TextIO:
    """Keep standard output for answers: what else is written there goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def main() -> None:
    """Call the function named by the first argument."""
    answers = answer_stream()
    module, _, name = sys.argv[1].partition(":")
    arguments = json.load(sys.stdin)
    function = getattr(importlib.import_module(module), name)
    if "launched" not in function.__code__.co_varnames:
        del arguments["launched"]
    print(json.dumps(function(**arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
