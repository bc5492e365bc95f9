"""A run that is killed at any instant, again and again, ends with the draws of one that was not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from functools import partial

import numpy as np
import psutil
import pytest

pytest.importorskip("zarr", minversion="3", reason="a store needs zarr 3")

from pymc_sgmcmc import SGLD, read_store, sample
from pymc_sgmcmc.chain import Chain
from pymc_sgmcmc.errors import ChainProcessError
from pymc_sgmcmc.sampling import store as stores
from tests.sampling.test_sample import SMALL, check_same
from tests.support import sampling
from tests.support.models import logistic_model

pytestmark = [
    pytest.mark.usefixtures("without_compiler"),
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="needs fork and signals"
    ),
    # Python warns of threads at a fork, which numerical libraries have.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

SETTINGS = {"chains": 3, "cores": 2, "draws": 6000, "tune": 500, "mp_ctx": "fork"}
"""These runs take about two seconds and write some hundred blocks."""

ours = partial(sampling.sample, run=sample)


@pytest.fixture
def many_blocks(monkeypatch):
    """Let each run of draws be a block, and be short."""
    length = Chain.run_length
    monkeypatch.setattr(Chain, "run_length", lambda chain: min(100, length(chain)))
    for name, value in {
        "SECONDS_A_BLOCK": 0.0,
        "SHARE_A_BLOCK": 0.0,
        "SHARE_OF_WRITING": np.inf,
    }.items():
        monkeypatch.setattr(stores, name, value)


def attempt(model, step, path):
    """Run or resume in this process, which the test may kill. It is silent about that."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        ours(model, step, store=path, resume=path.exists(), **SETTINGS)
    except ChainProcessError:
        sys.exit(3)


def check_kills(kills, longest, tmp_path):
    """Kill a parent or one of its processes at random instants until a run has had so many."""
    model = logistic_model()
    step = SGLD(model=model, thin=4, **SMALL)
    expected = ours(model, step, **SETTINGS)
    context = multiprocessing.get_context("fork")
    rng = np.random.default_rng()
    done, codes, number = 0, [], 0
    while done < kills:
        path, number = tmp_path / f"run_{number}.zarr", number + 1
        while True:
            process = context.Process(target=attempt, args=(model, step, path))
            process.start()
            chosen = parent = psutil.Process(process.pid)
            if done < kills:
                process.join(rng.uniform(0, longest))
                children = []
                if process.is_alive():
                    children = parent.children()
                if children and rng.random() < 0.5:
                    chosen = children[rng.integers(len(children))]
                if process.is_alive():
                    with_term = rng.random() < 0.2
                    os.kill(chosen.pid, signal.SIGTERM if with_term else signal.SIGKILL)
                    done += 1
                # No process may outlive its parent for long.
                process.join(30)
                assert not psutil.wait_procs(children, timeout=30)[1]
            process.join(60)
            codes.append(process.exitcode)
            if process.exitcode == 0:
                break
            assert process.exitcode in (3, -signal.SIGKILL, -signal.SIGTERM)
        check_same(read_store(path, model=model), expected)
    return codes


@pytest.mark.slow
def test_a_few_kills(many_blocks, tmp_path):
    check_kills(3, 1.0, tmp_path)


@pytest.mark.slow
def test_many_kills(many_blocks, tmp_path):
    began = time.monotonic()
    codes = check_kills(50, 1.5, tmp_path)
    print(f"{codes} in {time.monotonic() - began:.0f} s")
