"""Gibbs draws of the mean and the covariance of normal vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pymc.model import Model
from pymc.step_methods.compound import StepMethodState

from pymc_sgmcmc.dynamics.normal_inverse_wishart import (
    NormalInverseWishartLaw,
    log_jacobian,
    packed,
    unpacked,
)
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.papers.conjugate import HOW_TO_WRITE, NormalVectors, find_normal_vectors
from pymc_sgmcmc.posterior.agreement import agree
from pymc_sgmcmc.posterior.position import added_or_removed, given_model, names_of
from pymc_sgmcmc.step_methods.contract import StepMethod

CHECKED_VECTORS, CHECKED_POINTS = 3, 4
"""The full conditional is compared with the model at so many random points of mean and precision,
for each of so many sets of random vectors."""

SEED = 20_180_427
"""The random points of the check come from this fixed seed, so that the same model gives the same
result."""


class NormalInverseWishart(StepMethod):
    r"""Exact draws of mean and covariance of normal vectors, given the vectors: a Gibbs step.

    For the hierarchical model

    .. math::
        \theta_i \mid \mu, \Sigma \sim N(\mu, \Sigma), \quad i = 1, \dots, K, \qquad
        \mu \mid \Sigma \sim N(\mu_0, \tfrac1\lambda \Sigma), \qquad
        \Sigma \sim \mathcal{W}^{-1}(\Phi, \nu)

    with any observations that depend on the :math:`\theta_i` alone (El hanchi 2018, §3.2), it draws

    .. math::
        \Sigma &\sim \mathcal{W}^{-1}(\Phi', \nu + K), \qquad
        \mu \mid \Sigma \sim N\left(\frac{\lambda \mu_0 + K \bar\theta}{\lambda + K},\,
                                    \frac{1}{\lambda + K} \Sigma\right), \\
        \Phi' &= \Phi + \sum_{i=1}^K (\theta_i - \bar\theta)(\theta_i - \bar\theta)^\top
          + \frac{\lambda K}{\lambda + K} (\bar\theta - \mu_0)(\bar\theta - \mu_0)^\top .

    Another step method of the same run moves the :math:`\theta_i`.

    **The model in PyMC.** PyMC 6.4 has no inverse Wishart law, but `pymc.Wishart` is its mirror
    image: :math:`\Sigma \sim \mathcal{W}^{-1}(\Phi, \nu)` where the precision
    :math:`\Lambda = \Sigma^{-1} \sim \mathcal{W}(\Phi^{-1}, \nu)`. So write the model with the
    precision, as in the example below, and Σ as a deterministic variable. NUTS samples the same
    model. The prior is read from the model: :math:`\nu` and :math:`\Phi` from the law of Λ, and
    :math:`\lambda` and :math:`\mu_0` from the log density of μ.

    **Law.** The full conditional of (μ, Λ) is drawn exactly, so it stays invariant. That it is the
    full conditional of the model is checked at random points when the step is made.

    **Beside other step methods of this package.** They take the present values of μ and Λ in each
    draw. Control variates are differences of the likelihood, which does not contain μ and Λ, so
    they do not become stale. `OSGFS` computes its curvature anew in each draw. Their centre is the
    mode of all variables together, where the :math:`\theta_i` lie closer together than in the
    posterior.

    **Cost.** A draw takes :math:`O(K q^2 + q^3)` operations for vectors of length q, about 0.1
    milliseconds at K = 25 and q = 4.

    Parameters
    ----------
    vars : sequence of two variables
        The mean μ and the precision Λ, in any order.

    Raises
    ------
    ModelError
        Where `vars` are not a mean and a `pymc.Wishart` precision of one variable; where other
        variables depend on them; where the prior has free parameters; and where their law given the
        vectors is not the one above. When a chain begins, where data have changed.

    Notes
    -----
    `prior` is an attribute: the law of (μ, Σ) as it was read from the model.

    References
    ----------
    A. El hanchi (2018). Stochastic gradient MCMC algorithms and their applications.

    A. Gelman, J. B. Carlin, H. S. Stern, D. B. Dunson, A. Vehtari and D. B. Rubin (2013). *Bayesian
    Data Analysis*, third edition, §3.6.

    Examples
    --------
    Here the vectors are observed, so that the draws are independent:

    >>> import numpy as np, pymc as pm
    >>> rng = np.random.default_rng(1)
    >>> vectors = rng.multivariate_normal([1, -1], [[1, 0.5], [0.5, 1]], size=200)
    >>> with pm.Model():
    ...     precision = pm.Wishart("precision", 4, V=np.eye(2))
    ...     mu = pm.MvNormal("mu", np.zeros(2), tau=0.1 * precision)
    ...     _ = pm.MvNormal("theta", mu, tau=precision, observed=vectors)
    ...     _ = pm.Deterministic("Sigma", pm.math.matrix_inverse(precision))
    ...     idata = pm.sample(
    ...         step=NormalInverseWishart([mu, precision]),
    ...         draws=300,
    ...         tune=0,
    ...         chains=1,
    ...         random_seed=1,
    ...         progressbar=False,
    ...         quiet=True,
    ...         compute_convergence_checks=False,
    ...     )
    >>> bool(abs(idata.posterior["mu"].mean(("chain", "draw")) - [1, -1]).max() < 0.3)
    True
    """

    name = "normal_inverse_wishart"
    _state_class = StepMethodState

    def __init__(
        self,
        vars: Sequence,
        *,
        model: Model | None = None,
    ):
        model = given_model(model)
        self._model, self._names = model, names_of(model)
        self._vectors = find_normal_vectors(model, vars)
        names = (self._vectors.mean, self._vectors.precision)
        self.vars = [value for value in model.value_vars if value.name in names]
        self.prior = prior_of(self._vectors)
        check_conditional(self._vectors, self.prior)
        self.rng = np.random.default_rng()

    def setup_chain(self, rng: Any, tune: int, draws: int) -> None:
        """Begin a chain.

        Raises
        ------
        ModelError
            Where data or the variables of the model have changed.
        """
        changed = added_or_removed(self._model, self._names)
        self._refuse_changed_model(changed, self._vectors.changed_data())
        super().setup_chain(rng, tune, draws)

    def step(self, point: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list]:
        """Draw mean and precision given the vectors of the point."""
        mean, factor = self.prior.given(self._vectors.at(point)).draw(self.rng)
        drawn = {self._vectors.mean: mean, self._vectors.precision: packed(factor)}
        typed = {name: values.astype(self._vectors.dtype) for name, values in drawn.items()}
        return {**point, **typed}, [{}]


def prior_of(vectors: NormalVectors) -> NormalInverseWishartLaw:
    r"""The prior of mean and covariance.

    At :math:`\Lambda = I` the gradient of :math:`\log p(\mu \mid \Lambda)` is
    :math:`\lambda (\mu_0 - \mu)`, which gives λ and :math:`\mu_0`.

    Raises
    ------
    ModelError
        Where the law of the mean is not normal with a multiple of Λ as its precision.
    """
    q = vectors.size
    identity = packed(np.eye(q))
    (at_zero,) = vectors.mean_gradient(np.zeros(q), identity)
    (at_ones,) = vectors.mean_gradient(np.ones(q), identity)
    strength = float(np.mean(at_zero - at_ones))
    if not strength > 0:
        raise _not_conjugate(vectors)
    inverse_root = np.linalg.inv(vectors.scale_root)
    return NormalInverseWishartLaw(
        at_zero / strength, strength, inverse_root.T @ inverse_root, vectors.degrees
    )


def check_conditional(vectors: NormalVectors, prior: NormalInverseWishartLaw) -> None:
    """Compare the full conditional with the log density of the model, up to a constant.

    Raises
    ------
    ModelError
        Where they differ.
    """
    rng, q = np.random.default_rng(SEED), vectors.size
    precision = float(np.sqrt(np.finfo(vectors.dtype).eps))
    for _ in range(CHECKED_VECTORS):
        point = {}
        if vectors.value is not None:
            point[vectors.value] = rng.normal(size=vectors.shape)
        law = prior.given(vectors.at(point))
        differences, sizes = [], []
        for _ in range(CHECKED_POINTS):
            mean = rng.normal(size=q)
            values = 0.5 * rng.normal(size=q * (q + 1) // 2)
            factor = unpacked(values, q)
            expected = law.log_density(mean, factor) + log_jacobian(factor)
            (found,) = vectors.log_density(mean, values, *point.values())
            differences.append(found - expected)
            sizes.append(abs(expected))
        least, largest, size = min(differences), max(differences), 1 + max(sizes)
        if not agree(least, largest, size, precision, finite=True):
            raise _not_conjugate(vectors)


def _not_conjugate(vectors: NormalVectors) -> ModelError:
    return ModelError(
        f"The law of `{vectors.mean}` and the precision given `{vectors.vectors}` should be normal "
        "with a multiple of the precision, and Wishart, but the log density of the model has "
        f"another form. {HOW_TO_WRITE}"
    )
