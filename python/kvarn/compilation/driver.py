# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compile kernels, from Python or kv IR, to artifacts.

``kv.compile(kernel, *specs, target=...)`` returns a :class:`~kvarn.compilation.kernel.Kernel`: the code of every stage,
its statistics, and a launcher. No GPU is needed to compile. Compiled code is cached on disk under a key of the kernel's
IR, the target, the settings, kvarn's own sources, MLIR's version and the code of extensions. ``KVARN_DUMP_TO``,
``KVARN_OVERRIDE_DIR``, ``KVARN_CHECK`` and ``KVARN_REPRODUCER`` take effect here (``docs/compiling.md``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from mlir import ir

from kvarn import errors, forks
from kvarn.artifact import Arg, Artifact, Entry, Param, Step, Workspace, bundle
from kvarn.compilation import extensions, stage_files
from kvarn.compilation.disk_cache import cache_key, compile_cache
from kvarn.compilation.kernel import Kernel, load
from kvarn.dialect import dtypes, kv, native, reading, schedules, types
from kvarn.env import env
from kvarn.lowering import emit, loading, nvptx, pipeline, pipeline_parser, runner
from kvarn.lowering.pass_base import PassFailure, fail
from kvarn.lowering.passes.backend import record_kv_abi
from kvarn.lowering.rewrite import ops_named, walk
from kvarn.lowering.schedules import tuned
from kvarn.lowering.target import Target, by_name, of_capability
from kvarn.pipelines import extended

_local = threading.local()


def context() -> ir.Context:
    """This thread's compile context. It is made again after operations have been declared."""
    found = getattr(_local, "context", None)
    if found is None or not kv.is_current(found):
        found = _local.context = kv.make_context()
    return found


@contextlib.contextmanager
def diagnosed(c: ir.Context) -> Iterator[None]:
    """A context that turns failures of MLIR and passes into errors with the user's source. Forks wait for its end."""
    found = kv.context_diagnostics(c)
    found.clear()
    try:
        with forks.no_fork():
            yield
    except (ir.MLIRError, PassFailure) as error:  # pyright: ignore[reportAttributeAccessIssue]
        located = errors.from_mlir(error, list(found))
        command = getattr(error, "reproducer", "")
        if command:
            located = errors.KernelError(
                f"{located.message}\n  reproduce it with: {command}", located.location, located.callers
            )
        raise located from error.__cause__  # keep the pass's own exception as the cause
    finally:
        found.clear()


@functools.cache
def sources_digest() -> str:
    """SHA-256 over kvarn's sources and their dependencies, a part of every key of the disk cache."""
    digest = hashlib.sha256(f"{_mlir_version()} {native.available() is None}".encode())
    for path in sources():
        digest.update(path.as_posix().rpartition("/kvarn/")[2].encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def sources() -> list[Path]:
    """The files that compiled code depends on: Python sources, and tables of measured schedules."""
    package = Path(__file__).resolve().parents[1]
    files = [*package.glob("*.py")]
    for folder in ("artifact", "compilation", "dsl", "dialect", "lowering"):
        files += [path for end in ("py", "json") for path in (package / folder).rglob(f"*.{end}")]
    return sorted(files)


def _mlir_version() -> str:
    """The version of MLIR and LLVM; for local builds without metadata, the library's size and modification time.

    kvarn's sources do not determine it: they may be the same for two versions.
    """
    try:
        return metadata.version(native.BINDINGS)
    except metadata.PackageNotFoundError:
        status = Path(nvptx.library()).stat()
        return f"{status.st_size} {status.st_mtime_ns}"


def default_target() -> str:
    """The default target: ``KVARN_TARGET``, else that of the machine's GPU, else ``host``."""
    if env.target:
        return by_name(env.target).name
    from kvarn.runtime import device, driver

    if not driver.status().usable:
        return "host"
    return of_capability(*device.device(device.current_ordinal()).capability).name


def parse(text: str) -> ir.Module:
    """Parse MLIR text in this thread's context; a KernelError (a ValueError) gives the location of a syntax error."""
    c = context()
    with diagnosed(c):
        return _parse(text, c)


def _parse(text: str, c: ir.Context) -> ir.Module:
    try:
        return reading.parse(text.encode(), c)
    except reading.TextError as error:
        found = error.problem
        raise errors.KernelError(found.message, errors.SourceLocation("-", found.line, found.column)) from None


def stages_of(source: str, target: str, settings: pipeline.Settings | None) -> Mapping[str, str]:
    """The IR after each pass, by pass name; first ``"input"``, the source itself.

    The second run of a pass is named ``name#2``, and so on.
    """
    found: dict[str, str] = {"input": source}

    def keep(name: str, module: ir.Module) -> None:
        free = (n for n in itertools.chain([name], (f"{name}#{i}" for i in itertools.count(2))) if n not in found)
        found[next(free)] = str(module)

    module = parse(source)
    with diagnosed(module.context):
        runner.run(module, pipeline.steps(target, settings), observer=keep)
    return found


def llvm_ir_of(text: str) -> str:
    """The LLVM IR of the last stage."""
    with forks.no_fork():
        return emit.llvm_ir(parse(text))


def compile(
    kernel: Any,
    *specs: Any,
    target: str | Target | None = None,
    passes: Mapping[str, Any] | None = None,
    disable: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
    check: bool | str | None = None,
    reproducer: str | Path | None = None,
    lineinfo: bool = False,
    start_after: str | None = None,
) -> Kernel:
    """Compile a kernel.

    Parameters
    ----------
    kernel : kv.kernel function, mlir.ir.Module, or str
        A DSL kernel, or kv IR with one kernel.
    specs
        For a DSL kernel, one per argument: a cache or its ``.spec``, a dtype, ``kv.Buffer[dtype, rank]``.
    target : str, optional
        ``"sm_80"``, ``"sm_90a"``, ``"sm_100a"``, ``"host"``, ...; by default the machine's.
    passes : mapping, optional
        Passes to insert: ``{"after:hoist-kv-lookups": my_pass}``, as in ``kv.pipeline``.
    disable : sequence of str
        Optional passes to omit, e.g. to measure their effect.
    options : mapping of str to str
        Options by pass name, in pipeline syntax: ``{"plan-kv-access": "read-only=false"}``.
    check : bool or "ownership", optional
        Whether the kernel checks its cache accesses at run time; ``"ownership"`` also checks them against the owners of
        pages (``kv.sanitize``). Default: ``KVARN_CHECK``.
    reproducer : path, optional
        File for the module and the pipeline if a pass fails, for kv-opt. Default: ``KVARN_REPRODUCER``.
    lineinfo : bool
        Write the kernel's source lines into the PTX (``.loc``) for profilers. The code is the same.
    start_after : str, optional
        The last pass that has run on the given IR: only the passes after it run.

    Returns
    -------
    Kernel

    Raises
    ------
    kvarn.errors.KernelError
        If the kernel cannot be compiled; gives the user's file, line and column.
    ValueError
        For an unknown target, pass or option.
    """
    chosen = by_name(target if target is not None else default_target())
    settings = extended(passes, disable, options, check)
    settings = dataclasses.replace(settings, start_after=start_after)
    steps = pipeline.steps(chosen, settings)
    if start_after is not None and hasattr(kernel, "trace_into"):
        raise TypeError("start_after is for IR, an MLIR module or text: no pass has run on a @kv.kernel function")
    c = context()
    with diagnosed(c):
        module = as_module(kernel, specs, c)
        text, located = str(module), with_locations(module)
        # Assertions contain source locations, so code with checks depends on locations; other code does not.
        what = located if lineinfo or settings.check or "cf.assert" in text else text
        operations = [op.name for op in ops_named(module, *schedules.TUNED)]
        key = key_of("kernel with lines" if lineinfo else "kernel", what, chosen, settings, operations)
        found = load_cached(key)
        if found is None:
            observer = None if hasattr(kernel, "trace_into") else _check_at(steps)
            if not steps:
                emit.check_translatable(module)
            found = lower(module, chosen, steps, reproducer, observer, lineinfo)
            save_cached(key, found)
    return Kernel(found, text, settings, located, {"-": kernel} if isinstance(kernel, str) else {})


def _check_at(steps: Sequence[pipeline.Step]) -> runner.Observer:
    """An observer that verifies handwritten IR after the last pass, before LLVM gets it."""

    def observe(name: str, module: ir.Module) -> None:
        if name == steps[-1].name:
            emit.check_translatable(module)

    return observe


def with_locations(module: ir.Module) -> str:
    """A module's text with the source locations of its operations."""
    text = str(module.operation.get_asm(enable_debug_info=True))
    if "nvvm.barrier id" in text:  # its custom form does not parse a location (MLIR 22.1)
        return str(module.operation.get_asm(enable_debug_info=True, print_generic_op_form=True))
    return text


def as_module(kernel: Any, specs: Sequence[Any], c: ir.Context) -> ir.Module:
    """The kv IR of a DSL kernel, a module (copied) or text."""
    if isinstance(kernel, ir.Module):
        if specs:
            raise TypeError(f"a module takes no specs, got {len(specs)}")
        return ir.Module.parse(with_locations(kernel), c)
    if isinstance(kernel, str):
        if specs:
            raise TypeError(f"MLIR text takes no specs, got {len(specs)}")
        return _parse(kernel, c)
    if not hasattr(kernel, "trace_into"):
        raise TypeError(
            f"kernel must be a @kv.kernel function, an MLIR module or MLIR text, got {type(kernel).__name__}"
        )
    return kernel.trace(specs, context=c)


def lower(
    module: ir.Module,
    target: Target,
    steps: Sequence[pipeline_parser.Step],
    reproducer: str | Path | None = None,
    observer: runner.Observer | None = None,
    lineinfo: bool = False,
) -> Artifact:
    """Run the pipeline and collect code and ABI of a kernel, or of a program if the module has operations.

    The module is consumed. With ``reproducer`` (or ``KVARN_REPRODUCER``) a failure leaves a file for kv-opt;
    ``observer(name, module)`` is called after each pass.
    """
    path = reproducer or env.reproducer
    if not path:
        return _lower(module, target, steps, observer, lineinfo)
    # Written first, since MLIR terminates the process on some errors.
    options = loading.flags(steps) + ("" if target.is_host else f" --emit=ptx --target={target.name}")
    with module.context:
        passes = [p for step in steps for p in step.split()]
    command = stage_files.write_reproducer(path, stage_files.reproducer(module, passes), options)
    try:
        made = _lower(module, target, steps, observer, lineinfo)
    except (ir.MLIRError, PassFailure) as error:  # pyright: ignore[reportAttributeAccessIssue]
        error.reproducer = command  # type: ignore[union-attr]
        raise
    Path(path).unlink()
    return made


def _lower(
    module: ir.Module,
    target: Target,
    steps: Sequence[pipeline_parser.Step],
    observer: runner.Observer | None,
    lineinfo: bool,
) -> Artifact:
    files = stage_files.StageFiles(module, target.name) if stage_files.wanted() else None

    def observe(name: str, m: ir.Module) -> None:
        if files is not None:
            files.stage(name, m)
        if observer is not None:
            observer(name, m)

    if files is not None:
        files.stage("input", module)
    runner.run(module, steps, observer=observe)
    entries, program = take_record(module)
    name, args, launches, workspaces = program or (entries[0].name, (), (), ())
    if target.is_host:
        # The JIT would only report that it failed.
        for op in walk(module, lambda name: name.partition(".")[0] not in ("llvm", "builtin")):
            fail(op, "has no lowering on the host target")
        return Artifact(name, "host", "", {"llvm": str(module)}, entries, args, launches, workspaces)
    text = emit.ptx(module, target, lineinfo=lineinfo)
    if files is not None:
        text = files.code("ptx", text)
    return Artifact(name, target.name, emit.isa_of(text), {"ptx": text}, entries, args, launches, workspaces)


# Python keeps frames in chunks, maps a chunk for its first frame and unmaps it when that returns. Where one ends inside
# of a recursion of the passes, every call does both; a frame of half a megabyte gets a chunk with room for those calls.
_lower.__code__ = _lower.__code__.replace(co_stacksize=1 << 16)


# --- the ABI record ----------------------------------------------------------------------------------

_Program = tuple[str, tuple[Arg, ...], tuple[Step, ...], tuple[Workspace, ...]]


def take_record(module: ir.Module) -> tuple[tuple[Entry, ...], _Program | None]:
    """The kernels and the program in the record that ``record-kv-abi`` attached to a module; removes the record."""
    attributes = module.operation.attributes
    if record_kv_abi.ATTRIBUTE not in attributes:
        raise ValueError("the module must have a kernel (a gpu.func with the kernel attribute), got one without")
    record = json.loads(ir.StringAttr(attributes[record_kv_abi.ATTRIBUTE]).value)
    del attributes[record_kv_abi.ATTRIBUTE]
    with module.context:
        entries = tuple(_entry(kernel) for kernel in record["kernels"])
        program = record["program"]
        if program is None:
            return entries, None
        shared = {entry.name: entry.shared_bytes for entry in entries}
        steps = tuple(Step(**s, shared_bytes=shared[s["entry"]]) for s in program["steps"])
        workspaces = tuple(Workspace(**w) for w in program["workspaces"])
        return entries, (program["name"], tuple(map(_arg, program["args"])), steps, workspaces)


def _entry(record: dict[str, Any]) -> Entry:
    args = tuple(map(_arg, record["args"]))
    fields = {(i, f.name): f.type for i, arg in enumerate(args) for f in arg.fields}
    params = tuple(Param(p["arg"], p["field"], fields[p["arg"], p["field"]]) for p in record["params"])
    return Entry(**record | {"args": args, "params": params})


def _arg(record: dict[str, Any]) -> Arg:
    known = dict(record)
    dtype, type_ = known.pop("dtype", None), known.pop("type", None)
    if dtype is not None:
        known["dtype"] = dtypes.by_name(dtype)
    if type_ is not None:
        of = types.tma_spec_of if known["kind"] == "tensormap" else types.spec_of
        known["spec"] = of(ir.Type.parse(type_))
    return Arg(**known)


# --- the disk cache ----------------------------------------------------------------------------------


def key_of(kind: str, what: Any, target: Target, settings: pipeline.Settings, operations: Iterable[str]) -> str | None:
    """The disk cache's key of a compilation for a target; ``what`` is IR or what it is made from.

    The user's table of schedules is part of the key if it has one of the ``operations``, by name, or if extensions take
    part, which may build such operations. None if code of an extension has no digest, or if passes are inserted: these
    run at every compilation, since their output, statistics and remarks matter as much as the code.
    """
    outside = None if settings.inserted else extensions.key()
    if outside is None:
        return None
    is_tuned = bool(outside) or not schedules.TUNED.isdisjoint(operations)
    return cache_key({
        "kind": kind, "what": what, "target": target.name, "disable": sorted(settings.disable),
        "options": dict(settings.options), "check": settings.check, "trace": settings.trace,
        "after": settings.start_after, "sources": sources_digest(), "outside": outside,
        "tuned": tuned.digest() if is_tuned else "",
    })  # fmt: skip


def load_cached(key: str | None) -> Artifact | None:
    """An artifact from the disk cache."""
    if key is None or env.always_compile or stage_files.wanted():
        return None
    data = compile_cache.get(key)
    if data is None:
        return None
    try:
        return bundle.loads(data, "it")[0]
    except ValueError as error:  # intact bytes of an incompatible kvarn, or a bug
        compile_cache.discard(key, error)
        return None


def save_cached(key: str | None, made: Artifact) -> None:
    """Store an artifact in the disk cache, unless edited stages may have been used."""
    if key is None or env.override_dir:
        return
    compile_cache.put(key, bundle.dumps([made], brief=True))


__all__ = [
    "Kernel", "compile", "context", "default_target", "diagnosed", "key_of", "load", "load_cached", "lower", "parse",
    "save_cached", "sources", "sources_digest", "take_record",
]  # fmt: skip
