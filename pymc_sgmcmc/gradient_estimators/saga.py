r"""Control variates from a stored gradient of each row: SAGA (Dubey et al. 2016)."""

from __future__ import annotations

import logging

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.batching import ANY_NOISE, make_batching
from pymc_sgmcmc.gradient_estimators.base import GradientEstimator, Memory
from pymc_sgmcmc.limits import free_memory
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.selected import RowGradients, stored_gradients

log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold

CHUNK_ELEMENTS = 2_000_000
"""When a chain begins, the table is computed in pieces of about this many elements, 16 MB, which
bounds the memory beside the table."""


class SAGAGradient(GradientEstimator, Memory):
    r"""The minibatch gradient with the last gradient seen of each row as control variate.

    .. math:: \tilde\nabla(\theta) = \nabla \log p(\theta) + \sum_{i=1}^N \alpha_i
              + \frac{N}{n} \sum_{j \in S} [\nabla \log p(x_j \mid \theta) - \alpha_j],
              \qquad \alpha_j \leftarrow \nabla \log p(x_j \mid \theta) \quad (j \in S)

    where the update follows the transition from :math:`\theta`. This is SAGA-LD of Dubey et al.
    (2016). A chain begins with the gradients at its first position, by one pass over all rows. With
    replacement a row may be in S twice. It then has two terms in the estimate, which keeps the
    estimate unbiased, and one update of its :math:`\alpha_j`, which counts once in the running sum.
    Where dynamics need several gradients in a transition, all use the same :math:`\alpha`, and the
    first one updates it.

    **Law.** The estimate is unbiased for any :math:`\alpha`. On a Gaussian posterior position and
    :math:`\alpha` together are an affine chain, whose stationary mean is exact. There
    :math:`\alpha_i = \nabla \log p(x_i \mid \theta_i)`, with :math:`\theta_i` a position about
    N / n transitions ago. With curvatures :math:`A_i` of the rows the covariance of the estimate is
    therefore at most

    .. math:: \frac{N^2 c}{n} \frac1N \sum_i A_i \, 2 \Lambda \, A_i
              \approx 2 V_0 + \frac{2c}{n} H

    with c = 1 where rows are drawn one by one and autocorrelations are not negative.
    :math:`V_0` is the covariance of control variates at the mode. The second term is there because
    references differ between rows, so their variation does not cancel in the sum. In windows of
    shuffled rows this term does not even fall with n, since neighbouring rows are drawn together
    and have the same reference: :math:`V \preceq 2 V_0 + H`. Rows are therefore drawn with
    replacement by default. Computed step sizes assume these bounds.

    **Cost.** A transition takes a separate gradient for each of n rows, and a few copies of n x w
    numbers, where w is the width of the table. There are no passes over the data after the first.

    **Memory.** A chain stores N x w numbers, and twice as many while rows get a new order. Where
    rows use a variable only through arrays of indices, as in ``(U[user] * V[item]).sum(-1)`` or
    ``(mu + sigma * z)[group]``, the table has just the entries that a row selects, since all others
    of its gradient are zero. With 5 factors of users and of items w is 10, whatever their number,
    and for N = 90 000 the table takes 7 MB. Variables that rows use otherwise have all of their
    entries in it, and those that no row depends on have none. Where this saves nothing, and in
    models whose rows are groups, w is d: 16 MB for N = 200 000 and d = 10.

    Draws are computed one at a time, so that the table never has to be computed again: keep `thin`
    at tens of transitions. For large N or w prefer `SVRGGradient`, or control variates at the mode.
    The estimator does not run on JAX, which would copy the table.

    Parameters
    ----------
    posterior : Posterior
    batch_size : int
    batching : {"shuffle", "replace"}, optional
        The minibatch scheme. Default: with replacement, unless the batch has all rows.
    noise_share : float
        As of `make_batching`.
    gradients : RowGradients, optional
        The columns of the table; by default those of `stored_gradients`.

    Raises
    ------
    MemoryError
        Where two tables do not fit into the memory that is available.

    References
    ----------
    K. A. Dubey, S. J. Reddi, S. A. Williamson, B. Poczos, A. J. Smola and E. P. Xing (2016).
    Variance reduction in stochastic gradient Langevin dynamics. *NeurIPS*.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sgmcmc import SGLD
    >>> rng = np.random.default_rng(1)
    >>> x = rng.normal(size=1000)
    >>> with pm.Model():
    ...     slope = pm.Normal("slope", 0, 10)
    ...     _ = pm.Normal("y", slope * x, 1.0, observed=2 * x + rng.normal(size=1000))
    ...     step = SGLD(
    ...         batch_size=50, gradient="saga", thin=5, compile_kwargs={"mode": "FAST_COMPILE"}
    ...     )
    ...     idata = pm.sample(
    ...         step=step, draws=200, tune=0, chains=1, random_seed=1, progressbar=False, quiet=True
    ...     )
    >>> bool(abs(idata.posterior["slope"].mean() - 2) < 0.1)
    True
    """

    name = "saga"
    reduces_variance = True

    def __init__(
        self,
        posterior: Posterior,
        batch_size: int,
        *,
        batching: str | None = None,
        noise_share: float = ANY_NOISE,
        gradients: RowGradients | None = None,
    ):
        if batching is None:
            batching = "replace" if batch_size < posterior.n_rows else "shuffle"
        gradients = gradients or stored_gradients(posterior)
        shape = posterior.n_rows, gradients.width
        table_bytes = shape[0] * shape[1] * np.dtype(posterior.dtype).itemsize
        check_table_memory(table_bytes, *shape)
        table = np.zeros(shape, dtype=posterior.dtype)
        scheme = make_batching(
            batching, posterior.data, batch_size, derived=[table], noise_share=noise_share
        )
        super().__init__(posterior, scheme)
        self._gradients = gradients
        total = pytensor.shared(
            np.zeros(posterior.dimension), "sum_of_stored", shape=(posterior.dimension,)
        )
        # The gradients of all rows, and their sum in double precision.
        self.variables = (scheme.derived[0], total)
        self.memory = self
        log.info("SAGA: %.3g MB for the gradients of all rows", table_bytes / 1e6)

    def __call__(self, position: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Gradient estimate, shape (d,), from the present memory."""
        return self.estimate(position, index, self.variables, pt.constant(False))[0]

    @property
    def noise_factors(self) -> tuple[float, float]:
        """Twice the noise of control variates at the mode, and the part of the references."""
        if self.batching.without_replacement:
            return 2.0, 1.0
        return 2.0, 2.0 / self.batching.batch_size

    def begin(self, position: np.ndarray) -> None:
        """Gradients of all rows at a position."""
        posterior, gradients = self.posterior, self._gradients
        table = np.empty((posterior.n_rows, gradients.width), dtype=posterior.dtype)
        length = max(1, CHUNK_ELEMENTS // max(gradients.width, posterior.row_elements))
        for start in range(0, posterior.n_rows, length):
            part = slice(start, start + length)
            table[part] = gradients.at(position, posterior.take(part))
        self.write((table,))

    def read(self) -> tuple[np.ndarray, ...]:
        """The table in the order of the data, and the sum."""
        (table,) = self.batching.read_derived()
        return table, self.variables[1].get_value()

    def write(self, values: tuple[np.ndarray, ...]) -> None:
        """Set the table, and its sum where given."""
        table, *total = values
        self.batching.write_derived([table])
        self.variables[1].set_value(total[0] if total else self._gradients.total_of_all(table))

    def settle(self) -> None:
        """Sum the table again."""
        (table,) = self.batching.read_derived()
        self.variables[1].set_value(self._gradients.total_of_all(table))

    def arranged(self, indices: np.ndarray) -> np.ndarray:
        """Sorted indices where a row may be drawn twice: equal rows are then neighbours."""
        return indices if self.batching.without_replacement else np.sort(indices)

    def estimate(
        self,
        position: TensorVariable,
        index: TensorVariable,
        values: tuple[TensorVariable, ...],
        remember: TensorVariable,
        noise: TensorVariable | None = None,
    ) -> tuple[TensorVariable, tuple[TensorVariable, ...]]:
        """Gradient estimate, and the table and its sum afterwards."""
        posterior, batching, gradients = self.posterior, self.batching, self._gradients
        table, total = values
        rows = batching.rows(index)[: len(posterior.data)]
        new = gradients.of_rows(position, rows).astype(posterior.dtype)
        old = batching.stored_rows(table, index)
        change = new.astype("float64") - old.astype("float64")
        of_batch = of_stored = gradients.total(change, rows)
        if not batching.without_replacement:
            first = pt.concatenate([[True], pt.neq(index[1:], index[:-1])])
            of_stored = gradients.total(pt.switch(first[:, None], change, 0.0), rows)
        estimate = (
            posterior.prior_gradient(position)
            + total.astype(posterior.dtype)
            + self._scale * of_batch.astype(posterior.dtype)
        )
        stored = pt.switch(remember, new, old)
        return estimate, (
            batching.with_stored_rows(table, index, stored),
            total + pt.switch(remember, of_stored, 0.0),
        )


def check_table_memory(table_bytes: int, n_rows: int, width: int) -> None:
    """Refuse a table that does not fit into memory twice.

    Raises
    ------
    MemoryError
    """
    available = free_memory()
    if 2 * table_bytes > available:
        raise MemoryError(
            f'`gradient="saga"` stores {width} numbers for each of {n_rows} rows, at times '
            f"twice {table_bytes / 1e9:.3g} GB, but {available / 1e9:.3g} GB are available. Use "
            '`gradient="svrg"` or `gradient="cv"`.'
        )
