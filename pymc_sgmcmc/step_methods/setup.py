"""What every step method needs before it is a sampler: posterior, centre, gradient estimator."""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytensor
from pymc.initial_point import make_initial_point_fn
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from scipy import linalg

from pymc_sgmcmc.adaptation import Adaptation
from pymc_sgmcmc.batching import SCHEMES, check_batch_size, make_batching
from pymc_sgmcmc.center_difference import find_center_difference
from pymc_sgmcmc.checks import as_array, one_of, positive_number, whole_number
from pymc_sgmcmc.dynamics import Dynamics
from pymc_sgmcmc.engine import is_jax_mode
from pymc_sgmcmc.errors import BatchSizeWarning, ModelError
from pymc_sgmcmc.gradient_estimators import (
    SVRG,
    ControlVariateGradient,
    GradientEstimator,
    PlainGradient,
    SAGAGradient,
    SVRGGradient,
)
from pymc_sgmcmc.linear_algebra import (
    Matrix,
    apply_to_rows,
    covariance_root,
    dependent_coordinates,
    largest_mean_square,
    matrix_root,
)
from pymc_sgmcmc.low_rank import LowRank
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.graphs import shape_of
from pymc_sgmcmc.posterior.position import value_variables
from pymc_sgmcmc.run_settings import LARGEST_MEAN_ERROR
from pymc_sgmcmc.schedules import MOST_THINNING, StepSize, check_step_size
from pymc_sgmcmc.tuning import (
    NOISE_POINTS,
    SEARCHES,
    VARIANCE_INFLATION,
    Center,
    Curvature,
    RowNoise,
    StepSizeChoice,
    center_at,
    center_of,
    check_given_center,
    choose_batch_size,
    choose_step_size,
    find_center,
    initial_gaussian,
    laplace_draws,
    least_cost,
    row_noise,
)

_log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold

PRECONDITIONERS = ("curvature", "identity")
"""Names of preconditioners."""

GRADIENTS = ("plain", "cv", "svrg", "saga")
"""Names of the gradient estimators."""

NEEDS_CENTER = ("cv",)
"""Those of them that need the centre."""

NOISE_WARNING = 1.0
"""Gradient noise, in units of the largest curvature, above which it is worth a warning."""

IMPLAUSIBLE_NOISE = 1e4
"""Gradient noise, in units of curvature, that points at the model and not at the minibatch."""

CENTERS = "the name of a search, an array of numbers or a mapping from names to such arrays"
"""What a centre may be, for messages."""

FARTHEST_GIVEN_CENTER = 1e6
"""Distance of a given centre from the mode, in posterior standard deviations, at which the relative
rounding errors of its curvature, some 1e-16 times the square, are no longer small."""

COMPILED_WITH = ("inputs", "outputs", "updates", "on_unused_input")
"""Arguments of `pytensor.function` that are the step method's own."""

FEW_LABELS = 5
"""Coordinates named in a message, at most."""


@dataclass(frozen=True)
class Design:
    """A sampler for one posterior.

    Attributes
    ----------
    dynamics : Dynamics
    step_size : float or callable
    thin : int
        Transitions a recorded draw.
    adaptations : tuple of Adaptation
        What the dynamics change between blocks of transitions.
    preconditioner : numpy.ndarray or LowRank, optional
        M, scalar, (d,), (d, d) or of low rank, where the dynamics are Langevin's with a fixed one.
    choice : StepSizeChoice, optional
        What a computed step size is from.
    watch : callable, optional
        What is wrong with a chain, or None, judged by the statistics of a draw: asked at the end
        of tuning and of the chain.
    begins_at_center : bool
        Whether chains begin around the centre, where there is one.
    remedy : str, optional
        What to try after a chain left the finite numbers, where that is not a smaller step size.
    """

    dynamics: Dynamics
    step_size: StepSize
    thin: int
    adaptations: tuple[Adaptation, ...] = field(default=())
    preconditioner: Matrix | None = None
    choice: StepSizeChoice | None = None
    watch: Callable[[Mapping[str, Any]], str | None] | None = None
    begins_at_center: bool = True
    remedy: str | None = None


@dataclass(frozen=True)
class Setup:
    """Everything known of a posterior when a sampler is made for it.

    Attributes
    ----------
    name : str
        Of the step method, for messages.
    posterior : Posterior
    estimator : GradientEstimator
        With its minibatch scheme.
    center : Center or None
        None where nothing needs it.
    joint_draws : list of mappings or None
        Points of the Gaussian approximation of all continuous variables of the model, where
        the position has only some of them.
    step_size : float, callable or None
        As given.
    thin : int or None
        As given.
    bias : float
        Relative error of the posterior variance that the settings are computed for.
    noise : callable
        Gives the `RowNoise`; computed at the first call, which needs the centre.
    batch_size_from : str
        Where the batch size is from: "given", "the model" or "computed".
    rows : str, list of str or None
        As given.
    by_hand : bool
        Whether the estimator was given, and not its name.
    to_be_searched : bool
        Whether `search_step_size` replaces the step size of a design.
    """

    name: str
    posterior: Posterior
    estimator: GradientEstimator
    center: Center | None
    joint_draws: list[dict[str, np.ndarray]] | None
    step_size: StepSize | None
    thin: int | None
    bias: float
    noise: Callable[[], RowNoise]
    batch_size_from: str
    rows: str | list[str] | None = None
    by_hand: bool = False
    to_be_searched: bool = False

    def shared(self, values: Matrix | float, name: str) -> SharedVariable | LowRank:
        """Shared variable in the floating type of the position, of static shape.

        A vector of length one broadcasts only with a static shape. For a matrix of low rank one
        for each of its parts.
        """
        if isinstance(values, LowRank):
            parts = ("left", "vectors", "factors", "right")
            shared = [self.shared(getattr(values, part), f"{name}_{part}") for part in parts]
            return LowRank(*shared)
        values = np.asarray(values, dtype=self.posterior.dtype)
        static = {"shape": values.shape} if values.ndim else {}
        return pytensor.shared(values, name, **static)

    def preconditioner(self, setting: str | np.ndarray | LowRank) -> tuple[Matrix, Matrix]:
        """Preconditioner M and a root L with M = L Lᵀ: scalar, diagonal, dense or low rank."""
        if is_curvature(setting):
            assert self.center is not None
            return self.center.curvature.covariance, self.center.curvature.root
        matrix = np.asarray(1.0) if isinstance(setting, str) else setting
        return matrix, matrix_root(matrix)

    def choose_step_size(self, root: Matrix) -> StepSizeChoice:
        """Step size of Langevin dynamics in closed form for a preconditioner M = L Lᵀ."""
        assert self.center is not None
        return choose_step_size(
            self.posterior,
            self.center,
            root,
            self.estimator.batching,
            deviations=self.noise().deviations,
            noise_factors=self.estimator.noise_factors,
            inflation=self.bias,
        )

    def gradient_deviations(self) -> np.ndarray:
        r"""Rows whose sum of outer products is V, the covariance of the gradient estimate.

        Shape (rows, d), for a random set of rows of the data.
        """
        assert self.center is not None
        deviations = self.noise().deviations
        batching = self.estimator.batching
        scale = batching.n_rows**2 / batching.batch_size * batching.variance_factor
        rows = deviations * np.sqrt(scale / len(deviations))
        of_noise, of_curvature = self.estimator.noise_factors
        curvature = self.center.curvature
        rows = rows * np.sqrt(of_noise)
        if not of_curvature or not curvature.is_dense:
            # A diagonal in so many dimensions has no factor of few rows, and is much smaller.
            return rows
        root = matrix_root(curvature.precision)
        return np.concatenate([rows, root.T * np.sqrt(of_curvature)])

    def mean_error(self) -> tuple[str, float] | None:
        """Label and size of the largest error of a mean that the stated bias brings, if known.

        In posterior standard deviations, to first order, see `Center`.
        """
        if self.center is None or self.center.bend is None:
            return None
        errors = self.bias * np.abs(self.center.bend)
        worst = int(np.argmax(errors))
        return str(self.posterior.labels[worst]), float(errors[worst])

    def report(self, choice: StepSizeChoice, step_size: float, thin: int) -> None:
        """Log the settings that were computed, and warn where noise limits them.

        Nothing where the step size will be searched: that in closed form is no setting then.
        """
        if self.to_be_searched:
            return
        batching = self.estimator.batching
        kept = self.estimator.kept_rows
        _log.info(
            "%s: step size %.3g, %d transitions a draw, %d of %d rows a minibatch%s "
            "(gradient noise %.2g, curvature %.2g)",
            self.name,
            step_size,
            thin,
            batching.batch_size,
            batching.n_rows,
            f" beside {kept} in every one" if kept else "",
            choice.noise,
            choice.curvature,
        )
        label, error = self.mean_error() or ("", 0.0)
        if error > LARGEST_MEAN_ERROR:
            _log.warning(
                "%s: with variances too large by %.2g the mean of `%s` is off by up to about %.1g "
                "posterior standard deviations, since the posterior is skewed there. Use "
                "`bias=%.1g` where that matters",
                self.name,
                self.bias,
                label,
                error,
                self.bias * LARGEST_MEAN_ERROR / error,
            )
        relaxation = 2 / (step_size * choice.curvature)
        if thin == MOST_THINNING and relaxation > 2 * MOST_THINNING:
            _log.warning(
                "%s: a draw should have %.3g transitions to be worth its storage, but has only "
                "%d: expect few effective draws. A larger `bias`, or less gradient noise (see "
                "`batch_size`), makes the steps larger",
                self.name,
                relaxation,
                MOST_THINNING,
            )
        ratio = choice.noise / choice.curvature
        # A computed batch size has weighed the noise of control variates against their cost.
        weighed = self.batch_size_from == "computed" and self.estimator.reduces_variance
        if ratio > (IMPLAUSIBLE_NOISE if weighed else NOISE_WARNING):
            warnings.warn(
                _noise_message(choice, batching, self.estimator), BatchSizeWarning, stacklevel=5
            )


def _noise_message(choice: StepSizeChoice, batching, estimator: GradientEstimator) -> str:
    remedy = (
        "or fewer predictors that are non-zero or extreme in only a few rows, which cause "
        "most of the noise that control variates leave"
        if estimator.reduces_variance
        else 'or `gradient="cv"` (`SGLDCV`), whose noise does not grow with the data'
    )
    ratio = choice.noise / choice.curvature
    if ratio > IMPLAUSIBLE_NOISE:
        remedy += (
            ". So much noise also comes from a posterior that is improper or that has no mode, "
            "as with outcomes that predictors separate under a flat prior"
        )
    return (
        f"The noise of a gradient from {batching.batch_size} of {batching.n_rows} rows is "
        f"{ratio:.3g} times the curvature, so the step is that much smaller and the chain "
        f"that much slower. Use about `batch_size={choice.batch_size_needed}`, {remedy}."
    )


def prepare(
    name: str,
    model: Model,
    vars: Sequence | None,
    *,
    batch_size: int | None,
    rows: str | Sequence[str] | None,
    step_size: StepSize | None,
    gradient: str | SVRG | GradientEstimator,
    center: str | Mapping[str, Any] | np.ndarray | None,
    thin: int | None,
    batching: str | None,
    initial_point: Mapping[str, np.ndarray] | None,
    compile_kwargs: dict | None,
    needs_center: bool,
    low_rank: bool,
    keeps_rows: bool,
    preconditioner: str | np.ndarray | LowRank,
    bias: float | None,
    init: Any,
) -> Setup:
    """Check the common settings of a step method, and compute what they ask for.

    The parameters are those of `SGLD`; `needs_center` says that the sampler needs the centre
    whatever the gradient, `low_rank` that it takes a curvature of low rank plus diagonal, and
    `keeps_rows` that it has no formula of its own for the noise of a minibatch.
    """
    bias = check_bias(bias, step_size)
    check_center_setting(center)
    check_rows_setting(rows)
    if batching is not None:
        one_of("batching", batching, tuple(SCHEMES))
    if initial_point is not None and not isinstance(initial_point, Mapping):
        raise TypeError(
            "`initial_point` should be a mapping from the names of value variables to values, but "
            f"got {initial_point!r}."
        )
    check_compile_kwargs(compile_kwargs)
    if not isinstance(gradient, GradientEstimator | SVRG) and gradient not in GRADIENTS:
        names = ", ".join(map(repr, GRADIENTS))
        raise ValueError(
            f"`gradient` should be one of {names}, or SVRG or a GradientEstimator, but got "
            f"{gradient!r}."
        )
    if step_size is not None:
        step_size = check_step_size(step_size)
    if thin is not None:
        thin = whole_number("thin", thin, 1, " of transitions a draw")
    if batch_size is not None:
        check_batch_size(batch_size)

    static = is_jax_mode(compile_kwargs)
    if isinstance(gradient, GradientEstimator):
        _check_estimator(gradient, model, vars, batch_size, rows, batching, static)
        posterior = gradient.posterior
        batch_size = gradient.batching.batch_size
    else:
        posterior = Posterior(model, vars, rows=rows, initial_point=initial_point)
    check_preconditioner(preconditioner, posterior.dimension)
    posterior.check_rows()
    batch_size_from = "given"
    if batch_size is None and posterior.model_batch_size is not None:
        batch_size, batch_size_from = posterior.model_batch_size, "the model"
    if batch_size is not None:
        batch_size = check_batch_size(batch_size, posterior.n_rows)
    if posterior.others and posterior.model_batch_size is not None:
        warnings.warn(
            "The model uses `pm.Minibatch`, and the step method has only some of its "
            "variables. PyMC's own step methods for the others would see one fixed "
            "minibatch for ever. Build the model on the full arrays and pass "
            "`batch_size` to the step method instead.",
            UserWarning,
            stacklevel=4,
        )
    needs_center = needs_center or batch_size is None
    found: Center | None = None
    others: dict[str, np.ndarray] = {}
    joint_draws = None
    if init is not None:
        found, others = _center_from(init, model, posterior, center)
    elif needs_center or center is not None or gradient in NEEDS_CENTER:
        found, others, joint_draws = _center(model, posterior, center, rows, initial_point)
    if found is not None:
        check_determined(found.curvature, posterior)
    if found is not None and not low_rank:
        found = replace(found, curvature=found.curvature.without_directions())

    # Rows are taken always only where nothing says how many a transition has.
    keeps = keeps_rows and gradient == "cv" and batch_size is None

    @functools.cache
    def noise() -> RowNoise:
        assert found is not None
        if isinstance(gradient, GradientEstimator):
            reduces_variance = gradient.reduces_variance
        else:
            reduces_variance = gradient != "plain"
        operations = _operations(posterior, found)
        return row_noise(
            posterior,
            found,
            control_variate=reduces_variance,
            joint_draws=joint_draws,
            cost=(lambda rows, drawn, kept: least_cost(rows, drawn, *operations, kept))
            if keeps
            else None,
        )

    if isinstance(gradient, GradientEstimator):
        estimator = gradient
    else:
        if batch_size is None:
            assert found is not None
            batch_size = _cheapest_batch_size(posterior, found, noise(), gradient)
            batch_size_from = "computed"
        estimator = make_estimator(
            gradient,
            posterior,
            found,
            others,
            batching,
            batch_size,
            kept=noise().kept if keeps else None,
            static=static,
        )
    return Setup(
        name,
        posterior,
        estimator,
        found,
        joint_draws,
        step_size,
        thin,
        bias,
        noise,
        batch_size_from,
        rows if rows is None or isinstance(rows, str) else list(rows),
        isinstance(gradient, GradientEstimator),
    )


def check_center_setting(center: Any) -> None:
    """Refuse what is neither the name of a search nor a point.

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


def check_compile_kwargs(compile_kwargs: Any) -> None:
    """Refuse what `pytensor.function` does not take, or gets from the step method itself.

    Raises
    ------
    TypeError
    """
    taken = [
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
    unknown = [key for key in compile_kwargs if key not in taken]
    if unknown:
        raise TypeError(
            f"`compile_kwargs` should have some of the keys {', '.join(map(repr, taken))}, which "
            f"`pytensor.function` takes, but has {unknown[0]!r}."
        )


def check_determined(curvature: Curvature, posterior: Posterior) -> None:
    """Refuse a posterior that is so flat in a direction that its covariance is singular.

    Raises
    ------
    ModelError
    """
    if not curvature.is_dense:
        return
    try:
        covariance_root(curvature.covariance)
    except linalg.LinAlgError:
        numbers = dependent_coordinates(curvature.covariance)[:FEW_LABELS]
        names = ", ".join(f"`{posterior.labels[number]}`" for number in numbers)
        raise ModelError(
            f"The posterior is flat, or nearly so, in some combination of {names}: neither data "
            "nor priors determine it, and it may be improper. Give these variables proper priors, "
            "or leave out predictors that are combinations of others."
        ) from None


def check_rows_setting(rows: Any) -> None:
    """Refuse what is no name and no sequence of names.

    Raises
    ------
    TypeError
    """
    names = [rows] if isinstance(rows, str) or rows is None else rows
    if isinstance(names, Sequence) and all(one is None or isinstance(one, str) for one in names):
        return
    raise TypeError(
        "`rows` should be the name, or a list of names, of observed variables, `pm.Data` variables "
        f"or a dimension, but got {rows!r}."
    )


def check_bias(bias: float | None, step_size: StepSize | None) -> float:
    """Return the relative variance error that a user states, or the default.

    Raises
    ------
    TypeError, ValueError
        Where it is no number in (0, 1), or given beside a step size.
    """
    if bias is None:
        return VARIANCE_INFLATION
    bias = positive_number("bias", bias)
    if bias >= 1:
        raise ValueError(
            "`bias` is the relative error of the posterior variance that you accept, a number in "
            f"(0, 1) such as 0.05, but got {bias!r}."
        )
    if step_size is not None:
        raise ValueError(
            f"`bias` is the accuracy from which the step size is computed, but got both "
            f"bias={bias!r} and step_size={step_size!r}. Leave one of them out."
        )
    return bias


def _cheapest_batch_size(
    posterior: Posterior, center: Center, noise_of_rows: RowNoise, gradient: str | SVRG
) -> int:
    """Batch size for the preconditioner that is the inverse curvature."""
    root = center.curvature.root
    curvature = float(center.curvature.relative_to(root).max())
    squares = largest_mean_square(apply_to_rows(root, noise_of_rows.deviations))
    noise = noise_of_rows.n_rows**2 * squares / curvature
    if gradient != "plain" and gradient != "cv":
        noise *= 2  # their references are as far from the mode as the chain
    rows, matrix = _operations(posterior, center)
    rows_always = len(noise_of_rows.kept) * rows
    return choose_batch_size(noise, noise_of_rows.n_rows, rows, matrix + rows_always)


def _operations(posterior: Posterior, center: Center) -> tuple[int, int]:
    """Multiplications of a row's gradient, and of the preconditioner, in a transition."""
    matrix = center.curvature.covariance
    elements = 2 * matrix.vectors.size if isinstance(matrix, LowRank) else matrix.size
    return 4 * max(1, posterior.row_elements), 2 * elements


def default_thinning(step_size: float, curvature: float) -> int:
    """One relaxation time of Langevin dynamics in the direction of the largest curvature."""
    return int(np.clip(np.ceil(2 / (step_size * curvature)), 1, MOST_THINNING))


def default_preconditioner(
    preconditioner: str | float | np.ndarray | LowRank | None, step_size: StepSize | None
) -> str | np.ndarray | LowRank:
    """The curvature where the step size is computed with it, otherwise none.

    Raises
    ------
    TypeError, ValueError
        Where it is neither a name nor numbers.
    """
    if preconditioner is None:
        return "curvature" if step_size is None else "identity"
    if isinstance(preconditioner, LowRank):
        return preconditioner
    if isinstance(preconditioner, str):
        or_else = ", a positive number, a vector or a positive definite matrix"
        return one_of("preconditioner", preconditioner, PRECONDITIONERS, or_else)
    return as_array(
        "preconditioner", preconditioner, "a name, a positive number, a vector or a matrix"
    )


def is_curvature(preconditioner: str | float | np.ndarray | LowRank) -> bool:
    """Whether a preconditioner is the inverse curvature at the centre."""
    return isinstance(preconditioner, str) and preconditioner == "curvature"


def check_preconditioner(preconditioner: str | np.ndarray | LowRank, dimension: int) -> None:
    """Refuse one that is not positive definite or does not belong to so many coordinates.

    Raises
    ------
    ValueError
    """
    if isinstance(preconditioner, str):
        return
    shape = (
        (len(preconditioner),) * 2
        if isinstance(preconditioner, LowRank)
        else np.shape(preconditioner)
    )
    if shape not in ((), (dimension,), (dimension, dimension)):
        raise ValueError(
            f"`preconditioner` should be a number or have shape ({dimension},) or "
            f"({dimension}, {dimension}), but has shape {shape}."
        )
    matrix_root(preconditioner)


def make_estimator(
    gradient: str | SVRG,
    posterior: Posterior,
    center: Center | None,
    center_of_others: dict[str, np.ndarray],
    batching: str | None,
    batch_size: int,
    *,
    kept: np.ndarray | None,
    static: bool,
) -> GradientEstimator:
    """Gradient estimator with its minibatch scheme."""
    if gradient == "saga":
        if static:
            raise ValueError(
                '`gradient="saga"` does not run on JAX, which would copy the stored gradients of '
                'all rows at each call. Use `compile_kwargs={"mode": "NUMBA"}`, or '
                '`gradient="svrg"`.'
            )
        return SAGAGradient.make(posterior, batch_size, batching=batching)
    batching = batching or "shuffle"
    if gradient == "plain":
        scheme = make_batching(batching, posterior.data, batch_size, static=static)
        return PlainGradient(posterior, scheme)
    if gradient == "svrg":
        gradient = SVRG()
    if isinstance(gradient, SVRG):
        return SVRGGradient.make(
            posterior, batch_size, batching=batching, refresh=gradient.refresh, static=static
        )
    assert center is not None
    difference = find_center_difference(posterior, center.position, center_of_others)
    scheme = make_batching(
        batching,
        difference.data,
        batch_size,
        derived=difference.columns,
        static=static,
        excluded=kept,
    )
    return ControlVariateGradient(posterior, scheme, difference, center.likelihood_gradient, kept)


def _check_estimator(
    estimator: GradientEstimator,
    model: Model,
    vars: Sequence | None,
    batch_size: int | None,
    rows: str | Sequence[str] | None,
    batching: str | None,
    static: bool,
) -> None:
    """Refuse an estimator that was made for something else than the step method.

    Raises
    ------
    ValueError
    """
    given = {"batch_size": batch_size, "rows": rows, "batching": batching}
    twice = [f"`{name}`" for name, value in given.items() if value is not None]
    if twice:
        raise ValueError(
            f"`gradient` is a {type(estimator).__name__}, which has its own posterior and "
            f"minibatch scheme, but {' and '.join(twice)} {'is' if len(twice) == 1 else 'are'} "
            "given as well. Leave that out, or make the estimator with it."
        )
    has = estimator.posterior.layout.variables
    of_model = set(model.value_vars)
    foreign = [value.name for value in has if value not in of_model]
    if foreign:
        raise ValueError(
            f"`gradient` was made for the posterior of another model: {foreign} are no value "
            "variables of this one. Make it with `Posterior(model)` of the model that is sampled."
        )
    chosen = of_model if vars is None else set(value_variables(model, vars))
    if set(has) != chosen:
        raise ValueError(
            f"`gradient` was made for the variables {sorted(one.name for one in has)}, but the "
            f"step method is to move {sorted(str(one.name) for one in chosen)}. Give the same "
            "variables to `Posterior` and, as `vars`, to the step method."
        )
    if static and not estimator.batching.static:
        raise ValueError(
            "On JAX all shapes must be known, but the minibatch scheme of `gradient` was made "
            "without. Make it with `static=True`."
        )
    if static and estimator.memory is not None:
        raise ValueError(
            f"{type(estimator).__name__} does not run on JAX, which would copy its memory at each "
            'call. Use `compile_kwargs={"mode": "NUMBA"}`.'
        )


# --- Settings -------------------------------------------------------------------------------


def _center(
    model: Model,
    posterior: Posterior,
    center: str | Mapping[str, Any] | np.ndarray | None,
    rows: str | Sequence[str] | None,
    initial_point: Mapping[str, np.ndarray] | None,
) -> tuple[Center, dict[str, np.ndarray], list[dict[str, np.ndarray]] | None]:
    """Centre of the position, values of the other variables that belong to it, and joint draws.

    The draws are from the Gaussian approximation of all continuous variables together, None
    where the position has them all.
    """
    if center is not None and not isinstance(center, str):
        point = _center_point(model, posterior, center)
        posterior.set_others({**model.initial_point(), **point})
        position = posterior.layout.ravel(point)
        others = {name: np.array(shared.get_value()) for name, shared in posterior.others.items()}
        found = center_at(posterior, position)
        if not found.distance <= FARTHEST_GIVEN_CENTER:
            raise ValueError(
                f"`center` is more than {FARTHEST_GIVEN_CENTER:,.0f} posterior standard deviations "
                "away from the mode, where rounding hides the curvature of the log posterior. "
                "Leave it out to have the mode searched, or give a point near the mode."
            )
        check_given_center(found)
        return found, others, None

    method = center or "lbfgs"
    moved = [value for value in model.value_vars if value.dtype.startswith("float")]
    if posterior.others and len(moved) > len(posterior.layout.variables):
        # Other continuous variables start wherever they are, but the mode that matters for
        # the control variate is the joint one.
        joint = Posterior(model, moved, rows=rows, initial_point=initial_point, check=False)
        joint_center = find_center(joint, joint.initial_position, method)
        point = joint.layout.unravel(joint_center.position)
        joint_draws = laplace_draws(joint, joint_center, NOISE_POINTS)
        posterior.set_others({**model.initial_point(), **point})
        found = center_at(posterior, posterior.layout.ravel(point))
    else:
        found = find_center(posterior, posterior.initial_position, method)
        joint_draws = None
    others = {name: np.array(shared.get_value()) for name, shared in posterior.others.items()}
    return found, others, joint_draws


def _center_from(
    init: Any, model: Model, posterior: Posterior, center: Any
) -> tuple[Center, dict[str, np.ndarray]]:
    """Centre from an approximation that the user has."""
    if center is not None:
        raise ValueError("`init` and `center` both say where the centre is. Leave one of them out.")
    if posterior.others:
        raise ValueError(
            "`init` is for a step method that has all variables of the model, but others move "
            f"{sorted(posterior.others)}. Leave it out, or give `center`."
        )
    position, curvature = initial_gaussian(init, model, posterior)
    return center_of(posterior, position, curvature), {}


def _center_point(
    model: Model, posterior: Posterior, center: Mapping[str, Any] | np.ndarray
) -> dict[str, np.ndarray]:
    """Values of the value variables for a centre given by the user."""
    if not isinstance(center, Mapping):
        position = as_array("center", center, CENTERS)
        if position.shape != (posterior.dimension,):
            raise ValueError(
                f"`center` should be a mapping from names to values or an array of shape "
                f"({posterior.dimension},), but has shape {position.shape}."
            )
        if not np.isfinite(position).all():
            raise ValueError("`center` should be finite, but has NaN or infinite entries.")
        return posterior.layout.unravel(position)

    wanted = {model.values_to_rvs[value].name: value.name for value in posterior.layout.variables}
    given = {wanted.get(name, name): name for name in center}
    unknown = [name for value_name, name in given.items() if value_name not in wanted.values()]
    missing = [name for name, value_name in wanted.items() if value_name not in given]
    if unknown or missing:
        raise ValueError(
            f"`center` should give values of {sorted(wanted)}, but "
            + (f"has the unknown names {sorted(unknown)}" if unknown else "")
            + (" and " if unknown and missing else "")
            + (f"lacks {sorted(missing)}" if missing else "")
            + "."
        )
    values = {}
    shapes = dict(zip(posterior.layout.names, posterior.layout.shapes, strict=True))
    for name, value_name in wanted.items():
        variable = model.named_vars[name]
        value = as_array(f"center['{given[value_name]}']", center[given[value_name]])
        transformed = given[value_name] != name
        expected = shapes[value_name] if transformed else tuple(shape_of(variable))
        if value.shape != expected:
            raise ValueError(
                f"`center` for `{given[value_name]}` should have shape {expected}, but has "
                f"shape {value.shape}."
            )
        if not np.isfinite(value).all():
            raise ValueError(
                f"`center` for `{given[value_name]}` should be finite, but has NaN or infinite "
                "entries."
            )
        values[given[value_name]] = value
    point = make_initial_point_fn(
        model=model, overrides=values, return_transformed=True, jitter_rvs=set()
    )(0)
    return {name: point[name] for name in posterior.layout.names}
