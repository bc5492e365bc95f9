"""What all step methods of this package have in common, also those without gradients."""

from __future__ import annotations

from abc import ABCMeta
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar, get_args, get_type_hints

from pymc.step_methods.compound import BlockedStep, Competence

from pymc_sgmcmc.checks import unknown_argument
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.position import (
    NOTHING_FREE,
    given_model,
    refuse_dimensions,
    value_variables,
)
from pymc_sgmcmc.step_methods.documentation import complete_docstring
from pymc_sgmcmc.step_methods.settings import SIGNATURE

MOVED = {
    "batching": 'Give it to the estimator, as in `gradient=FirstOrder(batching="replace")`.',
    "local": "Give `gradient=LocalSampling(...)`.",
    "positive": "Positive variables that the model has without a transform are mirrored at zero.",
    "initial_point": "Give `initval` to the variables of the model.",
}
"""What is in place of arguments of earlier versions."""


class _StepMethodType(ABCMeta):
    """Type of the step methods. Its text helps a user who passes the class and not an instance."""

    def __str__(cls) -> str:
        """Text that PyMC prints where it was given this class in place of a step method."""
        return f"the class {cls.__name__} (write `{cls.__name__}()`)"


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
        parameters = cls.__signature__.parameters
        takes_any = any(
            parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        for argument in () if takes_any else kwargs:
            if argument not in parameters:
                instead = MOVED.get(argument, "")
                raise unknown_argument(cls.__name__, argument, parameters, instead)
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
