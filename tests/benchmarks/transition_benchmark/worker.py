"""The far side of the protocol: one contender in a process of its own.

``python -m transition_benchmark.worker <contender>`` reads one JSON object a line from standard
input and answers each with one JSON object a line on standard output:

===================================================  ==============================================
request                                              answer
===================================================  ==============================================
``{"command": "prepare", "folder", "settings"}``     ``methods, versions, notes, seconds``
``{"command": "check", "method", "seed"}``           the fields of ``guard.Summary``
``{"command": "time", "method", "seed"}``            ``wall_seconds, cpu_seconds``
``{"command": "stop"}``                              none, the process ends
===================================================  ==============================================

A failed request is answered with ``{"error": message, "unavailable": bool}``; the process goes on.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from common.problem import Problem, load_problem

from transition_benchmark.guard import summarise
from transition_benchmark.interface import Prepared, Settings, UnavailableError


class Worker:
    """Answers the requests for one contender.

    Parameters
    ----------
    contender : str
        Name of the module ``contender_<contender>`` of this package.
    """

    def __init__(self, contender: str) -> None:
        self._module = importlib.import_module(f"transition_benchmark.contender_{contender}")
        self._problem: Problem | None = None
        self._prepared: Prepared | None = None

    def prepare(self, folder: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Load the problem, set the contender up, compile."""
        started = time.perf_counter()
        self._problem = load_problem(Path(folder))
        self._prepared = self._module.prepare(self._problem, Settings(**settings))
        return {
            "methods": list(self._prepared.runs),
            "versions": _versions(self._prepared.packages),
            "notes": dict(self._prepared.notes),
            "seconds": time.perf_counter() - started,
        }

    def check(self, method: str, seed: int) -> dict[str, Any]:
        """Run one chain, untimed, and describe it; the first call may compile."""
        problem, prepared = self._ready()
        return summarise(prepared.runs[method](seed), problem.start)

    def time(self, method: str, seed: int) -> dict[str, Any]:
        """Time one chain."""
        run = self._ready()[1].runs[method]
        cpu = time.process_time()
        wall = time.perf_counter()
        run(seed)
        wall = time.perf_counter() - wall
        cpu = time.process_time() - cpu
        return {"wall_seconds": wall, "cpu_seconds": cpu}

    def _ready(self) -> tuple[Problem, Prepared]:
        if self._problem is None or self._prepared is None:
            raise RuntimeError("the first request should be 'prepare'")
        return self._problem, self._prepared


def serve(worker: Worker, requests: TextIO, answers: TextIO) -> None:
    """Answer requests until ``stop`` or the end of the input."""
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "prepare": worker.prepare,
        "check": worker.check,
        "time": worker.time,
    }
    for line in requests:
        request = json.loads(line)
        command = request.pop("command")
        if command == "stop":
            return
        try:
            answer = commands[command](**request)
        except UnavailableError as error:
            answer = {"error": str(error), "unavailable": True}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}", "unavailable": False}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Serve the contender named by the first argument."""
    # Libraries print where they like: standard output is kept for the answers by moving
    # everything else that is written there, from C as well, to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(Worker(sys.argv[1]), sys.stdin, answers)


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "unknown"
    return versions


if __name__ == "__main__":
    main()
