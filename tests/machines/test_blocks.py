"""Blocks of users and items as minibatches: parts, their gradient, its law, and whole runs."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from pymc_sgmcmc import (
    HAMCMC,
    SGHMC,
    SGLD,
    SGLDCV,
    ULA,
    BatchSizeWarning,
    ModelError,
    Pairs,
    sample,
    sample_blocks,
)
from pymc_sgmcmc.machines.blocks import PartGradient, Parts, dealt_out, two_index_arrays
from pymc_sgmcmc.posterior import Posterior
from tests.support.exact_law import AffineTransition, stationary_law

Z = 4.5
"""Bounds are so many standard errors. A right result exceeds one of 100 once in 1500 times."""

N_USERS, N_ITEMS, N_ROWS = 7, 5, 60
NOISE, PRIOR = 1.3, 0.5
RUN = {"draws": 6, "tune": 4, "chains": 1, "cores": 1, "random_seed": 3, "quiet": True}
SMALL = {**RUN, "step_size": 0.01, "preconditioner": "identity", "thin": 3}


def indices(n_users: int = N_USERS, n_items: int = N_ITEMS):
    """Users and items of rows, some with far more of them than others."""
    rng = np.random.default_rng(1)
    users = (n_users * rng.random(N_ROWS) ** 2).astype(int)
    items = (n_items * rng.random(N_ROWS) ** 2).astype(int)
    return users, items


USERS, ITEMS = indices()


def ratings() -> np.ndarray:
    rng = np.random.default_rng(2)
    effects = rng.normal(size=N_USERS)[USERS] + rng.normal(size=N_ITEMS)[ITEMS]
    return effects + NOISE * rng.normal(size=N_ROWS)


@cache
def biases() -> pm.Model:
    """A Gaussian posterior: ratings are a user's bias plus an item's."""
    with pm.Model() as model:
        a, b = pm.Normal("a", 0, PRIOR, shape=N_USERS), pm.Normal("b", 0, PRIOR, shape=N_ITEMS)
        pm.Normal("rating", a[USERS] + b[ITEMS], NOISE, observed=ratings())
    return model


def factors() -> pm.Model:
    """Factors and biases on either axis, with parameters that all rows share."""
    with pm.Model() as model:
        user, item = pm.Data("user", USERS), pm.Data("item", ITEMS)
        sd, mean = pm.HalfNormal("sd", 1.0), pm.Normal("mean")
        U = pm.Normal("U", mean, 1, shape=(2, N_USERS))
        V = pm.Gamma("V", 2.0, 1.0, shape=(N_ITEMS, 2))
        a = pm.Normal("a", 0, 2, shape=N_USERS)
        pm.Normal("rating", (U[:, user].T * V[item]).sum(-1) + a[user], sd, observed=ratings())
    return model


def three_indices() -> pm.Model:
    with pm.Model() as model:
        a, b = pm.Normal("a", shape=N_USERS), pm.Normal("b", shape=N_ITEMS)
        c = pm.Normal("c", shape=3)
        pm.Normal("y", a[USERS] + b[ITEMS] + c[np.arange(N_ROWS) % 3], observed=ratings())
    return model


def friends() -> pm.Model:
    """Both indices select from the same factors."""
    with pm.Model() as model:
        U = pm.Normal("U", shape=(N_USERS, 2))
        pm.Normal("y", (U[USERS] * U[ITEMS]).sum(-1), observed=ratings())
    return model


def centred() -> pm.Model:
    """Biases that sum to zero, on either side in another way."""
    with pm.Model() as model:
        a = pm.Normal("a", shape=N_USERS)
        b = pm.ZeroSumNormal("b", shape=N_ITEMS)
        pm.Poisson("y", pm.math.exp((a - a.mean())[USERS] + b[ITEMS]), observed=USERS * ITEMS)
    return model


@pytest.mark.parametrize("make", [biases, factors, three_indices, friends, centred])
def test_the_two_arrays_with_most_values(make):
    found = two_index_arrays(Posterior(make()))
    for codes, index in zip(found, (USERS, ITEMS), strict=True):
        np.testing.assert_array_equal(codes, np.unique(index, return_inverse=True)[1])


# --- Parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("order", [0, 8])
def test_parts_are_blocks_without_a_common_user_or_item(parts, order):
    # With a row for each pair of user and item, what hangs together in a part is a block.
    users, items = map(np.ravel, np.indices((11, 7)))
    scheme = Parts([users, items], (users, items), parts)
    scheme.set_order(order)
    of_places = [scheme.selected(np.int64(place)) for place in range(len(users))]
    drawn, how_often = np.unique([part.min() for part in of_places], return_counts=True)
    whole = {part.min(): part for part in of_places}
    assert sorted(np.concatenate(list(whole.values()))) == list(range(len(users)))
    for first, count in zip(drawn, how_often, strict=True):
        part = whole[first]
        assert count == len(part)  # the probability times N
        pairs = coo_array((np.ones(len(part)), (users[part], 11 + items[part])), shape=(18, 18))
        assert connected_components(pairs, directed=False)[0] == parts
        assert len(np.unique(users[part])) == 11
        assert len(np.unique(items[part])) == 7


def test_groups_have_about_as_many_rows():
    counts = np.random.default_rng(1).zipf(1.5, size=500).clip(max=3000)
    groups = dealt_out(counts, 4, np.random.default_rng(2))
    of_group = np.bincount(groups, weights=counts)
    # Each round of four adds a difference of at most that between its counts.
    assert of_group.max() - of_group.min() <= counts.max()
    assert np.ptp(np.bincount(groups)) <= 1


@pytest.mark.parametrize("make", [biases, factors, centred])
def test_the_mean_over_the_parts_is_the_gradient(make):
    posterior = Posterior(make())
    scheme = Parts(posterior.data, two_index_arrays(posterior), 3)
    position, index = pt.vector("position"), pt.lvector("index")
    estimate = PartGradient(posterior, scheme)(position, index)
    function = posterior.compile_for_setup([position, index], [estimate])
    at = np.random.default_rng(1).normal(size=posterior.dimension)
    expected = posterior.gradient(at)
    for order in (0, 8):
        scheme.set_order(order)
        places = scheme.in_memory(np.arange(N_ROWS), np.random.default_rng(), 0)
        estimates = np.array([function(at, place)[0] for place in places])
        scale = np.abs(expected).max()
        np.testing.assert_allclose(estimates.mean(0), expected, rtol=0, atol=1e-12 * scale)
        # With equal probabilities of the parts it is another one.
        each = np.unique(estimates, axis=0)
        assert len(each) == 3
        assert np.abs(each.mean(0) - expected).max() > 1e-3 * scale


# --- The law -------------------------------------------------------------------------------------

DESIGN = np.concatenate([np.eye(N_USERS)[USERS], np.eye(N_ITEMS)[ITEMS]], axis=1)
PRECISION = np.eye(N_USERS + N_ITEMS) / PRIOR**2


def posterior_law():
    """Mean and covariance of the posterior of the biases, in closed form."""
    covariance = np.linalg.inv(PRECISION + DESIGN.T @ DESIGN / NOISE**2)
    return covariance @ DESIGN.T @ ratings() / NOISE**2, covariance


def langevin_law(parts, h):
    """That of SGLD with parts, whose gradients are b_i - H_i θ with probability p_i."""
    transitions = []
    for part in parts:
        X, weight = DESIGN[part], N_ROWS / len(part) / NOISE**2
        slope = np.eye(len(PRECISION)) - h / 2 * (PRECISION + weight * X.T @ X)
        shift = h / 2 * weight * X.T @ ratings()[part]
        transitions.append(AffineTransition(slope, shift, np.sqrt(h) * np.eye(len(PRECISION))))
    return stationary_law(transitions, [len(part) / N_ROWS for part in parts])


def largest_z(draws, mean, covariance):
    """Largest error of means and covariances, in standard errors by the means of batches."""
    pieces = (draws - mean).reshape(60, -1, draws.shape[1])
    products = np.einsum("bti,btj->bij", pieces, pieces) / pieces.shape[1] - covariance
    scores = [
        np.abs(values.mean(0) / (values.std(0, ddof=1) / np.sqrt(len(values)))).max()
        for values in (pieces.mean(1), products)
    ]
    return max(scores)


def positions(idata) -> np.ndarray:
    return np.concatenate([idata["posterior"][name].values[0] for name in "ab"], axis=1)


def test_a_long_run_has_the_exact_law():
    """In one deal of users and items, with steps whose excess of the variance is large."""
    h, posterior = 0.05, Posterior(biases())
    scheme = Parts(posterior.data, two_index_arrays(posterior), 2)
    step = SGLD(
        model=biases(),
        gradient=PartGradient(posterior, scheme),
        step_size=h,
        preconditioner="identity",
    )
    step.chain.transitions_per_order = 1_000_000
    run = {"draws": 12_000, "tune": 100, "compute_convergence_checks": False}
    draws = positions(sample(step=step, model=biases(), **{**RUN, **run}))
    parts = {part.min(): part for part in map(scheme.selected, np.arange(N_ROWS))}.values()
    assert len({len(part) for part in parts}) == 2
    mean, covariance = langevin_law(parts, h)
    _, of_posterior = posterior_law()
    assert (np.diag(covariance) / np.diag(of_posterior)).max() > 1.2
    assert largest_z(draws, mean, covariance) < Z
    # Windows of random rows, and the posterior itself, are other laws.
    assert largest_z(draws, mean, of_posterior) > Z
    halves = [np.arange(N_ROWS)[::2], np.arange(N_ROWS)[1::2]]
    assert largest_z(draws, *langevin_law(halves, h)) > Z


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pymc_sgmcmc.BatchSizeWarning")
def test_computed_steps_keep_their_promise():
    """Over many deals, with the default error of 5 % in the worst direction."""
    run = {**RUN, "draws": 6_000, "tune": 200, "compute_convergence_checks": False}
    draws = positions(sample_blocks(biases(), 2, **run))
    mean, covariance = posterior_law()
    errors = np.abs(draws.mean(0) - mean) / np.sqrt(np.diag(covariance))
    ratio = draws.var(0) / np.diag(covariance)
    assert errors.max() < 0.1
    assert 0.95 < ratio.mean() < 1.1


# --- Whole runs ----------------------------------------------------------------------------------


HAMCMC_SCALES = {"initial_scale": 0.1, "regularization": 1.0, "pairs": Pairs(threshold=1.0)}


@pytest.mark.parametrize(
    "step",
    [
        partial(SGLD, preconditioner="identity"),
        partial(SGLDCV, preconditioner="identity"),
        pytest.param(partial(SGHMC, preconditioner="identity"), marks=pytest.mark.slow),
        partial(HAMCMC, **HAMCMC_SCALES),
    ],
)
def test_step_methods_that_take_a_gradient(step):
    settings = {"step_size": 1e-3, "thin": 3, "var_names": ["U", "sd"]}
    idata = sample_blocks(factors(), 3, step=step, **RUN, **settings)
    assert idata["posterior"]["U"].shape == (1, 6, 2, N_USERS)
    assert np.isfinite(idata["posterior"]["U"]).all()
    assert set(idata["posterior"].data_vars) == {"U", "sd"}


def test_noise_is_told_with_what_can_be_done():
    with pytest.warns(BatchSizeWarning, match="Use about `parts=1`, or `sample`, whose control"):
        sample_blocks(biases(), 2, **{**RUN, "thin": 1})


def test_chains_have_deals_of_their_own_whatever_the_processes():
    options = {**SMALL, "chains": 2}
    one, two = (sample_blocks(biases(), 2, **{**options, "cores": cores}) for cores in (1, 2))
    values = one["posterior"]["a"].values
    np.testing.assert_array_equal(values, two["posterior"]["a"].values)
    assert len(np.unique(values)) == values.size


@pytest.mark.slow
def test_draws_are_the_same_on_a_cluster():
    distributed = pytest.importorskip("distributed")
    options = {**SMALL, "chains": 2}
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", processes=True
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        found = sample_blocks(biases(), 2, client=client, **options)
    expected = sample_blocks(biases(), 2, **options)
    np.testing.assert_array_equal(found["posterior"]["a"], expected["posterior"]["a"])


def one_index() -> pm.Model:
    with pm.Model() as model:
        a = pm.Normal("a", shape=N_USERS)
        pm.Normal("y", a[USERS], observed=ratings())
    return model


def discrete() -> pm.Model:
    with pm.Model() as model:
        a, b = pm.Normal("a", shape=N_USERS), pm.Poisson("b", 1.0, shape=N_ITEMS)
        pm.Normal("y", a[USERS] + b[ITEMS], observed=ratings())
    return model


def minibatch() -> pm.Model:
    user, item, y = pm.Minibatch(USERS, ITEMS, ratings(), batch_size=10)
    with pm.Model() as model:
        a, b = pm.Normal("a", shape=N_USERS), pm.Normal("b", shape=N_ITEMS)
        pm.Normal("y", a[user] + b[item], observed=y, total_size=N_ROWS)
    return model


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (one_index, {}, ModelError, "two arrays select.* has 1 such array"),
        (discrete, {}, ModelError, "discrete"),
        (minibatch, {}, ModelError, "the model uses `pm.Minibatch`"),
        (biases, {"parts": 6}, ValueError, "`parts=6` needs .* has 5 values. Take fewer parts"),
        (biases, {"parts": 0}, ValueError, "`parts` should be a whole number"),
        (biases, {"batch_size": 5}, ValueError, "`batch_size` is given as well"),
        (biases, {"step": "sgld"}, TypeError, "`step` should be the class .* but got 'sgld'"),
        (biases, {"step": ULA}, TypeError, "`ULA` takes no argument `gradient`"),
        (biases, {"gradient": "cv"}, TypeError, "Leave `gradient` out"),
        (biases, {"thinning": 2}, TypeError, "thinning"),
    ],
)
def test_what_is_refused(make, options, error, message):
    with pytest.raises(error, match=message):
        sample_blocks(make(), **{"parts": 2, **SMALL, **options})
