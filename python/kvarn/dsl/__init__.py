# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernel language: ``@kv.kernel`` functions, and everything that they use.

``import kvarn as kv`` finds all of these names; ``from kvarn import dsl as kv`` is for the library itself.
A module's ``__all__`` is what it adds to the language.
"""

from kvarn.dialect import dtypes
from kvarn.dialect.dtypes import *  # noqa: F403

from . import calls, functional, gpu, masks, math, memory, ptx, scores, softmax, staging, tiles, tma, tracing, values
from .calls import *  # noqa: F403
from .functional import *  # noqa: F403
from .gpu import *  # noqa: F403
from .handles import Cache, Collection, KVCache, KVCacheCollection, MHAOperand, Operand, Rows, buffer_operand, operand
from .kernel import KernelFunction, Optional, kernel
from .memory import *  # noqa: F403
from .ptx import *  # noqa: F403
from .softmax import *  # noqa: F403
from .staging import *  # noqa: F403
from .tiles import *  # noqa: F403
from .tma import TensorMap
from .tracing import *  # noqa: F403
from .values import *  # noqa: F403
from .wgmma import wgmma, wgmma_descriptor, wgmma_start, wgmma_wait

bool = dtypes.bool_  # kv.bool, as kv.f32

__all__ = [
    "Cache", "Collection", "KVCache", "KVCacheCollection", "KernelFunction", "MHAOperand", "Operand", "Optional",
    "Rows", "TensorMap", "bool", "buffer_operand", "kernel", "masks", "math", "operand", "scores", "tma", "wgmma",
    "wgmma_descriptor", "wgmma_start", "wgmma_wait",
]  # fmt: skip
__all__ += dtypes.__all__
__all__ += calls.__all__
__all__ += functional.__all__
__all__ += gpu.__all__
__all__ += memory.__all__
__all__ += ptx.__all__
__all__ += staging.__all__
__all__ += tiles.__all__ + softmax.__all__
__all__ += tracing.__all__
__all__ += values.__all__
