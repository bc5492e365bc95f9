"""Groups whose records are rows of a source have the draws of groups in memory."""

from __future__ import annotations

from functools import partial

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import (
    SGHMC,
    SGLD,
    SGLDCV,
    LocalSampling,
    ModelError,
    Plain,
    Posterior,
    fit_marginal,
    marginalize,
    recover,
    sample,
)
from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.gathering import GatheredRows
from pymc_sgmcmc.gradient_estimators.minibatches import batching_of
from pymc_sgmcmc.posterior.group_access import NOT_HELD, GroupsOfSource
from pymc_sgmcmc.sources import open_rows
from tests.support.sources import CountedRows

GROUPS = 150
FIRST_ROWS = 400
NUMBA = {"compile_kwargs": {"mode": "NUMBA"}}
RUN = {
    "chains": 2,
    "cores": 1,
    "random_seed": 3,
    "progressbar": False,
    "quiet": True,
    "compute_convergence_checks": False,
}


def records(*, equal: bool) -> dict[str, np.ndarray]:
    """Records in no order, ten of each group or one and more."""
    rng = np.random.default_rng(7)
    group = np.r_[np.arange(GROUPS), rng.integers(GROUPS, size=9 * GROUPS)]
    if equal:
        group = np.repeat(np.arange(GROUPS), 10)
    group = rng.permutation(group).astype("int32")
    X = rng.normal(size=(len(group), 2)).astype("float32")
    predictor = X @ [0.5, -1.0] + 0.7 * rng.normal(size=GROUPS)[group]
    return {
        "X": X,
        "group": group,
        "score": predictor + rng.normal(size=len(group)),
        "success": (rng.random(len(group)) < 1 / (1 + np.exp(-predictor))).astype("int8"),
    }


def known(X, group, score, _):
    """Standard deviations are known, so that little is to be compiled."""
    beta = pm.Normal("beta", 0, 2, shape=2)
    z = pm.Normal("z", 0, 0.7, shape=GROUPS)
    pm.Normal("y", X @ beta + z[group], 1.0, observed=score)


def linear(X, group, score, _):
    beta = pm.Normal("beta", 0, 2, shape=2)
    sd, sigma = pm.HalfNormal("sd", 1), pm.HalfNormal("sigma", 1)
    z = pm.Normal("z", 0, sd, shape=GROUPS)
    pm.Normal("y", X @ beta + z[group], sigma, observed=score)


def logistic(X, group, _, success):
    beta = pm.Normal("beta", 0, 2, shape=2)
    sd = pm.HalfNormal("sd", 1)
    z = pm.Normal("z", 0, sd, shape=GROUPS)
    pm.Bernoulli("y", logit_p=X @ beta + z[group], observed=success)


def in_memory(write, arrays):
    with pm.Model() as model:
        write(*(pm.Data(name, values) for name, values in arrays.items()))
    return model


def on_source(write, rows):
    with pm.Model() as model:
        write(*rows.head("X", "group", "score", "success", rows=FIRST_ROWS))
    return model


def small_source(arrays):
    """A source whose memory has the records of a third of the groups."""
    rows = CountedRows(arrays)
    rows.memory = 12_000
    return rows


def draws_of(model, step, **settings):
    with marginalize(model, "z"):
        return sample(**{"draws": 20, "tune": 10, **RUN, **settings}, step=step)


def assert_equal_draws(found, expected):
    for name in expected["posterior"]:
        np.testing.assert_array_equal(found["posterior"][name], expected["posterior"][name])
    for name in ("gradient", "step_size"):
        np.testing.assert_array_equal(found["sample_stats"][name], expected["sample_stats"][name])


PLAIN = partial(SGLD, batch_size=20, step_size=1e-3, preconditioner="identity", **NUMBA)
CASES = {
    "equal groups-SGLDCV": (known, True, SGLDCV),
    "linear-SGLDCV": (linear, False, SGLDCV),
    "linear-SGHMC": (linear, False, SGHMC),
    "logistic-SGLDCV": (logistic, False, partial(SGLDCV, **NUMBA)),
    "logistic-SGLD": (logistic, False, PLAIN),
    "logistic-SGLD with replacement": (
        logistic,
        False,
        partial(PLAIN, gradient=Plain(batching="replace")),
    ),
    "logistic-SGHMC": (logistic, False, partial(SGHMC, **NUMBA)),
    "logistic-SVRG": (logistic, True, partial(PLAIN, gradient="svrg")),
}


@pytest.fixture
def gathered(monkeypatch):
    """Numbers of the minibatches whose groups were read together."""
    gathered: list[int] = []
    gather, go_on = GatheredRows._gather, GatheredRows._go_on

    def counted(self, index):
        gathered.append(len(index))
        gather(self, index)

    def gone_on(self, index):
        after = go_on(self, index)
        if after is not None:
            gathered.append(len(after))
        return after

    monkeypatch.setattr(GatheredRows, "_gather", counted)
    monkeypatch.setattr(GatheredRows, "_go_on", gone_on)
    return gathered


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_draws_are_those_in_memory(case, gathered):
    write, equal, step = CASES[case]
    arrays = records(equal=equal)
    model, rows = in_memory(write, arrays), small_source(arrays)
    expected = draws_of(model, step)
    found = draws_of(on_source(write, rows), partial(step, rows=rows))
    assert len(gathered) > 3  # stretches of the memory
    assert_equal_draws(found, expected)
    if case in ("linear-SGLDCV", "logistic-SGLDCV"):
        expected = recover(expected, model, random_seed=1, progressbar=False)
        found = recover(found, on_source(write, rows), random_seed=1, progressbar=False)
        np.testing.assert_array_equal(found["posterior"]["z"], expected["posterior"]["z"])


@pytest.mark.slow
def test_sample_integrates_local_variables_out(tmp_path, gathered):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    arrays = records(equal=False)
    columns = {name: values for name, values in arrays.items() if name != "X"}
    table = pd.DataFrame({"a": arrays["X"][:, 0], "b": arrays["X"][:, 1], **columns})
    for number, part in enumerate(np.array_split(np.arange(len(table)), 3)):
        table.iloc[part].to_parquet(tmp_path / f"{number}.parquet", row_group_size=200)
    rows = open_rows(tmp_path, {"X": ["a", "b"], **{name: name for name in columns}}, memory=12_000)
    runs = []
    for model, step in (
        (in_memory(known, arrays), SGLDCV),
        (on_source(known, rows), partial(SGLDCV, rows=rows)),
    ):
        with model:
            runs.append(sample(draws=10, tune=5, **RUN, step=step))
    assert "z" in runs[0]["posterior"]
    assert len(gathered) > 3  # stretches of the memory
    assert_equal_draws(runs[1], runs[0])


@pytest.mark.slow
def test_exact_law_of_a_linear_mixed_model():
    """The posterior of the common mean of groups is a Gaussian with known moments."""
    rng = np.random.default_rng(0)
    n_groups = 400
    group = rng.permutation(np.r_[np.arange(n_groups), rng.integers(0, n_groups, size=1200)])
    y = 1 + 0.7 * rng.normal(size=n_groups)[group] + rng.normal(size=len(group))
    rows = CountedRows({"group": group, "y": y})
    rows.memory = 5_000
    with pm.Model() as model:
        codes, outcome = rows.head("group", "y", rows=FIRST_ROWS + 1)
        mean = pm.Normal("mean", 0, 10)
        z = pm.Normal("z", 0, 0.7, shape=n_groups)
        pm.Normal("score", mean + z[codes], 1, observed=outcome)
    sizes = np.bincount(group)
    precisions = 1 / (1 / sizes + 0.7**2)
    precision = 1 / 10**2 + precisions.sum()
    center = (precisions * np.bincount(group, y) / sizes).sum() / precision
    idata = draws_of(model, partial(SGLDCV, rows=rows, **NUMBA), draws=1500, tune=300)
    draws = (idata["posterior"]["mean"].to_numpy() - center) * precision**0.5
    count = float(pm.stats.ess(idata)["mean"])
    assert abs(draws.mean()) < 4.5 * draws.std() / np.sqrt(count)
    # The stated bias of a variance is 5 %.
    variance_error = np.sqrt(2 / count)
    assert -4.5 * variance_error < draws.var() - 1 < 0.06 + 4.5 * variance_error


@pytest.mark.slow
def test_processes_have_the_same_draws():
    arrays = records(equal=False)
    rows = small_source(arrays)
    model, step = on_source(linear, rows), partial(SGLDCV, rows=rows, **NUMBA)
    assert_equal_draws(draws_of(model, step, cores=2), draws_of(model, step))


# --- Reading ------------------------------------------------------------------------------------


class NotedRows(CountedRows):
    """A source that notes the numbers of the rows that are selected."""

    def __init__(self, arrays, rows=100):
        super().__init__(arrays, rows)
        self.selected: list[int] = []

    def select(self, number, within, names):
        self.selected += (self.offsets[number] + within).tolist()
        return super().select(number, within, names)


@pytest.fixture
def groups():
    arrays = records(equal=False)
    made = GroupsOfSource(NotedRows(arrays), "group", GROUPS)
    for name in ("X", "score"):
        made.whole(name, arrays[name].astype(float))
    return made, arrays


def is_group(rows, number, arrays):
    """Whether rows have the records of a group."""
    place, count = rows[1][number], int((arrays["group"] == number).sum())
    return all(
        np.array_equal(values[place : place + count], arrays[name][arrays["group"] == number])
        for name, values in zip(("X", "score"), rows[2:], strict=True)
    )


def test_records_of_the_groups_are_read_and_no_others(groups, rng):
    made, arrays = groups
    numbers = rng.integers(GROUPS, size=40)
    rows = made.take(numbers)
    np.testing.assert_array_equal(rows[0], numbers)
    assert all(is_group(rows, number, arrays) for number in numbers)
    expected = np.flatnonzero(np.isin(arrays["group"], numbers))
    np.testing.assert_array_equal(np.sort(made.source.selected), expected)
    others = np.setdiff1d(np.arange(GROUPS), numbers)
    assert (rows[1][others] == NOT_HELD).all()


def test_groups_of_two_readings(groups, rng):
    made, arrays = groups
    first, second = rng.integers(GROUPS, size=(2, 30))
    second[:5] = first[10:15]  # in both
    rows = made.joined(made.take(first), 8, made.take(second))
    np.testing.assert_array_equal(rows[0], np.concatenate([first[8:], second]))
    assert all(is_group(rows, number, arrays) for number in rows[0])
    present = np.isin(arrays["group"], rows[0]).sum()
    assert len(rows[2]) == present  # each record once


@pytest.mark.parametrize("memory", [10**9, 40_000])
def test_a_pass_reads_the_source_as_often_as_memory_asks(groups, memory):
    made, arrays = groups
    # Three 64-bit numbers, as many bytes of the source as two, and 32 bytes of reading.
    expected = -(-len(arrays["group"]) * (24 + 16 + 32) // memory)
    made.source.memory, before = memory, made.source.reads

    def found(_, rows):
        assert all(is_group(rows, number, arrays) for number in rows[0])
        return rows[0]

    numbers = list(made.each(found, None, 7, 2))
    np.testing.assert_array_equal(np.concatenate(numbers), np.arange(GROUPS))
    assert made.source.reads - before == expected * made.source.n_partitions


def test_the_log_says_how_often_a_pass_reads_the_source(groups, caplog):
    made, _ = groups
    made.source.memory = 40_000
    with caplog.at_level("INFO", "pymc"):
        made.tell_of_passes()
    assert "in the order of `group`, so each pass over the groups reads them 3 times" in caplog.text


def test_sorted_records_are_read_once():
    arrays = records(equal=False)
    order = np.argsort(arrays["group"], kind="stable")
    source = CountedRows({name: values[order] for name, values in arrays.items()}, rows=100)
    source.memory = 20_000
    made = GroupsOfSource(source, "group", GROUPS)
    made.whole("score", arrays["score"])
    before = source.reads
    list(made.each(lambda _, rows: None, None, 7, 1))
    assert source.reads - before == source.n_partitions


def test_memory_of_a_run():
    """A row takes its number and three 64-bit numbers a record, unless those of all rows fit."""
    arrays = records(equal=True)
    rows = small_source(arrays)
    posterior = Posterior(marginalize(on_source(known, rows), "z"), rows=rows)
    assert batching_of(posterior, "shuffle", 5).most_minibatches == 12_000 // (5 * (8 + 10 * 24))
    rows.memory = 10**6
    expected = (10**6 - 10 * GROUPS * 24) // (5 * 8)
    assert batching_of(posterior, "shuffle", 5).most_minibatches == expected


def test_a_group_without_records_has_no_weight():
    arrays = records(equal=False)
    kept = arrays["group"] != 70
    arrays = {name: values[kept] for name, values in arrays.items()}
    rows = small_source(arrays)
    found = Posterior(marginalize(on_source(known, rows), "z"), rows=rows)
    position = np.array([0.3, -0.5])
    codes = arrays["group"] - (arrays["group"] > 70)
    dense = {**arrays, "group": codes}

    def without_it(X, group, score, _):
        beta = pm.Normal("beta", 0, 2, shape=2)
        z = pm.Normal("z", 0, 0.7, shape=GROUPS - 1)
        pm.Normal("y", X @ beta + z[group], 1.0, observed=score)

    expected = Posterior(marginalize(in_memory(without_it, dense), "z"))
    np.testing.assert_allclose(
        found.log_density(position), expected.log_density(position), rtol=1e-12
    )


# --- What is refused ----------------------------------------------------------------------------


def test_the_records_are_not_taken_from_elsewhere(groups):
    _, arrays = groups
    rows = small_source(arrays)
    model = on_source(linear, rows)
    marginal = marginalize(model, "z")
    with marginal:
        with pytest.raises(ModelError, match=r"`rows` should be this source, but is None\. Pass"):
            SGLDCV()
        fewer = CountedRows({name: arrays[name] for name in ("X", "group")})
        with pytest.raises(ModelError, match="`rows` should be this source, but is another source"):
            SGLDCV(rows=fewer)
        with pytest.raises(ModelError, match="only step methods of this package read"):
            pm.NUTS()
        with pytest.raises(ModelError, match="only step methods of this package read"):
            marginal.compile_logp()(marginal.initial_point())
    with pytest.raises(ModelError, match="all of them are needed in memory here"):
        fit_marginal(model, "z")
    with model, pytest.raises(ModelError, match="all of them are needed in memory here"):
        SGLDCV(gradient=LocalSampling("z"))


def test_codes_beyond_the_groups_in_later_rows(groups):
    _, arrays = groups
    codes = arrays["group"].copy()
    codes[-3] = GROUPS
    model = on_source(linear, CountedRows({**arrays, "group": codes}))
    with pytest.raises(RowsError, match=f"groups from 0 to {GROUPS - 1}, but row {len(codes) - 3}"):
        marginalize(model, "z")


def test_models_whose_rows_are_not_those_of_groups(groups):
    _, arrays = groups
    others = {"site": arrays["group"][::-1].copy(), "other": arrays["score"][::-1].copy()}
    others["alike"] = np.r_[arrays["group"][:FIRST_ROWS], others["site"][FIRST_ROWS:]]
    rows = CountedRows({**arrays, **others})

    def model_of(write, count=FIRST_ROWS):
        with pm.Model() as model:
            z = pm.Normal("z", shape=GROUPS)
            slope = pm.Normal("slope")
            write(z, slope, rows.head("group", "score", "site", "other", rows=count))
        return model

    def two_columns(z, slope, data):
        pm.Normal("first", slope + z[data[0]], 1.0, observed=data[1])
        pm.Normal("second", z[data[2]], 1.0, observed=data[3])

    def no_groups(z, slope, data):
        pm.Normal("first", slope + z[data[0]], 1.0, observed=data[1])
        pm.Normal("alone", slope, 1.0, observed=data[3])

    def no_column(z, slope, data):
        pm.Normal("first", slope + z[data[0]], 1.0, observed=np.zeros(FIRST_ROWS))

    def computed(z, slope, data):
        pm.Normal("first", slope + z[abs(data[0])], 1.0, observed=data[1])

    def alike(z, slope, data):
        """Codes of two columns that have the same first rows."""
        pm.Normal(
            "first",
            slope + z[data[0]] + z[rows.head("alike", rows=FIRST_ROWS)],
            1.0,
            observed=data[1],
        )

    def plain(z, slope, data):
        pm.Normal("first", slope + z[data[0]], 1.0, observed=data[1])

    for write, message in (
        (two_columns, r"by one column of `rows`, but do so by `group`, `site`\. Leave"),
        (no_groups, r"`alone` depends on `other`, of which the model has the first rows only"),
        (no_column, r"have as many rows as those that `rows\.head` returned, 400, but are no"),
        (alike, r"of `first` belong to groups by two different index arrays"),
        (computed, r"codes of the groups .* should be a column of `rows`"),
    ):
        with pytest.raises(ModelError, match=message):
            marginalize(model_of(write), "z")
    with pytest.raises(ModelError, match=r"Choose another number of rows, `rows\.head"):
        marginalize(model_of(plain, GROUPS), "z")


def test_a_record_that_is_not_finite(groups):
    _, arrays = groups
    score = arrays["score"].copy()
    score[1000] = np.nan
    rows = small_source({**arrays, "score": score})
    number = arrays["group"][1000]
    with (
        marginalize(on_source(known, rows), "z"),
        pytest.raises(
            ModelError, match=f"records of group {number} .* `score` has nan in row 1000, in"
        ),
    ):
        SGLDCV(rows=rows)
