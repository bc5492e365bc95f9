"""Local variables that are sampled inside of the gradient estimator, by Fisher's identity."""

from __future__ import annotations

from itertools import product

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_sgmcmc import SGLD, SGLDCV, LocalSampling
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.marginal.complete import CompleteData
from pymc_sgmcmc.marginal.local_transitions import LangevinTransitions
from pymc_sgmcmc.tuning.local_variables import langevin_setup
from tests.support.topics import Topics


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
        d, G = 2, self.n_groups
        size = 1 + d + G
        shift, slope = self.conditional()
        rows = [self.group == g for g in range(G)]
        operator = np.zeros((size**2, size**2))
        source = np.zeros((size, size))
        minibatches = list(product(range(G), repeat=batch_size))
        for minibatch in minibatches:
            linear = np.eye(size)
            noise: list[np.ndarray] = [np.sqrt(step_size) * np.eye(size)[1 + k] for k in range(d)]
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


def sample(model, step, draws, chains=2, **settings):
    with model:
        return pm.sample(
            step=step,
            draws=draws,
            tune=200,
            chains=chains,
            cores=1,
            random_seed=5,
            progressbar=False,
            quiet=True,
            compute_convergence_checks=False,
            **settings,
        )


@pytest.fixture(scope="module")
def small():
    """A small mixed model, its step method with one transition a visit, and its step size."""
    problem = LinearMixedModel()
    model = problem.model()
    step_size = 0.3 * np.linalg.eigvalsh(problem.marginal()[1])[0]
    with model:
        step = SGLD(
            step_size=step_size,
            thin=10,
            batch_size=2,
            local=LocalSampling("u", transitions=1),
        )
    return problem, model, step, step_size


@pytest.mark.parametrize("remaining", [0.0, 0.8])
def test_exact_law_on_a_linear_mixed_model(small, remaining):
    """Mean and covariance are those of the chain of position and local variables together."""
    problem, model, step, step_size = small
    mean, covariance = problem.exact_law(step_size, 2, remaining)
    local = step.block.memory._local
    assert isinstance(local, LangevinTransitions)
    local.correlation = remaining
    idata = sample(model, step, 2500)
    draws = idata.posterior["beta"].values.reshape(-1, 2)
    ess = az.ess(idata, var_names="beta")["beta"].values
    z_mean = (draws.mean(0) - mean) / np.sqrt(np.diag(covariance) / ess)
    assert (np.abs(z_mean) < 4.5).all(), z_mean
    # Chains of a linear map of Gaussian numbers: the variance of a variance is 2 / n.
    z_variance = (draws.var(0) / np.diag(covariance) - 1) / np.sqrt(2 / ess)
    assert (np.abs(z_variance) < 4.5).all(), z_variance


def test_local_draws_follow_their_law(small):
    """Each draw in the trace has local variables, with the mean and variance given the records."""
    problem, model, step, _ = small
    step.block.memory._local.correlation = 0.0
    idata = sample(model, step, 2500)
    mean, covariance = problem.exact_law(step.step_size, 2, 0.0)
    shift, slope = problem.conditional()
    draws = idata.posterior["u"].values.reshape(-1, problem.n_groups)
    ess = az.ess(idata, var_names="u")["u"].values
    # The mean has no lag; the variance given the position is that of the conditional law.
    z = (draws.mean(0) - (shift - slope @ mean)) / (draws.std(0) / np.sqrt(ess))
    assert (np.abs(z) < 4.5).all(), z
    assert (draws.var(0) > 0.8 / problem.precisions).all()
    assert np.isfinite(covariance).all()


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


# --- Defaults --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed():
    """Groups of 1 to 4 records, and the exact posterior."""
    return LinearMixedModel(200, seed=3)


def test_control_variates_with_default_settings(mixed):
    """The posterior within the stated error of its variance, from few groups a minibatch."""
    model = mixed.model()
    with model:
        step = SGLDCV(local="u")
    assert step.batch_size <= 20
    idata = sample(model, step, 1500, var_names=["beta"])
    assert list(idata.posterior.data_vars) == ["beta"]
    mean, covariance = mixed.marginal()
    draws = (idata.posterior["beta"].values.reshape(-1, 2) - mean) / np.sqrt(np.diag(covariance))
    ess = az.ess(idata)["beta"].values
    # The gradient of all groups is known up to 0.03 standard deviations.
    assert (np.abs(draws.mean(0)) < 0.03 * 4 + 4.5 / np.sqrt(ess)).all()
    error = 4.5 * np.sqrt(2 / ess)
    assert (draws.var(0) - 1 > -error).all()
    assert (draws.var(0) - 1 < 0.06 + error).all()


def test_transitions_of_a_user():
    """Proposals from the prior have the same law as transitions by default."""
    problem = LinearMixedModel()
    model = problem.model()

    def from_prior(state):
        proposal = problem.EFFECT * state.noise[:, :1]
        prior = (proposal[:, 0] ** 2 - state.block[:, 0] ** 2) / (2 * problem.EFFECT**2)
        change = state.log_density(proposal) - state.log_density(state.block) + prior
        uniform = 0.5 * pt.erfc(state.noise[:, 1] / np.sqrt(2))
        return pt.switch((pt.log(uniform) < change)[:, None], proposal, state.block)

    local = LocalSampling("u", transitions=12, transition=from_prior, noise_size=2)
    step_size = 0.3 * np.linalg.eigvalsh(problem.marginal()[1])[0]
    with model:
        step = SGLD(step_size=step_size, thin=10, batch_size=2, local=local)
    idata = sample(model, step, 2000)
    mean, covariance = problem.exact_law(step_size, 2, 0.0)
    draws = idata.posterior["beta"].values.reshape(-1, 2)
    ess = az.ess(idata, var_names="beta")["beta"].values
    assert (np.abs(draws.mean(0) - mean) < 4.5 * np.sqrt(np.diag(covariance) / ess)).all()
    z_variance = (draws.var(0) / np.diag(covariance) - 1) / np.sqrt(2 / ess)
    assert (np.abs(z_variance) < 4.5).all(), z_variance


# --- Bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"local": 3}, TypeError, "names of local variables or a `LocalSampling`, but got 3"),
        ({"local": "beta"}, ModelError, "each of 2 groups or records"),
        ({"local": "nobody"}, (ModelError, ValueError, KeyError), "nobody"),
        ({"local": "u", "gradient": "saga"}, ValueError, "but got 'saga'"),
        ({"local": "u", "batching": "shuffle"}, ValueError, "leave `batching` out"),
        ({"local": "u", "compile_kwargs": {"mode": "JAX"}}, ValueError, "does not run on JAX"),
    ],
)
def test_refused(small, settings, error, message):
    with small[1], pytest.raises(error, match=message):
        SGLD(step_size=0.01, batch_size=2, **settings)


def test_refused_settings_of_transitions():
    with pytest.raises(ValueError, match="belong together"):
        LocalSampling("u", noise_size=3)
    with pytest.raises(ValueError, match="`transitions` should be a whole number, at least 1"):
        LocalSampling("u", transitions=0)


def test_slow_transitions_are_warned_of(caplog):
    """The law given the records is a thin arc, which a Gaussian scale does not fit."""
    rng = np.random.default_rng(1)
    with pm.Model() as model:
        mean = pm.Normal("mean")
        u = pm.Normal("u", 0, 2, shape=(40, 2))
        bend = u[:, 0] + 3 * u[:, 1] ** 2
        pm.Normal("y", mean + bend, 0.02, observed=rng.normal(size=40))
    complete = CompleteData(model, "u", laplace_wanted=False)
    with caplog.at_level("WARNING", "pymc"):
        langevin_setup(complete, np.zeros(1))
    assert "lag behind the other variables" in caplog.text
    assert "`transitions` in `LocalSampling`" in caplog.text


def test_many_local_quantities_need_a_step_size():
    rng = np.random.default_rng(1)
    with pm.Model() as model:
        mean = pm.Normal("mean")
        u = pm.Normal("u", shape=(30, 7))
        pm.Normal("y", mean + u, 1.0, observed=rng.normal(size=(30, 7)))
    with model, pytest.raises(ValueError, match=r"at most 6. Give `step_size` and `batch_size`"):
        SGLD(local="u")


def test_changed_data_are_refused():
    problem = LinearMixedModel()
    with pm.Model():
        y = pm.Data("y_data", problem.y)
        beta = pm.Normal("beta", 0, 3.0, shape=2)
        u = pm.Normal("u", 0, 0.9, shape=problem.n_groups)
        pm.Normal("y", problem.X @ beta + u[problem.group], 1.3, observed=y)
        step = SGLD(local="u", step_size=0.01, batch_size=2)
        pm.set_data({"y_data": problem.y + 1})
        with pytest.raises(ModelError, match="`y_data` were changed"):
            step.setup_chain(np.random.default_rng(1), 0, 10)


def test_pieces_against_differences():
    """Gradients by position and block, and rows that add up, whatever the order of variables."""
    rng = np.random.default_rng(4)
    group = rng.integers(0, 5, size=20)
    with pm.Model() as model:
        slope = pm.Normal("slope")
        sd = pm.HalfNormal("sd", 1)
        u = pm.Normal("u", shape=5)
        mean = pm.math.exp(0.3 * slope + sd * u[group])
        pm.Poisson("y", mean, observed=rng.poisson(1.5, size=20))
    complete = CompleteData(model, "u")
    pieces = complete.compile(
        lambda *at: [
            complete.log_density(*at),
            complete.gradient(*at),
            complete.gradient_by_block(*at),
            complete.row_gradients(*at),
        ]
    )
    numbers = np.array([0, 3, 4])
    position, block = rng.normal(size=2), rng.normal(size=(3, 1))
    _, gradient, by_block, rows = pieces(position, numbers, block)

    def value(position, block):
        return pieces(position, numbers, block)[0]

    for k, unit in enumerate(np.eye(2)):
        above, below = (value(position + sign * 1e-5 * unit, block) for sign in (1, -1))
        np.testing.assert_allclose(rows[:, k], (above - below) / 2e-5, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(rows.sum(0), gradient)
    above, below = (value(position, block + sign * 1e-5) for sign in (1, -1))
    np.testing.assert_allclose(by_block[:, 0], (above - below) / 2e-5, rtol=1e-6, atol=1e-7)
    # The order is that of the model of groups, whose other log density it is.
    point = dict(zip([v.name for v in complete.groups.value_vars], position, strict=True))
    every = np.zeros(5)
    everyone = pieces(position, np.arange(5), every[:, None])[0].sum()
    joint = model.compile_logp(vars=[model["y"], model["u"]])
    np.testing.assert_allclose(everyone, joint({**point, "u": every}))


# --- Topic models ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["sgld", "sgldcv", "sgrld"])
def test_topics_predict_as_well_as_variational_bayes(sampler, data_folder):
    pytest.importorskip("sklearn")
    topics = Topics.from_corpus(data_folder, words=500, documents=400)
    draws = topics.sample(sampler, draws=400)
    assert topics.perplexity(draws[len(draws) // 2 :: 10]) < topics.variational()
