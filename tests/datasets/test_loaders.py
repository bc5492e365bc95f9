"""Each data set from the published files, and from files of the same form."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pymc_sgmcmc import datasets
from pymc_sgmcmc.datasets.registry import REGISTRY
from tests.datasets.conftest import SLEEPSTUDY

IN_FOLDER = {  # rows, target
    "ap": (302_031, None),
    "cbpp": (56, "incidence"),
    "contraception": (1_934, "use"),
    "covertype": (92_962, "Cover_Type"),
    "epil": (236, "y"),
    "salamander": (360, "Mate"),
    "skin": (245_057, "skin"),
    "sleepstudy": (180, "Reaction"),
}


def shorten(monkeypatch, name, n_rows):
    """Make the registry expect a short file."""
    monkeypatch.setitem(REGISTRY, name, replace(REGISTRY[name], n_rows=n_rows))


def zipped(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def tarred(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content.encode())
            archive.addfile(member, io.BytesIO(content.encode()))


@pytest.mark.parametrize("name", IN_FOLDER)
def test_published_table(data_folder, name):
    n_rows, target = IN_FOLDER[name]
    dataset = datasets.load(name, data_folder)
    assert len(dataset.frame) == n_rows
    assert dataset.target == target
    assert dataset.origin == f"folder {data_folder}"
    assert list(dataset.frame.index[:2]) == [0, 1]
    named = {*dataset.feature_names, *dataset.group_names, *([target] if target else [])}
    assert named <= set(dataset.frame.columns)
    assert "rownames" not in dataset.frame


@pytest.mark.parametrize(("name", "shape"), [("randhie", (20_190, 9)), ("fair", (6_366, 8))])
def test_tables_of_statsmodels(name, shape):
    dataset = datasets.load(name)
    assert dataset.X.shape == shape
    assert dataset.y.shape == shape[:1]
    assert tuple(dataset.frame.columns.drop(dataset.target)) == dataset.feature_names
    assert np.isfinite(dataset.X).all()
    assert dataset.origin == "package statsmodels"


@pytest.mark.parametrize("name", REGISTRY)
def test_every_data_set_is_in_the_list(name):
    assert f'"{name}"' in datasets.__doc__


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("archived", [False, True])
def test_skin_original_file_gives_the_same(data_folder, folder, line_end, archived):
    converted = datasets.load("skin", data_folder)
    assert converted.X.dtype == np.uint8
    assert converted.y.sum() == 50_859
    with np.load(data_folder / "skin.npz") as archive:
        table = np.column_stack([archive["X"], archive["y"]])
    np.testing.assert_array_equal(converted.y, 2 - table[:, 3])
    text = line_end.join("\t".join(map(str, row)) for row in table.tolist()) + line_end
    if archived:
        zipped(folder / "skin+segmentation.zip", {"Skin_NonSkin.txt": text})
    else:
        (folder / "Skin_NonSkin.txt").write_text(text, newline="")
    original = datasets.load("skin", folder)
    pd.testing.assert_frame_equal(original.frame, converted.frame)


def test_covertype_sample_says_that_it_is_one(data_folder):
    covertype = datasets.load("covertype", data_folder)
    assert covertype.name == "covertype-16pct"
    assert "sample" in covertype.description.lower()
    X, y = covertype.X, covertype.y
    assert X.shape == (92_962, 54)
    assert (X.dtype, y.dtype) == (np.int16, np.uint8)
    assert set(np.unique(y)) == set(range(1, 8))
    # Each cell is of one wilderness area and of one soil type.
    assert (X[:, 10:14].sum(axis=1) == 1).all()
    assert (X[:, 14:].sum(axis=1) == 1).all()


@pytest.mark.parametrize("form", ["covtype.data.gz", "covtype.data", "covertype.zip"])
def test_covertype_full_goes_before_the_sample(folder, monkeypatch, form):
    shorten(monkeypatch, "covertype", 28)
    counts = replace(REGISTRY["covertype"], target_counts=(4,) * 7)
    monkeypatch.setitem(REGISTRY, "covertype", counts)
    table = np.random.default_rng(0).integers(0, 2, size=(28, 55))
    table[:, :10] += 3_000
    table[:, -1] = np.repeat(range(1, 8), 4)
    text = "".join(",".join(map(str, row)) + "\n" for row in table.tolist()).encode()
    if form == "covertype.zip":
        zipped(folder / form, {"covtype.info": "about", "covtype.data.gz": gzip.compress(text)})
    else:
        (folder / form).write_bytes(gzip.compress(text) if form.endswith("gz") else text)
    (folder / "covertype_16pct.npz").write_bytes(b"not looked at")
    covertype = datasets.load("covertype", folder)
    assert covertype.name == "covertype"
    np.testing.assert_array_equal(covertype.X, table[:, :-1])
    np.testing.assert_array_equal(covertype.y, table[:, -1])
    monkeypatch.setitem(REGISTRY, "covertype", replace(counts, target_counts=(5, 3, *(4,) * 5)))
    with pytest.raises(ValueError, match=r"found \[4, 4, .* expected \(5, 3, 4"):
        datasets.load("covertype", folder)


@pytest.mark.parametrize(("subset", "file_name"), [("train", "cod-rna"), ("test", "cod-rna.t")])
def test_cod_rna(folder, monkeypatch, subset, file_name):
    shorten(monkeypatch, f"cod-rna-{subset}", 3)
    (folder / file_name).write_text(
        "-1 1:-766 2:128 3:0.140625 4:0.304688 5:0.234375 6:0.140625 7:0.304688 8:0.234375 \n"
        "+1 1:-52 3:0.25 8:1e-2\n"
        "1 2:90\n"
    )
    cod_rna = datasets.load(f"cod-rna-{subset}", folder)
    assert cod_rna.name == f"cod-rna-{subset}"
    assert cod_rna.y.tolist() == [0, 1, 1]
    assert cod_rna.y.dtype == np.int8
    assert cod_rna.X[1].tolist() == [-52, 0, 0.25, 0, 0, 0, 0, 0.01]


@pytest.mark.parametrize("file_name", ["dataset.csv", "run_or_walk.csv", "run-or-walk.zip"])
def test_run_or_walk(folder, monkeypatch, file_name):
    shorten(monkeypatch, "run-or-walk", 2)
    text = (
        "date,time,username,wrist,activity,acceleration_x,acceleration_y,acceleration_z,"
        "gyro_x,gyro_y,gyro_z\n"
        "2017-6-30,13:51:15:847724020,viktor,0,0,0.265,-0.7814,-0.0076,-0.059,0.0325,-2.9296\n"
        "2017-6-30,13:51:16:246945023,viktor,1,1,0.6722,-1.1233,-0.2344,-0.1757,0.0208,0.1269\n"
    )
    if file_name.endswith("zip"):
        zipped(folder / file_name, {"dataset.csv": text})
    else:
        (folder / file_name).write_text(text)
    run_or_walk = datasets.load("run-or-walk", folder)
    assert run_or_walk.X.shape == (2, 6)
    assert run_or_walk.y.tolist() == run_or_walk.frame["wrist"].tolist() == [0, 1]
    assert run_or_walk.y.dtype == np.int8


@pytest.mark.parametrize(
    ("size", "file_name", "separator"),
    [("100k", "ml-100k/u.data", "\t"), ("1m", "ml-1m/ratings.dat", "::")],
)
@pytest.mark.parametrize("archived", [False, True])
def test_movielens(folder, monkeypatch, size, file_name, separator, archived):
    shorten(monkeypatch, f"movielens-{size}", 2)
    rows = [(196, 242, 3, 881250949), (1, 2, 5, 9)]
    text = "".join(separator.join(map(str, row)) + "\n" for row in rows)
    if archived:
        zipped(folder / f"ml-{size}.zip", {f"ml-{size}/README": "terms", file_name: text})
    else:
        (folder / file_name).parent.mkdir()
        (folder / file_name).write_text(text)
    movielens = datasets.load(f"movielens-{size}", folder)
    assert movielens.X.tolist() == [[196, 242], [1, 2]]
    assert movielens.y.tolist() == [3, 5]
    assert movielens.frame["timestamp"].tolist() == [881250949, 9]
    assert "no redistribution" in movielens.licence


def test_ap_original_file_gives_the_same(data_folder, folder):
    converted = datasets.load("ap", data_folder)
    assert converted.vocabulary[:3] == ("i", "new", "percent")
    assert converted.frame["document"].max() == 2_245
    assert converted.frame["count"].sum() == 435_838
    with pytest.raises(ValueError, match="ap has no target"):
        _ = converted.y
    lines = []
    for _, rows in converted.frame.groupby("document"):
        items = " ".join(f"{w}:{c}" for w, c in zip(rows["word"], rows["count"], strict=True))
        lines.append(f"{len(rows)} {items}\n")
    vocabulary = "\n".join(converted.vocabulary) + "\n"
    tarred(folder / "ap.tgz", {"ap/ap.dat": "".join(lines), "ap/vocab.txt": vocabulary})
    original = datasets.load("ap", folder)
    pd.testing.assert_frame_equal(original.frame, converted.frame)
    assert original.vocabulary == converted.vocabulary


def test_contraception_codes(data_folder):
    frame = datasets.load("contraception", data_folder).frame
    original = pd.read_csv(data_folder / "Contraception.csv")
    for name in ("use", "urban"):
        assert frame[name].dtype == np.int8
        np.testing.assert_array_equal(frame[name] == 1, original[name] == "Y")
    np.testing.assert_array_equal(frame["livch"].astype(str), original["livch"])
    assert frame["livch"].cat.ordered
    assert frame["district"].nunique() == 60


def test_salamander_cross_begins_with_the_female(data_folder):
    frame = datasets.load("salamander", data_folder).frame
    cross = frame["TypeF"].astype(str) + frame["TypeM"].astype(str)
    assert (cross == frame["Cross"].astype(str)).all()
    assert frame["Mate"].dtype == np.int8


def test_categories_must_be_encoded_first(data_folder):
    epil = datasets.load("epil", data_folder)
    assert epil.y[30] == 23  # MASS corrected it from 21
    with pytest.raises(TypeError, match=r"\['trt'\] are not.*get_dummies"):
        _ = epil.X


def test_row_names_of_r_without_a_header(folder):
    (folder / "sleepstudy.csv").write_text(SLEEPSTUDY.replace("rownames", '""'))
    assert list(datasets.load("sleepstudy", folder).frame) == ["Reaction", "Days", "Subject"]


def test_unknown_name():
    with pytest.raises(ValueError, match=r"`name` should be one of 'skin', .* but got 'iris'"):
        datasets.load("iris")
