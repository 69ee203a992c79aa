# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Parameters of kernels as trees of arguments: a parameter annotated with a frozen dataclass is one a field.

    @dataclass(frozen=True)
    class Rows:
        source: kv.Buffer[kv.f32, 2]
        weights: kv.Optional[kv.Buffer[kv.f32, 1]]
        width: int

    @kv.kernel
    def scale(rows: Rows, out: kv.Buffer[kv.f32, 2]): ...

has the arguments ``rows.source``, ``rows.weights``, ``rows.width`` and ``out``. What a kernel is given for such a
parameter is an instance whose fields are specs (to compile), arrays and caches (to launch) or IR values (in an
expansion); in the kernel it is an instance whose fields are the arguments. What the rest of the DSL knows of structs is
``Parameter.flat``, and ``Parameter.built``, its inverse.
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
_DEEPEST = 8  # levels of structs; a class that holds itself has no end of them


@dataclass(frozen=True)
class Optional:
    """Annotation of a kernel argument that may be absent: ``kv.Optional[kv.Buffer[kv.f32, 1]]``.

    An absent argument is given as None, or left out where it has the default None. In the kernel it is None, so that
    ``if sinks is not None:`` is decided while the kernel is traced; the compiled kernel does not have it.
    """

    annotation: Any

    def __class_getitem__(cls, annotation: Any) -> Optional:
        return cls(annotation)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel, or a field of one: an argument, or a struct of them.

    Attributes
    ----------
    name : str
        As messages and compiled kernels name the argument: ``"x"``, ``"rows.source"``.
    annotation : object
        Of an optional argument, what it is when it is there; None without an annotation.
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
            As it is written: text is evaluated with ``evaluate(name, text, scope)``.
        scope : type, optional
            The class that the field belongs to; None for a kernel's own parameter.
        """
        if isinstance(annotation, str):
            annotation = evaluate(name, annotation, scope)
        annotation, optional = _unwrapped(annotation)
        if annotation is Any:  # whatever is given, as without an annotation
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
        """What is given for each argument.

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
        """The inverse of ``flat``: takes as many values as the tree has arguments."""
        if self.fields is None:
            return next(values)
        # Not through __init__: what a class checks of arrays does not hold of specs and of values of a kernel.
        made = object.__new__(self.annotation)
        for name, field in self.fields:
            object.__setattr__(made, name, field.built(values))
        return made


def flat(parameters: Iterable[Parameter], values: Iterable[Any]) -> list[Any]:
    """One value an argument, of one a parameter; parameters at the end may be left out."""
    return [x for p, value in zip(parameters, values, strict=False) for x in p.flat(value)]


def built(parameters: Iterable[Parameter], values: Iterable[Any]) -> list[Any]:
    """One value a parameter, of one an argument."""
    found = iter(values)
    return [p.built(found) for p in parameters]


def _unwrapped(annotation: Any) -> tuple[Any, bool]:
    """An annotation without its optionality; of a static parameter like ``tuple[int, int]``, the class."""
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
    """The names that annotations of a class may use: its module's and its own."""
    return {**vars(sys.modules.get(cls.__module__, _types.ModuleType(""))), cls.__name__: cls}
