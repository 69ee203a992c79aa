# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The programs whose code ``bench.identity`` compares: names, and functions that make their modules for a target.

They are all rows of the table, calls of every operation and kind on a few tokens of zeros, user-level kernels, and the
modules of ``tests/pipeline``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import kvarn as kv
from kvarn.dialect import dtypes, layout, tma_layout
from kvarn.dialect.chips import COMPILED_FOR
from kvarn.measure.arrays import arrays

from . import ablation_kernels, products, static
from .cases import RANGE, SMALL, TABLE, Decode, Functions, Row, Sources, Tree
from .kvarn_rows import by_distance, call_of, operations_of, same_document
from .layouts import LAYOUTS, laid_out
from .problems import problem

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("host", *reversed(COMPILED_FOR))
Make = Callable[[str], Any]  # from a target to a Specialisation, or to the arguments of kv.compile
Calls = Iterator[tuple[str, Callable[[], Any]]]

LENGTHS, NEW = np.array([37, 0, 18], np.uint32), (3, 1, 2)
TOKENS, BATCH, HEADS, SIZE, PAGE = sum(NEW), len(NEW), 8, 128, 16
OFFSETS = np.cumsum([0, *NEW]).astype(np.int32)
FEW = {"max_queries": 1, "max_batch": 4}  # bounds that the caller of a decode knows
SIMT, F8 = {"kind": "simt"}, "f8e4m3"


def zeros(*shape: int, dtype: str = "bf16") -> np.ndarray:
    return np.zeros(shape, dtypes.by_name(dtype).numpy)


def whole(*shape: int) -> np.ndarray:
    return zeros(*shape, dtype="i32")


def pool(
    dtype: str = "bf16", heads: int = HEADS, size: int = SIZE, page: int = PAGE, scales: int = 0, halves: int = 2
) -> Any:
    """A paged collection of two layers; ``scales``: elements per scale."""
    pages = -(-64 // page)
    blocks = zeros(BATCH * pages + 1, halves, 2, page, heads, size, dtype=dtype)
    quantized: tuple[Any, ...] = (zeros(*blocks.shape[:-1], size // scales, dtype="f32"), scales) if scales else ()
    table = np.arange(BATCH * pages, dtype=np.uint32).reshape(BATCH, pages)
    return kv.PagedKVCacheCollection(blocks, LENGTHS, table, max(NEW), 64, *quantized)


def packed(group: int, rotation: int = 0, size: int = SIZE) -> Any:
    """A collection as of :func:`pool` of 4-bit elements, with a scale and a zero per ``group`` of them."""
    record, plain = kv.Record("u4", "f16", group, zero=True, rotation=rotation), pool(size=size)
    outer = plain.blocks.shape[:-1]
    blocks, scales = zeros(*outer, size // 2, dtype="u8"), zeros(*outer, 2 * size // group, dtype="f16")
    return kv.PagedKVCacheCollection(
        blocks, LENGTHS, plain.lookup_table, max(NEW), 64, scales=scales, record=record
    )  # fmt: skip


def latent(dtype: str = "bf16", size: int = 576, page: int = 64, scales: int = 0) -> Any:
    return pool(dtype, 1, size, page, scales, 1)


def foreign(word: str, dtype: str = "bf16") -> Any:
    ours = pool(dtype)
    table, options = ours.lookup_table, {}
    if "S" in word:
        table = (table[:, :, None] * PAGE + np.arange(PAGE, dtype=np.uint32)).reshape(BATCH, -1)
        options = {"page_size": 1}
    data = laid_out(ours.blocks, word)
    return kv.ForeignPages(data, LENGTHS, table, word, max_seq_length=3, max_cache_length=64, **options)


def specialised(call: Callable[[], Any], number: int, target: str) -> Any:
    """The specialisation of one operation in a call; the tiles of a block mask depend on the target."""
    with contextlib.nullcontext() if target == "host" else kv.emulated(target):
        operation, *given = operations_of(call)[number]
    return operation.specialised(*given, target)


def recorded(call: Callable[[], Any]) -> Iterator[tuple[str, Make]]:
    """The operations of a call, by number and name."""
    for i, (operation, *_) in enumerate(operations_of(call)):
        yield f"{i}:{operation.name}", partial(specialised, call, i)


# --- rows ------------------------------------------------------------------------------------------


def of_rows() -> Iterator[tuple[str, Make]]:
    """The rows of bench.cases; rows that bench.static does not support are called with a few tokens."""
    for row in (*TABLE, *RANGE, *SMALL):
        shape = row.shape
        if isinstance(shape, Functions):
            lengths = ((40, 40),) * 2
            shape = dataclasses.replace(shape, lengths=lengths, documents=shape.documents and 16)
        elif isinstance(shape, (Sources, Tree)):
            less = {"memory": 40} if isinstance(shape, Sources) else {"new": min(shape.new, 20)}
            shape = dataclasses.replace(shape, batch=2, context=80, **less)
        elif not getattr(shape, "prefix", 0):
            yield row.name, lambda target, row=row: static.specialisation(row, target)
            continue
        else:
            shape = dataclasses.replace(shape, batch=4, context=80, prefix=64)
        schedule = FEW if isinstance(shape, Decode) and not isinstance(shape, Tree) else None
        p = problem(arrays("numpy"), Row(row.name, row.title, shape, row.dtype), split=False)
        for part, make in recorded(lambda p=p, schedule=schedule: call_of(p, schedule)(0)):
            yield f"{row.name} {part}", make


# --- operations --------------------------------------------------------------------------------------


def even(b: Any, h: Any, q: Any, k: Any) -> Any:
    return ((q + k + h) & 1) == 0


SAME, CAUSAL_SAME = ((mask, whole(BATCH, 64)) for mask in (same_document, kv.masks.causal & same_document))


def biased(heads: int) -> tuple[Any, ...]:
    return by_distance, zeros(heads, 32, dtype="f32"), whole(128)


def of_attention() -> Calls:
    attend = partial(kv.ops.attention, row_offsets=OFFSETS)
    cache, q, slopes = pool(), zeros(TOKENS, 32, SIZE), zeros(32, dtype="f32")
    lse = zeros(TOKENS, 32, dtype="f32")
    kinds: dict[str, Any] = {"": None, ", few": FEW}
    by_rows = ("window", "softcap", "mask and score", "pages")
    forms: dict[str, dict[str, Any]] = {
        "window": {"window": 20}, "chunk": {"chunk": 24}, "no mask": {"mask": "null"}, "softcap": {"softcap": 30.0},
        "sinks and lse": {"sinks": slopes, "lse": lse}, "alibi": {"alibi_slopes": slopes},
        "prior": {"prior": (zeros(*q.shape, dtype="f32"), lse)}, "tree": {"tree": whole(TOKENS, 1)},
        "mask of parity": {"mask": even},
        "mask": {"mask": SAME}, "causal and mask": {"mask": CAUSAL_SAME}, "score": {"score": biased(32)},
        "mask and score": {"mask": CAUSAL_SAME, "score": biased(32)},
        "pages": {"pages": whole(BATCH, HEADS, 2), "page_counts": whole(BATCH, HEADS)},
    }  # fmt: skip
    for name, form in forms.items():
        for kind, schedule in (kinds | ({", simt": SIMT} if name in by_rows else {})).items():
            yield f"attention, {name}{kind}", partial(attend, cache, 0, q, schedule=schedule, **form)
    for name in ("alibi", "score", "causal and mask"):
        yield f"attention, f8, {name}", partial(attend, pool(F8), 0, q, **forms[name])
    caches: dict[str, tuple[Any, str]] = {
        "f8": (pool(F8), "bf16"), "f8 x f8": (pool(F8), F8), "f8e5m2": (pool("f8e5m2"), "f16"),
        "f8, granule 32": (pool(F8, scales=32), "bf16"), "i8, granule 128": (pool("i8", scales=128), "bf16"),
        "f16": (pool("f16"), "f16"), "f32": (pool("f32"), "f32"), "d40": (pool(size=40), "bf16"),
        "d512": (pool(size=512), "bf16"), "group 1": (pool(heads=32), "bf16"), "page 5": (pool(page=5), "bf16"),
        "f8 of 64": (pool(F8, size=64), "bf16"),
        "int4": (packed(128), "bf16"), "int4, groups of 64": (packed(64, 64), "bf16"),
        "int4, groups of 32": (packed(32), "f16"), "int4 of 256": (packed(32, 16, 256), "bf16"),
    }  # fmt: skip
    for name, (c, dtype) in caches.items():
        rows, out = (zeros(TOKENS, 32, c.head_size, dtype=d) for d in (dtype, "bf16" if dtype == F8 else dtype))
        for kind, schedule in kinds.items():
            yield f"attention, {name}{kind}", partial(attend, c, 0, rows, out=out, schedule=schedule)
        if name in ("f8", "d512"):
            invariant = {"batch_invariant": True, **FEW}
            yield f"attention, {name}, invariant", partial(attend, c, 0, rows, out=out, schedule=invariant)
    yield "attention, padded", partial(kv.ops.attention_padded, cache, 0, zeros(BATCH, 3, 32, SIZE), whole(BATCH))
    sources = {"mask": ["null", "causal"], "kv_offsets": [0 * OFFSETS, None]}
    operands = [kv.KVCacheMHAOperand(c) for c in (cache.get_key_cache(0), cache.get_value_cache(0))]
    for kind, schedule in {"": None, ", simt": SIMT}.items():
        yield f"attention, two sources{kind}", partial(attend, [cache] * 2, [0, 1], q, schedule=schedule, **sources)
        yield f"attention, operands{kind}", partial(attend, *operands, q, schedule=schedule)
    made = partial(kv.ops.block_mask, cache, q, OFFSETS, even, rows=128, keys=64)
    yield "block mask of parity", made
    yield "attention, block mask", lambda: attend(
        cache, 0, q, block_mask=kv.ops.block_mask(cache, q, OFFSETS, CAUSAL_SAME)
    )  # fmt: skip
    rows = [zeros(TOKENS, HEADS, SIZE)] * 2
    for name, word in LAYOUTS.items():
        yield f"attention, {name}", partial(attend, foreign(word), 0, q)
        yield f"attention, {name}, few", partial(attend, foreign(word), 0, q, schedule=FEW)
        yield f"append, {name}", partial(kv.ops.append, foreign(word, F8), 0, *rows, OFFSETS)


def of_latent() -> Calls:
    attend = partial(kv.ops.mla_attention, row_offsets=OFFSETS)
    listed = {"indices": whole(TOKENS, 64), "topk_lengths": whole(TOKENS)}
    mask = (kv.masks.causal & same_document, whole(BATCH, 64))
    for heads, dtype in ((128, "bf16"), (16, "bf16"), (128, F8), (16, F8), (16, "f16"), (4, "f32")):
        of_query = "bf16" if dtype == F8 else dtype
        q, lse = zeros(TOKENS, heads, 576, dtype=of_query), zeros(TOKENS, heads, dtype="f32")
        prior = {"prior": (zeros(TOKENS, heads, 512, dtype="f32"), lse), "lse": lse}
        forms: dict[str, dict[str, Any]] = {
            "plain": {}, "sparse": listed, "window": {"window": 20}, "score": {"score": biased(heads)},
            "mask": {"mask": mask}, "prior": prior, "simt": {"schedule": SIMT}, "tile": {"schedule": {"kind": "tile"}},
        }  # fmt: skip
        for name, form in list(forms.items())[: 2 if dtype in ("f16", "f32") else None]:
            yield f"mla {dtype}, {heads} heads, {name}", partial(attend, latent(dtype), 0, q, **form)
    for heads in (16, 128):
        scaled, q = {"inline_scales": 128, **listed}, zeros(TOKENS, heads, 576)
        yield f"mla of 656 bytes, {heads} heads, sparse", partial(attend, latent(F8, 656), 0, q, **scaled)
    yield "mla, block mask", partial(kv.ops.block_mask, latent(), zeros(TOKENS, 16, 576), OFFSETS, even)
    for heads in (16, 128):
        q, keys, values = zeros(TOKENS, heads, 192), zeros(40, heads, 128), zeros(40, heads, 128)
        results = {"out": zeros(TOKENS, heads, 128), "lse": zeros(TOKENS, heads, dtype="f32")}
        chunk = partial(kv.ops.mla_prefill_chunk, latent(), 0, q, OFFSETS, keys, values, OFFSETS, whole(BATCH))
        yield f"mla chunk, {heads} heads", chunk
        yield f"mla chunk, {heads} heads, accumulated", partial(chunk, accumulate=True, **results)
    cache = latent().get_key_cache(0)
    yield "mla decompress", partial(kv.ops.mla_decompress, cache, OFFSETS, whole(BATCH), zeros(TOKENS, 576))
    yield "mla plan", partial(kv.ops.mla_prefill_plan, OFFSETS, LENGTHS.view(np.int32), 64, 4)


def of_projections() -> Calls:
    k, columns = 512, (32 + 2 * HEADS) * SIZE
    gammas = {name: zeros(SIZE, dtype="f32") for name in ("q_gamma", "k_gamma")}
    turned = {"freqs_cis": zeros(64, SIZE, dtype="f32"), "interleaved": False}
    groups, of_f8 = {"weight_scale": zeros(columns, k // 128), "weight_format": "uint4b8"}, zeros(columns, k, dtype=F8)
    scales = {"x_scale": zeros(TOKENS, 1, dtype="f32"), "weight_scale": zeros(columns, 1, dtype="f32")}
    weights: dict[str, tuple[str, np.ndarray, dict[str, Any]]] = {
        "bf16": ("bf16", zeros(columns, k), {}),
        "f16, bias, norms": ("f16", zeros(columns, k, dtype="f16"), {"bias": zeros(columns, dtype="f16"), **gammas}),
        "f8, rows": (F8, of_f8, scales), "uint4b8": ("bf16", zeros(columns, k // 2, dtype="u8"), groups),
        "mxfp8": ("bf16", of_f8, {"weight_scale": zeros(columns, k // 32, dtype="f8e8m0")}),
    }  # fmt: skip
    kinds: dict[str, Any] = {"": None, "at most 8": {"max_tokens": 8}, "simt": SIMT}
    kinds |= {name: {"kind": name, "max_tokens": 8} for name in ("stream_k", "full_k")}
    kinds |= {
        "stream_k of 64": {"kind": "stream_k", "max_tokens": 64},
        "full_k of 64": {"kind": "full_k", "max_tokens": 64},
    }
    for name, (dtype, weight, options) in weights.items():
        cache, out = pool("f16" if dtype == "f16" else "bf16"), zeros(TOKENS, 32, SIZE, dtype=dtype.replace(F8, "bf16"))
        project = partial(kv.ops.project_append, cache, 0, zeros(TOKENS, k, dtype=dtype), weight, OFFSETS)
        for kind, schedule in kinds.items():
            yield f"projection {name}, {kind}", partial(project, schedule=schedule, query_out=out, **options, **turned)
    padded = partial(kv.ops.project_append_padded, pool("i8", scales=64), 0, zeros(BATCH, 2, k))
    yield "projection, padded, to i8", partial(padded, zeros(columns, k), whole(BATCH), **turned)


def of_others() -> Calls:
    ops, cache, lengths = kv.ops, pool(), LENGTHS.view(np.int32)
    q, rows, padded = zeros(TOKENS, 32, SIZE), zeros(TOKENS, HEADS, SIZE), zeros(BATCH, 3, 32, SIZE)
    keys, freqs, gamma = cache.get_key_cache(0), zeros(64, SIZE, dtype="f32"), zeros(SIZE, dtype="f32")
    appended = {"": cache, " f8": pool(F8), " i8": pool("i8", scales=32), " d40": pool(size=40)}
    appended |= {" int4": packed(128), " int4 of groups": packed(32), " int4, rotated": packed(64, 64)}
    for name, c in appended.items():
        x = zeros(TOKENS, HEADS, c.head_size)
        yield f"append{name}", partial(ops.append, c, 0, x, x, OFFSETS)
    for c in (cache, pool(F8), pool(size=40)):
        x = zeros(TOKENS, HEADS, c.head_size, dtype=c.dtype.name)
        yield f"store ragged {c.dtype.name} {c.head_size}", partial(ops.store_ragged, c.get_key_cache(0), x, OFFSETS)
    rotated = partial(ops.rope_append, pool(F8), 0, q, rows, rows, OFFSETS, freqs, q_gamma=gamma, k_gamma=gamma)
    for turned in ({"interleaved": False}, {"interleaved": True}):
        yield f"rope {turned}", partial(ops.rope, cache, 0, q, OFFSETS, freqs, **turned)
        yield f"rope_append {turned}", partial(rotated, **turned)
    turned_u4 = partial(ops.rope_append, packed(128, 128), 0, q, rows, rows, OFFSETS, freqs)
    yield "rope_append int4, rotated", partial(turned_u4, interleaved=False)
    yield "rope padded", partial(ops.rope_padded, cache, 0, padded, whole(BATCH), freqs)
    yield "store padded", partial(ops.store_padded, keys, padded[:, :, :HEADS], whole(BATCH))
    index = ops.IndexHeads(pool(heads=1), zeros(TOKENS, 4, SIZE), gamma, gamma)
    yield "qk_norm", partial(ops.qk_norm, cache, 0, q, OFFSETS, gamma, gamma, freqs_cis=freqs, index=index)
    yield "rms_norm", partial(ops.rms_norm, keys, zeros(SIZE), 1e-6, OFFSETS, total_tokens=TOKENS)
    yield "radd", partial(ops.radd, cache, 0, zeros(TOKENS, 2 * HEADS * SIZE), OFFSETS)
    yield "iadd_2m", partial(ops.iadd_2m, cache, 0, zeros(2 * TOKENS, HEADS * SIZE), OFFSETS)
    yield "convert", partial(ops.convert, keys, pool(F8).get_key_cache(0))
    yield "convert to int4", partial(ops.convert, keys, packed(64).get_key_cache(0))
    yield "convert from int4", partial(ops.convert, packed(64).get_key_cache(0), keys)
    yield "gather int4", partial(ops.gather, packed(64).get_key_cache(0), whole(BATCH, 4), OFFSETS)
    yield "copy_pages", partial(ops.copy_pages, cache, whole(2), whole(2) + 1)
    for name, c in {"": pool(), " to vLLM": foreign("L2NPHD")}.items():
        yield f"transfer_pages{name}", partial(ops.transfer_pages, cache, c, whole(2), whole(2), 0)
    yield "gather", partial(ops.gather, keys, whole(BATCH, 4), OFFSETS)
    yield "commit", partial(ops.commit, cache, None, whole(TOKENS), OFFSETS)
    yield "increment", partial(ops.increment_cache_lengths, lengths, OFFSETS)
    yield "cache_row_offsets", partial(ops.cache_row_offsets, OFFSETS, lengths)
    yield "remap", partial(ops.remap_sparse_indices, whole(TOKENS, 64), OFFSETS, cache.lookup_table, PAGE, 0)
    yield "merge_ragged", partial(ops.merge_ragged, rows[:, 0], OFFSETS, rows[:, 0], OFFSETS)
    yield "merge_attention", partial(ops.merge_attention, *(q, zeros(TOKENS, 32, dtype="f32")) * 2)
    yield "shift_tokens", partial(ops.shift_tokens, whole(TOKENS), OFFSETS, whole(BATCH))
    yield "sliced_add", partial(ops.sliced_add, zeros(TOKENS, 64), zeros(TOKENS, 64), 3)
    scored = (zeros(TOKENS, 64, SIZE, dtype=F8), zeros(TOKENS, 64, dtype="f32"))
    yield "index_scores", partial(ops.index_scores, pool(F8, 1, SIZE, 64, SIZE, 1), 0, *scored, OFFSETS)
    yield "select_tokens", partial(ops.select_tokens, zeros(TOKENS, 4096, dtype="f32"), 64)
    yield "summarize_pages", partial(ops.summarize_pages, cache, 0, kv.PageSummaries(cache), OFFSETS)
    yield "select_pages", partial(ops.select_pages, cache, 0, q, OFFSETS, kv.PageSummaries(cache), 2)


def of_calls() -> Iterator[tuple[str, Make]]:
    for calls in (of_attention, of_latent, of_projections, of_others):
        for name, call in calls():
            yield from ((f"{name} {part}", make) for part, make in recorded(call))


# --- kernels -------------------------------------------------------------------------------------------


@kv.kernel(block=64)
def tma_rows(cache: kv.PagedKVCache, map: kv.TensorMap, out: kv.Buffer[kv.bf16, 2], b: kv.i32):
    """Load a tile of keys with TMA, then read it element by element from shared memory."""
    tile, barrier = kv.tma.shared_tile(map, 16), kv.shared(1, kv.i64)
    if kv.thread_id.x == 0:
        kv.tma.init_barrier(barrier)
        kv.tma.expect(map, barrier, kv.tma.tile_loads(map, 16))
        kv.tma.load_tile(map, cache, b, kv.block_id.x, 0, tile, barrier, tile_rows=16)
    kv.barrier()
    kv.tma.wait(barrier, 0)
    for i in range(kv.thread_id.x, 16 * map.columns, kv.block_dim.x):
        row, column = i // map.columns, i % map.columns
        out[row, column] = (tile.ptr() + map.offset(row, column, 16)).load(map.dtype)


@kv.kernel(block=64)
def shared_rows(cache: kv.KVCache, out: kv.KVCache, b: kv.i32, mode: str):
    """Copy the tokens of a head to shared memory, and from there to another cache."""
    tile, head, thread = kv.shared((16, cache.head_size), kv.bf16), kv.block_id.x, kv.thread_id.x
    cache.load_tile(b, head, 0, 16, tile.ptr(), thread, tile_rows=16, num_threads=64, mode=mode)
    if kv.static(mode == "async"):
        kv.cp_async_commit()
        kv.cp_async_wait(0)
    kv.barrier()
    out.store_tile(b, head, 0, 16, tile.ptr(), thread, tile_rows=16, num_threads=64)


def of_kernels() -> Iterator[tuple[str, Make]]:
    """User-level kernels from the benchmarks, examples/ and this file, and the modules of tests/pipeline."""
    spec = static.spec_of(TABLE[0])
    cases: list[tuple[str, Any, tuple[Any, ...]]] = [
        (row.name, row.kernel, ablation_kernels.specs(row)) for row in ablation_kernels.rows(False)
    ]
    cases += [("read", products.read, (kv.ReadOnlyBuffer[kv.i32, 1], kv.Buffer[kv.i32, 1]))]
    cases += [("tma_rows", tma_rows, (spec, tma_layout.tiled(spec, rows=16), kv.Buffer[kv.bf16, 2], kv.i32))]
    cases += [(f"shared_rows, {mode}", shared_rows, (spec, spec, kv.i32, mode)) for mode in ("sync", "async")]
    narrow = layout.spec_of("paged", F8, 8, 128, page_size=16)
    of_example: dict[str, tuple[Any, ...]] = {
        "scale_keys": (spec, kv.f32), "rms_norm_keys": (spec, kv.Buffer[kv.f32, 1], kv.f32),
        "copy_convert": (narrow, layout.spec_of("continuous", "bf16", 8, 128)),
    }  # fmt: skip
    for name, specs in of_example.items():
        found = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        cases.append((name, getattr(module, name), specs))
    for name, kernel, specs in cases:
        yield f"kernel {name}", lambda target, k=kernel, s=specs: (k, *s)
    for stem in ("projections", "projections_whole", "tma"):
        text = (ROOT / "tests" / "pipeline" / f"{stem}.mlir").read_text()
        yield f"module {stem}", lambda target, text=text: (text,)


def programs() -> Iterator[tuple[str, Sequence[str], Make]]:
    """Every program: its name, its targets, and the function that makes it for one of them.

    Rows are compiled for every target, other programs for the host, sm_90a and one more target: their code differs
    least.
    """
    for name, make in of_rows():
        yield name, TARGETS, make
    for name, make in (*of_calls(), *of_kernels()):
        yield name, ("host", "sm_90a", ("sm_80", "sm_100a")[zlib.crc32(name.encode()) % 2]), make
