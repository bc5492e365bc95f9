"""Evaluate the split of a log density into rows before anything relies on it.

Replacing data in a graph can go wrong without an error: a data array is missed, a table indexed by
group has the length N by chance, or there is a cumulative sum along the rows. Each of these breaks
one of two identities, which are evaluated at a random position:

* the log likelihood of a few rows, and its gradient, are the sums over parts of them: of random
  rows over two parts, of rows that differ in each column over single rows, and of these and the
  extreme rows over both;
* prior and rows together are the log density, and the gradient, of the model as PyMC makes it. For
  `pm.Minibatch` this is checked on a minibatch, for an ordinary model on all rows (where the data
  are not too large).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.graph_notes import copy_without_notes
from pymc_sgmcmc.posterior.bad_rows import code_error, first_row_out_of_range
from pymc_sgmcmc.posterior.compiled import PYTHON_MODE, compile_on_arrays, compile_quietly
from pymc_sgmcmc.posterior.graphs import leaf_value
from pymc_sgmcmc.posterior.position import PositionLayout, untransformed
from pymc_sgmcmc.posterior.rows import SeparatedModel, Term
from pymc_sgmcmc.posterior.terms import reference_terms

CHECK_ROWS = 24
"""The sum over parts is checked on this many random rows. It is a compromise between the time of
the check and the chance to meet a row that the split treats wrongly."""

MOST_APART = 100
"""So many rows at most are added up one by one. Continuous columns differ in any two rows, and of
an indicator one that is not zero is looked for. The largest value of a column, its mean and the
like are those of the row itself where it is alone, so that no model with these passes."""

MOST_EXTREMES = 50
"""The rows with the least and largest values are looked for in so many columns of each array."""

MANY_ROWS = 2000
"""Functions that NumPy does not have are compiled for more rows than this. For fewer rows Python
takes less time than a compiler."""

FULL_CHECK_ELEMENTS = 5_000_000
"""The rows are compared with the log density of the model itself where they have at most this many
array elements, 40 MB, so that the check stays short and needs little memory."""

BLOCK_ELEMENTS = 1_000_000
"""Passes over the data look at so many array elements at a time."""

ROUNDING = 1e4
"""Each derivative may differ by so many times the rounding error of the largest one."""

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
            gradients = pt.grad(total, list(layout.variables), disconnected_inputs="ignore")
            vectors.append(pt.concatenate([pt.atleast_1d(total), layout.join(gradients)]))
        position = pt.tensor("position", shape=(layout.dimension,), dtype=layout.dtype)
        outputs = clone_replace(vectors, layout.split(position), rebuild_strict=False)
        if self.n_rows > MANY_ROWS:
            function = compile_on_arrays([position, *rows], outputs, PYTHON_MODE)
        else:
            # Otherwise the inner graph of a scan would be compiled in C for a few calls.
            with pytensor.config.change_flags(cxx=""):
                function = compile_quietly([position, *rows], outputs, PYTHON_MODE)

        def evaluate(*arrays: np.ndarray) -> list[np.ndarray]:
            with np.errstate(all="ignore"):  # outside the support
                return function(self.position, *arrays)

        return evaluate

    def agree(self, actual: np.ndarray, expected: np.ndarray) -> bool:
        """Whether two log densities with their gradients are the same up to rounding."""
        epsilon = np.finfo(self.layout.dtype).eps
        relative = 10 * np.sqrt(epsilon)
        for part in (slice(0, 1), slice(1, None)):
            left, right = actual[part], expected[part]
            finite = np.isfinite(left) & np.isfinite(right)
            # The position can lie outside the support, where both sides are infinite alike.
            same = (left == right) | (np.isnan(left) & np.isnan(right))
            # A predictor of large numbers makes one derivative large, and rounding of all others.
            largest = np.abs(right[finite]).max(initial=0)
            tolerance = relative * (1 + np.abs(right)) + ROUNDING * epsilon * largest
            difference = np.subtract(left, right, out=np.zeros_like(left), where=finite)
            if not np.all(same | (finite & (np.abs(difference) <= tolerance))):
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

    def check(candidate: SeparatedModel) -> None:
        # Outside the support both sides of each identity are infinite or NaN, and the check has no
        # result. Positions nearer to the initial point are tried then.
        for distance in DISTANCES:
            position = (initial_position + distance * noise).astype(layout.dtype)
            setting = _Setting(candidate, layout, others, position)
            if _check(reference, setting, list(infinite.values())):
                return
        # Infinite bounds of `pm.Censored` have a gradient, and those of `pm.Truncated` have none.
        for name, row in infinite.items():
            raise _not_finite(
                name, row, "Give bounds as large finite numbers, and drop or impute other such rows"
            )

    first_error = None
    for reading in separated.readings():
        try:
            check(reading)
        except ModelError as error:
            first_error = first_error or error
        else:
            return reading
    assert first_error is not None
    raise first_error


def infinite_entries(separated: SeparatedModel) -> dict[str, int]:
    """First row with an infinite entry, by the names of the data that have one.

    Raises
    ------
    ModelError
        Where data have NaN entries.
    """
    found: dict[str, int] = {}
    for leaf in separated.leaves:
        if leaf.values.dtype.kind != "f":
            continue
        step = max(1, BLOCK_ELEMENTS // max(1, leaf.values[0].size))
        for start in range(0, leaf.values.shape[0], step):
            block = leaf.values[start : start + step]
            if np.isfinite(block).all():
                continue
            bad = np.flatnonzero(~np.isfinite(block).reshape(len(block), -1).all(1))
            found.setdefault(leaf.name, start + int(bad[0]))
            unknown = np.flatnonzero(np.isnan(block[bad]).reshape(len(bad), -1).any(1))
            if len(unknown):
                raise _not_finite(
                    leaf.name, start + int(bad[unknown[0]]), "Drop or impute such rows first"
                )
    return found


def _not_finite(name: str, row: int, remedy: str) -> ModelError:
    return ModelError(
        f"The data `{name}` have a NaN or infinite entry, the first in row {row}. {remedy}."
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
    sampled = rng.choice(n_rows, size=min(CHECK_ROWS, n_rows), replace=False)
    sampled = np.concatenate([sampled, np.setdiff1d(besides, sampled)]).astype(int)
    arrays = [leaf.values for leaf in separated.leaves]
    apart = rows_that_differ(arrays, sampled[:2])
    few = (sampled, apart, np.setdiff1d(extreme_rows(arrays), apart))
    # The comparison with the model uses a minibatch of its size, or all rows.
    of_model = slice(None) if batch_size is None else rng.choice(n_rows, size=batch_size)
    scale = 1.0 if batch_size is None else n_rows / batch_size

    conclusive = True
    of_rows = []
    rows = [leaf.placeholder() for leaf in separated.leaves]
    for term in separated.row_terms:
        try:
            only_this = replace(separated, row_terms=(term,))
            density = only_this.row_log_densities(rows, rows[0].shape[0])
            evaluate = setting.values_and_gradients(density, rows)
            of_few, sums = _of_few_rows(evaluate, setting.take, few)
        except IndexError as error:
            if _is_of_all_rows(setting, evaluate):
                reason = f"a code of one row selects another row ({_first_line(error)})"
                raise _not_separable(term, setting, reason) from error
            numbers = np.concatenate(few)
            raise _bad_code(separated, evaluate, setting.take, numbers, error) from None
        except Exception as error:
            reason = f"its evaluation on some of the rows failed ({_first_line(error)})"
            fails = _of_shapes(reference, term, setting)
            raise fails or _not_separable(term, setting, reason) from error
        for reason, (sum_of_parts, together) in sums.items():
            if not setting.agree(sum_of_parts, together):
                raise _not_separable(term, setting, reason)
        conclusive &= bool(np.isfinite(of_few).all())
        if setting.compare_rows:
            try:
                (all_rows,) = evaluate(*setting.take(of_model))
            except IndexError as error:
                numbers = np.arange(n_rows)[of_model]
                raise _bad_code(separated, evaluate, setting.take, numbers, error) from None
            of_rows.append((term, scale * all_rows))

    drawn = [leaf.placeholder(batch_size) for leaf in separated.leaves]
    inputs = [] if batch_size is None else drawn
    of_model_terms = reference(dict(zip(separated.leaves, drawn, strict=True)) if inputs else {})
    likelihood_names = {term.name for term in separated.row_terms}
    expected_prior = [
        term.log_density.sum()
        for name, term in of_model_terms.items()
        if name not in likelihood_names
    ]
    evaluate = setting.values_and_gradients(
        [
            sum(term.log_density.sum() for term in separated.full_terms),
            sum(expected_prior),
            *(of_model_terms[term.name].log_density for term, _ in of_rows),
        ],
        inputs,
    )
    actual, expected, *expected_of_rows = evaluate(*(setting.take(of_model) if inputs else ()))
    if not setting.agree(actual, expected):
        names = ", ".join(f"`{term.name}`" for term in separated.full_terms)
        raise ModelError(
            f"The log densities of {names} change when the model is split into rows and the rest. "
            "Please report the model."
        )
    for (term, actual), expected in zip(of_rows, expected_of_rows, strict=True):
        if not setting.agree(actual, expected):
            raise _not_separable(
                term, setting, "the rows do not add up to the log density of the model"
            )
    return conclusive


def _of_few_rows(
    evaluate: Callable[..., list[np.ndarray]],
    take: Callable[[np.ndarray], list[np.ndarray]],
    few: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> tuple[np.ndarray, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Log density and gradient of random rows, and of parts and all of some rows.

    Parameters
    ----------
    evaluate : callable
        Function of rows, see `_Setting.values_and_gradients`.
    take : callable
        Rows by their numbers.
    few : tuple of numpy.ndarray
        Numbers of random rows, of rows that differ, and of others with extreme values.

    Returns
    -------
    numpy.ndarray
        Of the random rows.
    dict
        Sum over parts, and the same of the rows together, by what it means where they differ.
    """

    def at(numbers: np.ndarray) -> np.ndarray:
        return evaluate(*take(numbers))[0]

    sampled, apart, extremes = few
    # The two parts have different lengths, since equal lengths would hide an array that still has
    # the old length and broadcasts.
    first = max(1, len(sampled) // 3)
    parts = [part for part in (sampled[:first], sampled[first:]) if len(part)]
    of_sampled, of_apart = at(sampled), at(apart)
    sums = {
        "two parts of a few rows do not add up to these rows": (
            np.sum([at(part) for part in parts], axis=0),
            of_sampled,
        ),
        "single rows do not add up to these rows": (
            np.sum([at(apart[[place]]) for place in range(len(apart))], axis=0),
            of_apart,
        ),
    }
    if len(extremes):
        sums["rows with extreme values of a column change others"] = (
            of_apart + at(extremes),
            at(np.concatenate([apart, extremes])),
        )
    return of_sampled, sums


def _is_of_all_rows(setting: _Setting, evaluate: Callable[..., list[np.ndarray]]) -> bool:
    """Whether all codes are in range where all rows are there, as those of a table of them."""
    if setting.batch_size is not None or not setting.compare_rows:
        return False
    try:
        evaluate(*setting.take(slice(None)))
    except IndexError:
        return False
    return True


def rows_that_differ(arrays: Sequence[np.ndarray], rows: Iterable[int]) -> np.ndarray:
    """Numbers of the given rows, and of others that differ from the first of them.

    Each column in which not all rows are equal has another value in one of the rows, as long as
    these are at most `MOST_APART`.

    Examples
    --------
    >>> rows_that_differ([np.eye(5)], [0]).tolist()
    [0, 1, 2, 3, 4]
    """
    chosen = list(rows)
    for array in arrays:
        width = array[0].size
        first = array[chosen[0]].reshape(-1)
        same = np.flatnonzero((array[chosen].reshape(-1, width) == first).all(0))
        step = max(1, BLOCK_ELEMENTS // max(1, width))
        for start in range(0, len(array), step):
            if not len(same) or len(chosen) >= MOST_APART:
                break
            differ = array[start : start + step].reshape(-1, width)[:, same] != first[same]
            found = differ.any(0)
            places = start + np.unique(differ.argmax(0)[found])
            chosen.extend(places[: MOST_APART - len(chosen)])
            same = same[~found]
    return np.unique(chosen)


def extreme_rows(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Numbers of the rows with the least and the largest value of a column.

    Examples
    --------
    >>> extreme_rows([np.array([2, 5, 3, 1, 4])]).tolist()
    [1, 3]
    """
    chosen = set()
    for array in arrays:
        width = array[0].size
        columns = np.unique(np.linspace(0, width - 1, min(width, MOST_EXTREMES)).astype(int))
        blocks = np.array_split(array, max(1, array.size // BLOCK_ELEMENTS))
        starts = np.cumsum([0, *map(len, blocks)])
        for least in (True, False):
            ends = [block.min(0) if least else block.max(0) for block in blocks]
            of_blocks = np.reshape(ends, (len(blocks), width))
            numbers = of_blocks.argmin(0) if least else of_blocks.argmax(0)
            for column in columns:
                number = numbers[column]
                values = blocks[number].reshape(-1, width)[:, column]
                chosen.add(int(starts[number] + (values.argmin() if least else values.argmax())))
    return np.array(sorted(chosen), dtype=int)


def _of_shapes(
    reference: Callable[..., dict[str, Term]], term: Term, setting: _Setting
) -> ModelError | None:
    """Error where the model itself cannot be evaluated, as after `pm.set_data` for a prediction."""
    if setting.batch_size is not None:
        return None
    log_density = reference({})[term.name].log_density
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
            f"The log likelihood of `{term.name}` cannot be evaluated ({_first_line(error)}). "
            f"The data have the shapes {shapes}. Give predictors and outcomes the same rows: after "
            "a prediction set the data back by `pm.set_data`."
        )
    return None


def _not_separable(term: Term, setting: _Setting, reason: str) -> ModelError:
    separated, layout = setting.separated, setting.layout
    names = ", ".join(f"`{leaf.name}`" for leaf in separated.leaves)
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
    if by_row:
        advice = (
            f"`{by_row[0]}`, which another step method moves, has one element a row: index it with "
            f'the numbers of the rows, `row = pm.Data("row", np.arange({separated.n_rows}))` and '
            f"`{by_row[0]}[row]`."
        )
    elif local:
        advice = (
            f"Integrate out `{local[0]}`, a local latent variable with one element a row, by "
            f'`marginalize(model, ["{local[0]}"])`.'
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
    return ModelError(
        f"The log likelihood of `{term.name}` is not a sum over the {separated.n_rows} rows of "
        f"{names}: {reason}. {advice}"
    )


def _bad_code(
    separated: SeparatedModel,
    evaluate: Callable[..., list[np.ndarray]],
    take: Callable[[np.ndarray], list[np.ndarray]],
    numbers: np.ndarray,
    error: IndexError,
) -> ModelError:
    """Error for the first of the given rows whose index is out of range."""
    number = first_row_out_of_range(lambda rows: evaluate(*take(numbers[rows])), 0, len(numbers))
    row = int(numbers[number])
    values = {leaf.name: leaf.values[row] for leaf in separated.leaves}
    return code_error(values, row, error)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
