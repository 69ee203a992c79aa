# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# RUN: %python %s | FileCheck %s
"""Loading the dialect: twice, in several contexts, from several threads, and beside another MLIR of the process."""

import ctypes
import gc
import threading
import weakref

from mlir import ir

from kvarn.dialect import kv

TEXT = """
!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
func.func @f(%c: !cache, %i: i32) -> i32 {
  %0 = "kv.page"(%c, %i, %i) : (!cache, i32, i32) -> i32
  return %0 : i32
}
"""


def first_op(context: ir.Context) -> ir.OpView:
    module = ir.Module.parse(TEXT, context)
    return module.body.operations[0].regions[0].blocks[0].operations[0]


# A second load of one context does nothing (a second IRDL load would end the process).
# CHECK: idempotent: PageOp
context = kv.make_context()
kv.load(context)
kv.load(context)
with context:
    kv.load()
print("idempotent:", type(first_op(context)).__name__)

# A context that somebody else made.
# CHECK: foreign: PageOp
foreign = ir.Context()
foreign.emit_error_diagnostics = True
kv.load(foreign)
print("foreign:", type(first_op(foreign)).__name__)

# CHECK: without the dialect: refused
bare = ir.Context()
try:
    first_op(bare)
except ir.MLIRError:
    print("without the dialect: refused")

# Contexts live beside one another, and the dialect survives the end of those that were first.
# CHECK: contexts: 20
del context, foreign
gc.collect()
contexts = [kv.make_context() for _ in range(20)]
print("contexts:", sum(type(first_op(c)).__name__ == "PageOp" for c in contexts))

# CHECK: threads: 16
found: list[str] = []
shared = ir.Context()


def work(index: int) -> None:
    # Half of the threads share a context that none has loaded the dialect into yet.
    mine = kv.make_context() if index % 2 else shared
    kv.load(mine)
    found.append(type(first_op(mine)).__name__)


threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("threads:", found.count("PageOp"))

# Each context keeps its own diagnostics.
# CHECK: diagnostics: 1 0 error 3
one, other = kv.make_context(), kv.make_context()
try:
    ir.Module.parse("func.func @f() {\n\n  zork\n}", one)
except ir.MLIRError:
    pass
(severity, _, location), *_ = kv.context_diagnostics(one)
counts = len(kv.context_diagnostics(one)), len(kv.context_diagnostics(other))
print("diagnostics:", *counts, severity, location.start_line)

# They go with it, and nothing else keeps it.
# CHECK: gone: True
gone = weakref.ref(other)
del other
gc.collect()
print("gone:", gone() is None)

# MLIR's symbols stay private: another MLIR or LLVM of the process (jax, torch, triton, numba) keeps its own.
# CHECK: global symbols: []
process = ctypes.CDLL(None)
print("global symbols:", [n for n in ("mlirContextCreate", "LLVMContextCreate") if hasattr(process, n)])
