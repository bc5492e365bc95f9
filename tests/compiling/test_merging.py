"""Equal parts of graphs are computed once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pytensor.tensor.basic import Alloc

from pymc_sgmcmc import SGLDCV
from pymc_sgmcmc.compiling.compiled import NUMPY_MODE, PYTHON_MODE, compile_quietly


@pytest.mark.parametrize("mode", ["NUMBA", NUMPY_MODE, PYTHON_MODE])
def test_lengths_have_more_than_8_bits(mode):
    """PyTensor multiplies 40 and 7 with 8 bits, which is 24."""
    x = pt.scalar("x")
    function = compile_quietly([x], pt.alloc(x, 40, 7).sum(), mode)
    assert function(0.5) == 140.0


def test_lengths_of_both_types_are_merged():
    x = pt.scalar("x")
    lengths = np.int8(6), np.int64(6)
    one, other = (pt.join(0, pt.alloc(x, pt.constant(length)), [1.0]) for length in lengths)
    function = compile_quietly([x], [pt.exp(one), pt.sin(other)], NUMPY_MODE)
    names = Counter(type(node.op).__name__ for node in function.maker.fgraph.apply_nodes)
    assert names["Join"] == names["Alloc"] == 1


def test_a_transition_has_each_operation_once(rng):
    """Prior and rows have the same Cholesky factor of the joint block, and one derivative of it."""
    index = rng.integers(4, size=(3, 200))
    with pm.Model() as model:
        predictor = pm.Normal("mean")
        for number, of_rows in enumerate(index):
            scale = pm.HalfNormal(f"scale_{number}")
            predictor = predictor + pm.Normal(f"z_{number}", 0, scale, shape=4)[of_rows]
        pm.Bernoulli("y", logit_p=predictor, observed=rng.integers(2, size=200))
    with model:
        step = SGLDCV(
            step_size=0.1,
            preconditioner="curvature",
            batch_size=20,
            compile_kwargs={"mode": "NUMBA"},
        )
    nodes = step.block._function._nodes
    # Arrays of zeros are apart, as other operations change them in place.
    computed = (node for node in nodes if not isinstance(node.op, Alloc))
    counts = Counter((node.op, *node.inputs) for node in computed)
    assert max(counts.values()) == 1
    factors = [node for node in nodes if type(node.op).__name__ == "Cholesky"]
    assert len(factors) == 1
