"""Fits of effects of several factors against dense matrices and published values."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from scipy import special, stats

from pymc_sgmcmc import datasets
from pymc_sgmcmc.errors import BoundaryWarning, ModelError
from pymc_sgmcmc.maximum_likelihood import factors as factors_module
from pymc_sgmcmc.maximum_likelihood import fit_marginal
from pymc_sgmcmc.maximum_likelihood.factors import Factors
from tests.maximum_likelihood.test_fit import assert_gradient

pytestmark = pytest.mark.usefixtures("without_compiler")

DISTRICTS, SCHOOLS, CLASSES, PUPILS = 5, 12, 30, 150


def derivatives(function, point: np.ndarray, width: float = 1e-4) -> tuple[np.ndarray, np.ndarray]:
    """Gradient and second derivatives by central differences."""
    shifts = width * np.eye(len(point))

    def slope(at: np.ndarray) -> np.ndarray:
        return np.array([function(at + s) - function(at - s) for s in shifts]) / (2 * width)

    return slope(point), np.array([slope(point + s) - slope(point - s) for s in shifts]) / (
        2 * width
    )


def assert_is_maximum(fit, minus_two, estimates: np.ndarray, errors: np.ndarray) -> None:
    """The fit is that of a dense function of the parameters on their own scale."""
    np.testing.assert_allclose(fit.minus_two_log_likelihood, minus_two(estimates), rtol=1e-8)
    slope, curvature = derivatives(minus_two, estimates)
    np.testing.assert_allclose(slope * errors, 0, atol=1e-4)
    np.testing.assert_allclose(errors, np.sqrt(np.diag(2 * np.linalg.inv(curvature))), rtol=2e-4)


@pytest.mark.parametrize("reml", [False, True])
@pytest.mark.parametrize("form", ["sum", "hierarchical"])
def test_nested_factors_of_a_linear_model(rng, form, reml):
    district = rng.integers(DISTRICTS, size=SCHOOLS)
    school = rng.permutation(np.arange(CLASSES) % SCHOOLS)
    of_pupil, x = rng.permutation(np.arange(PUPILS) % CLASSES), rng.normal(size=PUPILS)
    levels = [district[school[of_pupil]], school[of_pupil], of_pupil]
    y = 1 + x + sum(rng.normal(size=number.max() + 1)[number] for number in levels)
    y += rng.normal(size=PUPILS)
    with pm.Model() as model:
        beta, sd = pm.Normal("beta", shape=2), pm.HalfNormal("sd", shape=4)
        if form == "sum":
            of_districts, of_schools, of_classes = (
                pm.Normal(name, shape=length)
                for name, length in (("d", DISTRICTS), ("s", SCHOOLS), ("c", CLASSES))
            )
            effect = beta[0] + sd[0] * of_districts[levels[0]] + sd[1] * of_schools[levels[1]]
            effect += sd[2] * of_classes[of_pupil]
        else:
            of_districts = pm.Normal("d", beta[0], sd[0], shape=DISTRICTS)
            of_schools = pm.Normal("s", of_districts[district], sd[1], shape=SCHOOLS)
            effect = pm.Normal("c", of_schools[school], sd[2], shape=CLASSES)[of_pupil]
        pm.Deterministic("of_classes", model["c"] + 1)
        pm.Normal("y", effect + beta[1] * x, sd[3], observed=y)
    fit = fit_marginal(model, ["d", "s", "c"], reml=reml)
    assert (fit.method, fit.reml) == ("exact", reml)
    assert fit.n_groups == DISTRICTS + SCHOOLS + CLASSES
    assert fit.modes.sizes == {
        "d_dim_0": DISTRICTS,
        "s_dim_0": SCHOOLS,
        "c_dim_0": CLASSES,
        "of_classes_dim_0": CLASSES,
    }

    def covariance(scales: np.ndarray) -> np.ndarray:
        same = [number[:, None] == number for number in [*levels, np.arange(PUPILS)]]
        return sum(scale**2 * each for scale, each in zip(scales, same, strict=True))

    def minus_two(point: np.ndarray) -> float:
        mean = point[0] + point[1] * x
        return -2 * stats.multivariate_normal(mean, covariance(point[2:])).logpdf(y)

    table = fit.to_dataframe().to_numpy()
    if reml:
        # The fixed effects are integrated out with a flat prior, at the estimate of the scales.
        X = np.column_stack([np.ones(PUPILS), x])

        def least_squares(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            precision = X.T @ np.linalg.solve(covariance(scales), X)
            slope = X.T @ np.linalg.solve(covariance(scales), y)
            return np.linalg.solve(precision, slope), precision

        def restricted(scales: np.ndarray) -> float:
            beta, precision = least_squares(scales)
            determinant = np.linalg.slogdet(precision / (2 * np.pi))[1]
            return minus_two(np.concatenate([beta, scales])) + determinant

        beta, precision = least_squares(table[2:, 0])
        np.testing.assert_allclose(table[:2, 0], beta, rtol=1e-8)
        assert_is_maximum(fit, restricted, *table[2:].T)
        assert np.all(table[:2, 1] >= np.sqrt(np.diag(np.linalg.inv(precision))))
    else:
        assert_is_maximum(fit, minus_two, *table.T)
    # The best linear unbiased prediction of the districts.
    point, same = table[:, 0], levels[0] == np.arange(DISTRICTS)[:, None]
    residual = np.linalg.solve(covariance(point[2:]), y - point[0] - point[1] * x)
    predicted = point[2] * same @ residual
    of_mode = fit.modes["d"].values
    if form == "hierarchical":
        of_mode = (of_mode - point[0]) / point[2]
    np.testing.assert_allclose(of_mode, predicted, atol=1e-6)


@pytest.mark.parametrize("kind", ["binary", "counts"])
def test_crossed_factors_of_a_generalised_linear_model(rng, kind):
    """One factor has intercepts and slopes, which are correlated for counts."""
    first, second, x = rng.integers(7, size=300), rng.integers(6, size=300), rng.normal(size=300)
    Z = np.zeros((300, 20))
    rows = np.arange(300)
    Z[rows, first], Z[rows, 7 + first], Z[rows, 14 + second] = 1, x, 1
    predictor = Z @ (np.repeat([0.9, 0.6, 0.8], [7, 7, 6]) * rng.normal(size=20))
    binary = rng.random(300) < special.expit(predictor)
    y = binary.astype(int) if kind == "binary" else rng.poisson(np.exp(predictor))
    with pm.Model() as model:
        mean, sd = pm.Normal("mean"), pm.HalfNormal("sd")
        if kind == "binary":
            effects = pm.HalfNormal("sds", shape=2) * pm.Normal("z", shape=(7, 2))
        else:
            root, _, _ = pm.LKJCholeskyCov("root", n=2, eta=1, sd_dist=pm.HalfNormal.dist(1))
            effects = pm.MvNormal("z", np.zeros(2), chol=root, shape=(7, 2))
        others = pm.Normal("w", 0, sd, shape=6)
        total = mean + effects[first, 0] + effects[first, 1] * x + others[second]
        if kind == "binary":
            pm.Bernoulli("y", logit_p=total, observed=y)
        else:
            pm.Poisson("y", pt.exp(total), observed=y)
    fit = fit_marginal(model, ["z", "w"])
    assert fit.method == "laplace"

    def minus_two(point: np.ndarray) -> float:
        """Laplace's method with dense matrices."""
        center, scale, *of_first = point
        of_levels = np.diag(np.square(of_first[:2]))
        of_levels[0, 1] = of_levels[1, 0] = np.prod(of_first) if kind == "counts" else 0.0
        precision = np.eye(20) / scale**2
        precision[:14, :14] = np.kron(np.linalg.inv(of_levels), np.eye(7))
        u = np.zeros(20)
        for _ in range(30):
            eta = center + Z @ u
            if kind == "binary":
                expected = special.expit(eta)
                value, weights = (y * eta - np.logaddexp(0, eta)).sum(), expected * (1 - expected)
            else:
                expected = weights = np.exp(eta)
                value = stats.poisson(expected).logpmf(y).sum()
            hessian = precision + Z.T @ (weights[:, None] * Z)
            change = np.linalg.solve(hessian, Z.T @ (y - expected) - precision @ u)
            u = u + change
        determinants = [np.linalg.slogdet(each)[1] for each in (precision, hessian)]
        return -2 * (value - 0.5 * u @ precision @ u) - determinants[0] + determinants[1]

    frame = fit.to_dataframe()
    names = ["mean", "sd", "sds[0]", "sds[1]"]
    if kind == "counts":
        names = ["mean", "sd", "root_stds[0]", "root_stds[1]", "root_corr[0, 1]"]
    assert_is_maximum(fit, minus_two, *frame.loc[names].to_numpy().T)


def salamanders(folder) -> pm.Model:
    frame = datasets.load("salamander", folder).frame
    crosses, cross = np.unique(frame["Cross"].astype(str), return_inverse=True)
    with pm.Model(coords={"cross": crosses}) as model:
        predictor = pm.Normal("beta", 0, 2, dims="cross")[cross]
        for sex in ("Female", "Male"):
            number = pd.factorize(frame[sex])[0]
            predictor += pm.Normal(sex, 0, pm.HalfNormal(f"sd_{sex}"), shape=60)[number]
        pm.Bernoulli("mate", logit_p=predictor, observed=frame["Mate"].to_numpy(int))
    return model


def test_salamanders_as_lme4(data_folder):
    fit = fit_marginal(salamanders(data_folder), ["Female", "Male"])
    np.testing.assert_allclose(fit.estimates["beta"], [1.0082, 0.3062, -1.8960, 0.9904], atol=5e-5)
    variances = [fit.estimates[f"sd_{sex}"] ** 2 for sex in ("Female", "Male")]
    np.testing.assert_allclose(variances, [1.174, 1.041], atol=5e-4)
    np.testing.assert_allclose(fit.aic, 430.6, atol=0.05)


@pytest.mark.slow
def test_student_ratings_as_lme4(data_folder):
    """InstEval: 2972 students, 1128 lecturers and 14 departments."""
    path = data_folder / "InstEval.csv.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    frame = pd.read_csv(path)
    with pm.Model() as model:
        mean = pm.Normal("intercept", 0, 5) + pm.Normal("service") * frame["service"].to_numpy(
            float
        )
        for name in ("s", "d", "dept"):
            number, levels = pd.factorize(frame[name])
            effect = pm.Normal(name, 0, pm.HalfNormal(f"sd_{name}"), shape=len(levels))
            mean += effect[number]
        pm.Normal("y", mean, pm.HalfNormal("sigma"), observed=frame["y"].to_numpy(float))
    fit = fit_marginal(model, ["s", "d", "dept"])
    np.testing.assert_allclose(fit.minus_two_log_likelihood, 237721.77, atol=5e-3)
    expected = {
        "intercept": 3.2826,
        "service": -0.0926,
        "sd_s": 0.3255,
        "sd_d": 0.5150,
        "sd_dept": 0.0785,
        "sigma": 1.1775,
    }
    table = fit.to_dataframe().loc[list(expected)]
    np.testing.assert_allclose(table["estimate"], list(expected.values()), atol=5e-5)
    np.testing.assert_allclose(table["standard_error"][:2], [0.0284, 0.0134], atol=5e-5)


def players(rng, more: int = 0) -> tuple[pm.Model, list[str]]:
    """Two indices into one factor, and another one, with levels without rows."""
    first, second, ground = rng.integers([[9], [9], [4]], size=(3, 80))
    with pm.Model() as model:
        skill = pm.Normal("skill", 0, pm.HalfNormal("sd"), shape=9 + more)
        at = pm.HalfNormal("of_grounds") * pm.Normal("ground", shape=(4 + more, 2))
        predictor = pm.Normal("mean") + skill[first] - skill[second] + at[ground, 0]
        predictor += at[ground, 1] * rng.normal(size=80)
        pm.Bernoulli("wins", logit_p=predictor, observed=rng.integers(2, size=80))
    return model, ["skill", "ground"]


def test_the_gradient_is_that_of_the_value(rng):
    factors = Factors(*players(rng))
    position = 0.3 * rng.normal(size=factors.layout.dimension)
    assert_gradient(factors, position)
    np.testing.assert_allclose(factors.value(position), factors(position)[0], rtol=1e-10)


def test_the_gradient_where_elements_of_the_matrix_are_zero():
    """Givers and takers: no row has both effects of a person, whose correlation begins at zero."""
    rng = np.random.default_rng(4)
    row = np.arange(360)
    giver, taker = row % 120, (row % 120 + 1 + row // 120) % 120
    effects = rng.multivariate_normal([0, 0], [[1, 0.8], [0.8, 1]], size=120)
    y = effects[giver, 0] + effects[taker, 1] + rng.normal(size=360)
    with pm.Model() as model:
        root, _, _ = pm.LKJCholeskyCov("root", n=2, eta=1, sd_dist=pm.HalfNormal.dist(1))
        z = pm.MvNormal("z", np.zeros(2), chol=root, shape=(120, 2))
        day = pm.Normal("day", 0, pm.HalfNormal("sd"), shape=4)[row % 4]
        pm.Normal("y", z[giver, 0] + z[taker, 1] + day, 1, observed=y)
    factors = Factors(model, ["z", "day"])
    start = factors.layout.ravel(factors.initial_point)
    assert not start.any()
    assert_gradient(factors, start)


def test_fixed_effects_of_a_treatment(rng):
    """They are selected by an index too, but are no factor that is integrated out first."""
    kind, first, second = rng.integers([[3], [8], [6]], size=(3, 90))
    y, x = rng.normal(size=90), rng.normal(size=90)
    with pm.Model() as model:
        beta, slope, sds = (
            pm.Normal("beta", shape=3),
            pm.Normal("slope"),
            pm.HalfNormal("sds", shape=3),
        )
        z, w = pm.Normal("z", 0, sds[0], shape=8), pm.Normal("w", 0, sds[1], shape=6)
        pm.Normal("y", beta[kind] + slope * x + z[first] + w[second], sds[2], observed=y)
    factors = Factors(model, ["z", "w"])
    assert factors.fixed.tolist() == [True] * 4 + [False] * 3
    log_sds = np.array([0.2, -0.3, 0.1])
    same = [number[:, None] == number for number in (first, second, np.arange(90))]
    covariance = sum(np.exp(2 * scale) * each for scale, each in zip(log_sds, same, strict=True))
    X = np.column_stack([np.eye(3)[kind], x])
    information = X.T @ np.linalg.solve(covariance, X)
    exact = np.linalg.solve(information, X.T @ np.linalg.solve(covariance, y))
    effects, root = factors.estimate(log_sds)
    np.testing.assert_allclose(effects, exact)
    np.testing.assert_allclose(root @ root.T, np.linalg.inv(information), atol=1e-12)
    for likelihood in (factors, factors.restricted()):
        assert_gradient(likelihood, log_sds)


def test_collinear_fixed_effects_are_refused(rng):
    first, second, x = rng.integers(5, size=40), np.arange(40) % 4, rng.normal(size=40)
    with pm.Model() as model:
        mean, slope, sd = pm.Normal("mean"), pm.Normal("slope", shape=2), pm.HalfNormal("sd")
        z, w = pm.Normal("z", 0, sd, shape=5), pm.Normal("w", shape=4)
        predictor = mean + slope[0] * x + slope[1] * (1 + x) + z[first] + w[second]
        pm.Normal("y", predictor, 1, observed=rng.normal(size=40))
    with pytest.raises(ModelError, match=r"does not determine the fixed effects.*collinear"):
        fit_marginal(model, ["z", "w"])


def test_levels_without_rows_change_nothing():
    position = np.array([0.3, -0.2, 0.4])
    few, more = (Factors(*players(np.random.default_rng(2), more))(position) for more in (0, 3))
    np.testing.assert_allclose(few[0], more[0], rtol=1e-9)
    np.testing.assert_allclose(few[1], more[1], atol=1e-6)


def test_a_factor_without_effect_is_said(rng):
    first, second = rng.integers(10, size=100), np.arange(100) % 5
    y = rng.normal(size=10)[first] + rng.normal(size=100)
    y -= (np.bincount(second, y) / 20)[second]
    with pm.Model() as model:
        mean, sds = pm.Normal("mean"), pm.HalfNormal("sds", shape=2)
        z, w = pm.Normal("z", 0, sds[0], shape=10), pm.Normal("w", 0, sds[1], shape=5)
        pm.Normal("y", mean + z[first] + w[second], pm.HalfNormal("sigma"), observed=y)
    with pytest.warns(BoundaryWarning, match="`sds`"):
        fit = fit_marginal(model, ["z", "w"])
    assert fit.estimates["sds"][1] < 1e-3
    assert np.isnan(fit.standard_errors["sds"].values).tolist() == [False, True]


def walk(z, sd):
    return pm.GaussianRandomWalk("w", 0, sd, init_dist=pm.Normal.dist(), shape=8)[np.arange(60) % 8]


def as_design(z, sd):
    return np.eye(8)[np.arange(60) % 8] @ pm.Normal("w", 0, sd, shape=8)


def mean_of_another(z, sd):
    return pm.Normal("w", z[np.arange(8) % 6], sd, shape=8)[np.arange(60) % 8]


def crossed(z, sd):
    return pm.Normal("w", 0, sd, shape=8)[np.arange(60) % 8]


@pytest.mark.parametrize(
    ("second", "names", "settings", "match"),
    [
        (walk, "zw", {}, "Levels of `z`, `w` should be independent.*but the prior joins some"),
        (
            as_design,
            "zw",
            {},
            "enter by indices, as in `z.group.`, but `w` enters otherwise",
        ),
        (mean_of_another, "z", {}, "`w` depends on local variables.*Name all effects"),
        (
            crossed,
            "zw",
            {"method": "quadrature"},
            '"quadrature" is for independent groups, but `z`, `w`',
        ),
    ],
)
def test_refusals(rng, second, names, settings, match):
    with pm.Model() as model:
        z, sd = pm.Normal("z", 0, pm.HalfNormal("of_z"), shape=6), pm.HalfNormal("sd")
        pm.Normal("y", z[np.arange(60) // 10] + second(z, sd), 1, observed=rng.normal(size=60))
    with pytest.raises(ModelError, match=match):
        fit_marginal(model, list(names), **settings)


def test_many_levels_of_several_factors_are_refused(rng, monkeypatch):
    monkeypatch.setattr(factors_module, "MOST_DENSE", 8)
    with pytest.raises(ModelError, match=r"should leave at most 8, but .* it leaves 17"):
        Factors(*players(rng, 0))


def test_many_levels_that_meet_few_others(rng, monkeypatch):
    """Patients see two doctors each: the factors cross, but elimination fills little."""
    monkeypatch.setattr(factors_module, "MOST_DENSE", 25)
    patient = np.arange(240) % 120
    doctor = (patient + rng.integers(2, size=240)) % 100
    y = rng.normal(size=120)[patient] + rng.normal(size=100)[doctor] + rng.normal(size=240)
    with pm.Model() as model:
        sds, mean = pm.HalfNormal("sds", shape=3), pm.Normal("mean")
        z, w = pm.Normal("z", 0, sds[0], shape=120), pm.Normal("w", 0, sds[1], shape=100)
        pm.Normal("y", mean + z[patient] + w[doctor], sds[2], observed=y)
    factors = Factors(model, ["z", "w"])
    assert factors.fixed.sum() == 1
    same = [number[:, None] == number for number in (patient, doctor, np.arange(240))]
    log_sds = np.array([0.2, -0.3, 0.1])
    covariance = sum(np.exp(2 * scale) * each for scale, each in zip(log_sds, same, strict=True))
    [estimate], _ = factors.estimate(log_sds)
    ones = np.linalg.solve(covariance, np.ones(240))
    np.testing.assert_allclose(estimate, ones @ y / ones.sum())
    law = stats.multivariate_normal(np.full(240, estimate), covariance)
    np.testing.assert_allclose(factors.value(log_sds), law.logpdf(y), rtol=1e-10)
    assert_gradient(factors, log_sds)
    assert_gradient(factors.restricted(), log_sds)


def test_single_precision_is_refused(rng):
    with (
        pytensor.config.change_flags(floatX="float32"),
        pytest.raises(ModelError, match="need double precision, but the model has float32"),
    ):
        Factors(*players(rng))
