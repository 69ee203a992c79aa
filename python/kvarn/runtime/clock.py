# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The clock that kernels on the host read: the processor's cycle counter, through LLVM's JIT."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from kvarn.forks import no_fork

_TEXT = """
llvm.func @cycles(%to: !llvm.ptr) attributes {llvm.emit_c_interface} {
  %c = llvm.call_intrinsic "llvm.readcyclecounter"() : () -> i64
  llvm.store %c, %to : i64, !llvm.ptr
  llvm.return
}
"""


@functools.cache
def _engine() -> Any:
    from mlir import ir
    from mlir.execution_engine import ExecutionEngine

    with no_fork(), ir.Context() as context:
        context.enable_multithreading(False)
        return ExecutionEngine(ir.Module.parse(_TEXT), opt_level=0)


def cycles() -> int:
    """The counter now."""
    found = ctypes.c_int64()
    cell = ctypes.c_void_p(ctypes.addressof(found))
    packed = (ctypes.c_void_p * 1)(ctypes.addressof(cell))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_engine().raw_lookup("cycles"))(ctypes.addressof(packed))
    return found.value
