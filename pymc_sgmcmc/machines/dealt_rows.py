"""The posterior of a model whose rows `consensus` and `sample_blocks` deal out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pymc.model import Model

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.sources import RowSource


def posterior_to_deal_out(
    model: Model,
    rows: Any,
    *,
    by: str,
    to: str,
    initial_point: Mapping[str, np.ndarray] | None = None,
) -> Posterior:
    """The posterior of a model whose rows are in memory and can be dealt out.

    Parameters
    ----------
    model : pymc.Model
    rows : str, sequence of str or None
        Names of the data that run over the rows, where that is ambiguous.
    by, to : str
        The name of the function, and of what it deals out rows to, for messages.
    initial_point : mapping, optional
        As of `Posterior`.

    Raises
    ------
    ModelError
        For minibatches, rows of a source, and rows that are groups of records.
    """
    if isinstance(rows, RowSource):
        raise ModelError(
            f"`{by}` deals out rows in memory, but `rows` is a source. Write the model on all "
            "rows, or use `sample`, which reads those that it takes."
        )
    posterior = Posterior(model, rows=rows, initial_point=initial_point)
    if posterior.model_batch_size is not None:
        raise ModelError(
            f"`{by}` deals out all rows to {to}, but the model uses `pm.Minibatch`. Write it on "
            "the full arrays."
        )
    if posterior.rows_are_groups:
        raise ModelError(
            f"`{by}` deals out rows of data, but those of this model are numbers of groups. Use "
            "`sample`, whose transitions take some of the groups."
        )
    return posterior
