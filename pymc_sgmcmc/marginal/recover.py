"""Draws of local variables that were integrated out, for each draw of the global ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr
from pymc.model import Model
from pytensor.graph.replace import clone_replace
from pytensor.tensor.variable import TensorVariable
from rich.progress import Progress
from xarray import DataTree

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.compiling.compiled import (
    NUMPY_MODE,
    compile_on_arrays,
    quick_graphs,
    without_blas_warning,
)
from pymc_sgmcmc.marginal.blocks import split_blocks
from pymc_sgmcmc.marginal.check import checked_density
from pymc_sgmcmc.marginal.conditional import Conditional, GroupDraws
from pymc_sgmcmc.marginal.exact import is_quadratic
from pymc_sgmcmc.marginal.interpolation import polynomials_of
from pymc_sgmcmc.marginal.marginalize import dependent_deterministics, names_of
from pymc_sgmcmc.marginal.result import dims_of
from pymc_sgmcmc.marginal.structure import LocalStructure, find_structure
from pymc_sgmcmc.posterior.graphs import shape_of
from pymc_sgmcmc.posterior.position import given_model
from pymc_sgmcmc.record import settings_of, stored_local
from pymc_sgmcmc.seeds import generator

_log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold

STATISTICS = "recover_stats"
"""The group of a trace for the effective sample sizes."""

EFFECTIVE = "effective_fraction"
"""The name of the effective sample sizes, as fractions of the number of proposals."""

SMALLEST_FRACTION = 0.1
"""A warning is given where groups have a smaller fraction. Then the weights vary so much that the
bound on the error, from the weights that were met, may be too small."""

EXAMPLES = 3
"""Second modes are searched at this many draws, evenly spaced over the trace. It is a compromise
between the time of a search, some 400 points a group, and the chance to miss modes."""


def recover(
    idata: DataTree,
    model: Model,
    names: str | TensorVariable | Sequence[str | TensorVariable] | None = None,
    *,
    groups: Any = None,
    random_seed: Any = None,
    progressbar: bool = True,
) -> DataTree:
    r"""Draw the local variables that `marginalize` integrated out.

    For each draw of the global variables θ in the trace and each group g, one draw is added of
    :math:`u_g \sim p(u_g \mid y_g, \theta)`. Together they are draws of the posterior of the
    original model. The deterministics of the model that depend on the local variables are computed
    from them.

    Parameters
    ----------
    idata : xarray.DataTree
        Trace of the model of groups, or of a step method with `LocalSampling`. It is not changed.
    model : pymc.Model
        The original model, that was given to `marginalize`. Where it is written on the first rows
        of a source, the records are read from there, of as many groups as its memory takes.
    names : str, variable, or a sequence of these, optional
        The local variables. Default: the free variables of the model that the trace lacks. Those
        that a step method has sampled by `LocalSampling` are drawn anew.
    groups : sequence, optional
        Draw for these groups alone: labels of the dimension of the groups where the model has
        labels for it, otherwise their numbers. Numbers also serve where the labels are text.
        Deterministics need all groups and are left out then.
    random_seed : optional
        Seed, as for `numpy.random.default_rng`. The same seed gives the same draws.
    progressbar : bool

    Returns
    -------
    xarray.DataTree
        A copy of the trace with the local variables in its ``posterior``, on their original scale
        and with the dimensions of the model. For blocks of several quantities that are not
        Gaussian it has a group ``recover_stats`` as well, see below.

    Raises
    ------
    ModelError
        Where variables are not local, as in `marginalize`.
    ValueError
        Where the trace is not one of this model, there is nothing to recover, groups are unknown,
        or a log density is not finite.
    TypeError
        Where the trace is no DataTree or the model no PyMC model.

    Notes
    -----
    How a draw is made, and its error given θ:

    * Where the joint log density is quadratic in the block (linear mixed models), it is an exact
      draw from a Gaussian.
    * A block of one quantity is drawn by inversion of the distribution function, whose error is
      below 1e-4. Heavy tails, kinks and skewness are followed. Second modes are searched at three
      of the draws, up to 1000 standard deviations from the first. Where the trace has hundreds of
      draws and few global variables, the log density of a group is a polynomial in these, fitted to
      some of the draws. The distribution functions are compared with the group's own at 40 others,
      half of them the farthest, and a group in which they differ by 2e-5 is drawn without it.
    * A larger block is the last state of 16 to 256 Metropolis steps from a Student-t proposal at
      the mode. The error in total variation is below 1e-3 by the weights that were met. The
      effective sample size of the weights, as a fraction of the proposals and as a mean over the
      draws, is ``recover_stats["effective_fraction"]``. It is near 1 for a law near a Gaussian. A
      warning tells how many groups are below 0.1. What no proposal meets is missed without a
      warning: a second mode far away, or the bulk of a law far from its mode, as of an effect
      together with its own scale.

    References
    ----------
    Mengersen and Tweedie (1996), Rates of convergence of the Hastings and Metropolis algorithms.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sgmcmc.marginal import marginalize, recover
    >>> rng = np.random.default_rng(1)
    >>> school = np.repeat(np.arange(30), 5)
    >>> score = rng.normal(size=30)[school] + rng.normal(size=150)
    >>> with pm.Model(coords={"school": np.arange(30)}) as model:
    ...     mean = pm.Normal("mean")
    ...     effect = pm.Normal("effect", dims="school")
    ...     _ = pm.Normal("score", mean + effect[school], 1.0, observed=score)
    >>> with marginalize(model, "effect"):
    ...     idata = pm.sample(
    ...         draws=50, tune=50, chains=1, random_seed=1, progressbar=False, quiet=True
    ...     )
    >>> idata = recover(idata, model, random_seed=1, progressbar=False)
    >>> idata.posterior["effect"].dims
    ('chain', 'draw', 'school')
    """
    if not isinstance(idata, DataTree):
        raise TypeError(f"`idata` should be a DataTree, but got {type(idata).__name__}.")
    model = given_model(model)
    posterior = _posterior(idata)
    sampled = [name for name in stored_local(settings_of(idata)) if name in posterior]
    posterior = _without(posterior, sampled)
    structure = find_structure(model, _local_names(posterior, model, names), on_source=True)
    if sampled:
        # These are not of the same draw as the global variables either.
        dependent = [variable.name for variable in dependent_deterministics(model, structure)]
        posterior = _without(posterior, [name for name in dependent if name in posterior])
    _check_globals(posterior, model, structure)
    numbers = _numbers(groups, model, structure)
    rng = generator("random_seed", random_seed)

    with quick_graphs():
        density = checked_density(model, structure).on_source()
        conditional = Conditional(density, quadratic=is_quadratic(model, density))
    draws = _Draws(posterior, list(density.parameters))
    blocks, effective = _draw_blocks(conditional, draws, numbers, rng, progressbar)
    constrained = _constrained(model, structure, posterior, blocks, numbers)
    dataset = posterior.assign(_arrays(model, structure, constrained, numbers, posterior))
    if groups is None:
        dataset = dataset.assign(_deterministics(model, structure, dataset, progressbar))
    recovered = idata.copy()
    recovered["posterior"] = DataTree(dataset)
    if not conditional.quadratic and conditional.size > 1:
        name, labels = _dimension(model, structure, structure.names[0])
        values = xr.DataArray(effective, dims=name, coords={name: np.asarray(labels)[numbers]})
        recovered[STATISTICS] = DataTree(xr.Dataset({EFFECTIVE: values}))
        _warn_of_weights(effective, structure)
    return recovered


# --- Checks -----------------------------------------------------------------------------------


def _posterior(idata: DataTree) -> xr.Dataset:
    if "posterior" not in idata.children:
        present = ", ".join(f"`{name}`" for name in idata.children) or "no groups"
        raise ValueError(
            f"The trace should have a `posterior` group, but has {present}. Sample the model of "
            "`marginalize` first."
        )
    posterior = idata["posterior"].to_dataset()
    if not {"chain", "draw"} <= set(posterior.sizes) or not posterior.sizes["draw"]:
        raise ValueError(
            "The `posterior` of the trace should have dimensions `chain` and `draw` with at least "
            f"one draw, but has {dict(posterior.sizes)}."
        )
    return posterior


def _without(posterior: xr.Dataset, names: Sequence[str]) -> xr.Dataset:
    """The posterior without some variables, and without the dimensions that only they have."""
    kept = posterior.drop_vars(names)
    used = {"chain", "draw"}.union(*(values.dims for values in kept.data_vars.values()))
    return kept.drop_dims([dim for dim in kept.dims if dim not in used]) if names else posterior


def _local_names(posterior: xr.Dataset, model: Model, names: Any) -> list[str]:
    """Names of the local variables: those given, or those that the trace lacks."""
    free = [variable.name for variable in model.free_RVs]
    missing = [name for name in free if name not in posterior]
    if names is None:
        if not missing:
            raise ValueError(
                "The trace has draws of all free variables of the model, so there is nothing to "
                "recover. Pass the original model and the trace of the model of groups."
            )
        if missing == free:
            raise _another_model(f"has none of the free variables {quoted(free)}")
        return missing
    chosen = names_of(names)
    present = [name for name in chosen if name in free and name in posterior]
    if present:
        raise ValueError(
            f"The trace has draws of {quoted(present)} already. Name only variables that were "
            "integrated out."
        )
    return chosen


def _check_globals(posterior: xr.Dataset, model: Model, structure: LocalStructure) -> None:
    """The trace has all other variables of the model, with their shapes and labels."""
    for variable in model.free_RVs:
        name = variable.name
        if name in structure.names:
            continue
        if name not in posterior:
            raise _another_model(
                f"lacks `{name}`, which is not among the local variables {quoted(structure.names)}"
            )
        given = posterior[name]
        if set(given.dims[:2]) != {"chain", "draw"}:
            raise _another_model(f"has dimensions {given.dims} for `{name}`")
        wanted, shape = tuple(shape_of(variable)), given.shape[2:]
        if shape != wanted:
            raise _another_model(f"has shape {shape} a draw for `{name}`, not {wanted}")
        for dim, of_trace in zip(
            model.named_vars_to_dims.get(name) or (), given.dims[2:], strict=False
        ):
            if dim is None:
                continue
            labels = model.coords.get(dim)
            if dim != of_trace:
                raise _another_model(f"has dimension `{of_trace}` for `{name}`, not `{dim}`")
            if labels is not None and dim in posterior.coords:
                same = np.array_equal(np.asarray(labels), posterior.coords[dim].to_numpy())
                if not same:
                    raise _another_model(f"has other labels of `{dim}`")
        if not np.isfinite(given.to_numpy()).all():
            raise ValueError(
                f"The draws of `{name}` should be finite, but some are not. Drop the chains or "
                "draws that diverged."
            )


def _another_model(reason: str) -> ValueError:
    return ValueError(
        f"The trace is not one of this model with local variables integrated out: it {reason}. "
        "Pass the original model, and the trace of the model of groups."
    )


def _numbers(groups: Any, model: Model, structure: LocalStructure) -> np.ndarray:
    """Numbers of the groups that are named by labels or numbers."""
    n_groups = structure.n_groups
    if groups is None:
        return np.arange(n_groups)
    if any(local.n_axes > 1 for local in structure.locals):
        raise ValueError(
            f"`groups` should be left out, since those of {quoted(structure.names)} are cells of "
            "several dimensions. Select from the draws of all."
        )
    name, labels = _dimension(model, structure, structure.names[0])
    chosen = (
        list(np.atleast_1d(np.asarray(groups)).ravel()) if not isinstance(groups, str) else [groups]
    )
    places = {label: number for number, label in enumerate(np.asarray(labels).tolist())}
    if not any(isinstance(label, int) for label in places):
        places |= {number: number for number in range(n_groups)}
    chosen = [getattr(label, "item", lambda label=label: label)() for label in chosen]
    unknown = [
        label
        for label in chosen
        if isinstance(label, bool) or not isinstance(label, Hashable) or label not in places
    ]
    if unknown:
        raise ValueError(
            f"`groups` should be labels of `{name}` or numbers below {n_groups}, but got "
            f"{', '.join(map(repr, unknown[:5]))}."
        )
    numbers = np.array([places[label] for label in chosen], dtype=np.int64)
    if not len(numbers) or len(np.unique(numbers)) < len(numbers):
        raise ValueError(
            f"`groups` should name at least one group and each once, but got {groups!r}."
        )
    return numbers


# --- Draws ------------------------------------------------------------------------------------


class _Draws(Sequence[dict[str, np.ndarray]]):
    """Draws of some global variables, chain after chain."""

    def __init__(self, posterior: xr.Dataset, names: Sequence[str]):
        self._chains, self._draws = posterior.sizes["chain"], posterior.sizes["draw"]
        self._labels = [posterior[dim].to_numpy() for dim in ("chain", "draw")]
        self._values = {
            name: (values := posterior[name].transpose("chain", "draw", ...).to_numpy()).reshape(
                -1, *values.shape[2:]
            )
            for name in names
        }

    def __len__(self) -> int:
        return self._chains * self._draws

    @property
    def values(self) -> list[np.ndarray]:
        """Values of each variable, shape (draws, ...)."""
        return list(self._values.values())

    def __getitem__(self, draw: Any) -> Any:
        return {name: values[draw] for name, values in self._values.items()}

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        # There may be no variables, and no end of draws by an index out of range then.
        return (self[draw] for draw in range(len(self)))

    def where(self, draw: int) -> str:
        """The chain and the draw in words."""
        chain, within = divmod(draw, self._draws)
        return f"draw {self._labels[1][within]} of chain {self._labels[0][chain]}"


def _draw_blocks(
    conditional: Conditional,
    draws: _Draws,
    numbers: np.ndarray,
    rng: np.random.Generator,
    progressbar: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Unconstrained blocks, shape (draws, groups, q), and mean effective fractions, (groups,)."""
    blocks = np.empty((len(draws), len(numbers), conditional.size), dtype=conditional.dtype)
    effective = np.zeros(len(numbers))
    pieces = list(conditional.pieces(numbers))
    at = np.unique(np.linspace(0, len(draws) - 1, EXAMPLES).astype(int))
    examples = [draws[number] for number in at]
    polynomials = polynomials_of(draws.values)
    with Progress(disable=not progressbar) as progress:
        task = progress.add_task("Recovering", total=len(pieces) * len(draws))
        held = conditional.density.each_held([numbers[piece] for piece in pieces])
        for piece, generator, of_piece in zip(pieces, rng.spawn(len(pieces)), held, strict=True):
            law = GroupDraws(conditional, of_piece, examples)
            places = np.arange(*piece.indices(len(numbers)))
            if law.inverts:
                # The probabilities lie where the quantiles will be, since they are as many.
                for of_draw in blocks[:, piece, 0]:
                    of_draw[:] = generator.random(len(of_draw))
            if law.inverts and polynomials is not None:
                left = law.draw_all(draws, polynomials, blocks[:, piece, 0])
                law, places = law.of_some(left), places[left]
            for draw, parameters in enumerate(draws if len(places) else ()):
                uniforms = blocks[draw, places, 0] if law.inverts else None
                recovered = law.draw(parameters, generator, uniforms)
                if not np.isfinite(recovered.block).all():
                    wrong = ~np.isfinite(recovered.block).all(axis=1)
                    raise ValueError(
                        "The log density should be finite, but is not for group "
                        f"{numbers[places[np.argmax(wrong)]]} at {draws.where(draw)}. Check the "
                        "data of this group and the draws of the trace."
                    )
                blocks[draw, places] = recovered.block
                effective[places] += recovered.effective
                progress.advance(task)
            progress.advance(task, 0 if len(places) else len(draws))
    return blocks, effective / len(draws)


def _constrained(
    model: Model,
    structure: LocalStructure,
    posterior: xr.Dataset,
    blocks: np.ndarray,
    numbers: np.ndarray,
) -> dict[str, np.ndarray]:
    """Local variables on their original scale, shape (draws, ...), for the groups."""
    values = dict(zip(structure.names, split_blocks(structure, blocks).values(), strict=True))
    if all(model.rvs_to_transforms[model[name]] is None for name in structure.names):
        return values
    back = _inverse_transforms(model, structure)
    constrained: dict[str, list[np.ndarray]] = {name: [] for name in structure.names}
    # A transform may depend on the group or on global variables, so it takes all groups at once.
    whole = [np.zeros(local.shape, dtype=blocks.dtype) for local in structure.locals]
    for draw, parameters in enumerate(_Draws(posterior, _global_names(model, structure))):
        for local, array in zip(structure.locals, whole, strict=True):
            of_draw = values[local.name][draw]
            if local.n_axes > 1:  # These are all groups.
                array[:] = of_draw
            else:
                np.moveaxis(array, local.axis, 0)[numbers] = np.moveaxis(of_draw, local.axis, 0)
        for local, array in zip(structure.locals, back(*whole, *parameters.values()), strict=True):
            constrained[local.name].append(
                array if local.n_axes > 1 else np.take(array, numbers, axis=local.axis)
            )
    return {name: np.stack(arrays) for name, arrays in constrained.items()}


def _inverse_transforms(model: Model, structure: LocalStructure) -> Callable[..., list]:
    """Function of unconstrained local and constrained global variables."""
    parameters = {
        model[name]: model[name].type(name=name) for name in _global_names(model, structure)
    }
    replacements: dict[TensorVariable, TensorVariable] = dict(parameters)
    outputs = []
    for local in structure.locals:
        variable = model[local.name]
        transform = model.rvs_to_transforms[variable]
        constrained = local.value
        if transform is not None:
            inputs = clone_replace(variable.owner.inputs, replacements, rebuild_strict=False)
            constrained = transform.backward(local.value, *inputs)
        replacements[variable] = constrained
        outputs.append(constrained)
    values = [local.value for local in structure.locals]
    inputs = [*values, *parameters.values()]
    return compile_on_arrays(inputs, outputs, NUMPY_MODE, allow_input_downcast=True)


def _global_names(model: Model, structure: LocalStructure) -> list[str]:
    return [v.name for v in model.free_RVs if v.name not in structure.names]


# --- Arrays with names ------------------------------------------------------------------------


def _dimension(model: Model, structure: LocalStructure, name: str) -> tuple[str, Any]:
    """Name and labels of the dimension of a local variable that runs over the groups.

    Where groups are cells of several dimensions it has the names of these, and numbers.
    """
    (local,) = (local for local in structure.locals if local.name == name)
    dims = dims_of(model, name, model[name].type.ndim)
    dim = "_".join(dims[local.axis : local.axis + local.n_axes])
    labels = model.coords.get(dim)
    return dim, np.arange(structure.n_groups) if labels is None else labels


def _arrays(
    model: Model,
    structure: LocalStructure,
    constrained: dict[str, np.ndarray],
    numbers: np.ndarray,
    posterior: xr.Dataset,
) -> dict[str, xr.DataArray]:
    """Local variables with the dimensions and labels of the model."""
    arrays = {}
    sizes = posterior.sizes["chain"], posterior.sizes["draw"]
    for local in structure.locals:
        values = constrained[local.name]
        dims = dims_of(model, local.name, values.ndim - 1)
        coords: dict[str, Any] = {dim: posterior[dim] for dim in ("chain", "draw")}
        for axis, dim in enumerate(dims):
            labels = model.coords.get(dim)
            of_groups = axis == local.axis and local.n_axes == 1
            length = structure.n_groups if of_groups else values.shape[axis + 1]
            labels = np.arange(length) if labels is None else np.asarray(labels)
            coords[dim] = labels[numbers] if of_groups else labels
        arrays[local.name] = xr.DataArray(
            values.reshape(*sizes, *values.shape[1:]), coords, ("chain", "draw", *dims)
        )
    return arrays


def _deterministics(
    model: Model, structure: LocalStructure, posterior: xr.Dataset, progressbar: bool
) -> dict[str, xr.DataArray]:
    """Deterministics that depend on local variables."""
    names = [variable.name for variable in dependent_deterministics(model, structure)]
    if not names:
        return {}
    with without_blas_warning():
        computed = pm.compute_deterministics(
            posterior, var_names=names, model=model, progressbar=progressbar
        )
    return {name: computed[name] for name in names}


def _warn_of_weights(effective: np.ndarray, structure: LocalStructure) -> None:
    poor = int((effective < SMALLEST_FRACTION).sum())
    if poor:
        _log.warning(
            f"The draws of {quoted(structure.names)} may be wrong in {poor} of {len(effective)} "
            "groups, whose law is far from a Student-t law: see "
            f'`idata["{STATISTICS}"]["{EFFECTIVE}"]`. Compare them with draws of NUTS.'
        )
