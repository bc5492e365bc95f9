"""The part of a PyMC model in which normal vectors have a common mean and precision matrix.

The terms of the log density are found in the graph, and the numbers of the prior by evaluation. So
it makes no difference how the model writes a law, for example by `tau`, `cov` or `chol`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.distributions.multivariate import WishartRV
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable
from pytensor.tensor.type import TensorType

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.compiling.compiled import PYTHON_MODE, compile_quietly
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.graphs import changed_variable, minibatch_nodes, shape_of
from pymc_sgmcmc.posterior.position import value_variables
from pymc_sgmcmc.posterior.reading import Reading
from pymc_sgmcmc.posterior.terms import check_total_size, model_terms

HOW_TO_WRITE = (
    'Write `precision = pm.Wishart("precision", nu, V=inverse_of_Phi)`, '
    '`mu = pm.MvNormal("mu", mu_0, tau=strength * precision)` and '
    '`theta = pm.MvNormal("theta", mu, tau=precision, shape=(groups, dimension))`.'
)
"""Messages about models of another form end with these words."""


@dataclass(frozen=True, eq=False)
class NormalVectors:
    """Normal vectors with a free mean and precision matrix, as a model has them.

    Attributes
    ----------
    mean, precision : str
        Names of the value variables. The precision has packed values.
    vectors : str
        Name of the variable whose rows are the vectors.
    value : str or None
        Name of its value variable, None where it is observed.
    observed : numpy.ndarray or None
        Its values where it is observed, shape (K, q).
    shape : tuple of int
        Shape of the variable, whose last axis has length q.
    degrees : float
        Degrees of freedom of the Wishart law of the precision.
    scale_root : numpy.ndarray, shape (q, q)
        A root V = L Lᵀ of its scale matrix.
    log_density : callable
        Function of values of the mean, the precision and, where they are free, the vectors, with a
        list of one result: the sum of all terms of the log density of the model that depend on the
        mean or the precision.
    mean_gradient : callable
        Function of values of the mean and the precision, with a list of one result: the gradient of
        the mean's own term by the mean.
    dtype : str
        Floating type of the values.
    shared : tuple of (SharedVariable, numpy.ndarray)
        Shared variables of the model that these terms depend on, with their values.
    """

    mean: str
    precision: str
    vectors: str
    value: str | None
    observed: np.ndarray | None
    shape: tuple[int, ...]
    degrees: float
    scale_root: np.ndarray
    log_density: Callable[..., list[np.ndarray]]
    mean_gradient: Callable[..., list[np.ndarray]]
    dtype: str
    shared: tuple[tuple[SharedVariable, np.ndarray], ...]

    @property
    def size(self) -> int:
        """q, the length of the mean."""
        return self.shape[-1]

    def at(self, point: Mapping[str, np.ndarray]) -> np.ndarray:
        """The vectors at a point, shape (K, q)."""
        if self.observed is not None:
            return self.observed
        assert self.value is not None
        return np.asarray(point[self.value], dtype=float).reshape(-1, self.size)

    def changed_data(self) -> str | None:
        """Name of a shared variable that has changed since the model was read, or None."""
        return changed_variable(self.shared)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the functions, which only the set-up uses."""
        return {**vars(self), "log_density": None, "mean_gradient": None}


def find_normal_vectors(model: Model, variables: Sequence) -> NormalVectors:
    """Find the normal vectors whose mean and precision are two given free variables.

    Parameters
    ----------
    model : pymc.Model
    variables : sequence of two variables
        The mean and the precision, in any order.

    Raises
    ------
    ModelError
        Where the variables are not a `pm.Wishart` and a vector, or where other terms depend on
        them; the message names the variable.
    """
    values = value_variables(model, variables)
    random = [model.values_to_rvs[value] for value in values]
    is_wishart = [isinstance(variable.owner.op, WishartRV) for variable in random]
    if len(values) != 2 or sorted(is_wishart) != [False, True]:
        raise ModelError(
            "`vars` should be a mean vector and its precision, a `pm.Wishart`, but got "
            f"{quoted(variable.name for variable in random)}. {HOW_TO_WRITE}"
        )
    number = is_wishart.index(True)
    precision, precision_value = random[number], values[number]
    mean, mean_value = random[1 - number], values[1 - number]
    terms = model_terms(model)
    ours = {mean_value, precision_value}
    reading = Reading([term.log_density for term in terms.values()], model.value_vars)
    values_of = {name: reading.of([term.log_density]) for name, term in terms.items()}
    dependent = {name: found for name, found in values_of.items() if ours & found}
    others = [name for name in dependent if name not in (mean.name, precision.name)]
    if len(others) != 1:
        raise ModelError(
            f"`{mean.name}` and `{precision.name}` should be mean and precision of one variable "
            f"and of nothing else, but {quoted(others) or 'no term'} depend"
            f"{'' if len(others) > 1 else 's'} on them. {HOW_TO_WRITE}"
        )
    vectors = model[others[0]]
    vectors_value = model.rvs_to_values.get(vectors)
    if vectors_value is None:
        raise ModelError(
            f"`{others[0]}` should be normal vectors, but is a potential. {HOW_TO_WRITE}"
        )
    free = {*ours, vectors_value}.intersection(model.value_vars)
    outside = {value.name for value in frozenset().union(*dependent.values()) - free}
    if outside:
        raise ModelError(
            f"The laws of `{mean.name}`, `{precision.name}` and `{vectors.name}` should have "
            f"no parameters beside each other and constants, but depend on "
            f"{quoted(sorted(outside))}. Fix these, or sample all with NUTS. {HOW_TO_WRITE}"
        )
    graphs = [terms[name].log_density for name in dependent]
    if minibatch_nodes(graphs):
        raise ModelError(
            f"`{vectors.name}` uses `pm.Minibatch`, but the law of its mean and precision needs "
            "all vectors. Build the model on the full array."
        )
    shared = tuple(
        (variable, np.array(variable.get_value()))
        for variable in ancestors(graphs)
        if isinstance(variable, SharedVariable) and isinstance(variable.type, TensorType)
    )
    is_free = vectors_value in free
    inputs = [mean_value, precision_value, *([vectors_value] if is_free else [])]
    total = sum((graph.sum() for graph in graphs), start=pt.zeros(()))
    mean_gradient = pt.grad(terms[mean.name].log_density.sum(), mean_value)
    *_, degrees, scale_root = precision.owner.inputs
    shape, shape_of_mean = tuple(shape_of(vectors)), tuple(shape_of(mean))
    if len(shape_of_mean) != 1 or shape[-1:] != shape_of_mean:
        raise ModelError(
            f"`{mean.name}` should be one vector as long as the last axis of `{vectors.name}`, but "
            f"their shapes are {shape_of_mean} and {shape}. {HOW_TO_WRITE}"
        )
    check_total_size(vectors, list(shape), drawn=False)
    degrees_value, scale_root_value = _function([], [degrees, scale_root])()
    observed = None
    if not is_free:
        (observed,) = _function([], [vectors_value])()
        observed = np.asarray(observed, dtype=float).reshape(-1, shape[-1])
    return NormalVectors(
        mean_value.name,
        precision_value.name,
        vectors.name,
        vectors_value.name if is_free else None,
        observed,
        shape,
        float(degrees_value),
        np.asarray(scale_root_value, dtype=float),
        _function(inputs, [total]),
        _function([mean_value, precision_value], [mean_gradient]),
        mean_value.dtype,
        shared,
    )


def _function(
    inputs: Sequence[TensorVariable], outputs: Sequence[Variable]
) -> Callable[..., list[np.ndarray]]:
    """Function for a few calls, in Python, of arrays of any floating type."""
    with pytensor.config.change_flags(cxx=""):
        function = compile_quietly(inputs, outputs, PYTHON_MODE, allow_input_downcast=True)
    return lambda *values: [np.asarray(result, dtype=float) for result in function(*values)]
