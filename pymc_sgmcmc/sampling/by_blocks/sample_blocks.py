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
from pymc_sgmcmc.posterior.two_sided import TwoSided, two_sided
from pymc_sgmcmc.sampling.by_blocks.block import Turn, user_groups
from pymc_sgmcmc.sampling.by_blocks.design import (
    CURVATURE,
    IDENTITY,
    STEP_NAMES,
    Design,
    design_of,
    with_given_step_size,
)
from pymc_sgmcmc.sampling.by_blocks.grid import Grid, make_grid
from pymc_sgmcmc.sampling.by_blocks.setup import (
    Gradients,
    Scale,
    draw_around,
    find_start,
    measure,
)
from pymc_sgmcmc.sampling.by_blocks.tasks import BlockChain, Tasks, tasks_of
from pymc_sgmcmc.sampling.dealt_rows import check_submits, posterior_to_deal_out
from pymc_sgmcmc.sampling.trace import groups_of_points, recorded_names
from pymc_sgmcmc.schedules import StepSize, check_step_size, step_sizes
from pymc_sgmcmc.step_methods.pymc_hook import log
from pymc_sgmcmc.trace_tools.verdict import LARGEST_R_HAT, SMALLEST_ESS, ess_and_r_hat
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

LOOKED_AT = 100
"""R-hat is computed of at most so many entries of a variable, since there may be millions."""


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
    3M - 2 for "hamcmc", which sends (M - 1)(2M + 1) numbers a block besides. There are 2 tasks a
    block, 4 for "hamcmc", and Dask took 5 milliseconds a task on a machine of two cores. So small
    blocks run faster without a client, see `docs/many_rows.md`. An executor of processes gets all
    rows of a group with each task, so that it suits small data only.

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
    settings = _Settings.of(locals())
    or_none(check_submits, "client", client)
    recorded_names(given_model(model), var_names)
    whole = posterior_to_deal_out(
        model, rows, by="sample_blocks", to="blocks", initial_point=initial_point
    )
    check_rows(whole)
    problem = two_sided(whole)
    _check_parts(problem, settings.parts)
    dealing, searching, running = generator("random_seed", random_seed).spawn(3)
    posterior = problem.posterior
    codes = [posterior.data[side.leaf] for side in problem.sides]
    grid = make_grid(codes, [side.size for side in problem.sides], settings.parts, dealing)
    gradients = Gradients(problem, grid, settings.batch_size)
    matrices = problem.matrices(posterior.layout.unravel(posterior.initial_position))
    initial = np.concatenate([matrix.ravel() for matrix in matrices])
    begin = time.time()
    start = find_start(gradients, initial, searching)
    scale = measure(gradients, start, searching)
    design = design_of(
        settings.step,
        gradients,
        scale,
        preconditioner=settings.preconditioner,
        memory=settings.memory,
    )
    if settings.step_size is None:
        chosen: StepSize = design.step_size(settings.bias, float(_used(gradients.shares).min()))
    else:
        chosen, design = settings.step_size, with_given_step_size(design)
    set_up = time.time() - begin
    seed = int(running.integers(2**62))
    points, stats, (kept_chains, kept_draws) = _run(
        _Run(problem, grid, gradients, scale, design, settings, chosen, seed),
        [
            draw_around(scale.start, scale.curvature, running) if initial_point is None else initial
            for _ in range(settings.chains)
        ],
        tasks_of(client),
        progressbar,
    )
    _warn_of_slow_coordinates(points, kept_chains)
    groups = groups_of_points(model, points, kept_chains, var_names)
    groups["sample_stats"] = xr.Dataset(
        {name: (("chain", "draw"), values) for name, values in stats.items()},
        coords={"chain": range(kept_chains), "draw": range(kept_draws)},
    )
    groups[PARTS] = xr.Dataset(
        {"rows": ("part", grid.counts()), "probability": ("part", gradients.shares)},
        coords={"part": np.arange(settings.parts)},
        attrs=settings.attributes()
        | {
            "largest_curvature": design.largest_curvature,
            "mean_variance": design.mean_variance,
            "seconds_of_set_up": set_up,
            "seconds": time.time() - begin - set_up,
        },
    )
    return DataTree.from_dict(groups)


# --- Settings ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Settings:
    """The checked arguments."""

    parts: int
    step: str
    draws: int
    tune: int
    thin: int
    chains: int
    step_size: StepSize | None
    bias: float
    batch_size: int | None
    preconditioner: str
    memory: int

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Settings:
        """Check the arguments of `sample_blocks`.

        Raises
        ------
        TypeError, ValueError
        """
        step = one_of("step", given["step"], STEP_NAMES)
        memory = whole_number("memory", given["memory"], 2)
        bias = or_none(positive_number, "bias", given["bias"])
        step_size = or_none(lambda _, value: check_step_size(value), "", given["step_size"])
        if bias is not None and step_size is not None:
            raise ValueError(
                f"`step_size={step_size}` leaves nothing to compute for `bias={bias}`. Leave one "
                "of them out."
            )
        thin = or_none(whole_number, "thin", given["thin"], 1)
        if step == "hamcmc" and thin is not None and thin % memory:
            raise ValueError(
                f"`thin={thin}` should be a multiple of `memory={memory}`, since that many chains "
                "of HAMCMC move in turn and draws should be of one of them."
            )
        if thin is None:
            thin = -(-THINNING // memory) * memory if step == "hamcmc" else THINNING
        return cls(
            parts=whole_number("parts", given["parts"], 1),
            step=step,
            draws=whole_number("draws", given["draws"], 1),
            tune=whole_number("tune", given["tune"], 0),
            thin=thin,
            chains=whole_number("chains", given["chains"], 1),
            step_size=step_size,
            bias=VARIANCE_INFLATION if bias is None else bias,
            batch_size=or_none(whole_number, "batch_size", given["batch_size"], 1),
            preconditioner=one_of("preconditioner", given["preconditioner"], (CURVATURE, IDENTITY)),
            memory=memory,
        )

    def attributes(self) -> dict[str, Any]:
        """Those of a trace."""
        names = ["parts", "step", "tune", "thin"]
        names += ["preconditioner"] if self.step != "psgld" else []
        names += ["memory"] if self.step == "hamcmc" else []
        names += ["bias"] if self.step_size is None else []
        names += ["batch_size"] if self.batch_size is not None else []
        return {name: getattr(self, name) for name in names}


def _check_parts(problem: TwoSided, parts: int) -> None:
    for side in problem.sides:
        if side.size < parts:
            raise ValueError(
                f"`parts={parts}` needs as many groups of `{side.index}`, but it has {side.size} "
                "entries. Take fewer parts."
            )


def _warn_of_slow_coordinates(points: Mapping[str, np.ndarray], chains: int) -> None:
    """Warn where draws of the value variables are few effective ones, or chains disagree."""
    slowest, slow, looked_at = ("", np.inf, 0.0), 0, 0
    for name, values in points.items():
        draws = values.reshape(chains, len(values) // chains, -1)
        if draws.shape[1] < FEWEST_DRAWS:
            return
        numbers = np.unique(np.linspace(0, draws.shape[2] - 1, LOOKED_AT).astype(int))
        ess, r_hat = ess_and_r_hat(draws[:, :, numbers])
        slow += int(np.sum((ess < SMALLEST_ESS) | (r_hat > LARGEST_R_HAT)))
        looked_at += len(numbers)
        worst = int(np.argmin(ess))
        place = np.unravel_index(numbers[worst], values.shape[1:])
        label = f"{name}[{', '.join(map(str, place))}]"
        slowest = min(slowest, (label, float(ess[worst]), float(r_hat[worst])), key=lambda x: x[1])
    if slow:
        label, effective, ratio = slowest
        log.warning(
            "Not converged: %d of %d coordinates have R-hat above %g or fewer than %g effective "
            "draws, such as `%s` with R-hat %.2f and %.2g effective draws. Use more draws or a "
            "larger `thin`. Factors can be rotated, and biases shifted against each other, so look "
            "at R-hat of what you use, such as products `U[i] @ V[j]` and sums.",
            slow,
            looked_at,
            LARGEST_R_HAT,
            SMALLEST_ESS,
            label,
            ratio,
            effective,
        )


def _used(shares: np.ndarray) -> np.ndarray:
    """Probabilities of the parts that have rows."""
    return shares[shares > 0]


# --- The run -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Run:
    """What all chains share."""

    problem: TwoSided
    grid: Grid
    gradients: Gradients
    scale: Scale
    design: Design
    settings: _Settings
    step_size: StepSize
    seed: int

    def turns(self, chain: int) -> Iterator[list[Turn]]:
        """The iterations of a chain, those of one draw at a time."""
        settings = self.settings
        rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(chain,)))
        for draw in range(settings.tune + settings.draws):
            first = draw * settings.thin
            parts = rng.choice(settings.parts, size=settings.thin, p=self.gradients.shares)
            sizes = step_sizes(self.step_size, first, settings.thin)
            yield [
                Turn(
                    seed=self.seed,
                    chain=chain,
                    iteration=first + number,
                    part=int(part),
                    weight=1 / self.gradients.shares[part],
                    step_size=float(size),
                    tuning=draw < settings.tune,
                )
                for number, (part, size) in enumerate(zip(parts, sizes, strict=True))
            ]


def _run(
    run: _Run, starts: Sequence[np.ndarray], tasks: Tasks, progressbar: bool
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], tuple[int, int]]:
    """Points of all chains, their statistics, and the numbers of chains and draws.

    After Ctrl-C these are the whole chains or, in the first chain, the draws so far.

    Raises
    ------
    KeyboardInterrupt
        Before the first draw that is kept.
    """
    settings = run.settings
    groups = [
        tasks.place(group)
        for group in user_groups(run.problem, run.grid, run.design.settings, settings.batch_size)
    ]
    shape = settings.chains * settings.draws, len(starts[0])
    positions = np.empty(shape, run.problem.posterior.dtype)
    kept: list[tuple[Turn, Any]] = []
    with Progress(disable=not progressbar) as progress:
        bar = progress.add_task("Draws", total=settings.chains * (settings.tune + settings.draws))
        try:
            for chain, start in enumerate(starts):
                states = BlockChain(
                    tasks, run.design.step, groups, run.gradients.places, start, run.scale.moment
                )
                for number, turn, at, coefficients in _draws(run, chain, states):
                    progress.advance(bar)
                    _check_finite(at, turn, run)
                    if number >= 0:
                        positions[len(kept)] = at
                        kept.append((turn, coefficients))
        except KeyboardInterrupt:
            if not kept:
                raise
            log.warning("Interrupted: the trace has the chains, or draws of the first, so far.")
    size = max(1, len(kept) // settings.draws), min(len(kept), settings.draws)
    draws = size[0] * size[1]
    turns, coefficients = zip(*kept[:draws], strict=True)
    stats = {"step_size": [turn.step_size for turn in turns], "part": [turn.part for turn in turns]}
    if run.design.step.reduces:
        stats["pair_accepted"] = [each.accepted.mean() for each in coefficients]
    sides = run.problem.sides
    names = run.problem.posterior.layout.names
    points = {}
    of_sides = np.split(positions[:draws], [sides[0].size * sides[0].width], axis=1)
    for side, of_side in zip(sides, of_sides, strict=True):
        flat = side.values(of_side.reshape(-1, side.width))
        for variable, values in zip(side.variables, flat, strict=True):
            points[names[variable]] = values.reshape(draws, side.size, *values.shape[1:])
    return points, {name: np.reshape(values, size) for name, values in stats.items()}, size


def _draws(
    run: _Run, chain: int, states: BlockChain
) -> Iterator[tuple[int, Turn, np.ndarray, Any]]:
    """Positions at each draw, numbered from 0 after tuning, some draws behind the tasks."""
    waiting: deque[tuple[int, Turn, Any]] = deque()

    def next_one() -> tuple[int, Turn, np.ndarray, Any]:
        number, turn, asked = waiting.popleft()
        return number, turn, *states.read(*asked)

    for draw, turns in enumerate(run.turns(chain)):
        for turn in turns:
            states.advance(turn)
        waiting.append((draw - run.settings.tune, turns[-1], states.ask()))
        if len(waiting) > DRAWS_AHEAD:
            yield next_one()
    while waiting:
        yield next_one()


def _check_finite(at: np.ndarray, turn: Turn, run: _Run) -> None:
    """Refuse a position that is not finite.

    Raises
    ------
    NonFinitePositionError
    """
    if np.isfinite(at).all():
        return
    raise NonFinitePositionError(
        f"The chain left the finite numbers before iteration {turn.iteration + 1}, with a step "
        f"size of {turn.step_size:.3g}. "
        + (
            "Give a smaller `step_size`, or none."
            if run.settings.step_size is not None
            else f"Give a smaller `bias` than {run.settings.bias:g}."
        )
    )
