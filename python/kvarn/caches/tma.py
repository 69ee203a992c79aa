# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The ``create_*_tma_tile`` methods of caches and operands: TMA descriptors as kernel arguments.

A descriptor is made for the device of the buffers, and keeps them alive; for host buffers it is a description without
the device's encoding, which suffices for compilation. It contains addresses and extents: other buffers, or more pages,
need a new one. Lengths and the lookup table are not part of it.
"""

from __future__ import annotations

from typing import Any

from kvarn.dialect import dtypes, layout, tma_layout
from kvarn.dialect.layout import CacheSpec
from kvarn.dialect.tma_layout import TmaSpec
from kvarn.runtime import tensormap
from kvarn.runtime.buffers import BufferView
from kvarn.runtime.tensormap import EncodedTensorMap


class TmaTiles:
    """Methods of caches and operands. They need ``_spec``, ``fields()``, ``device`` and the buffers in ``_keep``."""

    __slots__ = ()
    fields: Any
    _spec: CacheSpec
    _keep: tuple[BufferView, ...]

    def _encoded(self, made: TmaSpec, **options: int) -> EncodedTensorMap:
        return tensormap.of_owner(tensormap.describe(made, self._spec, self.fields(), **options), self)

    def create_tma_tile(
        self, swizzle: str = "128B", *, tile_rows: int, depth: int | None = None, paged: bool | None = None
    ) -> EncodedTensorMap:
        """A descriptor whose loads copy rows of one head.

        Parameters
        ----------
        swizzle : {"none", "32B", "64B", "128B"}
            Layout of rows in shared memory; ``kv.tma.shared_offset`` computes the offset of an element.
        tile_rows : int
            Tokens of a box, at most 256; they divide the page size, so that a box does not cross a page.
        depth : int, optional
            Elements of the head that one load copies, a multiple of the swizzle's bytes (16 for "none"); by default
            the head size, rounded up. Elements past the head are zeros.
        paged : bool, optional
            Whether coordinates are page and slot (rank 4) or row (rank 3). Page and slot, the default for caches,
            exclude rows of other layers, and allow pools of more than 2**31 rows.

        Returns
        -------
        EncodedTensorMap
            An argument for a kernel's ``kv.TensorMap`` parameter.

        Raises
        ------
        ValueError
            If the cache (fa3, which has no rows) or the hardware does not support such a tile; the message says why.
        """
        return self._encoded(tma_layout.tiled(self._spec, tile_rows, depth, swizzle, paged))

    def create_ragged_tma_tile(
        self, swizzle: str = "128B", *, tile_rows: int, depth: int | None = None, before_is_mapped: bool = False
    ) -> EncodedTensorMap:
        """A descriptor whose loads and stores copy the first n of ``tile_rows`` rows of one head.

        The other rows of a load are zeros. The descriptor's base is ``tile_rows`` rows before the view; that memory
        must be mapped.

        Parameters
        ----------
        swizzle, depth
            As in ``create_tma_tile``.
        tile_rows : int
            At most 256. The n rows must not cross the end of a page.
        before_is_mapped : bool
            The caller guarantees that the memory before the view is mapped; by default it must belong to the cache's
            buffer.

        Raises
        ------
        ValueError
            If there is no such memory, or as in ``create_tma_tile``.
        """
        fields = self.fields()
        made = tensormap.describe(tma_layout.ragged(self._spec, tile_rows, depth, swizzle), self._spec, fields)
        first = self._keep[0].data  # start of the buffer that contains the view
        if not before_is_mapped and made.base < first:
            raise ValueError(
                f"the {tile_rows} rows before the view must be mapped memory, got a view that starts "
                f"{fields[0] - first} bytes into its buffer, which is {first - made.base} too few: use fewer rows or "
                "create_tma_tile, or guarantee the memory with before_is_mapped=True"
            )
        return tensormap.of_owner(made, self)

    def create_gather4_tma_tile(
        self,
        *,
        tile_width: int,
        tile_height: int = 4,
        tile_stride: int | None = None,
        swizzle: str = "none",
        tma_dtype: Any = None,
        l2_promotion: int = 0,
    ) -> EncodedTensorMap:
        """A descriptor whose copies transfer four arbitrary rows. For kernels of sm_100a.

        Parameters
        ----------
        tile_width : int
            Elements per row to load, in ``tma_dtype``.
        tile_height : int
            Rows of the tile, a multiple of 4; one load copies four.
        tile_stride : int, optional
            Elements from one row to the next, in ``tma_dtype``; by default the cache's.
        swizzle : {"none", "32B", "64B", "128B"}
            With "none" a box spans ``tile_width``, which is then at most 256.
        tma_dtype : dtype, optional
            Element type of the loads; by default the storage type.
        l2_promotion : {0, 64, 128, 256}
            Bytes that the L2 cache fetches around a miss.
        """
        dtype = None if tma_dtype is None else dtypes.of(tma_dtype)
        made = tma_layout.gather4(self._spec, tile_width, tile_height, tile_stride, dtype, swizzle)
        return self._encoded(made, l2_promotion=l2_promotion)

    # For paged caches of one head, with a bf16 rope part after the 8-bit content.

    def create_rope_tma_tile(
        self, swizzle: str = "128B", *, tile_rows: int, rope: int, padded_depth: int, paged: bool | None = None
    ) -> EncodedTensorMap:
        """A descriptor whose loads copy the rope part of rows, as bf16.

        Parameters
        ----------
        swizzle, tile_rows, paged
            As in ``create_tma_tile``.
        rope : int
            bf16 elements of the rope part, a multiple of the swizzle's bytes.
        padded_depth : int
            Bytes before it, including padding; ``padded_depth + 2 * rope`` is the row.
        """
        made = tma_layout.rope(self._spec, tile_rows, padded_depth, rope, swizzle, paged)
        return self._encoded(made, content=padded_depth)

    def create_rope_gather4_tma_tile(
        self, *, tile_width: int, padded_depth: int, tile_height: int = 4, swizzle: str = "none", l2_promotion: int = 0
    ) -> EncodedTensorMap:
        """A descriptor whose copies transfer the first ``tile_width`` elements of the rope part of four arbitrary rows.

        For kernels of sm_100a. Parameters as in ``create_gather4_tma_tile`` and ``create_rope_tma_tile``.
        """
        made = tma_layout.rope_gather4(self._spec, padded_depth, tile_width, tile_height, swizzle)
        return self._encoded(made, content=padded_depth, columns=tile_width, l2_promotion=l2_promotion)


class OperandTmaTiles(TmaTiles):
    """Methods of operands only."""

    __slots__ = ()

    def create_scale_tma_tile(self, *, count: int) -> EncodedTensorMap:
        """A descriptor whose loads copy ``count`` consecutive scales, with all scales as one row.

        The scale of granule g of head h of row r has index ``(r * H + h) * G + g``; the total must be a multiple of 4.
        Loads take the coordinates (0, first index).

        Raises
        ------
        ValueError
            For an operand over a cache, whose scales are in pages; without scales; or if the hardware does not support
            it.
        """
        spec, fields = self._spec, self.fields()
        if spec.of_cache:
            raise ValueError(
                "create_scale_tma_tile needs a dense or ragged operand, got one over a "
                f"{spec.kind} cache, whose scales are in pages: read them with load_scale"
            )
        if spec.scale_dtype is None:
            raise ValueError("create_scale_tma_tile needs an operand with scales, got one without")
        at = dict(zip((f.name for f in layout.operand_fields(spec)), fields, strict=True))
        block = at["capacity"] * spec.num_heads * spec.num_scales
        if at["scales_stride0"] != block and at["num_blocks"] > 1:
            raise ValueError(
                f"scales must be packed to be one row, got sequences {at['scales_stride0']} scales apart, "
                f"which have {block}"
            )
        made = tensormap.describe_scales(spec.scale_dtype, at["scales"], at["num_blocks"] * block, count)
        return tensormap.of_owner(made, self)
