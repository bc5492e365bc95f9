"""Why control variates help little, where they do."""

from __future__ import annotations

import numpy as np

from pymc_sgmcmc.stein import mean_gradient_test
from pymc_sgmcmc.trace_tools.reader import StoredRun, every_nth
from pymc_sgmcmc.trace_tools.zero_variance.estimate import ControlledMeans
from pymc_sgmcmc.trace_tools.zero_variance.gain import LinearFit, langevin_gain

SMALL_GAIN = 2.0
"""Variance ratio below which control variates are said to help little."""

SHORT_BATCH = 5.0
"""Autocorrelation times that a batch should last: errors are 5 % too small then."""

LITTLE_NOISE = 0.3
"""Share of the injected noise, of what the step size says, below which there is none."""

NOISY = 0.1
"""Variance of the noise of gradients over that of exact ones, from which it counts."""

LOSS = 0.9
"""Variance ratio below which control variates are said to cost more than they give."""

IMPROBABLE = 1e-4
"""Probability of a mean gradient from which it is not taken for zero."""

CANCELLING = 0.1
"""Long-run variance of the gradients over that of single ones, below which they cancel."""


def advice(
    run: StoredRun,
    estimate: ControlledMeans,
    predicted: np.ndarray,
    fit: LinearFit,
    values: np.ndarray,
    coefficients: str,
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
    coefficients : str
        The setting of `zero_variance`.
    """
    short = _short_batches(estimate, values)
    ratios = estimate.variance_ratio[estimate.moving]
    measured = float(np.median(ratios)) if len(ratios) else np.nan
    # In batches that are shorter than the autocorrelation all gradients seem to cancel, and their
    # mean seems to be off.
    unknown = short is not None or measured > SMALL_GAIN
    notes = [None if unknown else _injected_noise(run, estimate, fit)]
    if not short:
        notes += advice_of_chain(run)
    thin = run.thin or 1
    stored = _gain_of_positions(run, fit, run.thin)
    every = stored if thin == 1 else _gain_of_positions(run, fit, 1)
    # Both are known for Langevin dynamics alone; the measured one speaks for all.
    gain = stored if np.isfinite(stored) else measured
    noisy = run.settings.get("gradient") == "plain" and _relative_noise(estimate, fit) > NOISY
    if noisy and gain < SMALL_GAIN and notes[0] is None:
        notes.append(
            f"The variance of a mean falls by {gain:.2g} only: the noise of plain gradients from "
            f"{run.settings['batch_size']} of {run.settings['n_rows']} rows remains. Use "
            '`SGLDCV` (or `gradient="cv"`), or a larger `batch_size`.'
        )
    if thin > 1 and every > SMALL_GAIN * stored:
        notes.append(
            f"One of {thin} transitions was stored: the predicted gain is {stored:.2g}, and "
            f"{every:.2g} with all of them (`thin=1`)."
        )
    notes.append(_bias_of_squares(run, estimate, fit, coefficients))
    if measured < LOSS:
        notes.append(
            f"The measured variance ratio is {measured:.2g}: coefficients of "
            f"{len(estimate.coefficients)} terms from {estimate.batches} batches add more error "
            "than they take. "
            + ("Use order=1, or sample more draws." if estimate.order > 1 else "Sample more draws.")
        )
    return [note for note in [*notes, short] if note is not None]


def advice_of_chain(run: StoredRun) -> list[str]:
    """Note where the mean gradient is not zero."""
    probability = mean_gradient_test(every_nth(run.gradients))
    if not probability < IMPROBABLE:
        return []
    return [
        "The mean gradient is not zero, as it is at stationarity (probability "
        f"{probability:.1g}): the chains have not converged, see `gradient_convergence`, or "
        "the gradients are those of other data or another model. Do not trust the means."
    ]


def _short_batches(estimate: ControlledMeans, values: np.ndarray) -> str | None:
    variances = values.reshape(-1, values.shape[-1]).var(0)
    moving = estimate.moving & (variances > 0)
    long_run = estimate.standard_error_before**2 * estimate.batches * estimate.batch_length
    times = float(np.max(long_run[moving] / variances[moving], initial=0))
    return short_batches(estimate.batch_length, times, "draws")


def short_batches(length: int, times: float, of: str) -> str | None:
    """Note where batches are not independent, given the autocorrelation time.

    The variance of means of L draws of an autoregression with time τ is too small by
    (τ - 1/τ) / 2L of itself.
    """
    if length >= SHORT_BATCH * (times - 1 / max(times, 1)):
        return None
    return (
        f"Batches of {length} {of} are short beside an autocorrelation time of about {times:.0f}: "
        "errors are larger than stated. Sample more draws, or use fewer `batches`."
    )


def _bias_of_squares(
    run: StoredRun, estimate: ControlledMeans, fit: LinearFit, coefficients: str
) -> str | None:
    r"""Note where terms of order 2 leave most of the bias of second moments.

    They take it where coefficients are those of the Gaussian posterior. Coefficients over single
    noisy gradients are smaller, by H / (H + V) in each direction, as slopes in a variable with
    errors are; over batches of all transitions they are not, since the noise of gradients moves
    the chain as well.
    """
    if estimate.order < 2 or "gradient" not in run.settings:
        return None
    if run.thin == 1 and coefficients == "batch_means":
        return None
    if _relative_noise(estimate, fit) < NOISY:
        return None
    return (
        "The bias of second moments, which order 2 removes with batches of all transitions, stays "
        f"in part: coefficients {_which(coefficients, run.thin)} are too small where gradients "
        "have noise. Use `zero_variance_of_moments(idata, order=2)`, or `stein_calibrate`."
    )


def _relative_noise(estimate: ControlledMeans, fit: LinearFit) -> float:
    """Variance of the noise of gradients, in coordinates in which the chain has unit covariance."""
    root = estimate.whitening.root
    return float(np.mean(np.einsum("ij,ik,kj->j", root, fit.noise, root)))


def _which(coefficients: str, thin: int | None) -> str:
    if coefficients == "marginal":
        return "from single draws"
    return f"from one of {thin} transitions" if thin else "from some of the transitions"


def _injected_noise(run: StoredRun, estimate: ControlledMeans, fit: LinearFit) -> str | None:
    """Note where no noise but that of the gradients moves the chain."""
    root = estimate.whitening.root
    if run.is_langevin and run.thin == 1:
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


def _gain_of_positions(run: StoredRun, fit: LinearFit, thin: int | None) -> float:
    """Median predicted gain of the coordinates."""
    if not run.is_langevin or thin is None:
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
