"""Search of a step size by short chains, where the closed form does not apply."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pymc_sgmcmc.chain import Chain
from pymc_sgmcmc.engine import TransitionBlock
from pymc_sgmcmc.stein import kernel_stein_discrepancy
from pymc_sgmcmc.step_methods.setup import Design, Pace, Setup, default_thinning
from pymc_sgmcmc.tuning.halving import successive_halving

LARGEST_STEP, SMALLEST_STEP, CANDIDATES = 1.0, 1e-4, 9
"""The grid has this largest step size, smallest step size and number of candidates, equidistant in
the logarithm, in units of 1 / λ_max(MH). The largest is a quarter of what is stable without noise.
Two rounds leave one of nine candidates, see `KEPT`."""

FIRST_TRANSITIONS = 500
"""Each candidate runs for this many transitions in the first round. It is a compromise between the
time of the search and the noise of the first comparison."""

POINTS = 200
"""The discrepancy is computed from about this many positions, since its cost grows with their
square."""


def check_searchable(setup: Setup, design: Design) -> None:
    """Make sure that short chains can be run for a search.

    Raises
    ------
    ValueError
        For dynamics other than Langevin's with a fixed preconditioner, for estimators with a
        memory, and for JAX.
    """
    estimator = setup.estimator
    follows = estimator.memory is not None or estimator.reference is not None
    if design.closed_form is None or follows:
        raise ValueError(
            '`tune_method="halving"` is for SGLD, SGLDCV and PSGLD(preconditioner="curvature") '
            f'with `gradient="plain"` or "cv", but got {setup.name} with "{estimator.name}".'
        )
    if setup.settings.on_jax:
        raise ValueError(
            '`tune_method="halving"` runs chains of many lengths, and JAX would compile for each. '
            'Use `compile_kwargs={"mode": "NUMBA"}`.'
        )


def search_step_size(block: TransitionBlock, setup: Setup, design: Design) -> Design:
    """Design with the step size that successive halving finds. The step size is logged.

    The seed is fixed, so that the same model and data give the same step size.

    Raises
    ------
    ValueError
        Where all chains diverged.
    """
    center, choice = setup.center, design.closed_form
    assert choice is not None  # checked before
    # Discrepancies are computed in coordinates in which the Gaussian of the centre is N(0, I).
    root = center.curvature.root
    inverse_root = root.inverse
    shift = root @ np.random.default_rng(7).standard_normal(setup.posterior.dimension)

    def run(step_size: float, chain: Chain | None, transitions: int) -> tuple[Chain, float]:
        if chain is None:
            chain = Chain(block, step_size=step_size)
            chain.begin(np.random.default_rng(2021), center.position + shift)
        draws = chain.advance(transitions)
        if draws.bad_transition is not None:
            return chain, np.inf
        thinned = slice(None, None, max(1, len(draws) // POINTS))
        white = inverse_root.each(draws.positions[thinned] - center.position)
        scores = draws.gradients[thinned] @ root
        return chain, float(kernel_stein_discrepancy(white, scores).value)

    grid = np.geomspace(LARGEST_STEP, SMALLEST_STEP, CANDIDATES) / choice.curvature
    best = successive_halving(list(grid), run, FIRST_TRANSITIONS)[0]
    thin = setup.settings.thin or default_thinning(best.step_size, choice.smallest_curvature)
    setup.report(Pace(best.step_size, thin, choice), by=" by successive halving")
    return replace(design, pace=Pace(best.step_size, thin))
