"""Variables that a step method mirrors at zero, and the settings that go with it."""

from __future__ import annotations

import numpy as np
from pymc.model import Model

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.matrices import Diagonal, Matrix, as_matrix
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.position import PositionLayout
from pymc_sgmcmc.posterior.support import bounded_variables

NEAR_ZERO = 1e-20
"""The gradient of the log density is evaluated so near to zero."""

SMALL = 1e-6
"""A bounded gradient times this distance from zero is much smaller than this."""

CHECKED_COORDINATES = 20
"""So many coordinates of each variable are set near zero, one at a time, for all rows: a single one
may have a density that is unbounded there."""

SEED = 20_160_619
"""Coordinates and position of the check come from this fixed seed."""

OF_ALL_ROWS = 'step_size=..., preconditioner="identity"'
OF_MINIBATCHES = 'gradient="plain", batch_size=..., step_size=...'
MIRRORING = f"{OF_MINIBATCHES}, preconditioner=..."
"""With these settings a step method needs no centre, which may be at zero: one with all rows, one
without a fixed preconditioner, and `SGLD`."""


def mirrored_variables(
    model: Model, layout: PositionLayout, *, mirror: bool, is_metropolis: bool
) -> list[str]:
    """Names of the variables of a position that are mirrored at zero.

    Raises
    ------
    ModelError
        Where draws would leave the support of a variable, unless a step method refuses them.
    """
    bounded = {
        name: positive
        for name, positive in bounded_variables(model).items()
        if name in layout.names
    }
    left = [name for name, positive in bounded.items() if not (mirror and positive)]
    if left and not is_metropolis:
        mirroring = f", or mirror it at zero by `SGLD({MIRRORING})`" * all(bounded.values())
        raise ModelError(
            f"`{left[0]}` has a bounded support but no transform, so draws would leave the "
            f"support. Leave out `default_transform=None`{mirroring}."
        )
    return list(bounded) if mirror else []


def check_mirror(preconditioner: str | np.ndarray | Matrix | None) -> None:
    """Refuse a preconditioner with which the reflection would be in another direction.

    Raises
    ------
    ValueError
    """
    given = preconditioner is not None and not isinstance(preconditioner, str)
    if given and not isinstance(as_matrix(preconditioner), Diagonal):
        raise ValueError(
            "`preconditioner` should be a number or a vector where variables are mirrored at zero, "
            "since a dense matrix is reflected in another direction, but is a matrix."
        )


def check_at_zero(posterior: Posterior, names: list[str]) -> None:
    """Refuse densities whose gradient is unbounded at zero, such as that of `pm.Gamma("x", 2, 1)`.

    Near zero a step is then as long as the gradient, whatever the step size: moments of the draws
    are infinite. A density like x^a at zero has x times the gradient of its logarithm equal to a.

    Raises
    ------
    ModelError
    """
    layout = posterior.layout
    rng = np.random.default_rng(SEED)
    noise = rng.normal(scale=0.1, size=layout.dimension)
    mirrored = coordinates(layout, names) > 0
    # Other variables may have special values at first, such as a shape parameter of one.
    position = posterior.initial_position + np.where(mirrored, abs(noise), noise)
    count = CHECKED_COORDINATES if posterior.source is None else 1  # passes over files take long
    for name, part in zip(layout.names, layout.slices, strict=True):
        if name not in names:
            continue
        places = rng.permutation(np.arange(part.start, part.stop))[:count]
        each = np.arange(len(places))
        near = np.tile(position, (len(places), 1))
        near[each, places] = NEAR_ZERO
        with np.errstate(all="ignore"):
            gradients = [posterior.prior_gradients(near)[each, places]]
            if posterior.has_rows:
                gradients.append(posterior.likelihood_gradient(near)[each, places])
            if np.abs(NEAR_ZERO * np.concatenate(gradients)).max(initial=0.0) > SMALL:
                raise ModelError(
                    f"The gradient of the log density is unbounded where `{name}` is zero, as with "
                    "`pm.Gamma` of a shape other than 1 or a standard deviation in a likelihood, "
                    "so steps near zero would be of any length. Leave out "
                    "`default_transform=None`."
                )


def coordinates(layout: PositionLayout, names: list[str]) -> np.ndarray:
    """Ones for the coordinates of variables of these names, zeros for the others."""
    sizes = zip(layout.names, layout.sizes, strict=True)
    return np.concatenate([np.full(size, float(name in names)) for name, size in sizes])
