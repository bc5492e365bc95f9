"""Full-data gradients at the draws of any sampler."""

from __future__ import annotations

import numpy as np
import pymc as pm
import xarray as xr
from xarray import DataTree

from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.transforms import unconstrain
from pymc_sgmcmc.trace import DIMENSION


def gradients(idata: DataTree, model: pm.Model | None = None) -> DataTree:
    r"""Full-data gradients of the log posterior at the draws of a trace of any sampler.

    With them `zero_variance` and `stein_calibrate` work on draws of NUTS, say, and on thinned
    draws of samplers with noisy gradients. One pass over the data for each draw, in chunks of
    bounded memory: leave out draws first, ``idata.sel(draw=slice(None, None, 10))``, where that
    is too much.

    Parameters
    ----------
    idata : xarray.DataTree
        With a group `posterior` that has all free variables of the model. Not changed.
    model : pymc.Model, optional
        That of the context where not given. All of its free variables should be continuous.

    Returns
    -------
    xarray.DataTree
        With `position`, unconstrained, and `gradient` in `sample_stats`, both of shape
        (chain, draw, d). The settings of a stochastic gradient run are left out, since they are
        about other gradients.

    Raises
    ------
    ValueError
        Where the posterior lacks variables of the model, or they have other shapes.
    ModelError
        Where the model is not one that this package samples.

    Examples
    --------
    >>> import numpy as np, pymc as pm, xarray as xr
    >>> with pm.Model() as model:
    ...     scale = pm.HalfNormal("scale")
    ...     _ = pm.Normal("y", 0, scale, observed=np.ones(10))
    >>> draws = xr.Dataset({"scale": (("chain", "draw"), np.ones((1, 2)))})
    >>> found = gradients(xr.DataTree.from_dict({"posterior": draws}), model)

    The gradient in log(scale) is -10 + 10 + 1 - 1, of likelihood, Jacobian and prior.

    >>> found["sample_stats"]["gradient"].values.ravel().round(6) + 0.0
    array([0., 0.])
    """
    model = pm.modelcontext(model)
    posterior = Posterior(model)
    positions = _positions(idata, model, posterior)
    found = np.empty_like(positions)
    for index in np.ndindex(positions.shape[:2]):
        found[index] = posterior.log_density_and_gradient(positions[index])[1]
    stats = idata["sample_stats"].to_dataset() if "sample_stats" in idata.children else xr.Dataset()
    stats = stats.drop_vars(["position", "gradient"], errors="ignore").drop_dims(
        ["position_dim_0", "gradient_dim_0", DIMENSION], errors="ignore"
    )
    stats.attrs = {k: v for k, v in stats.attrs.items() if not str(k).startswith("sgmcmc_")}
    dims = ("chain", "draw", DIMENSION)
    stats = stats.assign(position=(dims, positions), gradient=(dims, found))
    stats = stats.assign_coords({DIMENSION: list(posterior.labels)})
    for dim in dims[:2]:
        if dim in idata["posterior"].coords:
            stats = stats.assign_coords({dim: idata["posterior"].coords[dim].values})
    groups = {
        name: node.to_dataset()
        for name, node in idata.children.items()
        if name not in ("sample_stats", "sgmcmc_settings")
    }
    return DataTree.from_dict({**groups, "sample_stats": stats})


def _positions(idata: DataTree, model: pm.Model, posterior: Posterior) -> np.ndarray:
    """Unconstrained positions of the draws, shape (chain, draw, d)."""
    if "posterior" not in idata.children:
        raise ValueError(
            f"The trace should have a group `posterior`, but has {sorted(idata.children)}. Pass "
            "the DataTree that `pm.sample` returned."
        )
    draws = idata["posterior"].to_dataset().transpose("chain", "draw", ...)
    missing = [one.name for one in model.free_RVs if one.name not in draws.data_vars]
    if missing:
        raise ValueError(
            f"The posterior should have all free variables of the model, but has no "
            f"{', '.join(f'`{name}`' for name in missing)}. Pass the model that was sampled, and "
            "a trace of all its variables."
        )
    values = {one.name: np.asarray(draws[one.name]) for one in model.free_RVs}
    count = (draws.sizes["chain"], draws.sizes["draw"])
    flat = {name: one.reshape(-1, *one.shape[2:]) for name, one in values.items()}
    return unconstrain(flat, model, posterior.layout).reshape(*count, -1)
