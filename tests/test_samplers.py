"""What every sampler must satisfy, with every gradient estimator.

A new sampler is one `Sampler` in `SAMPLERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pymc_sgmcmc import SGLD
from tests.exact_law import compiled_law, exact_noise_operator, fixed_point
from tests.linear_gaussian import LinearGaussian

CVM = {"mode": "CVM"}


@dataclass(frozen=True)
class Sampler:
    """A sampler with its own exact law.

    Attributes
    ----------
    step_class : type
    settings : dict
        Beside the common ones, for a posterior whose curvature is about 1.
    law : callable
        Of (H, noise operator, step size): the exact stationary covariance of the position.
    """

    name: str
    step_class: type
    law: Callable[..., np.ndarray]
    settings: dict[str, Any] = field(default_factory=dict)

    def make(self, model, **settings):
        return self.step_class(model=model, compile_kwargs=CVM, **{**self.settings, **settings})


def sgld_law(H, noise, h):
    """L = F L F' + h I + h^2/4 V(L)."""
    F = np.eye(len(H)) - h / 2 * H
    return fixed_point(
        lambda L: F @ L @ F.T + h * np.eye(len(H)) + h**2 / 4 * noise(L), np.linalg.inv(H)
    )


SAMPLERS = [
    Sampler("SGLD", SGLD, sgld_law, {"step_size": 0.3}),
]
