"""Draws beside the posterior that they should be of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pymc as pm
from arviz_stats.base import array_stats
from xarray import DataTree

MEAN_ERROR, SD_ERROR = 0.15, 0.12
"""Largest error of a mean, in standard deviations, and of a standard deviation, relative."""

MONTE_CARLO_ERRORS = 4.5
"""Standard errors of both sides together that an error may be instead."""

TOLD_APART = 0.5
"""Of a standard deviation: draws that are known less well than this agree with nothing."""


@dataclass(frozen=True)
class Law:
    """Means and standard deviations of the variables, flat, with their Monte-Carlo errors."""

    mean: np.ndarray
    sd: np.ndarray
    mean_error: np.ndarray | float = 0.0
    sd_error: np.ndarray | float = 0.0

    @classmethod
    def of(cls, idata: DataTree, names: Sequence[str]) -> Law:
        """That of the draws of a trace."""
        posterior = idata["posterior"]
        shape = (posterior.sizes["chain"], posterior.sizes["draw"], -1)
        values = np.concatenate(
            [np.asarray(posterior[name], dtype=float).reshape(shape) for name in names], axis=-1
        )

        def statistic(function: str, **how: Any) -> np.ndarray:
            compute = getattr(array_stats, function)
            return np.array(
                [
                    compute(one, chain_axis=0, draw_axis=1, **how)
                    for one in np.moveaxis(values, -1, 0)
                ]
            )

        with np.errstate(all="ignore"):
            mean, sd = values.mean((0, 1)), values.std((0, 1))
            return cls(mean, sd, statistic("mcse", method="mean"), statistic("mcse", method="sd"))

    @classmethod
    def by_nuts(cls, model: pm.Model, names: Sequence[str], draws: int = 1000) -> Law:
        """That of the full-data posterior by NUTS."""
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
                compile_kwargs={"mode": "CVM"},
            )
        return cls.of(idata, names)


@dataclass(frozen=True)
class Comparison:
    """Draws that were made, and the law that they should have."""

    found: Law
    expected: Callable[[], Law] | None
    names: tuple[str, ...] = ()

    def disagreement(self) -> str:
        """Where they are furthest apart, empty where they agree."""
        if self.expected is None:
            return f"means {np.array2string(self.found.mean[:4], precision=3)}"
        found, expected = self.found, self.expected()
        bounds = []
        for error, own, others in (
            (MEAN_ERROR, found.mean_error, expected.mean_error),
            (SD_ERROR, found.sd_error, expected.sd_error),
        ):
            chance = MONTE_CARLO_ERRORS * np.hypot(own, others)
            bounds.append(
                np.maximum(error * expected.sd, np.minimum(chance, TOLD_APART * expected.sd))
            )
        with np.errstate(all="ignore"):
            off = np.abs(found.mean - expected.mean) / bounds[0]
            wide = np.abs(found.sd - expected.sd) / bounds[1]
            worst = np.maximum(np.nan_to_num(off, nan=np.inf), np.nan_to_num(wide, nan=np.inf))
        if (worst <= 1).all():
            return ""
        at = int(np.argmax(worst))
        return (
            f"{np.sum(worst > 1)} of {len(worst)} coordinates are off, number {at} most of all: "
            f"mean {found.mean[at]:.4g}, sd {found.sd[at]:.4g}, should be "
            f"{expected.mean[at]:.4g} and {expected.sd[at]:.4g}"
        )

    def __str__(self) -> str:
        return f"means {np.array2string(self.found.mean[:4], precision=3)}"


@dataclass(frozen=True)
class Run:
    """A run still to be made, so that what is said before sampling is told from what comes after.

    Attributes
    ----------
    model : pymc.Model
    step : step method, or sequence of them
    expected : callable, optional
        Gives the law of the free variables `names`, one after the other. None where no draws of
        this step method can be right.
    names : tuple of str, optional
        All free variables where not given.
    settings : dict
        Of `pymc.sample`.
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
        """Sample, and put the draws beside what they should be."""
        names = self.names or tuple(one.name for one in self.model.free_RVs)
        return Comparison(Law.of(self.trace(), names), self.expected, names)
