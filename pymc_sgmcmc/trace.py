"""Names for the coordinates of the stored positions and gradients of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xarray as xr
from xarray import DataTree

DIMENSION = "unconstrained_position"
"""Dimension of `position` and `gradient` in a labelled trace."""

_GROUPS = ("sample_stats", "warmup_sample_stats")
_UNLABELLED = ("position_dim_0", "gradient_dim_0")


OTHER_DRAWS = ("prior", "sample_stats_prior", "warmup_")
"""Beginnings of the names of groups with draws that are not those of the posterior."""


def groups_of(idata: DataTree) -> dict[str, xr.Dataset]:
    """All groups of a trace by their paths, without "/" in front but that of the root itself.

    `DataTree.from_dict` makes a trace of them, with the attributes of the root and groups in
    groups, which copies of the children alone would lose.
    """
    return {
        "/" if path == "." else path: node.to_dataset(inherit=False)
        for path, node in idata.subtree_with_keys
    }


def is_of_draws(path: str, group: xr.Dataset, chains: int, draws: int) -> bool:
    """Whether a group has values for each chain and draw of the posterior."""
    sizes = (group.sizes.get("chain"), group.sizes.get("draw"))
    return sizes == (chains, draws) and not path.startswith(OTHER_DRAWS)


def label_positions(idata: DataTree, labels: Sequence[str]) -> DataTree:
    """Name the coordinates of `position` and `gradient` in a trace of `pymc.sample`.

    PyMC numbers the axes of vector statistics (``gradient_dim_0``). This gives both statistics
    one dimension, ``unconstrained_position``, with a label for each coordinate.

    Parameters
    ----------
    idata : xarray.DataTree
        From `pymc.sample` with a step method of this package. Not changed.
    labels : sequence of str
        ``step.posterior.labels``.

    Returns
    -------
    xarray.DataTree

    Raises
    ------
    ValueError
        Where there are no stored gradients, or their number is not that of the labels.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> stats = xr.Dataset(
    ...     {
    ...         "gradient": (("chain", "draw", "gradient_dim_0"), np.zeros((1, 5, 2))),
    ...         "position": (("chain", "draw", "position_dim_0"), np.ones((1, 5, 2))),
    ...     }
    ... )
    >>> idata = xr.DataTree.from_dict({"sample_stats": stats})
    >>> labelled = label_positions(idata, ["intercept", "beta[feature=age]"])
    >>> labelled["sample_stats"]["gradient"].sel(unconstrained_position="intercept").shape
    (1, 5)
    """
    if not isinstance(idata, DataTree):
        raise TypeError(
            "`idata` should be an xarray.DataTree, as `pm.sample` returns, but is of type "
            f"{type(idata).__name__}."
        )
    groups = [name for name in _GROUPS if name in idata.children]
    if not any("gradient" in idata[name] for name in groups):
        raise ValueError(
            "The trace should have `gradient` in `sample_stats`, but has none. Sample with a step "
            "method of pymc_sgmcmc, such as `pm.sample(step=SGLDCV())`."
        )
    if isinstance(labels, str) or not isinstance(labels, Iterable):
        raise TypeError(f"`labels` should be a sequence of names, but got {labels!r}.")
    labels = [str(label) for label in labels]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ValueError(
            f"`labels` should differ, but `{twice[0]}` is there {labels.count(twice[0])} times. "
            "Pass `step.posterior.labels` of the step that sampled."
        )
    labelled = idata.copy()
    for name in groups:
        dataset = idata[name].to_dataset()
        length = dataset["gradient"].shape[-1]
        if length != len(labels):
            raise ValueError(
                f"`labels` should name the {length} coordinates of the stored gradients, but has "
                f"{len(labels)} entries. Pass `step.posterior.labels` of the step that sampled."
            )
        dataset = dataset.drop_vars(_UNLABELLED, errors="ignore")
        dataset = dataset.rename_dims(
            {old: DIMENSION for old in _UNLABELLED if old in dataset.dims}
        )
        labelled[name] = DataTree(dataset.assign_coords({DIMENSION: labels}))
    return labelled
