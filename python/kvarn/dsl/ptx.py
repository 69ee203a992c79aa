# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""NVIDIA instructions as functions, one per instruction. Kernels that call them do not compile for the host.

Fragments are lists of 32-bit words (i32); a word packs two 16-bit or four 8-bit elements, lowest index in the low bits.
Fragment layouts are those of the PTX manual. Pointers are :class:`kvarn.dsl.memory.Pointer`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mlir import ir

from kvarn.dialect.dtypes import DType, bf16, bool_, f16, f32, i32, i64, u16, u32

from .builder import emit, emit_value, types
from .memory import GLOBAL, SHARED, Pointer
from .values import Numeric, Value, Vector, as_value, bitcast, cast, describe, i32_value, literal, plain, vector

__all__ = [
    "ballot", "cluster_barrier", "cluster_rank", "cp_async", "cp_async_bulk", "cp_async_bulk_prefetch",
    "cp_async_commit", "cp_async_mbarrier_arrive", "cp_async_wait",
    "cvt_e4m3x2_to_f16x2", "cvt_e4m3x4_to_bf16x4", "cvt_e4m3x4_to_f16x4",
    "cvt_e5m2x2_to_f16x2", "cvt_e5m2x4_to_f16x4", "cvt_i8x4_to_f16x4",
    "elect", "ex2", "fence_mbarrier_init", "fence_proxy_async", "fma_saturated", "globaltimer",
    "griddepcontrol_launch_dependents",
    "griddepcontrol_wait", "l2_policy", "ldmatrix", "load_cluster", "load_nc", "load_once", "mbarrier_arrive",
    "mbarrier_arrive_expect_tx", "mbarrier_init", "mbarrier_try_wait", "mbarrier_wait", "mma_m16n8k8_tf32",
    "mma_m16n8k16", "mma_m16n8k32_i8", "movmatrix", "named_barrier",
    "named_barrier_arrive", "nanosleep", "pack_bf16x2", "pack_f16x2", "prmt", "rcp", "setmaxnreg", "smid",
    "stmatrix", "syncwarp", "tanh_approx",
]  # fmt: skip

_ALL_LANES = -1
_BARRIER_NAME = re.compile(r"[\w.\[\]-]+")


def inline_asm(
    text: str, constraints: str, operands: Sequence[ir.Value], result: str | None = None, effects: bool = False
) -> Any:
    """Inline PTX; ``result`` is the result type as text."""
    t = types()
    attributes = {
        "asm_string": ir.StringAttr.get(text),
        "constraints": ir.StringAttr.get(constraints),
        "tail_call_kind": t.attribute("#llvm.tailcallkind<none>"),
    }
    if effects:
        attributes["has_side_effects"] = t.unit
    if result is not None:
        return emit_value("llvm.inline_asm", t.type(result), operands, attributes)
    emit("llvm.inline_asm", (), operands, attributes)


def intrinsic(name: str, results: Sequence[ir.Type] = (), operands: Sequence[ir.Value] = (), flags: str = "") -> Any:
    """Call an LLVM intrinsic by name, with the given fast-math flags, and return the op."""
    sizes = ir.DenseI32ArrayAttr.get
    attributes = {"intrin": ir.StringAttr.get(name), "op_bundle_sizes": sizes([])}
    attributes["operandSegmentSizes"] = sizes([len(operands), 0])
    if flags:
        attributes["fastmathFlags"] = ir.Attribute.parse(f"#llvm.fastmath<{flags}>")
    return emit("llvm.call_intrinsic", results, operands, attributes)


def instruction(
    text: str, constraints: str, operands: Sequence[ir.Value] = (), gives: DType | None = None, effects: bool = False
) -> Any:
    """Inline PTX with one result value, or a list of them. A memory clobber counts as a side effect."""
    effects = effects or constraints.endswith("~{memory}")
    if gives is None:
        return inline_asm(text, constraints, operands, effects=effects)
    count = constraints.count("=")
    made = inline_asm(text, constraints, operands, gives.mlir if count == 1 else _struct(gives, count), effects)
    return Value(made, gives) if count == 1 else _parts(made, count, gives)


def _struct(dtype: DType, count: int) -> str:
    return f"!llvm.struct<({', '.join([dtype.mlir] * count)})>"


def _parts(structure: ir.Value, count: int, dtype: DType) -> list[Value]:
    element = types().of(dtype)
    return [
        Value(emit_value("llvm.extractvalue", element, [structure], {"position": ir.DenseI64ArrayAttr.get([i])}), dtype)
        for i in range(count)
    ]


def _registers(first: int, count: int) -> str:
    """Operands of an instruction as one vector operand."""
    return f"{{{', '.join(f'${i}' for i in range(first, first + count))}}}"


def _word(value: Any, what: str = "the operand") -> ir.Value:
    """A 32-bit word: an integer, or a vector of 32 bits in all."""
    value = plain(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return literal(value, i32, bits=True)
    if not isinstance(value, Numeric) or value.dtype.bits * max(value.lanes, 1) != 32:
        raise TypeError(f"{what} must be a 32-bit word, got {describe(value)}")
    return bitcast(value, i32).ir if value.dtype.mlir != "i32" or value.lanes else value.ir


def _float(value: Any, what: str) -> ir.Value:
    return as_value(value, f32, what).ir


def _pointer(pointer: Any, space: int, what: str) -> Pointer:
    if not isinstance(pointer, Pointer) or pointer.space != space:
        where = "shared" if space == SHARED else "device"
        raise TypeError(f"{what} must be a pointer to {where} memory, got {describe(pointer)}")
    return pointer


def _shared(pointer: Any, what: str = "the barrier") -> ir.Value:
    return _pointer(pointer, SHARED, what).address().ir


def _device(pointer: Any, what: str = "the source") -> ir.Value:
    return _pointer(pointer, GLOBAL, what).address().ir


def _static(value: Any, allowed: Sequence[Any], what: str) -> Any:
    if not isinstance(value, int | str) or value not in allowed:
        raise ValueError(
            f"{what} must be one of {', '.join(map(str, allowed))}, known at compile time, got {describe(value)}"
        )
    return value


# --- copies --------------------------------------------------------------------------------------


def cp_async(
    to: Pointer, source: Pointer, bytes: int = 16, zero_fill_size: Any = None, l2_prefetch: int = 0,
    l2_policy: Any = None,
) -> None:  # fmt: skip
    """Start an asynchronous copy of 4, 8 or 16 bytes (aligned to the size) from device to shared memory.

    With ``zero_fill_size`` (i32, at most ``bytes``) only that many bytes are read, and the rest of the destination is
    zeroed. 16-byte copies bypass L1. ``l2_prefetch`` (64, 128 or 256 bytes; 0: none) is the size of the L2 prefetch,
    ``l2_policy`` (from :func:`l2_policy`) the L2 eviction policy.
    """
    _static(bytes, (4, 8, 16), "bytes")
    _static(l2_prefetch, (0, 64, 128, 256), "l2_prefetch")
    copied = [_pointer(to, SHARED, "the destination"), _pointer(source, GLOBAL, "the source")]
    rest = [] if zero_fill_size is None else [i32_value(zero_fill_size, "zero_fill_size")]
    level = "cg" if bytes == 16 else "ca"
    if not l2_prefetch and l2_policy is None:
        t = types()
        attributes = {"modifier": t.attribute(f"#nvvm<load_cache_modifier {level}>"), "size": t.i32_attr(bytes)}
        emit("nvvm.cp.async.shared.global", (), [*(x.ir for x in copied), *rest], attributes)
        return
    operands = [*(x.address().ir for x in copied), *rest]
    hints = f".L2::{l2_prefetch}B" if l2_prefetch else ""
    if l2_policy is not None:
        operands.append(as_value(l2_policy, i64, "l2_policy").ir)
        hints = f".L2::cache_hint{hints}"
    more = "".join(f", ${i}" for i in range(2, len(operands)))
    text = f"cp.async.{level}.shared.global{hints} [$0], [$1], {bytes}{more};"
    if l2_policy is not None:
        # ptxas of CUDA 13.0 miscompiles this copy to an illegal instruction if part of the address is in a uniform
        # register. The minimum, which changes nothing, forces the address into a register of the thread.
        text = f"{{ .reg .b32 to; min.u32 to, $0, 0x7FFFFFFF; {text.replace('[$0]', '[to]')} }}"
    constraints = f"r,l{',r' * len(rest)}{',l' * (l2_policy is not None)},~{{memory}}"
    instruction(text, constraints, operands)


def l2_policy(priority: str) -> Value:
    """An L2 eviction policy for copies, i64. sm_80 and later.

    ``priority`` is "evict_first" (for data that is read once), "evict_last" or "evict_normal".
    """
    _static(priority, ("evict_first", "evict_last", "evict_normal"), "priority")
    return instruction(f"createpolicy.fractional.L2::{priority}.b64 $0, 0f3F800000;", "=l", gives=i64)


def cp_async_commit() -> None:
    """Commit this thread's pending copies as a group."""
    emit("nvvm.cp.async.commit.group")


def cp_async_wait(pending: int) -> None:
    """Wait until at most ``pending`` of this thread's groups are incomplete."""
    if isinstance(pending, bool) or not isinstance(pending, int) or pending < 0:
        raise ValueError(f"pending must be an int known at compile time and not negative, got {describe(pending)}")
    emit("nvvm.cp.async.wait.group", (), (), {"n": types().i32_attr(pending)})


def cp_async_mbarrier_arrive(barrier: Pointer) -> None:
    """Arrive on ``barrier`` when all copies that this thread has started are complete. sm_90 and later."""
    instruction("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", "r,~{memory}", [_shared(barrier)])


def cp_async_bulk(to: Pointer, source: Pointer, bytes: Any, barrier: Pointer) -> None:
    """Copy ``bytes`` (a multiple of 16) from device to shared memory; ``barrier`` tracks the bytes. sm_90 and later."""
    operands = [_shared(to, "the destination"), _device(source), i32_value(bytes, "bytes"), _shared(barrier)]
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    instruction(text, "r,l,r,r,~{memory}", operands)


def cp_async_bulk_prefetch(source: Pointer, bytes: Any) -> None:
    """Prefetch ``bytes`` (a multiple of 16) of device memory into the L2 cache. sm_90 and later.

    No instruction waits for the prefetch and no value is read, so it may precede the wait for the memory's writers.
    """
    operands = [_device(source), i32_value(bytes, "bytes")]
    instruction("cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r,~{memory}", operands)


def load_once(pointer: Pointer) -> Vector:
    """Load 16 bytes, in program order, as four i32. No thread writes this memory or reads it again.

    The load does not allocate in L1 and prefetches the surrounding 256 bytes into L2. sm_80 and later.
    """
    text = "ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {$0, $1, $2, $3}, [$4];"
    operands = [_device(pointer, "the address")]
    return vector(i32, instruction(text, "=r,=r,=r,=r,l", operands, i32, effects=True))


def load_nc(pointer: Pointer, dtype: DType = i32, width: int = 4) -> Any:
    """Load through the read-only path; nothing may write this memory while the kernel runs."""
    return _pointer(pointer, GLOBAL, "the address").load(dtype, width, invariant=True)


def unknown(x: Any) -> Value:
    """A non-negative number that is opaque to LLVM. For passes, where registers are scarce.

    A loop up to it is not unrolled, and values computed from it are not hoisted into registers of their own.
    """
    kind = "n" if isinstance(x, int) else "r"
    return Value(inline_asm("mov.b32 $0, $1;", f"=r,{kind}", [i32_value(x)], "i32", effects=True), i32, nonneg=True)


def stay_rolled() -> None:
    """At the start of a loop's body, keep ptxas from unrolling the loop. For passes, where registers are scarce."""
    instruction('.pragma "nounroll";', "", effects=True)


# --- matrices ------------------------------------------------------------------------------------


def ldmatrix(pointer: Pointer, num: int = 4, trans: bool = False) -> list[Value]:
    """Load ``num`` 8x8 matrices of 16-bit elements from shared memory, as ``num`` words.

    Lane i provides the address of row i.
    """
    _static(num, (1, 2, 4), "num")
    t = types()
    attributes = {
        "num": t.i32_attr(num),
        "layout": t.attribute(f"#nvvm.mma_layout<{'col' if trans else 'row'}>"),
        "shape": t.attribute("#nvvm.ld_st_matrix_shape<m = 8, n = 8>"),
        "eltType": t.attribute("#nvvm.ld_st_matrix_elt_type<b16>"),
    }
    operands = [_pointer(pointer, SHARED, "the address").ir]
    if num == 1:
        return [Value(emit_value("nvvm.ldmatrix", t.i32, operands, attributes), i32)]
    return _parts(emit_value("nvvm.ldmatrix", t.type(_struct(i32, num)), operands, attributes), num, i32)


def stmatrix(pointer: Pointer, words: Sequence[Any], trans: bool = False) -> None:
    """Store 1, 2 or 4 8x8 matrices of 16-bit elements to shared memory. sm_90 and later.

    Lane i provides the address of row i.
    """
    _static(len(words), (1, 2, 4), "the number of words")
    shape = f"m8n8.x{len(words)}{'.trans' if trans else ''}"
    operands = [_shared(pointer, "the address"), *(_word(w, "a fragment") for w in words)]
    text = f"stmatrix.sync.aligned.{shape}.shared.b16 [$0], {_registers(1, len(words))};"
    instruction(text, "r," * len(operands) + "~{memory}", operands)


def _fragments(name: str, a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The words of A and B, and the accumulators, as values."""
    if (len(a), len(b), len(c)) != (4, 2, 4):
        raise ValueError(f"{name} takes fragments of 4, 2 and 4, got {len(a)}, {len(b)} and {len(c)}")
    return [_word(w, "a fragment") for w in (*a, *b)], [_float(x, "an accumulator") for x in c]


def mma_m16n8k16(a: Sequence[Any], b: Sequence[Any], c: Sequence[Any], dtype: DType = bf16) -> list[Value]:
    """c + a @ b for a 16x16 and a 16x8 fragment of ``dtype`` (bf16 or f16), accumulated in f32.

    ``a`` has 4 words, ``b`` 2; ``c`` and the result have 4 f32.
    """
    if dtype not in (bf16, f16):
        raise TypeError(f"mma_m16n8k16 multiplies bf16 or f16, got {dtype!r}")
    words, accumulators = _fragments("mma_m16n8k16", a, b, c)
    if dtype is f16:
        words = [bitcast(Value(w, i32), f16).ir for w in words]
    t = types()
    attributes = {
        "layoutA": t.attribute("#nvvm.mma_layout<row>"),
        "layoutB": t.attribute("#nvvm.mma_layout<col>"),
        "multiplicandAPtxType": t.attribute(f"#nvvm.mma_type<{dtype.name}>"),
        "multiplicandBPtxType": t.attribute(f"#nvvm.mma_type<{dtype.name}>"),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([4, 2, 4]),
        "shape": t.attribute("#nvvm.shape<m = 16, n = 8, k = 16>"),
    }
    made = emit_value("nvvm.mma.sync", t.type(_struct(f32, 4)), [*words, *accumulators], attributes)
    return _parts(made, 4, f32)


def mma_m16n8k8_tf32(a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> list[Value]:
    """c + a @ b for a 16x8 and an 8x8 fragment of tf32, accumulated in f32; the low 13 bits of each word are ignored.

    ``a`` has 4 words, ``b`` 2; ``c`` and the result have 4 f32.
    """
    words, accumulators = _fragments("mma_m16n8k8_tf32", a, b, c)
    registers = ", ".join(_registers(first, count) for first, count in ((0, 4), (4, 4), (8, 2), (10, 4)))
    text = f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {registers};"
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    return instruction(text, constraints, [*words, *accumulators], f32)


def mma_m16n8k32_i8(a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> list[Value]:
    """c + a @ b for a 16x32 and a 32x8 fragment of i8, accumulated in i32, which wraps around.

    ``a`` has 4 words, ``b`` 2; ``c`` and the result have 4 i32.
    """
    if (len(a), len(b), len(c)) != (4, 2, 4):
        raise ValueError(f"mma_m16n8k32_i8 takes fragments of 4, 2 and 4, got {len(a)}, {len(b)} and {len(c)}")
    words = [_word(w, "a fragment") for w in (*a, *b, *c)]
    registers = ", ".join(_registers(first, count) for first, count in ((0, 4), (4, 4), (8, 2), (10, 4)))
    text = f"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {registers};"
    return instruction(text, ",".join(["=r"] * 4 + ["r"] * 10), words, i32)


def movmatrix(word: Any) -> Value:
    """Transpose an 8x8 matrix of 16-bit elements distributed over the warp, one word per lane."""
    # Marked as having effects: all lanes must run it together, so it must not move into a branch.
    return instruction("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [_word(word)], i32, effects=True)


# --- words ---------------------------------------------------------------------------------------


def prmt(a: Any, b: Any, selector: Any) -> Value:
    """Select four of the eight bytes of ``a`` (0 to 3) and ``b`` (4 to 7); a hex digit of ``selector`` is an index."""
    if isinstance(selector, int):
        return instruction(f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r", [_word(a), _word(b)], i32)
    return instruction("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [_word(a), _word(b), _word(selector)], i32)


def fma_saturated(a: Any, b: Any, c: Any) -> Value:
    """a * b + c of f32, at least 0 and at most 1; NaN becomes 0."""
    operands = [_float(x, name) for x, name in ((a, "a"), (b, "b"), (c, "c"))]
    return instruction("fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", operands, f32)


def pack_bf16x2(low: Any, high: Any) -> Value:
    """Two f32, rounded to bf16, packed in a word."""
    return instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [_float(low, "low"), _float(high, "high")], i32)


def pack_f16x2(low: Any, high: Any) -> Value:
    """Two f32, rounded to f16, packed in a word."""
    return instruction("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [_float(low, "low"), _float(high, "high")], i32)


def _cvt_pair(kind: str, pair: Any) -> Value:
    value = as_value(pair)
    bits = value.dtype.bits * max(value.lanes, 1)
    if bits == 32:
        text = f"{{ .reg .b16 lo, hi; mov.b32 {{lo, hi}}, $1; cvt.rn.f16x2.{kind} $0, lo; }}"
        return instruction(text, "=r,r", [_word(value)], i32)
    if bits != 16:
        raise TypeError(f"a pair of 8-bit floats must be 16 bits (or the low half of a word), got {describe(value)}")
    return instruction(f"cvt.rn.f16x2.{kind} $0, $1;", "=r,h", [bitcast(value, u16).ir], i32)


def _cvt_four(kind: str, word: Any) -> list[Value]:
    text = f"{{ .reg .b16 lo, hi; mov.b32 {{lo, hi}}, $2; cvt.rn.f16x2.{kind} $0, lo; cvt.rn.f16x2.{kind} $1, hi; }}"
    return instruction(text, "=r,=r,r", [_word(word)], i32)


def cvt_e4m3x2_to_f16x2(pair: Any) -> Value:
    """Convert two e4m3 (16 bits, or the low half of a word) to two f16 in a word. sm_89 and later."""
    return _cvt_pair("e4m3x2", pair)


def cvt_e5m2x2_to_f16x2(pair: Any) -> Value:
    """Convert two e5m2 (16 bits, or the low half of a word) to two f16 in a word. sm_89 and later."""
    return _cvt_pair("e5m2x2", pair)


def cvt_e4m3x4_to_f16x4(word: Any) -> list[Value]:
    """Convert four e4m3 in a word to four f16 in two words. sm_89 and later."""
    return _cvt_four("e4m3x2", word)


def cvt_e4m3x4_to_bf16x4(word: Any) -> list[Value]:
    """Convert four e4m3 in a word to four bf16 in two words, exactly; a NaN becomes 480 with its sign. sm_80 and later.

    It uses integer and FMA instructions: conversion instructions have lower throughput.
    """
    # Each byte moves to where a bf16 keeps sign, exponent and top mantissa bits: prmt replicates the sign bit eight
    # times above it, the shift aligns it, the mask clears other bits. The result is 2^120 too small; fma scales it.
    text = (
        "{ .reg .b32 x, y; prmt.b32 x, $2, 0, 0x9180; prmt.b32 y, $2, 0, 0xB3A2; "
        "shl.b32 x, x, 4; shl.b32 y, y, 4; and.b32 x, x, 0x87F087F0; and.b32 y, y, 0x87F087F0; "
        "fma.rn.bf16x2 $0, x, $3, $4; fma.rn.bf16x2 $1, y, $3, $4; }"
    )
    factors = [literal(bits, i32, bits=True) for bits in (0x7B807B80, 0x80008000)]  # 2^120 and -0
    return instruction(text, "=&r,=&r,r,r,r", [_word(word), *factors], i32)


def cvt_e5m2x4_to_f16x4(word: Any) -> list[Value]:
    """Convert four e5m2 in a word to four f16 in two words. sm_89 and later."""
    return _cvt_four("e5m2x2", word)


def cvt_i8x4_to_f16x4(word: Any) -> list[Value]:
    """Convert four i8 in a word to four f16 in two words, exactly."""
    # The byte x + 128 under a high byte of 0x64 is the f16 1024 + 128 + x.
    text = (
        "{ .reg .b32 u; xor.b32 u, $2, 0x80808080; prmt.b32 $0, u, 0x64646464, 0x4140; "
        "prmt.b32 $1, u, 0x64646464, 0x4342; sub.f16x2 $0, $0, $3; sub.f16x2 $1, $1, $3; }"
    )
    return instruction(text, "=&r,=&r,r,r", [_word(word), literal(0x64806480, i32, bits=True)], i32)


def ex2(x: Any) -> Value:
    """2^x, approximate (2 ulp), f32. Subnormal results are flushed to zero."""
    return instruction("ex2.approx.ftz.f32 $0, $1;", "=f,f", [_float(x, "x")], f32)


def fma_rm(a: Any, b: Any, c: Any) -> Value:
    """a * b + c, f32, rounded once, towards minus infinity."""
    return instruction("fma.rm.f32 $0, $1, $2, $3;", "=f,f,f,f", [_float(a, "a"), _float(b, "b"), _float(c, "c")], f32)


def lg2(x: Any) -> Value:
    """log2(x), approximate, f32. The error is 2^-22: absolute for x between 0.5 and 2, else relative."""
    return instruction("lg2.approx.ftz.f32 $0, $1;", "=f,f", [_float(x, "x")], f32)


def rcp(x: Any) -> Value:
    """1 / x, approximate (1 ulp), f32. Subnormals are flushed to zero."""
    return instruction("rcp.approx.ftz.f32 $0, $1;", "=f,f", [_float(x, "x")], f32)


def tanh_approx(x: Any) -> Value:
    """tanh(x), approximate (relative error 2^-11), f32."""
    return instruction("tanh.approx.f32 $0, $1;", "=f,f", [_float(x, "x")], f32)


# --- threads -------------------------------------------------------------------------------------


def syncwarp(mask: Any = _ALL_LANES) -> None:
    """Wait for the lanes of the mask; their earlier memory accesses become visible to one another."""
    emit("nvvm.bar.warp.sync", (), [_word(mask, "the mask")])


def nanosleep(duration: int) -> None:
    """Suspend the thread for about ``duration`` nanoseconds, at most twice that. sm_70 and later."""
    if isinstance(duration, bool) or not isinstance(duration, int) or not 0 <= duration <= 1_000_000:
        raise ValueError(f"duration must be an int up to 1000000 known at compile time, got {describe(duration)}")
    instruction(f"nanosleep.u32 {duration};", "", effects=True)


def globaltimer() -> Value:
    """A clock in nanoseconds that all multiprocessors share, i64, for time stamps."""
    return instruction("mov.u64 $0, %globaltimer;", "=l", gives=i64, effects=True)


def smid() -> Value:
    """The index of the multiprocessor that the thread runs on, i32."""
    return instruction("mov.u32 $0, %smid;", "=r", gives=i32, effects=True)


def named_barrier(number: Any, threads: Any) -> None:
    """Wait at barrier ``number`` (1 to 15; 0 is ``kv.barrier``) until ``threads`` threads (a multiple of 32) arrive."""
    operands = [i32_value(number, "the number"), i32_value(threads, "threads")]
    # An op rather than inline PTX, as in cluster_barrier: LLVM must not copy it into branches.
    emit("nvvm.barrier", (), operands, {"operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 1, 0])})


def named_barrier_arrive(number: Any, threads: Any) -> None:
    """Arrive at barrier ``number`` without waiting. ``threads`` counts all participants, waiting ones included."""
    # nvvm.barrier.arrive is inline PTX, which LLVM may copy into both branches of an earlier condition on the lane.
    operands = [i32_value(number, "the number"), i32_value(threads, "threads")]
    intrinsic("llvm.nvvm.barrier.cta.arrive.aligned.count", (), operands)


def ballot(condition: Any) -> Value:
    """The lanes in which the condition is true, one bit per lane, u32. All lanes must take part."""
    if isinstance(condition, bool):
        condition = as_value(condition)
    if not isinstance(condition, Value) or condition.dtype is not bool_:
        raise TypeError(f"kv.ballot needs a bool, got {describe(condition)}")
    t = types()
    operands, kind = [literal(_ALL_LANES, i32), condition.ir], t.attribute("#nvvm<vote_sync_kind ballot>")
    return Value(emit_value("nvvm.vote.sync", t.i32, operands, {"kind": kind}), u32)


def elect() -> Value:
    """True in exactly one lane of the warp. sm_90 and later."""
    return Value(emit_value("nvvm.elect.sync", types().i1), bool_)


def cluster_rank() -> Value:
    """The block's rank in its cluster, i32 (``@kv.kernel(cluster=...)``). sm_90 and later."""
    return Value(instruction("mov.u32 $0, %cluster_ctarank;", "=r", gives=i32).ir, i32, nonneg=True)


def cluster_barrier() -> None:
    """Wait until every thread of the cluster arrives; earlier memory accesses become visible to all of them.

    A block must not exit while others still write to its shared memory or use its barriers. sm_90 and later.
    """
    # Not inline PTX: LLVM may copy that into both branches of an earlier condition, and the warp would deadlock.
    for name in ("nvvm.cluster.arrive", "nvvm.cluster.wait"):
        emit(name, (), (), {"aligned": types().unit})


def load_cluster(pointer: Pointer, rank: Any, dtype: DType = f32, width: int = 1) -> Any:
    """Load 32-bit elements from the shared memory of another block of the cluster, at the same offset as ``pointer``.

    ``rank`` is the other block's (:func:`cluster_rank`), ``width`` 1, 2 or 4: a scalar, or a list of scalars. A
    :func:`cluster_barrier` must separate the block's writes from the load, and the load from the block's exit. sm_90
    and later.
    """
    _static(width, (1, 2, 4), "width")
    if dtype.bits != 32:
        raise TypeError(f"load_cluster loads elements of 32 bits, got {dtype.name}")
    operands = [_shared(pointer, "the address"), i32_value(rank, "rank")]
    found, wide = (_registers(0, width), f".v{width}") if width > 1 else ("$0", "")
    text = (
        f"{{ .reg .b32 at; mapa.shared::cluster.u32 at, ${width}, ${width + 1}; "
        f"ld.shared::cluster{wide}.b32 {found}, [at]; }}"
    )
    constraints = f"={'f' if dtype.is_float else 'r'}," * width + "r,r,~{memory}"
    return instruction(text, constraints, operands, dtype)


def setmaxnreg(count: int, action: str) -> None:
    """Change the registers per thread: ``action`` is "increase" or "decrease". For whole warpgroups, from sm_90a on."""
    _static(count, tuple(range(24, 257, 8)), "count")
    _static(action, ("increase", "decrease"), "action")
    attributes = {"action": types().attribute(f"#nvvm<action {action}>"), "regCount": types().i32_attr(count)}
    emit("nvvm.setmaxregister", (), (), attributes)


def griddepcontrol_wait() -> None:
    """Wait until the previous kernel has finished, if this one was launched to overlap with it (PDL). From sm_90 on."""
    emit("nvvm.griddepcontrol", (), (), {"kind": types().attribute("#nvvm<grid_dep_action wait>")})


def griddepcontrol_launch_dependents() -> None:
    """Allow the next kernel to start early (PDL), once every block has called this or exited. sm_90 and later."""
    emit("nvvm.griddepcontrol", (), (), {"kind": types().attribute("#nvvm<grid_dep_action launch_dependents>")})


# --- memory order --------------------------------------------------------------------------------


def fence_proxy_async() -> None:
    """Make this thread's writes to shared memory visible to the async proxy (bulk copies, wgmma). sm_90 and later."""
    t = types()
    kind, space = t.attribute("#nvvm.proxy_kind<async.shared>"), t.attribute("#nvvm.shared_space<cta>")
    emit("nvvm.fence.proxy", (), (), {"kind": kind, "space": space})


def fence_mbarrier_init() -> None:
    """Make the initialisation of mbarriers visible to bulk copies. sm_90 and later."""
    emit("nvvm.fence.mbarrier.init")


def mbarrier_init(barrier: Pointer, count: Any, name: str = "") -> None:
    """Initialise an mbarrier (8 bytes of shared memory) for ``count`` arrivals. The emulator reports it as ``name``."""
    operands = [_shared(barrier), i32_value(count, "count")]
    if name and not _BARRIER_NAME.fullmatch(name):
        raise ValueError(f"the name of a barrier must be letters, digits and _.[]-, got {name!r}")
    note = f" // kv.barrier {name}" if name else ""
    instruction("mbarrier.init.shared.b64 [$0], $1;" + note, "r,r,~{memory}", operands)


def mbarrier_arrive(barrier: Pointer, condition: Any = True) -> None:
    """Arrive. With a condition, only threads in which it is true arrive; predication avoids divergence."""
    operands, when, holds = [_shared(barrier)], "", ""
    if condition is not True:
        operands.append(cast(as_value(condition, bool_, "the condition"), i32).ir)
        when, holds = ".reg .pred p; setp.ne.b32 p, $1, 0; ", "@p "
    text = f"{{ .reg .b64 state; {when}{holds}mbarrier.arrive.shared.b64 state, [$0]; }}"
    instruction(text, "r," * len(operands) + "~{memory}", operands)


def mbarrier_arrive_expect_tx(barrier: Pointer, bytes: Any) -> None:
    """Arrive, and add ``bytes`` bytes of bulk copies to what the phase waits for. sm_90 and later."""
    operands = [_shared(barrier), i32_value(bytes, "bytes")]
    text = "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [$0], $1; }"
    instruction(text, "r,r,~{memory}", operands)


def mbarrier_try_wait(barrier: Pointer, parity: Any) -> Value:
    """Whether the phase of the given parity is complete; may suspend for a limited time. sm_90 and later."""
    operands = [_shared(barrier), i32_value(parity, "parity")]
    text = "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [$1], $2; selp.b32 $0, 1, 0, p; }"
    return instruction(text, "=r,r,r,~{memory}", operands, i32) != 0


def mbarrier_wait(barrier: Pointer, parity: Any, sleep: int = 0, name: str = "a barrier") -> None:
    """Wait until the phase of the given parity is complete. sm_90 and later.

    With ``sleep`` the thread sleeps that many nanoseconds between polls, which leaves issue slots and power to other
    warps. ``name`` appears in the message of ``KVARN_CHECK`` for a wait of more than 10 s.
    """
    op = emit("scf.while", (), (), {"kv.barrier": ir.StringAttr.get(name)}, regions=2)
    with ir.InsertionPoint(op.regions[0].blocks.append()):
        emit("scf.condition", (), [(~mbarrier_try_wait(barrier, parity)).ir])
    with ir.InsertionPoint(op.regions[1].blocks.append()):
        if sleep:
            nanosleep(sleep)
        emit("scf.yield")
