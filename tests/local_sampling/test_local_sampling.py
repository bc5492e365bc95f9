"""Local variables that are sampled inside of the gradient estimator, by Fisher's identity."""

from __future__ import annotations

import json
from itertools import product

import arviz as az
import cloudpickle
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_sgmcmc import (
    SGLD,
    SGLDCV,
    LocalSampling,
    Posterior,
    bias_report,
    marginalize,
    recover,
)
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.local_sampling import set_up as local_variables
from pymc_sgmcmc.local_sampling.complete import CompleteData
from pymc_sgmcmc.local_sampling.local_transitions import LangevinTransitions
from pymc_sgmcmc.local_sampling.set_up import langevin_setup
from tests.support.topics import Topics

NUMBA = {"mode": "NUMBA"}


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


def sample(model, step, draws, tune=200, chains=2, **settings):
    with model:
        return pm.sample(
            step=step,
            draws=draws,
            tune=tune,
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
            preconditioner="identity",
            thin=10,
            batch_size=2,
            gradient=LocalSampling("u", transitions=1, control_variates=False),
            compile_kwargs=NUMBA,
        )
    return problem, model, step, step_size


@pytest.mark.slow
@pytest.mark.parametrize("remaining", [0.0, 0.8])
def test_exact_law_on_a_linear_mixed_model(small, remaining):
    """Mean and covariance are those of the chain of position and local variables together."""
    problem, model, step, step_size = small
    mean, covariance = problem.exact_law(step_size, 2, remaining)
    local = step.block.memory.local
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
    step.block.memory.local.correlation = 0.0
    idata = sample(model, step, 1000)
    mean, covariance = problem.exact_law(step.step_size, 2, 0.0)
    shift, slope = problem.conditional()
    draws = idata.posterior["u"].values.reshape(-1, problem.n_groups)
    ess = az.ess(idata, var_names="u")["u"].values
    # The mean has no lag; the variance given the position is that of the conditional law.
    z = (draws.mean(0) - (shift - slope @ mean)) / (draws.std(0) / np.sqrt(ess))
    assert (np.abs(z) < 4.5).all(), z
    assert (draws.var(0) > 0.8 / problem.precisions).all()
    assert np.isfinite(covariance).all()


def test_other_step_methods_that_move_the_position_are_refused(small):
    """Local variables of groups that are in no minibatch would be those given earlier values."""
    _, model, step, _ = small
    step.setup_chain(np.random.default_rng(1), 0, 10)
    point, _ = step.step(model.initial_point())
    point, _ = step.step(point)
    with pytest.raises(ModelError, match=r"moves `beta\[0\]`.*Leave the other step method out"):
        step.step({**point, "beta": point["beta"] + [1.0, 0.0]})


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


@pytest.mark.parametrize("correlation", [0.0, 0.7])
def test_langevin_transitions_leave_the_law_invariant(correlation):
    """Skewed laws, of which no proposal is a draw, on groups that all have the same records."""
    n_groups, observed = 4000, 1
    with pm.Model() as model:
        mean = pm.Normal("mean")
        u = pm.Normal("u", 0, 1.5, shape=n_groups)
        pm.Poisson("y", pm.math.exp(mean + u), observed=np.full(n_groups, observed))
    complete = CompleteData(model, "u", laplace_wanted=False)
    roots = np.full((n_groups, 1, 1), 1.2)
    local = LangevinTransitions(complete, roots, correlation, 10)
    noise = pt.tensor("noise", shape=(10, None, 2), dtype=complete.dtype)
    visit = complete.compile(lambda *at: [local.run(*at)], [noise])
    grid = np.linspace(-10, 6, 4001)
    weights = np.exp(observed * grid - np.exp(grid) - grid**2 / (2 * 1.5**2))
    weights /= weights.sum()
    rng = np.random.default_rng(1)
    start = rng.choice(grid, size=(n_groups, 1), p=weights)
    arrays = np.zeros(1), np.arange(n_groups), start, rng.normal(size=(10, n_groups, 2))
    draws = visit(*arrays)[0][:, 0]
    assert (draws != start[:, 0]).mean() > 0.9
    for power in (1, 2, 3):
        values = draws**power
        z = (values.mean() - weights @ grid**power) / (values.std() / np.sqrt(n_groups))
        assert abs(z) < 4.5, (power, z)


# --- Defaults --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed():
    """Groups of 1 to 4 records, and the exact posterior."""
    return LinearMixedModel(200, seed=3)


@pytest.mark.slow
def test_control_variates_with_default_settings(mixed):
    """The posterior within the stated error of its variance, from few groups a minibatch."""
    model = mixed.model()
    with model:
        step = SGLDCV(gradient=LocalSampling("u"), compile_kwargs=NUMBA)
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


@pytest.fixture(scope="module")
def away(mixed):
    """Model, step method and a centre that is a standard deviation away from the mean."""
    mean, covariance = mixed.marginal()
    center = mean + np.sqrt(np.diag(covariance))
    with mixed.model() as model:
        step = SGLDCV(gradient=LocalSampling("u"), center={"beta": center}, batch_size=5, bias=0.2)
    return model, step, center


@pytest.mark.slow
def test_control_variates_at_their_center(mixed, away):
    """Both gradients cancel there, and that of all groups and of the prior remains."""
    mean, covariance = mixed.marginal()
    _, step, center = away
    memory, posterior = step.block.memory, step.posterior
    numbers = np.arange(5)
    blocks = pt.as_tensor(memory.read()[0][numbers])
    at_center = pt.as_tensor(center)
    gradient = memory.gradient(at_center, pt.as_tensor(numbers), [blocks, blocks])
    estimate = gradient.eval(mode="FAST_COMPILE")
    assert posterior.labels == ("beta[0]", "beta[1]")
    exact = np.linalg.solve(covariance, mean - center)
    # The average is known up to 0.03 standard deviations of a mean.
    root = np.linalg.cholesky(covariance)
    assert (np.abs(root.T @ (estimate - exact)) < 4.5 * 0.03).all()


@pytest.mark.slow
def test_visits_to_groups_count_as_passes():
    """The gradient at a centre is an average over so many draws, each with its transitions."""
    local = LocalSampling("u", transitions=2)
    settings = {"step_size": 1e-3, "batch_size": 5, "preconditioner": "identity"}
    with LinearMixedModel().model():
        step = SGLD(gradient=local, center={"beta": np.zeros(2)}, **settings)
    assert step.posterior.rows_evaluated > 2 * local_variables.GIVEN_ROUNDS * step.posterior.n_rows


@pytest.mark.slow
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

    local = LocalSampling(
        "u", transitions=12, transition=from_prior, noise_size=2, control_variates=False
    )
    step_size = 0.3 * np.linalg.eigvalsh(problem.marginal()[1])[0]
    with model:
        step = SGLD(
            step_size=step_size, preconditioner="identity", thin=10, batch_size=2, gradient=local
        )
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
        ({"names": "beta"}, ModelError, "each of 2 groups or records"),
        ({"names": "nobody"}, (ModelError, ValueError, KeyError), "nobody"),
        ({"names": "u", "rows": ["y"]}, ValueError, "leave `rows` out"),
        ({"names": "u", "compile_kwargs": {"mode": "JAX"}}, ValueError, "does not run on JAX"),
    ],
)
def test_refused(small, settings, error, message):
    gradient = LocalSampling(settings.pop("names"), control_variates=False)
    with small[1], pytest.raises(error, match=message):
        SGLD(
            step_size=0.01,
            preconditioner="identity",
            batch_size=2,
            gradient=gradient,
            **settings,
        )


def test_refused_settings_of_transitions():
    with pytest.raises(ValueError, match="belong together"):
        LocalSampling("u", noise_size=3)
    with pytest.raises(ValueError, match="`transitions` should be a whole number, at least 1"):
        LocalSampling("u", transitions=0)
    with pytest.raises(TypeError, match="`names` should name local variables, but got 3"):
        LocalSampling(3)


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


def test_second_modes_are_warned_of(caplog):
    """The records know the square of the effects, whose signs no transition changes."""
    rng = np.random.default_rng(1)
    with pm.Model() as model:
        mean = pm.Normal("mean")
        u = pm.Normal("u", 0, 2, shape=40)
        pm.Normal("y", mean + u**2, 0.3, observed=4 + 0.3 * rng.normal(size=40))
    complete = CompleteData(model, "u", laplace_wanted=False)
    with caplog.at_level("WARNING", "pymc"):
        langevin_setup(complete, np.zeros(1))
    assert "Local variables of `u` have second modes" in caplog.text


def test_law_with_one_mode_is_not_warned_of(caplog):
    rng = np.random.default_rng(1)
    with pm.Model() as model:
        mean = pm.Normal("mean")
        u = pm.StudentT("u", nu=2, mu=mean, sigma=1.0, shape=40)
        pm.Poisson("y", pm.math.exp(u), observed=rng.poisson(2.0, size=40))
    complete = CompleteData(model, "u", laplace_wanted=False)
    with caplog.at_level("WARNING", "pymc"):
        langevin_setup(complete, np.zeros(1))
    assert not caplog.text


@pytest.mark.slow
def test_average_that_varies_much_is_warned_of(caplog, monkeypatch, mixed):
    """The average over the largest number of draws is not known as well as it should be."""
    limits = {"MOST_ROUNDS": 100, "MEAN_ERROR": 1e-5, "LARGEST_MEAN_ERROR": 1e-4}
    for name, limit in limits.items():
        monkeypatch.setattr(local_variables, name, limit)
    with mixed.model(), caplog.at_level("WARNING", "pymc"):
        SGLDCV(gradient=LocalSampling("u"), batch_size=5, bias=0.2)
    assert "The gradient at the centre moves means by up to" in caplog.text


def test_lag_during_a_run_is_warned_of(small):
    """Transitions with the scales of one position do not move far from it."""
    step = small[2]
    blocks = step.block.memory.read()[0]
    assert step._local.lag(np.zeros(2), blocks) is None
    local = step.block.memory.local
    roots = local._roots.get_value()
    local._roots.set_value(100 * roots)
    try:
        assert "lag behind the other variables" in step._local.lag(np.zeros(2), blocks)
    finally:
        local._roots.set_value(roots)


# --- Beside the groups -----------------------------------------------------------------------


def model_with_other_records(potential: bool = False) -> pm.Model:
    """Records of all, as many as there are groups, beside those of the groups."""
    rng = np.random.default_rng(2)
    with pm.Model() as model:
        mean = pm.Normal("mean")
        sd = pm.HalfNormal("sd")
        u = pm.Normal("u", shape=20)
        pm.Normal("y", mean + sd * u[:, None], 1.0, observed=rng.normal(size=(20, 3)))
        if potential:
            pm.Potential("penalty", -((mean - np.arange(20)) ** 2))
        else:
            pm.Normal("others", mean, sd, observed=rng.normal(2, 1, size=20))
            pm.Normal("more", mean, sd, observed=rng.normal(2, 1, size=9))
    return model


@pytest.mark.usefixtures("without_compiler")
def test_other_observed_variables_count_in_full():
    """Records that depend on no local variable are no rows, however many there are."""
    model = model_with_other_records()
    with model:
        step = SGLD(
            gradient=LocalSampling("u", control_variates=False),
            step_size=0.01,
            preconditioner="identity",
            batch_size=4,
            compile_kwargs={"mode": "FAST_COMPILE"},
        )
    posterior, complete = step.posterior, step.block.memory.local.complete
    rng = np.random.default_rng(3)
    position, blocks = rng.normal(size=2), rng.normal(size=(20, 1))
    _, gradient = posterior.log_prior_and_gradient(position)
    of_groups = complete.compile(lambda *at: [complete.gradient(*at)])
    gradient = gradient + of_groups(position, np.arange(20), blocks)[0]
    point = {**posterior.layout.unravel(position), **complete.point(blocks)}
    globals_ = [model["mean"], model["sd"]]
    expected = dict(zip(["mean", "sd_log__"], model.compile_dlogp(globals_)(point), strict=True))
    np.testing.assert_allclose(gradient, [expected[name] for name in posterior.layout.names])


def test_potential_with_rows_is_refused():
    with model_with_other_records(potential=True), pytest.raises(ModelError, match="`penalty`"):
        SGLD(
            gradient=LocalSampling("u", control_variates=False),
            step_size=0.01,
            preconditioner="identity",
            batch_size=4,
        )


@pytest.mark.slow
def test_groups_that_are_rows_of_the_outcomes_have_row_gradients():
    """No index array leads from records to groups."""
    rng = np.random.default_rng(3)
    with pm.Model() as model:
        mean, sd = pm.Normal("mean"), pm.HalfNormal("sd")
        u = pm.Normal("u", mean, sd, shape=30)
        pm.Normal("y", u, 2.0, observed=rng.normal(size=30))
    posterior = Posterior(marginalize(model, "u", method="quadrature", points=1))
    position = np.array([0.3, -0.2])
    rows = posterior.row_gradients(position, posterior.data)
    np.testing.assert_allclose(rows.sum(0), posterior.likelihood_gradient(position))


# --- Traces ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_trace_names_local_variables_and_recover_replaces_them(caplog):
    problem = LinearMixedModel(60)
    with problem.model() as model:
        pm.Deterministic("sum", model["beta"][0] + model["u"])
        step = SGLD(
            step_size=0.01,
            preconditioner="identity",
            batch_size=4,
            thin=2,
            gradient=LocalSampling("u", transitions=3, control_variates=False),
        )
        with caplog.at_level("INFO", "pymc"):
            idata = pm.sample(
                draws=60, tune=10, step=step, chains=2, cores=1, random_seed=1, progressbar=False
            )
    attributes = idata.sample_stats.attrs
    assert json.loads(attributes["sgmcmc_local"]) == ["u"]
    assert attributes["sgmcmc_local_transitions"] == 3
    assert "Draws of `u` are from the last visit to each group, with 0.13 visits" in caplog.text
    recovered = recover(idata, model, random_seed=1, progressbar=False).posterior
    assert not np.isclose(recovered["u"], idata.posterior["u"]).any()
    np.testing.assert_allclose(
        recovered["sum"], recovered["beta"][..., :1].values + recovered["u"].values
    )
    chosen = recover(idata, model, groups=[3, 5], random_seed=1, progressbar=False).posterior
    assert chosen["u"].shape == (2, 60, 2)
    with pytest.raises(ValueError, match="without `LocalSampling`"):
        bias_report(idata, model, rerun=True)


@pytest.mark.slow
def test_step_method_is_pickled(away):
    """Chains in processes of their own need it."""
    model, step, _ = away
    copied_model, copy = cloudpickle.loads(cloudpickle.dumps((model, step)))
    pairs = (model, step), (copied_model, copy)
    first, second = (sample(m, s, 5, tune=5, chains=1) for m, s in pairs)
    np.testing.assert_array_equal(first.posterior["u"], second.posterior["u"])
    np.testing.assert_array_equal(first.posterior["beta"], second.posterior["beta"])


def test_many_local_quantities_need_a_step_size():
    rng = np.random.default_rng(1)
    with pm.Model() as model:
        mean = pm.Normal("mean")
        u = pm.Normal("u", shape=(30, 7))
        pm.Normal("y", mean + u, 1.0, observed=rng.normal(size=(30, 7)))
    with (
        model,
        pytest.raises(ValueError, match=r"at most 6. Give `step_size`, .* and `batch_size`"),
    ):
        SGLD(gradient=LocalSampling("u", control_variates=False))


def test_changed_data_are_refused():
    problem = LinearMixedModel()
    with pm.Model():
        y = pm.Data("y_data", problem.y)
        beta = pm.Normal("beta", 0, 3.0, shape=2)
        u = pm.Normal("u", 0, 0.9, shape=problem.n_groups)
        pm.Normal("y", problem.X @ beta + u[problem.group], 1.3, observed=y)
        step = SGLD(
            gradient=LocalSampling("u", control_variates=False),
            step_size=0.01,
            preconditioner="identity",
            batch_size=2,
        )
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
    draws = list(topics.sample(sampler, draws=400))
    assert topics.perplexity(draws[len(draws) // 2 :: 10]) < topics.variational()
