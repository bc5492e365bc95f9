"""Stochastic gradient MCMC for PyMC models.

Write a PyMC model, pass one of the step methods to `pymc.sample`, and get an ArviZ-schema
`DataTree` in a time that does not grow with the data:

>>> import pymc as pm
>>> from pymc_sgmcmc import SGLDCV
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pymc_sgmcmc.api import *  # noqa: F403
    from pymc_sgmcmc.local_sampling import *  # noqa: F403
    from pymc_sgmcmc.machines import *  # noqa: F403
    from pymc_sgmcmc.maximum_likelihood import *  # noqa: F403
    from pymc_sgmcmc.papers import *  # noqa: F403

__version__ = "0.1.0"

GUESTS = {
    "local_sampling": ("LocalSampling",),
    "machines": ("consensus", "sample_blocks"),
    "maximum_likelihood": ("fit_marginal",),
    "papers": (
        "AusterityMH",
        "GaussianAuxiliary",
        "NormalInverseWishart",
        "PriorMetropolis",
        "Recipe",
        "SGRLD",
    ),
}
"""Rooms that the others do not import, with their public names. They are imported by themselves."""


ROOMS = {room.name for room in pkgutil.iter_modules(__path__)} - {"__main__"}  # noqa: F405


def __getattr__(name: str) -> Any:
    """Import all public names with the first of them: ``python -m pymc_sgmcmc`` may need none."""
    if name in ROOMS:  # "from pymc_sgmcmc import tuning" asks here first: the room alone, no circle
        return importlib.import_module(f"{__name__}.{name}")
    room = next((room for room, names in GUESTS.items() if name in names), None)
    if not name.startswith("__") or name == "__all__":
        importlib.import_module("pymc_sgmcmc.pymc_private")  # first: it refuses an older PyMC
        api = vars(importlib.import_module(f"pymc_sgmcmc.{room or 'api'}"))
        public = {key: value for key, value in api.items() if not key.startswith("__")}
        if room is None:
            others = [one for names in GUESTS.values() for one in names]
            public["__all__"] = [*sorted({*public, *others}), "__version__"]
            globals().update(public)
        if name in public:
            globals()[name] = public[name]
            return public[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__getattr__("__all__"))
