"""The common interface of gradient estimators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.batching import Batching


class Memory(ABC):
    """The memory of an estimator from one transition to the next.

    It is too large to be copied in each transition, so it is stored in shared variables that the
    compiled transitions change in place. Its values belong to the chain.

    Attributes
    ----------
    variables : tuple of SharedVariable
    noise_size : int
        Standard normal numbers that an estimate takes, beside those of the dynamics.
    """

    variables: tuple[SharedVariable, ...]
    noise_size: int = 0

    @abstractmethod
    def begin(self, position: np.ndarray) -> None:
        """Set the variables for the start of a chain."""

    @abstractmethod
    def read(self) -> tuple[np.ndarray, ...]:
        """Copies from which a chain resumes. They do not depend on the order of the rows."""

    @abstractmethod
    def write(self, values: tuple[np.ndarray, ...]) -> None:
        """Set the variables from the arrays that `read` returned."""

    def settle(self) -> None:  # noqa: B027  # nothing accumulates by default
        """Remove accumulated rounding errors, when the rows get a new order."""

    def point(self) -> Mapping[str, np.ndarray]:
        """Values of variables of the model that the memory holds, by name."""
        return {}

    def arranged(self, indices: np.ndarray) -> np.ndarray:
        """Indices of minibatches in the form in which `estimate` takes them."""
        return indices

    @abstractmethod
    def estimate(
        self,
        position: TensorVariable,
        index: TensorVariable,
        values: tuple[TensorVariable, ...],
        remember: TensorVariable,
        noise: TensorVariable | None = None,
    ) -> tuple[TensorVariable, tuple[TensorVariable, ...]]:
        """Gradient estimate from given values of the variables, and their values afterwards.

        Parameters
        ----------
        position : TensorVariable, shape (d,)
        index : TensorVariable
            Index of one minibatch, arranged.
        values : tuple of TensorVariable
            Values of `variables`.
        remember : TensorVariable
            A boolean scalar. Where it is false, the values do not change.
        noise : TensorVariable, shape (noise_size,), optional
            Standard normal numbers, where the memory takes some.
        """


class Reference(ABC):
    """The reference position of an estimator, which follows the chain from time to time.

    Attributes
    ----------
    refresh : int
        Transitions between two references, rounded to whole draws.
    """

    refresh: int

    @abstractmethod
    def at(self, position: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays of the reference that belong to a position."""

    @abstractmethod
    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set the shared variables of the estimator."""


class Target(Protocol):
    """What transitions take of the posterior of an estimator.

    Attributes
    ----------
    dtype : str
    dimension : int
    row_elements : int
        Numbers of a row of the data.
    """

    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def dimension(self) -> int: ...  # noqa: D102
    @property
    def row_elements(self) -> int: ...  # noqa: D102


class GradientEstimator[Of: Target](ABC):
    r"""Symbolic estimate of the gradient of the log posterior.

    Attributes
    ----------
    name : str
    reduces_variance : bool
        Whether the noise vanishes as the posterior contracts, as with control variates.
    with_less_noise : str
        What a user can write in its place where it does not.
    reference : Reference or None
        Reference that follows the chain from time to time.
    kept : numpy.ndarray of int
        Numbers of the rows that every estimate evaluates, beside a minibatch of the others.
    memory : Memory or None
        Memory that each transition changes. Where it is None the estimate is a function of position
        and index alone, so many draws can be computed ahead.
    """

    name: str
    reduces_variance: bool = False
    with_less_noise: str = '`gradient="cv"`'
    reference: Reference | None = None
    memory: Memory | None = None
    kept: np.ndarray = np.empty(0, dtype=np.int64)

    def __init__(self, posterior: Of, batching: Batching):
        self.posterior = posterior
        self.batching = batching
        scale = np.asarray(batching.n_rows / batching.batch_size, dtype=posterior.dtype)
        self._scale = pt.constant(scale) if batching.static else pytensor.shared(scale, "N_over_n")

    @property
    def recorded(self) -> Mapping[str, Any]:
        """Settings of the estimator that a trace has, beside its name."""
        return {}

    @property
    def kept_rows(self) -> int:
        """Number of the rows that every estimate evaluates."""
        return len(self.kept)

    @property
    def remedy(self) -> str:
        """Advice for noisy gradients beside more rows a minibatch."""
        if self.reduces_variance:
            return "or fewer parameters that only a few rows inform"
        return f"or {self.with_less_noise}"

    @abstractmethod
    def __call__(self, position: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Gradient estimate, shape (d,), at a position from the rows of an index."""

    @property
    def noise_factors(self) -> tuple[float, float]:
        r"""Factors a and b of a bound on the covariance of the estimate at stationarity.

        :math:`V \preceq a V_0 + b H`, with :math:`V_0` that of the plain gradient at the mode
        or, where the estimator reduces the variance, of control variates at the mode, and H
        the curvature.
        """
        return 1.0, 0.0
