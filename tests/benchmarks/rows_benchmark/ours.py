"""`SGLDCV` on rows in files or in memory, in a process whose memory the system limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def measure(
    folder: str,
    features: int,
    in_memory: bool,
    copies: int,
    memory: str,
    most_bytes: int,
    draws: int,
    launched: float,
) -> dict[str, Any]:
    """Read all rows once, set up, and sample; the draws are written beside the files."""
    import resource

    if most_bytes:
        # Memory that the process may write to, whether or not it does: more is refused.
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))

    import hashlib
    import time
    from pathlib import Path

    import numpy as np
    import pymc as pm

    from pymc_sgmcmc import SGLDCV, sample
    from pymc_sgmcmc.sources import open_rows
    from rows_benchmark import PRIOR_SD
    from rows_benchmark.files import columns
    from rows_benchmark.repeated import RepeatedRows

    imported = time.time()
    rows = open_rows(
        Path(folder) / "*.parquet", columns={"X": columns(features), "y": "y"}, memory=memory
    )
    opened = time.time()
    for number in range(rows.n_partitions):
        rows.partition(number, ["X", "y"])
    read = time.time()
    if in_memory or copies > 1:
        data = rows.read(0, rows.n_rows)
    if copies > 1:
        rows = RepeatedRows(data, copies)

    clock = _Clock(type(rows))
    began = time.time()
    with pm.Model():
        if in_memory:
            X, y = pm.Data("X", data["X"]), pm.Data("y", data["y"])
        else:
            X, y = rows.head("X", "y")
        intercept = pm.Normal("intercept", 0, PRIOR_SD)
        slopes = pm.Normal("slopes", 0, PRIOR_SD, shape=features)
        pm.Bernoulli("outcome", logit_p=intercept + X @ slopes, observed=y)
        step = SGLDCV(**({} if in_memory else {"rows": rows}))
        set_up, passes = time.time(), clock.rows / rows.n_rows
        settings = {
            "draws": draws, "tune": draws // 5, "step": step, "chains": 2, "cores": 1,
            "progressbar": False, "compute_convergence_checks": False,
        }  # fmt: skip
        clock.seconds, clock.bytes = 0.0, 0
        idata = sample(**settings, random_seed=1)
        ended, gathering, gathered = time.time(), clock.seconds, clock.bytes
        # Again, where nothing is left to compile.
        again = []
        for seed in (2, 3, 4):
            clock.seconds = clock.advancing = 0.0
            sample(**settings, random_seed=seed)
            again.append(clock.advancing)
    posterior = idata["posterior"]
    values = np.concatenate(
        [posterior["intercept"].values[..., None], posterior["slopes"].values], axis=-1
    )
    np.save(Path(folder) / "draws.npy", values)
    transitions = 2 * (draws + draws // 5) * step.thin
    return {
        "start": imported - launched,
        "open": opened - imported,
        "reading": read - opened,
        "set_up": set_up - began,
        "passes": passes,
        "gathering": gathering,
        "gathered_bytes": gathered,
        "sampling": ended - set_up,
        "transitions": transitions,
        "microseconds": 1e6 * min(again) / transitions,
        "batch_size": step.batch_size,
        "resident": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "digest": hashlib.sha256(values.tobytes()).hexdigest()[:16],
    }


class _Clock:
    """Rows that are read of a kind of source, and seconds and bytes of rows that are gathered.

    Seconds of transitions are those in which chains advance, without gathering. Gathering is all
    that is done before transitions can take slices: the numbers of the rows, reading them, and
    their arrays as the gradient estimator has them. In memory it is putting the rows into the
    random order of a seed.
    """

    def __init__(self, kind: type) -> None:
        import time

        from pymc_sgmcmc.batching import ShuffledWindows
        from pymc_sgmcmc.chain import Chain
        from pymc_sgmcmc.gathering import GatheredRows

        self.rows, self.seconds, self.bytes, self.advancing = 0, 0.0, 0, 0.0
        partition, take, advance = kind.partition, kind.take, Chain.advance

        def counted(source: Any, number: int, names: Any) -> Any:
            self.rows += int(source.offsets[number + 1] - source.offsets[number])
            return partition(source, number, names)

        def weighed(source: Any, *arguments: Any) -> Any:
            taken = take(source, *arguments)
            self.bytes += sum(values.nbytes for values in taken.values())
            return taken

        def timed(method: Callable[..., None]) -> Callable[..., None]:
            def call(*arguments: Any) -> None:
                began = time.time()
                method(*arguments)
                self.seconds += time.time() - began

            return call

        def advancing(chain: Any, *arguments: Any) -> Any:
            began = time.time() - self.seconds
            draws = advance(chain, *arguments)
            self.advancing += time.time() - self.seconds - began
            return draws

        kind.partition, kind.take = counted, weighed  # type: ignore[method-assign]
        GatheredRows._gather = timed(GatheredRows._gather)  # type: ignore[method-assign]
        ShuffledWindows.set_order = timed(ShuffledWindows.set_order)  # type: ignore[method-assign]
        Chain.advance = advancing  # type: ignore[method-assign]
