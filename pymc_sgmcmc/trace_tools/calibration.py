"""Affine correction of the draws of a biased chain by Stein's identity, on a trace."""

from __future__ import annotations

import pymc as pm
import xarray as xr
from xarray import DataTree

from pymc_sgmcmc.errors import CalibrationError
from pymc_sgmcmc.record import MOMENTS
from pymc_sgmcmc.trace_tools.affine_map import Calibration, FewDrawsError, calibrate
from pymc_sgmcmc.trace_tools.gradients import with_gradients
from pymc_sgmcmc.trace_tools.moments import read_moments
from pymc_sgmcmc.trace_tools.moved import PositionVariables, mapped, moved_groups
from pymc_sgmcmc.trace_tools.reader import (
    StoredRun,
    check_mean_gradient,
    read_run,
)
from pymc_sgmcmc.trace_tools.variables import posterior_of

GROUP = "stein_calibration"
"""This group of a calibrated trace has the correction and its errors."""


def stein_calibrate(
    idata: DataTree,
    model: pm.Model | None = None,
    *,
    moments: bool = False,
) -> DataTree:
    r"""Correct the covariance of draws for the bias of the chain, by its own gradients.

    The unconstrained positions become :math:`\bar\theta + A (\theta - \bar\theta)` with
    :math:`A \Lambda A^\top = \hat H^{-1}`. Here :math:`\Lambda` is the covariance of the chains,
    and :math:`-\hat H` is the slope of their gradients in the position, made symmetric. Of all
    matrices A with this property the one is taken that moves the draws least, in units of
    :math:`\Lambda`. No pass over the data is needed.

    **Law.** On a Gaussian posterior the covariance is exact up to Monte-Carlo error, for any step
    size and gradient noise. That error is small, since the sampling errors of S and
    :math:`\Lambda` cancel in the slope. On other posteriors an error of second order in the
    inflation remains. Its size is estimated by how the slope changes where the draws are weighted
    towards the corrected law, and twice this size is stated. Where it is beyond half of the
    correction, nothing is corrected. *The mean is left as it is*: its bias, skewness times
    inflation, cannot be seen in the gradients, whose mean is zero at stationarity.

    Differences of :math:`\hat H` between directions, and from :math:`\Lambda^{-1}`, are shrunk by
    the factors of James and Stein where they are not large beside their Monte-Carlo error.

    Parameters
    ----------
    idata : xarray.DataTree
        Trace with `position` and `gradient` in `sample_stats`, as from step methods of this
        package. It is not changed.
    model : pymc.Model, optional
        Needed where the posterior has variables other than those of the position, such as
        transformed variables and deterministics. It is also needed where the trace has no stored
        gradients, which are then computed by `gradients`.
    moments : bool
        Take :math:`\Lambda` and S from ``idata["sgmcmc_moments"]``, which has sums over all
        transitions of the run, whichever draws are in the trace now.

    Returns
    -------
    xarray.DataTree
        The trace with corrected `posterior` and `position`, and with a group
        ``stein_calibration``. This group has ``sd_ratio``, the stated relative error ``sd_error``
        with its parts ``monte_carlo_error`` and ``nonlinear_error``, ``covariance``, ``center`` and
        ``map``. Its attributes are ``third_order``, ``asymmetry`` and the shares that shrinkage
        kept. The gradients, and groups that were computed from the draws (posterior predictive, log
        likelihood), are left out, since they belong to the draws before.

    Raises
    ------
    CalibrationError
        Where :math:`\hat H` is not positive definite or not symmetric, or the posterior is too
        far from Gaussian.
    ValueError
        Where the trace has no stored gradients, too few draws, draws that are not finite, chains
        far from the others, constant coordinates, or variables that need the model.

    References
    ----------
    C. Stein (1972). A bound for the error in the normal approximation to the distribution of a sum
    of dependent random variables. *Proceedings of the Sixth Berkeley Symposium*, 583–602.

    Examples
    --------
    The posterior is standard normal, and the draws have a standard deviation of 1.5.

    >>> import numpy as np, xarray as xr
    >>> x = 1.5 * np.random.default_rng(1).normal(size=(4, 1000, 1))
    >>> dims = ("chain", "draw", "at")
    >>> stats = xr.Dataset({"position": (dims, x), "gradient": (dims, -x)})
    >>> posterior = xr.Dataset({"x": (("chain", "draw"), x[..., 0])})
    >>> idata = xr.DataTree.from_dict({"posterior": posterior, "sample_stats": stats})
    >>> calibrated = stein_calibrate(idata)
    >>> calibrated["posterior"]["x"].std().item()
    1.000
    """
    idata = with_gradients(idata, model)
    run = read_run(idata)
    check_mean_gradient(run)
    variables = PositionVariables.of(posterior_of(idata), run, model)
    stored = read_moments(idata) if moments else None
    try:
        calibration = calibrate(run, stored)
    except FewDrawsError as error:
        if moments or MOMENTS not in idata.children:
            raise
        raise CalibrationError(
            f"{error} The trace has moments of all transitions, which say more: use `moments=True`."
        ) from None
    positions = mapped(run.positions, calibration.center, calibration.map, calibration.center)
    groups = moved_groups(idata, variables, positions)
    dim = str(groups["sample_stats"]["position"].dims[-1])
    groups[GROUP] = _report(calibration, run, dim)
    return DataTree.from_dict(groups, name=idata.name)


def _report(calibration: Calibration, run: StoredRun, dim: str) -> xr.Dataset:
    """The correction and its errors, along the dimension of the position."""
    column_dim = f"{dim}_of_column"
    return xr.Dataset(
        {
            "sd_ratio": (dim, calibration.sd_ratio),
            "sd_error": (dim, calibration.error),
            "monte_carlo_error": (dim, calibration.monte_carlo_error),
            "nonlinear_error": (dim, calibration.nonlinear_error),
            "center": (dim, calibration.center),
            "covariance": ((dim, column_dim), calibration.covariance),
            "map": ((dim, column_dim), calibration.map),
        },
        coords={dim: list(run.labels), column_dim: list(run.labels)},
        attrs={
            "third_order": calibration.third_order,
            "asymmetry": calibration.asymmetry,
            "kept_of_differences": calibration.shrinkage[0],
            "kept_of_level": calibration.shrinkage[1],
        },
    )
