"""Chains on rows of a source have the draws of chains on the same rows in memory."""

from __future__ import annotations

from functools import partial
from itertools import combinations
from threading import current_thread, main_thread

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import (
    MALA,
    OSGFS,
    SGHMC,
    SGLD,
    SGLDCV,
    ModelError,
    Plain,
    SecondOrder,
    polish,
    sample,
)
from pymc_sgmcmc import batching as batching_module
from pymc_sgmcmc import gathering as module
from pymc_sgmcmc.batching import RowOrder, ShuffledWindows, numbers_without
from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.gathering import GatheredRows
from tests.support.sampling import QUICK
from tests.support.sources import CountedRows

pytestmark = pytest.mark.usefixtures("without_compiler")

NUMBA = {"compile_kwargs": {"mode": "NUMBA"}}
ROWS = 3011


@pytest.fixture(scope="module")
def arrays():
    """The first rows of both columns of `Z` are alike, and no others are."""
    rng = np.random.default_rng(7)
    X = rng.normal(size=(ROWS, 3)).astype("float32")
    first, second = rng.normal(size=(2, ROWS))
    second[:1000] = first[:1000]
    log_odds = X @ [0.5, -1.0, 0.2] + 0.3 * first - 0.2 * second
    y = (rng.random(ROWS) < 1 / (1 + np.exp(-log_odds))).astype("int8")
    return {"X": X, "first": first, "second": second, "y": y}


def logistic(variables):
    beta = pm.Normal("beta", 0, 1, shape=3)
    slopes = pm.Normal("slopes", 0, 1, shape=2)
    X, first, second, y = variables
    pm.Bernoulli("outcome", logit_p=X @ beta + slopes[0] * first + slopes[1] * second, observed=y)


def in_memory(arrays):
    with pm.Model() as model:
        logistic([pm.Data(name, values) for name, values in arrays.items()])
    return model


def on_source(rows, count=1000):
    with pm.Model() as model:
        logistic(rows.head(*rows.columns, rows=count))
    return model


def draws_of(model, step, **settings):
    with model:
        return sample(
            **{"draws": 60, "tune": 40, "chains": 2, "cores": 1, "random_seed": 3, **settings},
            step=partial(step, **NUMBA),
            progressbar=False,
            quiet=True,
            compute_convergence_checks=False,
        )


PLAIN = partial(SGLD, batch_size=200, step_size=1e-4, preconditioner="identity")
STEPS = {
    "SGLDCV": SGLDCV,
    "with replacement": partial(SGLDCV, gradient=SecondOrder(batching="replace")),
    "SGLD": PLAIN,
    "SGLD with replacement": partial(PLAIN, gradient=Plain(batching="replace")),
    "SVRG": partial(SGLD, batch_size=50, gradient="svrg"),
    "SGHMC": SGHMC,
    "OSGFS": partial(OSGFS, batch_size=100),
}


@pytest.mark.parametrize("name", STEPS)
def test_draws_are_those_of_rows_in_memory(arrays, name, monkeypatch):
    monkeypatch.setattr(batching_module, "LISTED_ROWS", 100)  # as with many rows
    rows = CountedRows(arrays)
    expected = draws_of(in_memory(arrays), STEPS[name])
    found = draws_of(on_source(rows), partial(STEPS[name], rows=rows))
    for group, names in (("posterior", ("beta", "slopes")), ("sample_stats", ("gradient",))):
        for each in names:
            np.testing.assert_array_equal(found[group][each], expected[group][each])


@pytest.mark.slow
@pytest.mark.parametrize("minibatches", [1, 37, 200, 1000])
def test_memory_does_not_change_the_draws(arrays, minibatches, monkeypatch):
    rows = CountedRows(arrays)
    step = partial(SGLDCV, batch_size=20, thin=3, rows=rows)
    expected = draws_of(on_source(rows), step)
    made = module.GatheredRows

    def small(*arguments, **options):
        gathered = made(*arguments, **options)
        gathered._most_bytes = minibatches * 20 * gathered._row_bytes
        return gathered

    monkeypatch.setattr("pymc_sgmcmc.gradient_estimators.minibatches.GatheredRows", small)
    went_on = []
    go_on = module.GatheredRows._go_on

    def counted(*arguments):
        after = go_on(*arguments)
        went_on.append(after is not None)
        return after

    monkeypatch.setattr(module.GatheredRows, "_go_on", counted)
    found = draws_of(on_source(rows), step)
    # With several runs of transitions in a stretch, nearly all are read ahead.
    assert minibatches in (1, 1000) or sum(went_on) > 1
    np.testing.assert_array_equal(found["posterior"]["beta"], expected["posterior"]["beta"])


@pytest.mark.parametrize("error", [RowsError("The file vanished."), MemoryError("No memory.")])
def test_draws_so_far_are_kept_where_rows_are_lost(arrays, error):
    class Vanishing(CountedRows):
        left = np.inf

        def take(self, numbers, names=None):
            self.left -= 1
            if self.left < 0:
                raise error
            return super().take(numbers, names)

    rows = Vanishing(arrays)
    model, step = on_source(rows), partial(SGLDCV, batch_size=20, thin=3, rows=rows)
    settings = {"chains": 1, "draws": 400}
    expected = draws_of(model, step, **settings)["posterior"]["beta"]
    rows.memory = 300 * 20 * 6 * 8  # 300 minibatches
    made = step(**NUMBA, model=model)
    rows.left = 3
    with pytest.raises(type(error)) as caught:
        draws_of(model, lambda **_: made, **settings)
    kept = caught.value.idata["posterior"]["beta"]
    assert 0 < kept.sizes["draw"] < 400
    np.testing.assert_array_equal(kept, expected[:, : kept.sizes["draw"]])
    assert caught.value.__notes__ == ["Its attribute `idata` has the draws so far."]


@pytest.mark.slow
def test_processes_and_pymc_have_the_same_draws(arrays):
    rows = CountedRows(arrays)
    model, step = on_source(rows), partial(SGLDCV, rows=rows)
    expected = draws_of(model, step)["posterior"]["beta"]
    np.testing.assert_array_equal(draws_of(model, step, cores=2)["posterior"]["beta"], expected)
    with model:
        idata = pm.sample(
            60, tune=40, chains=2, cores=1, random_seed=3, step=step(**NUMBA), progressbar=False,
            quiet=True, compute_convergence_checks=False,
        )  # fmt: skip
    np.testing.assert_array_equal(idata["posterior"]["beta"], expected)


def test_rows_of_all_chains_are_read_in_one_pass(arrays):
    rows = CountedRows(arrays)
    model = on_source(rows)
    with model:
        step = SGLDCV(rows=rows, thin=5, **NUMBA)
    before = rows.reads
    draws_of(model, lambda **_: step, chains=4)
    assert rows.reads - before <= rows.n_partitions


def test_the_setup_takes_few_passes(arrays):
    """Also where the noise of rows is measured at many points."""
    rows = CountedRows(arrays)
    with on_source(rows):
        SGLDCV(rows=rows, compile_kwargs=QUICK)
    assert rows.reads <= 20 * rows.n_partitions


@pytest.mark.slow
def test_rows_that_every_transition_takes(arrays):
    outliers = {**arrays, "X": arrays["X"].copy()}
    outliers["X"][-20:] *= 60
    rows = CountedRows(outliers)
    with in_memory(outliers):
        expected = SGLDCV(**NUMBA)
    with on_source(rows):
        step = SGLDCV(rows=rows, **NUMBA)
    assert step.run_settings.attributes["kept_rows"] > 0
    np.testing.assert_array_equal(
        step.run_settings.arrays["kept_rows"], expected.run_settings.arrays["kept_rows"]
    )
    assert step.step_size == expected.step_size


@pytest.mark.parametrize(
    ("scheme", "share"), [("shuffle", 1.0), ("shuffle", 1e3), ("replace", 1.0)]
)
def test_stretches_have_the_rows_of_the_minibatches(scheme, share):
    """Transitions in runs of random lengths, with one pending minibatch, as a chain takes them."""
    gathered = GatheredRows(
        lambda numbers: [numbers],
        50_000,
        4,
        scheme=scheme,
        most_bytes=60 * 4 * 8,
        noise_share=share,
    )
    rng, lengths = np.random.default_rng(3), np.random.default_rng(4)
    pending, left, read = gathered.draw(rng, 1), 600, []
    while left:
        count = min(left, int(lengths.integers(1, 25)))
        left -= count
        index = np.concatenate([pending, gathered.draw(rng, count)])
        starts = gathered.in_memory(index, rng, left)
        rows = gathered._shared[0].get_value(borrow=True)
        assert len(rows) <= 60 * 4
        for start, each in zip(starts, index, strict=True):
            np.testing.assert_array_equal(rows[start : start + 4], gathered.selected(each))
        pending, read = index[-1:], [*read, gathered._following is not None]
    assert any(read)


def test_errors_of_the_thread_that_reads_are_raised():
    def read(numbers):
        if len(numbers) > 4 and current_thread() is not main_thread():
            raise RowsError("The file has vanished.")
        return [numbers]

    gathered = GatheredRows(read, 1000, 4, scheme="replace", most_bytes=20 * 4 * 8)
    rng = np.random.default_rng(3)
    gathered.in_memory(gathered.draw(rng, 5), rng, 100)
    with pytest.raises(RowsError, match="vanished"):
        gathered.in_memory(gathered.draw(rng, 9), rng, 90)


# --- Indices and probabilities ------------------------------------------------------------------


def test_each_window_of_an_order_is_equally_likely_to_have_a_row():
    """By enumeration of all starts: each row is in n of N windows, and in none twice."""
    read = lambda numbers: [numbers]  # noqa: E731
    for excluded in (None, np.array([2, 5])):
        gathered = GatheredRows(read, 11, 4, scheme="shuffle", excluded=excluded, noise_share=1.0)
        shuffled = ShuffledWindows([np.arange(11.0)], 4, excluded=excluded)
        for seed in (batching_module.FIRST_ORDER, 8):
            gathered.set_order(seed)
            shuffled.set_order(seed)
            windows = [gathered.selected(start) for start in range(gathered.n_rows)]
            counts = np.bincount(np.concatenate(windows), minlength=11)
            expected = np.full(11, 4)
            expected[[] if excluded is None else excluded] = 0
            np.testing.assert_array_equal(counts, expected)
            for start, window in enumerate(windows):
                assert len(set(window)) == 4
                np.testing.assert_array_equal(window, shuffled.selected(start))


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 4096])
def test_an_order_has_each_row_once(count, monkeypatch):
    monkeypatch.setattr(batching_module, "LISTED_ROWS", 0)
    monkeypatch.setattr(batching_module, "ORDER_PIECE", 100)
    order = RowOrder(count, 5)(np.arange(count))
    np.testing.assert_array_equal(np.sort(order), np.arange(count))
    places = np.random.default_rng(1).integers(count, size=(7, 3))
    np.testing.assert_array_equal(RowOrder(count, 5)(places), order[places])


def test_rows_and_pairs_of_windows_have_equal_probabilities(monkeypatch):
    """Over orders; a count is within four standard deviations of its expectation."""
    monkeypatch.setattr(batching_module, "LISTED_ROWS", 0)
    total, size, orders = 31, 5, 20_000
    windows = np.array([RowOrder(total, seed)(np.arange(size)) for seed in range(orders)])
    counts = np.bincount(windows.ravel(), minlength=total)
    expected = orders * size / total
    assert np.abs(counts - expected).max() < 4 * np.sqrt(expected * (1 - size / total))
    pairs = np.zeros((total, total))
    for first, second in combinations(range(size), 2):
        np.add.at(pairs, (windows[:, first], windows[:, second]), 1)
    pairs = (pairs + pairs.T)[np.triu_indices(total, 1)]
    probability = size * (size - 1) / (total * (total - 1))
    deviation = np.sqrt(orders * probability * (1 - probability))
    scores = (pairs - orders * probability) / deviation
    assert np.abs(scores).max() < 4.5
    assert abs(scores.std() - 1) < 0.1


def test_places_without_excluded_numbers(rng):
    excluded = rng.choice(50, 9, replace=False)
    remaining = np.setdiff1d(np.arange(50), excluded)
    np.testing.assert_array_equal(numbers_without(excluded, np.arange(41)), remaining)


# --- What is refused ----------------------------------------------------------------------------


def test_faults_in_later_rows_are_found(arrays):
    for name, value, message in [
        ("X", np.nan, "density of row 2500"),
        ("y", 3, "density of row 2500"),
    ]:
        faulty = {**arrays, name: arrays[name].copy()}
        faulty[name][2500] = value
        rows = CountedRows(faulty)
        with on_source(rows), pytest.raises(ModelError, match=message):
            SGLDCV(rows=rows, **NUMBA)


def test_codes_that_the_first_rows_do_not_have(rng):
    codes = np.zeros(3000, dtype="int64")
    codes[:2000] = rng.integers(4, size=2000)
    codes[2900] = 4
    rows = CountedRows({"group": codes, "y": rng.normal(size=3000)})
    with pm.Model():
        group, y = rows.head("group", "y")
        effects = pm.Normal("effects", 0, 1, shape=4)
        pm.Normal("outcome", effects[group], 1.0, observed=y)
        with pytest.raises(
            ModelError, match=r"`group` should have codes from 0 to 3, but row 2900"
        ):
            SGLDCV(rows=rows, **NUMBA)


def test_missing_categories_as_pandas_codes_them(rng):
    """A code of -1 would select the last entry."""
    codes = rng.integers(4, size=3000)
    codes[2900] = -1
    rows = CountedRows({"group": codes, "y": rng.normal(size=3000)})
    with pm.Model():
        group, y = rows.head("group", "y")
        effects = pm.Normal("effects", 0, 1, shape=4)
        pm.Normal("outcome", effects[group], 1.0, observed=y)
        with pytest.raises(ModelError, match=r"row 2900 has the code -1\. It would select from"):
            SGLDCV(rows=rows, **NUMBA)


def test_what_needs_all_rows_is_refused(arrays):
    rows = CountedRows(arrays)
    with on_source(rows) as model:
        with pytest.raises(ValueError, match="`MALA` takes all rows in each transition"):
            MALA(rows=rows)
        with pytest.raises(ValueError, match='Use `gradient="cv"` or "svrg"'):
            SGLD(rows=rows, gradient="saga")
        with pytest.raises(ValueError, match="not gathered for JAX"):
            SGLDCV(rows=rows, compile_kwargs={"mode": "JAX"})
    plain = PLAIN(rows=rows, model=model, compile_kwargs=QUICK)
    idata = draws_of(model, lambda **_: plain, draws=4, tune=0)
    with pytest.raises(ValueError, match="The run read its rows from a source"):
        polish(idata, model)


def test_models_that_are_not_written_on_the_source(arrays):
    rows = CountedRows(arrays)
    with pm.Model():
        mean = pm.Normal("mean")
        pm.Normal("outcome", mean, 1.0, observed=np.zeros(1000))
        with pytest.raises(ModelError, match=r"Write it on what `rows.head\(\"...\"\)` returns"):
            SGLDCV(rows=rows)
    with pm.Model():
        first = rows.head("first", rows=1000)
        slope = pm.Normal("slope")
        pm.Normal("outcome", slope * first, 1.0, observed=np.zeros(1000))
        with pytest.raises(ModelError, match="are no column of `rows`"):
            SGLDCV(rows=rows)
    with pytest.raises(TypeError, match="what `open_rows` returns"), on_source(rows):
        SGLDCV(rows=3)
    with pm.Model():
        first = pm.Data("first", 2 * arrays["first"][:1000])
        slope = pm.Normal("slope")
        pm.Normal("outcome", slope, 1.0, observed=first)
        with pytest.raises(ModelError, match="`first` have the name of a column of `rows`, but"):
            SGLDCV(rows=rows)


def test_a_source_that_is_not_passed(arrays):
    """The draws would be those of the first rows."""
    with on_source(CountedRows(arrays)):
        with pytest.raises(ModelError, match=r"are the first \d+ of \d+ rows of a source, and"):
            SGLDCV()
        with pytest.raises(ModelError, match=r"Pass the source as `rows`, for example `SGLDCV"):
            sample(step=SGLDCV)
