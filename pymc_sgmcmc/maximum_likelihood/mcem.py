r"""The Monte-Carlo EM algorithm, for local variables that no formula integrates out.

At a position :math:`\theta_t` of the global variables, Metropolis steps from a Student-t law at the
mode of each group give draws :math:`u_{g1}, \dots, u_{gm} \sim p(u_g \mid y_g, \theta_t)`, and

.. math:: \theta_{t+1} = \arg\max_\theta Q(\theta), \quad
    Q(\theta) = \sum_g \frac1m \sum_k \log p(y_g, u_{gk} \mid \theta).

EM is slow where much information is missing. So once it stands still up to the noise of the draws,
Newton steps follow (Louis, 1982). By Fisher's identity the gradient of the marginal log likelihood
is that of Q at :math:`\theta_t`, with an error that its spread over batches of draws tells. The
second derivatives are differences of the gradient by importance sampling. Its nodes are the same
for all groups and positions, and move with the modes, so that their error is smooth and small.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.compiling.compiled import quick_graphs
from pymc_sgmcmc.errors import ConvergenceError
from pymc_sgmcmc.marginal.conditional import Conditional
from pymc_sgmcmc.marginal.independence import log_constant, log_weights_of, normal_rule, proposals
from pymc_sgmcmc.marginal.likelihood import Groups, Objective
from pymc_sgmcmc.marginal.newton import solve_upper
from pymc_sgmcmc.maximum_likelihood.maximum import (
    SMALLEST_EIGENVALUE,
    Maximum,
    information_at,
    maximize,
    scaled_eigenvectors,
)

_log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold

FIRST_DRAWS, LAST_DRAWS = 20, 160
"""EM begins with so many draws a group. Their number doubles where the step of EM is below its
Monte-Carlo error, and EM ends with the last number. This is a compromise: few draws suffice far
from the maximum, and the Newton steps begin within a standard error or so of it."""

MOST_STEPS = 100
"""Newton's method takes at most this many steps in one maximisation of Q."""

PRECISE = 0.01
"""Q is maximised up to a step whose squared length is this part of that of the noise."""

NODES = 256
"""The information is from importance sampling with this many nodes a group, a power of two. They
are quasi-random, since a product rule of more than three directions has too many."""

SEED = 20_181_204
"""The nodes come from this fixed seed."""

BATCH = 50
"""The gradient is an average over batches of so many draws a group, whose spread is its error."""

FEWEST_BATCHES = 20
"""The spread of this many batches tells the error with a relative error of 16 %."""

MOST_BATCHES = 4000
"""The average has at most so many batches, which bounds the time."""

SHORT = 0.1
"""A Newton step below this many standard errors, or below twice its Monte-Carlo error, is the last.
The error that it leaves is of the order of its square times the skewness of the likelihood."""

LONGEST = 2.0
"""A Newton step is at most this many standard errors long."""

SMALLEST_FRACTION = 0.1
"""A warning is given where groups have a smaller effective fraction of proposals, as `recover`
does. Batches are then correlated, and the stated error may be too small."""


@dataclass(frozen=True, eq=False)
class MonteCarloMaximum:
    """A maximum of the marginal likelihood up to a Monte-Carlo error.

    Attributes
    ----------
    maximum : Maximum
    likelihood : Objective
        Marginal log likelihood around the maximum, by importance sampling.
    covariance : numpy.ndarray, shape (d, d)
        Monte-Carlo covariance of the position.
    value_error : float
        Monte-Carlo standard error of the log likelihood.
    modes : numpy.ndarray, shape (G, q)
        Conditional modes of the local variables.
    """

    maximum: Maximum
    likelihood: Objective
    covariance: np.ndarray
    value_error: float
    modes: np.ndarray


class Law(NamedTuple):
    """Where the local variables of each group lie at a position.

    Attributes
    ----------
    arguments : list of numpy.ndarray
        The global variables on their own scale.
    centre : numpy.ndarray, shape (G, q)
    root : matrix of numpy.ndarray, each of shape (G,)
        Lower triangular factor of the negative Hessian at the centre.
    """

    arguments: list[np.ndarray]
    centre: np.ndarray
    root: list[list[np.ndarray]]


class GroupChains:
    """A Markov chain of the local variables of each group, all at the same position.

    Parameters
    ----------
    groups : Groups
    rng : numpy.random.Generator

    Attributes
    ----------
    numbers : numpy.ndarray, shape (G,)
    """

    def __init__(self, groups: Groups, rng: np.random.Generator):
        density = groups.density
        self.numbers = np.arange(groups.n_groups)
        self._rng = rng
        self._conditional = Conditional(density, quadratic=False)
        placeholders = list(density.parameters.values())
        self._parameters = groups.compile([], [groups.at_position(p) for p in placeholders])
        self._names = list(density.parameters)
        self._state = np.zeros((groups.n_groups, density.block_size))
        self._law: Law | None = None

    def law(self, position: np.ndarray) -> Law:
        """Modes and curvatures of all groups, searched from those of the last position."""
        conditional = self._conditional
        values = dict(zip(self._names, self._parameters(position), strict=True))
        arguments = conditional.arguments(values)
        parts = []
        with np.errstate(all="ignore"):
            for piece in conditional.pieces(self.numbers):
                start = None if self._law is None else self._law.centre[piece]
                parts.append(conditional.centre(self.numbers[piece], arguments, start))
        root = [
            [
                np.concatenate([entries[row][column] for _, entries in parts])
                for column in range(row + 1)
            ]
            for row in range(conditional.size)
        ]
        return Law(arguments, np.concatenate([block for block, _ in parts]), root)

    def move(self, position: np.ndarray) -> None:
        """Go to a position, from the states at the last one."""
        first, n_groups = self._law is None, len(self.numbers)
        self._law = law = self.law(position)
        self._log_weight = np.full(n_groups, -np.inf)
        if not first:
            heights = self._log_density(self._state[None])[0]
            self._log_weight = log_weights_of(heights, self._state, law.centre, law.root)
        self._reference: np.ndarray | None = None
        self._total, self._squares, self._count = np.zeros(n_groups), np.zeros(n_groups), 0

    def _log_density(self, points: np.ndarray) -> np.ndarray:
        """Joint log density, shape (m, G), at points, shape (m, G, q)."""
        assert self._law is not None
        with np.errstate(all="ignore"):
            return self._conditional.log_density(points, self.numbers, self._law.arguments)

    def draw(self, count: int) -> np.ndarray:
        """The next draws of all groups, shape (count, G, q)."""
        assert self._law is not None
        states, log_weights = proposals(
            lambda points, _: self._log_density(points),
            self._law.centre,
            self._law.root,
            self.numbers,
            self._rng,
            count,
        )
        uniforms = np.log(self._rng.random(log_weights.shape))
        for block, proposed, uniform in zip(states, log_weights, uniforms, strict=True):
            accepted = uniform + np.maximum(self._log_weight, -np.finfo(float).max) < proposed
            self._state = np.where(accepted[:, None], block, self._state)
            self._log_weight = np.where(accepted, proposed, self._log_weight)
            block[:] = self._state
        if not np.isfinite(self._log_weight).all():
            number = int(np.argmin(np.isfinite(self._log_weight)))
            raise ConvergenceError(
                f"The log density should be finite, but is not for group {number} where the "
                "search is. Check the data of this group, or choose other initial values."
            )
        self._add(log_weights)
        return states

    def _add(self, log_weights: np.ndarray) -> None:
        """Count the weights of the proposals, relative to that of an early state of the group."""
        if self._reference is None:
            self._reference = self._log_weight.copy()
        weights = np.exp(log_weights - self._reference)
        self._total += weights.sum(axis=0)
        self._squares += (weights**2).sum(axis=0)
        self._count += len(weights)

    def log_likelihood(self) -> tuple[float, float]:
        """Log density of the records by importance sampling, and its standard error."""
        assert self._reference is not None
        assert self._law is not None
        mean = self._total / self._count
        variances = (self._squares / self._count / mean**2 - 1) / self._count
        values = np.log(mean) + self._reference - log_constant(self._law.root)
        # The logarithm of a mean is too small by half of its relative variance.
        return float((values + variances / 2).sum()), float(np.sqrt(variances.sum()))

    def effective(self) -> np.ndarray:
        """Effective sample size of the weights, as a fraction of the proposals, shape (G,)."""
        return self._total**2 / (self._count * self._squares)


class MonteCarloEM:
    """Maximum marginal likelihood by EM with draws of the local variables.

    Parameters
    ----------
    groups : Groups
    rng : numpy.random.Generator
    error : float
        Largest Monte-Carlo error of a coordinate, in standard errors.
    most_iterations : int
    """

    @quick_graphs()
    def __init__(
        self, groups: Groups, rng: np.random.Generator, error: float, most_iterations: int
    ):
        density = groups.density
        self._groups, self._error, self._most_iterations = groups, error, most_iterations
        self.chains = GroupChains(groups, rng)
        dtype = density.block.dtype
        points = pt.tensor("points", shape=(None, None, density.block_size), dtype=dtype)
        values, inputs = density.at_points(points), [points, density.numbers]
        mean = values.mean(axis=0).sum()
        self._mean = groups.with_gradient(inputs, groups.at_position(mean))
        offsets = pt.vector("offsets", dtype=dtype)
        total = pt.logsumexp(values + offsets[:, None], axis=0).sum()
        self._weighted = groups.with_gradient([*inputs, offsets], groups.at_position(total))
        self._nodes, log_weights = normal_rule(density.block_size, NODES, SEED)
        self._offsets = (log_weights + 0.5 * (self._nodes**2).sum(axis=1)).astype(dtype)

    def expected(self, position: np.ndarray) -> Objective:
        """Mean of the joint log density over the first draws at a position."""
        self.chains.move(position)
        return self._expected(self.chains.draw(FIRST_DRAWS))

    def maximize(self, position: np.ndarray, labels: Sequence[str]) -> MonteCarloMaximum:
        """Maximise from a position.

        Raises
        ------
        ConvergenceError
        """
        position, iterations = self._iterate(position, labels)
        information = None
        for iteration in range(iterations + 1, self._most_iterations + 1):
            self.chains.move(position)
            information = information_at(self._approximation, position, information)
            if not np.isfinite(information).all():
                break
            step, covariance, is_last = self._newton_step(position, information)
            if is_last:
                return self._result(position, step, information, covariance, iteration)
            position = position + step
        raise ConvergenceError(
            f'method="mcem" did not converge within {self._most_iterations} iterations. It is slow '
            "where a variance is close to zero; raise `max_iterations`, or simplify the model."
        )

    def _iterate(self, position: np.ndarray, labels: Sequence[str]) -> tuple[np.ndarray, int]:
        """EM with more and more draws, until it stands still up to their noise."""
        draws, iterations, information = FIRST_DRAWS, 0, None
        while draws <= LAST_DRAWS and iterations < self._most_iterations:
            self.chains.move(position)
            objective = self._expected(self.chains.draw(draws))
            # The squared length of the noise, in standard errors of complete data, is below this,
            # since only a part of the information is missing.
            noise = len(position) / draws
            maximum = maximize(
                objective,
                position,
                MOST_STEPS,
                labels,
                information=information,
                tolerance=PRECISE * noise,
            )
            change, information = maximum.position - position, maximum.information
            if change @ information @ change < noise:
                draws *= 2
            position = maximum.position
            iterations += 1
        return position, iterations

    def _expected(self, points: np.ndarray) -> Objective:
        """Mean of the joint log density over draws, Q."""
        points = points.astype(self._groups.density.block.dtype, copy=False)
        of_chunks = [(points[:, part], part) for part in self._groups.chunks(len(points))]
        return lambda position: self._groups.total(self._mean, of_chunks, position)

    def _approximation(self, position: np.ndarray) -> tuple[float, np.ndarray]:
        """Marginal log likelihood up to a constant, and its gradient by Fisher's identity."""
        law, dtype = self.chains.law(position), self._groups.density.block.dtype

        def of_chunks() -> Iterator[Sequence[np.ndarray]]:
            for part in self._groups.chunks(NODES):
                root = [[entry[part] for entry in row] for row in law.root]
                moved = np.stack(solve_upper(root, list(self._nodes.T[:, :, None])), axis=-1)
                yield (law.centre[part] + moved).astype(dtype), part, self._offsets

        value, gradient = self._groups.total(self._weighted, of_chunks(), position)
        return value - sum(np.log(row[-1]).sum() for row in law.root), gradient

    def _newton_step(
        self, position: np.ndarray, information: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """The next step, the covariance of its Monte-Carlo error, and whether it is the last."""
        values, vectors = scaled_eigenvectors(information)
        determined = np.abs(values) > SMALLEST_EIGENVALUE
        root = vectors[:, determined] / np.sqrt(np.abs(values[determined]))
        lengths = np.linalg.norm(root, axis=1)
        scores: list[np.ndarray] = []
        while True:
            _, score = self._expected(self.chains.draw(BATCH))(position)
            scores.append(score @ root)
            if len(scores) < FEWEST_BATCHES:
                continue
            mean = np.mean(scores, axis=0)
            covariance = np.atleast_2d(np.cov(scores, rowvar=False)) / len(scores)
            distance, noise = np.linalg.norm(mean), np.sqrt(np.trace(covariance))
            is_last = bool(distance <= max(SHORT, 2 * noise))
            errors = np.sqrt(np.einsum("ij,jk,ik->i", root, covariance, root))
            ratio = float((errors / lengths).max())
            if ratio <= self._error or len(scores) >= MOST_BATCHES or not is_last:
                if is_last and ratio > self._error:
                    self._warn_of_error(ratio, len(scores))
                step = root @ (mean * min(1.0, LONGEST / max(distance, 1e-300)))
                return step, root @ covariance @ root.T, is_last

    def _warn_of_error(self, ratio: float, batches: int) -> None:
        _log.warning(
            f"`monte_carlo_error` should be at most {self._error:.2g} standard errors, but is "
            f"{ratio:.2g} after the largest number of draws, {batches * BATCH} a group. The result "
            "states it; use quadrature for up to three local quantities a group."
        )

    def _result(
        self,
        position: np.ndarray,
        step: np.ndarray,
        information: np.ndarray,
        covariance: np.ndarray,
        iterations: int,
    ) -> MonteCarloMaximum:
        """The maximum a step away from the position of the draws."""
        value, error = self.chains.log_likelihood()
        # Draws of each group know the value better than nodes that all groups share.
        shift = value - self._approximation(position)[0]
        if self._groups.other_terms is not None:
            shift += self._groups.other_terms(position)[0]

        def likelihood(at: np.ndarray) -> tuple[float, np.ndarray]:
            approximation, slope = self._approximation(at)
            return approximation + shift, slope

        end = position + step
        information = information_at(likelihood, end, information)
        maximum = Maximum(end, likelihood(end)[0], information, iterations)
        poor = int((self.chains.effective() < SMALLEST_FRACTION).sum())
        if poor:
            names = quoted(self._groups.density.structure.names)
            _log.warning(
                f"The Monte-Carlo error may be larger than stated: the draws of {names} are "
                f"correlated in {poor} of {self._groups.n_groups} groups, whose law is far from a "
                "Student-t law. Compare several values of `random_seed`."
            )
        modes = self.chains.law(end).centre.astype(self._groups.density.block.dtype, copy=False)
        return MonteCarloMaximum(maximum, likelihood, covariance, error, modes)
