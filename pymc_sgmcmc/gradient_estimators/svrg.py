r"""Control variates at a reference that follows the chain: SVRG (Dubey et al. 2016)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytensor
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.batching import ANY_NOISE
from pymc_sgmcmc.checks import or_none, whole_number
from pymc_sgmcmc.gradient_estimators.base import GradientEstimator, Reference
from pymc_sgmcmc.gradient_estimators.center_difference import (
    find_center_difference,
)
from pymc_sgmcmc.gradient_estimators.minibatches import batching_of
from pymc_sgmcmc.posterior import Posterior

_OTHER = "other "
"""The names of variables outside the position begin with this prefix in the state."""


class SVRGGradient(GradientEstimator, Reference):
    r"""The minibatch gradient with control variates at an earlier position of the chain.

    .. math:: \tilde\nabla(\theta) = \nabla \log p(\theta)
              + \sum_{i=1}^N \nabla \log p(x_i \mid \bar\theta)
              + \frac{N}{n} \sum_{j \in S} [\nabla \log p(x_j \mid \theta)
                                            - \nabla \log p(x_j \mid \bar\theta)]

    with the same rows S in both gradients. :math:`\bar\theta` is the position of the chain at the
    last refresh, by default once an epoch. This is SVRG-LD of Dubey et al. (2016). Their m
    transitions between refreshes are rounded to whole draws here. The estimator needs no centre, so
    it also works where there is no useful mode.

    **Law.** The estimate is unbiased for any reference. On a Gaussian posterior the mean of a chain
    is exact, and the covariance is that of Langevin dynamics with the noise of control variates at
    distance :math:`\theta - \bar\theta`. At stationarity both positions are draws of the chain. The
    mean of :math:`(\theta - \bar\theta)(\theta - \bar\theta)^\top` is then at most twice the
    posterior covariance, where the autocorrelations are not negative. So the noise is at most twice
    that of control variates at the mode, and less where an epoch is shorter than the relaxation
    time. Computed step sizes assume this bound.

    **Cost.** A transition costs as much as with control variates without stored columns, where the
    second gradient shares the matrix product if the model has one. A refresh takes one pass over
    all rows. At one refresh an epoch this is another n gradients a transition.

    Other step methods may move other variables of the posterior. The values of these at the refresh
    belong to the reference.

    Parameters
    ----------
    posterior : Posterior
    batch_size : int
    batching : {"shuffle", "replace"}
        The minibatch scheme.
    refresh : int, optional
        Number of transitions between two references. Default: N / n.
    static : bool
        Whether shapes are known, as JAX needs.
    noise_share : float
        As of `make_batching`.

    References
    ----------
    K. A. Dubey, S. J. Reddi, S. A. Williamson, B. Poczos, A. J. Smola and E. P. Xing (2016).
    Variance reduction in stochastic gradient Langevin dynamics. *NeurIPS*.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sgmcmc import SGLD
    >>> rng = np.random.default_rng(1)
    >>> x = rng.normal(size=1000)
    >>> with pm.Model():
    ...     slope = pm.Normal("slope", 0, 10)
    ...     _ = pm.Normal("y", slope * x, 1.0, observed=2 * x + rng.normal(size=1000))
    ...     step = SGLD(batch_size=50, gradient="svrg", compile_kwargs={"mode": "FAST_COMPILE"})
    ...     idata = pm.sample(
    ...         step=step, draws=200, tune=0, chains=1, random_seed=1, progressbar=False, quiet=True
    ...     )
    >>> bool(abs(idata.posterior["slope"].mean() - 2) < 0.1)
    True
    """

    name = "svrg"
    reduces_variance = True

    def __init__(
        self,
        posterior: Posterior,
        batch_size: int,
        *,
        batching: str = "shuffle",
        refresh: int | None = None,
        static: bool = False,
        noise_share: float = ANY_NOISE,
    ):
        self._difference = find_center_difference(
            posterior, posterior.initial_position, store_columns=False
        )
        scheme = batching_of(
            posterior,
            batching,
            batch_size,
            self._difference,
            static=static,
            noise_share=noise_share,
        )
        super().__init__(posterior, scheme)
        # A vector of length one broadcasts only with a static shape.
        self._likelihood_gradient = pytensor.shared(
            np.zeros(posterior.dimension, dtype=posterior.dtype),
            "likelihood_gradient_at_reference",
            shape=(posterior.dimension,),
        )
        or_none(whole_number, "refresh", refresh, 1, " of transitions")
        self.refresh = refresh or max(1, round(scheme.n_rows / scheme.batch_size))
        self.reference = self
        self.load(self.at(posterior.initial_position))

    def __call__(self, position: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Gradient estimate, shape (d,)."""
        difference = self._difference(position, self.batching.rows(index), self.batching.length)
        return (
            self.posterior.prior_gradient(position)
            + self._likelihood_gradient
            + self._scale * difference
        )

    @property
    def recorded(self) -> Mapping[str, Any]:
        """Transitions between two references."""
        return {"refresh": self.refresh}

    @property
    def noise_factors(self) -> tuple[float, float]:
        """Twice the noise of control variates at the mode."""
        return 2.0, 0.0

    def at(self, position: np.ndarray) -> dict[str, np.ndarray]:
        """Reference at a position and the present values of the other variables."""
        posterior = self.posterior
        position = np.array(position, dtype=posterior.dtype)
        others = {
            f"{_OTHER}{name}": np.array(shared.get_value())
            for name, shared in posterior.others.items()
        }
        return {
            "position": position,
            "likelihood_gradient": posterior.likelihood_gradient(position),
            **others,
        }

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set the shared variables of the estimator."""
        others = {name: arrays[f"{_OTHER}{name}"] for name in self.posterior.others}
        self._difference.move_center(arrays["position"], others)
        self._likelihood_gradient.set_value(
            np.asarray(arrays["likelihood_gradient"], dtype=self.posterior.dtype)
        )
