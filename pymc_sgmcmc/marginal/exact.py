r"""Local variables integrated out exactly, where their joint log density is quadratic.

This is so for Normal records with a Normal local variable in their mean: linear mixed models. With
:math:`m(u) = \log p(y_g, u \mid \theta)`, its gradient g and :math:`L L^\top = -\nabla^2 m` at any
u,

.. math:: \log p(y_g \mid \theta) = m(u) + \tfrac12 |L^{-1} g|^2 - \log |L| + \tfrac q2 \log 2\pi.

The matrices are q by q, as in Woodbury's identity.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytensor.tensor as pt
from pymc.model import Model
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.marginal.check import Evaluated
from pymc_sgmcmc.marginal.density import GroupDensity
from pymc_sgmcmc.marginal.newton import log_determinant, newton_step
from pymc_sgmcmc.posterior.agreement import agree, precision_of

DISTANT = 30.0
"""A log density counts as quadratic where it is so up to this many units, and standard deviations
of the prior, from the centre. It is a compromise between kinks far from the centre, and
overflow."""

CHUNK_RECORDS = 200_000
"""So many records are looked at in a call, which bounds the memory."""


def exact(density: GroupDensity) -> TensorVariable:
    """Log density of each group's records, shape (groups,)."""
    start = density.split(density.start)
    (value,) = density.at([density.value], start)
    newton = newton_step(density, start)
    constant = 0.5 * density.block_size * np.log(2 * np.pi)
    integral = value + 0.5 * newton.decrement - log_determinant(newton.root) + constant
    return density.of_records(integral)


def is_quadratic(model: Model, density: GroupDensity) -> bool:
    """Whether the joint log density of each group is quadratic, on both sides of the centre.

    The gradient is then linear. It alone does not tell: that of a uniform prior without a transform
    is zero beyond its edges too, where the density is.
    """
    evaluated = Evaluated(model, density)
    gradient = pt.stack(density.gradient, axis=1)
    derivatives = evaluated.function([density.value, gradient, *density.hessian])
    centre_and_prior = evaluated.function([density.start, *density.prior_hessian])
    n_groups = density.structure.n_groups
    n_chunks = min(n_groups, 1 + density.structure.n_records // CHUNK_RECORDS)
    precision = precision_of(density.block.dtype)
    # Records of any group may differ from the others, for example by censoring.
    return all(
        _is_quadratic(derivatives, centre_and_prior, evaluated.block[numbers], numbers, precision)
        for numbers in density.each_held(np.array_split(np.arange(n_groups), n_chunks))
    )


def _is_quadratic(
    derivatives: Callable[..., list[np.ndarray]],
    centre_and_prior: Callable[..., list[np.ndarray]],
    block: np.ndarray,
    numbers: np.ndarray,
    precision: float,
) -> bool:
    """Whether the joint log density of these groups is quadratic."""
    n_groups, size = block.shape
    centre, *prior = centre_and_prior(block, numbers)
    curvature = -np.stack(prior, axis=-1).reshape(n_groups, size, size)
    with np.errstate(divide="ignore"):
        variances = 1 / np.einsum("gii->gi", curvature)
    scale = np.sqrt(np.where(np.isfinite(variances) & (variances > 0), variances, 0.0))
    direction = np.maximum(np.abs(block) + 1, scale)

    _, slope, *entries = derivatives(centre, numbers)
    hessian = np.stack(entries, axis=-1).reshape(n_groups, size, size)
    for distance in (-DISTANT, -1.0, 1.0, DISTANT):
        step = distance * direction
        value, slope_there, *_ = derivatives(centre + step, numbers)
        change = np.einsum("gij,gj->gi", hessian, step)
        with np.errstate(invalid="ignore"):  # What is not finite is not quadratic.
            moved, sizes = slope_there - slope, np.abs(slope) + np.abs(change)
        if not (np.isfinite(value).all() and agree(moved, change, sizes, precision, finite=True)):
            return False
    return True
