"""A second run at half the step size, which shows the errors of the means of a first one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pymc as pm
from xarray import DataTree

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.posterior.position import layout_from_model
from pymc_sgmcmc.record import GIVEN, SETTINGS, STEP_METHODS, labels_of, stored_local
from pymc_sgmcmc.stein import Estimate
from pymc_sgmcmc.step_methods.repeat import repeated_step
from pymc_sgmcmc.trace_tools.gradients import changed_data

RERUN_SAMPLERS = ("SGLD", "SGLDCV")
"""These step methods can be run again by `bias_report` from the settings in a trace."""

BY_HAND = "Sample again with half the step size, and compare the two."
"""This remedy ends messages about runs that `bias_report` cannot repeat."""

AXES = {"chain_axis": 0, "draw_axis": 1}
"""The statistics of ArviZ take these axes of positions for those of chains and draws."""


def check_rerun(idata: DataTree, settings: dict[str, Any], model: pm.Model | None) -> pm.Model:
    """Model of a second run.

    Raises
    ------
    ValueError
        Where no second run can be made.
    """
    if STEP_METHODS in settings:
        raise ValueError(
            "`rerun=True` can repeat runs in which one step method moves all variables, but the "
            f"trace is of {settings[STEP_METHODS]} step methods. {BY_HAND}"
        )
    name = settings.get("sampler")
    if name not in RERUN_SAMPLERS or SETTINGS not in idata.children:
        raise ValueError(
            f"`rerun=True` can repeat runs of {' and '.join(RERUN_SAMPLERS)}, but the trace is of "
            f"{name or 'an unknown step method'}. {BY_HAND}"
        )
    if local := stored_local(settings):
        raise ValueError(
            f"`rerun=True` can repeat runs without `local`, but that of the trace has sampled "
            f"{quoted(local)} by it. {BY_HAND}"
        )
    if settings.get("estimator_from") == GIVEN:
        raise ValueError(
            "`rerun=True` can repeat runs whose `gradient` is a name or `SVRG`, but that of the "
            f"trace is an estimator made by hand. {BY_HAND}"
        )
    try:
        model = pm.modelcontext(model)
    except TypeError:
        raise ValueError(
            "`rerun=True` needs the model of the run, but `model` is None outside of the context "
            "of a model. Pass `model=`."
        ) from None
    labels = layout_from_model(model, None, model.initial_point()).labels
    stored = labels_of(idata, len(labels))
    changed = changed_data(idata, model)
    if labels != stored or changed:
        what = (
            f"other values of {', '.join(changed)}"
            if changed
            else (
                f"the coordinates {', '.join(labels[:5])}, but the run had {', '.join(stored[:5])}"
            )
        )
        raise ValueError(
            f"`model` should be the one that was sampled, but has {what}. Pass that model with its "
            "data, or sample again."
        )
    return model


def second_run(
    idata: DataTree,
    settings: dict[str, Any],
    model: pm.Model | None,
    random_seed: Any,
    compile_kwargs: Mapping[str, Any] | None,
) -> np.ndarray:
    """Positions of a second run at half the step size."""
    assert model is not None
    recorded = idata["sample_stats"]
    step = repeated_step(
        model,
        settings,
        idata[SETTINGS],
        step_size=float(np.asarray(recorded["step_size"])[:, -1].mean()) / 2,
        thin=2 * int(settings["thin"]),
        compile_kwargs=compile_kwargs,
    )
    with model:
        second = pm.sample(
            step=step,
            draws=recorded.sizes["draw"],
            tune=min(500, recorded.sizes["draw"]),
            chains=recorded.sizes["chain"],
            random_seed=random_seed,
            progressbar=False,
            compute_convergence_checks=False,
            quiet=True,
        )
    return np.asarray(second["sample_stats"]["position"], dtype=float)


def half_step_error(first: np.ndarray, second: np.ndarray, sd: np.ndarray) -> Estimate:
    """Twice the difference of the means, in posterior standard deviations."""
    from arviz_stats.base import array_stats  # takes half a second to import

    difference = first.mean((0, 1)) - second.mean((0, 1))
    errors = [array_stats.mcse(run, **AXES) for run in (first, second)]
    return Estimate(2 * difference / sd, 2 * np.hypot(*errors) / sd)
