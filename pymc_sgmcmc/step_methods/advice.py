"""What would serve the user better than the step method asked for."""

from __future__ import annotations

from collections import defaultdict

from pymc.model import Model

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.marginal.structure import find_structure

GRADIENTS_OF_NUTS = 10
"""NUTS takes about this many gradients of all rows for a draw of a posterior near a Gaussian, in
trajectories of 7 or 15 leapfrog steps."""

FEWEST_GROUPS = 20
"""Variables of fewer entries are not looked at, since a minibatch touches most of so few groups."""


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
    local = _local_variables(model)
    if local is not None:
        names, n_groups = local
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


def _local_variables(model: Model) -> tuple[list[str], int] | None:
    """Names of free variables with one entry a group of records, and the number of groups."""
    candidates = defaultdict(list)
    for variable in model.free_RVs:
        shape = variable.type.shape
        length = shape[0] if shape else None
        if length is None or length >= FEWEST_GROUPS:
            candidates[length].append(variable.name)
    for names in candidates.values():
        for chosen in (names, *([name] for name in names if len(names) > 1)):
            try:
                structure = find_structure(model, chosen)
            except ModelError:
                continue
            if FEWEST_GROUPS <= structure.n_groups < structure.n_records:
                return list(structure.names), structure.n_groups
    return None
