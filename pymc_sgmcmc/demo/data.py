"""Tables with a binary outcome, and the design matrix of a logistic regression on one."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy import linalg, special

from pymc_sgmcmc import datasets
from pymc_sgmcmc.demo.errors import InputError

INTERCEPT = "intercept"

MAX_LEVELS = 20
"""Different values that a column of text may have: each but one becomes a coefficient."""

COLLINEAR = 1e-9
"""Share of a column's variance, not explained by the columns before it, that counts as none."""

LISTED = 4
"""Most names or values listed in a message."""


@dataclass(frozen=True, eq=False)
class Table:
    """Features and a binary outcome, before any coding.

    Attributes
    ----------
    name : str
    features : pandas.DataFrame
        One row an observation, columns of any type.
    outcome : pandas.Series
        As long as `features`; two distinct values, missing ones aside.
    origin : str
        Where the rows came from.
    description : str
        What a row is, "" where not known.
    outcome_label : str
        What the outcome means, "" where its values say it.
    notes : tuple of str
        What else there is to say.
    """

    name: str
    features: pd.DataFrame
    outcome: pd.Series
    origin: str
    description: str = ""
    outcome_label: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Design:
    """What the model sees.

    Attributes
    ----------
    name : str
        Of the table it was made from.
    X : numpy.ndarray, shape (N, d), float64
        The first column is the intercept.
    y : numpy.ndarray, shape (N,), bool
    feature_names : tuple of str
        One a column of `X`.
    outcome_label : str
        What `y` is true for.
    notes : tuple of str
        What was done to the table and may matter: rows and columns dropped, codings.
    """

    name: str
    X: np.ndarray
    y: np.ndarray
    feature_names: tuple[str, ...]
    outcome_label: str
    notes: tuple[str, ...] = ()

    @property
    def n_rows(self) -> int:
        """N."""
        return len(self.y)


# --- Tables -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Example:
    load: Callable[[], datasets.Dataset]
    is_one: Callable[[pd.Series], pd.Series]
    label: str
    left_out: str = ""  # columns whose names begin so
    note: str = ""


EXAMPLES = {
    "randhie": _Example(
        datasets.load_randhie, lambda visits: visits > 0, "any visit to a doctor (mdvis > 0)"
    ),
    "fair": _Example(datasets.load_fair, lambda time: time > 0, "any affair (affairs > 0)"),
    "contraception": _Example(
        datasets.load_contraception, lambda use: use == 1, "uses contraception (use = 1)"
    ),
    "skin": _Example(datasets.load_skin, lambda skin: skin == 1, "the pixel is skin (skin = 1)"),
    "covertype": _Example(
        datasets.load_covertype,
        lambda cover: cover == 2,
        "the cover is lodgepole pine (Cover_Type = 2)",
        left_out="Soil_Type",
        note="soil types are left out: some are in so few rows that minibatches miss them",
    ),
    "cod-rna": _Example(
        datasets.load_cod_rna, lambda label: label == 1, "the RNA is non-coding (label = 1)"
    ),
    "run-or-walk": _Example(
        datasets.load_run_or_walk, lambda activity: activity == 1, "running (activity = 1)"
    ),
}
"""Data sets by the name that the command line knows, each with an outcome in two values."""

DEFAULT_EXAMPLE = "randhie"  # in statsmodels: needs neither a network nor a folder


def load_example(name: str) -> Table:
    """Load one of the public data sets.

    Parameters
    ----------
    name : str
        A key of `EXAMPLES`.

    Raises
    ------
    InputError
        For an unknown name.
    FileNotFoundError, ImportError, ValueError
        As the loader in `pymc_sgmcmc.datasets` raises them.

    Examples
    --------
    >>> fair = load_example("fair")
    >>> fair.features.shape, fair.outcome_label
    ((6366, 8), 'any affair (affairs > 0)')
    """
    if name not in EXAMPLES:
        close = difflib.get_close_matches(name.lower().replace("_", "-"), EXAMPLES)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise InputError(
            f"Data set should be one of {', '.join(EXAMPLES)}, but got {name!r}.{hint}"
        )
    example = EXAMPLES[name]
    dataset = example.load()
    assert dataset.target is not None
    features = [
        name
        for name in dataset.feature_names
        if not (example.left_out and name.startswith(example.left_out))
    ]
    return Table(
        name=dataset.name,
        features=dataset.frame[features],
        outcome=example.is_one(dataset.frame[dataset.target]),
        origin=dataset.origin,
        description=dataset.description,
        outcome_label=example.label,
        notes=(example.note,) if example.note else (),
    )


def load_file(path: str | os.PathLike[str], outcome: str) -> Table:
    """Read a table of the user's.

    Parameters
    ----------
    path : path
        CSV or parquet file, see `pymc_sgmcmc.datasets.load_table`.
    outcome : str
        The column to model.

    Raises
    ------
    FileNotFoundError, ImportError, ValueError
        As `load_table` raises them.
    """
    dataset = datasets.load_table(path, outcome)
    return Table(
        name=dataset.name,
        features=dataset.frame[list(dataset.feature_names)],
        outcome=dataset.frame[outcome],
        origin=dataset.origin,
    )


# --- From a table to a design -------------------------------------------------------------------


def make_design(table: Table) -> Design:
    """Code a table as a design matrix with an intercept.

    Numbers are standardised to mean 0 and standard deviation 1, except columns of 0 and 1,
    which stay as they are; text, categories and truth values become such indicators of each
    value but the first. Columns without any value, rows with missing values in others, columns
    with a single value and columns that the ones before determine are left out, each with a
    note.

    Parameters
    ----------
    table : Table

    Returns
    -------
    Design

    Raises
    ------
    InputError
        When the outcome has not two values, a column can be coded in no sensible way, or
        nothing is left. The message names the column.

    Examples
    --------
    >>> features = pd.DataFrame({"dose": [1.0, 2.0, 3.0], "ward": ["a", "b", "b"]})
    >>> table = Table("trial", features, pd.Series(["no", "yes", "no"], name="cured"), "memory")
    >>> design = make_design(table)
    >>> design.feature_names
    ('intercept', 'dose', 'ward=b')
    >>> design.outcome_label
    "cured = 'yes' (0 stands for 'no')"
    """
    notes = list(table.notes)
    features, outcome = table.features, table.outcome
    if outcome.isna().all():
        raise InputError(
            f"The outcome {str(outcome.name)!r} is missing in every row. Choose another column."
        )
    empty = features.isna().all(axis=0)
    if empty.all():
        raise InputError(
            "The outcome is the only column with values, so there is nothing to explain it by. "
            "Add a column with at least two values."
        )
    if empty.any():
        notes.append(
            f"dropped {_listed([*map(str, features.columns[empty])])}: no value in any row"
        )
        features = features.loc[:, ~empty]
    complete = ~(features.isna().any(axis=1) | outcome.isna())
    if not complete.all():
        holes = [*_names_with_missing(features), *_names_with_missing(outcome.to_frame())]
        dropped = int((~complete).sum())
        if dropped == len(complete):
            raise InputError(
                f"Every row has a missing value (in {_listed(holes)}), so none is left to model. "
                "Fill in or remove those columns."
            )
        notes.append(
            f"dropped {dropped:,} of {len(complete):,} rows, which have missing values "
            f"(in {_listed(holes)})"
        )
        features, outcome = features[complete], outcome[complete]

    y, outcome_label = code_outcome(outcome)
    columns, names = [], []
    constant = []
    for name in features.columns:
        coded = _code_column(features[name])
        if not coded:
            constant.append(str(name))
        for label, values in coded.items():
            names.append(label)
            columns.append(values)
        if len(coded) > 1 or next(iter(coded), name) != name:
            first = _levels(features[name])[0]
            notes.append(f"coefficients of {name} compare with {name} = {first}")
    if constant:
        notes.append(f"dropped {_listed(constant)}: the same value in every row")
    if not columns:
        raise InputError(
            "No column differs between rows, so there is nothing to explain the outcome by. "
            "Add a column with at least two values."
        )
    X = np.column_stack([np.ones(len(y)), *columns])
    names = [INTERCEPT, *names]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InputError(
            f"Coefficients need names of their own, but {_listed(twice)} stands for two of them. "
            "Rename a column."
        )
    determined = collinear_columns(X)
    for column, partners in determined.items():
        notes.append(
            f"dropped {names[column]}: collinear, "
            f"determined by {_listed([names[partner] for partner in partners])}"
        )
    kept = [column for column in range(len(names)) if column not in determined]
    return Design(
        name=table.name,
        X=X[:, kept] if determined else X,
        y=y,
        feature_names=tuple(names[column] for column in kept),
        outcome_label=table.outcome_label or outcome_label,
        notes=tuple(notes),
    )


def code_outcome(outcome: pd.Series) -> tuple[np.ndarray, str]:
    """Code an outcome with two distinct values as truth values.

    Parameters
    ----------
    outcome : pandas.Series
        Without missing values.

    Returns
    -------
    y : numpy.ndarray, shape (N,), bool
        True for the larger number, or the string that comes later in the alphabet.
    label : str
        Which value that is.

    Raises
    ------
    InputError
        When there are not two distinct values.
    """
    name = str(outcome.name)
    if not (pd.api.types.is_numeric_dtype(outcome) or _is_discrete(outcome)):
        raise InputError(
            f"The outcome {name!r} should be numbers, text or truth values, but has the type "
            f"{outcome.dtype}. Choose another column."
        )
    values = _levels(outcome)
    if len(values) != 2:
        raise InputError(
            f"The outcome {name!r} should have two distinct values, such as 0 and 1, but has "
            f"{len(values)} ({_listed(values)}). Choose another column, or make one with two "
            "values, such as above or below a threshold."
        )
    zero, one = values
    return (outcome == one).to_numpy(dtype=bool), (
        f"{name} = {_shown(one)} (0 stands for {_shown(zero)})"
    )


def collinear_columns(X: np.ndarray) -> dict[int, list[int]]:
    """Columns that are linear combinations of columns before them.

    Parameters
    ----------
    X : numpy.ndarray, shape (N, d)
        The first column is constant; the others are not.

    Returns
    -------
    dict
        Number of each such column, with the numbers of the columns that it is made of.

    Examples
    --------
    >>> a, b = np.array([0.0, 1.0, 5.0, 2.0]), np.array([1.0, 1.0, 2.0, 0.0])
    >>> collinear_columns(np.column_stack([np.ones(4), a, b, a + 2 * b]))
    {3: [1, 2]}
    """
    # From the correlations, a d by d matrix: its Cholesky factor, column by column.
    mean = X.mean(axis=0)
    covariance = X.T @ X / len(X) - np.outer(mean, mean)
    scale = np.sqrt(np.diag(covariance))
    factor = np.zeros((X.shape[1], X.shape[1]))
    kept: list[int] = []
    determined: dict[int, list[int]] = {}
    for column in range(1, X.shape[1]):
        size = len(kept)
        correlation = covariance[kept, column] / (scale[kept] * scale[column])
        row = linalg.solve_triangular(factor[:size, :size], correlation, lower=True)
        unexplained = 1 - row @ row
        if unexplained > COLLINEAR:
            factor[size, :size] = row
            factor[size, size] = np.sqrt(unexplained)
            kept.append(column)
        else:
            weights = linalg.solve_triangular(factor[:size, :size], row, lower=True, trans="T")
            determined[column] = [
                partner for partner, weight in zip(kept, weights, strict=True) if abs(weight) > 1e-6
            ]
    return determined


def simulate(design: Design, coefficients: np.ndarray, n_rows: int, seed: int) -> Design:
    """Make a design with more (or fewer) rows, by simulation from the model.

    Parameters
    ----------
    design : Design
    coefficients : numpy.ndarray, shape (d,)
        Of the logistic regression that outcomes are drawn from.
    n_rows : int
        Rows to draw, with replacement, from those of `design`.
    seed : int

    Returns
    -------
    Design
    """
    rng = np.random.default_rng(seed)
    X = design.X[rng.integers(design.n_rows, size=n_rows)]
    y = rng.random(n_rows) < special.expit(X @ coefficients)
    return replace(design, name=f"{design.name}, {n_rows:,} rows simulated", X=X, y=y, notes=())


def check_memory(n_rows: int, n_columns: int) -> None:
    """Refuse a number of rows whose arrays would not fit into the memory of the machine.

    Raises
    ------
    InputError
        With the number of rows that would fit.
    """
    # The simulated rows, the model's copy, the shuffled copy, and one more while they are made.
    needed = 4 * 8 * n_rows * n_columns
    try:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not POSIX: let NumPy find out
        return
    if needed > available:
        fitting = available // (4 * 8 * n_columns)
        raise InputError(
            f"{n_rows} rows of {n_columns} columns need about {needed / 2**30:.3g} GiB of memory "
            f"but the machine has {available / 2**30:.3g} GiB. Ask for at most {fitting} rows."
        )


# --- Columns --------------------------------------------------------------------------------------


def _code_column(column: pd.Series) -> dict[str, np.ndarray]:
    """Columns of the design that a column of the table becomes; none where it is constant."""
    name = str(column.name)
    if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column):
        if pd.api.types.is_complex_dtype(column):
            raise InputError(f"Column {name!r} has complex numbers. Split or remove it.")
        values = _scaled(column)
        return {} if values is None else {name: values}
    if not _is_discrete(column):
        raise InputError(
            f"Column {name!r} has the type {column.dtype}, which is neither number nor text. "
            "Turn it into numbers (dates into days, say) or remove it."
        )
    levels = _levels(column)
    if len(levels) > MAX_LEVELS:
        raise InputError(
            f"Column {name!r} has {len(levels)} different values ({_listed(levels)}); a column of "
            f"text may have at most {MAX_LEVELS}. Merge values, or remove the column; if it should "
            "be numbers, correct the entries that are not."
        )
    return {f"{name}={level}": (column == level).to_numpy(dtype=np.float64) for level in levels[1:]}


def _scaled(column: pd.Series) -> np.ndarray | None:
    values = column.to_numpy(dtype=np.float64)
    if not np.isfinite(values).all():
        raise InputError(
            f"Column {column.name!r} has {int((~np.isfinite(values)).sum())} infinite values. "
            "Correct or remove those rows."
        )
    if values.min() == values.max():
        return None
    if np.isin(values, (0.0, 1.0)).all():
        # Divided by its standard deviation, an indicator of a rare event would have a value so
        # large that the same prior says nothing about the event.
        return values
    # Scaled first, because squares of large numbers overflow.
    values = values / np.abs(values).max()
    return (values - values.mean()) / values.std()


def _is_discrete(column: pd.Series) -> bool:
    if isinstance(column.dtype, pd.CategoricalDtype) or pd.api.types.is_bool_dtype(column):
        return True
    return all(isinstance(value, str | bool | int | float) for value in column)


def _levels(column: pd.Series) -> list:
    """Distinct values in order: that of the categories, of numbers, or of the alphabet."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        present = set(column)
        return [level for level in column.cat.categories if level in present]
    try:
        return sorted(column.unique())
    except TypeError:  # numbers and text in one column
        return sorted(column.unique(), key=str)


def _names_with_missing(frame: pd.DataFrame) -> list[str]:
    return [str(name) for name in frame.columns if frame[name].isna().any()]


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return repr(str(value)) if isinstance(value, str) else str(value)


def _listed(values: Sequence) -> str:
    shown = ", ".join(
        value if isinstance(value, str) else _shown(value) for value in values[:LISTED]
    )
    return shown if len(values) <= LISTED else f"{shown} and {len(values) - LISTED} more"
