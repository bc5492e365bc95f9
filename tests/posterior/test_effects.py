"""Coordinates of group effects between the centred and the non-centred form."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from scipy import sparse

from pymc_sgmcmc.matrices import Dense, Diagonal
from pymc_sgmcmc.posterior import Posterior, effect_coordinates, posterior
from pymc_sgmcmc.posterior.effects import MOST_TOGETHER

ROWS, TYPES, GROUPS, ITEMS = 90, 3, 8, 5


def nested_model(form, effects=pm.Normal):
    """Groups within types, and two coefficients for each item."""
    rng = np.random.default_rng(1)
    group, item = rng.integers(GROUPS, size=ROWS), rng.integers(ITEMS, size=ROWS)
    type_of_group = rng.integers(TYPES, size=GROUPS)
    x, more = rng.normal(size=ROWS), {"nu": 4} if effects is pm.StudentT else {}
    with pm.Model() as model:
        mean, slope = pm.Normal("mean"), pm.Normal("slope")
        of_types, of_groups = pm.HalfNormal("of_types"), pm.Exponential("of_groups", 1)
        of_items = pm.HalfNormal("of_items", shape=2)
        if form == "centred":
            types = pm.Normal("types", mean, of_types, shape=TYPES)
            groups = effects("groups", **more, mu=types[type_of_group], sigma=of_groups)
            items = pm.Normal("items", 0, of_items, shape=(ITEMS, 2))
        else:
            types = mean + of_types * pm.Normal("types", shape=TYPES)
            offsets = effects("groups", **more, mu=0, sigma=1, shape=GROUPS)
            groups = types[type_of_group] + of_groups * offsets
            items = of_items * pm.Normal("items", shape=(ITEMS, 2))
        predictor = slope * x + groups[group] + items[item, 0] + items[item, 1] * x
        pm.Bernoulli("y", logit_p=predictor, observed=rng.integers(2, size=ROWS))
    return model


@pytest.fixture(
    params=[
        ("centred", pm.Normal, 8),
        ("non-centred", pm.Normal, 150),
        ("centred", pm.StudentT, 0),
        ("centred", pm.LogNormal, 8),
    ],
    ids=["centred, partly joint", "non-centred, joint", "Student's t", "log-normal"],
    scope="module",
)
def pair(request):
    """A posterior in the variables of the model, and one in coordinates of its own."""
    form, effects, most = request.param
    model = nested_model(form, effects)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(posterior, "MOST_JOINT", most)
        return Posterior(model), Posterior(model, standardizes=True)


def curvature(rng, dimension):
    """A positive definite matrix that is larger than that of the prior."""
    root = rng.normal(size=(dimension, dimension))
    return Dense(2 * np.eye(dimension) + root @ root.T / dimension)


def away(posterior, rng, count=3):
    """Positions in coordinates of effects that are no form of the model."""
    d = posterior.dimension
    posterior.coordinates.adapted(0.5 * rng.normal(size=d), curvature(rng, d))
    return 0.5 * rng.normal(size=(count, d))


def test_effects_are_standardised_at_the_start(rng):
    model = nested_model("non-centred")
    plain, own = Posterior(model), Posterior(model, standardizes=True)
    position = rng.normal(size=plain.dimension)
    np.testing.assert_array_equal(own.coordinates.to_values(position), position)
    np.testing.assert_allclose(own.gradient(position), plain.gradient(position), rtol=1e-10)


def test_effects_in_the_order_of_the_model(pair):
    effects = [each for each in pair[1].coordinates.effects if not each.is_known]
    names = [each.variable.name.removesuffix("_log__") for each in effects]
    assert names == ["types", "groups", "items"]


def test_few_levels_and_coefficients_are_a_joint_block(rng):
    """Those of many levels are beside it, and coefficients of predictors are not found alone."""
    model = nested_model("centred")
    own = Posterior(model, standardizes=True).coordinates
    names = [each.variable.name for each in own.joint.effects]
    assert names == ["mean", "slope", "types", "groups", "items"]
    with model:
        many = pm.Normal("many", 0, pm.HalfNormal("of_many"), shape=40)
        pm.Normal("z", many[np.arange(ROWS) % 40], observed=np.zeros(ROWS))
    own = Posterior(model, standardizes=True).coordinates
    assert [each.variable.name for each in own.joint.effects] == names
    assert own.apart.sum() == 40
    with pm.Model() as regression:
        slopes = pm.Normal("slopes", shape=3)
        pm.Normal("y", rng.normal(size=(20, 3)) @ slopes, 1, observed=np.zeros(20))
    assert Posterior(regression, standardizes=True).coordinates is None


def test_both_forms_have_the_same_coordinates(rng):
    """The same position is the same density, and the same effects."""
    first, second = (
        Posterior(nested_model(form), standardizes=True) for form in ("centred", "non-centred")
    )
    position, precision = rng.normal(size=first.dimension), curvature(rng, first.dimension)
    adapted = [each.coordinates.adapted(position, precision) for each in (first, second)]
    np.testing.assert_allclose(*adapted, atol=1e-12)
    positions = rng.normal(size=(3, first.dimension))
    gradients = [[each.gradient(position) for position in positions] for each in (first, second)]
    np.testing.assert_allclose(*gradients, rtol=1e-8, atol=1e-8)
    centred, standardised = (
        each.layout.unravel_all(each.coordinates.to_values(positions)) for each in (first, second)
    )
    expected = standardised["items"] * np.exp(standardised["of_items_log__"])[:, None]
    np.testing.assert_allclose(centred["items"], expected)


@pytest.mark.parametrize("most", [0, 150])
def test_effects_are_independent_of_their_scale(rng, most, monkeypatch):
    """With known rows they are standard normal given the scale, whatever this is."""
    group, y = np.repeat(np.arange(6), 4), rng.normal(size=24)
    with pm.Model() as model:
        scale = pm.HalfNormal("scale")
        effects = pm.Normal("effects", 0, scale, shape=6)
        pm.Normal("y", effects[group], 0.5, observed=y)
    monkeypatch.setattr(posterior, "MOST_JOINT", most)
    own = Posterior(model, standardizes=True)
    information = 4 / 0.5**2
    start = np.array([0.3, *np.zeros(6)])
    # The mode of effects of scale exp(.3), and their precision as standardised ones.
    of_prior = np.exp(-0.6)
    modes = y.reshape(6, 4).mean(axis=1) * information / (information + of_prior)
    start[1:] = modes * np.exp(-0.3)
    precision = Diagonal(np.full(7, 1 + information / of_prior))
    np.testing.assert_allclose(own.coordinates.adapted(start, precision)[1:], 0, atol=1e-12)
    for size in (1e-4, 0.5, 100.0):
        of_effects = rng.normal(size=(3, 6))
        positions = np.concatenate([np.full((3, 1), np.log(size)), of_effects], axis=1)
        gradients = np.array([own.gradient(each) for each in positions])
        np.testing.assert_allclose(gradients[:, 1:], -of_effects, atol=1e-6)


def test_crossed_effects_are_independent_of_their_scales(rng):
    """With the intercept they are one normal vector given the scales, whatever these are."""
    first, second, y = np.tile(np.arange(3), 20), rng.integers(4, size=60), rng.normal(size=60)
    with pm.Model() as model:
        scales = pm.HalfNormal("scales", shape=2)
        mean, z = pm.Normal("mean", 1, 3), pm.Normal("z", shape=3)
        u = pm.Normal("u", 0, scales[1], shape=4)
        pm.Normal("y", mean + (scales[0] * z)[first] + u[second], 0.5, observed=y)
    plain, own = Posterior(model), Posterior(model, standardizes=True)
    start = rng.normal(size=10) / 3
    own.coordinates.adapted(start, Dense(hessian(own, start)))
    # The mode of effects with these scales is where those of a linear model are.
    at = own.coordinates.to_coordinates(start)
    own.coordinates.adapted(mode := start_of_effects(own, at), Dense(hessian(own, mode)))
    for sizes in ((1e-3, 1e-3), (0.5, 2.0), (30.0, 1e-2)):
        of_effects = rng.normal(size=(3, 8))
        positions = np.concatenate([np.tile(np.log(sizes), (3, 1)), of_effects], axis=1)
        gradients = np.array([own.gradient(each) for each in positions])
        np.testing.assert_allclose(gradients[:, 2:], -of_effects, atol=1e-5)
    assert np.abs(plain.gradient(own.coordinates.to_values(positions[0]))[2:]).max() > 0.1


def test_effects_beside_a_joint_block_follow_it(rng):
    """Given their own scale they and the block are one normal vector, whatever its scales are."""
    levels, few = np.repeat(np.arange(40), 5), rng.integers(3, size=200)
    share, y = rng.normal(size=40), rng.normal(size=200)
    with pm.Model() as model:
        scales = pm.HalfNormal("scales", shape=2)
        mean, slope = pm.Normal("mean", 1, 3), pm.Normal("slope", 0, 2)
        z = pm.Normal("z", shape=3)
        u = pm.Normal("u", mean + slope * share, scales[1], shape=40)
        pm.Normal("y", (scales[0] * z)[few] + u[levels], 0.5, observed=y)
    own = Posterior(model, standardizes=True)
    assert [each.variable.name for each in own.coordinates.joint.effects] == ["mean", "slope", "z"]
    start = own.coordinates.to_coordinates(rng.normal(size=47) / 3)
    for _ in range(2):
        start = start_of_effects(own, start)
        start = own.coordinates.adapted(start, Dense(hessian(own, start)))
    for size in (1e-3, 0.5, 30.0):
        of_effects = rng.normal(size=(3, 45))
        positions = np.concatenate([np.tile(start[:2], (3, 1)), of_effects], axis=1)
        positions[:, 0] = np.log(size)
        gradients = np.array([own.gradient(each) for each in positions])
        np.testing.assert_allclose(gradients[:, 2:], -of_effects, atol=1e-4)


FORMS = ["centred", "standardised", "columns", "rows", "correlated", "multivariate"]


def intercepts_and_slopes(form, second=None):
    """An intercept and a slope of each group, and hyperparameters before them.

    Records say much of a sum of both, since the predictor is far from zero.
    """
    rng, levels = np.random.default_rng(7), 40
    group = np.repeat(np.arange(levels), 5)
    x, y = 3 + rng.normal(size=len(group)), rng.normal(size=len(group))
    with pm.Model() as model:
        if form in ("correlated", "multivariate"):
            deviations = pm.Exponential.dist(1.0, shape=2)
            root, *_ = pm.LKJCholeskyCov("root", n=2, eta=2, sd_dist=deviations)
        else:
            scales = pm.HalfNormal("scales", shape=2)
        match form:
            case "centred":
                u = pm.Normal("u", 0, scales[0], shape=levels)
                v = pt.log(pm.LogNormal("v", 0, scales[1], shape=levels))
            case "standardised":
                u = scales[0] * pm.Normal("u", shape=levels)
                v = pt.log(pm.math.exp(scales[1] * pm.Normal("v", shape=levels)))
            case "columns":
                both = pm.Normal("u", 0, scales, shape=(levels, 2))
                u, v = both[:, 0], both[:, 1]
            case "rows":
                both = scales[:, None] * pm.Normal("u", shape=(2, levels))
                u, v = both[0], both.T[:, 1]
            case "correlated":
                both = pt.dot(pm.Normal("u", shape=(levels, 2)), root.T)
                u, v = both[:, 0], both[:, 1]
            case "multivariate":
                both = pm.MvNormal("u", [0.0, 0.0], chol=root, shape=(levels, 2))
                u, v = both[:, 0], both[:, 1]
        slope = v[group if second is None else second]
        pm.Normal("y", u[group] + slope * x, 0.5, observed=y)
    return model


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_effects_of_the_same_levels_are_independent_of_their_scales(
    form, is_long, rng, monkeypatch
):
    """Intercept and slope of a group are one normal vector given their scales, at any scales."""
    if is_long:
        monkeypatch.setattr(effect_coordinates, "DENSE_DIMENSION", 0)
    own = Posterior(intercepts_and_slopes(form), standardizes=True)
    start, hyper = own.initial_position, own.dimension - 80
    for _ in range(2):  # The second time from where the effects are those of the first.
        precision = sparse.csr_array(hessian(own, start))
        start = own.coordinates.adapted(start, precision if is_long else Dense(precision.toarray()))
        start = start_of_effects(own, start, hyper)
    own.coordinates.adapted(start, Dense(hessian(own, start)))
    for sizes in ((1e-3, 1e-3, 1e-3), (0.5, 1.0, 2.0), (30.0, 1.0, 1e-2)):
        of_effects = rng.normal(size=(3, 80))
        given = np.log(sizes) if hyper == 3 else np.log(sizes)[[0, 2]]
        positions = np.concatenate([np.tile(given, (3, 1)), of_effects], axis=1)
        gradients = np.array([own.gradient(each) for each in positions])
        np.testing.assert_allclose(gradients[:, hyper:], -of_effects, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_levels(form, rng):
    model = intercepts_and_slopes(form)
    pair = Posterior(model), Posterior(model, standardizes=True)
    (block,) = pair[1].coordinates.beside
    assert block.places.shape == (40, 2)
    test_the_map_has_an_inverse(pair, rng)
    test_density_has_the_jacobian(pair, rng)
    test_derivatives_of_the_position_of_the_rows(pair, rng)
    test_gradients_of_the_variables(pair, rng)
    test_what_is_known_is_restored(pair, rng)


def test_effects_of_other_levels_are_no_block(rng):
    model = intercepts_and_slopes("centred", rng.integers(40, size=200))
    own = Posterior(model, standardizes=True).coordinates
    assert len(own.effects) == 2
    assert [len(each.effects) for each in own.beside] == [1, 1]


def hessian(posterior, position):
    steps = 1e-5 * np.eye(len(position))
    ahead, behind = (
        np.array([posterior.gradient(position + side * each) for each in steps]) for side in (1, -1)
    )
    return (behind - ahead) / 2e-5


def start_of_effects(posterior, position, hyper=2):
    """The position with effects at their mode given the scales, by one step of Newton."""
    precision, gradient = hessian(posterior, position), posterior.gradient(position)
    step = np.linalg.solve(precision[hyper:, hyper:], gradient[hyper:])
    return np.concatenate([position[:hyper], position[hyper:] + step])


def several_coefficients(form, coefficients=3):
    """Groups with several correlated coefficients in a form of PyMC's gallery."""
    rng = np.random.default_rng(3)
    group, shape = rng.integers(GROUPS, size=ROWS), (GROUPS, coefficients)
    with pm.Model() as model:
        mean = pm.Normal("mean", shape=coefficients)
        deviations = pm.Exponential.dist(1.0, shape=coefficients)
        root, *_ = pm.LKJCholeskyCov("root", n=coefficients, eta=2, sd_dist=deviations)
        match form:
            case "centred":
                effects = pm.MvNormal("effects", mean, chol=root, shape=shape)
            case "covariance":
                effects = pm.MvNormal("effects", mean, cov=root @ root.T, shape=shape)
            case "non-centred":
                effects = mean + pt.dot(pm.Normal("effects", shape=shape), root.T)
            case "sizes of levels":
                sizes = pm.HalfNormal("sizes", shape=(GROUPS, 1))
                effects = mean + (pm.Normal("effects", shape=shape) @ root.T) * sizes
            case "known sizes":
                sizes = np.arange(1, coefficients + 1)
                effects = mean + (pm.Normal("effects", shape=shape) * sizes) @ root.T
            case "squares":
                product = pm.Normal("effects", shape=shape) @ root.T
                effects = pt.mul(product, product, pm.HalfNormal("sizes", shape=coefficients))
            case "repeated":
                ones = np.ones((1, coefficients))
                effects = mean + (pm.Normal("effects", shape=(GROUPS, 1)) * ones) @ root.T
            case "first axis":
                z = pm.Normal("effects", shape=shape[::-1])
                effects = (mean[:, None] + root @ z).T
            case "not triangular":
                effects = mean + pm.Normal("effects", shape=shape) @ root
            case "correlations":
                scales = pm.HalfNormal("scales", shape=coefficients)
                effects = mean + (pm.Normal("effects", shape=shape) @ root.T) * scales
        predictor = (effects[group] * rng.normal(size=(ROWS, coefficients))).sum(axis=1)
        pm.Bernoulli("y", logit_p=predictor, observed=rng.integers(2, size=ROWS))
    return model


@pytest.mark.parametrize(
    ("form", "axis"),
    [
        ("covariance", 1),
        ("non-centred", 1),
        ("first axis", 0),
        ("correlations", 1),
        ("sizes of levels", 1),
    ],
)
def test_several_coefficients_of_a_level_are_found(form, axis):
    posterior = Posterior(several_coefficients(form), standardizes=True, check=False)
    (effect,) = posterior.coordinates.effects
    assert effect.axis == axis


@pytest.mark.parametrize("form", ["centred", "first axis"])
def test_several_coefficients_of_a_level(form, rng):
    model = several_coefficients(form)
    pair = Posterior(model), Posterior(model, standardizes=True)
    test_the_map_has_an_inverse(pair, rng)
    test_density_has_the_jacobian(pair, rng)
    test_gradients_of_the_variables(pair, rng)


@pytest.mark.parametrize("form", ["not triangular", "known sizes", "squares", "repeated"])
def test_other_products_of_matrices_have_no_effects(form):
    model = several_coefficients(form)
    assert Posterior(model, standardizes=True, check=False).coordinates is None


def test_large_matrices_have_no_effects(rng):
    """The elements of the factor of a level's effects would be written out, in minutes."""
    root = np.linalg.cholesky(np.eye(MOST_TOGETHER + 1) + 0.5)
    with pm.Model() as model:
        scale = pm.HalfNormal("scale")
        shape = (5, MOST_TOGETHER + 1)
        u = pm.MvNormal("u", np.zeros(shape[1]), chol=scale * root, shape=shape)
        picked = u[rng.integers(5, size=40), rng.integers(shape[1], size=40)]
        pm.Normal("y", picked, 1, observed=rng.normal(size=40))
    assert Posterior(model, standardizes=True).coordinates is None


@pytest.mark.parametrize("form", ["centred", "non-centred"])
def test_effects_with_a_sum_of_zero(form, rng):
    with pm.Model() as model:
        scale = pm.HalfNormal("scale")
        if form == "centred":
            effects = pm.ZeroSumNormal("effects", sigma=scale, shape=GROUPS)
        else:
            effects = scale * pm.ZeroSumNormal("effects", shape=GROUPS)
        index = rng.integers(GROUPS, size=ROWS)
        pm.Bernoulli("y", logit_p=effects[index], observed=rng.integers(2, size=ROWS))
    pair = Posterior(model), Posterior(model, standardizes=True)
    assert [each.variable.name for each in pair[1].coordinates.effects] == ["effects_zerosum__"]
    test_the_map_has_an_inverse(pair, rng)
    test_density_has_the_jacobian(pair, rng)


def test_the_map_has_an_inverse(pair, rng):
    _, own = pair
    positions = away(own, rng)
    values = own.coordinates.to_values(positions)
    assert np.abs(values - positions).max() > 0.01
    np.testing.assert_allclose(own.coordinates.to_coordinates(values), positions, atol=1e-13)


def test_threads_may_use_the_map(pair, rng):
    _, own = pair
    values = list(away(own, rng, 20))
    expected = [own.coordinates.to_coordinates(each) for each in values]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(own.coordinates.to_coordinates, values * 20))
    np.testing.assert_array_equal(found, expected * 20)


def test_density_has_the_jacobian(pair, rng):
    """Log densities differ by the log of the determinant of the map, and by a constant."""
    plain, own = pair
    differences = []
    for position in away(own, rng):
        values = own.coordinates.to_values(position)
        steps = 1e-6 * np.eye(len(position))
        ahead, behind = (own.coordinates.to_values(position + side * steps) for side in (1, -1))
        _, log_determinant = np.linalg.slogdet((ahead - behind) / 2e-6)
        assert abs(log_determinant) > 0.01
        difference = own.log_density_and_gradient(position)[0] - log_determinant
        differences.append(difference - plain.log_density_and_gradient(values)[0])
    np.testing.assert_allclose(differences, 0, atol=1e-7)


def test_derivatives_of_the_position_of_the_rows(pair, rng):
    own = pair[1].coordinates
    (position,), width = away(pair[1], rng, 1), 1e-5
    shifts = width * np.eye(len(position))
    differences = own.to_rows(position + shifts) - own.to_rows(position - shifts)
    found = own.jacobian(position).toarray()
    np.testing.assert_allclose(found, differences.T / (2 * width), atol=1e-6)


def test_gradients_of_the_variables(pair, rng):
    plain, own = pair
    positions = away(own, rng)
    values = own.coordinates.to_values(positions)
    expected = np.array([plain.gradient(each) for each in values])
    of_chain = np.array([own.gradient(each) for each in positions])
    assert np.abs(of_chain - expected).max() > 0.1
    found = own.coordinates.gradients(values, of_chain)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_what_is_known_is_restored(pair, rng):
    """In another posterior of the same model it gives the same map."""
    _, own = pair
    positions = away(own, rng)
    values = own.coordinates.to_values(positions)
    known = own.coordinates.known
    away(own, rng)
    assert np.abs(own.coordinates.to_values(positions) - values).max() > 0.01
    own.coordinates.restore(known)
    np.testing.assert_allclose(own.coordinates.to_values(positions), values, rtol=1e-12)


def test_factors_of_any_sign(rng):
    """A loading may be negative, where the density is as finite as in the variables themselves."""
    group = rng.integers(6, size=40)
    with pm.Model() as model:
        loading, z = pm.Normal("loading"), pm.Normal("z", shape=6)
        pm.Normal("y", loading * z[group], 1, observed=rng.normal(size=40))
    plain, own = Posterior(model), Posterior(model, standardizes=True)
    own.coordinates.adapted(np.ones(7), curvature(rng, 7))
    values = np.array([-0.7, *rng.normal(size=6)])
    position = own.coordinates.to_coordinates(values)
    np.testing.assert_allclose(own.coordinates.to_values(position), values)
    found = own.coordinates.gradients(values, own.gradient(position))
    np.testing.assert_allclose(found, plain.gradient(values), rtol=1e-9, atol=1e-9)


PREDICTORS = np.random.default_rng(4).normal(size=(40, 6))


def effects_of(build):
    """Names of the effects of a model of 40 rows in 6 groups."""
    rng = np.random.default_rng(2)
    group, other = rng.integers(6, size=(2, 40))
    with pm.Model() as model:
        z, scale = pm.Normal("z", shape=6), pm.HalfNormal("scale")
        mean = build(z, scale, group, other)
        pm.Normal("y", mean, 1, observed=rng.normal(size=40))
    found = Posterior(model, standardizes=True).coordinates
    return [] if found is None else [each.variable.name for each in found.effects]


@pytest.mark.parametrize(
    "build",
    [
        lambda z, s, g, h: (s * z)[g],
        lambda z, s, g, h: s * z[g],
        lambda z, s, g, h: (s * z)[g] - (s * z)[h],
        lambda z, s, g, h: s * (z[g] * np.linspace(-1, 1, 40)),
        lambda z, s, g, h: -2 * (z * s)[g],
        lambda z, s, g, h: (z * pm.HalfNormal("local", shape=6) * s)[g],
        lambda z, s, g, h: (pm.Deterministic("u", z * s)[:, None] * np.ones(2))[g, 1],
        lambda z, s, g, h: s * (z[:, None] * np.ones(2))[g][:, 1],
        lambda z, s, g, h: pt.exp(pm.Gamma("log", 2, 2)) * z[g],
        lambda z, s, g, h: (z / s)[g],
        lambda z, s, g, h: s * (z - z.mean())[g],
    ],
)
def test_standardised_effects_are_found(build):
    assert effects_of(build) == ["z"]


@pytest.mark.parametrize(
    "build",
    [
        lambda z, s, g, h: z[g] + s,
        lambda z, s, g, h: s * z[g] + z[h],
        lambda z, s, g, h: s * z[g] * z[h],
        lambda z, s, g, h: s * (z[g] * z[g]),
        lambda z, s, g, h: (z * z * s)[g],
        lambda z, s, g, h: s * (z[g] + 1),
        lambda z, s, g, h: pt.exp(z)[g] * s,
        lambda z, s, g, h: s * abs(z)[g],
        lambda z, s, g, h: s * pt.clip(z, -9, 9)[g],
        lambda z, s, g, h: s * z[g] + s**2 * z[h],
    ],
)
def test_other_products_are_no_effects(build):
    assert effects_of(build) == []


@pytest.mark.parametrize("seed", range(4))
def test_several_factors_of_one_effect_are_no_effect(seed):
    """Terms of a predictor that is not centred are so large that others round beside them."""
    rng = np.random.default_rng(seed)
    group, x = rng.integers(6, size=40), rng.uniform(120, 280, size=40)
    variables = {
        "a": pm.Normal.dist(),
        "slope": pm.Normal.dist(0, 0.5),
        "s": pm.HalfNormal.dist(),
        "load": pm.HalfNormal.dist(),
        "z": pm.Normal.dist(shape=6),
    }
    names = list(variables)
    with pm.Model() as model:
        for name in rng.permutation(names):
            variables[name] = model.register_rv(variables[name], name)
        a, slope, s, load, z = (variables[name] for name in names)
        pm.Normal("y", a + s * z[group], 1, observed=rng.normal(size=40))
        counts = pt.exp(slope * x + load * z[group])
        pm.Poisson("k", counts, observed=rng.poisson(2, size=40))
    assert Posterior(model, standardizes=True).coordinates is None


def test_a_factor_in_few_rows_is_seen():
    """Few rows are compared, and none of these has the other factor."""
    rng = np.random.default_rng(5)
    group, x = rng.integers(6, size=4000), np.zeros(4000)
    x[[2, 1502, 3001]] = 6.0
    with pm.Model() as model:
        mean, s, load = pm.Normal("mean"), pm.HalfNormal("s"), pm.HalfNormal("load")
        z = pm.Normal("z", shape=6)
        predictor = mean + load * z[group] * x + s * z[group]
        pm.Normal("y", predictor, 1, observed=rng.normal(size=4000))
    assert Posterior(model, standardizes=True).coordinates is None


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda z, s, g, h: pt.dot(PREDICTORS, s * z), ["z"]),
        (lambda z, s, g, h: (PREDICTORS * pm.Normal("u", 0, s, shape=6)).sum(-1), ["z", "u"]),
    ],
)
def test_coefficients_of_an_unknown_scale_are_only_in_a_joint_block(build, names, monkeypatch):
    assert effects_of(build) == names
    monkeypatch.setattr(posterior, "MOST_JOINT", 0)
    assert effects_of(build) == []


def test_coefficients_of_predictors_are_no_effects(rng, no_joint_block):
    """Such as those of a horseshoe, which belong to no level."""
    with pm.Model() as model:
        local = pm.HalfCauchy("local", 1, shape=6)
        beta = pm.Normal("beta", shape=6) * local * pm.HalfNormal("scale")
        pm.Normal("y", rng.normal(size=(40, 6)) @ beta, 1, observed=rng.normal(size=40))
    assert Posterior(model, standardizes=True).coordinates is None


def test_factors_along_other_axes(rng):
    """Those of rows and of columns of a square are not the same."""
    first, second = rng.integers(4, size=(2, 40))
    with pm.Model() as model:
        z, scales = pm.Normal("z", shape=(4, 4)), pm.HalfNormal("scales", shape=4)
        mean = (z * scales[:, None])[first, second] + (z * scales)[second, first]
        pm.Normal("y", mean, 1, observed=rng.normal(size=40))
    assert Posterior(model, standardizes=True).coordinates is None


def test_loadings_that_are_not_square(rng):
    with pm.Model() as model:
        z, loadings = pm.Normal("z", shape=(9, 2)), pm.HalfNormal("loadings", shape=(4, 2))
        mean = pt.dot(z, pt.tril(loadings).T)[rng.integers(9, size=40)]
        pm.Normal("y", mean, 1, observed=rng.normal(size=(40, 4)))
    assert Posterior(model, standardizes=True).coordinates is None


def test_locations_of_several_effects(rng, no_joint_block):
    """The map is linear in several entries of a column, or in none."""
    group = rng.integers(6, size=40)
    with pm.Model() as model:
        first = pm.Normal("first", 0, pm.HalfNormal("s"), shape=6)
        location = rng.normal(size=(5, 6)) @ first + pt.exp(first[:5])
        second = pm.Normal("second", location, pm.HalfNormal("t"), shape=5)
        pm.Normal("y", first[group] + second[group % 5], 1, observed=rng.normal(size=40))
    own = Posterior(model, standardizes=True).coordinates
    d = own.layout.dimension
    position = own.adapted(0.3 * rng.normal(size=d), curvature(rng, d))
    ahead, behind = (own.to_rows(position + side * 1e-6 * np.eye(d)) for side in (1, -1))
    found = own.jacobian(position).toarray()
    np.testing.assert_allclose(found, (ahead - behind).T / 2e-6, atol=1e-6)


def test_locations_that_leave_the_range_of_numbers(rng, no_joint_block):
    """Far from the position, where the map is looked at."""
    group = rng.integers(6, size=40)
    with pm.Model() as model:
        first = pm.Normal("first", 0, pm.HalfNormal("s"), shape=6)
        second = pm.Normal("second", pt.exp(300 * first), pm.HalfNormal("t"), shape=6)
        pm.Normal("y", (first + second)[group], 1, observed=rng.normal(size=40))
    own = Posterior(model, standardizes=True).coordinates
    assert own.jacobian(own.to_coordinates(np.zeros(14))).shape == (14, 14)


def test_jacobian_of_a_scale_of_many_cells(rng):
    """280 entries of one scale, of which PyTensor's rewrites count 24."""
    first, second = rng.integers(40, size=ROWS), rng.integers(7, size=ROWS)
    with pm.Model() as model:
        cells = pm.Normal("cells", 0, pm.HalfNormal("scale"), shape=(40, 7))
        pm.Normal("y", cells[first, second], 1, observed=rng.normal(size=ROWS))
    pair = Posterior(model), Posterior(model, standardizes=True)
    test_density_has_the_jacobian(pair, rng)


def test_factors_that_repeat_effects(rng):
    """Effects times several factors have no factor of their shape."""
    kind, group = rng.integers(2, size=40), rng.integers(6, size=40)
    with pm.Model() as model:
        z, scales = pm.Normal("z", shape=(1, 6)), pm.HalfNormal("scales", shape=(2, 1))
        pm.Normal("y", (scales * z)[kind, group], 1, observed=rng.normal(size=40))
    assert Posterior(model, standardizes=True).coordinates is None
