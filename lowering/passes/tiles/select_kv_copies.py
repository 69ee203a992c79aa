# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Choose how each loaded tile is copied to shared memory, and give it a circular buffer.

A ``kv.tile_load`` that products read from shared memory becomes a copy to a stage, a wait for it and a release. The
copy is the first of these that is possible:

- ``transposed``, if a product reads 8-bit tokens as its columns: through staging memory (filled by TMA if there is a
  descriptor), with zeros past the end;
- ``tma``, if the load has a TMA descriptor and needs no conversion: one warp copies boxes of a page and a swizzle atom;
- ``cp_async``, if the cache stores the element type that the kernel computes with;
- ``staged``, for 8-bit elements: they and their scales are copied to staging memory by TMA or cp.async, and converted
  from there;
- ``convert``: loads to registers, conversion and scales, stores to shared memory.

Rows past the end of the sequence hold whatever the page holds. If the load asks for zeros, they are cleared after the
wait, except where threads copy page by page or convert, and write zeros themselves.

If one of two loads of the same tokens has all columns of the other, it is the only copy. With ``parts`` in the
schedule, a product that reads a TMA tile along its columns waits for that many parts of them one after the other.

A loop that loads tiles is first rewritten to count its iterations from 0, since stages and barrier phases do.

With a producer, query rows that a loop loads (``kv.tile_load_rows``) are prefetched in the same way. Two tiles side by
side (``kv.tile_concatenate``) are two copies to one stage.

Before:  %k = "kv.tile_load"(%cache, %b, %h, %first, %begin, %count) : ... -> tensor<128x128xbf16, "shared">
After:   "kv.producer_acquire"(%keys, %n) ; "kv.copy_start"(%keys, %n, %cache, %b, %h, %first, %count)
         %t = "kv.consumer_wait"(%keys, %n) ; %k = "kv.tile_clear"(%t, %begin - %first, %count - %first)
         ... ; "kv.consumer_release"(%keys, %n)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlir import ir
from mlir.dialects import arith, scf

from kvarn.dialect import types
from kvarn.dialect.ops import staging
from kvarn.dialect.ops.common import i64_attr
from kvarn.dialect.ops.sharing import atom_columns, tile_columns
from kvarn.dialect.ops.tile import IN_SHARED, ROW_FORMAT, SHARED, TILE_COLUMN, row_format
from kvarn.dialect.shared_layout import SharedLayout
from kvarn.lowering.index import const
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import defining_op, enclosing, ops_named
from kvarn.lowering.target import Target, by_name
from kvarn.lowering.tiles.copies import by_pages, copy_of, of_pool, why_not_by_rows, why_not_staged
from kvarn.lowering.tiles.ir import (
    SWAPPED,
    SWIZZLE,
    WARPGROUP,
    WGMMA,
    attributes_of,
    constant_int,
    element,
    instruction_of,
    is_tile,
    layout_of,
    schedule_of,
    shape,
    tiled,
    users,
)

from .assign_kv_layouts import CONCATENATE

_BEGIN = 4  # the number of a load's operand ``begin``, the first visible token
PROMISES = ("constant", "existing", "aligned")  # attributes of a load that its copy keeps
ITERATIONS = "kv.iterations"  # on an inner loop: the argument of the outer loop that counts its iterations so far


@dataclass(frozen=True)
class Options:
    """target: whose copies and conversions are used; stages: per circular buffer, instead of the schedule's."""

    target: str = "sm_90a"
    stages: int | None = None


_HOW = {
    "cp_async": "cp.async",
    "staged": "{} and conversion in shared memory",
    "transposed": "transposition in shared memory",
    "convert": "loads that convert",
}


def _say(load: ir.Operation, copy: str, stages: int) -> None:
    """Emit a remark that says how a tile is copied, and why not by TMA."""
    op = load.opview
    tile = "x".join(map(str, shape(op.tile)))
    if copy == "tma":
        remark(load, "passed", f"tile of {tile} is copied by TMA in {stages} stages", stages=stages)
        return
    spec, columns, first = types.spec_of(op.cache.type), shape(op.tile)[1], op.first_column.value
    how, why = _HOW[copy].format("cp.async" if op.descriptor is None else "TMA"), "the kernel has no descriptor of it"
    if copy != "cp_async" and spec.quantized:
        why = f"its elements have scales, a granule of {spec.granularity}"
    elif copy == "transposed":
        why = "products take tokens of 8-bit values as columns"
    elif copy != "cp_async" and spec.data_dtype.mlir != str(element(op.tile)):
        why = f"{spec.data_dtype.mlir} becomes {element(op.tile)}"
        if copy == "convert":
            other = "its rows are listed or have a format" if of_pool(op) else "which the target has no instruction for"
            why += f", {why_not_staged(spec, columns, first) or other}"
    elif copy != "cp_async":
        why = why_not_by_rows(spec, columns, first) or why
    elif op.lists is not None:
        why = "its rows are listed"
    remark(load, "missed", f"tile of {tile} is copied by {how}, in {stages} stages: {why}", stages=stages)


def name_of(op: Any, taken: set[str]) -> str:
    """The name of a buffer: ``keys``, ``values`` or ``tile``, by what the load reads."""
    maker = defining_op(op.cache)
    return unused({"kv.key_cache": "keys", "kv.value_cache": "values"}.get(maker.name if maker else "", "tile"), taken)


def unused(name: str, taken: set[str]) -> str:
    """A name that no other buffer has."""
    found, n = name, 1
    while found in taken:
        n += 1
        found = f"{name}{n}"
    taken.add(found)
    return found


def table_of(cache: ir.Value) -> ir.Value:
    """The cache whose lookup table is read: for values the keys of the same layer, so that CSE merges the lookups."""
    maker = defining_op(cache)
    if maker is not None and maker.name == "kv.value_cache":
        for other in maker.block.operations:
            if other.operation.name == "kv.key_cache" and list(other.operation.operands) == list(maker.operands):
                return other.operation.result
    return cache


def count_iterations(function: ir.Operation) -> None:
    """Let loops that load tiles run from 0 by a step of 1, since stages and barrier phases follow from iterations."""
    for load in ops_named(function, "kv.tile_load"):
        loop = enclosing(load, "scf.for")
        if loop is None or layout_of(load.result.type) not in IN_SHARED or constant_int(loop.operands[2]) == 1:
            continue
        lower, upper, step, *inits = loop.operands
        block = loop.regions[0].blocks[0]
        with ir.InsertionPoint(loop), loop.location:
            zero, one = (arith.constant(lower.type, n) for n in (0, 1))
            distance = arith.addi(arith.subi(upper, lower), arith.subi(step, one))
            made = scf.ForOp(zero, arith.divsi(distance, step), one, inits)
        with ir.InsertionPoint(made.body), loop.location:
            at = arith.addi(lower, arith.muli(made.induction_variable, step))
        for old, new in zip(block.arguments, (at, *made.inner_iter_args), strict=True):
            old.replace_all_uses_with(new)
        for op in list(block.operations):
            made.body.append(op.operation)
        for old, new in zip(loop.results, made.results, strict=True):
            old.replace_all_uses_with(new)
        for name, value in attributes_of(loop).items():
            made.operation.attributes[name] = value
        loop.erase()


def use_number(loop: ir.Operation) -> ir.Value:
    """The use number of a buffer in an iteration: the number of tiles that were copied to it before.

    It counts the iterations of the loop and, in a persistent kernel, those of earlier work items, which the outer loop
    carries.
    """
    inside = arith.subi(loop.regions[0].blocks[0].arguments[0], loop.operands[0])
    if ITERATIONS not in loop.attributes:
        return inside
    number = ir.IntegerAttr(loop.attributes[ITERATIONS]).value
    outer = loop.parent.operation
    return arith.addi(outer.regions[0].blocks[0].arguments[number], inside)


def carry_rounds(loop: ir.Operation) -> None:
    """Let the outer loop carry the number of iterations that the inner loop has executed."""
    outer = loop.parent.operation
    if outer.name != "scf.for" or not ops_named(loop, "kv.tile_load"):
        return
    _, number = carry(outer, lambda: arith.maxsi(arith.subi(loop.operands[1], loop.operands[0]), const(0)))
    loop.attributes[ITERATIONS] = i64_attr(number)


def carry(loop: ir.Operation, grown: Callable[[], ir.Value]) -> tuple[ir.Operation, int]:
    """Let a loop carry a counter that starts at 0 and grows by ``grown()``: (the new loop, the argument's number)."""
    block = loop.regions[0].blocks[0]
    with ir.InsertionPoint(loop), loop.location:
        made = scf.ForOp(*list(loop.operands)[:3], [*list(loop.operands)[3:], const(0)])
    inner = list(block.operations)
    for old, new in zip(block.arguments, made.body.arguments, strict=False):
        old.replace_all_uses_with(new)
    end = inner[-1].operation
    kept = list(end.operands)
    for op in inner[:-1]:
        made.body.append(op.operation)
    number = len(made.body.arguments) - 1
    with ir.InsertionPoint(made.body), loop.location:
        scf.yield_([*kept, arith.addi(made.body.arguments[number], grown())])
    end.erase()
    for old, new in zip(loop.results, made.results, strict=False):
        old.replace_all_uses_with(new)
    loop.erase()
    return made.operation, number


def last_use(op: ir.Operation) -> ir.Operation:
    """The last op in the block of ``op`` that uses its tile, also inside regions or under another name in place."""
    block, last = op.block, op
    inside: list[ir.Operation] = []
    values = [op.result]
    while values:
        for user in users(values.pop()):
            while user.block != block:
                user = user.parent.operation
            if user not in inside:
                inside.append(user)
                values += [v for v in user.results if is_tile(v) and layout_of(v.type) in IN_SHARED]
    for other in block.operations:
        if other.operation in inside:
            last = other.operation
    return last


def stage(load: ir.Operation, function: ir.Operation, stages: int, target: Target, taken: set[str]) -> None:
    """Replace one load by a copy, a wait and a release."""
    op = load.opview
    spec = types.spec_of(op.cache.type)
    by_tma = instruction_of(function) == WGMMA  # mma.sync waits for cp.async groups, not for mbarriers
    loop, copy = enclosing(load, "scf.for"), copy_of(op, target, by_tma)
    _say(load, copy, stages if loop is not None else 1)
    with ir.InsertionPoint.at_block_begin(function.regions[0].blocks[0]), load.location:
        buffer = staging.make_stages(name_of(op, taken), stages if loop is not None else 1, op.tile.type, copy)
    with ir.InsertionPoint(load), load.location:
        n = use_number(loop) if loop is not None else const(0)
        first, pages, begin = op.first, None, None
        if by_tma and op.descriptor is not None and copy in ("tma", "staged", "transposed"):
            box = types.tma_spec_of(op.descriptor.type).rows
            rows = i64_attr(shape(op.tile)[0])
            pages = staging.TilePagesOp(
                table_of(op.cache), op.batch, first, op.count, rows, i64_attr(box)
            ).operation.results[0]
        elif copy == "cp_async" and spec.paged and shape(op.tile)[0] <= WARPGROUP and not by_pages(op, by_tma):
            rows, of = i64_attr(shape(op.tile)[0]), (table_of(op.cache), op.batch, first, op.count)
            pages = staging.TileRowPagesOp(*of, rows, lists=op.lists).operation.results[0]
        if copy == "transposed":
            begin = op.begin
        staging.ProducerAcquireOp(buffer, n)
        start = staging.CopyStartOp(
            buffer, n, op.cache, op.batch, op.head, first, op.count, i64_attr(op.first_column.value),
            descriptor=op.descriptor if by_tma else None, pages=pages, begin=begin, lists=op.lists,
        ).operation  # fmt: skip
        for name in (*ROW_FORMAT, *PROMISES):
            if name in load.attributes:
                start.attributes[name] = load.attributes[name]
        tile = staging.ConsumerWaitOp(buffer, n, op.tile.type).operation.results[0]
        # Whether the copy itself writes zeros past the end.
        ends = op.lists is not None or (not by_tma and (copy != "cp_async" or by_pages(op, by_tma)))
        if op.tail.value == "zero" and begin is None and not (ends and constant_int(op.begin) == 0):
            begin = arith.subi(op.begin, first)
            end = const(shape(op.tile)[0]) if ends else arith.subi(op.count, first)
            tile = staging.TileClearOp(tile, begin, end, tile.type).operation.results[0]
    load.result.replace_all_uses_with(tile)
    load.erase()
    following = last_use(tile.owner.operation)
    with ir.InsertionPoint.after(following), following.location:
        staging.ConsumerReleaseOp(buffer, n)


def share_columns(function: ir.Operation) -> None:
    """Merge a load with an earlier one of the same tokens that has all its columns, as MLA's values and keys."""
    loads = [op for op in ops_named(function, "kv.tile_load") if layout_of(op.result.type) == SHARED]
    erased: list[ir.Value] = []
    for number, part in enumerate(loads):
        whole = next((op for op in loads[:number] if op.result not in erased and _has_columns_of(op, part)), None)
        if whole is None:
            continue
        erased.append(part.result)
        if part.opview.tail.value == "zero":
            whole.attributes["tail"] = part.attributes["tail"]
            whole.operands[_BEGIN] = part.opview.begin
        with ir.InsertionPoint(part), part.location:
            first = part.opview.first_column.value - whole.opview.first_column.value
            made = tile_columns(whole.result, first, shape(part.result)[1])
        part.result.replace_all_uses_with(made)
        remark(part, "passed", f"{shape(part.result)[1]} columns are read from the copy of another tile")
        part.erase()


def _has_columns_of(whole: ir.Operation, part: ir.Operation) -> bool:
    """Whether a load contains the columns of a later one in its block, and may clear the same rows."""
    a, b = whole.opview, part.opview
    tokens = [x == y for x, y in zip(_tokens(a), _tokens(b), strict=True)]
    first, begin = b.first_column.value - a.first_column.value, defining_op(b.begin)
    ends = first + shape(b.tile)[1]
    if first < 0 or first % atom_columns(element(b.tile)) or ends > shape(a.tile)[1]:
        return False
    alike = element(a.tile) == element(b.tile) and shape(a.tile)[0] == shape(b.tile)[0]
    zeros = "any" in (a.tail.value, b.tail.value) or a.begin == b.begin
    known = begin is None or begin.block != part.block
    same = all(
        x.attributes[name] == y.attributes[name] if name in x.attributes else name not in y.attributes
        for x, y, name in ((whole, part, name) for name in ROW_FORMAT)
    )
    return whole.block == part.block and all(tokens) and a.lists == b.lists and alike and zeros and known and same


def _tokens(load: Any) -> list[ir.Value]:
    return [load.cache, load.batch, load.head, load.first, load.count]


def stage_rows(load: ir.Operation, function: ir.Operation, stages: int, query_stages: int, taken: set[str]) -> None:
    """Replace one load of query rows in a loop by a copy, a wait and a release.

    ``stages`` is for a load in the inner loop, ``query_stages`` for one in the outer loop over work items. There the
    release comes after the output rows have been stored through the stage. With one stage it comes after the last use
    of the tile, as the next rows are already waited for.
    """
    op, loop = load.opview, enclosing(load, "scf.for")
    inner = ITERATIONS in loop.attributes
    stages, number = stages if inner else query_stages, 0
    if not inner:
        loop, number = carry(loop, lambda: const(1))
    with ir.InsertionPoint.at_block_begin(function.regions[0].blocks[0]), load.location:
        buffer = staging.make_stages(unused("rows", taken), stages, op.tile.type, "cp_async")
    with ir.InsertionPoint(load), load.location:
        n = use_number(loop) if inner else loop.regions[0].blocks[0].arguments[number]
        staging.ProducerAcquireOp(buffer, n)
        copy = copy_of_rows(buffer, n, op)
        if inner:
            copy.attributes["async_arrive"] = ir.UnitAttr.get()
        tile = staging.ConsumerWaitOp(buffer, n, op.tile.type).operation.results[0]
    load.result.replace_all_uses_with(tile)
    load.erase()
    stores = [x.operation for x in loop.regions[0].blocks[0].operations if ops_named(x, "kv.tile_store_rows")]
    following = stores[-1] if stores and stages > 1 else last_use(tile.owner.operation)
    with ir.InsertionPoint.after(following), following.location:
        staging.ConsumerReleaseOp(buffer, n)


def copy_of_rows(buffer: ir.Value, n: ir.Value, load: Any) -> ir.Operation:
    """The copy of a load's rows to the stage of use ``n``."""
    copy = staging.CopyRowsStartOp(buffer, n, load.buffer, load.mask, list(load.indices)).operation
    for name in ("stored", "first_column"):
        if name in load.operation.attributes:
            copy.attributes[name] = load.operation.attributes[name]
    return copy


def stage_concatenated(joined: ir.Operation, function: ir.Operation, stages: int, taken: set[str]) -> None:
    """Replace two loads that form one tile side by side by two copies to one stage, a wait and a release."""
    left, right = (defining_op(v) for v in joined.operands)
    loop, tile = enclosing(joined, "scf.for"), joined.result
    why = why_not_concatenated(function, joined, left, right)
    if why is not None or loop is None:
        fail(joined, f"cannot be copied: {why or 'a loop must load it'}")
    rows, tokens = left.opview, right.opview
    spec, (count, columns), pages = types.spec_of(tokens.cache.type), shape(right.result), None
    stored = spec.data_dtype.mlir == str(element(tile)) and not spec.quantized
    by_rows = stored and row_format(tokens, spec).plain
    by_rows = by_rows and why_not_by_rows(spec, columns, tokens.first_column.value) is None
    with ir.InsertionPoint.at_block_begin(function.regions[0].blocks[0]), joined.location:
        copy = "cp_async" if by_rows else "convert"
        buffer = staging.make_stages(unused("keys", taken), stages, tile.type, copy)
    with ir.InsertionPoint(joined), joined.location:
        n = use_number(loop)
        staging.ProducerAcquireOp(buffer, n)
        copy_of_rows(buffer, n, rows).attributes["columns"] = i64_attr(shape(left.result)[1])
        if by_rows:
            of = tokens.cache, tokens.batch, tokens.first, tokens.count
            pages = staging.TileRowPagesOp(*of, i64_attr(count)).operation.results[0]
        start = staging.CopyStartOp(
            buffer, n, tokens.cache, tokens.batch, tokens.head, tokens.first, tokens.count,
            i64_attr(tokens.first_column.value), pages=pages,
        ).operation  # fmt: skip
        start.attributes[TILE_COLUMN] = i64_attr(shape(left.result)[1])
        for name in ROW_FORMAT:
            if name in right.attributes:
                start.attributes[name] = right.attributes[name]
        made = staging.ConsumerWaitOp(buffer, n, tile.type).operation.results[0]
    tile.replace_all_uses_with(made)
    for op in (joined, left, right):
        op.erase()
    following = last_use(made.owner.operation)
    with ir.InsertionPoint.after(following), following.location:
        staging.ConsumerReleaseOp(buffer, n)


def why_not_concatenated(
    function: ir.Operation, joined: ir.Operation, left: ir.Operation | None, right: ir.Operation | None
) -> str | None:
    """Why two tiles cannot be copied side by side to one stage; None if they can."""
    if instruction_of(function) != WGMMA or not schedule_of(function).get("producer"):
        return "it needs products by wgmma and a schedule with a producer"
    if left is None or right is None or (left.name, right.name) != ("kv.tile_load_rows", "kv.tile_load"):
        return "the tiles must be rows of a buffer and tokens of a cache, as they are loaded"
    if any(op.block != joined.block or len(users(op.result)) != 1 for op in (left, right)):
        return "nothing else may read its tiles"
    op, rows = right.opview, shape(right.result)[0]
    if op.lists is not None or op.descriptor is not None:
        return "tokens must come in their order and without a descriptor"
    if op.tail.value != "any" or rows > WARPGROUP:
        return f"tokens past the last are anything, of {WARPGROUP} rows at most, got tail {op.tail} and {rows} rows"
    return None


def part_columns(function: ir.Operation, parts: int) -> None:
    """Give parts of a tile's columns barriers of their own, so that a product starts when the first part has landed.

    For tiles that TMA copies and whose first reader is a product that reads them along their columns; the product waits
    for each later part when it needs it.
    """
    for wait in ops_named(function, "kv.consumer_wait"):
        buffer, tile = defining_op(wait.operands[0]), wait.result
        reader = _first_reader(tile)
        if reader is None or ir.StringAttr(buffer.attributes["copy"]).value != "tma" or layout_of(tile.type) != SHARED:
            continue
        panels = SharedLayout(*shape(tile), element(tile).width // 8, SWIZZLE).panels
        if reader.name == "kv.dot" and reader.opview.transpose_b.value and panels > 1:
            buffer.attributes[staging.PARTS] = i64_attr(min(parts, panels))
            wait.attributes[staging.FIRST_PART] = ir.UnitAttr.get()


def _first_reader(tile: ir.Value) -> ir.Operation | None:
    """The product that reads a tile as B before any other op does; None if another op comes first.

    ``kv.tile_clear`` does not count: it waits for all parts.
    """
    readers = users(tile)
    while len(readers) == 1 and readers[0].name == "kv.tile_clear":
        tile = readers[0].result
        readers = users(tile)
    columns = [op for op in readers if op.name == "kv.tile_columns"]  # views: they read nothing
    readers = [op for op in readers if op not in columns] + [user for op in columns for user in users(op.result)]
    inside = [op.operation for op in defining_op(tile).block.operations if op.operation in readers]
    if len(inside) < len(readers) or not inside or inside[0].name != "kv.dot" or inside[0].operands[1] != tile:
        return None
    return inside[0] if inside[0].operands[0] != tile else None


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    for function in tiled(module):
        schedule = schedule_of(function)
        stages = options.stages or schedule.get("stages", 2)
        taken: set[str] = set()
        count_iterations(function)
        for loop in ops_named(function, "scf.for") if instruction_of(function) == WGMMA else ():
            carry_rounds(loop)  # from which barrier phases are computed
        share_columns(function)
        for op in (o for o in ops_named(function, CONCATENATE) if layout_of(o.result.type) in IN_SHARED):
            stage_concatenated(op, function, stages, taken)
        for load in ops_named(function, "kv.tile_load"):
            if layout_of(load.result.type) in IN_SHARED:
                stage(load, function, stages, by_name(options.target), taken)
        if schedule.get("parts", 1) > 1 and not schedule.get(SWAPPED):  # else the tile is the instruction's A
            part_columns(function, schedule["parts"])
        for load in ops_named(function, "kv.tile_load_rows") if schedule.get("producer") else ():
            loop = enclosing(load, "scf.for")
            if layout_of(load.result.type) == SHARED and loop is not None and load.block == loop.regions[0].blocks[0]:
                stage_rows(load, function, stages, schedule.get("query_stages", 1), taken)
