"""A search for jumps of the log density, which gradients do not show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

from pymc_sgmcmc.checks import FEW_NAMES
from pymc_sgmcmc.errors import CenterWarning, warn
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning.center import Center

ROWS = 200
"""Jumps of the log likelihood are searched on so many rows."""

PATHS = 50
"""Jumps are searched on the ways from the centre to so many points of its Gaussian. A part of 6 %
of its mass that a jump cuts off is found with 95 % probability."""

LEAST_CHANGE = 0.3
"""Between two points the log density changes by at least this much more or less than its gradients
there say, or jumps are no concern. Where it falls by so much at the mean of a normal posterior, the
mean shifts by 0.12 standard deviations."""

MOST_SEARCHES = 10
"""Jumps are searched on at most so many of the ways, those on which the change differs most."""

SHORTEST = 1e-8
"""A way is halved until it is this part of the whole. The change by a kink falls in proportion."""

LEAST_JUMP = 1e-3
"""What is then left of the change is a jump where it is larger than this and than rounding."""

ROUNDING = 1e3
"""A log density is known up to so many times the rounding error of its value."""

BEYOND = 1e3
"""Whether a coordinate makes a jump is seen where it alone moves this many times as far as between
the two points at the jump."""

FEW_COORDINATES = 500
"""Coordinates are tried one by one where they are at most this many, which bounds the time."""

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


def warn_of_jumps(posterior: Posterior, center: Center) -> None:
    """Warn where the log density jumps near the centre.

    Such a jump is that of a comparison, of `switch`, or of rounding a parameter. The gradient is
    the same as without it, and so are the draws. Where a density is zero beyond, other warnings
    follow.

    Warns
    -----
    CenterWarning
    """
    rng = np.random.default_rng(1815)
    shifts = [
        center.curvature.root @ rng.standard_normal(posterior.dimension) for _ in range(PATHS)
    ]
    densities: list[Density] = [posterior.log_prior_and_gradient]
    if posterior.has_rows and posterior.some_rows:
        step = max(1, len(posterior.some_rows[0]) // ROWS)
        rows = posterior.part(posterior.some_rows, slice(None, None, step))
        weight = posterior.n_rows / len(rows[0])

        def of_rows(position: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = posterior.log_likelihood_and_gradient(position, rows)
            return weight * value, weight * gradient

        densities.append(of_rows)
    for density in densities:
        with np.errstate(all="ignore"):
            jump = _first_jump(density, center.position, shifts, posterior.dtype)
            if jump is None:
                continue
            size, low, high = jump
            movers = _movers(density, size, low, high)
        _warn(posterior, size, low, movers)
        return


def _warn(posterior: Posterior, size: float, place: np.ndarray, movers: np.ndarray) -> None:
    named = ", ".join(
        f"`{posterior.labels[number]}` = {place[number]:.4g}" for number in movers[:FEW_NAMES]
    )
    more = f" and {len(movers) - FEW_NAMES} more" if len(movers) > FEW_NAMES else ""
    where = f"at {named}{more}" if named else "near the centre"
    warn(
        f"The log density jumps by {size:.3g} {where}. Gradients do not show a jump, so the draws "
        "are those of a density without it. Comparisons, `switch` and rounding of parameters make "
        "jumps: take `ordered` or an interval as the transform in place of a constraint, a smooth "
        "function such as `pm.math.sigmoid` in place of a step, or sample with `pm.NUTS` or "
        "`pm.Slice`.",
        CenterWarning,
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
    least = max(LEAST_JUMP, ROUNDING * float(np.finfo(dtype).eps) * abs(value))
    changes[~(changes > max(LEAST_CHANGE, least))] = 0
    for number in np.argsort(-changes)[: min(MOST_SEARCHES, np.count_nonzero(changes))]:
        shift, (low, high) = shifts[number], ways[number]
        steepest = changes[number]
        # The change over a smooth part falls with the third power of its length, that by a kink or
        # by many small jumps in proportion to it, and that by a jump not at all.
        while abs(low.change_to(high)) > max(least, 0.1 * steepest * (high.place - low.place)):
            if high.place - low.place < SHORTEST:
                size = abs(high.value - low.value)
                return size, center + low.place * shift, center + high.place * shift
            middle = end(0.5 * (low.place + high.place), shift)
            if abs(low.change_to(middle)) >= abs(middle.change_to(high)):
                high = middle
            else:
                low = middle
    return None


def _movers(density: Density, size: float, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Coordinates which alone make a jump from one side of it to the other."""
    movers: list[int] = []
    if len(low) <= FEW_COORDINATES:
        sides = [(side, density(side)[0]) for side in (low, high)]
        for number, step in enumerate(high - low):
            for (side, value), sign in product(sides, (1, -1)):
                moved = side.copy()
                moved[number] += sign * BEYOND * step
                if abs(density(moved)[0] - value) > 0.5 * size:
                    movers.append(number)
                    break
    return np.array(movers, dtype=int)
