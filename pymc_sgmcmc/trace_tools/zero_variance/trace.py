"""Zero-variance control variates on a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr
from xarray import DataTree

from pymc_sgmcmc.errors import warn
from pymc_sgmcmc.record import DIMENSION, MOMENTS, SAMPLE_DIMS
from pymc_sgmcmc.trace_tools.gradients import with_gradients
from pymc_sgmcmc.trace_tools.moments import StoredMoments, read_moments
from pymc_sgmcmc.trace_tools.reader import (
    StoredRun,
    chunks,
    every_nth,
    objection_to_mean_gradient,
    read_run,
)
from pymc_sgmcmc.trace_tools.variables import (
    check_functions,
    check_posterior,
    columns_of,
    functions_of_draws,
    labels_of_elements,
    posterior_of,
)
from pymc_sgmcmc.trace_tools.zero_variance.estimate import ControlledMeans, controlled_means
from pymc_sgmcmc.trace_tools.zero_variance.gain import (
    advice,
    centred_draws,
    linear_fit,
    predicted_gain,
    slopes,
)
from pymc_sgmcmc.trace_tools.zero_variance.moments import means_of_moments

ESTIMATES = ("mean", "mcse", "mean_before", "mcse_before", "variance_ratio")
"""These estimates come from draws and from moments of all transitions alike."""

IMPROBABLE = 1e-4
"""A warning says that the mean gradient is not zero where its probability is lower. By chance this
happens to one converged run in ten thousand."""


@dataclass(frozen=True)
class ZeroVariance:
    r"""Means with zero-variance control variates, from `zero_variance`.

    Attributes
    ----------
    mean, mcse : xarray.Dataset
        Means of the functions with control variates, and their Monte-Carlo standard errors. They
        have the dimensions and coordinates of the functions, without chains and draws.
    mean_before, mcse_before : xarray.Dataset
        The same without control variates.
    variance_ratio : xarray.Dataset
        Measured gain: the variance of the mean without control variates over that with them. NaN
        for a function that is constant.
    predicted_gain : xarray.Dataset
        Gain for the linear part of each function and order 1, from step size, preconditioner and
        gradient noise. It is :math:`1 + 1 / \delta` where every transition was stored. It is that
        on a normal posterior, and smaller where the curvature varies over the posterior. NaN for
        other than Langevin dynamics.
    over_transitions : xarray.Dataset
        Whether the means are over all transitions of the run, from its moments, or over the draws.
    notes : tuple of str
        Which means are over all transitions, and the reasons where control variates help little.
    estimate : ControlledMeans or None
        The arrays behind the means over draws. None with ``moments="only"``.
    """

    mean: xr.Dataset
    mcse: xr.Dataset
    mean_before: xr.Dataset
    mcse_before: xr.Dataset
    variance_ratio: xr.Dataset
    predicted_gain: xr.Dataset
    over_transitions: xr.Dataset
    notes: tuple[str, ...]
    estimate: ControlledMeans | None = None
    _functions: xr.Dataset | None = None
    _run: StoredRun | None = None

    def summary(self) -> pd.DataFrame:
        """Table with a row for each function or element of one.

        Returns
        -------
        pandas.DataFrame
            Columns ``mean``, ``mcse``, ``mean_before``, ``mcse_before``, ``variance_ratio``,
            ``predicted_gain`` and ``over_transitions``. ``attrs["notes"]`` has the notes.
        """
        columns = (*ESTIMATES, "predicted_gain", "over_transitions")
        table = pd.DataFrame(
            {name: _flat(getattr(self, name)) for name in columns},
            index=labels_of_elements(self.mean),
        )
        table.attrs["notes"] = list(self.notes)
        return table

    def draws(self) -> xr.Dataset:
        """The functions at each draw with the control variates added, f + a'h.

        Means over them have a small variance. Single values need not, since coefficients from batch
        means are the best for the mean. The result takes as much memory as the functions.

        Raises
        ------
        ValueError
            Where the means are from moments alone.
        """
        run, functions, estimate = self._run, self._functions, self.estimate
        if run is None or functions is None or estimate is None:
            raise ValueError(
                "`draws()` needs the draws of the trace, but `moments='only'` was given. Use "
                "`zero_variance(idata)`."
            )
        chains, draws, d = run.positions.shape
        controls = np.empty((chains, draws, estimate.coefficients.shape[1]))
        for chain, part in chunks(chains, draws, len(estimate.coefficients) + d):
            controls[chain, part] = estimate.control(
                run.positions[chain, part].astype(float), run.gradients[chain, part].astype(float)
            )
        return functions.astype(float) + _shaped(functions, controls)


def zero_variance(
    idata: DataTree,
    order: int = 1,
    func: Callable[[xr.Dataset], Any] | None = None,
    var_names: str | Sequence[str] | None = None,
    model: pm.Model | None = None,
    *,
    coefficients: str = "batch_means",
    regression: str = "least_squares",
    batches: int | None = None,
    moments: bool | str = True,
) -> ZeroVariance:
    r"""Posterior means with zero-variance control variates, from the stored gradients.

    For each function f of the parameters, the result is the mean of :math:`f + \hat a^\top h` with

    .. math:: h = -\tfrac12 \Delta Q + \nabla Q \cdot z, \quad z = -\tfrac12 \hat\nabla, \quad
              \hat a = -\mathrm{Var}(h)^{-1} \mathrm{Cov}(h, f)

    for all monomials Q of the unconstrained position up to the order. No pass over the data is
    needed.

    **Law.** Under the posterior each h has mean zero, so that the result is the mean of f with a
    smaller Monte-Carlo error. A chain with a bias has a law close to the posterior. With order 1
    its means keep their bias, since mean gradients are zero at stationarity. On a Gaussian
    posterior, order 2 also removes the bias of second moments, with coefficients from batch means
    where every transition was stored. With thinned draws, or with marginal coefficients, part of
    this bias stays, and ``moments="only"`` removes it.

    **Draws or transitions.** A draw is one of several transitions. The run keeps moments of all
    transitions (``idata["sgmcmc_moments"]``), also of those whose draws were taken out of the trace
    since. The mean of a function that is a coordinate of the position comes from these moments,
    with the whole gain. The mean of another function, such as a transformed variable, comes from
    the draws. `over_transitions` says which.

    **Gain.** On the mean of a parameter of a near-Gaussian posterior, order 1 removes what the
    injected noise adds to the variance, and leaves what the gradient noise adds. With every
    transition stored and coefficients from batch means, the variance falls by the factor :math:`1 +
    1 / \delta`, where :math:`\delta = \tfrac{h}{4} M V` is the inflation by the gradient noise V.
    With marginal coefficients the factor is about :math:`1 + H / V`. So control variates for the
    gradient (`SGLDCV`) make these control variates effective, and there is no gain without injected
    noise.

    Parameters
    ----------
    idata : xarray.DataTree
        Trace with `position` and `gradient` in `sample_stats`: from `pymc.sample` with a step
        method of this package, or from `gradients`. It is not changed.
    order : int
        Largest degree of the polynomials. There are p = d terms for order 1, and d (d + 3) / 2 for
        order 2.
    func : callable, optional
        Function that gets the posterior as an `xarray.Dataset` and returns a Dataset, a DataArray,
        an array, or a dict of these by name, with a value or an array of values for each chain and
        draw. The default is the variables themselves. Squares should be about a constant and not
        about the mean of the draws, whose own error they would have. The variance is then
        ``mean of squares - mean**2``.
    var_names : str or sequence of str, optional
        Variables of the posterior, or of what `func` returns. The default is all of them.
    model : pymc.Model, optional
        Model to compute the gradients with where the trace has none, see `gradients`.
    coefficients : {"batch_means", "marginal"}
        Whether the covariances are over means of batches of successive draws, or over single draws
        as in the paper. Batches should be longer than the autocorrelation time.
    regression : {"least_squares", "ridge"}
        Least squares needs five batches for each term. Ridge regression needs fewer batches, and
        scikit-learn, which is optional.
    batches : int, optional
        Number of batches of each chain. The default is 20, or five for each term over all chains.
    moments : bool or "only"
        Use the moments of all transitions where they serve. That is with coefficients from batch
        means, up to order 2 (means take the terms of order 1), and with a trace of all draws of the
        run. With "only" no draw has to be stored. The result then has ``position``, the means of
        the unconstrained position. For order 2 it also has ``variance``, the variance of each
        coordinate, without the bias that the chain gives it on a Gaussian posterior. The stored
        batches are then joined to `batches`.

    Returns
    -------
    ZeroVariance
        Means, with a table from ``summary()`` and the controlled functions from ``draws()``.

    Warns
    -----
    UserWarning
        Where the mean gradient is beyond doubt not zero, as with gradients of other data.

    Raises
    ------
    ValueError
        Where the trace has no stored gradients or moments, draws are not finite, chains are far
        from the others, functions are constant or unknown, or there are too few batches for the
        terms.

    References
    ----------
    J. Baker, P. Fearnhead, E. B. Fox and C. Nemeth (2019). Control variates for stochastic
    gradient MCMC. *Statistics and Computing* 29, §4. Signs and factors differ from the print, see
    `terms` and `coefficients`.

    A. Mira, R. Solgi and D. Imparato (2013). Zero variance Markov chain Monte Carlo for Bayesian
    estimators. *Statistics and Computing* 23, 653–662.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> x = np.random.default_rng(1).normal(size=(4, 1000, 1))
    >>> dims = ("chain", "draw", "at")
    >>> stats = xr.Dataset({"position": (dims, x), "gradient": (dims, -x)})
    >>> posterior = xr.Dataset({"x": (("chain", "draw"), x[..., 0])})
    >>> idata = xr.DataTree.from_dict({"posterior": posterior, "sample_stats": stats})
    >>> means = zero_variance(idata, order=2, func=lambda post: post["x"] ** 2)
    >>> means.mean["x"].item(), means.mean_before["x"].item()
    (1.000, 1.006)
    """
    if moments == "only":
        given = any(setting is not None for setting in (func, var_names, model))
        if given or coefficients != "batch_means":
            raise ValueError(
                "`moments='only'` gives means of the position alone, but got `func`, `var_names`, "
                "`model` or other `coefficients`. Leave these out, or use `moments=True`."
            )
        return _from_moments(read_moments(idata), order, regression, batches)
    if not isinstance(moments, bool):
        raise ValueError(f"`moments` should be True, False or 'only', but got {moments!r}.")
    idata = with_gradients(idata, model)
    run = read_run(idata)
    functions = functions_of_draws(idata, func, var_names)
    check_posterior(functions if func is None else posterior_of(idata), run)
    check_functions(functions, run)
    arrays = [np.asarray(values) for values in functions.data_vars.values()]
    estimate = controlled_means(
        arrays,
        run.positions,
        run.gradients,
        order,
        coefficients=coefficients,
        regression=regression,
        batches=batches,
        labels=run.labels,
    )
    values = np.concatenate(
        [every_nth(array).reshape(-1, int(np.prod(array.shape[2:]))) for array in arrays], axis=1
    )
    fit = linear_fit(run)
    directions = slopes(centred_draws(run.positions), values - values.mean(0))
    gain = predicted_gain(run, fit, directions, run.thin)
    columns = estimate.columns | {"predicted_gain": np.where(estimate.moving, gain, np.nan)}
    over = np.zeros(len(estimate.mean), dtype=bool)
    notes: list[str] = []
    short = estimate.short_batches(values.var(0), "draws")
    if moments and coefficients == "batch_means" and order <= 2 and run.thin != 1:
        coordinates, numbers = _coordinates(functions, run)
        if coordinates.any() and MOMENTS in idata.children:
            means, notes = _means_over_transitions(idata, run, regression, batches)
            if means is not None:
                over = coordinates
                columns |= {name: columns[name].copy() for name in ESTIMATES}
                for name in ESTIMATES:
                    columns[name][over] = _flat(getattr(means, name))[numbers]
                gain = predicted_gain(run, fit, directions[:, over], 1)
                columns["predicted_gain"][over] = gain
                if over.all():
                    short = list(means.notes)
    # In batches that are too short any mean gradient seems improbable.
    objection = None if short else objection_to_mean_gradient(run, IMPROBABLE)
    if objection is not None:
        warn(objection, UserWarning)
    if not over.all():
        notes += advice(run, estimate, fit, bool(short), coefficients) + short
    return ZeroVariance(
        **{name: _shaped(functions, column) for name, column in columns.items()},
        over_transitions=_shaped(functions, over),
        notes=tuple(notes),
        estimate=estimate,
        _functions=functions,
        _run=run,
    )


def _from_moments(
    moments: StoredMoments, order: int, regression: str, batches: int | None
) -> ZeroVariance:
    """Means of the unconstrained position, and with order 2 its variances."""
    if order not in (1, 2):
        raise ValueError(
            f"`order` should be 1 or 2, but got {order!r}. Use `moments=True` for higher orders, "
            "which need the draws."
        )
    means, variances, notes = means_of_moments(moments, order, regression, batches)
    parts = [means] if variances is None else [means, variances]

    def dataset(columns: list[np.ndarray]) -> xr.Dataset:
        named = zip(("position", "variance"), columns, strict=False)
        coords = {DIMENSION: list(moments.labels)}
        return xr.Dataset({name: (DIMENSION, column) for name, column in named}, coords=coords)

    columns: dict[str, Any] = {
        name: dataset([part.columns[name] for part in parts]) for name in ESTIMATES
    }
    return ZeroVariance(
        **columns,
        predicted_gain=dataset([np.full(len(part.mean), np.nan) for part in parts]),
        over_transitions=dataset([np.ones(len(part.mean), dtype=bool) for part in parts]),
        notes=tuple(notes),
    )


def _means_over_transitions(
    idata: DataTree, run: StoredRun, regression: str, batches: int | None
) -> tuple[ZeroVariance | None, list[str]]:
    """Means of the position over all transitions, None where they cannot be used, and notes."""
    try:
        moments = read_moments(idata)
        means = _from_moments(moments, 1, regression, batches)
    except ValueError as error:
        return None, [f"The means are over the draws alone, since moments cannot be used: {error}"]
    chains = moments.batch_position.shape[0]
    if chains != len(run.chains):
        return None, [
            f"The means are over the draws alone, since only {chains} of {len(run.chains)} chains "
            "have moments of all transitions."
        ]
    return means, [
        "Means of coordinates of the position are over all transitions, not only over the draws.",
        *means.notes,
    ]


def _coordinates(functions: xr.Dataset, run: StoredRun) -> tuple[np.ndarray, np.ndarray]:
    """Mask of the elements that are coordinates of the position, and their numbers there."""
    over, numbers = [], [np.empty(0, dtype=int)]
    for values in functions.data_vars.values():
        flat = np.asarray(values).reshape(*run.positions.shape[:2], -1)
        columns = columns_of(flat, run.positions)
        over.append(np.full(flat.shape[-1], columns is not None))
        if columns is not None:
            numbers.append(np.arange(columns.start, columns.stop))
    return np.concatenate(over), np.concatenate(numbers)


def _shaped(functions: xr.Dataset, values: np.ndarray) -> xr.Dataset:
    """Dataset of values, the last axis of which numbers the elements of all functions.

    The other axes are those of chains and draws, or there are none.
    """
    out, start = {}, 0
    for name, like in functions.data_vars.items():
        if values.ndim == 1:
            like = like.isel(dict.fromkeys(SAMPLE_DIMS, 0), drop=True)
        size = int(np.prod(like.shape[values.ndim - 1 :]))
        out[name] = like.copy(data=values[..., start : start + size].reshape(like.shape))
        start += size
    return xr.Dataset(out, attrs=functions.attrs)


def _flat(dataset: xr.Dataset) -> np.ndarray:
    """All values of a Dataset as one vector, in the order of `_shaped`."""
    return np.concatenate([np.ravel(values) for values in dataset.data_vars.values()])
