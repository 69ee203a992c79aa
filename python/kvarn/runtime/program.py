# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Programs: artifacts with several launches and scratch memory, such as the built-in cache operations.

    program = Program(artifact)
    program(collection, layer, key, value, offsets)      # every step, in order, on the current stream

Grids and sizes are expressions of the arguments' shapes, so nothing is read back from the device, and a captured graph
replays the same launches. Scratch memory belongs to one program, device and stream. It grows on demand, also inside a
stream capture, and never moves during the program's life, since a CUDA graph may contain its address. A call for which
it is large enough allocates nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from kvarn.artifact import Arg, Artifact
from kvarn.artifact.bundle import BundleError, load as load_bundle
from kvarn.forks import reinit_after_fork

from . import device as devices, driver, streams
from .binding import HOST
from .expressions import compile_expressions, compile_step
from .launch import Binders, Launcher
from .packing import Call, HostExecutor, Place, Shape

# Growth factor, so that slowly growing batches do not allocate each time.
_GROWTH = 1.5
StreamLaunch = Callable[[int], None]  # launches on a stream
_ALIGNMENT = 256  # alignment of cuMemAlloc, and of scratch memory on the host


class Scratch:
    """The workspaces of a program on one device and stream."""

    def __init__(self, ordinal: int, zeroed: Sequence[bool]) -> None:
        self._ordinal, self._zeroed = ordinal, tuple(zeroed)
        self._capacity = [0] * len(zeroed)
        self._address = [0] * len(zeroed)
        self._blocks: list[Any] = []  # all allocations: a graph may contain the address of a replaced one
        if ordinal != HOST:
            # Freeing waits for the device, as it must while kernels run. At exit the driver frees memory itself.
            weakref.finalize(self, _free, self._blocks, ordinal).atexit = False

    def reserve(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Address and size in bytes of each workspace, of at least the given sizes."""
        for i, size in enumerate(sizes):
            if size > self._capacity[i]:
                self._grow(i, size)
        return list(zip(self._address, sizes, strict=True))

    def _grow(self, i: int, size: int) -> None:
        capacity = max(size, int(self._capacity[i] * _GROWTH), _ALIGNMENT)
        if self._ordinal == HOST:
            block = (ctypes.c_char * (capacity + _ALIGNMENT))()  # ctypes memory is zeroed
            address = ctypes.addressof(block)
            address += -address % _ALIGNMENT
        else:
            address = block = _allocate(self._ordinal, capacity, self._zeroed[i])
        self._blocks.append(block)
        self._address[i], self._capacity[i] = address, capacity


def _allocate(ordinal: int, size: int, zeroed: bool) -> int:
    """Device memory, also during a stream capture of this thread; the allocation is not part of the graph."""
    bindings = driver.require()
    on = devices.device(ordinal)
    relaxed = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with on.active():
        before = driver.call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            address = driver.call("cuMemAlloc", size)
            if zeroed:
                # On a stream of its own: the caller's stream may be capturing, and would not execute it.
                stream = driver.call("cuStreamCreate", bindings.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
                driver.call("cuMemsetD8Async", address, 0, size, stream)
                driver.call("cuStreamSynchronize", stream)
                driver.call("cuStreamDestroy", stream)
        finally:
            driver.call("cuThreadExchangeStreamCaptureMode", before)
    return int(address)


def _free(blocks: list[int], ordinal: int) -> None:
    with contextlib.suppress(driver.DriverError, RuntimeError), devices.device(ordinal).active():
        for address in blocks:
            driver.call("cuMemFree", address)
    blocks.clear()


class _OnDevice:
    """A program's steps on one device."""

    def __init__(self, artifact: Artifact, ordinal: int, executor: HostExecutor | None) -> None:
        place = Place(artifact, ordinal, executor)
        self.calls: tuple[Call, ...] = tuple(place.call(artifact.entry(s.entry), s.attributes) for s in artifact.steps)
        self.ordinal, self.facts = ordinal, self.calls[0].facts
        self._zeroed = [w.zeroed for w in artifact.workspaces]
        self._scratch: dict[int, Scratch] = {}
        # The steps of two calls on one stream share scratch memory, so they must not interleave.
        self.lock = reinit_after_fork(threading.Lock())

    def scratch(self, stream: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
        found = self._scratch.get(stream)
        if found is None:
            found = self._scratch[stream] = Scratch(self.ordinal, self._zeroed)
        return found.reserve(sizes)


class PreparedProgram:
    """A program with bound arguments: call it with a stream, any number of times. It keeps its arguments alive."""

    __slots__ = ("_args", "_by_stream", "_make", "_on")

    def __init__(self, on: _OnDevice, make: Callable[[int], list[StreamLaunch]], args: tuple[Any, ...]) -> None:
        self._on, self._make, self._args = on, make, args
        self._by_stream: dict[int, list[StreamLaunch]] = {}

    def __call__(self, stream: Any = None) -> None:
        """Run every step on a stream; by default the current stream of the arguments' framework."""
        on = self._on
        handle = _handle(stream, self._args, on.ordinal)
        fires = self._by_stream.get(handle)
        before = on.calls[0].enter(handle) if handle <= streams.LAST_SPECIAL else None
        try:
            with on.lock:
                if fires is None:
                    fires = self._by_stream[handle] = self._make(handle)
                for fire in fires:
                    fire(handle)
        finally:
            if before is not None:
                devices.unbind(before)


class Program:
    """A program artifact that takes Python arguments.

    Parameters
    ----------
    artifact : Artifact
        With steps.
    executor : HostExecutor, optional
        Runs it on the CPU if its target is ``host``; by default the JIT.

    Notes
    -----
    Scratch memory is freed with the program: keep a program as long as the graphs captured from it. Graphs captured on
    one stream share it, so they must not be replayed concurrently.
    """

    def __init__(self, artifact: Artifact, *, executor: HostExecutor | None = None) -> None:
        if not artifact.is_program:
            raise ValueError(f"artifact {artifact.name!r} is a kernel, which has no steps: use Launcher")
        self.artifact, self._executor = artifact, executor
        self.args = _strictest(artifact)
        self._binders = Binders(artifact.name, self.args, artifact.target)
        self._steps = tuple(compile_step(artifact, s) for s in artifact.steps)
        self._needs_scratch = bool(artifact.workspaces)
        self._sizes = compile_expressions([w.bytes for w in artifact.workspaces], artifact.args)
        self._on: dict[int, _OnDevice] = {}

    def __call__(self, *args: Any, stream: Any = None) -> None:
        """Check, bind and run every step in order.

        Parameters
        ----------
        *args
            One object per argument of the program.
        stream : optional
            As in `Launcher`.

        Raises
        ------
        TypeError, ValueError
            If an argument does not match the program; nothing was launched.
        DriverError
            If the driver refuses a launch.
        """
        values, ordinal = self._binders.bind(args)
        on = self._on.get(ordinal) or self._load(ordinal)
        handle = _handle(stream, args, ordinal)
        before = on.calls[0].enter(handle) if handle <= streams.LAST_SPECIAL else None
        try:
            with on.lock:
                # All steps are checked before the first launch, so that a program runs completely or not at all.
                for call, shape, flat in self._plan(on, values, handle):
                    call.launch(shape, flat, handle)
        finally:
            if before is not None:
                devices.unbind(before)

    def prepare(self, *args: Any) -> PreparedProgram:
        """Check and bind once, for many runs. Scratch memory is reserved at the first run on a stream."""
        values, ordinal = self._binders.bind(args)
        on = self._on.get(ordinal) or self._load(ordinal)

        def make(handle: int) -> list[StreamLaunch]:
            return [call.prepare(shape, flat) for call, shape, flat in self._plan(on, values, handle)]

        return PreparedProgram(on, make, args)

    def _plan(
        self, on: _OnDevice, values: list[tuple[Any, ...]], handle: int
    ) -> list[tuple[Call, Shape, tuple[Any, ...]]]:
        plan, facts = [], on.facts
        try:
            scratch = on.scratch(handle, self._sizes(values, facts)) if self._needs_scratch else ()
            for call, step in zip(on.calls, self._steps):  # noqa: B905 (equal lengths)
                shape, flat = step(values, facts, scratch)
                plan.append((call, call.checked(shape), flat))
        except ZeroDivisionError:
            raise ValueError(
                f"program {self.artifact.name!r} divides by zero for these arguments: {_sizes_of(self.args, values)}"
            ) from None
        return plan

    def load(self, ordinal: int | None = None) -> None:
        """Load the code onto a device before a run: the current one by default; for host code, the host."""
        if ordinal is None:
            ordinal = HOST if self.artifact.target == "host" else devices.current_ordinal()
        self._on.get(ordinal) or self._load(ordinal)

    def _load(self, ordinal: int) -> _OnDevice:
        return self._on.setdefault(ordinal, _OnDevice(self.artifact, ordinal, self._executor))


def _handle(stream: Any, args: Sequence[Any], ordinal: int) -> int:
    if stream is None:
        return streams.current_stream(args, ordinal) if ordinal >= 0 else 0
    return stream if stream.__class__ is int else streams.handle_of(stream)


def _strictest(artifact: Artifact) -> tuple[Arg, ...]:
    """The program's arguments with the requirements of all entries that take them: alignment, and write access."""
    args = list(artifact.args)
    for step in artifact.steps:
        for target, item in zip(artifact.entry(step.entry).args, step.args, strict=True):
            if isinstance(item, tuple) and len(item) > 1 and isinstance(item[1], int):
                if item[0] in ("arg", "tensor_map") and 0 <= item[1] < len(args):
                    a = args[item[1]]
                    args[item[1]] = dataclasses.replace(
                        a,
                        alignment=max(a.alignment, target.alignment, 16 * (item[0] == "tensor_map")),
                        written=a.written or target.written,
                        table_alignment=max(a.table_alignment, target.table_alignment),
                    )
    return tuple(args)


def _sizes_of(args: Sequence[Arg], values: Sequence[Sequence[Any]]) -> str:
    return ", ".join(
        f"{arg.name}.{f.name}={v}"
        for arg, fields in zip(args, values, strict=True)
        for f, v in zip(arg.fields, fields, strict=True)
        if f.type not in ("ptr", "tensormap")
    )


def runner(artifact: Artifact, *, executor: HostExecutor | None = None) -> Any:
    """A `Launcher` for a kernel, a `Program` for a program."""
    if not artifact.is_program:
        return Launcher(artifact, executor=executor)
    return Program(artifact, executor=executor)


def load(path: str | os.PathLike[str], target: str | None = None) -> Any:
    """Read a bundle and make the launcher or program of its variant for ``target``, by default for the current device.

    Without a usable GPU the host variant is used; if there is none, the error says why no GPU is usable.
    """
    variants = load_bundle(path)
    if target is not None:
        variants = tuple(a for a in variants if a.target == target)
        if not variants:
            raise ValueError(f"{os.fspath(path)} has no variant for target {target!r}")
    chosen = variants[0] if len(variants) == 1 or target is not None else _for_this_machine(variants)
    try:
        return runner(chosen)
    except (TypeError, ValueError) as e:  # an expression or argument that the runtime does not support
        raise BundleError(f"{os.fspath(path)} is not a valid kvarn bundle: {e}") from e


def _for_this_machine(variants: Sequence[Artifact]) -> Artifact:
    found = driver.status()
    if found.usable:
        return devices.select(variants, devices.device(devices.current_ordinal()).capability)
    try:
        return devices.select(variants, None)
    except ValueError as e:
        raise ValueError(f"{e}; {found.reason}") from None
