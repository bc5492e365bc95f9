"""A grid of blocks of users, items and the rows where they meet, and its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Grid:
    r"""The rows of data in B × B blocks, which make up B parts.

    Block (b, c) has the rows of users of group b and items of group c. Part i consists of the
    blocks (b, (b + i) mod B) for all b. No two of them share a user or an item, so that they can be
    updated at the same time, and together they have all users and items (Gemulla et al. 2011; Ahn
    et al. 2015; Şimşekli et al. 2016, fig. 4).

    Attributes
    ----------
    groups : tuple of two lists of numpy.ndarray
        Numbers of the users, and of the items, of each group.
    rows : list of lists of numpy.ndarray
        ``rows[b][c]`` are the numbers of the rows of block (b, c), in random order.
    """

    groups: tuple[list[np.ndarray], list[np.ndarray]]
    rows: list[list[np.ndarray]]

    @property
    def parts(self) -> int:
        """B."""
        return len(self.rows)

    def counts(self) -> np.ndarray:
        r"""Rows of each part, :math:`|\Omega_i|`, shape (B,)."""
        return np.array(
            [
                sum(len(self.rows[b][item_group(b, part, self.parts)]) for b in range(self.parts))
                for part in range(self.parts)
            ]
        )


def item_group(user_group: int, part: int, parts: int) -> int:
    """The group of items that a group of users meets in a part."""
    return (user_group + part) % parts


def make_grid(
    codes: Sequence[np.ndarray], sizes: Sequence[int], parts: int, rng: np.random.Generator
) -> Grid:
    """Deal out users and items to groups at random, and the rows to blocks.

    Parameters
    ----------
    codes : sequence of two numpy.ndarray
        User and item of each row.
    sizes : sequence of two int
        The numbers of users and items, each at least `parts`.
    parts : int
        B.
    rng : numpy.random.Generator
    """
    groups, group_of = [], []
    for numbers, size in zip(codes, sizes, strict=True):
        of_entry = dealt_out(np.bincount(numbers, minlength=size), parts, rng)
        groups.append([np.flatnonzero(of_entry == group) for group in range(parts)])
        group_of.append(of_entry[numbers])
    block = group_of[0] * parts + group_of[1]
    # The order within a block is random, so that a window of its rows is a random sample.
    order = rng.permutation(len(block))
    order = order[np.argsort(block[order], kind="stable")]
    stops = np.cumsum(np.bincount(block, minlength=parts**2))[:-1]
    blocks = np.split(order, stops)
    rows = [blocks[b * parts : (b + 1) * parts] for b in range(parts)]
    return Grid((groups[0], groups[1]), rows)


def dealt_out(counts: np.ndarray, parts: int, rng: np.random.Generator) -> np.ndarray:
    """A random group of each user or item, with about as many of them, and of their rows, in each.

    Each of the B with the most rows goes to another group, at random, then each of the next B, and
    so on.
    """
    order = rng.permutation(len(counts))
    order = order[np.argsort(-counts[order], kind="stable")]
    rounds = -(-len(counts) // parts)
    groups = rng.permuted(np.tile(np.arange(parts), (rounds, 1)), axis=1).ravel()
    result = np.empty(len(counts), dtype=np.int64)
    # Those of the last, incomplete round go to different groups too.
    result[order] = groups[: len(counts)]
    return result
