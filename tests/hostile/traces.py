"""Faults planted in sound traces, for every tool that reads one.

A tool refuses, warns, or says in its result what is wrong; numbers alone are a wrong answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr
from xarray import DataTree

from pymc_sgmcmc import (
    SGLDCV,
    bias_report,
    discard_unconverged,
    gradient_convergence,
    gradients,
    kernel_stein_discrepancy,
    plot_bias,
    plot_ess_bias,
    plot_gradient_trace,
    plot_zero_variance,
    stein_calibrate,
    stein_thin,
    zero_variance,
)
from tests.hostile.case import add, case
from tests.hostile.shared import QUICK, line, line_data, run_of, shared_line

X, Y = line_data()
CHAINS, DRAWS = 4, 500
NUMBA = {"mode": "NUMBA"}
"""For the transitions of runs that many cases share."""


@functools.cache
def sound() -> DataTree:
    """A default run, with moments."""
    run = run_of(shared_line(), compile_kwargs=NUMBA)
    with shared_line():
        return sampled(run.step)


@functools.cache
def of_small_steps() -> DataTree:
    """The same at a three-hundredth of the step size, every transition recorded."""
    step_size = float(sound()["sample_stats"]["step_size"][0, -1]) / 300
    with shared_line():
        return sampled(
            SGLDCV(step_size=step_size, preconditioner="curvature", compile_kwargs=NUMBA)
        )


def sampled(step: Any) -> DataTree:
    """Draws of a step method."""
    return pm.sample(
        step=step,
        draws=DRAWS,
        tune=200,
        chains=CHAINS,
        cores=1,
        random_seed=3,
        progressbar=False,
        quiet=True,
        compute_convergence_checks=False,
    )


def rebuilt(
    positions: np.ndarray | None = None,
    slopes: np.ndarray | None = None,
    draws: np.ndarray | None = None,
    moments: bool = False,
) -> DataTree:
    """The sound trace with other positions, gradients and draws: the positions if not given."""
    idata = sound().copy(deep=True)
    stats, posterior = idata["sample_stats"], idata["posterior"]
    positions = stats["position"].values if positions is None else positions
    slopes = stats["gradient"].values if slopes is None else slopes
    groups = {name: node.to_dataset() for name, node in idata.children.items()}
    groups["sample_stats"] = stats.to_dataset().assign(
        position=stats["position"].copy(data=positions),
        gradient=stats["gradient"].copy(data=slopes),
    )
    groups["posterior"] = posterior.to_dataset().assign(
        beta=posterior["beta"].copy(data=positions if draws is None else draws)
    )
    if not moments:
        groups.pop("sgmcmc_moments")
    return DataTree.from_dict(groups)


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Copies of the positions and the gradients."""
    stats = sound()["sample_stats"]
    return stats["position"].values.copy(), stats["gradient"].values.copy()


def exact_gradients(positions: np.ndarray) -> np.ndarray:
    """Of all rows."""
    precision = X.T @ X + np.eye(2) / 4
    return X.T @ Y - positions @ precision


# --- Faults ---------------------------------------------------------------------------------------


def not_a_number_in_a_position() -> DataTree:
    x, g = arrays()
    x[1, 40, 0] = np.nan
    return rebuilt(x, g)


def infinity_in_a_gradient() -> DataTree:
    x, g = arrays()
    g[2, 40, 1] = np.inf
    return rebuilt(x, g)


def not_a_number_in_the_posterior() -> DataTree:
    x, g = arrays()
    draws = x.copy()
    draws[1, 40, 0] = np.nan
    return rebuilt(x, g, draws)


def one_coordinate_stuck() -> DataTree:
    x, g = arrays()
    x[..., 0] = 0.4
    return rebuilt(x, g)


def one_coordinate_stuck_in_one_chain() -> DataTree:
    x, g = arrays()
    x[1, :, 0] = x[1, 0, 0]
    return rebuilt(x, g)


def one_chain_stuck() -> DataTree:
    x, g = arrays()
    x[1], g[1] = x[1, :1], g[1, :1]
    return rebuilt(x, g)


def all_draws_alike() -> DataTree:
    x, g = arrays()
    x[:], g[:] = x[0, 0], g[0, 0]
    return rebuilt(x, g)


def one_chain_elsewhere() -> DataTree:
    x, _ = arrays()
    x[1] += 30 * x[0].std(0)
    return rebuilt(x, exact_gradients(x))


def two_settings() -> DataTree:
    parts = [one.sel(chain=[0, 1]) for one in (sound(), of_small_steps())]
    groups = {
        name: xr.concat(
            [one[name].to_dataset() for one in parts], "chain", combine_attrs="override"
        ).assign_coords(chain=range(4))
        for name in ("posterior", "sample_stats")
    }
    groups["sgmcmc_settings"] = sound()["sgmcmc_settings"].to_dataset()
    return DataTree.from_dict(groups)


def _grown(chains: list[int], to: float) -> np.ndarray:
    x, _ = arrays()
    growth = to ** (np.arange(DRAWS) / DRAWS)
    x[chains] *= growth[:, None]
    return x


def all_chains_diverged() -> DataTree:
    x = _grown([0, 1, 2, 3], 1e47)
    return rebuilt(x, exact_gradients(x))


def all_chains_diverged_a_little() -> DataTree:
    x = _grown([0, 1, 2, 3], 1e4)
    return rebuilt(x, exact_gradients(x))


def one_chain_diverged() -> DataTree:
    x = _grown([1], 1e47)
    return rebuilt(x, exact_gradients(x))


def a_single_chain_diverged() -> DataTree:
    x = _grown([1], 1e47)
    return rebuilt(x, exact_gradients(x)).sel(chain=[1])


def one_huge_draw() -> DataTree:
    x, _g = arrays()
    x[2, 250] = 1e30
    return rebuilt(x, exact_gradients(x))


def two_equal_coordinates() -> DataTree:
    x, g = arrays()
    x[..., 1], g[..., 1] = x[..., 0], g[..., 0]
    return rebuilt(x, g)


def gradients_of_other_data() -> DataTree:
    x, g = arrays()
    return rebuilt(x, g + X.T @ np.full(len(X), 0.5))


def gradients_of_the_wrong_sign() -> DataTree:
    x, g = arrays()
    return rebuilt(x, -g)


def gradients_of_zero() -> DataTree:
    x, g = arrays()
    return rebuilt(x, 0 * g)


def gradients_in_another_order() -> DataTree:
    x, g = arrays()
    return rebuilt(x, g[..., ::-1].copy())


def gradients_of_other_draws() -> DataTree:
    x, g = arrays()
    return rebuilt(x, g[:, ::-1].copy())


def posterior_of_other_draws() -> DataTree:
    x, g = arrays()
    return rebuilt(x, g, x[:, ::-1] + 1)


def positions_as_integers() -> DataTree:
    x, g = arrays()
    idata = rebuilt(x, g)
    stats = idata["sample_stats"].to_dataset()
    stats["position"] = stats["position"].copy(data=np.round(x).astype(int))
    idata["sample_stats"] = DataTree(stats)
    return idata


def three_draws() -> DataTree:
    return rebuilt().isel(draw=slice(3))


def six_draws() -> DataTree:
    return rebuilt().isel(draw=slice(6))


def chain_lost() -> DataTree:
    return rebuilt().isel(chain=0)


def draw_lost() -> DataTree:
    return rebuilt().isel(draw=0)


def draws_selected_in_one_group() -> DataTree:
    idata = rebuilt()
    idata["posterior"] = idata["posterior"].isel(draw=slice(100))
    return idata


def one_chain_twice() -> DataTree:
    x, g = arrays()
    x[1], g[1] = x[0], g[0]
    return rebuilt(x, g)


def no_gradients() -> DataTree:
    idata = rebuilt()
    idata["sample_stats"] = DataTree(idata["sample_stats"].to_dataset().drop_vars("gradient"))
    return idata


def of_another_sampler() -> DataTree:
    stats = xr.Dataset({"energy": (("chain", "draw"), np.ones((CHAINS, DRAWS)))})
    posterior = sound()["posterior"].to_dataset()
    return DataTree.from_dict({"posterior": posterior, "sample_stats": stats})


def a_dataset_in_place_of_a_trace() -> Any:
    return sound()["posterior"].to_dataset()


def nothing_in_place_of_a_trace() -> Any:
    return None


def a_path_in_place_of_a_trace() -> Any:
    return "trace.nc"


def an_empty_trace() -> DataTree:
    return DataTree()


# --- Tools ----------------------------------------------------------------------------------------


def words_of_bias_report(idata: DataTree) -> str:
    report = bias_report(idata)
    return "" if (report["verdict"] == "ok").all() else report.attrs["verdict"]


def words_of_zero_variance(idata: DataTree) -> str:
    return " ".join(zero_variance(idata).notes)


def words_of_gradient_convergence(idata: DataTree) -> str:
    found = gradient_convergence(idata)
    left_out = found["unconverged_draws"].values
    return f"chains without convergence: {left_out}" if left_out.max() >= DRAWS // 4 else ""


def words_of_discard_unconverged(idata: DataTree) -> str:
    left = discard_unconverged(idata)["sample_stats"]
    count = left.attrs["sgmcmc_discarded_draws"]
    return f"{count} draws left out" if count >= DRAWS // 4 else ""


ORDINARY_TITLES = ("All chains converged", "Variance error", "Means:", "Effective sample", "beta[")


def words_of_plot(tool: Callable[..., Any]) -> Callable[[Any], str]:
    """A plot whose title may say what is wrong."""

    def use(idata: Any) -> str:
        collection = tool(idata, backend="none")
        drawn = [element for panel in np.ravel(collection.viz["plot"].values) for element in panel]
        titles = [one["string"] for one in drawn if one["function"] == "title"]
        return " ".join(one for one in titles if not one.startswith(ORDINARY_TITLES))

    return use


def no_words(
    tool: Callable[..., Any], *arguments: Any, **settings: Any
) -> Callable[[DataTree], None]:
    """A tool whose result has no words of its own."""

    def use(idata: DataTree) -> None:
        tool(idata, *arguments, **settings)

    return use


def thinned_with_exact_gradients(idata: Any) -> None:
    if isinstance(idata, DataTree) and "sample_stats" in idata.children:
        idata["sample_stats"].attrs["sgmcmc_batch_size"] = len(Y)
    stein_thin(idata, draws=3)


TOOLS: dict[str, Callable[[Any], Any]] = {
    "bias_report": words_of_bias_report,
    "zero_variance": words_of_zero_variance,
    "stein_calibrate": no_words(stein_calibrate),
    "kernel_stein_discrepancy": no_words(kernel_stein_discrepancy),
    "stein_thin": thinned_with_exact_gradients,
    "gradient_convergence": words_of_gradient_convergence,
    "discard_unconverged": words_of_discard_unconverged,
    "plot_bias": words_of_plot(plot_bias),
    "plot_gradient_trace": words_of_plot(plot_gradient_trace),
    "plot_zero_variance": words_of_plot(plot_zero_variance),
    "plot_ess_bias": words_of_plot(plot_ess_bias),
}

PLOTS = tuple(name for name in TOOLS if name.startswith("plot_"))
BY_GRADIENTS_ALONE = ("gradient_convergence", "discard_unconverged", "plot_gradient_trace")
"""Tools that ask only whether gradients have mean zero."""
WITHOUT_THE_POSTERIOR = (
    *BY_GRADIENTS_ALONE,
    "bias_report",
    "kernel_stein_discrepancy",
    "plot_bias",
    "plot_ess_bias",
)
"""Tools that make nothing of the variables on the scale of the model."""

FAULTS: tuple[tuple[Callable[[], Any], str, tuple[str, ...]], ...] = (
    # A fault, what is said of it, and the tools to which it is none, or which show it in a picture.
    (not_a_number_in_a_position, "chain 1|finite", ()),
    (infinity_in_a_gradient, "chain 2|finite", ()),
    (not_a_number_in_the_posterior, "chain 1|posterior|finite|beta", WITHOUT_THE_POSTERIOR),
    (one_coordinate_stuck, "constant|move", ()),
    (one_coordinate_stuck_in_one_chain, "chain|constant|converged", ()),
    (one_chain_stuck, "chain|constant|converged", ()),
    (all_draws_alike, "constant|move", ()),
    (one_chain_elsewhere, "chain|converged", ()),
    (two_settings, "settings|step.size|runs|law|converge|chains? (\\[|with)", ()),
    (all_chains_diverged, "diverged|step.size|grow|converged|chain", ()),
    (all_chains_diverged_a_little, "diverged|step.size|grow|converged|chain", ()),
    (one_chain_diverged, "chain", ()),
    (a_single_chain_diverged, "diverged|step.size|grow|converged|chain", ()),
    (one_huge_draw, "diverged|step.size|chain|far|converged", ()),
    (
        two_equal_coordinates,
        "dependent|singular|equal|function|beta|draws",
        (*BY_GRADIENTS_ALONE, *PLOTS, "bias_report"),
    ),
    (gradients_of_other_data, "gradient|converge|model|data", ("kernel_stein_discrepancy", *PLOTS)),
    (
        gradients_of_the_wrong_sign,
        "gradient|positive|sign|too large|off",
        (*BY_GRADIENTS_ALONE, *PLOTS, "zero_variance"),  # whose coefficients change sign as well
    ),
    (gradients_of_zero, "gradient|constant|move|zero", ()),
    (
        gradients_in_another_order,
        "gradient|symmetric|positive",
        (
            *BY_GRADIENTS_ALONE,
            *PLOTS,
            "bias_report",
            "zero_variance",
            "kernel_stein_discrepancy",
            "stein_thin",
        ),
    ),
    (
        gradients_of_other_draws,
        "gradient|symmetric|positive",
        (
            *BY_GRADIENTS_ALONE,
            *PLOTS,
            "bias_report",
            "zero_variance",
            "kernel_stein_discrepancy",
            "stein_thin",
        ),
    ),
    (posterior_of_other_draws, "posterior|position|beta|function", WITHOUT_THE_POSTERIOR),
    (positions_as_integers, "position|integer|move|constant|whole", ()),
    (three_draws, "draws", ()),
    (six_draws, "draws", ("kernel_stein_discrepancy", "stein_thin", *BY_GRADIENTS_ALONE, *PLOTS)),
    (chain_lost, "chain", ()),
    (draw_lost, "draw", ()),
    (draws_selected_in_one_group, "draws", ()),
    (one_chain_twice, "chain", PLOTS),
    (no_gradients, "gradient", ()),
    (of_another_sampler, "gradient", ()),
    (a_dataset_in_place_of_a_trace, "DataTree|a trace", ()),
    (nothing_in_place_of_a_trace, "DataTree|a trace", ()),
    (a_path_in_place_of_a_trace, "DataTree|a trace", ()),
    (an_empty_trace, "sample_stats|posterior|gradient", ()),
)

for _fault, _says, _excluded in FAULTS:
    for _tool, _use in TOOLS.items():
        if _tool not in _excluded:
            add(
                f"traces.{_tool}_{_fault.__name__}",
                lambda use=_use, fault=_fault: use(fault()),
                _says,
            )


# --- Moments of all transitions -------------------------------------------------------------------


def with_moments(change: Callable[[xr.Dataset], None]) -> DataTree:
    """The sound trace with a fault in its moments."""
    idata = rebuilt(moments=True)
    group = idata["sgmcmc_moments"].to_dataset().copy(deep=True)
    change(group)
    idata["sgmcmc_moments"] = DataTree(group)
    return idata


def _not_a_number(group: xr.Dataset) -> None:
    group["batch_position"][1, 3, 0] = np.nan


def _infinity(group: xr.Dataset) -> None:
    group["group_position_gradient"][1, 3, 0, 0] = np.inf


def _stuck(group: xr.Dataset) -> None:
    group["batch_position"].values[..., 0] = 0.4 - group["origin"].values[:, None, 0]


def _stuck_in_one_chain(group: xr.Dataset) -> None:
    group["batch_position"][1, :, 0] = 0.4


def _elsewhere(group: xr.Dataset) -> None:
    group["batch_position"][1] += 30.0


def _diverged(group: xr.Dataset) -> None:
    batches = group.sizes["batch"]
    growth = xr.DataArray(1e47 ** (np.arange(batches) / batches), dims="batch")
    group["batch_position"] = (group["batch_position"] * growth).transpose(
        *group["batch_position"].dims
    )


def _of_two_lengths(group: xr.Dataset) -> None:
    group["transitions_a_batch"][1] += 7


def _chain_twice(group: xr.Dataset) -> None:
    group["batch_position"][1] = group["batch_position"][0]
    group["batch_gradient"][1] = group["batch_gradient"][0]


OF_MOMENTS: dict[str, Callable[[Any], Any]] = {
    "zero_variance_of_moments": lambda idata: " ".join(zero_variance(idata, moments="only").notes),
    "stein_calibrate_with_moments": no_words(stein_calibrate, moments=True),
}

for _name, _change, _says in (
    ("not_a_number", _not_a_number, "finite"),
    ("infinity", _infinity, "finite"),
    ("one_coordinate_stuck", _stuck, "constant|move"),
    ("one_coordinate_stuck_in_one_chain", _stuck_in_one_chain, "chain"),
    ("one_chain_elsewhere", _elsewhere, "chain"),
    ("all_chains_diverged", _diverged, "diverged|step.size|chain"),
    ("two_lengths", _of_two_lengths, "transitions|length"),
):
    for _tool, _use in OF_MOMENTS.items():
        add(
            f"traces.{_tool}_{_name}",
            lambda use=_use, change=_change: use(with_moments(change)),
            _says,
        )

for _tool, _use in OF_MOMENTS.items():
    for _name, _idata, _says in (
        (
            "some_draws_selected",
            lambda: rebuilt(moments=True).isel(draw=slice(100)),
            "moments|draws",
        ),
        (
            "one_draw_in_ten",
            lambda: rebuilt(moments=True).sel(draw=slice(None, None, 10)),
            "moments|draws",
        ),
        ("no_moments", rebuilt, "sgmcmc_moments|moments"),
        ("chain_lost", lambda: rebuilt(moments=True).isel(chain=0), "chain"),
        ("nothing_in_place_of_a_trace", nothing_in_place_of_a_trace, "DataTree"),
    ):
        add(f"traces.{_tool}_{_name}", lambda use=_use, idata=_idata: use(idata()), _says)


# --- Wrong arguments ------------------------------------------------------------------------------


def misuse(
    name: str, tool: Callable[..., Any], says: str, *arguments: Any, **settings: Any
) -> None:
    """Add a call of a tool on the sound trace with an argument that is none."""
    add(f"traces.{name}", lambda: no_words(tool, *arguments, **settings)(rebuilt()), says)


misuse("bias_report_bias_of_two", bias_report, "bias", bias=2.0)
misuse("bias_report_bias_as_text", bias_report, "bias", bias="5%")
misuse("bias_report_bias_nan", bias_report, "bias", bias=float("nan"))
misuse("bias_report_rerun_without_model", bias_report, "model", rerun=True)
misuse("zero_variance_order_zero", zero_variance, "order", order=0)
misuse("zero_variance_order_as_text", zero_variance, "order", order="two")
misuse("zero_variance_order_too_high", zero_variance, "order|terms|batches", order=40)
misuse("zero_variance_unknown_variable", zero_variance, "var_names", var_names=["gamma"])
misuse("zero_variance_number_as_variable", zero_variance, "var_names", var_names=3)
misuse("zero_variance_function_of_nothing", zero_variance, "func", func=lambda post: 3.0)
misuse("zero_variance_function_is_no_function", zero_variance, "func", func="beta")
misuse(
    "zero_variance_function_that_averages",
    zero_variance,
    "func",
    func=lambda post: post.mean("draw"),
)
misuse(
    "zero_variance_function_gives_text",
    zero_variance,
    "func|numbers",
    func=lambda post: post["beta"].astype(str),
)
misuse(
    "zero_variance_function_gives_nan",
    zero_variance,
    "func|finite",
    func=lambda post: np.log(post["beta"] - 50),
)
misuse(
    "zero_variance_constant_function", zero_variance, "constant", func=lambda post: 0 * post["beta"]
)
misuse("zero_variance_coefficients", zero_variance, "coefficients", coefficients="batch")
misuse("zero_variance_regression", zero_variance, "regression", regression="lasso")
misuse("zero_variance_batches_as_text", zero_variance, "batches", batches="20")
misuse("zero_variance_batches_zero", zero_variance, "batches", batches=0)
misuse("zero_variance_more_batches_than_draws", zero_variance, "batches", batches=10**6)
misuse(
    "zero_variance_of_moments_order",
    zero_variance,
    "order|sgmcmc_moments",
    order=0,
    moments="only",
)
misuse("kernel_stein_discrepancy_draws_zero", kernel_stein_discrepancy, "draws", draws=0)
misuse("kernel_stein_discrepancy_draws_as_text", kernel_stein_discrepancy, "draws", draws="all")
misuse("stein_thin_draws_zero", stein_thin, "draws", draws=0)
misuse(
    "stein_thin_more_draws_than_there_are", stein_thin, "draws", draws=10**6, model=shared_line()
)
misuse("stein_thin_gradients_of_minibatches", stein_thin, "minibatch", draws=5)
misuse("gradient_convergence_rule", gradient_convergence, "rule", rule="chi")
misuse("gradient_convergence_level", gradient_convergence, "level", level=95)
misuse("gradient_convergence_level_as_text", gradient_convergence, "level", level="high")
misuse("gradient_convergence_window_zero", gradient_convergence, "window", window=0)
misuse("gradient_convergence_window_too_long", gradient_convergence, "window", window=DRAWS)
misuse("gradient_convergence_bound", gradient_convergence, "`b`", rule="elementwise", b=-1)
misuse("gradient_convergence_bound_as_text", gradient_convergence, "`b`", rule="elementwise", b="1")
misuse("discard_unconverged_setting", discard_unconverged, "`windows`", windows=10)
misuse("plot_bias_unknown_variable", plot_bias, "var_names", var_names=["gamma"], backend="none")
misuse("plot_bias_backend", plot_bias, "backend", backend="matplotlip")
misuse("plot_bias_coords", plot_bias, "coords", coords={"feature": ["age"]}, backend="none")
misuse(
    "plot_gradient_trace_unknown_variable",
    plot_gradient_trace,
    "var_names",
    var_names="gamma",
    backend="none",
)
misuse(
    "plot_gradient_trace_number_as_variable",
    plot_gradient_trace,
    "var_names",
    var_names=3,
    backend="none",
)
misuse(
    "plot_zero_variance_unknown_variable",
    plot_zero_variance,
    "var_names",
    var_names="gamma",
    backend="none",
)
misuse(
    "plot_ess_bias_unknown_variable", plot_ess_bias, "var_names", var_names="gamma", backend="none"
)
misuse("plot_ess_bias_bias", plot_ess_bias, "bias", bias=-1, backend="none")


@case("trace")
def plot_ess_bias_of_no_traces():
    plot_ess_bias({}, backend="none")


# --- Gradients at the draws of any sampler --------------------------------------------------------


def gradients_at(idata: Any, model: Any = None) -> str:
    """Compute gradients at a few draws."""
    gradients(idata, shared_line() if model is None else model)
    return ""


def few(change: Callable[[xr.Dataset], xr.Dataset]) -> DataTree:
    """A trace with a changed posterior alone."""
    posterior = sound()["posterior"].to_dataset().isel(draw=slice(20))
    return DataTree.from_dict({"posterior": change(posterior)})


@case("model")
def gradients_without_a_model():
    gradients(few(lambda post: post))


@case("model|type")
def gradients_with_a_number_as_model():
    gradients(few(lambda post: post), 3)


@case("beta")
def gradients_without_a_variable():
    gradients_at(few(lambda post: post.drop_vars("beta")))


@case("beta|shape")
def gradients_of_another_shape():
    gradients_at(few(lambda post: post.isel(beta_dim_0=[0])))


@case("chain 1|finite|beta")
def gradients_at_a_draw_that_is_not_a_number():
    gradients_at(few(lambda post: post.where((post.chain != 1) | (post.draw != 3))))


@case("draw")
def gradients_with_a_dimension_lost():
    gradients_at(few(lambda post: post.isel(draw=0)))


@case("DataTree")
def gradients_of_a_dataset():
    gradients_at(sound()["posterior"].to_dataset())


@case("posterior")
def gradients_of_an_empty_trace():
    gradients_at(DataTree())


@case("`y`|data")
def gradients_with_other_outcomes():
    gradients_at(sound().isel(draw=slice(20)), line(X, Y + 1))


@case("scale|support|finite")
def gradients_outside_of_the_support():
    with pm.Model() as model:
        scale = pm.HalfNormal("scale")
        pm.Normal("y", 0, scale, observed=Y)
    draws = xr.Dataset({"scale": (("chain", "draw"), np.linspace(-1, 1, 20)[None])})
    gradients_at(DataTree.from_dict({"posterior": draws}), model)


@case("discrete")
def gradients_of_a_discrete_variable():
    with pm.Model() as model:
        rate = pm.DiscreteUniform("rate", 1, 9)
        pm.Poisson("y", rate, observed=np.arange(9))
    draws = xr.Dataset({"rate": (("chain", "draw"), np.full((1, 20), 3))})
    gradients_at(DataTree.from_dict({"posterior": draws}), model)


# --- Runs again -----------------------------------------------------------------------------------


@case("ok|cannot tell|within", slow=True)
def bias_report_rerun_of_a_rare_level():
    """The second run has the rows that the first had in each transition."""
    rng = np.random.default_rng(6)
    rare = np.column_stack([np.ones(20_000), np.arange(20_000) % 1667 == 0]).astype(float)
    model = line(rare, rare @ [0.3, 2.0] + rng.normal(size=20_000))
    with model:
        idata = sampled(SGLDCV(gradient="cv", integrator="euler", compile_kwargs=QUICK))
        report = bias_report(idata, rerun=True, random_seed=2, compile_kwargs=QUICK)
    return f"{report['verdict'].tolist()}"


@case("ok|cannot tell|within", slow=True)
def bias_report_rerun_with_rows():
    """The second run knows the rows of the first."""
    with pm.Model():
        beta = pm.Normal("beta", 0, 2, shape=2)
        pm.Normal("small", X[:20] @ beta, 1.0, observed=Y[:20])
        pm.Normal("y", X @ beta, 1.0, observed=Y)
        idata = sampled(SGLDCV(rows="y", integrator="euler", compile_kwargs=QUICK))
        report = bias_report(idata, rerun=True, random_seed=2, compile_kwargs=QUICK)
    return f"{report['verdict'].tolist()}"


@case("gradient", slow=True)
def gradients_of_a_run_with_rows():
    """The trace knows the rows, which the model alone does not say."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=2)
        pm.Normal("small", X[:20] @ beta, 1.0, observed=Y[:20])
        pm.Normal("y", X @ beta, 1.0, observed=Y)
        idata = sampled(SGLDCV(rows="y", compile_kwargs=QUICK))
    found = gradients(idata.isel(draw=slice(20)), model)["sample_stats"]["gradient"]
    return f"gradient of shape {found.shape}"


@case("model|beta|variables", slow=True)
def bias_report_rerun_with_another_model():
    with shared_line():
        idata = sampled(SGLDCV(integrator="euler", compile_kwargs=QUICK))
    with pm.Model() as model:
        slope = pm.Normal("slope", 0, 2)
        pm.Normal("y", slope * X[:, 1], 1.0, observed=Y)
    return bias_report(idata, model, rerun=True, compile_kwargs=QUICK).attrs["verdict"]
