"""Runs in which local variables are integrated out, and drawn at the end."""

from __future__ import annotations

import logging
import warnings
from functools import partial

import numpy as np
import pymc as pm
import pytest
from scipy import stats

from pymc_sgmcmc import (
    SGHMC,
    SGLD,
    SGLDCV,
    ModelError,
    marginalize,
    read_store,
    recover,
    sample,
    summary,
)
from pymc_sgmcmc.errors import CenterWarning, ChainProcessError, StoreError
from pymc_sgmcmc.marginal import search
from pymc_sgmcmc.marginal.accuracy import LARGEST_SHIFT, quadrature_of
from pymc_sgmcmc.posterior import posterior
from pymc_sgmcmc.posterior.check import check_separation
from pymc_sgmcmc.sampling import groups, run
from pymc_sgmcmc.step_methods import base
from pymc_sgmcmc.tuning.curvature import DENSE_DIMENSION
from tests.sampling.test_sample import NUMBA, SMALL, check_same, ours
from tests.support import sampling
from tests.support.effects import Effects, moments

pytestmark = pytest.mark.usefixtures("without_compiler")

N_GROUPS, RECORDS, SCALE = 40, 3, 0.7
CODES = np.random.default_rng(1).permutation(np.repeat(np.arange(N_GROUPS), RECORDS))

CV = partial(SGLDCV, batch_size=20, **NUMBA)
FEW = partial(SGLDCV, batch_size=20, step_size=1e-3, thin=3, preconditioner="curvature")
"""For few transitions, which are not worth compiling."""

QUICK = partial(FEW, center={"mean": 1.0})
"""For runs whose draws need not have the law of the posterior, without a search for a centre."""

PLAIN = SMALL | {"compile_kwargs": sampling.QUICK}
"""Settings of SGLD for few transitions."""


@pytest.fixture(autouse=True)
def integrates(monkeypatch):
    """Effects are integrated out however few they are."""
    monkeypatch.setattr(search, "MOST_JOINT", 0)


def mixed_model(n_groups: int = N_GROUPS, records: int = RECORDS) -> pm.Model:
    """A linear mixed model of known variances, with labels and a deterministic."""
    rng = np.random.default_rng(2)
    codes = CODES if n_groups == N_GROUPS else np.repeat(np.arange(n_groups), records)
    y = 1 + SCALE * rng.normal(size=n_groups)[codes] + rng.normal(size=len(codes))
    with pm.Model(coords={"school": [f"s{number}" for number in range(n_groups)]}) as model:
        school = pm.Data("codes", codes)
        mean = pm.Normal("mean", 0, 10)
        z = pm.Normal("z", 0, SCALE, dims="school")
        effect = pm.Deterministic("effect", mean + z, dims="school")
        pm.Normal("y", effect[school], 1, observed=y)
    return model


def exact_effects(model: pm.Model) -> tuple[np.ndarray, np.ndarray]:
    """Posterior means and standard deviations of the effects."""
    y = model.rvs_to_values[model["y"]].data
    Z = np.eye(N_GROUPS)[CODES]
    design = np.column_stack([np.ones(len(y)), Z])
    precision = design.T @ design + np.diag([1 / 100, *np.full(N_GROUPS, 1 / SCALE**2)])
    covariance = np.linalg.inv(precision)
    transform = np.column_stack([np.ones(N_GROUPS), np.eye(N_GROUPS)])
    means = transform @ covariance @ design.T @ y
    return means, np.sqrt(np.diag(transform @ covariance @ transform.T))


@pytest.fixture(scope="module")
def mixed():
    model = mixed_model()
    return model, ours(model, CV, draws=1000, tune=200)


@pytest.fixture(scope="module")
def short(mixed):
    """A run of few draws of the same model."""
    return ours(mixed[0], QUICK)


def test_draws_of_all_variables(mixed):
    """Each mean and variance within 4.5 standard errors, by the exact law, and the bias of 5 %."""
    model, idata = mixed
    posterior = idata["posterior"]
    assert list(posterior.data_vars) == ["mean", "z", "effect"]
    assert posterior["effect"].dims == ("chain", "draw", "school")
    assert tuple(posterior["school"].values) == tuple(model.coords["school"])
    means, deviations = exact_effects(model)
    z = (posterior["effect"].values.reshape(-1, N_GROUPS) - means) / deviations
    # The draws of an effect are independent but for that of the common mean, a tenth of it.
    assert np.abs(z.mean(0)).max() < 4.5 * 1.5 / np.sqrt(len(z))
    assert np.abs(z.var(0) - 1).max() < 0.06 + 4.5 * np.sqrt(2 / len(z))
    np.testing.assert_allclose(posterior["effect"], posterior["mean"] + posterior["z"])


def test_other_groups_are_those_of_the_joint_model(mixed):
    model, idata = mixed
    y = model.rvs_to_values[model["y"]].data
    np.testing.assert_array_equal(idata["observed_data"]["y"], y)
    np.testing.assert_array_equal(idata["constant_data"]["codes"], CODES)
    assert idata["sample_stats"].attrs["sgmcmc_integrated_out"] == '["z"]'
    assert idata["sample_stats"]["position"].shape == (2, 1000, 1)
    assert "mean_error" in summary(idata)


@pytest.mark.slow
def test_same_as_by_hand_and_with_processes(mixed, short):
    model, idata = mixed[0], short
    by_hand = ours(marginalize(model, "z"), QUICK)
    np.testing.assert_array_equal(by_hand["posterior"]["mean"], idata["posterior"]["mean"])
    seed = np.random.default_rng(3).spawn(3)[-1]
    recovered = recover(by_hand, model, random_seed=seed, progressbar=False)
    np.testing.assert_array_equal(recovered["posterior"]["z"], idata["posterior"]["z"])
    check_same(ours(model, QUICK, cores=2), idata)


def test_joint_model_where_asked_for(caplog):
    model = mixed_model()
    with caplog.at_level(logging.INFO):
        step = SGLD(model=model, **PLAIN)
        joint = ours(model, step)
        check_same(ours(model, partial(SGLD, **PLAIN), marginalize=None), joint)
    assert joint["sample_stats"]["position"].shape[-1] == N_GROUPS + 1
    assert "integrated out" not in caplog.text


@pytest.mark.slow
def test_names_and_what_the_log_says(caplog):
    model = mixed_model()
    for names in ("z", ["z"]):
        with caplog.at_level(logging.INFO):
            idata = ours(model, QUICK, marginalize=names, quiet=False)
        assert idata["sample_stats"]["position"].shape[-1] == 1
        assert "`z` is integrated out, so that 40 groups are the rows" in caplog.text
        assert "`marginalize=None`" in caplog.text
        caplog.clear()


@pytest.mark.slow
def test_initial_values_of_local_variables_are_not_needed(mixed):
    model, _ = mixed
    initial = {"mean": np.array(1.0), "z": np.zeros(N_GROUPS)}
    expected = ours(model, QUICK, initvals={"mean": np.array(1.0)})
    for initvals in (initial, [initial, {"mean": np.array(1.0)}]):
        check_same(ours(model, QUICK, initvals=initvals), expected)


@pytest.mark.slow
def test_local_variables_that_nobody_asked_for_are_not_drawn(mixed, short, monkeypatch):
    model, expected = mixed[0], short
    few = ours(model, QUICK, var_names=["effect"])
    assert list(few["posterior"].data_vars) == ["effect"]
    np.testing.assert_array_equal(few["posterior"]["effect"], expected["posterior"]["effect"])
    monkeypatch.setattr(groups, "recover", None)
    mean = ours(model, QUICK, var_names="mean")
    assert list(mean["posterior"].data_vars) == ["mean"]
    np.testing.assert_array_equal(mean["posterior"]["mean"], expected["posterior"]["mean"])


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("No memory.")])
def test_draws_are_kept_where_local_ones_cannot_be_made(mixed, short, monkeypatch, caplog, error):
    model, expected = mixed[0], short

    def broken(*arguments, **settings):
        raise error

    monkeypatch.setattr(groups, "recover", broken)
    idata = ours(model, QUICK)
    assert "Call `recover(idata, model)`" in caplog.text
    assert ("Ctrl-C" if isinstance(error, KeyboardInterrupt) else "No memory") in caplog.text
    assert list(idata["posterior"].data_vars) == ["mean"]
    np.testing.assert_array_equal(idata["posterior"]["mean"], expected["posterior"]["mean"])
    assert recover(idata, model, progressbar=False)["posterior"]["z"].shape == (2, 25, N_GROUPS)


@pytest.mark.slow
def test_draws_of_a_process_that_died_have_local_variables(mixed, monkeypatch):
    model, _ = mixed
    draws_of = run._Run.draws_of

    def killed(*arguments, **settings):
        error = ChainProcessError("A process died.")
        error.idata, _ = draws_of(*arguments, **settings)
        raise error

    monkeypatch.setattr(run._Run, "draws_of", killed)
    with pytest.raises(ChainProcessError) as raised:
        ours(model, QUICK)
    assert list(raised.value.idata["posterior"].data_vars) == ["mean", "z", "effect"]


@pytest.mark.slow
def test_functions_of_the_draws(mixed, monkeypatch):
    """They are computed with the joint model, a term for each record."""
    given = []
    monkeypatch.setitem(
        run.AT_THE_END, "log_likelihood", lambda idata, model, **_: given.append((idata, model))
    )
    model, _ = mixed
    idata = ours(model, QUICK, idata_kwargs={"log_likelihood": True})
    ((trace, joint),) = given
    assert joint is model
    assert trace is idata
    assert "z" in trace["posterior"]


@pytest.mark.slow
def test_accuracy(mixed):
    model, _ = mixed
    idata = ours(model, CV, draws=1000, tune=200, accuracy=0.05)
    table = summary(idata)
    means, deviations = exact_effects(model)
    rows = table.loc[[name for name in table.index if name.startswith("effect")]]
    assert (np.abs(rows["mean"] - means) <= rows["mean_error"]).mean() > 0.85
    assert (np.abs(rows["sd"] - deviations) <= rows["sd_error"]).mean() > 0.85


@pytest.mark.slow
def test_stored_and_resumed(mixed, short, tmp_path):
    pytest.importorskip("zarr")
    model, expected = mixed[0], short
    path = tmp_path / "run.zarr"
    ours(model, QUICK, draws=10, store=path)
    check_same(ours(mixed_model(), QUICK, store=path, resume=True), expected)
    stored = read_store(path, model=marginalize(model, "z"))
    np.testing.assert_array_equal(stored["posterior"]["mean"], expected["posterior"]["mean"])
    with pytest.raises(StoreError, match=r"variable `z` is new.*it is `marginalize\("):
        read_store(path, model=model)


def large_scale_model(n_groups: int) -> pm.Model:
    """Binary records of groups far apart, for which nine nodes serve at the initial point alone."""
    rng = np.random.default_rng(3)
    codes = np.repeat(np.arange(n_groups), 5)
    odds = 8 * rng.normal(size=n_groups)[codes]
    with pm.Model() as model:
        sd, mean = pm.HalfCauchy("sd", 2.5), pm.Normal("mean", 0, 3)
        z = pm.Normal("z", shape=n_groups)
        observed = odds > rng.logistic(size=len(codes))
        pm.Bernoulli("y", logit_p=mean + sd * z[codes], observed=observed)
    return model


CENTER = {"sd": 8.0, "mean": 0.0}


def kinked_model() -> pm.Model:
    """Effects with a kink in their density, at which a quadrature has errors."""
    codes = np.repeat(np.arange(30), 5)
    with pm.Model() as model:
        z = pm.Laplace("z", 0, 0.5, shape=30)
        odds = pm.Normal("mean") + z[codes]
        pm.Bernoulli("y", logit_p=odds, observed=np.tile([0, 1, 0, 1, 1], 30))
    return model


def test_a_quadrature_that_is_wrong_at_the_posterior_gets_more_nodes(caplog):
    """With nine nodes means are off by a standard deviation, and nobody has to be told."""
    points = [{"sd_log__": np.array(log_sd), "mean": np.array(0.0)} for log_sd in (1.9, 2.0, 2.1)]

    def step(model):
        error = quadrature_of(model)
        assert error.refine(points)
        assert not error.refine(points)

    with caplog.at_level(logging.INFO):
        found = groups.groups_of(large_scale_model(300), "auto", step)
    assert quadrature_of(found.model).points == 37
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert quadrature_of(found.model).shift(points) < LARGEST_SHIFT


@pytest.mark.parametrize("looks", [True, False])
def test_errors_near_the_initial_point_are_told_where_there_is_no_centre(looks, caplog):
    """Nine nodes have errors there, which do not matter where a step method has looked."""
    with caplog.at_level(logging.INFO):
        groups.groups_of(
            kinked_model(), "auto", lambda model: quadrature_of(model).refine([]) if looks else None
        )
    assert ("near the initial point" in caplog.text) == (not looks)
    assert ("`marginalize(..., points=37)`" in caplog.text) == (not looks)


def test_errors_near_the_initial_point_do_not_matter_elsewhere(caplog):
    error = quadrature_of(marginalize(kinked_model(), "z"))
    assert "near the initial point. A step method of this package" in caplog.text
    with caplog.at_level(logging.INFO):
        error.refine([])
        error.tell()
    assert "with 9 nodes is accurate around the centre" in caplog.text


def test_the_log_tells_of_groups_before_the_set_up(caplog):
    told = []

    def step(model):
        told.append(caplog.text)

    with caplog.at_level(logging.INFO):
        groups.groups_of(mixed_model(), "auto", step)
    assert "`z` is integrated out, so that 40 groups are the rows" in told[0]


@pytest.mark.parametrize("limit", [-1.0, 1000.0])
def test_the_log_tells_how_long_the_set_up_took(limit, caplog, monkeypatch, uncompiled):
    monkeypatch.setattr(base, "TOLD_SECONDS", limit)
    with caplog.at_level(logging.INFO):
        step = SGLD(model=mixed_model(), **PLAIN)
    spent = step.run_settings.attributes["setup_seconds"]
    assert (f"SGLD: the set-up took {spent:.0f} seconds" in caplog.text) == (limit < 0)


def test_a_step_method_takes_the_nodes_that_its_center_needs(caplog, uncompiled):
    model = marginalize(large_scale_model(60), "z")
    caplog.clear()
    FEW(model=model, center=CENTER)
    assert quadrature_of(model).points == 37
    assert "not accurate" not in caplog.text


def test_nodes_that_were_given_stay(caplog):
    error = quadrature_of(marginalize(large_scale_model(300), "z", points=9))
    points = [{"sd_log__": np.array(log_sd), "mean": np.array(0.0)} for log_sd in (1.9, 2.0, 2.1)]
    assert not error.refine(points)
    error.tell()
    assert "with 9 nodes is not accurate where the posterior is" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("points", [None, 9])
def test_gradients_with_the_nodes_that_the_center_needs(points, uncompiled):
    """They move means by less than the stated bound, beside those of many nodes."""
    few, many = (
        FEW(model=marginalize(large_scale_model(60), "z", points=number), center=CENTER).center
        for number in (points, 75)
    )
    change = np.abs((few.gradient - many.gradient) @ many.curvature.root).max()
    assert (change < LARGEST_SHIFT) == (points is None)


@pytest.mark.slow
def test_draws_with_the_nodes_that_the_center_needs():
    """Binary records of groups four standard deviations apart, as the nails of patients."""
    rng = np.random.default_rng(6)
    codes, time = np.repeat(np.arange(294), 6), np.tile(np.linspace(0, 1, 6), 294)
    odds = -1.6 - 3 * time + 4 * rng.normal(size=294)[codes]
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 5, shape=2)
        z, sd = pm.Normal("z", shape=294), pm.HalfCauchy("sd", 2.5)
        pm.Bernoulli(
            "y",
            logit_p=beta[0] + beta[1] * time + sd * z[codes],
            observed=odds > rng.logistic(size=len(codes)),
        )
    runs = []
    for points in (None, 101):
        with marginalize(model, "z", points=points):
            runs.append(pm.sample(1000, tune=300, step=SGLDCV(**NUMBA), chains=2, **sampling.QUIET))
    for name in ("beta", "sd"):
        mean, reference = (run["posterior"][name].mean(("chain", "draw")) for run in runs)
        sd = runs[1]["posterior"][name].std(("chain", "draw"))
        assert (np.abs(mean - reference) < 0.15 * sd).all()


# --- Which variables are integrated out --------------------------------------------------------


def crossed_model() -> pm.Model:
    """Two factors, of 30 and of 45 levels."""
    rng = np.random.default_rng(4)
    person, item = rng.integers(0, 45, 300), rng.integers(0, 30, 300)
    person[:45], item[:30] = np.arange(45), np.arange(30)
    with pm.Model() as model:
        ability = pm.Normal("ability", shape=45)
        difficulty = pm.Normal("difficulty", shape=30)
        pm.Normal("y", ability[person] - difficulty[item], 1, observed=rng.normal(size=300))
    return model


def nested_pair_model(n_groups: int = N_GROUPS, records: int = RECORDS) -> pm.Model:
    """An intercept and a slope for each group, of a length that the graph does not tell."""
    rng = np.random.default_rng(5)
    codes = CODES if n_groups == N_GROUPS else np.repeat(np.arange(n_groups), records)
    x = rng.normal(size=len(codes))
    with pm.Model(coords={"school": np.arange(n_groups), "term": np.arange(25)}) as model:
        intercept = pm.Normal("intercept", dims="school")
        slope = pm.Normal("slope", dims="school")
        beta = pm.Normal("beta", dims="term")
        X = rng.normal(size=(len(codes), 25))
        pm.Normal("y", intercept[codes] + slope[codes] * x + X @ beta, 1, observed=x)
    return model


def counts_with_own_rates():
    with pm.Model() as model:
        shape, scale = pm.Exponential("shape", 1), pm.Exponential("scale", 1)
        rate = pm.Gamma("rate", shape, scale, shape=N_GROUPS)
        pm.Poisson("y", rate * np.arange(1, N_GROUPS + 1), observed=np.arange(N_GROUPS) % 7)
    return model


def few_levels_beside(kind: str, own: str = "normal") -> pm.Model:
    """Effects of 40 groups, beside four effects with a scale that is not known, or coefficients."""
    treatment = np.arange(len(CODES)) % 4
    with pm.Model() as model:
        sd = pm.HalfNormal("sd")
        z = pm.Normal("z", 0, sd, shape=N_GROUPS) if own == "normal" else None
        z = pm.Gamma("z", sd, sd, shape=N_GROUPS) if z is None else z
        scale = 2 if kind == "coefficients" else pm.HalfNormal("scale")
        match kind:
            case "non-centred":
                u = pm.Normal("u", shape=4) * scale
            case "selected":
                u = pm.Normal("u", shape=4)
                pm.Normal("y", z[CODES] + u[treatment] * scale, 1, observed=CODES % 2)
                return model
            case _:
                u = pm.Normal("u", 0, scale, shape=4)
        pm.Normal("y", z[CODES] + u[treatment], 1, observed=CODES % 2)
    return model


@pytest.mark.parametrize(
    ("kind", "own", "expected"),
    [
        ("centred", "normal", None),
        ("non-centred", "normal", None),
        ("selected", "normal", None),
        ("coefficients", "normal", ("z",)),
        ("centred", "gamma", ("z",)),  # A joint posterior would have no coordinates for these.
    ],
)
def test_few_effects_of_unknown_scale_are_another_factor(kind, own, expected):
    structures, _ = search.local_structures(few_levels_beside(kind, own))
    assert (structures[0].names if structures else None) == expected


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (mixed_model, ("z",)),
        (crossed_model, None),
        (nested_pair_model, ("intercept", "slope")),
        (partial(mixed_model, search.FEWEST_GROUPS - 1), None),
        (partial(mixed_model, 30, search.MOST_RECORDS + 1), None),
        (partial(mixed_model, search.MOST_COORDINATES, search.MOST_RECORDS + 1), None),
        (partial(nested_pair_model, 240, search.MOST_RECORDS + 1), ("intercept", "slope")),
        (partial(mixed_model, 30, 1), ("z",)),
        (counts_with_own_rates, ("rate",)),
    ],
    ids=[
        "mixed",
        "crossed",
        "pair",
        "few groups",
        "large groups",
        "many large",
        "pairs of large",
        "one record",
        "no codes",
    ],
)
def test_what_is_integrated_out(make, expected):
    structures, _ = search.local_structures(make())
    assert (structures[0].names if structures else None) == expected


def with_empty_levels(form: str) -> pm.Model:
    """Effects of 50 levels, of which ten have no records."""
    rng = np.random.default_rng(7)
    with pm.Model() as model:
        mean, sd = pm.Normal("mean", 0, 10), 0.7
        if form == "centred":
            effect = pm.Normal("z", mean, sd, shape=N_GROUPS + 10)
        else:
            effect = mean + sd * pm.Normal("z", shape=N_GROUPS + 10)
        pm.Normal("y", effect[CODES], 1, observed=rng.normal(size=len(CODES)))
    return model


@pytest.mark.parametrize("form", ["centred", "non-centred"])
def test_effects_of_levels_without_records_are_integrated_out(form):
    found = groups.groups_of(with_empty_levels(form), "auto", lambda model: None)
    assert found.names == ("z",)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["centred", "non-centred"])
def test_draws_of_effects_of_levels_without_records(form):
    """They have the law of their prior, at the law of the global variables."""
    model = with_empty_levels(form)
    y = model.rvs_to_values[model["y"]].data
    sizes = np.bincount(CODES)
    precision = 1 / 100 + (1 / (0.49 + 1 / sizes)).sum()
    mean = (np.bincount(CODES, y) / sizes / (0.49 + 1 / sizes)).sum() / precision
    idata = ours(model, CV, draws=1000, tune=200)
    drawn = idata["posterior"]["z"].to_numpy()[..., N_GROUPS:].reshape(-1, 10)
    center, variance = (mean, 0.49 + 1 / precision) if form == "centred" else (0.0, 1.0)
    assert np.abs(drawn.mean(0) - center).max() < 4.5 * 1.5 * np.sqrt(variance / len(drawn))
    assert np.abs(drawn.var(0) / variance - 1).max() < 0.06 + 4.5 * np.sqrt(2 / len(drawn))


def test_cells_of_two_codes_are_integrated_out():
    rng = np.random.default_rng(8)
    year = rng.integers(0, 30, size=len(CODES))
    with pm.Model() as model:
        z = pm.Normal("z", 0, pm.HalfNormal("sd"), shape=(4, 30))
        pm.Bernoulli("y", logit_p=z[CODES % 4, year], observed=CODES % 2)
    (structure,) = search.local_structures(model)[0]
    assert (structure.n_groups, structure.block_size) == (120, 1)


def test_bound_on_coordinates_is_that_of_dense_curvatures():
    assert search.MOST_COORDINATES == DENSE_DIMENSION


def test_large_groups_that_stay_in_the_model_are_told(caplog):
    model = mixed_model(30, search.MOST_RECORDS + 1)
    with caplog.at_level(logging.INFO):
        assert groups.groups_of(model, "auto", SGLD) is None
    assert "`z` of 30 groups stay in the model, since the 101 records" in caplog.text
    caplog.clear()
    with pm.Model() as all_local:
        b = pm.Normal("b", shape=50)
        codes = np.repeat(np.arange(50), search.MOST_RECORDS + 1)
        pm.Normal("y", b[codes], 1, observed=np.zeros(len(codes)))
    with caplog.at_level(logging.INFO):
        assert groups.groups_of(all_local, "auto", SGLD) is None
    assert "stay in the model" not in caplog.text


def test_normal_effects_stay_up_to_a_number_of_coordinates(monkeypatch):
    model = mixed_model()
    n_coordinates = N_GROUPS + len(model.free_RVs) - 1
    monkeypatch.setattr(search, "MOST_JOINT", n_coordinates)
    assert groups.groups_of(model, "auto", SGLD) is None
    assert search.local_structures(model, with_coordinates=False)[0]
    monkeypatch.setattr(search, "MOST_JOINT", n_coordinates - 1)
    assert search.local_structures(model)[0]


def test_several_effects_of_a_level_stay(monkeypatch):
    monkeypatch.setattr(search, "MOST_JOINT", 5000)
    codes = np.repeat(np.arange(300), 3)
    with pm.Model() as model:
        u, v = (pm.Normal(name, shape=300) * pm.HalfNormal(f"of_{name}") for name in "uv")
        pm.Normal("y", u[codes] + v[codes] * np.tile([-1, 0, 1], 300), observed=codes % 5.0)
    assert search.local_structures(model)[0] == []


def test_effects_that_a_step_method_moves_as_they_are_do_not_stay(monkeypatch, caplog):
    monkeypatch.setattr(search, "MOST_JOINT", 5000)
    caplog.set_level(logging.INFO, "pymc.sgmcmc")
    idata = ours(mixed_model(), partial(SGHMC, **FEW.keywords))
    assert "moves effects as they are in the model, so that without `z`" in caplog.text
    assert "z" in idata["posterior"]
    assert idata["sample_stats"]["position"].shape[-1] < N_GROUPS


FUNNEL = Effects(8, 100, 0.03)
IN_VARIABLES = partial(SGHMC, **FEW.keywords)
"""A step method that moves the variables of the model, in which the joint posterior is a funnel."""


def test_effects_of_few_groups_stay_where_they_have_coordinates_of_their_own(recwarn):
    idata = ours(FUNNEL.model(), FEW)
    assert not [each for each in recwarn if issubclass(each.category, CenterWarning)]
    assert idata["sample_stats"]["position"].shape[-1] == 10


def test_effects_of_few_groups_are_integrated_out_where_their_scale_is_a_funnel(caplog, recwarn):
    caplog.set_level(logging.INFO, "pymc.sgmcmc")
    idata = ours(FUNNEL.model(), partial(IN_VARIABLES, batch_size=4))
    assert "The joint posterior is far from Gaussian, so that without `effects`" in caplog.text
    assert "`effects` is integrated out, so that 8 groups are the rows" in caplog.text
    assert not [each for each in recwarn if issubclass(each.category, CenterWarning)]
    assert idata["sample_stats"]["position"].shape[-1] == 2
    assert idata["posterior"]["effects"].shape[2:] == (8,)


@pytest.mark.slow
def test_draws_of_a_scale_whose_joint_posterior_is_a_funnel():
    idata = ours(FUNNEL.model(), partial(SGLDCV, **NUMBA), draws=2000, tune=300)
    table = summary(idata)
    log_tau, mass = FUNNEL.law_of_log_scale()
    mean, sd = moments(np.exp(log_tau), mass)
    drawn = idata["posterior"]["tau"].to_numpy()
    assert abs(drawn.mean() - mean) < 4 * sd / np.sqrt(table.loc["tau", "ess_bulk"])


def eight_schools(*, centered: bool) -> pm.Model:
    """Effects of coaching (Rubin 1981), a record a school, as in PyMC's gallery."""
    with pm.Model(coords={"school": np.arange(8)}) as model:
        mu = pm.Normal("mu", 0, 5)
        tau = pm.HalfCauchy("tau", 5)
        if centered:
            theta = pm.Normal("theta", mu, tau, dims="school")
        else:
            z = pm.Normal("z", dims="school")
            theta = pm.Deterministic("theta", mu + tau * z, dims="school")
        pm.Normal("y", theta, ERRORS, observed=SCORES, dims="school")
    return model


SCORES = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
ERRORS = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])


@pytest.fixture
def compared(monkeypatch):
    """Models are compared with PyMC's log density, which finds rows that are not separable."""
    monkeypatch.setattr(posterior, "check_separation", check_separation)


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("centered", [True, False])
def test_law_of_effects_with_a_record_each(centered):
    """Rows select an effect by their number."""
    idata = ours(eight_schools(centered=centered), partial(SGLDCV, **NUMBA), draws=2000, tune=500)
    assert idata["sample_stats"]["position"].shape[-1] == 10
    log_tau = np.linspace(-8, 6, 4001)
    covariances = [np.diag(ERRORS**2 + tau**2) + 25 for tau in np.exp(log_tau)]
    mass = np.array([stats.multivariate_normal(cov=cov).pdf(SCORES) for cov in covariances])
    mass *= stats.halfcauchy(scale=5).pdf(np.exp(log_tau)) * np.exp(log_tau)
    mass /= mass.sum()
    table = summary(idata)
    draws = idata["posterior"]
    drawn = np.log(draws["tau"].to_numpy())
    mean, sd = moments(log_tau, mass)
    assert abs(drawn.mean() - mean) < 4 * sd / np.sqrt(table.loc["tau", "ess_bulk"]) + 0.03 * sd
    # Given tau, the mean of mu is its precision-weighted one.
    weights = 1 / (ERRORS**2 + np.exp(2 * log_tau)[:, None])
    means = weights @ SCORES / (weights.sum(1) + 1 / 25)
    expected = means @ mass
    error = 5 / np.sqrt(table.loc["mu", "ess_bulk"])
    assert abs(float(draws["mu"].mean()) - expected) < 4 * error
    assert draws["theta"].shape[2:] == (8,)


@pytest.mark.parametrize("marginalize", ["auto", None])
def test_warnings_of_the_joint_model_are_given_where_it_is_sampled(marginalize, monkeypatch):
    if marginalize == "auto":  # Effects that cannot be integrated out.
        monkeypatch.setattr(groups, "local_structures", lambda *_, **__: ([], []))
    with pytest.warns(CenterWarning, match=r"is a funnel.*use `marginalize\(model, \[.effects.\]"):
        ours(FUNNEL.model(), IN_VARIABLES, marginalize=marginalize)


def test_warnings_of_the_joint_model_can_be_errors(monkeypatch):
    monkeypatch.setattr(groups, "local_structures", lambda *_, **__: ([], []))
    model = FUNNEL.model()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CenterWarning)
        with pytest.raises(CenterWarning, match="is a funnel"):
            ours(model, IN_VARIABLES)


def test_the_joint_model_is_sampled_where_groups_cannot_be(caplog):
    caplog.set_level(logging.INFO, "pymc.sgmcmc")

    def only_once(*, model):
        if "effects" not in model.named_vars:
            raise ModelError("no groups")
        warnings.warn("far", CenterWarning, stacklevel=2)
        return SGLD(model=model, **PLAIN)

    with pytest.warns(CenterWarning, match="far"):
        idata = ours(FUNNEL.model(), only_once)
    assert idata["sample_stats"]["position"].shape[-1] == 10
    assert "`effects` stay in the model: no groups" in caplog.text
    assert "is integrated out" not in caplog.text


@pytest.mark.parametrize("model", [mixed_model(), FUNNEL.model()], ids=["auto", "in need"])
def test_an_error_that_is_no_refusal_is_raised(model):
    """The joint model is not sampled in silence where something is wrong."""
    local = "z" if "z" in model.named_vars else "effects"

    def broken(*, model):
        if local not in model.named_vars:
            raise TypeError("a fault")
        warnings.warn("far", CenterWarning, stacklevel=2)
        return SGLD(model=model, **PLAIN)

    warnings.simplefilter("ignore", CenterWarning)
    with pytest.raises(TypeError, match="a fault"):
        ours(model, broken)


def test_warnings_before_an_error_are_given():
    def failing(*, model):
        warnings.warn("far", CenterWarning, stacklevel=2)
        raise ValueError("a bad setting")

    with (
        pytest.warns(CenterWarning, match="far"),
        pytest.raises(ValueError, match="a bad setting"),
    ):
        ours(FUNNEL.model(), failing)


def test_filters_of_modules_hold(monkeypatch, recwarn):
    monkeypatch.setattr(groups, "local_structures", lambda *_, **__: ([], []))
    warnings.filterwarnings("ignore", module=r"tests\.")
    ours(FUNNEL.model(), IN_VARIABLES)
    assert not [each for each in recwarn if issubclass(each.category, CenterWarning)]


def test_the_joint_model_is_sampled_where_that_of_groups_is_no_better():
    """Both give a warning."""

    def warned(*, model):
        warnings.warn("far", CenterWarning, stacklevel=2)
        return SGLD(model=model, **PLAIN)

    with pytest.warns(CenterWarning, match="far") as record:
        idata = ours(FUNNEL.model(), warned)
    assert len([each for each in record if each.category is CenterWarning]) == 1
    assert idata["sample_stats"]["position"].shape[-1] == 10


def test_step_methods_and_models_without_groups(caplog):
    """The joint model is sampled, and the log says why."""
    model = mixed_model()
    with caplog.at_level(logging.INFO):
        idata = ours(model, partial(SGLD, **PLAIN | {"batch_size": 60}), quiet=False)
    assert idata["sample_stats"]["position"].shape[-1] == N_GROUPS + 1
    assert "`z` of 40 groups stay in the model: " in caplog.text
    assert "batch_size" in caplog.text
    with pm.Model() as all_local:
        z = pm.Normal("z", shape=N_GROUPS)
        pm.Normal("y", z[CODES], 1, observed=np.zeros(len(CODES)))
    idata = ours(all_local, partial(SGLD, **PLAIN))
    assert idata["sample_stats"]["position"].shape[-1] == N_GROUPS


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        (3, TypeError, "`marginalize` should be"),
        ([3], TypeError, "`marginalize` should be"),
        ("gamma", ModelError, "gamma"),
        ("mean", ModelError, "mean"),
        ([], ModelError, "but got none"),
    ],
)
def test_bad_choices(choice, error, message):
    model = mixed_model()
    with pytest.raises(error, match=message):
        ours(model, CV, marginalize=choice)


def test_names_for_a_step_method_that_was_made_before():
    model = mixed_model()
    with pytest.raises(ValueError, match="`step=SGLD`"):
        ours(model, SGLD(model=model, **PLAIN), marginalize="z")


def test_the_default_step_method_is_made_for_groups(monkeypatch):
    """`sample()` alone is the right call."""
    made = []
    monkeypatch.setattr(groups, "_integrated", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(run, "_made", lambda *arguments: 1 / 0)
    with mixed_model(), pytest.raises(ZeroDivisionError):
        sample(10, quiet=True)
    assert made[0][1:] == (("z",), SGLDCV)
