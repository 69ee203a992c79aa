# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Expand ``kv.attention``, ``kv.attention_padded`` and ``kv.operand_attention``: choose a kernel and launch it.

Kinds, the ``kind`` entry of a schedule:

- ``host``: the host target's only one: the kernel over tiles, with as many rows as ``max_queries`` allows;
- ``simt``: one warp a query row; takes every case, on every GPU;
- ``prefill``: tiles of query rows with mma;
- ``decode``: few query rows a sequence, at the rate of the memory.

All but ``decode`` take operands. Without a kind: decode where ``max_queries`` (a schedule entry: no sequence has more
new tokens) times the group is few rows (:data:`DECODE_ROWS`) and the case fits it, else prefill where the case fits it,
else simt.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from mlir import ir

from . import attention_prefill, attention_rows, attention_tiles, expands
from .attention_common import Case
from .attention_queries import extents_of, heads_of, is_padded, row_count
from .base import Expansion

KINDS = ("host", "simt", "prefill", "decode")
# (most sequences, most query rows of a sequence and KV head) that count as a decode. With many sequences the tiles of
# prefill read keys of more rows once; with few it leaves multiprocessors idle.
DECODE_ROWS = ((16, 128), (1 << 31, 32))


def of_operands(op: Any) -> bool:
    """Whether keys and values are operands, and not a collection's layer."""
    return op.operation.name == "kv.operand_attention"


def case_of(op: Any, at: Expansion) -> Case:
    """The case of an attention."""
    spec = at.spec(op.keys if of_operands(op) else op.collection)
    return Case(
        spec=spec, query=at.dtype(op.query), out=at.dtype(op.out), heads=heads_of(op, at),
        value_size=spec.head_size, mask=op.mask.value, span=op.span.value, softcap=op.softcap.value,
        sinks=op.sinks is not None, lse=op.lse is not None, alibi=op.alibi_slopes is not None, padded=is_padded(op),
    )  # fmt: skip


def row_alignment(op: Any) -> int:
    """Bytes that every row of the operation's query and output is aligned to."""
    attributes = op.operation.attributes
    return ir.IntegerAttr(attributes["kv.row_alignment"]).value if "kv.row_alignment" in attributes else 16


def decode_module() -> Any:
    """The module of the decode kernel; None where there is none."""
    name = f"{__package__}.attention_decode"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def decodes(op: Any, case: Case, at: Expansion) -> bool:
    """Whether the decode kernel takes a case, whose most new tokens a sequence the schedule must say."""
    module, most = decode_module(), at.schedule.get("max_queries")
    if module is None or most is None or op.kv_offsets is not None or of_operands(op):
        return False
    return module.supports(case.spec, case.query, case.group, most, at.target, at.schedule.get("max_batch", 1024))


def kind_of(op: Any, at: Expansion, case: Case) -> str:
    """The schedule's kind, checked, or the choice for the target."""
    kind = at.schedule.get("kind")
    if kind is None:
        if at.target.is_host:
            return "host"
        most, batch = at.schedule.get("max_queries"), at.schedule.get("max_batch", 1024)
        rows = next(rows for batches, rows in DECODE_ROWS if batch <= batches)
        if most is not None and most * case.group <= rows and decodes(op, case, at):
            return "decode"
        return "prefill" if not attention_prefill.problems(case, at, row_alignment(op)) else "simt"
    if kind not in KINDS:
        raise ValueError(f"the schedule's kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if (kind == "host") != at.target.is_host:
        raise ValueError(
            f"the schedule's kind must {'' if at.target.is_host else 'not '}be host on {at.target.name}, got {kind!r}"
        )
    if kind == "prefill":
        for problem in attention_prefill.problems(case, at, row_alignment(op)):
            raise ValueError(f"a schedule of kind prefill {problem}")
    if kind == "decode" and not decodes(op, case, at):
        raise ValueError(
            "a schedule of kind decode needs max_queries, a collection, no kv_offsets, and a case that the decode "
            f"kernel takes; got {case.spec.dtype.name} with queries of {case.query.name}, head size {case.size}, "
            f"a group of {case.group}, max_queries {at.schedule.get('max_queries')}"
        )
    return kind


def operands(op: Any) -> list[ir.Value | None]:
    """The arguments of the row and prefill kernels."""
    source = [None, None, op.keys, op.values] if of_operands(op) else [op.collection, op.layer, None, None]
    return [*source, op.query, extents_of(op), op.kv_offsets, op.scale, op.out, op.sinks, op.lse, op.alibi_slopes]


@expands("kv.attention", "kv.attention_padded", "kv.operand_attention")
def expand(op: Any, at: Expansion) -> None:
    case = case_of(op, at)
    kind = kind_of(op, at, case)
    if kind == "decode":
        decode_module().expand_decode(op, at)
    elif kind == "prefill":
        attention_prefill.launch(case, at, op, operands(op))
    elif kind == "host" and attention_tiles.fits_host(case):  # of head size 1 there are no tiles
        attention_tiles.launch_host(case, at, op, operands(op))
    else:
        launch_rows(kind, case, at, op.query, operands(op))


def launch_rows(kind: str, case: Case, at: Expansion, query: ir.Value, args: list[ir.Value | None]) -> None:
    """Launch the host's or the warps' kernel over all query rows."""
    rows = row_count(query, at)
    if kind == "host":
        at.launch(attention_rows.host_kernel(case), args, (at.constant(case.heads), rows, 1), (1, 1, 1), key=case)
        return
    warps = attention_rows.WARPS
    blocks = (rows * case.heads + (warps - 1)) // warps
    at.launch(attention_rows.simt_kernel(case), args, (blocks, 1, 1), (32 * warps, 1, 1), key=case)
