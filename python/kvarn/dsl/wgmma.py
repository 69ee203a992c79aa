# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Matrix products of a warpgroup on tensor cores (wgmma, sm_90a), synchronous or asynchronous, and their descriptors.

Four warps multiply 64 rows of A, in registers or shared memory, by a matrix B in shared memory. Tiles in shared memory
have rows of 128 bytes, swizzled (16-byte chunk c of row i is stored at chunk c ^ (i % 8)), and are aligned to 1024
bytes; ``kv.load_tile`` with swizzle 128 and a pitch of 128 makes them. A thread that wrote such a tile by ordinary
stores or cp.async must call ``kv.fence_proxy_async`` before the barrier that precedes the product.
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

_SWIZZLE_128 = 1  # the code of this swizzle in a descriptor


def wgmma_descriptor(tile: Pointer, leading: int = 0, stride: int = 1024) -> Value:
    """The descriptor of a matrix in shared memory for ``kv.wgmma``, i64.

    Parameters
    ----------
    tile : pointer to shared memory
        The first row, aligned to 1024 bytes.
    leading : int
        Bytes between panels of 64 columns, used where B is read transposed.
    stride : int
        Bytes between groups of eight rows.
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
    """D + A B of a warpgroup, complete on return: 64 rows, N columns. sm_90a.

    Parameters
    ----------
    d : list of N / 2 f32, or N
        This thread's accumulators of its warp's 16 rows: elements [4n, 4n + 4) belong to column tile n of 8, laid out
        as in ``mma_m16n8k16``. The number N alone, a multiple of 8 up to 256, means zeros.
    a : list of lists of 4 words, or i64
        For every k-step of 16 columns of A the words of ``mma_m16n8k16``, computed in the same loop iteration (ptxas
        of CUDA 13.0 reuses registers of A that the loop does not write); or the descriptor of A.
    b : i64
        The descriptor of B (:func:`wgmma_descriptor`).
    steps : list of int, or of (int, int)
        Byte offsets of every k-step: in B, or, with a descriptor of A, in A and in B.
    dtype : DType
        Of A and B: f16, bf16 or f8e4m3. f8e4m3 has k-steps of 32 columns (a thread's 4 words are, for each of its two
        rows in turn, columns 4 t to 4 t + 3 and those 16 further, with t the lane modulo 4), and its accumulators keep
        about 14 bits of the largest term.
    trans_b : bool
        The rows of the tile are B's 16 rows of a k-step, with N columns; otherwise they are B's columns.
    trans_a : bool
        The rows of A's tile, which needs a descriptor, are A's 16 columns of a k-step; otherwise they are A's rows.
    """
    return _product(d, a, b, steps, dtype, trans_b, trans_a, wait=True)


def wgmma_start(
    d: int | Sequence[Any], a: Any, b: Any, steps: Sequence[tuple[int, int]] | Sequence[int], dtype: DType,
    trans_b: bool = False, trans_a: bool = False,
) -> list[Value]:  # fmt: skip
    """Start D + A B asynchronously, as a group of its own that a :func:`wgmma_wait` completes. sm_90a.

    Parameters as in :func:`wgmma`. Until the wait, the result may only be passed to another ``wgmma_start`` that adds
    to it, and the product's inputs, shared memory and registers of A, must not change.
    """
    return _product(d, a, b, steps, dtype, trans_b, trans_a, wait=False)


def wgmma_wait(pending: int, *sums: Sequence[Any]) -> list[list[Value]]:
    """Wait until at most ``pending`` of this warpgroup's groups are incomplete. sm_90a.

    ``sums`` are the results of all incomplete groups, in any order. They are returned; results of complete groups may
    then be read.
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
    """A product with checked operands."""
    _static(dtype.name, ("f16", "bf16", "f8e4m3"), "dtype")
    if dtype is f8e4m3 and (trans_a or trans_b):
        raise ValueError("wgmma does not transpose f8e4m3: trans_a and trans_b need 16-bit elements")
    n = d if isinstance(d, int) else 2 * len(d)
    if isinstance(d, bool) or n % 8 or not 8 <= n <= 256:
        raise ValueError(f"wgmma needs a multiple of 8 columns up to 256, got {n}")
    shared_a = isinstance(a, Value)
    if not shared_a and (len(a) != len(steps) or any(len(words) != 4 for words in a)):
        raise ValueError(f"wgmma takes 4 words of A and an offset in B per k-step, got {len(a)} and {len(steps)} steps")
    if trans_a and not shared_a:
        raise ValueError("wgmma transposes A only in shared memory: pass a descriptor of A")
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
    """Fence, multiply 64 rows and ``n`` columns, commit, and optionally wait.

    ``dtype`` is f16, bf16 or e4m3 (operands in shared memory are K-major); ``dtype_b`` is B's if it differs (e5m2).
    ``a`` is a descriptor or four words per k-step, ``b`` a descriptor, ``accumulator`` n / 2 f32 or empty for zeros;
    ``steps`` are the byte offsets of every k-step in A and B. Without ``commit`` the product joins the next group.
    """
    count, first = n // 2, n // 2 + len(accumulator)  # ``first`` is the operand number of A
    shared_a = isinstance(a, ir.Value)
    left = [a] if shared_a else list(a)
    registers = ", ".join(f"${i}" for i in range(count))
    wide = dtype in ("f16", "bf16")  # 8-bit operands cannot be transposed
    shape = f"m64n{n}k{16 if wide else 32}.f32.{dtype}.{dtype_b or dtype}"
    # Offsets of two descriptors are added to their low words, which have the addresses: two 64-bit additions would use
    # uniform registers for constants and carries. For B alone, one 64-bit addition is one instruction.
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
    """Inline PTX with ``count`` f32 results."""
    result = "f32" if count == 1 else f"!llvm.struct<({', '.join(['f32'] * count)})>"
    made = inline_asm(text, ",".join(constraints), operands, result, effects=True)
    return [made] if count == 1 else [x.ir for x in _parts(made, count, f32)]
