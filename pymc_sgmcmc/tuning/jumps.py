"""A search for jumps of the log density, which gradients do not show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

from pymc_sgmcmc.checks import FEW_NAMES
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.position import DENSE_DIMENSION
from pymc_sgmcmc.tuning.center import Center
from pymc_sgmcmc.tuning.gaussian import FEWEST_PAIRS
from pymc_sgmcmc.tuning.subsample import SINGLE_ROWS, Subsample

LEAST_CHANGE = 0.3
"""Between two points the log density changes by at least this much more or less than its gradients
there say, or jumps are no concern. Where it falls by so much at the mean of a normal posterior, the
mean shifts by 0.12 standard deviations."""

ROUNDING = 1e3
"""A log density is known up to so many times the rounding error of its value."""

Density = Callable[[np.ndarray], tuple[float, np.ndarray]]


@dataclass(frozen=True)
class _End:
    """One end of a way: its place on it, log density and slope along it."""

    place: float
    value: float
    slope: float

    def change_to(self, other: _End) -> float:
        """What the log density changes by, less what the slopes at both ends say of it."""
        length = other.place - self.place
        return other.value - self.value - 0.5 * length * (self.slope + other.slope)


def jump(posterior: Posterior, rows: Subsample, center: Center) -> str | None:
    """A message where the log density of prior or rows jumps near the centre.

    Such a jump is that of a comparison, of `switch`, or of rounding a parameter. The gradient is
    the same as without it, and so are the draws. Where a density is zero beyond, other suspicions
    follow. On the ways to fifty points of the Gaussian a part of 6 % of its mass that a jump cuts
    off is found with 95 % probability.
    """
    rng = np.random.default_rng(1815)
    normals = rng.standard_normal((FEWEST_PAIRS, posterior.dimension))
    shifts = [center.curvature.root @ z for z in normals]
    densities: list[Density] = [posterior.log_prior_and_gradient]
    # Rows of a source that are at hand are enough: to read a sample may take as long as a pass.
    at_hand = posterior.some_rows if posterior.has_rows else []
    if at_hand:
        step = max(1, len(at_hand[0]) // SINGLE_ROWS)
        some = posterior.part(at_hand, slice(None, None, step))
        weight = posterior.n_rows / len(some[0])

        def of_rows(position: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = posterior.log_likelihood_and_gradient(position, some)
            return weight * value, weight * gradient

        densities.append(of_rows)
    farther = float(np.finfo(posterior.dtype).eps) ** -0.25
    for density in densities:
        with np.errstate(all="ignore"):
            found = _first_jump(density, center.position, shifts, posterior.dtype)
            if found is not None:
                size, low, high = found
                return _message(posterior, size, low, _movers(density, size, low, high, farther))
    return None


def _message(posterior: Posterior, size: float, place: np.ndarray, movers: np.ndarray) -> str:
    named = ", ".join(
        f"`{posterior.labels[number]}` = {place[number]:.4g}" for number in movers[:FEW_NAMES]
    )
    more = f" and {len(movers) - FEW_NAMES} more" if len(movers) > FEW_NAMES else ""
    where = f"at {named}{more}" if named else "near the centre"
    return (
        f"The log density jumps by {size:.3g} {where}. Gradients do not show a jump, so the draws "
        "are those of a density without it. Comparisons, `switch` and rounding of parameters make "
        "jumps: take `ordered` or an interval as the transform in place of a constraint, a smooth "
        "function such as `pm.math.sigmoid` in place of a step, or sample with `pm.NUTS` or "
        "`pm.Slice`."
    )


def _first_jump(
    density: Density, center: np.ndarray, shifts: list[np.ndarray], dtype: str
) -> tuple[float, np.ndarray, np.ndarray] | None:
    """Size of a jump and the points on both sides of it, None where none is found."""

    def end(place: float, shift: np.ndarray) -> _End:
        value, gradient = density(center + place * shift)
        return _End(place, value, float(gradient @ shift))

    value, gradient = density(center)
    ways = [(_End(0.0, value, float(gradient @ shift)), end(1.0, shift)) for shift in shifts]
    changes = np.abs([low.change_to(high) for low, high in ways])
    eps = float(np.finfo(dtype).eps)
    least = ROUNDING * eps * abs(value)
    changes[~(changes > max(LEAST_CHANGE, least))] = 0
    for number in np.argsort(-changes)[: np.count_nonzero(changes)]:
        shift, (low, high) = shifts[number], ways[number]
        steepest = changes[number]
        # The change over a smooth part falls with the third power of its length, that by a kink or
        # by many small jumps in proportion to it, and that by a jump not at all.
        while (change := abs(low.change_to(high))) > max(
            least, 0.1 * steepest * (length := high.place - low.place)
        ):
            if length < np.sqrt(eps):
                # In the middle between what is left of a jump and of a kink.
                if change < 0.1 * steepest * np.sqrt(length):
                    break
                size = abs(high.value - low.value)
                return size, center + low.place * shift, center + high.place * shift
            middle = end(0.5 * (low.place + high.place), shift)
            if abs(low.change_to(middle)) >= abs(middle.change_to(high)):
                high = middle
            else:
                low = middle
    return None


def _movers(
    density: Density, size: float, low: np.ndarray, high: np.ndarray, farther: float
) -> np.ndarray:
    """Coordinates which alone make a jump, from a side of it some times as far as to the other."""
    movers: list[int] = []
    if len(low) <= DENSE_DIMENSION:  # which bounds the time
        sides = [(side, density(side)[0]) for side in (low, high)]
        for number, step in enumerate(high - low):
            for (side, value), sign in product(sides, (1, -1)):
                moved = side.copy()
                moved[number] += sign * farther * step
                if abs(density(moved)[0] - value) > 0.5 * size:
                    movers.append(number)
                    break
    return np.array(movers, dtype=int)
