# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Expand ``kv.attention``, ``kv.attention_padded`` and ``kv.operand_attention``: choose a kernel and launch it.

The kinds of kernels are declared in ``dialect/schedules.py``. Without a kind in the schedule, :func:`kind_of` takes
decode where ``max_queries`` (no sequence has more new tokens) times the group is few rows (:func:`decode_rows`) and the
case fits it, else tile where the case fits it, else simt. ``select-kv-schedule`` asks it, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlir import ir

from kvarn.dialect.ops.attention import arrays_of, block_tile, score_of
from kvarn.lowering.target import Target
from kvarn.lowering.tile_ir import WGMMA

from . import (
    attention_decode,
    attention_rows,
    attention_tiles,
    decode_schedule,
    expands,
    tile_schedule,
)
from .attention_common import Case
from .attention_queries import extents_of, heads_of, is_padded, row_count
from .base import Expansion
from .common import row_alignment
from .decode_schedule import MOST_QUERIES, WARP_ROWS

# (most sequences, most query rows of a sequence and KV head) that count as a decode. Beside tiles by mma.sync: of many
# sequences those read the keys of more rows once. Beside tiles by wgmma: a warp of a decode has 16 rows, and keys of
# more are read twice (H200, 32 rows: 8 x 8k 81 against 70 us, 64 x 4k 267 against 252 us, 1 x 32k 48 against 40 us; of
# one shorter sequence the start of a tile counts for more).
DECODE_ROWS = ((16, 128), (1 << 31, 32))
DECODE_ROWS_BESIDE_TILES = ((4, 32), (1 << 31, 16))
WIDEST_ROWS = 16  # bytes that rows are aligned to where a block mask is made: those of attention may be others


def of_operands(op: Any) -> bool:
    """Whether keys and values are operands, and not a collection's layer."""
    return op.operation.name == "kv.operand_attention"


def pages_of(op: Any) -> list[ir.Value | None]:
    """The lists of pages of an attention and their counts; operands have none."""
    return [None, None] if of_operands(op) else [op.pages, op.page_counts]


def case_of(op: Any, at: Expansion) -> Case:
    """The case of an attention."""
    spec = at.spec(op.keys if of_operands(op) else op.collection)
    return Case(
        spec=spec, query=at.dtype(op.query), out=at.dtype(op.out), heads=heads_of(op, at),
        value_size=spec.head_size, mask=op.mask.value, span=op.span.value, softcap=op.softcap.value,
        score=score_of(op), sinks=op.sinks is not None, lse=op.lse is not None, alibi=op.alibi_slopes is not None,
        padded=is_padded(op), pages=pages_of(op)[0] is not None, blocks=block_tile(op),
    )  # fmt: skip


def decode_problems(op: Any, case: Case, at: Expansion, max_batch: int) -> list[str]:
    """Why the decode kernel does not take a case, one sentence each; empty when it does."""
    most = at.schedule.get("max_queries")
    if most is None or of_operands(op):
        return ["needs max_queries and a collection"]
    return decode_schedule.problems(case.spec, case.query, case.group, most, at.target, max_batch)


def decode_rows(op: Any, at: Expansion, case: Case, sequences: int) -> int:
    """The most query rows of a sequence and KV head for which a decode is taken."""
    if case.pages:  # beside it are kernels of tiles no longer than a page, or of a row at a time
        return MOST_QUERIES * WARP_ROWS
    stored = case.spec.dtype is case.query and not case.spec.quantized and _by_wgmma(case, at)
    tiles = stored and not tile_schedule.problems(case, at.target, row_alignment(op))
    table = DECODE_ROWS_BESIDE_TILES if tiles else DECODE_ROWS
    return next(rows for batches, rows in table if sequences <= batches)


def _by_wgmma(case: Case, at: Expansion) -> bool:
    """Whether tiles are multiplied by wgmma, with which the lines between kernels were measured."""
    return tile_schedule.instruction_for(case, at.target, {}) == WGMMA


def functions_by_tiles(op: Any, at: Expansion, case: Case) -> bool:
    """Whether functions of few query rows are for kind tile, which asks a mask only where comparisons do not tell.

    Measured on an H200, 64 x 4k of bf16 with 4 rows: kind tile takes 1.00 to 1.03 times what a plain decode takes, with
    masks and scores that compute, and 2.0 times over pages of 8 bits, which it converts.
    """
    stored = case.spec.dtype is case.query and not case.spec.quantized and _by_wgmma(case, at)
    return case.functions and stored and not tile_schedule.problems(case, at.target, row_alignment(op))


def kind_of(op: Any, at: Expansion, case: Case) -> str:
    """The schedule's kind, which takes the case, or the choice for the target.

    Raises
    ------
    ValueError
        If the kind that is given does not take the case, or none can keep what the schedule promises.
    """
    if case.blocks:
        return _kind_with_blocks(op, at, case)
    kind, max_batch = at.schedule.get("kind"), at.schedule.get("max_batch", decode_schedule.Config.max_batch)
    if kind == "tile":
        problems = tile_schedule.problems(case, at.target, row_alignment(op), at.schedule)
    else:
        problems = decode_problems(op, case, at, max_batch) if kind == "decode" else []
    for problem in problems:
        raise ValueError(f"a schedule of kind {kind} {problem}")
    if kind is not None:
        return kind
    if at.target.is_host:
        return "host"
    # A promise that nothing follows the batch holds for the choice of the kernel too.
    invariant = at.schedule.get("batch_invariant", False)
    most, sequences = at.schedule.get("max_queries"), DECODE_ROWS[-1][0] if invariant else max_batch
    rows = 0 if functions_by_tiles(op, at, case) else decode_rows(op, at, case, sequences)
    if most is not None and most * case.group <= rows:
        problems = decode_problems(op, case, at, max_batch)
        if not problems:
            return "decode"
        if invariant and not decode_problems(op, case, at, 1):
            raise ValueError(
                f"batch_invariant cannot be kept: fewer sequences have a kernel of kind decode, which {problems[0]}; "
                "choose a kind"
            )
    return "simt" if tile_schedule.problems(case, at.target, row_alignment(op)) else "tile"


def _kind_with_blocks(op: Any, at: Expansion, case: Case) -> str:
    """The kind of an attention with a block mask, which only kernels over tiles have."""
    kind, only = at.schedule.get("kind"), "host" if at.target.is_host else "tile"
    if kind not in (None, only):
        raise ValueError(f"block_mask needs a schedule of kind {only}, got {kind}: leave the kind or block_mask out")
    for problem in why_no_blocks(case, at.target, row_alignment(op)):
        raise ValueError(f"block_mask {problem}: leave it out, and give the mask alone")
    return only


def why_no_blocks(case: Case, target: Target, row_alignment: int) -> list[str]:
    """Why a case has no kernel that takes a block mask, one sentence each; empty when it has one."""
    return [] if target.is_host else tile_schedule.problems(case, target, row_alignment)


def block_extents(case: Case, target: Target, schedule: Mapping[str, Any]) -> tuple[int, int]:
    """(query rows, keys) of a tile of an attention, which are those of its block mask.

    Raises
    ------
    ValueError
        If no kernel of the target takes one, or the schedule does not fit.
    """
    for problem in why_no_blocks(case, target, WIDEST_ROWS):
        raise ValueError(f"a block mask {problem}: give the mask to attention alone")
    if target.is_host:
        return attention_tiles.host_rows(case, schedule), attention_tiles.host_keys(case)
    config = tile_schedule.chosen(case, target, schedule)
    return config.rows, config.keys


def slower_than(op: Any, at: Expansion, case: Case, kind: str) -> list[str]:
    """Why a kernel of this kind was chosen where another would be faster, one sentence each; empty for the fastest."""
    if at.target.is_host or "kind" in at.schedule or case.blocks:
        return []
    most, sequences = at.schedule.get("max_queries"), at.schedule.get("max_batch", decode_schedule.Config.max_batch)
    rows = decode_rows(op, at, case, sequences)
    found = []
    if kind != "decode" and most is not None and most * case.group <= rows:
        found += [f"a kernel of kind decode {problem}" for problem in decode_problems(op, case, at, sequences)]
    if kind == "simt":
        problems = tile_schedule.problems(case, at.target, row_alignment(op))
        found += [f"a kernel of kind tile {problem}" for problem in problems]
    return found


def operands(op: Any) -> list[ir.Value | None]:
    """The arguments that the kernels of rows and of tiles begin with."""
    source = [None, None, op.keys, op.values] if of_operands(op) else [op.collection, op.layer, None, None]
    rest = [op.query, extents_of(op), op.kv_offsets, op.scale, op.out, op.sinks, op.lse, op.alibi_slopes]
    return [*source, *rest, op.prior, op.prior_lse]


@expands("kv.attention", "kv.attention_padded", "kv.operand_attention")
def expand(op: Any, at: Expansion) -> None:
    case, kind = case_of(op, at), at.kind
    if kind == "decode":
        attention_decode.expand_decode(op, at)
    elif kind == "tile":
        config = tile_schedule.chosen(case, at.target, at.schedule)
        source = (op.keys, op.values, None) if of_operands(op) else (op.collection, op.collection, op.layer)
        tile_schedule.launch(config, at, op, operands(op), source, [*pages_of(op), op.block_mask])
    elif kind == "host" and attention_tiles.fits_host(case):  # of head size 1 there are no tiles
        attention_tiles.launch_host(case, at, op, operands(op), [*pages_of(op), op.block_mask])
    else:
        launch_rows(kind, case, at, op.query, operands(op) + pages_of(op) + arrays_of(op))


def launch_rows(kind: str, case: Case, at: Expansion, query: ir.Value, args: list[ir.Value | None]) -> None:
    """Launch the host's or the warps' kernel over all query rows."""
    rows = row_count(query, at)
    if kind == "host":
        at.launch(attention_rows.host_kernel(case), args, (at.constant(case.heads), rows, 1), (1, 1, 1), key=case)
        return
    warps = attention_rows.WARPS
    blocks = (rows * case.heads + (warps - 1)) // warps
    at.launch(attention_rows.simt_kernel(case), args, (blocks, 1, 1), (32 * warps, 1, 1), key=case)
