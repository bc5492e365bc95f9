"""Settings and verdict of a run at the end of `pymc.sample`, and statistics that files can hold.

PyMC 6.4 offers step methods no place for what belongs to the whole run. This wraps the private
function with which `pymc.sample` ends, for runs with a step method of this package: alone, for the
settings; with others, for the shape of the statistics.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pymc.sampling.mcmc as mcmc
import xarray as xr
from xarray import DataTree

from pymc_sgmcmc.bias import bias_warnings
from pymc_sgmcmc.moments import DRAWS, moments_dataset
from pymc_sgmcmc.moments import GROUP as MOMENTS_GROUP
from pymc_sgmcmc.run_settings import (
    GROUP,
    PREFIX,
    STEP_METHODS,
    STEP_SIZE_COLUMN,
    RunSettings,
    StatisticTypes,
)

RAGGED = ("position", "gradient")
"""Statistics with an array for each draw and step method, whose lengths can differ."""

_log = logging.getLogger("pymc.sgmcmc")


def install() -> None:
    """Wrap the last function of `pymc.sample`, once."""
    if not hasattr(mcmc._sample_return, "_pymc_sgmcmc"):
        mcmc._sample_return = _with_settings(mcmc._sample_return)


def _with_settings(sample_return: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sample_return)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = sample_return(*args, **kwargs)
        traces = kwargs.get("traces")
        if not isinstance(result, DataTree) or not _is_ours(traces):
            return result
        settings = settings_of(traces)
        try:
            make_rectangular(result)
            if settings is None:
                return result
            attach(result, settings)
            attach_moments(result, _chosen(kwargs), settings)
            remove_silent_warnings(result)
            if kwargs.get("compute_convergence_checks") and not kwargs.get("quiet"):
                for message in _warnings(result):
                    _log.warning(message)
        except Exception:  # whatever is wrong with a report, the draws are worth more
            _log.exception("The report of the run failed; the draws are not affected.")
        return result

    wrapped._pymc_sgmcmc = True  # type: ignore[attr-defined]
    return wrapped


def _warnings(idata: DataTree) -> list[str]:
    try:
        return bias_warnings(idata)
    except ValueError as error:  # what the report asks for, such as more draws
        return [f"The bias of the run is not known. {error}"]


def settings_of(traces: Any) -> RunSettings | None:
    """Settings of the one step method of this package that made the traces.

    In a compound run they say so, and which column of the statistic ``step_size`` is that of the
    step method, where others record theirs. None where there is no step method of this package
    or more than one: their statistics share one name in a trace, and so would their settings.
    """
    try:
        types = list(next(iter(traces)).sampler_vars)
    except (TypeError, StopIteration, AttributeError):
        return None
    ours = [one for one in types if isinstance(one, StatisticTypes)]
    if len(ours) != 1:
        return None
    settings: RunSettings = ours[0].settings
    if len(types) == 1:
        return settings
    attributes = {**settings.attributes, STEP_METHODS: len(types)}
    with_step_size = [one for one in types if "step_size" in one]
    if len(with_step_size) > 1:
        attributes[STEP_SIZE_COLUMN] = next(
            column for column, one in enumerate(with_step_size) if one is ours[0]
        )
    return replace(settings, attributes=attributes)


def attach_moments(idata: DataTree, traces: Any, settings: RunSettings) -> None:
    """Write the moments over all transitions into a trace, NaN for chains that did not end."""
    if STEP_METHODS in settings.attributes:
        return
    dataset = moments_dataset([_moments_of(trace) for trace in traces], settings.labels)
    if dataset is not None:
        posterior = idata["posterior"]
        dataset = dataset.assign_coords(chain=posterior.coords["chain"].values)
        idata[MOMENTS_GROUP] = DataTree(dataset.assign_attrs({DRAWS: posterior.sizes["draw"]}))


def _chosen(arguments: Mapping[str, Any]) -> list[Any]:
    """Traces that PyMC makes the chains of its result of, in their order.

    After an interrupt it leaves out short ones.
    """
    tune = arguments["tune"] if arguments["discard_tuned_samples"] else 0
    return sorted(mcmc._choose_chains(arguments["traces"], tune)[0], key=lambda one: one.chain)


def _moments_of(trace: Any) -> Mapping[str, np.ndarray] | None:
    """What the last draw of a chain handed on, None where the chain was interrupted before it."""
    warnings = trace.get_sampler_stats("warning", sampler_idx=0)
    extra = getattr(warnings[-1], "extra", None) if len(warnings) else None
    return extra if isinstance(extra, Mapping) and "batch_sums" in extra else None


def remove_silent_warnings(idata: DataTree) -> None:
    """Take the moments out of the warnings, where `keep_warning_stat` keeps these in a trace."""
    for name in ("sample_stats", "warmup_sample_stats"):
        if name not in idata.children or "warning" not in idata[name].data_vars:
            continue
        warnings = idata[name].dataset["warning"]
        values = warnings.values.copy()
        for index in np.ndindex(values.shape):
            one: Any = values[index]
            if getattr(one, "extra", None) is not None and "batch_sums" in one.extra:
                values[index] = replace(one, extra=None) if one.message else None
        idata[name]["warning"] = warnings.copy(data=values)


def _is_ours(traces: Any) -> bool:
    """Whether a step method of this package is among those that made the traces."""
    try:
        types = list(next(iter(traces)).sampler_vars)
    except (TypeError, StopIteration, AttributeError):
        return False
    return any(isinstance(one, StatisticTypes) for one in types)


def make_rectangular(idata: DataTree) -> None:
    """Make numbers of `position` and `gradient` of several step methods, in a trace.

    PyMC keeps an array in an array for each draw and step method, which no file can hold. Here
    they get one dimension for the step methods (``position_dim_0``) and one for the coordinates
    (``position_dim_1``), which is as long as that of the largest step method needs; what the
    others lack is NaN.
    """
    for group in ("sample_stats", "warmup_sample_stats"):
        if group not in idata.children:
            continue
        for name in RAGGED:
            values = idata[group].dataset.get(name)
            if values is not None and values.dtype == object:
                dims = (*values.dims, f"{name}_dim_{values.ndim - 2}")
                idata[group][name] = xr.DataArray(_padded(values.values), dims=dims)


def _padded(values: np.ndarray) -> np.ndarray:
    """Numbers from an array of vectors, with NaN after the end of the shorter ones."""
    vectors = [np.atleast_1d(one) for one in values.ravel()]
    width = max(len(one) for one in vectors)
    found = np.full(
        (len(vectors), width), np.nan, dtype=np.result_type(*{one.dtype for one in vectors})
    )
    for row, vector in zip(found, vectors, strict=True):
        row[: len(vector)] = vector
    return found.reshape(*values.shape, width)


def attach(idata: DataTree, settings: RunSettings) -> None:
    """Write settings into a trace: attributes of `sample_stats`, and a group of arrays.

    Attributes are numbers and words, which is what all kinds of trace files hold: a setting that
    is None is left out, and truth values are 0 or 1.
    """
    written = {PREFIX + key: _plain(one) for key, one in settings.attributes.items()}
    for name in ("sample_stats", "warmup_sample_stats"):
        if name in idata.children:
            idata[name].attrs.update({k: one for k, one in written.items() if one is not None})
    idata[GROUP] = DataTree(settings.dataset())


def _plain(value: Any) -> Any:
    """A number or a word for what files cannot hold as it is."""
    if isinstance(value, np.generic):
        value = value.item()
    return int(value) if isinstance(value, bool) else value
