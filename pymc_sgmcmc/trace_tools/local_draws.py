"""What a report says of local variables that a step method has sampled by `LocalSampling`."""

from __future__ import annotations

from typing import Any

from xarray import DataTree

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.record import settings_of, stored_local

VISITS_A_DRAW = 10.0
"""Draws of local variables count as those of their draw where a group has at least this many
visits in it. The last one is then a tenth of a draw old."""


def local_warnings(idata: DataTree, model: Any = None) -> list[str]:
    """Warning at the end of a run where local variables in the trace are older than their draw."""
    settings = settings_of(idata)
    names = [name for name in stored_local(settings) if name in idata["posterior"].data_vars]
    if not names:
        return []
    visits = float(settings["thin"]) * settings["batch_size"] / settings["n_rows"]
    if visits >= VISITS_A_DRAW:
        return []
    return [
        f"Draws of {quoted(names)} are from the last visit to each group, with {visits:.2g} visits "
        "a draw, so they do not go with the other variables of the same draw. Use "
        "`recover(idata, model)` before you compute or predict from both."
    ]
