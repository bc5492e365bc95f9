"""What is no local variable is refused before sampling, with what to do."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import ModelError, consensus, fit_marginal
from pymc_sgmcmc.marginal import marginalize
from pymc_sgmcmc.marginal.structure import find_structure
from tests.marginal.models import (
    N_GROUPS,
    gamma_frailty,
    linear_intercepts,
    logistic_intercepts,
    poisson_with_data_and_groups_predictor,
    two_outcomes,
)

GROUP = np.repeat(np.arange(6), 5)


def simple(effect, group=GROUP, n_records=30):
    """Model whose local variable comes from a function of the model's context."""
    with pm.Model() as model:
        z = effect()
        pm.Poisson("y", pm.math.exp(z[group]), observed=np.arange(n_records) % 3)
    return model


def normal(**settings):
    return lambda: pm.Normal("z", **{"shape": 6} | settings)


def test_structure():
    rng = np.random.default_rng(1)
    structure = find_structure(*two_outcomes(rng))
    assert structure.observed == ("success", "score", "visits")
    assert structure.n_groups == N_GROUPS
    assert set(structure.parameters) == {"sd", "slope"}
    assert find_structure(*logistic_intercepts(rng)).dim == "patient"


def test_model_of_groups():
    """What depends on local variables leaves the model, and the rest stays."""
    rng = np.random.default_rng(1)
    model, names = poisson_with_data_and_groups_predictor(rng)
    with model:
        pm.Normal("other", model["sd"], observed=rng.normal(size=7))
        pm.Deterministic("variance", model["sd"] ** 2)
    groups = marginalize(model, names)
    assert {v.name for v in groups.free_RVs} == {"gamma", "sd"}
    assert {v.name for v in groups.observed_RVs} == {"y", "other"}
    assert {v.name for v in groups.deterministics} == {"variance"}
    assert not groups.data_vars  # They served the integrated records only.
    assert len(model.free_RVs) == 3  # The given model is as it was.
    model, names = logistic_intercepts(rng)
    groups = marginalize(model, names)
    assert groups.named_vars_to_dims["y"] == ("patient",)
    assert groups.coords["patient"] == model.coords["patient"]


@pytest.mark.parametrize(
    ("names", "wrong"),
    [("w", "`w`"), ([], "none"), (["z", "w"], "`w`"), ("y", "`y`")],
)
def test_names(names, wrong):
    with pytest.raises(ModelError, match=f"free variables of the model, `z`, but got {wrong}"):
        marginalize(simple(normal()), names)


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.append(GROUP[:-1], 6), "between 0 and 5, but record 29 has 6"),
        (np.append(-1, GROUP[1:]), "between 0 and 5, but record 0 has -1"),
        (np.stack([GROUP, GROUP], axis=1), "index array has shape"),
    ],
)
def test_codes(codes, message):
    with pm.Model() as model:
        z = pm.Normal("z", shape=6)
        rate = pm.math.exp(z[codes])
        rate = rate if codes.ndim == 1 else rate.sum(axis=1)
        pm.Poisson("y", rate, observed=np.arange(30) % 3)
    with pytest.raises(ModelError, match=message):
        marginalize(model, "z")


def test_crossed_effects():
    second = np.tile(np.arange(5), 6)
    with pm.Model() as model:
        z, w = pm.Normal("z", shape=6), pm.Normal("w", shape=5)
        pm.Poisson("y", pm.math.exp(z[GROUP] + w[second]), observed=np.arange(30) % 3)
    with pytest.raises(ModelError, match=r"`z` 6.*`marginalize\(model, \[.z.\]\)` is possible"):
        marginalize(model, ["z", "w"])
    groups = marginalize(model, "z")
    assert {v.name for v in groups.free_RVs} == {"w"}


def test_crossed_effects_with_equal_levels():
    second = np.tile(np.arange(6), 5)
    with pm.Model() as model:
        z, w = pm.Normal("z", shape=6), pm.Normal("w", shape=6)
        pm.Poisson("y", pm.math.exp(z[GROUP] + w[second]), observed=np.arange(30) % 3)
    with pytest.raises(ModelError, match="two different index arrays"):
        marginalize(model, ["z", "w"])


def test_a_record_of_two_groups():
    with pm.Model() as model:
        z = pm.Normal("z", shape=6)
        difference = z[GROUP] - z[GROUP[::-1].copy()]
        pm.Bernoulli("y", logit_p=difference, observed=np.arange(30) % 2)
    with pytest.raises(ModelError, match="two different index arrays"):
        marginalize(model, "z")


@pytest.mark.parametrize(
    "effect",
    [
        lambda: pm.GaussianRandomWalk("z", sigma=1, init_dist=pm.Normal.dist(), steps=5),
        lambda: pm.ZeroSumNormal("z", shape=6),
        lambda: pm.MvNormal("z", np.zeros(6), 0.5 * np.eye(6) + 0.5),
        lambda: pm.Dirichlet("z", np.ones(6)),
        lambda: pm.Normal("x", shape=6).cumsum(),
        lambda: pm.CAR("z", np.zeros(6), np.ones((6, 6)) - np.eye(6), 0.5, 1.0),
    ],
    ids=["random walk", "zero sum", "multivariate", "simplex", "cumulative sum", "spatial"],
)
def test_groups_that_depend_on_each_other(effect):
    model = simple(effect)
    with pytest.raises(ModelError, match=r"not independent|depend on each other"):
        marginalize(model, model.free_RVs[0].name)


def test_discrete_local_variable():
    model = simple(lambda: pm.Bernoulli("z", 0.5, shape=6) * 1.0)
    with pytest.raises(ModelError, match=r"`z` is discrete.*pymc_extras"):
        marginalize(model, "z")


def test_global_variable():
    with pm.Model() as model:
        mean = pm.Normal("mean")
        z = pm.Normal("z", mean, shape=6)
        pm.Poisson("y", pm.math.exp(z[GROUP]), observed=np.arange(30) % 3)
    for names in ("mean", ["mean", "z"]):
        with pytest.raises(ModelError, match="`mean` is a single number"):
            marginalize(model, names)


def test_potential():
    model = simple(normal())
    with model:
        pm.Potential("penalty", -(model["z"] ** 2).sum())
    with pytest.raises(ModelError, match="potential `penalty` depends on local variables"):
        marginalize(model, "z")


def test_no_records():
    with pm.Model() as model:
        pm.Normal("z", shape=6)
        pm.Normal("y", observed=np.arange(30.0))
    with pytest.raises(ModelError, match="No observed variable depends on `z`"):
        marginalize(model, "z")


def test_minibatch():
    y, group = pm.Minibatch(np.arange(30.0), GROUP, batch_size=10)
    with pm.Model() as model:
        z = pm.Normal("z", shape=6)
        pm.Normal("y", z[group], observed=y, total_size=30)
    with pytest.raises(ModelError, match=r"full data, but has `pm.Minibatch`"):
        marginalize(model, "z")


def test_codes_that_depend_on_parameters():
    with pm.Model() as model:
        shift = pm.Poisson("shift", 1)
        z = pm.Normal("z", shape=6)
        pm.Poisson("y", pm.math.exp(z[(GROUP + shift) % 6]), observed=np.arange(30) % 3)
    with pytest.raises(ModelError, match="array of integers"):
        marginalize(model, "z")


def test_other_lengths():
    with pm.Model() as model:
        z, w = pm.Normal("z", shape=6), pm.Normal("w", shape=4)
        pm.Poisson("y", pm.math.exp(z[GROUP] + w.sum()), observed=np.arange(30) % 3)
    with pytest.raises(ModelError, match=r"one entry for each of the 6 groups|same groups"):
        marginalize(model, ["z", "w"])


def test_four_quantities():
    X = np.random.default_rng(1).normal(size=(30, 4))
    with pm.Model() as model:
        z = pm.Normal("z", shape=(6, 4))
        pm.Poisson("y", pm.math.exp((z[GROUP] * X).sum(axis=1)), observed=np.arange(30) % 3)
    with pytest.raises(
        ModelError, match=r"at most 3. Use `SGLDCV\(gradient=LocalSampling\(\[.z.\]\)\)` or"
    ):
        marginalize(model, "z")
    marginalize(model, "z", method="laplace")


def test_settings():
    rng = np.random.default_rng(1)
    model, names = gamma_frailty(rng)
    with pytest.raises(ModelError, match="not quadratic"):
        marginalize(model, names, method="exact")
    with pytest.raises(ValueError, match="`method` should be one of 'exact', 'laplace', 'quad"):
        marginalize(model, names, method="aghq")
    with pytest.raises(ValueError, match='`points` is for quadrature, but `method` is "laplace"'):
        marginalize(model, names, method="laplace", points=3)
    one_node, laplace = (
        marginalize(model, names, **settings)
        for settings in ({"method": "quadrature", "points": 1}, {"method": "laplace"})
    )
    log_densities = [
        groups.compile_logp()(groups.initial_point()) for groups in (one_node, laplace)
    ]
    assert log_densities[0] == log_densities[1]
    with pytest.raises(ValueError, match="`points` should be a whole number"):
        marginalize(model, names, points=0)
    with pytest.raises(ValueError, match="`points` is for quadrature"):
        marginalize(*linear_intercepts(rng), method="exact", points=3)


def test_predictions_come_from_the_original_model():
    groups = marginalize(*logistic_intercepts(np.random.default_rng(1)))
    with groups, pytest.raises(NotImplementedError, match="Call `recover`"):
        pm.sample_prior_predictive(2)


def test_missing_values():
    missing = np.where(np.arange(30) == 3, np.nan, 1.0)
    with pm.Model() as model:
        z = pm.Normal("z", shape=6)
        with pytest.warns(pm.exceptions.ImputationWarning):
            pm.Normal("y", z[GROUP], observed=missing)
    with pytest.raises(ModelError, match=r"`y_unobserved` are missing outcomes.*Drop these"):
        marginalize(model, "z")
    with pm.Model() as model:
        z = pm.Normal("z", shape=6)
        with pytest.warns(pm.exceptions.ImputationWarning):
            x = pm.Normal("x", observed=missing)
        pm.Normal("y", z[GROUP] + x, observed=np.ones(30))
    with pytest.raises(ModelError, match=r"`x_unobserved` are missing values of single records"):
        marginalize(model, "z")


def test_a_name_that_is_taken():
    model = simple(normal())
    with model:
        pm.Normal("y_x")
        pm.Normal("x", model["z"], observed=np.arange(6.0))
    groups = marginalize(model, "z")
    assert {variable.name for variable in groups.basic_RVs} == {"y_x", "y_x_"}


def test_total_size():
    with pm.Model() as model:
        z = pm.Normal("z", shape=6)
        pm.Normal("y", z[GROUP], observed=np.arange(30.0), total_size=60)
    with pytest.raises(ModelError, match="full data, but `y` has another `total_size`"):
        marginalize(model, "z")


def test_types():
    model = simple(normal())
    with pytest.raises(TypeError, match=r"`names` should be names of local variables.*NoneType"):
        marginalize(model, None)
    with pytest.raises(TypeError, match="`model` should be a PyMC model, but got 'z'"):
        marginalize("z", model)
    with pytest.raises(TypeError, match="`model` should be a PyMC model, but got None"):
        marginalize(None, "z")
    for seed in ("a", 1.5):
        with pytest.raises(TypeError, match="`random_seed` should be a seed"):
            fit_marginal(model, "z", random_seed=seed)
    for function in (fit_marginal, consensus):
        with pytest.raises(TypeError, match="`model` should be a PyMC model, but got None"):
            function(None, 2)
    for function in (fit_marginal, marginalize):
        with pytest.raises(ValueError, match="`points` should be a whole number, from 1 to 354"):
            function(model, "z", points=10**6)
    with pytest.raises(TypeError, match="`reml` should be True or False"):
        fit_marginal(model, "z", reml="yes")
