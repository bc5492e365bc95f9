"""Tests of whether a compiled chain leaves a density invariant in the limit of small steps.

A diffusion dz = b dt + sqrt(2 D) dW leaves p invariant exactly where the generator of each test
function f, b . grad f + D : hess f, has expectation zero under p. Drift and diffusion of an Euler
step are read off its *compiled* block, at the nodes of a quadrature rule. No random number is
drawn, so no Monte Carlo error can hide an error of a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement, product

import numpy as np

from pymc_sgmcmc.engine import TransitionBlock
from tests.support.exact_law import run_one


def drift(block: TransitionBlock, z: np.ndarray) -> np.ndarray:
    """Drift per unit of time, of which a step takes h / 2."""
    return run_one(block, z, 0, np.zeros(block.noise_size), 2.0) - z


def diffusion(block: TransitionBlock, z: np.ndarray) -> np.ndarray:
    """D, from noise of covariance h D."""
    still = run_one(block, z, 0, np.zeros(block.noise_size), 2.0)
    root = np.array([run_one(block, z, 0, unit, 2.0) - still for unit in np.eye(block.noise_size)])
    return root.T @ root / 2


def grid(lower: Sequence[float], upper: Sequence[float], points: int) -> np.ndarray:
    """Nodes of the trapezoidal rule in a box, shape (points ** d, d)."""
    axes = [np.linspace(low, high, points) for low, high in zip(lower, upper, strict=True)]
    return np.array(list(product(*axes)))


def gauss_hermite(nodes: int, mean: float = 0.0, variance: float = 1.0):
    """Nodes and weights for a normal variable."""
    at, weights = np.polynomial.hermite_e.hermegauss(nodes)
    return mean + np.sqrt(variance) * at, weights / weights.sum()


def largest_residual(
    block: TransitionBlock,
    nodes: np.ndarray,
    weights: np.ndarray,
    degree: int = 3,
    generator_of: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None,
) -> float:
    """Largest expectation of the generator of a monomial, relative to its root mean square.

    Parameters
    ----------
    block : TransitionBlock
    nodes, weights : arrays, shapes (nodes, m) and (nodes,)
        A quadrature rule for the density, up to a constant.
    degree : int
        Largest degree of the monomials, in coordinates of mean zero and variance one.
    generator_of : callable, optional
        Function of a node that gives drift and D. Default: they are read off the block.
    """
    weights = weights / weights.sum()
    keep = weights > 1e-13 * weights.max()
    nodes, weights = nodes[keep], weights[keep]
    generator_of = generator_of or (lambda z: (drift(block, z), diffusion(block, z)))
    values = [generator_of(z) for z in nodes]
    mean = weights @ nodes
    sd = np.sqrt(weights @ (nodes - mean) ** 2)
    z = (nodes - mean) / sd
    drifts, diffusions = zip(*values, strict=True)
    b = np.array(drifts) / sd
    D = np.array(diffusions) / np.outer(sd, sd)
    size = nodes.shape[1]
    worst = 0.0
    for order in range(1, degree + 1):
        for factors in combinations_with_replacement(range(size), order):
            powers = np.bincount(factors, minlength=size)
            generated = np.zeros(len(z))
            for i in range(size):
                generated += b[:, i] * _derivative(z, powers, [i])
                for j in range(size):
                    generated += D[:, i, j] * _derivative(z, powers, [i, j])
            scale = np.sqrt(weights @ generated**2)
            if scale > 0:
                worst = max(worst, abs(weights @ generated) / scale)
    return worst


def _derivative(z: np.ndarray, powers: np.ndarray, directions: Sequence[int]) -> np.ndarray:
    powers, factor = powers.copy(), 1.0
    for direction in directions:
        factor *= powers[direction]
        powers[direction] = max(0, powers[direction] - 1)
    return factor * np.prod(z**powers, axis=1)
