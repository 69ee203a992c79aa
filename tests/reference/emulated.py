# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Cache operations compiled for a GPU and run by the PTX interpreter, on NumPy buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvarn as kv
from kvarn.artifact import Artifact
from kvarn.programs import Operation, artifact
from kvarn.runtime import binding, buffers
from kvarn.runtime.expressions import compile_expressions, compile_step

from . import ptx


@dataclass(frozen=True)
class Facts:
    """What expressions are told of the device."""

    multiprocessors: int
    shared_bytes: int = 232448
    l2_bytes: int = 50 << 20
    warp_size: int = 32

    def encode(self, description: Any) -> Any:
        """The interpreter takes a TMA descriptor as its description."""
        return description


def run_block(
    kernel: Any, block: int, *arrays: np.ndarray, target: str = "sm_80", schedule: ptx.Schedule | None = None
) -> None:
    """Compile a kernel over buffers of f32 and i32 and run one block of it."""
    specs = [kv.Buffer[getattr(kv, {"f": "f32", "i": "i32"}[a.dtype.kind]), a.ndim] for a in arrays]
    made = kv.compile(kernel, *specs, target=target).artifact
    values: list[int] = []
    for a in arrays:
        values += [a.ctypes.data, *a.shape, *(s // a.itemsize for s in a.strides[:-1])]
    entry = made.entries[0]
    ptx.launch(
        made.code["ptx"],
        entry.name,
        (1, 1, 1),
        (block, 1, 1),
        values,
        arrays,
        entry.shared_bytes,
        schedule,
        entry.cluster,
    )


def run(
    operation: Operation,
    operands: Sequence[Any],
    attributes: tuple[tuple[str, Any], ...] = (),
    schedule: Mapping[str, Any] | None = None,
    target: str = "sm_90a",
    multiprocessors: int = 2,
    order: ptx.Schedule | None = None,
) -> None:
    """Run an operation on host buffers as the GPU ``target`` would.

    Parameters
    ----------
    operation : Operation
    operands, attributes, schedule
        As the operation takes them.
    multiprocessors : int
        What a grid that fills the device counts with.
    order : ptx.Schedule, optional
        What the hardware may choose.
    """
    ordered = () if schedule is None else tuple(sorted(schedule.items()))
    what, given = operation.specialisation(operands, attributes, ordered, target)
    run_program(artifact(what), given, multiprocessors, order)


def run_program(
    program: Artifact, given: Sequence[Any], multiprocessors: int = 2, order: ptx.Schedule | None = None
) -> None:
    """Run a program's steps on host buffers; ``given`` is one object an argument."""
    values = [_fields(g) for g in given]
    arrays = [a for g in given for a in _arrays(g)]
    facts = Facts(multiprocessors)
    sizes = compile_expressions([w.bytes for w in program.workspaces], program.args)(values, facts)
    scratch = [np.zeros(size + 256, np.uint8) if w.zeroed else np.full(size + 256, 0xFF, np.uint8)
               for w, size in zip(program.workspaces, sizes, strict=True)]  # fmt: skip
    places = [(s.ctypes.data + -s.ctypes.data % 256, size) for s, size in zip(scratch, sizes, strict=True)]
    for step in program.steps:
        entry = program.entry(step.entry)
        (gx, gy, gz, bx, by, bz, _), flat = compile_step(program, step)(values, facts, places)
        numbers = [v if p.type == "tensormap" else _bits(v, p.type) for v, p in zip(flat, entry.params, strict=True)]
        ptx.launch(
            program.code["ptx"],
            entry.name,
            (gx, gy, gz),
            (bx, by, bz),
            numbers,
            arrays + scratch,
            entry.shared_bytes,
            order,
            entry.cluster,
        )


def launch(made: Any, grid: Any, block: Any, args: Sequence[Any], order: ptx.Schedule | None = None) -> None:
    """Run a compiled kernel on host buffers as its GPU would.

    Parameters
    ----------
    made : kvarn.compiled.Kernel
    grid, block : int or tuple
    args
        As of its ``launch``; TMA descriptors are those of host buffers.
    order : ptx.Schedule, optional
    """
    entry = made.artifact.entry()
    values: list[Any] = []
    for arg, given in zip(entry.args, args, strict=True):
        if arg.kind == "tensormap":
            assert given.spec == arg.spec
            values.append(given.description)
            continue
        fields, _ = binding.make_binder(arg, made.name)(given)
        bound = dict(zip((f.name for f in arg.fields), fields, strict=True))
        here = [p for p in entry.params if entry.args[p.arg] is arg]
        values += [_bits(bound[p.field], p.type) for p in here]
    arrays = [np.asarray(a) for g in args for a in (getattr(g, "buffers", None) or [g]) if isinstance(a, np.ndarray)]
    triple = [(*(x if isinstance(x, tuple) else (x,)), 1, 1)[:3] for x in (grid, block)]
    ptx.launch(made.asm["ptx"], entry.name, *triple, values, arrays, entry.shared_bytes, order, entry.cluster)


def _fields(operand: Any) -> tuple[Any, ...]:
    """The values of a program's argument."""
    if hasattr(operand, "fields"):
        return operand.fields()
    if isinstance(operand, buffers.BufferView):
        return (operand.data, *operand.shape, *operand.strides[:-1])
    return (operand,)


def _arrays(operand: Any) -> list[np.ndarray]:
    """The memory of an argument."""
    if hasattr(operand, "buffers"):
        return [np.asarray(b) for b in operand.buffers]
    return [np.asarray(operand.owner)] if isinstance(operand, buffers.BufferView) else []


def _bits(value: Any, type_: str) -> int:
    if type_ == "f32":
        return int(np.float32(value).view(np.uint32))
    return int(value) & (1 << 64) - 1
