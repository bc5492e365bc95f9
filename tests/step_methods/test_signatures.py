"""Signatures and docstrings of the step methods, as help, editors and the API page show them."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pymc as pm
import pytest

from pymc_sgmcmc import step_methods
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.contract import StepMethod
from pymc_sgmcmc.step_methods.settings import Settings
from tests.support.models import logistic_model

STEP_METHODS = [
    one
    for one in (getattr(step_methods, name) for name in step_methods.__all__)
    if issubclass(one, StochasticGradientStep)
]
ALL_STEP_METHODS = [
    one
    for one in (getattr(step_methods, name) for name in step_methods.__all__)
    if issubclass(one, StepMethod)
]
"""These include step methods without gradients."""

COMMON = {field.name for field in fields(Settings)}
WITH_CONTROL_VARIATES = (
    step_methods.SGHMC,
    step_methods.SGNHT,
    step_methods.PSGLD,
    step_methods.HAMCMC,
)

every_step_method = pytest.mark.parametrize("cls", STEP_METHODS, ids=lambda cls: cls.__name__)
any_step_method = pytest.mark.parametrize("cls", ALL_STEP_METHODS, ids=lambda cls: cls.__name__)


@every_step_method
def test_all_arguments_are_in_the_signature(cls):
    parameters = inspect.signature(cls).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    assert COMMON - set(parameters) == set(cls._refused)
    assert next(iter(parameters)) == "vars"


@every_step_method
def test_common_arguments_are_the_same_everywhere(cls):
    ours = inspect.signature(cls).parameters
    theirs = inspect.signature(step_methods.SGLD).parameters
    for name in COMMON - set(cls._refused):
        expected = theirs[name]
        if name == "gradient" and cls in WITH_CONTROL_VARIATES:
            expected = expected.replace(default="cv")
        elif name == "gradient" and cls is step_methods.SGLDCV:
            expected = expected.replace(default="second_order")
        assert ours[name] == expected


@any_step_method
def test_all_arguments_are_in_the_docstring(cls):
    section = re.search(r"^Parameters\n-+\n(.*?)\n\n\w+\n-+\n", cls.__doc__, re.S | re.M)[1]
    documented = re.findall(r"^(\w+) :", section, re.M)
    assert documented == list(inspect.signature(cls).parameters)


@any_step_method
@pytest.mark.parametrize("as_list", [False, True])
def test_a_class_in_place_of_a_step_method(cls, as_list):
    with logistic_model(), pytest.raises(ValueError, match=rf"write `{cls.__name__}\(\)`"):
        pm.sample(step=[cls] if as_list else cls)


@any_step_method
def test_arguments_that_it_has_not(cls):
    model = logistic_model()
    with pytest.raises(TypeError, match=f"`{cls.__name__}` takes no argument `stepsize`"):
        cls(model=model, stepsize=0.1)
    for name in cls._refused:
        with pytest.raises(TypeError, match=f"`{cls.__name__}` .* no `{name}`"):
            cls(model=model, **{name: 1})


def test_signature_of_a_subclass():
    """Those of the class above, in the place of ``**settings``, and no others."""

    class Tempered(step_methods.SGLDCV):
        def __init__(self, vars=None, *, temperature=1.0, **settings):
            super().__init__(vars, **settings)

    class Passing(step_methods.SGLDCV):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    above = list(inspect.signature(step_methods.SGLDCV).parameters)
    ours = inspect.signature(Tempered).parameters
    assert list(ours) == ["vars", "temperature", *above[1:]]
    assert ours["gradient"].default == "second_order"
    assert list(inspect.signature(Passing).parameters) == ["args", "kwargs"]
    model = logistic_model()
    with pytest.raises(TypeError, match="`Tempered` takes no argument `temperatur`"):
        Tempered(model=model, temperatur=2.0)
