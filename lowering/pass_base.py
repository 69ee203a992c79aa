# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a pass is: a module of this package whose ``run`` is decorated with :func:`kv_pass`.

The pass's name is the file's stem with ``-`` for ``_``; its options are the fields of a frozen dataclass,
written ``pass-name{field=value other-field=value}`` in a pipeline. ``run(module, options)`` changes the module
in place. A pass that meets IR it cannot handle calls :func:`fail`, which reports at the op's location.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mlir import ir


class PassFailure(Exception):
    """A pass could not go on; the diagnostic has been emitted at the op's location."""


@dataclass(frozen=True)
class NoOptions:
    """Options of a pass that has none."""


@dataclass(frozen=True)
class Pass:
    """A pass: its name, its options class, and the function that does it."""

    name: str
    function: Callable[[ir.Module, Any], None]
    options_class: type
    summary: str

    def options(self, text: dict[str, str] | None = None) -> Any:
        """Options from the strings of a pipeline; ValueError for an unknown name or a bad value."""
        fields = {f.name.replace("_", "-"): f for f in dataclasses.fields(self.options_class)}
        hints = typing.get_type_hints(self.options_class)
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
        with module.context:
            self.function(module, options if options is not None else self.options_class())

    def describe(self, options: Any) -> str:
        """The pass with its options, as a pipeline writes it."""
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


def kv_pass(
    options_class: type = NoOptions,
) -> Callable[[Callable[[ir.Module, Any], None]], Callable[[ir.Module, Any], None]]:
    """Declare a module's ``run`` function to be the pass of that module's name."""

    def declare(function: Callable[[ir.Module, Any], None]) -> Callable[[ir.Module, Any], None]:
        stem = Path(inspect.getfile(function)).stem
        summary = (inspect.getmodule(function).__doc__ or "").strip().split("\n")[0]
        function.kv_pass = Pass(stem.replace("_", "-"), function, options_class, summary)  # type: ignore[attr-defined]
        return function

    return declare


def fail(op: Any, message: str) -> NoReturn:
    """Report an error at an op and stop the pass: ``'<op>' op <message>``."""
    operation = op.operation
    operation.location.emit_error(f"'{operation.name}' op {message}")
    raise PassFailure(f"{operation.location}: '{operation.name}' op {message}")
