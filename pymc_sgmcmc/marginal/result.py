"""The result of a fit by maximum marginal likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd
import xarray as xr
from pymc.model import Model
from pytensor.tensor.variable import TensorVariable


@dataclass(frozen=True, eq=False, repr=False)
class MarginalFit:
    """A fit of the global variables by maximum marginal likelihood.

    Attributes
    ----------
    method : str
    reml : bool
        Whether the fixed effects were integrated out too.
    estimates : xarray.Dataset
        The global variables, and the deterministics that depend on no local variable, on their
        own scale.
    standard_errors : xarray.Dataset
        NaN where a parameter is at the boundary of its range, and where it follows from nothing
        but such parameters.
    minus_two_log_likelihood : float
        With ``reml=True`` that of the restricted likelihood.
    aic : float
        -2 log likelihood and twice the number of global parameters.
    modes : xarray.Dataset
        Conditional modes of the local variables at the estimates, on their own scale, and the
        deterministics that depend on them. A local variable with a transform has the mode of its
        unconstrained value.
    covariance : numpy.ndarray, shape (d, d)
        Covariance matrix of the entries of the estimates.
    labels : tuple of str
        Labels of these entries, such as ``"beta[predictor=age]"``.
    iterations : int
        Of the optimiser, or of EM.
    n_groups : int
        Of several factors the sum of the levels that the local variables have.
    monte_carlo_errors : xarray.Dataset or None
        Monte-Carlo standard errors of the estimates of "mcem", on their own scale.
    minus_two_log_likelihood_error : float or None
        Monte-Carlo standard error of -2 log likelihood, and of AIC, of "mcem".
    """

    method: str
    reml: bool
    estimates: xr.Dataset
    standard_errors: xr.Dataset
    minus_two_log_likelihood: float
    aic: float
    modes: xr.Dataset
    covariance: np.ndarray
    labels: tuple[str, ...]
    iterations: int
    n_groups: int
    monte_carlo_errors: xr.Dataset | None = None
    minus_two_log_likelihood_error: float | None = None

    def to_dataframe(self) -> pd.DataFrame:
        """Estimates, standard errors and, of "mcem", Monte-Carlo errors, with a row for each entry.

        Returns
        -------
        pandas.DataFrame
        """
        columns = {"estimate": self.estimates, "standard_error": self.standard_errors}
        if self.monte_carlo_errors is not None:
            columns["monte_carlo_error"] = self.monte_carlo_errors
        return pd.DataFrame(
            {
                name: np.concatenate([np.ravel(values) for values in dataset.values()])
                for name, dataset in columns.items()
            },
            index=pd.Index(self.labels, name="parameter"),
        )

    def __repr__(self) -> str:
        """Return the table of the estimates under a line about the fit."""
        likelihood = "restricted likelihood" if self.reml else "marginal likelihood"
        error = self.minus_two_log_likelihood_error
        known = "" if error is None else f", Monte-Carlo error {error:.2g}"
        return (
            f"Maximum {likelihood} ({self.method}), {self.n_groups} groups\n"
            f"-2 log likelihood {self.minus_two_log_likelihood:.4f}, AIC {self.aic:.4f}{known}\n"
            f"{self.to_dataframe().to_string(float_format='{:.5g}'.format)}"
        )


def dims_of(model: Model, name: str, ndim: int) -> tuple[str, ...]:
    """Names of the dimensions of a variable, as in a trace of PyMC."""
    dims = model.named_vars_to_dims.get(name) or (None,) * ndim
    return tuple(dim or f"{name}_dim_{axis}" for axis, dim in enumerate(dims))


def dataset(
    model: Model, variables: Sequence[TensorVariable], values: Sequence[np.ndarray]
) -> xr.Dataset:
    """Values with the dimensions and coordinates of the model."""
    arrays = {}
    for variable, value in zip(variables, map(np.asarray, values), strict=True):
        named = dims_of(model, variable.name, value.ndim)
        coords = {
            dim: list(model.coords[dim]) for dim in named if model.coords.get(dim) is not None
        }
        arrays[variable.name] = xr.DataArray(value, dims=named, coords=coords)
    return xr.Dataset(arrays)


def labels_of(array: xr.DataArray) -> list[str]:
    """Labels of the entries, as those of positions."""
    if not array.dims:
        return [str(array.name)]
    axes = [
        [f"{dim}={entry}" for entry in array.coords[dim].values]
        if dim in array.coords
        else [str(index) for index in range(length)]
        for dim, length in array.sizes.items()
    ]
    return [f"{array.name}[{', '.join(entries)}]" for entries in product(*axes)]
