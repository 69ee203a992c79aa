# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``@kv.kernel``: a Python function that is traced into a ``gpu.func``.

A parameter becomes an argument according to its annotation and the spec given at compile time
(``docs/architecture.md`` has the table). A parameter annotated with ``int``, ``float``, ``bool``, ``str`` or
``tuple`` is static: its spec is a Python value, and the kernel is specialised for it. A parameter annotated with
``kv.Optional[...]`` may be absent: for a spec of None it is None while the kernel is traced, and has no argument.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import types as _types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlir import ir

import kvarn
from kvarn import settings
from kvarn.dialect import layout, page_orders, schedules, types as kv_types
from kvarn.dialect.dtypes import DType, bool_, of
from kvarn.dialect.layout import CacheSpec, CollectionSpec, OperandSpec
from kvarn.dialect.tma_layout import TmaSpec
from kvarn.dialect.verify import attribute_of
from kvarn.env import env
from kvarn.errors import KernelError, KernelTypeError, SourceLocation, UnsupportedError, from_mlir, located

from . import builder, captures, intervals
from .builder import emit, types
from .calls import lookup_of
from .frontend import Interpreter
from .handles import Cache, Collection, Handle, Operand, annotation_of
from .identity import SPECS, identity
from .memory import Buffer, BufferSpec
from .source import source_of
from .structs import STATIC, Optional, Parameter, built, flat, names_of
from .tma import TensorMap
from .values import Value, number_dtype

_HANDLES: dict[str, tuple[type, type[Handle], Callable[[CacheSpec], ir.Type]]] = {
    "cache": (CacheSpec, Cache, kv_types.cache_type),
    "collection": (CollectionSpec, Collection, kv_types.collection_type),
    "operand": (OperandSpec, Operand, kv_types.operand_type),
}


@dataclass(frozen=True)
class Argument:
    """A parameter with its spec, and its form in the kernel's signature. ``kind`` is "static" if it has none."""

    name: str
    kind: str
    spec: Any

    def mlir_type(self) -> ir.Type:
        if self.kind == "scalar":
            return types().of(self.spec)
        if self.kind == "buffer":
            return self.spec.mlir_type()
        if self.kind == "tensormap":
            return kv_types.tma_type(self.spec)
        return _HANDLES[self.kind][2](_cache_spec(self.spec))

    def value(self, value: ir.Value) -> Any:
        """The parameter's value inside the kernel."""
        if self.kind == "scalar":
            return Value(value, self.spec)
        if self.kind == "buffer":
            return Buffer(value, self.spec)
        if self.kind == "tensormap":
            return TensorMap(value, self.spec)
        return _HANDLES[self.kind][1](value, _cache_spec(self.spec))

    def record(self) -> ir.Attribute:
        """The argument's entry in ``kv.args``."""
        fields = {"name": ir.StringAttr.get(self.name), "kind": ir.StringAttr.get(self.kind)}
        if self.kind in ("scalar", "buffer"):
            dtype = self.spec if self.kind == "scalar" else self.spec.dtype
            fields["dtype"] = ir.StringAttr.get(dtype.name)
        if self.kind == "buffer" and self.spec.readonly:
            fields["access"] = ir.StringAttr.get("read")  # plan-kv-access relies on this attribute
        return ir.DictAttr.get(fields)


def _cache_spec(spec: Any) -> CacheSpec:
    return spec if isinstance(spec, CacheSpec) else spec.cache


HOST_KERNELS = 64  # specialisations of a kernel for the host that stay loaded; each owns machine code


class KernelFunction:
    """A Python kernel, made by ``@kv.kernel``.

    ``k[grid, block](*args)`` and ``k[grid, block, stream](*args)`` compile it on first use and launch it; grid and
    block are ints or tuples of up to three. A call inside another kernel inlines it.

    Attributes
    ----------
    name : str
        The kernel's symbol.
    parameters : tuple of inspect.Parameter
    options : dict
        The given options among ``max_threads``, ``block``, ``min_blocks``, ``max_registers``, ``cluster`` and
        ``schedule``.
    """

    def __init__(
        self, function: _types.FunctionType, options: dict[str, Any], names: dict[str, Any] | None = None
    ) -> None:
        self._names = names or {}
        functools.update_wrapper(self, function)
        self.__kv_kernel__ = function
        self.name = function.__name__ if function.__name__.isidentifier() else "kernel"
        self.function, self.options = function, options
        code = function.__code__
        self.location = SourceLocation(code.co_filename, code.co_firstlineno, 1)
        self.signature = inspect.signature(function)
        self.parameters = tuple(self.signature.parameters.values())
        self._compiled: dict[Any, Any] = {}
        self._captured: tuple[Callable[[Any], bool], int] = (lambda function: False, -1)
        for p in self.parameters:
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                raise self._error(UnsupportedError, f"a kernel has no parameters like *{p.name}: name each of them")

    def with_options(self, **options: Any) -> KernelFunction:
        """The same function as a kernel with other options of ``@kv.kernel``; those that are not given stay."""
        changed = {**self.options, **options}
        _option_problems(changed)
        return KernelFunction(self.function, changed, self._names)

    def __repr__(self) -> str:
        return f"<kernel {self.name}({', '.join(p.name for p in self.parameters)})>"

    def _error(self, kind: type[KernelError], message: str) -> KernelError:
        return kind(message, self.location)

    # --- arguments -----------------------------------------------------------------------------------

    @functools.cached_property
    def trees(self) -> tuple[Parameter, ...]:
        """The parameters, with the fields of structs as children; annotations written as text are evaluated."""
        lookup = lookup_of(self.function)

        def evaluate(name: str, text: str, scope: type | None) -> Any:
            names = {**self._names, **(names_of(scope) if scope is not None else {})}
            try:
                return eval(text, {"__builtins__": {}}, _Names(lookup, names))
            except Exception as error:
                message = f"the annotation {text!r} of {name!r} cannot be read: {error}"
                raise self._error(KernelError, message) from error

        found = []
        for p in self.parameters:
            try:
                found.append(Parameter.of(p.name, None if p.annotation is p.empty else p.annotation, evaluate))
            except TypeError as error:
                raise error if isinstance(error, KernelError) else self._error(KernelTypeError, str(error)) from error
        return tuple(found)

    @functools.cached_property
    def leaves(self) -> tuple[Parameter, ...]:
        """The arguments: parameters, with structs replaced by their fields."""
        return tuple(leaf for tree in self.trees for leaf in tree.leaves)

    def flat(self, values: Sequence[Any]) -> list[Any]:
        """One value per argument from one value per parameter; TypeError if a struct parameter gets another object."""
        return flat(self.trees, values) if self._structured else list(values)

    def built(self, values: Sequence[Any]) -> list[Any]:
        """One value per parameter from one value per argument: the inverse of `flat`."""
        return built(self.trees, values) if self._structured else list(values)

    @functools.cached_property
    def _structured(self) -> bool:
        return any(tree.fields is not None for tree in self.trees)

    def arguments(self, specs: Sequence[Any]) -> list[Argument]:
        """Each argument with its spec, checked against the annotation.

        Raises
        ------
        KernelError
            For a wrong number of specs, or a spec that does not match its annotation.
        """
        needed = [p for p in self.parameters if p.default is p.empty]
        if not len(needed) <= len(specs) <= len(self.parameters):
            names = ", ".join(p.name for p in self.parameters)
            raise self._error(
                KernelTypeError, f"{self.name}({names}) takes {len(self.parameters)} arguments, got {len(specs)}"
            )
        given = [*specs, *(p.default for p in self.parameters[len(specs) :])]
        try:
            every = self.flat(given)
        except TypeError as error:
            raise self._error(KernelTypeError, f"{self.name}: {error}") from error
        return [self._argument(p, s) for p, s in zip(self.leaves, every, strict=True)]

    def _argument(self, parameter: Parameter, spec: Any) -> Argument:
        name, annotation = parameter.name, parameter.annotation
        if spec is None and parameter.optional:
            return Argument(name, "static", None)
        if not isinstance(spec, type):  # a class's attribute describes its objects
            spec = getattr(spec, "spec", spec)

        def wrong(expected: str) -> KernelError:
            return self._error(
                KernelTypeError, f"argument {name!r} of {self.name} must be {expected}, got {_shown(spec)}"
            )

        if annotation in STATIC:
            kind = (int, float) if annotation is float else annotation
            if not isinstance(spec, kind) or (isinstance(spec, bool) and annotation is not bool):
                raise wrong(f"a Python {annotation.__name__}, known at compile time")
            return Argument(name, "static", spec)
        if isinstance(annotation, DType):
            if (isinstance(spec, DType) and spec.mlir != annotation.mlir) or isinstance(spec, BufferSpec | CacheSpec):
                raise wrong(f"{annotation!r}")
            return Argument(name, "scalar", annotation)
        if isinstance(annotation, BufferSpec):
            same = isinstance(spec, BufferSpec) and (spec.rank, spec.dtype.mlir) == (
                annotation.rank,
                annotation.dtype.mlir,
            )
            if not same and not (isinstance(spec, BufferSpec) and annotation.dtype is bool_ and spec.dtype.bits == 8):
                raise wrong(f"{annotation!r}")
            return Argument(name, "buffer", annotation)
        if annotation is TensorMap or isinstance(annotation, TmaSpec):
            if not isinstance(spec, TmaSpec) or annotation not in (TensorMap, spec):
                raise wrong("a TMA descriptor" if annotation is TensorMap else repr(annotation))
            return Argument(name, "tensormap", spec)
        known = annotation_of(annotation)
        if known is not None:
            kind, kinds = known
            if kinds == layout.KINDS:
                kinds = (*kinds, *page_orders.added)
            if not isinstance(spec, _HANDLES[kind][0]) or _cache_spec(spec).kind not in kinds:
                raise wrong(f"the spec of a {annotation.__name__}")
            return Argument(name, kind, spec)
        if annotation is not None:
            raise self._error(
                KernelTypeError,
                f"the annotation of {name!r} must be a cache class, kv.Buffer[dtype, rank], kv.TensorMap, a dtype such "
                f"as kv.f32, or int, float, bool, str or tuple for a static parameter, got {annotation!r}",
            )
        for kind, (spec_type, _, _) in _HANDLES.items():
            if isinstance(spec, spec_type):
                return Argument(name, kind, spec)
        if isinstance(spec, BufferSpec):
            return Argument(name, "buffer", spec)
        if isinstance(spec, TmaSpec):
            return Argument(name, "tensormap", spec)
        if isinstance(spec, DType):
            return Argument(name, "scalar", spec)
        return Argument(name, "static", spec)

    # --- tracing -------------------------------------------------------------------------------------

    def trace(
        self, specs: Sequence[Any], *, context: ir.Context | None = None, options: dict[str, Any] | None = None
    ) -> ir.Module:
        """The kernel's kv IR: a module with one ``gpu.module @kernels``.

        Parameters
        ----------
        specs : sequence
            One spec per parameter: a ``CacheSpec`` (or an object with ``.spec``), ``kv.Buffer[dtype, rank]``, a dtype,
            the Python value of a static parameter, or None for an absent one. Trailing defaults may be omitted.
        context : mlir.ir.Context, optional
            A context with the kv dialect loaded; a fresh one by default.
        options : dict, optional
            Options that replace the decorator's.

        Raises
        ------
        KernelError
            With the user's file, line and column.
        """
        if context is None:
            from kvarn.dialect import kv

            context = kv.make_context()
        with context, ir.Location.file(self.location.file, self.location.line, 1, context):
            module = ir.Module.create()
            module.operation.attributes["gpu.container_module"] = ir.UnitAttr.get()
            with ir.InsertionPoint(module.body):
                kernels = emit("gpu.module", (), (), {"sym_name": ir.StringAttr.get("kernels")}, regions=1)
            kernels.regions[0].blocks.append()
            self.trace_into(kernels, specs, options=options)
            builder.forget_types()
            _verify(module)
        return module

    def trace_into(
        self, gpu_module: Any, specs: Sequence[Any], name: str | None = None, options: dict[str, Any] | None = None
    ) -> ir.Operation:
        """Trace the kernel into a ``gpu.module`` under ``name`` and return the ``gpu.func``, which is not verified."""
        options = self.options if options is None else options
        operation = gpu_module.operation
        with operation.context, ir.Location.file(self.location.file, self.location.line, 1):
            arguments = self.arguments(specs)
            passed = [a for a in arguments if a.kind != "static"]
            mlir_types = [a.mlir_type() for a in passed]
            attributes = {
                "function_type": ir.TypeAttr.get(ir.FunctionType.get(mlir_types, [])),
                "sym_name": ir.StringAttr.get(name or self.name),
                "workgroup_attributions": types().i64_attr(0),
                "gpu.kernel": ir.UnitAttr.get(),
                "kv.args": ir.ArrayAttr.get([a.record() for a in passed]),
                **_option_attributes(options),
            }
            with ir.InsertionPoint(operation.regions[0].blocks[0]):
                function = emit("gpu.func", (), (), attributes, regions=1)
            block = ir.Block.create_at_start(function.regions[0], mlir_types, [ir.Location.current] * len(mlir_types))
            values = iter(block.arguments)
            builder.state.tiled = False
            outer, builder.state.number = builder.state.number, next(builder.numbers)
            try:
                given = self.built([a.spec if a.kind == "static" else a.value(next(values)) for a in arguments])
                variables = {p.name: v for p, v in zip(self.parameters, given, strict=True)}
                with ir.InsertionPoint(block), intervals.counting(self.function):
                    self._run(variables, options)
                    emit("gpu.return")
                if builder.state.tiled:
                    function.attributes["kv.tiled"] = ir.UnitAttr.get()
                elif "schedule" in options:
                    raise self._error(UnsupportedError, "a schedule is for kernels over tiles, and this one has none")
            except BaseException:
                function.erase()
                raise
            finally:
                builder.state.number = outer
        return function

    def _run(self, variables: dict[str, Any], options: dict[str, Any]) -> None:
        source = source_of(self.function)
        block = options.get("block")
        interpreter = Interpreter(_triple(block) if block is not None else None)
        outer, builder.state.trace = builder.state.trace, interpreter
        try:
            if source is not None:
                interpreter.run(source, variables, lookup_of(self.function))
                return
            # Without source text the function itself runs; kv.if_, kv.for_ and kv.while_ build its control flow.
            try:
                self.function(**variables)
            except KernelError:
                raise
            except Exception as error:
                frame = error.__traceback__
                while frame is not None and frame.tb_frame.f_code is not self.function.__code__:
                    frame = frame.tb_next
                place = SourceLocation(self.location.file, frame.tb_lineno, 1) if frame else self.location
                raise located(error, place) from error
        finally:
            builder.state.trace = outer

    # --- launching -----------------------------------------------------------------------------------

    def specs_of(self, args: Sequence[Any]) -> list[Any]:
        """The spec of each argument of a launch."""
        if len(args) > len(self.parameters):
            raise TypeError(f"{self.name} takes {len(self.parameters)} arguments, got {len(args)}")
        every = self.flat(args)
        specs = [self._spec_of(p, a) for p, a in zip(self.leaves, every, strict=False)]
        return built(self.trees[: len(args)], specs) if self._structured else specs

    def _spec_of(self, parameter: Parameter, argument: Any) -> Any:
        name, annotation = parameter.name, parameter.annotation
        if annotation in STATIC or (argument is None and parameter.optional):
            return argument
        if isinstance(annotation, DType | BufferSpec):
            return annotation
        spec = getattr(argument, "spec", None)
        if spec is not None:
            return spec
        if isinstance(argument, bool | int | float):
            return number_dtype(argument)
        shape, dtype = getattr(argument, "shape", None), getattr(argument, "dtype", None)
        if shape is None or dtype is None:
            raise TypeError(
                f"argument {name!r} of {self.name} must be a cache, an array or a number, got {type(argument).__name__}"
            )
        return BufferSpec(of(dtype), len(shape)) if len(shape) else of(dtype)

    @functools.cached_property
    def _static(self) -> tuple[bool | None, ...]:
        """Whether each argument is static; None if it is static only when it is absent."""
        return tuple(p.annotation in STATIC or (None if p.optional else False) for p in self.leaves)

    def passed(self, args: Sequence[Any]) -> list[Any]:
        """The launch arguments that the compiled kernel takes: those that are neither static nor absent."""
        return [
            a
            for a, static in zip(self.flat(args), self._static, strict=False)
            if static is False or (static is None and a is not None)
        ]

    def compiled_for(self, args: Sequence[Any]) -> Any:
        """The compiled kernel for the arguments of a launch; repeated launches look it up in a table.

        It is specialised for the arguments' specs and static values, and for the values that the function captures
        (`captures`).

        Raises
        ------
        KernelError
            If the function captures a mutable value that cannot be compared.
        """
        emulation = settings.emulation()
        target = "host" if any(_on_host(a) for a in self.flat(args)) else None
        if emulation is not None:
            target = emulation.target
        specs = self.specs_of(args)
        same, number = self._captured
        key = (*map(_key, specs), target, number if same(self.function) else self.captured())
        made_with = (settings.specialisation_key(), env.target)
        found = self._compiled.get((made_with, key))
        if found is None:
            found = kvarn.compiler.compile(self, *specs, target=target, lineinfo=emulation is not None)
            self._compiled[made_with, key] = found
            of_host = [k for k, c in list(self._compiled.items()) if c.target == "host"]
            for old in of_host[:-HOST_KERNELS]:  # device kernels stay: a captured graph may launch them
                self._compiled.pop(old, None)
        return found

    def captured(self) -> int:
        """The number of the function's captured values; it changes when any of them changes."""
        try:
            found = captures.captured(self.function)
        except captures.Refused as error:
            raise self._error(KernelTypeError, f"{self.name}: {error}") from None
        # What is equal and another object at every launch is compared by value from the second time on.
        same = found.same if found.number == self._captured[1] else found.same_of(self.function)
        self._captured = same, found.number
        return found.number

    def __getitem__(self, configuration: Any) -> Launch:
        if not isinstance(configuration, tuple) or len(configuration) not in (2, 3):
            raise TypeError(f"launch with {self.name}[grid, block](...) or {self.name}[grid, block, stream](...)")
        return Launch(self, *configuration)

    def emulate(self, grid: Any, block: Any, *args: Any, target: str = "sm_90a", **options: Any) -> Any:
        """Compile for ``target`` and emulate the PTX on NumPy arrays, without a GPU: see ``kvarn.Kernel.emulate``."""
        return kvarn.emulator.run.emulate(self, grid, block, args, {"target": target, **options})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"launch with {self.name}[grid, block](...), or compile with kv.compile({self.name}, ...)")


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid and block; a call launches it."""

    kernel: KernelFunction
    grid: Any
    block: Any
    stream: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Launch on the arguments' device, after compiling for specs that have no compiled kernel yet."""
        k = self.kernel
        if kwargs:
            args = k.signature.bind(*args, **kwargs).args
        compiled = k.compiled_for(args)
        compiled.launch(self.grid, self.block, *k.passed(args), stream=self.stream)


def kernel(
    function: Any = None, *, max_threads: int | None = None, block: int | tuple[int, ...] | None = None,
    min_blocks: int | None = None, max_registers: int | None = None, cluster: int | tuple[int, ...] | None = None,
    schedule: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Turn a function into a kernel: ``@kv.kernel`` or ``@kv.kernel(block=128)``.

    Parameters
    ----------
    max_threads : int, optional
        Largest number of threads per block.
    block : int or tuple of int, optional
        The exact block size, which the compiler can use.
    min_blocks : int, optional
        Resident blocks per multiprocessor that the register allocation must allow.
    max_registers : int, optional
        Registers per thread.
    cluster : int or tuple of int, optional
        Blocks per cluster, at most 16 (more than 8 not on every GPU); the grid must be a multiple of it. sm_90 and
        later.
    schedule : mapping, optional
        How passes execute the tiles of the kernel on GPUs: entries ``stages``, ``producer``, ``producers``,
        ``staging_stages``, ``overlap``, ``one_wait``, ``ping_pong``, ``occupancy`` and ``instruction`` of kind ``tile``
        (:mod:`kvarn.dialect.schedules`). It needs ``block``, whose warpgroups are consumers and producers. The host
        ignores it.
    """
    given = {
        "max_threads": max_threads,
        "block": block,
        "min_blocks": min_blocks,
        "max_registers": max_registers,
        "cluster": cluster,
        "schedule": schedule,
    }
    options = {k: v for k, v in given.items() if v is not None}
    _option_problems(options)
    if function is None:
        return lambda f: _kernel_of(f, options, sys._getframe(1))
    return _kernel_of(function, options, sys._getframe(1))


def _kernel_of(function: Any, options: dict[str, Any], frame: _types.FrameType) -> KernelFunction:
    if not isinstance(function, _types.FunctionType):
        raise TypeError(f"@kv.kernel takes a Python function, got {type(function).__name__}")
    # Textual annotations may name variables of the enclosing function that nothing else captures.
    textual = any(isinstance(a, str) for a in function.__annotations__.values())
    return KernelFunction(
        function, options, dict(frame.f_locals) if textual and "<locals>" in function.__qualname__ else None
    )


_COUNTS, _TRIPLES = ("max_threads", "min_blocks", "max_registers"), ("block", "cluster")


def _option_problems(options: dict[str, Any]) -> None:
    for name in _COUNTS:
        value = options.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive int, got {value!r}")
    if "block" in options:
        threads = math.prod(_triple(options["block"]))
        if threads > options.get("max_threads", 1024):
            raise ValueError(
                f"block must have at most {options.get('max_threads', 1024)} threads, got {options['block']!r}"
            )

    _schedule_of(options)
    if "cluster" in options and math.prod(_triple(options["cluster"], "cluster")) > 16:
        raise ValueError(f"cluster must have at most 16 blocks, got {options['cluster']!r}")


def _schedule_of(options: dict[str, Any]) -> dict[str, Any] | None:
    """The entries of the kernel's schedule, checked, with its consumers; None without one."""
    if "schedule" not in options:
        return None
    if "block" not in options:
        raise ValueError("schedule needs block: its warpgroups are the kernel's consumers and producers")
    return schedules.of_own_kernel(options["schedule"], math.prod(_triple(options["block"])))


def _triple(block: Any, name: str = "block") -> tuple[int, int, int]:
    extents = (block,) if isinstance(block, int) else tuple(block)
    if not 1 <= len(extents) <= 3 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in extents):
        raise ValueError(f"{name} must be one to three positive ints, got {block!r}")
    return (*extents, *(1,) * (3 - len(extents)))  # type: ignore[return-value]


def _option_attributes(options: dict[str, Any]) -> dict[str, ir.Attribute]:
    _option_problems(options)
    unknown = options.keys() - {*_COUNTS, *_TRIPLES, "schedule"}
    if unknown:
        named = ", ".join((*_COUNTS, *_TRIPLES))
        raise ValueError(f"options of a kernel are {named} and schedule, got {sorted(unknown)}")
    attributes: dict[str, ir.Attribute] = {
        f"kv.{name}": types().i32_attr(options[name]) for name in _COUNTS if name in options
    }
    for name in _TRIPLES:
        if name in options:
            attributes[f"kv.{name}"] = ir.DenseI32ArrayAttr.get(list(_triple(options[name], name)))
    entries = _schedule_of(options)
    if entries is not None:
        attributes["kv.schedule"] = ir.DictAttr.get({k: attribute_of(v) for k, v in entries.items()})
    return attributes


class _Names(dict):
    """A mapping for ``eval`` that looks names up with a function."""

    def __init__(self, lookup: Callable[[str], Any], names: dict[str, Any]) -> None:
        super().__init__(names)
        self._lookup = lookup

    def __missing__(self, name: str) -> Any:
        try:
            return self._lookup(name)
        except NameError:
            raise KeyError(name) from None


def _verify(module: ir.Module) -> None:
    from kvarn.dialect.kv import context_diagnostics

    diagnostics = context_diagnostics(module.context)
    del diagnostics[:]
    try:
        module.operation.verify()
    except ir.MLIRError as error:  # pyright: ignore[reportAttributeAccessIssue]
        raise from_mlir(error, diagnostics) from error
    finally:
        del diagnostics[:]


_PLAIN = (*SPECS, int, bool, float, str)


def _key(spec: Any) -> Any:
    """A key of a spec or a static value."""
    return identity(spec) if spec.__class__ in _PLAIN else captures.value_key(spec, "a static argument")


def _on_host(argument: Any) -> bool:
    """Whether an argument of a launch is in host memory."""
    device = getattr(argument, "device", None)
    if isinstance(device, tuple):
        return device[0] == "cpu"
    if device is not None and getattr(device, "type", None) is not None:
        return device.type == "cpu"
    import numpy as np

    return isinstance(argument, np.ndarray)


def _shown(spec: Any) -> str:
    if isinstance(spec, CacheSpec | CollectionSpec | OperandSpec):
        what = {CacheSpec: "cache", CollectionSpec: "collection", OperandSpec: "operand"}[type(spec)]
        return f"the spec of a {_cache_spec(spec).kind} {what}"
    return repr(spec)


__all__ = ["KernelFunction", "Launch", "Optional", "kernel"]
