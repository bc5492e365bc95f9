"""Exact stationary laws of compiled chains, without drawing a random number.

On a Gaussian posterior with quadratic rows most transitions are affine in the state and in the
noise. Their matrices are read off the *compiled* block for each minibatch, and the stationary mean
and covariance follow from linear equations. A test then compares them with a formula to many
digits. A Monte Carlo test would only show errors of some per cent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.linalg import solve_discrete_lyapunov

from pymc_sgmcmc.batching import Batching, StridedRows, smallest_prime_from
from pymc_sgmcmc.engine import TransitionBlock


@dataclass(frozen=True)
class AffineTransition:
    """z' = slope z + shift + root xi, with xi standard normal."""

    slope: np.ndarray
    shift: np.ndarray
    root: np.ndarray


def all_indices(batching: Batching) -> list[np.ndarray]:
    """Every equally likely index of a scheme: all windows, strided rows, or tuples of numbers."""
    if isinstance(batching, StridedRows):
        pairs = batching.n_rows * (smallest_prime_from(batching.n_rows) - 1)
        return list(batching.draw(_EachNumber(), pairs))  # type: ignore[arg-type]
    if batching.name in ("shuffle", "all"):
        starts = 1 if batching.batch_size == batching.n_rows else batching.n_rows
        return [np.asarray(start, dtype=np.int64) for start in range(starts)]
    numbers = range(batching.n_rows)
    return [np.array(rows, np.int64) for rows in product(numbers, repeat=batching.batch_size)]


class _EachNumber:
    """A generator that draws each whole number once."""

    def integers(self, high: int, size: int) -> np.ndarray:
        assert high == size
        return np.arange(high)


def run_one(block: TransitionBlock, state: np.ndarray, index, noise, step_size: float):
    """State after one transition, as one vector."""
    parts, start = [], 0
    for shape in [(block.dimension,), *(auxiliary.shape for auxiliary in block.auxiliaries)]:
        size = int(np.prod(shape))
        parts.append(state[start : start + size].reshape(shape))
        start += size
    remembered = () if block.memory is None else block.memory.read()
    ran = block(
        tuple(parts),
        np.repeat(np.asarray(index)[None], 1 + block.lag, axis=0),
        np.asarray(noise)[None],
        np.array([step_size]),
    )
    if block.memory is not None:
        # The memory of the estimator is fixed here, as its references are.
        block.memory.write(remembered)
    return np.concatenate(
        [ran.positions[0].ravel(), *(values[0].ravel() for values in ran.auxiliaries)]
    ).astype(float)


def affine_transition(
    block: TransitionBlock, index, step_size: float, origin: np.ndarray | None = None
) -> AffineTransition:
    """Read the matrices of an affine transition off a compiled block."""
    size = block.state_elements
    origin = np.zeros(size) if origin is None else origin
    quiet = np.zeros(block.noise_size)
    at_origin = run_one(block, origin, index, quiet, step_size)
    slope = np.column_stack(
        [
            run_one(block, origin + unit, index, quiet, step_size) - at_origin
            for unit in np.eye(size)
        ]
    )
    root = np.column_stack(
        [
            run_one(block, origin, index, unit, step_size) - at_origin
            for unit in np.eye(block.noise_size)
        ]
    )
    return AffineTransition(slope, at_origin - slope @ origin, root)


def stationary_law(
    transitions: Iterable[AffineTransition], probabilities: Sequence[float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Stationary mean and covariance of a chain that chooses among transitions at random.

    The transitions are equally likely where no probabilities are given.
    """
    transitions = list(transitions)
    size, count = len(transitions[0].shift), len(transitions)
    weights = np.full(count, 1 / count) if probabilities is None else np.asarray(probabilities)
    weighted = list(zip(weights, transitions, strict=True))
    slope = sum(weight * transition.slope for weight, transition in weighted)
    mean = np.linalg.solve(
        np.eye(size) - slope, sum(weight * transition.shift for weight, transition in weighted)
    )
    constant = np.zeros((size, size))
    for weight, transition in weighted:
        moved = transition.slope @ mean + transition.shift - mean
        constant += weight * (np.outer(moved, moved) + transition.root @ transition.root.T)
    if count == 1:
        return mean, solve_discrete_lyapunov(slope, constant)
    operator = sum(
        weight * np.kron(transition.slope, transition.slope) for weight, transition in weighted
    )
    radius = np.abs(np.linalg.eigvals(operator)).max()
    assert radius < 1, f"the chain is unstable: spectral radius {radius}"
    covariance = np.linalg.solve(np.eye(size * size) - operator, constant.ravel())
    return mean, covariance.reshape(size, size)


def compiled_law(step, step_size: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Stationary mean and covariance of the state of a step method's compiled chain."""
    size = float(step.step_size) if step_size is None else step_size
    return stationary_law(
        affine_transition(step.block, index, size) for index in all_indices(step.batching)
    )


def noise_operator(problem, batching: Batching, center: np.ndarray | None = None):
    """Covariance of the gradient estimate as a function of the covariance of the position.

    For rows with gradients b_i - A_i theta the theory gives N^2 c / n times
    mean_i[A_i L A_i] - mean(A) L mean(A) + Cov_i(r_i). For windows of one fixed order this holds
    only on average over orders, and `exact_noise_operator` enumerates the windows.
    """
    A, N = problem.row_precisions, problem.n_rows
    mean_A = A.mean(0)
    r = A @ problem.mean - problem.row_shifts if center is None else A @ (problem.mean - center)
    scale = N**2 * batching.variance_factor / batching.batch_size

    def operator(covariance: np.ndarray) -> np.ndarray:
        sloped = np.einsum("nij,jk,nkl->il", A, covariance, A) / N - mean_A @ covariance @ mean_A
        return scale * (sloped + np.atleast_2d(np.cov(r.T, bias=True)))

    return operator


def exact_noise_operator(problem, batching: Batching, center: np.ndarray | None = None):
    """The same operator by enumeration of the minibatches of a scheme in its present order."""
    from tests.support.linear_gaussian import affine_estimate

    estimates = [
        affine_estimate(problem, batching.selected(index), center)
        for index in all_indices(batching)
    ]
    slopes = np.array([slope for _, slope in estimates])
    residuals = np.array([shift - slope @ problem.mean for shift, slope in estimates])
    mean_slope = slopes.mean(0)

    def operator(covariance: np.ndarray) -> np.ndarray:
        sloped = np.einsum("sij,jk,slk->il", slopes, covariance, slopes) / len(slopes)
        return (
            sloped - mean_slope @ covariance @ mean_slope.T + residuals.T @ residuals / len(slopes)
        )

    return operator


def fixed_point(update, start: np.ndarray, iterations: int = 100_000) -> np.ndarray:
    """Covariance that a recursion leaves unchanged."""
    covariance = start
    for _ in range(iterations):
        following = update(covariance)
        if np.allclose(following, covariance, rtol=1e-14, atol=0):
            return following
        covariance = following
    return covariance
