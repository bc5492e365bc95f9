"""Accuracy of OSGFS on the Skin Segmentation data, and the burn-in that its flag cuts off.

Logistic regression of skin against three colours, N = 245 057. The covariance of the posterior
is that of its Laplace approximation, corrected by importance weights from the full data; the
means and standard deviations are checked against a long full-data run of NUTS as well.

Examples
--------
::

    python tests/benchmarks/osgfs_skin.py ../shared/data
    python tests/benchmarks/osgfs_skin.py ../shared/data --batch 10000 --transitions 400000
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from common.machine import restrict_to_one_core
from common.program import make_parser, print_table, print_verdict, say, write_results
from common.timing import timed

ROOT = Path(__file__).parents[2]
COVARIANCE_LIMIT, MEAN_LIMIT = 0.05, 0.1
BATCHES = 30


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("data_folder", type=Path)
    parser.add_argument("--batch", type=int, default=10_000, help="minibatch size, n")
    parser.add_argument("--transitions", type=int, default=200_000, help="of each chain")
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--curvature", nargs="+", default=["center", "fisher"])
    parser.add_argument("--gradient", nargs="+", default=["plain", "cv"])
    parser.add_argument(
        "--away",
        type=float,
        nargs="+",
        default=[10.0, 100.0, 1000.0],
        help="posterior sds, in each whitened coordinate, at which chains start",
    )
    parser.add_argument("--mode", default="NUMBA", help="of the transitions")
    return parser.parse_args(arguments)


def reference(posterior: Any, draws: int = 1500) -> tuple[np.ndarray, np.ndarray, float]:
    """Mean and covariance of a posterior by importance sampling, and the sd of the weights.

    Only the difference to the Laplace approximation is by simulation.
    """
    from pymc_sgmcmc.tuning import find_center

    center = find_center(posterior, posterior.initial_position)
    rng = np.random.default_rng(7)
    z = rng.standard_normal((draws // 2, posterior.dimension))
    z = np.concatenate([z, -z])
    root = center.curvature.root.dense()
    logs = np.array([posterior.log_density(center.position + root @ one) for one in z])
    logs += 0.5 * (z**2).sum(1)
    weights = np.exp(logs - logs.max())
    weights /= weights.mean()
    mean = ((weights - 1)[:, None] * z).mean(0)
    second = np.eye(z.shape[1]) + np.einsum("s,si,sj->ij", weights - 1, z, z) / len(z)
    covariance = root @ (second - np.outer(mean, mean)) @ root.T
    return center.position + root @ mean, covariance, float(weights.std())


def accuracy(
    model: Any, gradient: str, curvature: str, truth: tuple, settings: argparse.Namespace
) -> dict:
    """Errors of mean and covariance from the centre, and the time of a transition."""
    import pymc as pm

    from pymc_sgmcmc.step_methods.osgfs import OSGFS

    mean, covariance, _ = truth
    with model:
        step = OSGFS(
            batch_size=settings.batch,
            gradient=gradient,
            curvature=curvature,
            compile_kwargs={"mode": settings.mode},
        )

        def sample(draws):
            return pm.sample(
                step=step,
                draws=draws,
                tune=100,
                chains=settings.chains,
                cores=1,
                random_seed=1,
                progressbar=False,
                quiet=True,
                compute_convergence_checks=False,
            )

        sample(20)
        count = settings.transitions // step.thin
        idata, seconds = timed(sample, count)
    draws = idata.posterior["beta"].values
    root = np.linalg.cholesky(np.linalg.inv(covariance))
    whitened = (draws.reshape(-1, len(mean)) - mean) @ root
    error = np.cov(whitened.T) - np.eye(len(mean))
    # Batches much longer than the autocorrelation time, and than the rows stay in one order.
    batches = [batch.T @ batch / len(batch) for batch in np.array_split(whitened, BATCHES)]
    spread = np.sqrt(np.var(batches, axis=0).sum() / (BATCHES - 1))
    transitions = step.thin * (count + 100) * settings.chains
    return {
        "gradient": gradient,
        "H": curvature,
        "batch": settings.batch,
        "thin": step.thin,
        "k": float(idata.sample_stats["k"].values[0, -1]),
        "mean_error_sd": float(np.abs(whitened.mean(0)).max()),
        "covariance_error": float(np.linalg.norm(error) / np.sqrt(len(mean))),
        "its_standard_error": float(spread / np.sqrt(len(mean))),
        "largest_sd_ratio": float(np.sqrt(np.max(np.diag(error) + 1))),
        "converged": float(idata.sample_stats["converged"].values.mean()),
        "us_a_transition": seconds.wall / transitions * 1e6,
    }


def burn_in(model: Any, away: float, truth: tuple, settings: argparse.Namespace) -> dict:
    """Where the flag cuts chains that start far away, without a search for the mode."""
    import pymc as pm

    from pymc_sgmcmc.step_methods.osgfs import OSGFS

    mean, covariance, _ = truth
    root = np.linalg.cholesky(covariance)
    signs = np.array([1.0, -1.0, -1.0, 1.0])
    with model:
        step = OSGFS(
            batch_size=settings.batch,
            start="model",
            thin=1,
            compile_kwargs={"mode": settings.mode},
        )
        idata = pm.sample(
            step=step,
            draws=6000,
            tune=0,
            chains=settings.chains,
            cores=1,
            random_seed=2,
            initvals={"beta": mean + away * root @ signs},
            progressbar=False,
            quiet=True,
            compute_convergence_checks=False,
        )
    flags = idata.sample_stats["converged"].values
    whitened = np.linalg.solve(root, (idata.posterior["beta"].values - mean).reshape(-1, 4).T).T
    distance = np.sqrt((whitened**2).sum(1)).reshape(flags.shape)
    cuts = flags.argmax(axis=1)
    return {
        "away_sd": away,
        "converged_chains": int(flags.any(axis=1).sum()),
        "first_kept_transition": int(cuts.max()),
        "distance_before": float(max(distance[i, cut // 2] for i, cut in enumerate(cuts))),
        "distance_at_cut": float(max(distance[i, cut] for i, cut in enumerate(cuts))),
        "typical_distance": float(np.median(distance[:, -1000:])),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a figure is over its limit."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    sys.path.insert(0, str(ROOT))
    from pymc_sgmcmc import Posterior
    from tests.accuracy.posteriors import skin_logistic

    model = skin_logistic(settings.data_folder)
    say("reference by importance sampling")
    truth = reference(Posterior(model))
    stored = np.load(ROOT / "tests" / "accuracy" / "references" / "skin_logistic.npz")
    difference = np.abs(truth[0] - stored["beta_mean"]) / stored["beta_sd"]
    ratio = np.sqrt(np.diag(truth[1])) / stored["beta_sd"]
    say(
        f"sd of the weights {truth[2]:.3f}; largest difference of means to NUTS "
        f"{difference.max():.3f} sd, ratios of sds {ratio.min():.3f} to {ratio.max():.3f}"
    )
    accuracies, cuts = [], []
    for gradient in settings.gradient:
        for curvature in settings.curvature:
            say(f"chains with gradient {gradient!r} and H from {curvature!r}")
            accuracies.append(accuracy(model, gradient, curvature, truth, settings))
    for away in settings.away:
        say(f"chains from {away:g} posterior sds away")
        cuts.append(burn_in(model, away, truth, settings))
    write_results(settings.output, "osgfs_skin", settings, core, [*accuracies, *cuts])
    for title, results in (("Accuracy", accuracies), ("Burn-in cut by the flag", cuts)):
        print_table(title, list(results[0]), [list(result.values()) for result in results])
    reached = []
    for result in accuracies:
        if result["H"] == "fisher":
            continue  # not the default: right for well specified likelihoods only
        name = result["gradient"]
        reached.append(
            print_verdict(f"{name}, covariance", result["covariance_error"], COVARIANCE_LIMIT, "")
        )
        reached.append(print_verdict(f"{name}, mean", result["mean_error_sd"], MEAN_LIMIT, "sd"))
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
