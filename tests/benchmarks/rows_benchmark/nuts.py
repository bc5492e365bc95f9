"""nutpie on a part of the rows, which a user would draw where not all fit in memory."""

from __future__ import annotations

from typing import Any


def measure(folder: str, features: int, part: int, draws: int, launched: float) -> dict[str, Any]:
    """Sample two chains on the first rows, which are random here, and write the draws."""
    import time
    from pathlib import Path

    import numpy as np
    import nutpie
    import pymc as pm

    from rows_benchmark import PRIOR_SD

    with np.load(Path(folder) / "part.npz") as first:
        X, y = first["X"][:part], first["y"][:part]
    with pm.Model() as model:
        coefficients = pm.Normal("coefficients", 0, PRIOR_SD, shape=features + 1)
        pm.Bernoulli("outcome", logit_p=X @ coefficients, observed=y)
    compiled = nutpie.compile_pymc_model(model)
    idata = nutpie.sample(compiled, draws=draws, chains=2, cores=2, seed=1, progress_bar=False)
    np.save(Path(folder) / "draws.npy", idata.posterior["coefficients"].values)
    return {"seconds": time.time() - launched, "part": part}
