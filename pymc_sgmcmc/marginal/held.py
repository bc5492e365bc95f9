"""An identity without a derivative, which no rewrite removes before derivatives are taken.

PyMC canonicalizes a log density before its gradient, and that removes PyTensor's
`disconnected_grad`.
"""

from __future__ import annotations

from pytensor.gradient import disconnected_type
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.tensor.rewriting.basic import register_specialize
from pytensor.tensor.variable import TensorVariable


class Held(Op):
    """The input, taken as a constant by derivatives."""

    view_map = {0: [0]}
    __props__ = ()

    def make_node(self, variable):
        return Apply(self, [variable], [variable.type()])

    def perform(self, node, inputs, output_storage):
        output_storage[0][0] = inputs[0]

    def infer_shape(self, node, shapes):
        return shapes

    def connection_pattern(self, node):
        return [[False]]

    def pullback(self, inputs, outputs, cotangents):
        return [disconnected_type()]

    def pushforward(self, inputs, outputs, tangents):
        return [disconnected_type()]


@register_specialize
@node_rewriter([Held])
def local_remove_held(fgraph, node):
    return [node.inputs[0]]


def held(variable: TensorVariable) -> TensorVariable:
    """The variable, taken as a constant by derivatives."""
    return Held()(variable)
