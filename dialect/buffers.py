# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The buffers of an operation: extents and element types, said once for its verifier and for the check of a call.

    class StoreRaggedOp(WithBuffers, name="store_ragged", ...):
        buffers = {"x": Buffer("T, H, D", stored), "row_offsets": Buffer("B + 1")}

``H``, ``D`` and ``scales`` are the heads, the head size and the scales of a head of the operation's cache, if it has
one, and ``B`` its sequences. Other names are extents of a call, whose buffers must agree on them. In IR all but those
of the cache's type may be anything, and an optional operand that is not there is no buffer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlir import ir

from . import verify
from .base import Kv
from .dtypes import DType, by_name
from .layout import CacheSpec

INTEGERS = ("i32",)  # of tables; in a call they may be unsigned
FLOAT32 = ("f32",)
FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Buffer:
    """What a buffer must be: its extents by name, and its elements.

    ``elements`` are names of types, the name of a buffer that has the same, or a function of the cache's spec that
    gives a type or names of dtypes; None: any. Kernels count the rows of the first two dimensions in 32 bits where they
    are ``counted``.
    """

    extents: str
    elements: tuple[str, ...] | str | Callable[[CacheSpec], DType | tuple[str, ...]] | None = INTEGERS
    counted: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.extents.split(", "))


def stored(spec: CacheSpec) -> DType:
    """The type of what a cache stores."""
    return spec.dtype


def storable(spec: CacheSpec) -> tuple[str, ...]:
    """Element types that an append takes: floats where it quantizes or saturates, else the storage type."""
    if spec.quantized:
        return FLOATS
    return (spec.dtype.name, *FLOATS) if spec.dtype.bits == 8 else (spec.dtype.name,)


def queryable(spec: CacheSpec) -> tuple[str, ...]:
    """Element types of a query over a cache: its float type; any of the wide floats over 8-bit storage."""
    return FLOATS if spec.dtype.bits == 8 else (spec.dtype.name,)


def extents_of(spec: CacheSpec | None) -> dict[str, int]:
    """The extents that a cache's type says."""
    if spec is None:
        return {}
    found = {"H": spec.num_heads, "D": spec.head_size, "H * D": spec.row_size, "2 * H * D": 2 * spec.row_size}
    return found if not spec.quantized else {**found, "scales": spec.num_scales}


def fit(op: Any, buffers: Mapping[str, Buffer], spec: CacheSpec | None = None, **extents: int) -> bool:
    """Whether the operands of these names are as declared, for an op whose cache has this spec, and known extents."""
    known = {**extents_of(spec), **extents}
    for name, buffer in buffers.items():
        value, elements = getattr(op, name), buffer.elements
        if value is None:
            continue
        if isinstance(elements, str):
            elements = (str(ir.MemRefType(getattr(op, elements).type).element_type),)
        elif callable(elements):
            assert spec is not None
            found = elements(spec)
            elements = tuple(by_name(n).mlir for n in found) if isinstance(found, tuple) else (found.mlir,)
        if not verify.memref(op, value, len(buffer.names), elements, name):
            return False
        for dim, extent in enumerate(buffer.names):
            if extent in known and not verify.static_dim(op, value, dim, known[extent], name):
                return False
    return True


class WithBuffers(Kv.Operation):
    """An operation that declares its buffers, and has at most one cache or collection."""

    buffers = {}  # by operand; an annotation would make it a field

    def verify_invariants(self) -> bool:
        handle = next((n for n in ("collection", "cache") if hasattr(type(self), n)), None)
        spec = None if handle is None else verify.handle(self, getattr(self, handle), (handle,))
        return (handle is None or spec is not None) and self.verify_buffers(spec)

    def verify_buffers(self, spec: CacheSpec | None = None) -> bool:
        """Whether the buffers are as declared."""
        return fit(self, self.buffers, spec)
