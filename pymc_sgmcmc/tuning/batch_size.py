"""Batch size at which an effective draw of a stated accuracy costs least."""

from __future__ import annotations

import numpy as np

OVERHEAD_OPERATIONS = 12_000
"""A transition costs as much as this many multiplications, beside its rows and its matrix product.
They take about 2 microseconds."""


ALLOWED_COST = 1.1
"""The smallest batch size is taken whose cost is at most this many times the least. It is a
compromise between the cost and a small minibatch, with which a draw is spread over more
transitions."""


def choose_batch_size(
    noise_rows: float, n_rows: int, row_operations: int, matrix_operations: int = 0
) -> int:
    r"""Smallest batch size at which an effective draw costs hardly more than the least.

    At a variance inflation :math:`\delta` the step is
    :math:`h = 4\delta / (\lambda_V + \lambda_H)`, with gradient noise
    :math:`\lambda_V = \tfrac{R}{n} c(n)\, \lambda_H`, and an independent draw takes a number of
    transitions in proportion to 1/h. A transition costs as much as :math:`r_0 + n` rows, so

    .. math:: \mathrm{cost}(n) \propto (r_0 + n) \left(1 + \tfrac{R}{n}\, c(n)\right), \qquad
              c(n) = \tfrac{N - n}{N - 1}

    whatever :math:`\delta` is. The cost is smallest at about :math:`\sqrt{r_0 R}` for R far below
    N. For R of about N, as without control variates, it is nearly constant beyond a few times
    :math:`r_0`. The smallest batch size is taken whose cost is at most 10 % above the least.

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

    Examples
    --------
    >>> choose_batch_size(10.0, 1_000_000, row_operations=40, matrix_operations=200)
    24
    >>> choose_batch_size(1e6, 1_000_000, row_operations=40, matrix_operations=200)
    3044
    """
    sizes, costs = _costs(noise_rows, n_rows, row_operations, matrix_operations)
    return int(sizes[np.argmax(costs <= ALLOWED_COST * costs.min())])


def least_cost(
    noise_rows: float, n_rows: int, row_operations: int, matrix_operations: int, kept: int
) -> float:
    """Cost of an effective draw at the best batch size, in arbitrary units.

    The parameters are those of `choose_batch_size`; `kept` is the number of rows that each
    transition takes beside its minibatch.
    """
    matrix_operations += kept * row_operations
    return float(_costs(noise_rows, n_rows, row_operations, matrix_operations)[1].min())


def _costs(
    noise_rows: float, n_rows: int, row_operations: int, matrix_operations: int
) -> tuple[np.ndarray, np.ndarray]:
    overhead = (OVERHEAD_OPERATIONS + matrix_operations) / max(1, row_operations)
    sizes = np.unique(np.geomspace(1, n_rows, 1000).astype(int))
    factors = (n_rows - sizes) / max(1, n_rows - 1)
    return sizes, (overhead + sizes) * (1 + noise_rows / sizes * factors)
