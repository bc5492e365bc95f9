"""Notes of the lines that made a graph are forgotten in copies of it."""

from __future__ import annotations

import subprocess
import sys

import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.traversal import ancestors

from pymc_sgmcmc.compiling.compiled import (
    NUMPY_MODE,
    PYTHON_MODE,
    compile_quietly,
    quick_graphs,
)
from pymc_sgmcmc.posterior.simplify import prepared


@pytest.fixture
def noted():
    """An input and a graph of it with notes, as PyTensor makes them by default."""
    with pytensor.config.change_flags(traceback__limit=8):
        x = pt.vector("x")
        y = pt.log(pt.exp(x) * pt.switch(x > 0, 2.0, 3.0)).sum()
        assert y.tag.trace
        yield x, y
        assert y.tag.trace


def notes(graph):
    return [note for each in graph for note in getattr(each.tag, "trace", [])]


@pytest.mark.parametrize("mode", [NUMPY_MODE, PYTHON_MODE, "FAST_COMPILE"])
def test_functions_have_none(noted, mode):
    x, y = noted
    function = compile_quietly([x], y, mode)
    assert not notes(node.outputs[0] for node in function.maker.fgraph.apply_nodes)


def test_log_densities_before_gradients_have_none(noted):
    _, y = noted
    with quick_graphs():
        found = prepared(y)
    assert not notes(each for each in ancestors([found]) if each.owner is not None)


CORRELATED_SLOPES = """
import resource
import numpy as np, pymc as pm
from pymc_sgmcmc import SGLDCV, marginalize
resource.setrlimit(resource.RLIMIT_DATA, (4 * 2**30, 4 * 2**30))
rng = np.random.default_rng(5)
group = np.repeat(np.arange(85), 11)
x, y = rng.normal(size=(2, len(group)))
with pm.Model() as model:
    chol, *_ = pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=pm.Exponential.dist(0.5, shape=2))
    ab = pm.MvNormal("ab", mu=pm.Normal("mu", 0, 5, shape=2), chol=chol, shape=(85, 2))
    pm.Normal("y", ab[group, 0] + ab[group, 1] * x, pm.Exponential("sd", 1), observed=y)
SGLDCV(model=marginalize(model, "ab"))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of POSIX")
def test_correlated_slopes_of_groups_fit_in_memory():
    """Their notes filled it: two compilations doubled those of constants again and again."""
    subprocess.run([sys.executable, "-c", CORRELATED_SLOPES], check=True, timeout=900)
