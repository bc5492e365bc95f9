"""Stochastic gradient Langevin dynamics as step methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pymc_sgmcmc.dynamics import Langevin
from pymc_sgmcmc.schedules import StepSize
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.setup import (
    Design,
    Setup,
    default_preconditioner,
    default_thinning,
    is_curvature,
)


class SGLD(StochasticGradientStep):
    r"""Stochastic gradient Langevin dynamics.

    .. math:: \theta' = \theta + \tfrac{h}{2} M \hat\nabla(\theta) + N(0, h M)

    with :math:`\hat\nabla` an unbiased estimate of the gradient of the log posterior from a
    minibatch of rows. Welling and Teh (2011), eq. 4, with M = I; no accept-reject step.

    **Law.** The chain leaves invariant not the posterior but a law near it: on a Gaussian
    posterior with precision H it has the right mean and, for small h, a covariance too large
    by the relative amount :math:`\tfrac{h}{4}(MV + MH)`, with V the covariance of the gradient
    estimate. With a plain gradient V grows with N at a fixed batch size, so h must shrink:
    prefer `SGLDCV` on large data.

    **Cost.** One gradient of n rows a transition, independent of N.

    Parameters
    ----------
    vars : sequence of variables, optional
        Continuous free variables, in any order; all of the model where not given.
    batch_size : int, optional
        Rows n a minibatch; for a model with `pymc.Minibatch` it replaces the model's own. Default
        for an ordinary model: the one at which an effective draw costs least, see
        `pymc_sgmcmc.tuning.choose_batch_size`.
    rows : str or sequence of str, optional
        Names of observed variables, `pymc.Data` variables or a dimension that run over the
        rows, for ordinary models in which this is ambiguous.
    step_size : float or callable, optional
        h, or a function of the transition number (from 0) such as `PolynomialDecay`. Where
        not given, the closed form :math:`h = 4\delta / (\lambda_{\max}(MV) +
        \lambda_{\max}(MH))` for the variance inflation :math:`\delta` stated as `bias`, set anew
        while tuning from the gradients that the chain has met.
    preconditioner : {"curvature", "identity"}, float, (d,) or (d, d) array, optional
        M, symmetric positive definite, fixed. "curvature" is the inverse curvature at the
        centre: dense up to d = 500, a diagonal with up to 50 directions up to d = 20 000, and
        diagonal beyond. Default: "curvature" where the step size is computed, "identity" where
        it is given.
    gradient : {"plain", "cv", "svrg", "saga"}, SVRG or GradientEstimator
        Estimator of the gradient: the scaled minibatch gradient; that of Baker et al. with
        control variates at the centre; the same at an earlier position of the chain (`SVRG`
        sets how often it is refreshed); or with a stored gradient for each row. An estimator
        made by hand brings its own posterior and minibatch scheme.
    center : {"lbfgs", "sgd"}, mapping or (d,) array, optional
        How to find the point near the mode at which curvature, control variates and the
        start of the chains lie: by L-BFGS on gradients of all rows (default), by one pass of
        stochastic Newton steps, or the point itself: values of all variables by name, or the
        unconstrained position. Not computed where nothing needs it.
    thin : int, optional
        Transitions a recorded draw. Default: one relaxation time, at most 1000, where the
        step size is computed, and 1 where it is given.
    batching : {"shuffle", "replace"}
        Windows of rows in random order (without replacement; the default), or independent rows
        with replacement (the default of ``gradient="saga"``, see `SAGAGradient`).
    model : pymc.Model, optional
    initial_point : mapping, optional
        Values of all value variables, as PyMC passes them.
    compile_kwargs : dict, optional
        For the transitions, passed to `pytensor.function`: ``{"mode": "NUMBA"}`` (the
        default), ``"CVM"`` or ``"JAX"``.
    tune_method : {"closed_form", "halving"}
        Where `step_size` is not given: the closed form, or, where that does not apply, successive
        halving of a grid of step sizes by the kernel Stein discrepancy of short chains (Coullon,
        South and Nemeth 2021), which trades bias for mixing on its own.
    init : mapping, xarray.DataTree or pymc Approximation, optional
        An approximation of the posterior to take the centre and the curvature from, in place of a
        search: draws of all free variables, as Pathfinder in `pymc_extras` or a short run of NUTS
        return them; what `pymc.fit` returns; or ``{"mean": (d,), "covariance": (d, d)}`` of the
        unconstrained position.
    bias : float, optional
        Relative error of the posterior variance that you accept, in (0, 1), instead of a
        `step_size`; 0.05 where neither is given. `bias_report` says what became of it.
    blocked : bool
        Sample the variables together; the only choice that makes sense here.
    rng : optional
        Seed or generator for use outside `pymc.sample`.

    Raises
    ------
    ModelError
        Where the model's rows cannot be told apart.
    ValueError, TypeError
        For invalid settings; each message says what was given and what should be.

    Warns
    -----
    BatchSizeWarning
        Where the noise of the gradient makes the computed step much smaller than
        curvature would; it names the batch size at which it would not.
    CenterWarning
        Where the search for the mode failed, or the posterior around it is far from Gaussian.

    Notes
    -----
    `sample_stats` has, for each draw, the unconstrained ``position``, the ``gradient``
    estimate there (the one that makes the next transition), its norm ``gradient_norm``, and
    the ``step_size``. Chains begin at the centre, displaced by one draw from the Laplace
    approximation, unless `initvals` other than the model's initial point are given to
    `pymc.sample`. The data are those at the time when the step method was made: sampling after
    `pymc.set_data` is refused.

    References
    ----------
    M. Welling and Y. W. Teh (2011). Bayesian learning via stochastic gradient Langevin
    dynamics. *ICML*.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> rng = np.random.default_rng(1)
    >>> x = rng.normal(size=1000)
    >>> with pm.Model():
    ...     slope = pm.Normal("slope", 0, 10)
    ...     _ = pm.Normal("y", slope * x, 1.0, observed=2 * x + rng.normal(size=1000))
    ...     step = SGLD(batch_size=1000, compile_kwargs={"mode": "FAST_COMPILE"})
    ...     idata = pm.sample(
    ...         step=step, draws=200, tune=0, chains=1, random_seed=1, progressbar=False, quiet=True
    ...     )
    >>> bool(abs(idata.posterior["slope"].mean() - 2) < 0.1)
    True
    """

    name = "sgld"
    _takes_low_rank = True

    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        preconditioner: str | float | np.ndarray | None = None,
        step_size: StepSize | None = None,
        **common: Any,
    ):
        self._preconditioner = default_preconditioner(preconditioner, step_size)
        super().__init__(vars, step_size=step_size, **common)

    def _needs_center(self, step_size: StepSize | None) -> bool:
        return step_size is None or is_curvature(self._preconditioner)

    def _design(self, setup: Setup) -> Design:
        matrix, root = setup.preconditioner(self._preconditioner)
        step_size, thin, choice = setup.step_size, setup.thin, None
        if step_size is None:
            choice = setup.choose_step_size(root)
            step_size = choice.step_size
            thin = thin or default_thinning(choice.step_size, choice.curvature)
            setup.report(choice, step_size, thin)
        dynamics = Langevin(
            setup.shared(matrix, "preconditioner"), setup.shared(root, "preconditioner_root")
        )
        return Design(dynamics, step_size, thin or 1, preconditioner=matrix, choice=choice)


class SGLDCV(SGLD):
    r"""Stochastic gradient Langevin dynamics with control variates.

    .. math::
        \theta' &= \theta + \tfrac{h}{2} M \tilde\nabla(\theta) + N(0, h M) \\
        \tilde\nabla(\theta) &= \nabla \log \pi(\hat\theta)
              + [\nabla \log p(\theta) - \nabla \log p(\hat\theta)] \\
              &\quad + \tfrac{N}{n} \sum_{j \in S} [\nabla \log p(x_j \mid \theta)
                                            - \nabla \log p(x_j \mid \hat\theta)]

    with the same rows S in both terms (Baker et al. 2019, algorithm 1). The same as `SGLD`
    with ``gradient="cv"``; see there for all parameters.

    **Law.** As for `SGLD`, with a gradient covariance V that is proportional to the squared
    distance from the centre. For a posterior that contracts like :math:`N^{-1/2}` around it,
    V does not grow relative to the curvature, so the same batch size serves for all N. Rows that
    alone would make most of V, as those of a rare level of a factor, are in each transition where
    the batch size is computed: their differences have no noise.

    **Cost.** At most two gradients of n rows a transition, independent of N. The difference of
    the two is taken inside sums and products, so that one matrix product serves both in a
    regression, and what belongs to the centre, such as its fitted values, is stored once where
    it takes little memory: a transition then costs what one of `SGLD` does. A few passes over
    the data for the centre, once.

    References
    ----------
    J. Baker, P. Fearnhead, E. B. Fox and C. Nemeth (2019). Control variates for stochastic
    gradient MCMC. *Statistics and Computing* 29, 599-615.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> rng = np.random.default_rng(1)
    >>> x = rng.normal(size=5000)
    >>> with pm.Model():
    ...     slope = pm.Normal("slope", 0, 10)
    ...     _ = pm.Poisson("y", pm.math.exp(slope * x), observed=rng.poisson(np.exp(0.5 * x)))
    ...     step = SGLDCV(batch_size=50, compile_kwargs={"mode": "FAST_COMPILE"})
    ...     idata = pm.sample(step=step, draws=200, tune=0, chains=1, random_seed=1,
    ...                       progressbar=False, quiet=True)
    >>> bool(abs(idata.posterior["slope"].mean() - 0.5) < 0.05)
    True
    """

    name = "sgldcv"

    def __init__(self, vars: Sequence | None = None, *, gradient: str = "cv", **kwargs: Any):
        super().__init__(vars, gradient=gradient, **kwargs)
