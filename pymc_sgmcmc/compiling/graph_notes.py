"""Notes of the lines that made the parts of a graph, which PyTensor shows in its errors."""

from __future__ import annotations

from collections.abc import Sequence

from pytensor.compile.mode import Mode
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import GraphRewriter

_FIRST = -1.0
"""This position in the order of the rewrites comes before all others."""


def forget_notes(graph: FunctionGraph) -> None:
    """Forget the notes of a graph, whose operations have to be copies.

    A rewrite adds the notes of what it replaces to those of the replacement, also where that is a
    part of what it replaces. In long graphs they have doubled until they filled the memory.
    """
    for variable in graph.variables:
        if variable.owner is not None or isinstance(variable, Constant):
            variable.tag.trace = []


def copy_without_notes(outputs: Sequence[Variable]) -> FunctionGraph:
    """A copy of a graph, of which only the inputs stay the same."""
    graph = FunctionGraph(outputs=list(outputs), clone=True, copy_inputs=False)
    forget_notes(graph)
    return graph


class _ForgetNotes(GraphRewriter):
    def apply(self, fgraph: FunctionGraph) -> None:
        forget_notes(fgraph)


def forgetting_notes(mode: Mode) -> Mode:
    """The mode, whose first rewrite forgets the notes of PyTensor's copy of a graph."""
    return mode.register((_ForgetNotes(), _FIRST))
