# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Command-line options for a kernel's inputs, equal in all commands: ``--grid``, ``--arg``, ``--lengths``, ..."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .pass_options import given_name

if TYPE_CHECKING:
    from mlir import ir

    from .random_inputs import InputOptions

EDGES = "edges"


def add_input_options(add: Callable[..., Any]) -> None:
    """Add the options for a kernel's inputs."""
    add("--grid", type=_extents, metavar="N[xN]", help="grid of a kernel, in blocks: 8 or 8x4")
    add("--block", type=_extents, metavar="N[xN]", help="block, in threads, if the kernel does not declare it")
    add(
        "--arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument that has no default: a number, a buffer's shape (8x128), or its elements (0,1,5)",
    )
    add(
        "--lengths",
        type=_batches,
        metavar="N,N|edges",
        help="cached tokens of each sequence (37,0,18); several batches (3,4;5,6); edges: lengths near multiples of "
        "the kernel's pages and tiles, or of given numbers (edges:64)",
    )
    add("--new", type=_counts, metavar="N,N", help="new tokens of each sequence (3,1,2), or one number for all")
    add("--seed", type=_seed, default=0, help="seed of the random arguments (default: 0)")


def add_model_option(add: Callable[..., Any]) -> None:
    """Add the option that names a model, for ``kvarn.tools.semantics.model_of``."""
    add(
        "--model",
        type=given_name,
        metavar="FILE.py:FUNCTION",
        help="a reference: a function of the arguments by name, which changes their arrays as the kernel should",
    )


def values_of(options: argparse.Namespace) -> Mapping[str, Any]:
    """The given fields of ``kvarn.tools.random_inputs.InputOptions``, for one run."""
    lengths = options.lengths
    if lengths is not None and (isinstance(lengths, str) or len(lengths) > 1):
        raise ValueError("--lengths must have one batch here, such as 37,0,18")
    return _values(options, None if lengths is None else lengths[0])


def inputs_of(options: argparse.Namespace, module: ir.Module | None) -> list[InputOptions]:
    """The inputs of each run, one per batch of lengths; for edges, from the extents of a module."""
    from . import edges
    from .random_inputs import InputOptions

    lengths, record = options.lengths, _record(module)
    if lengths is None and record:
        found = {**record, "values": {**record["values"], **_values(options, None)["values"]}}
        return [InputOptions(lenient=True, **({**found, "new": options.new} if options.new else found))]
    if isinstance(lengths, str):
        given = lengths.partition(":")[2]
        new = max(options.new or (1,))
        if given:
            extents = tuple(map(int, given.split(",")))
        else:
            assert module is not None
            extents = edges.extents_of(module)
        around = edges.around(extents, new)
        # A kernel has one block per sequence, an operation takes any number of sequences.
        lengths = edges.batches(around, len(around) if options.grid is None else options.grid[0])
    return [InputOptions(**_values(options, counts)) for counts in lengths or (None,)]


# --- inputs recorded in IR -----------------------------------------------------------------------------

RECORD = "kv.inputs"  # attribute of a module with its default inputs


def recorded(
    text: str, inputs: InputOptions, shapes: Mapping[str, Sequence[int]], launch: Any, stage: str | None
) -> str:
    """IR with its inputs as an attribute; ``shapes`` are those of its buffers, ``stage`` its last pass."""
    from mlir import ir

    driver = importlib.import_module("kvarn.compilation.driver")
    module = driver.parse(text)
    shaped = {name: "x".join(map(str, shape)) for name, shape in shapes.items()}
    values = {**shaped, **inputs.values}
    found = {"values": values, "lengths": inputs.lengths, "new": inputs.new, "seed": inputs.seed}
    found |= {"grid": launch.grid, "block": launch.block, "stage": stage}
    with module.context:
        module.operation.attributes[RECORD] = ir.StringAttr.get(json.dumps(found))
    return driver.with_locations(module)


def launch_of(options: argparse.Namespace, module: ir.Module | None) -> tuple[Any, Any]:
    """(grid, block) of a kernel's launch: from the options, else from the IR."""
    record = _record(module, ("grid", "block"))
    given = ((getattr(options, name), record.get(name)) for name in ("grid", "block"))
    grid, block = (said if said is not None else None if kept is None else tuple(kept) for said, kept in given)
    return grid, block


def stage_of(module: ir.Module | None) -> str | None:
    """The last pass of the pipeline applied to IR, if recorded."""
    return _record(module, ("stage",)).get("stage")


def _record(module: ir.Module | None, names: Sequence[str] = ("values", "lengths", "new", "seed")) -> dict[str, Any]:
    """Selected inputs recorded in a module; empty if there are none."""
    if module is None or RECORD not in module.operation.attributes:
        return {}
    try:
        found = json.loads(str(getattr(module.operation.attributes[RECORD], "value", "")))
        return {name: tuple(x) if isinstance(x := found[name], list) else x for name in names}
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{RECORD} of the module must be as written by kvarn bisect --save") from None


def _values(options: argparse.Namespace, lengths: tuple[int, ...] | None) -> Mapping[str, Any]:
    given = {"lengths": lengths, "new": options.new}
    if lengths is not None and (options.new is None or len(options.new) == 1):
        given["new"] = (options.new or (1,)) * len(lengths)
    made = {"values": arguments_of(options), "shapes": _shapes(options), "seed": options.seed}
    return {**made, **{n: v for n, v in given.items() if v is not None}}


def arguments_of(options: argparse.Namespace) -> dict[str, str]:
    """The values of ``--arg``, by argument name; empty for a command without it."""
    values = {}
    for text in getattr(options, "arg", ()):
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--arg takes NAME=VALUE, got {text!r}")
        values[name.strip()] = value.strip()
    return values


def _shapes(options: argparse.Namespace) -> dict[str, tuple[int | None, ...]]:
    """The extents that ``--spec`` gives the buffers of an operation, whose IR has only some of them."""
    if getattr(options, "op", None) is None:
        return {}
    from .specs import Shaped, parse_operand

    named = (text.partition("=")[::2] for text in options.spec)
    specs = {name.strip(): parse_operand(rest) for name, rest in named}
    return {name: spec.extents for name, spec in specs.items() if isinstance(spec, Shaped)}


def _seed(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text):
        raise argparse.ArgumentTypeError(f"must be a number of at most 19 digits, not negative, got {text!r}")
    return int(text)


def _extents(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(x\d+){0,2}", text):
        raise argparse.ArgumentTypeError(f"must be one to three counts such as 8x4, got {text!r}")
    return (*map(int, text.split("x")), 1, 1)[:3]


def _counts(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"must be counts such as 37,0,18, got {text!r}")
    return tuple(map(int, text.split(",")))


def _batches(text: str) -> str | tuple[tuple[int, ...], ...]:
    if re.fullmatch(rf"{EDGES}(:[1-9]\d*(,[1-9]\d*)*)?", text):
        return text
    if not re.fullmatch(r"\d+(,\d+)*(;\d+(,\d+)*)*", text):
        raise argparse.ArgumentTypeError(f"must be counts such as 37,0,18, or edges, got {text!r}")
    return tuple(map(_counts, text.split(";")))


__all__ = [
    "RECORD", "add_input_options", "add_model_option", "arguments_of", "inputs_of", "launch_of", "recorded",
    "stage_of", "values_of",
]  # fmt: skip
