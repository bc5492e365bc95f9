"""Estimators of the gradient of the log posterior from a minibatch, with one file for each.

An estimator turns a posterior and a minibatch scheme into a symbolic function of a position
and an index. All are unbiased for each position. They differ in their variance.
"""

from pymc_sgmcmc.gradient_estimators.base import GradientEstimator, Memory, Reference
from pymc_sgmcmc.gradient_estimators.control_variate import SECOND_ORDER, ControlVariateGradient
from pymc_sgmcmc.gradient_estimators.full import FullGradient
from pymc_sgmcmc.gradient_estimators.plain import PlainGradient
from pymc_sgmcmc.gradient_estimators.saga import SAGAGradient
from pymc_sgmcmc.gradient_estimators.svrg import SVRGGradient
from pymc_sgmcmc.gradient_estimators.weighted import WeightedGradient

__all__ = [
    "SECOND_ORDER",
    "ControlVariateGradient",
    "FullGradient",
    "GradientEstimator",
    "Memory",
    "PlainGradient",
    "Reference",
    "SAGAGradient",
    "SVRGGradient",
    "WeightedGradient",
]
