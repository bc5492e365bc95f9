"""Bayesian regression on a table: read a file, have Bambi make the model, sample and report."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import arviz as az
import arviz_plots as azp
import matplotlib
import numpy as np
import pandas as pd
from arviz_base import dataset_to_dataarray
from pandas.api.types import is_numeric_dtype
from rich.console import Console
from rich.table import Table
from xarray import DataTree

from pymc_sgmcmc import datasets
from pymc_sgmcmc.checks import import_optional
from pymc_sgmcmc.errors import NonFinitePositionError
from pymc_sgmcmc.record import SAMPLE_DIMS
from pymc_sgmcmc.sampling import sample
from pymc_sgmcmc.sampling.store import write_file
from pymc_sgmcmc.sampling.trace import groups_of_points
from pymc_sgmcmc.step_methods import SGLDCV
from pymc_sgmcmc.trace_tools.bias import bias_report
from pymc_sgmcmc.tuning import laplace_draws

MOST_LEVELS = 20
"""A column of text with at most this many different values is taken for groups. A column with more
values usually holds names, or numbers with a typing error among them. A message lists as many."""

MOST_PLOTTED = 60
"""The plot shows at most this many coefficients, since each makes it 0.4 inches higher."""

NUMBER_WITH_COMMAS = r"[+-]?\d[\d.]*(?:,\d+)*(?:[eE][+-]?\d+)?"
DECIMAL_COMMA = r"[+-]?\d+(?:,\d+)?(?:[eE][+-]?\d+)?"
PERHAPS_THOUSANDS = r"[+-]?(?:[1-9]\d{0,2},\d{3}|\d+)"
"""These patterns match numbers with commas of any kind, numbers whose comma can be a decimal comma,
and numbers whose comma can be either a decimal comma or a separator of thousands."""


class InputError(ValueError):
    """The input cannot be used; the message says what to change."""


def run(options: argparse.Namespace, example: str, paths: Sequence[Path]) -> list[str]:
    """Sample, report, write the trace and the plot, and return why files could not be written."""
    # Names of columns may look like markup.
    console = Console(markup=False, highlight=False, emoji=False)
    failed = []

    def write(path: Path, make: Callable[[], bytes]) -> None:
        try:
            write_file(path, make())
            console.print(f"Written: {path}", soft_wrap=True)  # unbroken, to be copied
        except (OSError, ImportError) as error:
            failed.append(
                f"{str(path)!r} could not be written: {getattr(error, 'strerror', None) or error}. "
                "Make room for it or give another folder by --output, then run again."
            )

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: console.print(f"Warning: {message}")
        frame, outcome, columns = load(options, example)
        model, notes = make_model(frame, outcome, columns, options.formula, options.family)
        for note in notes:
            console.print(f"Note: {note}.", style="yellow")
        console.print(model)
        trace, laplace = draws_of(model, options, console.is_terminal)
        # Made in memory, since HDF5 ends the process if it cannot write to a file.
        write(paths[0], lambda: bytes(trace.to_netcdf(engine="h5netcdf")))
        report = bias_report(trace)
        console.print(comparison(model, trace, laplace, report))
        console.print(report.attrs["verdict"])
        if model.family.name == "bernoulli":
            fitted = model.predict(trace.isel(draw=[0]), inplace=False)["posterior"]["p"]
            if ((fitted.mean(SAMPLE_DIMS) > 0.5) == model.response_term.data).all():
                console.print("Note: predictors separate the outcomes, so the prior matters.")
        write(paths[1], lambda: forest_plot(model, trace, laplace))
    return failed


# --- Tables ---------------------------------------------------------------------------------------


def load(options: argparse.Namespace, example: str) -> tuple[pd.DataFrame, str, list[str]]:
    """The table, and outcome and predictors of a model without a formula."""
    if options.file is not None:
        frame = read_table(options.file, options.separator)
        columns = [column for column in frame if column != options.outcome]
    else:
        try:
            dataset = datasets.load(options.data)
        except (OSError, ImportError, ValueError) as error:  # their messages say what to do
            raise InputError(str(error)) from error
        columns = list(dataset.feature_names)
        frame = dataset.frame.assign(**{example: dataset.frame.eval(example)})
    return frame, options.outcome or example, options.columns or columns


def read_table(path: Path, separator: str | None = None) -> pd.DataFrame:
    """Read a CSV file in UTF-8, with decimal points or commas, or a parquet file.

    Where no separator of a CSV file is given, it is the most frequent of ``,;|`` and the tab in the
    line of names. A file that cannot be read, or that can be read in two ways, is an `InputError`.
    """
    kind = "parquet" if path.suffix == ".parquet" else "CSV in UTF-8"
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


# --- Model ----------------------------------------------------------------------------------------


def make_model(
    frame: pd.DataFrame,
    outcome: str = "",
    columns: Sequence[str] = (),
    formula: str | None = None,
    family: str | None = None,
) -> tuple[Any, list[str]]:
    """Model of Bambi by a formula, or by the names of an outcome and columns, and notes about it.

    Where no family is given, an outcome with two values is "bernoulli", ``p(k, n)`` is "binomial"
    and any other is "gaussian". What does not fit together is an `InputError`.

    Examples
    --------
    >>> frame = pd.DataFrame({"dose": [1.0, 2, 3], "ward": list("abb"), "ill": [0, 1, 0]})
    >>> model, _ = make_model(frame, formula="ill ~ dose + ward")
    >>> model.backend.model.free_RVs, model.family.name
    ([Intercept, dose, ward], 'bernoulli')
    """
    bambi = import_optional("bambi", "demo", "The command")
    formulae = import_optional("formulae", "demo", "The command")
    families = importlib.import_module("bambi.defaults.families").BUILTIN_FAMILIES
    if family is not None and family not in families:
        raise InputError(f"--family should be one of {', '.join(families)}, but got {family!r}.")
    notes = []
    if formula is None:
        same = [
            name for name in columns if name in frame and frame[name].nunique(dropna=False) == 1
        ]
        if same:
            notes.append(f"left out {_listed(same)}, with one value in all rows")
        columns = [name for name in columns if name not in same]
        if not columns:
            raise InputError(f"No column except {outcome!r} differs between rows. Add a predictor.")
        if quoting := [name for name in (outcome, *columns) if "`" in name]:
            raise InputError(f"The name {quoting[0]!r} has a backtick. Rename the column.")
        formula = f"`{outcome}` ~ {' + '.join(f'`{name}`' for name in columns)}"
    try:
        parser = formulae.parser.Parser(formulae.scanner.Scanner(formula).scan())
        terms = formulae.resolver.Resolver(parser.parse()).resolve()
        if not parser.at_end():  # the parser stops without a word at what it cannot use
            left = " ".join(token.lexeme for token in parser.tokens[parser.current : -1])
            raise InputError(f"{left!r} cannot follow what is before it.")
        response = terms.response.term.components[0]
    except Exception as error:  # the parser of formulae raises errors of many types
        raise InputError(
            f"The formula should be like 'y ~ x + C(group)', but got {formula!r}: {error}"
        ) from error
    table = _rows_of(frame, sorted(filter(None, terms.var_names)), notes)  # numbers have no name
    parts = [part.name for term in terms.common_terms for part in getattr(term, "components", ())]
    for name in table.columns.intersection(parts):
        if not is_numeric_dtype(table[name]) and (levels := table[name].nunique()) > MOST_LEVELS:
            raise InputError(
                f"Column {name!r}, which is not of numbers, should have at most {MOST_LEVELS} "
                f"different values, but has {levels}. Leave it out, or write (1|{name}) for "
                "effects of groups in a --formula."
            )
    if response.name in table and response.reference is None:
        family = _coded(table, response.name, family, notes)
    elif family is None:
        callee = getattr(getattr(response, "call", None), "callee", None)
        other = "gaussian" if callee else "bernoulli"  # as in y["yes"]
        family = "binomial" if callee in ("p", "prop", "proportion") else other
    try:
        # Formulae prints errors before it raises them. What a formula calls may raise any error.
        with contextlib.redirect_stdout(io.StringIO()), np.errstate(all="ignore"):
            model = bambi.Model(formula, table, family=family)
            _build(model)
    except Exception as error:
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        raise InputError(
            f"The formula {formula!r} does not fit the table as {family}: {kind}"
            f"{str(error).rstrip('.!')}. Check its terms, and whether its outcome suits the "
            "family, as C(y) suits cumulative and p(k, n) suits binomial."
        ) from error
    return model, notes


def _rows_of(frame: pd.DataFrame, names: list[str], notes: list[str]) -> pd.DataFrame:
    """Columns of a table without rows that have missing values, numbers in double precision."""
    if unknown := [name for name in names if name not in frame]:
        raise InputError(
            f"The table has no column {_listed(map(repr, unknown))}. Its columns are "
            f"{_listed(frame)}. If they are wrong, give the --separator of the CSV file."
        )
    if "Intercept" in names:
        raise InputError("The column 'Intercept' has the name of a coefficient. Rename it.")
    holes = frame[names].isna()
    table = frame.loc[~holes.any(axis=1), names]
    where = f"missing values (in {_listed(holes.columns[holes.any()])})"
    if table.empty:
        raise InputError(
            f"The table should have rows without missing values, but each of its {len(frame)} rows "
            f"has {where}. Fill them in, or leave out columns by --columns."
        )
    if len(table) < len(frame):
        notes.append(f"dropped {len(frame) - len(table):,} of {len(frame):,} rows with {where}")
    # Products of small integers would overflow.
    numeric = {name: is_numeric_dtype(table[name]) for name in names}
    table = table.astype({name: float if numeric[name] else "category" for name in names})
    return table.apply(lambda of: of if numeric[of.name] else of.cat.remove_unused_categories())


def _coded(table: pd.DataFrame, name: str, family: str | None, notes: list[str]) -> str:
    """Make zeros and ones of an outcome with two values in the table, and return the family."""
    numeric = is_numeric_dtype(table[name])
    levels = sorted(table[name].unique()) if numeric else [*table[name].cat.categories]
    family = family or ("gaussian" if numeric and len(levels) > 2 else "bernoulli")
    if family == "bernoulli":
        if len(levels) != 2:
            raise InputError(
                f"The outcome {name!r} should have two different values, or more for a --family "
                f"other than bernoulli, but has {len(levels)}: {_listed(levels)}."
            )
        table[name] = (table[name] == levels[1]).astype(float)
        zero, one = (f"{level:g}" if numeric else level for level in levels)
        notes.append(f"{name} is {one}, not {zero}, in {table[name].mean():.1%} of rows")
    return family


def _build(model: Any) -> None:
    """Build a model of Bambi under names that PyMC takes, if its values can be used."""
    response = model.response_term
    reserved = {*model.family.likelihood.params, *SAMPLE_DIMS}
    for term in [*_parameter(model).terms.values(), response]:
        name = term.name.replace("/", "÷")  # PyMC takes no slashes
        term.alias = f"{name}_" if name in reserved else name
    for term in [*_parameter(model).common_terms.values(), response]:
        values = np.asarray(term.data, dtype=float)
        kinds = ("censored", "constrained", "truncated", "weighted")
        if any(getattr(term, f"is_{kind}", False) for kind in kinds):
            values = values[:, 0]  # further columns are bounds, which may be infinite, or weights
        if not values.size:
            raise InputError(f"`{term.name}` has one value in all rows")
        if not np.isfinite(values).all():
            raise InputError(f"`{term.name}` has missing or infinite values")
    if (values == values[0]).all():
        one = _listed(np.unique(values))
        raise InputError(f"the outcome `{response.name}` is {one} in all rows")
    if model.family.name in ("gaussian", "t"):
        # Bambi has scaled their priors by the further columns, too.
        model.scaler.response_mean, model.scaler.response_std = values.mean(), values.std()
        model.scaler.scale()
    model.build()
    observed = model.backend.model.observed_RVs[0]
    if observed.ndim > 1 + observed.owner.op.ndim_supp:
        raise InputError(f"`{response.name}` should have one column, but has {len(values[0])}")
    if observed.dtype.startswith("int") and (values % 1).any():
        raise InputError(f"`{response.name}` should be counts, but has fractions")


def _parameter(model: Any) -> Any:
    """The parameter of the family that the formula is for."""
    return model.parameters[model.family.likelihood.parent]


def _listed(values: Iterable[Any]) -> str:
    shown = [str(value) for value in values]
    more = f" and {len(shown) - MOST_LEVELS} more" if len(shown) > MOST_LEVELS else ""
    return ", ".join(shown[:MOST_LEVELS]) + more


# --- Run and report -------------------------------------------------------------------------------


def draws_of(
    model: Any, options: argparse.Namespace, progressbar: bool
) -> tuple[DataTree, DataTree]:
    """Draws, of which there are fewer after an interrupt, and as many of Laplace's approximation.

    Bambi centres predictors. In ``posterior`` the intercept is that of predictors as they are, and
    in ``sample_stats`` it is that of centred ones.
    """
    made: list[tuple[Any, SGLDCV]] = []

    def make_step(model: Any) -> SGLDCV:
        step = SGLDCV(model=model, bias=options.bias, compile_kwargs={"mode": options.mode})
        made.append((model, step))
        return step

    joint = model.backend.model
    # Parameters of each row in each draw would fill the memory.
    of_rows = {*model.family.likelihood.params} & {each.name for each in joint.deterministics}
    names = [each.name for each in joint.unobserved_RVs if each.name not in of_rows]
    settings = {name: getattr(options, name) for name in ("draws", "tune", "chains", "cores")}
    try:
        trace = sample(
            **settings,
            step=make_step,
            random_seed=options.seed,
            var_names=names,
            model=joint,
            progressbar=progressbar,
        )
    except (ValueError, NonFinitePositionError) as error:
        raise InputError(str(error)) from error
    chains, draws = (trace["posterior"].sizes[name] for name in SAMPLE_DIMS)
    if draws < 4:  # of which no tool makes anything
        raise KeyboardInterrupt
    sampled, step = made[-1]
    assert step.center is not None  # computed whenever the step size is
    posterior = step.posterior
    points = [
        posterior.point_at(posterior.layout.ravel(each))
        for each in laplace_draws(posterior, step.center, chains * draws)
    ]
    values = {name: np.stack([point[name] for point in points]) for name in points[0]}
    names = [name for name in names if name in sampled.named_vars]
    laplace = DataTree.from_dict(groups_of_points(sampled, values, chains, names))
    trace, laplace = (model.backend._clean_results(tree, True, False) for tree in (trace, laplace))
    return trace, laplace


def comparison(model: Any, trace: DataTree, laplace: DataTree, report: pd.DataFrame) -> Table:
    """ArviZ's summary beside Laplace's approximation and the variance errors of `bias_report`."""
    terms = [term.alias for term in _parameter(model).terms.values()]
    variables = [str(name) for name in trace["posterior"].data_vars]
    # The effects of groups may be thousands.
    shown = [name for name in terms if name in variables and "|" not in name]
    shown += [name for name in variables if name not in terms]
    how: dict[str, Any] = {"var_names": shown, "round_to": "none"}
    summary, other = (az.summary(tree, **how).astype(float) for tree in (trace, laplace))
    columns = summary[["mean", "sd", "eti89_lb", "eti89_ub", "ess_bulk", "r_hat"]].copy()
    columns[["Laplace_mean", "Laplace_sd"]] = other[["mean", "sd"]]
    # "ward[ward_dim=b]" and "sigma_log__" are coordinates of "ward[b]" and "sigma".
    errors = report["variance_error"].rename(lambda label: re.sub(r"[^\[ ]+=|_[a-z]+__", "", label))
    columns["variance_error"] = errors.reindex(summary.index)
    formats = {"ess_bulk": ".0f", "r_hat": ".2f", "variance_error": ".3f"}
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("coefficient", overflow="fold", vertical="bottom")
    for name in columns:
        style = "cyan" if name.startswith("Laplace") else None
        table.add_column(name.replace("_", "\n"), justify="right", overflow="fold", style=style)
    for label, row in columns.iterrows():
        # Two digits of the standard deviation.
        decimals = max(0, 1 - int(np.floor(np.log10(row["sd"])))) if 0 < row["sd"] < np.inf else 3
        form = f".{decimals}f" if decimals < 6 else ".3e"
        table.add_row(label, *(f"{value:{formats.get(name, form)}}" for name, value in row.items()))
    return table


def forest_plot(model: Any, trace: DataTree, laplace: DataTree) -> bytes:
    """PNG of the intervals of the coefficients beside those of Laplace's approximation.

    Coefficients of numbers are multiplied by the standard deviations of these, which makes them
    comparable. The intercept, which may be far away, is left out where there are others.
    """
    scales = {}
    for term in _parameter(model).common_terms.values():
        data = np.asarray(term.data, dtype=float)
        scales[term.alias] = 1.0 if np.isin(data, (0, 1)).all() else data.std(0)
    effects = {}
    for label, tree in {"SGLD-CV": trace, "Laplace": laplace}.items():
        posterior = tree["posterior"].to_dataset()
        values = posterior[[*scales] or [name for name in posterior if "|" not in str(name)]]
        values = values.assign({name: values[name] * scale for name, scale in scales.items()})
        array = dataset_to_dataarray(values, sample_dims=SAMPLE_DIMS)[..., :MOST_PLOTTED]
        array = array.drop_vars("variable").rename("effect", label="coefficient")
        effects[label] = DataTree.from_dict({"posterior": array.to_dataset()})
    matplotlib.use("agg")
    plot = azp.plot_forest(
        effects,
        combined=True,
        labels=["coefficient"],
        backend="matplotlib",
        figure_kwargs={"figsize": (9, 1.5 + 0.4 * array.sizes["coefficient"])},
    )
    plot.add_legend("model")
    figure = plot.viz["figure"].item()
    figure.supxlabel("effect of one standard deviation, or of 1 in place of 0")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150, bbox_inches="tight")
    return content.getvalue()
