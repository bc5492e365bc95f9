"""Search for files, downloads, and messages where they fail."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

import pytest
import requests

from pymc_sgmcmc import datasets
from pymc_sgmcmc.datasets import DatasetUnavailableError
from pymc_sgmcmc.datasets.fetch import FOLDER_VARIABLE
from pymc_sgmcmc.datasets.registry import REGISTRY
from tests.datasets.conftest import SLEEPSTUDY

URL = REGISTRY["sleepstudy"].url
WITHOUT_HASH = {"skin", "covertype", "cod-rna-train", "cod-rna-test"}
INSTALL = re.escape('pip install "pymc_sgmcmc[datasets]"')


@pytest.fixture
def home(monkeypatch, network):
    """The file of sleepstudy as a download would give it, with its hash."""
    network.files[URL] = SLEEPSTUDY
    sha256 = hashlib.sha256(SLEEPSTUDY.encode()).hexdigest()
    entry = replace(REGISTRY["sleepstudy"], known_hash=f"sha256:{sha256}")
    monkeypatch.setitem(REGISTRY, "sleepstudy", entry)


@pytest.mark.parametrize("entry", REGISTRY.values(), ids=lambda entry: entry.name)
def test_registry_is_complete(entry):
    assert entry.source.startswith("https://")
    assert all((entry.description, entry.licence, entry.citation))
    if not entry.url:
        assert entry.name in {"run-or-walk", "randhie", "fair", "covertype-16pct"}
    else:
        assert entry.url.startswith("https://")
        # A folder of downloads, named as they came, is a folder of data sets.
        assert entry.url.rpartition("/")[2] in entry.files
        assert (entry.known_hash is None) == (entry.name in WITHOUT_HASH)
        assert (entry.values_sha256 is None) == (entry.name != "skin")
    assert bool(entry.hashed_as) == (entry.values_sha256 is not None)
    if entry.known_hash is not None:
        algorithm, _, digest = entry.known_hash.partition(":")
        assert len(digest) == {"md5": 32, "sha256": 64}[algorithm]


def test_known_hashes_are_those_of_the_folder(data_folder):
    """The folder has the tables of R packages as they are downloaded, the others converted."""
    for entry in REGISTRY.values():
        if "Rdatasets" in entry.source:
            content = (data_folder / entry.files[0]).read_bytes()
            assert entry.known_hash == f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.mark.usefixtures("home")
def test_places_in_order(folder, tmp_path, monkeypatch, network):
    second = tmp_path / "second"
    second.mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, str(second))
    assert datasets.load("sleepstudy", folder).origin == "download"
    assert datasets.load("sleepstudy", folder).origin == "cache"
    (second / "sleepstudy.csv").write_text(SLEEPSTUDY)
    assert datasets.load("sleepstudy", folder).origin == f"folder {second}"
    assert datasets.load("sleepstudy").origin == f"folder {second}"
    (folder / "sleepstudy.csv").write_text(SLEEPSTUDY)
    assert datasets.load("sleepstudy", folder).origin == f"folder {folder}"
    assert datasets.load("sleepstudy", str(folder)).origin == f"folder {folder}"
    assert network.asked == [URL]


@pytest.mark.parametrize("given", ["data_home", FOLDER_VARIABLE])
def test_missing_folder_is_not_passed_over(tmp_path, monkeypatch, given):
    missing = tmp_path / "mispelt"
    if given == FOLDER_VARIABLE:
        monkeypatch.setenv(FOLDER_VARIABLE, str(missing))
    expected = f"{given} should be an existing folder, but is {str(missing)!r}"
    with pytest.raises(NotADirectoryError, match=re.escape(expected)):
        datasets.load("sleepstudy", missing if given == "data_home" else None)


@pytest.mark.parametrize(
    "error", [requests.ConnectionError("no route"), requests.HTTPError("404"), TimeoutError("30 s")]
)
def test_failed_download(folder, network, error):
    network.files[URL] = error
    with pytest.raises(DatasetUnavailableError) as told:
        datasets.load("sleepstudy", folder)
    message = str(told.value)
    for part in (URL, type(error).__name__, str(error), str(folder), "sleepstudy.csv"):
        assert part in message
    assert "data_home" in message
    assert FOLDER_VARIABLE in message
    assert network.asked == [URL], "a failure should be told at once, without retries"


def test_download_with_another_hash(network, tmp_path):
    network.files[URL] = SLEEPSTUDY
    with pytest.raises(DatasetUnavailableError, match="hash"):
        datasets.load("sleepstudy")
    assert not list((tmp_path / "cache").rglob("sleepstudy.csv")), "the wrong file was kept"


@pytest.mark.usefixtures("home")
def test_changed_file_of_the_cache_is_downloaded_again(tmp_path, network):
    datasets.load("sleepstudy")
    (tmp_path / "cache" / "pymc_sgmcmc" / "sleepstudy.csv").write_text("<html>\n")
    assert datasets.load("sleepstudy").origin == "download"
    assert network.asked == [URL, URL]


@pytest.mark.usefixtures("home")
def test_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(DatasetUnavailableError, match=re.escape(URL)):
        datasets.load("sleepstudy")


def test_download_without_a_known_hash_is_checked_by_its_values(network, tmp_path, capfd):
    """There is no message about the hash, which pooch would print for an unknown one."""
    url = REGISTRY["cod-rna-train"].url
    network.files[url] = "-1 1:1\n"
    cached = tmp_path / "cache" / "pymc_sgmcmc" / "cod-rna"
    damaged = pytest.raises(ValueError, match=f"{re.escape(str(cached))} cannot .*rows.*Delete it")
    with damaged, pytest.warns(UserWarning, match=f"cod-rna.*{re.escape(url)} is not verified"):
        datasets.load("cod-rna-train")
    with damaged:  # from the cache, without a warning
        datasets.load("cod-rna-train")
    assert network.asked == [url]
    assert "SHA256" not in capfd.readouterr().err


def test_run_or_walk_is_downloaded_by_hand(folder):
    with pytest.raises(DatasetUnavailableError, match="downloaded without an account") as told:
        datasets.load("run-or-walk", folder)
    for part in ("by hand from https://www.kaggle.com", str(folder), "dataset.csv", "data_home"):
        assert part in str(told.value)


@pytest.mark.parametrize(
    ("package", "name"),
    [("statsmodels", "randhie"), ("statsmodels", "fair"), ("pooch", "sleepstudy")],
)
def test_without_a_package(without, package, name):
    without(package)
    with pytest.raises(ImportError, match=f"needs the package {package}.*{INSTALL}"):
        datasets.load(name)


def test_without_scikit_learn(without, folder):
    without("sklearn")
    (folder / "cod-rna").write_text("-1 1:1\n")
    with pytest.raises(ImportError, match=f"needs the package sklearn.*{INSTALL}"):
        datasets.load("cod-rna-train", folder)


def test_folder_needs_no_pooch(without, folder):
    without("pooch")
    (folder / "sleepstudy.csv").write_text(SLEEPSTUDY)
    assert len(datasets.load("sleepstudy", folder).frame) == 180
