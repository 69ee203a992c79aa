# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Checks that verifiers share. Each emits an error "op: what must be true, got value" and returns False.

On MLIR 22.1 IRDL can only constrain single types and attributes; ``verify-kv`` checks the rest by running the ops'
``verify_invariants``.
"""

from typing import Any

from mlir import ir

from . import dtypes, layout, page_orders, schedules, types
from .layout import CacheSpec

CACHE_LIKE = ("cache", "operand")
ANY_HANDLE = ("cache", "operand", "collection")


def fail(op: Any, sentence: str) -> bool:
    """Emit ``'kv.x' op <sentence>`` at the op; always False."""
    op.operation.location.emit_error(f"'{op.operation.name}' op {sentence}")
    return False


def handle(op: Any, value: ir.Value, kinds: tuple[str, ...] = CACHE_LIKE) -> CacheSpec | None:
    """The spec of an operand that must be a cache, operand or collection; None after an error."""
    if types.type_name(value.type) not in kinds:
        names = " or ".join(f"!kv.{k}" for k in kinds)
        fail(op, f"operand must be of type {names}, got {value.type}")
        return None
    spec = types.spec_or_problem(value.type)
    if isinstance(spec, str):
        fail(op, f"has a malformed type: {spec}; got {value.type}")
        return None
    lacks = layout.operand_lacks(spec.kind, op.operation.name.removeprefix("kv."))
    if lacks is not None:
        fail(op, f"cannot take a {spec.kind} operand: {lacks}")
        return None
    return spec


def added_kinds(op: Any) -> bool:
    """Whether an op supports its operands of added cache kinds. Ops of other packages check this themselves."""
    name = op.operation.name.removeprefix("kv.")
    for value in op.operation.operands if page_orders.added else ():
        if types.type_name(value.type) not in ANY_HANDLE:
            continue
        spec = types.spec_or_problem(value.type)
        if isinstance(spec, str) or spec.kind not in page_orders.added or not type(op).__module__.startswith("kvarn."):
            continue
        if name not in page_orders.ADDED_TAKE:
            what = "the order of its pages is another package's, which kv.load and kv.store know"
            return fail(op, f"cannot take a {spec.kind} cache: {what}")
        run = layout.run_of(spec)
        if name in ("load", "store"):
            lanes = element_and_width(op.out.type if name == "load" else op.value.type)[1]
            if not lanes or run % lanes:
                return fail(op, f"width must divide {run}, the contiguous elements of a {spec.kind} cache, got {lanes}")
    return True


def packed_elements(op: Any) -> bool:
    """Whether an op takes its operands of packed elements. Ops of other packages check this themselves."""
    name = op.operation.name.removeprefix("kv.")
    if name in page_orders.PACKED_TAKE or not type(op).__module__.startswith("kvarn."):
        return True
    for value in op.operation.operands:
        if types.type_name(value.type) not in ANY_HANDLE or "ui4" not in str(value.type):
            continue
        spec = types.spec_or_problem(value.type)
        if not isinstance(spec, str) and spec.packed:
            return fail(
                op,
                f"takes no cache of {spec.dtype.name}, of which two elements share a byte, yet: use kv.append, "
                "kv.attention, kv.gather and kv.convert, or convert to a cache of bf16 first",
            )
    return True


def integer(attribute: ir.Attribute) -> int | None:
    """The value of an integer attribute; None for other attributes, and for integers too wide for the bindings."""
    if not isinstance(attribute, ir.IntegerAttr):
        return None
    type_ = attribute.type
    return None if isinstance(type_, ir.IntegerType) and type_.width > 64 else attribute.value


def string(attribute: ir.Attribute) -> str | None:
    return ir.StringAttr(attribute).value if isinstance(attribute, ir.StringAttr) else None


def boolean(attribute: ir.Attribute) -> bool | None:
    return ir.BoolAttr(attribute).value if isinstance(attribute, ir.BoolAttr) else None


class _Unread(str):
    """The text of a non-string attribute, for messages."""

    __repr__ = str.__str__


def python_values(dictionary: ir.Attribute) -> dict[str, Any]:
    """A dictionary attribute as Python values; attributes other than strings, numbers and bools become text."""
    found: dict[str, Any] = {}
    for named in ir.DictAttr(dictionary):
        value = named.attr
        if isinstance(value, ir.BoolAttr):
            found[named.name] = value.value
        elif isinstance(value, (ir.StringAttr, ir.FloatAttr)):
            found[named.name] = value.value
        else:
            number = integer(value)
            found[named.name] = _Unread(value) if number is None else number
    return found


def attribute_of(value: Any) -> ir.Attribute:
    """A Python value as an attribute: integers become i64, floats f32, sequences of integers arrays of i64."""
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    if isinstance(value, int):
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
    if isinstance(value, float):
        return ir.FloatAttr.get(ir.F32Type.get(), value)
    if isinstance(value, str):
        return ir.StringAttr.get(value)
    return ir.DenseI64ArrayAttr.get(list(value))


def schedule(op: Any) -> bool:
    """Whether the operation's schedule, if it has one, is legal for some target and case."""
    attributes, name = op.operation.attributes, op.operation.name
    if "schedule" not in attributes or name not in schedules.OPERATIONS:
        return True
    if not isinstance(attributes["schedule"], ir.DictAttr):
        return fail(op, f"schedule must be a dictionary, got {attributes['schedule']}")
    problem = schedules.why_unsupported(name, python_values(attributes["schedule"]), decided=True)
    return problem is None or fail(op, f"has a schedule whose {problem}")


def element_and_width(type_: ir.Type) -> tuple[str, int]:
    """(MLIR element type, lanes) of a scalar or 1-D vector type; lanes is 0 for other types."""
    if isinstance(type_, ir.VectorType):
        vector = ir.VectorType(type_)
        lanes = vector.shape[0] if vector.rank == 1 else 0
        return str(vector.element_type), lanes
    return str(type_), 1


def element_and_shape(type_: ir.Type) -> tuple[str, Any]:
    """As :func:`element_and_width`, but with a tile's shape in place of the lanes."""
    if isinstance(type_, ir.RankedTensorType):
        tile = ir.RankedTensorType(type_)
        return str(tile.element_type), tuple(tile.shape)
    return element_and_width(type_)


def width(op: Any, spec: CacheSpec, value: ir.Value, extent: int, what: str) -> int | None:
    """The op's ``width``, checked against its value's lanes and the extent that it spans; None after an error."""
    count = integer(op.width)
    if count is None or count < 1:
        fail(op, f"width must be a positive integer, got {op.width}")
        return None
    if element_and_width(value.type)[1] != count:
        fail(op, f"{what} must have width = {count} lanes, got {value.type}")
        return None
    if count > extent:
        fail(op, f"width must be at most {extent}, the extent of the dimension, got {count}")
        return None
    return count


def scalar_float(op: Any, text: str, what: str) -> bool:
    """Whether a type, given as text, is a float that a load can convert to."""
    try:
        if dtypes.by_mlir(text).is_float:
            return True
    except ValueError:
        pass
    return fail(op, f"{what} must be a float type, got {text}")


def needs_scales(op: Any, spec: CacheSpec) -> bool:
    return spec.quantized or fail(op, "needs a quantized cache (one with a scale type), got one without scales")


def one_of(op: Any, name: str, allowed: tuple[str, ...]) -> bool:
    """Whether a string attribute has one of the allowed values."""
    value = string(op.operation.attributes[name])
    return value in allowed or fail(
        op, f"{name} must be one of {', '.join(allowed)}, got {op.operation.attributes[name]}"
    )


def memref(op: Any, value: ir.Value, rank: int, elements: tuple[str, ...] | None, name: str) -> bool:
    """Whether an operand is a memref of a rank and one of some element types (None: any)."""
    if not isinstance(value.type, ir.MemRefType):
        return fail(op, f"{name} must be a memref of rank {rank}, got {value.type}")
    type_ = ir.MemRefType(value.type)
    if type_.rank != rank:
        return fail(op, f"{name} must be a memref of rank {rank}, got {value.type}")
    if elements is not None and str(type_.element_type) not in elements:
        return fail(op, f"{name} must have element type {' or '.join(elements)}, got {type_.element_type}")
    return True


def static_dim(op: Any, value: ir.Value, dim: int, size: int, name: str) -> bool:
    """Whether a memref's dimension is dynamic or has the given size."""
    type_ = ir.MemRefType(value.type)
    if type_.is_dynamic_dim(dim) or type_.shape[dim] == size:
        return True
    return fail(op, f"{name} must have {size} in dimension {dim}, got {type_.shape[dim]}")


def global_pointer(op: Any) -> bool:
    """Whether the op's result is a pointer to device memory."""
    got = op.operation.results[0].type
    return str(got) == "!llvm.ptr<1>" or fail(op, f"result must be !llvm.ptr<1>, got {got}")
