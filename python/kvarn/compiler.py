# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compile kernels: from Python, or from kv IR, to an artifact.

``kv.compile(kernel, *specs, target=...)`` gives a :class:`~kvarn.compiled.Kernel`: the code at every stage, the facts
about it, and a way to launch it. No GPU is needed to compile. Compiled code is kept on disk, keyed by the kernel's IR,
the target, the settings and kvarn's own sources. ``KVARN_DUMP_TO``, ``KVARN_OVERRIDE_DIR``, ``KVARN_CHECK`` and
``KVARN_REPRODUCER`` act here (``docs/compiling.md``).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlir import ir

from kvarn import bundle, errors, forks, stage_files
from kvarn.artifact import Arg, Artifact, Entry, Param, Step, Workspace
from kvarn.cache import cache_key, compile_cache
from kvarn.compiled import Kernel, load
from kvarn.dialect import dtypes, kv, layout, types
from kvarn.dialect import text as dialect_text
from kvarn.env import env
from kvarn.lowering import emit, pipeline
from kvarn.lowering.expand import tuned
from kvarn.lowering.pass_base import PassFailure, fail
from kvarn.lowering.rewrite import kernels, walk
from kvarn.lowering.target import Target, by_name, of_capability

_local = threading.local()


def context() -> ir.Context:
    """This thread's compile context; made on first use, since loading the dialect takes some milliseconds."""
    found = getattr(_local, "context", None)
    if found is None:
        found = _local.context = kv.make_context()
    return found


@contextlib.contextmanager
def diagnosed(c: ir.Context) -> Iterator[None]:
    """Turn failures of MLIR and of passes into errors that show the user's source. No fork falls into it."""
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
                f"{located.message}\n  see it again: {command}", located.location, located.callers
            )
        raise located from None
    finally:
        found.clear()


@functools.cache
def sources_digest() -> str:
    """SHA-256 over kvarn's own Python sources: part of every key of the disk cache."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parent
    for folder in ("", "dsl", "dialect", "dialect/ops", "lowering", "lowering/expand"):
        for path in sorted((package / folder).glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def default_target() -> str:
    """The target of the machine: ``KVARN_TARGET``, else its GPU's, else ``host``."""
    if env.target:
        return by_name(env.target).name
    from kvarn.runtime import device, driver

    if not driver.status().usable:
        return "host"
    return of_capability(*device.device(device.current_ordinal()).capability).name


def parse(text: str) -> ir.Module:
    """Parse MLIR text in this thread's context; a KernelError (a ValueError) with the place of the mistake."""
    c = context()
    with diagnosed(c):
        return _parse(text, c)


def _parse(text: str, c: ir.Context) -> ir.Module:
    fatal = dialect_text.problem(text.encode())
    if fatal is not None:
        raise errors.KernelError(fatal.message, errors.SourceLocation("-", fatal.line, fatal.column))
    return ir.Module.parse(text, c)


def stages_of(source: str, target: str, settings: pipeline.Settings | None) -> Mapping[str, str]:
    """The IR after each pass, by the pass's name; first ``"input"``, the source itself."""
    found: dict[str, str] = {"input": source}
    module = parse(source)
    with diagnosed(module.context):
        pipeline.run(module, pipeline.steps(target, settings), observer=lambda name, m: found.__setitem__(name, str(m)))
    return found


def llvm_ir_of(text: str) -> str:
    """LLVM IR of the last stage's text."""
    with forks.no_fork():
        return emit.llvm_ir(parse(text))


def compile(
    kernel: Any,
    *specs: Any,
    target: str | Target | None = None,
    disable: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
    check: bool | None = None,
    reproducer: str | Path | None = None,
) -> Kernel:
    """Compile a kernel.

    Parameters
    ----------
    kernel : kv.kernel function, mlir.ir.Module, or str
        A DSL kernel, or kv IR with one kernel.
    specs
        For a DSL kernel, one an argument: a cache or its ``.spec``, a dtype, ``kv.Buffer[dtype, rank]``.
    target : str, optional
        ``"sm_80"``, ``"sm_90a"``, ``"sm_100a"``, ``"host"``, ...; default: the machine's.
    disable : sequence of str
        Optimising passes to leave out, to see what each is worth.
    options : mapping of str to str
        Options by pass name, as a pipeline writes them: ``{"plan-kv-access": "read-only=false"}``.
    check : bool, optional
        Whether accesses to caches are checked when the kernel runs; default: ``KVARN_CHECK``.
    reproducer : path, optional
        When a pass fails, write the module and the pipeline there, for kv-opt; default: ``KVARN_REPRODUCER``.

    Returns
    -------
    Kernel

    Raises
    ------
    kvarn.errors.KernelError
        If the kernel cannot be compiled; names the user's file, line and column.
    ValueError
        For an unknown target or pass.
    """
    chosen = by_name(target if target is not None else default_target())
    settings = pipeline.Settings(frozenset(disable), dict(options or {}), env.check if check is None else check)
    steps = pipeline.steps(chosen, settings)
    c = context()
    with diagnosed(c):
        module = as_module(kernel, specs, c)
        text = str(module)
        key = key_of("kernel", text, chosen, settings)
        found = load_cached(key)
        if found is None:
            found = lower(module, chosen, steps, reproducer)
            save_cached(key, found)
    return Kernel(found, text, settings)


def as_module(kernel: Any, specs: Sequence[Any], c: ir.Context) -> ir.Module:
    """kv IR of a DSL kernel, a module (copied) or text."""
    if isinstance(kernel, ir.Module):
        if specs:
            raise TypeError(f"a module takes no specs, got {len(specs)}")
        return ir.Module.parse(str(kernel.operation.get_asm(enable_debug_info=True)), c)
    if isinstance(kernel, str):
        if specs:
            raise TypeError(f"MLIR text takes no specs, got {len(specs)}")
        return _parse(kernel, c)
    if not hasattr(kernel, "trace"):
        raise TypeError(
            f"kernel must be a @kv.kernel function, an MLIR module or MLIR text, got {type(kernel).__name__}"
        )
    return kernel.trace(specs, context=c)


def lower(
    module: ir.Module,
    target: Target,
    steps: Sequence[pipeline.Step],
    reproducer: str | Path | None = None,
    observer: pipeline.Observer | None = None,
) -> Artifact:
    """Run the pipeline and collect code and ABI: of a kernel, or of a program when the module held operations.

    The module is used up. With ``reproducer`` (or ``KVARN_REPRODUCER``) a failure leaves a file that kv-opt runs;
    ``observer(name, module)`` is called after each pass.
    """
    path = reproducer or env.reproducer
    if not path:
        return _lower(module, target, steps, observer)
    # Written first, since MLIR ends the process on some mistakes.
    options = "" if target.is_host else f" --emit=ptx --target={target.name}"
    command = stage_files.write_reproducer(path, stage_files.reproducer(module, steps), options)
    try:
        made = _lower(module, target, steps, observer)
    except (ir.MLIRError, PassFailure) as error:  # pyright: ignore[reportAttributeAccessIssue]
        error.reproducer = command  # type: ignore[union-attr]
        raise
    Path(path).unlink()
    return made


def _lower(
    module: ir.Module, target: Target, steps: Sequence[pipeline.Step], observer: pipeline.Observer | None
) -> Artifact:
    entries: list[Entry] = []
    files = stage_files.StageFiles(module, target.name) if stage_files.wanted() else None

    def observe(name: str, m: ir.Module) -> None:
        if files is not None:
            files.stage(name, m)
        if name == "check-kv-lowered":
            for function in kernels(m):
                try:
                    entry = entry_of(function)
                except (ValueError, KeyError) as error:  # a record that was written by hand, or left by another's pass
                    fail(function, f"must have arguments that can be passed to it: {error}")
                if entry.shared_bytes > target.shared_bytes:
                    most = f"{target.shared_bytes} bytes of shared memory on {target.name}"
                    fail(function, f"must use at most {most}, got {entry.shared_bytes}")
                entries.append(entry)
                emit.set_launch_bounds(function)
                # The record is in the entry now; its types would keep the text from parsing where kv is unknown.
                for attribute in [a for a in function.attributes if a.startswith("kv.")]:
                    del function.attributes[attribute]
        if observer is not None:
            observer(name, m)

    if files is not None:
        files.stage("input", module)
    pipeline.run(module, steps, observer=observe)
    if not entries:
        raise ValueError("the module must have a kernel (a gpu.func with the kernel attribute), got one without")
    name, args, steps_, workspaces = program_of(module, entries) or (entries[0].name, (), (), ())
    if target.is_host:
        # The JIT would only say that it failed.
        for op in walk(module, lambda name: name.partition(".")[0] not in ("llvm", "builtin")):
            fail(op, "has no lowering on the host target")
        return Artifact(name, "host", "", {"llvm": str(module)}, tuple(entries), args, steps_, workspaces)
    text = emit.ptx(module, target)
    if files is not None:
        text = files.code("ptx", text)
    return Artifact(name, target.name, emit.isa_of(text), {"ptx": text}, tuple(entries), args, steps_, workspaces)


def program_of(
    module: ir.Module, entries: Sequence[Entry]
) -> tuple[str, tuple[Arg, ...], tuple[Step, ...], tuple[Workspace, ...]] | None:
    """Name, arguments, steps and workspaces that ``extract-kv-program`` left on a module; takes them off it."""
    attributes = module.operation.attributes
    if "kv.program" not in attributes:
        return None
    record = json.loads(ir.StringAttr(attributes["kv.program"]).value)
    described: list[ir.DictAttr | None] = [None] * len(record["arg_types"])
    if "kv.program_args" in attributes:
        described = [ir.DictAttr(d) for d in ir.ArrayAttr(attributes["kv.program_args"])]
        del attributes["kv.program_args"]
    del attributes["kv.program"]
    with module.context:
        parsed = [ir.Type.parse(t) for t in record["arg_types"]]
    args = tuple(_arg(i, t, d, 0, False) for i, (t, d) in enumerate(zip(parsed, described, strict=True)))
    shared = {entry.name: entry.shared_bytes for entry in entries}
    steps = tuple(Step(**s, shared_bytes=shared[s["entry"]]) for s in record["steps"])
    return record["name"], args, steps, tuple(Workspace(**w) for w in record["workspaces"])


# --- the ABI record ----------------------------------------------------------------------------------


def entry_of(function: ir.Operation) -> Entry:
    """The ABI of a lowered kernel, from the attributes that the passes left on it."""
    attributes = function.attributes
    with function.context:
        arg_types = [ir.TypeAttr(t).value for t in ir.ArrayAttr(attributes["kv.arg_types"])]
        described = [ir.DictAttr(d) for d in ir.ArrayAttr(attributes["kv.args"])] if "kv.args" in attributes else []
        alignments, tables = (
            list(ir.DenseI64ArrayAttr(attributes[name])) if name in attributes else []
            for name in ("kv.arg_alignments", "kv.table_alignments")
        )
        written = set(ir.DenseI64ArrayAttr(attributes["kv.written"])) if "kv.written" in attributes else set()
        args = tuple(
            _arg(
                i,
                t,
                described[i] if i < len(described) else None,
                alignments[i] if i < len(alignments) else 0,
                i in written,
                tables[i] if i < len(tables) else 0,
            )
            for i, t in enumerate(arg_types)
        )
        params = tuple(_param(ir.DictAttr(p), args) for p in ir.ArrayAttr(attributes["kv.params"]))

        def number(name: str) -> int:
            return ir.IntegerAttr(attributes[name]).value if name in attributes else 0

        def extents(name: str) -> Any:
            return tuple(ir.DenseI32ArrayAttr(attributes[name])) if name in attributes else None

        extra: dict[str, Any] = {}
        if "kv.assertions" in attributes:
            extra["assertions"] = [ir.StringAttr(a).value for a in ir.ArrayAttr(attributes["kv.assertions"])]
        if "kv.programmatic" in attributes:
            extra["programmatic"] = True
        return Entry(
            ir.StringAttr(attributes["sym_name"]).value, args, params, extents("kv.block"), number("kv.max_threads"),
            number("kv.shared_bytes"), extents("kv.cluster"), extra,
        )  # fmt: skip


def _arg(
    index: int, type_: ir.Type, described: ir.DictAttr | None, alignment: int, written: bool, table_alignment: int = 0
) -> Arg:
    name = ir.StringAttr(described["name"]).value if described is not None else f"arg{index}"
    if isinstance(type_, ir.MemRefType):
        memref = ir.MemRefType(type_)
        dtype = _dtype(str(memref.element_type), described)
        return Arg(name, "buffer", dtype, memref.rank, None, max(alignment, dtype.itemsize), written)
    kind = types.type_name(type_)
    if kind == "tma":
        return Arg(name, "tensormap", spec=types.tma_spec_of(type_), written=written)
    if kind in ("cache", "collection", "operand"):
        spec = types.spec_of(type_)
        # Pools start at a multiple of 16 bytes, a layer of one at a multiple of its rows.
        alignment = min(16, layout.lowbit(spec.head_size * spec.dtype.itemsize))
        return Arg(name, kind, None, 0, spec, alignment, written, table_alignment)
    return Arg(name, "scalar", _dtype(str(type_), described))


def _dtype(element: str, described: ir.DictAttr | None) -> dtypes.DType:
    """The dtype of an MLIR element type, with the sign that the record keeps."""
    if described is not None and "dtype" in described and ir.StringAttr(described["dtype"]).value:
        return dtypes.by_name(ir.StringAttr(described["dtype"]).value)
    return dtypes.by_mlir(element)


def _param(record: ir.DictAttr, args: Sequence[Arg]) -> Param:
    index, name = ir.IntegerAttr(record["arg"]).value, ir.StringAttr(record["field"]).value
    field = next(f for f in args[index].fields if f.name == name)
    return Param(index, name, field.type)


# --- the disk cache ----------------------------------------------------------------------------------


def key_of(kind: str, what: Any, target: Target, settings: pipeline.Settings) -> str:
    """The disk cache's key of something compiled for a target: ``what`` is IR or what it is made from."""
    return cache_key({
        "kind": kind, "what": what, "target": target.name, "disable": sorted(settings.disable),
        "options": dict(settings.options), "check": settings.check, "sources": sources_digest(),
        "tuned": tuned.digest() if "kv.attention" in str(what) else "",
    })  # fmt: skip


def load_cached(key: str) -> Artifact | None:
    """An artifact from the disk cache."""
    if env.always_compile or stage_files.wanted():
        return None
    data = compile_cache.get(key)
    if data is None:
        return None
    try:
        return bundle.loads(data, "it")[0]
    except ValueError as error:  # its bytes are as they were written: of another kvarn, or of a bug
        compile_cache.discard(key, error)
        return None


def save_cached(key: str, made: Artifact) -> None:
    """Keep an artifact in the disk cache, unless it may be made from edited stages."""
    if env.override_dir:
        return
    compile_cache.put(key, bundle.dumps([made]))


__all__ = [
    "Kernel", "compile", "context", "default_target", "diagnosed", "entry_of", "key_of", "load", "load_cached", "lower",
    "parse", "program_of", "save_cached", "sources_digest",
]  # fmt: skip
