# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The AST of a Python function, and its liveness analysis.

A file is parsed once, so every node has its true line and column; a function is found by its name and first line.
Liveness determines the variables that a loop or branch carries: only those that are read later.
"""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Names = frozenset[str]
NONE: Names = frozenset()
FunctionNode = ast.FunctionDef | ast.Lambda

_files: dict[str, tuple[int, dict[tuple[str, int], list[FunctionNode]]]] = {}
_functions: dict[int, tuple[types.CodeType, FunctionSource | None]] = {}  # by id, since hashing code objects is slow


@dataclass
class FunctionSource:
    """The AST of one function, with the liveness of each statement."""

    name: str
    file: str
    node: FunctionNode
    flow: Liveness = field(init=False)

    def __post_init__(self) -> None:
        self.flow = flow_of(self.node)


def source_of(function: types.FunctionType) -> FunctionSource | None:
    """The source of a function; None if it has no source text (a REPL, exec)."""
    code = function.__code__
    known = _functions.get(id(code))
    if known is None:
        known = _functions[id(code)] = (code, _find(code))
    return known[1]


def _find(code: types.CodeType) -> FunctionSource | None:
    found = _index(code.co_filename).get((code.co_name, code.co_firstlineno), [])
    if len(found) > 1:  # several lambdas on one line
        found = [n for n in found if _parameters(n) == code.co_varnames[: len(_parameters(n))]]
    if len(found) != 1:
        return None
    return FunctionSource(code.co_name, code.co_filename, found[0])


def _parameters(node: FunctionNode) -> tuple[str, ...]:
    a = node.args
    return tuple(p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs))


def _index(file: str) -> dict[tuple[str, int], list[FunctionNode]]:
    """The functions of a file by name and first line (the first decorator's line)."""
    lines = linecache.getlines(file)
    text = "".join(lines)
    known = _files.get(file)
    if known is not None and known[0] == hash(text):
        return known[1]
    index: dict[tuple[str, int], list[FunctionNode]] = {}
    try:
        tree = ast.parse(text) if text else ast.Module([], [])
    except SyntaxError:  # the file changed after it was imported
        tree = ast.Module([], [])
    for node in _nodes(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            index.setdefault((node.name, first), []).append(node)
        elif isinstance(node, ast.Lambda):
            index.setdefault(("<lambda>", node.lineno), []).append(node)
    _files[file] = (hash(text), index)
    return index


# --- nodes ---------------------------------------------------------------------------------------

# Fields of nodes that hold no expression, statement or scope.
_NO_CODE = frozenset({
    "ctx", "op", "ops", "id", "attr", "name", "arg", "module", "names", "level", "kind", "conversion", "is_async",
    "simple", "type_comment", "type_ignores",
})  # fmt: skip
_fields: dict[type, tuple[str, ...]] = {ast.Constant: ()}  # of a class of nodes: those that may hold code


def _children(node: ast.AST) -> list[ast.AST]:
    """The nodes of code directly below a node, in order: as ``ast.iter_child_nodes``, which takes several times longer,
    but without operators and contexts."""
    kind = type(node)
    names = _fields.get(kind)
    if names is None:
        names = _fields[kind] = tuple(name for name in kind._fields if name not in _NO_CODE)
    found: list[ast.AST] = []
    for name in names:
        held = getattr(node, name, None)
        if type(held) is list:
            found += [n for n in held if isinstance(n, ast.AST)]
        elif isinstance(held, ast.AST):
            found.append(held)
    return found


def _nodes(node: ast.AST) -> list[ast.AST]:
    """A node and all nodes of code below it, outer before inner."""
    found = [node]
    for n in found:  # grows meanwhile
        found += _children(n)
    return found


# --- names ---------------------------------------------------------------------------------------


def flow_of(node: FunctionNode) -> Liveness:
    """The liveness of a function, computed once per AST node."""
    found = getattr(node, "_kv_flow", None)
    if found is None:
        found = node._kv_flow = Liveness(node)  # type: ignore[union-attr]
    return found


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def loaded(node: ast.AST | Iterable[ast.AST] | None) -> Names:
    """Names read anywhere in a tree, including nested functions."""
    if node is None:
        return NONE
    nodes = [node] if isinstance(node, ast.AST) else list(node)
    return frozenset(x.id for n in nodes for x in _nodes(n) if type(x) is ast.Name and type(x.ctx) is ast.Load)


def bound(node: ast.AST | Sequence[ast.AST]) -> Names:
    """Names that a tree may bind, or change through an index or attribute; nested functions excluded."""
    names: set[str] = set()
    stack: list[ast.AST] = [node] if isinstance(node, ast.AST) else list(node)
    while stack:
        n = stack.pop()
        if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load):
            names.add(n.id)
        elif isinstance(n, ast.Subscript | ast.Attribute) and isinstance(n.ctx, ast.Store):
            names |= _base(n)
        elif isinstance(n, ast.AugAssign) and not isinstance(n.target, ast.Name):
            names |= _base(n.target)
        elif isinstance(n, _SCOPES):
            if not isinstance(n, ast.Lambda):
                names.add(n.name)
            continue
        stack += _children(n)
    return frozenset(names)


def _local_names(node: ast.FunctionDef) -> Names:
    """Names that are local to a function because it binds them."""
    names: set[str] = set()
    stack: list[ast.AST] = list(node.body)
    while stack:
        n = stack.pop()
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
            names.add(n.id)
        if isinstance(n, _SCOPES):
            if not isinstance(n, ast.Lambda):
                names.add(n.name)
        elif not isinstance(n, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            stack += _children(n)
    return frozenset(names)


def _base(node: ast.AST) -> Names:
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return frozenset([node.id]) if isinstance(node, ast.Name) else NONE


def _yields(node: FunctionNode) -> bool:
    """Whether a function has a yield outside of nested functions."""
    stack: list[ast.AST] = _children(node)
    while stack:
        n = stack.pop()
        if isinstance(n, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(n, _SCOPES):
            stack += _children(n)
    return False


def escapes(statements: Sequence[ast.stmt]) -> Names:
    """The subset of "return", "break", "continue" that may leave these statements."""
    found: set[str] = set()
    for s in statements:
        if isinstance(s, ast.Return):
            found.add("return")
        elif isinstance(s, ast.Break | ast.Continue):
            found.add(type(s).__name__.lower())
        elif isinstance(s, ast.For | ast.While):
            found |= escapes(s.body) & {"return"}
            found |= escapes(s.orelse)
        elif isinstance(s, ast.If):
            found |= escapes(s.body) | escapes(s.orelse)
        elif isinstance(s, ast.With):
            found |= escapes(s.body)
    return frozenset(found)


def terminates(statements: Sequence[ast.stmt]) -> bool:
    """Whether control never reaches the end of these statements, judged by the source text."""
    if not statements:
        return False
    last = statements[-1]
    if isinstance(last, ast.If):
        return terminates(last.body) and terminates(last.orelse)
    return isinstance(last, ast.Return | ast.Break | ast.Continue)


@dataclass(frozen=True)
class Changes:
    """The names that a sequence of statements binds and changes.

    Attributes
    ----------
    bound : frozenset of str
        Variables bound by name, or changed through an index or attribute.
    rebound : frozenset of str
        The subset bound by name.
    calls : tuple of ast.Call
        Calls of functions by name.
    """

    bound: Names
    rebound: Names
    calls: tuple[ast.Call, ...]

    @classmethod
    def of(cls, statements: Sequence[ast.stmt]) -> Changes:
        nodes = [n for s in statements for n in _nodes(s)]
        rebound = frozenset(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        calls = tuple(n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))
        return cls(bound(statements), rebound, calls)


class Liveness:
    """Liveness: the names read later, per statement of a function.

    Attributes
    ----------
    after : dict
        id(statement) -> names that may be read after it, including at the targets of a break, continue or return.
    head : dict
        id(loop) -> names that may be read at the start of an iteration or after the loop.
    entry : dict
        id(loop) -> names that the body (or a while's test) may read before binding them.
    leaves : dict
        id(if or loop) -> the ways in which control may leave it or, for a loop, its body (:func:`escapes`).
    yields : bool
        Whether the function is a generator.
    changes : Changes
        Of the whole function; ``loops`` has the changes of each loop's body.
    """

    def __init__(self, node: FunctionNode) -> None:
        self.after: dict[int, Names] = {}
        self.head: dict[int, Names] = {}
        self.entry: dict[int, Names] = {}
        self.leaves: dict[int, Names] = {}
        self.loops: dict[int, Changes] = {}
        self.assigned: Names = NONE
        self.yields = _yields(node)
        self.changes = Changes.of([] if isinstance(node, ast.Lambda) else node.body)
        if isinstance(node, ast.Lambda):
            return
        self.assigned = _local_names(node)
        inner = [n for n in _nodes(node) if isinstance(n, _SCOPES) and n is not node]
        self._always = loaded(inner)  # nested functions read variables whenever they are called
        self._block(node.body, self._always, NONE, NONE)

    def _block(self, statements: Sequence[ast.stmt], out: Names, leave: Names, again: Names) -> Names:
        for s in reversed(statements):
            self.after[id(s)] = out
            out = self._statement(s, out, leave, again)
        return out

    def _statement(self, s: ast.stmt, out: Names, leave: Names, again: Names) -> Names:
        if isinstance(s, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = s.targets if isinstance(s, ast.Assign) else [s.target]
            killed: set[str] = set()
            for target in targets:
                killed |= {n.id for n in _nodes(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            used = loaded(s.value) | loaded(targets)
            if isinstance(s, ast.AugAssign) or (isinstance(s, ast.AnnAssign) and s.value is None):
                used |= killed
            return (out - killed) | used | self._always
        if isinstance(s, ast.If):
            then = self._block(s.body, out, leave, again)
            other = self._block(s.orelse, out, leave, again)
            self.leaves[id(s)] = escapes([s])
            if self.leaves[id(s)]:
                self.after[id(s)] = out | leave | again
            return loaded(s.test) | then | other
        if isinstance(s, ast.For | ast.While):
            return self._loop(s, out)
        if isinstance(s, ast.Return):
            return loaded(s.value) | self._always
        if isinstance(s, ast.Break):
            return leave
        if isinstance(s, ast.Continue):
            return again
        if isinstance(s, ast.With):
            return loaded([i.context_expr for i in s.items]) | self._block(s.body, out, leave, again)
        if isinstance(s, ast.FunctionDef):
            return (out - {s.name}) | loaded(s)
        return out | loaded(s)

    def _loop(self, s: ast.For | ast.While, out: Names) -> Names:
        test = loaded(s.test) if isinstance(s, ast.While) else NONE
        target = bound(s.target) - loaded(s.target) if isinstance(s, ast.For) else NONE
        head = out | test
        while True:  # iterate until the back edge adds no names
            entry = (self._block(s.body, head, out, head) - target) | test
            if entry <= head:
                break
            head |= entry
        self.head[id(s)], self.entry[id(s)] = head, entry
        self.leaves[id(s)], self.loops[id(s)] = escapes(s.body), Changes.of(s.body)
        return head | (loaded(s.iter) if isinstance(s, ast.For) else NONE)
