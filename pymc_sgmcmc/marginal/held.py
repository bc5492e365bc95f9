"""An identity without a derivative, which no rewrite removes before derivatives are taken.

PyMC canonicalizes a log density before its gradient, and that removes PyTensor's
`disconnected_grad`.
"""

from __future__ import annotations

from typing import ClassVar

from pytensor.gradient import disconnected_type
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.tensor.rewriting.basic import register_specialize
from pytensor.tensor.variable import TensorVariable


class Held(Op):
    """The input, taken as a constant by derivatives."""

    view_map: ClassVar[dict[int, list[int]]] = {0: [0]}
    __props__ = ()

    def make_node(self, variable: Variable) -> Apply:
        """Node with the type of the input."""
        return Apply(self, [variable], [variable.type()])

    def perform(self, node: Apply, inputs, output_storage) -> None:
        """Return the input."""
        output_storage[0][0] = inputs[0]

    def infer_shape(self, node: Apply, shapes):
        """The shape of the input."""
        return shapes

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        """No derivative."""
        return [[False]]

    def pullback(self, inputs, outputs, cotangents) -> list[Variable]:
        """No derivative."""
        return [disconnected_type()]


@register_specialize
@node_rewriter([Held])
def local_remove_held(fgraph, node):
    """Remove the node, once derivatives have been taken."""
    return [node.inputs[0]]


def held(variable: TensorVariable) -> TensorVariable:
    """The variable, taken as a constant by derivatives."""
    return Held()(variable)
