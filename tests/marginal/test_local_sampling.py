"""Local variables that are sampled inside of the gradient estimator, by Fisher's identity."""

from __future__ import annotations

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_sgmcmc import SGLD, SGLDCV, LocalSampling, SGNHT
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.marginal.complete import CompleteData
from pymc_sgmcmc.marginal.local_transitions import LangevinTransitions


class LinearMixedModel:
    """y = X β + slope of a group, with known variances: chain and posterior are Gaussian.

    With β the gradient is g(β, u), linear in both, and a visit makes
    u' = a u + (1 - a) E[u | y, β] + sqrt(1 - a²) s z with s the standard deviation of u given y.
    """

    NOISE, EFFECT, PRIOR = 1.3, 0.9, 3.0

    def __init__(self, n_groups: int = 6, seed: int = 2):
        rng = np.random.default_rng(seed)
        sizes = 1 + np.arange(n_groups) % 4
        self.group = np.repeat(np.arange(n_groups), sizes)
        n = len(self.group)
        self.X = np.column_stack([np.ones(n), rng.normal(size=n)])
        self.z = rng.normal(1, 0.5, size=n)
        self.y = self.X @ [0.5, -1.0] + rng.normal(size=n_groups)[self.group] + rng.normal(size=n)
        self.n_groups = n_groups
        chosen = np.eye(n_groups)[self.group]
        self.precisions = self.EFFECT**-2 + chosen.T @ self.z**2 / self.NOISE**2
        self.cross = (chosen * self.z[:, None]).T @ self.X / self.NOISE**2  # (G, 2)
        self.chosen = chosen

    def model(self) -> pm.Model:
        with pm.Model() as model:
            beta = pm.Normal("beta", 0, self.PRIOR, shape=2)
            u = pm.Normal("u", 0, self.EFFECT, shape=self.n_groups)
            pm.Normal("y", self.X @ beta + self.z * u[self.group], self.NOISE, observed=self.y)
        return model

    def marginal(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of the posterior of β."""
        V = self.NOISE**2 * np.eye(len(self.y))
        scaled = self.chosen * self.z[:, None]
        V += self.EFFECT**2 * scaled @ scaled.T
        inverse = np.linalg.inv(V)
        covariance = np.linalg.inv(self.X.T @ inverse @ self.X + np.eye(2) / self.PRIOR**2)
        return covariance @ self.X.T @ inverse @ self.y, covariance

    def conditional(self) -> tuple[np.ndarray, np.ndarray]:
        """c and C in E[u | y, β] = c - C β, of each group."""
        shift = self.chosen.T @ (self.z * self.y) / self.NOISE**2 / self.precisions
        return shift, self.cross / self.precisions[:, None]

    def exact_law(
        self, step_size: float, batch_size: int, remaining: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Stationary mean and covariance of β, for SGLD with minibatches drawn with replacement.

        A minibatch is n draws of a group. The state is (1, β, u), its second moments solve a linear
        equation, and the mean over minibatches is by enumeration. A group that is drawn twice has
        two new states, of which the last is kept.
        """
        from itertools import product

        d, G = 2, self.n_groups
        size = 1 + d + G
        shift, slope = self.conditional()
        rows = [self.group == g for g in range(G)]
        operator = np.zeros((size**2, size**2))
        source = np.zeros((size, size))
        minibatches = list(product(range(G), repeat=batch_size))
        for minibatch in minibatches:
            linear = np.eye(size)
            noise: list[np.ndarray] = [
                np.sqrt(step_size) * np.eye(size)[1 + k] for k in range(d)
            ]
            gradient = np.zeros((d, size))
            gradient[:, 1 : 1 + d] = -np.eye(d) / self.PRIOR**2
            of_noise = []
            new = {}
            for place, g in enumerate(minibatch):
                state = np.zeros(size)
                state[1 + d + g] = remaining
                state[0] = (1 - remaining) * shift[g]
                state[1 : 1 + d] = -(1 - remaining) * slope[g]
                spread = np.sqrt((1 - remaining**2) / self.precisions[g])
                new[g] = (state, place, spread)
                X, z, y = self.X[rows[g]], self.z[rows[g]], self.y[rows[g]]
                scale = G / batch_size / self.NOISE**2
                gradient[:, 0] += scale * X.T @ y
                gradient[:, 1 : 1 + d] -= scale * X.T @ X
                gradient -= scale * np.outer(X.T @ z, state)
                of_noise.append(-scale * X.T @ z * spread)
            linear[1 : 1 + d] += step_size / 2 * gradient
            columns = []
            for place, effect in enumerate(of_noise):
                column = np.zeros(size)
                column[1 : 1 + d] = step_size / 2 * effect
                for g, (_, last, spread) in new.items():
                    if last == place:
                        column[1 + d + g] = spread
                columns.append(column)
            for g, (state, _, _) in new.items():
                linear[1 + d + g] = state
            operator += np.kron(linear, linear)
            source += sum(np.outer(column, column) for column in [*noise, *columns])
        operator /= len(minibatches)
        source /= len(minibatches)
        # The first entry of the state is one: its row of the equation says so.
        equation = np.eye(size**2) - operator
        equation[0] = 0
        equation[0, 0] = 1
        right = source.ravel()
        right[0] = 1
        moments = np.linalg.solve(equation, right).reshape(size, size)
        mean = moments[0, 1 : 1 + d]
        return mean, moments[1 : 1 + d, 1 : 1 + d] - np.outer(mean, mean)


def run(problem, step, draws, seed=5, chains=2):
    with problem:
        return pm.sample(
            step=step,
            draws=draws,
            tune=200,
            chains=chains,
            cores=1,
            random_seed=seed,
            progressbar=False,
            quiet=True,
            compute_convergence_checks=False,
        )


@pytest.mark.parametrize("remaining", [0.0, 0.8])
def test_exact_law_on_a_linear_mixed_model(remaining, monkeypatch):
    """Mean and covariance are those of the chain of position and local variables together."""
    problem = LinearMixedModel()
    _, posterior_covariance = problem.marginal()
    step_size = 0.3 * np.linalg.eigvalsh(posterior_covariance)[0]
    mean, covariance = problem.exact_law(step_size, 2, remaining)
    model = problem.model()
    with model:
        step = SGLD(
            step_size=step_size,
            thin=20,
            batch_size=2,
            local=LocalSampling("u", transitions=1),
        )
    local = step.block.memory._local
    assert isinstance(local, LangevinTransitions)
    assert local.correlation == 0  # the conditional law is Gaussian
    local.correlation = remaining
    idata = run(model, step, 4000)
    draws = idata.posterior["beta"].values
    ess = az.ess(idata, var_names="beta")["beta"].values
    flat = draws.reshape(-1, 2)
    z_mean = (flat.mean(0) - mean) / np.sqrt(np.diag(covariance) / ess)
    assert (np.abs(z_mean) < 4.5).all(), z_mean
    ess_sd = az.ess(idata, var_names="beta", method="sd")["beta"].values
    z_variance = (flat.var(0) / np.diag(covariance) - 1) / np.sqrt(2 / ess_sd)
    assert (np.abs(z_variance) < 4.5).all(), z_variance


def test_error_falls_geometrically_with_the_transitions():
    """The stationary error from old local variables falls by ρ² and more for a transition."""
    problem = LinearMixedModel()
    _, posterior = problem.marginal()
    step_size = 0.05 * np.linalg.eigvalsh(posterior)[0]
    _, fresh = problem.exact_law(step_size, 2, 0.0)
    errors = []
    for transitions in (1, 2, 4, 8):
        _, covariance = problem.exact_law(step_size, 2, 0.6**transitions)
        errors.append(np.abs(np.diag(covariance) / np.diag(fresh) - 1).max())
    assert errors[0] < 0.05
    assert errors[1] < 0.7 * errors[0]
    assert errors[2] < 0.5 * errors[1]
    assert errors[3] < 0.2 * errors[2]
