"""What makes a run the same run: model, data, settings and versions, and the numbers of its set-up.

A run that is resumed is compared with its store, and each difference has a name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from typing import Any

import numpy as np
import pytensor
from pymc.logprob.abstract import _logprob
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import toposort
from pytensor.tensor.random.type import RandomType

from pymc_sgmcmc.posterior.terms import without_scaling
from pymc_sgmcmc.record import SETUP_PASSES, SETUP_SECONDS
from pymc_sgmcmc.schedules import step_sizes
from pymc_sgmcmc.step_methods.base import StochasticGradientStep

PACKAGES = ("pymc_sgmcmc", "pymc", "pytensor", "numpy")
"""Other versions of these may draw other numbers."""

LAST_DIGITS = 1e-6
"""Numbers of a set-up that differ by less, relatively, are the same but for rounding."""

HASHED_BYTES = 2**24
"""Data that do not lie in one piece are copied in parts of about this size."""

SCHEDULE = tuple(10**power for power in range(7))
"""A schedule of step sizes is compared at these transitions."""

OF_THE_CALL = ("chains", "tune", "random_seed", "step", "backend", "floatX")
"""These settings are not computed from the model."""

Identity = Mapping[str, Mapping[str, Any]]
"""Values that can be compared, by their kind and their name."""


def identity_of(
    model: Model,
    step: StochasticGradientStep,
    points: Sequence[Mapping[str, np.ndarray]],
    *,
    tune: int,
    seed: str,
) -> Identity:
    """What has to be the same where a run is resumed.

    Parameters
    ----------
    model : Model
    step : StochasticGradientStep
    points : sequence of mappings
        Initial values of each chain.
    tune : int
    seed : str
        Hash of the generator.
    """
    settings = {
        name: value
        for name, value in step.run_settings.attributes.items()
        if name not in ("why", SETUP_PASSES, SETUP_SECONDS)
    }
    return {
        **identity_of_model(model),
        "setting": {
            "chains": len(points),
            "tune": tune,
            "random_seed": seed,
            "step": type(step).__name__,
            "backend": str(pytensor.config.mode),
            "floatX": str(step.posterior.dtype),
            **{name: _plain(value) for name, value in settings.items()},
        },
        "argument": _arguments(step),
        "initial values": {
            f"chain {number}": _hash(np.asarray(values) for values in point.values())
            for number, point in enumerate(points)
        },
        "version": {name: _version(name) for name in PACKAGES},
    }


def identity_of_model(model: Model) -> Identity:
    """Variables, their shapes, dimensions, transforms and graphs, and hashes of the data."""
    data: dict[str, str] = {}
    variables: dict[str, Any] = {}
    kinds = {"free": model.free_RVs, "observed": model.observed_RVs, "potential": model.potentials}
    known = {variable: str(variable.name) for part in kinds.values() for variable in part}
    for kind, part in kinds.items():
        for variable in part:
            name = str(variable.name)
            transform = model.rvs_to_transforms.get(variable)
            dims = model.named_vars_to_dims.get(name)
            variables[name] = {
                "kind": kind,
                "dims": None if dims is None else [str(dim) for dim in dims],
                "transform": None if transform is None else type(transform).__name__,
                "definition": _structure(variable, name, known, data),
            }
            if kind == "free":
                variables[name]["shape"] = list(model.rvs_to_values[variable].type.shape)
            elif kind == "observed":
                value = model.rvs_to_values[variable]
                variables[name]["values"] = _structure(value, name, {}, data)
    names_of_data = {hashed: name for name, hashed in data.items()}

    def text(graphs: Iterable[Variable], value: Variable) -> str:
        here = {**known, value: "value"}
        parts = [_structure(each, "", here, {}, names_of_data=names_of_data) for each in graphs]
        return " ".join(parts)

    # The definitions lack functions that make densities, and parameters of transforms.
    for variable in model.basic_RVs:
        of_variable = variables[str(variable.name)]
        node, value = without_scaling(variable).owner, variable.type()
        with suppress(NotImplementedError):  # Then PyMC derives it from the definition.
            density = _logprob(node.op, (value,), *node.inputs)
            of_variable["log density"] = text([density], value)
        transform = model.rvs_to_transforms.get(variable)
        if transform is not None:
            moved = transform.forward(value, *node.inputs).type()
            graphs = [
                each(moved, *node.inputs) for each in (transform.backward, transform.log_jac_det)
            ]
            of_variable["transform"] += f" {text(graphs, moved)}"
    return {"variable": variables, "data": data}


def _structure(
    variable: Variable,
    name: str,
    known: Mapping[Variable, str],
    data: dict[str, str],
    *,
    names_of_data: Mapping[str, str] | None = None,
) -> str:
    """Hash of a graph up to known variables, without its data, whose hashes are added by names.

    Scalars are part of the model, as the parameters of a prior are. With `names_of_data`, by their
    hashes, nothing is added, and all other arrays are part of the model as well.
    """
    lines: list[str] = []
    numbers: dict[Variable, int] = {}
    blockers = set(known) - {variable}

    def add(each: Variable, text: str) -> None:
        numbers[each] = len(numbers)
        # Without the shape, since the number of rows belongs to the data.
        kind = (type(each.type).__name__, getattr(each.type, "dtype", ""), getattr(each, "ndim", 0))
        lines.append(f"{numbers[each]} {kind} {text}")

    def leaf(each: Variable) -> None:
        if each in blockers:
            add(each, known[each])
            return
        values = _data_of(each)
        if values is None:
            add(each, "input" if not isinstance(each, Constant) else _text(each.data))
        elif values.ndim == 0 and not isinstance(each, SharedVariable):
            add(each, repr(values.item()))
        else:
            hashed = _hash([values])
            if names_of_data is not None:
                add(each, f"data {names_of_data.get(hashed, hashed)}")
                return
            key = base = str(each.name or name)
            for number in count(2):  # Several arrays may have no name.
                if data.get(key, hashed) == hashed:
                    break
                key = f"{base}, array {number}"
            data[key] = hashed
            add(each, f"data {key}")

    for node in toposort([variable], blockers=blockers):
        for each in node.inputs:
            if each not in numbers:
                leaf(each)
        text = f"{type(node.op).__name__} {_text(node.op)} {[numbers[i] for i in node.inputs]}"
        inner = getattr(getattr(node.op, "fgraph", None), "outputs", ())
        for graph in (*inner, *getattr(node.op, "graphs", ())):  # the second of models of groups
            text += _structure(graph, name, {}, data, names_of_data=names_of_data)
        for each in node.outputs:
            add(each, text)
    if variable not in numbers:
        leaf(variable)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _data_of(variable: Variable) -> np.ndarray | None:
    """Numbers of a constant or shared variable, None for anything else."""
    if isinstance(variable.type, RandomType):
        return None  # a generator, whose state says nothing about the model
    if isinstance(variable, Constant):
        values = variable.data
    elif isinstance(variable, SharedVariable):
        values = variable.get_value(borrow=True)
    else:
        return None
    if hasattr(values, "tocoo"):  # a sparse matrix
        coordinates = values.tocoo()
        return np.stack([coordinates.row, coordinates.col, coordinates.data])
    return values if isinstance(values, np.ndarray) else None


def _text(value: Any) -> str:
    """A description that is the same in each process: without addresses in memory."""
    return re.sub(r"0x[0-9a-fA-F]+", "", str(value))


def _hash(arrays: Iterable[np.ndarray]) -> str:
    """Hash of the numbers of arrays, with their types and shapes."""
    digest = hashlib.sha256()
    for values in arrays:
        digest.update(f"{values.dtype.str} {values.shape}".encode())
        if values.dtype.kind not in "biufc":
            digest.update(_text(values.tolist()).encode())
        elif values.flags.c_contiguous:
            digest.update(values.reshape(-1).view(np.uint8).data)
        else:
            rows = max(1, HASHED_BYTES // max(1, values[:1].nbytes))
            for start in range(0, len(values), rows):
                digest.update(np.ascontiguousarray(values[start : start + rows]).data)
    return digest.hexdigest()


def _version(package: str) -> str | None:
    """Version of a package, None where it was not installed but lies on Python's path."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _arguments(step: StochasticGradientStep) -> dict[str, Any]:
    """Arguments with which the step method was made, but for the model and its variables."""
    _, arguments = step.__getnewargs_ex__()
    left_out = ("model", "vars")
    return {name: _described(value) for name, value in arguments.items() if name not in left_out}


def _described(value: Any) -> Any:
    """A value of JSON that tells an argument from others."""
    if isinstance(value, np.generic | int | float | str | bool) or value is None:
        return _plain(value)
    if isinstance(value, np.ndarray):
        return _hash([value])
    if isinstance(value, Mapping):
        return {str(key): _described(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_described(item) for item in value]
    code = getattr(value, "__code__", None)
    if code is not None:
        constants = [_text(constant) for constant in code.co_consts]
        text = f"{code.co_code.hex()} {constants} {code.co_names}"
        return hashlib.sha256(text.encode()).hexdigest()
    return _text(value)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


# --- Numbers of the set-up ------------------------------------------------------------------


def numbers_of(step: StochasticGradientStep, point: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Numbers that the set-up has computed, with the first draw from initial values.

    This draw depends on everything that a chain depends on.
    """
    before = step.sampling_state
    _, stats = next(step.runs(np.random.default_rng(1), dict(point), 0, 1))
    step.sampling_state = before
    schedule = [step_sizes(step.step_size, number, 1)[0] for number in SCHEDULE]
    return {
        **{name: np.array(array) for name, array in step.run_settings.arrays.items()},
        "step sizes": np.asarray(schedule),
        "first draw": np.array(stats["position"]),
        "gradient at the first draw": np.array(stats["gradient"]),
    }


def rounded_differences(
    stored: Mapping[str, np.ndarray], present: Mapping[str, np.ndarray]
) -> tuple[list[str], list[str]]:
    """Names of the numbers that differ: by rounding alone, and by more."""
    rounded: list[str] = []
    others: list[str] = []
    for name in {**stored, **present}:
        left, right = stored.get(name), present.get(name)
        if left is None or right is None or left.shape != right.shape or left.dtype != right.dtype:
            others.append(name)
        elif left.tobytes() != right.tobytes():
            scale = float(np.max(np.abs(left[np.isfinite(left)]), initial=0))
            close = np.allclose(left, right, LAST_DIGITS, LAST_DIGITS * scale, equal_nan=True)
            (rounded if close else others).append(name)
    return rounded, others


# --- Differences ----------------------------------------------------------------------------


def differences(stored: Identity, present: Identity) -> list[str]:
    """Each difference between two identities, in words.

    Where model or data differ, settings that were computed from them are left out.
    """
    found = {
        kind: _differences_of(kind, stored.get(kind, {}), present.get(kind, {}))
        for kind in {**stored, **present}
    }
    if found.get("variable") or found.get("data"):
        given = {*present.get("argument", {}), *OF_THE_CALL}
        settings = [
            {name: value for name, value in each.get("setting", {}).items() if name in given}
            for each in (stored, present)
        ]
        found["setting"] = _differences_of("setting", *settings)
    return [text for texts in found.values() for text in texts]


def _differences_of(kind: str, stored: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    texts = [f"{kind} `{name}` is missing" for name in stored if name not in present]
    texts += [f"{kind} `{name}` is new" for name in present if name not in stored]
    for name in [name for name in stored if name in present]:
        left, right = stored[name], present[name]
        if kind == "variable":
            parts = [part for part in left if left[part] != right.get(part)]
            if parts:
                texts.append(f"{kind} `{name}` has another {', '.join(parts)}")
        elif not _same(left, right):
            change = "is another one" if _is_hash(left) else f"is {right!r} in place of {left!r}"
            texts.append(f"{kind} `{name}` {change}")
    return texts


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return bool(np.isclose(left, right, rtol=LAST_DIGITS, atol=0, equal_nan=True))
    return left == right


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None
