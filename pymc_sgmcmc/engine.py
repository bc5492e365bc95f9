"""A block of transitions as one pure compiled function.

All randomness is an argument: the function of (position, indices, noise, step sizes) has no
random generator, so its values depend on nothing else, on any backend and in any process.
"""

from __future__ import annotations

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import get_mode
from pytensor.link.jax.linker import JAXLinker

from pymc_sgmcmc.dynamics import Langevin
from pymc_sgmcmc.gradients import GradientEstimator
from pymc_sgmcmc.posterior.compiled import without_blas_warning


class TransitionBlock:
    """B transitions of a chain, compiled.

    Calling it evaluates the gradient at B + 1 positions: at the start of each transition, and
    at the end of the last one with the rows of an index of its own. The next block begins with
    that index, so that the gradient recorded with a position is the one that moves it on.

    Parameters
    ----------
    dynamics : Langevin
    estimator : GradientEstimator
    compile_kwargs : dict, optional
        Passed to `pytensor.function`.
    static_length : int, optional
        Fixed number of transitions B, as JAX needs it; shorter blocks are padded.
    """

    def __init__(
        self,
        dynamics: Langevin,
        estimator: GradientEstimator,
        compile_kwargs: dict | None = None,
        static_length: int | None = None,
    ):
        self.dtype = estimator.posterior.dtype
        self.dimension = estimator.posterior.dimension
        self.static_length = static_length
        steps = None if static_length is None else static_length + 1
        position = pt.tensor("position", shape=(self.dimension,), dtype=self.dtype)
        indices = estimator.batching.index_variable("indices")
        if steps is not None:
            indices = pt.tensor(
                "indices", dtype=indices.dtype, shape=(steps, *indices.type.shape[1:])
            )
        noise = pt.tensor("noise", shape=(steps, self.dimension), dtype=self.dtype)
        step_sizes = pt.tensor("step_sizes", shape=(steps,), dtype=self.dtype)

        def transition(index, scaled_noise, step_size, current):
            following, gradient = dynamics.transition(
                current, lambda at: estimator(at, index), scaled_noise, step_size
            )
            return (
                pt.specify_shape(following.astype(self.dtype), (self.dimension,)),
                gradient.astype(self.dtype),
            )

        positions, gradients = pytensor.scan(
            transition,
            sequences=[indices, dynamics.scaled_noise(noise, step_sizes), step_sizes],
            outputs_info=[position, None],
            return_updates=False,
        )
        with without_blas_warning():
            self._function = pytensor.function(
                [position, indices, noise, step_sizes],
                [positions, gradients],
                on_unused_input="ignore",
                **(compile_kwargs or {}),
            )
        self._function.trust_input = True
        # Numba and JAX compile at the first call. Doing it here, in the parent process, spares
        # each forked chain the same work.
        self(
            np.zeros(self.dimension),
            estimator.batching.draw(np.random.default_rng(0), 2),
            np.zeros((1, self.dimension)),
            np.zeros(1),
        )

    def __call__(
        self,
        position: np.ndarray,
        indices: np.ndarray,
        noise: np.ndarray,
        step_sizes: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run B transitions.

        Parameters
        ----------
        position : numpy.ndarray, shape (d,)
        indices : numpy.ndarray, shape (B + 1, ...)
            Minibatch of each transition, and that of the gradient at the last position.
        noise : numpy.ndarray, shape (B, d)
            Standard normal.
        step_sizes : numpy.ndarray, shape (B,)

        Returns
        -------
        positions : numpy.ndarray, shape (B, d)
            Positions after each transition.
        gradients : numpy.ndarray, shape (B, d)
            Gradient estimates at these positions.
        """
        length = len(noise)
        # The last pass only evaluates the gradient; padding repeats it.
        passes = 1 + (length if self.static_length is None else self.static_length)
        # Whether the chain stays finite is for the caller to see in what comes back.
        with np.errstate(all="ignore"):
            positions, gradients = self._function(
                np.ascontiguousarray(position, dtype=self.dtype),
                _pad(indices, passes),
                _pad(noise, passes, self.dtype),
                _pad(step_sizes, passes, self.dtype),
            )
        return np.asarray(positions)[:length], np.asarray(gradients)[1 : length + 1]


def _pad(values: np.ndarray, length: int, dtype: str | None = None) -> np.ndarray:
    values = np.asarray(values, dtype=dtype)
    if len(values) == length:
        return np.ascontiguousarray(values)
    padded = np.zeros((length, *values.shape[1:]), dtype=values.dtype)
    padded[: len(values)] = values
    return padded


def is_jax_mode(compile_kwargs: dict | None) -> bool:
    """Whether functions compiled with these arguments run on JAX."""
    mode = (compile_kwargs or {}).get("mode")
    return isinstance(get_mode(mode).linker, JAXLinker)
