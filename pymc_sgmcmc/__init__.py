"""Stochastic gradient MCMC for PyMC models.

Write a PyMC model, pass one of the step methods to `pymc.sample`, and get an ArviZ-schema
`DataTree` in a time that does not grow with the data:

>>> import pymc as pm
>>> from pymc_sgmcmc import SGLDCV
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pymc_sgmcmc.api import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import all public names with the first of them: ``python -m pymc_sgmcmc`` may need none."""
    if not name.startswith("__") or name == "__all__":
        importlib.import_module("pymc_sgmcmc.pymc_private")  # first: it refuses an older PyMC
        api = vars(importlib.import_module("pymc_sgmcmc.api"))
        public = {key: value for key, value in api.items() if not key.startswith("__")}
        globals().update(public, __all__=[*sorted(public), "__version__"])
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__getattr__("__all__"))
