# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Structs as kernel parameters: a parameter annotated with a frozen dataclass becomes one argument per field.

    @dataclass(frozen=True)
    class Rows:
        source: kv.Buffer[kv.f32, 2]
        weights: kv.Optional[kv.Buffer[kv.f32, 1]]
        width: int

    @kv.kernel
    def scale(rows: Rows, out: kv.Buffer[kv.f32, 2]): ...

has the arguments ``rows.source``, ``rows.weights``, ``rows.width`` and ``out``. The value of such a parameter is an
instance of the class whose fields are specs (to compile), arrays and caches (to launch) or IR values (in an expansion);
inside the kernel its fields are the arguments. The rest of the DSL handles structs through ``Parameter.flat`` and its
inverse ``Parameter.built``.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types as _types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .handles import annotation_of
from .tma import TensorMap

STATIC = (int, float, bool, str, tuple)
_DEEPEST = 8  # levels of nested structs, so that a class that contains itself is refused


@dataclass(frozen=True)
class Optional:
    """Annotation of a kernel argument that may be absent: ``kv.Optional[kv.Buffer[kv.f32, 1]]``.

    An absent argument is passed as None, or omitted if None is its default. It is None inside the kernel, so
    ``if sinks is not None:`` is decided while tracing, and the compiled kernel has no such argument.
    """

    annotation: Any

    def __class_getitem__(cls, annotation: Any) -> Optional:
        return cls(annotation)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel or a field of a struct: a leaf (one argument), or a struct with fields.

    Attributes
    ----------
    name : str
        The argument's name in messages and compiled kernels: ``"x"``, ``"rows.source"``.
    annotation : object
        The annotation, without ``kv.Optional``; None if there is none.
    optional : bool
    fields : tuple of (str, Parameter), or None for an argument
    """

    name: str
    annotation: Any
    optional: bool = False
    fields: tuple[tuple[str, Parameter], ...] | None = None

    @classmethod
    def of(cls, name: str, annotation: Any, evaluate: Callable[[str, str, Any], Any], scope: Any = None) -> Parameter:
        """The tree of a parameter.

        Parameters
        ----------
        annotation : object
            The annotation as written; text is evaluated with ``evaluate(name, text, scope)``.
        scope : type, optional
            The class that the field belongs to; None for a kernel's own parameter.
        """
        if isinstance(annotation, str):
            annotation = evaluate(name, annotation, scope)
        annotation, optional = _unwrapped(annotation)
        if annotation is Any:  # accepts anything, like a missing annotation
            annotation = None
        if not _is_struct(annotation):
            return cls(name, annotation, optional)
        if optional:
            raise TypeError(f"{name!r} cannot be absent as a whole: make fields of {annotation.__name__} kv.Optional")
        if not annotation.__dataclass_params__.frozen:
            raise TypeError(f"{annotation.__name__}, the struct of {name!r}, must be frozen: @dataclass(frozen=True)")
        if any(not f.init for f in dataclasses.fields(annotation)):
            raise TypeError(f"{annotation.__name__}, the struct of {name!r}, must take all of its fields as arguments")
        if name.count(".") >= _DEEPEST:
            raise TypeError(f"{name!r} is nested too deeply: structs of arguments hold {_DEEPEST} levels of structs")
        fields = []
        for f in dataclasses.fields(annotation):
            owner = next(c for c in annotation.__mro__ if f.name in inspect.get_annotations(c))
            fields.append((f.name, cls.of(f"{name}.{f.name}", f.type, evaluate, owner)))
        return cls(name, annotation, False, tuple(fields))

    @property
    def leaves(self) -> Iterator[Parameter]:
        """The arguments of the tree, in order."""
        if self.fields is None:
            yield self
            return
        for _, field in self.fields:
            yield from field.leaves

    def flat(self, value: Any) -> Iterator[Any]:
        """The value of each argument.

        Raises
        ------
        TypeError
            If a struct's value is not an instance of its class.
        """
        if self.fields is None:
            yield value
            return
        if not isinstance(value, self.annotation):
            title = self.annotation.__name__
            got = "None" if value is None else type(value).__name__
            raise TypeError(f"{self.name!r} must be a {title}, whose fields are the arguments, got {got}")
        for name, field in self.fields:
            yield from field.flat(getattr(value, name))

    def built(self, values: Iterator[Any]) -> Any:
        """The inverse of ``flat``: consumes one value per argument of the tree."""
        if self.fields is None:
            return next(values)
        # Bypasses __init__: its checks are for arrays and do not apply to specs and values of a kernel.
        made = object.__new__(self.annotation)
        for name, field in self.fields:
            object.__setattr__(made, name, field.built(values))
        return made


def flat(parameters: Iterable[Parameter], values: Iterable[Any]) -> list[Any]:
    """One value per argument from one value per parameter; trailing parameters may be omitted."""
    return [x for p, value in zip(parameters, values, strict=False) for x in p.flat(value)]


def built(parameters: Iterable[Parameter], values: Iterable[Any]) -> list[Any]:
    """One value per parameter from one value per argument."""
    found = iter(values)
    return [p.built(found) for p in parameters]


def _unwrapped(annotation: Any) -> tuple[Any, bool]:
    """An annotation, and whether it was ``kv.Optional``; for a static parameter like ``tuple[int, int]``, the class."""
    if isinstance(annotation, Optional):
        return _unwrapped(annotation.annotation)[0], True
    origin = typing.get_origin(annotation)
    if origin in (_types.UnionType, typing.Union):
        others = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(others) == 1:
            return _unwrapped(others[0])[0], True
    return (origin if origin in STATIC else annotation), False


def _is_struct(annotation: Any) -> bool:
    return (
        isinstance(annotation, type)
        and dataclasses.is_dataclass(annotation)
        and annotation_of(annotation) is None
        and annotation is not TensorMap
    )


def names_of(cls: type) -> dict[str, Any]:
    """The names available to a class's annotations: its module's and its own."""
    return {**vars(sys.modules.get(cls.__module__, _types.ModuleType(""))), cls.__name__: cls}
