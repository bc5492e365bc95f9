"""Names, shapes and statistics that a run writes into a trace, with functions to read them.

The draws of a step method carry a `RunRecord` in a statistic of its own: with the settings in the
first draw after tuning, and with the moments in the last draw. `finish` turns these records into
two groups of the trace, names the coordinates of the stored positions and gradients, and removes
the statistic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr
from xarray import DataTree

from pymc_sgmcmc.matrices import Factored, LowRank, Matrix, as_matrix

POSITION, GRADIENT = "position", "gradient"
"""These are the names of two statistics with an array for each draw: the unconstrained position,
and the gradient there."""

RECORD = "sgmcmc_record"
"""This statistic carries the records of the whole run, until the run has ended."""

DIMENSION = "unconstrained_position"
"""This is the dimension of position and gradient in a trace."""

SAMPLE_DIMS = ("chain", "draw")
"""These are the dimensions of the draws of a trace."""

MOMENTS = "sgmcmc_moments"
"""This group of a trace has the moments over all transitions."""

DRAWS = "draws"
"""This attribute of the group of moments is the number of draws of a chain that the trace had when
the run ended."""

SETTINGS = "sgmcmc_settings"
"""This group of a trace has the arrays of the settings."""

PREFIX = "sgmcmc_"
"""The settings are attributes of `sample_stats` whose names begin with this prefix."""

STEP_METHODS = "step_methods"
"""This setting, which only compound runs have, is the number of their step methods."""

STEP_SIZE_COLUMN = "step_size_column"
"""This setting is the column of ``step_size`` that belongs to this package, in compound runs in
which other step methods record a ``step_size`` too."""

GIVEN, COMPUTED = "given", "computed"
"""A step size is given by the user, or computed, in closed form or by what a sampler has in its
place."""

MEAN_SHIFT = "mean_shift"
"""This array of the settings has the error of each mean, in posterior standard deviations, for
variances that are too large by a factor of two, to first order."""

LAW = "law"
"""This setting names the law of the dynamics, where a formula of it is known."""

LARGEST_FORCE = "largest_force"
"""This setting is the length of the gradient beyond which the drift is tamed."""

OF_CHAIN = "chain_"
"""The names of matrices in terms of the coordinates of a chain begin with this word, where it has
its own ones for effects of groups."""

EFFECTS = "effects"
"""This array of the settings has what is known of effects in coordinates of their own."""

HALF_STEP = "sgmcmc_half_step"
"""This group of a trace has the errors of the means, measured at the whole and half the step
size."""

ACCURACY = "sgmcmc_accuracy"
"""This group of a trace has the means and standard deviations of the coordinates, with stated
errors."""

UNCALIBRATED = "uncalibrated_"
"""The groups of a calibrated trace whose names begin with this word have the draws before."""

LARGEST_MEAN_ERROR = 0.1
"""An error of a mean, in posterior standard deviations, is reported where it is larger. A 95 %
interval that is off by this much has a probability of 94.9 %. A standard deviation should be known
to this part of itself: an interval too short by so much has a probability of 92 %."""

INTEGRATED = "integrated_out"
"""This setting is the names of the variables that were integrated out of the model, as JSON."""

QUADRATURE_POINTS = "quadrature_points"
"""This setting is the number of nodes of the quadrature with which that was done, where it was."""

LOCAL, LOCAL_TRANSITIONS = "local", "local_transitions"
"""These settings are the names of the local variables, as JSON, and the transitions of a visit."""

MIRRORED = "mirrored"
"""This setting is the names of the positive variables that were mirrored at zero, as JSON."""

SOURCE = "source"
"""The setting `rows` of a run on rows of a source is its signature, under this name."""

WITH_LESS_NOISE = "with_less_noise"
"""This setting is what a user can write in place of an estimator that does not reduce the noise."""

KEPT_ROWS = "kept_rows"
"""This array of the settings has the numbers of the rows that each transition takes."""

SETUP_PASSES, SETUP_SECONDS = "setup_passes", "setup_seconds"
"""These settings are the rows that the set-up evaluated, again and again, over the number of all
rows, and its seconds. They differ between runs that are the same."""

IMPLICIT: dict[str, type[LowRank] | type[Factored]] = {
    "factors": LowRank,
    "values_of_root": Factored,
}
"""The kinds of matrices that a trace has as several arrays, by the end of the name of one."""

STATISTICS = ("sample_stats", "warmup_sample_stats")
"""These groups have statistics of the draws."""

OTHER_DRAWS = ("prior", "sample_stats_prior", "warmup_")
"""Groups whose names begin with these words have draws that are not of the posterior."""


@dataclass(frozen=True)
class RunSettings:
    """Settings of a step method.

    Attributes
    ----------
    attributes : mapping
        Numbers and words, by name.
    arrays : mapping
        Arrays by name: the preconditioner M of Langevin dynamics, scalar, (d,) or (d, d), the
        centre, and the curvature there, (d,) or (d, d). A matrix known by products alone
        is stored as its parts.
    labels : tuple of str
        Labels of the coordinates of the position.
    """

    attributes: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    labels: tuple[str, ...] = ()

    def dataset(self) -> xr.Dataset:
        """The arrays, with the labels of the coordinates."""
        column_dimension = f"{DIMENSION}_of_column"
        variables = {}
        for name, values in self.arrays.items():
            dims: tuple[str, ...] = (DIMENSION, column_dimension)[: values.ndim]
            if name in (KEPT_ROWS, EFFECTS):
                dims = (f"{name}_entry",)
            elif name.endswith(("vectors", "factors")):
                dims = (DIMENSION, name.rpartition("_")[0] + "_direction")[-values.ndim :]
            elif "_of_" in name:  # elements of a sparse matrix
                matrix, _, part = name.partition("_of_")
                dims = (f"{matrix.rpartition('_')[0]}_element_of_{part}",)
            variables[name] = (dims, values)
        used = {dim for names, _ in variables.values() for dim in names}
        labels = list(self.labels)
        coords = {dim: labels for dim in (DIMENSION, column_dimension) if dim in used}
        return xr.Dataset(variables, coords=coords)


@dataclass(frozen=True)
class RunRecord:
    """Record of a run, which one of its draws carries.

    Attributes
    ----------
    settings : RunSettings or None
        Settings of the run, which the first draw after tuning carries.
    moments : mapping or None
        Moments of the chain, which its last draw carries.
    """

    settings: RunSettings | None = None
    moments: Mapping[str, np.ndarray] | None = None


# --- Writing --------------------------------------------------------------------------------


def finish(
    idata: DataTree,
    step_methods: Sequence[Mapping[str, Any]] = (),
    last_records: Sequence[Any] | None = None,
) -> bool:
    """Write the records of a run into groups of its trace, and remove the statistic.

    Parameters
    ----------
    idata : xarray.DataTree
        Trace, which is changed in place.
    step_methods : sequence of mappings
        Types of the statistics of each step method of the run, in their order, where known.
    last_records : sequence, optional
        Records of the last draws that the chains made. The default is those in the trace.

    Returns
    -------
    bool
        Whether the run has exactly one step method of this package, alone or beside step methods of
        PyMC. Two of this package would use the same names in a trace.
    """
    records = _records(idata)
    make_rectangular(idata)
    if records is None or records.shape[2] != 1:
        return False
    records = records[..., 0]
    settings = next((record.settings for record in records.flat if _has(record, "settings")), None)
    if settings is None:
        return False
    settings = _beside_others(settings, step_methods)
    attach(idata, settings)
    label(idata, settings.labels)
    if STEP_METHODS not in settings.attributes:
        lasts = records[:, -1] if last_records is None else last_records
        moments = [record.moments if _has(record, "moments") else None for record in lasts]
        dataset = moments_dataset(moments, settings.labels)
        if dataset is not None:
            posterior = idata["posterior"]
            dataset = dataset.assign_coords(chain=posterior.coords["chain"].values)
            dataset = dataset.assign_attrs({DRAWS: posterior.sizes["draw"]})
            idata[MOMENTS] = DataTree(dataset)
    return True


def with_preconditioner(settings: Mapping[str, Any]) -> str:
    """The preconditioner that a step size goes with, to follow it in a message."""
    preconditioner = settings.get("preconditioner_from")
    if preconditioner is None:  # The sampler takes none.
        return ""
    if preconditioner == GIVEN:
        return " with the given preconditioner"
    return f' with `preconditioner="{preconditioner}"`'


def _has(record: Any, part: str) -> bool:
    """Whether a draw carries a record with this part."""
    return isinstance(record, RunRecord) and getattr(record, part) is not None


def _records(idata: DataTree) -> np.ndarray | None:
    """Take the records out of a trace, shape (chains, draws, step methods of this package)."""
    records = None
    for group in reversed(STATISTICS):
        if group in idata.children and RECORD in idata[group].data_vars:
            dataset = idata[group].to_dataset()
            records = np.asarray(dataset[RECORD])
            records = records.reshape(*records.shape[:2], -1)
            dataset = dataset.drop_vars(RECORD)
            unused = [dim for dim in dataset.dims if str(dim).startswith(RECORD)]
            idata[group] = DataTree(dataset.drop_dims(unused))
    return records


def _beside_others(settings: RunSettings, step_methods: Sequence[Mapping[str, Any]]) -> RunSettings:
    """Settings with the number of step methods, and the column of this one in ``step_size``."""
    if len(step_methods) < 2:
        return settings
    attributes = {**settings.attributes, STEP_METHODS: len(step_methods)}
    with_step_size = [types for types in step_methods if "step_size" in types]
    if len(with_step_size) > 1:
        attributes[STEP_SIZE_COLUMN] = next(
            column for column, types in enumerate(with_step_size) if RECORD in types
        )
    return RunSettings(attributes, settings.arrays, settings.labels)


def label(idata: DataTree, labels: Sequence[str]) -> None:
    """Give the coordinates of position and gradient their labels in place of numbers."""
    for group in STATISTICS:
        if group not in idata.children:
            continue
        dataset = idata[group].to_dataset()
        numbered = [f"{name}_dim_0" for name in (POSITION, GRADIENT)]
        if any(dataset.sizes.get(dim) != len(labels) for dim in numbered):
            continue
        dataset = dataset.drop_vars(numbered, errors="ignore")
        dataset = dataset.rename_dims(dict.fromkeys(numbered, DIMENSION))
        idata[group] = DataTree(dataset.assign_coords({DIMENSION: list(labels)}))


def make_rectangular(idata: DataTree) -> None:
    """Make rectangular arrays of `position` and `gradient` of several step methods, in a trace.

    PyMC keeps an array of arrays, one for each draw and step method, which cannot be written to a
    file. The new arrays have one dimension for the step methods (``position_dim_0``) and one for
    the coordinates (``position_dim_1``), which is as long as the longest position. Shorter
    positions end in NaN.
    """
    for group in STATISTICS:
        if group not in idata.children:
            continue
        for name in (POSITION, GRADIENT):
            values = idata[group].dataset.get(name)
            if values is not None and values.dtype == object:
                dims = (*values.dims, f"{name}_dim_{values.ndim - 2}")
                idata[group][name] = xr.DataArray(_padded(values.values), dims=dims)


def _padded(values: np.ndarray) -> np.ndarray:
    """Array of numbers from an array of vectors, with NaN after the end of shorter vectors."""
    vectors = [np.atleast_1d(vector) for vector in values.ravel()]
    width = max(len(vector) for vector in vectors)
    padded = np.full(
        (len(vectors), width), np.nan, dtype=np.result_type(*{vector.dtype for vector in vectors})
    )
    for row, vector in zip(padded, vectors, strict=True):
        row[: len(vector)] = vector
    return padded.reshape(*values.shape, width)


def attach(idata: DataTree, settings: RunSettings) -> None:
    """Write settings into a trace: attributes of `sample_stats`, and a group of arrays.

    Attributes are numbers and words, since not all kinds of trace files can hold others. A setting
    that is None is left out, and truth values are 0 or 1.
    """
    written = {PREFIX + key: _plain(value) for key, value in settings.attributes.items()}
    for name in STATISTICS:
        if name in idata.children:
            idata[name].attrs.update(
                {k: value for k, value in written.items() if value is not None}
            )
    idata[SETTINGS] = DataTree(settings.dataset())


def _plain(value: Any) -> Any:
    """The value as a Python number or word, which all files can hold."""
    if isinstance(value, np.generic):
        value = value.item()
    return int(value) if isinstance(value, bool) else value


def moments_dataset(
    chains: Sequence[Mapping[str, np.ndarray] | None], labels: Sequence[str]
) -> xr.Dataset | None:
    """Moments of the chains of a run, None where no chain has a full batch.

    ``mean`` and ``covariance`` are those of the position over the transitions of the batches. The
    other variables are means over each batch, or over each group of batches: of positions from
    ``origin``, of gradients, and of their products. Chains that did not end are given as None, and
    have NaN.
    """
    ended = [chain for chain in chains if chain is not None]
    batches = min((len(chain["batch_sums"]) for chain in ended), default=0)
    if not batches:
        return None
    d = len(ended[0]["origin"])
    lengths = np.array([int(chain["length"]) for chain in ended])
    groups = min(len(chain["group_products"]) for chain in ended)
    column_dimension = f"{DIMENSION}_of_column"
    vector, matrix = (DIMENSION,), (DIMENSION, column_dimension)
    sums = np.array([chain["batch_sums"][:batches] for chain in ended]) / lengths[:, None, None]
    origins = np.array([chain["origin"] for chain in ended])
    variables: dict[str, tuple[tuple[str, ...], np.ndarray]] = {
        # Each chain keeps its origin, so that runs with different origins can be put together.
        "origin": (("chain", *vector), origins),
        "mean": (("chain", *vector), origins + sums[..., :d].mean(1)),
        "batch_position": (("chain", "batch", *vector), sums[..., :d]),
        "batch_gradient": (("chain", "batch", *vector), sums[..., d:]),
        "transitions_a_batch": (("chain",), lengths),
    }
    coords: dict[str, list] = {
        "chain": [number for number, chain in enumerate(chains) if chain is not None],
        "batch": list(range(batches)),
        DIMENSION: list(labels),
    }
    if groups:
        counts, means, products = (
            np.array([chain[name][:groups] for chain in ended])
            for name in ("group_counts", "group_means", "group_products")
        )
        counts = counts[..., None]
        shares = counts / counts.sum(1, keepdims=True)
        x = (shares * means[..., :d]).sum(1)
        xx = (shares[..., None] * products[..., :d]).sum(1)
        coords |= {"group": list(range(groups)), column_dimension: list(labels)}
        variables |= {
            "group_position": (("chain", "group", *vector), means[..., :d]),
            "group_gradient": (("chain", "group", *vector), means[..., d:]),
            "group_position_position": (("chain", "group", *matrix), products[..., :d]),
            "group_position_gradient": (("chain", "group", *matrix), products[..., d:]),
            "transitions_of_group": (("chain", "group"), counts[..., 0]),
            "covariance": (("chain", *matrix), xx - x[:, :, None] * x[:, None, :]),
        }
    dataset = xr.Dataset(variables, coords=coords)
    return dataset if len(ended) == len(chains) else dataset.reindex(chain=range(len(chains)))


# --- Reading --------------------------------------------------------------------------------


def settings_of(idata: DataTree) -> dict[str, Any]:
    """Settings of a run by name, from the attributes of `sample_stats`."""
    attributes = idata["sample_stats"].attrs if "sample_stats" in idata.children else {}
    return {
        str(name)[len(PREFIX) :]: value
        for name, value in attributes.items()
        if str(name).startswith(PREFIX)
    }


def labels_of(idata: DataTree, dimension: int) -> tuple[str, ...]:
    """Labels of the coordinates of the position, numbers where the trace has none."""
    for group in (SETTINGS, "sample_stats"):
        if group in idata.children and DIMENSION in idata[group].coords:
            return tuple(str(name) for name in idata[group].coords[DIMENSION].values)
    return tuple(f"position[{number}]" for number in range(dimension))


def stored_rows(settings: Mapping[str, Any]) -> str | list[str] | None:
    """The argument `rows` of a run, None where the trace has none.

    Raises
    ------
    ValueError
        Where the rows were in a source, of which the model has only the first.
    """
    rows = json.loads(settings.get("rows", "null"))
    if isinstance(rows, dict):
        raise ValueError(
            "The run read its rows from a source, and the model has only the first of them, so "
            "that its gradients are not those of the run. Use the tools that need no model."
        )
    return rows


def integrated_out(settings: Mapping[str, Any]) -> list[str]:
    """Names of the variables that were integrated out of the model."""
    return json.loads(settings.get(INTEGRATED, "[]"))


def stored_local(settings: Mapping[str, Any]) -> list[str]:
    """Names of the local variables of a run, none where its gradients sampled none."""
    return json.loads(settings.get(LOCAL, "[]"))


def stored_matrix(group: Any, name: str) -> Matrix | None:
    """A matrix of the settings of a trace, None where it has none of this name."""
    if name in group.data_vars:
        return as_matrix(group[name])
    for end, kind in IMPLICIT.items():
        if f"{name}_{end}" in group.data_vars:
            start = f"{name}_"
            parts = {
                str(each).removeprefix(start): np.asarray(values)
                for each, values in group.data_vars.items()
                if str(each).startswith(start)
            }
            return kind.of_parts(**parts)
    return None


def groups_of(idata: DataTree) -> dict[str, xr.Dataset]:
    """All groups of a trace by their paths, with "/" for the root and no "/" before the others.

    `DataTree.from_dict` makes a trace of them again. The children alone would lose the attributes
    of the root, and nested groups.
    """
    return {
        "/" if path == "." else path: node.to_dataset(inherit=False)
        for path, node in idata.subtree_with_keys
    }


def is_of_draws(path: str, group: xr.Dataset, chains: int, draws: int) -> bool:
    """Whether a group has values for each chain and draw of the posterior."""
    sizes = (group.sizes.get("chain"), group.sizes.get("draw"))
    return sizes == (chains, draws) and not path.startswith(OTHER_DRAWS)
