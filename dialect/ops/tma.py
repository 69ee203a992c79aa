# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies by the tensor memory accelerator (TMA): boxes of a cache to shared memory, signalled by an mbarrier.

A descriptor (``!kv.tma``) is built on the host by a cache's ``create_*_tile`` methods and bounds what can be reached;
the coordinates of an op select a box in it. A *load* copies one box of rows in all its column chunks, with one
instruction per chunk; chunk j goes to byte j * smem_rows * row bytes. One thread starts the load. The load reports its
bytes to an mbarrier (8 bytes of shared memory): one thread expects exactly the bytes to come (``kv.tma_expect``) before
it starts the copies, and every reader waits for the barrier's phase (``kv.tma_wait``). Out-of-bounds coordinates give
zeros, whose bytes count.

For kernels of fused operations the host makes the descriptor at launch: ``kv.tensor_map``, outside of kernels.

Targets: sm_90 and later; the gathers and ``cta_group = 2`` need sm_100a.
"""

from collections.abc import Sequence
from typing import Any

from mlir import ir

from .. import tma_layout, types, verify
from ..base import Kv
from ..effects import CACHE, MEMORY, READ, WRITE, Effect, EffectModel, Pure, UpdatesMemory
from ..ext import I32, I64, Operand, Result
from ..tma_layout import GATHERS, TmaSpec
from .common import as_i32, i64_attr

BEYOND = ("zero", "skip")
HALVES = ("key", "value")


class _Loads(EffectModel):
    """Reads a cache, writes shared memory and its mbarrier."""

    effects = (Effect(READ, CACHE), Effect(READ, MEMORY), Effect(WRITE, MEMORY))


class _Stores(EffectModel):
    """Reads shared memory, writes a cache."""

    effects = (Effect(READ, MEMORY), Effect(WRITE, CACHE))


class TensorMapOp(Kv.Operation, name="tensor_map", traits=[Pure]):
    """A TMA descriptor for tiles of a cache, collection or operand, made at launch. Outside of kernels only.

    Operands: handle; layer, i32, for a collection only. Attribute half: ``key`` or ``value`` of a collection; ``key``
    for other handles. Result: the descriptor, whose type defines the tile: form ``tiled``, with coordinates page, slot,
    head, column (for a ragged operand row, head, column) and one box per column chunk; or form ``token``, for heads
    that start at odd multiples of 8 bytes, with the columns of all heads. Elements past the head size, a page's slots
    or the pool's pages are zeros. A launch passes it as a kernel's argument. No effects.
    """

    handle: Operand[Any]
    layer: Operand[I32] | None = None
    half: ir.StringAttr
    map: Result[Any]

    def verify_invariants(self) -> bool:
        operands = list(self.operation.operands)
        spec = verify.handle(self, operands[0], verify.ANY_HANDLE)
        if spec is None or not verify.one_of(self, "half", HALVES):
            return False
        collection = types.type_name(operands[0].type) == "collection"
        if collection != (len(operands) == 2):
            return verify.fail(
                self,
                "takes a layer with a collection, and none with a cache or an operand, "
                f"got {len(operands) - 1} of {operands[0].type}",
            )
        if self.half.value == "value" and (not collection or spec.is_mla):
            return verify.fail(self, f"with half = value needs a collection with values, got {operands[0].type}")
        made = _descriptor(self, self.operation.results[0])
        if made is None:
            return False
        try:
            wanted = tma_layout.launch_tile(spec, made.rows, made.tile[-1], made.swizzle)
        except ValueError as error:
            return verify.fail(self, f"cannot describe the tile of {self.operation.results[0].type}: {error}")
        return made == wanted or verify.fail(
            self, f"result must be {types.tma_type(wanted)}, got {self.operation.results[0].type}"
        )


class TmaLoadOp(Kv.Operation, name="tma_load", traits=[_Loads]):
    """Start one load of a descriptor: its box of rows, in all column chunks, to shared memory.

    Operands: map; destination and barrier in shared memory; coordinates, by the descriptor's form: page, slot, head,
    column (``tiled`` and ``rope`` with pages); row, head, column (without pages); row, valid, head, column (``ragged``:
    rows from valid up are zeros); row0 to row3, column (``gather4``, ``rope_gather4``); line, column (``scale``).
    Attributes: smem_rows, rows of the tile in shared memory, which several loads may fill; cta_group, 1, or 2 for a CTA
    pair, whose barrier is the first CTA's at the same offset; multicast, a mask of the cluster's CTAs that receive the
    box and the barrier's count, 0 for this CTA only.
    Preconditions: the destination is a multiple of 128 bytes, and of the swizzle's period if the tile is read through
    ``shared_offset``; the barrier expects the load's bytes; one thread executes it.
    """

    map: Operand[Any]
    destination: Operand[Any]
    barrier: Operand[Any]
    coordinates: list[Operand[I32]]
    smem_rows: ir.IntegerAttr
    cta_group: ir.IntegerAttr
    multicast: ir.IntegerAttr

    def verify_invariants(self) -> bool:
        operands = list(self.operation.operands)
        spec = _descriptor(self, operands[0])
        if spec is None or not _in_shared(self, operands[1:3]):
            return False
        return _takes(self, spec, operands[3:]) and _chunks(self, spec) and _group(self)


class TmaLoadBoxOp(Kv.Operation, name="tma_load_box", traits=[_Loads]):
    """Start one copy of a descriptor: one box (for a gather, four rows) of one column chunk, to shared memory.

    Operands: map; destination and barrier in shared memory; policy, an optional i64 that sets how long the L2 retains
    the data (``kv.l2_policy``); coordinates as in kv.tma_load, with any column. Several threads may start their own
    boxes on one barrier. Attributes cta_group and multicast as in kv.tma_load. Preconditions: the destination is a
    multiple of 128 bytes; the barrier expects the box's bytes (rows * box columns * element bytes, zero fill included).
    """

    map: Operand[Any]
    destination: Operand[Any]
    barrier: Operand[Any]
    policy: Operand[I64] | None = None
    coordinates: list[Operand[I32]]
    cta_group: ir.IntegerAttr
    multicast: ir.IntegerAttr

    def verify_invariants(self) -> bool:
        operands = list(self.operation.operands)
        spec = _descriptor(self, operands[0])
        if spec is None or not _in_shared(self, operands[1:3]):
            return False
        return _takes(self, spec, list(self.coordinates)) and _group(self)


class TmaLoadTileOp(Kv.Operation, name="tma_load_tile", traits=[_Loads]):
    """Start the loads of the tokens [base, base + tile_rows) of a head, looked up in the page table.

    Operands: map, of the form ``tiled`` or ``rope``; cache, whose table is read; batch, head, base token; valid, the
    number of tokens that exist; column, the first; destination and barrier in shared memory. Attributes: tile_rows, a
    multiple of the box's rows; smem_rows, cta_group and multicast as in kv.tma_load; beyond, for boxes without any
    existing token: ``zero`` fills them with zeros, ``skip`` starts no load (the barrier must then not expect their
    bytes). A box with at least one existing token is loaded whole. Preconditions: base is a multiple of the box's rows;
    the map is one of this cache; otherwise as in kv.tma_load.
    """

    map: Operand[Any]
    cache: Operand[Any]
    batch: Operand[I32]
    head: Operand[I32]
    base: Operand[I32]
    valid: Operand[I32]
    column: Operand[I32]
    destination: Operand[Any]
    barrier: Operand[Any]
    tile_rows: ir.IntegerAttr
    smem_rows: ir.IntegerAttr
    cta_group: ir.IntegerAttr
    multicast: ir.IntegerAttr
    beyond: ir.StringAttr

    def verify_invariants(self) -> bool:
        operands = list(self.operation.operands)
        spec, cache = _descriptor(self, operands[0]), verify.handle(self, operands[1])
        if spec is None or cache is None or not _in_shared(self, operands[7:9]):
            return False
        for problem in tma_layout.tile_problems(spec, cache, self.tile_rows.value, self.smem_rows.value):
            return verify.fail(self, problem)
        return _group(self) and verify.one_of(self, "beyond", BEYOND)


class TmaStoreOp(Kv.Operation, name="tma_store", traits=[_Stores]):
    """Start one store of a descriptor's box of rows, in all column chunks, from shared memory.

    Operands: map, of the form ``tiled`` or ``ragged`` (rows from valid up are not written); source in shared memory;
    coordinates and attribute smem_rows as in kv.tma_load. Out-of-bounds elements are not written. Preconditions: the
    threads that wrote the source executed ``kv.fence_proxy_async`` before a barrier; the thread that starts the store
    waits for it before the source is overwritten.
    """

    map: Operand[Any]
    source: Operand[Any]
    coordinates: list[Operand[I32]]
    smem_rows: ir.IntegerAttr

    def verify_invariants(self) -> bool:
        operands = list(self.operation.operands)
        spec = _descriptor(self, operands[0])
        if spec is None or not _in_shared(self, operands[1:2]):
            return False
        if spec.form not in ("tiled", "ragged"):
            return verify.fail(self, f"takes a descriptor of the form tiled or ragged, got {spec.form}")
        return _takes(self, spec, operands[2:]) and _chunks(self, spec)


class TmaWaitStoresOp(Kv.Operation, name="tma_wait_stores", traits=[UpdatesMemory]):
    """Wait until at most ``pending`` of this thread's stores are in flight.

    Attributes: pending; read, whether to wait only until the sources have been read.
    """

    pending: ir.IntegerAttr
    read: ir.BoolAttr

    def verify_invariants(self) -> bool:
        if self.pending.value < 0:
            return verify.fail(self, f"pending must not be negative, got {self.pending}")
        return verify.boolean(self.read) is not None or verify.fail(self, f"read must be a bool, got {self.read}")


class TmaPrefetchOp(Kv.Operation, name="tma_prefetch", traits=[UpdatesMemory]):
    """Prefetch the descriptor itself into the cache that copies read it from."""

    map: Operand[Any]

    def verify_invariants(self) -> bool:
        return _descriptor(self, self.operation.operands[0]) is not None


class TmaInitBarrierOp(Kv.Operation, name="tma_init_barrier", traits=[UpdatesMemory]):
    """Initialise an mbarrier (8 bytes of shared memory) for ``arrivals`` arrivals per phase, visible to copies.

    One thread executes it, before a barrier of the block; ``kv.tma_expect`` is one arrival.
    """

    barrier: Operand[Any]
    arrivals: ir.IntegerAttr

    def verify_invariants(self) -> bool:
        if not 1 <= self.arrivals.value < 2**20:
            return verify.fail(self, f"arrivals must be from 1 to 1048575, got {self.arrivals}")
        return _in_shared(self, [self.operation.operands[0]])


class TmaExpectOp(Kv.Operation, name="tma_expect", traits=[UpdatesMemory]):
    """Expect exactly the bytes of ``loads`` loads of a descriptor at an mbarrier.

    Operands: map, barrier, loads. Attribute arrive: whether this is also the thread's arrival. For loads of several
    descriptors on one barrier, expect each of them, and arrive with the last.
    """

    map: Operand[Any]
    barrier: Operand[Any]
    loads: Operand[I32]
    arrive: ir.BoolAttr

    def verify_invariants(self) -> bool:
        operands = list(self.operation.operands)
        if _descriptor(self, operands[0]) is None or not _in_shared(self, operands[1:2]):
            return False
        return verify.boolean(self.arrive) is not None or verify.fail(self, f"arrive must be a bool, got {self.arrive}")


class TmaWaitOp(Kv.Operation, name="tma_wait", traits=[UpdatesMemory]):
    """Wait until the mbarrier's phase with this parity (0 for the first phase, then alternating) is complete."""

    barrier: Operand[Any]
    parity: Operand[I32]

    def verify_invariants(self) -> bool:
        return _in_shared(self, [self.operation.operands[0]])


# --- checks ------------------------------------------------------------------------------------------


def _descriptor(op: Any, value: ir.Value) -> TmaSpec | None:
    """The spec of an operand that must be a descriptor; None after an error."""
    try:
        return types.tma_spec_of(value.type)
    except ValueError as error:
        verify.fail(op, f"map must be a TMA descriptor: {error}")
        return None


def _in_shared(op: Any, pointers: Sequence[ir.Value]) -> bool:
    for pointer in pointers:
        if str(pointer.type) != "!llvm.ptr<3>":
            return verify.fail(op, f"tile and barrier must be in shared memory (!llvm.ptr<3>), got {pointer.type}")
    return True


def _takes(op: Any, spec: TmaSpec, given: Sequence[ir.Value]) -> bool:
    names = spec.coordinates
    return len(given) == len(names) or verify.fail(
        op,
        f"takes the coordinates {', '.join(names)} of a {spec.form} descriptor of rank {len(spec.box)}, "
        f"got {len(given)}",
    )


def _chunks(op: Any, spec: TmaSpec) -> bool:
    rows = op.smem_rows.value
    if rows < spec.rows:
        return verify.fail(op, f"smem_rows must be at least the box's {spec.rows} rows, got {op.smem_rows}")
    return (
        spec.copies == 1
        or rows * spec.row_bytes % 128 == 0
        or verify.fail(
            op, f"chunks must start at multiples of 128 bytes, got chunks of {rows} rows of {spec.row_bytes} bytes"
        )
    )


def _group(op: Any) -> bool:
    if op.cta_group.value not in (1, 2):
        return verify.fail(op, f"cta_group must be 1 or 2, got {op.cta_group}")
    return 0 <= op.multicast.value < 2**16 or verify.fail(
        op, f"multicast must be a mask of 16 bits, 0 for none, got {op.multicast}"
    )


# --- wrappers ----------------------------------------------------------------------------------------


def tensor_map(handle: ir.Value, spec: TmaSpec, layer: Any = None, half: str = "key") -> ir.Value:
    """A descriptor for tiles of a handle, made at launch."""
    made = TensorMapOp(
        handle=handle,
        layer=None if layer is None else as_i32(layer),
        half=ir.StringAttr.get(half),
        map=types.tma_type(spec),
    )
    return made.operation.results[0]


def tma_load(
    map: ir.Value, destination: ir.Value, barrier: ir.Value, coordinates: Sequence[Any], *,
    smem_rows: int | None = None, cta_group: int = 1, multicast: int = 0,
) -> None:  # fmt: skip
    """Start one load of a descriptor."""
    TmaLoadOp(
        map, destination, barrier, [as_i32(c) for c in coordinates], _smem_rows(map, smem_rows), i64_attr(cta_group),
        i64_attr(multicast),
    )  # fmt: skip


def tma_load_box(
    map: ir.Value, destination: ir.Value, barrier: ir.Value, coordinates: Sequence[Any], *,
    policy: ir.Value | None = None, cta_group: int = 1, multicast: int = 0,
) -> None:  # fmt: skip
    """Start one copy of a descriptor."""
    TmaLoadBoxOp(
        map=map, destination=destination, barrier=barrier, policy=policy, coordinates=[as_i32(c) for c in coordinates],
        cta_group=i64_attr(cta_group), multicast=i64_attr(multicast),
    )  # fmt: skip


def tma_load_tile(
    map: ir.Value, cache: ir.Value, place: Sequence[Any], destination: ir.Value, barrier: ir.Value, *,
    tile_rows: int, smem_rows: int | None = None, cta_group: int = 1, multicast: int = 0, beyond: str = "zero",
) -> None:  # fmt: skip
    """Start the loads of a tile of tokens; ``place`` is (batch, head, base, valid, column)."""
    batch, head, base, valid, column = [as_i32(x) for x in place]
    TmaLoadTileOp(
        map, cache, batch, head, base, valid, column, destination, barrier,
        i64_attr(tile_rows), i64_attr(smem_rows or tile_rows), i64_attr(cta_group), i64_attr(multicast),
        ir.StringAttr.get(beyond),
    )  # fmt: skip


def tma_store(map: ir.Value, source: ir.Value, coordinates: Sequence[Any], *, smem_rows: int | None = None) -> None:
    """Start one store of a descriptor."""
    TmaStoreOp(map, source, [as_i32(c) for c in coordinates], _smem_rows(map, smem_rows))


def tma_wait_stores(pending: int = 0, read: bool = False) -> None:
    """Wait for stores."""
    TmaWaitStoresOp(i64_attr(pending), ir.BoolAttr.get(read))


def tma_prefetch(map: ir.Value) -> None:
    """Prefetch a descriptor."""
    TmaPrefetchOp(map)


def tma_init_barrier(barrier: ir.Value, arrivals: int = 1) -> None:
    """Initialise an mbarrier."""
    TmaInitBarrierOp(barrier, i64_attr(arrivals))


def tma_expect(map: ir.Value, barrier: ir.Value, loads: Any = 1, arrive: bool = True) -> None:
    """Expect the bytes of loads at an mbarrier."""
    TmaExpectOp(map, barrier, as_i32(loads), ir.BoolAttr.get(arrive))


def tma_wait(barrier: ir.Value, parity: Any) -> None:
    """Wait for an mbarrier's phase."""
    TmaWaitOp(barrier, as_i32(parity))


def _smem_rows(map: ir.Value, rows: int | None) -> ir.IntegerAttr:
    spec = types.tma_spec_of(map.type)
    return i64_attr(rows or (spec.tile[0] if spec.form in GATHERS else spec.rows))
