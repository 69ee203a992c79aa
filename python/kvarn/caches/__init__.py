# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The caches: typed, checked views of the caller's buffers, with a NumPy model of every method for host buffers.

A *collection* has the keys and values of all layers; ``get_key_cache`` and ``get_value_cache`` return a *cache*, one
layer's keys or values, which kernels take by value. Neither copies buffers, nor reads them when it is made. ``spec`` is
what a kernel is specialised for, ``fields()`` the run-time parameters in the order of ``kvarn.dialect.layout``.

Modules: ``collections``, ``views`` (caches), ``operands``, ``foreign`` (pages of other libraries); ``pools`` (checks
of pools and tables), ``model`` (host-side methods), ``rows``, ``checks``, ``numerics``.
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
