"""A chain that leaves the support of the posterior is reported, since gradients do not stop it."""

from __future__ import annotations

import logging

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

import pymc_sgmcmc
from pymc_sgmcmc import MALA, SGLD, SGLDCV
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.step_methods.possible_draws import MOST_COMPARED, PossibleDraws
from tests.support.sampling import QUICK

SETTINGS = {
    "step_size": 2e-4,
    "preconditioner": "identity",
    "thin": 5,
    "center": {"b": 0.05},
}
RUN = {"tune": 20, "draws": 300, "chains": 1, "random_seed": 1, "progressbar": False}
TOLD = "The log density is minus infinity or NaN at"


def constrained(bound: float) -> pm.Model:
    """A slope with mean 0.05 and standard deviation 0.03, cut off at a bound from below."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=1000)
    y = rng.normal(size=1000)
    y += (0.05 - x @ y / (x @ x)) * x
    with pm.Model() as model:
        b = pm.Normal("b", 0, 10)
        pm.Potential("bounded", pt.switch(b > bound, 0.0, -np.inf))
        pm.Normal("y", b * x, 1, observed=y)
    return model


@pytest.mark.parametrize("run", ["pm.sample", "sample"])
def test_a_constraint_without_gradient_is_reported(run, caplog):
    caplog.set_level(logging.WARNING)
    with constrained(0.0):
        if run == "pm.sample":
            idata = pm.sample(step=SGLDCV(**SETTINGS), compute_convergence_checks=False, **RUN)
        else:
            idata = pymc_sgmcmc.sample(step=SGLDCV(**SETTINGS), **RUN)
    violated = idata["posterior"]["b"].values.ravel()[2::3] <= 0  # draws 3, 6 to 300
    assert f"{TOLD} {violated.sum()} of 100 draws" in caplog.text
    assert 0 < violated.sum() < 30


def test_draws_inside_of_a_constraint_are_not_reported(caplog):
    caplog.set_level(logging.WARNING)
    with constrained(-1.0):
        pm.sample(step=SGLD(**SETTINGS), compute_convergence_checks=False, **RUN)
    assert TOLD not in caplog.text


@pytest.mark.usefixtures("without_compiler")
def test_metropolis_decisions_obey_a_constraint(caplog):
    caplog.set_level(logging.WARNING)
    with constrained(0.0):
        idata = pm.sample(
            step=MALA(**SETTINGS, compile_kwargs=QUICK), compute_convergence_checks=False, **RUN
        )
    assert idata["posterior"]["b"].values.min() > 0
    assert TOLD not in caplog.text


def test_invalid_parameters_of_rows_are_reported():
    """The gradient of a success is finite at p = 1.5, and so is its log density."""
    outcomes = np.ones(2000)
    outcomes[::20] = 0
    with pm.Model() as model:
        p = pm.Normal("p")
        pm.Bernoulli("y", p, observed=outcomes)
    posterior = Posterior(model)
    positions = np.array([[0.95], [1.5], [0.9], [-0.1]])
    assert [posterior.is_possible(position) for position in positions] == [True, False, True, False]
    draws = PossibleDraws(posterior, tune=1, total=5)
    draws.see(positions[:1], first=2)
    assert draws.warning() is None
    draws.see(positions[1:], first=3)
    assert draws.warning().startswith(f"{TOLD} 2 of 4 draws")


@pytest.mark.parametrize(("tune", "total"), [(0, 1), (5, 8), (100, 1100), (3, 3)])
def test_draws_are_compared_evenly_after_tuning(tune, total):
    class Counting:
        def is_possible(self, position, *, rows):
            numbers.append(int(position[0]))
            return True

    numbers: list[int] = []
    draws = PossibleDraws(Counting(), tune, total)
    for number in range(1, total + 1):
        draws.see(np.array([[number]]), number)
    assert len(numbers) == min(total - tune, MOST_COMPARED)
    assert all(tune < number <= total for number in numbers)
    assert np.ptp(np.diff(numbers)) <= 1 if len(numbers) > 1 else True


def test_a_log_density_that_fails_does_not_end_the_chain():
    class Failing:
        def is_possible(self, position, *, rows):
            raise np.linalg.LinAlgError("singular")

    draws = PossibleDraws(Failing(), 0, 3)
    draws.see(np.zeros((3, 1)), 1)
    assert draws.warning() is None
