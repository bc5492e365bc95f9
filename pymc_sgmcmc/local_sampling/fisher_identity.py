"""The gradient of a marginal log density from draws of local variables, by Fisher's identity."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.batching import Batching
from pymc_sgmcmc.gradient_estimators.base import GradientEstimator, Memory
from pymc_sgmcmc.local_sampling.local_transitions import LocalTransitions
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.record import LOCAL, LOCAL_TRANSITIONS


class FisherGradient(GradientEstimator, Memory):
    r"""The minibatch gradient at draws of the local variables of its groups.

    .. math:: \hat\nabla(\theta) = \nabla \log p(\theta) + \frac{G}{n} \sum_{g \in S}
              \nabla_\theta \log p(y_g, u_g \mid \theta), \qquad u_g \leftarrow K_\theta^k u_g

    where :math:`K_\theta^k` are k transitions that leave :math:`p(u_g \mid y_g, \theta)` invariant.
    They begin where the last visit to the group ended, before the gradient is taken.

    **Law.** With draws from :math:`p(u_g \mid y_g, \theta)` itself the estimate is unbiased, by
    Fisher's identity. A visit forgets the :math:`\theta` of the last one but for :math:`\rho^k`,
    with :math:`\rho` the autocorrelation of the transitions. The draw lags behind by that part, so
    the error of the law falls geometrically in k. The noise within groups does not vanish where a
    minibatch has all groups.

    **Control variates.** A second set of local variables follows the same noise at a centre
    :math:`\hat\theta`. Its gradients there have a known sum over all groups, and their difference
    to the others vanishes with the distance from the centre.

    Parameters
    ----------
    posterior : Posterior
        Its rows are the numbers of the groups.
    batching : Batching
    local : LocalTransitions
    blocks : numpy.ndarray, shape (G, q)
        Local variables of all groups at the start of a chain.
    at_center : tuple of numpy.ndarray, optional
        A position :math:`\hat\theta` and the gradient of the marginal log likelihood there, for
        control variates.
    """

    name = "fisher"
    with_less_noise = "`LocalSampling(control_variates=True)`"

    def __init__(
        self,
        posterior: Posterior,
        batching: Batching,
        local: LocalTransitions,
        blocks: np.ndarray,
        at_center: tuple[np.ndarray, np.ndarray] | None = None,
    ):
        super().__init__(posterior, batching)
        self.local = local
        self.reduces_variance = at_center is not None
        self._first = np.array(blocks, dtype=local.complete.dtype)
        self.noise_size = batching.batch_size * local.transitions * local.noise_size
        self._center = self._total = None
        names = ["local_blocks"]
        if at_center is not None:
            names.append("local_blocks_at_center")
            arrays = [np.asarray(array, dtype=posterior.dtype) for array in at_center]
            self._center, self._total = (
                pytensor.shared(array, name, shape=array.shape)
                for array, name in zip(arrays, ("center", "gradient_at_center"), strict=True)
            )
        self.variables = tuple(
            pytensor.shared(self._first.copy(), name, shape=(None, blocks.shape[1]))
            for name in names
        )
        self.memory = self

    @property
    def recorded(self) -> Mapping[str, Any]:
        """Names and transitions of the local variables."""
        names = json.dumps(self.local.complete.names)
        return {LOCAL: names, LOCAL_TRANSITIONS: self.local.transitions}

    def __call__(self, position: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Gradient estimate, shape (d,), at the present local variables."""
        numbers = self.batching.rows(index)[0]
        return self.gradient(position, numbers, [table[numbers] for table in self.variables])

    def begin(self, position: np.ndarray) -> None:
        """Blocks as given."""
        self.write((self._first,) * len(self.variables))

    def read(self) -> tuple[np.ndarray, ...]:
        """Copies of the blocks."""
        return tuple(variable.get_value() for variable in self.variables)

    def write(self, values: tuple[np.ndarray, ...]) -> None:
        """Set the blocks."""
        for variable, blocks in zip(self.variables, values, strict=True):
            variable.set_value(np.array(blocks), borrow=True)

    def point(self) -> Mapping[str, np.ndarray]:
        """Values of the local value variables."""
        return self.local.complete.point(self.variables[0].get_value(borrow=True))

    def estimate(
        self,
        position: TensorVariable,
        index: TensorVariable,
        values: tuple[TensorVariable, ...],
        remember: TensorVariable,
        noise: TensorVariable | None = None,
    ) -> tuple[TensorVariable, tuple[TensorVariable, ...]]:
        """Gradient estimate at new local variables, and the tables with these."""
        assert noise is not None
        numbers = self.batching.rows(index)[0]
        shape = (self.local.transitions, numbers.shape[0], self.local.noise_size)
        standard = noise.reshape(shape)
        # The same noise at the centre makes the difference of both gradients small.
        positions = [position] if self._center is None else [position, self._center]
        before = [table[numbers] for table in values]
        after = [
            self.local.run(at, numbers, block, standard)
            for at, block in zip(positions, before, strict=True)
        ]
        tables = tuple(
            pt.set_subtensor(table[numbers], pt.switch(remember, new, old))
            for table, new, old in zip(values, after, before, strict=True)
        )
        return self.gradient(position, numbers, after), tables

    def gradient(
        self, position: TensorVariable, numbers: TensorVariable, blocks: Sequence[TensorVariable]
    ) -> TensorVariable:
        """Gradient estimate at given local variables of the groups with these numbers."""
        complete, dtype = self.local.complete, self.posterior.dtype
        gradient = complete.gradient(position, numbers, blocks[0])
        whole = self.posterior.prior_gradient(position)
        if self._center is not None:
            gradient = gradient - complete.gradient(self._center, numbers, blocks[1])
            whole = whole + self._total
        return whole + self._scale * gradient.astype(dtype)
