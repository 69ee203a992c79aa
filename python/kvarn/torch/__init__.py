# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kvarn at home in PyTorch: ``import kvarn.torch`` makes every operation of ``kv.ops`` an operator of torch.

``kv.ops`` functions are called as before. Where torch records (``torch.compile(fullgraph=True)``, ``make_fx``,
``torch.export``) their calls become ``torch.ops.kvarn`` nodes that say what they write; where autocast is on, data come
in the type of the cache. :mod:`kvarn.torch.huggingface` is an attention backend for transformers.
"""

from .library import operations, schema

__all__ = ["operations", "schema"]
