# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""LLVM's back end for NVIDIA GPUs through its C API: functions of the LLVM dialect become PTX.

MLIR's own pass for this, ``gpu-module-to-binary``, runs LLVM's pipelines for code from C++ compilers, -O1 to -O3. The
code here has no calls, structures or variables in memory, MLIR's passes have canonicalized, merged and hoisted it, and
ptxas follows: :data:`PASSES` are the passes that still have an effect. The functions are in the libraries that MLIR's
bindings have loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlir import ir

from kvarn.dialect import native

from .pass_base import PassFailure, fail

_COMBINE = "instcombine<no-verify-fixpoint>"
# In the syntax of opt -passes=, for every function.
PASSES = ",".join(
    [
        "early-cse",
        "speculative-execution<only-if-divergent-target>",  # short branches become selects
        "simplifycfg",
        _COMBINE,
        "loop-mssa(loop-rotate,licm)",  # ptxas unrolls loops with the test at their head four times
        "loop(indvars,loop-deletion,loop-unroll-full)",  # loops with one iteration, which MLIR does not recognise
        "sccp,bdce",
        "early-cse",
        _COMBINE,
        "div-rem-pairs",
        "simplifycfg<hoist-common-insts;sink-common-insts;speculate-blocks;simplify-cond-branch>",
    ]
)
_INLINE = "always-inline,globaldce,nvvm-reflect"  # for functions linked from libdevice

_TRIPLE = b"nvptx64-nvidia-cuda"
_CODE_LEVEL = 3  # of the code generator: LLVMCodeGenLevelAggressive
_ASSEMBLY_FILE, _LINK_ONCE_ODR, _ERROR = 0, 3, 0  # of LLVMCodeGenFileType, LLVMLinkage, LLVMDiagnosticSeverity

_P, _TEXT, _INT, _SIZE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t
_OUT = ctypes.POINTER(_P)
_HANDLER = ctypes.CFUNCTYPE(None, _P, _P)
# The result type of each function, then its parameter types.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "LLVMContextCreate": (_P,), "LLVMContextDispose": (None, _P),
    "LLVMContextSetDiagnosticHandler": (None, _P, _HANDLER, _P),
    "LLVMGetDiagInfoSeverity": (_INT, _P), "LLVMGetDiagInfoDescription": (_P, _P), "LLVMDisposeMessage": (None, _P),
    "LLVMDisposeModule": (None, _P), "LLVMSetTarget": (None, _P, _TEXT), "LLVMSetModuleDataLayout": (None, _P, _P),
    "LLVMGetFirstFunction": (_P, _P), "LLVMGetNextFunction": (_P, _P), "LLVMIsDeclaration": (_INT, _P),
    "LLVMGetValueName2": (_P, _P, ctypes.POINTER(_SIZE)), "LLVMSetLinkage": (None, _P, _INT),
    "LLVMCreateMemoryBufferWithMemoryRange": (_P, _P, _SIZE, _TEXT, _INT),
    "LLVMGetBitcodeModuleInContext2": (_INT, _P, _P, _OUT), "LLVMLinkModules2": (_INT, _P, _P),
    "LLVMGetTargetFromTriple": (_INT, _TEXT, _OUT, _OUT),
    "LLVMCreateTargetMachine": (_P, _P, _TEXT, _TEXT, _TEXT, _INT, _INT, _INT),
    "LLVMDisposeTargetMachine": (None, _P),
    "LLVMCreateTargetDataLayout": (_P, _P), "LLVMDisposeTargetData": (None, _P),
    "LLVMCreatePassBuilderOptions": (_P,), "LLVMDisposePassBuilderOptions": (None, _P),
    "LLVMRunPasses": (_P, _P, _TEXT, _P, _P),
    "LLVMGetErrorMessage": (_P, _P), "LLVMDisposeErrorMessage": (None, _P),
    "LLVMTargetMachineEmitToMemoryBuffer": (_INT, _P, _P, _INT, _OUT, _OUT),
    "LLVMGetBufferStart": (_P, _P), "LLVMGetBufferSize": (_SIZE, _P), "LLVMDisposeMemoryBuffer": (None, _P),
}  # fmt: skip


def library() -> str:
    """The library file with MLIR and LLVM that the bindings have loaded."""
    bindings = importlib.import_module("mlir._mlir_libs._mlir")
    return str(Path(str(bindings.__file__)).with_name("libMLIRPythonCAPI.so"))


@functools.cache
def _translate() -> Any:
    """MLIR's translation of a module to an LLVM context, called with the GIL since it calls diagnostic handlers."""
    function = ctypes.PyDLL(library()).mlirTranslateModuleToLLVMIR
    function.restype, function.argtypes = _P, [_P, _P]
    return function


@functools.cache
def _llvm() -> ctypes.CDLL:
    """The library of MLIR that the bindings have loaded, which includes LLVM's functions."""
    loaded = ctypes.CDLL(library())
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    for part in ("TargetInfo", "Target", "TargetMC", "AsmPrinter"):
        getattr(loaded, f"LLVMInitializeNVPTX{part}")()
    return loaded


def ptx(module: ir.Module, chip: str, features: str, passes: str = PASSES) -> str:
    """PTX of the functions of a module, which does not change.

    Parameters
    ----------
    module : mlir.ir.Module
        Functions and globals of the LLVM dialect, not in a ``gpu.module``.
    chip, features : str
        Such as ``"sm_90a"`` and ``"+ptx80"``.
    passes : str
        LLVM's passes over functions.

    Raises
    ------
    PassFailure
        If MLIR or LLVM refuses the module.
    ValueError
        For passes that LLVM does not know.
    """
    llvm, errors, message, buffer = _llvm(), [], _P(), _P()

    @_HANDLER
    def report(diagnostic: int, _: int) -> None:  # without a handler LLVM ends the process on an error
        if llvm.LLVMGetDiagInfoSeverity(diagnostic) == _ERROR:
            errors.append(_text(llvm.LLVMGetDiagInfoDescription(diagnostic), llvm.LLVMDisposeMessage))

    with contextlib.ExitStack() as stack:

        def owned(made: int | None, dispose: Any) -> int:
            assert made is not None
            stack.callback(dispose, made)
            return made

        context = owned(llvm.LLVMContextCreate(), llvm.LLVMContextDispose)
        llvm.LLVMContextSetDiagnosticHandler(context, report, None)
        translated = _translate()(native.behind(module.operation), context)
        if translated is None:
            fail(module.operation, "cannot be compiled: LLVM's verifier refuses its translation")
        owned(translated, llvm.LLVMDisposeModule)
        machine = owned(_machine(chip, features), llvm.LLVMDisposeTargetMachine)
        layout = owned(llvm.LLVMCreateTargetDataLayout(machine), llvm.LLVMDisposeTargetData)
        llvm.LLVMSetModuleDataLayout(translated, layout)
        llvm.LLVMSetTarget(translated, _TRIPLE)
        pipeline = f"function({passes})"
        if any(name.startswith(b"__nv_") for name, _ in _functions(translated)):
            _link_libdevice(translated, context)
            pipeline = f"{_INLINE},{pipeline}"
        options = owned(llvm.LLVMCreatePassBuilderOptions(), llvm.LLVMDisposePassBuilderOptions)
        if error := llvm.LLVMRunPasses(translated, pipeline.encode(), machine, options):
            raise ValueError(f"LLVM: {_text(llvm.LLVMGetErrorMessage(error), llvm.LLVMDisposeErrorMessage)}")
        failed = llvm.LLVMTargetMachineEmitToMemoryBuffer(
            machine, translated, _ASSEMBLY_FILE, ctypes.byref(message), ctypes.byref(buffer)
        )
        if failed:
            errors.append(_text(message.value, llvm.LLVMDisposeMessage))
        else:
            owned(buffer.value, llvm.LLVMDisposeMemoryBuffer)
        if errors:
            fail(module.operation, f"cannot be compiled: LLVM makes no PTX: {'; '.join(errors)}")
        return ctypes.string_at(llvm.LLVMGetBufferStart(buffer), llvm.LLVMGetBufferSize(buffer)).decode()


def _text(message: int | None, dispose: Any) -> str:
    """A message of LLVM's, which is then freed."""
    if message is None:
        return "it does not say why"
    found = ctypes.string_at(message).decode(errors="replace")
    dispose(message)
    return found


def _machine(chip: str, features: str) -> int:
    llvm, target, message = _llvm(), _P(), _P()
    if llvm.LLVMGetTargetFromTriple(_TRIPLE, ctypes.byref(target), ctypes.byref(message)):
        raise PassFailure(f"LLVM: {_text(message.value, llvm.LLVMDisposeMessage)}")
    return llvm.LLVMCreateTargetMachine(target, _TRIPLE, chip.encode(), features.encode(), _CODE_LEVEL, 0, 0)


def _functions(module: int | None) -> Iterator[tuple[bytes, int]]:
    """The functions of a module, by name."""
    llvm, size = _llvm(), _SIZE()
    function = llvm.LLVMGetFirstFunction(module)
    while function is not None:
        name = llvm.LLVMGetValueName2(function, ctypes.byref(size))
        yield ctypes.string_at(name, size.value), function
        function = llvm.LLVMGetNextFunction(function)


def _link_libdevice(module: int, context: int) -> None:
    """Link the functions of libdevice that a module calls; MLIR's library contains libdevice as bitcode."""
    llvm, library = _llvm(), _P()
    size = _SIZE.in_dll(llvm, "_mlir_embedded_libdevice_size").value
    bitcode = ctypes.addressof(ctypes.c_char.in_dll(llvm, "_mlir_embedded_libdevice"))
    data = llvm.LLVMCreateMemoryBufferWithMemoryRange(bitcode, size, b"libdevice", False)
    if llvm.LLVMGetBitcodeModuleInContext2(context, data, ctypes.byref(library)):
        raise PassFailure("LLVM does not read the libdevice of MLIR's library")
    function = llvm.LLVMGetFirstFunction(library)
    while function is not None:
        if not llvm.LLVMIsDeclaration(function):
            llvm.LLVMSetLinkage(function, _LINK_ONCE_ODR)  # only called functions are read and linked
        function = llvm.LLVMGetNextFunction(function)
    if llvm.LLVMLinkModules2(module, library):
        raise PassFailure("LLVM does not link libdevice")
