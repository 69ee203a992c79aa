# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs the steps of a pipeline: the only place where passes are called.

Every step, Python's or upstream's, runs in its own ``PassManager`` on the whole module. An exception of a Python pass
never crosses MLIR's C++ frames: it becomes a diagnostic with the pass's own file and line, and the cause of a
:class:`PassError`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mlir import ir
from mlir.passmanager import PassManager

from kvarn.lowering import registry

from . import remarks, rewrite_counts
from .pass_base import NoOptions, PassFailure, PassHandle, blamed, is_interrupt
from .passes.kv import verify_kv
from .pipeline_parser import ANCHOR, Step
from .tiles.ir import tiled

Observer = Callable[[str, ir.Module], None]


class PassError(PassFailure):
    """A pass failed. Its diagnostics have been emitted; ``step`` is the failed step."""

    def __init__(self, step: Step, message: str) -> None:
        super().__init__(message)
        self.step = step


def run(
    module: ir.Module, steps: Iterable[Step], stop_after: str | None = None, observer: Observer | None = None
) -> None:
    """Run steps on a module, in order; ``observer(name, module)`` after each.

    Raises
    ------
    PassFailure
        When a pass fails; its diagnostics have been emitted.
    MLIRError
        When the module is not valid before upstream passes run on it.
    """
    with module.context:
        verified = True
        for step in steps:
            # The result of kvarn's passes is verified once; that of upstream passes is trusted, since verifying after
            # each of them would take as long as the passes.
            # Without a kernel of tiles their passes have nothing to do, and are not imported.
            if not registry.of_tiles(step.name) or any(tiled(module)):
                if step.upstream and not verified:
                    module.operation.verify()
                run_step(step, module, verify=False)
                verified = step.upstream
                if not step.upstream and step.name not in registry.NAMES:
                    check(step, module)
            if observer is not None:
                observer(step.name, module)
            if stop_after == step.name:
                return


def check(step: Step, module: ir.Module) -> None:
    """Verify the result of a pass of another package; PassError names the pass."""
    try:
        module.operation.verify()
    except ir.MLIRError as error:  # pyright: ignore[reportAttributeAccessIssue]
        raise PassError(step, f"pass '{step.name}' left a module that is not valid: {error}") from error
    if verify_kv.count_problems(module):
        raise PassError(step, f"pass '{step.name}' left a module that is not valid")


def run_step(
    step: Step,
    module: ir.Module,
    *,
    verify: bool = True,
    configure: Callable[[PassManager], None] | None = None,
    tracebacks: bool = False,
) -> None:
    """Run one step on a module.

    Parameters
    ----------
    verify : bool
        Whether MLIR verifies the module after the pass.
    configure : callable, optional
        Called with the step's ``PassManager`` before it runs, to turn on printing or statistics.
    tracebacks : bool
        Whether the error for an exception in a kv pass includes the whole traceback.

    Raises
    ------
    PassError
        When the pass fails; its diagnostics have been emitted to the context's handler.
    """
    call = None
    with module.context:
        manager = PassManager(ANCHOR)
        if step.kv is None:
            manager.add(step.text)
        else:
            call = _Call(step, module, tracebacks)
            manager.add(call, name=step.title, argument=step.name, description=step.kv.summary)
        manager.enable_verifier(verify)
        if configure is not None:
            configure(manager)
        try:
            manager.run(module.operation)
        except ir.MLIRError as error:  # pyright: ignore[reportAttributeAccessIssue]
            if call is None or not call.problem:
                raise PassError(step, str(error)) from None
            if call.raised is not None and not isinstance(call.raised, Exception):
                raise call.raised from None  # Ctrl-C
            raise PassError(step, call.problem) from call.raised


class _Call:
    """The function that MLIR calls for a Python pass. It never raises: no exception may cross the C++ frames."""

    def __init__(self, step: Step, module: ir.Module, tracebacks: bool) -> None:
        self.step, self.module, self.tracebacks = step, module, tracebacks
        self.problem = ""
        self.raised: BaseException | None = None

    def __call__(self, _: Any, external: Any) -> None:
        found, handle = self.step.kv, PassHandle()
        assert found is not None
        try:
            with rewrite_counts.within(self.step.name), remarks.within(self.step.name), _shown(self.step):
                found.run(self.module, handle if found.options_class is NoOptions else self.step.options)
            if handle.failed:
                self.problem = f"pass '{self.step.name}' signalled failure"
        except (PassFailure, ir.MLIRError) as failure:  # pyright: ignore[reportAttributeAccessIssue]
            self.problem = str(failure) or f"pass '{self.step.name}' failed"
        except BaseException as error:
            self.raised = KeyboardInterrupt() if is_interrupt(error) else error
            who, location = blamed(error, self.module.operation.location)
            self.problem = f"pass '{self.step.name}'{who} raised {type(error).__name__}: {error}{_place(error)}"
            if self.tracebacks:
                self.problem += "\n" + "".join(traceback.format_exception(error)).rstrip()
            if isinstance(self.raised, Exception):
                location.emit_error(self.problem)
        if self.problem:
            external.signal_pass_failure()


@contextlib.contextmanager
def _shown(step: Step) -> Iterator[None]:
    """If MLIR ends the process, stderr shows where in another package's pass: it cannot be caught."""
    if step.name in registry.NAMES or faulthandler.is_enabled():
        yield
        return
    try:
        faulthandler.enable()
    except (RuntimeError, ValueError, OSError):  # stderr is no file
        yield
        return
    try:
        yield
    finally:
        faulthandler.disable()


def _place(error: BaseException) -> str:
    """`` (file:line)``: the innermost line of user code that an exception passed through, or where it was raised."""
    place, found = error.__traceback__, None
    last = None
    while place is not None:
        last = place
        package = place.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("kvarn", "mlir") and package not in sys.stdlib_module_names - {"__main__"}:
            found = place
        place = place.tb_next
    at = found or last
    return f" ({at.tb_frame.f_code.co_filename}:{at.tb_lineno})" if at is not None else ""


__all__ = ["Observer", "PassError", "check", "run", "run_step"]
