# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Fused operations on the ragged tensors of a step, which access no cache."""

from typing import Any

from ..buffers import FLOATS, Buffer, WithBuffers
from ..contents import Offsets
from ..effects import ReadsMemory, TierOne, WritesMemory
from ..ext import I32, Operand

NUMBERS = ("f32", "f16", "bf16", "i8", "i16", "i32")


class SlicedAddOp(WithBuffers, name="sliced_add", traits=[TierOne, ReadsMemory, WritesMemory]):
    """out = a + b in rows below end, out = a in the others; all [rows, C] of one type. out may be a."""

    a: Operand[Any]
    b: Operand[Any]
    end: Operand[I32]
    out: Operand[Any]

    buffers = {"a": Buffer("rows, C", NUMBERS), "b": Buffer("rows, C", "a"), "out": Buffer("rows, C", "a")}


class MergeRaggedOp(WithBuffers, name="merge_ragged", traits=[TierOne, ReadsMemory, WritesMemory]):
    """Join two ragged batches sequence by sequence: sequence n of out is sequence n of a, then of b.

    a [Ta, C], b [Tb, C], out [Ta + Tb, C] of one type; a_offsets, b_offsets, out_offsets [B+1] i32. (written).
    """

    a: Operand[Any]
    a_offsets: Operand[Any]
    b: Operand[Any]
    b_offsets: Operand[Any]
    out: Operand[Any]
    out_offsets: Operand[Any]

    contents = (Offsets("a_offsets", "a"), Offsets("b_offsets", "b"))

    buffers = {
        "a": Buffer("Ta, C", None), "b": Buffer("Tb, C", "a"), "out": Buffer("Ta + Tb, C", "a"),
        "a_offsets": Buffer("B + 1"), "b_offsets": Buffer("B + 1"), "out_offsets": Buffer("B + 1"),
    }  # fmt: skip


class ShiftTokensOp(WithBuffers, name="shift_tokens", traits=[TierOne, ReadsMemory, WritesMemory]):
    """Shift each sequence left by one token and append its bonus token; tokens, out [T], bonus [B], i32."""

    tokens: Operand[Any]
    row_offsets: Operand[Any]
    bonus: Operand[Any]
    out: Operand[Any]

    contents = (Offsets("row_offsets", "tokens"),)

    buffers = {"tokens": Buffer("T"), "out": Buffer("T"), "bonus": Buffer("B"), "row_offsets": Buffer("B + 1")}


class MergeAttentionOp(WithBuffers, name="merge_attention", traits=[TierOne, ReadsMemory, WritesMemory]):
    """Combine attention of the same queries over two sets of keys: out is the weighted mean, lse the log of both sums.

    a, b, out: [T, Hq, D] of one float type; a_lse, b_lse, lse: [T, Hq] f32, natural logarithms. out may be a or b.
    Rows that attend to no key in either input give zeros and minus infinity.
    """

    a: Operand[Any]
    a_lse: Operand[Any]
    b: Operand[Any]
    b_lse: Operand[Any]
    out: Operand[Any]
    lse: Operand[Any]

    buffers = {
        "a": Buffer("T, Hq, D", FLOATS), "b": Buffer("T, Hq, D", "a"), "out": Buffer("T, Hq, D", "a"),
        "a_lse": Buffer("T, Hq", ("f32",)), "b_lse": Buffer("T, Hq", ("f32",)), "lse": Buffer("T, Hq", ("f32",)),
    }  # fmt: skip
