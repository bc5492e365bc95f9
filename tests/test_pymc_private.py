"""Private names of PyMC: which versions are refused, and what runs without one of the names."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path

import numpy as np
import pymc.sampling.mcmc as mcmc
import pymc.sampling.parallel as parallel
import pytest

from pymc_sgmcmc import SGLD, pymc_private, sample
from tests.support.models import logistic_model

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
PRIVATE = {
    "_sample_return": mcmc,
    "_choose_chains": mcmc,
    "_quiet_logging": mcmc,
    "_initialize_multiprocessing_context": parallel,
    "_cpu_count": parallel,
}


@pytest.mark.parametrize("version", ["6.2.0", "6.3.2", "5.28.5"])
def test_older_versions_are_refused(version):
    with pytest.raises(ImportError, match=rf"needs PyMC 6.4 or later, but {version} is installed"):
        pymc_private.check_version(version)


@pytest.mark.parametrize("version", ["6.4.0", "6.5.0rc1", "6.10.1", "0+unknown"])
def test_other_versions_are_taken(version):
    pymc_private.check_version(version)


@pytest.mark.skipif(not PROJECT.exists(), reason="needs a clone")
def test_oldest_version_is_that_of_the_project():
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    oldest = ".".join(map(str, pymc_private.OLDEST))
    assert f"pymc>={oldest},<7" in project["dependencies"]


def run(model):
    step = SGLD(model=model, step_size=1e-3, preconditioner="identity", batch_size=20, thin=2)
    settings = {"chains": 2, "cores": 1, "random_seed": 1, "progressbar": False, "model": model}
    return sample(30, tune=10, step=step, **settings)


def test_runs_of_sample_are_the_same_without_private_names(monkeypatch, caplog):
    """Draws, statistics, settings and moments; the log names what `pm.sample` lacks."""
    model = logistic_model()
    expected = run(model)
    for name, module in PRIVATE.items():
        monkeypatch.delattr(module, name)
    idata = run(model)
    assert "PyMC" in caplog.text
    assert "Use `pymc_sgmcmc.sample`, which does." in caplog.text
    assert set(idata.children) == set(expected.children)
    for group in ("posterior", "sample_stats"):
        ours, theirs = (tree[group].to_dataset() for tree in (idata, expected))
        assert set(ours.variables) == set(theirs.variables)
        for name in ours.data_vars:
            np.testing.assert_array_equal(ours[name].values, theirs[name].values)
    settings = {
        tree_name: {k for k in tree["sample_stats"].attrs if k.startswith("sgmcmc")}
        for tree_name, tree in {"ours": idata, "theirs": expected}.items()
    }
    assert settings["ours"] == settings["theirs"]
    assert settings["ours"]


def test_chains_of_several_lengths_without_the_name(monkeypatch):
    monkeypatch.delattr(mcmc, "_choose_chains")
    assert pymc_private.choose_chains(["12345", "12", "1234"], 2) == (["12345", "1234"], 4)


def test_no_progress_bar_without_the_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymc.progress_bar", None)
    spec = importlib.util.spec_from_file_location("without_bar", pymc_private.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.MCMCProgressBarManager(None, 2, 10, 10, True) as bar:
        assert not bar._show_progress
    assert not isinstance(bar._backend, module.RichProgressBackend)
