"""Damaged files: the error names the file, the damage and what to do."""

from __future__ import annotations

import gzip
import io
import re

import numpy as np
import pytest

from pymc_sgmcmc import datasets
from tests.datasets.conftest import SLEEPSTUDY
from tests.datasets.test_loaders import tarred, zipped


def refuse(name, path, message):
    """Load a damaged file, and compare the message."""
    expected = f"{re.escape(str(path))} cannot be used: .*({message}).* Replace it by the original"
    with pytest.raises(ValueError, match=expected):
        datasets.load(name, path.parent)


def saved(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def single_array():
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (SLEEPSTUDY.replace("Days", "Day"), r"not found: \['Days'\]"),
        (SLEEPSTUDY.rpartition("180,")[0], "found 179 rows, expected 180"),
        (SLEEPSTUDY.replace("250.0", "", 1), r"missing values in \['Reaction'\]"),
        ("", "No columns"),
        ("a\n1,2\n1,2,3\n", "names|tokenizing"),
        (b"\xff\xfe\x00", "decode"),
    ],
    ids=["column", "rows", "missing", "empty", "ragged", "binary"],
)
def test_table(folder, content, message):
    path = folder / "sleepstudy.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refuse("sleepstudy", path, message)


def test_unknown_category(data_folder, folder):
    content = (data_folder / "Contraception.csv").read_text()
    path = folder / "Contraception.csv"
    path.write_text(content.replace(",N,3+,", ",maybe,3+,", 1))
    refuse("contraception", path, r"'maybe'.* 'use', expected \['N', 'Y'\]")


SKIN_X = np.zeros((245_057, 3), np.uint8)
SKIN_Y = np.ones(245_057, np.uint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "No data left"),
        (b"PK\x03\x04 cut short", "not a zip file"),
        (b"neither", "pickled"),
        (single_array(), "indices"),
        (saved(X=SKIN_X), "y is not a file in the archive"),
        (saved(X=SKIN_X[:9], y=SKIN_Y[:9]), "found 9 rows, expected 245057"),
        (saved(X=SKIN_X, y=SKIN_Y[:9]), "dimensions"),
        (saved(X=SKIN_X + 0.5, y=SKIN_Y), "float64.*, expected integers"),
        (
            saved(X=SKIN_X.astype(int) + 256, y=SKIN_Y),
            "from 1 to 256, expected 0 to 255, in 'B' to 'skin'",
        ),
        (saved(X=SKIN_X, y=SKIN_Y), "values with SHA-256 .* expected 357dd"),
    ],
    ids=range(10),
)
def test_arrays(folder, content, message):
    path = folder / "skin.npz"
    path.write_bytes(content)
    refuse("skin", path, message)


def test_values_of_the_covertype_sample(data_folder, folder):
    with np.load(data_folder / "covertype_16pct.npz") as archive:
        X, y = archive["X"], archive["y"]
    X[0, 0] += 1
    path = folder / "covertype_16pct.npz"
    path.write_bytes(saved(X=X, y=y))
    refuse("covertype", path, "values with SHA-256")


@pytest.mark.parametrize(
    ("file_name", "content", "message"),
    [
        ("Skin_NonSkin.txt", b"1 2 3\n", "has 3 elements, new values have 4"),
        ("Skin_NonSkin.txt", b"1 2 3 x\n", "invalid literal"),
        ("Skin_NonSkin.txt", b"1 2 3 1\n1 2\n", "NA values"),
        ("skin+segmentation.zip", b"no zip", "not a zip file"),
    ],
)
def test_original(folder, file_name, content, message):
    path = folder / file_name
    path.write_bytes(content)
    refuse("skin", path, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("-1 9:1\n", "9 features"),
        ("-1 0:1\n", "Invalid index 0"),
        ("-1 one:1\n", ""),
        ("2 1:1\n" * 59_535, r"found {2.0} in .* 'non_coding', expected \[-1, 1\]"),
        ("-1 3:2\n" * 59_535, "found values from 0.0 to 2.0, expected 0 to 1"),
        ("-1 1:1\n", "found 1 rows, expected 59535"),
    ],
    ids=range(6),
)
def test_svmlight(folder, content, message):
    path = folder / "cod-rna"
    path.write_text(content)
    refuse("cod-rna-train", path, message)


def test_archive_without_the_member(folder):
    path = folder / "skin+segmentation.zip"
    zipped(path, {"readme": "nothing else", "Skin_NonSkin.txt/": ""})
    refuse("skin", path, "found no file Skin_NonSkin.txt")


def test_gzip(folder):
    content = gzip.compress(b"1,2,3\n" * 1_000)
    for damaged in (content[:-20], content[:12] + b"\xff\xff" + content[14:]):
        path = folder / "covtype.data.gz"
        path.write_bytes(damaged)
        refuse("covertype", path, "")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("2 0:1\n", "found 1 words in line 1, expected 2"),
        ("1 0:1\n", "found 1 rows, expected 302031"),
        ("one\n", "invalid literal"),
    ],
)
def test_corpus(folder, lines, message):
    path = folder / "ap.tgz"
    tarred(path, {"ap/ap.dat": lines, "ap/vocab.txt": "word\n"})
    refuse("ap", path, message)
