"""The limit: transitions written out by hand for this one model and compiled by Numba.

A minibatch is a window of consecutive rows, with a random start, of a shuffled copy of the data:
every row is equally likely to be in it, and memory is read in order. The rows which a window that
begins near the end would need from the beginning are repeated after the end. The noise is drawn
inside the loop. SGLD-CV computes the gradients at the position and at the mode on the same window.

Which way to go through a window is fastest depends on its shape: three ways are compiled, and the
fastest in a short trial is the contender.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common.problem import Problem, full_gradient

from transition_benchmark.interface import Prepared, Run, Settings, UnavailableError

_TRIAL_SECONDS = 0.01
_TRIALS = 5


def prepare(problem: Problem, settings: Settings) -> Prepared:
    """Compile the kernels for each method and take the fastest."""
    try:
        import numba
    except ImportError as error:
        raise UnavailableError(f"Numba cannot be imported: {error}") from error
    order = np.random.default_rng(0).permutation(problem.rows)
    # A window may begin at any row: the first rows are repeated after the last.
    order = np.concatenate([order, order[: settings.batch - 1]])
    design = np.ascontiguousarray(problem.design[order])
    response = problem.response[order]
    layouts = {
        "rows": (_compile_rows, design),
        "matrix": (_compile_matrix, design),
        "columns": (_compile_columns, np.ascontiguousarray(design.T)),
    }
    mode = problem.mode.astype(problem.dtype)
    start = problem.start.astype(problem.dtype)
    gradient_at_mode = full_gradient(problem, problem.mode).astype(problem.dtype)
    precision = problem.dtype.type(problem.prior_sd**-2)

    def make_run(compile_gradient: Callable[..., Any], data: np.ndarray, control: bool) -> Any:
        chain = _compile_chain(numba, compile_gradient(numba, control), control)

        def run(seed: int, transitions: int = settings.transitions) -> np.ndarray:
            positions = np.empty((transitions, problem.features), problem.dtype)
            chain(
                data,
                response,
                mode,
                gradient_at_mode,
                precision,
                settings.step_size,
                problem.rows,
                settings.batch,
                np.random.default_rng(seed),
                start,
                positions,
            )
            return positions

        return run

    runs: dict[str, Run] = {}
    notes: dict[str, str] = {}
    for method, control in (("sgld", False), ("sgld-cv", True)):
        trials = {name: make_run(*layout, control) for name, layout in layouts.items()}
        seconds = {name: _trial_seconds(run) for name, run in trials.items()}
        fastest = min(seconds, key=seconds.__getitem__)
        runs[method] = trials[fastest]
        notes[method] = f"window read by {fastest}"
    return Prepared(runs=runs, packages=("numba", "numpy", "scipy"), notes=notes)


def _trial_seconds(run: Callable[[int, int], np.ndarray]) -> float:
    """Shortest time of one transition in a few short trials."""
    run(0, 1)  # compiles
    transitions = 10
    while (seconds := _seconds(run, 0, transitions)) < _TRIAL_SECONDS:
        transitions *= 2
    later = [_seconds(run, seed, transitions) for seed in range(1, _TRIALS)]
    return min([seconds, *later]) / transitions


def _seconds(run: Callable[[int, int], np.ndarray], seed: int, transitions: int) -> float:
    started = time.perf_counter()
    run(seed, transitions)
    return time.perf_counter() - started


# In all of these `control` is a constant of the compiled code, `one` and `zero` have the type of
# the data, since Numba takes a float32 and a literal to float64, and windows are sliced off at
# their start, which tells the compiler that no index is negative. With the control variate the
# response cancels in the difference of a row's gradients at the position and at the mode:
# (y - s(z)) x - (y - s(z0)) x = (s(z0) - s(z)) x, with s the logistic function and z0 at the mode.


def _compile_chain(numba: Any, window_gradient: Any, control: bool) -> Any:
    """Compile the loop over transitions about the gradient of a window."""

    @numba.njit(fastmath=True)
    def chain(
        data, response, mode, full_gradient, precision, step_size, rows, batch, rng, start, out
    ):
        real = start.dtype.type
        half_step = real(step_size / 2)
        noise_scale = real(math.sqrt(step_size))
        weight = real(rows / batch)
        position = start.copy()
        gradient = np.empty_like(position)
        work = np.empty((2, batch), start.dtype)
        for k in range(out.shape[0]):
            first = rng.integers(0, rows)
            window_gradient(data, response, first, position, mode, work, gradient)
            for j in range(position.size):
                slope = weight * gradient[j] - precision * position[j]
                if control:
                    slope += full_gradient[j] + precision * mode[j]
                noise = real(rng.standard_normal())
                position[j] += half_step * slope + noise_scale * noise
                out[k, j] = position[j]

    return chain


def _compile_rows(numba: Any, control: bool) -> Any:
    """One pass over the window, row by row."""

    @numba.njit(fastmath=True)
    def window_gradient(data, response, first, position, mode, work, gradient):
        one = position.dtype.type(1)
        zero = position.dtype.type(0)
        batch = work.shape[1]
        window = data[first : first + batch]
        target = response[first : first + batch]
        gradient[:] = zero
        for i in range(batch):
            row = window[i]
            predictor = zero
            for j in range(position.size):
                predictor += row[j] * position[j]
            reference = target[i]
            if control:
                predictor_at_mode = zero
                for j in range(position.size):
                    predictor_at_mode += row[j] * mode[j]
                reference = one / (one + math.exp(-predictor_at_mode))
            residual = reference - one / (one + math.exp(-predictor))
            for j in range(position.size):
                gradient[j] += residual * row[j]

    return window_gradient


def _compile_matrix(numba: Any, control: bool) -> Any:
    """Two matrix-vector products by BLAS, three with the control variate."""
    replace_by_residuals = _compile_residuals(numba, control)

    @numba.njit(fastmath=True)
    def window_gradient(data, response, first, position, mode, work, gradient):
        batch = work.shape[1]
        window = data[first : first + batch]
        np.dot(window, position, work[0])
        if control:
            np.dot(window, mode, work[1])
        replace_by_residuals(work[0], work[1], response[first : first + batch])
        np.dot(work[0], window, gradient)

    return window_gradient


def _compile_columns(numba: Any, control: bool) -> Any:
    """Two passes over the window of a transposed copy, column by column."""
    replace_by_residuals = _compile_residuals(numba, control)

    @numba.njit(fastmath=True)
    def window_gradient(data, response, first, position, mode, work, gradient):
        zero = position.dtype.type(0)
        batch = work.shape[1]
        predictor = work[0]
        predictor_at_mode = work[1]
        work[:] = zero
        for j in range(position.size):
            column = data[j][first : first + batch]
            coefficient = position[j]
            coefficient_at_mode = mode[j]
            for i in range(batch):
                predictor[i] += column[i] * coefficient
                if control:
                    predictor_at_mode[i] += column[i] * coefficient_at_mode
        replace_by_residuals(predictor, predictor_at_mode, response[first : first + batch])
        for j in range(position.size):
            column = data[j][first : first + batch]
            total = zero
            for i in range(batch):
                total += column[i] * predictor[i]
            gradient[j] = total

    return window_gradient


def _compile_residuals(numba: Any, control: bool) -> Any:
    """Linear predictors of a window to the factors of its rows in the gradient, in place."""

    @numba.njit(fastmath=True)
    def replace_by_residuals(predictor, predictor_at_mode, target):
        one = predictor.dtype.type(1)
        for i in range(predictor.size):
            reference = target[i]
            if control:
                reference = one / (one + math.exp(-predictor_at_mode[i]))
            predictor[i] = reference - one / (one + math.exp(-predictor[i]))

    return replace_by_residuals
