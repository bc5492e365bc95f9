"""Refuse models that cannot be split into rows, and name the variable that is the reason."""

from __future__ import annotations

import numpy as np
from pymc.model import Model
from pytensor.compile.builders import infer_shape
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors
from pytensor.sparse.type import SparseTensorType
from pytensor.tensor import TensorVariable
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.type import TensorType

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.graphs import leaf_value, minibatch_nodes, shape_of, value_of
from pymc_sgmcmc.posterior.rows import Term
from pymc_sgmcmc.posterior.terms import error_of_random, without_scaling


def refuse_labelled(model: Model) -> None:
    """Refuse labelled tensors."""
    for variable in [*model.basic_RVs, *model.potentials]:
        if not isinstance(variable.type, TensorType):
            raise ModelError(
                f"`{variable.name}` is a {type(variable).__name__}, but labelled tensors "
                "(`pymc.dims`) are not supported. Write the model with the distributions of "
                "`pymc` and `dims=`."
            )


def refuse_imputed(model: Model) -> None:
    """Refuse outcomes that PyMC imputes."""
    free = {variable.name for variable in model.free_RVs}
    for variable in model.observed_RVs:
        # The names that PyMC gives to the two parts of a variable with missing values.
        name = variable.name.removesuffix("_observed")
        if name != variable.name and f"{name}_unobserved" in free:
            raise ModelError(
                f"The observed variable `{name}` has missing values, which PyMC turns into the "
                f"free variable `{name}_unobserved`. Drop these rows, or impute the values "
                "beforehand."
            )


def check_parameters(model: Model, variable: TensorVariable) -> None:
    """Refuse an observed variable whose shape is not that of its parameters.

    The likelihood would not have one term a row. PyTensor finds this only where it knows the
    lengths beforehand, and its message does not name the data.

    Raises
    ------
    ModelError
    """
    node = without_scaling(variable).owner
    if node is None or not isinstance(node.op, RandomVariable):
        return
    shape = tuple(shape_of(model.rvs_to_values[variable]))
    batch = shape[: len(shape) - node.op.ndim_supp]
    for parameter, ndim in zip(node.op.dist_params(node), node.op.ndims_params, strict=True):
        lengths = _known_shape(parameter)
        lengths = lengths[: len(lengths) - ndim]
        pairs = [
            (of_data if length is None else length, of_data)
            for length, of_data in zip(lengths[::-1], batch[::-1], strict=False)
        ]
        if all(length in (1, of_data) for length, of_data in pairs):
            continue
        # PyTensor adds axes of length one in front, which a user did not write.
        written = lengths[next(n for n, length in enumerate(lengths) if length != 1) :]
        listed = f"({', '.join(map(str, written))}{',' if len(written) == 1 else ''})"
        message = f"The observed variable `{variable.name}` has shape {shape}, but the parameters "
        message += f"of its distribution have shape {listed}"
        if all(1 in pair or pair[0] == pair[1] for pair in pairs):
            product = " × ".join(str(max(pair)) for pair in reversed(pairs))
            raise ModelError(
                f"{message}, which broadcast to {product} elements. Give both the same shape, for "
                "example by `y[:, 0]` for a single column."
            )
        sources = {
            f"{f'`{leaf.name}`' if leaf.name else 'an array'} of shape {values.shape}"
            for leaf in ancestors([parameter], blockers=model.basic_RVs)
            if (values := leaf_value(leaf)) is not None and set(values.shape) & set(lengths) - {1}
        }
        source = f", from {' and '.join(sorted(sources))}" if sources else ""
        drawn = minibatch_nodes([model.rvs_to_values[variable]])
        advice = ", all of them in one `pm.Minibatch` call" if drawn else ""
        raise ModelError(f"{message}{source}. Give predictors and outcomes the same rows{advice}.")


def _known_shape(variable: TensorVariable) -> list[int | None]:
    """Shape of a variable, None where it depends on random variables."""
    shape: list[int | None] = list(variable.type.shape)
    if None not in shape:
        return shape
    (lengths,) = infer_shape([variable], [], [])
    for axis, length in enumerate(lengths):
        random = any(isinstance(ancestor.type, RandomType) for ancestor in ancestors([length]))
        if shape[axis] is None and not random:
            shape[axis] = int(value_of(length))
    return shape


def refuse_unsupported(term: Term) -> None:
    """Refuse types of data for which the rows have no gradient, and name the data.

    Raises
    ------
    ModelError
    """
    graph = [term.log_density]
    drawn = {output for node in minibatch_nodes(graph) for output in node.outputs}
    # The data come first, since they have a name.
    for variable in reversed(list(ancestors(graph, blockers=drawn))):
        if isinstance(variable.type, SparseTensorType):
            raise ModelError(
                f"{_named(variable, term)} is a sparse matrix, which is not supported. Index by "
                "group in place of one-hot columns, as in `effect[codes]`, or pass a dense "
                "`X.toarray()`."
            )
        if isinstance(variable.type, TensorType) and variable.dtype.startswith("complex"):
            raise ModelError(
                f"{_named(variable, term)} has complex numbers, which are not supported. Give "
                "real and imaginary parts as separate columns."
            )
        if isinstance(variable.type, RandomType) and variable not in drawn:
            raise error_of_random(term.name)


def _named(variable: Variable, term: Term) -> str:
    """Description of data, or of a quantity computed from them, in a log density."""
    if variable.owner is not None:
        return f"The log density of `{term.name}`"
    if variable.name:
        return f"`{variable.name}`"
    shape = np.shape(variable.data) if isinstance(variable, Constant) else variable.type.shape
    return f"An array of shape {shape} in the log density of `{term.name}`"
