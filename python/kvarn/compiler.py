# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compile kernels: from Python, or from kv IR, to an artifact.

``kv.compile(kernel, *specs, target=...)`` gives a :class:`Kernel`: the code at every stage, the facts about it, and a way
to launch it. No GPU is needed to compile. Compiled code is kept on disk, keyed by the kernel's IR, the target, the
settings and kvarn's own sources.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlir import ir

from kvarn import artifact as artifacts
from kvarn import errors
from kvarn.artifact import Arg, Artifact, Entry, Param, Step, Workspace
from kvarn.cache import CompileCache, cache_key
from kvarn.dialect import dtypes, kv, layout, types
from kvarn.env import env
from kvarn.lowering import emit, pipeline
from kvarn.lowering.pass_base import PassFailure
from kvarn.lowering.rewrite import kernels
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
    """Turn failures of MLIR and of passes into errors that show the user's source."""
    found = kv.context_diagnostics(c)
    found.clear()
    try:
        yield
    except (ir.MLIRError, PassFailure) as error:
        raise errors.from_mlir(error, list(found)) from None
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


class Kernel:
    """A compiled kernel.

    Attributes
    ----------
    artifact : Artifact
        Code and ABI: all that the loader needs.
    asm : mapping of str to str or bytes
        The code at a stage: ``"kv"`` (kv IR), ``"gpu"`` (after the passes of kvarn), ``"nvvm"`` (the LLVM dialect), ``"llvm"``
        (LLVM IR), and on a GPU ``"ptx"``, ``"cubin"``, ``"sass"``. Stages are made when asked for.
    stages : mapping of str to str
        The IR after each pass, by pass name, in order.
    stats : mapping of str to int
        ``"registers"``, ``"spills"`` (bytes), ``"shared bytes"`` (static and dynamic); needs nvJitLink or ptxas.
    """

    def __init__(self, artifact: Artifact, source: str = "", settings: pipeline.Settings | None = None):
        self.artifact = artifact
        self._source, self._settings = source, settings

    @property
    def name(self) -> str:
        return self.artifact.name

    @property
    def target(self) -> str:
        return self.artifact.target

    @functools.cached_property
    def stages(self) -> Mapping[str, str]:
        self._need_source("stages")
        found: dict[str, str] = {"input": self._source}
        module = parse(self._source)
        steps = pipeline.steps(self.target, self._settings)
        pipeline.run(module, steps, observer=lambda name, m: found.__setitem__(name, str(m)))
        return found

    @functools.cached_property
    def asm(self) -> Mapping[str, Any]:
        return _Asm(self)

    @functools.cached_property
    def assembled(self) -> Any:
        """The cubin with the assembler's figures, for the kernel's own target."""
        from kvarn.runtime import assemble

        return assemble.assemble(self.artifact.code["ptx"], self.target)

    @property
    def stats(self) -> Mapping[str, int]:
        if self.target == "host":
            raise ValueError("stats are figures of GPU code: compile for a GPU target, got host")
        made, entry = self.assembled, self.artifact.entries[0]
        return {
            "registers": made.registers, "spills": made.spill_stores + made.spill_loads,
            "shared bytes": made.shared_bytes + entry.shared_bytes,
        }  # fmt: skip

    @property
    def n_regs(self) -> int:
        return self.stats["registers"]

    @property
    def n_spills(self) -> int:
        return self.stats["spills"]

    def _need_source(self, what: str) -> None:
        if not self._source:
            raise ValueError(f"{what} need the kernel's IR, which a loaded artifact does not hold: compile it again")

    @functools.cached_property
    def launcher(self) -> Any:
        """What binds arguments and launches: ``kvarn.runtime.launch.Launcher``, or a ``Program`` for an operation."""
        from kvarn.runtime import launch

        return launch.runner(self.artifact)

    def launch(self, grid: Any, block: Any, *args: Any, stream: Any = None) -> None:
        """Launch over a grid of blocks.

        Parameters
        ----------
        grid, block : int or tuple of up to 3 int
        args
            One object an argument: caches, buffers (``__dlpack__``, ``__cuda_array_interface__`` or NumPy), numbers.
        stream : int, or an object with ``__cuda_stream__``, optional
            Default: the current stream of the arguments' library. Ignored on ``host``, where the call returns when done.
        """
        self.launcher(grid, block, *args, stream=stream)

    def prepare(self, grid: Any, block: Any, *args: Any) -> Any:
        """Bind arguments once: a callable that launches them again at the least cost."""
        return self.launcher.prepare(grid, block, *args)

    def __getitem__(self, key: Any) -> Callable[..., None]:
        grid, block, *rest = key
        return lambda *args: self.launch(grid, block, *args, stream=rest[0] if rest else None)

    def save(self, path: Any) -> Any:
        """Write a bundle that ``kv.load`` runs where MLIR is not installed."""
        artifact = self.artifact
        if self.target != "host" and artifact.cubin(self.target) is None:
            try:
                artifact = artifact.replace(code={**artifact.code, "cubin": self.assembled.cubin})
            except RuntimeError:
                pass  # without an assembler the bundle holds PTX, which every driver can load
        return artifact.save(path)

    def __repr__(self) -> str:
        return f"<kvarn kernel {self.name} for {self.target}>"


class _Asm(Mapping[str, Any]):
    """The code of a kernel by stage; see :class:`Kernel`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel
        self._found: dict[str, Any] = dict(kernel.artifact.code)
        if kernel.target == "host":
            self._found.pop("llvm", None)

    def _names(self) -> tuple[str, ...]:
        gpu = () if self._kernel.target == "host" else ("ptx", "cubin", "sass")
        return ("kv", "gpu", "nvvm", "llvm", *gpu)

    def __getitem__(self, stage: str) -> Any:
        if stage not in self._names():
            raise KeyError(f"stages of a kernel for {self._kernel.target} are {', '.join(self._names())}; got {stage!r}")
        if stage not in self._found:
            self._found[stage] = self._make(stage)
        return self._found[stage]

    def _make(self, stage: str) -> Any:
        kernel = self._kernel
        if stage == "cubin":
            return kernel.assembled.cubin
        if stage == "sass":
            from kvarn.runtime import assemble

            return assemble.disassemble(self["cubin"])
        kernel._need_source("stages")
        if stage == "kv":
            return kernel._source
        if stage == "gpu":
            return kernel.stages["check-kv-lowered"]
        last = list(kernel.stages.values())[-1]
        return last if stage == "nvvm" else emit.llvm_ir(parse(last))

    def __iter__(self) -> Any:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())


def parse(text: str) -> ir.Module:
    """Parse MLIR text in this thread's context; ValueError with the place of the mistake."""
    c = context()
    with diagnosed(c), c:
        return ir.Module.parse(text)


def compile(
    kernel: Any,
    *specs: Any,
    target: str | Target | None = None,
    disable: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
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
    settings = pipeline.Settings(frozenset(disable), dict(options or {}))
    steps = pipeline.steps(chosen, settings)
    c = context()
    with diagnosed(c):
        module = as_module(kernel, specs, c)
        text = str(module)
        key = key_of("kernel", text, chosen, settings)
        found = load_cached(key)
        if found is None:
            found = lower(module, chosen, steps)
            save_cached(key, found)
    return Kernel(found, text, settings)


def as_module(kernel: Any, specs: Sequence[Any], c: ir.Context) -> ir.Module:
    """kv IR of a DSL kernel, a module (copied) or text."""
    if isinstance(kernel, ir.Module):
        if specs:
            raise TypeError(f"a module takes no specs, got {len(specs)}")
        with c:
            return ir.Module.parse(str(kernel))
    if isinstance(kernel, str):
        if specs:
            raise TypeError(f"MLIR text takes no specs, got {len(specs)}")
        with c:
            return ir.Module.parse(kernel)
    if not hasattr(kernel, "trace"):
        raise TypeError(f"kernel must be a @kv.kernel function, an MLIR module or MLIR text, got {type(kernel).__name__}")
    return kernel.trace([getattr(s, "spec", s) for s in specs], context=c)


def lower(module: ir.Module, target: Target, steps: Sequence[pipeline.Step]) -> Artifact:
    """Run the pipeline and collect code and ABI: of a kernel, or of a program when the module held operations.

    The module is used up.
    """
    entries: list[Entry] = []

    def observe(name: str, m: ir.Module) -> None:
        if name == "check-kv-lowered":
            for function in kernels(m):
                entries.append(entry_of(function))
                emit.set_launch_bounds(function)
                # The record is in the entry now; its types would keep the text from parsing where kv is unknown.
                for attribute in [a for a in function.attributes if a.startswith("kv.")]:
                    del function.attributes[attribute]

    pipeline.run(module, steps, observer=observe)
    if not entries:
        raise ValueError("the module has no kernel (a gpu.func with the kernel attribute)")
    name, args, steps_, workspaces = program_of(module, entries) or (entries[0].name, (), (), ())
    if target.is_host:
        return Artifact(name, "host", "", {"llvm": str(module)}, tuple(entries), args, steps_, workspaces)
    for entry in entries:
        if entry.shared_bytes > target.shared_bytes:
            raise ValueError(
                f"kernel {entry.name!r} must use at most {target.shared_bytes} bytes of shared memory on {target.name}, got {entry.shared_bytes}"
            )
    text = emit.ptx(module, target)
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
        alignments = list(ir.DenseI64ArrayAttr(attributes["kv.arg_alignments"])) if "kv.arg_alignments" in attributes else []
        written = set(ir.DenseI64ArrayAttr(attributes["kv.written"])) if "kv.written" in attributes else set()
        args = tuple(
            _arg(i, t, described[i] if i < len(described) else None, alignments[i] if i < len(alignments) else 0, i in written)
            for i, t in enumerate(arg_types)
        )
        params = tuple(_param(ir.DictAttr(p), args) for p in ir.ArrayAttr(attributes["kv.params"]))

        def number(name: str) -> int:
            return ir.IntegerAttr(attributes[name]).value if name in attributes else 0

        block = tuple(ir.DenseI32ArrayAttr(attributes["kv.block"])) if "kv.block" in attributes else None
        cluster = tuple(ir.DenseI32ArrayAttr(attributes["kv.cluster"])) if "kv.cluster" in attributes else None
        extra: dict[str, Any] = {}
        if "kv.assertions" in attributes:
            extra["assertions"] = [ir.StringAttr(a).value for a in ir.ArrayAttr(attributes["kv.assertions"])]
        if "kv.programmatic" in attributes:
            extra["programmatic"] = True
        return Entry(
            ir.StringAttr(attributes["sym_name"]).value, args, params, block, number("kv.max_threads"),
            number("kv.shared_bytes"), cluster, extra,
        )  # fmt: skip


def _arg(index: int, type_: ir.Type, described: ir.DictAttr | None, alignment: int, written: bool) -> Arg:
    name = ir.StringAttr(described["name"]).value if described is not None else f"arg{index}"
    if isinstance(type_, ir.MemRefType):
        memref = ir.MemRefType(type_)
        dtype = _dtype(str(memref.element_type), described)
        return Arg(name, "buffer", dtype, memref.rank, None, max(alignment, dtype.itemsize), written)
    kind = types.type_name(type_)
    if kind in ("cache", "collection", "operand"):
        spec = types.spec_of(type_)
        # Pools start at a multiple of 16 bytes, a layer of one at a multiple of its rows.
        return Arg(name, kind, None, 0, spec, min(16, layout.lowbit(spec.head_size * spec.dtype.itemsize)), written)
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
        "options": dict(settings.options), "sources": sources_digest(),
    })  # fmt: skip


_disk = CompileCache()


def load_cached(key: str) -> Artifact | None:
    """An artifact from the disk cache."""
    if env.always_compile:
        return None
    data = _disk.get(key)
    return None if data is None else artifacts.loads(data, "the compile cache")[0]


def save_cached(key: str, made: Artifact) -> None:
    """Keep an artifact in the disk cache."""
    _disk.put(key, artifacts.dumps([made]))


def load(path: Any, target: str | None = None) -> Kernel:
    """Load a kernel that :meth:`Kernel.save` wrote."""
    return Kernel(Artifact.load(path, target))


