# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Robustness of look-ups, accesses and stores on a GPU, over torch tensors: suites of tests/ops and tests/caches."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from reference import places

import kvarn as kv

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


MAPPED = "ops.test_robustness_huge"
SUITES = (
    "caches.test_robustness_lookups", "caches.test_robustness_elements", "ops.test_robustness_checks",
)  # fmt: skip
# What needs no device, and what maps host memory: its twin is below.
NOT_HERE = ("test_what_a_cache_cannot_do_is_refused_by_name", "test_rows_and_elements_beyond_31_bits_are_reached")
pytest.register_assert_rewrite(*SUITES, MAPPED)
huge = importlib.import_module(MAPPED)
lookups, *_ = suites = list(map(importlib.import_module, SUITES))
for suite in suites:
    globals().update({n: f for n, f in vars(suite).items() if n.startswith("test_") and n not in NOT_HERE})
forgetful = suites[-1].forgetful


def test_rows_and_elements_beyond_31_bits_are_reached_on_a_gpu(place):
    shape = (lookups.HUGE["pages"], 2, lookups.HUGE["layers"], lookups.HUGE["page_size"], 1, 1)
    blocks = torch.zeros(shape, dtype=torch.int8, device="cuda")
    parts = [place.put(x) for x in (np.array([5], np.uint32), lookups.huge_table())]
    lookups.check_huge(place, kv.PagedKVCacheCollection(blocks, *parts, 1, 256), blocks)


def zeros(shape, dtype):
    """A buffer of a GPU."""
    return torch.zeros(shape, dtype=places.Torch().put(np.zeros(1, dtype)).dtype, device="cuda")


@pytest.mark.parametrize("dtype", ["bf16", "i8"])
def test_writes_reach_the_end_of_a_huge_pool(place, dtype):
    huge.check_writes(huge.Pools(place, dtype, empty=zeros))


@pytest.mark.parametrize("dtype", ["bf16", "i8"])
def test_attention_reads_the_end_of_a_huge_pool(place, dtype):
    huge.check_reads(huge.Pools(place, dtype, empty=zeros), [None, *huge.KINDS[: 3 if dtype == "bf16" else 2]])


def test_attention_over_latent_rows_reads_the_end_of_a_huge_pool(place):
    huge.check_reads(huge.Pools(place, "bf16", True, empty=zeros), [{"kind": "latent"}, {"kind": "simt"}])


def test_listed_rows_reach_the_end_of_a_huge_pool(place):
    huge.check_listed(huge.Pools(place, "bf16", True, empty=zeros), [{"kind": "simt"}, {"kind": "latent"}])
