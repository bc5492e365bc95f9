"""What a run was made with, and how that gets into its trace.

PyMC builds the `DataTree` of a run from the recorded statistics alone; of the step method it keeps
the dictionary of their types. `StatisticTypes` is such a dictionary that also knows the settings,
and `pymc_sgmcmc.pymc_hook` reads it when the run has ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from pymc_sgmcmc.gradient_estimators import GradientEstimator, SVRGGradient
from pymc_sgmcmc.linear_algebra import Matrix
from pymc_sgmcmc.low_rank import LowRank
from pymc_sgmcmc.schedules import MOST_THINNING
from pymc_sgmcmc.trace import DIMENSION

if TYPE_CHECKING:
    from pymc_sgmcmc.step_methods.setup import Design, Setup

GROUP = "sgmcmc_settings"
"""Group of a trace with the arrays of the settings."""

PREFIX = "sgmcmc_"
"""Begins the names of the attributes of `sample_stats` with the settings."""

STEP_METHODS = "step_methods"
"""Setting of compound runs alone: the number of their step methods."""

STEP_SIZE_COLUMN = "step_size_column"
"""Setting of compound runs in which others record a ``step_size`` too: the column of ours."""

GIVEN, COMPUTED, SEARCHED = "given", "computed", "searched"
"""Where a step size is from: the user, the closed form or what a sampler has in its place, or
successive halving."""

MEAN_ERROR, MEAN_ERROR_OF = "mean_error", "mean_error_of"
"""Settings: largest predicted error of a mean, in posterior standard deviations, and of what."""

LARGEST_MEAN_ERROR = 0.1
"""Error of a mean, in posterior standard deviations, that is worth a word."""

KEPT_ROWS = "kept_rows"
"""Array of the settings: numbers of the rows that each transition takes."""

SCALE, VECTORS, FACTORS = "scale", "vectors", "factors"
"""End the names of the parts of a matrix of low rank plus diagonal."""


@dataclass(frozen=True)
class RunSettings:
    """Settings of a step method.

    Attributes
    ----------
    attributes : mapping
        Numbers and words, by name.
    arrays : mapping
        The preconditioner M of Langevin dynamics, scalar, (d,) or (d, d), the centre, and the
        curvature there, (d,) or (d, d). Of a symmetric matrix of low rank plus diagonal the parts.
    labels : tuple of str
        Of the coordinates of the position.
    """

    attributes: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    labels: tuple[str, ...] = ()

    @classmethod
    def of(cls, setup: Setup, design: Design) -> RunSettings:
        """Settings of a step method from what it was made of."""
        batching, choice = setup.estimator.batching, design.closed_form
        rows = setup.settings.rows
        by_hand = isinstance(setup.settings.gradient, GradientEstimator)
        attributes: dict[str, Any] = {
            "sampler": setup.name,
            "gradient": setup.estimator.name,
            "batching": batching.name,
            "batch_size": batching.batch_size,
            "batch_size_from": setup.batch_size_from,
            "n_rows": setup.posterior.n_rows,
            "kept_rows": setup.estimator.kept_rows,
            "thin": design.pace.thin,
            # As names of variables and dimensions may be: files hold no lists of words.
            "rows": json.dumps(rows if rows is None or isinstance(rows, str) else list(rows)),
            "estimator_from": GIVEN if by_hand else COMPUTED,
        }
        if isinstance(setup.estimator, SVRGGradient):
            attributes["refresh"] = setup.estimator.refresh
        step_size_from = _step_size_from(setup, design)
        if step_size_from != SEARCHED:
            # A searched step size has no stated accuracy: it trades bias for mixing.
            attributes["bias"] = setup.bias
        if isinstance(design.pace.step_size, int | float):
            attributes["step_size"] = float(design.pace.step_size)
        attributes["step_size_from"] = step_size_from
        if choice is not None:
            attributes["noise"] = choice.noise
            attributes["curvature"] = choice.curvature
            mean_error = setup.mean_error()
            if mean_error is not None:
                attributes[MEAN_ERROR_OF], attributes[MEAN_ERROR] = mean_error
        attributes["why"] = _why(setup, design)
        arrays = {KEPT_ROWS: setup.estimator.kept} if setup.estimator.kept_rows else {}
        matrices = {"preconditioner": design.preconditioner}
        if setup.known_center is not None:
            arrays["center"] = np.asarray(setup.known_center.position, dtype=np.float64)
            matrices["precision"] = setup.known_center.curvature.precision
        for name, matrix in matrices.items():
            if isinstance(matrix, LowRank):
                arrays[f"{name}_{SCALE}"] = matrix.left
                arrays[f"{name}_{VECTORS}"] = matrix.vectors
                arrays[f"{name}_{FACTORS}"] = matrix.factors
            elif matrix is not None:
                arrays[name] = np.asarray(matrix, dtype=np.float64)
        return cls(attributes, arrays, tuple(map(str, setup.posterior.labels)))

    def dataset(self) -> xr.Dataset:
        """The arrays, with the labels of the coordinates."""
        other = f"{DIMENSION}_of_column"
        variables = {}
        for name, values in self.arrays.items():
            dims: tuple[str, ...] = (DIMENSION, other)[: values.ndim]
            if name == KEPT_ROWS:
                dims = ("kept_row",)
            elif name.endswith((VECTORS, FACTORS)):
                dims = (DIMENSION, name.split("_")[0] + "_direction")[-values.ndim :]
            variables[name] = (dims, values)
        used = {one for names, _ in variables.values() for one in names}
        labels = list(self.labels)
        coords = {one: labels for one in (DIMENSION, other) if one in used}
        return xr.Dataset(variables, coords=coords)


def stored_rows(settings: Mapping[str, Any]) -> str | list[str] | None:
    """The argument `rows` of a run, None where the trace has none."""
    return json.loads(settings.get("rows", "null"))


def stored_matrix(group: Any, name: str) -> Matrix | None:
    """A matrix of the settings of a trace, None where it has none of this name."""
    if name in group.data_vars:
        return np.asarray(group[name], dtype=float)
    if f"{name}_{SCALE}" not in group.data_vars:
        return None
    scale, vectors, factors = (
        np.asarray(group[f"{name}_{part}"], dtype=float) for part in (SCALE, VECTORS, FACTORS)
    )
    return LowRank(scale, vectors, factors, scale)


class StatisticTypes(dict[str, Any]):
    """Types of the recorded statistics by name, as PyMC wants them, and the settings."""

    def __init__(self, types: Mapping[str, Any], *, settings: RunSettings):
        super().__init__(types)
        self.settings = settings

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the settings when copied to another process."""
        return _statistic_types, (dict(self), self.settings)


def _statistic_types(types: dict[str, Any], settings: RunSettings) -> StatisticTypes:
    return StatisticTypes(types, settings=settings)


def _step_size_from(setup: Setup, design: Design) -> str:
    if setup.settings.step_size is not None:
        return GIVEN
    # Langevin dynamics compute theirs in closed form, unless the search has taken that away.
    searched = design.preconditioner is not None and design.pace.choice is None
    return SEARCHED if searched else COMPUTED


def _why(setup: Setup, design: Design) -> str:
    """One line: where step size, batch size and thinning are from."""
    batching, choice = setup.estimator.batching, design.closed_form
    step_size_from = _step_size_from(setup, design)
    if step_size_from == GIVEN:
        step = "step size given"
    elif choice is not None:
        step = (
            f"step size 4 x {setup.bias:g} / (gradient noise {choice.noise:.2g} + curvature "
            f"{choice.curvature:.2g})"
        )
    elif step_size_from == SEARCHED:
        step = "step size by successive halving"
    else:
        step = f"step size computed for a variance error of {setup.bias:g}"
    size = {
        "given": "batch size given",
        "the model": "batch size of pm.Minibatch",
        "computed": "batch size at which an effective draw costs least",
    }[setup.batch_size_from]
    thin = "thinning given" if setup.settings.thin is not None else "one draw a relaxation time"
    if setup.settings.thin is None and setup.settings.step_size is not None:
        thin = "every transition recorded"
    elif setup.settings.thin is None and design.pace.thin == MOST_THINNING:
        thin = f"one draw in {MOST_THINNING} transitions, the most, though they are dependent"
    kept = setup.estimator.kept_rows
    always = f", {kept} others in every transition" if kept else ""
    return f"{step}; {size} ({batching.batch_size} of {batching.n_rows}{always}); {thin}"
