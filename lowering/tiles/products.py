# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Asynchronous products of tiles by wgmma, for distribute-kv-tiles.

``start`` emits wgmma.fence, the wgmmas and commit_group. ``wait`` takes and returns every accumulator in flight as tied
operands of its inline assembly: for LLVM the accumulators are results of the wait, and nothing reads or moves them
between the start and the wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlir import ir
from mlir.dialects import arith, vector

from kvarn.dialect.register_layout import COLUMN, ROW, RegisterLayout
from kvarn.dialect.shared_layout import CHUNK, SharedLayout
from kvarn.dsl.memory import SHARED, Pointer
from kvarn.dsl.ptx import inline_asm
from kvarn.dsl.wgmma import descriptor_at, floats_of_asm, multiply

from .ir import K_STEP_BYTES
from .threads import elements, from_elements, shuffled

ELEMENTS = {"bf16": "bf16", "f16": "f16", "f8E4M3FN": "e4m3", "f8E5M2": "e5m2"}
E4M3_MOST = 0x7E  # the bits of 448, the largest e4m3 number
CHAINS = 4  # independent chains of xor instructions
NEVER = "0x7fbadbad"  # a signalling NaN, which arithmetic does not produce


@dataclass(frozen=True)
class Product:
    """The extents, element types and layouts that a product is specialised for.

    A, B and the accumulator are those of the instruction, after operands have been swapped.

    Attributes
    ----------
    k, n : int
        Extents of the reduction and of the columns.
    element, element_b : str
        Element types of A and B; an empty ``element_b`` is A's.
    accumulator : RegisterLayout
    b, a : SharedLayout
        Layouts in shared memory; ``a`` is None if A is in registers.
    transpose_b : bool
        Whether rows of B's tile in shared memory are columns of the product (B is K-major).
    transpose_a : bool
        Whether columns of A's tile in shared memory are rows of the product.
    terms : int
        A is a sum of this many terms, side by side with ``k`` columns each.
    swapped : bool
        Whether the operands of the ``kv.dot`` were swapped.
    """

    k: int
    n: int
    element: str
    accumulator: RegisterLayout
    b: SharedLayout
    transpose_b: bool
    a: SharedLayout | None
    terms: int = 1
    element_b: str = ""
    transpose_a: bool = False
    swapped: bool = False

    @property
    def across(self) -> int:
        """The number of stacks of warps that divide the columns of the accumulator."""
        return self.accumulator.warps_along(COLUMN)

    @property
    def first_rows(self) -> range:
        """The first rows of the repetitions of the instruction along rows (16 per warp, 64 per warpgroup)."""
        return range(0, self.accumulator.shape[ROW], self.accumulator.extents[ROW])

    def operands(self, op: Any) -> tuple[ir.Value, ir.Value]:
        """A and B of a ``kv.dot``, in the order of the instruction."""
        return (op.b, op.a) if self.swapped else (op.a, op.b)

    def row_offset(self, row: int) -> int:
        """Byte offset of a row of A, a multiple of 64, in shared memory."""
        assert self.a is not None
        return self.a.chunk_offset(0, row * self.a.itemsize // CHUNK) if self.transpose_a else row * self.a.pitch

    @property
    def steps(self) -> list[int]:
        """Byte offsets of the k-steps of B."""
        every = self.b.k_steps() if self.transpose_b else self.b.row_steps()
        return every[: self.k * self.b.itemsize // K_STEP_BYTES] * self.terms

    def moves(self, row: int) -> list[int]:
        """Byte offsets of the k-steps of A, for the rows from ``row`` on (one of ``first_rows``)."""
        if self.a is None:
            return [0] * len(self.steps)
        every, first = self.a.row_steps() if self.transpose_a else self.a.k_steps(), self.row_offset(row)
        return [first + move for move in every]

    def column_offset(self, column: int) -> int:
        """Byte offset of a column of B."""
        if self.transpose_b:
            return self.b.offset(column, 0)
        return self.b.view(column, self.n - column)[0]


def added(sums: ir.Value, tile: ir.Value, first: int) -> ir.Value:
    """Add a narrower accumulator to the columns of ``sums`` from ``first`` on."""
    flat, other = list(elements(sums)), elements(tile)
    at = first // 2  # a thread has two rows, and a fourth of the columns of each
    for i, x in enumerate(other, at):
        flat[i] = arith.addf(flat[i], x)
    return from_elements(flat)


def promoted(product: Product, a: ir.Value, b: ir.Value, sums: ir.Value, columns: int) -> ir.Value:
    """Add a product to ``sums``, ``columns`` columns at a time, each in fresh accumulators."""
    for first in range(0, product.n, columns):
        place = (Pointer(b, SHARED) + product.column_offset(first)).ir
        (made,) = wait(0, [start(replace(product, n=columns), a, place, None)])
        sums = added(sums, made, first)
    return sums


def words(fragments: ir.Value) -> list[ir.Value]:
    """A vector of 16-bit elements as 32-bit words; 8-bit elements are words already."""
    type_ = ir.VectorType(fragments.type)
    count = type_.shape[0] * type_.element_type.width // 32
    return elements(vector.bitcast(ir.VectorType.get([count], ir.IntegerType.get_signless(32)), fragments))


def start(product: Product, a: ir.Value, b: ir.Value, c: ir.Value | None, joined: bool = False) -> ir.Value:
    """Start a product, and return its accumulator, in flight.

    ``a`` is a vector of words, or a pointer to this warpgroup's rows; ``b`` is a pointer. A ``joined`` product is
    committed with the next one that is started.
    """
    held, right = _operands(product, a, b)
    sums, made, columns = [] if c is None else elements(c), [], product.n // product.across
    for part, row in enumerate(product.first_rows):
        words_of_part = slice(part * 4 * len(product.steps), (part + 1) * 4 * len(product.steps))
        left = held[words_of_part] if product.a is None else held
        of_part = sums[len(made) : len(made) + columns // 2]
        made += _issued(product, left, right, of_part, row, not joined and row == product.first_rows[-1])
    return from_elements(made)


def start_parts(
    product: Product, a: ir.Value, b: ir.Value, c: ir.Value | None, parts: Sequence[range],
    arrive: Callable[[int], None],
) -> ir.Value:  # fmt: skip
    """Start a product whose B lands in parts along K: ``arrive(part)`` waits for each part but the first."""
    held, right = _operands(product, a, b)
    sums, steps = [] if c is None else elements(c), product.b.swizzle // K_STEP_BYTES  # of a panel
    for part, panels in enumerate(parts):
        if part:
            arrive(part)
        some = slice(panels.start * steps, panels.stop * steps)
        left = held[4 * some.start : 4 * some.stop] if product.a is None else held
        sums = _issued(product, left, right, sums, product.first_rows[0], part == len(parts) - 1, some)
    return from_elements(sums)


def _operands(product: Product, a: ir.Value, b: ir.Value) -> tuple[Any, ir.Value]:
    """(the words or the descriptor of A, the descriptor of B)."""
    held = words(a) if product.a is None else _descriptor(a, product.a, product.transpose_a)
    return held, _descriptor(b, product.b, not product.transpose_b)


def _issued(
    product: Product, left: Any, right: ir.Value, sums: Sequence[ir.Value], row: int, commit: bool,
    some: slice = slice(None),
) -> list[ir.Value]:  # fmt: skip
    """Issue some k-steps of a product for the rows from ``row`` on; returns the accumulator, in flight."""
    both = list(zip(product.moves(row), product.steps, strict=False))[some]
    each = len(both) // product.terms  # all terms of a k-step together: they use the same descriptor of B
    return multiply(
        product.n // product.across, ELEMENTS[product.element], left, right, sums,
        [both[i] for first in range(each) for i in range(first, len(both), each)], not product.transpose_b,
        wait=False, trans_a=product.transpose_a, dtype_b=ELEMENTS[product.element_b or product.element], commit=commit,
    )  # fmt: skip


def _descriptor(address: ir.Value, layout: SharedLayout, transposed: bool) -> ir.Value:
    return descriptor_at(Pointer(address, SHARED), layout.descriptor(transposed)).ir


def narrowed(values: ir.Value) -> ir.Value:
    """Convert an accumulator from f32 to words of e4m3, as operand A takes them; rounded to nearest, saturated at 448.

    Operand A needs four neighbouring columns per word. A thread of an accumulator has two columns, and the two that are
    eight further. The rows of B are loaded in the corresponding order (``tiles.transposition``), so that no element
    moves between threads. Both conversions of a word are in one string of assembly: ptxas then writes the second half
    in place.
    """
    flat = elements(values)
    pair = "cvt.rn.satfinite.e4m3x2.f32"  # whose first operand is the high half
    text = f"{{ .reg .b16 l, h; {pair} l, $2, $1; {pair} h, $4, $3; mov.b32 $0, {{l, h}}; }}"
    of_word = [[first, first + 1, first + 4, first + 5] for at in range(0, len(flat), 8) for first in (at, at + 2)]
    return from_elements([inline_asm(text, "=r,f,f,f,f", [flat[i] for i in of], "i32") for of in of_word])


def converted(values: ir.Value, narrow: ir.Type) -> ir.Value:
    """Convert an accumulator from f32 to the element type of operand A, in registers."""
    if isinstance(narrow, ir.Float8E4M3FNType):
        return narrowed(values)
    return arith.truncf(converted_type(values, narrow), values)


def converted_type(values: ir.Value, narrow: ir.Type) -> ir.Type:
    """The type of the result of :func:`converted`."""
    lanes = ir.VectorType(values.type).shape[0]
    if isinstance(narrow, ir.Float8E4M3FNType):
        return ir.VectorType.get([lanes // 4], ir.IntegerType.get_signless(32))
    return ir.VectorType.get([lanes], narrow)


def saturated(held: ir.Value) -> ir.Value:
    """Whether each of a thread's two rows has an element of 448 or NaN; ``held``: :func:`narrowed`, not negative."""
    found, word = [], ir.IntegerType.get_signless(32)
    two, sign = (arith.constant(word, int.from_bytes(bytes([x] * 4))) for x in (0x80 - E4M3_MOST, 0x80))
    for row in range(2):  # words of the two rows alternate
        carried = [arith.addi(x, two) for x in words(held)[row::2]]
        bits = arith.andi(functools.reduce(arith.ori, carried), sign)
        found.append(arith.cmpi(arith.CmpIPredicate.ne, bits, arith.constant(word, 0)))
    return from_elements(found)


def unpacked(held: ir.Value) -> ir.Value:
    """The e4m3 elements of :func:`narrowed` words, in the order of the accumulator."""
    pairs = 2 * ir.VectorType(held.type).shape[0]
    order = [p for at in range(0, pairs, 4) for p in (at, at + 2, at + 1, at + 3)]
    halves = vector.bitcast(ir.VectorType.get([pairs], ir.IntegerType.get_signless(16)), held)
    return vector.bitcast(ir.VectorType.get([2 * pairs], ir.Float8E4M3FNType.get()), shuffled(halves, order))


def wait(pending: int, products: Sequence[ir.Value]) -> list[ir.Value]:
    """Wait until at most ``pending`` groups are in flight; returns the accumulators of ``products``."""
    flat = [x for product in products for x in elements(product)]
    parts = iter(_tied(f"wgmma.wait_group.sync.aligned {pending};", flat, ["~{memory}"]))
    return [from_elements([next(parts) for _ in range(ir.VectorType(x.type).shape[0])]) for x in products]


def pinned(value: ir.Value, strict: bool) -> ir.Value:
    """Force a vector to be computed before the inline assembly that follows, such as a wait.

    Otherwise LLVM sinks arithmetic below waits. ptxas still does, and waits for a product before the softmax that it
    should overlap with, unless the order is ``strict``: then an instruction with side effects depends on the values,
    and ptxas moves no wait across it. The instruction is predicated off at run time.
    """
    if not isinstance(ir.VectorType(value.type).element_type, ir.F32Type):
        text = "mov.b32 $0, $1;" if strict else ""
        return of_words(pinned_words(value, text), value.type)
    flat = elements(value)
    return from_elements(_tied(_after(len(flat)) if strict else "", flat))


def pinned_words(value: ir.Value, text: str = "") -> list[ir.Value]:
    """The 32-bit words of a vector, pinned in order; with ``text``, an instruction that copies each word."""
    return [inline_asm(text, f"=r,{'r' if text else 0}", [word], "i32", effects=True) for word in words(value)]


def of_words(held: Sequence[ir.Value], type_: ir.Type) -> ir.Value:
    """Bitcast words to a vector of a type, as one op, which LLVM may sink below branches."""
    return vector.bitcast(type_, from_elements(held))


def _after(count: int) -> str:
    """Assembly that depends on registers $0 to $count: a pmevent if they hold a NaN that never occurs."""
    chains = min(count, CHAINS)
    begun = " ".join(f"mov.b32 t{i}, ${i};" for i in range(chains))
    joined = " ".join(f"xor.b32 t{i % chains}, t{i % chains}, ${i};" for i in range(chains, count))
    ended = " ".join(f"xor.b32 t0, t0, t{i};" for i in range(1, chains))
    declared = f".reg .pred p; .reg .b32 t<{chains}>;"
    return f"{{ {declared} {begun} {joined} {ended} setp.eq.b32 p, t0, {NEVER}; @p pmevent 7; }}"


def _tied(text: str, values: Sequence[ir.Value], clobbers: Sequence[str] = ()) -> list[ir.Value]:
    """Inline PTX with f32 values as tied operands: each stays in its register."""
    constraints = ["=f"] * len(values) + [str(i) for i in range(len(values))] + list(clobbers)
    return floats_of_asm(text, constraints, values, len(values))
