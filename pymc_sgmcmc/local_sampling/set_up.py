"""Scales and first draws of the local variables of all groups, at a position of the global ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.local_sampling.complete import CompleteData
from pymc_sgmcmc.local_sampling.local_transitions import LangevinTransitions, LocalTransitions
from pymc_sgmcmc.marginal.quadrature import MOST_QUADRATURE_SIZE, call_of
from pymc_sgmcmc.matrices import Diagonal
from pymc_sgmcmc.record import LARGEST_MEAN_ERROR
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
"""The choice is made with this many groups, some of them several times where there are fewer.
Jumps then have an error of a few percent."""

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

FARTHEST_STARTS = (3.0, 10.0, 30.0)
"""Second modes are searched from random points at these distances from the first one, in standard
deviations. They cover the modes of mixtures whose components are a tenth as wide as the mixture."""

SMALLEST_SHARE = 0.05
"""A second mode counts where each of both has more than this share of their probability, by
Gaussian approximations. A visit may leave an autocorrelation of this size too."""

LOWEST_BARRIER = 3.0
"""A second mode counts where the log density between both is lower by more than this. Transitions
then pass from one to the other in less than one of twenty."""

POINTS_BETWEEN = 15
"""The log density between two modes is evaluated at this many points."""

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
    roots : numpy.ndarray, shape (G, q, q)
        Roots of covariances, of about the size of those of the local variables.
    """

    transitions: LocalTransitions
    blocks: np.ndarray
    roots: np.ndarray


class _Height(NamedTuple):
    """What is known of points of groups, each of shape (n,)."""

    value: np.ndarray
    mass: np.ndarray
    is_mode: np.ndarray


class _Newton:
    """Modes and roots of the covariance of the local variables of all groups."""

    def __init__(self, complete: CompleteData, position: np.ndarray):
        self.position, self.size = position, complete.block_size
        self._evaluate = complete.compile(
            lambda *at: [complete.log_density(*at), complete.gradient_by_block(*at)]
        )

    def find(self, numbers: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Modes, shape (n, q), and roots, shape (n, q, q)."""
        value, slope = self._evaluate(self.position, numbers, block)
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

    def height(self, numbers: np.ndarray, block: np.ndarray, roots: np.ndarray) -> _Height:
        """Log density and mass of the Gaussian approximation at points found."""
        value, slope = self._evaluate(self.position, numbers, block)
        white = np.einsum("gji,gj->gi", roots, slope)
        mass = value + np.linalg.slogdet(roots)[1]
        return _Height(value, mass, (white**2).sum(axis=1) < CLOSE)

    def lowest_between(
        self, numbers: np.ndarray, block: np.ndarray, other: np.ndarray
    ) -> np.ndarray:
        """Lowest log density on the lines between points, shape (n,)."""
        values = [
            self._evaluate(self.position, numbers, block + part * (other - block))[0]
            for part in np.linspace(0, 1, POINTS_BETWEEN + 2)[1:-1]
        ]
        return np.min(values, axis=0)

    def _raise(self, numbers, block, value, slope, step):
        """The step, shortened in each group until the log density rises."""
        fraction = np.ones(len(block))
        for _ in range(10):
            proposal = block + fraction[:, None] * step
            there, slope_there = self._evaluate(self.position, numbers, proposal)
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
        hessian = np.empty((*block.shape, self.size))
        for column in range(self.size):
            shift = np.zeros_like(block)
            shift[:, column] = DIFFERENCE * scale[:, column]
            _, above = self._evaluate(self.position, numbers, block + shift)
            _, below = self._evaluate(self.position, numbers, block - shift)
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
    with np.errstate(invalid="ignore"):  # Log densities may be infinite far away.
        _warn_of_second_modes(complete, newton, modes, roots)

    local = LangevinTransitions(complete, roots, CORRELATIONS[0], 1)
    run = _Visits(complete, local, rng)
    # Two chains for each group: the distance between them is the variance.
    numbers = np.tile(np.resize(rng.permutation(complete.n_groups), PILOT_GROUPS), 2)
    best, least = CORRELATIONS[0], np.inf
    for correlation in CORRELATIONS:
        local.correlation = correlation
        remaining = run.autocorrelation(position, numbers, blocks, roots)
        if remaining < least:
            best, least = correlation, remaining
    local.correlation = best
    if transitions is None:
        wanted = np.log(REMAINING) / np.log(np.clip(least, 1e-6, 1 - 1e-6))
        transitions = int(np.clip(np.ceil(wanted), 1, MOST_TRANSITIONS))
    if least**transitions > SLOW:
        _log.warning(lag_message(complete, least**transitions))
    blocks = np.concatenate(
        [run.states(position, part, blocks[part])[-1] for part in complete.chunks()]
    )
    local.transitions = transitions
    return LocalSetup(local, blocks, roots)


def given_setup(
    complete: CompleteData, local: LocalTransitions, position: np.ndarray
) -> LocalSetup:
    """Transitions of a user, and blocks after some visits with them."""
    start = complete.starting_blocks(position)
    visits = _Visits(complete, local, np.random.default_rng(SEED))
    blocks = np.concatenate(
        [visits.states(position, part, start[part])[-1] for part in complete.chunks()]
    )
    spread = blocks.std(axis=0)
    root = np.diag(np.where(spread > 0, spread, 1.0))
    return LocalSetup(local, blocks, np.broadcast_to(root, (len(blocks), *root.shape)))


def lag_message(complete: CompleteData, remaining: float) -> str:
    """Warning where a visit leaves much of its start."""
    return (
        f"A visit leaves an autocorrelation of {remaining:.2g} in local variables of "
        f"{quoted(complete.names)}, so their draws lag behind the other variables. Use more "
        "`transitions` in `LocalSampling`, initial values of the model near the mode, or a "
        "transition of your own."
    )


def _warn_of_second_modes(
    complete: CompleteData, newton: _Newton, modes: np.ndarray, roots: np.ndarray
) -> None:
    """Warn where local variables have modes between which transitions do not move."""
    rng = np.random.default_rng(SEED)
    numbers = np.resize(rng.permutation(complete.n_groups), PILOT_GROUPS)
    has_second = np.zeros(len(numbers), dtype=bool)
    best = modes[numbers]
    first = newton.height(numbers, best, roots[numbers])
    for distance in FARTHEST_STARTS:
        shift = distance * rng.standard_normal(best.shape)
        start = modes[numbers] + np.einsum("gij,gj->gi", roots[numbers], shift)
        others, other_roots = newton.find(numbers, start)
        second = newton.height(numbers, others, other_roots)
        share = 1 / (1 + np.exp(np.clip(np.abs(first.mass - second.mass), 0, 50)))
        barrier = np.minimum(first.value, second.value) - newton.lowest_between(
            numbers, best, others
        )
        has_second |= second.is_mode & (share > SMALLEST_SHARE) & (barrier > LOWEST_BARRIER)
        higher = second.is_mode & (second.mass > first.mass)
        best = np.where(higher[:, None], others, best)
        first = _Height(*(np.where(higher, *pair) for pair in zip(second, first, strict=True)))
    if has_second.any():
        _log.warning(
            f"Local variables of {quoted(complete.names)} have second modes in "
            f"{has_second.mean():.0%} of the groups, and Langevin transitions do not pass between "
            "them. Give a `transition` of your own in `LocalSampling` that does."
        )


class ModeGradients:
    """Gradients of groups at the modes of their local variables, close to the marginal ones.

    They are those of Laplace's approximation but for its determinant, whose derivatives make large
    graphs.

    Parameters
    ----------
    complete : CompleteData
    """

    def __init__(self, complete: CompleteData):
        self._complete = complete

    @cached_property
    def _functions(self) -> tuple[_Newton, Callable[..., list[np.ndarray]]]:
        complete = self._complete
        newton = _Newton(complete, np.empty(0))
        functions = complete.compile(lambda *at: [complete.start(*at), complete.row_gradients(*at)])
        return newton, functions

    def __call__(self, position: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Gradients by the position, shape (n, d), of the groups with these numbers."""
        newton, functions = self._functions
        newton.position = position
        start, _ = functions(position, numbers, np.zeros((len(numbers), newton.size)))
        blocks, _ = newton.find(numbers, start)
        return functions(position, numbers, blocks)[1]

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the functions, which are compiled again when needed."""
        return {"_complete": self._complete}


class _Visits:
    """Visits to groups at a position, with numbers of a generator."""

    def __init__(self, complete: CompleteData, local: LocalTransitions, rng: np.random.Generator):
        self._rng, self._local = rng, local
        shape = (local.transitions, None, local.noise_size)
        noise = pt.tensor("noise", shape=shape, dtype=complete.dtype)
        self._visit = complete.compile(lambda *at: [local.run(*at)], [noise], local.transitions)
        self._transitions = local.transitions

    def visit(
        self, positions: Sequence[np.ndarray], numbers: np.ndarray, blocks: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Blocks after a visit at each of several positions, with the same noise."""
        shape = (self._transitions, len(numbers), self._local.noise_size)
        noise = self._rng.standard_normal(shape)
        return [
            self._visit(position, numbers, block, noise)[0]
            for position, block in zip(positions, blocks, strict=True)
        ]

    def states(self, position: np.ndarray, numbers: np.ndarray, block: np.ndarray) -> np.ndarray:
        """Blocks after each of some visits, shape (visits, n, q)."""
        states = np.empty((PILOT_TRANSITIONS, *block.shape), dtype=block.dtype)
        for state in states:
            (block,) = self.visit([position], numbers, [block])
            state[:] = block
        return states

    def autocorrelation(
        self, position: np.ndarray, numbers: np.ndarray, blocks: np.ndarray, roots: np.ndarray
    ) -> float:
        """Largest autocorrelation of the local quantities, from two chains of each group."""
        count = len(numbers) // 2
        start = blocks[numbers]
        # The second chains begin elsewhere.
        moved = self._rng.standard_normal(start[count:].shape)
        start[count:] += np.einsum("gij,gj->gi", roots[numbers[count:]], moved)
        states = self.states(position, numbers, start)[PILOT_TRANSITIONS // 2 :]
        white = np.einsum("gij,tgj->tgi", np.linalg.inv(roots[numbers]), states)
        jumps = (np.diff(white, axis=0) ** 2).mean(axis=(0, 1))
        apart = ((white[:, :count] - white[:, count:]) ** 2).mean(axis=(0, 1))
        return float((1 - jumps / apart).max())


class GradientDraws(_Visits):
    """Gradients of groups at draws of their local variables, to compute noise and means.

    Parameters
    ----------
    complete : CompleteData
    setup : LocalSetup
    """

    def __init__(self, complete: CompleteData, setup: LocalSetup):
        super().__init__(complete, setup.transitions, np.random.default_rng(SEED))
        self._complete, self._setup = complete, setup

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
        return RowNoise(np.concatenate(deviations), complete.n_groups, 0.0, np.empty(0, dtype=int))

    def remaining(self, position: np.ndarray, blocks: np.ndarray) -> float:
        """Autocorrelation that a visit at a position leaves of local variables in use."""
        rng = np.random.default_rng(SEED)
        numbers = np.resize(rng.permutation(self._complete.n_groups), PILOT_GROUPS)
        return self.autocorrelation(position, np.tile(numbers, 2), blocks, self._setup.roots)

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
        else:
            self._warn_of_mean(np.array(rounds) @ root)
        return np.mean(rounds, axis=0)

    def _warn_of_mean(self, rounds: np.ndarray) -> None:
        """Warn where the average is not known well after the largest number of rounds."""
        means = np.mean(np.array_split(rounds, len(rounds) // ROUNDS), axis=1)
        error = float(means.std(axis=0, ddof=1).max() / np.sqrt(len(means)))
        if error > LARGEST_MEAN_ERROR:
            structure = self._complete.density.structure
            small = structure.block_size <= MOST_QUADRATURE_SIZE
            _log.warning(
                f"The gradient at the centre moves means by up to {error:.2g} standard deviations, "
                f"since {quoted(self._complete.names)} vary much given the records. Use "
                "`LocalSampling(..., control_variates=False)`"
                f"{f' or {call_of(structure, quadratic=False)}' if small else ''}."
            )

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
