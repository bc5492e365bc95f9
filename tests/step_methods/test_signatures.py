"""Signatures and docstrings of the step methods, as help, editors and the API page show them."""

from __future__ import annotations

import inspect
import re

import pymc as pm
import pytest

from pymc_sgmcmc import step_methods
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.contract import StepMethod
from pymc_sgmcmc.step_methods.settings import SIGNATURE
from tests.support.models import logistic_model

ALL_STEP_METHODS = [
    one
    for one in (getattr(step_methods, name) for name in step_methods.__all__)
    if issubclass(one, StepMethod)
]
"""These include step methods without gradients."""

MOST_SETTINGS = 14
"""A step method has at most so many arguments, those of PyMC among them."""

GRADIENTS = dict.fromkeys(("SGHMC", "SGNHT", "PSGLD", "HAMCMC"), "cv")
GRADIENTS |= {"SGLDCV": "second_order"}
"""Defaults of `gradient`, which is "plain" where nothing else is said."""

any_step_method = pytest.mark.parametrize("cls", ALL_STEP_METHODS, ids=lambda cls: cls.__name__)


@any_step_method
def test_all_arguments_are_in_the_signature(cls):
    parameters = inspect.signature(cls).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    assert next(iter(parameters)) == "vars"
    assert len(parameters) <= MOST_SETTINGS


@any_step_method
def test_common_arguments_are_the_same_everywhere(cls):
    for name, parameter in inspect.signature(cls).parameters.items():
        if name in SIGNATURE and issubclass(cls, StochasticGradientStep):
            usual = GRADIENTS.get(cls.__name__, "plain") if name == "gradient" else None
            assert parameter.default == usual


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
    for name in ("stepsize", "blocked", "rng"):
        with pytest.raises(TypeError, match=f"`{cls.__name__}` takes no argument `{name}`"):
            cls(model=model, **{name: 0.1})


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
