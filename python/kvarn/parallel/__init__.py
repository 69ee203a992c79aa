# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Caches shared by several ranks of torch.distributed, by heads or by keys, and their migration between ranks.

NCCL transports the data of GPUs, gloo that of CPUs; kvarn has no transport of its own. See docs/parallel.md.
"""

try:
    import torch.distributed  # noqa: F401
except ImportError as error:
    raise ImportError("kv.parallel needs torch.distributed: pip install 'kvarn[torch]'") from error

from .context import ContextParallel, ContextStep, Pending
from .heads import HeadParallel
from .migration import Shards, migrate
from .ranks import RankError

__all__ = ["ContextParallel", "ContextStep", "HeadParallel", "Pending", "RankError", "Shards", "migrate"]
