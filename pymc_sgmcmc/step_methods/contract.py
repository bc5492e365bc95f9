"""What all step methods of this package have in common, also those without gradients."""

from __future__ import annotations

import reprlib
from abc import ABCMeta
from collections.abc import Iterator
from dataclasses import is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar, get_args, get_type_hints

import pymc
from pymc.step_methods.compound import BlockedStep, Competence

from pymc_sgmcmc.checks import check_call, described
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.position import (
    NOTHING_FREE,
    given_model,
    refuse_dimensions,
    untransformed,
    value_variables,
)
from pymc_sgmcmc.step_methods.documentation import complete_docstring
from pymc_sgmcmc.step_methods.estimators import ESTIMATORS
from pymc_sgmcmc.step_methods.settings import SIGNATURE

MOVED = {
    "blocked": "All variables of a step method move together, so leave it out.",
    "init": "Give the mean of an approximation as `center`, its covariance as `preconditioner`.",
    "initial_point": "Give `initval` to the variables of the model.",
    "local": "Give `gradient=LocalSampling(...)`.",
    "positive": "Positive variables that the model has without a transform are mirrored at zero.",
    "rng": "Give `random_seed` to `pm.sample` or `sample`.",
    "row_weights": "Give `gradient=WeightedGradient(Posterior(model), probabilities, batch_size)`.",
    "tune_method": "Leave it out, or give a `step_size` with its `preconditioner`.",
}
"""What is in place of arguments of earlier versions, and of PyMC's step methods."""

NOT_SHOWN = ("vars", "model", "compile_kwargs")
"""The text of a step method is without these arguments."""


class _StepMethodType(ABCMeta):
    """Type of the step methods. Its text helps a user who passes the class and not an instance."""

    def __str__(cls) -> str:
        """Text that PyMC prints where it was given this class in place of a step method."""
        return described(cls).replace("...", "")


class StepMethod(BlockedStep, metaclass=_StepMethodType):
    """Base of all step methods: checks of arguments, and no choice by PyMC itself."""

    default_blocked = True
    name: str
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls, **kwargs: Any):
        """Give the class the signature and the docstring that help and editors show.

        Where its `__init__` ends in ``**settings``, these are the arguments that their type names,
        or else those of the class above that it does not have itself.
        """
        super().__init_subclass__(**kwargs)
        own = list(signature(cls.__init__).parameters.values())[1:]
        kinds = [parameter.kind for parameter in own]
        if kinds[-1:] == [Parameter.VAR_KEYWORD] and Parameter.VAR_POSITIONAL not in kinds:
            names = {parameter.name for parameter in own}
            typed = get_args(get_type_hints(cls.__init__).get(own[-1].name))
            above = (
                [SIGNATURE[name] for name in SIGNATURE if name in typed[0].__annotations__]
                if typed
                else super(cls, cls).__signature__.parameters.values()
            )
            own[-1:] = [parameter for parameter in above if parameter.name not in names]
        cls.__signature__ = Signature(own)
        complete_docstring(cls)

    def __new__(cls, *args: Any, **kwargs: Any):
        """Check arguments that PyMC reads before `__init__`, so that messages are of this package.

        Raises
        ------
        TypeError, ModelError
        """
        check_call(cls.__name__, cls.__signature__, args, kwargs, cls._instead_of)
        model = given_model(kwargs.get("model"))
        refuse_dimensions(model)
        variables = args[0] if args else kwargs.get("vars")
        if variables is not None:
            value_variables(model, variables)
        elif not model.value_vars:
            raise ModelError(NOTHING_FREE)
        return super().__new__(cls, *args, **kwargs)

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of `__new__` for a copy, without the one that PyMC adds."""
        args, kwargs = super().__getnewargs_ex__()
        return args, {name: value for name, value in kwargs.items() if name != "blocked"}

    def __repr__(self) -> str:
        """The call of the step method, with the settings that were computed."""
        settings = self._settings
        names = ", ".join(untransformed(variable.name) for variable in self.vars)
        shown = [
            f"{name}={_shown(settings[name])}"
            for name in type(self).__signature__.parameters
            if settings.get(name) is not None and name not in NOT_SHOWN
        ]
        return f"{type(self).__name__}({', '.join([f'[{names}]', *shown])})"

    @property
    def _settings(self) -> dict[str, Any]:
        """Values of the arguments, as far as they are known."""
        return self.__getnewargs_ex__()[1]

    @classmethod
    def _instead_of(cls, argument: str) -> str:
        """What to write in place of an argument that the step method has not, where it is known."""
        if argument in MOVED:
            return MOVED[argument]
        if (usual := cls.__signature__.parameters.get("gradient")) is not None:
            kinds = [ESTIMATORS[usual.default], *ESTIMATORS.values()]
            for kind in kinds:
                if argument in signature(kind).parameters:
                    return f"Give it to the estimator: `gradient={kind.__name__}({argument}=...)`."
        for other in [*cls.__mro__, *_named(StepMethod)]:
            if "name" in vars(other) and argument in signature(other).parameters:
                return f"Leave it out, or use `{other.__name__}`, which takes it."
        if argument in signature(pymc.sample).parameters:
            return "Give it to `pm.sample` or `sample`."
        return ""

    @staticmethod
    def _refuse_changed_model(variable: str | None, data: str | None = None) -> None:
        """Refuse a model whose variables or data are others than when the step method was made.

        Raises
        ------
        ModelError
            Where the name of a variable that was added or removed is given, or of changed data.
        """
        if variable is not None:
            raise ModelError(
                "The variables of the model have changed since the step method was made: "
                f"`{variable}` was added or removed. Make a new step method."
            )
        if data is not None:
            raise ModelError(
                f"The data `{data}` were changed after the step method was made, which uses its "
                "own copy of them. Make a new step method."
            )

    @staticmethod
    def competence(var, has_grad):
        """PyMC never assigns this step method, since a user should choose an inexact sampler."""
        return Competence.INCOMPATIBLE


def _shown(value: Any) -> str:
    """A setting in the text of a step method: numbers rounded, arrays cut."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return repr(value) if is_dataclass(value) else reprlib.repr(value)


def _named(kind: type[StepMethod]) -> Iterator[type[StepMethod]]:
    """Step methods below a class, in the order in which they were made."""
    for below in kind.__subclasses__():
        yield below
        yield from _named(below)
