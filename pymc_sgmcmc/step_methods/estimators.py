"""Gradient estimators by name, with their minibatch schemes."""

from __future__ import annotations

import warnings

import numpy as np

from pymc_sgmcmc.batching import WeightedRows
from pymc_sgmcmc.errors import BatchSizeWarning
from pymc_sgmcmc.gradient_estimators import (
    SVRG,
    ControlVariateGradient,
    GradientEstimator,
    PlainGradient,
    SAGAGradient,
    SVRGGradient,
)
from pymc_sgmcmc.gradient_estimators.center_difference import find_center_difference
from pymc_sgmcmc.gradient_estimators.minibatches import batching_of
from pymc_sgmcmc.gradient_estimators.weighted import WeightedGradient
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.position import value_variables
from pymc_sgmcmc.step_methods.center import JointCenter
from pymc_sgmcmc.step_methods.settings import Settings

COMPARED_ROWS = 1000
"""The noise of given weights is found from so many rows with the smallest ones."""

MOST_NOISE = 10.0
"""A warning follows where it is more than this many times the noise of equal weights. Weights that
help make the noise smaller."""

SEED = 20_190_422
"""The position at which the noise is found comes from this fixed seed."""


def make_estimator(
    gradient: str | SVRG,
    posterior: Posterior,
    joint_center: JointCenter | None,
    batching: str | None,
    batch_size: int,
    *,
    kept: np.ndarray | None,
    static: bool,
) -> GradientEstimator:
    """Gradient estimator with its minibatch scheme; control variates need the centre.

    Raises
    ------
    ValueError
        Where the estimator does not run on JAX, or there is no centre.
    """
    if gradient == "saga":
        if static:
            raise ValueError(
                '`gradient="saga"` does not run on JAX, which would copy its memory at each call. '
                'Use `compile_kwargs={"mode": "NUMBA"}`, or `gradient="svrg"`.'
            )
        return SAGAGradient.make(posterior, batch_size, batching=batching)
    batching = batching or "shuffle"
    if gradient == "plain":
        scheme = batching_of(posterior, batching, batch_size, static=static)
        return PlainGradient(posterior, scheme)
    if gradient == "svrg":
        gradient = SVRG()
    if isinstance(gradient, SVRG):
        return SVRGGradient.make(
            posterior, batch_size, batching=batching, refresh=gradient.refresh, static=static
        )
    if joint_center is None:
        raise ValueError(f'`gradient="{gradient}"` needs a centre.')
    center = joint_center.center
    difference = find_center_difference(posterior, center.position, joint_center.others)
    scheme = batching_of(posterior, batching, batch_size, difference, static=static, excluded=kept)
    return ControlVariateGradient(posterior, scheme, difference, center.likelihood_gradient, kept)


def weighted_estimator(
    posterior: Posterior,
    joint_center: JointCenter | None,
    probabilities: np.ndarray,
    batch_size: int,
    *,
    static: bool,
) -> WeightedGradient:
    """Gradient estimator of rows with different probabilities; control variates need the centre.

    Raises
    ------
    ValueError
        Where the probabilities are not those of all rows, the rows are groups, or the centre
        belongs to other values of variables that move.
    """
    if len(probabilities) != posterior.n_rows:
        raise ValueError(
            f"`row_weights` should have one number for each of the {posterior.n_rows} rows, but "
            f"have {len(probabilities)}."
        )
    if posterior.rows_are_groups:
        raise ValueError("`row_weights` do not go with groups as rows. Leave them out.")
    if joint_center is not None and posterior.others:
        raise ValueError(
            '`row_weights` go with `gradient="cv"` only where the step method has all variables. '
            'Use `gradient="plain"`.'
        )
    _warn_of_weights(
        posterior,
        probabilities / probabilities.sum(),
        None if joint_center is None else joint_center.center.position,
    )
    batching = WeightedRows(
        posterior.data, batch_size, probabilities, dtype=posterior.dtype, static=static
    )
    if joint_center is None:
        return WeightedGradient(posterior, batching)
    center = joint_center.center
    return WeightedGradient(posterior, batching, center.position, center.likelihood_gradient)


def _warn_of_weights(
    posterior: Posterior, probabilities: np.ndarray, center: np.ndarray | None
) -> None:
    r"""Warn where rows that are hardly ever drawn have most of the noise of the gradient.

    The noise of a row with gradient g is :math:`\|g\|^2 / p`, against :math:`N \|g\|^2` with equal
    probabilities. It is seen only in the minibatches that have the row, so a chain may end before,
    without a trace of the row in its draws.
    """
    n_rows = posterior.n_rows
    rare = np.argsort(probabilities)[:COMPARED_ROWS]
    usual = np.linspace(0, n_rows - 1, min(n_rows, COMPARED_ROWS)).astype(int)
    at = posterior.initial_position if center is None else center
    near = at + np.random.default_rng(SEED).normal(scale=0.1, size=len(at))
    squares = []
    for rows in (posterior.take(rare), posterior.take(usual)):
        gradients = posterior.row_gradients(near, rows)
        if center is not None:
            gradients = gradients - posterior.row_gradients(center, rows)
        squares.append((gradients**2).sum(1))
    noise = float((squares[0] / probabilities[rare]).sum())
    ratio = noise / max(n_rows**2 * float(squares[1].mean()), np.finfo(float).tiny)
    if ratio > MOST_NOISE:
        warnings.warn(
            f"With these `row_weights` the noise of the gradient is {ratio:.2g} times that of "
            f"equal ones, since rows with probabilities down to {probabilities.min():.1g} are "
            "hardly ever drawn. Draws then follow the posterior without these rows. Raise the "
            "smallest weights.",
            BatchSizeWarning,
            stacklevel=8,
        )


def check_estimator(estimator: GradientEstimator, settings: Settings) -> None:
    """Refuse an estimator that does not fit the settings of the step method.

    Raises
    ------
    ValueError
    """
    names = ("batch_size", "rows", "batching")
    given = {name: getattr(settings, name) for name in names}
    twice = [f"`{name}`" for name, value in given.items() if value is not None]
    if twice:
        raise ValueError(
            f"`gradient` is a {type(estimator).__name__}, which has its own posterior and "
            f"minibatch scheme, but {' and '.join(twice)} {'is' if len(twice) == 1 else 'are'} "
            "given as well. Leave that out, or make the estimator with it."
        )
    has = estimator.posterior.layout.variables
    model, static = settings.model, settings.on_jax
    of_model = set(model.value_vars)
    foreign = [value.name for value in has if value not in of_model]
    if foreign:
        raise ValueError(
            f"`gradient` was made for the posterior of another model, which has {foreign}. Make it "
            "with `Posterior(model)` of the model that is sampled."
        )
    chosen = of_model
    if settings.vars is not None:
        chosen = set(value_variables(model, settings.vars))
    if set(has) != chosen:
        raise ValueError(
            f"`gradient` was made for the variables {sorted(value.name for value in has)}, but the "
            f"step method has {sorted(str(value.name) for value in chosen)}. Give the same "
            "variables to `Posterior` and, as `vars`, to the step method."
        )
    if static and not estimator.batching.static:
        raise ValueError(
            "JAX needs known shapes, but the minibatch scheme of `gradient` has none. Make it with "
            "`static=True`."
        )
    if static and estimator.memory is not None:
        raise ValueError(
            f"{type(estimator).__name__} does not run on JAX, which would copy its memory at each "
            'call. Use `compile_kwargs={"mode": "NUMBA"}`.'
        )
