"""What this package takes of PyMC's private names, and what it does without one that is gone.

A minor version of PyMC may move or drop a private name. Where one is not there, the functions here
do less. Without the function that ends `pymc.sample`, its trace has draws without settings, moments
and report; `pymc_sgmcmc.sample` writes them by itself, and the log says so.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.context import BaseContext
from typing import Any, Literal

import pymc
import pymc.sampling.mcmc as mcmc
import pymc.sampling.parallel as parallel
from pymc.backends.base import IBaseTrace, MultiTrace
from pymc.stats.convergence import log_warnings, run_convergence_checks
from xarray import DataTree

OLDEST = (6, 4)
"""The oldest minor version of PyMC with which the tests pass, as in ``pyproject.toml``."""


def check_version(version: str) -> None:
    """Refuse a PyMC whose step methods have another contract.

    Raises
    ------
    ImportError
    """
    numbers = version.split(".")[:2]
    if all(number.isdigit() for number in numbers) and tuple(map(int, numbers)) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"pymc_sgmcmc needs PyMC {oldest} or later, but {version} is installed. Update it: "
            f'pip install --upgrade "pymc>={oldest},<7"'
        )


check_version(pymc.__version__)

try:
    from pymc.progress_bar import MCMCProgressBarManager, ProgressBarOptions
    from pymc.progress_bar.rich_progress import RichProgressBackend
except ImportError:
    ProgressBarOptions = Literal["combined", "split"]

    class MCMCProgressBarManager:  # type: ignore[no-redef]
        """No progress bar."""

        def __init__(self, *arguments: Any):
            self._show_progress, self._backend = False, None

        def __enter__(self) -> MCMCProgressBarManager:
            """Show nothing."""
            return self

        def __exit__(self, *error: Any) -> None:
            """Show nothing."""

    class RichProgressBackend:  # type: ignore[no-redef]
        """No backend is of this class."""


def wrap_sample_return(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Wrap the function that ends `pymc.sample`, once. Return whether there is one."""
    ends = getattr(mcmc, "_sample_return", None)
    if ends is not None and not hasattr(ends, "_pymc_sgmcmc"):
        mcmc._sample_return = wrap(ends)
        mcmc._sample_return._pymc_sgmcmc = True
    return ends is not None


def sample_return(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Any]:
    """The wrapped function that ends `pymc.sample`, or one that makes such a trace."""
    return mcmc._sample_return if wrap_sample_return(wrap) else wrap(_plain_trace)


def _plain_trace(
    *,
    traces: Sequence[IBaseTrace],
    tune: int,
    discard_tuned_samples: bool,
    compute_convergence_checks: bool,
    idata_kwargs: dict[str, Any],
    model: pymc.Model,
    quiet: bool,
    **others: Any,
) -> Any:
    """The draws of chains as `pymc.sample` returns them, without the times of the run."""
    traces, length = choose_chains(traces, tune if discard_tuned_samples else 0)
    draws = MultiTrace(traces)[:length]
    options = {"model": model, "save_warmup": not discard_tuned_samples, **idata_kwargs}
    idata = pymc.to_inference_data(draws[tune:] if discard_tuned_samples else draws, **options)
    if compute_convergence_checks and not quiet:
        log_warnings(run_convergence_checks(idata, model))
    for name in ("sample_stats", "warmup_sample_stats"):
        if name in idata.children:  # Objects of warnings do not go to files.
            kept = idata[name].to_dataset().drop_dims("warning_dim_0", errors="ignore")
            idata[name] = DataTree(kept.drop_vars("warning", errors="ignore"))
    return idata


def choose_chains(traces: Sequence[IBaseTrace], tune: int) -> tuple[Sequence[IBaseTrace], int]:
    """The chains to keep, and their length, where an interrupt has left them of several lengths."""
    chosen = getattr(mcmc, "_choose_chains", None)
    if chosen is not None:
        return chosen(traces, tune)
    kept = [trace for trace in traces if len(trace) > tune]
    return kept, min(map(len, kept), default=0)


def quiet_logging(quiet: bool) -> AbstractContextManager:
    """A context in which PyMC logs nothing, if `quiet`."""
    return getattr(mcmc, "_quiet_logging", lambda quiet: nullcontext())(quiet)


def process_context(mp_ctx: Any, *, on_jax: bool, quiet: bool) -> BaseContext:
    """How processes are started: as `pymc.sample` starts them, never forked where JAX runs."""
    private = getattr(parallel, "_initialize_multiprocessing_context", None)
    if private is not None:
        return private(mp_ctx, mode="JAX" if on_jax else None, quiet=quiet)
    if isinstance(mp_ctx, BaseContext):
        return mp_ctx
    return multiprocessing.get_context("spawn" if mp_ctx is None and on_jax else mp_ctx)


def cpu_count() -> int:
    """Number of processors by which `pymc.sample` chooses the number of chains."""
    return getattr(parallel, "_cpu_count", lambda: multiprocessing.cpu_count() // 2)()
