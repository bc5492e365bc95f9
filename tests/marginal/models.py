"""Models with local variables, as PyMC's gallery and users write them."""

from __future__ import annotations

import numpy as np
import pymc as pm

N_GROUPS = 12


def codes_of(rng, balanced: bool = True) -> np.ndarray:
    """Groups of records in no order, of 4 records each or of 1 to 13."""
    sizes = np.full(N_GROUPS, 4) if balanced else rng.permutation(np.arange(1, N_GROUPS + 1))
    return rng.permutation(np.repeat(np.arange(N_GROUPS), sizes))


def logistic_intercepts(rng, *, centred=False, balanced=True):
    group = codes_of(rng, balanced)
    X = rng.normal(size=(len(group), 2))
    coords = {"patient": [f"p{g}" for g in range(N_GROUPS)], "feature": ["dose", "age"]}
    with pm.Model(coords=coords) as model:
        beta = pm.Normal("beta", 0, 2, dims="feature")
        sd = pm.HalfNormal("sd", 1)
        if centred:
            effect = pm.Normal("z", 0, sd, dims="patient")
        else:
            effect = sd * pm.Normal("z", dims="patient")
        pm.Bernoulli(
            "y", logit_p=X @ beta + effect[group], observed=rng.integers(0, 2, size=len(group))
        )
    return model, ["z"]


def poisson_with_data_and_groups_predictor(rng):
    """`pm.Data`, an offset, a predictor of groups, a deterministic, and unequal groups."""
    group = codes_of(rng, balanced=False)
    W, exposure = rng.normal(size=(N_GROUPS, 2)), rng.uniform(1, 3, size=len(group))
    with pm.Model() as model:
        codes, offset = pm.Data("codes", group), pm.Data("offset", np.log(exposure))
        gamma = pm.Normal("gamma", 0, 1, shape=2)
        sd = pm.Exponential("sd", 1)
        z = pm.Normal("z", W @ gamma, sd, shape=N_GROUPS)
        effect = pm.Deterministic("effect", z + 0.3)
        counts = rng.poisson(2, size=len(group))
        pm.Poisson("y", pm.math.exp(effect[codes] + offset), observed=counts)
    return model, ["z"]


def gamma_frailty(rng):
    """A positive local variable, with a log transform, and exponential times."""
    group = codes_of(rng)
    with pm.Model() as model:
        shape, scale = pm.Exponential("shape", 1), pm.HalfNormal("scale", 1)
        frailty = pm.Gamma("frailty", 1 + shape, 1 + shape, shape=N_GROUPS)
        times = rng.exponential(size=len(group))
        pm.Exponential("times", scale * frailty[group], observed=times)
    return model, ["frailty"]


def negative_binomial(rng):
    group = codes_of(rng, balanced=False)
    with pm.Model() as model:
        intercept, sd = pm.Normal("intercept"), pm.HalfNormal("sd", 1)
        alpha = pm.Exponential("alpha", 1)
        z = pm.Normal("z", intercept, sd, shape=N_GROUPS)
        counts = rng.poisson(2, size=len(group))
        pm.NegativeBinomial("y", pm.math.exp(z[group]), alpha, observed=counts)
    return model, ["z"]


def student_records(rng):
    """A log density that is not concave."""
    group = codes_of(rng)
    with pm.Model() as model:
        mean, sd, sigma = pm.Normal("mean"), pm.HalfNormal("sd", 1), pm.HalfNormal("sigma", 1)
        z = pm.StudentT("z", 5, mu=mean, sigma=sd, shape=N_GROUPS)
        times_two = 2 * rng.standard_t(4, size=len(group))
        pm.StudentT("y", 4, mu=z[group], sigma=sigma, observed=times_two)
    return model, ["z"]


def ordinal(rng):
    group = codes_of(rng)
    with pm.Model() as model:
        sd = pm.HalfNormal("sd", 1)
        cutpoints = pm.Normal(
            "cutpoints", [-1, 0.5], 1, transform=pm.distributions.transforms.ordered, shape=2
        )
        z = pm.Normal("z", 0, sd, shape=N_GROUPS)
        y = rng.integers(0, 3, size=len(group))
        pm.OrderedLogistic("y", z[group], cutpoints, observed=y)
    return model, ["z"]


def two_outcomes(rng):
    """Two observed variables with other records, and one with an entry a group."""
    first, second = codes_of(rng), codes_of(rng, balanced=False)
    with pm.Model() as model:
        sd, slope = pm.HalfNormal("sd", 1), pm.Normal("slope")
        z = pm.Normal("z", 0, sd, shape=N_GROUPS)
        pm.Bernoulli("success", logit_p=z[first], observed=rng.integers(0, 2, len(first)))
        pm.Normal("score", slope * z[second], 1.0, observed=rng.normal(size=len(second)))
        pm.Poisson("visits", pm.math.exp(z), observed=rng.poisson(1, size=N_GROUPS))
    return model, ["z"]


def repeated_measures(rng):
    """Groups along the first axis of the outcomes, without codes."""
    with pm.Model() as model:
        mean, sd = pm.Normal("mean", shape=5), pm.HalfNormal("sd", 1)
        z = pm.Normal("z", 0, sd, shape=(N_GROUPS, 1))
        pm.Poisson("y", pm.math.exp(mean + z), observed=rng.poisson(1, size=(N_GROUPS, 5)))
    return model, ["z"]


def logistic_slopes(rng):
    """Correlated intercepts and slopes."""
    group = codes_of(rng)
    x = rng.normal(size=len(group))
    with pm.Model() as model:
        beta = pm.Normal("beta", shape=2)
        root, _, _ = pm.LKJCholeskyCov("root", n=2, eta=2, sd_dist=pm.HalfNormal.dist(1, shape=2))
        z = pm.MvNormal("z", beta, chol=root, shape=(N_GROUPS, 2))
        pm.Bernoulli(
            "y",
            logit_p=z[group, 0] + z[group, 1] * x,
            observed=rng.integers(0, 2, size=len(group)),
        )
    return model, ["z"]


def two_variables(rng):
    """Intercepts and slopes as two variables, the slopes with groups along the second axis."""
    group = codes_of(rng, balanced=False)
    x = rng.normal(size=len(group))
    with pm.Model() as model:
        sd = pm.HalfNormal("sd", 1, shape=2)
        a = pm.Normal("a", 0, sd[0], shape=N_GROUPS)
        b = pm.Normal("b", 0, sd[1], shape=(1, N_GROUPS))
        counts = rng.poisson(2, size=len(group))
        pm.Poisson("y", pm.math.exp(0.2 * a[group] + b[:, group][0] * x), observed=counts)
    return model, ["a", "b"]


def linear_intercepts(rng):
    group = codes_of(rng, balanced=False)
    x = rng.normal(size=len(group))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=2)
        sd, sigma = pm.HalfNormal("sd", 1), pm.HalfNormal("sigma", 1)
        z = pm.Normal("z", shape=N_GROUPS)
        mean = beta[0] + beta[1] * x + sd * z[group]
        pm.Normal("y", mean, sigma, observed=rng.normal(size=len(group)))
    return model, ["z"]


def linear_slopes(rng):
    group = codes_of(rng)
    x = rng.normal(size=len(group))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=2)
        sigma = pm.HalfNormal("sigma", 1)
        root, _, _ = pm.LKJCholeskyCov("root", n=2, eta=2, sd_dist=pm.HalfNormal.dist(1, shape=2))
        z = pm.MvNormal("z", np.zeros(2), chol=root, shape=(N_GROUPS, 2))
        mean = beta[0] + beta[1] * x + z[group, 0] + z[group, 1] * x
        pm.Normal("y", mean, sigma, observed=rng.normal(size=len(group)))
    return model, ["z"]


def independent_linear_slopes(rng):
    """Intercepts and slopes as two variables, as Bambi writes them."""
    group = codes_of(rng, balanced=False)
    x = rng.normal(size=len(group))
    with pm.Model() as model:
        mean, sigma = pm.Normal("mean", 0, 2), pm.HalfNormal("sigma", 1)
        a, b = (pm.Normal(name, shape=N_GROUPS) for name in ("a", "b"))
        pm.Normal("y", mean + a[group] + b[group] * x, sigma, observed=rng.normal(size=len(group)))
    return model, ["a", "b"]


ONE_QUANTITY = {
    "logistic": logistic_intercepts,
    "logistic, centred": lambda rng: logistic_intercepts(rng, centred=True),
    "logistic, unequal groups": lambda rng: logistic_intercepts(rng, balanced=False),
    "Poisson with data": poisson_with_data_and_groups_predictor,
    "gamma frailty": gamma_frailty,
    "negative binomial": negative_binomial,
    "Student": student_records,
    "ordinal": ordinal,
    "two outcomes": two_outcomes,
    "repeated measures": repeated_measures,
    "linear": linear_intercepts,
}
TWO_QUANTITIES = {
    "logistic slopes": logistic_slopes,
    "two variables": two_variables,
    "linear slopes": linear_slopes,
    "independent linear slopes": independent_linear_slopes,
}
ALL = ONE_QUANTITY | TWO_QUANTITIES
