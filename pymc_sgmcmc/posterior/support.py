"""Variables with a bounded support that no transform takes to the whole space.

Langevin dynamics know of the support by its transform alone. Without one the chain leaves it, and
the gradient beyond the bound is that of no density.
"""

from __future__ import annotations

from pymc.distributions import transforms
from pymc.distributions.transforms import _default_transform
from pymc.logprob.transforms import CircularTransform, IntervalTransform, LogTransform
from pymc.model import Model
from pytensor.graph.basic import Constant
from pytensor.tensor import TensorVariable


def bounded_variables(model: Model) -> dict[str, bool]:
    """Free variables with a bounded support and no transform, and whether they are positive."""
    bounded = {}
    for variable in model.free_RVs:
        if model.rvs_to_transforms[variable] is not None or variable.owner is None:
            continue
        usual = _default_transform(variable.owner.op, variable)
        # Angles have no end: beyond π the density goes on as it does beyond -π.
        if usual is not None and not isinstance(usual, CircularTransform):
            bounded[variable.name] = _is_positive(usual, variable)
    return bounded


def _is_positive(usual: transforms.Transform, variable: TensorVariable) -> bool:
    """Whether a support is all positive numbers, by the transform that PyMC has for it."""
    if isinstance(usual, LogTransform):
        return True
    if not isinstance(usual, IntervalTransform):
        return False
    lower, upper = usual.args_fn(*variable.owner.inputs)
    return isinstance(lower, Constant) and not lower.data.any() and upper is None
