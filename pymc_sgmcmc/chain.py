"""One chain of compiled transitions: its state, and how it advances.

A chain depends neither on PyMC nor on the use of its draws. All randomness comes from its own two
generators. So its draws depend only on its state, and not on the process or on how many draws one
call computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pymc_sgmcmc.adaptation import Adaptation, AdaptationState, Seen
from pymc_sgmcmc.batching import EPOCHS_BETWEEN_SHUFFLES
from pymc_sgmcmc.checks import whole_number
from pymc_sgmcmc.engine import TransitionBlock, Transitions
from pymc_sgmcmc.matrices import Matrix
from pymc_sgmcmc.schedules import StepSize, step_sizes

BLOCK_TRANSITIONS = 10_000
"""One call computes at most this many transitions. The time of a call itself is then a small part
of that of its transitions, and more transitions would only take more memory."""

BLOCK_OPERATIONS = 2e8
"""One call computes at most this many transitions x rows x elements of a row. They take a few
tenths of a second, so that the progress bar moves and an interrupt has an effect."""

BLOCK_ELEMENTS = 200_000
"""One call has at most this many transitions x elements of the state, and transitions x integers of
an index. Positions, noise and row numbers then take at most 1.6 MB each, and stay in the cache of
the processor."""


@dataclass(frozen=True)
class Draws:
    """Successive recorded draws of a chain.

    Attributes
    ----------
    positions : numpy.ndarray, shape (draws, d)
    gradients : numpy.ndarray, shape (draws, d)
        Gradient estimates at these positions, which the next transitions use.
    stats : dict of str to numpy.ndarray, shape (draws, ...)
    bad_transition : int or None
        Number of the transition after which position or gradient were not finite. The draws are
        those before it.
    """

    positions: np.ndarray
    gradients: np.ndarray
    stats: dict[str, np.ndarray]
    bad_transition: int | None = None

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True)
class ChainState:
    """State of a chain between two draws, from which it can continue exactly.

    Attributes
    ----------
    position : numpy.ndarray, shape (d,)
    auxiliaries : tuple of numpy.ndarray
        The other parts of the state of the dynamics.
    adapted : tuple of mappings
        States of the adaptations.
    memory : tuple of numpy.ndarray
        Memory of the gradient estimator, which only `Chain.state` fills.
    pending : numpy.ndarray or None
        Indices that are drawn already, for the gradients at the present positions.
    rng, noise_rng : numpy.random.Generator
        Generators of minibatches and of noise. They are copied before they are used.
    order_entropy : int
        Seed of the random orders of the rows.
    memory_rng : numpy.random.Generator
        Generator of the numbers that the memory of the gradient estimator takes.
    pending_noise : numpy.ndarray or None
        Such numbers that are drawn already, for the gradients at the present positions.
    tune : int
        Draws during which the adaptations tune.
    thin : int
        Transitions of the next draw.
    draws, transitions : int
        Draws and transitions since the chain began.
    """

    position: np.ndarray
    auxiliaries: tuple[np.ndarray, ...]
    adapted: tuple[AdaptationState, ...]
    memory: tuple[np.ndarray, ...]
    pending: np.ndarray | None
    rng: np.random.Generator
    noise_rng: np.random.Generator
    order_entropy: int
    memory_rng: np.random.Generator
    pending_noise: np.ndarray | None
    tune: int
    thin: int
    draws: int = 0
    transitions: int = 0


class Chain:
    """A Markov chain from a compiled block of transitions.

    Parameters
    ----------
    block : TransitionBlock
    step_size : float or callable
        A number, or a function of the number of the transition.
    thin : int
        Number of transitions for each recorded draw.
    adaptations : sequence of Adaptation
        Settings that change between runs of draws.
    most_thin : int, optional
        Where it is given, the number of transitions for each draw is set anew at the end of tuning,
        up to this number, so that it times the step size is about what it was.

    Attributes
    ----------
    expected_draws : int
        Draws of the chain that are expected in all, whose rows may be read ahead.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sgmcmc import SGLD
    >>> with pm.Model():
    ...     mean = pm.Normal("mean")
    ...     _ = pm.Normal("y", mean, 1.0, observed=np.arange(10.0))
    ...     step = SGLD(
    ...         batch_size=5,
    ...         step_size=0.01,
    ...         preconditioner="identity",
    ...         compile_kwargs={"mode": "FAST_COMPILE"},
    ...     )
    >>> chain = step.chain
    >>> chain.begin(np.random.default_rng(1), np.zeros(1))
    >>> draws = chain.advance(100)
    >>> draws.positions.shape, draws.gradients.shape, chain.state.draws
    ((100, 1), (100, 1), 100)
    """

    def __init__(
        self,
        block: TransitionBlock,
        *,
        step_size: StepSize,
        thin: int = 1,
        adaptations: Sequence[Adaptation] = (),
        most_thin: int | None = None,
    ):
        self.block = block
        self.step_size = step_size
        self.thin = thin
        self.most_thin = most_thin
        self.adaptations = tuple(adaptations)
        epochs = block.batching.n_rows / block.batching.batch_size * EPOCHS_BETWEEN_SHUFFLES
        self.transitions_per_order = thin * max(1, round(epochs / thin))
        self.expected_draws = 0
        self._state: ChainState | None = None

    # --- State ------------------------------------------------------------------------------

    def begin(
        self,
        rng: np.random.Generator,
        position: np.ndarray,
        *,
        root: Matrix | None = None,
        tune: int = 0,
    ) -> None:
        """Begin at a position.

        Parameters
        ----------
        rng : numpy.random.Generator
            Generator from which the two of the chain are made. Numbers are drawn from it.
        position : numpy.ndarray, shape (d,)
        root : Matrix, optional
            The matrix L. Where it is given, the chain begins at a draw from N(position, L Lᵀ).
        tune : int
            Draws during which the adaptations tune.
        """
        noise_rng, memory_rng, order_entropy = _generators(rng)
        dtype = self.block.dtype
        if root is not None:
            position = position + root @ noise_rng.standard_normal(len(position))
        position = np.array(position, dtype=dtype)
        auxiliaries = self.block.dynamics.initial_auxiliaries(position, noise_rng)
        if self.block.memory is not None:
            self.block.memory.begin(position)
        self._state = ChainState(
            position,
            tuple(values.astype(dtype) for values in auxiliaries),
            tuple(adaptation.begin(position) for adaptation in self.adaptations),
            (),
            None,
            deepcopy(rng),
            noise_rng,
            order_entropy,
            memory_rng,
            None,
            tune,
            self.thin,
        )

    def read_ahead(self, rngs: Sequence[np.random.Generator]) -> None:
        """Bring the rows of chains that will begin from these generators into memory together.

        They are the rows of `expected_draws` draws, as far as these are in the chain's first order.
        """
        batching = self.block.batching
        transitions = min(self.expected_draws * self.thin, self.transitions_per_order)
        orders, indices = [], []
        for rng in rngs:
            of_chain = deepcopy(rng)
            orders.append(_generators(of_chain)[-1])
            indices.append(batching.draw(of_chain, self.block.lag + transitions))
        batching.read_ahead(orders, indices)

    def ahead(self, most: int) -> tuple[int, np.ndarray]:
        """Minibatches of the next transitions, as far as the order of the rows stays.

        Parameters
        ----------
        most : int
            At most so many, but at least those of the next run.

        Returns
        -------
        order : int
            Seed of the order of the rows.
        minibatches : numpy.ndarray, shape (lag + transitions, ...)
            Those of the last gradients, and of the transitions.
        """
        state, block = self._begun(), self.block
        run = self.transitions_of_run()
        count = max(run, min(run + self._following(state, run), most - block.lag))
        rng = _copy(state.rng)
        pending = block.batching.draw(rng, block.lag) if state.pending is None else state.pending
        return self._order(state), np.concatenate([pending, block.batching.draw(rng, count)])

    def has_ahead(self, order: int, first: int, minibatches: int) -> bool:
        """Whether the next run takes minibatches of those that `ahead` gave at transition `first`.

        `minibatches` is their number.
        """
        state = self._begun()
        last = state.transitions - first + self.block.lag + self.transitions_of_run()
        return self._order(state) == order and last <= minibatches

    def transitions_of_run(self) -> int:
        """Transitions of the next run of draws."""
        state = self._begun()
        return min(self.run_length(), self.expected_draws - state.draws) * state.thin

    @property
    def state(self) -> ChainState:
        """State of the chain. The chain continues from a state that is assigned.

        Raises
        ------
        RuntimeError
            Where the chain has not begun.
        """
        state = self._begun()
        if self.block.memory is not None:
            state = replace(state, memory=self.block.memory.read())
        return state

    @state.setter
    def state(self, state: ChainState) -> None:
        if self.block.memory is not None and state.memory:
            self.block.memory.write(state.memory)
        self._state = replace(state, memory=())

    @property
    def snapshot(self) -> ChainState:
        """The state without the memory of the gradient estimator, which may be large."""
        return self._begun()

    @property
    def can_repeat(self) -> bool:
        """Whether draws can be computed again from a snapshot."""
        return self.block.memory is None

    def move(self, position: np.ndarray, *, others_moved: bool = False) -> None:
        """Continue from a position that another step method may have changed.

        Parameters
        ----------
        position : numpy.ndarray, shape (d,)
        others_moved : bool
            Whether variables outside the position may have changed too.
        """
        self._move(position, others_moved)
        if others_moved:
            self.follow_others()

    def _move(self, position: np.ndarray, others_moved: bool) -> None:
        state = self._begun()
        dynamics = self.block.dynamics
        moved = not np.array_equal(position, state.position)
        if not moved and not (others_moved and dynamics.depends_on_others):
            return
        noise_rng = _copy(state.noise_rng)
        auxiliaries = dynamics.auxiliaries_after_move(position, state.auxiliaries, noise_rng)
        dtype = self.block.dtype
        self._state = replace(
            state,
            position=np.array(position, dtype=dtype),
            auxiliaries=tuple(values.astype(dtype) for values in auxiliaries),
            noise_rng=noise_rng,
        )

    def follow_others(self) -> None:
        """Adapt to variables outside the position that may have changed."""
        state = self._begun()
        pairs = zip(self.adaptations, state.adapted, strict=True)
        adapted = tuple(each.with_others(present, state.position) for each, present in pairs)
        self._state = replace(state, adapted=adapted)

    def _begun(self) -> ChainState:
        if self._state is None:
            raise RuntimeError("The chain has not begun. Call `begin` first.")
        return self._state

    # --- Draws ------------------------------------------------------------------------------

    def advance(self, draws: int, noise: np.ndarray | None = None) -> Draws:
        """Advance by a number of draws.

        Where the position or the gradient becomes NaN or infinite, fewer draws are returned, and
        the chain stays in the state in which its last run of draws began.

        Parameters
        ----------
        draws : int
        noise : numpy.ndarray, shape (transitions, noise_size), optional
            Standard normal numbers of all transitions, in place of those of the chain's generator.

        Raises
        ------
        TypeError, ValueError
            Where `draws` is no whole number, at least 1.
        """
        parts: list[Draws] = []
        remaining = whole_number("draws", draws, 1)
        while remaining > 0:
            count = min(remaining, self.run_length())
            given = None
            if noise is not None:
                given, noise = np.split(noise, [count * self._begun().thin])
            part = self._run(count, given)
            parts.append(part)
            remaining -= len(part)
            if part.bad_transition is not None:
                break
        if len(parts) == 1:
            return parts[0]
        return Draws(
            np.concatenate([part.positions for part in parts]),
            np.concatenate([part.gradients for part in parts]),
            {name: np.concatenate([part.stats[name] for part in parts]) for name in parts[0].stats},
            parts[-1].bad_transition,
        )

    def run_length(self) -> int:
        """Draws that one call may compute: up to the next change, within memory and time."""
        state = self._begun()
        block, done = self.block, state.draws
        tuning = done < state.tune
        changing = [each for each in self.adaptations if tuning or not each.only_tunes]
        periods = [self._draws_between(each.transitions) for each in changing]
        left = self.transitions_per_order - state.transitions % self.transitions_per_order
        until_change = min([-(-left // state.thin), *(each - done % each for each in periods)])
        if tuning:
            until_change = min(until_change, state.tune - done)
        elements = block.batching.batch_size * max(1, block.row_elements)
        transitions = min(
            BLOCK_TRANSITIONS if block.static_length is None else block.static_length,
            BLOCK_OPERATIONS / elements,
            BLOCK_ELEMENTS
            / max(block.state_elements, block.batching.index_size, block.memory_noise_size),
            block.batching.most_minibatches - block.lag,
        )
        return max(1, min(int(transitions // state.thin), until_change))

    def present_step_size(self, transition: int | None = None) -> float:
        """Step size of the next transition, or of a given one, as adapted at present."""
        state = self._begun()
        number = state.transitions if transition is None else transition
        size = step_sizes(self.step_size, number, 1)
        return float(self._adapted_step_sizes(size, state)[0])

    def _adapted_step_sizes(self, sizes: np.ndarray, state: ChainState) -> np.ndarray:
        for adaptation, adapted in zip(self.adaptations, state.adapted, strict=True):
            sizes = sizes * adaptation.step_size_factor(adapted)
        return sizes

    def _thin_after(self, state: ChainState, count: int, adapted: Sequence[AdaptationState]) -> int:
        """Transitions of the draws after this run, which change at the end of tuning alone.

        The changes are by powers of two, so that chains with about the same step size agree.
        """
        if self.most_thin is None or not state.draws < state.tune == state.draws + count:
            return state.thin
        factor = np.prod(
            [
                adaptation.step_size_factor(present)
                for adaptation, present in zip(self.adaptations, adapted, strict=True)
            ]
        )
        wanted = np.ceil(self.thin * 2.0 ** np.round(-np.log2(factor)))
        return int(np.clip(wanted, 1, max(self.most_thin, self.thin)))

    def _following(self, state: ChainState, transitions: int) -> int:
        """Transitions that are expected after the next ones, with the rows in the same order."""
        of_order = self.transitions_per_order - state.transitions % self.transitions_per_order
        of_chain = (self.expected_draws - state.draws) * state.thin
        return max(0, min(of_order, of_chain) - transitions)

    def _draws_between(self, transitions: int) -> int:
        """Draws at present between two boundaries that are so many transitions apart."""
        return max(1, round(transitions / self._begun().thin))

    def _order(self, state: ChainState) -> int:
        """Seed of the order of the rows at the present draw, the chain's own."""
        return state.order_entropy + state.transitions // self.transitions_per_order

    def _run(self, count: int, noise: np.ndarray | None = None) -> Draws:
        """Compute draws in one call, and set the state after them."""
        state = self._begun()
        block, batching, thin = self.block, self.block.batching, state.thin
        batching.set_order(self._order(state))
        if block.memory is not None and state.transitions % self.transitions_per_order < thin:
            block.memory.settle()
        for adaptation, adapted in zip(self.adaptations, state.adapted, strict=True):
            adaptation.load(adapted)

        transitions = count * thin
        rng, noise_rng, memory_rng = map(_copy, (state.rng, state.noise_rng, state.memory_rng))
        pending = batching.draw(rng, block.lag) if state.pending is None else state.pending
        indices = np.concatenate([pending, batching.draw(rng, transitions)])
        dtype = np.dtype(block.dtype)
        if noise is None:
            noise = block.draw_noise(noise_rng, transitions)
        sizes = step_sizes(self.step_size, state.transitions, transitions)
        sizes = self._adapted_step_sizes(sizes, state)
        # They have a generator of their own, so that draws do not depend on the length of a run.
        missing = len(indices) - (0 if state.pending_noise is None else block.lag)
        memory_noise = memory_rng.standard_normal((missing, block.memory_noise_size), dtype=dtype)
        if state.pending_noise is not None:
            memory_noise = np.concatenate([state.pending_noise, memory_noise])
        located = batching.in_memory(indices, rng, self._following(state, transitions))
        ran = block(
            (state.position, *state.auxiliaries), located, noise, sizes, memory_noise, reuse=True
        )

        recorded = slice(thin - 1, None, thin)
        with np.errstate(over="ignore", invalid="ignore"):
            # A gradient whose squared norm overflows counts as infinite.
            norms = np.sqrt(np.einsum("bd,bd->b", ran.gradients, ran.gradients))
            finite = np.isfinite(norms + np.einsum("bd,bd->b", ran.positions, ran.positions))
        stats = {
            "step_size": sizes[recorded],
            "gradient_norm": norms[recorded],
            "n_steps": np.full(count, thin),
            **{
                name: values[recorded].copy()
                for name, values in zip(block.dynamics.stats, ran.stats, strict=True)
            },
        }
        bad_transition, good = None, count
        if not finite.all():
            first = int(np.argmin(finite))
            bad_transition, good = state.transitions + first, first // thin
            for adaptation in self.adaptations:
                stats |= {
                    name: np.full(count, missing_value(dtype))
                    for name, dtype in adaptation.stats.items()
                }
        else:
            states, adapted_stats = self._adapt(state, ran, indices[-1], sizes)
            stats |= adapted_stats
            self._state = replace(
                state,
                position=np.array(ran.positions[-1]),
                auxiliaries=tuple(np.array(part[-1]) for part in ran.auxiliaries),
                adapted=states,
                pending=indices[-block.lag :],
                rng=rng,
                noise_rng=noise_rng,
                memory_rng=memory_rng,
                pending_noise=memory_noise[-block.lag :],
                thin=self._thin_after(state, count, states),
                draws=state.draws + count,
                transitions=state.transitions + transitions,
            )
        return Draws(
            # Copies let the memory of the transitions between draws be freed.
            ran.positions[recorded][:good].copy(),
            ran.gradients[recorded][:good].copy(),
            {name: values[:good] for name, values in stats.items()},
            bad_transition,
        )

    def _adapt(
        self, state: ChainState, ran: Transitions, next_index: np.ndarray, sizes: np.ndarray
    ) -> tuple[tuple[AdaptationState, ...], dict[str, np.ndarray]]:
        """States of the adaptations after these transitions, and their statistics."""
        states: list[AdaptationState] = []
        stats: dict[str, np.ndarray] = {}
        done = state.draws + len(sizes) // state.thin
        for adaptation, adapted in zip(self.adaptations, state.adapted, strict=True):
            seen = Seen(
                ran.positions,
                ran.gradients,
                partial(self.block.batching.selected, next_index),
                tuning=state.draws < state.tune,
                at_boundary=done % self._draws_between(adaptation.transitions) == 0,
                thin=state.thin,
                step_sizes=sizes,
            )
            adapted, recorded = adaptation.update(adapted, seen)
            states.append(adapted)
            stats |= recorded
        return tuple(states), stats


def _copy(rng: np.random.Generator) -> np.random.Generator:
    """Copy of a generator, to draw from but not to spawn: the seed sequence is the same object.

    `deepcopy` takes four times as long, which counts where each call computes only one draw.
    """
    bit_generator = rng.bit_generator
    copied = type(bit_generator)(bit_generator.seed_seq)  # type: ignore[arg-type]
    copied.state = bit_generator.state
    return np.random.Generator(copied)


def _generators(rng: np.random.Generator) -> tuple[np.random.Generator, np.random.Generator, int]:
    """Generators of noise and memory, and the seed of the orders of rows, of a chain."""
    noise_rng, memory_rng = rng.spawn(2)
    return noise_rng, memory_rng, int(rng.integers(1, 2**31))


def missing_value(dtype: np.dtype | type) -> Any:
    """Value of a statistic for a draw that was not made: zero, or false."""
    return np.zeros((), dtype)[()]
