"""The centre that the settings ask for: searched or given."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from pymc.initial_point import make_initial_point_fn
from scipy import linalg

from pymc_sgmcmc.checks import FEW_NAMES, as_array
from pymc_sgmcmc.errors import CenterWarning, ModelError
from pymc_sgmcmc.guests import quadrature_of
from pymc_sgmcmc.matrices import covariance_root, dependent_coordinates
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.graphs import shape_of
from pymc_sgmcmc.step_methods.estimators import JointCenter
from pymc_sgmcmc.step_methods.settings import CENTERS, Settings
from pymc_sgmcmc.tuning import (
    NOISE_POINTS,
    OF_A_GIVEN_CENTER,
    OF_ANY_CENTER,
    Center,
    Curvature,
    Subsample,
    center_at,
    find_center,
    judge_at,
    laplace_draws,
    warn_of,
    with_steepest,
)

FARTHEST_GIVEN_CENTER = 1e6
"""A given centre may be at most this many posterior standard deviations from the mode. The relative
rounding error of its curvature is about 1e-16 times the square of that distance, here 1e-4."""

POINTS_OF_CHECK = 20
"""At so many points around the centre a quadrature is compared with a grid. The bound on its effect
is a standard deviation over them, which is then known to a sixth."""


def center_asked_for(settings: Settings, posterior: Posterior) -> JointCenter:
    """Centre by the setting `center`, around which a quadrature takes its nodes.

    Raises
    ------
    ModelError
        Where the posterior is flat in some direction.
    TypeError, ValueError
        Where the setting is not a centre of this posterior.
    """
    quadrature = quadrature_of(settings.model)
    if quadrature is None:
        return _center(settings, posterior)
    with held_back() as of_fewer_nodes:
        found = _center(settings, posterior)
        while quadrature.refine(laplace_draws(posterior, found.center, POINTS_OF_CHECK)):
            of_fewer_nodes.clear()
            found = _center(settings, posterior)
    return found


def _center(settings: Settings, posterior: Posterior) -> JointCenter:
    if settings.center is None:
        joint_center = _searched(settings, posterior)
    else:
        joint_center = _given(settings, posterior)
    check_determined(joint_center.center.curvature, posterior)
    warn_of(OF_ANY_CENTER, posterior, Subsample(posterior), joint_center.center)
    return joint_center


def _searched(settings: Settings, posterior: Posterior) -> JointCenter:
    """Mode of the posterior, or the centre that `find_center` takes in its place."""
    model = settings.model
    moved = [value for value in model.value_vars if value.dtype.startswith("float")]
    joint_draws = None
    if posterior.others and len(moved) > len(posterior.layout.variables):
        # The control variate needs the joint mode, whatever the initial values of the other
        # continuous variables.
        joint = Posterior(model, moved, rows=settings.rows, check=False)
        joint_center = find_center(joint, joint.initial_position)
        point = joint.layout.unravel(joint_center.position)
        joint_draws = laplace_draws(joint, joint_center, NOISE_POINTS)
        posterior.set_others({**model.initial_point(), **point})
        center = center_at(posterior, posterior.layout.ravel(point))
        where = joint.layout.unravel(np.arange(joint.dimension))
        index = posterior.layout.ravel(where).astype(int)
        center = _steepened(center, joint, joint_center, index)
    else:
        center = find_center(posterior, posterior.initial_position)
    return JointCenter(center, _values_of_others(posterior), joint_draws)


def _given(settings: Settings, posterior: Posterior) -> JointCenter:
    point = given_point(settings, posterior)
    posterior.set_others({**settings.model.initial_point(), **point})
    position = posterior.layout.ravel(point)
    # The nearest Gaussian has a curvature of its own, and its mean may be away from the mode.
    curvature = settings.center.curvature if isinstance(settings.center, Center) else None
    center = center_at(posterior, position, curvature)
    if curvature is None:
        if not center.distance <= FARTHEST_GIVEN_CENTER:
            raise ValueError(
                f"`center` is more than {FARTHEST_GIVEN_CENTER:,.0f} posterior standard deviations "
                "away from the mode. Give a point near the mode, or leave `center` out to have it "
                "searched."
            )
        warn_of(OF_A_GIVEN_CENTER, posterior, Subsample(posterior), center)
    center = _steepened(center, posterior, center)
    return JointCenter(center, _values_of_others(posterior))


def _steepened(
    center: Center, posterior: Posterior, around: Center, index: slice | np.ndarray = slice(None)
) -> Center:
    """Centre with the largest curvature around, for short positions as after a search."""
    if not around.curvature.is_dense:
        return center
    return with_steepest(center, judge_at(posterior, around), around, index)


def _values_of_others(posterior: Posterior) -> dict[str, np.ndarray]:
    return {name: np.array(shared.get_value()) for name, shared in posterior.others.items()}


def given_point(settings: Settings, posterior: Posterior) -> dict[str, np.ndarray]:
    """Values of the value variables for a centre given by the user."""
    model, center = settings.model, settings.center
    if isinstance(center, Center):
        center = center.position
    if not isinstance(center, Mapping):
        position = as_array("center", center, CENTERS)
        if position.shape != (posterior.dimension,):
            raise ModelError(
                f"`center` should be a mapping from names to values or an array of shape "
                f"({posterior.dimension},), but has shape {position.shape}."
            )
        if not np.isfinite(position).all():
            raise ValueError("`center` should be finite, but has NaN or infinite entries.")
        return posterior.layout.unravel(position)

    value_names = {
        model.values_to_rvs[value].name: value.name for value in posterior.layout.variables
    }
    names_given = {value_names.get(name, name): name for name in center}
    unknown = [
        name for value_name, name in names_given.items() if value_name not in value_names.values()
    ]
    missing = [name for name, value_name in value_names.items() if value_name not in names_given]
    if unknown or missing:
        raise ModelError(
            f"`center` should give values of {sorted(value_names)}, but "
            + (f"has the unknown names {sorted(unknown)}" if unknown else "")
            + (" and " if unknown and missing else "")
            + (f"lacks {sorted(missing)}" if missing else "")
            + "."
        )
    values = {}
    shapes = dict(zip(posterior.layout.names, posterior.layout.shapes, strict=True))
    for name, value_name in value_names.items():
        variable = model.named_vars[name]
        value = as_array(f"center['{names_given[value_name]}']", center[names_given[value_name]])
        transformed = names_given[value_name] != name
        expected = shapes[value_name] if transformed else tuple(shape_of(variable))
        if value.shape != expected:
            raise ModelError(
                f"`center` for `{names_given[value_name]}` should have shape {expected}, but has "
                f"shape {value.shape}."
            )
        if not np.isfinite(value).all():
            raise ValueError(
                f"`center` for `{names_given[value_name]}` should be finite, but has NaN or "
                "infinite entries."
            )
        values[names_given[value_name]] = value
    point = make_initial_point_fn(
        model=model, overrides=values, return_transformed=True, jitter_rvs=set()
    )(0)
    return {name: point[name] for name in posterior.layout.names}


def check_determined(curvature: Curvature, posterior: Posterior) -> None:
    """Refuse a posterior that is so flat in a direction that its covariance is singular.

    Raises
    ------
    ModelError
    """
    if not curvature.is_dense:
        return
    covariance = curvature.covariance.dense()
    try:
        covariance_root(covariance)
    except linalg.LinAlgError:
        numbers = dependent_coordinates(covariance)[:FEW_NAMES]
        names = ", ".join(f"`{posterior.labels[number]}`" for number in numbers)
        raise ModelError(
            f"The posterior is flat, or nearly so, in a combination of {names}. Give these "
            "variables proper priors, or leave out predictors that are combinations of others."
        ) from None


@contextmanager
def held_back(*, give: bool = True) -> Iterator[list[warnings.WarningMessage]]:
    """A list of the `CenterWarning` of the block, to give those that are left at its end."""
    held: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings():
            shown = warnings.showwarning

            def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
                if issubclass(category, CenterWarning):
                    held.append(warnings.WarningMessage(message, category, *place[:2]))
                else:
                    shown(message, category, *place, **more)

            warnings.showwarning = show
            warnings.filterwarnings("always", category=CenterWarning)
            yield held
    finally:
        for each in held if give else []:
            module = next(
                (
                    name
                    for name, module in list(sys.modules.items())
                    if getattr(module, "__file__", None) == each.filename
                ),
                None,
            )
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno, module)
