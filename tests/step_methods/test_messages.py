"""Messages of step methods: they say what to write, and the same code accepts it."""

from __future__ import annotations

import ast
import pickle
import re
import warnings
from copy import copy
from functools import partial
from pathlib import Path

import numpy as np
import pymc as pm
import pytest

import pymc_sgmcmc
from pymc_sgmcmc import (
    HAMCMC,
    MALA,
    OSGFS,
    PSGLD,
    SAGA,
    SGHMC,
    SGLD,
    SGLDCV,
    SGNHT,
    SVRG,
    ULA,
    BatchSizeWarning,
    CenterWarning,
    FirstOrder,
    LocalSampling,
    ModelError,
    Pairs,
    Posterior,
    ResampledMomentum,
    marginalize,
)
from pymc_sgmcmc.gradient_estimators import WeightedGradient
from tests.support.models import logistic_model, two_variable_model

NUMBERS = {"step_size": 0.05, "batch_size": 8, "initial_scale": 1.0, "regularization": 0.1}
"""Values in place of the dots of a call in a message."""

PACKAGE = Path(pymc_sgmcmc.__file__).parent


def positive_model() -> pm.Model:
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 10, default_transform=None)
        pm.Normal("y", scale, 1.0, observed=np.full(8, 0.1))
    return model


def call_of(message: str) -> str:
    """The call that a message names, with values in place of its dots."""
    call = re.search(r"`([A-Z]\w+\(.*\.\.\..*?\))`", message)[1]
    for name, value in NUMBERS.items():
        call = call.replace(f"{name}=...", f"{name}={value}")
    return call.replace("preconditioner=...", "preconditioner=[0.1]").replace("...", "0.1")


@pytest.mark.parametrize("sampler", [SGLD, SGLDCV, PSGLD, HAMCMC, ULA, SGHMC, OSGFS])
def test_a_call_that_mirrors_a_positive_variable(sampler):
    names = {"SGLD": SGLD, "PSGLD": PSGLD, "HAMCMC": HAMCMC, "ULA": ULA, "Pairs": Pairs}
    with positive_model():
        with pytest.raises(ValueError, match="mirror") as caught:
            sampler()
        step = eval(call_of(str(caught.value)), names)
    assert step.block.dynamics.mirrored is not None
    if sampler.__name__ in names:
        assert type(step) is sampler


def test_no_call_where_a_variable_has_two_bounds():
    with pm.Model():
        pm.Normal("y", pm.Beta("share", 1, 1, default_transform=None), 1, observed=np.zeros(8))
        with pytest.raises(ModelError, match=r"Leave out `default_transform=None`\.$"):
            SGLD()


@pytest.mark.parametrize(
    ("sampler", "argument", "instead"),
    [
        (ULA, "batch_size", "Leave it out, or use `SGLD`, which takes it"),
        (MALA, "gradient", "Leave it out, or use `SGLD`, which takes it"),
        (SGLD, "friction", "Leave it out, or use `SGHMC`, which takes it"),
        (SGLDCV, "batching", r"to the estimator: `gradient=SecondOrder\(batching=...\)`"),
        (SGHMC, "batching", r"to the estimator: `gradient=FirstOrder\(batching=...\)`"),
        (SGHMC, "refresh", r"to the estimator: `gradient=SVRG\(refresh=...\)`"),
        (SGLD, "row_weights", r"`gradient=WeightedGradient\(Posterior\(model\), prob"),
        (SGLD, "init", "mean of an approximation as `center`"),
        (SGLD, "tune_method", "Leave it out, or give a `step_size`"),
        (SGLD, "rng", "Give `random_seed` to `pm.sample`"),
        (SGLD, "blocked", "move together, so leave it out"),
        (SGLD, "draws", "Give it to `pm.sample` or `sample`"),
        (SGLD, "stepsize", "Did you mean `step_size`"),
        (SGLD, "nothing_like_it", "See its docstring"),
    ],
)
def test_arguments_that_a_step_method_has_not(sampler, argument, instead):
    name = f"`{sampler.__name__}` takes no argument `{argument}`"
    with logistic_model(), pytest.raises(TypeError, match=f"{name}.*{instead}"):
        sampler(**{argument: 1})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(LocalSampling, "z", batching="replace"), "`batching`. It takes `names`, "),
        (LocalSampling, r"should have `names`.*Write `LocalSampling\(names=...\)`"),
        (partial(FirstOrder, "replace"), r"'replace' without one.*`FirstOrder\(batching=...\)`"),
        (partial(SVRG, refesh=3), "Did you mean `refresh`"),
    ],
)
def test_arguments_of_estimators(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_arguments_of_step_methods_without_a_name():
    with (
        logistic_model() as model,
        pytest.raises(TypeError, match=r"by name, but got 0\.1 without"),
    ):
        SGLD(model.value_vars, 0.1)


@pytest.mark.parametrize("estimator", [FirstOrder(batching="replace"), SVRG(refresh=3), SAGA()])
def test_copies_of_estimators(estimator):
    assert copy(estimator) == pickle.loads(pickle.dumps(estimator)) == estimator
    local = copy(LocalSampling(["z"], transitions=3))
    assert (local.names, local.transitions) == (["z"], 3)


def test_a_class_in_place_of_an_object():
    with logistic_model():
        with pytest.raises(ValueError, match=r"the class FirstOrder \(write `FirstOrder\(...\)`\)"):
            SGLD(gradient=FirstOrder)
        with pytest.raises(ValueError, match=r"the class ResampledMomentum \(write"):
            SGHMC(integrator=ResampledMomentum)


def test_what_is_no_variable_has_the_name_of_its_type():
    with logistic_model() as model:
        with pytest.raises(ModelError, match="but got `Model`"):
            SGLDCV([model])
        with pytest.raises(ModelError, match="`Model`"):
            marginalize(model, [model])


# --- Advice against noise -------------------------------------------------------------------


def test_remedies_for_noise_are_those_of_the_estimator():
    """Control variates are no advice beside them, nor another estimator beside local variables."""
    with logistic_model() as model:
        noisy = {"step_size": 0.1, "preconditioner": "identity", "batch_size": 5}
        for sampler in (partial(SGHMC, friction=1e-3), SGNHT):
            with pytest.raises(ModelError, match='or `gradient="cv"`'):
                sampler(gradient="plain", **noisy)
        by_hand = {name: noisy[name] for name in ("step_size", "preconditioner")}
        weighted = WeightedGradient(Posterior(model), np.ones(400), 5)
        with pytest.raises(ModelError, match="or a `center` of the `WeightedGradient`"):
            SGHMC(gradient=weighted, noise_estimate=1e6, friction=1e-3, **by_hand)


def test_remedy_of_sampled_local_variables():
    school = np.repeat(np.arange(30), 5)
    y = np.random.default_rng(1).normal(size=150)
    with pm.Model():
        z, mean = pm.Normal("z", shape=30), pm.Normal("mean")
        pm.Normal("y", mean + z[school], 1.0, observed=y)
        with pytest.warns(
            BatchSizeWarning, match="Sampling\\(control_variates=True\\)`.$"
        ) as caught:
            step = SGLDCV(gradient=LocalSampling("z", control_variates=False), bias=0.5)
    assert "cv" not in str(caught[0].message)
    assert "control_variates=True" in step.run_settings.attributes["with_less_noise"]
    with logistic_model():
        assert "with_less_noise" not in SGLDCV(batch_size=20).run_settings.attributes


@pytest.mark.parametrize("sampler", [SGLD, SGLDCV, SGHMC, SGNHT, PSGLD, HAMCMC])
def test_weights_of_rows_need_settings(sampler):
    """The message names all that have to be given, and they are enough."""
    with logistic_model() as model:
        weighted = WeightedGradient(Posterior(model), np.ones(400), 5)
        with pytest.raises(ValueError, match="is not computed") as caught:
            sampler(gradient=weighted)
    assert {"step_size", "preconditioner"} <= set(re.findall(r"`(\w+)`", str(caught.value)))


# --- Warnings -------------------------------------------------------------------------------


def test_warnings_are_at_the_line_of_the_user():
    with logistic_model():
        with pytest.warns(BatchSizeWarning) as noisy:
            SGLD(batch_size=2)
        with pytest.warns(CenterWarning) as far:
            SGLDCV(center=[3.0, 0.0, 0.0])
    for record in (noisy, far):
        assert [Path(each.filename) for each in record] == [Path(__file__)] * len(record)
        (line,) = {each.lineno for each in record}
        assert "SGLD" in Path(__file__).read_text(encoding="utf-8").splitlines()[line - 1]


def test_all_warnings_are_given_by_one_function():
    calls = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
    ]
    assert calls == ["errors.py"]


# --- Text of a step method ------------------------------------------------------------------


def test_text_of_a_step_method_has_its_settings():
    with logistic_model():
        step = SGLDCV(batch_size=20, bias=0.1, gradient=FirstOrder(batching="replace"))
        fixed = SGLD(step_size=0.01, preconditioner="identity", batch_size=400)
    text = repr(step)
    assert text.startswith("SGLDCV([beta], gradient=FirstOrder(batching='replace'), ")
    for part in (f"step_size={step.step_size:.3g}", f"thin={step.thin}", "preconditioner='curv"):
        assert part in text
    assert "bias=0.1" in text
    assert "batch_size=20" in text
    assert "bias=0.05" in repr(step.at_bias(0.05))
    assert "bias" not in repr(fixed)
    assert repr(copy(fixed)) == repr(fixed)
    with two_variable_model() as model, warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchSizeWarning)
        part = SGLD([model["sigma"]], step_size=lambda k: 0.1 / (1 + k), preconditioner=[1e-3])
    assert repr(part).startswith("SGLD([sigma], gradient='plain', preconditioner=[0.001], ")
