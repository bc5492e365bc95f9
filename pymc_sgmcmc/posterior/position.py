"""The unconstrained position: a PyMC model's free variables ravelled into one vector.

The position is the concatenation of the ravelled *value variables* (PyMC's unconstrained
parameters, transforms included) in the order in which the model declares them, whatever the
order in which a user lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pymc.model import Model
from pymc.util import get_untransformed_name, is_transformed_name
from pytensor.graph.basic import Variable
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.checks import as_array, quoted
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.record import SAMPLE_DIMS

DENSE_DIMENSION = 500
"""Positions up to this length have dense curvature matrices. With 500 coordinates a matrix takes 2
MB, and a product with it 250 000 multiplications."""


def given_model(model: Any) -> Model:
    """The given model, or that of the context.

    Raises
    ------
    TypeError
    """
    if model is None:
        model = Model.get_context(error_if_none=False)
    if not isinstance(model, Model):
        raise TypeError(
            f"`model` should be a PyMC model, but got {model!r}. Pass `model=`, or make the call "
            "inside `with model:`."
        )
    return model


NOTHING_FREE = (
    "The model has no free random variables to sample. Give its parameters priors, as in "
    "`pm.Normal(...)`."
)
"""This is the message for a model without free variables."""


@dataclass(frozen=True)
class PositionLayout:
    """The places of the value variables in the position vector.

    Attributes
    ----------
    variables : tuple of TensorVariable
        Value variables in model order.
    shapes : tuple of tuple of int
        Their shapes.
    labels : tuple of str
        One label a coordinate, ``"beta[feature=age]"`` where the model names the dimension,
        ``"beta[0]"`` where it does not.
    dtype : str
        Floating type of the position.
    """

    variables: tuple[TensorVariable, ...]
    shapes: tuple[tuple[int, ...], ...]
    labels: tuple[str, ...]
    dtype: str

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the value variables."""
        return tuple(variable.name for variable in self.variables)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of coordinates of each value variable."""
        return tuple(int(np.prod(shape)) for shape in self.shapes)

    @cached_property
    def dimension(self) -> int:
        """Length d of the position vector."""
        return sum(self.sizes)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Slice of the position that each value variable takes."""
        stops = np.cumsum(self.sizes)
        return tuple(
            slice(int(stop) - size, int(stop)) for stop, size in zip(stops, self.sizes, strict=True)
        )

    def reordered(self, order: Sequence[int]) -> PositionLayout:
        """The same variables in another order."""
        return PositionLayout(
            tuple(self.variables[number] for number in order),
            tuple(self.shapes[number] for number in order),
            tuple(label for number in order for label in self.labels[self.slices[number]]),
            self.dtype,
        )

    def ravel(self, point: Mapping[str, np.ndarray]) -> np.ndarray:
        """Position vector, shape (d,), of a point (a mapping from value variable names)."""
        values = [np.asarray(point[name], dtype=self.dtype).ravel() for name in self.names]
        return np.concatenate(values) if len(values) > 1 else values[0]

    def unravel(self, position: np.ndarray) -> dict[str, np.ndarray]:
        """Point of a position vector; its arrays are copies with the shapes of the variables."""
        return {
            name: np.array(position[part]).reshape(shape)
            for name, part, shape in zip(self.names, self.slices, self.shapes, strict=True)
        }

    def unravel_all(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Values of the variables at positions, shape (draws, d), with the draws first."""
        return {
            name: positions[:, part].reshape(len(positions), *shape)
            for name, part, shape in zip(self.names, self.slices, self.shapes, strict=True)
        }

    def split(self, position: TensorVariable) -> dict[TensorVariable, TensorVariable]:
        """Symbolic pieces of a symbolic position, keyed by the value variable they stand for."""
        return {
            variable: position[part].reshape(shape) if shape else position[part.start]
            for variable, part, shape in zip(self.variables, self.slices, self.shapes, strict=True)
        }

    def join(self, pieces: Sequence[TensorVariable]) -> TensorVariable:
        """Concatenate tensors that are shaped as the value variables; the inverse of `split`."""
        ravelled = [piece.ravel().astype(self.dtype) for piece in pieces]
        return ravelled[0] if len(ravelled) == 1 else pt.concatenate(ravelled)

    def gradient(self, value: TensorVariable) -> TensorVariable:
        """Symbolic gradient, shape (d,), of a scalar in terms of the value variables."""
        gradients = pt.grad(value, list(self.variables), disconnected_inputs="ignore")
        return self.join(gradients)


def untransformed(name: str) -> str:
    """Name of the free variable of a value variable."""
    return get_untransformed_name(name) if is_transformed_name(name) else name


def complete_point(
    default: Mapping[str, np.ndarray], given: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Values of all value variables: the given ones, and default values for the others.

    Raises
    ------
    TypeError
        For values that are no numbers.
    ModelError
        For values of unknown variables, of another shape than the default, or not finite.
    """
    for name, value in given.items():
        if name not in default:
            raise ModelError(
                f"`initial_point` has a value for `{name}`, but the value variables of the model "
                f"are {quoted(default)}. Give unconstrained values by these names."
            )
        if np.shape(value) != np.shape(default[name]):
            raise ModelError(
                f"`initial_point` for `{name}` should have shape {np.shape(default[name])}, but "
                f"has shape {np.shape(value)}."
            )
        discrete = np.asarray(default[name]).dtype.kind != "f"
        if not (discrete or np.isfinite(as_array(f"initial_point['{name}']", value)).all()):
            raise ModelError(
                f"`initial_point` for `{name}` should be finite, but has NaN or infinite entries. "
                "Give other values, or leave it out."
            )
    return {**default, **given}


def layout_from_model(
    model: Model, variables: Sequence | None, initial_point: Mapping[str, np.ndarray]
) -> PositionLayout:
    """Lay out the chosen free variables of a model as one vector.

    Parameters
    ----------
    model : pymc.Model
    variables : sequence of variables or None
        Random or value variables, or their names, in any order; all free variables where None.
    initial_point : mapping
        Values of all value variables, from which the shapes are taken.

    Raises
    ------
    ModelError
        Where a chosen variable is discrete, or floating types are mixed.
    """
    if not model.value_vars:
        raise ModelError(NOTHING_FREE)
    chosen = model.value_vars if variables is None else value_variables(model, variables)
    # A step method ravels in model order (`DictToArrayBijection` gets the point of the model), so
    # any other order here would swap variables without an error.
    ordered = tuple(value for value in model.value_vars if value in set(chosen))
    discrete = [value.name for value in ordered if not value.dtype.startswith("float")]
    if discrete:
        raise ModelError(
            f"Stochastic gradient methods need continuous variables, but {quoted(discrete)} "
            f"{'is' if len(discrete) == 1 else 'are'} discrete. Give the continuous ones in "
            "`vars`, as in `step=[SGLDCV([...]), pm.Metropolis([...])]`, or marginalise the "
            "others out."
        )
    dtypes = {value.dtype for value in ordered}
    if len(dtypes) > 1:
        raise ModelError(
            f"All free variables should have one floating type, but the model mixes {dtypes}. "
            "Build the model under a single `pytensor.config.floatX`."
        )

    shapes = tuple(np.shape(initial_point[value.name]) for value in ordered)
    labels = tuple(
        label
        for value, shape in zip(ordered, shapes, strict=True)
        for label in _coordinate_labels(model, value, shape)
    )
    return PositionLayout(ordered, shapes, labels, dtypes.pop())


def names_of(model: Model) -> frozenset[str]:
    """Names of the variables and potentials of a model."""
    return frozenset(variable.name for variable in (*model.basic_RVs, *model.potentials))


def refuse_dimensions(model: Model) -> None:
    """Refuse variables with the name of a dimension of all traces, which would lose their draws."""
    for variable in (*model.unobserved_RVs, *model.observed_RVs):
        if variable.name in SAMPLE_DIMS:
            raise ModelError(
                f"The variable `{variable.name}` has the name of a dimension of the trace, which "
                "would lose its draws. Give it another name."
            )


def added_or_removed(model: Model, names: frozenset[str]) -> str | None:
    """Name of a variable or potential that a model has beside earlier names or lacks, or None."""
    return next(iter(names ^ names_of(model)), None)


def value_variables(model: Model, variables: Variable | str | Sequence) -> list[TensorVariable]:
    """Value variables of free variables, which are given as random or value variables or by name.

    Raises
    ------
    ModelError
        Where none are given, or some are no free variables of the model.
    """
    # A tensor and a name can be iterated over, but neither is a sequence of variables.
    several = isinstance(variables, Iterable) and not isinstance(variables, Variable | str)
    chosen = list(variables) if several else [variables]
    if not chosen:
        raise ModelError(
            "`vars` is empty. Leave it out to sample all free variables, or name some of "
            f"{quoted([variable.name for variable in model.free_RVs])}."
        )
    named = {variable.name: variable for variable in (*model.value_vars, *model.free_RVs)}
    chosen = [
        named.get(variable, variable) if isinstance(variable, str) else variable
        for variable in chosen
    ]
    values = list(dict.fromkeys(model.rvs_to_values.get(each, each) for each in chosen))
    unknown = [
        name_of(variable)
        for variable in chosen
        if model.rvs_to_values.get(variable, variable) not in model.value_vars
    ]
    if unknown:
        raise ModelError(
            f"`vars` should be free variables of the model, but got {quoted(unknown)}. Its free "
            f"variables are {quoted([variable.name for variable in model.free_RVs])}."
        )
    return values


def name_of(variable: Any) -> str:
    """Name of a variable for a message, or the type of what has none."""
    return str(getattr(variable, "name", variable) or type(variable).__name__)


def _coordinate_labels(model: Model, value: TensorVariable, shape: tuple[int, ...]) -> list[str]:
    if shape == ():
        return [value.name]
    random_variable = model.values_to_rvs[value]
    dims = list(model.named_vars_to_dims.get(random_variable.name) or ())
    if len(dims) != len(shape):
        dims = [None] * len(shape)
    # The unconstrained values of a simplex, for example, do not have its coordinates.
    transform = model.rvs_to_transforms[random_variable]
    for axis in range(1, 1 + (getattr(transform, "ndim_supp", 0) or 0)):
        dims[-axis] = None
    axes: list[tuple[str | None, Iterable]] = []
    for dim, length in zip(dims, shape, strict=True):
        coords = model.coords.get(dim) if dim is not None else None
        if coords is None or len(coords) != length:
            coords = range(length)
        axes.append((dim, coords))
    return element_labels(value.name, axes)


def element_labels(name: str, axes: Sequence[tuple[str | None, Iterable]]) -> list[str]:
    """Labels of the elements of a variable, from the name of each axis and its coordinates."""
    if not axes:
        return [name]
    of_axes = [
        [str(coord) if dim is None else f"{dim}={coord}" for coord in coords]
        for dim, coords in axes
    ]
    return [f"{name}[{', '.join(labels)}]" for labels in product(*of_axes)]
