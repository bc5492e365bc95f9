"""Plots of traces: what is drawn, by which backend, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from arviz_plots import PlotCollection

from pymc_sgmcmc import (
    bias_report,
    plot_bias,
    plot_ess_bias,
    plot_gradient_trace,
    plot_zero_variance,
    zero_variance,
)
from pymc_sgmcmc.trace_tools.plots import _shown
from tests.support.langevin_chains import Gaussian, as_trace

LABELS = ["intercept", "beta[age]", "beta[height]"]


def trace_of(dimension: int, step_size: float) -> xr.DataTree:
    scales = np.geomspace(1, 100, dimension)
    target = Gaussian(np.diag(scales), np.diag(scales))
    M = np.diag(1 / scales)
    x, g = target.chains(4, 800, step_size, M, seed=1)
    trace = as_trace(x, g, step_size, M, bias=0.05)
    group = trace["sgmcmc_settings"]
    group["precision"] = group["preconditioner"].copy(data=np.diag(scales))
    labels = LABELS if dimension == 3 else [f"theta[{number}]" for number in range(dimension)]
    for name in ("sample_stats", "sgmcmc_settings"):
        dataset = trace[name].to_dataset().assign_coords(unconstrained_position=labels)
        trace[name] = xr.DataTree(dataset)
    return trace


@pytest.fixture(scope="module")
def trace() -> xr.DataTree:
    return trace_of(3, 0.4)


@pytest.fixture(autouse=True)
def no_windows():
    with mpl.rc_context({"backend": "Agg"}):
        yield
        plt.close("all")


def visuals(collection: PlotCollection, panel: int = 0) -> list[dict]:
    """What the backend "none" would have drawn."""
    return collection.viz["plot"].values.ravel()[panel]


def named(collection: PlotCollection, function: str, panel: int = 0) -> list[dict]:
    return [one for one in visuals(collection, panel) if one["function"] == function]


PLOTS = [plot_bias, plot_gradient_trace, plot_zero_variance, plot_ess_bias]


@pytest.mark.parametrize("plot", PLOTS)
def test_figure_and_its_file(plot, trace, tmp_path):
    before = trace.copy(deep=True)
    collection = plot(trace, backend="matplotlib", figure_kwargs={"figsize": (5, 4)})
    xr.testing.assert_identical(trace, before)
    assert isinstance(collection, PlotCollection)
    assert isinstance(collection.viz["figure"].item(), mpl.figure.Figure)
    np.testing.assert_allclose(collection.viz["figure"].item().get_size_inches(), (5, 4))
    collection.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5_000


@pytest.mark.parametrize("dimension", [3, 60])
def test_labels_do_not_overlap(dimension):
    """Each parameter has its own label, at least as far from the next as the text is high."""
    axes = plot_bias(trace_of(dimension, 0.4), backend="matplotlib").viz["plot"].item()
    axes.figure.canvas.draw()
    boxes = [one.get_window_extent() for one in axes.get_yticklabels()]
    assert len(boxes) == dimension
    for upper, lower in pairwise(boxes):
        assert lower.y1 <= upper.y0
    assert min(box.x0 for box in boxes) >= 0


def test_bias_is_that_of_the_report(trace):
    report = bias_report(trace)
    axes = plot_bias(trace, backend="matplotlib").viz["plot"].item()
    assert [one.get_text() for one in axes.get_yticklabels()] == LABELS
    points = axes.collections[0].get_offsets()
    np.testing.assert_allclose(points[:, 0], report["variance_error"])
    np.testing.assert_array_equal(points[:, 1], [3, 2, 1])
    positions = {tuple(line.get_xdata()) for line in axes.lines}
    assert {(0.05, 0.05), (0.0, 0.0)} <= positions
    first = report.iloc[0]
    half = 1.96 * first["variance_error_se"]
    ends = (first["variance_error"] - half, first["variance_error"] + half)
    assert any(np.allclose(one, ends) for one in positions)
    wide = plot_bias(trace, bias=0.3, backend="matplotlib").viz["plot"].item()
    assert (0.3, 0.3) in {tuple(line.get_xdata()) for line in wide.lines}


def test_gradient_trace_shades_what_is_not_converged(trace):
    def shaded(idata):
        collection = plot_gradient_trace(idata, backend="matplotlib")
        return collection.viz["plot"].values[0].patches, collection

    none, collection = shaded(trace)
    assert not none
    assert collection.viz["plot"]["panel"].values.tolist() == ["statistic", *LABELS]
    assert [one.get_title() for one in collection.viz["plot"].values[1:]] == LABELS
    late = trace.copy(deep=True)
    late["sample_stats"]["gradient"][1, :40] += 50.0 * np.sqrt([1, 10, 100])
    some, collection = shaded(late)
    assert len(some) == 1
    assert "Converged after" in collection.viz["plot"].values[0].get_title()


def test_coordinates_of_the_gradient_trace(trace):
    collection = plot_gradient_trace(trace, var_names="beta[age]", backend="matplotlib")
    assert collection.viz["plot"]["panel"].values.tolist() == ["statistic", "beta[age]"]
    with pytest.raises(ValueError, match=r"some of intercept, beta\[age\], .*, but got \['age'\]"):
        plot_gradient_trace(trace, var_names=["age"])
    many = plot_gradient_trace(trace_of(12, 0.4), backend="matplotlib")
    assert many.viz["plot"].size == 6
    renamed = trace.copy()
    labels = ["statistic", *LABELS[1:]]
    for name in ("sample_stats", "sgmcmc_settings"):
        dataset = trace[name].to_dataset().assign_coords(unconstrained_position=labels)
        renamed[name] = xr.DataTree(dataset)
    panels = plot_gradient_trace(renamed, backend="none").viz["plot"]["panel"].values.tolist()
    assert panels == ["convergence statistic", *labels]


def test_zero_variance_of_a_trace_and_of_a_result(trace):
    found = zero_variance(trace, order=2)
    collections = [
        plot_zero_variance(found, backend="matplotlib"),
        plot_zero_variance(trace, order=2, backend="matplotlib"),
    ]
    table = found.summary()
    for collection in collections:
        before, after = collection.viz["plot"].item().collections
        np.testing.assert_array_equal(before.get_offsets()[:, 0], 0)
        expected = (table["mean"] - table["mean_before"]) / table["mcse_before"]
        np.testing.assert_allclose(after.get_offsets()[:, 0], expected)
    with pytest.raises(ValueError, match="`order` are settings of `zero_variance`"):
        plot_zero_variance(found, order=2)


def test_several_runs(trace):
    runs = {"small step": trace_of(3, 0.1), "large step": trace}
    with pytest.warns(UserWarning, match=r"Not converged: .* `beta\[age\]` with R-hat"):
        collection = plot_ess_bias(runs, backend="matplotlib")
    axes = collection.viz["plot"].item()
    for points, run in zip(axes.collections, runs.values(), strict=True):
        report = bias_report(run)
        np.testing.assert_allclose(points.get_offsets()[:, 0], report["ess_bulk"])
        np.testing.assert_allclose(points.get_offsets()[:, 1], report["variance_error"])
    legend = collection.viz["figure"].item().legends[0]
    assert [one.get_text() for one in legend.get_texts()] == list(runs)
    with pytest.raises(ValueError, match="but got no trace"):
        plot_ess_bias({})


@pytest.mark.parametrize("plot", PLOTS)
def test_backend_is_honoured(plot, trace):
    """The one that draws nothing, and so has no figure of matplotlib."""
    collection = plot(trace, backend="none")
    assert collection.backend == "none"
    assert not plt.get_fignums()
    assert visuals(collection)


@pytest.mark.parametrize("backend", ["bokeh", "plotly"])
@pytest.mark.parametrize("plot", PLOTS)
def test_other_backends(plot, backend, trace, tmp_path):
    """Optional libraries, which the tests do not ask for."""
    pytest.importorskip(f"arviz_plots.backend.{backend}", exc_type=ImportError)
    collection = plot(trace, backend=backend)
    collection.savefig(tmp_path / "plot.html")
    assert (tmp_path / "plot.html").stat().st_size > 5_000
    assert not plt.get_fignums()


def test_variables_are_chosen_as_in_arviz(trace):
    for plot in (plot_bias, plot_ess_bias):
        collection = plot(trace, var_names=["beta[height]", "intercept"], backend="none")
        (points,) = named(collection, "scatter")
        assert len(points["x"]) == 2
    axes = plot_bias(trace, var_names="beta", backend="matplotlib").viz["plot"].item()
    assert [one.get_text() for one in axes.get_yticklabels()] == LABELS[1:]
    with pytest.raises(ValueError, match=r"`var_names` should name some of .*, but got \['age'\]"):
        plot_bias(trace, var_names="age")
    renamed = trace.copy()
    for name in ("sample_stats", "sgmcmc_settings"):
        labels = ["scale_log__", "scale_of_all", "other_interval__[a]"]
        dataset = trace[name].to_dataset().assign_coords(unconstrained_position=labels)
        renamed[name] = xr.DataTree(dataset)
    axes = plot_bias(renamed, var_names=["other", "scale"], backend="matplotlib").viz["plot"].item()
    assert [one.get_text() for one in axes.get_yticklabels()] == [
        "other_interval__[a]",
        "scale_log__",
    ]


LABELLED = ["sigma_log__", "sigma_b_log__", "b[k=u]", "b[k=v]", "c[k=u, m=1]", "d[0]"]


@pytest.mark.parametrize(
    ("var_names", "coords", "expected"),
    [
        ("sigma", None, [0]),
        (["sigma_b", "b[v]"], None, [1, 3]),
        ("~b", None, [0, 1, 4, 5]),
        (["~b", "~sigma"], None, [1, 4, 5]),
        (None, {"k": "u"}, [0, 1, 2, 4, 5]),
        ("b", {"k": ["v", "w"]}, [3]),
        ("c[k=u, m=1]", {"m": 1}, [4]),
        ("d", None, [5]),
    ],
)
def test_what_is_shown(var_names, coords, expected):
    assert _shown(LABELLED, var_names, coords) == [LABELLED[number] for number in expected]


def test_coords_that_nothing_has(trace):
    for plot in (plot_bias, plot_ess_bias, plot_gradient_trace):
        with pytest.raises(ValueError, match=r"`coords` should have values of 'k' .* got 'u'"):
            plot(trace, coords={"k": "u"})


def test_many_rows_and_constant_ones(trace, monkeypatch):
    monkeypatch.setattr("pymc_sgmcmc.trace_tools.plots.MOST_ROWS", 2)
    with pytest.warns(UserWarning, match="2 of 3 rows are shown, those with the largest errors"):
        collection = plot_bias(trace, backend="none")
    errors = np.sort(bias_report(trace)["variance_error"])[1:]
    np.testing.assert_allclose(np.sort(named(collection, "scatter")[0]["x"]), errors)
    half_constant = trace.copy(deep=True)
    values = half_constant["posterior"]["theta"].values
    values[..., 0] = 1 / 3
    collection = plot_zero_variance(half_constant, backend="none")
    assert [len(one["x"]) for one in named(collection, "scatter")] == [2, 2]


def test_what_nobody_stated_is_called_the_default(trace):
    given = trace.copy()
    stats = given["sample_stats"].to_dataset().assign_attrs(sgmcmc_step_size_from="given")
    given["sample_stats"] = xr.DataTree(stats)
    title = plot_bias(given, backend="matplotlib").viz["plot"].item().get_title()
    assert "dashed: default 0.05" in title
    assert "the default 0.05" in bias_report(given).attrs["verdict"]
    assert "the stated 0.1" in bias_report(given, bias=0.1).attrs["verdict"]


@pytest.mark.parametrize("plot", PLOTS)
def test_wrong_settings(plot, trace):
    with pytest.raises(ValueError, match="`backend` should be one of"):
        plot(trace, backend="xx")
    with pytest.raises(ValueError, match="`visuals` should be one of"):
        plot(trace, visuals={"nonsense": False})
    with pytest.raises(TypeError, match=r"`idata` should be .* but is of type list"):
        plot([trace, trace])


def test_visuals_are_set_and_left_out(trace):
    bare = plot_bias(trace, backend="none", visuals={"stated": False, "interval": False})
    assert len(named(bare, "vline")) == 1
    assert not named(bare, "line")
    red = plot_bias(trace, backend="none", visuals={"point_estimate": {"color": "red"}})
    assert named(red, "scatter")[0]["facecolor"] == "red"
    assert (
        not plot_gradient_trace(trace, backend="matplotlib", visuals={"legend": False})
        .viz["figure"]
        .item()
        .legends
    )
