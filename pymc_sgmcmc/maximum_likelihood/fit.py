"""Maximum marginal likelihood of the global variables, with the local ones integrated out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr
from pymc.model import Model
from pytensor.graph.traversal import ancestors
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.checks import (
    one_of,
    or_none,
    positive_number,
    quoted,
    truth_value,
    whole_number,
)
from pymc_sgmcmc.compiling.compiled import quick_graphs
from pymc_sgmcmc.errors import (
    BoundaryWarning,
    ConvergenceError,
    ModelError,
    NotTogetherError,
    UndeterminedError,
    warn,
)
from pymc_sgmcmc.marginal.blocks import split_blocks
from pymc_sgmcmc.marginal.check import checked_density
from pymc_sgmcmc.marginal.exact import exact, is_quadratic
from pymc_sgmcmc.marginal.likelihood import (
    NO_FIXED_EFFECTS,
    Globals,
    Groups,
    Likelihood,
    Objective,
    RestrictedLikelihood,
    check_determined,
    fixed_effects,
)
from pymc_sgmcmc.marginal.marginalize import INTEGRALS, names_of
from pymc_sgmcmc.marginal.newton import find_mode, quadratic_mode
from pymc_sgmcmc.marginal.quadrature import MOST_POINTS, MOST_QUADRATURE_SIZE, laplace, quadrature
from pymc_sgmcmc.marginal.result import MarginalFit, dataset, labels_of
from pymc_sgmcmc.marginal.search import remedy
from pymc_sgmcmc.marginal.structure import find_structure
from pymc_sgmcmc.maximum_likelihood.factors import Factors
from pymc_sgmcmc.maximum_likelihood.maximum import (
    Maximum,
    at_boundary,
    check_start,
    maximize,
)
from pymc_sgmcmc.maximum_likelihood.mcem import MonteCarloEM, MonteCarloMaximum
from pymc_sgmcmc.maximum_likelihood.standard_errors import Uncertainty, jacobian, uncertainty
from pymc_sgmcmc.posterior.position import given_model
from pymc_sgmcmc.seeds import generator

METHODS = (*INTEGRALS, "mcem")

POINTS = {1: 25, 2: 11, 3: 7}
"""Nodes in each direction by the number of local quantities of a group. 25 are what `lme4` takes at
most; the others are a compromise between accuracy and at most some 350 nodes a group."""

SMALLEST_SAMPLE, SAMPLED, MANY = 1000, 0.03, 5
"""A search begins on a sample of the groups: this many or this part of them, where all are at least
so many times as many. The sample takes about sixty evaluations and all groups some twenty."""

SEED = 20_181_203
"""The sample is drawn from this fixed seed, so that the same model gives the same result."""

MONTE_CARLO_ERROR = 0.05
"""By default the Monte-Carlo error of an estimate is at most this many standard errors. It adds a
quarter of a percent to the variance, and a tenth of it costs a hundred times as many draws."""


def fit_marginal(
    model: Model,
    names: str | TensorVariable | Sequence[str | TensorVariable],
    *,
    method: str | None = None,
    reml: bool = False,
    points: int | None = None,
    monte_carlo_error: float | None = None,
    max_iterations: int = 1000,
    random_seed: Any = None,
) -> MarginalFit:
    r"""Fit the global variables by maximum marginal likelihood, as lme4 and glmmTMB do.

    With the local variables u integrated out, it maximises

    .. math:: \ell(\theta) = \sum_g \log \int p(y_g \mid u, \theta)\, p(u \mid \theta)\, du

    and the log likelihood of observed variables that do not depend on local ones. The priors of the
    global variables are left out.

    Parameters
    ----------
    model : pymc.Model
        On the full data, without potentials.
    names : str, variable, or a sequence of these
        Free variables whose entries belong to groups, as for `marginalize`, or all effects of
        several factors, crossed or nested.
    method : {"exact", "laplace", "quadrature", "mcem"}, optional
        The first three are those of `marginalize`: "exact" is for linear mixed models, "laplace"
        and adaptive Gauss-Hermite "quadrature" are for others. "mcem", EM with draws of the local
        variables, is for more of them than quadrature takes. Default: "exact" where that is
        possible, "laplace" otherwise.
    reml : bool
        Whether to integrate out the fixed effects of a linear mixed model too, with a flat prior
        (restricted maximum likelihood). They are the global variables in which the marginal log
        density is quadratic.
    points : int, optional
        Nodes of "quadrature" in each direction. Default: 25, 11 and 7 for one, two and three local
        quantities a group.
    monte_carlo_error : float, optional
        Largest Monte-Carlo error of "mcem" on the unconstrained scale, in standard errors of the
        estimate. The time grows with the square of its inverse. Default: 0.05.
    max_iterations : int
        Of the optimiser, or of the EM steps of "mcem".
    random_seed : optional
        Seed of "mcem", as for `numpy.random.default_rng`. The same seed gives the same estimates.

    Returns
    -------
    MarginalFit

    Raises
    ------
    ModelError
        Where groups or levels are not independent, where the method is not for this model, and
        where the likelihood does not determine a variable.
    ConvergenceError

    Warns
    -----
    BoundaryWarning
        Where the likelihood is largest at the boundary of the range of a parameter, such as a
        standard deviation of zero. The search ends close to it.

    Notes
    -----
    The search starts at the initial point of the model and runs on the unconstrained scale, by
    quasi-Newton steps of bounded length. Standard errors are those of the observed information, by
    differences of the gradient, for all parameters together, by the delta method. `lme4` takes the
    variances as known for those of the fixed effects in linear mixed models; in balanced designs
    this is the same. A maximum is local; fit from several initial points if in doubt.

    The draws of "mcem" are the states of a Markov chain in each group: Metropolis steps from a
    Student-t law at the mode of the group, with the exact law of the group whatever the proposal.
    El hanchi (2018) proposes OSGFS for these draws. Its law is exact only for Gaussian groups, and
    its transitions move the local variables of all groups together, which gains nothing where the
    groups are independent. The number of draws grows as EM settles. The last steps are Newton's,
    from the same kind of draws, at most 200 000 a group, until the step and its Monte-Carlo error
    are both small beside the standard errors. The Monte-Carlo errors of the estimates are in the
    result. Standard errors come from importance sampling with 256 nodes a group, and the log
    likelihood from all draws, with its Monte-Carlo error in the result too.

    Effects of several factors are integrated out together by Laplace's method, with a sparse matrix
    of their second derivatives. It is exact for linear mixed models, whose fixed effects follow
    from the other parameters; "quadrature" and "mcem" are for independent groups only.

    With 5000 groups and more the search of other methods begins on a random sample of them, with a
    fixed seed. It ends on all groups, with their standard errors.

    References
    ----------
    Bates, Mächler, Bolker and Walker (2015), Fitting linear mixed-effects models using lme4.
    El hanchi (2018), Stochastic gradient MCMC algorithms and their applications.
    Louis (1982), Finding the observed information matrix when using the EM algorithm.
    McCulloch (1997), Maximum likelihood algorithms for generalized linear mixed models.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> rng = np.random.default_rng(1)
    >>> school = np.repeat(np.arange(30), 5)
    >>> score = 1 + rng.normal(size=30)[school] + rng.normal(size=150)
    >>> with pm.Model() as model:
    ...     mean = pm.Normal("mean")
    ...     sd = pm.HalfNormal("sd", shape=2)
    ...     effect = pm.Normal("effect", mean, sd[0], shape=30)
    ...     _ = pm.Normal("score", effect[school], sd[1], observed=score)
    >>> fit = fit_marginal(model, "effect")
    >>> fit.to_dataframe().index.tolist()
    ['mean', 'sd[0]', 'sd[1]']
    >>> fit.modes["effect"].shape
    (30,)
    """
    or_none(one_of, "method", method, METHODS)
    or_none(whole_number, "points", points, 1, most=MOST_POINTS)
    truth_value("reml", reml)
    or_none(positive_number, "monte_carlo_error", monte_carlo_error)
    whole_number("max_iterations", max_iterations, 1)
    for name, value, owner in (
        ("points", points, "quadrature"),
        ("monte_carlo_error", monte_carlo_error, "mcem"),
    ):
        if value is not None and method != owner:
            raise ValueError(
                f'`{name}` should be given with method="{owner}" only, but the method is '
                f"{method!r}."
            )
    model, rng = given_model(model), generator("random_seed", random_seed)
    if model.potentials:
        listed = ", ".join(f"`{potential.name}`" for potential in model.potentials)
        raise ModelError(
            f"The model should have no potentials, but has {listed}, which may be priors or "
            "likelihoods. Leave priors out, and write a likelihood as an observed `pm.CustomDist`."
        )
    names = names_of(names)
    with _advised(model, names):
        with quick_graphs():
            groups, linear = _groups(model, names)
            method = method or ("exact" if linear else "laplace")
            _check_method(method, linear, reml)
        if isinstance(groups, Factors) and method not in ("exact", "laplace"):
            raise ModelError(
                f'method="{method}" is for independent groups, but {quoted(names)} are effects of '
                'several factors. Use "laplace".'
            )
        start = groups.layout.ravel(groups.initial_point)
        if method == "mcem" and isinstance(groups, Groups):
            error = monte_carlo_error or MONTE_CARLO_ERROR
            search = MonteCarloEM(groups, rng, error, max_iterations)
            _check_influence(groups, search.expected(start), None)
            drawn = search.maximize(start, groups.layout.labels)
            return _result(groups, drawn.likelihood, None, drawn.maximum, method, drawn)
        with quick_graphs():
            likelihood = _likelihood(groups, method, points)
        sample = None if isinstance(likelihood, Factors) else _sample(groups, likelihood)
        restricted: RestrictedLikelihood | Factors | None = None
        if isinstance(likelihood, Factors) and (reml or likelihood.fixed.any()):
            restricted = _without_fixed_effects(likelihood, start, reml)
        _check_influence(groups, restricted or likelihood, sample)
        if reml and restricted is None:
            fixed = fixed_effects(groups, sample or likelihood)
            restricted = RestrictedLikelihood(likelihood, fixed, start)
        maximum = _search(groups, likelihood, sample, restricted, max_iterations)
        return _result(groups, likelihood, restricted, maximum, method, reml=reml)


def _without_fixed_effects(factors: Factors, start: np.ndarray, reml: bool) -> Factors:
    """The likelihood, or restricted likelihood, of the coordinates that are not fixed effects."""
    if not factors.fixed.any():
        raise ModelError(NO_FIXED_EFFECTS)
    likelihood = factors.restricted() if reml else factors
    check_start(likelihood, start[~factors.fixed])
    check_determined(factors.estimate(start[~factors.fixed])[1])
    return likelihood


def _groups(model: Model, names: Sequence[str]) -> tuple[Groups | Factors, bool]:
    """Independent groups or several factors, and whether the joint log density is quadratic."""
    try:
        density = checked_density(model, find_structure(model, names))
    except NotTogetherError:
        factors = Factors(model, names)
        return factors, factors.is_quadratic
    return Groups(model, density), is_quadratic(model, density)


@contextmanager
def _advised(model: Model, names: Sequence[str]) -> Iterator[None]:
    """Refusals of names and of models say what to do."""
    try:
        yield
    except (NotTogetherError, UndeterminedError) as error:
        stay = [v.name for v in model.free_RVs if v.type.ndim and v.name not in names]
        if isinstance(error, NotTogetherError):
            advice = "Name all effects, or use `sample`."
        elif any(remedy(model, [name]) for name in stay):
            advice = (
                "Effects of several factors need priors, which `fit_marginal` leaves out for "
                "variables that stay: name them too."
            )
        else:
            advice = "Leave out or fix some; the priors of global variables do not count."
        raise ModelError(f"{error} {advice}") from None


def _check_method(method: str, linear: bool, reml: bool) -> None:
    if method == "exact" and not linear:
        raise ModelError(
            f'method="{method}" is for linear mixed models, but the joint log density is not '
            'quadratic in the local variables. Use "laplace".'
        )
    if reml and method != "exact":
        raise ModelError(
            "`reml=True` is for linear mixed models, but the joint log density is not quadratic "
            "in the local variables. Use `reml=False`."
            if not linear
            else f'`reml=True` should go with method="exact", but got "{method}".'
        )


def _likelihood(groups: Groups | Factors, method: str, points: int | None) -> Likelihood | Factors:
    if isinstance(groups, Factors):
        return groups
    density = groups.density
    size = density.block_size
    if method == "exact":
        return Likelihood(groups, exact(density))
    if method == "laplace":
        return Likelihood(groups, laplace(density))
    if size > MOST_QUADRATURE_SIZE:
        raise ModelError(
            f"A group has {size} local quantities, but quadrature takes at most "
            f'{MOST_QUADRATURE_SIZE}. Use method="laplace".'
        )
    points = points or POINTS[size]
    if points == 1:
        return Likelihood(groups, laplace(density))
    return Likelihood(groups, quadrature(density, points, moving=True), points**size)


def _sample(groups: Globals, likelihood: Likelihood) -> Likelihood | None:
    """The log likelihood of a random sample, where there are many groups."""
    size = max(SMALLEST_SAMPLE, int(SAMPLED * groups.n_groups))
    if groups.n_groups < MANY * size:
        return None
    rng = np.random.default_rng(SEED)
    return likelihood.of_sample(np.sort(rng.permutation(groups.n_groups)[:size]))


def _check_influence(groups: Globals, likelihood: Objective, sample: Objective | None) -> None:
    """Refuse coordinates whose slope is zero wherever it is taken."""
    layout = groups.layout
    start = layout.ravel(groups.initial_point)
    rng = np.random.default_rng(0)
    places = np.array([start, *(start + 0.1 * rng.normal(size=(2, layout.dimension)))])
    if sample is not None and _slopes(sample, places).any(axis=0).all():
        return
    free = ~likelihood.fixed if isinstance(likelihood, Factors) else np.ones(len(start), dtype=bool)
    slopes = np.ones_like(places)
    slopes[:, free] = _slopes(likelihood, places[:, free])
    without: list[str] = []
    for variable, part in zip(groups.variables, layout.slices, strict=True):
        flat = ~slopes[:, part].any(axis=0)
        labels = np.array(layout.labels[part], dtype=object)[flat]
        without += [variable.name] if flat.all() else list(labels)
    if without:
        raise UndeterminedError(
            f"The likelihood should depend on each global variable, but not on {quoted(without)}."
        )


def _slopes(objective: Objective, places: np.ndarray) -> np.ndarray:
    return np.abs([objective(place)[1] for place in places])


def _search(
    groups: Globals,
    likelihood: Objective,
    sample: Likelihood | None,
    restricted: RestrictedLikelihood | Factors | None,
    max_iterations: int,
) -> Maximum:
    objective: Objective = likelihood if restricted is None else restricted
    of_sample: Objective | None = sample
    start = groups.layout.ravel(groups.initial_point)
    labels = _labels_of_search(groups, restricted)
    if restricted is not None:
        if sample is not None:
            of_sample = RestrictedLikelihood(sample, restricted.fixed, start)
        start = start[~restricted.fixed]
    near = None
    if of_sample is not None:
        near = _maximum_inside(of_sample, start, max_iterations, labels)
    ended = None if near is None else _from_sample(objective, near, max_iterations, labels)
    if ended is not None:
        return ended
    check_start(objective, start)
    return maximize(objective, start, max_iterations, labels)


def _maximum_inside(
    objective: Objective, start: np.ndarray, max_iterations: int, labels: Sequence[str]
) -> Maximum | None:
    """A maximum that is not at the boundary, None where the search ends at no such one."""
    try:
        maximum = maximize(objective, start, max_iterations, labels)
    except ConvergenceError:
        return None
    return None if at_boundary(objective, maximum) else maximum


def _from_sample(
    objective: Objective, near: Maximum, max_iterations: int, labels: Sequence[str]
) -> Maximum | None:
    """The maximum over all groups near that of a sample, None where there is none.

    A sample of groups may lack what determines a parameter, such as the records of a rare level.
    """
    try:
        maximum = maximize(
            objective, near.position, max_iterations, labels, information=near.information
        )
    except ConvergenceError:
        return None
    # The maximum of the sample is inside. At a boundary the information would go to zero.
    ratios = np.diag(maximum.information) / np.diag(near.information)
    return replace(maximum, inside=bool(((ratios > 0.5) & (ratios < 2)).all()))


def _result(
    groups: Groups | Factors,
    likelihood: Objective,
    restricted: RestrictedLikelihood | Factors | None,
    maximum: Maximum,
    method: str,
    drawn: MonteCarloMaximum | None = None,
    *,
    reml: bool = False,
) -> MarginalFit:
    model, conditional = groups.model, [groups.model.values_to_rvs[each] for each in groups.local]
    reported, local = list(groups.variables), set(conditional)
    for variable in model.deterministics:
        inputs = set(ancestors([variable]))
        if local & inputs:
            conditional.append(variable)
        elif inputs & set(groups.variables) and variable.dtype.startswith("float"):
            reported.append(variable)
    constrained = groups.compile([], model.replace_rvs_by_values(reported))

    def constrain(position: np.ndarray) -> np.ndarray:
        return np.concatenate([np.ravel(part) for part in constrained(position)])

    errors = uncertainty(
        likelihood if restricted is None else restricted,
        restricted,
        maximum,
        constrain,
        _labels_of_search(groups, restricted),
    )
    if errors.at_boundary:
        _warn_of_boundary(groups, errors)
    values = constrained(errors.position)

    def as_dataset(entries: np.ndarray) -> xr.Dataset:
        parts = np.split(entries, np.cumsum([np.size(value) for value in values])[:-1])
        shaped = [part.reshape(np.shape(value)) for part, value in zip(parts, values, strict=True)]
        return dataset(model, reported, shaped)

    estimates = dataset(model, reported, values)
    minus_two = -2 * maximum.value
    if isinstance(groups, Factors):
        modes = groups.modes(errors.position)
    else:
        blocks = _modes(groups, errors.position, method) if drawn is None else drawn.modes
        modes = list(split_blocks(groups.density.structure, blocks).values())
    return MarginalFit(
        method=method,
        reml=reml,
        estimates=estimates,
        standard_errors=as_dataset(errors.standard_errors),
        minus_two_log_likelihood=minus_two,
        aic=minus_two + 2 * groups.layout.dimension,
        modes=dataset(model, conditional, _at_modes(groups, conditional, modes, errors.position)),
        covariance=errors.covariance,
        labels=tuple(label for name in estimates for label in labels_of(estimates[name])),
        iterations=maximum.iterations,
        n_groups=groups.n_groups,
        **({} if drawn is None else _monte_carlo(drawn, constrain, as_dataset)),
    )


def _monte_carlo(
    drawn: MonteCarloMaximum,
    constrain: Callable[[np.ndarray], np.ndarray],
    as_dataset: Callable[[np.ndarray], xr.Dataset],
) -> dict[str, Any]:
    """The Monte-Carlo errors of a result."""
    slopes = jacobian(constrain, drawn.maximum.position)
    errors = np.sqrt(np.einsum("ij,jk,ik->i", slopes, drawn.covariance, slopes))
    return {
        "monte_carlo_errors": as_dataset(errors),
        "minus_two_log_likelihood_error": 2 * drawn.value_error,
    }


def _labels_of_search(
    groups: Globals, restricted: RestrictedLikelihood | Factors | None
) -> tuple[str, ...]:
    """Labels of the coordinates over which the search runs."""
    labels = groups.layout.labels
    if restricted is None:
        return labels
    return tuple(label for label, fixed in zip(labels, restricted.fixed, strict=True) if not fixed)


def _warn_of_boundary(groups: Globals, errors: Uncertainty) -> None:
    names = [
        variable.name
        for variable, part in zip(groups.variables, groups.layout.slices, strict=True)
        if any(part.start <= index < part.stop for index in errors.at_boundary)
    ]
    warn(
        f"The likelihood is largest at the boundary of the range of {quoted(names)}: a standard "
        "deviation goes to zero, a correlation to one, or an effect to infinity. The estimates are "
        "near this boundary, without standard errors; simplify the model.",
        BoundaryWarning,
    )


@quick_graphs()
def _modes(groups: Groups, position: np.ndarray, method: str) -> np.ndarray:
    """Conditional modes of the local variables, shape (G, q)."""
    density = groups.density
    mode = quadratic_mode(density) if method == "exact" else find_mode(density)
    function = groups.compile([density.numbers], [groups.at_position(mode.block)])
    return np.concatenate([function(numbers, position)[0] for numbers in groups.chunks(1)])


@quick_graphs()
def _at_modes(
    groups: Globals,
    variables: Sequence[TensorVariable],
    modes: Sequence[np.ndarray],
    position: np.ndarray,
) -> list[np.ndarray]:
    """Values of variables at values of the local ones."""
    constrain = groups.compile(groups.local, groups.model.replace_rvs_by_values(list(variables)))
    return constrain(*modes, position)
