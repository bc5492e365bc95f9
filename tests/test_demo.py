"""``python -m pymc_sgmcmc``: tables and their coding, the reference, reports, and bad input."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import errno
import importlib
import importlib.util
import io
import re
import runpy
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from PIL import Image
from rich.console import Console
from scipy import optimize, special

from pymc_sgmcmc import BatchSizeWarning, datasets
from pymc_sgmcmc.demo import cli, data, fit, reference, report
from pymc_sgmcmc.demo.cli import main
from pymc_sgmcmc.demo.data import Design, Table, code_outcome, load_example, make_design, simulate
from pymc_sgmcmc.demo.errors import InputError
from pymc_sgmcmc.demo.reference import Laplace, laplace


def make_table(outcome=(0, 1, 1, 0, 1, 0), **columns) -> Table:
    return Table("table", pd.DataFrame(columns), pd.Series(list(outcome), name="y"), "memory")


def logistic_design(rng, n_rows=2000, coefficients=(0.5, -1.0, 0.3)) -> Design:
    coefficients = np.array(coefficients)
    X = np.column_stack([np.ones(n_rows), rng.normal(size=(n_rows, len(coefficients) - 1))])
    y = rng.random(n_rows) < special.expit(X @ coefficients)
    names = ("intercept", *(f"x{number}" for number in range(1, len(coefficients))))
    return Design("simulated", X, y, names, "y = 1")


def laplace_trace(approximation: Laplace, rng, names, chains=2, draws=400) -> xr.DataTree:
    values = approximation.mode + approximation.sd * rng.normal(
        size=(chains, draws, len(approximation.mode))
    )
    dims = ["chain", "draw", "feature"]
    coords = {"chain": range(chains), "draw": range(draws), "feature": list(names)}
    return xr.DataTree.from_dict({"posterior": xr.Dataset({"beta": (dims, values)}, coords=coords)})


# --- Tables -------------------------------------------------------------------------------------


def test_default_table_needs_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("PYMC_SGMCMC_DATA", str(tmp_path))
    table = load_example(data.DEFAULT_EXAMPLE)
    assert len(table.outcome) == 20_190
    assert table.outcome.mean() == pytest.approx(0.688, abs=1e-3)
    assert table.origin == "package statsmodels"


@pytest.mark.parametrize(
    ("name", "n_rows", "n_columns"),
    [("contraception", 1_934, 6), ("skin", 245_057, 4), ("covertype", 92_962, 14)],
)
def test_examples_in_a_folder(monkeypatch, data_folder, name, n_rows, n_columns):
    monkeypatch.setenv("PYMC_SGMCMC_DATA", str(data_folder))
    design = make_design(load_example(name))
    assert design.X.shape == (n_rows, n_columns)
    assert np.linalg.matrix_rank(design.X) == n_columns


def test_each_example_has_a_loader_and_a_binary_outcome(monkeypatch):
    outcomes = {"mdvis": [0, 3], "affairs": [0.0, 0.1], "Cover_Type": [2, 7]}
    for name, example in data.EXAMPLES.items():
        assert example.load in vars(datasets).values()
        values = next(
            (values for column, values in outcomes.items() if column in example.label), [0, 1]
        )
        assert sorted(example.is_one(pd.Series(values))) == [False, True], name


def test_unknown_example_names_the_nearest():
    with pytest.raises(InputError, match=r"one of randhie, fair.* got 'Cod_RNA'.*mean 'cod-rna'"):
        load_example("Cod_RNA")


# --- The outcome --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "label"),
    [
        ([0, 1, 1], "y = 1 (0 stands for 0)"),
        ([1, 2, 2], "y = 2 (0 stands for 1)"),
        ([0.0, 1.0, 1.0], "y = 1 (0 stands for 0)"),
        ([False, True, True], "y = True (0 stands for False)"),
        (["no", "yes", "yes"], "y = 'yes' (0 stands for 'no')"),
        (pd.Categorical(["low", "high", "high"], ["low", "high"]), "y = 'high' (0 stands for 'l"),
        (pd.array([0, 1, 1], dtype="Int8"), "y = 1 (0 stands for 0)"),
    ],
)
def test_outcome_codes(values, label):
    y, found = code_outcome(pd.Series(values, name="y"))
    np.testing.assert_array_equal(y, [False, True, True])
    assert y.dtype == bool
    assert found.startswith(label)


@pytest.mark.parametrize("values", [[1, 1], [0, 1, 2], ["a", "b", "c"], [0.1, 0.2, 0.3]])
def test_outcome_without_two_values(values):
    with pytest.raises(InputError, match=r"'y' should have two distinct values.* but has [13] "):
        code_outcome(pd.Series(values, name="y"))


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_separators_and_decimal_commas(tmp_path, separator):
    path = tmp_path / "trial.csv"
    rows = [
        ("größe", "dose", "ward", "y"),
        ("1,5", "0,125", "a, b", "0"),
        ("-2", "1,250", "c", "1"),
        ("3,25e2", "", "c", "1"),
    ]
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=separator).writerows(rows)
    table = data.load_file(path, "y")
    assert list(table.features) == ["größe", "dose", "ward"]
    np.testing.assert_array_equal(table.features["größe"], [1.5, -2, 325])
    np.testing.assert_array_equal(table.features["dose"], [0.125, 1.25, np.nan])
    assert table.features["ward"].tolist() == ["a, b", "c", "c"]
    assert table.outcome.tolist() == [0, 1, 1]


def test_outcome_of_lists():
    with pytest.raises(InputError, match="'y' should be numbers, text or truth values"):
        code_outcome(pd.Series([[1], [2]], name="y"))


# --- The design matrix --------------------------------------------------------------------------


def test_numbers_are_standardised_and_indicators_left_alone():
    design = make_design(
        make_table(dose=[1e300, 2e300, 4e300, 0, 3e300, 0], old=[0, 1, 1, 0, 0, 1])
    )
    assert design.feature_names == ("intercept", "dose", "old")
    np.testing.assert_array_equal(design.X[:, 0], 1)
    np.testing.assert_allclose([design.X[:, 1].mean(), design.X[:, 1].std()], [0, 1], atol=1e-12)
    np.testing.assert_array_equal(design.X[:, 2], [0, 1, 1, 0, 0, 1])
    np.testing.assert_array_equal(design.y, [0, 1, 1, 0, 1, 0])
    assert design.notes == ()


def test_text_categories_and_truth_values_become_indicators():
    design = make_design(
        make_table(
            ward=["b", "a", "c", "b", "a", "c"],
            grade=pd.Categorical(["low", "high", "high", "low", "low", "high"], ["low", "high"]),
            smoker=[True, False, False, False, True, True],
        )
    )
    assert design.feature_names == (
        "intercept",
        "ward=b",
        "ward=c",
        "grade=high",
        "smoker=True",
    )
    np.testing.assert_array_equal(design.X[:, 1], [1, 0, 0, 1, 0, 0])
    assert "coefficients of ward compare with ward = a" in design.notes
    assert "coefficients of grade compare with grade = low" in design.notes


def test_incomplete_rows_are_dropped_and_counted():
    design = make_design(
        make_table(
            outcome=[0, 1, None, 0, 1, 0],
            dose=[1.0, 2.0, 3.0, np.nan, 5.0, 6.0],
            ward=["a", None, "a", "b", "b", "a"],
        )
    )
    assert design.n_rows == 3
    assert "dropped 3 of 6 rows, which have missing values (in dose, ward, y)" in design.notes


def test_columns_without_any_value_are_dropped_and_not_the_rows():
    design = make_design(
        make_table(
            dose=[1.0, 2.0, np.nan, 4.0, 5.0, 6.0], notes=[None] * 6, spare=np.full(6, np.nan)
        )
    )
    assert design.feature_names == ("intercept", "dose")
    assert design.n_rows == 5
    assert design.notes == (
        "dropped notes, spare: no value in any row",
        "dropped 1 of 6 rows, which have missing values (in dose)",
    )


def test_outcome_without_any_value():
    with pytest.raises(InputError, match="'y' is missing in every row"):
        make_design(make_table(outcome=[None] * 3, x=[1, 2, 3]))


def test_constant_and_collinear_columns_are_dropped_with_a_note(rng):
    a, b = rng.normal(size=(2, 50))
    design = make_design(
        make_table(
            outcome=rng.integers(2, size=50),
            a=a,
            always=np.full(50, 7),
            b=b,
            both=1e6 * (a - 3 * b) + 5,
            word=["same"] * 50,
            nearly=a + 1e-3 * rng.normal(size=50),
        )
    )
    assert design.feature_names == ("intercept", "a", "b", "nearly")
    assert design.notes == (
        "dropped always, word: the same value in every row",
        "dropped both: collinear, determined by a, b",
    )


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"code": [f"c{n}" for n in range(25)]},
            r"'code' has 25 different values \(c0, c1, c10, c11 and 21 more\).* at most 20",
        ),
        ({"mixed": [*range(24), "n/a"]}, "'mixed' has 25 different values .* not"),
        ({"day": pd.date_range("2020-01-01", periods=25)}, "'day' has the type datetime64"),
        ({"x": [np.inf, *range(24)]}, "'x' has 1 infinite values"),
        ({"x": np.arange(25) * 1j}, "'x' has complex numbers"),
        ({"x": [[1]] * 25}, "'x' has the type object"),
        ({"x": np.full(25, np.nan)}, "The outcome is the only column with values"),
        (
            {"a": [np.nan, *range(24)], "b": [1, *[np.nan] * 24]},
            r"Every row has a missing value \(in a, b\)",
        ),
        ({"x": np.ones(25)}, "No column differs between rows"),
        ({"a=b": range(25), "a": ["a", "b", "a", "b", "a"] * 5}, "a=b stands for two"),
        ({"intercept": range(25)}, "intercept stands for two"),
    ],
)
def test_columns_that_cannot_be_coded(columns, message):
    outcome = np.arange(25) % 2
    with pytest.raises(InputError, match=message):
        make_design(make_table(outcome=outcome, **columns))


def test_simulated_rows_follow_the_model(rng):
    design = logistic_design(rng)
    coefficients = np.array([0.2, -0.7, 1.0])
    larger = simulate(design, coefficients, 200_000, seed=3)
    assert larger.X.shape == (200_000, 3)
    assert larger.feature_names == design.feature_names
    found = laplace(larger.X, larger.y, 2.5)
    assert np.abs((found.mode - coefficients) / found.sd).max() < 4
    np.testing.assert_array_equal(larger.y, simulate(design, coefficients, 200_000, seed=3).y)
    assert simulate(design, coefficients, 10, seed=3).n_rows == 10


def test_rows_that_do_not_fit_into_memory():
    data.check_memory(1_000_000, 10)
    with pytest.raises(InputError, match=r"GiB.* Ask for at most \d+ rows"):
        data.check_memory(10**13, 10)


# --- The reference ------------------------------------------------------------------------------


def test_laplace_is_the_mode_and_the_curvature(rng, monkeypatch):
    design = logistic_design(rng, n_rows=300)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 100)  # nine chunks
    found = laplace(design.X, design.y, prior_sd=0.7)

    def negative_log_posterior(beta):
        eta = design.X @ beta
        likelihood = special.log_expit(np.where(design.y, eta, -eta)).sum()
        return beta @ beta / (2 * 0.7**2) - likelihood

    mode = optimize.minimize(negative_log_posterior, np.zeros(3), method="Nelder-Mead", tol=1e-10).x
    np.testing.assert_allclose(found.mode, mode, atol=1e-5)
    width, unit = 1e-4, np.eye(3)
    hessian = np.array(
        [
            [
                sum(
                    sign_a
                    * sign_b
                    * negative_log_posterior(mode + width * (sign_a * a + sign_b * b))
                    for sign_a in (1, -1)
                    for sign_b in (1, -1)
                )
                / (4 * width**2)
                for b in unit
            ]
            for a in unit
        ]
    )
    np.testing.assert_allclose(found.sd, np.sqrt(np.diag(np.linalg.inv(hessian))), rtol=1e-4)
    assert not found.separated


def test_laplace_agrees_with_statsmodels():
    logit = pytest.importorskip("statsmodels.discrete.discrete_model").Logit
    design = make_design(load_example("fair"))
    expected = logit(design.y.astype(float), design.X).fit(disp=False)
    found = laplace(design.X, design.y, prior_sd=1e6)
    np.testing.assert_allclose(found.mode, expected.params, rtol=1e-6)
    np.testing.assert_allclose(found.sd, expected.bse, rtol=1e-6)


def test_laplace_arrives_from_afar_and_tells_separation():
    x = np.linspace(-100, 100, 400)  # a full Newton step from zero overshoots by far
    found = laplace(np.column_stack([np.ones(400), x]), x > 0.3, prior_sd=100.0)
    assert found.separated
    assert np.isfinite(found.sd).all()


# --- Settings -----------------------------------------------------------------------------------


def test_mode_and_batch_size(monkeypatch):
    assert fit.resolve_mode("JAX") == "JAX"
    monkeypatch.setattr(fit.pytensor.config, "cxx", "")
    assert fit.resolve_mode("auto") == "NUMBA"
    assert [fit.resolve_batch_size(None, n) for n in (10, 10_000)] == [10, 500]
    with pytest.raises(InputError, match="at most the number of rows, 10, but got 11"):
        fit.resolve_batch_size(11, 10)


def test_warnings_of_the_step_method_are_reported_and_others_passed_on():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("small batch", BatchSizeWarning, stacklevel=1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert fit._messages(caught[:1]) == ["small batch"]
    with pytest.warns(DeprecationWarning, match="old"):
        fit._messages(caught)


# --- Reports ------------------------------------------------------------------------------------


@pytest.fixture
def comparison(rng) -> pd.DataFrame:
    approximation = Laplace(np.array([-1.0, 0.2, 3.0]), np.array([0.02, 0.1, 0.5]), False)
    names = ["intercept", "age", "a rather long [name] of a column"]
    return report.compare(laplace_trace(approximation, rng, names), approximation)


def test_comparison_in_units_of_the_reference(comparison):
    error = comparison["mcse_mean"] / comparison["reference_sd"]
    assert (comparison["difference"].abs() < 5 * error).all()
    np.testing.assert_allclose(comparison["sd_ratio"], 1, atol=0.15)
    by_hand = (comparison["mean"] - comparison["reference_mean"]) / comparison["reference_sd"]
    np.testing.assert_allclose(comparison["difference"], by_hand)
    assert comparison.index.tolist()[1] == "age"


@pytest.mark.parametrize(
    ("width", "shown", "hidden"),
    [(80, ["Laplace", "r_hat"], ["eti89"]), (125, ["eti89"], ["mcse"]), (150, ["mcse"], [])],
)
def test_table_fits_the_console(comparison, width, shown, hidden):
    console = Console(width=width, file=io.StringIO(), markup=False, color_system=None)
    console.print(report.comparison_table(comparison, console))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "[name]" in text
    assert all(word in text for word in shown)
    assert not any(word in text for word in hidden)


def test_table_marks_what_is_not_a_number(comparison):
    comparison["r_hat"] = np.nan
    console = Console(width=80, file=io.StringIO())
    console.print(report.comparison_table(comparison, console))
    assert console.file.getvalue().count("–") == 3


def test_verdict(comparison):
    assert re.match(
        r"Means differ from the reference by at most 0\.\d\d of its sd .* up to 2\.5%\.$",
        report.comparison_verdict(comparison, inflation=0.05),
    )
    assert "not converged (r_hat up to 2.00)" in report.comparison_verdict(
        comparison.assign(r_hat=2.0), inflation=0.05
    )
    assert "not numbers" in report.comparison_verdict(
        comparison.assign(difference=np.nan), inflation=0.05
    )


def test_cost_of_two_tables():
    small = fit.Cost(
        n_rows=1000,
        set_up=9.0,
        full_gradient=1e-4,
        sampling=1.0,
        draws=4000,
        thin=11,
        transition=2e-5,
    )
    large = dataclasses.replace(small, n_rows=100_000, full_gradient=1e-2)
    assert small.draw == pytest.approx(2.2e-4)
    console = Console(width=80, file=io.StringIO())
    console.print(report.cost_table([small, large], batch_size=500))
    text = console.file.getvalue()
    assert re.search(r"100,000 +9 s +10 ms +20 µs +11 +220 µs +4,000 +1 s\n", text)
    assert max(map(len, text.splitlines())) <= 80
    assert report.cost_verdict([small]).startswith("Set-up took 90% of the time and sampling 10%")
    assert (
        "With 100 times the rows a gradient of all of them took 100 times as long, "
        "a transition 1 times." in report.cost_verdict([small, large])
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(123.4, "123 s"), (1.0, "1 s"), (0.09996, "100 ms"), (2.5e-5, "25 µs"), (1e-9, "0.001 µs")],
)
def test_duration(seconds, text):
    assert report.duration(seconds) == text


def test_trace_files(tmp_path, rng, monkeypatch):
    approximation = Laplace(np.zeros(2), np.ones(2), False)
    trace = laplace_trace(approximation, rng, ["intercept", "x"], draws=5)
    netcdf = report.write_trace(trace, tmp_path, "trace")
    assert netcdf == tmp_path / "trace.nc"
    with xr.open_datatree(netcdf, engine="h5netcdf") as read:
        xr.testing.assert_identical(read["posterior"].to_dataset(), trace["posterior"].to_dataset())

    installed = importlib.util.find_spec
    monkeypatch.setattr(
        report, "find_spec", lambda name: None if name == "h5netcdf" else installed(name)
    )
    for _ in range(2):  # the second time over the first
        store = report.write_trace(trace, tmp_path, "trace")
    assert store == tmp_path / "trace.zarr"
    with xr.open_datatree(store, engine="zarr", consolidated=False) as read:
        np.testing.assert_array_equal(read["posterior"]["beta"], trace["posterior"]["beta"])

    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert report.write_trace(trace, tmp_path, "trace") is None


def failing_write(path, *arguments):
    path.touch()
    raise OSError(errno.ENOSPC, "No space left on device")


def test_failed_write_leaves_what_was_there(tmp_path, rng, comparison, monkeypatch):
    trace = laplace_trace(Laplace(np.zeros(2), np.ones(2), False), rng, ["a", "b"], draws=5)
    for ending in ("trace.nc", "summary.csv", "plot.png"):
        (tmp_path / ending).write_text("before")
    monkeypatch.setattr(Path, "write_bytes", failing_write)
    with pytest.raises(OSError, match="No space"):
        report.write_trace(trace, tmp_path, "trace")
    with pytest.raises(OSError, match="No space"):
        report.write_summary(comparison, tmp_path / "summary.csv")
    with pytest.raises(OSError, match="No space"):
        report.write_plot(comparison, tmp_path / "plot.png", "SGLD-CV", "title")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("trace.nc", "summary.csv", "plot.png"), "before"
    )


def test_read_only_file_is_not_replaced(tmp_path, comparison, monkeypatch):
    path = tmp_path / "summary.csv"
    path.write_text("before")
    path.chmod(0o400)
    # The superuser may write to any file.
    monkeypatch.setattr(report.os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match=r"summary\.csv"):
        report.write_summary(comparison, path)
    assert path.read_text() == "before"


def test_plot_is_as_tall_as_it_has_coefficients(tmp_path, comparison):
    few = tmp_path / "few.png"
    report.write_plot(comparison, few, "SGLD-CV", "title")
    many = tmp_path / "many.png"
    longer = pd.concat([comparison] * 30)
    report.write_plot(longer.set_axis([f"x{n}" for n in range(90)]), many, "SGLD-CV", "title")
    with Image.open(few) as picture:
        assert picture.format == "PNG"
        width, height = picture.size
    with Image.open(many) as picture:
        assert picture.size[0] == width
        assert height + 1000 < picture.size[1] < 3000  # the first 60 alone
        assert len(np.unique(np.asarray(picture.convert("L")))) > 10  # something is drawn


# --- The command line ---------------------------------------------------------------------------

BAD_FILES = {
    "three.csv": "x,y\n1,0\n2,1\n3,2\n",
    "good.csv": "x,y\n1,0\n2,1\n3,1\n",
    "levels.csv": "x,y\n" + "".join(f"v{n},{n % 2}\n" for n in range(30)),
    "empty.csv": "",
    "latin-1.csv": "größe;y\n1;0\n2;1\n".encode("latin-1"),
    "latin-1-below.csv": b"x,y\n" + b"a,0\nb,1\n" * 50_000 + b"\xe9,1\n",
    "utf-16.csv": "x,y\n1,0\n2,1\n".encode("utf-16-le"),
    "thousands.csv": "x;y\n1,234;0\n2,345;1\n",
    "both.csv": "x;y\n1.234,5;0\n2.345,5;1\n",
    "decimal-commas.csv": "x,y\n1,5,0\n2,5,1\n",
    "ragged.csv": "x;y\n1;0\n2\n",
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--file", "none.csv", "--outcome", "y"], "no file 'none.csv'"),
        (["--file", "good.csv", "--outcome", "Y"], "no column 'Y'. Did you mean 'y'"),
        (["--file", "good.csv"], "--file needs --outcome"),
        (["--outcome", "y"], "--outcome needs --file"),
        (["--data", "fair", "--outcome", "y"], "--outcome needs --file"),
        (["--data", "fair", "--file", "good.csv"], "not allowed with"),
        (["--file", "three.csv", "--outcome", "y"], "'y' should have two distinct values"),
        (["--file", "levels.csv", "--outcome", "y"], "'x' has 30 different values"),
        (["--file", "empty.csv", "--outcome", "y"], "could not be read"),
        (["--file", "latin-1.csv", "--outcome", "y"], "should be in the encoding UTF-8.*iconv"),
        (["--file", "latin-1-below.csv", "--outcome", "y"], "should be in the encoding UTF-8"),
        (["--file", "utf-16.csv", "--outcome", "y"], "bytes of value 0.* save it as UTF-8"),
        (["--file", "thousands.csv", "--outcome", "y"], "'x' have commas, such as 1,234"),
        (["--file", "both.csv", "--outcome", "y"], "'x' have commas, such as 1.234,5"),
        (
            ["--file", "decimal-commas.csv", "--outcome", "y"],
            "more values than .*2 fields in line 2, saw 3.*points",
        ),
        (["--file", "ragged.csv", "--outcome", "y"], "no column 'y'. Separate the columns by"),
        (["--data", "nosuch"], "should be one of randhie"),
        (["--data", "skin"], "PYMC_SGMCMC_DATA should be an existing folder"),
        (["--file", "good.csv", "--outcome", "y", "--batch-size", "4"], "number of rows, 3, but"),
        (["--rows", "5", "--batch-size", "6"], "number of rows, 5, but got 6"),
        (["--rows", "10000000000000"], "GiB"),
        (["--batch-size", "0"], "--batch-size: should be a whole number, at least 1, but got '0'"),
        (["--draws", "-3"], "--draws: should be a whole number, at least 4, but got '-3'"),
        (["--tune", "-1"], "at least 0"),
        (["--chains", "two"], "--chains: should be a whole number"),
        (["--cores", "0"], "--cores"),
        (["--seed", "-1"], "--seed"),
        (["--sampler", "nuts"], "invalid choice: 'nuts'"),
        (["--mode", "fast"], "should be one of auto, NUMBA, CVM, JAX, FAST_COMPILE, but"),
        (["--output", "good.csv"], "--output should be a folder .* 'good.csv' cannot"),
        (["--output", "good.csv/below"], "--output should be a folder .* 'good.csv/below' cannot"),
        (["--drawz", "3"], "unrecognized arguments"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYMC_SGMCMC_DATA", str(tmp_path / "absent"))
    for name, content in BAD_FILES.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    status = run(arguments)
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith("python -m pymc_sgmcmc: error: ")
    assert error.count("\n") == 1
    assert re.search(message, error)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(BAD_FILES)


def run(arguments) -> int:
    try:
        return main(arguments)
    except SystemExit as exit_:  # from argparse
        return exit_.code


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [
        ("jax", ["--mode", "jax"], "pymc_sgmcmc[jax]"),
        ("statsmodels", ["--data", "fair"], "pymc_sgmcmc[datasets]"),
        ("pyarrow", ["--file", "x.parquet", "--outcome", "y"], "pymc_sgmcmc[files]"),
    ],
)
def test_missing_package_names_its_extra(package, arguments, extra, tmp_path, monkeypatch, capsys):
    installed, importer = importlib.util.find_spec, importlib.import_module

    def without(name):
        if name.startswith(package):
            raise ModuleNotFoundError(name)
        return importer(name)

    monkeypatch.setattr(importlib, "import_module", without)
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == package else installed(name))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.parquet").touch()
    assert run(arguments) == 2
    assert f'pip install "{extra}"' in capsys.readouterr().err


def test_package_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pymc_sgmcmc", "--draws", "none"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("pymc_sgmcmc", run_name="__main__")
    assert exit_.value.code == 2
    assert "at least 4, but got 'none'" in capsys.readouterr().err


def test_help_shows_defaults(capsys):
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for default in ("randhie", "sgld-cv", "1000", "200", "500, or all", "auto", "pymc_sgmcmc_out"):
        assert default in text


@pytest.mark.parametrize("error", [KeyboardInterrupt, fit.InterruptedEarlyError])
def test_interrupt_before_there_are_draws(error, tmp_path, monkeypatch, capsys):
    def interrupted(*arguments):
        raise error

    monkeypatch.setattr(cli, "fit", interrupted)
    assert main(["--data", "fair", "--output", str(tmp_path)]) == 130
    assert "interrupted before" in capsys.readouterr().err


# --- From end to end ----------------------------------------------------------------------------

# Quick to compile, with or without a C compiler.
QUICK = ["--mode", "FAST_COMPILE", "--cores", "1", "--chains", "2", "--no-progress"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Status, printed text and output folder of a small run of everything."""
    folder = tmp_path_factory.mktemp("output") / "new"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        arguments = ["--data", "fair", "--rows", "3000", "--draws", "150", "--tune", "5"]
        status = main([*arguments, *QUICK, "--batch-size", "100", "--output", str(folder)])
    return status, printed.getvalue(), folder


def test_run_succeeds_and_says_what_it_did(finished):
    status, printed, folder = finished
    assert status == 0
    words = " ".join(printed.split())
    for text in (
        "fair, 6,366 rows (package statsmodels, no network needed)",
        "any affair (affairs > 0), in 32.2% of 6,366 rows",
        "SGLD-CV beside a Laplace approximation from all 3,000 rows",
        "occupation_husb",
        "Means differ from the reference",
        "Set-up took",
        "With 0.471 times the rows",
    ):
        assert text in words
    assert "Warning" not in printed
    for name in ("fair-sgld-cv-3000-rows.nc", "fair-sgld-cv-3000-rows.png"):
        assert str(folder / name) in printed  # on one line, however long


def test_run_agrees_with_the_reference(finished):
    _, _, folder = finished
    comparison = pd.read_csv(folder / "fair-sgld-cv-3000-rows-summary.csv", index_col="feature")
    assert len(comparison) == 9
    error = comparison["mcse_mean"] / comparison["reference_sd"]
    assert (comparison["difference"].abs() < 5 * error + 0.1).all()
    assert comparison["sd_ratio"].between(0.6, 1.5).all()


def test_run_leaves_a_trace_and_a_plot(finished):
    _, _, folder = finished
    with xr.open_datatree(folder / "fair-sgld-cv-3000-rows.nc", engine="h5netcdf") as trace:
        assert dict(trace["posterior"]["beta"].sizes) == {"chain": 2, "draw": 150, "feature": 9}
        assert "gradient" in trace["sample_stats"]
        assert trace["observed_data"]["y"].size == 3000
    with Image.open(folder / "fair-sgld-cv-3000-rows.png") as picture:
        assert picture.width > 1000
    assert len(list(folder.iterdir())) == 3


def test_interrupt_keeps_the_draws_of_one_chain_after_the_other(tmp_path, monkeypatch, capsys):
    recorded = fit._StopAllChains.__call__

    def interrupt(self, trace, draw):
        if (draw.chain, draw.draw_idx) == (1, 30):
            raise KeyboardInterrupt
        recorded(self, trace, draw)

    monkeypatch.setattr(fit._StopAllChains, "__call__", interrupt)
    arguments = ["--data", "fair", "--draws", "60", "--tune", "5", "--chains", "3", "--output"]
    assert main([*QUICK, *arguments, str(tmp_path)]) == 0
    assert "going on with 1 of 3 chains and 60 of 60 draws" in capsys.readouterr().out


@pytest.fixture
def sampled(rng, monkeypatch):
    """Results of sampling without the sampling."""

    def quick_fit(design, settings):
        trace = laplace_trace(laplace(design.X, design.y, 2.5), rng, design.feature_names, 2, 60)
        return fit.Fit(trace=trace, interrupted=True, batch_size=10, cost=None, warnings=())

    monkeypatch.setattr(cli, "fit", quick_fit)


def test_failed_write_is_one_line_and_the_draws_go_elsewhere(
    sampled, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(cli.tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "output"
    (folder / "fair-sgld-cv.nc").mkdir(parents=True)
    assert main(["--data", "fair", "--output", str(folder)]) == cli.NOT_WRITTEN == 1
    printed, error = capsys.readouterr()
    assert error.count("\n") == 1
    said = re.search(r"error: the trace could not be .*: Is a directory.* instead: (.*)\n", error)
    with xr.open_datatree(said[1], engine="h5netcdf") as trace:
        assert trace["posterior"]["beta"].shape == (2, 60, 9)
    for ending in ("-summary.csv", ".png"):
        assert (folder / f"fair-sgld-cv{ending}").is_file()
        assert f"fair-sgld-cv{ending}" in printed
    assert "trace " not in printed


def test_failed_writes_have_a_line_each(sampled, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Path, "write_bytes", failing_write)
    assert main(["--data", "fair", "--output", str(tmp_path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    for kind, line in zip(("trace", "summary", "plot"), lines, strict=True):
        assert line.startswith(f"python -m pymc_sgmcmc: error: the {kind} could not be written to")
        assert line.endswith(
            "No space left on device. Free space there, or give another folder by "
            "--output, and run again."
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on files of POSIX")
def test_trace_too_large_for_the_disk_does_not_end_the_process(tmp_path):
    """HDF5 writing to a file ends it with a segmentation fault, at the latest when it exits."""
    script = """
        import resource, signal, sys
        from pathlib import Path

        import numpy as np
        from xarray import DataTree, Dataset

        from pymc_sgmcmc.demo.report import write_trace

        posterior = Dataset({"beta": (["chain", "draw"], np.ones((2, 50_000)))})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        try:
            write_trace(DataTree.from_dict({"posterior": posterior}), Path(sys.argv[1]), "trace")
        except OSError as error:
            print(error.strerror)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "File too large\n", "")
    assert not list(tmp_path.iterdir())
