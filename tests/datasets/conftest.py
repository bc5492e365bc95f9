"""Tests use neither the user's folder or cache nor the network."""

from __future__ import annotations

import importlib
from pathlib import Path

import pooch
import pytest

from pymc_sgmcmc.datasets.fetch import FOLDER_VARIABLE

SLEEPSTUDY = "rownames,Reaction,Days,Subject\n" + "".join(
    f"{18 * day + subject + 1},{250.0 + 10 * day},{day},{308 + subject}\n"
    for day in range(10)
    for subject in range(18)
)
"""A file with the form of that in the registry, and other values."""


class Network:
    """A replacement of pooch's downloader, with files by address and a list of requests."""

    def __init__(self):
        self.files: dict[str, str | Exception] = {}
        self.asked: list[str] = []

    def __call__(self, url, output_file, pooch):
        self.asked.append(url)
        content = self.files.get(url, ConnectionError("no network"))
        if isinstance(content, Exception):
            raise content
        Path(output_file).write_text(content)


@pytest.fixture(autouse=True)
def network(monkeypatch, tmp_path):
    network = Network()
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache" / project)
    monkeypatch.setattr(pooch, "HTTPDownloader", lambda **settings: network)
    return network


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    return path


@pytest.fixture
def without(monkeypatch):
    """Hide an installed package."""

    def hide(package):
        import_module = importlib.import_module

        def refuse(name):
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)
            return import_module(name)

        monkeypatch.setattr(importlib, "import_module", refuse)

    return hide
