"""The registry of data sets: home, licence, file and hash of each, known before it is read."""

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
        File names to look for in a folder, in order: the download, a file in it, or a converted
        file.
    member : str
        Name of the file within the archive; "" where the download is no archive.
    sample : str
        Name of a part of the rows, which is taken where a folder has its file alone; "" for none.
    url : str
        Address of the download; "" where there is none without an account.
    known_hash : str or None
        Hash of the download, as pooch writes it, None where it is not known.
    values_sha256 : str or None
        SHA-256 of the values that are read, whatever the format of the file, where it is known and
        `known_hash` is not. A download with neither is not verified, and a warning says so.
    hashed_as : str
        The type of the values in that hash.
    format : {"csv", "integers", "svmlight", "lda-c", "statsmodels"}
        "csv" has a header, and "integers" has none. The last one is a table inside statsmodels.
    separator, fields : str, sequence of int
        What separates the fields of "integers", and which of them to read, all where none is named.
    arrays : sequence of str
        The arrays of a converted file.
    columns : sequence of str
        The columns of a file that the frame has, in order: features and target where not given.
    ranges : sequence of (low, high, first, last)
        The values that the columns from `first` to before `last` may have.
    target_counts, n_words : sequence of int, int
        How often the target has each of its values, from 1 on, and the words of the vocabulary.
    types : sequence of str
        Types of the features and of the target, where they are not those of the file.
    categories : mapping of str to sequence
        The values that columns may have.
    ordered, coded : sequence of str
        The keys of `categories` whose values have an order, and the keys whose columns hold numbers
        from 0 in the frame, in place of the values.
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
    sample: str = ""
    url: str = ""
    known_hash: str | None = None
    values_sha256: str | None = None
    hashed_as: str = ""
    format: str = "csv"
    separator: str = ","
    fields: Sequence[int] | None = None
    arrays: Sequence[str] = ("X", "y")
    columns: Sequence[str] = ()
    ranges: Sequence[tuple[float, float, int, int]] = ()
    target_counts: Sequence[int] = ()
    n_words: int = 0
    types: Sequence[str] = ()
    categories: Mapping[str, Sequence[str | int]] = field(default_factory=dict)
    ordered: Sequence[str] = ()
    coded: Sequence[str] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """The attributes of a `Dataset` other than its rows."""
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
"""This mapping holds all data sets by name. Two of them have no file: statsmodels has them."""
