# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How a kernel's accesses are made: the decisions of ``plan-kv-access``, written onto each access.

Ops of other packages become accesses only later, by their rules. The plan for these stays on the kernel, as
``kv.access_plan``, until ``lower-kv-access`` has applied the rules and annotated the resulting accesses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlir import ir

from kvarn.dialect import effects, layout, types, verify
from kvarn.dialect.dtypes import CODED, DType
from kvarn.dialect.effects import MEMORY, LooksUpPage
from kvarn.dialect.ops.common import i64_attr

from . import memory_effects
from .remarks import remark

WIDEST = 16  # bytes of the widest access
_ATTRIBUTE = "kv.access_plan"


@dataclass(frozen=True)
class Written:
    """Element types that a kernel's ops write: through caches, through scales, through buffers."""

    caches: frozenset[str]
    scales: frozenset[str]
    buffers: frozenset[str]


def alignment(width: int, extent: int, itemsize: int, limit: int) -> int:
    """Alignment in bytes of an access of ``width`` of ``extent`` elements."""
    return min(layout.lowbit(math.gcd(width, extent) * itemsize), limit)


def units_read(dtype: DType, width: int) -> int:
    """Units of memory that a load of ``width`` elements reads: whole bytes, and whole eights of a user's own code."""
    return dtype.units(layout.align_up(width, CODED if dtype.code else dtype.step))


def written_elements(found: Sequence[ir.Operation]) -> Written | None:
    """What a kernel's ops write; None if they may write anything."""
    caches, scales, buffers = set(), set(), set()
    for op in found:
        written = memory_effects.writes(op)
        if written.everything:
            return None
        caches.update(types.spec_of(v.type).dtype.mlir for v in written.elements)
        for handle in written.scales:
            spec = types.spec_of(handle.type)
            if spec.scale_dtype is not None:
                scales.add(spec.scale_dtype.mlir)
        buffers.update(str(ir.MemRefType(v.type).element_type) for v in written.buffers)
    return Written(frozenset(caches), frozenset(scales), frozenset(buffers))


def is_access(name: str) -> bool:
    """Whether an op reads or writes elements, or scales, of a page of a cache, and so gets a plan."""
    found = effects.class_of(name) if effects.has(name, LooksUpPage) else None
    declared = None if found is None else effects.of_class(found)
    if declared is None or not {"head", "dim"} <= {f.name for f in found.FIELDS}:
        return False
    return any(e.resource != MEMORY for e in declared.effects)


@dataclass(frozen=True)
class Plan:
    """The decisions for all accesses of a kernel.

    Attributes
    ----------
    max_alignment : int
        In bytes.
    written : Written or None
        None: no access may use the read-only path.
    """

    max_alignment: int
    written: Written | None

    def leave_on(self, function: ir.Operation) -> None:
        """Store the plan on a kernel, for accesses that are made later."""
        fields: dict[str, ir.Attribute] = {"max_alignment": i64_attr(self.max_alignment)}
        if self.written is not None:
            for name in ("caches", "scales"):
                found = sorted(getattr(self.written, name))
                fields[name] = ir.ArrayAttr.get([ir.StringAttr.get(element) for element in found])
        function.attributes[_ATTRIBUTE] = ir.DictAttr.get(fields)

    @staticmethod
    def taken_from(function: ir.Operation) -> Plan | None:
        """Remove the stored plan from a kernel and return it; None without one."""
        if _ATTRIBUTE not in function.attributes:
            return None
        fields = ir.DictAttr(function.attributes[_ATTRIBUTE])
        del function.attributes[_ATTRIBUTE]
        written = None
        if "caches" in fields:
            caches, scales = (
                frozenset(ir.StringAttr(element).value for element in ir.ArrayAttr(fields[name]))
                for name in ("caches", "scales")
            )
            written = Written(caches, scales, frozenset())
        return Plan(ir.IntegerAttr(fields["max_alignment"]).value, written)

    def apply_to(self, op: ir.Operation) -> None:
        """Annotate one access."""
        spec = types.spec_of(op.operands[0].type)
        only_scales = effects.acts_on_scales_only(op.name)
        of_scales = only_scales or spec.kind == layout.SCALES
        if layout.loads_no_scales(spec) and only_scales:
            return  # the result is zeros
        dtype, extent = (spec.scale_dtype, spec.num_scales) if of_scales else (spec.dtype, layout.run_of(spec))
        value = op.results[0] if len(op.results) else op.opview.value
        width, item = verify.element_and_width(value.type)[1], dtype.unit.itemsize
        extent = dtype.units(extent)
        if op.name == "kv.load":  # the other accesses to packed elements count bytes
            width = units_read(dtype, width)
        bytes_ = alignment(width, extent, item, self.max_alignment)
        op.attributes["kv.alignment"] = i64_attr(bytes_)
        _say_width(op, width, item, bytes_, extent, "granules" if of_scales else "head size")
        if not len(op.results) or self.written is None:
            return
        caches, scales = self.written.caches, self.written.scales
        if dtype.mlir in (scales if of_scales else caches):
            remark(op, "missed", f"not by the read-only path: the kernel writes {dtype.mlir} through a cache")
        else:
            op.attributes["kv.read_only"] = ir.UnitAttr.get()
            if spec.quantized and not of_scales and spec.scale_dtype.mlir not in scales:
                op.attributes["kv.scales_read_only"] = ir.UnitAttr.get()


def _say_width(op: ir.Operation, width: int, itemsize: int, bytes_: int, extent: int, what: str) -> None:
    """A remark on the width of an access."""
    whole = width * itemsize
    verb = "load" if len(op.results) else "store"
    numbers = {"bytes": whole, "access_bytes": bytes_}
    if whole > bytes_ and bytes_ < WIDEST:
        text = f"{verb} of {whole} bytes is {-(-whole // bytes_)} of {bytes_}: {what} is {extent}, width {width}"
        remark(op, "missed", text, **numbers)
    elif whole < WIDEST:
        text = f"{verb} width is {whole} bytes, of {WIDEST}: {width} elements of {itemsize} bytes"
        remark(op, "missed", text, **numbers)
    else:
        remark(op, "passed", f"{verb} of {whole} bytes in {-(-whole // bytes_)} of {bytes_}", **numbers)
