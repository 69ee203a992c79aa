# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernels over latent rows of Hopper's tensor cores, by the interpreter: 64 query rows a block, and few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from ops.test_attention_mla import (
    latent_problem,
    on_gpu,
    rope_reference,
    scaled_reference,
    store_rope_keys,
    store_scaled_rows,
)
from reference import attention as reference
from reference.random_caches import random_values

from kvarn.dialect import dtypes
from kvarn.emulator import grid as ptx

pytestmark = pytest.mark.sampled(3)


@dataclass(frozen=True)
class Shape:
    """A cache, and queries of ``heads``; ``most``: what is promised of new tokens.

    Rows have ``size`` elements, the first ``value_size`` of them values; with ``rope`` the last 2 * ``rope`` bytes are
    ``rope`` bf16. ``rows``: of a tile, where the schedule says it. ``granularity``: elements of a scale; 0: there are
    none; ``inline``: of one that lies in the row.
    """

    heads: int = 16
    most: int = 4
    size: int = 144
    value_size: int = 128
    dtype: str = "bf16"
    query: str = "bf16"
    granularity: int = 0
    rope: int = 0
    inline: int = 0
    kind: str = "paged"
    page_size: int = 64
    mask: tuple[str, int] = ("causal", 0)
    splits: int | None = None
    cached: tuple[int, ...] = (130, 0, 61, 7, 0)
    new: tuple[int, ...] = (2, 1, 3, 0, 0)
    target: str = "sm_90a"
    by: str = "latent"
    rows: int = 0

    def run(self, seed: int, order: ptx.Order | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(output, what it should be)."""
        scales = {"scale_dtype": "f32", "granularity": self.granularity} if self.granularity else {}
        rng, problem = latent_problem(
            seed, self.kind, self.dtype, head_size=self.size, cached=self.cached, new=self.new,
            page_size=self.page_size, **scales,
        )  # fmt: skip
        scales_in_rows = (self.size - 2 * self.rope) // (self.inline + 4) * 4 if self.inline else 0
        columns = self.size - self.rope - scales_in_rows
        query = random_values(rng, (problem.tokens, self.heads, columns), dtypes.of(self.query), self.spread)
        schedule: dict[str, Any] = {"kind": self.by}
        if self.most:
            schedule["max_queries"] = self.most
        if self.splits:
            schedule["splits"] = self.splits
        if self.rows:
            schedule["rows"] = self.rows
        mask, span = self.mask
        if self.inline:
            stored = store_scaled_rows(rng, problem, columns - self.rope, self.rope, self.inline)
            out = on_gpu(problem, query, self.value_size, schedule, order, mask, span, self.inline, self.target)
            return out.astype(np.float64), scaled_reference(problem, query, *stored)
        stored = store_rope_keys(rng, problem, columns - self.rope, self.rope) if self.rope else None
        out = on_gpu(problem, query, self.value_size, schedule, order, mask, span, target=self.target)
        if stored is not None:
            return out.astype(np.float64), rope_reference(problem, query, stored, columns - self.rope)
        want, _ = reference.mla_attention(
            problem.collection, 1, query, problem.row_offsets, value_size=self.value_size, mask=mask, window=span,
            chunk=span,
        )  # fmt: skip
        return out.astype(np.float64), want

    @property
    def spread(self) -> float:
        """Of the query: scores of 8-bit integers are large."""
        return 1 / 64 if self.dtype == "i8" else 1.0


ONE = {"most": 1, "new": (1, 1, 1, 0, 1)}
CASES = {
    "64 rows": Shape(),
    "64 rows, no bound of new tokens": Shape(most=0),
    "heads of one token over two blocks": Shape(heads=72, **ONE),
    "partial results": Shape(splits=3),
    "more splits than tiles": Shape(splits=33, cached=(130, 0), new=(2, 1)),
    "f16": Shape(dtype="f16", query="f16"),
    "no column that is no value": Shape(size=128),
    "four boxes of values": Shape(size=288, value_size=256),
    "pages of 16": Shape(page_size=16),
    "pages of 128": Shape(page_size=128),
    "pages of 48": Shape(page_size=48),
    "pages of 5": Shape(page_size=5),
    "pages of 1, partial results": Shape(page_size=1, splits=2),
    "continuous": Shape(kind="continuous"),
    "window": Shape(mask=("sliding_window", 70)),
    "window, pages of 4": Shape(mask=("sliding_window", 70), page_size=4),
    "chunks": Shape(mask=("chunked_causal", 48)),
    "no mask": Shape(mask=("null", 0)),
    "by tiles, 128 values": Shape(by="tile"),
    "by tiles, 512 values": Shape(size=576, value_size=512, cached=(130, 0), new=(2, 1), by="tile"),
    "by tiles, 512 values, heads over two blocks": Shape(
        heads=72, size=576, value_size=512, cached=(30,), most=1, new=(1,), by="tile"
    ),
    "by tiles, pages of 5": Shape(page_size=5, by="tile"),
    "by tiles of 16 rows, 512 values": Shape(size=576, value_size=512, cached=(130, 0), new=(2, 1), by="tile", rows=16),
    "by tiles of 8 rows, pages of 5": Shape(heads=8, page_size=5, by="tile", rows=8),
    "by tiles of 32 rows, partial results": Shape(splits=3, by="tile", rows=32),
    "by tiles, partial results": Shape(splits=3, by="tile"),
    "by tiles, window, f16": Shape(mask=("sliding_window", 70), dtype="f16", query="f16", page_size=16, by="tile"),
    "by tiles, continuous, four boxes of values": Shape(kind="continuous", size=288, value_size=256, by="tile"),
    "by tiles, 384 values in two kernels": Shape(size=448, value_size=384, cached=(70,), new=(2,), by="tile"),
    "few rows": Shape(**ONE),
    "8 rows": Shape(heads=5, **ONE),
    "24 rows": Shape(heads=20, **ONE),
    "32 rows of two tokens": Shape(most=2, new=(2, 1, 2, 0, 0)),
    "few rows, partial results": Shape(splits=2, **ONE),
    "few rows, f16": Shape(dtype="f16", query="f16", **ONE),
    "few rows, no column that is no value": Shape(size=128, **ONE),
    "few rows, four boxes of values": Shape(size=288, value_size=256, **ONE),
    "few rows, pages of 16": Shape(page_size=16, **ONE),
    "few rows, pages of 5": Shape(page_size=5, **ONE),
    "few rows, continuous": Shape(kind="continuous", **ONE),
    "few rows, window": Shape(mask=("sliding_window", 70), splits=2, **ONE),
    "few rows, window, pages of 4": Shape(mask=("sliding_window", 70), page_size=4, **ONE),
    "few rows of two tokens, chunks": Shape(mask=("chunked_causal", 48), most=2, new=(2, 1, 2, 0, 0)),
    "8-bit rows": Shape(dtype="f8e4m3"),
    "8-bit rows, f16": Shape(dtype="f8e4m3", query="f16"),
    "8-bit rows with a scale": Shape(dtype="f8e4m3", granularity=144, splits=2),
    "8-bit rows with three scales": Shape(dtype="f8e4m3", granularity=48),
    "other 8-bit rows": Shape(dtype="f8e5m2", page_size=5),
    "8-bit integers": Shape(dtype="i8", granularity=144, mask=("sliding_window", 70)),
    "rows that end in bf16": Shape(dtype="f8e4m3", size=128 + 2 * 16, rope=16),
    "scaled rows that end in bf16": Shape(dtype="f8e4m3", size=128 + 2 * 16, rope=16, granularity=160, page_size=16),
    "rows with their scales in them": Shape(dtype="f8e4m3", size=128 + 16 + 2 * 16, rope=16, inline=32),
    "rows with scales of whole boxes in them": Shape(
        dtype="f8e4m3", size=256 + 16 + 2 * 16, value_size=256, rope=16, inline=64
    ),
    "few rows with their scales in them": Shape(dtype="f8e4m3", size=128 + 16 + 2 * 16, rope=16, inline=32, **ONE),
    "8-bit rows and query": Shape(dtype="f8e4m3", query="f8e4m3"),
    "8-bit rows and query, partial results, pages of 5": Shape(dtype="f8e4m3", query="f8e4m3", splits=2, page_size=5),
    "few 8-bit rows and query": Shape(dtype="f8e4m3", query="f8e4m3", **ONE),
    "24 8-bit rows and query": Shape(heads=20, dtype="f8e4m3", query="f8e4m3", **ONE),
    "40 8-bit rows and query": Shape(heads=36, dtype="f8e4m3", query="f8e4m3", **ONE),
    "8-bit rows and query, two boxes a copy": Shape(
        size=272, value_size=256, dtype="f8e4m3", query="f8e4m3", page_size=16
    ),
    "few 8-bit rows, two boxes a copy": Shape(size=464, value_size=256, dtype="f8e4m3", page_size=16, **ONE),
    "few 8-bit rows, f16, two boxes a copy": Shape(size=272, value_size=256, dtype="f8e4m3", query="f16", **ONE),
    "few rows that end in bf16, two boxes a copy": Shape(
        size=256 + 2 * 48, value_size=256, dtype="f8e4m3", rope=48, **ONE
    ),
    "few 8-bit rows": Shape(dtype="f8e4m3", **ONE),
    "few 8-bit rows, f16": Shape(dtype="f8e4m3", query="f16", **ONE),
    "few 8-bit rows with a scale": Shape(dtype="f8e4m3", granularity=144, splits=2, **ONE),
    "few 8-bit rows with three scales": Shape(dtype="f8e4m3", granularity=48, page_size=5, **ONE),
    "few 8-bit rows, 32 of two tokens": Shape(dtype="f8e4m3", granularity=144, most=2, new=(2, 1, 2, 0, 0)),
    "few rows that end in bf16": Shape(dtype="f8e4m3", size=128 + 2 * 16, rope=16, **ONE),
    "few scaled rows that end in bf16": Shape(dtype="f8e4m3", size=128 + 2 * 16, rope=16, granularity=160, **ONE),
}


@pytest.mark.parametrize("name", CASES)
def test_every_way_to_lay_out_the_work_gives_attention(name):
    out, want = CASES[name].run(1)
    np.testing.assert_allclose(out, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "shape", [Shape(cached=(150,), new=(2,)), Shape(cached=(150,), new=(2,), page_size=5, splits=2),
              Shape(cached=(200,), new=(1,), most=1), Shape(cached=(200,), new=(1,), most=1, page_size=5, splits=2),
              Shape(cached=(150,), new=(2,), dtype="f8e4m3"), Shape(cached=(200,), new=(1,), most=1, dtype="f8e4m3")],
)  # fmt: skip
def test_results_do_not_depend_on_the_order_of_warps_and_copies(shape):
    (first, _), *rest = (shape.run(2, order) for order in (*ptx.ORDERS[::2], ptx.ORDERS[3], *ptx.RANDOM))
    for other, _ in rest:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("shape", [Shape(splits=2), Shape(dtype="f8e4m3", **ONE)])
def test_nothing_is_read_before_the_kernels_ahead_have_ended(shape, monkeypatch):
    kernels = {}

    def note(text: str, entry: str, *_: Any) -> None:
        kernels[entry] = text[text.index(f".entry {entry}(") :].partition("\n}")[0]

    monkeypatch.setattr(ptx, "launch", note)
    shape.run(1)
    attention = next(text for entry, text in kernels.items() if entry.startswith("attention"))
    reads = [attention.index(x) for x in ("ld.global", "cp.async") if x in attention]
    assert attention.index("griddepcontrol.wait") < min(reads)
    assert "griddepcontrol.launch_dependents" in kernels["latent_combine"]
