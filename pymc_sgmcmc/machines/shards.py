"""Models of shards: parts of the rows, with the prior to the power of one over their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.model import Model
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.graphs import rebuild

POSITION = "position"
"""The only free variable of a shard's model, the unconstrained position, has this name."""

COORDINATE = "coordinate"
"""This is its dimension. Its coordinates are the labels of the position."""


def deal_out(n_rows: int, parts: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Random disjoint parts of the numbers of all rows, whose sizes differ by one at most."""
    return [np.sort(part) for part in np.array_split(rng.permutation(n_rows), parts)]


@dataclass(frozen=True, eq=False)
class ShardDensity:
    r"""The log density of a shard, on the unconstrained space of the whole model.

    .. math:: \log \pi_s(\theta) = \tfrac{1}{S} \log p(\theta)
        + \sum_{i \in s} \log p(x_i \mid \theta)

    The prior part has the Jacobians of all transforms, and terms of the model without rows. So the
    sum over the shards is the log posterior of the whole model, whatever its transforms are.

    It has graphs and no rows, so that it can be sent to where the rows of a shard are. PyMC's
    models cannot: another process does not know the log densities of their variables.

    Attributes
    ----------
    parts : int
        The number of shards S.
    position, rows, length : TensorVariable, and a list of these
        The inputs of the graphs: the position, the rows of each array of data, and their number.
    log_prior, log_likelihood : TensorVariable
        The graphs, of the whole prior and of the rows.
    initial_position : numpy.ndarray, shape (d,)
    labels : tuple of str
        Labels of the coordinates.
    """

    parts: int
    position: TensorVariable
    rows: list[TensorVariable]
    length: TensorVariable
    log_prior: TensorVariable
    log_likelihood: TensorVariable
    initial_position: np.ndarray
    labels: tuple[str, ...]

    @classmethod
    def of(cls, posterior: Posterior, parts: int) -> ShardDensity:
        """The density of the shards of a posterior."""
        position, rows = posterior.position_and_rows()
        length = pt.lscalar("length")
        return cls(
            parts=parts,
            position=position,
            rows=rows,
            length=length,
            log_prior=posterior.prior_log_density(position),
            log_likelihood=posterior.rows_log_density(position, rows, length),
            initial_position=posterior.initial_position,
            labels=posterior.labels,
        )

    def model(self, rows: Sequence[np.ndarray]) -> Model:
        """The model of the shard with these rows, one array for each array of data.

        It has one free variable, the position, and one observed variable, with a term a row.
        """
        length = len(rows[0])

        def log_tempered_prior(value: TensorVariable, _: TensorVariable) -> TensorVariable:
            return rebuild([self.log_prior], {self.position: value})[0] / self.parts

        def log_likelihood(
            value: TensorVariable, position: TensorVariable, *rows: TensorVariable
        ) -> TensorVariable:
            given = dict(zip(self.rows, rows, strict=True))
            given |= {self.position: position, self.length: pt.constant(length, dtype="int64")}
            return rebuild([self.log_likelihood], given)[0]

        axes = [
            ",".join(["rows", *(f"leaf{number}axis{axis}" for axis in range(1, values.ndim))])
            for number, values in enumerate(rows)
        ]
        with pm.Model(coords={COORDINATE: self.labels}) as model:
            position = pm.CustomDist(
                POSITION,
                np.zeros(len(self.labels)),
                logp=log_tempered_prior,
                signature="(coordinate)->(coordinate)",
                dtype=self.initial_position.dtype.name,
                dims=COORDINATE,
                initval=self.initial_position,
            )
            data = [pm.Data(f"rows_{number}", values) for number, values in enumerate(rows)]
            pm.CustomDist(
                "likelihood",
                position,
                *data,
                logp=log_likelihood,
                signature=f"(coordinate),{','.join(f'({names})' for names in axes)}->(rows)",
                # There is one outcome a row, but all data are parameters.
                observed=np.zeros(length),
            )
        return model
