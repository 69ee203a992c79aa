# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The caches: typed, checked views of the caller's buffers, and on the host a model of every method.

A *collection* holds all layers' keys and values; ``get_key_cache`` and ``get_value_cache`` give a *cache*, one layer's
keys or values, which kernels take by value. Neither copies nor, when it is made, reads a buffer. ``spec`` is what a
kernel is specialised for, ``fields()`` the run-time parameters in the order of ``kvarn.dialect.layout``.

Modules: ``collections``, ``views`` (caches), ``operands``, ``foreign`` (pages of other libraries); ``pools`` (what
pools and tables must be), ``model`` (host-side methods), ``rows``, ``checks``, ``numerics``.
"""

from .collections import (
    ContinuousBatchingKVCacheCollection,
    FA3Arguments,
    KVCacheCollection,
    PagedKVCacheCollection,
    PagedKVCacheFA3Fallback,
    PagedKVCacheFA3FallbackCollection,
)
from .foreign import ForeignPages
from .numerics import saturating_cast
from .operands import KVCacheMHAOperand, KVCacheScalesMHAOperand, LayoutTensorMHAOperand, MHAOperand, RaggedMHAOperand
from .pools import KVCacheStaticParams
from .rows import PagedRowIndices
from .summaries import PageSummaries
from .views import ContinuousBatchingKVCache, KVCache, PagedKVCache

__all__ = [
    "ContinuousBatchingKVCache",
    "ContinuousBatchingKVCacheCollection",
    "FA3Arguments",
    "ForeignPages",
    "KVCache",
    "KVCacheCollection",
    "KVCacheMHAOperand",
    "KVCacheScalesMHAOperand",
    "KVCacheStaticParams",
    "LayoutTensorMHAOperand",
    "MHAOperand",
    "PageSummaries",
    "PagedKVCache",
    "PagedKVCacheCollection",
    "PagedKVCacheFA3Fallback",
    "PagedKVCacheFA3FallbackCollection",
    "PagedRowIndices",
    "RaggedMHAOperand",
    "saturating_cast",
]
