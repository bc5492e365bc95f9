"""Samplers of blocks with their settings and step sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pymc_sgmcmc.adaptation.rmsprop import rmsprop_diagonal
from pymc_sgmcmc.sampling.by_blocks.setup import Blocks, Scale, largest_curvature
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
    """A sampler, its settings, and what its step size follows from.

    Attributes
    ----------
    step : BlockStep
    settings : sequence of numpy.ndarray, shape (d,)
    largest_curvature : float
        λ_max(MH), with M of the settings.
    mean_variance : float
        The mean over the coordinates of the diagonal of MV.
    """

    step: BlockStep
    settings: Sequence[np.ndarray]
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
    name: str, blocks: Blocks, scale: Scale, *, preconditioner: str, memory: int
) -> Design:
    """The design of one of `STEP_NAMES`."""

    def largest_of(diagonal: np.ndarray) -> float:
        return largest_curvature(blocks, scale.start, diagonal)

    if name == "psgld":
        diagonal = rmsprop_diagonal(scale.moment, REGULARIZATION)
        largest, variance = largest_of(diagonal), float((diagonal * scale.variance).mean())
        size = largest + variance
        step = RMSpropBlocks(int(blocks.counts.sum()), DECAY, REGULARIZATION, size)
        return Design(step, (), largest / size, variance / size)
    inverse = np.ones_like(scale.start) if preconditioner == IDENTITY else 1 / scale.curvature
    largest, variance = largest_of(inverse), float((inverse * scale.variance).mean())
    if name == "sgld":
        return Design(LangevinBlocks(), (inverse,), largest, variance)
    threshold = PART_OF_LARGEST * largest
    gamma = 1 / (largest + threshold)
    settings = gamma * inverse, threshold / inverse, threshold / inverse
    return Design(QuasiNewtonBlocks(memory), settings, 1.0, gamma * variance)


def with_given_step_size(design: Design) -> Design:
    """The design whose preconditioner is that of the paper, for a step size in its units."""
    if isinstance(design.step, RMSpropBlocks):
        return replace(design, step=replace(design.step, size=1.0))
    return design
