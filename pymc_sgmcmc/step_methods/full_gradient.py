"""Langevin samplers with the gradient of all rows: baselines for teaching and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pymc.model import Model, modelcontext
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.batching import Batching
from pymc_sgmcmc.dynamics.metropolis_adjusted import MetropolisAdjustedLangevin
from pymc_sgmcmc.engine import is_jax_mode
from pymc_sgmcmc.gradient_estimators import GradientEstimator
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.schedules import StepSize
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.setup import (
    Design,
    Setup,
    default_preconditioner,
    default_thinning,
    is_curvature,
)
from pymc_sgmcmc.step_methods.sgld import SGLD

OPTIMAL_MALA_SCALE = 1.65
"""Step of MALA for an acceptance rate of 0.574 (Roberts and Rosenthal 1998), a coordinate."""


class AllRows(Batching):
    """All rows in their own order, every time, and no copy of them."""

    name = "all"
    without_replacement = True

    @property
    def variance_factor(self) -> float:
        """c = 0: the gradient has no noise."""
        return 0.0

    @property
    def index_size(self) -> int:
        """One number, which says nothing."""
        return 1

    def index_variable(self, name: str) -> TensorVariable:
        """A number for each transition, shape (transitions,)."""
        return pt.lvector(name)

    def rows(self, index: TensorVariable) -> list[TensorVariable]:
        """All rows, whatever the index."""
        return list(self._shared)

    def stored_rows(self, table: TensorVariable, index: TensorVariable) -> TensorVariable:
        """The whole table."""
        return table

    def with_stored_rows(
        self, table: TensorVariable, index: TensorVariable, rows: TensorVariable
    ) -> TensorVariable:
        """The rows in its place."""
        return rows

    def draw(self, rng: np.random.Generator, minibatches: int) -> np.ndarray:
        """Zeros: nothing is drawn."""
        return np.zeros(minibatches, dtype=np.int64)

    def selected(self, index: np.ndarray) -> np.ndarray:
        """Numbers of all rows."""
        return np.arange(self.n_rows)

    def set_order(self, seed: int) -> None:
        """Nothing: there is no order."""


class FullGradient(GradientEstimator):
    r"""The gradient of the log posterior itself.

    .. math:: \nabla(\theta) = \nabla \log p(\theta) + \sum_{i=1}^N \nabla \log p(x_i \mid \theta)

    Parameters
    ----------
    posterior : Posterior
    static : bool
        As for `Batching`.
    """

    name = "full"
    reduces_variance = True

    def __init__(self, posterior: Posterior, *, static: bool = False):
        super().__init__(posterior, AllRows(posterior.data, posterior.n_rows, static=static))

    def __call__(self, position: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Gradient, shape (d,)."""
        return self.posterior.prior_gradient(position) + self.posterior.rows_gradient(
            position, self.batching.rows(index), self.batching.length
        )

    def log_density(self, position: TensorVariable) -> TensorVariable:
        """Symbolic log posterior on the same rows."""
        rows = self.batching.rows(pt.constant(0))
        return self.posterior.prior_log_density(position) + self.posterior.rows_log_density(
            position, rows, self.batching.length
        )


class ULA(SGLD):
    r"""The unadjusted Langevin algorithm: `SGLD` with the gradient of all rows.

    .. math:: \theta' = \theta + \tfrac{h}{2} M \nabla(\theta) + N(0, h M)

    **Law.** For a Gaussian posterior with precision H, the right mean and the covariance of
    precision :math:`H - \tfrac{h}{4} H M H`: variances are too large by
    :math:`1 / (1 - \tfrac{h}{4} \lambda(MH))` in each eigen-direction. In general a bias of first
    order in h (Roberts and Tweedie 1996; "ULA" in Howell's notes, section 4). `MALA` has none.

    **Cost.** One gradient of *all* N rows a transition: for teaching and as a reference for
    the other samplers, whose cost does not depend on N. The data are not copied. The rows of
    the model must be separable, as for the other samplers.

    Parameters
    ----------
    vars : sequence of variables, optional
        As for `SGLD`, like all parameters not listed here.
    step_size : float or callable, optional
        h. Where not given, :math:`4\delta / \lambda_{\max}(MH)` for a variance inflation
        :math:`\delta` of 5 %.

    Raises
    ------
    TypeError
        For `batch_size`, `batching` or `gradient`, which have no meaning here; otherwise as
        `SGLD`.

    References
    ----------
    G. O. Roberts and R. L. Tweedie (1996). Exponential convergence of Langevin distributions
    and their discrete approximations. *Bernoulli* 2, 341-363.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> rng = np.random.default_rng(1)
    >>> x = rng.normal(size=1000)
    >>> with pm.Model():
    ...     slope = pm.Normal("slope", 0, 10)
    ...     _ = pm.Normal("y", slope * x, 1.0, observed=2 * x + rng.normal(size=1000))
    ...     step = ULA(compile_kwargs={"mode": "FAST_COMPILE"})
    ...     idata = pm.sample(
    ...         step=step, draws=200, tune=0, chains=1, random_seed=1, progressbar=False, quiet=True
    ...     )
    >>> bool(abs(idata.posterior["slope"].mean() - 2) < 0.1)
    True
    """

    name = "ula"

    def __init__(self, vars: Sequence | None = None, **settings: Any):
        super().__init__(vars, **_with_full_gradient(type(self).__name__, vars, settings))


class MALA(StochasticGradientStep):
    r"""The Metropolis-adjusted Langevin algorithm, with the gradient of all rows.

    .. math::
        \theta^* &= \theta + \tfrac{h}{2} M \nabla(\theta) + N(0, h M) \\
        \theta' &= \theta^* \text{ with probability } \min\left\{1,
            \frac{\pi(\theta^*)\, q(\theta \mid \theta^*)}
                 {\pi(\theta)\, q(\theta^* \mid \theta)}\right\},
            \quad \theta \text{ otherwise}

    with q the density of the proposal. Roberts and Tweedie (1996); Howell, section 2.

    **Law.** The posterior, for each h: no bias, only more or less autocorrelation.

    **Cost.** One log density and gradient of *all* N rows a transition: for teaching and as a
    reference. The data are not copied. In a compound step one more evaluation a draw, since
    the other variables have moved. The rows of the model must be separable, as for the other
    samplers. In single precision the log density of many rows has few digits left after the
    point: use double precision beyond some ten thousand rows.

    Parameters
    ----------
    vars : sequence of variables, optional
        As for `SGLD`, like all parameters not listed here.
    step_size : float or callable, optional
        h. Where not given, :math:`h = 1.65^2 \left(\sum_i \lambda_i^3\right)^{-1/3}` with
        :math:`\lambda_i` the eigenvalues of MH: for M the inverse curvature
        :math:`1.65^2 d^{-1/3}`, at which Roberts and Rosenthal (1998) find the acceptance rate
        of 0.574 that is best in high dimension.
    preconditioner : {"curvature", "identity"}, float, (d,) or (d, d) array, optional
        M, symmetric positive definite.

    Raises
    ------
    TypeError
        For `batch_size`, `batching` or `gradient`, which have no meaning here; otherwise as
        `SGLD`.

    Notes
    -----
    `sample_stats` has, beside those of `SGLD`, for the last transition of each draw whether
    it was ``accepted`` (0 or 1) and its probability ``acceptance_rate``. The ``gradient`` is the
    exact one at the recorded position.

    References
    ----------
    G. O. Roberts and R. L. Tweedie (1996). Exponential convergence of Langevin distributions
    and their discrete approximations. *Bernoulli* 2, 341-363.

    G. O. Roberts and J. S. Rosenthal (1998). Optimal scaling of discrete approximations to
    Langevin diffusions. *Journal of the Royal Statistical Society B* 60, 255-268.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> rng = np.random.default_rng(1)
    >>> x = rng.normal(size=1000)
    >>> with pm.Model():
    ...     slope = pm.Normal("slope", 0, 10)
    ...     _ = pm.Normal("y", slope * x, 1.0, observed=2 * x + rng.normal(size=1000))
    ...     step = MALA(compile_kwargs={"mode": "FAST_COMPILE"})
    ...     idata = pm.sample(
    ...         step=step, draws=200, tune=0, chains=1, random_seed=1, progressbar=False, quiet=True
    ...     )
    >>> bool(abs(idata.posterior["slope"].mean() - 2) < 0.1)
    True
    >>> bool(idata.sample_stats["acceptance_rate"].mean() > 0.5)
    True
    """

    name = "mala"

    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        preconditioner: str | float | np.ndarray | None = None,
        step_size: StepSize | None = None,
        **common: Any,
    ):
        if "bias" in common:
            raise TypeError("`MALA` has no bias, and so takes no `bias`.")
        self._preconditioner = default_preconditioner(preconditioner, step_size)
        common = _with_full_gradient(type(self).__name__, vars, common)
        super().__init__(vars, step_size=step_size, **common)

    def _needs_center(self, step_size: StepSize | None) -> bool:
        return step_size is None or is_curvature(self._preconditioner)

    def _design(self, setup: Setup) -> Design:
        posterior, estimator = setup.posterior, setup.estimator
        assert isinstance(estimator, FullGradient)
        matrix, root = setup.preconditioner(self._preconditioner)
        step_size, thin = setup.step_size, setup.thin
        if step_size is None:
            assert setup.center is not None
            curvature = setup.center.curvature
            step_size = optimal_mala_step(curvature.relative_to(root))
            choice = setup.choose_step_size(root)
            thin = thin or default_thinning(step_size, choice.curvature)
            setup.report(choice, step_size, thin)
        # Compiles the function that begins a chain here, and not in each process.
        posterior.log_density_and_gradient(posterior.initial_position)
        dynamics = MetropolisAdjustedLangevin(
            setup.shared(matrix, "preconditioner"),
            setup.shared(root, "preconditioner_root"),
            estimator.log_density,
            posterior.log_density_and_gradient,
        )
        return Design(dynamics, step_size, thin or 1)


def optimal_mala_step(curvatures: np.ndarray) -> float:
    r"""Step of MALA for a Gaussian with eigenvalues :math:`\lambda` of MH, in closed form.

    .. math:: h = 1.65^2 \left(\sum_i \lambda_i^3\right)^{-1/3}

    The acceptance rate is :math:`2 \Phi(-\tfrac18 h^{3/2} (\sum_i \lambda_i^3)^{1/2})` in high
    dimension (Roberts and Rosenthal 1998, theorems 1 and 3).
    """
    return float(OPTIMAL_MALA_SCALE**2 / np.cbrt(np.sum(curvatures**3)))


def _with_full_gradient(
    step_name: str, vars: Sequence | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of a step method with the gradient of all rows put in."""
    given = [name for name in ("batch_size", "batching", "gradient") if name in settings]
    if given:
        raise TypeError(
            f"`{step_name}` uses the gradient of all rows, so it takes no `{given[0]}`. Leave it "
            "out, or use `SGLD` for minibatches."
        )
    model: Model = modelcontext(settings.get("model"))
    settings = dict(settings)
    posterior = Posterior(
        model, vars, rows=settings.pop("rows", None), initial_point=settings.get("initial_point")
    )
    static = is_jax_mode(settings.get("compile_kwargs"))
    return {**settings, "gradient": FullGradient(posterior, static=static)}
