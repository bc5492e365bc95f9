"""Times of calls, of chains without their set-up, memory, and errors of draws."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Seconds(NamedTuple):
    """Time of one call by both clocks.

    Processor time much below wall time means that something else ran on the core.
    """

    wall: float
    cpu: float


def timed(function: Callable[..., Any], *arguments: Any, **settings: Any) -> tuple[Any, Seconds]:
    """Value of a call and its time."""
    cpu, wall = time.process_time(), time.perf_counter()
    value = function(*arguments, **settings)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return value, Seconds(wall, cpu)


def in_turn(
    calls: Mapping[Any, Callable[[int], Any]], rounds: int, clock: str = "cpu"
) -> dict[Any, list[float]]:
    """Seconds of each call, sorted, made with the number of the round; round 0 warms up."""
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            seconds = getattr(timed(call, number)[1], clock)
            if number:
                times[name].append(seconds)
    return {name: sorted(several) for name, several in times.items()}


def process_clocks() -> tuple[float, float]:
    """Wall time, and processor time that this process and its ended children, compilers, used."""
    return time.time(), sum(os.times()[:4])


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


def peak_memory() -> float:
    """Largest resident memory of this process so far, in megabytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def errors_of_draws(draws: Any, mean: Any, sd: Any) -> dict[str, float]:
    """Effective draws, and errors of mean and standard deviation, of the worst coordinate.

    Parameters
    ----------
    draws : numpy.ndarray, shape (chains, draws, coordinates)
    mean, sd : numpy.ndarray, shape (coordinates,)
    """
    import numpy as np
    from arviz_stats.base import array_stats

    ratios = draws.std(axis=(0, 1), ddof=1) / sd
    return {
        "ess": float(array_stats.ess(draws, chain_axis=0, draw_axis=1).min()),
        "sd_ratio": float(ratios[np.abs(np.log(ratios)).argmax()]),
        "mean_error": float(np.abs((draws.mean(axis=(0, 1)) - mean) / sd).max()),
    }


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of the logarithms."""
    import numpy as np

    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
