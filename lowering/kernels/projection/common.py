# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the kernels of kv.project_append share: the case, bands of columns, scales, and the finishing kernel.

:class:`Projection` is what a kernel is specialised for. :func:`finish` launches the kernel that writes the heads of
products that another kernel has stored in a workspace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlir import ir

from kvarn import dsl as kv
from kvarn.dialect import ops
from kvarn.dialect.dtypes import DType, bf16, f8e4m3, f16
from kvarn.dialect.layout import CacheSpec, cdiv
from kvarn.dialect.ops.projection import Band, bands_of, k_of, rounding_of
from kvarn.lowering.schedules.limits import columns_at_a_time
from kvarn.lowering.target import Target
from kvarn.lowering.tiles.ir import SWIZZLE, WARPGROUP, WARPGROUP_ROWS

from ..append.head_writer import HeadWriter, Norm, TokenItems
from ..append.quantize import Quantizer
from ..base import Expansion
from ..common import (
    CachedHead,
    Group,
    Head,
    Rows,
    StoredHead,
    Work,
    head_and_lane,
    in_range,
    most_lanes,
    row_alignment,
    sequence_of,
    starts_early,
    vector_width,
    whole_warps,
)
from ..rope.rotation import Angles, Rotation
from .groups import computed_with

MANY = 1 << 16  # tokens, if their number is not known
FEW = 256  # tokens up to which several blocks write the heads of one token
STEPS_OF_ATOM = [0, 32, 64, 96]  # byte offsets of a swizzle atom's k-steps
PROMOTED, LEAST_PROMOTED = 192, 64  # 8-bit products of up to 192 columns are added at once; others by 64


@dataclass(frozen=True)
class Projection:
    """What the kernels of an operation are specialised for.

    Attributes
    ----------
    x, rounded : DType
        The type of the operands; the type that products are rounded to.
    k : int
    bands : tuple of Band
    spec, index : CacheSpec
        The specs of the cache and of the indexer's cache (or None).
    scaling : str
        As in the operation; ``total`` after dequantization of group scales, if one number multiplies all products.
    bias, padded : bool
    total : bool
        Whether there is such a number.
    """

    x: DType
    rounded: DType
    k: int
    bands: tuple[Band, ...]
    spec: CacheSpec
    index: CacheSpec | None
    scaling: str
    bias: bool
    padded: bool
    total: bool = False

    @staticmethod
    def of(op: Any, at: Expansion) -> Projection:
        spec = at.spec(op.collection)
        index = None if op.index_collection is None else at.spec(op.index_collection)
        columns, k = at.static_dim(op.weight, 0), k_of(op, op.weight)
        of_index = None if index is None else (index, op.heads_of(op.index_query_out))
        bands = bands_of(spec, columns, op.heads_of(op.query_out), of_index)
        assert not isinstance(bands, str), bands
        rounded = rounding_of(op)
        padded = op.operation.name == "kv.project_append_padded"
        scaling, x = op.scaling.value, at.dtype(op.x)
        if scaling == "group":
            x = computed_with(op, at)
        return Projection(
            x, rounded, k, tuple(bands), spec, index, scaling, op.bias is not None, padded, op.tensor_scale is not None
        )

    @property
    def columns(self) -> int:
        return self.bands[-1].end

    def band(self, kind: str) -> Band | None:
        return next((b for b in self.bands if b.kind == kind), None)


@dataclass(frozen=True)
class Destination:
    """Where heads are written and with what parameters; an indexer's are neither rotated nor normalised.

    Attributes
    ----------
    collection, layer : collection, i32
    query_out : [T, Hq, Dq]
        None without queries.
    freqs : f32 [positions, Dr]
        Cosines and sines; None without rotation.
    q_gamma, k_gamma : f32 [D]
        None without norms.
    """

    collection: Any
    layer: Any
    query_out: Any
    freqs: Any = None
    q_gamma: Any = None
    k_gamma: Any = None

    def gamma(self, kind: str) -> Any:
        """The gamma of a kind of heads."""
        return self.q_gamma if kind == "query" else self.k_gamma

    def cache(self, kind: str) -> Any:
        """The cache of keys or values."""
        return (self.collection.get_key_cache if kind == "key" else self.collection.get_value_cache)(self.layer)


@dataclass(frozen=True)
class Scales:
    """The factors of products, and the bias; None for absent operands.

    Attributes
    ----------
    bias : [N]
    x_scale, weight_scale : f32
        [1, 1] both, [T, 1] and [N, 1], or per block of 128 (:attr:`Projection.scaling`).
    """

    bias: Any = None
    x_scale: Any = None
    weight_scale: Any = None

    @staticmethod
    def of(op: Any) -> Scales:
        return Scales(op.bias, op.x_scale, op.weight_scale)


@dataclass(frozen=True)
class ProductArguments:
    """What product kernels read and write; an absent field is None, and no kernel argument.

    Attributes
    ----------
    to, index : Destination
        For the cache's heads, and for an indexer's.
    x, weight : [T, K], [N, K]
    x_map, weight_map : tensor maps of these
    products : [panels * T, width]
        Rounded products, in panels of columns.
    partials : f32 [(blocks + tiles) * rows, columns]
        Partial results of ``blocks`` blocks.
    tokens, blocks, row_tiles : i32
    table : i32 [B + 1] or [B]
        Row offsets, or valid lengths of a padded batch.
    scales : Scales
    """

    to: Destination
    index: Destination = Destination(None, None, None)
    x: Any = None
    weight: Any = None
    x_map: Any = None
    weight_map: Any = None
    products: Any = None
    partials: Any = None
    tokens: Any = None
    blocks: Any = None
    table: Any = None
    row_tiles: Any = None
    scales: Scales = Scales()


@dataclass(frozen=True)
class Written:
    """The bands of one collection and its query output: the cache's own, or the indexer's."""

    spec: CacheSpec
    query: Band | None
    key: Band
    value: Band | None

    @property
    def own(self) -> bool:
        """Whether they are the cache's own."""
        return self.key.kind == "key"

    @staticmethod
    def all_of(case: Projection) -> list[Written]:
        found = [Written(case.spec, case.band("query"), case.band("key"), case.band("value"))]  # type: ignore[arg-type]
        if case.index is not None:
            found.append(Written(case.index, case.band("index_query"), case.band("index_key"), None))  # type: ignore[arg-type]
        return found

    def destination(self, of: Any) -> Destination:
        """The destination in an operation's operands or a kernel's arguments."""
        if self.own:
            return Destination(of.collection, of.layer, of.query_out, of.freqs, of.q_gamma, of.k_gamma)
        return Destination(of.index_collection, of.layer, of.index_query_out)

    def writer(self, op: Any, at: Expansion, rounded: DType, *extents: int) -> HeadWriter:
        """The head writer; ``extents`` further restrict the width of accesses to products."""
        eps = op.eps.value if self.own and op.q_gamma is not None else None
        types = (rounded, self.spec.dtype)
        most = min(most_lanes(types), *(e & -e for e in extents)) if extents else most_lanes(types)
        sizes = [b.size for b in (self.query or self.key, self.key)]
        rotated = at.static_dim(op.freqs, 1) if self.own and op.freqs is not None else 0
        rotations = tuple(Rotation.of(size, rotated, op.interleaved.value, most) for size in sizes)
        rows = Rows(vector_width(*sizes, *extents, types=types), row_alignment(at.op))
        quantizer = None
        if self.spec.quantized:
            width = rotations[1].chunk_width(self.spec.granularity, most=most)
            quantizer = Quantizer.of(self.spec, width, at)
        groups = [Group.covering(at, r.units) for r in rotations]
        norms = [Norm(eps, r.size, rows, g) for r, g in zip(rotations, groups, strict=True)]
        of_head = [r.units if eps is None else g.lanes for r, g in zip(rotations, groups, strict=True)]
        of_key, of_value = of_head[1], self.key.size // rows.width
        if quantizer is not None:
            norms[1] = Norm(eps, self.key.size, rows, quantizer.group)
            of_key = of_value = quantizer.threads
        grouped = eps is not None or quantizer is not None
        items = TokenItems(
            of_head[0], of_key, of_value if self.value else 0, self.query.heads if self.query else 0, self.key.heads,
            whole_warps(at, 1) if grouped else 1,
        )  # fmt: skip
        return HeadWriter(self.spec, items, rows, rotations, tuple(norms), quantizer)  # type: ignore[arg-type]


@kv.func
def place_of(padded: bool, table: Any, row: Any, rows: Any) -> tuple[Any, Any, Any]:
    """(sequence, whether the row is a token of it, its number among the new tokens) of a row of the batch."""
    if not padded:
        return sequence_of(table, row, rows)
    width = kv.math.max(rows // kv.math.max(table.shape[0], 1), 1)
    b = row // width
    i = row - b * width
    last = table.shape[0] - 1
    return kv.math.min(b, last), (b <= last) & (i < table[kv.math.min(b, last)]), i


@dataclass(frozen=True)
class ProductHead(StoredHead):
    """One head of a token of products in a workspace: panels of ``width`` columns, each with all ``tokens``."""

    rows: Rows
    products: Any
    token: Any
    tokens: Any
    first: Any
    width: int

    @kv.func
    def load(self, d: Any, n: int) -> Any:
        """n elements from dim d up, without conversion."""
        column = self.first + d
        panel = column // self.width
        return self.rows.load(self.products, panel * self.tokens + self.token, column - panel * self.width, width=n)


def finish_kernel(
    case: Projection, bands: Written, work: Work, writer: HeadWriter, width: int, early: bool, blocks: int
) -> Any:
    """The kernel that writes the heads of products in a workspace; ``blocks`` share the items of a token."""
    items, rows = writer.items, writer.rows

    @kv.func
    def head_of(band, h, products, token, tokens):
        return ProductHead(rows, products, token, tokens, band.first + h * band.size, width)

    @kv.kernel
    def project_finish(a: ProductArguments):
        to, products, tokens = a.to, a.products, a.tokens
        if early:  # the previous kernel has waited for all others, and the next one waits for this
            kv.griddepcontrol_launch_dependents()
        token, first = work.place()
        if blocks > 1:
            token, first = kv.block_id.x // blocks, kv.block_id.x % blocks * work.threads + kv.thread_id.x
        if (token < tokens) & (first < work.items):
            # Pages are looked up during the product kernel, which has itself waited for all earlier kernels.
            b, inside, i = place_of(case.padded, a.table, token, tokens)
            position = to.collection.cache_length(b) + i
            kept = inside & in_range(to.collection, position)
            if early:
                kv.griddepcontrol_wait()
            angles = Angles(to.freqs, rows, (position,))
            for item in range(first, work.items, work.step * blocks):
                if bands.query is not None:
                    if item < items.first_key:
                        h, part, active = head_and_lane(item, items.query_heads, items.query)
                        source = head_of(bands.query, h, products, token, tokens)
                        target = Head(rows, to.query_out, token, h)
                        wanted = active if case.padded else active & inside
                        writer.query(source, target, angles, to.q_gamma, part, wanted)
                if (item >= items.first_key) & (item < items.first_value):
                    h, part, active = head_and_lane(item - items.first_key, items.heads, items.key)
                    source = head_of(bands.key, h, products, token, tokens)
                    key = CachedHead(to.cache("key"), b, position, h)
                    writer.key(source, key, angles, to.k_gamma, part, active & kept)
                if bands.value is not None:
                    if item >= items.first_value:
                        h, part, active = head_and_lane(item - items.first_value, items.heads, items.value)
                        source = head_of(bands.value, h, products, token, tokens)
                        value = CachedHead(to.cache("value"), b, position, h)
                        writer.value(source, value, part, active & kept)

    return project_finish


@kv.func
def scaled(case: Projection, c: Any, row: Any, column: Any, scales: Scales) -> Any:
    """A product times its scales, plus the bias. Block scales are applied earlier, since they change along K."""
    if case.scaling == "row":
        c = c * (scales.x_scale[row, 0] * scales.weight_scale[column, 0])
    elif case.scaling == "tensor":
        c = c * (scales.x_scale[0, 0] * scales.weight_scale[0, 0])
    elif case.scaling == "total":
        c = c * scales.weight_scale[0, 0]
    if scales.bias is not None:
        c = c + kv.f32(scales.bias[column])
    return c


@kv.func
def scaled_tile(case: Projection, c: Any, row: Any, exists: Any, column: Any, scales: Scales) -> Any:
    """As :func:`scaled`, for a tile: ``row`` and ``column`` are vectors of numbers."""
    if case.scaling == "row":
        c = c * scales.x_scale.gather(row, 0, mask=exists)[:, None] * scales.weight_scale.gather(column, 0)[None, :]
    elif case.scaling == "tensor":
        c = c * (scales.x_scale[0, 0] * scales.weight_scale[0, 0])
    elif case.scaling == "total":
        c = c * scales.weight_scale[0, 0]
    if scales.bias is not None:
        c = c + kv.f32(scales.bias.gather(column))[None, :]
    return c


# --- kernels by wgmma ----------------------------------------------------------------------------------


class Warpgroups:
    """The warpgroups of a block whose tiles of operand A have ``rows`` rows: consumers and one producer."""

    rows: int

    @property
    def consumers(self) -> int:
        return self.rows // WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.consumers + 1)


def wgmma_problems(case: Projection, target: Target, alignment: int) -> list[str]:
    """Why kernels by wgmma do not support a case, one sentence per reason; empty if they do."""
    if not target.has("wgmma"):
        return [f"needs a GPU with wgmma, got {target.name}"]
    return operand_problems(case, alignment, (bf16, f16, f8e4m3))


def operand_problems(case: Projection, alignment: int, types: tuple[DType, ...]) -> list[str]:
    """Why tiles cannot have the operands, given the supported types, one sentence per reason; empty if they can."""
    found = []
    if case.x not in types:
        *most, last = (dtype.name for dtype in types)
        found.append(f"needs operands of {', '.join(most)} or {last}, got {case.x.name}")
    step = SWIZZLE // case.x.itemsize
    if case.k % step:
        found.append(f"needs a K of a multiple of {step}, got {case.k}")
    if alignment < 16:
        found.append(f"needs rows aligned to 16 bytes, got {alignment}")
    return found


def operand_maps(op: Any, at: Expansion, step: int, x_rows: int, weight_rows: int) -> list[Any]:
    """The TMA descriptors of x and of the weight: boxes of these rows and ``step`` elements of K."""
    steps = at.static_dim(op.x, 1) // step
    return [
        at.tensor_map(ops.buffer_operand(buffer, steps, step), rows=rows)
        for buffer, rows in ((op.x, x_rows), (op.weight, weight_rows))
    ]


@kv.func
def prefetch_maps(*maps: Any) -> None:
    """Prefetch TMA descriptors, which no kernel writes."""
    if kv.thread_id.x == 0:
        for map in kv.static(maps):
            kv.tma.prefetch(map)


def promotion(case: Projection, columns: int) -> dict[str, int]:
    """The schedule entry of a tile kernel whose 8-bit products are added in f32, as in :func:`promoted`."""
    if case.x is not f8e4m3 or case.scaling == "block":
        return {}
    return {"promote": columns if columns <= LEAST_PROMOTED else columns_at_a_time(columns)}


@kv.func
def promoted(sums: Any, a: Any, b: Any, dtype: DType, moved: tuple[int, int] = (0, 0), factor: Any = None) -> list[Any]:
    """The sums plus 8-bit products of one swizzle atom of K, times ``factor`` (per row of two, or per column) if any.

    Tensor cores keep about 13 bits of a sum: enough for the products of one atom, but a bias over all of K. So the
    products of an atom use fresh accumulators, which are added in f32: all columns at once, or as many as leave
    registers for two products, since ptxas adds one while the next runs. Operands start ``moved`` bytes later.
    """
    sums, columns = list(sums), 2 * len(sums)
    together = columns if columns <= PROMOTED else LEAST_PROMOTED
    for first in kv.static(range(0, columns, together)):
        moves = [(moved[0] + s, moved[1] + first * SWIZZLE + s) for s in STEPS_OF_ATOM]
        found = kv.wgmma(min(together, columns - first), a, b, moves, dtype)
        for i in kv.static(range(len(found))):
            x = found[i] if factor is None else found[i] * factor(i // 2 % 2, first + i // 4 * 8)
            sums[first // 2 + i] = sums[first // 2 + i] + x
    return sums


QUERY, KEPT = 1, 2  # flags of a token: it has queries; its keys and values are written


@kv.func
def look_up(case: Projection, to: Destination, table: Any, token: Any, tokens: Any) -> list[Any]:
    """[sequence, position, page, flags] of a token; a row that is no token has no flags."""
    own = kv.math.min(token, tokens - 1)
    b, inside, i = place_of(case.padded, table, own, tokens)
    position = to.collection.cache_length(b) + i
    flags = kv.where((token < tokens) & (inside | case.padded), QUERY, 0)
    flags = flags + kv.where((token < tokens) & inside & in_range(to.collection, position), KEPT, 0)
    page = to.cache("key").raw_page(b, position)
    return [kv.i32(b), kv.i32(position), page, kv.i32(flags)]


def divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most ``most``."""
    return next(d for d in range(min(n, most), 0, -1) if n % d == 0)


def table_of(op: Any, case: Projection) -> ir.Value:
    """The operand with the row offsets or valid lengths."""
    return op.valid_lengths if case.padded else op.row_offsets


def finish(op: Any, case: Projection, at: Expansion, products: ir.Value, width: int) -> None:
    """Launch the kernel that writes products from a workspace."""
    tokens, early = at.dim(op.x, 0), starts_early(at)
    for bands in Written.all_of(case):
        writer = bands.writer(op, at, case.rounded, width)
        work = Work.of(at, writer.items.all)
        # With few tokens a thread has one item: latency, not throughput, is what the kernel takes.
        few = early and work.tokens == 1 and at.schedule.get("max_tokens", MANY) <= FEW
        blocks = cdiv(work.items, work.threads) if few else 1
        kernel = finish_kernel(case, bands, work, writer, width, early, blocks)
        a = ProductArguments(bands.destination(op), products=products, tokens=tokens, table=table_of(op, case))
        key = case, bands, work, writer, blocks
        at.launch(kernel, [a], (work.blocks(tokens) * blocks, 1, 1), (work.threads, 1, 1), key=key, programmatic=early)


def constant_weight(op: Any, at: Expansion) -> bool:
    """Whether the weight may be read before earlier kernels end: by promise, and not if one of our kernels wrote it."""
    return bool(at.schedule.get("early")) and starts_early(at) and op.weight == at.op.weight
