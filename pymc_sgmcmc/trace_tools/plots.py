"""Plots of traces in the style of arviz-plots, on any of its backends.

All of them return a `PlotCollection`, whose methods `show` and `savefig` show and save the figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import xarray as xr
from xarray import DataTree

from pymc_sgmcmc.checks import one_of
from pymc_sgmcmc.errors import warn
from pymc_sgmcmc.trace_tools.bias import bias_report
from pymc_sgmcmc.trace_tools.convergence import gradient_convergence, window_means
from pymc_sgmcmc.trace_tools.reader import read_run
from pymc_sgmcmc.trace_tools.verdict import UNUSABLE
from pymc_sgmcmc.trace_tools.zero_variance import ZeroVariance, zero_variance

if TYPE_CHECKING:
    from arviz_plots import PlotCollection

INTERVAL = 1.96
"""Half the width of the intervals, in standard errors. It is the 97.5 % quantile of the normal law,
so that the intervals have a probability of 95 %."""

ROW_HEIGHT = 0.22
"""The row of a parameter has this height in inches, which is a little more than that of its
label."""

DOTS_AN_INCH = 100
"""An inch has this number of dots on backends that have no inches. It is the default of
matplotlib."""

MOST_TRACES = 5
"""Gradients of this number of coordinates are shown where the user names none, so that the figure
fits on a screen."""

MOST_POINTS = 2_000
"""At most this number of evenly spaced windows of a chain is shown. It is about two for each dot of
the width."""

MOST_ROWS = 200
"""A plot has at most this number of rows. Larger figures cannot be read, and not all backends can
save them."""

BACKENDS = ("matplotlib", "bokeh", "plotly", "none")
"""These are the backends of arviz-plots. The backend "none" draws nothing."""

Visuals = Mapping[str, Mapping[str, Any] | bool]
"""Settings of each visual by its name, or False to leave it out."""


def plot_bias(
    idata: DataTree,
    *,
    bias: float | None = None,
    var_names: str | Sequence[str] | None = None,
    coords: Mapping[str, Any] | None = None,
    backend: str | None = None,
    visuals: Visuals | None = None,
    **pc_kwargs: Any,
) -> PlotCollection:
    """Plot the relative variance error of each coordinate with 95 % intervals, and the stated bias.

    The numbers are those of `bias_report`. Where an interval is to the right of the dashed line,
    the variance is too large by more than the stated bias.

    Parameters
    ----------
    idata : xarray.DataTree
        Trace as for `bias_report`. It is not changed.
    bias : float, optional
        Stated relative error of the variance. The default is that of the run.
    var_names : str or sequence of str, optional
        Variables, or labels of coordinates of the position. ``"beta"`` stands for all of
        ``beta[...]``, ``"sigma"`` for the coordinate of ``log(sigma)``, and ``"~beta"`` for all
        other coordinates. The default is all coordinates, but at most the 200 with the largest
        errors.
    coords : mapping of str to value or sequence, optional
        Values of dimensions, as in ``{"feature": ["age", "height"]}``.
    backend : {"matplotlib", "bokeh", "plotly"}, optional
        The default is that of ``arviz_base.rcParams``.
    visuals : mapping of str to mapping or False, optional
        Settings of ``point_estimate``, ``interval``, ``stated``, ``zero``, ``labels``,
        ``ticklabels`` and ``title``. They are passed to the functions of `arviz_plots.visuals`.
        False leaves a visual out.
    **pc_kwargs
        Settings of `arviz_plots.PlotCollection`, with ``figure_kwargs`` for the figure.

    Returns
    -------
    arviz_plots.PlotCollection
    """
    report = _report(idata, bias)
    stated, called = report.attrs["bias"], report.attrs["bias_called"]
    report = report.loc[_shown(report.index, var_names, coords)]
    report = report.iloc[_first(report["variance_error"], "with the largest errors")]
    known = ("point_estimate", "interval", "stated", "zero", "labels", "ticklabels", "title")
    drawing = _Drawing.rows(report.index, 1, backend, visuals, known, pc_kwargs)
    drawing.draw("vline", "stated", stated, color="C1", linestyle=drawing.dashed)
    rows = np.arange(len(report), 0, -1)
    error, se = (report[name].to_numpy() for name in ("variance_error", "variance_error_se"))
    drawing.intervals(error, INTERVAL * se, rows, color="C0")
    drawing.draw("labelled_x", "labels", text="relative error of the variance")
    drawing.draw("labelled_title", "title", text=f"Variance error (dashed: {called} {stated:.3g})")
    return drawing.collection


def _report(idata: DataTree, bias: float | None) -> pd.DataFrame:
    """Bias report, with a warning where the run says little about the posterior.

    Warns
    -----
    UserWarning
    """
    report = bias_report(idata, bias=bias)
    verdict = report.attrs["verdict"]
    if verdict.startswith(UNUSABLE):
        warn(verdict, UserWarning)
    return report


def plot_gradient_trace(
    idata: DataTree,
    *,
    var_names: str | Sequence[str] | None = None,
    coords: Mapping[str, Any] | None = None,
    backend: str | None = None,
    visuals: Visuals | None = None,
    figure_kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> PlotCollection:
    """Plot the convergence statistic along each chain, and means of windows of stored gradients.

    The panel at the top has the statistic of `gradient_convergence` relative to its bound, with a
    line for each chain. At stationarity 95 % of the windows are below the line at 1. The panels
    below have the means of the windows for some coordinates, in standard deviations of the last
    half. They are about zero at stationarity. The draws before the slowest chain has converged are
    shaded, or all draws where a chain never does.

    Parameters
    ----------
    idata : xarray.DataTree
        Trace as for `gradient_convergence`. It is not changed.
    var_names : str or sequence of str, optional
        Variables, or labels of coordinates of the position, as for `plot_bias`. Where neither these
        nor `coords` are given, the five coordinates with the largest means of windows are shown.
    coords : mapping of str to value or sequence, optional
        Values of dimensions, as for `plot_bias`.
    backend : {"matplotlib", "bokeh", "plotly"}, optional
        The default is that of ``arviz_base.rcParams``.
    visuals : mapping of str to mapping or False, optional
        Settings of ``statistic``, ``bound``, ``gradient``, ``zero``, ``unconverged``, ``names``,
        ``labels``, ``title`` and ``legend``, as for `plot_bias`.
    figure_kwargs : mapping, optional
        Settings of the figure.
    **settings
        Settings of `gradient_convergence`.

    Returns
    -------
    arviz_plots.PlotCollection
    """
    convergence = gradient_convergence(idata, **settings)
    run = read_run(idata, agreeing_chains=False)
    length, draws = convergence.attrs["window"], convergence["draw"].values
    means = np.stack([window_means(chain, length) for chain in run.gradients])
    scale = means[:, means.shape[1] // 2 :].std((0, 1))
    means /= np.where(scale > 0, scale, 1)
    if var_names is None and coords is None:
        sizes = np.abs(means).max((0, 1))
        shown = sorted(np.argsort(-sizes, kind="stable")[:MOST_TRACES].tolist())
    else:
        shown = [run.labels.index(label) for label in _shown(run.labels, var_names, coords)]
    names = [run.labels[number] for number in shown]
    # The panels need different names, also where a variable is called statistic.
    names = ["statistic" if "statistic" not in names else "convergence statistic", *names]
    pc_kwargs = {"figure_kwargs": dict(figure_kwargs or {})}
    known = (
        "statistic", "bound", "gradient", "zero", "unconverged", "names", "labels", "title",
        "legend",
    )  # fmt: skip
    drawing = _Drawing(names, (9.0, 1.0 + 1.6 * len(names)), backend, visuals, known, pc_kwargs)
    every = slice(None, None, max(1, -(-len(draws) // MOST_POINTS)))
    colors = drawing.backend.get_default_aes("color", len(run.chains), {})
    cut = int(convergence["unconverged_draws"].max())
    for panel, name in enumerate(names):
        drawing.target = drawing.targets[panel]
        if cut > 0:
            # A window has the label of its last draw.
            last = draws[min(max(cut - length, 0), len(draws) - 1)]
            drawing.draw("vspan", "unconverged", [draws[0], last], color="gray", alpha=0.15)
        if panel == 0:
            drawing.draw("hline", "bound", 1.0, color="black", alpha=0.6)
            values = (convergence["statistic"] / convergence["bound"]).values
            drawing.draw("set_yscale", "scale", scale="log")
        else:
            drawing.draw("hline", "zero", 0.0, color="gray", alpha=0.5)
            values = means[..., shown[panel - 1]]
        visual = "gradient" if panel else "statistic"
        for chain, color in enumerate(colors):
            line = {"x": draws[every], "y": values[chain, every]}
            drawing.draw("line_xy", visual, **line, color=color, alpha=0.8, width=1)
        if panel == 0:
            drawing.draw("labelled_y", "labels", text="statistic / bound")
        else:
            drawing.draw("labelled_title", "names", text=name, size=9)
    drawing.draw("labelled_x", "labels", text=f"last draw of a window of {length}")
    drawing.target = drawing.targets[0]
    unconverged = convergence["unconverged_draws"].values
    drawing.draw("labelled_title", "title", text=_verdict(unconverged, run.gradients.shape[1]))
    if len(colors) > 1:
        drawing.legend(colors, [str(chain) for chain in run.chains], "chain")
    return drawing.collection


def plot_zero_variance(
    idata: DataTree | ZeroVariance,
    *,
    backend: str | None = None,
    visuals: Visuals | None = None,
    figure_kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> PlotCollection:
    """Plot 95 % intervals of posterior means without and with zero-variance control variates.

    The means are shown as differences from the mean without control variates, in units of its
    standard error, so that parameters of all scales can be compared.

    Parameters
    ----------
    idata : xarray.DataTree or ZeroVariance
        A trace as for `zero_variance`, or a result of that. It is not changed.
    backend : {"matplotlib", "bokeh", "plotly"}, optional
        The default is that of ``arviz_base.rcParams``.
    visuals : mapping of str to mapping or False, optional
        Settings of ``point_estimate``, ``interval``, ``zero``, ``labels``, ``ticklabels``,
        ``title`` and ``legend``, as for `plot_bias`.
    figure_kwargs : mapping, optional
        Settings of the figure.
    **settings
        Settings of `zero_variance`, where a trace is given.

    Returns
    -------
    arviz_plots.PlotCollection
    """
    if isinstance(idata, ZeroVariance):
        if settings:
            raise ValueError(
                f"{', '.join(f'`{name}`' for name in settings)} are settings of `zero_variance`, "
                "but its result was given. Pass the trace, or leave them out."
            )
        means = idata
    else:
        means = zero_variance(idata, **settings)
    table = means.summary()
    table = table[table["variance_ratio"].notna()]  # Constant functions have no error.
    ratio = float(np.median(table["variance_ratio"]))
    table = table.iloc[_first(-np.arange(len(table)), "that are first: choose by `var_names`")]
    pc_kwargs = {"figure_kwargs": dict(figure_kwargs or {})}
    known = ("point_estimate", "interval", "zero", "labels", "ticklabels", "title", "legend")
    drawing = _Drawing.rows(table.index, 1.5, backend, visuals, known, pc_kwargs)
    unit = table["mcse_before"].to_numpy()
    rows = np.arange(len(table), 0, -1)
    shift = (table["mean"] - table["mean_before"]).to_numpy() / unit
    drawing.intervals(np.zeros(len(rows)), np.full(len(rows), INTERVAL), rows + 0.17, color="C0")
    half = INTERVAL * table["mcse"].to_numpy() / unit
    drawing.intervals(shift, half, rows - 0.17, color="C1")
    drawing.draw("labelled_x", "labels", text="difference of means, in standard errors without")
    drawing.draw("labelled_title", "title", text=f"Means: variance ratio {ratio:.3g} (median)")
    drawing.legend(["C0", "C1"], ["without", "with"], "control variates")
    return drawing.collection


def plot_ess_bias(
    idata: DataTree | Mapping[str, DataTree],
    *,
    bias: float | None = None,
    var_names: str | Sequence[str] | None = None,
    coords: Mapping[str, Any] | None = None,
    backend: str | None = None,
    visuals: Visuals | None = None,
    **pc_kwargs: Any,
) -> PlotCollection:
    """Plot the effective sample size of each coordinate and the relative error of its variance.

    Good runs are to the right and below the dashed line, which is the stated bias. A smaller step
    size moves a run down and to the left. A better preconditioner, or less noise of the gradient,
    moves it down or to the right alone. The names are those of the most biased coordinate of each
    run, and of the one with the fewest effective draws.

    Parameters
    ----------
    idata : xarray.DataTree or mapping of str to xarray.DataTree
        Trace as for `bias_report`, or several traces by name. They are not changed.
    bias : float, optional
        Stated relative error of the variance. The default is that of each run.
    var_names : str or sequence of str, optional
        Variables, or labels of coordinates of the position, as for `plot_bias`. The default is all
        coordinates.
    coords : mapping of str to value or sequence, optional
        Values of dimensions, as for `plot_bias`.
    backend : {"matplotlib", "bokeh", "plotly"}, optional
        The default is that of ``arviz_base.rcParams``.
    visuals : mapping of str to mapping or False, optional
        Settings of ``point``, ``interval``, ``stated``, ``zero``, ``names``, ``labels``, ``title``
        and ``legend``, as for `plot_bias`.
    **pc_kwargs
        Settings of `arviz_plots.PlotCollection`, with ``figure_kwargs`` for the figure.

    Returns
    -------
    arviz_plots.PlotCollection
    """
    if not isinstance(idata, DataTree | Mapping):
        raise TypeError(
            "`idata` should be a trace or a mapping from names to traces, but is of type "
            f"{type(idata).__name__}."
        )
    runs = {"": idata} if isinstance(idata, DataTree) else dict(idata)
    if not runs:
        raise ValueError("`idata` should be a trace or traces by name, but got no trace.")
    reports = {name: _report(trace, bias) for name, trace in runs.items()}
    called = " or ".join(sorted({report.attrs["bias_called"] for report in reports.values()}))
    for name, report in reports.items():
        attrs = report.attrs
        reports[name] = report.loc[_shown(report.index, var_names, coords)]
        reports[name].attrs = attrs
    known = ("point", "interval", "stated", "zero", "names", "labels", "title", "legend")
    drawing = _Drawing(["ess_bias"], (7.0, 5.0), backend, visuals, known, pc_kwargs)
    colors = drawing.backend.get_default_aes("color", len(reports), {})
    drawing.draw("hline", "zero", 0.0, color="gray", alpha=0.5)
    stated = {report.attrs["bias"] for report in reports.values()}
    everything = np.concatenate([report["ess_bulk"] for report in reports.values()])
    wide = everything.max() > 10 * everything.min()
    low, high = everything.min(), everything.max()
    middle = np.sqrt(low * high) if wide else (low + high) / 2
    for color, (name, report) in zip(colors, reports.items(), strict=True):
        ess, error = report["ess_bulk"].to_numpy(), report["variance_error"].to_numpy()
        half = INTERVAL * report["variance_error_se"].to_numpy()
        line = color if len(stated) > 1 else "black"
        if len(stated) > 1 or name == next(iter(reports)):
            drawing.draw(
                "hline", "stated", report.attrs["bias"], color=line, linestyle=drawing.dashed
            )
        ends = {"plot_axis": ["x", "y_bottom", "y_top"]}
        lines = xr.DataArray([ess, error - half, error + half], ends, ("plot_axis", "coordinate"))
        drawing.draw("ci_line_y", "interval", lines, color=color, alpha=0.4)
        drawing.draw("scatter_xy", "point", x=ess, y=error, color=color)
        # The most biased is named above its interval, the one with the fewest draws below.
        named = ((int(np.argmax(error)), 1, "bottom"), (int(np.argmin(ess)), -1, "top"))
        for number, sign, side in named:
            drawing.draw(
                "annotate_xy", "names", x=ess[number], y=error[number] + sign * half[number],
                text=report.index[number], color=color, size=8, vertical_align=side,
                horizontal_align="right" if ess[number] > middle else "left",
            )  # fmt: skip
    if wide:
        drawing.draw("set_xscale", "scale", scale="log")
    drawing.draw("labelled_x", "labels", text="effective sample size (bulk)")
    drawing.draw("labelled_y", "labels", text="relative error of the variance")
    title = f"Effective sample size and bias (dashed: {called})"
    drawing.draw("labelled_title", "title", text=title)
    if len(reports) > 1:
        drawing.legend(colors, list(reports), "run")
    return drawing.collection


# --- Parts ----------------------------------------------------------------------------------


class _Drawing:
    """A figure of arviz-plots with panels one below the other, and the visuals that draw in it."""

    def __init__(
        self,
        panels: Sequence[str],
        size: tuple[float, float],
        backend: str | None,
        visuals: Visuals | None,
        known: tuple[str, ...],
        pc_kwargs: dict[str, Any],
    ):
        # Imported here, since they take most of a second.
        from arviz_base import rc_context, rcParams
        from arviz_plots import PlotCollection

        name = one_of("backend", backend or rcParams["plot.backend"], BACKENDS)
        try:
            self.backend = import_module(f"arviz_plots.backend.{name}")
        except ImportError:
            raise ImportError(
                f'`backend="{name}"` needs more libraries: `pip install "arviz-plots[{name}]"`.'
            ) from None
        self.dashed = self.backend.get_default_aes("linestyle", 2, {})[-1]
        self.visuals = dict(visuals or {})
        for visual in self.visuals:
            one_of("visuals", visual, known)
        figure_kwargs = dict(pc_kwargs.pop("figure_kwargs", {}))
        if "figsize" not in figure_kwargs:
            unit, scale = ("inches", 1) if name == "matplotlib" else ("dots", DOTS_AN_INCH)
            figure_kwargs["figsize"] = (scale * size[0], scale * size[1])
            figure_kwargs["figsize_units"] = unit
        figure_kwargs["figsize"] = self.backend.scale_fig_size(
            figure_kwargs["figsize"], figsize_units=figure_kwargs.pop("figsize_units", None)
        )
        if name == "matplotlib":
            # The layout makes room for labels and the legend.
            figure_kwargs.setdefault("layout", "constrained")
        figure_kwargs |= {"figsize_units": "dots", "sharex": len(panels) > 1}
        data = xr.Dataset(coords={"panel": list(panels)})
        with rc_context({"plot.max_subplots": None}):  # The user says how many panels there are.
            self.collection = PlotCollection.grid(
                data, rows=["panel"], backend=name, figure_kwargs=figure_kwargs, **pc_kwargs
            )
        self.targets = list(self.collection.viz["plot"].values)
        self.target = self.targets[0]

    @classmethod
    def rows(
        cls,
        labels: Sequence[str],
        factor: float,
        backend: str | None,
        visuals: Visuals | None,
        known: tuple[str, ...],
        pc_kwargs: dict[str, Any],
    ) -> _Drawing:
        """One panel with a row for each label, the first at the top, and a line at zero."""
        count = len(labels)
        size = (7.0, 1.5 + ROW_HEIGHT * factor * max(count, 4))
        drawing = cls(["rows"], size, backend, visuals, known, pc_kwargs)
        ticks = drawing.settings("ticklabels")
        if ticks is not None:
            # arviz_plots.visuals has no function for ticks of this axis.
            drawing.backend.yticks(np.arange(count, 0, -1), list(labels), drawing.target, **ticks)
        drawing.draw("set_ylim", "limits", limits=(0.3, count + 0.7))
        drawing.draw("vline", "zero", 0.0, color="gray", alpha=0.5)
        return drawing

    def settings(self, visual: str, **defaults: Any) -> dict[str, Any] | None:
        """Settings of a visual by the user or by default, None where it is left out."""
        chosen = self.visuals.get(visual, True)
        if chosen is False:
            return None
        return defaults if chosen is True else {**defaults, **chosen}

    def draw(self, function: str, visual: str, data: Any = 0, **defaults: Any) -> None:
        """Draw a visual by a function of `arviz_plots.visuals`."""
        settings = self.settings(visual, **defaults)
        if settings is not None:
            visuals = import_module("arviz_plots.visuals")
            getattr(visuals, function)(xr.DataArray(data), self.target, **settings)

    def intervals(self, center: np.ndarray, half: np.ndarray, rows: np.ndarray, color: str) -> None:
        """Draw a point and a horizontal line in each row."""
        for x, width, row in zip(center, half, rows, strict=True):
            self.draw("line_x", "interval", [x - width, x + width], y=row, color=color)
        self.draw("scatter_xy", "point_estimate", x=center, y=rows, color=color)

    def legend(self, colors: Sequence[str], labels: Sequence[str], title: str) -> None:
        """Draw the names of the colours beside the panels."""
        settings = self.settings("legend")
        if settings is None:
            return
        if self.backend.__name__.endswith("matplotlib"):
            settings.setdefault("loc", "outside right center")  # A wide title needs the room above.
        module = import_module(f"{self.backend.__name__}.legend")
        kwargs = [{"color": color} for color in colors]
        module.legend(self.collection, kwargs, list(labels), title=title, **settings)


def _shown(
    labels: Sequence[str], var_names: str | Sequence[str] | None, coords: Mapping[str, Any] | None
) -> list[str]:
    """Labels of the coordinates that a user asks for, in the order of the names.

    As in ArviZ, names with "~" in front are left out, and `coords` apply to all variables with
    these dimensions.
    """
    chosen = list(labels)
    if var_names is not None:
        if not isinstance(var_names, str | Sequence):
            raise TypeError(
                f"`var_names` should be a name or a sequence of names, but got {var_names!r}."
            )
        names = [var_names] if isinstance(var_names, str) else list(var_names)
        of_names = {
            name: [label for label in labels if _is_of(label, name.removeprefix("~"))]
            for name in names
        }
        unknown = [name for name, matches in of_names.items() if not matches]
        if unknown or not names:
            raise ValueError(
                f"`var_names` should name some of {', '.join(list(labels)[:10])}"
                f"{', ...' if len(labels) > 10 else ''}, but got {unknown or 'an empty list'}."
            )
        named = list(dict.fromkeys(label for part in of_names.values() for label in part))
        without = all(name.startswith("~") for name in names)
        chosen = [label for label in labels if label not in named] if without else named
    for dim, values in (coords or {}).items():
        wanted = {f"{dim}={value}" for value in np.atleast_1d(values).tolist()}
        have = {
            label: {part for part in _parts(label) if part.startswith(f"{dim}=")}
            for label in chosen
        }
        if not set().union(*have.values()) & wanted:
            raise ValueError(
                f"`coords` should have values of {dim!r} as in coordinates such as "
                f"{', '.join(chosen[:3])}, but got {values!r}."
            )
        chosen = [label for label in chosen if not have[label] or have[label] & wanted]
    return chosen


def _parts(label: str) -> list[str]:
    """Parts of a label between the brackets, such as ``feature=age`` of ``beta[feature=age]``."""
    return label.partition("[")[2].removesuffix("]").split(", ")


def _is_of(label: str, name: str) -> bool:
    """Whether a name is that of a coordinate or of its variable."""
    base = label.partition("[")[0]
    bare = f"{base}[{', '.join(part.partition('=')[2] or part for part in _parts(label))}]"
    # PyMC appends the name of the transform, as in sigma_log__. Only one has an underscore in it.
    transform = base.removeprefix(f"{name}_").removesuffix("__")
    transformed = base == f"{name}_{transform}__" and (
        "_" not in transform or transform == "log_exp_m1"
    )
    return name in (label, base, bare) or transformed


def _first(sizes: Any, which: str) -> list[int]:
    """Numbers of the rows with the largest sizes, at most `MOST_ROWS`, in their order."""
    if len(sizes) <= MOST_ROWS:
        return list(range(len(sizes)))
    warn(f"{MOST_ROWS} of {len(sizes)} rows are shown, those {which}.", UserWarning)
    return sorted(np.argsort(-np.asarray(sizes), kind="stable")[:MOST_ROWS].tolist())


def _verdict(unconverged: np.ndarray, draws: int) -> str:
    """Title that says when the chains converged."""
    never = int((unconverged == draws).sum())
    if never:
        return f"{never} of {len(unconverged)} chains did not converge"
    if unconverged.max() == 0:
        return "All chains converged from the first draw on"
    return f"Converged after {int(unconverged.max())} of {draws} draws (shaded)"
