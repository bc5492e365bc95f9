"""Bad arguments of the step methods: wrong types, out of range, misspelt, contradictory.

All are refused before anything is sampled, unless what was given can only mean one thing.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pymc as pm

from pymc_sgmcmc import (
    HAMCMC,
    MALA,
    OSGFS,
    PSGLD,
    SAGA,
    SGHMC,
    SGLD,
    SGLDCV,
    SGNHT,
    SGRLD,
    SVRG,
    ULA,
    ConvergenceTest,
    FirstOrder,
    GaussianAuxiliary,
    Pairs,
    PolynomialDecay,
    Posterior,
    Recipe,
    ResampledMomentum,
    RunningCovariance,
    sample,
    sample_blocks,
)
from pymc_sgmcmc.batching import make_batching
from pymc_sgmcmc.gradient_estimators import PlainGradient
from tests.hostile.case import add, case
from tests.hostile.law import Run
from tests.hostile.shared import QUICK, ROWS, gaussian, line, run_of, shared_line

NOT_A_NUMBER = float("nan")


def step_on_line(step_method: Any, settings: dict[str, Any]) -> Run:
    """A run of a step method on the shared model, whose settings should be refused."""
    return run_of(shared_line(), gaussian, step_method, **settings)


def refuse(
    step_method: Any, argument: str, slow: bool = False, says: str = "", **values: Any
) -> None:
    """Add a case for each bad value of an argument, by the name of what is bad about it.

    The message should name the argument.
    """
    for fault, value in values.items():
        settings = value if isinstance(value, Together) else {argument: value}
        add(
            f"settings.{step_method.__name__}_{argument}_{fault}",
            functools.partial(step_on_line, step_method, settings),
            says or argument,
            slow=slow,
        )


class Together(dict):
    """Several arguments at once."""


def refuse_to_make(kind: Any, argument: str, **values: Any) -> None:
    """Add a case for each bad value of an argument of an object that step methods take."""
    for fault, value in values.items():
        settings = value if isinstance(value, Together) else {argument: value}
        name = f"settings.{kind.__name__}_{argument}_{fault}"
        add(name, functools.partial(kind, **settings), argument)


# --- Arguments of all step methods, on SGLDCV -----------------------------------------------------

refuse(
    SGLDCV,
    "batch_size",
    zero=0,
    negative=-5,
    fraction=1.5,
    text="100",
    truth=True,
    nan=NOT_A_NUMBER,
    above_rows=ROWS + 1,
    sequence=[10, 20],
    infinite=np.inf,
)
refuse(
    SGLDCV,
    "rows",
    number=3,
    fraction=1.5,
    unknown="z",
    unknown_among_known=["y", "z"],
    none_of_them=[],
    free_variable="beta",
    mapping={"y": 1},
    truth=True,
    numbers=[0, 1],
)
refuse(
    SGLDCV,
    "step_size",
    says="step.size",
    zero=0,
    negative=-1.0,
    nan=NOT_A_NUMBER,
    infinite=np.inf,
    text="0.1",
    truth=True,
    sequence=[1e-3],
    array=np.full(3, 1e-3),
    complex=1e-3 + 1j,
    schedule_of_text=lambda t: "0.1",
    schedule_of_none=lambda t: None,
    schedule_of_vectors=lambda t: np.ones(3),
    schedule_negative=lambda t: -1.0,
    schedule_without_argument=lambda: 1e-3,
    schedule_of_two=lambda t, h: 1e-3,
    schedule_is_a_class=dict,
)
refuse(
    SGLDCV,
    "bias",
    zero=0,
    one=1,
    negative=-0.1,
    percent=5,
    text="5%",
    nan=NOT_A_NUMBER,
    truth=True,
    array=np.array([0.05]),
    with_step_size=Together(bias=0.05, step_size=1e-3),
)
refuse(
    SGLDCV,
    "preconditioner",
    misspelt="curvatrue",
    misspelt_identity="identitiy",
    negative=-1.0,
    zero=0.0,
    nan=NOT_A_NUMBER,
    too_long=np.ones(3),
    oblong=np.ones((2, 3)),
    column=np.ones((2, 1)),
    asymmetric=np.array([[1.0, 0.5], [0.0, 1.0]]),
    indefinite=np.array([[1.0, 2.0], [2.0, 1.0]]),
    with_zero=np.array([1.0, 0.0]),
    words=["a", "b"],
    mapping={"beta": 1.0},
    complex=1 + 1j,
    singular=np.ones((2, 2)),
    truth=True,
)
refuse(
    SGLDCV,
    "gradient",
    misspelt="cvs",
    number=3,
    nothing=None,
    truth=True,
    a_class=SVRG,
    capital="CV",
)
refuse(
    SGLDCV,
    "center",
    misspelt="lbgfs",
    number=0.0,
    too_long=np.zeros(3),
    nan=np.array([0.0, np.nan]),
    of_unknown={"gamma": 0.0},
    of_too_many={"beta": np.zeros(2), "gamma": 0.0},
    empty={},
    wrong_shape={"beta": np.zeros(3)},
    words=["a", "b"],
    nan_by_name={"beta": np.array([np.nan, 0.0])},
    words_by_name={"beta": "zero"},
    truth=True,
)
refuse(SGLDCV, "thin", zero=0, negative=-1, fraction=1.5, text="10", truth=True, huge=10**12)
refuse(SGLDCV, "batching", of_its_estimator="replace")
refuse_to_make(
    FirstOrder, "batching", misspelt="shuffel", number=3, truth=True, sequence=["shuffle"]
)
refuse(SGLDCV, "initial_point", of_pymc={"beta": np.zeros(2)})
refuse(
    SGLDCV,
    "compile_kwargs",
    text="CVM",
    misspelt_mode={"mode": "NUMBAA"},
    misspelt_key={"modes": "CVM"},
    number={"mode": 3},
    sequence=["CVM"],
)
refuse(SGLDCV, "rng", seed=1)
refuse(SGLDCV, "model", number=3, text="line")
refuse(SGLDCV, "blocked", slow=True, text="yes", no=False)
refuse(SGLDCV, "stepsize", misspelt=1e-3)
refuse(SGLDCV, "target_accept", of_nuts=0.9)
refuse(
    SGLDCV,
    "vars",
    says="vars|variables",
    unknown_name=["gamma"],
    unknown_single_name="gamma",
    empty=[],
    number=3,
    numbers=[0],
    nothing_in_it=[None],
    mapping={"gamma": 1},
    wrong_case=["Beta"],
)


@case(must_agree=True)
def vars_by_name():
    return step_on_line(SGLDCV, {"vars": ["beta"]})


@case(must_agree=True, slow=True)
def vars_by_a_single_name():
    return step_on_line(SGLDCV, {"vars": "beta"})


@case(must_agree=True, slow=True)
def vars_twice():
    return step_on_line(SGLDCV, {"vars": [shared_line()["beta"]] * 2})


@case("vars")
def vars_of_another_model():
    return step_on_line(SGLDCV, {"vars": [line()["beta"]]})


@case("vars")
def vars_observed():
    return step_on_line(SGLDCV, {"vars": [shared_line()["y"]]})


@case("model")
def no_model():
    SGLDCV(batch_size=10)


@case("gradient")
def estimator_of_another_model():
    posterior = Posterior(line())
    estimator = PlainGradient(posterior, make_batching("shuffle", posterior.data, 20))
    return step_on_line(
        SGLD, {"gradient": estimator, "step_size": 1e-3, "preconditioner": "identity"}
    )


@case("gradient.*batch_size")
def estimator_and_batch_size():
    posterior = Posterior(shared_line())
    estimator = PlainGradient(posterior, make_batching("shuffle", posterior.data, 20))
    return step_on_line(
        SGLD,
        {"gradient": estimator, "batch_size": 30, "step_size": 1e-3, "preconditioner": "identity"},
    )


refuse_to_make(SVRG, "refresh", zero=0, fraction=2.5)
refuse_to_make(SAGA, "batching", misspelt="shufle")


@case("step.size")
def schedule_turns_negative():
    return step_on_line(
        SGLDCV, {"step_size": lambda t: 1e-3 * (50 - t), "preconditioner": "curvature"}
    )


@case("zero")
def schedule_fails():
    return step_on_line(
        SGLDCV, {"step_size": lambda t: 1e-3 / abs(t - 300), "preconditioner": "identity"}
    )


@case("`a`")
def decay_with_negative_scale():
    return step_on_line(SGLDCV, {"step_size": PolynomialDecay(a=-1.0)})


@case("gamma")
def decay_that_grows():
    return step_on_line(SGLDCV, {"step_size": PolynomialDecay(a=1e-3, gamma=-1.0)})


@case("`a`")
def decay_of_text():
    return step_on_line(SGLDCV, {"step_size": PolynomialDecay(a="1")})


@case("center|start|mode", may_end_in_log=True, slow=True)
def center_far_away():
    return step_on_line(SGLDCV, {"center": np.array([1e6, -1e6])})


@case("saga.*JAX|JAX.*saga")
def saga_on_jax():
    return step_on_line(
        SGLD, {"gradient": "saga", "batch_size": 20, "compile_kwargs": {"mode": "JAX"}}
    )


# --- Arguments of single step methods -------------------------------------------------------------

refuse(SGLD, "gradient", misspelt="Plain")
refuse(SGHMC, "integrator", misspelt="leapfrog", number=1)
refuse(SGLDCV, "integrator", misspelt="avaraged", of_sghmc="baoab", number=1)
refuse(
    SGHMC,
    "friction",
    zero=0.0,
    negative=-1.0,
    text="high",
    nan=NOT_A_NUMBER,
    truth=True,
    too_large_for_euler=Together(
        integrator="euler", friction=1e3, step_size=0.1, preconditioner="curvature"
    ),
)
refuse(
    SGHMC,
    "noise_estimate",
    misspelt="row",
    wrong_shape=np.eye(3),
    negative=-1.0,
    nan=NOT_A_NUMBER,
    indefinite=np.array([[1.0, 2.0], [2.0, 1.0]]),
)
refuse_to_make(
    ResampledMomentum,
    "every",
    misspelt=Together(integrator="baoab", every="draws"),
    zero=Together(integrator="baoab", every=0),
    fraction=Together(integrator="baoab", every=1.5),
    truth=Together(integrator="baoab", every=True),
)
refuse_to_make(ResampledMomentum, "integrator", misspelt="naïve")
refuse(SGHMC, "preconditioner", misspelt="curvatrue", too_long=np.ones(3))
refuse(SGNHT, "thermostat", misspelt="vector", number=1)
refuse(SGNHT, "friction", nan=NOT_A_NUMBER, negative=-1.0, text="1")
refuse(SGNHT, "thermostat_mass", zero=0.0, negative=-1.0, text="1")
refuse(SGNHT, "step_size", unstable=Together(step_size=50.0, preconditioner="curvature"))
refuse(PSGLD, "preconditioner", matrix=np.eye(2), misspelt="rmsprob", number=1.0)
refuse(PSGLD, "decay", zero=0.0, one=1.0, above_one=1.5, text="0.9", nan=NOT_A_NUMBER)
refuse(PSGLD, "regularization", zero=0.0, negative=-1e-5, text="small")
refuse(OSGFS, "step_size", given=0.1)
refuse(
    OSGFS,
    "k",
    misspelt="matrxi",
    too_large=5.0,
    zero=0.0,
    truth=True,
    array=np.eye(2),
    nan=NOT_A_NUMBER,
    paper_with_cv=Together(k="paper", gradient="cv"),
)
refuse(OSGFS, "bias", with_k=Together(k=1.0, bias=0.05))
refuse(OSGFS, "curvature", misspelt="hesian", number=1.0)
refuse(OSGFS, "start", misspelt="centre", number=0)
refuse(OSGFS, "covariance", number=500, above_rows=RunningCovariance(rows=ROWS + 1))
refuse_to_make(RunningCovariance, "rows", one=1, fraction=10.5)
refuse_to_make(RunningCovariance, "update_every", zero=0, fraction=0.5)
refuse(OSGFS, "convergence", misspelt="chi")
refuse_to_make(ConvergenceTest, "rule", misspelt="chi")
refuse_to_make(
    ConvergenceTest, "b", without_its_rule=0.5, negative=Together(rule="elementwise", b=-1.0)
)
refuse_to_make(ConvergenceTest, "window", zero=0, text="10")
refuse(OSGFS, "preconditioner", of_another=np.eye(2))
refuse(
    HAMCMC,
    "memory",
    one=1,
    fraction=2.5,
    text="3",
    too_few_between=Together(memory=2, pairs="between"),
)
refuse(HAMCMC, "pairs", misspelt="betwen")
refuse(HAMCMC, "initial_scale", negative=-1.0, text="1")
refuse(HAMCMC, "regularization", negative=-1.0)
refuse_to_make(Pairs, "threshold", zero=0.0)
refuse(SGRLD, "metric_rows", zero=0, fraction=1.5, above_rows=ROWS + 1)
refuse(ULA, "batch_size", given=10)
refuse(SGHMC, "friction", tiny=1e-300)
refuse(SGLDCV, "compile_kwargs", of_a_package_that_is_not_there={"mode": "MLX"})
refuse(OSGFS, "convergence", says="window", beyond_memory=ConvergenceTest(window=10**13))
refuse(HAMCMC, "memory", beyond_a_draw=10**6)
refuse(ULA, "gradient", given="cv")
refuse(ULA, "step_size", negative=-1.0)
refuse(MALA, "bias", given=0.05)
refuse(MALA, "batch_size", given=10)
refuse(MALA, "step_size", nan=NOT_A_NUMBER)


def identity(theta):
    """Diffusion of plain Langevin dynamics."""
    return 1.0


def fails(theta):
    """A diffusion with a mistake in it."""
    raise KeyError("scale")


refuse(
    Recipe,
    "D",
    says="`D`|scale|argument",
    nothing_at_all=None,
    number=1.0,
    asymmetric=lambda theta: np.array([[1.0, 0.5], [0.0, 1.0]]),
    zero=lambda theta: 0.0,
    negative=lambda theta: -1.0,
    text=lambda theta: "one",
    nothing=lambda theta: None,
    nan=lambda theta: np.nan,
    fails=fails,
    of_too_many_arguments=lambda theta, r: 1.0,
    too_many_blocks=lambda theta: [[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]],
)
refuse(
    Recipe,
    "Q",
    number=Together(D=identity, Q=1.0),
    not_skew=Together(D=identity, Q=lambda theta: np.array([[0.0, 1.0], [1.0, 0.0]])),
    wrong_shape=Together(D=identity, Q=lambda theta: np.zeros((3, 3))),
)
refuse(
    Recipe,
    "auxiliar",
    number=Together(D=identity, auxiliaries=3),
    numbers=Together(D=identity, auxiliaries=[3]),
    twice=Together(D=identity, auxiliaries=["r", "r"]),
    position=Together(D=identity, auxiliaries=["position"]),
)
refuse(
    Recipe,
    "gradient_noise",
    misspelt=Together(D=identity, gradient_noise="centre"),
    wrong_shape=Together(D=identity, gradient_noise=np.eye(3)),
    too_large=Together(D=identity, step_size=1e-2, gradient_noise=1e9),
)


@case("variance")
def auxiliary_of_negative_variance():
    momentum = GaussianAuxiliary("momentum", variance=-1.0)
    return step_on_line(Recipe, {"D": lambda theta, r: 1.0, "auxiliaries": [momentum]})


@case("stationary|noise|`D`")
def recipe_with_a_coordinate_without_noise():
    return step_on_line(Recipe, {"D": lambda theta: np.array([1e-3, 0.0]), "step_size": 1.0})


# --- Step methods given to pm.sample in other ways ------------------------------------------------


@case("step")
def class_in_place_of_step_method():
    return Run(shared_line(), SGLDCV, gaussian)


@case()
def name_in_place_of_step_method():
    return Run(shared_line(), "SGLDCV", gaussian)


@case("beta", slow=True)
def two_step_methods_for_one_variable():
    with shared_line():
        steps = [
            SGLDCV(step_size=1e-3, preconditioner="identity", compile_kwargs=QUICK)
            for _ in range(2)
        ]
    return Run(shared_line(), steps, gaussian)


@case("batch_size", slow=True)
def batches_of_one_row():
    return step_on_line(SGLDCV, {"batch_size": 1})


@case("batch_size")
def plain_gradient_of_one_row():
    return step_on_line(SGLD, {"batch_size": 1})


@case("batch|minibatch|rows")
def rows_beside_minibatch():
    X, y = np.ones((ROWS, 2)), np.zeros(ROWS)
    with pm.Model() as model:
        Xb, yb = pm.Minibatch(X, y, batch_size=20)
        beta = pm.Normal("beta", 0, 1, shape=2)
        pm.Normal("y", Xb @ beta, 1.0, observed=yb, total_size=ROWS)
    return run_of(model, rows="y")


def run_on_line(**arguments: Any) -> None:
    """A run of the shared model whose arguments should be refused before its set-up."""
    sample(model=shared_line(), **arguments)


for _argument, _values in {
    "draws": {"beyond_memory": 10**18},
    "random_seed": {"text": "a", "fraction": 1.5, "legacy": np.random.RandomState(1)},
    "initvals": {
        "number": 3,
        "of_other_chains": [{}] * 99,
        "unknown": {3: 1},
        "text": {"beta": "x"},
        "too_long": {"beta": [1.0, 2.0, 3.0]},
        "nan": {"beta": [NOT_A_NUMBER, 0.0]},
    },
    "var_names": {"number": 3, "mapping": {"beta": 1}},
    "mp_ctx": {"unknown": "foo", "number": 3},
    "quiet": {"text": "no"},
    "progressbar": {"unknown": "both"},
    "idata_kwargs": {
        "unknown": {"foo": 1},
        "log_likelihood_of_nothing": {"log_likelihood": ["zz"]},
        "dims": {"dims": 3},
    },
    "store": {"in_proc": "/proc/x", "null": "\0", "too_long": "x" * 5000},
    "drawss": {"misspelt": 10},
    "callback": {"of_pymc": print},
    "batch_size": {"of_the_step": 10},
}.items():
    for _fault, _value in _values.items():
        add(
            f"settings.sample_{_argument}_{_fault}",
            functools.partial(run_on_line, **{_argument: _value}),
            _argument,
        )


@case("`model`")
def sample_of_no_model():
    """A name is no model."""
    sample(model="m")


@case("`step` should be the class")
def blocks_of_a_step_method_in_words():
    sample_blocks(shared_line(), step="sgld")


@case("two arrays")
def blocks_of_a_model_without_indices():
    sample_blocks(shared_line())
