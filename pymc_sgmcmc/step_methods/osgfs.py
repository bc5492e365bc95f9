"""Optimized stochastic gradient Fisher scoring as a step method."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np

from pymc_sgmcmc.adaptation.convergence import CONVERGENCE_RULES
from pymc_sgmcmc.adaptation.fisher_scoring import FisherScoringAdaptation, state_matrices
from pymc_sgmcmc.adaptation.gradient_noise import (
    ControlVariateNoise,
    NoiseModel,
    PlainNoise,
    ResidualNoise,
)
from pymc_sgmcmc.checks import one_of, or_none, positive_number, whole_number
from pymc_sgmcmc.dynamics.osgfs import (
    FisherScoring,
    ScoringMatrices,
    scalar_bound,
)
from pymc_sgmcmc.errors import BatchSizeWarning, warn
from pymc_sgmcmc.gradient_estimators import GradientEstimator, PlainGradient
from pymc_sgmcmc.limits import check_memory
from pymc_sgmcmc.schedules import MOST_THINNING
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.estimators import Gradient, Plain, estimator_of
from pymc_sgmcmc.step_methods.settings import MinibatchSettings
from pymc_sgmcmc.step_methods.setup import Design, Kind, Pace, Setup
from pymc_sgmcmc.tuning import (
    DENSE_DIMENSION,
    Center,
)

log = logging.getLogger("pymc.sgmcmc")

CHOICES_OF_K = ("matrix", "scalar", "weak_prior", "strong_prior", "paper")
"""These are the names of the choices of k."""

CURVATURES = ("fisher", "center")
"""The curvature H is NC + G by Fisher's identity ("fisher"), or that at the centre ("center")."""

STARTS = ("center", "model")
"""The chain and its matrices begin at the centre, or at the initial point of the model."""

CURVATURE_ERROR = 0.35
"""The default bound on k assumes that the curvature over the posterior is wrong by this relative
amount. A bias of 5 % then gives k = 0.5."""

BOUND_TOLERANCE = 0.05
"""The bound on k may be exceeded by this relative amount before a warning follows, since V
estimated from 10 000 rows is wrong by about as much."""

SMALL_K = 0.02
"""A warning follows where k is smaller. The autocorrelation time, about 4 / k, is then over 200
transitions."""


@dataclass(frozen=True)
class RunningCovariance:
    """How `OSGFS` computes C, the covariance over rows of a row's gradient.

    Parameters
    ----------
    rows : int, optional
        Number of rows from which C is computed each time. Default: n, but at least 500 and 20 d,
        at most 10 000, and never more than N.
    update_every : int, optional
        Transitions between two updates of C. Default: 1000, or more where computing C is costly.

    Raises
    ------
    TypeError, ValueError
    """

    rows: int | None = None
    update_every: int | None = None

    def __post_init__(self):
        or_none(whole_number, "rows", self.rows, 2)
        or_none(whole_number, "update_every", self.update_every, 1)


EVERY_THOUSAND = RunningCovariance()
"""This is the default of `OSGFS`."""


@dataclass(frozen=True)
class ConvergenceTest:
    """How `OSGFS` tests whether it has converged, see `pymc_sgmcmc.adaptation.convergence`.

    Parameters
    ----------
    rule : {"chi2", "elementwise"}
        See `OSGFS`.
    b : float, optional
        The factor b of the elementwise rule, in (0, 2]. Default: 1.
    window : int, optional
        Number of gradients in a window, n_w. Default: 1/k, as the paper suggests, with k of the
        slowest direction, but at least 50 (so 50 for each k from 0.02 on) and at most 10 000.

    Raises
    ------
    TypeError, ValueError
    """

    rule: str = "chi2"
    b: float | None = None
    window: int | None = None

    def __post_init__(self):
        one_of("rule", self.rule, CONVERGENCE_RULES)
        or_none(whole_number, "window", self.window, 1)
        or_none(positive_number, "b", self.b, most=2.0)
        if self.b is not None and self.rule != "elementwise":
            raise ValueError(
                f'`b` belongs to the rule "elementwise", but got b={self.b!r} with {self.rule!r}. '
                "Leave it out."
            )


class OSGFS(StochasticGradientStep):
    r"""Optimized stochastic gradient Fisher scoring.

    .. math:: \theta' = \theta + D \hat\nabla(\theta) + N(0, \Sigma), \qquad
              \Sigma = 2D - D (H + V) D

    with H the curvature of the negative log posterior and V the covariance of the gradient
    estimate, which is learned from the gradients of single rows (El hanchi 2018, eq. 8 and
    algorithm 1). The noise of the gradient takes the place of injected noise, and the step is
    as large as that allows. The sampler is meant for posteriors that are nearly Gaussian.

    **Law.** On a Gaussian posterior the law is exactly the posterior, at any k, where H and V are
    known. A relative error e of H changes the variance by about
    :math:`-e\, (k/4) / (1 - k/4)`. A curvature that varies over the posterior has the same effect,
    which `bias` bounds. An error of V changes the variance by up to as much.

    **Covariance of the gradient.** With C the covariance over rows of a row's gradient,
    :math:`V = \tfrac{N^2}{n} c\, C` with the factor c of the minibatch scheme. Every thousand
    transitions C is computed anew from some rows at the present position and
    averaged, :math:`C \leftarrow (1 - \tfrac1i) C + \tfrac1i \mathrm{cov}`. Before convergence
    the average is over the last 10 times only, so that C forgets where the chain came from. For
    ``gradient="cv"`` V is from the covariance of the *differences* to the centre. For other
    estimators V is the covariance of :math:`\hat\nabla + H \theta` over the last transitions.
    While there are fewer than 10 rows a dimension, C is shrunk towards its diagonal by the part
    d / (d + rows).

    **Curvature.** The paper takes :math:`H \approx NC + G` by Fisher's identity, with G the
    curvature of the negative log prior. This needs no centre, and with `start="model"` no pass over
    the data, but it holds only where the likelihood is well specified. On the Skin Segmentation
    data NC is 0.4 to 5 times the curvature, which at k = 0.5 makes the covariance wrong by 20 %. So
    the curvature at the centre is used where there is a centre.

    **Beside other step methods** that move parameters of the prior of the position, such as mean
    and covariance of a hierarchical model (`NormalInverseWishart`), G is computed anew in each
    draw, by 2d gradients of the prior. Otherwise H and V would be those of another posterior. C
    follows other variables of the likelihood only at its updates, and with ``curvature="center"`` H
    is fixed.

    **Convergence.** The mean of each window of gradients, 50 of them by default where k is at
    least 0.02, is compared with its variance at stationarity. The first window that passes sets
    ``converged``, and C is computed anew. See `pymc_sgmcmc.adaptation.convergence`.

    **Departures from the paper.** Its algorithm cites (7), whose covariance is too large by
    1/(1 - k/4), and here (8) is used. The chain is stable for k in (0, 4), not (0, 1). V has the
    factor c, without which sampling without replacement loses half of the variance at n = N/2.
    The prior counts once, not N times. k may differ between directions.

    **Cost.** A transition takes one gradient of n rows and a d × d product, as for `SGLD` with a
    dense preconditioner. The updates take about 2 ms every 1000 transitions at d = 10. The position
    may have up to 500 dimensions.

    Parameters
    ----------
    k : {"matrix", "scalar", "weak_prior", "strong_prior", "paper"} or float, optional
        Twice the part of the way to the mode that one transition goes, in (0, 4). At k = 2 draws
        from a Gaussian are independent.
        "matrix" (default) takes, in each direction in which H and V are both diagonal, the largest
        k for which Σ is positive semidefinite: :math:`k_j = \min(c, 4 / (1 + v_j))`.
        "scalar" takes the same k in all, :math:`\min(c, 4 / (1 + \max_j v_j))`, D = (k/2) H⁻¹.
        The other names are the paper's bounds: "weak_prior", its (13), 4 / (1 + cN/n);
        "strong_prior", its (15); and "paper", its (16), the larger of the two. (15) is sufficient
        for Σ to be positive semidefinite. (13), and so (16), is sufficient only where H = NC + G,
        which holds where the likelihood is well specified. Elsewhere the chain may be too wide. A
        number is used as it is.
    curvature : {"center", "fisher"}, optional
        The matrix H: the fixed curvature of the log posterior at the centre, or NC + G, which is
        right for well specified likelihoods only. Default: "center" where a centre is computed
        and the step method has all variables, otherwise "fisher".
    start : {"center", "model"}
        Where to begin: at the centre, with H and V from there, or, as in the paper, at the model's
        initial point without a search for the mode. Initial values of the user have precedence.
    covariance : RunningCovariance
        From how many rows, and how often, C is computed.
    convergence : {"chi2", "elementwise"} or ConvergenceTest
        Whether the mean of a window is near its expectation, zero.
        "chi2": :math:`\bar Y^\top \mathrm{Var}(\bar Y)^{-1} \bar Y \le \chi^2_{d, 0.95}`;
        "elementwise": the paper's (17), :math:`|\bar Y_i| \le b \sqrt{(H + V)_{ii} / n_w}` for all
        i, which in many dimensions hardly ever passes.
    bias : float, optional
        Relative error of the posterior variance that you accept where the curvature is wrong by
        35 %, in (0, 1). It bounds k by :math:`c = \min\{2, 4x / (1 + x)\}` with x = `bias` / 0.35,
        which is c in (16), where the paper takes 0.1. Default: 0.05, for which c is 0.5.
    thin : int, optional
        Number of transitions for each recorded draw. Default: one relaxation time of the fastest
        direction.

    Raises
    ------
    ModelError
        Where the rows of the model cannot be separated.
    ValueError, TypeError
        For invalid settings.

    Warns
    -----
    BatchSizeWarning
        Where k is below 0.02. Also where k, given or by one of the paper's bounds, is above the
        exact bound, so that Σ is not positive semidefinite and the chain is too wide.

    Notes
    -----
    Beside the statistics of `SGLD`, `sample_stats` has for each draw ``converged``, the last
    ``convergence_statistic``, and ``k`` of the slowest direction. The convergence statistic is
    relative to its bound: a window passes where it is at most 1, and it is infinite before the end
    of the first window. Autocorrelation times are about 4/k transitions. ``step_size`` is 1.

    References
    ----------
    A. El hanchi (2018). Stochastic gradient MCMC algorithms and their applications.

    Examples
    --------
    >>> step = OSGFS(batch_size=200, compile_kwargs={"mode": "FAST_COMPILE"})
    >>> bool(idata.sample_stats["converged"].all())
    True
    """

    name = "osgfs"
    _kind = Kind(keeps_rows=False, has_preconditioner=False, takes_local=False)

    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        k: str | float = "matrix",
        curvature: str | None = None,
        start: str = "center",
        covariance: RunningCovariance = EVERY_THOUSAND,
        convergence: str | ConvergenceTest = "chi2",
        gradient: Gradient = "plain",
        **settings: Unpack[MinibatchSettings],
    ):
        bias = settings.get("bias")
        self._k = _check_k(k)
        if bias is not None and not isinstance(k, str):
            raise ValueError(
                "`bias` is the accuracy from which the largest k is computed, but got both "
                f"bias={bias!r} and k={k!r}. Leave one of them out."
            )
        self._curvature = curvature and one_of("curvature", curvature, CURVATURES)
        self._start_at = one_of("start", start, STARTS)
        if not isinstance(covariance, RunningCovariance):
            raise TypeError(f"`covariance` should be a RunningCovariance, but got {covariance!r}.")
        self._covariance = covariance
        if not isinstance(convergence, ConvergenceTest):
            one_of("convergence", convergence, CONVERGENCE_RULES, " or a ConvergenceTest")
            convergence = ConvergenceTest(convergence)
        self._convergence = convergence
        plain = isinstance(estimator_of(gradient), Plain | PlainGradient)
        if self._k in ("weak_prior", "paper") and not plain:
            raise ValueError(
                f"`k={k!r}` assumes the noise of the plain gradient, but got "
                f'`gradient={gradient!r}`. Use "matrix", "scalar" or "strong_prior".'
            )
        super().__init__(vars, gradient=gradient, **settings)

    def _design(self, setup: Setup) -> Design:
        posterior, batching = setup.posterior, setup.estimator.batching
        dimension = posterior.dimension
        if dimension > DENSE_DIMENSION:
            raise ValueError(
                f"`OSGFS` has dense matrices for at most {DENSE_DIMENSION} dimensions, but the "
                f"position has {dimension}. Use `SGLD` or `SGLDCV`."
            )
        # Chains do not begin at a centre that only the gradient or the curvature needs.
        at_center = self._start_at == "center"
        computes = at_center or self._curvature == "center"
        center = setup.center if computes else setup.known_center
        drift = setup.shared(np.eye(dimension), "drift")
        root = setup.shared(np.eye(dimension), "noise_root")
        curvature = self._curvature or _default_curvature(setup)
        test = self._convergence
        if test.window is not None:
            # The variance of the mean of a window is a sum over its lags, for each coordinate.
            check_memory("window", test.window, 8.0 * test.window * (dimension + 2))
        adaptation = FisherScoringAdaptation(
            posterior,
            batching,
            drift,
            root,
            self._noise_model(setup, center),
            precision=setup.center.curvature.precision.dense() if curvature == "center" else None,
            start=center.position if at_center and center is not None else None,
            k=self._k,
            max_k=largest_k(setup.bias),
            covariance_rows=self._covariance.rows,
            update_every=self._covariance.update_every,
            rule=test.rule,
            b=1.0 if test.b is None else test.b,
            window=test.window,
            mode=(setup.settings.compile_kwargs or {}).get("mode"),
        )
        matrices = state_matrices(adaptation.begin(posterior.initial_position))
        largest, smallest = 2 * matrices.fractions.max(), 2 * matrices.fractions.min()
        thin = setup.settings.thin or int(np.clip(np.ceil(2 / largest), 1, MOST_THINNING))
        log.info(
            "%s: k between %.3g and %.3g, %d transitions a draw, %d of %d rows a minibatch",
            setup.name,
            smallest,
            largest,
            thin,
            batching.batch_size,
            batching.n_rows,
        )
        self._warn_of_k(matrices, setup)
        self.scoring = adaptation
        return Design(
            FisherScoring(drift, root),
            Pace(1.0, thin),
            (adaptation,),
            begins_at_center=at_center,
            remedy="Try a smaller `k` or `bias`",
        )

    def _noise_model(self, setup: Setup, center: Center | None) -> NoiseModel:
        """The way in which V of the estimator is learned."""
        posterior, estimator = setup.posterior, setup.estimator
        batching = estimator.batching
        # V = (N²/n) c C.
        part = batching.variance_factor * posterior.n_rows / batching.batch_size
        scale = posterior.n_rows * part
        if estimator.name == "plain":
            return PlainNoise(scale)
        if center is None or not estimator.reduces_variance:
            return ResidualNoise(PlainNoise(scale))
        around_center = ControlVariateNoise(posterior, center, scale, setup.joint_draws)
        # An estimator with control variates that the user made has a centre of its own.
        by_hand = isinstance(setup.settings.estimator, GradientEstimator)
        known = estimator.name == "cv" and not by_hand
        return around_center if known else ResidualNoise(around_center)

    def _warn_of_k(self, matrices: ScoringMatrices, setup: Setup) -> None:
        fractions, noise = matrices.fractions, matrices.noise
        smallest, bound = 2 * fractions.min(), scalar_bound(noise)
        # Σ is positive semidefinite where in each direction d (1 + v) is at most 2.
        excess = float((fractions * (1 + noise)).max() / 2)
        if excess > 1 + BOUND_TOLERANCE:
            # The bounds of the paper assume a curvature of N C and the prior.
            origin = f" by `k={self._k!r}`" if isinstance(self._k, str) else ""
            warn(
                f"k = {2 * fractions.max():.3g}{origin} is above {bound:.3g}, beyond which "
                "gradient noise makes the chain too wide. Use "
                '`k="matrix"`, a smaller number, or a larger `batch_size`.',
                BatchSizeWarning,
            )
        elif isinstance(self._k, str) and smallest < SMALL_K:
            batching = setup.estimator.batching
            warn(
                f"The noise of a gradient from {batching.batch_size} of {batching.n_rows} rows "
                f"allows only k = {smallest:.3g}, so autocorrelation times are about "
                f"{4 / smallest:.0f} transitions. Use a larger `batch_size`, "
                f"{setup.estimator.remedy}.",
                BatchSizeWarning,
            )


def largest_k(bias: float) -> float:
    """Bound on k for a stated variance error, where the curvature is wrong by about a third."""
    relative = bias / CURVATURE_ERROR
    return min(2.0, 4 * relative / (1 + relative))


def _default_curvature(setup: Setup) -> str:
    """Curvature at the centre where it is known and does not change with other variables."""
    return "fisher" if setup.known_center is None or setup.posterior.others else "center"


# --- Settings -------------------------------------------------------------------------------


def _check_k(k: str | float) -> str | float:
    if isinstance(k, str):
        return one_of("k", k, CHOICES_OF_K, " or a number in (0, 4)")
    number = isinstance(k, int | float | np.number) and not isinstance(k, bool)
    if not number or not 0 < k < 4:
        raise ValueError(
            f"`k` should be a number in (0, 4), where the chain has a stationary law, or one of "
            f"{CHOICES_OF_K}, but got {k!r}."
        )
    return float(k)
