"""Make the step method of a run again, from its trace and with another step size."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from pymc.model import Model

from pymc_sgmcmc.engine import is_jax_mode
from pymc_sgmcmc.errors import CenterWarning
from pymc_sgmcmc.matrices import Dense, Diagonal, Implicit, Matrix
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.record import (
    EFFECTS,
    KEPT_ROWS,
    LARGEST_FORCE,
    LAW,
    OF_CHAIN,
    stored_matrix,
    stored_rows,
)
from pymc_sgmcmc.step_methods.base import MADE, StochasticGradientStep
from pymc_sgmcmc.step_methods.estimators import ESTIMATORS, JointCenter, Parts
from pymc_sgmcmc.step_methods.sgld import SGLD
from pymc_sgmcmc.tuning import Center, Curvature, center_at

SAME = ("sampler", "gradient", "batching", "batch_size", "refresh", "noise", "curvature", LAW)
"""Step methods of the same model are the same where these attributes are, and all arrays."""


def step_of(
    model: Model, settings: Mapping[str, Any], arrays: Any
) -> StochasticGradientStep | None:
    """The step method that made a run, if it is in use and its chain can be continued.

    Parameters
    ----------
    model, settings, arrays
        As those of `repeated_step`.
    """
    for step in list(MADE):
        known = step.run_settings
        if (
            step.posterior.model is model
            and step.chain.can_repeat
            and step.posterior.changed_data() is None
            and all(settings.get(name) == known.attributes.get(name) for name in SAME)
            and arrays.data_vars.keys() == known.arrays.keys()
            and all(np.array_equal(arrays[name], each) for name, each in known.arrays.items())
        ):
            return step
    return None


def repeated_step(
    model: Model,
    settings: Mapping[str, Any],
    arrays: Any,
    *,
    step_size: float,
    thin: int,
    compile_kwargs: Mapping[str, Any] | None = None,
) -> SGLD:
    """Step method of the law of a run, with all its settings but step size and thinning.

    Rows of the data, minibatches, rows in each transition, estimator, integrator, centre and
    preconditioner are those of the run.

    Parameters
    ----------
    model : pymc.Model
    settings : mapping
        Attributes of the trace without their prefix.
    arrays
        Group `sgmcmc_settings` of the trace.
    step_size, thin
    compile_kwargs : mapping, optional
    """
    kwargs = None if compile_kwargs is None else dict(compile_kwargs)
    has_effects, of = EFFECTS in arrays.data_vars, ""
    posterior = Posterior(model, rows=stored_rows(settings), standardizes=has_effects)
    if has_effects and posterior.coordinates is not None:
        posterior.coordinates.restore(np.asarray(arrays[EFFECTS], dtype=float))
        of = OF_CHAIN
    center = _center(posterior, arrays, of)
    of_kind = {"refresh": int(settings["refresh"])} if "refresh" in settings else {}
    kind = ESTIMATORS[settings["gradient"]](batching=settings["batching"], **of_kind)
    estimator = kind.make(
        Parts(
            posterior=posterior,
            batch_size=int(settings["batch_size"]),
            joint_center=None if center is None else JointCenter(center, {}),
            order=kind.order,
            kept=np.asarray(arrays[KEPT_ROWS]) if KEPT_ROWS in arrays.data_vars else None,
            static=is_jax_mode(kwargs),
        )
    )
    with model, warnings.catch_warnings():
        # The user has seen the warnings about this centre in the first run.
        warnings.simplefilter("ignore", CenterWarning)
        step = SGLD(
            step_size=step_size,
            preconditioner=stored_matrix(arrays, f"{of}preconditioner"),
            gradient=estimator,
            integrator=settings[LAW],
            thin=thin,
            compile_kwargs=kwargs,
            center=center,
        )
    # Its step size does not tell where the drift was tamed.
    step.largest_force.set_value(np.asarray(settings.get(LARGEST_FORCE, np.inf), posterior.dtype))
    return step


def _center(posterior: Posterior, arrays: Any, of: str) -> Center | None:
    """Centre of a trace, with the curvature that it had there.

    The curvature is not computed anew. Where the centre is the mean of the nearest Gaussian, chains
    should begin with the covariance of this Gaussian, and the curvature at the point is another.
    """
    if "center" not in arrays.data_vars:
        return None
    position = posterior.positions_at(np.asarray(arrays["center"], dtype=float))
    precision = stored_matrix(arrays, f"{of}precision")
    return center_at(posterior, position, None if precision is None else _curvature(precision))


def _curvature(precision: Matrix) -> Curvature | None:
    if isinstance(precision, Implicit):
        # In so many dimensions the centre is a mode, whose curvature is computed again.
        return None
    if isinstance(precision, Diagonal):
        return Curvature(precision, precision.inverse, precision.inverse.root)
    scale = precision.diagonal() ** -0.5  # units of coordinates may differ by orders of magnitude
    scales = np.outer(scale, scale)
    inverse = np.linalg.inv(precision.values * scales)
    covariance = Dense(0.5 * (inverse + inverse.T) * scales)
    return Curvature(precision, covariance, covariance.root)
