"""Models of two index arrays: blocks, parts, samplers and whole runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.ops import wrap_py

from pymc_sgmcmc import ModelError, NonFinitePositionError, PolynomialDecay, sample_blocks
from pymc_sgmcmc.adaptation.base import Seen
from pymc_sgmcmc.adaptation.rmsprop import RMSprop
from pymc_sgmcmc.dynamics.hamcmc import (
    QuasiNewtonLangevin,
    move_coefficients,
    pair_products,
    preconditioned_move,
)
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.compiled import NUMPY_MODE
from pymc_sgmcmc.posterior.two_sided import two_sided
from pymc_sgmcmc.sampling.by_blocks.block import window
from pymc_sgmcmc.sampling.by_blocks.grid import dealt_out, make_grid
from pymc_sgmcmc.sampling.by_blocks.setup import (
    design_of,
    diagonal_curvature,
    find_start,
    largest_curvature,
    measure,
)
from pymc_sgmcmc.sampling.by_blocks.steps import (
    LangevinBlocks,
    QuasiNewtonBlocks,
    RMSpropBlocks,
)
from tests.support.blocks import N_ITEMS, N_ROWS, N_USERS, FedBlocks, biases_model, factors_model
from tests.support.blocks import indices as some_indices
from tests.support.exact_law import AffineTransition, stationary_law

Z = 4.5
"""Bounds are so many standard errors. A right result exceeds one of 100 once in 1500 times."""

run_of_blocks = sys.modules["pymc_sgmcmc.sampling.by_blocks.sample_blocks"]
"""The module, whose name the package gives to its function."""

SMALL = {"draws": 6, "tune": 4, "thin": 3, "random_seed": 3, "progressbar": False}


@pytest.fixture
def on_numpy(monkeypatch):
    """Gradients of blocks by NumPy, which are called a few times in a test of their values."""
    monkeypatch.setattr("pymc_sgmcmc.posterior.two_sided.MODE", NUMPY_MODE)


# --- The two sides of a model --------------------------------------------------------------------


def poisson_model() -> pm.Model:
    """Positive factors, counts, data of users beside the rows, and items before users."""
    users, items = some_indices()
    rng = np.random.default_rng(5)
    age = np.arange(N_USERS) % 3
    with pm.Model(
        coords={"person": range(N_USERS), "film": range(N_ITEMS), "factor": range(2)}
    ) as model:
        rates = np.linspace(1, 2, N_ITEMS)[:, None]
        V = pm.Gamma("V", 2.0, rates, dims=("film", "factor"))
        U = pm.HalfNormal("U", 1.0, shape=(N_USERS, 2))
        slope = pm.Normal("slope", 0, 0.1, dims="person")
        pm.Deterministic("total", U.sum(-1))
        rate = (U[users] * V[items]).sum(-1) * pt.exp(slope[users] * pt.as_tensor(age)[users])
        pm.Poisson("y", rate, observed=rng.poisson(1.0, size=N_ROWS))
    return model


@pytest.mark.parametrize(
    ("make", "variables"),
    [
        (biases_model, [{"a"}, {"b"}]),
        (factors_model, [{"U", "a"}, {"V"}]),
        (poisson_model, [{"V_log__"}, {"U_log__", "slope"}]),
    ],
)
def test_sides_of_a_model(make, variables):
    posterior = Posterior(make())
    sides = two_sided(posterior).sides
    names = posterior.layout.names
    assert [{names[number] for number in side.variables} for side in sides] == variables
    assert {side.size for side in sides} == {N_USERS, N_ITEMS}


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize("make", [biases_model, factors_model, poisson_model])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_the_mean_over_the_parts_is_the_gradient(make, parts):
    blocks = FedBlocks(make, parts)
    posterior = blocks.posterior
    position = np.random.default_rng(1).normal(size=posterior.dimension)
    value, expected = posterior.log_density_and_gradient(position)
    total, mean = 0.0, 0.0
    for share, part in zip(blocks.shares, range(parts), strict=True):
        of_value, of_part = blocks.of_part(blocks.turn(part), position)
        total = total + share * of_value
        mean = mean + share * of_part
    scale = 1 + np.abs(expected).max()
    np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-12 * scale)
    np.testing.assert_allclose(total, value, rtol=1e-12)
    of_set_up = blocks.whole(position)
    np.testing.assert_allclose(of_set_up[0], value, rtol=1e-12)
    np.testing.assert_allclose(of_set_up[1], mean, rtol=0, atol=1e-12 * scale)


def shared_parameter() -> pm.Model:
    users, items = some_indices()
    with pm.Model() as model:
        sd = pm.HalfNormal("sd", 1.0)
        a, b = pm.Normal("a", shape=N_USERS), pm.Normal("b", shape=N_ITEMS)
        pm.Normal("y", a[users] + b[items], sd, observed=np.zeros(N_ROWS))
    return model


def hyperprior() -> pm.Model:
    users, items = some_indices()
    with pm.Model() as model:
        mu = pm.Normal("mu")
        a, b = pm.Normal("a", mu, shape=N_USERS), pm.Normal("b", shape=N_ITEMS)
        pm.Normal("y", a[users] + b[items], observed=np.zeros(N_ROWS))
    return model


def three_indices() -> pm.Model:
    users, items = some_indices()
    with pm.Model() as model:
        a, b = pm.Normal("a", shape=N_USERS), pm.Normal("b", shape=N_ITEMS)
        c = pm.Normal("c", shape=4)
        day = pm.Data("day", np.arange(N_ROWS) % 4)
        pm.Normal("y", a[users] + b[items] + c[day], observed=np.zeros(N_ROWS))
    return model


def one_index() -> pm.Model:
    users, _ = some_indices()
    with pm.Model() as model:
        a = pm.Normal("a", shape=N_USERS)
        pm.Normal("y", a[users], observed=np.zeros(N_ROWS))
    return model


def both_indices() -> pm.Model:
    users, items = some_indices(N_USERS, N_USERS)
    with pm.Model() as model:
        U = pm.Normal("U", shape=(N_USERS, 2))
        pm.Normal("y", (U[users] * U[items]).sum(-1), observed=np.zeros(N_ROWS))
    return model


def last_axis() -> pm.Model:
    users, items = some_indices()
    with pm.Model() as model:
        user = pm.Data("user", users)
        U, b = pm.Normal("U", shape=(2, N_USERS)), pm.Normal("b", shape=N_ITEMS)
        a = pm.Normal("a", shape=N_USERS)
        pm.Normal("y", U[:, user].sum(0) + a[user] + b[items], observed=np.zeros(N_ROWS))
    return model


def code_as_number() -> pm.Model:
    users, items = some_indices()
    with pm.Model() as model:
        user = pm.Data("user", users)
        a, b = pm.Normal("a", shape=N_USERS), pm.Normal("b", shape=N_ITEMS)
        pm.Normal("y", a[user] + b[items] + 0.1 * user, observed=np.zeros(N_ROWS))
    return model


def random_walk() -> pm.Model:
    users, items = some_indices()
    with pm.Model() as model:
        a = pm.Normal("a", shape=N_USERS)
        pm.Potential("smooth", -((a[1:] - a[:-1]) ** 2).sum())
        b = pm.Normal("b", shape=N_ITEMS)
        pm.Normal("y", a[users] + b[items], observed=np.zeros(N_ROWS))
    return model


def joint_prior() -> pm.Model:
    users, items = some_indices()
    with pm.Model() as model:
        a, b = pm.Normal("a", shape=N_USERS), pm.Normal("b", shape=N_ITEMS)
        pm.Potential("zero_sum", -((a.sum() - b.sum()) ** 2))
        pm.Normal("y", a[users] + b[items], observed=np.zeros(N_ROWS))
    return model


def centred_factor() -> pm.Model:
    users, items = some_indices()
    with pm.Model() as model:
        a, b = pm.Normal("a", shape=N_USERS), pm.Normal("b", shape=N_ITEMS)
        pm.Normal("y", (a - a.mean())[users] + b[items], observed=np.zeros(N_ROWS))
    return model


def negative_index() -> pm.Model:
    users, items = some_indices()
    users[3] = -1
    with pm.Model() as model:
        a, b = pm.Normal("a", shape=N_USERS), pm.Normal("b", shape=N_ITEMS)
        pm.Normal("y", a[pm.Data("user", users)] + b[items], observed=np.zeros(N_ROWS))
    return model


def minibatch() -> pm.Model:
    users, items = some_indices()
    with pm.Model() as model:
        user, item, y = pm.Minibatch(users, items, np.zeros(N_ROWS), batch_size=10)
        a, b = pm.Normal("a", shape=N_USERS), pm.Normal("b", shape=N_ITEMS)
        pm.Normal("y", a[user] + b[item], observed=y, total_size=N_ROWS)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (shared_parameter, "`sd_log__` is used without an index"),
        (hyperprior, "`mu` is used without an index"),
        (three_indices, "indexed by two arrays.*`day`"),
        (one_index, "indexed by two arrays"),
        (both_indices, "`U` is indexed by .* and by"),
        (last_axis, "`user` selects rows along the first axis, but is also used otherwise"),
        (code_as_number, "`user` selects rows along the first axis, but is also used otherwise"),
        (random_walk, "not a sum over blocks"),
        (joint_prior, "`zero_sum` has no rows, but depends on variables of both"),
        (centred_factor, "not a sum over blocks"),
        (negative_index, "`user` should have codes from 0 to 6, but row 3 has the code -1"),
        (minibatch, "the model uses `pm.Minibatch`"),
    ],
)
def test_other_models_are_refused(make, message):
    with pytest.raises(ModelError, match=message):
        sample_blocks(make(), parts=2, **SMALL)


# --- Parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_blocks_of_a_part_share_no_user_and_no_item(parts):
    users, items = some_indices()
    grid = make_grid((users, items), (N_USERS, N_ITEMS), parts, np.random.default_rng(1))
    for groups, size in zip(grid.groups, (N_USERS, N_ITEMS), strict=True):
        assert sorted(np.concatenate(groups)) == list(range(size))
        assert {len(group) for group in groups} <= {size // parts, -(-size // parts)}
    everything = [numbers for row in grid.rows for numbers in row]
    assert sorted(np.concatenate(everything)) == list(range(N_ROWS))
    for part in range(parts):
        met = [
            (set(users[numbers]), set(items[numbers]))
            for b in range(parts)
            for numbers in [grid.rows[b][(b + part) % parts]]
        ]
        for side in range(2):
            chosen = [of_block[side] for of_block in met]
            assert sum(map(len, chosen)) == len(set.union(*chosen))
    for b in range(parts):
        for c in range(parts):
            assert set(users[grid.rows[b][c]]) <= set(grid.groups[0][b])
            assert set(items[grid.rows[b][c]]) <= set(grid.groups[1][c])
    assert grid.counts().sum() == N_ROWS


def test_groups_have_about_as_many_rows():
    counts = np.random.default_rng(1).zipf(1.5, size=500).clip(max=3000)
    groups = dealt_out(counts, 4, np.random.default_rng(2))
    of_group = np.bincount(groups, weights=counts)
    # Each round of four adds a difference of at most that between its counts.
    assert of_group.max() - of_group.min() <= counts.max()
    assert np.ptp(np.bincount(groups)) <= 1
    first = [dealt_out(np.ones(4, int), 2, np.random.default_rng(n))[0] for n in range(20)]
    assert set(first) == {0, 1}


def test_windows_have_each_row_equally_often():
    rows = [np.arange(7), 10 * np.arange(7)]
    taken = [window(rows, start, 3) for start in range(7)]
    assert (np.bincount(np.concatenate([numbers for numbers, _ in taken])) == 3).all()
    assert all(len(set(numbers)) == 3 and (tens == 10 * numbers).all() for numbers, tens in taken)


@pytest.mark.usefixtures("on_numpy")
def test_minibatches_of_blocks_are_unbiased():
    # All windows of all blocks of a part, with the noise off.
    blocks = FedBlocks(factors_model, 2, batch_size=4)
    at = np.random.default_rng(1).normal(size=blocks.dimension)
    turn = blocks.turn(1)
    _, expected = blocks.of_part(turn, at)
    mean = np.zeros(blocks.dimension)
    for b, group in enumerate(blocks.groups):
        items = (b + 1) % 2
        places, count = blocks.places(b, items), len(group.rows[items][0])
        turns = [turn_with_start(turn, start) for start in range(count)]
        mean[places] = np.mean([group.gradient(each, at[places]) for each in turns], axis=0)
    np.testing.assert_allclose(mean, expected, rtol=1e-10)


def turn_with_start(turn, start):
    """The iteration, with the start of the window given."""

    class Fixed:
        def integers(self, count):
            return start

    fixed = replace(turn)
    object.__setattr__(fixed, "generator", lambda kind, group=0: Fixed())
    return fixed


# --- One iteration -------------------------------------------------------------------------------


def part_gradient(blocks, part, position):
    """The gradient of a part by the functions of the posterior, on all of its rows at once."""
    posterior = blocks.posterior
    numbers = [
        blocks.grid.rows[b][(b + part) % blocks.grid.parts] for b in range(blocks.grid.parts)
    ]
    rows = posterior.take(np.concatenate(numbers))
    _, prior = posterior.log_prior_and_gradient(position)
    _, likelihood = posterior.log_likelihood_and_gradient(position, rows)
    return prior + posterior.n_rows / len(rows[0]) * likelihood


REFUSING = (1.0, 1.0, 4.0)


def random_settings(blocks, count, sizes=(1.0, 1.0, 1.0)):
    """Positive arrays with an entry for each coordinate."""
    rng = np.random.default_rng(7)
    return [size * rng.uniform(0.5, 2.0, size=blocks.dimension) for size in sizes[:count]]


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize("make", [factors_model, poisson_model])
@pytest.mark.parametrize("parts", [1, 3])
def test_blocks_move_as_all_coordinates_at_once(make, parts):
    blocks = FedBlocks(make, parts)
    rng = np.random.default_rng(8)
    theta = 0.3 * rng.normal(size=blocks.dimension)
    (M,) = settings = random_settings(blocks, 1)
    chain = blocks.chain(LangevinBlocks(), theta, settings)
    h = 0.01
    for iteration in range(5):
        part, xi = int(rng.integers(parts)), rng.normal(size=blocks.dimension)
        chain.advance(blocks.fed(part, h, iteration, xi=xi))
        theta = theta + h / 2 * M * part_gradient(blocks, part, theta) + np.sqrt(h * M) * xi
        np.testing.assert_allclose(blocks.read(chain), theta, rtol=0, atol=1e-11)


def linear_problem(blocks):
    """Of a Gaussian posterior: H, the mean, and H_i and b_i of each part, g_i = b_i - H_i θ."""
    d = blocks.dimension
    of_parts = []
    for part in range(blocks.grid.parts):
        b = part_gradient(blocks, part, np.zeros(d))
        H = np.column_stack([b - part_gradient(blocks, part, unit) for unit in np.eye(d)])
        of_parts.append((H, b))
    shares = blocks.shares
    H = sum(p * H_i for p, (H_i, _) in zip(shares, of_parts, strict=True))
    b = sum(p * b_i for p, (_, b_i) in zip(shares, of_parts, strict=True))
    return H, np.linalg.solve(H, b), of_parts


def langevin_law(blocks, M, h):
    """Stationary covariance of SGLD with parts, from the curvatures of the parts alone."""
    _, m, of_parts = linear_problem(blocks)
    d = blocks.dimension
    operator, constant = np.zeros((d * d, d * d)), h * np.diag(M)
    for p, (H, b) in zip(blocks.shares, of_parts, strict=True):
        F = np.eye(d) - h / 2 * M[:, None] * H
        residual = h / 2 * M * (b - H @ m)
        operator += p * np.kron(F, F)
        constant = constant + p * np.outer(residual, residual)
    assert np.abs(np.linalg.eigvals(operator)).max() < 1
    covariance = np.linalg.solve(np.eye(d * d) - operator, constant.ravel())
    return m, covariance.reshape(d, d)


def read_transition(blocks, make_chain, part, h):
    """The matrices of an affine iteration, read off the blocks as they run."""

    def moved(start, xi):
        chain = make_chain(start)
        chain.advance(blocks.fed(part, h, xi=xi))
        return blocks.read(chain)

    zero, units = np.zeros(blocks.dimension), np.eye(blocks.dimension)
    origin = moved(zero, zero)
    return AffineTransition(
        np.column_stack([moved(unit, zero) - origin for unit in units]),
        origin,
        np.column_stack([moved(zero, unit) - origin for unit in units]),
    )


@pytest.mark.parametrize("step", ["sgld", "psgld"])
def test_stationary_law_is_exact(step):
    blocks = FedBlocks(biases_model, 2)
    assert abs(blocks.shares[0] - 0.5) > 0.01  # Equal probabilities would be wrong.
    h = 0.3
    if step == "sgld":
        M = random_settings(blocks, 1)[0] / 4
        sampler, settings, moment = LangevinBlocks(), (M,), None
    else:
        moment = np.random.default_rng(9).uniform(0.5, 2.0, size=blocks.dimension)
        sampler, settings = RMSpropBlocks(N_ROWS, 0.99, 1e-5, size=4.0), ()
        M = 1 / (4.0 * (1e-5 + np.sqrt(moment)))

    def make_chain(start):
        return blocks.chain(sampler, start, settings, moment)

    transitions = [read_transition(blocks, make_chain, part, h) for part in range(2)]
    mean, covariance = stationary_law(transitions, blocks.shares)
    expected_mean, expected = langevin_law(blocks, M, h)
    H, _, _ = linear_problem(blocks)
    # It is far from the posterior, so that the formula of the excess is tested.
    assert np.max(np.diag(expected) / np.diag(np.linalg.inv(H))) > 1.1
    np.testing.assert_allclose(mean, expected_mean, rtol=0, atol=1e-9)
    np.testing.assert_allclose(covariance, expected, rtol=0, atol=1e-9)


def test_preconditioner_follows_as_rmsprop():
    """For one part the state of the blocks is that of the package's `RMSprop`."""
    blocks = FedBlocks(factors_model, 1)
    rng = np.random.default_rng(10)
    theta = 0.3 * rng.normal(size=blocks.dimension)
    moment = rng.uniform(0.5, 2.0, size=blocks.dimension)
    sampler = RMSpropBlocks(N_ROWS, 0.9, 1e-3, size=2.0)
    chain = blocks.chain(sampler, theta, moment=moment)
    ones = pytensor.shared(np.ones(blocks.dimension))
    adaptation = RMSprop(
        blocks.posterior,
        ones,
        ones,
        decay=0.9,
        regularization=1e-3,
        batch_size=1,
        size_of=lambda _: 2.0,
    )
    state = {"second_moment": moment, "preconditioner": 1 / (2 * (1e-3 + np.sqrt(moment)))}
    iteration = 0
    for tuning in (True, True, False):
        gradients = []
        for _ in range(100):
            gradients.append(part_gradient(blocks, 0, theta))
            xi = rng.normal(size=blocks.dimension)
            chain.advance(blocks.fed(0, 1e-3, iteration, tuning, xi=xi))
            M = state["preconditioner"]
            theta = theta + 5e-4 * M * gradients[-1] + np.sqrt(1e-3 * M) * xi
            iteration += 1
        np.testing.assert_allclose(blocks.read(chain), theta, rtol=1e-8)
        seen = Seen(None, np.array(gradients), None, tuning, True, 100, None)
        state, _ = adaptation.update(state, seen)
        np.testing.assert_allclose(blocks.read(chain, 1), state["second_moment"], rtol=1e-8)
        np.testing.assert_allclose(blocks.read(chain, 2), state["preconditioner"], rtol=1e-8)


# --- HAMCMC --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_moves_from_dot_products_are_those_of_the_recursion(pairs):
    rng = np.random.default_rng(11)
    d = 40
    curvature = rng.uniform(0.5, 3.0, size=d)
    s = rng.normal(size=(pairs, d))
    y = curvature * s
    if pairs > 1:
        y[1] = -y[1]  # This pair has to be refused.
    scale, threshold = rng.uniform(0.2, 0.4, size=d), np.full(d, 0.1)
    drift, noise, pair_noise = rng.normal(size=d), rng.normal(size=d), rng.normal(size=pairs)
    halves = [slice(0, 13), slice(13, 13), slice(13, d)]
    products = [
        pair_products(drift[h], noise[h], s[:, h], y[:, h], scale[h], threshold[h]) for h in halves
    ]
    total = products[0] + products[1] + products[2]
    a, b, accepted = move_coefficients(total, pair_noise)
    assert accepted.sum() == pairs - (pairs > 1)
    move = scale * (drift - y.T @ a) + noise + s.T @ b
    product = (s * y).sum(1)
    factor = np.where(accepted, np.abs(product) ** -0.5, 0.0)[:, None]
    expected = preconditioned_move(drift, noise, pair_noise, factor * s, factor * y, scale)
    np.testing.assert_allclose(move, expected, rtol=1e-10)


@pytest.mark.parametrize(("parts", "memory"), [(1, 2), (1, 3), (3, 2), (3, 4)])
def test_blocks_move_as_hamcmc(parts, memory):
    """The package's compiled transition on all coordinates, with the same gradients and noise."""
    blocks = FedBlocks(factors_model, parts)
    d = blocks.dimension
    # The threshold is in the range of the curvatures, so that some pairs are refused.
    scale, regularization, threshold = settings = random_settings(blocks, 3, REFUSING)
    h = 0.02
    vectors = pt.vectors("scale", "regularization", "threshold")
    dynamics = QuasiNewtonLangevin(memory, *vectors)
    state = [pt.tensor("position", shape=(d,))] + [
        pt.tensor(auxiliary.name, shape=auxiliary.shape) for auxiliary in dynamics.auxiliaries(d)
    ]
    noise, part = pt.vector("noise"), pt.lscalar("part")
    rng = np.random.default_rng(12)
    theta = 0.3 * rng.normal(size=d)
    chain = blocks.chain(QuasiNewtonBlocks(memory), theta, settings)

    @wrap_py(itypes=[pt.dvector, pt.lscalar], otypes=[pt.dvector])
    def gradient(vector, part):
        return part_gradient(blocks, int(part), vector)

    scaled = dynamics.scaled_noise(noise[None], pt.as_tensor([h]))[0]
    after = dynamics.transition(tuple(state), lambda x: gradient(x, part), scaled, h)
    function = pytensor.function(
        [*vectors, *state, noise, part], [*after.state, *after.stats], mode="FAST_COMPILE"
    )
    values = [theta, *dynamics.initial_auxiliaries(theta, rng)]
    accepted: list[bool] = []
    for iteration in range(4 * memory + 6):
        number = int(rng.integers(parts))
        xi, pair_noise = rng.normal(size=d), rng.normal(size=memory - 1)
        *values, is_accepted = function(
            scale, regularization, threshold, *values, np.concatenate([xi, pair_noise]), number
        )
        chain.advance(blocks.fed(number, h, iteration, xi=xi, pair_noise=pair_noise))
        np.testing.assert_allclose(blocks.read(chain), values[0], rtol=1e-7, atol=1e-9)
        # A pair is judged in the iteration after the one that made it.
        if accepted:
            assert bool(chain._coefficients[-1][-1]) == accepted[-1]
        accepted.append(bool(is_accepted))
    assert any(accepted)
    assert not all(accepted)


# --- Set-up --------------------------------------------------------------------------------------


def test_curvature_and_variance_are_those_of_the_matrices():
    blocks = FedBlocks(biases_model, 2)
    H, _, _ = linear_problem(blocks)
    at = np.random.default_rng(13).normal(size=blocks.dimension)
    found = diagonal_curvature(blocks, at)
    np.testing.assert_allclose(found, np.diag(H), rtol=1e-6)
    M = 1 / np.diag(H)
    values = np.linalg.eigvals(M[:, None] * H).real
    largest = largest_curvature(blocks, at, M)
    assert abs(largest / values.max() - 1) < 0.05
    rng = np.random.default_rng(14)
    scale = measure(blocks, at, np.random.default_rng(14))
    vector = at + rng.standard_normal(len(at)) / np.sqrt(scale.curvature)
    estimates = np.array([part_gradient(blocks, part, vector) for part in range(2)])
    shares = blocks.shares
    mean = shares @ estimates
    np.testing.assert_allclose(scale.variance, shares @ (estimates - mean) ** 2, rtol=1e-6)
    np.testing.assert_allclose(scale.moment, shares @ estimates**2 / N_ROWS**2, rtol=1e-6)


def test_search_comes_to_the_mode():
    blocks = FedBlocks(biases_model, 2)
    _, m, _ = linear_problem(blocks)
    zero = np.zeros(blocks.dimension)
    start = find_start(blocks, zero, np.random.default_rng(15))
    np.testing.assert_allclose(start, m, atol=1e-3)


@pytest.mark.parametrize("parts", [1, 3])
def test_default_step_size_keeps_its_promise(parts):
    """The excess of the variances, by the exact law, is on average what was asked for."""
    blocks = FedBlocks(biases_model, parts)
    H, m, _ = linear_problem(blocks)
    scale = measure(blocks, m, np.random.default_rng(16))
    design = design_of("sgld", blocks, scale, preconditioner="curvature", memory=3)
    h = design.step_size(0.05, blocks.shares.min())
    (M,) = design.settings
    _, covariance = langevin_law(blocks, M, h)
    excess = np.diag(covariance) / np.diag(np.linalg.inv(H)) - 1
    assert 0.01 < excess.mean() < 0.06


# --- Whole runs ----------------------------------------------------------------------------------


@cache
def shared(make) -> pm.Model:
    return make()


cached_two_sided = cache(two_sided)


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch):
    """Compile each shared model once in this process, which takes a second a run otherwise."""
    monkeypatch.setattr(run_of_blocks, "two_sided", cached_two_sided)
    make = run_of_blocks.posterior_to_deal_out

    def posterior(model, rows, *, initial_point, **names):
        if initial_point is None and model in map(shared, (biases_model, factors_model)):
            return posterior_of(make, model)
        return make(model, rows, initial_point=initial_point, **names)

    monkeypatch.setattr(run_of_blocks, "posterior_to_deal_out", posterior)


@cache
def posterior_of(make, model) -> Posterior:
    return make(model, None, by="sample_blocks", to="blocks")


def draws_of(idata) -> np.ndarray:
    """All draws of all variables, as one array."""
    group = idata["posterior"]
    return np.concatenate([group[name].values.ravel() for name in group.data_vars])


@pytest.mark.slow
@pytest.mark.parametrize("step", ["sgld", "psgld", "hamcmc"])
def test_draws_are_the_same_with_any_number_of_workers(step):
    options = {"parts": 4, "step": step, "batch_size": 3, **SMALL}
    expected = draws_of(sample_blocks(shared(factors_model), **options))
    assert np.isfinite(expected).all()
    for workers in (1, 2, 4) if step == "sgld" else (4,):
        with ThreadPoolExecutor(workers) as client:
            idata = sample_blocks(shared(factors_model), client=client, **options)
        np.testing.assert_array_equal(draws_of(idata), expected)


@pytest.fixture(scope="module")
def cluster():
    """A Dask cluster of two processes."""
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", processes=True
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("step", ["sgld", "hamcmc"])
def test_draws_are_the_same_on_a_cluster(step, cluster):
    options = {"parts": 3, "step": step, **SMALL, "draws": 3, "tune": 1}
    expected = draws_of(sample_blocks(shared(biases_model), **options))
    np.testing.assert_array_equal(
        draws_of(sample_blocks(shared(biases_model), client=cluster, **options)), expected
    )


@pytest.mark.slow
def test_draws_are_the_same_where_a_worker_dies():
    distributed = pytest.importorskip("distributed")
    options = {"parts": 3, "random_seed": 3, "progressbar": False, "draws": 150, "tune": 10}
    expected = draws_of(sample_blocks(shared(biases_model), **options))
    killed = []
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", processes=True
        ) as cluster,
        distributed.Client(cluster) as client,
    ):

        def kill():
            pid = next(iter(cluster.workers.values())).pid
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

        # The run takes more than half a minute on two cores.
        timer = threading.Timer(15.0, kill)
        timer.start()
        idata = sample_blocks(shared(biases_model), client=client, **options)
        assert killed, "The run ended before the worker was killed."
        timer.join()
    np.testing.assert_array_equal(draws_of(idata), expected)


@pytest.mark.usefixtures("on_numpy")
def test_runs_of_other_seeds_and_chains_differ():
    # With one part and one start nothing but the noise tells them apart.
    options = {"parts": 1, "chains": 2, **SMALL}
    options["initial_point"] = {"a": np.zeros(N_USERS), "b": np.zeros(N_ITEMS)}
    first = sample_blocks(shared(biases_model), **options)["posterior"]["a"].values
    options["random_seed"] = 4
    second = sample_blocks(shared(biases_model), **options)["posterior"]["a"].values
    assert len(np.unique([*first.ravel(), *second.ravel()])) == 2 * first.size


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize(
    ("looks", "chains", "kept"),
    [(7, 1, 3), (10, 1, 6), (19, 1, 6)],
    ids=["in the first chain", "between chains", "in the second chain"],
)
def test_ctrl_c_returns_the_draws_so_far(monkeypatch, caplog, looks, chains, kept):
    """After so many looks at draws, of which 4 of each chain of 10 are from its tuning."""
    options = {**SMALL, "parts": 2, "chains": 2}
    whole = sample_blocks(shared(biases_model), **options)
    checked = run_of_blocks._check_finite
    seen = iter(range(looks))

    def interrupted(*arguments):
        if next(seen, None) is None:
            raise KeyboardInterrupt
        checked(*arguments)

    monkeypatch.setattr(run_of_blocks, "_check_finite", interrupted)
    idata = sample_blocks(shared(biases_model), **options)
    assert "Interrupted" in caplog.text
    assert (idata["posterior"].sizes["chain"], idata["posterior"].sizes["draw"]) == (chains, kept)
    for group in ("posterior", "sample_stats"):
        for name, values in idata[group].data_vars.items():
            expected = whole[group][name].values[:chains, :kept]
            np.testing.assert_array_equal(values.values, expected)


@pytest.mark.usefixtures("on_numpy")
def test_ctrl_c_before_the_first_draw(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_of_blocks, "_check_finite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sample_blocks(shared(biases_model), parts=2, **SMALL)


def test_thinned_draws_are_some_of_the_others():
    common = {"parts": 2, "step": "hamcmc", "random_seed": 5, "progressbar": False}
    every = sample_blocks(shared(biases_model), draws=12, tune=6, thin=3, **common)
    third = sample_blocks(shared(biases_model), draws=4, tune=2, thin=9, **common)
    for name in ("a", "b"):
        np.testing.assert_array_equal(
            third["posterior"][name].values, every["posterior"][name].values[:, 2::3]
        )
    np.testing.assert_array_equal(
        third["sample_stats"]["part"].values, every["sample_stats"]["part"].values[:, 2::3]
    )


def test_long_run_has_the_exact_law():
    """Parts and noise as they are drawn, against the law of the parts' curvatures."""
    blocks = FedBlocks(biases_model, 2)
    idata = sample_blocks(
        shared(biases_model),
        parts=2,
        preconditioner="identity",
        step_size=0.05,
        draws=6_000,
        tune=100,
        thin=1,
        initial_point={"a": np.zeros(N_USERS), "b": np.zeros(N_ITEMS)},
        random_seed=6,
        progressbar=False,
        client=None,
    )
    group = idata["posterior"]
    draws = np.concatenate([group["a"].values[0], group["b"].values[0]], axis=1)
    # The run has dealt out users and items otherwise than `blocks`, so the parts are its own.
    blocks.grid = grid_of_run(blocks, 2, 6)
    blocks.shares = blocks.grid.counts() / N_ROWS
    np.testing.assert_array_equal(idata["block_parts"]["rows"].values, blocks.grid.counts())
    mean, covariance = langevin_law(blocks, np.ones(blocks.dimension), 0.05)
    H, _, _ = linear_problem(blocks)
    assert np.max(np.diag(covariance) / np.diag(np.linalg.inv(H))) > 1.2
    pieces = (draws - mean).reshape(60, 100, -1)
    batches = pieces.mean(1)
    z = batches.mean(0) / (batches.std(0, ddof=1) / 60**0.5)
    assert np.abs(z).max() < Z
    squares = np.einsum("bti,btj->bij", pieces, pieces) / 100 - covariance
    z = squares.mean(0) / (squares.std(0, ddof=1) / 60**0.5)
    assert np.abs(z).max() < Z
    frequencies = np.bincount(idata["sample_stats"]["part"].values.ravel()) / 6_000
    share = blocks.shares[0]
    assert abs(frequencies[0] - share) < Z * np.sqrt(share * (1 - share) / 6_000)


def grid_of_run(blocks, parts, seed):
    dealing = np.random.default_rng(seed).spawn(3)[0]
    codes = [blocks.posterior.data[side.leaf] for side in blocks.model.sides]
    return make_grid(codes, [side.size for side in blocks.model.sides], parts, dealing)


@pytest.mark.usefixtures("on_numpy")
def test_parts_without_rows_are_never_drawn():
    users = np.repeat([0, 1], 20)
    items = 1 - users
    with pm.Model() as model:
        a, b = pm.Normal("a", shape=2), pm.Normal("b", shape=2)
        pm.Normal("y", a[users] + 0.5 * b[items], observed=np.linspace(-1, 1, 40))
    idata = sample_blocks(model, parts=2, **{**SMALL, "draws": 50})
    rows = idata["block_parts"]["rows"].values
    assert sorted(rows) == [0, 40]
    assert (idata["sample_stats"]["part"].values == np.argmax(rows)).all()
    assert np.isfinite(draws_of(idata)).all()


@pytest.mark.usefixtures("on_numpy")
def test_trace_has_names_dimensions_and_settings():
    model = poisson_model()
    idata = sample_blocks(model, parts=2, step="hamcmc", chains=2, **SMALL)
    posterior = idata["posterior"]
    assert set(posterior.data_vars) == {"U", "V", "slope", "total"}
    assert posterior["V"].dims == ("chain", "draw", "film", "factor")
    assert posterior["V"].shape == (2, 6, N_ITEMS, 2)
    assert (posterior["V"] > 0).all()
    np.testing.assert_allclose(posterior["total"], posterior["U"].values.sum(-1))
    assert set(idata["sample_stats"].data_vars) == {"step_size", "part", "pair_accepted"}
    attributes = idata["block_parts"].attrs
    assert (attributes["parts"], attributes["thin"], attributes["memory"]) == (2, 3, 3)
    assert idata["block_parts"]["rows"].sum() == N_ROWS
    only = sample_blocks(shared(biases_model), parts=2, var_names="a", **SMALL)
    assert set(only["posterior"].data_vars) == {"a"}


def test_schedules_count_iterations():
    decay = PolynomialDecay(a=0.02, b=3.0, gamma=0.6)
    idata = sample_blocks(shared(biases_model), parts=2, step_size=decay, **SMALL)
    # The last of the three iterations of each draw, after four draws of tuning.
    expected = [decay(3 * (4 + draw) + 2) for draw in range(6)]
    np.testing.assert_allclose(idata["sample_stats"]["step_size"].values[0], expected)


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize("step", ["sgld", "psgld", "hamcmc"])
def test_divergence_is_reported(step):
    options = {"parts": 2, "step": step, **SMALL, "tune": 200}
    with pytest.raises(NonFinitePositionError, match="with a step size of 1e"):
        sample_blocks(shared(factors_model), step_size=1e6, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": 6}, "`parts=6` needs as many groups of `.*`, but it has 5"),
        ({"parts": 0}, "`parts` should be a whole number"),
        ({"step": "nuts"}, "`step` should be one of 'sgld', 'psgld', 'hamcmc'"),
        ({"memory": 1}, "`memory` should be a whole number, at least 2"),
        ({"step": "hamcmc", "memory": 2}, "`thin=3` should be a multiple of `memory=2`"),
        ({"bias": 0.1, "step_size": 0.1}, "Leave one of them out"),
        ({"step_size": -1.0}, "`step_size` should be positive"),
        ({"preconditioner": "dense"}, "`preconditioner` should be one of"),
        ({"batch_size": 0}, "`batch_size` should be a whole number"),
        ({"var_names": ["c"]}, "`var_names` should name some of"),
        ({"initial_point": {"c": 0.0}}, "`initial_point` has a value for `c`"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        sample_blocks(shared(biases_model), **{"parts": 2, **SMALL, **options})


@pytest.mark.parametrize("client", ["local", Executor])
def test_client_is_checked(client):
    with pytest.raises(TypeError, match="`client` should have a method `submit`"):
        sample_blocks(shared(biases_model), client=client, **SMALL)


def test_indices_without_a_name_are_named_by_their_variable():
    users = np.arange(400) % 9
    with pm.Model() as model:
        a, b = pm.ZeroSumNormal("a", 1, shape=9), pm.Normal("b", 0, 1, shape=7)
        pm.Normal("y", a[users] + b[np.arange(400) % 7], 1, observed=np.zeros(400))
    message = r"`index of a.*` should have indices from 0 to 7, .* Entries that sum to zero"
    with pytest.raises(ModelError, match=message):
        sample_blocks(model, parts=2, **SMALL)


@pytest.mark.slow
def test_biases_that_have_not_mixed_are_told(caplog):
    """They can be shifted against each other, and one chain of few draws does not see how far."""
    sample_blocks(shared(biases_model), parts=2, **{**SMALL, "draws": 50})
    assert "Not converged" in caplog.text
    assert "fewer than 100 effective draws, such as `" in caplog.text
    caplog.clear()
    sample_blocks(shared(biases_model), parts=2, **{**SMALL, "draws": 1000, "thin": 20})
    assert "Not converged" not in caplog.text
