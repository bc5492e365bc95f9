"""The settings that all step methods have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from typing import Any, TypedDict

import numpy as np
import pytensor
from pymc.model import Model

from pymc_sgmcmc.batching import SCHEMES, check_batch_size
from pymc_sgmcmc.checks import as_array, generator, one_of, positive_number, whole_number
from pymc_sgmcmc.engine import is_jax_mode
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.gradient_estimators import SECOND_ORDER, SVRG, GradientEstimator
from pymc_sgmcmc.matrices import Matrix, matrix_root
from pymc_sgmcmc.posterior.position import given_model
from pymc_sgmcmc.schedules import StepSize, check_step_size
from pymc_sgmcmc.sources import RowSource
from pymc_sgmcmc.tuning import VARIANCE_INFLATION, Center

PACKAGES_OF_MODES = {"JAX": "jax", "MLX": "mlx", "PYTORCH": "torch"}
"""What PyTensor imports to compile in these modes."""

PRECONDITIONERS = ("curvature", "identity")
"""These are the names of preconditioners."""

CONTROL_VARIATES = {"cv": 1, SECOND_ORDER: 2}
"""Control variates at the centre are of this order."""

GRADIENTS = ("plain", *CONTROL_VARIATES, "svrg", "saga")
"""These are the names of the gradient estimators."""

POSITIVE = ("transform", "mirror")
"""Positive variables have a transform in the model, or are mirrored at zero."""

CENTERS = "an array of numbers or a mapping from names to such arrays"
"""Messages use these words for the values that `center` may have."""

COMPILED_WITH = ("inputs", "outputs", "updates", "on_unused_input")
"""The step method sets these arguments of `pytensor.function` itself."""

NO_LOCAL = {
    "local": "samples no local variables, so it takes no `local`. Use `SGLDCV`, or `marginalize`.",
}
"""This is refused by step methods whose law assumes gradients without a memory."""

OWN_PRECONDITIONER = {
    "preconditioner": "has a preconditioner of its own, so it takes no `preconditioner`. Use "
    "`SGLD`, which takes one.",
}
"""This is refused by step methods that compute what takes the place of a fixed matrix."""

NO_MIRROR = {
    "positive": "mirrors no variables, so it takes no `positive`. Use `SGLD`, `PSGLD`, `HAMCMC` or "
    "`ULA`, or leave the variables their transform.",
}
"""This is refused by step methods for which a reflection at zero is not absolute values alone."""

Gradient = str | SVRG | GradientEstimator
Preconditioner = str | float | np.ndarray | Matrix | None
CenterSetting = Mapping[str, Any] | np.ndarray | Center | None


class CommonSettings(TypedDict, total=False):
    """Arguments that the step methods have in common, beside `vars`."""

    preconditioner: Preconditioner
    step_size: StepSize | None
    bias: float | None
    gradient: Gradient
    batch_size: int | None
    batching: str | None
    rows: str | Sequence[str] | RowSource | None
    center: CenterSetting
    local: Any
    thin: int | None
    positive: str
    model: Model | None
    initial_point: Mapping[str, np.ndarray] | None
    compile_kwargs: Mapping[str, Any] | None
    blocked: bool
    rng: Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    r"""Common settings of a step method, with the checks that need no posterior.

    Parameters
    ----------
    vars : sequence of variables, optional
        Continuous free variables, in any order. Default: all of the model.
    preconditioner : {"curvature", "identity"}, float, (d,) or (d, d) array, optional
        The fixed matrix M, symmetric positive definite. "curvature" is the inverse curvature at the
        centre: dense up to d = 500, a diagonal with up to 50 directions up to d = 20 000, and
        diagonal beyond. Default: "curvature". It is needed where `step_size` is given, whose units
        depend on it.
    step_size : float or callable, optional
        The step size h, or a function of the transition number (from 0) such as `PolynomialDecay`.
        Default: the closed form for the error :math:`\delta` of the variance given as `bias`,
        :math:`h = 4\delta / (\lambda_{\max}(MV) + (1 + \delta) \lambda_{\max}(MH))`. For averaged
        noises it has :math:`\delta` in place of :math:`1 + \delta`, and is at most
        :math:`1 / \lambda_{\max}(MH)`. It is computed anew during tuning from the gradients along
        the chain.
    bias : float, optional
        Relative error of the posterior variance that you accept, in (0, 1), instead of a
        `step_size`. Default: 0.05. `bias_report` estimates the error of a run.
    gradient : {"plain", "cv", "second_order", "svrg", "saga"}, SVRG or GradientEstimator
        Estimator of the gradient. "plain" is the scaled minibatch gradient. "cv" has control
        variates at the centre (Baker et al.), and "second_order" the derivatives there as well, see
        `ControlVariateGradient`; without a dense curvature it is "cv". "svrg" has control variates
        at an earlier position of the chain (`SVRG` sets how often it is refreshed). "saga" stores a
        gradient for each row. An estimator made by hand has its own posterior and minibatch scheme.
        The default is "plain" for `SGLD`, `SGRLD`, `OSGFS` and `Recipe`, "second_order" for
        `SGLDCV`, and "cv" for the others: plain gradients take many more transitions.
    batch_size : int, optional
        Number n of rows in a minibatch. For a model with `pymc.Minibatch` it replaces the model's
        own. Default for an ordinary model: the batch size at which an effective draw costs least,
        see `pymc_sgmcmc.tuning.choose_batch_size`.
    batching : {"shuffle", "replace"}
        Windows of rows in random order (without replacement; the default), or independent rows with
        replacement (the default of ``gradient="saga"``, see `SAGAGradient`).
    rows : str, sequence of str or RowSource, optional
        Names of observed variables, `pymc.Data` variables or a dimension that run over the rows,
        for ordinary models in which this is ambiguous. Or the source of rows that do not fit in
        memory, as `open_rows` returns it, where the model is written on what its `head` returns.
    center : mapping or (d,) array, optional
        The point near the mode for curvature, control variates and the start of the chains: a
        mapping from all names to values, the unconstrained position, or the attribute `center` of
        another step method. Default: it is searched where something needs it.
    local : str, variable, sequence of these, or LocalSampling, optional
        Free variables with entries for groups that the gradient estimator samples itself, by
        Fisher's identity. The rows are then the groups, and the chain moves the other variables.
        See `LocalSampling`, and `marginalize` for up to three quantities a group.
    thin : int, optional
        Number of transitions for each recorded draw. Default: one relaxation time of the slowest
        direction, at most 1000, where the step size is computed, and 1 where it is given. Where
        tuning changes the step size of Langevin dynamics, the default follows it at the end of
        tuning, by powers of two up to 16.
    positive : {"transform", "mirror"}
        How positive variables stay positive: by the transform that PyMC gives them, or, where the
        model has them without one (``default_transform=None``), by taking absolute values after
        each transition (Şimşekli et al. 2016). The law is then the posterior on the positive side
        up to O(h). The gradient of the log density has to be bounded at zero, as with
        `pm.Exponential`; other models are refused. All settings have to be given, since the mode
        may be at zero; tools that need the mean of the gradients to be zero refuse the trace.
    model : pymc.Model, optional
    initial_point : mapping, optional
        Values of all value variables, as PyMC passes them.
    compile_kwargs : dict, optional
        Arguments of `pytensor.function` for the transitions, such as the mode:
        ``{"mode": "NUMBA"}`` (the default), ``"CVM"`` or ``"JAX"``.
    blocked : bool
        Whether to sample the variables together, which is the only sensible choice here.
    rng : optional
        Seed or generator for use outside `pymc.sample`.

    Raises
    ------
    TypeError, ValueError
        Where a setting is invalid, or contradicts another one.
    """

    vars: Sequence | None
    preconditioner: Preconditioner
    step_size: StepSize | None
    bias: float | None
    gradient: Gradient = "plain"
    batch_size: int | None
    batching: str | None
    rows: str | Sequence[str] | RowSource | None
    center: CenterSetting
    local: Any
    thin: int | None
    positive: str = "transform"
    model: Model
    initial_point: Mapping[str, np.ndarray] | None
    compile_kwargs: Mapping[str, Any] | None
    blocked: bool = True
    rng: Any

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Settings as given, and the others by default."""
        return cls(**{**DEFAULTS, **given})

    def __post_init__(self):
        object.__setattr__(self, "model", given_model(self.model))
        generator("rng", self.rng)
        _check_bias(self.bias, self.step_size)
        _check_center(self.center)
        _check_rows(self.rows)
        if isinstance(self.rows, RowSource) and self.local is not None:
            raise ValueError(
                "`local` samples the local variables of groups whose records are in memory, but "
                "`rows` are in a source. Leave one of them out."
            )
        one_of("positive", self.positive, POSITIVE)
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

    @property
    def stated_bias(self) -> float:
        """Relative error of the variance for which settings are computed."""
        return VARIANCE_INFLATION if self.bias is None else float(self.bias)

    @property
    def order(self) -> int:
        """Order of the control variates at the centre, 0 without them."""
        gradient = self.gradient
        return CONTROL_VARIATES.get(gradient, 0) if isinstance(gradient, str) else 0

    @property
    def on_jax(self) -> bool:
        """Whether the transitions run on JAX."""
        return is_jax_mode(self.compile_kwargs)

    def generator(self) -> np.random.Generator:
        """Random generator for use outside of `pymc.sample`."""
        return generator("rng", self.rng)


DEFAULTS: dict[str, Any] = {
    field.name: None if field.default is MISSING else field.default for field in fields(Settings)
}
"""A step method may have other defaults."""

COMMON_SIGNATURE = Signature(
    [
        Parameter(
            field.name,
            Parameter.POSITIONAL_OR_KEYWORD if field.name == "vars" else Parameter.KEYWORD_ONLY,
            default=DEFAULTS[field.name],
            annotation=field.type,
        )
        for field in fields(Settings)
    ]
)
"""The arguments of all settings. `vars` alone may be given by its place."""


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
    """Refuse a centre that is no point.

    Raises
    ------
    TypeError, ValueError
    """
    if center is None or isinstance(center, Mapping | Center):
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
    TypeError, ImportError
    """
    accepted = [
        name for name in signature(pytensor.function).parameters if name not in COMPILED_WITH
    ]
    if compile_kwargs is None:
        return
    if not isinstance(compile_kwargs, Mapping):
        raise TypeError(
            "`compile_kwargs` should be a mapping such as {'mode': 'CVM'}, but got "
            f"{compile_kwargs!r}."
        )
    mode = compile_kwargs.get("mode")
    package = PACKAGES_OF_MODES.get(mode) if isinstance(mode, str) else None
    if package is not None and find_spec(package) is None:
        raise ImportError(
            f"`compile_kwargs={{'mode': {mode!r}}}` needs the package {package}, which is not "
            "installed. Install it, or leave `mode` out."
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
        raise ModelError(
            f"`preconditioner` should be a number or have shape ({dimension},) or "
            f"({dimension}, {dimension}), but has shape {shape}."
        )
    matrix_root(preconditioner)
