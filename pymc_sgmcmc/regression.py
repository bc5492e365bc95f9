"""Bayesian regression on a table: read a file, code it by formulae, and make a PyMC model."""

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
"""A regression may have these families of outcomes."""

PRIOR_SD = 2.5
"""The prior of a coefficient has this standard deviation, in logits, logarithms or standard
deviations of the outcome. It is weak for standardised columns, since a logit of 2.5 takes a
probability from 0.5 to 0.92."""

MOST_LEVELS = 20
"""Without a formula, a column of text with at most this many different values is taken for groups.
A column with more values usually holds names, or numbers with a typing error among them."""

DEPENDENT = 1e-6
"""Other columns determine a column where its distance to their span is at most this part of its
length. Rounding leaves a distance of about 1e-12 for a standardised column."""

LISTED = 20
"""A message lists at most this many names or values, so that it stays readable."""

NUMBER_WITH_COMMAS = r"[+-]?\d[\d.]*(?:,\d+)*(?:[eE][+-]?\d+)?"
DECIMAL_COMMA = r"[+-]?\d+(?:,\d+)?(?:[eE][+-]?\d+)?"
PERHAPS_THOUSANDS = r"[+-]?(?:[1-9]\d{0,2},\d{3}|\d+)"
"""These patterns match numbers with commas of any kind, numbers whose comma can be a decimal comma,
and numbers whose comma can be either a decimal comma or a separator of thousands."""


class InputError(ValueError):
    """The input cannot be used; the message says what to change."""


# --- Reading --------------------------------------------------------------------------------------


def read_table(path: Path, separator: str | None = None) -> pd.DataFrame:
    """Read a CSV file in UTF-8, with decimal points or commas, or a parquet file.

    Where no separator of a CSV file is given, it is the most frequent of ``,;|`` and the tab in the
    line of names. A file that cannot be read, or that can be read in two ways, is an `InputError`.
    """
    kind = {".parquet": "parquet", ".csv": "CSV in UTF-8", ".txt": "CSV in UTF-8"}.get(path.suffix)
    if kind is None:
        raise InputError(f"--file should end in .csv, .txt or .parquet, but got {path}.")
    try:
        if kind == "parquet":
            return pd.read_parquet(path).rename(columns=str)
        return _read_csv(path, separator)
    except (OSError, ImportError, ValueError) as error:  # InputError included
        raise InputError(f"{path} could not be read as {kind}: {error}") from error


def _read_csv(path: Path, separator: str | None) -> pd.DataFrame:
    with path.open(encoding="utf-8-sig") as file:
        heading = file.readline()
    if "\0" in heading:
        raise InputError("it has zero bytes, as in UTF-16. Save it in UTF-8.")
    unquoted = re.sub(r'"[^"]*"', "", heading)
    separator = separator or max(",;\t|", key=unquoted.count)
    # Together with the next line: if that is longer, pandas takes its first values for row names.
    names = pd.read_csv(path, sep=separator, header=None, nrows=2, dtype=str).iloc[0]
    if names.isna().any() or names.duplicated().any():
        raise InputError(
            f"each column should have a name of its own, but got {_listed(names)}. Rename columns, "
            "and leave out row numbers (index=False in pandas, row.names=FALSE in R)."
        )
    # In one piece, because the type of a column may differ between pieces.
    return pd.read_csv(path, sep=separator, low_memory=False).apply(_with_decimal_points)


def _with_decimal_points(column: pd.Series) -> pd.Series:
    """Convert a column of text to numbers where it holds numbers with decimal commas."""
    if pd.api.types.is_numeric_dtype(column):
        return column
    text = column.dropna().astype(str).str.strip()
    commas = text[text.str.contains(",")]
    if commas.empty or not text.str.fullmatch(NUMBER_WITH_COMMAS).all():
        return column
    if text.str.fullmatch(PERHAPS_THOUSANDS).all() or not text.str.fullmatch(DECIMAL_COMMA).all():
        raise InputError(
            f"commas in column {column.name!r}, as in {commas.iloc[0]}, may be decimal commas or "
            "separate thousands. Write its numbers with decimal points."
        )
    return column.str.strip().str.replace(",", ".").astype(float)


# --- Coding ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Regression:
    """A generalised linear model of the rows of a table.

    `X` has the columns `names`. The linear predictor is a logit for "bernoulli" and a logarithm for
    "poisson". `outcome` describes `y`, and `notes` lists the changes made to the table.
    """

    X: np.ndarray
    y: np.ndarray
    names: tuple[str, ...]
    family: str
    outcome: str
    notes: tuple[str, ...]

    def model(self) -> pm.Model:
        """An ordinary model of all rows: ``beta``, for normal outcomes ``log_sigma``, and ``y``."""
        # Priors follow the outcome, since counts and measurements can have any order of magnitude.
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
    """Code a table by a formula, or by the names of an outcome and columns.

    Where no family is given, an outcome with two values is "bernoulli" and any other is "normal".
    Columns of the design are standardised, except those of zeros and ones. Rows with missing values
    and columns that earlier columns determine are left out, with a note. A formula that does not
    fit the table is an `InputError`.

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
        raise InputError('Install formulae: pip install "pymc_sgmcmc[demo]"') from error
    text = formula or f"`{outcome}` ~ {' + '.join(f'`{name}`' for name in columns) or 1}"
    try:
        used = sorted(filter(None, model_description(text).var_names))  # numbers have no name
    except Exception as error:  # the parser of formulae raises errors of many types
        raise InputError(
            f"The formula should be like 'y ~ x + C(group)', but got {text!r}: {error}"
        ) from error
    unknown = [name for name in used if name not in frame]
    if unknown:
        raise InputError(
            f"The table has no column {_listed(map(repr, unknown))}. Its columns are "
            f"{_listed(frame)}. If they are wrong, give the --separator of the CSV file."
        )
    notes = []
    holes = frame[used].isna()
    complete = ~holes.any(axis=1)
    where = f"missing values (in {_listed(holes.columns[holes.any()])})"
    if not complete.any():
        raise InputError(
            f"The table should have rows without missing values, but each of its {len(frame)} rows "
            f"has {where}. Fill them in, or leave out columns by --columns."
        )
    if not complete.all():
        notes.append(f"dropped {(~complete).sum():,} of {len(frame):,} rows with {where}")
    table = frame.loc[complete, used].apply(_in_known_type)
    for name in columns if formula is None else ():
        levels = table[name].nunique()
        if not pd.api.types.is_numeric_dtype(table[name]) and levels > MOST_LEVELS:
            raise InputError(
                f"Column {name!r} of text should have at most {MOST_LEVELS} different values, but "
                f"has {levels}. Correct it, leave it out by --columns, or name it in a --formula."
            )
    functions = {"np": np, "log": np.log, "exp": np.exp, "sqrt": np.sqrt}
    try:
        design = design_matrices(text, table, na_action="error", extra_namespace=functions)
    except Exception as error:  # functions in a formula may raise any error
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
            f"the regression is linear, since the outcome {label!r} has {values.nunique()} "
            "different values; use --family poisson for counts"
        )
    matrix = design.common.as_dataframe()
    X, names = _standardised(matrix), np.array(matrix.columns)
    # The diagonal of R has the distance of each column to the span of those before it.
    distance = np.zeros(len(names))
    distance[: len(X)] = np.abs(np.diag(np.linalg.qr(X, mode="r")))
    dependent = distance <= DEPENDENT * np.linalg.norm(X, axis=0)
    if dependent.any():
        notes.append(f"dropped {_listed(names[dependent])}, which earlier columns determine")
    if formula is None and dependent[1:].all():
        raise InputError(
            f"No column except {label!r} differs between rows. Add a predictor with at least two "
            "values."
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
            f"The outcome {name!r} should have two different values, or finite numbers (counts for "
            f"poisson), but has {len(levels)}: {_listed(levels)}. Give another --outcome."
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
            "Correct or leave out their rows."
        )
    # Indicators are not scaled. The indicator of a rare event, divided by its sd, would be so large
    # that the prior would hardly bound the effect of the event.
    numbers = ~matrix.isin((0.0, 1.0)).all()
    # The largest first, since squares of large numbers overflow.
    X = matrix.to_numpy(dtype=float) / np.where(numbers, matrix.abs().max(), 1.0)
    # Centring changes the model where no intercept makes up for it.
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
        f"Column {column.name!r} should be numbers or text, but has the type {kind}. Convert it "
        "(dates into days), or leave it out by --columns."
    )


def _listed(values: Iterable[Any]) -> str:
    shown = [str(value) for value in values]
    more = f" and {len(shown) - LISTED} more" if len(shown) > LISTED else ""
    return ", ".join(shown[:LISTED]) + more
