# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the passes over tiles share: finding tile kernels, reading tile types, evaluating tiles at a point, cloning.

A kernel with tiles carries ``kv.tiled``; the front end writes it. ``kv.schedule`` on it holds the entries that the
passes read: ``consumers`` (warpgroups that multiply), ``producer`` (whether the block has others that copy),
``producers`` (how many then, 1), ``spare`` (bytes of shared memory that nobody has), and their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

from mlir import ir
from mlir.dialects import arith

from kvarn.dialect.ops.tile import layout_of, tile_of, tile_type
from kvarn.dialect.shared_layout import TILE_SWIZZLE
from kvarn.lowering.pass_base import fail
from kvarn.lowering.rewrite import defining_op, enclosing, kernels, ops_named, walk

WARP, WARPGROUP = 32, 128
WGMMA, MMA = "wgmma", "mma.sync"  # instructions of products, as schedules name them
ACCUMULATORS = {WGMMA: "wgmma", MMA: "mma"}  # the layout of results, by instruction
TRANSPOSED = "transposed"  # of a layout: that of the transpose is the one inside
SWAPPED = "swapped"  # of a schedule: accumulators are transposed, and the few rows of A are products' second operand
WARPGROUP_ROWS = 64  # of an accumulator
K_STEP_BYTES = 32  # of a row of A that an instruction takes
SWIZZLE = TILE_SWIZZLE
BARRIER_BYTES = 8  # of an mbarrier
BARRIERS_BYTES = 1024  # more than all barriers of a block take
JOINED = "kv.joined"  # on products that are started, but waited for with the next
ROW_SUMS = "kv.row_sums"  # on products with ones, of the weights that another product beside them takes
HIDES = "kv.hides"  # on products of which B may be anything, NaN too, where A is zero; the host has them
PROMOTED = "kv.promoted"  # on products: columns at a time that are added to the sums outside of the tensor cores
NO_PAGE = 1 << 30  # outside of every pool: copies of it by TMA are zeros
# Ops whose results are computed from their operands' elements at the same place.
_POSITIONS = ("kv.tile_index", "kv.tile_broadcast", "tensor.splat")
_ELEMENTWISE = ("arith.", "math.")


def tiled(module: ir.Module) -> Iterator[ir.Operation]:
    """The kernels of a module that compute with tiles."""
    for function in kernels(module):
        if "kv.tiled" in function.attributes:
            yield function


def splits_rows(op: ir.Operation) -> bool:
    """Whether query rows are split into terms, of the 8 bits that keys have, in the kernel that an op is or is in."""
    kernel = op if op.name == "gpu.func" else enclosing(op, "gpu.func")
    return kernel is not None and len(ops_named(kernel, "kv.tile_terms")) > 0


def schedule_of(function: ir.Operation) -> dict[str, Any]:
    """The entries of a kernel's schedule."""
    attributes = function.attributes
    if "kv.schedule" not in attributes:
        return {}
    found = {}
    for named in ir.DictAttr(attributes["kv.schedule"]):
        found[named.name] = bool(named.attr.value) if isinstance(named.attr, ir.BoolAttr) else named.attr.value
    return found


def instruction_of(function: ir.Operation) -> str:
    """The instruction of a kernel's products, once ``assign-kv-layouts`` has chosen it."""
    return schedule_of(function).get("instruction", WGMMA)


def producers_of(schedule: dict[str, Any]) -> int:
    """Warpgroups of a block that copy, as the entries of its kernel's schedule say; 0 where consumers do."""
    return schedule.get("producers", 1) if schedule.get("producer") else 0


def is_tile(value: ir.Value) -> bool:
    return isinstance(value.type, ir.RankedTensorType)


def is_transposed(type_: ir.Type) -> bool:
    """Whether a tile lies in registers as an accumulator whose operands were swapped."""
    return (layout_of(type_) or "").startswith(f"{TRANSPOSED}(")


def rank(value: ir.Value) -> int:
    """2 of a tile, 1 of a vector of tiles, 0 of anything else."""
    return ir.RankedTensorType(value.type).rank if is_tile(value) else 0


def shape(value: ir.Value) -> tuple[int, ...]:
    return tuple(ir.RankedTensorType(value.type).shape)


def element(value: ir.Value) -> ir.Type:
    return ir.RankedTensorType(value.type).element_type


def with_layout(value: ir.Value, layout: str | None) -> ir.Type:
    """A tile's type with another layout."""
    return tile_type(shape(value), element(value), layout)


def is_elementwise(op: ir.Operation) -> bool:
    """Whether an op computes every element of its one result from the operands' elements at the same place."""
    return op.name.startswith(_ELEMENTWISE) and len(op.results) == 1 and len(op.regions) == 0


def is_position(op: ir.Operation) -> bool:
    """Whether an op computes positions, of numbers and of others."""
    return op.name in _POSITIONS or is_elementwise(op)


def splat_of(value: ir.Value) -> Any:
    """The attribute of the one element that a constant tile repeats; None of anything else."""
    op = defining_op(value)
    if op is None or op.name != "arith.constant" or not is_tile(value):
        return None
    dense = ir.DenseElementsAttr(op.attributes["value"])
    return dense.get_splat_value() if dense.is_splat else None


def splat_tile(type_: ir.Type, value: ir.Value) -> ir.Value:
    """A tile, or a vector along its rows or columns, that repeats a number."""
    return ir.Operation.create("tensor.splat", [type_], [value]).result


def filled(type_: ir.Type, number: float) -> ir.Value:
    """A constant of floats, a tile or a vector, that repeats a number."""
    repeated = ir.FloatAttr.get(ir.ShapedType(type_).element_type, number)
    return arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, repeated))


def constant_int(value: ir.Value) -> int | None:
    """The number that an integer scalar, or every element of a tile, is known to be."""
    op = defining_op(value)
    if op is None:
        return None
    if op.name == "tensor.splat":
        return constant_int(op.operands[0])
    if op.name != "arith.constant":
        return None
    attribute = splat_of(value) if is_tile(value) else op.attributes["value"]
    return ir.IntegerAttr(attribute).value if isinstance(attribute, ir.IntegerAttr) else None


def attributes_of(op: ir.Operation) -> dict[str, ir.Attribute]:
    return {name: op.attributes[name] for name in op.attributes}


def users(value: ir.Value) -> list[ir.Operation]:
    """The ops that use a value, each once."""
    found: list[ir.Operation] = []
    for use in value.uses:
        owner = use.owner.operation
        if owner not in found:
            found.append(owner)
    return found


def is_second_operand(value: ir.Value) -> bool:
    """Whether a product reads a tile as B: every warp then reads all of its rows."""
    return any(use.owner.operation.name in ("kv.dot", "kv.dot_start") and use.operand_number == 1 for use in value.uses)


class AtPoint:
    """Elements of tiles as scalars, at the insertion point: ``at(value, row)`` of a vector, ``at(value, row, column)``.

    Only tiles that are computed from positions and scalars can be asked, such as indices and masks.
    """

    def __init__(self) -> None:
        self._found: dict[Any, ir.Value] = {}

    def __call__(self, value: ir.Value, *point: ir.Value) -> ir.Value:
        if not is_tile(value):
            return value
        key = (value, *point)
        if key not in self._found:
            self._found[key] = self._compute(value, point)
        return self._found[key]

    def _compute(self, value: ir.Value, point: tuple[ir.Value, ...]) -> ir.Value:
        op = defining_op(value)
        if op is not None and op.name == "kv.tile_index":
            return point[0]
        if op is not None and op.name == "tensor.splat":
            return op.operands[0]
        if op is not None and op.name == "kv.tile_broadcast":
            return self(op.operands[0], point[ir.IntegerAttr(op.attributes["dimension"]).value])
        if op is not None and op.name == "arith.constant":
            splat = splat_of(value)
            if splat is not None:
                return ir.Operation.create("arith.constant", [element(value)], [], {"value": splat}).result
        if op is not None and is_elementwise(op) and op.name != "arith.constant":
            operands = [self(x, *point) for x in op.operands]
            return ir.Operation.create(op.name, [element(value)], operands, attributes_of(op)).result
        if op is None:
            op = ir.BlockArgument(value).owner.owner.operation
            what = "hands on a tile that cannot be computed for one element"
        else:
            what = "cannot be computed for one element"
        fail(op, f"{what}: an index or mask of rows must come from positions and scalars")


def cloned(op: ir.Operation, values: dict[ir.Value, ir.Value]) -> ir.Operation:
    """A copy of an op with operands (inside regions too) replaced; ``values`` gets its results."""
    copy = op.clone()
    _rewire(copy, values)
    for old, new in zip(op.results, copy.results, strict=True):
        values[old] = new
    return copy


def emit(ops: list[ir.Operation], values: dict[ir.Value, ir.Value]) -> None:
    """Copies of ops at the insertion point, each at its own location; ``values`` gets their results."""
    for op in ops:
        with op.location:
            cloned(op, values)


def _rewire(op: ir.Operation, values: dict[ir.Value, ir.Value]) -> None:
    for i, operand in enumerate(op.operands):
        if operand in values:
            op.operands[i] = values[operand]
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                _rewire(inner.operation, values)


def drop(*values: ir.Value) -> None:
    """Erase what computes elements that nothing asks for; without the native part, upstream does not erase kv ops.

    Values of one pass go to one call: what computes one may be an operand of another, and be erased with it.
    """
    left, erased = list(values), set[ir.Value]()
    while left:
        value = left.pop()
        if value in erased:
            continue
        op = defining_op(value)
        if op is None or any(True for _ in value.uses):
            continue
        if is_elementwise(op) or op.name in ("kv.tile_broadcast", "kv.tile_ramp", "tensor.splat"):
            left += op.operands
            erased.update(op.results)
            op.erase()


def backward(roots: list[ir.Operation], within: Callable[[ir.Operation], bool]) -> Set[ir.Operation]:
    """The ops that some ops need, themselves too, as far as ``within`` holds; regions count with their op.

    They are in an order that the program gives, and not addresses in memory: passes make ops in it.
    """
    found: dict[ir.Operation, None] = {}
    stack = list(roots)
    while stack:
        op = stack.pop()
        if op in found:
            continue
        found[op] = None
        for inner in walk(op):
            for operand in inner.operands:
                maker = defining_op(operand)
                if maker is not None and within(maker):
                    stack.append(maker)
    return found.keys()


def score_of(gather: ir.Operation) -> ir.Operation:
    """The last op of a chain that only computes, from a gather on."""
    op = gather
    while True:
        following = users(op.results[0])
        if len(following) != 1:
            return op
        (user,) = following
        if user.block != op.block or not (is_elementwise(user) or user.name == "kv.tile_gather"):
            return op
        if rank(user.results[0]) != 2:
            return op
        op = user


__all__ = [
    "BARRIERS_BYTES", "BARRIER_BYTES", "MMA", "NO_PAGE", "SWIZZLE", "WARP", "WARPGROUP", "WARPGROUP_ROWS", "WGMMA",
    "AtPoint", "attributes_of", "backward", "cloned", "constant_int", "drop", "element", "filled", "instruction_of",
    "is_elementwise", "is_position", "is_tile", "is_transposed", "layout_of", "producers_of", "rank", "schedule_of",
    "shape", "splat_of", "tile_of", "tile_type", "tiled", "users", "with_layout",
]  # fmt: skip
