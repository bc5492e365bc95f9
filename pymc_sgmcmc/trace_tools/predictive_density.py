"""The log predictive density of held-out rows along a chain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr
from pymc.model.transform.conditioning import remove_value_transforms
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from xarray import DataTree

from pymc_sgmcmc.checks import names_among, quoted
from pymc_sgmcmc.compiling.compiled import NUMPY_MODE, compile_on_arrays, quick_graphs
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.graphs import minibatch_nodes
from pymc_sgmcmc.posterior.position import given_model
from pymc_sgmcmc.posterior.terms import model_terms
from pymc_sgmcmc.trace_tools.reader import check_trace
from pymc_sgmcmc.trace_tools.variables import posterior_of

CHUNK_ELEMENTS = 4_000_000
"""Log densities of so many rows times draws are in memory at a time, 32 MB."""


def predictive_density(
    idata: DataTree,
    model: pm.Model | None = None,
    new_data: Mapping[str, Any] | None = None,
    *,
    var_names: str | Sequence[str] | None = None,
    coords: Mapping[str, Sequence] | None = None,
) -> xr.Dataset:
    r"""Log predictive density of held-out rows at each draw, and of the draws up to it.

    .. math::
        \ell_t = \frac1m \sum_{j=1}^m \log p(x_j \mid \theta_t), \qquad
        \bar\ell_t = \frac1m \sum_{j=1}^m \log \frac1t \sum_{s=1}^t p(x_j \mid \theta_s)

    Against the seconds or passes of the run, :math:`\bar\ell_t` says how soon the draws predict
    well, as in figs. 1 to 3 of Baker et al. (2019).

    Parameters
    ----------
    idata : xarray.DataTree
        Trace with a group `posterior`. It is not changed.
    model : pymc.Model, optional
        Model of the trace, with its data in `pymc.Data`. The default is that of the context. Its
        data are what they were after the call.
    new_data : mapping from str to array_like, optional
        Held-out values of the `pymc.Data` that have rows, predictors and outcomes, as
        `pymc.set_data` takes them. The default is the data of the model.
    var_names : str or sequence of str, optional
        Observed variables, all with as many rows. The default is all of them. The density of a row
        is the product of theirs.
    coords : mapping, optional
        New coordinates of the dimensions whose length changes, as `pymc.set_data` takes them.

    Returns
    -------
    xarray.Dataset
        ``log_density``, :math:`\ell_t`, and ``log_predictive_density``, :math:`\bar\ell_t`, both
        (chain, draw). The attribute ``rows`` is their number m. Each chain is on its own.

    Raises
    ------
    ModelError
        For a model on `pymc.Minibatch`.
    TypeError, ValueError, KeyError
        Where the data do not go with the model.

    Notes
    -----
    Memory does not grow with the number of draws. A draw takes the log densities of all held-out
    rows, one after the other. Where that takes long, leave out draws first,
    ``idata.sel(draw=slice(None, None, 10))``, or rows.

    References
    ----------
    J. Baker, P. Fearnhead, E. B. Fox and C. Nemeth (2019). Control variates for stochastic gradient
    MCMC. *Statistics and Computing* 29, 599-615.

    Examples
    --------
    >>> import numpy as np, pymc as pm, xarray as xr
    >>> with pm.Model() as model:
    ...     mean = pm.Normal("mean")
    ...     _ = pm.Normal("y", mean, 1, observed=pm.Data("values", np.zeros(10)))
    >>> draws = xr.Dataset({"mean": (("chain", "draw"), [[0.0, 1.0]])})
    >>> found = predictive_density(
    ...     xr.DataTree.from_dict({"posterior": draws}), model, {"values": [0.0]}
    ... )
    >>> found["log_density"].values
    array([[-0.92, -1.42]])
    >>> found["log_predictive_density"].values
    array([[-0.92, -1.14]])
    """
    check_trace(idata)
    model = given_model(model)
    names = _observed(model, var_names)
    posterior = posterior_of(idata)
    chains, draws = posterior.sizes["chain"], posterior.sizes["draw"]
    at_draws, up_to = np.empty((chains, draws)), np.empty((chains, draws))
    rows = 0
    with _with_data(model, new_data, coords):
        log_densities = _LogDensities(model, names)
        for chain in range(chains):
            total: np.ndarray | None = None
            done, length = 0, 1
            while done < draws:
                part = posterior.isel(chain=chain, draw=slice(done, done + length))
                of_rows = log_densities(part)
                rows = of_rows.shape[1]
                at_draws[chain, done : done + length] = of_rows.mean(1)
                if total is not None:
                    of_rows[0] = np.logaddexp(total, of_rows[0])
                sums = np.logaddexp.accumulate(of_rows, axis=0)
                counts = 1 + np.arange(done, done + len(sums))
                up_to[chain, done : done + length] = sums.mean(1) - np.log(counts)
                total, done = sums[-1], done + len(sums)
                length = max(1, min(CHUNK_ELEMENTS // max(1, rows), draws - done))
    found = xr.Dataset(
        {
            "log_density": (("chain", "draw"), at_draws),
            "log_predictive_density": (("chain", "draw"), up_to),
        },
        coords={name: posterior.coords[name] for name in ("chain", "draw")},
        attrs={"rows": rows},
    )
    return found


def minibatch_warnings(idata: DataTree, model: pm.Model) -> list[str]:
    """Warning at the end of a run of a model whose log likelihood PyMC computes from few rows."""
    if not minibatch_nodes(_graphs(model, [str(each.name) for each in model.observed_RVs])):
        return []
    return [
        "The model is on `pymc.Minibatch`, so `pymc.compute_log_likelihood` and "
        "`pymc.sample_posterior_predictive` take one minibatch. Give them a model on all rows."
    ]


def _graphs(model: pm.Model, names: Sequence[str]) -> list[Variable]:
    """Observed variables and their values."""
    return [model.rvs_to_values[model[name]] for name in names] + [model[name] for name in names]


def _observed(model: pm.Model, var_names: str | Sequence[str] | None) -> list[str]:
    """Names of the observed variables, checked."""
    known = [str(variable.name) for variable in model.observed_RVs]
    names = names_among("var_names", known if var_names is None else var_names, known)
    if minibatch_nodes(_graphs(model, names)):
        raise ModelError(
            "`predictive_density` should have a model on all of its rows, but this one is on "
            "`pymc.Minibatch`. Write the model on `pymc.Data`."
        )
    return names


@contextmanager
def _with_data(
    model: pm.Model, new_data: Mapping[str, Any] | None, coords: Mapping[str, Sequence] | None
) -> Iterator[None]:
    """Other values of the data of a model, for a while."""
    if new_data is None:
        if coords is not None:
            raise ValueError("`coords` should come with the `new_data` that they label.")
        yield
        return
    if not isinstance(new_data, Mapping):
        raise TypeError(
            "`new_data` should be a mapping from names of `pymc.Data` to values, but got "
            f"{new_data!r}."
        )
    known = {str(variable.name): variable for variable in model.data_vars}
    unknown = [name for name in new_data if name not in known]
    if unknown:
        raise KeyError(
            f"`new_data` should have names of `pymc.Data` of the model, of {quoted(list(known))}, "
            f"but got {quoted(unknown)}. Wrap the data of the model in `pymc.Data`."
        )
    before = {name: known[name].get_value() for name in new_data}
    dims = {dim for name in new_data for dim in model.named_vars_to_dims.get(name) or ()}
    labels = {dim: model.coords[dim] for dim in dims if model.coords.get(dim) is not None}
    try:
        try:
            pm.set_data(dict(new_data), model=model, coords=coords)
        except Exception as error:
            raise ValueError(
                f"`new_data` should have other values for {quoted(new_data)} of the same kind, but "
                f"PyMC cannot set them: {error}"
            ) from error
        for name in new_data:
            values = np.ma.getdata(known[name].get_value())  # PyMC masks NaN
            if values.dtype.kind == "f" and np.isnan(values).any():
                raise ValueError(f"`new_data` should have no NaN, but has some in `{name}`.")
        yield
    finally:
        pm.set_data(before, model=model, coords=labels)


class _LogDensities:
    """Log densities of the rows of observed variables, compiled once for the present data."""

    def __init__(self, model: pm.Model, names: Sequence[str]):
        self._names, self._data = list(names), model.data_vars
        constrained = remove_value_transforms(model)
        with quick_graphs():
            # Without `total_size`, which scales the density of rows to another number of them.
            terms = model_terms(constrained, checked=True)
            densities = [terms[name].log_density for name in names]
            used = set(ancestors(densities))
            inputs = [value for value in constrained.value_vars if value in used]
            self._inputs = [str(value.name) for value in inputs]
            self._function = compile_on_arrays(inputs, densities, NUMPY_MODE)

    def __call__(self, draws: xr.Dataset) -> np.ndarray:
        """Log densities at draws of one chain, shape (draws, rows).

        Raises
        ------
        ValueError
        """
        missing = [name for name in self._inputs if name not in draws]
        if missing:
            raise ValueError(
                f"The trace should have draws of {quoted(missing)}, on which {quoted(self._names)} "
                f"depend, but has {quoted(list(draws.data_vars))}. Give the trace of this model."
            )
        values = [np.asarray(draws[name]) for name in self._inputs]
        return np.array([self._of_rows(point) for point in zip(*values, strict=True)])

    def _of_rows(self, point: tuple[np.ndarray, ...]) -> np.ndarray:
        try:
            found = [np.atleast_1d(density) for density in self._function(*point)]
        except ValueError as error:
            raise ValueError(
                f"The data of the model should fit together, but have the shapes {self._shapes()}. "
                "Give `new_data` for all that have a row for each observation."
            ) from error
        if not all(map(len, found)):
            raise ValueError(
                f"The data should have a row at least, but have the shapes {self._shapes()}."
            )
        of_rows = [density.reshape(len(density), -1).sum(1) for density in found]
        lengths = dict(zip(self._names, map(len, of_rows), strict=True))
        if len(set(lengths.values())) > 1:
            raise ValueError(
                "The observed variables should have as many rows as each other, but have "
                f"{lengths}. Give data for all of them, or choose some by `var_names`."
            )
        return np.sum(of_rows, axis=0)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the present data, by their names."""
        return {str(data.name): data.get_value(borrow=True).shape for data in self._data}
