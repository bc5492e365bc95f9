"""Public names of the package but those of guests, imported when the first is asked for."""

from pymc_sgmcmc.errors import BatchSizeWarning as BatchSizeWarning
from pymc_sgmcmc.errors import BoundaryWarning as BoundaryWarning
from pymc_sgmcmc.errors import CalibrationError as CalibrationError
from pymc_sgmcmc.errors import CenterWarning as CenterWarning
from pymc_sgmcmc.errors import ChainProcessError as ChainProcessError
from pymc_sgmcmc.errors import ConvergenceError as ConvergenceError
from pymc_sgmcmc.errors import ModelError as ModelError
from pymc_sgmcmc.errors import NonFinitePositionError as NonFinitePositionError
from pymc_sgmcmc.errors import StoreError as StoreError
from pymc_sgmcmc.errors import UncorrectedNoiseWarning as UncorrectedNoiseWarning
from pymc_sgmcmc.marginal import *
from pymc_sgmcmc.polishing import *
from pymc_sgmcmc.posterior import *
from pymc_sgmcmc.sampling import *
from pymc_sgmcmc.schedules import PolynomialDecay as PolynomialDecay
from pymc_sgmcmc.sources import open_rows as open_rows
from pymc_sgmcmc.step_methods import *
from pymc_sgmcmc.trace_tools.bias import bias_report as bias_report
from pymc_sgmcmc.trace_tools.calibrated import uncalibrated as uncalibrated
from pymc_sgmcmc.trace_tools.calibration import stein_calibrate as stein_calibrate
from pymc_sgmcmc.trace_tools.convergence import discard_unconverged as discard_unconverged
from pymc_sgmcmc.trace_tools.convergence import gradient_convergence as gradient_convergence
from pymc_sgmcmc.trace_tools.gradients import gradients as gradients
from pymc_sgmcmc.trace_tools.kernel_stein import (
    kernel_stein_discrepancy as kernel_stein_discrepancy,
)
from pymc_sgmcmc.trace_tools.kernel_stein import stein_thin as stein_thin
from pymc_sgmcmc.trace_tools.plots import plot_bias as plot_bias
from pymc_sgmcmc.trace_tools.plots import plot_ess_bias as plot_ess_bias
from pymc_sgmcmc.trace_tools.plots import plot_gradient_trace as plot_gradient_trace
from pymc_sgmcmc.trace_tools.plots import plot_zero_variance as plot_zero_variance
from pymc_sgmcmc.trace_tools.predictive_density import predictive_density as predictive_density
from pymc_sgmcmc.trace_tools.summary import summary as summary
from pymc_sgmcmc.trace_tools.variables import by_variable as by_variable
from pymc_sgmcmc.trace_tools.zero_variance import ZeroVariance as ZeroVariance
from pymc_sgmcmc.trace_tools.zero_variance import zero_variance as zero_variance
