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
from pymc_sgmcmc.tuning.find_center import check_given_center, find_center
from pymc_sgmcmc.tuning.judge import judge_at, with_steepest
from pymc_sgmcmc.tuning.jumps import warn_of_jumps
from pymc_sgmcmc.tuning.row_noise import NOISE_POINTS, RowNoise, row_noise
from pymc_sgmcmc.tuning.step_size import (
    VARIANCE_INFLATION,
    StepSizeChoice,
    choose_step_size,
)

__all__ = [
    "DENSE_DIMENSION",
    "GATHERED",
    "NOISE_POINTS",
    "VARIANCE_INFLATION",
    "Center",
    "Curvature",
    "RowNoise",
    "StepSizeChoice",
    "center_at",
    "check_given_center",
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
    "warn_of_jumps",
    "with_steepest",
]
