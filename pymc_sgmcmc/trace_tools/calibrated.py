"""A trace with stated errors, and with calibrated draws beside those that the chains made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pymc as pm
from xarray import DataTree

from pymc_sgmcmc.record import ACCURACY, UNCALIBRATED, groups_of
from pymc_sgmcmc.trace_tools.affine_map import map_between
from pymc_sgmcmc.trace_tools.moved import PositionVariables, mapped, moved_groups
from pymc_sgmcmc.trace_tools.reader import check_trace, read_run
from pymc_sgmcmc.trace_tools.stated import StatedErrors
from pymc_sgmcmc.trace_tools.variables import posterior_of


def with_stated_errors(
    idata: DataTree,
    errors: StatedErrors,
    model: pm.Model | None,
    attributes: Mapping[str, Any],
) -> DataTree:
    """A trace with a group of stated errors, and with calibrated draws where these were corrected.

    The calibrated draws have exactly the stated means and covariance. All groups that they replace
    are kept under other names.

    Raises
    ------
    ValueError
        Where variables of the posterior are not functions of the position.
    """
    groups = groups_of(idata)
    labels = None
    if errors.covariance is not None:
        run = read_run(idata)
        labels = run.labels
        variables = PositionVariables.of(posterior_of(idata), run, model)
        draws = run.positions.astype(float).reshape(-1, run.dimension)
        center, covariance = draws.mean(0), np.atleast_2d(np.cov(draws.T))
        map = map_between(covariance, errors.covariance)
        positions = mapped(run.positions, center, map, errors.mean)
        moved = moved_groups(idata, variables, positions)
        replaced = {
            name: group
            for name, group in groups.items()
            if name not in moved or name in ("posterior", "sample_stats")
        }
        groups = moved | {f"{UNCALIBRATED}{name}": group for name, group in replaced.items()}
    sizes = idata["posterior"].sizes
    groups[ACCURACY] = errors.dataset(labels or read_run(idata).labels).assign_attrs(
        {
            **attributes,
            "calibrated": int(errors.covariance is not None),
            "chains": sizes["chain"],
            "draws": sizes["draw"],
        }
    )
    return DataTree.from_dict(groups, name=idata.name)


def uncalibrated(idata: DataTree) -> DataTree:
    """The trace with the draws that the chains made, from one of ``sample(accuracy=...)``.

    They have the gradients that `bias_report`, `zero_variance` and other tools read. A trace whose
    draws were not calibrated is returned as it is.

    Parameters
    ----------
    idata : xarray.DataTree
        It is not changed.

    Returns
    -------
    xarray.DataTree

    Raises
    ------
    TypeError
        Where it is not a trace.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> before = xr.Dataset({"x": (("chain", "draw"), np.zeros((2, 3)))})
    >>> groups = {"posterior": before + 1, "uncalibrated_posterior": before}
    >>> uncalibrated(xr.DataTree.from_dict(groups))["posterior"]["x"].mean().item()
    0.0
    """
    check_trace(idata)
    groups = groups_of(idata)
    before = {
        name.removeprefix(UNCALIBRATED): group
        for name, group in groups.items()
        if name.startswith(UNCALIBRATED)
    }
    if not before:
        return idata
    others = {
        name: group
        for name, group in groups.items()
        if not name.startswith(UNCALIBRATED) and name != ACCURACY
    }
    return DataTree.from_dict({**others, **before}, name=idata.name)
