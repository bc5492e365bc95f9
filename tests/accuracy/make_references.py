"""Make the stored references by full-data NUTS.

    python -m tests.accuracy.make_references FOLDER_OF_DATA NAME [NAME ...]

Writes `tests/accuracy/references/NAME.npz` with, for every free variable in its constrained space,
`{variable}_mean`, `_sd`, `_r_hat` and `_ess`, and for the unconstrained position, in the order of
`Posterior(model).layout`:

position_mean, position_sd, position_r_hat
    one entry for each of `labels`
position_ess, position_ess_sd
    bulk effective sample size of the mean, and that of the standard deviation
n_rows, dimension
    N and d
nuts_seconds
    wall time of the chains with tuning, one after the other on one core, without compilation and
    without `metric_seconds`, the search for the mode, the curvature there and the short run
nuts_cpu_seconds
    processor time of the same steps, for where the core was shared
draws, tune, chains, metric, target_accept, max_treedepth, leapfrogs, divergences
    of NUTS; `metric` is "laplace" for a fixed dense mass matrix from the curvature at the mode on
    a subsample, "hessian" for that from all rows, "pilot" for one from the draws of a short run,
    "default" for PyMC's adaptation of a diagonal
straighten
    0, or the prior sd of the indicators with which `straightened` changed the coordinates of NUTS
slope, position_mean_of_draws, position_mean_error, position_sd_of_draws, position_sd_error
    with `slope` means and sds come from the slope of the full-data gradients at the draws, whose
    Monte-Carlo errors (in sds, and relative) are far smaller than those of the draws' own, and
    `position_ess_sd` is the number of draws that would have the same error
seed, versions
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import arviz as az
import numpy as np
import pymc as pm
import xarray as xr
from pymc.blocking import DictToArrayBijection
from pymc.step_methods.hmc.quadpotential import QuadPotentialFull
from scipy import linalg

from pymc_sgmcmc import Posterior, gradients
from pymc_sgmcmc.tuning import find_center
from pymc_sgmcmc.tuning.curvature import curvature_by_differences
from tests.accuracy.gallery import WITH_GROUPS, WITHOUT_GROUPS
from tests.accuracy.posteriors import MODELS
from tests.accuracy.straighten import straightened

REFERENCES = Path(__file__).parent / "references"
SEED = 20261121


@dataclass(frozen=True)
class Settings:
    """How NUTS runs for one model."""

    draws: int = 2400
    tune: int = 250
    chains: int = 4
    metric: str = "hessian"
    target_accept: float = 0.9
    max_treedepth: int = 10
    straighten: float = 0.0
    """Prior sd of the indicators where the model is straightened for NUTS, 0 where it is not."""
    slope: bool = False
    """Whether standard deviations come from the slope of the full-data gradients at the draws."""


SETTINGS = (
    {
        # The error of a standard deviation is then below half a percent.
        function.__name__: Settings(draws=12_000)
        for function in WITHOUT_GROUPS
    }
    | {
        # PyMC does not take starting points of Cholesky factors.
        "multivariate_normal": Settings(draws=12_000, tune=1000, metric="default"),
        "covertype_logistic": Settings(draws=800, tune=150, target_accept=0.8, metric="pilot"),
        "covertype_logistic_raw": Settings(draws=800, tune=150, target_accept=0.8, metric="pilot"),
        "covertype_multinomial": Settings(metric="pilot"),
        "epil_poisson": Settings(draws=12_000),
        "student_t_regression": Settings(draws=12_000),
        "contraception": Settings(draws=3000, metric="pilot"),
        "contraception_centred": Settings(
            draws=4000, tune=1000, metric="default", target_accept=0.95
        ),
        "million": Settings(draws=500, tune=100, target_accept=0.8),
        # Seven leapfrogs serve 500 nearly Gaussian coordinates as well as fifteen.
        "wide": Settings(
            draws=400, tune=100, metric="laplace", target_accept=0.8, max_treedepth=3, slope=True
        ),
    }
    | {
        function.__name__: Settings(draws=4000, tune=1000, metric="default", target_accept=0.95)
        for function in WITH_GROUPS
    }
)


def nuts_step(posterior: Posterior, covariance: np.ndarray, settings: Settings) -> pm.NUTS:
    """NUTS with a fixed dense metric, once its order of coordinates is that of the position."""
    step = pm.NUTS(
        potential=QuadPotentialFull(covariance),
        target_accept=settings.target_accept,
        max_treedepth=settings.max_treedepth,
    )
    position = posterior.initial_position + 0.01
    point = posterior.layout.unravel(position)
    ravelled = DictToArrayBijection.map({value.name: point[value.name] for value in step.vars})
    np.testing.assert_array_equal(ravelled.data, position)
    _, gradient = step._logp_dlogp_func(ravelled)
    expected = posterior.gradient(position)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    return step


def positions(posterior: Posterior, idata: xr.DataTree) -> np.ndarray:
    """Draws of the unconstrained position, shape (chains, draws, d)."""
    values = idata["posterior"]
    parts = [values[name].values for name in posterior.layout.names]
    return np.concatenate([part.reshape(*part.shape[:2], -1) for part in parts], axis=2)


def sample(posterior: Posterior | None, settings: Settings) -> tuple[xr.DataTree, float]:
    """Draws by NUTS, with the transformed variables, and the seconds spent on the metric.

    PyMC's own metric needs no posterior.
    """
    common = {
        "chains": settings.chains,
        "cores": 1,
        "progressbar": False,
        "nuts_sampler": "pymc",
        "discard_tuned_samples": False,
        "compute_convergence_checks": False,
        "idata_kwargs": {"include_transformed": True},
    }
    if settings.metric == "default":
        idata = pm.sample(
            draws=settings.draws,
            tune=settings.tune,
            target_accept=settings.target_accept,
            random_seed=SEED,
            **common,
        )
        return idata, 0.0

    assert posterior is not None
    begin = time.perf_counter()
    center = find_center(posterior, posterior.initial_position)
    covariance = center.curvature.covariance.dense()
    if settings.metric != "laplace":
        # Narrow differences: the prior alone holds some directions, and is lost in wide ones.
        width = 1e-3 * center.curvature.standard_deviations
        precision = curvature_by_differences(
            lambda positions: np.array([posterior.gradient(position) for position in positions]),
            center.position,
            width,
        )
        covariance = linalg.inv(precision)
        covariance = (covariance + covariance.T) / 2
    root = linalg.cholesky(covariance, lower=True)
    rng = np.random.default_rng(SEED)
    starts = [
        posterior.layout.unravel(center.position + root @ rng.standard_normal(len(root)))
        for _ in range(settings.chains)
    ]
    seconds = time.perf_counter() - begin
    if settings.metric == "pilot":
        pilot = pm.sample(
            draws=300,
            tune=200,
            step=nuts_step(posterior, covariance, settings),
            initvals=starts,
            random_seed=SEED + 1,
            **common,
        )
        seconds += pilot["posterior"].attrs["sampling_time"]
        draws = positions(posterior, pilot)
        covariance = np.cov(draws.reshape(-1, posterior.dimension), rowvar=False)
        starts = [posterior.layout.unravel(chain[-1]) for chain in draws]
    idata = pm.sample(
        draws=settings.draws,
        tune=settings.tune,
        step=nuts_step(posterior, np.atleast_2d(covariance), settings),
        initvals=starts,
        random_seed=SEED,
        **common,
    )
    return idata, seconds


def summarise(posterior: Posterior, idata: xr.DataTree, free: list[str]) -> dict[str, np.ndarray]:
    """Means, standard deviations and the quality of both."""
    draws = idata["posterior"].to_dataset()
    r_hat, ess = az.rhat(draws), az.ess(draws)
    ess_sd = az.ess(draws, method="sd")
    summary = {}
    for name in free:
        values = draws[name].values
        stacked = values.reshape(-1, *values.shape[2:])
        summary[f"{name}_mean"] = stacked.mean(0)
        summary[f"{name}_sd"] = stacked.std(0)
        summary[f"{name}_r_hat"] = r_hat[name].values
        summary[f"{name}_ess"] = ess[name].values

    def joined(statistic: xr.Dataset) -> np.ndarray:
        return np.concatenate([statistic[name].values.ravel() for name in posterior.layout.names])

    position = positions(posterior, idata).reshape(-1, posterior.dimension)
    return summary | {
        "position_mean": position.mean(0),
        "position_sd": position.std(0),
        "position_r_hat": joined(r_hat),
        "position_ess": joined(ess),
        "position_ess_sd": joined(ess_sd),
        "labels": np.array(posterior.labels),
    }


def by_slope(idata: xr.DataTree, model: pm.Model) -> dict[str, np.ndarray]:
    """Means and standard deviations from the slope of the full-data gradients in the position.

    Stein's identity makes the inverse of minus that slope the covariance, and mean gradients show
    how far the draws' means are off; the sampling errors cancel, on a Gaussian altogether.
    """
    draws = idata["posterior"].to_dataset()[[variable.name for variable in model.free_RVs]]
    stats = gradients(xr.DataTree.from_dict({"posterior": draws}), model)["sample_stats"]
    position, gradient = stats["position"].values, stats["gradient"].values

    def moments(chosen: list[int]) -> np.ndarray:
        x, g = (one[chosen].reshape(-1, one.shape[-1]) for one in (position, gradient))
        mean, mean_gradient = x.mean(0), g.mean(0)
        x, g = x - mean, g - mean_gradient
        slope = -linalg.solve(x.T @ x, x.T @ g, assume_a="pos")
        covariance = linalg.inv((slope + slope.T) / 2)
        return np.array([mean + covariance @ mean_gradient, np.sqrt(np.diag(covariance))])

    chains = range(len(position))
    apart = np.array([moments([one for one in chains if one != left]) for left in chains])
    mean, sd = moments(list(chains))
    errors = np.sqrt((len(apart) - 1) * apart.var(0)) / sd
    return {
        "position_mean": mean,
        "position_mean_of_draws": position.mean((0, 1)),
        "position_mean_error": errors[0],
        "position_sd": sd,
        "position_sd_of_draws": position.std((0, 1)),
        "position_sd_error": errors[1],
        "position_ess_sd": 0.5 / errors[1] ** 2,
    }


def make_reference(name: str, data_folder: Path) -> None:
    """Sample one model and store the summary."""
    settings = SETTINGS.get(name, Settings())
    model = MODELS[name](data_folder)
    posterior, sampled = Posterior(model), model
    if settings.straighten:
        X, y = posterior.data
        sampled = straightened(model, X, y.astype(bool), settings.straighten)
    with sampled:
        idata, metric_seconds = sample(Posterior(sampled), settings)
    summary = summarise(posterior, idata, [variable.name for variable in model.free_RVs])
    if settings.slope:
        summary |= by_slope(idata, model)
    facts = {"n_rows": posterior.n_rows, "dimension": posterior.dimension}
    store(REFERENCES / f"{name}.npz", idata, summary, settings, metric_seconds, facts)


def store(
    path: Path,
    idata: xr.DataTree,
    summary: dict[str, np.ndarray],
    settings: Settings,
    metric_seconds: float,
    facts: dict[str, int],
) -> None:
    """Write the summary with what is known of the run, and print its quality."""
    stats, warmup = idata["sample_stats"], idata["warmup_sample_stats"]
    cpu_seconds = stats["process_time_diff"].sum() + warmup["process_time_diff"].sum()
    run = (
        asdict(settings)
        | facts
        | {
            "nuts_seconds": float(idata["posterior"].attrs["sampling_time"]),
            "nuts_cpu_seconds": float(cpu_seconds),
            "metric_seconds": metric_seconds,
            "leapfrogs": float(stats["n_steps"].mean()),
            "divergences": int(stats["diverging"].sum()),
            "seed": SEED,
        }
    )
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        path,
        **summary,
        **run,
        versions=[f"{package} {version(package)}" for package in ("pymc", "pytensor", "numpy")],
    )
    quality = {"max R-hat": max, "min ESS": min, "min ESS of sd": min}
    endings = ("_r_hat", "_ess", "_ess_sd")
    for (label, extreme), ending in zip(quality.items(), endings, strict=True):
        values = [value for key, value in summary.items() if key.endswith(ending)]
        print(f"{label}: {extreme(float(extreme(v.ravel())) for v in values):.4g}")
    print(path.stem, run, flush=True)


def main() -> None:
    """Make the references named on the command line, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_folder", type=Path)
    parser.add_argument("names", nargs="+", choices=sorted(MODELS))
    arguments = parser.parse_args()
    for name in arguments.names:
        make_reference(name, arguments.data_folder)


if __name__ == "__main__":
    main()
