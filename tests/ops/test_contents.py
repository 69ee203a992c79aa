# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tables that cannot be right are refused: on the host before anything runs, elsewhere with KVARN_CHECK."""

from __future__ import annotations

import numpy as np
import pytest
from reference.places import Interpreted, Place, Unchecked
from reference.random_caches import random_problem

import kvarn as kv
from kvarn.emulator import grid as ptx
from kvarn.env import env
from kvarn.runtime.host import HostKernelError

X = np.ones((4, 2, 16), np.float32)
ROWS = np.ones((4, 32), np.float32)
PADDED = np.ones((2, 3, 2, 16), np.float32)
RIGHT = np.array([0, 3, 4], np.uint32)


def collection(kind: str = "paged", lengths: tuple[int, int] = (5, 9)):
    c = random_problem(np.random.default_rng(1), kind, cached=[5, 9], new=[3, 2]).collection
    return type(c)(c.blocks, np.array(lengths, np.uint32), c.lookup_table, c.max_seq_length, c.max_cache_length)


# Operations of a table of row offsets of four rows.
OF_OFFSETS = {
    "append": lambda c, o: kv.ops.append(c, 0, X, X, o),
    "rope_append": lambda c, o: kv.ops.rope_append(c, 0, X, X, X, o, np.ones((64, 16), np.float32)),
    "project_append": lambda c, o: kv.ops.project_append(c, 0, ROWS, np.ones((64, 32), np.float32), o),
    "store_ragged": lambda c, o: kv.ops.store_ragged(c.get_key_cache(0), X, o),
    "rope": lambda c, o: kv.ops.rope(c, 0, X, o, np.ones((64, 16), np.float32)),
    "qk_norm": lambda c, o: kv.ops.qk_norm(c, 0, X, o, X[0, 0], X[0, 0]),
    "attention": lambda c, o: kv.ops.attention(c, 0, X, o),
    "gather": lambda c, o: kv.ops.gather(c.get_key_cache(0), np.zeros((4, 1), np.int32), o),
    "remap_sparse_indices": lambda c, o: kv.ops.remap_sparse_indices(
        np.zeros((4, 1), np.int32), o, np.zeros((2, 1), np.uint32), 16, 1
    ),
    "select_pages": lambda c, o: kv.ops.select_pages(c, 0, X, o, kv.PageSummaries(c), 2),
    "shift_tokens": lambda c, o: kv.ops.shift_tokens(np.zeros(4, np.int32), o, np.zeros(2, np.int32)),
}
WITHOUT_ROWS = {
    "rms_norm": lambda c, o: kv.ops.rms_norm(c.get_key_cache(0), X[0, 0], 1e-6, o),
    "iadd_2m": lambda c, o: kv.ops.iadd_2m(c, 0, np.ones((8, 32), np.float32), o),
    "commit": lambda c, o: kv.ops.commit(c, None, np.zeros((2, 3), np.int32), o),
    "increment_cache_lengths": lambda c, o: kv.ops.increment_cache_lengths(np.zeros(2, np.uint32), o),
    "summarize_pages": lambda c, o: kv.ops.summarize_pages(c, 0, kv.PageSummaries(c), o),
    "cache_row_offsets": lambda c, o: kv.ops.cache_row_offsets(o, np.zeros(2, np.uint32)),
}
OF_LENGTHS = (
    "commit",
    "append",
    "project_append",
    "rope_append",
    "store_ragged",
    "rope",
    "qk_norm",
    "attention",
    "rms_norm",
    "iadd_2m",
)


@pytest.mark.parametrize("name", [*OF_OFFSETS, *WITHOUT_ROWS])
def test_offsets_that_descend_or_leave_their_rows_are_refused(name):
    run = {**OF_OFFSETS, **WITHOUT_ROWS}[name]
    run(collection(), RIGHT)
    for offsets, message in (
        ([0, 4, 3], r"row_offsets must not descend, got 3 \(as int32\) after 4 at index 2"),
        ([-1, 2, 4], r"row_offsets must not be negative, got -1 \(as int32\) at index 0"),
        ([0, -5, 4], r"row_offsets must not descend, got -5 \(as int32\) after 0 at index 1"),
        ([0, 3, 5], r"row_offsets must end within the 4 rows of \w+, got 5"),
    ):
        if "end within" in message and name in WITHOUT_ROWS:
            continue
        for dtype in (np.int32, np.uint32):
            with pytest.raises(ValueError, match=f"kv.ops.{name}: {message}"):
                run(collection(), np.array(offsets, np.int64).astype(dtype))


def test_a_refused_call_has_written_nothing():
    c = collection()
    before = np.array(c.blocks)
    with pytest.raises(ValueError, match="must not descend"):
        kv.ops.append(c, 0, X, X, np.array([0, 4, 3], np.uint32))
    np.testing.assert_array_equal(c.blocks, before)


@pytest.mark.parametrize("kind", ["paged", "continuous", "fa3"])
@pytest.mark.parametrize("name", OF_LENGTHS)
def test_lengths_past_what_the_table_or_the_region_holds_are_refused(kind, name):
    run = {**OF_OFFSETS, **WITHOUT_ROWS}[name]
    handle = "cache" if name in ("store_ragged", "rms_norm") else "collection"
    for length in (400, 100_000, 2**31 - 1, 2**32 - 1):
        message = rf"kv.ops.{name}: {handle} has room for \d+ tokens of a sequence, got {length} cached and 3 new ones"
        with pytest.raises(ValueError, match=message):
            run(collection(kind, (length, 9)), RIGHT)
    run(collection(kind, (100_000, 9)), np.array([0, 0, 2], np.uint32))  # without new tokens it is not looked at


def test_counts_below_zero_or_past_the_padding_are_refused():
    c = collection()
    query = np.ones((2, 3, 2, 16), np.float32)
    calls = {
        "store_padded": lambda n: kv.ops.store_padded(c.get_key_cache(0), PADDED, n),
        "attention_padded": lambda n: kv.ops.attention_padded(c, 0, query, n),
        "rope_padded": lambda n: kv.ops.rope_padded(c, 0, query, n, np.ones((64, 16), np.float32)),
    }
    for name, run in calls.items():
        run(np.array([3, 0], np.int32))
        for counts, got in (([-1, 2], "-1 .as int32. at index 0"), ([3, 4], "4 .as int32. at index 1")):
            with pytest.raises(ValueError, match=rf"kv.ops.{name}: valid_lengths must be in \[0, 3\], got {got}"):
                run(np.array(counts, np.int32))


def test_what_has_tables_of_its_own_is_checked_too():
    c, offsets = collection(), np.array([0, 1, 4], np.uint32)
    rows, bad = np.ones((5, 8), np.float32), np.array([0, 6, 4], np.uint32)
    with pytest.raises(ValueError, match="merge_ragged: b_offsets must not descend"):
        kv.ops.merge_ragged(rows, offsets, rows, bad)
    with pytest.raises(ValueError, match="attention: kv_offsets must not descend"):
        kv.ops.attention(c, 0, X, RIGHT, kv_offsets=bad)
    with pytest.raises(
        ValueError, match=r"attention: collection has room .*got 9 cached and 99999 new ones of sequence 1"
    ):
        kv.ops.attention(c, 0, X, RIGHT, kv_offsets=np.array([0, 1, 100_000], np.uint32))
    with pytest.raises(ValueError, match="radd: row_offsets must span at most the 4 rows of a, got 5 from 2 on"):
        kv.ops.radd(c, 0, np.ones((4, 64), np.float32), np.array([2, 7], np.uint32), 1)
    kv.ops.radd(c, 0, np.ones((4, 64), np.float32), np.array([10, 13], np.uint32), 1)
    with pytest.raises(ValueError, match=r"convert: source has room for .*got 70000 cached of sequence 0"):
        kv.ops.convert(collection(lengths=(70_000, 1)).get_key_cache(0), c.get_key_cache(0))
    pages = kv.ForeignPages.flashinfer(
        np.zeros((4, 2, 8, 2, 16), np.float32), np.array([5, 25], np.uint32), np.zeros((2, 3), np.uint32)
    )
    with pytest.raises(ValueError, match=r"convert: source has room for 24 tokens of a sequence, got 25 cached"):
        kv.ops.convert(pages.key, c.get_key_cache(0))
    lengths = np.array([3, 4], np.uint32)
    dense = kv.LayoutTensorMHAOperand(np.ones((2, 6, 2, 16), np.float32), lengths=lengths)
    lengths[1] = 7
    with pytest.raises(ValueError, match=r"keys.lengths must be in \[0, 6\], got 7"):
        kv.ops.attention(dense, dense, X, RIGHT)
    starts = np.array([0, 5, 9], np.uint32)
    ragged = kv.RaggedMHAOperand(np.ones((9, 2, 16), np.float32), starts)
    starts[1] = 10
    with pytest.raises(ValueError, match=r"keys.offsets must not descend, got 9"):
        kv.ops.attention(ragged, ragged, X, RIGHT)


# --- KVARN_CHECK -----------------------------------------------------------------------------------

WRONG = {
    "row_offsets must not descend": (RIGHT[[0, 2, 1]], (5, 9)),
    "row_offsets must not exceed the number of rows": (np.array([0, 3, 5], np.uint32), (5, 9)),
    "row_offsets must not be negative": (np.array([2**32 - 1, 3, 4], np.uint32), (5, 9)),
    "collection must have room": (RIGHT, (5, 100_000)),
}


@pytest.mark.parametrize("name", ["append", "attention", "rope_append"])
@pytest.mark.parametrize("message", WRONG)
def test_checks_on_the_device_say_what_those_of_the_host_say(name, message):
    """Compiled for the host, and for a GPU in the emulator."""
    offsets, lengths = WRONG[message]
    for place, error in ((Unchecked(), HostKernelError), (Interpreted("sm_90a"), ptx.EmulationError)):
        with env.override(check=True), place.active():
            OF_OFFSETS[name](collection(), RIGHT)
            with pytest.raises(error, match=f"kv.{name}: {message}"):
                OF_OFFSETS[name](collection(lengths=lengths), offsets)


@pytest.mark.parametrize("place", [Place(), Interpreted("sm_90a")], ids=["host", "sm_90a"])
def test_checks_let_pass_what_is_right(place):
    with env.override(check=True), place.active():
        for run in (*OF_OFFSETS.values(), *WITHOUT_ROWS.values()):
            run(collection(), RIGHT)
        kv.ops.radd(collection(), 0, np.ones((4, 64), np.float32), np.array([10, 13], np.uint32), 1)
        kv.ops.store_padded(collection().get_key_cache(0), PADDED, np.array([3, 0], np.uint32))
        kv.ops.convert(collection().get_key_cache(0), collection("continuous").get_key_cache(0))
        dense = kv.LayoutTensorMHAOperand(np.ones((2, 6, 2, 16), np.float32))
        kv.ops.attention(dense, dense, X, RIGHT)
