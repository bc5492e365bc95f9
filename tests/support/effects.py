"""Normal observations with centred effects of groups, whose law given their scale is normal."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import pymc as pm
from scipy import special

from pymc_sgmcmc import Posterior
from pymc_sgmcmc.tuning import Center, find_center
from pymc_sgmcmc.tuning.subsample import Subsample

PRIOR_SD = 5.0
"""Standard deviation of the mean of the effects; that of their scale is one."""


@dataclass(frozen=True)
class Effects:
    """Groups of records of variance one, and the scale of their effects in the simulation."""

    groups: int
    records: int
    scale: float

    @property
    def codes(self) -> np.ndarray:
        """The group of each record."""
        return np.repeat(np.arange(self.groups), self.records)

    @property
    def y(self) -> np.ndarray:
        """The records."""
        rng = np.random.default_rng(31)
        effects = 1 + self.scale * rng.normal(size=self.groups)
        return effects[self.codes] + rng.normal(size=len(self.codes))

    def model(self, *, centred: bool = True, nu: float | None = None) -> pm.Model:
        """With normal effects, or effects by Student's t."""
        with pm.Model() as model:
            mean = pm.Normal("mean", 0, PRIOR_SD)
            tau = pm.HalfNormal("tau", 1)
            if nu is not None:
                effects = pm.StudentT("effects", nu=nu, mu=mean, sigma=tau, shape=self.groups)
            elif centred:
                effects = pm.Normal("effects", mean, tau, shape=self.groups)
            else:
                effects = mean + tau * pm.Normal("z", 0, 1, shape=self.groups)
            pm.Normal("y", effects[self.codes], 1, observed=self.y)
        return model

    def law_of_log_scale(self) -> tuple[np.ndarray, np.ndarray]:
        """Values of the log scale, and their probabilities in the posterior of the normal model."""
        means = self.y.reshape(self.groups, self.records).mean(1)
        log_tau = np.linspace(-14, 2, 20_000)
        tau = np.exp(log_tau)
        own = tau**2 + 1 / self.records
        common = own + self.groups * PRIOR_SD**2
        spread = ((means - means.mean()) ** 2).sum()
        logs = spread / own + (self.groups - 1) * np.log(own)
        logs += self.groups * means.mean() ** 2 / common + np.log(common)
        return log_tau, special.softmax(-0.5 * logs + log_tau - 0.5 * tau**2)


def examined(model: pm.Model) -> tuple[Posterior, Subsample, Center]:
    """What a search for funnels takes."""
    posterior = Posterior(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        center = find_center(posterior, posterior.initial_position)
    return posterior, Subsample(posterior, 2 * posterior.dimension), center


def moments(values: np.ndarray, probabilities: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation."""
    mean = float(probabilities @ values)
    return mean, float(np.sqrt(probabilities @ (values - mean) ** 2))
