# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Devices, and compiled code on them: the choice of code, loading, and kernel attributes.

Code is loaded as a *library*, which is not bound to a context: the driver loads it into the context of a launch's
stream. One artifact thus serves all devices and contexts of the process. Libraries stay loaded until the process ends,
since a CUDA graph may refer to their kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import struct
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from kvarn.artifact import PARAM_BYTES, Artifact, Entry
from kvarn.dialect.chips import COMPILED_FOR
from kvarn.forks import reinit_after_fork

from . import driver
from .assembler_log import needs_whole_program, refuse_losses
from .streams import handle_of

Cluster = tuple[int, int, int] | None
_CHIP = re.compile(r"sm_(\d+)(\d)([af]?)$")
_lock = reinit_after_fork(threading.RLock())

# For TMA descriptors, the driver's names of L2 promotion sizes (bytes fetched around a miss) and of element types.
L2_PROMOTION = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}
_TMA_TYPES = {
    "f32": "FLOAT32", "f16": "FLOAT16", "bf16": "BFLOAT16", "f64": "FLOAT64", "i32": "INT32", "i64": "INT64",
    "u32": "UINT32", "u64": "UINT64", "u16": "UINT16", "i16": "UINT16", "u8": "UINT8", "i8": "UINT8",
    "f8e4m3": "UINT8", "f8e5m2": "UINT8", "f8e8m0": "UINT8",
}  # fmt: skip


# --- which code runs where -----------------------------------------------------------------------


def parse_chip(chip: str) -> tuple[int, int, str]:
    """Major, minor and suffix of a chip's name: ``"sm_90a"`` gives ``(9, 0, "a")``."""
    found = _CHIP.match(chip)
    if found is None:
        raise ValueError(f"a chip must be named like sm_80, sm_90a or sm_100a, got {chip!r}")
    return int(found[1]), int(found[2]), found[3]


def runs_on(chip: str, capability: tuple[int, int], *, binary: bool) -> bool:
    """Whether code for ``chip`` runs on a device of a compute capability.

    PTX runs on its chip and all later ones, a cubin only on later ones of the same major version. Code for an ``a``
    chip runs on that chip only, code for an ``f`` chip on its family.
    """
    major, minor, suffix = parse_chip(chip)
    if suffix == "a":
        return (major, minor) == capability
    if suffix == "f" or binary:
        return major == capability[0] and minor <= capability[1]
    return (major, minor) <= capability


def ptx_facts(ptx: str) -> tuple[tuple[int, int], str]:
    """ISA version and chip that PTX text declares: ``((8, 0), "sm_90a")``."""
    version = re.search(r"^\s*\.version\s+(\d+)\.(\d+)", ptx, re.MULTILINE)
    target = re.search(r"^\s*\.target\s+(sm_\d+[af]?)", ptx, re.MULTILINE)
    if version is None or target is None:
        raise ValueError("PTX must declare a .version and a .target sm_…: it is damaged, or not PTX")
    return (int(version[1]), int(version[2])), target[1]


def choose_image(
    artifact: Artifact, capability: tuple[int, int], driver_version: tuple[int, int] | None, where: str
) -> tuple[str, bytes]:
    """The code of an artifact that a device can run.

    A matching cubin is preferred to PTX, and the closest chip among several.

    Parameters
    ----------
    artifact : Artifact
    capability : tuple of int
        The device's compute capability.
    driver_version : tuple of int or None
        CUDA version of the driver; with None the PTX ISA is not checked.
    where : str
        The device's name, for messages.

    Returns
    -------
    tuple of (str, bytes)
        The key in ``artifact.code``, and the code for the driver.

    Raises
    ------
    ValueError
        If no code matches. The message names the kernel's chip or ISA and the device's or driver's.
    """
    have = f"{where} (sm_{capability[0]}{capability[1]})"
    if artifact.target == "host":
        raise ValueError(
            f"kernel {artifact.name!r} is compiled for host and cannot run on {have}: "
            f"compile it with target='{target_of(capability)}', or pass host buffers"
        )
    binaries = []
    for key, code in artifact.code.items():
        if key == "cubin" or key.startswith("cubin."):
            chip = artifact.target if key == "cubin" else key.removeprefix("cubin.")
            if isinstance(code, bytes) and runs_on(chip, capability, binary=True):
                binaries.append((parse_chip(chip), key, code))
    if binaries:
        _, key, code = max(binaries)
        return key, code
    ptx = artifact.code.get("ptx")
    if not isinstance(ptx, str):
        cubins = [
            artifact.target if k == "cubin" else k.removeprefix("cubin.")
            for k in artifact.code
            if k.startswith("cubin")
        ]
        raise ValueError(
            f"kernel {artifact.name!r} has cubins for {', '.join(cubins) or 'no chip'} and no PTX, "
            f"and cannot run on {have}: compile it for sm_{capability[0]}{capability[1]}"
        )
    isa, chip = ptx_facts(ptx)
    if not runs_on(chip, capability, binary=False):
        raise ValueError(
            f"kernel {artifact.name!r} is compiled for {chip} and cannot run on {have}: "
            f"compile it with target='{target_of(capability)}'"
        )
    highest = driver.max_isa(driver_version) if driver_version else None
    if driver_version and highest and isa > highest:
        raise ValueError(
            f"kernel {artifact.name!r} is in PTX ISA {isa[0]}.{isa[1]}, but the driver of {where} "
            f"(CUDA {driver_version[0]}.{driver_version[1]}) reads PTX up to {highest[0]}.{highest[1]}: "
            "update the driver, or save the kernel with a cubin"
        )
    return "ptx", ptx.encode() + b"\0"


def target_of(capability: tuple[int, int]) -> str:
    """The target to compile for on a device: ``"sm_90a"`` for (9, 0), ``"sm_80"`` for (8, 6)."""
    return next((t for t in COMPILED_FOR if runs_on(t, capability, binary=False)), COMPILED_FOR[-1])


def select(artifacts: Iterable[Artifact], capability: tuple[int, int] | None) -> Artifact:
    """The variant of a bundle for a device, with the closest chip; without a device (None), the host variant."""
    artifacts = list(artifacts)
    if capability is None:
        fitting = [a for a in artifacts if a.target == "host"]
    else:
        fitting = [
            a
            for a in artifacts
            if a.target != "host"
            and (
                runs_on(a.target, capability, binary=False)
                or any(a.cubin(c) and runs_on(c, capability, binary=True) for c in _cubin_chips(a))
            )
        ]
        fitting.sort(key=lambda a: parse_chip(a.target))
    if not fitting:
        place = "the host" if capability is None else f"sm_{capability[0]}{capability[1]}"
        raise ValueError(
            f"no variant of {artifacts[0].name!r} runs on {place}: "
            f"the bundle has {', '.join(a.target for a in artifacts)}"
        )
    return fitting[-1]


def _cubin_chips(artifact: Artifact) -> list[str]:
    return [artifact.target, *(k.removeprefix("cubin.") for k in artifact.code if k.startswith("cubin."))]


# --- devices -------------------------------------------------------------------------------------


class Device:
    """One GPU. Get it from `device`.

    Attributes
    ----------
    ordinal : int
    name : str
    capability : tuple of int
        Compute capability, such as ``(9, 0)``.
    multiprocessors, max_threads, warp_size : int
    shared_bytes : int
        Largest shared memory per block.
    l2_bytes : int
    max_grid : tuple of int
    """

    def __init__(self, ordinal: int) -> None:
        found = driver.status()
        if not found.usable:
            raise RuntimeError(f"no GPU can be used: {found.reason}")
        if not 0 <= ordinal < found.devices:
            raise ValueError(f"device ordinal must be from 0 to {found.devices - 1}, got {ordinal}")
        self.ordinal = ordinal
        self.handle = driver.call("cuDeviceGet", ordinal)
        self.name = driver.call("cuDeviceGetName", 128, self.handle).split(b"\0", 1)[0].decode()
        self.capability = (self._attribute("COMPUTE_CAPABILITY_MAJOR"), self._attribute("COMPUTE_CAPABILITY_MINOR"))
        self.multiprocessors = self._attribute("MULTIPROCESSOR_COUNT")
        self.max_threads = self._attribute("MAX_THREADS_PER_BLOCK")
        self.warp_size = self._attribute("WARP_SIZE")
        self.shared_bytes = self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self.l2_bytes = self._attribute("L2_CACHE_SIZE")
        self.max_grid = tuple(self._attribute(f"MAX_GRID_DIM_{axis}") for axis in "XYZ")
        self._primary: Any = None
        self.alone = found.devices == 1
        self.streams = {0, 1, 2}  # handles known to belong to this device; these three refer to the current context

    def _attribute(self, name: str) -> int:
        key = getattr(driver.require().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return driver.call("cuDeviceGetAttribute", key, self.handle)

    def __repr__(self) -> str:
        return f"Device({self.ordinal}, {self.name!r}, sm_{self.capability[0]}{self.capability[1]})"

    @property
    def primary(self) -> int:
        """The primary context, which torch and CuPy use. Retained at first use, until the process ends."""
        with _lock:
            if self._primary is None:
                self._primary = int(driver.call("cuDevicePrimaryCtxRetain", self.handle))
            return self._primary

    def encode(self, description: Any) -> bytes:
        """The 128 bytes of a TMA descriptor (a `tensormap.TensorMap`), encoded by the driver.

        Raises
        ------
        ValueError
            If the device does not support it.
        DriverError
            If the driver refuses it.
        """
        m = description
        major, minor, _ = parse_chip(m.needs)
        if self.capability < (major, minor):
            raise ValueError(f"this TMA descriptor needs {m.needs} or later, got {self!r}")
        b = driver.require()
        element = getattr(b.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TMA_TYPES[m.dtype.name]}")
        swizzle = getattr(b.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{m.swizzle.upper()}")
        promotion = getattr(b.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{L2_PROMOTION[m.l2_promotion]}")
        size = m.dtype.itemsize
        with self.active():
            found = driver.call(
                "cuTensorMapEncodeTiled",
                element,
                len(m.dims),
                m.base,
                [b.cuuint64_t(d) for d in reversed(m.dims)],
                [b.cuuint64_t(s * size) for s in reversed(m.strides[:-1])],
                [b.cuuint32_t(x) for x in reversed(m.box)],
                [b.cuuint32_t(1)] * len(m.dims),
                b.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                promotion,
                b.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        return ctypes.string_at(int(found.getPtr()), 128)

    def bind(self) -> int | None:
        """Make a context of this device current.

        A current context of this device, primary or not, is kept. A thread without a context gets and keeps the primary
        one, as with the CUDA runtime.

        Returns
        -------
        int or None
            The context of another device, to be restored afterwards, or None.
        """
        current = driver.current_context()
        if current:
            if current == self._primary or int(driver.call("cuCtxGetDevice")) == int(self.handle):
                return None
        driver.call("cuCtxSetCurrent", driver.require().CUcontext(self.primary))
        return current or None

    def check_stream(self, stream: int) -> None:
        """Refuse a stream of another device, on which the launch would run. Checked once per handle."""
        if stream in self.streams:
            return
        bindings = driver.require()
        context = driver.call("cuStreamGetCtx", bindings.CUstream(handle_of(stream)))
        if int(context) != self._primary:
            before = driver.current_context()
            driver.call("cuCtxSetCurrent", context)
            try:
                found = int(driver.call("cuCtxGetDevice"))
            finally:
                driver.call("cuCtxSetCurrent", bindings.CUcontext(before))
            if found != int(self.handle):
                raise ValueError(
                    f"stream {stream:#x} must be of {self!r}, where the arguments are, got one of device {found}"
                )
        self.streams.add(stream)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """A ``with`` block in which a context of this device is current."""
        before = self.bind()
        try:
            yield
        finally:
            if before is not None:
                unbind(before)


def unbind(before: int) -> None:
    """Restore the context that `Device.bind` returned."""
    driver.call("cuCtxSetCurrent", driver.require().CUcontext(before))


@functools.cache
def device(ordinal: int) -> Device:
    """The GPU with an ordinal. RuntimeError if no GPU is usable, ValueError if the ordinal does not exist."""
    return Device(ordinal)


def current_ordinal() -> int:
    """Ordinal of the current context's device; 0 without a context."""
    driver.require()
    if not driver.current_context():
        return 0
    handle = int(driver.call("cuCtxGetDevice"))
    for ordinal in range(driver.status().devices):
        if int(device(ordinal).handle) == handle:
            return ordinal
    return 0


# --- code on a device ----------------------------------------------------------------------------

_libraries: dict[tuple[str, str], Any] = {}
_kernels: dict[tuple[str, str, int], DeviceKernel] = {}
_logs: dict[str, tuple[bytes, bytes]] = {}  # by artifact: error log and info log


def _load_library(artifact: Artifact, on: Device) -> Any:
    key, image = choose_image(artifact, on.capability, driver.status().version, f"device {on.ordinal}, {on.name}")
    found = _libraries.get((artifact.digest, key))
    if found is not None:
        return found
    bindings = driver.require()
    option = bindings.CUjit_option
    log = bytes(16384)  # buffer of the driver's error log
    said = bytes(16384)  # buffer of its info log
    options: list[Any] = []
    values: list[Any] = []
    if key == "ptx":
        options = [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        values = [log, len(log)]
    if key == "ptx" and needs_whole_program(str(artifact.code["ptx"])):
        options += [option.CU_JIT_INFO_LOG_BUFFER, option.CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, option.CU_JIT_LOG_VERBOSE]
        values += [said, len(said), 1]
    if key == "ptx" and b"\n\t.loc\t" in image:  # kv.compile(lineinfo=True): by default the driver drops the lines
        options.append(option.CU_JIT_GENERATE_LINE_INFO)
        values.append(1)
    with on.active():
        code, library = bindings.cuLibraryLoadData(image, options, values, len(options), [], [], 0)
    if int(code):
        raise driver.DriverError(f"loading {key} of kernel {artifact.name!r} on {on!r}", int(code), _complaint(log))
    _libraries[artifact.digest, key] = library
    # The driver may translate PTX as late as the first query of a kernel, and writes the log then.
    _logs[artifact.digest] = log, said
    return library


def _complaint(log: bytes) -> str:
    """The text of a driver log."""
    return log.split(b"\0", 1)[0].decode(errors="replace").strip()


class DeviceKernel:
    """One entry of an artifact, loaded for one device. Get it from `load`.

    Attributes
    ----------
    handle : int
        The driver's kernel handle.
    registers, local_bytes, static_shared_bytes, max_threads : int
        Kernel attributes from the driver; ``local_bytes`` is the stack and spills of one thread.
    """

    def __init__(self, artifact: Artifact, entry: Entry, on: Device) -> None:
        self.entry, self.device, self.artifact_name = entry, on, artifact.name
        self._library = _load_library(artifact, on)
        try:
            self._kernel = driver.call("cuLibraryGetKernel", self._library, entry.name.encode())
        except driver.DriverError as e:
            if e.name != "CUDA_ERROR_NOT_FOUND":
                detail = _complaint(_logs[artifact.digest][0])
                what = f"loading kernel {entry.name!r} of {artifact.name!r} on {on!r}"
                raise driver.DriverError(what, e.code, detail) from e
            raise ValueError(
                f"the code of {artifact.name!r} has no kernel {entry.name!r} ({e.name}): "
                "code and ABI do not match; compile it again"
            ) from e
        self.handle = int(self._kernel)
        self.registers = self._attribute("NUM_REGS")
        self.local_bytes = self._attribute("LOCAL_SIZE_BYTES")
        self.static_shared_bytes = self._attribute("SHARED_SIZE_BYTES")
        self.max_threads = self._attribute("MAX_THREADS_PER_BLOCK")
        self._shared = 0
        self._attributes: dict[Any, tuple[int, int, Any]] = {}
        self._check_params()
        # Loads the code into the context now: a lazy load inside a stream capture would break the capture.
        with on.active():
            driver.call("cuKernelGetFunction", self._kernel)
        said = _complaint(_logs[artifact.digest][1])  # the code is translated by now
        refuse_losses(said, str(artifact.code.get("ptx", "")), f"the driver of {on!r}")
        self.reserve_shared(entry.shared_bytes)

    def set_variable(self, name: str, value: int) -> None:
        """Set an 8-byte variable of the code."""
        with self.device.active():
            address, _ = driver.call("cuLibraryGetGlobal", self._library, name.encode())
            driver.call("cuMemcpyHtoD", address, struct.pack("<q", value), 8)

    def _attribute(self, name: str) -> int:
        key = getattr(driver.require().CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return driver.call("cuKernelGetAttribute", key, self._kernel, self.device.handle)

    def _set_attribute(self, name: str, value: int) -> None:
        key = getattr(driver.require().CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        driver.call("cuKernelSetAttribute", key, value, self._kernel, self.device.handle)

    def _check_params(self) -> None:
        """Compare the ABI with the compiled kernel's parameters, if the driver supports it (from CUDA 12.4 on)."""
        if not driver.has("cuKernelGetParamInfo"):
            return
        expected = [PARAM_BYTES[p.type] for p in self.entry.params]
        found = []
        # A driver without this information fails on the first parameter; there is nothing to compare then.
        for i in range(len(expected) + 1):
            code, _, size = driver.require().cuKernelGetParamInfo(self._kernel, i)
            if int(code):
                break
            found.append(size)
        if found and found != expected:
            raise ValueError(
                f"kernel {self.entry.name!r} takes parameters of {found} bytes, but the ABI of its "
                f"artifact has {expected}: code and ABI do not match; compile it again"
            )

    def reserve_shared(self, dynamic: int) -> None:
        """Allow launches with this many bytes of dynamic shared memory. The kernel's limit only ever grows.

        Called for any dynamic shared memory, not only above 48 KiB: static shared memory lowers the default limit.
        """
        if dynamic <= self._shared:
            return
        if dynamic + self.static_shared_bytes > self.device.shared_bytes:
            raise ValueError(
                f"kernel {self.entry.name!r} needs {dynamic} bytes of dynamic and "
                f"{self.static_shared_bytes} of static shared memory, but a block on {self.device!r} has "
                f"{self.device.shared_bytes}: use smaller tiles or fewer stages"
            )
        with _lock:
            if dynamic > self._shared:
                self._set_attribute("MAX_DYNAMIC_SHARED_SIZE_BYTES", dynamic)
                self._shared = dynamic

    def launch_attributes(self, cluster: Cluster, programmatic: bool, cooperative: bool) -> tuple[int, int]:
        """Address and number of the launch attributes, which live as long as this object."""
        key = (cluster, programmatic, cooperative)
        found = self._attributes.get(key)
        if found is None:
            if cluster is not None:
                self._allow_cluster(cluster)
            found = self._attributes[key] = _attribute_block(cluster, programmatic, cooperative)
        return found[:2]

    def _allow_cluster(self, cluster: tuple[int, int, int]) -> None:
        x, y, z = cluster
        if self.device.capability < (9, 0):
            raise ValueError(
                f"kernel {self.entry.name!r} asks for a cluster of {x}x{y}x{z} blocks, which needs sm_90 "
                f"or later, got {self.device!r}"
            )
        if x * y * z > 16:
            raise ValueError(f"a cluster must have at most 16 blocks, got {x}x{y}x{z} of kernel {self.entry.name!r}")
        if x * y * z > 8:
            self._set_attribute("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)


def _attribute_block(cluster: Cluster, programmatic: bool, cooperative: bool) -> tuple[int, int, Any]:
    """A CUlaunchAttribute array: each is an i32 id, 4 bytes of padding and a union of 64 bytes."""
    ids = driver.require().CUlaunchAttributeID
    items = []
    if cluster is not None and cluster != (1, 1, 1):
        items.append((ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, struct.pack("<3I", *cluster)))
    if programmatic:
        items.append((ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, struct.pack("<i", 1)))
    if cooperative:
        items.append((ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, struct.pack("<i", 1)))
    if not items:
        return 0, 0, None
    data = b"".join(struct.pack("<i4x64s", int(i), value) for i, value in items)
    block = ctypes.create_string_buffer(data, len(data))
    return ctypes.addressof(block), len(items), block


def load(artifact: Artifact, entry: Entry, ordinal: int) -> DeviceKernel:
    """An entry of an artifact on a device. Loaded once per process; the artifact's digest is its identity."""
    key = (artifact.digest, entry.name, ordinal)
    found = _kernels.get(key)
    if found is None:
        with _lock:
            found = _kernels.get(key)
            if found is None:
                found = _kernels[key] = DeviceKernel(artifact, entry, device(ordinal))
    return found
