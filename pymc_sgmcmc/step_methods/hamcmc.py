"""Hessian approximated MCMC as a step method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np

from pymc_sgmcmc.checks import one_of, or_none, positive_number
from pymc_sgmcmc.dynamics.hamcmc import QuasiNewtonLangevin
from pymc_sgmcmc.matrices import Dense, Diagonal, Matrix
from pymc_sgmcmc.schedules import MOST_THINNING
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.estimators import Gradient
from pymc_sgmcmc.step_methods.mirror import OF_MINIBATCHES
from pymc_sgmcmc.step_methods.settings import CommonSettings
from pymc_sgmcmc.step_methods.setup import Design, Kind, Pace, Setup, default_thinning
from pymc_sgmcmc.tuning import Center

REGULARIZATION = 1e-2
"""By default λ is this part of the largest curvature of the scaled position, and the threshold κ at
least this part. It is a compromise: a larger part slows the directions of small curvature, and a
smaller one lets noisy pairs make large moves there."""

LEAST_CURVATURE_OF_PAIRS = 0.25
"""The threshold κ is at least this part of the smallest curvature at the centre. A pair with less
comes from the noise of its minibatch, and makes moves that are too long in any direction. The
chains of a negative binomial regression with three predictors became infinite without it."""

PAIRS = ("own", "between")
"""The curvature is learnt from the moves of each chain ("own"), or from differences between the
other chains ("between")."""


@dataclass(frozen=True)
class Pairs:
    r"""Pairs from which `HAMCMC` learns the curvature.

    Parameters
    ----------
    kind : {"own", "between"}
        See `HAMCMC`.
    threshold : float, optional
        :math:`\kappa > 0`, in inverse units of :math:`\gamma`. A pair is used only if
        :math:`s^\top y > \kappa \|D^{-1} s\|^2`. Default: 0.01 :math:`\lambda_{\max}(DHD)` or,
        where it is larger, a quarter of :math:`\lambda_{\min}(DHD)`, up to 500 dimensions.

    Raises
    ------
    TypeError, ValueError
    """

    kind: str = "own"
    threshold: float | None = None

    def __post_init__(self):
        one_of("kind", self.kind, PAIRS)
        or_none(positive_number, "threshold", self.threshold)


class HAMCMC(StochasticGradientStep):
    r"""Hessian approximated MCMC: Langevin dynamics with limited-memory BFGS.

    .. math:: \theta_t = \theta_{t-M} + \tfrac{h}{2} H_t \hat\nabla_{S_t}(\theta_{t-M})
              + N(0, h H_t)

    where :math:`H_t` approximates the inverse curvature by BFGS updates of :math:`\gamma D^2`
    with M - 1 pairs, :math:`\tau = t-M+1, \dots, t-1`:
    :math:`s_\tau = \theta_\tau - \theta_{\tau-M}` and
    :math:`y_\tau = \hat\nabla_{S_\tau}(\theta_{\tau-M}) - \hat\nabla_{S_\tau}(\theta_\tau)
    + \lambda D^{-2} s_\tau`, with both gradients from the same rows (Şimşekli et al. 2016,
    algorithm 1, for the scaled position :math:`D^{-1} \theta`). By default
    :math:`D^2 = \operatorname{diag}(H)^{-1}` with the curvature H at the centre, so that no
    coordinate is slow for its unit alone; D is the identity, as in the paper, where
    `initial_scale`, `regularization` or the threshold of `Pairs` is given.
    No matrix is stored: the two-loop recursion gives :math:`H_t \hat\nabla`, and a similar
    recursion gives noise with covariance :math:`H_t` exactly.

    The sampler consists of M chains that take turns. Each chain is moved with a preconditioner
    learnt from the others.

    **Law.** On a Gaussian posterior with curvature H, exact gradients and the default
    :math:`\gamma`, :math:`H_t \preceq (H + \lambda D^{-2})^{-1}`. The stationary covariance is then
    the posterior's up to a relative excess of about
    :math:`\tfrac{h}{4}(H_t V + H_t H)`, with V the covariance of the gradient estimate. The
    excess vanishes with h. On other posteriors a bias stays as h goes to zero. :math:`H_t` does
    not use :math:`\theta_{t-M}`, so the correction :math:`\Gamma = \nabla \cdot H` is left out,
    but the noise in the pairs depends on :math:`\theta_{t-M}` through earlier :math:`H_\tau`.
    The bias was 2 % of a second moment in one strongly curved example. It was 0.2 standard
    deviations of the mean of a log scale in a small hierarchical model and 0.1 on a curved ridge,
    where some chains became infinite besides. ``pairs="between"`` had neither.
    :math:`\lambda` causes no bias. Pairs are zero in variables that are mirrored at zero, so that
    these move with :math:`\gamma` alone.

    ``pairs="between"`` learns the curvature from differences between the other chains,
    :math:`s_\tau = \theta_\tau - \theta_{\tau-1}` for :math:`\tau = t-M+2, \dots, t-1`. The moving
    chain has no influence on them, so the product of M posteriors is invariant as h goes to zero,
    whatever their shape (Leimkuhler, Matthews and Weare 2018).

    **Cost.** A transition takes two gradients of n rows, three with ``pairs="between"``, and O(M d)
    further operations. The recursions are unrolled, so compiling takes about a second a pair. A
    pair informs one direction only, and the M - 1 pairs in use inform a few. The gain over `SGLD`
    without preconditioner is large for few dimensions or many pairs, and small where many
    directions are slow. Up to d = 500 `SGLD` with its dense preconditioner mixes faster. HAMCMC is
    for posteriors for which no matrix can be stored, or whose curvature changes with the position.

    Parameters
    ----------
    memory : int
        M, at least 2: the number of chains that take turns. The number of pairs is one less.
    pairs : {"own", "between"} or Pairs
        "own" are the pairs of the paper, from the moves of each chain. "between" are differences
        between chains, which leave no bias as h goes to zero and need M of at least 3. `Pairs` sets
        besides which ones are used.
    initial_scale : float, optional
        :math:`\gamma`, in squared units of the unconstrained position. Default:
        :math:`1 / (\lambda_{\max}(DHD) + \lambda)`, at the centre, with a bound on
        :math:`\lambda_{\max}` where no dense curvature is known.
    regularization : float, optional
        :math:`\lambda \ge 0`, in inverse units of :math:`\gamma`. It bounds :math:`H_t` by
        :math:`1/\lambda` in flat directions. Default: 0.01 :math:`\lambda_{\max}(DHD)`.
    step_size : float or callable, optional
        The step size h, in units in which the posterior's curvature is about 1 or less. Default:
        that of `SGLD` with the preconditioner :math:`(H + \lambda D^{-2})^{-1}`, which bounds
        :math:`H_t`, for the variance inflation given as `bias`.
    thin : int, optional
        Number of transitions for each recorded draw. Default: a multiple of M, so that all draws
        are from one of the M chains, and where the step size is computed the relaxation time of
        the slowest direction under :math:`\gamma D^2`, which pairs shorten.
        Any other number is allowed where the step method has all variables. Draws are then from
        the M chains in turn, M times as many for the same work. For M > 2 their autocorrelations,
        and so the effective sample sizes of ArviZ, are wrong: treat each ``draws[k::M]`` as a
        separate chain.

    Raises
    ------
    ValueError, TypeError
        For invalid settings, as in `SGLD`; for `memory` below 2, or below 3 with
        ``pairs="between"``, since every pair would then use :math:`\theta_{t-M}`; and for a `thin`
        that is no multiple of M where other step methods move other variables, which are then
        conditioned on one of the M chains.
    ModelError
        As in `SGLD`.

    Notes
    -----
    The paper's :math:`\epsilon` is h / 2. There are three departures from its print. All M - 1
    pairs up to t - 1 are used (its indices give M - 2 of them, none at M = 2). The noise has
    another recursion, since eq. (11) is not a root of :math:`H_t`. All M chains start from one
    point and first move by SGLD with :math:`\gamma D^2`, where the paper asks for 2M + 1 starts.

    Beside the statistics of `SGLD`, `sample_stats` has ``pair_accepted``: 1 where the transition
    made a pair that later ones use, else 0.

    References
    ----------
    U. Şimşekli, R. Badeau, A. T. Cemgil and G. Richard (2016). Stochastic quasi-Newton
    Langevin Monte Carlo. *ICML*.

    B. Leimkuhler, C. Matthews and J. Weare (2018). Ensemble preconditioning for Markov chain Monte
    Carlo simulation. *Statistics and Computing* 28, 277-290.

    Examples
    --------
    >>> step = HAMCMC(batch_size=100, gradient="cv", compile_kwargs={"mode": "FAST_COMPILE"})
    """

    name = "hamcmc"
    _kind = Kind(
        has_preconditioner=False,
        takes_local=False,
        mirrors=f"{OF_MINIBATCHES}, initial_scale=..., regularization=..., "
        "pairs=Pairs(threshold=...)",
    )

    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        memory: int = 3,
        pairs: str | Pairs = "own",
        initial_scale: float | None = None,
        regularization: float | None = None,
        gradient: Gradient = "cv",
        **settings: Unpack[CommonSettings],
    ):
        if not isinstance(pairs, Pairs):
            pairs = Pairs(one_of("pairs", pairs, PAIRS, " or Pairs"))
        self._pairs = pairs
        self._memory = _check_memory(memory, pairs.kind)
        self._initial_scale = or_none(positive_number, "initial_scale", initial_scale)
        self._regularization = or_none(positive_number, "regularization", regularization, zero=True)
        super().__init__(vars, gradient=gradient, **settings)

    def _design(self, setup: Setup) -> Design:
        memory = self._memory
        thin = setup.settings.thin
        if thin is not None and thin % memory and setup.posterior.others:
            raise ValueError(
                f"`thin` should be a multiple of `memory` = {memory} where other step methods move "
                f"other variables, but got {thin}. Give such a multiple, so that all draws are "
                "from one of the chains that take turns."
            )
        largest = np.nan
        given = (self._initial_scale, self._regularization, self._pairs.threshold)
        squares = np.ones(setup.posterior.dimension)
        if given == (None, None, None):
            squares = 1 / setup.center.curvature.precision.diagonal()
        if None in given or setup.settings.step_size is None:
            curvatures = setup.center.curvature.relative_to(Diagonal(np.sqrt(squares)))
            largest = float(curvatures.max())
        scale, regularization, threshold = given
        if regularization is None:
            regularization = REGULARIZATION * largest
        if threshold is None:
            threshold = REGULARIZATION * largest
            if setup.center.curvature.is_dense:
                threshold = max(threshold, LEAST_CURVATURE_OF_PAIRS * float(curvatures.min()))
        if scale is None:
            scale = 1.0 / (largest + regularization)

        def computed() -> Pace:
            root = _regularized_root(setup.center, regularization / squares)
            choice = setup.choose_step_size(root)
            # With a γ above the default, H_t can exceed the preconditioner of the closed form.
            step_size = choice.step_size / max(1.0, scale * (largest + regularization))
            start = setup.center.curvature.relative_to(Diagonal(np.sqrt(scale * squares)))
            relaxation = default_thinning(step_size, float(start.min()))
            turns = max(1, min(relaxation, MOST_THINNING // memory))
            return Pace(step_size, memory * turns, choice)

        pace = setup.pace(computed, thin=memory)
        dynamics = QuasiNewtonLangevin(
            memory,
            setup.shared(scale * squares, "initial_scale"),
            setup.shared(regularization / squares, "regularization"),
            setup.shared(threshold / squares, "curvature_threshold"),
            between_chains=self._pairs.kind == "between",
            mirrored=setup.mirrored(),
        )
        return Design(dynamics, pace)

    def _remedy_of(self, step_size: float) -> str:
        remedy = super()._remedy_of(step_size)
        if self._pairs.kind == "own":
            remedy += '. `pairs="between"` may help where the posterior is far from Gaussian'
        return remedy


def _regularized_root(center: Center, regularization: np.ndarray) -> Matrix:
    """Root of (H + λ D⁻²)⁻¹, with the diagonal of H where no more is known."""
    precision = center.curvature.precision
    if not center.curvature.is_dense:
        return Diagonal((precision.diagonal() + regularization) ** -0.5)
    values = precision.dense()
    return Dense(np.linalg.inv(values + np.diag(regularization))).root


def _check_memory(memory: int, pairs: str) -> int:
    if isinstance(memory, bool) or not isinstance(memory, int | np.integer):
        raise TypeError(f"`memory` should be a whole number, at least 2, but got {memory!r}.")
    if memory < 2:
        raise ValueError(
            f"`memory` should be at least 2, but got {memory}: a single chain has no pairs of "
            "other positions. Use `SGLD` to sample without pairs."
        )
    if pairs == "between" and memory < 3:
        raise ValueError(
            f'`memory` should be at least 3 with `pairs="between"`, but got {memory}: a pair is a '
            "difference between two chains that do not move."
        )
    if memory > MOST_THINNING:
        raise ValueError(
            f"`memory` should be at most {MOST_THINNING}, since a draw has a transition of each "
            f"chain, but got {memory}. Pairs beyond the number of coordinates add little."
        )
    return int(memory)
