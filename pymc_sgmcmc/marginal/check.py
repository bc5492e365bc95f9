"""Evaluate the joint log density of groups before anything relies on it.

* The groups together are the log density of the local and observed variables as PyMC makes it.
* A few groups have the same log density alone as among all: no group depends on another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from pymc.model import Model
from pytensor.graph.replace import clone_replace
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.compiling.compiled import PYTHON_MODE, compile_quietly, without_blas_warning
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.marginal.blocks import join_blocks
from pymc_sgmcmc.marginal.density import GroupDensity
from pymc_sgmcmc.marginal.structure import LocalStructure
from pymc_sgmcmc.posterior.agreement import agree, first_to_pass, is_sum, precision_of
from pymc_sgmcmc.posterior.bad_rows import first_line
from pymc_sgmcmc.posterior.terms import reference_terms, without_scaling

CHECKED_GROUPS = 20
"""This many random groups are evaluated alone. It is a compromise between the time of the check and
the chance to meet a group that is treated wrongly."""

FULL_CHECK_RECORDS = 2_000_000
"""All groups are compared with the log density of the model where they have at most this many
records, so that the check stays short."""

SEED = 20_180_901
"""The random groups and positions come from this fixed seed, so that the same model gives the same
result."""


class Evaluated:
    """The joint log density of groups at random positions, as functions of NumPy.

    Parameters
    ----------
    model : pymc.Model
    density : GroupDensity
    point : dict of str to numpy.ndarray, optional
        Values of the value variables, by default `random_point`.
    """

    def __init__(
        self, model: Model, density: GroupDensity, point: dict[str, np.ndarray] | None = None
    ):
        self.density = density
        self._model = model
        self._of_globals = model.replace_rvs_by_values([model[name] for name in density.parameters])
        self.point = random_point(model) if point is None else point
        self.block = join_blocks(density.structure, self.point)

    def function(
        self, graphs: list, block: TensorVariable | None = None
    ) -> Callable[..., list[np.ndarray]]:
        """Function of blocks and numbers of groups, at the position or at a given one.

        Parameters
        ----------
        graphs : list of TensorVariable
        block : TensorVariable, optional
            The placeholder for the blocks. Default: that of the density.
        """
        density, model = self.density, self._model
        block = density.block if block is None else block
        parameters = dict(zip(density.parameters.values(), self._of_globals, strict=True))
        at_values = clone_replace(graphs, parameters, rebuild_strict=False)
        values = [v for v in model.value_vars if v not in density.structure.values]
        inputs = [block, density.numbers, *values]
        function = compile_quietly(inputs, at_values, PYTHON_MODE, allow_input_downcast=True)

        def evaluate(
            blocks: np.ndarray, numbers: np.ndarray, at: Mapping[str, np.ndarray] = self.point
        ) -> list[np.ndarray]:
            with np.errstate(all="ignore"):
                return function(blocks, numbers, *(at[value.name] for value in values))

        return evaluate


def random_point(model: Model) -> dict[str, np.ndarray]:
    """Values of the value variables near the initial point of a model."""
    rng = np.random.default_rng(SEED)
    return {
        name: value + 0.3 * rng.normal(size=np.shape(value))
        for name, value in model.initial_point().items()
    }


def checked_density(model: Model, structure: LocalStructure) -> GroupDensity:
    """The joint log density of groups, in the first reading of the graph that passes the check.

    Raises
    ------
    ModelError
        Where the groups are not independent given the global variables.
    """
    point = random_point(model)

    def check(reading: dict[str, bool]) -> GroupDensity:
        try:
            with without_blas_warning():
                density = GroupDensity(structure, **reading)
                _check(model, density, point)
                return density
        except ModelError:
            raise
        except Exception as error:
            reason = "something else in the model may be as long as there are groups "
            raise _not_independent(structure, f"{reason}({first_line(error)})") from error

    readings = (
        {"by_group": by_group, "only_beside_rows": only_beside_rows}
        for by_group in ((True, False) if structure.axes_of_groups else (True,))
        for only_beside_rows in (False, True)
    )
    return first_to_pass(readings, check)


def _check(model: Model, density: GroupDensity, point: dict[str, np.ndarray]) -> None:
    structure = density.structure
    evaluated = Evaluated(model, density, point)
    evaluate = evaluated.function([density.value])
    block, n_groups = evaluated.block, structure.n_groups
    rng = np.random.default_rng(SEED)
    chosen = rng.choice(n_groups, size=min(CHECKED_GROUPS, n_groups), replace=False)
    (together,) = evaluate(block[chosen], chosen)
    first = max(1, len(chosen) // 3)
    apart = [evaluate(block[part], part)[0] for part in (chosen[:first], chosen[first:])]
    largest = np.abs(together[np.isfinite(together)]).max(initial=0.0)
    if not agree(np.concatenate(apart), together, 1 + largest, precision_of(together.dtype)):
        raise _not_independent(structure, "some groups have another log density alone")
    if structure.column is None and structure.n_records > FULL_CHECK_RECORDS:
        return
    (values,) = evaluate(block, np.arange(n_groups))
    names = {term.name for term in structure.terms}
    terms = [term for name, term in reference_terms(model, {}).items() if name in names]
    total = sum(term.log_density.sum() for term in terms)
    inputs = model.value_vars
    expected = compile_quietly(inputs, total, PYTHON_MODE, allow_input_downcast=True)
    with np.errstate(all="ignore"):
        reference = expected(*(point[value.name] for value in inputs))
    if not is_sum([values.sum()], reference, reference.dtype, [values]):
        scaled = [
            name for name in structure.observed if without_scaling(model[name]) is not model[name]
        ]
        if scaled:
            raise ModelError(
                f"The model should be on the full data, but {quoted(scaled)} has another "
                "`total_size`. Leave it out."
            )
        raise _not_independent(structure, "the groups do not add up to that of the model")


def _not_independent(structure: LocalStructure, reason: str) -> ModelError:
    names = ", ".join(f"`{name}`" for name in structure.names)
    return ModelError(
        f"The {structure.n_groups} groups of {names} are not independent given the other "
        f"variables: {reason}. Integrate out only variables with one entry a group and no "
        "relation between groups, unlike time series, spatial effects or zero-sum effects."
    )
