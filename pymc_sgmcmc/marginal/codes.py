"""Arrays of codes that say which record belongs to which group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.subtensor import AdvancedSubtensor
from pytensor.tensor.type import TensorType
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.graphs import value_of
from pymc_sgmcmc.posterior.group_access import GroupsOfSource, column_of
from pymc_sgmcmc.posterior.rows import keep_whole
from pymc_sgmcmc.sources import RowSource


class EmptyGroupsError(ModelError):
    """Some groups have no records."""


@dataclass(frozen=True, eq=False)
class Records:
    """Records that lie in groups by an array of codes: record i belongs to group ``codes[i]``.

    Attributes
    ----------
    variables : tuple of Variable
        The variables of the graph that hold the codes.
    codes : numpy.ndarray, shape (records,)
        Those in the model, which are the first ones where the records are rows of a source.
    n_groups : int
    column : tuple of (RowSource, str), optional
        The source, and its column of codes, where the records are rows of one.
    """

    variables: tuple[Variable, ...]
    codes: np.ndarray
    n_groups: int
    column: tuple[RowSource, str] | None = None

    @property
    def n_records(self) -> int:
        """Number of all records."""
        return len(self.codes) if self.column is None else self.column[0].n_rows

    @cached_property
    def order(self) -> np.ndarray:
        """Numbers of the records, sorted by group."""
        return np.argsort(self.codes, kind="stable")

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of records of each group."""
        return np.bincount(self.codes, minlength=self.n_groups)

    def starts(self) -> SharedVariable:
        """Place of the first record of each group where these lie group after group."""
        return keep_whole(np.cumsum(self.counts) - self.counts, "starts")

    def data(self, variable: Variable, values: np.ndarray, name: str) -> SharedVariable:
        """Data of the records, group after group.

        Parameters
        ----------
        variable : Variable
            That of the graph.
        values : numpy.ndarray
            Data of the records in the order of the codes.
        name : str
        """
        size = float(self.counts.mean()) * values[0].size
        return keep_whole(values[self.order], name, elements_a_row=size)


@dataclass(frozen=True, eq=False)
class RecordsOfSource(Records):
    """Records that are rows of a source, of which the codes are those of the first ones.

    Attributes
    ----------
    groups : GroupsOfSource
    """

    groups: GroupsOfSource = field(kw_only=True)

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of records of each group."""
        return self.groups.index.counts

    def starts(self) -> SharedVariable:
        """Place of the first record of each group among those that are in memory."""
        return self.groups.starts

    def data(self, variable: Variable, values: np.ndarray, name: str) -> SharedVariable:
        """Data of the records that are in memory, group after group.

        Raises
        ------
        ModelError
            Where the variable is no column of the source.
        """
        column = column_of(variable)
        if column is None or column[0] is not self.groups.source:
            raise ModelError(
                f"The data `{name}` have as many rows as those that `rows.head` returned, "
                f"{len(values)}, but are no column of `rows`. Add a column to `rows`, or choose "
                "another number of rows in `rows.head`."
            )
        return self.groups.whole(column[1], values)


@dataclass(frozen=True)
class Index:
    """A place where a quantity that depends on local variables is indexed by codes."""

    indexed: Variable
    codes: Variable
    axis: int
    length: int
    of: tuple[Variable, ...]


def find_indices(
    log_density: Variable,
    values: Sequence[Variable],
    length_of: Callable[[Variable, int], int],
) -> list[Index]:
    """Places where something that depends on local values is indexed by an array of integers.

    Parameters
    ----------
    log_density : Variable
    values : sequence of Variable
    length_of : callable
        The length of a variable along an axis.
    """
    depends_on: dict[Variable, frozenset[Variable]] = {
        value: frozenset([value]) for value in values
    }
    indices = []
    for node in toposort([log_density]):
        of = frozenset().union(*(depends_on.get(v, frozenset()) for v in node.inputs))
        if not of:
            continue
        if (
            isinstance(node.op, AdvancedSubtensor)
            and node.inputs[0] in depends_on
            and (place := _array_index(node)) is not None
        ):
            axis, codes = place
            length = length_of(node.inputs[0], axis)
            indices.append(
                Index(node.inputs[0], codes, axis, length, tuple(v for v in values if v in of))
            )
            continue  # The result has one entry a record, and its further indices no groups.
        for output in node.outputs:
            depends_on[output] = of
    return indices


def indexed_beside(log_density: Variable, indices: Sequence[Index]) -> list[Variable]:
    """Quantities without local values that the same codes index, such as predictors of groups."""
    of_locals = {index.indexed for index in indices}
    codes = {index.codes for index in indices}
    return [
        node.inputs[0]
        for node in toposort([log_density])
        if isinstance(node.op, AdvancedSubtensor)
        and node.inputs[0] not in of_locals
        and (place := _array_index(node)) is not None
        and place[1] in codes
    ]


def _array_index(node) -> tuple[int, Variable] | None:
    """Axis and variable of the first index that is an array."""
    for axis, entry in enumerate(node.op.idx_list):
        if isinstance(entry, int):
            index = node.inputs[1 + entry]
            if isinstance(index.type, TensorType) and index.type.ndim and index.dtype != "bool":
                return axis, index
    return None


def _values_of_codes(index: Index, name: str) -> np.ndarray:
    """Codes of the records, which may be computed from data but not from parameters."""
    try:
        codes = np.asarray(value_of(index.codes))
    except Exception:
        codes = None
    if codes is None or codes.dtype.kind not in "iu":
        raise ModelError(
            f"The groups of the records of `{name}` should be given by an array of integers, but "
            "depend on parameters or on text. Index the local variables by data."
        )
    if codes.ndim != 1:
        raise ModelError(
            f"Each record of `{name}` should belong to one group, but the index array has shape "
            f"{codes.shape}. Records that belong to several groups cannot be integrated out."
        )
    return codes


def find_records(variable: TensorVariable, places: list[Index], n_groups: int) -> Records | None:
    """Records of an observed variable, None where its entries are the groups."""
    if not places:
        return None
    codes = [_values_of_codes(index, variable.name) for index in places]
    columns = {column_of(index.codes) for index in places}  # alike in the first rows, perhaps
    if len(columns) > 1 or not all(np.array_equal(codes[0], other) for other in codes[1:]):
        raise ModelError(
            f"The records of `{variable.name}` belong to groups by two different index arrays: the "
            "effects are crossed, or a record depends on two groups. Integrate out one factor, "
            "and leave the other in the model."
        )
    column = column_of(places[0].codes)
    _check_codes(codes[0], n_groups, variable.name)
    if column is None:
        for root in ancestors([places[0].codes]):
            if column_of(root) is not None:
                raise ModelError(
                    f"The codes of the groups of the records of `{variable.name}` should be a "
                    f"column of `rows`, but are computed from `{root.name}`. Add such a column by "
                    "`rows.transform`."
                )
        _check_all_present(codes[0], n_groups, variable.name)
    return Records(
        tuple(index.codes for index in places), codes[0].astype(np.int64), n_groups, column
    )


def _check_codes(codes: np.ndarray, n_groups: int, name: str) -> None:
    """Refuse codes out of range."""
    wrong = (codes < 0) | (codes >= n_groups)
    if wrong.any():
        record = int(np.argmax(wrong))
        raise ModelError(
            f"The group codes of `{name}` should be between 0 and {n_groups - 1}, but record "
            f"{record} has {codes[record]}. Number the groups from 0, as `pandas.factorize` does."
        )


def _check_all_present(codes: np.ndarray, n_groups: int, name: str) -> None:
    """Refuse groups without records."""
    empty = np.flatnonzero(np.bincount(codes, minlength=n_groups) == 0)
    if len(empty):
        shown = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise EmptyGroupsError(
            f"Each of the {n_groups} groups should have records of `{name}`, but {len(empty)} have "
            f"none (codes {shown}). Drop these groups, for example by `pandas.factorize`."
        )
