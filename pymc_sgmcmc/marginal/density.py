"""The joint log density of chosen groups: their records and their local variables.

A group is a row here. Its records are a segment of a copy of the data that is sorted by group, so
that groups of any size cost in proportion to their records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.marginal.codes import Records
from pymc_sgmcmc.marginal.structure import LocalStructure, LocalTerm
from pymc_sgmcmc.posterior.graphs import Length, leaf_value, rebuild, value_of
from pymc_sgmcmc.posterior.group_access import GroupsOfSource
from pymc_sgmcmc.posterior.reading import axes_of_length
from pymc_sgmcmc.posterior.rows import keep_whole
from pymc_sgmcmc.posterior.simplify import drop_settled_switches, prepared


class _ChosenRecords:
    """The records of chosen groups, which are segments of the data sorted by group.

    Attributes
    ----------
    group : TensorVariable, shape (records,)
        For each record the place of its group among the chosen ones.
    """

    def __init__(self, records: Records, numbers: TensorVariable):
        counts, self._records = records.counts, records
        starts = records.starts()[numbers]
        places = pt.arange(numbers.shape[0])
        self._size: SharedVariable | None = None
        if (counts == counts[0]).all():
            self._size = keep_whole(counts[0], "records_a_group")
            within = pt.arange(self._size)
            self.group = (places[:, None] + pt.zeros_like(within)).ravel()
            self._record = (starts[:, None] + within).ravel()
        else:
            of_chosen = keep_whole(counts, "counts")[numbers]
            self.group = pt.repeat(places, of_chosen)
            shift = starts - (pt.cumsum(of_chosen) - of_chosen)
            self._record = pt.arange(of_chosen.sum()) + shift[self.group]

    @property
    def length(self) -> TensorVariable:
        """Number of records of the chosen groups."""
        return self.group.shape[0]

    def take(self, variable: Variable, axis: int, term: str) -> TensorVariable:
        """Data of the records of the chosen groups, from data of all records."""
        values = np.moveaxis(value_of(variable), axis, 0)
        whole = self._records.data(variable, values, variable.name or f"data of {term}")
        return pt.moveaxis(whole[self._record], 0, axis)

    def sum(self, values: TensorVariable, n_groups: TensorVariable) -> TensorVariable:
        """Sums over the records of each group, along the last axis."""
        leading = [values.shape[axis] for axis in range(values.type.ndim - 1)]
        if self._size is not None:
            return values.reshape([*leading, n_groups, self._size]).sum(axis=-1)
        zeros = pt.zeros([*leading, n_groups], dtype=values.dtype)
        return zeros[..., self.group].inc(values)


@dataclass(frozen=True, eq=False)
class _Piece:
    """A term of the log density for chosen groups, with one entry a group or a record."""

    values: TensorVariable
    records: _ChosenRecords | None


class GroupDensity:
    r"""Joint log density of records and local variables of chosen groups.

    .. math:: \log p(y_g, u_g \mid \theta), \quad g \in S

    Parameters
    ----------
    structure : LocalStructure
    only_beside_rows : bool
        See `pymc_sgmcmc.posterior.graphs.rebuild`.
    by_group : bool
        Whether the entries of a parameter that is as long as there are groups belong to them.

    Attributes
    ----------
    block : TensorVariable, shape (groups, q)
        Placeholder for the local quantities of the chosen groups, unconstrained.
    numbers : TensorVariable, shape (groups,)
        Placeholder for the numbers of the chosen groups.
    parameters : dict of str to TensorVariable
        Placeholders for the global random variables.
    """

    def __init__(
        self, structure: LocalStructure, *, only_beside_rows: bool = False, by_group: bool = True
    ):
        self.structure = structure
        self.parameters = structure.parameters
        self.block = pt.tensor(
            "block", shape=(None, structure.block_size), dtype=structure.locals[0].value.dtype
        )
        # Derivatives by vectors need no matrices of zeros around them.
        self.columns = self.split(self.block)
        self.numbers = pt.tensor("numbers", shape=(None,), dtype="int64")
        self._only_beside_rows = only_beside_rows
        self._reading = {"only_beside_rows": only_beside_rows, "by_group": by_group}
        self._by_group = structure.axes_of_groups if by_group else {}
        self._pieces = self._make_pieces()

    def on_source(self) -> GroupDensity:
        """That of all records, where those of the model are the first rows of a source.

        It takes one or two passes over the column of codes.
        """
        column = self.structure.column
        if column is None:
            return self
        groups = GroupsOfSource(*column, self.structure.n_groups)
        return GroupDensity(self.structure.on_groups(groups), **self._reading)

    @property
    def groups_of_source(self) -> GroupsOfSource | None:
        """Where the records are, None where they are in memory."""
        return self.structure.groups_of_source

    def hold(self, numbers: np.ndarray) -> None:
        """Have the records of some groups in memory, from now on."""
        if self.groups_of_source is not None:
            self.groups_of_source.hold(numbers)

    def each_held(self, parts: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """Parts of the groups, each with its records in memory meanwhile."""
        if self.groups_of_source is None:
            return iter(parts)
        return self.groups_of_source.each_held(parts)

    @property
    def records_a_group(self) -> float:
        """Mean number of records of a group."""
        return self.structure.n_records / self.structure.n_groups

    @property
    def block_size(self) -> int:
        """q, the number of local quantities of one group."""
        return self.structure.block_size

    def _make_pieces(self) -> list[_Piece]:
        chosen: dict[bytes, _ChosenRecords] = {}
        pieces = []
        for term in self._settled_terms():
            records = None
            if term.records is not None:
                codes = term.records.codes.tobytes()
                if codes not in chosen:
                    chosen[codes] = _ChosenRecords(term.records, self.numbers)
                records = chosen[codes]
            values = self._of_chosen(term, records)
            others = [axis for axis in range(values.type.ndim) if axis != term.axis]
            pieces.append(_Piece(values.sum(axis=others) if others else values, records))
        # Rewrites copy all but the inputs of a graph.
        inputs = [column.type() for column in self.columns]
        graphs = self.at([piece.values for piece in pieces], inputs)
        graphs = rebuild(
            [prepared(graph) for graph in graphs], dict(zip(inputs, self.columns, strict=True))
        )
        return list(map(_Piece, graphs, [piece.records for piece in pieces]))

    def _settled_terms(self) -> list[LocalTerm]:
        """The terms without checks of the support that all data in memory pass."""
        terms = self.structure.terms
        if self.structure.column is not None:
            return list(terms)  # The data are the first records only.
        log_densities = [term.log_density for term in terms]
        data = [
            variable
            for variable in ancestors(log_densities)
            if leaf_value(variable) is not None and variable not in self.structure.lengths_of_groups
        ]
        # The data have their values, and there are no rows beside.
        settled = drop_settled_switches(log_densities, data, lambda of, value: [of(value, [])])
        return [
            replace(term, log_density=log_density)
            for term, log_density in zip(terms, settled, strict=True)
        ]

    @cached_property
    def start(self) -> TensorVariable:
        """Support points of the local variables of the chosen groups, shape (groups, q)."""
        n_chosen = self.numbers.shape[0]
        columns = []
        for local in self.structure.locals:
            term = LocalTerm(local.name, local.start, local.axis, None, (), False)
            values = self._of_chosen(term, None)
            leading = pt.moveaxis(values, local.axis, 0)
            # The support point may be one number for all groups.
            shape = (n_chosen, *local.shape_in_group)
            columns.append(pt.broadcast_to(leading, shape).reshape((n_chosen, -1)))
        return pt.specify_shape(pt.concatenate(columns, axis=1), (None, self.block_size))

    def _of_chosen(self, term: LocalTerm, records: _ChosenRecords | None) -> TensorVariable:
        """A term with its data and local variables replaced by those of the chosen groups."""
        n_groups, n_chosen = self.structure.n_groups, self.numbers.shape[0]
        replacements: dict[Variable, Variable] = dict(self.local_values)
        replacements |= dict.fromkeys(self.structure.lengths_of_groups, n_chosen)
        lengths = [Length(n_groups, n_chosen)]
        # What is indexed by codes has one entry a group, and the rest of the term one a record.
        of_groups = set(ancestors([term.log_density] if term.records is None else term.indexed))
        for parameter, axis in self._by_group.items():
            if parameter in of_groups:
                of_chosen = pt.moveaxis(parameter, axis, 0)[self.numbers]
                replacements[parameter] = pt.moveaxis(of_chosen, 0, axis)
        if term.records is not None and records is not None:
            for codes in term.records.variables:
                replacements[codes] = records.group.astype(codes.dtype)
        for variable, axis in axes_of_length(term.log_density, n_groups, replacements).items():
            if variable in of_groups:
                values = np.moveaxis(value_of(variable), axis, 0)
                whole = keep_whole(values, variable.name or f"data of {term.name}")
                replacements[variable] = pt.moveaxis(whole[self.numbers], 0, axis)
        if term.records is not None and records is not None:
            n_records = len(term.records.codes)
            lengths.append(Length(n_records, records.length))
            axes = axes_of_length(term.log_density, n_records, replacements)
            replacements |= {
                each: records.take(each, axis, term.name) for each, axis in axes.items()
            }
        return rebuild([term.log_density], replacements, lengths, self._only_beside_rows)[0]

    @cached_property
    def local_values(self) -> dict[TensorVariable, TensorVariable]:
        """What stands for the value variables, of columns of the block."""
        pieces: dict[TensorVariable, TensorVariable] = {}
        start = 0
        for local in self.structure.locals:
            stop = start + local.size_in_group
            piece = self.columns[start]
            if local.shape_in_group:
                piece = pt.stack(self.columns[start:stop], axis=1)
                piece = piece.reshape((piece.shape[0], *local.shape_in_group))
            pieces[local.entries] = pt.moveaxis(piece, 0, local.axis) if local.axis else piece
            start = stop
        return pieces

    def of_records(self, integral: TensorVariable) -> TensorVariable:
        """The integral of each chosen group over its local variables, 0 where it has no records.

        There it is that of the prior, which a quadrature would not give exactly.
        """
        counts = np.zeros(self.structure.n_groups)
        for term in self.structure.terms:
            if term.observed:  # Its entries may be those of the groups.
                counts += 1 if term.records is None else term.records.counts
        if counts.all():
            return integral
        present = keep_whole((counts > 0).astype(integral.dtype), "present")
        return present[self.numbers] * integral

    def at(
        self, graphs: Sequence[TensorVariable], columns: Sequence[TensorVariable]
    ) -> list[TensorVariable]:
        """Graphs with the columns of a block for those of the placeholder."""
        return rebuild(graphs, dict(zip(self.columns, columns, strict=True)))

    def split(self, block: TensorVariable) -> list[TensorVariable]:
        """Columns of a block, whose number is not known statically, or of several blocks."""
        return [block[..., column] for column in range(self.block_size)]

    @cached_property
    def value(self) -> TensorVariable:
        """Joint log density of each chosen group, shape (groups,)."""
        return self._sum([piece.values for piece in self._pieces])

    def at_points(self, points: TensorVariable) -> TensorVariable:
        """Joint log densities, shape (points, groups), of several blocks for each chosen group.

        Parameters
        ----------
        points : TensorVariable, shape (points, groups, q)
        """
        return self.at_columns(self.split(points))

    def at_columns(self, columns: Sequence[TensorVariable]) -> TensorVariable:
        """Those of several blocks whose columns are matrices, shape (points, groups)."""
        replacements = dict(zip(self.columns, columns, strict=True))
        return self._sum(vectorize_graph([p.values for p in self._pieces], replacements))

    def prior_at_points(self, points: TensorVariable) -> TensorVariable:
        """Log densities of the local variables alone, shape (points, groups)."""
        replacements = dict(zip(self.columns, self.split(points), strict=True))
        return sum(vectorize_graph(self._of_locals, replacements))

    @property
    def _of_locals(self) -> list[TensorVariable]:
        """Log densities of the local variables alone."""
        return [piece.values for piece in self._pieces[: len(self.structure.locals)]]

    def _sum(self, values: Sequence[TensorVariable]) -> TensorVariable:
        n_chosen = self.numbers.shape[0]
        sums = [
            of_piece if piece.records is None else piece.records.sum(of_piece, n_chosen)
            for piece, of_piece in zip(self._pieces, values, strict=True)
        ]
        return sum(sums[1:], sums[0])

    @cached_property
    def gradient(self) -> list[TensorVariable]:
        """Gradient of the joint log density by the columns of the block."""
        # The groups are independent, so these are derivatives of the sum over groups.
        return self._derivatives(self.value.sum())

    @cached_property
    def hessian(self) -> list[TensorVariable]:
        """Second derivatives by the block of each group: q * q vectors, row by row."""
        return [entry for row in self.gradient for entry in self._derivatives(row.sum())]

    @cached_property
    def prior_hessian(self) -> list[TensorVariable]:
        """Second derivatives of the log density of the local variables alone."""
        rows = self._derivatives(sum(values.sum() for values in self._of_locals))
        return [entry for row in rows for entry in self._derivatives(row.sum())]

    def _derivatives(self, total: TensorVariable) -> list[TensorVariable]:
        return pt.grad(total, self.columns, disconnected_inputs="ignore")
