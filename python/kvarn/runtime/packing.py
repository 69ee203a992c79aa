# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A kernel launch as bytes: the launch configuration, the parameters, and the pointers to them.

A *call* is an entry of an artifact on one device: `DeviceCall` for a GPU, `HostCall` for the CPU. It checks a grid and
a block, launches with given values (``launch``), or binds the values for many launches (``prepare``). One ``struct``
packs configuration and parameters together, so a launch costs one Python call for packing and one for launching.
Packets come from a pool: threads and finalizers never share one.
"""

from __future__ import annotations

import ctypes
import operator
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kvarn.artifact import PARAM_BYTES, Artifact, Entry

from . import device as devices, driver, ownership, streams, timeline
from .binding import bits_of

Attributes = Mapping[str, Any] | None
Dim3 = tuple[int, int, int]
# grid x y z, block x y z, bytes of dynamic shared memory
Shape = tuple[int, int, int, int, int, int, int]

# CUlaunchConfig: seven unsigned ints (a Shape), padding, stream, attributes, number of attributes, padding.
_CONFIG = "7I4xQQI4x"
_CONFIG_BYTES = struct.calcsize("<" + _CONFIG)
_FORMATS = {
    "ptr": "Q", "i64": "q", "i32": "i", "i16": "h", "i8": "b", "i1": "B", "f64": "d", "f32": "f", "f16": "e",
    "bf16": "H", "f8e4m3": "B", "f8e5m2": "B", "f8e8m0": "B", "tensormap": "128s",
}  # fmt: skip
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_HOST_BLOCKS = 2**24  # largest grid, and block, on the host: more would run for minutes without a way to interrupt it
_REMEMBER = 1024  # checked shapes cached per call


class Packer:
    """Packs the parameters of an entry, after a header.

    Parameters
    ----------
    entry : Entry
    head : str
        ``struct`` format of the header; its items are the first values.
    """

    def __init__(self, entry: Entry, head: str) -> None:
        self.entry = entry
        offset = struct.calcsize("<" + head)
        text = "<" + head
        offsets: list[int] = []
        self._single: list[struct.Struct] = []
        for p in entry.params:
            size = PARAM_BYTES[p.type]
            alignment = min(size, 64)
            padding = -offset % alignment
            dtype = entry.args[p.arg].dtype if p.field == "value" else None
            character = _FORMATS[p.type]
            if dtype is not None and dtype.kind == "u":
                character = character.upper()
            text += f"{padding}x{character}" if padding else character
            self._single.append(struct.Struct("<" + character))
            offsets.append(offset + padding)
            offset += padding + size
        self.struct, self.offsets = struct.Struct(text), offsets
        # Fields of all arguments come in layout order; the compiled function may take a subset, in another order.
        starts, total = [], 0
        for arg in entry.args:
            starts.append({f.name: total + i for i, f in enumerate(arg.fields)})
            total += len(arg.fields)
        order = [starts[p.arg][p.field] for p in entry.params]
        self._pick = None if order == list(range(total)) else order
        self._convert = [
            (i, f)
            for i, p in enumerate(entry.params)
            if p.field == "value" and (dtype := entry.args[p.arg].dtype) and (f := bits_of(dtype))
        ]
        self.plain = self._pick is None and not self._convert

    def select(self, values: Sequence[Any]) -> Sequence[Any]:
        """The parameters' values from those of all fields, with small floats as bits."""
        if self._pick is not None:
            values = [values[i] for i in self._pick]
        if self._convert:
            values = list(values)
            for i, f in self._convert:
                values[i] = f(values[i])
        return values

    def packing_error(self, values: Sequence[Any], error: Exception) -> ValueError:
        """The error for values that do not fit, which names the parameter."""
        for p, s, value in zip(self.entry.params, self._single, values, strict=False):
            try:
                s.pack(value)
            except (struct.error, OverflowError):
                return ValueError(
                    f"{p.field} of argument {self.entry.args[p.arg].name!r} of kernel "
                    f"{self.entry.name!r} must fit its parameter type {p.type}, got {value!r}"
                )
        return ValueError(f"parameters of kernel {self.entry.name!r} cannot be packed: {error}")


class Packet:
    """The memory of one launch: the packed struct, and the array of pointers into it."""

    __slots__ = ("address", "memory", "pointers", "pointers_address")

    def __init__(self, packer: Packer) -> None:
        # 64 spare bytes to align the struct to 64, which tensor maps require.
        self.memory = (ctypes.c_char * (packer.struct.size + 64))()
        base = ctypes.addressof(self.memory)
        skip = -base % 64
        if skip:
            self.memory = (ctypes.c_char * packer.struct.size).from_buffer(self.memory, skip)
        self.address = base + skip
        self.pointers = (ctypes.c_void_p * max(len(packer.offsets), 1))(*(self.address + o for o in packer.offsets))
        self.pointers_address = ctypes.addressof(self.pointers)


def dim3(value: Any, what: str, kernel: str) -> Dim3:
    """Three extents from an int or a tuple of one to three."""
    items = value if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(items) <= 3:
        raise ValueError(f"{what} of kernel {kernel!r} must have 1 to 3 extents, got {value!r}")
    try:
        x, y, z = (*map(operator.index, items), 1, 1)[:3]
    except TypeError:
        raise TypeError(f"{what} of kernel {kernel!r} must be an int or a tuple of ints, got {value!r}") from None
    return x, y, z


def check_shape(entry: Entry, grid: Any, block: Any, shared: int, limits: devices.Device | None, most: int) -> Shape:
    """Check a grid and a block against the kernel and the device; ``most`` is the kernel's thread limit, or 0."""
    kernel = entry.name
    if block is None:
        if entry.block is None:
            raise ValueError(f"kernel {kernel!r} runs with any block: give one, as kernel[grid, block](...)")
        block = entry.block
    g, b = dim3(grid, "grid", kernel), dim3(block, "block", kernel)
    if entry.block is not None and b != entry.block:
        raise ValueError(f"kernel {kernel!r} is compiled for a block of {entry.block}, got {b}")
    if min(g) < 0:
        raise ValueError(f"grid of kernel {kernel!r} must not be negative, got {g}")
    if min(b) < 1:
        raise ValueError(f"block of kernel {kernel!r} must be positive, got {b}")
    threads = b[0] * b[1] * b[2]
    most = min(t for t in (entry.max_threads, most, _HOST_BLOCKS) if t)
    if threads > most:
        raise ValueError(
            f"block of kernel {kernel!r} must have at most {most} threads, got {b[0]}x{b[1]}x{b[2]} = {threads}"
        )
    if limits is None and g[0] * g[1] * g[2] > _HOST_BLOCKS:
        raise ValueError(
            f"grid of kernel {kernel!r} must have at most {_HOST_BLOCKS} blocks on the host, which runs them one after "
            f"another, got {g}: use fewer blocks, or several launches"
        )
    if limits is not None:
        for axis, extent, limit in zip("xyz", g, limits.max_grid, strict=True):
            if extent > limit:
                raise ValueError(f"grid of kernel {kernel!r} must be at most {limit} in {axis} on {limits!r}, got {g}")
        if entry.cluster is not None and any(e % c for e, c in zip(g, entry.cluster, strict=True)):
            raise ValueError(f"grid of kernel {kernel!r} must be a multiple of its cluster {entry.cluster}, got {g}")
    if shared < 0:
        raise ValueError(f"shared memory of kernel {kernel!r} must not be negative, got {shared}")
    return (*g, *b, shared)


# --- on a GPU ------------------------------------------------------------------------------------


class Address(int):
    """The address of a buffer among the values of a launch, by which its place in the packet is found."""

    operand: int

    @classmethod
    def of(cls, address: int, operand: int) -> Address:
        """The address of the operand with a given index."""
        made = cls(address)
        made.operand = operand
        return made


class Bound(NamedTuple):
    """A launch on a stream, packed except for some addresses. One thread at a time may use it."""

    launch: Callable[..., int]
    arguments: driver.LaunchArguments
    words: memoryview  # the packet's memory
    moves: tuple[tuple[int, int], ...]  # (word of the packet, operand whose address it takes)
    after_failure: Callable[[int], int]  # called after a failed launch, with its error code
    memory: Packet


class PreparedCall:
    """A launch with fixed values, as a function of the stream. Threads may share it.

    Attributes
    ----------
    parts : tuple
        Launch arguments by stream, for streams that determine the device; and the driver's function.
    """

    __slots__ = ("_call", "_configs", "_packet", "_shape", "parts")

    def __init__(self, call: DeviceCall, shape: Shape, packet: Packet) -> None:
        self._call, self._shape, self._packet = call, shape, packet
        # One immutable configuration per stream, which is why threads can share them. They are never freed, since
        # another
        # thread may be launching with one; programs use few streams.
        self._configs: dict[int, tuple[Any, driver.LaunchArguments]] = {}
        self.parts: tuple[dict[int, driver.LaunchArguments], Any] = {}, call.launcher()

    def __call__(self, stream: int) -> None:
        quick, launch = self.parts
        found = self._configs.get(stream)
        if found is None:
            self._call.device.check_stream(stream)
            data = struct.pack("<" + _CONFIG, *self._shape, stream, *self._call.attributes)
            memory = ctypes.create_string_buffer(data, _CONFIG_BYTES)
            made = self._call.arguments(ctypes.addressof(memory), self._packet.pointers_address)
            found = self._configs.setdefault(stream, (memory, made))
            if stream > streams.LAST_SPECIAL or self._call.device.alone:
                quick[stream] = found[1]
        code = launch(*found[1])
        if code:
            self.after_failure(code, found[1], stream)

    def after_failure(self, code: int, arguments: driver.LaunchArguments, stream: int) -> None:
        """Called after a failed launch."""
        self._call.after_failure(code, arguments, self._shape, stream)


class PreparedHostCall:
    """A launch on the host, or with an empty grid; the stream is ignored."""

    __slots__ = ("_run", "parts")

    def after_failure(self, code: int, arguments: driver.LaunchArguments, stream: int) -> None:
        raise AssertionError("nothing was launched")

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self.parts: tuple[dict[int, driver.LaunchArguments], Any] = {}, None

    def __call__(self, stream: int) -> None:
        self._run()


class DeviceCall:
    """A kernel on one device, ready to launch."""

    def __init__(self, artifact: Artifact, entry: Entry, ordinal: int, attributes: Attributes = None) -> None:
        self.kernel = devices.load(artifact, entry, ordinal)
        self.device = self.kernel.device
        self.entry, self.handle = entry, self.kernel.handle
        merged = {**entry.attributes, **(attributes or {})}
        self.attributes = self.kernel.launch_attributes(
            entry.cluster, bool(merged.get("programmatic")), bool(merged.get("cooperative"))
        )
        self.packer = Packer(entry, _CONFIG)
        self._launch = driver.launch_function()
        timeline.load(entry, ordinal, self.kernel.set_variable)
        if ownership.accesses(entry):
            ownership.load(entry, ordinal, self.kernel.set_variable)
            self._launch = ownership.launching(self._launch, ordinal)
        self._pool: list[tuple[Packet, driver.LaunchArguments]] = []
        self._shapes: dict[Any, Shape] = {}
        self._passed: set[Shape] = set()

    def shape(self, grid: Any, block: Any, shared: int) -> Shape:
        """The checked launch shape, from a cache of checked shapes."""
        key = (grid, block, shared)
        try:
            found = self._shapes.get(key)
        except TypeError:  # an unhashable list
            return self._check(grid, block, shared)
        if found is None:
            found = self._check(grid, block, shared)
            if len(self._shapes) >= _REMEMBER:
                self._shapes.clear()
            self._shapes[key] = found
        return found

    def checked(self, shape: Shape) -> Shape:
        """The shape, checked as by :meth:`shape`."""
        if shape in self._passed:
            return shape
        found = self._check(shape[:3], shape[3:6], shape[6])
        if len(self._passed) >= _REMEMBER:
            self._passed.clear()
        self._passed.add(found)
        return found

    def _check(self, grid: Any, block: Any, shared: int) -> Shape:
        self.kernel.reserve_shared(shared)
        return check_shape(self.entry, grid, block, shared, self.device, self.kernel.max_threads)

    def launch(self, shape: Shape, values: Sequence[Any], stream: int) -> None:
        """Launch. A grid with an extent of 0 launches nothing."""
        if not (shape[0] and shape[1] and shape[2]):
            return
        packer = self.packer
        if not packer.plain:
            values = packer.select(values)
        if stream not in self.device.streams:
            self.device.check_stream(stream)
        pool = self._pool
        packet, arguments = pool.pop() if pool else self._packet()
        try:
            packer.struct.pack_into(packet.memory, 0, *shape, stream, *self.attributes, *values)
        except (struct.error, OverflowError) as e:
            raise packer.packing_error(values, e) from None
        code = self._launch(*arguments)
        if code:
            code = self.after_failure(code, arguments, shape, stream)
        pool.append((packet, arguments))

    def _packet(self) -> tuple[Packet, driver.LaunchArguments]:
        """The memory of a launch, and the arguments of the driver's function."""
        packet = Packet(self.packer)
        return packet, self.arguments(packet.address, packet.pointers_address)

    def arguments(self, config: int, pointers: int) -> driver.LaunchArguments:
        """The arguments of the driver's function, from addresses of a configuration and parameter pointers."""
        return driver.launch_arguments(config, self.handle, pointers)

    def bound(self, shape: Shape, values: Sequence[Any], stream: int) -> Bound | None:
        """A packed launch in which every `Address` can be replaced later; None for an empty grid."""
        if 0 in shape[:3]:
            return None
        packer, (packet, arguments) = self.packer, self._packet()
        values = packer.select(values)
        self.device.check_stream(stream)
        try:
            packer.struct.pack_into(packet.memory, 0, *shape, stream, *self.attributes, *values)
        except (struct.error, OverflowError) as e:
            raise packer.packing_error(values, e) from None
        offsets = packer.offsets
        moves = tuple((o // 8, v.operand) for o, v in zip(offsets, values, strict=True) if v.__class__ is Address)
        whole = packer.struct.size & ~7
        words = memoryview(packet.memory).cast("B")[:whole].cast("Q")

        def after_failure(code: int) -> int:
            return self.after_failure(code, arguments, shape, stream)

        return Bound(self._launch, arguments, words, moves, after_failure, packet)

    def after_failure(self, code: int, arguments: driver.LaunchArguments, shape: Shape, stream: int) -> int:
        """After a failed launch: make this device's context current in a thread without one and retry, or raise."""
        if code == _NO_CONTEXT:
            with self.device.active():
                code = self._launch(*arguments)
        if code:
            raise driver.DriverError(
                f"launch of kernel {self.entry.name!r} on {self.device!r}",
                code,
                f"grid {shape[:3]}, block {shape[3:6]}, {shape[6]} + {self.kernel.static_shared_bytes} bytes of shared "
                f"memory, {self.kernel.registers} registers/thread, cluster {self.entry.cluster}, stream {stream:#x}",
            )
        return code

    def prepare(self, shape: Shape, values: Sequence[Any]) -> PreparedCall | PreparedHostCall:
        """A function of the stream that launches with these values. Threads may share it."""
        if 0 in shape[:3]:
            return PreparedHostCall(lambda: None)
        packer = self.packer
        values = packer.select(values)
        packet = Packet(packer)
        try:
            packer.struct.pack_into(packet.memory, 0, *shape, 0, *self.attributes, *values)
        except (struct.error, OverflowError) as e:
            raise packer.packing_error(values, e) from None
        return PreparedCall(self, shape, packet)

    def launcher(self) -> Callable[..., int]:
        """The driver's launch function, called with addresses."""
        return self._launch

    def enter(self, stream: int) -> int | None:
        """Before a launch on a default stream, make the device's context current. See `Device.bind`."""
        # With one GPU no other context can be current; a thread without a context is handled after the failed launch.
        return self.device.bind() if stream <= streams.LAST_SPECIAL and not self.device.alone else None

    @property
    def facts(self) -> Any:
        """Device properties for expressions."""
        return self.device


# --- on the host ---------------------------------------------------------------------------------


class HostExecutor(Protocol):
    """Runs the entries of an artifact on the CPU: `kvarn.runtime.host.HostProgram`."""

    def run(self, entry: Entry, grid: Dim3, block: Dim3, values: Sequence[Any]) -> None:
        """Run all blocks of a launch to completion.

        ``values`` has one number per parameter of the entry, in order: addresses as ints, 16- and 8-bit floats as bits.
        """
        ...


class HostFacts:
    """Properties of the host for expressions."""

    multiprocessors = os.cpu_count() or 1
    shared_bytes, l2_bytes, warp_size = 1 << 20, 1 << 20, 32

    def encode(self, description: Any) -> Any:
        raise ValueError("the host has no tensor memory accelerator: compile for a GPU")


class HostCall:
    """A kernel on the CPU. Streams are ignored: a launch returns when it is done."""

    facts = HostFacts()

    def __init__(self, executor: HostExecutor, entry: Entry) -> None:
        self.executor, self.entry = executor, entry
        self.packer = Packer(entry, "")
        self._bits = struct.Struct(self.packer.struct.format.replace("e", "H"))

    def shape(self, grid: Any, block: Any, shared: int) -> Shape:
        return check_shape(self.entry, grid, block, shared, None, 0)

    def checked(self, shape: Shape) -> Shape:
        return self.shape(shape[:3], shape[3:6], shape[6])

    def launch(self, shape: Shape, values: Sequence[Any], stream: int) -> None:
        self.prepare(shape, values)(stream)

    def prepare(self, shape: Shape, values: Sequence[Any]) -> PreparedHostCall:
        if 0 in shape[:3]:
            return PreparedHostCall(lambda: None)
        values = self.packer.select(values)
        try:
            # Packing checks every range, and converts small floats to bits.
            ready = self._bits.unpack(self.packer.struct.pack(*values))
        except (struct.error, OverflowError) as e:
            raise self.packer.packing_error(values, e) from None
        return PreparedHostCall(lambda: self.executor.run(self.entry, shape[:3], shape[3:6], ready))

    def enter(self, stream: int) -> int | None:
        return None


Call = DeviceCall | HostCall


class Place:
    """An artifact on a device or the host: makes the calls of its entries."""

    def __init__(self, artifact: Artifact, ordinal: int, executor: HostExecutor | None = None) -> None:
        self.artifact, self.ordinal = artifact, ordinal
        if ordinal < 0 and artifact.target != "host":
            raise ValueError(
                f"kernel {artifact.name!r} is compiled for {artifact.target}, but its buffers are in host "
                "memory: compile it with target='host', or pass CUDA buffers"
            )
        if ordinal < 0 and executor is None:
            from . import host  # the CPU JIT, the only part of the runtime that needs MLIR

            executor = host.HostProgram(artifact)
        self._executor = executor

    def call(self, entry: Entry, attributes: Attributes = None) -> Call:
        """The call of an entry; the ``attributes`` of a step override the entry's own."""
        if self.ordinal >= 0:
            return DeviceCall(self.artifact, entry, self.ordinal, attributes)
        assert self._executor is not None
        return HostCall(self._executor, entry)
