"""Errors and warnings of the package."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import warnings
from pathlib import Path

from pymc.exceptions import SamplingError
from xarray import DataTree

_INSIDE = (
    *(f"{Path(file).parent}{os.sep}" for file in (__file__, inspect.getfile(SamplingError))),
    *(inspect.getfile(module).removesuffix("py") for module in (contextlib, functools)),
)
"""Files with these beginnings are not the user's. Python does not accept a whole name as a
beginning, so that a file of the standard library is without its last letters."""


class ModelError(ValueError):
    """The model cannot be sampled by minibatches as it stands; the message says what to do.

    Attributes
    ----------
    local : str or None
        A variable with one element a row, where that is why rows are not separable.
    """

    local: str | None = None


class NotTogetherError(ModelError):
    """Local variables cannot be integrated out as named; the message says why, but no remedy."""


class UndeterminedError(ModelError):
    """The likelihood does not determine variables; the message names them, but no remedy."""


class NonFinitePositionError(SamplingError):
    """The chain left the finite numbers: the step is too large for the curvature."""


class CalibrationError(ValueError):
    """The draws cannot be calibrated from their gradients; the message says why."""


class ConvergenceError(RuntimeError):
    """The search for a maximum of the likelihood did not end at one."""


class ChainProcessError(RuntimeError):
    """The process of a chain ended before its chain did.

    Attributes
    ----------
    idata : xarray.DataTree or None
        The draws of the run so far, None where there were none after tuning.
    """

    idata: DataTree | None = None


class ClusterError(RuntimeError):
    """A Dask cluster cannot go on with its tasks; the message says why."""


class KilledWorkersError(ClusterError):
    """Several workers of a Dask cluster ended, one after another, while they ran a task."""


class StoreError(ValueError):
    """A store cannot be used for a run; the message says why, and what differs."""


class RowsError(ValueError):
    """Rows of data cannot be read; the message names them and says why."""


class BatchSizeWarning(UserWarning):
    """Gradient noise, and not curvature, limits the step size."""


class UncorrectedNoiseWarning(UserWarning):
    """Nothing corrects for the noise of the gradient, so the law is not the posterior."""


class CenterWarning(UserWarning):
    """The centre is no posterior mode, or the posterior is far from Gaussian around it."""


class BoundaryWarning(UserWarning):
    """The likelihood has its maximum where a parameter is at the boundary of its range."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line: the last one that is not of this package or of PyMC."""
    warnings.warn(message, category, skip_file_prefixes=_INSIDE)
