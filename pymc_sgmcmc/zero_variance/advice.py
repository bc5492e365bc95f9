"""Why control variates help little, where they do."""

from __future__ import annotations

import numpy as np

from pymc_sgmcmc.stored import StoredRun
from pymc_sgmcmc.zero_variance.estimate import ControlledMeans
from pymc_sgmcmc.zero_variance.gain import LinearFit, langevin_gain

SMALL_GAIN = 2.0
"""Variance ratio below which control variates are said to help little."""

SHORT_BATCH = 5.0
"""Autocorrelation times that a batch should last."""

LITTLE_NOISE = 0.3
"""Share of the injected noise, of what the step size says, below which there is none."""

CANCELLING = 0.1
"""Long-run variance of the gradients over that of single ones, below which they cancel."""


def advice(
    run: StoredRun,
    estimate: ControlledMeans,
    predicted: np.ndarray,
    fit: LinearFit,
    values: np.ndarray,
) -> list[str]:
    """Notes in plain words.

    Parameters
    ----------
    run : StoredRun
    estimate : ControlledMeans
    predicted : numpy.ndarray, shape (q,)
        Predicted gain.
    fit : LinearFit
    values : numpy.ndarray, shape (chains, draws, q)
        Some of the functions' draws.
    """
    notes = [_injected_noise(run, estimate, fit)]
    thin = int(run.settings.get("thin", 1))
    stored = _gain_of_positions(run, fit, thin)
    every = stored if thin == 1 else _gain_of_positions(run, fit, 1)
    # Both are known for Langevin dynamics alone; the measured one speaks for all.
    gain = stored if np.isfinite(stored) else float(np.nanmedian(estimate.variance_ratio))
    if run.settings.get("gradient") == "plain" and gain < SMALL_GAIN and notes[0] is None:
        notes.append(
            f"The variance of a mean falls by {gain:.2g} only: the noise of plain gradients from "
            f"{run.settings['batch_size']} of {run.settings['n_rows']} rows remains. Use "
            '`SGLDCV` (or `gradient="cv"`), or a larger `batch_size`.'
        )
    if thin > 1 and every > SMALL_GAIN * stored:
        notes.append(
            f"Every {thin}th transition was stored: the predicted gain is {stored:.2g}, and "
            f"{every:.2g} with all of them (`thin=1`), of as many transitions."
        )
    measured = float(np.nanmedian(estimate.variance_ratio))
    if measured < 1:
        notes.append(
            f"The measured variance ratio is {measured:.2g}: coefficients of "
            f"{len(estimate.coefficients)} terms from {estimate.batches} batches add more error "
            "than they take. Use order=1, or sample more draws."
        )
    variances = values.reshape(-1, values.shape[-1]).var(0)
    moving = variances > 0
    long_run = estimate.standard_error_before**2 * estimate.batches * estimate.batch_length
    times = float(np.max(long_run[moving] / variances[moving], initial=0))
    if estimate.batch_length < SHORT_BATCH * times:
        notes.append(
            f"Batches of {estimate.batch_length} draws are short beside an autocorrelation time of "
            f"about {times:.0f}: errors are larger than stated. Sample more draws, or use fewer "
            "`batches`."
        )
    return [note for note in notes if note is not None]


def _injected_noise(run: StoredRun, estimate: ControlledMeans, fit: LinearFit) -> str | None:
    """Note where no noise but that of the gradients moves the chain."""
    root = estimate.whitening.root
    if run.is_langevin and int(run.settings.get("thin", 1)) == 1:
        assert run.step_sizes is not None
        inverse = np.linalg.inv(run.preconditioner)
        expected = np.mean(4 / run.step_sizes) * np.einsum("ij,ik,kj->j", root, inverse, root)
        share = float(np.mean(estimate.long_run_gradient / expected))
        if share >= LITTLE_NOISE:
            return None
    else:
        slope = root.T @ fit.precision
        single = np.einsum("ij,jk,ik->i", slope, fit.covariance, slope)
        single += np.einsum("ij,ik,kj->j", root, fit.noise, root)
        share = float(np.median(estimate.long_run_gradient / single))
        if share >= CANCELLING:
            return None
    return (
        "The gradients of successive draws cancel: no injected noise, or little beside that of "
        "the gradients, moves the chain. Control variates remove the share of the injected noise "
        "alone, so there is nothing to gain. Sample with a step method that injects noise, with a "
        "smaller step size, or with `SGLDCV`."
    )


def _gain_of_positions(run: StoredRun, fit: LinearFit, thin: int) -> float:
    """Median predicted gain of the coordinates."""
    if not run.is_langevin:
        return np.nan
    assert run.step_sizes is not None
    identity = np.eye(run.dimension)
    return float(
        np.median(
            langevin_gain(
                fit.precision, fit.noise, run.preconditioner, run.step_sizes, identity, thin
            )
        )
    )
