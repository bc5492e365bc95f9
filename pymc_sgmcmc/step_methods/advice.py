"""What would serve the user better than the step method asked for."""

from __future__ import annotations

from pymc.model import Model

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.marginal.search import call_for, local_structures

GRADIENTS_OF_NUTS = 10
"""NUTS takes about this many gradients of all rows for a draw of a posterior near a Gaussian, in
trajectories of 7 or 15 leapfrog steps."""


def advice(
    model: Model, n_rows: int, rows_of_draw: int, *, has_effects: bool = False
) -> str | None:
    """A better choice than minibatches of rows, or None.

    Parameters
    ----------
    model : pymc.Model
    n_rows : int
        N.
    rows_of_draw : int
        Rows that all transitions of one draw read.
    has_effects : bool
        Whether the position has coordinates for effects of groups, and the rows that these need.
    """
    for structure in local_structures(model)[0] if not has_effects else ():
        if (call := call_for(model, structure)) is None:
            continue
        verb = "has" if len(structure.names) == 1 else "have"
        return (
            f"{quoted(structure.names)} {verb} entries for {structure.n_groups} groups of records, "
            "and a minibatch says nothing of the groups that it does not touch. Use "
            f"{call}, or NUTS."
        )
    if rows_of_draw < GRADIENTS_OF_NUTS * n_rows:
        return None
    return (
        f"A draw reads {rows_of_draw} rows, {rows_of_draw / n_rows:.0f} times all {n_rows}, and "
        f"one of NUTS about {GRADIENTS_OF_NUTS} times. Use NUTS (`pm.sample()`) for this model."
    )
