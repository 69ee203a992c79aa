# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""PyTorch integration: ``import kvarn.torch`` registers every operation of ``kv.ops`` as a torch operator.

``kv.ops`` functions are called as before. While torch traces (``torch.compile(fullgraph=True)``, ``make_fx``,
``torch.export``), their calls become ``torch.ops.kvarn`` nodes whose schemas declare what they write; under autocast,
data are converted to the cache's type. :mod:`kvarn.torch.huggingface` is an attention backend for transformers.
"""

from .library import operations, schema

__all__ = ["operations", "schema"]
