"""Records of observed variables of different lengths are one set of rows."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_sgmcmc import SGLDCV, Posterior, sample
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.check_rows import check_rows
from tests.support.sampling import QUICK, QUIET

SIZES = (13, 17, 17, 5)


@pytest.fixture
def draw():
    rng = np.random.default_rng(8)
    return lambda *shape: rng.normal(size=shape)


def loop(draw):
    mu, log_sigma = pm.Normal("mu", shape=4), pm.Normal("log_sigma", 0, 0.1, shape=4)
    for g, size in enumerate(SIZES):
        pm.Normal(f"y_{g}", mu[g], pt.exp(log_sigma[g]), observed=draw(size))


def own_variables(draw):
    center = pm.Normal("center")
    for g, size in enumerate(SIZES):
        sigma = pm.HalfNormal(f"sigma_{g}", 1)
        pm.Normal(f"y_{g}", pm.Normal(f"mu_{g}", center, 1), sigma, observed=draw(size))


def in_other_order(draw):
    mu = pm.Normal("mu", shape=(2, 4))
    for g, size in enumerate(SIZES):
        pm.Normal(f"y_{g}", mu[0, 3 - g] + 2 * mu[1, 0], 0.5 + g, observed=draw(size))


def regressions(draw):
    beta, common = pm.Normal("beta", shape=(4, 2)), pm.Normal("common")
    for g, size in enumerate(SIZES):
        eta = draw(size, 2) @ beta[g] + common * pm.Data(f"z_{g}", draw(size))
        pm.Normal(f"y_{g}", eta, 1.0, observed=pm.Data(f"outcome_{g}", draw(size)))


def vectors(draw):
    mu = pm.Normal("mu", shape=(4, 2))
    for g, size in enumerate(SIZES):
        pm.MvNormal(f"y_{g}", mu[0], np.eye(2), observed=draw(size, 2))
        pm.Normal(f"w_{g}", mu[g], 1.0, observed=draw(size + 1, 2))


def one_curve(draw):
    height, rate = pm.HalfNormal("height"), pm.HalfNormal("rate")
    for g, size in enumerate(SIZES[:2]):
        x = np.abs(draw(size))
        pm.Normal(f"y_{g}", height * pt.exp(-rate * x), 1.0, observed=draw(size))


def several_forms(draw):
    slope = pm.Normal("slope")
    pm.Normal("y", slope * draw(30), 1.0, observed=draw(30))
    pm.Poisson("counts", pt.exp(slope * draw(20)), observed=np.arange(20) % 4)
    pm.Bernoulli("alone", logit_p=slope, observed=True)
    pm.Potential("weak", -0.5 * (slope * draw(20)) ** 2)
    pm.Potential("sum", -pt.sum((slope - draw(30)) ** 2))


def tables(draw):
    """Effects that differ between the variables cannot be indexed as one, but counts can."""
    for g, size in enumerate(SIZES):
        effect = pm.Normal(f"effect_{g}", shape=3)
        pm.Normal(f"y_{g}", effect[np.arange(size) % 3], 1.0, observed=draw(size))


def shared_data(draw):
    """One array is in two variables, and its rows are in two places then."""
    x, slope = pm.Data("x", draw(13)), pm.Normal("slope", shape=2)
    for k in range(2):
        pm.Normal(f"y_{k}", slope[k] * x, 1.0, observed=draw(13))
        pm.Bernoulli(f"z_{k}", logit_p=slope[k] * x, observed=draw(13) > 0)
    pm.Normal("w", slope[0] * draw(5), 1.0, observed=draw(5))


def lengths_in_the_model(draw):
    """The number of records is a number like others where it is no shape."""
    mu = pm.Normal("mu", shape=4)
    for g, size in enumerate(SIZES):
        pm.Normal(f"y_{g}", mu[g] * pt.ones(size), size**0.5, observed=draw(size))


def slices(draw):
    """A slice of a vector is no entry that a number of the variable could choose."""
    beta = pm.Normal("beta", shape=8)
    for g, size in enumerate(SIZES):
        eta = draw(size, 2) @ beta[2 * g : 2 * g + 2]
        pm.Normal(f"y_{g}", eta, 1.0, observed=draw(size))


def predictor_of_the_variables(draw):
    """It has an entry for each variable, and as many as one of them has records by chance."""
    slope, sigma = pm.Normal("slope"), pm.HalfNormal("sigma")
    mean = slope * pm.Data("u", draw(len(SIZES)))
    for g, size in enumerate((*SIZES[1:], len(SIZES))):
        pm.Normal(f"y_{g}", mean[g], sigma, observed=draw(size))


def transposed(draw):
    beta = pm.Normal("beta", shape=4)
    for g, size in enumerate(SIZES):
        x = pm.Data(f"x_{g}", draw(size, 2))
        pm.Normal(f"y_{g}", (beta[g] * x.T).sum(0), 1.0, observed=draw(size))


MODELS = {
    slices: 4,
    predictor_of_the_variables: 1,
    transposed: 4,
    loop: 1,
    own_variables: 1,
    in_other_order: 1,
    regressions: 1,
    vectors: 2,
    one_curve: 1,
    several_forms: 3,
    tables: 4,
    lengths_in_the_model: 4,
    shared_data: 2,
}
"""Ways to write variables of several lengths, and how many graphs they should need."""


@pytest.mark.parametrize("write", MODELS)
def test_rows_add_up_to_the_log_density_of_the_model(write, draw):
    with pm.Model() as model:
        write(draw)
    posterior = Posterior(model)
    assert len(posterior.row_terms) == MODELS[write]
    position = posterior.initial_position + 0.3 * draw(posterior.dimension)
    point = posterior.layout.unravel(position)
    value, gradient = posterior.log_density_and_gradient(position)
    np.testing.assert_allclose(value, model.compile_logp()(point), rtol=1e-12)
    expected = model.compile_dlogp()(point)
    np.testing.assert_allclose(gradient, expected, rtol=1e-11, atol=1e-12)
    of_rows = posterior.row_gradients(position, posterior.take(np.arange(posterior.n_rows)))
    _, of_prior = posterior.log_prior_and_gradient(position)
    np.testing.assert_allclose(of_rows.sum(0) + of_prior, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("without_compiler")
def test_draws_of_a_loop_are_those_of_one_variable_with_an_index(draw):
    draws = []
    values = [draw(size) for size in SIZES]
    for joined in (False, True):
        with pm.Model():
            mu = pm.Normal("mu", shape=4)
            if joined:
                code = np.repeat(np.arange(4), SIZES)
                pm.Normal("y", mu[code], 1.0, observed=np.concatenate(values))
            else:
                for g in range(4):
                    pm.Normal(f"y_{g}", mu[g], 1.0, observed=values[g])
            step = SGLDCV(batch_size=10, compile_kwargs=QUICK)
            idata = sample(20, tune=10, chains=1, step=step, random_seed=3, **QUIET)
        draws.append(idata["posterior"]["mu"].values)
    np.testing.assert_allclose(draws[0], draws[1], rtol=1e-9)


def test_named_variables_alone_are_rows(draw):
    with pm.Model() as model:
        loop(draw)
    some = Posterior(model, rows=["y_0", "y_3"])
    assert some.n_rows == SIZES[0] + SIZES[3]
    assert Posterior(model, rows="y_1").n_rows == SIZES[1]
    position = some.initial_position + 0.3
    np.testing.assert_allclose(some.gradient(position), Posterior(model).gradient(position))


@pytest.mark.parametrize("row", [0, 8, 16])
@pytest.mark.parametrize("second", ["one form", "two forms"])
def test_bad_records_are_told_by_their_variable_and_number(second, row, draw):
    bad = np.abs(draw(17))
    bad[row] = -1.0
    with pm.Model() as model:
        scale = pm.HalfNormal("scale")
        if second == "one form":
            pm.Exponential("first", scale, observed=np.abs(draw(13)))
        else:
            pm.Normal("first", 0, scale, observed=draw(13))
        pm.Exponential("second", scale, observed=bad)
    with pytest.raises(ModelError, match=rf"density of row {row} .*: `second` = -1\."):
        check_rows(Posterior(model))
    bad[row] = np.nan
    with pm.Model() as model:
        scale = pm.HalfNormal("scale")
        pm.Normal("first", 0, scale, observed=draw(13))
        pm.Normal("second", bad * scale, 1.0, observed=draw(17))
    with pytest.raises(ModelError, match=rf"in second` have a NaN .* in row {row}\."):
        Posterior(model)


def test_codes_out_of_range_are_told_by_their_variable_and_number(draw):
    with pm.Model() as model:
        effect = pm.Normal("effect", shape=3)
        for name, size in (("first", 13), ("second", 17)):
            codes = np.arange(size) % 3
            codes[4] += 3 * (name == "second")
            pm.Normal(name, effect[pm.Data(f"{name}_code", codes)], 1.0, observed=draw(size))
    message = r"`second_code` should have codes from 0 to 2, but row 4 has the code 4"
    with pytest.raises(ModelError, match=message):
        check_rows(Posterior(model))


def test_changes_of_any_of_the_data_are_seen(draw):
    with pm.Model() as model:
        regressions(draw)
    posterior = Posterior(model)
    assert posterior.changed_data() is None
    with model:
        pm.set_data({"z_2": draw(17)})
    assert posterior.changed_data() == "z_2"


def test_data_that_are_named_and_have_other_rows_are_refused(draw):
    with pm.Model() as model:
        table = pm.Data("table", draw(7))
        slope = pm.Normal("slope")
        pm.Normal("y", slope + table.sum(), 1.0, observed=draw(13))
    with pytest.raises(ModelError, match=r"`rows` names `table`, which has 7 rows, but no obs"):
        Posterior(model, rows=["table", "y"])
