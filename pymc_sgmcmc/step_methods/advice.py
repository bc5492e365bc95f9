"""What would serve the user better than the step method asked for."""

from __future__ import annotations

from pymc.model import Model

from pymc_sgmcmc.marginal.search import local_structures

GRADIENTS_OF_NUTS = 10
"""NUTS takes about this many gradients of all rows for a draw of a posterior near a Gaussian, in
trajectories of 7 or 15 leapfrog steps."""


def advice(model: Model, n_rows: int, rows_of_draw: int) -> str | None:
    """A better choice than minibatches of rows, or None.

    Parameters
    ----------
    model : pymc.Model
    n_rows : int
        N.
    rows_of_draw : int
        Rows that all transitions of one draw read.
    """
    structures, _ = local_structures(model)
    if structures:
        names, n_groups = structures[0].names, structures[0].n_groups
        listed = ", ".join(f"`{name}`" for name in names)
        quoted = ", ".join(f'"{name}"' for name in names)
        return (
            f"{listed} {'has' if len(names) == 1 else 'have'} entries for {n_groups} groups of "
            "records, and a minibatch says nothing of the groups that it does not touch. Integrate "
            f"out what is local by `marginalize(model, [{quoted}])`, or use NUTS."
        )
    if rows_of_draw < GRADIENTS_OF_NUTS * n_rows:
        return None
    return (
        f"A draw reads {rows_of_draw} rows, {rows_of_draw / n_rows:.0f} times all {n_rows}, and "
        f"one of NUTS about {GRADIENTS_OF_NUTS} times. Use NUTS (`pm.sample()`) for this model."
    )
