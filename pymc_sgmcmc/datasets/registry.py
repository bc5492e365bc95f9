"""What is known of each data set before its rows are read: its home, terms, file and hash."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from typing import Any

from pymc_sgmcmc.datasets.dataset import Dataset


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A data set of the registry; see `Dataset` for the attributes not listed here.

    Attributes
    ----------
    files : sequence of str
        Names looked for in a folder, in order: of the download, a file in it, or a converted file.
    member : str
        Name of the file within the archive; "" where the download is none.
    url : str or None
        Address of the download; None where there is none without an account.
    known_hash : str or None
        Of the download, as pooch writes it. None where it is not known: then the loader checks the
        values that it has read.
    columns : sequence of str
        Of a table, those that the frame has, in order.
    categories : mapping of str to sequence
        The values that columns of a CSV file may have.
    ordered, coded : sequence of str
        Those of `categories` whose values have an order, and those that the frame has as numbers
        from 0 in place of the values.
    """

    name: str
    description: str
    source: str
    licence: str
    citation: str
    target: str | None = None
    feature_names: tuple[str, ...] = ()
    group_names: tuple[str, ...] = ()
    n_rows: int
    files: Sequence[str] = ()
    member: str = ""
    url: str | None = None
    known_hash: str | None = None
    columns: Sequence[str] = ()
    categories: Mapping[str, Sequence[str | int]] = field(default_factory=dict)
    ordered: Sequence[str] = ()
    coded: Sequence[str] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """What a `Dataset` tells of itself beside its rows."""
        own = {attribute.name for attribute in fields(self)}
        return {fact.name: getattr(self, fact.name) for fact in fields(Dataset) if fact.name in own}


def _read_registry() -> dict[str, Entry]:
    text = (resources.files(__package__) / "registry.toml").read_text(encoding="utf-8")
    tables: dict[str, dict[str, Any]] = tomllib.loads(text)
    registry = {}
    for name, own in tables.items():
        facts = {**tables.get(own.pop("like", ""), {}), **own}
        lists = {key: tuple(fact) for key, fact in facts.items() if isinstance(fact, list)}
        registry[name] = Entry(name=name, **{**facts, **lists})
    return registry


REGISTRY = _read_registry()
"""All data sets by name. Two have no file: they are part of statsmodels."""
