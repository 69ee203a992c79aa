# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A value of a kernel that a function has kept from an earlier trace is refused by name; nothing dies of it."""

import subprocess
import sys

import numpy as np
import pytest

import kvarn as kv

F32, SPEC = kv.Buffer[kv.f32, 1], kv.CacheSpec("paged", kv.f32, num_heads=1, head_size=16, page_size=16)
saved = []


def kept(value):
    """The value of the first trace that was here."""
    saved.append(value)
    return saved[0]


def scalar(x, cache):
    x[0] = kept(x[1]) + 1.0


def vector(x, cache):
    x.store(0, value=kept(x.load(0, width=4)) * 2.0)


def lane(x, cache):
    x[0] = kept(x.load(0, width=4))[1]


def index(x, cache):
    x[kept(kv.thread_id.x)] = 1.0


def condition(x, cache):
    if kept(x[0]) > 0.0:
        x[1] = 2.0


def bound(x, cache):
    for i in range(kept(kv.block_id.x)):
        x[i] = 0.0


def buffer(x, cache):
    kept(x)[0] = 1.0


def pointer(x, cache):
    kept(x.address(0)).store(kv.f32(1.0))


def handle(x, cache):
    x[0] = kept(cache).load(0, 0, 0, 0)


def shared(x, cache):
    s = kept(kv.shared(4, kv.f32))
    s[0] = x[0]


KINDS = [scalar, vector, lane, index, condition, bound, buffer, pointer, handle, shared]


def compiled(body):
    return kv.compile(kv.kernel(body), F32, SPEC, target="sm_90a")


@pytest.mark.whole
@pytest.mark.parametrize("body", KINDS, ids=lambda f: f.__name__)
def test_a_kept_value_is_refused_where_it_is_used(body):
    saved.clear()
    compiled(body)
    with pytest.raises(kv.KernelError, match=r"of an earlier trace: a function of a kernel must not keep") as refused:
        compiled(body)
    assert refused.value.location.file == __file__


def test_a_kept_value_is_refused_by_its_name_before_a_launch():
    @kv.kernel
    def kernel(x: kv.Buffer[kv.f32, 1]):
        x[0] = kept(x[1])

    saved.clear()
    x = np.ones(2, np.float32)
    kernel[1, 1](x)
    with pytest.raises(kv.KernelError, match=r"'saved\[0\]' is <f32 value> of an earlier trace"):
        kernel[1, 1](x)


SCORE = """
import numpy as np, kvarn as kv
saved, said = [], []

def score(s, b, h, q, k, z):
    saved.append({kept})
    return s + {used}

blocks = np.ones((3, 2, 1, 4, 1, 8), np.float32)
c = kv.PagedKVCacheCollection(blocks, np.array([5], np.uint32), np.array([[0, 1, 2]], np.uint32), 1, 12)
query, offsets = np.ones((1, 1, 8), np.float32), np.array([0, 1], np.uint32)
z = np.ones(4, np.float32)
for window in (None, 3, 4, 5):
    try:
        kv.ops.attention(c, 0, query, offsets, score=(score, z), chunk=window)
        said.append("")
    except Exception as error:
        said.append(str(error))
        assert isinstance(error, TypeError), repr(error)
assert not any("of an earlier trace" not in s for s in said[1:]), said
"""


KEPT = [
    ("k", "kv.f32(saved[0])"),
    *(pytest.param(*x, marks=pytest.mark.thorough) for x in (("s", "saved[0]"), ("z", "saved[0][0]"))),
]


@pytest.mark.parametrize(("kept", "used"), KEPT)
def test_what_a_score_keeps_is_refused(kept, used, tmp_path):
    (tmp_path / "score.py").write_text(SCORE.format(kept=kept, used=used))
    done = subprocess.run([sys.executable, "score.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
