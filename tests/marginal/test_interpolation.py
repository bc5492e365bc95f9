"""Draws from interpolated laws of groups, against their distribution functions on a fine grid."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest
import xarray as xr
from scipy import special
from xarray import DataTree

from pymc_sgmcmc.marginal import conditional, interpolation, recover
from pymc_sgmcmc.marginal.interpolation import (
    CHECKED_DRAWS,
    DRAWS_A_COEFFICIENT,
    polynomials_of,
)

pytestmark = pytest.mark.usefixtures("without_compiler")

ACCURACY = 1e-4
"""The stated error of a distribution function."""

COUNTS = np.array([67, 67, 3, 200, 67, 1])
CODES = np.repeat(np.arange(len(COUNTS)), COUNTS)
DRAWS = 1000


def binary_records(rng):
    x = rng.normal(size=len(CODES))
    odds = -0.5 + 0.7 * x + 1.2 * rng.normal(size=len(COUNTS))[CODES]
    return x, (rng.random(len(CODES)) < special.expit(odds)).astype("int8")


def binary_model(x, y):
    with pm.Model() as model:
        intercept, slope = pm.Normal("intercept", 0, 2), pm.Normal("slope", 0, 2)
        z = pm.Normal("z", shape=len(COUNTS))
        odds = intercept + slope * x + pm.HalfNormal("sd", 2) * z[CODES]
        pm.Bernoulli("y", logit_p=odds, observed=y)
    return model


def draws_of_parameters(rng, spread):
    """A posterior of the parameters, whose first ones are correlated."""
    noise = spread * rng.normal(size=(DRAWS, 3))
    intercept = -0.5 + noise[:, 0]
    return {
        "intercept": intercept,
        "slope": 0.7 + 0.5 * noise[:, 0] + 0.3 * noise[:, 1],
        "sd": 1.2 * np.exp(noise[:, 2]),
    }


def trace_of(parameters):
    arrays = {
        name: (("chain", "draw"), values.reshape(2, -1)) for name, values in parameters.items()
    }
    return DataTree.from_dict({"posterior": xr.Dataset(arrays)})


def uniforms_of(seed):
    """The probabilities that `recover` takes: all groups are one piece here."""
    (generator,) = np.random.default_rng(seed).spawn(1)
    return np.array([generator.random(len(COUNTS)) for _ in range(DRAWS)])


def errors_of(z, parameters, x, y, draws):
    """Errors of the distribution functions at draws, against sums over a fine grid."""
    uniforms, errors = uniforms_of(1), []
    for group in range(len(COUNTS)):
        of_group = np.equal(CODES, group)
        middle, deviation = z[:, group].mean(), z[:, group].std()
        grid = middle + deviation * np.linspace(-9, 9, 2501)
        sign = 2.0 * y[of_group, None] - 1
        for draw in draws:
            fixed = parameters["intercept"][draw] + parameters["slope"][draw] * x[of_group, None]
            odds = fixed + parameters["sd"][draw] * grid
            values = special.log_expit(sign * odds).sum(axis=0) - grid**2 / 2
            density = np.exp(values - values.max())
            sums = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
            function = np.interp(z[draw, group], grid, sums / sums[-1])
            errors.append(function - uniforms[draw, group])
    return np.abs(errors)


def recovered(model, parameters):
    idata = recover(trace_of(parameters), model, "z", random_seed=1, progressbar=False)
    return idata["posterior"]["z"].to_numpy().reshape(DRAWS, -1)


@pytest.fixture
def left(monkeypatch):
    """Numbers of groups that were not interpolated, of each call."""
    numbers, interpolate = [], conditional.interpolate

    def noted(*arguments):
        places = interpolate(*arguments)
        numbers.append(len(places))
        return places

    monkeypatch.setattr(conditional, "interpolate", noted)
    return numbers


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.15])
def test_the_distribution_function_is_right_to_a_ten_thousandth(spread, left, rng):
    x, y = binary_records(rng)
    parameters = draws_of_parameters(rng, spread)
    z = recovered(binary_model(x, y), parameters)
    farthest = np.argsort(-np.abs(np.log(parameters["sd"])))[:20]
    draws = np.concatenate([farthest, np.arange(0, DRAWS, 50)])
    assert errors_of(z, parameters, x, y, draws).max() < ACCURACY
    assert left == [0] or spread > 0.1


@pytest.mark.slow
def test_what_polynomials_do_not_follow_is_drawn_as_before(left, monkeypatch, rng):
    """Parameters that vary by more than a law is wide."""
    x, y = binary_records(rng)
    parameters = draws_of_parameters(rng, 0.3)
    model = binary_model(x, y)
    z = recovered(model, parameters)
    (number,) = left
    assert number > 0
    monkeypatch.setattr(conditional, "interpolate", lambda *given: np.arange(given[-1].shape[1]))
    apart = recovered(model, parameters)
    assert (z == apart).all(axis=0).sum() == number
    # Those that are interpolated differ from draws of the law itself by the errors of both.
    assert errors_of(z, parameters, x, y, range(0, DRAWS, 50)).max() < ACCURACY


@pytest.mark.slow
def test_an_error_of_the_polynomials_is_found(monkeypatch, left, rng):
    """A constant is no polynomial that serves."""
    x, y = binary_records(rng)
    monkeypatch.setattr(interpolation, "DEGREES", (0,))
    recovered(binary_model(x, y), draws_of_parameters(rng, 0.15))
    assert left[0] >= 4


def test_a_second_mode_is_not_interpolated(left, rng):
    """Squares of effects say nothing of their signs."""
    codes, draws = np.repeat(np.arange(4), 5), 400
    with pm.Model() as model:
        shift = pm.Normal("shift")
        z = pm.Normal("z", 0.1, 1, shape=4)
        pm.Normal("y", shift + z[codes] ** 2, 1.0, observed=np.full(20, 4.0))
    shifts = trace_of({"shift": 0.01 * rng.normal(size=draws)})
    z = recover(shifts, model, "z", random_seed=1, progressbar=False)["posterior"]["z"].to_numpy()
    assert left == [0]  # no group was given to be interpolated
    part = special.expit(-0.4)  # The prior alone tells two modes at -2 and 2 apart.
    assert abs((z < 0).mean() - part) < 4 * np.sqrt(part * (1 - part) / z.size)


def test_draws_to_fit_to_are_others_than_those_to_compare_at(rng):
    values = rng.normal(size=(DRAWS, 3))
    polynomials = polynomials_of([values[:, 0], values[:, 1:]])
    assert polynomials.counts == (4, 10, 20, 35)
    assert len(polynomials.fitted) == DRAWS_A_COEFFICIENT * 35
    assert len(polynomials.checked) == CHECKED_DRAWS
    numbers = np.concatenate([polynomials.fitted, polynomials.checked])
    assert len(np.unique(numbers)) == len(numbers)
    cubic = values[:, 0] ** 3 - values[:, 1] * values[:, 2] + 2
    for count, inverse in zip(polynomials.counts, polynomials.inverses, strict=True):
        fitted = inverse @ cubic[polynomials.fitted[: inverse.shape[1]]]
        error = np.abs(polynomials.monomials[:, :count] @ fitted - cubic).max()
        assert (error < 1e-8) == (count >= 20)


def test_few_draws_and_many_parameters_are_not_fitted(rng):
    assert polynomials_of([rng.normal(size=100)]) is None
    assert polynomials_of([rng.normal(size=(2000, 400))]) is None
    assert polynomials_of([]) is None
    alone = polynomials_of([np.ones(2000)])
    assert alone.counts == (1,)
