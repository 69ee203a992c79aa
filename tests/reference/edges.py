# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lengths at the edges of a kernel's extents, the masks that they are crossed with, and attention over both.

An extent is what a kernel takes at a time: keys or query rows of a tile, tokens of a page, lanes of a warp, positions
of a window or a chunk. A batch has a sequence for each of its edges, so one launch covers them all. What holds no token
is NaN, and outputs are poison before a call.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import cycle
from typing import Any

import numpy as np

from .case import Case, Mask, named
from .places import Place

MOST = 2**31 - 1  # of an i32: what callers write for "no bound"
ALL = bool(os.environ.get("KVARN_TEST_ALL"))


def edges(extent: int, *times: int) -> tuple[int, ...]:
    """0, 1, and around one and several extents: T - 1, T, T + 1, k T - 1, k T + 1, ascending; k is 2 by default."""
    multiples = [k * extent + d for k in times or (2,) for d in (-1, 1)]
    return tuple(sorted({0, 1, extent - 1, extent, extent + 1, *multiples}))


def spans(extent: int) -> tuple[int, ...]:
    """Windows and chunks at the edges of an extent."""
    return tuple(sorted({1, max(1, extent - 1), extent, extent + 1}))


def lengths(keys: Iterable[int], tokens: Iterable[int]) -> tuple[list[int], list[int]]:
    """(cached, new) of a batch in which every edge of keys and of new tokens is met.

    For each number of keys a sequence whose last token is new; for each number of new tokens one whose keys end at an
    edge of keys, or whose first query stands at one, by turns.
    """
    keys, tokens = sorted(set(keys)), sorted(set(tokens))
    pairs = [(max(n - 1, 0), min(n, 1)) for n in keys]
    for i, m in enumerate(tokens):
        behind = [n - m for n in keys if n >= m] if i % 2 else keys[::-1]
        pairs.append((behind[i % len(behind)] if behind else 0, m))
    found = list(dict.fromkeys(pairs))
    return [c for c, _ in found], [m for _, m in found]


# --- masks -------------------------------------------------------------------------------------------


def within(b, h, q, k, spans):
    return (k <= q) & (q - k < spans[b])


def behind(b, h, q, k, spans):
    return (k < spans[b]) | (q - k < 2)


def masks(extent: int, every: bool = ALL) -> list[Mask]:
    """Every kind of mask, with windows and chunks at the edges of an extent of keys."""
    spanned = ("sliding_window", "chunked", "chunked_causal")
    rows = zip(cycle(spanned), spans(extent)[::-1]) if not every else [(m, n) for n in spans(extent) for m in spanned]
    own = (*spans(extent), MOST)
    return [
        named("causal"), named("null"), *(named(*row) for row in rows),
        Mask("window as a function", {"mask": within}, lambda b, h, q, k, n: (k <= q) & (q - k < n), own),
        Mask("prefix as a function", {"mask": behind}, lambda b, h, q, k, n: (k < n) | (q - k < 2), (*own, -MOST - 1)),
    ]  # fmt: skip


def far_masks() -> list[Mask]:
    """Bounds at the ends of i32, as numbers of a mask and of arrays that it reads."""
    numbers = (MOST, -MOST - 1, MOST - 20, 17, 20 - MOST)
    return [
        named("sliding_window", MOST), named("chunked", MOST),
        Mask("before a number", {"mask": lambda b, h, q, k: k < MOST}, lambda b, h, q, k: k < MOST),
        Mask("after a number", {"mask": lambda b, h, q, k: k > -MOST - 1}, lambda b, h, q, k: k > -MOST - 1),
        Mask("before", {"mask": lambda b, h, q, k, n: k < n[b]}, lambda b, h, q, k, n: k < n, numbers),
        Mask("from", {"mask": lambda b, h, q, k, n: k >= n[b]}, lambda b, h, q, k, n: k >= n, numbers),
        Mask("either", {"mask": lambda b, h, q, k, n: (k < n[b]) | (k > q - 3)},
             lambda b, h, q, k, n: (k < n) | (k > q - 3), numbers),
    ]  # fmt: skip


# --- attention ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A kernel of attention, where it runs, and the extents that its batch is made for.

    Attributes
    ----------
    place : Place
    keys : int
        Keys of a tile, or those that are taken at a time.
    rows : int
        Query rows of a tile: tokens times the group.
    case : Case
        With the kernel's schedule; its lengths and its mask are those of edges.
    more : tuple of int
        Further numbers of keys, such as those at the edges of splits.
    most : int, optional
        New tokens that no sequence has more of.
    own_keys : bool
        Whether each sequence has a number of keys of its own, besides cached ones: cross attention.
    brief : bool
        Whether query rows are of up to two tiles, in make check.
    """

    place: Place
    keys: int
    rows: int
    case: Case
    more: tuple[int, ...] = ()
    most: int | None = None
    own_keys: bool = False
    brief: bool = False

    def but(self, **changes: Any) -> Kernel:
        """The same with other attributes, of its own or of its case."""
        own = {name: changes.pop(name) for name in list(changes) if name in KERNEL_FIELDS}
        return replace(self, case=replace(self.case, **changes), **own)

    def under(self, mask: Mask) -> Case:
        """Sequences at all edges, under a mask."""
        of_tile = -(-self.rows // self.case.group)
        tokens = {n for n in edges(of_tile) if ALL or not self.brief or n <= of_tile + 1}
        if self.most is not None:
            tokens = {n for n in tokens if n <= self.most} | {self.most - 1, self.most}
        keys = {*edges(self.keys, 3), *edges(self.case.page_size), *self.more}
        cached, new = lengths(keys, tokens)
        own = None
        if self.own_keys:  # which are stored: no more than there are new tokens
            own = np.minimum(np.resize(np.array([0, 1, 2, self.keys + 1]), len(new)), new).tolist()
        return replace(self.case, cached=cached, new=new, mask=mask, keys=own)


KERNEL_FIELDS = {x.name for x in fields(Kernel)}


def check(kernel: Kernel, tried: Sequence[Mask]) -> None:
    """Every mask's rows are the model's."""
    said = [f"{mask.name}: {x}" for mask in tried for x in kernel.under(mask).failures(kernel.place)]
    assert not said, f"{len(said)} rows of tables differ: " + "; ".join(said[:12])
