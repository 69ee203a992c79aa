# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decoding by several processes that share the keys of every sequence: the results of one."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch)")

import torch.distributed as dist  # noqa: E402

import kvarn as kv  # noqa: E402
from kvarn.torch.parallel import ContextParallel  # noqa: E402

HEADS, SIZE, PAGE, STEPS = 2, 32, 4, 5
LENGTHS = (0, 1, 7, 18)


def pool_of(
    lengths: torch.Tensor, pages: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, kv.PagedKVCacheCollection]:
    """An empty pool that holds NaN, its pages given in random order."""
    columns = pages // len(lengths)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    table = order[: columns * len(lengths)].to(torch.int32).view(len(lengths), columns)
    blocks = torch.full((pages, 2, 1, PAGE, HEADS, SIZE), float("nan"))
    return blocks, table, kv.PagedKVCacheCollection(blocks, lengths, table, 1, columns * PAGE)


def fill(blocks: torch.Tensor, table: torch.Tensor, b: int, at: int, key: torch.Tensor, value: torch.Tensor) -> None:
    page = table[b, at // PAGE]
    blocks[page, 0, 0, at % PAGE], blocks[page, 1, 0, at % PAGE] = key, value


def decode(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    ranks = ContextParallel()
    make = torch.Generator().manual_seed(0)
    cached = torch.randn(2, len(LENGTHS), max(LENGTHS), HEADS, SIZE, generator=make)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    whole, mine = lengths.clone(), ranks.local(lengths)
    blocks, table, one = pool_of(whole, 24, 1)
    my_blocks, my_table, many = pool_of(mine, 24 // world + 4, 2 + rank)  # one pool of this size is too small
    for b, length in enumerate(LENGTHS):
        for p in range(length):
            fill(blocks, table, b, p, *cached[:, b, p])
            if p % world == rank:
                fill(my_blocks, my_table, b, p // world, *cached[:, b, p])
    offsets = torch.arange(len(LENGTHS) + 1, dtype=torch.int32)
    for _ in range(STEPS):
        key, value = torch.randn(2, len(LENGTHS), HEADS, SIZE, generator=make)
        query = torch.randn(len(LENGTHS), 2 * HEADS, SIZE, generator=make)
        kv.ops.append(one, 0, key, value, offsets)
        expected = kv.ops.attention(one, 0, query, offsets, softcap=10.0)
        ranks.append(many, 0, key, value, whole)
        found = ranks.attention(many, 0, query, whole, softcap=10.0)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        mine += ranks.own(whole)
        whole += 1
        assert mine.equal(ranks.local(whole))
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_that_share_the_keys_give_what_one_gives(world, tmp_path):
    torch.multiprocessing.start_processes(
        decode, (world, str(Path(tmp_path) / "store")), nprocs=world, start_method="spawn"
    )


def test_windows_are_refused():
    ranks = ContextParallel.__new__(ContextParallel)
    with pytest.raises(TypeError, match="takes scale, softcap and schedule, got window"):
        ranks.attention(None, 0, torch.zeros(1, 1, 1), torch.zeros(1), window=3)
