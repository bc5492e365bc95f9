"""Transitions of chains, with one file for each algorithm."""

from pymc_sgmcmc.dynamics.averaged import AveragedLangevin
from pymc_sgmcmc.dynamics.baoab import BAOAB
from pymc_sgmcmc.dynamics.base import Auxiliary, Dynamics, Transition
from pymc_sgmcmc.dynamics.hamcmc import QuasiNewtonLangevin
from pymc_sgmcmc.dynamics.langevin import Langevin
from pymc_sgmcmc.dynamics.law import AVERAGED, EULER, LAWS, Law
from pymc_sgmcmc.dynamics.metropolis_adjusted import MetropolisAdjustedLangevin
from pymc_sgmcmc.dynamics.osgfs import FisherScoring
from pymc_sgmcmc.dynamics.recipe import RecipeDynamics
from pymc_sgmcmc.dynamics.riemannian import RiemannianLangevin
from pymc_sgmcmc.dynamics.sghmc import SGHMCEuler
from pymc_sgmcmc.dynamics.sgnht import NoseHoover

__all__ = [
    "AVERAGED",
    "BAOAB",
    "EULER",
    "LAWS",
    "Auxiliary",
    "AveragedLangevin",
    "Dynamics",
    "FisherScoring",
    "Langevin",
    "Law",
    "MetropolisAdjustedLangevin",
    "NoseHoover",
    "QuasiNewtonLangevin",
    "RecipeDynamics",
    "RiemannianLangevin",
    "SGHMCEuler",
    "Transition",
]
