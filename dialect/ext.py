# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The subset of LLVM 23's ``mlir.dialects.ext`` that the kv dialect is declared with, on MLIR 22.1.

A dialect, its types and its operations are classes; the annotated fields of a class are the IRDL
definition, the builder's parameters, the accessors and the documentation. The declaring files use only
names that LLVM 23 has too (or the alias block at the end), so that this file is the one that goes away.

What 22.1 cannot do is refused here, because the C++ below aborts the process on it: a union of
constraints that are not exact types, and a second IRDL load of one dialect in one context.
"""

import inspect
import os
import threading
import types as _types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from mlir import ir
from mlir._mlir_libs import _mlir as _cext
from mlir.dialects import irdl

Operand = ir.Value
Result = ir.OpResult

_lock = threading.RLock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


class Specifier:
    """What a field's default says: keyword-only, inferred result, default value, the base's field that it replaces."""

    def __init__(
        self,
        *,
        kw_only: bool = False,
        infer: bool = False,
        default_factory: Callable[[], Any] | None = None,
        place: str = "",
    ):
        self.kw_only, self.infer, self.default_factory, self.place = kw_only, infer, default_factory, place


def operand(*, kw_only: bool = False) -> Any:
    """Specifier of an operand field."""
    return Specifier(kw_only=kw_only)


def result(*, infer_type: bool = False, default_factory: Callable[[], Any] | None = None) -> Any:
    """Specifier of a result field."""
    return Specifier(infer=infer_type, default_factory=default_factory)


def in_place_of(name: str) -> Any:
    """A field that replaces the base's field of this name: it differs among forms that share an abstract base."""
    return Specifier(place=name)


def infer_result() -> Any:
    """A result whose type is fixed by its constraint, so the builder does not ask for it."""
    return Specifier(infer=True)


def attribute(*, kw_only: bool = False, default_factory: Callable[[], Any] | None = None) -> Any:
    """Specifier of an attribute field."""
    return Specifier(kw_only=kw_only or default_factory is not None, default_factory=default_factory)


class _Field:
    """One annotated field of an operation, decoded."""

    def __init__(self, name: str, annotation: Any, default: Any):
        self.name, self.optional, self.variadic = name, False, False
        self.spec = default if isinstance(default, Specifier) else Specifier(kw_only=default is None)
        origin = typing.get_origin(annotation)
        if origin in (typing.Union, _types.UnionType):
            rest = [a for a in typing.get_args(annotation) if a is not type(None)]
            if len(rest) != len(typing.get_args(annotation)):
                self.optional = True
                annotation = rest[0] if len(rest) == 1 else typing.Union[tuple(rest)]  # noqa: UP007 (a tuple of them)
                origin = typing.get_origin(annotation)
        if origin in (Sequence, list):
            self.variadic = True
            annotation = typing.get_args(annotation)[0]
            origin = typing.get_origin(annotation)
        self.kind, self.constraint = "attribute", annotation
        if origin in (Operand, Result):
            self.kind = "operand" if origin is Operand else "result"
            self.constraint = typing.get_args(annotation)[0]
        elif annotation in (Operand, Result):
            self.kind, self.constraint = ("operand" if annotation is Operand else "result"), Any
        if self.kind == "attribute" and (self.optional or self.variadic):
            raise TypeError(f"attribute field {name!r} cannot be optional or variadic: IRDL has none")


def exact_type(constraint: Any) -> Callable[[], ir.Type] | None:
    """A function that makes the one type that satisfies a constraint, or None when several do."""
    origin, args = typing.get_origin(constraint), typing.get_args(constraint)
    if origin is None:
        return None
    if origin is ir.IntegerType:
        return lambda bits=args[0]: ir.IntegerType.get_signless(bits)
    if inspect.isclass(origin) and issubclass(origin, ir.Type) and not issubclass(origin, Type):
        return lambda origin=origin: origin.get()
    return None


def _irdl_constraint(constraint: Any) -> ir.Value:
    """Emit the IRDL ops of a constraint at the insertion point."""
    if constraint is Any:
        return irdl.any()
    origin = typing.get_origin(constraint)
    if origin in (typing.Union, _types.UnionType):
        alternatives = typing.get_args(constraint)
        if any(exact_type(a) is None for a in alternatives):
            raise TypeError(f"a union of constraints must be of exact types on MLIR 22.1, got {constraint}")
        return irdl.any_of([_irdl_constraint(a) for a in alternatives])
    make = exact_type(constraint)
    if make is not None:
        return irdl.is_(ir.TypeAttr.get(make()))
    if inspect.isclass(constraint) and issubclass(constraint, Type):
        reference = ir.SymbolRefAttr.get([constraint.dialect.DIALECT_NAMESPACE, constraint.TYPE_NAME])
        return irdl.base(base_ref=reference)
    if inspect.isclass(constraint) and issubclass(constraint, ir.Attribute):
        # Builtin attributes without a static name in the bindings are checked by the verifier instead.
        name = getattr(constraint, "attr_name", None)
        return irdl.base(base_name="#" + name) if name else irdl.any()
    if inspect.isclass(constraint) and issubclass(constraint, ir.Type):
        name = getattr(constraint, "type_name", None)
        return irdl.base(base_name="!" + name) if name else irdl.any()
    raise TypeError(f"unsupported constraint {constraint!r}")


class Type(ir.Type):
    """Base of a dialect's types: parameters are the annotated fields, in order."""

    dialect: Any = None
    TYPE_NAME: str = ""
    PARAMETERS: tuple[str, ...] = ()

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("__annotations__", {})  # noqa: RUF063 (its bases have theirs)
        cls.PARAMETERS = (*cls.PARAMETERS, *own)
        if name is None:
            return
        cls.TYPE_NAME = name
        for index, field in enumerate(cls.PARAMETERS):
            setattr(cls, field, property(lambda self, index=index: self.parameters[index]))
        cls.dialect.types.append(cls)

    @classmethod
    def get(cls, *parameters: ir.Attribute | ir.Type, context: ir.Context | None = None) -> "Type":
        """The type of the given parameters (attributes; types are wrapped)."""
        if len(parameters) != len(cls.PARAMETERS):
            raise TypeError(f"{cls.__name__} takes {len(cls.PARAMETERS)} parameters, got {len(parameters)}")
        text = ", ".join(str(p) for p in parameters)
        suffix = f"<{text}>" if parameters else ""
        return cls(ir.Type.parse(f"!{cls.dialect.DIALECT_NAMESPACE}.{cls.TYPE_NAME}{suffix}", context))

    @classmethod
    def isinstance(cls, other: ir.Type) -> bool:
        """Whether a type is of this class; by name, since 22.1 has no dynamic type ids in Python."""
        text = str(other)
        prefix = f"!{cls.dialect.DIALECT_NAMESPACE}.{cls.TYPE_NAME}"
        return text == prefix or text.startswith(prefix + "<")

    @property
    def parameters(self) -> tuple[ir.Attribute, ...]:
        """The parameters, types as TypeAttr."""
        text = str(self)
        if "<" not in text:
            return ()
        return tuple(ir.Attribute.parse(p, self.context) for p in split_parameters(text[text.index("<") + 1 : -1]))


def split_parameters(text: str) -> list[str]:
    """Split printed parameters at the commas that are not nested in brackets or strings."""
    parts, depth, start, quoted = [], 0, 0, False
    for i, c in enumerate(text):
        if c == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif c in "<([{":
            depth += 1
        elif c in ">)]}":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]


class Operation(ir.OpView):
    """Base of a dialect's operations; see the module's docstring."""

    dialect: Any = None
    FIELDS: tuple[_Field, ...] = ()
    TRAITS: tuple[Any, ...] = ()

    def __init_subclass__(cls, *, name: str | None = None, traits: Sequence[Any] | None = None, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        own = []
        for field, annotation in cls.__dict__.get("__annotations__", {}).items():  # noqa: RUF063 (its own)
            if hasattr(ir.OpView, field):
                raise TypeError(f"{cls.__name__}.{field} shadows a member of OpView: choose another name")
            own.append(_Field(field, annotation, cls.__dict__.get(field, ...)))
        placed = {field.spec.place: field for field in own if field.spec.place}
        cls.FIELDS = (*(placed.get(f.name, f) for f in cls.FIELDS), *(f for f in own if not f.spec.place))
        cls.TRAITS = (*cls.TRAITS, *(traits or ()))
        if name is None:
            return
        cls.OPERATION_NAME = f"{cls.dialect.DIALECT_NAMESPACE}.{name}"
        cls._ODS_REGIONS = (0, True)
        for kind, segments in (("operand", "_ODS_OPERAND_SEGMENTS"), ("result", "_ODS_RESULT_SEGMENTS")):
            fields = [f for f in cls.FIELDS if f.kind == kind]
            single = all(not f.optional and not f.variadic for f in fields)
            setattr(cls, segments, None if single else [0 if f.optional else -1 if f.variadic else 1 for f in fields])
            for index, field in enumerate(fields):
                setattr(cls, field.name, property(_accessor(fields, index)))
        for field in cls.FIELDS:
            if field.kind == "attribute":
                setattr(cls, field.name, property(lambda self, n=field.name: self.operation.attributes[n]))
        cls._parameters = _builder_parameters(cls.FIELDS)
        _make_builder(cls)
        cls.dialect.declare(cls)

    def verify_invariants(self) -> bool:
        """Check what IRDL cannot say; where it fails, emit an error on the op and return False."""
        return True


def _accessor(fields: list[_Field], index: int) -> Callable[[Any], Any]:
    """A reader of the index-th operand or result field; it reads the segment sizes only where they are needed."""
    field = fields[index]
    flexible = [i for i, f in enumerate(fields) if f.optional or f.variadic]

    def read(self: Any) -> Any:
        values = self.operation.operands if field.kind == "operand" else self.operation.results
        if not flexible:
            return values[index]
        if len(flexible) == 1:
            sizes = [1] * len(fields)
            sizes[flexible[0]] = len(values) - (len(fields) - 1)
        else:
            attribute = "operandSegmentSizes" if field.kind == "operand" else "resultSegmentSizes"
            sizes = list(ir.DenseI32ArrayAttr(self.operation.attributes[attribute]))
        start = sum(sizes[:index])
        chosen = [values[i] for i in range(start, start + sizes[index])]
        if field.variadic:
            return chosen
        return chosen[0] if chosen else None

    return read


def operand_fields(op_class: type[Operation]) -> list[_Field]:
    """The operands of an op class, in the order of its declaration."""
    return [f for f in op_class.FIELDS if f.kind == "operand"]


def is_segmented(fields: Sequence[_Field]) -> bool:
    """Whether operations with these operands carry ``operandSegmentSizes``: the operand count alone is ambiguous."""
    return sum(f.optional or f.variadic for f in fields) > 1


def _builder_parameters(fields: Sequence[_Field]) -> list[inspect.Parameter]:
    """Signature of the builder: positional fields in declaration order, then the keyword-only ones."""
    positional, keyword = [], []
    for f in fields:
        if f.kind == "result" and f.spec.infer:
            continue
        has_default = f.spec.default_factory is not None or (f.optional and f.spec.kw_only)
        default = None if has_default else inspect.Parameter.empty
        if f.spec.kw_only or f.spec.default_factory is not None:
            keyword.append(inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default))
        else:
            positional.append(inspect.Parameter(f.name, inspect.Parameter.POSITIONAL_OR_KEYWORD))
    tail = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in ("loc", "ip")]
    return [*positional, *keyword, *tail]


def _make_builder(cls: type[Operation]) -> None:
    """Give an op class its ``__init__``, with a real signature."""
    fields = cls.FIELDS
    operands = operand_fields(cls)
    results = [f for f in fields if f.kind == "result"]
    attributes = [f for f in fields if f.kind == "attribute"]
    segmented = is_segmented(operands)
    positional = [p.name for p in cls._parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    known = {p.name for p in cls._parameters}
    signature = inspect.Signature(
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *cls._parameters]
    )
    inferred = {f.name: exact_type(f.constraint) for f in results if f.spec.infer}
    for name, make in inferred.items():
        if make is None:
            raise TypeError(f"{cls.OPERATION_NAME}: the type of result {name!r} cannot be inferred")

    def init(self: Any, *args: Any, loc: Any = None, ip: Any = None, **kwargs: Any) -> None:
        if len(args) == 1 and not kwargs and type(args[0]) is ir.Operation:
            ir.OpView.__init__(self, args[0])  # MLIR wraps an existing operation in its class this way
            return
        if len(args) > len(positional) or not kwargs.keys() <= known:
            signature.bind(self, *args, **kwargs)
        values = dict(zip(positional, args, strict=False))
        values.update(kwargs)
        if len(values) < len(args) + len(kwargs) or any(n not in values for n in positional):
            signature.bind(self, *args, **kwargs)  # raises the TypeError that Python users know
        flat, sizes = [], []
        for f in operands:
            v = values.get(f.name)
            chosen = list(v or ()) if f.variadic else [] if v is None else [v]
            flat += chosen
            sizes.append(len(chosen))
        attrs = {}
        for f in attributes:
            v = values.get(f.name)
            if v is None and f.spec.default_factory is not None:
                v = f.spec.default_factory()
            attrs[f.name] = v
        if segmented:
            attrs["operandSegmentSizes"] = ir.DenseI32ArrayAttr.get(sizes)
        types = []
        for f in results:
            make = inferred.get(f.name)
            v = make() if make else values.get(f.name)
            if v is None and f.spec.default_factory is not None:
                v = f.spec.default_factory()
            types += list(v) if f.variadic else [] if v is None else [v]
        op = ir.Operation.create(cls.OPERATION_NAME, results=types, operands=flat, attributes=attrs, loc=loc, ip=ip)
        ir.OpView.__init__(self, op)

    init.__signature__ = signature  # type: ignore[attr-defined]
    cls.__init__ = init  # type: ignore[method-assign]


class Dialect:
    """Base of a dialect: ``class Kv(Dialect, name="kv")``; it gets bases ``Operation`` and ``Type``."""

    DIALECT_NAMESPACE: str = ""
    operations: list[type[Operation]]
    types: list[type[Type]]
    generation = 0  # incremented per declared operation: a context that was loaded earlier lacks the newer operations
    listeners: list[Callable[[type[Operation]], None]]  # called with every operation that is declared
    _registered: Any = None
    _bound: set[type[Operation]]

    def __init_subclass__(cls, *, name: str, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.DIALECT_NAMESPACE = name
        cls.operations, cls.types, cls.listeners, cls._bound = [], [], [], set()
        cls.Operation = type("Operation", (Operation,), {"dialect": cls, "__doc__": f"An operation of {name}."})
        cls.Type = type("Type", (Type,), {"dialect": cls, "__doc__": f"A type of {name}."})

    @classmethod
    def declare(cls, op_class: type[Operation]) -> None:
        """Add an operation. It replaces one of the same class name and module, as a rerun notebook cell declares.

        TypeError when another module has declared the operation.
        """
        place = (op_class.__module__, op_class.__qualname__)
        for i, other in enumerate(cls.operations):
            if other.OPERATION_NAME == op_class.OPERATION_NAME:
                if (other.__module__, other.__qualname__) != place:
                    raise TypeError(
                        f"{op_class.OPERATION_NAME} is declared by {other.__module__} ({other.__qualname__}): "
                        "choose another name"
                    )
                cls.operations[i] = op_class
                break
        else:
            cls.operations.append(op_class)
        cls.generation += 1
        for tell in cls.listeners:
            tell(op_class)

    @classmethod
    def irdl_module(cls, context: ir.Context) -> ir.Module:
        """The IRDL definition, in the given context."""
        with context, ir.Location.unknown():
            module = ir.Module.create()
            with ir.InsertionPoint(module.body):
                definition = irdl.dialect(cls.DIALECT_NAMESPACE)
            with ir.InsertionPoint(definition.body if hasattr(definition, "body") else definition.regions[0].blocks[0]):
                for type_ in cls.types:
                    op = irdl.type_(type_.TYPE_NAME)
                    if type_.PARAMETERS:
                        with ir.InsertionPoint(op.body):
                            irdl.parameters([irdl.any() for _ in type_.PARAMETERS], list(type_.PARAMETERS))
                for op_class in cls.operations:
                    _define_operation(cls, op_class)
            return module

    @classmethod
    def is_loaded(cls, context: ir.Context) -> bool:
        return context.is_registered_operation(cls.operations[0].OPERATION_NAME)

    @classmethod
    def load(cls, context: ir.Context | None = None) -> None:
        """Load into a context; a second call does nothing."""
        context = context or ir.Context.current
        with _lock:
            if not cls.is_loaded(context):
                from mlir.passmanager import PassManager

                module = cls.irdl_module(context)
                with context, ir.Location.unknown():
                    PassManager.parse("builtin.module(canonicalize,cse)").run(module.operation)
                irdl.load_dialects(module)
            if cls._registered is None:
                # One class per process: the bindings register a dialect's class for the life of the process.
                cls._registered = type(
                    cls.DIALECT_NAMESPACE, (ir.Dialect,), {"DIALECT_NAMESPACE": cls.DIALECT_NAMESPACE}
                )
                _cext.register_dialect(cls._registered)
            for op_class in cls.operations:
                if op_class not in cls._bound:
                    cls._bound.add(op_class)
                    _cext.register_operation(cls._registered, replace=True)(op_class)


def _define_operation(dialect: type[Dialect], op_class: type[Operation]) -> None:
    """Emit ``irdl.operation`` of an op class."""
    op = irdl.operation_(op_class.OPERATION_NAME.removeprefix(dialect.DIALECT_NAMESPACE + "."))
    with ir.InsertionPoint(op.body):
        for kind, emit in (("operand", irdl.operands_), ("result", irdl.results_)):
            fields = [f for f in op_class.FIELDS if f.kind == kind]
            if fields:
                variadicity = [
                    irdl.Variadicity.optional if f.optional else irdl.Variadicity.variadic if f.variadic
                    else irdl.Variadicity.single for f in fields
                ]  # fmt: skip
                emit([_irdl_constraint(f.constraint) for f in fields], [f.name for f in fields], variadicity)
        attributes = [f for f in op_class.FIELDS if f.kind == "attribute"]
        if attributes:
            irdl.attributes_(
                [_irdl_constraint(f.constraint) for f in attributes],
                ir.ArrayAttr.get([ir.StringAttr.get(f.name) for f in attributes]),
            )


# --- aliases that LLVM 23 writes as IntegerType[32] and so on ------------------------------------------
I1 = _types.GenericAlias(ir.IntegerType, (1,))
I32 = _types.GenericAlias(ir.IntegerType, (32,))
I64 = _types.GenericAlias(ir.IntegerType, (64,))
F32 = _types.GenericAlias(ir.F32Type, ())
Index = _types.GenericAlias(ir.IndexType, ())
