# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Buffer operands of an operation: extents and element types, declared once for the verifier and for run-time checks.

    class StoreRaggedOp(WithBuffers, name="store_ragged", ...):
        buffers = {"x": Buffer("T, H, D", stored), "row_offsets": Buffer("B + 1")}

``H``, ``D`` and ``scales`` are the heads, the head size and the scales per head of the operation's cache, if it has
one, and ``B`` its sequences. Every other name is an extent that a call's buffers must agree on. The verifier checks
only the extents that the cache's type fixes, and skips an optional operand that is absent.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlir import ir

from . import verify
from .base import Kv
from .dtypes import DType, by_name
from .layout import CacheSpec

INTEGERS = ("i32",)  # element types of tables; a call may pass unsigned ones
FLOAT32 = ("f32",)
FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Buffer:
    """What a buffer must be: its extents by name, and its element type.

    ``elements`` lists type names, or is the name of a buffer of the same type, or a function from the cache's spec to a
    type or to dtype names; None allows any type. ``counted`` marks buffers whose rows, in the first two dimensions,
    kernels count in 32 bits.
    """

    extents: str
    elements: tuple[str, ...] | str | Callable[[CacheSpec], DType | tuple[str, ...]] | None = INTEGERS
    counted: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.extents.split(", "))


def stored(spec: CacheSpec) -> DType:
    """The storage type of the cache; u8 for elements that share a byte."""
    return spec.dtype.unit


def storable(spec: CacheSpec) -> tuple[str, ...]:
    """Element types that an append takes: floats where it quantizes or saturates, otherwise the storage type only."""
    if spec.quantized:
        return FLOATS
    return (spec.dtype.name, *FLOATS) if spec.converted else (spec.dtype.name,)


def queryable(spec: CacheSpec) -> tuple[str, ...]:
    """Element types of a query: the cache's own float type, or any of bf16, f16 and f32 over 8 or 4 bits."""
    return FLOATS if spec.converted else (spec.dtype.name,)


def extents_of(spec: CacheSpec | None) -> dict[str, int]:
    """The extents that a cache's type fixes."""
    if spec is None:
        return {}
    found = {"2": 2, "H": spec.num_heads, "D": spec.head_size, "H * D": spec.row_size, "2 * H * D": 2 * spec.row_size}
    found["D stored"] = spec.stored_size
    return found if not spec.quantized else {**found, "scales": spec.num_scales}


def fit(op: Any, buffers: Mapping[str, Buffer], spec: CacheSpec | None = None, **extents: int) -> bool:
    """Whether the named operands match their declarations, given the spec of the op's cache and known extents."""
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

    buffers = {}  # by operand name; without an annotation, which would make it a field

    def verify_invariants(self) -> bool:
        handle = next((n for n in ("collection", "cache") if hasattr(type(self), n)), None)
        spec = None if handle is None else verify.handle(self, getattr(self, handle), (handle,))
        return (handle is None or spec is not None) and self.verify_buffers(spec)

    def verify_buffers(self, spec: CacheSpec | None = None) -> bool:
        """Whether the buffers match their declarations."""
        return fit(self, self.buffers, spec)
