"""Models as PyMC's gallery writes them, simulated, with few rows and skewed posteriors.

Each function takes the folder of the real data sets, as in `tests.accuracy.posteriors`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from pymc_sgmcmc.datasets import load
from tests.accuracy.designs import design_coords, sigmoid, simulated_design

# Without effects of groups


def ordered_logistic(data_folder: Path) -> pm.Model:
    """Five ordered answers, two of them rare: N = 2000, d = 7."""
    rng = np.random.default_rng(41)
    X = rng.normal(size=(2000, 3))
    latent = X @ [0.8, -0.5, 0.2] + rng.logistic(size=len(X))
    y = np.searchsorted([-4.5, -1.0, 0.8, 4.5], latent)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=3)
        cutpoints = pm.Normal(
            "cutpoints",
            mu=np.linspace(-2, 2, 4),
            sigma=5.0,
            transform=pm.distributions.transforms.ordered,
        )
        pm.OrderedLogistic("y", eta=X @ beta, cutpoints=cutpoints, observed=y)
    return model


def poisson_offset(data_folder: Path) -> pm.Model:
    """Rare counts with exposures: N = 1000, d = 5."""
    rng = np.random.default_rng(42)
    X = simulated_design(rng, 1000, 4)
    exposure = rng.gamma(2.0, 0.5, size=len(X))
    y = rng.poisson(exposure * np.exp(X @ [-1.5, 0.6, -0.4, 0.2, 0.0]))
    with pm.Model(coords=design_coords(4)) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="feature")
        pm.Poisson("y", mu=pt.exp(X @ beta + np.log(exposure)), observed=y)
    return model


def softmax(data_folder: Path) -> pm.Model:
    """Four classes, one of them rare, the first the reference: N = 1500, d = 12."""
    rng = np.random.default_rng(43)
    X = simulated_design(rng, 1500, 3)
    weights = np.array([[0.5, -0.3, -2.5], [0.8, -0.5, 0.4], [-0.4, 0.6, 0.8], [0.0, 0.3, -0.5]])
    eta = np.column_stack([np.zeros(len(X)), X @ weights])
    y = (eta + rng.gumbel(size=eta.shape)).argmax(axis=1)
    with pm.Model(coords=design_coords(3)) as model:
        beta = pm.Normal("beta", 0.0, 2.5, shape=(4, 3))
        logits = pt.concatenate([pt.zeros((len(X), 1)), X @ beta], axis=1)
        pm.Categorical("y", logit_p=logits, observed=y)
    return model


def zero_inflated_poisson(data_folder: Path) -> pm.Model:
    """Counts with zeros of another origin: N = 3000, d = 5."""
    rng = np.random.default_rng(44)
    X = simulated_design(rng, 3000, 3)
    y = rng.poisson(np.exp(X @ [0.3, 0.5, -0.3, 0.1])) * (rng.random(len(X)) < 0.7)
    with pm.Model(coords=design_coords(3)) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="feature")
        psi = pm.Beta("psi", 1.0, 1.0)
        pm.ZeroInflatedPoisson("y", psi=psi, mu=pt.exp(X @ beta), observed=y)
    return model


def truncated_normal(data_folder: Path) -> pm.Model:
    """Linear regression of outcomes that are seen only above zero: N = 2000, d = 4."""
    rng = np.random.default_rng(45)
    X = simulated_design(rng, 6000, 2)
    y = X @ [0.5, 0.8, -0.4] + 1.2 * rng.normal(size=len(X))
    X, y = X[y > 0][:2000], y[y > 0][:2000]
    with pm.Model(coords=design_coords(2)) as model:
        beta = pm.Normal("beta", 0.0, 5.0, dims="feature")
        sigma = pm.HalfNormal("sigma", 3.0)
        pm.TruncatedNormal("y", mu=X @ beta, sigma=sigma, lower=0.0, observed=y)
    return model


def censored_weibull(data_folder: Path) -> pm.Model:
    """Survival times, a third of them censored: N = 1500, d = 4."""
    rng = np.random.default_rng(46)
    X = simulated_design(rng, 1500, 2)
    times = np.exp(X @ [1.0, 0.5, -0.3]) * rng.weibull(1.5, size=len(X))
    with pm.Model(coords=design_coords(2)) as model:
        beta = pm.Normal("beta", 0.0, 5.0, dims="feature")
        alpha = pm.HalfNormal("alpha", 3.0)
        weibull = pm.Weibull.dist(alpha=alpha, beta=pt.exp(X @ beta))
        pm.Censored("times", weibull, lower=None, upper=3.0, observed=np.minimum(times, 3.0))
    return model


def normal_mixture(data_folder: Path) -> pm.Model:
    """Two normal components, means ordered: N = 3000, d = 5."""
    rng = np.random.default_rng(47)
    first = rng.random(3000) < 0.3
    y = np.where(first, rng.normal(-1.5, 0.7, size=3000), rng.normal(1.0, 1.2, size=3000))
    with pm.Model() as model:
        weight = pm.Dirichlet("weight", np.ones(2))
        mu = pm.Normal(
            "mu",
            0.0,
            3.0,
            shape=2,
            transform=pm.distributions.transforms.ordered,
            initval=[-1.0, 1.0],
        )
        sigma = pm.HalfNormal("sigma", 2.0, shape=2)
        pm.NormalMixture("y", w=weight, mu=mu, sigma=sigma, observed=y)
    return model


def dirichlet_multinomial(data_folder: Path) -> pm.Model:
    """Overdispersed counts of four species, one of them rare: N = 300, d = 4."""
    rng = np.random.default_rng(48)
    fractions = rng.dirichlet(6.0 * np.array([0.5, 0.3, 0.17, 0.03]), size=300)
    y = np.array([rng.multinomial(40, fraction) for fraction in fractions])
    with pm.Model(coords={"species": list("abcd"), "site": np.arange(300)}) as model:
        fraction = pm.Dirichlet("fraction", np.ones(4), dims="species")
        concentration = pm.LogNormal("concentration", 1.0, 1.0)
        pm.DirichletMultinomial(
            "y", n=40, a=fraction * concentration, observed=y, dims=("site", "species")
        )
    return model


def multivariate_normal(data_folder: Path) -> pm.Model:
    """Three correlated outcomes, covariance unknown: N = 1000, d = 9."""
    rng = np.random.default_rng(49)
    covariance = [[1.0, 0.6, -0.3], [0.6, 2.0, 0.2], [-0.3, 0.2, 0.5]]
    y = rng.multivariate_normal([1.0, -1.0, 0.5], covariance, size=1000)
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 5.0, shape=3)
        root, _, _ = pm.LKJCholeskyCov(
            "root", n=3, eta=2.0, sd_dist=pm.HalfNormal.dist(2.0, shape=3)
        )
        pm.MvNormal("y", mu=mu, chol=root, observed=y)
    return model


def probit(data_folder: Path) -> pm.Model:
    """Probit regression with nearly separated outcomes: N = 1000, d = 5."""
    rng = np.random.default_rng(50)
    X = simulated_design(rng, 1000, 4)
    y = X @ [-2.0, 1.5, 0.8, -0.5, 0.0] + rng.normal(size=len(X)) > 0
    with pm.Model(coords=design_coords(4)) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="feature")
        pm.Bernoulli("y", p=pm.math.invprobit(X @ beta), observed=y)
    return model


def beta_regression(data_folder: Path) -> pm.Model:
    """Fractions by their mean and precision: N = 1500, d = 5."""
    rng = np.random.default_rng(51)
    X = simulated_design(rng, 1500, 3)
    mean = sigmoid(X @ [0.4, 0.6, -0.3, 0.1])
    y = np.clip(rng.beta(9.0 * mean, 9.0 * (1 - mean)), 1e-6, 1 - 1e-6)
    with pm.Model(coords=design_coords(3)) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="feature")
        nu = pm.Gamma("nu", 2.0, 0.1)
        pm.Beta("y", mu=pm.math.invlogit(X @ beta), nu=nu, observed=y)
    return model


def aggregated_binomial(data_folder: Path) -> pm.Model:
    """Successes of few trials in many cells: N = 400, d = 4."""
    rng = np.random.default_rng(52)
    X = simulated_design(rng, 400, 3)
    trials = rng.integers(1, 12, size=len(X))
    y = rng.binomial(trials, sigmoid(X @ [-1.5, 0.7, -0.4, 0.2]))
    with pm.Model(coords=design_coords(3)) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="feature")
        pm.Binomial("y", n=trials, logit_p=X @ beta, observed=y)
    return model


def two_outcomes(data_folder: Path) -> pm.Model:
    """A normal and a Poisson outcome of the same records with a common slope: N = 1200, d = 5."""
    rng = np.random.default_rng(53)
    x = rng.normal(size=1200)
    y = 1.0 + 0.6 * x + 0.8 * rng.normal(size=len(x))
    counts = rng.poisson(np.exp(0.2 + 0.6 * 0.5 * x))
    with pm.Model() as model:
        data = pm.Data("x", x)
        intercept = pm.Normal("intercept", 0.0, 2.0, shape=2)
        slope = pm.Normal("slope", 0.0, 2.0)
        ratio = pm.LogNormal("ratio", 0.0, 1.0)
        sigma = pm.Exponential("sigma", 1.0)
        pm.Normal("y", intercept[0] + slope * data, sigma, observed=y)
        pm.Poisson("counts", pt.exp(intercept[1] + ratio * slope * data), observed=counts)
    return model


# With effects of groups, not integrated out


def counts_of_subjects(data_folder: Path) -> pm.Model:
    """Seizures of 59 subjects, four periods each, intercepts centred at zero: N = 236, d = 66."""
    frame = load("epil", data_folder).frame
    subject, _ = frame["subject"].factorize()
    treated = (frame["trt"] == "progabide").to_numpy(dtype=float)
    lbase = frame["lbase"].to_numpy()
    X = np.column_stack(
        [np.ones(len(frame)), lbase, treated, lbase * treated, frame["lage"], frame["V4"]]
    )
    with pm.Model(coords={"subject": np.arange(59)}) as model:
        beta = pm.Normal("beta", 0.0, 2.5, shape=6)
        scale = pm.HalfNormal("scale", 1.0)
        u = pm.Normal("u", 0.0, scale, dims="subject")
        pm.Poisson("y", pt.exp(X @ beta + u[subject]), observed=frame["y"].to_numpy())
    return model


def binary_groups(data_folder: Path) -> pm.Model:
    """Binary outcomes in 294 groups of 4 to 9 records, not centred: N = 1839, d = 299."""
    rng = np.random.default_rng(54)
    group = np.repeat(np.arange(294), rng.integers(4, 10, size=294))
    X = simulated_design(rng, len(group), 3)
    y = rng.random(len(group)) < sigmoid(
        X @ [-0.6, 0.8, -0.4, 0.2] + 0.8 * rng.normal(size=294)[group]
    )
    with pm.Model(coords=design_coords(3)) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="feature")
        scale = pm.HalfNormal("scale", 1.0)
        z = pm.Normal("z", shape=294)
        pm.Bernoulli("y", logit_p=X @ beta + scale * z[group], observed=y)
    return model


def items_and_persons(data_folder: Path) -> pm.Model:
    """Answers of 200 persons to 20 items, two parameters an item: N = 4000, d = 240."""
    rng = np.random.default_rng(55)
    discrimination, difficulty = rng.lognormal(0.0, 0.3, size=20), rng.normal(size=20)
    person, item = (numbers.ravel() for numbers in np.indices((200, 20)))
    ability = rng.normal(size=200)
    y = rng.random(4000) < sigmoid(discrimination[item] * (ability[person] - difficulty[item]))
    with pm.Model() as model:
        a = pm.LogNormal("discrimination", 0.0, 0.5, shape=20)
        b = pm.Normal("difficulty", 0.0, 2.0, shape=20)
        theta = pm.Normal("ability", shape=200)
        pm.Bernoulli("y", logit_p=a[item] * (theta[person] - b[item]), observed=y)
    return model


def radon_houses(data_folder: Path) -> pm.Model:
    """Log radon of houses in 76 counties, centred: N = 919, d = 80."""
    rng = np.random.default_rng(56)
    county = np.sort(rng.choice(85, size=919, p=rng.dirichlet(np.full(85, 0.7))))
    county = np.unique(county, return_inverse=True)[1]
    floor = (rng.random(919) < 0.17).astype(float)
    counties = int(county.max()) + 1
    y = (1.4 + 0.4 * rng.normal(size=counties))[county] - 0.6 * floor + 0.75 * rng.normal(size=919)
    with pm.Model(coords={"county": np.arange(counties)}) as model:
        mu = pm.Normal("mu", 0.0, 3.0)
        scale = pm.HalfNormal("scale", 1.0)
        slope = pm.Normal("slope", 0.0, 2.0)
        sigma = pm.HalfNormal("sigma", 1.0)
        alpha = pm.Normal("alpha", mu, scale, dims="county")
        pm.Normal("y", alpha[county] + slope * floor, sigma, observed=y)
    return model


def horseshoe(data_folder: Path) -> pm.Model:
    """Linear regression, a horseshoe prior of 30 slopes, 4 of them not zero: N = 500, d = 63."""
    rng = np.random.default_rng(57)
    X = rng.normal(size=(500, 30))
    y = X[:, :4] @ [2.0, -1.0, 0.5, 0.3] + rng.normal(size=500)
    with pm.Model() as model:
        sigma = pm.HalfNormal("sigma", 2.0)
        tau = pm.HalfCauchy("tau", 0.1)
        lambdas = pm.HalfCauchy("lambdas", 1.0, shape=30)
        z = pm.Normal("z", shape=30)
        intercept = pm.Normal("intercept", 0.0, 2.0)
        beta = pm.Deterministic("beta", z * lambdas * tau)
        pm.Normal("y", intercept + X @ beta, sigma, observed=y)
    return model


WITHOUT_GROUPS = (
    ordered_logistic,
    poisson_offset,
    softmax,
    zero_inflated_poisson,
    truncated_normal,
    censored_weibull,
    normal_mixture,
    dirichlet_multinomial,
    multivariate_normal,
    probit,
    beta_regression,
    aggregated_binomial,
    two_outcomes,
)
WITH_GROUPS = (counts_of_subjects, binary_groups, items_and_persons, radon_houses, horseshoe)
