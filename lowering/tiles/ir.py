# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Helpers of the tile passes: finding tile kernels, reading tile types, evaluating tiles at a point, cloning.

The front end marks a kernel with tiles by ``kv.tiled``. Its ``kv.schedule`` holds the entries that the passes read:
``consumers`` (consumer warpgroups), ``producer`` (whether there are producer warpgroups), ``producers`` (their number,
1 by default), ``spare`` (unused bytes of shared memory), and entries of single passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

from mlir import ir
from mlir.dialects import arith

from kvarn.dialect.ops.tile import layout_of, tile_of, tile_type
from kvarn.dialect.schedules import WARPGROUP, producers_of
from kvarn.dialect.shared_layout import TILE_SWIZZLE
from kvarn.lowering.pass_base import fail
from kvarn.lowering.rewrite import defining_op, enclosing, kernels, ops_named, walk

WARP = 32
WGMMA, MMA = "wgmma", "mma.sync"  # MMA instructions, as schedules name them
ACCUMULATORS = {WGMMA: "wgmma", MMA: "mma"}  # the accumulator layout of each instruction
TRANSPOSED = "transposed"  # transposed(x): the layout of a tile whose transpose has layout x
SWAPPED = "swapped"  # schedule entry: operands are swapped, accumulators transposed, and A has few rows
WARPGROUP_ROWS = 64  # of an accumulator
K_STEP_BYTES = 32  # bytes of a row of A per instruction
SWIZZLE = TILE_SWIZZLE
BARRIER_BYTES = 8  # of an mbarrier
BARRIERS_BYTES = 1024  # an upper bound for all barriers of a block
JOINED = "kv.joined"  # on a product that is committed and awaited together with the next
ROW_SUMS = "kv.row_sums"  # on a product with ones, which sums the rows of another product's weights
HIDES = "kv.hides"  # on a product where A is zero wherever B may be NaN; host only
PROMOTED = "kv.promoted"  # on a product: columns per group that is added to the sums in f32 registers
NO_PAGE = 1 << 30  # a page outside of every pool: TMA fills it with zeros
# Ops that compute each element from the elements of their operands at the same index.
_POSITIONS = ("kv.tile_index", "kv.tile_broadcast", "tensor.splat")
_ELEMENTWISE = ("arith.", "math.")


def tiled(module: ir.Module) -> Iterator[ir.Operation]:
    """The kernels of a module that compute with tiles."""
    for function in kernels(module):
        if "kv.tiled" in function.attributes:
            yield function


def splits_rows(op: ir.Operation) -> bool:
    """Whether the kernel (an op, or the one around it) splits query rows into two 8-bit terms."""
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


def is_tile(value: ir.Value) -> bool:
    return isinstance(value.type, ir.RankedTensorType)


def is_transposed(type_: ir.Type) -> bool:
    """Whether a tile is in registers as the accumulator of swapped operands."""
    return (layout_of(type_) or "").startswith(f"{TRANSPOSED}(")


def rank(value: ir.Value) -> int:
    """2 for a tile, 1 for a row or column vector, 0 for anything else."""
    return ir.RankedTensorType(value.type).rank if is_tile(value) else 0


def shape(value: ir.Value) -> tuple[int, ...]:
    return tuple(ir.RankedTensorType(value.type).shape)


def element(value: ir.Value) -> ir.Type:
    return ir.RankedTensorType(value.type).element_type


def with_layout(value: ir.Value, layout: str | None) -> ir.Type:
    """The type of a tile with another layout."""
    return tile_type(shape(value), element(value), layout)


def is_elementwise(op: ir.Operation) -> bool:
    """Whether an op computes each element of its one result from its operands' elements at the same index."""
    return op.name.startswith(_ELEMENTWISE) and len(op.results) == 1 and len(op.regions) == 0


def is_position(op: ir.Operation) -> bool:
    """Whether an op may compute indices: tile indices, broadcasts, splats and arithmetic of them."""
    return op.name in _POSITIONS or is_elementwise(op)


def splat_of(value: ir.Value) -> Any:
    """The element of a constant splat tile, as an attribute; None for anything else."""
    op = defining_op(value)
    if op is None or op.name != "arith.constant" or not is_tile(value):
        return None
    dense = ir.DenseElementsAttr(op.attributes["value"])
    return dense.get_splat_value() if dense.is_splat else None


def splat_tile(type_: ir.Type, value: ir.Value) -> ir.Value:
    """A tile or vector filled with a scalar."""
    return ir.Operation.create("tensor.splat", [type_], [value]).result


def filled(type_: ir.Type, number: float) -> ir.Value:
    """A constant float tile or vector filled with a number."""
    repeated = ir.FloatAttr.get(ir.ShapedType(type_).element_type, number)
    return arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, repeated))


def constant_int(value: ir.Value) -> int | None:
    """The constant value of an integer scalar, or of all elements of a tile; None if it is not constant."""
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
    """Whether a product reads a tile as B, or as a transposed A, of which every warp reads all rows."""
    return any(
        (use.owner.operation.name in ("kv.dot", "kv.dot_start") and use.operand_number == 1)
        or use.owner.operation.name == "kv.tile_transpose"
        for use in value.uses
    )


class AtPoint:
    """Evaluates one element of a tile as a scalar, at the insertion point.

    ``at(value, row)`` for a vector, ``at(value, row, column)`` for a tile. The tile must be computed from tile indices
    and scalars, as row indices and masks are.
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
    """Clone an op with its operands mapped by ``values``, also inside regions; ``values`` then maps its results."""
    copy = op.clone()
    _rewire(copy, values)
    for old, new in zip(op.results, copy.results, strict=True):
        values[old] = new
    return copy


def emit(ops: list[ir.Operation], values: dict[ir.Value, ir.Value]) -> None:
    """Clone ops at the insertion point, each at its own location; ``values`` then maps their results."""
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
    """Erase ops that compute unused values; without the native part, MLIR's passes do not erase kv ops.

    Pass all values in one call: the op of one may be an operand of another, and be erased with it.
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
    """The backward slice of ``roots``, including them, through ops for which ``within`` holds; regions included.

    The order is deterministic: passes emit ops in it.
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
    """The last op of the chain of elementwise ops and gathers that starts at a gather."""
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
