"""Step methods for `pymc.sample`."""

from pymc_sgmcmc.step_methods.austerity import AusterityMH
from pymc_sgmcmc.step_methods.estimators import SAGA, SVRG, FirstOrder, Plain, SecondOrder
from pymc_sgmcmc.step_methods.full_gradient import MALA, ULA
from pymc_sgmcmc.step_methods.hamcmc import HAMCMC, Pairs
from pymc_sgmcmc.step_methods.local import LocalSampling
from pymc_sgmcmc.step_methods.normal_inverse_wishart import NormalInverseWishart
from pymc_sgmcmc.step_methods.osgfs import OSGFS, ConvergenceTest, RunningCovariance
from pymc_sgmcmc.step_methods.prior_metropolis import PriorMetropolis
from pymc_sgmcmc.step_methods.psgld import PSGLD
from pymc_sgmcmc.step_methods.recipe import GaussianAuxiliary, Recipe
from pymc_sgmcmc.step_methods.sghmc import SGHMC, ResampledMomentum
from pymc_sgmcmc.step_methods.sgld import SGLD, SGLDCV
from pymc_sgmcmc.step_methods.sgnht import SGNHT
from pymc_sgmcmc.step_methods.sgrld import SGRLD

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
    "SGRLD",
    "SVRG",
    "ULA",
    "AusterityMH",
    "ConvergenceTest",
    "FirstOrder",
    "GaussianAuxiliary",
    "LocalSampling",
    "NormalInverseWishart",
    "Pairs",
    "Plain",
    "PriorMetropolis",
    "Recipe",
    "ResampledMomentum",
    "RunningCovariance",
    "SecondOrder",
]
