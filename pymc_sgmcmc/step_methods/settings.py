"""The settings that all step methods have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from inspect import signature
from typing import Any, TypedDict

import numpy as np
import pytensor
from pymc.model import Model

from pymc_sgmcmc.batching import check_batch_size
from pymc_sgmcmc.checks import as_array, one_of, or_none, positive_number, whole_number
from pymc_sgmcmc.engine import is_jax_mode
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.gradient_estimators import GradientEstimator
from pymc_sgmcmc.matrices import Matrix, matrix_root
from pymc_sgmcmc.posterior.position import given_model, value_variables
from pymc_sgmcmc.schedules import StepSize, check_step_size
from pymc_sgmcmc.sources import RowSource
from pymc_sgmcmc.step_methods.estimators import Estimator, Gradient, estimator_of
from pymc_sgmcmc.tuning import VARIANCE_INFLATION, Center

PACKAGES_OF_MODES = {"JAX": "jax", "MLX": "mlx", "PYTORCH": "torch"}
"""What PyTensor imports to compile in these modes."""

PRECONDITIONERS = ("curvature", "identity")
"""These are the names of preconditioners."""

CENTERS = "an array of numbers or a mapping from names to such arrays"
"""Messages use these words for the values that `center` may have."""

COMPILED_WITH = ("inputs", "outputs", "updates", "on_unused_input")
"""The step method sets these arguments of `pytensor.function` itself."""

Preconditioner = str | float | Sequence | np.ndarray | Matrix | None
CenterSetting = Mapping[str, Any] | Sequence | np.ndarray | Center | None
Rows = str | Sequence[str] | RowSource | None


class ModelSettings(TypedDict, total=False):
    """Arguments of all step methods with `Settings`, beside `vars`."""

    rows: Rows
    center: CenterSetting
    model: Model | None


class ChainSettings(ModelSettings, total=False):
    """Arguments of step methods with gradients."""

    thin: int | None
    compile_kwargs: Mapping[str, Any] | None


class MinibatchSettings(ChainSettings, total=False):
    """Arguments of step methods with gradients of minibatches."""

    bias: float | None
    batch_size: int | None


class CommonSettings(MinibatchSettings, total=False):
    """Arguments of step methods with gradients of minibatches and a step size."""

    step_size: StepSize | None


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
    gradient : {"plain", "cv", "second_order", "svrg", "saga"} or an estimator
        Estimator of the gradient. "plain" is the scaled minibatch gradient. "cv" has control
        variates at the centre (Baker et al.), and "second_order" the derivatives there as well, see
        `ControlVariateGradient`; without a dense curvature it is "cv". "svrg" has control variates
        at an earlier position of the chain. "saga" stores a gradient for each row. The names stand
        for `Plain`, `FirstOrder`, `SecondOrder`, `SVRG` and `SAGA`, which have settings of their
        own, such as ``FirstOrder(batching="replace")`` for independent rows with replacement in
        place of windows of rows in random order. `LocalSampling` samples local variables by
        Fisher's identity, so that groups are the rows. An estimator made by hand, such as
        `WeightedGradient`, has its own posterior and minibatch scheme.
        The default is "plain" for `SGLD`, `SGRLD`, `OSGFS` and `Recipe`, "second_order" for
        `SGLDCV`, and "cv" for the others: plain gradients take many more transitions.
    batch_size : int, optional
        Number n of rows in a minibatch. For a model with `pymc.Minibatch` it replaces the model's
        own. Default for an ordinary model: the batch size at which an effective draw costs least,
        see `pymc_sgmcmc.tuning.choose_batch_size`.
    rows : str, sequence of str or RowSource, optional
        Names of observed variables, `pymc.Data` variables or a dimension that run over the rows,
        for ordinary models in which this is ambiguous. Or the source of rows that do not fit in
        memory, as `open_rows` returns it, where the model is written on what its `head` returns.
    center : mapping or (d,) array, optional
        The point near the mode for curvature, control variates and the start of the chains: a
        mapping from all names to values, the unconstrained position, or the attribute `center` of
        another step method. Default: it is searched where something needs it.
    thin : int, optional
        Number of transitions for each recorded draw. Default: one relaxation time of the slowest
        direction, at most 1000, where the step size is computed, and 1 where it is given. Where
        tuning changes the step size of Langevin dynamics, the default follows it at the end of
        tuning, by powers of two up to 16.
    model : pymc.Model, optional
    compile_kwargs : dict, optional
        Arguments of `pytensor.function` for the transitions, such as the mode:
        ``{"mode": "NUMBA"}`` (the default), ``"CVM"`` or ``"JAX"``.

    Attributes
    ----------
    estimator : Estimator or GradientEstimator
        What `gradient` stands for.
    order : int
        Order of its control variates at the centre, 0 without them.

    Raises
    ------
    TypeError, ValueError
        Where a setting is invalid, or contradicts another one.
    """

    def __init__(
        self,
        *,
        vars: Sequence | None = None,
        gradient: Gradient = "plain",
        preconditioner: Preconditioner = None,
        step_size: StepSize | None = None,
        bias: float | None = None,
        batch_size: int | None = None,
        rows: Rows = None,
        center: CenterSetting = None,
        thin: int | None = None,
        model: Model | None = None,
        compile_kwargs: Mapping[str, Any] | None = None,
    ):
        self.vars = vars
        self.preconditioner = preconditioner
        self.model = given_model(model)
        _check_bias(bias, step_size)
        self.bias = VARIANCE_INFLATION if bias is None else float(bias)
        _check_center(center)
        self.center = center
        _check_rows(rows)
        self.rows = rows
        check_compile_kwargs(compile_kwargs)
        self.compile_kwargs = compile_kwargs
        self.on_jax = is_jax_mode(compile_kwargs)
        self.estimator = estimator_of(gradient)
        self.order = self.estimator.order if isinstance(self.estimator, Estimator) else 0
        self.step_size = None if step_size is None else check_step_size(step_size)
        self.thin = or_none(whole_number, "thin", thin, 1, " of transitions a draw")
        if batch_size is not None:
            check_batch_size(batch_size)
        self.batch_size = batch_size


SIGNATURE = signature(Settings.__init__).parameters
"""The arguments of all settings."""


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


def check_estimator(estimator: GradientEstimator, settings: Settings) -> None:
    """Refuse an estimator that does not fit the settings of the step method.

    Raises
    ------
    ValueError
    """
    given = {"batch_size": settings.batch_size, "rows": settings.rows}
    twice = [f"`{name}`" for name, value in given.items() if value is not None]
    if twice:
        raise ValueError(
            f"`gradient` is a {type(estimator).__name__}, which has its own posterior and "
            f"minibatch scheme, but {' and '.join(twice)} {'is' if len(twice) == 1 else 'are'} "
            "given as well. Leave that out, or make the estimator with it."
        )
    has = estimator.posterior.layout.variables
    of_model = set(settings.model.value_vars)
    foreign = [value.name for value in has if value not in of_model]
    if foreign:
        raise ModelError(
            f"`gradient` was made for the posterior of another model, which has {foreign}. Make it "
            "with `Posterior(model)` of the model that is sampled."
        )
    chosen = of_model
    if settings.vars is not None:
        chosen = set(value_variables(settings.model, settings.vars))
    if set(has) != chosen:
        raise ModelError(
            f"`gradient` was made for the variables {sorted(value.name for value in has)}, but the "
            f"step method has {sorted(str(value.name) for value in chosen)}. Give the same "
            "variables to `Posterior` and, as `vars`, to the step method."
        )
    if settings.on_jax and not estimator.batching.static:
        raise ValueError(
            "JAX needs known shapes, but the minibatch scheme of `gradient` has none. Make it with "
            "`static=True`."
        )
    if settings.on_jax and estimator.memory is not None:
        raise ValueError(
            f"{type(estimator).__name__} does not run on JAX, which would copy its memory at each "
            'call. Use `compile_kwargs={"mode": "NUMBA"}`.'
        )
