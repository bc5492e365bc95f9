"""Models of two index arrays, and iterations of their blocks with noise of a test's choosing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pymc as pm

from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.two_sided import TwoSided, two_sided
from pymc_sgmcmc.sampling.by_blocks.block import ITEMS, PAIRS, USERS, Turn
from pymc_sgmcmc.sampling.by_blocks.grid import make_grid
from pymc_sgmcmc.sampling.by_blocks.setup import Blocks
from pymc_sgmcmc.sampling.by_blocks.tasks import BlockChain, Tasks

N_USERS, N_ITEMS, N_ROWS = 7, 5, 60


def indices(n_users: int = N_USERS, n_items: int = N_ITEMS, n_rows: int = N_ROWS, seed: int = 1):
    """Users and items of rows, some with far more of them than others."""
    rng = np.random.default_rng(seed)
    users = (n_users * rng.random(n_rows) ** 2).astype(int)
    items = (n_items * rng.random(n_rows) ** 2).astype(int)
    return users, items


def biases_model(n_rows: int = N_ROWS, prior_sd: float = 0.5) -> pm.Model:
    """A Gaussian posterior: ratings are a user's bias plus an item's."""
    users, items = indices(n_rows=n_rows)
    rng = np.random.default_rng(2)
    ratings = rng.normal(size=N_USERS)[users] + rng.normal(size=N_ITEMS)[items]
    with pm.Model() as model:
        a = pm.Normal("a", np.linspace(-1, 1, N_USERS), prior_sd, shape=N_USERS)
        b = pm.Normal("b", 0, prior_sd, shape=N_ITEMS)
        pm.Normal(
            "rating", a[users] + b[items], 1.3, observed=ratings + 1.3 * rng.normal(size=n_rows)
        )
    return model


def factors_model(rank: int = 2) -> pm.Model:
    """Factors and biases, with the index arrays as data of the model."""
    users, items = indices()
    rng = np.random.default_rng(3)
    with pm.Model() as model:
        user, item = pm.Data("user", users), pm.Data("item", items)
        U = pm.Normal("U", 0, 1, shape=(N_USERS, rank))
        V = pm.Normal("V", 0, 1, shape=(N_ITEMS, rank))
        a = pm.Normal("a", 0, 2, shape=N_USERS)
        pm.Normal(
            "rating", (U[user] * V[item]).sum(-1) + a[user], 0.8, observed=rng.normal(size=N_ROWS)
        )
    return model


@dataclass(frozen=True)
class FedTurn(Turn):
    """An iteration whose noise is given for all coordinates, (d,), and for the pairs."""

    blocks: Blocks | None = None
    xi: np.ndarray | None = None
    pair_noise: np.ndarray | None = None

    def generator(self, kind: int, group: int = 0):
        """Something that gives the numbers of a group as a generator would draw them."""
        if kind == PAIRS:
            return _Fed(self.pair_noise)
        if kind not in (USERS, ITEMS):
            return super().generator(kind, group)
        numbers = self.blocks.grid.groups[kind][group]
        return _Fed(self.xi[self.blocks.model.sides[kind].places[numbers].ravel()])


@dataclass(frozen=True)
class _Fed:
    values: np.ndarray

    def standard_normal(self, size: int) -> np.ndarray:
        assert self.values.shape == (size,)
        return self.values


@cache
def _problem(make: Callable[[], pm.Model]) -> TwoSided:
    return two_sided(Posterior(make()))


class FedBlocks(Blocks):
    """A model in blocks, whose chains run here with given noise."""

    def __init__(self, make: Callable[[], pm.Model], parts: int, batch_size: int | None = None):
        problem = _problem(make)
        self.posterior = problem.posterior
        codes = [self.posterior.data[side.leaf] for side in problem.sides]
        sizes = [side.size for side in problem.sides]
        grid = make_grid(codes, sizes, parts, np.random.default_rng(4))
        super().__init__(problem, grid, batch_size)

    @property
    def dimension(self) -> int:
        return self.posterior.dimension

    def fed(self, part: int, step_size: float, iteration: int = 0, tuning: bool = False, **noise):
        """An iteration, with ``xi`` (d,) and ``pair_noise``, both zero where not given."""
        return FedTurn(
            seed=0,
            chain=0,
            iteration=iteration,
            part=part,
            weight=1 / self.shares[part],
            step_size=step_size,
            tuning=tuning,
            blocks=self,
            xi=noise.get("xi", np.zeros(self.dimension)),
            pair_noise=np.asarray(noise.get("pair_noise", np.zeros(1))),
        )

    def chain(self, step, start: np.ndarray, settings=(), moment=None) -> BlockChain:
        """A chain of a sampler from a start, (d,)."""
        moment = np.ones(self.dimension) if moment is None else moment
        return BlockChain(Tasks(), step, self.with_settings(settings), self, start, moment)

    def read(self, chain: BlockChain, auxiliary: int = 0) -> np.ndarray:
        """The position of a chain, or an auxiliary of its states with a number a coordinate."""
        promises, met = chain.ask()
        pieces = [np.concatenate([state[auxiliary] for state in pair]) for pair in chain._pairs]
        return chain.read([*pieces, promises[-1]], met)[0]
