# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The definition of a pass: a function decorated with :func:`kv_pass`; a file with one pass calls it ``run``.

The name of a file's ``run`` is the file's stem with ``-`` for ``_``; another function's is its own. Options are the
fields of a frozen dataclass, written ``pass-name{field=value other-field=value}`` in a pipeline. The function takes
``(module)`` or ``(module, options)`` and changes the module in place. For IR that it cannot handle it calls
:func:`fail`, which reports an error at the op's location.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mlir import ir

from kvarn.dsl.intervals import counting


class PassFailure(Exception):
    """A pass failed; the diagnostic has been emitted at the op's location."""


_RAISED = "Exception raised in callback:"  # prefix of MLIR's error for an exception in a callback


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception is Ctrl-C, or MLIR's error for Ctrl-C in a callback of a walk."""
    if isinstance(error, KeyboardInterrupt):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith(_RAISED) and "KeyboardInterrupt" in str(error)


@dataclass(frozen=True)
class NoOptions:
    """Options of a pass without any."""


class PassHandle(NoOptions):
    """The second argument of a pass without options: a way to fail."""

    def __init__(self) -> None:
        object.__setattr__(self, "failed", False)

    failed: bool

    def signal_pass_failure(self) -> None:
        """Mark the pass as failed; it stops the pipeline once the pass returns."""
        object.__setattr__(self, "failed", True)


@dataclass(frozen=True)
class Pass:
    """A pass: its name, its options class, and its function."""

    name: str
    function: Callable[..., None]
    options_class: type
    summary: str

    def __post_init__(self) -> None:
        self.takes_options  # noqa: B018 (a function that cannot be a pass is refused where it is declared)

    @functools.cached_property
    def takes_options(self) -> bool:
        """Whether the function takes a second argument; TypeError if it cannot be a pass."""
        return _takes_options(self.name, self.function)

    def options(self, text: dict[str, str] | None = None) -> Any:
        """Options from the strings of a pipeline; ValueError for an unknown name or an illegal value."""
        fields = {f.name.replace("_", "-"): f for f in dataclasses.fields(self.options_class)}
        hints = typing.get_type_hints(self.options_class) if text else {}
        values = {}
        for key, value in (text or {}).items():
            field = fields.get(key.replace("_", "-"))
            if field is None:
                known = ", ".join(fields) or "none"
                raise ValueError(f"option of {self.name} must be one of {known}, got {key!r}")
            values[field.name] = _parse(self.name, key, value, hints[field.name])
        return self.options_class(**values)

    def run(self, module: ir.Module, options: Any = None) -> None:
        """Run on a module, in the module's context."""
        given = (options if options is not None else self.options_class(),) if self.takes_options else ()
        # Ops that a pass makes without a location get the module's.
        with module.context, module.operation.location, counting(self.function):
            self.function(module, *given)

    def describe(self, options: Any) -> str:
        """The pass with its options, as in a pipeline."""
        parts = []
        for f in dataclasses.fields(options):
            value = getattr(options, f.name)
            if value is not None:
                text = str(value).lower() if isinstance(value, bool) else str(value)
                parts.append(f"{f.name.replace('_', '-')}={text}")
        return f"{self.name}{{{' '.join(parts)}}}" if parts else self.name


def _parse(pass_name: str, key: str, value: str, hint: Any) -> Any:
    kinds = [t for t in (typing.get_args(hint) or (hint,)) if t is not type(None)]
    kind = kinds[0]
    if kind is bool:
        if value not in ("true", "false", "1", "0"):
            raise ValueError(f"option {key} of {pass_name} must be true or false, got {value!r}")
        return value in ("true", "1")
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"option {key} of {pass_name} must be of type {kind.__name__}, got {value!r}") from None


def _takes_options(name: str, function: Callable[..., None]) -> bool:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return True
    for arguments in ((None, None), (None,)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return len(arguments) == 2
    raise TypeError(f"pass {name} must be a function of (module) or (module, options), got {name}{signature}")


def kv_pass(options_class: type = NoOptions) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare a function to be a pass, with options of a class."""

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        function.kv_pass = as_pass(function, options_class=options_class)  # type: ignore[attr-defined]
        return function

    return declare


def as_pass(function: Callable[..., None], name: str = "", options_class: type = NoOptions) -> Pass:
    """The pass of a function: by its decorator, or by its own name and the first line of its docstring."""
    declared: Pass | None = getattr(function, "kv_pass", None)
    if declared is not None:
        return dataclasses.replace(declared, name=name or declared.name)
    if not callable(function):
        raise TypeError(f"a pass must be a function of (module) or (module, options), got {function!r}")
    own = getattr(function, "__name__", type(function).__name__)
    text = function.__doc__ or ""
    file = Path(getattr(getattr(function, "__code__", None), "co_filename", ""))
    if own == "run" and file.stem.isidentifier():  # the pass of a file
        own = file.stem
        text = getattr(sys.modules.get(function.__module__), "__doc__", None) or text
    return Pass(name or own.replace("_", "-"), function, options_class, text.strip().partition("\n")[0])


def blame(error: Exception, what: str, location: ir.Location) -> None:
    """Record which part of a pass raised an exception, and for which op, for the diagnostic."""
    error.kv_raised_by = (what, location)  # type: ignore[attr-defined]


def blamed(error: BaseException, location: ir.Location) -> tuple[str, ir.Location]:
    """The record of :func:`blame`, with a comma before it; by default nothing, and the given location."""
    what, at = getattr(error, "kv_raised_by", ("", location))
    return f", {what}," if what else "", at


def fail(op: Any, message: str) -> NoReturn:
    """Report an error at an op and stop the pass: ``'<op>' op <message>``."""
    operation = op.operation
    operation.location.emit_error(f"'{operation.name}' op {message}")
    raise PassFailure(f"{operation.location}: '{operation.name}' op {message}")
