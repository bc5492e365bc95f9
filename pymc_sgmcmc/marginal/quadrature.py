r"""Local variables integrated out by adaptive Gauss-Hermite quadrature, or by Laplace's method.

With the mode :math:`\hat u` of :math:`m(u) = \log p(y_g, u \mid \theta)` and
:math:`C C^\top = (-\nabla^2 m(\hat u))^{-1}`,

.. math::

    \log p(y_g \mid \theta) \approx \log |C| + \tfrac q2 \log 2\pi
    + \log \sum_k w_k \exp\{m(\hat u + C z_k) + z_k^\top z_k / 2\}

for the nodes and weights of the standard normal law. One node is Laplace's method.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import disconnected_grad
from pytensor.tensor.variable import TensorVariable
from scipy.special import roots_hermitenorm

from pymc_sgmcmc.marginal.density import GroupDensity
from pymc_sgmcmc.marginal.newton import (
    Mode,
    find_mode,
    log_determinant,
    moved,
    newton_step,
    solve_upper,
)
from pymc_sgmcmc.marginal.structure import LocalStructure
from pymc_sgmcmc.posterior.rows import keep_whole

HALF_LOG_2_PI = 0.5 * np.log(2 * np.pi)

MOST_POINTS = int(-0.5 * np.log(np.finfo(float).tiny))
"""The weight of the outermost of n nodes is about exp(-2 n), which is zero beyond this n."""

POINTS = {1: 9, 2: 7, 3: 5}
"""Nodes in each direction by the number of local quantities of a group. They are a compromise of
time and accuracy: with four binary records a group, nine nodes leave an error of 1e-6."""

MOST_QUADRATURE_SIZE = max(POINTS)
"""Product rules of more directions have too many nodes."""

LARGEST_LAPLACE = 6
"""Laplace's method, by which centre and curvature of `LocalSampling` are computed, is for at most
this many local quantities of a group. The graph of its Hessian grows with their square."""


def nodes_and_weights(points: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes, shape (points^q, q), and logarithms of the weights of the product rule."""
    nodes, weights = roots_hermitenorm(points)
    log_weights = np.log(weights) - np.log(weights.sum())
    grid = np.array(list(itertools.product(nodes, repeat=size)))
    return grid, np.array([sum(row) for row in itertools.product(log_weights, repeat=size)])


def laplace(density: GroupDensity) -> TensorVariable:
    """Laplace's approximation of the log density of each group's records, shape (groups,).

    It is exact where the joint log density is quadratic in the local variables. Its gradient is
    that of the approximation: the mode and the curvature depend on the parameters.
    """
    mode, root = _moving_mode(density)
    (value,) = density.at([density.value], mode)
    constant = density.block_size * HALF_LOG_2_PI
    return density.of_records(value - log_determinant(root) + constant)


def _moving_mode(density: GroupDensity) -> Mode:
    """Modes and curvatures with their derivatives by the parameters."""
    mode = [disconnected_grad(column) for column in find_mode(density).columns]
    # One more step from the mode, held constant, has the derivatives of the mode itself.
    mode = moved(mode, newton_step(density, mode).step)
    return Mode(mode, newton_step(density, mode).root)


def call_of(structure: LocalStructure, *, quadratic: bool) -> str | None:
    """The call that takes local variables of these sizes, None where none does."""
    size = structure.block_size
    listed = ", ".join(f'"{name}"' for name in structure.names)
    if quadratic or size <= MOST_QUADRATURE_SIZE:
        return f"`marginalize(model, [{listed}])`"
    if size <= LARGEST_LAPLACE:
        of_centre = f'`marginalize(model, [{listed}], method="laplace")`'
        return f"`SGLDCV(gradient=LocalSampling([{listed}]))` or, roughly, {of_centre}"
    return None


class Nodes:
    """The nodes and weights of a quadrature, in shared arrays, so that their number may change.

    Parameters
    ----------
    density : GroupDensity
    points : int
        Number of nodes in each direction.
    """

    def __init__(self, density: GroupDensity, points: int):
        self._density = density
        dtype = density.block.dtype
        # Arrays that are as long as there are groups would be taken for data.
        self.at = keep_whole(np.empty((0, density.block_size), dtype), "nodes")
        self.offsets = keep_whole(np.empty(0, dtype), "log_weights")
        self.points = points

    @property
    def points(self) -> int:
        """Number of nodes in each direction."""
        return self._points

    @points.setter
    def points(self, points: int) -> None:
        self._points = points
        grid, log_weights = nodes_and_weights(points, self._density.block_size)
        offsets = log_weights + 0.5 * (grid**2).sum(axis=1)
        for shared, values in ((self.at, grid), (self.offsets, offsets)):
            shared.set_value(values.astype(shared.dtype))
        self.at.tag.elements_a_row = len(grid) * self._density.records_a_group


def quadrature(
    density: GroupDensity, points: Nodes | int, *, moving: bool = False
) -> TensorVariable:
    r"""Quadrature of the log density of each group's records, shape (groups,).

    The nodes are constants for the gradient. It is then the quadrature of Fisher's identity,
    :math:`\nabla \log p(y_g \mid \theta) = E[\nabla_\theta \log p(y_g, u \mid \theta)]`.
    Where they are moving, it is the gradient of the value, which a maximum needs.
    """
    if moving:
        mode = _moving_mode(density)
    else:
        fixed = find_mode(density)
        root = [[disconnected_grad(entry) for entry in row] for row in fixed.root]
        mode = Mode([disconnected_grad(column) for column in fixed.columns], root)
    rule = points if isinstance(points, Nodes) else Nodes(density, points)
    at_nodes = _nodes(mode, rule.at)
    values = density.at_columns(at_nodes) + rule.offsets[:, None]
    # The largest is subtracted for its size only: the gradient does not depend on it.
    largest = disconnected_grad(values.max(axis=0))
    largest = pt.switch(pt.isinf(largest), 0, largest)
    total = largest + pt.log(pt.exp(values - largest).sum(axis=0))
    constant = density.block_size * HALF_LOG_2_PI
    return density.of_records(total - log_determinant(mode.root) + constant)


def _nodes(mode: Mode, nodes: TensorVariable) -> list[TensorVariable]:
    """Columns of the nodes for each group, shape (points, groups) each."""
    standard = [nodes[:, column][:, None] for column in range(len(mode.root))]
    return moved([place[None, :] for place in mode.columns], solve_upper(mode.root, standard))
