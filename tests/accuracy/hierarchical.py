"""Hierarchical models whose local variables are integrated out, real data where some fit.

Each function takes the folder of the real data sets, also where the data are simulated, and returns
the joint model and the name of its local variable, with groups along the first axis. It is centred
or not as NUTS mixes better on the joint model. N is the number of records and G that of groups.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from pymc_sgmcmc.datasets import load
from tests.accuracy.designs import design_coords, sigmoid, simulated_design
from tests.accuracy.posteriors import contraception

Hierarchical = tuple[pm.Model, str]


# Real data


def contraception_districts(data_folder: Path) -> Hierarchical:
    """Logistic regression with intercepts of districts: N = 1934, G = 60."""
    return contraception(data_folder), "z"


def epil_subjects(data_folder: Path) -> Hierarchical:
    """Poisson regression of seizures with intercepts of subjects: N = 236, G = 59."""
    frame = load("epil", data_folder).frame
    treated = (frame["trt"] == "progabide").to_numpy(dtype=float)
    lbase = frame["lbase"].to_numpy()
    X = np.column_stack(
        [np.ones(len(frame)), lbase, treated, lbase * treated, frame["lage"], frame["V4"]]
    )
    subjects, subject = np.unique(frame["subject"], return_inverse=True)
    features = ["intercept", "lbase", "progabide", "lbase:progabide", "lage", "V4"]
    with pm.Model(coords={"feature": features, "subject": subjects.tolist()}) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="feature")
        scale = pm.HalfNormal("scale", 1.0)
        u = pm.Normal("u", 0.0, scale, dims="subject")
        pm.Poisson("y", pt.exp(X @ beta + u[subject]), observed=frame["y"].to_numpy())
    return model, "u"


def cbpp_herds(data_folder: Path) -> Hierarchical:
    """Binomial regression of cases with intercepts of herds: N = 56, G = 15."""
    frame = load("cbpp", data_folder).frame
    periods, period = np.unique(frame["period"], return_inverse=True)
    herds, herd = np.unique(frame["herd"], return_inverse=True)
    with pm.Model(coords={"period": periods.tolist(), "herd": herds.tolist()}) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="period")
        scale = pm.HalfNormal("scale", 1.0)
        z = pm.Normal("z", dims="herd")
        pm.Binomial(
            "cases",
            n=frame["size"].to_numpy(),
            logit_p=beta[period] + scale * z[herd],
            observed=frame["incidence"].to_numpy(),
        )
    return model, "z"


def salamander_females(data_folder: Path) -> Hierarchical:
    """Matings with crossed intercepts of females and males: N = 360, G = 60.

    The females are integrated out. The 60 males stay, so d = 66 is more than the groups.
    """
    frame = load("salamander", data_folder).frame
    crosses, cross = np.unique(frame["Cross"].astype(str), return_inverse=True)
    females, female = np.unique(frame["Female"], return_inverse=True)
    males, male = np.unique(frame["Male"], return_inverse=True)
    coords = {"cross": crosses.tolist(), "female": females.tolist(), "male": males.tolist()}
    with pm.Model(coords=coords) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="cross")
        female_scale = pm.HalfNormal("female_scale", 1.0)
        male_scale = pm.HalfNormal("male_scale", 1.0)
        of_female = pm.Normal("of_female", dims="female")
        of_male = pm.Normal("of_male", dims="male")
        predictor = beta[cross] + female_scale * of_female[female] + male_scale * of_male[male]
        pm.Bernoulli("mate", logit_p=predictor, observed=frame["Mate"].to_numpy(dtype=bool))
    return model, "of_female"


def sleepstudy_slopes(data_folder: Path) -> Hierarchical:
    """Reaction times with correlated intercepts and slopes of subjects: N = 180, G = 18."""
    frame = load("sleepstudy", data_folder).frame
    days = frame["Days"].to_numpy(dtype=float)
    subjects, subject = np.unique(frame["Subject"], return_inverse=True)
    coords = {"effect": ["intercept", "slope"], "subject": subjects.tolist()}
    with pm.Model(coords=coords) as model:
        beta = pm.Normal("beta", [250.0, 0.0], [100.0, 20.0], dims="effect")
        sigma = pm.HalfNormal("sigma", 50.0)
        scales = pm.HalfNormal.dist([50.0, 20.0], shape=2)
        root, _, _ = pm.LKJCholeskyCov("root", n=2, eta=2.0, sd_dist=scales)
        u = pm.MvNormal("u", beta, chol=root, dims=("subject", "effect"))
        pm.Normal("y", u[subject, 0] + u[subject, 1] * days, sigma, observed=frame["Reaction"])
    return model, "u"


# Simulated


def unequal_groups(
    rng: np.random.Generator, groups: int, mean_size: float
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of records with a long tail, at least one a group, and the groups of the records."""
    sizes = 1 + np.floor(rng.gamma(0.7, (mean_size - 0.5) / 0.7, size=groups)).astype(int)
    return sizes, rng.permutation(np.repeat(np.arange(groups), sizes))


def radon_counties(data_folder: Path) -> Hierarchical:
    """Log radon with a predictor of houses and one of counties: N = 4223, G = 400."""
    rng = np.random.default_rng(31)
    _, county = unequal_groups(rng, 400, 10.0)
    floor = (rng.random(len(county)) < 0.2).astype(float)
    uranium = rng.normal(size=400)
    level = 1.4 + 0.7 * uranium + 0.35 * rng.normal(size=400)
    y = level[county] - 0.65 * floor + 0.75 * rng.normal(size=len(county))
    with pm.Model() as model:
        gamma = pm.Normal("gamma", 0.0, 2.0, shape=2)
        slope = pm.Normal("slope", 0.0, 2.0)
        scale = pm.HalfNormal("scale", 1.0)
        sigma = pm.HalfNormal("sigma", 1.0)
        u = pm.Normal("u", gamma[0] + gamma[1] * uranium, scale, shape=400)
        pm.Normal("y", u[county] + slope * floor, sigma, observed=y)
    return model, "u"


def poisson_exposures(data_folder: Path) -> Hierarchical:
    """Counts with exposures and intercepts of groups: N = 5000, G = 1000."""
    rng = np.random.default_rng(32)
    group = np.repeat(np.arange(1000), 5)
    X = simulated_design(rng, len(group), 3)
    exposure = rng.uniform(0.5, 2.0, size=len(group))
    rate = np.exp(X @ [0.5, 0.4, -0.3, 0.1] + 0.6 * rng.normal(size=1000)[group])
    y = rng.poisson(exposure * rate)
    with pm.Model(coords=design_coords(3)) as model:
        beta = pm.Normal("beta", 0.0, 2.0, dims="feature")
        scale = pm.HalfNormal("scale", 1.0)
        u = pm.Normal("u", 0.0, scale, shape=1000)
        pm.Poisson("y", exposure * pt.exp(X @ beta + u[group]), observed=y)
    return model, "u"


def negative_binomial_groups(data_folder: Path) -> Hierarchical:
    """Overdispersed counts with intercepts of groups, dispersion unknown: N = 4800, G = 600."""
    rng = np.random.default_rng(33)
    group = np.repeat(np.arange(600), 8)
    X = simulated_design(rng, len(group), 3)
    mean = np.exp(X @ [1.0, 0.4, -0.3, 0.1] + 0.5 * rng.normal(size=600)[group])
    y = rng.poisson(mean * rng.gamma(2.0, 0.5, size=len(group)))
    with pm.Model(coords=design_coords(3)) as model:
        beta = pm.Normal("beta", 0.0, 2.0, dims="feature")
        scale = pm.HalfNormal("scale", 1.0)
        alpha = pm.Exponential("alpha", 0.5)
        u = pm.Normal("u", 0.0, scale, shape=600)
        pm.NegativeBinomial("y", pt.exp(X @ beta + u[group]), alpha, observed=y)
    return model, "u"


def ordinal_groups(data_folder: Path) -> Hierarchical:
    """Five ordered answers with intercepts of groups, cutpoints unknown: N = 3000, G = 500."""
    rng = np.random.default_rng(34)
    group = np.repeat(np.arange(500), 6)
    X = rng.normal(size=(len(group), 2))
    latent = X @ [0.8, -0.4] + 1.0 * rng.normal(size=500)[group] + rng.logistic(size=len(group))
    y = np.searchsorted([-2.0, -0.5, 0.7, 2.2], latent)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=2)
        scale = pm.HalfNormal("scale", 1.0)
        cutpoints = pm.Normal(
            "cutpoints",
            [-1.5, -0.5, 0.5, 1.5],
            2.0,
            shape=4,
            transform=pm.distributions.transforms.ordered,
        )
        z = pm.Normal("z", shape=500)
        predictor = X @ beta + scale * z[group]
        pm.OrderedLogistic("y", predictor, cutpoints, compute_p=False, observed=y)
    return model, "z"


def student_t_groups(data_folder: Path) -> Hierarchical:
    """Records with outliers, degrees of freedom unknown: N = 4800, G = 800."""
    rng = np.random.default_rng(35)
    group = np.repeat(np.arange(800), 6)
    X = simulated_design(rng, len(group), 2)
    y = X @ [1.0, 0.5, -0.5] + 0.8 * rng.normal(size=800)[group]
    y += 0.8 * rng.standard_t(4.0, size=len(group))
    with pm.Model(coords=design_coords(2)) as model:
        beta = pm.Normal("beta", 0.0, 5.0, dims="feature")
        scale = pm.HalfNormal("scale", 1.0)
        sigma = pm.HalfNormal("sigma", 1.0)
        nu = pm.Gamma("nu", 2.0, 0.1)
        u = pm.Normal("u", 0.0, scale, shape=800)
        pm.StudentT("y", nu, mu=X @ beta + u[group], sigma=sigma, observed=y)
    return model, "u"


def weibull_frailty(data_folder: Path) -> Hierarchical:
    """Censored Weibull times with gamma frailties of clusters: N = 2400, G = 400."""
    rng = np.random.default_rng(36)
    cluster = np.repeat(np.arange(400), 6)
    treated = rng.integers(0, 2, size=len(cluster)).astype(float)
    hazard = np.exp(-0.5 - 0.6 * treated) * rng.gamma(2.0, 0.5, size=400)[cluster]
    times = (rng.exponential(size=len(cluster)) / hazard) ** (1 / 1.4)
    observed = np.minimum(times, 2.5)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=2)
        shape = pm.Gamma("shape", 4.0, 3.0)
        concentration = pm.Gamma("concentration", 2.0, 0.5)
        frailty = pm.Gamma("frailty", concentration, concentration, shape=400)
        log_hazard = beta[0] + beta[1] * treated + pt.log(frailty[cluster])
        weibull = pm.Weibull.dist(shape, pt.exp(-log_hazard / shape))
        pm.Censored("times", weibull, lower=None, upper=2.5, observed=observed)
    return model, "frailty"


def unbalanced_logistic(data_folder: Path) -> Hierarchical:
    """Binary records, 1 to more than 100 in a group: N = 6416, G = 300."""
    rng = np.random.default_rng(37)
    _, group = unequal_groups(rng, 300, 20.0)
    X = simulated_design(rng, len(group), 3)
    eta = X @ [-0.7, 0.8, -0.4, 0.2] + 0.9 * rng.normal(size=300)[group]
    y = rng.random(len(group)) < sigmoid(eta)
    with pm.Model(coords=design_coords(3)) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="feature")
        scale = pm.HalfNormal("scale", 1.0)
        u = pm.Normal("u", 0.0, scale, shape=300)
        pm.Bernoulli("y", logit_p=X @ beta + u[group], observed=y)
    return model, "u"


def logistic_slopes(data_folder: Path) -> Hierarchical:
    """Binary records with correlated intercepts and slopes of groups: N = 4000, G = 400."""
    rng = np.random.default_rng(38)
    group = np.repeat(np.arange(400), 10)
    x = rng.normal(size=len(group))
    effects = rng.multivariate_normal([0.3, 0.8], [[0.8, 0.3], [0.3, 0.5]], size=400)
    y = rng.random(len(group)) < sigmoid(effects[group, 0] + effects[group, 1] * x)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.5, shape=2)
        scales = pm.HalfNormal.dist(1.0, shape=2)
        root, _, _ = pm.LKJCholeskyCov("root", n=2, eta=2.0, sd_dist=scales)
        u = pm.MvNormal("u", beta, chol=root, shape=(400, 2))
        pm.Bernoulli("y", logit_p=u[group, 0] + u[group, 1] * x, observed=y)
    return model, "u"


def item_response(data_folder: Path) -> Hierarchical:
    """Answers to 15 items of unknown difficulty and discrimination: N = 15 000, G = 1000."""
    rng = np.random.default_rng(39)
    ability = rng.normal(size=1000)
    discrimination = rng.lognormal(0.0, 0.3, size=15)
    difficulty = rng.normal(size=15)
    y = rng.random((1000, 15)) < sigmoid(discrimination * (ability[:, None] - difficulty))
    with pm.Model(coords={"person": np.arange(1000), "item": np.arange(15)}) as model:
        a = pm.LogNormal("discrimination", 0.0, 0.5, dims="item")
        b = pm.Normal("difficulty", 0.0, 2.0, dims="item")
        theta = pm.Normal("ability", dims="person")
        pm.Bernoulli("y", logit_p=a * (theta[:, None] - b), observed=y)
    return model, "ability"


MODELS = {
    function.__name__: function
    for function in (
        contraception_districts,
        epil_subjects,
        cbpp_herds,
        salamander_females,
        sleepstudy_slopes,
        radon_counties,
        poisson_exposures,
        negative_binomial_groups,
        ordinal_groups,
        student_t_groups,
        weibull_frailty,
        unbalanced_logistic,
        logistic_slopes,
        item_response,
    )
}
