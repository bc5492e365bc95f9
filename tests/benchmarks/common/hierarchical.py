"""Models with effects of groups: of several factors, by shape and form, and random intercepts.

A shape is a function of random numbers, a size and the form to a model and the values that made its
data. Scales are called ``of_...``, ``sigma`` or ``root_stds``; effects have more than ten levels.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

FORMS = ("centred", "not centred")
RATED_ROWS = 15_000
"""Rows of `ratings` of size 1."""
TRUTH = {"intercept": -0.5, "slopes": (1.0, 0.5), "sd": 1.2}
"""Of random intercepts, see `intercepts`."""


def is_scale(name: str) -> bool:
    """Whether a variable of a shape is a scale."""
    return name.startswith("of_") or name in ("sigma", "root_stds")


def effects_of(name: str, scale: Any, levels: int, form: str) -> Any:
    """Normal effects of a factor."""
    if form == "centred":
        return pm.Normal(name, 0, scale, shape=levels)
    return pm.Deterministic(name, scale * pm.Normal(f"z_{name}", shape=levels))


def draw_levels(rng: Any, count: int, rows: int) -> Any:
    """A level for each row, with every level once."""
    return np.concatenate([np.arange(count), rng.integers(count, size=rows - count)])


def bernoulli(rng: Any, predictor: Any) -> Any:
    """Outcomes of a logistic regression."""
    return (rng.random(len(predictor)) < 1 / (1 + np.exp(-predictor))).astype("int8")


def ratings(rng: Any, size: float, form: str) -> tuple[pm.Model, dict[str, Any]]:
    """Users by items."""
    users, items, rows = int(600 * size), int(150 * size), int(RATED_ROWS * size)
    user, item = draw_levels(rng, users, rows), rng.integers(items, size=rows)
    a, b = 0.4 * rng.normal(size=users), 0.6 * rng.normal(size=items)
    y = 3.3 + a[user] + b[item] + 0.9 * rng.normal(size=rows)
    with pm.Model() as model:
        mean, sigma = pm.Normal("mean", 3, 2), pm.HalfNormal("sigma", 1)
        u = effects_of("u", pm.HalfNormal("of_users", 1), users, form)
        v = effects_of("v", pm.HalfNormal("of_items", 1), items, form)
        pm.Normal("y", mean + u[user] + v[item], sigma, observed=y)
    return model, {"mean": 3.3, "sigma": 0.9, "of_users": 0.4, "of_items": 0.6, "u": a, "v": b}


def matches(rng: Any, size: float, form: str) -> tuple[pm.Model, dict[str, Any]]:
    """Players against players."""
    players, rows = 600 * size, 20_000 * size
    first = draw_levels(rng, players, rows)
    second = (first + rng.integers(1, players, size=rows)) % players
    skill = 0.8 * rng.normal(size=players)
    wins = bernoulli(rng, skill[first] - skill[second]).astype(bool)
    winner, loser = np.where(wins, [first, second], [second, first])
    with pm.Model() as model:
        s = effects_of("s", pm.HalfNormal("of_players", 1), players, form)
        pm.Bernoulli("y", logit_p=s[winner] - s[loser], observed=np.ones(rows, "int8"))
    return model, {"of_players": 0.8, "s": skill}


def nested(rng: Any, size: float, form: str) -> tuple[pm.Model, dict[str, Any]]:
    """Pupils in classes in schools."""
    schools, classes, rows = 60 * size, 600 * size, 12_000 * size
    of_class, group = draw_levels(rng, schools, classes), draw_levels(rng, classes, rows)
    a, b = 0.5 * rng.normal(size=schools), 0.3 * rng.normal(size=classes)
    x = rng.normal(size=rows)
    y = 1 + 0.5 * x + a[of_class[group]] + b[group] + rng.normal(size=rows)
    with pm.Model() as model:
        mean, slope = pm.Normal("mean", 0, 2), pm.Normal("slope")
        u = effects_of("u", pm.HalfNormal("of_schools", 1), schools, form)
        v = effects_of("v", pm.HalfNormal("of_classes", 1), classes, form)
        predictor = mean + slope * x + u[of_class[group]] + v[group]
        pm.Normal("y", predictor, pm.HalfNormal("sigma", 1), observed=y)
    truth = {"mean": 1, "slope": 0.5, "of_schools": 0.5, "of_classes": 0.3, "sigma": 1}
    return model, {**truth, "u": a, "v": b}


def claims(rng: Any, size: float, form: str) -> tuple[pm.Model, dict[str, Any]]:
    """Counts with exposure, districts by vehicles."""
    districts, vehicles, rows = 500 * size, 60, 50_000 * size
    district, vehicle = draw_levels(rng, districts, rows), rng.integers(vehicles, size=rows)
    a, b = 0.3 * rng.normal(size=districts), 0.4 * rng.normal(size=vehicles)
    age, exposure = rng.normal(size=rows), rng.uniform(0.1, 1, size=rows)
    y = rng.poisson(exposure * np.exp(-2 + 0.2 * age + a[district] + b[vehicle]))
    with pm.Model() as model:
        mean, slope = pm.Normal("mean", -2, 1), pm.Normal("slope")
        u = effects_of("u", pm.HalfNormal("of_districts", 0.5), districts, form)
        v = effects_of("v", pm.HalfNormal("of_vehicles", 0.5), vehicles, form)
        rate = exposure * pm.math.exp(mean + slope * age + u[district] + v[vehicle])
        pm.Poisson("y", rate, observed=y)
    truth = {"mean": -2, "slope": 0.2, "of_districts": 0.3, "of_vehicles": 0.4}
    return model, {**truth, "u": a, "v": b}


def slopes(rng: Any, size: float, form: str) -> tuple[pm.Model, dict[str, Any]]:
    """Three correlated coefficients of each group, `LKJCholeskyCov`."""
    groups, rows, scales = 300 * size, 9000 * size, np.array([0.8, 0.5, 0.3])
    group = draw_levels(rng, groups, rows)
    X = np.column_stack([np.ones(rows), rng.normal(size=(rows, 2))])
    correlations = np.full((3, 3), 0.3) + 0.7 * np.eye(3)
    effects = rng.multivariate_normal(np.zeros(3), correlations * np.outer(scales, scales), groups)
    coefficients = np.array([0.5, -0.3, 0.2])
    y = (X * (coefficients + effects[group])).sum(1) + rng.normal(size=rows)
    with pm.Model() as model:
        beta = pm.Normal("beta", shape=3)
        deviations = pm.Exponential.dist(1.0, shape=3)
        root, _, _ = pm.LKJCholeskyCov("root", n=3, eta=2, sd_dist=deviations)
        if form == "centred":
            u = pm.MvNormal("u", np.zeros(3), chol=root, shape=(groups, 3))
        else:
            u = pm.Deterministic("u", pm.math.dot(pm.Normal("z", shape=(groups, 3)), root.T))
        predictor = (X * (beta + u)[group]).sum(1)
        pm.Normal("y", predictor, pm.HalfNormal("sigma", 1), observed=y)
    return model, {"beta": coefficients, "root_stds": scales, "sigma": 1, "u": effects}


def unequal(rng: Any, size: float, form: str) -> tuple[pm.Model, dict[str, Any]]:
    """Groups with sizes as Zipf's law."""
    groups, rows = 1000 * size, 40_000 * size
    shares = 1 / np.arange(1, groups + 1) ** 1.1
    more = rng.choice(groups, size=rows - groups, p=shares / shares.sum())
    group, x = np.concatenate([np.arange(groups), more]), rng.normal(size=rows)
    effects = 0.7 * rng.normal(size=groups)
    y = bernoulli(rng, -1 + 0.5 * x + effects[group])
    with pm.Model() as model:
        mean, slope = pm.Normal("mean", 0, 2), pm.Normal("slope")
        u = effects_of("u", pm.HalfNormal("of_groups", 1), groups, form)
        pm.Bernoulli("y", logit_p=mean + slope * x + u[group], observed=y)
    return model, {"mean": -1, "slope": 0.5, "of_groups": 0.7, "u": effects}


def predictors(rng: Any, size: float, form: str) -> tuple[pm.Model, dict[str, Any]]:
    """Groups beside many predictors."""
    groups, rows, count = 600 * size, 20_000 * size, 40
    group, X = draw_levels(rng, groups, rows), rng.normal(size=(rows, count))
    slopes, effects = 0.2 * rng.normal(size=count), 0.4 * rng.normal(size=groups)
    y = bernoulli(rng, 0.3 + X @ slopes + effects[group])
    with pm.Model() as model:
        mean, b = pm.Normal("mean", 0, 1), pm.Normal("b", shape=count)
        u = effects_of("u", pm.HalfNormal("of_groups", 1), groups, form)
        pm.Bernoulli("y", logit_p=mean + X @ b + u[group], observed=y)
    return model, {"mean": 0.3, "of_groups": 0.4, "b": slopes, "u": effects}


def polls(rng: Any, size: float, form: str) -> tuple[pm.Model, dict[str, Any]]:
    """States, ages, educations and cells of the last two, as for poststratification."""
    rows, lengths = 20_000 * size, {"state": 50, "age": 6, "education": 5, "cell": 30}
    index = {name: rng.integers(length, size=rows) for name, length in lengths.items()}
    index["cell"] = index["age"] * 5 + index["education"]
    share, truth = rng.normal(size=50), {"state": 0.3, "age": 0.3, "education": 0.2, "cell": 0.2}
    effects = {name: truth[name] * rng.normal(size=length) for name, length in lengths.items()}
    true = -0.2 - 0.5 * share[index["state"]] + sum(effects[name][index[name]] for name in lengths)
    y = bernoulli(rng, true)
    with pm.Model() as model:
        predictor = pm.Normal("mean", 0, 1.5) + pm.Normal("slope") * share[index["state"]]
        for name, length in lengths.items():
            scale = pm.HalfNormal(f"of_{name}", 1)
            predictor = predictor + effects_of(name, scale, length, form)[index[name]]
        pm.Bernoulli("y", logit_p=predictor, observed=y)
    scales = {f"of_{name}": scale for name, scale in truth.items() if lengths[name] > 10}
    return model, {"slope": -0.5, **scales, "state": effects["state"], "cell": effects["cell"]}


def spreads(rng: Any, size: float, form: str) -> tuple[pm.Model, dict[str, Any]]:
    """A mean and a residual scale of each group."""
    groups, records = 300 * size, 20
    group, x = np.repeat(np.arange(groups), records), rng.normal(size=groups * records)
    a, b = 0.5 * rng.normal(size=groups), 0.3 * rng.normal(size=groups)
    y = 1 + 0.4 * x + a[group] + np.exp(-0.2 + b[group]) * rng.normal(size=len(group))
    with pm.Model() as model:
        mean, slope, level = pm.Normal("mean", 0, 2), pm.Normal("slope"), pm.Normal("level")
        u = effects_of("u", pm.HalfNormal("of_means", 1), groups, form)
        v = effects_of("v", pm.HalfNormal("of_spreads", 1), groups, form)
        pm.Normal("y", mean + slope * x + u[group], pm.math.exp(level + v[group]), observed=y)
    truth = {"mean": 1, "slope": 0.4, "level": -0.2, "of_means": 0.5, "of_spreads": 0.3}
    return model, {**truth, "u": a, "v": b}


def inst_eval(rng: Any, size: float, form: str) -> tuple[pm.Model, dict[str, Any]]:
    """Ratings of lectures by students, lecturers and departments, whose truth nobody knows."""
    import pandas as pd

    frame = pd.read_csv(INST_EVAL())
    factors = {"s": "students", "d": "lecturers", "dept": "departments"}
    with pm.Model() as model:
        predictor = pm.Normal("mean", 3, 2)
        predictor += pm.Normal("service") * frame["service"].to_numpy(float)
        for column, name in factors.items():
            level, levels = pd.factorize(frame[column])
            scale = pm.HalfNormal(f"of_{name}", 1)
            predictor += effects_of(name, scale, len(levels), form)[level]
        pm.Normal("y", predictor, pm.HalfNormal("sigma", 2), observed=frame["y"].to_numpy(float))
    names = ("mean", "service", "sigma", *(f"of_{name}" for name in factors.values()))
    return model, dict.fromkeys((*names, *factors.values()))


def players(rng: Any, size: float, form: str) -> tuple[pm.Model, dict[str, Any]]:
    """Hits of players, beta-binomial."""
    at_bats = rng.integers(20, 300, size=1000 * size)
    share = rng.beta(15, 45, size=len(at_bats))
    with pm.Model() as model:
        mean, kappa = pm.Uniform("mean"), pm.Exponential("of_kappa", 0.02)
        theta = pm.Beta("theta", mean * kappa, (1 - mean) * kappa, shape=len(at_bats))
        pm.Binomial("y", at_bats, theta, observed=rng.binomial(at_bats, share))
    return model, {"mean": 0.25, "of_kappa": 60, "theta": share}


def frailties(rng: Any, size: float, form: str) -> tuple[pm.Model, dict[str, Any]]:
    """Weibull times with a gamma frailty of each family."""
    families = 300 * size
    family = np.repeat(np.arange(families), 8)
    frailty, x = rng.gamma(2, 0.5, size=families), rng.normal(size=len(family))
    rate = frailty[family] * np.exp(0.5 * x - 1)
    times = rng.weibull(1.5, size=len(family)) / rate ** (1 / 1.5)
    with pm.Model() as model:
        mean, slope = pm.Normal("mean", 0, 2), pm.Normal("slope")
        shape, alpha = pm.HalfNormal("of_times", 2), pm.HalfNormal("of_frailties", 3)
        w = pm.Gamma("w", alpha, alpha, shape=families)
        beta = (w[family] * pm.math.exp(mean + slope * x)) ** (-1 / shape)
        pm.Weibull("t", shape, beta, observed=times)
    truth = {"mean": -1, "slope": 0.5, "of_times": 1.5, "of_frailties": 2}
    return model, {**truth, "w": frailty}


def shops(rng: Any, size: float, form: str) -> tuple[pm.Model, dict[str, Any]]:
    """Counts of shops, gamma-Poisson."""
    shop = np.repeat(np.arange(1000 * size), 5)
    rate = rng.gamma(3, 0.5, size=1000 * size)
    with pm.Model() as model:
        shape, mean = pm.HalfNormal("of_rates", 5), pm.HalfNormal("mean", 5)
        rates = pm.Gamma("rates", shape, shape / mean, shape=len(rate))
        pm.Poisson("y", rates[shop], observed=rng.poisson(rate[shop]))
    return model, {"of_rates": 3, "mean": 1.5, "rates": rate}


def items(rng: Any, size: float, form: str) -> tuple[pm.Model, dict[str, Any]]:
    """Answers of persons to items, with two parameters an item."""
    persons = 1000 * size
    person, item = np.repeat(np.arange(persons), 30), np.tile(np.arange(30), persons)
    ability, difficulty = rng.normal(size=persons), rng.normal(size=30)
    slope = np.exp(0.3 * rng.normal(size=30))
    y = bernoulli(rng, slope[item] * (ability[person] - difficulty[item]))
    with pm.Model() as model:
        t, a = pm.Normal("t", shape=persons), pm.LogNormal("a", 0, 0.5, shape=30)
        mean = pm.Normal("mean")
        b = pm.Normal("b", mean, pm.HalfNormal("of_items", 1), shape=30)
        pm.Bernoulli("y", logit_p=a[item] * (t[person] - b[item]), observed=y)
    return model, {"mean": 0, "of_items": 1, "t": ability, "a": slope, "b": difficulty}


def media(rng: Any, size: float, form: str) -> tuple[pm.Model, dict[str, Any]]:
    """Sales of regions by weeks, with a saturating effect of advertising."""
    regions = 60 * size
    region = np.repeat(np.arange(regions), 156)
    x = rng.gamma(2, 0.5, size=len(region))
    a = 0.5 + 0.2 * rng.normal(size=regions)
    b = np.exp(-0.8 + 0.25 * rng.normal(size=regions))
    y = a[region] + b[region] * x / (x + 1.4) + 0.3 * rng.normal(size=len(region))
    with pm.Model() as model:
        mean, effect = pm.Normal("mean"), pm.Normal("effect")
        half = pm.HalfNormal("half", 2)
        u = pm.Normal("u", mean, pm.HalfNormal("of_means", 0.5), shape=regions)
        v = pm.LogNormal("v", effect, pm.HalfNormal("of_effects", 0.5), shape=regions)
        predictor = u[region] + v[region] * x / (x + half)
        pm.Normal("y", predictor, pm.HalfNormal("sigma", 1), observed=y)
    truth = {"mean": 0.5, "effect": -0.8, "half": 1.4, "of_means": 0.2, "of_effects": 0.25}
    return model, {**truth, "sigma": 0.3, "u": a, "v": b}


def INST_EVAL() -> Path:  # noqa: N802
    """The file of InstEval in the folder of data sets; it need not exist."""
    return Path(os.environ.get("PYMC_SGMCMC_DATA", "")) / "InstEval.csv.gz"


Shape = Callable[[Any, float, str], tuple[pm.Model, dict[str, Any]]]
SHAPES: dict[str, Shape] = {
    shape.__name__: shape
    for shape in (
        ratings, matches, nested, claims, slopes, unequal, predictors, polls, spreads, inst_eval,
        players, frailties, shops, items, media,
    )
}  # fmt: skip


def intercepts(groups: int, records: int, *, linear: bool = False) -> pm.Model:
    """Logistic or linear random intercepts ``z``, not centred."""
    group, X, y = intercept_data(groups, records, linear)
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0, 2)
        slopes = pm.Normal("slopes", 0, 2, shape=X.shape[1])
        sd = pm.HalfNormal("sd", 2)
        predictor = intercept + X @ slopes + sd * pm.Normal("z", shape=groups)[group]
        if linear:
            pm.Normal("y", predictor, pm.HalfNormal("sigma", 2), observed=y)
        else:
            pm.Bernoulli("y", logit_p=predictor, observed=y)
    return model


def intercept_data(groups: int, records: int, linear: bool = False) -> tuple[Any, Any, Any]:
    """Groups of the records, predictors and outcomes."""
    rng = np.random.default_rng(groups)
    group = np.repeat(np.arange(groups), records)
    X = rng.normal(size=(len(group), len(TRUTH["slopes"])))
    effects = TRUTH["sd"] * rng.normal(size=groups)
    predictor = TRUTH["intercept"] + X @ np.array(TRUTH["slopes"]) + effects[group]
    y = predictor + rng.normal(size=len(group)) if linear else bernoulli(rng, predictor)
    return group, X, y
