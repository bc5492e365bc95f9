"""Convert draws of the variables of a model into unconstrained positions, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pymc as pm
from pytensor.graph.replace import vectorize_graph
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.compiling.compiled import PYTHON_MODE, compile_quietly
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
    of_value = {model.rvs_to_values[variable]: variable for variable in model.free_RVs}
    for value in layout.variables:
        variable = of_value[value]
        transform = model.rvs_to_transforms[variable]
        outputs.append(
            variable if transform is None else transform.forward(variable, *variable.owner.inputs)
        )
    arrays = _of_draws(outputs, {variable: values[variable.name] for variable in model.free_RVs})
    count = len(next(iter(values.values())))
    return np.concatenate([np.reshape(array, (count, -1)) for array in arrays], axis=1).astype(
        float
    )


def constrain(
    positions: np.ndarray, model: pm.Model, layout: PositionLayout, names: list[str]
) -> dict[str, np.ndarray]:
    """Variables and deterministics of a model, shape (n, ...) each, at positions, (n, d)."""
    variables = [model[name] for name in names]
    outputs = model.replace_rvs_by_values(variables)
    pieces = layout.unravel_all(positions)
    arrays = _of_draws(outputs, dict(zip(layout.variables, pieces.values(), strict=True)))
    return {
        name: np.broadcast_to(array, (len(positions), *np.shape(array)[1:]))
        for name, array in zip(names, arrays, strict=True)
    }


def _of_draws(
    graphs: Sequence[TensorVariable], draws: Mapping[TensorVariable, np.ndarray]
) -> list[np.ndarray]:
    """Values of graphs at draws of variables, with the draws along the first axis of each."""
    batched = {
        variable: variable.type.clone(shape=(None, *variable.type.shape))(f"{variable.name}_draws")
        for variable in draws
    }
    function = compile_quietly(
        list(batched.values()), vectorize_graph(graphs, batched), PYTHON_MODE
    )
    return function(*(np.asarray(each, variable.dtype) for variable, each in draws.items()))
