"""Runs that go wrong, and posteriors that the default settings were not made for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm

from pymc_sgmcmc import (
    HAMCMC,
    MALA,
    OSGFS,
    PSGLD,
    SGHMC,
    SGLD,
    SGLDCV,
    SGNHT,
    SGRLD,
    SVRG,
    ULA,
    PolynomialDecay,
    zero_variance,
)
from tests.hostile.case import add, case
from tests.hostile.law import Comparison, Law, Run
from tests.hostile.shared import (
    QUICK,
    gaussian,
    line,
    line_data,
    model_case,
    nuts_run_of,
    run_of,
    shared_line,
)
from tests.support.models import logistic_model, two_variable_model

X, Y = line_data()
CURVATURE = {"preconditioner": "curvature"}
IDENTITY = {"preconditioner": "identity"}
COMPILED = {"mode": "NUMBA"}


def badly_set(
    step_method: Any = SGLDCV, sampling: dict[str, Any] | None = None, **settings: Any
) -> Run:
    """A run on the shared model with settings that are valid, but no good."""
    with shared_line():
        step = step_method(**{"compile_kwargs": QUICK} | settings)
    return Run(shared_line(), step, gaussian, settings=sampling or {})


def bad_settings(name: str, says: str = "step.size", **arguments: Any) -> None:
    """Add such a run to the catalogue."""
    add(f"runs.{name}", lambda: badly_set(**arguments), says, may_end_in_log=True, slow=True)


# --- Steps that are too large, or too small -------------------------------------------------------

for _chains in (1, 2, 4):
    bad_settings(
        f"diverged_but_finite_{_chains}_chains",
        step_size=5.0,
        **CURVATURE,
        sampling={"chains": _chains, "tune": 0},
    )
bad_settings(
    "diverged_but_finite_after_tuning",
    step_size=5.0,
    **CURVATURE,
    sampling={"tune": 50, "draws": 200, "chains": 1},
)
bad_settings("diverged_a_little", step_size=4.05, **CURVATURE, sampling={"chains": 1})
bad_settings("step_twice_the_largest_good_one", "variance|step.size", step_size=2.0, **CURVATURE)
bad_settings("not_a_number_while_tuning", step_size=1.0, **IDENTITY, sampling={"tune": 1000})
bad_settings(
    "not_a_number_after_tuning", step_size=1.0, **IDENTITY, sampling={"tune": 0, "draws": 1000}
)
bad_settings("not_a_number_in_one_draw", step_size=1e300, **IDENTITY, sampling={"tune": 0})
bad_settings(
    "step_that_goes_nowhere", "more draws|step.size|effective", step_size=1e-12, **IDENTITY
)
bad_settings(
    "step_below_rounding", "more draws|step.size|effective|move", step_size=1e-30, **IDENTITY
)
bad_settings(
    "decay_that_stops",
    "more draws|step.size|effective",
    step_size=PolynomialDecay(1.0, 1.0, 1.0),
    thin=1,
    **CURVATURE,
)
bad_settings("five_draws", "draws", sampling={"draws": 5, "tune": 5})
bad_settings("no_tuning_and_few_draws", "draws", sampling={"draws": 40, "tune": 0, "chains": 1})
bad_settings(
    "sghmc_diverged", step_method=SGHMC, step_size=3.0, **CURVATURE, sampling={"chains": 1}
)
bad_settings(
    "sghmc_euler_diverged",
    step_method=SGHMC,
    integrator="euler",
    friction=0.1,
    step_size=3.0,
    **CURVATURE,
    sampling={"chains": 1},
)
bad_settings(
    "sgnht_diverged",
    step_method=SGNHT,
    step_size=1.9,
    **IDENTITY,
    friction=1.0,
    sampling={"chains": 1},
)
bad_settings("psgld_diverged", step_method=PSGLD, step_size=50.0, sampling={"chains": 1})
bad_settings("hamcmc_diverged", step_method=HAMCMC, step_size=5.0, sampling={"chains": 1})
bad_settings("sgrld_diverged", step_method=SGRLD, step_size=5.0, sampling={"chains": 1})
bad_settings("ula_diverged", step_method=ULA, step_size=5.0, **CURVATURE, sampling={"chains": 1})
bad_settings(
    "mala_accepts_nothing",
    "step.size|accept|draws",
    step_method=MALA,
    step_size=1e6,
    **IDENTITY,
    sampling={"chains": 2},
)
bad_settings(
    "mala_goes_nowhere",
    "step.size|draws",
    step_method=MALA,
    step_size=1e-14,
    **IDENTITY,
    sampling={"chains": 2},
)
bad_settings(
    "reference_never_refreshed", step_method=SGLD, gradient=SVRG(refresh=10**9), batch_size=20
)
bad_settings("stated_bias_near_one", "bias|variance", bias=0.99)
bad_settings("stated_bias_near_zero", "bias|transitions|draws", bias=1e-9)
bad_settings(
    "preconditioner_of_other_units",
    "step.size|draws",
    step_size=0.1,
    preconditioner=np.array([1e-12, 1e-2]),
)


# --- Starts ---------------------------------------------------------------------------------------


def started_at(value: Any, **settings: Any) -> Run:
    """A run whose chains begin at values that the user gave."""
    with shared_line():
        step = SGLDCV(compile_kwargs=QUICK, **settings)
    return Run(shared_line(), step, gaussian, settings={"initvals": {"beta": np.asarray(value)}})


@case("beta|initial|start")
def initial_values_nan():
    return started_at([np.nan, 0.0]).sample()


@case("beta|initial|start")
def initial_values_infinite():
    return started_at([np.inf, 0.0]).sample()


@case("start|step.size|tuning|draws|converge", may_end_in_log=True, slow=True)
def initial_values_far_away():
    return started_at([1e6, -1e6])


@case("start|step.size|tuning|draws|converge", may_end_in_log=True, slow=True)
def initial_values_far_away_without_tuning():
    run = started_at([1e3, -1e3], bias=0.01)
    return Run(run.model, run.step, run.expected, settings=run.settings | {"tune": 0})


# --- Several step methods -------------------------------------------------------------------------


@case(slow=True)
def beside_nuts():
    model = two_variable_model()
    with model:
        steps = [
            SGLDCV([model["intercept"], model["slope"]], batch_size=50, compile_kwargs=COMPILED),
            pm.NUTS([model["sigma"]], compile_kwargs=COMPILED),
        ]
    names = tuple(variable.name for variable in model.free_RVs)
    return Run(model, steps, lambda: Law.by_nuts(model, names))


@case(slow=True)
def beside_metropolis():
    model = two_variable_model()
    with model:
        steps = [
            SGLDCV([model["intercept"], model["slope"]], batch_size=50, compile_kwargs=COMPILED),
            pm.Metropolis([model["sigma"]]),
        ]
    names = tuple(variable.name for variable in model.free_RVs)
    return Run(model, steps, lambda: Law.by_nuts(model, names), settings={"draws": 2000})


@case("Minibatch.*step method", slow=True)
def beside_metropolis_on_minibatches():
    with pm.Model() as model:
        Xb, yb = pm.Minibatch(X, Y, batch_size=20)
        beta = pm.Normal("beta", 0, 2, shape=2)
        sigma = pm.HalfNormal("sigma", 1)
        pm.Normal("y", Xb @ beta, sigma, observed=yb, total_size=len(Y))
        steps = [SGLDCV([beta], compile_kwargs=QUICK), pm.Metropolis([sigma])]
    return Run(model, steps)


@case("step.size", may_end_in_log=True, slow=True)
def diverged_beside_metropolis():
    model = two_variable_model()
    with model:
        steps = [
            SGLDCV(
                [model["intercept"], model["slope"]],
                step_size=5.0,
                compile_kwargs=QUICK,
                **CURVATURE,
            ),
            pm.Metropolis([model["sigma"]]),
        ]
    return Run(model, steps, settings={"chains": 1, "draws": 200, "tune": 0})


@case("moments|`sgmcmc_moments`", slow=True)
def interrupted_in_the_second_chain():
    def interrupt(trace: Any, draw: Any) -> None:
        if draw.chain == 1 and draw.draw_idx == 150:
            raise KeyboardInterrupt

    run = badly_set(sampling={"draws": 300, "tune": 100, "chains": 2, "callback": interrupt})
    idata = run.trace()
    table = zero_variance(idata, moments="only").summary()
    law = gaussian()
    printed_law = Law(table["mean"].to_numpy(), law.sd, table["mcse"].to_numpy())
    return Comparison(printed_law, lambda: law)


# --- Posteriors whose mode is no guide ------------------------------------------------------------


def random_intercepts(groups: int, records: int, centred: bool, seed: int = 3) -> pm.Model:
    """Logistic regression with an intercept for each group."""
    rng = np.random.default_rng(seed)
    rows = groups * records
    design = np.column_stack([np.ones(rows), rng.normal(size=rows)])
    group = np.repeat(np.arange(groups), records)
    eta = design @ [-0.5, 1.0] + np.exp(0.1) * rng.normal(size=groups)[group]
    y = rng.random(rows) < 1 / (1 + np.exp(-eta))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=2)
        log_scale = pm.Normal("log_scale", 0, 1)
        if centred:
            effect = pm.Normal("effect", 0, pm.math.exp(log_scale), shape=groups)
        else:
            effect = pm.math.exp(log_scale) * pm.Normal("z", shape=groups)
        pm.Bernoulli("y", logit_p=design @ beta + effect[group], observed=y)
    return model


GUIDE = "center|centre|mode|Gaussian"

for _groups, _centred in (
    (2000, False),
    (2000, True),
    (600, False),
    (300, False),
    (40, False),
    (40, True),
):
    add(
        f"runs.random_intercepts_of_{_groups}_groups{'_centred' if _centred else ''}",
        lambda groups=_groups, centred=_centred: nuts_run_of(
            random_intercepts(groups, 10, centred), compile_kwargs=COMPILED
        ),
        GUIDE,
        slow=True,
    )


EPILEPSY = (
    Path(os.environ.get("PYMC_SGMCMC_DATA", Path(__file__).parents[3] / "shared" / "data"))
    / "epil.csv"
)
"""Cases on it are left out where it is not there."""


def epilepsy(effect_of: str | None) -> pm.Model:
    """Poisson regression of seizure counts with an effect of each patient, or of each row."""
    frame = pd.read_csv(EPILEPSY)
    design = np.column_stack([np.ones(len(frame)), frame["lbase"], frame["trt"] == "progabide"])
    group = frame["subject"].to_numpy() - 1 if effect_of == "subject" else np.arange(len(frame))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=3)
        eta = design.astype(float) @ beta
        if effect_of is not None:
            scale = pm.HalfNormal("scale", 1)
            eta += scale * pm.Normal("z", shape=int(group.max()) + 1)[group]
        pm.Poisson("y", pm.math.exp(eta), observed=frame["y"].to_numpy())
    return model


for _name, _effect in {
    "with_an_effect_of_each_patient": "subject",
    "with_an_effect_of_each_row": "row",
    "without_effects": None,
}.items():
    if EPILEPSY.exists():
        add(
            f"runs.epilepsy_{_name}",
            lambda effect=_effect: nuts_run_of(epilepsy(effect), compile_kwargs=COMPILED),
            GUIDE + "|one element a row|not a sum",
            slow=True,
        )


@model_case(GUIDE, slow=True, run=nuts_run_of)
def funnel():
    log_scale = pm.Normal("log_scale", 0, 3)
    effect = pm.Normal("effect", 0, pm.math.exp(log_scale / 2), shape=9)
    pm.Normal("y", effect[np.arange(90) % 9], 10.0, observed=np.resize(Y, 90))


@case(GUIDE, slow=True)
def horseshoe():
    rng = np.random.default_rng(9)
    design = rng.normal(size=(200, 20))
    y = design[:, 0] * 2 + rng.normal(size=200)
    with pm.Model() as model:
        whole = pm.HalfCauchy("whole", 0.1)
        local = pm.HalfCauchy("local", 1, shape=20)
        beta = pm.Normal("beta", 0, whole * local, shape=20)
        pm.Normal("y", design @ beta, 1.0, observed=y)
    return nuts_run_of(model, compile_kwargs=COMPILED)


@case(GUIDE, may_end_in_log=True, slow=True)
def mixture_with_exchangeable_modes():
    y = np.concatenate([Y[:200] - 3, Y[200:] + 3])
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 5, shape=2)
        pm.NormalMixture("y", [0.5, 0.5], mu, 1.0, observed=y)
    return run_of(model)


@model_case(GUIDE, may_end_in_log=True, slow=True, run=nuts_run_of)
def sign_that_no_data_say():
    beta = pm.Normal("beta", 0, 2, shape=2)
    pm.Normal("y", np.abs(X[:, 1]) * beta[0] * beta[1], 1.0, observed=np.abs(Y))


@case(GUIDE, may_end_in_log=True, slow=True)
def two_modes_of_a_cauchy_likelihood():
    y = np.repeat([-8.0, 8.0], 5) + 0.1 * Y[:10]
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 10)
        pm.Cauchy("y", mu, 0.3, observed=y)
    return nuts_run_of(model)


@model_case(GUIDE, slow=True, run=nuts_run_of)
def banana():
    a, b = pm.Normal("a", 0, 1), pm.Normal("b", 0, 1)
    pm.Normal("y", a + b**2, 1.0, observed=1 + 0.2 * Y[:50])


@model_case("not converged|tuning made the step", may_end_in_log=True, slow=True, run=nuts_run_of)
def heavy_tails_of_a_prior():
    beta = pm.Cauchy("beta", 0, 1, shape=3)
    pm.Normal("y", beta[np.arange(30) % 3], 30.0, observed=Y[:30])


@model_case(GUIDE, slow=True, run=nuts_run_of)
def heteroscedastic_with_few_rows():
    beta, gamma = pm.Normal("beta", 0, 2, shape=2), pm.Normal("gamma", 0, 2, shape=2)
    pm.Normal("y", X[:12] @ beta, pm.math.exp(X[:12] @ gamma), observed=Y[:12])


@case(must_agree=True, slow=True)
def many_coefficients():
    rng = np.random.default_rng(2)
    design = rng.normal(size=(3000, 600))
    y = design[:, 0] + rng.normal(size=3000)
    return run_of(line(design, y), lambda: gaussian(design, y), compile_kwargs=COMPILED)


@case(must_agree=True, slow=True)
def many_groups_of_known_variance():
    group = np.arange(6000) % 2000
    y = np.resize(Y, 6000)
    with pm.Model() as model:
        effect = pm.Normal("effect", 0, 1, shape=2000)
        pm.Normal("y", effect[group], 1.0, observed=y)

    def expected():
        sums = np.bincount(group, y)
        return Law(sums / 4, np.full(2000, 0.5))

    return run_of(model, expected, compile_kwargs=COMPILED)


@case(slow=True)
def many_groups_with_a_known_but_small_scale():
    group = np.arange(6000) % 2000
    y = np.resize(Y, 6000)
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 10)
        z = pm.Normal("z", shape=2000)
        pm.Normal("y", mu + 0.01 * z[group], 1.0, observed=y)
    return nuts_run_of(model, compile_kwargs=COMPILED)


# --- Other samplers where the default is no longer asked ------------------------------------------


def misspecified_line() -> pm.Model:
    """Residuals of a standard deviation of 1.3 where the model says 1."""
    rng = np.random.default_rng(1)
    design = np.column_stack([np.ones(2000), rng.normal(size=(2000, 2))])
    return line(design, design @ [0.5, -1.0, 0.3] + 1.3 * rng.normal(size=2000))


def on_misspecified_data(**settings: Any) -> Run:
    """A run of OSGFS on such a model."""
    model = misspecified_line()
    rng = np.random.default_rng(1)
    design = np.column_stack([np.ones(2000), rng.normal(size=(2000, 2))])
    y = design @ [0.5, -1.0, 0.3] + 1.3 * rng.normal(size=2000)
    run = run_of(model, lambda: gaussian(design, y), OSGFS, batch_size=100, **settings)
    return Run(model, run.step, run.expected, settings={"draws": 4000, "tune": 500})


for _name, _settings in {
    "weak_prior": {"k": "weak_prior"},
    "paper": {"k": "paper"},
    "strong_prior": {"k": "strong_prior"},
    "matrix": {"k": "matrix"},
    "scalar": {"k": "scalar"},
    "number": {"k": 1.0},
    "control_variates": {"gradient": "cv", "bias": 0.35},
}.items():
    add(
        f"runs.osgfs_misspecified_{_name}",
        lambda settings=_settings: on_misspecified_data(**settings),
        "`k|noise|OSGFS|bound",
        slow=True,
    )


@case("noise|batch_size|thermostat|step.size", may_end_in_log=True, slow=True)
def thermostat_with_batches_of_two():
    return badly_set(SGNHT, batch_size=2)


@case(slow=True)
def quasi_newton_in_one_dimension():
    return run_of(line(X[:, 1:], Y), lambda: gaussian(X[:, 1:], Y), HAMCMC)


@case(GUIDE + "|noise|batch", slow=True)
def momentum_on_a_skewed_posterior():
    return nuts_run_of(logistic_model(n_rows=20), step_method=SGHMC)
