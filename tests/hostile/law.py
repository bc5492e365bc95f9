"""Comparison of draws with the posterior that they should have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pymc as pm
from arviz_stats.base import array_stats
from xarray import DataTree

MEAN_ERROR, SD_ERROR = 0.15, 0.12
"""Draws agree where the error of a mean, in standard deviations, and the relative error of a
standard deviation are at most these."""

MONTE_CARLO_ERRORS = 4.5
"""Draws also agree where an error is at most this many standard errors of both sides together."""

TOLD_APART = 0.5
"""An error above this part of a standard deviation is never accepted as Monte Carlo error."""


@dataclass(frozen=True)
class Law:
    """Means and standard deviations of the variables, flat, with their Monte Carlo errors."""

    mean: np.ndarray
    sd: np.ndarray
    mean_error: np.ndarray | float = 0.0
    sd_error: np.ndarray | float = 0.0

    @classmethod
    def of(cls, idata: DataTree, names: Sequence[str]) -> Law:
        """Law of the draws of a trace."""
        posterior = idata["posterior"]
        shape = (posterior.sizes["chain"], posterior.sizes["draw"], -1)
        values = np.concatenate(
            [np.asarray(posterior[name], dtype=float).reshape(shape) for name in names], axis=-1
        )

        def statistic(function: str, **how: Any) -> np.ndarray:
            compute = getattr(array_stats, function)
            return np.array(
                [
                    compute(coordinate, chain_axis=0, draw_axis=1, **how)
                    for coordinate in np.moveaxis(values, -1, 0)
                ]
            )

        with np.errstate(all="ignore"):
            mean, sd = values.mean((0, 1)), values.std((0, 1))
            return cls(mean, sd, statistic("mcse", method="mean"), statistic("mcse", method="sd"))

    @classmethod
    def by_nuts(cls, model: pm.Model, names: Sequence[str], draws: int = 1000) -> Law:
        """Law of the full-data posterior by NUTS."""
        with model:
            idata = pm.sample(
                draws=draws,
                tune=1000,
                chains=2,
                cores=1,
                random_seed=2017,
                progressbar=False,
                quiet=True,
                compute_convergence_checks=False,
                compile_kwargs={"mode": "NUMBA"},
            )
        return cls.of(idata, names)


@dataclass(frozen=True)
class Comparison:
    """The law of draws, and the law that they should have."""

    actual: Law
    expected: Callable[[], Law] | None
    names: tuple[str, ...] = ()

    def disagreement(self) -> str:
        """Description of the largest difference, empty where the laws agree."""
        if self.expected is None:
            return f"means {np.array2string(self.actual.mean[:4], precision=3)}"
        actual, expected = self.actual, self.expected()
        bounds = []
        for error, own, others in (
            (MEAN_ERROR, actual.mean_error, expected.mean_error),
            (SD_ERROR, actual.sd_error, expected.sd_error),
        ):
            chance = MONTE_CARLO_ERRORS * np.hypot(own, others)
            bounds.append(
                np.maximum(error * expected.sd, np.minimum(chance, TOLD_APART * expected.sd))
            )
        with np.errstate(all="ignore"):
            off = np.abs(actual.mean - expected.mean) / bounds[0]
            wide = np.abs(actual.sd - expected.sd) / bounds[1]
            worst = np.maximum(np.nan_to_num(off, nan=np.inf), np.nan_to_num(wide, nan=np.inf))
        if (worst <= 1).all():
            return ""
        at = int(np.argmax(worst))
        return (
            f"{np.sum(worst > 1)} of {len(worst)} coordinates are off, number {at} most of all: "
            f"mean {actual.mean[at]:.4g}, sd {actual.sd[at]:.4g}, should be "
            f"{expected.mean[at]:.4g} and {expected.sd[at]:.4g}"
        )

    def __str__(self) -> str:
        return f"means {np.array2string(self.actual.mean[:4], precision=3)}"


@dataclass(frozen=True)
class Run:
    """A run that is not made yet, so that messages before sampling can be told from later ones.

    Attributes
    ----------
    model : pymc.Model
    step : step method, or sequence of them
    expected : callable, optional
        Function that gives the law of the free variables `names`, one after the other. None where
        no draws of this step method can be right.
    names : tuple of str, optional
        Names of free variables. Default: all of them.
    settings : dict
        Arguments of `pymc.sample`.
    """

    model: pm.Model
    step: Any
    expected: Callable[[], Law] | None = None
    names: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def trace(self) -> DataTree:
        """Sample."""
        settings = {"draws": 500, "tune": 200, "chains": 2, "random_seed": 1} | self.settings
        with self.model:
            return pm.sample(step=self.step, cores=1, progressbar=False, **settings)

    def sample(self) -> Comparison:
        """Sample, and compare the draws with the law that they should have."""
        names = self.names or tuple(variable.name for variable in self.model.free_RVs)
        return Comparison(Law.of(self.trace(), names), self.expected, names)
