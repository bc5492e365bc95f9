"""Parts of `many_rows.py`: the files, this package on them, and what a user would do instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common.regression import PRIOR_SD, find_mode

FILE_ROWS = 1_000_000
"""A file has so many rows at most, in one row group: 44 MB with 10 columns."""
ADVI_BATCH = 512
ADVI_STEPS = 1000
"""The clock is looked at after so many steps."""


def names_of(features: int) -> list[str]:
    """Names of the covariates."""
    return [f"x{number}" for number in range(features)]


def write_files(folder: Path, rows: int, features: int) -> None:
    """Simulate rows of 32-bit numbers. Covariates are correlated by .5, the predictor has sd 1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    slopes = np.linspace(-1, 1, features)
    slopes /= np.sqrt(0.5 * (slopes @ slopes + slopes.sum() ** 2))
    for number, start in enumerate(range(0, rows, FILE_ROWS)):
        rng = np.random.default_rng([rows, number])
        count = min(FILE_ROWS, rows - start)
        shared = rng.standard_normal((count, 1), dtype=np.float32)
        own = rng.standard_normal((count, features), dtype=np.float32)
        X = np.float32(np.sqrt(0.5)) * (shared + own)
        y = rng.random(count) < 1 / (1 + np.exp(0.5 - X @ slopes))
        table = dict(zip(names_of(features), X.T, strict=True)) | {"y": y.astype(np.int8)}
        pq.write_table(
            pa.table(table), folder / f"{number:04}.parquet",
            row_group_size=FILE_ROWS, use_dictionary=False, compression="none",
        )  # fmt: skip


def read_files(folder: Path, features: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Covariates, with an intercept before them, and outcomes of one file after the other."""
    import pyarrow.parquet as pq

    for path in sorted(folder.glob("*.parquet")):
        table = pq.read_table(path)
        columns = [table[name].to_numpy() for name in names_of(features)]
        X = np.column_stack([np.ones(len(table)), *columns])
        yield X, table["y"].to_numpy().astype(np.float64)


def nearest_gaussian(folder: Path, features: int, copies: int = 1) -> tuple[Any, Any]:
    """Mode and standard deviations of the Laplace approximation, by Newton's method on all rows."""
    mode, curvature, _ = find_mode(lambda: read_files(folder, features), features + 1, copies)
    return mode, np.sqrt(np.diag(np.linalg.inv(curvature)))


def ours(
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
    import hashlib
    import resource

    if most_bytes:
        # Memory that the process may write to, whether or not it does: more is refused.
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    import pymc as pm

    from pymc_sgmcmc import SGLDCV, sample
    from pymc_sgmcmc.sources import open_rows

    imported = time.time()
    columns = {"X": names_of(features), "y": "y"}
    rows: Any = open_rows(Path(folder) / "*.parquet", columns=columns, memory=memory)
    opened = time.time()
    for number in range(rows.n_partitions):
        rows.partition(number, ["X", "y"])
    read = time.time()
    if in_memory or copies > 1:
        data = rows.read(0, rows.n_rows)
    if copies > 1:
        rows = repeated(data, copies)
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
    found = idata["posterior"]
    values = np.concatenate([found["intercept"].values[..., None], found["slopes"].values], axis=-1)
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
        "microseconds": 1e6 * min(again) / transitions,
        "most_bytes": most_bytes,
        "resident": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "digest": hashlib.sha256(values.tobytes()).hexdigest()[:16],
    }


def repeated(data: Mapping[str, np.ndarray], copies: int) -> Any:
    """A source of any number of rows: copies of the same ones, which take no time to read."""
    from pymc_sgmcmc.sources import RowSource

    class RepeatedRows(RowSource):
        columns = {name: (values.dtype, values.shape[1:]) for name, values in data.items()}  # noqa: RUF012
        offsets = np.arange(copies + 1) * len(next(iter(data.values())))

        def partition(self, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
            return {name: data[name] for name in names}

        def signature(self) -> str:
            return f"{self.n_rows} repeated rows"

    return RepeatedRows()


class _Clock:
    """Rows that are read of a kind of source, and seconds and bytes of rows that are gathered.

    Seconds of transitions are those in which chains advance, without gathering. Gathering is all
    that is done before transitions can take slices: the numbers of the rows, reading them, and
    their arrays as the gradient estimator has them. In memory it is putting the rows into the
    random order of a seed.
    """

    def __init__(self, kind: type) -> None:
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

        kind.partition, kind.take = counted, weighed
        GatheredRows._gather = timed(GatheredRows._gather)
        ShuffledWindows.set_order = timed(ShuffledWindows.set_order)
        Chain.advance = advancing


def nuts(folder: str, features: int, part: int, draws: int, launched: float) -> dict[str, Any]:
    """Two chains of nutpie on the first rows, which are random here."""
    import nutpie
    import pymc as pm

    with np.load(Path(folder) / "part.npz") as first:
        X, y = first["X"][:part], first["y"][:part]
    with pm.Model() as model:
        coefficients = pm.Normal("coefficients", 0, PRIOR_SD, shape=features + 1)
        pm.Bernoulli("outcome", logit_p=X @ coefficients, observed=y)
    compiled = nutpie.compile_pymc_model(model)
    idata = nutpie.sample(compiled, draws=draws, chains=2, cores=2, seed=1, progress_bar=False)
    np.save(Path(folder) / "draws.npy", idata.posterior["coefficients"].values)
    return {"seconds": time.time() - launched, "part": part}


def advi(folder: str, features: int, seconds: float, launched: float) -> dict[str, Any]:
    """ADVI of `pymc_extras` on minibatches that its `DataLoader` reads, until the time is over."""
    import pymc as pm
    from pymc_extras.inference.advi.training import Trainer
    from pymc_extras.variational import DataLoader, parquet_source

    given = {"batch_size": ADVI_BATCH, "shuffle": True, "buffer_size": 1_000_000, "seed": 1}
    loader = DataLoader(parquet_source(folder), **given)

    def minibatches() -> Iterator[dict[str, Any]]:  # without end: a new epoch follows the last one
        while True:
            for rows in loader:
                X = np.column_stack([np.ones(len(rows)), rows[:, :features]]).astype("float64")
                yield {"X": X, "y": rows[:, features].astype("int64")}

    with pm.Model():
        X = pm.Data("X", np.zeros((ADVI_BATCH, features + 1)))
        y = pm.Data("y", np.zeros(ADVI_BATCH, dtype="int64"))
        coefficients = pm.Normal("coefficients", 0, PRIOR_SD, shape=features + 1)
        pm.Bernoulli("outcome", logit_p=X @ coefficients, observed=y, total_size=loader.total_size)
        trainer, data, steps = Trainer(random_seed=1), minibatches(), 0
        while time.time() - launched < seconds:
            trainer.fit(ADVI_STEPS, data, random_seed=steps)
            steps += ADVI_STEPS
        idata = trainer.sample_posterior(2000, random_seed=2)
    values = idata["posterior"]["coefficients"].values
    np.save(Path(folder) / "draws.npy", values.reshape(2, -1, features + 1))
    return {"seconds": time.time() - launched, "part": ADVI_BATCH * steps}
