# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Launching a compiled kernel on Python arguments.

    launcher = Launcher(artifact)
    launcher((grid, heads), 128, cache, 0.5)              # checks, packs and launches on the current stream
    prepared = launcher.prepare((grid, heads), 128, cache, 0.5)
    prepared(stream)                                      # the same values again, in a few microseconds

Everything is checked before a launch. A launch copies, allocates and waits for nothing, so it can be captured into a
CUDA graph. A kernel's code is loaded at the first launch or prepare on a device.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from kvarn.artifact import Arg, Artifact

from . import device as devices, quick, signatures, streams
from .binding import HOST, Binder, make_binder
from .copying import NoCopies
from .overlap import Meeting, ReadOnly, meet
from .packing import Address, Bound, Call, HostExecutor, Place, PreparedCall, PreparedHostCall

_REMEMBER = 256  # packed calls cached per launcher


class Binders:
    """The binders of one compiled function: from Python objects to field values and the device."""

    def __init__(self, name: str, args: Sequence[Arg], target: str) -> None:
        self.name, self.args, self._host = name, tuple(args), target == "host"
        self._binders: tuple[Binder, ...] = tuple(make_binder(a, name) for a in args)

    def bind(self, args: Sequence[Any]) -> tuple[list[tuple[Any, ...]], int]:
        """The field values of each argument, and their common device.

        Raises
        ------
        TypeError, ValueError
            If the arguments are not what the function was compiled for, or are on different devices.
        """
        if len(args) != len(self._binders):
            expected = ", ".join(a.name for a in self.args)
            raise TypeError(f"kernel {self.name!r} takes {len(self.args)} arguments ({expected}), got {len(args)}")
        values, ordinal = [], None
        for binder, obj in zip(self._binders, args):  # noqa: B905 (the lengths are checked, and strict costs time)
            bound, where = binder(obj)
            if where is not None and where != ordinal:
                if ordinal is not None:
                    raise self._elsewhere(args)
                ordinal = where
            values.append(bound)
        if ordinal is None:  # scalars only
            ordinal = HOST if self._host else devices.current_ordinal()
        return values, ordinal

    def _elsewhere(self, args: Sequence[Any]) -> ValueError:
        places = []
        for arg, binder, obj in zip(self.args, self._binders, args, strict=True):
            where = binder(obj)[1]
            if where is not None:
                places.append(f"{arg.name} on {'the host' if where == HOST else f'cuda:{where}'}")
        return ValueError(f"arguments of kernel {self.name!r} must be on one device, got {', '.join(places)}")


class _Known(NamedTuple):
    """Calls that differ in addresses only: their device, and a packed launch per stream."""

    ordinal: int
    bounds: dict[int, Bound]
    meetings: tuple[Meeting, ...]

    def launch(self, args: Sequence[Any], firsts: Sequence[Any], stream: Any) -> Bound | None:
        """Launch with these first values; the packed launch, or None if none is available."""
        if stream is None:
            stream = streams.current_stream(args, self.ordinal)
        elif stream.__class__ is not int:
            stream = streams.handle_of(stream)
        bound = self.bounds.pop(stream, None)  # removed while in use; a concurrent thread packs its own
        if bound is None:
            return None
        if self.meetings and meet(self.meetings, firsts):  # the full path checks whether they overlap
            self.bounds[stream] = bound
            return None
        launch, arguments, words, moves, after_failure, _ = bound
        for word, i in moves:
            words[word] = firsts[i]
        code = launch(*arguments)
        if code:
            after_failure(code)
        self.bounds[stream] = bound
        return bound


class PreparedLaunch(NoCopies):
    """A launch with bound arguments: call it with a stream, any number of times.

    It keeps its arguments alive. Their values are fixed: the contents of a buffer may change, its address and shape may
    not.
    """

    __slots__ = ("_args", "_call", "_launch", "_ordinal", "_prepared", "_quick")
    copied_by = "prepare a launch on copies of its arguments"

    def __init__(
        self, call: Call, prepared: PreparedCall | PreparedHostCall, args: tuple[Any, ...], ordinal: int
    ) -> None:
        self._call, self._prepared, self._args, self._ordinal = call, prepared, args, ordinal
        self._quick, self._launch = prepared.parts

    def __call__(self, stream: Any = None) -> None:
        """Launch on a stream; by default the current stream of the arguments' framework."""
        if stream.__class__ is not int:
            if stream is None:
                stream = streams.current_stream(self._args, self._ordinal) if self._ordinal >= 0 else 0
            else:
                stream = streams.handle_of(stream)
        arguments = self._quick.get(stream)
        if arguments is not None:
            code = self._launch(*arguments)
            if code:
                self._prepared.after_failure(code, arguments, stream)
            return
        before = self._call.enter(stream)
        try:
            self._prepared(stream)
        finally:
            if before is not None:
                devices.unbind(before)


class Launcher:
    """A kernel artifact that takes Python arguments.

    Parameters
    ----------
    artifact : Artifact
        With one entry and no steps.
    executor : HostExecutor, optional
        Runs it on the CPU if its target is ``host``; by default the JIT.
    """

    def __init__(self, artifact: Artifact, *, executor: HostExecutor | None = None) -> None:
        if artifact.is_program:
            raise ValueError(f"artifact {artifact.name!r} is a program, which computes its grids: use Program")
        self.artifact, self.entry, self._executor = artifact, artifact.entry(), executor
        self._binders = Binders(self.entry.name, self.entry.args, artifact.target)
        self._read_only = ReadOnly(self.entry.name, self.entry.args)
        self._apart = bool(self._read_only)
        self._shared = self.entry.shared_bytes
        self._calls: dict[int, Call] = {}
        # Cached launches differ in buffer addresses only; a signature contains the low four bits of each.
        self._cacheable = artifact.target != "host" and all(a.alignment <= 16 for a in self.entry.args)
        others = [i for i, a in enumerate(self.entry.args) if a.kind != "buffer"]
        self._rest = operator.itemgetter(*others) if others else None
        self._known: dict[Any, _Known] = {}
        self._quick: Any = None  # the native launch cache
        self._seen: set[Any] = set()  # signatures seen once, which are not worth caching

    def __call__(self, grid: Any, block: Any, *args: Any, stream: Any = None) -> None:
        """Check, bind and launch.

        Parameters
        ----------
        grid, block : int or tuple of int
            Blocks of the grid and threads of a block; ``block`` may be None if the kernel was compiled for one. A grid
            with an extent of 0 launches nothing.
        *args
            One object per argument of the kernel.
        stream : optional
            An int, an object with ``__cuda_stream__``, a torch or CuPy stream; by default the current stream of the
            arguments' framework.

        Raises
        ------
        TypeError, ValueError
            If an argument, the grid or the block does not match the kernel; nothing was launched.
        DriverError
            If the driver refuses the launch.
        """
        calls, missed = self._quick, None
        if calls is not None:
            if stream is not None and stream.__class__ is not int:
                stream = streams.handle_of(stream)
            missed = calls.launch(args, grid, block, 0, stream)
            if missed is True:
                return
        signature, firsts = self._sign(grid, block, args) if self._cacheable else (None, ())
        known = self._known.get(signature)
        if known is not None and (bound := known.launch(args, firsts, stream)) is not None:
            if missed is not None:
                places = range(len(firsts))
                quick.remember(calls, missed, grid, block, (bound,), places, meetings=known.meetings)
            return
        values, ordinal = self._bind(args)
        call = self._calls.get(ordinal) or self._place(ordinal)
        shape = call.shape(grid, block, self._shared)
        if stream is None:
            handle = streams.current_stream(args, ordinal) if ordinal >= 0 else 0
        else:
            handle = stream if stream.__class__ is int else streams.handle_of(stream)
        flat = list(chain.from_iterable(values))
        if signature is not None:
            self._remember(signature, call, ordinal, shape, values, handle)
        before = call.enter(handle) if handle <= streams.LAST_SPECIAL else None
        if before is None:
            call.launch(shape, flat, handle)
            return
        try:
            call.launch(shape, flat, handle)
        finally:
            devices.unbind(before)

    def _bind(self, args: Sequence[Any]) -> tuple[list[tuple[Any, ...]], int]:
        """Field values of each argument, and their device, after all checks."""
        values, ordinal = self._binders.bind(args)
        if self._apart:
            self._read_only(values)
        return values, ordinal

    def _sign(self, grid: Any, block: Any, args: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        """The signature of a call, which excludes buffer addresses, or None; and each argument's first value."""
        key, firsts = signatures.signed(args, (grid, block))
        if len(firsts) != len(self.entry.args) or grid.__class__ is list or block.__class__ is list:
            return None, firsts
        return (key, self._rest and self._rest(firsts)), firsts

    def _remember(
        self, signature: Any, call: Any, ordinal: int, shape: Any, values: Sequence[tuple[Any, ...]], handle: int
    ) -> None:
        """Pack a call with a known signature, except for the addresses of its buffers."""
        if signature not in self._seen:
            if len(self._seen) >= _REMEMBER:
                self._seen.clear()
            self._seen.add(signature)
            return
        if len(self._known) >= _REMEMBER:
            self._known.clear()
        marked = []
        for i, (arg, value) in enumerate(zip(self.entry.args, values, strict=True)):
            marked += value if arg.kind != "buffer" else (Address.of(value[0], i), *value[1:])
        rule = self._read_only.of(values) if self._apart else None
        meetings = () if rule is None else tuple(rule.meetings(self._read_only.flat(values)))
        known = self._known.setdefault(signature, _Known(ordinal, {}, meetings))
        bound = call.bound(shape, marked, handle)
        if bound is not None and (handle > streams.LAST_SPECIAL or call.device.alone):
            known.bounds[handle] = bound

    def prepare(self, grid: Any, block: Any, *args: Any) -> PreparedLaunch:
        """Check and bind once, for many launches. Parameters as in a call."""
        values, ordinal = self._bind(args)
        call = self._calls.get(ordinal) or self._place(ordinal)
        shape = call.shape(grid, block, self._shared)
        return PreparedLaunch(call, call.prepare(shape, list(chain.from_iterable(values))), args, ordinal)

    def load(self, ordinal: int | None = None) -> Call:
        """Load the code onto a device before a launch: the current one by default; for host code, the host."""
        if ordinal is None:
            ordinal = HOST if self.artifact.target == "host" else devices.current_ordinal()
        return self._calls.get(ordinal) or self._place(ordinal)

    def _place(self, ordinal: int) -> Call:
        call = Place(self.artifact, ordinal, self._executor).call(self.entry)
        if self._cacheable and self._quick is None:
            self._quick = quick.table()
        return self._calls.setdefault(ordinal, call)
