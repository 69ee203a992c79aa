# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv-opt: run kv and upstream passes on MLIR text, like mlir-opt.

The IR goes to stdout; diagnostics, dumps and timing go to stderr. The exit status is 0 if everything parsed, verified
and ran (or, with --verify-diagnostics, if the diagnostics were the expected ones), else 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kvarn.env import env
from kvarn.files import write_output

from . import opt_args, opt_guard
from .opt_args import UsageError
from .opt_guard import Phase
from .pass_options import passes_of

if TYPE_CHECKING:
    import argparse

    from kvarn.lowering.pipeline_parser import Step

    from .opt_diagnostics import Source


def main(arguments: Sequence[str] | None = None) -> int:
    """Run kv-opt on a command line (by default this process's, in a child process); returns the exit status."""
    if arguments is None:
        return opt_guard.run(lambda phase: _main(sys.argv[1:], phase))
    return _main(arguments, lambda text: None)


def _main(arguments: Sequence[str], phase: Phase) -> int:
    try:
        options, flags = opt_args.parse(arguments)
        return _run(options, flags, phase)
    except (UsageError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            return _closed_pipe()
        print(f"kv-opt: error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        # An input must never end in a traceback; this would be a defect of kv-opt.
        print(f"kv-opt: internal error: {type(error).__name__}: {error} (KVARN_DEBUG=1 shows where)", file=sys.stderr)
        if env.debug:
            traceback.print_exc()
    return 1


def _closed_pipe() -> int:
    """The reader of stdout has closed it: keep Python from reporting it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _run(options: argparse.Namespace, flags: list[tuple[str, str]], phase: Phase) -> int:
    if options.version:
        return _print_version()
    if len(options.input) > 1:
        raise UsageError(f"takes one input file, got {len(options.input)}: {' '.join(options.input)}")
    if options.pass_pipeline is not None and flags:
        raise UsageError("--pass-pipeline cannot be used together with passes as flags")
    # MLIR is imported only now, so that usage errors and --help are fast.
    from kvarn.lowering.pipeline_parser import PipelineError

    try:
        with contextlib.ExitStack() as stack:
            return _with_mlir(options, flags, phase, stack)
    except PipelineError as error:
        print(f"kv-opt: error: {error}", file=sys.stderr)
        return 1


def _reference_lowering() -> Any:
    """The reference lowering, started before a file of passes is loaded, so that it only has kvarn's passes."""
    from .semantics import ReferenceLowering

    return ReferenceLowering(forked=True)


def _with_mlir(
    options: argparse.Namespace, flags: list[tuple[str, str]], phase: Phase, stack: contextlib.ExitStack
) -> int:
    from kvarn.dialect.installed import ExtensionError

    from . import opt_run

    start = time.perf_counter()
    checks = options.check_semantics_each or options.check_semantics_of
    lowering = stack.enter_context(_reference_lowering()) if checks else None
    try:
        inserted = passes_of(options)  # before there is a context: extensions declare operations
        driver = opt_run.Driver(_settings(options), phase=phase)
    except (ValueError, TypeError, ExtensionError) as error:
        raise UsageError(str(error)) from None
    if options.emit_irdl or options.show_dialects:
        return _print_dialects(driver, options)
    if options.list_passes:
        return _list_passes()
    if not all([driver.load_dialects(_read(path, False)) for path in options.irdl_file]):
        return 1
    with driver.context:
        driver.steps = _steps(options, flags, inserted)
        if not options.run_reproducer:
            _check_printed(options, driver.steps)
        if options.dump_pass_pipeline:
            body = ",\n".join(f"  {step.text}" for step in driver.steps)
            print(f"Pass Manager with {len(driver.steps)} passes:\nbuiltin.module(\n{body}\n)\n", file=sys.stderr)
    from kvarn.lowering import remarks

    wanted = options.remarks_filter is not None or options.remarks_output is not None
    if lowering is not None:
        driver.settings.checks = _checks_of(options, driver.steps, lowering)
    counted = None
    if options.kv_bisect_limit is not None:
        from kvarn.lowering import rewrite_counts

        counted = stack.enter_context(rewrite_counts.collect(options.kv_bisect_limit))
    said = stack.enter_context(remarks.collect()) if wanted else None
    status = _process_all(driver, options)
    if said is not None:
        _write_remarks(said.matching(options.remarks_filter or ""), options.remarks_output)
    if counted is not None:
        last = f"; the last was {counted.last}" if counted.last else ""
        print(f"kv-opt: {counted.asked - counted.refused} of {counted.asked} rewrites{last}", file=sys.stderr)
    if options.mlir_timing:
        sys.stdout.flush()
        sys.stderr.write(opt_run.timing_report(driver.timer, time.perf_counter() - start))
    return status


def _write_remarks(found: Sequence[Any], output: str | None) -> None:
    """Write remarks to stderr, or to a file in the format of its suffix."""
    from kvarn.lowering import remarks

    if output is None:
        sys.stdout.flush()
        sys.stderr.write(remarks.written(found))
        return
    suffix = Path(output).suffix
    form = {".yaml": "yaml", ".yml": "yaml", ".json": "json"}.get(suffix, "text")
    write_output(output, remarks.written(found, form))


def _checks_of(options: argparse.Namespace, steps: Sequence[Step], lowering: Any) -> Any:
    """The semantics checks of a source."""
    from kvarn.lowering import registry, target as targets

    from .input_options import inputs_of, launch_of, stage_of
    from .opt_semantics import Checks
    from .semantics import Checker, Launch, model_of
    from .stages import Stages

    try:
        target = targets.by_name("sm_90a" if options.target is None else options.target).name
        stages, model = Stages(target), model_of(options.model)
        stage = stages.before(steps) if options.start_after is None else options.start_after
        stage = stage if options.stage is None else stages.check(options.stage)
        if not isinstance(options.lengths, str):
            inputs_of(options, None)
    except ValueError as error:
        raise UsageError(str(error)) from None
    names = {name for step in steps if step.ends_group for name in (step.group, step.name)}
    changing = tuple(registry.current(name) for name in options.check_semantics_of)
    for name in changing:
        if name not in names:
            raise UsageError(f"--check-semantics-of must name a pass that runs, got {name!r}")

    said = options.stage is not None or options.start_after is not None

    def checker(text: str, module: Any, stage: str | None) -> Checker:
        launch = Launch(*launch_of(options, module))
        return Checker(text, target, lowering, inputs_of(options, module), launch, model, stage)

    def begin(module: Any) -> str | None:
        return stage if said else stage_of(module) or stage

    return Checks(checker, stages, begin, changing)


def _settings(options: argparse.Namespace) -> Any:
    from .opt_run import Settings

    flags = {f.name: getattr(options, f.name) for f in dataclasses.fields(Settings) if hasattr(options, f.name)}
    flags |= {"target": _target(options), "emit": "bytecode" if options.emit_bytecode else options.emit}
    return Settings(**flags, tracebacks=env.debug)


def _steps(options: argparse.Namespace, flags: list[tuple[str, str]], inserted: Mapping[str, Any]) -> list[Step]:
    """The pipeline: the passes in the command line, then the target's pipeline if requested."""
    from kvarn.lowering import pipeline_parser, registry

    steps: list[Step] = []
    if options.pass_pipeline is not None:
        steps = pipeline_parser.parse(options.pass_pipeline)
    for name, value in flags:
        steps += pipeline_parser.flag(name, value)
    needs_code = options.emit not in ("mlir", "bytecode")
    if (options.kv_pipeline or needs_code) and options.target is None:
        wanted = "--kv-pipeline" if options.kv_pipeline else f"--emit={options.emit}"
        raise UsageError(f"{wanted} needs --target, one of {', '.join(opt_args.TARGETS)}")
    if options.kv_pipeline or (needs_code and options.pass_pipeline is None and not flags):
        steps += _default_pipeline(options, inserted)
    elif options.disable or inserted or options.start_after:
        flag = "--disable omits passes of" if options.disable else "--insert-after and --insert-before add to"
        if options.start_after:
            flag = "--start-after omits passes of"
        raise UsageError(f"{flag} --kv-pipeline, which is not run here")
    return steps if options.stop_after is None else _up_to(steps, registry.current(options.stop_after))


def _default_pipeline(options: argparse.Namespace, inserted: Mapping[str, Any]) -> list[Step]:
    """The pipeline of --target without disabled passes, with the inserted ones."""
    from kvarn.lowering import pipeline

    try:
        found = pipeline.insertions(inserted)
        settings = pipeline.Settings(frozenset(options.disable), inserted=found, start_after=options.start_after)
        whole = pipeline.steps(options.target, settings)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return [step for group in whole for step in group.split()]


def _up_to(steps: list[Step], name: str) -> list[Step]:
    """The steps up to the first pass with a name, or to the end of the group with that name."""
    for index, step in enumerate(steps):
        if (step.group == name and step.ends_group) or (step.name == name and step.group != name):
            return steps[: index + 1]
    names = ", ".join(dict.fromkeys(step.group or step.name for step in steps)) or "which is empty"
    raise UsageError(f"--stop-after must name a pass of the pipeline ({names}), got {name!r}")


def _check_printed(options: argparse.Namespace, steps: list[Step]) -> None:
    """Refuse to print the IR around a pass that does not run."""
    names = dict.fromkeys(name for step in steps for name in (step.group, step.name) if name is not None)
    for when in ("before", "after"):
        for name in getattr(options, f"print_{when}"):
            if name not in names:
                have = ", ".join(names) or "which is empty"
                raise UsageError(f"--mlir-print-ir-{when} must name a pass of the pipeline ({have}), got {name!r}")


def _target(options: argparse.Namespace) -> Any:
    if options.target is None:
        return None
    from kvarn.lowering import target

    try:
        return target.by_name(options.target)
    except ValueError as error:
        raise UsageError(f"--target: {error}") from None


# --- reading and writing ---------------------------------------------------------------------------


def _read(name: str, split: bool) -> Source:
    from .opt_diagnostics import Source

    if name == "-":
        return Source("<stdin>", sys.stdin.buffer.read())
    try:
        data = Path(name).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot open input file '{name}': {error.strerror or error}") from None
    return Source(name, data, None if split else name)


def _process_all(driver: Any, options: argparse.Namespace) -> int:
    from .opt_diagnostics import split

    source = _read(options.input[0] if options.input else "-", options.split_input_file is not None)
    chunks = [source] if options.split_input_file is None else split(source, options.split_input_file)
    outputs: list[bytes] = []
    ok = True
    for number, chunk in enumerate(chunks):
        outcome = driver.process(chunk)
        ok = ok and outcome.ok
        parts = [] if number == 0 else [(options.output_split_marker + "\n").encode()]
        if outcome.output is not None:
            parts.append(outcome.output if isinstance(outcome.output, bytes) else outcome.output.encode())
        outputs.append(b"".join(parts))
        if options.output == "-":
            _write(sys.stdout.buffer, outputs.pop())
    if options.output != "-" and ok:
        write_output(options.output, b"".join(outputs))
    return 0 if ok else 1


def _write(stream: BinaryIO, data: bytes) -> None:
    stream.write(data)
    stream.flush()


# --- about -----------------------------------------------------------------------------------------


def _list_passes() -> int:
    from kvarn.lowering import pipeline, pipeline_parser, registry

    optional = pipeline.optional()
    print("kv passes, in pipeline order; --disable takes the passes marked with *:")
    for name in registry.names():
        mark = "*" if name in optional else " "
        try:
            found = pipeline_parser.find(name)
        except pipeline_parser.PipelineError as error:
            print(f"{mark} {name:24} (cannot be loaded: {error})")
            continue
        if found is None:
            continue
        print(f"{mark} {name:24} {found.summary}")
        for option, default in _options_of(found):
            print(f"    {option}={default}")
    groups = ", ".join(name for name in optional if name not in registry.names())
    from .upstream_passes import names

    print(
        f"\nupstream passes and pipelines (described at https://mlir.llvm.org/docs/Passes); --disable takes {groups}:"
    )
    for name in names():
        print(f"  {name}")
    return 0


def _options_of(found: Any) -> list[tuple[str, str]]:
    rows = []
    for f in dataclasses.fields(found.options_class):
        default = "" if f.default in (None, dataclasses.MISSING) else str(f.default)
        rows.append((f.name.replace("_", "-"), default.lower() if isinstance(f.default, bool) else default))
    return rows


def _print_dialects(driver: Any, options: argparse.Namespace) -> int:
    from kvarn.dialect import kv

    with driver.context as context:
        if options.emit_irdl:
            text = str(kv.Kv.irdl_module(context))
            if options.output == "-":
                sys.stdout.write(text)
            else:
                write_output(options.output, text)
            return 0
        print("Available Dialects: " + ",".join(_dialect_names(context)))
    return 0


def _dialect_names(context: Any) -> list[str]:
    """Dialects known to the context, among those with bindings: MLIR's Python API cannot list dialects."""
    import mlir.dialects

    found = {"kv"}
    for folder in mlir.dialects.__path__:
        for path in Path(folder).glob("_*_ops_gen.py"):
            name = path.name[1 : -len("_ops_gen.py")]
            try:
                context.get_dialect_descriptor(name)
            except ValueError:
                continue
            found.add(name)
    return sorted(found)


def _print_version() -> int:
    import importlib.metadata

    for package in ("kvarn", "xtc-mlir-python-bindings"):
        try:
            print(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} (not installed as a package)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
