"""Sample models of two index arrays, such as matrix factorisations, by blocks of both."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from pymc.model import Model
from rich.progress import Progress
from xarray import DataTree

from pymc_sgmcmc.checks import generator, one_of, or_none, positive_number, whole_number
from pymc_sgmcmc.errors import NonFinitePositionError
from pymc_sgmcmc.posterior.check_rows import check_rows
from pymc_sgmcmc.posterior.position import given_model
from pymc_sgmcmc.posterior.two_sided import two_sided
from pymc_sgmcmc.sampling.by_blocks.block import Turn
from pymc_sgmcmc.sampling.by_blocks.grid import make_grid
from pymc_sgmcmc.sampling.by_blocks.setup import (
    CURVATURE,
    IDENTITY,
    STEP_NAMES,
    Blocks,
    Design,
    design_of,
    draw_around,
    find_start,
    measure,
)
from pymc_sgmcmc.sampling.by_blocks.tasks import BlockChain, tasks_of
from pymc_sgmcmc.sampling.dealt_rows import check_submits, posterior_to_deal_out
from pymc_sgmcmc.sampling.trace import groups_of_points, recorded_names
from pymc_sgmcmc.schedules import StepSize, check_step_size, step_sizes
from pymc_sgmcmc.step_methods.pymc_hook import log
from pymc_sgmcmc.trace_tools.verdict import ess_and_r_hat, of_convergence
from pymc_sgmcmc.tuning import VARIANCE_INFLATION

PARTS = "block_parts"
"""This group of a trace has the sizes of the parts and the settings of the run."""

DRAWS_AHEAD = 2
"""Iterations are submitted for so many draws before the first of them is waited for, so that
workers do not wait for messages, and the scheduler does not hold the tasks of a whole run."""

THINNING = 10
"""The default number of iterations a draw. A draw has all users and items, and takes as much memory
as they do."""

FEWEST_DRAWS = 8
"""R-hat is computed of no fewer draws of a chain."""

LOOKED_AT = 200
"""R-hat is computed of at most so many coordinates, since there may be millions."""


def sample_blocks(
    model: Model,
    parts: int = 4,
    *,
    step: str = "sgld",
    draws: int = 200,
    tune: int = 100,
    thin: int | None = None,
    chains: int = 1,
    step_size: StepSize | None = None,
    bias: float | None = None,
    batch_size: int | None = None,
    preconditioner: str = CURVATURE,
    memory: int = 3,
    rows: str | Sequence[str] | None = None,
    initial_point: Mapping[str, np.ndarray] | None = None,
    var_names: str | Sequence[str] | None = None,
    random_seed: Any = None,
    client: Any = None,
    progressbar: bool = True,
) -> DataTree:
    r"""Sample a model of two index arrays by conflict-free blocks, on one or more machines.

    In ``(U[user] * V[item]).sum(-1)`` each row of data meets one row of U and one of V. Users and
    items are each dealt out to B groups at random, and the rows to B × B blocks. Part i consists of
    the B blocks :math:`(b, (b + i) \bmod B)`, which have no user and no item in common (Ahn et al.
    2015; Şimşekli et al. 2016, section 4.3 and fig. 4). An iteration draws part i with probability
    :math:`|\Omega_i| / N`, and updates all blocks of it at the same time by the gradient estimate

    .. math:: \hat\nabla = \nabla \log p(\theta)
        + \frac{N}{|\Omega_i|} \sum_{r \in \Omega_i} \nabla \log p(x_r \mid \theta),

    which is unbiased. The B blocks have all users and all items, so each coordinate moves in each
    iteration, by its own prior and the rows of its block.

    Parameters
    ----------
    model : pymc.Model
        All free variables have users, or items, on their first axis, and the data index them by
        ``U[user]`` and ``V[item]``: factors, biases, loadings. There are any number of variables of
        either side, with any likelihood of the rows, any transforms of single elements, and any
        prior under which users and items are independent. Parameters that all users share have to
        be numbers.
    parts : int
        B, at most the number of users and of items. With 1 all rows are one block.
    step : {"sgld", "psgld", "hamcmc"}
        The sampler, see the notes.
    draws, tune : int
        Draws of each chain to keep, and to leave out before them.
    thin : int, optional
        Iterations of a draw. Default: 10, for "hamcmc" the next multiple of `memory`. There it has
        to be a multiple, so that all draws are from one of the chains that take turns.
    chains : int
        The number of chains, one after the other.
    step_size : float or callable, optional
        The step size h, or a function of the iteration such as `PolynomialDecay`. The paper's
        :math:`\epsilon` is h / 2. Default: computed for `bias`.
    bias : float, optional
        The relative error of variances that is accepted, on average over the coordinates. Default:
        0.05.
    batch_size : int, optional
        The most rows of a block that an iteration takes: a random window of its rows, which lie in
        random order. Default: all rows of the part, as in the papers.
    preconditioner : {"curvature", "identity"}
        For "sgld" and "hamcmc", the inverse diagonal of the curvature at a point of large density,
        or none, as in the papers.
    memory : int
        For "hamcmc", M, at least 2. The paper has 2.
    rows : str or sequence of str, optional
        Which data run over the rows, as of `Posterior`, where that is ambiguous.
    initial_point : mapping, optional
        Values of value variables, from which all chains start. Default: each at another point
        around one of large density, which L-BFGS finds with all rows. Preconditioners and step
        sizes are computed at that point in any case, and may diverge from far starts.
    var_names : str or sequence of str, optional
        Variables to record. The default is all of them.
    random_seed : int, sequence of int, or numpy.random.Generator, optional
    client : Dask client, or another executor, optional
        Runs the blocks of an iteration at the same time. The draws are the same to the last bit
        with any number of workers, and without a client, on machines of one kind.
    progressbar : bool
        Whether to show how many draws are done.

    Returns
    -------
    xarray.DataTree
        With the draws in ``posterior``, and in ``sample_stats`` ``step_size``, ``part`` of the last
        iteration, and for "hamcmc" ``pair_accepted``, the share of pairs in use. The group
        ``block_parts`` has the numbers of rows of the parts, and the settings as attributes.
        After Ctrl-C it has the chains that were whole or, in the first chain, the draws so far.

    Raises
    ------
    TypeError, ValueError
        Where an argument cannot be used, or there are fewer users or items than parts.
    ModelError
        Where the model has no two sides as above. The message names the variable.
    NonFinitePositionError
        Where a chain diverges.

    See Also
    --------
    sample : samples any model with rows, with minibatches of all of them.

    Notes
    -----
    **Samplers.** "sgld" is distributed SGLD, :math:`\theta' = \theta + \tfrac h2 M \hat\nabla +
    N(0, hM)`. "psgld" has M of `PSGLD`, which follows the gradients of all iterations before the
    first kept draw and is frozen then. "hamcmc" is `HAMCMC` with ``pairs="own"`` and
    :math:`\gamma D^2` and :math:`\lambda D^{-2}`, where :math:`D^2` is the `preconditioner`. Its
    dot products are sums over the blocks, added in the order of the blocks.

    **Step size.** Let V be the variance of the gradient estimate between the parts, and H the
    curvature. The stationary variances are too large by about :math:`\tfrac h4 (MV + MH)`, so h is
    4 `bias` over the mean of the diagonal of MV plus the largest eigenvalue of MH. These are
    computed around the start. A variance of single coordinates may be off by more, as those of
    users whose few rows are far from the fit. There are B different gradients only, so directions
    in which several coordinates move together have more noise than single ones have. In models
    of 15 users and 12 items the variance of ``b[user] + c[item]`` was too large by 3 to 4 % on
    average with the default `bias`, by 10 to 17 % for single pairs, and with 60 ratings by 70 % for
    one pair.

    **Rotations.** The posterior of a matrix factorisation is the same for :math:`UQ, VQ` with any
    orthogonal Q. Means of U and V, and their R-hat, say nothing. Products ``U[i] @ V[j]`` do.

    **Random numbers.** Those of an iteration are drawn where a block is, from generators seeded by
    the seed, the chain, the iteration and the group.

    **Messages.** A group of users stays on its worker with its rows. In an iteration only states of
    groups of items go to another worker, 8 bytes a coordinate times 1 for "sgld", 3 for "psgld" and
    3M - 2 for "hamcmc", which sends (M - 1)(2M + 1) numbers a block besides. Small blocks run
    faster without a client, see `docs/many_rows.md`. An executor of processes gets all rows of a
    group with each task, so that it suits small data only.

    References
    ----------
    Ahn, Korattikara, Liu, Rajan and Welling (2015), Large-scale distributed Bayesian matrix
    factorization using stochastic gradient MCMC. Gemulla, Nijkamp, Haas and Sismanis (2011),
    Large-scale matrix factorization with distributed stochastic gradient descent. Şimşekli, Badeau,
    Cemgil and Richard (2016), Stochastic quasi-Newton Langevin Monte Carlo.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sgmcmc import sample_blocks
    >>> rng = np.random.default_rng(1)
    >>> user, item = rng.integers(30, size=2000), rng.integers(20, size=2000)
    >>> ratings = rng.normal(size=30)[user] + rng.normal(size=20)[item] + rng.normal(size=2000)
    >>> with pm.Model() as model:
    ...     a = pm.Normal("a", 0, 1, shape=30)
    ...     b = pm.Normal("b", 0, 1, shape=20)
    ...     _ = pm.Normal("rating", a[user] + b[item], 1.0, observed=ratings)
    >>> idata = sample_blocks(model, parts=2, random_seed=1, progressbar=False)
    >>> dict(idata["posterior"].sizes)
    {'chain': 1, 'draw': 200, 'a_dim_0': 30, 'b_dim_0': 20}
    """
    one_of("step", step, STEP_NAMES)
    one_of("preconditioner", preconditioner, (CURVATURE, IDENTITY))
    parts, memory = whole_number("parts", parts, 1), whole_number("memory", memory, 2)
    draws, tune = whole_number("draws", draws, 1), whole_number("tune", tune, 0)
    chains = whole_number("chains", chains, 1)
    batch_size = or_none(whole_number, "batch_size", batch_size, 1)
    bias = or_none(positive_number, "bias", bias)
    step_size = or_none(lambda _, value: check_step_size(value), "", step_size)
    if bias is not None and step_size is not None:
        raise ValueError(
            f"`step_size={step_size}` leaves nothing to compute for `bias={bias}`. Leave one "
            "of them out."
        )
    turns = memory if step == "hamcmc" else 1
    thin = or_none(whole_number, "thin", thin, 1) or -(-THINNING // turns) * turns
    if thin % turns:
        raise ValueError(
            f"`thin={thin}` should be a multiple of `memory={memory}`, since that many chains "
            "of HAMCMC move in turn and draws should be of one of them."
        )
    or_none(check_submits, "client", client)
    recorded_names(given_model(model), var_names)
    posterior = posterior_to_deal_out(
        model, rows, by="sample_blocks", to="blocks", initial_point=initial_point
    )
    check_rows(posterior)
    problem = two_sided(posterior)
    for side in problem.sides:
        if side.size < parts:
            raise ValueError(
                f"`parts={parts}` needs as many groups of `{side.index}`, but it has {side.size} "
                "entries. Take fewer parts."
            )
    dealing, searching, running = generator("random_seed", random_seed).spawn(3)
    posterior, initial = problem.posterior, problem.posterior.initial_position
    codes = [posterior.data[side.leaf] for side in problem.sides]
    grid = make_grid(codes, [side.size for side in problem.sides], parts, dealing)
    blocks = Blocks(problem, grid, batch_size)
    begin = time.time()
    scale = measure(blocks, find_start(blocks, initial, searching), searching)
    design = design_of(
        step,
        blocks,
        scale,
        preconditioner=preconditioner,
        memory=memory,
        is_rescaled=step_size is None,
    )
    settings: dict[str, Any] = {"parts": parts, "step": step, "tune": tune, "thin": thin}
    settings |= {"preconditioner": preconditioner} if step != "psgld" else {}
    settings |= {"memory": memory} if step == "hamcmc" else {}
    settings |= {"batch_size": batch_size} if batch_size is not None else {}
    if step_size is None:
        settings["bias"] = bias or VARIANCE_INFLATION
        step_size = design.step_size(settings["bias"], blocks.shares[blocks.shares > 0].min())
        remedy = f"Give a smaller `bias` than {settings['bias']:g}."
    else:
        remedy = "Give a smaller `step_size`, or none."
    set_up = time.time() - begin
    seed = int(running.integers(2**62))
    run = _Run(blocks, design, step_size, seed, draws, tune, thin, remedy)
    starts = [
        draw_around(scale.start, scale.curvature, running) if initial_point is None else initial
        for _ in range(chains)
    ]
    positions, stats = _positions(run, starts, scale.moment, client, progressbar)
    _warn_of_slow_coordinates(positions, posterior.layout.labels)
    kept_chains, kept_draws, _ = positions.shape
    points = posterior.layout.unravel_all(positions.reshape(-1, posterior.dimension))
    groups = groups_of_points(model, points, kept_chains, var_names)
    groups["sample_stats"] = xr.Dataset(
        {name: (("chain", "draw"), values) for name, values in stats.items()},
        coords={"chain": range(kept_chains), "draw": range(kept_draws)},
    )
    groups[PARTS] = xr.Dataset(
        {"rows": ("part", blocks.counts), "probability": ("part", blocks.shares)},
        coords={"part": np.arange(parts)},
        attrs=settings
        | {
            "largest_curvature": design.largest_curvature,
            "mean_variance": design.mean_variance,
            "seconds_of_set_up": set_up,
            "seconds": time.time() - begin - set_up,
        },
    )
    return DataTree.from_dict(groups)


def _warn_of_slow_coordinates(positions: np.ndarray, labels: Sequence[str]) -> None:
    """Warn where draws of coordinates are few effective ones, or chains disagree."""
    _, draws, d = positions.shape
    if draws < FEWEST_DRAWS:
        return
    looked_at = np.unique(np.linspace(0, d - 1, LOOKED_AT).astype(int))
    ess, r_hat = ess_and_r_hat(positions[:, :, looked_at])
    said = of_convergence(ess, r_hat, tuple(labels[n] for n in looked_at), len(looked_at))
    if said is not None:
        log.warning(
            "Not converged: %s Use more draws or a larger `thin`. Factors can be rotated, and "
            "biases shifted against each other, so look at R-hat of what you use, such as products "
            "`U[i] @ V[j]` and sums.",
            said,
        )


# --- The run -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Run:
    """What all chains share."""

    blocks: Blocks
    design: Design
    step_size: StepSize
    seed: int
    draws: int
    tune: int
    thin: int
    remedy: str

    def turns(self, chain: int) -> Iterator[list[Turn]]:
        """The iterations of a chain, those of one draw at a time."""
        shares = self.blocks.shares
        rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(chain,)))
        for draw in range(self.tune + self.draws):
            first = draw * self.thin
            parts = rng.choice(len(shares), size=self.thin, p=shares)
            sizes = step_sizes(self.step_size, first, self.thin)
            yield [
                Turn(
                    seed=self.seed,
                    chain=chain,
                    iteration=first + number,
                    part=int(part),
                    weight=1 / shares[part],
                    step_size=float(size),
                    tuning=draw < self.tune,
                )
                for number, (part, size) in enumerate(zip(parts, sizes, strict=True))
            ]


def _positions(
    run: _Run, starts: Sequence[np.ndarray], moment: np.ndarray, client: Any, progressbar: bool
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Positions, shape (chains, draws, d), and statistics, (chains, draws).

    After Ctrl-C these are the whole chains or, in the first chain, the draws so far.

    Raises
    ------
    KeyboardInterrupt
        Before the first draw that is kept.
    """
    tasks, step = tasks_of(client), run.design.step
    groups = [tasks.place(group) for group in run.blocks.with_settings(run.design.settings)]
    positions = np.empty(
        (len(starts) * run.draws, len(starts[0])), run.blocks.model.posterior.dtype
    )
    kept: list[tuple[Turn, Any]] = []
    with Progress(disable=not progressbar) as progress:
        bar = progress.add_task("Draws", total=len(starts) * (run.tune + run.draws))
        try:
            for number, start in enumerate(starts):
                chain = BlockChain(tasks, step, groups, run.blocks, start, moment)
                for turn, at, coefficients in _draws(run, number, chain):
                    progress.advance(bar)
                    _check_finite(at, turn, run)
                    if not turn.tuning:
                        positions[len(kept)] = at
                        kept.append((turn, coefficients))
        except KeyboardInterrupt:
            if not kept:
                raise
            log.warning("Interrupted: the trace has the chains, or draws of the first, so far.")
    size = max(1, len(kept) // run.draws), min(len(kept), run.draws)
    count = size[0] * size[1]
    turns, coefficients = zip(*kept[:count], strict=True)
    stats = {"step_size": [turn.step_size for turn in turns], "part": [turn.part for turn in turns]}
    if step.reduces:
        stats["pair_accepted"] = [accepted.mean() for *_, accepted in coefficients]
    return positions[:count].reshape(*size, -1), {
        name: np.reshape(values, size) for name, values in stats.items()
    }


def _draws(run: _Run, number: int, chain: BlockChain) -> Iterator[tuple[Turn, np.ndarray, Any]]:
    """The last iteration, position and coefficients of each draw, some draws behind the tasks."""
    waiting: deque[tuple[Turn, Any]] = deque()
    for turns in run.turns(number):
        for turn in turns:
            chain.advance(turn)
        waiting.append((turns[-1], chain.ask()))
        if len(waiting) > DRAWS_AHEAD:
            turn, asked = waiting.popleft()
            yield turn, *chain.read(*asked)
    for turn, asked in waiting:
        yield turn, *chain.read(*asked)


def _check_finite(at: np.ndarray, turn: Turn, run: _Run) -> None:
    """Refuse a position that is not finite.

    Raises
    ------
    NonFinitePositionError
    """
    if not np.isfinite(at).all():
        raise NonFinitePositionError(
            f"The chain left the finite numbers before iteration {turn.iteration + 1}, with a "
            f"step size of {turn.step_size:.3g}. {run.remedy}"
        )
