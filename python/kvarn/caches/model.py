# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The NumPy model of a cache's methods, for host buffers.

Indices are integers or integer arrays that broadcast; offsets are computed in 64 bits by the formulas of
``kvarn.dialect.layout``. An index out of range raises IndexError. A *page id* out of range, which marks a token without
a page, is handled as on a device: a read sees the last (null) page, a write is dropped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvarn.dialect import dtypes, layout, page_orders
from kvarn.dialect.dtypes import CODED, DType
from kvarn.dialect.layout import FA3, CacheSpec
from kvarn.runtime.buffers import strided_array

from .numerics import default_load_dtype, dequantize, numbers, saturating_cast, uncoded
from .rows import PagedRowIndices

OOB = ("drop", "trap", "unchecked")


class HostModel:
    """Methods of a cache that read or write its buffers. A mixin of the cache classes.

    Every method that accesses memory raises TypeError if the buffers are not on the host.
    """

    __slots__ = ()
    spec: CacheSpec
    device: tuple[str, int]
    readonly: bool
    buffers: tuple[Any, ...]
    scales: Any
    _at: dict[str, int]
    _host: dict[str, np.ndarray]
    _keep: Any

    # --- arrays ---

    def _need_host(self, what: str) -> None:
        if self.device[0] != "cpu":
            raise TypeError(
                f"{type(self).__name__}.{what}: needs buffers in host memory, got a cache on {self.device[0]}:"
                f"{self.device[1]}; use it in a kernel, or copy the buffers to the host"
            )

    def _array(self, which: str, what: str) -> np.ndarray:
        """A buffer by name: ``elements`` and ``scales`` flat from the view's base, ``lookup``, ``lengths``."""
        self._need_host(what)
        found = self._host.get(which)
        if found is None:
            found = self._host[which] = self._make_array(which)
        return found

    def _make_array(self, which: str) -> np.ndarray:
        at, spec = self._at, self.spec
        if which == "elements":
            page = spec.page_span if spec.paged else at["capacity"] * spec.token_stride
            span = (at["num_blocks"] - 1) * at["stride0"] + page
            units = spec.dtype.units(span)
            return strided_array(at["base"], (units,), (1,), spec.dtype.unit, self.readonly, self._keep)
        if which == "scales":
            assert spec.scale_dtype is not None
            span = (at["num_blocks"] - 1) * at["scales_stride0"] + at["capacity"] * spec.scales_token_stride
            return strided_array(at["scales"], (span,), (1,), spec.scale_dtype, self.readonly, self._keep)
        if which == "lengths":
            return strided_array(at["lengths"], (at["batch"],), (1,), dtypes.u32, True, self._keep)
        # Tables are read as unsigned even if their dtype is signed: -1 is then out of range like any other invalid id.
        shape = (at["batch"], at["lookup_columns"])
        return strided_array(at["lookup"], shape, (at["lookup_stride"], 1), dtypes.u32, True, self._keep)

    # --- pages and offsets ---

    def _page(self, b: Any, t: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
        """The unclamped table entries and the slots of tokens."""
        table = self._array("lookup", what)
        b, t = integers(b, "b", what), integers(t, "t", what)
        in_range(b, self._at["batch"], "b (sequence)", what)
        in_range(t, self._slots(b), "t (token)", what)
        column, slot = layout.page_and_slot(self.spec, t)
        return table[b, column].astype(np.int64), np.asarray(slot)

    def _slots(self, b: Any) -> Any:
        """Capacity of a sequence, in token slots."""
        return self._at["lookup_columns"] * self.spec.page_size if self.spec.paged else self._at["capacity"]

    def _clamped_page(self, b: Any, t: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
        page, slot = self._page(b, t, what)
        return np.minimum(page, self._at["num_blocks"] - 1), slot

    def _head_and_dim(self, h: Any, d: Any, width: int, what: str) -> tuple[np.ndarray, np.ndarray]:
        h, d = integers(h, "h", what), integers(d, "d", what)
        in_range(h, self.spec.num_heads, "h (head)", what)
        in_range(d, self.spec.head_size - width + 1, f"d (dim, of {width} lanes)", what)
        return h, d

    def _lanes(self, width: int, what: str, limit: int) -> np.ndarray:
        if isinstance(width, bool) or not isinstance(width, (int, np.integer)) or not 1 <= width <= limit:
            raise ValueError(f"{type(self).__name__}.{what}: width must be in [1, {limit}], got {width!r}")
        return np.arange(width)

    def _element_offsets(
        self, b: Any, h: Any, t: Any, d: Any, width: int, what: str, clamp: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Offsets [..., width] of elements from the base, and the pages [...]."""
        lanes = self._lanes(width, what, self.spec.head_size)
        return self._offsets_of(b, h, t, d, width, lanes, what, clamp)

    def _unit_offsets(
        self, b: Any, h: Any, t: Any, d: Any, width: int, what: str, clamp: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same of ``width`` units of memory from element d on: of elements, or of bytes that elements share."""
        dtype = self.spec.dtype
        if not dtype.packed:
            return self._element_offsets(b, h, t, d, width, what, clamp)
        lanes = self._lanes(width, what, self.spec.stored_size)
        if (integers(d, "d", what) % dtype.step).any():
            must = "even" if dtype.step == 2 else f"a multiple of {dtype.step}"
            raise ValueError(f"{type(self).__name__}.{what}: d must be {must}, where a byte begins, got {d}")
        read = -(-width // dtype.step_units) * dtype.step  # elements
        offsets, page = self._offsets_of(b, h, t, d, read, np.zeros(1, np.int64), what, clamp)
        return dtype.units(offsets) + lanes, page

    def _offsets_of(
        self, b: Any, h: Any, t: Any, d: Any, width: int, lanes: np.ndarray, what: str, clamp: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        page, slot = self._clamped_page(b, t, what) if clamp else self._page(b, t, what)
        h, d = self._head_and_dim(h, d, width, what)
        if self.spec.kind in page_orders.added:  # elements of a vector need not be contiguous in added page orders
            at, in_page, head, first = (np.asarray(x)[..., None] for x in (page, slot, h, d))
            return layout.element_offset(self.spec, at, in_page, head, first + lanes, self._at["stride0"]), page
        offsets = layout.element_offset(self.spec, page, slot, h, d, self._at["stride0"])
        return np.asarray(offsets)[..., None] + lanes, page

    def _scale_offsets(
        self, b: Any, h: Any, t: Any, d: Any, width: int, what: str, clamp: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        self._need_scales(what)
        lanes = self._lanes(width, what, self.spec.num_scales)
        page, slot = self._clamped_page(b, t, what) if clamp else self._page(b, t, what)
        h, d = self._head_and_dim(h, d, 1, what)
        first = d // self.spec.granularity * self.spec.granule_scales
        in_range(first, self.spec.num_scales - width + 1, f"granule of d (of {width} scales)", what)
        offsets = layout.scale_offset(self.spec, page, slot, h, d, self._at["scales_stride0"])
        return np.asarray(offsets)[..., None] + lanes, page

    def _need_scales(self, what: str) -> None:
        if not self.spec.quantized:
            raise TypeError(f"{type(self).__name__}.{what}: needs a quantized cache (one with scales), got one without")

    def _need_rows(self, what: str) -> None:
        if self.spec.kind == FA3:
            raise TypeError(f"{type(self).__name__}.{what}: an fa3 cache has no rows; use block_paged_ptr")
        if self.spec.kind in page_orders.added:
            raise TypeError(f"{type(self).__name__}.{what}: a {self.spec.kind} cache has no rows; use load and store")

    def raw_page(self, b: Any, t: Any) -> Any:
        """The table's unclamped entry for a token; a page id out of [0, N) means that there is no page."""
        page, _ = self._page(b, t, "raw_page")
        return int(page) if page.ndim == 0 else page

    def page(self, b: Any, t: Any) -> Any:
        """The page that a read of a token accesses: the table's entry, or the last page if that is out of range."""
        page, _ = self._clamped_page(b, t, "page")
        return int(page) if page.ndim == 0 else page

    # --- elements ---

    def load(self, b: Any, h: Any, t: Any, d: Any = 0, width: int = 1, dtype: Any = None) -> Any:
        """Read ``width`` consecutive elements of the head dimension, dequantized.

        Parameters
        ----------
        b, h, t, d : int or array of int
            Sequence, head, token position, dimension; arrays broadcast.
        width : int
            Number of lanes. In a quantized cache all lanes must be in one granule.
        dtype : DType or an argument of ``dtypes.of``, optional
            Result type; by default the storage type, or f32 for a quantized cache, which refuses its storage type.

        Returns
        -------
        NumPy scalar or array
            The indices' broadcast shape; with ``width > 1`` followed by a dimension of that extent.
        """
        spec = self.spec
        target = default_load_dtype(spec.dtype, spec.quantized) if dtype is None else dtypes.of(dtype)
        if spec.quantized and ((target == spec.dtype and target.bits == 8) or not target.is_float):
            raise ValueError(
                f"{type(self).__name__}.load: dequantizes, so dtype must be a float other than the storage type "
                f"{spec.dtype.name}, got {target.name}; load_raw reads stored values"
            )
        offsets, _ = self._element_offsets(b, h, t, d, width, "load", clamp=True)
        stored = elements_at(self._array("elements", "load"), offsets, spec)
        if not spec.quantized:
            return squeeze(saturating_cast(stored, target), width)
        first = integers(d, "d", "load")
        if (first % spec.granularity + width > spec.granularity).any():
            raise ValueError(
                f"{type(self).__name__}.load: all {width} lanes must share one granule of {spec.granularity} elements, "
                f"got d = {d}"
            )
        scale_at, _ = self._scale_offsets(b, h, t, d, spec.granule_scales, "load", clamp=True)
        scale = self._array("scales", "load")[scale_at]
        zero = scale[..., 1:] if spec.zero else None
        return squeeze(dequantize(stored, scale[..., :1], target, zero), width)

    def load_raw(self, b: Any, h: Any, t: Any, d: Any = 0, width: int = 1) -> Any:
        """Read ``width`` stored values of a quantized cache, without dequantization.

        Of 4-bit elements these are bytes of two, from that of the even element ``d`` on.
        """
        self._need_scales("load_raw")
        offsets, _ = self._unit_offsets(b, h, t, d, width, "load_raw", clamp=True)
        return squeeze(self._array("elements", "load_raw")[offsets], width)

    def load_quantized(self, b: Any, h: Any, t: Any, d: Any = 0, width: int = 1) -> Any:
        """Another name of :meth:`load_raw`."""
        return self.load_raw(b, h, t, d, width)

    def store(self, b: Any, h: Any, t: Any, d: Any, value: Any, oob: str = "drop") -> None:
        """Write a scalar, or a vector of lanes in the last dimension, of the storage type, without quantization.

        Of 4-bit elements these are bytes (uint8) of two, from that of the even element ``d`` on.

        Parameters
        ----------
        b, h, t, d : int or array of int
        value : array-like
            An array of the storage type, or Python numbers, which are converted (saturating). Its shape is the
            indices' broadcast shape, followed by a dimension for the lanes of a vector.
        oob : {"drop", "trap", "unchecked"}
            For a page id out of [0, N) in the table: write nothing; raise IndexError; trust the table (on the host an
            IndexError too).
        """
        shape = np.broadcast_shapes(*(np.shape(i) for i in (b, h, t, d)))
        values, width = self._stored(value, self.spec.dtype.unit, shape, "store")
        offsets, page = self._unit_offsets(b, h, t, d, width, "store", clamp=False)
        self._write("elements", offsets, page, values, oob, "store")

    def _stored(self, value: Any, dtype: DType, shape: tuple[int, ...], what: str) -> tuple[np.ndarray, int]:
        if hasattr(value, "dtype"):
            values = np.asarray(value)
            if values.dtype != dtype.numpy:
                raise TypeError(
                    f"{type(self).__name__}.{what}: value must have dtype {dtype.numpy}, got {values.dtype}; "
                    f"convert it first"
                )
        else:
            values = saturating_cast(value, dtype)
        if values.ndim == len(shape) + 1:
            return values, values.shape[-1]
        return values[..., None], 1

    def _write(
        self, which: str, offsets: np.ndarray, page: np.ndarray, values: np.ndarray, oob: str, what: str
    ) -> None:
        if oob not in OOB:
            raise ValueError(f"{type(self).__name__}.{what}: oob must be one of {', '.join(OOB)}, got {oob!r}")
        target = self._array(which, what)
        if self.readonly:
            raise ValueError(f"{type(self).__name__}.{what}: the cache's buffers are read-only")
        inside = page < self._at["num_blocks"]
        if oob != "drop" and not inside.all():
            stray = int(np.asarray(page)[~inside].flat[0])
            raise IndexError(
                f"{type(self).__name__}.{what}: page id must be in [0, {self._at['num_blocks']}), got {stray}"
            )
        keep = np.broadcast_to(np.asarray(inside)[..., None], offsets.shape)
        target[offsets[keep]] = np.broadcast_to(values, offsets.shape)[keep]

    # --- scales ---

    def load_scale(self, b: Any, h: Any, t: Any, d: Any = 0, width: int = 1) -> Any:
        """Read ``width`` consecutive scales from granule ``d // granularity`` on, in the scale type."""
        offsets, _ = self._scale_offsets(b, h, t, d, width, "load_scale", clamp=True)
        return squeeze(self._array("scales", "load_scale")[offsets], width)

    def store_scale(self, b: Any, h: Any, t: Any, d: Any, value: Any, oob: str = "drop") -> None:
        """Write scales from granule ``d // granularity`` on; ``value`` and ``oob`` as in :meth:`store`."""
        self._need_scales("store_scale")
        assert self.spec.scale_dtype is not None
        shape = np.broadcast_shapes(*(np.shape(i) for i in (b, h, t, d)))
        values, width = self._stored(value, self.spec.scale_dtype, shape, "store_scale")
        offsets, page = self._scale_offsets(b, h, t, d, width, "store_scale", clamp=False)
        self._write("scales", offsets, page, values, oob, "store_scale")

    # --- rows ---

    def row_idx(self, b: Any, t: Any) -> Any:
        """Row of a token, in token slots from the view's base: page * S + slot."""
        self._need_rows("row_idx")
        page, slot = self._clamped_page(b, t, "row_idx")
        rows = page * layout.row_stride(self.spec, self._at["stride0"]) + slot
        return int(rows) if rows.ndim == 0 else rows

    def get_tma_row(self, encoded: Any) -> Any:
        """Row of an encoded index page*P + slot, without the lookup table; -1 for a negative index."""
        self._need_rows("get_tma_row")
        encoded = integers(encoded, "encoded", "get_tma_row")
        rows = np.where(encoded < 0, -1, layout.tma_row(self.spec, encoded, self._at["stride0"]))
        return int(rows) if rows.ndim == 0 else rows

    def num_kv_rows(self) -> int:
        """Number of rows of the view: (N-1)*S + P."""
        self._need_rows("num_kv_rows")
        return layout.num_rows(self.spec, self._at["num_blocks"], self._at["capacity"], self._at["stride0"])

    def populate(
        self,
        b: int,
        base: int,
        tile_rows: int,
        *,
        base_alignment: int | None = None,
        pair_cta: bool = False,
        is_leader: bool = True,
    ) -> PagedRowIndices:
        """First rows of a tile's pages: rows[i] = row_idx(b, base + i * min(P, tile_rows)).

        Parameters
        ----------
        b, base : int
            Sequence, and position of the tile's first token.
        tile_rows : int
            Tokens of the tile. It divides the page size or is a multiple of it, over at most 16 pages.
        base_alignment : int, optional
            A divisor of ``base``, by default ``tile_rows``; used if the tile spans several pages.
        pair_cta, is_leader : bool
            Stored in the result.

        Raises
        ------
        ValueError
            For invalid parameters, a base that is not aligned, or a tile past the table's columns (pad the table:
            ``layout.lookup_columns``).
        """
        self._need_rows("populate")
        what = f"{type(self).__name__}.populate"
        for problem in layout.populate_problems(tile_rows, self.spec.page_size, base_alignment, pair_cta):
            raise ValueError(f"{what}: {problem}")
        pages = layout.populate_pages(tile_rows, self.spec.page_size)
        alignment = tile_rows if base_alignment is None else base_alignment
        if pages > 1:
            columns, first = self._at["lookup_columns"], base // self.spec.page_size
            if base % alignment:
                raise ValueError(f"{what}: base must be a multiple of the promised alignment {alignment}, got {base}")
            if first + pages > columns:
                raise ValueError(
                    f"{what}: the tile reads {pages} table entries from column {first} on, but the table has {columns} "
                    f"columns; pad it as layout.lookup_columns says"
                )
        tokens = base + np.arange(pages) * layout.effective_page(tile_rows, self.spec.page_size)
        rows = np.atleast_1d(self.row_idx(b, tokens))
        if (rows >= 2**32).any():
            raise ValueError(f"{what}: rows must fit 32 bits, got {int(rows.max())}")
        return PagedRowIndices(tile_rows, self.spec.page_size, rows.astype(np.uint32), pair_cta, is_leader)

    # --- pointers ---

    def block_paged_ptr(self, b: int, t: int, h: int, d: int = 0, *, tile: int = 1) -> np.ndarray:
        """A view of the cache's memory from (b, t, h, d) on.

        Parameters
        ----------
        b, t, h, d : int
        tile : int
            Consecutive tokens from ``t``; it must divide the page size and ``t``. In a continuous cache, any number of
            tokens within the region.

        Returns
        -------
        numpy.ndarray
            A view [tile, D - d]; element [i, j] is (b, t + i, h, d + j). A page id out of range raises IndexError. Of
            4-bit elements the view has their bytes, [tile, (D - d) / 2].
        """
        what = "block_paged_ptr"
        if self.spec.kind in page_orders.added:
            self._need_rows(what)
        if tile < 1 or (self.spec.paged and self.spec.page_size % tile):
            raise ValueError(
                f"{type(self).__name__}.{what}: tile must divide the page size {self.spec.page_size}, got {tile}"
            )
        if self.spec.paged and t % tile:
            raise ValueError(f"{type(self).__name__}.{what}: t must be a multiple of tile {tile}, got {t}")
        if not self.spec.paged and t + tile > self._slots(b):
            raise IndexError(f"{type(self).__name__}.{what}: t + tile must be at most {self._slots(b)}, got {t + tile}")
        offsets, page = self._unit_offsets(b, h, t, d, 1, what, clamp=False)
        self._exists(page, what)
        flat, units = self._array("elements", what), self.spec.dtype.units
        return np.lib.stride_tricks.as_strided(
            flat[int(offsets.flat[0]) :],
            (tile, units(self.spec.head_size - d)),
            (units(self.spec.token_stride) * flat.itemsize, flat.itemsize),
            writeable=not self.readonly,
        )

    def scales_block_paged_ptr(self, b: int, t: int, h: int, d: int = 0) -> np.ndarray:
        """A view of the scales from that of (b, t, h, d) on, for the remaining granules of this token and head."""
        offsets, page = self._scale_offsets(b, h, t, d, 1, "scales_block_paged_ptr", clamp=False)
        self._exists(page, "scales_block_paged_ptr")
        start = int(offsets.flat[0])
        return self._array("scales", "scales_block_paged_ptr")[
            start : start + self.spec.num_scales - d // self.spec.granularity * self.spec.granule_scales
        ]

    def _exists(self, page: np.ndarray, what: str) -> None:
        if (page >= self._at["num_blocks"]).any():
            raise IndexError(
                f"{type(self).__name__}.{what}: page id must be in [0, {self._at['num_blocks']}), got {int(page)}"
            )

    def scales_raw_ptr(self) -> np.ndarray | None:
        """A view of all scales, [N, P, H, G], or None (a null pointer) for a cache without scales."""
        self._need_host("scales_raw_ptr")
        return self.scales

    # --- lengths ---

    def cache_lengths_nd(self) -> np.ndarray:
        """The cache lengths, uint32 [B]: tokens cached before this step. Read-only."""
        return self._array("lengths", "cache_lengths_nd")

    def cache_length(self, b: Any) -> Any:
        """Tokens of sequence ``b`` cached before this step."""
        lengths = self._array("lengths", "cache_length")
        b = integers(b, "b", "cache_length")
        in_range(b, self._at["batch"], "b (sequence)", "cache_length")
        found = lengths[b]
        return int(found) if found.ndim == 0 else found

    # --- methods that need no memory ---

    def empty_cache(self) -> bool:
        """Whether ``max_cache_length``, which includes new tokens, is 0."""
        return self._at["max_cache_length"] == 0

    def max_prompt_length(self) -> int:
        """Largest number of new tokens of a sequence."""
        return self._at["max_seq_length"]

    def max_context_length(self) -> int:
        """Largest number of cached and new tokens of a sequence."""
        return self._at["max_cache_length"]

    def max_tile_size(self) -> int:
        """Largest number of contiguous tokens: the page size; -1 (no limit) for a continuous cache."""
        return self.spec.max_tile_size


def integers(value: Any, name: str, what: str) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{what}: {name} must be an integer or an array of integers, got {array.dtype}")
    return array.astype(np.int64)


def in_range(value: np.ndarray, extent: Any, name: str, what: str) -> None:
    outside = (value < 0) | (value >= extent)
    if outside.any():
        extent = np.broadcast_to(extent, outside.shape)[outside].flat[0]
        raise IndexError(f"{what}: {name} must be in [0, {extent}), got {int(value[outside].flat[0])}")


def elements_at(flat: np.ndarray, offsets: np.ndarray, spec: CacheSpec) -> np.ndarray:
    """The stored elements at offsets, which count elements; of packed ones the numbers that they stand for, f32."""
    dtype = spec.dtype
    if not dtype.packed:
        return flat[offsets]
    if dtype.code:
        eights = flat[(offsets // CODED * dtype.bits)[..., None] + np.arange(dtype.bits)]
        return np.take_along_axis(uncoded(eights, dtype), (offsets % CODED)[..., None], -1)[..., 0]
    return numbers(flat[offsets // 2] >> (offsets % 2 * 4).astype(np.uint8) & np.uint8(15), dtype)


def squeeze(values: np.ndarray, width: int) -> Any:
    """Drop the lanes' dimension of a scalar access; a 0-d result becomes a NumPy scalar."""
    return values[..., 0][()] if width == 1 else values
