"""One operation of a graph that stands for the log density of groups.

The graph of a quadrature has hundreds of nodes. PyMC and this package clone and simplify a log
density several times before they compile it, and would spend a minute on these nodes. So they see a
single node, with its derivative another one, and a rewrite puts the graphs in their place when a
function is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.mode import optdb
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.gradient import DisconnectedType, disconnected_type, grad_undefined
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.graph.rewriting.basic import (
    MergeOptimizer,
    SequentialGraphRewriter,
    dfs_rewriter,
    node_rewriter,
)
from pytensor.graph.traversal import ancestors, graph_inputs
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.compiling.compiled import PYTHON_MODE, compile_quietly
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.graphs import rebuild
from pymc_sgmcmc.posterior.group_access import GroupsOfSource, groups_of_source

BEFORE_ALL_REWRITES = -0.1
"""The position of the rewrite that puts the graphs in place: equal parts are merged after it."""


class Template:
    """The log density of groups as a graph of placeholders, with its derivatives.

    Parameters
    ----------
    value : TensorVariable, shape (groups,)
    numbers : TensorVariable, shape (groups,)
        Placeholder for the numbers of the groups.
    parameters : sequence of TensorVariable
        Placeholders for the global variables.
    """

    def __init__(
        self, value: TensorVariable, numbers: TensorVariable, parameters: Sequence[TensorVariable]
    ):
        (self.value,) = _without_notes([value])
        self.numbers = numbers
        self.parameters = list(parameters)
        # The data are inputs of the node, since a rewrite cannot add inputs to a function.
        self.data = [v for v in graph_inputs([value]) if isinstance(v, SharedVariable)]
        self.weights = pt.vector("weights", dtype=value.dtype)
        self.groups = groups_of_source(self.data)

    @cached_property
    def gradients(self) -> list[TensorVariable]:
        """Gradients by the parameters of the weighted sum over groups."""
        total = (self.weights * self.value).sum()
        return _without_notes(pt.grad(total, self.parameters, disconnected_inputs="ignore"))

    @cached_property
    def jacobian(self) -> TensorVariable:
        """Gradient of each group by all entries of the parameters, shape (groups, entries)."""
        # It is the derivative by the weights of the gradient of the weighted sum, along each
        # direction in turn.
        sizes = [int(np.prod(parameter.type.shape)) for parameter in self.parameters]
        direction = pt.vector("direction", dtype=self.weights.dtype, shape=(sum(sizes),))
        starts = np.cumsum([0, *sizes])
        along = sum(
            (gradient.ravel() * direction[start : start + size]).sum()
            for gradient, start, size in zip(self.gradients, starts, sizes, strict=False)
        )
        derivative = pt.grad(along, self.weights)
        # Only the length of the weights is still in the graph.
        ones = pt.ones(self.numbers.shape, dtype=self.weights.dtype)
        (derivative,) = rebuild([derivative], {self.weights: ones})
        directions = pt.eye(sum(sizes), dtype=self.weights.dtype)
        return _without_notes([vectorize_graph(derivative, {direction: directions}).T])[0]


def _without_notes(graphs: list[TensorVariable]) -> list[TensorVariable]:
    """The graphs, without notes of the lines that made their nodes.

    Rewrites join the notes of all inputs of a node. In a deep graph they would fill the memory.
    """
    for variable in ancestors(graphs):
        if variable.owner is not None:
            variable.tag.trace = []
    return graphs


class _GroupOp(Op):
    """A node that stands for a graph of a template."""

    def __init__(self, template: Template):
        self.template = template

    def __eq__(self, other):
        return type(self) is type(other) and self.template is other.template

    def __hash__(self):
        return hash((type(self), id(self.template)))

    @property
    def placeholders(self) -> list[TensorVariable]:
        """Inputs of the graph."""
        return [self.template.numbers, *self.template.parameters, *self.template.data]

    @property
    def graphs(self) -> list[TensorVariable]:
        """Outputs of the graph."""
        raise NotImplementedError

    def make_node(self, *inputs: Variable) -> Apply:
        """Node with inputs of the types of the placeholders."""
        filtered = [
            placeholder.type.filter_variable(given)
            for placeholder, given in zip(self.placeholders, inputs, strict=True)
        ]
        return Apply(self, filtered, [graph.type() for graph in self.graphs])

    def perform(self, node: Apply, inputs, output_storage) -> None:
        """Evaluate the graph, where no rewrite has put it in place."""
        if self.template.groups is not None:
            raise _without_records(self.template.groups)
        for storage, value in zip(output_storage, self._function(*inputs), strict=True):
            storage[0] = value

    @cached_property
    def _function(self):
        inputs = [placeholder.type() for placeholder in self.placeholders]  # data are shared
        return compile_quietly(inputs, self.expanded(inputs), PYTHON_MODE)

    def expanded(self, inputs: Sequence[Variable]) -> list[Variable]:
        """The graph on these inputs."""
        replacements = dict(zip(self.placeholders, inputs, strict=True))
        return clone_replace(self.graphs, replacements)

    def __getstate__(self) -> dict:
        return {"template": self.template}


class GroupLogDensity(_GroupOp):
    """Log density of each group's records, shape (groups,), of numbers and parameters."""

    def of(self, numbers: TensorVariable, parameters: Sequence[TensorVariable]) -> TensorVariable:
        """Log density of the groups with these numbers."""
        return self(numbers, *parameters, *self.template.data)

    @property
    def graphs(self) -> list[TensorVariable]:
        """Outputs of the graph."""
        return [self.template.value]

    def infer_shape(self, node: Apply, shapes):
        """One entry for each number."""
        return [shapes[0]]

    def connection_pattern(self, node: Apply):
        """Only the parameters have derivatives."""
        template = self.template
        connected = [False, *([True] * len(template.parameters)), *([False] * len(template.data))]
        return [[each] for each in connected]

    def pullback(self, inputs, outputs, cotangents):
        """Gradients of the weighted sum over groups."""
        if _lacks_records(inputs):
            assert self.template.groups is not None
            raise _without_records(self.template.groups)
        gradients = _GroupGradient(self.template)(*inputs, *cotangents, return_list=True)
        return [disconnected_type(), *gradients, *(disconnected_type() for _ in self.template.data)]


class _GroupGradient(_GroupOp):
    """Gradients by the parameters of a weighted sum over groups."""

    @property
    def placeholders(self) -> list[TensorVariable]:
        return [*super().placeholders, self.template.weights]

    @property
    def graphs(self) -> list[TensorVariable]:
        return self.template.gradients

    def infer_shape(self, node: Apply, shapes):
        return shapes[1 : 1 + len(node.outputs)]

    def connection_pattern(self, node: Apply):
        of_parameters = [False, *([True] * len(node.outputs))]
        of_data = [False] * len(self.template.data)
        return [[connected] * len(node.outputs) for connected in [*of_parameters, *of_data, True]]

    def pullback(self, inputs, outputs, cotangents):
        parameters = inputs[1 : 1 + len(outputs)]
        pieces = [
            pt.zeros(parameter.size, dtype=parameter.dtype)
            if isinstance(cotangent.type, DisconnectedType)
            else cotangent.ravel()
            for parameter, cotangent in zip(parameters, cotangents, strict=True)
        ]
        jacobian = _GroupJacobian(self.template)(*inputs[:-1])
        second = [
            grad_undefined(self, index, variable, "second derivatives are not computed")
            for index, variable in enumerate(parameters, start=1)
        ]
        of_data = [disconnected_type() for _ in self.template.data]
        return [disconnected_type(), *second, *of_data, jacobian @ pt.concatenate(pieces)]


class _GroupJacobian(_GroupOp):
    """Gradient of each group by all entries of the parameters, shape (groups, entries)."""

    @property
    def graphs(self) -> list[TensorVariable]:
        return [self.template.jacobian]

    def infer_shape(self, node: Apply, shapes):
        entries = sum(int(np.prod(p.type.shape)) for p in self.template.parameters)
        return [(shapes[0][0], pt.constant(entries))]

    def connection_pattern(self, node: Apply):
        return [[False] for _ in node.inputs]

    def pullback(self, inputs, outputs, cotangents):
        return [disconnected_type() for _ in inputs]


def _lacks_records(inputs: Sequence[Variable]) -> bool:
    """Whether inputs are the arrays of records themselves, which have those of no group."""
    return any(hasattr(variable.tag, "groups_of_source") for variable in inputs)


def _without_records(groups: GroupsOfSource) -> ModelError:
    return ModelError(
        "The records of the groups are in a source of rows, which only step methods of this "
        f"package read, but another one evaluates the model. Pass `rows`, the source with the "
        f"column `{groups.column}`, to one of them, for example `SGLDCV(rows=rows)`."
    )


@node_rewriter([_GroupOp])
def _expand(fgraph, node):
    if _lacks_records(node.inputs):
        return None  # Its evaluation is an error that says what to do.
    return node.op.expanded(node.inputs)


class _MergeAnew(MergeOptimizer):
    """Merge the equal nodes of a whole graph.

    PyTensor looks for equal nodes when they come into a graph. Two that come with constants of
    their own stay apart once these are merged, and each search for modes would be made twice.
    """

    def apply(self, fgraph):
        while True:
            before = len(fgraph.apply_nodes)
            fgraph.remove_feature(fgraph.merge_feature)
            del fgraph.merge_feature
            self.add_requirements(fgraph)
            result = super().apply(fgraph)
            if len(fgraph.apply_nodes) == before:
                return result


optdb.register(
    "expand_groups",
    # Equal nodes are merged before they are expanded, and equal parts of the graphs afterwards.
    SequentialGraphRewriter(MergeOptimizer(), dfs_rewriter(_expand), _MergeAnew()),
    "fast_run",
    "fast_compile",
    "minimum_compile",
    position=BEFORE_ALL_REWRITES,
)
