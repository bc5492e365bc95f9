"""Full-data gradients at the draws of any sampler."""

from __future__ import annotations

import numpy as np
import pymc as pm
import xarray as xr
from xarray import DataTree

from pymc_sgmcmc.errors import warn
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.graphs import leaf_value
from pymc_sgmcmc.posterior.position import given_model
from pymc_sgmcmc.posterior.support import bounded_variables
from pymc_sgmcmc.posterior.transforms import unconstrain
from pymc_sgmcmc.record import (
    DIMENSION,
    POSITION,
    SETTINGS,
    STEP_METHODS,
    groups_of,
    labels_of,
    settings_of,
    stored_rows,
)
from pymc_sgmcmc.trace_tools.reader import check_same_draws, check_trace, first_of, has_gradients
from pymc_sgmcmc.trace_tools.variables import posterior_of


def gradients(idata: DataTree, model: pm.Model | None = None) -> DataTree:
    r"""Full-data gradients of the log posterior at the draws of a trace of any sampler.

    With these gradients, `zero_variance` and `stein_calibrate` work on draws of NUTS, for example,
    and on thinned draws of samplers with noisy gradients. Each draw takes one pass over the data,
    in chunks of bounded memory. Where that takes too long, leave out draws first:
    ``idata.sel(draw=slice(None, None, 10))``.

    Parameters
    ----------
    idata : xarray.DataTree
        Trace with a group `posterior` that has all free variables of the model. It is not changed.
    model : pymc.Model, optional
        Model of the trace. The default is the model of the context. All of its free variables
        should be continuous.

    Returns
    -------
    xarray.DataTree
        Trace with the unconstrained `position` and the `gradient` in `sample_stats`, both of shape
        (chain, draw, d). The settings of a stochastic gradient run are left out, since they belong
        to other gradients.

    Warns
    -----
    UserWarning
        Where the model has other data than the trace.

    Raises
    ------
    ValueError
        Where the posterior lacks variables of the model, has them in other shapes, or where a
        gradient is not finite.
    ModelError
        Where the model is not one that this package samples.

    Examples
    --------
    >>> import numpy as np, pymc as pm, xarray as xr
    >>> with pm.Model() as model:
    ...     scale = pm.HalfNormal("scale")
    ...     _ = pm.Normal("y", 0, scale, observed=np.ones(10))
    >>> draws = xr.Dataset({"scale": (("chain", "draw"), np.ones((1, 2)))})
    >>> with_gradients = gradients(xr.DataTree.from_dict({"posterior": draws}), model)

    The gradient in log(scale) is the sum of 10 - 10 from the likelihood, 1 from the Jacobian and
    -1 from the prior.

    >>> with_gradients["sample_stats"]["gradient"].values.ravel().round(6) + 0.0
    array([0., 0.])
    """
    check_trace(idata)
    model = given_model(model)
    if bounded := bounded_variables(model):
        raise ValueError(
            f"`{next(iter(bounded))}` has a bounded support but no transform, so the mean of its "
            "gradient is not zero, as tools for gradients need it. Leave out "
            "`default_transform=None`."
        )
    _check_data(idata, model)
    posterior = Posterior(model, rows=_rows(idata))
    positions = unconstrained_draws(idata, model, posterior)
    values = np.empty_like(positions)
    for index in np.ndindex(positions.shape[:2]):
        with np.errstate(all="ignore"):
            values[index] = posterior.log_density_and_gradient(positions[index])[1]
        if not np.isfinite(values[index]).all():
            chain, draw = index
            bad = posterior.labels[int(np.argmin(np.isfinite(values[index])))]
            raise ValueError(
                f"All gradients should be finite, but that in `{bad}` is not at draw {draw} of "
                f"chain {chain}. Leave out draws outside of the support, or pass the model that "
                "was sampled."
            )
    stats = xr.Dataset()
    if "sample_stats" in idata.children:
        stats = idata["sample_stats"].to_dataset()
        sizes = stats.sizes.get("chain"), stats.sizes.get("draw")
        if sizes != (None, None):
            check_same_draws(idata, sizes)
    stats = stats.drop_vars(["position", "gradient"], errors="ignore").drop_dims(
        ["position_dim_0", "gradient_dim_0", DIMENSION], errors="ignore"
    )
    stats.attrs = {k: v for k, v in stats.attrs.items() if not str(k).startswith("sgmcmc_")}
    dims = ("chain", "draw", DIMENSION)
    stats = stats.assign(position=(dims, positions), gradient=(dims, values))
    stats = stats.assign_coords({DIMENSION: list(posterior.labels)})
    for dim in dims[:2]:
        if dim in idata["posterior"].coords:
            stats = stats.assign_coords({dim: idata["posterior"].coords[dim].values})
    groups = groups_of(idata) | {"sample_stats": stats}
    groups.pop(SETTINGS, None)
    return DataTree.from_dict(groups, name=idata.name)


def changed_data(idata: DataTree, model: pm.Model) -> list[str]:
    """Names of the data that have other values in the model than in the trace."""
    of_model = {variable.name: model.rvs_to_values[variable] for variable in model.observed_RVs}
    of_model |= {variable.name: variable for variable in model.data_vars}
    changed = []
    for group in ("observed_data", "constant_data"):
        for name, stored in idata[group].data_vars.items() if group in idata.children else ():
            values = leaf_value(of_model[name]) if name in of_model else None
            if values is not None and not np.array_equal(values, stored.values, equal_nan=True):
                changed.append(f"`{name}`")
    return changed


def check_same_model(idata: DataTree, model: pm.Model, labels: tuple[str, ...]) -> None:
    """Raise a ValueError where a model has other coordinates, with these labels, or other data.

    Traces without labels, and of compound steps, say nothing of all coordinates.
    """
    stored, changed = labels_of(idata, len(labels)), changed_data(idata, model)
    what = f"other values of {', '.join(changed)}" if changed else ""
    unlabelled = tuple(f"{POSITION}[{number}]" for number in range(len(labels)))
    if stored not in (labels, unlabelled) and STEP_METHODS not in settings_of(idata):
        what = f"the coordinates {first_of(labels)}, but the run had {first_of(stored)}"
    if what:
        raise ValueError(
            f"`model` should be the one that was sampled, but has {what}. Pass that model with its "
            "data, or sample again."
        )


def _check_data(idata: DataTree, model: pm.Model) -> None:
    """Warn where the model has other data than the trace."""
    changed = changed_data(idata, model)
    if changed:
        warn(
            f"The model has other values of {', '.join(changed)} than the trace, so that the "
            "gradients are those of another posterior. Set the data back, or sample again.",
            UserWarning,
        )


def with_gradients(idata: DataTree, model: pm.Model | None) -> DataTree:
    """The trace with its gradients, which are computed where it has none and a model is given."""
    if model is None:
        return idata
    model = given_model(model)
    return idata if has_gradients(idata) else gradients(idata, model)


def _rows(idata: DataTree) -> str | list[str] | None:
    """Names of the data that have a row for each observation, where the user gave them."""
    return stored_rows(settings_of(idata)) if "sample_stats" in idata.children else None


def _check_order(draws: xr.Dataset, model: pm.Model) -> None:
    """Raise a ValueError where elements of a variable are in another order than in the model."""
    for variable in model.free_RVs:
        values = draws[variable.name]
        for dim in model.named_vars_to_dims.get(variable.name) or ():
            labels = model.coords.get(dim)
            if labels is None or dim not in values.coords or values.sizes[dim] != len(labels):
                continue
            stored = [str(label) for label in values.coords[dim].values]
            if stored != [str(label) for label in labels]:
                raise ValueError(
                    f"`{variable.name}` should have its elements in the order of the model, but "
                    f"`{dim}` is {', '.join(stored[:5])} in the trace and "
                    f"{', '.join(map(str, labels[:5]))} in the model. Use "
                    f'`idata.sel({dim}=list(model.coords["{dim}"]))`.'
                )


def unconstrained_draws(idata: DataTree, model: pm.Model, posterior: Posterior) -> np.ndarray:
    """Unconstrained positions of the draws, shape (chain, draw, d)."""
    draws = posterior_of(idata)
    missing = [variable.name for variable in model.free_RVs if variable.name not in draws.data_vars]
    if missing:
        raise ValueError(
            "The posterior should have all free variables of the model, but has no "
            f"{', '.join(f'`{name}`' for name in missing)}. Pass the model that was sampled."
        )
    values = {variable.name: np.asarray(draws[variable.name]) for variable in model.free_RVs}
    count = (draws.sizes["chain"], draws.sizes["draw"])
    _check_order(draws, model)
    shapes = model.eval_rv_shapes()
    for name, array in values.items():
        if array.shape[2:] != tuple(shapes[name]):
            raise ValueError(
                f"`{name}` should have draws of shape {tuple(shapes[name])}, as in the model, but "
                f"has shape {array.shape[2:]}. Pass the model that was sampled."
            )
        if not np.isfinite(array).all():
            raise ValueError(
                f"All draws should be finite, but those of `{name}` are not. Leave such draws out, "
                "`idata.sel(draw=...)`, or sample again."
            )
    flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in values.items()}
    return unconstrain(flat, model, posterior.layout).reshape(*count, -1)
