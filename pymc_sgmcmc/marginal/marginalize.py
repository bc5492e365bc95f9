"""A PyMC model whose rows are groups, with local variables integrated out."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.model import Model
from pymc.model.fgraph import ModelNamed, fgraph_from_model, model_from_fgraph
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.checks import one_of, or_none, quoted, whole_number
from pymc_sgmcmc.compiling.compiled import quick_graphs
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.guests import remember_quadrature
from pymc_sgmcmc.marginal.accuracy import (
    QuadratureError,
    quadrature_of,
    warn_of_quadrature,
)
from pymc_sgmcmc.marginal.check import checked_density
from pymc_sgmcmc.marginal.density import GroupDensity
from pymc_sgmcmc.marginal.exact import exact, is_quadratic
from pymc_sgmcmc.marginal.operation import GroupLogDensity, Template
from pymc_sgmcmc.marginal.quadrature import (
    MOST_POINTS,
    MOST_QUADRATURE_SIZE,
    POINTS,
    Nodes,
    call_of,
    laplace,
    quadrature,
)
from pymc_sgmcmc.marginal.search import structure_of
from pymc_sgmcmc.marginal.structure import LocalStructure
from pymc_sgmcmc.posterior.group_access import mark_groups
from pymc_sgmcmc.posterior.position import given_model, name_of
from pymc_sgmcmc.stages import set_up

_log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold

INTEGRALS = ("exact", "laplace", "quadrature")
"""The ways to integrate that give a density, also those of `fit_marginal`."""


@set_up()
@quick_graphs()
def marginalize(
    model: Model,
    names: str | TensorVariable | Sequence[str | TensorVariable],
    *,
    method: str | None = None,
    points: int | None = None,
) -> Model:
    r"""Integrate local latent variables out of a model, whose rows are groups then.

    The observed variables that depend on the local ones are replaced by one with the log density

    .. math:: \sum_g \log p(y_g \mid \theta), \quad
        p(y_g \mid \theta) = \int p(y_g \mid u, \theta)\, p(u \mid \theta)\, du,

    one term a group. It is an ordinary PyMC model for the step methods of this package, for NUTS
    and for `pymc.fit`. A transition takes a time that does not grow with the number of groups.
    `recover` draws the local variables afterwards.

    Parameters
    ----------
    model : pymc.Model
        On the full data, or on the first rows of a source that `RowSource.head` returned, whose
        records belong to groups by one column of codes. It is not changed, and later changes of its
        data change nothing here.
    names : str, variable, or a sequence of these
        Free variables whose entries belong to groups: the entries of different groups should be
        independent given all other variables.
    method : {"exact", "laplace", "quadrature"}, optional
        "exact" where the joint log density is quadratic in the local variables, as in linear mixed
        models; "quadrature", adaptive Gauss-Hermite, for up to three quantities a group; and
        Laplace's method, which is quadrature with one node. Default: "exact" where that is
        possible, "quadrature" otherwise.
    points : int, optional
        Nodes in each direction of the quadrature. Default: 9, 7 and 5 for
        one, two and three quantities a group, and more where a step method of this package needs
        them around its centre.

    Returns
    -------
    pymc.Model
        It has the global variables, the observed variables that do not depend on the local ones,
        and one observed variable with the numbers of the groups as its values. Deterministics that
        depend on local variables are left out; `recover` computes them.

    Raises
    ------
    ModelError
        Where variables are not local or the groups depend on each other, and for more than three
        quantities a group that are not integrated exactly.
    RowsError
        Where codes of groups in a source are no whole numbers from 0 to the number of groups.

    Notes
    -----
    With more than one node the gradient is the quadrature of Fisher's identity, with constant
    nodes. With one node (Laplace) it is the gradient of the approximation.

    The quadrature is compared with a fine grid, for at most 20 groups: near the initial point here,
    with a warning where it is not accurate, and around the centre where a step method of this
    package is made. That takes more nodes where they are needed there, and the model keeps them.
    `sample` compares it near the initial point only where there is no centre.

    A group without records integrates to one, and `recover` draws it from its prior. Where two
    arrays or more index an effect together, ``z[county, year]``, each pair is a group.

    Where the records are in a source, a pass over the column of codes makes an index of them, and a
    step method of this package takes the source as its ``rows``. No other tool can evaluate such a
    model of groups.

    References
    ----------
    Pinheiro and Bates (1995), Approximations to the log-likelihood function in the nonlinear
    mixed-effects model. The verbs are those of `pymc_extras.marginal`.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> rng = np.random.default_rng(1)
    >>> school = np.repeat(np.arange(30), 5)
    >>> score = rng.normal(size=30)[school] + rng.normal(size=150)
    >>> with pm.Model() as model:
    ...     mean = pm.Normal("mean")
    ...     effect = pm.Normal("effect", shape=30)
    ...     _ = pm.Normal("score", mean + effect[school], 1.0, observed=score)
    >>> groups = marginalize(model, "effect")
    >>> [variable.name for variable in groups.free_RVs]
    ['mean']
    """
    groups = without_warning(model, names, method=method, points=points)
    if (error := quadrature_of(groups)) is not None:
        warn_of_quadrature(error)
    return groups


@set_up()
@quick_graphs()
def without_warning(
    model: Model,
    names: str | TensorVariable | Sequence[str | TensorVariable],
    *,
    method: str | None = None,
    points: int | None = None,
) -> Model:
    """`marginalize` for a caller who compares the quadrature elsewhere."""
    or_none(one_of, "method", method, INTEGRALS)
    or_none(whole_number, "points", points, 1, most=MOST_POINTS)
    if method in ("exact", "laplace") and points is not None:
        raise ValueError(f'`points` is for quadrature, but `method` is "{method}". Leave one out.')
    points = 1 if method == "laplace" else points
    model = given_model(model)
    structure = structure_of(model, names_of(names), on_source=True)
    density = checked_density(model, structure).on_source()
    marginal, error = integrate(model, density, method, points)
    left_out = dependent_deterministics(model, structure)
    if left_out:
        verb = "depends" if len(left_out) == 1 else "depend"
        _log.info(
            f"{quoted(variable.name for variable in left_out)} {verb} on local variables; "
            "`recover` adds them to the draws."
        )
    groups = without_locals(model, density, marginal)
    if error is not None:
        remember_quadrature(groups, error)
    if density.groups_of_source is not None:
        mark_groups(groups, density.groups_of_source)
        density.groups_of_source.release()
        density.groups_of_source.tell_of_passes()
    return groups


def dependent_deterministics(model: Model, structure: LocalStructure) -> list[TensorVariable]:
    """Deterministic variables that depend on local ones, or on records of these."""
    local = {model[name] for name in structure.names}
    return [v for v in model.deterministics if not local.isdisjoint(ancestors([v]))]


def integrate(
    model: Model, density: GroupDensity, method: str | None, points: int | None
) -> tuple[TensorVariable, QuadratureError | None]:
    """Log density of each group's records, as a graph of the placeholders of the density.

    Quadrature has errors, which are the second result.
    """
    size = density.block_size
    quadratic = method != "quadrature" and points is None and is_quadratic(model, density)
    if method == "exact" and not quadratic:
        raise ModelError(
            "The joint log density is not quadratic in the local variables, so they cannot be "
            'integrated out exactly. Use method="quadrature".'
        )
    if quadratic:
        return exact(density), None
    if size > MOST_QUADRATURE_SIZE and points != 1:
        call = call_of(density.structure, quadratic=False)
        raise ModelError(
            f"A group has {size} local quantities, but quadrature takes at most "
            f"{MOST_QUADRATURE_SIZE}. Use {call or 'NUTS'}."
        )
    if points == 1:
        return laplace(density), None
    rule = Nodes(density, points or POINTS[size])
    values = quadrature(density, rule)
    return values, QuadratureError(model, density, values, rule, is_given=points is not None)


def names_of(names: str | TensorVariable | Sequence[str | TensorVariable]) -> list[str]:
    """Names of variables that are given by themselves or by their names."""
    if not isinstance(names, str | Variable | Iterable) or isinstance(names, Model):
        raise TypeError(
            "`names` should be names of local variables, or these variables, but got "
            f"{type(names).__name__}."
        )
    several = [names] if isinstance(names, str | Variable) else list(names)
    return [name_of(entry) for entry in several]


def without_locals(model: Model, density: GroupDensity, marginal: TensorVariable) -> Model:
    """A copy of the model with one observed variable in place of the local and dependent ones."""
    structure = density.structure
    removed = {model[name] for name in (*structure.names, *structure.observed)}
    left_out = dependent_deterministics(model, structure)
    if model.parent is not None:
        raise ModelError(
            "Local variables are integrated out of a whole model, but this one is nested in "
            "another. Name those of the outermost model."
        )
    graph, copies = fgraph_from_model(_without_initial_values(model))
    for variable in (*removed, *left_out):
        graph.remove_output(graph.outputs.index(copies[variable]))
    needed = {v for v in graph.outputs if not isinstance(v.owner.op, ModelNamed)}
    for variable in [v for v in graph.outputs if v not in needed]:
        if variable not in set(ancestors(needed)):
            graph.remove_output(graph.outputs.index(variable))
    groups = model_from_fgraph(graph, mutate_fgraph=True)
    for variable in groups.free_RVs:
        groups.set_initval(variable, model.rvs_to_initial_values[model[variable.name]])

    name = "_".join(structure.observed)
    while name in groups.named_vars:
        name += "_"
    names = list(density.parameters)
    operation = GroupLogDensity(
        Template(marginal, density.numbers, list(density.parameters.values()))
    )
    # Names of the axes of the parameters, all different: PyMC broadcasts none of them.
    cores = [
        "(" + ",".join(f"p{number}a{axis}" for axis in range(placeholder.type.ndim)) + ")"
        for number, placeholder in enumerate(density.parameters.values())
    ]

    def logp(value: TensorVariable, *batched: TensorVariable) -> TensorVariable:
        # PyMC gives parameters the axis of the groups, with length one.
        parameters = [pt.squeeze(parameter, axis=0) for parameter in batched]
        return operation.of(value, parameters)

    with groups:
        pm.CustomDist(
            name,
            *(groups[parameter] for parameter in names),
            logp=logp,
            random=_no_draws,
            signature=f"{','.join(cores)}->()",
            dtype="int64",
            observed=np.arange(structure.n_groups),
            dims=structure.dim,
        )
    return groups


def _without_initial_values(model: Model) -> Model:
    """The same model without the initial values, with which PyMC does not copy it."""
    same = object.__new__(type(model))
    vars(same).update(vars(model), rvs_to_initial_values={})
    return same


def _no_draws(*args, **kwargs):
    raise NotImplementedError(
        "A model of groups has no predictive draws of records. Call `recover` on the draws, then "
        "`pm.sample_posterior_predictive` with the original model."
    )
