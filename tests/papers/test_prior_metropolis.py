"""Metropolis-Hastings with the prior as proposal, against exact conditional posteriors."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from scipy import stats
from scipy.interpolate import CubicSpline

from pymc_sgmcmc import HAMCMC, SGLD, ModelError, Pairs, PriorMetropolis
from tests.support.sampling import NUMBA, QUIET, z_score

Z_BOUND = 4.5
Y = np.array([-3.0, -0.5, 0.1, 1.0, 6.0])


def run(*steps, draws=8_000, chains=2, **kwargs):
    return pm.sample(
        draws=draws,
        tune=200,
        chains=chains,
        step=list(steps),
        random_seed=1,
        **{"cores": 1} | QUIET | kwargs,
    )


def z_values(draws: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Errors of means of draws, shape (chains, draws, n), in standard errors from batches."""
    draws = draws.reshape(-1, draws.shape[-1])
    return z_score(draws, exact, batches=len(draws) // 200)


def test_scales_have_their_conditional_law():
    """Each scale by numerical integration, with a log transform and with an interval."""
    with pm.Model():
        scale = pm.Gamma("scale", 2, 1, shape=5)
        part = pm.Uniform("part", 0.5, 2, shape=5)
        pm.Normal("y", 0, scale * part, observed=Y)
        idata = run(PriorMetropolis([part, scale]))
    draws = idata.posterior["scale"].values
    scales, parts = np.meshgrid(np.linspace(0.005, 30, 3000), np.linspace(0.5, 2, 200))
    prior = stats.gamma(2).pdf(scales)
    weights = [prior * stats.norm(0, scales * parts).pdf(y) for y in Y]
    exact = [(weight * scales).sum() / weight.sum() for weight in weights]
    assert np.abs(z_values(draws, np.array(exact))).max() < Z_BOUND
    accepted = idata.sample_stats["accepted_part"]
    assert 0 < accepted.mean() < 1


@pytest.mark.slow
def test_parents_and_children_that_are_free():
    """A mean, whose children are free, and these children: the joint posterior is Gaussian."""
    with pm.Model():
        mean = pm.Normal("mean", 0, 1)
        effect = pm.Normal("effect", mean, 1, shape=5)
        pm.Normal("y", effect, 1, observed=Y)
        idata = run(PriorMetropolis([mean]), PriorMetropolis(["effect"]))
    # Precision of (mean, effects), and the term with the data.
    precision = np.diag([6.0, *np.full(5, 2.0)])
    precision[0, 1:] = precision[1:, 0] = -1
    exact = np.linalg.solve(precision, np.append(0, Y))
    draws = np.concatenate(
        [idata.posterior["mean"].values[..., None], idata.posterior["effect"].values], axis=-1
    )
    assert np.abs(z_values(draws, exact)).max() < Z_BOUND
    squares = (draws - exact) ** 2
    assert np.abs(z_values(squares, np.diag(np.linalg.inv(precision)))).max() < Z_BOUND


def test_elements_of_any_shape_are_accepted_by_themselves():
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 1, shape=(3, 4))
        pm.Normal("y", 0, scale, observed=np.full((3, 4), 0.1))
        step = PriorMetropolis([scale])
        step.setup_chain(np.random.default_rng(1), 0, 10)
        point = model.initial_point()
        after, [statistics] = step.step(point)
    moved = after["scale_log__"] != point["scale_log__"]
    assert 0 < moved.sum() < 12
    assert statistics["accepted_part"] == pytest.approx(moved.mean())


def test_single_precision_and_densities_of_zero():
    """Where the density is zero here and at the proposal, nothing moves and nothing warns."""
    with pm.Model() as model:
        scale = pm.Uniform("scale", 0, 1, shape=5)
        pm.Uniform("y", 0, scale, observed=np.full(5, 2.0))
        step = PriorMetropolis([scale])
        point = {name: value.astype("float32") for name, value in model.initial_point().items()}
        after, [statistics] = step.step(point)
    assert statistics["accepted_part"] == 0
    assert np.array_equal(after["scale_interval__"], point["scale_interval__"])
    with pytensor.config.change_flags(floatX="float32"), pm.Model():
        scale = pm.Gamma("scale", 2, 1, shape=5)
        pm.Normal("y", 0, scale, observed=Y.astype("float32"))
        idata = run(PriorMetropolis([scale]), draws=20, chains=1)
    assert idata.posterior["scale"].dtype == "float32"


def test_a_seed_gives_the_same_draws_in_processes():
    with pm.Model():
        scale = pm.HalfNormal("scale", 1, shape=5)
        pm.Normal("y", 0, scale, observed=Y)
        one = run(PriorMetropolis([scale]), draws=50)
        two = run(PriorMetropolis([scale]), draws=50, cores=2, mp_ctx="forkserver")
    assert np.array_equal(one.posterior["scale"], two.posterior["scale"])


def test_invalid_parameters_are_outside_of_the_support():
    """log p is finite at p = 1.5, but the density of a success is zero there."""
    with pm.Model():
        chance = pm.Normal("chance", 0.8, 0.3, shape=3)
        pm.Bernoulli("y", chance, observed=[1, 1, 0])
        idata = run(PriorMetropolis([chance]))
    draws = idata.posterior["chance"].values
    assert draws.max() <= 1
    grid = (np.arange(2000) + 0.5) / 2000
    prior = stats.norm(0.8, 0.3).pdf(grid)
    exact = [(prior * f * grid).sum() / (prior * f).sum() for f in (grid, grid, 1 - grid)]
    assert np.abs(z_values(draws, np.array(exact))).max() < Z_BOUND


@pytest.mark.slow
def test_counts_with_a_potential():
    """Discrete variables, whose parent is free and which a potential weights, by enumeration."""
    with pm.Model():
        rate = pm.Gamma("rate", 2, 1)
        count = pm.Poisson("count", rate, shape=5)
        pm.Potential("penalty", -0.3 * count)
        pm.Normal("y", count, 1, observed=np.abs(Y))
        idata = run(PriorMetropolis([count]), pm.Slice([rate]), draws=1_000)
    rates, counts = np.linspace(0.01, 15, 1500), np.arange(40)
    prior = stats.poisson.pmf(counts, rates[:, None])
    likelihood = np.exp(-0.3 * counts) * stats.norm.pdf(np.abs(Y)[:, None], counts)
    of_each = prior @ likelihood.T
    weights = stats.gamma(2).pdf(rates) * of_each.prod(1)
    exact = weights @ ((prior @ (likelihood * counts).T) / of_each) / weights.sum()
    assert np.abs(z_values(idata.posterior["count"].values, exact)).max() < Z_BOUND


def test_values_that_a_transform_does_not_have_are_refused():
    """The density of a normal prior under a log transform ends at zero, whatever the terms say."""
    with pm.Model():
        number = pm.Normal("number", transform=pm.distributions.transforms.log, shape=3)
        pm.Bernoulli("y", pt.switch(number > 1, 0.9, 0.1), observed=[0, 1, 0])
        idata = run(PriorMetropolis([number]), draws=300, chains=1)
    assert (idata.posterior["number"] > 0).all()


def test_elements_that_change_others_only_elsewhere():
    """At the initial point a coefficient is zero, or data and discrete variables hide it."""
    with pm.Model():
        slope = pm.Normal("slope")
        effect = pm.Normal("effect", shape=5)
        pm.Normal("y", effect + slope * effect[::-1], 1, observed=Y)
        with pytest.raises(ModelError, match="Elements of `effect` change other elements"):
            PriorMetropolis([effect])
    with pm.Model():
        swapped = pm.Bernoulli("swapped", 0.5, initval=0)
        effect = pm.Normal("effect", shape=5)
        pm.Normal("y", pt.switch(swapped, effect[::-1], effect), 1, observed=np.zeros(5))
        step = PriorMetropolis([effect])
        with pytest.raises(ModelError, match="Elements of `effect` change other elements"):
            run(pm.BinaryMetropolis([swapped]), step, chains=1)
    with pm.Model():
        row = pm.Data("row", np.arange(5))
        effect = pm.Normal("effect", shape=5)
        pm.Normal("y", effect[row], 1, observed=Y)
        step = PriorMetropolis([effect])
        pm.set_data({"row": np.arange(5)[::-1]})
        with pytest.raises(ModelError, match="Elements of `effect` change other elements"):
            run(step, chains=1)


def test_models_that_change_after_the_step_was_made():
    with pm.Model():
        data = pm.Data("data", Y)
        scale = pm.HalfNormal("scale", 1, shape=data.shape[0])
        pm.Normal("y", 0, scale, observed=data)
        step = PriorMetropolis([scale])
        pm.set_data({"data": Y + 1})
        run(step, draws=10, chains=1)
        pm.set_data({"data": np.ones(3)})
        with pytest.raises(ModelError, match=r"`scale` had shape \(5,\) .* now has shape \(3,\)"):
            run(step, chains=1)
        pm.Normal("other", 0, scale, observed=np.ones(3))
        with pytest.raises(ModelError, match="`other` was added or removed"):
            run(step, chains=1)


def test_variables_and_settings():
    with pm.Model():
        scale = pm.HalfNormal("scale", 1, shape=5)
        pm.Normal("y", 0, scale, observed=Y)
        assert len(PriorMetropolis([scale, scale]).vars) == 1
        with pytest.raises(TypeError, match="`compile_kwargs` should have keys"):
            PriorMetropolis([scale], compile_kwargs={"linker": "py"})
        moved = []
        for options in (None, {"mode": "NUMBA"}, {"mode": "FAST_COMPILE"}):
            step = PriorMetropolis([scale], compile_kwargs=options)
            step.setup_chain(np.random.default_rng(1), 0, 1)
            moved.append(step.step({"scale_log__": np.zeros(5)})[0]["scale_log__"] != 0)
        np.testing.assert_array_equal(moved, [moved[0]] * 3)


def kanter(angle, exponential, alpha):
    """Positive stable numbers with Laplace transform exp(-s^alpha) (Kanter 1975)."""
    part = alpha
    ratio = (
        pt.sin(part * angle) ** part * pt.sin((1 - part) * angle) ** (1 - part) / pt.sin(angle)
    ) ** (1 / (1 - part))
    return (ratio / exponential) ** ((1 - part) / part)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler", [SGLD, pytest.param(HAMCMC, marks=pytest.mark.slow)], ids=lambda one: one.__name__
)
def test_stable_noise(sampler):
    """A location with α-stable noise: the scales by this step, the location by minibatches.

    The posterior is that of the density of the stable law, which SciPy has.
    """
    alpha, count = 1.5, 60
    y = 1 + stats.levy_stable(alpha, 0).rvs(size=count, random_state=1)
    settings = {"gradient": "plain", "batch_size": 20, "compile_kwargs": NUMBA}
    if sampler is SGLD:
        settings |= {"preconditioner": "identity", "step_size": 0.005, "thin": 8}
    else:
        settings |= {"initial_scale": 0.02, "regularization": 5.0, "pairs": Pairs(threshold=5.0)}
        settings |= {"step_size": 0.25, "thin": 12, "memory": 3}
    with pm.Model():
        row = pm.Data("row", np.arange(count))
        location = pm.Normal("location", 0, 10)
        angle = pm.Uniform("angle", 0, np.pi, shape=count)
        exponential = pm.Exponential("exponential", 1, shape=count)
        scale = 2 * kanter(angle[row], exponential[row], alpha / 2)
        pm.Normal("y", location, pt.sqrt(scale), observed=y)
        idata = run(
            sampler([location], **settings),
            PriorMetropolis([angle, exponential]),
            draws=4_000,
        )
    grid = np.linspace(-0.2, 2.2, 61)
    # The density is an integral at each point: a spline in points that are denser at zero.
    points = np.sinh(np.linspace(0, np.arcsinh(np.abs(y).max() + 3), 200))
    log_density = CubicSpline(points, stats.levy_stable(alpha, 0).logpdf(points))
    log_posterior = log_density(np.abs(y - grid[:, None])).sum(axis=1)
    weights = np.exp(log_posterior - log_posterior.max()) * stats.norm(0, 10).pdf(grid)
    weights /= weights.sum()
    mean = weights @ grid
    deviation = (weights @ (grid - mean) ** 2) ** 0.5
    draws = idata.posterior["location"].values[..., None]
    z = z_values(draws, np.array([mean]))
    assert np.abs(z).max() < Z_BOUND
    # The noise of the minibatches makes the law a little wider.
    assert draws.std() == pytest.approx(deviation, rel=0.1)


def one_scale(**others):
    return pm.HalfNormal("scale", 1, **others)


@pytest.mark.parametrize(
    ("build", "names", "message"),
    [
        (
            lambda: pm.Normal("y", 0, one_scale(shape=2)[np.array([0, 0, 1])], observed=np.ones(3)),
            ["scale"],
            r"`scale` should have the shape .* has shape \(2,\) where `y` has \(3,\)",
        ),
        (
            lambda: pm.Normal("y", 0, one_scale(shape=3)[::-1], observed=np.ones(3)),
            ["scale"],
            "Elements of `scale` change other elements",
        ),
        (
            lambda: pm.Normal("y", 0, one_scale(shape=(3, 1)), observed=np.ones((3, 2))),
            ["scale"],
            r"has shape \(3, 1\) where `y` has \(3, 2\)",
        ),
        (
            lambda: pm.Normal("y", pm.Normal("mu", 0, one_scale()), 1, observed=np.ones(3)),
            ["scale", "mu"],
            "The prior of `mu` depends on `scale`",
        ),
        (
            lambda: pm.Normal("y", pm.Normal("mu", shape=2).sum(), one_scale(), observed=1.0),
            ["scale", "mu"],
            r"`vars` should have one shape, but got `scale` \(\), `mu` \(2,\)",
        ),
        (
            lambda: pm.Normal(
                "y", pm.Truncated("mu", pm.Gumbel.dist(0, 1), lower=0), 1, observed=np.ones(3)
            ),
            ["mu"],
            "`mu` should have a prior with independent elements",
        ),
        (
            lambda: pm.Normal("y", pm.Dirichlet("w", np.ones(3)), 1, observed=np.ones(3)),
            ["w"],
            "`w` should have a prior with independent elements",
        ),
        (
            lambda: (one_scale(), pm.Normal("y", pm.Normal("mu"), 1, observed=np.ones(3))),
            ["scale"],
            "No observed variable depends on `scale`",
        ),
        (
            lambda: pm.Normal("y", 0, one_scale(), observed=np.ones(3), total_size=30),
            ["scale"],
            r"total_size=\[30\]",
        ),
        (
            lambda: pm.Normal(
                "y", pm.Normal("mu", pm.Minibatch(np.ones(9), batch_size=3)), observed=np.ones(3)
            ),
            ["mu"],
            "The model uses `pm.Minibatch`",
        ),
        (
            lambda: pm.Normal("y", pm.Flat("mu", shape=3), 1, observed=np.ones(3)),
            ["mu"],
            "`mu` should have a prior that can be drawn from",
        ),
        (
            lambda: (
                pm.Normal("y", 0, one_scale(shape=3), observed=np.ones(3)),
                pm.Potential("penalty", -pm.modelcontext(None)["scale"].sum()),
            ),
            ["scale"],
            r"has shape \(3,\) where `penalty` has \(\)",
        ),
    ],
)
def test_models_that_are_refused(build, names, message):
    with pm.Model() as model:
        build()
        with pytest.raises(ModelError, match=message):
            PriorMetropolis([model[name] for name in names])
