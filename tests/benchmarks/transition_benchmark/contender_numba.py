"""The limit: transitions written out by hand for this one model and compiled by Numba.

A minibatch is a window of consecutive rows, with a random start, of a shuffled copy of the data:
every row is equally likely to be in it, and memory is read in order. The rows which a window that
begins near the end would need from the beginning are repeated after the end. The noise is drawn
inside the loop. SGLD-CV computes the gradients at the position and at the mode on the same window.

Which way to go through a window is fastest depends on its shape: three ways are compiled, and the
fastest in a short trial is the contender.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from common.problem import Problem, full_gradient
from common.program import say
from common.timing import best, timed

from transition_benchmark import Run, Settings

PACKAGES = ("numba", "numpy", "scipy")
_TRIAL_SECONDS = 0.01
_TRIALS = 5


def prepare(problem: Problem, settings: Settings) -> dict[str, Run]:
    """Compile the kernels for each method and take the fastest."""
    order = np.random.default_rng(0).permutation(problem.rows)
    # A window may begin at any row: the first rows are repeated after the last.
    order = np.concatenate([order, order[: settings.batch - 1]])
    design = np.ascontiguousarray(problem.design[order])
    response = problem.response[order]
    layouts = {
        "rows": (_gradient_by_rows, design),
        "matrix": (_gradient_by_matrix, design),
        "columns": (_gradient_by_columns, np.ascontiguousarray(design.T)),
    }
    start = problem.start.astype(problem.dtype)
    precision = problem.dtype.type(problem.prior_sd**-2)
    mode = problem.mode.astype(problem.dtype)
    gradient_at_mode = full_gradient(problem, problem.mode).astype(problem.dtype)
    controls = {"sgld": (None, None), "sgld-cv": (mode, gradient_at_mode)}

    def run(layout: str, method: str, seed: int, transitions: int) -> np.ndarray:
        window_gradient, data = layouts[layout]
        out = np.empty((transitions, problem.features), problem.dtype)
        _chain(
            window_gradient, data, response, *controls[method], precision, settings.step_size,
            problem.rows, settings.batch, np.random.default_rng(seed), start, out,
        )  # fmt: skip
        return out

    runs: dict[str, Run] = {}
    for method in controls:
        trials = {layout: functools.partial(run, layout, method) for layout in layouts}
        seconds = {layout: _trial_seconds(trial) for layout, trial in trials.items()}
        fastest = min(seconds, key=seconds.__getitem__)
        say(f"numba, {method}: the window is read by {fastest}")
        runs[method] = functools.partial(trials[fastest], transitions=settings.transitions)
    return runs


def _trial_seconds(trial: Callable[[int, int], np.ndarray]) -> float:
    """Shortest time of one transition in a few short trials."""
    trial(0, 1)  # compiles
    transitions = 10
    while timed(trial, 0, transitions)[1].wall < _TRIAL_SECONDS:
        transitions *= 2
    times = [timed(trial, seed, transitions)[1] for seed in range(_TRIALS)]
    return best(times, "wall") / transitions


# In all of these `mode` is None for SGLD, for which Numba compiles a version of its own. `one` and
# `zero` have the type of the data, since Numba takes a float32 and a literal to float64, and
# windows are sliced off at their start, which tells the compiler that no index is negative. With
# the control variate the response cancels in the difference of a row's gradients at the position
# and at the mode: (y - s(z)) x - (y - s(z0)) x = (s(z0) - s(z)) x, with s the logistic function
# and z0 at the mode.
_compiled = numba.njit(fastmath=True)


@_compiled
def _chain(
    window_gradient: Any, data, response, mode, gradient_at_mode, precision, step_size, rows, batch,
    rng, start, out,
):  # fmt: skip
    """Write the position after every transition into `out`."""
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
            if mode is not None:
                slope += gradient_at_mode[j] + precision * mode[j]
            noise = real(rng.standard_normal())
            position[j] += half_step * slope + noise_scale * noise
            out[k, j] = position[j]


@_compiled
def _gradient_by_rows(data, response, first, position, mode, work, gradient):
    """One pass over the window, row by row."""
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
        if mode is not None:
            predictor_at_mode = zero
            for j in range(position.size):
                predictor_at_mode += row[j] * mode[j]
            reference = one / (one + math.exp(-predictor_at_mode))
        residual = reference - one / (one + math.exp(-predictor))
        for j in range(position.size):
            gradient[j] += residual * row[j]


@_compiled
def _gradient_by_matrix(data, response, first, position, mode, work, gradient):
    """Two matrix-vector products by BLAS, three with the control variate."""
    batch = work.shape[1]
    window = data[first : first + batch]
    np.dot(window, position, work[0])
    if mode is not None:
        np.dot(window, mode, work[1])
    _replace_by_residuals(work[0], work[1], mode, response[first : first + batch])
    np.dot(work[0], window, gradient)


@_compiled
def _gradient_by_columns(data, response, first, position, mode, work, gradient):
    """Two passes over the window of a transposed copy, column by column."""
    zero = position.dtype.type(0)
    batch = work.shape[1]
    predictor = work[0]
    predictor_at_mode = work[1]
    work[:] = zero
    for j in range(position.size):
        column = data[j][first : first + batch]
        coefficient = position[j]
        if mode is not None:
            coefficient_at_mode = mode[j]
        for i in range(batch):
            predictor[i] += column[i] * coefficient
            if mode is not None:
                predictor_at_mode[i] += column[i] * coefficient_at_mode
    _replace_by_residuals(predictor, predictor_at_mode, mode, response[first : first + batch])
    for j in range(position.size):
        column = data[j][first : first + batch]
        total = zero
        for i in range(batch):
            total += column[i] * predictor[i]
        gradient[j] = total


@_compiled
def _replace_by_residuals(predictor, predictor_at_mode, mode, target):
    """Linear predictors of a window to the factors of its rows in the gradient, in place."""
    one = predictor.dtype.type(1)
    for i in range(predictor.size):
        reference = target[i]
        if mode is not None:
            reference = one / (one + math.exp(-predictor_at_mode[i]))
        predictor[i] = reference - one / (one + math.exp(-predictor[i]))
