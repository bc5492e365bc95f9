"""A block of transitions as one pure compiled function.

All randomness is an argument: the function of (position, indices, noise, step sizes) has no random
generator. So its values depend only on its arguments, on any backend and in any process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import Mode, get_mode
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.link.jax.linker import JAXLinker
from pytensor.link.numba.linker import NumbaLinker

from pymc_sgmcmc.compiling.compiled import WITHOUT_BROADCAST_CHECKS, compile_quietly
from pymc_sgmcmc.compiling.noise import fill_standard_normal
from pymc_sgmcmc.compiling.numba_loop import LoopOfTransitions, with_numpy_products
from pymc_sgmcmc.dynamics import Dynamics
from pymc_sgmcmc.gradient_estimators import GradientEstimator


class Transitions(NamedTuple):
    """Results of B transitions.

    Attributes
    ----------
    positions : numpy.ndarray, shape (B, d)
        Positions after each transition.
    gradients : numpy.ndarray, shape (B, d)
        Gradient estimates at these positions.
    auxiliaries : tuple of numpy.ndarray, each (B, ...)
        The other parts of the state after each transition.
    stats : tuple of numpy.ndarray, each (B,)
        Statistics of the dynamics for each transition.
    """

    positions: np.ndarray
    gradients: np.ndarray
    auxiliaries: tuple[np.ndarray, ...]
    stats: tuple[np.ndarray, ...]


class TransitionBlock:
    """B compiled transitions of a chain.

    The gradient recorded with a position is the one that makes a transition from it, so its
    rows are drawn after the position is known. A call therefore passes over B + lag indices, with
    a lag of 1 for most dynamics, and the next block begins with the last indices of this one.

    Parameters
    ----------
    dynamics : Dynamics
    estimator : GradientEstimator
    compile_kwargs : mapping, optional
        Arguments of `pytensor.function`.
    static_length : int, optional
        Fixed number of transitions B, as JAX needs it. Shorter blocks are padded.

    Attributes
    ----------
    gradients : int
        How many gradients on its rows a transition takes.
    """

    gradients: int

    def __init__(
        self,
        dynamics: Dynamics,
        estimator: GradientEstimator,
        compile_kwargs: Mapping[str, Any] | None = None,
        static_length: int | None = None,
    ):
        self.dtype = estimator.posterior.dtype
        self.dimension = estimator.posterior.dimension
        self.row_elements = estimator.posterior.row_elements
        self.batching = estimator.batching
        self.memory = estimator.memory
        self.memory_noise_size = 0 if self.memory is None else self.memory.noise_size
        self.dynamics = dynamics
        self.lag = dynamics.lag
        self.noise_size = dynamics.noise_size(self.dimension)
        self.static_length = static_length
        self.auxiliaries = tuple(dynamics.auxiliaries(self.dimension))
        self._shapes = [(self.dimension,), *(auxiliary.shape for auxiliary in self.auxiliaries)]
        self._function = self._compile(estimator, dict(compile_kwargs or {}))
        self._noise = np.zeros((0, self.noise_size), dtype=self.dtype)
        # Numba and JAX compile at the first call. After a call here, in the parent process, forked
        # chains need not compile again.
        self(
            tuple(np.zeros(shape) for shape in self._shapes),
            estimator.batching.first_indices(1 + self.lag),
            self.draw_noise(np.random.default_rng(0), 1),
            np.zeros(1),
            np.zeros((1 + self.lag, self.memory_noise_size)),
        )

    def _compile(
        self, estimator: GradientEstimator, compile_kwargs: dict[str, Any]
    ) -> Callable[..., Sequence[np.ndarray]]:
        """Function of state, indices, noise and step sizes: a loop over the transitions."""
        names = ["position", *(auxiliary.name for auxiliary in self.auxiliaries)]
        state = [
            pt.tensor(name, shape=shape, dtype=self.dtype)
            for name, shape in zip(names, self._shapes, strict=True)
        ]
        passes = None if self.static_length is None else self.static_length + self.lag
        indices = self.batching.index_variable("indices")
        if passes is not None:
            shape = (passes, *indices.type.shape[1:])
            indices = pt.tensor("indices", dtype=indices.dtype, shape=shape)
        noise = pt.tensor("noise", shape=(passes, self.noise_size), dtype=self.dtype)
        step_sizes = pt.tensor("step_sizes", shape=(passes,), dtype=self.dtype)
        memory = () if self.memory is None else self.memory.variables
        remember = [pt.vector("remember", dtype="bool")] if memory else []
        if self.memory_noise_size:
            shape = (passes, self.memory_noise_size)
            remember.append(pt.tensor("memory_noise", shape=shape, dtype=self.dtype))
        sequences = [indices, noise, step_sizes, *remember]
        mode = with_numpy_products(compile_kwargs.get("mode"))
        if isinstance(mode.linker, NumbaLinker):
            # A loop of its own, which Numba compiles sooner than a scan.
            mode = mode.including(WITHOUT_BROADCAST_CHECKS)
            entries = [sequence[0].type() for sequence in sequences]
            body = self._transition(estimator)

            def transition(index, noise, step_size, *rest):
                scaled = pt.as_tensor(self.dynamics.scaled_noise(noise[None], step_size[None]))
                return body(index, scaled[0], step_size, *rest)

            return LoopOfTransitions(transition, entries, state, memory, mode)
        sequences[1] = pt.as_tensor(self.dynamics.scaled_noise(noise, step_sizes))
        outputs = pytensor.scan(
            self._transition(estimator),
            sequences=sequences,
            outputs_info=[*state, *memory, None, *(None for _ in self.dynamics.stats)],
            return_updates=False,
        )
        memory_outputs = slice(len(state), len(state) + len(memory))
        updates = {
            variable: values[-1]
            for variable, values in zip(memory, outputs[memory_outputs], strict=True)
        }
        del outputs[memory_outputs]
        compile_kwargs["mode"] = in_place_mode(mode) if memory else mode
        inputs = [*state, indices, noise, step_sizes, *remember]
        function = compile_quietly(inputs, outputs, updates=updates, **compile_kwargs)
        function.trust_input = True
        return function

    def _transition(self, estimator: GradientEstimator) -> Callable[..., tuple]:
        """Body of the loop: state and memory after a transition, its gradient and statistics."""
        memory, shapes = self.memory, self._shapes

        def transition(index, scaled_noise, step_size, *rest):
            if memory is None:
                current = rest

                def gradient(at):
                    return estimator(at, index)
            else:
                update, rest = rest[0], rest[1:]
                noise = None
                if memory.noise_size:
                    noise, rest = rest[0], rest[1:]
                current, values = rest[: len(shapes)], rest[len(shapes) :]
                changed: list[tuple] = []

                def gradient(at):
                    estimate, after = memory.estimate(at, index, values, update, noise)
                    changed.append(after)
                    return estimate

            places = []

            def counted(at):
                places.append(at)
                return gradient(at)

            following, first_gradient, stats = self.dynamics.transition(
                current, counted, scaled_noise, step_size
            )
            self.gradients = len(places)
            return (
                *(
                    pt.specify_shape(part.astype(self.dtype), shape)
                    for part, shape in zip(following, shapes, strict=True)
                ),
                # Where the dynamics evaluate several gradients, the memory keeps the first.
                *(changed[0] if memory is not None else ()),
                pt.specify_shape(first_gradient.astype(self.dtype), shapes[0]),
                *(pt.as_tensor(value).astype(self.dtype) for value in stats),
            )

        return transition

    def jax_function(self) -> tuple[Callable[..., Any], list[SharedVariable]]:
        """What PyTensor compiled for JAX: a function of the arguments and then of shared variables.

        Raises
        ------
        ValueError
            Where the block was not compiled for JAX, or has a memory.
        """
        if self.static_length is None or self.memory is not None:
            raise ValueError("The block should be compiled for JAX and have no memory.")
        function: Any = self._function
        variables = [given.variable for given in function.maker.inputs]
        shared = [variable for variable in variables if isinstance(variable, SharedVariable)]
        return function.vm.jit_fn, shared

    @property
    def state_elements(self) -> int:
        """Numbers in the state of the chain."""
        return self.dimension + sum(int(np.prod(auxiliary.shape)) for auxiliary in self.auxiliaries)

    def __getstate__(self) -> dict[str, Any]:
        """Everything, with no memory for noise."""
        return {**vars(self), "_noise": self._noise[:0].copy()}

    def _passes(self, transitions: int) -> int:
        """Passes of the loop: those that follow only evaluate gradients, or are padding."""
        return self.lag + (transitions if self.static_length is None else self.static_length)

    def draw_noise(self, rng: np.random.Generator, transitions: int) -> np.ndarray:
        """Draw the noise of transitions, in memory that the next call uses again.

        Fresh memory of this size would cost more than the numbers, where the system takes it back
        after each use.

        Returns
        -------
        numpy.ndarray, shape (passes, noise_size)
            Standard normal numbers for the transitions, and zeros after them.
        """
        passes = self._passes(transitions)
        if len(self._noise) < passes:
            self._noise = np.zeros((passes, self.noise_size), dtype=self.dtype)
        noise = self._noise[:passes]
        compiled = isinstance(self._function, LoopOfTransitions)
        fill_standard_normal(rng, noise[:transitions], compiled=compiled)
        noise[transitions:] = 0
        return noise

    def __call__(
        self,
        state: tuple[np.ndarray, ...],
        indices: np.ndarray,
        noise: np.ndarray,
        step_sizes: np.ndarray,
        memory_noise: np.ndarray | None = None,
        reuse: bool = False,
    ) -> Transitions:
        """Run B transitions.

        Parameters
        ----------
        state : tuple of numpy.ndarray
            The position, shape (d,), and the auxiliaries of the dynamics.
        indices : numpy.ndarray, shape (B + lag, ...)
            Minibatch of each transition, and those of the gradients at the last positions.
        noise : numpy.ndarray, shape (B, noise_size)
            Standard normal numbers, or what `draw_noise` returned.
        step_sizes : numpy.ndarray, shape (B,)
        memory_noise : numpy.ndarray, shape (B + lag, memory_noise_size), optional
            Standard normal numbers for each estimate, where the memory takes some.
        reuse : bool
            Whether the next call may overwrite the results of this one.
        """
        length = len(step_sizes)
        passes = self._passes(length)
        remember = []
        if self.memory is not None:
            indices = self.memory.arranged(indices)
            # Passes that only evaluate gradients do not change the memory, since the next block
            # repeats them.
            remember = [np.arange(passes) < length]
            if memory_noise is not None and self.memory_noise_size:
                remember.append(_pad(memory_noise, passes, self.dtype))
        # The caller checks whether the results are finite.
        with np.errstate(all="ignore"), _interrupts_as_such():
            outputs = self._function(
                *(np.asarray(part, dtype=self.dtype, order="C") for part in state),
                _pad(indices, passes),
                _pad(noise, passes, self.dtype),
                _pad(step_sizes, passes, self.dtype),
                *remember,
                **({"reuse": reuse} if isinstance(self._function, LoopOfTransitions) else {}),
            )
        positions, *others = (np.asarray(output) for output in outputs)
        auxiliaries, (gradients, *stats) = (
            others[: len(self.auxiliaries)],
            others[len(self.auxiliaries) :],
        )
        return Transitions(
            positions[:length],
            gradients[self.lag : self.lag + length],
            tuple(values[:length] for values in auxiliaries),
            tuple(values[:length] for values in stats),
        )


@contextmanager
def _interrupts_as_such() -> Iterator[None]:
    """Raise Ctrl-C as `KeyboardInterrupt`: inside of a function of Numba it is a `SystemError`."""
    try:
        yield
    except SystemError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            cause = cause.__cause__
        raise


def _pad(values: np.ndarray, length: int, dtype: str | None = None) -> np.ndarray:
    values = np.asarray(values, dtype=dtype)
    if len(values) == length:
        return np.ascontiguousarray(values)
    padded = np.zeros((length, *values.shape[1:]), dtype=values.dtype)
    padded[: len(values)] = values
    return padded


def in_place_mode(mode: Mode) -> Mode:
    """Mode in which a scan changes a large array in place where only its last value is used.

    By default only Numba does so. C code and the Python code of FAST_COMPILE would copy the array
    in each transition.
    """
    return mode.excluding("scan_save_mem_prealloc").including(
        "scan_save_mem_no_prealloc", "scan_sit_sot_to_untraced", "inplace"
    )


def is_jax_mode(compile_kwargs: Mapping[str, Any] | None) -> bool:
    """Whether functions compiled with these arguments run on JAX.

    Raises
    ------
    ValueError
        Where PyTensor does not know the mode.
    """
    mode = (compile_kwargs or {}).get("mode")
    try:
        linker = get_mode(mode).linker
    except Exception:
        raise ValueError(
            "`compile_kwargs['mode']` should be a mode of PyTensor, such as 'NUMBA', 'CVM' or "
            f"'JAX', but got {mode!r}."
        ) from None
    return isinstance(linker, JAXLinker)
