# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Every cache operation over tables that hold anything: lengths, offsets, counts and page ids of any 32 bits.

Nothing is asked of the results. Arrays abut pages without access: what is read or written outside of them there ends
the process, on the host, or is an error of the PTX interpreter. What is written at an array's other side shows in a
pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import kvarn as kv
from kvarn.dialect import dtypes
from kvarn.ops import prefixes

from . import guarded
from .kinds import MMA
from .places import Place

ANY = np.array([0, 1, 3, 7, 17, 40, 100_000, 2**30, 2**31 - 1, 2**31, 2**32 - 7, 2**32 - 1], np.uint32)
HEADS, SIZE, BATCH, TOKENS, SLOTS, REGIONS = 2, 16, 3, 6, 24, 5


class Memory:
    """Arrays that abut pages without access at one side, and the place where kernels run."""

    def __init__(self, rng: np.random.Generator, side: str, place: Place) -> None:
        self.rng, self.side, self.place = rng, side, place
        self.beside: list[np.ndarray] = []

    def array(self, shape: tuple[int, ...], dtype: Any = "f32", fill: Any = 0.5) -> np.ndarray:
        """An array of a dtype."""
        found = dtypes.of(dtype).numpy
        made, beside = guarded.empty(shape, found, self.side)
        self.beside.append(beside)
        made[...] = np.asarray(fill).astype(found)
        return made

    def table(self, *shape: int) -> np.ndarray:
        """Any 32 bits: small numbers and extremes."""
        small = self.rng.integers(0, TOKENS + 1, shape)
        return self.array(shape, "u32", np.where(self.rng.random(shape) < 0.5, small, self.rng.choice(ANY, shape)))

    def offsets(self) -> np.ndarray:
        """Row offsets: right ones, right ones but for an entry, or any 32 bits."""
        found = self.table(BATCH + 1)
        if self.rng.random() < 0.7:
            entry, keep = self.rng.integers(0, BATCH + 1), self.rng.random() < 0.3
            other = found[entry]
            found[...] = np.sort(self.rng.integers(0, TOKENS + 1, BATCH + 1))
            found[entry] = found[entry] if keep else other
        return found

    def unharmed(self) -> bool:
        return all((beside == guarded.PATTERN).all() for beside in self.beside)


def collection(m: Memory, kind: str, dtype: str = "f32", is_mla: bool = False, size: int = SIZE) -> Any:
    """A collection whose lengths and table hold anything."""
    heads, halves = (1, 1) if is_mla else (HEADS, 2)
    lengths = m.table(BATCH)
    if kind == "continuous":
        blocks = m.array((REGIONS, halves, 2, SLOTS, heads, size), dtype)
        return kv.ContinuousBatchingKVCacheCollection(blocks, lengths, m.table(BATCH), 4, SLOTS)
    if kind == "fa3":
        blocks = m.array((2, REGIONS, 8, heads, size), dtype)
        return kv.PagedKVCacheFA3FallbackCollection(blocks, lengths, m.table(2, BATCH, 3), 4, SLOTS)
    blocks = m.array((REGIONS, halves, 2, 8, heads, size), dtype)
    scales = () if dtype != "i8" else (m.array((REGIONS, halves, 2, 8, heads, 1)), SIZE)
    return kv.PagedKVCacheCollection(blocks, lengths, m.table(BATCH, 3), 4, SLOTS, *scales)


def _attention(m: Memory, kind: str) -> None:
    c = collection(m, kind)
    query, out = m.array((TOKENS, 4, SIZE)), m.array((TOKENS, 4, SIZE))
    more: dict[str, Any] = {"lse": m.array((TOKENS, 4)), "return_lse": True}
    for options in ({}, {"mask": "null"}, {"window": 5}, {"chunk": 4}, {"kv_offsets": m.offsets()}):
        kv.ops.attention(c, 1, query, m.offsets(), out=out, **more, **options)
    padded = m.array((BATCH, 2, 4, SIZE))
    kv.ops.attention_padded(c, 1, padded, m.table(BATCH), out=m.array(padded.shape))
    if kind != "continuous":
        lists = {"pages": m.table(BATCH, HEADS, 5), "page_counts": m.table(BATCH, HEADS)}
        kv.ops.attention(c, 1, query, m.offsets(), out=out, **lists)
        summaries = kv.PageSummaries(c, data=m.array((c.num_blocks, c.num_layers, HEADS, 2, SIZE)))
        kv.ops.summarize_pages(c, 1, summaries, m.offsets())
        kv.ops.select_pages(c, 1, query, m.offsets(), summaries, **lists)
    keys, values = (kv.KVCacheMHAOperand(x) for x in (c.get_key_cache(0), c.get_value_cache(0)))
    kv.ops.attention(keys, values, query, m.offsets(), out=out)


def _block_masks(m: Memory, kind: str) -> None:
    """Lists of any tiles, besides those that are found."""
    c, query, out = collection(m, kind, "f16"), m.array((TOKENS, 4, SIZE), "f16"), m.array((TOKENS, 4, SIZE), "f16")
    given, tile = (c, query, m.offsets(), (lambda b, h, q, k: k <= q + h)), {"rows": 64, "keys": 16}
    shape = kv.ops.block_mask(*given, **tile).blocks.shape
    made = kv.ops.block_mask(*given, **tile, blocks=m.array(shape, "i32", 0))
    kv.ops.attention(c, 1, query, m.offsets(), out=out, block_mask=made)
    made.blocks[...] = m.table(*shape).view(np.int32)
    kv.ops.attention(c, 1, query, m.offsets(), out=out, block_mask=made)


def _operands(m: Memory, kind: str) -> None:
    query, out = m.array((TOKENS, 4, SIZE)), m.array((TOKENS, 4, SIZE))
    for dense in (True, False):
        right = m.array((BATCH,), "u32", 3) if dense else m.array((BATCH + 1,), "u32", np.arange(BATCH + 1))
        if dense:
            made = [kv.LayoutTensorMHAOperand(m.array((BATCH, 9, HEADS, SIZE)), lengths=right) for _ in range(2)]
        else:
            made = [kv.RaggedMHAOperand(m.array((11, HEADS, SIZE)), right) for _ in range(2)]
        right[...] = m.table(BATCH) if dense else m.offsets()  # what was checked when they were made
        for options in ({}, {"window": 5}, {"chunk": 4}):
            kv.ops.attention(*made, query, m.offsets(), out=out, **options)


def _appends(m: Memory, kind: str) -> None:
    key, value = m.array((TOKENS, HEADS, SIZE)), m.array((TOKENS, HEADS, SIZE))
    freqs = m.array((SLOTS, SIZE))
    for dtype in ("f32", "i8") if kind == "paged" else ("f32",):
        c = collection(m, kind, dtype)
        kv.ops.append(c, 1, key, value, m.offsets())
        if dtype == "f32":
            query, out = m.array((TOKENS, 4, SIZE)), m.array((TOKENS, 4, SIZE))
            kv.ops.rope_append(c, 0, query, key, value, m.offsets(), freqs, query_out=out)
            x, weight = m.array((TOKENS, 32)), m.array(((4 + 2 * HEADS) * SIZE, 32))
            kv.ops.project_append(c, 0, x, weight, m.offsets(), freqs_cis=freqs, query_out=out)
            x = x[: TOKENS // BATCH * BATCH].reshape(BATCH, -1, 32)
            kv.ops.project_append_padded(c, 1, x, weight, m.table(BATCH), freqs_cis=freqs)
            kv.ops.store_ragged(c.get_key_cache(0), key, m.offsets())
            kv.ops.store_padded(c.get_value_cache(1), m.array((BATCH, 2, HEADS, SIZE)), m.table(BATCH))


def _updates(m: Memory, kind: str) -> None:
    c, gamma, freqs = collection(m, kind), m.array((SIZE,)), m.array((SLOTS, SIZE))
    query, out = m.array((TOKENS, 4, SIZE)), m.array((TOKENS, 4, SIZE))
    kv.ops.rms_norm(c.get_key_cache(0), gamma, 1e-6, m.offsets())
    kv.ops.radd(c, 1, m.array((TOKENS, 2 * HEADS * SIZE)), m.table(BATCH), 1)
    kv.ops.iadd_2m(c, 1, m.array((2 * TOKENS, HEADS * SIZE)), m.offsets())
    kv.ops.rope(c, 0, query, m.offsets(), freqs, query_out=out)
    kv.ops.rope(c, 0, query, m.offsets(), freqs, query_out=out, position_ids=m.table(1, TOKENS))
    padded = m.array((BATCH, 2, 4, SIZE))
    kv.ops.rope_padded(c, 0, padded, m.table(BATCH), freqs, query_out=m.array(padded.shape))
    kv.ops.qk_norm(c, 1, query, m.offsets(), gamma, gamma, freqs_cis=freqs, query_out=out)


def _copies(m: Memory, kind: str) -> None:
    c, d = collection(m, kind), collection(m, "paged")
    kv.ops.gather(c.get_key_cache(0), m.table(TOKENS, 2), m.offsets(), m.array((TOKENS, 2, HEADS, SIZE)))
    kv.ops.copy_pages(c, m.table(4), m.table(4))
    kv.ops.transfer_pages(c, collection(m, kind), m.table(4), m.table(4))
    for accepted in (m.table(BATCH, 3), m.table(TOKENS)):
        kv.ops.commit(c, None, accepted, m.offsets())
    kv.ops.convert(c.get_key_cache(0), d.get_key_cache(1))
    pages = kv.ForeignPages.flashinfer(m.array((REGIONS, 2, 8, HEADS, SIZE)), m.table(BATCH), m.table(BATCH, 3))
    kv.ops.convert(pages.key, c.get_value_cache(0))
    kv.ops.convert(c.get_value_cache(1), pages.value)


def _latent(m: Memory, kind: str) -> None:
    if kind == "fa3":
        return  # has no latent form
    c = collection(m, kind, is_mla=True)
    query, out = m.array((TOKENS, 4, SIZE)), m.array((TOKENS, 4, 8))
    kv.ops.mla_attention(c, 1, query, m.offsets(), value_size=8, out=out)
    if kind == "paged":
        lists = {"indices": m.table(TOKENS, 5), "topk_lengths": m.table(TOKENS)}
        kv.ops.mla_attention(c, 1, query, m.offsets(), value_size=8, out=out, **lists)
    scores = m.array((TOKENS, SLOTS))
    kv.ops.index_scores(c, 1, query, m.array((TOKENS, 4)), m.offsets(), scores)
    kv.ops.select_tokens(scores, tokens=m.table(TOKENS, 5), counts=m.table(TOKENS))
    rows, offsets = m.array((9, SIZE)), m.table(BATCH)
    kv.ops.mla_decompress(c.get_key_cache(0), m.offsets(), offsets, rows)
    plan = kv.ops.MlaPrefillPlan(m.table(2, BATCH + 1), m.table(2, BATCH), m.table(2))
    kv.ops.mla_prefill_plan(m.offsets(), m.table(BATCH), 8, 2, plan)
    key, value = m.array((9, 4, 8)), m.array((9, 4, 8))
    more = {"out": m.array((TOKENS, 4, 8)), "lse": m.array((TOKENS, 4))}
    kv.ops.mla_prefill_chunk(c, 0, query, m.offsets(), key, value, m.offsets(), offsets, **more)


def _kernels(m: Memory, kind: str) -> None:
    """The kernels that GPUs have besides."""
    size, masks = 64, ({}, {"mask": "null"}, {"window": 5}, {"chunk": 4})
    c = collection(m, kind, "bf16", size=size)
    query, out = m.array((TOKENS, 4, size), "bf16"), m.array((TOKENS, 4, size), "bf16")
    padded, padded_out = (m.array((BATCH, 2, 4, size), "bf16") for _ in range(2))
    for schedule in (MMA, {"kind": "decode", "max_queries": 2, "max_batch": 4}):
        options = masks[m.rng.integers(0, len(masks))]
        kv.ops.attention(c, 1, query, m.offsets(), out=out, schedule=schedule, **options)
        kv.ops.attention_padded(c, 1, padded, m.table(BATCH), out=padded_out, schedule=schedule, **options)
    if kind != "continuous":
        lists = {"pages": m.table(BATCH, HEADS, 5), "page_counts": m.table(BATCH, HEADS)}
        kv.ops.attention(c, 1, query, m.offsets(), out=out, schedule=schedule, **lists)
    if kind == "paged":
        c = collection(m, kind, "bf16", is_mla=True, size=144)
        query, out = m.array((TOKENS, 4, 144), "bf16"), m.array((TOKENS, 4, 128), "bf16")
        lists = {"indices": m.table(TOKENS, 5), "topk_lengths": m.table(TOKENS)}
        for options in ({}, lists):
            kv.ops.mla_attention(c, 1, query, m.offsets(), value_size=128, out=out, **options)
        c, query = collection(m, kind, "bf16", is_mla=True, size=64), m.array((TOKENS, 4, 64), "bf16")
        kv.ops.index_scores(c, 1, query, m.array((TOKENS, 4)), m.offsets(), m.array((TOKENS, SLOTS)))


def _batches(m: Memory, kind: str) -> None:
    a, b, out = m.array((4, 8)), m.array((5, 8)), m.array((9, 8))
    kv.ops.merge_ragged(a, m.offsets(), b, m.offsets(), out, m.offsets())
    kv.ops.sliced_add(a, m.array((4, 8)), int(m.rng.choice([0, 3, 4, 5, 2**31 - 1])), m.array((4, 8)))
    sums = {"a": m.array((4, 2, 8)), "a_lse": m.array((4, 2)), "b": m.array((4, 2, 8)), "b_lse": m.array((4, 2))}
    kv.ops.merge_attention(**sums, out=m.array((4, 2, 8)), lse=m.array((4, 2)))
    read = (m.table(BATCH, 3), m.table(BATCH), m.offsets(), m.table(3), m.table(2))
    written = (m.table(2, 3), m.table(2), m.table(3), m.table(3), m.table(BATCH, 3), m.table(BATCH))
    prefixes._SPLIT((*read, *written), (("page_size", 8),))
    kv.ops.shift_tokens(m.table(TOKENS), m.offsets(), m.table(BATCH), m.table(TOKENS))
    kv.ops.remap_sparse_indices(m.table(TOKENS, 3), m.offsets(), m.table(BATCH, 3), 8, 5, m.table(TOKENS, 3))
    kv.ops.cache_row_offsets(m.offsets(), m.table(BATCH), m.offsets())
    kv.ops.increment_cache_lengths(m.table(BATCH), m.offsets())


@kv.kernel
def _reads(x: kv.MHAOperand, tokens: kv.Buffer[kv.i32, 1], out: kv.Buffer[kv.f32, 1]):
    """Any token of the sequences that there are, any sequence, and the last of the tokens that a length says."""
    total = kv.f32(0)
    for i in range(tokens.shape[0]):
        total += x.load(tokens[i], 0, 1, SIZE - 1, dtype=kv.f32)
    for b in range(x.batch_size()):
        for i in range(tokens.shape[0]):
            total += x.load(b, tokens[i], 1, SIZE - 1, dtype=kv.f32)
        total += x.load(b, x.cache_length(b) - 1, 1, SIZE - 1, dtype=kv.f32)
    out[0] = total


@kv.kernel
def _writes(x: kv.KVCache, tokens: kv.Buffer[kv.i32, 1]):
    for b in range(x.batch_size() + 1):
        for i in range(tokens.shape[0]):
            x.store(b, 1, tokens[i], SIZE - 1, 1.0)


@kv.kernel
def _looks(x: kv.PagedKVCache, columns: kv.Buffer[kv.i32, 1], out: kv.Buffer[kv.i32, 1]):
    """Look-ups of several pages at once: tiles and columns that begin anywhere."""
    for b in range(x.batch_size() + 1):
        for i in range(columns.shape[0]):
            rows = x.populate(b, columns[i] * 64, 64)
            out[0] = x.load_pages(b, columns[i] * 2, 2)[1] + x.load_pages(b, columns[i] * 8, 8)[7]
            out[1] = kv.i32(rows.get_row(0) + rows.get_row(63))


def _accesses(m: Memory, kind: str) -> None:
    """Kernels of the caller's, over the last layer's values: no page lies behind those of the last region."""
    c, tokens, out = collection(m, kind), m.array(ANY.shape, "i32", ANY.view(np.int32)), m.array((2,))
    values = c.get_value_cache(1)
    m.place.launch(_reads, 1, 1, kv.KVCacheMHAOperand(values), tokens, out)
    m.place.launch(_writes, 1, 1, values, tokens)
    if kind == "paged":
        for columns in (4, 12):
            table = m.table(BATCH, columns)
            pool = kv.PagedKVCacheCollection(c.blocks, c.cache_lengths, table, 4, SLOTS).get_value_cache(1)
            m.place.launch(_looks, 1, 1, pool, tokens, m.array((2,), "i32"))
    lengths, offsets = m.array((BATCH,), "u32", 3), m.array((BATCH + 1,), "u32", np.arange(BATCH + 1))
    dense = kv.LayoutTensorMHAOperand(m.array((BATCH, 9, HEADS, SIZE)), lengths=lengths)
    ragged = kv.RaggedMHAOperand(m.array((11, HEADS, SIZE)), offsets)
    lengths[...], offsets[...] = m.table(BATCH), m.table(BATCH + 1)
    for operand in (dense, ragged):
        m.place.launch(_reads, 1, 1, operand, tokens, out)


FAMILIES: dict[str, Callable[[Memory, str], None]] = {
    "attention": _attention, "block masks": _block_masks,
    "operands": _operands, "appends": _appends, "updates": _updates, "copies": _copies,
    "latent": _latent, "batches": _batches, "accesses": _accesses, "kernels": _kernels,
}  # fmt: skip
KINDS = ("paged", "continuous", "fa3")
OF_ONE_KIND = ("operands", "batches", "block masks")  # of no cache, or alike over every kind
OF_GPUS = ("kernels",)


def run(place: Place, family: str, kind: str, seed: int, side: str) -> None:
    """Run a family of operations over one draw of tables; AssertionError where something was written outside.

    ``place`` is active.
    """
    memory = Memory(np.random.default_rng(seed), side, place)
    FAMILIES[family](memory, kind)
    assert memory.unharmed(), f"{family} over {kind}, seed {seed}, side {side}: written outside of an array"


def draws(family: str, count: int) -> Iterator[tuple[str, int, str]]:
    """(kind, seed, side) of the draws of a family: so many a kind, at each side by turns."""
    for kind in KINDS[:1] if family in OF_ONE_KIND else KINDS:
        for seed in range(count):
            yield kind, seed, guarded.SIDES[seed % 2]
