"""A user's own table: what is read, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from pymc_sgmcmc import datasets

PATIENTS = pd.DataFrame({"age": [61, 47], "dose": [0.5, 0.0], "recovered": [1, 0]})


@pytest.mark.parametrize("file_name", ["patients.csv", "patients.csv.gz", "patients.parquet"])
def test_load_table(tmp_path, file_name):
    path = tmp_path / file_name
    if file_name.endswith("parquet"):
        PATIENTS.to_parquet(path, index=False)
    else:
        PATIENTS.to_csv(path, index=False)
    table = datasets.load_table(path, "recovered")
    assert table.name == "patients"
    assert table.target == "recovered"
    assert table.feature_names == ("age", "dose")
    assert table.origin == f"file {path}"
    pd.testing.assert_frame_equal(table.frame, PATIENTS)
    np.testing.assert_array_equal(table.X, [[61.0, 0.5], [47.0, 0.0]])
    np.testing.assert_array_equal(table.y, [1, 0])


def test_load_table_missing_file(tmp_path):
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(FileNotFoundError, match=re.escape(repr(str(path)))):
            datasets.load_table(path, "y")


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        ("recoverd", "has no column 'recoverd'. Did you mean 'recovered'?"),
        ("DOSE", "Did you mean 'dose'?"),
        ("zzz", "has no column 'zzz'. Its columns are 'age', 'dose', 'recovered'."),
    ],
)
def test_load_table_unknown_column(tmp_path, outcome, message):
    PATIENTS.to_csv(tmp_path / "patients.csv", index=False)
    with pytest.raises(ValueError, match=re.escape(message)):
        datasets.load_table(tmp_path / "patients.csv", outcome)


def test_load_table_of_many_columns_names_some(tmp_path):
    names = [f"x{i}" for i in range(50)]
    (tmp_path / "wide.csv").write_text(",".join(names) + "\n" + ",".join(["1"] * 50) + "\n")
    with pytest.raises(ValueError, match=r"'x19' and 30 more\.$"):
        datasets.load_table(tmp_path / "wide.csv", "outcome")


@pytest.mark.parametrize(
    ("file_name", "content", "message"),
    [
        ("t.xlsx", b"", "should end in .csv, .csv.gz or .parquet but got 't.xlsx'"),
        ("t.csv", b"", "could not be read as a CSV file: No columns"),
        ("t.csv", b"y\n1\n", "has the column 'y' alone"),
        ("t.csv", b"x,y\n", "no rows"),
        ("t.csv", b"x,y,x\n1,2,3\n", r"the columns \['x'\] are there more than once"),
        ("t.csv", b",x,y\n0,1,2\n", r"columns at positions \[1\] have no name.*index=False"),
        ("t.csv", b"x,y\n1,2\n1,2,3\n", "could not be read as a CSV file"),
        ("t.csv.gz", b"no gzip", "could not be read as a CSV file"),
        ("t.parquet", b"no parquet", "could not be read as a parquet file"),
    ],
    ids=range(9),
)
def test_load_table_refuses(tmp_path, file_name, content, message):
    path = tmp_path / file_name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        datasets.load_table(path, "y")


def test_load_table_keeps_text(tmp_path):
    (tmp_path / "t.csv").write_text("x,y\nred,yes\nblue,no\n")
    table = datasets.load_table(tmp_path / "t.csv", "y")
    assert table.y.tolist() == ["yes", "no"]
    with pytest.raises(TypeError, match=r"\['x'\] are not"):
        _ = table.X


def test_parquet_without_pyarrow(without, tmp_path):
    path = tmp_path / "table.parquet"
    pd.DataFrame({"x": [1.0], "y": [0]}).to_parquet(path)
    without("pyarrow")
    with pytest.raises(ImportError, match=r'pyarrow.*pip install "pymc_sgmcmc\[files\]"'):
        datasets.load_table(path, "y")
