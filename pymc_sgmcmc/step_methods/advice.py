"""What would serve the user better than the step method asked for."""

from __future__ import annotations

import time

import numpy as np

from pymc_sgmcmc.matrices import Diagonal
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning import Center

STEP_OF_NUTS = 1.4
"""The step size of NUTS for d independent normals is about this over the fourth root of d. Measured
are .80, .44 and .38 for 10, 100 and 1000 of them."""


def advice_on_nuts(
    posterior: Posterior, center: Center, passes: float, relaxation_times: float
) -> str | None:
    r"""What NUTS would take, where that are fewer gradients of rows, or None.

    The effective part of a draw after t relaxation times is
    :math:`(1 - e^{-t}) / (1 + e^{-t})`, and about one for NUTS, whose trajectory is half of the
    period :math:`2 \pi / \sqrt{\lambda}` along the smallest curvature λ, in units of the
    marginal standard deviations that it tunes.

    Parameters
    ----------
    posterior : Posterior
    center : Center
    passes : float
        Gradients of rows that a draw takes, over their number N.
    relaxation_times : float
        Of a draw.
    """
    curvature = center.curvature
    values = curvature.relative_to(Diagonal(curvature.standard_deviations))
    condition = np.sqrt(values.max() / values.min())
    of_nuts = np.pi * condition * posterior.dimension**0.25 / STEP_OF_NUTS
    effective = np.tanh(relaxation_times / 2)
    if passes / effective <= of_nuts:
        return None
    posterior.gradient(center.position)  # which another process compiles first
    began = time.perf_counter()
    posterior.gradient(center.position)
    seconds = of_nuts * (time.perf_counter() - began)
    return (
        f"An effective draw takes gradients of {passes / effective:.0f} times all "
        f"{posterior.n_rows} rows, and one of NUTS of about {of_nuts:.0f}, in {seconds:.2g} "
        "seconds. Use NUTS (`pm.sample()`) for this model."
    )
