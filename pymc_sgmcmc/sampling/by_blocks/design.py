"""Samplers of blocks with their settings and step sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pymc_sgmcmc.adaptation.rmsprop import rmsprop_diagonal
from pymc_sgmcmc.sampling.by_blocks.setup import Gradients, Matrices, Scale, largest_curvature
from pymc_sgmcmc.sampling.by_blocks.steps import (
    BlockStep,
    LangevinBlocks,
    QuasiNewtonBlocks,
    RMSpropBlocks,
)
from pymc_sgmcmc.step_methods.hamcmc import REGULARIZATION as PART_OF_LARGEST

DECAY, REGULARIZATION = 0.99, 1e-5
"""These are α and λ of RMSprop, the defaults of `PSGLD`."""

STEP_NAMES = ("sgld", "psgld", "hamcmc")
"""These are the names of the samplers."""

CURVATURE, IDENTITY = "curvature", "identity"
"""These are the preconditioners of SGLD: the inverse diagonal of the curvature at the start, and
none."""


@dataclass(frozen=True, eq=False)
class Design:
    """A sampler, its settings of users and of items, and what its step size follows from.

    Attributes
    ----------
    step : BlockStep
    settings : tuple of two sequences of numpy.ndarray, shape (size, width)
    largest_curvature : float
        λ_max(MH), with M of the settings.
    mean_variance : float
        The mean over the coordinates of the diagonal of MV.
    """

    step: BlockStep
    settings: tuple[Sequence[np.ndarray], Sequence[np.ndarray]]
    largest_curvature: float
    mean_variance: float

    def step_size(self, bias: float, smallest_share: float) -> float:
        r"""The step size h for a variance that is too large by `bias`, on average.

        .. math:: h = \frac{4\,\mathrm{bias}}{\overline{(MV)_{jj}} + \lambda_{\max}(MH)}

        It is at most :math:`2 \min_i |\Omega_i| / (N \lambda_{\max}(MH))`: the weighted curvature
        of a part is at most :math:`N / |\Omega_i|` times that of all, and a longer step could
        diverge where the same part is drawn repeatedly.
        """
        wanted = 4 * bias / (self.mean_variance + self.largest_curvature)
        return float(min(wanted, 2 * smallest_share / self.largest_curvature))


def design_of(
    name: str, gradients: Gradients, scale: Scale, *, preconditioner: str, memory: int
) -> Design:
    """The design of one of `STEP_NAMES`."""
    if name == "sgld":
        diagonal = _diagonal(preconditioner, scale)
        largest = largest_curvature(gradients, scale.start, diagonal)
        settings = (diagonal[0],), (diagonal[1],)
        return Design(LangevinBlocks(), settings, largest, _mean(diagonal, scale.variance))
    if name == "psgld":
        first, second = (rmsprop_diagonal(moment, REGULARIZATION) for moment in scale.moment)
        largest = largest_curvature(gradients, scale.start, (first, second))
        variance = _mean((first, second), scale.variance)
        size = largest + variance
        step = RMSpropBlocks(int(gradients.counts.sum()), DECAY, REGULARIZATION, size)
        return Design(step, ((), ()), largest / size, variance / size)
    squares = _diagonal(preconditioner, scale)
    largest = largest_curvature(gradients, scale.start, squares)
    threshold = PART_OF_LARGEST * largest
    gamma = 1 / (largest + threshold)
    users, items = ((gamma * x, threshold / x, threshold / x) for x in squares)
    variance = gamma * _mean(squares, scale.variance)
    return Design(QuasiNewtonBlocks(memory), (users, items), 1.0, variance)


def with_given_step_size(design: Design) -> Design:
    """The design whose preconditioner is that of the paper, for a step size in its units."""
    if isinstance(design.step, RMSpropBlocks):
        return replace(design, step=replace(design.step, size=1.0))
    return design


def _diagonal(preconditioner: str, scale: Scale) -> Matrices:
    users, items = (
        np.ones_like(values) if preconditioner == IDENTITY else 1 / values
        for values in scale.curvature
    )
    return users, items


def _mean(diagonal: Matrices, variance: Matrices) -> float:
    products = [(m * v).ravel() for m, v in zip(diagonal, variance, strict=True)]
    return float(np.concatenate(products).mean())
