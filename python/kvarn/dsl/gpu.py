# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Indices of threads and blocks, barriers, shuffles, reductions, printf, assertions."""

from __future__ import annotations

import re
from typing import Any

from mlir import ir

from kvarn.dialect.dtypes import bool_, f32, f64, i32, u8, u16, u32

from . import intervals
from .builder import emit, emit_value, state, types
from .values import Numeric, Value, Vector, as_value, bitcast, cast, describe, fold, i32_value, literal, plain

__all__ = [
    "barrier", "block_dim", "block_id", "device_assert", "grid_dim", "lane_id", "linear_thread_id", "printf",
    "shuffle_down", "shuffle_idx", "shuffle_up", "shuffle_xor", "thread_id", "warp_id", "warp_reduce",
]  # fmt: skip

WARP = 32


class Dim3:
    """``.x``, ``.y``, ``.z`` of ``kv.block_id``, ``kv.thread_id``, ``kv.block_dim`` or ``kv.grid_dim``, as i32."""

    __slots__ = ("_most", "_op")

    def __init__(self, op: str, x: int, other: int) -> None:
        self._op, self._most = op, {"x": x, "y": other, "z": other}

    def _read(self, dimension: str) -> Value:
        t = types()
        index = emit_value(self._op, t.index, (), {"dimension": t.attribute(f"#gpu<dim {dimension}>")})
        return Value(emit_value("arith.index_cast", t.i32, [index]), i32, bounds=(0, self._most[dimension]))

    @property
    def x(self) -> Value:
        return self._read("x")

    @property
    def y(self) -> Value:
        return self._read("y")

    @property
    def z(self) -> Value:
        return self._read("z")

    def __repr__(self) -> str:
        return f"kv.{self._op[4:]}"


block_id = Dim3("gpu.block_id", intervals.BLOCKS - 1, intervals.OTHER_BLOCKS - 1)
grid_dim = Dim3("gpu.grid_dim", intervals.BLOCKS, intervals.OTHER_BLOCKS)
thread_id = Dim3("gpu.thread_id", intervals.THREADS - 1, intervals.THREADS - 1)
block_dim = Dim3("gpu.block_dim", intervals.THREADS, intervals.THREADS)


def linear_thread_id() -> Value:
    """The thread's linear index in its block; x varies fastest."""
    block = getattr(state.trace, "block", None)
    if block is not None and block[1:] == (1, 1):
        return thread_id.x
    number = thread_id.x + block_dim.x * (thread_id.y + block_dim.y * thread_id.z)
    return Value(number.ir, i32, bounds=(0, intervals.THREADS - 1))


class Register(Value):
    """A value that is read where it is used: ``kv.lane_id``, ``kv.warp_id`` (calling it gives the same value)."""

    __slots__ = ("_make", "_name")

    def __init__(self, name: str, make: Any, most: int) -> None:
        self._name, self._make = name, make
        self.dtype, self.bounds = i32, (0, most - 1)

    @property
    def ir(self) -> ir.Value:  # type: ignore[override]
        return self._make().ir

    @ir.setter
    def ir(self, value: ir.Value) -> None:
        raise AttributeError(f"{self._name} cannot be set")

    def __call__(self) -> Value:
        return self._make()

    def __repr__(self) -> str:
        return self._name


lane_id = Register("kv.lane_id", lambda: linear_thread_id() & (WARP - 1), WARP)
warp_id = Register("kv.warp_id", lambda: linear_thread_id() >> 5, intervals.THREADS // WARP)


def barrier() -> None:
    """Wait until every thread of the block arrives; earlier memory accesses become visible to all of them."""
    emit("gpu.barrier")


# --- shuffles ------------------------------------------------------------------------------------


_SHUFFLES = {"xor": "bfly", "up": "up", "down": "down", "idx": "idx"}  # as nvvm names them


def _shuffle(mode: str, value: Any, offset: Any, width: int) -> Any:
    value = as_value(value, None, "what is shuffled")
    if width not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"width must be a power of two up to {WARP}, got {describe(width)}")
    t = types()
    distance = i32_value(offset, "the offset of a shuffle")
    if width == WARP:
        operands = [distance, literal(width, i32)]
        attributes = {"mode": t.attribute(f"#gpu<shuffle_mode {mode}>")}

        def exchange(x: ir.Value) -> ir.Value:
            return emit("gpu.shuffle", [x.type, t.i1], [x, *operands], attributes).results[0]
    else:
        # gpu.shuffle's width is the number of participating lanes; PTX's clamp word divides a warp into segments.
        clamp = (WARP - width) << 8 | (0 if mode == "up" else WARP - 1)
        operands = [distance, literal(clamp, i32)]
        everyone = literal(-1, i32)
        attributes = {"kind": t.attribute(f"#nvvm<shfl_kind {_SHUFFLES[mode]}>")}

        def exchange(x: ir.Value) -> ir.Value:
            return emit_value("nvvm.shfl.sync", x.type, [everyone, x, *operands], attributes)

    if value.dtype in (f32, i32, u32) and not value.lanes:
        return Value(exchange(value.ir), value.dtype, bounds=value.bounds)
    bits = value.dtype.bits * max(value.lanes, 1)
    if bits % 32 == 0:
        words = bitcast(value, u32)
        words = [Value(exchange(w.ir), u32) for w in (words if words.lanes else [words])]
        together = words[0] if len(words) == 1 else Vector(
            emit_value("vector.from_elements", t.of(u32, len(words)), [w.ir for w in words]), u32, len(words)
        )  # fmt: skip
        back = bitcast(together, value.dtype)
        return back if value.lanes or not back.lanes else back[0]
    if value.lanes:
        raise TypeError(f"a shuffle moves scalars and vectors of whole 32-bit words, got {value!r} of {bits} bits")
    if value.dtype is bool_:
        return Value(exchange(cast(value, u32).ir), u32) != 0
    narrow = u8 if bits == 8 else u16
    word = cast(bitcast(value, narrow), u32)
    return bitcast(cast(Value(exchange(word.ir), u32), narrow), value.dtype)


def shuffle_xor(value: Any, mask: Any, width: int = WARP) -> Any:
    """The value of lane ``lane_id ^ mask``. All lanes of the warp must take part."""
    return _shuffle("xor", value, mask, width)


def shuffle_up(value: Any, delta: Any, width: int = WARP) -> Any:
    """The value of lane ``lane_id - delta``; the thread's own value if there is no such lane."""
    return _shuffle("up", value, delta, width)


def shuffle_down(value: Any, delta: Any, width: int = WARP) -> Any:
    """The value of lane ``lane_id + delta``; the thread's own value if there is no such lane."""
    return _shuffle("down", value, delta, width)


def shuffle_idx(value: Any, lane: Any, width: int = WARP) -> Any:
    """The value of lane ``lane``."""
    return _shuffle("idx", value, lane, width)


def warp_reduce(value: Any, op: str = "add", width: int = WARP) -> Any:
    """Reduce a value over the lanes of each group of ``width``; every lane gets the result.

    ``op`` is "add", "max", "min", "mul", "and", "or" or "xor".
    """
    value = as_value(value, None, "what is reduced")
    offset = width // 2
    while offset:
        value = fold(op, value, shuffle_xor(value, offset, width=width))
        offset //= 2
    return value


# --- messages ------------------------------------------------------------------------------------

_CONVERSION = re.compile(r"%(?:%|[-+ #0]*\d*(?:\.\d+)?(hh|h|ll|l)?([a-zA-Z]))")
_PRINTED = {"d": "iu", "i": "iu", "u": "iu", "x": "iu", "X": "iu", "o": "iu", "c": "iu",
            "f": "f", "e": "f", "g": "f", "E": "f", "G": "f", "F": "f"}  # fmt: skip


def printf(format: str, *args: Any) -> None:
    """Print from a kernel with a C format: ``kv.printf("t=%d x=%f\\n", t, x)``.

    Integers take %d %i %u %x (a missing %ld or %lld length of 64-bit integers is added), floats take %f %e %g.
    """
    if not isinstance(format, str):
        raise TypeError(f"the format of kv.printf must be a string, got {describe(format)}")
    conversions = [m for m in _CONVERSION.finditer(format) if m.group(2)]
    if len(conversions) != len(args):
        raise TypeError(f"the format {format!r} of kv.printf takes {len(conversions)} values, got {len(args)}")
    values, text, end = [], [], 0
    for match, given in zip(conversions, args, strict=True):
        value = _printable(as_value(given, None, "what kv.printf prints"))
        letter = match.group(2)
        if value.dtype.kind not in _PRINTED.get(letter, ""):
            raise TypeError(
                f"%{letter} of kv.printf does not print {value.dtype.name}: use %d for integers, %f for floats"
            )
        length = "ll" if value.dtype.bits == 64 and letter in "diuxXo" else ""
        text += [format[end : match.start()], match.group(0)[: -1 - len(match.group(1) or "")], length, letter]
        end = match.end()
        values.append(value.ir)
    text.append(format[end:])
    emit("gpu.printf", (), values, {"format": ir.StringAttr.get("".join(text))})


def _printable(value: Any) -> Value:
    """The value as variadic arguments are passed: floats as f64, small integers as 32 bits."""
    if value.lanes:
        raise TypeError("kv.printf prints scalars: print the lanes of a vector one by one, as v[0]")
    if value.dtype.is_float:
        return value if value.dtype is f64 else cast(cast(value, f32), f64)
    if value.dtype.bits >= 32:
        return value
    return cast(value, u32 if value.dtype.kind == "u" else i32)


def device_assert(condition: Any, message: str = "") -> None:
    """Stop the kernel with a message that names the source line if the condition is false."""
    if not isinstance(message, str):
        raise TypeError(f"the message of kv.device_assert must be a string, got {describe(message)}")
    if isinstance(plain(condition), bool):
        if condition:
            return
        raise ValueError(f"kv.device_assert never holds: {message}")
    if not isinstance(condition, Numeric) or condition.dtype is not bool_ or condition.lanes:
        raise TypeError(f"kv.device_assert needs a bool condition, got {describe(condition)}")
    place = state.trace.place() if state.trace is not None else None
    text = f"{place}: {message}" if place else message
    emit("cf.assert", (), [condition.ir], {"msg": ir.StringAttr.get(text)})
