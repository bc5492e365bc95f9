"""The end of `pymc.sample`, where settings and reports of a whole run are written.

PyMC 6.4 builds the trace of a run from the recorded statistics alone, and calls no step method when
the run has ended. There is no public way to write settings into a trace, to name the coordinates of
a statistic or to report on a run. So the first step method that is made wraps the private function
that ends `pymc.sample`. Runs without a step method of this package return what PyMC returns.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pymc.sampling.mcmc as mcmc
from pymc.model import Model
from xarray import DataTree

from pymc_sgmcmc.record import RECORD, STATISTICS, finish

reports: list[Callable[[DataTree, Model], list[str]]] = []
"""Each of these functions gives messages to log at the end of a run of a model."""

log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold


def install() -> None:
    """Wrap the last function of `pymc.sample`, where that was not done before."""
    if not hasattr(mcmc._sample_return, "_pymc_sgmcmc"):
        mcmc._sample_return = _with_settings(mcmc._sample_return)


def _with_settings(sample_return: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sample_return)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = sample_return(*args, **kwargs)
        if not isinstance(result, DataTree) or not _is_ours(result):
            return result
        try:
            known = finish(result, _step_methods(kwargs.get("traces")), _last_records(kwargs))
            if known and kwargs.get("compute_convergence_checks") and not kwargs.get("quiet"):
                for message in _messages(result, kwargs["model"]):
                    log.warning(message)
        except Exception:  # An error in the report should not cost the user the draws.
            log.exception("The report of the run failed. The draws are not affected.")
        return result

    wrapped._pymc_sgmcmc = True  # type: ignore[attr-defined]
    return wrapped


def _messages(idata: DataTree, model: Model) -> list[str]:
    messages = []
    for report in reports:
        try:
            messages.extend(report(idata, model))
        except ValueError as error:  # The message says what the report needs, such as more draws.
            messages.append(f"The bias of the run is not known. {error}")
    return messages


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
        chosen = mcmc._choose_chains(arguments["traces"], tune)[0]
        chains = sorted(chosen, key=lambda trace: trace.chain)
        return [trace.get_sampler_stats(RECORD, sampler_idx=0)[-1] for trace in chains]
    except (AttributeError, KeyError, IndexError, TypeError):
        return None  # a trace of another kind, or several step methods
