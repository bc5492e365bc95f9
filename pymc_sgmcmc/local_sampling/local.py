"""Local variables that a step method samples inside of its gradient estimator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from pytensor.graph.basic import Variable
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.batching import make_batching
from pymc_sgmcmc.checks import or_none, quoted, truth_value, whole_number
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.local_sampling.complete import CompleteData
from pymc_sgmcmc.local_sampling.fisher_identity import FisherGradient
from pymc_sgmcmc.local_sampling.local_transitions import GivenTransitions, LocalState
from pymc_sgmcmc.local_sampling.set_up import (
    SLOW,
    GradientDraws,
    LocalSetup,
    ModeGradients,
    given_setup,
    lag_message,
    langevin_setup,
)
from pymc_sgmcmc.marginal.marginalize import names_of
from pymc_sgmcmc.marginal.quadrature import LARGEST_LAPLACE
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.sources import RowSource
from pymc_sgmcmc.step_methods.estimators import Estimator, Parts
from pymc_sgmcmc.step_methods.settings import Settings
from pymc_sgmcmc.tuning import Center, RowNoise

DEFAULT_TRANSITIONS = 5
"""A visit makes this many transitions of a user's own where their number is not given."""


@dataclass(frozen=True, eq=False)
class LocalSampling(Estimator):
    r"""An estimator that samples local variables itself, by Fisher's identity.

    See `FisherGradient`. The rows are then the groups, and the chain moves the other variables.

    Parameters
    ----------
    names : str, variable, or a sequence of these
        Free variables with entries for groups, as in `marginalize`, which serves better for up to
        three quantities a group.
    transitions : int, optional
        Transitions of the local variables of a group whenever it is in a minibatch. Default: as
        many as leave an autocorrelation of 0.05, or 5 for a transition of your own.
    transition : callable, optional
        A transition of your own that leaves :math:`p(u_g \mid y_g, \theta)` invariant, such as a
        Gibbs sampler: a function of a `LocalState` that returns the next block. Default:
        Metropolis-adjusted Langevin transitions with the scale of each group.
    noise_size : int, optional
        Standard normal numbers that your transition takes for a group.
    control_variates : bool
        Whether gradients are differences from those at the centre. The centre is searched for up to
        six local quantities a group.

    Raises
    ------
    TypeError, ValueError
        For invalid settings.

    Examples
    --------
    Proposals from the prior of a standardised effect:

    >>> import pytensor.tensor as pt
    >>> def from_prior(state):
    ...     proposal = state.noise[:, :1]
    ...     change = state.log_density(proposal) + proposal[:, 0] ** 2 / 2
    ...     change -= state.log_density(state.block) + state.block[:, 0] ** 2 / 2
    ...     uniform = 0.5 * pt.erfc(state.noise[:, 1] / 2**0.5)
    ...     return pt.switch((pt.log(uniform) < change)[:, None], proposal, state.block)
    >>> local = LocalSampling("effect", transitions=10, transition=from_prior, noise_size=2)

    A step method takes it as ``gradient``, as in ``SGLDCV(gradient=local)``.
    """

    names: str | TensorVariable | Sequence[str | TensorVariable]
    transitions: int | None = None
    transition: Callable[[LocalState], TensorVariable] | None = None
    noise_size: int | None = None
    control_variates: bool = True

    def __post_init__(self):
        names = self.names
        listed = names if isinstance(names, Sequence) and not isinstance(names, str) else [names]
        if not listed or not all(isinstance(entry, str | Variable) for entry in listed):
            raise TypeError(f"`names` should name local variables, but got {names!r}.")
        truth_value("control_variates", self.control_variates)
        or_none(whole_number, "transitions", self.transitions, 1)
        or_none(whole_number, "noise_size", self.noise_size, 1)
        if (self.transition is None) != (self.noise_size is None):
            raise ValueError(
                "`transition` and `noise_size` belong together, but only one of them is given. "
                "`noise_size` is the number of standard normal numbers that it takes for a group."
            )

    @property
    def order(self) -> int:  # type: ignore[override]
        """Order of the control variates at the centre."""
        return int(self.control_variates)

    @property
    def reduces_variance(self) -> bool:  # type: ignore[override]
        """Whether there are control variates."""
        return self.control_variates

    def sampled(self, settings: Settings) -> LocalVariables:
        """The local variables of a model, and the posterior of the others."""
        return LocalVariables(self, settings)


class GroupPosterior(Posterior):
    """The posterior of the global variables, with gradients of single groups at their modes."""

    def __init__(self, complete: CompleteData, settings: Settings):
        super().__init__(settings.model, rows=settings.rows)
        self._complete, self._mode_gradients = complete, ModeGradients(complete)

    @property
    def rows_evaluated(self) -> int:
        """How many log densities or gradients of groups were computed, also by visits to them."""
        return super().rows_evaluated + self._complete.groups_evaluated

    def changed_data(self) -> str | None:
        """Name of data that have changed, also of the joint model, or None."""
        return super().changed_data() or self._complete.changed_data()

    def row_gradients(self, position: np.ndarray, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Gradients of the log likelihood of single groups, shape (groups, d)."""
        return self._mode_gradients(self._as_position(position), rows[0])


class LocalVariables:
    """The local variables of a step method: estimator, noise, and settings of the other ones.

    Parameters
    ----------
    sampling : LocalSampling
    settings : Settings

    Raises
    ------
    ValueError
        For settings that do not go with local variables.
    """

    def __init__(self, sampling: LocalSampling, settings: Settings):
        _check(settings)
        self.sampling = sampling
        computed = settings.step_size is None or settings.batch_size is None
        self.complete = CompleteData(
            settings.model,
            names_of(sampling.names),
            laplace_wanted=computed or sampling.control_variates,
        )
        self.searches_center = self.complete.has_laplace
        needs_search = sampling.control_variates and settings.center is None
        if not self.searches_center and (computed or needs_search):
            raise ValueError(
                f"A group has {self.complete.block_size} local quantities, and step size, batch "
                f"size and centre are computed for at most {LARGEST_LAPLACE}. Give `step_size`, "
                '`preconditioner="identity"` and `batch_size`, and for control variates a `center`.'
            )
        # Other observed variables are no rows, even with as many entries as there are groups.
        self.settings = copy(settings)
        self.settings.model, self.settings.rows = self.complete.groups, self.complete.rows

    def posterior(self) -> Posterior:
        """The posterior of the global variables, whose rows are the groups and nothing else.

        Raises
        ------
        ModelError
        """
        posterior = GroupPosterior(self.complete, self.settings)
        others = [name for name in posterior.row_terms if name != self.complete.rows]
        if others:
            raise ModelError(
                f"{quoted(others)} should not have data with one entry for each of the "
                f"{self.complete.n_groups} groups. Write it as an observed `pm.CustomDist`."
            )
        return posterior

    def make(self, parts: Parts) -> FisherGradient:
        """Gradient estimator, scaled at the centre or at the initial position."""
        posterior = parts.posterior
        center = None if parts.joint_center is None else parts.joint_center.center
        setup = self._setup(posterior.initial_position if center is None else center.position)
        batching = make_batching("replace", posterior.data, parts.batch_size)
        at_center = None
        if self.sampling.control_variates:
            assert center is not None
            gradient = center.likelihood_gradient
            if self.searches_center:
                gradient = self._draws(center.position).mean_gradient(center)
            at_center = center.position, gradient
        return FisherGradient(posterior, batching, setup.transitions, setup.blocks, at_center)

    def noise(self, center: Center) -> RowNoise:
        """Noise of the gradients of groups around the centre."""
        draws = self._draws(center.position)
        return draws.noise(center, control_variate=self.sampling.control_variates)

    def center_at(self, posterior: Posterior, position: np.ndarray) -> Center:
        """A given centre, where there is no Laplace's approximation."""
        _, prior_gradient = posterior.log_prior_and_gradient(position)
        return self._draws(position).center_at(position, prior_gradient)

    def lag(self, position: np.ndarray, blocks: np.ndarray) -> str | None:
        """Warning where visits at a position leave much of their start, otherwise None."""
        remaining = self._draws(position).remaining(position, blocks)
        return lag_message(self.complete, remaining) if remaining > SLOW else None

    def _draws(self, position: np.ndarray) -> GradientDraws:
        if self._of_center is None:
            self._of_center = GradientDraws(self.complete, self._setup(position))
        return self._of_center

    _of_center: GradientDraws | None = None

    def _setup(self, position: np.ndarray) -> LocalSetup:
        if self._scaled is None:
            self._scaled = self._make_setup(position)
        return self._scaled

    _scaled: LocalSetup | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Everything but compiled functions, which only the set-up uses."""
        return {**vars(self), "_of_center": None}

    def _make_setup(self, position: np.ndarray) -> LocalSetup:
        sampling, complete = self.sampling, self.complete
        if sampling.transition is None:
            return langevin_setup(complete, position, sampling.transitions)
        assert sampling.noise_size is not None
        count = sampling.transitions or DEFAULT_TRANSITIONS
        transitions = GivenTransitions(complete, sampling.transition, sampling.noise_size, count)
        return given_setup(complete, transitions, position)


def _check(settings: Settings) -> None:
    """Refuse settings that do not go with local variables.

    Raises
    ------
    ValueError
    """
    if isinstance(settings.rows, RowSource):
        raise ValueError(
            "`LocalSampling` samples the local variables of groups whose records are in memory, "
            "but `rows` are in a source. Leave one of them out."
        )
    for name in ("vars", "rows"):
        if getattr(settings, name) is not None:
            raise ValueError(
                f"`LocalSampling` takes groups as rows and moves all variables, so leave `{name}` "
                "out."
            )
    if settings.on_jax:
        raise ValueError(
            "`LocalSampling` does not run on JAX, which would copy the local variables at each "
            'call. Use `compile_kwargs={"mode": "NUMBA"}`.'
        )
