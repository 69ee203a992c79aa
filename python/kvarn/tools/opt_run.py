# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv-opt's processing of one source: parse, verify, run the passes, print.

A :class:`Driver` has the context, the steps and the settings. ``Driver.process`` takes one source (a file or a chunk of
one) and returns the output; diagnostics go to the driver's ``err`` stream immediately. This module parses no command
line, so tests call it in process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from mlir import ir

from kvarn.compilation import stage_files
from kvarn.dialect import kv, named_operands, reading
from kvarn.files import write_output
from kvarn.lowering import loading, pipeline_parser, runner
from kvarn.lowering.passes.kv import verify_kv
from kvarn.lowering.pipeline_parser import PipelineError, Step
from kvarn.lowering.runner import PassError
from kvarn.lowering.target import Target

from .opt_diagnostics import STRING_NAME, Collector, Source, check_expected, render
from .opt_guard import Phase
from .opt_semantics import Checks, WrongAnswer

_REPRODUCER = re.compile(r"\{-#(.*)#-\}", re.DOTALL)


@dataclass
class Settings:
    """How a source is processed: fields named as in ``opt_args.parse`` are flags of kv-opt."""

    verify_each: bool = True
    verify_diagnostics: str | None = None  # None, "all", "only-expected"
    verify_roundtrip: bool = False
    allow_unregistered: bool = False
    run_reproducer: bool = False
    emit: str = "mlir"
    target: Target | None = None
    generic: bool = False
    named_operands: bool = False
    debug_info: bool = False
    local_scope: bool = False
    print_before: Sequence[str] = ()
    print_after: Sequence[str] = ()
    print_before_all: bool = False
    print_after_all: bool = False
    print_after_change: bool = False
    print_after_failure: bool = False
    print_module_scope: bool = False
    print_tree: str | None = None
    dump_dir: str | None = None
    statistics: bool = False
    reproducer: str | None = None
    crash_reproducer: str | None = None
    tracebacks: bool = False
    checks: Checks | None = None

    @property
    def prints_everywhere(self) -> bool:
        """Whether printing around every step is on."""
        return self.print_before_all or self.print_after_all or self.print_after_change or self.print_after_failure


@dataclass
class Outcome:
    """The result of one source: the text or bytes to write (None: nothing), and whether it succeeded."""

    output: str | bytes | None
    ok: bool


@dataclass
class Timer:
    """Seconds by name, in the order of first use."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Failure(Exception):
    """Processing stops; all errors have been reported as diagnostics."""


class Driver:
    """Runs a pipeline on sources, in one context.

    Parameters
    ----------
    settings : Settings
    err : text stream
        Receives diagnostics.
    context : mlir.ir.Context, optional
        A context from ``kv.make_context``; by default a new one.
    phase : callable, optional
        Called with the next action, for the parent process in case MLIR ends this one.
    """

    def __init__(
        self,
        settings: Settings,
        err: TextIO | None = None,
        context: ir.Context | None = None,
        phase: Phase = lambda text: None,
    ) -> None:
        self.settings, self.err, self.phase = settings, err or sys.stderr, phase
        self.context = context or kv.make_context()
        # Python passes, printing of whole modules and the order of diagnostics require one thread.
        self.context.enable_multithreading(False)
        self.context.allow_unregistered_dialects = settings.allow_unregistered
        self.timer = Timer()
        self.steps: list[Step] = []
        self._dumped = self._inside = 0  # stages written, and passes of the current stage
        self._tree = 0

    def load_dialects(self, source: Source) -> bool:
        """Load the dialects of an IRDL file into the context; False after diagnostics."""
        from mlir.dialects import irdl

        with self.context, ir.Location.unknown(), Collector(self.context) as collector:
            self.phase(f"loading the dialects of {source.name}")
            ok = True
            try:
                module = self._parse(source, collector)
                self._check_new(module)
                irdl.load_dialects(module)  # pyright: ignore[reportAttributeAccessIssue]
            except Failure:
                ok = False
            for diagnostic in collector.take():
                self.err.write(render(diagnostic, source))
            return ok

    def _check_new(self, module: ir.Module) -> None:
        """Refuse input on which MLIR would end the process: an existing dialect, or a file without dialects."""
        found = [op for op in module.body.operations if op.operation.name == "irdl.dialect"]
        if not found:
            module.operation.location.emit_error("an IRDL file must define a dialect (irdl.dialect), got none")
            raise Failure
        for op in found:
            name = ir.StringAttr(op.operation.attributes["sym_name"]).value
            with contextlib.suppress(ValueError):
                self.context.get_dialect_descriptor(name)
                op.operation.location.emit_error(f"dialect '{name}' exists already: an IRDL file must define others")
                raise Failure

    # --- one source --------------------------------------------------------------------------------

    def process(self, source: Source) -> Outcome:
        """Parse, verify, run and print one source."""
        with self.context, ir.Location.unknown(), Collector(self.context) as collector:
            output = None
            ok = True
            try:
                output = self._run(source, collector)
            except Failure:
                ok = False
            except PipelineError as error:
                ir.Location.unknown().emit_error(str(error))
                ok = False
            if self.settings.verify_diagnostics is None:
                self._report(source, collector)
                return Outcome(output, ok)
            problems = check_expected(collector.take(), source, self.settings.verify_diagnostics == "only-expected")
            for problem in problems:
                self.err.write(render(problem, source))
            return Outcome(output, not problems)

    def _report(self, source: Source, collector: Collector) -> None:
        """Write the diagnostics so far, unless they are collected for comparison."""
        if self.settings.verify_diagnostics is None:
            for diagnostic in collector.take():
                self.err.write(render(diagnostic, source))
            self.err.flush()

    def _run(self, source: Source, collector: Collector) -> str | bytes | None:
        self.phase(f"reading {source.name}")
        with self.timer.measure("Parser"):
            module = self._parse(source, collector)
            self._check_kv(module)
        self._report(source, collector)
        steps = self._reproduced(source) if self.settings.run_reproducer else self.steps
        if self.settings.verify_roundtrip:
            self._check_roundtrip(module)
        if self.settings.reproducer:
            write_reproducer(self.settings.reproducer, module, steps, self.settings.verify_each)
        self._dump(module, None)
        run = None
        with self._checking(module):
            if self.settings.checks is not None:
                run = self.settings.checks.of(module)
        for step in steps:
            self._step(step, module, source, collector)
            with self._checking(module):
                if run is not None:
                    run.after(step, module)
        self.phase(f"writing {self.settings.emit} of {source.name}")
        with self.timer.measure("Output"):
            return self._emit(module, source)

    @contextlib.contextmanager
    def _checking(self, module: ir.Module) -> Iterator[None]:
        """A context around runs of a kernel: a wrong answer becomes an error at the module."""
        if self.settings.checks is None:
            yield
            return
        self.phase("running the kernel")
        try:
            with self.timer.measure("Semantics"):
                yield
        except WrongAnswer as error:
            module.operation.location.emit_error(str(error))
            raise Failure from None

    def _parse(self, source: Source, collector: Collector) -> ir.Module:
        before = collector.errors
        try:
            return reading.parse(source.data, self.context, source.path)
        except reading.TextError as error:
            found = error.problem
            ir.Location.file(source.name, found.line, found.column).emit_error(found.message)
            raise Failure from None
        except ir.MLIRError as error:  # pyright: ignore[reportAttributeAccessIssue]
            if collector.errors == before:  # every failure should have a diagnostic; this is for one without
                ir.Location.unknown().emit_error(str(error))
            raise Failure from None

    def _check_kv(self, module: ir.Module) -> None:
        """Run the verifiers of kv ops, which MLIR 22.1 cannot call."""
        if verify_kv.count_problems(module):
            raise Failure

    def _step(self, step: Step, module: ir.Module, source: Source, collector: Collector) -> None:
        reproducer = self.settings.crash_reproducer
        if reproducer:  # written before the pass, which may end the process; removed if it succeeds
            write_reproducer(reproducer, module, [step], self.settings.verify_each)
        self.phase(f"running pass '{step.name}' on {source.name}")
        sys.stdout.flush()
        self.err.flush()
        try:
            with self.timer.measure(step.name):
                runner.run_step(
                    step,
                    module,
                    verify=self.settings.verify_each,
                    configure=lambda m: self._configure(m, step),
                    tracebacks=self.settings.tracebacks,
                )
                if self.settings.verify_each and step.name != "verify-kv":
                    self._check_kv(module)
        except (PassError, Failure) as failure:
            if self.settings.print_after_failure and isinstance(failure, Failure):
                self.err.write(f"// -----// IR Dump After {step.title} Failed ({step.name}) //----- //\n")
                self.err.write(self._asm(module) + "\n\n")
            if not collector.errors and isinstance(failure, PassError):
                module.operation.location.emit_error(f"pass '{step.name}' failed: {failure}")
            self._report(source, collector)
            if reproducer and self.settings.verify_diagnostics is None:
                again = f"kv-opt --run-reproducer {reproducer}{loading.flags([step])}"
                self.err.write(f"kv-opt: to reproduce it, run: {again}\n")
            raise Failure from None
        finally:
            self._report(source, collector)
        if reproducer:
            Path(reproducer).unlink()
        self._dump(module, step)
        if self.settings.print_tree is not None:
            self._print_tree(step, module)

    def _configure(self, manager: Any, step: Step) -> None:
        """Enable printing and statistics of one step's pass manager."""
        s = self.settings
        if s.statistics:
            manager.enable_statistics()
        before, after = _names(step, s.print_before, self.steps, 0), _names(step, s.print_after, self.steps, -1)
        if not (s.prints_everywhere or before or after) or s.print_tree is not None:
            return
        manager.enable_ir_printing(
            print_before_all=s.print_before_all or before,
            # With print_after_failure MLIR does not print after passes that succeed.
            print_after_all=s.print_after_all or after or s.print_after_failure,
            print_module_scope=s.print_module_scope,
            print_after_change=s.print_after_change,
            print_after_failure=s.print_after_failure,
            enable_debug_info=s.debug_info,
            print_generic_op_form=s.generic,
        )

    def _reproduced(self, source: Source) -> list[Step]:
        """The steps of the reproducer at the end of a source."""
        pipeline, verify = read_reproducer(source.data.decode("utf-8", "replace"))
        self.settings = dataclasses.replace(self.settings, verify_each=verify)
        return pipeline_parser.parse(pipeline)

    def _check_roundtrip(self, module: ir.Module) -> None:
        """Print and parse the module, as text and as bytecode, and check that it does not change."""
        plain = _text(module, enable_debug_info=True)
        generic = _text(module, enable_debug_info=True, print_generic_op_form=True)
        forms = {"text": plain, "generic text": generic, "text with named operands": named_operands.named(plain)}
        for form, written in (*((n, t.encode()) for n, t in forms.items()), ("bytecode", _bytecode(module))):
            again = reading.parse(written, self.context)
            if _text(again, enable_debug_info=True) != plain:
                module.operation.location.emit_error(f"round trip through {form} changes the module")
                raise Failure

    # --- printing ----------------------------------------------------------------------------------

    def _asm(self, module: ir.Module) -> str:
        s = self.settings
        asm = _text(
            module, enable_debug_info=s.debug_info, print_generic_op_form=s.generic, use_local_scope=s.local_scope
        )
        return named_operands.named(asm) if s.named_operands else asm

    def _emit(self, module: ir.Module, source: Source) -> str | bytes:
        if self.settings.emit == "mlir":
            asm = self._asm(module)
            if self.settings.debug_info:
                asm = asm.replace(f'loc("{STRING_NAME}":', f'loc("{source.name}":')
            return asm + "\n\n"
        if self.settings.emit == "bytecode":
            return _bytecode(module)
        from .opt_emit import EmitError, emit

        assert self.settings.target is not None
        try:
            code = emit(module, self.settings.emit, self.settings.target)
        except EmitError:
            raise Failure from None
        if self.settings.dump_dir is not None:
            path = Path(self.settings.dump_dir) / f"{self._dumped:02d}_emit_{self.settings.emit}.{self.settings.emit}"
            path.write_bytes(code if isinstance(code, bytes) else code.encode())
        return code

    def _dump(self, module: ir.Module, step: Step | None) -> None:
        """Write a stage, numbered and named as by KVARN_DUMP_TO: passes inside a stage get a decimal."""
        if self.settings.dump_dir is None:
            return
        number = f"{self._dumped:02d}"
        if step is None or step.ends_group:
            name = "input" if step is None else step.group or step.name
            self._dumped, self._inside = self._dumped + 1, 0
        else:
            name, self._inside = step.name, self._inside + 1
            number += f".{self._inside:02d}"
        self._write(Path(self.settings.dump_dir, f"{number}_{name.replace('-', '_')}.mlir"), module)

    def _print_tree(self, step: Step, module: ir.Module) -> None:
        s = self.settings
        wanted = s.print_after_all or _names(step, s.print_after, self.steps, -1)
        if wanted and s.print_tree is not None:
            self._write(Path(s.print_tree, "builtin_module_no-symbol-name", f"{self._tree}_{step.name}.mlir"), module)
        self._tree += 1

    def _write(self, path: Path, module: ir.Module) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._asm(module) + "\n", encoding="utf-8")


def _names(step: Step, names: Sequence[str], steps: Sequence[Step], edge: int) -> bool:
    """Whether one of some names is a step's own, or that of its group, for the group's first or last step."""
    if step.name in names:
        return True
    return step.group in names and [s for s in steps if s.group == step.group][edge] is step


def _text(module: ir.Module, **form: bool) -> str:
    """The module's text without trailing empty lines; ``form`` are options of ``Operation.get_asm``."""
    return str(module.operation.get_asm(**form)).rstrip("\n")


def _bytecode(module: ir.Module) -> bytes:
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


# --- reproducers -----------------------------------------------------------------------------------


def write_reproducer(path: str, module: ir.Module, steps: Sequence[Step], verify_each: bool) -> None:
    """Write a module and its pipeline in mlir-opt's format. OSError if it cannot be written."""
    write_output(path, stage_files.reproducer(module, steps, verify_each))


def read_reproducer(text: str) -> tuple[str, bool]:
    """(pipeline, verify_each) of the reproducer in a text; PipelineError without one."""
    resources = _REPRODUCER.findall(text)
    found = re.search(r'pipeline:\s*"((?:[^"\\]|\\.)*)"', resources[-1]) if resources else None
    if found is None:
        raise PipelineError("--run-reproducer needs an input that ends with a mlir_reproducer resource")
    verify = re.search(r"verify_each:\s*(true|false)", resources[-1])
    pipeline = re.sub(r"\\(.)", r"\1", found.group(1))
    return pipeline, verify is None or verify.group(1) == "true"


# --- timing ----------------------------------------------------------------------------------------


def timing_report(timer: Timer, total: float) -> str:
    """The times in the format of mlir-opt's list, the longest first."""
    rule = "===" + "-" * 73 + "==="
    rows = sorted(timer.seconds.items(), key=lambda item: -item[1])
    rest = max(total - sum(timer.seconds.values()), 0.0)
    lines = [rule, "... Execution time report ...".center(79).rstrip(), rule]
    lines += [f"  Total Execution Time: {total:.4f} seconds", "", "  ----Wall Time----  ----Name----"]
    for name, seconds in [*rows, ("Rest", rest), ("Total", total)]:
        lines.append(f"  {seconds:8.4f} ({100 * seconds / max(total, 1e-9):5.1f}%)  {name}")
    return "\n".join(lines) + "\n"
