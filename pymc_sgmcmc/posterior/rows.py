"""Tell the rows of a model's data apart from everything else.

A posterior can be subsampled when its log density is a prior part plus a sum over rows. This
module finds that split in the graph of a PyMC model, in one of two ways:

* models built with `pymc.Minibatch` and ``total_size``: the outputs of the minibatch nodes are
  the rows, their inputs the full data;
* ordinary models: the observed variables and all data arrays (constants and `pymc.Data`) that
  share their leading length are the rows.

Nothing here is trusted: `pymc_sgmcmc.posterior.check` evaluates the split numerically.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.data import MinibatchOp
from pymc.logprob.basic import transformed_conditional_logp
from pymc.model import Model
from pymc.variational.minibatch_rv import MinibatchRandomVariable
from pytensor.compile.builders import infer_shape
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.sparse.type import SparseTensorType
from pytensor.tensor import TensorVariable
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.type import TensorType

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.graphs import (
    Length,
    leaf_value,
    rebuild,
    shape_of,
    simplify_for_gradients,
    value_of,
)
from pymc_sgmcmc.posterior.position import PositionLayout

RANDOM_IN_LOGP = "Random variables detected in the logp graph"
"""Beginning of PyMC's error for random numbers in a log density."""


@dataclass(frozen=True, eq=False)
class RowLeaf:
    """One data array with an axis that runs over the rows.

    Attributes
    ----------
    name : str
        What to call it in messages.
    variables : tuple of Variable
        Where it enters the graph of the log density, possibly several times.
    values : numpy.ndarray
        The full data with the axis of rows first, length N; never written to.
    axis : int
        Which axis of the variables runs over the rows.
    """

    name: str
    variables: tuple[Variable, ...] = field(repr=False)
    values: np.ndarray = field(repr=False)
    axis: int = 0

    def placeholder(self, length: int | None = None) -> TensorVariable:
        """Fresh symbolic input for some of the rows, a fixed number of them where given."""
        shape = (length, *self.values.shape[1:])
        return TensorType(self.values.dtype, shape=shape)(name=f"{self.name}_rows")

    def in_place(self, rows: TensorVariable) -> dict[Variable, TensorVariable]:
        """The variables of the graph, each with what to put there for some of the rows."""
        there = pt.moveaxis(rows, 0, self.axis) if self.axis else rows
        return dict.fromkeys(self.variables, there)

    def sources(self) -> list[SharedVariable]:
        """The `pymc.Data` variables that the values were taken from."""
        found = [
            variable.owner.inputs[variable.index]
            if variable.owner is not None and isinstance(variable.owner.op, MinibatchOp)
            else variable
            for variable in self.variables
        ]
        return [variable for variable in found if isinstance(variable, SharedVariable)]


@dataclass(frozen=True, eq=False)
class Term:
    """One additive term of a model's log density, elementwise or already summed."""

    name: str
    log_density: TensorVariable


@dataclass(frozen=True, eq=False)
class SeparatedModel:
    """A log density split in a part without rows and a sum over rows.

    A snapshot of the model: `pymc.set_data` does not reach it.

    Attributes
    ----------
    full_terms : tuple of Term
        Prior, Jacobians, potentials and likelihoods that are not subsampled.
    row_terms : tuple of Term
        Likelihood terms, unscaled, on the data as they stand in the model.
    leaves : tuple of RowLeaf
        The data arrays to subsample together.
    n_rows : int
        N.
    batch_size : int or None
        What the model's `pymc.Minibatch` asks for, None for an ordinary model.
    lengths : tuple of Variable
        Lengths of the model's dimensions that run over the rows.
    row_numbers : tuple of Variable
        Arrays 0, 1, ..., N - 1 that number the rows in whatever part of the data, rather than
        being data themselves.
    only_beside_rows : bool
        A length in the graph that equals the number of rows is taken for that number only in
        expressions of the data, not in those of parameters alone. (With minibatches of 10,
        ``pt.zeros(10)`` can be either.)
    copied : tuple of (shared variable, numpy.ndarray)
        Shared variables of the model that are no rows, with the values that were taken of them.
    """

    full_terms: tuple[Term, ...]
    row_terms: tuple[Term, ...]
    leaves: tuple[RowLeaf, ...]
    n_rows: int
    batch_size: int | None
    lengths: tuple[Variable, ...] = ()
    row_numbers: tuple[Variable, ...] = ()
    only_beside_rows: bool = False
    copied: tuple[tuple[SharedVariable, np.ndarray], ...] = ()

    def row_log_densities(
        self, rows: Sequence[TensorVariable], length: TensorVariable
    ) -> list[TensorVariable]:
        """Likelihood terms with the data replaced by symbolic rows.

        Parameters
        ----------
        rows : sequence of TensorVariable
            One tensor a leaf, in the order of `leaves`.
        length : TensorVariable
            Their common leading length (an integer scalar, a constant where shapes must be
            static).
        """
        replacements: dict[Variable, Variable] = dict.fromkeys(self.lengths, length)
        for variable in self.row_numbers:
            replacements[variable] = pt.arange(length, dtype=variable.dtype)
        for leaf, tensor in zip(self.leaves, rows, strict=True):
            replacements |= leaf.in_place(tensor)
        built_for = self.n_rows if self.batch_size is None else self.batch_size
        return rebuild(
            [term.log_density for term in self.row_terms],
            replacements,
            Length(built_for, length),
            self.only_beside_rows,
        )

    def readings(self) -> list[SeparatedModel]:
        """Readings of what the graph leaves open, the likeliest first, which is this one."""
        numbers = [
            leaf
            for leaf in self.leaves
            if leaf.values.ndim == 1
            and leaf.values.dtype.kind in "iu"
            and np.array_equal(leaf.values, np.arange(self.n_rows))
        ]
        readings = [self]
        if numbers and len(numbers) < len(self.leaves):
            # `log_p[np.arange(N), y]`: the first index is not a trend over the rows.
            variables = tuple(variable for leaf in numbers for variable in leaf.variables)
            others = tuple(leaf for leaf in self.leaves if leaf not in numbers)
            readings.append(replace(self, leaves=others, row_numbers=variables))
        return readings + [replace(reading, only_beside_rows=True) for reading in readings]

    def widest_row(self, layout: PositionLayout) -> int:
        """Elements of a row of all data, or of the widest intermediate result that has rows.

        Few columns can meet a large matrix of weights, so the data alone bound no memory.
        """
        rows = [leaf.placeholder() for leaf in self.leaves]
        position = pt.tensor("position", shape=(layout.dimension,), dtype=layout.dtype)
        densities = clone_replace(
            self.row_log_densities(rows, pt.lscalar("length")),
            layout.split(position),
            rebuild_strict=False,
        )
        widths = [sum(leaf.values[0].size for leaf in self.leaves)]
        for variable in ancestors(densities):
            shape = getattr(variable.type, "shape", ())
            if None in shape:
                widths.append(int(np.prod([size for size in shape if size is not None])))
        return max(widths)


def separate_rows(model: Model, rows: str | Sequence[str] | None = None) -> SeparatedModel:
    """Split the log density of a model into a part without rows and a sum over rows.

    Parameters
    ----------
    model : pymc.Model
        With or without `pymc.Minibatch`.
    rows : str or sequence of str, optional
        For ordinary models in which the rows cannot be guessed: names of observed variables,
        of `pymc.Data` variables, or of a dimension whose data run over the rows. Where data
        variables are named, the other data variables are not subsampled; arrays without a name
        are, if they have as many rows.

    Raises
    ------
    ModelError
        Where the rows cannot be told apart; the message names the variable and what to pass.
    """
    if not model.observed_RVs and not model.potentials:
        raise ModelError(
            "The model has no observed variables, so there are no rows to subsample. "
            "Sample it with NUTS: `pm.sample()`."
        )
    _refuse_labelled(model)
    _refuse_imputed(model)
    for variable in model.observed_RVs:
        _check_parameters(model, variable)
    terms = _model_terms(model)
    for term in terms.values():
        _refuse_unsupported(term)
    nodes = _minibatch_nodes([term.log_density for term in terms.values()])
    if not nodes:
        return _own_shared(_separate_ordinary_model(model, terms, rows))
    if rows is not None:
        raise ModelError(
            "`rows` is for ordinary models, but this one uses `pm.Minibatch`, which names "
            "its rows itself. Drop `rows`, or build the model on the full arrays."
        )
    return _own_shared(_separate_minibatch_model(model, terms, nodes))


def _refuse_labelled(model: Model) -> None:
    for variable in [*model.basic_RVs, *model.potentials]:
        if not isinstance(variable.type, TensorType):
            raise ModelError(
                f"The variable `{variable.name}` is a {type(variable).__name__}. Models with "
                "labelled tensors (`pymc.dims`) are not supported: write the model with the "
                "distributions of `pymc` and `dims=`."
            )


def _refuse_imputed(model: Model) -> None:
    free = {variable.name for variable in model.free_RVs}
    for variable in model.observed_RVs:
        # The names that PyMC gives to the two parts of a variable with missing values.
        name = variable.name.removesuffix("_observed")
        if name != variable.name and f"{name}_unobserved" in free:
            raise ModelError(
                f"The observed variable `{name}` has missing values, which PyMC turns into the "
                f"free variable `{name}_unobserved`: the observed values and their predictors "
                "then have different numbers of rows. Drop the rows with missing values, or "
                "impute them beforehand."
            )


def _check_parameters(model: Model, variable: TensorVariable) -> None:
    """Refuse an observed variable that its parameters do not fit: a likelihood has one term a row.

    PyTensor fails only where it knows the lengths beforehand, and then in its own words.

    Raises
    ------
    ModelError
    """
    node = _without_scaling(variable).owner
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
                f"{message}, which broadcast to {product} elements. Give one shape to both: the "
                f"outcomes as `y[:, 0]` where `{variable.name}` is a single column."
            )
        sources = {
            f"{f'`{leaf.name}`' if leaf.name else 'an array'} of shape {values.shape}"
            for leaf in ancestors([parameter], blockers=model.basic_RVs)
            if (values := leaf_value(leaf)) is not None and set(values.shape) & set(lengths) - {1}
        }
        source = f", from {' and '.join(sorted(sources))}" if sources else ""
        drawn = _minibatch_nodes([model.rvs_to_values[variable]])
        advice = ", all of them in one `pm.Minibatch` call" if drawn else ""
        raise ModelError(f"{message}{source}. Give predictors and outcomes the same rows{advice}.")


def _known_shape(variable: TensorVariable) -> list[int | None]:
    """Shape of a variable, None where it depends on random variables."""
    shape: list[int | None] = list(variable.type.shape)
    if None not in shape:
        return shape
    (lengths,) = infer_shape([variable], [], [])
    for axis, length in enumerate(lengths):
        random = any(isinstance(one.type, RandomType) for one in ancestors([length]))
        if shape[axis] is None and not random:
            shape[axis] = int(value_of(length))
    return shape


def _refuse_unsupported(term: Term) -> None:
    """Refuse what no gradient of rows goes through, by the name of the data.

    Raises
    ------
    ModelError
    """
    graph = [term.log_density]
    drawn = {output for node in _minibatch_nodes(graph) for output in node.outputs}
    # From the data on, which have a name.
    for variable in reversed(list(ancestors(graph, blockers=drawn))):
        if isinstance(variable.type, SparseTensorType):
            raise ModelError(
                f"{_named(variable, term)} is a sparse matrix, which is not supported. For one-hot "
                "columns index by group instead, as in `effect[codes]` with the number of the "
                "group in each row; otherwise pass it dense, as `X.toarray()`."
            )
        if isinstance(variable.type, TensorType) and variable.dtype.startswith("complex"):
            raise ModelError(
                f"{_named(variable, term)} has complex numbers, which are not supported. Give "
                "their real and imaginary parts as columns of their own."
            )
        if isinstance(variable.type, RandomType) and variable not in drawn:
            raise _random(term.name)


def _named(variable: Variable, term: Term) -> str:
    """What to call data in a log density, or what was made of them there."""
    if variable.owner is not None:
        return f"The log density of `{term.name}`"
    if variable.name:
        return f"`{variable.name}`"
    shape = np.shape(variable.data) if isinstance(variable, Constant) else variable.type.shape
    return f"An array of shape {shape} in the log density of `{term.name}`"


def _random(name: str) -> ModelError:
    return ModelError(
        f"The log density of `{name}` depends on random numbers that are no variable of the model, "
        "such as those of a `.dist()`, of `pt.random` or of a `pm.Simulator`. Make them a free "
        "variable with a prior, or draw them once with NumPy; sample a simulator with "
        "`pm.sample_smc`."
    )


def _own_shared(separated: SeparatedModel) -> SeparatedModel:
    """Replace shared variables of the model by copies, so that `pymc.set_data` changes nothing.

    The rows are taken out of the model anyway; were the rest to follow the model, a change of
    its data would reach one part of the posterior and not the other.
    """
    # What stands for rows stays as it is, to be found again.
    rows = {variable for leaf in separated.leaves for variable in leaf.variables}
    rows.update(separated.lengths)
    full_terms, copied = _on_copies(separated.full_terms, set())
    row_terms, of_rows = _on_copies(separated.row_terms, rows)
    # Lengths of dimensions that run over the rows are those of the rows.
    return replace(separated, full_terms=full_terms, row_terms=row_terms, copied=copied + of_rows)


def _on_copies(
    terms: Sequence[Term], kept: set[Variable]
) -> tuple[tuple[Term, ...], tuple[tuple[SharedVariable, np.ndarray], ...]]:
    """Terms on copies of their shared variables, and these with the values taken."""
    graphs = [term.log_density for term in terms]
    taken = {
        variable: variable.get_value()
        for variable in ancestors(graphs, blockers=kept)
        if isinstance(variable, SharedVariable) and isinstance(variable.type, TensorType)
        # In the terms of rows their own variables stay.
        if variable not in kept
    }
    copies: dict[Variable, Variable] = {
        variable: pytensor.shared(value, variable.name, shape=variable.type.shape)
        for variable, value in taken.items()
    }
    copies.update((variable, variable) for variable in kept)
    on_copies = tuple(
        Term(term.name, graph) for term, graph in zip(terms, rebuild(graphs, copies), strict=True)
    )
    return on_copies, tuple(taken.items())


# --- The terms of the log density ---------------------------------------------------------


def _model_terms(model: Model) -> dict[str, Term]:
    """Log density terms by variable name, without `total_size` scaling and parameter checks."""
    random_variables = [*model.free_RVs, *model.observed_RVs]
    # `total_size` wraps the variable in a node that multiplies its log density by N / n.
    # Asking for the density of the variable inside gives the plain sum over rows.
    inner = {variable: _without_scaling(variable) for variable in random_variables}
    values = {inner[variable]: model.rvs_to_values[variable] for variable in random_variables}
    transforms = {
        inner[variable]: model.rvs_to_transforms[variable] for variable in random_variables
    }

    def log_densities_of(variables: list[TensorVariable]) -> list[Variable]:
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
                raise _random(variable.name) from None
        raise
    names = [variable.name for variable in random_variables]
    if model.potentials:
        log_densities = [*log_densities, *model.replace_rvs_by_values(list(model.potentials))]
        names += [potential.name for potential in model.potentials]
    tensors = [pt.as_tensor(log_density) for log_density in log_densities]
    return {
        name: Term(name, tensor)
        for name, tensor in zip(names, simplify_for_gradients(tensors), strict=True)
    }


def reference_terms(model: Model, rows: Mapping[RowLeaf, TensorVariable]) -> dict[str, Term]:
    """Log density terms by variable name as PyMC makes them, scaled by `total_size`.

    Parameters
    ----------
    model : pymc.Model
    rows : mapping
        For a model with `pymc.Minibatch`, symbolic rows to put in the place of those that it
        would draw, and as many.
    """
    variables = [*model.free_RVs, *model.observed_RVs, *model.potentials]
    tensors = simplify_for_gradients(model.logp(vars=variables, sum=False))
    places = {
        (variable.owner.inputs[-1], variable.index): tensor
        for leaf, tensor in rows.items()
        for variable in leaf.variables
    }
    drawn = {
        output: places[node.inputs[-1], index]
        for node in _minibatch_nodes(tensors)
        for index, output in enumerate(node.outputs)
        if (node.inputs[-1], index) in places
    }
    return {
        variable.name: Term(variable.name, tensor)
        for variable, tensor in zip(variables, clone_replace(tensors, drawn), strict=True)
    }


def _without_scaling(variable: TensorVariable) -> TensorVariable:
    return variable if _total_size(variable) is None else variable.owner.inputs[0]


def _total_size(variable: TensorVariable) -> list[int | None] | None:
    node = variable.owner
    if node is None or not isinstance(node.op, MinibatchRandomVariable):
        return None
    return [
        int(value_of(size)) if isinstance(size.type, TensorType) else None
        for size in node.inputs[1:]
    ]


def _check_total_size(variable: TensorVariable, lengths: Sequence[int], drawn: bool) -> None:
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
                f"`total_size`, so its likelihood would count n rows instead of {lengths[0]}. "
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


# --- Models with pm.Minibatch -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _DrawnArray:
    """One argument of a `pymc.Minibatch` call."""

    name: str
    generator: Variable
    source: Variable
    variables: tuple[Variable, ...]


def _minibatch_nodes(roots: Sequence[Variable]) -> list:
    nodes = {
        variable.owner: None
        for variable in ancestors(roots)
        if variable.owner is not None and isinstance(variable.owner.op, MinibatchOp)
    }
    return list(nodes)


def _minibatch_arrays(model: Model, nodes: list) -> list[_DrawnArray]:
    groups: dict[Variable, list] = {}
    for node in nodes:
        # One `pm.Minibatch` call can stand in the graph as several nodes; its generator
        # is the only thing that they are sure to share.
        groups.setdefault(node.inputs[-1], []).append(node)

    observed = {}
    for variable in model.observed_RVs:
        output = _without_casts(model.rvs_to_values[variable])
        if output.owner is not None:
            observed[output.owner.inputs[-1], output.index] = variable.name

    arrays = []
    for generator, group in groups.items():
        for index, source in enumerate(group[0].inputs[:-1]):
            name = (
                source.name or observed.get((generator, index)) or f"array {index} of pm.Minibatch"
            )
            variables = tuple(node.outputs[index] for node in group)
            arrays.append(_DrawnArray(name, generator, source, variables))
    return arrays


def _without_casts(variable: Variable) -> Variable:
    while variable.owner is not None and isinstance(variable.owner.op, Elemwise):
        variable = variable.owner.inputs[0]
    return variable


def _depends_on(term: Term, variables: Iterable[Variable]) -> bool:
    wanted = set(variables)
    return any(variable in wanted for variable in ancestors([term.log_density]))


def _separate_minibatch_model(model: Model, terms: dict[str, Term], nodes: list) -> SeparatedModel:
    arrays = _minibatch_arrays(model, nodes)
    used = {
        term.name: [array for array in arrays if _depends_on(term, array.variables)]
        for term in terms.values()
    }
    _refuse_unscaled(model, used)
    leaves = {
        array: RowLeaf(array.name, array.variables, np.asarray(value_of(array.source)))
        for array in arrays
        if any(array in needed for needed in used.values())
    }
    _refuse_different_draws(leaves)

    n_rows = len(next(iter(leaves.values())).values)
    batch_size = _minibatch_size(nodes[0])
    if batch_size > n_rows:
        raise ModelError(
            f"`pm.Minibatch` asks for {batch_size} rows of data that have {n_rows}. Give a "
            f"`batch_size` between 1 and {n_rows}."
        )
    for variable in model.observed_RVs:
        drawn = bool(used[variable.name])
        lengths = shape_of(model.rvs_to_values[variable])
        _check_total_size(variable, [n_rows, *lengths[1:]] if drawn else lengths, drawn)
    return SeparatedModel(
        tuple(terms[name] for name, needed in used.items() if not needed),
        tuple(terms[name] for name, needed in used.items() if needed),
        _merge(leaves.values()),
        n_rows,
        batch_size,
    )


def _refuse_unscaled(model: Model, used: Mapping[str, list]) -> None:
    potentials = {potential.name for potential in model.potentials}
    free = {variable.name for variable in model.free_RVs}
    for name, needed in used.items():
        if needed and name in potentials:
            raise ModelError(
                f"The potential `{name}` depends on minibatched data. PyMC does not scale "
                "potentials to the full data, so its weight would be wrong by N/n. Write it as "
                "an observed variable with `total_size`, for example `pm.CustomDist`, or build "
                "the model on the full arrays and pass `batch_size` to the step method."
            )
        if needed and name in free:
            raise ModelError(
                f"The prior of the free variable `{name}` depends on minibatched data, so it "
                "would change with the rows drawn. Only observed variables may depend on "
                "`pm.Minibatch`."
            )


def _refuse_different_draws(leaves: Mapping[_DrawnArray, RowLeaf]) -> None:
    described = ", ".join(f"`{leaf.name}` of shape {leaf.values.shape}" for leaf in leaves.values())
    if len({len(leaf.values) for leaf in leaves.values()}) > 1:
        raise ModelError(
            f"The model minibatches data with different numbers of rows ({described}). One set "
            "of rows must drive the whole likelihood: minibatch one block of data and give the "
            "other in full."
        )
    calls = len({array.generator for array in leaves})
    if calls > 1:
        raise ModelError(
            f"The minibatched data come from {calls} separate `pm.Minibatch` calls ({described}), "
            "which draw different rows, so that predictors and outcome do not belong together. "
            "Use a single call: `X_batch, y_batch = pm.Minibatch(X, y, batch_size=...)`."
        )


def _minibatch_size(node) -> int:
    length = node.outputs[0].type.shape[0]
    return int(value_of(pt.shape(node.outputs[0])[0])) if length is None else int(length)


# --- Ordinary models ----------------------------------------------------------------------


def _separate_ordinary_model(
    model: Model, terms: dict[str, Term], rows: str | Sequence[str] | None
) -> SeparatedModel:
    observed = {variable.name: variable for variable in model.observed_RVs}
    for variable in observed.values():
        _check_total_size(variable, shape_of(model.rvs_to_values[variable]), drawn=False)
    lengths = _row_lengths(model, rows)
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"`{name}` has {length}" for name, length in lengths.items())
        raise ModelError(
            f"The data have different numbers of rows ({listed}), so one set of rows cannot "
            "drive them all. Name those to subsample, for example "
            f'`rows=["{max(lengths, key=lambda name: lengths[name])}"]`; the others are then '
            "evaluated in full."
        )
    n_rows = next(iter(lengths.values()))
    if n_rows < 2:
        raise _too_few_rows(model, next(iter(lengths)))

    named_data = lengths.keys() - observed.keys()
    # Where data variables are named, the others have no rows; but `rows=["X", "y"]` means the
    # data variable that `y` is observed as too.
    observations = [
        model.rvs_to_values[observed[name]] for name in lengths.keys() & observed.keys()
    ]
    left_out = {
        variable for variable in model.data_vars if named_data and variable.name not in named_data
    }.difference(ancestors(observations))
    may_have_rows = {
        *(name for name in lengths if name in observed),
        *(potential.name for potential in model.potentials),
    }
    leaves: dict[Variable, RowLeaf] = {}
    full_terms: list[Term] = []
    row_terms: list[Term] = []
    for term in terms.values():
        found = _row_leaves(term, n_rows, left_out) if term.name in may_have_rows else {}
        leaves = found | leaves
        (row_terms if found else full_terms).append(term)
    missing = (lengths.keys() & observed.keys()) - {term.name for term in row_terms}
    if missing or not row_terms:
        name = f"observed variable `{missing.pop()}`" if missing else "model"
        raise ModelError(
            f"The data of the {name} were not found in its log density as an array with one "
            "entry a row. Pass the data as an array or `pm.Data`."
        )
    return SeparatedModel(
        tuple(full_terms),
        tuple(row_terms),
        _merge(leaves.values()),
        n_rows,
        None,
        _lengths_of_rows(model, n_rows),
    )


def _too_few_rows(model: Model, name: str) -> ModelError:
    """Error for data that have fewer than two rows."""
    shape = tuple(shape_of(model.rvs_to_values.get(model[name], model[name])))
    advice = (
        "Transpose the data, so that the rows come first."
        if max(shape) > 1
        else "Give all of the data, or sample the model with NUTS: `pm.sample()`."
    )
    return ModelError(
        f"`{name}` has shape {shape}, so that its first axis has {shape[0]} "
        f"{'row' if shape[0] == 1 else 'rows'}, but at least 2 are needed to subsample. {advice}"
    )


def _row_lengths(model: Model, rows: str | Sequence[str] | None) -> dict[str, int]:
    """Numbers of rows of the observed variables to subsample, and of data variables named."""
    observed = {
        variable.name: shape[0]
        for variable in model.observed_RVs
        if (shape := shape_of(model.rvs_to_values[variable]))
    }
    data = {
        variable.name: shape[0] for variable in model.data_vars if (shape := shape_of(variable))
    }
    if rows is None:
        if observed:
            return observed
        raise ModelError(
            "No observed variable has a leading axis of rows, so there is nothing to subsample. "
            + (
                "If a potential is the likelihood, name the data that it runs over, for example "
                '`rows=["X"]` with a `pm.Data` variable `X`.'
                if model.potentials
                else "Sample the model with NUTS: `pm.sample()`."
            )
        )

    if not rows:
        raise ModelError(f"`rows` should name the data that run over the rows, but is {rows!r}.")
    found: dict[str, int] = {}
    for given in [rows] if isinstance(rows, str) else rows:
        name = given if given in observed or given in data else model.name_for(given)
        over_dimension = [
            variable for variable, dims in model.named_vars_to_dims.items() if given in dims[:1]
        ]
        names = [name for name in [name, *over_dimension] if name in observed or name in data]
        if not names:
            raise ModelError(
                f"`rows` names `{given}`, which is no observed variable, data variable or "
                "dimension with rows. Observed variables with rows: "
                f"{sorted(observed)}; data variables: {sorted(data)}; dimensions: "
                f"{sorted(model.coords)}."
            )
        found |= {name: observed[name] if name in observed else data[name] for name in names}
    if not observed.keys() & found.keys():
        wanted = set(found.values())
        found = {name: length for name, length in observed.items() if length in wanted} | found
    return found


def _row_leaves(term: Term, n_rows: int, left_out: Collection[Variable]) -> dict[Variable, RowLeaf]:
    """Arrays in a term that have as many entries along one axis as there are rows."""
    leaves = {}
    for variable in ancestors([term.log_density]):
        values = leaf_value(variable)
        if values is None or n_rows not in values.shape or variable in left_out:
            continue
        # Rows lead in the data of a user, but PyTensor turns constants of a model into other
        # constants: the rows of `pt.stack([x, z])` lie along the last axis.
        axis = values.shape.index(n_rows)
        name = variable.name or f"array of shape {values.shape} in {term.name}"
        if axis:
            values = np.ascontiguousarray(np.moveaxis(values, axis, 0))
        leaves[variable] = RowLeaf(name, (variable,), values, axis)
    return leaves


def _lengths_of_rows(model: Model, n_rows: int) -> tuple[Variable, ...]:
    """Shared lengths of dimensions that are as long as the data, and no parameter's."""
    of_parameters = {
        dimension
        for variable in model.free_RVs
        for dimension in model.named_vars_to_dims.get(variable.name, ())
    }
    return tuple(
        length
        for name, length in model.dim_lengths.items()
        if name not in of_parameters
        and isinstance(length, SharedVariable)
        and int(length.get_value()) == n_rows
    )


# --- Both ---------------------------------------------------------------------------------


def _merge(leaves: Iterable[RowLeaf]) -> tuple[RowLeaf, ...]:
    """One leaf for arrays that are the same: each costs a copy of the data, and reading it."""
    merged: list[RowLeaf] = []
    for leaf in leaves:
        for number, other in enumerate(merged):
            if (
                leaf.axis == other.axis
                and leaf.values.dtype == other.values.dtype
                and np.array_equal(leaf.values, other.values)
            ):
                merged[number] = replace(other, variables=other.variables + leaf.variables)
                break
        else:
            merged.append(leaf)
    return tuple(merged)
