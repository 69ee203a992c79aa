# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Cache operations as Python callables: from the operands of a call to a compiled program and its launch.

An :class:`Operation` wraps one fused cache operation of the dialect, such as kv.attention, which the pipeline expands
into kernels. The *signature* of a call is everything that its checks and code depend on: specs, shapes, strides,
dtypes, devices, alignments and attributes. A call with a known signature takes a dictionary lookup and the packing of
its arguments. A new signature is checked, and its program comes from memory, the disk cache or the compiler. A program
is specialised for less than a signature: for static extents (heads, head size), not for numbers of tokens.
"""

from __future__ import annotations

import itertools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvarn import forks, pipelines, settings
from kvarn.artifact import Artifact
from kvarn.compilation import driver as compiler
from kvarn.compilation.kernel import Kernel
from kvarn.compilation.specialisation import (
    HANDLES,
    WIDEST,
    BufferType,
    HandleType,
    OperandType,
    ScalarType,
    Specialisation,
    build,
    op_class_of,
)
from kvarn.dialect import dtypes, effects, schedules
from kvarn.dialect.buffers import Buffer
from kvarn.dialect.contents import Rule
from kvarn.dialect.ext import F32, I32
from kvarn.dialect.layout import CacheSpec, lowbit
from kvarn.dsl import functions
from kvarn.lowering import pipeline
from kvarn.lowering.target import by_name, of_capability
from kvarn.runtime import buffers, contents, device, overlap, packing, quick, signatures, streams
from kvarn.runtime.binding import HOST, ordinal_of
from kvarn.runtime.program import Program

_REMEMBER = 1024  # signatures cached per operation, 2 to 20 KiB each
_LAUNCHES = 512  # packed launches cached per signature: one per layer, stream and cache size

Schedule = Mapping[str, Any] | None


# The module kvarn.torch.library, once imported: it records operations, and converts operands before they run.
# recording() says whether to call record(operation, operands, attributes, schedule, stream) instead of running;
# converted(operation, operands) replaces operands that would be refused, and returns work to do after the run, or None.
recorder: Any = None


# --- programs ------------------------------------------------------------------------------------


class OperationProgram(Program):
    """The program of an operation, which binds the operands and has checked them.

    Attributes
    ----------
    used : int
        Time stamp of the last run on the host, or of construction; larger is later.
    """

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(artifact)
        self.used = next(_clock)

    def run(
        self, known: _Known, values: list[Any], operands: Sequence[Any], stream: Any
    ) -> tuple[_Packed, int, Any] | None:
        """Run every step with field values, by default on the current stream of the ``operands``' library.

        On a GPU, returns the packed launches, the stream, and the steps' device.
        """
        ordinal = known.ordinal
        on = self._on.get(ordinal) or self._load(ordinal)
        if ordinal < 0:
            self.used = next(_clock)
            known.complete(values)
            with on.lock:
                for call, shape, flat in self._plan(on, values, 0):
                    call.launch(shape, flat, 0)
            return None
        if stream is None:
            handle = streams.current_stream(operands, ordinal)
        else:
            handle = stream if stream.__class__ is int else streams.handle_of(stream)
        before = on.calls[0].enter(handle) if handle <= streams.LAST_SPECIAL else None
        key = handle, known.rest(values)
        lock = on.lock
        lock.acquire()  # faster than a with statement
        try:
            packed = known.launches.get(key)
            if packed is None:
                packed = self._pack(on, known, key, values)
            elif packed.values != values:
                packed.move(known, values)
            for launch, arguments, _, _, after_failure, _ in packed.bounds:
                code = launch(*arguments)
                if code:
                    after_failure(code)
        finally:
            lock.release()
            if before is not None:
                device.unbind(before)
        return packed, handle, on

    def _pack(self, on: Any, known: _Known, key: tuple[int, Any], values: list[Any]) -> _Packed:
        """The packed launches of a call, without the addresses of its buffers; cached for calls with this key."""
        meetings: tuple[overlap.Meeting, ...] = ()
        if known.apart is not None:
            known.apart(values)
            meetings = tuple(known.apart.meetings(values))
        marked = list(values)
        for i, _ in known.tails:
            marked[i] = packing.Address.of(values[i], i)
        known.complete(marked)
        plan: Any = self._plan(on, marked, key[0])
        made = [call.bound(shape, flat, key[0]) for call, shape, flat in plan]
        if len(known.launches) >= _LAUNCHES:
            known.launches.clear()
        found = known.launches[key] = _Packed([bound for bound in made if bound is not None], meetings, values)
        return found

    def bind(self, operands: Sequence[Any]) -> tuple[list[tuple[Any, ...]], int]:
        """Check operands against the compiled code; their field values and device."""
        return self._binders.bind(operands)


# Host programs that stay loaded, the most recently used ones: each has 3 MB of machine code and JIT state. GPU
# programs are small and stay loaded, since a captured graph may launch them.
HOST_PROGRAMS = 64
_programs: dict[tuple[Specialisation, Hashable], OperationProgram] = {}
_operations: weakref.WeakSet[Operation] = weakref.WeakSet()
_clock = itertools.count()
_compiling = threading.Lock()


def program(what: Specialisation) -> OperationProgram:
    """The program of a specialisation: from memory, the disk cache or the compiler."""
    key = what, settings.specialisation_key()
    found = _programs.get(key)
    if found is None:
        with forks.no_fork(), _compiling:
            found = _programs.get(key)
            if found is None:
                found = _programs[key] = OperationProgram(artifact(what))
                _evict_host_programs()
    return found


def _evict_host_programs() -> None:
    """Evict the least recently used host programs above the limit."""
    of_host = [(p.used, key) for key, p in _programs.items() if key[0].target == "host"]
    for _, key in sorted(of_host, key=lambda entry: entry[0])[: max(len(of_host) - HOST_PROGRAMS, 0)]:
        gone = _programs.pop(key)
        for operation in list(_operations):
            operation.forget(gone)


def artifact(what: Specialisation, lineinfo: bool = False) -> Artifact:
    """The compiled artifact of a specialisation, from the disk cache if possible. A hit does no tracing."""
    portable = functions.are_portable(v for _, v in what.attributes)
    kind = "operation with lines" if lineinfo else "operation"
    applied = pipelines.current()
    key = compiler.key_of(kind, what, by_name(what.target), applied, [what.name]) if portable else None
    found = compiler.load_cached(key)
    if found is None:
        found = compile_operation(what, lineinfo).artifact
        compiler.save_cached(key, found)
    return found


def compile_operation(what: Specialisation, lineinfo: bool = False) -> Kernel:
    """Compile a specialisation without the cache; the result has the IR of all stages."""
    context, applied, target = compiler.context(), pipelines.current(), by_name(what.target)
    with compiler.diagnosed(context):
        module = build(what, context)
        text = str(module)
        made = compiler.lower(module, target, pipeline.steps(target, applied), lineinfo=lineinfo)
    return Kernel(made, text, applied)


# --- operations ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Packed:
    """The packed launches of calls that differ in the addresses of buffers only, with the values of the last call."""

    bounds: list[packing.Bound]
    meetings: tuple[overlap.Meeting, ...]  # distances of addresses at which outputs may overlap inputs
    values: list[Any] | None

    def move(self, known: _Known, values: list[Any]) -> None:
        """Check the addresses of another call, and pack them."""
        if known.apart is not None and overlap.meet(self.meetings, values):
            known.apart(values)
        self.values = None  # until all are packed: an interrupt may come before
        for _, _, words, moves, _, _ in self.bounds:
            for word, i in moves:
                words[word] = values[i]
        self.values = values


class _Known(NamedTuple):
    """The properties of a known signature."""

    program: Any  # an OperationProgram, or an emulated program
    ordinal: int
    tails: list[tuple[int, tuple[int, ...]]]  # per buffer: its operand index, and its fields after the address
    apart: overlap.Apart | None  # the check that outputs do not overlap inputs, if they could
    checks: tuple[contents.Check, ...]  # checks of a call's field values, for tables readable on the host
    rest: Callable[[Sequence[Any]], Any]  # the values of a call that its packed launches contain
    described: bool  # whether they include addresses of buffers that TMA reads
    launches: dict[Any, _Packed]  # by stream and ``rest``

    def check(self, values: list[Any]) -> None:
        """Check the values of a call in host memory; those of a GPU's are checked where its launches are packed."""
        if self.apart is not None:
            self.apart(values)
        if self.checks:
            whole = list(values)
            self.complete(whole)
            for check in self.checks:
                check(whole)

    def complete(self, values: list[Any]) -> None:
        """Insert the fields of buffers after their addresses."""
        for i, tail in self.tails:
            values[i] = (values[i], *tail)


class Missed(NamedTuple):
    """A call that the native launch cache does not hold: its arguments by name, and its key there."""

    names: Sequence[str]
    given: Sequence[Any]
    key: bytes
    attributes: Any = ()
    entries: Any = None


class Operation:
    """A fused cache operation as a callable.

    Parameters
    ----------
    name : str
        The op, such as ``"kv.append"``.
    static : mapping of str to int
        For data buffers: the first dimension with a compile-time extent. Their rows are accessed in vectors, so their
        alignment is part of the signature. Other buffers are tables of 32-bit integers, read element by element.
    check : callable, optional
        ``check(operands)`` with a namespace: handles unchanged, buffers as ``BufferView``, numbers, None for absent
        operands, ``attributes`` as a dictionary, ``title``, and the ``buffers`` that the op declares. Raises ValueError
        or TypeError.
    written : sequence of str
        Buffers that are written, if the op has them. Caches and collections are written if the op's effects say so.
    in_place : sequence of (str, str)
        Pairs of an output and an input that may be the same buffer. Otherwise outputs must not share memory with inputs
        (:class:`overlap.Apart`).
    unread : sequence of str
        Buffers of which only shape and type are used.
    single : sequence of str
        Data buffers that are read element by element, whose alignment is not part of the signature.
    handles : mapping of str to sequence of str
        Accepted kinds of handle operands, if they differ from the op's: ``{"collection": ("collection", "operand")}``.
    """

    def __init__(
        self,
        name: str,
        static: Mapping[str, int] | None = None,
        check: Callable[[SimpleNamespace], None] | None = None,
        written: Sequence[str] = ("out", "query_out", "lse"),
        in_place: Sequence[tuple[str, str]] = (),
        single: Sequence[str] = (),
        handles: Mapping[str, Sequence[str]] | None = None,
        unread: Sequence[str] = (),
    ) -> None:
        op_class = op_class_of(name)
        self.name, self.title = name, "kv.ops." + name.removeprefix("kv.")
        self._static, self._check = dict(static or {}), check
        self._contents: tuple[Rule, ...] = getattr(op_class, "contents", ())
        self._buffers: Mapping[str, Buffer] = getattr(op_class, "buffers", {})
        self._fields = [f for f in op_class.FIELDS if f.kind == "operand"]
        self.operands = tuple(f.name for f in self._fields)
        caches = ("source", "destination", "cache") if name == "kv.convert" else ("cache",)
        collections = ("collection", "index_collection", "source_pool", "destination_pool")
        kinds = {**dict.fromkeys(caches, ("cache",)), **dict.fromkeys(collections, ("collection",))}
        kinds |= {**dict.fromkeys(("keys", "values"), ("operand",)), **(handles or {})}
        self._handles = {n: kinds[n] for n in self.operands if n in kinds}
        self._written, self._single = set(written), frozenset(single)
        self._in_place, self._unread = frozenset(in_place), frozenset(unread)
        if effects.writes_cache(op_class):
            self._written |= {n for n in self._handles if not n.startswith("source")}
        self._known: dict[Any, _Known] = {}
        self._checks_of: weakref.WeakKeyDictionary[Any, tuple[contents.Check, ...]] = weakref.WeakKeyDictionary()
        self._quick: Any = None  # the native launch cache
        _operations.add(self)

    def forget(self, gone: OperationProgram) -> None:
        """Drop an evicted program from the known signatures."""
        for signature, found in list(self._known.items()):
            if found.program is gone:
                self._known.pop(signature, None)

    def try_cached_launch(
        self, given: Sequence[Any], stream: Any, attributes: Any = (), entries: Any = None
    ) -> bytes | bool | None:
        """Launch a call with a known signature by the native launch cache.

        Parameters
        ----------
        given : sequence
            Everything that the call depends on besides ``attributes`` and ``entries``: operands, or the arguments from
            which they are made.

        Returns
        -------
        bytes, bool or None
            True: launched. Bytes: the key of a call that is not cached. None: the native part does not support the
            call.
        """
        calls = self._quick
        if calls is None or (recorder is not None and recorder.recording()):
            return None
        if stream is not None and stream.__class__ is not int:
            stream = streams.handle_of(stream)
        return calls.launch(given, attributes, entries, settings.specialisation_key(), stream)

    def __call__(
        self,
        operands: Sequence[Any],
        attributes: tuple[tuple[str, Any], ...] = (),
        schedule: Schedule = None,
        stream: Any = None,
        now: bool = False,
        missed: Missed | None = None,
    ) -> None:
        """Run on operands in the order of ``self.operands``; absent ones are None, or omitted at the end.

        ``now``: run even while recording. ``missed``: a call that :meth:`try_cached_launch` did not find.
        """
        if recorder is not None and not now and recorder.recording():
            recorder.record(self, operands, attributes, schedule, stream)
            return
        entries = None if schedule is None else _entries(schedule, self.title)
        if missed is None:
            operands = operands if operands.__class__ is tuple else tuple(operands)
            key = None if self._quick is None else self.try_cached_launch(operands, stream, attributes, entries)
            if key is True:
                return
            missed = Missed(self.operands, operands, key, attributes, entries) if key else None
        signature, values = signatures.signed(operands, (attributes, entries, settings.specialisation_key()))
        try:
            found = self._known.get(signature)
        except TypeError:  # an unhashable entry of the schedule: the check below names it
            found = None
        if found is None:
            converted = recorder and recorder.converted(self, operands)
            if converted:
                operands, after = converted
                self(operands, attributes, schedule, stream, now=True)
                after()
                return
            found = self._specialise(signature, operands, attributes, entries)
        if found.ordinal == HOST:
            found.check(values)
        launched = found.program.run(found, values, operands, stream)
        if missed is not None and launched is not None and not found.described:
            packed, handle, on = launched
            places = quick.places_of(self.operands, operands, missed.names, missed.given)
            context = quick.context_of(on.facts, handle)
            quick.remember(self._quick, *missed[2:], packed.bounds, places, context, on.lock, packed.meetings)

    def _specialise(self, signature: tuple[Any, ...], operands: Sequence[Any], attributes: Any, entries: Any) -> _Known:
        """Check a new signature, get its program, and cache its buffers' fields other than the address."""
        refuse_tracing(self.title)
        schedule, _ = entries or ((), ())
        emulation = settings.emulation()
        what, given = self.specialisation(operands, attributes, schedule, emulation and emulation.target)
        found = program(what) if emulation is None else emulation.program(what)
        assert not any(a.table_alignment for a in found.args), "a signature does not hold the alignment of tables"
        values, ordinal = found.bind(given)
        if self._quick is None and ordinal >= 0 and emulation is None:
            self._quick = quick.table()
        buffers_ = [i for i, (_, type_) in enumerate(what.operands) if isinstance(type_, BufferType)]
        described = {step_arg[1] for step in found.artifact.steps for step_arg in step.args if _describes(step_arg)}
        if len(self._known) >= _REMEMBER:
            self._known.clear()
        tails = [(i, values[i][1:]) for i in buffers_]
        others = [i for i in range(len(values)) if i not in buffers_ or i in described]
        rest = operator.itemgetter(*others) if others else _nothing
        made = self._known[signature] = _Known(
            found, ordinal, tails, self._apart(what, given), self._checks(what, found), rest, bool(described), {}
        )
        return made

    def _apart(self, what: Specialisation, given: Sequence[Any]) -> overlap.Apart | None:
        """The per-call check that outputs do not overlap inputs; None if that is impossible."""
        operands = [
            (name, (type_.kind, type_.spec) if isinstance(type_, HandleType) else operand)
            for (name, type_), operand in zip(what.operands, given, strict=True)
            if not isinstance(type_, ScalarType)
        ]
        places = [i for i, (_, type_) in enumerate(what.operands) if not isinstance(type_, ScalarType)]
        made = overlap.Apart(self.title, operands, places, self._written, self._in_place, self._unread)
        return made if made else None

    def _checks(self, what: Specialisation, program: Any) -> tuple[contents.Check, ...]:
        """The other checks of every call of a program."""
        if what.target != "host":  # tables on a GPU are not read
            return ()
        found = self._checks_of.get(program)
        if found is None:
            found = self._checks_of[program] = self._made_checks(what)
        return found

    def _made_checks(self, what: Specialisation) -> tuple[contents.Check, ...]:
        handles = {n: (t.kind, t.spec) for n, t in what.operands if isinstance(t, HandleType)}
        return tuple(contents.checks_of(self.title, self._contents, handles, [name for name, _ in what.operands]))

    def specialisation(
        self,
        operands: Sequence[Any],
        attributes: tuple[tuple[str, Any], ...] = (),
        schedule: Any = (),
        target: str | None = None,
    ) -> tuple[Specialisation, list[Any]]:
        """Check a call; its program's specialisation, and the operands that are present.

        Parameters
        ----------
        target : str, optional
            Default: the target of the operands' device.
        """
        if len(operands) > len(self._fields):
            raise TypeError(
                f"{self.title} takes {len(self._fields)} operands ({', '.join(self.operands)}), got {len(operands)}"
            )
        operands = (*operands, *(None,) * (len(self._fields) - len(operands)))
        entries = dict(schedule)
        if (renamed := schedules.current(self.name, entries)) is not entries:
            entries, schedule = renamed, tuple(sorted(renamed.items()))
        seen = SimpleNamespace(title=self.title, buffers=self._buffers, attributes=dict(attributes), schedule=entries)
        operand_types, given = [], []
        ordinal, where, alignment = None, "", WIDEST
        for field, operand in zip(self._fields, operands, strict=True):
            name, about = field.name, f"{self.title}: {field.name}"
            if operand is None:
                if not field.optional:
                    raise TypeError(f"{about} must be given, got None")
                setattr(seen, name, None)
                continue
            scalar = {I32: dtypes.i32, F32: dtypes.f32}.get(field.constraint)
            if scalar is not None:
                setattr(seen, name, operand)
                operand_types.append((name, ScalarType(scalar)))
                given.append(operand)
                continue
            type_, view, place = self._describe(about, name, operand)
            if isinstance(type_, BufferType) and name in self._static and name not in self._single:
                alignment = min(alignment, alignment_of(view))
            here = ordinal_of(place, about)
            if ordinal is not None and here != ordinal:
                raise ValueError(
                    f"{self.title}: operands must be on one device: {where} is on {_place(ordinal)}, "
                    f"{name} on {_place(here)}"
                )
            ordinal, where = here, name
            setattr(seen, name, view)
            operand_types.append((name, type_))
            # Kernels have signless integers; checks see the caller's dtypes.
            if isinstance(type_, BufferType):
                view = view._replace(dtype=type_.dtype)
            given.append(operand if view is operand else view)
        if target is None:
            target = "host" if ordinal in (None, HOST) else of_capability(*device.device(ordinal).capability).name
        problem = schedules.why_unsupported(self.name, seen.schedule, by_name(target)) if schedule else None
        if problem is not None and by_name(target).is_host and schedules.is_of_gpus(self.name, seen.schedule):
            schedule, seen.schedule, problem = (), {}, None  # ignored on the host, so one script runs on both
        if problem is not None:
            raise ValueError(f"{self.title}: the schedule's {problem}")
        if self._check is not None:
            self._check(seen)
        return Specialisation(
            self.name, tuple(operand_types), tuple(attributes), tuple(schedule), target, alignment
        ), given

    def _describe(self, about: str, name: str, operand: Any) -> tuple[OperandType, Any, Any]:
        """An operand's type, its form for the check, and its device."""
        kinds = self._handles.get(name)
        if kinds is not None and not (name in self._static and isinstance(operand, buffers.BufferView)):
            spec = getattr(operand, "spec", None)
            kind = next((kind for kind in kinds if isinstance(spec, HANDLES[kind][1])), None)
            if kind is None:
                wanted = " or ".join([f"a{'n' * (kind == 'operand')} {HANDLES[kind][2]}" for kind in kinds])
                raise TypeError(f"{about} must be {wanted}, got {type(operand).__name__}")
            if operand.readonly and name in self._written:
                raise ValueError(f"{about} is written, but its blocks are read-only")
            cache = spec if isinstance(spec, CacheSpec) else spec.cache  # type: ignore[union-attr]
            return HandleType(kind, cache), operand, operand.device
        view = buffers.view(operand, name=about)
        if view.rank < 1:
            raise ValueError(f"{about} must have at least one dimension, got a scalar")
        if view.shape[-1] > 1 and view.strides[-1] != 1 and view.size > 0:
            raise ValueError(
                f"{about} must be contiguous in its last dimension, got strides {view.strides} (elements); "
                "use .contiguous()"
            )
        first = self._static.get(name)
        dtype = dtypes.i32 if view.dtype is dtypes.u32 else view.dtype  # same bits
        if first is None:
            if dtype is not dtypes.i32:
                raise TypeError(f"{about} must be int32 or uint32, got {dtype.name}")
            first = view.rank
        dtype = dtypes.by_name(dtype.name.replace("u", "i")) if dtype.kind == "u" else dtype  # signless in kernels
        if view.readonly and name in self._written:
            raise ValueError(f"{about} is written, but the buffer given is read-only")
        if name in self._written and overlap.overlaps_itself(view):
            raise ValueError(
                f"{about} is written, but some of its elements share memory: got shape "
                f"{list(view.shape)} with strides {list(view.strides)} (elements); give it memory of its own"
            )
        if view.data % dtype.itemsize:
            raise ValueError(f"{about} must start at a multiple of {dtype.itemsize} bytes, got address {view.data:#x}")
        return BufferType(dtype, tuple(None if i < first else d for i, d in enumerate(view.shape))), view, view.device

    def compile(self, operands: Sequence[Any], attributes: tuple[tuple[str, Any], ...] = (), schedule: Schedule = None,
                target: str | None = None) -> Kernel:  # fmt: skip
        """Compile for operands without running, for example to inspect the code, possibly for a target not present."""
        return compile_operation(self.specialised(operands, attributes, schedule, target))

    def specialised(
        self, operands: Sequence[Any], attributes: tuple[tuple[str, Any], ...], schedule: Schedule, target: str | None
    ) -> Specialisation:
        """The specialisation of a call's program; arguments as in a call."""
        ordered = () if schedule is None else _entries(schedule, self.title)[0]
        return self.specialisation(operands, attributes, ordered, target)[0]


def refuse_tracing(title: str) -> None:
    """Refuse operands of torch.jit.trace, whose extents are tensors: the trace would lack the operation."""
    state = getattr(getattr(sys.modules.get("torch"), "_C", None), "_get_tracing_state", None)
    if state is not None and state() is not None:
        raise NotImplementedError(
            f"{title}: torch.jit.trace does not record operations of kvarn: use torch.compile or torch.export"
        )


class FixedSchedule(dict[str, Any]):
    """An immutable schedule: its part of a signature is computed once."""

    __slots__ = ("entries",)

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.entries = _entries(dict(entries), "schedule")


def _entries(schedule: Any, title: str) -> tuple[tuple[tuple[str, Any], ...], tuple[type, ...]]:
    """A schedule's entries in order, and the types of its values: True and 1 are equal but differ in type."""
    if schedule.__class__ is FixedSchedule:
        return schedule.entries
    try:
        return tuple(sorted(schedule.items())), tuple(map(type, schedule.values()))
    except (AttributeError, TypeError):
        names = [name for name in schedule if not isinstance(name, str)] if isinstance(schedule, Mapping) else []
        wrong = f"named by strings, got {names[0]!r}" if names else f"given as a mapping, got {schedule!r}"
        raise TypeError(f"{title}: the schedule's entries must be {wrong}") from None


def _describes(step_arg: Any) -> bool:
    """Whether an argument of a step is a TMA descriptor of a caller's buffer, which contains the buffer's address."""
    of_rows = isinstance(step_arg, (tuple, list)) and len(step_arg) == 5 and step_arg[0] == "tensor_map"
    return of_rows and not isinstance(step_arg[1], str)  # a workspace is not a caller's buffer


def _nothing(values: Sequence[Any]) -> None:
    return None


def _place(ordinal: int) -> str:
    return "the CPU" if ordinal == HOST else f"cuda:{ordinal}"


def alignment_of(view: buffers.BufferView) -> int:
    """Alignment of every row of a buffer, in bytes, at most 16."""
    bits = view.data | WIDEST
    for extent, stride in zip(view.shape[:-1], view.strides[:-1], strict=True):
        if extent > 1:
            bits |= stride * view.dtype.itemsize
    return lowbit(bits)
