# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Check at run time that every access to a cache uses a page that its sequence owns, and reads what was written.

The host maintains the ownership records of a pool (``kvarn.sanitizer.ownership``; their layout is
``dialect.ownership_layout``). The kernel finds them through a module variable, once per handle, by the addresses of the
handle's pool and lookup table; unwatched pools are not checked. An access requires that its page is the one that the
sequence has now, and that the page is in use; a store also that no other sequence reads the page; a load also that the
slot has been written since the page was handed out. Violations are recorded with the access, sequence, token and page,
and the kernel continues; a legal store marks the slot as written.

The threads of a block divide the tokens of a tile. A load or store through an address, in a user's kernel, is checked
against the sequence of the ``kv.block_ptr`` that made the address, at the token and head that it points to now.
Loop-carried addresses, asynchronous copies and copies by descriptor are not checked.

Before:  %x = "kv.load"(%k, %b, %h, %t, %d) {width = 8} : ...
After:   %r = <region of %k> ; %e = <what the table's entry of %b, %t must be>
         scf.if <%r is watched> { <compare page, generation, users, slot> ; scf.if <wrong> { <write it down> } }
         %x = "kv.load"(%k, %b, %h, %t, %d) {width = 8} : ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlir import ir

from kvarn.dialect import effects, kv, layout, ops, ownership_layout as at, types
from kvarn.dialect.dtypes import i32, i64
from kvarn.dsl import functional, gpu
from kvarn.dsl.memory import Pointer, pointer_of
from kvarn.dsl.values import Value, cast, where
from kvarn.errors import source_locations
from kvarn.lowering.access_plan import is_access
from kvarn.lowering.bounds import slot_of
from kvarn.lowering.index import Ix
from kvarn.lowering.kernels.attention.touched_pages import READS_OF
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.rewrite import defining_op, kernels, walk
from kvarn.lowering.target import by_name
from kvarn.lowering.tiles.threads import scalar
from kvarn.lowering.variables import declare_variable, note_texts, number_of, variable

from .lower_kv_access import in_page

_TILES = {c.OPERATION_NAME for c in (kv.LoadTileOp, kv.StoreTileOp, kv.TileLoadOp, kv.TileStoreOp)}
_WATCHED = layout.KINDS
_BY_ADDRESS = {"llvm.load": 0, "llvm.store": 1, "llvm.atomicrmw": 0}  # the index of the address operand
_ADDRESSES = {c.OPERATION_NAME for c in (kv.BlockPtrOp, kv.ScaleBlockPtrOp)}
_PROGRAM = "kv.program"  # of a module of fused operations: their kernels may read elements that they do not use
_NOWHERE = -1  # the token of an address outside of its page


def is_checked(name: str) -> bool:
    return name in _TILES or is_access(name)


def _word(base: Any, index: int) -> Value:
    """Word ``index`` of the record at an address."""
    return (pointer_of(base) + 8 * index).load(i64)


# --- the records of a handle -------------------------------------------------------------------


@dataclass
class Watched:
    """A handle's region and lookup table: addresses of their records, 0 if unwatched."""

    handle: ir.Value
    of_scales: bool
    region: Value
    table: Value

    def field(self, name: str) -> Value:
        value = ops.field(self.handle, name)
        return Value(value, i64 if str(value.type) == "i64" else i32)


def _find(first: Value, count: Value, words: int, address: Value) -> Value:
    """The record, of ``count`` from ``first`` up, whose range includes an address, or 0."""

    def step(i: Any, found: Any) -> Any:
        record = first + i * (8 * words)
        inside = (_word(record, at.LOW) <= address) & (address < _word(record, at.HIGH))
        return i + 1, where(inside, record, found)

    zero = i64(0)
    return functional.while_(lambda i, found: (i < count) & (found == 0), step, (zero, zero))[1]


def watched(handle: ir.Value, of_scales: bool, registry: Callable[[], Value]) -> Watched:
    """Look up a handle's records where the handle is made."""
    names = ("scales" if of_scales else "base", "lookup")
    place = defining_op(handle)
    owner = ir.BlockArgument(handle).owner if place is None else None
    where_ = ir.InsertionPoint.at_block_begin(owner) if owner is not None else ir.InsertionPoint.after(place)
    with where_:
        address, table = (Pointer(ops.field(handle, n), 1).address() for n in names)
        known = registry()
        regions, first = functional.if_(
            known != 0, lambda: (_word(known, at.REGIONS), known + 8 * at.REGISTRY_WORDS), lambda: (i64(0), i64(0))
        )
        region = _find(first, regions, at.REGION_WORDS, address)
        tables, first = functional.if_(
            region != 0, lambda: (_word(region, at.NUM_TABLES), _word(region, at.TABLES)), lambda: (i64(0), i64(0))
        )
        return Watched(handle, of_scales, region, _find(first, tables, at.TABLE_WORDS, table))


# --- one access ----------------------------------------------------------------------------------


@dataclass
class Access:
    """An op that reads or writes at (sequence, token, head), and its number in recorded violations."""

    number: int
    writes: bool
    registry: Callable[[], Value]

    def check(self, of: Watched, batch: ir.Value, token: ir.Value, head: ir.Value, page: ir.Value | None) -> None:
        with functional.when(of.region != 0):
            self._compare(of, batch, token, head, page)

    def _compare(self, of: Watched, batch: ir.Value, token: ir.Value, head: ir.Value, page: ir.Value | None) -> None:
        spec: Any = types.spec_of(of.handle.type)
        column, _ = layout.page_and_slot(spec, Ix(token))
        inside = (scalar(batch) >= 0) & (scalar(batch) < of.field("batch")) & (scalar(token) >= 0)
        if spec.paged:
            inside = inside & (scalar(column.value) < of.field("lookup_columns"))
        else:
            inside = inside & (scalar(token) < of.field("capacity"))
        if page is not None:
            entry = scalar(page)
        else:  # nothing is read for a sequence or token that does not exist
            raw_page = functools.partial(ops.raw_page, of.handle, batch, token)
            entry = functional.if_(inside, lambda: scalar(raw_page()), lambda: i32(_NOWHERE))
        pages = cast(_word(of.region, at.NUM_PAGES), i32)
        known = (entry >= 0) & (entry < pages)
        used = where(known, entry, 0)
        state = pointer_of(_word(of.region, at.PAGES)) + cast(used, i64) * 8
        generation, users = state.load(i32), (state + 4).load(i32)
        expected = self._expected(of, batch, column, inside)
        slot = self._slot(of, used, token, head)

        kind = where(known, i32(0), at.OUTSIDE)
        if self.writes:
            kind = where(users > 1, at.SHARED, kind)
        else:
            kind = where(slot.load(i32) != generation, at.UNWRITTEN, kind)
        kind = where((users & (at.CACHED - 1)) == 0, at.FREE, kind)
        kind = where(users == at.NOBODYS, 0, kind)
        checked = of.table != 0
        kind = where(checked & (entry != expected), at.FOREIGN, kind)
        kind = where(checked & (expected == at.NO_PAGE), at.BEYOND, kind)
        kind = where(checked & (expected == at.RELEASED), at.ENDED, kind)
        kind = where(inside & known, kind, at.OUTSIDE)
        kind = where(checked & inside & (expected == at.ANY_PAGE), 0, kind)
        with functional.when(kind != 0):
            record = (kind, batch, token, head, entry, expected, generation, users)
            self._write_down(of, *(v if isinstance(v, Value) else scalar(v) for v in record))
        if self.writes:
            with functional.when(kind == 0):
                slot.store(generation)

    def _expected(self, of: Watched, batch: ir.Value, column: Ix, inside: Value) -> Value:
        """The page that the table entry of a sequence and column must name."""

        def read() -> Value:
            spec: Any = types.spec_of(of.handle.type)
            index = cast(scalar(batch), i64) * Value(Ix(ops.field(of.handle, "lookup_stride")).wide.value, i64)
            if spec.paged:
                index = index + Value(column.wide.value, i64)
            before = Pointer(ops.field(of.handle, "lookup"), 1).address() - _word(of.table, at.TABLE_LOW)
            place = pointer_of(_word(of.table, at.EXPECTED)) + (before + index * 4)
            return place.load(i32)

        return functional.if_((of.table != 0) & inside, read, lambda: i32(at.NO_PAGE))

    def _slot(self, of: Watched, page: Value, token: ir.Value, head: ir.Value) -> Pointer:
        """The address of the generation in which the head's row of a token was last written."""
        spec: Any = types.spec_of(of.handle.type)
        dtype = spec.scale_dtype if of.of_scales else spec.dtype
        base, stride = ("scales", "scales_stride0") if of.of_scales else ("base", "stride0")
        row = Ix(head).least(spec.num_heads - 1)
        inner = in_page(spec, slot_of(of.handle, page.ir, token, True), row.value, i32(0).ir, of.of_scales)
        index = Ix(page.ir).wide * Ix(ops.field(of.handle, stride)) + inner
        address = Pointer(ops.field(of.handle, base), 1).address() + dtype.bytes_of(Value(index.value, i64))
        granule = Ix((address - _word(of.region, at.LOW)).ir) // at.granule(spec, of.of_scales)
        return pointer_of(_word(of.region, at.WRITTEN)) + Value(granule.value, i64) * 4

    def _write_down(self, of: Watched, kind: Value, *record: Value) -> None:
        out = pointer_of(_word(self.registry(), at.VIOLATIONS))
        n = out.atomic("add", i64(1))
        with functional.when(n < at.MOST_VIOLATIONS):
            place = out + (n * (8 * at.VIOLATION_WORDS) + 8)
            table = functional.if_(of.table != 0, lambda: _word(of.table, at.TABLE_LOW), lambda: i64(0))
            for i, word in enumerate((i64(self.number), kind, *record, of.region, table)):
                (place + 8 * i).store(cast(word, i64))


# --- ops -----------------------------------------------------------------------------------------


class Kernel:
    """The accesses of one kernel."""

    def __init__(self, function: ir.Operation, on_host: bool) -> None:
        self.function, self.on_host = function, on_host
        self.name = ir.StringAttr(function.attributes["sym_name"]).value
        self.titles: dict[int, str] = {}
        self._handles: dict[tuple[ir.Value, bool], Watched] = {}

    def registry(self) -> Value:
        return variable(at.SYMBOL)

    def check(self, op: ir.Operation) -> None:
        found: Any = op.opview
        spec = types.spec_of(found.cache.type)
        if getattr(spec, "kind", None) not in _WATCHED:
            return
        writes = not len(op.results) and op.name != kv.LoadTileOp.OPERATION_NAME
        only_scales = effects.acts_on_scales_only(op.name)
        both = spec.quantized and op.name in (kv.LoadOp.OPERATION_NAME, kv.TileLoadOp.OPERATION_NAME)
        for of_scales in (only_scales, True) if both else (only_scales,):
            if of_scales and not spec.quantized:
                continue
            of = self._watched(found.cache, of_scales, op.location)
            access = Access(self._number(op, op.name, writes, of_scales), writes, self.registry)
            with ir.InsertionPoint(op), op.location:
                self._each(op, access, of)

    def check_address(self, op: ir.Operation) -> None:
        """Check a load or store through an address whose ``kv.block_ptr`` is known."""
        address = op.operands[_BY_ADDRESS[op.name]]
        origin = defining_op(address)
        while origin is not None and origin.name == "llvm.getelementptr":
            origin = defining_op(origin.operands[0])
        if origin is None or origin.name not in _ADDRESSES:
            return
        asked: Any = origin.opview
        spec: Any = types.spec_of(asked.cache.type)
        of_scales = origin.name == kv.ScaleBlockPtrOp.OPERATION_NAME
        if getattr(spec, "kind", None) not in _WATCHED or (of_scales and not spec.quantized):
            return
        writes = op.name != "llvm.load"
        of = self._watched(asked.cache, of_scales, op.location)
        number = self._number(op, f"{'store' if writes else 'load'} by address", writes, of_scales)
        with ir.InsertionPoint(op), op.location:
            token, head = _place(asked, spec, of_scales, address)
            Access(number, writes, self.registry).check(of, asked.batch, token.ir, head.ir, None)

    def _watched(self, handle: ir.Value, of_scales: bool, location: ir.Location) -> Watched:
        key = (handle, of_scales)
        if key not in self._handles:
            with location:
                self._handles[key] = watched(handle, of_scales, self.registry)
        return self._handles[key]

    def _number(self, op: ir.Operation, what_it_is: str, writes: bool, of_scales: bool) -> int:
        """The number of an access; equal descriptions share a number."""
        places = source_locations(op.location)
        what = f"{'writes' if writes else 'reads'}{' the scales of' if of_scales else ''}"
        title = f"{f'{places[0]}: ' if places else ''}{what_it_is} of kernel {self.name}"
        if READS_OF in self.function.attributes:  # repeats the reads of an operation that reads through addresses
            title = ir.StringAttr(ir.DictAttr(self.function.attributes[READS_OF])["operation"]).value
        text = f"{title}|{what}"
        number = number_of(text)
        self.titles[number] = text
        return number

    def _each(self, op: ir.Operation, access: Access, of: Watched) -> None:
        found: Any = op.opview
        if op.name not in _TILES:
            access.check(of, found.batch, found.token, found.head, found.page)
            return
        first, step = i32(0), i32(1)  # on the host one thread processes the whole block's share
        if not self.on_host:
            first, step = gpu.linear_thread_id(), gpu.block_dim.x * gpu.block_dim.y * gpu.block_dim.z
        if op.name == kv.TileLoadOp.OPERATION_NAME:
            base, rows = scalar(found.first), ir.RankedTensorType(found.tile.type).shape[0]
            begin, end = scalar(found.begin) - base, scalar(found.count) - base
            begin, end = where(begin > 0, begin, 0), where(end < rows, end, rows)
        elif op.name == kv.TileStoreOp.OPERATION_NAME:
            base, rows = scalar(found.first), ir.RankedTensorType(found.value.type).shape[0]
            begin, end = i32(0), scalar(found.count) - base
            end = where(end < rows, end, rows)
        else:
            base, begin, end = scalar(found.base), i32(0), scalar(found.valid)
            end = where(end < found.tile_rows.value, end, found.tile_rows.value)
            first, step = scalar(found.thread), i32(found.num_threads.value)
        with functional.loop(begin + first, end, step) as row:
            access.check(of, found.batch, (base + row).ir, found.head, None)


def _place(asked: Any, spec: Any, of_scales: bool, address: ir.Value) -> tuple[Value, Value]:
    """The token and head of an address derived from one of a token's page; no token if it has left the page."""
    formula = layout.scale_offset if of_scales else layout.element_offset
    dtype = spec.scale_dtype if of_scales else spec.dtype
    of_token, of_head = (dtype.bytes_of(formula(spec, 0, *one, 0, 0)) for one in ((1, 0), (0, 1)))
    _, slot = layout.page_and_slot(spec, Ix(asked.token))
    inner = dtype.bytes_of(Value(in_page(spec, slot, asked.head, asked.dim, of_scales).value, i64))
    at_page = Pointer(address, 1).address() - Pointer(asked.pointer, 1).address() + inner  # bytes from the page's start
    wide, narrow = max(of_token, of_head), min(of_token, of_head)
    outer, rest = cast(at_page // wide, i32), cast(at_page % wide // narrow, i32)
    new_slot, head = (outer, rest) if of_token >= of_head else (rest, outer)
    moved = scalar(asked.token) + (new_slot - scalar(slot.value))
    inside = (at_page >= 0) & (head < spec.num_heads)
    inside = inside & (new_slot < spec.page_size if spec.paged else moved >= 0)
    return where(inside, moved, _NOWHERE), where(inside, head, scalar(asked.head))


@dataclass(frozen=True)
class Options:
    """target: the target of the kernels."""

    target: str = "sm_90a"


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    read_before = any(READS_OF in function.attributes for function in kernels(module))
    for function in kernels(module):
        kernel = Kernel(function, by_name(options.target).is_host)
        # The kernel of touched pages covers the tiles of its operation, whose loops other passes transform.
        found = walk(function, is_access if read_before else is_checked)
        by_address = [] if _PROGRAM in module.operation.attributes else walk(function, _BY_ADDRESS.__contains__)
        for op in found:
            kernel.check(op)
        for op in by_address:
            kernel.check_address(op)
        if kernel.titles:
            note_texts(function, at.ATTRIBUTE, kernel.titles)
            declare_variable(function, at.SYMBOL)
