r"""Local variables integrated out exactly, where their joint log density is quadratic.

This is so for Normal records with a Normal local variable in their mean: linear mixed models. With
:math:`m(u) = \log p(y_g, u \mid \theta)`, its gradient g and :math:`L L^\top = -\nabla^2 m` at any
u,

.. math:: \log p(y_g \mid \theta) = m(u) + \tfrac12 |L^{-1} g|^2 - \log |L| + \tfrac q2 \log 2\pi.

The matrices are q by q, as in Woodbury's identity.
"""

from __future__ import annotations

import numpy as np
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.marginal.density import GroupDensity
from pymc_sgmcmc.marginal.newton import (
    log_determinant,
    newton_step,
)
from pymc_sgmcmc.posterior.graphs import rebuild


def exact(density: GroupDensity) -> TensorVariable:
    """Log density of each group's records, shape (groups,)."""
    (value,) = rebuild([density.value], {density.block: density.start})
    newton = newton_step(density, density.start)
    constant = 0.5 * density.block_size * np.log(2 * np.pi)
    return value + 0.5 * newton.decrement - log_determinant(newton.root) + constant
