# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of a warpgroup on the tensor cores (sm_90a), complete or under way, and the descriptors of what they read.

Four warps multiply 64 rows of A, in registers or in shared memory, by a matrix B in shared memory. Tiles there have
rows of 128 bytes, swizzled (the 16-byte chunk c of row i lies at chunk c ^ (i % 8)), at multiples of 1024 bytes; the
operation ``kv.load_tile`` with swizzle 128 and a pitch of 128 makes them. What ordinary stores and cp.async wrote must
have been passed on by ``kv.fence_proxy_async`` of the thread that wrote it, before a barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlir import ir

from kvarn.dialect.dtypes import DType, f8e4m3, f32, i64
from kvarn.dialect.shared_layout import Descriptor

from .memory import SHARED, Pointer
from .ptx import _float, _parts, _pointer, _static, _word, inline_asm
from .values import Value, as_value, cast, describe

__all__ = ["wgmma", "wgmma_descriptor", "wgmma_start", "wgmma_wait"]

_SWIZZLE_128 = 1  # a descriptor's code


def wgmma_descriptor(tile: Pointer, leading: int = 0, stride: int = 1024) -> Value:
    """What tells ``kv.wgmma`` where a matrix lies in shared memory, and how: i64.

    Parameters
    ----------
    tile : pointer to shared memory
        The first row, at a multiple of 1024 bytes.
    leading : int
        Bytes from a panel of 64 columns to the next, where B is read transposed; else not used.
    stride : int
        Bytes from eight rows to the next eight.
    """
    for name, x in (("leading", leading), ("stride", stride)):
        if isinstance(x, bool) or not isinstance(x, int) or x % 16 or not 0 <= x < 1 << 18:
            raise ValueError(f"{name} must be a multiple of 16 below 2**18, known at compile time, got {describe(x)}")
    return descriptor_at(_pointer(tile, SHARED, "the tile"), Descriptor(leading, stride, _SWIZZLE_128))


def descriptor_at(tile: Pointer, descriptor: Descriptor) -> Value:
    """A descriptor with the address of a tile in shared memory, i64."""
    bits = descriptor.bits
    return cast((tile.address() & 0x3FFFF) >> 4, i64) | (bits - (1 << 64) if bits >> 63 else bits)


def wgmma(
    d: int | Sequence[Any], a: Any, b: Any, steps: Sequence[tuple[int, int]] | Sequence[int], dtype: DType,
    trans_b: bool = False, trans_a: bool = False,
) -> list[Value]:  # fmt: skip
    """D + A B of a warpgroup, complete when it is there: 64 rows, N columns. sm_90a.

    Parameters
    ----------
    d : list of N / 2 f32, or N
        This thread's sums: of column tile n of 8, [4n, 4n + 4) as ``mma_m16n8k16`` has them, of its warp's 16 rows.
        N alone, a multiple of 8 up to 256, stands for zeros.
    a : list of lists of 4 words, or i64
        For every step of 16 columns of A, what ``mma_m16n8k16`` takes, made in the same round of a loop (ptxas of CUDA
        13.0 gives away registers of A that a loop does not write); or the descriptor of A.
    b : i64
        The descriptor of B (:func:`wgmma_descriptor`).
    steps : list of int, or of (int, int)
        For every step, how many bytes its part of B lies after the first; with a descriptor of A, of A and of B.
    dtype : DType
        f16 or bf16, of A and B; or f8e4m3, whose steps have 32 columns (4 words of a thread are 16 elements: of its two
        rows in turn columns 4 t to 4 t + 3, then those 16 further; t the lane modulo 4) and whose sums keep about 14
        bits of the largest.
    trans_b : bool
        The rows of the tile are B's 16 rows a step, of N columns; else its rows are B's columns.
    trans_a : bool
        The rows of A's tile, which has a descriptor, are A's 16 columns a step; else its rows are A's.
    """
    return _product(d, a, b, steps, dtype, trans_b, trans_a, wait=True)


def wgmma_start(
    d: int | Sequence[Any], a: Any, b: Any, steps: Sequence[tuple[int, int]] | Sequence[int], dtype: DType,
    trans_b: bool = False, trans_a: bool = False,
) -> list[Value]:  # fmt: skip
    """Start D + A B: a group of its own, under way until a :func:`wgmma_wait` that covers it. sm_90a.

    Parameters as of :func:`wgmma`. Until the wait nothing may name the result but another ``wgmma_start`` that adds to
    it, and what the product reads, shared memory and the words of A, must stay.
    """
    return _product(d, a, b, steps, dtype, trans_b, trans_a, wait=False)


def wgmma_wait(pending: int, *sums: Sequence[Any]) -> list[list[Value]]:
    """Wait until at most ``pending`` of the groups that this warpgroup started are under way. sm_90a.

    ``sums`` are the results of all groups that were under way, in any order: they come back, and those of groups that
    are complete may be read.
    """
    if isinstance(pending, bool) or not isinstance(pending, int) or not 0 <= pending <= 7:
        raise ValueError(f"pending must be an int from 0 to 7 known at compile time, got {describe(pending)}")
    flat = [_float(x, "an element of sums") for some in sums for x in some]
    constraints = ["=f"] * len(flat) + [str(i) for i in range(len(flat))] + ["~{memory}"]
    parts = iter(floats_of_asm(f"wgmma.wait_group.sync.aligned {pending};", constraints, flat, len(flat)))
    return [[Value(next(parts), f32) for _ in some] for some in sums]


def _product(
    d: int | Sequence[Any], a: Any, b: Any, steps: Sequence[Any], dtype: DType, trans_b: bool, trans_a: bool, wait: bool
) -> list[Value]:
    """A product of checked operands."""
    _static(dtype.name, ("f16", "bf16", "f8e4m3"), "dtype")
    if dtype is f8e4m3 and (trans_a or trans_b):
        raise ValueError("wgmma reads f8e4m3 as it lies only: trans_a and trans_b are of 16-bit elements")
    n = d if isinstance(d, int) else 2 * len(d)
    if isinstance(d, bool) or n % 8 or not 8 <= n <= 256:
        raise ValueError(f"wgmma has a multiple of 8 columns up to 256, got {n}")
    shared_a = isinstance(a, Value)
    if not shared_a and (len(a) != len(steps) or any(len(words) != 4 for words in a)):
        raise ValueError(f"wgmma takes 4 words of A and a place of B a step, got {len(a)} and {len(steps)} steps")
    if trans_a and not shared_a:
        raise ValueError("wgmma reads A transposed from shared memory only: give its descriptor")
    places: list[Any] = [step if shared_a and isinstance(step, tuple) else (0, step) for step in steps]
    if not places or any(isinstance(x, bool) or not isinstance(x, int) or x % 16 for step in places for x in step):
        raise ValueError(f"steps must be multiples of 16 known at compile time, got {list(steps)}")
    sums = [] if isinstance(d, int) else [_float(x, "an element of d") for x in d]
    if shared_a:
        left = as_value(a, i64, "the descriptor of A").ir
    else:
        left = [_word(w, "an element of a") for step in a for w in step]
    right = as_value(b, i64, "the descriptor of B").ir
    made = multiply(n, dtype.name.removeprefix("f8"), left, right, sums, places, trans_b, wait, trans_a)
    return [Value(x, f32) for x in made]


def multiply(
    n: int, dtype: str, a: ir.Value | Sequence[ir.Value], b: ir.Value, accumulator: Sequence[ir.Value],
    steps: Sequence[tuple[int, int]], trans_b: bool, wait: bool, trans_a: bool = False,
    dtype_b: str = "", commit: bool = True,
) -> list[ir.Value]:  # fmt: skip
    """Fence, a product of 64 rows and ``n`` columns, commit; and wait, or leave it in flight.

    Without ``commit`` it belongs to the group of the next product.

    ``dtype``: f16, bf16, or e4m3, of which operands in shared memory are K-major; ``dtype_b`` is B's where it is
    another, e5m2.
    ``a`` is a descriptor or four words a k-step, ``b`` a descriptor, ``accumulator`` n / 2 f32 or none for zeros;
    ``steps`` are the bytes by which every k-step moves the descriptors of A and of B.
    """
    count, first = n // 2, n // 2 + len(accumulator)  # ``first`` is the number of A's first operand in the text
    shared_a = isinstance(a, ir.Value)
    left = [a] if shared_a else list(a)
    registers = ", ".join(f"${i}" for i in range(count))
    wide = dtype in ("f16", "bf16")  # others have no transposed form
    shape = f"m64n{n}k{16 if wide else 32}.f32.{dtype}.{dtype_b or dtype}"
    # Two descriptors move by their low words, which have the addresses: 64-bit additions of both take uniform registers
    # for constants and carries. Of B alone they are one instruction.
    text = ["wgmma.fence.sync.aligned;"]
    if shared_a:
        text.append(f"mov.b64 {{al, ah}}, ${first}; mov.b64 {{bl, bh}}, ${first + 1};")
    for k, (move_a, move_b) in enumerate(steps):
        if shared_a:
            text.append(f"add.s32 t, bl, {move_b >> 4}; mov.b64 b, {{t, bh}};")
            text.append(f"add.s32 t, al, {move_a >> 4}; mov.b64 a, {{t, ah}};")
            operand, transposed = "a", f", {int(trans_a)}, {int(trans_b)}"
        else:
            text.append(f"add.s64 b, ${first + len(left)}, {move_b >> 4};")
            operand = f"{{{', '.join(f'${first + 4 * k + j}' for j in range(4))}}}"
            transposed = f", {int(trans_b)}"
        adds = "yes" if k or accumulator else "no"
        signs = f"1, 1{transposed}" if wide else "1, 1"
        text.append(f"wgmma.mma_async.sync.aligned.{shape} {{{registers}}}, {operand}, b, {adds}, {signs};")
    if commit:
        text.append("wgmma.commit_group.sync.aligned;")
    if wait:
        text.append("wgmma.wait_group.sync.aligned 0;")
    declared = (
        "{ .reg .b64 a, b; .reg .b32 al, ah, bl, bh, t; .reg .pred yes, no; "
        "setp.eq.u32 yes, 0, 0; setp.ne.u32 no, 0, 0; "
    )
    tied = [str(i) for i in range(len(accumulator))]
    constraints = ["=&f"] * count + tied + ["l" if shared_a else "r"] * len(left) + ["l", "~{memory}"]
    return floats_of_asm(declared + " ".join(text) + " }", constraints, [*accumulator, *left, b], count)


def floats_of_asm(text: str, constraints: Sequence[str], operands: Sequence[ir.Value], count: int) -> list[ir.Value]:
    """Inline PTX that gives ``count`` f32."""
    result = "f32" if count == 1 else f"!llvm.struct<({', '.join(['f32'] * count)})>"
    made = inline_asm(text, ",".join(constraints), operands, result, effects=True)
    return [made] if count == 1 else [x.ir for x in _parts(made, count, f32)]
