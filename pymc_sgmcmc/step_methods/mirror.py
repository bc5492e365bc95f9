"""Variables that a step method mirrors at zero, and the settings that go with it."""

from __future__ import annotations

import numpy as np
from pymc.model import Model

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.matrices import Diagonal, Matrix, as_matrix
from pymc_sgmcmc.posterior.position import PositionLayout
from pymc_sgmcmc.posterior.support import bounded_variables
from pymc_sgmcmc.step_methods.settings import Settings


def mirrored_variables(
    model: Model, layout: PositionLayout, *, mirror: bool, is_metropolis: bool
) -> list[str]:
    """Names of the variables of a position that are mirrored at zero.

    Raises
    ------
    ModelError
        Where draws would leave the support of a variable, unless a step method refuses them.
    ValueError
        Where there is no variable to mirror.
    """
    bounded = {
        name: positive
        for name, positive in bounded_variables(model).items()
        if name in layout.names
    }
    left = [name for name, positive in bounded.items() if not (mirror and positive)]
    if left and not is_metropolis:
        raise ModelError(
            f"`{left[0]}` has a bounded support but no transform, so draws would leave the "
            "support. Leave out `default_transform=None`. For positive variables `SGLD`, "
            '`PSGLD`, `HAMCMC` and `ULA` take `positive="mirror"` instead.'
        )
    if mirror and not bounded:
        raise ValueError(
            '`positive="mirror"` mirrors positive variables without a transform, but the step '
            "method has none. Write them with `default_transform=None`, as in "
            '`pm.Exponential("x", 1, default_transform=None)`.'
        )
    return list(bounded) if mirror else []


def check_mirror(settings: Settings, preconditioner: str | np.ndarray | Matrix) -> None:
    """Refuse settings that need a centre, or a reflection in another direction.

    Raises
    ------
    ValueError
    """
    given = not isinstance(preconditioner, str)
    if given and not isinstance(as_matrix(preconditioner), Diagonal):
        raise ValueError(
            '`preconditioner` should be a number or a vector with `positive="mirror"`, since '
            "a dense matrix is reflected in another direction, but is a matrix."
        )
    if settings.local is not None or settings.gradient == "cv":
        refused = "local" if settings.local is not None else 'gradient="cv"'
        raise ValueError(
            f'`positive="mirror"` does not go with `{refused}`. Use `gradient="plain"`, or the '
            "log transform."
        )


def coordinates(layout: PositionLayout, names: list[str]) -> np.ndarray:
    """Ones for the coordinates of variables of these names, zeros for the others."""
    sizes = zip(layout.names, layout.sizes, strict=True)
    return np.concatenate([np.full(size, float(name in names)) for name, size in sizes])
