"""Evaluate the split of a log density into rows before anything relies on it.

Replacing data in a graph can go wrong without an error: a data array is missed, a table indexed by
group has the length N by chance, or there is a cumulative sum along the rows. Each of these breaks
one of two identities, which are evaluated at a random position:

* the log likelihood of rows, and its gradient, is the sum over parts of them, for random rows and
  for rows that are chosen by their values, see `pymc_sgmcmc.posterior.parts`;
* prior and rows together are the log density, and the gradient, of the model as PyMC makes it. For
  `pm.Minibatch` this is checked on a minibatch, for an ordinary model on all rows (where the data
  are not too large).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.model import Model
from pymc.pytensorf import rewrite_pregrad
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.compiling.compiled import PYTHON_MODE, compile_on_arrays, compile_quietly
from pymc_sgmcmc.compiling.graph_notes import copy_without_notes
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.agreement import first_to_pass, is_sum
from pymc_sgmcmc.posterior.bad_rows import (
    code_error,
    first_line,
    first_row_out_of_range,
    naming_advice,
)
from pymc_sgmcmc.posterior.graphs import leaf_value
from pymc_sgmcmc.posterior.parts import FEW_ROWS, Comparison, blocks_of, comparisons
from pymc_sgmcmc.posterior.position import PositionLayout, untransformed
from pymc_sgmcmc.posterior.rows import SeparatedModel, Term, record_of
from pymc_sgmcmc.posterior.terms import reference_terms

MANY_ROWS = 2000
"""Functions that NumPy does not have are compiled for more rows than this. For fewer rows Python
takes less time than a compiler."""

FULL_CHECK_ELEMENTS = 5_000_000
"""The rows are compared with the log density of the model itself where they have at most this many
array elements, 40 MB, so that the check stays short and needs little memory."""

NEAR = 3e-5
"""Rows that were chosen by their values are compared at this distance besides, where the rounding
error of a large derivative does not hide the others."""

DISTANCES = (0.3, 3e-3, 3e-5, 3e-7)
"""Positions of the check are at about these distances from the initial point in each coordinate. A
predictor of large numbers makes some densities infinite or zero where its slope is not small."""

SEED = 20_170_616
"""The random rows and positions of the check come from this fixed seed, so that the same model
gives the same result."""


@dataclass(frozen=True)
class _Setting:
    """The arguments that the parts of the check share."""

    separated: SeparatedModel
    layout: PositionLayout
    others: Mapping[TensorVariable, Variable]
    position: np.ndarray
    near: np.ndarray

    @property
    def n_rows(self) -> int:
        return self.separated.n_rows

    @property
    def batch_size(self) -> int | None:
        return self.separated.batch_size

    @property
    def compare_rows(self) -> bool:
        """Whether there are few enough rows to compare them with the log density of the model."""
        rows = self.n_rows if self.batch_size is None else self.batch_size
        return rows * self.separated.widest_row(self.layout) <= FULL_CHECK_ELEMENTS

    def take(self, selection: slice | np.ndarray) -> list[np.ndarray]:
        return [leaf.values[selection] for leaf in self.separated.leaves]

    def values_and_gradients(
        self, log_densities: Sequence[TensorVariable], rows: Sequence[TensorVariable]
    ) -> Callable[..., list[np.ndarray]]:
        """Function of rows that gives each log density and its gradient, joined in one vector."""
        layout = self.layout
        totals = clone_replace(
            [log_density.sum() for log_density in log_densities],
            dict(self.others),
            rebuild_strict=False,
        )
        graph = copy_without_notes(totals)
        rewrite_pregrad(graph)
        vectors = []
        for total in graph.outputs:
            vectors.append(pt.concatenate([pt.atleast_1d(total), layout.gradient(total)]))
        position = pt.tensor("position", shape=(layout.dimension,), dtype=layout.dtype)
        outputs = clone_replace(vectors, layout.split(position), rebuild_strict=False)
        if self.n_rows > MANY_ROWS:
            function = compile_on_arrays([position, *rows], outputs, PYTHON_MODE)
        else:
            # Otherwise the inner graph of a scan would be compiled in C for a few calls.
            with pytensor.config.change_flags(cxx=""):
                function = compile_quietly([position, *rows], outputs, PYTHON_MODE)

        def evaluate(*arrays: np.ndarray, near: bool = False) -> list[np.ndarray]:
            with np.errstate(all="ignore"):  # outside the support
                return function(self.near if near else self.position, *arrays)

        return evaluate

    def are_sums(
        self,
        parts: Sequence[np.ndarray],
        whole: np.ndarray,
        besides: Sequence[np.ndarray] = (),
    ) -> bool:
        """Whether log densities add up to another one, and their gradients to its gradient.

        A predictor of large numbers makes one derivative large, and rounding of all others.
        """
        vectors, dtype = (parts, [whole], besides), self.layout.dtype
        for part in (slice(0, 1), slice(1, None)):
            summands, (total,), others = ([each[part] for each in some] for some in vectors)
            if not is_sum(summands, total, dtype, others):
                return False
        return True


def check_separation(
    model: Model,
    separated: SeparatedModel,
    layout: PositionLayout,
    others: Mapping[TensorVariable, Variable],
    initial_position: np.ndarray,
    *,
    checked: bool = False,
) -> SeparatedModel:
    """Refuse a model whose rows are not separable, naming the variable.

    Returns
    -------
    SeparatedModel
        The first reading of the split that passes.

    Raises
    ------
    ModelError
        Where data are not finite, where a log density cannot be evaluated on some of the
        rows, or where its parts do not add up.
    """
    infinite = infinite_entries(separated)
    reference = partial(reference_terms, model, checked=checked)
    noise = np.random.default_rng(SEED).normal(size=layout.dimension)

    def check(candidate: SeparatedModel) -> SeparatedModel:
        # Outside the support both sides of each identity are infinite or NaN, and the check has no
        # result. Positions nearer to the initial point are tried then.
        for distance in DISTANCES:
            position, near = (
                (initial_position + far * noise).astype(layout.dtype) for far in (distance, NEAR)
            )
            setting = _Setting(candidate, layout, others, position, near)
            if _check(reference, setting, [place for _, place in infinite.values()]):
                return candidate
        # Infinite bounds of `pm.Censored` have a gradient, and those of `pm.Truncated` have none.
        if infinite:
            remedy = "Give bounds as large finite numbers, and drop or impute other such rows"
            name, (row, _) = next(iter(infinite.items()))
            raise _not_finite(name, row, remedy)
        return candidate

    return first_to_pass(separated.readings(), check)


def infinite_entries(separated: SeparatedModel) -> dict[str, tuple[int, int]]:
    """First row with an infinite entry, by the names of the data that have one.

    It is the number in these data, and that among all rows.

    Raises
    ------
    ModelError
        Where data have NaN entries.
    """
    found: dict[str, tuple[int, int]] = {}
    parts = [part for leaf in separated.leaves for part in leaf.parts or ((0, leaf),)]
    for first, leaf in parts:
        if leaf.values.dtype.kind != "f":
            continue
        for start, block in blocks_of(leaf.values):
            if np.isfinite(block).all():
                continue
            bad = np.flatnonzero(~np.isfinite(block).all(1))
            row = start + int(bad[0])
            found.setdefault(leaf.name, (row, first + row))
            unknown = np.flatnonzero(np.isnan(block[bad]).any(1))
            if len(unknown):
                raise _not_finite(
                    leaf.name, start + int(bad[unknown[0]]), "Drop or impute such rows first"
                )
    return found


def _not_finite(name: str, row: int, remedy: str) -> ModelError:
    return ModelError(
        f"The data `{name}` have a NaN or infinite entry, the first in row {row}. {remedy}."
        f"{naming_advice([name])}"
    )


def _check(
    reference: Callable[..., dict[str, Term]], setting: _Setting, besides: list[int]
) -> bool:
    """Evaluate the identities, and return whether all values were finite.

    `reference` makes the terms of the model as PyMC has them, from symbolic rows. The rows
    `besides` are evaluated with the random ones.
    """
    separated, n_rows, batch_size = setting.separated, setting.n_rows, setting.batch_size
    rng = np.random.default_rng(SEED)
    sampled = rng.choice(n_rows, size=min(FEW_ROWS, n_rows), replace=False)
    sampled = np.concatenate([sampled, np.setdiff1d(besides, sampled)]).astype(int)
    # The comparison with the model uses a minibatch of its size, or all rows.
    of_model = np.arange(n_rows) if batch_size is None else rng.choice(n_rows, size=batch_size)
    scale = 1.0 if batch_size is None else n_rows / batch_size
    arrays = [leaf.values for leaf in separated.leaves]
    to_compare = comparisons(arrays, sampled, of_model if setting.compare_rows else None, rng)

    conclusive = True
    of_rows = []
    rows = [leaf.placeholder() for leaf in separated.leaves]
    for term in separated.row_terms:
        try:
            only_this = replace(separated, row_terms=(term,))
            density = only_this.row_log_densities(rows, rows[0].shape[0])
            at = _OfRows(setting, setting.values_and_gradients(density, rows))
            conclusive &= bool(np.isfinite(at(sampled)).all())
            reason = _first_difference(setting, at, to_compare)
            if setting.compare_rows:
                of_rows.append((term, scale * at(of_model)))
        except IndexError as error:
            if at.all_codes_are_good():
                reason = f"a code of one row selects another row ({first_line(error)})"
                raise _not_separable(term, setting, reason) from error
            raise _bad_code(at, error) from None
        except Exception as error:
            reason = f"its evaluation on some of the rows failed ({first_line(error)})"
            fails = _of_shapes(reference, term, setting)
            raise fails or _not_separable(term, setting, reason) from error
        if reason is not None:
            raise _not_separable(term, setting, reason)

    drawn = [leaf.placeholder(batch_size) for leaf in separated.leaves]
    inputs = [] if batch_size is None else drawn
    of_model_terms = reference(dict(zip(separated.leaves, drawn, strict=True)) if inputs else {})
    likelihood_names = {name for term in separated.row_terms for name in term.names}
    expected_prior = [
        term.log_density.sum()
        for name, term in of_model_terms.items()
        if name not in likelihood_names
    ]
    evaluate = setting.values_and_gradients(
        [
            sum(term.log_density.sum() for term in separated.full_terms),
            sum(expected_prior),
            *(
                sum(of_model_terms[name].log_density.sum() for name in term.names)
                for term, _ in of_rows
            ),
        ],
        inputs,
    )
    actual, expected, *expected_of_rows = evaluate(*(setting.take(of_model) if inputs else ()))
    if not setting.are_sums([actual], expected):
        names = ", ".join(f"`{term.name}`" for term in separated.full_terms)
        raise ModelError(
            f"The log densities of {names} change when the model is split into rows and the rest. "
            "Please report the model."
        )
    for (term, actual), expected in zip(of_rows, expected_of_rows, strict=True):
        if not setting.are_sums([actual], expected):
            raise _not_separable(
                term, setting, "the rows do not add up to the log density of the model"
            )
    return conclusive


class _OfRows:
    """Log density and gradient of rows by their numbers, each array of which is evaluated once.

    Parameters
    ----------
    setting : _Setting
    evaluate : callable
        See `_Setting.values_and_gradients`.
    """

    def __init__(self, setting: _Setting, evaluate: Callable[..., list[np.ndarray]]):
        self.setting, self.evaluate = setting, evaluate
        # The arrays are kept, so that no other has the same id.
        self._known: dict[tuple[int, bool], tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, numbers: np.ndarray, near: bool = False) -> np.ndarray:
        key = id(numbers), near
        if key not in self._known:
            # NumPy has another arithmetic for single elements, such as other powers.
            twice = np.repeat(numbers, 2) if len(numbers) == 1 else numbers
            (total,) = self.evaluate(*self.setting.take(twice), near=near)
            self._known[key] = numbers, total * (len(numbers) / len(twice))
        return self._known[key][1]

    def all_codes_are_good(self) -> bool:
        """Whether indices are in range where all rows are there, as those of a table of them."""
        if self.setting.batch_size is not None or not self.setting.compare_rows:
            return False
        try:
            self.evaluate(*self.setting.take(slice(None)))
        except IndexError:
            return False
        return True


def _first_difference(
    setting: _Setting, at: _OfRows, to_compare: Sequence[Comparison]
) -> str | None:
    """What it means where rows differ from the sum over their parts, None where none do."""
    for near in (False, True):
        for one in to_compare:
            if near and not one.by_value:
                continue
            parts, together = [at(part, near) for part in one.parts], at(one.rows, near)
            if setting.are_sums(parts, together):
                continue
            # Extreme values of both signs cancel in a part, and not their rounding errors.
            rows = np.unique(np.concatenate([each.rows for each in to_compare if each.by_value]))
            single = [at(row, near) for row in rows[:, None]]
            if not setting.are_sums(parts, together, single):
                return one.reason
    return None


def _of_shapes(
    reference: Callable[..., dict[str, Term]], term: Term, setting: _Setting
) -> ModelError | None:
    """Error where the model itself cannot be evaluated, as after `pm.set_data` for a prediction."""
    if setting.batch_size is not None:
        return None
    of_model = reference({})
    log_density = sum(of_model[name].log_density.sum() for name in term.names)
    try:
        setting.values_and_gradients([log_density], [])()
    except Exception as error:
        found = {leaf.name: leaf.values.shape for leaf in setting.separated.leaves}
        for variable in ancestors([log_density]):
            value = leaf_value(variable)
            if value is not None and value.ndim and isinstance(variable, SharedVariable):
                found.setdefault(variable.name, value.shape)
        shapes = ", ".join(f"`{name}` {shape}" for name, shape in found.items())
        return ModelError(
            f"The log likelihood of `{term.name}` cannot be evaluated ({first_line(error)}). "
            f"The data have the shapes {shapes}. Give predictors and outcomes the same rows: after "
            "a prediction set the data back by `pm.set_data`."
        )
    return None


def _not_separable(term: Term, setting: _Setting, reason: str) -> ModelError:
    separated, layout = setting.separated, setting.layout
    names = ", ".join(dict.fromkeys(f"`{leaf.name}`" for leaf in separated.leaves))
    local = [
        untransformed(name)
        for name, shape in zip(layout.names, layout.shapes, strict=True)
        if {separated.n_rows, separated.batch_size} & set(shape)
    ]
    by_row = [
        untransformed(value.name)
        for value in setting.others
        if separated.n_rows in value.type.shape[:1]
    ]
    left_out = [
        shared.name
        for shared, value in separated.copied
        if shared.name and np.shape(value)[:1] == (separated.n_rows,)
    ]
    if by_row:
        advice = (
            f"`{by_row[0]}`, which another step method moves, has one element a row: index it with "
            f'the numbers of the rows, `row = pm.Data("row", np.arange({separated.n_rows}))` and '
            f"`{by_row[0]}[row]`."
        )
    elif local:
        advice = f"`{local[0]}` has one element a row."
    elif left_out and separated.batch_size is None:
        advice = (
            f"`{left_out[0]}` has as many rows, but is not among `rows`. Name all data that run "
            "over the rows, or none."
        )
    else:
        advice = (
            "Subsampling needs independent observations, unlike time series. Compute statistics of "
            "columns with NumPy beforehand, "
        )
        advice += (
            'and name the `pm.Data` that run over the rows, for example `rows=["X", "y"]`.'
            if separated.batch_size is None
            else "and give all arrays with one entry a row to one `pm.Minibatch` call."
        )
    message = (
        f"The log likelihood of `{term.name}` is not a sum over the {separated.n_rows} rows of "
        f"{names}: {reason}. {advice}"
    )
    error = ModelError(message)
    error.local = local[0] if local and not by_row else None
    return error


def _bad_code(at: _OfRows, error: IndexError) -> ModelError:
    """Error for the first row whose index is out of range."""
    setting = at.setting

    def evaluate(rows: slice) -> object:
        return at.evaluate(*setting.take(rows))

    row = 0
    for start in range(0, setting.n_rows, MANY_ROWS):
        try:
            evaluate(slice(start, start + MANY_ROWS))
        except IndexError:
            stop = min(start + MANY_ROWS, setting.n_rows)
            row = first_row_out_of_range(evaluate, start, stop)
            break
    try:
        evaluate(slice(row, row + 1))
    except IndexError as of_row:
        error = of_row
    leaves = setting.separated.leaves
    number, values = record_of(leaves, row, [leaf.values[row] for leaf in leaves])
    return code_error(values, number, error)
