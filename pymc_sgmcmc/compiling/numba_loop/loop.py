"""A loop of transitions as one function, which Numba compiles.

PyTensor makes a function of each operation of a graph. Numba takes most of the time of a first
start to compile these, and in the loop each call counts the references to its arrays. Here the
operations of a transition are written one after the other into one function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from pytensor.compile.aliasing import Supervisor
from pytensor.compile.mode import Mode
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.destroyhandler import DestroyHandler
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.basic import in2out
from pytensor.graph.traversal import graph_inputs
from pytensor.tensor.rewriting.subtensor import (
    local_inplace_AdvancedIncSubtensor,
    local_inplace_setsubtensor,
)

from pymc_sgmcmc.compiling.compiled import with_own_rewrites
from pymc_sgmcmc.compiling.numba_loop.source import Source, storage

_in_place = in2out(local_inplace_setsubtensor, local_inplace_AdvancedIncSubtensor)
"""This rewriter changes arrays in place where nothing reads their old elements afterwards."""


class LoopOfTransitions:
    """A compiled loop over transitions: state, memory and sequences of each to the next.

    Parameters
    ----------
    transition : callable
        Function of the symbolic entries of the sequences, state and memory of a transition. It
        returns the next state, the memory afterwards and what is recorded beside the state.
    entries : sequence of Variable
        Arguments of one transition, each an entry of a sequence: index, noise, step size and
        others.
    state : sequence of Variable
        State of the chain, whose number of variables is the attribute `states`.
    memory : sequence of SharedVariable
        Arrays that belong to the chain. They are changed in place where the transition sets some
        of their elements.
    mode : Mode
        Mode whose rewrites simplify the graph.

    Attributes
    ----------
    key : str or None
        Key of the function in the compile cache, None where it cannot be cached.
    """

    def __init__(
        self,
        transition: Callable[..., Sequence[Variable]],
        entries: Sequence[Variable],
        state: Sequence[Variable],
        memory: Sequence[SharedVariable],
        mode: Mode,
    ):
        inputs = [*entries, *state, *(variable.type(variable.name) for variable in memory)]
        outputs = list(transition(*inputs))
        self.states = len(state)
        self._entries, self._memory = len(entries), tuple(memory)
        self._shared = [
            variable for variable in graph_inputs(outputs) if isinstance(variable, SharedVariable)
        ]
        places = [variable.type(variable.name) for variable in self._shared]
        replacements = dict(zip(self._shared, places, strict=True))
        outputs = clone_replace(outputs, replacements, rebuild_strict=False)
        graph = FunctionGraph([*inputs, *places], outputs, clone=True)
        mode = with_own_rewrites(mode).excluding("inplace", "fuse_indexed_into_elemwise")
        graph._compile_mode = mode  # the graphs inside of scans are rewritten in it too
        mode.optimizer.rewrite(graph)
        start = len(entries) + len(state)
        changed = set(graph.inputs[start : start + len(memory)])
        graph.attach_feature(Supervisor(set(graph.inputs) - changed))
        graph.attach_feature(DestroyHandler())
        _in_place.rewrite(graph)
        self._inputs, self._outputs = tuple(graph.inputs), tuple(graph.outputs)
        # In this order an array is read before it is changed in place.
        self._nodes = tuple(graph.toposort())
        self._recorded = [
            variable.type
            for number, variable in enumerate(self._outputs)
            if not self.states <= number < self.states + len(self._memory)
        ]
        self._records: list[np.ndarray] = []
        self._compile()

    def _compile(self) -> None:
        from pytensor.link.numba.cache import compile_numba_function_src
        from pytensor.link.numba.dispatch.basic import numba_njit

        carried = self._outputs[: self.states + len(self._memory)]
        changed = storage(carried[self.states :])  # in place, by the next transition
        recorded = {
            variable: f"record_{number}"
            for number, variable in enumerate(self._outputs)
            if not self.states <= number < len(carried) and variable not in changed
        }
        source = Source(self._inputs, self._entries, storage(carried), recorded, self._nodes)
        for node in self._nodes:
            source.write(node.op, node)
        text = source.of_loop(self._outputs, self.states, len(self._memory))
        # Numba imports the module of this name where it reads the function from its cache.
        names = {"__name__": __name__, **source.environment}
        function = compile_numba_function_src(text, "transitions", names, cache_key=source.key)
        self.key = source.key
        self._constants, self._errors = source.constants, list(source.errors.values())
        # As in NumPy, a division by zero gives infinity or NaN. Sums are in the order of the rows:
        # LLVM has two codes for a loop, one for memory that may overlap, and a sum in any order
        # would depend on the addresses of arrays in its last bits.
        self._function = numba_njit(
            function,
            fastmath=False,
            final_function=True,
            cache=source.key is not None,
            error_model="numpy",
        )

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the function, which is compiled again, and the memory for records."""
        state = {name: value for name, value in vars(self).items() if name != "_function"}
        return {**state, "_records": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._compile()

    def __call__(self, *arguments: np.ndarray, reuse: bool = False) -> tuple[np.ndarray, ...]:
        """State and records after each transition, with transitions as the first axis.

        The arguments are the state and then the sequences.

        With `reuse` they are in memory that the next such call uses again.
        """
        state = list(arguments[: self.states])
        sequences = arguments[self.states :]
        records = self._memory_for_records(len(sequences[0]), reuse)
        if reuse:
            # The state may be a part of the records, which are written while it is read.
            state = [np.array(part) for part in state]
        shared = [variable.get_value(borrow=True) for variable in (*self._memory, *self._shared)]
        given = map(_argument, [*state, *shared, *self._constants])
        failed, *memory = self._function(*sequences, *given, *records)
        if failed:
            raise self._errors[int(failed).bit_length() - 1]
        for variable, value in zip(self._memory, memory, strict=True):
            variable.set_value(value, borrow=True)
        return tuple(records)

    def _memory_for_records(self, transitions: int, reuse: bool) -> list[np.ndarray]:
        if reuse and self._records and len(self._records[0]) >= transitions:
            return [record[:transitions] for record in self._records]
        records = [
            np.empty((transitions, *kind.shape), dtype=kind.dtype) for kind in self._recorded
        ]
        if reuse:
            self._records = records
        return records


def _argument(value: Any) -> Any:
    """An array, or a number for an array without axes."""
    value = np.asarray(value)
    return value if value.ndim else value[()]
