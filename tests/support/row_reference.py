"""Log density and gradient of an ordinary model, computed by PyMC itself."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pymc as pm

from pymc_sgmcmc.compiling.compiled import PYTHON_MODE
from pymc_sgmcmc.posterior import Posterior
from tests.support.row_models import N_ROWS


@dataclass(frozen=True)
class Reference:
    """Log density, gradient and terms of an ordinary model by PyMC."""

    model: pm.Model

    @functools.cached_property
    def _function(self):
        return self.model.logp_dlogp_function(mode=PYTHON_MODE, ravel_inputs=True)

    def log_density_and_gradient(self, position: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = self._function(position)
        return float(value), np.array(gradient)

    @functools.cached_property
    def _terms(self):
        model = self.model
        prior = model.logp(vars=model.free_RVs)
        rows = [
            term.reshape((N_ROWS, -1)).sum(axis=1)
            for term in model.logp(vars=model.observed_RVs, sum=False)
        ]
        return model.compile_fn([prior, sum(rows)], mode=PYTHON_MODE, on_unused_input="ignore")

    def prior_and_rows(self, position: np.ndarray) -> tuple[float, np.ndarray]:
        """Log prior, and log likelihood of each row."""
        point, start = {}, 0
        for name, value in self.model.initial_point().items():
            point[name] = position[start : start + value.size].reshape(value.shape)
            start += value.size
        prior, rows = self._terms(point)
        return float(prior), rows


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


def agrees(model: pm.Model, posterior: Posterior) -> None:
    """Check that the posterior of an ordinary model is that of PyMC, also row by row."""
    position = np.random.default_rng(8).normal(0.0, 0.4, size=posterior.dimension)
    value, gradient = Reference(model).log_density_and_gradient(position)
    close(posterior.log_density(position), value)
    close(posterior.gradient(position), gradient)
    rows = posterior.row_gradients(position, posterior.take(slice(None)))
    close(rows.sum(axis=0) + posterior.log_prior_and_gradient(position)[1], gradient)
