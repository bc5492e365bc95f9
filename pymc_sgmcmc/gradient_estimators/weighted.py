r"""Minibatch gradients whose rows have different probabilities."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import pytensor
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.batching import WeightedRows
from pymc_sgmcmc.checks import as_array
from pymc_sgmcmc.errors import BatchSizeWarning, ModelError, warn
from pymc_sgmcmc.gradient_estimators.base import GradientEstimator
from pymc_sgmcmc.posterior import Posterior

SMALLEST_WEIGHT = 1e-30
"""The inverse of a smaller part is infinite in single precision."""

COMPARED_ROWS = 1000
"""The noise of given probabilities is found from so many rows with the smallest ones."""

MOST_NOISE = 10.0
"""A warning follows where it is more than this many times the noise of equal probabilities. Those
that help make the noise smaller."""

SEED = 20_190_422
"""The position at which the noise is found comes from this fixed seed."""


class WeightedGradient(GradientEstimator[Posterior]):
    r"""The minibatch gradient of rows drawn with probabilities p, plain or with control variates.

    .. math:: \hat\nabla(\theta) = \nabla \log p(\theta)
              + \frac{1}{n} \sum_{j \in S} \frac{1}{p_j} \nabla \log p(x_j \mid \theta)

    With control variates the sum is that of the differences from the centre, and the gradient of
    all rows at the centre is added (Baker et al. 2019, §3.1). Both are unbiased for any positive
    probabilities. Nothing is computed from the noise, so that `step_size` has to be given.

    Parameters
    ----------
    posterior : Posterior
    probabilities : numpy.ndarray, shape (N,)
        Positive numbers in proportion to the probabilities of the rows.
    batch_size : int
    center : numpy.ndarray, shape (d,), optional
        The centre of control variates.
    static : bool
        Whether shapes are known, as JAX needs.

    Raises
    ------
    TypeError, ValueError
        Where the probabilities are not those of all rows, rows are groups or in a source, or the
        centre belongs to other values of variables that move.

    Warns
    -----
    BatchSizeWarning
        Where rows that are hardly ever drawn have most of the noise.
    """

    with_less_noise = "a `center` of the `WeightedGradient`"

    def __init__(
        self,
        posterior: Posterior,
        probabilities: np.ndarray,
        batch_size: int,
        center: np.ndarray | None = None,
        *,
        static: bool = False,
    ):
        p = as_array("probabilities", probabilities, "positive numbers, one for each row")
        if p.shape != (posterior.n_rows,) or not (
            np.isfinite(p).all() and p.min() > SMALLEST_WEIGHT * p.max()
        ):
            raise ValueError(
                f"`probabilities` should be {posterior.n_rows} positive numbers, one for each row, "
                f"that are at least {SMALLEST_WEIGHT:.0e} of the largest, but have shape {p.shape} "
                f"and are {p.min(initial=np.inf):.3g} to {p.max(initial=-np.inf):.3g}."
            )
        if posterior.rows_are_groups or posterior.source is not None:
            raise ModelError(
                "Rows with different probabilities go neither with groups as rows nor with rows of "
                "a source. Give the name of an estimator as `gradient`."
            )
        if center is not None and posterior.others:
            raise ValueError(
                "`center` goes with rows of different probabilities only where the step method has "
                "all variables. Leave it out."
            )
        _warn_of_noise(posterior, p / p.sum(), center)
        batching = WeightedRows(posterior.data, batch_size, p, dtype=posterior.dtype, static=static)
        super().__init__(posterior, batching)
        self.name = "plain" if center is None else "cv"
        self.reduces_variance = center is not None
        self._at_center: list[TensorVariable] = []
        if center is not None:
            _, gradient = posterior.log_density_and_gradient(center)
            _, prior_gradient = posterior.log_prior_and_gradient(center)
            self._at_center = [
                pytensor.shared(np.asarray(values, posterior.dtype), name, shape=np.shape(center))
                for values, name in (
                    (center, "center"),
                    (gradient - prior_gradient, "likelihood_gradient_at_center"),
                )
            ]

    def __call__(self, position: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Gradient estimate, shape (d,)."""
        *rows, weights = self.batching.rows(index)
        estimate = self.posterior.weighted_rows_gradient(position, rows, weights)
        prior = self.posterior.prior_gradient(position)
        if not self._at_center:
            return prior + self._scale * estimate
        center, likelihood_gradient = self._at_center
        difference = estimate - self.posterior.weighted_rows_gradient(center, rows, weights)
        return prior + likelihood_gradient + self._scale * difference

    @property
    def noise_factors(self) -> NoReturn:
        """The noise is not computed.

        Raises
        ------
        ValueError
        """
        raise ValueError(
            "The noise of rows with different probabilities is not computed. Give `step_size` and "
            "`preconditioner`, and `noise_estimate` where the step method has one."
        )


def _warn_of_noise(
    posterior: Posterior, probabilities: np.ndarray, center: np.ndarray | None
) -> None:
    r"""Warn where rows that are hardly ever drawn have most of the noise of the gradient.

    The noise of a row with gradient g is :math:`\|g\|^2 / p`, against :math:`N \|g\|^2` with equal
    probabilities. It is seen only in the minibatches that have the row, so a chain may end before,
    without a trace of the row in its draws.
    """
    n_rows = posterior.n_rows
    rare = np.argsort(probabilities)[:COMPARED_ROWS]
    usual = np.linspace(0, n_rows - 1, min(n_rows, COMPARED_ROWS)).astype(int)
    at = posterior.initial_position if center is None else center
    near = at + np.random.default_rng(SEED).normal(scale=0.1, size=len(at))
    squares = []
    for rows in (posterior.take(rare), posterior.take(usual)):
        gradients = posterior.row_gradients(near, rows)
        if center is not None:
            gradients = gradients - posterior.row_gradients(center, rows)
        squares.append((gradients**2).sum(1))
    noise = float((squares[0] / probabilities[rare]).sum())
    ratio = noise / max(n_rows**2 * float(squares[1].mean()), np.finfo(float).tiny)
    if ratio > MOST_NOISE:
        warn(
            f"With these `probabilities` the noise of the gradient is {ratio:.2g} times that of "
            f"equal ones, since rows with probabilities down to {probabilities.min():.1g} are "
            "hardly ever drawn. Draws then follow the posterior without these rows. Raise the "
            "smallest.",
            BatchSizeWarning,
        )
