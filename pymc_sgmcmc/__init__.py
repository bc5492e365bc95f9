"""Stochastic gradient MCMC for PyMC models.

Write a PyMC model, pass one of the step methods to `pymc.sample`, and get an ArviZ-schema
`DataTree` in a time that does not grow with the data:

>>> import pymc as pm
>>> from pymc_sgmcmc import SGLDCV
"""

from pymc_sgmcmc.errors import (
    BatchSizeWarning,
    BoundaryWarning,
    CalibrationError,
    CenterWarning,
    ChainProcessError,
    ConvergenceError,
    ModelError,
    NonFinitePositionError,
    StoreError,
    UncorrectedNoiseWarning,
)
from pymc_sgmcmc.gradient_estimators import SVRG
from pymc_sgmcmc.marginal import MarginalFit, fit_marginal, marginalize, recover
from pymc_sgmcmc.polishing import Polished, polish
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.record import label_positions as label_positions  # with a FutureWarning
from pymc_sgmcmc.sampling import consensus, read_store, sample, sample_blocks
from pymc_sgmcmc.schedules import PolynomialDecay
from pymc_sgmcmc.step_methods import (
    HAMCMC,
    MALA,
    OSGFS,
    PSGLD,
    SGHMC,
    SGLD,
    SGLDCV,
    SGNHT,
    SGRLD,
    ULA,
    AusterityMH,
    GaussianAuxiliary,
    LocalSampling,
    NormalInverseWishart,
    PriorMetropolis,
    Recipe,
)
from pymc_sgmcmc.step_methods.pymc_hook import reports
from pymc_sgmcmc.trace_tools.bias import bias_report, bias_warnings, mean_warnings
from pymc_sgmcmc.trace_tools.calibrated import uncalibrated
from pymc_sgmcmc.trace_tools.calibration import stein_calibrate
from pymc_sgmcmc.trace_tools.convergence import discard_unconverged, gradient_convergence
from pymc_sgmcmc.trace_tools.gradients import gradients
from pymc_sgmcmc.trace_tools.kernel_stein import kernel_stein_discrepancy, stein_thin
from pymc_sgmcmc.trace_tools.local_draws import local_warnings
from pymc_sgmcmc.trace_tools.plots import (
    plot_bias,
    plot_ess_bias,
    plot_gradient_trace,
    plot_zero_variance,
)
from pymc_sgmcmc.trace_tools.predictive_density import predictive_density
from pymc_sgmcmc.trace_tools.summary import summary
from pymc_sgmcmc.trace_tools.zero_variance import (
    ZeroVariance,
    zero_variance,
    zero_variance_of_moments,
)

__version__ = "0.1.0"

# What a run logs when it has ended.
reports.extend([bias_warnings, local_warnings, mean_warnings])

__all__ = [
    "HAMCMC",
    "MALA",
    "OSGFS",
    "PSGLD",
    "SGHMC",
    "SGLD",
    "SGLDCV",
    "SGNHT",
    "SGRLD",
    "SVRG",
    "ULA",
    "AusterityMH",
    "BatchSizeWarning",
    "BoundaryWarning",
    "CalibrationError",
    "CenterWarning",
    "ChainProcessError",
    "ConvergenceError",
    "GaussianAuxiliary",
    "LocalSampling",
    "MarginalFit",
    "ModelError",
    "NonFinitePositionError",
    "NormalInverseWishart",
    "Polished",
    "PolynomialDecay",
    "Posterior",
    "PriorMetropolis",
    "Recipe",
    "StoreError",
    "UncorrectedNoiseWarning",
    "ZeroVariance",
    "__version__",
    "bias_report",
    "consensus",
    "discard_unconverged",
    "fit_marginal",
    "gradient_convergence",
    "gradients",
    "kernel_stein_discrepancy",
    "marginalize",
    "plot_bias",
    "plot_ess_bias",
    "plot_gradient_trace",
    "plot_zero_variance",
    "polish",
    "predictive_density",
    "read_store",
    "recover",
    "sample",
    "sample_blocks",
    "stein_calibrate",
    "stein_thin",
    "summary",
    "uncalibrated",
    "zero_variance",
    "zero_variance_of_moments",
]
