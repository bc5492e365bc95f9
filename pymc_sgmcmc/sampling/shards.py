"""Models of shards: parts of the rows, with the prior to the power of one over their number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.model import Model
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.graphs import rebuild
from pymc_sgmcmc.sources import RowSource

POSITION = "position"
"""The only free variable of a shard's model, the unconstrained position, has this name."""

COORDINATE = "coordinate"
"""This is its dimension. Its coordinates are the labels of the position."""


def posterior_to_share(model: Model, rows: str | Sequence[str] | None = None) -> Posterior:
    """The posterior of a model whose rows can be dealt out to shards.

    Parameters
    ----------
    model : pymc.Model
    rows : str or sequence of str, optional
        Names of the data that run over the rows, where that is ambiguous.

    Raises
    ------
    ModelError
        For discrete variables, minibatches, rows of a source, and rows that are groups of records.
    """
    if isinstance(rows, RowSource):
        raise ModelError(
            "`consensus` deals out rows in memory, but `rows` is a source. Write the model on all "
            "rows, or use `sample`, which reads those that it takes."
        )
    discrete = [value.name for value in model.value_vars if not value.dtype.startswith("float")]
    if discrete:
        raise ModelError(
            f"`consensus` combines continuous variables, but {quoted(discrete)} "
            f"{'is' if len(discrete) == 1 else 'are'} discrete. Marginalise them out."
        )
    posterior = Posterior(model, rows=rows)
    if posterior.model_batch_size is not None:
        raise ModelError(
            "`consensus` deals out all rows to shards, but the model uses `pm.Minibatch`. Write it "
            "on the full arrays."
        )
    if posterior.rows_are_groups:
        raise ModelError(
            "`consensus` deals out rows of data, but those of this model are numbers of groups. "
            "Use `sample`, whose transitions take some of the groups."
        )
    return posterior


def deal_out(n_rows: int, parts: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Random disjoint parts of the numbers of all rows, whose sizes differ by one at most."""
    return [np.sort(part) for part in np.array_split(rng.permutation(n_rows), parts)]


def shard_model(posterior: Posterior, rows: Sequence[np.ndarray], parts: int) -> Model:
    r"""The model of a shard on the unconstrained space of the whole model.

    .. math:: \log \pi_s(\theta) = \tfrac{1}{S} \log p(\theta)
        + \sum_{i \in s} \log p(x_i \mid \theta)

    The prior part has the Jacobians of all transforms, and terms of the model without rows. So the
    sum over the shards is the log posterior of the whole model, whatever its transforms are.

    Parameters
    ----------
    posterior : Posterior
        Of the whole model.
    rows : sequence of numpy.ndarray
        The rows of the shard, one array for each array of data.
    parts : int
        The number of shards S.

    Returns
    -------
    pymc.Model
        With one free variable, the position, and one observed variable, which has a term a row.
    """
    # Built on placeholders, since they copy random variables.
    symbolic_position, symbolic_rows = posterior.position_and_rows()
    symbolic_length = pt.lscalar("length")
    log_prior = posterior.prior_log_density(symbolic_position)
    of_rows = posterior.rows_log_density(symbolic_position, symbolic_rows, symbolic_length)
    length = len(rows[0])

    def log_tempered_prior(value: TensorVariable, _: TensorVariable) -> TensorVariable:
        return rebuild([log_prior], {symbolic_position: value})[0] / parts

    def log_likelihood(
        value: TensorVariable, position: TensorVariable, *rows: TensorVariable
    ) -> TensorVariable:
        given = dict(zip(symbolic_rows, rows, strict=True))
        given |= {symbolic_position: position, symbolic_length: pt.constant(length, dtype="int64")}
        return rebuild([of_rows], given)[0]

    axes = [
        ",".join(["rows", *(f"leaf{number}axis{axis}" for axis in range(1, values.ndim))])
        for number, values in enumerate(rows)
    ]
    with pm.Model(coords={COORDINATE: posterior.labels}) as model:
        position = pm.CustomDist(
            POSITION,
            np.zeros(posterior.dimension),
            logp=log_tempered_prior,
            signature="(coordinate)->(coordinate)",
            dtype=posterior.dtype,
            dims=COORDINATE,
            initval=posterior.initial_position,
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
