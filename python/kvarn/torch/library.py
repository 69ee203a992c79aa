# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Every operation of ``kv.ops`` as a torch operator: ``torch.ops.kvarn.append`` and so on.

Schemas come from the declarations of the dialect: its operands and their kinds, and which of them an operation writes.
A cache handle becomes four arguments (see ``handles``); attributes and schedule are text. The operators return nothing:
``kv.ops`` allocates the results beforehand.

While torch traces (``torch.compile``, ``make_fx``, ``torch.export``, or any other dispatch mode), the last step of a
``kv.ops`` function, the call of an operation, becomes a call of its operator.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.fx.experimental.symbolic_shapes import guard_scalar

from kvarn import dispatch, ops
from kvarn.dialect.ext import F32, I32
from kvarn.dialect.layout import CacheSpec
from kvarn.dispatch import Operation
from kvarn.ops import reads
from kvarn.runtime.binding import is_torch

from . import handles

_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Operands with the type of the cache's elements if that is a float of 16 or 32 bits: autocast converts them.
_OF_CACHE = frozenset(("query", "key", "value", "x", "kv", "out", "query_out"))
_modes = torch._C._len_torch_dispatch_stack


def _kind(operation: Operation, field: Any) -> str:
    if field.name in operation._handles:
        return "handle"
    return {I32: "int", F32: "float"}.get(field.constraint, "buffer")


def schema(operation: Operation) -> str:
    """The schema of an operation's operator."""
    parts, written = [], 0
    for field in operation._fields:
        name, kind, mark = field.name, _kind(operation, field), "?" if field.optional else ""
        alias = ""
        if kind in ("handle", "buffer") and name in operation._written:
            alias, written = f"(a{written}!)", written + 1
        if kind == "handle":
            parts += [f"Tensor{alias}[] {name}_memory", f"Tensor[] {name}_tables", f"str {name}_kind"]
            parts.append(f"SymInt[] {name}_numbers")
        elif kind == "buffer":
            parts.append(f"Tensor{alias}{mark} {name}")
        else:
            parts.append(f"{'SymInt' if kind == 'int' else 'float'}{mark} {name}")
    return f"({', '.join([*parts, 'str attributes', 'str schedule'])}) -> ()"


# --- tracing -------------------------------------------------------------------------------------


def _text(entries: Any) -> str:
    """Pairs of names and values as text, the inverse of :func:`_pairs`."""
    return ", ".join([f"{name}={_value(value)}" for name, value in entries])


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "(" + "".join([f"{_value(v)}," for v in value]) + ")"
    if isinstance(value, (bool, str)):
        return repr(value)
    value = guard_scalar(value)  # a graph is valid for one value of an attribute
    return repr(float(value)) if isinstance(value, float) else repr(int(value))


@functools.lru_cache(maxsize=4096)
def _pairs(text: str) -> tuple[tuple[str, Any], ...]:
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return tuple((str(k.arg), ast.literal_eval(k.value)) for k in call.keywords)


def record(operation: Operation, operands: Sequence[Any], attributes: Any, schedule: Any, stream: Any) -> None:
    """Call the operator of an operation."""
    if stream is not None:
        raise ValueError(f"{operation.title}: stream must be None while torch traces: a graph runs on the current one")
    if operation.name not in _operators:
        raise NotImplementedError(
            f"{operation.title}: torch cannot trace operations of other packages: call it outside"
        )
    kinds = _kinds[operation.name]
    args: list[Any] = []
    for i, kind in enumerate(kinds):
        operand = operands[i] if i < len(operands) else None
        if kind == "handle":
            args.extend(handles.flat(operand))
        else:
            args.append(operand)
    entries = () if schedule is None else sorted(schedule.items())
    _operators[operation.name](*args, _text(attributes), _text(entries))


_kinds: dict[str, tuple[str, ...]] = {}
_operators: dict[str, Any] = {}


def _implementation(operation: Operation) -> Callable[..., None]:
    kinds, written = _kinds[operation.name], operation._written
    places = [f.name in written for f in operation._fields]

    def run(*args: Any) -> None:
        *given, attributes, schedule = args
        entries = dict(_pairs(schedule)) if schedule else None
        rest, operands = iter(given), []
        for kind, changes in zip(kinds, places, strict=True):
            if kind == "handle":
                memory = next(rest)
                operands.append(handles.made(memory, next(rest), next(rest), next(rest)))
            else:
                operands.append(next(rest))
                memory = operands[-1:] if operands[-1] is not None else ()
            if changes:  # so that autograd detects that saved tensors have changed
                for tensor in memory:
                    if not tensor.is_inference():
                        increment_version(tensor)
        operation(operands, _pairs(attributes), entries, now=True)

    return run


# --- autocast ------------------------------------------------------------------------------------


def _float_of(operands: Sequence[Any]) -> torch.dtype | None:
    """The type to which autocast converts data: the first handle's element type, if it is a float of 16 or 32 bits."""
    for operand in operands:
        spec = getattr(operand, "spec", None)
        if spec is not None:
            return _FLOATS.get((spec if isinstance(spec, CacheSpec) else spec.cache).dtype.name)
    return None


def _cast(
    operation: Operation, named: dict[str, Any], wanted: torch.dtype | None
) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    """Data of other float types converted to the cache's, and pairs of an output and the tensor to copy it to."""
    cast, back = {}, []
    for name, operand in named.items():
        if name in _OF_CACHE and isinstance(operand, torch.Tensor) and wanted is not None:
            if operand.dtype in _FLOATS.values() and operand.dtype != wanted:
                cast[name] = operand.to(wanted)
                if name in operation._written:
                    back.append((operand, cast[name]))
    return cast, back


def converted(operation: Operation, operands: Sequence[Any]) -> tuple[Sequence[Any], Callable[[], None]] | None:
    """Under autocast, operands in the cache's float type, and a function that copies the outputs back; else None."""
    if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
        return None
    named = dict(zip(operation.operands, operands, strict=False))
    cast, back = _cast(operation, named, _float_of(operands))
    if not cast:
        return None

    def after() -> None:
        for output, found in back:
            output.copy_(found)

    return [cast.get(name, operand) for name, operand in named.items()], after


def _autocast(operation: Operation, key: Any) -> Callable[..., None]:
    names = [f.name for f in operation._fields]
    kinds = _kinds[operation.name]
    at = [sum(4 if k == "handle" else 1 for k in kinds[:i]) for i in range(len(kinds))]

    def run(*args: Any) -> None:
        found = list(args)
        memory = next((args[at[i]] for i, kind in enumerate(kinds) if kind == "handle"), None)
        wanted = memory[0].dtype if memory and memory[0].dtype in _FLOATS.values() else None
        named = {n: args[at[i]] for i, n in enumerate(names) if kinds[i] == "buffer"}
        cast, back = _cast(operation, named, wanted)
        for name, tensor in cast.items():
            found[at[names.index(name)]] = tensor
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            _operators[operation.name](*found)
        for output, tensor in back:
            output.copy_(tensor)

    return run


# --- registration --------------------------------------------------------------------------------


def _nothing(*args: Any) -> None:
    """An operator on tensors without memory: it returns nothing, and its schema declares what it writes."""


def operations() -> dict[str, Operation]:
    """All operations of ``kv.ops``, by the name of their operator."""
    modules = [m for name, m in list(sys.modules.items()) if name.startswith(ops.__name__ + ".")]
    found = [v for m in modules for v in vars(m).values() if isinstance(v, Operation)]
    return {o.name.removeprefix("kv."): o for o in sorted(found, key=lambda o: o.name)}


def _register() -> torch.library.Library:
    library = torch.library.Library("kvarn", "FRAGMENT")
    for name, operation in operations().items():
        _kinds[operation.name] = tuple(_kind(operation, f) for f in operation._fields)
        run = _implementation(operation)
        library.define(name + schema(operation), tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            library.impl(name, run, key)
        torch.library.register_fake(f"kvarn::{name}", _nothing, lib=library)
        _operators[operation.name] = getattr(torch.ops.kvarn, name).default
        for key in ("AutocastCPU", "AutocastCUDA"):
            library.impl(name, _autocast(operation, getattr(torch._C.DispatchKey, key)), key)
    return library


def recording() -> bool:
    """Whether torch is tracing: a dispatch mode is active."""
    return _modes() > 0


@torch.compiler.substitute_in_graph(recording, skip_signature_check=True)
def _in_graph() -> bool:
    return True


@torch.compiler.substitute_in_graph(is_torch, skip_signature_check=True)
def _is_tensor(cls: type) -> bool:
    return issubclass(cls, torch.Tensor)


@torch.compiler.substitute_in_graph(reads._modified, skip_signature_check=True)
def _attributes(score: Any, mask: Any, window: Any, chunk: Any, softcap: Any, title: str) -> Any:
    return reads._attributes(score, mask, window, chunk, softcap, title)


@torch.compiler.substitute_in_graph(reads._bounds, skip_signature_check=True)
def _bounds(queries: int, batch: int) -> Any:
    return reads._fixed_bounds.__wrapped__(queries, batch)


_library = _register()
dispatch.recorder = sys.modules[__name__]  # its recording, record and converted
