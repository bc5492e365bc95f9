"""The minibatch scheme of an estimator, over rows in memory or in a source."""

from __future__ import annotations

import numpy as np

from pymc_sgmcmc.batching import ANY_NOISE, Batching, make_batching
from pymc_sgmcmc.gathering import GatheredRows
from pymc_sgmcmc.gradient_estimators.center_difference import CenterDifference
from pymc_sgmcmc.posterior import Posterior


def batching_of(
    posterior: Posterior,
    scheme: str,
    batch_size: int,
    difference: CenterDifference | None = None,
    *,
    static: bool = False,
    excluded: np.ndarray | None = None,
    noise_share: float = ANY_NOISE,
) -> Batching:
    """Make a minibatch scheme by name.

    Parameters
    ----------
    posterior, scheme, batch_size, static, excluded, noise_share
        As of `make_batching`.
    difference : CenterDifference, optional
        Its data, and the quantities that it stores, are the arrays. The default is the data of the
        posterior.

    Raises
    ------
    ValueError
        As of `make_batching`, and where the rows are in a source and the transitions run on JAX.
    """
    # The same number for rows in memory and in a source, whose draws are the same.
    row_bytes = posterior.row_elements * np.dtype(posterior.dtype).itemsize
    if posterior.source is not None:
        reader = posterior if difference is None else difference
        bytes_beside, all_beside = posterior.bytes_beside_rows
        most_bytes = posterior.source.memory
        if 2 * all_beside <= most_bytes:
            # Those of all rows fit, and no row needs more.
            bytes_beside, most_bytes = 0.0, most_bytes - all_beside
        return GatheredRows(
            posterior.take,
            posterior.n_rows,
            batch_size,
            scheme=scheme,
            static=static,
            excluded=excluded,
            most_bytes=most_bytes,
            derive=None if difference is None else difference.from_rows,
            join=reader.joined,
            shared_by_rows=reader.shared_by_rows,
            bytes_beside=bytes_beside,
            row_bytes=row_bytes,
            noise_share=noise_share,
        )
    return make_batching(
        scheme,
        posterior.data if difference is None else difference.data,
        batch_size,
        derived=() if difference is None else difference.columns,
        static=static,
        excluded=excluded,
        row_bytes=row_bytes,
        noise_share=noise_share,
    )
