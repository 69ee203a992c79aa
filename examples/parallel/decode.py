# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decode a context larger than one rank's pool, with the keys distributed over the ranks.

torchrun --nproc-per-node 2 examples/parallel/decode.py
"""

import torch
import torch.distributed as dist

import kvarn as kv

gpu = torch.cuda.is_available() and torch.cuda.device_count() >= 2
dist.init_process_group("nccl" if gpu else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if gpu else torch.device("cpu")
dtype = torch.bfloat16 if gpu else torch.float32

layers, page_size, heads, size = 2, 16, 2, 64
context, pages = 1000, 40  # 40 pages of 16 tokens: 640 of the 1000
blocks = torch.zeros(pages, 2, layers, page_size, heads, size, dtype=dtype, device=device)
table = torch.arange(pages, dtype=torch.int32, device=device).flip(0).view(1, pages)
lengths = torch.zeros(1, dtype=torch.int32, device=device)  # on all ranks
pool = kv.PagedKVCacheCollection(blocks, lengths.clone(), table, max_seq_length=context, max_cache_length=640)

ranks = kv.parallel.ContextParallel(timeout=60)
make = torch.Generator().manual_seed(0)
keys, values = [], []


def tokens(rows, count):
    return torch.randn(rows, count, size, generator=make).to(device, dtype)


for new in (context, 1, 1, 1):  # the prompt, then three tokens
    offsets = torch.tensor([0, new], dtype=torch.int32, device=device)
    step = ranks.step(lengths, offsets, rows=new) if new > 1 else ranks.step(lengths)
    for layer in range(layers):
        key, value, query = tokens(new, heads), tokens(new, heads), tokens(new, 4 * heads)  # equal on all ranks
        step.append(pool, layer, key, value)  # stores this rank's part
        out = step.attention(pool, layer, query)  # over the keys of all ranks
    keys.append(key), values.append(value)
    lengths += new
    pool.cache_lengths.copy_(ranks.local(lengths))
    ranks.synchronize()  # on a GPU, a missing rank is an error here

k, v = (torch.cat(x).float().repeat_interleave(4, 1) for x in (keys, values))  # the last layer's
scores = torch.einsum("thd,nhd->thn", query.float() * size**-0.5, k).softmax(-1)
torch.testing.assert_close(
    out.float(), torch.einsum("thn,nhd->thd", scores, v), rtol=2e-2 if gpu else 1e-5, atol=2e-2 if gpu else 1e-5
)
print(f"rank {rank}: {int(pool.cache_lengths)} of {int(lengths)} tokens in a pool for {pages * page_size}")
dist.destroy_process_group()
