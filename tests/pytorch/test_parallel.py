# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.parallel: ranks that share heads and keys compute what one does, and hand sequences on bit for bit."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch)")

import torch.distributed as dist  # noqa: E402
from reference.rank_workers import Workers  # noqa: E402

import kvarn as kv  # noqa: E402
from kvarn.dialect import dtypes  # noqa: E402
from kvarn.parallel import ContextParallel, HeadParallel, RankError, Shards, migrate  # noqa: E402
from kvarn.parallel.combine import combine_kernel, combined  # noqa: E402

HEADS, SIZE, PAGE = 4, 32, 4
LENGTHS, NEW = (0, 1, 7, 18), (5, 0, 9, 2)
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16}
FAST = {"cpu": "f32", "cuda": "bf16"}  # on a GPU a prefill with a mask of its own needs 16 bits


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(scope="module")
def workers(device, tmp_path_factory):
    """Ranks by their count, started at the first test that asks."""
    started: dict[int, Workers] = {}

    def of(world: int) -> Workers:
        if device == "cuda" and torch.cuda.device_count() < world:
            pytest.skip(f"needs {world} GPUs")
        if world not in started:
            started[world] = Workers(world, str(tmp_path_factory.mktemp("ranks") / "store"), device)
        return started[world]

    yield of
    for group in started.values():
        group.stop()


# --- pools -----------------------------------------------------------------------------------------


def pool_of(lengths: Any, pages: int, seed: int, kind: str = "f32", heads: int = HEADS, page: int = PAGE, new: int = 1):
    """An empty pool that holds NaN, its pages given in random order; the last belongs to nobody."""
    batch, device = len(lengths), lengths.device
    columns = (pages - 1) // batch
    order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(seed))
    table = order[: columns * batch].to(torch.int32).view(batch, columns).to(device)
    shape, options = (pages, 2, 2, page, heads), {}
    if kind == "fp8":
        blocks = torch.full((*shape, SIZE), 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        scales = torch.full((*shape, SIZE // 16), float("nan"), device=device)
        options = {"scales": scales, "quantization_granularity": 16}
    else:
        blocks = torch.full((*shape, SIZE), float("nan"), dtype=FLOATS[kind], device=device)
    made = kv.PagedKVCacheCollection(blocks, lengths, table, new, columns * page, **options)
    return SimpleNamespace(blocks=blocks, scales=options.get("scales"), table=table, lengths=lengths, cache=made)


def offsets_of(new: Any, device: str) -> torch.Tensor:
    return torch.tensor([0, *new]).cumsum(0).to(device, torch.int32)


def tokens(make: torch.Generator, rows: int, kind: str, device: str) -> tuple[torch.Tensor, ...]:
    dtype = FLOATS[kind if kind in FLOATS else FAST[device]]
    shapes = (rows, HEADS, SIZE), (rows, HEADS, SIZE), (rows, 2 * HEADS, SIZE)
    return tuple(torch.randn(s, generator=make).to(device, dtype) for s in shapes)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if found.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# --- keys in turn ----------------------------------------------------------------------------------


def prefill_and_decode(rank: int, world: int, device: str, kind: str, result: str) -> None:
    """A ragged prefill over sequences of which some have tokens, then a decode, on two layers."""
    ranks = ContextParallel(result=result, timeout=60)
    make = torch.Generator().manual_seed(0)
    whole = torch.zeros(len(LENGTHS), dtype=torch.int32, device=device)
    one = pool_of(whole.clone(), 41, 1, kind, new=18)
    mine = pool_of(whole.clone(), 40 // world + 9, 2 + rank, kind, new=18)  # one pool of this size is too small
    mine_heads = slice(rank * 2 * HEADS // world, (rank + 1) * 2 * HEADS // world)
    options: dict[str, Any] = {"softcap": 10.0, "sinks": torch.randn(2 * HEADS, generator=make).to(device)}
    for new in (LENGTHS, NEW, None, None, None):
        rows = len(LENGTHS) if new is None else sum(new)
        offsets = offsets_of([1] * rows if new is None else new, device)
        step = ranks.step(whole) if new is None else ranks.step(whole, offsets, rows)
        for layer in range(2):
            key, value, query = tokens(make, rows, kind, device)
            kv.ops.append(one.cache, layer, key, value, offsets)
            expected = kv.ops.attention(one.cache, layer, query, offsets, **options)
            step.append(mine.cache, layer, key, value)
            found = step.attention(mine.cache, layer, query, **options)
            near(found, expected if result == "all" else expected[:, mine_heads])
        whole += offsets.diff()
        one.lengths.copy_(whole)
        mine.lengths.copy_(ranks.local(whole))
    assert int(mine.lengths.max()) <= -(-int(whole.max()) // world)
    unowned = mine.blocks[-1].view(torch.uint8)
    assert unowned.eq(pool_of(whole, 9, 0, kind).blocks[-1].view(torch.uint8)).all(), "a page of nobody was written"


@pytest.mark.parametrize(("world", "result"), [(1, "all"), (2, "heads"), (4, "all")])
def test_ranks_that_share_the_keys_give_what_one_gives(workers, device, world, result):
    workers(world).run(prefill_and_decode, FAST[device], result)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_shared_keys_of_16_and_of_8_bits(workers, kind):
    workers(2).run(prefill_and_decode, kind, "all")


@pytest.mark.parametrize(
    ("target", "dtype", "tolerance"), [("host", torch.float16, 1e-3), ("sm_90a", torch.float32, 2e-6)]
)
def test_partial_results_of_any_number_of_ranks_are_combined_in_one_launch(target, dtype, tolerance):
    make = torch.Generator().manual_seed(10)
    outputs, sums = (torch.randn(s, generator=make) for s in ((5, 3, 2, 150), (5, 3, 2)))
    outputs, sums = outputs.to(dtype), 20 * sums
    sums[1, 0, 0], outputs[1, 0, 0] = float("-inf"), float("nan")  # no keys there: anything may lie there
    sums[:, 2, 1], outputs[:, 2, 1] = float("-inf"), float("nan")
    weights = sums.double().softmax(0).nan_to_num(0.0)[..., None]
    expected = (weights * outputs.double().nan_to_num(0.0)).sum(0)
    out = torch.empty(3, 2, 150, dtype=dtype)
    if target == "host":
        out = combined(outputs, sums)
    else:
        arrays = [x.numpy() for x in (outputs, sums, out)]
        combine_kernel(dtypes.of(dtype), 5, 2).emulate(4, 128, *arrays, target=target)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def windows_and_latent_rows(rank: int, world: int, device: str, latent: bool) -> None:
    """Ragged prefills and decodes over windows, and over latent rows; what lies before a window is NaN."""
    ranks, make = ContextParallel(timeout=60), torch.Generator().manual_seed(12)
    size, value_size, dtype = 64 if latent else SIZE, 48, FLOATS[FAST[device]]
    sinks = torch.randn(2 * HEADS, generator=make).to(device)
    whole = torch.zeros(len(LENGTHS), dtype=torch.int32, device=device)
    pools = [
        latent_pool(whole.clone(), pages, seed, size, device) if latent
        else pool_of(whole.clone(), pages, seed, FAST[device], new=18)
        for pages, seed in ((41, 1), (40 // world + 9, 2 + rank))
    ]  # fmt: skip
    one, mine = pools
    for new in (LENGTHS, NEW, None, None, (3, 0, 1, 13), None):
        rows = len(LENGTHS) if new is None else sum(new)
        offsets = offsets_of([1] * rows if new is None else new, device)
        padding = 0 if new is None else 2  # rows of nobody
        step = ranks.step(whole) if new is None else ranks.step(whole, offsets, rows + padding)
        key, value, query = (
            torch.randn(rows + padding, n, size, generator=make).to(device, dtype)
            for n in ((1, 1, 2 * HEADS) if latent else (HEADS, HEADS, 2 * HEADS))
        )
        kv.ops.append(one.cache, 1, key, None if latent else value, offsets)
        step.append(mine.cache, 1, key, None if latent else value)
        if not latent:  # whose windows alone are asked for
            for b, n in enumerate(ranks.local((whole - 7).clamp(min=0)).tolist()):
                gone = torch.arange(n)
                mine.blocks[mine.table[b].cpu()[gone // PAGE].long().to(device), :, 1, gone % PAGE] = float("nan")
        for window in (None, 8) if latent else (8,):
            options: dict[str, Any] = {"window": window, "sinks": sinks, "scale": 0.2}
            if latent:
                options["value_size"] = value_size
                expected = kv.ops.mla_attention(one.cache, 1, query[:rows], offsets, **options)
                found = step.mla_attention(mine.cache, 1, query, **options)
                assert step.mla_attention_start(mine.cache, 1, query, **options).result().equal(found)
            else:
                expected = kv.ops.attention(one.cache, 1, query[:rows], offsets, **options)
                found = step.attention(mine.cache, 1, query, **options)
            near(found[:rows], expected)
        whole += offsets.diff()
        one.lengths.copy_(whole)
        mine.lengths.copy_(ranks.local(whole))


def latent_pool(lengths: Any, pages: int, seed: int, size: int, device: str) -> Any:
    """As :func:`pool_of`, of latent rows."""
    batch = len(lengths)
    columns = (pages - 1) // batch
    order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(seed))
    table = order[: columns * batch].to(torch.int32).view(batch, columns).to(device)
    blocks = torch.full((pages, 1, 2, PAGE, 1, size), float("nan"), dtype=FLOATS[FAST[device]], device=device)
    made = kv.PagedKVCacheCollection(blocks, lengths, table, 18, columns * PAGE)
    return SimpleNamespace(blocks=blocks, table=table, lengths=lengths, cache=made)


@pytest.mark.parametrize(("world", "latent"), [(4, False), (2, True)], ids=["windows", "latent rows"])
def test_windows_and_latent_rows_of_ranks_are_those_of_one(workers, world, latent):
    workers(world).run(windows_and_latent_rows, latent)


def alone_and_in_a_batch(rank: int, world: int, device: str) -> None:
    ranks, make = ContextParallel(), torch.Generator().manual_seed(3)
    lengths = torch.tensor([70, 9, 300], dtype=torch.int32, device=device)
    mine = pool_of(ranks.local(lengths), 300, 5 + rank, "bf16")
    mine.blocks.copy_(torch.randn(mine.blocks.shape, generator=make))
    key, value, query = tokens(make, 3, "bf16", device)
    schedule = {"batch_invariant": True}

    def decode(which: slice) -> torch.Tensor:
        part = kv.PagedKVCacheCollection(mine.blocks, mine.lengths[which], mine.table[which], 1, 300)
        step = ranks.step(lengths[which])
        step.append(part, 0, key[which], value[which])
        return step.attention(part, 0, query[which], schedule=schedule)

    together = decode(slice(0, 3))
    for b in range(3):
        assert together[b : b + 1].equal(decode(slice(b, b + 1))), f"sequence {b} alone has other bits"


def test_a_batch_invariant_sequence_is_the_same_bits_in_any_batch(workers):
    workers(2).run(alone_and_in_a_batch)


def two_halves(rank: int, world: int, device: str) -> None:
    ranks, make = ContextParallel(), torch.Generator().manual_seed(4)
    lengths = torch.tensor([9, 30], dtype=torch.int32, device=device)
    halves = [pool_of(ranks.local(lengths[b : b + 1]), 12, 7 + rank + b) for b in range(2)]
    for half in halves:
        half.blocks.copy_(torch.randn(half.blocks.shape, generator=make))
    steps = [ranks.step(lengths[b : b + 1]) for b in range(2)]
    data = [tokens(make, 1, "f32", device) for _ in range(2)]
    for step, half, (key, value, _) in zip(steps, halves, data, strict=True):
        step.append(half.cache, 1, key, value)
    calls = [(s, h.cache, x[2]) for s, h, x in zip(steps, halves, data, strict=True)]
    pending = [step.attention_start(cache, 1, query) for step, cache, query in calls]
    for started, (step, cache, query) in zip(pending, calls, strict=True):
        assert started.result().equal(step.attention(cache, 1, query))
        assert started.result() is started.result()


def test_partial_results_of_two_halves_of_a_batch_travel_together(workers):
    workers(2).run(two_halves)


def captured(rank: int, world: int, device: str) -> None:
    ranks, make = ContextParallel(), torch.Generator().manual_seed(9)
    whole = torch.zeros(3, dtype=torch.int32, device=device)
    one, mine = pool_of(whole.clone(), 41, 1, "bf16"), pool_of(whole.clone(), 41, 2 + rank, "bf16")
    key, value, query = tokens(make, 3, "bf16", device)

    def run() -> torch.Tensor:
        step = ranks.step(whole)
        step.append(mine.cache, 0, key, value)
        return step.attention(mine.cache, 0, query)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = run()
    for _ in range(9):
        for x, new in zip((key, value, query), tokens(make, 3, "bf16", device), strict=True):
            x.copy_(new)
        torch.cuda.synchronize()
        graph.replay()
        ranks.synchronize()
        kv.ops.append(one.cache, 0, key, value, offsets_of([1, 1, 1], device))
        near(found, kv.ops.attention(one.cache, 0, query, offsets_of([1, 1, 1], device)))
        whole += 1
        one.lengths.copy_(whole)
        mine.lengths.copy_(ranks.local(whole))


@pytest.mark.parametrize("world", [1, 2])
def test_a_captured_step_follows_the_lengths(workers, device, world):
    if device == "cpu":
        pytest.skip("CUDA graphs are of GPUs")
    workers(world).run(captured)


# --- heads, and both -------------------------------------------------------------------------------


def heads_and_keys(rank: int, world: int, device: str, context: int) -> None:
    mesh = dist.device_mesh.init_device_mesh(device, (world // context, context), mesh_dim_names=("heads", "context"))
    heads = HeadParallel(HEADS, mesh["heads"].get_group())
    ranks = ContextParallel(mesh["context"].get_group())
    make = torch.Generator().manual_seed(6)
    whole, kind = torch.zeros(3, dtype=torch.int32, device=device), FAST[device]
    one = pool_of(whole.clone(), 40, 1, kind, new=20)
    mine = pool_of(whole.clone(), 40, 2 + rank, kind, heads=heads.num_heads, new=20)
    for new in ([20, 3, 11], [1, 1, 1]):
        offsets, rows = offsets_of(new, device), sum(new)
        step = ranks.step(whole, offsets, rows)
        key, value, query = tokens(make, rows, kind, device)
        kv.ops.append(one.cache, 0, key, value, offsets)
        step.append(mine.cache, 0, heads.own(key), heads.own(value))
        near(
            heads.gather(step.attention(mine.cache, 0, heads.own(query).contiguous())),
            kv.ops.attention(one.cache, 0, query, offsets),
        )  # fmt: skip
        whole += offsets.diff()
        one.lengths.copy_(whole)
        mine.lengths.copy_(ranks.local(whole))


@pytest.mark.parametrize(("world", "context"), [(2, 1), (4, 2)])
def test_ranks_that_share_the_heads_give_what_one_gives(workers, world, context):
    workers(world).run(heads_and_keys, context)


def few_heads(rank: int, world: int, device: str) -> None:
    parallel, query = HeadParallel(2), torch.arange(8)[:, None].expand(3, 8, 5)
    assert (parallel.num_heads, parallel.first_head) == (1, rank // 2)
    assert parallel.own(query)[0, :, 0].tolist() == [2 * rank, 2 * rank + 1]
    assert parallel.gather(parallel.own(query).to(device).float()).cpu().equal(query.float())
    with pytest.raises(ValueError, match="total_heads must be a multiple of the 4 ranks, or they a multiple of it"):
        HeadParallel(6)
    with pytest.raises(ValueError, match="x must have 2 KV heads, or query heads that are a multiple"):
        parallel.own(query[:, :6])


def test_more_ranks_than_heads_share_the_queries_of_a_head(workers):
    workers(4).run(few_heads)


# --- moving sequences ------------------------------------------------------------------------------


def content(make: torch.Generator, length: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of a sequence on all ranks: elements, and scales (of no bytes without)."""
    sizes = (SIZE, 4 * SIZE // 16) if kind == "fp8" else (SIZE * FLOATS[kind].itemsize, 0)
    made = [torch.randint(256, (length, 2, 2, HEADS, n), generator=make, dtype=torch.uint8) for n in sizes]
    return made[0], made[1]


def part_of(shards: Shards, rank: int, lengths: Any, page: int, kind: str, seed: int, device: str) -> Any:
    """A rank's empty pool, or None; ``places`` are where its tokens and heads lie."""
    if rank not in shards.ranks:
        return None
    h, c = shards.part(rank)
    heads = HEADS // shards.heads
    local = torch.tensor([-(-(n - c) // shards.context) for n in lengths], dtype=torch.int32, device=device)
    pool = pool_of(local, 60, seed + rank, kind, heads, page)
    pool.places = []
    for b, n in enumerate(lengths):
        p = torch.arange(c, max(n, c), shards.context)
        j = p // shards.context
        pool.places.append((p, pool.table[b].cpu()[j // page].long().to(device), (j % page).to(device)))
    pool.heads = slice(h * heads, (h + 1) * heads)
    return pool


def moved(rank: int, world: int, device: str, kind: str, of: Any, to: Any, pages: Any, folder: str | None) -> None:
    of, to, lengths = Shards(*of), Shards(*to), [23, 0, 1, 14]
    make = torch.Generator().manual_seed(8)
    whole = [content(make, n, kind) for n in lengths]
    mine = part_of(of, rank, lengths, pages[0], kind, 10, device)
    theirs = part_of(to, rank, lengths, pages[1], kind, 20, device)

    def halves(pool: Any) -> list[torch.Tensor]:
        return [x.view(torch.uint8) for x in (pool.blocks, pool.scales) if x is not None]

    def filled(part: Any) -> list[torch.Tensor]:
        """The part's memory with what is to be in it."""
        found = [x.clone() for x in halves(part)]
        for data, (p, page, slot) in zip(whole, part.places, strict=True):
            for pool, x in zip(found, data, strict=False):
                pool[page, :, :, slot] = x[p][:, :, :, part.heads].to(device)
        return found

    kept = filled(mine) if mine else []
    for pool, x in zip(halves(mine) if mine else [], kept, strict=True):
        pool.copy_(x)
    expected = filled(theirs) if theirs else []
    migrate(mine and mine.cache, theirs and theirs.cache, of, to, lengths, folder=folder, timeout=60)
    assert all(a.equal(b) for a, b in zip(kept, halves(mine) if mine else [], strict=True))
    if theirs is not None:
        assert all(a.equal(b) for a, b in zip(expected, halves(theirs), strict=True)), "other bytes, or elsewhere"


MOVES = {
    "2 by heads to 2 by keys": (4, "f32", ((0, 1), 1), ((2, 3), 2), (4, 4)),
    "4 by both to 1": (4, "bf16", ((0, 1, 2, 3), 2), ((3,), 1), (4, 16)),
    "1 to 4 by both, scales": (4, "fp8", ((2,), 1), ((3, 2, 1, 0), 2), (5, 4)),
    "4 by keys to 2 by keys": (4, "f32", ((0, 1, 2, 3), 4), ((0, 1), 2), (4, 1)),
    "2 by keys to 2 by heads": (2, "bf16", ((0, 1), 2), ((0, 1), 1), (4, 4)),
}


@pytest.mark.parametrize(("name", "shared"), [(name, at % 2 == 1) for at, name in enumerate(MOVES)])
def test_sequences_move_between_parallel_degrees_bit_for_bit(workers, name, shared, tmp_path):
    world, *move = MOVES[name]
    folder = str(tmp_path / "files") if shared else None
    workers(world).run(moved, *move, folder)
    assert folder is None or os.listdir(folder) == []


def without_the_last(rank: int, world: int, device: str) -> Any:
    """A migration of some ranks, then one whose source never sends, with a rank beside that takes part in neither."""
    lengths = torch.tensor([3], dtype=torch.int32, device=device)
    cache = pool_of(lengths, 9, 1, FAST[device]).cache
    cache.blocks.fill_(rank)
    if rank < 2:
        migrate(cache, cache, Shards((0,)), Shards((1,)), [3], timeout=60)
        assert cache.blocks[cache.lookup_table[0, 0], 0, 0, 2].eq(0).all()
    try:
        if rank in (1, 3):
            migrate(cache, cache, Shards((0, 1), context=2), Shards((3,)), [3], timeout=2.0)
    except RankError as error:
        return error.ranks
    return None


def test_a_source_that_does_not_send_is_named_and_nobody_else(workers):
    assert workers(4).run(without_the_last)[3] == (0,)


def test_a_rank_that_writes_no_file_is_named(tmp_path):
    lengths = torch.tensor([3], dtype=torch.int32)
    cache = pool_of(lengths, 9, 1).cache
    with pytest.raises(RankError, match=r"rank 0 did not write .*0-0-1.npy within 0.1 s: dead, or late") as found:
        migrate(None, cache, Shards((0,)), Shards((1,)), [3], folder=tmp_path, rank=1, timeout=0.1)
    assert found.value.ranks == (0,)


def test_what_cannot_move_is_refused(tmp_path):
    lengths = torch.tensor([3], dtype=torch.int32)
    pool, options = pool_of(lengths, 9, 1), {"folder": tmp_path, "rank": 0}
    here = Shards((0,))
    pool.table[0, 0] = 99
    cases = [
        ((pool.cache, pool.cache, here, here, [3]), "sequence 0 must have a page for each of its tokens, got page 99"),
        ((pool.cache, pool.cache, here, here, [3, 4]), "source's sequences must be 2 numbers below 1, got"),
        ((pool.cache, pool.cache, here, here, [33]), "source's table must have room for 33 tokens of a sequence"),
        ((pool.cache, pool_of(lengths, 9, 1, "bf16").cache, here, here, [3]), "must have the same elements, scales"),
        ((pool.cache, None, here, Shards((1, 2, 3)), [3]), "the 4 heads must be a multiple of the 3 parts of to"),
    ]
    for args, message in cases:
        with pytest.raises(ValueError, match=message):
            migrate(*args, **options)
    with pytest.raises(TypeError, match="source must be a paged or continuous collection on rank 0, got None"):
        migrate(None, pool.cache, here, here, [3], **options)
    for ranks, context in (((0, 0), 1), ((), 1), ((0, 1, 2), 2)):
        with pytest.raises(ValueError, match="must"):
            Shards(ranks, context)


# --- ranks that do not come ------------------------------------------------------------------------

TIMEOUT = 3.0


def decodes_until(rank: int, world: int, device: str, culprit: int, how: str) -> tuple[Any, float]:
    """A step that all take, then one that ``culprit`` comes to late, or never; what it ended in, and when."""
    ranks = ContextParallel(timeout=TIMEOUT)
    lengths = torch.tensor([5], dtype=torch.int32, device=device)
    mine, (_, _, query) = pool_of(ranks.local(lengths), 9, 1), tokens(torch.Generator(), 1, "f32", device)
    mine.blocks.zero_()
    step = ranks.step(lengths)
    for _ in range(2):
        step.attention(mine.cache, 0, query)
        ranks.synchronize()
    if rank == culprit and how == "dies":
        os._exit(1)
    if rank == culprit:
        time.sleep(TIMEOUT + 1.5)
    start = time.monotonic()
    try:
        step.attention(mine.cache, 0, query)
        ranks.synchronize()
    except RankError as error:
        return error.ranks, time.monotonic() - start
    return None, 0.0


@pytest.mark.parametrize("how", ["dies", "late"])
def test_a_rank_that_does_not_come_is_named_on_all_ranks_within_the_time_out(device, how, tmp_path):
    world = 4 if (device, how) == ("cpu", "dies") else 2
    if device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    group = Workers(world, str(tmp_path / "store"), device)
    try:
        found = group.run(decodes_until, 1, how)
    finally:
        group.stop()
    if how == "dies":
        assert found.pop(1) is None
    for ranks, seconds in found:
        assert ranks == (1,)
        assert seconds < TIMEOUT + 1


# --- bad input -------------------------------------------------------------------------------------


def refused(rank: int, world: int, device: str) -> None:
    lengths = torch.tensor([3], dtype=torch.int32)
    mine, query = pool_of(lengths, 9, 1).cache, torch.zeros(1, 3, SIZE)
    even, blocks = torch.zeros(1, 2 * HEADS, SIZE), torch.zeros(1, 2, 1, 8, HEADS, SIZE)
    regions = kv.ContinuousBatchingKVCacheCollection(blocks, lengths, torch.zeros_like(lengths), 1, 8)
    step = ContextParallel(result="heads").step(lengths)
    cases = [
        (TypeError, lambda: step.attention(mine, 0, query, chunk=3), "takes scale, .*window, schedule, got chunk"),
        (TypeError, lambda: step.mla_attention(mine, 0, query, softcap=3.0), "mla_attention takes value_size, .*got"),
        (ValueError, lambda: step.attention(mine, 0, even, window=3), "must be a multiple of the 2 ranks, got 3"),
        (ValueError, lambda: step.attention(mine, 0, even, window=0), "must be a multiple of the 2 ranks, got 0"),
        (TypeError, lambda: step.attention(regions, 0, even, window=4), "a window, or over latent rows, needs pages"),
        (ValueError, lambda: step.attention(mine, 0, query[:0]), "query must have the 1 rows of the step, got 0"),
        (ValueError, lambda: step.attention(mine, 0, query), 'a multiple of 2 heads for result="heads", got 3'),
        (ValueError, lambda: ContextParallel(result="some"), 'result must be "all" or "heads", got \'some\''),
        (ValueError, lambda: ContextParallel(timeout=0), "timeout must be positive seconds, got 0"),
        (ValueError, lambda: ContextParallel().step(lengths, lengths), "rows must be the rows of the step's keys"),
    ]
    for kind, call, message in cases:
        with pytest.raises(kind, match=message):
            call()


def test_what_does_not_fit_is_refused_by_name(workers, device):
    if device == "cpu":
        workers(2).run(refused)
