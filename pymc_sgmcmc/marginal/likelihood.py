"""The marginal log likelihood of the global variables: sums over all groups, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import cached_property

import numpy as np
import pytensor.tensor as pt
from pymc.model import Model
from pytensor.graph.replace import clone_replace
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.compiling.compiled import NUMPY_MODE, compile_on_arrays, without_blas_warning
from pymc_sgmcmc.errors import ModelError, UndeterminedError
from pymc_sgmcmc.marginal.density import GroupDensity
from pymc_sgmcmc.posterior.position import layout_from_model
from pymc_sgmcmc.posterior.terms import model_terms

type Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]
"""A function of a position that returns a value and its gradient."""

ELEMENTS = 1_000_000
"""A chunk of groups has at most this many records times nodes, or a single group. It is a
compromise between memory, some hundred arrays of 8 MB, and the time of many short calls."""

MOST_COLLINEAR = 1e5
"""Fixed effects count as collinear where the standard error of one is this many times that with the
others known. Rounding leaves some 1e7 where it is infinite."""

NO_FIXED_EFFECTS = (
    "`reml=True` should be for a model with fixed effects, but its log likelihood is quadratic in "
    "no global variable. Use `reml=False`."
)

SEED = 20_180_902
"""The random positions at which the fixed effects are found come from this fixed seed."""


class Globals:
    """The position of the global variables, and functions of it.

    Parameters
    ----------
    model : pymc.Model
    local : sequence of TensorVariable
        Value variables of the local ones.

    Attributes
    ----------
    n_groups : int
    """

    n_groups: int

    def __init__(self, model: Model, local: Sequence[TensorVariable]):
        self.model, self.local = model, local
        with without_blas_warning():
            self.initial_point = model.initial_point()
        self.variables = [rv for rv in model.free_RVs if model.rvs_to_values[rv] not in local]
        self.layout = layout_from_model(model, self.variables, self.initial_point)

    def compile(
        self, inputs: Sequence[TensorVariable], outputs: Sequence[TensorVariable]
    ) -> Callable[..., list[np.ndarray]]:
        """Function of inputs and of a position; overflows are left to the caller."""
        layout = self.layout
        function = compile_on_arrays([*inputs, *layout.variables], list(outputs), NUMPY_MODE)

        def evaluate(*arrays: np.ndarray) -> list[np.ndarray]:
            *given, position = arrays
            with np.errstate(all="ignore"):
                return function(*given, *layout.unravel(position).values())

        return evaluate


class Groups(Globals):
    """Functions of groups and of the position of the global variables, over all groups.

    Parameters
    ----------
    model : pymc.Model
    density : GroupDensity
    """

    def __init__(self, model: Model, density: GroupDensity):
        super().__init__(model, density.structure.values)
        self.density = density
        self.n_groups = density.structure.n_groups
        placeholders = list(density.parameters.values())
        parameters = [model[name] for name in density.parameters]
        self._replacements = dict(
            zip(placeholders, model.replace_rvs_by_values(parameters), strict=True)
        )
        self._records = np.ones(self.n_groups)
        for term in density.structure.terms:
            if term.records is not None:
                self._records += term.records.counts

    def at_position(self, graph: TensorVariable) -> TensorVariable:
        """A graph of the placeholders of the density, as one of the value variables."""
        return clone_replace(graph, self._replacements, rebuild_strict=False)

    def with_gradient(
        self, inputs: Sequence[TensorVariable], value: TensorVariable
    ) -> Callable[..., np.ndarray]:
        """Function of inputs and of a position, whose result is a value and then its gradient."""
        gradients = pt.grad(value, list(self.layout.variables), disconnected_inputs="ignore")
        function = self.compile(inputs, [value, *gradients])
        return lambda *arrays: np.concatenate([np.ravel(part) for part in function(*arrays)])

    def chunks(self, nodes: int, numbers: np.ndarray | None = None) -> list[np.ndarray]:
        """Numbers of groups, by default of all, in chunks of bounded memory."""
        if numbers is None:
            numbers = np.arange(self.n_groups)
        elements = np.cumsum(self._records[numbers] * nodes)
        return np.split(numbers, np.flatnonzero(np.diff(elements // ELEMENTS)) + 1)

    def total(
        self,
        function: Callable[..., np.ndarray],
        of_chunks: Iterable[Sequence[np.ndarray]],
        position: np.ndarray,
        weight: float = 1.0,
    ) -> tuple[float, np.ndarray]:
        """Value and gradient: a function summed over chunks of groups, and the other terms."""
        total = np.sum([function(*of_chunk, position) for of_chunk in of_chunks], axis=0)
        if weight != 1:
            total = weight * total
        value, gradient = float(total[0]), total[1:]
        if self.other_terms is not None:
            other_value, other_gradient = self.other_terms(position)
            value, gradient = value + other_value, gradient + other_gradient
        return value, gradient

    @cached_property
    def other_terms(self) -> Objective | None:
        """Log likelihood of the observed variables that do not depend on local ones."""
        observed = set(self.density.structure.observed)
        names = [rv.name for rv in self.model.observed_RVs if rv.name not in observed]
        if not names:
            return None
        terms = model_terms(self.model)
        total = sum(terms[name].log_density.sum() for name in names)
        return as_objective(self.with_gradient([], pt.as_tensor(total)))


def value_of(objective: Objective) -> Callable[[np.ndarray], float]:
    """The value of an objective alone, where it has a quicker way to it."""
    return getattr(objective, "value", lambda position: objective(position)[0])


def as_objective(function: Callable[..., np.ndarray]) -> Objective:
    """An objective of a function whose result is a value and then its gradient."""

    def objective(position: np.ndarray) -> tuple[float, np.ndarray]:
        result = function(position)
        return float(result[0]), result[1:]

    return objective


class Likelihood:
    """The marginal log likelihood of a position of the global variables, with its gradient.

    Parameters
    ----------
    groups : Groups
    marginal : TensorVariable, shape (groups,)
        Log density of each group's records, a graph of the placeholders of the density.
    nodes : int
        Number of nodes of the quadrature.
    """

    def __init__(self, groups: Groups, marginal: TensorVariable, nodes: int = 1):
        self._groups = groups
        self._of_groups = groups.with_gradient(
            [groups.density.numbers], groups.at_position(marginal.sum())
        )
        self._nodes = nodes
        self._chunks, self._weight = groups.chunks(nodes), 1.0

    def of_sample(self, numbers: np.ndarray) -> Likelihood:
        """The estimate of the log likelihood from the groups of a random sample."""
        estimate = copy(self)
        estimate._chunks = self._groups.chunks(self._nodes, numbers)
        estimate._weight = self._groups.n_groups / len(numbers)
        return estimate

    def __call__(self, position: np.ndarray) -> tuple[float, np.ndarray]:
        """Value and gradient, which are not finite where the model is not."""
        chunks = ((numbers,) for numbers in self._chunks)
        return self._groups.total(self._of_groups, chunks, position, self._weight)


def fixed_effects(groups: Globals, likelihood: Objective) -> np.ndarray:
    """Mask of the coordinates in which the log likelihood is jointly quadratic.

    They are those of whole variables without a transform, found at random positions.

    Raises
    ------
    ModelError
        Where there are none.
    """
    layout, rng = groups.layout, np.random.default_rng(SEED)
    start = layout.ravel(groups.initial_point) + 0.3 * rng.normal(size=layout.dimension)
    direction = rng.normal(size=layout.dimension)
    mask = np.zeros(layout.dimension, dtype=bool)
    for variable, part in zip(layout.variables, layout.slices, strict=True):
        if groups.model.rvs_to_transforms[groups.model.values_to_rvs[variable]] is not None:
            continue
        candidate = mask.copy()
        candidate[part] = True
        slopes = [
            likelihood(start + step * candidate * direction)[1][candidate] for step in range(3)
        ]
        first, second = np.diff(slopes, axis=0)
        if np.allclose(first, second, rtol=1e-6, atol=1e-7 * np.abs(first).max()) and first.any():
            mask = candidate
    if not mask.any():
        raise ModelError(NO_FIXED_EFFECTS)
    return mask


def check_determined(factor: np.ndarray) -> None:
    """Refuse fixed effects with this factor of their covariance that are collinear.

    Raises
    ------
    UndeterminedError
    """
    # The information of collinear effects is singular up to rounding.
    scaled = np.linalg.inv(factor).T * np.linalg.norm(factor, axis=1)
    if not np.isfinite(factor).all() or np.linalg.norm(scaled) > MOST_COLLINEAR:
        raise UndeterminedError(
            "The likelihood does not determine the fixed effects, some of which are collinear."
        )


class RestrictedLikelihood:
    r"""The log likelihood with the fixed effects integrated out too, with a flat prior.

    The log likelihood :math:`\ell` is quadratic in the p fixed effects, with the maximum
    :math:`\hat\beta` and the information :math:`I = (C C^\top)^{-1}`, so that

    .. math::

        \ell_R(\theta) = \ell(\hat\beta, \theta) + \log|C| + \tfrac p2 \log 2\pi, \quad
        \nabla \ell_R(\theta) = E[\nabla_\theta \ell(\beta, \theta)],
        \ \beta \sim N(\hat\beta, C C^\top),

    and the mean of a quadratic function is that over the 2 p points
    :math:`\hat\beta \pm \sqrt p\, C e_k`.

    Parameters
    ----------
    likelihood : Objective
    fixed : numpy.ndarray of bool
        Mask of the coordinates of the fixed effects.
    start : numpy.ndarray
        A position, from which the lengths of differences are taken.

    Raises
    ------
    ModelError
        Where the likelihood does not determine the fixed effects.
    """

    def __init__(self, likelihood: Objective, fixed: np.ndarray, start: np.ndarray):
        self._likelihood = likelihood
        self.fixed = fixed
        self._steps = np.ones(int(fixed.sum()))
        _, factor = self.estimate(start[~fixed])
        check_determined(factor)
        self._steps = np.maximum(1.0, np.linalg.norm(factor, axis=1))

    def complete(self, effects: np.ndarray, rest: np.ndarray) -> np.ndarray:
        """Position of the fixed effects and the other coordinates."""
        position = np.empty(len(self.fixed))
        position[self.fixed], position[~self.fixed] = effects, rest
        return position

    def estimate(self, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fixed effects and their factor C, given the other coordinates."""

        def slope(effects: np.ndarray) -> np.ndarray:
            return self._likelihood(self.complete(effects, rest))[1][self.fixed]

        effects = np.zeros(len(self._steps))
        at_zero = slope(effects)
        # The slope is linear, so differences over any step are exact up to rounding.
        slopes = [slope(step) for step in np.diag(self._steps)]
        information = -(np.array(slopes) - at_zero) / self._steps[:, None]
        try:
            inverse_root = np.linalg.cholesky((information + information.T) / 2)
        except np.linalg.LinAlgError:
            return effects, np.full_like(information, np.nan)
        factor = np.linalg.inv(inverse_root).T
        for _ in range(2):  # The second step takes out the rounding of the first, long one.
            effects = effects + factor @ (factor.T @ slope(effects))
        return effects, factor

    def __call__(self, rest: np.ndarray) -> tuple[float, np.ndarray]:
        """Value and gradient by the coordinates that are not fixed effects."""
        effects, factor = self.estimate(rest)
        if not np.isfinite(factor).all():
            return np.nan, np.full(len(rest), np.nan)
        spread = np.sqrt(len(effects)) * factor.T
        points = [self.complete(effects + offset, rest) for offset in (*spread, *-spread)]
        values, gradients = zip(*map(self._likelihood, points), strict=True)
        # The log likelihood at the points is p / 2 lower than at the maximum.
        at_maximum = np.mean(values) + 0.5 * len(effects)
        log_determinant = np.log(np.diag(factor)).sum()  # The factor is upper triangular.
        constant = 0.5 * len(effects) * np.log(2 * np.pi)
        slope = np.mean(gradients, axis=0)[~self.fixed]
        return at_maximum + log_determinant + constant, slope
