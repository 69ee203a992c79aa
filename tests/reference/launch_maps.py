# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A program whose kernel reads tiles through descriptors made at launch, as a built-in operation's may.

``copies(...)`` is the artifact: of a collection's layer it copies boxes of keys and values to a buffer, of a cache or
an operand boxes of its rows. ``expected(...)`` says what must come, out of the blocks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mlir import ir
from mlir.dialects import func

import kvarn as kv
from kvarn.artifact import Artifact
from kvarn.compilation import driver as compiler, specialisation
from kvarn.compilation.specialisation import BufferType, HandleType, OperandType, ScalarType
from kvarn.dialect import layout
from kvarn.lowering import pipeline
from kvarn.lowering.kernels.base import Expansion
from kvarn.lowering.passes.kv.expand_kv_operations import kernel_module
from kvarn.lowering.target import by_name

from . import tma_kernels

THREADS = 64


@kv.kernel(block=THREADS)
def copy_boxes(keys: kv.TensorMap, values: kv.TensorMap, out, at: kv.Buffer[kv.i32, 2]):
    """Block (i, head): the tiles of the box at coordinates ``at[i]`` to ``out[0, i, head]`` and ``out[1, i, head]``."""
    i, head, barrier = kv.block_id.x, kv.block_id.y, kv.shared(1, kv.i64)
    k_tile, v_tile = kv.tma.shared_tile(keys), kv.tma.shared_tile(values)
    tma_kernels.spoil(k_tile)
    tma_kernels.spoil(v_tile)
    if kv.thread_id.x == 0:
        kv.tma.init_barrier(barrier)
        kv.tma.expect(keys, barrier, arrive=False)
        kv.tma.expect(values, barrier)
        where = (at[i, 0], at[i, 1], head, 0) if keys.spec.paged else (at[i, 0], head, 0)
        kv.tma.load(keys, where, k_tile, barrier)
        kv.tma.load(values, where, v_tile, barrier)
    kv.barrier()
    kv.tma.wait(barrier, 0)
    for j in range(kv.thread_id.x, keys.rows * keys.columns, kv.block_dim.x):
        row, column = j // keys.columns, j % keys.columns
        out[0, i, head, row, column] = (k_tile.ptr() + keys.offset(row, column)).load(keys.dtype)
        out[1, i, head, row, column] = (v_tile.ptr() + values.offset(row, column)).load(values.dtype)


@kv.kernel(block=THREADS)
def copy_by_lanes(keys: kv.TensorMap, values: kv.TensorMap, out, at: kv.Buffer[kv.i32, 2]):
    """Block (0, head): all boxes of ``at``, each column chunk of each by a lane of its own, through one barrier."""
    count, chunks = out.shape[1], keys.spec.copies
    head, lane, barrier = kv.block_id.y, kv.thread_id.x % 32, kv.shared(1, kv.i64)
    most = 32 // chunks
    k_tile, v_tile = kv.tma.shared_tile(keys, most * keys.rows), kv.tma.shared_tile(values, most * keys.rows)
    chunk_bytes = most * keys.box_bytes
    if kv.thread_id.x == 0:
        kv.mbarrier_init(barrier.ptr(), 1)
        kv.fence_mbarrier_init()
        kv.mbarrier_arrive_expect_tx(barrier.ptr(), count * (2 * chunks * keys.box_bytes))
    kv.barrier()
    if kv.thread_id.x < count * chunks:
        policy = kv.l2_policy("evict_first")
        i, chunk = lane // chunks, lane % chunks
        where = (at[i, 0], at[i, 1], head, chunk * keys.spec.box[-1])
        place = i * keys.box_bytes + chunk * chunk_bytes
        kv.tma.load_box(keys, where, k_tile.ptr() + place, barrier, l2_policy=policy)
        kv.tma.load_box(values, where, v_tile.ptr() + place, barrier)
    kv.tma.wait(barrier, 0)
    for j in range(kv.thread_id.x, count * (keys.rows * keys.columns), kv.block_dim.x):
        row, column = j // keys.columns, j % keys.columns
        i, r, offset = row // keys.rows, row % keys.rows, keys.offset(row, column, most * keys.rows)
        out[0, i, head, r, column] = (k_tile.ptr() + offset).load(keys.dtype)
        out[1, i, head, r, column] = (v_tile.ptr() + offset).load(values.dtype)


def program(
    operands: Sequence[tuple[str, OperandType]], expand: Callable[..., None], target: str = "sm_90a"
) -> Artifact:
    """The artifact of a function over operands whose launches ``expand(at, *operands)`` makes."""
    context, chip = compiler.context(), by_name(target)
    with compiler.diagnosed(context), context, ir.Location.name("program"):
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("program", ([t.mlir() for _, t in operands], []))
        function.attributes["kv.args"] = ir.ArrayAttr.get([specialisation.argument(n, t) for n, t in operands])
        kernels = kernel_module(module)
        with ir.InsertionPoint(function.add_entry_block()):
            expand(Expansion(function, kernels, chip, {}), *function.arguments)
            func.ReturnOp([])
        return compiler.lower(module, chip, pipeline.steps(chip))


def copies(spec: Any, kernel: Any = copy_boxes, **tile: Any) -> Artifact:
    """Boxes of a collection's layer, a cache or an operand: the arguments are (handle, layer, out, at).

    Parameters
    ----------
    spec : CollectionSpec, CacheSpec or OperandSpec
    tile
        As of ``Expansion.tensor_map``.
    """
    cache = spec if isinstance(spec, layout.CacheSpec) else spec.cache
    kind = {layout.CollectionSpec: "collection", layout.OperandSpec: "operand"}.get(type(spec), "cache")
    operands = [
        ("handle", HandleType(kind, cache)),
        ("layer", ScalarType(kv.i32)),
        ("out", BufferType(cache.dtype, (None,) * 5)),
        ("at", BufferType(kv.i32, (None, None))),
    ]

    def expand(at: Expansion, handle: Any, layer: Any, out: Any, where: Any) -> None:
        halves = [{"layer": layer, "half": half} for half in ("key", "value")] if kind == "collection" else [{}, {}]
        maps = [at.tensor_map(handle, **tile, **half) for half in halves]
        blocks = at.dim(out, 1) if kernel is copy_boxes else 1
        at.launch(kernel, [*maps, out, where], (blocks, cache.num_heads, 1), (THREADS, 1, 1))

    return program(operands, expand)


def expected(halves: Sequence[np.ndarray], at: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """What comes of boxes at ``at`` [n, 2] of each half [N, P, H, D]: [2, n, H, rows, columns], zeros out of bounds."""
    pages, slots, heads = halves[0].shape[:3]
    out = np.zeros((len(halves), len(at), heads, rows, columns), halves[0].dtype)
    for i, (page, slot) in enumerate(at):
        if 0 <= page < pages:
            there = max(0, min(rows, slots - slot))
            for half, blocks in enumerate(halves):
                box = blocks[page, slot : slot + there, :, :columns]
                out[half, i, :, :there, : box.shape[-1]] = np.swapaxes(box, 0, 1)
    return out
