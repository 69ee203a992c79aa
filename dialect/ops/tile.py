# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operations on tile values: builtin tensors distributed over a thread block, or over the warps of one role.

A tile is ``tensor<MxNxT>``, a row or column vector ``tensor<MxT>``. Upstream arith, math, scf and ``tensor.splat``
apply to them; the operations here are those that upstream lacks. A tile without an encoding has no layout yet; passes
assign layouts by name (``dialect.tile_layout``), except on the host, which has none. One thread's elements are a
``vector``, so that the two levels have different types.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlir import ir

from .. import tile_layout, types, verify
from ..base import Kv
from ..dtypes import DType, by_mlir, f32
from ..effects import CACHE, ELEMENTS, READ, WRITE, Effect, EffectModel, Pure, ReadsMemory, WritesMemory
from ..ext import I1, I32, Operand, Result, infer_result
from ..latent_layout import RowFormat
from ..layout import CacheSpec, align_up
from .common import as_i32, i64_attr

KINDS = ("max", "min", "add")
TAILS = ("zero", "any")
ROW_FORMAT = ("rope", "inline_scales")  # attributes that say what a row contains besides elements
TILE_COLUMN = "tile_column"  # of a copy: the first tile column that it fills
COLUMN_STEP = 16  # heads are padded with zero columns to whole k-steps of products
BYTE_STEP = 32  # the same for products of 8-bit elements
# The layouts of tiles in shared memory: row by row, and transposed. All other layouts are of registers.
SHARED, SHARED_TRANSPOSED = "shared", "shared(transposed)"
IN_SHARED = (SHARED, SHARED_TRANSPOSED)


class _LoadsRows(EffectModel):
    """Reads a cache."""

    effects = (Effect(READ, CACHE),)


class _StoresRows(EffectModel):
    """Writes elements of a cache."""

    effects = (Effect(WRITE, ELEMENTS),)


def tile_of(value: ir.Value) -> ir.RankedTensorType | None:
    """The tensor type of a tile of rank 1 or 2 with static shape; None for other values."""
    if not isinstance(value.type, ir.RankedTensorType):
        return None
    type_ = ir.RankedTensorType(value.type)
    return type_ if type_.rank in (1, 2) and type_.has_static_shape else None


def tile_type(shape: Sequence[int], element: ir.Type, layout: str | None = None) -> ir.RankedTensorType:
    """The type of a tile; ``layout`` is the name of its layout, None before one is assigned."""
    encoding = ir.StringAttr.get(layout, element.context) if layout else None
    return ir.RankedTensorType.get_unchecked(list(shape), element, encoding, element.context)


def layout_of(type_: ir.Type) -> str | None:
    """The name of a tile type's layout; None before one is assigned."""
    encoding = ir.RankedTensorType(type_).encoding
    return ir.StringAttr(encoding).value if encoding is not None else None


def _tile(op: Any, value: ir.Value, what: str, rank: int | None = None) -> ir.RankedTensorType | None:
    """The type of an operand or result that must be a tile; None after an error."""
    type_ = tile_of(value)
    if type_ is None or (rank is not None and type_.rank != rank):
        wanted = "a tile (a static tensor of rank 1 or 2)" if rank is None else f"a tile of rank {rank}"
        verify.fail(op, f"{what} must be {wanted}, got {value.type}")
        return None
    if min(type_.shape) < 2:
        verify.fail(op, f"{what} must have extents of at least 2, got {value.type}: a scalar is no tile")
        return None
    problem = layout_problem(type_)
    if problem is not None:
        verify.fail(op, f"{what} has no layout that is known: {problem}")
        return None
    return type_


def layout_problem(type_: ir.RankedTensorType) -> str | None:
    """What is wrong with a tile type's layout; None for a legal layout, and for a tile without one."""
    if type_.encoding is None:
        return None
    if not isinstance(type_.encoding, ir.StringAttr):
        return f"the encoding must be a layout's name, got {type_.encoding}"
    try:
        if layout_of(type_) not in IN_SHARED:
            tile_layout.parse(layout_of(type_), tuple(type_.shape))
    except ValueError as error:
        return str(error)
    return None


def _is_float(element: ir.Type) -> bool:
    """Whether an element type is one of the floats of kernels."""
    try:
        return by_mlir(str(element)).is_float
    except ValueError:
        return False


class TileIndexOp(Kv.Operation, name="tile_index", traits=[Pure]):
    """The numbers 0, 1, 2, ... as a vector: positions within a tile.

    Result: tensor<Nxi32>.
    """

    indices: Result[Any]

    def verify_invariants(self) -> bool:
        type_ = _tile(self, self.operation.results[0], "the result", 1)
        if type_ is None:
            return False
        if str(type_.element_type) != "i32":
            return verify.fail(self, f"the result must have elements of type i32, got {type_.element_type}")
        return True


class TileBroadcastOp(Kv.Operation, name="tile_broadcast", traits=[Pure]):
    """A vector repeated along the other dimension of a tile.

    Attribute ``dimension``: the dimension that the vector spans, 0 (one value per row) or 1 (one value per column).
    """

    source: Operand[Any]
    dimension: ir.IntegerAttr
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        source = _tile(self, self.operation.operands[0], "the operand", 1)
        tile = _tile(self, self.operation.results[0], "the result", 2)
        if source is None or tile is None:
            return False
        dimension = verify.integer(self.dimension)
        if dimension not in (0, 1):
            return verify.fail(self, f"dimension must be 0 or 1, got {self.dimension}")
        if tile.shape[dimension] != source.shape[0] or tile.element_type != source.element_type:
            return verify.fail(
                self,
                f"the result must have {source.shape[0]} x {source.element_type} in dimension {dimension}, got {tile}",
            )
        return True


class TileRampOp(Kv.Operation, name="tile_ramp", traits=[Pure]):
    """A tile whose rows are straight lines: element (i, j) is ``start[i] + j * step[i]``.

    Any function that is linear in a position difference has this form. ``fold-kv-scores`` makes it; GPUs only.
    Operands: start and step, one f32 per row. Result: a tile of f32.
    """

    start: Operand[Any]
    step: Operand[Any]
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        tile = _tile(self, self.operation.results[0], "the result", 2)
        if tile is None:
            return False
        if str(tile.element_type) != "f32":
            return verify.fail(self, f"the result must be a tile of f32, got {tile}")
        for name, value in (("start", self.start), ("step", self.step)):
            vector = _tile(self, value, name, 1)
            if vector is None:
                return False
            if vector.shape[0] != tile.shape[0] or str(vector.element_type) != "f32":
                return verify.fail(self, f"{name} must be {tile.shape[0]}xf32, got {vector}")
        return True


class TileReduceOp(Kv.Operation, name="tile_reduce", traits=[Pure]):
    """The maximum, minimum or sum of the elements of every row (axis 1) or column (axis 0).

    Attributes: kind, ``max`` or ``min`` (ignoring NaN, as ``arith.maxnumf``) or ``add`` (in any order); axis, the
    dimension that is reduced.
    """

    source: Operand[Any]
    kind: ir.StringAttr
    axis: ir.IntegerAttr
    result_: Result[Any]

    def verify_invariants(self) -> bool:
        source = _tile(self, self.operation.operands[0], "the operand", 2)
        result = _tile(self, self.operation.results[0], "the result", 1)
        if source is None or result is None or not verify.one_of(self, "kind", KINDS):
            return False
        if str(source.element_type) == "i1":
            return verify.fail(self, f"the operand must have numeric elements, got {source.element_type}")
        axis = verify.integer(self.axis)
        if axis not in (0, 1):
            return verify.fail(self, f"axis must be 0 or 1, got {self.axis}")
        if result.shape[0] != source.shape[1 - axis] or result.element_type != source.element_type:
            return verify.fail(
                self, f"the result must be {source.shape[1 - axis]} x {source.element_type}, got {result}"
            )
        return True


class TileMaskOp(Kv.Operation, name="tile_mask", traits=[Pure]):
    """The scores where the mask is true, minus infinity elsewhere.

    Contract: an iteration of the innermost enclosing loop whose mask is all false does not change the loop's carried
    values, as in a softmax, so that passes may skip it. Operands: scores, a float tile; mask, i1 of its shape.
    """

    scores: Operand[Any]
    mask: Operand[Any]
    result_: Result[Any]

    def verify_invariants(self) -> bool:
        scores = _tile(self, self.scores, "scores", 2)
        if scores is None or not _vectors(self, [self.mask], scores.shape):
            return False
        if not _is_float(scores.element_type):
            return verify.fail(self, f"scores must have a float element type, got {scores.element_type}")
        return same_type(self, self.scores)


class WarpAnyOp(Kv.Operation, name="warp_any", traits=[Pure]):
    """Whether a mask is true for any row of the executing warp; the result may differ between warps. Needs a layout.

    A branch on it must give the same result, taken or not, for rows whose mask is false.
    """

    mask: Operand[Any]
    holds: Result[I1] = infer_result()

    def verify_invariants(self) -> bool:
        mask = _tile(self, self.mask, "the mask", 1)
        return mask is not None and _vectors(self, [self.mask], mask.shape)


class TileTransposeOp(Kv.Operation, name="tile_transpose", traits=[Pure]):
    """The transpose of a tile. On GPUs only as operand A of products, which reads a tile in shared memory by columns.

    With layouts, a tile that is ``shared`` becomes ``shared(transposed)``: the same memory under another name.
    """

    source: Operand[Any]
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        source = _tile(self, self.source, "the operand", 2)
        tile = _tile(self, self.operation.results[0], "the result", 2)
        if source is None or tile is None:
            return False
        layout = {None: None, SHARED: SHARED_TRANSPOSED}.get(layout_of(source), layout_of(source))
        wanted = tile_type(source.shape[::-1], source.element_type, layout)
        return tile == wanted or verify.fail(self, f"the result must be {wanted}, got {tile}")


class TileReduceLanesOp(Kv.Operation, name="tile_reduce_lanes", traits=[Pure]):
    """Finish a reduction of ``kv.tile_reduce`` with ``kv.partial`` over the lanes that share a row."""

    source: Operand[Any]
    kind: ir.StringAttr
    result_: Result[Any]

    def verify_invariants(self) -> bool:
        source = _tile(self, self.source, "the operand", 1)
        return source is not None and verify.one_of(self, "kind", KINDS) and same_type(self, self.source)


class DotOp(Kv.Operation, name="dot", traits=[Pure]):
    """C + A B, accumulated in f32; in i32 if A and B are of i8.

    Operands: a tensor<MxKxT>; b tensor<KxNxT>, or tensor<NxKxT> with ``transpose_b``; c tensor<MxNxf32> (or i32), or
    zeros without. The result is of c's type. Passes choose the instruction and where A is read from. With
    ``transpose_b``, A of f8E4M3FN may have 2K columns, which are two terms (``kv.tile_terms``) that both multiply B,
    and B may be f8E5M2.
    """

    a: Operand[Any]
    b: Operand[Any]
    c: Operand[Any] | None = None
    transpose_b: ir.BoolAttr
    result_: Result[Any]

    def verify_invariants(self) -> bool:
        return verify_dot(self, self.a, self.b, self.c)


def same_type(op: Any, value: ir.Value) -> bool:
    """Whether an op's only result has the type of one of its operands."""
    got = op.operation.results[0].type
    return got == value.type or verify.fail(op, f"the result must be of the operand's type {value.type}, got {got}")


def sums_of(element: ir.Type) -> ir.Type:
    """The element type of a product's sums: i32 for i8, f32 for floats."""
    return ir.F32Type.get(element.context) if _is_float(element) else ir.IntegerType.get_signless(32, element.context)


def verify_dot(op: Any, a: ir.Value, b: ir.Value, c: ir.Value | None) -> bool:
    """Whether shapes and element types of a product match; also for its asynchronous form."""
    left, right = _tile(op, a, "a", 2), _tile(op, b, "b", 2)
    result = _tile(op, op.operation.results[0], "the result", 2)
    if left is None or right is None or result is None:
        return False
    transposed = verify.boolean(op.transpose_b)
    if transposed is None:
        return verify.fail(op, f"transpose_b must be a bool, got {op.transpose_b}")
    k, n = reversed(right.shape) if transposed else right.shape
    of_bytes = transposed and str(left.element_type) == "f8E4M3FN"
    alike = left.element_type == right.element_type or (of_bytes and str(right.element_type) == "f8E5M2")
    if (left.shape[1] != k and not (of_bytes and left.shape[1] == 2 * k)) or not alike:
        return verify.fail(
            op, f"a and b must share K = {left.shape[1]} and {left.element_type}, got {left} and {right}"
        )
    if not _is_float(left.element_type) and str(left.element_type) != "i8":
        return verify.fail(op, f"a and b must have a float element type or i8, got {left.element_type}")
    sums = sums_of(left.element_type)
    if list(result.shape) != [left.shape[0], n] or result.element_type != sums:
        return verify.fail(op, f"the result must be {left.shape[0]} x {n} x {sums}, got {result}")
    return c is None or c.type == result or verify.fail(op, f"c must have the result's type {result}, got {c.type}")


class TileLoadOp(Kv.Operation, name="tile_load", traits=[_LoadsRows]):
    """The tokens [first, first + rows) of a head of a cache or operand, dequantized: stored elements, or another float.

    Operands: cache, batch, head, first token; begin and count, the range of tokens that exist and matter. Attributes:
    first_column, of the head dimension; tail, the value of rows outside the range: ``zero``, or ``any`` where nothing
    depends on them. Result: tensor<rows x columns x T>; columns past the head, up to a multiple of 16, are zeros. In
    shared memory passes may keep the elements of a quantized cache as they are stored (``kv.tile_scales``).
    Preconditions: first is a multiple of the smaller of the tile's rows and the page size. An optional descriptor is a
    TMA descriptor of the same head's rows, for passes that copy by TMA.

    Unit attributes: constant, earlier kernels that are still running do not write the tile, so a copy need not wait for
    them; existing, boxes of the descriptor without any existing token are not copied, and their rows keep their old
    contents; aligned, with a descriptor of tokens without conversion, the tile starts at the multiple of 16 bytes at or
    below the head's first, and contains columns of the neighbouring heads in place of zeros.

    For a paged cache, lists may name the tokens: a buffer [B, K] of rows of the pool, page * page_size + slot, with one
    row per batch entry. Tokens whose entry names no row of the pool are zeros, whatever tail says. With the attributes
    ``rope`` and ``inline_scales`` (i64), rows contain bf16 keys and scales as in ``kv.mla_attention``, and columns are
    columns of keys.
    """

    cache: Operand[Any]
    batch: Operand[I32]
    head: Operand[I32]
    first: Operand[I32]
    begin: Operand[I32]
    count: Operand[I32]
    descriptor: Operand[Any] | None = None
    lists: Operand[Any] | None = None
    first_column: ir.IntegerAttr
    tail: ir.StringAttr
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.operation.operands[0], verify.CACHE_LIKE)
        tile = _tile(self, self.operation.results[0], "the result", 2)
        if spec is None or tile is None:
            return False
        if not (verify_columns(self, spec, tile) and verify.one_of(self, "tail", TAILS)):
            return False
        element = str(tile.element_type)
        if spec.quantized and element == spec.dtype.mlir and layout_of(tile) != SHARED:
            return verify.fail(self, f"dequantizes, so the tile must not have the storage type {element}")
        return element == spec.data_dtype.mlir or verify.scalar_float(self, element, "the tile's element")


def row_format(op: Any, spec: CacheSpec) -> RowFormat:
    """The row format of a load's cache, or of a copy's."""
    return RowFormat(spec, *(number_of(op, name, 0) for name in ROW_FORMAT))


def verify_columns(op: Any, spec: CacheSpec, tile: ir.RankedTensorType, converted: bool = True) -> bool:
    """Whether a tile's columns are legal for the head, and whole boxes of its descriptor; also for copies.

    ``converted``: 8-bit elements may become 16-bit on the way from where the descriptor's boxes are copied to.
    """
    first, row = verify.integer(op.first_column), row_format(op, spec)
    if not row.plain and (not spec.of_cache or spec.data_dtype.bits != 8 or row.content < 1):
        return verify.fail(op, f"rope and inline_scales need large enough 8-bit rows, got {op.cache.type}")
    if op.lists is not None and (not spec.paged or not spec.of_cache):
        return verify.fail(op, f"lists need a paged cache, got {op.cache.type}")
    if op.lists is not None and not verify.memref(op, op.lists, 2, ("i32",), "lists"):
        return False
    step = BYTE_STEP if str(tile.element_type) == spec.data_dtype.mlir and spec.data_dtype.bits == 8 else COLUMN_STEP
    columns = tile.shape[1] - number_of(op, TILE_COLUMN, 0)
    if first is None or first < 0 or not 0 < columns <= align_up(row.size, step) - first:
        return verify.fail(
            op,
            f"columns must be within the head's {row.size}, rounded up to whole {step}, got {columns} "
            f"from {op.first_column} on",
        )
    element = str(tile.element_type)
    as_stored = element == spec.data_dtype.mlir and (not spec.quantized or layout_of(tile) == SHARED)
    if not _is_float(tile.element_type) and not (as_stored and layout_of(tile) == SHARED):
        return verify.fail(op, f"the tile must have a float element type, got {tile.element_type}")
    if op.descriptor is None:
        return True
    if types.type_name(op.descriptor.type) != "tma":
        return verify.fail(op, f"descriptor must be of type !kv.tma, got {op.descriptor.type}")
    if op.lists is not None or not row.plain:
        return verify.fail(op, "takes a descriptor only without lists and row formats")
    converts = converted and spec.data_dtype.bits == 8 and element in ("bf16", "f16")
    if not (as_stored or converts):
        return verify.fail(
            op, f"a descriptor copies elements without conversion, {spec.data_dtype.mlir} without scales, got {tile}"
        )
    box = types.tma_spec_of(op.descriptor.type)
    aligned = "aligned" in op.operation.attributes
    forms = ("tiled", "token") if converts else ("token",) if aligned else ("tiled",)  # of tokens, with neighbours
    if box.form not in forms or tile.shape[0] % box.rows:
        return verify.fail(
            op, f"the tile must be whole boxes of a tiled descriptor, got {tile.shape[0]} rows and {op.descriptor.type}"
        )
    return True


class TileStoreOp(Kv.Operation, name="tile_store", traits=[_StoresRows]):
    """Write a tile to the tokens [first, first + rows) of a head of a cache, converted or quantized to its elements.

    Operands: cache, batch, head, first token; count, from which on tokens are not written; value, a float tile.
    Attribute first_column, of the head dimension. Tokens without a page of the pool are not written. To a cache with
    scales whole heads are written, quantized as by ``kv.append``.
    """

    cache: Operand[Any]
    batch: Operand[I32]
    head: Operand[I32]
    first: Operand[I32]
    count: Operand[I32]
    value: Operand[Any]
    first_column: ir.IntegerAttr

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.operation.operands[0], ("cache",))
        value = _tile(self, self.value, "the value", 2)
        if spec is None or value is None:
            return False
        if not spec.quantized and not (spec.dtype.is_float and spec.dtype.bits >= 8):
            return verify.fail(self, f"stores to caches of floats or with scales, got {self.cache.type}")
        if not _is_float(value.element_type):
            return verify.fail(self, f"the value must have a float element type, got {value.element_type}")
        first = verify.integer(self.first_column)
        if first is None or not 0 <= first <= spec.head_size - value.shape[1]:
            return verify.fail(
                self,
                f"columns must be within the head's {spec.head_size}, got {value.shape[1]} from {self.first_column} on",
            )
        whole = value.shape[1] == spec.head_size
        return whole or not spec.quantized or verify.fail(self, "writes whole heads to a cache with scales")


class TileLoadRowsOp(Kv.Operation, name="tile_load_rows", traits=[ReadsMemory]):
    """Rows of a buffer, one for every element of the index vectors.

    Operands: buffer of rank r; mask tensor<Mxi1>, which rows exist (the others are zeros); indices, r - 1 vectors
    tensor<Mxi32>. Result: tensor<MxDxT> with the buffer's element type: buffer[i0[m], i1[m], ..., 0:D]. With the
    attribute ``stored`` (i64, up to D), columns from there up are zeros and are not read. The tile's first column is
    the buffer's ``first_column``, 0 by default.
    """

    buffer: Operand[Any]
    mask: Operand[Any]
    indices: Sequence[Operand[Any]]
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        tile = _tile(self, self.operation.results[0], "the result", 2)
        return starts_at_a_step(self) and tile is not None and verify_rows(self, self.buffer, tile)


class TileStoreRowsOp(Kv.Operation, name="tile_store_rows", traits=[WritesMemory]):
    """Write rows of a buffer, the inverse of ``kv.tile_load_rows``.

    Rows with a false mask are not written, nor are columns from ``stored`` up. The tile's first column is the buffer's
    ``first_column``, 0 by default.
    """

    value: Operand[Any]
    buffer: Operand[Any]
    mask: Operand[Any]
    indices: Sequence[Operand[Any]]

    def verify_invariants(self) -> bool:
        tile = _tile(self, self.value, "the value", 2)
        return starts_at_a_step(self) and tile is not None and verify_rows(self, self.buffer, tile)


def starts_at_a_step(op: Any) -> bool:
    """Whether a row tile starts at a column that vector accesses can start at."""
    first = stored_from(op)
    legal = first >= 0 and first % COLUMN_STEP == 0
    return legal or verify.fail(op, f"first_column must be a multiple of {COLUMN_STEP}, got {first}")


def verify_rows(op: Any, buffer: ir.Value, tile: ir.RankedTensorType) -> bool:
    """Whether a buffer, the row indices and the mask of an op match a tile of the buffer's rows."""
    indices = list(op.indices)
    if not verify.memref(op, buffer, len(indices) + 1, (str(tile.element_type),), "the buffer"):
        return False
    found = {"stored": stored_columns(op, tile.shape[1]), "columns": number_of(op, "columns", tile.shape[1])}
    for name, columns in found.items():
        if not 1 <= columns <= tile.shape[1]:
            return verify.fail(op, f"{name} must be from 1 to the tile's {tile.shape[1]} columns, got {columns}")
    return _vectors(op, [op.mask, *indices], tile.shape[:1])


def stored_columns(op: Any, columns: int) -> int:
    """How many of a row tile's columns are in the buffer."""
    return number_of(op, "stored", columns)


def stored_from(op: Any) -> int:
    """The column of the buffer's rows at which a row tile starts."""
    return number_of(op, "first_column", 0)


def number_of(op: Any, name: str, default: int) -> int:
    """The value of an optional integer attribute."""
    attributes = op.operation.attributes
    return ir.IntegerAttr(attributes[name]).value if name in attributes else default


def _vectors(op: Any, values: Sequence[ir.Value], shape: Sequence[int]) -> bool:
    """Whether a mask and indices have the given shape, and element types i1 and i32."""
    for i, value in enumerate(values):
        type_ = _tile(op, value, "an index" if i else "the mask")
        if type_ is None:
            return False
        wanted = "i32" if i else "i1"
        if list(type_.shape) != list(shape) or str(type_.element_type) != wanted:
            what = "an index" if i else "the mask"
            return verify.fail(op, f"{what} must be {'x'.join(map(str, shape))}x{wanted}, got {value.type}")
    return True


class TileGatherOp(Kv.Operation, name="tile_gather", traits=[ReadsMemory]):
    """Elements of a buffer, one for every element of index tiles: buffer[i0[..], i1[..], ...].

    Operands: buffer of rank r; mask, a tile of i1: where false, the result is 0; indices, r tiles of i32.
    """

    buffer: Operand[Any]
    mask: Operand[Any]
    indices: Sequence[Operand[Any]]
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        tile = _tile(self, self.operation.results[0], "the result")
        if tile is None or not verify.memref(
            self, self.buffer, len(list(self.indices)), (str(tile.element_type),), "the buffer"
        ):
            return False
        return _vectors(self, [self.mask, *self.indices], tile.shape)


class TileScatterOp(Kv.Operation, name="tile_scatter", traits=[WritesMemory]):
    """Write elements of a buffer, the inverse of ``kv.tile_gather``. For equal indices, either element is written.

    With the unit attribute ``add``, elements are added to the buffer's, each atomically: for equal indices all are.
    """

    value: Operand[Any]
    buffer: Operand[Any]
    mask: Operand[Any]
    indices: Sequence[Operand[Any]]

    def verify_invariants(self) -> bool:
        tile = _tile(self, self.value, "the value")
        if tile is None or not verify.memref(
            self, self.buffer, len(list(self.indices)), (str(tile.element_type),), "the buffer"
        ):
            return False
        return _vectors(self, [self.mask, *self.indices], tile.shape)


# --- wrappers --------------------------------------------------------------------------------------


def tile_index(extent: int) -> ir.Value:
    """The numbers 0 .. extent - 1."""
    return TileIndexOp(tile_type([extent], ir.IntegerType.get_signless(32))).operation.results[0]


def tile_broadcast(source: ir.Value, dimension: int, extent: int) -> ir.Value:
    """A vector along ``dimension``, repeated ``extent`` times along the other dimension."""
    type_ = ir.RankedTensorType(source.type)
    shape = [type_.shape[0], extent] if dimension == 0 else [extent, type_.shape[0]]
    return TileBroadcastOp(source, i64_attr(dimension), tile_type(shape, type_.element_type)).operation.results[0]


def tile_reduce(source: ir.Value, kind: str, axis: int) -> ir.Value:
    """Reduce a tile along an axis."""
    type_ = ir.RankedTensorType(source.type)
    result = tile_type([type_.shape[1 - axis]], type_.element_type)
    return TileReduceOp(source, ir.StringAttr.get(kind), i64_attr(axis), result).operation.results[0]


def tile_transpose(source: ir.Value) -> ir.Value:
    """The transpose of a tile."""
    type_ = ir.RankedTensorType(source.type)
    return TileTransposeOp(source, tile_type(type_.shape[::-1], type_.element_type)).operation.results[0]


def dot(a: ir.Value, b: ir.Value, c: ir.Value | None = None, transpose_b: bool = False) -> ir.Value:
    """C + A B in f32, or in i32 for i8."""
    left, right = ir.RankedTensorType(a.type), ir.RankedTensorType(b.type)
    result = tile_type([left.shape[0], right.shape[0 if transpose_b else 1]], sums_of(left.element_type))
    return DotOp(a, b, ir.BoolAttr.get(transpose_b), result, c=c).operation.results[0]


def tile_mask(scores: ir.Value, mask: ir.Value) -> ir.Value:
    """The scores where the mask is true, minus infinity elsewhere."""
    return TileMaskOp(scores, mask, scores.type).operation.results[0]


@dataclass(frozen=True)
class TileRows:
    """The rows and columns of a cache tile, and how they are read: the options of ``cache.tile``."""

    rows: int
    columns: int | None = None
    first_column: int = 0
    dtype: DType | None = None
    tail: str = "zero"
    descriptor: ir.Value | None = None
    lists: ir.Value | None = None
    rope: int = 0
    inline_scales: int = 0
    constant: bool = False
    existing: bool = False
    aligned: bool = False


def tile_load(cache: ir.Value, batch: Any, head: Any, first: Any, begin: Any, count: Any, of: TileRows) -> ir.Value:
    """Rows of a cache as a tile of ``dtype`` (default: the storage type, or f32 from a quantized cache)."""
    spec = types.spec_of(cache.type)
    row = RowFormat(spec, of.rope, of.inline_scales)
    element = types.element_type(of.dtype or (f32 if spec.quantized else spec.data_dtype))
    result = tile_type([of.rows, row.size - of.first_column if of.columns is None else of.columns], element)
    op = TileLoadOp(
        cache,
        as_i32(batch),
        as_i32(head),
        as_i32(first),
        as_i32(begin),
        as_i32(count),
        i64_attr(of.first_column),
        ir.StringAttr.get(of.tail),
        result,
        descriptor=of.descriptor,
        lists=of.lists,
    ).operation
    for name, value in zip(ROW_FORMAT, (of.rope, of.inline_scales), strict=True):
        if value:
            op.attributes[name] = i64_attr(value)
    for name in ("constant", "existing", "aligned"):
        if getattr(of, name):
            op.attributes[name] = ir.UnitAttr.get()
    return op.results[0]


def tile_load_rows(
    buffer: ir.Value, indices: Sequence[ir.Value], mask: ir.Value, columns: int, stored: int | None = None,
    first_column: int = 0,
) -> ir.Value:  # fmt: skip
    """Rows of a buffer as a tile, from ``first_column`` up, whose columns from ``stored`` up are zeros."""
    rows = ir.RankedTensorType(mask.type).shape[0]
    result = tile_type([rows, columns], ir.MemRefType(buffer.type).element_type)
    op = TileLoadRowsOp(buffer, mask, list(indices), result).operation
    if first_column:
        op.attributes["first_column"] = i64_attr(first_column)
    if stored is not None and stored != columns:
        op.attributes["stored"] = i64_attr(stored)
    return op.results[0]


def tile_store_rows(
    value: ir.Value, buffer: ir.Value, indices: Sequence[ir.Value], mask: ir.Value, stored: int | None = None,
    first_column: int = 0,
) -> None:  # fmt: skip
    """Write a tile, or its columns before ``stored``, to rows of a buffer, from ``first_column`` up."""
    op = TileStoreRowsOp(value, buffer, mask, list(indices)).operation
    if first_column:
        op.attributes["first_column"] = i64_attr(first_column)
    if stored is not None and stored != ir.RankedTensorType(value.type).shape[1]:
        op.attributes["stored"] = i64_attr(stored)


def tile_gather(buffer: ir.Value, indices: Sequence[ir.Value], mask: ir.Value) -> ir.Value:
    """Elements of a buffer as a tile."""
    result = tile_type(ir.RankedTensorType(mask.type).shape, ir.MemRefType(buffer.type).element_type)
    return TileGatherOp(buffer, mask, list(indices), result).operation.results[0]


def tile_scatter(
    value: ir.Value, buffer: ir.Value, indices: Sequence[ir.Value], mask: ir.Value, add: bool = False
) -> None:
    """Write the elements of a tile to a buffer, or add them atomically."""
    op = TileScatterOp(value, buffer, mask, list(indices)).operation
    if add:
        op.attributes["add"] = ir.UnitAttr.get()


def tile_store(
    cache: ir.Value, batch: Any, head: Any, first: Any, count: Any, value: ir.Value, first_column: int = 0
) -> None:
    """Write a tile to tokens of a head."""
    TileStoreOp(cache, as_i32(batch), as_i32(head), as_i32(first), as_i32(count), value, i64_attr(first_column))
