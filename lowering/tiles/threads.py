# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where threads stand in a kernel over tiles, and the vectors that they hold of one: for distribute-kv-tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from mlir import ir
from mlir.dialects import arith, vector

from kvarn.dialect import tile_layout
from kvarn.dialect.dtypes import by_mlir, i32
from kvarn.dialect.ops.tile import SHARED_TRANSPOSED
from kvarn.dialect.register_layout import COLUMN, RegisterLayout
from kvarn.dialect.shared_layout import SharedLayout
from kvarn.dsl import gpu, ptx
from kvarn.dsl.memory import Buffer, BufferSpec
from kvarn.dsl.values import Value

from .ir import ACCUMULATORS, SWIZZLE, WARP, WARPGROUP, WARPGROUP_ROWS, WGMMA, layout_of


@dataclass
class Threads:
    """A kernel's threads by role. Values are made at the kernel's start.

    Attributes
    ----------
    consumers : int
        Warpgroups that hold tiles.
    first : int
        The first thread of the consumers, behind those of the producer's warpgroups.
    thread : i32
        Of the consumers; of the block in the producer.
    lane, warp, group : i32
        In the warp; warp and warpgroup of the consumers, the same for all threads of the warp.
    proxy : bool
        Whether products read shared memory by the asynchronous proxy, as wgmma's do.
    across : int
        Stacks of warps that stand beside one another, and share the columns of tiles; of a kernel the most that any
        tile has (:meth:`beside`).
    whole : bool
        Whether each of several warpgroups reads all rows of a tile in shared memory, as of a product's second operand.
    """

    consumers: int
    first: int
    block_thread: Value
    thread: Value
    lane: Value
    warp: Value
    group: Value
    proxy: bool = True
    across: int = 1
    whole: bool = False

    @staticmethod
    def of(consumers: int, producers: int, proxy: bool = True, across: int = 1) -> Threads:
        first = WARPGROUP * producers
        block_thread = gpu.thread_id.x
        thread = block_thread - first
        warp = gpu.shuffle_idx(thread >> 5, 0)
        lane = block_thread & (WARP - 1)
        return Threads(consumers, first, block_thread, thread, lane, warp, warp >> 2, proxy, across)

    def fence(self) -> None:
        """What this thread wrote to shared memory is there for its products."""
        if self.proxy:
            ptx.fence_proxy_async()

    @property
    def warps(self) -> int:
        """Warps of the consumers."""
        return 4 * self.consumers

    def beside(self, layout: RegisterLayout) -> Threads:
        """The same threads as they stand for a tile."""
        return replace(self, across=layout.warps_along(COLUMN))

    @property
    def share_all(self) -> bool:
        """Whether all warps share the rows of tiles, not those of a warpgroup its own."""
        return self.across > 1 or self.whole

    @property
    def stack(self) -> int:
        """Warps that have other rows than one another."""
        return self.warps // self.across

    @property
    def row_warp(self) -> Value:
        """The warp's place among those."""
        return self.warp if self.across == 1 else self.warp & (self.stack - 1)

    @property
    def column_warp(self) -> Value:
        """Which of the stacks beside one another the warp belongs to."""
        return self.warp >> (self.stack.bit_length() - 1)

    def own_rows(self, rows: int) -> tuple[Value, int, Value | int, int]:
        """(this thread, how many there are, their first row, rows) of those that share rows of a tile.

        A warpgroup has 64 rows; all warps have all of them where they stand beside others, or tiles are read ``whole``.
        """
        if self.share_all:
            return self.thread, WARPGROUP * self.consumers, 0, rows
        return self.thread & (WARPGROUP - 1), WARPGROUP, self.group * WARPGROUP_ROWS, WARPGROUP_ROWS


def register_layout(type_: ir.Type) -> RegisterLayout:
    """The layout of a tile in registers."""
    tile = ir.RankedTensorType(type_)
    return tile_layout.parse(layout_of(type_), tuple(tile.shape))


def shared_layout(type_: ir.Type, stages: int = 1) -> SharedLayout:
    """The layout of a tile in shared memory."""
    tile = ir.RankedTensorType(type_)
    rows, columns = reversed(tile.shape) if layout_of(type_) == SHARED_TRANSPOSED else tile.shape
    return SharedLayout(rows, columns, itemsize(tile.element_type), SWIZZLE, stages)


def itemsize(element: ir.Type) -> int:
    text = str(element)
    return {"i1": 1, "bf16": 2}.get(text) or int("".join(c for c in text.partition("E")[0] if c.isdigit())) // 8


def vector_type(type_: ir.Type) -> ir.Type:
    """What a thread holds of a tile: of what products take as 8-bit elements, their words (``tiles.products``)."""
    tile, registers = ir.RankedTensorType(type_), register_layout(type_).registers
    if held_as_words(type_):
        return ir.VectorType.get([registers // 4], ir.IntegerType.get_signless(32))
    return ir.VectorType.get([registers], tile.element_type)


def held_as_words(type_: ir.Type) -> bool:
    """Whether a thread holds words of a tile, not elements: of f8e4m3 in accumulators of whole words."""
    tile = ir.RankedTensorType(type_)
    if len(tile.shape) != 2 or not isinstance(tile.element_type, ir.Float8E4M3FNType):
        return False
    return layout_of(type_) == ACCUMULATORS[WGMMA] and tile.shape[1] % 16 == 0


# --- vectors -----------------------------------------------------------------------------------------


def elements(value: ir.Value) -> list[ir.Value]:
    """The lanes of a vector."""
    return list(vector.ToElementsOp(value).operation.results) if _lanes(value) else [value]


def from_elements(values: Sequence[ir.Value]) -> ir.Value:
    return vector.from_elements(ir.VectorType.get([len(values)], values[0].type), list(values))


def _lanes(value: ir.Value) -> int:
    return ir.VectorType(value.type).shape[0] if isinstance(value.type, ir.VectorType) else 0


def shuffled(value: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """A vector of some lanes of another, in any order."""
    if list(lanes) == list(range(_lanes(value))):
        return value
    return vector.shuffle(value, value, list(lanes))


def numbers(values: Sequence[int]) -> ir.Value:
    """A constant i32 vector."""
    return _constants(map(str, values), ir.VectorType.get([len(values)], ir.IntegerType.get_signless(32)))


def floats(values: Sequence[float]) -> ir.Value:
    """A constant f32 vector."""
    return _constants((f"{float(x):e}" for x in values), ir.VectorType.get([len(values)], ir.F32Type.get()))


def _constants(texts: Iterable[str], type_: ir.Type) -> ir.Value:
    return arith.constant(type_, ir.Attribute.parse(f"dense<[{', '.join(texts)}]> : {type_}"))


def splat(value: ir.Value, lanes: int) -> ir.Value:
    return vector.broadcast(ir.VectorType.get([lanes], value.type), value)


def folded(value: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """All lanes of a vector folded in a tree, a scalar."""
    lanes = _lanes(value)
    while lanes > 1:
        half = lanes // 2
        low, high = shuffled(value, range(half)), shuffled(value, range(half, 2 * half))
        rest = vector.extract(value, [], [lanes - 1]) if lanes % 2 else None
        value, lanes = combine(low, high), half
        if rest is not None:
            value = from_elements([*elements(value), rest])
            lanes += 1
    return vector.extract(value, [], [0])


def warp_of(thread: Value) -> Value:
    """The warp of a thread among those that copy, known to be the same for all of its lanes."""
    return gpu.shuffle_idx(thread >> 5, 0)


def buffer_of(value: ir.Value) -> Buffer:
    """A memref as a buffer of the kernel language."""
    type_ = ir.MemRefType(value.type)
    return Buffer(value, BufferSpec(by_mlir(str(type_.element_type)), type_.rank))


def scalar(value: ir.Value) -> Value:
    """An i32 SSA value as one of the kernel language."""
    return Value(value, i32)
