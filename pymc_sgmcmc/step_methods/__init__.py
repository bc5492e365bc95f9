"""Step methods for `pymc.sample`."""

from pymc_sgmcmc.step_methods.estimators import SAGA, SVRG, FirstOrder, Plain, SecondOrder
from pymc_sgmcmc.step_methods.full_gradient import MALA, ULA
from pymc_sgmcmc.step_methods.hamcmc import HAMCMC, Pairs
from pymc_sgmcmc.step_methods.osgfs import OSGFS, ConvergenceTest, RunningCovariance
from pymc_sgmcmc.step_methods.psgld import PSGLD
from pymc_sgmcmc.step_methods.sghmc import SGHMC, ResampledMomentum
from pymc_sgmcmc.step_methods.sgld import SGLD, SGLDCV
from pymc_sgmcmc.step_methods.sgnht import SGNHT

__all__ = [
    "HAMCMC",
    "MALA",
    "OSGFS",
    "PSGLD",
    "SAGA",
    "SGHMC",
    "SGLD",
    "SGLDCV",
    "SGNHT",
    "SVRG",
    "ULA",
    "ConvergenceTest",
    "FirstOrder",
    "Pairs",
    "Plain",
    "ResampledMomentum",
    "RunningCovariance",
    "SecondOrder",
]
