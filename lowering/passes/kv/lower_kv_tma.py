# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lower TMA copies and their mbarriers to PTX instructions.

A load becomes one instruction per column chunk. The instructions are inline PTX: one form serves plain loads, gathers,
CTA pairs and multicasts. The descriptor is a ``kv.field``, which ``flatten-kv-types`` lowers.

Before:  "kv.tma_load"(%map, %tile, %barrier, %page, %slot, %head, %column) {smem_rows = 64, cta_group = 1, ...}
After:   %m = "kv.field"(%map) {field = "value"}
         llvm.inline_asm "cp.async.bulk.tensor.4d..." %tile, %m, %column, %head, %slot, %page, %barrier
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlir import ir
from mlir.dialects import arith, llvm

from kvarn.dialect import dtypes, ops, tma_layout, types
from kvarn.dialect.ops.tma import TmaLoadBoxOp, TmaLoadOp
from kvarn.dialect.tma_layout import GATHERS, TmaSpec
from kvarn.dsl import ptx
from kvarn.dsl.memory import SHARED, Pointer
from kvarn.dsl.values import Value
from kvarn.lowering.index import Ix, const, i32
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.rewrite import Rules, walk

from .lower_kv_tiles import moved

RULES = Rules()
# The barrier of a CTA pair is that of its first CTA, in whose shared addresses this bit of the CTA number is zero.
_FIRST_OF_PAIR = -(1 << 24) - 1


def _asm(text: str, operands: Sequence[ir.Value]) -> None:
    letters = {"i32": "r", "i64": "l", "i16": "h", "!llvm.ptr": "l"}
    constraints = [letters[str(o.type)] for o in operands]
    ptx.inline_asm(text, ",".join([*constraints, "~{memory}"]), operands, effects=True)


def _address(pointer: ir.Value) -> ir.Value:
    return llvm.ptrtoint(i32(), pointer)


def _descriptor(map: ir.Value) -> ir.Value:
    """The address of the descriptor in the parameter that it is passed in."""
    return ops.field(map, "value")


def load_text(spec: TmaSpec, pair: bool, multicast: bool, policy: bool = False) -> str:
    """The instruction of one copy, with placeholders for its operands."""
    gather = spec.form in GATHERS
    mode = "tile::gather4" if gather else "tile"
    parts = ["cp.async.bulk.tensor", f"{len(spec.box)}d", "shared::cluster", "global", mode]
    parts += ["mbarrier::complete_tx::bytes", *(["multicast::cluster"] if multicast else [])]
    parts += [*(["cta_group::2"] if pair else []), *(["L2::cache_hint"] if policy else [])]
    count = 5 if gather else len(spec.box)
    coordinates = ", ".join(f"${i + 2}" for i in range(count))
    tail = "".join(f", ${count + 3 + i}" for i in range(multicast + policy))
    return f"{'.'.join(parts)} [$0], [$1, {{{coordinates}}}], [${count + 2}]{tail};"


def chunk_coordinates(spec: TmaSpec, given: Sequence[ir.Value], chunk: int) -> list[ir.Value]:
    """The formula of ``tma_layout``, applied to values."""
    found = tma_layout.copy_coordinates(spec, [Signed(v) for v in given], chunk)
    return [c.value for c in found]


class Signed(Ix):
    """A signed i32 coordinate, of which only sums and differences are computed."""

    __slots__ = ()

    def __add__(self, other: Any) -> Signed:
        return Signed(super().__add__(other).value)

    __radd__ = __add__

    def __rsub__(self, other: int) -> Signed:
        return Signed(arith.subi(const(other), self.value))


# --- loads and stores --------------------------------------------------------------------------------


@RULES.lowers(TmaLoadOp)
def lower_load(op: Any) -> None:
    spec = types.tma_spec_of(op.map.type)
    load_chunks(op, spec, [chunk * op.smem_rows.value * spec.row_bytes for chunk in range(spec.copies)])


@RULES.lowers(TmaLoadBoxOp)
def lower_load_box(op: Any) -> None:
    load_chunks(op, types.tma_spec_of(op.map.type), [0], op.policy)


def load_chunks(op: Any, spec: TmaSpec, places: Sequence[int], policy: ir.Value | None = None) -> None:
    """The copies of the first column chunks of a load, each to its offset in the destination."""
    pair, mask = op.cta_group.value == 2, op.multicast.value
    text = load_text(spec, pair, bool(mask), policy is not None)
    descriptor, barrier = _descriptor(op.map), _address(op.barrier)
    if pair:
        barrier = arith.andi(barrier, const(_FIRST_OF_PAIR))
    tail = [barrier, *([const(mask, 16)] if mask else []), *([] if policy is None else [policy])]
    for chunk, place in enumerate(places):
        to = _address(moved(op.destination, place))
        _asm(text, [to, descriptor, *chunk_coordinates(spec, list(op.coordinates), chunk), *tail])


@RULES.lowers("kv.tma_store")
def lower_store(op: Any) -> None:
    spec = types.tma_spec_of(op.map.type)
    descriptor = _descriptor(op.map)
    places = ", ".join(f"${i + 1}" for i in range(len(spec.box)))
    text = (
        f"cp.async.bulk.tensor.{len(spec.box)}d.global.shared::cta.tile.bulk_group [$0, {{{places}}}], "
        f"[${len(spec.box) + 1}];"
    )
    for chunk in range(spec.copies):
        place = moved(op.source, chunk * op.smem_rows.value * spec.row_bytes)
        _asm(text, [descriptor, *chunk_coordinates(spec, op.coordinates, chunk), _address(place)])
    _asm("cp.async.bulk.commit_group;", [])


@RULES.lowers("kv.tma_wait_stores")
def lower_wait_stores(op: Any) -> None:
    _asm(f"cp.async.bulk.wait_group{'.read' if op.read.value else ''} {op.pending.value};", [])


@RULES.lowers("kv.tma_prefetch")
def lower_prefetch(op: Any) -> None:
    _asm("prefetch.tensormap [$0];", [_descriptor(op.map)])


# --- barriers ----------------------------------------------------------------------------------------


@RULES.lowers("kv.tma_init_barrier")
def lower_init_barrier(op: Any) -> None:
    ptx.mbarrier_init(Pointer(op.barrier, SHARED), op.arrivals.value)
    ptx.fence_mbarrier_init()


@RULES.lowers("kv.tma_expect")
def lower_expect(op: Any) -> None:
    total = (Ix(op.loads) * types.tma_spec_of(op.map.type).load_bytes).value
    if op.arrive.value:
        ptx.mbarrier_arrive_expect_tx(Pointer(op.barrier, SHARED), Value(total, dtypes.i32))
    else:
        _asm("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1;", [_address(op.barrier), total])


@RULES.lowers("kv.tma_wait")
def lower_wait(op: Any) -> None:
    ptx.mbarrier_wait(Pointer(op.barrier, SHARED), Value(op.parity, dtypes.i32))


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    RULES.apply(module, found=walk(module, RULES.table.__contains__))
