"""The end of `pymc.sample`, where settings and reports of a whole run are written.

PyMC builds the trace of a run from the recorded statistics alone, and calls no step method when the
run has ended. There is no public way to write settings into a trace, to name the coordinates of a
statistic or to report on a run. So the first step method that is made wraps the private function
that ends `pymc.sample`, where there is one (`pymc_sgmcmc.pymc_private`). Runs without a step method
of this package return what PyMC returns.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pymc import __version__ as pymc_version
from pymc.model import Model
from xarray import DataTree

from pymc_sgmcmc import pymc_private
from pymc_sgmcmc.errors import warn
from pymc_sgmcmc.record import RECORD, STATISTICS, finish
from pymc_sgmcmc.stages import log

REPORTS = (
    "pymc_sgmcmc.trace_tools.bias:measure_means",
    "pymc_sgmcmc.trace_tools.bias:bias_warnings",
    "pymc_sgmcmc.trace_tools.local_draws:local_warnings",
    "pymc_sgmcmc.trace_tools.predictive_density:minibatch_warnings",
)
"""Each of these functions gives messages to log at the end of a run, from its trace and its model.
They are imported then, since tools for traces use step methods."""

_NOT_NEEDED = {"idata_kwargs": {}, "compute_convergence_checks": False}
"""Where the trace cannot be made with these arguments, it is made with such values."""


@contextmanager
def draws_kept(
    what: str, draws: Sequence[Any] | None = None, errors: tuple = (Exception,)
) -> Iterator[None]:
    """Warn of an error after the chains have run, which should not cost their draws.

    Parameters
    ----------
    what : str
        What could not be done.
    draws : sequence, optional
        Draws so far. Where there are none, or the error has some itself, it is raised.
    errors : tuple of type
    """
    try:
        yield
    except errors as error:
        if draws is not None and (not draws or getattr(error, "idata", None) is not None):
            raise
        reason = f"{error}".split("\n")[0].rstrip(".")
        message = f"The draws are kept, but {what}: {type(error).__name__} {reason}".strip() + "."
        try:
            warn(message, UserWarning)
        except UserWarning:  # The user makes errors of warnings.
            log.warning(message)


def install() -> None:
    """Wrap the last function of `pymc.sample`, where that was not done before."""
    if not pymc_private.wrap_sample_return(_with_settings):
        log.warning(
            "PyMC %s ends a run in another way, so `pymc.sample` writes no settings, moments and "
            "report. Use `pymc_sgmcmc.sample`, which does.",
            pymc_version,
        )


def end_of_run(**arguments: Any) -> Any:
    """The trace of a run of `sample`, with its settings and report: see `pymc.sample`."""
    return pymc_private.sample_return(_with_settings)(**arguments)


def _with_settings(sample_return: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sample_return)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = None
        steps = _step_methods(kwargs.get("traces"))
        if any(RECORD in types for types in steps):
            for what, without in _NOT_NEEDED.items():
                if kwargs.get(what):
                    with draws_kept(f"the trace could not be made with `{what}`"):
                        result = sample_return(*args, **kwargs)
                        break
                kwargs = {**kwargs, what: without}
        if result is None:
            result = sample_return(*args, **kwargs)
        if not isinstance(result, DataTree) or not _is_ours(result):
            return result
        try:
            known = finish(result, steps, _last_records(kwargs))
            if known and kwargs.get("compute_convergence_checks") and not kwargs.get("quiet"):
                for message in _messages(result, kwargs["model"]):
                    log.warning(message)
        except Exception:  # An error in the report should not cost the user the draws.
            log.exception("The report of the run failed. The draws are not affected.")
        return result

    return wrapped


def _messages(idata: DataTree, model: Model) -> list[str]:
    messages = []
    for name in REPORTS:
        report = pkgutil.resolve_name(name)
        try:
            messages.extend(report(idata, model))
        except ValueError as error:  # The message says what the report needs, such as more draws.
            messages.append(f"The bias of the run is not known. {error}")
    return list(dict.fromkeys(messages))  # Reports may need the same.


def _is_ours(idata: DataTree) -> bool:
    """Whether a step method of this package is among those of a run."""
    return any(group in idata.children and RECORD in idata[group].data_vars for group in STATISTICS)


def _step_methods(traces: Any) -> list[Any]:
    """Types of the statistics of each step method, where the traces have them."""
    try:
        return list(next(iter(traces)).sampler_vars)
    except (TypeError, StopIteration, AttributeError):
        return []


def _last_records(arguments: Mapping[str, Any]) -> list[Any] | None:
    """Records in the last draws of the chains, which the trace may lack after an interrupt."""
    tune = arguments["tune"] if arguments["discard_tuned_samples"] else 0
    try:
        chosen = pymc_private.choose_chains(arguments["traces"], tune)[0]
        chains = sorted(chosen, key=lambda trace: trace.chain)
        return [trace.get_sampler_stats(RECORD, sampler_idx=0)[-1] for trace in chains]
    except (AttributeError, KeyError, IndexError, TypeError):
        return None  # a trace of another kind, or several step methods
