"""A trace whose draws are moved. Its variables are functions of the position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pymc as pm
import xarray as xr
from xarray import DataTree

from pymc_sgmcmc.posterior.position import PositionLayout, layout_from_model
from pymc_sgmcmc.posterior.transforms import constrain
from pymc_sgmcmc.record import MOMENTS, groups_of
from pymc_sgmcmc.trace_tools.reader import StoredRun, chunks
from pymc_sgmcmc.trace_tools.variables import columns_of

DERIVED = ("posterior_predictive", "predictions", "log_likelihood", "log_prior", MOMENTS)
"""These groups have functions of the draws, so that a trace with moved draws does not have them."""


def mapped(
    positions: np.ndarray, center: np.ndarray, map: np.ndarray, new_center: np.ndarray
) -> np.ndarray:
    """Positions new_center + A (position - center) of draws of shape (chains, draws, d)."""
    moved = np.empty(positions.shape)
    for chain, part in chunks(*positions.shape):
        moved[chain, part] = (positions[chain, part] - center) @ map.T + new_center
    return moved


def moved_groups(
    idata: DataTree, variables: PositionVariables, positions: np.ndarray
) -> dict[str, xr.Dataset]:
    """Groups of a trace with the draws at other positions, without gradients and derived groups."""
    groups = {
        name: group for name, group in groups_of(idata).items() if name.split("/")[0] not in DERIVED
    }
    posterior = groups["posterior"]
    for name, values in variables.at(positions).items():
        posterior[name] = values.transpose(*posterior[name].dims)
    stats = groups["sample_stats"]
    dims = stats["position"].transpose("chain", "draw", ...).dims
    groups["sample_stats"] = stats.drop_vars("gradient").assign(position=(dims, positions))
    return groups


@dataclass(frozen=True)
class PositionVariables:
    """Variables of the posterior as functions of the position.

    Attributes
    ----------
    draws : xarray.Dataset
        The variables at the stored positions.
    columns : dict
        Columns of the position that are a variable, by its name.
    others : list of str
        Names of the variables that the model gives.
    model, layout
        The model and the layout of its positions, None where there are no such variables.
    """

    draws: xr.Dataset
    columns: dict[str, slice]
    others: list[str]
    model: pm.Model | None = None
    layout: PositionLayout | None = None

    @classmethod
    def of(cls, draws: xr.Dataset, run: StoredRun, model: pm.Model | None) -> PositionVariables:
        """Find out by their values which variables are coordinates of the position."""
        columns = {}
        for name, values in draws.data_vars.items():
            flat = np.asarray(values).reshape(*run.positions.shape[:2], -1)
            column = columns_of(flat, run.positions)
            if column is not None:
                columns[str(name)] = column
        others = [str(name) for name in draws.data_vars if name not in columns]
        if not others:
            return cls(draws, columns, others)
        if model is None:
            raise ValueError(
                f"The variables {', '.join(f'`{name}`' for name in others)} are not coordinates of "
                "the position, but functions of it. Pass `model=`, or leave them out of the "
                "posterior."
            )
        layout = layout_from_model(model, None, model.initial_point())
        if layout.dimension != run.dimension:
            raise ValueError(
                f"`model` has {layout.dimension} unconstrained coordinates, but the stored "
                f"positions have {run.dimension}. Pass the model that was sampled."
            )
        _check_model(draws[others], run, model, layout)
        return cls(draws, columns, others, model, layout)

    def at(self, positions: np.ndarray) -> dict[str, xr.DataArray]:
        """Variables at positions of shape (chains, draws, d)."""
        arrays = {name: positions[..., part] for name, part in self.columns.items()}
        if self.model is not None and self.layout is not None:
            flat = positions.reshape(-1, positions.shape[-1])
            for name in self.others:
                values = self.draws[name]
                arrays[name] = np.empty((len(flat), *values.shape[2:]), dtype=values.dtype)
            width = sum(arrays[name][0].size for name in self.others)
            for _, part in chunks(1, len(flat), width):
                pieces = constrain(flat[part], self.model, self.layout, self.others)
                for name, piece in pieces.items():
                    arrays[name][part] = piece
        return {
            str(name): values.copy(
                data=arrays[str(name)].reshape(values.shape).astype(values.dtype)
            )
            for name, values in self.draws.data_vars.items()
        }


def _check_model(
    draws: xr.Dataset, run: StoredRun, model: pm.Model, layout: PositionLayout
) -> None:
    """Raise a ValueError where the model does not give the variables at the stored positions."""
    names = [str(name) for name in draws.data_vars]
    wrong = [name for name in names if name not in model.named_vars]
    if not wrong:
        rebuilt = constrain(run.positions[0, :5].astype(float), model, layout, names)
        wrong = [
            name
            for name in names
            if not np.allclose(rebuilt[name], draws[name].values[0, :5], rtol=1e-4, atol=1e-8)
        ]
    if wrong:
        raise ValueError(
            "`model` should give the variables of the posterior at the stored positions, but does "
            f"not for {', '.join(f'`{name}`' for name in wrong)}. Pass the model that was sampled."
        )
