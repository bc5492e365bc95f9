"""Models without data, whose target is the prior and the potentials alone."""

from __future__ import annotations

import numpy as np
import pytensor
from pymc.model import Model

from pymc_sgmcmc.posterior.graphs import shape_of
from pymc_sgmcmc.posterior.rows import RowLeaf, SeparatedModel, Term

NO_DATA = "no_data"
"""The rows that stand for no data have this name."""

STANDING_ROWS = 2
"""So many rows of log likelihood zero stand for no data, since minibatches need two."""


def has_rows(model: Model) -> bool:
    """Whether an observed variable has two rows or more along its first axis."""
    lengths = [shape_of(model.rvs_to_values[variable])[:1] for variable in model.observed_RVs]
    return any(length and length[0] > 1 for length in lengths)


def separate_without_rows(terms: dict[str, Term]) -> SeparatedModel:
    """All terms in full, beside rows of log likelihood zero.

    With these rows every part of the package that handles rows stays as it is.
    """
    standing = pytensor.shared(np.zeros(STANDING_ROWS), NO_DATA, shape=(None,))
    values = standing.get_value(borrow=True)
    leaf = RowLeaf(NO_DATA, (standing,), values)
    return SeparatedModel(
        tuple(terms.values()), (Term(NO_DATA, 0.0 * standing),), (leaf,), STANDING_ROWS, None
    )
