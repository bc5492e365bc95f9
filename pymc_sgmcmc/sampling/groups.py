"""Runs on groups: local variables are integrated out before, and drawn after."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
from pymc.model import Model
from pytensor.graph.traversal import ancestors
from xarray import DataTree

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.marginal import recover
from pymc_sgmcmc.marginal.accuracy import quadrature_of, warn_of_quadrature
from pymc_sgmcmc.marginal.marginalize import without_warning
from pymc_sgmcmc.marginal.search import FEWEST_IN_NEED, MOST_RECORDS, local_structures
from pymc_sgmcmc.posterior.graphs import shape_of
from pymc_sgmcmc.posterior.position import untransformed
from pymc_sgmcmc.pymc_private import quiet_logging
from pymc_sgmcmc.record import INTEGRATED, PREFIX, QUADRATURE_POINTS
from pymc_sgmcmc.sampling.workers import interrupts_noted
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.center import held_back
from pymc_sgmcmc.step_methods.pymc_hook import log

AUTO = "auto"
"""With this choice the local variables are those that `local_structures` finds."""

MOST_TRIALS = 2
"""So many structures are tried, which bounds the time."""

MakeStep = Callable[..., StochasticGradientStep]
"""A class of step methods, or another function of ``model``."""

Initial = Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
"""Values to start from, of all chains or of each."""


@dataclass(frozen=True)
class Groups:
    """A model of groups with its step method, and the model that it came from.

    Attributes
    ----------
    joint : pymc.Model
        The model with its local variables.
    names : tuple of str
        Names of the local variables.
    model : pymc.Model
        The model without them, whose rows are the groups.
    step : StochasticGradientStep
    """

    joint: Model
    names: tuple[str, ...]
    model: Model
    step: StochasticGradientStep

    def initial(self, initvals: Initial) -> Initial:
        """Starting values without those of the local variables."""
        if initvals is None:
            return None
        if isinstance(initvals, Mapping):
            return {name: value for name, value in initvals.items() if name not in self.names}
        return [None if values is None else dict(self.initial(values)) for values in initvals]  # type: ignore[arg-type]

    def completed(
        self,
        idata: DataTree,
        names: Sequence[str] | None,
        seed: Any,
        *,
        progressbar: bool,
        quiet: bool,
    ) -> DataTree:
        """The trace with draws of the local variables, and with the data of the joint model.

        Where they cannot be drawn, or Ctrl-C ends that, the trace has the other variables.
        """
        wanted = set(names or (variable.name for variable in self.joint.unobserved_RVs))
        if self._depend_on_locals(wanted):
            try:
                with quiet_logging(quiet):
                    idata = recover(
                        idata, self.joint, self.names, random_seed=seed, progressbar=progressbar
                    )
            except (Exception, KeyboardInterrupt) as error:
                reason = "Ctrl-C ended it" if isinstance(error, KeyboardInterrupt) else f"{error}"
                log.error(
                    "The draws of the other variables are kept, but those of %s are not made: %s. "
                    "Call `recover(idata, model)`.",
                    quoted(self.names),
                    reason.rstrip("."),
                )
        with interrupts_noted():
            return self._whole(idata, wanted)

    def _whole(self, idata: DataTree, wanted: set[str]) -> DataTree:
        """The wanted variables of the joint model, with its data."""
        posterior = idata["posterior"].to_dataset()
        kept = [
            variable.name
            for variable in self.joint.unobserved_RVs
            if variable.name in wanted and variable.name in posterior
        ]
        groups = {name: group for name, group in idata.children.items()}
        groups["posterior"] = DataTree(posterior[kept])
        no_draws = {"draw": np.zeros((1, 1))}  # PyMC makes the other groups beside draws only.
        with_data = pm.to_inference_data(prior=no_draws, model=self.joint)
        for name in ("observed_data", "constant_data"):
            if name in with_data.children:
                groups[name] = with_data[name].copy()
        completed = DataTree(idata.to_dataset(), children=groups, name=idata.name)
        attributes = completed["sample_stats"].attrs
        attributes[f"{PREFIX}{INTEGRATED}"] = json.dumps(list(self.names))
        if (error := quadrature_of(self.model)) is not None:
            attributes[f"{PREFIX}{QUADRATURE_POINTS}"] = error.points
        return completed

    def _depend_on_locals(self, names: set[str]) -> bool:
        """Whether some of these variables are local, or deterministics of local ones."""
        local = {self.joint[name] for name in self.names}
        return any(not local.isdisjoint(ancestors([self.joint[name]])) for name in names)


def groups_of(
    model: Model, choice: str | Sequence[str] | None, step: StochasticGradientStep | MakeStep
) -> Groups | None:
    """The model of groups to sample, or None where the joint one is to be sampled.

    Raises
    ------
    TypeError, ValueError, ModelError
        Where variables are named that cannot be integrated out.
    """
    if choice is None:
        return None
    if not (isinstance(choice, str) or _are_names(choice)):
        raise TypeError(
            '`marginalize` should be "auto", None, or names of local variables, but got '
            f"{choice!r}."
        )
    if isinstance(step, StochasticGradientStep):
        if choice == AUTO:
            return None
        raise ValueError(
            "`marginalize` names variables, but `step` was made for the joint model. Pass its "
            f"class, `step={type(step).__name__}`, or a function that makes it."
        )
    if not callable(step):
        return None  # The caller refuses it.
    if choice != AUTO:
        names = (choice,) if isinstance(choice, str) else tuple(choice)
        return _integrated(model, names, step)
    structures, left = local_structures(model)
    for structure in structures:
        if len(structure.names) == len(model.free_RVs):
            continue  # There is nothing to sample without them.
        try:
            return _integrated(model, structure.names, step)
        except ModelError as error:  # of the groups, or of settings that are for records
            log.info(
                "%s of %d groups stay in the model: %s",
                quoted(structure.names),
                structure.n_groups,
                str(error).split("\n")[0],
            )
    for structure in left:
        records = structure.n_records // structure.n_groups
        if records > MOST_RECORDS and len(structure.names) < len(model.free_RVs):
            log.info(
                "%s of %d groups stay in the model, since the %d records of a group tell them "
                "well.",
                quoted(structure.names),
                structure.n_groups,
                records,
            )
            break
    return None


def groups_in_need(
    model: Model, make: MakeStep, made: Callable[[], StochasticGradientStep]
) -> tuple[Groups | None, StochasticGradientStep]:
    """Groups where the joint posterior is far from Gaussian, and the step method.

    Effects of few or large groups stay in the model, since rows tell them well, and normal ones
    with coordinates of their own. But where the joint posterior is a funnel, or the step method
    moves effects as they are, they are better integrated out.

    Parameters
    ----------
    model : pymc.Model
    make : callable
        Makes a step method of a model.
    made : callable
        Makes and checks that of the joint model.
    """
    with held_back() as of_joint:
        step = made()
        if of_joint:
            reason = "joint posterior is far from Gaussian"
            tried = [each for part in local_structures(model, FEWEST_IN_NEED) for each in part]
        elif (own := step.posterior.coordinates) is not None:
            stay = [untransformed(each.variable.name) for each in own.effects if not each.is_known]
            log.info("%s stay in the model, in coordinates of their own.", quoted(stay))
            return None, step
        else:
            reason = "step method moves effects as they are in the model"
            tried, _ = local_structures(model, with_coordinates=False)
        for structure in tried[:MOST_TRIALS]:
            if len(structure.names) == len(model.free_RVs):
                continue
            names = quoted(structure.names)
            log.info("The %s, so that without %s is tried in its place.", reason, names)
            try:
                with held_back(give=False) as of_groups:
                    groups = _integrated(model, structure.names, make, tell=False)
            except ModelError as error:
                why = str(error).split("\n")[0]
            else:
                if not of_groups:
                    of_joint.clear()
                    _tell(structure.names, groups.model)
                    return groups, groups.step
                why = str(of_groups[0].message)
            log.info("%s stay in the model: %s", names, why)
    return None, step


def _are_names(choice: Any) -> bool:
    return isinstance(choice, Sequence) and all(isinstance(name, str) for name in choice)


def _tell(names: tuple[str, ...], groups: Model) -> None:
    """Log that variables are integrated out."""
    log.info(
        "%s %s integrated out, so that %d groups are the rows, and drawn at the end. With "
        "`marginalize=None` the joint model is sampled.",
        quoted(names),
        "is" if len(names) == 1 else "are",
        shape_of(groups.observed_RVs[-1])[0],
    )


def _integrated(
    model: Model, names: tuple[str, ...], step: MakeStep, *, tell: bool = True
) -> Groups:
    groups = without_warning(model, names)
    if tell:
        _tell(names, groups)
    made = step(model=groups)
    error = quadrature_of(groups)
    if error is not None and error.shift_of_means is None:
        warn_of_quadrature(error)  # The step method has no centre to compare it at.
    return Groups(model, names, groups, made)
