# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Execution of host artifacts: MLIR's JIT compiles the LLVM dialect in the artifact.

A host kernel is called with its grid, its block, a range of linear block ids and its parameters. Large grids are split
over threads (ctypes releases the GIL); blocks are independent.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvarn.artifact import Artifact, Entry
from kvarn.artifact.bundle import BundleError
from kvarn.env import env
from kvarn.forks import no_fork, reinit_after_fork

from . import ownership, timeline
from .binding import HOST

_C_TYPES: dict[str, Any] = {
    "ptr": ctypes.c_void_p, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "i16": ctypes.c_int16, "i8": ctypes.c_int8,
    "i1": ctypes.c_int8, "f64": ctypes.c_double, "f32": ctypes.c_float, "f16": ctypes.c_uint16, "bf16": ctypes.c_uint16,
    "f8e4m3": ctypes.c_uint8, "f8e5m2": ctypes.c_uint8, "f8e8m0": ctypes.c_uint8,
}  # fmt: skip
# Handing blocks to another thread pays off only for enough work; grids below this many thread-iterations run in the
# caller's thread.
_PARALLEL_THREADS = 64
_pool: ThreadPoolExecutor | None = None
_pool_lock = reinit_after_fork(threading.Lock())


def _workers() -> int:
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _executor() -> ThreadPoolExecutor:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_workers(), thread_name_prefix="kvarn-host")
        return _pool


def _forget_pool() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_pool)  # the pool's threads do not exist in the child


def _run_all(calls: Sequence[Callable[[], None]]) -> None:
    """Run the calls in the pool's threads; return, or raise, when none of them is running.

    If the wait is interrupted (Ctrl-C), pending calls are cancelled and running ones awaited, since they write to
    memory that the caller may free next.
    """
    made: list[Future[None]] = [Future() for _ in calls]

    def work(future: Future[None], call: Callable[[], None]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    try:
        for future, call in zip(made, calls, strict=True):
            _executor().submit(work, future, call)
        for future in made:
            future.result()
    except BaseException:
        waiting = made
        while waiting:
            with contextlib.suppress(BaseException):  # another Ctrl-C; the first one is raised at the end
                waiting = [f for f in waiting if not f.cancel() and not f.done()]
                if waiting:
                    waiting[0].exception()
        raise


class HostKernelError(RuntimeError):
    """An assertion of a kernel failed on the host target."""


class HostProgram:
    """The compiled functions of a host artifact."""

    def __init__(self, artifact: Artifact):
        if artifact.target != "host":
            raise ValueError(f"the artifact must be for target host, got {artifact.target}")
        text = artifact.code.get("llvm")
        if not isinstance(text, str):
            raise BundleError(f"host artifact {artifact.name!r} must have code['llvm'], got {', '.join(artifact.code)}")
        from mlir import ir
        from mlir.execution_engine import ExecutionEngine

        from kvarn.dialect import text as dialect_text

        self.artifact = artifact
        context = ir.Context()  # local to this call: it takes 2 MB that the compiled code does not need
        context.enable_multithreading(False)  # useless for one module, and a forked child would wait for its threads
        with no_fork(), context:
            fatal = dialect_text.problem(text)
            if fatal is not None:
                raise BundleError(f"host artifact {artifact.name!r} must be MLIR: line {fatal.line}: {fatal.message}")
            try:
                self._engine = ExecutionEngine(ir.Module.parse(text), opt_level=env.host_opt)
            except (ir.MLIRError, RuntimeError) as error:  # pyright: ignore[reportAttributeAccessIssue]
                raise BundleError(f"host artifact {artifact.name!r} must be in MLIR's LLVM dialect: {error}") from None
        self._functions = {e.name: self._function(e.name) for e in artifact.entries}
        for entry in artifact.entries:
            ownership.load(entry, HOST, self._set_variable)
            timeline.load(entry, HOST, self._set_variable)

    def _function(self, name: str) -> Any:
        address = self._engine.raw_lookup(name)
        if not address:
            raise BundleError(f"host artifact {self.artifact.name!r} does not define {name!r}")
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def _set_variable(self, name: str, value: int) -> None:
        variable = self._engine.raw_lookup(name.removeprefix("_mlir_"))
        ctypes.c_int64.from_address(variable).value = value

    def run(self, entry: Entry, grid: Sequence[int], block: Sequence[int], values: Sequence[Any]) -> None:
        """Run a grid to completion.

        Parameters
        ----------
        entry : Entry
        grid, block : sequence of 3 int
        values : sequence
            One number per parameter of the entry, in order; pointers as ints, 16- and 8-bit floats as their bits.

        Raises
        ------
        HostKernelError
            If an assertion of the kernel failed, with its message.
        kvarn.sanitizer.ownership.OwnershipError
            If the kernel checks page ownership and accessed a page that it must not.
        """
        total = grid[0] * grid[1] * grid[2]
        threads = block[0] * block[1] * block[2]
        if total == 0 or threads == 0:
            return
        timeline.before(entry)
        watched = ownership.accesses(entry)
        if watched:
            ownership.before(HOST)
        cells = [_C_TYPES[p.type](v) for p, v in zip(entry.params, values, strict=True)]
        status = ctypes.c_int32(0)
        workers = min(_workers(), total) if total * threads >= _PARALLEL_THREADS else 1
        bounds = [total * i // workers for i in range(workers + 1)]
        calls = [self._call(entry, grid, block, cells, status, bounds[i], bounds[i + 1]) for i in range(workers)]
        if workers == 1:
            calls[0]()
        else:
            _run_all(calls)
        if status.value:
            messages = entry.attributes.get("assertions", ())
            which = status.value - 1
            text = messages[which] if which < len(messages) else f"number {which}"
            failed = HostKernelError(f"kernel {entry.name!r}: assertion failed: {text}")
            if watched:
                ownership.after_failure(HOST, failed)
            raise failed
        if watched:
            ownership.after(HOST)

    def _call(self, entry: Entry, grid: Any, block: Any, cells: list[Any], status: Any, first: int, last: int) -> Any:
        """A call of one range of blocks, in packed form: an array of pointers to the arguments."""
        head = [ctypes.c_void_p(ctypes.addressof(status))]
        head += [ctypes.c_int32(v) for v in (*grid, *block)]
        head += [ctypes.c_int64(first), ctypes.c_int64(last)]
        everything = [*head, *cells]
        packed = (ctypes.c_void_p * len(everything))(*(ctypes.addressof(c) for c in everything))
        function = self._functions[entry.name]

        def call() -> None:
            function(ctypes.addressof(packed))
            _ = everything  # the closure keeps the cells alive

        return call


# --- the clock of traced kernels ------------------------------------------------------------------

_CYCLES = """
llvm.func @cycles(%to: !llvm.ptr) attributes {llvm.emit_c_interface} {
  %c = llvm.call_intrinsic "llvm.readcyclecounter"() : () -> i64
  llvm.store %c, %to : i64, !llvm.ptr
  llvm.return
}
"""


@functools.cache
def _cycles_engine() -> Any:
    from mlir import ir
    from mlir.execution_engine import ExecutionEngine

    context = ir.Context()
    context.enable_multithreading(False)
    with no_fork(), context:
        return ExecutionEngine(ir.Module.parse(_CYCLES), opt_level=0)


def cycles() -> int:
    """The processor's cycle counter, which is the clock of traced kernels on the host."""
    found = ctypes.c_int64()
    cell = ctypes.c_void_p(ctypes.addressof(found))
    packed = (ctypes.c_void_p * 1)(ctypes.addressof(cell))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_cycles_engine().raw_lookup("cycles"))(ctypes.addressof(packed))
    return found.value
