"""Ask the processor for the rows of a later transition while it computes this one.

A minibatch of data that are larger than the caches waits for memory. The order of the minibatches
is known before, and an instruction that asks for rows changes no number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

LINE = 64
"""Bytes that a processor reads from memory at once."""

SMALLEST = 2**20
"""Data of fewer bytes are in a cache already."""

MOST = 8192
"""Bytes to ask for. The processor itself reads ahead in what follows them."""

IN_SECOND_CACHE = 1
"""How near the rows are kept. In the first cache few lines can wait for memory at a time."""

READ, DATA = 0, 1
"""What the instruction asks for."""


@cache
def prefetch_in_numba() -> Callable[..., None]:
    """Function of an array, the first row and a number of rows, for Numba."""
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils, config
    from numba.extending import intrinsic

    @intrinsic
    def prefetch(typing_context, array, start, rows):
        if not isinstance(array, types.Array):
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, arguments[0])
            stride = cgutils.unpack_tuple(builder, array.strides)[0]
            length = cgutils.unpack_tuple(builder, array.shape)[0]
            number, flag, byte = stride.type, ir.IntType(32), ir.IntType(8).as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
            instruction = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
            large = builder.icmp_signed(">=", builder.mul(length, stride), number(SMALLEST))
            size = builder.mul(arguments[2], stride)
            size = builder.select(builder.icmp_signed("<", size, number(MOST)), size, number(MOST))
            lines = builder.sdiv(builder.add(size, number(LINE - 1)), number(LINE))
            first = builder.gep(
                builder.bitcast(array.data, byte), [builder.mul(arguments[1], stride)]
            )
            with (
                builder.if_then(large),
                cgutils.for_range(builder, lines) as loop,
            ):
                place = builder.gep(first, [builder.mul(loop.index, number(LINE))])
                settings = (READ, IN_SECOND_CACHE, DATA)
                builder.call(instruction, [place, *map(flag, settings)])
            return context.get_dummy_value()

        return types.none(array, types.intp, types.intp), generate

    # To debug, users run the transitions as Python, where there is no such instruction.
    return _nothing if getattr(config, "DISABLE_JIT", False) else prefetch


def _nothing(array: Any, start: int, rows: int) -> None:
    """Ask for nothing."""
