"""The contract with PyMC: state, statistics, backends, compound steps, starts and failures.

`test_sampler_contract.py` has what every sampler repeats.
"""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pymc as pm
import pytensor
import pytest
from pymc.step_methods.compound import Competence
from scipy import linalg

from pymc_sgmcmc import (
    SGLD,
    SGLDCV,
    ModelError,
    NonFinitePositionError,
    Posterior,
    SecondOrder,
    chain,
)
from pymc_sgmcmc.batching import ShuffledWindows
from tests.support.models import logistic_model, two_variable_model
from tests.support.sampling import NUMBA, check_two_variables, sample


def make_step(step_class=SGLDCV, model=None, **settings):
    """A step method with given settings, so that no test waits for tuning."""
    settings = {
        "batch_size": 20,
        "step_size": 1e-3,
        "preconditioner": "identity",
        "compile_kwargs": NUMBA,
        **settings,
    }
    return step_class(model=model or logistic_model(), **settings)


@pytest.fixture(scope="module")
def model():
    return logistic_model()


@pytest.fixture(scope="module")
def step(model):
    """One compiled step method; `pm.sample` resets what belongs to a chain."""
    return make_step(model=model, thin=3)


@pytest.fixture(scope="module")
def reference(model, step):
    return sample(model, step)


# --- Backends -----------------------------------------------------------------------------


@pytest.mark.usefixtures("with_compiler")
@pytest.mark.parametrize(
    ("mode", "batching"),
    [
        ("FAST_COMPILE", "shuffle"),
        ("CVM", "shuffle"),
        ("CVM", "replace"),
        ("JAX", "shuffle"),
        ("JAX", "replace"),
    ],
)
def test_backends_give_the_same_draws(model, mode, batching):
    expected = sample(
        model, make_step(model=model, thin=3, gradient=SecondOrder(batching=batching))
    )
    step = make_step(
        model=model,
        thin=3,
        gradient=SecondOrder(batching=batching),
        compile_kwargs={"mode": mode},
    )
    draws = sample(model, step)
    np.testing.assert_allclose(
        draws.posterior["beta"], expected.posterior["beta"], rtol=1e-9, atol=1e-12
    )


@pytest.mark.slow
def test_jax_refuses_to_run_in_a_fork(model):
    step = make_step(model=model, compile_kwargs={"mode": "JAX"})
    with pytest.raises(Exception, match='mp_ctx="forkserver"'):
        sample(model, step, cores=2, mp_ctx="fork")


# --- Runs computed ahead ------------------------------------------------------------------


def test_runs_end_at_the_boundary_of_tuning(step, model, monkeypatch):
    lengths = []
    advance = step.chain.advance

    def recorded(draws):
        lengths.append(draws)
        return advance(draws)

    monkeypatch.setattr(step.chain, "advance", recorded)
    sample(model, step, draws=25, tune=10, chains=1)
    assert lengths == [10, 25]


def test_state_is_small(step, model):
    step.setup_chain(np.random.default_rng(5), 0, 1000)
    step.step(model.initial_point())
    state = step.sampling_state.chain_state
    assert state["draws"] == 0
    without_moments = pickle.dumps({**state, "adapted": state["adapted"][:-1]})
    assert len(without_moments) < 5_000


def test_state_of_other_settings_is_refused(model, step):
    other = make_step(model=model, thin=2)
    with pytest.raises(ValueError, match="thin"):
        other.sampling_state = step.sampling_state


def test_new_orders_of_the_rows(model, monkeypatch):
    """Runs end where rows get a new order, and a resumed chain has the same order."""
    monkeypatch.setattr(chain, "EPOCHS_BETWEEN_SHUFFLES", 0.025)
    step = make_step(model=model, thin=1, batch_size=2)
    assert isinstance(step.batching, ShuffledWindows)
    assert step.chain.transitions_per_order == 5
    orders, set_order = set(), ShuffledWindows.set_order
    monkeypatch.setattr(
        ShuffledWindows,
        "set_order",
        lambda self, seed: (orders.add(seed), set_order(self, seed))[1],
    )
    whole = sample(model, step, draws=23, tune=0)
    assert len(orders) == 2 * 5  # of each chain
    monkeypatch.setattr(chain, "BLOCK_TRANSITIONS", 2)
    parts = sample(model, step, draws=23, tune=0)
    np.testing.assert_array_equal(parts.posterior["beta"], whole.posterior["beta"])


def test_a_point_moved_by_others_is_followed(model, step):
    step.setup_chain(np.random.default_rng(5), 0, 30)
    point, _ = step.step(model.initial_point())
    moved = {"beta": point["beta"] + 100.0}
    after, _ = step.step(moved)
    assert np.all(after["beta"] > 50)


# --- Statistics ---------------------------------------------------------------------------


def test_sample_stats(model, reference):
    stats = reference.sample_stats
    assert stats["gradient"].shape == stats["position"].shape == (2, 25, 3)
    assert stats["gradient"].dtype == stats["position"].dtype == np.float64
    np.testing.assert_array_equal(stats["position"], reference.posterior["beta"])
    np.testing.assert_allclose(
        stats["gradient_norm"], np.linalg.norm(stats["gradient"], axis=-1), rtol=1e-12
    )
    assert np.all(stats["step_size"] == 1e-3)
    assert "lp" not in stats


def test_gradient_is_that_of_the_recorded_position(model):
    step = make_step(SGLD, model, batch_size=400, thin=4)
    idata = sample(model, step, draws=5, tune=0, chains=1)
    posterior = Posterior(model)
    for draw in range(5):
        position = idata.sample_stats["position"].values[0, draw]
        np.testing.assert_allclose(
            idata.sample_stats["gradient"].values[0, draw],
            posterior.gradient(position),
            rtol=1e-9,
            atol=1e-9,
        )


def test_recorded_gradient_makes_the_next_transition(model):
    step = make_step(SGLD, model, step_size=1e-9, thin=1)
    idata = sample(model, step, draws=200, tune=0, chains=1)
    position = idata.sample_stats["position"].values[0]
    gradient = idata.sample_stats["gradient"].values[0]
    # With the noise known, theta' - theta = h/2 g + sqrt(h) z; regress out the noise.
    moved = np.diff(position, axis=0)
    drift = 0.5e-9 * gradient[:-1]
    noise = (moved - drift) / np.sqrt(1e-9)
    assert abs(noise.mean()) < 4.5 / np.sqrt(noise.size)
    assert abs(noise.var() - 1) < 4.5 * np.sqrt(2 / noise.size)


def test_decreasing_step_sizes_are_recorded(model):
    step = make_step(model=model, step_size=lambda t: 1e-3 / (1 + t), thin=2)
    idata = sample(model, step, draws=4, tune=3, chains=1, discard_tuned_samples=False)
    recorded = np.concatenate(
        [
            idata.warmup_sample_stats["step_size"].values[0],
            idata.sample_stats["step_size"].values[0],
        ]
    )
    np.testing.assert_allclose(recorded, 1e-3 / (1 + np.arange(1, 14, 2)))


def test_progress_bar(model, step, capsys):
    sample(model, step, progressbar="split+stats", quiet=False)
    sample(model, step, progressbar="combined", quiet=False)
    shown = capsys.readouterr()
    assert "Bias" in shown.out + shown.err


def test_never_chosen_automatically():
    assert SGLDCV.competence(None, True) == Competence.INCOMPATIBLE
    assert SGLDCV not in pm.step_methods.STEP_METHODS


def test_var_names(model, step):
    with model:
        idata = sample(model, step, var_names=["beta"])
    assert list(idata.posterior.data_vars) == ["beta"]


# --- Variables ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [
        ("slope", "sigma", "intercept"),
        pytest.param(("sigma", "intercept", "slope"), marks=pytest.mark.slow),
    ],
)
def test_variables_in_any_order(order):
    model = two_variable_model()
    expected = sample(model, make_step(model=model, step_size=1e-4))
    step = make_step(model=model, step_size=1e-4, vars=[model[name] for name in order])
    assert [value.name for value in step.vars] == ["intercept", "slope", "sigma_log__"]
    draws = sample(model, step)
    for name in order:
        np.testing.assert_array_equal(draws.posterior[name], expected.posterior[name])


@pytest.mark.parametrize("other", [pytest.param(pm.NUTS, marks=pytest.mark.slow), pm.Metropolis])
def test_compound_step(other):
    """The conditional law is right where another step method moves the other variables."""
    model = two_variable_model()
    with model:
        steps = [
            SGLDCV(
                [model["slope"], model["intercept"]],
                batch_size=100,
                step_size=0.2,
                preconditioner="curvature",
                thin=5,
                compile_kwargs=NUMBA,
            ),
            other([model["sigma"]]),
        ]
        idata = sample(model, steps, draws=800, tune=200, chains=2)
    check_two_variables(idata)
    assert idata.sample_stats["gradient"].shape == (2, 800, 2)


@pytest.mark.usefixtures("uncompiled")
def test_step_size_counts_the_moves_of_other_variables():
    """Noise grows with the distance of *all* variables from the centre."""
    rng = np.random.default_rng(4)
    X = rng.normal(size=(1000, 11))
    with pm.Model():
        a = pm.Normal("a", 0, 10)
        b = pm.Normal("b", 0, 10, shape=10)
        pm.Normal("y", X[:, 0] * a + X[:, 1:] @ b, 1.0, observed=rng.normal(size=1000))
        step = SGLDCV([a], batch_size=20, gradient="cv", integrator="euler", compile_kwargs=NUMBA)
    # By hand: 2/n from the variable itself and 1/n from each of the ten others.
    noise = 0.2 / step.step_size - 1.05
    assert noise == pytest.approx(12 / 20, rel=0.5)


def test_changed_data_are_refused():
    with pm.Model() as model:
        data = pm.Data("data", np.zeros(50))
        location = pm.Normal("location", 0, 50)
        pm.Normal("y", location, 1, observed=data)
        step = SGLDCV(batch_size=10, compile_kwargs=NUMBA)
        pm.set_data({"data": np.full(50, 7.0)})
    with pytest.raises(ModelError, match="`data` were changed after the step method was made"):
        sample(model, step)


@pytest.mark.slow
def test_two_stochastic_gradient_steps_in_one_compound():
    model = two_variable_model()
    steps = [
        make_step(model=model, vars=[model["slope"], model["intercept"]], step_size=1e-4),
        make_step(model=model, vars=[model["sigma"]], step_size=1e-4),
    ]
    idata = sample(model, steps)
    assert np.isfinite(idata.posterior["sigma"]).all()


@pytest.mark.usefixtures("uncompiled")
def test_subset_of_a_minibatch_model_warns():
    model = logistic_model(batch_size=20)
    with model:
        extra = pm.Normal("extra")
    with pytest.warns(UserWarning, match="one fixed minibatch"):
        make_step(model=model, vars=[model["beta"]])
    del extra


def test_minibatch_and_ordinary_model_give_the_same_draws(model, reference):
    minibatch_model = logistic_model(batch_size=20)
    step = make_step(model=minibatch_model, batch_size=None, thin=3)
    assert step.batch_size == 20
    draws = sample(minibatch_model, step)
    np.testing.assert_allclose(
        draws.posterior["beta"], reference.posterior["beta"], rtol=1e-10, atol=1e-12
    )


def test_float32():
    with pytensor.config.change_flags(floatX="float32"):
        model = logistic_model()
        idata = sample(model, make_step(model=model, step_size=None, preconditioner=None))
    assert idata.posterior["beta"].dtype == np.float32
    assert idata.sample_stats["gradient"].dtype == np.float32
    assert np.isfinite(idata.posterior["beta"]).all()


def test_float32_with_whole_outcomes():
    """They make parts of the gradient double, and a loop of Numba takes one type of each."""
    rng = np.random.default_rng(19)
    x, counts = rng.normal(size=500).astype("float32"), rng.poisson(2, size=500)
    with pytensor.config.change_flags(floatX="float32"):
        with pm.Model() as model:
            beta = pm.Normal("beta", 0, 1, shape=2)
            pm.Poisson("y", pm.math.exp(beta[0] + beta[1] * x), observed=counts)
        idata = sample(model, SGLDCV(model=model, compile_kwargs=NUMBA), draws=20)
    assert idata.posterior["beta"].dtype == np.float32
    assert np.isfinite(idata.posterior["beta"]).all()


@pytest.mark.usefixtures("uncompiled")
def test_curvature_that_rounds_away_leaves_first_order(caplog):
    """A predictor far from zero: in single precision the curvature along the line is lost."""
    rng = np.random.default_rng(20)
    names = {}
    for offset in (0, 1000):
        x = (offset + rng.normal(size=500)).astype("float32")
        with pytensor.config.change_flags(floatX="float32"):
            with pm.Model() as model:
                a, b = pm.Normal("a", 0, np.float32(100)), pm.Normal("b", 0, np.float32(100))
                pm.Normal("y", a + b * x, 1, observed=rng.normal(size=500).astype("float32"))
            caplog.clear()
            with caplog.at_level(logging.INFO, logger="pymc.sgmcmc"):
                SGLDCV(model=model)
        names[offset] = "drown in the rounding of float32" in caplog.text
    assert names == {0: False, 1000: True}


@pytest.mark.usefixtures("uncompiled")
def test_draws_are_longer_beside_other_step_methods():
    """The last noise belongs to the values that the others had. Three relaxation times are right
    to half a per cent, by the exact law of a Gaussian of which another step draws one part."""

    def error(correlation: float, thin: int) -> float:
        h, law = 1.0, np.zeros((3, 3))
        move = np.array([[1 - h / 2, 1, h / 2 * correlation], [0, 0, 0], [0, 0, 1.0]])
        moves, noise = np.eye(3), np.diag([h / 4, h / 4, 0])
        noise[0, 1] = noise[1, 0] = h / 4
        for _ in range(thin):
            moves, law = move @ moves, move @ law @ move.T + noise
        draw = np.array([[1, 0, 0], [0, 1, 0], [correlation, 0, 0]])
        law = draw @ law @ draw.T + np.diag([0, 0, 1.0])
        law = linalg.solve_discrete_lyapunov(draw @ moves, law)
        return float(np.sqrt(law[0, 0] * (1 - correlation**2)) - 1)

    assert error(0.99, 2) > 0.05
    assert abs(error(0.99, 6)) < 0.006
    model = two_variable_model()
    alone = SGLDCV(model=model)
    beside = SGLDCV([model["slope"], model["intercept"]], model=model)
    assert (alone.thin, beside.thin) == (2, 6)


# --- Starts, interrupts and failures --------------------------------------------------------


def test_chains_start_dispersed_around_the_centre(model):
    step = make_step(model=model, step_size=1e-12)
    starts = []
    initial = model.initial_point()
    for seed in range(300):
        step.setup_chain(np.random.default_rng(seed), 0, 1)
        starts.append(step.step(initial)[0]["beta"])
    deviations = step.center.curvature.root.inverse.each(starts - step.center.position)
    assert np.abs(deviations.mean(0)).max() < 4.5 / np.sqrt(300)
    assert np.abs(deviations.var(0) - 1).max() < 4.5 * np.sqrt(2 / 300)


def test_initial_values_of_the_user_are_kept(model):
    step = make_step(model=model, step_size=1e-12)
    idata = sample(model, step, draws=2, tune=0, initvals={"beta": np.array([5.0, 6.0, 7.0])})
    np.testing.assert_allclose(idata.posterior["beta"][:, 0], [[5, 6, 7]] * 2, atol=1e-4)


def test_interrupted_runs_keep_what_was_drawn(model, step, reference):
    def interrupt(trace, draw):
        if len(trace) == 18:
            raise KeyboardInterrupt

    idata = sample(model, step, chains=1, callback=interrupt)
    assert idata.posterior.sizes["draw"] == 8
    np.testing.assert_array_equal(
        idata.posterior["beta"].values[0], reference.posterior["beta"].values[0, :8]
    )


def exploding(model, at):
    """A step size that is far too large from a given transition on."""
    return make_step(model=model, thin=2, step_size=lambda t: 1e-3 if t < at else 1e300)


def test_a_chain_that_leaves_the_finite_numbers_keeps_its_draws(model, caplog):
    step = exploding(model, at=41)
    with caplog.at_level(logging.ERROR, logger="pymc"):
        idata = sample(model, step, draws=30, tune=10, quiet=False)
    beta = idata.posterior["beta"].values
    # 41 good transitions are 20 whole draws, of which 10 are tuning.
    assert np.isfinite(beta[:, :10]).all()
    assert np.isnan(beta[:, 11:]).all()
    assert "became NaN or infinite at transition 4" in caplog.text
    assert "step size of 1e+300" in caplog.text
    assert "smaller `step_size`" in caplog.text
    assert "draws of this chain are kept" in caplog.text


def test_a_chain_that_fails_in_tuning_stops_with_an_error(model):
    with pytest.raises(NonFinitePositionError, match=r"at transition 11 .* Try a smaller"):
        sample(model, exploding(model, at=11), draws=30, tune=10)


def test_a_failure_in_another_process(model):
    with pytest.raises(Exception, match="became NaN or infinite"):
        sample(model, exploding(model, at=11), draws=30, tune=10, cores=2, mp_ctx="fork")
    idata = sample(model, exploding(model, at=41), draws=30, tune=10, cores=2, mp_ctx="fork")
    assert np.isfinite(idata.posterior["beta"].values[:, :10]).all()
