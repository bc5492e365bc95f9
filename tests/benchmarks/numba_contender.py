"""The limit: transitions written out by hand for this one model and compiled by Numba.

A minibatch is a window of consecutive rows, with a random start, of a shuffled copy of the data:
every row is equally likely to be in it, and memory is read in order. The rows which a window that
begins near the end would need from the beginning are repeated after the end. The noise is drawn
inside the loop. With the control variate the response cancels in the difference of a row's
gradients at the position and at the mode: (y - s(z)) x - (y - s(z0)) x = (s(z0) - s(z)) x, with s
the logistic function and z0 the predictor at the mode. SGLD-CV therefore reads a stored s(z0)
where SGLD reads y, and a transition of both is the same work.

Which way to go through a window is faster depends on its shape: two ways are compiled, and the
faster one in a short trial is the contender.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from common.clocks import in_turn
from common.regression import PRIOR_SD, Problem, sigmoid
from common.runner import say

TRIAL_TRANSITIONS = 500


def prepare(problem: Problem, batch: int, step_size: float) -> dict[str, Callable[[int, int], Any]]:
    """Compile the kernels for each method and take the fastest."""
    order = np.random.default_rng(0).permutation(problem.rows)
    # A window may begin at any row: the first rows are repeated after the last.
    order = np.concatenate([order, order[: batch - 1]])
    design = np.ascontiguousarray(problem.design[order])
    layouts = {
        "rows": (_gradient_by_rows, design),
        "matrix": (_gradient_by_matrix, design),
    }
    start = problem.start.astype(problem.dtype)
    precision = problem.dtype.type(PRIOR_SD**-2)
    at_mode = problem.full_gradient(problem.mode) + precision * problem.mode
    # What a window's residuals are taken from, and what is added to each gradient.
    parts = {
        "sgld": (problem.response[order], np.zeros_like(start)),
        "sgld-cv": (
            sigmoid(design @ problem.mode).astype(problem.dtype), at_mode.astype(problem.dtype)
        ),
    }  # fmt: skip

    def run(layout: str, method: str, seed: int, transitions: int) -> np.ndarray:
        window_gradient, data = layouts[layout]
        out = np.empty((transitions, problem.features), problem.dtype)
        _chain(
            window_gradient, data, *parts[method], precision, step_size, problem.rows,
            batch, np.random.default_rng(seed), start, out,
        )  # fmt: skip
        return out

    runs: dict[str, Callable[[int, int], Any]] = {}
    for method in parts:
        ways = {layout: functools.partial(run, layout, method) for layout in layouts}
        trials = {
            layout: functools.partial(way, transitions=TRIAL_TRANSITIONS)
            for layout, way in ways.items()
        }
        seconds = in_turn(trials, 5, "wall")
        fastest = min(seconds, key=lambda layout: seconds[layout][0])
        say(f"numba, {method}: the window is read by {fastest}")
        runs[method] = ways[fastest]

    # Second order: in coordinates in which the curvature is the unit matrix, so is the sum of what
    # is subtracted from the rows, prior included, and a transition takes no product of d² numbers.
    root = np.linalg.cholesky(np.linalg.inv(problem.curvature)).astype(problem.dtype)
    whitened, predictor = design @ root, design @ problem.mode
    fitted = sigmoid(predictor)
    at_mode_of_rows = np.column_stack([predictor, fitted, fitted * (1 - fitted)])
    at_mode_of_rows = at_mode_of_rows.astype(problem.dtype)
    begin = np.linalg.solve(root, start - problem.mode).astype(problem.dtype)

    def second_order(seed: int, transitions: int) -> np.ndarray:
        out = np.empty((transitions, problem.features), problem.dtype)
        _second_order_chain(
            whitened, at_mode_of_rows, problem.rows, batch, np.random.default_rng(seed),
            begin, out,
        )  # fmt: skip
        return problem.mode.astype(problem.dtype) + out @ root.T

    return {**runs, "second-order": second_order}


# In all of these `one` and `zero` have the type of the data, since Numba takes a float32 and a
# literal to float64, and windows are sliced off at their start, which tells the compiler that no
# index is negative.
_compiled = numba.njit(fastmath=True)


@_compiled
def _chain(
    window_gradient: Any, data, target, addend, precision, step_size, rows, batch, rng, start, out,
):  # fmt: skip
    """Write the position after every transition into `out`."""
    real = start.dtype.type
    half_step = real(step_size / 2)
    noise_scale = real(math.sqrt(step_size))
    weight = real(rows / batch)
    position = start.copy()
    gradient = np.empty_like(position)
    work = np.empty(batch, start.dtype)
    for k in range(out.shape[0]):
        first = rng.integers(0, rows)
        window_gradient(data, target, first, position, work, gradient)
        for j in range(position.size):
            slope = weight * gradient[j] - precision * position[j] + addend[j]
            noise = real(rng.standard_normal())
            position[j] += half_step * slope + noise_scale * noise
            out[k, j] = position[j]


@_compiled
def _second_order_chain(data, at_mode, rows, batch, rng, start, out):
    """Averaged noises with step size 1, and control variates of second order, by rows."""
    real = start.dtype.type
    one, half, weight = real(1), real(0.5), real(rows / batch)
    position = start.copy()
    gradient, before = np.empty_like(position), np.empty_like(position)
    for j in range(position.size):
        before[j] = half * real(rng.standard_normal())
    for k in range(out.shape[0]):
        first = rng.integers(0, rows)
        window = data[first : first + batch]
        stored = at_mode[first : first + batch]
        gradient[:] = real(0)
        for i in range(batch):
            row, shift = window[i], real(0)
            for j in range(position.size):
                shift += row[j] * position[j]
            mean = one / (one + math.exp(-stored[i, 0] - shift))
            residual = stored[i, 1] - mean + stored[i, 2] * shift
            for j in range(position.size):
                gradient[j] += residual * row[j]
        for j in range(position.size):
            noise = half * real(rng.standard_normal())
            position[j] += half * (weight * gradient[j] - position[j]) + before[j] + noise
            before[j] = noise
            out[k, j] = position[j]


@_compiled
def _gradient_by_rows(data, target, first, position, work, gradient):
    """One pass over the window, row by row."""
    one = position.dtype.type(1)
    zero = position.dtype.type(0)
    window = data[first : first + work.size]
    reference = target[first : first + work.size]
    gradient[:] = zero
    for i in range(work.size):
        row = window[i]
        predictor = zero
        for j in range(position.size):
            predictor += row[j] * position[j]
        residual = reference[i] - one / (one + math.exp(-predictor))
        for j in range(position.size):
            gradient[j] += residual * row[j]


@_compiled
def _gradient_by_matrix(data, target, first, position, work, gradient):
    """Two matrix-vector products by BLAS."""
    window = data[first : first + work.size]
    np.dot(window, position, work)
    _replace_by_residuals(work, target[first : first + work.size])
    np.dot(work, window, gradient)


@_compiled
def _replace_by_residuals(predictor, target):
    """Linear predictors of a window to the factors of its rows in the gradient, in place."""
    one = predictor.dtype.type(1)
    for i in range(predictor.size):
        predictor[i] = target[i] - one / (one + math.exp(-predictor[i]))
