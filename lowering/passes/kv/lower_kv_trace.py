# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lower trace marks to stores of the time; without ``marks``, drop them.

Marks are dropped before any other pass, so that a kernel with ``with kv.trace(...)`` is byte-identical to one without.
Otherwise they are lowered late, after all passes that move ops across them. The first thread of each warp takes a
record of the buffer when the kernel starts, if launches are traced and a record is left; a mark stores the clock and
the label's number to the next entry of the record's ring (``dialect.trace_layout``). The count of marks is in a
register on a GPU, and in the record on the host.

Before:  "kv.trace_mark"() {label = "softmax", edge = "begin"}
After:   scf.if <this thread has a record> { llvm.store <clock << 16 | number>, <place in the ring> }
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from mlir import ir

from kvarn.dialect import trace_layout as at
from kvarn.dialect.dtypes import i32, i64
from kvarn.dsl import functional, gpu, ptx
from kvarn.dsl.builder import emit_value, types
from kvarn.dsl.memory import Pointer, pointer_of
from kvarn.dsl.values import Value, cast, where
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.rewrite import kernels, ops_named
from kvarn.lowering.target import by_name
from kvarn.lowering.variables import declare_variable, note_texts, number_of, variable


@dataclass(frozen=True)
class Options:
    """target: the target of the kernels. marks: size of a warp's ring, a power of two; 0 drops the marks."""

    target: str = "sm_90a"
    marks: int = 0


class Traced:
    """A kernel with marks."""

    def __init__(self, function: ir.Operation, marks: list[ir.Operation], options: Options) -> None:
        self.function, self.marks, self.ring = function, marks, options.marks
        self.on_host = by_name(options.target).is_host
        self.name = ir.StringAttr(function.attributes["sym_name"]).value
        self.labels = list(dict.fromkeys(ir.StringAttr(op.attributes["label"]).value for op in marks))
        text = json.dumps({"kernel": self.name, "labels": self.labels})
        self.number, self.text = number_of(text), text

    def lower(self) -> None:
        if len(self.labels) > at.MOST_LABELS:
            fail(self.function, f"must have at most {at.MOST_LABELS} labels of marks, got {len(self.labels)}")
        block = self.function.regions[0].blocks[0]
        with ir.InsertionPoint.at_block_begin(block), self.function.location:
            self.record = self._begin()
        for op in self.marks:
            with ir.InsertionPoint(op), op.location:
                self._mark(op)
            op.erase()
        for op in ops_named(self.function, "gpu.return"):
            with ir.InsertionPoint(op), op.location, functional.when(self.record != 0):
                self._times(at.END_NS, at.END_CLOCK)
        note_texts(self.function, at.ATTRIBUTE, {self.number: self.text})

    # --- the record ---

    def _word(self, index: int) -> Pointer:
        return pointer_of(self.record) + 8 * index

    def _begin(self) -> Value:
        """The address of this thread's record; 0 for a thread without one."""
        if not self.on_host:
            one = emit_value("arith.constant", types().i32, (), {"value": types().attribute("1 : i32")})
            counter = emit_value("llvm.alloca", types().pointers[0], [one], {"elem_type": ir.TypeAttr.get(types().i32)})
            self.counter = Pointer(counter, 0)
            self.counter.store(i32(0))
        thread = gpu.linear_thread_id()
        switch = variable(at.SYMBOL)
        buffer = functional.if_(
            (switch != 0) & ((thread & (gpu.WARP - 1)) == 0), lambda: pointer_of(switch).load(i64), lambda: i64(0)
        )
        self.record = functional.if_(buffer != 0, lambda: self._take(buffer), lambda: i64(0))
        with functional.when(self.record != 0):
            grid = (pointer_of(switch) + 8 * at.LAUNCH).load(i64) if self.on_host else self._special("%gridid")
            x, y, z = gpu.block_id.x, gpu.block_id.y, gpu.block_id.z
            block = x + gpu.grid_dim.x * (y + gpu.grid_dim.y * z)
            processor = i64(0) if self.on_host else cast(ptx.smid(), i64)
            for index, value in (
                (at.GRID, grid), (at.KERNEL, i64(self.number)), (at.BLOCK, cast(block, i64)),
                (at.WARP, cast(thread >> 5, i64)), (at.PROCESSOR, processor), (at.END_NS, i64(0)), (at.COUNT, i64(0)),
            ):  # fmt: skip
                self._word(index).store(value)
            self._times(at.BEGIN_NS, at.BEGIN_CLOCK)
        return self.record

    def _take(self, buffer: Value) -> Value:
        found = pointer_of(buffer)
        fits = (found + 8 * at.MARKS).load(i64) == self.ring  # a buffer with rings of another size is not used
        n = (found + 8 * at.TAKEN).atomic("add", i64(1))
        first = buffer + 8 * at.RECORDS + n * (8 * at.record_words(self.ring))
        return where(fits & (n < (found + 8 * at.CAPACITY).load(i64)), first, i64(0))

    def _times(self, ns: int, clock: int) -> None:
        self._word(clock).store(self._clock())
        self._word(ns).store(self._clock() if self.on_host else ptx.globaltimer())

    def _special(self, register: str) -> Value:
        # The clobber keeps memory accesses from moving across the read; memory itself is not touched.
        return Value(ptx.inline_asm(f"mov.u64 $0, {register};", "=l,~{memory}", (), "i64", effects=True), i64)

    def _clock(self) -> Value:
        if not self.on_host:
            return self._special("%clock64")
        return Value(ptx.intrinsic("llvm.readcyclecounter", [types().i64]).result, i64)

    def _mark(self, op: ir.Operation) -> None:
        label = self.labels.index(ir.StringAttr(op.attributes["label"]).value)
        number = 2 * label + (ir.StringAttr(op.attributes["edge"]).value == "end")
        with functional.when(self.record != 0):
            count = cast(self._word(at.COUNT).load(i64), i32) if self.on_host else self.counter.load(i32)
            place = self._word(at.RING) + (count & (self.ring - 1)) * 8
            place.store((self._clock() << at.CLOCK_SHIFT) | number)
            if not self.on_host:
                self.counter.store(count + 1)
            self._word(at.COUNT).store(cast(count + 1, i64))


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    if options.marks & (options.marks - 1):
        raise ValueError(f"marks must be a power of two, or 0, got {options.marks}")
    for function in kernels(module):
        marks = ops_named(function, "kv.trace_mark")
        if not options.marks:
            for op in marks:
                op.erase()
        elif marks:
            declare_variable(function, at.SYMBOL)
            Traced(function, marks, options).lower()
