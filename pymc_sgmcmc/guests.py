"""What parts that integrate local variables out offer to those below, which never import them.

They are imported by their names when they are asked.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
from pymc.model import Model


class Quadrature(Protocol):
    """The quadrature of a model of groups, whose accuracy depends on the position."""

    def refine(self, points: Sequence[Mapping[str, np.ndarray]]) -> bool:
        """Take more nodes where it is not accurate at points of the posterior, and say whether."""

    def tell(self) -> None:
        """Log how accurate it is where `refine` looked."""


_quadratures: WeakKeyDictionary[Model, Quadrature] = WeakKeyDictionary()


def remember_quadrature(groups: Model, quadrature: Quadrature) -> None:
    """Keep the quadrature of a model of groups, as long as there is this model."""
    _quadratures[groups] = quadrature


def quadrature_of(groups: Model) -> Quadrature | None:
    """The quadrature of a model of groups, None where it has none."""
    return _quadratures.get(groups)


def remedy(model: Model, names: Sequence[str] = ()) -> str | None:
    """The call that integrates some of these local variables out of a model, or None."""
    return pkgutil.resolve_name("pymc_sgmcmc.marginal.search:remedy")(model, names)


def advice_on_groups(model: Model) -> str | None:
    """A better choice than minibatches of rows for effects of groups, or None."""
    return pkgutil.resolve_name("pymc_sgmcmc.marginal.search:advice_on_groups")(model)
