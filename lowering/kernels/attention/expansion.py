# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Expand ``kv.attention``, ``kv.attention_padded`` and ``kv.operand_attention``: choose a kernel and launch it.

``dialect/schedules.py`` declares the kinds of kernels. Unless the schedule gives a kind, :func:`kind_of` chooses decode
if a sequence's query rows (``max_queries`` times the group) are few (:func:`decode_rows`) and decode supports the case,
otherwise tile if it supports the case, otherwise simt. ``select-kv-schedule`` calls it once per operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlir.dialects import arith

from kvarn.dialect.latent_layout import RowFormat
from kvarn.dialect.ops.attention import block_tile, score_of
from kvarn.dialect.schedules import MOST
from kvarn.lowering.index import Ix, const
from kvarn.lowering.schedules import attention as tile_schedule, decode as decode_schedule
from kvarn.lowering.schedules.limits import MOST_QUERIES, WARP_ROWS
from kvarn.lowering.schedules.tables import by_most, measured
from kvarn.lowering.target import Target
from kvarn.lowering.tiles.ir import WGMMA

from .. import expands
from ..base import Expansion
from ..common import BYTES, row_alignment
from . import kernel as attention_tiles, launch as tile_launch, rotated, rows as attention_rows
from .arguments import AttentionArguments
from .case import Case, Masking
from .decode import kernel as attention_decode
from .queries import batch_of, heads_of, is_padded, row_count

COLUMNS = 8  # of a row that are loaded or written together
WIDEST_ROWS = 16  # row alignment in bytes when a block mask is made: the attention's own is not known then
LISTED_KEYS = 64  # keys per tile of a decode's block mask, at least


def of_operands(op: Any) -> bool:
    """Whether keys and values are operands instead of a collection's layer."""
    return op.operation.name == "kv.operand_attention"


def case_of(op: Any, at: Expansion) -> Case:
    """The case of an attention operation."""
    spec = at.spec(op.keys if of_operands(op) else op.collection)
    return Case(
        RowFormat(spec), query=at.dtype(op.query), out=at.dtype(op.out), heads=heads_of(op, at),
        value_size=spec.head_size, mask=Masking(op.mask.value, op.span.value), softcap=op.softcap.value,
        score=score_of(op), alibi=op.alibi_slopes is not None, padded=is_padded(op),
        pages=getattr(op, "pages", None) is not None, blocks=block_tile(op),
        aligned=row_alignment(op) >= BYTES and spec.head_size % COLUMNS == 0,
    )  # fmt: skip


@dataclass(frozen=True)
class Place:
    """What the choice of a kernel depends on besides the case; ``of_operands``: keys and values are operands."""

    target: Target
    schedule: Mapping[str, Any]
    row_alignment: int
    of_operands: bool = False

    @staticmethod
    def of(op: Any, at: Expansion) -> Place:
        return Place(at.target, at.schedule, row_alignment(op), of_operands(op))

    @property
    def max_batch(self) -> int:
        return self.schedule.get("max_batch", decode_schedule.DecodeConfig.max_batch)

    @property
    def invariant(self) -> bool:
        return bool(self.schedule.get("batch_invariant"))

    @property
    def sequences(self) -> int:
        """The number of sequences that the choice may depend on; batch invariance forbids depending on the batch."""
        return MOST if self.invariant else self.max_batch


def decode_problems(case: Case, place: Place, max_batch: int, most: int | None = None) -> list[str]:
    """Why the decode kernel does not support a case, one sentence per reason; empty if it does.

    ``most``: the most new tokens of a sequence, if not the schedule's ``max_queries``.
    """
    most = place.schedule.get("max_queries") if most is None else most
    if most is None or place.of_operands:
        return ["needs max_queries and a collection"]
    found = decode_schedule.problems(case, most, place.target, max_batch, place.invariant)
    if case.blocks:
        rows, keys = case.blocks
        if rows < most * case.group:
            found.append(f"needs a block mask of tiles of {most * case.group} query rows or more, got {rows}")
        if keys % decode_schedule.LEAST_TILE:
            found.append(f"needs a block mask of tiles of a multiple of {decode_schedule.LEAST_TILE} keys, got {keys}")
    return found


def decode_rows(case: Case, place: Place, sequences: int) -> int:
    """The most query rows per sequence and KV head for which decode is chosen."""
    if case.pages:  # the alternatives are tiles no longer than a page, or one row at a time
        return MOST_QUERIES * WARP_ROWS
    table = "decode_rows_beside_unconverted_tiles" if _stored_tiles(case, place) else "decode_rows"
    narrow = case.spec.head_size <= measured("decode_narrow_columns", place.target)
    narrow = narrow and case.spec.converted and not case.spec.quantized
    if narrow and tile_schedule.instruction_for(case, place.target, {}) == WGMMA:
        table = "decode_rows_of_narrow_heads"
    return by_most(table, place.target, sequences)


def _stored_tiles(case: Case, place: Place) -> bool:
    """Whether kind tile supports a case and multiplies stored elements by wgmma without conversion.

    The measured thresholds between kernels assume wgmma.
    """
    stored = case.spec.dtype is case.query and not case.spec.quantized
    by_wgmma = stored and tile_schedule.instruction_for(case, place.target, {}) == WGMMA
    return by_wgmma and not tile_schedule.problems(case, place.target, place.row_alignment)


def few_rows(case: Case, place: Place, listed: bool = False) -> bool:
    """Whether a case counts as a decode; ``listed``: it has a block mask.

    Mask and score functions of few query rows use kind tile where it needs no conversion: that kind evaluates a mask
    function only where comparisons of positions do not decide.
    """
    most = place.schedule.get("max_queries")
    by_tiles = (case.functions or listed) and measured("functions_by_tiles", place.target)
    if most is None or (by_tiles and _stored_tiles(case, place)):
        return False
    return most * case.group <= decode_rows(case, place, place.sequences)


def few_queries(case: Case, place: Place) -> int:
    """The most new tokens of sequences that a kernel of kind decode has, next to a kernel for the others; 0: none.

    For batches whose sequences have any number of new tokens; with one sequence its rows decide the kernel.
    """
    fixed = "max_queries" in place.schedule or "kind" in place.schedule
    single = place.schedule.get("max_batch", 1) == 1 and not place.invariant
    by_wgmma = tile_schedule.instruction_for(case, place.target, {}) == WGMMA
    paid = (case.spec.converted or by_wgmma) and place.target.has("pdl")
    if fixed or single or not paid or place.of_operands:
        return 0
    # One new token, or as many as the columns of one product hold: more would cost all sequences instructions.
    columns = max(1, decode_schedule.COLUMNS // case.group)
    most = min(decode_rows(case, place, place.sequences) // case.group, columns)
    return most if most and not decode_problems(case, place, place.max_batch, most) else 0


def few_of_launch(op: Any, at: Expansion) -> Ix | None:
    """The most new tokens of sequences that a launch gives to a kernel of kind decode; None if none ever does.

    With a chosen schedule, 0 unless the sequences have on average less than a fourth of the longest one's new tokens:
    for a batch of prompts the second kernel is not worth its launch. Batch invariance forbids to look at the others.
    """
    few = at.schedule.get("decode_threshold", 0)
    if not few or not at.schedule["uneven"]:
        return at.constant(few) if few else None
    longest = at.field(op.collection, "max_seq_length").wide * batch_of(op, at)
    uneven = (row_count(op.query, at).wide * 4).below(longest)
    return Ix(arith.select(uneven, const(few), const(0)))


def kind_of(op: Any, at: Expansion, case: Case) -> str:
    """The schedule's kind, checked to support the case, or the choice for the target.

    Raises
    ------
    ValueError
        If the given kind does not support the case, or no kind satisfies the schedule's promises.
    """
    place = Place.of(op, at)
    if case.blocks:
        return _kind_with_blocks(case, place)
    kind = place.schedule.get("kind")
    if kind == "tile":
        problems = tile_schedule.problems(case, at.target, place.row_alignment, at.schedule) + _of_prior(op, case)
    else:
        problems = decode_problems(case, place, place.max_batch) if kind == "decode" else []
    for problem in problems:
        raise ValueError(f"a schedule of kind {kind} {problem}")
    if kind is not None:
        return kind
    if at.target.is_host:
        return "host"
    if few_rows(case, place):
        problems = decode_problems(case, place, place.max_batch)
        if not problems:
            return "decode"
        if place.invariant and not decode_problems(case, place, 1):
            raise ValueError(
                "batch_invariant cannot be guaranteed: fewer sequences have a kernel of kind decode, which "
                f"{problems[0]}; choose a kind"
            )
    problems = tile_schedule.problems(case, at.target, place.row_alignment) + _of_prior(op, case)
    return "simt" if problems else "tile"


def _of_prior(op: Any, case: Case) -> list[str]:
    """Why tiles do not continue a prior result: theirs is rotated until they end."""
    if case.spec.rotation and getattr(op, "prior", None) is not None:
        return ["needs no prior result over rotated heads, got one"]
    return []


def _kind_with_blocks(case: Case, place: Place) -> str:
    """The kind of an attention with a block mask, which every kind supports."""
    kind = place.schedule.get("kind")
    if place.target.is_host or kind == "simt":
        return kind or "host"
    if kind != "tile":
        problems = decode_problems(case, place, place.max_batch)
        if not problems and (kind == "decode" or few_rows(case, place, listed=True)):
            return "decode"
        for problem in problems if kind == "decode" else ():
            raise ValueError(f"a schedule of kind decode {problem}")
    problems = tile_schedule.problems(case, place.target, place.row_alignment)
    for problem in problems if kind == "tile" else ():
        raise ValueError(f"a schedule of kind tile {problem}")
    return "simt" if problems else "tile"


def block_extents(case: Case, place: Place) -> tuple[int, int]:
    """(query rows, keys) of an attention's tiles, which its block mask must use.

    Raises
    ------
    ValueError
        If the given kind does not support the case, or the schedule does not fit.
    """
    if place.target.is_host:
        return attention_tiles.host_rows(case, place.schedule), attention_tiles.host_keys(case)
    kind, of_rows = place.schedule.get("kind"), (attention_tiles.HOST_ROWS, attention_tiles.host_keys(case))
    if kind == "simt":
        return of_rows
    if kind == "decode" or (kind is None and few_rows(case, place, listed=True)):
        found = _decode_extents(case, place.schedule)
        problems = decode_problems(replace(case, blocks=found), place, place.max_batch)
        if not problems:
            return found
        for problem in problems if kind == "decode" else ():
            raise ValueError(f"a schedule of kind decode {problem}")
    problems = tile_schedule.problems(case, place.target, place.row_alignment)
    for problem in problems if kind == "tile" else ():
        raise ValueError(f"a schedule of kind tile {problem}")
    if problems:
        return of_rows
    config = tile_schedule.chosen(case, place.target, place.schedule, by_user=True)
    return config.rows, config.keys


def _decode_extents(case: Case, schedule: Mapping[str, Any]) -> tuple[int, int]:
    """(rows of a sequence and KV head, keys) of a decode's block mask; keys are tiles that divide a page."""
    most = schedule.get("max_queries", 1)
    of_keys = decode_schedule.DecodeConfig(replace(case, pages=False), most)
    keys = max(LISTED_KEYS, schedule.get("tile", decode_schedule.tile_of(of_keys)))
    return max(2, most * case.group), math.gcd(keys, case.spec.page_size) if case.pages else keys


def slower_than(op: Any, at: Expansion, case: Case, kind: str) -> list[str]:
    """Why a faster kind was not chosen, one sentence per reason; empty for the fastest kind."""
    if at.target.is_host or "kind" in at.schedule:
        return []
    place, most, found = Place.of(op, at), at.schedule.get("max_queries"), []
    few = most is not None and most * case.group <= decode_rows(case, place, place.max_batch)
    if kind != "decode" and few and not case.blocks:
        found += [f"a kernel of kind decode {problem}" for problem in decode_problems(case, place, place.max_batch)]
    if kind == "simt":
        problems = tile_schedule.problems(case, at.target, place.row_alignment)
        found += [f"a kernel of kind tile {problem}" for problem in problems]
    return found


@expands("kv.attention", "kv.attention_padded", "kv.operand_attention")
def expand(op: Any, at: Expansion) -> None:
    case, kind = case_of(op, at), at.kind
    if kind == "decode":
        attention_decode.launch(case, at, op)()
    elif kind == "tile":
        config, few = tile_schedule.configured(case, at.target, at.schedule), few_of_launch(op, at)
        rotation = case.spec.rotation
        if rotation:
            rotated.rotate(case, at, op, op.query, few)
        combine = None if few is None else attention_decode.launch(case, at, op, few)
        tile_launch.launch(config, at, op, few)
        if combine is not None:
            combine()
        if rotation:
            rotated.rotate(case, at, op, op.out, few)
    elif kind == "host" and attention_tiles.fits_host(case):  # there are no tiles of head size 1
        attention_tiles.launch_host(case, at, op)
    else:
        launch_rows(kind, case, at, op)


def launch_rows(kind: str, case: Case, at: Expansion, op: Any) -> None:
    """Launch the host's or the simt kernel over all query rows."""
    rows, args = row_count(op.query, at), [AttentionArguments.of(op)]
    if kind == "host":
        at.launch(attention_rows.host_kernel(case), args, (at.constant(case.heads), rows, 1), (1, 1, 1), key=case)
        return
    warps = attention_rows.WARPS
    blocks = (rows * case.heads + (warps - 1)) // warps
    at.launch(attention_rows.simt_kernel(case), args, (blocks, 1, 1), (32 * warps, 1, 1), key=case)
