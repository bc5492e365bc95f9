"""A search for modes outside of a run that hold mass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pymc as pm
from scipy import linalg

from pymc_sgmcmc.compiling.compiled import PYTHON_MODE
from pymc_sgmcmc.matrices import Dense
from pymc_sgmcmc.polishing.density import FullDensity
from pymc_sgmcmc.polishing.ensemble import Kernel, begin, transition
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.transforms import unconstrain
from pymc_sgmcmc.tuning.mode_search import minimize
from pymc_sgmcmc.tuning.subsample import Subsample

PRIOR_STARTS = 8
"""This many searches begin at draws of the prior."""

WIDE_STARTS = (3.0, -3.0, 10.0, -10.0, 30.0, -30.0, 100.0, -100.0)
"""Two searches for each of these factors begin at random points so many times as far from the mean
as draws are. The starts of a pair are on opposite sides, so that searches end at different modes
where these are exchangeable."""

MOST_COORDINATES = 500
"""Modes are searched up to this many coordinates, since the curvature at one takes two gradients a
coordinate."""

CLIMB = 300
"""A search takes at most this many iterations."""

CLOSE = 0.1
"""A search ends at about this distance from a mode, in standard deviations."""

MIDDLE = 0.5
"""A chain has reached a mode where it was behind the middle of the way to it from that of the run.
Draws of a Gaussian are not, for modes that are farther away than some eight standard deviations."""

SAME_PLACE, SAME_PLACE_BY_ROOT = 3.0, 0.25
"""Ends of searches that are not farther apart in standard deviations, or for more coordinates than
that many times the root of their number, are at the same mode. Long searches stop short of it."""

NEGLIGIBLE = 0.01
"""A mode with less than this part of the mass of the run is not reported."""

SAME_DENSITY, SAME_MASS = 0.05, 1.0
"""A mode is a copy of that of the run where their log densities and their log masses differ by less
than this. Searches find the first to about 0.01, and the second is approximate."""

STAYING_CHAINS, STAYING = 16, 30
"""So many chains of so many transitions each begin at a mode. It counts where they stay there."""

DIFFERENCE = 1e-3
"""The curvature at a mode is from differences of gradients this many standard deviations apart."""


@dataclass(frozen=True)
class Mode:
    """A mode that no draw of the run is near.

    Attributes
    ----------
    position : numpy.ndarray, shape (d,)
    log_mass : float
        Logarithm of its mass by Laplace's approximation, relative to that of the run.
    distance : float
        From the mean of the polished draws, in standard deviations in the direction of the mode.
    place : str
        Where it is, in words.
    is_copy : bool
        Whether it has the density and the mass of the mode of the run.
    """

    position: np.ndarray
    log_mass: float
    distance: float
    place: str
    is_copy: bool = False

    @property
    def mass(self) -> float:
        """Its mass relative to that of the run, at most 1e300."""
        return float(np.exp(min(self.log_mass, 690.0)))


def prior_starts(model: pm.Model, posterior: Posterior, seed: int) -> np.ndarray:
    """Unconstrained draws of the prior, shape (n, d); none where the prior has no draws."""
    try:
        draws = pm.draw(
            list(model.free_RVs), draws=PRIOR_STARTS, random_seed=seed, mode=PYTHON_MODE
        )
        values = {
            variable.name: np.asarray(values)
            for variable, values in zip(model.free_RVs, draws, strict=True)
        }
        positions = unconstrain(values, model, posterior.layout)
    except (NotImplementedError, ValueError):  # Improper priors have no draws.
        return np.empty((0, posterior.dimension))
    return positions[np.isfinite(positions).all(1)]


def find_modes(
    density: FullDensity,
    later: np.ndarray,
    log_densities: np.ndarray,
    starts: np.ndarray,
    labels: Sequence[str],
    rng: np.random.Generator,
) -> list[Mode] | None:
    """Modes outside of the draws that hold mass, at most one of each place.

    Searches begin at the given starts and at points around the draws, on a subsample of the rows
    where there are many. Ends that are apart from those of a search from the mean of the draws are
    followed on all rows. Such an end is a mode where its curvature is positive and chains of exact
    transitions that begin there stay.

    Parameters
    ----------
    density : FullDensity
    later : numpy.ndarray, shape (transitions, n, d)
        States of exact chains.
    log_densities : numpy.ndarray, shape (transitions, n)
        Log densities of these states.
    starts : numpy.ndarray, shape (m, d)
    labels : sequence of str
    rng : numpy.random.Generator

    Returns
    -------
    list of Mode, or None
        None where there are too many coordinates to search.
    """
    posterior = density.posterior
    d = posterior.dimension
    if d > MOST_COORDINATES:
        return None
    draws = later.reshape(-1, d)
    center = draws.mean(0)
    root = covariance_factor(draws)
    spread = _whitened(draws, center, root)
    noise = rng.standard_normal((2, d))
    wide = [center + factor * root @ direction for factor in WIDE_STARTS for direction in noise]
    first = posterior.initial_position.astype(float)
    home, ends = _climb(density, np.array([*starts, *wide, first]), center, root, spread)
    origin = center if home is None else home
    # The Gaussian of the draws gives the entropy of their law.
    log_mass = log_densities.mean() + 0.5 * d + np.log(np.abs(np.diag(root))).sum()
    modes: list[Mode] = []
    for end in ends:
        if _is_reached(spread, _whitened(end, origin, root)):
            continue
        mode = _mode_at(density, end, origin, center, root, float(log_mass), labels, rng)
        if mode is None:
            continue
        if home is not None and abs(mode.log_mass) < SAME_MASS:
            (height, other), _ = density(np.array([end, home]))
            mode = replace(mode, is_copy=bool(abs(height - other) < SAME_DENSITY))
        modes.append(mode)
    return modes


def covariance_factor(draws: np.ndarray) -> np.ndarray:
    """Lower Cholesky factor of the covariance of draws, shape (k, d), shrunk where they are few."""
    k, d = draws.shape
    scale = draws.std(0)
    scale = np.where(scale > 0, scale, 1.0)
    scaled = (draws - draws.mean(0)) / scale
    correlation = scaled.T @ scaled / k
    kept = k / (k + d)
    correlation = kept * correlation + (1 - kept) * np.eye(d)
    return scale[:, None] * linalg.cholesky(correlation, lower=True)


def _climb(
    density: FullDensity,
    starts: np.ndarray,
    center: np.ndarray,
    root: np.ndarray,
    spread: np.ndarray,
) -> tuple[np.ndarray | None, list[np.ndarray]]:
    """End of a search from the centre, and ends that are apart from it and from each other.

    A subsample moves all modes alike, so that they are compared with that of the same subsample.
    """
    subsample = Subsample(density.posterior, evaluations=CLIMB * len(starts))
    apart = max(SAME_PLACE, SAME_PLACE_BY_ROOT * np.sqrt(len(center)))

    def climb(function, start: np.ndarray) -> np.ndarray | None:
        with np.errstate(all="ignore"):
            try:
                return minimize(function, start, Dense(root), CLOSE, CLIMB)
            except ValueError:  # The log density is not finite at this start.
                return None

    ends: list[np.ndarray] = []
    home = climb(subsample.log_density_and_gradient, center)
    origin = center if home is None else home
    known = [origin]
    for start in starts:
        end = climb(subsample.log_density_and_gradient, start)
        if end is None or not np.isfinite(end).all():
            continue
        if np.linalg.norm(_whitened(np.array(known), end, root), axis=-1).min() <= apart:
            continue
        if _is_reached(spread, _whitened(end, origin, root)):
            continue
        known.append(end)
        if subsample.weight > 1:
            end = climb(density.single, end)
        if end is not None:
            ends.append(end)
    if ends and home is not None and subsample.weight > 1:
        home = climb(density.single, home)
    return home, ends


def _mode_at(
    density: FullDensity,
    end: np.ndarray,
    origin: np.ndarray,
    center: np.ndarray,
    root: np.ndarray,
    log_mass: float,
    labels: Sequence[str],
    rng: np.random.Generator,
) -> Mode | None:
    """The mode at the end of a search, None where it holds no mass or is not one."""
    found = _gaussian_at(density, end, root)
    if found is None:
        return None
    log_density, spread = found
    mass = log_density + np.log(np.abs(np.diag(spread))).sum() - log_mass
    if mass < np.log(NEGLIGIBLE):
        return None
    # Transitions would lead from a shoulder of the density to where the run has been.
    d = len(end)
    states = begin(density, end + rng.standard_normal((STAYING_CHAINS, d)) @ spread.T)
    kernel = Kernel(Dense(spread), 1.65**2 * d ** (-1 / 3), states.positions)
    for _ in range(STAYING):
        states, acceptance, _ = transition(density, states, kernel, rng)
        kernel = kernel.adapted(float(acceptance.mean()), 0.5)
    way = _whitened(end, origin, root)
    if np.median(_whitened(states.positions, origin, root) @ way) <= MIDDLE * (way @ way):
        return None
    distance = float(np.linalg.norm(_whitened(end, center, root)))
    return Mode(end, float(mass), distance, _place(end, center, root, labels))


def _is_reached(spread: np.ndarray, way: np.ndarray) -> bool:
    """Whether a draw was behind the middle of a way, both whitened."""
    return bool((spread @ way).max() > MIDDLE * (way @ way))


def _gaussian_at(
    density: FullDensity, position: np.ndarray, root: np.ndarray
) -> tuple[float, np.ndarray] | None:
    """Log density at a mode, and a root of its inverse curvature; None where it is no mode."""
    d = len(position)
    scale = root
    for _ in range(3):  # The mode may be far narrower than the run: then in smaller differences.
        steps = DIFFERENCE * scale.T
        around = np.concatenate([[position], position + steps, position - steps])
        values, gradients = density(around)
        if not np.isfinite(values).all():
            return None
        slopes = (gradients[1 : d + 1] - gradients[d + 1 :]) / (2 * DIFFERENCE)
        curvature = -slopes @ scale
        try:
            inverse = linalg.inv(0.5 * (curvature + curvature.T))
            factor = linalg.cholesky(0.5 * (inverse + inverse.T), lower=True)
        except linalg.LinAlgError:
            return None
        scale = scale @ factor
        if np.diag(factor).min() > 0.3 and np.diag(factor).max() < 3:
            break
    # One step of Newton's method, whose length is the distance from the mode.
    step = gradients[0] @ scale
    if (step**2).sum() > max(1.0, 0.1 * d):
        return None
    return float(values[0]), scale


def _whitened(positions: np.ndarray, center: np.ndarray, root: np.ndarray) -> np.ndarray:
    """Positions from a centre in standard deviations, shape (..., d)."""
    away = np.atleast_2d(positions - center).T
    return linalg.solve_triangular(root, away, lower=True).T.reshape(np.shape(positions))


def _place(
    end: np.ndarray, center: np.ndarray, root: np.ndarray, labels: Sequence[str], most: int = 3
) -> str:
    """The coordinates of a mode that are farthest from the draws."""
    away = np.abs(end - center) / np.sqrt((root**2).sum(1))
    chosen = np.argsort(-away, kind="stable")[:most]
    named = ", ".join(f"`{labels[number]}` = {end[number]:.4g}" for number in chosen)
    return named + (", ..." if len(end) > most else "")
