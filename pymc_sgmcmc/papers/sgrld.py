"""Stochastic gradient Riemannian Langevin dynamics as a step method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable
from scipy import linalg

from pymc_sgmcmc.checks import or_none, whole_number
from pymc_sgmcmc.compiling.compiled import PYTHON_MODE, compile_quietly
from pymc_sgmcmc.dynamics.riemannian import (
    DiagonalRiemannianLangevin,
    RiemannianLangevin,
    diagonal_divergence,
)
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.matrices import Dense
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.graphs import rebuild
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.estimators import Gradient
from pymc_sgmcmc.step_methods.settings import CommonSettings
from pymc_sgmcmc.step_methods.setup import Design, Kind, Pace, Setup
from pymc_sgmcmc.tuning import prior_precision

LARGEST_DIMENSION = 50
"""The position has at most this many coordinates. The metric is dense and is differentiated in each
of them, so its cost grows with the third power of their number."""

LEAST_METRIC_ROWS = 200
"""By default the metric is made of this many rows, or of ten for each coordinate where that is
more. It is a compromise between the cost of a transition and the error of the metric, which affects
only how fast the chain mixes."""


class SGRLD(StochasticGradientStep):
    r"""Stochastic gradient Riemannian Langevin dynamics with a Fisher metric.

    .. math::
        \theta' &= \theta + \tfrac{h}{2} \left\{ M(\theta) \hat\nabla(\theta) + \Gamma(\theta)
            \right\} + N(0, h M(\theta)), \qquad
        \Gamma_i = \sum_j \partial_j M_{ij} \\
        M(\theta)^{-1} &= \frac{N}{R} \sum_{i=1}^{R} \nabla \log p(x_i \mid \theta)\,
            \nabla \log p(x_i \mid \theta)^\top + P

    The sampler is that of Patterson and Teh (2013). The expected Fisher information is estimated by
    the second moment of the gradients of single rows. P is the curvature of the prior, at the
    centre where there is one and at the initial point otherwise. The R rows are drawn at random
    once, so the metric is a *deterministic* function of the position and the chain has a
    well-defined law. :math:`\Gamma` is computed exactly, by automatic differentiation. Any positive
    definite M leaves the posterior invariant, and the error of an estimate from R rows affects only
    how fast the chain mixes. (The drift in print differs, and is in general wrong in more than one
    dimension, see `pymc_sgmcmc.dynamics.riemannian.RiemannianLangevin`.)

    **Law.** The law is the posterior up to a bias of first order in h, from the Euler step and the
    noise of the gradient. Near a Gaussian posterior the bias is about that of `SGLD` with M at the
    centre.

    **Cost.** A transition takes one gradient of n rows. The metric takes the gradients of R single
    rows and their derivatives in d directions, :math:`O(R d^2)`, and :math:`O(d^3)` for the root of
    a matrix. Where the curvature hardly changes over the posterior, `SGLD` with its constant
    preconditioner mixes as well at a fraction of the cost.

    Parameters
    ----------
    metric : callable, optional
        A diagonal of M in place of the Fisher metric: a function of the symbolic position that
        gives a vector, each entry of which depends on its own coordinate alone. With the position
        the logarithm of a Gamma variable, ``metric=lambda position: pt.exp(-position)`` is the
        sampler of Patterson and Teh for topic models. It needs a `step_size`, and d is not bounded.
    metric_rows : int, optional
        The number of rows R. Default: 200, or 10 d if that is more, and at most N.
    step_size : float or callable, optional
        The step size h. Default: that of `SGLD` with M at the centre.

    Raises
    ------
    TypeError, ValueError
        Where `metric_rows` is no whole number between 1 and N, or the position has more than 50
        coordinates; otherwise as `SGLD`.

    References
    ----------
    S. Patterson and Y. W. Teh (2013). Stochastic gradient Riemannian Langevin dynamics on the
    probability simplex. *NeurIPS*.

    T. Xifara, C. Sherlock, S. Livingstone, S. Byrne and M. Girolami (2014). Langevin diffusions
    and the Metropolis-adjusted Langevin algorithm. *Statistics and Probability Letters* 91, 14-19.

    Examples
    --------
    >>> step = SGRLD(batch_size=1000, compile_kwargs={"mode": "FAST_COMPILE"})
    """

    name = "sgrld"

    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        metric: Callable[[TensorVariable], TensorVariable] | None = None,
        metric_rows: int | None = None,
        gradient: Gradient = "plain",
        **settings: Unpack[CommonSettings],
    ):
        self._metric_rows = or_none(whole_number, "metric_rows", metric_rows, 1, " of rows")
        self._metric = metric
        if metric is not None and (settings.get("step_size") is None or metric_rows is not None):
            raise ValueError(
                "`metric` should be given together with `step_size` and without `metric_rows`, "
                "which is for the Fisher metric."
            )
        # The Fisher metric is made of gradients of rows, which local variables do not have.
        self._kind = Kind(has_preconditioner=False, takes_local=metric is not None)  # type: ignore[misc]
        super().__init__(vars, gradient=gradient, **settings)

    def _design(self, setup: Setup) -> Design:
        if self._metric is not None:
            diagonal = _checked_diagonal(self._metric, setup.posterior)
            return Design(DiagonalRiemannianLangevin(diagonal), setup.pace(_no_step_size))
        posterior = setup.posterior
        if posterior.dimension > LARGEST_DIMENSION:
            raise ValueError(
                f"`SGRLD` has a dense metric, for at most {LARGEST_DIMENSION} dimensions, but the "
                f"position has {posterior.dimension}. Use `PSGLD`, whose preconditioner is "
                "diagonal."
            )
        center = setup.center if setup.settings.step_size is None else setup.known_center
        reference = posterior.initial_position if center is None else center.position
        rows = posterior.take(_choose_rows(self._metric_rows, posterior))
        weight = np.sqrt(posterior.n_rows / len(rows[0]))
        scores = weight * posterior.row_gradients(reference, rows)
        information = scores.T @ scores
        prior = _positive_prior_precision(posterior, reference, information)

        def computed() -> Pace:
            root = linalg.cholesky(linalg.inv(information + prior), lower=True)
            return setup.closed_form(Dense(root))

        pace = setup.pace(computed)
        shared = [
            pytensor.shared(values, f"metric_{number}", shape=values.shape)
            for number, values in enumerate(rows)
        ]
        scale = setup.shared(weight, "metric_weight")
        dynamics = RiemannianLangevin(
            lambda position: scale * posterior.single_row_gradients(position, shared),
            setup.shared(prior, "prior_precision"),
        )
        return Design(dynamics, pace)


def _no_step_size() -> Pace:
    raise AssertionError("`metric` comes with a step size.")


def _checked_diagonal(
    metric: Callable[[TensorVariable], TensorVariable], posterior: Posterior
) -> Callable[[TensorVariable], TensorVariable]:
    """The metric, evaluated at a random position.

    Raises
    ------
    ValueError
        Where it is no positive vector, or an entry depends on another coordinate.
    """
    d, dtype = posterior.dimension, posterior.dtype

    def diagonal(position: TensorVariable) -> TensorVariable:
        M = pt.as_tensor(metric(position)).astype(dtype)
        return M if M.ndim else pt.full((d,), M)

    position = pt.tensor("position", shape=(d,), dtype=dtype)
    M = diagonal(position)
    if M.ndim != 1:
        raise ValueError(f"`metric` should return a vector, but returns {M.type}.")
    direction = pt.tensor("direction", shape=(d,), dtype=dtype)
    rng = np.random.default_rng(2013)
    start = posterior.initial_position + 0.1 * rng.standard_normal(d)
    moved = 1e-4 * rng.standard_normal(d)
    function = compile_quietly(
        [position, direction],
        [M, rebuild([M], {position: position + direction})[0], diagonal_divergence(M, position)],
        PYTHON_MODE,
    )
    here, there, slopes = function(start.astype(dtype), moved.astype(dtype))
    if here.shape != (d,) or not (np.isfinite(here) & (here > 0)).all():
        raise ValueError(
            f"`metric` should return {d} positive numbers, but its smallest of shape {here.shape} "
            f"is {np.min(here)}."
        )
    # The rest of a Taylor series is of second order in the distance.
    if not np.allclose(there - here, slopes * moved, rtol=0.01, atol=1e-5 * np.abs(here).max()):
        raise ValueError(
            "Each entry of `metric` should depend on its own coordinate alone, but some depend on "
            "others. Use `Recipe(D=...)` for such a matrix."
        )
    return diagonal


def _choose_rows(count: int | None, posterior: Posterior) -> np.ndarray:
    """Numbers of the rows of the metric, which are the same each time."""
    n_rows = posterior.n_rows
    if count is None:
        count = min(n_rows, max(LEAST_METRIC_ROWS, 10 * posterior.dimension))
    if count > n_rows:
        raise ModelError(
            f"`metric_rows` should be at most the number of rows, {n_rows}, but got {count}."
        )
    return np.sort(np.random.default_rng(2013).choice(n_rows, size=count, replace=False))


def _positive_prior_precision(
    posterior: Posterior, position: np.ndarray, information: np.ndarray
) -> np.ndarray:
    """Curvature of the prior, made positive enough for the metric to be positive definite."""
    curvature = prior_precision(posterior, position, np.diag(information))
    if not (np.isfinite(curvature).all() and np.isfinite(information).all()):
        raise ModelError(
            "The gradients of the log density are not finite near the point where the metric is "
            "made. Give another `center`, or other initial values."
        )
    values, vectors = linalg.eigh(curvature)
    floor = 1e-6 * max(np.trace(information) / len(information), np.abs(values).max())
    return (vectors * np.maximum(values, floor)) @ vectors.T
