"""The step method of a run made again from what its trace holds, with another step size."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from pymc.model import Model

from pymc_sgmcmc.engine import is_jax_mode
from pymc_sgmcmc.errors import CenterWarning
from pymc_sgmcmc.gradient_estimators import SVRG
from pymc_sgmcmc.matrices import LowRank, Matrix, covariance_root
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.record import KEPT_ROWS, stored_matrix, stored_rows
from pymc_sgmcmc.step_methods.center import JointCenter
from pymc_sgmcmc.step_methods.estimators import make_estimator
from pymc_sgmcmc.step_methods.sgld import SGLD, SGLDCV
from pymc_sgmcmc.tuning import Center, Curvature, center_at

STEP_METHODS: dict[str, type[SGLD]] = {one.__name__: one for one in (SGLD, SGLDCV)}
"""Step methods that can be made again."""


def repeated_step(
    model: Model,
    settings: Mapping[str, Any],
    arrays: Any,
    *,
    step_size: float,
    thin: int,
    compile_kwargs: Mapping[str, Any] | None = None,
) -> SGLD:
    """Step method with all settings of a run but its step size and thinning.

    Rows of the data, minibatches, rows in each transition, estimator, centre and preconditioner
    are those of the run.

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
    posterior = Posterior(model, rows=stored_rows(settings))
    center = _center(posterior, arrays)
    gradient: str | SVRG = settings["gradient"]
    if gradient == "svrg":
        gradient = SVRG(int(settings["refresh"]))
    kept = np.asarray(arrays[KEPT_ROWS]) if KEPT_ROWS in arrays.data_vars else None
    estimator = make_estimator(
        gradient,
        posterior,
        None if center is None else JointCenter(center, {}),
        settings["batching"],
        int(settings["batch_size"]),
        kept=kept,
        static=is_jax_mode(kwargs),
    )
    with model, warnings.catch_warnings():
        # What there is to say of the centre was said when the first run was made with it.
        warnings.simplefilter("ignore", CenterWarning)
        return STEP_METHODS[settings["sampler"]](
            step_size=step_size,
            preconditioner=stored_matrix(arrays, "preconditioner"),
            gradient=estimator,
            thin=thin,
            compile_kwargs=kwargs,
            **_of_center(center),
        )


def _center(posterior: Posterior, arrays: Any) -> Center | None:
    """Centre of a trace, with the curvature that it had there.

    The curvature is not computed anew: where the centre is the mean of the nearest Gaussian, that
    at the point itself is no guide to where chains should begin.
    """
    if "center" not in arrays.data_vars:
        return None
    position = np.asarray(arrays["center"], dtype=float)
    precision = stored_matrix(arrays, "precision")
    return center_at(posterior, position, None if precision is None else _curvature(precision))


def _curvature(precision: Matrix) -> Curvature | None:
    if isinstance(precision, LowRank):
        # In so many dimensions the centre is a mode, and the curvature there is what it was.
        return None
    if precision.ndim < 2:
        return Curvature(precision, 1 / precision, precision**-0.5)
    scale = np.diag(precision) ** -0.5  # coordinates in units that differ by orders
    both = np.outer(scale, scale)
    inverse = np.linalg.inv(precision * both)
    covariance = 0.5 * (inverse + inverse.T) * both
    return Curvature(precision, covariance, covariance_root(covariance))


def _of_center(center: Center | None) -> dict[str, Any]:
    if center is None:
        return {}
    covariance = center.curvature.covariance
    if isinstance(covariance, LowRank):
        return {"center": center.position}
    return {"init": {"mean": center.position, "covariance": covariance}}
