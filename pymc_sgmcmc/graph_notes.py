"""Notes of the lines that made the parts of a graph, which PyTensor shows in its errors."""

from __future__ import annotations

from pytensor.graph.basic import Constant
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import GraphRewriter

FIRST = -1.0
"""This position in the order of the rewrites comes before all others."""


def forget_notes(graph: FunctionGraph) -> None:
    """Forget the notes of a graph, whose operations have to be copies.

    A rewrite adds the notes of what it replaces to those of the replacement, also where that is a
    part of what it replaces. In long graphs they have doubled until they filled the memory.
    """
    for variable in graph.variables:
        if variable.owner is not None or isinstance(variable, Constant):
            variable.tag.trace = []


class ForgetNotes(GraphRewriter):
    """The first rewrite of a mode: `forget_notes`."""

    def apply(self, fgraph: FunctionGraph) -> None:
        """Forget the notes of the copy that PyTensor makes of the graph of a function."""
        forget_notes(fgraph)
