# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Migrate sequences from ranks that share heads to ranks that share keys.

torchrun --nproc-per-node 2 examples/parallel/migrate.py
"""

import torch
import torch.distributed as dist

import kvarn as kv

dist.init_process_group("gloo")
rank = dist.get_rank()


def pool(tokens, page_size, heads):
    blocks = torch.zeros(8, 2, 1, page_size, heads, 16)
    table = torch.randperm(8).to(torch.int32).view(1, 8)
    return kv.PagedKVCacheCollection(blocks, torch.tensor([tokens], dtype=torch.int32), table, 1, 8 * page_size)


filled, empty = pool(9, page_size=4, heads=2), pool(5 - rank, page_size=2, heads=4)
for t in range(9):
    for head in range(2):
        filled.blocks[filled.lookup_table[0, t // 4], :, :, t % 4, head] = 10 * t + 2 * rank + head
of, to = kv.parallel.Shards((0, 1)), kv.parallel.Shards((0, 1), context=2)
kv.parallel.migrate(filled, empty, of, to, lengths=[9])
for t in range(rank, 9, 2):
    there = empty.blocks[empty.lookup_table[0, t // 2 // 2], 0, 0, t // 2 % 2, :, 0]
    assert there.tolist() == [10 * t + head for head in range(4)]
dist.destroy_process_group()
