# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Whatever tables, lengths and offsets hold: no access leaves its memory, and every loop ends at what there is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
from reference import hostile
from reference.edges import ALL
from reference.places import Interpreted, Named, Unchecked
from reference.random_caches import random_problem

import kvarn as kv
from kvarn.dialect import schedules
from kvarn.dialect.layout import MAX_TOKENS
from kvarn.lowering import kernels

pytestmark = pytest.mark.whole

WORKER = Path(__file__).with_name("hostile_worker.py")
TRIES = "20" if os.environ.get("KVARN_TEST_ALL") else "3"  # batches of hostile contents
SECONDS = 300  # that a family may take, on a machine that does much else
ON_HOST = [f for f in hostile.FAMILIES if f not in hostile.OF_GPUS]


class Worker:
    """A process that runs families of operations; after one that ended it, the next runs in another."""

    def __init__(self, errors: Path) -> None:
        self.errors = errors
        self.process: Any = None

    def problem(self, family: str) -> str:
        """Why a family did not come to its end; empty where it did."""
        if self.process is None:
            command = [sys.executable, str(WORKER), TRIES]
            with self.errors.open("w") as stderr:
                self.process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=stderr, text=True)
        process, last = self.process, "the start"
        print(family, file=process.stdin, flush=True)
        limit = threading.Timer(SECONDS, process.kill)
        limit.start()
        for line in process.stdout:
            if line == "done\n":
                limit.cancel()
                return ""
            last = line.strip()
        limit.cancel()
        self.end()
        how = signal.Signals(-process.returncode).name if process.returncode < 0 else f"status {process.returncode}"
        # What the process has written last: a traceback, or faulthandler's, of whose threads the first ran.
        where = self.errors.read_text().partition("\n\nThread")[0].partition("\n\nExtension modules")[0]
        return f"{family} over {last}: ended by {how}\n{where[-3000:]}"

    def end(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            self.process.communicate()
            self.process = None


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    found = Worker(tmp_path_factory.mktemp("hostile") / "stderr")
    yield found
    found.end()


@pytest.mark.parametrize("family", ON_HOST)
def test_on_the_host_no_contents_lead_out_of_the_arrays(worker, family):
    problem = worker.problem(family)
    assert not problem, problem


def test_every_operation_is_of_a_family():
    place = Named()
    with place.active():
        for family in ON_HOST:
            for kind, seed, side in hostile.draws(family, 1):
                hostile.run(place, family, kind, seed, side)
    assert place.names == {name for name in schedules.OPERATIONS if kernels.expansion(name)}


@pytest.mark.parametrize("family", hostile.FAMILIES)
def test_in_gpu_code_no_contents_lead_out_of_the_arrays(family):
    """In make check one draw a kind of cache, but of attention."""
    place, draws = Interpreted("sm_90a"), list(hostile.draws(family, 2 if ALL else 1))
    with place.active():
        for kind, seed, side in draws if ALL else draws[: {"kernels": 1, "attention": 2}.get(family)]:
            hostile.run(place, family, kind, 100 + seed, side)


@pytest.fixture(params=["host", "sm_90a"])
def place(request):
    found = Unchecked() if request.param == "host" else Interpreted(request.param)
    with found.active():
        yield found


@pytest.mark.parametrize(
    ("kind", "length"),
    [("paged", 100_000), ("paged", 2**31 - 1), ("paged", 2**32 - 1), ("continuous", 2**31), ("fa3", 2**30)],
)
def test_a_length_past_the_table_counts_as_a_full_row_of_it(place, kind, length):
    """Also for kernels of the caller's: their loops over a cache's tokens end where its memory does."""

    @kv.kernel
    def lengths(cache: kv.KVCache, out: kv.Buffer[kv.i32, 2]):
        b = kv.block_id.x
        out[b, 0], out[b, 1] = cache.cache_length(b), cache.token_capacity()

    problem = random_problem(np.random.default_rng(1), kind, cached=[5, 9], new=[1, 1])
    given = np.array([length, 9], np.uint32)
    c = problem.collection
    whole = type(c)(c.blocks, given, c.lookup_table, c.max_seq_length, c.max_cache_length)
    room = c.kv_cache_dynamic_shape[1] if kind == "continuous" else np.shape(c.lookup_table)[-1] * c.page_size
    out = np.zeros((2, 2), np.int32)
    place.launch(lengths, 2, 1, whole.get_key_cache(0), out)
    assert out.tolist() == [[room, room], [9, room]]


@pytest.mark.parametrize(("offsets", "lengths"), [
    ([0, 4, 2**31, 11], [4, 7, 0]), ([2**32 - 1, 4, 3, 2**32 - 1], [0, 0, 8]), ([0, 2**30, 12, 5], [11, 0, 0]),
])  # fmt: skip
def test_a_length_of_ragged_rows_ends_with_them_and_is_not_negative(place, offsets, lengths):
    @kv.kernel
    def read(x: kv.MHAOperand, out: kv.Buffer[kv.i32, 1]):
        out[kv.block_id.x] = x.cache_length(kv.block_id.x)

    given = np.array([0, 4, 8, 11], np.uint32)
    x = kv.RaggedMHAOperand(np.zeros((11, 1, 1), np.float32), given)
    given[:] = offsets  # after they were checked
    out = np.full(3, -1, np.int32)
    place.launch(read, 3, 1, x, out)
    assert out.tolist() == lengths


@pytest.mark.parametrize("kind", ["continuous", "dense", "ragged"])
def test_a_token_past_its_region_is_read_as_the_last_one(place, kind):
    @kv.kernel
    def read(x: kv.MHAOperand, token: kv.i32, out: kv.Buffer[kv.f32, 1]):
        out[0] = x.load(1, token, 0, 0)

    buffer = np.arange(3 * 4, dtype=np.float32).reshape(3, 4, 1, 1)
    if kind == "continuous":
        table = np.array([0, 1, 2], np.uint32)
        x = kv.KVCacheMHAOperand(kv.ContinuousBatchingKVCache(buffer, table, table, 1, 4))
    elif kind == "dense":
        x = kv.LayoutTensorMHAOperand(buffer)
    else:
        x = kv.RaggedMHAOperand(buffer.reshape(12, 1, 1), np.array([0, 4, 8, 12], np.uint32))
    for token, expected in ((2, 6), (100, 11 if kind == "ragged" else 7), (-1, 11 if kind == "ragged" else 7)):
        out = np.zeros(1, np.float32)
        place.launch(read, 1, 1, x, token, out)
        assert out[0] == expected


def test_a_store_past_its_region_is_dropped(place):
    @kv.kernel
    def write(cache: kv.KVCache, token: kv.i32, value: kv.f32):
        cache.store(0, 0, token, 0, value)

    table = np.array([0, 1], np.uint32)
    blocks = np.zeros((2, 4, 1, 4), np.float32)
    cache = kv.ContinuousBatchingKVCache(blocks, table, table, 1, 4)
    for token in (4, 5, 100_000, 2**31 - 1, -1):
        place.launch(write, 1, 1, cache, token, 1.0)
    assert not blocks.any()
    place.launch(write, 1, 1, cache, 3, 1.0)
    assert blocks[0, 3, 0, 0] == blocks.sum() == 1.0


def test_attention_over_a_length_near_32_bits_ends_soon():
    """It saw each of the table's pages again and again, minutes long."""
    problem = random_problem(np.random.default_rng(2), cached=[5], new=[1])
    problem.collection.cache_lengths[0] = 2**30
    query = np.ones((1, 2, 16), np.float32)
    with Unchecked().active():
        kv.ops.attention(problem.collection, 0, query, problem.row_offsets)
        start = time.process_time()
        kv.ops.attention(problem.collection, 0, query, problem.row_offsets)
        assert time.process_time() - start < 5


def test_a_table_for_more_tokens_than_kernels_count_is_refused():
    blocks, lengths = np.zeros((1, 2, 1, 2**14, 1, 8), np.float16), np.zeros(1, np.uint32)
    table = np.zeros((1, MAX_TOKENS // 2**14 + 1), np.uint32)
    with pytest.raises(ValueError, match=r"lookup_table must have columns for at most 1073741824 tokens .*got 65537"):
        kv.PagedKVCacheCollection(blocks, lengths, table, 1, 1)
