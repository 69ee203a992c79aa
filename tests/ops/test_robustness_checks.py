# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""KVARN_CHECK compiles other code for the operations, which must not change what a call does that breaks no rule."""

from __future__ import annotations

import numpy as np
import pytest
from reference.kinds import MMA
from reference.places import bits
from reference.random_caches import random_problem, random_values

import kvarn as kv
from kvarn.env import env
from kvarn.ops import reads, writes


@pytest.fixture
def forgetful(monkeypatch):
    """Makes the operations forget the programs of signatures that they have met: the variable counts when compiling."""

    def forget():
        for operation in (writes._APPEND, reads._ATTENTION):
            monkeypatch.setattr(operation, "_known", {})

    return forget


def test_operations_with_checks_do_what_they_do_without(place, forgetful):
    rng = np.random.default_rng(30)
    problem = random_problem(rng, "paged", "bf16", cached=[40, 0, 9], new=[1, 2, 1], head_size=32)
    key, value, query = (random_values(rng, (problem.tokens, 2, 32), kv.bf16) for _ in range(3))
    offsets, found = place.put(problem.row_offsets), []
    kinds: list[dict | None] = [None]
    if place.name != "host":
        kinds = [{"kind": "simt"}, MMA, {"kind": "decode", "max_queries": 2}]
    for check in (False, True):
        forgetful()
        with env.override(check=check):
            collection = place.collection(problem.collection)
            kv.ops.append(collection, 1, place.put(key), place.put(value), offsets)
            outs = []
            for kind in kinds:
                outs.append(place.put(np.zeros_like(query)))
                kv.ops.attention(collection, 1, place.put(query), offsets, out=outs[-1], schedule=kind)
            found.append([*place.buffers(collection), *map(place.get, outs)])
    forgetful()
    for plain, checked in zip(*found, strict=True):
        np.testing.assert_array_equal(bits(checked), bits(plain))
    assert np.isfinite(found[0][1].astype(np.float32)).all()
