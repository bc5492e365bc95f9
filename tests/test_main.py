"""``python -m pymc_sgmcmc``: tables and formulas, runs from end to end, files, and bad input."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import xarray as xr
from PIL import Image

from pymc_sgmcmc import datasets, regression
from pymc_sgmcmc import main as command
from pymc_sgmcmc.regression import InputError, make_model, read_table

# Commands in this process compile little; those in others are as for users.
pytestmark = pytest.mark.usefixtures("without_compiler")

QUICK = (
    "--mode",
    "FAST_COMPILE",
    "--cores",
    "1",
    "--chains",
    "2",
    "--draws",
    "200",
    "--tune",
    "50",
)


def run(*arguments: object) -> tuple[int, str, str]:
    """Status, what is printed, and the errors, of the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = command.main([str(argument) for argument in arguments])
        except SystemExit as left:  # from argparse
            status = left.code
    return status, out.getvalue(), err.getvalue()


def numbers_of(printed: str) -> pd.DataFrame:
    """The table that a run prints."""
    columns = ["mean", "sd", "lower", "upper", "ess", "r_hat"]
    columns += ["reference_mean", "reference_sd", "error"]
    row = re.compile(r"(\S.*?) +((?:-?[\d.e+-]+ +){8}-?[\d.]+|nan) *$")
    rows = [row.match(line) for line in printed.partition("\ncoefficient ")[2].splitlines()]
    numbers = {found[1]: map(float, found[2].split()) for found in rows if found}
    return pd.DataFrame.from_dict(numbers, orient="index", columns=columns)


@pytest.fixture
def patients(rng) -> pd.DataFrame:
    """A table with text, an outcome with two values and one with numbers."""
    age, ward = rng.normal(50, 10, 400).round(1), rng.choice(["a", "b", "c"], 400)
    effect = 0.1 * (age - 50) + (ward == "b")
    return pd.DataFrame(
        {
            "age": age,
            "ward": ward,
            "days": (5 + effect + rng.normal(size=400)).round(3),
            "cured": np.where(rng.random(400) < 1 / (1 + np.exp(effect)), "yes", "no"),
        }
    )


# --- From end to end ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    """Folder and printed text of a run with no option except the folder."""
    folder = tmp_path_factory.mktemp("default")
    made = subprocess.run(
        [sys.executable, "-m", "pymc_sgmcmc", "--output", "new/folder"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(command.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    return folder / "new" / "folder", made.stdout


def test_default_run_agrees_with_statsmodels(default):
    """The intercept is that of predictors as they are, though Bambi centres them."""
    discrete = pytest.importorskip("statsmodels.discrete.discrete_model")
    randhie = datasets.load("randhie")
    X = np.column_stack([np.ones(len(randhie.y)), randhie.X])
    expected = discrete.Logit((randhie.y > 0).astype(float), X).fit(disp=False)
    table = numbers_of(default[1])
    assert tuple(table.index) == ("Intercept", *randhie.feature_names)
    for name, spread in (("reference_mean", 0.1), ("mean", 0.2)):
        np.testing.assert_array_less(np.abs(table[name] - expected.params) / expected.bse, spread)
    np.testing.assert_allclose(table["reference_sd"], expected.bse, rtol=0.05)
    np.testing.assert_allclose(table["sd"], expected.bse, rtol=0.1)


def test_default_run_says_what_it_did_without_a_terminal(default):
    folder, printed = default
    words = " ".join(printed.split())
    for text in (
        "Note: mdvis > 0 is 1, not 0, in 68.8% of rows.",
        "Family: bernoulli",
        "Observations: 20190",
        "disea ~ Normal(mu: 0.0, sigma: 0.1483)",
        "are within the stated 0.05",
        "Written: new/folder/randhie.nc",
    ):
        assert text in words
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    with Image.open(folder / "randhie.png") as picture:
        assert picture.format == "PNG"
        assert len(np.unique(np.asarray(picture.convert("L")))) > 10  # something is drawn
    with xr.open_datatree(folder / "randhie.nc", engine="h5netcdf") as trace:
        assert dict(trace["posterior"]["lncoins"].sizes) == {"chain": 4, "draw": 1000}
        assert "gradient" in trace["sample_stats"]
        assert "p" not in trace["posterior"]
    assert sorted(path.suffix for path in folder.iterdir()) == [".nc", ".png"]


@pytest.mark.slow
def test_parquet_and_a_normal_outcome_agree_with_least_squares(patients, tmp_path):
    pytest.importorskip("pyarrow")
    patients.to_parquet(tmp_path / "patients.parquet")
    arguments = ("--outcome", "days", "--columns", "ward", "age", "--output", tmp_path, *QUICK)
    status, printed, _ = run("--file", tmp_path / "patients.parquet", *arguments)
    table = numbers_of(printed)
    assert (status, [*table.index]) == (0, ["Intercept", "ward[b]", "ward[c]", "age", "sigma"])
    ward = patients["ward"]
    X = np.column_stack([np.ones(400), ward == "b", ward == "c", patients["age"]])
    beta, squares = np.linalg.lstsq(X, patients["days"])[:2]
    sd = np.sqrt(squares / 396 * np.diag(np.linalg.inv(X.T @ X)))
    assert (np.abs(table["mean"].iloc[:4] - beta) < 0.4 * sd).all()
    assert (np.abs(table["reference_mean"].iloc[:4] - beta) < 0.2 * sd).all()
    np.testing.assert_allclose(table["reference_sd"].iloc[:4], sd, rtol=0.1)


def test_csv_formula_and_bias(patients, tmp_path):
    patients.to_csv(tmp_path / "trial.csv", index=False)
    formula = "cured ~ age * C(ward)"
    status, printed, errors = run(
        *("--file", tmp_path / "trial.csv", "--formula", formula, "--bias", "0.1"),
        *("--output", tmp_path, *QUICK, "--draws", "300"),
    )
    assert status == 0, errors
    table = numbers_of(printed)
    assert [*table.index][-2:] == ["age:C(ward)[b]", "age:C(ward)[c]"]
    assert "cured is yes, not no, in" in printed
    assert "age ~ Normal(mu: 0.0, sigma: 0." in printed
    assert "the stated 0.1" in " ".join(printed.split())
    assert (np.abs(table["mean"] - table["reference_mean"]) < 0.6 * table["reference_sd"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals of POSIX")
def test_interrupt_keeps_the_draws(cores, tmp_path):
    arguments = ("--draws", "1000000", "--tune", "10", "--chains", "2", "--cores", str(cores))
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "pymc_sgmcmc", *arguments, "--output", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(command.__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C goes to all processes of a terminal, so of a group here
        # A shell that starts pytest in the background has it ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stderr:
        if line.startswith("SGLDCV: [Intercept"):
            break
    wait_until_chains_are_long(process, cores)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert re.search(rf"the trace has {cores} of 2 chains, with \d+ of 1000000 draws", errors)
    assert (tmp_path / "randhie.nc").is_file()


def wait_until_chains_are_long(process, cores, seconds=2.0):
    """Wait until each chain has many draws, and those that run together about as many.

    PyMC drops chains that are less than half as long as another one, so equal times on the wall do
    not suffice on a busy machine.
    """
    parent = psutil.Process(process.pid)
    before = parent.cpu_times().user
    while process.poll() is None:
        time.sleep(0.1)
        times = [child.cpu_times().user for child in parent.children()]
        times = sorted(times)[-cores:] if cores > 1 else [parent.cpu_times().user - before]
        if len(times) == cores and times[0] >= max(seconds, 0.75 * times[-1]):
            return


def test_interrupt_before_there_are_draws(tmp_path, monkeypatch):
    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(regression, "sample", interrupted)
    status, _, errors = run("--data", "fair", "--output", tmp_path, *QUICK)
    assert (status, errors) == (
        130,
        "python -m pymc_sgmcmc: interrupted before there were draws to keep\n",
    )


# --- Files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("obstacle", ["disk", "folder", "permission"])
def test_failed_write_is_one_line_and_the_rest_is_kept(obstacle, tmp_path, monkeypatch):
    (tmp_path / "fair.nc").mkdir()
    reason = "Is a directory"
    if obstacle != "folder":
        (tmp_path / "fair.nc").rmdir()
        (tmp_path / "fair.nc").write_text("before")
        number, reason = {"disk": (28, "No space left"), "permission": (13, "Permission denied")}[
            obstacle
        ]
        opened = Path.open

        def failing(path, mode="r", **options):
            if ".nc" in path.name and mode == "wb":
                raise OSError(number, os.strerror(number))
            return opened(path, mode, **options)

        monkeypatch.setattr(Path, "open", failing)
    status, printed, errors = run("--data", "fair", "--output", tmp_path, "--overwrite", *QUICK)
    lines = [line for line in errors.splitlines() if "error" in line]
    assert status == 1
    assert len(lines) == 1
    assert re.search(rf"fair\.nc' could not be written: {reason}.*--output", lines[0])
    assert len(numbers_of(printed)) == 9
    assert {path.name for path in tmp_path.iterdir()} == {"fair.nc", "fair.png"}
    assert obstacle == "folder" or (tmp_path / "fair.nc").read_text() == "before"


def test_files_of_an_earlier_run_are_kept(tmp_path):
    earlier = tmp_path / "fair.png"
    earlier.write_text("before")
    status, _, errors = run("--data", "fair", "--output", tmp_path, *QUICK)
    assert (status, earlier.read_text(), [*tmp_path.iterdir()]) == (2, "before", [earlier])
    assert re.search(r"--output has .*fair\.png of an earlier run\. Give .*--overwrite", errors)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(("--help",), 0), (("--file", "trail.csv", "--outcome", "y"), 2), (("--draws", "1"), 2)],
)
def test_answers_at_once(arguments, status, tmp_path):
    """Without the imports of a run, which take seconds."""
    made = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "pymc_sgmcmc", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(command.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert made.returncode == status
    imported = set(re.findall(r"\| +([\w.]+)$", made.stderr, re.MULTILINE))
    assert "pymc_sgmcmc.main" in imported
    assert not imported & {"pymc", "pytensor", "numpy", "pandas", "bambi", "rich"}


# --- Tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [";", "\t", "|", ","])
def test_separators_and_decimal_commas(separator, patients, tmp_path):
    path = tmp_path / "german.csv"
    patients.to_csv(path, index=False, sep=separator, decimal=",", encoding="utf-8-sig")
    pd.testing.assert_frame_equal(read_table(path), patients)
    pd.testing.assert_frame_equal(read_table(path, separator), patients)


def test_separator_that_is_given(tmp_path):
    (tmp_path / "odd.csv").write_text("a:b,c\n1:2\n")
    assert [*read_table(tmp_path / "odd.csv", ":")] == ["a", "b,c"]


# --- Models ---------------------------------------------------------------------------------------


def test_rows_with_holes_and_constant_columns_are_left_out_with_a_note(patients):
    patients.loc[:9, "age"] = np.nan
    table = patients.assign(one=7, word="same", both=3 - 1e6 * patients["age"])
    model, notes = make_model(table, "days", ["one", "word", "age", "both"])
    assert [*model.parameters["mu"].terms] == ["Intercept", "age", "both"]
    assert len(model.response_term.data) == 390
    assert notes == [
        "left out one, word, with one value in all rows",
        "dropped 10 of 400 rows with missing values (in age, both)",
    ]


@pytest.mark.parametrize(
    ("formula", "family", "chosen"),
    [
        ("days ~ age", None, "gaussian"),
        ("cured ~ age", None, "bernoulli"),
        ("cured['no'] ~ age", None, "bernoulli"),
        ("log(visits + 1) ~ age - 1", None, "gaussian"),
        ("visits ~ age + offset(log(age))", "poisson", "poisson"),
        ("prop(visits, most) ~ age", None, "binomial"),
        ("p(visits, most) ~ age + (1|ward)", None, "binomial"),
        ("visits ~ age", "negativebinomial", "negativebinomial"),
        ("visits ~ 1", None, "gaussian"),
        ("truncated(days, lb=-50) ~ age", None, "gaussian"),
        ("constrained(visits, ub=9) ~ age", "poisson", "poisson"),
        ("weighted(visits, age) ~ 1", "poisson", "poisson"),
        ("p(ones, visits + 1) ~ age", None, "binomial"),
        ("C(visits) ~ age - 1", "cumulative", "cumulative"),
    ],
)
def test_families(formula, family, chosen, patients):
    table = patients.assign(visits=np.arange(400) % 7, most=6, ones=1)
    model, _ = make_model(table, formula=formula, family=family)
    assert model.family.name == chosen
    log_density = model.backend.model.compile_logp(mode="FAST_COMPILE")
    assert np.isfinite(log_density(model.backend.model.initial_point()))
    if "no" in formula:
        np.testing.assert_array_equal(model.response_term.data, table["cured"] == "no")
    assert not {variable.name for variable in model.backend.model.free_RVs} & {"offset(log(age))"}


def priors_of(patients: pd.DataFrame, formula: str) -> dict[str, str]:
    """Priors of the model of a formula."""
    model, _ = make_model(patients, formula=formula)
    terms = {**model.parameters["mu"].terms, "sigma": model.parameters["sigma"]}
    return {name: str(term.prior) for name, term in terms.items()}


@pytest.mark.parametrize(
    "response",
    ["truncated(days, ub=99)", "constrained(days, -50, 99)", "weighted(days, age)"],
)
def test_priors_are_scaled_by_the_outcome_alone(response, patients):
    expected = priors_of(patients, "days ~ age + (1|ward)")
    assert priors_of(patients, f"{response} ~ age + (1|ward)") == expected


@pytest.mark.parametrize("name", ["km/h", "a b", "p", "chain", "draw", "x-1", "1st", "größe"])
def test_names_of_columns(name, patients):
    """Slashes, names of the family's parameters, and dimensions of the trace."""
    model, _ = make_model(patients.assign(**{name: patients["age"]}), "cured", [name])
    (coefficient,) = (each.name for each in model.backend.model.free_RVs[1:])
    assert coefficient.rstrip("_").replace("÷", "/") == name
    assert coefficient not in {"p", "chain", "draw"}


def test_products_of_small_integers_do_not_overflow(patients):
    table = patients.assign(u=np.arange(400).astype(np.uint8), v=np.full(400, 200, np.uint8))
    table["v"] -= table["u"] % 2
    model, _ = make_model(table, formula="days ~ u:v")
    expected = table["u"].astype(float) * table["v"]
    np.testing.assert_array_equal(model.parameters["mu"].terms["u:v"].data, expected)


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("days ~ age ward", "'ward' cannot follow what is before it"),
        ("days ~ (age)) + ward", r"'\) \+ ward' cannot follow what is before it"),
        ("days ~ age | ward", r"'\| ward' cannot follow what is before it"),
        ("cured['Yes'] ~ age", "the outcome `cured` is 0.0 in all rows"),
        ("I(age > 999) ~ ward", r"the outcome `I\(age > 999\)` is 0.0 in all rows"),
        ("weighted(one, age) ~ age", r"the outcome `weighted\(one, age\)` is 7.0 in all rows"),
        ("p(one, one) ~ age", r"the outcome `p\(one, one\)` is 7.0 in all rows"),
        ("truncated(inf, lb=-5) ~ age", "infinite values"),
        ("C(ward) ~ age", r"`C\(ward\)` should have one column, but has 3"),
        ("days ~ days", "as gaussian: ValueError.* already exists.* suits the family"),
        ("days ~ f(age)", "does not fit the table as gaussian: KeyError: 'f'"),
        ("days ~ age + one", "constant"),
        ("days ~ age + word", "one value in all rows"),
        ("days ~ log(age - age)", "constant"),
        ("days ~ inf", "infinite values"),
        ("days ~ when", "not of numbers"),
        ("days ~ Intercept", "'Intercept' has the name of a coefficient"),
        ("days ~ name", r"at most 20 different values, but has 400\. .*\(1\|name\)"),
        ("inf ~ age", "infinite values"),
        ("days ~ 0", "does not fit"),
    ],
)
def test_formulas_that_cannot_be_used(formula, message, patients):
    others = {"one": 7, "word": "w", "inf": [np.inf, *range(399)], "Intercept": range(400)}
    others |= {"when": pd.date_range("2020", periods=400), "name": [f"v{n}" for n in range(400)]}
    with pytest.raises(InputError, match=message):
        make_model(patients.assign(**others), formula=formula)


@pytest.mark.parametrize(
    ("columns", "family", "message"),
    [
        ({"x": range(30), "y": ["a", "b", "c"] * 10}, None, "'y' should have two.*3: a, b, c"),
        ({"x": range(30), "y": [0, 1, 2] * 10}, "bernoulli", "'y' should have two.*3: 0.*1.*2"),
        ({"x": range(30), "y": [0.5, 1, 2] * 10}, "poisson", "`y` should be counts"),
        ({"x": range(30), "y": [1] * 30}, None, "'y' should have two"),
        ({"x": range(30), "y": [1] * 30}, "poisson", "the outcome `y` is 1.0 in all rows"),
        ({"x": range(30), "y": ["a", "b", "c"] * 10}, "poisson", "`y` should have one column"),
        ({"x": range(30)}, "cumulative", r"does not fit .*C\(y\) suits cumulative"),
        ({"x": range(30)}, "binomial", r"does not fit .*p\(k, n\) suits binomial"),
        ({"x": range(30)}, "normal", "--family should be one of .*gaussian"),
        (
            {"x": [None, 1.5] * 15, "z": [0.5, None] * 15},
            None,
            r"each of its 30 rows has missing values \(in x, z\)",
        ),
        ({"x": [4] * 30}, None, "No column except 'y' differs"),
        ({}, None, "No column except 'y' differs"),
        ({"a`b": range(30)}, None, "'a`b' has a backtick"),
    ],
)
def test_tables_that_cannot_be_used(columns, family, message):
    table = pd.DataFrame({"y": np.arange(30) % 2, **columns})
    with pytest.raises(InputError, match=message):
        make_model(table, "y", [name for name in columns if name != "y"], family=family)


@pytest.mark.slow
def test_effects_of_groups_are_integrated_out(rng, tmp_path):
    group = rng.integers(0, 60, 3000)
    table = pd.DataFrame({"x": rng.normal(50, 10, 3000), "g": [f"g{number}" for number in group]})
    effects = rng.normal(size=60)
    table["y"] = 5 + 0.1 * table["x"] + effects[group] + rng.normal(size=3000)
    table.to_csv(tmp_path / "t.csv", index=False)
    formula = ("--formula", "y ~ x + (1|g)", "--output", tmp_path)
    status, printed, errors = run("--file", tmp_path / "t.csv", *formula, *QUICK)
    assert status == 0, errors
    found = numbers_of(printed)
    assert [*found.index] == ["Intercept", "x", "sigma", "1|g_sigma"]
    np.testing.assert_allclose(found["mean"], [5, 0.1, 1, 1], rtol=0.15)
    np.testing.assert_allclose(found["reference_mean"], found["mean"], rtol=0.1)
    with xr.open_datatree(tmp_path / "t.nc", engine="h5netcdf") as trace:
        assert trace["sample_stats"].attrs["sgmcmc_integrated_out"] == '["1|g_offset"]'
        means = trace["posterior"]["1|g"].mean(("chain", "draw"))
        order = np.argsort([f"g{number}" for number in range(60)])
        assert np.corrcoef(means, effects[order])[0, 1] > 0.95


# --- Bad input ------------------------------------------------------------------------------------

FILES = {
    "good.csv": "x,y\n1,0\n2,1\n3,1\n",
    "empty.csv": "",
    "latin-1.csv": "größe;y\n1;0\n2;1\n".encode("latin-1"),
    "utf-16.csv": "x,y\n1,0\n2,1\n".encode("utf-16-le"),
    "thousands.csv": "x;y\n1,234;0\n2,345;1\n",
    "both.csv": "x;y\n1.234,5;0\n2.345,5;1\n",
    "long.csv": "x,y\n1,5,0\n2,5,1\n",
    "nameless.csv": ",x,y\n1,5,0\n2,5,1\n",
    "table.xlsx": "",
    "bad.parquet": "x",
}
FILE_Y = ("--outcome", "y", "--file")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*FILE_Y, "none.csv"], "'none.csv' is not there"),
        ([*FILE_Y, "empty.csv"], "could not be read"),
        ([*FILE_Y, "latin-1.csv"], "could not be read as CSV in UTF-8"),
        ([*FILE_Y, "utf-16.csv"], "UTF-16"),
        ([*FILE_Y, "thousands.csv"], "commas in column 'x', as in 1,234, may be"),
        ([*FILE_Y, "both.csv"], "as in 1.234,5, may be"),
        ([*FILE_Y, "long.csv"], "Expected 2 fields in line 2, saw 3"),
        ([*FILE_Y, "nameless.csv"], "a name of its own"),
        ([*FILE_Y, "table.xlsx"], "should end in .csv, .txt, .parquet"),
        ([*FILE_Y, "bad.parquet"], "could not be read as parquet"),
        ([*FILE_Y, "good.csv", "--separator", ";"], "no column 'x'|no column 'y'"),
        ([*FILE_Y, "good.csv", "--data", "fair"], "not allowed with argument"),
        ([*FILE_Y, "good.csv", "--columns", "z"], "no column 'z'. Its columns are x, y"),
        (["--file", "good.csv"], "--file needs --outcome"),
        (["--file", "good.csv", "--formula", "y ~ x +"], "should be like"),
        (
            ["--file", "good.csv", "--formula", "y ~ f(x)"],
            "does not fit the table as bernoulli: KeyError",
        ),
        (["--formula", "mdvis ~ lpi", "--outcome", "mdvis"], "leave out --outcome"),
        (["--data", "nosuch"], "invalid choice: 'nosuch'"),
        (["--data", "skin"], "PYMC_SGMCMC_DATA should be an existing folder"),
        (["--bias", "2"], "`bias` should be the relative error"),
        (["--draws", "3"], "--draws should be at least 4, but got 3"),
        (["--chains", "two"], "--chains: invalid int value"),
        (["--output", "good.csv"], "--output should be a folder .* 'good.csv' is not"),
        (["--drawz", "3"], "unrecognized arguments"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYMC_SGMCMC_DATA", str(tmp_path / "absent"))
    for name, content in FILES.items():
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    status, _, errors = run(*arguments)
    assert status == 2
    assert re.fullmatch(r"python -m pymc_sgmcmc: error: .*\n", errors)
    assert re.search(message, errors)


def test_help_shows_options_and_defaults():
    status, text, _ = run("--help")
    assert status == 0
    text = " ".join(text.split())
    for word in (
        "randhie",
        "--formula",
        "formula is code",
        "1000 if not given",
        "0.05",
        "pymc_sgmcmc_output",
    ):
        assert word in text
