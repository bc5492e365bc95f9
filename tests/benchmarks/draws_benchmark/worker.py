"""One run of a contender in a fresh process."""

from __future__ import annotations

from common.timing import process_clocks


def measure(contender: str, folder: str, launched: float) -> dict:
    """Sample, write the draws beside the problem, and return the seconds by (wall, cpu) clocks."""
    import importlib
    from dataclasses import replace
    from importlib import metadata

    import numpy as np
    from common.problem import load_problem

    module = importlib.import_module(f"draws_benchmark.contender_{contender}")
    imported = np.array(process_clocks())
    # The data are in memory, as a user has them, before the clocks go on.
    problem = load_problem(folder)
    problem = replace(problem, design=np.array(problem.design))
    loaded = np.array(process_clocks())
    marks = {}

    def mark(last: bool = False) -> None:
        marks[last] = process_clocks()

    draws = module.sample(problem, mark)
    ended = np.array(process_clocks())
    drawing = np.array(marks.get(True, ended)) - marks[False]
    np.save(f"{folder}/draws.npy", np.asarray(draws, float))
    return {
        "set_up": (imported - (launched, 0.0) + ended - loaded - drawing).tolist(),
        "drawing": drawing.tolist(),
        "versions": {package: metadata.version(package) for package in module.PACKAGES},
    }
