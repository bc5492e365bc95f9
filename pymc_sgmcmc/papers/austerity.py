"""Austerity Metropolis-Hastings: random walks whose decisions read only some rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
from pymc.step_methods.compound import StepMethodState
from pymc.step_methods.state import dataclass_state
from rich.progress import TextColumn
from rich.table import Column

from pymc_sgmcmc.batching import check_batch_size
from pymc_sgmcmc.checks import positive_number
from pymc_sgmcmc.dynamics.austerity import Decision, sequential_test
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.schedules import check_step_size
from pymc_sgmcmc.sources import RowSource
from pymc_sgmcmc.step_methods.contract import StepMethod
from pymc_sgmcmc.step_methods.settings import ModelSettings, Preconditioner, Settings
from pymc_sgmcmc.step_methods.setup import Kind, Setup

OPTIMAL_SCALE = 2.38
"""Proposals with this many posterior standard deviations by the root of d are optimal in high
dimension (Roberts, Gelman and Gilks 1997)."""

FEWEST_ROWS = 500
"""The default number of rows in a batch, that of the paper. The mean of so many differences is
close to normal unless a few rows have most of their variance."""

MOST_ERROR = 0.5
"""An error of a half would stop each test after its first batch, whatever it says."""


@dataclass_state
class AusterityState(StepMethodState):
    """State from which a chain goes on with the same draws."""

    begun: bool


class AusterityMH(StepMethod):
    r"""Random-walk Metropolis-Hastings whose decision reads as few rows as it needs.

    .. math::
        \theta^* &= \theta + N(0, h M), \qquad u \sim U(0, 1) \\
        \mu_0 &= \frac1N \log\left[u\, \frac{p(\theta)}{p(\theta^*)}\right], \qquad
        \mu = \frac1N \sum_{i=1}^N l_i, \qquad
        l_i = \log \frac{p(x_i \mid \theta^*)}{p(x_i \mid \theta)} \\
        \theta' &= \theta^* \text{ where } \mu > \mu_0, \quad \theta \text{ otherwise}

    Whether :math:`\mu > \mu_0` is tested on batches of rows that are drawn without replacement
    (Korattikara, Chen and Welling 2014, algorithm 1). With the mean :math:`\bar l` and standard
    deviation :math:`s_l` of the n rows read so far, the test stops where

    .. math:: 1 - F_{n-1}\left(\frac{|\bar l - \mu_0|}{s}\right) < \epsilon, \qquad
              s = \frac{s_l}{\sqrt n} \sqrt{1 - \frac{n-1}{N-1}},

    with F the distribution function of Student's t, or where all rows were read.

    **Law.** At ``error=0`` each decision reads all rows, and the law is the posterior. Otherwise a
    decision is wrong with a probability of at most ε at each look (after each batch), as far as the
    mean of a batch is normal, and so of at most ε (N/n - 1) in all. It is near that bound only
    where :math:`\mu` is close to :math:`\mu_0`, where the decision matters least. The chain is
    biased, and no diagnostic here measures by how much: check ε by a run with a smaller one. On a
    logistic regression with 10 000 rows and 3 coefficients (n = 500) the standard deviations were
    too large by 2 % ± 2 at ε = 0.001, by 6 % at 0.01, by 27 % at 0.05, and by 87 % at 0.2, where
    8300, 6800, 4500 and 1500 rows were read.

    **Where it fails.** Rows with few large differences, as those of rare predictors, are missed by
    most batches, whose means are then not normal, and the test stops too early and is wrong more
    often than ε. A larger `batch_size` helps.

    **Cost.** The number of rows read is random, so a transition is not compiled but runs in Python:
    about 0.25 milliseconds for each batch of 500 rows, which are gathered from all over the data.
    Proposals as wide as the posterior take a part of the rows that hardly depends on N, since the
    sum of the differences and its noise are then of order one. So austerity saves a factor, not an
    order, and none where all rows together take less time than the batches (0.5 milliseconds for
    10 000 rows of three columns). In d dimensions a random walk needs about d times as many
    transitions as there are independent draws. Samplers with gradients are faster in all but a few
    dimensions.

    Parameters
    ----------
    error : float
        :math:`\epsilon`, in [0, 0.5). The default is 0.001.
    batch_size : int, optional
        Rows read at first, and added each time. Default: 500, or all rows where there are fewer.
    step_size : float, optional
        The variance h of proposals in units of M. Default: :math:`2.38^2 / d`, which is optimal for
        M the covariance of a Gaussian posterior.
    preconditioner : {"curvature", "identity"}, float, (d,) or (d, d) array, optional
        The matrix M, symmetric positive definite. Default: "curvature", the inverse curvature at
        the centre. It is needed where `step_size` is given.

    Raises
    ------
    TypeError, ValueError
        For invalid settings.
    ModelError
        Where the rows of the model cannot be separated.

    Notes
    -----
    `sample_stats` has for each draw whether it was ``accepted``, the number of ``rows_read``, and
    ``decision_error``, the estimated probability that all rows would have decided otherwise.

    References
    ----------
    A. Korattikara, Y. Chen and M. Welling (2014). Austerity in MCMC land: cutting the
    Metropolis-Hastings budget. *ICML*.

    G. O. Roberts, A. Gelman and W. R. Gilks (1997). Weak convergence and optimal scaling of random
    walk Metropolis algorithms. *Annals of Applied Probability* 7, 110-120.

    Examples
    --------
    >>> step = AusterityMH(error=0.05)
    >>> bool(idata.sample_stats["rows_read"].mean() < 1000)
    True
    """

    name = "austerity_mh"
    _state_class = AusterityState
    stats_dtypes_shapes: dict[str, tuple[Any, Any]] = {  # noqa: RUF012  # as PyMC declares it
        "accepted": (np.float64, []),
        "rows_read": (np.int64, []),
        "decision_error": (np.float64, []),
    }

    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        error: float = 0.001,
        preconditioner: Preconditioner = None,
        step_size: float | None = None,
        batch_size: int | None = None,
        **settings: Unpack[ModelSettings],
    ):
        self.error = _check_error(error)
        if callable(step_size):
            raise TypeError(
                f"`step_size` should be one number for `AusterityMH`, but got {step_size!r}."
            )
        if isinstance(settings.get("rows"), RowSource):
            raise ValueError(
                "`AusterityMH` reads random rows in each transition, but `rows` are in a source. "
                "Use `SGLDCV`."
            )
        common = Settings(
            vars=vars,
            preconditioner=preconditioner,
            step_size=step_size,
            batch_size=batch_size,
            **settings,
        )
        kind = Kind(takes_all_rows=True, is_exact=self.error == 0, is_metropolis=True)
        setup = Setup(type(self).__name__, common, kind)
        self.posterior = posterior = setup.posterior
        if not posterior.has_rows:
            raise ModelError(
                "The model has no observed variable with rows, and so none to read. Use "
                "`pm.Metropolis`."
            )
        self.vars = list(posterior.layout.variables)
        self.batch_size = check_batch_size(
            min(FEWEST_ROWS, posterior.n_rows) if batch_size is None else batch_size,
            posterior.n_rows,
        )
        _, self._root = setup.preconditioner()
        if step_size is None:
            step_size = OPTIMAL_SCALE**2 / posterior.dimension
        self.step_size = float(check_step_size(step_size))  # type: ignore[arg-type]
        self.center = setup.known_center
        self._initial_position = posterior.initial_position
        self.setup_chain(np.random.default_rng(), 0, 0)

    def setup_chain(self, rng: Any, tune: int, draws: int) -> None:
        """Begin a chain.

        Raises
        ------
        ModelError
            Where data or the variables of the model have changed.
        """
        posterior = self.posterior
        self._refuse_changed_model(posterior.changed_model(), posterior.changed_data())
        super().setup_chain(rng, tune, draws)
        self.begun = False

    def step(self, point: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list]:
        """One proposal and its decision."""
        posterior = self.posterior
        posterior.set_others(point)
        here = posterior.layout.ravel(point).astype(float)
        if not self.begun:
            here = self._start(here)
        noise = self._root @ self.rng.standard_normal(len(here))
        there = here + np.sqrt(self.step_size) * noise
        decision = self._decide(here, there)
        stats = {
            "accepted": float(decision.accepted),
            "rows_read": decision.rows_read,
            "decision_error": decision.error,
        }
        moved = there if decision.accepted else here
        return {**point, **posterior.layout.unravel(moved.astype(posterior.dtype))}, [stats]

    def _decide(self, here: np.ndarray, there: np.ndarray) -> Decision:
        posterior, n_rows = self.posterior, self.posterior.n_rows
        log_uniform = -self.rng.standard_exponential()
        prior_here, prior_there = (posterior.log_prior_and_gradient(at)[0] for at in (here, there))
        threshold = (log_uniform + prior_here - prior_there) / n_rows
        if not threshold < np.inf:  # The proposal is outside of the support.
            return Decision(False, 0, 0.0)

        def differences(rows: np.ndarray) -> np.ndarray:
            # All rows are read in their order, without a copy of the data.
            pieces = posterior.chunks() if len(rows) == n_rows else [posterior.take(rows)]
            parts = [posterior.row_log_density_differences(here, there, piece) for piece in pieces]
            return np.concatenate(parts)

        with np.errstate(all="ignore"):  # Rows may have density zero at the proposal.
            return sequential_test(
                differences, threshold, n_rows, self.batch_size, self.error, self.rng
            )

    def _start(self, incoming: np.ndarray) -> np.ndarray:
        """Begin around the centre, or at the initial values that the user gave."""
        self.begun = True
        if self.center is None or not np.array_equal(incoming, self._initial_position):
            return incoming
        noise = self.rng.standard_normal(len(incoming))
        return self.center.position + self.center.curvature.root @ noise

    @staticmethod
    def _progressbar_config(n_chains=1):
        columns = [TextColumn("{task.fields[rows_read]:.3g}", table_column=Column("Rows"))]
        return columns, {"rows_read": [0] * n_chains}

    @staticmethod
    def _make_progressbar_update_functions():
        def update_stats(step_stats):
            return {"rows_read": step_stats["rows_read"]}

        return (update_stats,)


def _check_error(error: Any) -> float:
    """Return the largest error of a decision.

    Raises
    ------
    TypeError, ValueError
    """
    error = positive_number("error", error, zero=True)
    if error >= MOST_ERROR:
        raise ValueError(
            "`error` should be the largest probability of a wrong decision, in [0, 0.5), such as "
            f"0.05, but got {error!r}."
        )
    return error
