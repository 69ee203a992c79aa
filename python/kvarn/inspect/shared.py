# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The layout of kernels' dynamic shared memory, and the lifetime of each block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlir import ir

from kvarn.errors import source_locations
from kvarn.lowering.passes.backend import allocate_kv_shared
from kvarn.lowering.rewrite import enclosing, kernels, walk

from .source_map import Place

STAGE = "allocate-kv-shared"  # allocations are read before this pass
# Ops that forward an address. A load returns data; any other op with the address is a use.
_PASSES_ON = ("arith.", "llvm.getelementptr", "llvm.ptrtoint", "llvm.inttoptr", "llvm.addrspacecast", "llvm.bitcast",
              "llvm.add", "llvm.and", "llvm.or", "llvm.shl", "llvm.lshr", "llvm.trunc", "llvm.zext", "scf.yield",
              "scf.for", "scf.while", "scf.condition", "builtin.unrealized_conversion_cast")  # fmt: skip
_LOOPS = ("scf.for", "scf.while", "scf.parallel")


@dataclass(frozen=True)
class Block:
    """A block of shared memory.

    Attributes
    ----------
    kernel : str
    offset, bytes, alignment : int
    place : (str, int) or None
        The line that allocates it.
    first, last : int
        Indices of the first and the last operation of the kernel that uses it, in program order; a use in a loop lasts
        for the whole loop.
    length : int
        Number of operations of the kernel.
    uses : tuple of (int, (str, int) or None)
        Each use, with its line.
    """

    kernel: str
    offset: int
    bytes: int
    alignment: int
    place: Place | None
    first: int
    last: int
    length: int
    uses: tuple[tuple[int, Place | None], ...]


def blocks_of(module: ir.Module) -> list[Block]:
    """The blocks of every kernel of a module, before ``allocate-kv-shared``, by offset."""
    found = []
    for function in kernels(module):
        operations = walk(function)
        order = {op: n for n, op in enumerate(operations)}  # valid while the module does not change
        for op, offset in allocate_kv_shared.offsets(function)[0]:
            users = _uses(op)
            uses = sorted(((order[use], _place(use)) for use in users), key=lambda use: use[0])
            spans = [_span(use, order) for use in users] or [(order[op],) * 2]
            first, last = min(s[0] for s in spans), max(s[1] for s in spans)
            bytes, alignment = (ir.IntegerAttr(op.attributes[name]).value for name in ("bytes", "alignment"))
            name = ir.StringAttr(function.attributes["sym_name"]).value
            found.append(Block(name, offset, bytes, alignment, _place(op), first, last, len(operations), tuple(uses)))
    return sorted(found, key=lambda b: (b.kernel, b.offset))


def _uses(op: ir.Operation) -> list[ir.Operation]:
    """The operations that access memory through an operation's result address."""
    found: dict[ir.Operation, None] = {}
    values, seen = list(op.results), set()
    while values:
        value = values.pop()
        if value in seen:
            continue
        seen.add(value)
        for use in value.uses:
            owner = use.owner.operation
            if owner.name.startswith(_PASSES_ON):
                values += _passed_on(owner, use.operand_number)
            else:
                found[owner] = None
    return list(found)


def _passed_on(owner: ir.Operation, operand: int) -> Iterator[ir.Value]:
    if owner.name == "scf.for" and operand >= 3:
        yield owner.results[operand - 3]
        yield owner.regions[0].blocks[0].arguments[operand - 2]
    elif owner.name in ("scf.yield", "scf.condition"):
        outer = None if owner.parent is None else owner.parent.operation
        n = operand - (owner.name == "scf.condition")
        if outer is not None and outer.name in ("scf.for", "scf.if", "scf.while") and n < len(outer.results):
            yield outer.results[n]
    elif owner.name != "scf.for" and owner.name != "scf.while":
        yield from owner.results


def _span(use: ir.Operation, order: dict[ir.Operation, int]) -> tuple[int, int]:
    """The first and last operation of a use: of the outermost loop around it, if any."""
    first = last = order[use]
    loop = enclosing(use, *_LOOPS)
    while loop is not None:
        first = min(first, order[loop])
        last = max(last, max(order[op] for op in walk(loop)))
        loop = enclosing(loop, *_LOOPS)
    return first, last


def _place(op: ir.Operation) -> Place | None:
    places = source_locations(op.location)
    return (places[0].file, places[0].line) if places else None


__all__ = ["STAGE", "Block", "blocks_of"]
