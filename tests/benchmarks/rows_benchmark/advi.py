"""ADVI of `pymc_extras` on minibatches that its `DataLoader` reads from the files."""

from __future__ import annotations

from typing import Any

BATCH = 512
STEPS = 1000
"""The clock is looked at after so many steps."""


def measure(folder: str, features: int, seconds: float, launched: float) -> dict[str, Any]:
    """Fit until the time is over, and write draws of the fitted normal distribution."""
    import time
    from pathlib import Path

    import numpy as np
    import pymc as pm
    from pymc_extras.inference.advi.training import Trainer
    from pymc_extras.variational import DataLoader, parquet_source

    from rows_benchmark import PRIOR_SD

    loader = DataLoader(
        parquet_source(folder), batch_size=BATCH, shuffle=True, buffer_size=1_000_000, seed=1
    )

    def minibatches():  # without end: a new epoch follows the last one
        while True:
            for rows in loader:
                X = np.column_stack([np.ones(len(rows)), rows[:, :features]]).astype("float64")
                yield {"X": X, "y": rows[:, features].astype("int64")}

    with pm.Model():
        X = pm.Data("X", np.zeros((BATCH, features + 1)))
        y = pm.Data("y", np.zeros(BATCH, dtype="int64"))
        coefficients = pm.Normal("coefficients", 0, PRIOR_SD, shape=features + 1)
        pm.Bernoulli("outcome", logit_p=X @ coefficients, observed=y, total_size=loader.total_size)
        trainer, data, steps = Trainer(random_seed=1), minibatches(), 0
        while time.time() - launched < seconds:
            trainer.fit(STEPS, data, random_seed=steps)
            steps += STEPS
        idata = trainer.sample_posterior(2000, random_seed=2)
    values = idata["posterior"]["coefficients"].values
    np.save(Path(folder) / "draws.npy", values.reshape(2, -1, features + 1))
    return {"seconds": time.time() - launched, "steps": steps}
