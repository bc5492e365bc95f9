"""Data sets: where they are read from, what is checked, and what a user is told when it fails."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import http.server
import io
import os
import re
import socket
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pooch
import pytest

from pymc_sgmcmc import datasets
from pymc_sgmcmc.datasets import Corpus, Dataset, DatasetUnavailableError

FOLDER_VARIABLE = "PYMC_SGMCMC_DATA"

# Read before the fixture below hides it from the loaders.
DATA_FOLDER = Path(
    os.environ.get(FOLDER_VARIABLE) or Path(__file__).parents[1].parent / "shared" / "data"
)

IN_FOLDER = {  # loader: (file, rows, target)
    "load_ap": ("ap.npz", 302_031, None),
    "load_cbpp": ("cbpp.csv", 56, "incidence"),
    "load_contraception": ("Contraception.csv", 1_934, "use"),
    "load_covertype": ("covertype_16pct.npz", 92_962, "Cover_Type"),
    "load_epil": ("epil.csv", 236, "y"),
    "load_salamander": ("salamander.csv", 360, "Mate"),
    "load_skin": ("skin.npz", 245_057, "skin"),
    "load_sleepstudy": ("sleepstudy.csv", 180, "Reaction"),
}

SOURCES = [
    datasets._AP,
    datasets._CBPP,
    datasets._CONTRACEPTION,
    datasets._COVERTYPE,
    datasets._EPIL,
    datasets._RUN_OR_WALK,
    datasets._SALAMANDER,
    datasets._SKIN,
    datasets._SLEEPSTUDY,
    *datasets._COD_RNA.values(),
    *datasets._MOVIELENS.values(),
]

SLEEPSTUDY = "rownames,Reaction,Days,Subject\n" + "".join(
    f"{18 * day + subject + 1},{250.0 + 10 * day},{day},{308 + subject}\n"
    for day in range(10)
    for subject in range(18)
)


def data_file(name):
    path = DATA_FOLDER / name
    if not path.is_file():
        pytest.skip(f"needs {name} in the folder {FOLDER_VARIABLE} or in ../shared/data")
    return path


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Neither the user's folder nor the user's cache; no server but one on this machine."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache" / project)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    connect = socket.socket.connect

    def connect_here(self, address):
        assert address[0] == "127.0.0.1", f"a test tried to reach {address}"
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    return path


@pytest.fixture
def served(tmp_path):
    """Serve a folder on this machine; yields the folder, its address, and the paths asked for."""
    root = tmp_path / "served"
    root.mkdir()
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(root))

        def log_message(self, *args):
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield root, f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


@pytest.fixture
def closed_port():
    """Return an address at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def point(monkeypatch, variable, url, known_hash=None):
    source = dataclasses.replace(
        getattr(datasets, variable), url=url, known_hash=known_hash and f"sha256:{known_hash}"
    )
    monkeypatch.setattr(datasets, variable, source)


def zipped(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "/").replace("_DOT_", "."), content)


# --------------------------------------------------------------------------------------------------
# The published data
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", IN_FOLDER)
def test_published_table(loader):
    file_name, n_rows, target = IN_FOLDER[loader]
    home = data_file(file_name).parent
    dataset = getattr(datasets, loader)(home)
    assert len(dataset.frame) == n_rows
    assert dataset.target == target
    assert dataset.origin == f"folder {home}"
    assert list(dataset.frame.index[:2]) == [0, 1]
    named = {*dataset.feature_names, *dataset.group_names, *([target] if target else [])}
    assert named <= set(dataset.frame.columns)
    assert "rownames" not in dataset.frame
    for fact in ("name", "description", "source", "licence", "citation"):
        assert getattr(dataset, fact), fact


def test_skin_is_one_and_not_skin_is_zero():
    path = data_file("skin.npz")
    skin = datasets.load_skin(path.parent)
    with np.load(path) as archive:
        X, y = archive["X"], archive["y"]
    assert skin.X.dtype == np.uint8
    assert skin.X.shape == (245_057, 3)
    np.testing.assert_array_equal(skin.X, X)
    np.testing.assert_array_equal(skin.y, 2 - y)
    assert skin.y.sum() == 50_859
    assert skin.feature_names == ("B", "G", "R")


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("archived", [False, True])
def test_skin_original_file_gives_the_same(folder, line_end, archived):
    with np.load(data_file("skin.npz")) as archive:
        X, y = archive["X"], archive["y"]
    text = line_end.join("\t".join(map(str, row)) for row in np.column_stack([X, y]).tolist())
    if archived:
        zipped(folder / "skin+segmentation.zip", Skin_NonSkin_DOT_txt=text + line_end)
    else:
        (folder / "Skin_NonSkin.txt").write_text(text + line_end, newline="")
    skin = datasets.load_skin(folder)
    np.testing.assert_array_equal(skin.X, X)
    np.testing.assert_array_equal(skin.y, 2 - y)


def test_covertype_sample_says_that_it_is_one():
    covertype = datasets.load_covertype(data_file("covertype_16pct.npz").parent)
    assert covertype.name == "covertype-16pct"
    assert "sample" in covertype.description.lower()
    X, y = covertype.X, covertype.y
    assert X.shape == (92_962, 54)
    assert X.dtype == np.int16
    assert set(np.unique(y)) == set(range(1, 8))
    # Each cell is of one wilderness area and of one soil type.
    assert (X[:, 10:14].sum(axis=1) == 1).all()
    assert (X[:, 14:].sum(axis=1) == 1).all()


def test_ap_counts():
    ap = datasets.load_ap(data_file("ap.npz").parent)
    assert isinstance(ap, Corpus)
    assert len(ap.vocabulary) == 10_473
    assert ap.vocabulary[:3] == ("i", "new", "percent")
    assert ap.n_documents == 2_246
    assert ap.frame["count"].sum() == 435_838
    with pytest.raises(ValueError, match="ap has no target"):
        _ = ap.y


def test_ap_original_file_gives_the_same(folder):
    expected = datasets.load_ap(data_file("ap.npz").parent)
    lines = []
    for _, rows in expected.frame.groupby("document"):
        items = " ".join(f"{w}:{c}" for w, c in zip(rows["word"], rows["count"], strict=True))
        lines.append(f"{len(rows)} {items}\n")
    with tarfile.open(folder / "ap.tgz", "w:gz") as archive:
        for name, content in {
            "ap/ap.dat": "".join(lines),
            "ap/vocab.txt": "\n".join(expected.vocabulary) + "\n",
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(content.encode())
            archive.addfile(member, io.BytesIO(content.encode()))
    found = datasets.load_ap(folder)
    pd.testing.assert_frame_equal(found.frame, expected.frame)
    assert found.vocabulary == expected.vocabulary


def test_contraception_codes():
    path = data_file("Contraception.csv")
    frame = datasets.load_contraception(path.parent).frame
    original = pd.read_csv(path)
    np.testing.assert_array_equal(frame["use"] == 1, original["use"] == "Y")
    np.testing.assert_array_equal(frame["urban"] == 1, original["urban"] == "Y")
    np.testing.assert_array_equal(frame["livch"].astype(str), original["livch"])
    assert frame["livch"].cat.ordered
    assert frame["district"].nunique() == 60


def test_salamander_cross_begins_with_the_female():
    frame = datasets.load_salamander(data_file("salamander.csv").parent).frame
    cross = frame["TypeF"].astype(str) + frame["TypeM"].astype(str)
    assert (cross == frame["Cross"].astype(str)).all()


def test_categories_must_be_encoded_first():
    epil = datasets.load_epil(data_file("epil.csv").parent)
    assert epil.y[30] == 23  # MASS corrected it from 21
    with pytest.raises(TypeError, match=r"\['trt'\] are not.*get_dummies"):
        _ = epil.X


@pytest.mark.parametrize(
    "source",
    [s for s in SOURCES if IN_FOLDER.get(s.loader, ("",))[0].endswith(".csv")],
    ids=lambda source: source.name,
)
def test_known_hash_is_that_of_the_folder(source):
    """The folder has these files as they are downloaded, the others converted."""
    content = data_file(source.files[0]).read_bytes()
    assert source.known_hash == f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.mark.parametrize(
    ("loader", "n_rows", "n_features"), [("load_randhie", 20_190, 9), ("load_fair", 6_366, 8)]
)
def test_tables_of_statsmodels(loader, n_rows, n_features):
    dataset = getattr(datasets, loader)()
    assert dataset.X.shape == (n_rows, n_features)
    assert dataset.y.shape == (n_rows,)
    assert dataset.target not in dataset.feature_names
    assert np.isfinite(dataset.X).all()
    assert dataset.origin == "package statsmodels"


# --------------------------------------------------------------------------------------------------
# Data sets that no folder here has: files of the same form
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["covtype.data.gz", "covtype.data", "covertype.zip"])
def test_covertype_full_goes_before_the_sample(folder, monkeypatch, form):
    generator = np.random.default_rng(0)
    monkeypatch.setattr(datasets, "_COVERTYPE", dataclasses.replace(datasets._COVERTYPE, n_rows=20))
    table = generator.integers(0, 2, size=(20, 55))
    table[:, :10] += 3_000
    table[:, -1] += 3
    text = "".join(",".join(map(str, row)) + "\n" for row in table.tolist()).encode()
    if form == "covertype.zip":
        zipped(folder / form, covtype_DOT_info="about", covtype_DOT_data_DOT_gz=gzip.compress(text))
    else:
        (folder / form).write_bytes(gzip.compress(text) if form.endswith("gz") else text)
    (folder / "covertype_16pct.npz").write_bytes(b"not looked at")
    covertype = datasets.load_covertype(folder)
    assert covertype.name == "covertype"
    np.testing.assert_array_equal(covertype.X, table[:, :-1])
    np.testing.assert_array_equal(covertype.y, table[:, -1])
    assert covertype.X.dtype == np.int16


@pytest.mark.parametrize(("subset", "file_name"), [("train", "cod-rna"), ("test", "cod-rna.t")])
def test_cod_rna(folder, monkeypatch, subset, file_name):
    small = dataclasses.replace(datasets._COD_RNA[subset], n_rows=3)
    monkeypatch.setitem(datasets._COD_RNA, subset, small)
    (folder / file_name).write_text(
        "-1 1:-766 2:128 3:0.140625 4:0.304688 5:0.234375 6:0.140625 7:0.304688 8:0.234375 \n"
        "+1 1:-52 3:0.25 8:1e-2\n"
        "1 2:90\n"
    )
    cod_rna = datasets.load_cod_rna(folder, subset=subset)
    assert cod_rna.name == f"cod-rna-{subset}"
    assert cod_rna.y.tolist() == [0, 1, 1]
    assert cod_rna.X.shape == (3, 8)
    assert cod_rna.X[1].tolist() == [-52, 0, 0.25, 0, 0, 0, 0, 0.01]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("-1 9:1\n", "found the feature index 9 in row 1, expected 1 to 8"),
        ("-1 0:1\n", "found the feature index 0 in row 1"),
        ("-1 one:1\n", "invalid literal"),
        ("2 1:1\n" * 59_535, r"found the labels \[2.0\], expected -1 and 1"),
        ("-1 1:1\n", r"shape \(1, 8\), expected \(59535, 8\)"),
    ],
)
def test_cod_rna_damaged(folder, content, message):
    path = folder / "cod-rna"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} cannot be used.*{message}"):
        datasets.load_cod_rna(folder)


@pytest.mark.parametrize(
    ("size", "file_name", "separator"),
    [("100k", "ml-100k/u.data", "\t"), ("1m", "ml-1m/ratings.dat", "::")],
)
@pytest.mark.parametrize("archived", [False, True])
def test_movielens(folder, monkeypatch, size, file_name, separator, archived):
    small = dataclasses.replace(datasets._MOVIELENS[size], n_rows=2)
    monkeypatch.setitem(datasets._MOVIELENS, size, small)
    text = "".join(
        separator.join(map(str, row)) + "\n" for row in [(196, 242, 3, 881250949), (1, 2, 5, 9)]
    )
    if archived:
        zipped(folder / f"ml-{size}.zip", **{"ml__README": "terms", file_name: text})
    else:
        (folder / file_name).parent.mkdir()
        (folder / file_name).write_text(text)
    movielens = datasets.load_movielens(folder, size=size)
    assert movielens.X.tolist() == [[196, 242], [1, 2]]
    assert movielens.y.tolist() == [3, 5]
    assert movielens.frame["timestamp"].tolist() == [881250949, 9]
    assert "no redistribution" in movielens.licence


def test_movielens_documents_its_terms():
    assert "may not be redistributed" in datasets.load_movielens.__doc__


@pytest.mark.parametrize("file_name", ["dataset.csv", "run_or_walk.csv", "run-or-walk.zip"])
def test_run_or_walk(folder, monkeypatch, file_name):
    small = dataclasses.replace(datasets._RUN_OR_WALK, n_rows=2)
    monkeypatch.setattr(datasets, "_RUN_OR_WALK", small)
    text = (
        "date,time,username,wrist,activity,acceleration_x,acceleration_y,acceleration_z,"
        "gyro_x,gyro_y,gyro_z\n"
        "2017-6-30,13:51:15:847724020,viktor,0,0,0.265,-0.7814,-0.0076,-0.059,0.0325,-2.9296\n"
        "2017-6-30,13:51:16:246945023,viktor,1,1,0.6722,-1.1233,-0.2344,-0.1757,0.0208,0.1269\n"
    )
    if file_name.endswith("zip"):
        zipped(folder / file_name, dataset_DOT_csv=text)
    else:
        (folder / file_name).write_text(text)
    run_or_walk = datasets.load_run_or_walk(folder)
    assert run_or_walk.X.shape == (2, 6)
    assert run_or_walk.y.tolist() == [0, 1]
    assert run_or_walk.frame["wrist"].tolist() == [0, 1]


def test_run_or_walk_is_downloaded_by_hand(folder):
    with pytest.raises(DatasetUnavailableError, match="downloaded without an account") as told:
        datasets.load_run_or_walk(folder)
    message = str(told.value)
    assert "by hand from https://www.kaggle.com" in message
    for part in (str(folder), "dataset.csv", "load_run_or_walk(data_home=...)", FOLDER_VARIABLE):
        assert part in message


@pytest.mark.parametrize(
    ("loader", "argument", "choices"),
    [
        ("load_cod_rna", "subset", "['train', 'test']"),
        ("load_movielens", "size", "['100k', '1m']"),
    ],
)
def test_unknown_part(loader, argument, choices):
    expected = f"{argument} should be one of {choices} but got 'all'"
    with pytest.raises(ValueError, match=re.escape(expected)):
        getattr(datasets, loader)(**{argument: "all"})


# --------------------------------------------------------------------------------------------------
# Where the file is looked for
# --------------------------------------------------------------------------------------------------


def test_places_in_order(folder, tmp_path, monkeypatch, served):
    root, address, asked = served
    (root / "sleepstudy.csv").write_text(SLEEPSTUDY)
    sha256 = hashlib.sha256((root / "sleepstudy.csv").read_bytes()).hexdigest()
    point(monkeypatch, "_SLEEPSTUDY", f"{address}/sleepstudy.csv", sha256)
    second = tmp_path / "second"
    second.mkdir()

    # Neither folder has it: the download, and from then on the cache.
    monkeypatch.setenv(FOLDER_VARIABLE, str(second))
    assert datasets.load_sleepstudy(folder).origin == "download"
    assert datasets.load_sleepstudy(folder).origin == "cache"
    assert asked == ["/sleepstudy.csv"]

    (second / "sleepstudy.csv").write_text(SLEEPSTUDY)
    assert datasets.load_sleepstudy(folder).origin == f"folder {second}"
    assert datasets.load_sleepstudy().origin == f"folder {second}"

    (folder / "sleepstudy.csv").write_text(SLEEPSTUDY)
    assert datasets.load_sleepstudy(folder).origin == f"folder {folder}"
    assert datasets.load_sleepstudy(str(folder)).origin == f"folder {folder}"
    assert asked == ["/sleepstudy.csv"]


def test_row_names_of_r_without_a_header(folder):
    (folder / "sleepstudy.csv").write_text(SLEEPSTUDY.replace("rownames", '""'))
    assert list(datasets.load_sleepstudy(folder).frame) == ["Reaction", "Days", "Subject"]


@pytest.mark.parametrize("given", ["data_home", FOLDER_VARIABLE])
def test_missing_folder_is_not_passed_over(tmp_path, monkeypatch, given):
    missing = tmp_path / "mispelt"
    if given == FOLDER_VARIABLE:
        monkeypatch.setenv(FOLDER_VARIABLE, str(missing))
    data_home = missing if given == "data_home" else None
    expected = f"{given} should be an existing folder but is {str(missing)!r}"
    with pytest.raises(NotADirectoryError, match=re.escape(expected)):
        datasets.load_sleepstudy(data_home)


# --------------------------------------------------------------------------------------------------
# Downloads
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_sources_are_complete(source):
    assert hasattr(datasets, source.loader)
    assert source.source.startswith("https://")
    if source.url is not None:
        assert source.url.startswith("https://")
        # A folder of downloads, named as they came, is a folder of data sets.
        assert source.url.rpartition("/")[2] in source.files
    if source.known_hash is not None:
        algorithm, _, digest = source.known_hash.partition(":")
        assert len(digest) == {"md5": 32, "sha256": 64}[algorithm]


def failed(loader, url):
    """Call a loader that should fail to download; return the message."""
    start = time.monotonic()
    with pytest.raises(DatasetUnavailableError) as told:
        loader()
    assert time.monotonic() - start < 5, "a failure should be told at once, without retries"
    message = str(told.value)
    for part in (url, "sleepstudy.csv", "load_sleepstudy(data_home=...)", FOLDER_VARIABLE):
        assert part in message
    return message


def test_no_connection(closed_port, monkeypatch):
    url = f"{closed_port}/sleepstudy.csv"
    point(monkeypatch, "_SLEEPSTUDY", url)
    assert "ConnectionError" in failed(datasets.load_sleepstudy, url)
    assert issubclass(DatasetUnavailableError, OSError)


def test_no_such_address(served, monkeypatch):
    _, address, asked = served
    url = f"{address}/sleepstudy.csv"
    point(monkeypatch, "_SLEEPSTUDY", url)
    assert "404" in failed(datasets.load_sleepstudy, url)
    assert len([path for path in asked if "sleepstudy" in path]) <= 2  # one request, logged twice


def test_timeout(monkeypatch):
    point(monkeypatch, "_SLEEPSTUDY", "unset")
    monkeypatch.setattr(datasets, "_DOWNLOAD_TIMEOUT", (0.2, 0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/sleepstudy.csv"
        point(monkeypatch, "_SLEEPSTUDY", url)
        assert "Timeout" in failed(datasets.load_sleepstudy, url)


def test_download_with_another_hash(served, monkeypatch, tmp_path):
    root, address, _ = served
    (root / "sleepstudy.csv").write_text(SLEEPSTUDY)
    url = f"{address}/sleepstudy.csv"
    point(monkeypatch, "_SLEEPSTUDY", url, "0" * 64)
    message = failed(datasets.load_sleepstudy, url)
    assert "hash" in message
    assert "0" * 64 in message
    assert not list((tmp_path / "cache").rglob("sleepstudy.csv")), "the wrong file was kept"


def test_cache_that_cannot_be_written(served, monkeypatch, tmp_path):
    root, address, _ = served
    (root / "sleepstudy.csv").write_text(SLEEPSTUDY)
    url = f"{address}/sleepstudy.csv"
    point(monkeypatch, "_SLEEPSTUDY", url)
    (tmp_path / "cache").write_text("a file where the folder should be")
    failed(datasets.load_sleepstudy, url)


def test_damaged_download_is_named_and_can_be_deleted(served, monkeypatch, tmp_path):
    root, address, _ = served
    (root / "sleepstudy.csv").write_text("<html>please log in</html>\n")
    point(monkeypatch, "_SLEEPSTUDY", f"{address}/sleepstudy.csv")
    cached = tmp_path / "cache" / "pymc_sgmcmc" / "sleepstudy.csv"
    for _ in range(2):  # from the download, then from the cache
        expected = f"{re.escape(str(cached))} cannot be used: found the columns .*Delete it"
        with pytest.raises(ValueError, match=expected):
            datasets.load_sleepstudy()
    cached.unlink()
    (root / "sleepstudy.csv").write_text(SLEEPSTUDY)
    assert datasets.load_sleepstudy().origin == "download"


# --------------------------------------------------------------------------------------------------
# Files that are not what they should be
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            SLEEPSTUDY.replace("Days", "Day"),
            r"found the columns \['Reaction', 'Day', 'Subject'\], "
            r"expected \['Reaction', 'Days', 'Subject'\]",
        ),
        (SLEEPSTUDY.rpartition("180,")[0], "found 179 rows, expected 180"),
        (SLEEPSTUDY.replace("250.0", "", 1), r"missing values in the columns \['Reaction'\]"),
        ("", "No columns"),
        ("a\n1,2\n1,2,3\n", "tokenizing"),
        (b"\xff\xfe\x00", "decode"),
    ],
    ids=["column", "rows", "missing", "empty", "ragged", "binary"],
)
def test_damaged_table(folder, content, message):
    path = folder / "sleepstudy.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as told:
        datasets.load_sleepstudy(folder)
    assert f"sleepstudy: the file {path} cannot be used" in str(told.value)
    assert "Expected 180 rows with the columns Days, Subject, Reaction" in str(told.value)
    assert "Replace it" in str(told.value)


def test_unknown_code(folder):
    content = data_file("Contraception.csv").read_text()
    (folder / "Contraception.csv").write_text(content.replace(",N,3+,", ",maybe,3+,", 1))
    expected = r"found the values \['maybe'\] in column 'use', expected \['N', 'Y'\]"
    with pytest.raises(ValueError, match=expected):
        datasets.load_contraception(folder)


def saved(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def one_array():
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


SKIN_X = np.zeros((245_057, 3), np.uint8)
SKIN_Y = np.ones(245_057, np.uint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "No data left|cannot be used"),
        (b"PK\x03\x04 cut short", "not a zip file"),
        (b"neither", "pickled"),
        (one_array(), "found a single array"),
        (saved(X=SKIN_X), r"found the arrays \['X'\], expected \['X', 'y'\]"),
        (saved(X=SKIN_X[:9], y=SKIN_Y), r"X of shape \(9, 3\), expected \(245057, 3\)"),
        (saved(X=SKIN_X, y=SKIN_Y[:9]), r"y of shape \(9,\), expected \(245057,\)"),
        (saved(X=SKIN_X + 0.5, y=SKIN_Y), "colours of type float64, expected integers"),
        (saved(X=SKIN_X.astype(int) + 256, y=SKIN_Y), "colours from 256 to 256, expected 0 to 255"),
        (saved(X=SKIN_X, y=SKIN_Y - 1), "classes from 0 to 0, expected 1 to 2"),
        (saved(X=SKIN_X, y=SKIN_Y), "values with SHA-256 .* expected the published ones"),
    ],
    ids=range(11),
)
def test_damaged_arrays(folder, content, message):
    path = folder / "skin.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as told:
        datasets.load_skin(folder)
    assert f"skin: the file {path} cannot be used" in str(told.value)
    assert "Expected 245057 rows of B, G, R" in str(told.value)


@pytest.mark.parametrize(
    ("file_name", "content", "message"),
    [
        ("Skin_NonSkin.txt", b"1 2 3\n", r"a table of shape \(1, 3\), expected \(245057, 4\)"),
        ("Skin_NonSkin.txt", b"1 2 3 x\n", "missing or no integers"),
        ("Skin_NonSkin.txt", b"1 2 3 1\n1 2\n", "missing or no integers"),
        ("skin+segmentation.zip", b"no zip", "not a zip file"),
    ],
)
def test_damaged_original(folder, file_name, content, message):
    path = folder / file_name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} cannot be used.*{message}"):
        datasets.load_skin(folder)


def test_archive_without_the_member(folder):
    zipped(folder / "skin+segmentation.zip", readme="nothing else")
    expected = r"found the members \['readme'\], expected one called Skin_NonSkin.txt"
    with pytest.raises(ValueError, match=expected):
        datasets.load_skin(folder)


def test_damaged_gzip(folder):
    content = gzip.compress(b"1,2,3\n" * 1_000)
    for damaged in (content[:-20], content[:12] + b"\xff\xff" + content[14:]):
        (folder / "covtype.data.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"covtype\.data\.gz cannot be used"):
            datasets.load_covertype(folder)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("2 0:1\n", "found 1 words in line 1, expected 2"),
        ("1 0:1\n", r"a table of shape \(1, 3\), expected \(302031, 3\)"),
        ("one\n", "invalid literal"),
    ],
)
def test_damaged_corpus(folder, lines, message):
    with tarfile.open(folder / "ap.tgz", "w:gz") as archive:
        for name, content in {"ap/ap.dat": lines, "ap/vocab.txt": "word\n"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content.encode()))
    with pytest.raises(ValueError, match=f"ap.tgz cannot be used.*{message}"):
        datasets.load_ap(folder)


def test_corpus_member_that_is_a_folder(folder):
    with tarfile.open(folder / "ap.tgz", "w:gz") as archive:
        member = tarfile.TarInfo("ap.dat")
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
    with pytest.raises(ValueError, match=r"found ap\.dat as a folder or link, expected a file"):
        datasets.load_ap(folder)


# --------------------------------------------------------------------------------------------------
# Optional packages
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def without(monkeypatch):
    def hide(package):
        import_module = datasets.importlib.import_module

        def refuse(name):
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)
            return import_module(name)

        monkeypatch.setattr(datasets.importlib, "import_module", refuse)

    return hide


INSTALL = re.escape('pip install "pymc_sgmcmc[datasets]"')


@pytest.mark.parametrize("loader", [datasets.load_randhie, datasets.load_fair])
def test_without_statsmodels(without, loader):
    without("statsmodels")
    with pytest.raises(ImportError, match=f"needs the package statsmodels.*{INSTALL}"):
        loader()


def test_without_pooch(without, folder):
    without("pooch")
    with pytest.raises(ImportError, match=f"needs the package pooch.*{INSTALL}.*{FOLDER_VARIABLE}"):
        datasets.load_sleepstudy(folder)
    (folder / "sleepstudy.csv").write_text(SLEEPSTUDY)
    assert len(datasets.load_sleepstudy(folder).frame) == 180


def test_parquet_without_pyarrow(without, tmp_path):
    path = tmp_path / "table.parquet"
    pd.DataFrame({"x": [1.0], "y": [0]}).to_parquet(path)
    without("pyarrow")
    with pytest.raises(ImportError, match=r'pyarrow.*pip install "pymc_sgmcmc\[files\]"'):
        datasets.load_table(path, "y")


# --------------------------------------------------------------------------------------------------
# The object
# --------------------------------------------------------------------------------------------------


def dataset_of(frame, features):
    return Dataset(name="own", frame=frame, target="y", feature_names=features, origin="memory")


def test_arrays_are_the_callers_own():
    dataset = dataset_of(pd.DataFrame({"a": [1, 2], "b": [3, 4], "y": [0, 1]}), ("b", "a"))
    X, y = dataset.X, dataset.y
    assert X.flags.c_contiguous
    X[0, 0] = 99
    y[0] = 99
    assert dataset.X.tolist() == [[3, 1], [4, 2]]
    assert dataset.y.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        ({"a": np.array([1], np.uint8), "b": np.array([2], np.uint8)}, np.uint8),
        ({"a": np.array([1], np.int64), "b": np.array([0.5], np.float32)}, np.float64),
        ({"a": np.array([True]), "b": np.array([0.5])}, np.float64),
        ({"a": pd.array([1], dtype="Int64"), "b": np.array([2])}, np.float64),
    ],
)
def test_type_of_the_features(columns, dtype):
    frame = pd.DataFrame({**columns, "y": [0]})
    X = dataset_of(frame, ("a", "b")).X
    assert X.dtype == dtype
    np.testing.assert_array_equal(X, [[float(frame["a"][0]), float(frame["b"][0])]])


def test_missing_value_of_a_nullable_column_is_nan():
    frame = pd.DataFrame({"a": pd.array([1, None], dtype="Int64"), "y": [0, 1]})
    np.testing.assert_array_equal(dataset_of(frame, ("a",)).X, [[1.0], [np.nan]])


def test_dataset_is_frozen_and_shown_on_one_line():
    dataset = dataset_of(pd.DataFrame({"a": [1], "y": [0]}), ("a",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        dataset.name = "other"
    assert repr(dataset) == "Dataset(name='own', 1 rows, target 'y', 1 features, origin='memory')"


# --------------------------------------------------------------------------------------------------
# A user's own table
# --------------------------------------------------------------------------------------------------

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
