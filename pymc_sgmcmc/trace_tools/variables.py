"""Variables of the posterior in a trace, and functions of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from xarray import DataTree

from pymc_sgmcmc.checks import names_among, one_of
from pymc_sgmcmc.posterior.position import element_labels, untransformed
from pymc_sgmcmc.record import GRADIENT, POSITION, SAMPLE_DIMS, labels_of
from pymc_sgmcmc.trace_tools.reader import (
    COMPUTE_THEM,
    StoredRun,
    check_same_draws,
    check_sample_dims,
    check_trace,
    every_nth,
    stored_draws,
)

LEAST_CORRELATION = 0.3
"""A variable is taken for one of other draws where its correlation with the coordinate of the same
name is lower. The bound is far below 1, since the user may have transformed the variable."""


def posterior_of(idata: DataTree) -> xr.Dataset:
    """Variables of the group `posterior` that have a value for each draw, chains and draws first.

    Raises
    ------
    ValueError
        Where the trace has no such group.
    """
    check_trace(idata)
    if "posterior" not in idata.children:
        raise ValueError(
            f"The trace should have a group `posterior`, but has {sorted(idata.children)}. Pass "
            "the DataTree that `pm.sample` returned."
        )
    posterior = idata["posterior"].to_dataset()
    check_sample_dims(posterior, "posterior")
    names = [
        name
        for name, values in posterior.data_vars.items()
        if {"chain", "draw"} <= set(values.dims)
    ]
    return posterior[names].transpose("chain", "draw", ..., missing_dims="ignore")


def by_variable(idata: DataTree, statistic: str = GRADIENT) -> xr.Dataset:
    """Gradients or positions of the draws by variable, with the dimensions of the model.

    Parameters
    ----------
    idata : xarray.DataTree
        Trace of one step method with gradients, or one that `gradients` returned.
    statistic : {"gradient", "position"}

    Returns
    -------
    xarray.Dataset
        A variable for each unconstrained variable of the model, such as ``b`` and ``scale_log__``,
        with a value for each chain and draw. Where it has not the elements of the variable in the
        group `posterior`, as that of a simplex, it has one dimension with the labels of its
        coordinates.

    Raises
    ------
    ValueError
        Where the trace has no such statistic of one step method.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sgmcmc import ULA
    >>> with pm.Model(coords={"feature": ["x", "z"]}):
    ...     b = pm.Normal("b", dims="feature")
    ...     _ = pm.Normal("y", b.sum(), 1, observed=np.ones(10))
    ...     step = ULA(compile_kwargs={"mode": "FAST_COMPILE"})
    ...     idata = pm.sample(
    ...         50, step=step, tune=10, chains=2, random_seed=1, progressbar=False, quiet=True
    ...     )
    >>> by_variable(idata)["b"].sel(feature="x").dims
    ('chain', 'draw')
    """
    one_of("statistic", statistic, (GRADIENT, POSITION))
    (values,) = stored_draws(idata, statistic) or [np.empty(0)]
    if values.ndim != 3:
        raise ValueError(
            f"The trace should have the `{statistic}` of one step method in `sample_stats`, but "
            f"has not. Sample all variables with one, or {COMPUTE_THEM}."
        )
    check_same_draws(idata, values.shape)
    draws, variables = posterior_of(idata), {}
    labels = labels_of(idata, values.shape[2])
    for name, group in groupby(range(len(labels)), lambda number: labels[number].partition("[")[0]):
        numbers = list(group)
        elements = slice(numbers[0], numbers[-1] + 1)
        part, own = values[..., elements], list(labels[elements])
        like = draws.get(untransformed(name))
        if like is not None and _labels_like(name, like) == own:
            variables[name] = like.copy(data=part.reshape(like.shape))
        else:
            dims = (*SAMPLE_DIMS, f"{name}_dim_0")
            variables[name] = xr.DataArray(part, dims=dims, coords={dims[-1]: own})
    return xr.Dataset(variables)


def _labels_like(name: str, variable: xr.DataArray) -> list[str]:
    """Labels of the coordinates of an unconstrained variable with the elements of another one."""
    axes = [
        (None if dim == f"{variable.name}_dim_{axis}" else str(dim), variable[dim].values)
        for axis, dim in enumerate(variable.dims[2:])
    ]
    return element_labels(name, axes)


def columns_of(values: np.ndarray, positions: np.ndarray) -> slice | None:
    """Successive columns of the positions that equal the values, None where no columns do.

    Parameters
    ----------
    values : numpy.ndarray, shape (chains, draws, size)
    positions : numpy.ndarray, shape (chains, draws, d)
    """
    size = values.shape[-1]
    first = values[0, :5]
    for start in range(positions.shape[-1] - size + 1):
        part = slice(start, start + size)
        if np.array_equal(first, positions[0, :5, part]) and np.array_equal(
            every_nth(values), every_nth(positions[..., part])
        ):
            return part
    return None


def check_posterior(posterior: xr.Dataset, run: StoredRun) -> None:
    """Raise a ValueError where variables are not finite, or of other draws than the positions.

    A variable with the name of a coordinate is the coordinate itself, or what the user made of it,
    so that the two should be correlated.
    """
    number = {label: column for column, label in enumerate(run.labels)}
    for name, values in posterior.data_vars.items():
        array = np.asarray(values)
        if array.dtype.kind not in "fiub":
            continue
        if not np.isfinite(array).all():
            raise ValueError(
                f"`{name}` should be finite, but is not in the group `posterior`. Leave it out by "
                "`var_names`, or leave out the draws in which it is not finite."
            )
        columns = [column for label, column in number.items() if label.split("[")[0] == name]
        flat = array.reshape(*array.shape[:2], -1)
        if (
            not columns
            or len(columns) != flat.shape[2]
            or flat.shape[:2] != run.positions.shape[:2]
        ):
            continue
        x, y = (
            every_nth(values).reshape(-1, len(columns))
            for values in (run.positions[..., columns], flat)
        )
        x, y = x - x.mean(0), y - y.mean(0)
        scale = np.sqrt((x**2).mean(0) * (y**2).mean(0))
        products = (x * y).mean(0)
        if (np.abs(products) < LEAST_CORRELATION * scale).any():
            raise ValueError(
                f"`{name}` should have the draws of `position`, but has other draws, or elements "
                "in another order. Select draws in all groups, as `idata.sel` does, or "
                f"{COMPUTE_THEM}."
            )


def check_functions(functions: xr.Dataset, run: StoredRun) -> None:
    """Raise a ValueError where a function is not one of finite numbers that vary."""
    for name, values in functions.data_vars.items():
        array = np.asarray(values)
        if array.dtype.kind not in "fiub":
            raise ValueError(
                f"`{name}` should be numbers, but has dtype {values.dtype}. Leave it out by "
                "`var_names`."
            )
        if not array.size:
            raise ValueError(
                f"`{name}` should have at least one element a draw, but has shape {values.shape}. "
                "Leave it out by `var_names`."
            )
        # The extremes are finite only if all values are.
        low, high = array.min(), array.max()
        if not np.isfinite([low, high]).all():
            chain = next(number for number, part in enumerate(array) if not np.isfinite(part).all())
            raise ValueError(
                f"`{name}` should be finite, but is not in chain {run.chains[chain]}. Leave it "
                "out by `var_names`, or leave out such draws."
            )
        if low == high:
            raise ValueError(
                f"`{name}` is constant over the draws, {float(low):g}, and has no Monte-Carlo "
                "error. Leave it out by `var_names`."
            )


def functions_of_draws(
    idata: DataTree,
    func: Callable[[xr.Dataset], Any] | None,
    var_names: str | Sequence[str] | None,
) -> xr.Dataset:
    """Variables of the posterior, or functions of them, with chains and draws first.

    Parameters
    ----------
    idata : xarray.DataTree
    func : callable or None
        Function of the posterior, as in `zero_variance`. Without it the variables are taken.
    var_names : str or sequence of str or None
        Names of the variables or functions to take. Without it all are taken.

    Raises
    ------
    TypeError, ValueError
        Where the function or its result cannot be used, or there are no such names.
    """
    posterior = posterior_of(idata)
    if func is not None and not callable(func):
        raise TypeError(
            f"`func` should be a function of the posterior, but got {func!r}. Name variables by "
            "`var_names`."
        )
    functions = posterior if func is None else _as_dataset(func(_read_only(posterior)), posterior)
    if var_names is not None:
        known = [str(name) for name in functions.data_vars]
        functions = functions[names_among("var_names", var_names, known)]
    if not functions.data_vars:
        raise ValueError(
            "The group `posterior` should have variables with a value for each draw, but has none. "
            "Pass the DataTree that `pm.sample` returned."
        )
    return functions.transpose(*SAMPLE_DIMS, ...)


def labels_of_elements(functions: xr.Dataset) -> pd.Index:
    """Labels of the elements of all variables, as ArviZ has them, for the rows of a table."""
    from arviz_base import xarray_sel_iter  # takes half a second to import
    from arviz_base.labels import BaseLabeller

    elements = xarray_sel_iter(functions, skip_dims=set(SAMPLE_DIMS))
    labels = [BaseLabeller().make_label_flat(*element) for element in elements]
    return pd.Index(labels, name="parameter")


def _read_only(posterior: xr.Dataset) -> xr.Dataset:
    """Copy of the posterior that shares the numbers and refuses changes in place."""

    def read_only(values: xr.DataArray) -> xr.DataArray:
        view = np.asarray(values).view()
        view.flags.writeable = False
        return values.copy(data=view)

    return posterior.map(read_only, keep_attrs=True)


def _as_dataset(value: Any, posterior: xr.Dataset) -> xr.Dataset:
    """Result of a function as variables with a value for each chain and draw."""
    if isinstance(value, dict):
        value = xr.Dataset({name: _as_array(part, posterior) for name, part in value.items()})
    elif not isinstance(value, xr.Dataset):
        array = _as_array(value, posterior)
        value = array.to_dataset(name="func" if array.name is None else array.name)
    if not value.data_vars:
        raise ValueError("`func` should return a Dataset with at least one variable.")
    for name, values in value.data_vars.items():
        if any(values.sizes.get(dim) != posterior.sizes[dim] for dim in SAMPLE_DIMS):
            chains, draws = (posterior.sizes[dim] for dim in SAMPLE_DIMS)
            raise ValueError(
                f"`func` should return a value for each of {chains} x {draws} draws, but "
                f"`{name}` has dimensions {dict(values.sizes)}. `zero_variance` takes the means."
            )
    return value


def _as_array(value: Any, posterior: xr.Dataset) -> xr.DataArray:
    """An array with the dimensions of the draws first, or a DataArray as it is."""
    if isinstance(value, xr.DataArray):
        return value
    shape = tuple(posterior.sizes[dim] for dim in SAMPLE_DIMS)
    if isinstance(value, xr.Dataset) or np.shape(value)[:2] != shape:
        got = "a Dataset for a name" if isinstance(value, xr.Dataset) else f"{np.shape(value)}"
        raise ValueError(
            "`func` should return a Dataset, a DataArray or an array with a value for each of "
            f"{shape[0]} x {shape[1]} draws, but returned shape {got}. Write it with xarray, as in "
            '`lambda post: post["x"] ** 2`.'
        )
    dims = SAMPLE_DIMS + tuple(f"func_dim_{axis}" for axis in range(np.ndim(value) - 2))
    return xr.DataArray(np.asarray(value), dims=dims)
