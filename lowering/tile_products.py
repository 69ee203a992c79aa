# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of tiles by wgmma, asynchronous: for distribute-kv-tiles.

``start`` is fence, products, commit; ``wait`` owns every accumulator that is or was in flight, tied in and out, so that
nothing reads or moves one before: LLVM sees values that the wait makes. Between the two no instruction names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlir import ir
from mlir.dialects import vector

from kvarn.dialect.shared_layout import SharedLayout
from kvarn.dsl.memory import SHARED, Pointer
from kvarn.dsl.wgmma import descriptor_at, floats_of_asm, multiply

from .tile_threads import elements, from_elements

_KINDS = {"f8E4M3FN": "e4m3"}  # what instructions call elements, where MLIR has another name
NEVER = "0x7fbadbad"  # a signalling NaN, which arithmetic does not make


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


def words(fragments: ir.Value) -> list[ir.Value]:
    """A vector of 16-bit elements as 32-bit words."""
    count = ir.VectorType(fragments.type).shape[0] // 2
    return elements(vector.bitcast(ir.VectorType.get([count], ir.IntegerType.get_signless(32)), fragments))


def start(product: Product, a: ir.Value, b: ir.Value, c: ir.Value | None) -> ir.Value:
    """Start a product: ``a`` words in a vector, or a pointer to the rows here; ``b`` a pointer; the accumulator."""
    left = words(a) if product.a is None else _descriptor(a, product.a, False)
    right = _descriptor(b, product.b, not product.transpose_b)
    steps = product.steps[: product.k // (32 if product.b.itemsize == 1 else 16)]
    moves = [0] * len(steps) if product.a is None else product.a.k_steps()
    made = multiply(
        product.n, _KINDS.get(product.element, product.element), left, right, [] if c is None else elements(c),
        list(zip(moves, steps, strict=False)), not product.transpose_b, wait=False,
    )  # fmt: skip
    return from_elements(made)


def _descriptor(address: ir.Value, layout: SharedLayout, transposed: bool) -> ir.Value:
    return descriptor_at(Pointer(address, SHARED), layout.descriptor(transposed)).ir


def wait(pending: int, products: Sequence[ir.Value]) -> list[ir.Value]:
    """Wait until at most ``pending`` groups are in flight; the accumulators."""
    flat = [x for product in products for x in elements(product)]
    parts = iter(_tied(f"wgmma.wait_group.sync.aligned {pending};", flat, ["~{memory}"]))
    return [from_elements([next(parts) for _ in range(ir.VectorType(x.type).shape[0])]) for x in products]


def pinned(value: ir.Value, strict: bool) -> ir.Value:
    """A vector of f32 that is computed before the assembly that follows: else LLVM moves arithmetic over waits.

    ptxas does so all the same unless the order is ``strict``: it starts waiting as early as registers allow, and a
    product that should fill the softmax is waited for before it. It moves no wait over an instruction with effects that
    depends on the values, here one that is never executed.
    """
    flat = elements(value)
    return from_elements(_tied(_after(len(flat)) if strict else "", flat))


def _after(count: int) -> str:
    """An instruction that needs registers $0 to ``count``: a profiler's event when they hold an unlikely NaN."""
    joined = " ".join(f"xor.b32 t, t, ${i};" for i in range(1, count))
    return f"{{ .reg .pred p; .reg .b32 t; mov.b32 t, $0; {joined} setp.eq.b32 p, t, {NEVER}; @p pmevent 7; }}"


def _tied(text: str, values: Sequence[ir.Value], clobbers: Sequence[str] = ()) -> list[ir.Value]:
    """Inline PTX through which f32 pass, each in the register that it is in."""
    constraints = ["=f"] * len(values) + [str(i) for i in range(len(values))] + list(clobbers)
    return floats_of_asm(text, constraints, values, len(values))
