"""Many chains at once on the device of JAX.

The transitions that a block has for one chain are mapped over chains. Noise and minibatches are
drawn on the device, so that only the recorded draws leave it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from pymc_sgmcmc.batching import (
    AllRows,
    Batching,
    ShuffledWindows,
    StridedRows,
    WithReplacement,
    first_order,
    numbers_without,
)
from pymc_sgmcmc.engine import TransitionBlock

DEVICE_ELEMENTS = 2**28
"""Chains whose arrays have together at most this many elements, 2 GB, are computed at once, and
further ones after them."""

STRIDES = 4096
"""Windows of shuffled rows have one of about so many strides. With strides each transition has a
window of its own, while those of a single stride would be the same few for all chains."""

KEY = "threefry2x32"
"""Generator of JAX, whose keys are two integers. It is JAX's default, which a user may change."""


@dataclass(frozen=True)
class StateOnDevice:
    """State of C chains between two calls.

    Attributes
    ----------
    seeds : array of uint32, shape (C, 2)
        A key for each chain. Its random numbers follow from it and the number of the call.
    parts : tuple of arrays, each (C, ...)
        Positions and auxiliaries.
    pending : array, shape (C, lag, ...)
        Minibatches of the gradients at the present positions.
    calls : int
    """

    seeds: Any
    parts: tuple[Any, ...]
    pending: Any
    calls: int = 0


@dataclass(frozen=True)
class DrawsOfChains:
    """Recorded draws of C chains.

    Attributes
    ----------
    positions, gradients : numpy.ndarray, shape (C, draws, d)
    stats : tuple of numpy.ndarray, each (C, draws)
        Statistics of the dynamics.
    first_bad : numpy.ndarray of int, shape (C,)
        First transition of the call after which position or gradient were not finite, -1 where
        there is none.
    """

    positions: np.ndarray
    gradients: np.ndarray
    stats: tuple[np.ndarray, ...]
    first_bad: np.ndarray


class ChainsOnDevice:
    """The transitions of many chains, which differ in noise, minibatches and state.

    Parameters
    ----------
    block : TransitionBlock
        A block that was compiled for JAX.

    Raises
    ------
    ValueError
        Where the block has a memory, or minibatches that are not drawn on a device.
    """

    def __init__(self, block: TransitionBlock):
        self._transitions, self._shared = block.jax_function()
        assert block.static_length is not None
        # Not the block itself, so that it can be forgotten with what was compiled for it.
        self._length, self._lag, self._dtype = block.static_length, block.lag, block.dtype
        self._noise_size, self._batching = block.noise_size, block.batching
        self._minibatches = minibatches_on_device(block.batching)
        a_pass = block.state_elements + block.dimension + block.noise_size
        self._elements = (self._length + block.lag) * (a_pass + block.batching.index_size)
        self._elements += block.batching.batch_size * max(1, block.row_elements)
        self._compiled: dict[int, Callable] = {}

    def begin(self, seeds: np.ndarray, parts: tuple[np.ndarray, ...]) -> StateOnDevice:
        """State of chains that begin with these keys, and positions and auxiliaries."""
        # The first call draws the minibatches, since compiling another function would take longer.
        pending = np.zeros_like(self._batching.first_indices(self._lag))
        return StateOnDevice(seeds, parts, np.repeat(pending[None], len(seeds), axis=0))

    def draws_of_call(self, thin: int) -> int:
        """Draws of each chain in one call, with so many transitions a draw."""
        return self._length // thin

    def advance(
        self, state: StateOnDevice, step_sizes: np.ndarray, thin: int
    ) -> tuple[StateOnDevice, DrawsOfChains]:
        """Advance all chains by `draws_of_call` draws.

        Parameters
        ----------
        state : StateOnDevice
        step_sizes : numpy.ndarray, shape (draws_of_call * thin,)
        thin : int
        """
        if thin not in self._compiled:
            self._compiled[thin] = self._compile(thin)
        sizes = np.zeros(self._length + self._lag, dtype=self._dtype)
        sizes[: len(step_sizes)] = step_sizes
        shared = [variable.get_value(borrow=True) for variable in self._shared]
        parts, pending, *found = self._compiled[thin](
            state.seeds, state.parts, state.pending, np.uint32(state.calls), sizes, shared
        )
        positions, gradients, stats, first_bad = found
        return StateOnDevice(state.seeds, parts, pending, state.calls + 1), DrawsOfChains(
            np.asarray(positions),
            np.asarray(gradients),
            tuple(np.asarray(values) for values in stats),
            np.asarray(first_bad),
        )

    def _compile(self, thin: int) -> Callable:
        import jax

        def advance(seeds, parts, pending, call, sizes, shared):
            at_once = max(1, min(len(seeds), DEVICE_ELEMENTS // self._elements))
            one = partial(self._one_chain, call=call, sizes=sizes, shared=shared, thin=thin)
            if at_once == len(seeds):
                return jax.vmap(one)(seeds, parts, pending)
            return jax.lax.map(lambda each: one(*each), (seeds, parts, pending), batch_size=at_once)

        return jax.jit(advance)

    def _one_chain(self, seed, parts, pending, *, call, sizes, shared, thin):
        """State of a chain after the transitions of a call, its draws, and where it failed."""
        import jax
        import jax.numpy as jnp

        lag, length, dtype = self._lag, self._length, self._dtype
        count = length // thin * thin
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl=KEY), call)
        of_rows, of_noise, of_first = jax.random.split(key, 3)
        pending = jnp.where(call == 0, self._minibatches(of_first, lag), pending)
        indices = jnp.concatenate([pending, self._minibatches(of_rows, length)])
        noise = jax.random.normal(of_noise, (length, self._noise_size), dtype)
        noise = jnp.concatenate([noise, jnp.zeros((lag, self._noise_size), dtype)])
        results = self._transitions(*parts, indices, noise, sizes, *shared)
        states, (gradients, *stats) = results[: len(parts)], results[len(parts) :]
        positions, gradients = states[0][:count], gradients[lag : lag + count]
        recorded = slice(thin - 1, None, thin)
        finite = jnp.isfinite((gradients**2).sum(1) + (positions**2).sum(1))
        first_bad = jnp.where(finite.all(), -1, jnp.argmin(finite))
        return (
            tuple(part[count - 1] for part in states),
            indices[count : count + lag],
            positions[recorded],
            gradients[recorded],
            tuple(values[:count][recorded] for values in stats),
            first_bad,
        )


_made: WeakKeyDictionary[TransitionBlock, ChainsOnDevice] = WeakKeyDictionary()


def chains_on_device(block: TransitionBlock) -> ChainsOnDevice:
    """The transitions of many chains of a block, which are compiled once.

    Raises
    ------
    ValueError
        As `ChainsOnDevice`.
    """
    if block not in _made:
        _made[block] = ChainsOnDevice(block)
    return _made[block]


def minibatches_on_device(batching: Batching) -> Callable[[Any, int], Any]:
    """Function of a key and a number that draws so many minibatches with JAX.

    Raises
    ------
    ValueError
        Where the scheme has its own law.
    """
    import jax
    import jax.numpy as jnp

    rows, size = batching.n_rows, batching.batch_size
    if isinstance(batching, ShuffledWindows | StridedRows):
        strides = strides_of_windows(rows, size)

        def windows(key: Any, count: int) -> Any:
            of_starts, of_strides = jax.random.split(key)
            starts = jax.random.randint(of_starts, (count,), 0, rows, int)
            return jnp.stack([starts, jax.random.choice(of_strides, strides, (count,))], axis=1)

        if isinstance(batching, ShuffledWindows):
            return windows
        order = first_order(rows)(np.arange(rows))
        numbers = jnp.asarray(numbers_without(batching.excluded, order))

        def strided(key: Any, count: int) -> Any:
            starts, steps = windows(key, count).T[..., None]
            return numbers[(starts + steps * jnp.arange(size)) % rows]

        return strided
    if isinstance(batching, AllRows):
        return lambda key, count: jnp.zeros(count, int)
    if type(batching) is WithReplacement:
        numbers = jnp.asarray(numbers_without(batching.excluded, np.arange(rows)))

        def with_replacement(key: Any, count: int) -> Any:
            return numbers[jax.random.randint(key, (count, size), 0, rows, int)]

        return with_replacement
    raise ValueError(
        f'Minibatches of the scheme "{batching.name}" are not drawn on the device of '
        'JAX. Use `chain_method="parallel"`, or the scheme "shuffle" or "replace".'
    )


def strides_of_windows(rows: int, size: int) -> np.ndarray:
    """Strides that are coprime to the number of rows, such that places fit into 32 bits.

    Examples
    --------
    >>> strides_of_windows(10, 3)
    array([1, 3, 7, 9])
    """
    most = min(rows, max(1, (2**31 - rows) // size))
    # An even part of all strides, since many windows with small ones would overlap.
    candidates = np.unique(np.linspace(1, most, 8 * STRIDES).astype(np.int64))
    coprime = [int(each) for each in candidates if math.gcd(int(each), rows) == 1]
    return np.array(coprime[:: max(1, len(coprime) // STRIDES)])
