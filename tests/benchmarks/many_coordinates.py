"""Time of an SGLD transition of a position of thousands of coordinates, beside one by hand.

Examples
--------
::

    python tests/benchmarks/many_coordinates.py --markdown docs/tables/many_coordinates.txt
    python tests/benchmarks/many_coordinates.py --models groups --coordinates 1000 --batch 100
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from common.clocks import in_turn
from common.runner import Result, Table, Verdict, run

LIMIT = 2.0
BLOCK_ELEMENTS = 200_000
"""Transitions x coordinates of one call, as in the package."""
RANK = 10
PRIOR_SD = 0.3
"""Of the factors: an expected rating is then of the size of its noise."""
COLUMNS = {
    "model": "model",
    "d": "coordinates",
    "n": "batch",
    "touched": "touched",
    "`SGLD`, µs": "ours",
    "by hand, µs": "hand",
    "×": lambda r: r["ours"] / r["hand"],
    "noise alone, µs": "noise",
}


def groups(rows: int, coordinates: int) -> tuple[Any, tuple[Any, ...]]:
    """Logistic random intercepts: a row touches one coordinate."""
    import numpy as np
    import pymc as pm

    rng = np.random.default_rng(1)
    group = rng.integers(0, coordinates, rows)
    truth = rng.normal(size=coordinates)
    outcome = (rng.random(rows) < 1 / (1 + np.exp(-truth[group]))).astype(float)
    with pm.Model() as model:
        effect = pm.Normal("effect", shape=coordinates)
        pm.Bernoulli("y", logit_p=effect[group], observed=outcome)
    return model, (group, outcome)


def factors(rows: int, coordinates: int) -> tuple[Any, tuple[Any, ...]]:
    """Matrix factorisation: a row touches the factors of a user and those of an item."""
    import numpy as np
    import pymc as pm

    rng = np.random.default_rng(1)
    users = 3 * coordinates // (5 * RANK)
    items = coordinates // RANK - users
    user, item = rng.integers(0, users, rows), rng.integers(0, items, rows)
    rating = rng.normal(size=rows)
    with pm.Model() as model:
        U = pm.Normal("U", 0, PRIOR_SD, shape=(users, RANK))
        V = pm.Normal("V", 0, PRIOR_SD, shape=(items, RANK))
        pm.Normal("rating", (U[user] * V[item]).sum(-1), 1.0, observed=rating)
    # By hand the position is one matrix, the factors of the items below those of the users.
    return model, (user, users + item, rating)


MODELS = {"groups": groups, "factors": factors}
TOUCHED_BY_A_ROW = {"groups": 1, "factors": 2 * RANK}


@cache
def by_hand(model: str) -> Callable[..., None]:
    """Compile the transitions of one model, with the noise drawn inside of the loop."""
    import numba
    import numpy as np

    @numba.njit(fastmath=True, inline="always")
    def finish(position, gradient, step_size, generator, positions, gradients):
        half_step, scale = step_size / 2, math.sqrt(step_size)
        for j in range(len(position)):
            noise = generator.standard_normal()
            position[j] += half_step * gradient[j] + scale * noise
            positions[j] = position[j]
            gradients[j] = gradient[j]

    @numba.njit(fastmath=True)
    def of_groups(data, step_size, batch, generator, position, positions, gradients):
        group, outcome = data
        weight = len(group) / batch
        gradient = np.empty_like(position)
        for k in range(len(positions)):
            first = generator.integers(0, len(group) - batch)
            for j in range(len(position)):
                gradient[j] = -position[j]
            for i in range(first, first + batch):
                fitted = 1 / (1 + math.exp(-position[group[i]]))
                gradient[group[i]] += weight * (outcome[i] - fitted)
            finish(position, gradient, step_size, generator, positions[k], gradients[k])

    @numba.njit(fastmath=True)
    def of_factors(data, step_size, batch, generator, position, positions, gradients):
        user, item, rating = data
        weight, precision = len(user) / batch, PRIOR_SD**-2
        gradient = np.empty_like(position)
        for k in range(len(positions)):
            first = generator.integers(0, len(user) - batch)
            for j in range(len(position)):
                gradient[j] = -precision * position[j]
            for i in range(first, first + batch):
                of_user, of_item, error = RANK * user[i], RANK * item[i], rating[i]
                for j in range(RANK):
                    error -= position[of_user + j] * position[of_item + j]
                for j in range(RANK):
                    gradient[of_user + j] += weight * error * position[of_item + j]
                    gradient[of_item + j] += weight * error * position[of_user + j]
            finish(position, gradient, step_size, generator, positions[k], gradients[k])

    return {"groups": of_groups, "factors": of_factors}[model]


OPTIONS = {
    "rows": (200_000, "rows of the data, N"),
    "models": (tuple(MODELS), tuple(MODELS)),
    "coordinates": ((1000, 5000, 50_000),),
    "batch": ((100, 1000), "n"),
    "transitions": (400,),
    "rounds": (9, "times each is timed, in turn"),
}


def measure(settings: Any, name: str, coordinates: int, batch: int) -> Result:
    """Time both in turn, and the drawing of the noise."""
    import numpy as np
    from common.regression import engine_chain

    from pymc_sgmcmc import SGLD

    model, data = MODELS[name](settings.rows, coordinates)
    # A single row, which counts N / n times, then moves what it touches by less than its distance.
    step_size = 0.5 * batch / settings.rows
    step = SGLD(model=model, batch_size=batch, step_size=step_size, preconditioner="identity")
    transitions = settings.transitions
    length = min(transitions, BLOCK_ELEMENTS // coordinates)
    start = PRIOR_SD * np.random.default_rng(2).standard_normal(coordinates)
    chain = engine_chain(step, start, step_size, length, keep=False)
    run = by_hand(name)

    def hand(seed: int) -> None:
        generator, position = np.random.default_rng(seed), start.copy()
        for _ in range(0, transitions, length):
            positions, gradients = np.empty((2, length, coordinates))
            run(data, step_size, batch, generator, position, positions, gradients)

    def noise(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for _ in range(0, transitions, length):
            generator.standard_normal((length, coordinates))

    calls = {"ours": lambda seed: chain(seed, transitions), "hand": hand, "noise": noise}
    times = in_turn(calls, settings.rounds)
    about = {"model": name, "coordinates": coordinates, "batch": batch}
    touched = min(coordinates, batch * TOUCHED_BY_A_ROW[name])
    return {
        **about, "touched": touched, **{key: 1e6 * times[key][0] / transitions for key in calls},
    }  # fmt: skip


def results(settings: Any) -> Iterator[Result]:
    """All combinations."""
    for case in itertools.product(settings.models, settings.coordinates, settings.batch):
        yield measure(settings, *case)


def verdicts(found: list[Result]) -> Iterator[Verdict]:
    """How many times the time by hand."""
    for r in found:
        what = f"{r['model']}, d = {r['coordinates']}, n = {r['batch']}"
        yield Verdict(what, r["ours"] / r["hand"], LIMIT, "×")


TABLES = [Table("Processor time of a transition, N = {rows}", COLUMNS)]

if __name__ == "__main__":
    sys.exit(run(__doc__, results, TABLES, OPTIONS, verdicts))
