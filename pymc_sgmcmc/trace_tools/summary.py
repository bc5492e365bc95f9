"""Table of means, standard deviations and quantiles with stated errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import linalg
from xarray import DataTree

from pymc_sgmcmc.checks import as_array
from pymc_sgmcmc.matrices import covariance_root
from pymc_sgmcmc.record import ACCURACY
from pymc_sgmcmc.stein import STANDARD_ERRORS, mean_with_error
from pymc_sgmcmc.trace_tools.affine_map import DRAWS_PER_COORDINATE
from pymc_sgmcmc.trace_tools.diagnostics import ess, mcse, r_hat
from pymc_sgmcmc.trace_tools.reader import read_run
from pymc_sgmcmc.trace_tools.stated import StatedErrors, of_draws
from pymc_sgmcmc.trace_tools.variables import (
    columns_of,
    functions_of_draws,
    labels_of_elements,
)
from pymc_sgmcmc.trace_tools.zero_variance.estimate import controlled_means

PROBABILITIES = (0.05, 0.5, 0.95)
"""The quantiles of these probabilities are in the table by default."""

SMALLEST_SHARE = 0.01
"""A coordinate counts for the error of a variable where its part of the variance of the variable is
at least this share of the largest part."""


class _Moments(NamedTuple):
    """Means and standard deviations of q variables with their errors, in their units."""

    mean: np.ndarray
    mean_error: np.ndarray
    sd: np.ndarray
    sd_error: np.ndarray


def summary(
    idata: DataTree,
    var_names: str | Sequence[str] | None = None,
    *,
    probabilities: Sequence[float] = PROBABILITIES,
) -> pd.DataFrame:
    """Means, standard deviations and quantiles with stated errors, a row for each scalar.

    The errors contain what the step size leaves, as far as the gradients show it, and twice the
    Monte-Carlo error: in about 95 % of cases they are above the true error. Means have
    zero-variance control variates, those of coordinates of the position over all transitions of the
    run. With calibrated draws, of ``sample(accuracy=...)``, the linear part of a variable has the
    errors of the coordinates, and what is left of it those of the draws. A variable that is not
    finite in each draw has NaN.

    Parameters
    ----------
    idata : xarray.DataTree
        Trace of `sample` or `pymc.sample` with a step method of this package. One of
        ``sample(accuracy=...)`` should have all of its draws, since its errors are theirs.
    var_names : str or sequence of str, optional
        Variables of the posterior. The default is all of them.
    probabilities : sequence of float
        Probabilities of the quantiles.

    Returns
    -------
    pandas.DataFrame
        Columns ``mean``, ``mean_error``, ``sd``, ``sd_error``, a column for each quantile, such as
        ``5%``, ``quantile_error``, the largest one of them, ``ess_bulk`` and ``r_hat``. All errors
        are in the units of the variable. The ``attrs`` have those of ``idata["sgmcmc_accuracy"]``.

    Raises
    ------
    ValueError
        Where the trace has neither stated errors nor gradients, stated errors of other draws, or
        there are no such variables.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> x = np.random.default_rng(1).normal(size=(4, 1000, 1))
    >>> dims = ("chain", "draw", "at")
    >>> step_size = xr.DataArray(np.full((4, 1000), 0.01), dims=("chain", "draw"))
    >>> stats = xr.Dataset({"position": (dims, x), "gradient": (dims, -x), "step_size": step_size})
    >>> posterior = xr.Dataset({"x": (("chain", "draw"), x[..., 0])})
    >>> idata = xr.DataTree.from_dict({"posterior": posterior, "sample_stats": stats})
    >>> table = summary(idata)
    >>> bool(table.loc["x", "mean_error"] < 1e-6), bool(table.loc["x", "sd_error"] < 0.1)
    (True, True)
    """
    functions = functions_of_draws(idata, None, var_names)
    numbers = as_array("probabilities", probabilities, "numbers in (0, 1), as a list")
    if numbers.ndim != 1 or not ((numbers > 0) & (numbers < 1)).all():
        raise ValueError(
            f"`probabilities` should be numbers in (0, 1), as a list, but got {probabilities!r}."
        )
    given = numbers.tolist()
    stated = _stated(idata)
    coordinates = of_draws(idata) if stated is None else StatedErrors.read(stated.dataset)
    positions = np.asarray(
        idata["sample_stats"]["position"].transpose("chain", "draw", ...), dtype=float
    )
    parts = []
    for values in functions.data_vars.values():
        flat = np.asarray(values, dtype=float).reshape(*positions.shape[:2], -1)
        finite = np.isfinite(flat).all((0, 1))
        flat = np.where(finite, flat, 0.0)
        columns = columns_of(flat, positions)
        if columns is not None:
            moments = _of_coordinates(coordinates, columns)
        elif stated is not None and stated.attrs["calibrated"]:
            moments = _of_calibrated(flat, positions, coordinates)
        else:
            moments = _of_draws(flat, idata, coordinates)
        part = _table(flat, moments, given)
        part.loc[~finite] = np.nan
        parts.append(part)
    table = pd.concat(parts).set_axis(labels_of_elements(functions))
    if stated is not None:
        table.attrs.update(stated.attrs)
    return table


def _stated(idata: DataTree) -> DataTree | None:
    """The group of stated errors, None where there is none, or it is of other draws.

    Raises
    ------
    ValueError
        Where calibrated draws are not all those of one run.
    """
    if ACCURACY not in idata.children:
        return None
    group = idata.children[ACCURACY]
    stated = tuple(int(group.attrs[name]) for name in ("chains", "draws"))
    found = tuple(idata["posterior"].sizes[name] for name in ("chain", "draw"))
    if stated == found:
        return group
    if group.attrs["calibrated"]:
        raise ValueError(
            f"The stated errors are of {stated[0]} chains of {stated[1]} draws, but the trace has "
            f"{found[0]} of {found[1]}. Give the whole trace of one run, or any part of "
            "`uncalibrated(idata)`."
        )
    return None


def _of_coordinates(errors: StatedErrors, columns: slice) -> _Moments:
    mean, mean_error, sd, sd_error = (
        values[columns] for values in (errors.mean, errors.mean_error, errors.sd, errors.sd_error)
    )
    return _Moments(mean, mean_error * sd, sd, sd_error * sd)


def _of_calibrated(
    values: np.ndarray, positions: np.ndarray, coordinates: StatedErrors
) -> _Moments:
    """Moments of variables of shape (chains, draws, q) at calibrated draws.

    The draws have the stated means and covariance, so that the linear part of a variable has no
    Monte-Carlo error of the draws. What is left of it has one, and depends on the standard
    deviations of the draws too.
    """
    of_position = _Dependence.on(values, positions)
    of_means, of_sds = (
        of_position.largest(errors, coordinates.sd)
        for errors in (coordinates.mean_error, coordinates.sd_error)
    )
    centred, linear = of_position.centred, of_position.linear
    rest = mean_with_error(centred - linear)
    squares = mean_with_error(centred**2 - linear**2)
    sd = centred.std((0, 1))
    with np.errstate(invalid="ignore"):
        of_squares = squares.standard_error / (2 * sd)
    return _Moments(
        values.mean((0, 1)),
        of_means * linear.std((0, 1))
        + of_sds * of_position.scaling_of_mean
        + STANDARD_ERRORS * rest.standard_error,
        sd,
        of_sds * of_position.scaling_of_sd + STANDARD_ERRORS * np.nan_to_num(of_squares),
    )


def _of_draws(values: np.ndarray, idata: DataTree, coordinates: StatedErrors) -> _Moments:
    """Moments of variables at draws with gradients, with the bias of the coordinates."""
    run = read_run(idata)
    try:
        means = controlled_means([values], run.positions, run.gradients, labels=run.labels)
    except ValueError:  # The batches are too few for so many terms.
        means = controlled_means(
            [values], run.positions, run.gradients, coefficients="marginal", labels=run.labels
        )
    of_position = _Dependence.on(values, run.positions.astype(float))
    of_means, of_sds = (
        of_position.largest(errors, coordinates.sd)
        for errors in (coordinates.mean_bias, coordinates.sd_bias)
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        sd_error = mcse(values, "sd")
    return _Moments(
        means.mean,
        of_means * of_position.linear.std((0, 1))
        + of_sds * of_position.scaling_of_mean
        + STANDARD_ERRORS * means.standard_error,
        values.std((0, 1), ddof=1),
        of_sds * of_position.scaling_of_sd + STANDARD_ERRORS * np.nan_to_num(sd_error),
    )


class _Dependence(NamedTuple):
    """How q variables depend on the position of d coordinates.

    Attributes
    ----------
    centred, linear : numpy.ndarray, shape (chains, draws, q)
        The variables without their means, and the part that is linear in the position.
    slopes : numpy.ndarray, shape (d, q)
        Of the linear part, zero where the draws are too few to tell.
    scaling_of_mean, scaling_of_sd : numpy.ndarray, shape (q,)
        Changes of mean and standard deviation with the standard deviations of the position, for
        one relative unit of them.
    """

    centred: np.ndarray
    linear: np.ndarray
    slopes: np.ndarray
    scaling_of_mean: np.ndarray
    scaling_of_sd: np.ndarray

    @classmethod
    def on(cls, values: np.ndarray, positions: np.ndarray) -> _Dependence:
        r"""Regression of the variables on the position, and on the squares of whitened positions u.

        A law that is wider by a small factor :math:`1 + \epsilon` in all directions has, if it is
        Gaussian, density ratio :math:`1 + \epsilon (|u|^2 - d)` to the other. The mean of f then
        changes by :math:`\epsilon \mathrm{Cov}(f, |u|^2)`. Where one direction alone is wider
        it changes by :math:`\epsilon \mathrm{Cov}(f, u_1^2)`, at most :math:`\epsilon \sqrt 2`
        times the standard deviation of what is not linear in f.
        """
        d, shape = positions.shape[-1], values.shape
        centred = (values - values.mean((0, 1))).reshape(-1, shape[-1])
        sd = centred.std(0)
        slopes, linear = np.zeros((d, shape[-1])), np.zeros_like(centred)
        of_mean, of_sd = np.zeros(shape[-1]), sd
        if len(centred) >= DRAWS_PER_COORDINATE * (d + 1):
            x = positions.reshape(len(centred), d)
            x = x - x.mean(0)
            root = covariance_root(x.T @ x / len(x))
            u = linalg.solve_triangular(root, x.T, lower=True).T
            along = u.T @ centred / len(u)
            slopes, linear = linalg.solve_triangular(root, along, lower=True, trans="T"), u @ along
            square = (u**2).sum(1) - d
            of_mean = np.abs(square @ centred) / len(u)
            with np.errstate(invalid="ignore", divide="ignore"):
                changes = np.abs(square @ centred**2) / len(u) / (2 * sd)
            of_sd = np.fmax(sd, changes)
        of_mean = np.maximum(of_mean, np.sqrt(2) * (centred - linear).std(0))
        return cls(centred.reshape(shape), linear.reshape(shape), slopes, of_mean, of_sd)

    def largest(self, errors: np.ndarray, sd: np.ndarray) -> np.ndarray:
        """Largest error (q,) of the coordinates, of shape (d,), that each variable depends on."""
        parts = (self.slopes * sd[:, None]) ** 2
        counts = parts >= SMALLEST_SHARE * parts.max(0)
        return np.where(counts, errors[:, None], 0).max(0)


def _table(
    values: np.ndarray,
    moments: _Moments,
    probabilities: Sequence[float],
) -> pd.DataFrame:
    columns = {name: np.asarray(part) for name, part in moments._asdict().items()}
    errors = []
    for probability in probabilities:
        quantile = np.quantile(values, probability, axis=(0, 1))
        monte_carlo = mcse(values, "quantile", prob=probability)
        with np.errstate(invalid="ignore", divide="ignore"):
            away = np.abs(quantile - moments.mean) / moments.sd
        errors.append(STANDARD_ERRORS * monte_carlo + moments.mean_error + away * moments.sd_error)
        columns[f"{100 * probability:g}%"] = quantile
    if errors:
        columns["quantile_error"] = np.max(errors, axis=0)
    with np.errstate(invalid="ignore"):  # of constant variables, which have neither
        columns["ess_bulk"] = ess(values)
        columns["r_hat"] = r_hat(values)
    return pd.DataFrame(columns)
