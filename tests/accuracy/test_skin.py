"""SGLD-CV with default settings on real data, against full-data NUTS."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pymc as pm

from pymc_sgmcmc import SGLDCV
from tests.accuracy.posteriors import skin_logistic
from tests.support.references import read_arrays

REFERENCES = Path(__file__).parent / "references"


def test_skin_segmentation(data_folder):
    """Means within 0.1 posterior sd and sds within 5 %, by 500 of 245 057 rows at a time."""
    reference = read_arrays(REFERENCES / "skin_logistic.npz")
    mean, sd = reference["beta_mean"], reference["beta_sd"]
    assert reference["beta_r_hat"].max() < 1.01
    with skin_logistic(data_folder):
        idata = pm.sample(
            step=SGLDCV(batch_size=500, compile_kwargs={"mode": "NUMBA"}),
            draws=2500,
            tune=200,
            chains=4,
            cores=1,
            random_seed=1,
            progressbar=False,
            quiet=True,
            compute_convergence_checks=False,
        )
    beta = idata.posterior["beta"].values.reshape(-1, len(mean))
    assert np.abs((beta.mean(0) - mean) / sd).max() < 0.1
    assert np.abs(beta.std(0) / sd - 1).max() < 0.05
