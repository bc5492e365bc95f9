"""What `gradient` of a step method takes: estimators that are not yet made for a posterior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from inspect import signature
from typing import Any, ClassVar, Protocol

import numpy as np

from pymc_sgmcmc.batching import ANY_NOISE, SCHEMES, Batching
from pymc_sgmcmc.checks import check_call, described, one_of, or_none, whole_number
from pymc_sgmcmc.gradient_estimators import (
    SECOND_ORDER,
    ControlVariateGradient,
    GradientEstimator,
    PlainGradient,
    SAGAGradient,
    SVRGGradient,
)
from pymc_sgmcmc.gradient_estimators.center_difference import (
    CenterDifference,
    find_center_difference,
)
from pymc_sgmcmc.gradient_estimators.minibatches import batching_of
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning import Center, RowNoise


@dataclass(frozen=True)
class JointCenter:
    """A centre of the position, and values of the variables outside the position.

    Attributes
    ----------
    center : Center
    others : mapping of str to numpy.ndarray
        Values at the centre of the variables outside the position.
    joint_draws : list of mappings or None
        Points of the Gaussian approximation of all continuous variables of the model, where the
        position has only some of them.
    """

    center: Center
    others: Mapping[str, np.ndarray]
    joint_draws: list[dict[str, np.ndarray]] | None = None


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What an estimator is made of.

    Attributes
    ----------
    posterior : Posterior
    batch_size : int
    joint_center : JointCenter or None
        The centre, where the estimator has control variates there or it is known.
    order : int
        Order of control variates at the centre, which may be less than asked for.
    kept : numpy.ndarray of int, optional
        Numbers of the rows that every estimate evaluates.
    static : bool
        Whether shapes are known, as JAX needs.
    noise_share : float
        As of `make_batching`.
    """

    posterior: Posterior
    batch_size: int
    joint_center: JointCenter | None
    order: int = 0
    kept: np.ndarray | None = None
    static: bool = False
    noise_share: float = ANY_NOISE

    def scheme(self, name: str, difference: CenterDifference | None = None) -> Batching:
        """Minibatch scheme by name, over the data and the columns of a difference."""
        return batching_of(
            self.posterior,
            name,
            self.batch_size,
            difference,
            static=self.static,
            excluded=self.kept,
            noise_share=self.noise_share,
        )


class SampledVariables(Protocol):
    """Variables that an estimator samples itself, and the posterior of the others.

    Attributes
    ----------
    settings : Settings
        Those of the step method, for the model without these variables.
    searches_center : bool
        Whether a centre of the others can be searched for.
    """

    settings: Any
    searches_center: bool

    def posterior(self) -> Posterior:
        """The posterior of the other variables."""

    def make(self, parts: Parts) -> GradientEstimator:
        """The estimator."""

    def noise(self, center: Center) -> RowNoise:
        """Noise of its gradients around a centre."""

    def center_at(self, posterior: Posterior, position: np.ndarray) -> Center:
        """A given centre, where none can be searched for."""

    def lag(self, position: np.ndarray, blocks: np.ndarray) -> str | None:
        """Warning where the variables lag behind the position, otherwise None."""


class Estimator:
    """A gradient estimator by its settings, for any posterior.

    Attributes
    ----------
    order : int
        Order of its control variates at the centre, 0 without them.
    reduces_variance : bool
        Whether the noise vanishes as the posterior contracts.
    """

    order: ClassVar[int] = 0
    reduces_variance: ClassVar[bool] = True

    def __new__(cls, *args: Any, **settings: Any):
        """Check the names of the settings.

        Raises
        ------
        TypeError
        """
        check_call(cls.__name__, signature(cls), args, settings)
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        """Arguments of `__new__` for a copy."""
        return (), vars(self)

    def sampled(self, settings: Any) -> SampledVariables | None:
        """Variables of the model of these settings that the estimator samples, None without any."""
        return None

    def make(self, parts: Parts) -> GradientEstimator:
        """The estimator for a posterior, where it samples no variables."""
        raise NotImplementedError


@dataclass(frozen=True)
class OfMinibatches(Estimator):
    """An estimator from minibatches of rows.

    Parameters
    ----------
    batching : {"shuffle", "replace"}
        Windows of rows in random order, without replacement, or independent rows.

    Raises
    ------
    ValueError
        For another scheme.
    """

    _: KW_ONLY
    batching: str = "shuffle"

    def __post_init__(self):
        or_none(one_of, "batching", self.batching, tuple(SCHEMES))


@dataclass(frozen=True)
class Plain(OfMinibatches):
    """The scaled gradient of a minibatch, see `PlainGradient`; its name is "plain"."""

    reduces_variance: ClassVar[bool] = False

    def make(self, parts: Parts) -> GradientEstimator:
        """The estimator for a posterior."""
        return PlainGradient(parts.posterior, parts.scheme(self.batching))


@dataclass(frozen=True)
class FirstOrder(OfMinibatches):
    """Control variates at the centre, see `ControlVariateGradient`; its name is "cv".

    Examples
    --------
    >>> from pymc_sgmcmc import FirstOrder
    >>> FirstOrder(batching="replace")
    FirstOrder(batching='replace')
    """

    order: ClassVar[int] = 1

    def make(self, parts: Parts) -> GradientEstimator:
        """The estimator for a posterior.

        Raises
        ------
        ValueError
            Where there is no centre.
        """
        posterior = parts.posterior
        if parts.joint_center is None:
            raise ValueError(f"`{type(self).__name__}` needs a centre.")
        center = parts.joint_center.center
        difference = center.difference if parts.order == 2 else None
        if difference is None:
            difference = find_center_difference(
                posterior, center.position, parts.joint_center.others, order=parts.order
            )
        if parts.order == 2 and center.of_rows is not None:
            difference = difference.with_curvature(center.of_rows)
        of_rows = center.likelihood_gradient
        if posterior.coordinates is not None:
            of_rows = posterior.gradient_of_rows(posterior.position_of_rows(center.position))
        return ControlVariateGradient(
            posterior, parts.scheme(self.batching, difference), difference, of_rows, parts.kept
        )


@dataclass(frozen=True)
class SecondOrder(FirstOrder):
    """Control variates at the centre with the derivatives there; its name is "second_order".

    Where the curvature is not dense they are of first order.
    """

    order: ClassVar[int] = 2


@dataclass(frozen=True)
class SVRG(OfMinibatches):
    """Control variates at an earlier position of the chain, see `SVRGGradient`; "svrg" by name.

    Parameters
    ----------
    refresh : int, optional
        Number of transitions between two references, rounded to whole draws. Default: one epoch,
        N / n.
    batching : {"shuffle", "replace"}
        As of `FirstOrder`.

    Raises
    ------
    ValueError
        Where `refresh` is not a whole number of transitions, at least 1.

    Examples
    --------
    >>> from pymc_sgmcmc import SVRG
    >>> SVRG(refresh=500)
    SVRG(batching='shuffle', refresh=500)
    """

    refresh: int | None = None

    def __post_init__(self):
        super().__post_init__()
        or_none(whole_number, "refresh", self.refresh, 1, " of transitions")

    def make(self, parts: Parts) -> GradientEstimator:
        """The estimator for a posterior."""
        return SVRGGradient(
            parts.posterior,
            parts.batch_size,
            batching=self.batching,
            refresh=self.refresh,
            static=parts.static,
            noise_share=parts.noise_share,
        )


@dataclass(frozen=True)
class SAGA(OfMinibatches):
    """A stored gradient for each row, see `SAGAGradient`; its name is "saga".

    Parameters
    ----------
    batching : {"shuffle", "replace"}, optional
        Default: "replace", unless a minibatch has all rows.
    """

    batching: str | None = None  # type: ignore[assignment]

    def make(self, parts: Parts) -> GradientEstimator:
        """The estimator for a posterior.

        Raises
        ------
        ValueError
            Where it should run on JAX.
        """
        if parts.static:
            raise ValueError(
                '`gradient="saga"` does not run on JAX, which would copy its memory at each call. '
                'Use `compile_kwargs={"mode": "NUMBA"}`, or `gradient="svrg"`.'
            )
        return SAGAGradient(
            parts.posterior,
            parts.batch_size,
            batching=self.batching,
            noise_share=parts.noise_share,
        )


ESTIMATORS: Mapping[str, type[OfMinibatches]] = {
    "plain": Plain,
    "cv": FirstOrder,
    SECOND_ORDER: SecondOrder,
    "svrg": SVRG,
    "saga": SAGA,
}
"""Estimators by the names that stand for them."""

Gradient = str | Estimator | GradientEstimator


def estimator_of(gradient: Any) -> Estimator | GradientEstimator:
    """The estimator that the setting `gradient` stands for.

    Raises
    ------
    ValueError
    """
    if isinstance(gradient, Estimator | GradientEstimator):
        return gradient
    if isinstance(gradient, str) and gradient in ESTIMATORS:
        return ESTIMATORS[gradient]()
    names = ", ".join(map(repr, ESTIMATORS))
    raise ValueError(
        f"`gradient` should be one of {names}, or an estimator such as `SVRG(refresh=500)`, but "
        f"got {described(gradient)}."
    )
