"""A table as a Bayesian regression: read from a file, coded by formulae, modelled in PyMC."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor

FAMILIES = ("bernoulli", "normal", "poisson")

PRIOR_SD = 2.5
"""Of a coefficient, for logits, logarithms or sds of the outcome: weak for standardised columns,
as 2.5 takes a probability from 0.5 to 0.92."""

MOST_LEVELS = 20
"""Values of a column of text that is taken for groups where no formula says so. More are names, or
numbers with a slip in them, far more often."""

DEPENDENT = 1e-6
"""Part of a column, relative to its length, that other columns do not determine and that counts as
none: rounding leaves some 1e-12 of a standardised one."""

LISTED = 20
"""Names or values in a message."""

NUMBER_WITH_COMMAS = r"[+-]?\d[\d.]*(?:,\d+)*(?:[eE][+-]?\d+)?"
DECIMAL_COMMA = r"[+-]?\d+(?:,\d+)?(?:[eE][+-]?\d+)?"
PERHAPS_THOUSANDS = r"[+-]?(?:[1-9]\d{0,2},\d{3}|\d+)"
"""Numbers whose commas are decimal or separate thousands, are decimal, or may be either."""


class InputError(ValueError):
    """What was asked for cannot be done; the message says what to change."""


# --- Reading --------------------------------------------------------------------------------------


def read_table(path: Path, separator: str | None = None) -> pd.DataFrame:
    """Read a CSV file in UTF-8, with decimal points or commas, or a parquet file.

    The separator of a CSV file is, where not given, that of ``,;|`` and the tab which is most
    frequent in the line of names. What cannot be read, or in two ways, is an `InputError`.
    """
    kind = {".parquet": "parquet", ".csv": "CSV in UTF-8", ".txt": "CSV in UTF-8"}.get(path.suffix)
    if kind is None:
        raise InputError(f"--file should end in .csv, .txt or .parquet, but got {path}.")
    try:
        if kind == "parquet":
            return pd.read_parquet(path).rename(columns=str)
        return _read_csv(path, separator)
    except (OSError, ImportError, ValueError) as error:  # those of pandas and pyarrow, and ours
        raise InputError(f"{path} could not be read as {kind}: {error}") from error


def _read_csv(path: Path, separator: str | None) -> pd.DataFrame:
    with path.open(encoding="utf-8-sig") as file:
        heading = file.readline()
    if "\0" in heading:
        raise InputError("it has bytes of value 0, as in UTF-16.")
    unquoted = re.sub(r'"[^"]*"', "", heading)
    separator = separator or max(",;\t|", key=unquoted.count)
    # With the line below: where that is longer, pandas takes its first values for names of rows.
    names = pd.read_csv(path, sep=separator, header=None, nrows=2, dtype=str).iloc[0]
    if names.isna().any() or names.duplicated().any():
        raise InputError(
            f"each column should have a name of its own, but got {_listed(names)}. Rename columns, "
            "and leave out row numbers (index=False in pandas, row.names=FALSE in R)."
        )
    # In one piece, because the type of a column that is read in pieces may change between them.
    return pd.read_csv(path, sep=separator, low_memory=False).apply(_with_decimal_points)


def _with_decimal_points(column: pd.Series) -> pd.Series:
    """Numbers, for a column of text that has numbers with decimal commas."""
    if pd.api.types.is_numeric_dtype(column):
        return column
    text = column.dropna().astype(str).str.strip()
    commas = text[text.str.contains(",")]
    if commas.empty or not text.str.fullmatch(NUMBER_WITH_COMMAS).all():
        return column
    if text.str.fullmatch(PERHAPS_THOUSANDS).all() or not text.str.fullmatch(DECIMAL_COMMA).all():
        raise InputError(
            f"commas in column {column.name!r}, as in {commas.iloc[0]}, may be decimal or separate "
            "thousands. Write its numbers with decimal points alone."
        )
    return column.str.strip().str.replace(",", ".").astype(float)


# --- Coding ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Regression:
    """A generalised linear model of the rows of a table.

    `X` has the columns `names`. Coefficients are of logits for "bernoulli", of logarithms for
    "poisson". `outcome` says what `y` is, and `notes` what was done to the table.
    """

    X: np.ndarray
    y: np.ndarray
    names: tuple[str, ...]
    family: str
    outcome: str
    notes: tuple[str, ...]

    def model(self) -> pm.Model:
        """An ordinary model of all rows: ``beta``, for Normal outcomes ``log_sigma``, and ``y``."""
        # Counts and measurements may be orders of magnitude away from where a prior expects them.
        mean = float(self.y.mean()) if "Intercept" in self.names else 0.0
        spread = float(np.sqrt(np.mean((self.y - mean) ** 2))) if self.family == "normal" else 1.0
        center = {"bernoulli": 0.0, "normal": mean, "poisson": np.log(mean or 1.0)}[self.family]
        location = np.where(np.array(self.names) == "Intercept", center, 0.0)
        with pm.Model(coords={"coefficient": self.names}) as model:
            beta = pm.Normal("beta", location, PRIOR_SD * spread, dims="coefficient")
            predictor = self.X.astype(pytensor.config.floatX) @ beta
            if self.family == "bernoulli":
                pm.Bernoulli("y", logit_p=predictor, observed=self.y)
            elif self.family == "poisson":
                pm.Poisson("y", pm.math.exp(predictor), observed=self.y)
            else:
                log_sigma = pm.Normal("log_sigma", np.log(spread), 1.0)
                pm.Normal("y", predictor, pm.math.exp(log_sigma), observed=self.y)
        return model


def make_regression(
    frame: pd.DataFrame,
    outcome: str | None = None,
    columns: Sequence[str] = (),
    formula: str | None = None,
    family: str | None = None,
) -> Regression:
    """Code a table, by a formula in place of an outcome and columns where there is one.

    The family of an outcome with two values is "bernoulli", that of others "normal", where not
    given. Columns of the design are standardised but for those of zeros and ones. Rows with missing
    values, and columns that those before them determine, are left out with a note. What formula and
    table cannot have between them is an `InputError`.

    Examples
    --------
    >>> frame = pd.DataFrame({"dose": [1.0, 2, 3], "ward": list("abb"), "ill": [0, 1, 0]})
    >>> regression = make_regression(frame, formula="ill ~ dose + ward")
    >>> regression.names, regression.family
    (('Intercept', 'dose', 'ward[b]'), 'bernoulli')
    """
    try:
        from formulae import design_matrices, model_description
    except ModuleNotFoundError as error:
        raise InputError('Install formulae by: pip install "pymc_sgmcmc[demo]"') from error
    text = formula or f"`{outcome}` ~ {' + '.join(f'`{name}`' for name in columns) or 1}"
    try:
        used = sorted(filter(None, model_description(text).var_names))  # numbers are nameless
    except Exception as error:  # whatever its parser stumbles on
        raise InputError(
            f"The formula should be like 'y ~ x + C(group)', but got {text!r}: {error}"
        ) from error
    unknown = [name for name in used if name not in frame]
    if unknown:
        raise InputError(
            f"The table has no column {_listed(map(repr, unknown))}. Its columns are "
            f"{_listed(frame)}; --separator says what is between those of a CSV file."
        )
    notes = []
    holes = frame[used].isna()
    complete = ~holes.any(axis=1)
    where = f"missing values (in {_listed(holes.columns[holes.any()])})"
    if not complete.any():
        raise InputError(
            f"The table should have rows without missing values, but each of its {len(frame)} rows "
            f"has {where}. Fill them in, or leave columns out by --columns."
        )
    if not complete.all():
        notes.append(f"dropped {(~complete).sum():,} of {len(frame):,} rows, which have {where}")
    table = frame.loc[complete, used].apply(_in_known_type)
    for name in columns if formula is None else ():
        levels = table[name].nunique()
        if not pd.api.types.is_numeric_dtype(table[name]) and levels > MOST_LEVELS:
            raise InputError(
                f"Column {name!r} is text with {levels} different values, but groups may be "
                f"{MOST_LEVELS}. Correct them, leave it out by --columns or name it in a --formula."
            )
    functions = {"np": np, "log": np.log, "exp": np.exp, "sqrt": np.sqrt}
    try:
        design = design_matrices(text, table, na_action="error", extra_namespace=functions)
    except Exception as error:  # functions in a formula raise what they like
        raise InputError(f"The formula {text!r} does not fit the table: {error!r}.") from error
    if design.response is None or design.common is None or design.group is not None:
        raise InputError(
            f"The formula should be like 'y ~ x + C(group)', without (1 | group), but got {text!r}."
        )
    label = text.partition("~")[0].strip().replace("`", "")
    coded = np.asarray(design.response.design_matrix)
    # Text comes as an indicator for each of its values.
    values = pd.Series(coded) if coded.ndim == 1 else table[design.response.name]
    y, chosen, meaning = _coded_outcome(values, label, family)
    if family is None and chosen == "normal" and not (y % 1).any():
        notes.append(
            f"the outcome {label!r} has {values.nunique()} distinct values, not two, so the "
            "regression is linear; --family poisson is for counts"
        )
    matrix = design.common.as_dataframe()
    X, names = _standardised(matrix), np.array(matrix.columns)
    # The diagonal of R has the distance of each column to the span of those before it.
    distance = np.zeros(len(names))
    distance[: len(X)] = np.abs(np.diag(np.linalg.qr(X, mode="r")))
    dependent = distance <= DEPENDENT * np.linalg.norm(X, axis=0)
    if dependent.any():
        notes.append(f"dropped {_listed(names[dependent])}: determined by the columns before")
    if formula is None and dependent[1:].all():
        raise InputError(
            f"No column but {label!r} differs between rows, so nothing explains it. Add a column "
            "with at least two values."
        )
    kept = tuple(names[~dependent].tolist())
    return Regression(X[:, ~dependent], y, kept, chosen, meaning, tuple(notes))


def _coded_outcome(
    outcome: pd.Series, name: str, family: str | None
) -> tuple[np.ndarray, str, str]:
    """Outcomes as numbers, their family, and what they are."""
    levels = sorted(outcome.unique())
    numeric = pd.api.types.is_numeric_dtype(outcome)
    family = family or ("normal" if numeric and len(levels) > 2 else "bernoulli")
    suits = len(levels) == 2 if family == "bernoulli" else numeric and np.isfinite(outcome).all()
    if family == "poisson" and suits:
        suits = not (outcome % 1).any() and outcome.min() >= 0
    if len(levels) < 2 or not suits:
        raise InputError(
            f"The outcome {name!r} should have two distinct values, or be finite numbers (counts "
            f"for poisson), but has {len(levels)} ({_listed(levels)}). Choose another by --outcome."
        )
    if family == "bernoulli":
        y = (outcome == levels[1]).to_numpy()
        zero, one = (f"{level:g}" if numeric else level for level in levels)
        which = "" if levels == [0, 1] else f" is {one}, not {zero},"
        return y, family, f"{name}{which} in {y.mean():.1%}"
    y = outcome.to_numpy(dtype=float)
    return y, family, f"{name} has mean {y.mean():.4g} and sd {y.std():.4g}"


def _standardised(matrix: pd.DataFrame) -> np.ndarray:
    infinite = ~np.isfinite(matrix).all()
    if infinite.any():
        raise InputError(
            f"{_listed(matrix.columns[infinite])} should be finite, but has infinite values. "
            "Correct them, or leave out their rows."
        )
    # Indicators stay as they are: that of a rare event, divided by its sd, would be so large that
    # the prior says nothing of the event.
    numbers = ~matrix.isin((0.0, 1.0)).all()
    # The largest first, since squares of large numbers overflow.
    X = matrix.to_numpy(dtype=float) / np.where(numbers, matrix.abs().max(), 1.0)
    # Without an intercept nothing makes up for another origin.
    X -= np.where(numbers & ("Intercept" in matrix), X.mean(axis=0), 0.0)
    sd = X.std(axis=0)
    return X / np.where(numbers & (sd > 0), sd, 1.0)


def _in_known_type(column: pd.Series) -> pd.Series:
    """The column in one of the types that formulae knows."""
    kind = pd.api.types.infer_dtype(column)
    if kind in ("boolean", "integer", "floating", "mixed-integer-float"):
        return column.astype(float)
    if kind in ("string", "mixed-integer", "categorical"):
        return column if kind == "categorical" else column.astype(str)
    raise InputError(
        f"Column {column.name!r} has the type {kind}, which is neither numbers nor text. Turn it "
        "into numbers (dates into days), or leave it out by --columns."
    )


def _listed(values: Iterable[Any]) -> str:
    shown = [str(value) for value in values]
    more = f" and {len(shown) - LISTED} more" if len(shown) > LISTED else ""
    return ", ".join(shown[:LISTED]) + more
