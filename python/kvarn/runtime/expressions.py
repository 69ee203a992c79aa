# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Expressions of a program's steps: JSON in the artifact, compiled to one Python function.

A grid, a workspace's size or a scalar of a step depends on the shapes of the program's arguments. The artifact has the
dependence as data; this module checks it against the arguments and compiles a step's expressions to one function, which
takes about a microsecond per launch. The generated source has only integers, operators and checked indices, never text
from the artifact, so a foreign bundle cannot inject code.

An expression is a number, ``("arg", i, field)``, ``("device", name)``, ``(op, a, b)`` with an op of ``BINARY``, or
``("select", condition, a, b)``, which evaluates only the chosen branch. Comparisons and ``and`` give 1 or 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvarn.artifact import Arg, Artifact, Entry, Step
from kvarn.dialect.layout import DENSE, CacheSpec, OperandData
from kvarn.dialect.tma_layout import TmaSpec

from .tensormap import LaunchMap

# {0} and {1} are operands in parentheses.
BINARY = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}",
    "floordiv": "{0} // {1}", "ceildiv": "-(-{0} // {1})", "mod": "{0} % {1}",
    "min": "min({0}, {1})", "max": "max({0}, {1})",
    "lt": "int({0} < {1})", "le": "int({0} <= {1})", "eq": "int({0} == {1})",
    "ge": "int({0} >= {1})", "gt": "int({0} > {1})",
    "and": "int(bool({0} and {1}))",
}  # fmt: skip
DEVICE_FACTS = ("multiprocessors", "shared_bytes", "l2_bytes", "warp_size")
_DEPTH = 40  # CPython's parser fails near 100 nested parentheses, and a term opens at most two


class Facts(Protocol):
    """Device properties for expressions, and the encoder of TMA descriptors. Hashable."""

    multiprocessors: int
    shared_bytes: int
    l2_bytes: int
    warp_size: int

    def encode(self, description: Any) -> Any:
        """The value of a kernel's parameter for a `tensormap.TensorMap`."""
        ...


def _source(expression: Any, args: Sequence[Arg], depth: int = 0) -> str:
    if depth > _DEPTH:
        raise ValueError(f"an expression must not nest deeper than {_DEPTH} levels")
    if isinstance(expression, (int, float)) and not isinstance(expression, bool):
        if expression != expression or expression in (float("inf"), float("-inf")):
            raise ValueError(f"an expression's number must be finite, got {expression}")
        return f"({expression!r})"
    if not isinstance(expression, (list, tuple)) or not expression or not isinstance(expression[0], str):
        raise ValueError(f"an expression must be a number or a list that starts with an operator, got {expression!r}")
    op, *operands = expression
    if op == "arg":
        return _argument(operands, args)
    if op == "device":
        if len(operands) != 1 or operands[0] not in DEVICE_FACTS:
            raise ValueError(f"a device expression must name one of {', '.join(DEVICE_FACTS)}, got {operands!r}")
        return f"d.{operands[0]}"
    if op == "select":
        if len(operands) != 3:
            raise ValueError(f"select must have a condition and two values, got {len(operands)} operands")
        c, a, b = (_source(o, args, depth + 1) for o in operands)
        return f"({a} if {c} else {b})"
    if op not in BINARY:
        raise ValueError(f"operator must be one of arg, device, select, {', '.join(BINARY)}, got {op!r}")
    if len(operands) != 2:
        raise ValueError(f"{op} must have two operands, got {len(operands)}")
    return "(" + BINARY[op].format(*(_source(o, args, depth + 1) for o in operands)) + ")"


def _argument(operands: Sequence[Any], args: Sequence[Arg]) -> str:
    if len(operands) != 2:
        raise ValueError(f'an argument of an expression must be ["arg", index, field], got {["arg", *operands]!r}')
    index, name = operands
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(args):
        raise ValueError(f"argument index must be from 0 to {len(args) - 1}, got {index!r}")
    names = [f.name for f in args[index].fields]
    if name not in names:
        raise ValueError(f"argument {args[index].name!r} has no field {name!r}: it has {', '.join(names)}")
    if args[index].fields[names.index(name)].type in ("ptr", "tensormap"):
        raise ValueError(f"field {name!r} of argument {args[index].name!r} is an address: an expression takes numbers")
    return f"a[{index}][{names.index(name)}]"


def compile_expressions(
    expressions: Sequence[Any], args: Sequence[Arg]
) -> Callable[[Sequence[Sequence[Any]], Facts], tuple[Any, ...]]:
    """Compile several expressions to one function.

    Parameters
    ----------
    expressions : sequence
        The expressions, as data.
    args : sequence of Arg
        The program's arguments, to which they refer.

    Returns
    -------
    callable
        ``f(values, device) -> tuple``: ``values[i]`` are argument i's field values, in the order of ``args[i].fields``.

    Raises
    ------
    ValueError
        If an expression is malformed or refers to a missing argument or field.
    """
    body = "".join(_source(e, args) + ", " for e in expressions)
    code = f"lambda a, d: ({body})"
    # The only builtins are the four that the templates use.
    scope = {"__builtins__": {}, "min": min, "max": max, "int": int, "bool": bool}
    return eval(compile(code, "<kvarn step>", "eval"), scope)


def compile_step(program: Artifact, step: Step) -> Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Compile all expressions of a step to one function.

    Returns
    -------
    callable
        ``f(values, device, scratch) -> (shape, flat)``: ``scratch[i]`` is the address and size in bytes of the
        program's i-th workspace; ``shape`` is grid, block and shared memory (seven numbers), ``flat`` the concatenated
        field values of the entry's arguments.

    Raises
    ------
    ValueError
        If an expression is malformed, or an argument does not match the entry.
    """
    entry = program.entry(step.entry)
    if len(step.grid) != 3 or len(step.block) != 3:
        raise ValueError(f"grid and block of a step must have three expressions, got {step.grid} and {step.block}")
    shape = ", ".join(_source(e, program.args) for e in (*step.grid, *step.block, step.shared_bytes))
    maps: list[LaunchMap] = []
    flat = "".join(_step_argument(program, entry, i, item, maps) + ", " for i, item in enumerate(step.args))
    code = f"lambda a, d, w: (({shape}), ({flat}))"
    scope = {"__builtins__": {}, "min": min, "max": max, "int": int, "bool": bool, "m": tuple(maps)}
    return eval(compile(code, f"<kvarn step {step.entry!r}>", "eval"), scope)


def _program_argument(program: Artifact, index: Any) -> Arg:
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(program.args):
        raise ValueError(f"argument index must be from 0 to {len(program.args) - 1}, got {index!r}")
    return program.args[index]


def _launch_map(program: Artifact, entry: Entry, target: Arg, item: Any, maps: list[LaunchMap]) -> str:
    """Source of the descriptor of ``("tensor_map", argument, half[, layer])``; its maker is appended to ``maps``.

    Or of ``("tensor_map", argument, "rows", heads, size)``: a buffer's rows as a dense operand of one sequence. The
    argument may then also be the name of a workspace with such rows.
    """
    about = f"argument {target.name!r} of kernel {entry.name!r}"
    of_rows = len(item) == 5 and item[2] == "rows"
    if of_rows and isinstance(item[1], str):
        return _workspace_map(program, target, item, maps, about)
    if not of_rows and (len(item) not in (3, 4) or item[2] not in ("key", "value")):
        raise ValueError(f"{about} must be given a descriptor as (tensor_map, argument, half, layer), got {item!r}")
    given = _program_argument(program, item[1])
    tiles = target.spec
    if target.kind != "tensormap" or not isinstance(tiles, TmaSpec) or tiles.form not in ("tiled", "token"):
        raise ValueError(f"{about} is given a descriptor and must take a tiled one, got a {target.kind}")
    if of_rows:
        return _rows_map(program, given, target, item, maps, about)
    if not isinstance(given.spec, CacheSpec) or (given.kind == "collection") != (len(item) == 4):
        raise ValueError(
            f"{about} must be given the descriptor of a collection's layer, a cache or an operand, "
            f"got {item!r} of the {given.kind} {given.name!r}"
        )
    places = {f.name: f"a[{item[1]}][{i}]" for i, f in enumerate(given.fields)}
    base = places["blocks" if given.kind == "collection" else "base"]
    if given.kind == "collection":
        moved = f"{_source(item[3], program.args)} * {places['layer_stride']}"
        moved += f" + {places['kv_stride']}" if item[2] == "value" else ""
        base = f"{base} + ({moved}) * {given.spec.dtype.itemsize}"
    maps.append(LaunchMap(tiles, given.spec, f"argument {given.name!r} of {program.name!r}"))
    rest = ", ".join(places[name] for name in ("stride0", "num_blocks", "capacity"))
    return f"m[{len(maps) - 1}](d, {base}, {rest})"


def _rows_map(program: Artifact, given: Arg, target: Arg, item: Any, maps: list[LaunchMap], about: str) -> str:
    if given.kind != "buffer" or given.rank != 2 or given.dtype is None:
        raise ValueError(f"{about} must be given the descriptor of a matrix's rows, got that of {given.name!r}")
    spec = OperandData(DENSE, given.dtype, item[3], item[4])
    places = {f.name: f"a[{item[1]}][{i}]" for i, f in enumerate(given.fields)}
    # Rows are read from start to end, one chunk at a time, so the L2 cache prefetches the next chunks.
    assert isinstance(target.spec, TmaSpec)
    maps.append(LaunchMap(target.spec, spec, f"argument {given.name!r} of {program.name!r}", l2_promotion=256))
    return f"m[{len(maps) - 1}](d, {places['data']}, {spec.row_size}, 1, {places['shape0']})"


def _workspace_map(program: Artifact, target: Arg, item: Any, maps: list[LaunchMap], about: str) -> str:
    if target.kind != "tensormap" or not isinstance(target.spec, TmaSpec) or target.spec.form != "tiled":
        raise ValueError(f"{about} is given a descriptor and must take a tiled one, got a {target.kind}")
    spec = OperandData(DENSE, target.spec.dtype, item[3], item[4])
    where = _workspace(program, item[1])
    maps.append(LaunchMap(target.spec, spec, f"workspace {item[1]!r} of {program.name!r}", l2_promotion=256))
    rows = f"{where}[1] // {spec.row_size * spec.dtype.itemsize}"
    return f"m[{len(maps) - 1}](d, {where}[0], {spec.row_size}, 1, {rows})"


def _workspace(program: Artifact, name: Any) -> str:
    """Source of the address and the size in bytes of a workspace."""
    names = [w.name for w in program.workspaces]
    if name not in names:
        raise ValueError(f"program {program.name!r} has no workspace {name!r}: it has {', '.join(names) or 'none'}")
    return f"w[{names.index(name)}]"


def _workspace_extents(entry: Entry, target: Arg, columns: Any, where: str) -> str:
    """Source of the shape and strides of a workspace as a kernel's buffer."""
    rank = 1 + len(columns)
    if target.kind != "buffer" or target.rank != rank or target.dtype is None:
        raise ValueError(
            f"argument {target.name!r} of kernel {entry.name!r} takes a workspace and must be a buffer of "
            f"{'two dimensions' if columns else 'one dimension'}, got a {target.kind}"
        )
    if not columns:
        return f"{where}[1] // {target.dtype.itemsize}"
    if type(columns[0]) is not int or columns[0] < 1:
        raise ValueError(f"rows of a workspace must have one element or more, got {columns[0]!r}")
    return f"{where}[1] // {target.dtype.itemsize * columns[0]}, {columns[0]}, {columns[0]}"


def _step_argument(program: Artifact, entry: Entry, i: int, item: Any, maps: list[LaunchMap]) -> str:
    target = entry.args[i]
    if isinstance(item, (list, tuple)) and item and item[0] == "tensor_map":
        return _launch_map(program, entry, target, item, maps)
    if isinstance(item, (list, tuple)) and len(item) == 2 and item[0] == "arg":
        index = item[1]
        given = _program_argument(program, index)
        if (given.kind, given.dtype, given.rank, given.spec) != (target.kind, target.dtype, target.rank, target.spec):
            raise ValueError(
                f"argument {target.name!r} of kernel {entry.name!r} is not of the kind of the program's "
                f"argument {given.name!r}, which a step passes to it"
            )
        return f"*a[{index}]"
    if isinstance(item, (list, tuple)) and len(item) in (2, 3) and item[0] == "workspace":
        where = _workspace(program, item[1])
        return f"{where}[0], {_workspace_extents(entry, target, item[2:], where)}"
    if target.kind != "scalar":
        raise ValueError(
            f"argument {target.name!r} of kernel {entry.name!r} is a {target.kind} "
            f"and must be given whole, got the expression {item!r}"
        )
    return _source(item, program.args)
