# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Code is never kept when what it reads has changed: of kernels, scores and masks, in every way of reading."""

import gc
import itertools
import sys
import textwrap
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvarn as kv
from kvarn.dsl import captures
from kvarn.ops import functions


class Way(NamedTuple):
    """A way to read a number that is 2 before ``change`` and 5 after; ``names``: variables that the change binds."""

    setup: str
    read: str
    change: str
    names: str = ""
    scores: bool = True  # whether a score may read so; of kernels all may


WAYS = {
    "number": Way("cap = 2.0", "cap", "cap = 5.0", "cap"),
    "int": Way("cap = 2", "cap", "cap = 5", "cap"),
    "int to float": Way("cap = 5", "2.0 if isinstance(cap, int) else 5.0", "cap = 5.0", "cap"),
    "bool to int": Way("cap = True", "2.0 if cap is True else 5.0", "cap = 1", "cap"),
    "sign of zero": Way("cap = 0.0", "2.0 if str(cap) == '0.0' else 5.0", "cap = -0.0", "cap"),
    "none": Way("cap = None", "2.0 if cap is None else cap", "cap = 5.0", "cap"),
    "string": Way("kind = 'two'", "2.0 if kind == 'two' else 5.0", "kind = 'five'", "kind"),
    "bytes": Way("cap = b'2'", "float(cap)", "cap = b'5'", "cap"),
    "complex": Way("cap = 2j", "cap.imag", "cap = 5j", "cap"),
    "range": Way("cap = range(2)", "len(cap)", "cap = range(5)", "cap"),
    "dtype": Way("kind = kv.f16", "2.0 if kind is kv.f16 else 5.0", "kind = kv.f32", "kind"),
    "numpy scalar": Way("cap = np.float32(2)", "float(cap)", "cap = np.float32(5)", "cap"),
    "numpy dtype": Way("kind = np.dtype('f4')", "2.0 if kind.itemsize == 4 else 5.0", "kind = np.dtype('f8')", "kind"),
    "tuple": Way("caps = (1.0, 2.0)", "caps[1]", "caps = (1.0, 5.0)", "caps"),
    "tuple of tuples": Way("caps = (1.0, (2.0,))", "caps[1][0]", "caps = (1.0, (5.0,))", "caps"),
    "namedtuple": Way("P = collections.namedtuple('P', 'cap')\np = P(2.0)", "p.cap", "p = P(5.0)", "p"),
    "frozen set": Way("caps = frozenset([2])", "max(caps)", "caps = frozenset([5])", "caps"),
    "fraction": Way("cap = fractions.Fraction(2)", "float(cap)", "cap = fractions.Fraction(5)", "cap"),
    "path": Way("cap = pathlib.Path('2')", "float(cap.name)", "cap = pathlib.Path('5')", "cap"),
    "enum": Way("class E(enum.Enum):\n    A = 2.0\n    B = 5.0\ne = E.A", "e.value", "e = E.B", "e"),
    "int enum": Way("class E(enum.IntEnum):\n    A = 2\n    B = 5\ne = E.A", "int(e)", "e = E.B", "e"),
    "member of an enum": Way(
        "class E(enum.Enum):\n    A = 2.0\n    B = 5.0\nF = E", "F.A.value",
        "class F(enum.Enum):\n    A = 5.0", "F",
    ),
    "list": Way("caps = [2.0]", "caps[0]", "caps[0] = 5.0"),
    "list in a list": Way("caps = [[2.0]]", "caps[0][0]", "caps[0][0] = 5.0"),
    "list that grows": Way("caps = [1, 1]", "float(len(caps))", "caps += [1, 1, 1]", "caps"),
    "list of a tuple": Way("caps = ([2.0],)", "caps[0][0]", "caps[0][0] = 5.0"),
    "dict": Way("caps = {'a': 2.0}", "caps['a']", "caps['a'] = 5.0"),
    "dict by get": Way("caps = {}", "caps.get('a', 2.0)", "caps['a'] = 5.0"),
    "order of a dict": Way("caps = {2.0: 0, 5.0: 0}", "[*caps][0]", "caps[2.0] = caps.pop(2.0)"),
    "default dict": Way("caps = collections.defaultdict(lambda: 2.0)", "caps['a']", "caps['a'] = 5.0", scores=False),
    "deque": Way("caps = collections.deque([2.0])", "caps[0]", "caps[0] = 5.0"),
    "set": Way("caps = {2}", "max(caps)", "caps.add(5)"),
    "byte array": Way("caps = bytearray([2])", "float(caps[0])", "caps[0] = 5"),
    "mapping proxy": Way("d = {'a': 2.0}\ncaps = types.MappingProxyType(d)", "caps['a']", "d['a'] = 5.0"),
    "array": Way("caps = np.array([2.0])", "float(caps[0])", "caps[0] = 5.0", scores=False),
    "array in a dict": Way("caps = {'a': np.array([2.0])}", "float(caps['a'][0])", "caps['a'][0] = 5.0", scores=False),
    "array without dimensions": Way("cap = np.array(2.0)", "float(cap)", "cap[...] = 5.0"),
    "class": Way("class C:\n    cap = 2.0", "C.cap", "C.cap = 5.0"),
    "base of a class": Way("class B:\n    cap = 2.0\nclass C(B):\n    pass", "C.cap", "B.cap = 5.0"),
    "class that hides its base": Way("class B:\n    cap = 2.0\nclass C(B):\n    pass", "C.cap", "C.cap = 5.0"),
    "class that loses what hides": Way("class B:\n    cap = 5.0\nclass C(B):\n    cap = 2.0", "C.cap", "del C.cap"),
    "class in a class": Way("class C:\n    class D:\n        cap = 2.0", "C.D.cap", "C.D.cap = 5.0"),
    "another name of a class": Way("class C:\n    cap = 2.0", "[C][0].cap", "C.cap = 5.0"),
    "list of a class": Way("class C:\n    caps = [2.0]", "C.caps[0]", "C.caps[0] = 5.0"),
    "property of a metaclass": Way(
        "class M(type):\n    @property\n    def cap(cls):\n        return cls.value\n"
        "class C(metaclass=M):\n    value = 2.0",
        "C.cap", "C.value = 5.0",
    ),
    "attribute of a metaclass": Way("class M(type):\n    pass\nM.cap = 2.0\nclass C(metaclass=M):\n    pass", "C.cap",
                                    "M.cap = 5.0"),
    "namespace": Way("c = types.SimpleNamespace(cap=2.0)", "c.cap", "c.cap = 5.0"),
    "namespace in one": Way("c = types.SimpleNamespace(d=types.SimpleNamespace(cap=2.0))", "c.d.cap", "c.d.cap = 5.0"),
    "arguments": Way("c = argparse.Namespace(cap=2.0)", "c.cap", "c.cap = 5.0"),
    "object": Way("class C:\n    pass\nc = C()\nc.cap = 2.0", "c.cap", "c.cap = 5.0"),
    "object that hides its class": Way("class C:\n    cap = 2.0\nc = C()", "c.cap", "c.cap = 5.0"),
    "class of an object": Way("class C:\n    cap = 2.0\nc = C()", "c.cap", "C.cap = 5.0"),
    "object of another class": Way(
        "class C:\n    cap = 2.0\nclass D:\n    cap = 5.0\nc = C()", "c.cap", "c.__class__ = D"
    ),
    "slots": Way("class C:\n    __slots__ = ('cap',)\nc = C()\nc.cap = 2.0", "c.cap", "c.cap = 5.0"),
    "slot that is empty": Way("class C:\n    __slots__ = ('cap',)\nc = C()", "getattr(c, 'cap', 2.0)", "c.cap = 5.0"),
    "dataclass": Way("@dataclasses.dataclass\nclass C:\n    cap: float\nc = C(2.0)", "c.cap", "c.cap = 5.0"),
    "frozen dataclass": Way(
        "@dataclasses.dataclass(frozen=True)\nclass C:\n    cap: float\nc = C(2.0)", "c.cap", "c = C(5.0)", "c"
    ),
    "frozen dataclass by force": Way(
        "@dataclasses.dataclass(frozen=True)\nclass C:\n    cap: float\nc = C(2.0)", "c.cap",
        "object.__setattr__(c, 'cap', 5.0)",
    ),
    "list of a frozen dataclass": Way(
        "@dataclasses.dataclass(frozen=True)\nclass C:\n    caps: list\nc = C([2.0])", "c.caps[0]", "c.caps[0] = 5.0"
    ),
    "object by another name": Way("class C:\n    pass\nc = C()\nc.cap = 2.0", "(lambda x: x.cap)(c)", "c.cap = 5.0"),
    "getattr": Way("class C:\n    pass\nc = C()\nc.cap = 2.0", "getattr(c, 'c' + 'ap')", "c.cap = 5.0"),
    "getattr of a class": Way("class C:\n    cap = 2.0", "getattr(C, 'c' + 'ap')", "C.cap = 5.0"),
    "vars": Way(
        "c = types.SimpleNamespace(cap=2.0)\ndef f(x):\n    return vars(x)['cap']", "kv.static(f(c))", "c.cap = 5.0"
    ),
    "property": Way(
        "class C:\n    def __init__(self):\n        self._x = 2.0\n"
        "    @property\n    def cap(self):\n        return self._x\nc = C()", "c.cap", "c._x = 5.0",
    ),
    "what a property reads": Way(
        "base = 2.0\nclass C:\n    @property\n    def cap(self):\n        return base\nc = C()",
        "c.cap", "base = 5.0", "base",
    ),
    "cached property": Way(
        "class C:\n    @functools.cached_property\n    def cap(self):\n        return 2.0\nc = C()",
        "c.cap", "c.cap = 5.0",
    ),
    "method": Way(
        "class C:\n    def cap(self):\n        return self.x\nc = C()\nc.x = 2.0", "c.cap()", "c.x = 5.0"
    ),
    "method that is replaced": Way(
        "class C:\n    def cap(self):\n        return 2.0\nc = C()", "c.cap()", "C.cap = lambda self: 5.0"
    ),
    "bound method": Way(
        "class C:\n    def cap(self):\n        return self.x\nc = C()\nc.x = 2.0\nf = c.cap", "f()", "c.x = 5.0"
    ),
    "static method": Way(
        "class C:\n    @staticmethod\n    def cap():\n        return 2.0",
        "C.cap()", "C.cap = staticmethod(lambda: 5.0)",
    ),
    "what a static method reads": Way(
        "base = 2.0\nclass C:\n    @staticmethod\n    def cap():\n        return base", "C.cap()", "base = 5.0", "base"
    ),
    "class method": Way(
        "class C:\n    x = 2.0\n    @classmethod\n    def cap(cls):\n        return cls.x", "C.cap()", "C.x = 5.0"
    ),
    "call of an object": Way(
        "class C:\n    def __call__(self):\n        return self.x\nc = C()\nc.x = 2.0", "c()", "c.x = 5.0"
    ),
    "operator of an object": Way(
        "class C:\n    def __getitem__(self, i):\n        return self.x\nc = C()\nc.x = 2.0", "c[0]", "c.x = 5.0"
    ),
    "number of an object": Way(
        "class C:\n    def __float__(self):\n        return self.x\nc = C()\nc.x = 2.0", "float(c)", "c.x = 5.0"
    ),
    "__getattr__": Way(
        "class C:\n    def __init__(self):\n        self.table = {'cap': 2.0}\n"
        "    def __getattr__(self, name):\n        return self.__dict__['table'][name]\nc = C()",
        "c.cap", "c.table['cap'] = 5.0",
    ),
    "descriptor": Way(
        "class D:\n    x = 2.0\n    def __get__(self, obj, cls):\n        return self.x\n"
        "class C:\n    cap = D()\nc = C()",
        "c.cap", "vars(C)['cap'].x = 5.0",
    ),
    "object that is made": Way(
        "base = 2.0\nclass C:\n    def __init__(self):\n        self.cap = base", "C().cap", "base = 5.0", "base"
    ),
    "object of a list": Way("c = types.SimpleNamespace(cap=2.0)\ncs = [c]", "cs[0].cap", "c.cap = 5.0"),
    "list with an attribute": Way("class L(list):\n    pass\nc = L()\nc.cap = 2.0", "c.cap", "c.cap = 5.0"),
    "number with an attribute": Way("class F(float):\n    pass\nc = F(1)\nc.cap = 2.0", "c.cap", "c.cap = 5.0"),
    "module": Way("m = types.ModuleType('m')\nm.cap = 2.0", "m.cap", "m.cap = 5.0"),
    "list of a module": Way("m = types.ModuleType('m')\nm.caps = [2.0]", "m.caps[0]", "m.caps[0] = 5.0"),
    "class of a module": Way(
        "m = types.ModuleType('m')\nclass C:\n    cap = 2.0\nm.C = C", "m.C.cap", "C.cap = 5.0"
    ),
    "__getattr__ of a module": Way(
        "m = types.ModuleType('m')\nm.__getattr__ = lambda name: 2.0", "m.cap", "m.__getattr__ = lambda name: 5.0"
    ),
    "environment": Way("os.environ['CAP_OF_A_TEST'] = '2'", "float(os.environ['CAP_OF_A_TEST'])",
                       "os.environ['CAP_OF_A_TEST'] = '5'"),
    "getenv": Way("os.environ['CAP_OF_A_TEST'] = '2'", "float(os.getenv('CAP_OF_A_TEST'))",
                  "os.environ['CAP_OF_A_TEST'] = '5'"),
    "another name of the environment": Way(
        "e = os.environ\ne['CAP_OF_A_TEST'] = '2'", "float(e['CAP_OF_A_TEST'])", "e['CAP_OF_A_TEST'] = '5'"
    ),
    "helper": Way("def f():\n    return 2.0", "f()", "def f():\n    return 5.0", "f"),
    "code of a helper": Way("def f():\n    return 2.0", "f()", "f.__code__ = (lambda: 5.0).__code__"),
    "what a helper reads": Way("cap = 2.0\ndef f():\n    return cap", "f()", "cap = 5.0", "cap"),
    "what a helper's helper reads": Way(
        "class C:\n    cap = 2.0\ndef f():\n    return C.cap\ndef g():\n    return f()", "g()", "C.cap = 5.0"
    ),
    "what a helper closes over": Way(
        "def around(x):\n    return lambda: x\nf = around(2.0)", "f()", "f = around(5.0)", "f"
    ),
    "what a helper closes over and changes": Way(
        "def around(x):\n    def f():\n        return x\n    def change(to):\n        nonlocal x\n        x = to\n"
        "    return f, change\nf, to = around(2.0)", "f()", "to(5.0)",
    ),
    "default of a helper": Way("def f(x=2.0):\n    return x", "f()", "f.__defaults__ = (5.0,)"),
    "list as a default": Way("def f(x=[2.0]):\n    return x[0]", "f()", "f.__defaults__[0][0] = 5.0"),
    "keyword default of a helper": Way("def f(*, x=2.0):\n    return x", "f()", "f.__kwdefaults__ = {'x': 5.0}"),
    "keyword default that changes": Way("def f(*, x=2.0):\n    return x", "f()", "f.__kwdefaults__['x'] = 5.0"),
    "attribute of a helper": Way("def f():\n    return f.cap\nf.cap = 2.0", "f()", "f.cap = 5.0"),
    "attribute of a function": Way("def f():\n    pass\nf.cap = 2.0", "f.cap", "f.cap = 5.0"),
    "helper in a dict": Way("fs = {'f': lambda: 2.0}", "fs['f']()", "fs['f'] = lambda: 5.0"),
    "helper in a namespace": Way("c = types.SimpleNamespace(f=lambda: 2.0)", "c.f()", "c.f = lambda: 5.0"),
    "argument of a helper": Way(
        "class C:\n    cap = 2.0\ndef f(x):\n    return x.cap", "f(C)", "C.cap = 5.0"
    ),
    "partial": Way(
        "def f(x):\n    return x\ng = functools.partial(f, 2.0)", "g()", "g = functools.partial(f, 5.0)", "g"
    ),
    "what a partial reads": Way(
        "cap = 2.0\ndef f(x):\n    return cap\ng = functools.partial(f, 1)", "g()", "cap = 5.0", "cap"
    ),
    "what a decorated helper reads": Way(
        "cap = 2.0\ndef d(f):\n    @functools.wraps(f)\n    def g():\n        return f()\n    return g\n"
        "@d\ndef f():\n    return cap", "f()", "cap = 5.0", "cap",
    ),
    "what is called natively reads": Way("cap = 2.0\ndef f():\n    return cap", "kv.static(f())", "cap = 5.0", "cap"),
    "value within kv.static": Way("c = types.SimpleNamespace(cap=2.0)", "kv.static(c.cap)", "c.cap = 5.0"),
    "comprehension": Way("caps = [2.0]", "[c for c in caps][0]", "caps[0] = 5.0"),
    "name that hides a builtin": Way("", "max(2.0, 1.0)", "max = lambda a, b: 5.0", "max"),
    "kernel that is called": Way(
        "cap = 2.0\n@kv.kernel\ndef inner():\n    return cap", "inner()", "cap = 5.0", "cap", scores=False
    ),
}  # fmt: skip

HEAD = (
    "import argparse, collections, dataclasses, enum, fractions, functools, os, pathlib, types\n"
    "import numpy as np\nimport kvarn as kv\n"
)
BODY = """
@kv.kernel
def kernel(out: kv.Buffer[kv.f32, 1]):
    out[0] = kv.f32(1.0) * ({read})

score = lambda s, b, h, q, k: s * ({read})

def again():
    return lambda s, b, h, q, k: s * ({read})

def change():
    {binding}
{change}
"""
_files = itertools.count()


def made(folder: Any, way: Way, local: bool) -> Any:
    """The kernel, the score and the rest, whose reads are of globals or of variables of a function around."""
    names = way.names.split()
    kind = "nonlocal" if local and way.setup else "global"  # what the setup does not bind is of no function around
    binding = f"{kind} {', '.join(names)}" if names else "pass"
    body = way.setup + BODY.format(read=way.read, binding=binding, change=textwrap.indent(way.change, "    "))
    if local:
        body = "def around():\n" + textwrap.indent(body, "    ")
        body += "\n    return kernel, score, again, change\nkernel, score, again, change = around()\n"
    path = folder / f"way{next(_files)}.py"
    path.write_text(HEAD + body)
    scope: dict[str, Any] = {"__name__": "ways_of_reading"}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    return scope


def read(kernel: Any) -> float:
    out = np.zeros(1, np.float32)
    kernel[1, 1](out)
    return float(out[0])


def named(function: Any) -> str:
    return functions.given(function, "score", "kv.ops.attention")[0]


CASES = [(name, local) for name in WAYS for local in (False, True)]
IDS = [f"{name}, {'closed over' if local else 'global'}" for name, local in CASES]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "local"), CASES, ids=IDS)
def test_a_kernel_sees_what_has_changed(name, local, tmp_path):
    scope = made(tmp_path, WAYS[name], local)
    assert [read(scope["kernel"]) for _ in range(3)] == [2.0] * 3
    scope["change"]()
    assert [read(scope["kernel"]) for _ in range(3)] == [5.0] * 3


@pytest.mark.whole
@pytest.mark.parametrize(("name", "local"), CASES, ids=IDS)
def test_a_score_and_a_new_one_of_the_same_text_see_what_has_changed(name, local, tmp_path):
    scope, way = made(tmp_path, WAYS[name], local), WAYS[name]
    if not way.scores:
        pytest.skip("of kernels only")
    before = [named(scope["score"]), named(scope["again"]()), named(scope["again"]())]
    assert before[1] == before[2]
    scope["change"]()
    after = [named(scope["score"]), named(scope["again"]()), named(scope["again"]())]
    assert after[1] == after[2]
    assert not set(before) & set(after)


@pytest.mark.parametrize("name", ["class", "property", "dict"])
def test_attention_computes_with_what_has_changed(name, tmp_path):
    scope = made(tmp_path, WAYS[name], False)
    blocks = np.random.default_rng(1).standard_normal((3, 2, 1, 4, 1, 8)).astype(np.float32)
    c = kv.PagedKVCacheCollection(blocks, np.array([5], np.uint32), np.array([[0, 1, 2]], np.uint32), 1, 12)
    query, offsets = np.ones((1, 1, 8), np.float32), np.array([0, 1], np.uint32)
    rows = [kv.ops.attention(c, 0, query, offsets, scale=0.5, score=scope["score"])]
    scope["change"]()
    rows.append(kv.ops.attention(c, 0, query, offsets, scale=0.5, score=scope["score"]))
    want = [kv.ops.attention(c, 0, query, offsets, scale=0.5 * cap) for cap in (2, 5)]
    np.testing.assert_allclose(rows, want, rtol=1e-5)


# --- what cannot be compared -------------------------------------------------------------------------

REFUSED = {
    "lock": ("import threading\nx = threading.Lock()", "1.0 if x.locked() else 2.0", "'x' is a lock"),
    "iterator": ("x = iter([2.0])", "next(x)", "'x' is a list_iterator"),
    "large list": ("x = [2.0] * 5000", "x[0]", r"'x' is a list of many values \(more than 2000"),
    "large dict": ("x = dict.fromkeys(range(5000), 2.0)", "x[0]", "'x' is a dict of many values"),
    "large array": ("x = np.ones(5000) * 2", "float(x[0])", "'x' is an array"),
    "attribute": (
        "import threading\nx = types.SimpleNamespace(y=threading.Lock())", "2.0 if x.y else 0.0", "'x.y' is a lock"
    ),
    "in a list": ("x = [iter([2.0])]", "2.0 if x[0] else 0.0", r"'x\[0\]' is a list_iterator"),
    "context variable": (
        "import contextvars\nx = contextvars.ContextVar('x', default=2.0)", "x.get()", "'x' is a ContextVar"
    ),
    "local of a thread": (
        "import threading\nx = threading.local()\nx.y = 2.0\ndef f(x):\n    return x.y", "f(x)", "'x' is a _local"
    ),
    "random numbers": ("import random\nx = random.Random(1)", "2.0 + 0 * x.random()", "'x' is a Random"),
}  # fmt: skip


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_is_refused_by_name_with_the_way_out(name, local, tmp_path):
    setup, text, message = REFUSED[name]
    scope = made(tmp_path, Way(setup, text, "pass"), local)
    with pytest.raises(kv.KernelError, match=f"kernel: {message}") as refused:
        read(scope["kernel"])
    if name != "large array":  # whose message speaks of arrays beside the function
        assert "pass it as an argument, or write kv.static(...)" in str(refused.value)
    with pytest.raises(TypeError, match=f"kv.ops.attention: score: {message}"):
        named(scope["score"])


@pytest.mark.parametrize("name", sorted(set(REFUSED) - {"iterator", "random numbers"}))
def test_within_kv_static_it_is_taken_as_it_is(name, tmp_path):
    setup, text, _ = REFUSED[name]
    scope = made(tmp_path, Way(setup, f"kv.static({text})", "x = [7.0]", "x"), False)
    assert read(scope["kernel"]) == read(scope["kernel"])
    before = scope["kernel"].captured()
    scope["change"]()
    assert scope["kernel"].captured() != before  # another object is another value


def test_attributes_that_no_code_names_may_be_anything(tmp_path):
    setup = "import threading\nclass C:\n    guard = threading.Lock()\n    def f(self):\n        return self.cap\n"
    setup += "c = C()\nc.cap, c.lock, c.made = 2.0, threading.Lock(), iter([])"
    scope = made(tmp_path, Way(setup, "c.f()", "c.cap = 5.0"), False)
    assert read(scope["kernel"]) == 2.0
    scope["change"]()
    assert read(scope["kernel"]) == 5.0


# --- keys --------------------------------------------------------------------------------------------


def numbers() -> Iterator[Any]:
    yield from [2, 2.0, np.float32(2), np.float64(2), np.int32(2), True, "2", b"2", None]
    yield from [(2,), (2.0,), [2], {2: 2}, {2}]


def test_values_that_python_takes_for_equal_are_told_apart():
    def of(value):
        return lambda: value

    assert len({captures.captured(of(v)).number for v in numbers()}) == len(list(numbers()))
    assert [captures.captured(of(v)).number for v in numbers()] == [captures.captured(of(v)).number for v in numbers()]


def test_what_refers_to_itself_is_looked_at_once(tmp_path):
    setup = "c = types.SimpleNamespace(cap=2.0)\nc.own, x = c, [c]\nx.append(x)\n"
    setup += "def f():\n    return (f, g) and c.own.own.cap\ndef g():\n    return f and x"
    scope = made(tmp_path, Way(setup, "f()", "c.cap = 5.0"), False)
    assert read(scope["kernel"]) == 2.0
    scope["change"]()
    assert read(scope["kernel"]) == 5.0


def test_a_static_argument_counts_by_what_it_holds(tmp_path):
    path = tmp_path / "static.py"
    path.write_text(
        HEAD + "cap = 2.0\ndef f():\n    return cap\n@kv.kernel\n"
        "def kernel(out: kv.Buffer[kv.f32, 1], fs: tuple):\n    out[0] = kv.f32(1.0) * fs[0]()\n"
    )
    scope: dict[str, Any] = {"__name__": "static_of_a_test"}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    out, found = np.zeros(1, np.float32), []
    for cap in (2.0, 5.0, 2.0):
        scope["cap"] = cap
        scope["kernel"][1, 1](out, (scope["f"],))
        found.append(float(out[0]))
    assert found == [2.0, 5.0, 2.0]


def test_scores_of_equal_values_share_a_name_in_every_process(tmp_path):
    import subprocess
    import sys

    (tmp_path / "mine.py").write_text(
        HEAD + "class C:\n    caps = {'b', 'a'}\n    cap = 2.0\n"
        "c = types.SimpleNamespace(x=C, y=[1, {'k': np.float32(3)}])\n"
        "f = lambda s, b, h, q, k: s * c.x.cap * len(c.x.caps) * c.y[1]['k']\n"
    )
    code = "import mine\nfrom kvarn.ops.functions import given\nprint(given(mine.f, 'score', '')[0])"
    texts = {
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(texts) == 1
    assert "@local" not in texts.pop()


def test_no_object_is_kept_alive_by_what_reads_it(tmp_path):
    import gc
    import weakref

    setup = "class C:\n    pass\ndef made(c):\n    @kv.kernel\n"
    setup += "    def k(x: kv.Buffer[kv.f32, 1]):\n        x[0] = c.cap * 1.0\n    return k"
    scope = made(tmp_path, Way(setup, "1.0", "pass"), False)
    seen = []
    for cap in (2.0, 5.0):
        c = scope["C"]()
        c.cap, c.weights = cap, np.zeros(1000)
        seen += [weakref.ref(c), weakref.ref(c.weights)]
        kernel = scope["made"](c)
        assert [read(kernel) for _ in range(2)] == [cap] * 2
    del c, kernel
    gc.collect()
    assert [ref() for ref in seen] == [None] * 4


def test_a_collection_that_a_kernel_closes_over_counts_by_its_spec_and_addresses(tmp_path):
    import gc
    import weakref

    setup = "def made(c):\n    @kv.kernel\n    def k(x: kv.Buffer[kv.f32, 1]):\n"
    setup += "        x[0] = 1.0 * c.head_size\n    return k"
    scope = made(tmp_path, Way(setup, "1.0", "pass"), False)
    blocks = [np.zeros((3, 2, 1, 4, 1, size), np.float32) for size in (8, 16)]
    tables = np.array([1], np.uint32), np.array([[0, 1, 2]], np.uint32)
    pools = [kv.PagedKVCacheCollection(b, *tables, 1, 12) for b in blocks]
    assert [read(scope["made"](pool)) for pool in pools for _ in range(2)] == [8.0, 8.0, 16.0, 16.0]
    assert [read(scope["made"](pool.get_key_cache(0))) for pool in pools] == [8.0, 16.0]
    alive = weakref.ref(blocks[0])
    del blocks, pools
    gc.collect()
    assert alive() is None


# --- the check before every launch -------------------------------------------------------------------

_launches: Any = sys.modules.get("kvarn.runtime._launches")
native_check = pytest.mark.skipif(not hasattr(_launches, "check"), reason="the native part is not there, or is older")


@native_check
def test_the_native_check_is_of_a_function_and_what_stands_where_it_stood():
    class Holder:
        value = marker = object()

    def function(): ...

    space = {"name": marker_of(Holder)}
    same = _launches.check(
        function,
        [(0, Holder, "value", Holder.marker), (1, space, "name", Holder.marker), (2, function, "__dict__", None)],
    )
    assert same(function)
    assert not same(lambda: 0)
    function.more = 1  # type: ignore[attr-defined]
    assert not same(function)
    del function.more  # type: ignore[attr-defined]
    assert same(function)
    Holder.value = object()
    assert not same(function)
    del Holder.value
    assert not same(function)
    Holder.value = Holder.marker
    assert same(function)
    del space["name"]
    assert not same(function)
    for wrong in ([(3, space, "name", None)], [(1, function, "name", None)], [0], [(0, space, 1, None)], ()):
        with pytest.raises((TypeError, ValueError)):
            _launches.check(function, wrong)


def marker_of(holder: Any) -> Any:
    return holder.marker


@native_check
def test_the_native_check_is_garbage_with_what_it_holds():
    def function(): ...

    space: dict[str, Any] = {"function": function}
    space["check"] = _launches.check(function, [(1, space, "function", function)])
    assert space["check"](function)
    gone = weakref.ref(function)
    del space, function
    gc.collect()
    assert gone() is None


def test_a_kernel_over_an_equal_number_of_another_object_is_the_same_kernel(monkeypatch):
    def make(by: float) -> Any:
        @kv.kernel
        def scaled(x: kv.Buffer[kv.f32, 1]):
            x[0] = x[0] * by

        return scaled

    x, kernels = np.ones(1, np.float32), [make(float(text)) for text in ("1.5", "1.5")]
    for _ in range(3):
        for kernel in kernels:
            kernel[1, 1](x)
    assert x[0] == np.float32(1.5) ** 6
    monkeypatch.setattr(captures, "captured", None)  # by now the check says so
    for kernel in kernels:
        kernel[1, 1](x)
