"""Stochastic gradient Langevin dynamics as step methods."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytensor
from pymc.initial_point import make_initial_point_fn
from pymc.model import Model, modelcontext

from pymc_sgmcmc.batching import check_batch_size, make_batching
from pymc_sgmcmc.center_difference import find_center_difference
from pymc_sgmcmc.dynamics import Langevin
from pymc_sgmcmc.engine import TransitionBlock, is_jax_mode
from pymc_sgmcmc.errors import BatchSizeWarning, ModelError
from pymc_sgmcmc.gradients import ControlVariateGradient, GradientEstimator, PlainGradient
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.schedules import StepSize, check_step_size
from pymc_sgmcmc.step_methods.base import JAX_BLOCK_TRANSITIONS, StochasticGradientStep
from pymc_sgmcmc.tuning import (
    Center,
    StepSizeChoice,
    center_at,
    choose_step_size,
    find_center,
    laplace_draws,
    matrix_root,
)

_log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold

MOST_THINNING = 100
"""Bound on the default number of transitions a recorded draw."""

NOISE_WARNING = 1.0
"""Gradient noise, in units of the largest curvature, above which it is worth a warning."""

IMPLAUSIBLE_NOISE = 1e4
"""Gradient noise, in units of curvature, that points at the model and not at the minibatch."""


class SGLD(StochasticGradientStep):
    r"""Stochastic gradient Langevin dynamics.

    .. math:: \theta' = \theta + \tfrac{h}{2} M \hat\nabla(\theta) + N(0, h M)

    with :math:`\hat\nabla` an unbiased estimate of the gradient of the log posterior from a
    minibatch of rows. Welling and Teh (2011), eq. 4, with M = I; no accept-reject step.

    **Law.** The chain leaves invariant not the posterior but a law near it: on a Gaussian
    posterior with precision H it has the right mean and, for small h, a covariance too large
    by the relative amount :math:`\tfrac{h}{4}(MV + MH)`, with V the covariance of the gradient
    estimate. With a plain gradient V grows with N at a fixed batch size, so h must shrink:
    prefer `SGLDCV` on large data.

    **Cost.** One gradient of n rows a transition, independent of N.

    Parameters
    ----------
    vars : sequence of variables, optional
        Continuous free variables, in any order; all of the model where not given.
    batch_size : int, optional
        Rows n a minibatch. Needed for an ordinary model; for a model with `pymc.Minibatch`
        it replaces the model's own.
    rows : str or sequence of str, optional
        Names of observed variables, `pymc.Data` variables or a dimension that run over the
        rows, for ordinary models in which this is ambiguous.
    step_size : float or callable, optional
        h, or a function of the transition number (from 0) such as `PolynomialDecay`. Where
        not given, the closed form :math:`h = 4\delta / (\lambda_{\max}(MV) +
        \lambda_{\max}(MH))` for a variance inflation :math:`\delta` of 5 %.
    preconditioner : {"curvature", "identity"}, float, (d,) or (d, d) array, optional
        M, symmetric positive definite, fixed. "curvature" is the inverse curvature at the
        centre, dense up to d = 500 and diagonal beyond. Default: "curvature" where the step
        size is computed, "identity" where it is given.
    gradient : {"plain", "cv"}
        Estimator of the gradient: the scaled minibatch gradient, or that of Baker et al.
        with control variates at the centre.
    center : {"lbfgs", "sgd"}, mapping or (d,) array, optional
        How to find the point near the mode at which curvature, control variates and the
        start of the chains lie: by L-BFGS on gradients of all rows (default), by one pass of
        stochastic Newton steps, or the point itself: values of all variables by name, or the
        unconstrained position. Not computed where nothing needs it.
    thin : int, optional
        Transitions a recorded draw. Default: one relaxation time, at most 100, where the
        step size is computed, and 1 where it is given.
    batching : {"shuffle", "replace"}
        Windows of rows in random order (without replacement), or independent rows with
        replacement.
    model : pymc.Model, optional
    initial_point : mapping, optional
        Values of all value variables, as PyMC passes them.
    compile_kwargs : dict, optional
        For the transitions, passed to `pytensor.function`: ``{"mode": "NUMBA"}`` (the
        default), ``"CVM"`` or ``"JAX"``.
    blocked : bool
        Sample the variables together; the only choice that makes sense here.
    rng : optional
        Seed or generator for use outside `pymc.sample`.

    Raises
    ------
    ModelError
        Where the model's rows cannot be told apart, or `batch_size` is missing.
    ValueError, TypeError
        For invalid settings; each message says what was given and what should be.

    Warns
    -----
    BatchSizeWarning
        Where the noise of the gradient makes the computed step much smaller than
        curvature would; it names the batch size at which it would not.
    CenterWarning
        Where the search for the mode failed, or the posterior around it is far from Gaussian.

    Notes
    -----
    `sample_stats` has, for each draw, the unconstrained ``position``, the ``gradient``
    estimate there (the one that makes the next transition), its norm ``gradient_norm``, and
    the ``step_size``. Chains begin at the centre, displaced by one draw from the Laplace
    approximation, unless `initvals` other than the model's initial point are given to
    `pymc.sample`. The data are those at the time when the step method was made: sampling after
    `pymc.set_data` is refused.

    References
    ----------
    M. Welling and Y. W. Teh (2011). Bayesian learning via stochastic gradient Langevin
    dynamics. *ICML*.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> rng = np.random.default_rng(1)
    >>> x = rng.normal(size=1000)
    >>> with pm.Model():
    ...     slope = pm.Normal("slope", 0, 10)
    ...     _ = pm.Normal("y", slope * x, 1.0, observed=2 * x + rng.normal(size=1000))
    ...     step = SGLD(batch_size=1000, compile_kwargs={"mode": "FAST_COMPILE"})
    ...     idata = pm.sample(
    ...         step=step, draws=200, tune=0, chains=1, random_seed=1, progressbar=False, quiet=True
    ...     )
    >>> bool(abs(idata.posterior["slope"].mean() - 2) < 0.1)
    True
    """

    name = "sgld"

    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        batch_size: int | None = None,
        rows: str | Sequence[str] | None = None,
        step_size: StepSize | None = None,
        preconditioner: str | float | np.ndarray | None = None,
        gradient: str = "plain",
        center: str | Mapping[str, Any] | np.ndarray | None = None,
        thin: int | None = None,
        batching: str = "shuffle",
        model: Model | None = None,
        initial_point: Mapping[str, np.ndarray] | None = None,
        compile_kwargs: dict | None = None,
        blocked: bool = True,
        rng: Any = None,
    ):
        model = modelcontext(model)
        if compile_kwargs is not None and not isinstance(compile_kwargs, Mapping):
            raise TypeError(
                "`compile_kwargs` should be a mapping such as {'mode': 'CVM'}, but got "
                f"{compile_kwargs!r}."
            )
        if gradient not in ("plain", "cv"):
            raise ValueError(f"`gradient` should be 'plain' or 'cv', but got {gradient!r}.")
        if step_size is not None:
            step_size = check_step_size(step_size)
        thin = _check_thin(thin)
        if preconditioner is None:
            preconditioner = "curvature" if step_size is None else "identity"
        if batch_size is not None:
            check_batch_size(batch_size, np.iinfo(np.int64).max)

        posterior = Posterior(model, vars, rows=rows, initial_point=initial_point)
        batch_size = _resolve_batch_size(posterior, batch_size, type(self).__name__)
        owns_all = not posterior.others
        if not owns_all and posterior.model_batch_size is not None:
            warnings.warn(
                "The model uses `pm.Minibatch`, and the step method has only some of its "
                "variables. PyMC's own step methods for the others would see one fixed "
                "minibatch for ever. Build the model on the full arrays and pass "
                f"`batch_size={batch_size}` to the step method instead.",
                UserWarning,
                stacklevel=2,
            )
        needs_center = (
            gradient == "cv"
            or step_size is None
            or center is not None
            or (isinstance(preconditioner, str) and preconditioner == "curvature")
        )
        self.center: Center | None = None
        others: dict[str, np.ndarray] = {}
        joint_draws = None
        if needs_center:
            self.center, others, joint_draws = _center(
                model, posterior, center, rows, initial_point
            )
        matrix = _preconditioner_matrix(preconditioner, self.center, posterior.dimension)
        root = matrix_root(matrix)
        on_jax = is_jax_mode(compile_kwargs)
        estimator = _estimator(
            gradient, posterior, self.center, others, batching, batch_size, static=on_jax
        )
        if step_size is None:
            assert self.center is not None
            choice = choose_step_size(
                posterior,
                self.center,
                root,
                estimator.batching,
                control_variate=gradient == "cv",
                joint_draws=joint_draws,
            )
            step_size = choice.step_size
            thin = thin or _default_thinning(choice)
            _report(type(self).__name__, choice, estimator.batching, thin, gradient)
        thin = thin or 1

        block = TransitionBlock(
            Langevin(
                _shared(matrix.astype(posterior.dtype), "preconditioner"),
                _shared(root.astype(posterior.dtype), "preconditioner_root"),
            ),
            estimator,
            compile_kwargs,
            static_length=max(JAX_BLOCK_TRANSITIONS, thin) if on_jax else None,
        )
        self._set_up(
            posterior=posterior,
            batching=estimator.batching,
            block=block,
            step_size=step_size,
            thin=thin,
            owns_all=owns_all,
            start=None if self.center is None else self.center.position,
            start_root=None if self.center is None else self.center.curvature.root,
            blocked=blocked,
            compile_kwargs=compile_kwargs,
            rng=rng,
        )


class SGLDCV(SGLD):
    r"""Stochastic gradient Langevin dynamics with control variates.

    .. math::
        \theta' &= \theta + \tfrac{h}{2} M \tilde\nabla(\theta) + N(0, h M) \\
        \tilde\nabla(\theta) &= \nabla \log \pi(\hat\theta)
              + [\nabla \log p(\theta) - \nabla \log p(\hat\theta)]
              + \tfrac{N}{n} \sum_{j \in S} [\nabla \log p(x_j \mid \theta)
                                            - \nabla \log p(x_j \mid \hat\theta)]

    with the same rows S in both terms (Baker et al. 2019, algorithm 1). The same as `SGLD`
    with ``gradient="cv"``; see there for all parameters.

    **Law.** As for `SGLD`, with a gradient covariance V that is proportional to the squared
    distance from the centre. For a posterior that contracts like :math:`N^{-1/2}` around it,
    V does not grow relative to the curvature, so the same batch size serves for all N.

    **Cost.** At most two gradients of n rows a transition, independent of N; what the second
    shares between transitions, such as the residuals of a regression, is stored once where it
    takes little memory. A few passes over the data for the centre, once.

    References
    ----------
    J. Baker, P. Fearnhead, E. B. Fox and C. Nemeth (2019). Control variates for stochastic
    gradient MCMC. *Statistics and Computing* 29, 599-615.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> rng = np.random.default_rng(1)
    >>> x = rng.normal(size=5000)
    >>> with pm.Model():
    ...     slope = pm.Normal("slope", 0, 10)
    ...     _ = pm.Poisson("y", pm.math.exp(slope * x), observed=rng.poisson(np.exp(0.5 * x)))
    ...     step = SGLDCV(batch_size=50, compile_kwargs={"mode": "FAST_COMPILE"})
    ...     idata = pm.sample(step=step, draws=200, tune=0, chains=1, random_seed=1,
    ...                       progressbar=False, quiet=True)
    >>> bool(abs(idata.posterior["slope"].mean() - 0.5) < 0.05)
    True
    """

    name = "sgldcv"

    def __init__(self, vars: Sequence | None = None, *, gradient: str = "cv", **kwargs: Any):
        super().__init__(vars, gradient=gradient, **kwargs)


def _estimator(
    gradient: str,
    posterior: Posterior,
    center: Center | None,
    center_of_others: dict[str, np.ndarray],
    batching: str,
    batch_size: int,
    *,
    static: bool,
) -> GradientEstimator:
    """Gradient estimator with its minibatch scheme."""
    if gradient == "plain":
        scheme = make_batching(batching, posterior.data, batch_size, static=static)
        return PlainGradient(posterior, scheme)
    assert center is not None
    difference = find_center_difference(posterior, center.position, center_of_others)
    scheme = make_batching(
        batching, difference.data, batch_size, derived=difference.columns, static=static
    )
    return ControlVariateGradient(posterior, scheme, difference, center.likelihood_gradient)


def _default_thinning(choice: StepSizeChoice) -> int:
    """One relaxation time of the direction of the largest curvature, within bounds."""
    return int(np.clip(np.ceil(2 / (choice.step_size * choice.curvature)), 1, MOST_THINNING))


def _shared(values: np.ndarray, name: str):
    """Shared variable of static shape: a vector of length one broadcasts only with it."""
    static = {"shape": values.shape} if values.ndim else {}
    return pytensor.shared(np.asarray(values), name, **static)


# --- Settings -------------------------------------------------------------------------------


def _check_thin(thin: int | None) -> int | None:
    if thin is None:
        return None
    if isinstance(thin, bool) or not isinstance(thin, int | np.integer) or thin < 1:
        raise ValueError(
            f"`thin` should be a whole number of transitions a draw, at least 1, but got {thin!r}."
        )
    return int(thin)


def _resolve_batch_size(posterior: Posterior, batch_size: int | None, step_name: str) -> int:
    if batch_size is None:
        batch_size = posterior.model_batch_size
    if batch_size is None:
        raise ModelError(
            f"The model has no `pm.Minibatch` and `{step_name}` got no `batch_size`, so it is "
            f"not known how many of the {posterior.n_rows} rows to use at a time. Pass for "
            f"example `{step_name}(batch_size={min(500, posterior.n_rows)})`."
        )
    return check_batch_size(batch_size, posterior.n_rows)


def _preconditioner_matrix(
    preconditioner: str | float | np.ndarray, center: Center | None, dimension: int
) -> np.ndarray:
    if isinstance(preconditioner, str):
        if preconditioner == "identity":
            return np.asarray(1.0)
        if preconditioner == "curvature" and center is not None:
            return center.curvature.covariance
        raise ValueError(
            "`preconditioner` should be 'curvature', 'identity', a positive number, a vector or "
            f"a positive definite matrix, but got {preconditioner!r}."
        )
    matrix = np.asarray(preconditioner, dtype=float)
    if matrix.shape not in ((), (dimension,), (dimension, dimension)):
        raise ValueError(
            f"`preconditioner` should be a number or have shape ({dimension},) or "
            f"({dimension}, {dimension}), but has shape {matrix.shape}."
        )
    return matrix


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
        return center_at(posterior, position), others, None

    method = center or "lbfgs"
    moved = [value for value in model.value_vars if value.dtype.startswith("float")]
    if posterior.others and len(moved) > len(posterior.layout.variables):
        # Other continuous variables start wherever they are, but the mode that matters for
        # the control variate is the joint one.
        joint = Posterior(model, moved, rows=rows, initial_point=initial_point, check=False)
        joint_center = find_center(joint, joint.initial_position, method)
        point = joint.layout.unravel(joint_center.position)
        joint_draws = laplace_draws(joint, joint_center)
        posterior.set_others({**model.initial_point(), **point})
        found = center_at(posterior, posterior.layout.ravel(point))
    else:
        found = find_center(posterior, posterior.initial_position, method)
        joint_draws = None
    others = {name: np.array(shared.get_value()) for name, shared in posterior.others.items()}
    return found, others, joint_draws


def _center_point(
    model: Model, posterior: Posterior, center: Mapping[str, Any] | np.ndarray
) -> dict[str, np.ndarray]:
    """Values of the value variables for a centre given by the user."""
    if not isinstance(center, Mapping):
        position = np.asarray(center, dtype=float)
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
        value = np.asarray(center[given[value_name]], dtype=float)
        transformed = given[value_name] != name
        expected = (
            shapes[value_name]
            if transformed
            else tuple(int(length) for length in variable.shape.eval(mode="FAST_COMPILE"))
        )
        if value.shape != expected:
            raise ValueError(
                f"`center` for `{given[value_name]}` should have shape {expected}, but has "
                f"shape {value.shape}."
            )
        values[given[value_name]] = value
    point = make_initial_point_fn(
        model=model, overrides=values, return_transformed=True, jitter_rvs=set()
    )(0)
    return {name: point[name] for name in posterior.layout.names}


def _report(step_name: str, choice: StepSizeChoice, batching, thin: int, gradient: str) -> None:
    _log.info(
        "%s: step size %.3g, %d transitions a draw, %d of %d rows a minibatch "
        "(gradient noise %.2g, curvature %.2g)",
        step_name,
        choice.step_size,
        thin,
        batching.batch_size,
        batching.n_rows,
        choice.noise,
        choice.curvature,
    )
    if choice.noise > NOISE_WARNING * choice.curvature:
        remedy = (
            "or `SGLDCV`, whose noise does not grow with the data"
            if gradient == "plain"
            else "or fewer predictors that are non-zero or extreme in only a few rows, which cause "
            "most of the noise that control variates leave"
        )
        ratio = choice.noise / choice.curvature
        if ratio > IMPLAUSIBLE_NOISE:
            remedy += (
                ". So much noise also comes from a posterior that is improper or that has no mode, "
                "as with outcomes that predictors separate under a flat prior"
            )
        warnings.warn(
            f"The noise of a gradient from {batching.batch_size} of {batching.n_rows} rows is "
            f"{ratio:.3g} times the curvature, so the step is that much smaller and the chain "
            f"that much slower. Use about `batch_size={choice.batch_size_needed}`, {remedy}.",
            BatchSizeWarning,
            stacklevel=4,
        )
