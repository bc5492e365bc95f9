"""Wall and processor time of a call, and the best of several."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Clock = Literal["wall", "cpu"]


@dataclass(frozen=True)
class Seconds:
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


def process_clocks() -> tuple[float, float]:
    """Wall time, and processor time that this process and its ended children, compilers, used."""
    return time.time(), sum(os.times()[:4])


def best(times: Iterable[Seconds], clock: Clock) -> float:
    """Shortest of several times by one clock."""
    return min(getattr(seconds, clock) for seconds in times)
