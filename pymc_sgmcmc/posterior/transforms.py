"""Draws of the variables of a model as unconstrained positions, and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pymc as pm
from pytensor.graph.replace import vectorize_graph

from pymc_sgmcmc.posterior.compiled import PYTHON_MODE, compile_quietly
from pymc_sgmcmc.posterior.position import PositionLayout


def unconstrain(
    values: Mapping[str, np.ndarray], model: pm.Model, layout: PositionLayout
) -> np.ndarray:
    """Unconstrained positions, shape (n, d), of values of the free variables, (n, ...) each."""
    for variable in model.free_RVs:
        if values[variable.name].ndim != variable.ndim + 1:
            raise ValueError(
                f"`{variable.name}` has {variable.ndim} dimensions in the model, but draws of "
                f"shape {values[variable.name].shape[1:]}. Pass the model that was sampled."
            )
    outputs = []
    of_value = {model.rvs_to_values[one]: one for one in model.free_RVs}
    for value in layout.variables:
        variable = of_value[value]
        transform = model.rvs_to_transforms[variable]
        outputs.append(
            variable if transform is None else transform.forward(variable, *variable.owner.inputs)
        )
    batched = {
        one: one.type.clone(shape=(None, *one.type.shape))(f"{one.name}_draws")
        for one in model.free_RVs
    }
    function = compile_quietly(
        list(batched.values()), vectorize_graph(outputs, batched), PYTHON_MODE
    )
    found = function(*(np.asarray(values[one.name], dtype=one.dtype) for one in batched))
    count = len(next(iter(values.values())))
    return np.concatenate([np.reshape(one, (count, -1)) for one in found], axis=1).astype(float)


def constrain(
    positions: np.ndarray, model: pm.Model, layout: PositionLayout, names: list[str]
) -> dict[str, np.ndarray]:
    """Variables and deterministics of a model, shape (n, ...) each, at positions, (n, d)."""
    wanted = [model[name] for name in names]
    outputs = model.replace_rvs_by_values(wanted)
    batched = {
        one: one.type.clone(shape=(None, *one.type.shape))(f"{one.name}_draws")
        for one in layout.variables
    }
    function = compile_quietly(
        list(batched.values()), vectorize_graph(outputs, batched), PYTHON_MODE
    )
    pieces = [
        np.reshape(positions[:, part], (-1, *shape)).astype(one.dtype)
        for one, part, shape in zip(layout.variables, layout.slices, layout.shapes, strict=True)
    ]
    found = function(*pieces)
    return {
        name: np.broadcast_to(one, (len(positions), *np.shape(one)[1:]))
        for name, one in zip(names, found, strict=True)
    }
