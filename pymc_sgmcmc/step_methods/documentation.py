"""Docstrings of the step methods, with the entries of the settings that they share.

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


def documented[Class: type](cls: Class) -> Class:
    """Give the docstring of a step method an entry for each argument of its signature."""
    if cls.__doc__ is None:  # left out by `python -OO`
        return cls
    doc = inspect.cleandoc(cls.__doc__) + "\n"
    section = _SECTION.search(doc)
    end = len(doc) if section is None else section.start()
    parameters = _PARAMETERS.search(doc, 0, end)
    start = end if parameters is None else parameters.start()
    own = _entries(doc[start:end])
    above, common = (
        _entries(inspect.cleandoc(each.__doc__ or "")) for each in (cls.__base__, Settings)
    )
    known = common | above | own
    entries = "".join(known.get(name, "") for name in inspect.signature(cls).parameters)
    cls.__doc__ = f"{doc[:start]}Parameters\n----------\n{entries}\n{doc[end:]}"
    return cls


def _entries(section: str) -> dict[str, str]:
    """Entries of a section by the name of the parameter."""
    return {match[1]: match[0].rstrip() + "\n" for match in _ENTRY.finditer(section)}
