"""Settings of the step methods: defaults, and bad input refused before sampling starts."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import (
    MALA,
    SGHMC,
    SGLD,
    SGLDCV,
    SGNHT,
    ULA,
    BatchSizeWarning,
    CenterWarning,
    ModelError,
    PolynomialDecay,
    sample,
)
from pymc_sgmcmc.matrices import Dense
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.step_methods.center import check_determined
from pymc_sgmcmc.tuning import Curvature, find_center
from pymc_sgmcmc.tuning.gaussian import FARTHEST
from tests.support.models import logistic_data, logistic_model, two_variable_model

NUMBA = {"mode": "NUMBA"}


@pytest.fixture(scope="module")
def model():
    return logistic_model()


# --- Defaults -----------------------------------------------------------------------------


def test_defaults_of_sgldcv(model, caplog):
    with caplog.at_level(logging.INFO, logger="pymc"):
        step = SGLDCV(model=model, batch_size=50)
    # The little noise of control variates of second order leaves the largest step.
    assert step.step_size == pytest.approx(1.0)
    assert step.thin == 2
    assert "step size" in caplog.text
    assert step.center.distance < 0.05


@pytest.mark.usefixtures("uncompiled")
def test_plain_gradients_warn_with_the_batch_size_they_need(model):
    with pytest.warns(BatchSizeWarning, match="about `batch_size=") as record:
        step = SGLD(model=model, batch_size=5)
    needed = int(str(record[0].message).split("batch_size=")[1].split("`")[0])
    assert 5 < needed <= 400
    assert step.step_size < 0.05
    enough = SGLD(model=model, batch_size=needed)
    # Noise as large as the curvature leaves 4 δ / (2 + δ).
    assert enough.step_size >= 0.2 / 2.05 * 0.99


@pytest.mark.usefixtures("uncompiled")
def test_given_step_sizes_need_no_centre(model):
    step = SGLD(
        model=model, batch_size=50, step_size=1e-3, preconditioner="identity", compile_kwargs=NUMBA
    )
    assert step.center is None
    assert step.thin == 1


@pytest.mark.usefixtures("uncompiled")
def test_batch_size_of_the_model_and_of_the_user():
    minibatch_model = logistic_model(batch_size=20)
    assert (
        SGLD(
            model=minibatch_model, step_size=1e-3, preconditioner="identity", compile_kwargs=NUMBA
        ).batch_size
        == 20
    )
    other = SGLD(
        model=minibatch_model,
        step_size=1e-3,
        preconditioner="identity",
        batch_size=30,
        compile_kwargs=NUMBA,
    )
    assert other.batch_size == 30


@pytest.mark.parametrize("form", ["array", "names", "value names"])
@pytest.mark.usefixtures("uncompiled")
def test_a_centre_of_the_user(form):
    model = two_variable_model()
    center = {
        "array": np.array([1.0, 2.0, np.log(0.5)]),
        "names": {"intercept": 1.0, "slope": 2.0, "sigma": 0.5},
        "value names": {"intercept": 1.0, "slope": 2.0, "sigma_log__": np.log(0.5)},
    }[form]
    step = SGLDCV(
        model=model,
        batch_size=50,
        step_size=1e-4,
        preconditioner="identity",
        center=center,
        compile_kwargs=NUMBA,
    )
    np.testing.assert_allclose(step.center.position, [1.0, 2.0, np.log(0.5)])


@pytest.mark.usefixtures("uncompiled")
def test_the_centre_of_another_step_method(model):
    """The curvature is that of the other centre, and not computed again."""
    center = SGLDCV(model=model, batch_size=50).center
    narrow = Curvature(
        Dense(4 * center.curvature.precision.values),
        Dense(center.curvature.covariance.values / 4),
        Dense(center.curvature.root.values / 2),
    )
    step = SGLDCV(model=model, batch_size=50, center=replace(center, curvature=narrow))
    np.testing.assert_array_equal(step.center.position, center.position)
    assert step.center.curvature is narrow


@pytest.mark.usefixtures("uncompiled")
def test_named_rows():
    X, y = logistic_data()
    with pm.Model(coords={"row": np.arange(len(y))}) as model:
        data = pm.Data("X", X, dims=("row", None))
        beta = pm.Normal("beta", 0, 1, shape=3)
        pm.Bernoulli("y", logit_p=data @ beta, observed=y, dims="row")
    for rows in ("row", ["X", "y"], "y"):
        step = SGLD(
            model=model,
            batch_size=9,
            step_size=1e-3,
            preconditioner="identity",
            rows=rows,
            compile_kwargs=NUMBA,
        )
        assert step.posterior.n_rows == len(y)


def test_polynomial_decay():
    decay = PolynomialDecay(a=2.0, b=3.0, gamma=0.55)
    assert decay(10) == pytest.approx(2.0 * 13.0**-0.55)


# --- Bad input ----------------------------------------------------------------------------


def refuse(error, message, model, step_class=SGLDCV, **settings):
    settings = {
        "batch_size": 20,
        "step_size": 1e-3,
        "preconditioner": "identity",
        "compile_kwargs": NUMBA,
        **settings,
    }
    with pytest.raises(error, match=message):
        step_class(model=model, **settings)


@pytest.mark.parametrize(
    ("batch_size", "error", "message"),
    [
        (401, ValueError, "between 1 and the number of rows, 400, but got 401"),
        (0, ValueError, "but got 0"),
        (-3, ValueError, "but got -3"),
        (1.5, TypeError, "whole number of rows, but got 1.5"),
    ],
)
def test_bad_batch_size(model, batch_size, error, message):
    refuse(error, message, model, batch_size=batch_size)


@pytest.mark.parametrize(
    ("step_size", "error", "message"),
    [
        (0.0, ValueError, "positive and finite, but got 0.0"),
        (-1.0, ValueError, "positive and finite, but got -1.0"),
        (np.nan, ValueError, "positive and finite, but got nan"),
        (np.inf, ValueError, "positive and finite, but got inf"),
        ("small", TypeError, "positive number, a function .* but got 'small'"),
        (lambda: 1e-3, TypeError, "`step_size`.* a function of the number of the transition"),
        (lambda t, h: 1e-3, TypeError, "`step_size`.* a function of the number of the transition"),
        (
            dict,
            TypeError,
            "`step_size`.* a function of the number of the transition.* <class 'dict'>",
        ),
        (lambda t: None, TypeError, "`step_size`.* one number .* but gave None for transition 0"),
        (lambda t: "0.1", TypeError, "`step_size`.* one number .* but gave '0.1' for transition 0"),
        (lambda t: np.ones(3), TypeError, r"`step_size`.* an array of shape \(3,\)"),
        (lambda t: np.nan, ValueError, "`step_size`.* gave nan for transition 0"),
        (lambda t: -1.0, ValueError, "`step_size`.* gave -1.0 for transition 0"),
    ],
)
def test_bad_step_size(model, step_size, error, message):
    refuse(error, message, model, step_size=step_size)


def test_a_schedule_that_fails_later(model):
    step = SGLD(
        model=model,
        batch_size=20,
        step_size=lambda t: 1e-3 if t < 7 else np.nan,
        preconditioner="identity",
        compile_kwargs=NUMBA,
    )
    with model, pytest.raises(ValueError, match=r"`step_size`.* gave nan for transition 7"):
        pm.sample(step=step, draws=20, tune=0, chains=1, progressbar=False, quiet=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"a": 0.0}, "`a` should be positive"),
        ({"a": 1.0, "b": np.inf}, "`b` should be positive and finite"),
        ({"a": 1.0, "gamma": 1.5}, r"`gamma` should be in \(0, 1\]"),
        ({"a": "1"}, "`a` should be a positive number, but got '1'"),
    ],
)
def test_bad_decay(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        PolynomialDecay(**arguments)


@pytest.mark.parametrize(
    ("center", "message"),
    [
        (np.zeros(2), r"array of shape \(3,\), but has shape \(2,\)"),
        (np.array([0.0, np.nan, 0.0]), "finite"),
        ({"gamma": np.zeros(3)}, r"unknown names \['gamma'\] and lacks \['beta'\]"),
        ({"beta": np.zeros(4)}, r"`beta` should have shape \(3,\), but has shape \(4,\)"),
    ],
)
def test_bad_center(model, center, message):
    refuse(ValueError, message, model, center=center)


def test_a_centre_that_is_no_numbers(model):
    refuse(TypeError, r"`center\['beta'\]` should be .* got 'zero'", model, center={"beta": "zero"})
    refuse(TypeError, "`center` should be an array of numbers or .* 'lbfgs'", model, center="lbfgs")
    refuse(TypeError, "`center` should be an array of numbers .* but got True", model, center=True)


def test_a_centre_out_of_sight_of_the_posterior():
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=2)
        pm.Normal("y", beta[np.arange(40) % 2], 1.0, observed=np.arange(40.0))
    refuse(ValueError, "`center` is more than 1,000,000", model, center=[1e9, -1e9])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preconditioner": "newton"}, "'curvature', 'identity', .* but got 'newton'"),
        ({"preconditioner": np.ones(2)}, r"shape \(3,\) or \(3, 3\), but has shape \(2,\)"),
        ({"preconditioner": -np.ones(3)}, "positive"),
        ({"gradient": "newton"}, "or an estimator .* but got 'newton'"),
        ({"compile_kwargs": {"mode": "XYZ"}}, "a mode of PyTensor, .* but got 'XYZ'"),
        ({"thin": 0}, "at least 1, but got 0"),
        ({"thin": 2.5}, "at least 1, but got 2.5"),
        ({"thin": 10**12}, r"`thin` should be at most \d+ here.* but got 1000000000000"),
        ({"vars": []}, "`vars` is empty"),
        ({"vars": 3}, "`vars` should be .* but got `3`"),
    ],
)
def test_bad_settings(model, settings, message):
    refuse(ValueError, message, model, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preconditioner": True}, "`preconditioner` should be .* but got True"),
        ({"preconditioner": 1 + 1j}, r"`preconditioner` should be .* but got \(1\+1j\)"),
        ({"compile_kwargs": {"modes": "CVM"}}, "`compile_kwargs` should .* 'mode', .* has 'modes'"),
        ({"compile_kwargs": {"updates": []}}, "`compile_kwargs` .* has 'updates'"),
        ({"initial_point": {"beta": np.zeros(3)}}, "no argument `initial_point`. Give `initval`"),
        ({"batching": "replace"}, "no argument `batching`. Give it to the estimator"),
    ],
)
def test_settings_of_the_wrong_type(model, settings, message):
    refuse(TypeError, message, model, **settings)


@pytest.mark.parametrize("wrong", [3, 0, "line"])
def test_a_model_that_is_none(wrong):
    refuse(TypeError, f"`model` should be a PyMC model, but got {wrong!r}", wrong)


def test_no_model():
    refuse(TypeError, "`model` should be a PyMC model, but got None", None)


def test_no_free_variables():
    with pm.Model() as model:
        pm.Normal("y", 0, 1, observed=np.zeros(9))
    refuse(ModelError, "no free random variables", model)


@pytest.mark.usefixtures("uncompiled")
def test_a_posterior_that_nothing_determines():
    """Two equal columns under a flat prior."""
    x = np.linspace(-1, 1, 400)
    with pm.Model() as model:
        beta = pm.Flat("beta", shape=2)
        pm.Normal("y", np.column_stack([x, x]) @ beta, 1.0, observed=x)
    with pytest.warns(
        CenterWarning, match=r"No Gaussian .* flat or bends .* priors may be improper"
    ):
        step = SGLDCV(model=model, compile_kwargs=NUMBA)
    # At the mode, not at a point of the flat direction where a search happened to end.
    np.testing.assert_allclose(step.center.position, 0.5, atol=1e-3)


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_a_posterior_whose_covariance_is_singular(scale):
    """The asymmetry is larger than the tolerance on any machine."""
    covariance = scale * np.array([[1.0, 1.0 - 1e-13], [1.0 - 1e-13, 1.0]])
    curvature = Curvature(Dense(np.eye(2)), Dense(covariance), Dense(np.eye(2)))
    with pm.Model() as flat:
        beta = pm.Flat("beta", shape=2)
        pm.Normal("y", beta[0] + beta[1], 1.0, observed=np.zeros(9))
    with pytest.raises(
        ModelError, match=r"is flat, .* of `beta\[0\]`, `beta\[1\]`\. .* proper priors"
    ):
        check_determined(curvature, Posterior(flat))


def test_array_that_is_none(model):
    refuse(TypeError, "`preconditioner` should be a", model, preconditioner=[[1.0], [1.0, 2.0]])


def test_unknown_argument(model):
    refuse(TypeError, "`SGLDCV` takes no argument `stepsize`", model, stepsize=0.1)


@pytest.mark.usefixtures("uncompiled")
def test_far_center_warns(model):
    """A centre far from the mode gives a warning with its distance in posterior sds."""
    X, _ = logistic_data()
    with pytest.warns(CenterWarning, match=r"`center` is \d+.* posterior standard deviations from"):
        SGLDCV(
            model=model,
            batch_size=X.shape[0],
            center={"beta": np.full(X.shape[1], 9.0)},
            compile_kwargs=NUMBA,
        )


def test_start_that_is_not_finite(model):
    step = SGLDCV(model=model, batch_size=50, compile_kwargs=NUMBA)
    start = dict.fromkeys(model.initial_point(), np.full(3, np.nan))
    step.setup_chain(np.random.default_rng(1), 0, 10)
    with pytest.raises(ValueError, match=r"initial values of .*beta.* should be finite"):
        step.step(start)


def test_discrete_variable_left_to_the_step():
    X, y = logistic_data()
    with pm.Model() as model:
        which = pm.Bernoulli("which", 0.5)
        beta = pm.Normal("beta", 0, 1, shape=3)
        pm.Bernoulli("y", logit_p=X @ beta * (1 + which), observed=y)
    refuse(ModelError, "continuous variables, but `which` is discrete", model)


def test_discrete_variable_with_another_step_method():
    X, y = logistic_data()
    with pm.Model():
        which = pm.Bernoulli("which", 0.5)
        beta = pm.Normal("beta", 0, 1, shape=3)
        pm.Bernoulli("y", logit_p=X @ beta + which, observed=y)
        step = SGLDCV([beta], batch_size=50, compile_kwargs={"mode": "FAST_COMPILE"})
        idata = pm.sample(
            step=step, draws=30, tune=20, chains=1, random_seed=1, progressbar=False, quiet=True
        )
    assert np.isfinite(idata.posterior["beta"]).all()
    assert set(np.unique(idata.posterior["which"])) <= {0, 1}


@pytest.mark.parametrize("step_size", [0.1, PolynomialDecay(a=0.1, b=10, gamma=1 / 3)])
@pytest.mark.parametrize("step_class", [SGLD, SGLDCV, SGHMC, SGNHT, ULA, MALA])
def test_a_step_size_comes_with_its_preconditioner(step_class, step_size):
    """Its units depend on it: one of "curvature" diverges with the identity."""
    message = '`step_size` should come with `preconditioner`, .* "curvature" .* "identity"'
    with pytest.raises(ValueError, match=message):
        step_class(model=logistic_model(), step_size=step_size, compile_kwargs=NUMBA)


# --- Steepness around the centre ------------------------------------------------------------


@pytest.mark.usefixtures("uncompiled")
def test_step_of_a_given_centre_is_as_stable():
    """A product of two variables makes a curved ridge, on which long steps are not stable."""
    with pm.Model() as model:
        a, b = pm.Normal("a", 2.0, 1.0), pm.Normal("b", 2.0, 1.0)
        pm.Normal("y", a * b, 0.5, observed=np.full(10, 4.0))
    searched = SGLDCV(model=model)
    assert searched.center.steepest > 10
    assert searched.step_size <= 4 / searched.center.steepest * (1 + 1e-9)
    given = SGLDCV(model=model, center=searched.center)
    assert given.center.steepest == pytest.approx(searched.center.steepest, rel=1e-6)
    at_point = SGLDCV(model=model, center={"a": 2.0, "b": 2.0})
    assert at_point.center.steepest > 10


@pytest.mark.usefixtures("uncompiled")
def test_step_beside_another_step_method_is_stable_where_that_one_moves():
    """A scale that another step method moves makes effects steep: 1 / t² four sds below its mean.

    The posterior of the effects alone, at one value of the scale, is a Gaussian without such
    places.
    """
    rng = np.random.default_rng(3)
    group = np.repeat(np.arange(40), 2)
    y = 0.5 * rng.normal(size=40)[group] + rng.normal(size=80)
    with pm.Model() as model:
        t = pm.HalfNormal("t", 1.0)
        u = pm.Normal("u", 0.0, t, shape=40)
        pm.Normal("y", u[group], 1.0, observed=y)
    step = SGLDCV([u], model=model)
    joint = Posterior(model)
    center = find_center(joint, joint.initial_position)
    place = joint.labels.index("t_log__")
    least = center.position[place] - FARTHEST * center.curvature.standard_deviations[place]
    steepest = (2 + np.exp(-2 * least)) / (2 + np.exp(-2 * center.position[place]))
    assert step.center.steepest == pytest.approx(steepest, rel=0.05)
    alone = SGLDCV([u], model=model, center={"u": step.center.position})
    assert alone.center.steepest == pytest.approx(1.0, abs=0.01)


@pytest.mark.slow
def test_long_runs_of_a_bent_posterior():
    """Ordered answers with few at one end: a long valley, where derivatives at the centre count."""
    rng, n_rows = np.random.default_rng(4), 10_000
    x = rng.normal(size=n_rows)
    latent = 0.8 * x + rng.logistic(size=n_rows)
    limits = [10, n_rows // 3, 2 * n_rows // 3, n_rows - 15]
    y = np.searchsorted(limits, np.argsort(np.argsort(latent)), side="right")
    with pm.Model():
        slope = pm.Normal("slope", 0, 2)
        cutpoints = pm.Normal(
            "cutpoints",
            0,
            10,
            shape=4,
            transform=pm.distributions.transforms.ordered,
            initval=[-6.0, -1.0, 1.0, 6.0],
        )
        pm.OrderedLogistic("y", eta=slope * x, cutpoints=cutpoints, observed=y, compute_p=False)
        trace = sample(10_000, chains=4, cores=1, random_seed=1, progressbar=False, quiet=True)
    assert np.isfinite(trace["sample_stats"]["position"]).all()
