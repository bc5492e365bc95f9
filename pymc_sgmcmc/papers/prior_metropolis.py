"""Metropolis-Hastings with the prior as proposal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pymc.model import Model
from pymc.step_methods.compound import StepMethodState
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable
from pytensor.tensor.random.op import RandomVariable

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.compiling.compiled import NUMPY_MODE, compile_quietly
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.graphs import minibatch_nodes, shape_of
from pymc_sgmcmc.posterior.position import added_or_removed, given_model, names_of, value_variables
from pymc_sgmcmc.posterior.support import bounded_variables
from pymc_sgmcmc.posterior.terms import check_total_size, model_terms
from pymc_sgmcmc.step_methods.contract import StepMethod
from pymc_sgmcmc.step_methods.settings import check_compile_kwargs

CHECKS = 8
"""So many random halves of the elements are changed when the step is made. Two elements that change
each other are in different halves at least once with a probability of 0.996."""

SEED = 20_160_620
"""The elements that the check changes come from this fixed seed."""


class PriorMetropolis(StepMethod):
    r"""Metropolis-Hastings with proposals from the prior, for each element by itself.

    Local variables :math:`\phi_1, \dots, \phi_n` with independent priors, such as the scale of each
    observation, are proposed from their prior and accepted by the likelihood alone:

    .. math::
        \phi_i^* \sim p(\phi_i \mid \psi), \qquad
        \phi_i' = \phi_i^* \text{ with probability }
        \min\left\{1, \frac{p(y_i \mid \phi_i^*, \theta)}{p(y_i \mid \phi_i, \theta)}\right\},
        \quad \phi_i \text{ otherwise}

    with :math:`\psi` and :math:`\theta` the other variables, which other step methods of the same
    run move. The density of the prior is not needed. Şimşekli et al. (2016, §4.2) take this step
    for the scales of α-stable matrix factorisation.

    **Law.** The conditional posterior of the variables given all others stays invariant. Where a
    parameter of another distribution would be invalid, its density is zero, as for PyMC's samplers.

    **Cost.** A draw evaluates the terms of the variables once or twice, for all elements together.
    The rate of acceptance falls with what an observation says of its element: for more than a few
    observations an element use another step method.

    Parameters
    ----------
    vars : sequence of variables
        Free variables of one shape, which are proposed together. Each element may change one
        element of the terms that depend on it: observed variables, potentials and other free
        variables of the same shape. A variable of shape () may change all of them.
    compile_kwargs : dict, optional
        Arguments of `pytensor.function` for the terms, such as the mode.

    Raises
    ------
    ModelError
        Where variables have different shapes, priors that depend on one another or that are no
        random variable of their own, such as mixtures; and where elements of them change other
        elements of the terms. The last is checked at random points, and in draws 1, 2, 4, 8 and so
        on of each chain, since it may depend on other variables.

    Notes
    -----
    `sample_stats` has ``accepted_part``, the part of the elements whose proposal was accepted.

    References
    ----------
    U. Şimşekli, R. Badeau, A. T. Cemgil and G. Richard (2016). Stochastic quasi-Newton
    Langevin Monte Carlo. *ICML*.

    Examples
    --------
    Student t noise as normal noise of random scales, one for each observation:

    >>> import numpy as np, pymc as pm
    >>> y = np.random.default_rng(1).standard_t(4, size=200) + 1
    >>> with pm.Model():
    ...     mu = pm.Normal("mu", 0, 10)
    ...     precision = pm.Gamma("precision", 2, 2, shape=200)
    ...     _ = pm.Normal("y", mu, precision**-0.5, observed=y)
    ...     idata = pm.sample(
    ...         step=[PriorMetropolis([precision]), pm.Slice([mu])],
    ...         draws=300,
    ...         tune=100,
    ...         chains=1,
    ...         random_seed=1,
    ...         progressbar=False,
    ...         quiet=True,
    ...         compute_convergence_checks=False,
    ...     )
    >>> bool(abs(idata.posterior["mu"].mean() - 1) < 0.3)
    True
    """

    name = "prior_metropolis"
    stats_dtypes_shapes: dict[str, tuple[Any, Any]] = {"accepted_part": (np.float64, [])}  # noqa: RUF012  # PyMC reads it
    _state_class = StepMethodState

    def __init__(
        self,
        vars: Sequence,
        *,
        model: Model | None = None,
        compile_kwargs: Mapping[str, Any] | None = None,
    ):
        model = given_model(model)
        self._model, self._names_of_model = model, names_of(model)
        self.vars = value_variables(model, vars)
        self._names = [value.name for value in self.vars]  # of values
        random = [model.values_to_rvs[value] for value in self.vars]
        self._listed = quoted([variable.name for variable in random])
        self._operations = [_operation(variable) for variable in random]
        _check_priors(random)
        check_compile_kwargs(compile_kwargs)
        options = {"mode": NUMPY_MODE, **(compile_kwargs or {})}
        values = list(model.value_vars)
        self._inputs = [value.name for value in values]
        parameters = _parameters(model, random)
        self._parameters = compile_quietly(values, parameters, **options)
        self._values = compile_quietly([*values, *random], _values(model, random), **options)
        point = model.initial_point()
        self.shape = _common_shape(random, [np.shape(point[name]) for name in self._names])
        terms = self._terms(model, parameters)
        self._term_names = list(terms)
        self._densities = compile_quietly(values, list(terms.values()), **options)
        self.rng = np.random.default_rng()
        self._draws = 0
        self._check_at_random(point)

    def _terms(self, model: Model, parameters: Sequence[Variable]) -> dict[str, TensorVariable]:
        """Terms other than the priors, with these parameters, that the variables change, by name.

        Raises
        ------
        ModelError
        """
        moved = set(self.vars)
        priors = {model.values_to_rvs[value].name for value in self.vars}
        terms = [
            term
            for name, term in model_terms(model, checked=True).items()
            if name not in priors and moved & set(ancestors([term.log_density]))
        ]
        if not terms:
            raise ModelError(
                f"No observed variable depends on {self._listed}. Leave the step method out."
            )
        if minibatch_nodes([*parameters, *(term.log_density for term in terms)]):
            raise ModelError(
                "The model uses `pm.Minibatch`, but all elements are moved in each draw. Build the "
                "model on the full arrays."
            )
        for variable in model.observed_RVs:
            if variable.name in {term.name for term in terms}:
                check_total_size(variable, shape_of(model.rvs_to_values[variable]), drawn=False)
        return {
            term.name: term.log_density if self.shape else term.log_density.sum() for term in terms
        }

    def setup_chain(self, rng: Any, tune: int, draws: int) -> None:
        """Begin a chain.

        Raises
        ------
        ModelError
            Where the variables of the model have changed.
        """
        self._refuse_changed_model(added_or_removed(self._model, self._names_of_model))
        super().setup_chain(rng, tune, draws)
        self._draws = 0

    def _check_at_random(self, point: Mapping[str, np.ndarray]) -> None:
        """Check the terms at random points around the initial one.

        At the initial point itself a coefficient may be zero, which hides an element.

        Raises
        ------
        ModelError
        """
        rng = np.random.default_rng(SEED)
        try:
            self._proposal(point, rng)
        except NotImplementedError as error:
            raise ModelError(
                f"{self._listed} should have a prior that can be drawn from, but: {error}"
            ) from error
        fixed = set(bounded_variables(self._model))  # which random numbers would leave
        for name, density in zip(self._term_names, self._terms_at(point), strict=True):
            if density.shape != self.shape:
                raise ModelError(
                    f"{self._listed} should have the shape of the terms that they change, but has "
                    f"shape {self.shape} where `{name}` has {density.shape}."
                )
        for _ in range(CHECKS if self.shape else 0):
            near = {
                name: (values + rng.standard_normal(np.shape(values))).astype(values.dtype)
                if values.dtype.kind == "f" and name not in fixed
                else values
                for name, values in point.items()
            }
            self._check_elements(near, self._proposal(near, rng), rng)

    def _check_elements(
        self,
        point: Mapping[str, np.ndarray],
        proposal: Mapping[str, np.ndarray],
        rng: np.random.Generator,
    ) -> None:
        """Change half of the elements, and see that the terms of the others stay.

        Raises
        ------
        ModelError
        """
        moved = rng.random(self.shape) < 0.5
        before = self._log_density(point)
        after = self._log_density(self._changed(point, proposal, moved))
        if not np.array_equal(before[~moved], after[~moved], equal_nan=True):
            raise ModelError(
                f"Elements of {self._listed} change other elements of the terms that depend "
                "on them. Use another step method."
            )

    def _terms_at(self, point: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        with np.errstate(all="ignore"):
            inputs = (point[name] for name in self._inputs)
            return [np.asarray(density) for density in self._densities(*inputs)]

    def _log_density(self, point: Mapping[str, np.ndarray]) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(sum(self._terms_at(point)))

    def _proposal(
        self, point: Mapping[str, np.ndarray], rng: np.random.Generator
    ) -> dict[str, np.ndarray]:
        """Values of the variables from their priors, given the other variables of a point."""
        inputs = [point[name] for name in self._inputs]
        with np.errstate(all="ignore"):
            parameters = iter(self._parameters(*inputs))
            draws = [
                np.asarray(
                    operation.rng_fn(
                        rng, *(next(parameters) for _ in operation.ndims_params), self.shape
                    ),
                    dtype=value.dtype,
                )
                for operation, value in zip(self._operations, self.vars, strict=True)
            ]
            return dict(zip(self._names, self._values(*inputs, *draws), strict=True))

    def _changed(
        self,
        point: Mapping[str, np.ndarray],
        proposal: Mapping[str, np.ndarray],
        where: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """A point with the values of a proposal in some of the elements."""
        changed = {name: np.where(where, values, point[name]) for name, values in proposal.items()}
        return {**point, **changed}

    def step(self, point: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list]:
        """Propose all elements, and accept each by its own terms.

        Raises
        ------
        ModelError
            Where the data have another shape than before, or elements change others.
        """
        if np.shape(point[self._names[0]]) != self.shape:
            raise ModelError(
                f"{self._listed} had shape {self.shape} when the step method was made, but now has "
                f"shape {np.shape(point[self._names[0]])}. Make a new step method."
            )
        proposal = self._proposal(point, self.rng)
        self._draws += 1
        if self.shape and not self._draws & (self._draws - 1):
            # Powers of two, since other variables and data have other values than in the check.
            self._check_elements(point, proposal, np.random.default_rng([SEED, self._draws]))
        proposed = self._log_density({**point, **proposal})
        with np.errstate(invalid="ignore"):  # Both densities may be zero: the proposal is refused.
            difference = proposed - self._log_density(point)
        accepted = np.log(self.rng.random(self.shape)) < difference
        # A transform takes a number outside of its range to NaN, and one at its end to infinity.
        accepted &= np.all([np.isfinite(values) for values in proposal.values()], axis=0)
        stats = {"accepted_part": float(np.mean(accepted))}
        return self._changed(point, proposal, accepted), [stats]


def _operation(variable: TensorVariable) -> RandomVariable:
    """The operation that draws a variable.

    Raises
    ------
    ModelError
    """
    operation = None if variable.owner is None else variable.owner.op
    if not isinstance(operation, RandomVariable) or operation.ndim_supp:
        raise ModelError(
            f"`{variable.name}` should have a prior with independent elements that PyTensor draws "
            "by itself, such as `pm.Gamma`. Mixtures, truncated and multivariate priors, and a few "
            "others, are drawn in another way. Use another step method."
        )
    return operation


def _check_priors(random: Sequence[TensorVariable]) -> None:
    """Refuse variables whose priors depend on one another.

    Raises
    ------
    ModelError
    """
    for variable in random:
        above = set(ancestors(variable.owner.inputs)) & set(random)
        if above:
            raise ModelError(
                f"The prior of `{variable.name}` depends on `{above.pop().name}`, so they cannot "
                "be proposed together. Use one step method for each."
            )


def _parameters(model: Model, random: Sequence[TensorVariable]) -> list[Variable]:
    """Parameters of the priors, by the values of the other variables."""
    parameters = [
        parameter
        for variable in random
        for parameter in variable.owner.op.dist_params(variable.owner)
    ]
    return model.replace_rvs_by_values(parameters)


def _values(model: Model, random: Sequence[TensorVariable]) -> list[Variable]:
    """Values of variables, as their transforms have them, by draws of the variables."""
    values = []
    for variable in random:
        transform = model.rvs_to_transforms[variable]
        if transform is None:
            values.append(variable)
            continue
        parameters = model.replace_rvs_by_values(list(variable.owner.inputs[2:]))
        values.append(transform.forward(variable, *variable.owner.inputs[:2], *parameters))
    return values


def _common_shape(
    random: Sequence[TensorVariable], shapes: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    """The shape of all variables.

    Raises
    ------
    ModelError
    """
    if len(set(shapes)) > 1:
        listed = ", ".join(
            f"`{variable.name}` {shape}" for variable, shape in zip(random, shapes, strict=True)
        )
        raise ModelError(
            f"`vars` should have one shape, but got {listed}. Use one step method for each shape."
        )
    return shapes[0]
