"""Draws of local variables against closed forms and numerical integration."""

from __future__ import annotations

import importlib
import logging
import warnings

import arviz as az
import numpy as np
import pymc as pm
import pytest
import xarray as xr
from scipy import special, stats
from xarray import DataTree

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.marginal import marginalize, recover

pytestmark = pytest.mark.usefixtures("without_compiler")

Z_BOUND = 4.5
KOLMOGOROV_BOUND = stats.kstwobign.isf(1e-6)
DRAWS = 4000
SIZES = np.array([1, 3, 8, 20, 2, 5])
CODES = np.repeat(np.arange(len(SIZES)), SIZES)
N_GROUPS, N_RECORDS = len(SIZES), len(CODES)

COPIES = 20
"""Groups with the same records have the same law, so that draws of their local variables are draws
of one law. One call draws for all of them, in about the time that it takes for a single copy."""
CODES_OF_COPIES = (CODES + N_GROUPS * np.arange(COPIES)[:, None]).ravel()


def copies(values):
    """The values of all records, for each copy of the groups."""
    return np.tile(values, COPIES)


def trace(model, draws=DRAWS, **values):
    """A trace whose draws are all the same, with the dimensions that PyMC gives them."""
    variables, coords = {}, {"chain": [0, 1], "draw": np.arange(draws // 2)}
    for name, value in values.items():
        value = np.asarray(value, float)
        named = model.named_vars_to_dims.get(name) or [f"{name}_dim_{a}" for a in range(value.ndim)]
        for dim, length in zip(named, value.shape, strict=True):
            labels = model.coords.get(dim)
            coords[dim] = np.arange(length) if labels is None else np.array(labels)
        repeated = np.broadcast_to(value, (2, draws // 2, *value.shape))
        variables[name] = (("chain", "draw", *named), repeated)
    return DataTree.from_dict({"posterior": xr.Dataset(variables, coords)})


def draws_of(idata, name):
    """Draws of a variable, shape (draws, ...)."""
    values = idata["posterior"][name].to_numpy()
    return values.reshape(-1, *values.shape[2:])


def draws_of_copies(idata, name):
    """Draws of a variable, shape (draws * copies, groups, ...)."""
    values = draws_of(idata, name)
    return values.reshape(-1, N_GROUPS, *values.shape[2:])


def recovered(model, names=None, seed=1, groups=None, draws=DRAWS, **values):
    idata = trace(model, draws, **values)
    return recover(idata, model, names, groups=groups, random_seed=seed, progressbar=False)


def assert_moments(draws, mean, covariance):
    """Means and covariances of draws, shape (draws, q), within their Monte-Carlo errors."""
    n, centred = len(draws), draws - mean
    z_mean = centred.mean(axis=0) / np.sqrt(np.diag(covariance) / n)
    products = centred[:, :, None] * centred[:, None, :]
    z_covariance = (products.mean(axis=0) - covariance) / (products.std(axis=0) / np.sqrt(n))
    assert np.abs(z_mean).max() < Z_BOUND
    assert np.abs(z_covariance).max() < Z_BOUND


def assert_law(draws, distribution):
    """Draws, shape (draws,), against a distribution function."""
    ordered = distribution(np.sort(draws))
    n = len(draws)
    distance = max(
        (ordered - np.arange(n) / n).max(),
        (np.arange(1, n + 1) / n - ordered).max(),
    )
    assert distance * np.sqrt(n) < KOLMOGOROV_BOUND


def numerical_distribution(log_density, low, high):
    """Distribution function from a fine grid."""
    grid = np.linspace(low, high, 20_001)
    values = log_density(grid)
    sums = np.cumsum(np.exp(values - values.max()))
    return lambda u: np.interp(u, grid, sums / sums[-1])


# --- Gaussian -----------------------------------------------------------------------------------


@pytest.mark.parametrize("centred", [True, False])
def test_linear_mixed_model_has_its_gaussian_law(centred, rng):
    x = rng.normal(size=N_RECORDS)
    y = rng.normal(size=N_RECORDS) + 2 * x
    covariance = np.array([[1.0, 0.4], [0.4, 0.5]])
    root = np.linalg.cholesky(covariance)
    with pm.Model() as model:
        mean = pm.Normal("mean", shape=2)
        if centred:
            effect = pm.MvNormal("effect", mean, covariance, shape=(N_GROUPS * COPIES, 2))
        else:
            z = pm.Normal("z", shape=(N_GROUPS * COPIES, 2))
            effect = pm.Deterministic("effect", mean + z @ root.T)
        of_record = effect[CODES_OF_COPIES]
        pm.Normal("y", of_record[:, 0] + of_record[:, 1] * copies(x), 0.7, observed=copies(y))
    at = np.array([0.3, 1.5])
    draws = draws_of_copies(recovered(model, draws=DRAWS // COPIES, mean=at), "effect")
    for group in range(N_GROUPS):
        records = group == CODES
        design = np.column_stack([np.ones(records.sum()), x[records]])
        precision = np.linalg.inv(covariance) + design.T @ design / 0.49
        conditional = np.linalg.inv(precision)
        weighted = np.linalg.solve(covariance, at) + design.T @ y[records] / 0.49
        assert_moments(draws[:, group], conditional @ weighted, conditional)


# --- One quantity -------------------------------------------------------------------------------


@pytest.mark.parametrize("sd", [0.5, 6.0])
@pytest.mark.parametrize("centred", [True, False])
def test_logistic_intercepts_have_the_law_of_numerical_integration(centred, sd, rng):
    x = rng.normal(size=N_RECORDS)
    y = rng.random(N_RECORDS) < 0.5
    y[CODES == 2] = True  # The law of this group is skewed, with a heavy right side.
    y[CODES == 4] = False
    with pm.Model() as model:
        slope, scale = pm.Normal("slope"), pm.HalfNormal("scale", 5)
        if centred:
            effect = pm.Normal("effect", 0.2, scale, shape=N_GROUPS * COPIES)
        else:
            z = pm.Normal("z", shape=N_GROUPS * COPIES)
            effect = pm.Deterministic("effect", 0.2 + scale * z)
        logit_p = slope * copies(x) + effect[CODES_OF_COPIES]
        pm.Bernoulli("y", logit_p=logit_p, observed=copies(y))
    idata = recovered(model, draws=DRAWS // COPIES, slope=0.8, scale=sd)
    draws = draws_of_copies(idata, "effect")
    for group in range(N_GROUPS):
        records = group == CODES
        sign = np.where(y[records], 1, -1)

        def log_density(u, records=records, sign=sign):
            eta = 0.8 * x[records][:, None] + u
            return special.log_expit(sign[:, None] * eta).sum(axis=0) - 0.5 * ((u - 0.2) / sd) ** 2

        assert_law(draws[:, group], numerical_distribution(log_density, -9 * sd, 9 * sd))


@pytest.mark.slow
def test_gamma_frailty_has_its_gamma_law(rng):
    exposure = rng.uniform(0.1, 2, size=N_RECORDS)
    y = rng.poisson(exposure)
    y[CODES == 3] = 0
    labels = [f"{letter}{copy}" for copy in range(COPIES) for letter in "abcdef"]
    with pm.Model(coords={"patient": labels}) as model:
        variance, rate = pm.HalfNormal("variance"), pm.HalfNormal("rate")
        frailty = pm.Gamma("frailty", 1 / variance, 1 / variance, dims="patient")
        pm.Poisson("y", rate * copies(exposure) * frailty[CODES_OF_COPIES], observed=copies(y))
    idata = recovered(model, draws=DRAWS // COPIES, variance=4.0, rate=1.3)
    draws = draws_of_copies(idata, "frailty")
    assert list(idata.posterior["patient"].to_numpy()) == labels
    for group in range(N_GROUPS):
        records = group == CODES
        law = stats.gamma(0.25 + y[records].sum(), scale=1 / (0.25 + 1.3 * exposure[records].sum()))
        assert_law(draws[:, group], law.cdf)


@pytest.mark.parametrize(
    ("prior", "log_prior"),
    [
        (
            lambda name: pm.StudentT(name, nu=2, mu=0, sigma=1, shape=N_GROUPS * COPIES),
            stats.t(2).logpdf,
        ),
        (
            lambda name: pm.Laplace(name, 0, 1, shape=N_GROUPS * COPIES),
            stats.laplace.logpdf,
        ),
        pytest.param(
            lambda name: pm.NormalMixture(
                name, [0.5, 0.5], mu=[-4, 4], sigma=[0.4, 0.4], shape=N_GROUPS * COPIES
            ),
            lambda u: np.logaddexp(stats.norm(-4, 0.4).logpdf(u), stats.norm(4, 0.4).logpdf(u)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["Student-t", "Laplace", "mixture"],
)
def test_other_priors_have_the_law_of_numerical_integration(prior, log_prior, rng):
    y = rng.normal(size=N_RECORDS)
    with pm.Model() as model:
        mean = pm.Normal("mean")
        effect = prior("effect")
        pm.Normal("y", mean + effect[CODES_OF_COPIES], 6.0, observed=copies(y))
    draws = draws_of_copies(recovered(model, draws=1000 // COPIES, mean=0.5), "effect")
    for group in range(N_GROUPS):
        of_group = y[group == CODES]

        def log_density(u, of_group=of_group):
            return log_prior(u) + stats.norm(0.5 + u, 6).logpdf(of_group[:, None]).sum(axis=0)

        assert_law(draws[:, group], numerical_distribution(log_density, -30, 30))


# --- Several quantities -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("centred", [pytest.param(True, marks=pytest.mark.slow), False])
def test_logistic_slopes_have_the_moments_of_numerical_integration(centred, rng):
    x = rng.normal(size=N_RECORDS)
    y = rng.random(N_RECORDS) < 0.5
    y[CODES == 3] = True
    with pm.Model() as model:
        packed, _, _ = pm.LKJCholeskyCov("cov", n=2, eta=2, sd_dist=pm.HalfNormal.dist(2))
        if centred:
            effect = pm.MvNormal("effect", np.zeros(2), chol=packed, shape=(N_GROUPS * COPIES, 2))
        else:
            z = pm.Normal("z", shape=(N_GROUPS * COPIES, 2))
            effect = pm.Deterministic("effect", z @ packed.T)
        of_record = effect[CODES_OF_COPIES]
        logit_p = of_record[:, 0] + of_record[:, 1] * copies(x)
        pm.Bernoulli("y", logit_p=logit_p, observed=copies(y))
    root = np.array([[2.0, 0.0], [0.5, 1.0]])
    idata = recovered(model, draws=10_000 // COPIES, cov=[2.0, 0.5, 1.0])
    draws = draws_of_copies(idata, "effect")
    # Numerical integration over the standardised effects.
    axis = np.linspace(-7, 7, 281)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    effects = grid @ root.T
    for group in range(N_GROUPS):
        records = group == CODES
        sign = np.where(y[records], 1, -1)
        eta = effects[:, :1] + effects[:, 1:] * x[records]
        values = special.log_expit(sign * eta).sum(axis=1) - 0.5 * (grid**2).sum(axis=1)
        weights = special.softmax(values)
        mean = weights @ effects
        covariance = (weights * (effects - mean).T) @ (effects - mean)
        assert_moments(draws[:, group], mean, covariance)
        for column in range(2):
            # A third moment, at the scale of the standard deviation.
            scaled = (draws[:, group, column] - mean[column]) / np.sqrt(covariance[column, column])
            cubes = scaled**3
            exact = weights @ ((effects[:, column] - mean[column]) ** 3)
            exact /= covariance[column, column] ** 1.5
            assert abs(cubes.mean() - exact) < Z_BOUND * cubes.std() / np.sqrt(len(cubes))
    fractions = idata["recover_stats"]["effective_fraction"]
    assert fractions.shape == (N_GROUPS * COPIES,)
    assert (fractions > 0.3).all()
    assert (fractions <= 1).all()


def test_groups_whose_weights_vary_much_are_told(caplog, monkeypatch, rng):
    module = importlib.import_module("pymc_sgmcmc.marginal.recover")
    monkeypatch.setattr(module, "SMALLEST_FRACTION", 0.8)
    y = rng.normal(size=N_RECORDS)
    with pm.Model() as model:
        mean = pm.Normal("mean")
        log_scale = pm.Normal("log_scale", 0, 1, shape=N_GROUPS)
        effect = pm.Normal("effect", 0, pm.math.exp(log_scale), shape=N_GROUPS)
        pm.Normal("y", mean + effect[CODES], 5.0, observed=y)
    with caplog.at_level(logging.WARNING, logger="pymc.sgmcmc"):
        idata = recovered(model, draws=20, mean=0.0)
    poor = int((idata["recover_stats"]["effective_fraction"] < 0.8).sum())
    assert poor
    assert f"may be wrong in {poor} of {N_GROUPS} groups" in caplog.text


# --- The trace ----------------------------------------------------------------------------------


def patients_model(rng):
    x = rng.normal(size=N_RECORDS)
    y = rng.random(N_RECORDS) < 0.5
    coords = {"patient": list("abcdef"), "predictor": ["one", "two"]}
    with pm.Model(coords=coords) as model:
        beta = pm.Normal("beta", dims="predictor")
        sd = pm.HalfNormal("sd")
        z = pm.Normal("z", dims="patient")
        effect = pm.Deterministic("effect", sd * z, dims="patient")
        pm.Deterministic("total", effect.sum())
        pm.Deterministic("twice", 2 * sd)
        pm.Bernoulli("y", logit_p=beta[0] + beta[1] * x + effect[CODES], observed=y)
    return model


VALUES = {"beta": [0.2, -0.3], "sd": 1.4}


@pytest.mark.slow
def test_some_groups_have_the_law_that_they_have_among_all(rng):
    model = patients_model(rng)
    every = recovered(model, **VALUES)
    chosen = recovered(model, groups=["e", "c"], seed=2, **VALUES)
    assert list(chosen.posterior["patient"].to_numpy()) == ["e", "c"]
    assert "effect" not in chosen.posterior
    for label in ("e", "c"):
        law = stats.ks_2samp(
            every.posterior["z"].sel(patient=label).to_numpy().ravel(),
            chosen.posterior["z"].sel(patient=label).to_numpy().ravel(),
        )
        assert law.pvalue > 1e-6
    by_number = recovered(model, groups=[4, 2], seed=2, **VALUES)
    xr.testing.assert_identical(by_number.posterior.to_dataset(), chosen.posterior.to_dataset())


def test_a_seed_gives_the_same_draws_and_the_trace_is_not_changed(rng):
    model = patients_model(rng)
    idata = trace(model, 10, **VALUES)
    before = idata.copy(deep=True)
    first, second, other = (
        recover(idata, model, random_seed=seed, progressbar=False) for seed in (1, 1, 2)
    )
    xr.testing.assert_identical(idata, before)
    xr.testing.assert_identical(first, second)
    assert not np.isin(first.posterior["z"], other.posterior["z"]).any()
    assert set(first.posterior) == {"beta", "sd", "z", "effect", "total"}
    np.testing.assert_allclose(first.posterior["effect"], 1.4 * first.posterior["z"])
    assert first.posterior["effect"].dims == ("chain", "draw", "patient")
    np.testing.assert_allclose(first.posterior["total"], first.posterior["effect"].sum("patient"))


def test_draws_vary_with_their_parameters(rng):
    model = patients_model(rng)
    idata = trace(model, 200, **VALUES)
    sd = idata.posterior["sd"].copy(data=np.where(np.arange(100) % 2, 0.01, 3.0) * np.ones((2, 1)))
    idata["posterior"] = DataTree(idata.posterior.to_dataset().assign(sd=sd))
    effect = recover(idata, model, random_seed=1, progressbar=False).posterior["effect"].to_numpy()
    assert effect[:, 1::2].std() < 0.02
    assert effect[:, ::2].std() > 1


@pytest.mark.slow
def test_several_local_variables_and_axes_that_are_not_the_first(rng):
    y = rng.normal(size=(2, N_RECORDS))
    with pm.Model() as model:
        mean = pm.Normal("mean")
        effect = pm.Normal("effect", mean, 1.0, shape=(2, N_GROUPS))
        scale = pm.Gamma("scale", 3.0, 2.0, shape=N_GROUPS)
        pm.Normal("y", effect[:, CODES], scale[CODES], observed=y)
    idata = recovered(model, names=["effect", "scale"], draws=2000, mean=0.2)
    assert idata.posterior["effect"].dims == ("chain", "draw", "effect_dim_0", "effect_dim_1")
    assert idata.posterior["effect"].shape == (2, 1000, 2, N_GROUPS)
    assert (idata.posterior["scale"] > 0).all()
    # Given the scales the effects are Gaussian.
    effects, scales = draws_of(idata, "effect"), draws_of(idata, "scale")[:, None]
    precision = 1 + SIZES / scales**2
    sums = np.array([np.bincount(CODES, of_axis) for of_axis in y])
    z = (effects - (0.2 + sums / scales**2) / precision) * np.sqrt(precision)
    assert np.abs(z.mean(axis=0)).max() < Z_BOUND / np.sqrt(2000)
    assert np.abs((z**2).mean(axis=0) - 1).max() < Z_BOUND * np.sqrt(2 / 2000)


@pytest.mark.slow
def test_predictions_and_leave_one_group_out_follow(rng):
    model = patients_model(rng)
    groups = marginalize(model, "z")
    idata = trace(groups, 50, **VALUES)
    beta = idata.posterior["beta"] + 0.3 * rng.normal(size=(2, 25, 2))
    idata["posterior"] = DataTree(idata.posterior.to_dataset().assign(beta=beta))
    idata = recover(idata, model, random_seed=1, progressbar=False)
    with model:
        predictions = pm.sample_posterior_predictive(
            idata, var_names=["y"], random_seed=1, progressbar=False
        )
    assert predictions["posterior_predictive"]["y"].shape == (2, 25, N_RECORDS)
    with groups:
        pm.compute_log_likelihood(idata, progressbar=False)
    assert idata["log_likelihood"]["y"].dims == ("chain", "draw", "patient")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Few draws give large shape parameters.
        loo = az.loo(idata)
    assert loo.n_data_points == N_GROUPS


# --- Bad input ----------------------------------------------------------------------------------


def without_posterior(model):
    return DataTree.from_dict({"prior": trace(model, 4, **VALUES)["posterior"].to_dataset()})


def reordered(model):
    idata = trace(model, 4, **VALUES)
    return DataTree.from_dict(
        {"posterior": idata["posterior"].to_dataset().assign_coords(predictor=["two", "one"])}
    )


def renamed(model):
    dataset = trace(model, 4, **VALUES)["posterior"].to_dataset()
    return DataTree.from_dict({"posterior": dataset.rename(predictor="column")})


@pytest.mark.parametrize(
    ("make", "settings", "error", "message"),
    [
        (lambda m: {"z": 1}, {}, TypeError, "`idata` should be a DataTree, but got dict"),
        (without_posterior, {}, ValueError, "should have a `posterior` group, but has `prior`"),
        (lambda m: trace(m, 4, other=1.0), {}, ValueError, "none of the free variables"),
        (
            lambda m: trace(m, 4, sd=1.0),
            {"names": "z"},
            ValueError,
            "lacks `beta`, which is not among the local variables `z`",
        ),
        (lambda m: trace(m, 4, sd=1.0), {}, ModelError, "beta"),
        (
            lambda m: DataTree.from_dict(
                {"posterior": trace(m, 4, **VALUES)["posterior"].to_dataset().isel(predictor=[0])}
            ),
            {},
            ValueError,
            r"has shape \(1,\) a draw for `beta`, not \(2,\)",
        ),
        (reordered, {}, ValueError, "has other labels of `predictor`"),
        (renamed, {}, ValueError, "has dimension `column` for `beta`, not `predictor`"),
        (
            lambda m: trace(m, 4, **VALUES, z=np.zeros(N_GROUPS)),
            {},
            ValueError,
            "nothing to recover",
        ),
        (
            lambda m: trace(m, 4, **VALUES, z=np.zeros(N_GROUPS)),
            {"names": "z"},
            ValueError,
            "has draws of `z` already",
        ),
        (lambda m: trace(m, 4, **VALUES), {"names": "u"}, ModelError, "but got `u`"),
        (lambda m: trace(m, 4, beta=[1, 1]), {"names": "sd"}, ModelError, "`z`|`sd`"),
        (lambda m: trace(m, 4, beta=[0, np.nan], sd=1), {}, ValueError, "`beta` should be finite"),
        (lambda m: trace(m, 4, **VALUES), {"groups": ["a", "x"]}, ValueError, "but got 'x'"),
        (lambda m: trace(m, 4, **VALUES), {"groups": [6]}, ValueError, "numbers below 6"),
        (lambda m: trace(m, 4, **VALUES), {"groups": [-1]}, ValueError, "but got -1"),
        (lambda m: trace(m, 4, **VALUES), {"groups": []}, ValueError, "at least one group"),
        (lambda m: trace(m, 4, **VALUES), {"groups": {"a"}}, ValueError, "should be labels"),
        (lambda m: trace(m, 4, **VALUES), {"groups": ["a", "a"]}, ValueError, "each once"),
    ],
)
def test_bad_input_is_refused(make, settings, error, message, rng):
    model = patients_model(rng)
    with pytest.raises(error, match=message):
        recover(make(model), model, progressbar=False, **settings)


def test_labels_that_are_numbers_are_not_taken_for_places(rng):
    y = rng.normal(size=N_GROUPS)
    with pm.Model(coords={"patient": [10, 11, 12, 13, 14, 15]}) as model:
        mean = pm.Normal("mean")
        pm.Normal("y", pm.Normal("z", mean, dims="patient"), observed=y)
    chosen = recovered(model, groups=[12, 10], draws=4, mean=0.0)
    assert list(chosen.posterior["patient"].to_numpy()) == [12, 10]
    with pytest.raises(ValueError, match="should be labels of `patient`"):
        recovered(model, groups=[0], draws=4, mean=0.0)


def test_a_log_density_that_is_not_finite_is_told(rng):
    model = patients_model(rng)
    with pytest.raises(ValueError, match=r"not for group \d at draw 0 of chain 0"):
        recovered(model, draws=4, beta=[1e308, 1e308], sd=1e308)


def test_another_model_class_is_refused(rng):
    idata = trace(patients_model(rng), 4, **VALUES)
    with pytest.raises(TypeError, match="`model` should be a PyMC model, but got None"):
        recover(idata, None)


@pytest.mark.parametrize("family", ["normal", "binary"])
def test_effects_without_records_are_drawn_from_their_prior(family):
    n_groups = 400
    with pm.Model() as model:
        mean, sd = pm.Normal("mean"), pm.HalfNormal("sd")
        z = pm.Normal("z", mean, sd, shape=n_groups)
        if family == "normal":
            pm.Normal("y", z[CODES], 1.0, observed=CODES / 2)
        else:
            pm.Bernoulli("y", logit_p=z[CODES], observed=CODES % 2)
    drawn = draws_of(recovered(model, draws=50, mean=0.7, sd=1.3), "z")[:, N_GROUPS:]
    assert_law(drawn.ravel(), stats.norm(0.7, 1.3).cdf)


def test_cells_have_both_dimensions():
    rows, columns = CODES % 2, CODES % 3
    coords = {"county": ["a", "b"], "year": [1, 2, 3]}
    with pm.Model(coords=coords) as model:
        sd = pm.HalfNormal("sd")
        z = pm.Normal("z", [0.0, 10.0, 20.0], sd, dims=("county", "year"))
        pm.Normal("y", z[rows, columns], 1.0, observed=CODES)
    idata = recovered(model, sd=0.01, draws=20)
    assert idata["posterior"]["z"].dims == ("chain", "draw", "county", "year")
    np.testing.assert_allclose(
        idata["posterior"]["z"].sel(county="b").mean(("chain", "draw")), [0, 10, 20], atol=0.05
    )
    with pytest.raises(ValueError, match="`groups` should be left out"):
        recovered(model, sd=0.01, draws=20, groups=[1])
