# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Execution of kernels and operations compiled for a GPU, by the interpreter, on NumPy arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import kvarn
from kvarn.artifact import Artifact, Entry, Step
from kvarn.dialect import chips
from kvarn.runtime import binding, buffers, overlap, ownership, timeline
from kvarn.runtime.expressions import compile_expressions, compile_step
from kvarn.runtime.program import Program
from kvarn.settings import emulating, emulation

from . import grid as ptx
from .grid import Order
from .memory import Field, Memory, arrays_of, fields_of
from .ptx_parser import EmulationError
from .report import Report
from .stream import Launched, Stream

_ALIGNMENT = 256  # of scratch memory


@dataclass(unsafe_hash=True)
class Facts:
    """Device properties for expressions."""

    multiprocessors: int
    shared_bytes: int = chips.HOPPER.shared_bytes
    l2_bytes: int = chips.HOPPER_L2_BYTES
    warp_size: int = chips.WARP

    def encode(self, description: Any) -> Any:
        """The interpreter takes a TMA descriptor as its description."""
        return description


def order_of(order: str | Order, seed: int = 0, copies: str | None = None) -> Order:
    """An order by name: ``"program"``, ``"forward"``, ``"backward"`` or ``"random"``; see :func:`emulated`."""
    if isinstance(order, Order):
        return order
    if order == "random":
        return Order("random", copies or "random", seed)
    return Order("together" if order == "program" else order, copies or "late", seed)


# --- kernels -------------------------------------------------------------------------------------


def launch(
    made: Any, grid: Any, block: Any, args: Sequence[Any], order: Order | None = None, report: Report | None = None,
    stream: Stream | None = None, programmatic: bool | None = None,
) -> None:  # fmt: skip
    """Run a compiled kernel on host buffers as its GPU would.

    Parameters
    ----------
    made : kvarn.compilation.kernel.Kernel
    grid, block : int or tuple
    args
        As in the kernel's ``launch``; TMA descriptors are those of host buffers.
    order : Order, optional
    report : Report, optional
    stream : Stream, optional
        With the earlier kernels.
    programmatic : bool, optional
        Whether it may start before they have ended; default: the kernel's attribute.
    """
    artifact = made.artifact
    if artifact.target == "host":
        raise ValueError(f"{made.name} is compiled for host: the emulator runs PTX of a GPU target such as sm_90a")
    entry = artifact.entry()
    if len(args) != len(entry.args):
        expected = ", ".join(a.name for a in entry.args)
        raise TypeError(f"kernel {made.name!r} takes {len(entry.args)} arguments ({expected}), got {len(args)}")
    values: list[Any] = []
    parts: list[Field] = []
    every: list[tuple[Any, ...]] = []
    for arg, given in zip(entry.args, args, strict=True):
        if arg.kind == "tensormap":
            every.append((given,))
            if given.spec != arg.spec:
                raise ValueError(f"argument {arg.name!r} of {made.name} must be a descriptor {arg.spec}")
            values.append(given.description)
            continue
        fields, ordinal = binding.make_binder(arg, made.name)(given)
        if ordinal is not None and ordinal != binding.HOST:
            raise ValueError(f"argument {arg.name!r} of {made.name} must be in host memory to be emulated")
        parts += fields_of(arg, fields)
        every.append(fields)
        bound = dict(zip((f.name for f in arg.fields), fields, strict=True))
        here = [p for p in entry.params if entry.args[p.arg] is arg]
        values += [_bits(bound[p.field], p.type) for p in here]
    read_only = overlap.ReadOnly(made.name, entry.args)
    if read_only:
        read_only(every)
    grid, block = _triple(grid, "grid"), _triple(entry.block if block is None else block, "block")
    if entry.block is not None and block != entry.block:
        raise ValueError(f"{made.name} was compiled for a block of {entry.block}, got {block}")
    if not 1 <= int(np.prod(block)) <= (entry.max_threads or 1024):
        raise ValueError(f"a block of {made.name} has 1 to {entry.max_threads or 1024} threads, got {block}")
    early = bool(entry.attributes.get("programmatic")) if programmatic is None else programmatic
    _launch(artifact, entry, grid, block, values, arrays_of(args), order, report, parts, _Place(stream, early))


@dataclass(frozen=True)
class _Place:
    """A launch in a stream; ``followed``: the next kernel may start before it has ended."""

    stream: Stream | None
    programmatic: bool
    followed: bool = True


def _launch(
    artifact: Artifact, entry: Entry, grid: Any, block: Any, values: list[Any], arrays: list[np.ndarray],
    order: Order | None, report: Report | None, parts: list[Field], place: _Place,
) -> None:  # fmt: skip
    """Run a kernel, with ownership checks if it is compiled with them."""
    variables: dict[str, int] = {}
    own = arrays
    timeline.load(entry, binding.HOST, variables.__setitem__)
    if variables:
        arrays = arrays + timeline.switch(binding.HOST).arrays()
    watched = ownership.accesses(entry)
    if watched:
        ownership.load(entry, binding.HOST, variables.__setitem__)
        ownership.before(binding.HOST)
        arrays = arrays + ownership.registry(binding.HOST).arrays()

    def launched(memory: Memory) -> Launched | None:
        if place.stream is None:
            return None
        return place.stream.launch(entry.name, place.programmatic, memory, own, arrays[len(own) :], place.followed)

    try:
        ptx.launch(
            str(artifact.code["ptx"]), entry.name, grid, block, values, arrays, entry.shared_bytes, order,
            entry.cluster, ptx.Around(report, parts, variables, launched),
        )  # fmt: skip
    except EmulationError as error:
        error.kernel = error.kernel or entry.name
        if watched:
            ownership.after_failure(binding.HOST, error)
        raise
    if watched:
        ownership.after(binding.HOST)


def _triple(extents: Any, what: str) -> tuple[int, int, int]:
    given = extents if isinstance(extents, tuple) else (extents,)
    found = (*given, 1, 1)[:3]
    if not 1 <= len(given) <= 3 or any(
        isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0 for n in found
    ):
        raise ValueError(f"{what} must be one to three non-negative ints, got {extents!r}")
    return tuple(int(n) for n in found)  # type: ignore[return-value]


# --- programs ------------------------------------------------------------------------------------


def run_program(
    program: Artifact,
    given: Sequence[Any],
    multiprocessors: int = 2,
    order: Order | None = None,
    report: Report | None = None,
    stream: Stream | None = None,
) -> None:
    """Run a program's steps on host buffers.

    Parameters
    ----------
    program : Artifact
    given
        One object per argument.
    multiprocessors : int
        Multiprocessors assumed by grids that fill the device.
    order : Order, optional
    report : Report, optional
    stream : Stream, optional
        With the kernels before the program; by default none.
    """
    _run_steps(program, [_fields(g) for g in given], arrays_of(given), Facts(multiprocessors), order, report, stream)


def _run_steps(
    program: Artifact, values: list[tuple[Any, ...]], arrays: list[np.ndarray], facts: Facts, order: Order | None,
    report: Report | None, stream: Stream | None,
) -> None:  # fmt: skip
    sizes = compile_expressions([w.bytes for w in program.workspaces], program.args)(values, facts)
    scratch = [
        np.zeros(size + _ALIGNMENT, np.uint8) if w.zeroed else np.full(size + _ALIGNMENT, 0xFF, np.uint8)
        for w, size in zip(program.workspaces, sizes, strict=True)
    ]
    places = [(s.ctypes.data + -s.ctypes.data % _ALIGNMENT, size) for s, size in zip(scratch, sizes, strict=True)]
    parts = [field for arg, fields in zip(program.args, values, strict=True) for field in fields_of(arg, fields)]
    parts += [
        Field(f"scratch {w.name}", at, at + size) for w, (at, size) in zip(program.workspaces, places, strict=True)
    ]
    early = [_starts_early(program, step) for step in program.steps]
    followed = [*early[1:], stream is not None]
    stream = stream or Stream()
    for n, step in enumerate(program.steps):
        entry, place = program.entry(step.entry), _Place(stream, early[n], followed[n])
        (gx, gy, gz, bx, by, bz, _), flat = compile_step(program, step)(values, facts, places)
        numbers = [v if p.type == "tensormap" else _bits(v, p.type) for v, p in zip(flat, entry.params, strict=True)]
        _launch(program, entry, (gx, gy, gz), (bx, by, bz), numbers, arrays + scratch, order, report, parts, place)
    for workspace, memory in zip(program.workspaces, scratch, strict=True):
        if workspace.zeroed and memory.any():
            raise EmulationError(
                f"{workspace.name} of {program.name} must be zeros again for the next launch, and is not"
            )


def _starts_early(program: Artifact, step: Step) -> bool:
    """Whether a step may start before the previous one has ended."""
    return bool({**program.entry(step.entry).attributes, **step.attributes}.get("programmatic"))


def run(
    operation: Any,
    operands: Sequence[Any],
    attributes: tuple[tuple[str, Any], ...] = (),
    schedule: Mapping[str, Any] | None = None,
    target: str = "sm_90a",
    multiprocessors: int = 2,
    order: Order | None = None,
    report: Report | None = None,
    stream: Stream | None = None,
) -> None:
    """Run an operation (``kvarn.dispatch.Operation``) on host buffers as the GPU ``target`` would.

    Operands, attributes and schedule as in the operation; other parameters as in :func:`run_program`.
    """
    ordered = () if schedule is None else tuple(sorted(schedule.items()))
    what, given = operation.specialisation(operands, attributes, ordered, target)
    program = kvarn.dispatch.artifact(what, lineinfo=report is not None)
    run_program(program, given, multiprocessors, order, report, stream)


def _fields(operand: Any) -> tuple[Any, ...]:
    """The field values of a program's argument."""
    if hasattr(operand, "fields"):
        return operand.fields()
    if isinstance(operand, buffers.BufferView):
        return (operand.data, *operand.shape, *operand.strides[:-1])
    return (operand,)


def _bits(value: Any, type_: str) -> int:
    if type_ in ("f32", "f64"):
        kind, bits = (np.float32, np.uint32) if type_ == "f32" else (np.float64, np.uint64)
        return int(kind(value).view(bits))
    return int(value) & (1 << 64) - 1


# --- the context of emulation ------------------------------------------------------------------------


class EmulatedProgram(Program):
    """An operation's program in the emulator; takes the place of ``kvarn.dispatch.OperationProgram``."""

    def bind(self, operands: Sequence[Any]) -> tuple[list[tuple[Any, ...]], int]:
        values, ordinal = self._binders.bind(operands)
        if ordinal != binding.HOST:
            raise ValueError(f"operands of {self.artifact.name} must be in host memory to be emulated")
        return values, ordinal

    def run(self, known: Any, values: list[Any], operands: Sequence[Any], stream: Any) -> None:
        e = emulation()
        known.complete(values)
        if e is None:
            raise RuntimeError("an emulated operation was used after its context")
        _run_steps(self.artifact, values, arrays_of(operands), Facts(e.multiprocessors), e.order, e.report, e.stream)


@dataclass(frozen=True, eq=False)
class Emulation:
    """The replacement of the GPU inside ``with kv.emulated(...)``."""

    target: str
    order: Order
    multiprocessors: int
    report: Report
    stream: Stream | None = None  # None if kernels of the target cannot start early

    def program(self, what: Any) -> EmulatedProgram:
        """The program of an operation's specialisation."""
        return EmulatedProgram(kvarn.dispatch.artifact(what, lineinfo=True))

    def launch(self, made: Any, grid: Any, block: Any, args: Sequence[Any]) -> None:
        launch(made, grid, block, args, self.order, self.report, self.stream)


@contextlib.contextmanager
def emulated(
    target: str = "sm_90a",
    *,
    order: str | Order = "program",
    seed: int = 0,
    copies: str | None = None,
    multiprocessors: int | None = None,
    races: bool = True,
    steps: int | None = None,
) -> Iterator[Report]:
    """Run kernels and ``kv.ops`` that this thread launches inside, on NumPy arrays, as a GPU would.

    The PTX for ``target`` runs in an interpreter. Fatal errors raise ``EmulationError``: an access that is misaligned
    or outside the arguments' memory, a deadlock (with the barrier's name), a product that is used too early. Errors
    that may not affect results are in the report's ``hazards``.

    Parameters
    ----------
    target : str
        ``"sm_80"``, ``"sm_90a"``, ``"sm_100a"``, ...
    order : str or Order
        Scheduling of a block's warps: ``"program"`` (together, the lowest instruction first), ``"forward"`` and
        ``"backward"`` (each as far as possible, from the first or the last), ``"random"``.
    seed : int
        Seed of a random order.
    copies : {"late", "early", "random"}, optional
        Completion of asynchronous copies; default: ``"late"``, and ``"random"`` in a random order.
    multiprocessors : int, optional
        Multiprocessors assumed by grids that fill the device; default: those of the first GPU of the architecture.
    races : bool
        Whether to detect races and reads of unwritten shared memory, which takes up to half of the time.
    steps : int, optional
        Step limit of a launch (blocks and scheduling steps of threads), above which it raises ``EmulationError``.
        Default: ``KVARN_EMULATOR_STEPS``, or the limit of ``order``.

    Yields
    ------
    Report
        Counts of everything run inside so far.
    """
    from kvarn.lowering.target import by_name

    chosen = by_name(target)
    if chosen.is_host:
        raise ValueError("the emulator runs PTX: target must be a GPU's, such as sm_90a, got host")
    count = (
        chosen.chip.multiprocessors if multiprocessors is None else multiprocessors
    )  # for grids that fill the device
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise ValueError(f"multiprocessors must be a positive int, got {multiprocessors!r}")
    report = Report(chosen.name, races)
    stream = Stream() if chosen.has("pdl") else None
    chosen_order = order_of(order, seed, copies)
    if steps is not None:
        chosen_order = replace(chosen_order, steps=steps)
    with emulating(Emulation(chosen.name, chosen_order, count, report, stream)):
        yield report


def emulate(kernel: Any, grid: Any, block: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Report:
    """``kernel.emulate`` for DSL kernels and compiled kernels."""
    if hasattr(kernel, "artifact"):  # compiled
        options = {"target": kernel.target, **options}
        if options["target"] != kernel.target:
            raise ValueError(f"{kernel.name} is compiled for {kernel.target}, got target={options['target']!r}")
        if kernel.target == "host":
            raise ValueError(f"{kernel.name} is compiled for host: the emulator runs PTX of a GPU target")
    with emulated(**options) as report:
        kernel[grid, block](*args)
    return report


__all__ = ["Emulation", "Facts", "emulate", "emulated", "launch", "order_of", "run", "run_program"]
