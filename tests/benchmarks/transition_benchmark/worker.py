"""One contender in a process of its own, at the other end of two pipes.

``python -m transition_benchmark.worker <contender> <folder> <settings>`` prepares the contender for
the problem in the folder and prints one JSON object, with ``versions`` and the ``guards`` of the
methods, or with an ``error``. For each line ``[method, seed]`` that it then reads, it prints the
time of one chain by both clocks. It ends with its input.
"""

from __future__ import annotations

import importlib
import json
import platform
import sys
from dataclasses import asdict
from importlib import metadata
from typing import Any

from common.child import answer_stream
from common.problem import load_problem
from common.timing import timed

from transition_benchmark import Settings
from transition_benchmark.guard import examine


def main() -> None:
    """Serve the contender named by the first argument."""
    answers = answer_stream()

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        contender = importlib.import_module(f"transition_benchmark.contender_{sys.argv[1]}")
        problem, settings = load_problem(sys.argv[2]), Settings(**json.loads(sys.argv[3]))
        runs = contender.prepare(problem, settings)
        # The chains that the guard examines warm the contender up too.
        guards = {
            method: examine(run(0), problem, settings, method) for method, run in runs.items()
        }
        versions = {package: metadata.version(package) for package in contender.PACKAGES}
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        if isinstance(error, ImportError):
            return  # A package is missing, and the answer says which.
        raise
    answer({"versions": {"python": platform.python_version(), **versions}, "guards": guards})
    for line in sys.stdin:
        method, seed = json.loads(line)
        answer(asdict(timed(runs[method], seed)[1]))


if __name__ == "__main__":
    main()
