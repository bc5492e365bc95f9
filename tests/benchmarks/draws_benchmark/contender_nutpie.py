"""nutpie: NUTS on all rows, with its default tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import nutpie
from common.model import build_model
from common.problem import Problem

PACKAGES = ("nutpie", "pymc", "pytensor", "numba", "numpy")
DRAWS = 4000
"""Fewer than of others, for they take longer."""


def sample(problem: Problem, mark: Callable[..., None]) -> np.ndarray:
    """Compile and sample; times are known to some ten milliseconds."""

    def watch(chains: Sequence[Any]) -> None:
        mark(not chains[0].tuning)

    compiled = nutpie.compile_pymc_model(build_model(problem, 0, "ordinary"))
    idata = nutpie.sample(
        compiled, draws=DRAWS, chains=1, cores=1, seed=1, progress_bar=False,
        progress_callback=watch, progress_rate=10,
    )  # fmt: skip
    return idata.posterior["coefficients"].values[0]
