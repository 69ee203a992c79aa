# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Run in a process of its own by test_extending.py, where examples/page_tools is installed: one function a rule.

What is declared here stays declared, so no other test may see it. Prints the outcome of each function, or of those
named, as JSON.
"""

import contextlib
import functools
import io
import json
import re
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest

import kvarn as kv
from kvarn.dialect import page_orders
from kvarn.tools import cli, kv_opt, reduce

FOLDER = Path.cwd()
RULES = {}
CACHE = '!kv.cache<"paged", f16, 2 : i64, 64 : i64, false, 4 : i64, none, 1 : i64>'
PREFETCH = f"""
module attributes {{gpu.container_module}} {{
  gpu.module @kernels {{
    gpu.func @touch(%c: {CACHE}, %i: i32) kernel attributes {{kv.args = [{{kind = "cache", name = "c"}},
        {{kind = "scalar", name = "i", dtype = "i32"}}]}} {{
      "kv.prefetch_page"(%c, %i, %i, %i) : ({CACHE}, i32, i32, i32) -> ()
      gpu.return
    }}
  }}
}}
"""
KERNELS = """
import kvarn as kv
from page_tools import prefetch_page

@kv.kernel
def sums(keys: kv.KVCache, out: kv.Buffer[kv.f32, 2]):
    b, t = kv.block_id.x, kv.thread_id.x
    if t < keys.cache_length(b):
        prefetch_page(keys, b, t, 0)
        out[b, t] = keys.load(b, 0, t, 0, dtype=kv.f32)
"""
SPEC = "keys=paged(f16, num_heads=2, head_size=64, page_size=4)"
HERE = ["kernels.py:sums", f"--spec={SPEC}", "--target=sm_90a"]
DROP = "--insert-after=hoist-kv-lookups=drop-prefetches"


def rule(function):
    RULES[function.__name__] = function
    return function


def run(command, *arguments):
    """(exit status, stdout, stderr) of a command, in this process."""
    out, err = io.TextIOWrapper(io.BytesIO(), write_through=True), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = command(list(arguments))
    return status, out.buffer.getvalue().decode(), err.getvalue()


def kernels():
    return cli.find_kernel("kernels.py:sums")


def pool():
    blocks = np.full((9, 2, 2, 4, 2, 64), np.nan, np.float16)
    lengths = np.array([10, 0, 5], np.uint32)
    table = np.array([[3, 1, 7], [0, 0, 0], [2, 5, 0]], np.uint32)
    for b, length in enumerate(lengths):
        for t in range(int(length)):
            slot = blocks[table[b, t // 4], 0, 1, t % 4]
            slot[:] = np.random.default_rng(t).standard_normal((2, 64))
    return kv.PagedKVCacheCollection(blocks, lengths, table, 1, 11)


def bounds():
    """What kv.page_bounds gives, and what it is to give."""
    import page_tools

    collection = pool()
    least, expected = (np.full((3, 4, 2, 64), 7, np.float32) for _ in range(2))
    largest = least.copy()
    for b, length in enumerate(collection.cache_lengths):
        for p in range(-(-int(length) // 4)):
            rows = collection.blocks[collection.lookup_table[b, p], 0, 1, : int(length) - 4 * p]
            expected[b, p] = rows.min(0)
    page_tools.page_bounds(collection, 1, least, largest)
    return least, largest, expected


# --- rules -----------------------------------------------------------------------------------------


@rule
def kv_opt_knows_an_installed_operation():
    """First of all: nothing here has imported the package."""
    assert "page_tools" not in sys.modules
    (FOLDER / "touch.mlir").write_text(PREFETCH)
    status, out, err = run(kv_opt.main, "touch.mlir", "--hoist-kv-lookups")
    assert status == 0, err
    assert '"kv.prefetch_page"(%arg0, %arg1, %arg1, %arg1, %0)' in out


@rule
def a_rule_may_make_kv_operations_and_knows_the_target():
    for target, count in (("sm_90a", 1), ("host", 0)):
        assert kv.compile(PREFETCH, target=target).stages["lower-kv-access"].count("nvvm.prefetch") == count


@rule
def an_operation_of_a_package_runs_on_the_host_and_in_the_emulator():
    least, largest, expected = bounds()
    assert np.array_equal(least, expected)
    assert (largest >= least).all()
    assert (largest > least).any()
    with kv.emulated("sm_90a"):
        assert np.array_equal(bounds()[1], largest)


@rule
def its_pass_counts_in_launches_and_operations():
    """Seen from outside: a pass beside it meets the prefetch, or does not."""
    from kvarn.lowering.rewrite import ops_named

    met = []

    def meet(module):
        met.append(len(ops_named(module, "kv.prefetch_page")))

    for passes in (meet, ["drop-prefetches", meet]):
        with kv.emulated("sm_90a"), kv.pipeline({"after:hoist-kv-lookups": passes}):
            kernels()[3, 12](pool().get_key_cache(0), np.zeros((3, 12), np.float32))
            bounds()
    assert met == [1, 1, 0, 0]


@rule
def the_commands_know_both():
    status, out, err = run(cli.main, "compile", *HERE)
    assert status == 0, err
    assert "prefetch.global.L2" in out
    status, out, err = run(cli.main, "compile", *HERE, DROP)
    assert status == 0, err
    assert "prefetch.global.L2" not in out
    status, out, err = run(cli.main, "explain", *HERE, DROP, "--diff=drop-prefetches")
    assert status == 0, err
    assert '-        "kv.prefetch_page"' in out


@rule
def kvarn_compile_takes_an_operation_of_a_package():
    buffers = [f"--spec={name}=buffer(f32, (none, none, 2, 64))" for name in ("least", "largest")]
    spec = "--spec=" + SPEC.replace("keys=", "collection=")
    status, out, err = run(cli.main, "compile", "--op=page_tools:page_bounds", spec, *buffers, "--emit=kv")
    assert status == 0, err
    assert out.count('"kv.page_bounds"(%arg0, %arg1, %arg2, %arg3)') == 1


@rule
def bisect_lowers_it_in_its_other_process():
    inputs = ["--grid=2", "--block=8", "--lengths=5,3", "--arg=out=2x8"]
    status, out, err = run(cli.main, "bisect", *HERE, DROP, *inputs)
    assert status == 0, out + err
    assert re.search("drop-prefetches +ok", out), out


# --- a kind of caches -------------------------------------------------------------------------------


@kv.kernel
def move(source: kv.KVCache, destination: kv.KVCache):
    b, t, c = kv.block_id.x, kv.block_id.y, kv.thread_id.x
    if t < source.cache_length(b):
        for h in range(source.num_heads):
            destination.store(b, h, t, c * 8, source.load(b, h, t, c * 8, width=8))


def split_and_packed(fill=np.nan):
    """Keys [N, H, D / 8, P, 8] with a value for each element, and the packed pool of the same tokens; other order."""
    import page_tools

    split = np.arange(9 * 2 * 8 * 4 * 8).reshape(9, 2, 8, 4, 8).astype(np.float16)
    lengths, table = np.array([10, 0, 5], np.uint32), np.array([[3, 1, 7], [0, 0, 0], [2, 5, 0]], np.uint32)
    keys = page_tools.SplitKeys(split, lengths, table, 1, 11)
    pages = np.full((9, 4, 2, 64), fill, np.float16)
    return split, keys, pages, kv.PagedKVCache(pages, lengths, (table + 4) % 9, 1, 11)


@rule
def caches_of_a_kind_of_a_package_are_read_and_written():
    """On the host, in the emulator and in the NumPy model; what no token has stays as it was."""
    for place in (contextlib.nullcontext, functools.partial(kv.emulated, "sm_90a")):
        split, keys, pages, packed = split_and_packed()
        with place():
            move[(3, 10), 8](keys, packed)
        for b, n in enumerate(keys.cache_lengths.tolist()):
            for t in range(n):
                rows = split[keys.lookup_table[b, t // 4], :, :, t % 4].reshape(2, 64)
                assert np.array_equal(pages[packed.lookup_table[b, t // 4], t % 4], rows)
                assert np.array_equal(keys.load(b, np.arange(2), t, 0, width=64), rows)
        assert np.isnan(pages).sum() == pages.size - 15 * 128
        again, back, _, _ = split_and_packed()
        before = again.copy()
        again[:] = 0
        with place():
            move[(3, 10), 8](packed, back)
        assert np.array_equal(again[again != 0], before[again != 0])
        assert (again != 0).sum() == 15 * 128


@rule
def accesses_of_such_a_kind_are_as_wide_as_its_runs():
    import page_tools  # noqa: F401

    spec = kv.CacheSpec("split_keys", kv.f16, 2, 64, 4)
    made = kv.compile(move, spec, kv.CacheSpec("paged", kv.f16, 2, 64, 4), target="sm_90a")
    assert "vector<8xf16>" in made.stages["lower-kv-access"]
    assert "kind split_keys: element" in dict(kv.extensions.registered())
    spec = f"--spec={SPEC.replace('paged', 'split_keys')}"
    status, out, err = run(cli.main, "compile", "kernels.py:sums", spec, "--target=sm_90a", "--emit=kv")
    assert status == 0, err
    assert '!kv.cache<"split_keys", f16' in out


@rule
def what_does_not_know_its_order_refuses_such_a_kind():
    _, keys, _, _ = split_and_packed()
    specs = (keys.spec, kv.Buffer[kv.f32, 1])

    @kv.kernel
    def tile(keys: kv.KVCache, out: kv.Buffer[kv.f32, 1]):
        out[0] = keys.block_paged_ptr(0, 0, 0).load(kv.f32)

    @kv.kernel
    def wide(keys: kv.KVCache, out: kv.Buffer[kv.f32, 1]):
        out[0] = keys.load(0, 0, 0, 0, width=16, dtype=kv.f32)[0]

    with pytest.raises(kv.KernelError, match=r"'kv\.block_ptr' op cannot take a split_keys cache: the order"):
        kv.compile(tile, *specs, target="sm_90a")
    with pytest.raises(
        kv.KernelError, match="width must divide 8, the contiguous elements of a split_keys cache, got 16"
    ):
        kv.compile(wide, *specs, target="sm_90a")
    with pytest.raises(ValueError, match="'kv\\.store_ragged' op cannot take a split_keys cache"):
        kv.ops.store_ragged(keys, np.zeros((1, 2, 64), np.float16), np.array([0, 1, 1, 1], np.uint32))
    with pytest.raises(ValueError, match="head_size of a split_keys cache must be a multiple of 8, got 60"):
        kv.CacheSpec("split_keys", kv.f16, 2, 60, 4)
    with pytest.raises(ValueError, match="kind must be one of paged, continuous, fa3, split_keys, got 'zork'"):
        kv.CacheSpec("zork", kv.f16, 2, 64, 4)
    for method in (lambda: keys.block_paged_ptr(0, 0, 0), lambda: keys.row_idx(0, 0)):
        with pytest.raises(TypeError, match="a split_keys cache has no rows; use load and store"):
            method()
    with pytest.raises(ValueError, match="kind 'paged' is taken"):
        page_orders.add_kind(page_orders.PageOrder("paged", max, max))


# --- what is declared while contexts are there -------------------------------------------------------

LATE = """
from kvarn.dialect.base import Kv
from kvarn.dialect.ext import I32, Operand, Result, infer_result
from kvarn.dialect.effects import Pure
from kvarn.dialect import verify
from kvarn.dsl.values import Value, i32_value
from kvarn.lowering.passes.kv.lower_kv_access import RULES
from kvarn.lowering.pass_base import kv_pass
from mlir.dialects import arith
import kvarn as kv

class TwiceOp(Kv.Operation, name="twice", traits=[Pure]):
    "Twice x."
    x: Operand[I32]
    out: Result[I32] = infer_result()

@kv.intrinsic
def twice(x):
    return Value(TwiceOp(i32_value(x)).out, kv.i32)

@RULES.lowers(TwiceOp)
def lower_twice(op, options):
    return {body}

@kv_pass()
def pass_of_late(module):
    pass
"""


def late(body):
    (FOLDER / "late.py").write_text(LATE.replace("{body}", body))
    return kv.extend("late.py")


def doubled(module):
    twice = module.twice

    @kv.kernel
    def double(x: kv.Buffer[kv.i32, 1]):
        x[0] = twice(x[0])

    x = np.array([21], np.int32)
    double[1, 1](x)
    return int(x[0])


@rule
def an_extension_may_come_after_the_first_context_and_be_edited():
    keys = []
    for body, answer in (("arith.addi(op.x, op.x)", 42), ("op.x", 21), ("arith.addi(op.x, op.x)", 42)):
        assert doubled(late(body)) == answer
        keys.append(kv.extensions.digest_of(kv.extensions.registered()))
    assert keys[0] == keys[2] != keys[1]
    assert "pass-of-late" in kv.lowering.names()
    assert str(FOLDER / "late.py") in kv.extensions.needed()


@rule
def the_digest_of_code_from_outside_is_the_same_in_every_process():
    """Printed by `digest.py`, in another process, and by this one; an address in it would differ."""
    late("op.x")
    (FOLDER / "digest.py").write_text(
        "import kvarn as kv; kv.extend('late.py'); print(kv.extensions.digest_of(kv.extensions.registered()))"
    )
    done = subprocess.run([sys.executable, "digest.py"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == kv.extensions.digest_of(kv.extensions.registered())


@rule
def a_file_takes_the_place_of_an_installed_pass():
    """While one edits it; a warning says so."""
    (FOLDER / "drop_prefetches.py").write_text("def run(module):\n    raise ValueError('mine')\n")
    with pytest.warns(RuntimeWarning, match="takes the place of that of the package page-tools"):
        status, _, err = run(kv_opt.main, "touch.mlir", "--load-pass=drop_prefetches.py", "--drop-prefetches")
    assert status == 1
    assert "pass 'drop-prefetches' raised ValueError: mine" in err


@rule
def a_name_has_one_owner():
    (FOLDER / "thief.py").write_text(LATE.replace('name="twice"', 'name="load"').replace("{body}", "op.x"))
    with pytest.raises(ValueError, match=r"kv\.load is declared by kvarn\.dialect\.ops\.access \(LoadOp\)"):
        kv.extend("thief.py")


@rule
def kv_opt_and_kvarn_take_extend():
    late("op.x")
    text = 'func.func @f(%x: i32) -> i32 { %y = "kv.twice"(%x) : (i32) -> i32 return %y : i32 }'
    (FOLDER / "twice.mlir").write_text(text)
    status, out, err = run(kv_opt.main, "twice.mlir", "--extend=late.py", "--pass-of-late", "--lower-kv-access")
    assert status == 0, err
    assert "return %arg0" in out
    status, out, err = run(
        reduce.main, "twice.mlir", "--extend=late.py", "--interesting=grep -q kv.twice {}", "--quiet"
    )
    assert status == 0, err
    assert "kv.twice" in out
    (FOLDER / "nothing.py").write_text("x = 1\n")
    status, _, err = run(kv_opt.main, "twice.mlir", "--extend=nothing.py")
    assert status == 1
    assert "kv-opt: error: extension" in err


if __name__ == "__main__":
    (FOLDER / "kernels.py").write_text(KERNELS)
    outcomes = {}
    for name in sys.argv[1:] or RULES:
        try:
            RULES[name]()
            outcomes[name] = ""
        except BaseException:
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))
