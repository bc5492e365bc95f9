"""The additive terms of a model's log density."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytensor.tensor as pt
from pymc.logprob.basic import transformed_conditional_logp
from pymc.model import Model
from pymc.variational.minibatch_rv import MinibatchRandomVariable
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.tensor import TensorVariable
from pytensor.tensor.type import TensorType

from pymc_sgmcmc.compiling.large_constants import large_constants_by_sample
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.graphs import minibatch_nodes, simplify_for_gradients, value_of
from pymc_sgmcmc.posterior.parameter_checks import checks_as_values
from pymc_sgmcmc.posterior.rows import RowLeaf, Term

RANDOM_IN_LOGP = "Random variables detected in the logp graph"
"""The message of PyMC for random numbers in a log density begins with these words."""


def error_of_random(name: str) -> ModelError:
    """Error for a log density that depends on random numbers."""
    return ModelError(
        f"The log density of `{name}` depends on random numbers that are no variable of the model "
        "(`.dist()`, `pt.random` or `pm.Simulator`). Make them a free variable, draw them once "
        "with NumPy, or sample a simulator with `pm.sample_smc`."
    )


def model_terms(model: Model, *, checked: bool = False) -> dict[str, Term]:
    """Log density terms by variable name, without `total_size` scaling.

    Without checks of the parameters, or, where `checked`, minus infinity where these are invalid.
    """
    random_variables = [*model.free_RVs, *model.observed_RVs]
    # `total_size` wraps the variable in a node that multiplies its log density by N / n.
    # Asking for the density of the variable inside gives the plain sum over rows.
    inner = {variable: without_scaling(variable) for variable in random_variables}
    values = {inner[variable]: model.rvs_to_values[variable] for variable in random_variables}
    transforms = {
        inner[variable]: model.rvs_to_transforms[variable] for variable in random_variables
    }

    def log_densities_of(variables: list[TensorVariable]) -> list[Variable]:
        with large_constants_by_sample(model):
            return transformed_conditional_logp(
                rvs=variables, rvs_to_values=values, rvs_to_transforms=transforms, jacobian=True
            )

    try:
        log_densities = log_densities_of(list(inner.values()))
    except ValueError as error:
        if not str(error).startswith(RANDOM_IN_LOGP):
            raise
        for variable in random_variables:
            try:
                log_densities_of([inner[variable]])
            except ValueError:
                raise error_of_random(variable.name) from None
        raise
    names = [variable.name for variable in random_variables]
    if model.potentials:
        log_densities = [*log_densities, *model.replace_rvs_by_values(list(model.potentials))]
        names += [potential.name for potential in model.potentials]
    tensors = [pt.as_tensor(log_density) for log_density in log_densities]
    if checked:
        tensors = _checked(model, names, tensors)
    return {
        name: Term(name, tensor)
        for name, tensor in zip(names, simplify_for_gradients(tensors), strict=True)
    }


def _checked(
    model: Model, names: Sequence[str], tensors: Sequence[TensorVariable]
) -> list[TensorVariable]:
    """Terms that are minus infinity where a parameter is invalid."""
    variables = {variable.name: without_scaling(variable) for variable in model.basic_RVs}
    values = set(model.value_vars)
    return [
        checks_as_values(tensor, variables.get(name), values)
        for name, tensor in zip(names, tensors, strict=True)
    ]


def reference_terms(
    model: Model, rows: Mapping[RowLeaf, TensorVariable], *, checked: bool = False
) -> dict[str, Term]:
    """Log density terms by variable name as PyMC makes them, scaled by `total_size`.

    Parameters
    ----------
    model : pymc.Model
    rows : mapping
        For a model with `pymc.Minibatch`, symbolic rows that replace those that it would draw.
        Their number is the same.
    checked : bool
        As in `model_terms`.
    """
    variables = [*model.free_RVs, *model.observed_RVs, *model.potentials]
    with large_constants_by_sample(model):
        tensors = model.logp(vars=variables, sum=False)
    if checked:
        tensors = _checked(model, [variable.name for variable in variables], tensors)
    tensors = simplify_for_gradients(tensors)
    places = {
        (variable.owner.inputs[-1], variable.index): tensor
        for leaf, tensor in rows.items()
        for variable in leaf.variables
    }
    drawn = {
        output: places[node.inputs[-1], index]
        for node in minibatch_nodes(tensors)
        for index, output in enumerate(node.outputs)
        if (node.inputs[-1], index) in places
    }
    return {
        variable.name: Term(variable.name, tensor)
        for variable, tensor in zip(variables, clone_replace(tensors, drawn), strict=True)
    }


def without_scaling(variable: TensorVariable) -> TensorVariable:
    """An observed variable without the weight that `total_size` gives it."""
    return variable if _total_size(variable) is None else variable.owner.inputs[0]


def _total_size(variable: TensorVariable) -> list[int | None] | None:
    node = variable.owner
    if node is None or not isinstance(node.op, MinibatchRandomVariable):
        return None
    return [
        int(value_of(size)) if isinstance(size.type, TensorType) else None
        for size in node.inputs[1:]
    ]


def check_total_size(variable: TensorVariable, lengths: Sequence[int], drawn: bool) -> None:
    """Refuse a `total_size` that would weight the likelihood by something other than N / n.

    Parameters
    ----------
    variable : TensorVariable
        Observed variable.
    lengths : sequence of int
        Shape of its full data.
    drawn : bool
        Whether `pymc.Minibatch` draws its rows.
    """
    total_size = _total_size(variable)
    if total_size is None or (drawn and total_size[0] is None):
        if drawn:
            raise ModelError(
                f"The observed variable `{variable.name}` uses minibatched data but has no "
                f"`total_size`, so its likelihood would not be scaled to {lengths[0]} rows. "
                f"Pass `total_size={lengths[0]}` to it."
            )
        return
    for axis, (size, length) in enumerate(zip(total_size, lengths, strict=False)):
        if size in (None, length):
            continue
        raise ModelError(
            f"The observed variable `{variable.name}` has total_size={total_size}, but its data "
            f"have shape {tuple(lengths)}: the likelihood would be scaled by "
            f"{size / length:.3g}. Pass `total_size={lengths[0]}`"
            + (" (only the leading axis can be subsampled)" if axis else "")
            + ("." if drawn else ", or leave it out.")
        )
