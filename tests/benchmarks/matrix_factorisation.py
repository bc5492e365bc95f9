"""Errors of held-out ratings against iterations and seconds: fig. 5 of Şimşekli et al. (2016).

Examples
--------
::

    python tests/benchmarks/matrix_factorisation.py --picture fig5.png
    python tests/benchmarks/matrix_factorisation.py --iterations 200 --pilot 30 --workers 2

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common.program import make_parser, print_table, say, write_results

USERS, MOVIES, RATINGS = 6040, 3706, 1_000_209
"""The shape of MovieLens-1M: users, movies with a rating, ratings."""

BURN_IN = 50
"""The paper leaves out so many iterations."""

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""The step sizes that are tried, in units of the computed one."""

CONTENDERS = {
    "DSGLD": ("sgld", "identity", 2),
    "PSGLD": ("psgld", "identity", 2),
    "HAMCMC, M = 2": ("hamcmc", "identity", 2),
    "DSGLD, scaled": ("sgld", "curvature", 2),
    "HAMCMC, M = 2, scaled": ("hamcmc", "curvature", 2),
}
"""Sampler, preconditioner and memory. The first three are those of the paper. "Scaled" is by the
diagonal of the curvature at the mode, the default of the package."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--data-home", default=os.environ.get("PYMC_SGMCMC_DATA"))
    parser.add_argument("--ratings", type=int, default=RATINGS, help="of simulated ratings")
    parser.add_argument("--rank", type=int, default=10)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--pilot", type=int, default=100, help="iterations of each step size tried")
    parser.add_argument("--every", type=int, default=5, help="iterations between two errors")
    parser.add_argument("--workers", type=int, default=0, help="of Dask; 0 is this process alone")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--picture", type=Path, default=None)
    return parser.parse_args(arguments)


# --- Ratings -----------------------------------------------------------------------------------


def read_ratings(settings: argparse.Namespace) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Users, movies and ratings of MovieLens-1M where its file is present, or simulated ones."""
    from pymc_sgmcmc.datasets import load_movielens
    from pymc_sgmcmc.datasets.registry import REGISTRY

    folder = Path(settings.data_home or ".")
    if any((folder / name).is_file() for name in REGISTRY["movielens-1m"].files):
        frame = load_movielens(folder, size="1m").frame
        users = np.unique(frame["user"], return_inverse=True)[1]
        movies = np.unique(frame["movie"], return_inverse=True)[1]
        return users, movies, frame["rating"].to_numpy(float), "MovieLens-1M"
    return (*simulated(settings.ratings, np.random.default_rng(2016)), "simulated")


def simulated(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ratings from 1 to 5, with counts of users and movies as unequal as those of MovieLens-1M.

    There the most active user has 2314 ratings and the median user 96; the most popular movie has
    3428 and the median movie 123. Nobody rates a movie twice.
    """
    scale = count / RATINGS
    users, movies = max(50, round(USERS * scale**0.5)), max(30, round(MOVIES * scale**0.5))
    activity = np.clip(rng.lognormal(np.log(96), 1.05, users), 20, 0.6 * movies)
    activity = np.clip((activity * count / activity.sum()).astype(int), 1, int(0.8 * movies))
    popularity = np.log(rng.gamma(0.5, size=movies) + 1e-3)
    chosen = []
    for number in activity:
        # The largest of perturbed logarithms are a sample without replacement (Gumbel).
        chosen.append(np.argpartition(-(popularity + rng.gumbel(size=movies)), number)[:number])
    user = np.repeat(np.arange(users), activity)
    movie = np.concatenate(chosen)
    # Popular movies are liked better, as in the original.
    quality = 0.25 * (popularity - popularity.mean()) / popularity.std()
    quality = quality + 0.3 * rng.normal(size=movies)
    taste, genre = rng.normal(size=(users, 6)), rng.normal(size=(movies, 6))
    liking = 0.2 * np.einsum("rk,rk->r", taste[user], genre[movie])
    rating = 3.5 + 0.4 * rng.normal(size=users)[user] + quality[movie] + liking
    rating = np.clip(np.round(rating + 0.8 * rng.normal(size=len(user))), 1, 5)
    return user, movie, rating


# --- Runs --------------------------------------------------------------------------------------


class Problem:
    """The model, its grid, and the held-out ratings."""

    def __init__(self, settings: argparse.Namespace):
        import pymc as pm

        from pymc_sgmcmc.posterior import Posterior
        from pymc_sgmcmc.posterior.two_sided import two_sided
        from pymc_sgmcmc.sampling.by_blocks.grid import make_grid
        from pymc_sgmcmc.sampling.by_blocks.setup import Blocks, find_start, measure

        user, movie, rating, self.source = read_ratings(settings)
        rng = np.random.default_rng(5)
        held_out = rng.random(len(rating)) < 0.1
        self.test = user[held_out], movie[held_out], rating[held_out]
        self.rows = int((~held_out).sum())
        self.shape = user.max() + 1, movie.max() + 1
        with pm.Model() as model:
            users = pm.Data("user", user[~held_out])
            movies = pm.Data("movie", movie[~held_out])
            U = pm.Normal("U", 0, 1, shape=(self.shape[0], settings.rank))
            V = pm.Normal("V", 0, 1, shape=(self.shape[1], settings.rank))
            pm.Normal("rating", (U[users] * V[movies]).sum(-1), 1.0, observed=rating[~held_out])
        begin = time.time()
        self.problem = two_sided(Posterior(model))
        codes = [self.problem.posterior.data[side.leaf] for side in self.problem.sides]
        self.grid = make_grid(codes, self.shape, settings.parts, rng)
        self.blocks = Blocks(self.problem, self.grid)
        say(f"{self.source}: {self.shape}, {self.rows} rows; model {time.time() - begin:.1f} s")
        zero = np.zeros(sum(self.shape) * settings.rank)
        found = find_start(self.blocks, zero, rng)
        say(f"RMSE at the mode {self.error(self.predicted(found)):.4f}")
        self.scale = measure(self.blocks, found, rng)
        self.set_up = time.time() - begin
        # All samplers start here, far from the mode.
        self.start = 0.3 * rng.standard_normal(len(zero))

    def predicted(self, position: np.ndarray) -> np.ndarray:
        user, movie, _ = self.test
        rows = position.reshape(sum(self.shape), -1)
        return np.einsum("rk,rk->r", rows[user], rows[self.shape[0] + movie])

    def error(self, predicted: np.ndarray) -> float:
        return float(np.sqrt(np.mean((predicted - self.test[2]) ** 2)))


def run(
    problem: Problem, name: str, step_size: float, iterations: int, every: int, client: Any
) -> dict[str, Any]:
    """Errors of the mean prediction after the burn-in, and of the present one before."""
    from pymc_sgmcmc.sampling.by_blocks.block import Turn
    from pymc_sgmcmc.sampling.by_blocks.tasks import BlockChain, tasks_of

    design = problem.designs[name]
    tasks, grid = tasks_of(client), problem.grid
    blocks = problem.blocks
    placed = [tasks.place(group) for group in blocks.with_settings(design.settings)]
    chain = BlockChain(tasks, design.step, placed, blocks, problem.start, problem.scale.moment)
    wait_for(chain, client)
    rng = np.random.default_rng(7)
    total, count, seconds = 0.0, 0, 0.0
    trace: dict[str, list[float]] = {"iteration": [], "seconds": [], "rmse": []}
    begin = time.perf_counter()
    for iteration in range(iterations):
        part = int(rng.choice(grid.parts, p=problem.blocks.shares))
        weight = 1 / problem.blocks.shares[part]
        tuning = iteration < BURN_IN
        chain.advance(Turn(1, 0, iteration, part, weight, step_size, tuning))
        if (iteration + 1) % every:
            continue
        wait_for(chain, client)
        seconds += time.perf_counter() - begin
        position, _ = chain.read(*chain.ask())
        predicted = problem.predicted(position)
        if not np.isfinite(predicted).all() or np.abs(predicted).max() > 1e6:
            return {"name": name, "step_size": step_size, "diverged": True}
        if iteration >= BURN_IN:
            total, count = total + predicted, count + 1
            predicted = total / count
        trace["iteration"].append(iteration + 1)
        trace["seconds"].append(seconds)
        trace["rmse"].append(problem.error(predicted))
        begin = time.perf_counter()
    return {"name": name, "step_size": step_size, "diverged": False, **trace}


def wait_for(chain: Any, client: Any) -> None:
    """Wait until all iterations of a chain so far are done."""
    if client is not None:
        from distributed import wait

        wait(chain._pairs)


def tuned(problem: Problem, name: str, settings: argparse.Namespace, client: Any) -> list[Any]:
    """Pilot runs of all step sizes, from the smallest up to the first that diverges."""
    default = problem.designs[name].step_size(0.05, float(problem.blocks.shares.min()))
    pilots = []
    for factor in FACTORS:
        pilot = run(problem, name, factor * default, settings.pilot, settings.every, client)
        pilot["factor"] = factor
        pilots.append(pilot)
        error = "diverged" if pilot["diverged"] else f"{pilot['rmse'][-1]:.4f}"
        say(f"{name}: step size {factor} × {default:.3g}: {error}")
        if pilot["diverged"]:
            break
    return pilots


def draw(results: list[dict[str, Any]], title: str, path: Path) -> None:
    """The picture of the paper: errors against iterations, and against seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import ScalarFormatter

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for result in results:
        for axis, over in zip(axes, ("iteration", "seconds"), strict=True):
            axis.plot(result[over], result["rmse"], label=result["name"])
            axis.set(xlabel=over.removesuffix("s") + "s", xscale="log", yscale="log")
            axis.grid(alpha=0.3, which="both")
            axis.yaxis.set_major_formatter(ScalarFormatter())
            axis.yaxis.set_minor_formatter(ScalarFormatter())
    axes[0].set_ylabel("RMSE of held-out ratings")
    axes[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    settings = parse_arguments(arguments)
    from pymc_sgmcmc.sampling.by_blocks.setup import design_of

    client = None
    if settings.workers:
        from distributed import Client

        client = Client(
            n_workers=settings.workers, threads_per_worker=1, dashboard_address="127.0.0.1:0"
        )
    problem = Problem(settings)
    problem.designs = {}
    for name in settings.contenders:
        step, preconditioner, memory = CONTENDERS[name]
        problem.designs[name] = design_of(
            step, problem.blocks, problem.scale, preconditioner=preconditioner, memory=memory
        )
    results = []
    for name in settings.contenders:
        pilots = tuned(problem, name, settings, client)
        finite = [pilot for pilot in pilots if not pilot["diverged"]]
        # A step that survives a short run may still diverge in a long one: then the next best.
        for best in sorted(finite, key=lambda pilot: pilot["rmse"][-1]):
            result = run(
                problem, name, best["step_size"], settings.iterations, settings.every, client
            )
            if not result["diverged"]:
                break
        result |= {"factor": best["factor"], "pilots": pilots}
        results.append(result)
        write_results(
            settings.output,
            "matrix_factorisation",
            settings,
            settings.core,
            [{"source": problem.source, "set_up": problem.set_up}, *results],
        )
    kept = [result for result in results if not result["diverged"]]
    for result in results:
        if result["diverged"]:
            print(f"diverged: {result['name']}, step size {result['step_size']:.3g}")
    at = [n for n in (50, 100, 200, 500, 1000, 2000) if n <= settings.iterations]
    title = f"{problem.source}: {problem.shape[0]} × {problem.shape[1]}, {problem.rows} ratings, "
    title += f"rank {settings.rank}, {settings.parts} parts"
    print_table(
        title,
        ["sampler", "step size", "× computed", "ms an iteration", *(f"RMSE at {n}" for n in at)],
        [
            [
                result["name"],
                result["step_size"],
                result["factor"],
                1000 * result["seconds"][-1] / result["iteration"][-1],
                *(f"{np.interp(n, result['iteration'], result['rmse']):.4f}" for n in at),
            ]
            for result in kept
        ],
    )
    if settings.picture is not None:
        draw(kept, title, settings.picture)
    if client is not None:
        client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
