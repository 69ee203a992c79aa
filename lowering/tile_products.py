# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of tiles by wgmma, asynchronous: for distribute-kv-tiles.

``start`` is fence, products, commit; ``wait`` owns every accumulator that is or was in flight, tied in and out, so that
nothing reads or moves one before: LLVM sees values that the wait makes. Between the two no instruction names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, llvm, vector

from kvarn.dialect.shared_layout import SharedLayout
from kvarn.dsl.machine import _asm

from .index import const
from .tile_threads import elements, from_elements

WARPGROUP_ROWS = 64


@dataclass(frozen=True)
class Product:
    """What a product is specialised for: its extents, element type, and the layouts of what lies in shared memory.

    ``a`` is None where A is in registers.
    """

    k: int
    n: int
    element: str
    b: SharedLayout
    transpose_b: bool
    a: SharedLayout | None

    @property
    def steps(self) -> list[int]:
        """Byte of B's part of every k-step."""
        return self.b.k_steps() if self.transpose_b else self.b.row_steps()


def descriptor(address: ir.Value, layout: SharedLayout, transposed: bool) -> ir.Value:
    """The descriptor of a tile at an address of shared memory (a pointer), i64."""
    i64 = ir.IntegerType.get_signless(64)
    low = llvm.ptrtoint(ir.IntegerType.get_signless(32), address)
    units = arith.shrui(arith.andi(low, const(0x3FFFF)), const(4))
    bits = layout.descriptor(transposed).bits
    signed = bits - (1 << 64) if bits >> 63 else bits
    return arith.ori(arith.extui(i64, units), arith.constant(i64, signed))


def words(fragments: ir.Value) -> list[ir.Value]:
    """A vector of 16-bit elements as 32-bit words."""
    count = ir.VectorType(fragments.type).shape[0] // 2
    return elements(vector.bitcast(ir.VectorType.get([count], ir.IntegerType.get_signless(32)), fragments))


def start(product: Product, a: ir.Value, b: ir.Value, c: ir.Value | None) -> ir.Value:
    """Start a product: ``a`` words in a vector, or a pointer to the rows here; ``b`` a pointer; the accumulator."""
    count = product.n // 2
    sums = [] if c is None else elements(c)
    shared_a = product.a is not None
    left = [descriptor(a, product.a, False)] if product.a is not None else words(a)
    right = descriptor(b, product.b, not product.transpose_b)
    first = count + len(sums)  # the number of A's first operand in the text
    registers = ", ".join(f"${i}" for i in range(count))
    kind = f"m64n{product.n}k16.f32.{product.element}.{product.element}"
    text = ["wgmma.fence.sync.aligned;"]
    steps = product.steps[: product.k // 16]
    for k, at_b in enumerate(steps):
        text.append(f"add.s64 b, ${first + len(left)}, {at_b >> 4};")
        if product.a is not None:
            text.append(f"add.s64 a, ${first}, {product.a.k_steps()[k] >> 4};")
            what, transposed = "a", f"0, {int(not product.transpose_b)}"
        else:
            what = f"{{{', '.join(f'${first + 4 * k + j}' for j in range(4))}}}"
            transposed = f"{int(not product.transpose_b)}"
        adds = "yes" if k or sums else "no"
        text.append(f"wgmma.mma_async.sync.aligned.{kind} {{{registers}}}, {what}, b, {adds}, 1, 1, {transposed};")
    text.append("wgmma.commit_group.sync.aligned;")
    declared = "{ .reg .b64 a, b; .reg .pred yes, no; setp.eq.u32 yes, 0, 0; setp.ne.u32 no, 0, 0; "
    kinds_a = ["l"] if shared_a else ["r"] * len(left)
    constraints = ["=&f"] * count + [str(i) for i in range(len(sums))] + [*kinds_a, "l", "~{memory}"]
    made = _asm(
        declared + " ".join(text) + " }", ",".join(constraints), [*sums, *left, right], _floats(count), effects=True
    )
    return from_elements(_fields(made, count))


def wait(pending: int, products: Sequence[ir.Value]) -> list[ir.Value]:
    """Wait until at most ``pending`` groups are in flight; the accumulators."""
    flat = [x for product in products for x in elements(product)]
    constraints = ["=f"] * len(flat) + [str(i) for i in range(len(flat))] + ["~{memory}"]
    made = _asm(
        f"wgmma.wait_group.sync.aligned {pending};", ",".join(constraints), flat, _floats(len(flat)), effects=True
    )
    parts, found = iter(_fields(made, len(flat))), []
    for product in products:
        found.append(from_elements([next(parts) for _ in range(ir.VectorType(product.type).shape[0])]))
    return found


def pinned(value: ir.Value) -> ir.Value:
    """A vector of f32 that is computed before the assembly that follows: LLVM moves arithmetic over waits otherwise."""
    flat = elements(value)
    constraints = ["=f"] * len(flat) + [str(i) for i in range(len(flat))]
    if len(flat) == 1:
        return from_elements([_asm("", ",".join(constraints), flat, "f32", effects=True)])
    return from_elements(_fields(_asm("", ",".join(constraints), flat, _floats(len(flat)), effects=True), len(flat)))


def _floats(count: int) -> str:
    return f"!llvm.struct<({', '.join(['f32'] * count)})>"


def _fields(structure: ir.Value, count: int) -> list[ir.Value]:
    f32 = ir.F32Type.get()
    return [llvm.extractvalue(f32, structure, [i]) for i in range(count)]
