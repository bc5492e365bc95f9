"""Batch size at which an effective draw of a stated accuracy costs least."""

from __future__ import annotations

import numpy as np

from pymc_sgmcmc.dynamics.law import EULER, Law
from pymc_sgmcmc.tuning.step_size import VARIANCE_INFLATION, largest_step_of_rows

OVERHEAD_OPERATIONS = 12_000
"""A transition costs as much as this many multiplications, beside its rows and its matrix product.
They take about 2 microseconds."""


OPERATIONS_OF_FUNCTIONS = 50
"""The functions of a row, such as an exponential, cost as much as this many multiplications."""

GATHERED = 4.0
"""A row of a minibatch with effects costs as much as this many of a pass over all rows in order,
since its data are gathered and its derivatives at the centre are others. It is 2.9 to 4.6, for one
factor to three."""

ALLOWED_COST = 1.1
"""The smallest batch size is taken whose cost is at most this many times the least. It is a
compromise between the cost and a small minibatch, with which a draw is spread over more
transitions."""


def choose_batch_size(
    noise_rows: float,
    n_rows: int,
    row_operations: int,
    matrix_operations: int = 0,
    largest: float = 0.0,
    *,
    law: Law = EULER,
    error: float = VARIANCE_INFLATION,
    gathered: float = 1.0,
) -> int:
    r"""Smallest batch size at which an effective draw costs hardly more than the least.

    An independent draw takes a number of transitions in proportion to 1/h, with h the step of the
    law for the stated error and for gradient noise :math:`\lambda_V = \tfrac{R}{n} c(n)\,
    \lambda_H`. A transition costs as much as :math:`r_0 + n` rows, so

    .. math:: \mathrm{cost}(n) \propto (r_0 + n) / h(n), \qquad c(n) = \tfrac{N - n}{N - 1}.

    No row moves the chain by more than half a posterior standard deviation. For Euler's scheme it
    is smallest at about :math:`\sqrt{r_0 R}` for R far below N, whatever the
    error. For R of about N, as without control variates, it is nearly constant beyond a few times
    :math:`r_0`. For averaged noises fewer rows than a multiple of R over the error make the step
    smaller. The smallest batch size is taken whose cost is at most 10 % above the least.

    Parameters
    ----------
    noise_rows : float
        R, the number of rows at which noise and curvature would be equal without the factor c.
    n_rows : int
        The number of rows N.
    row_operations : int
        Number of multiplications for the gradient of one row.
    matrix_operations : int
        Number of multiplications with the preconditioner in a transition, 2 d² for a dense one.
    largest : float
        The largest gradient of a row, see `RowNoise`.
    law : Law
    error : float
        The relative error of the variance.
    gathered : float
        What a row of a minibatch costs, in rows of a pass over all of them.

    Examples
    --------
    >>> choose_batch_size(10.0, 1_000_000, row_operations=40, matrix_operations=200)
    17
    >>> choose_batch_size(1e6, 1_000_000, row_operations=40, matrix_operations=200)
    1291
    """
    operations = row_operations, matrix_operations
    sizes, costs = _costs(noise_rows, largest, n_rows, operations, law, error, gathered)
    if gathered > 1 and costs[-1] <= ALLOWED_COST * costs.min():
        return n_rows  # which has no noise
    size = int(sizes[np.argmax(costs <= ALLOWED_COST * costs.min())])
    # So many rows cost little beside a transition, and make the noise smaller.
    return max(size, min(n_rows, int((ALLOWED_COST - 1) * _overhead(operations))))


def least_cost(
    noise_rows: float,
    largest: float,
    n_rows: int,
    kept: int,
    *,
    operations: tuple[int, int],
    law: Law,
    error: float,
) -> float:
    """Cost of an effective draw at the best batch size, in arbitrary units.

    The parameters are those of `choose_batch_size`; `kept` is the number of rows that each
    transition takes beside its minibatch.
    """
    of_row, of_matrix = operations
    operations = of_row, of_matrix + kept * of_row
    return float(_costs(noise_rows, largest, n_rows, operations, law, error)[1].min())


def _costs(
    noise_rows: float,
    largest: float,
    n_rows: int,
    operations: tuple[int, int],
    law: Law,
    error: float,
    gathered: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    overhead = _overhead(operations)
    sizes = np.unique(np.geomspace(1, n_rows, 1000).astype(int))
    noises = noise_rows / sizes * (n_rows - sizes) / max(1, n_rows - 1)
    bounds = [largest_step_of_rows(largest, size) if size < n_rows else np.inf for size in sizes]
    steps = np.minimum([law.step_size(noise, 1.0, error) for noise in noises], bounds)
    return sizes, (overhead + np.where(sizes < n_rows, sizes, n_rows / gathered)) / steps


def _overhead(operations: tuple[int, int]) -> float:
    """Cost of a transition beside its rows, in rows."""
    of_row, of_matrix = operations
    return (OVERHEAD_OPERATIONS + of_matrix) / (of_row + OPERATIONS_OF_FUNCTIONS)
