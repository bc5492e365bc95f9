"""The settings of a run that its trace stores."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from pymc_sgmcmc.gradient_estimators import GradientEstimator
from pymc_sgmcmc.matrices import Implicit
from pymc_sgmcmc.record import (
    COMPUTED,
    EFFECTS,
    GIVEN,
    KEPT_ROWS,
    LARGEST_FORCE,
    LAW,
    MEAN_SHIFT,
    MIRRORED,
    OF_CHAIN,
    SETUP_PASSES,
    SETUP_SECONDS,
    SOURCE,
    WITH_LESS_NOISE,
    RunSettings,
)
from pymc_sgmcmc.schedules import MOST_THINNING
from pymc_sgmcmc.sources import RowSource
from pymc_sgmcmc.step_methods.settings import Rows
from pymc_sgmcmc.step_methods.setup import Design, Pace, Setup
from pymc_sgmcmc.tuning import StepSizeChoice


def _named(rows: Rows) -> str | list[str] | dict | None:
    """The argument `rows` in a form that JSON has."""
    if isinstance(rows, RowSource):
        return {SOURCE: rows.signature()}
    return rows if rows is None or isinstance(rows, str) else list(rows)


def run_settings(setup: Setup, design: Design) -> RunSettings:
    """Settings of a step method, from its parts."""
    batching, choice = setup.estimator.batching, design.closed_form
    by_hand = isinstance(setup.settings.estimator, GradientEstimator)
    attributes: dict[str, Any] = {
        "sampler": setup.name,
        "gradient": setup.estimator.name,
        "batching": batching.name,
        "batch_size": batching.batch_size if setup.posterior.has_rows else 0,
        "batch_size_from": setup.batch_size_from,
        "n_rows": setup.posterior.n_rows if setup.posterior.has_rows else 0,
        "kept_rows": setup.estimator.kept_rows,
        "thin": design.pace.thin,
        # They are stored as JSON, since trace files hold no lists of words.
        "rows": json.dumps(_named(setup.settings.rows)),
        "estimator_from": GIVEN if by_hand else COMPUTED,
    }
    if design.dynamics.law is not None:
        attributes[LAW] = design.dynamics.law.name
    if setup.mirrored_names:
        attributes[MIRRORED] = json.dumps(setup.mirrored_names)
    if not setup.estimator.reduces_variance:
        attributes[WITH_LESS_NOISE] = setup.estimator.with_less_noise
    attributes |= setup.estimator.recorded
    step_size_from = COMPUTED if setup.settings.step_size is None else GIVEN
    if not setup.kind.is_exact:
        attributes["bias"] = setup.bias
    if isinstance(design.pace.step_size, int | float):
        attributes["step_size"] = float(design.pace.step_size)
    attributes["step_size_from"] = step_size_from
    if setup.matrix is not None:
        is_name = isinstance(setup.matrix, str)
        attributes["preconditioner_from"] = setup.matrix if is_name else GIVEN
    law = design.dynamics.law
    if (
        choice is not None
        and law is not None
        and law.averaged
        and np.isfinite(choice.largest_force)
    ):
        attributes[LARGEST_FORCE] = choice.largest_force
    if choice is not None:
        attributes["noise"] = choice.noise
        attributes["curvature"] = choice.curvature
    attributes["why"] = _why(setup, design)
    arrays = {KEPT_ROWS: setup.estimator.kept} if setup.estimator.kept_rows else {}
    # Positions and gradients of a trace are in terms of the variables of the model.
    own = setup.posterior.coordinates
    of = "" if own is None else OF_CHAIN
    matrices = {f"{of}preconditioner": design.dynamics.fixed_preconditioner}
    if setup.known_center is not None:
        values = setup.posterior.values_at(setup.known_center.position)
        arrays["center"] = np.asarray(values, dtype=np.float64)
    if setup.known_center is not None:
        # In coordinates of effects it says nothing of the variables of the model.
        if own is None and setup.known_center.bend is not None and not setup.kind.is_exact:
            arrays[MEAN_SHIFT] = np.asarray(setup.known_center.bend, dtype=np.float64)
        matrices[f"{of}precision"] = setup.known_center.curvature.precision
        if own is not None and setup.known_center.curvature.is_dense:
            arrays[EFFECTS] = own.known
    for name, matrix in matrices.items():
        if isinstance(matrix, Implicit):
            arrays.update({f"{name}_{part}": values for part, values in matrix.parts.items()})
        elif matrix is not None:
            arrays[name] = np.asarray(matrix.values, dtype=np.float64)
    return RunSettings(attributes, arrays, tuple(map(str, setup.posterior.labels)))


def with_cost(
    settings: RunSettings, gradients: int, rows_in_setup: int, seconds: float
) -> RunSettings:
    """Settings with what a transition and the set-up cost, for plots against passes and time.

    The passes of SVRG are divided among the transitions between two of them.
    """
    known = settings.attributes
    rows = gradients * (known["batch_size"] + known["kept_rows"])
    if "refresh" in known:
        rows += known["n_rows"] / known["refresh"]
    cost = {
        "gradients_a_transition": gradients,
        "rows_a_transition": rows,
        SETUP_PASSES: rows_in_setup / known["n_rows"] if known["n_rows"] else 0.0,
        SETUP_SECONDS: seconds,
    }
    return replace(settings, attributes={**known, **cost})


def with_pace(settings: RunSettings, bias: float, pace: Pace) -> RunSettings:
    """Settings of a run with the step size in closed form for another stated error."""
    assert pace.choice is not None
    _, others = settings.attributes["why"].split("; ", 1)
    changed = {
        "bias": bias,
        "step_size": pace.choice.step_size,
        "thin": pace.thin,
        "why": f"{_closed_form(pace.choice)}; {others}",
    }
    return replace(settings, attributes={**settings.attributes, **changed})


def _closed_form(choice: StepSizeChoice) -> str:
    return (
        f"step size {choice.step_size:.3g} for a variance error of {choice.error:g}, with gradient "
        f"noise {choice.noise:.2g} and curvature {choice.curvature:.2g}"
    )


def _why(setup: Setup, design: Design) -> str:
    """Origin of step size, batch size and thinning, in one line."""
    batching, choice = setup.estimator.batching, design.closed_form
    if setup.settings.step_size is not None:
        step = "step size given"
    elif choice is not None:
        step = _closed_form(choice)
    elif setup.kind.is_exact:
        step = "step size computed for the best acceptance rate"
    else:
        step = f"step size computed for a variance error of {setup.bias:g}"
    size = {
        "given": "batch size given",
        "the model": "batch size of pm.Minibatch",
        "computed": "batch size at which an effective draw costs least",
    }[setup.batch_size_from]
    thin = "thinning given" if setup.settings.thin is not None else "one draw a relaxation time"
    if setup.settings.thin is None and setup.settings.step_size is not None:
        thin = "every transition recorded"
    elif setup.settings.thin is None and design.pace.thin == MOST_THINNING:
        thin = f"one draw in {MOST_THINNING} transitions, the most by default, so draws depend"
    kept_rows = setup.estimator.kept_rows
    always = f", {kept_rows} others in every transition" if kept_rows else ""
    return f"{step}; {size} ({batching.batch_size} of {batching.n_rows}{always}); {thin}"
