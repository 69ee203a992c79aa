# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Assembly of PTX to machine code with statistics, and disassembly.

Launching PTX never needs it: the driver has an assembler. nvJitLink assembles in this process (a few milliseconds, no
GPU); a ``ptxas`` is used if nvJitLink is missing, or if ``KVARN_PTXAS`` names one. Kernels with wgmma or setmaxnreg
need ptxas: nvJitLink compiles PTX as a relocatable unit, for which it ignores setmaxnreg and serializes wgmma. SASS
text comes from ``nvdisasm``. All tools are found on PATH or in the NVIDIA wheels.
"""

from __future__ import annotations

import functools
import importlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvarn.artifact import Artifact
from kvarn.env import env

from .assembler_log import AssemblyError as AssemblyError, needs_whole_program, refuse_losses
from .device import parse_chip, runs_on

INSTALL_ASSEMBLER = "pip install nvidia-nvjitlink cuda-bindings, or put the CUDA toolkit's ptxas on PATH"
INSTALL_PTXAS = "pip install nvidia-cuda-nvcc, or put the CUDA toolkit's ptxas on PATH"
INSTALL_DISASSEMBLER = "pip install nvidia-cuda-nvdisasm, or put the CUDA toolkit's nvdisasm on PATH"


class MissingToolError(RuntimeError):
    """No assembler or disassembler is installed; the message says what to install."""


@dataclass(frozen=True)
class Figures:
    """The assembler's statistics of one kernel: registers per thread, and bytes."""

    registers: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True)
class Assembled:
    """Machine code, with statistics per kernel.

    Attributes
    ----------
    cubin : bytes
    kernels : dict of str to Figures
        By entry name.
    tool : str
        The assembler and its version.
    log : str
        The assembler's output, including warnings.
    registers, spill_stores, spill_loads, stack_bytes, shared_bytes : int
        The maximum over the kernels. Shared memory is the static part.
    """

    cubin: bytes
    kernels: dict[str, Figures] = field(default_factory=dict)
    tool: str = ""
    log: str = ""

    def _largest(self, name: str) -> int:
        return max((getattr(f, name) for f in self.kernels.values()), default=0)

    @property
    def registers(self) -> int:
        return self._largest("registers")

    @property
    def spill_stores(self) -> int:
        return self._largest("spill_stores")

    @property
    def spill_loads(self) -> int:
        return self._largest("spill_loads")

    @property
    def stack_bytes(self) -> int:
        return self._largest("stack_bytes")

    @property
    def shared_bytes(self) -> int:
        return self._largest("shared_bytes")


# --- finding the tools ---------------------------------------------------------------------------


@functools.cache
def nvjitlink() -> Any:
    """The ``cuda.bindings.nvjitlink`` module if its library is available, else None."""
    try:
        module = importlib.import_module("cuda.bindings.nvjitlink")
        module.version()
    except Exception:  # ImportError, or an exception of the finder for a missing library
        return None
    return module


def find_tool(name: str, override: str = "") -> str | None:
    """Path of a program of the CUDA toolkit: ``override``, on PATH, or in an NVIDIA wheel."""
    if override:
        found = shutil.which(override)
        if found is None:
            raise MissingToolError(f"{override} is not a program (KVARN_{name.upper()} names it)")
        return found
    found = shutil.which(name)
    if found is not None:
        return found
    try:
        return importlib.import_module("cuda.pathfinder").find_nvidia_binary_utility(name)
    except Exception:  # no cuda-pathfinder, or one that does not know the program
        return None


@functools.cache
def tool_version(path: str) -> str:
    """Release of ptxas or nvdisasm, such as ``"13.0.88"``; empty if it is not printed."""
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"V(\d+(?:\.\d+)+)", text)
    return found[1] if found else ""


# --- PTX to cubin --------------------------------------------------------------------------------


def assemble(ptx: str, chip: str, options: Sequence[str] = ()) -> Assembled:
    """Assemble PTX.

    Parameters
    ----------
    ptx : str
    chip : str
        Such as ``"sm_90a"``.
    options : sequence of str
        Further options of ptxas, such as ``"--maxrregcount=128"`` or ``"-lineinfo"``.

    Raises
    ------
    AssemblyError
        If the PTX has an error, is newer than the assembler or is for another chip; or if its wgmma was serialized or
        its setmaxnreg ignored.
    MissingToolError
        If there is no assembler.
    """
    if not re.fullmatch(r"sm_\d+[af]?", chip):
        raise ValueError(f"chip must be named like sm_90a, got {chip!r}")
    made = _assemble(ptx, chip, options)
    refuse_losses(made.log, ptx, made.tool)
    return made


def _assemble(ptx: str, chip: str, options: Sequence[str]) -> Assembled:
    whole = needs_whole_program(ptx)
    if not env.ptxas and not whole and nvjitlink() is not None:
        return _with_nvjitlink(nvjitlink(), ptx, chip, options)
    path = find_tool("ptxas", env.ptxas)
    if path is None:
        if whole:
            raise MissingToolError(
                f"no ptxas is installed, which kernels with wgmma or setmaxnreg need: {INSTALL_PTXAS}"
            )
        raise MissingToolError(f"no assembler is installed: {INSTALL_ASSEMBLER}")
    return _with_ptxas(path, ptx, chip, options)


def with_cubins(artifact: Artifact, chips: Sequence[str] = ()) -> Artifact:
    """A copy of an artifact with machine code next to its PTX, so that its first launch does not assemble.

    Parameters
    ----------
    artifact : Artifact
        With PTX.
    chips : sequence of str
        Chips that can run the PTX, such as ``("sm_80", "sm_86", "sm_89")``; by default the artifact's target.

    Raises
    ------
    ValueError
        If a chip cannot run the artifact's PTX.
    AssemblyError, MissingToolError
        As in `assemble`.
    """
    ptx = artifact.code.get("ptx")
    if not isinstance(ptx, str):
        raise ValueError(f"artifact {artifact.name!r} for {artifact.target} must have PTX to be assembled")
    code = dict(artifact.code)
    for chip in chips or (artifact.target,):
        major, minor, suffix = parse_chip(chip)
        if not runs_on(artifact.target, (major, minor), binary=False) or (artifact.target[-1] in "af" and not suffix):
            raise ValueError(f"chip {chip} cannot run PTX for {artifact.target}, of {artifact.name!r}")
        key = "cubin" if chip == artifact.target else f"cubin.{chip}"
        code[key] = assemble(ptx, chip).cubin
    return artifact.replace(code=code)


def _with_nvjitlink(linker: Any, ptx: str, chip: str, options: Sequence[str]) -> Assembled:
    flags = [f"-arch={chip}", "-verbose", *(o if o == "-lineinfo" else f"-Xptxas={o}" for o in options)]
    data = ptx.encode()
    try:
        handle = linker.create(len(flags), flags)
    except linker.nvJitLinkError as e:
        major, minor = linker.version()
        raise AssemblyError(
            f"nvJitLink {major}.{minor} does not take {' '.join(flags)}: {e}; "
            "a newer nvidia-nvjitlink may know the chip"
        ) from None
    try:
        linker.add_data(handle, linker.InputType.PTX, data, len(data), "kernel.ptx")
        linker.complete(handle)
        cubin = bytearray(linker.get_linked_cubin_size(handle))
        linker.get_linked_cubin(handle, cubin)
        log = _log(linker.get_info_log_size, linker.get_info_log, handle)
    except linker.nvJitLinkError as e:
        complaint = _log(linker.get_error_log_size, linker.get_error_log, handle)
        raise _assembly_error(chip, complaint or str(e), ptx) from None
    finally:
        linker.destroy(handle)
    return Assembled(bytes(cubin), figures(log), "nvJitLink {}.{}".format(*linker.version()), log)


def _log(size: Any, read: Any, handle: int) -> str:
    text = bytearray(size(handle))
    if text:
        read(handle, text)
    return bytes(text).split(b"\0", 1)[0].decode(errors="replace").strip()


def _with_ptxas(path: str, ptx: str, chip: str, options: Sequence[str]) -> Assembled:
    with tempfile.TemporaryDirectory(prefix="kvarn-") as folder:
        source, made = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [path, "-v", f"-arch={chip}", *_side_by_side(path, ptx), *options, str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        log = (done.stdout + done.stderr).replace(str(source), "kernel.ptx").strip()
        if done.returncode:
            raise _assembly_error(chip, log, ptx)
        return Assembled(made.read_bytes(), figures(log), f"ptxas {tool_version(path)}".strip(), log)


def _side_by_side(path: str, ptx: str) -> list[str]:
    """Options that let ptxas compile the kernels of a module in parallel threads; the code is the same."""
    major = tool_version(path).partition(".")[0]
    return ["--split-compile=2"] if ptx.count(".entry") > 1 and major.isdecimal() and int(major) >= 13 else []


def _assembly_error(chip: str, log: str, ptx: str) -> AssemblyError:
    lines, quoted = ptx.splitlines(), []
    for number in dict.fromkeys(int(n) for n in re.findall(r"line (\d+); error", log)):
        if 1 <= number <= len(lines):
            quoted.append(f"  {number}: {lines[number - 1].strip()}")
    text = f"PTX does not assemble for {chip}:\n{log}"
    return AssemblyError(text + ("\nlines of the PTX:\n" + "\n".join(quoted) if quoted else ""))


_PROPERTIES = re.compile(r"Function properties for '?([\w$.]+)'?")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def figures(log: str) -> dict[str, Figures]:
    """Statistics per kernel from the output of ptxas or nvJitLink with -v."""
    found: dict[str, dict[str, int]] = {}
    entries = set(re.findall(r"Compiling entry function '([^']+)'", log))
    entry: str | None = None  # "Used N registers" refers to the entry being compiled
    of: str | None = None
    for line in log.splitlines():
        if compiling := re.search(r"Compiling entry function '([^']+)'", line):
            entry = str(compiling[1])
            found[entry] = {}
        elif properties := _PROPERTIES.search(line):
            of = properties[1]
        elif spills := _SPILLS.search(line):
            if of is not None and of in entries:
                names = ("stack_bytes", "spill_stores", "spill_loads")
                found[of].update(zip(names, map(int, spills.groups()), strict=True))
        elif (used := _USED.search(line)) and entry is not None:
            shared = _SHARED.search(line)
            found[entry].update(registers=int(used[1]), shared_bytes=int(shared[1]) if shared else 0)
    return {name: Figures(**values) for name, values in found.items()}


# --- cubin to SASS -------------------------------------------------------------------------------


def disassemble(cubin: bytes, options: Sequence[str] = ("-c",)) -> str:
    """SASS of a cubin as text.

    Parameters
    ----------
    cubin : bytes
    options : sequence of str
        Options of nvdisasm; by default only code sections are printed.

    Raises
    ------
    MissingToolError
        If there is no nvdisasm.
    ValueError
        If the bytes are not a cubin.
    """
    if cubin[:4] != b"\x7fELF":
        raise ValueError(f"a cubin must be an ELF file, got {bytes(cubin[:4])!r}…")
    path = find_tool("nvdisasm", env.nvdisasm)
    if path is None:
        raise MissingToolError(f"no disassembler is installed: {INSTALL_DISASSEMBLER}")
    with tempfile.NamedTemporaryFile(prefix="kvarn-", suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        done = subprocess.run([path, *options, f.name], capture_output=True, text=True)
    if done.returncode:
        complaint = (done.stderr or done.stdout).strip()
        raise ValueError(
            f"nvdisasm {tool_version(path)} cannot read the cubin: {complaint}; it may be older than the assembler"
        )
    return done.stdout
