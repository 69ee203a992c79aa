# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Indices of threads by role, and the vectors that a thread holds of a tile; for distribute-kv-tiles."""

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
    """The threads of a kernel by role. The SSA values are computed at the start of the kernel.

    Attributes
    ----------
    consumers : int
        Consumer warpgroups, which hold tiles.
    first : int
        The first consumer thread; producer warpgroups come before.
    block_thread : i32
        The thread within the block.
    thread : i32
        The thread among the consumers; negative in a producer.
    lane, warp, group : i32
        Lane of the warp; warp and warpgroup among the consumers, uniform over the warp.
    proxy : bool
        Whether products read shared memory through the async proxy, as wgmma does.
    across : int
        Stacks of warps (warps with different rows) that divide the columns of tiles; for a kernel the most of any tile
        (:meth:`split_like`).
    whole : bool
        Whether every warpgroup reads all rows of a tile in shared memory, as for operand B.
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
        """Make this thread's writes to shared memory visible to wgmma."""
        if self.proxy:
            ptx.fence_proxy_async()

    @property
    def warps(self) -> int:
        """Consumer warps."""
        return 4 * self.consumers

    def split_like(self, layout: RegisterLayout) -> Threads:
        """The same threads with the division of warps of one tile."""
        return replace(self, across=layout.warps_along(COLUMN))

    @property
    def share_all(self) -> bool:
        """Whether all consumers share the rows of tiles, instead of 64 rows per warpgroup."""
        return self.across > 1 or self.whole

    @property
    def stack(self) -> int:
        """The number of warps that divide the rows."""
        return self.warps // self.across

    @property
    def row_warp(self) -> Value:
        """The index of the warp among the warps that divide the rows."""
        return self.warp if self.across == 1 else self.warp & (self.stack - 1)

    @property
    def column_warp(self) -> Value:
        """The index of the warp's stack among those that divide the columns."""
        return self.warp >> (self.stack.bit_length() - 1)

    def own_rows(self, rows: int) -> tuple[Value, int, Value | int, int]:
        """(this thread, number of threads, first row, number of rows) of the threads that share rows of a tile.

        A warpgroup has 64 rows; all consumers have all rows if warps divide columns or tiles are read ``whole``.
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
    """The type of what a thread holds of a tile: elements, or words of four e4m3 elements (``tiles.products``)."""
    tile, registers = ir.RankedTensorType(type_), register_layout(type_).registers
    if held_as_words(type_):
        return ir.VectorType.get([registers // 4], ir.IntegerType.get_signless(32))
    return ir.VectorType.get([registers], tile.element_type)


def held_as_words(type_: ir.Type) -> bool:
    """Whether a thread holds words of four elements of a tile: f8e4m3 in the layout of wgmma's accumulator."""
    tile = ir.RankedTensorType(type_)
    if len(tile.shape) != 2 or not isinstance(tile.element_type, ir.Float8E4M3FNType):
        return False
    return layout_of(type_) == ACCUMULATORS[WGMMA] and tile.shape[1] % 16 == 0


# --- vectors -----------------------------------------------------------------------------------------


def elements(value: ir.Value) -> list[ir.Value]:
    """The elements of a vector, as scalars."""
    return list(vector.ToElementsOp(value).operation.results) if _lanes(value) else [value]


def from_elements(values: Sequence[ir.Value]) -> ir.Value:
    return vector.from_elements(ir.VectorType.get([len(values)], values[0].type), list(values))


def _lanes(value: ir.Value) -> int:
    return ir.VectorType(value.type).shape[0] if isinstance(value.type, ir.VectorType) else 0


def shuffled(value: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """A vector of some elements of another, in any order."""
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
    """Fold the elements of a vector to a scalar, as a tree."""
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
    """The warp of a thread, by a shuffle, so that the compiler knows it to be uniform over the warp."""
    return gpu.shuffle_idx(thread >> 5, 0)


def buffer_of(value: ir.Value) -> Buffer:
    """The kernel language's buffer of a memref."""
    type_ = ir.MemRefType(value.type)
    return Buffer(value, BufferSpec(by_mlir(str(type_.element_type)), type_.rank))


def scalar(value: ir.Value) -> Value:
    """The kernel language's value of an i32 SSA value."""
    return Value(value, i32)
