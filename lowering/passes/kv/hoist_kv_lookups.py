# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Look up each page once: give every access its page as a value, merge equal lookups, move lookups out of loops.

K and V of a collection share one lookup table, so lookups are keyed by the root collection (or cache). A lookup is
clamped to the table and the pool, so that it may run early, even before a loop that runs zero times. Loads use the
clamped page (``kv.page``), stores the raw entry (``kv.raw_page``), which they test.

Before:  scf.for %h ... { "kv.load"(%k, %b, %h, %t, %d) ; "kv.load"(%v, %b, %h, %t, %d) }
After:   %p = "kv.page"(%k, %b, %t)
         scf.for %h ... { "kv.load"(%k, %b, %h, %t, %d, %p) ; "kv.load"(%v, %b, %h, %t, %d, %p) }
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlir import ir

from kvarn.dialect import effects, kv, ops, types
from kvarn.dialect.layout import FA3
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import defining_op, kernels, kv_ops
from kvarn.lowering.rewrite_counts import performs

_LOOKUPS = (kv.PageOp.OPERATION_NAME, kv.RawPageOp.OPERATION_NAME)
_LOOPS = ("scf.for", "scf.while", "scf.parallel")


@dataclass(frozen=True)
class Options:
    """merge: merge equal lookups of a block. hoist: move lookups out of loops."""

    merge: bool = True
    hoist: bool = True


def root(handle: ir.Value) -> ir.Value:
    """The value that owns a handle's lookup table: the collection of a view, otherwise the handle itself."""
    op = defining_op(handle)
    while op is not None and effects.has(op.name, effects.ViewsHandle):
        shown = op.operands[0]
        if types.type_name(shown.type) == "collection" and types.spec_of(shown.type).kind == FA3:
            return handle  # every layer of an fa3 collection has its own table
        handle = shown
        op = defining_op(handle)
    return handle


def attach_pages(function: ir.Operation) -> list[ir.Operation]:
    """Give every access without a page a lookup right before it; returns all lookups, in order."""
    found = []
    for op in kv_ops(function):
        if op.name in _LOOKUPS:
            found.append(op)
            continue
        if not effects.has(op.name, effects.LooksUpPage):
            continue
        view = op.opview
        if view.page is not None or not performs(op, "give page"):
            continue
        lookup = ops.raw_page if effects.writes_cache(type(view)) else ops.page
        with ir.InsertionPoint(op), op.location:
            page = lookup(view.cache, view.batch, view.token)
            found.append(page.owner)
            # Operands cannot be added to an existing op: replace it by a copy with the page at the end.
            twin = ir.Operation.create(
                op.name,
                results=[r.type for r in op.results],
                operands=[*op.operands, page],
                attributes={a: op.attributes[a] for a in op.attributes},
                loc=op.location,
            )
        for old, new in zip(op.results, twin.results, strict=True):
            old.replace_all_uses_with(new)
        op.erase()
    return found


def _outside(value: ir.Value, loop: ir.Operation) -> bool:
    """Whether a value is defined outside a loop."""
    owner = value.owner
    op = owner.owner if isinstance(owner, ir.Block) else owner
    while op is not None:
        if op.operation == loop:
            return False
        op = op.operation.parent
    return True


_PARTS = ("cache", "sequence", "token")  # operands of lookups


def hoist(lookup: ir.Operation) -> None:
    """Move a lookup out of every loop in which its operands do not change, and out of the branches in between."""
    target, around, loops = None, lookup.parent, 0
    while around is not None and around.operation.name.startswith("scf."):
        operation = around.operation
        changing = [name for name, v in zip(_PARTS, lookup.operands, strict=False) if not _outside(v, operation)]
        if changing:
            if target is None:
                verb = "change" if len(changing) > 1 else "changes"
                what = " and the ".join(changing)
                remark(lookup, "missed", f"lookup stays in its loop: the {what} {verb} in it")
            break
        if operation.name in _LOOPS:
            target, loops = operation, loops + 1
        around = operation.parent
    if target is not None and performs(lookup, "hoist"):
        lookup.move_before(target)
        remark(lookup, "passed", f"lookup moved out of {loops} loop{'s' * (loops > 1)}", loops=loops)


def merge(lookups: list[ir.Operation]) -> None:
    """Merge the equal lookups of a block into the first."""
    seen: dict[Any, ir.Operation] = {}
    for op in lookups:
        block = op.block
        key = (hash(block.owner), str(op.name), hash(root(op.operands[0])), hash(op.operands[1]), hash(op.operands[2]))
        first = seen.get(key)
        if first is None:
            seen[key] = op
        elif first.block == block and performs(op, "merge"):
            remark(op, "passed", "lookup of a page that the block has already looked up")
            op.results[0].replace_all_uses_with(first.results[0])
            op.erase()


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    for function in kernels(module):
        lookups = attach_pages(function)
        if options.hoist:
            for op in lookups:
                hoist(op)
        if options.merge:
            merge(sorted_in_program_order(function))


def sorted_in_program_order(function: ir.Operation) -> list[ir.Operation]:
    """The function's lookups in their current order."""
    return [op for op in kv_ops(function) if op.name in _LOOKUPS]
