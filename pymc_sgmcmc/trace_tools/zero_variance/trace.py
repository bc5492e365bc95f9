"""Zero-variance control variates on a trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr
from arviz_base import xarray_sel_iter
from arviz_base.labels import BaseLabeller
from xarray import DataTree

from pymc_sgmcmc.record import DIMENSION, MOMENTS
from pymc_sgmcmc.trace_tools.gradients import gradients
from pymc_sgmcmc.trace_tools.moments import StoredMoments, read_moments
from pymc_sgmcmc.trace_tools.reader import (
    StoredRun,
    check_posterior,
    chunks,
    columns_of,
    every_nth,
    has_gradients,
    posterior_of,
    read_run,
)
from pymc_sgmcmc.trace_tools.zero_variance.estimate import ControlledMeans, controlled_means
from pymc_sgmcmc.trace_tools.zero_variance.gain import (
    advice,
    advice_of_chain,
    centred_draws,
    linear_fit,
    predicted_gain,
    slopes,
)
from pymc_sgmcmc.trace_tools.zero_variance.moments import means_of_moments

SAMPLE_DIMS = ("chain", "draw")
"""Dimensions of the draws of a trace."""

ESTIMATES = ("mean", "mcse", "mean_before", "mcse_before", "variance_ratio")
"""Estimates that draws and moments of all transitions both give."""


@dataclass(frozen=True)
class ZeroVariance:
    r"""Means with zero-variance control variates, from `zero_variance`.

    Attributes
    ----------
    mean, mcse : xarray.Dataset
        Of each function, with control variates, and their Monte-Carlo standard errors. Dimensions
        and coordinates of the functions, without those of chains and draws.
    mean_before, mcse_before : xarray.Dataset
        Without control variates.
    variance_ratio : xarray.Dataset
        Measured gain: the variance of the mean without over that with. NaN for what is constant.
    predicted_gain : xarray.Dataset
        For the linear part of each function and order 1, from step size, preconditioner and
        gradient noise, :math:`1 + 1 / \delta` where every transition was stored. Of a normal
        posterior: curvature that varies over it leaves more than the noise does. NaN for other
        than Langevin dynamics.
    over_transitions : xarray.Dataset
        Whether the means are over all transitions of the run, by its moments, or over the draws.
    notes : tuple of str
        Which means are over all transitions, and why control variates help little, where they do.
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
        elements = xarray_sel_iter(self.mean, skip_dims=set())
        labels = [BaseLabeller().make_label_flat(*element) for element in elements]
        table = pd.DataFrame(
            {name: _flat(getattr(self, name)) for name in columns},
            index=pd.Index(labels, name="parameter"),
        )
        table.attrs["notes"] = list(self.notes)
        return table

    def draws(self) -> xr.Dataset:
        """The functions at each draw with the control variates added, f + a'h.

        Means over them have small variance; single ones need not, since coefficients from batch
        means aim at the mean. Takes as much memory as the functions.

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
        out, start = {}, 0
        for name, values in functions.data_vars.items():
            size = int(np.prod(values.shape[2:]))
            part_of = controls[..., start : start + size].reshape(values.shape)
            out[name] = values.astype(float) + part_of
            start += size
        return xr.Dataset(out)


def zero_variance(
    idata: DataTree,
    order: int = 1,
    func: Callable[[xr.Dataset], Any] | None = None,
    var_names: str | Sequence[str] | None = None,
    model: pm.Model | None = None,
    *,
    coefficients: str = "batch_means",
    regression: str = "least_squares",
    split: bool = False,
    batches: int | None = None,
    moments: bool | str = True,
) -> ZeroVariance:
    r"""Posterior means with zero-variance control variates, from the stored gradients.

    For each function f of the parameters the mean of :math:`f + \hat a^\top h`, with

    .. math:: h = -\tfrac12 \Delta Q + \nabla Q \cdot z, \quad z = -\tfrac12 \hat\nabla, \quad
              \hat a = -\mathrm{Var}(h)^{-1} \mathrm{Cov}(h, f)

    for all monomials Q of the unconstrained position up to the order. No pass over the data.

    **Law.** Under the posterior each h has mean zero, so the mean is that of f with a smaller
    Monte-Carlo error. A chain with a bias has a law near the posterior: with order 1 its means
    keep their bias, since mean gradients are zero at stationarity. Order 2 removes on a Gaussian
    posterior the bias of second moments as well, with coefficients from batch means where every
    transition was stored; of thinned draws, or with marginal coefficients, part of it stays, and
    ``moments="only"`` removes it.

    **Draws or transitions.** A draw is one of several transitions, and the run keeps moments of
    all of them (``idata["sgmcmc_moments"]``), also of those that were taken out of the trace since.
    Where a function is a coordinate of the position its mean comes from these, with the whole
    gain; that of another function, such as a transformed variable, comes from the draws.
    `over_transitions` says which.

    **Gain.** On the mean of a parameter of a near-Gaussian posterior, order 1 removes what the
    injected noise adds to the variance, and leaves what the gradient noise adds: with every
    transition stored and coefficients from batch means the variance falls by :math:`1 + 1 /
    \delta`, where :math:`\delta = \tfrac{h}{4} M V` is the inflation by the gradient noise V; with
    marginal coefficients by about :math:`1 + H / V`. So control variates for the gradient
    (`SGLDCV`) make these control variates effective, and without injected noise there is no gain.

    Parameters
    ----------
    idata : xarray.DataTree
        With `position` and `gradient` in `sample_stats`: from `pymc.sample` with a step method of
        this package, or from `gradients`. Not changed.
    order : int
        Largest degree of the polynomials: p = d terms for order 1, d (d + 3) / 2 for order 2.
    func : callable, optional
        Functions of the parameters: gets the posterior as an `xarray.Dataset`, returns a
        Dataset, DataArray or array with a value, or an array of values, for each chain and draw.
        The variables themselves where not given. Squares should be about a constant, not about
        the mean of the draws: that is off by its own error, which the controlled mean of squares
        then has, and the variance is ``mean of squares - mean**2``.
    var_names : str or sequence of str, optional
        Variables of the posterior, or of what `func` returns; all where not given.
    model : pymc.Model, optional
        Where the trace has no stored gradients they are computed with it, see `gradients`.
    coefficients : {"batch_means", "marginal"}
        Covariances over means of batches of successive draws, so over long runs, or over single
        draws as in the paper. Batches should be longer than the autocorrelation time.
    regression : {"least_squares", "ridge", "pca", "cv"}
        Least squares needs five batches a term. The others, from scikit-learn (optional), are
        for fewer batches than that: ridge, principal components, or the best in cross-validation.
    split : bool
        Take the coefficients for each fifth of the batches from the other batches, so that
        coefficients and means share no draws.
    batches : int, optional
        Batches a chain; 20, or five a term over all chains, where not given.
    moments : bool or "only"
        Use the moments of all transitions where they serve: coefficients from batch means, up to
        order 2 (means take those of order 1), and a trace with all draws of the run. With "only"
        no draw has to be stored: the result has ``position``, the means of the unconstrained
        position, and with order 2 ``variance``, that of each of its coordinates, without the bias
        that the chain gives it on a Gaussian posterior. The stored batches are then joined to
        `batches`.

    Returns
    -------
    ZeroVariance
        With ``summary()``, a table, and ``draws()``.

    Warns
    -----
    UserWarning
        Where the mean gradient is beyond doubt not zero, as with gradients of other data.

    Raises
    ------
    ValueError
        Where there are no stored gradients or moments, draws are not finite, chains are far
        from the others, parameters are constant or unknown, or batches are fewer than the terms
        need.

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
                "`moments='only'` gives means of the position alone, from batch means, but got "
                "`func`, `var_names`, `model` or other `coefficients`. Leave these out, or use "
                "`moments=True`."
            )
        return _from_moments(read_moments(idata), order, regression, split, batches)
    if not isinstance(moments, bool):
        raise ValueError(f"`moments` should be True, False or 'only', but got {moments!r}.")
    if model is not None and not has_gradients(idata):
        idata = gradients(idata, model)
    run = read_run(idata)
    functions = _functions(idata, func, var_names)
    check_posterior(functions if func is None else posterior_of(idata), run)
    _check_functions(functions, run)
    arrays = [np.asarray(values) for values in functions.data_vars.values()]
    estimate = controlled_means(
        arrays,
        run.positions,
        run.gradients,
        order,
        coefficients=coefficients,
        regression=regression,
        split=split,
        batches=batches,
        labels=run.labels,
    )
    values = np.concatenate(
        [every_nth(array).reshape(-1, int(np.prod(array.shape[2:]))) for array in arrays], axis=1
    )
    fit = linear_fit(run)
    directions = slopes(centred_draws(run.positions), values - values.mean(0))
    columns = estimate.columns
    columns["predicted_gain"] = predicted_gain(run, fit, directions, run.thin)
    columns["predicted_gain"][~estimate.moving] = np.nan
    over = np.zeros(len(estimate.mean), dtype=bool)
    means: ZeroVariance | None = None
    notes: list[str] = []
    short = estimate.short_batches(values.var(0), "draws")
    if moments and coefficients == "batch_means" and order <= 2 and run.thin != 1:
        coordinates, numbers = _coordinates(functions, run)
        if coordinates.any():
            means, notes = _means_over_transitions(idata, run, regression, split, batches)
            if means is not None:
                over = coordinates
                for name in ESTIMATES:
                    columns[name] = columns[name].copy()
                    columns[name][over] = _flat(getattr(means, name))[numbers]
                gain = predicted_gain(run, fit, directions[:, over], 1)
                columns["predicted_gain"][over] = gain
    if over.all():
        assert means is not None
        short = list(means.notes)
    # In batches that are too short any mean gradient seems improbable.
    off_zero = [] if short else advice_of_chain(run)
    for note in off_zero:
        warnings.warn(note, UserWarning, stacklevel=2)
    notes += off_zero
    if not over.all():
        notes += advice(run, estimate, fit, bool(short), coefficients) + short
    shaped = {name: _shaped(functions, column) for name, column in columns.items()}
    return ZeroVariance(
        **shaped,
        over_transitions=_shaped(functions, over),
        notes=tuple(notes),
        estimate=estimate,
        _functions=functions,
        _run=run,
    )


def zero_variance_of_moments(
    idata: DataTree,
    order: int = 1,
    *,
    regression: str = "least_squares",
    split: bool = False,
    batches: int | None = None,
) -> pd.DataFrame:
    """Table of `zero_variance` with ``moments="only"``, which replaces this function.

    Parameters
    ----------
    idata, order, regression, split, batches
        As in `zero_variance`.

    Returns
    -------
    pandas.DataFrame
        Rows: coordinates of the unconstrained position, and with `order` 2 their variances,
        ``variance of ...``.

    Warns
    -----
    FutureWarning
    """
    warnings.warn(
        "`zero_variance_of_moments` will be removed. Use `zero_variance(idata, order, "
        "moments='only').summary()`.",
        FutureWarning,
        stacklevel=2,
    )
    means = zero_variance(
        idata, order, regression=regression, split=split, batches=batches, moments="only"
    )
    table = means.summary()[list(ESTIMATES)]
    labels = means.mean[DIMENSION].values.tolist()
    rows = [*labels, *(f"variance of {label}" for label in labels)]
    table.index = pd.Index(rows[: len(table)], name="parameter")
    return table


def _from_moments(
    moments: StoredMoments, order: int, regression: str, split: bool, batches: int | None
) -> ZeroVariance:
    """Means of the unconstrained position, and with order 2 its variances."""
    if order not in (1, 2):
        raise ValueError(
            f"`order` should be 1 or 2, but got {order!r}. Higher ones need the draws, so "
            "`moments=True`."
        )
    means, variances, notes = means_of_moments(moments, order, regression, split, batches)
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
    idata: DataTree, run: StoredRun, regression: str, split: bool, batches: int | None
) -> tuple[ZeroVariance | None, list[str]]:
    """Means of the position over all transitions, if there are any, and notes."""
    if MOMENTS not in idata.children:
        return None, []
    try:
        moments = read_moments(idata)
        means = _from_moments(moments, 1, regression, split, batches)
    except ValueError as error:
        return None, [f"The means are over the draws alone. {error}"]
    chains = moments.batch_position.shape[0]
    if chains != len(run.chains):
        return None, [
            f"The means are over the draws alone: {chains} chains have moments of all transitions, "
            f"and the trace has {len(run.chains)}. Chains that were interrupted have none."
        ]
    return means, [
        "Means of coordinates of the position are over all transitions, not only over the draws.",
        *means.notes,
    ]


def _coordinates(functions: xr.Dataset, run: StoredRun) -> tuple[np.ndarray, np.ndarray]:
    """Mask of the elements that are coordinates of the position, and their numbers there."""
    over, numbers = [], []
    for values in functions.data_vars.values():
        flat = np.asarray(values).reshape(*run.positions.shape[:2], -1)
        columns = columns_of(flat, run.positions)
        over.append(np.full(flat.shape[-1], columns is not None))
        if columns is not None:
            numbers.append(np.arange(columns.start, columns.stop))
    return np.concatenate(over), np.concatenate([np.empty(0, dtype=int), *numbers])


def _functions(
    idata: DataTree,
    func: Callable[[xr.Dataset], Any] | None,
    var_names: str | Sequence[str] | None,
) -> xr.Dataset:
    """Functions whose means are wanted, with chains and draws first."""
    posterior = posterior_of(idata)
    if func is not None and not callable(func):
        raise TypeError(
            f"`func` should be a function of the posterior, but got {func!r}. Name variables by "
            "`var_names`."
        )
    functions = posterior if func is None else _as_dataset(func(_read_only(posterior)), posterior)
    if var_names is not None:
        if not isinstance(var_names, Iterable):
            raise ValueError(
                f"`var_names` should be a name or a sequence of names, but got {var_names!r}."
            )
        names = [var_names] if isinstance(var_names, str) else list(var_names)
        unknown = [name for name in names if name not in functions.data_vars]
        if unknown or not names:
            raise ValueError(
                f"`var_names` should name some of {_quote(functions.data_vars)}, but got "
                f"{_quote(unknown) or 'an empty list'}."
            )
        functions = functions[names]
    if not functions.data_vars:
        raise ValueError(
            "The group `posterior` should have variables with a value for each chain and draw, but "
            "has none. Pass the DataTree that `pm.sample` returned."
        )
    return functions.transpose(*SAMPLE_DIMS, ...)


def _read_only(posterior: xr.Dataset) -> xr.Dataset:
    """Copy of the posterior that shares the numbers and refuses changes in place."""
    out = posterior.copy()
    for name, values in posterior.data_vars.items():
        view = np.asarray(values).view()
        view.flags.writeable = False
        out[name] = values.copy(data=view)
    return out


def _as_dataset(value: Any, posterior: xr.Dataset) -> xr.Dataset:
    """Result of a function as variables with a value for each chain and draw."""
    if isinstance(value, dict):
        kinds = {name: type(part).__name__ for name, part in value.items()}
        if any(isinstance(part, xr.Dataset) and len(part) != 1 for part in value.values()):
            raise ValueError(
                f"`func` should return a DataArray or an array for each name, but returned {kinds}."
            )
        value = xr.Dataset({name: _as_array(part, posterior) for name, part in value.items()})
    elif not isinstance(value, xr.Dataset):
        array = _as_array(value, posterior)
        name = "func" if array.name is None else array.name
        value = array.rename(None).to_dataset(name=name)
    if not value.data_vars:
        raise ValueError(
            "`func` should return a Dataset with at least one variable, but it has none."
        )
    for name, values in value.data_vars.items():
        if any(values.sizes.get(dim) != posterior.sizes[dim] for dim in SAMPLE_DIMS):
            chains, draws = (posterior.sizes[dim] for dim in SAMPLE_DIMS)
            raise ValueError(
                f"`func` should return a value for each of {chains} x {draws} draws, but "
                f"`{name}` has dimensions {dict(values.sizes)}. Leave means over draws to "
                "`zero_variance`."
            )
    return value


def _as_array(value: Any, posterior: xr.Dataset) -> xr.DataArray:
    if isinstance(value, xr.Dataset):
        (value,) = value.data_vars.values()
    if isinstance(value, xr.DataArray):
        return value
    array = np.asarray(value)
    chains, draws = (posterior.sizes[dim] for dim in SAMPLE_DIMS)
    if array.shape[:2] != (chains, draws):
        raise ValueError(
            "`func` should return a Dataset, a DataArray or an array with a value for each of "
            f"{chains} x {draws} draws, but returned shape {array.shape}. Write it with xarray, "
            'for example `lambda post: post["x"] ** 2`.'
        )
    dims = SAMPLE_DIMS + tuple(f"func_dim_{axis}" for axis in range(array.ndim - 2))
    return xr.DataArray(array, dims=dims)


def _check_functions(functions: xr.Dataset, run: StoredRun) -> None:
    sizes = run.positions.shape[:2]
    for name, values in functions.data_vars.items():
        if values.dtype.kind not in "fiub":
            raise ValueError(
                f"`{name}` should be numbers, but has dtype {values.dtype}. Leave it out by "
                "`var_names`."
            )
        if values.shape[:2] != sizes:
            raise ValueError(
                f"`{name}` has {values.shape[:2]} chains and draws, but the stored gradients have "
                f"{sizes}. Select the same draws in all groups, as `idata.sel` does."
            )
        if not values.size:
            raise ValueError(
                f"`{name}` should have at least one element a draw, but has shape {values.shape}. "
                "Leave it out by `var_names`."
            )
        array = np.asarray(values)
        # Neither extreme is finite where a value is not.
        low, high = array.min(), array.max()
        if not np.isfinite([low, high]).all():
            chain = next(number for number, part in enumerate(array) if not np.isfinite(part).all())
            raise ValueError(
                f"`{name}` should be finite, but is not in chain {run.chains[chain]}. Leave it "
                "out by `var_names`, or leave out the draws in which it is not."
            )
        if low == high:
            raise ValueError(
                f"`{name}` is constant over the draws, {float(low):g}: there is no Monte-Carlo "
                "error to reduce. Leave it out by `var_names`."
            )


def _shaped(functions: xr.Dataset, flat: np.ndarray) -> xr.Dataset:
    """Dataset with an entry for each element of the functions."""
    out, start = {}, 0
    for name, values in functions.data_vars.items():
        like = values.isel(dict.fromkeys(SAMPLE_DIMS, 0), drop=True)
        out[name] = like.copy(data=flat[start : start + like.size].reshape(like.shape))
        start += like.size
    return xr.Dataset(out, attrs=functions.attrs)


def _flat(dataset: xr.Dataset) -> np.ndarray:
    return np.concatenate([np.ravel(values) for values in dataset.data_vars.values()])


def _quote(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)
