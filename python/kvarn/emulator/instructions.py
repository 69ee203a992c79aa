# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The semantics of PTX instructions for the threads of a block; see ``kvarn.emulator.grid``.

A function takes a block and an instruction and returns what executes it for the active threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from .barriers import store_async
from .block import TYPES, WARP, Block, Lanes, op
from .ptx_parser import EmulationError, Instruction, parts as _parts


def _type(i: Instruction) -> type:
    return TYPES[i.name[-1]]


def _shift(x: np.ndarray, n: np.ndarray, left: bool) -> np.ndarray:
    bits = x.dtype.itemsize * 8
    big = n >= bits
    n = np.where(big, bits - 1 if not left and x.dtype.kind == "i" else 0, n).astype(x.dtype)
    shifted = x << n if left else x >> n
    return shifted if not left and x.dtype.kind == "i" else np.where(big, 0, shifted).astype(x.dtype)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "i":  # towards zero
        floored = a // b
        return floored + ((floored * b != a) & ((a < 0) != (b < 0)) & (b != 0))
    return a // b if a.dtype.kind == "u" else a / b


# Packed types: the type of a half, and the type of the computation, so that results are rounded once.
_HALVES: dict[str, tuple[Any, Any]] = {
    "f16x2": (np.float16, np.float32),
    "bf16x2": (ml_dtypes.bfloat16, np.float32),
    "f32x2": (np.float32, np.float64),
    "s16x2": (np.int16, np.int16),
    "u16x2": (np.uint16, np.uint16),
}
# Conversions of pairs: the type of a half, and the source types.
_CONVERTED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "f16x2": (np.float16, ("f32", "e4m3x2", "e5m2x2")),
    "bf16x2": (ml_dtypes.bfloat16, ("f32",)),
    "e4m3x2": (ml_dtypes.float8_e4m3fn, ("f32", "f16x2")),
    "e5m2x2": (ml_dtypes.float8_e5m2, ("f32", "f16x2")),
}


def _unsigned(size: int) -> type:
    return np.dtype(f"u{size}").type


def _halves(t: Block, operand: str, m: Lanes, half: Any) -> np.ndarray:
    """The halves of words, the lower half of each first."""
    return np.ascontiguousarray(t.value(operand, m, _unsigned(2 * np.dtype(half).itemsize))).view(half)


def _put_halves(t: Block, operand: str, m: Lanes, halves: np.ndarray) -> None:
    t.put(operand, m, np.ascontiguousarray(halves).view(_unsigned(2 * halves.itemsize)))


def _packed(t: Block, i: Instruction, f: Callable[..., Any]) -> Any:
    """An operation on both halves of a word."""
    half, wide = _HALVES[i.name[-1]]
    word = _unsigned(2 * np.dtype(half).itemsize)
    put, given = t.putter(i.operands[0], word), [t.reader(o, word) for o in i.operands[1:]]

    def run(m: Lanes) -> None:
        halves = [np.ascontiguousarray(read(m)).view(half).astype(wide) for read in given]
        put(m, f(*halves).astype(half).view(word))

    return run


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "max": lambda a, b: np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b),
    "min": lambda a, b: np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b),
    "div": lambda a, b: _divide(a, b),
    "rem": lambda a, b: np.fmod(a, b),
    "shl": lambda a, b: _shift(a, b, True), "shr": lambda a, b: _shift(a, b, False),
}  # fmt: skip


@op(*_BINARY)
def binary(t: Block, i: Instruction) -> Any:
    if i.name[-1] in _HALVES:
        return _packed(t, i, _BINARY[i.name[0]])
    f, dtype = _BINARY[i.name[0]], _type(i)
    shifts = i.name[0] in ("shl", "shr")
    d, a, b = i.operands
    x, y, put = t.reader(a, dtype), t.reader(b, np.uint32 if shifts else dtype), t.putter(d, dtype)
    if "relu" in i.name:
        return lambda m: put(m, np.maximum(f(x(m), y(m)), 0).astype(dtype, copy=False))
    if shifts and b.isdecimal() and int(b) < 8 * np.dtype(dtype).itemsize:
        shift, by = np.left_shift if i.name[0] == "shl" else np.right_shift, dtype(int(b))
        return lambda m: put(m, shift(x(m), by))
    return lambda m: put(m, f(x(m), y(m)).astype(dtype, copy=False))


@op("mul", "mad", "fma")
def multiply(t: Block, i: Instruction) -> Any:
    if i.name[-1] in _HALVES:
        return _packed(t, i, lambda x, y, z=0.0: x * y + z)
    dtype, wide = _type(i), "wide" in i.name
    d, a, b, *c = i.operands
    result: Any = np.dtype(f"{np.dtype(dtype).kind}{2 * np.dtype(dtype).itemsize}").type if wide else dtype
    if "hi" in i.name:
        bits = 8 * np.dtype(dtype).itemsize

        def high(m: Lanes) -> None:
            products = [
                int(x) * int(y) >> bits for x, y in zip(t.value(a, m, dtype), t.value(b, m, dtype), strict=True)
            ]
            t.put(d, m, np.array(products, object).astype(dtype))

        return high

    put, fused, down = t.putter(d, result), i.name[0] == "fma", "rm" in i.name
    x, y, z = t.reader(a, dtype), t.reader(b, dtype), t.reader(c[0], result) if c else None

    def run(m: Lanes) -> None:
        if fused:  # rounded once
            assert z is not None
            found = x(m).astype(np.float64) * y(m) + z(m)
            if "sat" in i.name:
                found = np.clip(np.nan_to_num(found, nan=0.0), 0.0, 1.0)
            if down:
                near = found.astype(dtype)
                found = np.where(near > found, np.nextafter(near, dtype(-np.inf)), near)
        else:
            found = x(m).astype(result, copy=False) * y(m).astype(result, copy=False)
            found = found if z is None else found + z(m)
        put(m, found.astype(result, copy=False))

    return run


_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": np.negative, "abs": np.abs, "rcp": lambda x: 1 / x, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
    "ex2": np.exp2, "lg2": np.log2, "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
    "not": np.invert,
    "popc": lambda x: np.array([bin(v).count("1") for v in x], np.uint32),
    "clz": lambda x: np.array([8 * x.itemsize - int(v).bit_length() for v in x], np.uint32),
}  # fmt: skip


@op("neg", "abs", "not", "rcp", "sqrt", "rsqrt", "ex2", "lg2", "tanh", "sin", "cos", "popc", "clz", "brev")
def unary(t: Block, i: Instruction) -> Any:
    if i.name[-1] in _HALVES:
        return _packed(t, i, {"neg": np.negative, "abs": np.abs}[i.name[0]])
    dtype, (d, a) = _type(i), i.operands
    f, result = _UNARY[i.name[0]], np.uint32 if i.name[0] in ("popc", "clz") else dtype
    read, put = t.reader(a, dtype), t.putter(d, result)
    # NumPy rounds functions of elements that lie side by side as it does not round those of others.
    return lambda m: put(m, f(np.ascontiguousarray(read(m))).astype(result, copy=False))


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "neu": np.not_equal, "equ": lambda a, b: (a == b) | np.isnan(a) | np.isnan(b),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b), "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}  # fmt: skip


@op("setp")
def compare(t: Block, i: Instruction) -> Any:
    dtype, f, (d, a, b, *more) = _type(i), _COMPARISONS[i.name[1]], i.operands
    if more:
        raise EmulationError(f"unknown form: {i.text}")
    first, second, put = t.reader(a, dtype), t.reader(b, dtype), t.putter(d, np.bool_)
    if i.name[1] != "ne" or np.dtype(dtype).kind != "f":
        return lambda m: put(m, f(first(m), second(m)))

    def ordered(m: Lanes) -> None:
        x, y = first(m), second(m)
        put(m, f(x, y) & ~(np.isnan(x) | np.isnan(y)))

    return ordered


@op("selp")
def select(t: Block, i: Instruction) -> Any:
    dtype, (d, a, b, p) = _type(i), i.operands
    x, y, chooses, put = t.reader(a, dtype), t.reader(b, dtype), t.reader(p, np.uint64), t.putter(d, dtype)
    return lambda m: put(m, np.where(chooses(m) != 0, x(m), y(m)))


@op("mov", "cvta")
def move(t: Block, i: Instruction) -> Any:
    d, a = i.operands
    if d.startswith("{") or a.startswith("{"):
        return _repack(t, d, a, np.dtype(_type(i)).itemsize)
    if d in t.tracked and a in t.tracked:
        return lambda m: _move_tracked(t, d, a, m, _type(i))
    if a == "%clock64":
        return lambda m: t.put(d, m, t.clock(m))
    read, put = t.reader(a, _type(i)), t.putter(d, _type(i))
    return lambda m: put(m, read(m))


def _move_tracked(t: Block, d: str, a: str, m: Lanes, dtype: type) -> None:
    """A move between registers of asynchronous products renames the register, as assemblers do."""
    if t.products is None:
        t.put(d, m, t.value(a, m, dtype))
    else:
        t.products.rename(d, a, m)


def _repack(t: Block, d: str, a: str, size: int) -> Any:
    """A vector of registers from one register of twice the width, or back."""
    to, source = _parts(d), _parts(a)
    wide, narrow = _unsigned(size), _unsigned(size // max(len(to), len(source)))
    if len(source) > 1:
        reads, put = [t.reader(r, narrow) for r in source], t.putter(to[0], wide)
        return lambda m: put(m, _side_by_side([read(m) for read in reads]).view(wide)[:, 0])
    read, puts = t.reader(source[0], wide), [t.putter(r, narrow) for r in to]

    def run(m: Lanes) -> None:
        columns = np.ascontiguousarray(read(m)).view(narrow).reshape(-1, len(to))
        for n, put in enumerate(puts):
            put(m, columns[:, n])

    return run


def _side_by_side(columns: list[np.ndarray]) -> np.ndarray:
    """Arrays [n] of one type as the columns of one."""
    if len(columns) == 1:
        return np.ascontiguousarray(columns[0])[:, None]
    found = np.empty((len(columns[0]), len(columns)), columns[0].dtype)
    for n, column in enumerate(columns):
        found[:, n] = column
    return found


@op("cvt")
def convert(t: Block, i: Instruction) -> Any:
    to, source = i.name[-2:]
    if to in _CONVERTED:
        return _convert_pair(t, i)
    (d, a), from_type, to_type = i.operands, TYPES[source], TYPES[to]
    integral = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    rounding = next((integral[p] for p in i.name if p in integral), None)
    read, saturates = t.reader(a, from_type), "sat" in i.name and np.dtype(from_type).kind == "f"
    # A narrow result lies in a wider register, its sign extended.
    put = t.putter(d, np.int32 if to_type is np.int8 else to_type)
    if rounding is None and not saturates:
        kept = np.int32 if to_type is np.int8 else to_type
        return lambda m: put(m, read(m).astype(to_type).astype(kept, copy=False))

    def run(m: Lanes) -> None:
        x = read(m)
        if saturates:
            x = np.where(np.isnan(x), 0, np.clip(x, 0, 1)).astype(x.dtype)
        if rounding is not None:
            x = rounding(x)
            if np.dtype(to_type).kind in "iu":
                info = np.iinfo(to_type)
                x = np.clip(np.nan_to_num(x.astype(np.float64), posinf=info.max, neginf=info.min), info.min, info.max)
        y = x.astype(to_type)
        put(m, y.astype(np.int32) if to_type is np.int8 else y)

    return run


def _convert_pair(t: Block, i: Instruction) -> Any:
    """Convert a pair of floats to a word: from two f32 operands, the upper first, or from another pair in a word."""
    to, source = i.name[-2:]
    d, *given = i.operands
    half, known = _CONVERTED[to]
    if source not in known:
        raise KeyError(source)
    limit = float(ml_dtypes.finfo(half).max) if to[0] == "e" else None
    floats = [t.reader(g, np.float32) for g in reversed(given)] if source == "f32" else []

    def run(m: Lanes) -> None:
        if floats:
            pairs = _side_by_side([read(m) for read in floats]).ravel()
        else:
            pairs = _halves(t, given[0], m, _CONVERTED[source][0]).astype(np.float32)
        _put_halves(t, d, m, (pairs if limit is None else np.clip(pairs, -limit, limit)).astype(half))

    return run


@op("bfe")
def extract(t: Block, i: Instruction) -> Any:
    dtype, (d, a, b, c) = _type(i), i.operands
    bits = 8 * np.dtype(dtype).itemsize

    def run(m: Lanes) -> None:
        at, n = (t.value(r, m, np.uint32) & 255 for r in (b, c))
        left = (bits - np.minimum(n, bits)).astype(np.uint32)
        field_ = _shift(_shift(_shift(t.value(a, m, dtype), at, False), left, True), left, False)
        t.put(d, m, np.where(n > 0, field_, 0).astype(dtype))

    return run


@op("shf")
def funnel(t: Block, i: Instruction) -> Any:
    d, low, high, count = i.operands
    left, wraps = i.name[1] == "l", "wrap" in i.name

    def run(m: Lanes) -> None:
        x, y, n = (t.value(r, m, np.uint32).astype(np.uint64) for r in (low, high, count))
        n = n & np.uint64(31) if wraps else np.minimum(n, np.uint64(32))
        both = x | y << np.uint64(32)
        t.put(d, m, (both << n >> np.uint64(32) if left else both >> n).astype(np.uint32))

    return run


@op("bfi")
def insert(t: Block, i: Instruction) -> Any:
    d, a, b, c, e = i.operands

    def run(m: Lanes) -> None:
        x, y, at, n = (t.value(r, m, np.uint32).astype(np.int64) for r in (a, b, c, e))
        at, n = at & 0xFF, n & 0xFF
        mask = np.where((n > 0) & (at < 32), ((1 << np.minimum(n, 32)) - 1) << np.minimum(at, 32), 0) & 0xFFFFFFFF
        t.put(d, m, (y & ~mask | (x << np.minimum(at, 32)) & mask).astype(np.uint32))

    return run


@op("prmt")
def permute(t: Block, i: Instruction) -> Any:
    d, a, b, s = i.operands
    chosen = -1 if s.startswith("%") else int(t.literal(s, np.uint32))
    if chosen >= 0 and not chosen & 0x8888:  # bytes that are always the same, without signs
        first, second, put = t.reader(a, np.uint32), t.reader(b, np.uint32), t.putter(d, np.uint32)
        picked = np.array([chosen >> 4 * n & 7 for n in range(4)])

        def pick(m: Lanes) -> None:
            both = _side_by_side([first(m), second(m)]).view(np.uint8)
            put(m, both.take(picked, 1).view(np.uint32)[:, 0])

        return pick

    def run(m: Lanes) -> None:
        x, y, select_ = (t.value(r, m, np.uint32).astype(np.uint64) for r in (a, b, s))
        both, out = x | y << np.uint64(32), np.zeros_like(x)
        for n in range(4):
            nibble = select_ >> np.uint64(4 * n)
            byte = both >> ((nibble & np.uint64(7)) * np.uint64(8)) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            out |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * n)
        t.put(d, m, out.astype(np.uint32))

    return run


# --- memory instructions


@op("ld")
def load(t: Block, i: Instruction) -> Any:
    dtype, (d, a) = _type(i), i.operands
    size, to = np.dtype(dtype).itemsize, _parts(i.operands[0])
    if i.name[1] == "param":
        inner = a.strip("[]").partition("+")[0].strip()
        if inner not in t.params:  # the result of a call
            return lambda m: t.put(d, m, t.value(inner, m, _unsigned(size)))
        return lambda m: t.put(d, m, np.full(t.count, t.params[inner] & ((1 << 8 * size) - 1), f"u{size}")[m])
    # In a register that is wider, the sign goes on.
    space, kind, signed = i.space, _unsigned(size), dtype in (np.int8, np.int16, np.int32)
    puts = [t.putter(r, np.int64 if signed else kind) for r in to]

    def run(m: Lanes) -> None:
        data = np.ascontiguousarray(t.read(space, t.address(a, m), size * len(to), i, t.lanes[m]))
        columns = data.view(dtype).astype(np.int64) if signed else data.view(kind)
        for n, put in enumerate(puts):
            put(m, columns[:, n])

    return run


@op("st")
def store(t: Block, i: Instruction) -> Any:
    if i.name[1] == "async":
        return store_async(t, i)
    (a, d), kind, space = i.operands, _unsigned(np.dtype(_type(i)).itemsize), i.space
    if i.name[1] == "param":  # an argument of a call
        return lambda m: t.put(a.strip("[] "), m, t.value(d, m, kind))

    reads = [t.reader(r, kind) for r in _parts(d)]

    def run(m: Lanes) -> None:
        data = _side_by_side([read(m) for read in reads]).view(np.uint8)
        t.write(space, t.address(a, m), data, i, t.lanes[m])

    return run


@op("ldmatrix")
def load_matrix(t: Block, i: Instruction) -> Any:
    to, trans = _parts(i.operands[0]), "trans" in i.name

    def run(m: Lanes) -> None:
        lanes = t.warps(m, i.text)
        count = len(to)  # of matrices; the addresses of further lanes are not used
        giving = lanes[:, : 8 * count].ravel()
        rows = t.read("shared", t.address(i.operands[1], giving), 16, i, giving).reshape(len(lanes), count, 8, 16)
        matrices = np.ascontiguousarray(rows).view(np.uint16)  # [w, matrix, row, column]
        if trans:
            matrices = np.ascontiguousarray(matrices.swapaxes(2, 3))
        words = matrices.view(np.uint32).reshape(len(lanes), count, WARP)
        for n, r in enumerate(to):
            t.put(r, m, words[:, n].ravel())

    return run


@op("stmatrix")
def store_matrix(t: Block, i: Instruction) -> Any:
    words, trans = _parts(i.operands[1]), "trans" in i.name
    if i.name[3] != "m8n8" or f"x{len(words)}" not in i.name or i.name[-1] != "b16":
        raise EmulationError(f"{i.text}: only matrices of 8 rows of 8 16-bit elements are supported")

    def run(m: Lanes) -> None:
        lanes = t.warps(m, i.text)
        n = len(lanes)
        address = t.address(i.operands[0], m).reshape(n, WARP)
        for k, word in enumerate(words):
            tile = np.ascontiguousarray(t.value(word, m, np.uint32)).view(np.uint16).reshape(n, 8, 8)
            rows = np.ascontiguousarray(tile.swapaxes(1, 2) if trans else tile).view(np.uint8).reshape(-1, 16)
            # Lane 4 r + c has two elements of row r. The choice of the writer matters for fences only, and eight
            # adjacent lanes
            # access the banks together, like the rows of a matrix.
            t.write("shared", address[:, 8 * k : 8 * k + 8].ravel(), rows, i, lanes[:, :8].ravel())

    return run


@op("mma")
def matrix_multiply(t: Block, i: Instruction) -> Any:
    """m16n8k16 of 16-bit elements, m16n8k32 of s8, or m16n8k8 of tf32: words whose low 13 bits are ignored."""
    tf32, of_sums = "tf32" in i.name, np.int32 if "s8" in i.name else np.float32
    element: Any = np.float32 if tf32 else ml_dtypes.bfloat16 if "bf16" in i.name else np.float16
    element = np.int8 if "s8" in i.name else element
    ignored, per_word = np.uint32(0x1FFF if tf32 else 0), 4 // np.dtype(element).itemsize
    d, a, b, c = (_parts(o) for o in i.operands)
    group, place = np.arange(WARP) // 4, np.arange(WARP) % 4
    each = per_word * place[:, None] + np.arange(per_word)  # indices of a word's elements
    k = 8 * per_word
    # Where the elements of A, B and C lie in the registers [register, lane, element of a word] of a warp.
    of_a, of_b, of_c = np.empty((16, k), np.int64), np.empty((k, 8), np.int64), np.empty((16, 8), np.int64)
    words = np.arange(4 * WARP * per_word).reshape(4, WARP, per_word)
    for which in range(4):
        of_a[(group + 8 * (which % 2))[:, None], each + k // 2 * (which // 2)] = words[which]
        of_c[group + 8 * (which // 2), 2 * place + which % 2] = np.arange(WARP) + WARP * which
    for which in range(2):
        of_b[each + k // 2 * which, group[:, None]] = words[which]
    rows = [group + 8 * (which // 2) for which in range(4)]
    in_result = [row * 8 + 2 * place + which % 2 for which, row in enumerate(rows)]

    def run(m: Lanes) -> None:
        n = len(t.warps(m, i.text))

        def elements(registers: list[str], places: np.ndarray) -> np.ndarray:
            found = np.empty((n, len(registers), WARP), np.uint32)
            for which, r in enumerate(registers):
                found[:, which] = (t.value(r, m, np.uint32) & ~ignored).reshape(n, WARP)
            return found.view(element).astype(of_sums).reshape(n, -1).take(places, 1)

        z = np.empty((n, 4, WARP), of_sums)
        for which, r in enumerate(c):
            z[:, which] = t.value(r, m, of_sums).reshape(n, WARP)
        z = (elements(a, of_a) @ elements(b, of_b) + z.reshape(n, -1).take(of_c, 1)).reshape(n, -1)
        for which, r in enumerate(d):
            t.put(r, m, z.take(in_result[which], 1).ravel())

    return run


@op("movmatrix")
def move_matrix(t: Block, i: Instruction) -> Any:
    d, a = i.operands

    def run(m: Lanes) -> None:
        lanes = t.warps(m, i.text)
        halves = np.ascontiguousarray(t.value(a, m, np.uint32)).view(np.uint16).reshape(len(lanes), 8, 8)
        t.put(d, m, np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint32).ravel())

    return run


@op("shfl")
def shuffle(t: Block, i: Instruction) -> Any:
    mode = i.name[2]
    d, a, b, c = i.operands[:4]
    d, _, p = d.partition("|")
    constant = not b.startswith("%") and not c.startswith("%")  # every warp then takes the same lanes
    reads, put = t.reader(a, np.uint32), t.putter(d, np.uint32)
    distance, bounds = t.reader(b, np.uint32), t.reader(c, np.uint32)
    lane = np.arange(WARP)
    always: list[tuple[np.ndarray, np.ndarray]] = []  # where all comes from, and whether from a lane of the segment

    def run(m: Lanes) -> None:
        lanes = t.warps(m, i.text)
        x = reads(m).reshape(-1, WARP)
        source, valid = always[0] if always else sources(lanes[0] if constant else m)
        if constant and not always:
            always.append((source, valid))
        put(m, (x.take(source[0], 1) if constant else np.take_along_axis(x, source, 1)).ravel())
        if p:
            t.put(p, m, np.broadcast_to(valid, x.shape).ravel())

    def sources(of: Lanes) -> tuple[np.ndarray, np.ndarray]:
        by, bound = (read(of).astype(np.int64).reshape(-1, WARP) for read in (distance, bounds))
        segment, limit = bound >> 8 & 31, bound & 31
        last = (lane & segment) | (limit & ~segment)
        by = by & 31
        if mode == "up":
            source = lane - by
            valid = source >= last
        else:
            source = {"bfly": lane ^ by, "down": lane + by, "idx": (lane & segment) | (by & ~segment)}[mode]
            valid = source <= last
        return np.where(valid, source, lane), valid

    return run


@op("vote")
def vote(t: Block, i: Instruction) -> Any:
    d, p = i.operands[:2]

    def run(m: Lanes) -> None:
        t.warps(m, i.text)
        holds = t.value(p, m, np.uint64).reshape(-1, WARP) != 0
        words = (holds.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1).astype(np.uint32)
        t.put(d, m, np.repeat(words, WARP))

    return run


@op("atom")
def atomic(t: Block, i: Instruction) -> Any:
    dtype, (d, a, b, *_) = _type(i), i.operands
    functions = {
        "add": np.add,
        "max": np.maximum,
        "min": np.minimum,
        "exch": lambda x, y: y,
        "inc": lambda x, y: np.where(x >= y, 0, x + 1),
    }
    f = next(functions[n] for n in i.name if n in functions)
    space = i.space
    size = np.dtype(dtype).itemsize

    def run(m: Lanes) -> None:
        values, where, lanes = t.value(b, m, dtype), t.address(a, m), t.lanes[m]
        old = np.empty(len(values), dtype)
        for n in range(len(values)):  # one thread after another
            old[n : n + 1] = t.read(space, where[n : n + 1], size, i, lanes[n : n + 1]).view(dtype)[:, 0]
            new = np.asarray(f(old[n : n + 1], values[n : n + 1]), dtype)
            t.write(space, where[n : n + 1], new.view(np.uint8).reshape(1, size), i, lanes[n : n + 1])
        t.put(d, m, old)

    return run


@op("elect")
def elect(t: Block, i: Instruction) -> Any:
    """Elect the first lane of the mask; all lanes receive its number."""
    (d, _, p), mask = i.operands[0].partition("|"), i.operands[1]

    def run(m: Lanes) -> None:
        t.warps(m, i.text)
        masks = t.value(mask, m, np.uint32).astype(np.int64).reshape(-1, WARP)[:, 0]
        leader = np.array([(int(x) & -int(x)).bit_length() - 1 for x in masks], np.uint32)
        t.put(d, m, np.repeat(leader, WARP))
        t.put(p, m, (np.arange(WARP) == leader[:, None]).ravel())

    return run


@op("griddepcontrol")
def dependent_launch(t: Block, i: Instruction) -> Any:
    waits = i.name[1] == "wait"

    def run(m: Lanes) -> None:
        kernel = t.cluster.ahead  # None if no earlier kernel may still run
        if kernel is not None:
            (kernel.wait if waits else kernel.let_start)(t, m)

    return run


@op("membar", "prefetch", "nanosleep", "pmevent", "createpolicy")
def nothing(t: Block, i: Instruction) -> Any:
    return lambda m: None
