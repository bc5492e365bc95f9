"""Chains whose processor seconds are counted without set-up and tuning."""

from __future__ import annotations

import time
from typing import Any


def timed_draws(step: Any, draws: int, tune: int, **options: Any) -> tuple[Any, float]:
    """Chains of `pm.sample`, one after the other, and the seconds of their draws after tuning."""
    import pymc as pm

    last = kept = 0.0

    def watch(trace: Any, draw: Any) -> None:
        nonlocal last, kept
        now = time.process_time()
        if not draw.tuning:
            kept += now - last
        last = now

    options |= {"cores": 1, "progressbar": False, "random_seed": 1, "callback": watch}
    idata = pm.sample(draws, tune=tune, step=step, **options)
    return idata, kept


def nutpie_chain(compiled: Any, draws: int, tune: int, seed: int) -> tuple[Any, float, float]:
    """A chain of nutpie, the seconds of its warm-up, and those of its draws."""
    import nutpie

    began: list[float] = []

    def watch(chains: Any) -> None:
        if not began and not chains[0].tuning:
            began.append(time.process_time())

    before = time.process_time()
    idata = nutpie.sample(
        compiled, draws=draws, tune=tune, chains=1, cores=1, seed=seed, progress_bar=False,
        progress_callback=watch, progress_rate=10,
    )  # fmt: skip
    return idata, began[0] - before, time.process_time() - began[0]
