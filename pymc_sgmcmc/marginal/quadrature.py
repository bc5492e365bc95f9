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
from pytensor.tensor.variable import TensorVariable
from scipy.special import roots_hermitenorm

from pymc_sgmcmc.marginal.density import GroupDensity
from pymc_sgmcmc.marginal.held import held
from pymc_sgmcmc.marginal.newton import (
    Matrix,
    Mode,
    columns,
    find_mode,
    log_determinant,
    newton_step,
    solve_upper,
)
from pymc_sgmcmc.posterior.graphs import rebuild
from pymc_sgmcmc.posterior.rows import keep_whole

HALF_LOG_2_PI = 0.5 * np.log(2 * np.pi)


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
    block, root = _moving_mode(density)
    (value,) = rebuild([density.value], {density.block: block})
    return value - log_determinant(root) + density.block_size * HALF_LOG_2_PI


def _moving_mode(density: GroupDensity) -> Mode:
    """Modes and curvatures with their derivatives by the parameters."""
    mode = held(find_mode(density).block)
    # One more step from the mode, held constant, has the derivatives of the mode itself.
    block = mode + pt.stack(newton_step(density, mode).step, axis=1)
    return Mode(block, newton_step(density, block).root)


def quadrature(density: GroupDensity, points: int, *, moving: bool = False) -> TensorVariable:
    r"""Quadrature of the log density of each group's records, shape (groups,).

    The nodes are constants for the gradient. It is then the quadrature of Fisher's identity,
    :math:`\nabla \log p(y_g \mid \theta) = E[\nabla_\theta \log p(y_g, u \mid \theta)]`.
    Where they are moving, it is the gradient of the value, which a maximum needs.
    """
    if moving:
        mode = _moving_mode(density)
    else:
        fixed = find_mode(density)
        mode = Mode(held(fixed.block), [[held(entry) for entry in row] for row in fixed.root])
    size = density.block_size
    grid, log_weights = nodes_and_weights(points, size)
    # Arrays that are as long as there are groups would be taken for data.
    dtype = density.block.dtype
    computed = len(grid) * density.records_a_group
    nodes = keep_whole(grid.astype(dtype), "nodes", elements_a_row=computed)
    offsets = keep_whole((log_weights + 0.5 * (grid**2).sum(axis=1)).astype(dtype), "log_weights")
    at_nodes = _nodes(mode.block, mode.root, nodes)
    values = density.at_points(at_nodes) + offsets[:, None]
    total = pt.logsumexp(values, axis=0)
    return total - log_determinant(mode.root) + size * HALF_LOG_2_PI


def _nodes(block: TensorVariable, root: Matrix, nodes: TensorVariable) -> TensorVariable:
    """Nodes for each group, shape (points, groups, q)."""
    standard = [nodes[:, column][:, None] for column in range(len(root))]
    scaled = solve_upper(root, standard)
    moved = [
        place[None, :] + offset
        for place, offset in zip(columns(block, len(root)), scaled, strict=True)
    ]
    return pt.stack(moved, axis=-1)
