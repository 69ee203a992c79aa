# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The keys that a call looks up: of its signature, of its program in memory, of its code in the disk cache.

Nothing is compiled: the last look-up ends the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import kvarn as kv
from kvarn import dispatch
from kvarn.compilation import driver as compiler
from kvarn.compilation.disk_cache import cache_key
from kvarn.ops import reads

COMPILE, PROGRAM, LAUNCH = "compile", "program", "launch"
ALL, NONE = {COMPILE, PROGRAM, LAUNCH}, set[str]()
State = AbstractContextManager[Any]
Change = Callable[[], tuple[State, State]]


class _Looked(Exception):
    """The last key was looked up."""


class _Table(dict[Any, Any]):
    """A table that is empty, and keeps what is looked up in it."""

    def __init__(self, name: str, keys: dict[str, Any]) -> None:
        self.name, self.keys_ = name, keys

    def get(self, key: Any, default: Any = None) -> Any:
        hash(key)
        self.keys_[self.name] = key
        return None


@contextlib.contextmanager
def looked_up() -> Iterator[dict[str, Any]]:
    """The keys that are looked up inside, of a call that ends where it would be compiled."""
    found: dict[str, Any] = {}

    def parts(given: Any) -> str:
        found["parts"] = dict(given)
        return cache_key(given)

    def load(key: Any) -> Any:
        found[COMPILE] = key
        raise _Looked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "cache_key", parts)
        patch.setattr(compiler, "load_cached", load)
        patch.setattr(dispatch, "_programs", _Table(PROGRAM, found))
        patch.setattr(reads._ATTENTION, "_known", _Table(LAUNCH, found))
        patch.setattr(read, "_compiled", _Table(PROGRAM, found))
        with contextlib.suppress(_Looked):
            yield found


@kv.kernel
def read(cache: kv.KVCache, out: kv.Buffer[kv.f32, 1]):
    out[0] = cache.load(0, 0, 0, 0)


def pool(**given: Any) -> Any:
    """A small paged collection on the host."""
    shape = {"dtype": np.float32, "pages": 2, "batch": 1, "readonly": False} | given
    blocks = np.zeros((shape["pages"], 2, 1, 16, 2, 16), shape["dtype"])
    blocks.flags.writeable = not shape["readonly"]
    lengths, table = np.zeros(shape["batch"], np.uint32), np.zeros((shape["batch"], 1), np.uint32)
    return kv.PagedKVCacheCollection(blocks, lengths, table, 4, 16)


POOL, OFFSETS = pool(), np.array([0, 1], np.uint32)
QUERY, OUT = np.zeros((1, 4, 16), np.float32), np.zeros((1, 4, 16), np.float32)


def call_attention() -> None:
    kv.ops.attention(POOL, 0, QUERY, OFFSETS, out=OUT)


def call_kernel() -> None:
    read[1, 1](POOL.get_key_cache(0), np.zeros(1, np.float32))


CALLS = {"operation": call_attention, "kernel": call_kernel}


def keys_in(state: State, call: Callable[[], Any]) -> dict[str, Any]:
    with state, looked_up() as found:
        call()
    return found


def check(change: Change, call: Callable[[], Any], expected: set[str]) -> set[str]:
    """Compare the keys of a call in two states; the parts of the compile cache's key that differ."""
    a, b = (keys_in(state, call) for state in change())
    has = a.keys() & b.keys() & ALL  # an emulation has its own programs
    assert has > {COMPILE}
    found = {name for name in has if a[name] != b[name]}
    assert found == expected & has, f"differ: {sorted(found)}, expected {sorted(expected & has)}"
    parts = [x.get("parts", {}) for x in (a, b)]  # none where passes are inserted, whose code no cache has
    return {name for name in parts[0].keys() & parts[1] if parts[0][name] != parts[1][name]}


@dataclass(frozen=True)
class Row:
    """Two states, and which keys of which calls differ between them."""

    name: str
    change: Change
    differ: set[str]
    calls: tuple[str, ...] = tuple(CALLS)


def beside(state: Callable[[], State]) -> Change:
    """A state, and none."""
    return lambda: (nullcontext(), state())
