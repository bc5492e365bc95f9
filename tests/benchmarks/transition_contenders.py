"""The contenders of ``transition_cost.py``, each measured in a process of its own.

A contender is a function of a problem, the rows of a minibatch and the step size h of
``theta' = theta + (h/2) gradient + N(0, h)``. It builds the data structures, and returns for each
method that it has a function of seed and number of transitions to the position after each of them,
shape (transitions, features), complete when it returns. The libraries of JAX, whose loops have a
fixed length, compile anew for another one.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache, partial
from importlib import metadata
from typing import Any

import numpy as np
from common.clocks import in_turn
from common.regression import (
    GRADIENT_NOISE_INFLATION,
    InJax,
    Problem,
    build_model,
    engine_chain,
    given_settings,
    load_problem,
    make_step,
)  # fmt: skip

METHODS = ("sgld", "sgld-cv", "second-order")
"""SGLD and SGLD-CV by Euler's scheme without preconditioner, and what `SGLDCV()` does: averaged
noises and control variates of second order, preconditioned by the curvature, its step size 1."""
MOST_KEPT = 20_000
"""Positions stay in the processor's caches: only those of the last part are kept. Short transitions
would otherwise take less time than the pages of memory of their positions."""
PACKAGES = (
    "pymc_sgmcmc", "pymc", "pytensor", "numba", "numpy", "scipy", "sgmcmcjax", "blackjax", "jax",
)  # fmt: skip
MEAN_TOLERANCE = 2.0
"""Posterior standard deviations (root mean square over coordinates). The mean of a chain as long
as :func:`least_transitions` scatters by about one; without drift it is off by about four."""
INCREMENT_TOLERANCE = 0.1
"""Relative. A batch of twice or half the size moves the SGLD figure by 17 % at least."""
RELAXATIONS = 6.0
LEAST_TRANSITIONS = 500

Chain = Callable[[int, int], Any]


def ours(problem: Problem, batch: int, step_size: float) -> dict[str, Chain]:
    """The same regression as a PyMC model with ``pm.Minibatch``.

    Blocks of transitions are called as the step methods call them, drawing of noise and minibatches
    included, without `pymc.sample` around them. The centre of the control variate is given: finding
    it is not timed, for any contender.
    """
    model, chains = build_model(problem, batch), {}
    for method in METHODS:
        given = given_settings(problem, method, batch)
        if method == "sgld-cv":
            given |= {"gradient": "cv", "integrator": "euler"}
        elif method == "second-order":
            covariance = np.linalg.inv(problem.curvature)
            given |= {"step_size": 1.0, "preconditioner": covariance}
        step = make_step(model, method, batch, **given)
        chains[method] = engine_chain(step, problem.start, given["step_size"])
    return chains


def numba(problem: Problem, batch: int, step_size: float) -> dict[str, Chain]:
    """The limit: written by hand for this one model."""
    from numba_contender import prepare

    return prepare(problem, batch, step_size)


def sgmcmcjax(problem: Problem, batch: int, step_size: float) -> dict[str, Chain]:
    """SGMCMCJax: its kernels, which draw random rows with replacement, in a compiled loop."""
    import jax
    from sgmcmcjax import kernels

    of = InJax(problem)
    # SGMCMCJax steps by dt * gradient + N(0, 2 dt).
    shared = (step_size / 2, of.log_likelihood, of.log_prior, of.data, batch)

    def make(triple: Any) -> Chain:
        initialise, kernel, get_position = triple

        @partial(jax.jit, static_argnums=2)
        def chain(key: Any, start: Any, transitions: int) -> Any:
            def transition(state: Any, step: Any) -> Any:
                index, key = step
                state = kernel(index, key, state)
                return state, get_position(state)

            key_start, key_chain = jax.random.split(key)
            steps = (jax.numpy.arange(transitions), jax.random.split(key_chain, transitions))
            return jax.lax.scan(transition, initialise(key_start, start), steps)[1]

        return lambda seed, count: np.asarray(chain(jax.random.PRNGKey(seed), of.start, count))

    return {
        "sgld": make(kernels.build_sgld_kernel(*shared)),
        "sgld-cv": make(kernels.build_sgldCV_kernel(*shared, of.mode)),
    }


def blackjax(problem: Problem, batch: int, step_size: float) -> dict[str, Chain]:
    """blackjax: SGLD and its control-variate gradient estimator in one compiled ``lax.scan``.

    Every transition draws fresh random rows, with replacement, inside the compiled loop: blackjax
    leaves the minibatches to the user, and this is the fastest of the usual ways to make them.
    """
    import blackjax
    import jax
    from blackjax.sgmcmc import gradients

    of = InJax(problem)
    plain = gradients.grad_estimator(
        of.log_prior, lambda position, row: of.log_likelihood(position, *row), of.rows
    )

    def make(estimator: Any) -> Chain:
        sampler = blackjax.sgld(estimator)

        # The data are arguments: as constants of the compiled program they would be copied into it.
        @partial(jax.jit, static_argnums=2)
        def chain(key: Any, start: Any, transitions: int, *data: Any) -> Any:
            def transition(position: Any, key: Any) -> Any:
                key_rows, key_noise = jax.random.split(key)
                rows = jax.random.randint(key_rows, (batch,), 0, of.rows)
                minibatch = tuple(part[rows] for part in data)
                # blackjax steps by eps * gradient + N(0, 2 eps).
                position = sampler.step(key_noise, position, minibatch, step_size / 2)
                return position, position

            return jax.lax.scan(transition, start, jax.random.split(key, transitions))[1]

        return lambda seed, count: np.asarray(
            chain(jax.random.key(seed), of.start, count, *of.data)
        )

    centred = gradients.control_variates(plain, of.mode, of.data)
    return {"sgld": make(plain), "sgld-cv": make(centred)}


# --- The guard -----------------------------------------------------------------------------------


def examine(
    positions: np.ndarray, problem: Problem, batch: int, h: float, method: str
) -> dict[str, float | bool]:
    """Compare a chain with what theory says of its method.

    ``mean_error`` is the distance of its mean from the expected path ``m_k = (I - (h/2) H)^k m_0``
    about the mode: large when the drift is missing, has the wrong scale or sign.
    ``increment_ratio`` is the mean squared increment over the expected one, noise of the gradient
    included: off when the noise has the wrong scale or the minibatch another size.
    """
    positions = np.asarray(positions, dtype=float)
    increments = np.diff(positions, axis=0, prepend=problem.start[None])
    count = len(positions)
    values, vectors = np.linalg.eigh(problem.curvature)
    offset = vectors.T @ (problem.start - problem.mode)
    if method == "second-order":  # In the coordinates of the preconditioner all values are 1.
        increments = increments @ np.linalg.cholesky(problem.curvature)
        h, offset = 1.0, offset * np.sqrt(values)
        vectors, values = vectors / np.sqrt(values), np.ones_like(values)
    factor = 1 - h * values / 2
    path_sum = factor * (1 - factor**count) / (1 - factor)
    mean = problem.mode + vectors @ (offset * path_sum / count)
    # Drift of the mean path, then of the fluctuations about it, E|H (theta - m)|^2 = tr(H Λ H).
    square_sum = (1 - factor ** (2 * count)) / (1 - factor**2)
    drift_square = float(np.sum((values * offset) ** 2 * square_sum)) / count
    if method == "second-order":
        # Without gradient noise the law is the posterior, with increments of mean square h/2.
        expected = h / 2 + h**2 / 4 * drift_square / problem.features
    else:
        noise = problem.rows**2 / batch * np.trace(problem.row_covariance)
        inflation = GRADIENT_NOISE_INFLATION
        if method == "sgld-cv":
            noise = inflation = 0.0
        drift_square += (1 + inflation) * np.sum(values)
        expected = h + h**2 / 4 * (noise + drift_square) / problem.features
    error = float(np.sqrt(np.mean(((positions.mean(axis=0) - mean) / problem.sd) ** 2)))
    ratio = float(np.mean(increments**2) / expected)
    # Comparisons with nan are false, so a chain that is not finite fails.
    passed = bool(np.all(np.any(increments != 0, axis=1))) and error <= MEAN_TOLERANCE
    passed &= abs(ratio - 1) <= INCREMENT_TOLERANCE
    return {"mean_error": error, "increment_ratio": ratio, "passed": passed}


def least_transitions(problem: Problem, step_size: float) -> int:
    """Transitions after which the mean of a chain tells drift from no drift."""
    slowest = np.linalg.eigvalsh(problem.curvature)[0]
    return max(LEAST_TRANSITIONS, int(np.ceil(RELAXATIONS / (step_size * slowest))))


def in_parts(chain: Chain, transitions: int, seed: int) -> Any:
    """The positions of the last part of a chain."""
    parts = max(1, transitions // MOST_KEPT)
    for part in range(parts):
        positions = chain(seed * parts + part, transitions // parts)
    return positions


@cache
def installed(package: str) -> str | None:
    """Version of a package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def measure(
    contender: str, folder: str, batch: int, seconds: float, rounds: int, clock: str
) -> list[dict[str, Any]]:
    """Examine and time the methods of a contender, in turn: sorted µs of a transition."""
    problem = load_problem(folder)
    h = problem.step_size(batch)
    # A rough fit to the fastest contender: a fixed cost, and reading the window.
    predicted = 0.5e-6 + 4e-10 * batch * problem.features
    transitions = max(int(seconds / predicted), least_transitions(problem, h))
    chains = globals()[contender](problem, batch, h)
    guards = {
        method: examine(chain(0, least_transitions(problem, h)), problem, batch, h, method)
        for method, chain in chains.items()
    }
    calls = {method: partial(in_parts, chain, transitions) for method, chain in chains.items()}
    versions = {package: installed(package) for package in PACKAGES if installed(package)}
    return [
        {
            "contender": contender,
            "method": method,
            "times": [1e6 * each / transitions for each in several],
            "guard": guards[method],
            "versions": {"python": platform.python_version(), **versions},
        }
        for method, several in in_turn(calls, rounds, clock).items()
    ]
