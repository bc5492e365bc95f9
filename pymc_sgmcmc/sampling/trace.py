"""The trace of a chain from all of its draws, as PyMC records them one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pymc.backends.ndarray import NDArray
from pymc.model import Model
from pytensor.graph.replace import vectorize_graph
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.posterior.compiled import NUMPY_MODE, compile_on_arrays, quick_graphs
from pymc_sgmcmc.sampling.workers import Job

CHUNK_ELEMENTS = 2_000_000
"""One call evaluates the variables of so many draws that their elements are about this many."""


class Recorder:
    """Variables of a model, constrained ones and deterministics included, at all draws of a chain.

    Parameters
    ----------
    model : Model
    variables : sequence of TensorVariable, optional
        Variables to record, in terms of the value variables. The default is all of them.
    """

    def __init__(self, model: Model, variables: Sequence[TensorVariable] | None = None):
        self._model = model
        self._variables = list(variables or model.unobserved_value_vars)
        self._inputs = list(model.value_vars)
        single = [
            variable.type.clone(shape=(None, *variable.type.shape))() for variable in self._inputs
        ]
        with quick_graphs():
            batched = vectorize_graph(self._variables, dict(zip(self._inputs, single, strict=True)))
            self._function = compile_on_arrays(single, batched, NUMPY_MODE)

    def values(self, points: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Values of the variables, with the draws first, at those of the value variables."""
        inputs = [points[variable.name] for variable in self._inputs]
        draws = len(inputs[0])
        first = self._evaluate([part[:1] for part in inputs])
        a_draw = sum(value.size for value in first) + sum(part[:1].size for part in inputs)
        step = max(1, CHUNK_ELEMENTS // max(1, a_draw))
        results = [np.empty((draws, *value.shape[1:]), value.dtype) for value in first]
        for start in range(0, draws, step):
            part = slice(start, start + step)
            for result, value in zip(
                results, self._evaluate([x[part] for x in inputs]), strict=True
            ):
                result[part] = value
        names = [str(variable.name) for variable in self._variables]
        return dict(zip(names, results, strict=True))

    def _evaluate(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        results = self._function(*inputs)
        # A deterministic that depends on no variable has no axis of draws.
        return [
            value
            if value.ndim > variable.ndim
            else np.broadcast_to(value, (len(inputs[0]), *value.shape))
            for value, variable in zip(map(np.asarray, results), self._variables, strict=True)
        ]

    def trace(
        self,
        number: int,
        job: Job,
        stats_dtypes: Sequence[Mapping[str, Any]],
    ) -> NDArray:
        """PyMC's trace of a chain."""
        values, stats = (_joined(job.values), _joined(job.stats))
        values = self.values(values)
        trace = NDArray(
            model=self._model,
            vars=self._variables,
            fn=lambda *_: None,
            var_shapes={name: value.shape[1:] for name, value in values.items()},
            var_dtypes={name: value.dtype for name, value in values.items()},
        )
        trace.setup(0, number, stats_dtypes)
        trace.samples = values
        trace._stats = [stats]
        trace.draws = trace.draw_idx = len(next(iter(stats.values())))
        return trace


def _joined(runs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([run[name] for run in runs]) for name in runs[0]}
