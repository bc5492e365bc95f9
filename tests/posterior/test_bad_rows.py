"""Rows that cannot be evaluated are found before sampling, and the message names them."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest
from pytensor.graph.traversal import toposort
from pytensor.tensor.subtensor import Subtensor

from pymc_sgmcmc import SGLD, SGLDCV
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior import Posterior, check
from pymc_sgmcmc.posterior.check_rows import check_rows
from pymc_sgmcmc.posterior.terms import model_terms

N, GROUPS = 400, 20


def grouped(codes, *, named=True, minibatch=False):
    rng = np.random.default_rng(1)
    y = rng.normal(size=len(codes))
    with pm.Model() as model:
        effect = pm.Normal("effect", 0, 1, shape=GROUPS)
        if minibatch:
            drawn_codes, observed = pm.Minibatch(codes, y, batch_size=50)
            pm.Normal("y", effect[drawn_codes], 1.0, observed=observed, total_size=len(codes))
        else:
            group = pm.Data("group", codes) if named else codes
            pm.Normal("y", effect[group], 1.0, observed=y)
    return model


def codes_with(code, row):
    codes = np.random.default_rng(2).integers(GROUPS, size=N)
    codes[row] = code
    return codes


@pytest.mark.parametrize(
    "settings", [{}, {"step_size": 1e-3, "preconditioner": "identity", "batch_size": 20}]
)
@pytest.mark.parametrize("compared", [True, False], ids=["small data", "large data"])
@pytest.mark.parametrize(("code", "row"), [(GROUPS, 0), (23, 333), (-21, N - 1), (-1, 5)])
def test_a_code_out_of_range(monkeypatch, settings, compared, code, row):
    """The row is named for all settings, and whether or not all rows are compared."""
    if not compared:
        monkeypatch.setattr(check, "FULL_CHECK_ELEMENTS", 0)
    message = rf"`group` should have codes from 0 to 19, but row {row} has the code {code}\."
    with pytest.raises(ModelError, match=message):
        SGLD(model=grouped(codes_with(code, row)), gradient="plain", **settings)


def test_a_code_without_a_name_and_in_a_minibatch():
    with pytest.raises(
        ModelError, match=r"`array of shape \(400,\) in y` should have codes .* row 7"
    ):
        SGLDCV(model=grouped(codes_with(99, 7), named=False))
    with pytest.raises(ModelError, match=r"codes from 0 to 19, but row 7 has the code 99"):
        SGLDCV(model=grouped(codes_with(99, 7), minibatch=True))


def test_codes_in_range_are_fine():
    check_rows(Posterior(grouped(codes_with(GROUPS - 1, 3))))


@pytest.mark.parametrize(
    ("family", "bad"),
    [
        (lambda mu, y: pm.Poisson("y", pm.math.exp(mu), observed=y), -1),
        (lambda mu, y: pm.Bernoulli("y", logit_p=mu, observed=y), 2),
        (lambda mu, y: pm.Gamma("y", 2.0, pm.math.exp(mu), observed=y.astype(float)), -1),
    ],
)
def test_a_value_outside_of_the_support(family, bad):
    y = np.ones(N, dtype=int)
    y[123] = bad
    with pm.Model() as model:
        family(pm.Normal("mu"), y)
    with pytest.raises(ModelError, match=rf"density of row 123 is zero .* `y` = {bad}"):
        SGLD(model=model, step_size=1e-3, preconditioner="identity", batch_size=20)


def test_an_initial_point_outside_of_the_support_is_not_blamed_on_a_row():
    with pm.Model() as model:
        mu = pm.Normal("mu", initval=-1.0)
        pm.Normal("y", 0.0, mu, observed=np.ones(N))
    check_rows(Posterior(model))  # all rows alike: PyMC says what is wrong with the start


def bounded(write, distribution, infinity, rng):
    values = rng.exponential(size=N)
    upper = np.where(values > 1, 1.0, infinity)
    with pm.Model() as model:
        unbounded = distribution(pm.HalfNormal("a"))
        write("y", unbounded, lower=None, upper=upper, observed=np.minimum(values, upper))
    return model


@pytest.mark.parametrize(
    "distribution", [lambda a: pm.Normal.dist(0, a), pm.Exponential.dist], ids=["normal", "exp"]
)
def test_infinite_bounds_of_censored_rows(distribution):
    """Bambi writes such bounds for rows without censoring."""
    infinite, finite = (
        Posterior(bounded(pm.Censored, distribution, infinity, np.random.default_rng(1)))
        for infinity in (np.inf, 50.0)
    )
    check_rows(infinite)
    at = np.array([0.3])
    np.testing.assert_allclose(infinite.gradient(at), finite.gradient(at), rtol=1e-12)


def test_infinite_bounds_without_a_gradient(rng):
    """Such rows are good rows, and the advice is not to drop them."""
    model = bounded(pm.Truncated, lambda a: pm.Normal.dist(0, a), np.inf, rng)
    with pytest.raises(ModelError, match="Give bounds as large finite numbers"):
        Posterior(model)


def test_a_bad_row_is_told_where_most_rows_are_bad():
    y = np.ones(N, dtype=int)
    y[np.arange(N) % 10 != 3] = 2
    with pm.Model() as model:
        pm.Bernoulli("y", pm.Beta("p", 1, 1), observed=y)
    with pytest.raises(ModelError, match=r"The density of row 0 is zero .* `y` = 2\."):
        SGLDCV(model=model)


def test_a_start_where_no_row_is_good():
    with pm.Model() as model:
        pm.Bernoulli("y", pm.Beta("p", 1, 1), observed=np.full(N, 2))
    message = r"not finite at the start .*: that of row 0 is not, which has `y` = 2\. Correct"
    with pytest.raises(ValueError, match=message):
        SGLDCV(model=model)


def test_a_start_outside_of_the_prior():
    with pm.Model() as model:
        b = pm.Normal("b", 0, 1)
        pm.Potential("bound", pm.math.switch(b < 5, -np.inf, 0.0))
        pm.Normal("y", b, 1, observed=np.zeros(N))
    with pytest.raises(ValueError, match=r"that of the prior is not\. Give `initval` or"):
        SGLDCV(model=model)


@pytest.mark.parametrize(("rows", "period"), [(99, 2), (981, 20)])
def test_bad_rows_at_equal_distances(rows, period):
    """The rows that are looked at beside a bad one are not all bad as well."""
    y = np.where(np.arange(rows) % period == 0, -1.0, 1.0)
    with pm.Model() as model:
        pm.HalfNormal("y", pm.HalfNormal("s"), observed=y)
    with pytest.raises(ModelError, match="The density of row 0 is zero"):
        SGLDCV(model=model)


def test_a_number_whose_square_is_infinite():
    x = np.linspace(-1, 1, N)
    x[17] = 1e200
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("b") * x, 1.0, observed=np.ones(N))
    message = r"row 17 or the square of its gradient .* in y` = 1\.e\+200.*as `pm\.Data`"
    with pytest.raises(ModelError, match=message):
        SGLDCV(model=model, preconditioner=np.ones(1))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda: pm.Normal("b", 0, -1), r"of `b` should have sigma > 0, .* parameters 0, -1\."),
        (lambda: pm.Normal("b", 0, -pm.HalfNormal("s")), r"of `b` should have sigma > 0, .* -1"),
        (lambda: pm.Gamma("b", -1, 1), r"of `b` should have alpha > 0, beta > 0, .* -1, 1\."),
    ],
)
def test_parameters_that_are_invalid(write, message):
    with pm.Model() as model:
        pm.Normal("y", write(), 1.0, observed=np.zeros(N))
    with pytest.raises(ValueError, match=message):
        SGLDCV(model=model)


def test_the_first_of_many_bad_codes_is_told():
    codes = 1 + np.arange(3000) % 5
    codes[:4] = 1
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("effect", shape=5)[codes], 1.0, observed=np.zeros(3000))
    with pytest.raises(ModelError, match=r"codes from 0 to 4, but row 4 has the code 5"):
        Posterior(model)


@pytest.mark.parametrize("rows", ["X", ["X", "outcome"]])
def test_data_that_are_left_out_of_named_rows(rows):
    with pm.Model() as model:
        X, z, y = (pm.Data(name, np.linspace(0, 1, N)) for name in ("X", "z", "outcome"))
        pm.Normal("y", pm.Normal("b") * X + z, 1.0, observed=y)
    with pytest.raises(ModelError, match=r"`z` has as many rows, but is not among `rows`\. Name"):
        Posterior(model, rows=rows)


def test_indices_of_long_walks_are_wide():
    """PyTensor computes with the types of constant indices, and 200 is no number of 8 bits."""
    with pm.Model() as model:
        walk = pm.GaussianRandomWalk("walk", init_dist=pm.Normal.dist(), shape=200)
        pm.Normal("y", walk[np.arange(N) % 200], 1.0, observed=np.zeros(N))
    indices = [
        variable
        for term in model_terms(model).values()
        for node in toposort([term.log_density])
        if isinstance(node.op, Subtensor)
        for variable in node.inputs[1:]
    ]
    assert indices
    assert {variable.type.dtype for variable in indices} == {"int64"}
