"""The parts of a sampler, each of which is computed at its first use.

Each part of `Setup` depends on earlier ones: settings, posterior, centre, noise of the rows, batch
size, gradient estimator, step size. A sampler reads what it needs and returns a `Design`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pytensor
from pytensor.compile.sharedvalue import SharedVariable

from pymc_sgmcmc.adaptation import Adaptation
from pymc_sgmcmc.batching import ANY_NOISE, MOST_COPIED, check_batch_size
from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.dynamics import EULER, Dynamics, Law
from pymc_sgmcmc.errors import BatchSizeWarning, ModelError, warn
from pymc_sgmcmc.gradient_estimators import FullGradient, GradientEstimator
from pymc_sgmcmc.guests import remedy
from pymc_sgmcmc.matrices import SCATTERED, Matrix, as_matrix, largest_mean_square
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.check_rows import check_rows
from pymc_sgmcmc.record import LARGEST_MEAN_ERROR
from pymc_sgmcmc.schedules import MOST_THINNING, StepSize
from pymc_sgmcmc.stages import log, stage
from pymc_sgmcmc.step_methods.center import center_asked_for, given_point
from pymc_sgmcmc.step_methods.estimators import (
    SAGA,
    Estimator,
    JointCenter,
    OfMinibatches,
    Parts,
    SampledVariables,
)
from pymc_sgmcmc.step_methods.mirror import (
    check_at_zero,
    check_mirror,
    coordinates,
    mirrored_variables,
)
from pymc_sgmcmc.step_methods.settings import (
    Settings,
    check_estimator,
    check_preconditioner,
    default_preconditioner,
    is_curvature,
)
from pymc_sgmcmc.tuning import (
    GATHERED,
    Center,
    RowNoise,
    StepSizeChoice,
    choose_batch_size,
    choose_step_size,
    has_dense_curvature,
    least_cost,
    row_noise,
)

GROUPS_BESIDE = 5
"""Where groups are the rows, a transition has a fixed cost as large as that of this many groups:
19 microseconds beside 4.2 a group of ten records and nine nodes."""

OPERATIONS_OF_NODES = 125
"""Where groups are the rows, their quadrature takes so many times the multiplications of the
records alone, which is measured with nine nodes."""

OPERATIONS_OF_EFFECTS = 1000
"""A row of a minibatch that selects effects costs as much as this many multiplications: its entries
are gathered and scattered, which takes 50 to 200 nanoseconds."""

READING_HINT = "Write a loop of variables as one variable with an index."
PASS_HINT = "More threads share a pass: set OMP_NUM_THREADS before Python starts."
NOISE_HINT = "With `step_size`, `preconditioner` and `batch_size` it is not needed."

NOISE_WARNING = 1.0
"""A warning follows where the gradient noise is more than this many times the largest curvature.
The step is then less than half of what the curvature alone would allow."""

MOST_LENGTHENING = 16
"""After tuning a draw has at most this many times the computed number of transitions. It is a
compromise between effective draws and the time of a run, which may grow by this factor."""

ALLOWED_ROUNDING = 0.1
"""Rounding may take this part of the stated error, as sums over rows round more than once."""

TIMES_BESIDE_OTHERS = 3
"""Averaged noises belong to values of the other variables that change after each draw. The error of
a standard deviation is then at most a tenth, times exp(-k) for draws of k relaxation times."""

FAR_MEAN = 1.0
"""An error of a mean beyond this many standard deviations is not small enough for the first order
in which it is computed, and no small `bias` mends it."""

IMPLAUSIBLE_NOISE = 1e4
"""Noise of more than this many times the curvature points to a fault of the model, such as an
improper posterior, rather than to the size of the minibatch."""


@dataclass(frozen=True)
class Pace:
    """Step size and thinning of a chain.

    Attributes
    ----------
    step_size : float or callable
    thin : int
        Transitions a recorded draw.
    choice : StepSizeChoice or None
        Noise and curvature from which the step size was computed.
    most_thin : int or None
        Most transitions a draw after tuning, None where tuning leaves them.
    """

    step_size: StepSize
    thin: int
    choice: StepSizeChoice | None = None
    most_thin: int | None = None


@dataclass(frozen=True)
class Design:
    """A sampler for one posterior.

    Attributes
    ----------
    dynamics : Dynamics
    pace : Pace
    adaptations : tuple of Adaptation
        Settings of the dynamics that change between blocks of transitions.
    watch : callable, optional
        A function of the statistics of a draw that returns a warning about the chain, or None. It
        is called at the end of tuning and at the end of the chain.
    begins_at_center : bool
        Whether chains begin around the centre, where there is one.
    remedy : str, optional
        Advice after a chain became NaN or infinite, where it is not a smaller step size.
    """

    dynamics: Dynamics
    pace: Pace
    adaptations: tuple[Adaptation, ...] = field(default=())
    watch: Callable[[Mapping[str, Any]], str | None] | None = None
    begins_at_center: bool = True
    remedy: str | None = None

    @property
    def closed_form(self) -> StepSizeChoice | None:
        """Noise and curvature of the step size, where that has the closed form."""
        return None if self.dynamics.law is None else self.pace.choice


@dataclass(frozen=True)
class Kind:
    """What a sampler takes, and what its law is.

    Attributes
    ----------
    takes_low_rank : bool
        Whether the dynamics take a curvature that is known by products alone.
    keeps_rows : bool
        Whether some rows may be in each minibatch, so that only the other rows cause the noise V.
    bounds_noise : bool
        Whether a computed step size keeps what the noise adds to the variance within `bias`.
    takes_all_rows : bool
        Whether the gradient is that of all rows, whatever the setting.
    is_exact : bool
        Whether the law of a chain is the posterior, so that there is no bias to state.
    is_metropolis : bool
        Whether proposals outside of the support are refused.
    has_preconditioner : bool
        Whether the dynamics take a fixed matrix, and not one of their own.
    mirrors : str
        Settings with which positive variables without a transform are mirrored at zero, empty where
        they are refused.
    takes_local : bool
        Whether the gradient estimator may sample local variables, so that it has a memory.
    """

    takes_low_rank: bool = False
    keeps_rows: bool = True
    bounds_noise: bool = False
    takes_all_rows: bool = False
    is_exact: bool = False
    is_metropolis: bool = False
    has_preconditioner: bool = True
    mirrors: str = ""
    takes_local: bool = True


class Setup:
    """Everything that is known about a posterior when a sampler is made for it.

    Parameters
    ----------
    name : str
        Name of the step method, for messages.
    settings : Settings
    kind : Kind
    law : Law
        The law by which step size and batch size are computed.

    Attributes
    ----------
    posterior : Posterior
    model : pymc.Model
        The model that is sampled.
    matrix : str, numpy.ndarray, Matrix or None
        The preconditioner that was given, or is the default, where the sampler takes one.
    mirrored_names : list of str
        Names of the positive variables that are mirrored at zero.
    local : SampledVariables or None
        Variables that the gradient estimator samples. The posterior is that of the others.
    """

    def __init__(self, name: str, settings: Settings, kind: Kind, law: Law = EULER):
        self.name, self.law = name, law
        self.model = settings.model
        self.matrix = (
            default_preconditioner(settings.preconditioner, settings.step_size)
            if kind.has_preconditioner
            else None
        )
        estimator = settings.estimator
        self.local: SampledVariables | None = None
        if isinstance(estimator, Estimator):
            if not (kind.takes_local or isinstance(estimator, OfMinibatches)):
                raise ValueError(
                    f"`{name}` samples no local variables, but got {estimator!r}. Use `SGLDCV`, or "
                    "`marginalize`."
                )
            self.local = estimator.sampled(settings)
        if self.local is not None:
            settings = self.local.settings
        self.settings = settings
        self.bias = settings.bias
        self.kind = kind
        if isinstance(estimator, GradientEstimator):
            check_estimator(estimator, settings)
            self.posterior = estimator.posterior
        else:
            with stage("Reading the model", READING_HINT):
                self.posterior = self._read(kind)
        self.mirrored_names = mirrored_variables(
            self.model,
            self.posterior.layout,
            mirror=bool(kind.mirrors),
            is_metropolis=kind.is_metropolis,
        )
        if self.matrix is not None:
            check_preconditioner(self.matrix, self.posterior.dimension)
        if self.mirrored_names:
            check_mirror(self.matrix)
            if settings.order or self.local is not None:
                raise self._needs_mode
            check_at_zero(self.posterior, self.mirrored_names)
            log.info(
                "%s: %s, positive without a transform, %s mirrored at zero",
                name,
                quoted(self.mirrored_names),
                "is" if len(self.mirrored_names) == 1 else "are",
            )
        if self.posterior.source is not None:
            self._check_source()
        with stage("Checking the rows", PASS_HINT):
            check_rows(self.posterior)
        self._batch_size, self.batch_size_from = self._batch_size_given()
        if self.posterior.others and self.posterior.model_batch_size is not None:
            warn(
                "The model uses `pm.Minibatch`, but the step method has only some of its "
                "variables, and the others would see one fixed minibatch. Build the model on the "
                "full arrays, and pass `batch_size` to the step method.",
                UserWarning,
            )
        self._noise_share = 1.0 if kind.bounds_noise and settings.step_size is None else ANY_NOISE
        # Every transition evaluates the same rows only where the batch size is computed, and where
        # few rows can cause most of the noise.
        self._keeps_rows = (
            kind.keeps_rows
            and has_dense_curvature(self.posterior)
            and settings.order > 0
            and self._batch_size is None
            and self.local is None
        )

    def _read(self, kind: Kind) -> Posterior:
        """The posterior of the model.

        Raises
        ------
        ModelError
            Where the model has no rows, with what can be done about it.
        """
        settings = self.settings
        if self.local is not None:
            return self.local.posterior()
        try:
            return Posterior(
                settings.model,
                settings.vars,
                rows=settings.rows,
                needs_rows=not kind.takes_all_rows,
                checked=kind.is_metropolis,
                standardizes=kind.takes_low_rank and settings.order > 0 and settings.center is None,
            )
        except ModelError as error:
            if error.local is None:
                raise
            call = remedy(settings.model, [error.local])
            raise ModelError(f"{error} Use {call or 'NUTS'}.") from error.__cause__

    def mirrored(self) -> SharedVariable | None:
        """The coordinates that are mirrored at zero, for dynamics."""
        if not self.mirrored_names:
            return None
        return self.shared(coordinates(self.posterior.layout, self.mirrored_names), "mirrored")

    @property
    def _needs_mode(self) -> ValueError:
        """The error of settings that need the mode, where variables are mirrored at zero."""
        return ValueError(
            f"`{self.name}` searches no mode where {quoted(self.mirrored_names)} is mirrored at "
            f"zero, since it may be there. Write `{self.name}({self.kind.mirrors})`, without "
            "`center`, or leave out `default_transform=None`."
        )

    def _check_source(self) -> None:
        """Refuse what needs all rows in memory.

        Raises
        ------
        ValueError
        """
        if self.kind.takes_all_rows:
            raise ValueError(
                f"`{self.name}` takes all rows in each transition, but `rows` are in a source. Use "
                "`SGLDCV`."
            )
        if isinstance(self.settings.estimator, SAGA):
            raise ValueError(
                '`gradient="saga"` keeps a gradient of each row in memory, but `rows` are in a '
                'source. Use `gradient="cv"` or "svrg".'
            )

    def _batch_size_given(self) -> tuple[int | None, str]:
        """Batch size that the settings or the model give, or None, and its origin."""
        settings, posterior = self.settings, self.posterior
        if isinstance(settings.estimator, GradientEstimator):
            return settings.estimator.batching.batch_size, "given"
        if self.kind.takes_all_rows:
            return posterior.n_rows, "given"
        if settings.batch_size is not None:
            return check_batch_size(settings.batch_size, posterior.n_rows), "given"
        if posterior.model_batch_size is not None:
            return check_batch_size(posterior.model_batch_size, posterior.n_rows), "the model"
        return None, "computed"

    # --- Centre ------------------------------------------------------------------------------

    @cached_property
    def _joint_center(self) -> JointCenter:
        if self.local is not None and not self.local.searches_center:
            if self.settings.center is None:
                raise ValueError(
                    f"`{self.name}` with local variables computes a centre only where it computes "
                    "step size and batch size as well, for up to six local quantities a group. "
                    "Leave these out, or give a `center`."
                )
            point = given_point(self.settings, self.posterior)
            position = self.posterior.layout.ravel(point)
            return JointCenter(self.local.center_at(self.posterior, position), {})
        if self.mirrored_names:
            raise self._needs_mode
        with stage("Finding the centre", PASS_HINT):
            joint_center = center_asked_for(self.settings, self.posterior)
        if self.kind.takes_low_rank:
            return joint_center
        curvature = joint_center.center.curvature.without_directions()
        return replace(joint_center, center=replace(joint_center.center, curvature=curvature))

    @property
    def center(self) -> Center:
        """The centre, searched or as given."""
        return self._joint_center.center

    @property
    def known_center(self) -> Center | None:
        """The centre where it was given or has been computed, and None otherwise."""
        is_given = self.settings.center is not None
        return self.center if is_given or "_joint_center" in vars(self) else None

    @property
    def joint_draws(self) -> list[dict[str, np.ndarray]] | None:
        """Points of all continuous variables around a known centre, see `JointCenter`."""
        return None if self.known_center is None else self._joint_center.joint_draws

    def mean_error(self, inflation: float) -> tuple[str, float] | None:
        """Label and size of the largest error of a mean beside this error of variances, if known.

        The size is in posterior standard deviations and to first order, see `Center`.
        """
        center = self.known_center
        if self.kind.is_exact or center is None or center.bend is None:
            return None
        errors = inflation * np.abs(center.bend)
        worst = int(np.argmax(errors))
        return str(self.posterior.labels[worst]), float(errors[worst])

    # --- Gradient ----------------------------------------------------------------------------

    @cached_property
    def _order(self) -> int:
        """Order of the control variates at the centre, 0 without them."""
        order, posterior = self.settings.order, self.posterior
        if order < 2:
            return order
        matrices = 1 if posterior.has_second_derivatives else posterior.n_rows
        too_large = 8 * matrices * posterior.dimension**2 > MOST_COPIED
        reason = None
        if self.center.of_rows is not None:
            if not posterior.has_second_derivatives:
                reason = "have no second derivatives"
        elif too_large or not has_dense_curvature(posterior):
            reason = f"would take {matrices} matrices of {posterior.dimension} coordinates"
        elif self._rounding > ALLOWED_ROUNDING * self.bias:
            reason = f"drown in the rounding of {posterior.dtype}: center predictors or use float64"
        if reason is None:
            return order
        log.info("%s: control variates of first order, since those of second %s", self.name, reason)
        return 1

    @property
    def _rounding(self) -> float:
        """Relative error of a variance where the curvature of each coordinate is rounded."""
        curvature = self.center.curvature
        conditional = curvature.conditional_deviations
        inflation = (curvature.standard_deviations / conditional) ** 2
        return float(np.finfo(self.posterior.dtype).eps * inflation.sum())

    @cached_property
    def noise(self) -> RowNoise:
        """Noise of the gradients of single rows around the centre."""
        if self.local is not None:
            return self.local.noise(self.center)
        reduces_variance = self.kind.takes_all_rows or self.settings.estimator.reduces_variance
        operations = _operations(self.posterior, self.center)
        with stage("Measuring the noise of the rows", NOISE_HINT):
            return row_noise(
                self.posterior,
                self.center,
                order=self._order or int(reduces_variance),
                joint_draws=self.joint_draws,
                cost=partial(least_cost, operations=operations, law=self.law, error=self.bias)
                if self._keeps_rows
                else None,
            )

    @cached_property
    def _noise_along_curvature(self) -> float:
        """Largest eigenvalue of L⊤ C L for the rows' covariance C and the curvature's root L."""
        return largest_mean_square(self.noise.deviations, self.center.curvature.root)

    @cached_property
    def estimator(self) -> GradientEstimator:
        """Gradient estimator with its minibatch scheme."""
        estimator, static = self.settings.estimator, self.settings.on_jax
        if isinstance(estimator, GradientEstimator):
            return estimator
        if self.kind.takes_all_rows:
            return FullGradient(self.posterior, static=static)
        batch_size = self._batch_size
        if batch_size is None:
            batch_size = self._cheapest_batch_size()
        in_memory = self.posterior.source is None and not self.posterior.rows_are_groups
        all_rows = self._batch_size is None and batch_size == self.posterior.n_rows and in_memory
        if all_rows and self.local is None:
            return FullGradient(self.posterior, static=static)
        is_known = self.settings.order or self.known_center is not None
        parts = Parts(
            posterior=self.posterior,
            batch_size=batch_size,
            joint_center=self._joint_center if is_known else None,
            order=self._order if self.local is None else 0,
            kept=self.noise.kept if self._keeps_rows else None,
            static=static,
            noise_share=self._noise_share,
        )
        return (self.local or estimator).make(parts)

    def _cheapest_batch_size(self) -> int:
        """Batch size at least cost where the preconditioner is the inverse curvature."""
        curvature, noise_of_rows = self.center.curvature, self.noise
        largest = float(curvature.relative_to(curvature.root).max())
        noise = noise_of_rows.n_rows**2 * self._noise_along_curvature / largest
        if self.settings.estimator.reduces_variance and not self.settings.order:
            noise *= 2  # Positions of reference vary about the centre as much as the chain.
        rows, matrix = _operations(self.posterior, self.center)
        rows_always = len(noise_of_rows.kept) * rows
        return choose_batch_size(
            noise,
            noise_of_rows.n_rows,
            rows,
            matrix + rows_always,
            noise_of_rows.largest / largest,
            law=self.law,
            error=self.bias,
            gathered=1.0 if self.posterior.coordinates is None else GATHERED,
        )

    def gradient_deviations(self) -> np.ndarray:
        r"""Rows whose sum of outer products is V, the covariance of the gradient estimate.

        Shape (rows, d), for a random set of rows of the data.
        """
        deviations = self.noise.deviations
        batching = self.estimator.batching
        scale = batching.n_rows**2 / batching.batch_size * batching.variance_factor
        rows = deviations * np.sqrt(scale / deviations.shape[0])
        of_noise, of_curvature = self.estimator.noise_factors
        curvature = self.center.curvature
        rows = rows * np.sqrt(of_noise)
        if not of_curvature or not curvature.is_dense:
            # A diagonal of so many dimensions has no root with few rows, and is much smaller.
            return rows
        root = curvature.precision.root.dense()
        return np.concatenate([rows, root.T * np.sqrt(of_curvature)])

    # --- Dynamics ----------------------------------------------------------------------------

    def shared(self, values: np.ndarray | float, name: str | None = None) -> SharedVariable:
        """Shared variable in the floating type of the position, of static shape.

        A vector of length one broadcasts only with a static shape.
        """
        values = np.asarray(values, dtype=self.posterior.dtype)
        static = {"shape": values.shape} if values.ndim else {}
        return pytensor.shared(values, name, **static)

    def preconditioner(self) -> tuple[Matrix, Matrix]:
        """Preconditioner M and a root L with M = L Lᵀ, of the same kind."""
        assert self.matrix is not None
        if is_curvature(self.matrix):
            return self.center.curvature.covariance, self.center.curvature.root
        matrix = as_matrix(1.0 if isinstance(self.matrix, str) else self.matrix)
        return matrix, matrix.root

    # --- Step size ---------------------------------------------------------------------------

    def choose_step_size(self, root: Matrix) -> StepSizeChoice:
        """Step size in closed form for a preconditioner M = L Lᵀ."""
        if root is self.center.curvature.root:
            noise = self._noise_along_curvature
        else:
            noise = largest_mean_square(self.noise.deviations, root)
        return choose_step_size(
            self.center,
            root,
            self.estimator.batching,
            row_noise=noise,
            noise_factors=self.estimator.noise_factors,
            inflation=self.bias,
            law=self.law,
            largest=self.noise.largest,
        )

    def closed_form(self, root: Matrix, *, tuned: bool = False) -> Pace:
        """Step size in closed form, and relaxation times a draw: one, or more beside other steps.

        Both change at the end of tuning where the step size is `tuned`.
        """
        times = TIMES_BESIDE_OTHERS if self.law.averaged and self.posterior.others else 1
        return paced(self.choose_step_size(root), tuned=tuned, relaxation_times=times)

    def pace(self, compute: Callable[[], Pace], thin: int = 1) -> Pace:
        """Step size and thinning as given, or computed and logged.

        Parameters
        ----------
        compute : callable
            Function that is called where no step size was given.
        thin : int
            Thinning where a step size was given without it.
        """
        if self.settings.step_size is not None:
            return Pace(self.settings.step_size, self.settings.thin or thin)
        pace = compute()
        if self.settings.thin is not None:
            pace = replace(pace, thin=self.settings.thin, most_thin=None)
        if pace.choice is not None:
            self.report(pace)
        return pace

    def report(self, pace: Pace) -> None:
        """Log the settings that were computed, and warn where noise limits them."""
        choice, step_size = pace.choice, pace.step_size
        assert choice is not None
        assert not callable(step_size)
        batching = self.estimator.batching
        kept_rows = self.estimator.kept_rows
        rows = f"{batching.batch_size} of {batching.n_rows} rows a minibatch"
        log.info(
            "%s: step size %.3g, %d transitions a draw%s, %s%s "
            "(gradient noise %.2g, curvature %.2g)",
            self.name,
            step_size,
            pace.thin,
            f" (up to {pace.most_thin} after tuning)" if pace.most_thin else "",
            rows if self.posterior.has_rows else "no data",
            f" beside {kept_rows} rows in each" if kept_rows else "",
            choice.noise,
            choice.curvature,
        )
        # Averaged noises leave what the noise of the gradients adds, and Euler's scheme all of it.
        inflation = self.law.inflation(choice.step_size, choice.noise, choice.curvature)
        label, error = self.mean_error(inflation) or ("", 0.0)
        if error > LARGEST_MEAN_ERROR:
            log.warning(
                "%s: with variances too large by %.2g the mean of `%s` is off by up to about %.1g "
                "standard deviations, as the posterior is skewed. %s",
                self.name,
                inflation,
                label,
                error,
                f"Use `bias={self.bias * LARGEST_MEAN_ERROR / error:.1g}` where that matters."
                if error < FAR_MEAN
                else "Integrate out group effects, change the parametrisation, or use NUTS.",
            )
        relaxation = 2 / (step_size * choice.smallest_curvature)
        if pace.thin == MOST_THINNING and relaxation > 2 * MOST_THINNING:
            log.warning(
                "%s: the relaxation time is %.3g transitions, but a draw has only %d: expect few "
                "effective draws. Use a larger `bias`, or less gradient noise by more rows a "
                "minibatch.",
                self.name,
                relaxation,
                MOST_THINNING,
            )
        ratio = choice.noise / choice.curvature
        # For control variates a computed batch size already balances noise and cost.
        weighed = self.batch_size_from == "computed" and self.estimator.reduces_variance
        if ratio > (IMPLAUSIBLE_NOISE if weighed else NOISE_WARNING):
            warn(_noise_message(choice, batching, self.estimator), BatchSizeWarning)


def _noise_message(choice: StepSizeChoice, batching, estimator: GradientEstimator) -> str:
    remedy, ratio = estimator.remedy, choice.noise / choice.curvature
    if ratio > IMPLAUSIBLE_NOISE:
        remedy += (
            ". The posterior may also be improper or have no mode, as with separated outcomes "
            "under a flat prior"
        )
    return (
        f"The noise of a gradient from {batching.batch_size} of {batching.n_rows} rows is "
        f"{ratio:.3g} times the curvature, which makes the chain slow. Use about "
        f"`{batching.setting(choice.batch_size_needed)}`, {remedy}."
    )


def _operations(posterior: Posterior, center: Center) -> tuple[int, int]:
    """Multiplications in a transition for the gradient of a row and for the preconditioner."""
    elements = center.curvature.covariance.cost
    rows = 4 * max(1, posterior.row_elements)
    if center.of_rows is not None:
        elements += SCATTERED * center.of_rows.nnz
        rows += OPERATIONS_OF_EFFECTS
    rows *= OPERATIONS_OF_NODES if posterior.rows_are_groups else 1
    return rows, 2 * elements + (GROUPS_BESIDE * rows if posterior.rows_are_groups else 0)


def paced(choice: StepSizeChoice, *, tuned: bool, relaxation_times: int = 1) -> Pace:
    """Step size in closed form, and so many relaxation times a draw."""
    thin = relaxation_times * default_thinning(choice.step_size, choice.smallest_curvature)
    thin = min(thin, MOST_THINNING)
    most_thin = max(thin, min(MOST_LENGTHENING * thin, MOST_THINNING)) if tuned else None
    return Pace(choice.step_size, thin, choice, most_thin)


def default_thinning(step_size: float, curvature: float) -> int:
    """One relaxation time of Langevin dynamics in a direction of this curvature.

    The slowest direction is that of the smallest curvature.
    """
    if step_size * curvature <= 2 / MOST_THINNING:
        return MOST_THINNING
    # Where all directions are alike the curvatures are equal up to rounding.
    return max(1, int(np.ceil((1 - 1e-6) * EULER.relaxation_time(step_size, curvature))))
