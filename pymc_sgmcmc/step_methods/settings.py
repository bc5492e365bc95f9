"""The settings that all step methods have in common."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytensor
from pymc.model import Model, modelcontext
from pymc.util import get_random_generator

from pymc_sgmcmc.batching import SCHEMES, check_batch_size
from pymc_sgmcmc.checks import as_array, one_of, positive_number, whole_number
from pymc_sgmcmc.engine import is_jax_mode
from pymc_sgmcmc.gradient_estimators import SVRG, GradientEstimator
from pymc_sgmcmc.matrices import Matrix, matrix_root
from pymc_sgmcmc.schedules import StepSize, check_step_size
from pymc_sgmcmc.sources import RowSource
from pymc_sgmcmc.tuning import SEARCHES, VARIANCE_INFLATION

PRECONDITIONERS = ("curvature", "identity")
"""These are the names of preconditioners."""

GRADIENTS = ("plain", "cv", "svrg", "saga")
"""These are the names of the gradient estimators."""

SMALLEST_WEIGHT = 1e-30
"""The inverse of a smaller part is infinite in single precision."""

POSITIVE = ("transform", "mirror")
"""Positive variables have a transform in the model, or are mirrored at zero."""

TUNE_METHODS = ("closed_form", "halving")
"""A step size is computed in closed form, or searched by successive halving."""

CENTERS = "the name of a search, an array of numbers or a mapping from names to such arrays"
"""Messages use these words for the values that `center` may have."""

COMPILED_WITH = ("inputs", "outputs", "updates", "on_unused_input")
"""The step method sets these arguments of `pytensor.function` itself."""

NO_LOCAL = {
    "local": "samples no local variables, so it takes no `local`. Use `SGLDCV`, or `marginalize`.",
}
"""This is refused by step methods whose law assumes gradients without a memory."""

NO_WEIGHTS = {
    "row_weights": "draws rows with equal probabilities, so it takes no `row_weights`. Use `SGLD` "
    "or `SGLDCV`.",
}
"""This is refused by step methods whose computed settings are those of equal probabilities."""

NO_MIRROR = {
    "positive": "mirrors no variables, so it takes no `positive`. Use `SGLD`, `PSGLD`, `HAMCMC` or "
    "`ULA`, or leave the variables their transform.",
}
"""This is refused by step methods for which a reflection at zero is not absolute values alone."""

Gradient = str | SVRG | GradientEstimator
Preconditioner = str | float | np.ndarray | Matrix | None
CenterSetting = str | Mapping[str, Any] | np.ndarray | None


def arguments_of(initializer: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an `__init__` by name, from its ``locals()`` before it assigns others."""
    return {name: initializer[name] for name in initializer if name not in ("self", "__class__")}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Common settings of a step method, with the checks that need no posterior.

    The settings are the parameters of `SGLD`.

    Raises
    ------
    TypeError, ValueError
        Where a setting is invalid, or contradicts another one.
    """

    vars: Sequence | None
    step_size: StepSize | None
    bias: float | None
    gradient: Gradient
    batch_size: int | None
    batching: str | None
    rows: str | Sequence[str] | RowSource | None
    center: CenterSetting
    init: Any
    thin: int | None
    tune_method: str
    model: Model
    initial_point: Mapping[str, np.ndarray] | None
    compile_kwargs: Mapping[str, Any] | None
    blocked: bool
    rng: Any
    local: Any = None
    positive: str = "transform"
    row_weights: np.ndarray | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any], **changed: Any) -> Settings:
        """Settings from the ``locals()`` of an `__init__` that has all of them as arguments."""
        values = {**arguments, **changed}
        names = [field.name for field in fields(cls)]
        return cls(**{name: values[name] for name in names if name in values})

    def __post_init__(self):
        object.__setattr__(self, "model", modelcontext(self.model))
        one_of("tune_method", self.tune_method, TUNE_METHODS)
        if self.searches:
            _check_search(self.step_size, self.bias)
        _check_generator(self.rng)
        _check_bias(self.bias, self.step_size)
        _check_center(self.center)
        _check_rows(self.rows)
        if isinstance(self.rows, RowSource) and self.local is not None:
            raise ValueError(
                "`local` samples the local variables of groups whose records are in memory, but "
                "`rows` are in a source. Leave one of them out."
            )
        one_of("positive", self.positive, POSITIVE)
        if self.row_weights is not None:
            object.__setattr__(self, "row_weights", self._checked_weights())
        if self.batching is not None:
            one_of("batching", self.batching, tuple(SCHEMES))
        if self.initial_point is not None and not isinstance(self.initial_point, Mapping):
            raise TypeError(
                "`initial_point` should be a mapping from the names of value variables to values, "
                f"but got {self.initial_point!r}."
            )
        check_compile_kwargs(self.compile_kwargs)
        if not isinstance(self.gradient, GradientEstimator | SVRG) and (
            self.gradient not in GRADIENTS
        ):
            names = ", ".join(map(repr, GRADIENTS))
            raise ValueError(
                f"`gradient` should be one of {names}, or SVRG or a GradientEstimator, but got "
                f"{self.gradient!r}."
            )
        if self.step_size is not None:
            object.__setattr__(self, "step_size", check_step_size(self.step_size))
        if self.thin is not None:
            thin = whole_number("thin", self.thin, 1, " of transitions a draw")
            object.__setattr__(self, "thin", thin)
        if self.batch_size is not None:
            check_batch_size(self.batch_size)
        is_jax_mode(self.compile_kwargs)

    def _checked_weights(self) -> np.ndarray:
        """The probabilities of the rows.

        Raises
        ------
        TypeError, ValueError
        """
        weights = as_array("row_weights", self.row_weights, "positive numbers, one for each row")
        if weights.ndim != 1 or not (np.isfinite(weights).all() and (weights > 0).all()):
            raise ValueError(
                "`row_weights` should be positive numbers, one for each row, but have shape "
                f"{weights.shape} and a smallest value of {weights.min(initial=np.inf):.3g}."
            )
        if weights.min() / weights.max() < SMALLEST_WEIGHT:
            raise ValueError(
                f"`row_weights` should be at least {SMALLEST_WEIGHT:.0e} of the largest, but the "
                f"smallest is {weights.min():.3g} beside {weights.max():.3g}. Raise it."
            )
        if self.step_size is None or self.batch_size is None:
            raise ValueError(
                "`row_weights` need `step_size` and `batch_size`, since computed ones are those of "
                "rows with equal probabilities."
            )
        if self.gradient not in ("plain", "cv") or self.batching not in (None, "replace"):
            raise ValueError(
                '`row_weights` go with `gradient="plain"` or "cv" and rows with replacement, but '
                f"got gradient={self.gradient!r} and batching={self.batching!r}."
            )
        if self.local is not None or isinstance(self.rows, RowSource):
            raise ValueError(
                "`row_weights` go neither with `local` nor with rows of a source. Leave them out."
            )
        return weights.astype(float)

    @property
    def stated_bias(self) -> float:
        """Relative error of the variance for which settings are computed."""
        return VARIANCE_INFLATION if self.bias is None else float(self.bias)

    @property
    def searches(self) -> bool:
        """Whether the step size is searched by short chains."""
        return self.tune_method == "halving"

    @property
    def on_jax(self) -> bool:
        """Whether the transitions run on JAX."""
        return is_jax_mode(self.compile_kwargs)

    def generator(self) -> np.random.Generator:
        """Random generator for use outside of `pymc.sample`."""
        return get_random_generator(self.rng)


def _check_search(step_size: StepSize | None, bias: float | None) -> None:
    """Refuse settings that contradict a search of the step size."""
    if step_size is not None:
        raise ValueError(
            '`tune_method="halving"` searches a step size, but got step_size='
            f"{step_size!r} as well. Leave one of them out."
        )
    if bias is not None:
        raise ValueError(
            '`tune_method="halving"` searches a step size without a stated accuracy, but got '
            f"bias={bias!r} as well. Leave one of them out."
        )


def _check_generator(rng: Any) -> None:
    try:
        get_random_generator(rng, copy=False)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "`rng` should be a seed (a whole number that is not negative) or a generator of NumPy, "
            f"but got {rng!r}."
        ) from error


def _check_bias(bias: float | None, step_size: StepSize | None) -> None:
    """Check the relative variance error that a user states.

    Raises
    ------
    TypeError, ValueError
        Where it is no number in (0, 1), or is given together with a step size.
    """
    if bias is None:
        return
    bias = positive_number("bias", bias)
    if bias >= 1:
        raise ValueError(
            "`bias` should be the relative error of the posterior variance that you accept, in "
            f"(0, 1), such as 0.05, but got {bias!r}."
        )
    if step_size is not None:
        raise ValueError(
            f"`bias` is the accuracy from which the step size is computed, but got both "
            f"bias={bias!r} and step_size={step_size!r}. Leave one of them out."
        )


def _check_center(center: Any) -> None:
    """Refuse a centre that is neither the name of a search nor a point.

    Raises
    ------
    TypeError, ValueError
    """
    if center is None or isinstance(center, Mapping):
        return
    if isinstance(center, str):
        one_of("center", center, SEARCHES, ", or a point")
        return
    as_array("center", center, CENTERS)


def _check_rows(rows: Any) -> None:
    """Refuse `rows` that is neither a source, a name nor a sequence of names.

    Raises
    ------
    TypeError
    """
    if isinstance(rows, RowSource):
        return
    names = [rows] if isinstance(rows, str) or rows is None else rows
    if isinstance(names, Sequence) and all(name is None or isinstance(name, str) for name in names):
        return
    raise TypeError(
        "`rows` should be the name, or a list of names, of observed variables, `pm.Data` variables "
        f"or a dimension, or what `open_rows` returns, but got {rows!r}."
    )


def check_compile_kwargs(compile_kwargs: Any) -> None:
    """Refuse arguments that `pytensor.function` does not take or the step method sets itself.

    Raises
    ------
    TypeError
    """
    accepted = [
        name
        for name in inspect.signature(pytensor.function).parameters
        if name not in COMPILED_WITH
    ]
    if compile_kwargs is None:
        return
    if not isinstance(compile_kwargs, Mapping):
        raise TypeError(
            "`compile_kwargs` should be a mapping such as {'mode': 'CVM'}, but got "
            f"{compile_kwargs!r}."
        )
    unknown = [key for key in compile_kwargs if key not in accepted]
    if unknown:
        raise TypeError(
            "`compile_kwargs` should have keys that `pytensor.function` takes, of "
            f"{', '.join(map(repr, accepted))}, but has {unknown[0]!r}."
        )


def default_preconditioner(
    preconditioner: Preconditioner, step_size: StepSize | None
) -> str | np.ndarray | Matrix:
    """Return the given preconditioner; by default the curvature where the step size is computed.

    Raises
    ------
    TypeError, ValueError
        Where it is neither a name nor numbers, or is missing beside a step size.
    """
    if preconditioner is None:
        if step_size is not None:
            raise ValueError(
                "`step_size` should come with `preconditioner`, whose units it has: "
                '"curvature" for a step size as the log shows it, "identity" for that of the '
                "papers."
            )
        return "curvature"
    if isinstance(preconditioner, Matrix):
        return preconditioner
    if isinstance(preconditioner, str):
        or_else = ", a positive number, a vector or a positive definite matrix"
        return one_of("preconditioner", preconditioner, PRECONDITIONERS, or_else)
    return as_array(
        "preconditioner", preconditioner, "a name, a positive number, a vector or a matrix"
    )


def is_curvature(preconditioner: str | float | np.ndarray | Matrix) -> bool:
    """Whether a preconditioner is the inverse curvature at the centre."""
    return isinstance(preconditioner, str) and preconditioner == "curvature"


def check_preconditioner(preconditioner: str | np.ndarray | Matrix, dimension: int) -> None:
    """Refuse a preconditioner that is not positive definite or has another dimension.

    Raises
    ------
    ValueError
    """
    if isinstance(preconditioner, str):
        return
    shape = preconditioner.shape
    if shape not in ((), (dimension,), (dimension, dimension)):
        raise ValueError(
            f"`preconditioner` should be a number or have shape ({dimension},) or "
            f"({dimension}, {dimension}), but has shape {shape}."
        )
    matrix_root(preconditioner)
