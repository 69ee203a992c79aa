# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rules of every kernel of attention, each a case and what may not change its bits: pages, other rows, other keys.

A rule takes the place and a case with the kernel's schedule; what it is about, such as lengths, it chooses itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvarn.emulator import Order

from .case import LAYER, Case, assert_same_bits, window
from .places import Place
from .random_caches import clone
from .shared_prefixes import permuted


def nan_queries(place: Place, case: Case) -> None:
    """The log-sum-exp of a row that is NaN is NaN: minus infinity would make a merge take it for a row without keys."""
    case = replace(case, cached=[40, 200], new=[2, 2])
    case.query_rows[1] = np.nan
    for found in case.run(place):
        assert np.isnan(found[1].astype(np.float32)).all()
        assert np.isfinite(found[[0, 2, 3]].astype(np.float32)).all()


def pages_elsewhere(place: Place, case: Case, keys: int) -> None:
    """Pages in another order: the same bits."""
    case = replace(case, cached=[keys - 1], new=[1])
    case.check(place)
    moved = place.collection(permuted(case.problem).collection), LAYER
    found = case.launch(place, case.operation, moved, case.query_rows, case.offsets)
    assert_same_bits(found, case.run(place))


RANDOM = Order("random", "random", 1)  # of warps and copies


def move_pages(case: Case) -> None:
    """Pages of a case in another order."""
    case.problem.collection = permuted(case.problem).collection


def poisoned_tails(place: Place, case: Case, new: Sequence[int]) -> None:
    """Slots past a sequence's last token may hold anything: the output is that of a clean pool, bit for bit."""
    case = replace(case, cached=[36, 99, 0], new=new)
    first, *others = (replace(case, shape={"poison": x}).run(place) for x in (0.0, 5.0, np.nan))
    assert np.isfinite(first[0].astype(np.float32)).all()
    for other in others:
        assert_same_bits(other, first)


def garbage_queries(place: Place, case: Case, width: int, seed: int = 0) -> None:
    """Speculative rows of NaN, and of finite numbers of any size: the first row of each sequence keeps its bits."""
    cached = np.random.default_rng(seed).integers((1, 0, 60), (200, 8, 140)).tolist()
    case = replace(case, cached=cached, new=[width] * 3, seed=seed)
    clean = case.run(place)[0][::width]
    assert np.isfinite(clean.astype(np.float32)).all()
    for rest in (np.nan, 1e19):
        garbage = replace(case)
        garbage.query_rows.reshape(3, width, -1)[:, 1:] = rest
        found, _ = garbage.run(place)
        assert_same_bits(found[::width], clean)
        if np.isnan(rest):
            others = found.reshape(3, width, -1)[:, 1:].astype(np.float32)
            assert np.isnan(others).all(), "NaN asked, NaN answered"


def masked_keys(place: Place, case: Case, cached: int, new: int) -> None:
    """Keys that are NaN and finite values of any size, both of later tokens, do not show in earlier rows."""
    case, row = replace(case, cached=[cached], new=[new]), new // 2
    changed = clone(case.problem.collection)
    later = np.arange(cached + row + 1, cached + new)[:, None, None]
    for cache, fill in ((changed.get_key_cache(LAYER), np.nan), (changed.get_value_cache(LAYER), 3e38)):
        rows = np.full((len(later), 1, case.head_size), fill, cache.dtype.numpy)
        cache.store(0, np.zeros((1, 1), int), later, np.arange(case.head_size), rows)
    source = place.collection(changed), LAYER
    found = case.launch(place, case.operation, source, case.query_rows, case.offsets)
    assert_same_bits(found[0][: row + 1], case.run(place)[0][: row + 1])


def seen_infinities(place: Place, case: Case, cached: int, new: int, spread: int) -> None:
    """A value that is not finite reaches the rows that see it, and at most the others of a tile of ``spread`` rows."""
    case = replace(case, cached=[cached], new=[new])
    changed = clone(case.problem.collection)
    cache = changed.get_value_cache(LAYER)
    nothing = np.full(case.head_size, np.nan, cache.dtype.numpy)
    cache.store(0, 0, cached + new - 1, np.arange(case.head_size), nothing)
    source = place.collection(changed), LAYER
    found, _ = case.launch(place, case.operation, source, case.query_rows, case.offsets)
    assert np.isnan(found[-1].astype(np.float32)).all()
    apart = new - 1 if spread == 1 else (new - 1) // spread * spread
    assert_same_bits(found[:apart], case.run(place)[0][:apart])


def layers_by_turns(place: Place, local: Case, everywhere: Case, new: Sequence[int]) -> None:
    """Local layers (head size 256, four heads, a window) and global ones (512, one head, other pages), by turns."""
    cached = [1100, 600, 0]
    local = replace(local, cached=cached, new=new, head_size=256, heads=4, group=2, page_size=64, mask=window(1024))
    everywhere = replace(everywhere, cached=cached, new=new, head_size=512, group=8, page_size=128, sinks=True)
    for _ in range(2):
        local.check(place)
        everywhere.check(place)
