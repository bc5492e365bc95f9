"""The trace of a chain from all of its draws, as PyMC records them one by one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr
from pymc.backends.base import MultiTrace
from pymc.backends.ndarray import NDArray
from pymc.model import Model
from pytensor.compile.executor import Function
from pytensor.graph.replace import vectorize_graph
from pytensor.tensor.variable import TensorVariable
from xarray import DataTree

from pymc_sgmcmc.checks import names_among
from pymc_sgmcmc.compiling.compiled import NUMPY_MODE, compile_on_arrays, quick_graphs
from pymc_sgmcmc.posterior.position import PositionLayout, refuse_dimensions
from pymc_sgmcmc.pymc_private import choose_chains
from pymc_sgmcmc.record import DIMENSION, POSITION
from pymc_sgmcmc.sampling.workers import Job
from pymc_sgmcmc.step_methods.pymc_hook import draws_kept, end_of_run

CHUNK_ELEMENTS = 2_000_000
"""One call evaluates the variables of so many draws that their elements are about this many."""


TRIED = 3
"""The evaluation of several draws at once is tried at this many points before it is used."""


class _WholeTrace(NDArray):
    """PyMC's trace of a chain, whose statistics are arrays of one step method."""

    def get_sampler_stats(
        self, stat_name: str, sampler_idx: int | None = None, burn: int = 0, thin: int = 1
    ) -> np.ndarray:
        """Statistics of the draws, (draws, ...), as PyMC's, which stacks objects one by one."""
        values = self._stats[0][stat_name][burn::thin]
        is_stacked = values.dtype == object and sampler_idx is None
        return values.reshape(len(values), -1) if is_stacked else values


class Recorder:
    """Variables of a model, constrained ones and deterministics included, at all draws of a chain.

    They are evaluated for many draws at once, where that gives the same as one by one.

    Parameters
    ----------
    model : Model
    point : mapping from str to numpy.ndarray
        Values of the value variables, around which both ways are compared.
    variables : sequence of TensorVariable, optional
        Variables to record, in terms of the value variables. The default is all of them.
    """

    def __init__(
        self,
        model: Model,
        point: Mapping[str, np.ndarray],
        variables: Sequence[TensorVariable] | None = None,
    ):
        self._model = model
        self._variables = list(variables or model.unobserved_value_vars)
        self._inputs = list(model.value_vars)
        with quick_graphs():
            self._single = compile_on_arrays(self._inputs, self._variables, NUMPY_MODE)
        self._at_once = self._compiled_at_once(point)

    def _compiled_at_once(self, point: Mapping[str, np.ndarray]) -> Function | None:
        """The function of many draws, None where an operation has none or gives something else."""
        draws = [
            variable.type.clone(shape=(None, *variable.type.shape))() for variable in self._inputs
        ]
        rng = np.random.default_rng(1)
        values = [np.asarray(point[variable.name]) for variable in self._inputs]
        around = [
            (value + 0.3 * rng.standard_normal((TRIED, *value.shape))).astype(value.dtype)
            for value in values
        ]
        one_by_one = self._one_by_one(around)
        try:
            with quick_graphs():
                batched = vectorize_graph(
                    self._variables, dict(zip(self._inputs, draws, strict=True))
                )
                function = compile_on_arrays(draws, batched, NUMPY_MODE)
            found = self._with_draws(function(*around), TRIED)
        except Exception:  # Operations may fail in any way where they do not allow another axis.
            return None
        same = all(
            value.shape == expected.shape
            and value.dtype == expected.dtype
            and np.allclose(value, expected, rtol=1e-9, atol=1e-12, equal_nan=True)
            for value, expected in zip(found, one_by_one, strict=True)
        )
        return function if same else None

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
        if self._at_once is not None:
            try:
                return self._with_draws(self._at_once(*inputs), len(inputs[0]))
            except Exception:  # No error here should cost the user the draws.
                self._at_once = None
        return self._one_by_one(inputs)

    def _one_by_one(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        found = [self._single(*values) for values in zip(*inputs, strict=True)]
        return [np.stack(values) for values in zip(*found, strict=True)]

    def _with_draws(self, results: Sequence[np.ndarray], draws: int) -> list[np.ndarray]:
        """The results, with an axis of draws where they depend on no variable."""
        return [
            value if value.ndim > variable.ndim else np.broadcast_to(value, (draws, *value.shape))
            for value, variable in zip(map(np.asarray, results), self._variables, strict=True)
        ]

    def traces(self, jobs: Sequence[Job]) -> list[NDArray]:
        """PyMC's traces of the chains that have draws.

        Where a deterministic fails at some draw, they have the free variables.
        """
        with_draws = [(number, job) for number, job in enumerate(jobs) if job.done]
        model, recorder = self._model, self
        for simpler in (model.replace_rvs_by_values(model.free_RVs), model.value_vars):
            with draws_kept(f"`{recorder._variables[-1].name}` and others could not be computed"):
                return [recorder.trace(*chain) for chain in with_draws]
            recorder = Recorder(model, with_draws[0][1].point, simpler)
        return [recorder.trace(*chain) for chain in with_draws]

    def trace(self, number: int, job: Job) -> NDArray:
        """PyMC's trace of a chain."""
        values, stats = self.values(joined(job.values)), joined(job.stats)
        trace = _WholeTrace(
            model=self._model,
            vars=self._variables,
            fn=lambda *_: None,
            var_shapes={name: value.shape[1:] for name, value in values.items()},
            var_dtypes={name: value.dtype for name, value in values.items()},
        )
        trace.setup(0, number, [{name: array.dtype for name, array in stats.items()}])
        trace.samples = values
        trace._stats = [stats]
        trace.draws = trace.draw_idx = len(next(iter(stats.values())))
        return trace


def whole_trace(
    recorder: Recorder,
    jobs: Sequence[Job],
    **options: Any,
) -> DataTree:
    """The trace of all chains that have draws, as `pymc.sample` returns it.

    Where PyMC leaves out chains that are much shorter than others, the rest keep their numbers.

    Parameters
    ----------
    recorder : Recorder
    jobs : sequence of Job
    **options
        Arguments of the function of PyMC that ends a run.
    """
    traces = recorder.traces(jobs)
    with warnings.catch_warnings():
        # Many chains at once may each have fewer draws than there are chains.
        warnings.filterwarnings("ignore", "Found chain dimension to be longer", UserWarning)
        idata = end_of_run(
            run=None, traces=traces, return_inferencedata=True, keep_warning_stat=False, **options
        )
    tune = options["tune"] if options["discard_tuned_samples"] else 0
    numbers = sorted(trace.chain for trace in choose_chains(traces, tune)[0])
    for name, group in idata.children.items():
        if group.sizes.get("chain") == len(numbers) < len(jobs):
            idata[name] = DataTree(group.to_dataset().assign_coords(chain=numbers))
    return idata


def check_conversion(
    model: Model, names: str | Sequence[str] | None, options: Mapping[str, Any]
) -> None:
    """Convert one draw with the options of a user for the trace, before a run whose draws need it.

    Raises
    ------
    TypeError, ValueError, ModelError
    """
    if not options:
        return
    ours = {"trace", "prior", "posterior_predictive", "model"}
    known = [name for name in signature(pm.to_inference_data).parameters if name not in ours]
    names_among("idata_kwargs", list(options), known)
    point = model.initial_point()
    job = Job(np.random.default_rng(), point)
    job.add({name: value[None] for name, value in point.items()}, {"position": np.zeros((1, 1))})
    recorder = Recorder(model, point, recorded_variables(model, names))
    trace = recorder.trace(0, job)
    try:
        pm.to_inference_data(MultiTrace([trace]), model=model, **{"save_warmup": False, **options})
    except Exception as error:
        raise ValueError(
            f"`idata_kwargs` should be arguments with which `pymc.to_inference_data` makes a trace "
            f"of this model, but with {dict(options)!r} it fails: {error}. See its docstring."
        ) from error


def groups_of_points(
    model: Model,
    points: Mapping[str, np.ndarray],
    chains: int,
    var_names: str | Sequence[str] | None = None,
) -> dict[str, xr.Dataset]:
    """The groups of a trace that follow from the values of all value variables.

    Parameters
    ----------
    model : pymc.Model
    points : mapping of str to numpy.ndarray
        Values with chains and draws as one first axis, chain by chain.
    chains : int
    var_names : str or sequence of str, optional
        Variables to record. The default is all of them.

    Returns
    -------
    dict of str to xarray.Dataset
        ``posterior``, with deterministics, and ``observed_data`` and ``constant_data`` where the
        model has any.
    """
    recorder = Recorder(
        model,
        {name: values[0] for name, values in points.items()},
        recorded_variables(model, var_names),
    )
    values = recorder.values(points)
    # PyMC gives draws of the prior the dimensions of a model, and adds its data.
    names = recorded_names(model, var_names) or [str(v.name) for v in model.unobserved_RVs]
    made = pm.to_inference_data(prior={name: values[name] for name in names}, model=model)
    flat = made["prior"].to_dataset()
    draws = len(next(iter(points.values()))) // chains
    posterior = xr.Dataset(
        {
            name: (array.dims, array.values.reshape(chains, draws, *array.shape[2:]))
            for name, array in flat.data_vars.items()
        },
        {name: values for name, values in flat.coords.items() if name not in ("chain", "draw")},
        flat.attrs,
    ).assign_coords(chain=range(chains), draw=range(draws))
    groups = {"posterior": posterior}
    for name in ("observed_data", "constant_data"):
        if name in made.children:
            groups[name] = made[name].to_dataset()
    return groups


def groups_of_positions(
    model: Model, layout: PositionLayout, positions: np.ndarray, **stats: np.ndarray
) -> dict[str, xr.Dataset]:
    """`groups_of_points` of positions, with these and other statistics in ``sample_stats``.

    Parameters
    ----------
    model : pymc.Model
    layout : PositionLayout
    positions : numpy.ndarray, shape (chains, draws, d)
    **stats : numpy.ndarray, shape (chains, draws)
    """
    chains, draws, d = positions.shape
    points = layout.unravel_all(positions.reshape(-1, d).astype(layout.dtype))
    dims = ("chain", "draw")
    return groups_of_points(model, points, chains) | {
        "sample_stats": xr.Dataset(
            {
                POSITION: ((*dims, DIMENSION), positions),
                **{name: (dims, values) for name, values in stats.items()},
            },
            coords={"chain": range(chains), "draw": range(draws), DIMENSION: list(layout.labels)},
        )
    }


def recorded_names(model: Model, names: str | Sequence[str] | None) -> list[str] | None:
    """Names of the variables to record, or None for all.

    Raises
    ------
    TypeError, ValueError
    """
    refuse_dimensions(model)
    if names is None:
        return None
    known = [str(variable.name) for variable in model.unobserved_RVs]
    asked = names_among("var_names", names, known)
    return [name for name in known if name in asked]


def recorded_variables(
    model: Model, names: str | Sequence[str] | None
) -> list[TensorVariable] | None:
    """The variables to record, in terms of the value variables, or None for all.

    Raises
    ------
    ValueError
    """
    chosen = recorded_names(model, names)
    if chosen is None:
        return None
    return model.replace_rvs_by_values([model[name] for name in chosen])


def joined(runs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Values or statistics of runs of draws as those of one run."""
    return {name: np.concatenate([run[name] for run in runs]) for name in runs[0]}
