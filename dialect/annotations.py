# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What each discardable attribute ``kv.*`` holds, which one pass leaves on an op for a later one.

Passes read them without checking: ``verify-kv`` refuses an attribute of another kind wherever IR of a user enters, as
text or from a pass of the user's own. Attributes that are not listed are free.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from mlir import ir

from . import dtypes

Check = Callable[[Any], bool]
_WORDS = ("kind", "instruction")  # entries of a schedule that are strings


def _is(kind: type) -> Check:
    return lambda attribute: isinstance(attribute, kind)


def _all(kind: type, holds: Check) -> Check:
    """An array whose elements all are of a kind."""
    return lambda attribute: isinstance(attribute, kind) and all(holds(x) for x in attribute)


def _count(attribute: Any) -> bool:
    return isinstance(attribute, ir.IntegerAttr) and 0 <= attribute.value < 2**31


def _alignment(attribute: Any) -> bool:
    return _count(attribute) and attribute.value.bit_count() == 1


def _extents(attribute: Any) -> bool:
    return isinstance(attribute, ir.DenseI32ArrayAttr) and len(attribute) == 3 and min(attribute) > 0


def _entries(attribute: Any) -> bool:
    return isinstance(attribute, ir.DictAttr) and all(
        isinstance(entry.attr, ir.StringAttr if entry.name in _WORDS else (ir.IntegerAttr, ir.BoolAttr, ir.FloatAttr))
        for entry in attribute
    )


def _argument(attribute: Any) -> bool:
    return (
        isinstance(attribute, ir.DictAttr)
        and "name" in attribute
        and all(isinstance(attribute[name], ir.StringAttr) for name in ("name", "kind", "dtype") if name in attribute)
        and ("dtype" not in attribute or not attribute["dtype"].value or dtypes.is_name(attribute["dtype"].value))
    )


def _parameter(attribute: Any) -> bool:
    kinds = {"arg": ir.IntegerAttr, "field": ir.StringAttr}
    return isinstance(attribute, ir.DictAttr) and all(
        name in attribute and isinstance(attribute[name], kind) for name, kind in kinds.items()
    )


def _record(attribute: Any) -> bool:
    try:
        return isinstance(attribute, ir.StringAttr) and isinstance(json.loads(attribute.value), dict)
    except ValueError:
        return False


def _tile(attribute: Any) -> bool:
    return isinstance(attribute, ir.TypeAttr) and isinstance(attribute.value, ir.RankedTensorType)


_ARGUMENTS = ("an array of dictionaries, each with a name and of a known dtype, if any", _all(ir.ArrayAttr, _argument))
_COUNT = ("an integer in [0, 2^31)", _count)
_EXTENTS = ("an array<i32> of three positive extents", _extents)
_INDICES = ("an array<i64> of numbers of arguments", _all(ir.DenseI64ArrayAttr, lambda index: index >= 0))
_ALIGNMENTS = ("an array<i64> of bytes", _all(ir.DenseI64ArrayAttr, lambda number: 0 <= number < 2**31))
_RECORD = ("a JSON object as a string", _record)

KINDS: dict[str, tuple[str, Check]] = {
    "kv.abi": _RECORD,
    "kv.alignment": ("a power of two, in bytes", _alignment),
    "kv.arg_alignments": _ALIGNMENTS,
    "kv.arg_types": ("an array of types", _all(ir.ArrayAttr, _is(ir.TypeAttr))),
    "kv.args": _ARGUMENTS,
    "kv.assertions": ("an array of strings", _all(ir.ArrayAttr, _is(ir.StringAttr))),
    "kv.block": _EXTENTS,
    "kv.cluster": _EXTENTS,
    "kv.iterations": _COUNT,
    "kv.max_registers": _COUNT,
    "kv.max_threads": _COUNT,
    "kv.min_blocks": _COUNT,
    "kv.params": (
        "an array of dictionaries, each with the number of an argument and a field",
        _all(ir.ArrayAttr, _parameter),
    ),
    "kv.program": _RECORD,
    "kv.program_args": _ARGUMENTS,
    "kv.read_only_args": _INDICES,
    "kv.row_alignment": _COUNT,
    "kv.schedule": ("a dictionary of numbers and booleans, and strings for kind and instruction", _entries),
    "kv.shared_bytes": _COUNT,
    "kv.table_alignments": _ALIGNMENTS,
    "kv.tile": ("the type of a tile", _tile),
    "kv.written": _INDICES,
}  # fmt: skip


def problems(op: ir.Operation) -> Iterator[str]:
    """What is wrong with an op's attributes of this table, in sentences about the op."""
    found = {name: op.attributes[name] for name in op.attributes if name in KINDS}
    wrong = [name for name, attribute in found.items() if not KINDS[name][1](attribute)]
    for name in wrong:
        yield f"'{name}' must be {KINDS[name][0]}, got {found[name]}"
    if wrong or "kv.arg_types" not in found:
        return
    count = len(found["kv.arg_types"])
    for name in ("kv.written", "kv.read_only_args"):
        outside = [index for index in found.get(name, ()) if index >= count]
        if outside:
            yield f"'{name}' must have numbers below {count}, the number of arguments, got {outside[0]}"
