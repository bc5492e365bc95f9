"""Scales and first draws of the local variables of all groups, at a position of the global ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytensor.tensor as pt

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.marginal.complete import CompleteData
from pymc_sgmcmc.marginal.local_transitions import LangevinTransitions, LocalTransitions
from pymc_sgmcmc.matrices import Diagonal
from pymc_sgmcmc.tuning.center import Center
from pymc_sgmcmc.tuning.curvature import Curvature
from pymc_sgmcmc.tuning.row_noise import NOISE_POINTS, RowNoise

_log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold

MOST_STEPS = 50
"""Newton's method for the modes ends after this many steps. Groups need four to ten."""

CLOSE = 1e-4
"""A mode is found where the squared length of the next step is below this, in standard deviations.
The modes only give scales and first values."""

LONGEST_STEP = 3.0
"""A step is at most this many standard deviations long."""

DIFFERENCE = 1e-3
"""Second derivatives are differences of gradients over this part of the present scale."""

SMALLEST_CURVATURE = 1e-3
"""Directions without curvature get at least this part of the largest one of their group, so that a
scale is at most thirty times the smallest."""

CORRELATIONS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
"""The autocorrelation of the proposals is chosen among these by the distance of the jumps."""

PILOT_GROUPS = 300
"""The choice is made with at most this many groups. Jumps then have an error of a few percent."""

PILOT_TRANSITIONS = 20
"""Each candidate makes this many transitions, of which the second half counts. All groups make as
many before a chain begins."""

REMAINING = 0.05
"""A visit makes enough transitions for this autocorrelation between its start and its end, at most
`MOST_TRANSITIONS`. The draw lags behind the global variables by this part."""

MOST_TRANSITIONS = 20
"""A visit makes at most this many transitions by default, to bound its cost."""

SLOW = 0.3
"""A warning is given where a visit leaves more than this autocorrelation. On a linear mixed model
the variances then change by more than two percent."""

NOISE_GROUPS = 2000
"""The noise of the gradient is that of this many groups: its variance has an error of 3 %."""

VISITS = 5
"""The noise of control variates is taken after this many visits at a position."""

MEAN_ERROR = 0.03
"""The gradient of all groups at the centre is an average over draws, until its error moves no mean
by more than this many posterior standard deviations."""

MOST_ROUNDS = 2000
"""The average has at most this many draws a group, to bound its time."""

ROUNDS = 25
"""The error is estimated anew after this many draws a group."""

GIVEN_ROUNDS = 200
"""At a given centre without Laplace's approximation the average has this many draws a group. Its
error is then 7 % of a standard deviation where half of the information is missing."""

SEED = 20_181_012
"""The numbers of the pilot come from this fixed seed, so that the same model gives the same."""


@dataclass(frozen=True)
class LocalSetup:
    """Transitions of the local variables, and their first values.

    Attributes
    ----------
    transitions : LocalTransitions
    blocks : numpy.ndarray, shape (G, q)
    """

    transitions: LocalTransitions
    blocks: np.ndarray


class _Newton:
    """Modes and roots of the covariance of the local variables of all groups."""

    def __init__(self, complete: CompleteData, position: np.ndarray):
        self._position, self._size = position, complete.block_size
        self._evaluate = complete.compile(
            lambda *at: [complete.log_density(*at), complete.gradient_by_block(*at)]
        )

    def find(self, numbers: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Modes, shape (n, q), and roots, shape (n, q, q)."""
        value, slope = self._evaluate(self._position, numbers, block)
        roots = self._roots(numbers, block, np.ones_like(block))
        for _ in range(MOST_STEPS):
            white = np.einsum("gji,gj->gi", roots, slope)
            length = np.linalg.norm(white, axis=1)
            if (length**2 < CLOSE).all():
                break
            step = np.einsum("gij,gj->gi", roots, white)
            step *= np.minimum(1, LONGEST_STEP / np.maximum(length, 1e-300))[:, None]
            block, value, slope = self._raise(numbers, block, value, slope, step)
            roots = self._roots(numbers, block, np.sqrt((roots**2).sum(axis=2)))
        return block, roots

    def _raise(self, numbers, block, value, slope, step):
        """The step, shortened in each group until the log density rises."""
        fraction = np.ones(len(block))
        for _ in range(10):
            proposal = block + fraction[:, None] * step
            there, slope_there = self._evaluate(self._position, numbers, proposal)
            worse = ~(there >= value - 1e-9 * np.abs(value)) | ~np.isfinite(slope_there).all(1)
            if not worse.any():
                break
            fraction[worse] /= 4
        else:
            proposal = np.where(worse[:, None], block, proposal)
            there = np.where(worse, value, there)
            slope_there = np.where(worse[:, None], slope, slope_there)
        return proposal, there, slope_there

    def _roots(self, numbers: np.ndarray, block: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Roots of the inverse negative Hessian, made positive."""
        hessian = np.empty((*block.shape, self._size))
        for column in range(self._size):
            shift = np.zeros_like(block)
            shift[:, column] = DIFFERENCE * scale[:, column]
            _, above = self._evaluate(self._position, numbers, block + shift)
            _, below = self._evaluate(self._position, numbers, block - shift)
            hessian[:, :, column] = (above - below) / (2 * shift[:, column])[:, None]
        hessian = np.nan_to_num(-(hessian + hessian.transpose(0, 2, 1)) / 2)
        values, vectors = np.linalg.eigh(hessian)
        values = np.abs(values)
        largest = values.max(axis=1, keepdims=True)
        floor = np.where(largest > 0, SMALLEST_CURVATURE * largest, 1.0)
        return vectors / np.sqrt(np.maximum(values, floor))[:, None, :]


def langevin_setup(
    complete: CompleteData, position: np.ndarray, transitions: int | None = None
) -> LocalSetup:
    """Langevin transitions scaled at a position, and blocks after some of them.

    Parameters
    ----------
    complete : CompleteData
    position : numpy.ndarray, shape (d,)
    transitions : int, optional
        Transitions of a visit. Default: enough to forget its start, see `REMAINING`.
    """
    start = complete.starting_blocks(position)
    newton = _Newton(complete, position)
    parts = [newton.find(numbers, start[numbers]) for numbers in complete.chunks()]
    modes, roots = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    rng = np.random.default_rng(SEED)
    blocks = modes + np.einsum("gij,gj->gi", roots, rng.standard_normal(modes.shape))

    local = LangevinTransitions(complete, roots, CORRELATIONS[0], 1)
    run = _Run(complete, local, position, rng)
    # Two chains for each group: the distance between them is the variance.
    numbers = np.tile(rng.permutation(complete.n_groups)[:PILOT_GROUPS], 2)
    best, least = CORRELATIONS[0], np.inf
    for correlation in CORRELATIONS:
        local.correlation = correlation
        remaining = run.autocorrelation(numbers, blocks, roots)
        if remaining < least:
            best, least = correlation, remaining
    local.correlation = best
    if transitions is None:
        wanted = np.log(REMAINING) / np.log(np.clip(least, 1e-6, 1 - 1e-6))
        transitions = int(np.clip(np.ceil(wanted), 1, MOST_TRANSITIONS))
    if least**transitions > SLOW:
        _log.warning(
            f"A visit leaves an autocorrelation of {least**transitions:.2g} in local variables of "
            f"{quoted(complete.names)}, so their draws lag behind the other variables. Use more "
            "`transitions` in `LocalSampling`, or a transition of your own."
        )
    blocks = np.concatenate([run.states(part, blocks[part])[-1] for part in complete.chunks()])
    local.transitions = transitions
    return LocalSetup(local, blocks)


class _Run:
    """Transitions of groups at a fixed position."""

    def __init__(
        self,
        complete: CompleteData,
        local: LocalTransitions,
        position: np.ndarray,
        rng: np.random.Generator,
    ):
        self._position, self._rng, self._local = position, rng, local
        noise = pt.tensor("noise", shape=(1, None, local.noise_size), dtype=complete.dtype)
        self._step = complete.compile(lambda *at: [local.run(*at)], [noise])

    def states(self, numbers: np.ndarray, block: np.ndarray) -> np.ndarray:
        """Blocks after each of the transitions, shape (transitions, n, q)."""
        states = np.empty((PILOT_TRANSITIONS, *block.shape), dtype=block.dtype)
        for state in states:
            noise = self._rng.standard_normal((1, len(numbers), self._local.noise_size))
            (block,) = self._step(self._position, numbers, block, noise)
            state[:] = block
        return states

    def autocorrelation(self, numbers: np.ndarray, blocks: np.ndarray, roots: np.ndarray) -> float:
        """Largest autocorrelation of the local quantities, from two chains of each group."""
        count = len(numbers) // 2
        start = blocks[numbers]
        # The second chains begin elsewhere.
        moved = self._rng.standard_normal(start[count:].shape)
        start[count:] += np.einsum("gij,gj->gi", roots[numbers[count:]], moved)
        states = self.states(numbers, start)[PILOT_TRANSITIONS // 2 :]
        white = np.einsum("gij,tgj->tgi", np.linalg.inv(roots[numbers]), states)
        jumps = (np.diff(white, axis=0) ** 2).mean(axis=(0, 1))
        apart = ((white[:, :count] - white[:, count:]) ** 2).mean(axis=(0, 1))
        return float((1 - jumps / apart).max())


class GradientDraws:
    """Gradients of groups at draws of their local variables, to compute noise and means.

    Parameters
    ----------
    complete : CompleteData
    setup : LocalSetup
    """

    def __init__(self, complete: CompleteData, setup: LocalSetup):
        self._complete, self._setup = complete, setup
        self._local = local = setup.transitions
        shape = (local.transitions, None, local.noise_size)
        noise = pt.tensor("noise", shape=shape, dtype=complete.dtype)
        self._visit = complete.compile(lambda *at: [local.run(*at)], [noise])
        self._rng = np.random.default_rng(SEED)

    def visit(
        self, positions: Sequence[np.ndarray], numbers: np.ndarray, blocks: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Blocks after a visit at each of several positions, with the same noise."""
        shape = (self._local.transitions, len(numbers), self._local.noise_size)
        noise = self._rng.standard_normal(shape)
        return [
            self._visit(position, numbers, block, noise)[0]
            for position, block in zip(positions, blocks, strict=True)
        ]

    def noise(self, center: Center, *, control_variate: bool) -> RowNoise:
        """Noise of the gradients of groups, at the centre or, with control variates, around it."""
        complete = self._complete
        chosen = self._rng.permutation(complete.n_groups)[:NOISE_GROUPS]
        gradients = complete.compile(lambda *at: [complete.row_gradients(*at)])
        positions = [center.position]
        parts = [chosen]
        if control_variate:
            draws = self._rng.standard_normal((NOISE_POINTS, len(center.position)))
            positions = [center.position + center.curvature.root @ draw for draw in draws]
            parts = np.array_split(chosen, min(NOISE_POINTS, max(1, len(chosen) // 8)))
        deviations = []
        for position, numbers in zip(positions, parts, strict=False):
            pair = [position, center.position] if control_variate else [position]
            blocks = [self._setup.blocks[numbers]] * len(pair)
            for _ in range(VISITS):
                blocks = self.visit(pair, numbers, blocks)
            rows = [
                gradients(at, numbers, block)[0] for at, block in zip(pair, blocks, strict=True)
            ]
            difference = rows[0] - rows[1] if control_variate else rows[0]
            bessel = np.sqrt(len(difference) / max(1, len(difference) - 1))
            deviations.append(bessel * (difference - difference.mean(axis=0)))
        return RowNoise(np.concatenate(deviations), complete.n_groups, np.empty(0, dtype=int))

    def mean_gradient(self, center: Center) -> np.ndarray:
        """Gradient of the marginal log likelihood at the centre, shape (d,)."""
        root = center.curvature.root
        rounds: list[np.ndarray] = []
        for total in self._totals(center.position):
            rounds.append(total)
            if len(rounds) % ROUNDS == 0:
                errors = np.std([each @ root for each in rounds], axis=0, ddof=1)
                if errors.max() / np.sqrt(len(rounds)) < MEAN_ERROR:
                    break
        return np.mean(rounds, axis=0)

    def center_at(self, position: np.ndarray, prior_gradient: np.ndarray) -> Center:
        """Centre at a position without Laplace's approximation.

        Its curvature is the variance of the gradient of all groups given the records, which is the
        information that is missing for the local variables.
        """
        rounds = np.array(list(islice(self._totals(position), GIVEN_ROUNDS)))
        total, variance = rounds.mean(axis=0), rounds.var(axis=0, ddof=1)
        precision = Diagonal(np.maximum(variance, 1e-6 * variance.max()))
        root = Diagonal(precision.values**-0.5)
        curvature = Curvature(precision, precision.inverse, root)
        return Center(position, total + prior_gradient, total, curvature)

    def _totals(self, position: np.ndarray) -> Iterator[np.ndarray]:
        """Gradients of all groups together, one after each visit to all of them."""
        complete = self._complete
        gradient = complete.compile(lambda *at: [complete.gradient(*at)])
        blocks = self._setup.blocks.copy()
        for _ in range(MOST_ROUNDS):
            total = np.zeros(len(position))
            for numbers in complete.chunks():
                (moved,) = self.visit([position], numbers, [blocks[numbers]])
                blocks[numbers] = moved
                total = total + gradient(position, numbers, moved)[0]
            yield total
