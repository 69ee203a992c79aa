# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels for the front end's fuzzer: whole ones, and mutations of their syntax trees."""

from __future__ import annotations

import ast
import copy
import functools
import random
from collections.abc import Callable

ARGUMENTS = "x, y, u, m, c, q, o, n"  # what SPECS of the worker are for
SEEDS = (
    """
    i = kv.block_id.x
    total = 0.0
    for j in range(x.shape[0]):
        total += x[j] * 2.0
    x[i] = total
    """,
    """
    a, b, l = y[0], 1, [0, y[1], 2]
    while a < 10 and b < 5:
        a += l[b % 3 if False else 1]
        if a > 7:
            break
        b = b + 1
    y[0] = a + b
    """,
    """
    k = 0
    while k < n:
        y[k] = k
        k += 1
    while True:
        if y[k] > 3:
            break
        k = k + y[0]
    """,
    """
    def clipped(v, limit):
        if v > limit:
            return limit
        return v
    counts = [0] * n
    for i in range(y.shape[0]):
        if y[i] < 0:
            continue
        for b in kv.static(range(n)):
            counts[b] += kv.i32(clipped(y[i], n - 1) == b)
    for b in kv.static(range(n)):
        y[b] = counts[b]
    """,
    """
    b, t = kv.block_id.x, kv.block_id.y
    if t < c.cache_length(b):
        for h in range(c.num_heads):
            d = kv.thread_id.x * 8
            v = c.load(b, h, t, d, width=8, dtype=kv.f32) * 0.5
            c.store(b, h, t, d, c.dtype(v))
    """,
    """
    page = c.page(0, kv.thread_id.x)
    s = kv.shared((16, 64), kv.f32)
    for h in range(c.num_heads):
        s[h, 0] = c.load(0, h, kv.thread_id.x, 0, dtype=kv.f32, page=page)
    kv.barrier()
    x[0] = kv.warp_reduce(s[0, 0], "add") if s[1, 0] > 0 else kv.math.exp(s[2, 0])
    """,
    """
    v = kv.vector(kv.f32, 4)
    for j in kv.static(range(4)):
        v[j] = x[j] + 1
    w = x.load(4, width=4)
    z = kv.where(v > w, v, w)
    x.store(8, value=z.to(kv.f32) + w.reduce("max"))
    """,
    """
    key = q.get_key_cache(0)
    value = q.get_value_cache(1)
    rows = key.populate(0, 0, 16)
    for r in range(rows.get_row(3)):
        m[r, 0] = value.load(0, 0, r, 0, width=1)
        if r == q.cache_length(0):
            return
    """,
    """
    p = x.address(0)
    d = {"a": y[0], "b": (u[0], 3)}
    for i in range(3, 0, -1):
        d["a"] = d["a"] + i
        if d["a"] > 5:
            d["b"] = (d["b"][0] + kv.u32(1), 3)
    u[0] = d["b"][0]
    f = lambda t, s=2: t * s + d["a"]
    y[0] = f(y[1]) + sum([f(e) for e in [y[2], y[3], 4] if n > 2])
    kv.atomic_add(y, 0, f(1, s=3))
    """,
    """
    first, *rest = (y[0], y[1], y[2])
    for i, (e, g) in enumerate(zip(rest, [x[0], x[1]])):
        x[i] = kv.f32(e) * g if not (e == 0 or g < 1.0 <= x[2]) else -g
    kv.printf("%d %f", y[0], x[0])
    kv.device_assert(y[0] >= 0, f"row {n}")
    y[5] = kv.bitcast(x[0], kv.i32) >> 3 ^ ~first
    """,
    """
    best, at = x[0], 0
    for i in range(1, x.shape[0]):
        w = 0
        while w < y[i]:
            w += 1
            if x[w] > best:
                best, at = x[w], w
                continue
            if w > n:
                return
        best = max(best, x[i], kv.f32(at))
    o[0, 0] = kv.bf16(best)
    """,
    """
    acc = kv.for_(y.shape[0], body=lambda i, s: s + y[i], init=0)
    low, steps = kv.while_(lambda v, k: v > 10, lambda v, k: (v // 2, k + 1), init=(acc, 0))
    y[0] = kv.if_(steps > 0, lambda: low, lambda: acc)
    k = 0
    while kv.if_(y[k] > 0, lambda: True, lambda: k < 3):
        k += 1
    """,
)
CONSTANTS = (
    0, 1, -1, 2, 3, 7, 16, 100, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 10**20000, 0.0, -0.0, 1.5, 1e308,
    float("inf"), True, False, None, "a", "", b"x", 1j, ..., "add",
)  # fmt: skip
NAMES = (
    *ARGUMENTS.split(", "), "kv", "len", "range", "max", "sum", "list", "print", "i", "a", "b", "l", "d", "int",
    "float", "bool", "isinstance", "sorted", "reversed", "map", "str", "zip", "nothing", "rec", "grow", "big", "make",
)  # fmt: skip
ATTRIBUTES = (
    "f32", "i32", "u32", "bf16", "f8e4m3", "bool", "i64", "vector", "shared", "math", "exp", "load", "store", "shape",
    "page", "block_id", "thread_id", "x", "barrier", "static", "where", "cast", "reduce", "to", "dtype", "cache_length",
    "num_heads", "laod", "ir", "rank", "append", "get_key_cache", "populate", "wgmma", "tma", "mma_m16n8k16", "prmt",
    "ldmatrix", "cp_async", "mbarrier_init", "shuffle_xor", "warp_reduce", "atomic_add", "printf", "func", "Buffer",
    "block_paged_ptr", "load_tile", "store_tile", "load_scale", "stmatrix", "elect", "fence", "max", "fma", "bitcast",
    "from_lanes", "when", "loop", "if_", "for_", "while_", "__class__", "__dict__", "operand", "row_idx", "pack_bf16x2",
)  # fmt: skip
HELPERS = """
def rec(v):
    return rec(v) if v > 0 else v
def grow(l, v=1):
    l.append(v)
    return v
def big(v):
    for i in range(3):
        for j in kv.static(range(50)):
            v = v + j
    return v
def make(n):
    return [n] * n
"""


def program(seed: int) -> str:
    """The text of a module with a kernel function ``f``."""
    r = random.Random(seed)
    body = _parsed(r.choice(SEEDS))
    donors = _donors()
    for _ in range(r.choice((1, 1, 2, 3, 4, 6, 10))):
        mutation = r.choice(MUTATIONS)
        changed = copy.deepcopy(body)
        mutation(r, changed, donors)
        try:
            _written(changed)
        except (ValueError, SyntaxError, RecursionError, TypeError, AttributeError):
            continue
        body = changed or body
    return _written(body)


@functools.cache
def _donors() -> list[ast.AST]:
    """Every node of every seed, to be copied from."""
    return [n for s in SEEDS for n in ast.walk(ast.Module(_parsed(s), []))]


def _parsed(text: str) -> list[ast.stmt]:
    return ast.parse("def f():" + text).body[0].body  # type: ignore[attr-defined]


def _written(body: list[ast.stmt]) -> str:
    inside = "\n".join("    " + line for s in body or [ast.Pass()] for line in _unparsed(s).splitlines())
    text = f"import kvarn as kv\n{HELPERS}\ndef f({ARGUMENTS}):\n{inside}\n"
    compile(text, "<fuzz>", "exec")
    return text


def _unparsed(node: ast.stmt) -> str:
    return ast.unparse(ast.fix_missing_locations(node))


def _places(body: list[ast.stmt], kind: type | tuple[type, ...]) -> list[tuple[ast.AST, str, int | None, ast.AST]]:
    """Where a node of a kind stands: its parent, the field, the index in it, and the node."""
    found = []
    for parent in ast.walk(ast.Module(body, [])):
        for field, value in ast.iter_fields(parent):
            for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, kind):
                    found.append((parent, field, i, child))
    return found


def _put(place: tuple[ast.AST, str, int | None, ast.AST], new: ast.AST) -> None:
    parent, field, i, _ = place
    if i is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[i] = new


def _read(places: list) -> list:
    return [p for p in places if not isinstance(getattr(p[3], "ctx", None), (ast.Store, ast.Del))]


def _constant(r: random.Random, body: list[ast.stmt], donors: list[ast.AST]) -> None:
    places = _read(_places(body, ast.expr))
    if places:
        _put(r.choice(places), ast.Constant(r.choice(CONSTANTS)))


def _name(r: random.Random, body: list[ast.stmt], donors: list[ast.AST]) -> None:
    places = _places(body, ast.Name)
    if places:
        place = r.choice(places)
        local = [p[3].id for p in places]  # type: ignore[attr-defined]
        place[3].id = r.choice((*local, *local, *NAMES))  # type: ignore[attr-defined]


def _attribute(r: random.Random, body: list[ast.stmt], donors: list[ast.AST]) -> None:
    places = _places(body, ast.Attribute)
    if places:
        r.choice(places)[3].attr = r.choice(ATTRIBUTES)  # type: ignore[attr-defined]


def _operator(r: random.Random, body: list[ast.stmt], donors: list[ast.AST]) -> None:
    places = _places(body, (ast.operator, ast.cmpop, ast.unaryop, ast.boolop))
    if places:
        place = r.choice(places)
        base = next(b for b in (ast.operator, ast.cmpop, ast.unaryop, ast.boolop) if isinstance(place[3], b))
        _put(place, r.choice(base.__subclasses__())())


def _expression(r: random.Random, body: list[ast.stmt], donors: list[ast.AST]) -> None:
    """Another expression, of this kernel or of any."""
    places = _read(_places(body, ast.expr))
    if places:
        pool = [p[3] for p in places] if r.random() < 0.5 else [d for d in donors if isinstance(d, ast.expr)]
        new = copy.deepcopy(r.choice(pool))
        if not isinstance(getattr(new, "ctx", None), (ast.Store, ast.Del)) and not isinstance(new, ast.Slice):
            _put(r.choice(places), new)


def _wrap(r: random.Random, body: list[ast.stmt], donors: list[ast.AST]) -> None:
    """An expression inside an operator, a call, an index or a condition."""
    places = _read(_places(body, ast.expr))
    if not places:
        return
    place, name = r.choice(places), lambda: ast.Name(r.choice(NAMES), ast.Load())
    inner, other = place[3], copy.deepcopy(r.choice(places)[3])
    kv = ast.Attribute(ast.Name("kv", ast.Load()), r.choice(ATTRIBUTES), ast.Load())
    _put(place, r.choice([
        ast.BinOp(inner, r.choice(ast.operator.__subclasses__())(), other),  # type: ignore[arg-type]
        ast.Call(kv, [inner, other][: r.choice((1, 2))], []), ast.Call(name(), [inner], []),  # type: ignore[list-item]
        ast.Subscript(inner, other, ast.Load()), ast.IfExp(other, inner, name()),  # type: ignore[arg-type]
        ast.BoolOp(r.choice((ast.And, ast.Or))(), [inner, other]), ast.List([inner, other], ast.Load()),  # type: ignore[list-item]
        ast.Lambda(ast.arguments([], [], None, [], [], None, []), inner),  # type: ignore[arg-type]
        ast.NamedExpr(ast.Name("a", ast.Store()), inner), ast.UnaryOp(ast.Not(), inner),  # type: ignore[arg-type]
        ast.Attribute(inner, r.choice(ATTRIBUTES), ast.Load()), ast.Starred(inner, ast.Load()),  # type: ignore[arg-type]
        ast.ListComp(inner, [ast.comprehension(ast.Name("i", ast.Store()), ast.Call(ast.Name("range", ast.Load()),
                                                                                    [other], []), [], 0)]),
    ]))  # fmt: skip


def _blocks(body: list[ast.stmt]) -> list[list[ast.stmt]]:
    found = [body]
    for node in ast.walk(ast.Module(body, [])):
        found += [getattr(node, f) for f in ("body", "orelse") if isinstance(getattr(node, f, None), list)]
    return [b for b in found if b and isinstance(b[0], ast.stmt)]


def _statement(r: random.Random, body: list[ast.stmt], donors: list[ast.AST]) -> None:
    """Drop, repeat, move or bring in a statement, or put it into a loop or a branch."""
    block = r.choice(_blocks(body))
    i, kind = r.randrange(len(block)), r.randrange(8)
    expressions = [d for d in donors if isinstance(d, ast.expr) and not isinstance(getattr(d, "ctx", None), ast.Store)]
    test = copy.deepcopy(r.choice(expressions))
    if kind == 0:
        del block[i]
    elif kind == 1:
        block.insert(i, copy.deepcopy(block[r.randrange(len(block))]))
    elif kind == 2:
        block.insert(i, copy.deepcopy(r.choice([d for d in donors if isinstance(d, ast.stmt)])))
    elif kind == 3:
        block[i] = ast.While(test, [block[i]], [])
    elif kind == 4:
        block[i] = ast.If(test, [block[i]], [copy.deepcopy(block[r.randrange(len(block))])] if r.random() < 0.5 else [])
    elif kind == 5:
        over = ast.Call(ast.Name("range", ast.Load()), [test], [])
        block[i] = ast.For(ast.Name(r.choice("ijab"), ast.Store()), over, [block[i]], [], None)
    elif kind == 6:
        block[i] = r.choice((ast.Break, ast.Continue, ast.Return, ast.Pass))()
    else:
        j = r.randrange(len(block))
        block[i], block[j] = block[j], block[i]


Mutation = Callable[[random.Random, list[ast.stmt], list[ast.AST]], None]
MUTATIONS: tuple[Mutation, ...] = (
    _constant, _constant, _name, _name, _name, _attribute, _operator, _expression, _expression, _wrap, _wrap,
    _statement, _statement,
)  # fmt: skip
