"""Preconditioned stochastic gradient Langevin dynamics (Li et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np

from pymc_sgmcmc.adaptation.rmsprop import RMSprop
from pymc_sgmcmc.checks import positive_number
from pymc_sgmcmc.dynamics import Langevin
from pymc_sgmcmc.matrices import Diagonal, largest_mean_square
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.estimators import Gradient
from pymc_sgmcmc.step_methods.mirror import OF_MINIBATCHES
from pymc_sgmcmc.step_methods.settings import CommonSettings
from pymc_sgmcmc.step_methods.setup import Design, Kind, Pace, Setup


class PSGLD(StochasticGradientStep):
    r"""Stochastic gradient Langevin dynamics with an RMSprop preconditioner.

    .. math::
        v_{t+1} &= \alpha v_t + (1 - \alpha)\, \bar g_t \circ \bar g_t, \qquad
        M = \operatorname{diag}\left(\frac{1}{\lambda + \sqrt{v}}\right) \\
        \theta' &= \theta + \tfrac{h}{2} M \hat\nabla(\theta) + N(0, h M)

    with :math:`\bar g = \hat\nabla / N` the gradient a row (Li, Chen, Carlson and Carin 2016,
    algorithm 1). During tuning v follows the gradients of all transitions, and M follows v every
    hundred transitions. Without tuning draws M is that of the start.

    **Departures from the paper.** There :math:`\bar g` is the mean over the minibatch of the
    gradients of the log likelihood of the rows. Here it is the estimate that moves the chain, which
    contains the gradient of the prior, divided by N. And **after tuning, M is frozen**. The paper
    goes on adapting and leaves out the term :math:`\Gamma_i = \sum_j \partial_j M_{ij}`, which a
    preconditioner that changes with the position needs. That causes a bias that does not vanish
    with the step size. A frozen M needs no such term.

    **Law.** After tuning the law is that of `SGLD` with the fixed preconditioner M: on a Gaussian
    posterior the mean is right, and the covariance is too large by about
    :math:`\tfrac{h}{4}(MV + MH)`. RMSprop makes the sizes of gradients equal, not those of
    curvatures. At stationarity gradients scale like :math:`H^{1/2}`, so M is about the diagonal
    :math:`H^{-1/2}`, and the condition number of MH is the root of that of H. Where a curvature at
    the centre is available, `SGLD` with the inverse of it, which is its default, mixes faster.

    **Cost.** The cost is that of `SGLD`, and slightly more during tuning.

    Parameters
    ----------
    decay : float
        :math:`\alpha`, in (0, 1).
    regularization : float
        :math:`\lambda > 0`, in units of the gradient of one row. It bounds M in directions
        without gradient.
    step_size : float or callable, optional
        The step size h for M as above. Where not given, M is rescaled to
        :math:`\lambda_{\max}(MV) + \lambda_{\max}(MH) = 1`, with the curvature H at the centre and
        the covariance V of the gradient estimate, and h is 4 times the variance inflation given as
        `bias`.

    Raises
    ------
    ValueError
        For a decay outside (0, 1), or a regularization that is not positive; otherwise as `SGLD`.

    References
    ----------
    C. Li, C. Chen, D. Carlson and L. Carin (2016). Preconditioned stochastic gradient Langevin
    dynamics for deep neural networks. *AAAI*.

    Examples
    --------
    >>> step = PSGLD(batch_size=1000, compile_kwargs={"mode": "FAST_COMPILE"})
    """

    name = "psgld"
    _kind = Kind(bounds_noise=True, has_preconditioner=False, mirrors=OF_MINIBATCHES)

    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        decay: float = 0.99,
        regularization: float = 1e-5,
        gradient: Gradient = "cv",
        **settings: Unpack[CommonSettings],
    ):
        self._decay = positive_number("decay", decay)
        if decay >= 1:
            raise ValueError(f"`decay` should be between 0 and 1, but got {decay!r}.")
        self._regularization = positive_number("regularization", regularization)
        super().__init__(vars, gradient=gradient, **settings)

    def _design(self, setup: Setup) -> Design:
        ones = np.ones(setup.posterior.dimension)
        preconditioner = setup.shared(ones, "preconditioner")
        preconditioner_root = setup.shared(ones, "preconditioner_root")
        dynamics = Langevin(
            Diagonal(preconditioner),
            Diagonal(preconditioner_root),
            setup.mirrored(),
            is_tuned=True,
        )

        def scaled() -> Pace:
            expected = _stationary_diagonal(setup, self._regularization)
            expected = expected / _diagonal_size(setup)(expected)
            return replace(setup.closed_form(Diagonal(np.sqrt(expected))), step_size=4 * setup.bias)

        pace = setup.pace(scaled)
        adaptation = RMSprop(
            setup.posterior,
            preconditioner,
            preconditioner_root,
            decay=self._decay,
            regularization=self._regularization,
            batch_size=setup.estimator.batching.batch_size,
            size_of=_diagonal_size(setup) if pace.choice is not None else None,
        )
        return Design(dynamics, pace, (adaptation,))


def _stationary_diagonal(setup: Setup, regularization: float) -> np.ndarray:
    """M to which RMSprop comes where the gradient has the variance H + V, up to a factor."""
    noise = (setup.gradient_deviations() ** 2).sum(axis=0)
    moment = setup.center.curvature.precision.diagonal() + noise
    return 1 / (regularization + np.sqrt(moment) / setup.posterior.n_rows)


def _diagonal_size(setup: Setup) -> Callable[[np.ndarray], float]:
    """λ_max(MV) + λ_max(MH) as a function of a diagonal M."""
    curvature = setup.center.curvature
    deviations = setup.gradient_deviations()
    if isinstance(deviations, np.ndarray) and len(deviations) > deviations.shape[1]:
        # These d rows have the same V.
        deviations = np.linalg.qr(deviations, mode="r")

    def size(diagonal: np.ndarray) -> float:
        root = Diagonal(np.sqrt(diagonal))
        noise = deviations.shape[0] * largest_mean_square(deviations, root)
        return noise + float(curvature.relative_to(root).max())

    return size
