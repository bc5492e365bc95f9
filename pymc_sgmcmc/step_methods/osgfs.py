"""Optimized stochastic gradient Fisher scoring as a step method."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable

from pymc_sgmcmc.adaptation import Adaptation, AdaptationState, Seen
from pymc_sgmcmc.checks import one_of, or_none, positive_number, whole_number
from pymc_sgmcmc.convergence import (
    CONVERGENCE_RULES,
    chi_square_bound,
    elementwise_statistic,
    window_mean_variance,
)
from pymc_sgmcmc.dynamics.osgfs import (
    FisherScoring,
    ScoringMatrices,
    scalar_bound,
    scoring_matrices,
)
from pymc_sgmcmc.errors import BatchSizeWarning
from pymc_sgmcmc.gradient_estimators import GradientEstimator, PlainGradient
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.schedules import MOST_THINNING
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.documentation import documented
from pymc_sgmcmc.step_methods.settings import CenterSetting, Gradient, Settings
from pymc_sgmcmc.step_methods.setup import Design, Pace, Setup
from pymc_sgmcmc.tuning import (
    DENSE_DIMENSION,
    Center,
    laplace_pairs,
    prior_precision,
)

_log = logging.getLogger("pymc.sgmcmc")

CHOICES_OF_K = ("matrix", "scalar", "weak_prior", "strong_prior", "paper")
"""Names of the choices of k."""

CURVATURES = ("fisher", "center")
"""Where the curvature H is from."""

STARTS = ("center", "model")
"""Where the chain and its matrices begin."""

START_ROWS = 10_000
"""Rows for the first gradient covariance of a chain, and for that after convergence."""

START_POINTS = (100, 400)
"""Bounds on the points around the centre over which V is averaged before a chain begins,"""

START_ELEMENTS = 50_000_000
"""and rows times coordinates, at all of them together, up to which there are more."""

FEWEST_ROWS = 500
"""Rows for a later one, at least; and at least 20 for each dimension."""

ROWS_TO_TRUST = 10
"""Rows a dimension from which a covariance of gradients is taken as it is."""

MEMORY = 10
"""Updates over which the covariance is averaged before convergence."""

FEWEST_TRANSITIONS = 1000
"""Transitions between two updates, at least."""

SHORTEST_WINDOW, LONGEST_WINDOW = 50, 10_000
"""Bounds on the default number of gradients in a window of the convergence statistic."""

CURVATURE_ERROR = 0.35
"""Relative error of the curvature, over the posterior, that the default bound on k supposes."""

BOUND_TOLERANCE = 0.05
"""Relative excess over the bound on k that the error of V from 10 000 rows explains."""

SMALL_K = 0.02
"""k below which the chain is worth a warning: autocorrelation times of over 200 transitions."""


@documented
class OSGFS(StochasticGradientStep):
    r"""Optimized stochastic gradient Fisher scoring.

    .. math:: \theta' = \theta + D \hat\nabla(\theta) + N(0, \Sigma), \qquad
              \Sigma = 2D - D (H + V) D

    with H the curvature of the negative log posterior and V the covariance of the gradient
    estimate, which is learned from the gradients of single rows (El hanchi 2018, eq. 8 and
    algorithm 1). The gradient's own noise takes the place of injected noise, and the step is
    as large as that allows. Meant for near-Gaussian posteriors.

    **Law.** On a Gaussian posterior exactly the posterior, at any k, where H and V are known.
    A relative error e of H changes the variance by about :math:`-e\, (k/4) / (1 - k/4)`, and so
    does a curvature that varies over the posterior: hence `max_k`. An error of V changes it by
    up to as much.

    **Covariance of the gradient.** With C the covariance over rows of a row's gradient,
    :math:`V = \tfrac{N^2}{n} c\, C` with the factor c of the minibatch scheme. Every
    `update_every` transitions C is computed anew from some rows at the present position and
    averaged, :math:`C \leftarrow (1 - \tfrac1i) C + \tfrac1i \mathrm{cov}`; before convergence
    over the last 10 times only, so that C forgets where the chain came from. For
    ``gradient="cv"`` V is from the covariance of the *differences* to the centre. For other
    estimators V is the covariance of :math:`\hat\nabla + H \theta` over the last transitions.
    While there are fewer than 10 rows a dimension, C is shrunk towards its diagonal by the part
    d / (d + rows).

    **Curvature.** In the paper :math:`H \approx NC + G`, G the curvature of the negative log prior:
    Fisher's identity. It needs no centre, and with `start="model"` no pass over the data, but
    holds only where the likelihood is well specified. On the Skin Segmentation data NC is
    0.4 to 5 times the curvature, which at k = 0.5 makes the covariance wrong by 20 %; so the
    curvature of the centre is used where there is one.

    **Convergence.** The mean of each window of gradients, 50 of them by default where k is at
    least 0.02, is compared with its variance at stationarity. The first window that passes sets
    ``converged``, and C is computed anew. See `pymc_sgmcmc.convergence`.

    **Departures from the paper.** Its algorithm cites (7), whose covariance is too large by
    1/(1 - k/4); (8) is used. The chain is stable for k in (0, 4), not (0, 1). V has the
    factor c, without which sampling without replacement loses half of the variance at n = N/2.
    The prior counts once, not N times. k may differ between directions.

    **Cost.** One gradient of n rows and a d × d product a transition, as for `SGLD` with a dense
    preconditioner, and about 2 ms every 1000 transitions for the updates at d = 10. Dimensions
    up to 500.

    Parameters
    ----------
    k : {"matrix", "scalar", "weak_prior", "strong_prior", "paper"} or float, optional
        Twice the part of the way to the mode that one transition goes, k in (0, 4); at k = 2
        draws from a Gaussian are independent.
        "matrix" (default): in each direction in which H and V are both diagonal the largest k
        for which Σ is positive semidefinite, :math:`k_j = \min(c, 4 / (1 + v_j))`.
        "scalar": the same k in all, :math:`\min(c, 4 / (1 + \max_j v_j))`, D = (k/2) H⁻¹.
        The paper's bounds: "weak_prior", its (13), 4 / (1 + cN/n); "strong_prior", its (15);
        "paper", its (16), the larger of the two. (15) is sufficient for Σ to be positive
        semidefinite; (13), and so (16), only where H = NC + G, which holds where the likelihood is
        well specified. Elsewhere the chain may be too wide. A number is taken as it is.
    max_k : float, optional
        Bound on k, in (0, 2]; c in (16), where the paper takes 0.1. Default: :math:`4x / (1 + x)`
        with x = `bias` / 0.35: 0.5 for the default bias of 5 %, which a curvature that is wrong by
        35 % keeps.
    curvature : {"center", "fisher"}, optional
        H: the curvature of the log posterior at the centre, fixed, or NC + G, which is right for
        well specified likelihoods only. Default: "center" where a centre is computed and the
        step method has all variables, otherwise "fisher".
    start : {"center", "model"}
        Begin at the centre, with H and V from there, or, as in the paper, at the model's
        initial point without a search for the mode. Initial values of the user have precedence.
    covariance_rows : int, optional
        Rows from which C is computed each time. Default: n, but between 500 (and 20 d) and
        10 000; not more than N.
    update_every : int, optional
        Transitions between two updates of C. Default: 1000, or more where computing C is costly.
    convergence_rule : {"chi2", "elementwise"}
        "chi2": :math:`\bar Y^\top \mathrm{Var}(\bar Y)^{-1} \bar Y \le \chi^2_{d, 0.95}`;
        "elementwise": the paper's (17), :math:`|\bar Y_i| \le b \sqrt{(H + V)_{ii} / n_w}` for all
        i, which in many dimensions hardly ever passes.
    b : float, optional
        Of the elementwise rule, in (0, 2]; default 1.
    window : int, optional
        Gradients in a window, :math:`n_w`. Default: 1/k, as the paper suggests, with k of the
        slowest direction, but at least 50 (so 50 for each k from 0.02 on) and at most 10 000.
    thin : int, optional
        Transitions a recorded draw. Default: one relaxation time of the fastest direction.

    Raises
    ------
    ModelError
        Where the model's rows cannot be told apart.
    ValueError, TypeError
        For invalid settings; each message says what was given and what should be.

    Warns
    -----
    BatchSizeWarning
        Where k is below 0.02, or where k, given or by one of the paper's bounds, is above the
        exact one, so that Σ is not positive semidefinite and the chain too wide.

    Notes
    -----
    Beside what `SGLD` records, `sample_stats` has for each draw ``converged``; the last
    ``convergence_statistic``, which is relative to its bound (passed where at most 1), infinite
    before the end of the first window; and ``k``, that of the slowest direction:
    autocorrelation times are about 4/k transitions. ``step_size`` is 1.

    References
    ----------
    A. El hanchi (2018). Stochastic gradient MCMC algorithms and their applications.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> rng = np.random.default_rng(1)
    >>> x = rng.normal(size=1000)
    >>> with pm.Model():
    ...     slope = pm.Normal("slope", 0, 10)
    ...     _ = pm.Normal("y", slope * x, 1.0, observed=2 * x + rng.normal(size=1000))
    ...     step = OSGFS(batch_size=200, compile_kwargs={"mode": "FAST_COMPILE"})
    ...     idata = pm.sample(
    ...         step=step,
    ...         draws=200,
    ...         tune=50,
    ...         chains=1,
    ...         random_seed=1,
    ...         progressbar=False,
    ...         quiet=True,
    ...     )
    >>> bool(idata.sample_stats["converged"].all())
    True
    >>> bool(abs(idata.posterior["slope"].mean() - 2) < 0.1)
    True
    """

    name = "osgfs"
    _keeps_rows = False
    _refused: ClassVar = {
        "step_size": "computes its steps and has no `step_size`. Set `k` or `max_k`.",
    }

    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        k: str | float = "matrix",
        max_k: float | None = None,
        curvature: str | None = None,
        start: str = "center",
        covariance_rows: int | None = None,
        update_every: int | None = None,
        convergence_rule: str = "chi2",
        b: float | None = None,
        window: int | None = None,
        bias: float | None = None,
        gradient: Gradient = "plain",
        batch_size: int | None = None,
        batching: str | None = None,
        rows: str | Sequence[str] | None = None,
        center: CenterSetting = None,
        init: Any = None,
        thin: int | None = None,
        tune_method: str = "closed_form",
        model: Model | None = None,
        initial_point: Mapping[str, np.ndarray] | None = None,
        compile_kwargs: Mapping[str, Any] | None = None,
        blocked: bool = True,
        rng: Any = None,
    ):
        self._k = _check_k(k)
        self._max_k = or_none(positive_number, "max_k", max_k, most=2.0)
        if bias is not None and (max_k is not None or not isinstance(k, str)):
            given = f"max_k={max_k!r}" if max_k is not None else f"k={k!r}"
            raise ValueError(
                "`bias` is the accuracy from which the largest k is computed, but got both "
                f"bias={bias!r} and {given}. Leave one of them out."
            )
        self._curvature = curvature and one_of("curvature", curvature, CURVATURES)
        self._start_at = one_of("start", start, STARTS)
        self._covariance_rows = or_none(whole_number, "covariance_rows", covariance_rows, 2)
        self._update_every = or_none(whole_number, "update_every", update_every, 1)
        self._rule = one_of("convergence_rule", convergence_rule, CONVERGENCE_RULES)
        self._window = or_none(whole_number, "window", window, 1)
        if b is not None and convergence_rule != "elementwise":
            raise ValueError(
                f'`b` belongs to `convergence_rule="elementwise"`, but got b={b!r} with '
                f"{convergence_rule!r}."
            )
        self._b = positive_number("b", 1.0 if b is None else b, most=2.0)
        self._named_gradient = isinstance(gradient, str)
        plain = gradient == "plain" or isinstance(gradient, PlainGradient)
        if self._k in ("weak_prior", "paper") and not plain:
            raise ValueError(
                f"`k={k!r}` supposes the noise of the plain gradient, but got "
                f'`gradient={gradient!r}`. Use "matrix", "scalar" or "strong_prior".'
            )
        super().__init__(Settings.of(locals(), step_size=None))

    def _design(self, setup: Setup) -> Design:
        posterior, batching = setup.posterior, setup.estimator.batching
        dimension = posterior.dimension
        if dimension > DENSE_DIMENSION:
            raise ValueError(
                f"`OSGFS` keeps {dimension} × {dimension} matrices; it is meant for at most "
                f"{DENSE_DIMENSION} unconstrained parameters. Use `SGLD` or `SGLDCV`."
            )
        # A centre that only the gradient or the curvature needs is not where chains begin.
        at_center = self._start_at == "center"
        computes = at_center or self._curvature == "center"
        center = setup.center if computes else setup.known_center
        drift = setup.shared(np.eye(dimension), "drift")
        root = setup.shared(np.eye(dimension), "noise_root")
        adaptation = ScoringAdaptation(
            posterior,
            setup.estimator,
            drift,
            root,
            center=center,
            at_center=at_center,
            known_center=self._named_gradient,
            joint_draws=setup.joint_draws,
            k=self._k,
            max_k=largest_k(setup.bias) if self._max_k is None else self._max_k,
            curvature=self._curvature or _default_curvature(setup),
            covariance_rows=self._covariance_rows,
            update_every=self._update_every,
            rule=self._rule,
            b=self._b,
            window=self._window,
        )
        matrices = _matrices(adaptation.begin(posterior.initial_position))
        largest, smallest = 2 * matrices.fractions.max(), 2 * matrices.fractions.min()
        thin = setup.settings.thin or int(np.clip(np.ceil(2 / largest), 1, MOST_THINNING))
        _log.info(
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
            remedy="Try a smaller `k` or `max_k`",
        )

    def _warn_of_k(self, matrices: ScoringMatrices, setup: Setup) -> None:
        fractions, noise = matrices.fractions, matrices.noise
        smallest, bound = 2 * fractions.min(), scalar_bound(noise)
        # Σ is positive semidefinite where in each direction d (1 + v) is at most 2.
        excess = float((fractions * (1 + noise)).max() / 2)
        if excess > 1 + BOUND_TOLERANCE:
            where_from = ""
            if isinstance(self._k, str):
                where_from = (
                    f" by `k={self._k!r}`, which supposes a curvature of N C and the prior,"
                )
            warnings.warn(
                f"k = {2 * fractions.max():.3g}{where_from} is above {bound:.3g}, beyond which "
                "the gradient has more noise than the chain should: it will be too wide. Use "
                '`k="matrix"`, a smaller number, or a larger `batch_size`.',
                BatchSizeWarning,
                stacklevel=4,
            )
        elif isinstance(self._k, str) and smallest < SMALL_K:
            batching = setup.estimator.batching
            remedy = "" if setup.estimator.reduces_variance else ' or `gradient="cv"`'
            warnings.warn(
                f"The noise of a gradient from {batching.batch_size} of {batching.n_rows} rows "
                f"allows only k = {smallest:.3g}: autocorrelation times of about "
                f"{4 / smallest:.0f} transitions. Use a larger `batch_size`{remedy}.",
                BatchSizeWarning,
                stacklevel=4,
            )


def largest_k(bias: float) -> float:
    """Bound on k for a stated variance error, where the curvature is wrong by about a third."""
    relative = bias / CURVATURE_ERROR
    return min(2.0, 4 * relative / (1 + relative))


class ScoringAdaptation(Adaptation):
    """Keeps the covariance of the gradient, D and Σ of a chain, and tests its convergence.

    Parameters
    ----------
    posterior, estimator
    drift, root : SharedVariable, shape (d, d)
        D and S of the compiled transitions.
    center : Center or None
    at_center : bool
        Whether a chain begins with the matrices of the centre, or with those of its position.
    known_center : bool
        Whether the centre is that of the gradient's control variate.
    joint_draws : list of mappings or None
        As in `Setup`.
    k, max_k, curvature, covariance_rows, update_every, rule, b, window
        As in `OSGFS`.
    """

    def __init__(
        self,
        posterior: Posterior,
        estimator: GradientEstimator,
        drift: SharedVariable,
        root: SharedVariable,
        *,
        center: Center | None,
        at_center: bool,
        known_center: bool,
        joint_draws: Sequence[Mapping[str, np.ndarray]] | None,
        k: str | float,
        max_k: float,
        curvature: str,
        covariance_rows: int | None,
        update_every: int | None,
        rule: str,
        b: float,
        window: int | None,
    ):
        batching = estimator.batching
        dimension, n_rows = posterior.dimension, posterior.n_rows
        self.stats = {"converged": bool, "convergence_statistic": np.float64, "k": np.float64}
        self._posterior, self._drift, self._root = posterior, drift, root
        self._k, self._max_k, self._rule, self._b, self._window = k, max_k, rule, b, window
        self._reduces_variance = estimator.reduces_variance
        self._without_replacement = batching.without_replacement
        # V = (N²/n) c C and, for the paper's bounds, V = (cN/n) NC.
        self._noise_ratio = batching.variance_factor * n_rows / batching.batch_size
        self._noise_scale = n_rows * self._noise_ratio
        self._center = center
        self._center_of_others = self._others()
        if estimator.name == "plain":
            self._kind = "rows"
        elif estimator.name == "cv" and known_center and center is not None:
            self._kind = "differences"
        else:
            self._kind = "residuals"
        self._precision = None
        if curvature == "center":
            assert center is not None
            self._precision = center.curvature.precision
        fewest = max(20 * dimension, FEWEST_ROWS)
        rows = covariance_rows or int(np.clip(batching.batch_size, fewest, max(fewest, START_ROWS)))
        self._rows = min(rows, n_rows)
        self._start_rows = min(max(self._rows, START_ROWS), n_rows)
        # An update costs r (3·4d + d²) operations for C and about 30 d³ for W, a transition
        # about 4nd: this many transitions cost ten times as much.
        operations = self._rows * (12 + dimension) + 30 * dimension**2
        amortised = 10 * operations / (4 * batching.batch_size)
        self.transitions = update_every or int(
            np.clip(amortised, FEWEST_TRANSITIONS, 10 * FEWEST_TRANSITIONS)
        )
        self._start_noise = self._noise_at_center(joint_draws)
        self._at_start = self._start(center.position) if at_center and center is not None else None

    # --- What the base class asks for --------------------------------------------------------

    def begin(self, position: np.ndarray) -> AdaptationState:
        """State with the matrices of the centre, or of the rows at the first position."""
        return self._start(position) if self._at_start is None else self._at_start

    def load(self, state: AdaptationState) -> None:
        """Set D and S."""
        matrices = _matrices(state)
        self._drift.set_value(matrices.drift.astype(self._posterior.dtype))
        self._root.set_value(matrices.root.astype(self._posterior.dtype))

    def update(
        self, state: AdaptationState, seen: Seen
    ) -> tuple[AdaptationState, dict[str, np.ndarray]]:
        """Add to the window of gradients; at a boundary, compute C and the matrices anew."""
        k = 2 * state["fractions"].min()
        state, converged, statistics = self._follow_windows(state, seen.gradients)
        if self._kind == "residuals":
            state = {
                **state,
                "recent_positions": np.concatenate([state["recent_positions"], seen.positions]),
                "recent_gradients": np.concatenate([state["recent_gradients"], seen.gradients]),
            }
        if seen.at_boundary:
            state = self._learn(state, seen)
        last = slice(seen.thin - 1, None, seen.thin)
        recorded = converged[last]
        return state, {
            "converged": recorded,
            "convergence_statistic": statistics[last],
            "k": np.full(len(recorded), k),
        }

    # --- Convergence -------------------------------------------------------------------------

    def _follow_windows(
        self, state: AdaptationState, gradients: np.ndarray
    ) -> tuple[AdaptationState, np.ndarray, np.ndarray]:
        """State after some gradients; the flag and the last statistic after each of them."""
        total, count = state["window_sum"], int(state["window_count"])
        length = int(state["window_length"])
        flag, statistic = bool(state["converged"]), float(state["statistic"])
        flags = np.empty(len(gradients), dtype=bool)
        statistics = np.empty(len(gradients))
        start = 0
        while start < len(gradients):
            end = min(start + max(1, length - count), len(gradients))
            # One after the other: the sum must not depend on where a run of draws ends.
            total = np.cumsum(np.vstack([total, gradients[start:end]]), axis=0)[-1]
            count += end - start
            flags[start : end - 1], statistics[start : end - 1] = flag, statistic
            if count >= length:
                statistic = self._statistic(state, total / count, count)
                flag = flag or statistic <= 1
                total, count = np.zeros_like(total), 0
            flags[end - 1], statistics[end - 1] = flag, statistic
            start = end
        followed = {
            **state,
            "window_sum": total,
            "window_count": np.asarray(count),
            "converged": np.asarray(flag),
            "statistic": np.asarray(statistic),
        }
        return followed, flags, statistics

    def _statistic(self, state: AdaptationState, mean: np.ndarray, count: int) -> float:
        """Statistic of a window relative to its bound."""
        if self._rule == "elementwise":
            return elementwise_statistic(mean, state["gradient_variances"], count) / self._b
        variance = state["window_variance"]
        if count != state["window_length"]:
            variance = window_mean_variance(state["noise"], state["fractions"], count)
        coordinates = state["basis"].T @ mean
        return float(np.sum(coordinates**2 / variance)) / chi_square_bound(len(mean))

    # --- Covariance of the gradient ----------------------------------------------------------

    def _start(self, position: np.ndarray) -> AdaptationState:
        """State of a chain whose matrices are from rows at a position."""
        dimension = self._posterior.dimension
        state: AdaptationState = {
            "updates": np.asarray(0),
            "converged": np.asarray(False),
            "reset": np.asarray(False),
            "statistic": np.asarray(np.inf),
            "window_sum": np.zeros(dimension),
            "window_count": np.asarray(0),
            "recent_positions": np.empty((0, dimension)),
            "recent_gradients": np.empty((0, dimension)),
        }
        return self._restart(state, position, np.empty(0, dtype=np.int64), self._start_rows)

    def _restart(
        self, state: AdaptationState, position: np.ndarray, next_rows: np.ndarray, count: int
    ) -> AdaptationState:
        """State with averages that begin at a position."""
        covariance, _, used = self._measure(position, next_rows, count, int(state["updates"]))
        noise, noise_weight = self._start_noise
        if noise is None:
            noise = self._noise_scale * _shrunk(covariance, used)
        state = {
            **state,
            "row_covariance": covariance,
            "prior_precision": self._prior_precision(position, covariance),
            "rows": np.asarray(float(used)),
            "noise_covariance": noise,
            "noise_weight": np.asarray(float(noise_weight)),
        }
        return self._choose(state)

    def _learn(self, state: AdaptationState, seen: Seen) -> AdaptationState:
        """State after an update at a boundary."""
        position = np.asarray(seen.positions[-1], dtype=float)
        state = {**state, "updates": state["updates"] + 1}
        if state["converged"] and not state["reset"]:
            # What C is from so far may lie far from the posterior.
            state = {**state, "reset": np.asarray(True)}
            state = self._restart(state, position, seen.next_rows, self._start_rows)
            if self._kind != "residuals":
                return state
        # The last MEMORY updates before convergence, all of them afterwards.
        least = 0.0 if state["converged"] else 1 / MEMORY
        if self._kind == "rows" or self._precision is None:
            covariance, noise, used = self._measure(
                position, seen.next_rows, self._rows, int(state["updates"])
            )
            rows = float(state["rows"])
            weight = max(used / (rows + used), least)
            prior_precision = self._prior_precision(position, covariance)
            state = {
                **state,
                "row_covariance": _mix(state["row_covariance"], covariance, weight),
                "prior_precision": _mix(state["prior_precision"], prior_precision, weight),
                "rows": np.asarray(used / weight),
            }
        else:
            _, noise, _ = self._measure(position, seen.next_rows, self._rows, int(state["updates"]))
        if self._kind == "residuals":
            noise = self._residual_noise(state)
            state = {
                **state,
                "recent_positions": np.empty((0, len(position))),
                "recent_gradients": np.empty((0, len(position))),
            }
        if noise is not None:
            weight = max(1 / (float(state["noise_weight"]) + 1), least)
            state = {
                **state,
                "noise_covariance": _mix(state["noise_covariance"], noise, weight),
                "noise_weight": np.asarray(1 / weight),
            }
        return self._choose(state)

    def _choose(self, state: AdaptationState) -> AdaptationState:
        """State with the matrices, and the window, that its averages ask for."""
        covariance = _shrunk(state["row_covariance"], float(state["rows"]))
        precision = self._precision
        if precision is None:
            precision = self._posterior.n_rows * covariance + state["prior_precision"]
        noise = state["noise_covariance"]
        if self._kind == "rows":
            noise = self._noise_scale * covariance
        matrices = scoring_matrices(precision, noise, self._k, self._max_k, self._noise_ratio)
        smallest = 2 * matrices.fractions.min()
        length = self._window or int(
            np.clip(np.ceil(1 / smallest), SHORTEST_WINDOW, LONGEST_WINDOW)
        )
        return {
            **state,
            "basis": matrices.basis,
            "noise": matrices.noise,
            "fractions": matrices.fractions,
            "gradient_variances": matrices.gradient_variances,
            "window_length": np.asarray(length),
            "window_variance": window_mean_variance(matrices.noise, matrices.fractions, length),
        }

    def _measure(
        self, position: np.ndarray, next_rows: np.ndarray, count: int, updates: int
    ) -> tuple[np.ndarray, np.ndarray | None, int]:
        """C, for control variates also V, from some rows at a position; how many rows."""
        if count >= self._posterior.n_rows:
            numbers = np.arange(self._posterior.n_rows)
            distinct = True
        elif count <= len(next_rows):
            numbers, distinct = next_rows[:count], self._without_replacement
        else:
            rng = np.random.default_rng([1959, updates, *next_rows[:4]])
            numbers = rng.choice(self._posterior.n_rows, size=count, replace=False)
            distinct = True
        rows = self._posterior.take(numbers)
        gradients = self._posterior.row_gradients(position, rows)
        covariance = row_covariance(gradients, self._posterior.n_rows, distinct=distinct)
        if self._kind != "differences":
            return covariance, None, len(numbers)
        differences = gradients - self._gradients_at_center(rows)
        noise = row_covariance(differences, self._posterior.n_rows, distinct=distinct)
        return covariance, self._noise_scale * _shrunk(noise, len(numbers)), len(numbers)

    def _gradients_at_center(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Gradients of single rows at the centre, other variables at theirs."""
        assert self._center is not None
        present = self._others()
        self._posterior.set_others(self._center_of_others)
        gradients = self._posterior.row_gradients(self._center.position, rows)
        self._posterior.set_others(present)
        return gradients

    def _noise_at_center(
        self, joint_draws: Sequence[Mapping[str, np.ndarray]] | None
    ) -> tuple[np.ndarray | None, float]:
        """V to begin with, averaged over the Laplace approximation, and its weight in updates.

        None where that of the plain gradient serves. With control variates V is about quadratic in
        the distance from the centre: K random points would leave an error of sqrt(2 / K) of it.
        """
        if self._center is None or self._kind == "rows" or not self._reduces_variance:
            return None, 0.0
        dimension = self._posterior.dimension
        rows = min(max(FEWEST_ROWS, ROWS_TO_TRUST * dimension), self._posterior.n_rows)
        count = int(np.clip(START_ELEMENTS // (rows * dimension), *START_POINTS))
        points = joint_draws[:count] if joint_draws else None
        points = points or laplace_pairs(self._posterior, self._center, count)
        present, kind = self._others(), self._kind
        self._kind = "differences"
        total = np.zeros((self._posterior.dimension,) * 2)
        for number, point in enumerate(points):
            self._posterior.set_others({**present, **point})
            position = self._posterior.layout.ravel(point)
            _, noise, _ = self._measure(position, np.empty(0, dtype=np.int64), rows, number)
            assert noise is not None
            total += noise
        self._posterior.set_others(present)
        self._kind = kind
        # What the transitions show of an estimator without formula replaces the guess.
        return total / len(points), len(points) if kind == "differences" else 0.0

    def _residual_noise(self, state: AdaptationState) -> np.ndarray:
        r"""V of any estimator: covariance of :math:`\hat\nabla + H\theta` over transitions."""
        inverse = np.linalg.inv(state["basis"])
        positions = state["recent_positions"] - state["recent_positions"].mean(0)
        residuals = state["recent_gradients"] + positions @ (inverse.T @ inverse)
        return _shrunk(np.atleast_2d(np.cov(residuals.T)), len(residuals))

    def _prior_precision(self, position: np.ndarray, covariance: np.ndarray) -> np.ndarray:
        """G, the curvature of the negative log prior; zero where H is known without it."""
        if self._precision is not None:
            return np.zeros_like(covariance)
        information = self._posterior.n_rows * np.diag(covariance)
        return prior_precision(self._posterior, position, information)

    def _others(self) -> dict[str, np.ndarray]:
        return {name: np.array(value.get_value()) for name, value in self._posterior.others.items()}


def row_covariance(gradients: np.ndarray, n_rows: int, *, distinct: bool) -> np.ndarray:
    """Unbiased estimate of C, the covariance with divisor N over all N rows.

    Parameters
    ----------
    gradients : numpy.ndarray, shape (rows, d)
        Gradients of single rows, a random sample of all N.
    n_rows : int
        N.
    distinct : bool
        Whether the sample is without replacement.
    """
    if len(gradients) < 2:
        return np.zeros((gradients.shape[1],) * 2)
    gradients = np.asarray(gradients, dtype=float)
    centred = gradients - gradients.mean(0)
    covariance = centred.T @ centred / (len(gradients) - 1)
    return covariance * (n_rows - 1) / n_rows if distinct else covariance


def _shrunk(covariance: np.ndarray, rows: float) -> np.ndarray:
    """Covariance from few rows, linearly shrunk towards its diagonal."""
    dimension = len(covariance)
    if rows >= ROWS_TO_TRUST * dimension:
        return covariance
    weight = dimension / (dimension + rows)
    return (1 - weight) * covariance + weight * np.diag(np.diag(covariance))


def _default_curvature(setup: Setup) -> str:
    """The centre's where it is known and does not change with other variables."""
    return "fisher" if setup.known_center is None or setup.posterior.others else "center"


def _mix(old: np.ndarray, new: np.ndarray, weight: float) -> np.ndarray:
    return (1 - weight) * old + weight * new


def _matrices(state: AdaptationState) -> ScoringMatrices:
    return ScoringMatrices(state["basis"], state["noise"], state["fractions"])


# --- Settings -------------------------------------------------------------------------------


def _check_k(k: str | float) -> str | float:
    if isinstance(k, str):
        return one_of("k", k, CHOICES_OF_K, " or a number in (0, 4)")
    number = isinstance(k, int | float | np.number) and not isinstance(k, bool)
    if not number or not 0 < k < 4:
        raise ValueError(
            f"`k` should be a number in (0, 4), outside of which the chain has no stationary law, "
            f"or one of {CHOICES_OF_K}, but got {k!r}."
        )
    return float(k)
