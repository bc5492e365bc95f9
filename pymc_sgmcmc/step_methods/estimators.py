"""Gradient estimators by name, with their minibatch schemes."""

from __future__ import annotations

import numpy as np

from pymc_sgmcmc.batching import ANY_NOISE
from pymc_sgmcmc.errors import ModelError
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
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.position import value_variables
from pymc_sgmcmc.step_methods.center import JointCenter
from pymc_sgmcmc.step_methods.settings import Settings


def make_estimator(
    gradient: str | SVRG,
    posterior: Posterior,
    joint_center: JointCenter | None,
    batching: str | None,
    batch_size: int,
    *,
    kept: np.ndarray | None,
    static: bool,
    order: int = 1,
    noise_share: float = ANY_NOISE,
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
        return SAGAGradient(posterior, batch_size, batching=batching, noise_share=noise_share)
    batching = batching or "shuffle"
    if gradient == "plain":
        scheme = batching_of(
            posterior, batching, batch_size, static=static, noise_share=noise_share
        )
        return PlainGradient(posterior, scheme)
    if gradient == "svrg":
        gradient = SVRG()
    if isinstance(gradient, SVRG):
        return SVRGGradient(
            posterior,
            batch_size,
            batching=batching,
            refresh=gradient.refresh,
            static=static,
            noise_share=noise_share,
        )
    if joint_center is None:
        raise ValueError(f'`gradient="{gradient}"` needs a centre.')
    center = joint_center.center
    difference = center.difference if order == 2 else None
    if difference is None:
        difference = find_center_difference(
            posterior, center.position, joint_center.others, order=order
        )
    if order == 2 and center.of_rows is not None:
        difference = difference.with_curvature(center.of_rows)
    scheme = batching_of(
        posterior,
        batching,
        batch_size,
        difference,
        static=static,
        excluded=kept,
        noise_share=noise_share,
    )
    of_rows = center.likelihood_gradient
    if posterior.coordinates is not None:
        of_rows = posterior.gradient_of_rows(posterior.position_of_rows(center.position))
    return ControlVariateGradient(posterior, scheme, difference, of_rows, kept)


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
        raise ModelError(
            f"`gradient` was made for the posterior of another model, which has {foreign}. Make it "
            "with `Posterior(model)` of the model that is sampled."
        )
    chosen = of_model
    if settings.vars is not None:
        chosen = set(value_variables(model, settings.vars))
    if set(has) != chosen:
        raise ModelError(
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
