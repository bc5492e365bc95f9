"""Docstrings of the step methods, with the entries and the example that they share.

Entries of the class above are those of a step method too. One that gives a setting another meaning
has its own entry for it.
"""

from __future__ import annotations

import inspect
import re

from pymc_sgmcmc.step_methods.settings import Settings

_ENTRY = re.compile(r"^(\w+) : .*\n(?:    .*\n|\n(?=    ))*", re.MULTILINE)
_SECTION = re.compile(r"^(?:Raises|Warns|Notes|References|Examples)\n-+\n", re.MULTILINE)
_PARAMETERS = re.compile(r"^Parameters\n-+\n", re.MULTILINE)

_STEP = re.compile(r"^>>> (step = .*)$", re.MULTILINE)
"""A line that makes a step method stands for `_RUN`."""

_RUN = r"""
>>> import numpy as np, pymc as pm
>>> rng = np.random.default_rng(1)
>>> x = rng.normal(size=1000)
>>> with pm.Model():
...     slope = pm.Normal("slope", 0, 10)
...     _ = pm.Normal("y", slope * x, 1.0, observed=2 * x + rng.normal(size=1000))
...     \1
...     idata = pm.sample(
...         step=step, draws=200, tune=50, chains=1, random_seed=1, progressbar=False, quiet=True
...     )
>>> bool(abs(idata.posterior["slope"].mean() - 2) < 0.1)
True
""".strip()


def complete_docstring(cls: type) -> None:
    """Give the docstring of a step method an entry for each of its arguments, and an example."""
    if cls.__doc__ is None:  # left out by `python -OO`
        return
    doc = _STEP.sub(_RUN, inspect.cleandoc(cls.__doc__)) + "\n"
    section = _SECTION.search(doc)
    end = len(doc) if section is None else section.start()
    parameters = _PARAMETERS.search(doc, 0, end)
    start = end if parameters is None else parameters.start()
    own = _entries(doc[start:end])
    above, common = (
        _entries(inspect.cleandoc(each.__doc__ or "") + "\n") for each in (cls.__base__, Settings)
    )
    known = common | above | own
    entries = "".join(known.get(name, "") for name in inspect.signature(cls).parameters)
    cls.__doc__ = f"{doc[:start]}Parameters\n----------\n{entries}\n{doc[end:]}"


def _entries(section: str) -> dict[str, str]:
    """Entries of a section by the name of the parameter."""
    return {match[1]: match[0].rstrip() + "\n" for match in _ENTRY.finditer(section)}
