"""Evaluate the split of a log density into rows before anything relies on it.

Replacing data in a graph can go wrong without an error: a data array that was missed, a table
indexed by group whose length happens to be N, a cumulative sum along the rows. All of these
break at least one of two identities, evaluated here at a random position on a few random rows:
the log likelihood and its gradient of a set of rows equal the sums over any partition of it;
and, for data small enough, all rows reproduce the log density of the model as PyMC builds it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.pytensorf import rewrite_pregrad
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.position import PositionLayout
from pymc_sgmcmc.posterior.rows import PYTHON_MODE, SeparatedModel, Term

CHECK_ROWS = 24
"""Rows evaluated by the check, apart from the comparison on all of them."""

FULL_CHECK_ELEMENTS = 2_000_000
"""Data up to this size are also compared in full with the model's own log density."""


def check_separation(
    separated: SeparatedModel,
    layout: PositionLayout,
    others: Mapping[TensorVariable, Variable],
) -> None:
    """Refuse a model whose rows are not separable, naming the variable.

    Raises
    ------
    ModelError
        Where data are not finite, where a log density cannot be evaluated on some of the
        rows, or where its parts do not add up.
    """
    check_finite(separated)
    rng = np.random.default_rng(20_170_616)
    n_rows = min(CHECK_ROWS, separated.n_rows)
    chosen = rng.choice(separated.n_rows, size=n_rows, replace=False)
    # Two parts of different lengths: equal ones would hide an array that still has the
    # old length and broadcasts.
    first = max(1, n_rows // 3)
    parts = [chosen[:first], chosen[first:]] if n_rows > 1 else [chosen]
    position = rng.normal(0.0, 0.3, size=layout.dimension).astype(layout.dtype)

    rows = [leaf.placeholder() for leaf in separated.leaves]
    densities = separated.row_log_densities(rows, rows[0].shape[0])
    # The log density of a model with `pm.Minibatch` is random, so only an ordinary model has
    # a value of its own to compare with.
    compare_all = (
        separated.batch_size is None
        and sum(leaf.values.size for leaf in separated.leaves) <= FULL_CHECK_ELEMENTS
    )
    for term, density in zip(separated.row_terms, densities, strict=True):
        evaluate = _value_and_gradient(density.sum(), rows, layout, others)

        def on(selection, evaluate=evaluate):
            return evaluate(position, *[leaf.values[selection] for leaf in separated.leaves])

        try:
            together = on(chosen)
            apart = [on(part) for part in parts]
            everything = on(slice(None)) if compare_all else None
        except Exception as error:
            raise _not_separable(term, separated, layout, error) from error
        _compare(term, separated, layout, together, np.sum(apart, axis=0))
        if compare_all:
            reference = _value_and_gradient(term.log_density.sum(), [], layout, others)
            _compare(term, separated, layout, everything, reference(position))


def check_finite(separated: SeparatedModel) -> None:
    """Refuse data with NaN or infinite entries."""
    for leaf in separated.leaves:
        if leaf.values.dtype.kind != "f":
            continue
        step = max(1, 1_000_000 // max(1, leaf.values[0].size))
        for start in range(0, leaf.values.shape[0], step):
            block = leaf.values[start : start + step]
            if not np.isfinite(block).all():
                bad = start + int(np.argmin(np.isfinite(block).reshape(len(block), -1).all(1)))
                raise ModelError(
                    f"The data `{leaf.name}` have a NaN or infinite entry, the first in row "
                    f"{bad}. Each minibatch with that row would end the chain: drop or impute "
                    "such rows first."
                )


def _value_and_gradient(log_density, rows, layout: PositionLayout, others):
    log_density = rewrite_pregrad(clone_replace(log_density, dict(others), rebuild_strict=False))
    gradients = pt.grad(log_density, list(layout.variables), disconnected_inputs="ignore")
    position = pt.tensor("position", shape=(None,), dtype=layout.dtype)
    outputs = clone_replace(
        pt.concatenate([pt.atleast_1d(log_density), layout.join(gradients)]),
        layout.split(position),
        rebuild_strict=False,
    )
    return pytensor.function([position, *rows], outputs, mode=PYTHON_MODE, on_unused_input="ignore")


def _compare(
    term: Term,
    separated: SeparatedModel,
    layout: PositionLayout,
    found: np.ndarray,
    expected: np.ndarray,
) -> None:
    finite = np.isfinite(found) & np.isfinite(expected)
    # A random position can lie outside the support, where both sides are infinite alike.
    agree_outside = (found == expected) | (np.isnan(found) & np.isnan(expected))
    scale = 1.0 + np.abs(np.where(finite, expected, 0.0)).max()
    tolerance = np.sqrt(np.finfo(layout.dtype).eps) * scale * 10
    wrong = np.where(finite, np.abs(found - expected) > tolerance, ~agree_outside)
    if wrong.any():
        raise _not_separable(term, separated, layout, None)


def _not_separable(
    term: Term, separated: SeparatedModel, layout: PositionLayout, error: Exception | None
) -> ModelError:
    local = [
        name
        for name, shape in zip(layout.names, layout.shapes, strict=True)
        if separated.n_rows in shape
    ]
    names = ", ".join(f"`{leaf.name}`" for leaf in separated.leaves)
    reason = (
        f"evaluating it on some of the rows failed ({_first_line(error)})"
        if error is not None
        else "its value or gradient on a set of rows is not the sum over parts of that set"
    )
    advice = (
        f"The free variable `{local[0]}` has one element a row (a local latent variable), "
        "which subsampling of rows does not support: marginalise it out."
        if local
        else "Subsampling needs observations that are independent given the parameters: time "
        "series, Gaussian processes, cumulative sums along the rows, and statistics of a whole "
        "column inside the model do not separate (compute such columns with NumPy beforehand). "
        "Where an array only happens to have as many entries as there are rows, name the data "
        'that do run over the rows, for example `rows=["X", "y"]` with `pm.Data` variables '
        "`X` and the observed variable `y`."
    )
    return ModelError(
        f"The log likelihood of `{term.name}` is not a sum over the {separated.n_rows} rows of "
        f"{names}: {reason}. {advice}"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
