# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A kernel with an operation of one's own."""

import kvarn as kv

from .token_norm import token_norm


@kv.kernel
def norms(keys: kv.KVCache, out: kv.Buffer[kv.f32, 3]):
    b, h, t = kv.block_id.x, kv.block_id.y, kv.thread_id.x
    if t < keys.cache_length(b):
        out[b, h, t] = token_norm(keys, b, h, t)
