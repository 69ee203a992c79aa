# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The IR of an operation from a command line: ``kvarn compile --op attention --spec 'collection=paged(...)' ...``.

The operation's function is called with generated arguments of the given types, and its operation is captured instead of
run: checks, attributes and defaults are those of a call.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from kvarn import dispatch, ops
from kvarn.artifact import Arg
from kvarn.compilation import driver as compiler, extensions
from kvarn.dialect import dtypes, layout
from kvarn.errors import meant

from .random_inputs import InputOptions, random_arguments
from .specs import Shaped, parse_operand, parse_value

# Arguments with generated defaults.
_MADE = ("layer", "row_offsets", "valid_lengths", "buffer_row_offsets", "cache_offsets")
_COLLECTIONS = ("collection", "index_collection")


class _Captured(BaseException):
    """Carries the operation that a function would run."""


def operation_source(
    name: str, specs: Sequence[str], statics: Sequence[str], target: str | None, options: InputOptions | None = None
) -> str:
    """The IR of an operation: a function with the op, the pipeline's input.

    Parameters
    ----------
    name : str
        A function of ``kv.ops``, ``MODULE:FUNCTION`` of another package or of the current folder, or
        ``FILE.py:FUNCTION``, which is loaded as by ``--extend FILE.py``.
    specs : sequence of str
        ``ARGUMENT=SPEC``: ``collection=paged(...)``, ``query=buffer(bf16, (none, 32, 128))``, where ``none`` is the
        number of tokens of a step, or of its sequences and their tokens.
    statics : sequence of str
        ``ARGUMENT=VALUE``: numbers, strings, dictionaries.
    target : str or None
        Default: the machine's.

    Raises
    ------
    ValueError, TypeError
        For unknown or missing arguments.
    """
    function = _function(name)
    parameters = inspect.signature(function).parameters
    given: dict[str, Any] = {}
    for text, parse in [*((t, parse_operand) for t in specs), *((t, parse_value) for t in statics)]:
        argument, equals, rest = text.partition("=")
        if not equals or argument.strip() not in parameters:
            raise ValueError(f"{name} takes {', '.join(parameters)} as NAME=..., got {text!r}")
        given[argument.strip()] = parse(rest)
    for argument, parameter in parameters.items():
        if argument not in given and parameter.default is parameter.empty:
            if argument not in _MADE:
                example = f"{argument}=paged(bf16, num_heads=8, head_size=128, page_size=16)"
                if argument not in _COLLECTIONS:
                    example = f"{argument}=buffer(bf16, (none, 32, 128))"
                raise ValueError(f"{name} needs {argument}: --spec '{example}', or --static {argument}=VALUE")
            given[argument] = dtypes.i32 if argument == "layer" else Shaped(dtypes.i32, (None,))
    operation, operands, attributes, schedule = _captured(function, _made(given, options or InputOptions()))
    chosen = target or compiler.default_target()
    return compiler.with_locations(dispatch.build(operation.specialised(operands, attributes, schedule, chosen)))


def _function(name: str) -> Callable[..., Any]:
    module, colon, function = name.rpartition(":")
    found = getattr(_module(module) if colon else ops, function, None)
    if not inspect.isfunction(found):
        have = [n for n in ops.__all__ if inspect.isfunction(getattr(ops, n))]
        if colon:
            raise ValueError(f"{module} has no function {function!r}")
        hint = meant(name, have)
        raise ValueError(
            f"an operation must be MODULE:FUNCTION, FILE.py:FUNCTION or one of {', '.join(have)}, got {name!r}{hint}"
        )
    return found


def _module(name: str) -> Any:
    """A module by its name or file. A file that is loaded as an extension is not loaded again under another name."""
    if name.endswith(".py"):
        file = Path(name).resolve()
        loaded = next((m for m in extensions.of_files() if _file(m).resolve() == file), None)
        return loaded or extensions.extend(Path(name))
    loaded = next((m for m in extensions.of_files() if _file(m).stem == name), None)
    if loaded is not None:
        return loaded
    folder = os.getcwd()
    sys.path.insert(0, folder)  # like python -m
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"the module of {name}:FUNCTION cannot be imported: {error}; a file is FILE.py:FUNCTION"
        ) from None
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _file(module: ModuleType) -> Path:
    return Path(str(module.__file__))


def _made(given: Mapping[str, Any], options: InputOptions) -> dict[str, Any]:
    """Arguments: values unchanged, and arrays and caches for specs."""
    args, shapes, found = [], {}, {}
    for name, what in given.items():
        if isinstance(what, layout.CacheSpec) and name in _COLLECTIONS:
            what = layout.CollectionSpec(what)
        if isinstance(what, Shaped):
            args.append(Arg(name, "buffer", what.dtype, len(what.extents)))
            shapes[name] = what.extents
        elif isinstance(what, dtypes.DType):
            args.append(Arg(name, "scalar", what))
        elif isinstance(what, layout.CollectionSpec):
            args.append(Arg(name, "collection", spec=what.cache))
        elif isinstance(what, layout.OperandSpec):
            args.append(Arg(name, "operand", spec=what.cache))
        elif isinstance(what, layout.CacheSpec):
            args.append(Arg(name, "cache", spec=what))
        else:
            found[name] = what
    return {**found, **random_arguments(args, shapes, options)}


def _captured(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[dispatch.Operation, Any, Any, Any]:
    """The operation that a function would run, with its operands, attributes and schedule."""

    def record(operation: Any, operands: Any, attributes: Any, schedule: Any, stream: Any) -> None:
        raise _Captured((operation, operands, attributes, schedule))

    before = dispatch.recorder
    dispatch.recorder = SimpleNamespace(recording=lambda: True, record=record)
    try:
        function(**arguments)
    except _Captured as captured:
        return captured.args[0]
    finally:
        dispatch.recorder = before
    raise ValueError(f"{function.__name__} runs no operation for these arguments")


__all__ = ["operation_source"]
