"""Centre, curvature and step size of a posterior.

The results are deterministic for a given model and data, since rows are sampled with fixed seeds.
"""

from pymc_sgmcmc.tuning.batch_size import GATHERED, choose_batch_size, least_cost
from pymc_sgmcmc.tuning.center import Center, center_at, laplace_draws, laplace_pairs
from pymc_sgmcmc.tuning.curvature import (
    DENSE_DIMENSION,
    Curvature,
    dense_curvature,
    has_dense_curvature,
    prior_precision,
)
from pymc_sgmcmc.tuning.find_center import find_center
from pymc_sgmcmc.tuning.judge import judge_at, with_steepest
from pymc_sgmcmc.tuning.row_noise import NOISE_POINTS, RowNoise, row_noise
from pymc_sgmcmc.tuning.step_size import (
    VARIANCE_INFLATION,
    StepSizeChoice,
    choose_step_size,
)
from pymc_sgmcmc.tuning.subsample import Subsample
from pymc_sgmcmc.tuning.suspicions import OF_A_GIVEN_CENTER, OF_ANY_CENTER, warn_of

__all__ = [
    "DENSE_DIMENSION",
    "GATHERED",
    "NOISE_POINTS",
    "OF_ANY_CENTER",
    "OF_A_GIVEN_CENTER",
    "VARIANCE_INFLATION",
    "Center",
    "Curvature",
    "RowNoise",
    "StepSizeChoice",
    "Subsample",
    "center_at",
    "choose_batch_size",
    "choose_step_size",
    "dense_curvature",
    "find_center",
    "has_dense_curvature",
    "judge_at",
    "laplace_draws",
    "laplace_pairs",
    "least_cost",
    "prior_precision",
    "row_noise",
    "warn_of",
    "with_steepest",
]
